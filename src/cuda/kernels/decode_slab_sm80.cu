/* decode_slab_sm80.cu: decode of many sequences: the state on its way to shared memory.
 *
 * What decode_sm80.cu does, with the same bits, for calls with enough heads to fill the device.
 * There the bytes in flight decide, and registers hold too few of them: here a block has the rows
 * of a slab copied to shared memory while it prepares its tokens (all of the call's: at most 16),
 * and other blocks of the multiprocessor fill the time in which it computes. A lane reads the bytes
 * that it copied itself, so that it waits for nobody else's. Plain calls only (decode_args.h).
 */
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/decode_rows.cuh"
#include "cuda/tile/decode_token.cuh"

static_assert(DECODE_SLAB_ROWS_F32 * TILE_K * 4 == DECODE_SLAB_BYTES &&
                  DECODE_SLAB_ROWS_BF16 * TILE_K * 2 == DECODE_SLAB_BYTES,
              "the host asks for too much or too little shared memory");

enum { WARP_BYTES = DECODE_SLAB_BYTES / DECODE_WARPS };

/* Value rows of a block. */
static __device__ __forceinline__ int slab_rows(int is_f32)
{
    return is_f32 ? DECODE_SLAB_ROWS_F32 : DECODE_SLAB_ROWS_BF16;
}

/* Units of a warp, which takes one after the other. */
static __device__ __forceinline__ int warp_units(int is_f32)
{
    return slab_rows(is_f32) / DECODE_WARPS / UNIT_ROWS;
}

/* Shared memory: rows of the state, tokens, the slab's values of each token. */
struct slab {
    char *rows; /* this warp's */
    struct token *tokens;
    float *values; /* this warp's, of token 0 */
};

static __device__ __forceinline__ struct slab place_slab(const struct fkda_decode_args *a,
                                                         char *shared)
{
    struct slab s;
    s.rows = shared + warp_id() * WARP_BYTES;
    s.tokens = (struct token *)(shared + DECODE_SLAB_BYTES);
    s.values = (float *)(s.tokens + a->token_slots);
    return s;
}

static __device__ __forceinline__ void copy_rows(char *slab, const char *rows, int units,
                                                 int is_f32)
{
    const int unit_bytes = UNIT_ROWS * TILE_K * (is_f32 ? 4 : 2);
#pragma unroll
    for (int u = 0; u < warp_units(is_f32); u++)
        if (u < units)
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                for (int piece = 0; piece < (is_f32 ? 2 : 1); piece++) {
                    const int at = u * unit_bytes + offset_of(r, piece, is_f32);
                    cp_async_16(slab + at, rows + at);
                }
    cp_async_commit();
}

static __device__ __forceinline__ void read_unit(float s[LANE_ROWS][LANE_CHANNELS],
                                                 const char *unit, int is_f32)
{
    struct raw_rows raw = {{{{0}}}};
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
        for (int piece = 0; piece < (is_f32 ? 2 : 1); piece++)
            raw.piece[r][piece] = *(const uint4 *)(unit + offset_of(r, piece, is_f32));
    expand_rows(s, &raw, is_f32);
}

/* Applies all tokens to the warp's rows, a unit after the other; `home`: where they came from. */
static __device__ __forceinline__ void walk(const struct fkda_decode_args *a, struct accesses by,
                                            const struct place *w, const struct slab *slab,
                                            char *home, int row, int units, int length, int is_f32)
{
    const int unit_bytes = UNIT_ROWS * TILE_K * (is_f32 ? 4 : 2);
#pragma unroll 1
    for (int u = 0; u < units; u++) {
        float s[LANE_ROWS][LANE_CHANNELS];
        read_unit(s, slab->rows + u * unit_bytes, is_f32);
#pragma unroll 1
        for (int t = 0; t < length; t++) {
            const struct token *const x = slab->tokens + t;
            const float *const v = slab->values + t * slab_rows(is_f32) + u * UNIT_ROWS;
            store_output(a, by, w, t, row + u * UNIT_ROWS, step_rows(s, x, v, is_f32));
            if (x->slot >= 0 && x->slot < a->num_slots)
                store_rows(s, state_rows(a, w->h, row, x->slot, is_f32) + u * unit_bytes, is_f32,
                           1);
        }
        if (!a->columns_to_write)
            store_rows(s, home + u * unit_bytes, is_f32, 1);
    }
}

static __device__ __forceinline__ void decode_slab(const struct fkda_decode_args *a, char *shared,
                                                   int is_f32)
{
    const struct accesses by = accesses_of(a, 1);
    const int rows = slab_rows(is_f32), values = rows / 32;
    const struct place w = find_place(a, rows);
    const struct slab slab = place_slab(a, shared);
    const int local_row = rows / DECODE_WARPS * warp_id(), row = w.row + local_row;
    const int units = a->V <= row ? 0 : min((a->V - row) / UNIT_ROWS, warp_units(is_f32));
    const int length = min(w.length, a->token_slots);
    const int64_t slot = slot_to_read(a, &w);
    struct raw_token raw;
    if (warp_id() < length)
        raw = load_token(a, by, &w, warp_id(), values);
    if (slot < 0 || slot >= a->num_slots) {
#pragma unroll 1
        for (int i = 0; i < length * units; i++)
            store_output(a, by, &w, i / units, row + i % units * UNIT_ROWS, 0.0f);
        return;
    }
    char *const home = state_rows(a, w.h, row, slot, is_f32);
    if (length > 0)
        copy_rows(slab.rows, home, units, is_f32);
#pragma unroll 1
    for (int t = warp_id(); t < length; t += DECODE_WARPS) {
        if (t > warp_id())
            raw = load_token(a, by, &w, t, values);
        prepare_token(a, by, &w, &raw, slab.tokens + t, slab.values + t * rows, values);
    }
    __syncthreads(); /* the tokens are ready for every warp */
    cp_async_wait(0);
    if (length > 0) {
        const struct slab mine = {slab.rows, slab.tokens, slab.values + local_row};
        walk(a, by, &w, &mine, home, row, units, length, is_f32);
    }
}

#define DEFINE_DECODE_SLAB(name, is_f32)                                                  \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS, 5)                    \
        fkda_decode_##name##_slab_sm80(const __grid_constant__ struct fkda_decode_args a) \
    {                                                                                     \
        extern __shared__ __align__(16) char shared[];                                    \
        decode_slab(&a, shared, is_f32);                                                  \
    }

DEFINE_DECODE_SLAB(f32, 1)
DEFINE_DECODE_SLAB(bf16, 0)
