/* command_bench.c: `flashkda bench`: the list of cases, and their results beside the ceilings that
 * the same run measured.
 */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "progress.h"

const char fkda_help_bench[] =
    "flashkda bench [options]\n"
    "\n"
    "Times prefill (512, 2048 and 8192 tokens) and decode (1 and 64 sequences) with 32 heads of "
    "128\n"
    "channels, with one thread and with all, and prints each beside what this machine can do, as\n"
    "measured in the same run: the peak of its multiply-add units, and the bandwidth of its "
    "memory\n"
    "(bytes read plus bytes written). A token and head is 98.3 kFLOP of useful work.\n"
    "\n"
    "      --isa NAME       CPU kernels; all: every set that this machine has. Else the one it "
    "uses\n"
    "      --threads N      only this many, instead of one and all\n"
    "      --case TEXT      only cases that contain TEXT: prefill, decode, 2048x32, N64xH32, ...\n"
    "      --regime NAME    random (default), slow or trained gates\n"
    "      --input FILE     layers for --regime trained (a .safetensors file as for run)\n"
    "      --quick          fewer cases and samples\n"
    "      --json           one JSON object per line and case, as in bench/results\n"
    "      --commit TEXT    goes into the records\n"
    "      --device NAME    auto or cpu\n"
    "  -q, --quiet          no progress bar\n"
    "\n"
    "cpu ms is processor time: where it is far below the median of one thread, something else was\n"
    "running, and the shares say little.\n"
    "\n"
    "Decode keeps 1 GB of states (128 MB with --quick), so that they come from memory.\n";

#if defined(__clang__) || !defined(__GNUC__)
#define COMPILER __VERSION__ /* says its name */
#else
#define COMPILER "GCC " __VERSION__
#endif

enum { HEADS = 32, MAX_CASES = 256, MAX_THREAD_COUNTS = 2 };

static const char *const regime_names[] = {"random", "slow", "trained"};

struct bench_run {
    const struct options *options;
    enum bench_regime regime;
    struct layer_list trained;
    struct bench_budget budget;
    int thread_counts[MAX_THREAD_COUNTS], num_thread_counts;
    struct bench_case cases[MAX_CASES];
    struct bench_result results[MAX_CASES];
    int num_cases;
    struct bench_ceiling ceilings[MAX_THREAD_COUNTS];
    struct progress progress;
};

static void name_case(const struct bench_case *item, char *text, size_t bytes)
{
    if (item->kind == BENCH_PREFILL)
        snprintf(text, bytes, "%lldx%lld", (long long)item->T, (long long)item->H);
    else
        snprintf(text, bytes, "N%lldxH%lld", (long long)item->N, (long long)item->H);
}

static const char *kind_name(const struct bench_case *item)
{
    return item->kind == BENCH_PREFILL ? "prefill" : "decode";
}

static const char *precision_name(const struct bench_case *item)
{
    return item->precision == FKDA_PRECISION_BF16 ? "bf16" : "fp32";
}

static void add_case(struct bench_run *run, struct bench_case item)
{
    char name[48], full[64];
    name_case(&item, name, sizeof name);
    snprintf(full, sizeof full, "%s %s", kind_name(&item), name);
    const char *wanted = run->options->bench_case;
    if ((!wanted || strstr(full, wanted)) && run->num_cases < MAX_CASES)
        run->cases[run->num_cases++] = item;
}

/* The sets with bf16 products are those above avx512 (flash_kda.h); the others refuse. */
static bool has_bf16(fkda_isa isa)
{
    return isa == FKDA_ISA_AVX512_BF16 || isa == FKDA_ISA_AMX_BF16;
}

static void add_isa(struct bench_run *run, fkda_isa isa)
{
    static const int64_t lengths[] = {512, 2048, 8192}, sequences[] = {1, 64};
    size_t num_lengths = run->options->quick ? 2 : 3;
    struct bench_case item = {.regime = run->regime, .H = HEADS, .isa = isa};
    for (size_t i = 0; i < num_lengths; i++) {
        for (int t = 0; t < run->num_thread_counts; t++) {
            item.kind = BENCH_PREFILL;
            item.N = 1;
            item.T = lengths[i];
            item.threads = run->thread_counts[t];
            item.precision = FKDA_PRECISION_FP32;
            add_case(run, item);
            item.precision = FKDA_PRECISION_BF16;
            if (has_bf16(isa))
                add_case(run, item);
        }
    }
    for (size_t i = 0; i < 2; i++) {
        for (int t = 0; t < run->num_thread_counts; t++) {
            item.kind = BENCH_DECODE;
            item.N = sequences[i];
            item.T = 1;
            item.threads = run->thread_counts[t];
            item.precision = FKDA_PRECISION_FP32;
            add_case(run, item);
        }
    }
}

