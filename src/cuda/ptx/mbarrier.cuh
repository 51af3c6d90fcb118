/* mbarrier.cuh: barriers in shared memory, and the fences between kinds of access (sm_90). */
#ifndef FKDA_PTX_MBARRIER_CUH
#define FKDA_PTX_MBARRIER_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

/* Shows initialised barriers to the copy engine. */
static __device__ __forceinline__ void mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

/* Arrivals of a warp. compute-sanitizer's racecheck sees what the arriving lane did, but not that
 * __syncwarp orders the others before it: for that tool a build may let every lane arrive. */
#ifdef FKDA_EVERY_LANE_ARRIVES
enum { WARP_ARRIVALS = 32 };
#else
enum { WARP_ARRIVALS = 1 };
#endif

/* All that the warp's lanes did comes before it. */
static __device__ __forceinline__ void mbarrier_arrive_warp(uint64_t *barrier, int lane)
{
    __syncwarp();
    if (WARP_ARRIVALS == 32 || lane == 0)
        mbarrier_arrive(barrier);
}

/* Returns once the phase of that parity has completed. */
static __device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* Whether it has, without waiting: ask early, what comes of it takes as long as a load. */
static __device__ __forceinline__ int mbarrier_test(uint64_t *barrier, uint32_t parity)
{
    int done;
    asm volatile("{ .reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

/* Waits unless it was done. */
static __device__ __forceinline__ void mbarrier_finish(int done, uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "setp.ne.b32 done, %2, 0;\n"
                 "@done bra finished;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity), "r"(done)
                 : "memory");
}

/* Arrives, and makes the phase wait for `bytes` of bulk copies too. */
static __device__ __forceinline__ void mbarrier_arrive_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* True in one lane of a warp that is together. */
static __device__ __forceinline__ int elect_one(void)
{
    uint32_t elected;
    asm volatile("{ .reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.b32 %0, 1, 0, p; }"
                 : "=r"(elected)::"memory");
    return (int)elected;
}

/* Copies one box of a tensor map, at `x` .. `w` of its dimensions from the innermost, and counts
 * its bytes on the barrier; what lies outside the tensor becomes zero. */
static __device__ __forceinline__ void tensor_copy_4d(void *shared, const void *map, int x, int y,
                                                      int z, int w, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
                 : "memory");
}

/* Brings such a box to L2, for a copy that comes later. */
static __device__ __forceinline__ void tensor_prefetch_4d(const void *map, int x, int y, int z,
                                                          int w)
{
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* Copies bytes that lie together, both ends and their number multiples of 16. */
static __device__ __forceinline__ void bulk_copy(void *shared, const void *from, uint32_t bytes,
                                                 uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

/* Makes this thread's stores to shared memory visible to wgmma, which reads by another path. */
static __device__ __forceinline__ void fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* bar.sync among `threads` threads that name the same id. */
static __device__ __forceinline__ void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#define setmaxnreg_inc(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
#define setmaxnreg_dec(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))

#endif
