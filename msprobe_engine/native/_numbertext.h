/* Text of numbers, for the modules that write many of them; to be included after Python.h.
 *
 * Shortest decimal that reads back as the same double: the Schubfach algorithm, R. Giulietti, "The Schubfach way to render
 * doubles", 2021. Its text form is that of Python's repr.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FIRST_POWER = -292, POWERS = 617 };

static uint64_t powers[POWERS][2];
static int have_powers = 0;

static uint64_t round_to_odd(const uint64_t g[2], uint64_t cp) {
    unsigned __int128 x = (unsigned __int128)g[1] * cp;
    unsigned __int128 y = (unsigned __int128)g[0] * cp + (uint64_t)(x >> 64);
    return (uint64_t)(y >> 64) | ((uint64_t)y > 1);
}

static int floor_log2_pow10(int e) { return (e * 1741647) >> 19; }

/* Decimal digits and exponent of a positive finite double: value = digits * 10**exponent. */
static uint64_t shortest(uint64_t bits, int *exponent) {
    uint64_t fraction = bits & 0xFFFFFFFFFFFFFull;
    int biased = (int)(bits >> 52) & 0x7FF;
    uint64_t c = biased ? fraction | 0x10000000000000ull : fraction;
    int q = biased ? biased - 1075 : -1074;
    int odd = (int)(c & 1), closer = fraction == 0 && biased > 1;
    uint64_t cb = 4 * c, cbl = cb - 2 + closer, cbr = cb + 2;
    int k = closer ? (q * 1262611 - 524031) >> 22 : (q * 1262611) >> 22;
    int h = q + floor_log2_pow10(-k) + 1;
    const uint64_t *g = powers[-k - FIRST_POWER];
    uint64_t lower = round_to_odd(g, cbl << h) + odd, v = round_to_odd(g, cb << h), upper = round_to_odd(g, cbr << h) - odd;
    uint64_t s = v / 4;
    if (s >= 10) {
        uint64_t sp = s / 10;
        int up = lower <= 40 * sp, wp = 40 * sp + 40 <= upper;
        if (up != wp) {
            *exponent = k + 1;
            return sp + wp;
        }
    }
    int u = lower <= 4 * s, w = 4 * s + 4 <= upper;
    *exponent = k;
    if (u != w) return s + w;
    uint64_t mid = 4 * s + 2;
    return s + (v > mid || (v == mid && (s & 1)));
}

static char *put(char *p, const char *text, size_t n) {
    memcpy(p, text, n);
    return p + n;
}
#define PUT(p, literal) put(p, literal, sizeof(literal) - 1)

static char *put_unsigned(char *p, uint64_t v) {
    char buffer[20];
    int n = 0;
    do buffer[19 - n++] = (char)('0' + v % 10);
    while (v /= 10);
    return put(p, buffer + 20 - n, (size_t)n);
}

static char *put_int(char *p, int64_t v) {
    if (v < 0) *p++ = '-';
    return put_unsigned(p, v < 0 ? 0 - (uint64_t)v : (uint64_t)v);
}

static char *put_double(char *p, double value) {
    if (isnan(value)) return PUT(p, "NaN");
    if (signbit(value)) *p++ = '-';
    if (isinf(value)) return PUT(p, "Infinity");
    uint64_t bits;
    memcpy(&bits, &value, 8);
    bits &= 0x7FFFFFFFFFFFFFFFull;
    if (!bits) return PUT(p, "0.0");
    int exponent;
    uint64_t digits = shortest(bits, &exponent);
    while (digits % 10 == 0) digits /= 10, exponent++;
    char text[20];
    int n = (int)(put_unsigned(text, digits) - text);
    int point = n + exponent; /* position of the decimal point relative to the first digit */
    if (point > 16 || point < -3) {
        *p++ = text[0];
        if (n > 1) {
            *p++ = '.';
            p = put(p, text + 1, (size_t)n - 1);
        }
        *p++ = 'e';
        *p++ = point - 1 < 0 ? '-' : '+';
        int e = point - 1 < 0 ? 1 - point : point - 1;
        if (e < 10) *p++ = '0';
        return put_unsigned(p, (uint64_t)e);
    }
    if (point <= 0) {
        p = PUT(p, "0.");
        for (int i = point; i < 0; i++) *p++ = '0';
        return put(p, text, (size_t)n);
    }
    if (point >= n) {
        p = put(p, text, (size_t)n);
        for (int i = n; i < point; i++) *p++ = '0';
        return PUT(p, ".0");
    }
    p = put(p, text, (size_t)point);
    *p++ = '.';
    return put(p, text + point, (size_t)(n - point));
}

/* 617 128-bit powers of ten (high and low word), 10**-292 .. 10**324, rounded up to 128 bits. */
static PyObject *set_powers(PyObject *self, PyObject *arg) {
    (void)self;
    Py_buffer table;
    if (PyObject_GetBuffer(arg, &table, PyBUF_SIMPLE) < 0) return NULL;
    int ok = table.len == (Py_ssize_t)sizeof(powers);
    if (ok) {
        memcpy(powers, table.buf, sizeof(powers));
        have_powers = 1;
    } else {
        PyErr_Format(PyExc_ValueError, "the table must have %zd bytes, got %zd", (Py_ssize_t)sizeof(powers), table.len);
    }
    PyBuffer_Release(&table);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}
