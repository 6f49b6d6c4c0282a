/* Statistics row, digest, CRC-32 and XOR of contiguous or strided host memory in one pass.
 *
 * The row is defined in msprobe_engine/core/statistics/rows.py, the digest in msprobe_engine/core/statistics/digest.py, the CRC in _checksums.h; the words that few rows have
 * are in _rowmoments.h, rows of two tensors and histograms in _pairs.h. The file includes itself once per instruction set (AVX-512, AVX2, portable); which one runs is decided when the module is loaded. Each chunk of memory is
 * small enough to stay in the L1 cache, so the conversion, the statistics and the checksums of a chunk cost one trip to memory.
 *
 * Fast path: sums of a chunk are taken without looking for NaN and Inf. A float64 sum of narrower floats is finite exactly when
 * all of them are, so a chunk is done again with masks only when its sum is not finite.
 */
#ifndef ISA

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_checksums.h"

#if (defined(__x86_64__) || defined(__amd64__)) && defined(__GNUC__) && !defined(MSPROBE_PORTABLE)
#define X86 1
#include <immintrin.h>
#endif

enum { F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64, BOOL, C64, C128, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, CODES };
static const unsigned char ITEM[CODES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1, 1, 1, 1, 1};
static const unsigned char ALIGNED[CODES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 4, 8, 1, 1, 1, 1, 1};
#define IS_INT(c) ((c) >= I8 && (c) <= BOOL)

#define XORC 0x9E3779B9u
#define BLOCK 1024
#define CHUNK_MAX 4096
#define GIL_BYTES (64 * 1024)
#define MAX_DIMS 16

/* What a caller wants besides the statistics. */
enum { WANT_DIGEST = 1, WANT_CRC = 4, WANT_XOR = 8, WANT_MOMENTS = 16, WANT_BELOW = 32, WANT_EPS = 64 };
enum { HAS_DIGEST = 1, HAS_INTEGERS = 2, WRITTEN = 4, HAS_CRC = 8, HAS_XOR = 16, HAS_MOMENTS = 32, HAS_BELOW = 64, HAS_EPS = 128 };
/* Above LIMIT_SHIFT `want` has the slot of the limit for BELOW. */
#define LIMIT_SHIFT 8
#define MAX_LIMITS 4096
#define WANT_ADDITIVE (WANT_MOMENTS | WANT_BELOW | WANT_EPS | (MAX_LIMITS - 1) << LIMIT_SHIFT)
#define WANT_ANY (WANT_DIGEST | WANT_CRC | WANT_XOR | WANT_ADDITIVE)
static struct {
    int64_t f64;
    int32_t f32;
} limits[MAX_LIMITS]; /* the bits of the limit, rounded up for float32 */

typedef struct {
    int64_t nan, pinf, ninf, zero, imin, imax;
    uint64_t digest, words, bytes; /* words: XOR of 64-bit words; bytes: how many have gone into crc and words */
    uint32_t crc;                  /* state, see _checksums.h */
    double mn, mx, sum, sq;
    double cubes, fourths;
    int64_t below;
} Acc;

/* Two tensors of n elements, and what to make of them; see _pairs.h. */
typedef struct {
    const void *a, *b;
    size_t n;
    int op, code_a, code_b;
    double c[3];
} Pair;
enum { AGREE_OP, RATIO_OP, LINEAR_OP, SIGN_OP };
#define PAIR_CHUNK 2048

enum { LINEAR_BINS, LOG2_BINS };
#define NO_BIN 63
typedef struct {
    Acc acc; /* first: a run_fn gets its address */
    int64_t count[4][NO_BIN + 1];
} Histogram;

static uint32_t w32[BLOCK + 64] __attribute__((aligned(64)));
static uint32_t w32_next[BLOCK + 64] __attribute__((aligned(64))); /* w32 from its second element on */
static float fp8_table[5][256];

static inline uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static inline int is_aligned(const uint8_t *p, int code) { return ((uintptr_t)p & (uintptr_t)(ALIGNED[code] - 1)) == 0; }

/* Memory of elements at p, or a copy of it where p is not aligned for their type: torch.frombuffer and fields of numpy records give any
 * address, and what reads elements one by one may not. Called for a chunk, so that the copy stays in the cache. */
static inline const uint8_t *aligned_chunk(const uint8_t *p, size_t bytes, int code, uint8_t *stage) {
    if (is_aligned(p, code)) return p;
    memcpy(stage, p, bytes);
    return stage;
}

static void acc_init(Acc *a) {
    memset(a, 0, sizeof *a);
    a->mn = INFINITY;
    a->mx = -INFINITY;
    a->imin = INT64_MAX;
    a->imax = INT64_MIN;
    a->crc = CRC_START;
}

/* XOR of the words of memory that begins at byte `at` of a tensor: each byte goes to its place in the tensor's words. */
static inline uint64_t to_place(uint64_t words, uint64_t at) {
    int turn = 8 * (int)(at & 7);
    return turn ? words << turn | words >> (64 - turn) : words;
}

