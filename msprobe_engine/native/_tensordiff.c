/* Two tensors of the same shape in host memory: are the bits the same, and if not, how far apart are the values. One pass.
 *
 * The memory is walked in chunks that stay in the L1 cache. A chunk whose bits are equal costs a comparison and a sum of squares;
 * only in others the values are taken apart. Sums are kept in float64; within an equal chunk of 8- or 16-bit elements in float32. Elements that are NaN or Inf on either side
 * count as such and take no part in sums and in the largest difference. msprobe_engine/measure/stored/tensors.py has the same in numpy.
 */
#define PY_SSIZE_T_CLEAN
#define _FILE_OFFSET_BITS 64
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* The compiler makes the loops once per instruction set, and the loader chooses. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64, BOOL, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, CODES };
static const unsigned char ITEM[CODES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1, 1, 1, 1};
#define CHUNK 1024
#define LANES 16
#define GIL_BYTES (32 * 1024)

/* As metrics.Sums has it: 8 integers, then 8 floats. */
typedef struct {
    int64_t changed;  /* elements whose bits differ; whose values differ when the types do */
    int64_t beyond;   /* elements further apart than the tolerance */
    int64_t nan_a, inf_a, nan_b, inf_b;
    int64_t at;       /* element of the largest difference; the first that changed when that is 0; -1: none */
    int64_t unrounded; /* of two types: elements that rounding to the narrower one does not make equal */
    double dd, ab, aa, bb, max;
    double atol, rtol, reserved;
} Sums;

static float powers[256]; /* of float8_e8m0fnu */

typedef union {
    uint32_t u;
    float f;
} Bits32;

INLINE float from_half(uint16_t w) {
    Bits32 v;
    v.u = (uint32_t)(w & 0x7FFF) << 13;
    v.f *= 0x1p112f;
    v.u |= (w & 0x7C00) == 0x7C00 ? 0x7F800000u : 0;
    v.u |= (uint32_t)(w & 0x8000) << 16;
    return v.f;
}

INLINE float from_bfloat(uint16_t w) {
    Bits32 v;
    v.u = (uint32_t)w << 16;
    return v.f;
}

/* An 8-bit float with `fraction` bits of fraction and the exponent's bias; `nan` is the code of NaN without its sign. */
INLINE float from_eight(uint8_t w, int fraction, float unit, int nan) {
    Bits32 v;
    v.u = (uint32_t)(w & 0x7F) << (23 - fraction);
    v.f *= unit;
    v.u |= (w & 0x7F) == nan ? 0x7FC00000u : 0;
    v.u |= (uint32_t)(w & 0x80) << 24;
    return v.f;
}

INLINE float from_eight_unsigned_zero(uint8_t w, int fraction, float unit) {
    float f = from_eight(w, fraction, unit, 0x80);
    return w == 0x80 ? NAN : f;
}

#define EACH(T, EXPRESSION)                                                                                                                \
    for (int i = 0; i < n; i++) {                                                                                                          \
        T w;                                                                                                                               \
        memcpy(&w, p + i * (int)sizeof(T), sizeof(T));                                                                                     \
        to[i] = (EXPRESSION);                                                                                                              \
    }                                                                                                                                      \
    return;

/* Types of at most two bytes: every value is a float. */
INLINE void decode_narrow(const uint8_t *p, int code, int n, float *to) {
    switch (code) {
    case F16: EACH(uint16_t, from_half(w))
    case BF16: EACH(uint16_t, from_bfloat(w))
    case I8: EACH(int8_t, w)
    case I16: EACH(int16_t, w)
    case U8:
    case BOOL: EACH(uint8_t, w)
    case U16: EACH(uint16_t, w)
    case E4M3FN: EACH(uint8_t, from_eight(w, 3, 0x1p120f, 0x7F))
    case E5M2: EACH(uint8_t, from_half((uint16_t)(w << 8)))
    case E4M3FNUZ: EACH(uint8_t, from_eight_unsigned_zero(w, 3, 0x1p119f))
    case E5M2FNUZ: EACH(uint8_t, from_eight_unsigned_zero(w, 2, 0x1p111f))
    default: EACH(uint8_t, powers[w])
    }
}

INLINE void decode(const uint8_t *p, int code, int n, double *to) {
    switch (code) {
    case F32: EACH(float, w)
    case F64: EACH(double, w)
    case I32: EACH(int32_t, w)
    case I64: EACH(int64_t, (double)w)
    case U32: EACH(uint32_t, w)
    case U64: EACH(uint64_t, (double)w)
    default: {
        float narrow[CHUNK] __attribute__((aligned(64)));
        decode_narrow(p, code, n, narrow);
        for (int i = 0; i < n; i++) to[i] = narrow[i];
    }
    }
}
#undef EACH