static int list_cases(struct bench_run *run)
{
    fkda_info info;
    char reason[FKDA_REASON_BYTES];
    const struct options *options = run->options;
    if (fkda_get_info(&info, reason, sizeof reason))
        return fkda_print_error(EXIT_LIBRARY, options, "%s", reason);
    run->thread_counts[0] = options->num_threads ? options->num_threads : 1;
    run->num_thread_counts = 1;
    if (!options->num_threads && info.num_threads > 1)
        run->thread_counts[run->num_thread_counts++] = info.num_threads;
    fkda_isa chosen = options->isa ? options->isa : (fkda_isa)info.isa_chosen;
    for (int isa = FKDA_ISA_PORTABLE; isa < FKDA_ISA_COUNT; isa++) {
        bool wanted = options->all_isas ? info.isa_usable >> isa & 1 : isa == (int)chosen;
        if (wanted)
            add_isa(run, (fkda_isa)isa);
    }
    if (run->num_cases == 0)
        return fkda_print_error(EXIT_USAGE, options, "--case '%s': no such case",
                                options->bench_case);
    return EXIT_OK;
}

static int read_regime(struct bench_run *run, struct safetensors_file *file)
{
    const struct options *options = run->options;
    const char *name = options->regime ? options->regime : options->input ? "trained" : "random";
    size_t i = 0;
    while (i < 3 && strcmp(name, regime_names[i]) != 0)
        i++;
    if (i == 3)
        return fkda_print_error(EXIT_USAGE, options,
                                "--regime '%s': wanted random, slow or trained", name);
    run->regime = (enum bench_regime)i;
    if ((run->regime == BENCH_TRAINED) != (options->input != NULL))
        return fkda_print_error(EXIT_USAGE, options,
                                "--regime trained and --input FILE belong together");
    if (run->regime != BENCH_TRAINED)
        return EXIT_OK;
    int code = fkda_load_layers(options, file, &run->trained);
    for (size_t n = 0; n < run->trained.count && !code; n++) {
        const struct layer *layer = &run->trained.layers[n];
        const fkda_args *args = &layer->args;
        if (layer->K != 128 || layer->V != 128 || layer->H != layer->HV || layer->T == 0 ||
            layer->HV != run->trained.layers[0].HV || args->q.dtype != FKDA_BF16 ||
            args->k.dtype != FKDA_BF16 || args->v.dtype != FKDA_BF16 ||
            args->g.dtype != FKDA_BF16 || args->beta.dtype != FKDA_BF16)
            code =
                fkda_print_error(EXIT_INPUT, options,
                                 "%s: %s: wanted bf16, K = V = 128, H = HV, the same in all layers",
                                 options->input, layer->label);
    }
    return code;
}

static void raise_ceiling(double *ceiling, double measured)
{
    *ceiling = measured > *ceiling ? measured : *ceiling;
}

/* Once before and once after the cases; the higher one counts, since nothing runs faster than the
 * machine. */
static void measure_ceilings(struct bench_run *run)
{
    for (int t = 0; t < run->num_thread_counts; t++) {
        struct bench_ceiling *ceiling = &run->ceilings[t];
        int threads = run->thread_counts[t];
        bool done[FKDA_ISA_COUNT] = {false};
        for (int i = 0; i < run->num_cases; i++) {
            fkda_isa isa = run->cases[i].isa;
            if (!done[isa]) {
                raise_ceiling(&ceiling->fma[isa], fkda_measure_fma(isa, threads));
                raise_ceiling(&ceiling->bf16[isa], fkda_measure_bf16(isa, threads));
            }
            done[isa] = true;
        }
        raise_ceiling(&ceiling->copy, fkda_measure_copy(threads, run->budget.pool_bytes));
        for (int isa = 0; isa < FKDA_ISA_COUNT && t > 0; isa++) { /* more threads do no less */
            raise_ceiling(&ceiling->fma[isa], run->ceilings[0].fma[isa]);
            raise_ceiling(&ceiling->bf16[isa], run->ceilings[0].bf16[isa]);
        }
        raise_ceiling(&ceiling->copy, run->ceilings[0].copy);
    }
}

static const struct bench_ceiling *ceiling_of(const struct bench_run *run,
                                              const struct bench_case *item)
{
    return &run->ceilings[run->num_thread_counts > 1 && item->threads == run->thread_counts[1]];
}

/* The least time a call could take here: its arithmetic at the peak of the units it uses, or its
 * memory at the copy bandwidth, whichever is longer. */
