/* decode_rows.cuh: eight value rows of a state in the registers of a warp, and what a token does to
 * them. Steps of the decode kernels.
 *
 *     p = s . (a k)    u = b (v - p)
 *     out = s . (a q) + u (k . q)    s <- keep s + (change s + u k)
 *
 * Half a warp holds a row: lanes 0 .. 15 the even rows, lanes 16 .. 31 the odd ones, 16 bytes of
 * the stored row at a time, so that an access of the warp is 512 bytes. Every kernel takes these
 * steps in this order: which of them runs changes no bit.
 */
#ifndef FKDA_DECODE_ROWS_CUH
#define FKDA_DECODE_ROWS_CUH

#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/select.cuh"
#include "cuda/tile/decode_token.cuh"

enum {
    UNIT_ROWS = 8,         /* of a warp at a time */
    LANE_ROWS = 4,         /* of them in a lane: 2 r + lane / 16 */
    LANE_CHANNELS = 8,     /* of each of them in a lane */
    SUMS = 2 * LANE_ROWS,  /* of a lane and token: p and s . (a q) of its rows */
    SUM_LANES = 16 / SUMS, /* neighbours that hold the same sum after reduce() */
};

static __device__ __forceinline__ int lane_of_row(void)
{
    return lane_id() % 16;
}

/* The row of the unit whose sum this lane holds after reduce(). */
static __device__ __forceinline__ int row_of_sum(void)
{
    return 2 * (lane_of_row() / SUM_LANES % LANE_ROWS) + lane_id() / 16;
}

/* The first of the lane's channels 4 half .. 4 half + 3 of a row. */
static __device__ __forceinline__ int channel_of(int half, int is_f32)
{
    return is_f32 ? 64 * half + 4 * lane_of_row() : 8 * lane_of_row() + 4 * half;
}

/* Where a lane's 16 bytes lie: of local row r, fp32 in two pieces. */
static __device__ __forceinline__ int offset_of(int r, int piece, int is_f32)
{
    const int row_bytes = TILE_K * (is_f32 ? 4 : 2);
    return (2 * r + lane_id() / 16) * row_bytes + 256 * piece + 16 * lane_of_row();
}

/* Value row `row` of head h in a slot. */
static __device__ __forceinline__ char *state_rows(const struct fkda_decode_args *a, int h, int row,
                                                   int64_t slot, int is_f32)
{
    const int64_t at = slot * a->state.stride_slot + h * a->state.stride_h + row * TILE_K;
    return (char *)a->state.data + at * (is_f32 ? 4 : 2);
}

/* ---- Loads and stores ------------------------------------------------------------------------ */

/* Rows as they are stored: 16 bytes a piece, the second for fp32. */
struct raw_rows {
    uint4 piece[LANE_ROWS][2];
};

static __device__ __forceinline__ void expand_rows(float s[LANE_ROWS][LANE_CHANNELS],
                                                   const struct raw_rows *raw, int is_f32)
{
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const uint4 x = raw->piece[r][0], y = raw->piece[r][1];
        s[r][0] = is_f32 ? __uint_as_float(x.x) : bf16_low(x.x);
        s[r][1] = is_f32 ? __uint_as_float(x.y) : bf16_high(x.x);
        s[r][2] = is_f32 ? __uint_as_float(x.z) : bf16_low(x.y);
        s[r][3] = is_f32 ? __uint_as_float(x.w) : bf16_high(x.y);
        s[r][4] = is_f32 ? __uint_as_float(y.x) : bf16_low(x.z);
        s[r][5] = is_f32 ? __uint_as_float(y.y) : bf16_high(x.z);
        s[r][6] = is_f32 ? __uint_as_float(y.z) : bf16_low(x.w);
        s[r][7] = is_f32 ? __uint_as_float(y.w) : bf16_high(x.w);
    }
}

static __device__ __forceinline__ uint4 load_piece_narrow(const char *at, int is_f32)
{
    const uint32_t *const word = (const uint32_t *)at;
    const uint16_t *const half = (const uint16_t *)at;
    if (is_f32)
        return make_uint4(word[0], word[1], word[2], word[3]);
    return make_uint4(half[0] | (uint32_t)half[1] << 16, half[2] | (uint32_t)half[3] << 16,
                      half[4] | (uint32_t)half[5] << 16, half[6] | (uint32_t)half[7] << 16);
}

/* From global memory; `wide`: rows are aligned to 16 bytes. */
static __device__ __forceinline__ void load_rows(float s[LANE_ROWS][LANE_CHANNELS],
                                                 const char *rows, int is_f32, int wide)
{
    struct raw_rows raw = {{{{0}}}};
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
        for (int piece = 0; piece < (is_f32 ? 2 : 1); piece++) {
            const char *const at = rows + offset_of(r, piece, is_f32);
            raw.piece[r][piece] = wide ? ld_global_stream_u32x4(at) : load_piece_narrow(at, is_f32);
        }
    expand_rows(s, &raw, is_f32);
}

