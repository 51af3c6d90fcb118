/* test_validate.c: every way in which options, tensors and shapes can be wrong, one case each.
 *
 * A case spoils a valid call, then wants from each entry point that takes it: this status, a reason
 * that begins so, outputs and report untouched, inputs unchanged.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/plan.h"
#include "problem.h"

enum { FORWARD = 1, REFERENCE = 2, DECODE = 4, SIZE = 8, PREFILL = 3, RUN = 7, ALL = 15 };
#define INVALID     FKDA_ERROR_INVALID_ARGUMENT
#define UNSUPPORTED FKDA_ERROR_UNSUPPORTED

static fkda_status size_call(const fkda_args *args, char *reason, size_t reason_bytes)
{
    size_t bytes = 12345;
    fkda_status status = fkda_workspace_bytes(args, &bytes, reason, reason_bytes);
    assert_true(status == FKDA_OK || bytes == 12345);
    return status;
}

/* B 2, T 8, H 2, HV 4, K 32, V 16; decode gets the same without initial_state. */
static void refuse(void (*spoil)(struct problem *p), fkda_status status, const char *reason,
                   int calls)
{
    static const problem_call call[] = {fkda_forward, fkda_reference, fkda_decode, size_call};
    for (int i = 0; i < 4; i++) {
        if (!(calls >> i & 1))
            continue;
        struct problem p;
        problem_init(&p, (struct problem_sizes){.B = 2, .T = 8, .H = 2, .HV = 4, .K = 32});
        if (call[i] == fkda_decode)
            p.args.initial_state = (fkda_tensor){.data = NULL};
        problem_run(&p, call[i]); /* the call is right before it is spoilt */
        spoil(&p);
        problem_refused(&p, call[i], status, reason);
        problem_free(&p);
    }
}

static void reshape(fkda_tensor *tensor, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    *tensor = fkda_tensor_contiguous(tensor->data, (fkda_dtype)tensor->dtype, tensor->ndim, shape);
}

static fkda_tensor absent(void)
{
    return (fkda_tensor){.data = NULL};
}

#define A p->args

/* name, calls, status, beginning of the reason, what spoils it */
#define OPTION_CASES(X)                                                                         \
    X(version_0, ALL, INVALID, "version: 0, wanted 1", A.version = 0;)                          \
    X(version_2, ALL, INVALID, "version: 2, wanted 1", A.version = 2;)                          \
    X(flags_unknown, ALL, INVALID, "flags: 0xb, wanted no bit outside 0x7", A.flags |= 8;)      \
    X(flags_high, ALL, INVALID, "flags: 0x80000000", A.flags = 1u << 31;)                       \
    X(gate_negative, ALL, INVALID, "gate: -1, wanted 0 (bounded)", A.gate = -1;)                \
    X(gate_3, ALL, INVALID, "gate: 3, wanted", A.gate = 3;)                                     \
    X(device_2, ALL, INVALID, "device: 2, wanted 0 (CPU)", A.device = 2;)                       \
    X(cuda_reference, REFERENCE, UNSUPPORTED, "device: cuda, fkda_reference has no",            \
      A.device = 1;)                                                                            \
    X(isa_negative, ALL, INVALID, "isa: -1, wanted", A.isa = -1;)                               \
    X(isa_6, ALL, INVALID, "isa: 6, wanted", A.isa = FKDA_ISA_COUNT;)                           \
    X(precision_3, ALL, INVALID, "precision: 3, wanted 0 (default)", A.precision = 3;)          \
    X(precision_negative, ALL, INVALID, "precision: -5, wanted", A.precision = -5;)             \
    X(threads_negative, ALL, INVALID, "num_threads: -1, wanted from 0", A.num_threads = -1;)    \
    X(threads_many, ALL, INVALID, "num_threads: 1025, wanted from 0", A.num_threads = 1025;)    \
    X(scale_0, ALL, INVALID, "scale: 0, wanted a finite", A.scale = 0;)                         \
    X(scale_nan, ALL, INVALID, "scale: ", A.scale = (double)NAN;)                               \
    X(scale_inf, ALL, INVALID, "scale: -inf, wanted a finite", A.scale = -(double)INFINITY;)    \
    X(scale_not_float, ALL, INVALID, "scale: 1e+39, wanted a finite", A.scale = 1e39;)          \
    X(scale_subnormal, ALL, INVALID, "scale: 1e-39, wanted a finite", A.scale = 1e-39;)         \
    X(scale_vanishes, ALL, INVALID, "scale: -1e-60, wanted a finite", A.scale = -1e-60;)        \
    X(bound_minus_7, ALL, INVALID, "lower_bound: -7, wanted from -5 to 0", A.lower_bound = -7;) \
    X(bound_just_below, ALL, INVALID, "lower_bound: -5.0000000000000",                          \
      A.lower_bound = -5 - 1e-14;)                                                              \
    X(bound_1, ALL, INVALID, "lower_bound: 1, wanted from -5 to 0", A.lower_bound = 1;)         \
    X(bound_nan, ALL, INVALID, "lower_bound: ", A.lower_bound = (double)NAN;)                   \
    X(bound_inf, ALL, INVALID, "lower_bound: -inf", A.lower_bound = -(double)INFINITY;)         \
    X(activated_A_log, ALL, INVALID, "A_log: present, wanted absent",                           \
      A.gate = FKDA_GATE_ACTIVATED;)                                                            \
    X(activated_dt_bias, ALL, INVALID, "dt_bias: present, wanted absent",                       \
      A.gate = FKDA_GATE_ACTIVATED;                                                             \
      A.A_log = absent();)

