/* test_cuda_forward.c: the CUDA forward by itself, for compute-sanitizer (sanitize.sh).
 *
 * No framework and no pool of memory stands between: every tensor and the workspace are allocations
 * of their own and exact size, and what the library has to write is left as cudaMalloc gave it. So
 * memcheck sees one byte too many, and initcheck a read of what nobody wrote, or, as every output
 * is copied back whole, an element that was left out.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "problem.h"

enum { K = 128, MAX_MEMORY = 20, MANY = 200 /* chains: more than multiprocessors */ };

/* A call on the device; `host` is its twin, whose outputs the reference fills. */
struct call {
    struct problem host;
    fkda_args args;
    fkda_report report;
    void *memory[MAX_MEMORY];
    int num_memory;
};

static int skip_without_gpu(void)
{
    fkda_info info;
    assert_int_equal(fkda_get_info(&info, NULL, 0), FKDA_OK);
    if (info.num_devices == 0)
        print_message("no usable GPU: %s\n", info.cuda_status);
    return info.num_devices == 0;
}

static void check_cuda(cudaError_t error)
{
    if (error != cudaSuccess)
        fail_msg("%s", cudaGetErrorString(error));
}

static void *device_memory(struct call *call, size_t bytes)
{
    void *memory = NULL;
    assert_true(call->num_memory < MAX_MEMORY);
    check_cuda(cudaMalloc(&memory, bytes));
    call->memory[call->num_memory++] = memory;
    return memory;
}

/* The bytes of a tensor from its first element to its last. */
static size_t extent_bytes(const fkda_tensor *tensor)
{
    int64_t last = 0;
    for (int i = 0; i < tensor->ndim; i++)
        last += (tensor->shape[i] - 1) * tensor->stride[i];
    return (size_t)(last + 1) * fkda_dtype_bytes(tensor->dtype);
}

static fkda_tensor on_device(struct call *call, const fkda_tensor *host, bool input)
{
    fkda_tensor there = *host;
    if (!host->data)
        return there;
    there.data = device_memory(call, extent_bytes(host));
    if (input)
        check_cuda(cudaMemcpy(there.data, host->data, extent_bytes(host), cudaMemcpyHostToDevice));
    return there;
}

/* q, k, v, out bf16, the other inputs of this dtype; no states. */
static void begin(struct call *call, struct problem_sizes s, fkda_dtype others)
{
    struct problem *p = &call->host;
    *call = (struct call){0};
    fkda_args_init(&p->args);
    p->args.scale = 1.0 / sqrt((double)K);
    const int64_t key[] = {s.B, s.T, s.H, K}, value[] = {s.B, s.T, s.HV, s.V};
    const int64_t gate[] = {s.B, s.T, s.HV, K};
    p->args.q = problem_random(p, FKDA_BF16, 4, key);
    p->args.k = problem_random(p, FKDA_BF16, 4, key);
    p->args.v = problem_random(p, FKDA_BF16, 4, value);
    p->args.g = problem_random(p, others, 4, gate);
    p->args.beta = problem_random(p, others, 3, gate);
    p->args.A_log = problem_random(p, FKDA_F32, 1, gate + 2);
    p->args.dt_bias = problem_random(p, FKDA_F32, 2, gate + 2);
    p->args.out = problem_poisoned(p, FKDA_BF16, 4, value);
}

static fkda_tensor states(struct call *call, int64_t count, fkda_dtype dtype, bool input)
{
    const fkda_tensor *v = &call->host.args.v;
    const int64_t shape[] = {count, v->shape[2], v->shape[3], K};
    return input ? problem_random(&call->host, dtype, 4, shape)
                 : problem_poisoned(&call->host, dtype, 4, shape);
}

static void make_device_args(struct call *call)
{
    fkda_args *to = &call->args;
    const fkda_args *from = &call->host.args;
    *to = *from;
    to->device = FKDA_CUDA;
    to->report = &call->report;
    fkda_tensor *const inputs[] = {&to->q,
                                   &to->k,
                                   &to->v,
                                   &to->g,
                                   &to->beta,
                                   &to->A_log,
                                   &to->dt_bias,
                                   &to->initial_state,
                                   &to->cu_seqlens,
                                   &to->state_indices,
                                   &to->checkpoint_offsets,
                                   &to->checkpoint_indptr};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        *inputs[i] = on_device(call, inputs[i], true);
    to->out = on_device(call, &from->out, false);
    to->checkpoint_state = on_device(call, &from->checkpoint_state, false);
    to->final_state = from->final_state.data == from->initial_state.data
                          ? to->initial_state /* in place, or both absent */
                          : on_device(call, &from->final_state, false);
}

/* Sets FLASH_KDA_CUDA_PATH to what leads to these kernels. */
static void choose_path(const char *kernel)
{
    setenv("FLASH_KDA_CUDA_PATH",
           strncmp(kernel, "cuda/sm80/", 10) == 0          ? "sm80"
           : strncmp(kernel, "cuda/sm90/forward", 17) == 0 ? "sm90-forward"
                                                           : "sm90",
           1);
}

