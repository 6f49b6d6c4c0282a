/* Values made of two tensors, and histograms; included by _rowstats.c once per instruction set.
 *
 * A pair kernel makes one chunk of values y from one chunk of a and b, in memory that stays in the L1 cache, and hands it to the
 * kernel for rows: no temporary of the size of the tensors exists. What the values are is defined in msprobe_engine/core/statistics/pairs.py,
 * the bins in msprobe_engine/core/statistics/histograms.py.
 */
#if ISA == 2
#define SQRT_F32(v) v = (K(pf))_mm512_sqrt_ps((__m512)(v))
#define SQRT_F64(v) v = (K(pd))_mm512_sqrt_pd((__m512d)(v))
#elif ISA == 1
#define SQRT_F32(v) v = (K(pf))_mm256_sqrt_ps((__m256)(v))
#define SQRT_F64(v) v = (K(pd))_mm256_sqrt_pd((__m256d)(v))
#else
#define SQRT_F32(v) for (int l = 0; l < FW; l++) v[l] = sqrtf(v[l])
#define SQRT_F64(v) for (int l = 0; l < DW; l++) v[l] = sqrt(v[l])
#endif
typedef float K(pf) __attribute__((vector_size(4 * FW)));
typedef int32_t K(pi) __attribute__((vector_size(4 * FW)));
typedef double K(pd) __attribute__((vector_size(8 * DW)));
typedef int64_t K(pl) __attribute__((vector_size(8 * DW)));

/* y = a c1 / (sqrt(b) c2 + eps), and 0 a where the divisor is 0. Divisions are slow: narrow types are not widened for them. */
#define RATIO(NAME, T, VEC, INT, N, SQRTV)                                      \
    static void K(NAME)(const T *a, const T *b, T *y, size_t n, const double *c) { \
        const T c1 = (T)c[0], c2 = (T)c[1], eps = (T)c[2];                      \
        for (size_t i = 0; i < n; i += N) {                                     \
            size_t m = n - i < N ? n - i : N;                                   \
            VEC va = {0}, vb = {0}, div, one = (VEC){0} + 1;                    \
            if (m == N) {                                                       \
                memcpy(&va, a + i, sizeof va);                                  \
                memcpy(&vb, b + i, sizeof vb);                                  \
            } else {                                                            \
                memcpy(&va, a + i, m * sizeof(T));                              \
                memcpy(&vb, b + i, m * sizeof(T));                              \
            }                                                                   \
            va *= c1;                                                           \
            SQRTV(vb);                                                          \
            div = vb * c2 + eps;                                                \
            INT none = div == 0;                                                \
            va = (VEC)(((INT)va & ~none) | ((INT)(va * 0) & none));             \
            div = (VEC)(((INT)div & ~none) | ((INT)one & none));                \
            va /= div;                                                          \
            if (m == N)                                                         \
                memcpy(y + i, &va, sizeof va);                                  \
            else                                                                \
                memcpy(y + i, &va, m * sizeof(T));                              \
        }                                                                       \
    }
RATIO(ratio_f32, float, K(pf), K(pi), FW, SQRT_F32)
RATIO(ratio_f64, double, K(pd), K(pl), DW, SQRT_F64)
#undef RATIO
#undef SQRT_F32
#undef SQRT_F64

/* Signs are told by bits: subnormals count in every mode of the thread. */
#define AGREE(NAME, T, UINT, TOP, INFBITS)                                      \
    static void K(NAME)(const T *a, const T *b, T *y, size_t n) {               \
        for (size_t i = 0; i < n; i++) {                                        \
            UINT u, v;                                                          \
            memcpy(&u, a + i, sizeof u);                                        \
            memcpy(&v, b + i, sizeof v);                                        \
            UINT p = u & ~TOP, q = v & ~TOP;                                    \
            T value = (u ^ v) & TOP ? (T)0 : (T)1;                              \
            value = p == 0 || q == 0 ? (T)0.5 : value;                          \
            y[i] = p > INFBITS || q > INFBITS ? (T)NAN : value;                 \
        }                                                                       \
    }
AGREE(agree_f32, float, uint32_t, 0x80000000u, 0x7F800000u)
AGREE(agree_f64, double, uint64_t, 0x8000000000000000ull, 0x7FF0000000000000ull)
#undef AGREE

#define LINEAR(NAME, T)                                                         \
    static void K(NAME)(int op, const T *a, const T *b, T *y, size_t n, const double *c) { \
        const double c1 = c[0], c2 = c[1];                                      \
        if (op == LINEAR_OP)                                                    \
            for (size_t i = 0; i < n; i++) y[i] = (T)(c1 * (double)a[i] + c2 * (double)b[i]); \
        else                                                                    \
            for (size_t i = 0; i < n; i++) {                                    \
                double t = c1 * (double)a[i] + c2 * (double)b[i];               \
                double s = t == 0 ? 0.0 : copysign(1.0, t);                     \
                y[i] = (T)(t != t ? t : s);                                     \
            }                                                                   \
    }
LINEAR(linear_f32, float)
LINEAR(linear_f64, double)
#undef LINEAR

static const float *K(floats)(const uint8_t *p, size_t n, int code, float *to) {
    if (code == F32) return (const float *)p;
    if (code == F16)
        K(half)((const uint16_t *)p, to, n);
    else
        for (size_t i = 0; i < n; i++) ((uint32_t *)(void *)to)[i] = (uint32_t)((const uint16_t *)p)[i] << 16;
    return to;
}

static const double *K(doubles)(const uint8_t *p, size_t n, int code, double *to) {
    if (code == F64) return (const double *)p;
    float narrow[PAIR_CHUNK] __attribute__((aligned(64)));
    const float *from = K(floats)(p, n, code, narrow);
    for (size_t i = 0; i < n; i++) to[i] = from[i];
    return to;
}