#define TENSOR_CASES(X)                                                                            \
    X(q_absent, ALL, INVALID, "q: absent, wanted [B, T, H, K]", A.q = absent();)                   \
    X(k_absent, ALL, INVALID, "k: absent, wanted [B, T, H, K]", A.k = absent();)                   \
    X(v_absent, ALL, INVALID, "v: absent, wanted [B, T, HV, V]", A.v = absent();)                  \
    X(g_absent, ALL, INVALID, "g: absent, wanted [B, T, HV, K]", A.g = absent();)                  \
    X(beta_absent, ALL, INVALID, "beta: absent, wanted [B, T, HV]", A.beta = absent();)            \
    X(out_absent, ALL, INVALID, "out: absent, wanted [B, T, HV, V]", A.out = absent();)            \
    X(q_3d, ALL, INVALID, "q: 3 dimensions, wanted [B, T, H, K]", A.q.ndim = 3;)                   \
    X(q_6d, ALL, INVALID, "q: 6 dimensions, wanted [B, T, H, K]", A.q.ndim = 6;)                   \
    X(q_0d, ALL, INVALID, "q: 0 dimensions, wanted [B, T, H, K]", A.q.ndim = 0;)                   \
    X(v_negative_ndim, ALL, INVALID, "v: -2 dimensions", A.v.ndim = -2;)                           \
    X(beta_4d, ALL, INVALID, "beta: 4 dimensions, wanted [B, T, HV]", A.beta.ndim = 4;)            \
    X(A_log_2d, ALL, INVALID, "A_log: 2 dimensions, wanted [HV]", A.A_log.ndim = 2;)               \
    X(dt_bias_3d, ALL, INVALID, "dt_bias: 3 dimensions, wanted [HV, K] or", A.dt_bias.ndim = 3;)   \
    X(q_float16, ALL, INVALID, "q: dtype float16 (6), wanted bfloat16 or float32",                 \
      A.q.dtype = FKDA_F16;)                                                                       \
    X(k_float64, ALL, INVALID, "k: dtype float64 (3), wanted bfloat16 or float32",                 \
      A.k.dtype = FKDA_F64;)                                                                       \
    X(g_int32, ALL, INVALID, "g: dtype int32 (4), wanted", A.g.dtype = FKDA_I32;)                  \
    X(v_dtype_0, ALL, INVALID, "v: dtype invalid (0), wanted", A.v.dtype = 0;)                     \
    X(beta_dtype_32, ALL, INVALID, "beta: dtype invalid (32), wanted", A.beta.dtype = 32;)         \
    X(beta_dtype_33, ALL, INVALID, "beta: dtype invalid (33), wanted", A.beta.dtype = 33;)         \
    X(beta_dtype_negative, ALL, INVALID, "beta: dtype invalid (-31), wanted", A.beta.dtype = -31;) \
    X(A_log_bf16, ALL, INVALID, "A_log: dtype bfloat16 (1), wanted float32",                       \
      A.A_log.dtype = FKDA_BF16;)                                                                  \
    X(dt_bias_bf16, ALL, INVALID, "dt_bias: dtype bfloat16 (1), wanted float32",                   \
      A.dt_bias.dtype = FKDA_BF16;)                                                                \
    X(out_float64, FORWARD | DECODE | SIZE, INVALID, "out: dtype float64 (3), wanted bfloat16",    \
      A.out.dtype = FKDA_F64;)                                                                     \
    X(final_float64, FORWARD | DECODE, INVALID, "final_state: dtype float64 (3), wanted bfloat16", \
      A.final_state.dtype = FKDA_F64;)                                                             \
    X(final_float16, ALL, INVALID, "final_state: dtype float16 (6), wanted bfloat16 or float32",   \
      A.final_state.dtype = FKDA_F16;)                                                             \
    X(cu_float32, ALL, INVALID, "cu_seqlens: dtype float32 (2), wanted int32 or int64",            \
      A.cu_seqlens = A.A_log;)                                                                     \
    X(indices_float32, ALL, INVALID, "state_indices: dtype float32 (2), wanted int32 or int64",    \
      A.state_indices = A.A_log;)                                                                  \
    X(q_negative_size, ALL, INVALID, "q: shape [2, -8, 2, 32], wanted no negative size",           \
      A.q.shape[1] = -8;)                                                                          \
    X(k_overflow, ALL, INVALID, "k: shape [2, 4611686018427387904, 2, 32], wanted a product",      \
      A.k.shape[1] = INT64_C(1) << 62;)                                                            \
    X(q_overflow_when_empty, ALL, INVALID, "q: shape [0, 4611686018427387904, 2, 32], wanted a",   \
      A.q.shape[0] = 0;                                                                            \
      A.q.shape[1] = INT64_C(1) << 62;)                                                            \
    X(q_last_stride, ALL, INVALID, "q: stride 2 of dimension 3, wanted 1", A.q.stride[3] = 2;)     \
    X(v_last_stride_0, ALL, INVALID, "v: stride 0 of dimension 3, wanted 1", A.v.stride[3] = 0;)   \
    X(beta_last_stride, ALL, INVALID, "beta: stride 3 of dimension 2, wanted 1",                   \
      A.beta.stride[2] = 3;)                                                                       \
    X(g_negative_stride, ALL, INVALID, "g: stride -128 of dimension 1, wanted 0 or more",          \
      A.g.stride[1] = -128;)                                                                       \
    X(A_log_negative_stride, ALL, INVALID, "A_log: stride -1 of dimension 0, wanted 0 or more",    \
      A.A_log.stride[0] = -1;)                                                                     \
    X(cu_stride_0, ALL, INVALID, "cu_seqlens: stride 0 of dimension 0, wanted 1 or more",          \
      A.cu_seqlens = INDICES(p, FKDA_I32, 0, 0);                                                   \
      A.cu_seqlens.stride[0] = 0;)                                                                 \
    X(slots_stride_0, ALL, INVALID, "state_indices: stride 0 of dimension 0, wanted 1 or more",    \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1);                                                \
      A.state_indices.stride[0] = 0;)                                                              \
    X(state_image, ALL, INVALID, "final_state: stride 33 of dimension 2, wanted 32 (contiguous [", \
      A.final_state.stride[2] = 33;)                                                               \
    X(initial_image, PREFILL, INVALID, "initial_state: stride 2 of dimension 3, wanted 1",         \
      A.initial_state.stride[3] = 2;)                                                              \
    X(q_far_stride, ALL, INVALID, "q: shape [2, 8, 2, 32] and its strides reach past",             \
      A.q.stride[0] = INT64_MAX;)                                                                  \
    X(q_far_sum, ALL, INVALID, "q: shape [2, 8, 2, 32] and its strides reach past",                \
      A.q.stride[0] = INT64_MAX / 2;                                                               \
      A.q.stride[1] = INT64_MAX / 8;)                                                              \
    X(q_far_bytes, ALL, INVALID, "q: shape [2, 8, 2, 32] and its strides reach past",              \
      A.q.stride[0] = INT64_MAX / 2;)                                                              \
    X(q_null, RUN, INVALID, "q: data is NULL, wanted [2, 8, 2, 32] elements", A.q.data = NULL;)    \
    X(beta_null, RUN, INVALID, "beta: data is NULL, wanted [2, 8, 4]", A.beta.data = NULL;)        \
    X(out_null, RUN, INVALID, "out: data is NULL, wanted", A.out.data = NULL;)                     \
    X(A_log_null, RUN, INVALID, "A_log: data is NULL, wanted [4]", A.A_log.data = NULL;)           \
    X(state_null, RUN, INVALID, "final_state: data is NULL", A.final_state.data = NULL;)           \
    X(q_unaligned, RUN, INVALID, "q: data at ", A.q.data = (char *)A.q.data + 2;)                  \
    X(out_unaligned, RUN, INVALID, "out: data at ", A.out.data = (char *)A.out.data + 1;)          \
    X(bf16_unaligned, RUN, INVALID, "v: data at ", A.v.dtype = FKDA_BF16;                          \
      A.v.data = (char *)A.v.data + 1;)