/* Any element type as float64, NaN and Inf told apart by bits (independent of the flush-to-zero mode of the thread). */
static inline void add_f64(Acc *a, double v) {
    uint64_t u;
    memcpy(&u, &v, 8);
    uint64_t m = u & 0x7FFFFFFFFFFFFFFFull;
    if (m < 0x7FF0000000000000ull) {
        a->zero += m == 0;
        if (v < a->mn) a->mn = v;
        if (v > a->mx) a->mx = v;
        a->sum += v;
        a->sq += v * v;
    } else if (m > 0x7FF0000000000000ull)
        a->nan++;
    else if (u >> 63)
        a->ninf++;
    else
        a->pinf++;
}

static void slow_f64(const double *p, size_t n, Acc *a) {
    for (size_t i = 0; i < n; i++) add_f64(a, p[i]);
}

static void slow_f32(const float *p, size_t n, Acc *a) {
    for (size_t i = 0; i < n; i++) add_f64(a, p[i]);
}

typedef void (*run_fn)(const uint8_t *, size_t, int, Acc *, int, uint64_t);
typedef void (*pair_fn)(const Pair *, Acc *, int);

/* ---- kernels, once per instruction set ---------------------------------------------------------------------------- */
#define ISA 0
#define K(name) name##_portable
#include "_rowstats.c"
#undef K
#undef ISA
#ifdef X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA 1
#define K(name) name##_avx2
#include "_rowstats.c"
#undef K
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
#endif
#define ISA 2
#define K(name) name##_avx512
#include "_rowstats.c"
#undef K
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static run_fn run = run_portable, histogram = histogram_portable;
static pair_fn pair = pair_portable;
static const char *isa_name = "portable";

/* ---- layouts ---------------------------------------------------------------------------------------------------------- */
/* Dimensions from outer to inner, none of length 1, neighbours joined where memory allows. */
typedef struct {
    int ndim;
    int64_t size[MAX_DIMS], stride[MAX_DIMS]; /* strides in elements */
} Layout;

static void gather(uint8_t *to, const uint8_t *from, int64_t n, int64_t stride, int item) {
#define COPY(T) for (int64_t i = 0; i < n; i++) memcpy(to + i * (int64_t)sizeof(T), from + i * stride * (int64_t)sizeof(T), sizeof(T));
    switch (item) {
    case 1: COPY(uint8_t) break;
    case 2: COPY(uint16_t) break;
    case 4: COPY(uint32_t) break;
    case 8: COPY(uint64_t) break;
    default:
        for (int64_t i = 0; i < n; i++) memcpy(to + i * item, from + i * stride * item, (size_t)item);
    }
#undef COPY
}

static void run_strided(run_fn run, const uint8_t *p, const Layout *l, int code, Acc *a, int want, uint64_t index0) {
    uint8_t stage[CHUNK_BYTES] __attribute__((aligned(64)));
    int item = ITEM[code], last = l->ndim - 1;
    int64_t inner = l->size[last], istride = l->stride[last], index[MAX_DIMS] = {0};
    int64_t room = CHUNK_BYTES / item / BLOCK * BLOCK, filled = 0;
    int direct = istride == 1 && inner >= 256;
    for (;;) {
        if (direct) {
            run(p, (size_t)inner, code, a, want, index0);
            index0 += (uint64_t)inner;
        } else
            for (int64_t at = 0; at < inner;) {
                int64_t m = inner - at < room - filled ? inner - at : room - filled;
                gather(stage + filled * item, p + at * istride * item, m, istride, item);
                filled += m;
                at += m;
                if (filled == room) {
                    run(stage, (size_t)filled, code, a, want, index0);
                    index0 += (uint64_t)filled;
                    filled = 0;
                }
            }
        int d = last - 1;
        for (; d >= 0; d--) {
            p += l->stride[d] * item;
            if (++index[d] < l->size[d]) break;
            p -= l->stride[d] * item * l->size[d];
            index[d] = 0;
        }
        if (d < 0) break;
    }
    if (filled) run(stage, (size_t)filled, code, a, want, index0);
}

/* ---- Python ------------------------------------------------------------------------------------------------------------- */
static void write_row(int64_t *row, int64_t n, int code, const Acc *a, int want) {
    double f[4] = {a->mn, a->mx, a->sum, a->sq};
    int64_t imin = INT64_MAX, imax = INT64_MIN;
    int64_t flags = WRITTEN | (want & WANT_DIGEST ? HAS_DIGEST : 0) | (want & WANT_CRC ? HAS_CRC : 0) | (want & WANT_XOR ? HAS_XOR : 0) |
                    (want & WANT_MOMENTS ? HAS_MOMENTS : 0) | (want & WANT_BELOW ? HAS_BELOW : 0) | (want & WANT_EPS ? HAS_EPS : 0);
    if (code == I64) {
        imin = a->imin;
        imax = a->imax;
    } else if (IS_INT(code) && code != U64 && n) {
        imin = (int64_t)a->mn;
        imax = (int64_t)a->mx;
    } else if (code == U64 && n) {
        imin = (int64_t)((uint64_t)a->imin ^ (1ull << 63));
        imax = (int64_t)((uint64_t)a->imax ^ (1ull << 63));
    }
    if (IS_INT(code)) {
        if (code != U64 || n == 0 || (imin >= 0 && imax >= 0))
            flags |= HAS_INTEGERS;
        else { /* above the int64 range: only MIN and MAX can tell */
            imin = INT64_MAX;
            imax = INT64_MIN;
        }
    }
    row[0] = n;
    row[1] = a->nan;
    row[2] = a->pinf;
    row[3] = a->ninf;
    row[4] = a->zero;
    row[5] = (int64_t)a->digest;
    memcpy(row + 6, f, sizeof f);
    row[10] = imin;
    row[11] = imax;
    row[12] = flags;
    row[13] = want & WANT_CRC ? (int64_t)(uint32_t)~a->crc : 0;
    row[14] = (int64_t)a->words;
    row[15] = a->below;
    if (want & WANT_MOMENTS) {
        memcpy(row + 13, &a->cubes, 8);
        memcpy(row + 14, &a->fourths, 8);
    }
}

