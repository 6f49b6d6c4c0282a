/* The stack machine of `msprobe_engine.formats.tensors.pickle_machine`, fast.
 *
 * advance(machine, data, at, stack, hooks) -> (at, stack)  carries out the instructions of a pickle from byte `at` on, up to one that it
 *     leaves to the machine: STOP, a rare one, and each that is not as it should be (cut off, a value that is missing). It has done nothing
 *     of that one, so that the machine says what is wrong, in one place. Nothing that a pickle names is imported or called: calls go to
 *     `hooks.called`, states to `hooks.built`, but for the cases that `hooks` itself lists:
 *
 *     hooks.made      name -> text: a call of it is `hooks.inert(text, arguments)`; None: a call with one tuple is that tuple
 *     hooks.inert     class whose objects get a state as their attribute `state`
 *     hooks.name      class of the names
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static PyObject *name_at, *name_outer, *name_memo, *name_called, *name_built, *name_made, *name_inert, *name_name, *name_state, *name_replace;
static PyObject *name_set_items;

typedef struct {
    PyObject *machine, *outer, *memo, *called, *built, *made, *inert, *name;
} Context;

static uint32_t unsigned4(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Takes the reference of `value`. */
static int push(PyObject *stack, PyObject *value) {
    if (value == NULL) return -1;
    int failed = PyList_Append(stack, value);
    Py_DECREF(value);
    return failed;
}

static PyObject *top(PyObject *stack, Py_ssize_t below) {
    return PyList_GET_ITEM(stack, PyList_GET_SIZE(stack) - 1 - below);
}

/* Drops the last `count` values. */
static int drop(PyObject *stack, Py_ssize_t count) {
    Py_ssize_t size = PyList_GET_SIZE(stack);
    return PyList_SetSlice(stack, size - count, size, NULL);
}

/* In place of the last value; takes the reference. */
static int put_top(PyObject *stack, PyObject *value) {
    if (value == NULL) return -1;
    return PyList_SetItem(stack, PyList_GET_SIZE(stack) - 1, value);
}

static int memoize(PyObject *memo, unsigned long key, PyObject *value) {
    PyObject *number = PyLong_FromUnsignedLong(key);
    if (number == NULL) return -1;
    int failed = PyDict_SetItem(memo, number, value);
    Py_DECREF(number);
    return failed;
}

/* 1: pushed, 0: there is none, -1: error. */
static int recall(PyObject *memo, unsigned long key, PyObject *stack) {
    PyObject *number = PyLong_FromUnsignedLong(key);
    if (number == NULL) return -1;
    PyObject *value = PyDict_GetItemWithError(memo, number);
    Py_DECREF(number);
    if (value == NULL) return PyErr_Occurred() ? -1 : 0;
    return PyList_Append(stack, value) < 0 ? -1 : 1;
}

static int tuple_of(PyObject *stack, Py_ssize_t count) {
    Py_ssize_t size = PyList_GET_SIZE(stack);
    PyObject *made = PyTuple_New(count);
    if (made == NULL) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PyList_GET_ITEM(stack, size - count + i);
        Py_INCREF(value);
        PyTuple_SET_ITEM(made, i, value);
    }
    if (count > 1 && drop(stack, count - 1) < 0) {
        Py_DECREF(made);
        return -1;
    }
    return put_top(stack, made);
}

/* What a call of `function` stands for. */
static PyObject *call(Context *c, PyObject *function, PyObject *arguments) {
    if ((PyObject *)Py_TYPE(function) == c->name) { /* a tuple that others made may take for ever to hash */
        PyObject *text = PyDict_GetItemWithError(c->made, function);
        if (text == NULL && PyErr_Occurred()) return NULL;
        if (text != NULL && text != Py_None) {
            PyObject *both[2] = {text, arguments};
            return PyObject_Vectorcall(c->inert, both, 2, NULL);
        }
        if (text == Py_None && PyTuple_GET_SIZE(arguments) == 1 && PyTuple_CheckExact(PyTuple_GET_ITEM(arguments, 0))) {
            PyObject *same = PyTuple_GET_ITEM(arguments, 0);
            Py_INCREF(same);
            return same;
        }
    }
    PyObject *keywords = PyDict_New();
    if (keywords == NULL) return NULL;
    PyObject *all[3] = {function, arguments, keywords};
    PyObject *found = PyObject_Vectorcall(c->called, all, 3, NULL);
    Py_DECREF(keywords);
    return found;
}