#define SHAPE_CASES(X)                                                                             \
    X(k_head_size, ALL, INVALID, "k: shape [2, 8, 2, 16], wanted [2, 8, 2, 32] (q's)",             \
      reshape(&A.k, 2, 8, 2, 16);)                                                                 \
    X(k_batch, ALL, INVALID, "k: shape [1, 8, 2, 32], wanted [2, 8, 2, 32]",                       \
      reshape(&A.k, 1, 8, 2, 32);)                                                                 \
    X(v_tokens, ALL, INVALID, "v: shape [2, 7, 4, 16], wanted [2, 8, 4, 16] (B, T of q)",          \
      reshape(&A.v, 2, 7, 4, 16);)                                                                 \
    X(g_heads, ALL, INVALID, "g: shape [2, 8, 2, 32], wanted [2, 8, 4, 32]",                       \
      reshape(&A.g, 2, 8, 2, 32);)                                                                 \
    X(beta_heads, ALL, INVALID, "beta: shape [2, 8, 2], wanted [2, 8, 4]",                         \
      reshape(&A.beta, 2, 8, 2, 0);)                                                               \
    X(A_log_heads, ALL, INVALID, "A_log: shape [2], wanted [4] (HV of v)", A.A_log.shape[0] = 2;)  \
    X(dt_bias_heads, ALL, INVALID, "dt_bias: shape [3, 32], wanted [4, 32]",                       \
      A.dt_bias.shape[0] = 3;)                                                                     \
    X(dt_bias_flat, ALL, INVALID, "dt_bias: shape [127], wanted [128]", A.dt_bias.ndim = 1;        \
      A.dt_bias.shape[0] = 127; A.dt_bias.stride[0] = 1;)                                          \
    X(out_value_size, ALL, INVALID, "out: shape [2, 8, 4, 15], wanted [2, 8, 4, 16] (v's)",        \
      reshape(&A.out, 2, 8, 4, 15);)                                                               \
    X(no_heads, ALL, INVALID, "q: H = 0 heads, wanted at least 1", A.q.shape[2] = 0;               \
      A.k.shape[2] = 0;)                                                                           \
    X(heads_not_multiple, ALL, INVALID, "v: HV = 3 heads, wanted a multiple of 2 (q's)",           \
      A.v.shape[2] = 3;)                                                                           \
    X(no_value_heads, ALL, INVALID, "v: HV = 0 heads, wanted a multiple of 2", A.v.shape[2] = 0;)  \
    X(head_size_20, ALL, UNSUPPORTED, "q: head size K = 20, wanted a multiple of 16 from 16 to",   \
      A.q.shape[3] = 20;                                                                           \
      A.k.shape[3] = 20;)                                                                          \
    X(head_size_0, ALL, UNSUPPORTED, "q: head size K = 0, wanted", A.q.shape[3] = 0;               \
      A.k.shape[3] = 0;)                                                                           \
    X(head_size_272, ALL, UNSUPPORTED, "q: head size K = 272, wanted",                             \
      reshape(&A.q, 2, 8, 2, 272);                                                                 \
      reshape(&A.k, 2, 8, 2, 272); A.q.data = problem_input(p, 2 * 8 * 2 * 272 * 4);               \
      A.k.data = problem_input(p, 2 * 8 * 2 * 272 * 4);)                                           \
    X(value_size_8, ALL, UNSUPPORTED, "v: head size V = 8, wanted", A.v.shape[3] = 8;)             \
    X(initial_sequences, PREFILL | SIZE, INVALID, "initial_state: shape [1, 4, 16, 32], wanted [", \
      A.initial_state.shape[0] = 1;)                                                               \
    X(state_transposed, ALL, INVALID, "final_state: shape [2, 4, 32, 16], wanted [2, 4, 16, 32]",  \
      reshape(&A.final_state, 2, 4, 32, 16);)                                                      \
    X(cu_with_batch, ALL, INVALID, "cu_seqlens: present with B = 2, wanted B = 1",                 \
      A.cu_seqlens = INDICES(p, FKDA_I32, 0, 8);)                                                  \
    X(cu_empty, ALL, INVALID, "cu_seqlens: shape [0], wanted [N + 1]",                             \
      A.q.shape[0] = A.k.shape[0] = A.v.shape[0] = A.g.shape[0] = 1;                               \
      A.beta.shape[0] = A.out.shape[0] = 1; A.cu_seqlens = INDICES(p, FKDA_I32, 0);                \
      A.cu_seqlens.shape[0] = 0;)                                                                  \
    X(indices_count, ALL, INVALID, "state_indices: shape [3], wanted [2] (B of q)",                \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1, -1);)                                           \
    X(accepted_in_prefill, PREFILL | SIZE, INVALID, "num_accepted_tokens: present, wanted absent", \
      A.num_accepted_tokens = INDICES(p, FKDA_I64, 1, 1);)                                         \
    X(indices_2d, PREFILL | SIZE, INVALID, "state_indices: 2 dimensions, wanted 1",                \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1);                                                \
      A.state_indices.ndim = 2; A.state_indices.shape[1] = 1;)                                     \
    X(initial_in_decode, DECODE, INVALID, "initial_state: present, wanted absent",                 \
      A.initial_state = A.final_state;)                                                            \
    X(decode_without_state, DECODE, INVALID, "final_state: absent, wanted the state",              \
      A.final_state = absent();)                                                                   \
    X(checkpoints_in_decode, DECODE, INVALID, "checkpoint_state: present, wanted absent",          \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, A.final_state.shape);                  \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0);)                                          \
    X(accepted_alone, DECODE, INVALID, "num_accepted_tokens: present, wanted together with",       \
      A.num_accepted_tokens = INDICES(p, FKDA_I64, 1, 1);)                                         \
    X(accepted_with_1d, DECODE, INVALID, "num_accepted_tokens: present, wanted together with",     \
      A.num_accepted_tokens = INDICES(p, FKDA_I64, 1, 1);                                          \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1);)                                               \
    X(slots_2d_alone, DECODE, INVALID, "state_indices: 2 dimensions, wanted 1 without num_acc",    \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1);                                                \
      A.state_indices.ndim = 2; A.state_indices.shape[1] = 1;)                                     \
    X(checkpoint_no_offsets, PREFILL | SIZE, INVALID, "checkpoint_offsets: absent, wanted",        \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, A.final_state.shape);)                 \
    X(checkpoint_no_state, PREFILL | SIZE, INVALID, "checkpoint_state: absent, wanted",            \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0);)                                          \
    X(checkpoint_only_indptr, PREFILL, INVALID, "checkpoint_state: absent, wanted",                \
      A.checkpoint_indptr = INDICES(p, FKDA_I64, 0, 0, 0);)                                        \
    X(checkpoint_image, PREFILL, INVALID, "checkpoint_state: shape [2, 2, 16, 32], wanted [2, 4,", \
      const int64_t shape[] = {2, 2, 16, 32};                                                      \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, shape);                                \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0);)                                          \
    X(checkpoint_offsets_count, PREFILL, INVALID, "checkpoint_offsets: shape [3], wanted [2]",     \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, A.final_state.shape);                  \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0, 0);)                                       \
    X(checkpoint_indptr_count, PREFILL, INVALID, "checkpoint_indptr: shape [2], wanted [3]",       \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, A.final_state.shape);                  \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0);                                           \
      A.checkpoint_indptr = INDICES(p, FKDA_I64, 0, 2);)                                           \
    X(checkpoints_not_even, PREFILL, INVALID, "checkpoint_state: M = 3, wanted a multiple of N",   \
      const int64_t shape[] = {3, 4, 16, 32};                                                      \
      A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, shape);                                \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0, 0);)

