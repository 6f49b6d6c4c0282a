/* The Python side of _pairs.h; included by _rowstats.c once. */

static int no_pair_type(long code) {
    if (code == F32 || code == F64 || code == F16 || code == BF16) return 0;
    PyErr_Format(PyExc_ValueError, "_rowstats.reduce_pair: dtype code %ld; allowed are float32, float64, float16 and bfloat16", code);
    return 1;
}

static PyObject *py_reduce_pair(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 11, "reduce_pair(op, a, code_a, b, code_b, numel, out_ptr, want, c0, c1, c2)")) return NULL;
    long op = PyLong_AsLong(args[0]);
    const void *a = PyLong_AsVoidPtr(args[1]);
    long code_a = PyLong_AsLong(args[2]);
    const void *b = PyLong_AsVoidPtr(args[3]);
    long code_b = PyLong_AsLong(args[4]);
    Py_ssize_t n = PyLong_AsSsize_t(args[5]);
    int64_t *row = PyLong_AsVoidPtr(args[6]);
    int want = (int)PyLong_AsLong(args[7]) & WANT_ADDITIVE;
    Pair x = {a, b, (size_t)n, (int)op, (int)code_a, (int)code_b, {0}};
    for (int i = 0; i < 3; i++) x.c[i] = PyFloat_AsDouble(args[8 + i]);
    if (PyErr_Occurred() || no_pair_type(code_a) || no_pair_type(code_b)) return NULL;
    if (bad_memory("reduce_pair", a, row, n) || bad_memory("reduce_pair", b, row, n)) return NULL;
    if (op < AGREE_OP || op > SIGN_OP) {
        PyErr_Format(PyExc_ValueError, "_rowstats.reduce_pair: op %ld is unknown; allowed are %d to %d", op, AGREE_OP, SIGN_OP);
        return NULL;
    }
    Acc acc;
    acc_init(&acc);
    UNLOCKED((size_t)n * (ITEM[code_a] + ITEM[code_b]), pair(&x, &acc, want));
    write_row(row, n, F32, &acc, want);
    Py_RETURN_NONE;
}

/* histogram(ptr, shape, strides, dtype_code, kind, out_ptr): adds to 64 int64 counters */
static PyObject *py_histogram(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 6, "histogram(ptr, shape, strides, dtype_code, kind, out_ptr)")) return NULL;
    Layout l;
    int64_t n = 0;
    const uint8_t *p = PyLong_AsVoidPtr(args[0]);
    if (read_layout(args[1], args[2], &l, &n) < 0) return NULL;
    long code = PyLong_AsLong(args[3]), kind = PyLong_AsLong(args[4]);
    int64_t *out = PyLong_AsVoidPtr(args[5]);
    if (PyErr_Occurred() || bad_code(code) || bad_memory("histogram", p, out, (Py_ssize_t)n)) return NULL;
    if (kind != LINEAR_BINS && kind != LOG2_BINS) {
        PyErr_Format(PyExc_ValueError, "_rowstats.histogram: kind %ld is unknown; allowed are %d and %d", kind, LINEAR_BINS, LOG2_BINS);
        return NULL;
    }
    Histogram h;
    memset(&h, 0, sizeof h);
    if (n > 0) UNLOCKED((size_t)n * ITEM[code], run_strided(histogram, p, &l, (int)code, &h.acc, (int)kind, 0));
    for (int k = 0; k < NO_BIN; k++) out[k] += h.count[0][k] + h.count[1][k] + h.count[2][k] + h.count[3][k];
    Py_RETURN_NONE;
}

/* set_limit(slot, limit): what BELOW is counted with when `want` names the slot. */
static PyObject *py_set_limit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 2, "set_limit(slot, limit)")) return NULL;
    long slot = PyLong_AsLong(args[0]);
    double limit = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (slot < 0 || slot >= MAX_LIMITS || !(limit > 0)) {
        PyErr_Format(PyExc_ValueError, "_rowstats.set_limit: the slot is 0 to %d and the limit above 0", MAX_LIMITS - 1);
        return NULL;
    }
    /* A float32 is below the limit when it is below the next float32 from there on; the conversion rounds to nearest. */
    float narrow = (float)limit;
    memcpy(&limits[slot].f32, &narrow, 4);
    memcpy(&limits[slot].f64, &limit, 8);
    if ((double)narrow < limit) limits[slot].f32++;
    Py_RETURN_NONE;
}
