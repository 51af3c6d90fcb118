/* bench_inputs.c: tensors for a benchmark case. bf16 inputs, fp32 states, as in serving. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "statistics.h"

enum { D = 128, ALIGNMENT = 64 };

static float draw_uniform(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(*seed >> 40) / 16777216.0f;
}

/* Close enough to N(0, 1): the sum of 12 uniform numbers, less 6. */
static float draw_normal(uint64_t *seed)
{
    float sum = -6;
    for (int i = 0; i < 12; i++)
        sum += draw_uniform(seed);
    return sum;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

static void *allocate(struct bench_inputs *inputs, size_t bytes)
{
    size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *block = aligned_alloc(ALIGNMENT, rounded);
    if (block)
        inputs->blocks[inputs->num_blocks++] = block;
    return block;
}

/* A bf16 tensor with values from N(mean, deviation^2); a short list of numbers, repeated, since
 * drawing each anew would take longer than the benchmark. */
static bool make_tensor(struct bench_inputs *inputs, fkda_tensor *tensor, int ndim,
                        const int64_t *shape, float mean, float deviation, uint64_t seed)
{
    enum { PERIOD = 65521 }; /* a prime: rows do not repeat */
    size_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= (size_t)shape[d];
    uint16_t *values = allocate(inputs, count * sizeof *values);
    if (!values)
        return false;
    for (size_t i = 0; i < count; i++)
        values[i] =
            i < PERIOD ? to_bf16(mean + deviation * draw_normal(&seed)) : values[i - PERIOD];
    *tensor = fkda_tensor_contiguous(values, FKDA_BF16, ndim, shape);
    return true;
}

/* Row (t, h) of tensor = row (t mod T, ...) of a file's layer: head h is head h mod H of layer
 * (h / H) mod count. */
static void tile_tensor(const fkda_tensor *tensor, const struct layer_list *trained, size_t offset)
{
    uint16_t *to = tensor->data;
    int64_t rows = tensor->shape[0] * tensor->shape[1], heads = tensor->shape[2];
    int64_t channels = tensor->ndim == 4 ? tensor->shape[3] : 1;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t h = 0; h < heads; h++) {
            int64_t own = trained->layers[0].HV;
            const struct layer *layer = &trained->layers[(size_t)(h / own) % trained->count];
            const fkda_tensor *from = (const fkda_tensor *)((const char *)&layer->args + offset);
            int64_t at = row % layer->T * from->stride[1] + h % own * from->stride[2];
            memcpy(to + (row * heads + h) * channels, (const uint16_t *)from->data + at,
                   (size_t)channels * sizeof *to);
        }
    }
}

static void tile_parameters(fkda_args *args, const struct layer_list *trained)
{
    float *A_log = args->A_log.data, *dt_bias = args->dt_bias.data;
    for (int64_t h = 0; h < args->A_log.shape[0]; h++) {
        int64_t own = trained->layers[0].HV, from = h % own;
        const fkda_args *layer = &trained->layers[(size_t)(h / own) % trained->count].args;
        A_log[h] = layer->A_log.ndim ? (float)fkda_load_element(&layer->A_log, from) : 0;
        for (int64_t c = 0; c < D; c++)
            dt_bias[h * D + c] =
                layer->dt_bias.ndim ? (float)fkda_load_element(&layer->dt_bias, from * D + c) : 0;
    }
}

/* Uniform in [0, 1), or 0 for slow gates. */
static bool make_parameters(struct bench_inputs *inputs, int64_t H, enum bench_regime regime)
{
    const int64_t heads[] = {H}, channels[] = {H, D};
    uint64_t seed = 7;
    float *A_log = allocate(inputs, (size_t)H * sizeof *A_log);
    float *dt_bias = allocate(inputs, (size_t)(H * D) * sizeof *dt_bias);
    if (!A_log || !dt_bias)
        return false;
    for (int64_t h = 0; h < H; h++)
        A_log[h] = regime == BENCH_SLOW ? 0 : draw_uniform(&seed);
    for (int64_t i = 0; i < H * D; i++)
        dt_bias[i] = regime == BENCH_SLOW ? 0 : draw_uniform(&seed);
    inputs->args.A_log = fkda_tensor_contiguous(A_log, FKDA_F32, 1, heads);
    inputs->args.dt_bias = fkda_tensor_contiguous(dt_bias, FKDA_F32, 2, channels);
    return true;
}