#define OVERLAP_CASES(X)                                                                           \
    X(out_is_v, RUN, INVALID, "out: shares memory with v, wanted memory of its own", A.out = A.v;) \
    X(out_meets_q, RUN, INVALID, "out: shares memory with q, wanted memory of its own",            \
      float *both = problem_input(p, 4 * 4096);                                                    \
      A.q.data = both; A.out.data = both + 511 * 2;)                                               \
    X(out_meets_beta, RUN, INVALID, "out: shares memory with beta",                                \
      A.beta.data = (float *)A.out.data + 1023;                                                    \
      A.beta.shape[0] = 2;)                                                                        \
    X(out_is_final, RUN, INVALID, "out: shares memory with final_state",                           \
      A.final_state.data = A.out.data;)                                                            \
    X(state_shifted, PREFILL, INVALID,                                                             \
      "final_state: shares memory with initial_state, wanted mem",                                 \
      float *both = problem_output(p, 4 * 8192);                                                   \
      A.initial_state.data = both; A.final_state.data = both + 2048;)                              \
    X(state_other_dtype, PREFILL, INVALID, "final_state: shares memory with initial_state",        \
      A.initial_state.data = A.final_state.data;                                                   \
      A.initial_state.dtype = FKDA_BF16;)                                                          \
    X(state_other_stride, PREFILL, INVALID, "final_state: shares memory with initial_state",       \
      A.initial_state.data = A.final_state.data;                                                   \
      A.initial_state.stride[0] = 0;)                                                              \
    X(state_is_dt_bias, RUN, INVALID, "final_state: shares memory with dt_bias",                   \
      A.dt_bias.data = A.final_state.data;)                                                        \
    X(out_is_indices, RUN, INVALID, "out: shares memory with state_indices",                       \
      A.state_indices = INDICES(p, FKDA_I64, 0, 1);                                                \
      memset(A.out.data, 0, 4096); A.state_indices.data = A.out.data;                              \
      ((int64_t *)A.out.data)[1] = 1; p->buffers[8].output = false;)                               \
    X(checkpoint_is_final, PREFILL, INVALID, "final_state: shares memory with checkpoint_state",   \
      A.checkpoint_state = A.final_state;                                                          \
      A.checkpoint_offsets = INDICES(p, FKDA_I64, 0, 0);)                                          \
    X(out_repeats_rows, RUN, INVALID, "out: stride 0 of dimension 1 makes elements overlap, want", \
      A.out.stride[1] = 0;)                                                                        \
    X(out_rows_too_near, RUN, INVALID, "out: stride 63 of dimension 1 makes elements overlap, wa", \
      A.out.stride[1] = 63;)                                                                       \
    X(final_repeats_heads, RUN, INVALID, "final_state: stride 0 of dimension 1 makes elements",    \
      A.final_state.stride[1] = 0;)                                                                \
    X(workspace_meets_v, RUN, INVALID, "workspace: shares memory with v, wanted memory",           \
      A.workspace = A.v.data;                                                                      \
      A.workspace_bytes = 64;)                                                                     \
    X(workspace_meets_out, RUN, INVALID, "workspace: shares memory with out, wanted memory",       \
      A.workspace = (char *)A.out.data + 4095;                                                     \
      A.workspace_bytes = 1;)                                                                      \
    X(workspace_wraps, RUN, INVALID, "workspace_bytes: ", A.workspace = A.v.data;                  \
      A.workspace_bytes = SIZE_MAX;)

