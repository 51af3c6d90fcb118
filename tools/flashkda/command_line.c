/* command_line.c: the command line of every subcommand. */
#include <errno.h>
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

#define MAX_THREADS 1024 /* as the library */
#define MAX_PIECE   (1 << 30)

enum {
    LONG_DEVICE = 256,
    LONG_ISA,
    LONG_PRECISION,
    LONG_THREADS,
    LONG_PREFIX,
    LONG_SCALE,
    LONG_LOWER_BOUND,
    LONG_PIECE,
    LONG_JSON,
    LONG_QUICK,
    LONG_CASE,
    LONG_REGIME,
    LONG_COMMIT,
    LONG_INPUT
};

static const struct option long_options[] = {
    {"help", no_argument, NULL, 'h'},
    {"quiet", no_argument, NULL, 'q'},
    {"output", required_argument, NULL, 'o'},
    {"device", required_argument, NULL, LONG_DEVICE},
    {"isa", required_argument, NULL, LONG_ISA},
    {"precision", required_argument, NULL, LONG_PRECISION},
    {"threads", required_argument, NULL, LONG_THREADS},
    {"prefix", required_argument, NULL, LONG_PREFIX},
    {"scale", required_argument, NULL, LONG_SCALE},
    {"lower-bound", required_argument, NULL, LONG_LOWER_BOUND},
    {"piece-tokens", required_argument, NULL, LONG_PIECE},
    {"json", no_argument, NULL, LONG_JSON},
    {"quick", no_argument, NULL, LONG_QUICK},
    {"case", required_argument, NULL, LONG_CASE},
    {"regime", required_argument, NULL, LONG_REGIME},
    {"commit", required_argument, NULL, LONG_COMMIT},
    {"input", required_argument, NULL, LONG_INPUT},
    {NULL, 0, NULL, 0},
};

static const char *option_name(int option)
{
    const struct option *entry = long_options;
    while (entry->name && entry->val != option)
        entry++;
    return entry->name ? entry->name : "";
}

/* Which group of enum option_bit an option belongs to; 0: every command takes it. */
static unsigned option_group(int option)
{
    switch (option) {
    case 'o':
        return OPTION_OUTPUT;
    case LONG_DEVICE:
    case LONG_ISA:
    case LONG_THREADS:
        return OPTION_DEVICE;
    case LONG_PRECISION:
    case LONG_PREFIX:
    case LONG_SCALE:
    case LONG_LOWER_BOUND:
    case LONG_PIECE:
        return OPTION_LAYERS;
    case LONG_JSON:
        return OPTION_JSON;
    case LONG_QUICK:
    case LONG_CASE:
    case LONG_REGIME:
    case LONG_COMMIT:
    case LONG_INPUT:
        return OPTION_BENCH;
    default:
        return 0;
    }
}

/* A finite decimal number and nothing else ("1x", "", "nan", "0x10", " 1" are not). */
static bool parse_number(const char *text, double *value)
{
    char *end;
    if (!*text || strspn(text, "0123456789+-.eE") != strlen(text))
        return false;
    errno = 0;
    *value = strtod(text, &end);
    return !*end && isfinite(*value);
}

bool fkda_parse_scale(const char *text, double *scale)
{
    /* What float32 cannot hold, the library refuses. */
    return parse_number(text, scale) && fabs(*scale) >= FLT_MIN && fabs(*scale) <= FLT_MAX;
}

bool fkda_parse_lower_bound(const char *text, fkda_gate *gate, double *lower_bound)
{
    *lower_bound = 0;
    *gate = strcmp(text, "none") ? FKDA_GATE_BOUNDED : FKDA_GATE_SOFTPLUS;
    return *gate == FKDA_GATE_SOFTPLUS ||
           (parse_number(text, lower_bound) && *lower_bound >= -5 && *lower_bound <= 0);
}

static bool parse_count(const char *text, long long max, long long *value)
{
    char *end;
    if (!*text || strspn(text, "0123456789") != strlen(text))
        return false;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return !*end && errno == 0 && *value >= 1 && *value <= max;
}

static int parse_isa(const char *text, bool accept_all, struct options *options)
{
    options->all_isas = accept_all && !strcmp(text, "all");
    if (options->all_isas)
        return EXIT_OK;
    for (int isa = 0; isa < FKDA_ISA_COUNT; isa++) {
        if (!strcmp(text, fkda_isa_name((fkda_isa)isa))) {
            options->isa = (fkda_isa)isa;
            return EXIT_OK;
        }
    }
    char names[256] = "";
    for (int isa = 0; isa < FKDA_ISA_COUNT; isa++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", isa ? ", " : "",
                 fkda_isa_name((fkda_isa)isa));
    }
    return fkda_print_error(EXIT_USAGE, options, "--isa '%s': wanted one of %s%s", text, names,
                            accept_all ? ", all" : "");
}

