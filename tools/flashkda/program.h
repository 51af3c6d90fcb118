/* program.h: what the subcommands of `flashkda` share.
 *
 *     main -> command_run | command_check | command_info | command_bench -> command_line (options)
 *     run, check: safetensors (file) -> layers (one fkda_args each) -> pieces (calls) -> output
 *
 * Results go to stdout, everything else to stderr. The program uses the public header alone.
 */
#ifndef FLASHKDA_PROGRAM_H
#define FLASHKDA_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "flash_kda.h"

struct cJSON;

/* Exit codes, documented in --help. */
enum exit_code {
    EXIT_OK = 0,
    EXIT_CHECK_FAILED = 1, /* check: an error is past its bound */
    EXIT_USAGE = 2,        /* command line */
    EXIT_INPUT = 3,        /* input file */
    EXIT_LIBRARY = 4,      /* the library refused or failed, or no memory */
    EXIT_OUTPUT = 5        /* output file or stdout */
};

/* Options, one bit each, so that a command can say which it takes. */
enum option_bit {
    OPTION_INPUT = 1 << 0,  /* one positional argument */
    OPTION_OUTPUT = 1 << 1, /* -o, required where accepted */
    OPTION_LAYERS = 1 << 2, /* --prefix, --scale, --lower-bound, --piece-tokens, --precision */
    OPTION_DEVICE = 1 << 3, /* --device, --isa, --threads */
    OPTION_JSON = 1 << 4,
    OPTION_BENCH = 1 << 5 /* --quick, --isa all, --case, --regime, --input, --commit */
};

struct options {
    const char *command;
    const char *input, *output, *prefix;
    const char *bench_case, *regime, *commit;
    fkda_isa isa;
    fkda_precision precision;
    int num_threads;      /* 0: not given */
    int64_t piece_tokens; /* 0: not given */
    double scale, lower_bound;
    fkda_gate gate; /* SOFTPLUS: --lower-bound none */
    bool has_scale, has_lower_bound;
    bool json, quick, quiet, all_isas;
};

/* command_line.c. Returns EXIT_OK, or EXIT_USAGE after a message. *help: --help was given. */
int fkda_parse_options(int argc, char **argv, unsigned accepted, struct options *options,
                       bool *help);
/* A finite number other than 0 that a float32 holds with full precision. */
bool fkda_parse_scale(const char *text, double *scale);
/* "none" or a number in [-5, 0]. */
bool fkda_parse_lower_bound(const char *text, fkda_gate *gate, double *lower_bound);

/* console.c. "flashkda run: ..." on stderr; returns `code`. */
int fkda_print_error(int code, const struct options *options, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Prints and deletes `json`. Returns EXIT_OK, or EXIT_LIBRARY after a message (no memory). */
int fkda_print_json(struct cJSON *json, const struct options *options);
/* Seconds on a clock that only goes forward. */
double fkda_read_clock(void);

int fkda_command_run(int argc, char **argv);
int fkda_command_check(int argc, char **argv);
int fkda_command_info(int argc, char **argv);
int fkda_command_bench(int argc, char **argv);

extern const char fkda_help_run[], fkda_help_check[], fkda_help_info[], fkda_help_bench[];

#endif /* FLASHKDA_PROGRAM_H */