/* Nonzero and an error set when a call has another number of arguments than its signature says. */
static int wrong_count(Py_ssize_t nargs, int count, const char *signature) {
    if (nargs == count) return 0;
    PyErr_Format(PyExc_TypeError, "_rowstats.%s takes %d arguments, got %zd", signature, count, nargs);
    return 1;
}

/* Nonzero and an error set when the address or the count of a call cannot be right; `out` is anything where nothing is written. */
static int bad_memory(const char *name, const void *p, const void *out, Py_ssize_t n) {
    if (out != NULL && n >= 0 && (p != NULL || n == 0)) return 0;
    PyErr_Format(PyExc_ValueError, "_rowstats.%s: null pointer or negative size", name);
    return 1;
}

/* What takes long lets other threads run meanwhile. */
#define UNLOCKED(bytes, call)                                                                    \
    do {                                                                                         \
        if ((size_t)(bytes) > GIL_BYTES) {                                                       \
            Py_BEGIN_ALLOW_THREADS                                                               \
            call;                                                                                \
            Py_END_ALLOW_THREADS                                                                 \
        } else                                                                                   \
            call;                                                                                \
    } while (0)

static int bad_code(long code) {
    if (code >= 0 && code < CODES) return 0;
    PyErr_Format(PyExc_ValueError, "_rowstats: dtype code %ld is unknown; allowed are 0 to %d", code, CODES - 1);
    return 1;
}

static PyObject *py_reduce(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 6, "reduce(ptr, numel, dtype_code, out_ptr, want, index0)")) return NULL;
    const uint8_t *p = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t n = PyLong_AsSsize_t(args[1]);
    long code = PyLong_AsLong(args[2]);
    int64_t *row = PyLong_AsVoidPtr(args[3]);
    int want = (int)PyLong_AsLong(args[4]) & WANT_ANY;
    uint64_t index0 = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() || bad_code(code) || bad_memory("reduce", p, row, n)) return NULL;
    Acc a;
    acc_init(&a);
    UNLOCKED((size_t)n * ITEM[code], run(p, (size_t)n, (int)code, &a, want, index0));
    write_row(row, n, (int)code, &a, want);
    Py_RETURN_NONE;
}

static int read_layout(PyObject *shape, PyObject *strides, Layout *l, int64_t *numel) {
    Py_ssize_t nd = PyTuple_Size(shape);
    if (nd < 0 || PyTuple_Size(strides) != nd) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "_rowstats: shape and strides differ in length");
        return -1;
    }
    l->ndim = 0;
    *numel = 1;
    for (Py_ssize_t i = 0; i < nd; i++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape, i)), stride = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        if (PyErr_Occurred()) return -1;
        *numel *= size;
        if (size == 1) continue;
        int top = l->ndim - 1;
        if (top >= 0 && l->stride[top] == stride * size) {
            l->size[top] *= size;
            l->stride[top] = stride;
            continue;
        }
        if (l->ndim == MAX_DIMS) {
            PyErr_SetString(PyExc_ValueError, "_rowstats: more than 16 dimensions that cannot be joined");
            return -1;
        }
        l->size[l->ndim] = size;
        l->stride[l->ndim++] = stride;
    }
    if (l->ndim == 0) {
        l->ndim = 1;
        l->size[0] = l->stride[0] = 1;
    }
    return 0;
}

static PyObject *py_reduce_strided(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 7, "reduce_strided(ptr, shape, strides, dtype_code, out_ptr, want, index0)")) return NULL;
    Layout l;
    int64_t n = 0;
    const uint8_t *p = PyLong_AsVoidPtr(args[0]);
    if (read_layout(args[1], args[2], &l, &n) < 0) return NULL;
    long code = PyLong_AsLong(args[3]);
    int64_t *row = PyLong_AsVoidPtr(args[4]);
    int want = (int)PyLong_AsLong(args[5]) & WANT_ANY;
    uint64_t index0 = PyLong_AsUnsignedLongLong(args[6]);
    if (PyErr_Occurred() || bad_code(code) || bad_memory("reduce_strided", p, row, n)) return NULL;
    Acc a;
    acc_init(&a);
    if (n > 0) UNLOCKED((size_t)n * ITEM[code], run_strided(run, p, &l, (int)code, &a, want, index0));
    write_row(row, n, (int)code, &a, want);
    Py_RETURN_NONE;
}

/* crc32(ptr, bytes, value): as zlib.crc32(memory, value) */
static PyObject *py_crc32(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (wrong_count(nargs, 3, "crc32(ptr, bytes, value)")) return NULL;
    const uint8_t *p = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t n = PyLong_AsSsize_t(args[1]);
    uint32_t state = ~(uint32_t)PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred() || bad_memory("crc32", p, args, n)) return NULL;
    UNLOCKED(n, state = crc_update(state, p, (size_t)n));
    return PyLong_FromUnsignedLong((uint32_t)~state);
}

