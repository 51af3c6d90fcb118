/* test_cuda_paths.c: which kernels a call gets, and the reasons, without a device. Pointers are
 * numbers: nothing may read what they point to. */
#include <stdio.h>
#include <string.h>

#include "cuda/cuda_paths.h"
#include "problem.h"

enum { H = 48, HV = 96 };

static const struct fkda_cuda_device H200 = {9, 0, 132, true};

static void *at(uintptr_t address)
{
    return (void *)address;
}

static fkda_tensor tensor(uintptr_t address, fkda_dtype dtype, int ndim, int64_t a, int64_t b,
                          int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    return fkda_tensor_contiguous(at(address), dtype, ndim, shape);
}

/* A call that path sm90 takes, with 96 chains a sequence. */
static fkda_args device_call(int64_t B, int64_t T)
{
    fkda_args args;
    fkda_args_init(&args);
    args.device = FKDA_CUDA;
    args.scale = 0.125;
    args.q = tensor(0x10000000000, FKDA_BF16, 4, B, T, H, 128);
    args.k = tensor(0x20000000000, FKDA_BF16, 4, B, T, H, 128);
    args.v = tensor(0x30000000000, FKDA_BF16, 4, B, T, HV, 128);
    args.g = tensor(0x40000000000, FKDA_BF16, 4, B, T, HV, 128);
    args.beta = tensor(0x50000000000, FKDA_BF16, 3, B, T, HV, 0);
    args.out = tensor(0x60000000000, FKDA_BF16, 4, B, T, HV, 128);
    return args;
}

struct choice {
    fkda_status status;
    enum fkda_cuda_path path;
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
    c.status = fkda_cuda_choose_path(&plan, device, wish, &c.path,
                                     (struct fkda_reason){c.note, sizeof c.note}, reason);
    return c;
}

static void assert_begins(const char *text, const char *begin)
{
    if (strncmp(text, begin, strlen(begin)) != 0)
        fail_msg("'%s', wanted '%s'", text, begin);
}

/* The call gets sm90 in either way, and sm80 when that is asked for. */
static void takes(const fkda_args *args)
{
    struct choice c = choose(args, &H200, FKDA_CUDA_PATH_AUTO);
    if (c.path != FKDA_CUDA_PATH_SM90)
        fail_msg("%s", c.note);
    assert_int_equal(c.status, FKDA_OK);
    assert_string_equal(c.note, "");
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

static void test_few_chains_are_slower_not_impossible(void **state)
{
    (void)state;
    const struct {
        int num_sms;
        int64_t N;
        bool enough;
    } cases[] = {{132, 1, true}, {133, 1, false}, {133, 2, true},
                 {264, 2, true}, {265, 2, false}, {114, 1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fkda_args args = device_call(cases[i].N, 100);
        struct fkda_cuda_device device = {9, 0, cases[i].num_sms, true};
        struct choice c = choose(&args, &device, FKDA_CUDA_PATH_AUTO);
        assert_int_equal(c.path == FKDA_CUDA_PATH_SM90, cases[i].enough);
        if (!cases[i].enough) {
            char wanted[128];
            snprintf(wanted, sizeof wanted, "%d sequences of 96 value heads, too few for %d SMs",
                     (int)cases[i].N, cases[i].num_sms);
            assert_string_equal(c.note, wanted);
        }
        c = choose(&args, &device, FKDA_CUDA_PATH_SM90);
        assert_int_equal(c.status, FKDA_OK);
        assert_int_equal(c.path, FKDA_CUDA_PATH_SM90);
    }
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
        cmocka_unit_test(test_few_chains_are_slower_not_impossible),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_strides_that_are_not_used),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
