/* after_fork.h: OpenMP regions in a process that came out of fork(). */
#ifndef FKDA_AFTER_FORK_H
#define FKDA_AFTER_FORK_H

#include <stdbool.h>

/* Calls function(argument) so that an OpenMP region in it works: here, or in a child process on a
 * thread started for it. False: no thread could be started and nothing was called. */
bool fkda_call_after_fork(void (*function)(void *argument), void *argument);

#endif /* FKDA_AFTER_FORK_H */
