/* module.c: flash_kda._C, the library behind Python's calling convention.
 *
 *     flash_kda.fwd -> _C.fwd -> bind every argument -> fkda_forward without the GIL -> exception?
 *
 * The functions here take all arguments by position; names, defaults and documentation are in
 * flash_kda/__init__.py. They return None, or NotImplemented when an argument is a tensor that only
 * torch's dispatcher understands. One limited-API binary serves every Python from 3.10 on.
 */
#include <Python.h>

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "arrays.h"

/* ---- Parameters of the three calls ----------------------------------------------------------- */

enum kind {
    TENSOR,   /* wanted */
    OPTIONAL, /* None: absent */
    OUTPUT,   /* wanted, written */
    OPTIONAL_OUTPUT,
    WORKSPACE, /* None or bytes of any dtype */
    SCALE,
    LOWER_BOUND, /* None: the softplus gate */
    FLAG,        /* a bool that sets `value` in fkda_args.flags */
    GATE,        /* a bool; False: g is activated already */
    ISA,         /* None or a name */
    PRECISION,
    THREADS
};

struct parameter {
    const char *name;
    enum kind kind;
    size_t value; /* offset of the tensor in fkda_args, or the flag */
};

#define AT(field) offsetof(fkda_args, field)

static const struct parameter forward_parameters[] = {
    {"q", TENSOR, AT(q)},
    {"k", TENSOR, AT(k)},
    {"v", TENSOR, AT(v)},
    {"g", TENSOR, AT(g)},
    {"beta", TENSOR, AT(beta)},
    {"scale", SCALE, 0},
    {"out", OUTPUT, AT(out)},
    {"A_log", OPTIONAL, AT(A_log)},
    {"dt_bias", OPTIONAL, AT(dt_bias)},
    {"lower_bound", LOWER_BOUND, 0},
    {"initial_state", OPTIONAL, AT(initial_state)},
    {"final_state", OPTIONAL_OUTPUT, AT(final_state)},
    {"cu_seqlens", OPTIONAL, AT(cu_seqlens)},
    {"workspace", WORKSPACE, 0},
    {"checkpoint_state", OPTIONAL_OUTPUT, AT(checkpoint_state)},
    {"checkpoint_offsets", OPTIONAL, AT(checkpoint_offsets)},
    {"checkpoint_indptr", OPTIONAL, AT(checkpoint_indptr)},
    {"state_indices", OPTIONAL, AT(state_indices)},
    {"use_qk_l2norm_in_kernel", FLAG, FKDA_QK_L2NORM},
    {"use_gate_in_kernel", GATE, 0},
    {"use_beta_sigmoid_in_kernel", FLAG, FKDA_BETA_SIGMOID},
    {"allow_neg_eigval", FLAG, FKDA_ALLOW_NEG_EIGVAL},
    {"isa", ISA, 0},
    {"precision", PRECISION, 0},
    {"num_threads", THREADS, 0},
};

static const struct parameter decode_parameters[] = {
    {"q", TENSOR, AT(q)},
    {"k", TENSOR, AT(k)},
    {"v", TENSOR, AT(v)},
    {"g", TENSOR, AT(g)},
    {"beta", TENSOR, AT(beta)},
    {"scale", SCALE, 0},
    {"out", OUTPUT, AT(out)},
    {"A_log", OPTIONAL, AT(A_log)},
    {"dt_bias", OPTIONAL, AT(dt_bias)},
    {"lower_bound", LOWER_BOUND, 0},
    {"state", OUTPUT, AT(final_state)},
    {"state_indices", OPTIONAL, AT(state_indices)},
    {"num_accepted_tokens", OPTIONAL, AT(num_accepted_tokens)},
    {"cu_seqlens", OPTIONAL, AT(cu_seqlens)},
    {"use_qk_l2norm_in_kernel", FLAG, FKDA_QK_L2NORM},
    {"use_gate_in_kernel", GATE, 0},
    {"use_beta_sigmoid_in_kernel", FLAG, FKDA_BETA_SIGMOID},
    {"allow_neg_eigval", FLAG, FKDA_ALLOW_NEG_EIGVAL},
    {"isa", ISA, 0},
    {"num_threads", THREADS, 0},
};

#define MAX_PARAMETERS (sizeof forward_parameters / sizeof forward_parameters[0])

struct entry_point {
    const char *name;
    fkda_status (*call)(const fkda_args *args, char *reason, size_t reason_bytes);
    const struct parameter *parameters;
    Py_ssize_t num_parameters;
};