/* Prefill: one final state. Decode: a pool that no cache holds, with small values in it. */
static bool make_states(const struct bench_case *item, size_t pool_bytes,
                        struct bench_inputs *inputs)
{
    size_t slot_bytes = (size_t)(item->H * D * D) * sizeof(float);
    inputs->num_slots = item->N;
    if (item->kind == BENCH_DECODE) {
        int64_t sets = (int64_t)(pool_bytes / slot_bytes) / item->N;
        inputs->num_slots = item->N * (sets < 2 ? 2 : sets);
    }
    const int64_t shape[] = {inputs->num_slots, item->H, D, D}, count = item->N;
    float *states = allocate(inputs, (size_t)inputs->num_slots * slot_bytes);
    inputs->slots = allocate(inputs, (size_t)inputs->num_slots * sizeof *inputs->slots);
    if (!states || !inputs->slots)
        return false;
    for (size_t i = 0; i < (size_t)inputs->num_slots * slot_bytes / sizeof *states; i++)
        states[i] = 0.01f * (float)(i % 61);
    for (int64_t i = 0; i < inputs->num_slots; i++)
        inputs->slots[i] = i;
    inputs->args.final_state = fkda_tensor_contiguous(states, FKDA_F32, 4, shape);
    if (item->kind == BENCH_DECODE)
        inputs->args.state_indices = fkda_tensor_contiguous(inputs->slots, FKDA_I64, 1, &count);
    return true;
}

bool fkda_make_inputs(const struct bench_case *item, const struct layer_list *trained,
                      size_t pool_bytes, struct bench_inputs *inputs)
{
    const int64_t rows[] = {item->N, item->T, item->H, D};
    const bool slow = item->regime == BENCH_SLOW;
    *inputs = (struct bench_inputs){.num_blocks = 0};
    fkda_args *args = &inputs->args;
    fkda_args_init(args);
    args->scale = 1 / sqrt((double)D);
    bool made = make_tensor(inputs, &args->q, 4, rows, 0, 1, 1) &&
                make_tensor(inputs, &args->k, 4, rows, 0, 1, 2) &&
                make_tensor(inputs, &args->v, 4, rows, 0, 1, 3) &&
                make_tensor(inputs, &args->g, 4, rows, slow ? -8.5f : 0, slow ? 0.5f : 1, 4) &&
                make_tensor(inputs, &args->beta, 3, rows, 0, 1, 5) &&
                make_tensor(inputs, &args->out, 4, rows, 0, 1, 6) &&
                make_parameters(inputs, item->H, item->regime) &&
                make_states(item, pool_bytes, inputs);
    if (!made) {
        fkda_free_inputs(inputs);
        return false;
    }
    if (item->regime == BENCH_TRAINED) {
        tile_tensor(&args->q, trained, offsetof(fkda_args, q));
        tile_tensor(&args->k, trained, offsetof(fkda_args, k));
        tile_tensor(&args->v, trained, offsetof(fkda_args, v));
        tile_tensor(&args->g, trained, offsetof(fkda_args, g));
        tile_tensor(&args->beta, trained, offsetof(fkda_args, beta));
        tile_parameters(args, trained);
        args->lower_bound = trained->layers[0].args.lower_bound;
        args->gate = trained->layers[0].args.gate;
    }
    return true;
}

void fkda_free_inputs(struct bench_inputs *inputs)
{
    for (int i = 0; i < inputs->num_blocks; i++)
        free(inputs->blocks[i]);
    inputs->num_blocks = 0;
}
