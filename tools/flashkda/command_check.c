/* command_check.c: `flashkda check`: every layer of a file against the float64 definition. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "pieces.h"
#include "progress.h"
#include "statistics.h"

const char fkda_help_check[] =
    "flashkda check IN.safetensors [options]\n"
    "\n"
    "Computes every layer of IN as `flashkda run` does, and again with the float64 definition, "
    "and\n"
    "prints RMS(error) / RMS(reference) of out (bf16) and final_state (fp32). Exit code 1 when a\n"
    "ratio is past its bound: 1.75e-3 and 1e-6 with fp32 products (rounding out to bf16 alone "
    "costs\n"
    "1.66e-3), 4e-3 and 4e-3 with bf16 products. A NaN is never within a bound.\n"
    "\n"
    "      --prefix NAME      only this layer\n"
    "      --scale X          as for run\n"
    "      --lower-bound X    as for run\n"
    "      --device NAME      auto or cpu: tensors stay in host memory, so cuda is refused\n"
    "      --isa NAME         CPU kernels: auto, portable, avx2, avx512, avx512_bf16, amx_bf16\n"
    "      --precision NAME   fp32 or bf16\n"
    "      --threads N        else FLASH_KDA_NUM_THREADS, else all\n"
    "      --piece-tokens N   as for run\n"
    "      --json             results as JSON, with the distribution of each layer's decays\n"
    "  -q, --quiet            no progress bar\n";

struct bounds {
    double out, state;
};
static const struct bounds fp32_bounds = {1.75e-3, 1e-6}, bf16_bounds = {4e-3, 4e-3};

struct check_result {
    fkda_report report;
    double seconds, reference_seconds;
    struct error_sums out, state;
    struct bounds bounds;
    struct decay_statistics decay;
    bool passed;
};

/* What the threads that walk the reference share. */
struct reference_work {
    const struct layer *layer;
    struct error_sums *out, *state; /* [H] each */
    struct progress *progress;
    fkda_status status;
    char reason[FKDA_REASON_BYTES];
};

static size_t count_elements(const fkda_tensor *tensor)
{
    size_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        count *= (size_t)tensor->shape[d];
    return count;
}

static void advance(void *context, int64_t num_tokens)
{
    fkda_advance_progress(context, (double)num_tokens);
}

static void advance_head(void *context, int64_t num_tokens)
{
#pragma omp critical(reference_progress)
    fkda_advance_progress(context, (double)num_tokens);
}

static void note_failure(struct reference_work *work, fkda_status status, const char *reason)
{
#pragma omp critical(reference_failure)
    if (!work->status) {
        work->status = status;
        snprintf(work->reason, sizeof work->reason, "%s", reason);
    }
}

/* Key head h: the reference in float64, compared with what the layer's out and final_state hold. */
static void check_head(struct reference_work *work, int64_t h)
{
    const struct layer *layer = work->layer;
    fkda_args computed = fkda_slice_head(&layer->args, h), args = computed;
    char reason[FKDA_REASON_BYTES] = "no memory for the reference";
    double *out = calloc(count_elements(&args.out) + 1, sizeof *out);
    double *state = calloc(count_elements(&args.final_state) + 1, sizeof *state);
    fkda_status status = out && state ? FKDA_OK : FKDA_ERROR_OUT_OF_MEMORY;
    if (!status) {
        const struct piece_options pieces = {FKDA_CHUNK_TOKENS * 32, advance_head, work->progress};
        args.report = NULL;
        args.out = fkda_tensor_contiguous(out, FKDA_F64, 4, computed.out.shape);
        args.final_state = fkda_tensor_contiguous(state, FKDA_F64, 4, computed.final_state.shape);
        status = fkda_call_in_pieces(fkda_reference, &args, &pieces, reason, sizeof reason);
    }
    if (status) {
        note_failure(work, status, reason);
    } else {
        bool packed = args.cu_seqlens.ndim != 0;
        fkda_add_errors(&work->out[h], &computed.out, &args.out, packed ? layer->num_tokens : -1);
        fkda_add_errors(&work->state[h], &computed.final_state, &args.final_state, -1);
    }
    free(out);
    free(state);
}