static const struct entry_point entry_fwd = {"fwd", fkda_forward, forward_parameters,
                                             sizeof forward_parameters / sizeof(struct parameter)};
static const struct entry_point entry_reference = {"reference", fkda_reference, forward_parameters,
                                                   sizeof forward_parameters /
                                                       sizeof(struct parameter)};
static const struct entry_point entry_decode = {
    "decode", fkda_decode, decode_parameters, sizeof decode_parameters / sizeof(struct parameter)};

/* ---- One call -------------------------------------------------------------------------------- */

struct bound_call {
    fkda_args args;
    fkda_report report;
    struct fkda_array_call arrays;
    PyObject *owners[MAX_PARAMETERS]; /* owned; keep the memory of the tensors alive */
    int num_owners;
    const char *first_name; /* the argument that fixed the device; NULL: none yet */
    struct fkda_dl_device device;
    PyObject *lower_bound; /* borrowed */
    bool gate_in_kernel;
};

/* What the last successful call of this thread did. */
static _Thread_local struct {
    const char *call; /* NULL: none yet */
    fkda_report report;
    unsigned long long num_calls;
} last;

static bool is_host(struct fkda_dl_device device)
{
    return device.type == FKDA_DL_CPU || device.type == FKDA_DL_CUDA_HOST ||
           device.type == FKDA_DL_ROCM_HOST;
}

struct device_text {
    char text[32];
};

static struct device_text name_device(struct fkda_dl_device device)
{
    struct device_text name;
    if (is_host(device))
        snprintf(name.text, sizeof name.text, "cpu");
    else
        snprintf(name.text, sizeof name.text, device.type == FKDA_DL_CUDA ? "cuda:%d" : "device %d",
                 (int)device.index);
    return name;
}

/* Every tensor lives where the first one does; CUDA work goes to that framework's current stream */
static int bind_device(struct bound_call *call, const char *name, const struct fkda_array *array)
{
    struct fkda_dl_device device = array->device;
    if (is_host(device))
        device = (struct fkda_dl_device){FKDA_DL_CPU, 0};
    else if (device.type == FKDA_DL_CUDA_MANAGED)
        device.type = FKDA_DL_CUDA;
    if (call->first_name) {
        if (device.type == call->device.type && device.index == call->device.index)
            return 0;
        PyErr_Format(PyExc_ValueError, "%s: on %s, wanted %s (the device of %s)", name,
                     name_device(device).text, name_device(call->device).text, call->first_name);
        return -1;
    }
    call->first_name = name;
    call->device = device;
    if (device.type == FKDA_DL_CPU)
        return 0;
    if (device.type != FKDA_DL_CUDA) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s: on a device of DLPack type %d, wanted the CPU or a CUDA device", name,
                     (int)device.type);
        return -1;
    }
    call->args.device = FKDA_CUDA;
    call->args.device_index = device.index;
    return array->table
               ? array->table->current_stream(device.type, device.index, &call->args.stream)
               : 0;
}

static int bind_tensor(struct bound_call *call, const struct parameter *parameter, PyObject *object)
{
    enum fkda_array_use use = FKDA_ARRAY_READ;
    if (parameter->kind == WORKSPACE)
        use = FKDA_ARRAY_BYTES;
    else if (parameter->kind == OUTPUT || parameter->kind == OPTIONAL_OUTPUT)
        use = FKDA_ARRAY_WRITTEN;
    struct fkda_array array;
    int result = fkda_read_array(&call->arrays, object, parameter->name, use, &array);
    if (array.owner)
        call->owners[call->num_owners++] = array.owner;
    if (result != 0)
        return result;
    if (bind_device(call, parameter->name, &array) != 0)
        return -1;
    if (use != FKDA_ARRAY_BYTES) {
        memcpy((char *)&call->args + parameter->value, &array.tensor, sizeof array.tensor);
        return 0;
    }
    if (!array.row_major) {
        PyErr_Format(PyExc_ValueError, "%s: strided, wanted contiguous memory", parameter->name);
        return -1;
    }
    /* NULL would mean "none given"; an empty one is one that is too small. */
    static char empty;
    call->args.workspace = array.tensor.data ? array.tensor.data : &empty;
    call->args.workspace_bytes = array.bytes;
    return 0;
}

static int fail_type(const char *name, const char *wanted, PyObject *object)
{
    PyErr_Format(PyExc_TypeError, "%s: %R, wanted %s", name, object, wanted);
    return -1;
}

