/* test_unload.c: a plugin host loads the shared library, calls it on several threads and closes it,
 * more than once. The threads of the OpenMP runtime outlive the call, and must outlive this. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <dlfcn.h>

#include "flash_kda.h"

enum { T = 64, H = 4, D = 64 };

static float q[T * H * D], k[T * H * D], v[T * H * D], g[T * H * D], beta[T * H], out[T * H * D];

/* POSIX's way around the conversion of an object pointer. */
static void find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

static void test_load_call_close(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) {
        void (*init)(fkda_args *);
        fkda_tensor (*contiguous)(void *, fkda_dtype, int, const int64_t *);
        fkda_status (*forward)(const fkda_args *, char *, size_t);
        void *library = dlopen(FKDA_TEST_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            fail_msg("%s", dlerror());
        find(library, "fkda_args_init", &init);
        find(library, "fkda_tensor_contiguous", &contiguous);
        find(library, "fkda_forward", &forward);

        const int64_t rows[] = {1, T, H, D};
        fkda_args args;
        init(&args);
        args.scale = 0.125;
        args.num_threads = 4;
        args.q = contiguous(q, FKDA_F32, 4, rows);
        args.k = contiguous(k, FKDA_F32, 4, rows);
        args.v = contiguous(v, FKDA_F32, 4, rows);
        args.g = contiguous(g, FKDA_F32, 4, rows);
        args.beta = contiguous(beta, FKDA_F32, 3, rows);
        args.out = contiguous(out, FKDA_F32, 4, rows);
        char reason[FKDA_REASON_BYTES];
        if (forward(&args, reason, sizeof reason) != FKDA_OK)
            fail_msg("%s", reason);
        assert_int_equal(dlclose(library), 0);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* let its threads run on */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_load_call_close)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
