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

#include "bound_call.h"

/* What the last successful call of this thread did. */
static _Thread_local struct {
    const char *call; /* NULL: none yet */
    fkda_report report;
    unsigned long long num_calls;
} last;

/* Wrong dtypes do not come this far: binding raises TypeError for them. */
static PyObject *raise_status(fkda_status status, const char *reason)
{
    PyObject *kind = PyExc_RuntimeError;
    if (status == FKDA_ERROR_INVALID_ARGUMENT || status == FKDA_ERROR_WORKSPACE)
        kind = PyExc_ValueError;
    else if (status == FKDA_ERROR_UNSUPPORTED)
        kind = PyExc_NotImplementedError; /* a RuntimeError */
    else if (status == FKDA_ERROR_OUT_OF_MEMORY)
        kind = PyExc_MemoryError;
    /* Not PyErr_SetString: what an environment variable holds may not be UTF-8. */
    PyErr_Format(kind, "%s", reason[0] ? reason : fkda_status_name(status));
    return NULL;
}

/* The reason in Python's words: the library speaks of its own functions, and of decode's state by
 * the field that holds it. */
static void translate_reason(const struct fkda_entry_point *entry, const char *reason, char *text,
                             size_t bytes)
{
    const struct {
        const char *c, *python;
    } words[] = {
        {"fkda_forward", "fwd"},
        {"fkda_decode", "decode"},
        {"fkda_reference", "reference"},
        {"final_state", entry == &fkda_entry_decode ? "state" : "final_state"},
    };
    size_t used = 0;
    while (*reason && used + 1 < bytes) {
        size_t i = 0, length = 0;
        for (; i < sizeof words / sizeof words[0]; i++) {
            length = strlen(words[i].c);
            if (strncmp(reason, words[i].c, length) == 0)
                break;
        }
        if (i < sizeof words / sizeof words[0]) {
            used += (size_t)snprintf(text + used, bytes - used, "%s", words[i].python);
            reason += length;
        } else {
            text[used++] = *reason++;
        }
    }
    text[used < bytes ? used : bytes - 1] = '\0';
}

static PyObject *run_call(PyObject *module, const struct fkda_entry_point *entry,
                          PyObject *const *objects, Py_ssize_t count)
{
    struct fkda_bound_call call;
    int bound = fkda_bind_call(&call, entry, PyModule_GetState(module), objects, count);
    char reason[FKDA_REASON_BYTES] = "";
    fkda_status status = FKDA_OK;
    PyObject *result = NULL;
    if (bound == 0)
        bound = fkda_run_call(&call, &status, reason, sizeof reason);
    if (bound == 1) {
        result = Py_NotImplemented;
        Py_INCREF(result);
    } else if (bound == 0 && status == FKDA_OK) {
        last.call = entry->name;
        last.report = call.report;
        last.num_calls++;
        if (fkda_mark_written(call.arrays.reader, call.written, call.num_written) == 0) {
            result = Py_None;
            Py_INCREF(result);
        }
    } else if (bound == 0) {
        char text[FKDA_REASON_BYTES]; /* never longer: no Python name is */
        translate_reason(entry, reason, text, sizeof text);
        raise_status(status, text);
    }
    fkda_release_call(&call);
    return result;
}

/* ---- Module functions ------------------------------------------------------------------------ */

static PyObject *py_fwd(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &fkda_entry_fwd, objects, count);
}

static PyObject *py_decode(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &fkda_entry_decode, objects, count);
}

static PyObject *py_reference(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    return run_call(module, &fkda_entry_reference, objects, count);
}

/* time_call(name, count, *arguments): seconds that `count` calls of the library take with these
 * arguments, bound once, after a first call that is not counted. What as many Python calls take
 * above that is the binding's overhead. */
