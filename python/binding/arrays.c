/* arrays.c: from a Python object to an fkda_tensor.
 *
 *     object -> its type (cached) -> the type's DLPack table, no Python call at all
 *                                 -> NumPy's array interface, one attribute
 *                                 -> else object.__dlpack__(), a capsule that is held for the call
 *
 * The table hands out what a tensor's memory looks like and asks nothing. What __dlpack__ would
 * have refused is therefore refused here: tensors that want a gradient, views that stand for the
 * negative of what is stored, and types whose memory is not their value (they go through the
 * dispatcher).
 */
#include "arrays.h"

#include <string.h>

int fkda_init_array_reader(struct fkda_array_reader *reader)
{
    reader->name_requires_grad = PyUnicode_InternFromString("requires_grad");
    reader->name_is_neg = PyUnicode_InternFromString("is_neg");
    reader->name_dlpack = PyUnicode_InternFromString("__dlpack__");
    reader->name_dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
    reader->name_array_struct = PyUnicode_InternFromString("__array_struct__");
    reader->name_dtype = PyUnicode_InternFromString("dtype");
    reader->name_num = PyUnicode_InternFromString("num");
    return reader->name_requires_grad && reader->name_is_neg && reader->name_dlpack &&
                   reader->name_dlpack_device && reader->name_array_struct && reader->name_dtype &&
                   reader->name_num
               ? 0
               : -1;
}

int fkda_visit_array_reader(struct fkda_array_reader *reader, visitproc visit, void *arg)
{
    for (int i = 0; i < FKDA_ARRAY_TYPES; i++) {
        Py_VISIT(reader->types[i].type);
        Py_VISIT(reader->types[i].requires_grad);
    }
    Py_VISIT(reader->is_grad_enabled);
    Py_VISIT(reader->increment_version);
    Py_VISIT(reader->numpy_bfloat16);
    return 0;
}

void fkda_clear_array_reader(struct fkda_array_reader *reader)
{
    for (int i = 0; i < FKDA_ARRAY_TYPES; i++) {
        Py_CLEAR(reader->types[i].type);
        Py_CLEAR(reader->types[i].requires_grad);
    }
    Py_CLEAR(reader->is_grad_enabled);
    Py_CLEAR(reader->increment_version);
    Py_CLEAR(reader->numpy_bfloat16);
    Py_CLEAR(reader->name_requires_grad);
    Py_CLEAR(reader->name_is_neg);
    Py_CLEAR(reader->name_dlpack);
    Py_CLEAR(reader->name_dlpack_device);
    Py_CLEAR(reader->name_array_struct);
    Py_CLEAR(reader->name_dtype);
    Py_CLEAR(reader->name_num);
}

/* ---- Types ----------------------------------------------------------------------------------- */

/* `module`.`name` if that module is loaded already, else NULL; never imports, never fails. */
static PyObject *find_loaded(const char *module, const char *name)
{
    PyObject *loaded = PyDict_GetItemString(PyImport_GetModuleDict(), module); /* borrowed */
    PyObject *found = loaded ? PyObject_GetAttrString(loaded, name) : NULL;
    PyErr_Clear();
    return found;
}

static bool is_subclass_of(PyObject *type, PyObject *base)
{
    bool yes = base && PyObject_IsSubclass(type, base) == 1;
    PyErr_Clear();
    return yes;
}

static const struct fkda_dl_table *find_table(PyObject *type)
{
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const struct fkda_dl_table *table = NULL;
    if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    Py_XDECREF(capsule); /* the table outlives it by the rules of the protocol */
    while (table && table->version.major > FKDA_DL_MAJOR)
        table = table->older;
    return table && table->version.major == FKDA_DL_MAJOR && table->borrow ? table : NULL;
}

/* A torch.Tensor subclass whose __torch_dispatch__ is its own keeps its value elsewhere
 * (FakeTensor, DTensor); one without (Parameter, the parameters of serving engines) is an ordinary
 * tensor. */
