/* command_info.c: `flashkda info`. */
#include <cjson/cJSON.h>
#include <stdio.h>

#include "program.h"

const char fkda_help_info[] =
    "flashkda info [--json]\n"
    "\n"
    "Prints the library's version, its CPU kernel sets (built, usable on this machine, chosen),\n"
    "the number of threads and what it knows of CUDA.\n";

static void print_isas(const char *title, uint32_t bits)
{
    printf("%-14s", title);
    for (int isa = 0; isa < FKDA_ISA_COUNT; isa++) {
        if (bits >> isa & 1)
            printf(" %s", fkda_isa_name((fkda_isa)isa));
    }
    putchar('\n');
}

static void add_isas(cJSON *json, const char *key, uint32_t bits)
{
    cJSON *list = cJSON_AddArrayToObject(json, key);
    for (int isa = 0; isa < FKDA_ISA_COUNT; isa++) {
        if (bits >> isa & 1)
            cJSON_AddItemToArray(list, cJSON_CreateString(fkda_isa_name((fkda_isa)isa)));
    }
}

static int print_json(const fkda_info *info, const struct options *options)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "version", info->version);
    add_isas(json, "cpu_built", info->isa_built);
    add_isas(json, "cpu_usable", info->isa_usable);
    cJSON_AddStringToObject(json, "cpu_chosen", fkda_isa_name((fkda_isa)info->isa_chosen));
    cJSON_AddNumberToObject(json, "num_threads", info->num_threads);
    cJSON_AddNumberToObject(json, "cuda_devices", info->num_devices);
    cJSON_AddStringToObject(json, "cuda_archs", info->cuda_archs);
    cJSON_AddStringToObject(json, "cuda_status", info->cuda_status);
    cJSON_AddStringToObject(json, "cuda_path", info->cuda_path);
    cJSON_AddStringToObject(json, "cuda_note", info->cuda_note);
    return fkda_print_json(json, options);
}

int fkda_command_info(int argc, char **argv)
{
    struct options options;
    bool help;
    int code = fkda_parse_options(argc, argv, OPTION_JSON, &options, &help);
    if (help)
        fputs(fkda_help_info, stdout);
    if (code || help)
        return code;
    fkda_info info;
    char reason[FKDA_REASON_BYTES];
    if (fkda_get_info(&info, reason, sizeof reason))
        return fkda_print_error(EXIT_LIBRARY, &options, "%s", reason);
    if (options.json)
        return print_json(&info, &options);
    printf("%-14s %s\n", "version", info.version);
    print_isas("CPU built", info.isa_built);
    print_isas("CPU usable", info.isa_usable);
    printf("%-14s %s\n", "CPU chosen", fkda_isa_name((fkda_isa)info.isa_chosen));
    printf("%-14s %d\n", "threads", info.num_threads);
    printf("%-14s %s\n", "CUDA built", *info.cuda_archs ? info.cuda_archs : "no");
    printf("%-14s %s\n", "CUDA device", info.cuda_status);
    if (*info.cuda_path)
        printf("%-14s %s%s%s\n", "CUDA path", info.cuda_path, *info.cuda_note ? "; " : "",
               info.cuda_note);
    return EXIT_OK;
}
