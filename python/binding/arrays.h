/* arrays.h: Python objects that hold tensors, read without a copy. */
#ifndef FKDA_ARRAYS_H
#define FKDA_ARRAYS_H

#include <Python.h>
#include <stdbool.h>

#include "dlpack_abi.h"
#include "flash_kda.h"

/* What is known of one Python type. */
struct fkda_array_type {
    PyObject *type;                    /* owned; NULL: an empty entry */
    const struct fkda_dl_table *table; /* NULL: read through __dlpack__ */
    bool exports;                      /* it has __dlpack__ */
    bool torch;                        /* torch.Tensor or a subclass */
    bool dispatches;                   /* a subclass with a __torch_dispatch__ of its own */
    bool numpy;                        /* numpy.ndarray or a subclass */
    bool ndarray;                      /* numpy.ndarray itself */
    bool masked;                       /* numpy.ma.MaskedArray or a subclass */
    /* of torch: the type's attribute requires_grad, owned, and how to ask it for a tensor's without
     * another look for it; NULL: not one to be asked like that */
    PyObject *requires_grad;
    descrgetfunc get_requires_grad;
};

/* A call sees one or two types, a process a handful; further ones replace the oldest. */
#define FKDA_ARRAY_TYPES 8

struct fkda_array_reader {
    struct fkda_array_type types[FKDA_ARRAY_TYPES];
    int next; /* the entry that is replaced next */
    /* torch.is_grad_enabled and torch._C._increment_version; NULL before the first torch
     * tensor */
    PyObject *is_grad_enabled, *increment_version;
    PyObject *numpy_bfloat16; /* the dtype of ml_dtypes, once an array has come with it */
    PyObject *name_requires_grad, *name_is_neg, *name_dlpack, *name_dlpack_device;
    PyObject *name_array_struct, *name_dtype, *name_num;
};

int fkda_init_array_reader(struct fkda_array_reader *reader);
int fkda_visit_array_reader(struct fkda_array_reader *reader, visitproc visit, void *arg);
void fkda_clear_array_reader(struct fkda_array_reader *reader);

/* What is asked once for all tensors of one call. */
struct fkda_array_call {
    struct fkda_array_reader *reader;
    int grad_enabled; /* of torch on this thread; -1: not asked yet */
    PyObject *asked;  /* borrowed: the last tensor that was, one may come twice in a row */
};

/* One tensor as the library wants it, and where it lives. */
struct fkda_array {
    fkda_tensor tensor;
    struct fkda_dl_device device;
    const struct fkda_dl_table *table; /* asked for the current stream; NULL: it has none */
    size_t bytes;                      /* of a row-major tensor of this shape */
    bool row_major;
    bool torch;
    PyObject *owner; /* owned; keeps the memory alive; NULL: the caller's reference does */
};

enum fkda_array_use {
    FKDA_ARRAY_READ,   /* its memory may be read-only */
    FKDA_ARRAY_WRITTEN /* its memory must be writable */
};

/* Reads `object`, the argument called `name`. Returns 0, or -1 with an exception set, or 1 when
 * only torch's dispatcher can look into this type (fake and distributed tensors); result->owner is
 * to be released in every case. A dtype that the library does not know is FKDA_DTYPE_INVALID. */
int fkda_read_array(struct fkda_array_call *call, PyObject *object, const char *name,
                    enum fkda_array_use use, struct fkda_array *result);

/* Tells torch that the call wrote these tensors of torch: a backward pass that saved one of them
 * then fails, as it does after torch's own in-place operations. Returns 0, or -1 with an exception
 * set. */
int fkda_mark_written(struct fkda_array_reader *reader, PyObject *const *tensors, int count);

#endif /* FKDA_ARRAYS_H */
