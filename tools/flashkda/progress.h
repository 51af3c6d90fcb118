/* progress.h: a bar on stderr for work that takes long, where stderr is a terminal. */
#ifndef FLASHKDA_PROGRESS_H
#define FLASHKDA_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>

struct progress {
    bool enabled, shown;
    double started, drawn; /* seconds, fkda_read_clock */
    double done, total;
    char label[80];
};

/* quiet: never show it. */
void fkda_start_progress(struct progress *progress, bool quiet, double total);
/* What is being worked on now: "layer0 (1 of 2)" for index 0. */
void fkda_label_progress(struct progress *progress, const char *name, size_t index, size_t count);
void fkda_advance_progress(struct progress *progress, double amount);
/* Clears the line. */
void fkda_end_progress(struct progress *progress);

#endif /* FLASHKDA_PROGRESS_H */
