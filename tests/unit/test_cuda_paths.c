/* test_cuda_paths.c: which kernels a call gets, and the reasons, without a device. Pointers are
 * numbers: nothing may read what they point to. */
#include <stdio.h>
#include <string.h>

#include "cuda/cuda_paths.h"
#include "cuda/segment_plan.h"
#include "device_call.h"
#include "problem.h"

enum { H = 48, HV = 96, FEW = 12 };

static const struct fkda_cuda_device H200 = {9, 0, 132, true};

/* A call that path sm90 takes, with 96 chains a sequence. */
static fkda_args device_call(int64_t B, int64_t T)
{
    return device_call_of(B, T, H, HV, 128);
}

struct choice {
    fkda_status status;
    enum fkda_cuda_path path;
    struct fkda_segments segments;
    char note[128], reason[FKDA_REASON_BYTES];
};

static struct choice choose(const fkda_args *args, const struct fkda_cuda_device *device,
                            enum fkda_cuda_path wish)
{
    struct choice c = {.note = "left from before"};
    struct fkda_reason reason = {c.reason, sizeof c.reason};
    struct fkda_plan plan;
    if (fkda_validate(args, FKDA_CALL_FORWARD, &plan, reason) != FKDA_OK)
        fail_msg("%s", c.reason);
    c.status = fkda_cuda_choose_path(&plan, device, wish, &c.path, &c.segments,
                                     (struct fkda_reason){c.note, sizeof c.note}, reason);
    return c;
}

static void assert_begins(const char *text, const char *begin)
{
    if (strncmp(text, begin, strlen(begin)) != 0)
        fail_msg("'%s', wanted '%s'", text, begin);
}

/* The call gets sm90 when that is asked for, and left alone unless sm80 is faster. */
static void takes(const fkda_args *args)
{
    struct choice c = choose(args, &H200, FKDA_CUDA_PATH_AUTO);
    assert_int_equal(c.status, FKDA_OK);
    if (c.path == FKDA_CUDA_PATH_SM90)
        assert_string_equal(c.note, "");
    else
        assert_begins(c.note, "sm90 is the slower path for ");
    c = choose(args, &H200, FKDA_CUDA_PATH_SM90);
    assert_int_equal(c.status, FKDA_OK);
    assert_int_equal(c.path, FKDA_CUDA_PATH_SM90);
    assert_string_equal(c.note, "");
    c = choose(args, &H200, FKDA_CUDA_PATH_SM80);
    assert_int_equal(c.status, FKDA_OK);
    assert_int_equal(c.path, FKDA_CUDA_PATH_SM80);
    assert_string_equal(c.note, "FLASH_KDA_CUDA_PATH: sm80");
}

/* The call gets sm80 with this note; asking for sm90 is an error that says the same. */
static void refuses_on(const fkda_args *args, const struct fkda_cuda_device *device,
                       const char *why)
{
    char wanted[FKDA_REASON_BYTES];
    struct choice c = choose(args, device, FKDA_CUDA_PATH_AUTO);
    assert_int_equal(c.status, FKDA_OK);
    assert_int_equal(c.path, FKDA_CUDA_PATH_SM80);
    assert_begins(c.note, why);
    assert_true(strlen(c.note) < sizeof c.note - 1); /* not cut short */
    c = choose(args, device, FKDA_CUDA_PATH_SM90);
    assert_int_equal(c.status, FKDA_ERROR_UNSUPPORTED);
    snprintf(wanted, sizeof wanted, "FLASH_KDA_CUDA_PATH: sm90: %s", why);
    assert_begins(c.reason, wanted);
    assert_int_equal(choose(args, device, FKDA_CUDA_PATH_SM80).status, FKDA_OK);
}

static void refuses(const fkda_args *args, const char *why)
{
    refuses_on(args, &H200, why);
}

static void test_what_is_taken(void **state)
{
    (void)state;
    for (int64_t T = 0; T < 3; T++) {
        fkda_args args = device_call(2, 40 * T);
        takes(&args);
    }
    fkda_args args = device_call(1, 100);
    const int64_t offsets = 4, sizes[] = {7, HV, 128, 128};
    args.cu_seqlens = fkda_tensor_contiguous(at(0x70000000000), FKDA_I32, 1, &offsets);
    args.initial_state = args.final_state =
        fkda_tensor_contiguous(at(0x80000000000), FKDA_BF16, 4, sizes);
    args.state_indices = tensor(0x90000000000, FKDA_I64, 1, 3, 0, 0, 0);
    args.flags = FKDA_ALLOW_NEG_EIGVAL;
    args.lower_bound = 0;
    args.beta.dtype = FKDA_F32;
    takes(&args);
}