static fkda_status check_reference(const struct layer *layer, struct check_result *result,
                                   struct progress *progress, char *reason, size_t reason_bytes)
{
    double start = fkda_read_clock();
    size_t heads = (size_t)layer->H;
    struct error_sums *sums = calloc(2 * heads + 1, sizeof *sums);
    if (!sums) {
        snprintf(reason, reason_bytes, "no memory for %zu heads", heads);
        return FKDA_ERROR_OUT_OF_MEMORY;
    }
    struct reference_work work = {layer, sums, sums + heads, progress, FKDA_OK, ""};
    int threads = result->report.num_threads > 0 ? result->report.num_threads : 1;
    (void)threads; /* without OpenMP */
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t h = 0; h < layer->H; h++)
        check_head(&work, h);
    for (size_t h = 0; h < heads; h++) { /* in order: the sums do not depend on the threads */
        fkda_merge_errors(&result->out, &work.out[h]);
        fkda_merge_errors(&result->state, &work.state[h]);
    }
    free(sums);
    if (work.status)
        snprintf(reason, reason_bytes, "%s", work.reason);
    result->reference_seconds = fkda_read_clock() - start;
    return work.status;
}

/* The layer's own outputs, poisoned: what the library leaves unwritten becomes NaN. */
static bool make_outputs(struct layer *layer)
{
    size_t out = count_elements(&layer->args.out) * sizeof(uint16_t);
    size_t state = count_elements(&layer->args.final_state) * sizeof(float);
    layer->args.out.data = malloc(out + 1);
    layer->args.final_state.data = malloc(state + 1);
    if (!layer->args.out.data || !layer->args.final_state.data)
        return false;
    memset(layer->args.out.data, 0xFF, out);
    memset(layer->args.final_state.data, 0xFF, state);
    return true;
}

static void free_outputs(struct layer *layer)
{
    free(layer->args.out.data);
    free(layer->args.final_state.data);
    layer->args.out.data = layer->args.final_state.data = NULL;
}

static void judge(struct check_result *result)
{
    result->bounds = strstr(result->report.kernel, "prefill_bf16") ? bf16_bounds : fp32_bounds;
    /* Written so that a NaN fails. */
    result->passed = fkda_error_ratio(&result->out) <= result->bounds.out &&
                     fkda_error_ratio(&result->state) <= result->bounds.state;
}

static fkda_status check_layer(const struct options *options, struct layer *layer,
                               struct check_result *result, struct progress *progress, char *reason,
                               size_t reason_bytes)
{
    if (!make_outputs(layer)) {
        snprintf(reason, reason_bytes, "no memory for out and final_state");
        return FKDA_ERROR_OUT_OF_MEMORY;
    }
    struct piece_options pieces = {options->piece_tokens, advance, progress};
    if (!pieces.tokens && progress->enabled)
        pieces.tokens = fkda_piece_tokens(layer);
    fkda_touch_layer(layer);
    fkda_warm_up(&layer->args);
    layer->args.report = &result->report;
    double start = fkda_read_clock();
    fkda_status status =
        fkda_call_in_pieces(fkda_forward, &layer->args, &pieces, reason, reason_bytes);
    result->seconds = fkda_read_clock() - start;
    if (!status)
        status = check_reference(layer, result, progress, reason, reason_bytes);
    if (!status)
        status = fkda_measure_decay(&layer->args, &result->decay);
    judge(result);
    free_outputs(layer);
    return status;
}

static int check_layers(const struct options *options, struct layer_list *list,
                        struct check_result *results)
{
    struct progress progress;
    double total = 0;
    for (size_t i = 0; i < list->count; i++)
        total += (double)(list->layers[i].B * list->layers[i].T) * (double)(list->layers[i].H + 1);
    fkda_start_progress(&progress, options->quiet, total);
    int code = EXIT_OK;
    for (size_t i = 0; i < list->count && !code; i++) {
        struct layer *layer = &list->layers[i];
        char reason[FKDA_REASON_BYTES] = "no memory";
        fkda_label_progress(&progress, layer->label, i, list->count);
        fkda_status status =
            check_layer(options, layer, &results[i], &progress, reason, sizeof reason);
        if (status) {
            fkda_end_progress(&progress);
            free_outputs(layer);
            code =
                fkda_print_error(status == FKDA_ERROR_INVALID_ARGUMENT ? EXIT_INPUT : EXIT_LIBRARY,
                                 options, "%s: %s: %s", options->input, layer->label, reason);
        }
    }
    fkda_end_progress(&progress);
    return code;
}

static size_t count_failed(const struct layer_list *list, const struct check_result *results)
{
    size_t failed = 0;
    for (size_t i = 0; i < list->count; i++)
        failed += !results[i].passed;
    return failed;
}