/* sample(ptr, bytes): a number made of at most SAMPLE words spread evenly over the memory, of all of it when it is that small */
static PyObject *py_sample(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    enum { SAMPLE = 32 };
    (void)self;
    if (wrong_count(nargs, 2, "sample(ptr, bytes)")) return NULL;
    const uint8_t *p = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t n = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || bad_memory("sample", p, args, n)) return NULL;
    uint64_t made = (uint64_t)n, word = 0;
    if (n < 8)
        memcpy(&word, p, (size_t)n);
    const Py_ssize_t last = n < 8 ? 0 : n - 8, words = n < 8 ? 1 : last / 8 + 2;
    const Py_ssize_t count = words < SAMPLE ? words : SAMPLE;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (n >= 8) {
            Py_ssize_t at = words <= SAMPLE ? (i * 8 < last ? i * 8 : last) : (Py_ssize_t)((double)last / (SAMPLE - 1) * i);
            memcpy(&word, p + (at < last ? at : last), 8);
        }
        made = (made ^ word) * 0x9E3779B97F4A7C15u;
        made ^= made >> 29;
    }
    return PyLong_FromUnsignedLongLong(made);
}

#include "_pairs_calls.h"

#define CHOOSE(isa) (run = run_##isa, histogram = histogram_##isa, pair = pair_##isa, isa_name = #isa)

/* set_isa(name) chooses the instruction set (for tests and benchmarks); returns the one in use. */
static PyObject *py_set_isa(PyObject *self, PyObject *arg) {
    (void)self;
    PyObject *bytes = PyUnicode_AsUTF8String(arg);
    if (bytes == NULL) return NULL;
    const char *name = PyBytes_AsString(bytes);
#ifdef X86
    if (strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        CHOOSE(avx512);
        crc_choose(2);
    } else if ((strcmp(name, "avx512") == 0 || strcmp(name, "avx2") == 0) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        crc_choose(1);
        CHOOSE(avx2); /* every processor with AVX2 and FMA has F16C */
    } else
#endif
    {
        CHOOSE(portable);
        crc_choose(strcmp(name, "portable") != 0); /* not tied to the vectors that the other kernels need */
    }
    (void)name;
    Py_DECREF(bytes);
    return PyUnicode_FromString(isa_name);
}

static float fp8(int kind, int b) {
    int man_bits = kind == 0 || kind == 2 ? 3 : 2, bias = kind == 0 ? 7 : kind == 1 ? 15 : kind == 2 ? 8 : 16;
    if (kind == 4) return b == 255 ? NAN : ldexpf(1.0f, b - 127);
    int sign = b >> 7, exp = (b & 127) >> man_bits, man = b & ((1 << man_bits) - 1);
    if (kind >= 2 && b == 0x80) return NAN;
    if (kind == 0 && (b & 127) == 127) return NAN;
    if (kind == 1 && exp == 31) return man ? NAN : sign ? -INFINITY : INFINITY;
    float v = exp ? ldexpf((float)(man + (1 << man_bits)), exp - bias - man_bits) : ldexpf((float)man, 1 - bias - man_bits);
    return sign ? -v : v;
}