#define DEFINE(name, calls, status, reason, ...)     \
    static void spoil_##name(struct problem *p)      \
    {                                                \
        __VA_ARGS__                                  \
    }                                                \
    static void test_##name(void **state)            \
    {                                                \
        (void)state;                                 \
        refuse(spoil_##name, status, reason, calls); \
    }
#define LIST(name, ...) cmocka_unit_test(test_##name),

OPTION_CASES(DEFINE)
TENSOR_CASES(DEFINE)
SHAPE_CASES(DEFINE)
OVERLAP_CASES(DEFINE)

static void test_null_args(void **state)
{
    (void)state;
    char reason[FKDA_REASON_BYTES];
    size_t bytes = 7;
    assert_int_equal(fkda_forward(NULL, reason, sizeof reason), INVALID);
    assert_string_equal(reason, "args: NULL, wanted a fkda_args");
    assert_int_equal(fkda_decode(NULL, NULL, 0), INVALID);
    assert_int_equal(fkda_reference(NULL, reason, 1), INVALID);
    assert_string_equal(reason, "");
    assert_int_equal(fkda_workspace_bytes(NULL, &bytes, reason, sizeof reason), INVALID);
    assert_int_equal(bytes, 7);
}

/* The longest reason there can be still fits FKDA_REASON_BYTES: `refuse` looks for room left. */
static void spoil_longest(struct problem *p)
{
    const int64_t shape[] = {1, 4, 1, 1};
    A.checkpoint_state = problem_poisoned(p, FKDA_F32, 4, shape);
    A.checkpoint_state.shape[0] = 999999999999999;
    A.checkpoint_state.shape[2] = 999;
    A.checkpoint_state.shape[1] = 1;
    A.checkpoint_state.stride[0] = 1000;
    A.checkpoint_state.stride[2] = 1;
    A.checkpoint_offsets = INDICES(p, FKDA_I64, 0);
}

static void test_longest_reason(void **state)
{
    (void)state;
    refuse(spoil_longest, INVALID,
           "checkpoint_state: shape [999999999999999, 1, 999, 1], wanted [999999999999999, 4, 16, ",
           FORWARD);
}

/* Sequences without tokens cost no memory: shapes alone say how many there are. */
static void test_more_sequences_than_can_be_counted(void **state)
{
    (void)state;
    const int64_t heads = INT64_C(1) << 42, many = INT64_C(1) << 50;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 0});
    p.args.initial_state = p.args.final_state = p.args.A_log = p.args.dt_bias = absent();
    p.args.q.shape[2] = p.args.k.shape[2] = p.args.v.shape[2] = heads;
    p.args.g.shape[2] = p.args.beta.shape[2] = p.args.out.shape[2] = heads;
    p.args.cu_seqlens = fkda_tensor_contiguous(NULL, FKDA_I32, 1, (const int64_t[]){many + 1});
    size_t bytes = 7;
    assert_int_equal(fkda_workspace_bytes(&p.args, &bytes, p.reason, sizeof p.reason), INVALID);
    assert_string_equal(p.reason, "cu_seqlens: N = 1125899906842624, wanted N HV V and N T to fit "
                                  "64 bits");
    assert_int_equal(bytes, 7);
    problem_free(&p);
}

