/* chunk.cuh: what the fused Hopper forward keeps in shared memory, and how it is addressed.
 *
 * A chunk has 32 tokens, two tiles of 16. Rows of 64 channels (128 bytes) have their 16-byte pieces
 * permuted, as the copy engine writes and wgmma reads them.
 */
#ifndef FKDA_TILE_CHUNK_CUH
#define FKDA_TILE_CHUNK_CUH

#include "cuda/forward_sm90.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/prepare_steps.cuh"

enum {
    CHUNK = 32,
    RAW_HALF = 3 * CHUNK * 128, /* bytes of half the channels of struct raw and of struct chunk */
    CHUNK_HALF = 4 * CHUNK * 128,
    HALF_K = 64, /* channels in a row of 128 bytes */
    ROLE_THREADS = 128,
    THREADS = FORWARD_SM90_THREADS,
    PREPARERS = 2,
    RESCALE_CHUNKS = 4,
    NARROW_LOG2 = 10,
    HEADROOM = 3, /* log2 of how much larger values may become before f changes between them */
    RING = 3,     /* of raw stages and of chunks: chunk c is in place c % RING of both */
    A_PITCH = 40, /* pitches that keep the solve warp's accesses free of bank conflicts */
    T_PITCH = 24
};
static_assert(RING == 3 && PREPARERS == 2, "waits by parity: see prepare_chunks()");
/* 256 (168 + 88) = 65536, all there are */
#define STATE_REGISTERS   168
#define PREPARE_REGISTERS 88

/* Raw q, k, g of a chunk as the copy engine brings them: rows of 64 channels, whose 16-byte pieces
 * are permuted (swizzled()). The factors of A and P take their place: k 2^G, q 2^G, k 2^-G. */
struct raw {
    char rows[2][3 * CHUNK][128]; /* [half of K][k rows, q rows, g rows] */
};

/* What the state warpgroups read of a chunk beside v, as wgmma wants it. */
struct chunk {
    char rows[2][4 * CHUNK][128]; /* [half of K][Kd, Qd, Kr, rest of Kr] fp16, swizzled */
    float decay[TILE_K];          /* 2^(G_C - G_0) */
    char p[2048];                 /* P: fp16, see p_at() */
    char tb[3][512];              /* T b: fp16, blocks (0, 0), (1, 0), (1, 1); see tb_at() */
    char tb_rest[2][512];         /* of (0, 0) and (1, 1), what fp16 left */
};

/* v of a chunk, half of its channels: bf16, swizzled; rows of out take its place. */
struct values {
    char rows[CHUNK][128];
};
static_assert(sizeof(struct raw) % 1024 == 0 && sizeof(struct chunk) % 1024 == 0,
              "the pattern of swizzled rows starts at multiples of 1024 bytes");

/* What a prepare warpgroup works in. */
struct workshop {
    float totals[4][TILE_K];  /* gates of 8 tokens each, log2 */
    float inverse[2 * CHUNK]; /* 1 / |k|, then 1 / |q| */
    /* for the state warp that solves, while the warpgroup begins its next chunk */
    float a[CHUNK][A_PITCH];    /* b A; then 16 fp16: see t_rest() */
    uint16_t t[CHUNK][T_PITCH]; /* columns of T's diagonal tiles, fp16: see t_high() */
    float beta[CHUNK];
};

/* What an item writes. */
enum rows {
    OUT,     /* rows of out */
    FORCED,  /* what belongs there from a zero state: images for join (segments.h) */
    RESPONSE /* from each row of the identity, v counting as 0 */
};

/* An item of a block's work: a sequence or a segment of one, and a head. */
struct head {
    struct sequence seq;
    uint16_t *out;
    char *images;      /* FORCED, RESPONSE */
    int32_t *exponent; /* RESPONSE */
    const void *entry; /* state image; NULL: zero, or the identity of a RESPONSE */
    void *exit;        /* NULL: not wanted */
    int h, hk;         /* value head; key head */
    int length, chunks;
    int begun; /* chunks of the block's items before */
    int entry_is_f32, exit_is_f32;
    enum rows rows;
    int padding; /* output rows are zero, and that is all; no chunks */
    float slope; /* of the gate */
};

/* A condition whose code is to stand apart: what a turn does not need costs room in the instruction
 * cache otherwise. */
#define seldom(condition) __builtin_expect(!!(condition), 0)

/* x, which is the same in all lanes: now the compiler sees it, and keeps x and what follows from it
 * in registers that the warp shares. */
static __device__ __forceinline__ int shared_by_lanes(int x)
{
    return __shfl_sync(~0u, x, 0);
}

/* Where the rows of the block's chunks are: those of an item. */
struct source {
    int item, end; /* chunks of the block up to the item's last */
    int row;       /* of chunk 0, if the item had it */
    int tokens;    /* from there to the end of the item's */
    int batch, h, hk;
};

/* Tokens of a chunk. */
static __device__ __forceinline__ int count_tokens(struct source x, int chunk)
{
    return min((int)CHUNK, x.tokens - CHUNK * chunk);
}

/* Byte offset of the 16-byte piece c of a row of 128 bytes. */
static __device__ __forceinline__ int swizzled(int row, int c)
{
    return 128 * row + 16 * (c ^ row % 8);
}

/* Byte offset of a piece of the token's 256 bytes in an image of responses (segments.h). */
static __device__ __forceinline__ int response_at(int token, int piece)
{
    return 256 * token + 16 * (piece ^ token % 8);
}

/* Byte offset of P's element, 32 x 32: tiles of 8 x 8, 128 bytes each. */
static __device__ __forceinline__ int p_at(int row, int column)
{
    return 512 * (row / 8) + 128 * (column / 8) + 16 * (row % 8) + 2 * (column % 8);
}

/* Byte offset of T b's element in its block of 16 x 16: four such tiles, whose rows are T b's
 * columns. */
static __device__ __forceinline__ int tb_at(int row, int column)
{
    return 256 * (row / 8 % 2) + 128 * (column / 8 % 2) + 16 * (column % 8) + 2 * (row % 8);
}

/* x >= 0, of which the compiler knows nothing else: what follows from it is computed where it is
 * used, not kept in registers around the loop. */
static __device__ __forceinline__ int rederive(int x)
{
    int y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    __builtin_assume(y >= 0); /* or divisions by powers of two take three instructions */
    return y;
}

/* Four channels of one row, bf16. */
static __device__ __forceinline__ void unpack(float x[4], uint2 raw)
{
    x[0] = bf16_low(raw.x);
    x[1] = bf16_high(raw.x);
    x[2] = bf16_low(raw.y);
    x[3] = bf16_high(raw.y);
}

static __device__ __forceinline__ uint2 pack_bf16(const float x[4])
{
    return make_uint2(cvt_rn_bf16x2(x[0], x[1]), cvt_rn_bf16x2(x[2], x[3]));
}

static __device__ __forceinline__ uint2 pack_f16(const float x[4])
{
    return make_uint2(cvt_rn_f16x2(x[0], x[1]), cvt_rn_f16x2(x[2], x[3]));
}

static __device__ __forceinline__ void load4(float x[4], const float *from)
{
    const float4 y = *(const float4 *)from;
    x[0] = y.x;
    x[1] = y.y;
    x[2] = y.z;
    x[3] = y.w;
}

#endif