static __device__ __forceinline__ void store_piece_narrow(char *at, uint4 x, int is_f32)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (is_f32) {
            ((uint32_t *)at)[i] = words[i];
        } else {
            ((uint16_t *)at)[2 * i] = (uint16_t)words[i];
            ((uint16_t *)at)[2 * i + 1] = (uint16_t)(words[i] >> 16);
        }
    }
}

static __device__ __forceinline__ void store_rows(const float s[LANE_ROWS][LANE_CHANNELS],
                                                  char *rows, int is_f32, int wide)
{
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
        for (int piece = 0; piece < (is_f32 ? 2 : 1); piece++) {
            const float *const x = s[r] + 4 * piece;
            char *const at = rows + offset_of(r, piece, is_f32);
            uint4 out;
            if (is_f32)
                out = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                 __float_as_uint(x[2]), __float_as_uint(x[3]));
            else
                out = make_uint4(cvt_rn_bf16x2(x[0], x[1]), cvt_rn_bf16x2(x[2], x[3]),
                                 cvt_rn_bf16x2(x[4], x[5]), cvt_rn_bf16x2(x[6], x[7]));
            if (wide)
                *(uint4 *)at = out;
            else
                store_piece_narrow(at, out, is_f32);
        }
}

/* ---- A token --------------------------------------------------------------------------------- */

/* Sums of x over the lanes of a row, all at once: each step halves what a lane still has to add,
 * and lane l of the 16 ends with sum l / SUM_LANES. */
static __device__ __forceinline__ float reduce(float x[SUMS])
{
#pragma unroll
    for (int lanes = 8; lanes >= 1; lanes /= 2) {
        const int count = SUMS * lanes / 16; /* sums left after this step */
        const int upper = lane_id() & lanes;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const float own = select_f32(upper, x[count + i], x[i]);
            const float other = select_f32(upper, x[i], x[count + i]);
            x[i] = own + __shfl_xor_sync(~0u, other, lanes);
        }
        if (count == 0)
            x[0] += __shfl_xor_sync(~0u, x[0], lanes);
    }
    return x[0];
}

static __device__ __forceinline__ void load_lane(float x[LANE_CHANNELS], const float row[TILE_K],
                                                 int is_f32)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = *(const float4 *)(row + channel_of(half, is_f32));
        x[4 * half] = four.x;
        x[4 * half + 1] = four.y;
        x[4 * half + 2] = four.z;
        x[4 * half + 3] = four.w;
    }
}

/* Applies one token to the unit; `v` are its values of these rows. -> the output of row
 * row_of_sum(), in the lanes 8 .. 15 and 24 .. 31. */
static __device__ __forceinline__ float step_rows(float s[LANE_ROWS][LANE_CHANNELS],
                                                  const struct token *x, const float *v, int is_f32)
{
    float sums[SUMS], ak[LANE_CHANNELS], aq[LANE_CHANNELS];
    load_lane(ak, x->ak, is_f32);
    load_lane(aq, x->aq, is_f32);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        sums[r] = s[r][0] * ak[0];
        sums[LANE_ROWS + r] = s[r][0] * aq[0];
#pragma unroll
        for (int i = 1; i < LANE_CHANNELS; i++) {
            sums[r] = fmaf(s[r][i], ak[i], sums[r]);
            sums[LANE_ROWS + r] = fmaf(s[r][i], aq[i], sums[LANE_ROWS + r]);
        }
    }
    const float sum = reduce(sums); /* p; in the upper half of the 16 lanes s . (a q) */
    const float u = __shfl_sync(~0u, x->b * (v[row_of_sum()] - sum), lane_id() & ~8);
    float keep[LANE_CHANNELS], change[LANE_CHANNELS], k[LANE_CHANNELS];
    load_lane(keep, x->keep, is_f32);
    load_lane(change, x->change, is_f32);
    load_lane(k, x->k, is_f32);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const float u_r = __shfl_sync(~0u, u, (lane_id() & 16) + r * SUM_LANES);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++)
            s[r][i] = fmaf(keep[i], s[r][i], fmaf(change[i], s[r][i], u_r * k[i]));
    }
    return fmaf(u, x->kq, sum);
}

/* The unit's outputs of a token, as step_rows() leaves them. */
static __device__ __forceinline__ void store_output(const struct fkda_decode_args *a,
                                                    struct accesses by, const struct place *w,
                                                    int t, int row, float out)
{
    if (!(lane_id() & 8) || lane_id() % SUM_LANES)
        return;
    void *const to = row_at(&a->out, by.out_is_f32, by.plain, w, t, w->h);
    if (by.out_is_f32)
        ((float *)to)[row + row_of_sum()] = out;
    else
        ((uint16_t *)to)[row + row_of_sum()] = (uint16_t)cvt_rn_bf16x2(out, 0.0f);
}

#endif