/* Copies a result back and compares it with the reference's. */
static void compare(const fkda_tensor *there, const fkda_tensor *want, double bound)
{
    if (!there->data)
        return;
    fkda_tensor got = *there;
    got.data = malloc(extent_bytes(there));
    assert_non_null(got.data);
    check_cuda(cudaMemcpy(got.data, there->data, extent_bytes(there), cudaMemcpyDeviceToHost));
    double error = 0, size = 0;
    for (int64_t i = 0; i < problem_elements(&got); i++) {
        const double w = problem_get(want, i), e = problem_get(&got, i) - w;
        error += e * e;
        size += w * w;
    }
    free(got.data);
    const double ratio = sqrt(error / size);
    print_message("%.3g of RMS(reference)\n", ratio);
    assert_true(ratio <= bound); /* false for a NaN */
}

/* Runs both, compares, frees. `kernel`: what the report has to say; the path in it is chosen. */
static void run_and_compare(struct call *call, const char *kernel)
{
    char reason[FKDA_REASON_BYTES] = "";
    make_device_args(call);
    choose_path(kernel);
    const bool sm90 = strncmp(kernel, "cuda/sm90", 9) == 0;
    fkda_status status = fkda_forward(&call->args, reason, sizeof reason);
    if (status == FKDA_ERROR_WORKSPACE) { /* not one byte more than this call needs */
        call->args.workspace_bytes = call->report.workspace_bytes;
        call->args.workspace = device_memory(call, call->args.workspace_bytes);
        status = fkda_forward(&call->args, reason, sizeof reason);
    }
    if (status != FKDA_OK)
        fail_msg("%s", reason);
    check_cuda(cudaDeviceSynchronize());
    assert_string_equal(call->report.kernel, kernel);

    const fkda_args *want = &call->host.args;
    if (fkda_reference(want, reason, sizeof reason) != FKDA_OK)
        fail_msg("%s", reason);
    compare(&call->args.out, &want->out, sm90 ? 6e-3 : 4e-3);
    compare(&call->args.final_state, &want->final_state,
            sm90 || want->final_state.dtype == FKDA_BF16 ? 3e-3 : 2e-3);
    compare(&call->args.checkpoint_state, &want->checkpoint_state, 2e-3);
    for (int i = 0; i < call->num_memory; i++)
        check_cuda(cudaFree(call->memory[i]));
    problem_free(&call->host);
}

#define PROLOGUE(call)          \
    (void)state;                \
    if (skip_without_gpu())     \
        skip(); /* no return */ \
    struct call call

static void test_dense_with_a_partial_tail(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 2, .T = 41, .H = 2, .HV = 2, .V = 128}, FKDA_BF16);
    call.host.args.initial_state = states(&call, 2, FKDA_F32, true);
    call.host.args.final_state = states(&call, 2, FKDA_F32, false);
    run_and_compare(&call, "cuda/sm80/prepare_bounded+recurrence_2");
}

static void test_without_states(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 1, .T = 16, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    run_and_compare(&call, "cuda/sm80/prepare_bounded+recurrence_2");
}

static void test_packed_softplus_grouped_with_checkpoints(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 1, .T = 100, .H = 2, .HV = 4, .V = 128}, FKDA_F32);
    struct problem *p = &call.host;
    p->args.gate = FKDA_GATE_SOFTPLUS;
    p->args.cu_seqlens = INDICES(p, FKDA_I64, 0, 17, 17, 65, 100);
    p->args.initial_state = states(&call, 4, FKDA_BF16, true);
    p->args.final_state = states(&call, 4, FKDA_BF16, false);
    p->args.checkpoint_state = states(&call, 4, FKDA_F32, false);
    p->args.checkpoint_offsets = INDICES(p, FKDA_I32, 16, 0, 48, 32);
    p->args.checkpoint_indptr = INDICES(p, FKDA_I32, 0, 1, 2, 3, 4);
    run_and_compare(&call, "cuda/sm80/prepare_softplus+recurrence_2");
}

static void test_pool_in_place_with_padding(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 3, .T = 20, .H = 1, .HV = 2, .V = 48}, FKDA_BF16);
    struct problem *p = &call.host;
    p->args.state_indices = INDICES(p, FKDA_I32, 4, -1, 0);
    p->args.initial_state = p->args.final_state = states(&call, 5, FKDA_F32, true);
    run_and_compare(&call, "cuda/sm80/prepare_bounded+recurrence_1");
}

static void test_activated_gate_many_sequences(void **state)
{
    PROLOGUE(call);
    enum { N = MANY };
    begin(&call, (struct problem_sizes){.B = 1, .T = 2 * N, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    struct problem *p = &call.host;
    int64_t cu[N + 1];
    for (int n = 0; n <= N; n++)
        cu[n] = 2 * n;
    for (int64_t i = 0; i < problem_elements(&p->args.g); i++)
        problem_set(&p->args.g, i, -fabs(problem_get(&p->args.g, i)));
    p->args.gate = FKDA_GATE_ACTIVATED;
    p->args.A_log = p->args.dt_bias = (fkda_tensor){0};
    p->args.cu_seqlens = problem_indices(p, FKDA_I64, N + 1, cu);
    p->args.final_state = states(&call, N, FKDA_F32, false);
    run_and_compare(&call, "cuda/sm80/prepare_activated+recurrence_4");
}

static void test_wide_heads(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = MANY, .T = 5, .H = 1, .HV = 1, .V = 256}, FKDA_BF16);
    call.host.args.initial_state = states(&call, MANY, FKDA_F32, true);
    run_and_compare(&call, "cuda/sm80/prepare_bounded+recurrence_8");
}

