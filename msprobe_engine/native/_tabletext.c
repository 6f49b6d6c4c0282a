/* Text of a csv table, fast: what `msprobe_engine.report.table_files.csvtext` does in Python, with the same results.
 *
 * lines(columns, rows, nan, inf, minus_inf, cell)  the lines of a block; `columns` are lists or float64 buffers of `rows` cells,
 *     the next three the bytes of floats that are no finite numbers; `cell(object) -> str` makes every cell that is not plain
 * texts(values, where, suffix, other)  a list: the text of a float64 as repr gives it, with `suffix`, where the buffer of bool is
 *     true, else the object `other`
 * set_powers(table)  see _numbertext.h
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "_numbertext.h"

enum { LONGEST_NUMBER = 32, MOST_COLUMNS = 256 };

typedef struct {
    char *data;
    size_t used, size;
} Text;

typedef struct {
    const char *numbers; /* float64, or */
    PyObject *items;
    Py_buffer buffer;
} Column;

typedef struct {
    const char *text[3];
    Py_ssize_t length[3];
} Odd;

static int reserve(Text *out, size_t more) {
    if (out->used + more <= out->size) return 0;
    size_t size = out->size * 2 > out->used + more ? out->size * 2 : out->used + more;
    char *data = PyMem_RawRealloc(out->data, size);
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    out->data = data;
    out->size = size;
    return 0;
}

static int add(Text *out, const char *text, size_t n) {
    if (reserve(out, n) < 0) return -1;
    memcpy(out->data + out->used, text, n);
    out->used += n;
    return 0;
}

static int add_double(Text *out, double value, const Odd *odd) {
    if (isnan(value)) return add(out, odd->text[0], (size_t)odd->length[0]);
    if (isinf(value)) return add(out, odd->text[value < 0 ? 2 : 1], (size_t)odd->length[value < 0 ? 2 : 1]);
    if (reserve(out, LONGEST_NUMBER) < 0) return -1;
    out->used = (size_t)(put_double(out->data + out->used, value) - out->data);
    return 0;
}

static Py_ssize_t digits(const char *text, Py_ssize_t n, Py_ssize_t i) {
    while (i < n && text[i] >= '0' && text[i] <= '9') i++;
    return i;
}

/* Behind the sign: digits, maybe a point and digits, maybe an exponent, maybe a percent sign; or inf. As cell_text in Python. */
static int is_number(const char *text, Py_ssize_t n) {
    if (n == 4 && !memcmp(text + 1, "inf", 3)) return 1;
    Py_ssize_t i = digits(text, n, 1);
    if (i == 1) return 0;
    if (i < n && text[i] == '.') i = digits(text, n, i + 1);
    if (i < n && (text[i] == 'e' || text[i] == 'E')) {
        Py_ssize_t start = i + 1 < n && (text[i + 1] == '+' || text[i + 1] == '-') ? i + 2 : i + 1;
        i = digits(text, n, start);
        if (i == start) return 0;
    }
    return i == n || (i + 1 == n && text[i] == '%');
}

/* 0 plain, 1 to be quoted, 2 not for here: what a spreadsheet may run, NUL, an apostrophe in front. */
static int kind_of(const char *text, Py_ssize_t n) {
    if (!n) return 0;
    switch (text[0]) {
    case '+': case '-':
        return is_number(text, n) ? 0 : 2;
    case '=': case '@': case '\t': case '\r': case '\'': return 2;
    }
    int quoted = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        char c = text[i];
        if (c == ',' || c == '"' || c == '\n' || c == '\r') quoted = 1;
        if (!c) return 2;
    }
    return quoted;
}

static int add_quoted(Text *out, const char *text, Py_ssize_t n) {
    if (reserve(out, 2 * (size_t)n + 2) < 0) return -1;
    char *p = out->data + out->used;
    *p++ = '"';
    for (Py_ssize_t i = 0; i < n; i++) {
        if (text[i] == '"') *p++ = '"';
        *p++ = text[i];
    }
    *p++ = '"';
    out->used = (size_t)(p - out->data);
    return 0;
}

static int add_made(Text *out, PyObject *item, PyObject *cell) {
    PyObject *made = PyObject_CallOneArg(cell, item);
    if (!made) return -1;
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(made, &n);
    int failed = !text || add(out, text, (size_t)n) < 0;
    Py_DECREF(made);
    return failed ? -1 : 0;
}

static int add_cell(Text *out, PyObject *item, const Odd *odd, PyObject *cell) {
    if (item == Py_None) return 0;
    if (PyFloat_CheckExact(item)) return add_double(out, PyFloat_AS_DOUBLE(item), odd);
    if (PyUnicode_CheckExact(item)) {
        Py_ssize_t n;
        const char *text = PyUnicode_AsUTF8AndSize(item, &n);
        if (!text) {
            PyErr_Clear(); /* half of a surrogate pair */
            return add_made(out, item, cell);
        }
        int kind = kind_of(text, n);
        return kind == 0 ? add(out, text, (size_t)n) : kind == 1 ? add_quoted(out, text, n) : add_made(out, item, cell);
    }
    if (item == Py_True) return add(out, "True", 4);
    if (item == Py_False) return add(out, "False", 5);
    if (PyLong_CheckExact(item)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (!overflow) {
            if (reserve(out, LONGEST_NUMBER) < 0) return -1;
            out->used = (size_t)(put_int(out->data + out->used, value) - out->data);
            return 0;
        }
    }
    return add_made(out, item, cell);
}

