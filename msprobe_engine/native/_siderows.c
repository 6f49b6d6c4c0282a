/* Rows of dump records, fast: what `msprobe_engine.formats.dump.record_rows` does in Python, with the same results.
 *
 * block(records, reader, side, texts)  appends the records of a dict to the columns of `side`. What is no plain record (of a collective,
 *     of gradients, of a single save, damaged) goes to `reader.record(name, record)`, a section that is no list to
 *     `reader.walk(name, node, role, 0, False)`, and what in a list is no tensor with statistics alone to
 *     `reader.item(name, index, child, role, 0, False)`, in the order of the file. `texts` has the shapes and dtypes that were seen.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { SECTIONS = 5, FIELDS = 8, MOST_INDICES = 32, LONGEST_ARGUMENT_TYPE = 8 };
enum { TYPE, DTYPE, SHAPE, MAX, MIN, MEAN, NORM, REQUIRES_GRAD };

static const char *const section_names[SECTIONS] = {"input_args", "input_kwargs", "input", "parameters", "output"};
static const char *const place_names[SECTIONS] = {".input", ".input", ".input", ".parameters", ".output"};
static const char section_roles[SECTIONS] = {0, 0, 0, 1, 2};
static const char *const field_names[FIELDS] = {"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"};

static PyObject *sections[SECTIONS], *places[SECTIONS], *fields[FIELDS], *indices[MOST_INDICES];
static PyObject *debug_end, *gradients_part, *communication[2], *empty_text;

typedef struct {
    char *data;
    size_t used, size;
} Buffer;

/* The columns that are lists are appended to at once; those that are arrays are collected and handed over by `flush`. */
typedef struct {
    PyObject *reader, *texts;
    PyObject *ops, *name, *dtype, *shape, *md5, *requires_grad, *data_name; /* lists */
    PyObject *tags;                                                        /* dict */
    PyObject *op, *role, *numbers, *first;                                 /* arrays and a bytearray */
    Buffer ops_of_rows, roles, values, firsts;
    int64_t at;
} Columns;

static int put(Buffer *out, const void *data, size_t n) {
    if (out->used + n > out->size) {
        size_t size = 2 * out->size + n + 1024;
        char *moved = PyMem_Realloc(out->data, size);
        if (!moved) {
            PyErr_NoMemory();
            return -1;
        }
        out->data = moved;
        out->size = size;
    }
    memcpy(out->data + out->used, data, n);
    out->used += n;
    return 0;
}

static int hand_over(Buffer *from, PyObject *to, const char *method) {
    if (!from->used) return 0;
    PyObject *done = PyObject_CallMethod(to, method, "y#", from->data, (Py_ssize_t)from->used);
    from->used = 0;
    if (!done) return -1;
    Py_DECREF(done);
    return 0;
}

static int flush(Columns *c) {
    return hand_over(&c->ops_of_rows, c->op, "frombytes") < 0 || hand_over(&c->roles, c->role, "extend") < 0 ||
                   hand_over(&c->values, c->numbers, "frombytes") < 0 || hand_over(&c->firsts, c->first, "frombytes") < 0
               ? -1
               : 0;
}

static int tell_at(Columns *c) {
    PyObject *at = PyLong_FromLongLong(c->at);
    int done = at ? PyObject_SetAttrString(c->reader, "at", at) : -1;
    Py_XDECREF(at);
    return done;
}

