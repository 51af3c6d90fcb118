/* reason.h: an error as a status and a text in the caller's buffer; fkda_fail of the library, which
 * its public header does not offer. */
#ifndef FLASHKDA_REASON_H
#define FLASHKDA_REASON_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

struct reason {
    char *text; /* may be NULL */
    size_t bytes;
};

/* Writes the text and returns `status`, so that checks read `return fail(...)`. */
static inline __attribute__((format(printf, 3, 4))) int fail(struct reason reason, int status,
                                                             const char *format, ...)
{
    if (reason.text && reason.bytes) {
        va_list list;
        va_start(list, format);
        vsnprintf(reason.text, reason.bytes, format, list);
        va_end(list);
    }
    return status;
}

#endif /* FLASHKDA_REASON_H */