static int open_column(Column *column, PyObject *object, Py_ssize_t rows) {
    Py_ssize_t n;
    if (PyList_CheckExact(object)) {
        column->items = object;
        n = PyList_GET_SIZE(object);
    } else {
        if (PyObject_GetBuffer(object, &column->buffer, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) return -1;
        column->numbers = column->buffer.buf;
        n = column->buffer.len / (Py_ssize_t)sizeof(double);
        if (!column->buffer.format || strcmp(column->buffer.format, "d")) {
            PyErr_SetString(PyExc_TypeError, "a column is a list or a buffer of float64");
            return -1;
        }
    }
    if (n == rows) return 0;
    PyErr_Format(PyExc_ValueError, "a column has %zd cells, the block %zd rows", n, rows);
    return -1;
}

static int add_lines(Text *out, Column *columns, Py_ssize_t count, Py_ssize_t rows, const Odd *odd, PyObject *cell) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        for (Py_ssize_t i = 0; i < count; i++) {
            Column *column = &columns[i];
            if (i && add(out, ",", 1) < 0) return -1;
            if (column->numbers) {
                double value;
                memcpy(&value, column->numbers + row * (Py_ssize_t)sizeof value, sizeof value);
                if (add_double(out, value, odd) < 0) return -1;
            } else if (row >= PyList_GET_SIZE(column->items)) {
                PyErr_SetString(PyExc_RuntimeError, "a column became shorter");
                return -1;
            } else {
                PyObject *item = PyList_GET_ITEM(column->items, row);
                Py_INCREF(item);
                int failed = add_cell(out, item, odd, cell);
                Py_DECREF(item);
                if (failed < 0) return -1;
            }
        }
        if (add(out, "\n", 1) < 0) return -1;
    }
    return 0;
}

static PyObject *lines(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *given, *cell, *result = NULL;
    Py_ssize_t rows, opened = 0;
    Odd odd;
    if (!PyArg_ParseTuple(args, "O!ny#y#y#O", &PyList_Type, &given, &rows, &odd.text[0], &odd.length[0], &odd.text[1], &odd.length[1],
                          &odd.text[2], &odd.length[2], &cell))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(given);
    if (!have_powers || count > MOST_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, have_powers ? "too many columns" : "set_powers has not been called");
        return NULL;
    }
    static Column none;
    Column columns[MOST_COLUMNS];
    Text out = {PyMem_RawMalloc((size_t)rows * 64 + 64), 0, (size_t)rows * 64 + 64};
    if (!out.data) return PyErr_NoMemory();
    for (; opened < count; opened++) {
        columns[opened] = none;
        if (open_column(&columns[opened], PyList_GET_ITEM(given, opened), rows) < 0) {
            opened++;
            goto done;
        }
    }
    if (add_lines(&out, columns, count, rows, &odd, cell) == 0) result = PyBytes_FromStringAndSize(out.data, (Py_ssize_t)out.used);
done:
    for (Py_ssize_t i = 0; i < opened; i++)
        if (columns[i].buffer.obj) PyBuffer_Release(&columns[i].buffer);
    PyMem_RawFree(out.data);
    return result;
}

static PyObject *texts(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer values, where;
    const char *suffix;
    Py_ssize_t length;
    PyObject *other, *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y#O", &values, &where, &suffix, &length, &other)) return NULL;
    Py_ssize_t n = where.len;
    if (!have_powers || values.len != n * (Py_ssize_t)sizeof(double) || length > LONGEST_NUMBER) {
        PyErr_SetString(PyExc_ValueError, have_powers ? "float64 and bool of one length are needed" : "set_powers has not been called");
        goto done;
    }
    found = PyList_New(n);
    for (Py_ssize_t i = 0; found && i < n; i++) {
        PyObject *item = other;
        if (((const char *)where.buf)[i]) {
            char text[2 * LONGEST_NUMBER], *end;
            double value;
            memcpy(&value, (const char *)values.buf + i * (Py_ssize_t)sizeof value, sizeof value);
            if (isfinite(value)) {
                end = put_double(text, value);
            } else {
                const char *word = isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
                end = text + strlen(word);
                memcpy(text, word, strlen(word));
            }
            memcpy(end, suffix, (size_t)length);
            Py_ssize_t size = end + length - text;
            item = PyUnicode_New(size, 127);
            if (!item) {
                Py_CLEAR(found);
                break;
            }
            memcpy(PyUnicode_1BYTE_DATA(item), text, (size_t)size);
        } else {
            Py_INCREF(other);
        }
        PyList_SET_ITEM(found, i, item);
    }
done:
    PyBuffer_Release(&values);
    PyBuffer_Release(&where);
    return found;
}

static PyMethodDef methods[] = {
    {"texts", texts, METH_VARARGS, "texts(values, where, suffix, other) -> list"},
    {"lines", lines, METH_VARARGS, "lines(columns, rows, nan, inf, minus_inf, cell) -> bytes"},
    {"set_powers", set_powers, METH_O, "set_powers(table)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tabletext", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tabletext(void) { return PyModule_Create(&module); }