static void print_table(const struct layer_list *list, const struct check_result *results)
{
    printf("%-16s %8s %6s %9s %10s %10s %10s %10s  %-6s  %s\n", "layer", "tokens", "heads",
           "median g", "out", "bound", "state", "bound", "", "kernel");
    for (size_t i = 0; i < list->count; i++) {
        const struct layer *layer = &list->layers[i];
        const struct check_result *result = &results[i];
        printf("%-16s %8lld %6lld %9.4f %10.2e %10.2e %10.2e %10.2e  %-6s  %s, %.2f ms\n",
               layer->label, (long long)layer->num_tokens, (long long)layer->HV, result->decay.p50,
               fkda_error_ratio(&result->out), result->bounds.out, fkda_error_ratio(&result->state),
               result->bounds.state, result->passed ? "ok" : "FAILED", result->report.kernel,
               1e3 * result->seconds);
    }
    size_t failed = count_failed(list, results);
    if (failed)
        printf("%zu of %zu layers are past a bound\n", failed, list->count);
    else
        printf("%zu of %zu layers within their bounds of the float64 definition\n", list->count,
               list->count);
}

static void add_error(cJSON *json, const char *name, const struct error_sums *sums, double bound)
{
    cJSON *item = cJSON_AddObjectToObject(json, name);
    cJSON_AddNumberToObject(item, "ratio", fkda_error_ratio(sums)); /* null if not finite */
    cJSON_AddNumberToObject(item, "bound", bound);
    cJSON_AddNumberToObject(item, "max_abs_error", sums->largest);
}

static void add_decay(cJSON *json, const struct decay_statistics *decay)
{
    cJSON *item = cJSON_AddObjectToObject(json, "decay");
    cJSON_AddNumberToObject(item, "count", (double)decay->count);
    cJSON_AddNumberToObject(item, "mean", decay->mean);
    cJSON_AddNumberToObject(item, "p01", decay->p01);
    cJSON_AddNumberToObject(item, "p10", decay->p10);
    cJSON_AddNumberToObject(item, "p50", decay->p50);
    cJSON_AddNumberToObject(item, "p90", decay->p90);
    cJSON_AddNumberToObject(item, "p99", decay->p99);
    cJSON *bins = cJSON_AddObjectToObject(item, "histogram");
    cJSON_AddNumberToObject(bins, "log10_first", FKDA_DECAY_FIRST);
    cJSON_AddNumberToObject(bins, "log10_step", FKDA_DECAY_STEP);
    cJSON *counts = cJSON_AddArrayToObject(bins, "counts");
    for (int i = 0; i < FKDA_DECAY_BINS; i++)
        cJSON_AddItemToArray(counts, cJSON_CreateNumber((double)decay->bins[i]));
    cJSON *beta = cJSON_AddObjectToObject(json, "beta");
    cJSON_AddNumberToObject(beta, "mean", decay->beta_mean);
    cJSON_AddNumberToObject(beta, "p99", decay->beta_p99);
}

static int print_json(const struct options *options, const struct layer_list *list,
                      const struct check_result *results)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "version", fkda_version());
    cJSON_AddStringToObject(json, "input", options->input);
    cJSON_AddBoolToObject(json, "passed", count_failed(list, results) == 0);
    cJSON *layers = cJSON_AddArrayToObject(json, "layers");
    for (size_t i = 0; i < list->count; i++) {
        const struct check_result *result = &results[i];
        cJSON *item = fkda_layer_json(&list->layers[i]);
        cJSON_AddStringToObject(item, "kernel", result->report.kernel);
        cJSON_AddNumberToObject(item, "threads", result->report.num_threads);
        cJSON_AddNumberToObject(item, "ms", 1e3 * result->seconds);
        cJSON_AddNumberToObject(item, "reference_ms", 1e3 * result->reference_seconds);
        cJSON_AddBoolToObject(item, "passed", result->passed);
        add_error(item, "out", &result->out, result->bounds.out);
        add_error(item, "state", &result->state, result->bounds.state);
        add_decay(item, &result->decay);
        cJSON_AddItemToArray(layers, item);
    }
    return fkda_print_json(json, options);
}

int fkda_command_check(int argc, char **argv)
{
    struct options options;
    bool help;
    int code = fkda_parse_options(
        argc, argv, OPTION_INPUT | OPTION_LAYERS | OPTION_DEVICE | OPTION_JSON, &options, &help);
    if (help)
        fputs(fkda_help_check, stdout);
    if (code || help)
        return code;
    struct safetensors_file file;
    struct layer_list list;
    code = fkda_load_layers(&options, &file, &list);
    if (code)
        return code;
    struct check_result *results = calloc(list.count, sizeof *results);
    code = results
               ? check_layers(&options, &list, results)
               : fkda_print_error(EXIT_LIBRARY, &options, "no memory for %zu layers", list.count);
    if (!code && options.json)
        code = print_json(&options, &list, results);
    else if (!code)
        print_table(&list, results);
    if (!code && count_failed(&list, results))
        code = EXIT_CHECK_FAILED;
    free(results);
    fkda_free_layers(&list);
    fkda_close_safetensors(&file);
    return code;
}
