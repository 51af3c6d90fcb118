/* status.c: names of status codes, the version, and how a reason reaches the caller. */
#include <stdarg.h>
#include <stdio.h>

#include "core/plan.h"

const char *fkda_status_name(fkda_status status)
{
    switch (status) {
    case FKDA_OK:
        return "FKDA_OK";
    case FKDA_ERROR_INVALID_ARGUMENT:
        return "FKDA_ERROR_INVALID_ARGUMENT";
    case FKDA_ERROR_UNSUPPORTED:
        return "FKDA_ERROR_UNSUPPORTED";
    case FKDA_ERROR_WORKSPACE:
        return "FKDA_ERROR_WORKSPACE";
    case FKDA_ERROR_OUT_OF_MEMORY:
        return "FKDA_ERROR_OUT_OF_MEMORY";
    case FKDA_ERROR_DEVICE:
        return "FKDA_ERROR_DEVICE";
    case FKDA_ERROR_INTERNAL:
        return "FKDA_ERROR_INTERNAL";
    }
    return "FKDA_ERROR_UNKNOWN";
}

const char *fkda_version(void)
{
    return FKDA_VERSION_STRING;
}

fkda_status fkda_fail(struct fkda_reason reason, fkda_status status, const char *format, ...)
{
    if (reason.text && reason.bytes > 0) {
        va_list list;
        va_start(list, format);
        vsnprintf(reason.text, reason.bytes, format, list);
        va_end(list);
    }
    return status;
}
