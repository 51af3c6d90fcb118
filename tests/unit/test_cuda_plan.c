/* test_cuda_plan.c: device tensors through validation to the kernels' arguments, without a device.
 *
 * Pointers are numbers here: nothing may read what they point to. The last tests call the library
 * itself, which on a machine without a GPU has to say so and stay usable.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda_plan.h"
#include "cuda/segment_plan.h"
#include "device_call.h"
#include "problem.h"

/* B 2, T 40, H 2, HV 4, N 2, V 128; everything that may be absent is. */
enum { HV = 4, TILES = 2 * 3 };

static fkda_args device_call(int64_t B, int64_t T)
{
    return device_call_of(B, T, 2, HV, 128);
}

static fkda_tensor pool(uintptr_t address, fkda_dtype dtype, int64_t slots)
{
    return tensor(address, dtype, 4, slots, HV, 128, 128);
}

static fkda_tensor indices(uintptr_t address, fkda_dtype dtype, int64_t count)
{
    return tensor(address, dtype, 1, count, 0, 0, 0);
}

/* One sequence of cu_seqlens for each of N, over T tokens. */
static fkda_args varlen_call(int64_t N, int64_t T, fkda_dtype dtype)
{
    fkda_args args = device_call(1, T);
    args.cu_seqlens = indices(0x70000000000, dtype, N + 1);
    return args;
}

static struct fkda_cuda_work accept(const fkda_args *args)
{
    char reason[FKDA_REASON_BYTES] = "";
    struct fkda_reason where = {reason, sizeof reason};
    struct fkda_plan plan;
    struct fkda_cuda_work work;
    fkda_status status = fkda_validate(args, FKDA_CALL_FORWARD, &plan, where);
    if (status == FKDA_OK)
        status = fkda_cuda_plan_forward(&plan, &work, where);
    if (status != FKDA_OK)
        fail_msg("%s: %s", fkda_status_name(status), reason);
    assert_int_equal(plan.num_tokens, args->cu_seqlens.ndim ? -1 : plan.B * plan.T);
    return work;
}

