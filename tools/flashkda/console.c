/* console.c: messages, JSON output and the clock. */
#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "program.h"

int fkda_print_error(int code, const struct options *options, const char *format, ...)
{
    va_list list;
    fprintf(stderr, "flashkda%s%s: ", options->command ? " " : "",
            options->command ? options->command : "");
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    return code;
}

int fkda_print_json(struct cJSON *json, const struct options *options)
{
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text)
        return fkda_print_error(EXIT_LIBRARY, options, "no memory for the JSON output");
    puts(text);
    cJSON_free(text);
    return EXIT_OK;
}

double fkda_read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