/* ---- What is allowed ------------------------------------------------------------------------- */

static void accept(struct problem *p, problem_call call)
{
    problem_run(p, call);
    problem_free(p);
}

static void test_in_place_state_is_allowed(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 3, .H = 2});
    memset(p.args.final_state.data, 0, 2 * 16 * 16 * 4);
    p.args.initial_state = p.args.final_state;
    p.args.initial_state.stride[0] = 12345; /* of a dimension of size 1: no difference */
    accept(&p, fkda_forward);
}

static void test_broadcast_inputs_are_allowed(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 5, .H = 2});
    p.args.q.stride[0] = 0;
    p.args.g.stride[1] = 0;
    p.args.beta.stride[0] = 0;
    p.args.A_log.stride[0] = 0;
    p.args.dt_bias.stride[0] = 0;
    p.args.initial_state.stride[0] = 0;
    accept(&p, fkda_forward);
}

static void test_unused_strides_are_free(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 1});
    fkda_tensor *tensors[] = {&p.args.q, &p.args.out, &p.args.beta, &p.args.final_state};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++)
            tensors[i]->stride[j] = j ? INT64_MAX : -7;
    p.args.beta.stride[2] = -1;
    p.args.A_log.stride[0] = INT64_MIN;
    accept(&p, fkda_forward);
}