static PyMethodDef METHODS[] = {
    {"reduce", (PyCFunction)(void (*)(void))py_reduce, METH_FASTCALL, "reduce(ptr, numel, dtype_code, out_ptr, want, index0): write the row of contiguous memory."},
    {"reduce_strided", (PyCFunction)(void (*)(void))py_reduce_strided, METH_FASTCALL, "reduce_strided(ptr, shape, strides, dtype_code, out_ptr, want, index0): the same for any strides (in elements)."},
    {"crc32", (PyCFunction)(void (*)(void))py_crc32, METH_FASTCALL, "crc32(ptr, bytes, value) -> int: CRC-32 as zlib's, going on from value."},
    {"sample", (PyCFunction)(void (*)(void))py_sample, METH_FASTCALL, "sample(ptr, bytes) -> int: made of a few words of memory, to tell whether it was written to."},
    {"reduce_pair", (PyCFunction)(void (*)(void))py_reduce_pair, METH_FASTCALL, "reduce_pair(op, a, code_a, b, code_b, numel, out_ptr, want, c0, c1, c2): write the row of values made of two tensors."},
    {"histogram", (PyCFunction)(void (*)(void))py_histogram, METH_FASTCALL, "histogram(ptr, shape, strides, dtype_code, kind, out_ptr): add to 64 counters."},
    {"set_limit", (PyCFunction)(void (*)(void))py_set_limit, METH_FASTCALL, "set_limit(slot, limit): a limit that `want` may name."},
    {"set_isa", py_set_isa, METH_O, "set_isa('avx512' | 'avx2' | 'portable') -> the one in use."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_rowstats", "Statistics rows of host memory.", -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rowstats(void) {
    for (int k = 0; k < BLOCK + 64; k++) w32[k] = (uint32_t)(splitmix64(0x6D7370726F626500ull + (uint64_t)(k % BLOCK)) >> 32) | 1u;
    memcpy(w32_next, w32 + 1, (BLOCK + 63) * sizeof *w32);
    for (int kind = 0; kind < 5; kind++)
        for (int b = 0; b < 256; b++) fp8_table[kind][b] = fp8(kind, b);
    crc_setup();
    PyObject *best = PyUnicode_FromString("avx512");
    PyObject *used = best ? py_set_isa(NULL, best) : NULL;
    Py_XDECREF(best);
    if (used == NULL) return NULL;
    Py_DECREF(used);
    return PyModule_Create(&MODULE);
}

#else /* ---- ISA: the kernels -------------------------------------------------------------------------------------------- */

#if ISA == 2
#define FW 16
#define DW 8
typedef __m512 K(vf);
typedef __m512d K(vd);
typedef __m512i K(vi);
#define VF K(vf)
#define VD K(vd)
#define VI K(vi)
#define V(op) _mm512_##op
#define LOADI(p) _mm512_loadu_si512((const void *)(p))
#define STOREI(p, v) _mm512_storeu_si512((void *)(p), v)
#define XORI(a, b) _mm512_xor_si512(a, b)
#define HALF_PD(p) _mm512_cvtps_pd(_mm256_loadu_ps(p))
#define LOAD16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p)))
#define LOAD8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(p)))
#define LOADH(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#elif ISA == 1
#define FW 8
#define DW 4
typedef __m256 K(vf);
typedef __m256d K(vd);
typedef __m256i K(vi);
#define VF K(vf)
#define VD K(vd)
#define VI K(vi)
#define V(op) _mm256_##op
#define LOADI(p) _mm256_loadu_si256((const void *)(p))
#define STOREI(p, v) _mm256_storeu_si256((void *)(p), v)
#define XORI(a, b) _mm256_xor_si256(a, b)
#define HALF_PD(p) _mm256_cvtps_pd(_mm_loadu_ps(p))
#define LOAD16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p)))
#define LOAD8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p)))
#define LOADH(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#else
#define FW 8
#define DW 8
#endif

/* float32: sums in float64 lanes; see the head of the file for the non-finite case. */
static void K(sum_f32)(const float *p, size_t n, Acc *a) {
    size_t i = 0;
    double sum = 0, sq = 0;
    float mn = INFINITY, mx = -INFINITY;
    int64_t zero = 0;
#if ISA > 0
    if (n >= FW) {
        VD s0 = V(setzero_pd)(), s1 = s0, q0 = s0, q1 = s0;
        VF vmn = V(set1_ps)(INFINITY), vmx = V(set1_ps)(-INFINITY);
        VI vz = V(set1_epi32)(0);
        const VI sign = V(set1_epi32)(0x7FFFFFFF);
        for (; i + FW <= n; i += FW) {
            VF x = V(loadu_ps)(p + i);
            VD lo = HALF_PD(p + i), hi = HALF_PD(p + i + FW / 2);
            vmn = V(min_ps)(x, vmn);
            vmx = V(max_ps)(x, vmx);
#if ISA == 2
            vz = _mm512_mask_sub_epi32(vz, _mm512_testn_epi32_mask(_mm512_castps_si512(x), sign), vz, _mm512_set1_epi32(-1));
#else
            vz = _mm256_sub_epi32(vz, _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), sign), _mm256_setzero_si256()));
#endif
            s0 = V(add_pd)(s0, lo);
            s1 = V(add_pd)(s1, hi);
            q0 = V(fmadd_pd)(lo, lo, q0);
            q1 = V(fmadd_pd)(hi, hi, q1);
        }
        double ds[DW], dq[DW];
        float fmn[FW], fmx[FW];
        int32_t iz[FW];
        V(storeu_pd)(ds, V(add_pd)(s0, s1));
        V(storeu_pd)(dq, V(add_pd)(q0, q1));
        V(storeu_ps)(fmn, vmn);
        V(storeu_ps)(fmx, vmx);
        STOREI(iz, vz);
        for (int l = 0; l < DW; l++) sum += ds[l], sq += dq[l];
        for (int l = 0; l < FW; l++) {
            if (fmn[l] < mn) mn = fmn[l];
            if (fmx[l] > mx) mx = fmx[l];
            zero += iz[l];
        }
    }
#else
    double s[FW] = {0}, q[FW] = {0};
    for (; i + FW <= n; i += FW)
        for (int l = 0; l < FW; l++) {
            double d = p[i + l];
            s[l] += d;
            q[l] += d * d;
        }
    for (size_t k = 0; k < i; k++) {
        uint32_t u;
        memcpy(&u, p + k, 4);
        zero += (u & 0x7FFFFFFFu) == 0;
        mn = p[k] < mn ? p[k] : mn;
        mx = p[k] > mx ? p[k] : mx;
    }
    for (int l = 0; l < FW; l++) sum += s[l], sq += q[l];