/* A number, but no bool: fwd(..., lower_bound=True) is a mistake. */
static int bind_number(const char *name, const char *wanted, PyObject *object, double *value)
{
    if (PyBool_Check(object) || PyUnicode_Check(object))
        return fail_type(name, wanted, object);
    *value = PyFloat_AsDouble(object);
    if (*value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return fail_type(name, wanted, object);
    }
    return 0;
}

static int bind_flag(struct bound_call *call, const struct parameter *parameter, PyObject *object)
{
    if (!PyBool_Check(object))
        return fail_type(parameter->name, "True or False", object);
    if (parameter->kind == GATE)
        call->gate_in_kernel = object == Py_True;
    else if (object == Py_True)
        call->args.flags |= (uint32_t)parameter->value;
    else
        call->args.flags &= ~(uint32_t)parameter->value;
    return 0;
}

static int bind_isa(struct bound_call *call, const char *name, PyObject *object)
{
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    for (int isa = FKDA_ISA_AUTO; text && isa < FKDA_ISA_COUNT; isa++)
        if (strcmp(text, fkda_isa_name((fkda_isa)isa)) == 0) {
            call->args.isa = isa;
            return 0;
        }
    PyErr_Clear();
    PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                 "%s: %R, wanted None or one of 'auto', 'portable', 'avx2', 'avx512', "
                 "'avx512_bf16', 'amx_bf16'",
                 name, object);
    return -1;
}

static int bind_precision(struct bound_call *call, const char *name, PyObject *object)
{
    bool text = PyUnicode_Check(object);
    if (text && PyUnicode_CompareWithASCIIString(object, "fp32") == 0)
        call->args.precision = FKDA_PRECISION_FP32;
    else if (text && PyUnicode_CompareWithASCIIString(object, "bf16") == 0)
        call->args.precision = FKDA_PRECISION_BF16;
    else {
        PyErr_Format(text ? PyExc_ValueError : PyExc_TypeError,
                     "%s: %R, wanted None, 'fp32' or 'bf16'", name, object);
        return -1;
    }
    return 0;
}

static int bind_threads(struct bound_call *call, const char *name, PyObject *object)
{
    if (PyBool_Check(object) || !PyIndex_Check(object))
        return fail_type(name, "None or an int of at least 1", object);
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred())
        PyErr_Clear(); /* too large for a long: reported like any other wrong value */
    if (value < 1 || value > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %R, wanted None or an int from 1 to %d", name, object,
                     INT32_MAX);
        return -1;
    }
    call->args.num_threads = (int32_t)value;
    return 0;
}

/* Returns 0, -1 with an exception set, or 1: only the dispatcher understands this tensor. */
static int bind_argument(struct bound_call *call, const struct parameter *parameter,
                         PyObject *object)
{
    bool none = object == Py_None;
    switch (parameter->kind) {
    case TENSOR:
    case OUTPUT:
        return bind_tensor(call, parameter, object);
    case OPTIONAL:
    case OPTIONAL_OUTPUT:
    case WORKSPACE:
        return none ? 0 : bind_tensor(call, parameter, object);
    case SCALE:
        return bind_number(parameter->name, "a number", object, &call->args.scale);
    case LOWER_BOUND:
        call->lower_bound = object; /* means something only with the gate: bind_gate */
        return 0;
    case FLAG:
    case GATE:
        return bind_flag(call, parameter, object);
    case ISA:
        return none ? 0 : bind_isa(call, parameter->name, object);
    case PRECISION:
        return none ? 0 : bind_precision(call, parameter->name, object);
    case THREADS:
        return none ? 0 : bind_threads(call, parameter->name, object);
    }
    return 0;
}

static int bind_gate(struct bound_call *call)
{
    fkda_args *args = &call->args;
    if (!call->gate_in_kernel) {
        args->gate = FKDA_GATE_ACTIVATED;
        return 0;
    }
    if (call->lower_bound == Py_None) {
        args->gate = FKDA_GATE_SOFTPLUS;
        return 0;
    }
    args->gate = FKDA_GATE_BOUNDED;
    return bind_number("lower_bound", "a number from -5 to 0, or None for the softplus gate",
                       call->lower_bound, &args->lower_bound);
}

static int bind_call(struct bound_call *call, const struct entry_point *entry,
                     struct fkda_array_reader *reader, PyObject *const *objects, Py_ssize_t count)
{
    if (count != entry->num_parameters) {
        PyErr_Format(PyExc_TypeError, "_C.%s takes %zd arguments, got %zd", entry->name,
                     entry->num_parameters, count);
        return -1;
    }
    memset(call, 0, sizeof *call);
    fkda_args_init(&call->args);
    call->args.report = &call->report;
    call->arrays = (struct fkda_array_call){.reader = reader, .grad_enabled = -1};
    for (Py_ssize_t i = 0; i < count; i++) {
        int result = bind_argument(call, &entry->parameters[i], objects[i]);
        if (result != 0)
            return result;
    }
    return bind_gate(call);
}

