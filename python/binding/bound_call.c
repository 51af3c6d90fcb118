/* bound_call.c: from the arguments of a Python call to an fkda_args.
 *
 * Each call is a table of parameters; binding walks it, so that a new parameter is a new line. What
 * the library checks is not checked here: types, devices and what needs Python's view only.
 */
#include "bound_call.h"

#include <stdio.h>
#include <string.h>

/* ---- Parameters of the three calls ----------------------------------------------------------- */

enum kind {
    TENSOR,   /* wanted */
    OPTIONAL, /* None: absent */
    OUTPUT,   /* wanted, written */
    OPTIONAL_OUTPUT,
    WORKSPACE, /* None or memory of any dtype */
    SCALE,
    LOWER_BOUND, /* None: the softplus gate */
    FLAG,        /* a bool that sets `value` in fkda_args.flags */
    GATE,        /* a bool; False: g is activated already */
    ISA,         /* None or a name */
    PRECISION,
    THREADS
};

/* Dtypes of a tensor: bits of 1 << enum fkda_dtype. */
enum {
    FLOATS = 1 << FKDA_BF16 | 1 << FKDA_F32,
    RESULTS = FLOATS | 1 << FKDA_F64, /* the last one in reference only */
    FLOAT32 = 1 << FKDA_F32,
    INTEGERS = 1 << FKDA_I32 | 1 << FKDA_I64
};

struct fkda_parameter {
    const char *name;
    enum kind kind;
    size_t value; /* offset of the tensor in fkda_args, or the flag */
    int dtypes;
};

#define AT(field) offsetof(fkda_args, field)

static const struct fkda_parameter forward_parameters[] = {
    {"q", TENSOR, AT(q), FLOATS},
    {"k", TENSOR, AT(k), FLOATS},
    {"v", TENSOR, AT(v), FLOATS},
    {"g", TENSOR, AT(g), FLOATS},
    {"beta", TENSOR, AT(beta), FLOATS},
    {"scale", SCALE, 0, 0},
    {"out", OUTPUT, AT(out), RESULTS},
    {"A_log", OPTIONAL, AT(A_log), FLOAT32},
    {"dt_bias", OPTIONAL, AT(dt_bias), FLOAT32},
    {"lower_bound", LOWER_BOUND, 0, 0},
    {"initial_state", OPTIONAL, AT(initial_state), RESULTS},
    {"final_state", OPTIONAL_OUTPUT, AT(final_state), RESULTS},
    {"cu_seqlens", OPTIONAL, AT(cu_seqlens), INTEGERS},
    {"workspace", WORKSPACE, 0, 0},
    {"checkpoint_state", OPTIONAL_OUTPUT, AT(checkpoint_state), RESULTS},
    {"checkpoint_offsets", OPTIONAL, AT(checkpoint_offsets), INTEGERS},
    {"checkpoint_indptr", OPTIONAL, AT(checkpoint_indptr), INTEGERS},
    {"state_indices", OPTIONAL, AT(state_indices), INTEGERS},
    {"use_qk_l2norm_in_kernel", FLAG, FKDA_QK_L2NORM, 0},
    {"use_gate_in_kernel", GATE, 0, 0},
    {"use_beta_sigmoid_in_kernel", FLAG, FKDA_BETA_SIGMOID, 0},
    {"allow_neg_eigval", FLAG, FKDA_ALLOW_NEG_EIGVAL, 0},
    {"isa", ISA, 0, 0},
    {"precision", PRECISION, 0, 0},
    {"num_threads", THREADS, 0, 0},
};

static const struct fkda_parameter decode_parameters[] = {
    {"q", TENSOR, AT(q), FLOATS},
    {"k", TENSOR, AT(k), FLOATS},
    {"v", TENSOR, AT(v), FLOATS},
    {"g", TENSOR, AT(g), FLOATS},
    {"beta", TENSOR, AT(beta), FLOATS},
    {"scale", SCALE, 0, 0},
    {"out", OUTPUT, AT(out), RESULTS},
    {"A_log", OPTIONAL, AT(A_log), FLOAT32},
    {"dt_bias", OPTIONAL, AT(dt_bias), FLOAT32},
    {"lower_bound", LOWER_BOUND, 0, 0},
    {"state", OUTPUT, AT(final_state), RESULTS},
    {"state_indices", OPTIONAL, AT(state_indices), INTEGERS},
    {"num_accepted_tokens", OPTIONAL, AT(num_accepted_tokens), INTEGERS},
    {"cu_seqlens", OPTIONAL, AT(cu_seqlens), INTEGERS},
    {"use_qk_l2norm_in_kernel", FLAG, FKDA_QK_L2NORM, 0},
    {"use_gate_in_kernel", GATE, 0, 0},
    {"use_beta_sigmoid_in_kernel", FLAG, FKDA_BETA_SIGMOID, 0},
    {"allow_neg_eigval", FLAG, FKDA_ALLOW_NEG_EIGVAL, 0},
    {"isa", ISA, 0, 0},
    {"num_threads", THREADS, 0, 0},
};