static void test_nothing_at_all(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 0});
    p.args.q.data = p.args.k.data = p.args.v.data = p.args.g.data = NULL;
    p.args.beta.data = p.args.out.data = NULL;
    problem_run(&p, fkda_forward);
    for (int64_t i = 0; i < problem_elements(&p.args.final_state); i++)
        assert_true(problem_get(&p.args.final_state, i) == problem_get(&p.args.initial_state, i));
    problem_free(&p);

    problem_init(&p, (struct problem_sizes){.T = 4});
    fkda_tensor *tensors[] = {
        &p.args.q,   &p.args.k,    &p.args.v,           &p.args.g,
        &p.args.out, &p.args.beta, &p.args.final_state, &p.args.initial_state};
    for (int i = 0; i < 8; i++)
        tensors[i]->shape[0] = 0, tensors[i]->data = NULL;
    problem_run(&p, fkda_reference);
    problem_run(&p, fkda_forward);
    problem_assert_untouched(&p);
    problem_free(&p);

    /* More sequences than could be looked at one by one, of no tokens each. */
    problem_init(&p, (struct problem_sizes){.T = 0});
    p.args.initial_state = p.args.final_state = absent();
    for (int i = 0; i < 6; i++)
        tensors[i]->shape[0] = INT64_C(1) << 40, tensors[i]->data = NULL;
    problem_run(&p, fkda_reference);
    problem_run(&p, fkda_forward);
    problem_free(&p);
}

