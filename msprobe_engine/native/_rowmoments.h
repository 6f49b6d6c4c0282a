/* The words that only some rows have: SUM3, SUM4 and BELOW of msprobe_engine/core/statistics/rows.py. _rowstats.c includes this file once per
 * instruction set; the chunk it works on has just been read for the other words and lies in the L1 cache.
 *
 * Vector types of the compiler instead of intrinsics: one text for all instruction sets. As for the other sums, NaN and Inf are
 * looked for only when the sum of fourth powers is not finite. BELOW compares bits, which order as the absolute values do and do
 * not depend on the flush-to-zero mode of the thread.
 */
typedef float K(mf) __attribute__((vector_size(4 * DW)));
typedef int32_t K(mh) __attribute__((vector_size(4 * DW)));
typedef int32_t K(mi) __attribute__((vector_size(4 * FW)));
typedef double K(md) __attribute__((vector_size(8 * DW)));
typedef int64_t K(ml) __attribute__((vector_size(8 * DW)));

#define LANES_F32(TO, FROM)                                                     \
    do {                                                                        \
        K(mh) bits_;                                                            \
        K(mf) real_;                                                            \
        memcpy(&bits_, FROM, sizeof bits_);                                     \
        if (masked) bits_ &= (bits_ & 0x7FFFFFFF) < 0x7F800000;                 \
        memcpy(&real_, &bits_, sizeof real_);                                   \
        TO = __builtin_convertvector(real_, K(md));                             \
    } while (0)
#define LANES_F64(TO, FROM)                                                     \
    do {                                                                        \
        K(ml) bits_;                                                            \
        memcpy(&bits_, FROM, sizeof bits_);                                     \
        if (masked) bits_ &= (bits_ & INT64_MAX) < 0x7FF0000000000000;          \
        memcpy(&TO, &bits_, sizeof TO);                                         \
    } while (0)
#define MOMENTS(NAME, T, LANES)                                                 \
    static inline void K(NAME)(const T *p, size_t n, double out[2], int masked) { \
        K(md) x, y, x2, y2, c0 = {0}, c1 = {0}, f0 = {0}, f1 = {0};             \
        size_t i = 0;                                                           \
        for (; i + 2 * DW <= n; i += 2 * DW) {                                  \
            LANES(x, p + i);                                                    \
            LANES(y, p + i + DW);                                               \
            x2 = x * x;                                                         \
            y2 = y * y;                                                         \
            c0 += x2 * x;                                                       \
            c1 += y2 * y;                                                       \
            f0 += x2 * x2;                                                      \
            f1 += y2 * y2;                                                      \
        }                                                                       \
        if (i < n) { /* zeros behind the end add nothing */                     \
            T rest[2 * DW] = {0};                                               \
            memcpy(rest, p + i, (n - i) * sizeof(T));                           \
            LANES(x, rest);                                                     \
            LANES(y, rest + DW);                                                \
            c0 += x * x * x;                                                    \
            c1 += y * y * y;                                                    \
            f0 += (x * x) * (x * x);                                            \
            f1 += (y * y) * (y * y);                                            \
        }                                                                       \
        c0 += c1;                                                               \
        f0 += f1;                                                               \
        out[0] = out[1] = 0;                                                    \
        for (int l = 0; l < DW; l++) {                                          \
            out[0] += c0[l];                                                    \
            out[1] += f0[l];                                                    \
        }                                                                       \
    }
MOMENTS(moments_f32, float, LANES_F32)
MOMENTS(moments_f64, double, LANES_F64)
#undef MOMENTS
#undef LANES_F32
#undef LANES_F64

#define BELOW(NAME, T, UINT, VEC, N, ABS)                                       \
    static int64_t K(NAME)(const T *p, size_t n, UINT limit) {                  \
        VEC bits, count = {0};                                                  \
        size_t i = 0;                                                           \
        for (; i + N <= n; i += N) {                                            \
            memcpy(&bits, p + i, sizeof bits);                                  \
            count -= (bits & ABS) < limit;                                      \
        }                                                                       \
        int64_t total = 0;                                                      \
        for (int l = 0; l < N; l++) total += count[l];                          \
        for (; i < n; i++) {                                                    \
            UINT one;                                                           \
            memcpy(&one, p + i, sizeof one);                                    \
            total += (one & ABS) < limit;                                       \
        }                                                                       \
        return total;                                                           \
    }
BELOW(below_f32, float, int32_t, K(mi), FW, INT32_MAX)
BELOW(below_f64, double, int64_t, K(ml), DW, INT64_MAX)
#undef BELOW

static void K(more_f32)(const float *p, size_t n, Acc *a, int want) {
    if (want & WANT_MOMENTS) {
        double sums[2];
        K(moments_f32)(p, n, sums, 0);
        if (!isfinite(sums[1])) K(moments_f32)(p, n, sums, 1);
        a->cubes += sums[0];
        a->fourths += sums[1];
    }
    if (want & WANT_BELOW) a->below += K(below_f32)(p, n, limits[want >> LIMIT_SHIFT].f32);
}

static void K(more_f64)(const double *p, size_t n, Acc *a, int want) {
    if (want & WANT_MOMENTS) {
        double sums[2];
        K(moments_f64)(p, n, sums, 0);
        if (!isfinite(sums[1])) K(moments_f64)(p, n, sums, 1);
        a->cubes += sums[0];
        a->fourths += sums[1];
    }
    if (want & WANT_BELOW) a->below += K(below_f64)(p, n, limits[want >> LIMIT_SHIFT].f64);
}
