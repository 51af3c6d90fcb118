/* tensor.c: dtypes, instruction set names, and the constructors of the public structs. */
#include <string.h>

#include "core/plan.h"

const char *fkda_dtype_name(fkda_dtype dtype)
{
    switch (dtype) {
    case FKDA_DTYPE_INVALID:
        break;
    case FKDA_BF16:
        return "bfloat16";
    case FKDA_F32:
        return "float32";
    case FKDA_F64:
        return "float64";
    case FKDA_I32:
        return "int32";
    case FKDA_I64:
        return "int64";
    case FKDA_F16:
        return "float16";
    }
    return "invalid";
}

size_t fkda_dtype_bytes(fkda_dtype dtype)
{
    switch (dtype) {
    case FKDA_DTYPE_INVALID:
        break;
    case FKDA_BF16:
    case FKDA_F16:
        return 2;
    case FKDA_F32:
    case FKDA_I32:
        return 4;
    case FKDA_F64:
    case FKDA_I64:
        return 8;
    }
    return 0;
}

const char *fkda_isa_name(fkda_isa isa)
{
    switch (isa) {
    case FKDA_ISA_AUTO:
        return "auto";
    case FKDA_ISA_PORTABLE:
        return "portable";
    case FKDA_ISA_AVX2:
        return "avx2";
    case FKDA_ISA_AVX512:
        return "avx512";
    case FKDA_ISA_AVX512_BF16:
        return "avx512_bf16";
    case FKDA_ISA_AMX_BF16:
        return "amx_bf16";
    case FKDA_ISA_COUNT:
        break;
    }
    return "invalid";
}

/* A wrong ndim, shape or dtype is kept as it is: validation names it. An overflowing stride
 * saturates to INT64_MAX, which no validation accepts for a dimension longer than 1. */
fkda_tensor fkda_tensor_contiguous(void *data, fkda_dtype dtype, int ndim, const int64_t *shape)
{
    fkda_tensor tensor = {.data = data, .dtype = (int32_t)dtype, .ndim = ndim};
    if (ndim < 0 || ndim > FKDA_MAX_NDIM || !shape)
        return tensor;
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = step;
        if (__builtin_mul_overflow(step, shape[i] > 0 ? shape[i] : 1, &step))
            step = INT64_MAX;
    }
    return tensor;
}

void fkda_args_init(fkda_args *args)
{
    if (!args)
        return;
    memset(args, 0, sizeof *args);
    args->version = FKDA_ARGS_VERSION;
    args->flags = FKDA_FLAGS_DEFAULT;
    args->gate = FKDA_GATE_BOUNDED;
    args->lower_bound = -5.0;
}
