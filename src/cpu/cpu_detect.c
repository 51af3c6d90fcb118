/* cpu_detect.c: which instruction sets may be used here. */
#include "cpu/kernel_sets.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static uint64_t enabled_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool all_set(uint64_t value, uint64_t bits)
{
    return (value & bits) == bits;
}

uint32_t fkda_cpu_features(void)
{
    /* Bits of XCR0: which registers the system saves. */
    const uint64_t ymm = 1u << 1 | 1u << 2, zmm = ymm | 7u << 5, tiles = zmm | 3u << 17;
    uint32_t a, b, c, d, features = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    bool fma = all_set(c, bit_FMA | bit_AVX | bit_F16C);
    uint64_t saved = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    uint32_t leaf7_b = b, leaf7_d = d, leaf71_a = 0;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
        leaf71_a = a;

    if (fma && leaf7_b & bit_AVX2 && all_set(saved, ymm))
        features |= FKDA_FEATURE_AVX2_FMA;
    if (features && all_set(leaf7_b, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) &&
        all_set(saved, zmm))
        features |= FKDA_FEATURE_AVX512;
    if (features & FKDA_FEATURE_AVX512 && leaf71_a & 1u << 5)
        features |= FKDA_FEATURE_AVX512_BF16;
    if (features & FKDA_FEATURE_AVX512_BF16 && all_set(leaf7_d, 1u << 22 | 1u << 24) &&
        all_set(saved, tiles))
        features |= FKDA_FEATURE_AMX_BF16;
    return features;
}

#else

uint32_t fkda_cpu_features(void)
{
    return 0;
}

#endif