static bool has_own_dispatch(PyObject *type, PyObject *torch_tensor)
{
    PyObject *own = PyObject_GetAttrString(type, "__torch_dispatch__");
    PyObject *base = PyObject_GetAttrString(torch_tensor, "__torch_dispatch__");
    bool differs = own && base && own != base;
    PyErr_Clear();
    Py_XDECREF(own);
    Py_XDECREF(base);
    return differs;
}

/* An attribute that is computed answers for a type with itself, one that is stored or a property of
 * Python with something that has no use here. */
static void find_requires_grad(struct fkda_array_type *found, PyObject *type, PyObject *name)
{
    PyObject *descriptor = PyObject_GetAttr(type, name);
    PyErr_Clear();
    if (descriptor && PyObject_TypeCheck(descriptor, &PyGetSetDescr_Type)) {
        found->get_requires_grad =
            (descrgetfunc)PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get);
        found->requires_grad = descriptor;
    } else {
        Py_XDECREF(descriptor);
    }
}

static struct fkda_array_type *learn_type(struct fkda_array_reader *reader, PyObject *type)
{
    struct fkda_array_type found = {.table = find_table(type),
                                    .exports = PyObject_HasAttrString(type, "__dlpack__")};
    PyObject *torch_tensor = find_loaded("torch", "Tensor");
    if (torch_tensor && is_subclass_of(type, torch_tensor)) {
        found.torch = true;
        found.dispatches = has_own_dispatch(type, torch_tensor);
        find_requires_grad(&found, type, reader->name_requires_grad);
        if (!reader->is_grad_enabled)
            reader->is_grad_enabled = find_loaded("torch", "is_grad_enabled");
        if (!reader->increment_version) /* what torch.autograd.graph.increment_version calls */
            reader->increment_version = find_loaded("torch._C", "_increment_version");
        if (!reader->increment_version)
            reader->increment_version = find_loaded("torch.autograd.graph", "increment_version");
    } else {
        PyObject *ndarray = find_loaded("numpy", "ndarray");
        found.numpy = is_subclass_of(type, ndarray);
        found.ndarray = type == ndarray;
        PyObject *masked = found.numpy ? find_loaded("numpy.ma", "MaskedArray") : NULL;
        found.masked = is_subclass_of(type, masked);
        Py_XDECREF(masked);
        Py_XDECREF(ndarray);
    }
    Py_XDECREF(torch_tensor);

    struct fkda_array_type *entry = &reader->types[reader->next];
    reader->next = (reader->next + 1) % FKDA_ARRAY_TYPES;
    const struct fkda_array_type old = *entry;
    Py_INCREF(type);
    found.type = type;
    *entry = found;
    Py_XDECREF(old.type);
    Py_XDECREF(old.requires_grad);
    return entry;
}

static struct fkda_array_type *find_type(struct fkda_array_reader *reader, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (int i = 0; i < FKDA_ARRAY_TYPES; i++)
        if (reader->types[i].type == type)
            return &reader->types[i];
    return learn_type(reader, type);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

/* Makes an exception that was fetched the cause of the one that is set; takes all references. */
static void set_cause(PyObject *cause_type, PyObject *cause, PyObject *cause_traceback)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    PyErr_NormalizeException(&type, &raised, &traceback);
    if (cause && cause_traceback)
        PyException_SetTraceback(cause, cause_traceback);
    if (cause)
        PyException_SetCause(raised, cause); /* takes the reference */
    PyErr_Restore(type, raised, traceback);
    Py_XDECREF(cause_type);
    Py_XDECREF(cause_traceback);
}

/* An exception that nothing may swallow: KeyboardInterrupt, SystemExit. */
static bool must_stop(void)
{
    return PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception);
}

/* Forgets an exception of a failed lookup. Returns 0, or -1 and keeps it where the call must stop.
 */
static int forget_exception(void)
{
    if (must_stop())
        return -1;
    PyErr_Clear();
    return 0;
}