static void test_devices(void **state)
{
    (void)state;
    fkda_args args = device_call(1, 100);
    const struct fkda_cuda_device a100 = {8, 0, 108, true}, b200 = {10, 0, 148, true},
                                  thor = {9, 1, 132, true}, unbuilt = {9, 0, 132, false};
    refuses_on(&args, &a100, "compute capability 8.0, wanted 9.0");
    refuses_on(&args, &b200, "compute capability 10.0, wanted 9.0");
    refuses_on(&args, &thor, "compute capability 9.1, wanted 9.0");
    refuses_on(&args, &unbuilt, "this build has no kernels for 90a (FLASH_KDA_CUDA_ARCHS)");
}

/* Left alone, a call gets the path that is predicted to be faster; the other one can be asked for.
 */
static void test_the_faster_path_is_chosen(void **state)
{
    (void)state;
    int chosen[2] = {0, 0};
    for (int64_t N = 1; N <= 65; N *= 2)
        for (int64_t T = 1; T < 20000; T = 3 * T + 1) {
            fkda_args args = device_call(N, T);
            struct choice c = choose(&args, &H200, FKDA_CUDA_PATH_AUTO);
            const double sm80 = fkda_cuda_predict_sm80_us(N * T, N, HV, H200.num_sms);
            const struct fkda_cut cut = {c.segments.chunks, c.segments.first};
            const double sm90 = fkda_cuda_predict_sm90_us(N * T, N, HV, H200.num_sms, cut,
                                                          &fkda_segment_costs_sm90);
            assert_int_equal(c.path == FKDA_CUDA_PATH_SM90, sm90 <= sm80);
            chosen[sm90 <= sm80]++;
            if (c.path == FKDA_CUDA_PATH_SM80)
                assert_begins(c.note, "sm90 is the slower path for ");
            c = choose(&args, &H200, FKDA_CUDA_PATH_SM90);
            assert_int_equal(c.status, FKDA_OK);
            assert_int_equal(c.path, FKDA_CUDA_PATH_SM90);
        }
    assert_true(chosen[0] > 0 && chosen[1] > 0);
}

/* Few chains are shared out to pairs of multiprocessors, and cut into segments. */
static void test_segments(void **state)
{
    (void)state;
    fkda_args args = device_call(1, 8192);
    struct choice c = choose(&args, &H200, FKDA_CUDA_PATH_SM90);
    assert_int_equal(c.segments.chunks, 0);
    args = device_call_of(1, 8192, FEW, FEW, 128); /* leaves multiprocessors for segments of each */
    c = choose(&args, &H200, FKDA_CUDA_PATH_SM90);
    const struct fkda_cut cut =
        fkda_cuda_choose_cut(8192, 1, FEW, H200.num_sms, &fkda_segment_costs_sm90);
    struct fkda_segments expected = fkda_cuda_plan_segments(8192, 1, 0, cut);
    expected.pairs = 1;
    assert_true(c.segments.chunks > 0);
    assert_memory_equal(&c.segments, &expected, sizeof expected);
}

/* One block a chain where there are too many for pairs, or where that is asked for. */
static void test_pairs(void **state)
{
    (void)state;
    for (int64_t N = 1; 4 * N <= 2 * H200.num_sms; N++) {
        fkda_args args = device_call_of(N, 100, 2, 4, 128);
        struct choice c = choose(&args, &H200, FKDA_CUDA_PATH_SM90);
        assert_int_equal(c.segments.pairs, 4 * N <= H200.num_sms / 2);
        c = choose(&args, &H200, FKDA_CUDA_PATH_SM90_FORWARD);
        assert_int_equal(c.status, FKDA_OK);
        assert_int_equal(c.path, FKDA_CUDA_PATH_SM90);
        assert_int_equal(c.segments.pairs, 0);
        assert_int_equal(c.segments.chunks, 0);
    }
    fkda_args args = device_call_of(1, 8192, FEW, FEW, 128); /* else cut into segments */
    struct choice c = choose(&args, &H200, FKDA_CUDA_PATH_SM90_FORWARD);
    assert_int_equal(c.segments.chunks, 0);
    args.gate = FKDA_GATE_SOFTPLUS;
    c = choose(&args, &H200, FKDA_CUDA_PATH_SM90_FORWARD);
    assert_int_equal(c.status, FKDA_ERROR_UNSUPPORTED);
    assert_begins(c.reason, "FLASH_KDA_CUDA_PATH: sm90-forward: gate without a lower bound");
}