#endif
    for (; i < n; i++) {
        uint32_t u;
        memcpy(&u, p + i, 4);
        zero += (u & 0x7FFFFFFFu) == 0;
        if (p[i] < mn) mn = p[i];
        if (p[i] > mx) mx = p[i];
        sum += p[i];
        sq += (double)p[i] * p[i];
    }
    if (!isfinite(sum)) {
#if ISA == 2
        VD s0 = V(setzero_pd)(), s1 = s0, q0 = s0, q1 = s0;
        VF vmn = V(set1_ps)(INFINITY), vmx = V(set1_ps)(-INFINITY);
        const VI top = V(set1_epi32)(0x7F800000), sign = V(set1_epi32)(0x7FFFFFFF);
        for (i = 0; i < n; i += FW) {
            __mmask16 live = n - i >= FW ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
            VF x = _mm512_maskz_loadu_ps(live, p + i);
            VI u = _mm512_castps_si512(x), m = _mm512_and_si512(u, sign);
            __mmask16 fin = _mm512_mask_cmplt_epu32_mask(live, m, top);
            a->nan += __builtin_popcount(_mm512_cmpgt_epu32_mask(m, top));
            a->pinf += __builtin_popcount(_mm512_cmpeq_epu32_mask(u, top));
            a->ninf += __builtin_popcount(_mm512_cmpeq_epu32_mask(u, _mm512_set1_epi32((int)0xFF800000u)));
            a->zero += __builtin_popcount(_mm512_mask_testn_epi32_mask(fin, u, sign));
            vmn = _mm512_mask_min_ps(vmn, fin, x, vmn);
            vmx = _mm512_mask_max_ps(vmx, fin, x, vmx);
            VD lo = _mm512_maskz_cvtps_pd((__mmask8)fin, _mm512_castps512_ps256(x));
            VD hi = _mm512_maskz_cvtps_pd((__mmask8)(fin >> 8), _mm512_extractf32x8_ps(x, 1));
            s0 = V(add_pd)(s0, lo);
            s1 = V(add_pd)(s1, hi);
            q0 = V(fmadd_pd)(lo, lo, q0);
            q1 = V(fmadd_pd)(hi, hi, q1);
        }
        a->sum += _mm512_reduce_add_pd(_mm512_add_pd(s0, s1));
        a->sq += _mm512_reduce_add_pd(_mm512_add_pd(q0, q1));
        mn = _mm512_reduce_min_ps(vmn);
        mx = _mm512_reduce_max_ps(vmx);
        if (mn < a->mn) a->mn = mn;
        if (mx > a->mx) a->mx = mx;
#else
        slow_f32(p, n, a);
#endif
        return;
    }
    a->sum += sum;
    a->sq += sq;
    a->zero += zero;
    if (mn < a->mn) a->mn = mn;
    if (mx > a->mx) a->mx = mx;
}

static void K(sum_f64)(const double *p, size_t n, Acc *a) {
    size_t i = 0;
    double sum = 0, sq = 0, mn = INFINITY, mx = -INFINITY;
    int64_t zero = 0;
#if ISA > 0
    VD s0 = V(setzero_pd)(), s1 = s0, q0 = s0, q1 = s0, m0 = V(set1_pd)(INFINITY), m1 = V(set1_pd)(-INFINITY);
    for (; i + 2 * DW <= n; i += 2 * DW) {
        VD x = V(loadu_pd)(p + i), y = V(loadu_pd)(p + i + DW);
        m0 = V(min_pd)(y, V(min_pd)(x, m0));
        m1 = V(max_pd)(y, V(max_pd)(x, m1));
        s0 = V(add_pd)(s0, x);
        s1 = V(add_pd)(s1, y);
        q0 = V(fmadd_pd)(x, x, q0);
        q1 = V(fmadd_pd)(y, y, q1);
    }
    double ds[DW], dq[DW], d0[DW], d1[DW];
    V(storeu_pd)(ds, V(add_pd)(s0, s1));
    V(storeu_pd)(dq, V(add_pd)(q0, q1));
    V(storeu_pd)(d0, m0);
    V(storeu_pd)(d1, m1);
    for (int l = 0; l < DW; l++) {
        sum += ds[l];
        sq += dq[l];
        mn = d0[l] < mn ? d0[l] : mn;
        mx = d1[l] > mx ? d1[l] : mx;
    }
#else
    double s[DW] = {0}, q[DW] = {0};
    for (; i + DW <= n; i += DW)
        for (int l = 0; l < DW; l++) {
            s[l] += p[i + l];
            q[l] += p[i + l] * p[i + l];
        }
    for (size_t k = 0; k < i; k++) {
        mn = p[k] < mn ? p[k] : mn;
        mx = p[k] > mx ? p[k] : mx;
    }
    for (int l = 0; l < DW; l++) sum += s[l], sq += q[l];
#endif
    for (; i < n; i++) {
        mn = p[i] < mn ? p[i] : mn;
        mx = p[i] > mx ? p[i] : mx;
        sum += p[i];
        sq += p[i] * p[i];
    }
    for (size_t k = 0; k < n; k++) {
        uint64_t u;
        memcpy(&u, p + k, 8);
        zero += (u << 1) == 0;
    }
    if (!isfinite(sum)) { /* NaN, Inf, or finite values whose sum is too large */
        slow_f64(p, n, a);
        return;
    }
    a->sum += sum;
    a->sq += sq;
    a->zero += zero;
    if (mn < a->mn) a->mn = mn;
    if (mx > a->mx) a->mx = mx;
}