static void test_optional_tensors_may_be_absent(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 3});
    p.args.A_log = p.args.dt_bias = p.args.initial_state = p.args.final_state = absent();
    accept(&p, fkda_forward);
}

static void test_every_bound_in_range(void **state)
{
    (void)state;
    static const double bounds[] = {-5, -1e-3, -0.0, 0, -1e-300};
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
        struct problem p;
        problem_init(&p, (struct problem_sizes){.T = 3});
        p.args.lower_bound = bounds[i];
        accept(&p, fkda_forward);
    }
    struct problem p; /* not looked at by the other gates */
    problem_init(&p, (struct problem_sizes){.T = 3});
    p.args.gate = FKDA_GATE_SOFTPLUS;
    p.args.lower_bound = (double)NAN;
    accept(&p, fkda_forward);
}

static void test_float64_in_reference(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 3});
    p.args.out = problem_poisoned(&p, FKDA_F64, 4, p.args.out.shape);
    p.args.final_state = problem_poisoned(&p, FKDA_F64, 4, p.args.final_state.shape);
    p.args.initial_state = problem_random(&p, FKDA_F64, 4, p.args.initial_state.shape);
    accept(&p, fkda_reference);
}

int main(void)
{
    unsetenv("FLASH_KDA_CPU_ISA");
    unsetenv("FLASH_KDA_PRECISION");
    unsetenv("FLASH_KDA_NUM_THREADS");
    const struct CMUnitTest tests[] = {
        OPTION_CASES(LIST) TENSOR_CASES(LIST) SHAPE_CASES(LIST) OVERLAP_CASES(LIST)
            cmocka_unit_test(test_null_args),
        cmocka_unit_test(test_longest_reason),
        cmocka_unit_test(test_more_sequences_than_can_be_counted),
        cmocka_unit_test(test_in_place_state_is_allowed),
        cmocka_unit_test(test_broadcast_inputs_are_allowed),
        cmocka_unit_test(test_unused_strides_are_free),
        cmocka_unit_test(test_nothing_at_all),
        cmocka_unit_test(test_optional_tensors_may_be_absent),
        cmocka_unit_test(test_every_bound_in_range),
        cmocka_unit_test(test_float64_in_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
