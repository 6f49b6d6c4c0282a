/* Text of dump.json, fast: what `msprobe_engine.formats.dump.writing.text` does in Python, with the same results.
 *
 * same_layout(new, old, rows, floats)  two lists of records.Entry, equal but for row indices and float scalars?
 * render(template, ops, slots, rows, floats)  substitutes numbers into the text; holds no GIL while it works
 * set_powers(table)  see _numbertext.h
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "_numbertext.h"

enum { NUMERIC = 0, BOOLEAN = 1, TAIL = 2, SCALAR = 3, CRC_KEY = 4, XOR_KEY = 5, TRUES = 6 };
enum { WORDS = 16, COUNT = 0, NANS = 1, POS_INF = 2, NEG_INF = 3, ZEROS = 4, DIGEST = 5 };
enum { MIN = 6, MAX = 7, SUM = 8, SUMSQ = 9, IMIN = 10, IMAX = 11, FLAGS = 12, CRC = 13, XOR = 14, KEY_ID = 15 };
enum { HAS_DIGEST = 1, HAS_INTEGERS = 2, HAS_CRC = 8, HAS_XOR = 16, REDACTED = 256, NO_SUMS = 512 };
enum { MAX_DEPTH = 64 };
#define OP_BYTES (4 * (MAX_DEPTH + 40))

/* ---- statistics of one row, as rows.read derives them --------------------------------------------------------------------- */

static char *put_key(char *p, int depth, const char *key, size_t n) {
    memset(p, ' ', (size_t)depth);
    return put(p + depth, key, n);
}
#define KEY(p, depth, literal) put_key(p, depth, literal, sizeof(literal) - 1)

static char *put_statistics(char *p, int kind, int depth, const double *row) {
    int64_t words[WORDS];
    if (row) memcpy(words, row, sizeof(words));
    if (!row || words[COUNT] == 0) {
        p = KEY(p, depth, "\"Max\": null,\n");
        p = KEY(p, depth, "\"Min\": null,\n");
        p = KEY(p, depth, "\"Mean\": null,\n");
        return KEY(p, depth, "\"Norm\": null");
    }
    if (words[FLAGS] & REDACTED) {
        int known = kind != BOOLEAN && !(words[FLAGS] & NO_SUMS);
        p = KEY(p, depth, "\"Max\": null,\n");
        p = KEY(p, depth, "\"Min\": null,\n");
        p = KEY(p, depth, "\"Mean\": ");
        p = known ? put_double(p, row[SUM] / (double)words[COUNT]) : PUT(p, "null");
        p = PUT(p, ",\n");
        p = KEY(p, depth, "\"Norm\": ");
        return known ? put_double(p, sqrt(row[SUMSQ])) : PUT(p, "null");
    }
    int64_t nans = words[NANS], pos = words[POS_INF], neg = words[NEG_INF];
    int64_t finite = (int64_t)((uint64_t)words[COUNT] - (uint64_t)nans - (uint64_t)pos - (uint64_t)neg); /* of a file: any numbers */
    int integers = (words[FLAGS] & HAS_INTEGERS) != 0;
    if (kind == BOOLEAN) {
        int top = nans || pos || !finite || (integers ? words[IMAX] != 0 : row[MAX] != 0);
        int bottom = nans || neg || !finite || (integers ? words[IMIN] != 0 : row[MIN] != 0);
        p = top ? KEY(p, depth, "\"Max\": true,\n") : KEY(p, depth, "\"Max\": false,\n");
        p = bottom ? KEY(p, depth, "\"Min\": true,\n") : KEY(p, depth, "\"Min\": false,\n");
        p = KEY(p, depth, "\"Mean\": null,\n");
        return KEY(p, depth, "\"Norm\": null");
    }
    double top = row[MAX], bottom = row[MIN], mean = finite ? row[SUM] / (double)finite : NAN, norm = sqrt(row[SUMSQ]);
    if (nans) {
        top = bottom = mean = norm = NAN;
        integers = 0;
    } else if (pos || neg) {
        if (pos) top = INFINITY;
        else if (!finite) top = -INFINITY;
        if (neg) bottom = -INFINITY;
        else if (!finite) bottom = INFINITY;
        mean = pos && neg ? NAN : pos ? INFINITY : -INFINITY;
        norm = INFINITY;
        integers = 0;
    }
    p = KEY(p, depth, "\"Max\": ");
    p = integers ? put_int(p, words[IMAX]) : put_double(p, top);
    p = PUT(p, ",\n");
    p = KEY(p, depth, "\"Min\": ");
    p = integers ? put_int(p, words[IMIN]) : put_double(p, bottom);
    p = PUT(p, ",\n");
    p = KEY(p, depth, "\"Mean\": ");
    p = put_double(p, mean);
    p = PUT(p, ",\n");
    p = KEY(p, depth, "\"Norm\": ");
    return put_double(p, norm);
}