static void K(pair)(const Pair *x, Acc *acc, int want) {
    const uint8_t *p = x->a, *q = x->b;
    union {
        float f[3][PAIR_CHUNK];
        double d[3][PAIR_CHUNK];
    } room __attribute__((aligned(64)));
    uint8_t stage[2][PAIR_CHUNK * sizeof(double)] __attribute__((aligned(64)));
    int wide = x->code_a == F64 || x->code_b == F64;
    for (size_t at = 0; at < x->n; at += PAIR_CHUNK) {
        size_t m = x->n - at < PAIR_CHUNK ? x->n - at : PAIR_CHUNK;
        const uint8_t *left = aligned_chunk(p, m * ITEM[x->code_a], x->code_a, stage[0]);
        const uint8_t *right = aligned_chunk(q, m * ITEM[x->code_b], x->code_b, stage[1]);
        if (wide) {
            const double *a = K(doubles)(left, m, x->code_a, room.d[0]), *b = K(doubles)(right, m, x->code_b, room.d[1]);
            if (x->op == AGREE_OP)
                K(agree_f64)(a, b, room.d[2], m);
            else if (x->op == RATIO_OP)
                K(ratio_f64)(a, b, room.d[2], m, x->c);
            else
                K(linear_f64)(x->op, a, b, room.d[2], m, x->c);
            K(run)((const uint8_t *)room.d[2], m, F64, acc, want, 0);
        } else {
            const float *a = K(floats)(left, m, x->code_a, room.f[0]), *b = K(floats)(right, m, x->code_b, room.f[1]);
            if (x->op == AGREE_OP)
                K(agree_f32)(a, b, room.f[2], m);
            else if (x->op == RATIO_OP)
                K(ratio_f32)(a, b, room.f[2], m, x->c);
            else
                K(linear_f32)(x->op, a, b, room.f[2], m, x->c);
            K(run)((const uint8_t *)room.f[2], m, F32, acc, want, 0);
        }
        p += m * ITEM[x->code_a];
        q += m * ITEM[x->code_b];
    }
}

/* Bin of each value; what has none goes to the last place of the table. Bits are compared, so that nothing branches: 1.0 is the
 * largest magnitude with a bin, and NaN lies above it. */
#define LINEAR_BIN(T, FROM, INT, ABS, ONE)                                      \
    for (size_t i = 0; i < n; i++) {                                            \
        INT u;                                                                  \
        T x;                                                                    \
        memcpy(&u, FROM + i, sizeof u);                                         \
        INT in = -(INT)((u & ABS) <= ONE);                                      \
        u &= in;                                                                \
        memcpy(&x, &u, sizeof x);                                               \
        double t = (double)x * 15.0;                                            \
        int32_t k = (int32_t)t;                                                 \
        k = k - (t < (double)k) + 15;                                           \
        k = k > 29 ? 29 : k;                                                    \
        bin[i] = (uint8_t)((k & (int32_t)in) | (NO_BIN & ~(int32_t)in));        \
    }
static void K(linear_bins)(const float *f, const double *d, size_t n, uint8_t *bin) {
    if (d == NULL)
        LINEAR_BIN(float, f, int32_t, INT32_MAX, 0x3F800000)
    else
        LINEAR_BIN(double, d, int64_t, INT64_MAX, 0x3FF0000000000000)
}
#undef LINEAR_BIN

static void K(log2_bins)(const float *f, const double *d, size_t n, uint8_t *bin) {
    if (d == NULL)
        for (size_t i = 0; i < n; i++) {
            int32_t u;
            memcpy(&u, f + i, sizeof u);
            u &= INT32_MAX;
            int k = (u >> 23) - 127 + 40;
            k = k < 0 ? 0 : k > 49 ? 49 : k;
            bin[i] = (uint8_t)(u == 0 || u >= 0x7F800000 ? NO_BIN : k);
        }
    else
        for (size_t i = 0; i < n; i++) {
            int64_t u;
            memcpy(&u, d + i, sizeof u);
            u &= INT64_MAX;
            int64_t k = (u >> 52) - 1023 + 40;
            k = k < 0 ? 0 : k > 49 ? 49 : k;
            bin[i] = (uint8_t)(u == 0 || u >= 0x7FF0000000000000 ? NO_BIN : k);
        }
}

/* A `run_fn` whose accumulator is the first part of a Histogram; four tables, because neighbours often share a bin. */
static void K(histogram)(const uint8_t *p, size_t n, int code, Acc *acc, int kind, uint64_t index0) {
    (void)index0;
    Histogram *h = (Histogram *)acc;
    float to_float[PAIR_CHUNK] __attribute__((aligned(64)));
    double to_double[PAIR_CHUNK] __attribute__((aligned(64)));
    uint8_t bin[PAIR_CHUNK + 4], stage[PAIR_CHUNK * 2 * sizeof(double)] __attribute__((aligned(64)));
    while (n) {
        size_t m = n < PAIR_CHUNK ? n : PAIR_CHUNK, i = 0;
        const float *f = NULL;
        const double *d = NULL;
        K(decode)(aligned_chunk(p, m * ITEM[code], code, stage), m, code, to_float, to_double, &f, &d);
        (kind == LINEAR_BINS ? K(linear_bins) : K(log2_bins))(f, d, m, bin);
        for (; i + 4 <= m; i += 4) {
            h->count[0][bin[i]]++;
            h->count[1][bin[i + 1]]++;
            h->count[2][bin[i + 2]]++;
            h->count[3][bin[i + 3]]++;
        }
        for (; i < m; i++) h->count[0][bin[i]]++;
        p += m * ITEM[code];
        n -= m;
    }
}