INLINE int is_finite(double v) {
    uint64_t u;
    memcpy(&u, &v, 8);
    return (u & 0x7FF0000000000000ull) != 0x7FF0000000000000ull;
}

INLINE double squares(const double *a, int n) {
    double lane[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) lane[k] += a[i + k] * a[i + k];
    for (; i < n; i++) lane[0] += a[i] * a[i];
    double sum = 0;
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

/* Of narrow types, in the sums of a chunk alone: exact to 1e-6, and not where squares leave the range of float. */
INLINE float squares_narrow(const float *a, int n) {
    float lane[2 * LANES] = {0};
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int k = 0; k < 2 * LANES; k++) lane[k] += a[i + k] * a[i + k];
    for (; i < n; i++) lane[0] += a[i] * a[i];
    float sum = 0;
    for (int k = 0; k < 2 * LANES; k++) sum += lane[k];
    return sum;
}

INLINE void nonfinite(double v, int64_t *nan, int64_t *inf) {
    if (v != v)
        ++*nan;
    else if (!is_finite(v))
        ++*inf;
}

INLINE void add_equal(double aa, Sums *s) {
    s->aa += aa;
    s->bb += aa;
    s->ab += aa;
}

/* Elements whose bits are the same on both sides. */
INLINE void equal_chunk(const uint8_t *p, int code, int n, double *a, Sums *s) {
    if (ITEM[code] <= 2) {
        float narrow[CHUNK] __attribute__((aligned(64)));
        decode_narrow(p, code, n, narrow);
        float sum = squares_narrow(narrow, n);
        if (sum > 1e-20f && sum < 1e37f) {
            add_equal(sum, s);
            return;
        }
    }
    decode(p, code, n, a);
    double aa = squares(a, n);
    if (!is_finite(aa)) {
        aa = 0;
        for (int i = 0; i < n; i++) {
            if (is_finite(a[i])) {
                aa += a[i] * a[i];
                continue;
            }
            nonfinite(a[i], &s->nan_a, &s->inf_a);
            nonfinite(a[i], &s->nan_b, &s->inf_b);
        }
    }
    add_equal(aa, s);
}

INLINE void largest(const double *a, const double *b, int n, int64_t first, double max, Sums *s) {
    if (!(max > s->max)) return;
    for (int i = 0; i < n; i++)
        if (fabs(a[i] - b[i]) == max) {
            s->max = max;
            s->at = first + i;
            return;
        }
}

INLINE void different_chunk(const double *a, const double *b, int n, int64_t first, Sums *s) {
    double dd[LANES] = {0}, ab[LANES] = {0}, aa[LANES] = {0}, bb[LANES] = {0}, max[LANES] = {0}, over[LANES] = {0};
    const double atol = s->atol, rtol = s->rtol;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            double x = a[i + k], y = b[i + k], d = fabs(x - y);
            dd[k] += d * d;
            ab[k] += x * y;
            aa[k] += x * x;
            bb[k] += y * y;
            max[k] = d > max[k] ? d : max[k];
            over[k] += d > atol + rtol * fabs(x) ? 1.0 : 0.0;
        }
    for (; i < n; i++) {
        double x = a[i], y = b[i], d = fabs(x - y);
        dd[0] += d * d;
        ab[0] += x * y;
        aa[0] += x * x;
        bb[0] += y * y;
        max[0] = d > max[0] ? d : max[0];
        over[0] += d > atol + rtol * fabs(x) ? 1.0 : 0.0;
    }
    for (int k = 1; k < LANES; k++) {
        dd[0] += dd[k];
        ab[0] += ab[k];
        aa[0] += aa[k];
        bb[0] += bb[k];
        over[0] += over[k];
        max[0] = max[k] > max[0] ? max[k] : max[0];
    }
    if (is_finite(aa[0]) && is_finite(bb[0]) && is_finite(dd[0])) {
        s->dd += dd[0];
        s->ab += ab[0];
        s->aa += aa[0];
        s->bb += bb[0];
        s->beyond += (int64_t)over[0];
        largest(a, b, n, first, max[0], s);
        return;
    }
    for (i = 0; i < n; i++) {
        double x = a[i], y = b[i];
        if (is_finite(x) && is_finite(y)) {
            double d = fabs(x - y);
            s->dd += d * d;
            s->ab += x * y;
            s->aa += x * x;
            s->bb += y * y;
            s->beyond += d > atol + rtol * fabs(x);
            if (d > s->max) {
                s->max = d;
                s->at = first + i;
            }
            continue;
        }
        nonfinite(x, &s->nan_a, &s->inf_a);
        nonfinite(y, &s->nan_b, &s->inf_b);
        s->beyond += !(x == y || (x != x && y != y));
    }
}