/* flip is 1 << 63 for unsigned values: their order is that of the flipped signed ones. */
static void K(sum_i64)(const int64_t *p, size_t n, Acc *a, uint64_t flip) {
    int64_t zero = 0, mn = a->imin, mx = a->imax;
    double s[8] = {0}, q[8] = {0}, sum = 0, sq = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t v = (int64_t)((uint64_t)p[i] ^ flip);
        zero += p[i] == 0;
        mn = v < mn ? v : mn;
        mx = v > mx ? v : mx;
    }
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) {
            double d = flip ? (double)(uint64_t)p[i + l] : (double)p[i + l]; /* flipped, small ones would round to 0 */
            s[l] += d;
            q[l] += d * d;
        }
    for (; i < n; i++) {
        double d = flip ? (double)(uint64_t)p[i] : (double)p[i];
        sum += d;
        sq += d * d;
    }
    for (int l = 0; l < 8; l++) sum += s[l], sq += q[l];
    a->sum += sum;
    a->sq += sq;
    a->zero += zero;
    a->imin = mn;
    a->imax = mx;
    if (n) {
        a->mn = flip ? (double)((uint64_t)mn ^ flip) : (double)mn;
        a->mx = flip ? (double)((uint64_t)mx ^ flip) : (double)mx;
    }
}

/* Sum of (word ^ XORC) * weight over n words that lie in one block, from its word k on. */
#define DIGEST(NAME, T, LOADV)                                                                   \
    static uint64_t K(NAME)(const T *p, size_t n, size_t k) {                                    \
        uint64_t total = 0;                                                                      \
        size_t i = 0;                                                                            \
        DIGEST_VECTOR(LOADV)                                                                     \
        for (; i < n; i++) total += (uint64_t)((uint32_t)p[i] ^ XORC) * w32[k + i];              \
        return total;                                                                            \
    }
#if ISA > 0
/* The even words of a vector are multiplied in place, the odd ones after a shift; w32_next has their weights at even places. */
#define DIGEST_VECTOR(LOADV)                                                                     \
    if (n >= FW) {                                                                               \
        VI s0 = V(set1_epi32)(0), s1 = s0;                                                       \
        const VI c = V(set1_epi32)((int)XORC);                                                   \
        for (; i + FW <= n; i += FW) {                                                           \
            FETCH_NEXT(p + i);                                                                   \
            VI x = XORI(LOADV(p + i), c);                                                        \
            s0 = V(add_epi64)(s0, V(mul_epu32)(x, LOADI(w32 + k + i)));                          \
            s1 = V(add_epi64)(s1, V(mul_epu32)(V(srli_epi64)(x, 32), LOADI(w32_next + k + i)));  \
        }                                                                                        \
        uint64_t lanes[DW];                                                                      \
        STOREI(lanes, V(add_epi64)(s0, s1));                                                     \
        for (int l = 0; l < DW; l++) total += lanes[l];                                          \
    }
#else
#define DIGEST_VECTOR(LOADV)
#endif
DIGEST(digest32, uint32_t, LOADI)
DIGEST(digest16, uint16_t, LOAD16)
DIGEST(digest8, uint8_t, LOAD8)
#undef DIGEST
#undef DIGEST_VECTOR

static uint64_t K(digest)(const uint8_t *p, size_t n, int item, uint64_t index0) {
    size_t per = item > 4 ? (size_t)item / 4 : 1, word = item > 4 ? 4 : (size_t)item, words = n * per;
    uint64_t j = index0 * per, total = 0;
    while (words) {
        size_t k = (size_t)(j % BLOCK), m = BLOCK - k < words ? BLOCK - k : words;
        uint64_t s;
        if (word == 4)
            s = K(digest32)((const uint32_t *)p, m, k);
        else if (word == 2)
            s = K(digest16)((const uint16_t *)p, m, k);
        else
            s = K(digest8)(p, m, k);
        total += s * (splitmix64(j / BLOCK) | 1);
        p += m * word;
        j += m;
        words -= m;
    }
    return total;
}

static void K(half)(const uint16_t *p, float *to, size_t n) {
    size_t i = 0;
#if ISA > 0
    for (; i + FW <= n; i += FW) V(storeu_ps)(to + i, LOADH(p + i));
#endif
    for (; i < n; i++) {
        uint32_t h = p[i], m = h & 0x7FFFu, e = m >> 10, u;
        if (e == 31)
            u = 0x7F800000u | (m & 0x3FFu) << 13;
        else if (e)
            u = (m << 13) + 0x38000000u;
        else { /* subnormal: exact product of an integer and a power of two */
            float f = (float)m * 0x1p-24f;
            memcpy(&u, &f, 4);
        }
        u |= (h & 0x8000u) << 16;
        memcpy(to + i, &u, 4);
    }
}

#include "_rowmoments.h"

#define CONVERT(T, TO) for (size_t i = 0; i < m; i++) to_##TO[i] = (TO)((const T *)p)[i];

/* XOR of 64-bit little-endian words, the last one filled up with zeros. */
static uint64_t K(words)(const uint8_t *p, size_t n) {
    uint64_t lanes[8] = {0}, more[8];
    for (; n >= 64; p += 64, n -= 64) {
        FETCH_NEXT(p);
        memcpy(more, p, 64);
        for (int l = 0; l < 8; l++) lanes[l] ^= more[l];
    }
    memset(more, 0, sizeof more);
    memcpy(more, p, n);
    uint64_t total = 0;
    for (int l = 0; l < 8; l++) total ^= lanes[l] ^ more[l];
    return total;
}

