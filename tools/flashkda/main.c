/* main.c: picks the subcommand. */
#include <stdio.h>
#include <string.h>

#include "program.h"

static const char help[] =
    "flashkda " FKDA_VERSION_STRING ": Kimi Delta Attention from the command line\n"
    "\n"
    "  flashkda run IN.safetensors -o OUT.safetensors   compute out and final_state\n"
    "  flashkda check IN.safetensors                    compare them with the float64 definition\n"
    "  flashkda info                                    what this build and machine can do\n"
    "  flashkda bench                                   speed beside the machine's own ceiling\n"
    "\n"
    "`flashkda COMMAND --help` explains a command; `flashkda --version` prints the version.\n"
    "\n"
    "Exit codes: 0 done, 1 check failed, 2 wrong command line, 3 wrong input file,\n"
    "4 the library refused or failed, 5 the output could not be written.\n"
    "Results go to stdout, messages and progress to stderr.\n";

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", fkda_command_run},
    {"check", fkda_command_check},
    {"info", fkda_command_info},
    {"bench", fkda_command_bench},
};

static int run_command(int argc, char **argv, const struct options *options)
{
    if (argc < 2) {
        fputs(help, stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        fputs(help, stdout);
        return EXIT_OK;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        printf("flashkda %s\n", fkda_version());
        return EXIT_OK;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (!strcmp(argv[1], commands[i].name))
            return commands[i].run(argc - 1, argv + 1);
    }
    return fkda_print_error(EXIT_USAGE, options, "'%s' is not a command: run, check, info or bench",
                            argv[1]);
}

int main(int argc, char **argv)
{
    const struct options none = {.command = NULL};
    int code = run_command(argc, argv, &none);
    if (fflush(stdout) != 0 || ferror(stdout))
        return fkda_print_error(EXIT_OUTPUT, &none, "cannot write to stdout");
    return code;
}