static void release_call(struct bound_call *call)
{
    while (call->num_owners > 0)
        Py_DECREF(call->owners[--call->num_owners]);
}

static PyObject *raise_status(fkda_status status, const char *reason)
{
    PyObject *kind = PyExc_RuntimeError;
    if (status == FKDA_ERROR_INVALID_ARGUMENT)
        kind = strstr(reason, ": dtype ") ? PyExc_TypeError : PyExc_ValueError;
    else if (status == FKDA_ERROR_UNSUPPORTED)
        kind = PyExc_NotImplementedError; /* a RuntimeError */
    else if (status == FKDA_ERROR_WORKSPACE)
        kind = PyExc_ValueError;
    else if (status == FKDA_ERROR_OUT_OF_MEMORY)
        kind = PyExc_MemoryError;
    PyErr_SetString(kind, reason[0] ? reason : fkda_status_name(status));
    return NULL;
}

static PyObject *run_call(PyObject *module, const struct entry_point *entry,
                          PyObject *const *objects, Py_ssize_t count)
{
    struct bound_call call;
    int bound = bind_call(&call, entry, PyModule_GetState(module), objects, count);
    PyObject *result = NULL;
    if (bound == 1) {
        result = Py_NotImplemented;
        Py_INCREF(result);
    } else if (bound == 0) {
        char reason[FKDA_REASON_BYTES] = "";
        PyThreadState *thread = PyEval_SaveThread();
        fkda_status status = entry->call(&call.args, reason, sizeof reason);
        PyEval_RestoreThread(thread);
        if (status == FKDA_OK) {
            last.call = entry->name;
            last.report = call.report;
            last.num_calls++;
            result = Py_None;
            Py_INCREF(result);
        } else {
            /* The library knows decode's state by the field that holds it. */
            bool state = entry == &entry_decode && strncmp(reason, "final_state", 11) == 0;
            raise_status(status, state ? reason + 6 : reason);
        }
    }
    release_call(&call);
    return result;
}

/* ---- Module functions ------------------------------------------------------------------------ */

static PyObject *py_fwd(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &entry_fwd, objects, count);
}

static PyObject *py_decode(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &entry_decode, objects, count);
}

static PyObject *py_reference(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &entry_reference, objects, count);
}

/* time_call(name, count, *arguments): seconds that `count` calls of the library take with these
 * arguments, bound once. What as many Python calls take above that is the binding's overhead. */
static PyObject *py_time_call(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    static const struct entry_point *const entries[] = {&entry_fwd, &entry_decode,
                                                        &entry_reference};
    const struct entry_point *entry = NULL;
    for (size_t i = 0; count > 2 && i < sizeof entries / sizeof entries[0]; i++)
        if (PyUnicode_Check(objects[0]) &&
            PyUnicode_CompareWithASCIIString(objects[0], entries[i]->name) == 0)
            entry = entries[i];
    long repeats = entry ? PyLong_AsLong(objects[1]) : 0;
    if (repeats < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "time_call: wanted a call's name, a count from 1, and "
                            "the arguments of the call");
        return NULL;
    }
    struct bound_call call;
    int bound = bind_call(&call, entry, PyModule_GetState(module), objects + 2, count - 2);
    PyObject *result = NULL;
    if (bound == 0) {
        char reason[FKDA_REASON_BYTES] = "";
        fkda_status status = FKDA_OK;
        struct timespec begin, end;
        timespec_get(&begin, TIME_UTC);
        for (long i = 0; i < repeats && status == FKDA_OK; i++)
            status = entry->call(&call.args, reason, sizeof reason);
        timespec_get(&end, TIME_UTC);
        double seconds =
            (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
        result = status == FKDA_OK ? PyFloat_FromDouble(seconds) : raise_status(status, reason);
    } else if (bound == 1) {
        PyErr_SetString(PyExc_TypeError, "time_call: wanted plain tensors");
    }
    release_call(&call);
    return result;
}