static char *put_hex(char *p, uint64_t word, int digits) {
    for (int shift = 4 * digits - 4; shift >= 0; shift -= 4) *p++ = "0123456789abcdef"[(word >> shift) & 15];
    return p;
}

/* The key "md5"; a XOR stands where statistics stand, a CRC after other keys. */
static char *put_checksum(char *p, int kind, int depth, const double *row) {
    int64_t words[WORDS] = {0};
    if (row) memcpy(words, row, sizeof(words));
    if (kind == CRC_KEY) p = PUT(p, ",\n");
    p = KEY(p, depth, "\"md5\": ");
    if (kind == CRC_KEY ? !(words[FLAGS] & HAS_CRC) : !(words[FLAGS] & HAS_XOR) || !words[COUNT]) return PUT(p, "null");
    p = kind == CRC_KEY ? put_hex(PUT(p, "\""), (uint64_t)words[CRC], 8) : put_hex(PUT(p, "\"0x"), (uint64_t)words[XOR], 16);
    return PUT(p, "\"");
}

static char *put_true_count(char *p, int depth, const double *row) {
    int64_t words[WORDS];
    if (!row) return p;
    memcpy(words, row, sizeof(words));
    if (!words[COUNT] || words[FLAGS] & REDACTED) return p;
    p = PUT(p, ",\n");
    p = KEY(p, depth, "\"true_count\": ");
    return put_int(p, (int64_t)((uint64_t)words[COUNT] - (uint64_t)words[ZEROS])); /* of a file: any numbers */
}

static char *put_tail(char *p, int depth, const double *row) {
    int64_t words[WORDS];
    if (!row) return p;
    memcpy(words, row, sizeof(words));
    if (words[NANS]) {
        p = PUT(p, ",\n");
        p = KEY(p, depth, "\"nan_count\": ");
        p = put_int(p, words[NANS]);
    }
    if (words[POS_INF] || words[NEG_INF]) {
        p = PUT(p, ",\n");
        p = KEY(p, depth, "\"inf_count\": ");
        p = put_int(p, (int64_t)((uint64_t)words[POS_INF] + (uint64_t)words[NEG_INF]));
    }
    if (words[FLAGS] & HAS_DIGEST) {
        p = PUT(p, ",\n");
        p = KEY(p, depth, "\"digest\": \"");
        p = PUT(put_hex(p, (uint64_t)words[DIGEST], 16), "\"");
    }
    if (words[FLAGS] & REDACTED) {
        p = PUT(p, ",\n");
        p = KEY(p, depth, "\"redacted\": \"");
        p = words[KEY_ID] ? put_hex(p, (uint64_t)words[KEY_ID], 16) : PUT(p, "no key");
        p = PUT(p, "\"");
    }
    return p;
}

/* ---- render --------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    Py_ssize_t length;
    const char *ops; /* int32 [n_ops, 4]: offset, kind, depth, index into slots or floats */
    Py_ssize_t n_ops;
    const char *slots; /* int32 */
    Py_ssize_t n_slots;
    const char *rows; /* float64 [n_rows, WORDS] */
    Py_ssize_t n_rows;
    const char *floats; /* float64 */
    Py_ssize_t n_floats;
} Job;

/* Numbers of a file that was mapped or cut into pieces may lie at any address. */
static int32_t int_at(const char *numbers, Py_ssize_t i) {
    int32_t value;
    memcpy(&value, numbers + i * (Py_ssize_t)sizeof value, sizeof value);
    return value;
}

static double double_at(const char *numbers, Py_ssize_t i) {
    double value;
    memcpy(&value, numbers + i * (Py_ssize_t)sizeof value, sizeof value);
    return value;
}

static const char *check(const Job *job) {
    Py_ssize_t last = 0;
    for (Py_ssize_t i = 0; i < job->n_ops; i++) {
        int32_t op[4];
        memcpy(op, job->ops + i * (Py_ssize_t)sizeof op, sizeof op);
        if (op[0] < last || op[0] > job->length) return "offsets of the template must grow and stay inside it";
        if (op[2] < 0 || op[2] > MAX_DEPTH) return "depth out of range";
        if (op[1] == SCALAR ? op[3] < 0 || op[3] >= job->n_floats : op[1] < 0 || op[1] > TRUES || op[3] < 0 || op[3] >= job->n_slots)
            return "slot or kind out of range";
        last = op[0];
    }
    for (Py_ssize_t i = 0; i < job->n_slots; i++)
        if (int_at(job->slots, i) >= job->n_rows) return "a slot refers to a row that does not exist";
    return NULL;
}