static double floor_ms(const struct bench_run *run, int i)
{
    const struct bench_case *item = &run->cases[i];
    const struct bench_ceiling *ceiling = ceiling_of(run, item);
    double peak =
        item->precision == FKDA_PRECISION_BF16 ? ceiling->bf16[item->isa] : ceiling->fma[item->isa];
    double compute = peak > 0 ? run->results[i].flops / (1e6 * peak) : 0;
    double memory = ceiling->copy > 0 ? run->results[i].bytes / (1e6 * ceiling->copy) : 0;
    return compute > memory ? compute : memory;
}

static int time_cases(struct bench_run *run)
{
    struct bench_inputs inputs = {.num_blocks = 0};
    int code = EXIT_OK;
    for (int i = 0; i < run->num_cases && !code; i++) {
        const struct bench_case *item = &run->cases[i], *last = i ? &run->cases[i - 1] : NULL;
        char reason[FKDA_REASON_BYTES] = "no memory for the tensors", name[48], label[80];
        name_case(item, name, sizeof name);
        snprintf(label, sizeof label, "%s %s %s", kind_name(item), name, fkda_isa_name(item->isa));
        fkda_label_progress(&run->progress, label, (size_t)i, (size_t)run->num_cases);
        fkda_advance_progress(&run->progress, 0);
        bool same = last && last->kind == item->kind && last->T == item->T && last->N == item->N;
        fkda_status status = FKDA_OK;
        if (!same) {
            fkda_free_inputs(&inputs);
            if (!fkda_make_inputs(item, &run->trained, run->budget.pool_bytes, &inputs))
                status = FKDA_ERROR_OUT_OF_MEMORY;
        }
        if (!status)
            status = fkda_time_case(item, &inputs, &run->budget, &run->results[i], reason,
                                    sizeof reason);
        if (status) {
            fkda_end_progress(&run->progress);
            code = fkda_print_error(EXIT_LIBRARY, run->options, "%s: %s", label, reason);
        }
        fkda_advance_progress(&run->progress, 1);
    }
    fkda_free_inputs(&inputs);
    return code;
}

static void read_processor(char *text, size_t bytes)
{
    char line[256];
    snprintf(text, bytes, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *value = strchr(line, ':');
        if (!strncmp(line, "model name", 10) && value) {
            value[strcspn(value, "\n")] = '\0';
            snprintf(text, bytes, "%s", value + 2);
            break;
        }
    }
    if (file)
        fclose(file);
}

static void print_table(const struct bench_run *run)
{
    char processor[128];
    read_processor(processor, sizeof processor);
    printf("%s; %s gates; flash_kda %s\n", processor, regime_names[run->regime], fkda_version());
    for (int t = 0; t < run->num_thread_counts; t++) {
        printf("ceiling, %d thread%s:", run->thread_counts[t],
               run->thread_counts[t] > 1 ? "s" : "");
        for (int isa = 0; isa < FKDA_ISA_COUNT; isa++) {
            if (run->ceilings[t].fma[isa] > 0)
                printf(" %s %.1f GFLOP/s,", fkda_isa_name((fkda_isa)isa),
                       run->ceilings[t].fma[isa]);
            if (run->ceilings[t].bf16[isa] > 0)
                printf(" its bf16 products %.1f,", run->ceilings[t].bf16[isa]);
        }
        printf(" memory %.1f GB/s\n", run->ceilings[t].copy);
    }
    printf("\n%-15s %-4s %3s %9s %9s %9s %9s %8s %7s %7s %7s %9s %9s  %s\n", "case", "", "thr",
           "median ms", "p10", "p90", "cpu ms", "GFLOP/s", "of FMA", "GB/s", "of copy", "out err",
           "state err", "kernel");
    for (int i = 0; i < run->num_cases; i++) {
        const struct bench_case *item = &run->cases[i];
        const struct bench_result *result = &run->results[i];
        const struct bench_ceiling *ceiling = ceiling_of(run, item);
        double seconds = 1e-3 * result->median_ms;
        double gflops = 1e-9 * result->flops / seconds, gb = 1e-9 * result->bytes / seconds;
        char name[48], full[64];
        name_case(item, name, sizeof name);
        snprintf(full, sizeof full, "%s %s", kind_name(item), name);
        printf(
            "%-15s %-4s %3d %9.3f %9.3f %9.3f %9.3f %8.1f %6.1f%% %7.2f %6.1f%% %9.2e %9.2e  %s\n",
            full, precision_name(item), item->threads, result->median_ms, result->p10_ms,
            result->p90_ms, result->cpu_ms, gflops, 100 * gflops / ceiling->fma[item->isa], gb,
            100 * gb / ceiling->copy, result->error_out, result->error_state,
            result->report.kernel);
    }
}

