/* device_call.h: calls for a GPU as plans see them. Pointers are numbers: nothing reads there. */
#ifndef FKDA_TEST_DEVICE_CALL_H
#define FKDA_TEST_DEVICE_CALL_H

#include "flash_kda.h"

static inline void *at(uintptr_t address)
{
    return (void *)address;
}

static inline fkda_tensor tensor(uintptr_t address, fkda_dtype dtype, int ndim, int64_t a,
                                 int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    return fkda_tensor_contiguous(at(address), dtype, ndim, shape);
}

/* bf16, K = 128; everything that may be absent is. */
static inline fkda_args device_call_of(int64_t B, int64_t T, int64_t H, int64_t HV, int64_t V)
{
    fkda_args args;
    fkda_args_init(&args);
    args.device = FKDA_CUDA;
    args.scale = 0.125;
    args.q = tensor(0x10000000000, FKDA_BF16, 4, B, T, H, 128);
    args.k = tensor(0x20000000000, FKDA_BF16, 4, B, T, H, 128);
    args.v = tensor(0x30000000000, FKDA_BF16, 4, B, T, HV, V);
    args.g = tensor(0x40000000000, FKDA_BF16, 4, B, T, HV, 128);
    args.beta = tensor(0x50000000000, FKDA_BF16, 3, B, T, HV, 0);
    args.out = tensor(0x60000000000, FKDA_BF16, 4, B, T, HV, V);
    return args;
}

#endif
