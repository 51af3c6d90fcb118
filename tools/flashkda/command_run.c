/* command_run.c: `flashkda run`: layers of a file -> out and final_state in another. */
#include <cjson/cJSON.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "layers.h"
#include "pieces.h"
#include "progress.h"

_Static_assert(FKDA_ISA_COUNT == 6, "--isa of run and check lists the names");
const char fkda_help_run[] =
    "flashkda run IN.safetensors -o OUT.safetensors [options]\n"
    "\n"
    "Computes every layer of IN: tensors q, k, v, g, beta and where present A_log, dt_bias,\n"
    "initial_state, cu_seqlens, with or without a prefix (layer0.q, layer0.k, ...). OUT receives\n"
    "layer0.out (BF16) and layer0.final_state (F32). OUT appears whole or not at all.\n"
    "\n"
    "  -o, --output FILE      where the results go\n"
    "      --prefix NAME      only this layer\n"
    "      --scale X          of the output; else the metadata's scale, else 1 / sqrt(K)\n"
    "      --lower-bound X    of the gate, -5 to 0, or none (softplus gate); else the metadata's\n"
    "      --device NAME      auto or cpu: tensors stay in host memory, so cuda is refused\n"
    "      --isa NAME         CPU kernels: auto, portable, avx2, avx512, avx512_bf16, amx_bf16\n"
    "      --precision NAME   fp32 or bf16 products (the state is fp32 either way)\n"
    "      --threads N        else FLASH_KDA_NUM_THREADS, else all\n"
    "      --piece-tokens N   cut long sequences into calls of N tokens (the bits do not change);\n"
    "                         else one call, or about 0.2 s each where a progress bar shows\n"
    "      --json             results as JSON\n"
    "  -q, --quiet            no progress bar\n"
    "\n"
    "The metadata may also hold use_qk_l2norm_in_kernel, use_gate_in_kernel,\n"
    "use_beta_sigmoid_in_kernel and allow_neg_eigval, each true or false.\n";

/* One layer's result. */
struct run_result {
    fkda_report report;
    int64_t num_tokens;
    double seconds;
};

/* The unfinished output, for the handler that removes it when the program is interrupted. */
static struct safetensors_writer output;