/* 1: was a tensor with statistics and nothing else, and is a row now; 0: is none; -1: error. */
static int tensor(Columns *c, PyObject *prefix, Py_ssize_t index, PyObject *node, char role) {
    if (!PyDict_CheckExact(node) || PyDict_Size(node) != FIELDS || index >= MOST_INDICES) return 0;
    PyObject *found[FIELDS];
    for (int i = 0; i < FIELDS; i++) {
        found[i] = PyDict_GetItemWithError(node, fields[i]);
        if (!found[i]) return PyErr_Occurred() ? -1 : 0;
    }
    double four[4];
    for (int i = 0; i < 4; i++) {
        if (!PyFloat_CheckExact(found[MAX + i])) return 0;
        four[i] = PyFloat_AsDouble(found[MAX + i]);
    }
    if (!PyUnicode_CheckExact(found[TYPE]) || !PyUnicode_CheckExact(found[DTYPE]) || !PyUnicode_GetLength(found[DTYPE])) return 0;
    if (PyUnicode_GetLength(found[TYPE]) <= LONGEST_ARGUMENT_TYPE) return 0; /* may be none of a tensor: Python looks */
    if (!PyList_CheckExact(found[SHAPE])) return 0;
    PyObject *key = PyList_AsTuple(found[SHAPE]);
    if (!key) return -1;
    PyObject *shape = PyDict_GetItemWithError(c->texts, key);
    Py_DECREF(key);
    if (!shape) {
        if (!PyErr_Occurred()) return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear(); /* lists in the list */
        return 0;
    }
    PyObject *dtype = PyDict_GetItemWithError(c->texts, found[DTYPE]);
    if (!dtype) {
        if (PyErr_Occurred() || PyDict_SetItem(c->texts, found[DTYPE], found[DTYPE]) < 0) return -1;
        dtype = found[DTYPE];
    }
    PyObject *name = PyUnicode_Concat(prefix, indices[index]);
    if (!name) return -1;
    PyObject *grad = PyBool_Check(found[REQUIRES_GRAD]) ? found[REQUIRES_GRAD] : Py_None;
    int failed = PyList_Append(c->name, name) < 0 || PyList_Append(c->dtype, dtype) < 0 || PyList_Append(c->shape, shape) < 0 ||
                 PyList_Append(c->md5, Py_None) < 0 || PyList_Append(c->requires_grad, grad) < 0 ||
                 PyList_Append(c->data_name, empty_text) < 0 || put(&c->ops_of_rows, &c->at, sizeof c->at) < 0 ||
                 put(&c->roles, &role, 1) < 0 || put(&c->values, four, sizeof four) < 0;
    Py_DECREF(name);
    return failed ? -1 : 1;
}

static int call(PyObject *result) {
    if (!result) return -1;
    Py_DECREF(result);
    return 0;
}

static int section(Columns *c, PyObject *prefix, PyObject *value, char role) {
    if (PyDict_CheckExact(value) && !PyDict_Size(value)) return 0;
    if (!PyList_CheckExact(value)) {
        if (flush(c) < 0 || tell_at(c) < 0) return -1;
        return call(PyObject_CallMethod(c->reader, "walk", "OOiiO", prefix, value, (int)role, 0, Py_False));
    }
    for (Py_ssize_t i = 0; i < PyList_Size(value); i++) {
        PyObject *child = Py_NewRef(PyList_GetItem(value, i));
        int done = tensor(c, prefix, i, child, role);
        if (!done) {
            done = -1;
            if (flush(c) == 0 && tell_at(c) == 0)
                done = call(PyObject_CallMethod(c->reader, "item", "OnOiiO", prefix, i, child, (int)role, 0, Py_False));
        }
        Py_DECREF(child);
        if (done < 0) return -1;
    }
    return 0;
}

static int keep_tags(Columns *c, PyObject *record) {
    PyObject *extra = PyDict_Copy(record), *at = PyLong_FromLongLong(c->at);
    int failed = !extra || !at;
    for (int i = 0; !failed && i < SECTIONS; i++) {
        int there = PyDict_Contains(extra, sections[i]);
        failed = there < 0 || (there && PyDict_DelItem(extra, sections[i]) < 0);
    }
    failed = failed || PyDict_SetItem(c->tags, at, extra) < 0;
    Py_XDECREF(extra);
    Py_XDECREF(at);
    return failed ? -1 : 0;
}

static int plain(PyObject *name, PyObject *record) {
    if (!PyDict_CheckExact(record)) return 0;
    Py_ssize_t length = PyUnicode_GetLength(name);
    if (PyUnicode_Tailmatch(name, debug_end, 0, length, 1) != 0) return 0;
    for (int i = 0; i < 2; i++)
        if (PyUnicode_Tailmatch(name, communication[i], 0, length, -1) != 0) return 0;
    return PyUnicode_Find(name, gradients_part, 0, length, 1) == -1;
}