/* workspace_size(T_total, H, N, K, V): shapes only, as the library promises not to look at data. */
static PyObject *py_workspace_size(PyObject *module, PyObject *args)
{
    (void)module;
    long long T, H, N, K, V;
    if (!PyArg_ParseTuple(args, "LLLLL", &T, &H, &N, &K, &V))
        return NULL;
    if (T < 0 || H < 1 || N < 0) {
        PyErr_Format(PyExc_ValueError, "T_total, H, N: %lld, %lld, %lld, wanted at least 0, 1, 0",
                     T, H, N);
        return NULL;
    }
    static char not_read;
    const int64_t keys[] = {1, T, H, K}, values[] = {1, T, H, V}, offsets[] = {N + 1};
    fkda_args call;
    fkda_args_init(&call);
    call.scale = 1.0;
    call.q = call.k = call.g = fkda_tensor_contiguous(&not_read, FKDA_BF16, 4, keys);
    call.v = call.out = fkda_tensor_contiguous(&not_read, FKDA_BF16, 4, values);
    call.beta = fkda_tensor_contiguous(&not_read, FKDA_BF16, 3, keys);
    call.cu_seqlens = fkda_tensor_contiguous(&not_read, FKDA_I64, 1, offsets);
    char reason[FKDA_REASON_BYTES] = "";
    size_t bytes = 0;
    fkda_status status = fkda_workspace_bytes(&call, &bytes, reason, sizeof reason);
    return status == FKDA_OK ? PyLong_FromSize_t(bytes) : raise_status(status, reason);
}

/* The names of the instruction sets in `mask`, slowest first. */
static PyObject *isa_names(uint32_t mask)
{
    PyObject *names = PyList_New(0);
    for (int isa = FKDA_ISA_PORTABLE; names && isa < FKDA_ISA_COUNT; isa++) {
        if (!(mask >> isa & 1u))
            continue;
        PyObject *name = PyUnicode_FromString(fkda_isa_name((fkda_isa)isa));
        if (!name || PyList_Append(names, name) != 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    fkda_info info;
    char reason[FKDA_REASON_BYTES] = "";
    fkda_status status = fkda_get_info(&info, reason, sizeof reason);
    if (status != FKDA_OK)
        return raise_status(status, reason);
    return Py_BuildValue("{s:s,s:N,s:N,s:s,s:i,s:s,s:i,s:s}",          /* N takes the reference */
                         "version", info.version,                      //
                         "cpu_isa_built", isa_names(info.isa_built),   //
                         "cpu_isa_usable", isa_names(info.isa_usable), //
                         "cpu_isa", fkda_isa_name((fkda_isa)info.isa_chosen), //
                         "num_threads", (int)info.num_threads,                //
                         "cuda_archs", info.cuda_archs,                       //
                         "num_cuda_devices", (int)info.num_devices,           //
                         "cuda_status", info.cuda_status);
}

static PyObject *py_last_report(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!last.call)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:s,s:s,s:i,s:L,s:n,s:K}",                                //
                         "call", last.call,                                          //
                         "kernel", last.report.kernel,                               //
                         "num_threads", (int)last.report.num_threads,                //
                         "num_tokens", (long long)last.report.num_tokens,            //
                         "workspace_bytes", (Py_ssize_t)last.report.workspace_bytes, //
                         "num_calls", last.num_calls);
}

static PyMethodDef methods[] = {
    {"fwd", (PyCFunction)(void (*)(void))py_fwd, METH_FASTCALL, NULL},
    {"decode", (PyCFunction)(void (*)(void))py_decode, METH_FASTCALL, NULL},
    {"reference", (PyCFunction)(void (*)(void))py_reference, METH_FASTCALL, NULL},
    {"time_call", (PyCFunction)(void (*)(void))py_time_call, METH_FASTCALL, NULL},
    {"workspace_size", py_workspace_size, METH_VARARGS, NULL},
    {"info", py_info, METH_NOARGS, NULL},
    {"last_report", py_last_report, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    if (PyModule_AddStringConstant(module, "__version__", fkda_version()) != 0)
        return -1;
    return fkda_init_array_reader(PyModule_GetState(module));
}

static int traverse_module(PyObject *module, visitproc visit, void *arg)
{
    struct fkda_array_reader *reader = PyModule_GetState(module);
    return reader ? fkda_visit_array_reader(reader, visit, arg) : 0;
}

static int clear_module(PyObject *module)
{
    struct fkda_array_reader *reader = PyModule_GetState(module);
    if (reader)
        fkda_clear_array_reader(reader);
    return 0;
}

static void free_module(void *module)
{
    clear_module(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,   .m_name = "flash_kda._C", .m_size = sizeof(struct fkda_array_reader),
    .m_methods = methods,    .m_slots = slots,         .m_traverse = traverse_module,
    .m_clear = clear_module, .m_free = free_module,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
