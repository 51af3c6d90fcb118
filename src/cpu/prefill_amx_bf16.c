/* prefill_amx_bf16.c: bf16 prefill on AMX tiles.
 *
 * A tile is 16 rows of 64 bytes, and TDPBF16PS adds [16 x 32] [32 x 16] in 16 cycles, in program
 * order, 52 cycles after its operands are there. All tiles have the full shape: products over 16
 * tokens spend the other half of the depth on the remainders of kr and P, which costs nothing.
 *
 * Loads do not pass a tile store that waits for its product (measured: products, stores and the
 * vector work behind them then take turns). So a tile is stored two steps after its product, and
 * the rows of the state follow one step later.
 */
#include "cpu/kernel_sets.h"
#include "cpu/kernel_sets_bf16.h"
#include "cpu/state_bf16.h"

#define KR_SPLIT true

#define TILE_LOAD(tile, from, stride)                                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) \
                     : "memory")
/* For what is read once: takes a line of the first-level cache that goes first again. */
#define TILE_LOAD_ONCE(tile, from, stride)                                                    \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) \
                     : "memory")
#define TILE_STORE(to, stride, tile)                                                          \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) \
                     : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::: "memory")
/* tmm[sum] += left right */
#define TILE_PRODUCT(sum, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::: "memory")

#define ROW 64

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static void tiles_begin(void)
{
    _Alignas(64) struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = ROW;
        config.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

static void tiles_end(void)
{
    __asm__ volatile("tilerelease" ::: "memory");
}

/* a_raw = kd ki^T and p_raw = qd ki^T, over 32 channels at a time, to 16 bits: of the products of
 * two terms each, only that of the two rests is left out. */
BF16_INLINE void pair_products(const struct chunk *chunk, struct draft *draft, int64_t K)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t k = 0; k < K; k += 32) {
        TILE_LOAD(2, draft->ki + k * CHUNK, ROW);
        TILE_LOAD(3, draft->ki_rest + k * CHUNK, ROW);
        TILE_LOAD(4, chunk->kd + k, 2 * K);
        TILE_PRODUCT(0, 4, 2);
        TILE_PRODUCT(0, 4, 3);
        TILE_LOAD(5, chunk->qd + k, 2 * K);
        TILE_PRODUCT(1, 5, 2);
        TILE_PRODUCT(1, 5, 3);
        TILE_LOAD(6, draft->kd_rest + k, 2 * K);
        TILE_PRODUCT(0, 6, 2);
        TILE_LOAD(7, draft->qd_rest + k, 2 * K);
        TILE_PRODUCT(1, 7, 2);
    }
    TILE_STORE(draft->a_raw, ROW, 0);
    TILE_STORE(draft->p_raw, ROW, 1);
}

/* In tiles sum0 and sum1: rows S^T for the two blocks of a panel. */
#define ROW_PRODUCTS(sum0, sum1, rows, shadow, K)         \
    do {                                                  \
        TILE_ZERO(sum0);                                  \
        TILE_ZERO(sum1);                                  \
        for (int64_t k = 0; k < (K); k += 32) {           \
            TILE_LOAD_ONCE(4, (rows) + k, 2 * (K));       \
            TILE_LOAD(6, (shadow) + k * 16, ROW);         \
            TILE_PRODUCT(sum0, 4, 6);                     \
            TILE_LOAD(7, (shadow) + ((K) + k) * 16, ROW); \
            TILE_PRODUCT(sum1, 4, 7);                     \
        }                                                 \
    } while (0)

/* pk = kd S^T to memory. qd S^T stays in tiles 0 and 1 until finish_panel. */
BF16_INLINE void row_products(struct work *work, const struct chunk *chunk, int64_t panel,
                              int64_t K)
{
    const uint16_t *shadow = work->shadow + panel * K * 32;
    ROW_PRODUCTS(2, 3, chunk->kd, shadow, K);
    ROW_PRODUCTS(0, 1, chunk->qd, shadow, K);
    TILE_STORE(work->pk, ROW, 2);
    TILE_STORE(work->pk + BLOCK, ROW, 3);
}

/* A block of u is two right operands of depth 32 in bf16: u twice, and what u lost twice. */
BF16_INLINE void store_u(struct work *work, int block, const vf u[CHUNK])
{
    float *to = (float *)work->u + block * (U_BYTES / 4);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        vf main = float_of(pack_cut(u[2 * i], u[2 * i + 1]));
        vf rest = float_of(pack_rest(u[2 * i], u[2 * i + 1]));
        _mm512_store_ps(to + i * 16, main);
        _mm512_store_ps(to + (8 + i) * 16, main);
        _mm512_store_ps(to + (16 + i) * 16, rest);
        _mm512_store_ps(to + (24 + i) * 16, rest);
    }
}