static PyObject *py_time_call(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    static const struct fkda_entry_point *const entries[] = {&fkda_entry_fwd, &fkda_entry_decode,
                                                             &fkda_entry_reference};
    const struct fkda_entry_point *entry = NULL;
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
    struct fkda_bound_call call;
    int bound = fkda_bind_call(&call, entry, PyModule_GetState(module), objects + 2, count - 2);
    PyObject *result = NULL;
    if (bound == 0) {
        char reason[FKDA_REASON_BYTES] = "";
        fkda_status status;
        struct timespec begin, end;
        int ran = fkda_run_call(&call, &status, reason, sizeof reason);
        timespec_get(&begin, TIME_UTC);
        for (long i = 0; i < repeats && ran == 0 && status == FKDA_OK; i++)
            status = entry->call(&call.args, reason, sizeof reason);
        timespec_get(&end, TIME_UTC);
        double seconds =
            (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
        if (ran == 0)
            result = status == FKDA_OK ? PyFloat_FromDouble(seconds) : raise_status(status, reason);
    } else if (bound == 1) {
        PyErr_SetString(PyExc_TypeError, "time_call: wanted plain tensors");
    }
    fkda_release_call(&call);
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
    size_t cpu = 0, cuda = 0;
    fkda_status status = fkda_workspace_bytes(&call, &cpu, reason, sizeof reason);
    if (status != FKDA_OK)
        return raise_status(status, reason);
    call.device = FKDA_CUDA; /* a build without CUDA needs nothing there */
    if (fkda_workspace_bytes(&call, &cuda, reason, sizeof reason) != FKDA_OK)
        cuda = 0;
    return PyLong_FromSize_t(cpu > cuda ? cpu : cuda);
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
    return Py_BuildValue("{s:s,s:N,s:N,s:s,s:i,s:s,s:i,s:s,s:s,s:s}",  /* N takes the reference */
                         "version", info.version,                      //
                         "cpu_isa_built", isa_names(info.isa_built),   //
                         "cpu_isa_usable", isa_names(info.isa_usable), //
                         "cpu_isa", fkda_isa_name((fkda_isa)info.isa_chosen), //
                         "num_threads", (int)info.num_threads,                //
                         "cuda_archs", info.cuda_archs,                       //
                         "num_cuda_devices", (int)info.num_devices,           //
                         "cuda_status", info.cuda_status,                     //
                         "cuda_path", info.cuda_path,                         //
                         "cuda_note", info.cuda_note);
}

static PyObject *py_last_report(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!last.call)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:s,s:s,s:s,s:i,s:L,s:n,s:K}",                            //
                         "call", last.call,                                          //
                         "kernel", last.report.kernel,                               //
                         "note", last.report.note,                                   //
                         "num_threads", (int)last.report.num_threads,                //
                         "num_tokens", (long long)last.report.num_tokens,            //
                         "workspace_bytes", (Py_ssize_t)last.report.workspace_bytes, //
                         "num_calls", last.num_calls);
}

static const char last_report_doc[] =
    "last_report()\n--\n\n"
    "What the last successful call of this thread did, as a dict; None before the first.\n\n"
    "call is fwd, decode or reference; kernel names what ran, such as cpu/avx512/prefill_fp32;\n"
    "note says why no faster CUDA kernel took the call, '' where the fastest did; num_calls "
    "counts\n"
    "the successful calls of this thread.";

static PyMethodDef methods[] = {
    {"fwd", (PyCFunction)(void (*)(void))py_fwd, METH_FASTCALL, NULL},
    {"decode", (PyCFunction)(void (*)(void))py_decode, METH_FASTCALL, NULL},
    {"reference", (PyCFunction)(void (*)(void))py_reference, METH_FASTCALL, NULL},
    {"time_call", (PyCFunction)(void (*)(void))py_time_call, METH_FASTCALL, NULL},
    {"workspace_size", py_workspace_size, METH_VARARGS, NULL},
    {"info", py_info, METH_NOARGS, NULL},
    {"last_report", py_last_report, METH_NOARGS, last_report_doc},
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