static void test_kinds(void **state)
{
    (void)state;
    fkda_args args = device_call(1, 100);
    args.gate = FKDA_GATE_SOFTPLUS;
    refuses(&args, "gate without a lower bound");
    args.gate = FKDA_GATE_ACTIVATED;
    refuses(&args, "gate without a lower bound");
    args = device_call(1, 100);
    args.v = tensor(0x30000000000, FKDA_BF16, 4, 1, 100, HV, 64);
    args.out = tensor(0x60000000000, FKDA_BF16, 4, 1, 100, HV, 64);
    refuses(&args, "v: head size V = 64, wanted 128");
    args = device_call(1, 100);
    args.g.dtype = FKDA_F32;
    refuses(&args, "g: dtype float32, wanted bfloat16");
    args = device_call(1, 100);
    args.checkpoint_state = tensor(0xb0000000000, FKDA_F32, 4, 6, HV, 128, 128);
    args.checkpoint_offsets = tensor(0xc0000000000, FKDA_I32, 1, 6, 0, 0, 0);
    refuses(&args, "checkpoint_state: 6 checkpoints, wanted none");
}

static void test_rows(void **state)
{
    (void)state;
    static const char *const names[] = {"q", "k", "v", "g", "out"};
    for (int i = 0; i < 5; i++) {
        fkda_args args = device_call(2, 40);
        fkda_tensor *const tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.out};
        fkda_tensor *const t = tensors[i];
        t->stride[0] *= 2; /* room for wider rows */
        const fkda_tensor whole = *t;
        char wanted[64];
        t->data = (char *)whole.data + 8;
        snprintf(wanted, sizeof wanted, "%s: data at %p, wanted a multiple of 16", names[i],
                 t->data);
        refuses(&args, wanted);
        *t = whole;
        for (int d = 0; d < 2; d++) {
            t->stride[d] = whole.stride[d] + 4;
            snprintf(wanted, sizeof wanted, "%s: stride %lld of dimension %d, wanted a multiple",
                     names[i], (long long)t->stride[d], d);
            refuses(&args, wanted);
            t->stride[d] = whole.stride[d] + 8;
            takes(&args);
            *t = whole;
        }
        t->stride[0] = (int64_t)1 << 39; /* 2^40 bytes */
        if (i < 4) {
            snprintf(wanted, sizeof wanted, "%s: stride 549755813888 of dimension 0", names[i]);
            t->data = at((uintptr_t)1 << 50);
            refuses(&args, wanted);
            t->stride[0] -= 8;
            takes(&args);
            t->stride[0] = 0; /* one row for all */
            snprintf(wanted, sizeof wanted, "%s: stride 0 of dimension 0", names[i]);
            refuses(&args, wanted);
        }
    }
}

/* The stride of a dimension of one is nobody's business. */
static void test_strides_that_are_not_used(void **state)
{
    (void)state;
    fkda_args args = device_call(1, 1);
    fkda_tensor *const tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.out};
    for (int i = 0; i < 5; i++)
        for (int d = 0; d < 2; d++)
            tensors[i]->stride[d] = 3;
    takes(&args);
}

static void test_lengths(void **state)
{
    (void)state;
    const int64_t most = INT32_MAX - 32;
    fkda_args args = device_call(1, most);
    fkda_tensor *const tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out};
    for (int i = 0; i < 6; i++)
        tensors[i]->data = at(((uintptr_t)i + 1) << 48); /* far apart */
    takes(&args);
    for (int i = 0; i < 6; i++)
        tensors[i]->shape[1] = most + 1;
    refuses(&args, "q: T = 2147483616 tokens, wanted at most 2147483615");
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(fkda_cuda_path_name(FKDA_CUDA_PATH_AUTO), "auto");
    assert_string_equal(fkda_cuda_path_name(FKDA_CUDA_PATH_SM80), "sm80");
    assert_string_equal(fkda_cuda_path_name(FKDA_CUDA_PATH_SM90), "sm90");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_taken),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_the_faster_path_is_chosen),
        cmocka_unit_test(test_segments),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_strides_that_are_not_used),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