/* 16 rows of the state: decay, add the tile, round to the shadow. */
BF16_INLINE void update_rows(float *state, uint16_t *shadow, const float *tile, const float *decay)
{
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        vf even = _mm512_fmadd_ps(_mm512_load_ps(state + i * 16), _mm512_set1_ps(decay[i]),
                                  _mm512_load_ps(tile + i * 16));
        vf odd = _mm512_fmadd_ps(_mm512_load_ps(state + i * 16 + 16), _mm512_set1_ps(decay[i + 1]),
                                 _mm512_load_ps(tile + i * 16 + 16));
        _mm512_store_ps(state + i * 16, even);
        _mm512_store_ps(state + i * 16 + 16, odd);
        _mm512_store_si512(shadow + i * 16, pack_round(even, odd));
    }
}

/* Step i of a panel: 16 key channels of one block, whose u is in 4 and 5. kr comes three steps
 * ahead in 2, 3, 6 and 7, sums alternate between 0 and 1. */
#define UPDATE_LOAD(left, i) TILE_LOAD_ONCE(left, kr + (i) % steps * 512, ROW)
#define UPDATE_PRODUCT(sum, left)   \
    do {                            \
        TILE_ZERO(sum);             \
        TILE_PRODUCT(sum, left, 4); \
        TILE_PRODUCT(sum, left, 5); \
    } while (0)
#define UPDATE_STORE(sum, i) TILE_STORE(ring + (i) % 2 * BLOCK, ROW, sum)
#define UPDATE_ROWS(i)                                                         \
    update_rows(state + (i)*BLOCK, shadow + (i)*BLOCK, ring + (i) % 2 * BLOCK, \
                chunk->decay + (i) % steps * 16)

/* Step i of a panel, `r` being i mod 4: a line of token r of q and k, and one of token i of out. */
#define UPDATE_FETCH(i, r)                      \
    do {                                        \
        fetch_row(ahead.q, r, ((i) - (r)) * 8); \
        fetch_row(ahead.k, r, ((i) - (r)) * 8); \
        __builtin_prefetch(out_row, 1, 3);      \
        out_row += ahead.out.stride_bytes;      \
    } while (0)

#define LOAD_U(block)                                     \
    do {                                                  \
        TILE_LOAD(4, u + 2 * (block)*BLOCK, ROW);         \
        TILE_LOAD(5, u + (2 * (block) + 1) * BLOCK, ROW); \
    } while (0)

/* out += P u, S <- S diag(2^(G_C)) + u^T kr, and the shadow anew. */
BF16_INLINE void finish_panel(struct work *work, const struct chunk *chunk, int64_t panel,
                              int64_t K)
{
    const float *u = (const float *)work->u;
    const uint16_t *kr = chunk->kr_split;
    const struct panel_fetch ahead = work->ahead;
    const char *out_row = ahead.out.first;
    float *ring = work->ring, *state = work->state + panel * K * 32;
    uint16_t *shadow = work->shadow + panel * K * 32;
    const int64_t steps = K / 16; /* per block: state rows of both blocks follow one another */
    TILE_LOAD(6, chunk->p_split, ROW);
    UPDATE_LOAD(2, 0);
    UPDATE_LOAD(3, 1);
    LOAD_U(1);
    TILE_PRODUCT(1, 6, 4);
    TILE_PRODUCT(1, 6, 5);
    LOAD_U(0);
    TILE_PRODUCT(0, 6, 4);
    TILE_PRODUCT(0, 6, 5);
    UPDATE_LOAD(6, 2);
    for (int64_t i = 0; i < 2 * steps; i += 4) {
        if (i == 0)
            TILE_STORE(work->out, ROW, 0);
        else
            UPDATE_STORE(0, i - 2);
        UPDATE_LOAD(7, i + 3);
        if (i == steps)
            LOAD_U(1);
        UPDATE_PRODUCT(0, 2);
        if (i)
            UPDATE_ROWS(i - 3);
        UPDATE_FETCH(i + 0, 0);

        if (i == 0)
            TILE_STORE(work->out + BLOCK, ROW, 1);
        else
            UPDATE_STORE(1, i - 1);
        UPDATE_LOAD(2, i + 4);
        UPDATE_PRODUCT(1, 3);
        if (i)
            UPDATE_ROWS(i - 2);
        UPDATE_FETCH(i + 1, 1);

        UPDATE_STORE(0, i);
        UPDATE_LOAD(3, i + 5);
        if (i + 2 == steps)
            LOAD_U(1);
        UPDATE_PRODUCT(0, 6);
        if (i)
            UPDATE_ROWS(i - 1);
        UPDATE_FETCH(i + 2, 2);

        UPDATE_STORE(1, i + 1);
        UPDATE_LOAD(6, i + 6);
        UPDATE_PRODUCT(1, 7);
        UPDATE_ROWS(i);
        UPDATE_FETCH(i + 3, 3);
    }
    UPDATE_STORE(0, 2 * steps - 2);
    UPDATE_ROWS(2 * steps - 3);
    UPDATE_STORE(1, 2 * steps - 1);
    UPDATE_ROWS(2 * steps - 2);
    UPDATE_ROWS(2 * steps - 1);
}

#include "cpu/prefill_bf16.h"

static void amx_prefill_bf16(const struct fkda_cpu_task *task)
{
    tiles_begin();
    prefill_task(task);
    tiles_end();
}

DEFINE_BF16_SET(amx_bf16, FKDA_ISA_AMX_BF16, fkda_amx_usable, amx_prefill_bf16);