/* The producer refused: a sparse tensor, one without memory, a dtype it cannot export, ... */
static int fail_unreadable(PyObject *object, const char *name)
{
    if (must_stop())
        return -1;
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);

    char why[160] = ""; /* the first line; torch goes on with a stack of C++ frames */
    PyObject *text = cause ? PyObject_Str(cause) : NULL;
    const char *line = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (line) {
        size_t length = strcspn(line, "\n");
        length = length < sizeof why ? length : sizeof why - 1;
        memcpy(why, line, length);
    }
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError,
                 "%s: a %R whose memory cannot be read in place (%s), wanted a dense tensor on the "
                 "CPU or a CUDA device",
                 name, (PyObject *)Py_TYPE(object), why);
    set_cause(type, cause, traceback);
    return -1;
}

/* ---- Reading --------------------------------------------------------------------------------- */

static fkda_dtype to_dtype(struct fkda_dl_dtype dtype)
{
    if (dtype.lanes != 1)
        return FKDA_DTYPE_INVALID;
    switch (dtype.code << 8 | dtype.bits) {
    case FKDA_DL_BFLOAT << 8 | 16:
        return FKDA_BF16;
    case FKDA_DL_FLOAT << 8 | 16:
        return FKDA_F16;
    case FKDA_DL_FLOAT << 8 | 32:
        return FKDA_F32;
    case FKDA_DL_FLOAT << 8 | 64:
        return FKDA_F64;
    case FKDA_DL_INT << 8 | 32:
        return FKDA_I32;
    case FKDA_DL_INT << 8 | 64:
        return FKDA_I64;
    default:
        return FKDA_DTYPE_INVALID;
    }
}

/* Copies what `dl` says; its shape and strides live only as long as the caller lets them. */
static int copy_description(const struct fkda_dl_tensor *dl, const char *name,
                            struct fkda_array *result)
{
    fkda_tensor *tensor = &result->tensor;
    if (dl->ndim > FKDA_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, wanted at most %d", name, (int)dl->ndim,
                     FKDA_MAX_NDIM);
        return -1;
    }
    tensor->data = dl->data ? (char *)dl->data + dl->byte_offset : NULL;
    tensor->ndim = dl->ndim;
    tensor->dtype = (int32_t)to_dtype(dl->dtype);
    uint64_t row_major_stride = 1; /* may wrap: an empty tensor's other sizes can be anything */
    result->row_major = true;
    for (int i = dl->ndim - 1; i >= 0; i--) {
        tensor->shape[i] = dl->shape[i];
        tensor->stride[i] = dl->strides ? dl->strides[i] : (int64_t)row_major_stride;
        if (tensor->shape[i] != 1 && (uint64_t)tensor->stride[i] != row_major_stride)
            result->row_major = false;
        row_major_stride *= (uint64_t)tensor->shape[i];
    }
    if (row_major_stride == 0)
        result->row_major = true; /* empty: its strides mean nothing */
    result->bytes = (size_t)row_major_stride * (((size_t)dl->dtype.bits * dl->dtype.lanes + 7) / 8);
    result->device = dl->device;
    return 0;
}

/* Where the tensor lives, as its producer tells; NumPy arrays are not asked. */
static int ask_device(struct fkda_array_reader *reader, const struct fkda_array_type *type,
                      PyObject *object, bool *cuda)
{
    *cuda = false;
    if (type->numpy)
        return 0;
    PyObject *device = PyObject_CallMethodObjArgs(object, reader->name_dlpack_device, NULL);
    PyObject *kind = device ? PySequence_GetItem(device, 0) : NULL;
    long value = kind ? PyLong_AsLong(kind) : -1;
    Py_XDECREF(device);
    Py_XDECREF(kind);
    *cuda = value == FKDA_DL_CUDA || value == FKDA_DL_CUDA_MANAGED;
    return PyErr_Occurred() ? -1 : 0;
}

/* object.__dlpack__(...): first as DLPack 1.x wants it, then as older producers know it. On CUDA,
 * stream -1 asks the producer not to synchronise: the call runs on its current stream. */