static void refuse(const fkda_args *args, fkda_status wanted, const char *begins)
{
    char reason[FKDA_REASON_BYTES] = "";
    struct fkda_reason where = {reason, sizeof reason};
    struct fkda_plan plan;
    struct fkda_cuda_work work;
    fkda_status status = fkda_validate(args, FKDA_CALL_FORWARD, &plan, where);
    if (status == FKDA_OK)
        status = fkda_cuda_plan_forward(&plan, &work, where);
    if (status != wanted || strncmp(reason, begins, strlen(begins)) != 0)
        fail_msg("%s: '%s', wanted '%s'", fkda_status_name(status), reason, begins);
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static void test_workspace_of_dense_batches(void **state)
{
    (void)state;
    static const struct {
        int64_t B, T, tiles;
    } cases[] = {{1, 1, 1},  {1, 16, 1}, {1, 17, 2}, {2, 40, TILES}, {8, 16384, 8 * 1024},
                 {0, 40, 0}, {3, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fkda_args args = device_call(cases[i].B, cases[i].T);
        struct fkda_cuda_work work = accept(&args);
        assert_int_equal(work.tiles, cases[i].tiles);
        size_t images = (size_t)cases[i].tiles * HV * IMAGE_BYTES;
        assert_int_equal(work.workspace_bytes, images ? images + 127 : 0);
    }
}

/* Sequence n owns the images from cu[n] / 16 + n on: whatever the lengths, the last ends in time.
 * */
static void test_workspace_of_sequences(void **state)
{
    (void)state;
    static const int64_t lengths[][4] = {
        {16, 16, 16, 16}, {1, 1, 1, 1}, {17, 17, 17, 13}, {0, 64, 0, 0}, {15, 31, 2, 16}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        int64_t T = 0;
        for (int n = 0; n < 4; n++)
            T += lengths[i][n];
        fkda_args args = varlen_call(4, T, FKDA_I64);
        int64_t tiles = accept(&args).tiles, begin = 0, free_from = 0;
        assert_int_equal(tiles, T / 16 + 4);
        for (int n = 0; n < 4; n++) {
            int64_t base = begin / 16 + n;
            assert_true(base >= free_from);
            free_from = base + (lengths[i][n] + 15) / 16;
            begin += lengths[i][n];
        }
        assert_true(free_from <= tiles);
    }
    fkda_args none = varlen_call(0, 64, FKDA_I32);
    assert_int_equal(accept(&none).workspace_bytes, 0);
}

static void test_images_are_aligned(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    struct fkda_cuda_work work = accept(&args);
    for (uintptr_t offset = 0; offset < 130; offset++) {
        fkda_cuda_place_images(&work, at(0x1000 + offset));
        uintptr_t images = (uintptr_t)work.prepare.images;
        assert_int_equal(images % 128, 0);
        assert_true(images >= 0x1000 + offset);
        assert_true(images + TILES * HV * IMAGE_BYTES <= 0x1000 + offset + work.workspace_bytes);
        assert_ptr_equal(work.recurrence.images, work.prepare.images);
    }
}

static void test_slices(void **state)
{
    (void)state;
    assert_int_equal(fkda_cuda_choose_slices(128, 96, 132), 4);
    assert_int_equal(fkda_cuda_choose_slices(128, 132, 132), 4);
    assert_int_equal(fkda_cuda_choose_slices(128, 133, 132), 2);
    assert_int_equal(fkda_cuda_choose_slices(128, 768, 132), 2);
    for (int64_t V = 16; V <= 256; V += 16)
        for (int64_t chains = 1; chains < 400; chains += 131) {
            int slices = fkda_cuda_choose_slices(V, chains, 132);
            int64_t warps = V / 16 / slices;
            assert_int_equal(warps * slices * 16, V);
            assert_true(warps == 1 || warps == 2 || warps == 4 || warps == 8);
        }
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static void test_strides_dtypes_and_flags(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    args.g = tensor(0x40000000000, FKDA_F32, 4, 2, 40, HV, 128);
    args.g.stride[1] = 4096;
    args.g.stride[0] = 40 * 4096;
    args.beta.stride[2] = 1;
    args.beta.stride[1] = HV + 3;
    args.beta.stride[0] = 40 * (HV + 3);
    args.flags = FKDA_ALLOW_NEG_EIGVAL;
    args.lower_bound = -2;
    struct fkda_cuda_work work = accept(&args);
    assert_true(work.prepare.g_is_f32 && !work.prepare.beta_is_f32);
    assert_int_equal(work.prepare.g.stride_t, 4096);
    assert_int_equal(work.prepare.beta.stride_t, HV + 3);
    assert_int_equal(work.prepare.heads_per_key, 2);
    assert_true(work.prepare.allow_neg_eigval && !work.prepare.qk_l2norm);
    assert_true(!work.prepare.beta_sigmoid);
    assert_float_equal(work.prepare.lower_bound_log2, -2.8853900817779268, 1e-6);
    assert_int_equal(work.recurrence.target_log2, 7);
    args.flags = FKDA_FLAGS_DEFAULT;
    assert_int_equal(accept(&args).recurrence.target_log2, 11);
}

static void test_alignment_chooses_the_path(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    struct fkda_cuda_work work = accept(&args);
    assert_true(work.prepare.aligned_rows && work.recurrence.aligned_v && work.recurrence.wide_out);
    args.k.data = at(0x20000000002);
    assert_false(accept(&args).prepare.aligned_rows);
    args = device_call(2, 40);
    args.q.stride[1] = 257;
    args.q.stride[0] = 40 * 257;
    assert_false(accept(&args).prepare.aligned_rows);
    args = device_call(2, 40);
    args.v.data = at(0x30000000008);
    assert_false(accept(&args).recurrence.aligned_v);
    args.v.data = at(0x30000000010);
    assert_true(accept(&args).recurrence.aligned_v);
    args.out.data = at(0x60000000002);
    assert_false(accept(&args).recurrence.wide_out);
}

static void test_states_and_indices(void **state)
{
    (void)state;
    fkda_args args = varlen_call(3, 40, FKDA_I32);
    struct fkda_cuda_work work = accept(&args);
    assert_true(work.recurrence.num_slots == INT64_MAX); /* no pool: only -1 is padding */
    assert_false(work.prepare.sequences.cu_seqlens.is_int64);
    args.initial_state = pool(0x80000000000, FKDA_BF16, 7);
    args.final_state = pool(0x90000000000, FKDA_F32, 7);
    args.state_indices = indices(0xa0000000000, FKDA_I64, 3);
    args.state_indices.stride[0] = 5;
    args.checkpoint_state = pool(0xb0000000000, FKDA_BF16, 6);
    args.checkpoint_offsets = indices(0xc0000000000, FKDA_I32, 6);
    work = accept(&args);
    assert_int_equal(work.recurrence.num_slots, 7);
    assert_true(work.recurrence.final_state.is_f32 && !work.recurrence.initial_state.is_f32);
    assert_int_equal(work.recurrence.state_indices.stride, 5);
    assert_true(work.recurrence.state_indices.is_int64);
    assert_int_equal(work.recurrence.num_checkpoints, 6);
    assert_int_equal(work.recurrence.checkpoints_per_sequence, 2);
    args.checkpoint_indptr = indices(0xd0000000000, FKDA_I64, 4);
    work = accept(&args);
    assert_true(work.recurrence.checkpoint_indptr.is_int64);
    args.initial_state = args.final_state; /* in place */
    accept(&args);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void test_dtypes_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const names[] = {"q", "k", "v", "out"};
    for (int i = 0; i < 4; i++) {
        fkda_args args = device_call(2, 40);
        fkda_tensor *tensors[] = {&args.q, &args.k, &args.v, &args.out};
        tensors[i]->dtype = FKDA_F32;
        char begins[64];
        snprintf(begins, sizeof begins, "%s: dtype float32, wanted bfloat16 on CUDA", names[i]);
        refuse(&args, FKDA_ERROR_UNSUPPORTED, begins);
    }
}

static void test_sizes_are_refused(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    args.q = tensor(0x10000000000, FKDA_BF16, 4, 2, 40, 2, 64);
    args.k = tensor(0x20000000000, FKDA_BF16, 4, 2, 40, 2, 64);
    args.g = tensor(0x40000000000, FKDA_BF16, 4, 2, 40, HV, 64);
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "q: head size K = 64, wanted 128 on CUDA");

    const int64_t most = INT32_MAX - 16;
    args = device_call(1, 64);
    fkda_tensor *tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out};
    for (int i = 0; i < 6; i++) { /* every input token the same one; out far apart */
        tensors[i]->shape[1] = most + 1;
        tensors[i]->data = at(0x10000000000 * (uintptr_t)(i + 1) * 16);
    }
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "q: T = 2147483632 tokens, wanted at most 2147483631");
    for (int i = 0; i < 6; i++)
        tensors[i]->shape[1] = most;
    struct fkda_cuda_work work = accept(&args);
    assert_int_equal(work.tiles, (most + 15) / 16);
    assert_true(work.workspace_bytes > (size_t)1 << 40); /* no 32-bit product on the way */

    args = varlen_call((int64_t)1 << 28, 64, FKDA_I32);
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "cu_seqlens: 268435456 sequences of 4 value heads");
    args = varlen_call(((int64_t)1 << 26) - 1, 64, FKDA_I32);
    accept(&args);
}