static char *run(const Job *job, char *p) {
    Py_ssize_t done = 0;
    for (Py_ssize_t i = 0; i < job->n_ops; i++) {
        int32_t op[4];
        double numbers[WORDS];
        memcpy(op, job->ops + i * (Py_ssize_t)sizeof op, sizeof op);
        p = put(p, job->text + done, (size_t)(op[0] - done));
        done = op[0];
        if (op[1] == SCALAR) {
            p = put_double(p, double_at(job->floats, op[3]));
            continue;
        }
        int32_t slot = int_at(job->slots, op[3]);
        const double *row = slot < 0 ? NULL : numbers;
        if (row) memcpy(numbers, job->rows + (Py_ssize_t)sizeof numbers * slot, sizeof numbers);
        if (op[1] == TAIL)
            p = put_tail(p, op[2], row);
        else if (op[1] == TRUES)
            p = put_true_count(p, op[2], row);
        else if (op[1] > SCALAR)
            p = put_checksum(p, op[1], op[2], row);
        else
            p = put_statistics(p, op[1], op[2], row);
    }
    return put(p, job->text + done, (size_t)(job->length - done));
}

static PyObject *render(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer text, ops, slots, rows, floats;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*", &text, &ops, &slots, &rows, &floats)) return NULL;
    Job job = {text.buf, text.len, ops.buf, ops.len / 16, slots.buf, slots.len / 4, rows.buf, rows.len / (8 * WORDS), floats.buf, floats.len / 8};
    PyObject *out = NULL;
    const char *wrong = have_powers ? NULL : "set_powers has not been called";
    if (!wrong && (text.len > INT32_MAX || job.n_ops > (PY_SSIZE_T_MAX - text.len) / OP_BYTES)) wrong = "template too long";
    if (!wrong) {
        Py_BEGIN_ALLOW_THREADS wrong = check(&job);
        Py_END_ALLOW_THREADS
    }
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
    } else if ((out = PyBytes_FromStringAndSize(NULL, text.len + job.n_ops * OP_BYTES))) {
        char *start = PyBytes_AS_STRING(out), *end;
        Py_BEGIN_ALLOW_THREADS end = run(&job, start);
        Py_END_ALLOW_THREADS
        _PyBytes_Resize(&out, end - start);
    }
    PyBuffer_Release(&text);
    PyBuffer_Release(&ops);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&floats);
    return out;
}

static PyObject *format_double(PyObject *self, PyObject *arg) {
    (void)self;
    double value = PyFloat_AsDouble(arg);
    if (value == -1.0 && PyErr_Occurred()) return NULL;
    if (!have_powers) {
        PyErr_SetString(PyExc_ValueError, "set_powers has not been called");
        return NULL;
    }
    char text[40];
    return PyUnicode_FromStringAndSize(text, put_double(text, value) - text);
}

/* ---- same_layout: 1 equal, 0 different, -1 exception ------------------------------------------------------------------------ */

typedef struct {
    int32_t *rows;
    Py_ssize_t n_rows, max_rows;
    double *floats;
    Py_ssize_t n_floats, max_floats;
} Seen;

