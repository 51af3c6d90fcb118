/* after_fork.c: OpenMP regions in a process that came out of fork().
 *
 * GCC's OpenMP keeps the workers of a thread with that thread. fork() copies only the thread that
 * calls it, with its note of workers that are not there: the child's next region would wait for
 * them for ever (Python's multiprocessing, data loaders, preforking servers). It does not matter
 * which library started those workers, as a process usually has one OpenMP runtime. A thread that
 * is started in the child has no such note, so there every region gets one.
 */
#include "cpu/after_fork.h"

#include <pthread.h>

static bool is_child; /* written only between fork() and its return, when there is one thread */

static void note_child(void)
{
    is_child = true;
}

/* Before any fork() that follows the loading of the library, whether it has been called or not. */
__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, note_child);
}

struct call {
    void (*function)(void *argument);
    void *argument;
};

static void *run_call(void *call)
{
    ((struct call *)call)->function(((struct call *)call)->argument);
    return NULL;
}

bool fkda_call_after_fork(void (*function)(void *argument), void *argument)
{
    if (!is_child) {
        function(argument);
        return true;
    }
    struct call call = {function, argument};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_call, &call) != 0)
        return false;
    pthread_join(thread, NULL);
    return true;
}