static void test_strides_are_refused(void **state)
{
    (void)state;
    fkda_args args = device_call(1, 40);
    args.q.stride[1] = INT32_MAX / 32;
    accept(&args);
    args.q.stride[1]++;
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "q: stride 67108864 of dimension 1, wanted at most");
    args = device_call(1, 40);
    args.g = tensor(0x40000000000, FKDA_F32, 4, 1, 40, HV, 128);
    args.g.stride[1] = INT32_MAX / 64 + 1;
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "g: stride 33554432 of dimension 1, wanted at most");
    args = device_call(1, 40);
    args.v.stride[1] = (int64_t)1 << 33; /* 64-bit all the way */
    args.v.data = at((uintptr_t)1 << 52);
    accept(&args);
}

static void test_states_are_refused(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    args.final_state = pool(0x90000000004, FKDA_F32, 2);
    refuse(&args, FKDA_ERROR_UNSUPPORTED,
           "final_state: data at 0x90000000004, wanted a multiple of 8");
    args.final_state = pool(0x90000000002, FKDA_BF16, 2);
    refuse(&args, FKDA_ERROR_UNSUPPORTED,
           "final_state: data at 0x90000000002, wanted a multiple of 4");
    args.final_state = pool(0x90000000000, FKDA_BF16, 2);
    args.final_state.stride[1] = 128 * 128 + 1;
    args.final_state.stride[0] = HV * (128 * 128 + 1);
    refuse(&args, FKDA_ERROR_UNSUPPORTED, "final_state: strides");
    args.final_state = pool(0x90000000000, FKDA_F64, 2);
    refuse(&args, FKDA_ERROR_INVALID_ARGUMENT, "final_state: dtype float64");
}

static void test_overlap_is_refused(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    args.out.data = args.v.data;
    refuse(&args, FKDA_ERROR_INVALID_ARGUMENT, "out: shares memory with v");
    args = device_call(2, 40);
    args.workspace = (char *)args.q.data + 64;
    args.workspace_bytes = 4096;
    refuse(&args, FKDA_ERROR_INVALID_ARGUMENT, "workspace: shares memory with q");
}

/* ---- The library ----------------------------------------------------------------------------- */

static bool library_has_cuda(void)
{
    return FKDA_TEST_CUDA_ARCHS[0] != '\0';
}

