/* bf16.h: exact conversions between bfloat16 and the wider floats.
 *
 * A bfloat16 is the upper half of a float. Rounding is to nearest, ties to even; infinities stay,
 * a NaN stays a (quiet) NaN with its sign, subnormals are kept.
 */
#ifndef FKDA_BF16_H
#define FKDA_BF16_H

#include <stdint.h>
#include <string.h>

static inline float fkda_bf16_to_float(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t fkda_bf16_from_bits(uint32_t bits)
{
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) |
                          0x0040u); /* quiet: rounding must not make it an infinity */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline uint16_t fkda_bf16_from_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return fkda_bf16_from_bits(bits);
}

/* Rounded once: the float in between is rounded to odd (toward zero, then the last bit set when
 * anything was lost), which leaves the second rounding what the first would have done. */
static inline uint16_t fkda_bf16_from_double(double d)
{
    float f = (float)d;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((double)f != d && d == d) {
        if ((double)f > d ? d >= 0 : d < 0)
            bits--; /* was rounded away from zero */
        bits |= 1u;
    }
    return fkda_bf16_from_bits(bits);
}

#endif /* FKDA_BF16_H */
