/* CRC-32 of host memory, the one of zlib and PNG: polynomial 0x04C11DB7, bits reflected, start and end inverted.
 *
 * Carry-less multiplication where the processor has it, as in V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009: a register of the message is multiplied by x^(distance+-32) mod P and added to the bits that
 * many places further on, at last 128 bits are reduced by Barrett's method. The CRC instruction on 64-bit Arm; eight table look-ups
 * per eight bytes elsewhere. Which one runs is decided when the module is loaded.
 *
 * Between calls a CRC is kept inverted ("state"): the state of no bytes is 0xFFFFFFFF.
 */
#ifndef MSPROBE_CHECKSUMS_H
#define MSPROBE_CHECKSUMS_H

#include <stdint.h>
#include <string.h>

/* Memory is worked on in chunks that fit the L1 cache. A pass over a chunk that is there already leaves the way to memory idle, and
 * the processor does not look beyond it by itself: such passes fetch the chunk behind (measured: a third off 40 MB with digest). */
#define CHUNK_BYTES 16384
#define FETCH_NEXT(p) __builtin_prefetch((const void *)((uintptr_t)(p) + CHUNK_BYTES), 0, 2)

#define CRC_START 0xFFFFFFFFu
#define CRC_POLYNOMIAL 0xEDB88320u

static uint32_t crc_table[8][256];

static uint32_t crc_by_tables(uint32_t state, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t low = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        low ^= state;
        state = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^ crc_table[4][low >> 24] ^
                crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
    }
    for (; n; n--) state = state >> 8 ^ crc_table[0][(state ^ *p++) & 255];
    return state;
}

#if (defined(__x86_64__) || defined(__amd64__)) && defined(__GNUC__) && !defined(MSPROBE_PORTABLE)
#define CRC_X86 1
#include <cpuid.h>
#include <immintrin.h>

/* x^(distance+32) and x^(distance-32) mod P, reflected, for the two halves of a register. */
#define CRC_BY_128 _mm_set_epi64x(0x0ccaa009eLL, 0x1751997d0LL)
#define CRC_BY_512 _mm_set_epi64x(0x1c6e41596LL, 0x154442bd4LL)
#define CRC_BY_2048 _mm_set_epi64x(0x1322d1430LL, 0x11542778aLL)

#define CRC_FOLD(x, by, next) _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next)
#define CRC_LOAD(p) _mm_loadu_si128((const __m128i *)(const void *)(p))

/* The state of a message that is congruent to the 128 bits of x, and n bytes after it. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_finish(__m128i x, const uint8_t *p, size_t n) {
    const __m128i by = CRC_BY_128, low = _mm_setr_epi32(-1, 0, -1, 0), barrett = _mm_set_epi64x(0x1f7011641LL, 0x1db710641LL);
    for (; n >= 16; p += 16, n -= 16) x = CRC_FOLD(x, by, CRC_LOAD(p));
    x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by, 0x10));
    x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low), _mm_set_epi64x(0, 0x163cd6124LL), 0x00));
    __m128i q = _mm_clmulepi64_si128(_mm_and_si128(x, low), barrett, 0x10);
    x = _mm_xor_si128(x, _mm_clmulepi64_si128(_mm_and_si128(q, low), barrett, 0x00));
    return crc_by_tables((uint32_t)_mm_extract_epi32(x, 1), p, n);
}

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_clmul(uint32_t state, const uint8_t *p, size_t n) {
    if (n < 16) return crc_by_tables(state, p, n);
    __m128i x = _mm_xor_si128(CRC_LOAD(p), _mm_cvtsi32_si128((int)state));
    if (n < 128) return crc_finish(x, p + 16, n - 16);
    const __m128i by = CRC_BY_512, one = CRC_BY_128;
    __m128i y = CRC_LOAD(p + 16), z = CRC_LOAD(p + 32), w = CRC_LOAD(p + 48);
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        FETCH_NEXT(p);
        x = CRC_FOLD(x, by, CRC_LOAD(p));
        y = CRC_FOLD(y, by, CRC_LOAD(p + 16));
        z = CRC_FOLD(z, by, CRC_LOAD(p + 32));
        w = CRC_FOLD(w, by, CRC_LOAD(p + 48));
    }
    return crc_finish(CRC_FOLD(CRC_FOLD(CRC_FOLD(x, one, y), one, z), one, w), p, n);
}

#define CRC_FOLD4(x, by, next) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), next, 0x96)
#define CRC_LOAD4(p) _mm512_loadu_si512((const void *)(p))

__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) static uint32_t crc_by_wide_clmul(uint32_t state, const uint8_t *p, size_t n) {
    if (n < 512) return crc_by_clmul(state, p, n);
    __m512i by = _mm512_broadcast_i32x4(CRC_BY_2048);
    __m512i x = _mm512_xor_si512(CRC_LOAD4(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    __m512i y = CRC_LOAD4(p + 64), z = CRC_LOAD4(p + 128), w = CRC_LOAD4(p + 192);
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
        for (int line = 0; line < 256; line += 64) FETCH_NEXT(p + line);
        x = CRC_FOLD4(x, by, CRC_LOAD4(p));
        y = CRC_FOLD4(y, by, CRC_LOAD4(p + 64));
        z = CRC_FOLD4(z, by, CRC_LOAD4(p + 128));
        w = CRC_FOLD4(w, by, CRC_LOAD4(p + 192));
    }
    by = _mm512_broadcast_i32x4(CRC_BY_512);
    x = CRC_FOLD4(CRC_FOLD4(CRC_FOLD4(x, by, y), by, z), by, w);
    for (; n >= 64; p += 64, n -= 64) x = CRC_FOLD4(x, by, CRC_LOAD4(p));
    const __m128i one = CRC_BY_128;
    __m128i folded = _mm512_castsi512_si128(x);
    folded = CRC_FOLD(folded, one, _mm512_extracti32x4_epi32(x, 1));
    folded = CRC_FOLD(folded, one, _mm512_extracti32x4_epi32(x, 2));
    folded = CRC_FOLD(folded, one, _mm512_extracti32x4_epi32(x, 3));
    return crc_finish(folded, p, n);
}

/* AVX-512 as the operating system allows it, and VPCLMULQDQ, which not every compiler's __builtin_cpu_supports knows. */
static int crc_has_wide_clmul(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 10 & 1);
}

#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && defined(__BYTE_ORDER__) && \
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && !defined(MSPROBE_PORTABLE)
#define CRC_ARM 1
#include <sys/auxv.h>

static uint32_t crc_by_instruction(uint32_t state, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(state) : "r"(word));
    }
    return crc_by_tables(state, p, n);
}
#endif

static uint32_t (*crc_update)(uint32_t state, const uint8_t *p, size_t n) = crc_by_tables;

/* Chooses the fastest way not above `level`: 2 wide multiplication, 1 multiplication or instruction, 0 tables. */
static void crc_choose(int level) {
    crc_update = crc_by_tables;
#ifdef CRC_X86
    if (level >= 1 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) crc_update = crc_by_clmul;
    if (level >= 2 && crc_update == crc_by_clmul && crc_has_wide_clmul()) crc_update = crc_by_wide_clmul;
#elif defined(CRC_ARM)
    if (level >= 1 && getauxval(AT_HWCAP) & 1ul << 7) crc_update = crc_by_instruction; /* HWCAP_CRC32 */
#else
    (void)level;
#endif
}

static void crc_setup(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ CRC_POLYNOMIAL : c >> 1;
        crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++) crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 255];
}

#endif
