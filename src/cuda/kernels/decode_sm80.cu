/* decode_sm80.cu: a few tokens of every sequence by the recurrence itself, state in place.
 *
 * The state is read once and written once; nothing else counts. A warp owns eight value rows of one
 * (sequence, value head) and keeps them in registers over the tokens; all of them are on their way
 * before anything is computed. A block is DECODE_WARPS warps of one head: each prepares one of the
 * next tokens (gate, norms) in shared memory, then all apply them to their rows. The kernels for
 * small batches and for every layout; decode_slab_sm80.cu is for large ones. Launched by
 * launch_decode.c; trusts every size in its arguments.
 */
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tile/decode_rows.cuh"
#include "cuda/tile/decode_token.cuh"

enum { VALUES = DECODE_ROWS / 32 };

struct tokens {
    struct token at[DECODE_WARPS];
    float v[DECODE_WARPS][32 * VALUES];
};

static __device__ __forceinline__ void decode(const struct fkda_decode_args *a,
                                              struct tokens *tokens, int is_f32, int plain)
{
    const struct accesses by = accesses_of(a, plain);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const struct place w = find_place(a, DECODE_ROWS);
    const int row = w.row + UNIT_ROWS * warp_id();
    const bool has_rows = row < a->V; /* the last block of a head may have fewer */
    const int64_t slot = slot_to_read(a, &w);
    struct raw_token raw;
    if (warp_id() < w.length)
        raw = load_token(a, by, &w, warp_id(), VALUES);
    if (slot < 0 || slot >= a->num_slots) {
#pragma unroll 1
        for (int t = 0; t < w.length && has_rows; t++)
            store_output(a, by, &w, t, row, 0.0f);
        return;
    }
    float s[LANE_ROWS][LANE_CHANNELS] = {{0}};
    if (has_rows && w.length > 0)
        load_rows(s, state_rows(a, w.h, row, slot, is_f32), is_f32, by.wide_state);
#pragma unroll 1
    for (int t0 = 0; t0 < w.length; t0 += DECODE_WARPS) {
        if (t0 > 0) {
            __syncthreads(); /* every warp has left the tokens before, whose places these take */
            if (t0 + warp_id() < w.length)
                raw = load_token(a, by, &w, t0 + warp_id(), VALUES);
        }
        if (t0 + warp_id() < w.length)
            prepare_token(a, by, &w, &raw, &tokens->at[warp_id()], tokens->v[warp_id()], VALUES);
        __syncthreads(); /* the tokens are ready for every warp */
#pragma unroll 1
        for (int i = 0; i < DECODE_WARPS && t0 + i < w.length && has_rows; i++) {
            const struct token *const x = &tokens->at[i];
            const float *const v = tokens->v[i] + UNIT_ROWS * warp_id();
            store_output(a, by, &w, t0 + i, row, step_rows(s, x, v, is_f32));
            if (x->slot >= 0 && x->slot < a->num_slots)
                store_rows(s, state_rows(a, w.h, row, x->slot, is_f32), is_f32, by.wide_state);
        }
    }
    if (!a->columns_to_write && has_rows && w.length > 0)
        store_rows(s, state_rows(a, w.h, row, slot, is_f32), is_f32, by.wide_state);
}

/* By the dtype of the state, and whether the call is plain. */
#define DEFINE_DECODE(name, is_f32, plain)                                           \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS, 4)               \
        fkda_decode_##name##_sm80(const __grid_constant__ struct fkda_decode_args a) \
    {                                                                                \
        __shared__ __align__(16) struct tokens tokens;                               \
        decode(&a, &tokens, is_f32, plain);                                          \
    }

DEFINE_DECODE(f32, 1, 1)
DEFINE_DECODE(bf16, 0, 1)
DEFINE_DECODE(f32_any, 1, 0)
DEFINE_DECODE(bf16_any, 0, 0)