INLINE int64_t words_changed(const uint8_t *a, const uint8_t *b, int width, int n) {
    int64_t count = 0;
#define EACH(T)                                                                                                                            \
    for (int i = 0; i < n; i++) {                                                                                                          \
        T x, y;                                                                                                                            \
        memcpy(&x, a + i * (int)sizeof(T), sizeof(T));                                                                                     \
        memcpy(&y, b + i * (int)sizeof(T), sizeof(T));                                                                                     \
        changed += x != y;                                                                                                                 \
    }                                                                                                                                      \
    count = (int64_t)changed;
    if (width == 1) {
        uint32_t changed = 0;
        EACH(uint8_t)
    } else if (width == 2) {
        uint32_t changed = 0;
        EACH(uint16_t)
    } else if (width == 4) {
        uint32_t changed = 0;
        EACH(uint32_t)
    } else {
        uint64_t changed = 0;
        EACH(uint64_t)
    }
#undef EACH
    return count;
}

static uint16_t to_bfloat(float f) {
    Bits32 v = {.f = f};
    if (f != f) return (uint16_t)(v.u >> 16 | 0x40);
    return (uint16_t)((v.u + 0x7FFF + (v.u >> 16 & 1)) >> 16);
}

/* Nearest even, as IEEE 754 has it. */
static uint16_t to_half(float f) {
    Bits32 v = {.f = f};
    uint32_t sign = v.u >> 16 & 0x8000;
    v.u &= 0x7FFFFFFF;
    if (v.u > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (v.u >= 0x477FF000) return (uint16_t)(sign | 0x7C00); /* rounds to 65536 or more */
    if (v.u < 0x38800000) {                                  /* below the normal ones: the unit is 2^-24 */
        v.f += 0.5f;                                         /* whose last bit is 2^-24 */
        return (uint16_t)(sign | (v.u - 0x3F000000));
    }
    return (uint16_t)(sign | ((v.u + 0xFFF + (v.u >> 13 & 1)) - 0x38000000) >> 13);
}

/* Does rounding the wider of two values to the type of the other make them equal? */
static int rounds(double a, int code_a, double b, int code_b) {
    int swap = ITEM[code_a] < ITEM[code_b];
    double wide = swap ? b : a, narrow = swap ? a : b;
    switch (swap ? code_a : code_b) {
    case F32: return (double)(float)wide == narrow;
    case BF16: return from_bfloat(to_bfloat((float)wide)) == narrow;
    case F16: return from_half(to_half((float)wide)) == narrow;
    default: return 0;
    }
}

/* The first element that changed, where no finite difference says where to look: NaN, Inf, the sign of a zero. */
static int64_t first_change(const uint8_t *a, const uint8_t *b, int width, const double *x, const double *y, int n, int same_type, int64_t first) {
    for (int i = 0; i < n; i++)
        if (same_type ? memcmp(a + i * width, b + i * width, (size_t)width) != 0 : !(x[i] == y[i] || (x[i] != x[i] && y[i] != y[i])))
            return first + i;
    return -1;
}

CLONES static void walk(const uint8_t *a, int code_a, const uint8_t *b, int code_b, int64_t n, Sums *s) {
    double x[CHUNK] __attribute__((aligned(64))), y[CHUNK] __attribute__((aligned(64)));
    const int width_a = ITEM[code_a], width_b = ITEM[code_b];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int m = n - at < CHUNK ? (int)(n - at) : CHUNK;
        const uint8_t *p = a + at * width_a, *q = b + at * width_b;
        if (code_a == code_b && memcmp(p, q, (size_t)m * (size_t)width_a) == 0) {
            equal_chunk(p, code_a, m, x, s);
            continue;
        }
        decode(p, code_a, m, x);
        if (code_a == code_b) {
            s->changed += words_changed(p, q, width_a, m);
            decode(q, code_b, m, y);
        } else {
            decode(q, code_b, m, y);
            int64_t changed = 0;
            for (int i = 0; i < m; i++) changed += !(x[i] == y[i] || (x[i] != x[i] && y[i] != y[i]));
            s->changed += changed;
            if (changed)
                for (int i = 0; i < m; i++) s->unrounded += !(x[i] == y[i] || (x[i] != x[i] && y[i] != y[i]) || rounds(x[i], code_a, y[i], code_b));
        }
        different_chunk(x, y, m, at, s);
        if (s->at < 0) s->at = first_change(p, q, width_a, x, y, m, code_a == code_b, at);
    }
}