_Static_assert(sizeof forward_parameters / sizeof forward_parameters[0] == FKDA_MAX_PARAMETERS,
               "owners of a bound call");

const struct fkda_entry_point fkda_entry_fwd = {"fwd", fkda_forward, forward_parameters,
                                                sizeof forward_parameters /
                                                    sizeof(struct fkda_parameter)};
const struct fkda_entry_point fkda_entry_reference = {
    "reference", fkda_reference, forward_parameters,
    sizeof forward_parameters / sizeof(struct fkda_parameter)};
const struct fkda_entry_point fkda_entry_decode = {"decode", fkda_decode, decode_parameters,
                                                   sizeof decode_parameters /
                                                       sizeof(struct fkda_parameter)};

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

/* Where there is no exchange table: what the library of the first tensor answers in Python. */
static PyObject *ask_library(const struct fkda_bound_call *call, const char *function,
                             unsigned long long number)
{
    PyObject *module = PyImport_ImportModule(call->first_is_torch ? "flash_kda.torch_operator"
                                                                  : "flash_kda._cupy");
    PyObject *result =
        module ? PyObject_CallMethod(module, function, "OK", call->first_object, number) : NULL;
    Py_XDECREF(module);
    return result;
}

/* Kernels are queued on the current stream of the framework that q comes from. */
static int bind_stream(struct fkda_bound_call *call, PyObject *object,
                       const struct fkda_array *array)
{
    call->table = array->table;
    call->first_object = object;
    call->first_is_torch = array->torch;
    if (array->table)
        return array->table->current_stream(FKDA_DL_CUDA, call->args.device_index,
                                            &call->args.stream);
    PyObject *stream =
        ask_library(call, "current_stream", (unsigned long long)call->args.device_index);
    if (stream)
        call->args.stream = PyLong_AsVoidPtr(stream);
    Py_XDECREF(stream);
    return PyErr_Occurred() ? -1 : 0;
}

/* Every tensor lives where the first one does. */
static int bind_device(struct fkda_bound_call *call, const char *name, PyObject *object,
                       const struct fkda_array *array)
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
    return bind_stream(call, object, array);
}

/* The library would refuse it as well; here it is a TypeError, and unknown dtypes have a name. */
static int check_dtype(const struct fkda_bound_call *call, const struct fkda_parameter *parameter,
                       PyObject *object, const fkda_tensor *tensor)
{
    int wanted = parameter->dtypes;
    if (call->entry != &fkda_entry_reference)
        wanted &= ~(1 << FKDA_F64);
    if (wanted >> tensor->dtype & 1)
        return 0;
    char names[64] = "";
    size_t used = 0;
    for (int i = FKDA_BF16; i <= FKDA_F16; i++)
        if (wanted >> i & 1)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? " or " : "",
                                     fkda_dtype_name((fkda_dtype)i));
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: dtype %S, wanted %s", parameter->name,
                 dtype ? dtype : Py_None, names);
    Py_XDECREF(dtype);
    return -1;
}