static void test_workspace_bytes_needs_no_device(void **state)
{
    (void)state;
    fkda_args args = device_call(2, 40);
    char reason[FKDA_REASON_BYTES] = "";
    size_t bytes = 0;
    fkda_status status = fkda_workspace_bytes(&args, &bytes, reason, sizeof reason);
    if (library_has_cuda()) { /* enough for either path */
        const size_t images = TILES * HV * IMAGE_BYTES + 127;
        const size_t segments = fkda_cuda_most_segment_bytes(40, 2, HV, 0);
        assert_int_equal(status, FKDA_OK);
        assert_int_equal(bytes, images > segments ? images : segments);
    } else {
        assert_int_equal(status, FKDA_ERROR_UNSUPPORTED);
        assert_string_equal(reason, "device: cuda, this build has no CUDA kernels, wanted cpu");
    }
    /* Without kernels that is what is said, whatever else CUDA would refuse. */
    args.q.dtype = FKDA_F32;
    args.q.stride[0] = args.q.stride[1] = 0;
    assert_int_equal(fkda_workspace_bytes(&args, &bytes, reason, sizeof reason),
                     FKDA_ERROR_UNSUPPORTED);
    assert_string_equal(reason, library_has_cuda()
                                    ? "q: dtype float32, wanted bfloat16 on CUDA"
                                    : "device: cuda, this build has no CUDA kernels, wanted cpu");
}

static void test_workspace_is_the_callers(void **state)
{
    (void)state;
    if (!library_has_cuda()) {
        print_message("skipped: this build has no CUDA kernels\n");
        skip();
    }
    fkda_args args = device_call(2, 40);
    char reason[FKDA_REASON_BYTES] = "";
    fkda_report report = {.kernel = "left from before"};
    args.report = &report;
    setenv("FLASH_KDA_CUDA_PATH", "sm80", 1); /* on any device: sm90 would take it without */
    assert_int_equal(fkda_forward(&args, reason, sizeof reason), FKDA_ERROR_WORKSPACE);
    assert_int_equal(report.workspace_bytes, 430207);
    assert_string_equal(report.kernel, "left from before");
    assert_string_equal(reason,
                        "workspace: NULL, wanted 430207 bytes of device memory (on CUDA the "
                        "library allocates nothing)");
    args.workspace = at(0xe0000000000);
    args.workspace_bytes = 430206;
    report.workspace_bytes = 0;
    assert_int_equal(fkda_forward(&args, reason, sizeof reason), FKDA_ERROR_WORKSPACE);
    assert_string_equal(reason, "workspace_bytes: 430206, wanted at least 430207");
    assert_int_equal(report.workspace_bytes, 430207);
    args.report = NULL;
    assert_int_equal(fkda_forward(&args, reason, sizeof reason), FKDA_ERROR_WORKSPACE);
    unsetenv("FLASH_KDA_CUDA_PATH");
}

/* Wherever there is no GPU: a polite refusal, again and again, and the CPU as before. */
static void test_without_a_device(void **state)
{
    (void)state;
    fkda_info info;
    assert_int_equal(fkda_get_info(&info, NULL, 0), FKDA_OK);
    assert_string_equal(info.cuda_archs, FKDA_TEST_CUDA_ARCHS);
    assert_true(strlen(info.cuda_status) > 0);
    if (info.num_devices > 0) { /* the call below would run, on pointers that are none */
        print_message("skipped: there is a GPU here\n");
        skip();
    }
    fkda_args args = device_call(2, 40);
    args.workspace = at(0xe0000000000);
    args.workspace_bytes = (size_t)1 << 30;
    for (int i = 0; i < 3; i++) {
        char reason[FKDA_REASON_BYTES] = "";
        fkda_status status = fkda_forward(&args, reason, sizeof reason);
        assert_int_equal(status, library_has_cuda() ? FKDA_ERROR_DEVICE : FKDA_ERROR_UNSUPPORTED);
        assert_int_equal(strncmp(reason, "device: cuda, ", 14), 0);
        if (library_has_cuda())
            assert_string_equal(reason + 14, info.cuda_status);
    }
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 20, .H = 2});
    problem_run(&p, fkda_forward);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_workspace_of_dense_batches),
        cmocka_unit_test(test_workspace_of_sequences),
        cmocka_unit_test(test_images_are_aligned),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_strides_dtypes_and_flags),
        cmocka_unit_test(test_alignment_chooses_the_path),
        cmocka_unit_test(test_states_and_indices),
        cmocka_unit_test(test_dtypes_are_refused_by_name),
        cmocka_unit_test(test_sizes_are_refused),
        cmocka_unit_test(test_strides_are_refused),
        cmocka_unit_test(test_states_are_refused),
        cmocka_unit_test(test_overlap_is_refused),
        cmocka_unit_test(test_workspace_bytes_needs_no_device),
        cmocka_unit_test(test_workspace_is_the_callers),
        cmocka_unit_test(test_without_a_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