/* Rows 131 elements apart: no wide access is aligned. */
static void test_odd_rows(void **state)
{
    PROLOGUE(call);
    enum { T = 35, ROW = 131 };
    begin(&call, (struct problem_sizes){.B = 1, .T = T, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    fkda_args *args = &call.host.args;
    fkda_tensor *const rows[] = {&args->q, &args->k, &args->v, &args->g};
    for (int i = 0; i < 4; i++) {
        const int64_t store[] = {1, T, 1, ROW};
        *rows[i] = problem_random(&call.host, FKDA_BF16, 4, store);
        rows[i]->shape[3] = 128;
    }
    args->final_state = states(&call, 1, FKDA_F32, false);
    run_and_compare(&call, "cuda/sm80/prepare_bounded+recurrence_2");
}

static void test_sm90_dense_with_a_partial_tail(void **state)
{
    const char *const kernel = *state;
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 2, .T = 265, .H = 1, .HV = 2, .V = 128}, FKDA_BF16);
    call.host.args.initial_state = states(&call, 2, FKDA_F32, true);
    call.host.args.final_state = states(&call, 2, FKDA_F32, false);
    run_and_compare(&call, kernel);
}

static void test_sm90_without_states(void **state)
{
    const char *const kernel = *state;
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 1, .T = 1, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    run_and_compare(&call, kernel);
}

static void test_sm90_packed_pool_with_padding(void **state)
{
    const char *const kernel = *state;
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 1, .T = 150, .H = 2, .HV = 2, .V = 128}, FKDA_BF16);
    struct problem *p = &call.host;
    p->args.cu_seqlens = INDICES(p, FKDA_I64, 0, 17, 17, 50, 82, 150);
    p->args.state_indices = INDICES(p, FKDA_I32, 4, 1, -1, 0, 3);
    p->args.initial_state = p->args.final_state = states(&call, 5, FKDA_F32, true);
    run_and_compare(&call, kernel);
}

static void test_sm90_packed_and_split(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = 1, .T = 2000, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    struct problem *p = &call.host;
    p->args.cu_seqlens = INDICES(p, FKDA_I64, 0, 950, 2000);
    p->args.initial_state = states(&call, 2, FKDA_F32, true);
    p->args.final_state = states(&call, 2, FKDA_F32, false);
    run_and_compare(&call, "cuda/sm90/pairs+combine+join_bounded");
}

static void test_sm90_many_chains(void **state)
{
    PROLOGUE(call);
    begin(&call, (struct problem_sizes){.B = MANY, .T = 35, .H = 1, .HV = 1, .V = 128}, FKDA_BF16);
    call.host.args.initial_state = states(&call, MANY, FKDA_BF16, true);
    call.host.args.final_state = states(&call, MANY, FKDA_BF16, false);
    run_and_compare(&call, "cuda/sm90/forward_bounded");
}

/* Kernels of path sm90 are on a Hopper GPU only. */
static bool device_has_sm90(void)
{
    fkda_info info;
    unsetenv("FLASH_KDA_CUDA_PATH");
    assert_int_equal(fkda_get_info(&info, NULL, 0), FKDA_OK);
    if (info.num_devices > 0 && info.cuda_note[0])
        print_message("path sm90: %s\n", info.cuda_note);
    return strcmp(info.cuda_path, "sm90") == 0;
}

int main(void)
{
    char forward[] = "cuda/sm90/forward_bounded", pairs[] = "cuda/sm90/pairs_bounded";
    const struct CMUnitTest sm90[] = {
        cmocka_unit_test_prestate(test_sm90_dense_with_a_partial_tail, forward),
        cmocka_unit_test_prestate(test_sm90_dense_with_a_partial_tail, pairs),
        cmocka_unit_test_prestate(test_sm90_without_states, forward),
        cmocka_unit_test_prestate(test_sm90_without_states, pairs),
        cmocka_unit_test_prestate(test_sm90_packed_pool_with_padding, forward),
        cmocka_unit_test_prestate(test_sm90_packed_pool_with_padding, pairs),
        cmocka_unit_test(test_sm90_packed_and_split),
        cmocka_unit_test(test_sm90_many_chains),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense_with_a_partial_tail),
        cmocka_unit_test(test_without_states),
        cmocka_unit_test(test_packed_softplus_grouped_with_checkpoints),
        cmocka_unit_test(test_pool_in_place_with_padding),
        cmocka_unit_test(test_activated_gate_many_sequences),
        cmocka_unit_test(test_wide_heads),
        cmocka_unit_test(test_odd_rows),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (device_has_sm90())
        failed += cmocka_run_group_tests(sm90, NULL, NULL);
    return failed;
}