static PyObject *call_dlpack(struct fkda_array_reader *reader, const struct fkda_array_type *type,
                             PyObject *object)
{
    bool cuda;
    if (ask_device(reader, type, object, &cuda) != 0)
        return NULL;
    PyObject *method = PyObject_GetAttr(object, reader->name_dlpack);
    PyObject *none = PyTuple_New(0);
    PyObject *keywords = cuda ? Py_BuildValue("{s:i,s:(ii)}", "stream", -1, "max_version", 1, 0)
                              : Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
    PyObject *capsule = NULL;
    if (method && none && keywords) {
        capsule = PyObject_Call(method, none, keywords);
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            if (PyDict_DelItemString(keywords, "max_version") == 0)
                capsule = PyObject_Call(method, none, keywords);
        }
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    return capsule;
}

/* A look at NumPy's type numbers, which are there: those of types from outside begin here. */
enum { NUMPY_USER_TYPES = 256 };

static bool is_user_type(struct fkda_array_reader *reader, PyObject *dtype)
{
    PyObject *num = PyObject_GetAttr(dtype, reader->name_num);
    const bool yes = num && PyLong_Check(num) && PyLong_AsLong(num) >= NUMPY_USER_TYPES;
    Py_XDECREF(num);
    return yes;
}

/* 1 if a NumPy array's dtype is bfloat16, which NumPy knows only through the ml_dtypes package, in
 * this machine's byte order; else 0, or -1 with an exception set. */
static int is_numpy_bfloat16(struct fkda_array_reader *reader, PyObject *object)
{
    PyObject *dtype = PyObject_GetAttr(object, reader->name_dtype);
    bool yes = dtype && dtype == reader->numpy_bfloat16;
    if (dtype && !yes && is_user_type(reader, dtype)) { /* the name is worked out at every look */
        PyObject *name = PyObject_GetAttrString(dtype, "name");
        PyObject *native = name ? PyObject_GetAttrString(dtype, "isnative") : NULL;
        yes = native == Py_True && PyUnicode_Check(name) &&
              PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
        Py_XDECREF(name);
        Py_XDECREF(native);
        if (yes && !reader->numpy_bfloat16) {
            Py_INCREF(dtype);
            reader->numpy_bfloat16 = dtype;
        }
    }
    Py_XDECREF(dtype);
    return forget_exception() == 0 ? yes : -1;
}

/* The bits of a bfloat16 array, which NumPy does not export, as uint16. Returns a new reference to
 * what is to be exported. */
static PyObject *view_numpy_bfloat16(struct fkda_array_reader *reader, PyObject *object,
                                     bool *bfloat16)
{
    const int found = is_numpy_bfloat16(reader, object);
    *bfloat16 = found == 1;
    if (found < 0)
        return NULL;
    if (*bfloat16)
        return PyObject_CallMethod(object, "view", "s", "uint16");
    Py_INCREF(object);
    return object;
}

static int refuse_read_only(const char *name)
{
    PyErr_Format(PyExc_ValueError, "%s: read-only, wanted writable memory", name);
    return -1;
}

static int read_through_dlpack(struct fkda_array_reader *reader, const struct fkda_array_type *type,
                               PyObject *object, const char *name, bool written,
                               struct fkda_array *result)
{
    if (!type->exports) {
        PyErr_Format(PyExc_TypeError,
                     "%s: a %R, wanted a tensor (an object with __dlpack__, such as a "
                     "torch.Tensor or a numpy.ndarray)",
                     name, (PyObject *)Py_TYPE(object));
        return -1;
    }
    bool bfloat16 = false;
    PyObject *exported = NULL;
    if (type->numpy) {
        exported = view_numpy_bfloat16(reader, object, &bfloat16);
    } else if (type->torch) {
        exported = PyObject_CallMethod(object, "detach", NULL); /* __dlpack__ insists */
    } else {
        Py_INCREF(object);
        exported = object;
    }
    PyObject *capsule = exported ? call_dlpack(reader, type, exported) : NULL;
    Py_XDECREF(exported);
    if (!capsule)
        return fail_unreadable(object, name);
    result->owner = capsule;