static int equal(PyObject *a, PyObject *b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

static PyObject *key_type, *key_value;

/* The value of an Opaque that is a plain float scalar: {"type": "float", "value": 0.5}; else NULL. */
static PyObject *scalar(PyObject *json) {
    if (!PyDict_CheckExact(json) || PyDict_GET_SIZE(json) != 2) return NULL;
    PyObject *value = PyDict_GetItemWithError(json, key_value); /* the key is a str: no exception */
    if (!value || !PyFloat_CheckExact(value)) return NULL;
    PyObject *type = PyDict_GetItemWithError(json, key_type);
    if (!type || !PyUnicode_Check(type)) return NULL;
    return PyUnicode_CompareWithASCIIString(type, "float") == 0 ? value : NULL;
}

/* Without `seen`: equal as JSON text: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals NaN. With it: sections of an entry, where
 * rows and floats are noted in place of being compared. */
static int same_parts(PyObject *a, PyObject *b, Seen *seen, int depth) {
    if (!seen && a == b) return 1;
    if (Py_TYPE(a) != Py_TYPE(b) || depth > MAX_DEPTH) return 0;
    if (seen && PyTuple_Check(a)) {
        Py_ssize_t n = PyTuple_GET_SIZE(a);
        if (n != PyTuple_GET_SIZE(b)) return 0;
        if (n == 1) { /* Opaque */
            PyObject *ja = PyTuple_GET_ITEM(a, 0), *jb = PyTuple_GET_ITEM(b, 0), *value = scalar(ja);
            if (!value) return scalar(jb) ? 0 : same_parts(ja, jb, NULL, 0);
            if (!scalar(jb) || seen->n_floats >= seen->max_floats) return 0;
            seen->floats[seen->n_floats++] = PyFloat_AS_DOUBLE(value);
            return 1;
        }
        if (n != 2) return 0;
        long row = PyLong_AsLong(PyTuple_GET_ITEM(a, 0)); /* TensorRef */
        if (row == -1 && PyErr_Occurred()) return -1;
        if (row > INT32_MAX || seen->n_rows >= seen->max_rows) return 0;
        seen->rows[seen->n_rows++] = row < 0 ? -1 : (int32_t)row;
        return equal(PyTuple_GET_ITEM(a, 1), PyTuple_GET_ITEM(b, 1));
    }
    if (PyFloat_CheckExact(a)) return memcmp(&((PyFloatObject *)a)->ob_fval, &((PyFloatObject *)b)->ob_fval, 8) == 0;
    if (PyList_Check(a) || PyTuple_Check(a)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(a);
        if (n != PySequence_Fast_GET_SIZE(b)) return 0;
        for (Py_ssize_t i = 0; i < n; i++) {
            int same = same_parts(PySequence_Fast_GET_ITEM(a, i), PySequence_Fast_GET_ITEM(b, i), seen, depth + 1);
            if (same != 1) return same;
        }
        return 1;
    }
    if (PyDict_Check(a)) {
        PyObject *ka, *va, *kb, *vb;
        Py_ssize_t pa = 0, pb = 0;
        if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return 0;
        while (PyDict_Next(a, &pa, &ka, &va) && PyDict_Next(b, &pb, &kb, &vb)) {
            int same = Py_TYPE(ka) == Py_TYPE(kb) ? equal(ka, kb) : 0;
            if (same == 1) same = same_parts(va, vb, seen, depth + 1);
            if (same != 1) return same;
        }
        return 1;
    }
    return equal(a, b);
}

static PyObject *same_layout(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *new, *old;
    Py_buffer rows, floats;
    if (!PyArg_ParseTuple(args, "O!O!w*w*", &PyList_Type, &new, &PyList_Type, &old, &rows, &floats)) return NULL;
    Seen seen = {rows.buf, 0, rows.len / 4, floats.buf, 0, floats.len / 8};
    Py_ssize_t n = PyList_GET_SIZE(new);
    int same = n == PyList_GET_SIZE(old);
    for (Py_ssize_t i = 0; same == 1 && i < n; i++) {
        PyObject *a = PyList_GET_ITEM(new, i), *b = PyList_GET_ITEM(old, i);
        same = PyTuple_Check(a) && PyTuple_Check(b) && PyTuple_GET_SIZE(a) == 6 && PyTuple_GET_SIZE(b) == 6;
        /* name, sections, parent, stack, micro_step, tags */
        if (same == 1) same = equal(PyTuple_GET_ITEM(a, 0), PyTuple_GET_ITEM(b, 0));
        for (int field = 2; same == 1 && field < 5; field++) same = equal(PyTuple_GET_ITEM(a, field), PyTuple_GET_ITEM(b, field));
        if (same == 1) same = same_parts(PyTuple_GET_ITEM(a, 5), PyTuple_GET_ITEM(b, 5), NULL, 0);
        if (same == 1) same = same_parts(PyTuple_GET_ITEM(a, 1), PyTuple_GET_ITEM(b, 1), &seen, 0);
    }
    if (same == 1 && (seen.n_rows != seen.max_rows || seen.n_floats != seen.max_floats)) same = 0;
    PyBuffer_Release(&rows);
    PyBuffer_Release(&floats);
    if (same < 0) return NULL;
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"render", render, METH_VARARGS, "render(template, ops, slots, rows, floats) -> bytes"},
    {"same_layout", same_layout, METH_VARARGS, "same_layout(new, old, rows_out, floats_out) -> bool"},
    {"set_powers", set_powers, METH_O, "set_powers(table)"},
    {"format_double", format_double, METH_O, "format_double(x) -> str"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dumptext", "Text of dump.json.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__dumptext(void) {
    key_type = PyUnicode_InternFromString("type");
    key_value = PyUnicode_InternFromString("value");
    return key_type && key_value ? PyModule_Create(&module) : NULL;
}