static void remove_output(int signal_number)
{
    if (output.temporary[0])
        unlinkat(output.folder, output.temporary, 0);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void watch_signals(void)
{
    static const int watched[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    for (size_t i = 0; i < sizeof watched / sizeof *watched; i++) {
        struct sigaction old, action = {.sa_handler = remove_output};
        sigemptyset(&action.sa_mask);
        if (sigaction(watched[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(watched[i], &action, NULL);
    }
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of the call, not a death */
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Describes the output file, creates it and points every layer's out and final_state into it. */
static int create_output(const struct options *options, struct layer_list *list)
{
    char reason[FKDA_FILE_REASON_BYTES] = "no memory for its tensors", scale[32], bound[32];
    size_t count = 2 * list->count;
    struct safetensors_tensor *tensors = calloc(count, sizeof *tensors);
    enum fkda_file_status status = tensors ? FKDA_FILE_OK : FKDA_FILE_ERROR_MEMORY;
    for (size_t i = 0; i < count && !status; i++) {
        const struct layer *layer = &list->layers[i / 2];
        const fkda_tensor *source = i % 2 ? &layer->args.final_state : &layer->args.out;
        tensors[i].name = fkda_join_name(layer->prefix, i % 2 ? "final_state" : "out");
        tensors[i].dtype = fkda_find_file_dtype(i % 2 ? "F32" : "BF16");
        tensors[i].ndim = source->ndim;
        memcpy(tensors[i].shape, source->shape, sizeof source->shape);
        if (!tensors[i].name)
            status = FKDA_FILE_ERROR_MEMORY;
    }
    if (!status) {
        const fkda_args *args = &list->layers[0].args;
        snprintf(scale, sizeof scale, "%.17g", args->scale);
        snprintf(bound, sizeof bound, "%.17g", args->lower_bound);
        const struct safetensors_pair metadata[] = {
            {"producer", "flashkda " FKDA_VERSION_STRING},
            {"scale", scale},
            {"lower_bound", args->gate == FKDA_GATE_BOUNDED ? bound : "none"},
        };
        status = fkda_create_safetensors(options->output, tensors, count, metadata, 3, &output,
                                         reason, sizeof reason);
    }
    for (size_t i = 0; i < count && tensors; i++) {
        struct layer *layer = &list->layers[i / 2];
        *(i % 2 ? &layer->args.final_state.data : &layer->args.out.data) = tensors[i].data;
        free((char *)(uintptr_t)tensors[i].name);
    }
    free(tensors);
    if (status)
        return fkda_print_error(status == FKDA_FILE_ERROR_MEMORY ? EXIT_LIBRARY : EXIT_OUTPUT,
                                options, "%s: %s", options->output, reason);
    return EXIT_OK;
}

static void advance(void *context, int64_t num_tokens)
{
    fkda_advance_progress(context, (double)num_tokens);
}

static int run_layers(const struct options *options, struct layer_list *list,
                      struct run_result *results)
{
    struct progress progress;
    double total = 0;
    for (size_t i = 0; i < list->count; i++)
        total += (double)(list->layers[i].B * list->layers[i].T);
    fkda_start_progress(&progress, options->quiet, total);
    int code = EXIT_OK;
    for (size_t i = 0; i < list->count && !code; i++) {
        struct layer *layer = &list->layers[i];
        char reason[FKDA_REASON_BYTES];
        struct piece_options pieces = {options->piece_tokens, advance, &progress};
        if (!pieces.tokens && progress.enabled)
            pieces.tokens = fkda_piece_tokens(layer);
        fkda_label_progress(&progress, layer->label, i, list->count);
        fkda_touch_layer(layer);
        fkda_warm_up(&layer->args);
        layer->args.report = &results[i].report;
        double start = fkda_read_clock();
        fkda_status status =
            fkda_call_in_pieces(fkda_forward, &layer->args, &pieces, reason, sizeof reason);
        results[i].seconds = fkda_read_clock() - start;
        if (status) {
            fkda_end_progress(&progress);
            code =
                fkda_print_error(status == FKDA_ERROR_INVALID_ARGUMENT ? EXIT_INPUT : EXIT_LIBRARY,
                                 options, "%s: %s: %s", options->input, layer->label, reason);
        }
    }
    fkda_end_progress(&progress);
    return code;
}

static void print_table(const struct options *options, const struct layer_list *list,
                        const struct run_result *results)
{
    printf("%-16s %9s %6s %10s %12s %9s %8s  %s\n", "layer", "tokens", "heads", "time ms",
           "tokens/s", "GFLOP/s", "GB/s", "kernel");
    for (size_t i = 0; i < list->count; i++) {
        const struct layer *layer = &list->layers[i];
        double seconds = results[i].seconds, tokens = (double)layer->num_tokens;
        printf("%-16s %9.0f %6lld %10.3f %12.0f %9.2f %8.3f  %s, %d thread%s\n", layer->label,
               tokens, (long long)layer->HV, 1e3 * seconds, tokens / seconds,
               1e-9 * fkda_layer_flops(layer) / seconds, 1e-9 * fkda_layer_bytes(layer) / seconds,
               results[i].report.kernel, results[i].report.num_threads,
               results[i].report.num_threads == 1 ? "" : "s");
    }
    printf("wrote %s\n", options->output);
}

static int print_json(const struct options *options, const struct layer_list *list,
                      const struct run_result *results)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "version", fkda_version());
    cJSON_AddStringToObject(json, "input", options->input);
    cJSON_AddStringToObject(json, "output", options->output);
    cJSON *layers = cJSON_AddArrayToObject(json, "layers");
    for (size_t i = 0; i < list->count; i++) {
        const struct layer *layer = &list->layers[i];
        double seconds = results[i].seconds;
        cJSON *item = fkda_layer_json(layer);
        cJSON_AddStringToObject(item, "kernel", results[i].report.kernel);
        cJSON_AddNumberToObject(item, "threads", results[i].report.num_threads);
        cJSON_AddNumberToObject(item, "ms", 1e3 * seconds);
        cJSON_AddNumberToObject(item, "tokens_per_s", (double)layer->num_tokens / seconds);
        cJSON_AddNumberToObject(item, "gflop_per_s", 1e-9 * fkda_layer_flops(layer) / seconds);
        cJSON_AddNumberToObject(item, "gb_per_s", 1e-9 * fkda_layer_bytes(layer) / seconds);
        cJSON_AddItemToArray(layers, item);
    }
    return fkda_print_json(json, options);
}

static int run_file(const struct options *options, struct layer_list *list)
{
    struct run_result *results = calloc(list->count, sizeof *results);
    if (!results)
        return fkda_print_error(EXIT_LIBRARY, options, "no memory for %zu layers", list->count);
    char reason[FKDA_FILE_REASON_BYTES];
    watch_signals();
    int code = create_output(options, list);
    if (!code) {
        code = run_layers(options, list, results);
        if (code)
            fkda_discard_safetensors(&output);
        else if (fkda_commit_safetensors(&output, reason, sizeof reason))
            code = fkda_print_error(EXIT_OUTPUT, options, "%s: %s", options->output, reason);
    }
    if (!code && options->json)
        code = print_json(options, list, results);
    else if (!code)
        print_table(options, list, results);
    free(results);
    return code;
}

int fkda_command_run(int argc, char **argv)
{
    struct options options;
    bool help;
    int code = fkda_parse_options(
        argc, argv, OPTION_INPUT | OPTION_OUTPUT | OPTION_LAYERS | OPTION_DEVICE | OPTION_JSON,
        &options, &help);
    if (help)
        fputs(fkda_help_run, stdout);
    if (code || help)
        return code;
    if (same_file(options.input, options.output))
        return fkda_print_error(EXIT_USAGE, &options, "%s: the output is the input",
                                options.output);
    struct safetensors_file file;
    struct layer_list list;
    code = fkda_load_layers(&options, &file, &list);
    if (code)
        return code;
    code = run_file(&options, &list);
    fkda_free_layers(&list);
    fkda_close_safetensors(&file);
    return code;
}