    struct fkda_dl_tensor dl;
    bool read_only = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const struct fkda_dl_managed_versioned *managed =
            PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->version.major != FKDA_DL_MAJOR) {
            PyErr_Format(PyExc_TypeError, "%s: exported as DLPack %u, wanted version %u", name,
                         (unsigned)managed->version.major, FKDA_DL_MAJOR);
            return -1;
        }
        dl = managed->tensor;
        read_only = managed->flags & FKDA_DL_FLAG_READ_ONLY;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl = ((const struct fkda_dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor;
    } else {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack__ of %R returned no DLPack capsule", name,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    if (written && read_only)
        return refuse_read_only(name);
    if (bfloat16)
        dl.dtype.code = FKDA_DL_BFLOAT;
    return copy_description(&dl, name, result);
}

/* What a capsule of NumPy's array interface holds ("The array interface protocol" in NumPy's
 * reference); strides in bytes. */
struct numpy_array_interface {
    int two; /* the version, by its value */
    int ndim;
    char kind;
    int item_bytes;
    int flags;
    Py_ssize_t *shape, *strides;
    void *data;
    PyObject *description;
};
enum { NUMPY_ALIGNED = 0x100, NUMPY_NOT_SWAPPED = 0x200, NUMPY_WRITEABLE = 0x400 };

/* The dtype of an array; no lanes: it is none to be read this way, or an exception is set. */
static struct fkda_dl_dtype dtype_of_interface(struct fkda_array_reader *reader, PyObject *object,
                                               const struct numpy_array_interface *array)
{
    struct fkda_dl_dtype dtype = {.bits = (uint8_t)(8 * array->item_bytes), .lanes = 1};
    const int item = array->item_bytes;
    if (array->kind == 'f' && (item == 2 || item == 4 || item == 8))
        dtype.code = FKDA_DL_FLOAT;
    else if (array->kind == 'i' && (item == 4 || item == 8))
        dtype.code = FKDA_DL_INT;
    else if (array->kind == 'V' && item == 2 && is_numpy_bfloat16(reader, object) == 1)
        dtype.code = FKDA_DL_BFLOAT;
    else
        dtype.lanes = 0;
    return dtype;
}

/* Reads an ordinary numpy.ndarray. Returns 0, -1 with an exception set, or 1 for one that is not
 * ordinary: __dlpack__ reads it, or says what is wrong with it. */
static int read_through_interface(struct fkda_array_reader *reader, PyObject *object,
                                  const char *name, bool written, struct fkda_array *result)
{
    PyObject *capsule = PyObject_GetAttr(object, reader->name_array_struct);
    const struct numpy_array_interface *array =
        capsule && PyCapsule_IsValid(capsule, NULL) ? PyCapsule_GetPointer(capsule, NULL) : NULL;
    const int needed = NUMPY_ALIGNED | NUMPY_NOT_SWAPPED;
    struct fkda_dl_dtype dtype = {.lanes = 0};
    if (array && array->two == 2 && (array->flags & needed) == needed &&
        array->ndim <= FKDA_MAX_NDIM)
        dtype = dtype_of_interface(reader, object, array);
    if (forget_exception() != 0) {
        Py_XDECREF(capsule);
        return -1;
    }
    int64_t shape[FKDA_MAX_NDIM], strides[FKDA_MAX_NDIM];
    bool ordinary = dtype.lanes == 1;
    for (int i = 0; ordinary && i < array->ndim; i++) {
        shape[i] = array->shape[i];
        strides[i] = array->strides[i] / array->item_bytes;
        ordinary = array->strides[i] % array->item_bytes == 0;
    }
    if (!ordinary) {
        Py_XDECREF(capsule);
        return 1;
    }
    result->owner = capsule;
    if (written && !(array->flags & NUMPY_WRITEABLE))
        return refuse_read_only(name);
    const struct fkda_dl_tensor dl = {.data = array->data,
                                      .device = {.type = FKDA_DL_CPU},
                                      .ndim = array->ndim,
                                      .dtype = dtype,
                                      .shape = shape,
                                      .strides = strides};
    return copy_description(&dl, name, result);
}

/* -1 if the argument wants a gradient that this library cannot give. */
static int refuse_gradient(struct fkda_array_call *call, const struct fkda_array_type *type,
                           PyObject *object, const char *name)
{
    if (call->grad_enabled < 0) {
        PyObject *is_grad_enabled = call->reader->is_grad_enabled;
        PyObject *enabled = is_grad_enabled ? PyObject_CallNoArgs(is_grad_enabled) : NULL;
        if (is_grad_enabled && !enabled)
            return -1;
        call->grad_enabled = enabled == Py_True;
        Py_XDECREF(enabled);
    }
    if (!call->grad_enabled || object == call->asked)
        return 0;
    call->asked = object;
    PyObject *wanted = type->requires_grad
                           ? type->get_requires_grad(type->requires_grad, object, type->type)
                           : PyObject_GetAttr(object, call->reader->name_requires_grad);
    if (!wanted)
        return -1;
    Py_DECREF(wanted);
    if (wanted != Py_True)
        return 0;
    PyErr_Format(
        PyExc_RuntimeError,
        "%s: requires_grad is True and gradients are enabled, but flash_kda has no backward "
        "yet; call it under torch.inference_mode() or torch.no_grad(), or detach %s",
        name, name);
    return -1;
}

/* x.conj().imag stores the negative of its value. It skips over the real parts, so it has no
 * dimension of stride 1, and asking (0.1 us) can be left out for tensors that have one. */
static int refuse_negative_view(struct fkda_array_reader *reader, PyObject *object,
                                const char *name, const fkda_tensor *tensor)
{
    if (tensor->dtype != FKDA_F32 && tensor->dtype != FKDA_F64)
        return 0;
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->stride[i] == 1)
            return 0;
    PyObject *negative = PyObject_CallMethodObjArgs(object, reader->name_is_neg, NULL);
    if (!negative)
        return -1;
    Py_DECREF(negative);
    if (negative != Py_True)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s: a negated view (is_neg() is True), wanted memory that holds the values; "
                 "call resolve_neg() on it",
                 name);
    return -1;
}

