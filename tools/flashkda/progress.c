/* progress.c: "[#########.....................]  31 %  layer0 (1 of 2)  1.4 s". */
#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "program.h"
#include "safetensors.h"

#define BAR_WIDTH     30
#define FIRST_SECONDS 0.3 /* shorter work shows nothing */
#define NEXT_SECONDS  0.1 /* between two drawings */

void fkda_start_progress(struct progress *progress, bool quiet, double total)
{
    const char *terminal = getenv("TERM");
    *progress = (struct progress){.total = total, .started = fkda_read_clock()};
    progress->enabled = !quiet && isatty(STDERR_FILENO) && terminal && strcmp(terminal, "dumb");
}

void fkda_label_progress(struct progress *progress, const char *name, size_t index, size_t count)
{
    char text[24];
    snprintf(progress->label, sizeof progress->label, "%s (%zu of %zu)",
             fkda_printable_name(name, text, sizeof text), index + 1, count);
}

void fkda_advance_progress(struct progress *progress, double amount)
{
    progress->done += amount;
    double now = fkda_read_clock(), elapsed = now - progress->started;
    if (!progress->enabled || elapsed < FIRST_SECONDS || now - progress->drawn < NEXT_SECONDS)
        return;
    double share = progress->total > 0 ? progress->done / progress->total : 1;
    if (share > 1)
        share = 1;
    int filled = (int)(share * BAR_WIDTH);
    char bar[BAR_WIDTH + 1];
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)filled);
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r[%s] %3d %%  %s  %.1f s\033[K", bar, (int)(100 * share), progress->label,
            elapsed);
    fflush(stderr);
    progress->drawn = now;
    progress->shown = true;
}

void fkda_end_progress(struct progress *progress)
{
    if (progress->shown)
        fputs("\r\033[K", stderr);
    progress->shown = false;
    progress->enabled = false;
}