/* The checksums of n bytes that follow those before. */
static void K(checksums)(const uint8_t *p, size_t n, Acc *a, int want) {
    if (want & WANT_CRC) a->crc = crc_update(a->crc, p, n);
    if (want & WANT_XOR) a->words ^= to_place(K(words)(p, n), a->bytes);
    a->bytes += n;
}

/* At most CHUNK_MAX elements as float32 (`*f`) or, where that could round, as float64 (`*d`); in place if they are that already. */
static void K(decode)(const uint8_t *p, size_t m, int code, float *to_float, double *to_double, const float **f, const double **d) {
    *f = to_float;
    switch (code) {
    case F32: *f = (const float *)p; return;
    case F64: *d = (const double *)p; return;
    case F16: K(half)((const uint16_t *)p, to_float, m); return;
    case BF16:
        for (size_t i = 0; i < m; i++) ((uint32_t *)(void *)to_float)[i] = (uint32_t)((const uint16_t *)p)[i] << 16;
        return;
    case I8: CONVERT(int8_t, float) return;
    case U8: CONVERT(uint8_t, float) return;
    case I16: CONVERT(int16_t, float) return;
    case U16: CONVERT(uint16_t, float) return;
    case BOOL:
        for (size_t i = 0; i < m; i++) to_float[i] = p[i] ? 1.0f : 0.0f;
        return;
    case I32: CONVERT(int32_t, double) break;
    case U32: CONVERT(uint32_t, double) break;
    case I64: CONVERT(int64_t, double) break;
    case U64: CONVERT(uint64_t, double) break;
    case C64:
        for (size_t i = 0; i < m; i++) {
            double re = ((const float *)p)[2 * i], im = ((const float *)p)[2 * i + 1];
            to_double[i] = sqrt(re * re + im * im); /* exact enough: float32 squares neither over- nor underflow in float64 */
        }
        break;
    case C128:
        for (size_t i = 0; i < m; i++) {
            double re = ((const double *)p)[2 * i], im = ((const double *)p)[2 * i + 1];
            to_double[i] = isnan(re) || isnan(im) ? NAN : hypot(re, im);
        }
        break;
    default:
        for (size_t i = 0; i < m; i++) to_float[i] = fp8_table[code - E4M3FN][p[i]];
        return;
    }
    *d = to_double;
}

/* The statistics of at most CHUNK_MAX elements. */
static void K(statistics)(const uint8_t *p, size_t m, int code, Acc *a, int want) {
    float to_float[CHUNK_MAX] __attribute__((aligned(64)));
    double to_double[CHUNK_MAX] __attribute__((aligned(64)));
    const float *f = NULL;
    const double *d = NULL;
    int whole = code == I64 || code == U64, more = want & (WANT_MOMENTS | WANT_BELOW);
    if (whole) {
        K(sum_i64)((const int64_t *)p, m, a, code == U64 ? 1ull << 63 : 0);
        if (!more) return;
    }
    K(decode)(p, m, code, to_float, to_double, &f, &d);
    if (d == NULL) {
        K(sum_f32)(f, m, a);
        if (more) K(more_f32)(f, m, a, want);
    } else {
        if (!whole) K(sum_f64)(d, m, a);
        if (more) K(more_f64)(d, m, a, want);
    }
}

static void K(run_copies)(const uint8_t *p, size_t n, int code, Acc *a, int want, uint64_t index0);

/* Elements of a chunk that begins at element `index0`: chunks end where blocks end. */
static inline size_t K(chunk)(size_t n, int item, uint64_t index0) {
    size_t chunk = CHUNK_BYTES / (size_t)item < CHUNK_MAX ? CHUNK_BYTES / (size_t)item : CHUNK_MAX;
    chunk -= (size_t)(index0 % BLOCK);
    return chunk < n ? chunk : n;
}

/* Statistics first: they take long enough for the chunk to arrive, and the checksums find it in the cache. */
static void K(run)(const uint8_t *p, size_t n, int code, Acc *a, int want, uint64_t index0) {
    int item = ITEM[code];
    if (__builtin_expect(!is_aligned(p, code), 0)) {
        K(run_copies)(p, n, code, a, want, index0);
        return;
    }
    for (size_t m; n; n -= m, p += m * (size_t)item, index0 += m) {
        m = K(chunk)(n, item, index0);
        K(statistics)(p, m, code, a, want);
        if (want & WANT_DIGEST) a->digest += K(digest)(p, m, item, index0);
        if (want & (WANT_CRC | WANT_XOR)) K(checksums)(p, m * (size_t)item, a, want);
    }
}

/* The same chunks, each copied to where elements may be read from. Apart, so that the usual way has no room for copies on its stack. */
static __attribute__((noinline)) void K(run_copies)(const uint8_t *p, size_t n, int code, Acc *a, int want, uint64_t index0) {
    uint8_t stage[CHUNK_BYTES] __attribute__((aligned(64)));
    int item = ITEM[code];
    for (size_t m; n; n -= m, p += m * (size_t)item, index0 += m) {
        m = K(chunk)(n, item, index0);
        K(run)(aligned_chunk(p, m * (size_t)item, code, stage), m, code, a, want, index0);
    }
}

#include "_pairs.h"

#undef CONVERT
#undef FW
#undef DW
#undef VF
#undef VD
#undef VI
#undef V
#undef LOADI
#undef STOREI
#undef XORI
#undef HALF_PD
#undef LOAD16
#undef LOAD8
#undef LOADH
#endif
