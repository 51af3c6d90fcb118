/* bound_call.h: a Python call whose arguments are bound: ready for the library. */
#ifndef FKDA_BOUND_CALL_H
#define FKDA_BOUND_CALL_H

#include "arrays.h"

struct fkda_parameter;

/* A function of the library as Python sees it: its arguments by position. */
struct fkda_entry_point {
    const char *name;
    fkda_status (*call)(const fkda_args *args, char *reason, size_t reason_bytes);
    const struct fkda_parameter *parameters;
    Py_ssize_t num_parameters;
};

extern const struct fkda_entry_point fkda_entry_fwd, fkda_entry_decode, fkda_entry_reference;

#define FKDA_MAX_PARAMETERS 25
#define FKDA_MAX_WRITTEN    4 /* out, final_state, checkpoint_state, workspace */

struct fkda_bound_call {
    const struct fkda_entry_point *entry;
    fkda_args args;
    fkda_report report;
    struct fkda_array_call arrays;
    PyObject *owners[FKDA_MAX_PARAMETERS]; /* owned; keep the memory of the tensors alive */
    int num_owners;
    PyObject *written[FKDA_MAX_WRITTEN]; /* borrowed; torch's tensors that the call writes */
    int num_written;
    const char *first_name; /* the argument that fixed the device; NULL: none yet */
    struct fkda_dl_device device;
    const struct fkda_dl_table *table; /* of the first tensor, for CUDA; NULL: it has none */
    PyObject *first_object;            /* borrowed; with CUDA */
    bool first_is_torch;
    PyObject *workspace_owner;                /* owned; NULL: the caller's, or none */
    struct fkda_dl_managed_versioned *memory; /* likewise, from the table */
    PyObject *lower_bound;                    /* borrowed */
    bool gate_in_kernel;
};

/* Returns 0, or -1 with an exception set, or 1 when an argument is a tensor that only torch's
 * dispatcher understands. fkda_release_call is due in every case. */
int fkda_bind_call(struct fkda_bound_call *call, const struct fkda_entry_point *entry,
                   struct fkda_array_reader *reader, PyObject *const *objects, Py_ssize_t count);

/* The library, without the GIL; where it asks for a workspace that the caller left out, with one.
 * Returns 0 with *status, and its reason if it is an error; or -1 with an exception set. */
int fkda_run_call(struct fkda_bound_call *call, fkda_status *status, char *reason,
                  size_t reason_bytes);

void fkda_release_call(struct fkda_bound_call *call);

#endif /* FKDA_BOUND_CALL_H */