/* The CUDA backend takes device memory, which this program does not manage. */
static int parse_device(const char *text, struct options *options)
{
    if (!strcmp(text, "auto") || !strcmp(text, "cpu"))
        return EXIT_OK;
    if (strcmp(text, "cuda"))
        return fkda_print_error(EXIT_USAGE, options, "--device '%s': wanted auto, cpu or cuda",
                                text);
    fkda_info info;
    char reason[FKDA_REASON_BYTES];
    if (fkda_get_info(&info, reason, sizeof reason))
        return fkda_print_error(EXIT_LIBRARY, options, "%s", reason);
    return fkda_print_error(EXIT_LIBRARY, options,
                            "--device cuda: this program runs on the CPU (%s)", info.cuda_status);
}

static int parse_precision(const char *text, struct options *options)
{
    if (!strcmp(text, "fp32"))
        options->precision = FKDA_PRECISION_FP32;
    else if (!strcmp(text, "bf16"))
        options->precision = FKDA_PRECISION_BF16;
    else
        return fkda_print_error(EXIT_USAGE, options, "--precision '%s': wanted fp32 or bf16", text);
    return EXIT_OK;
}

static int parse_value(int option, const char *text, unsigned accepted, struct options *options)
{
    long long count;
    switch (option) {
    case 'o':
        options->output = text;
        return EXIT_OK;
    case LONG_DEVICE:
        return parse_device(text, options);
    case LONG_ISA:
        return parse_isa(text, (accepted & OPTION_BENCH) != 0, options);
    case LONG_PRECISION:
        return parse_precision(text, options);
    case LONG_THREADS:
        if (!parse_count(text, MAX_THREADS, &count))
            return fkda_print_error(EXIT_USAGE, options, "--threads '%s': wanted 1 to %d", text,
                                    MAX_THREADS);
        options->num_threads = (int)count;
        return EXIT_OK;
    case LONG_PREFIX:
        options->prefix = text;
        return EXIT_OK;
    case LONG_SCALE:
        if (!fkda_parse_scale(text, &options->scale))
            return fkda_print_error(EXIT_USAGE, options,
                                    "--scale '%s': wanted a finite float32 other than 0", text);
        options->has_scale = true;
        return EXIT_OK;
    case LONG_LOWER_BOUND:
        if (!fkda_parse_lower_bound(text, &options->gate, &options->lower_bound))
            return fkda_print_error(EXIT_USAGE, options,
                                    "--lower-bound '%s': wanted a number in [-5, 0], or none",
                                    text);
        options->has_lower_bound = true;
        return EXIT_OK;
    case LONG_PIECE:
        if (!parse_count(text, MAX_PIECE, &count))
            return fkda_print_error(EXIT_USAGE, options, "--piece-tokens '%s': wanted 1 to %d",
                                    text, MAX_PIECE);
        options->piece_tokens =
            (count + FKDA_CHUNK_TOKENS - 1) / FKDA_CHUNK_TOKENS * FKDA_CHUNK_TOKENS;
        return EXIT_OK;
    case LONG_CASE:
        options->bench_case = text;
        return EXIT_OK;
    case LONG_REGIME:
        options->regime = text;
        return EXIT_OK;
    case LONG_COMMIT:
        options->commit = text;
        return EXIT_OK;
    case LONG_INPUT:
        options->input = text;
        return EXIT_OK;
    case LONG_JSON:
        options->json = true;
        return EXIT_OK;
    case LONG_QUICK:
        options->quick = true;
        return EXIT_OK;
    default: /* 'q' */
        options->quiet = true;
        return EXIT_OK;
    }
}

static int parse_positional(int argc, char **argv, unsigned accepted, struct options *options)
{
    if (accepted & OPTION_INPUT && optind < argc)
        options->input = argv[optind++];
    if (optind < argc)
        return fkda_print_error(EXIT_USAGE, options, "'%s': one argument too many", argv[optind]);
    if (accepted & OPTION_INPUT && !options->input)
        return fkda_print_error(EXIT_USAGE, options, "no input: wanted IN.safetensors");
    if (accepted & OPTION_OUTPUT && !options->output)
        return fkda_print_error(EXIT_USAGE, options, "no output: wanted -o OUT.safetensors");
    return EXIT_OK;
}

int fkda_parse_options(int argc, char **argv, unsigned accepted, struct options *options,
                       bool *help)
{
    *options = (struct options){.command = argv[0]};
    *help = false;
    opterr = 0;
    optind = 1;
    int option;
    while ((option = getopt_long(argc, argv, ":ho:q", long_options, NULL)) != -1) {
        const char *given = optind > 0 && optind <= argc ? argv[optind - 1] : "";
        if (option == 'h') {
            *help = true;
            return EXIT_OK;
        }
        if (option == ':')
            return fkda_print_error(EXIT_USAGE, options, "'%s' needs a value", given);
        if (option == '?')
            return fkda_print_error(EXIT_USAGE, options, "'%s': no such option (see --help)",
                                    given);
        unsigned group = option_group(option);
        if (group && !(accepted & group))
            return fkda_print_error(EXIT_USAGE, options, "--%s: not an option of this command",
                                    option_name(option));
        int code = parse_value(option, optarg, accepted, options);
        if (code)
            return code;
    }
    return parse_positional(argc, argv, accepted, options);
}