/* NEWOBJ and REDUCE; 0: not for us. */
static int call_top(Context *c, PyObject *stack) {
    if (PyList_GET_SIZE(stack) < 2 || !PyTuple_CheckExact(top(stack, 0))) return 0;
    PyObject *arguments = top(stack, 0);
    Py_INCREF(arguments);
    int failed = drop(stack, 1) < 0 || put_top(stack, call(c, top(stack, 0), arguments)) < 0;
    Py_DECREF(arguments);
    return failed ? -1 : 1;
}

static int build(Context *c, PyObject *stack) {
    if (PyList_GET_SIZE(stack) < 2) return 0;
    PyObject *state = top(stack, 0), *value = top(stack, 1);
    if ((PyObject *)Py_TYPE(value) == c->inert) {
        if (PyObject_SetAttr(value, name_state, state) < 0) return -1;
        return drop(stack, 1) < 0 ? -1 : 1;
    }
    Py_INCREF(state);
    Py_INCREF(value);
    int failed = drop(stack, 1) < 0;
    PyObject *both[2] = {value, state};
    PyObject *found = failed ? NULL : PyObject_Vectorcall(c->built, both, 2, NULL);
    failed = found == NULL;
    if (!failed && found != value) {
        Py_INCREF(found);
        PyObject *done = put_top(stack, found) < 0 ? NULL : PyObject_CallMethodObjArgs(c->machine, name_replace, value, found, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_XDECREF(found);
    Py_DECREF(state);
    Py_DECREF(value);
    return failed ? -1 : 1;
}

/* SETITEMS: the values above the mark, which is where `*stack` begins; 0: not for us. */
static int set_items(Context *c, PyObject **stack) {
    PyObject *items = *stack, *outer = c->outer;
    Py_ssize_t depth = PyList_GET_SIZE(outer), size = PyList_GET_SIZE(items);
    if (!depth || !PyList_CheckExact(PyList_GET_ITEM(outer, depth - 1))) return 0;
    PyObject *below = PyList_GET_ITEM(outer, depth - 1);
    if (!PyList_GET_SIZE(below) || size % 2) return 0;
    PyObject *target = top(below, 0);
    int plain = PyDict_CheckExact(target);
    for (Py_ssize_t i = 0; plain && i < size; i += 2) plain = PyUnicode_CheckExact(PyList_GET_ITEM(items, i));
    Py_INCREF(below);
    if (PyList_SetSlice(outer, depth - 1, depth, NULL) < 0) {
        Py_DECREF(below);
        return -1;
    }
    *stack = below;
    int failed = 0;
    if (plain) {
        for (Py_ssize_t i = 0; !failed && i < size; i += 2)
            failed = PyDict_SetItem(target, PyList_GET_ITEM(items, i), PyList_GET_ITEM(items, i + 1)) < 0;
    } else {
        PyObject *done = PyObject_CallMethodObjArgs(c->machine, name_set_items, target, items, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_DECREF(items);
    return failed ? -1 : 1;
}

/* APPENDS to a list, and the TUPLE of what is above the mark; 0: not for us. */
static int close_mark(Context *c, PyObject **stack, int tuple) {
    PyObject *items = *stack, *outer = c->outer;
    Py_ssize_t depth = PyList_GET_SIZE(outer);
    if (!depth || !PyList_CheckExact(PyList_GET_ITEM(outer, depth - 1))) return 0;
    PyObject *below = PyList_GET_ITEM(outer, depth - 1);
    if (!tuple && (!PyList_GET_SIZE(below) || !PyList_CheckExact(top(below, 0)))) return 0;
    Py_INCREF(below);
    if (PyList_SetSlice(outer, depth - 1, depth, NULL) < 0) {
        Py_DECREF(below);
        return -1;
    }
    *stack = below;
    int failed;
    if (tuple) {
        failed = push(below, PyList_AsTuple(items)) < 0;
    } else {
        PyObject *target = top(below, 0);
        Py_ssize_t end = PyList_GET_SIZE(target);
        failed = PyList_SetSlice(target, end, end, items) < 0;
    }
    Py_DECREF(items);
    return failed ? -1 : 1;
}

static int push_text(PyObject *stack, const unsigned char *data, Py_ssize_t size) {
    return push(stack, PyUnicode_DecodeUTF8((const char *)data, size, "surrogatepass"));
}

/* One instruction. 1: done, 0: left to the machine, -1: error. `*at` is behind its code and goes on behind its argument. */
static int carry_out(Context *c, int code, const unsigned char *data, Py_ssize_t size, Py_ssize_t *at, PyObject **current) {
    PyObject *stack = *current;
    Py_ssize_t left = size - *at, high = PyList_GET_SIZE(stack);
    const unsigned char *p = data + *at;
    int done;
    switch (code) {
    case 0x94: /* MEMOIZE */
        return high ? (memoize(c->memo, (unsigned long)PyDict_GET_SIZE(c->memo), top(stack, 0)) < 0 ? -1 : 1) : 0;
    case 0x68: /* BINGET */
        if (left < 1) return 0;
        done = recall(c->memo, p[0], stack);
        *at += 1;
        return done;
    case 0x6A: /* LONG_BINGET */
        if (left < 4) return 0;
        done = recall(c->memo, unsigned4(p), stack);
        *at += 4;
        return done;
    case 0x71: /* BINPUT */
        if (left < 1 || !high) return 0;
        *at += 1;
        return memoize(c->memo, p[0], top(stack, 0)) < 0 ? -1 : 1;
    case 0x72: /* LONG_BINPUT */
        if (left < 4 || !high) return 0;
        *at += 4;
        return memoize(c->memo, unsigned4(p), top(stack, 0)) < 0 ? -1 : 1;
    case 0x4B: /* BININT1 */
        if (left < 1) return 0;
        *at += 1;
        return push(stack, PyLong_FromLong(p[0])) < 0 ? -1 : 1;
    case 0x4D: /* BININT2 */
        if (left < 2) return 0;
        *at += 2;
        return push(stack, PyLong_FromLong(p[0] + 256 * p[1])) < 0 ? -1 : 1;
    case 0x4A: /* BININT */
        if (left < 4) return 0;
        *at += 4;
        return push(stack, PyLong_FromLong((int32_t)unsigned4(p))) < 0 ? -1 : 1;
    case 0x85: /* TUPLE1 */
        return high >= 1 ? (tuple_of(stack, 1) < 0 ? -1 : 1) : 0;
    case 0x86: /* TUPLE2 */
        return high >= 2 ? (tuple_of(stack, 2) < 0 ? -1 : 1) : 0;
    case 0x87: /* TUPLE3 */
        return high >= 3 ? (tuple_of(stack, 3) < 0 ? -1 : 1) : 0;
    case 0x29: /* EMPTY_TUPLE */
        return push(stack, PyTuple_New(0)) < 0 ? -1 : 1;
    case 0x7D: /* EMPTY_DICT */
        return push(stack, PyDict_New()) < 0 ? -1 : 1;
    case 0x5D: /* EMPTY_LIST */
        return push(stack, PyList_New(0)) < 0 ? -1 : 1;
    case 0x4E: /* NONE */
        return PyList_Append(stack, Py_None) < 0 ? -1 : 1;
    case 0x88: /* NEWTRUE */
        return PyList_Append(stack, Py_True) < 0 ? -1 : 1;
    case 0x89: /* NEWFALSE */
        return PyList_Append(stack, Py_False) < 0 ? -1 : 1;
    case 0x28: { /* MARK */
        PyObject *above = PyList_New(0);
        if (above == NULL) return -1;
        if (PyList_Append(c->outer, stack) < 0) {
            Py_DECREF(above);
            return -1;
        }
        Py_DECREF(stack);
        *current = above;
        return 1;
    }
    case 0x81: /* NEWOBJ */
    case 0x52: /* REDUCE */
        return call_top(c, stack);
    case 0x62: /* BUILD */
        return build(c, stack);
    case 0x75: /* SETITEMS */
        return set_items(c, current);
    case 0x65: /* APPENDS */
        return close_mark(c, current, 0);
    case 0x74: /* TUPLE */
        return close_mark(c, current, 1);
    case 0x8C: /* SHORT_BINUNICODE */
        if (left < 1 || left - 1 < p[0]) return 0;
        *at += 1 + p[0];
        return push_text(stack, p + 1, p[0]) < 0 ? -1 : 1;
    case 0x58: { /* BINUNICODE */
        if (left < 4 || (uint64_t)(left - 4) < unsigned4(p)) return 0;
        Py_ssize_t length = unsigned4(p);
        *at += 4 + length;
        return push_text(stack, p + 4, length) < 0 ? -1 : 1;
    }
    case 0x95: /* FRAME: how much a reader should buffer */
        if (left < 8) return 0;
        *at += 8;
        return 1;
    default:
        return 0;
    }
}

static void keep_place(Context *c, Py_ssize_t at) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *number = PyLong_FromSsize_t(at);
    if (number == NULL || PyObject_SetAttr(c->machine, name_at, number) < 0) PyErr_Clear();
    Py_XDECREF(number);
    PyErr_Restore(kind, value, trace);
}

static PyObject *advance(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *machine, *bytes, *stack, *hooks;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "OSnO!O", &machine, &bytes, &at, &PyList_Type, &stack, &hooks)) return NULL;
    Context c = {.machine = machine};
    PyObject *result = NULL;
    Py_INCREF(stack);
    c.outer = PyObject_GetAttr(machine, name_outer);
    c.memo = PyObject_GetAttr(machine, name_memo);
    c.called = PyObject_GetAttr(hooks, name_called);
    c.built = PyObject_GetAttr(hooks, name_built);
    c.made = PyObject_GetAttr(hooks, name_made);
    c.inert = PyObject_GetAttr(hooks, name_inert);
    c.name = PyObject_GetAttr(hooks, name_name);
    if (!c.outer || !c.memo || !c.called || !c.built || !c.made || !c.inert || !c.name) goto end;
    if (!PyList_CheckExact(c.outer) || !PyDict_CheckExact(c.memo) || !PyDict_CheckExact(c.made)) {
        PyErr_SetString(PyExc_TypeError, "advance: outer is a list, memo and made are dicts");
        goto end;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(bytes);
    Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    for (uint32_t count = 1; at >= 0 && at < size; count++) {
        Py_ssize_t next = at + 1;
        int done = carry_out(&c, data[at], data, size, &next, &stack);
        if (!done) break;
        at = next;
        if (done < 0 || (count % 65536 == 0 && PyErr_CheckSignals() < 0)) {
            keep_place(&c, at);
            goto end;
        }
    }
    result = Py_BuildValue("nO", at, stack);
end:
    Py_XDECREF(c.outer);
    Py_XDECREF(c.memo);
    Py_XDECREF(c.called);
    Py_XDECREF(c.built);
    Py_XDECREF(c.made);
    Py_XDECREF(c.inert);
    Py_XDECREF(c.name);
    Py_XDECREF(stack);
    return result;
}

static PyMethodDef methods[] = {
    {"advance", advance, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pickletree", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pickletree(void) {
    name_at = PyUnicode_InternFromString("at");
    name_outer = PyUnicode_InternFromString("outer");
    name_memo = PyUnicode_InternFromString("memo");
    name_called = PyUnicode_InternFromString("called");
    name_built = PyUnicode_InternFromString("built");
    name_made = PyUnicode_InternFromString("made");
    name_inert = PyUnicode_InternFromString("inert");
    name_name = PyUnicode_InternFromString("name");
    name_state = PyUnicode_InternFromString("state");
    name_replace = PyUnicode_InternFromString("replace");
    name_set_items = PyUnicode_InternFromString("set_items");
    return PyModule_Create(&definition);
}