static cJSON *make_record(const struct bench_run *run, int i, const char *date,
                          const char *processor)
{
    const struct bench_case *item = &run->cases[i];
    const struct bench_result *result = &run->results[i];
    const struct bench_ceiling *ceiling = ceiling_of(run, item);
    const struct options *options = run->options;
    double seconds = 1e-3 * result->median_ms;
    char name[48], impl[64];
    name_case(item, name, sizeof name);
    snprintf(impl, sizeof impl, "flash_kda %s", fkda_version());
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "commit", options->commit ? options->commit : "unknown");
    cJSON_AddStringToObject(json, "date", date);
    cJSON_AddStringToObject(json, "cpu", processor);
    cJSON_AddNullToObject(json, "driver");
    cJSON_AddStringToObject(json, "compiler", COMPILER);
    cJSON_AddStringToObject(json, "kind", kind_name(item));
    cJSON_AddStringToObject(json, "case", name);
    cJSON_AddStringToObject(json, "regime", regime_names[item->regime]);
    cJSON_AddStringToObject(json, "impl", impl);
    cJSON_AddStringToObject(json, "kernel", result->report.kernel);
    cJSON_AddStringToObject(json, "isa", fkda_isa_name(item->isa));
    cJSON_AddStringToObject(json, "precision", precision_name(item));
    cJSON_AddNumberToObject(json, "threads", result->report.num_threads);
    cJSON_AddNumberToObject(json, "samples", (double)result->samples);
    cJSON_AddNumberToObject(json, "median_ms", result->median_ms);
    cJSON_AddNumberToObject(json, "p10_ms", result->p10_ms);
    cJSON_AddNumberToObject(json, "p90_ms", result->p90_ms);
    cJSON_AddNumberToObject(json, "min_ms", result->min_ms);
    cJSON_AddNumberToObject(json, "cpu_ms", result->cpu_ms);
    cJSON_AddNumberToObject(json, "min_cpu_ms", result->min_cpu_ms);
    cJSON_AddNumberToObject(json, "floor_ms", floor_ms(run, i));
    cJSON_AddNumberToObject(json, "bytes", result->bytes);
    cJSON_AddNumberToObject(json, "flops", result->flops);
    cJSON_AddNumberToObject(json, "fma_peak_gflops", ceiling->fma[item->isa]);
    if (ceiling->bf16[item->isa] > 0)
        cJSON_AddNumberToObject(json, "bf16_peak_gflops", ceiling->bf16[item->isa]);
    cJSON_AddNumberToObject(json, "copy_gb_per_s", ceiling->copy);
    cJSON_AddNumberToObject(json, "share_of_fma_peak",
                            1e-9 * result->flops / seconds / ceiling->fma[item->isa]);
    cJSON_AddNumberToObject(json, "share_of_copy", 1e-9 * result->bytes / seconds / ceiling->copy);
    cJSON_AddNumberToObject(json, "error_out", result->error_out);
    cJSON_AddNumberToObject(json, "error_state", result->error_state);
    return json;
}

static int print_records(const struct bench_run *run)
{
    char processor[128], date[32];
    time_t now = time(NULL);
    struct tm parts;
    read_processor(processor, sizeof processor);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &parts));
    for (int i = 0; i < run->num_cases; i++) {
        cJSON *json = make_record(run, i, date, processor);
        char *text = cJSON_PrintUnformatted(json);
        cJSON_Delete(json);
        if (!text)
            return fkda_print_error(EXIT_LIBRARY, run->options, "no memory for the JSON output");
        puts(text);
        cJSON_free(text);
    }
    return EXIT_OK;
}

static int run_bench(struct bench_run *run)
{
    int code = list_cases(run);
    if (code)
        return code;
    run->budget = run->options->quick ? (struct bench_budget){0.15, 5, (size_t)128 << 20}
                                      : (struct bench_budget){1.0, 15, (size_t)1 << 30};
    fkda_start_progress(&run->progress, run->options->quiet, run->num_cases);
    measure_ceilings(run);
    code = time_cases(run);
    if (!code)
        measure_ceilings(run);
    fkda_end_progress(&run->progress);
    if (!code && run->options->json)
        code = print_records(run);
    else if (!code)
        print_table(run);
    return code;
}

int fkda_command_bench(int argc, char **argv)
{
    struct options options;
    bool help;
    int code =
        fkda_parse_options(argc, argv, OPTION_BENCH | OPTION_DEVICE | OPTION_JSON, &options, &help);
    if (help)
        fputs(fkda_help_bench, stdout);
    if (code || help)
        return code;
    struct safetensors_file file = {.bytes = NULL};
    struct bench_run *run = calloc(1, sizeof *run);
    if (!run)
        return fkda_print_error(EXIT_LIBRARY, &options, "no memory");
    run->options = &options;
    code = read_regime(run, &file);
    if (!code)
        code = run_bench(run);
    fkda_free_layers(&run->trained);
    fkda_close_safetensors(&file);
    free(run);
    return code;
}