static int read_through_table(const struct fkda_array_type *type, PyObject *object,
                              const char *name, struct fkda_array *result)
{
    struct fkda_dl_tensor dl;
    if (type->table->borrow(object, &dl) != 0)
        return fail_unreadable(object, name);
    result->table = type->table;
    return copy_description(&dl, name, result);
}

int fkda_read_array(struct fkda_array_call *call, PyObject *object, const char *name,
                    enum fkda_array_use use, struct fkda_array *result)
{
    struct fkda_array_reader *reader = call->reader;
    memset(result, 0, sizeof *result);
    const struct fkda_array_type type = *find_type(reader, object); /* Python code may evict it */
    result->torch = type.torch;
    if (type.dispatches)
        return 1;
    if (type.torch && refuse_gradient(call, &type, object, name) != 0)
        return -1;
    if (type.masked) {
        PyErr_Format(PyExc_ValueError,
                     "%s: a masked array, wanted one whose memory holds its values; call filled() "
                     "on it",
                     name);
        return -1;
    }
    const bool written = use == FKDA_ARRAY_WRITTEN;
    int failed = 1;
    if (type.table)
        failed = read_through_table(&type, object, name, result);
    else if (type.ndarray)
        failed = read_through_interface(reader, object, name, written, result);
    if (failed == 1)
        failed = read_through_dlpack(reader, &type, object, name, written, result);
    if (failed)
        return -1;
    return type.torch ? refuse_negative_view(reader, object, name, &result->tensor) : 0;
}

int fkda_mark_written(struct fkda_array_reader *reader, PyObject *const *tensors, int count)
{
    if (!reader->increment_version || count == 0)
        return 0;
    PyObject *all = PyTuple_New(count);
    for (int i = 0; all && i < count; i++) {
        Py_INCREF(tensors[i]);
        PyTuple_SetItem(all, i, tensors[i]);
    }
    PyObject *done =
        all ? PyObject_CallFunctionObjArgs(reader->increment_version, all, NULL) : NULL;
    Py_XDECREF(all);
    if (!done && PyErr_ExceptionMatches(PyExc_TypeError)) { /* older torch takes one tensor */
        PyErr_Clear();
        for (int i = 0; i < count; i++) {
            Py_XDECREF(done);
            done = PyObject_CallFunctionObjArgs(reader->increment_version, tensors[i], NULL);
            if (!done)
                break;
        }
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}
