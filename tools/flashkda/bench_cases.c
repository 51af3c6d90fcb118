/* bench_cases.c: times one case. One call to warm up, then calls until the budget is spent. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "pieces.h"
#include "program.h"
#include "reason.h"
#include "statistics.h"

enum { D = 128, MAX_SAMPLES = 100000 };

static fkda_status call_once(const struct bench_case *item, const fkda_args *args, char *reason,
                             size_t reason_bytes)
{
    return item->kind == BENCH_DECODE ? fkda_decode(args, reason, reason_bytes)
                                      : fkda_forward(args, reason, reason_bytes);
}

/* Decode walks over the pool, so that every call finds its states in memory, not in a cache. */
static void choose_slots(struct bench_inputs *inputs, int64_t N, int64_t call)
{
    if (inputs->args.state_indices.ndim)
        inputs->args.state_indices.data = inputs->slots + call * N % inputs->num_slots;
}

static double read_processor_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* `values` has room for MAX_SAMPLES times on the wall, and as many of the processor behind them. */
static fkda_status take_samples(const struct bench_case *item, struct bench_inputs *inputs,
                                const struct bench_budget *budget, double *values, int64_t *count,
                                char *reason, size_t reason_bytes)
{
    fkda_status status = FKDA_OK;
    double spent = 0;
    *count = 0;
    for (int64_t i = 1; !status && *count < MAX_SAMPLES; i++) {
        choose_slots(inputs, item->N, i);
        double start = fkda_read_clock(), busy = read_processor_clock();
        status = call_once(item, &inputs->args, reason, reason_bytes);
        double seconds = fkda_read_clock() - start;
        values[MAX_SAMPLES + *count] = 1e3 * (read_processor_clock() - busy);
        values[(*count)++] = 1e3 * seconds;
        spent += seconds;
        /* A slow call is not repeated for its own sake: at most three times the budget. */
        if ((spent >= budget->seconds && *count >= budget->min_samples) ||
            spent >= 3 * budget->seconds)
            break;
    }
    return status;
}

/* Head 0 of sequence 0 in float64, from the state it starts with. */
struct head_reference {
    double *out, *state;
    fkda_args args;
};

static fkda_status start_reference(const struct bench_case *item, const struct bench_inputs *inputs,
                                   struct head_reference *head, char *reason, size_t reason_bytes)
{
    const int64_t out[] = {1, item->T, 1, D}, state[] = {1, 1, D, D};
    fkda_args args = fkda_slice_head(&inputs->args, 0);
    head->out = calloc((size_t)(item->T * D), sizeof(double));
    head->state = calloc(D * D, sizeof(double));
    head->args = args;
    if (!head->out || !head->state)
        return (fkda_status)fail((struct reason){reason, reason_bytes}, FKDA_ERROR_OUT_OF_MEMORY,
                                 "no memory for the reference");
    fkda_tensor *inputs_of_head[] = {&args.q, &args.k, &args.v, &args.g, &args.beta};
    for (size_t i = 0; i < sizeof inputs_of_head / sizeof *inputs_of_head; i++)
        inputs_of_head[i]->shape[0] = 1; /* sequence 0 */
    if (item->kind == BENCH_DECODE) {    /* the first call decodes from slot 0 */
        args.initial_state = args.final_state;
        args.initial_state.shape[0] = 1;
        args.state_indices = (fkda_tensor){.data = NULL};
    }
    args.out = fkda_tensor_contiguous(head->out, FKDA_F64, 4, out);
    args.final_state = fkda_tensor_contiguous(head->state, FKDA_F64, 4, state);
    args.report = NULL;
    return fkda_reference(&args, reason, reason_bytes);
}

static void compare_reference(const struct bench_case *item, const struct head_reference *head,
                              struct bench_result *result)
{
    const int64_t out[] = {1, item->T, 1, D}, state[] = {1, 1, D, D};
    fkda_tensor wanted_out = fkda_tensor_contiguous(head->out, FKDA_F64, 4, out);
    fkda_tensor wanted_state = fkda_tensor_contiguous(head->state, FKDA_F64, 4, state);
    fkda_tensor got_out = head->args.out, got_state = head->args.final_state;
    struct error_sums out_sums = {0, 0, 0}, state_sums = {0, 0, 0};
    got_out.shape[0] = got_state.shape[0] = 1;
    fkda_add_errors(&out_sums, &got_out, &wanted_out, -1);
    fkda_add_errors(&state_sums, &got_state, &wanted_state, -1);
    result->error_out = fkda_error_ratio(&out_sums);
    result->error_state = fkda_error_ratio(&state_sums);
}

static void set_sizes(const struct bench_case *item, struct bench_result *result)
{
    double tokens = (double)(item->N * item->T), heads = (double)item->H;
    double states = (double)item->N * heads * D * D * sizeof(float);
    result->flops = 6.0 * D * D * tokens * heads;
    result->bytes = tokens * heads * (5 * D + 1) * sizeof(uint16_t) + states;
    if (item->kind == BENCH_DECODE)
        result->bytes += states; /* read and written */
}

fkda_status fkda_time_case(const struct bench_case *item, struct bench_inputs *inputs,
                           const struct bench_budget *budget, struct bench_result *result,
                           char *reason, size_t reason_bytes)
{
    struct head_reference head = {.out = NULL};
    double *values = calloc(2 * MAX_SAMPLES, sizeof *values);
    *result = (struct bench_result){.samples = 0};
    set_sizes(item, result);
    inputs->args.isa = item->isa;
    inputs->args.precision = item->precision;
    inputs->args.num_threads = item->threads;
    inputs->args.report = &result->report;
    fkda_status status =
        values ? FKDA_OK
               : (fkda_status)fail((struct reason){reason, reason_bytes}, FKDA_ERROR_OUT_OF_MEMORY,
                                   "no memory for the samples");
    choose_slots(inputs, item->N, 0);
    if (!status)
        status = start_reference(item, inputs, &head, reason, reason_bytes);
    if (!status)
        status = call_once(item, &inputs->args, reason, reason_bytes); /* to warm up */
    if (!status) {
        compare_reference(item, &head, result);
        status = take_samples(item, inputs, budget, values, &result->samples, reason, reason_bytes);
    }
    if (!status) {
        size_t count = (size_t)result->samples;
        fkda_sort_values(values, count);
        fkda_sort_values(values + MAX_SAMPLES, count);
        result->cpu_ms = fkda_quantile(values + MAX_SAMPLES, count, 0.5);
        result->min_cpu_ms = values[MAX_SAMPLES];
        result->min_ms = values[0];
        result->p10_ms = fkda_quantile(values, count, 0.1);
        result->median_ms = fkda_quantile(values, count, 0.5);
        result->p90_ms = fkda_quantile(values, count, 0.9);
    }
    free(values);
    free(head.out);
    free(head.state);
    return status;
}