static PyObject *py_diff(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long a, b, out;
    long long n;
    int code_a, code_b;
    if (!PyArg_ParseTuple(args, "KiKiLK", &a, &code_a, &b, &code_b, &n, &out)) return NULL;
    if (code_a < 0 || code_a >= CODES || code_b < 0 || code_b >= CODES || n < 0) {
        PyErr_SetString(PyExc_ValueError, "unknown element type or negative length");
        return NULL;
    }
    Sums *s = (Sums *)(uintptr_t)out;
    if (n * ITEM[code_a] < GIL_BYTES) {
        walk((const uint8_t *)(uintptr_t)a, code_a, (const uint8_t *)(uintptr_t)b, code_b, n, s);
    } else {
        Py_BEGIN_ALLOW_THREADS
        walk((const uint8_t *)(uintptr_t)a, code_a, (const uint8_t *)(uintptr_t)b, code_b, n, s);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* `count` runs of bytes that lie `stride` apart in a file, to places `step` apart. How many were read whole, and the error of the next. */
static PyObject *py_read_runs(PyObject *self, PyObject *args) {
    (void)self;
    int fd, error = 0;
    long long start, run, stride, count, step, done = 0;
    unsigned long long to;
    if (!PyArg_ParseTuple(args, "iLLLLKL", &fd, &start, &run, &stride, &count, &to, &step)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (; done < count; done++) {
        char *p = (char *)(uintptr_t)to + done * step;
        long long at = start + done * stride, left = run;
        while (left > 0) {
            ssize_t got = pread(fd, p, (size_t)left, (off_t)at);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                error = got < 0 ? errno : 0;
                break;
            }
            p += got;
            at += got;
            left -= got;
        }
        if (left > 0) break;
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("Li", done, error);
}

/* Rows become columns, in tiles that stay in the cache. Strides are in elements; those of the other dimension are 1. */
#define TURN(T)                                                                                                                            \
    for (int64_t i = 0; i < rows; i += TILE)                                                                                               \
        for (int64_t j = 0; j < columns; j += TILE) {                                                                                      \
            const int64_t last_i = i + TILE < rows ? i + TILE : rows, last_j = j + TILE < columns ? j + TILE : columns;                    \
            for (int64_t r = i; r < last_i; r++)                                                                                           \
                for (int64_t c = j; c < last_j; c++) memcpy(PLACE(to, c * to_stride + r, T), PLACE(from, r * from_stride + c, T), sizeof(T)); \
        }
#define PLACE(p, i, T) ((p) + (i) * (int64_t)sizeof(T)) /* any address: copied, never read as a T */
#define TILE 32

static PyObject *py_turn(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long from_address, to_address;
    long long rows, columns, from_stride, to_stride;
    int item;
    if (!PyArg_ParseTuple(args, "KLKLLLi", &from_address, &from_stride, &to_address, &to_stride, &rows, &columns, &item)) return NULL;
    if (item != 1 && item != 2 && item != 4 && item != 8) {
        PyErr_SetString(PyExc_ValueError, "elements of 1, 2, 4 or 8 bytes");
        return NULL;
    }
    const char *from = (const char *)(uintptr_t)from_address;
    char *to = (char *)(uintptr_t)to_address;
    Py_BEGIN_ALLOW_THREADS
    switch (item) {
    case 1: TURN(uint8_t) break;
    case 2: TURN(uint16_t) break;
    case 4: TURN(uint32_t) break;
    default: TURN(uint64_t)
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read_runs", py_read_runs, METH_VARARGS, "read_runs(fd, start, run, stride, count, address, step) -> (runs read, errno)"},
    {"turn", py_turn, METH_VARARGS, "turn(address, stride, address_to, stride_to, rows, columns, item size)"},
    {"diff", py_diff, METH_VARARGS, "diff(address_a, code_a, address_b, code_b, numel, address_of_sums)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tensordiff", "Differences of two tensors in one pass.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tensordiff(void) {
    for (int i = 0; i < 255; i++) powers[i] = (float)ldexp(1.0, i - 127);
    powers[255] = NAN;
    return PyModuleDef_Init(&module);
}