static int bind_tensor(struct fkda_bound_call *call, const struct fkda_parameter *parameter,
                       PyObject *object)
{
    bool written = parameter->kind == OUTPUT || parameter->kind == OPTIONAL_OUTPUT ||
                   parameter->kind == WORKSPACE;
    enum fkda_array_use use = written ? FKDA_ARRAY_WRITTEN : FKDA_ARRAY_READ;
    struct fkda_array array;
    int result = fkda_read_array(&call->arrays, object, parameter->name, use, &array);
    if (array.owner)
        call->owners[call->num_owners++] = array.owner;
    if (result != 0)
        return result;
    if (bind_device(call, parameter->name, object, &array) != 0)
        return -1;
    if (written && array.torch)
        call->written[call->num_written++] = object;
    if (parameter->kind != WORKSPACE) {
        if (check_dtype(call, parameter, object, &array.tensor) != 0)
            return -1;
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

static void set_allocation_error(void *context, const char *kind, const char *message)
{
    (void)context;
    PyErr_Format(PyExc_MemoryError, "workspace: %s: %s", kind, message);
}

/* As many bytes as the call has just asked for. Returns 0, or -1 with an exception set. */
static int allocate_workspace(struct fkda_bound_call *call)
{
    const size_t bytes = call->report.workspace_bytes;
    if (call->table) {
        int64_t shape = (int64_t)bytes, stride = 1;
        struct fkda_dl_tensor wanted = {.device = call->device,
                                        .ndim = 1,
                                        .dtype = {FKDA_DL_UINT, 8, 1},
                                        .shape = &shape,
                                        .strides = &stride};
        if (call->table->allocate(&wanted, &call->memory, NULL, set_allocation_error) != 0)
            return -1;
        call->args.workspace = (char *)call->memory->tensor.data + call->memory->tensor.byte_offset;
        call->args.workspace_bytes = bytes;
        return 0;
    }
    static const struct fkda_parameter parameter = {"workspace", WORKSPACE, 0, 0};
    PyObject *tensor = ask_library(call, "empty_bytes", bytes);
    if (!tensor)
        return -1;
    call->workspace_owner = tensor;
    const int result = bind_tensor(call, &parameter, tensor);
    if (result == 1)
        PyErr_SetString(PyExc_TypeError, "workspace: what was allocated is no plain tensor");
    return result == 0 ? 0 : -1;
}

/* On CUDA the library never allocates, so a workspace that the caller left out comes from the
 * framework's own allocator, which reuses it in the order of the stream: capturable in a graph. How
 * much, and that none is needed, only the choice of kernels knows: the call is tried without. */
int fkda_run_call(struct fkda_bound_call *call, fkda_status *status, char *reason,
                  size_t reason_bytes)
{
    for (;;) {
        PyThreadState *thread = PyEval_SaveThread();
        *status = call->entry->call(&call->args, reason, reason_bytes);
        PyEval_RestoreThread(thread);
        if (*status != FKDA_ERROR_WORKSPACE || call->args.device != FKDA_CUDA ||
            call->args.workspace)
            return 0;
        if (allocate_workspace(call) != 0)
            return -1;
    }
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
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1; /* KeyboardInterrupt, SystemExit */
        PyErr_Clear();
        return fail_type(name, wanted, object);
    }
    return 0;
}

static int bind_flag(struct fkda_bound_call *call, const struct fkda_parameter *parameter,
                     PyObject *object)
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

_Static_assert(FKDA_ISA_COUNT == 6, "bind_isa, Isa and fwd's docstring list the names");
static int bind_isa(struct fkda_bound_call *call, const char *name, PyObject *object)
{
    bool text = PyUnicode_Check(object);
    for (int isa = FKDA_ISA_AUTO; text && isa < FKDA_ISA_COUNT; isa++)
        if (PyUnicode_CompareWithASCIIString(object, fkda_isa_name((fkda_isa)isa)) == 0) {
            call->args.isa = isa;
            return 0;
        }
    PyErr_Format(text ? PyExc_ValueError : PyExc_TypeError,
                 "%s: %R, wanted None or one of 'auto', 'portable', 'avx2', 'avx512', "
                 "'avx512_bf16', 'amx_bf16'",
                 name, object);
    return -1;
}

static int bind_precision(struct fkda_bound_call *call, const char *name, PyObject *object)
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

static int bind_threads(struct fkda_bound_call *call, const char *name, PyObject *object)
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
static int bind_argument(struct fkda_bound_call *call, const struct fkda_parameter *parameter,
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

static int bind_gate(struct fkda_bound_call *call)
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

int fkda_bind_call(struct fkda_bound_call *call, const struct fkda_entry_point *entry,
                   struct fkda_array_reader *reader, PyObject *const *objects, Py_ssize_t count)
{
    memset(call, 0, sizeof *call);
    if (count != entry->num_parameters) {
        PyErr_Format(PyExc_TypeError, "_C.%s takes %zd arguments, got %zd", entry->name,
                     entry->num_parameters, count);
        return -1;
    }
    call->entry = entry;
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

void fkda_release_call(struct fkda_bound_call *call)
{
    while (call->num_owners > 0)
        Py_DECREF(call->owners[--call->num_owners]);
    Py_CLEAR(call->workspace_owner);
    if (call->memory && call->memory->release)
        call->memory->release(call->memory);
    call->memory = NULL;
}