static int one_record(Columns *c, PyObject *name, PyObject *record) {
    if (!PyUnicode_CheckExact(name) || !plain(name, record)) {
        if (PyErr_Occurred() || flush(c) < 0) return -1;
        return call(PyObject_CallMethod(c->reader, "record", "OO", name, record));
    }
    c->at = PyList_Size(c->ops);
    if (PyList_Append(c->ops, name) < 0) return -1;
    Py_ssize_t known = 0;
    for (int i = 0; i < SECTIONS; i++) {
        PyObject *value = PyDict_GetItemWithError(record, sections[i]);
        if (!value) {
            if (PyErr_Occurred()) return -1;
            continue;
        }
        known++;
        PyObject *prefix = PyUnicode_Concat(name, places[i]);
        if (!prefix) return -1;
        Py_INCREF(value);
        int done = section(c, prefix, value, section_roles[i]);
        Py_DECREF(value);
        Py_DECREF(prefix);
        if (done < 0) return -1;
    }
    if (PyDict_Size(record) > known && keep_tags(c, record) < 0) return -1;
    int64_t rows = PyList_Size(c->name);
    return put(&c->firsts, &rows, sizeof rows);
}

static PyObject *column(PyObject *side, const char *name, int list) {
    PyObject *found = PyObject_GetAttrString(side, name);
    if (found && list && !PyList_CheckExact(found)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list", name);
        Py_CLEAR(found);
    }
    return found;
}

static PyObject *block(PyObject *self, PyObject *args) {
    (void)self;
    Columns c = {0};
    PyObject *records, *side, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!OOO!", &PyDict_Type, &records, &c.reader, &side, &PyDict_Type, &c.texts)) return NULL;
    PyObject **const lists[] = {&c.ops, &c.name, &c.dtype, &c.shape, &c.md5, &c.requires_grad, &c.data_name};
    static const char *const list_names[] = {"ops", "name", "dtype", "shape", "md5", "requires_grad", "data_name"};
    PyObject **const others[] = {&c.op, &c.role, &c.numbers, &c.first, &c.tags};
    static const char *const other_names[] = {"op", "role", "numbers", "offsets", "tags"};
    for (int i = 0; i < 7; i++)
        if (!(*lists[i] = column(side, list_names[i], 1))) goto done;
    for (int i = 0; i < 5; i++)
        if (!(*others[i] = column(side, other_names[i], 0))) goto done;
    if (!PyDict_CheckExact(c.tags)) {
        PyErr_SetString(PyExc_TypeError, "tags must be a dict");
        goto done;
    }
    PyObject *name, *record;
    Py_ssize_t position = 0;
    while (PyDict_Next(records, &position, &name, &record)) {
        Py_INCREF(name);
        Py_INCREF(record);
        int failed = one_record(&c, name, record);
        Py_DECREF(name);
        Py_DECREF(record);
        if (failed < 0) goto done;
    }
    if (flush(&c) == 0) result = Py_NewRef(Py_None);
done:
    for (int i = 0; i < 7; i++) Py_XDECREF(*lists[i]);
    for (int i = 0; i < 5; i++) Py_XDECREF(*others[i]);
    PyMem_Free(c.ops_of_rows.data);
    PyMem_Free(c.roles.data);
    PyMem_Free(c.values.data);
    PyMem_Free(c.firsts.data);
    return result;
}

static PyMethodDef methods[] = {
    {"block", block, METH_VARARGS, "block(records, reader, side, texts)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_siderows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__siderows(void) {
    for (int i = 0; i < SECTIONS; i++) {
        sections[i] = PyUnicode_InternFromString(section_names[i]);
        places[i] = PyUnicode_InternFromString(place_names[i]);
        if (!sections[i] || !places[i]) return NULL;
    }
    for (int i = 0; i < FIELDS; i++)
        if (!(fields[i] = PyUnicode_InternFromString(field_names[i]))) return NULL;
    for (int i = 0; i < MOST_INDICES; i++)
        if (!(indices[i] = PyUnicode_FromFormat(".%d", i))) return NULL;
    debug_end = PyUnicode_InternFromString(".debug");
    gradients_part = PyUnicode_InternFromString(".parameters_grad");
    communication[0] = PyUnicode_InternFromString("Distributed.");
    communication[1] = PyUnicode_InternFromString("MintDistributed.");
    empty_text = PyUnicode_InternFromString("");
    if (!debug_end || !gradients_part || !communication[0] || !communication[1] || !empty_text) return NULL;
    return PyModule_Create(&module);
}
