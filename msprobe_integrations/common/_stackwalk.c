/* The walk of `Stacks.capture` in C: thirty frames cost a microsecond instead of ten, for every call that is recorded.
 * Nothing but the Python API; stacks.py has the same in Python for installations without a compiler. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

static int frame_lasti(PyFrameObject *frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    PyObject *value = PyObject_GetAttrString((PyObject *)frame, "f_lasti");
    int at = value == NULL ? -1 : (int)PyLong_AsLong(value);
    Py_XDECREF(value);
    return at;
#endif
}

/* stack_key(frame, end, hidden, judge, tail) */
static PyObject *stack_key(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 5 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "stack_key(frame, end, hidden, judge, tail)");
        return NULL;
    }
    PyObject *end = args[1], *hidden = args[2], *judge = args[3], *tail = args[4];
    PyObject *key = PyList_New(0);
    PyObject *frame = Py_NewRef(args[0]);
    while (key != NULL && frame != NULL && frame != Py_None && frame != end) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *hide = PyDict_GetItemWithError(hidden, code);
        if (hide == NULL && !PyErr_Occurred()) {
            PyObject *judged = PyObject_CallOneArg(judge, code);
            if (judged != NULL && PyDict_SetItem(hidden, code, judged) == 0) hide = judged;
            Py_XDECREF(judged); /* the dictionary holds it */
        }
        PyObject *pair = NULL;
        int ok = hide != NULL;
        if (hide == Py_False) {
            PyObject *at = PyLong_FromLong(frame_lasti((PyFrameObject *)frame));
            pair = at == NULL ? NULL : PyTuple_Pack(2, code, at);
            Py_XDECREF(at);
            ok = pair != NULL && PyList_Append(key, pair) == 0;
            Py_XDECREF(pair);
        }
        Py_DECREF(code);
        PyObject *back = ok ? (PyObject *)PyFrame_GetBack((PyFrameObject *)frame) : NULL;
        Py_DECREF(frame);
        frame = back;
        if (!ok) Py_CLEAR(key);
    }
    int known = key != NULL && frame != NULL && end != Py_None && frame == end;
    Py_XDECREF(frame);
    if (known && PyList_Append(key, tail) < 0) Py_CLEAR(key);
    if (key == NULL) return NULL;
    PyObject *found = PyList_AsTuple(key);
    Py_DECREF(key);
    if (found == NULL) return NULL;
    PyObject *result = PyTuple_Pack(2, found, known ? Py_True : Py_False);
    Py_DECREF(found);
    return result;
}

static PyMethodDef methods[] = {
    {"stack_key", (PyCFunction)(void (*)(void))stack_key, METH_FASTCALL,
     "stack_key(frame, end, hidden, judge, tail) -> (key, known): ((code, instruction), ...) of the frames from `frame` outward that\n"
     "`hidden` (code -> bool, filled by `judge`) does not hide, up to `end`; where `end` was met, `tail` is the last item and known is True."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_stackwalk", "Call stacks as keys, in C.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stackwalk(void) { return PyModule_Create(&definition); }
