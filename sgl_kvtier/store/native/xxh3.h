/* XXH3-128 (seed 0, default secret) of long input in several buffers.
 *
 * Written from the algorithm's description (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md); the secret and
 * the primes are constants of that format. Only for more than 240 bytes, which a slot always has.
 */
#ifndef KVTIER_XXH3_H
#define KVTIER_XXH3_H

#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__AARCH64EL__)
#include <arm_neon.h>
#endif

#define XXH3_STRIPE 64
#define XXH3_STRIPES_PER_BLOCK 16
#define XXH3_SECRET_BYTES 192
#define XXH3_SHORTEST 241

static const uint8_t xxh3_secret[XXH3_SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define XXH3_P32_1 0x9E3779B1U
#define XXH3_P32_2 0x85EBCA77U
#define XXH3_P32_3 0xC2B2AE3DU
#define XXH3_P64_1 0x9E3779B185EBCA87ULL
#define XXH3_P64_2 0xC2B2AE3D27D4EB4FULL
#define XXH3_P64_3 0x165667B19E3779F9ULL
#define XXH3_P64_4 0x85EBCA77C2B2AE63ULL
#define XXH3_P64_5 0x27D4EB2F165667C5ULL

static inline uint64_t xxh3_read64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static void xxh3_stripes_plain(uint64_t *acc, const uint8_t *in, const uint8_t *secret, size_t stripes) {
    for (size_t s = 0; s < stripes; s++, in += XXH3_STRIPE, secret += 8) {
        for (int i = 0; i < 8; i++) {
            uint64_t value = xxh3_read64(in + 8 * i);
            uint64_t keyed = value ^ xxh3_read64(secret + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void xxh3_stripes_avx2(uint64_t *acc, const uint8_t *in, const uint8_t *secret,
                                                              size_t stripes) {
    __m256i a0 = _mm256_loadu_si256((const __m256i *)acc);
    __m256i a1 = _mm256_loadu_si256((const __m256i *)acc + 1);
    for (size_t s = 0; s < stripes; s++, in += XXH3_STRIPE, secret += 8) {
        __m256i v0 = _mm256_loadu_si256((const __m256i *)in);
        __m256i v1 = _mm256_loadu_si256((const __m256i *)in + 1);
        __m256i k0 = _mm256_xor_si256(v0, _mm256_loadu_si256((const __m256i *)secret));
        __m256i k1 = _mm256_xor_si256(v1, _mm256_loadu_si256((const __m256i *)secret + 1));
        _mm_prefetch((const char *)in + 512, _MM_HINT_T0);
        a0 = _mm256_add_epi64(a0, _mm256_shuffle_epi32(v0, 0x4E));
        a1 = _mm256_add_epi64(a1, _mm256_shuffle_epi32(v1, 0x4E));
        a0 = _mm256_add_epi64(a0, _mm256_mul_epu32(k0, _mm256_srli_epi64(k0, 32)));
        a1 = _mm256_add_epi64(a1, _mm256_mul_epu32(k1, _mm256_srli_epi64(k1, 32)));
    }
    _mm256_storeu_si256((__m256i *)acc, a0);
    _mm256_storeu_si256((__m256i *)acc + 1, a1);
}
#elif defined(__AARCH64EL__)
static void xxh3_stripes_neon(uint64_t *acc, const uint8_t *in, const uint8_t *secret, size_t stripes) {
    uint64x2_t a[4];
    for (int i = 0; i < 4; i++) a[i] = vld1q_u64(acc + 2 * i);
    for (size_t s = 0; s < stripes; s++, in += XXH3_STRIPE, secret += 8) {
        for (int i = 0; i < 4; i += 2) {
            uint8x16_t v0 = vld1q_u8(in + 16 * i);
            uint8x16_t v1 = vld1q_u8(in + 16 * i + 16);
            uint32x4_t k0 = vreinterpretq_u32_u8(veorq_u8(v0, vld1q_u8(secret + 16 * i)));
            uint32x4_t k1 = vreinterpretq_u32_u8(veorq_u8(v1, vld1q_u8(secret + 16 * i + 16)));
            uint32x4_t low = vuzp1q_u32(k0, k1); /* low halves of the four keyed values; then the high halves */
            uint32x4_t high = vuzp2q_u32(k0, k1);
            a[i] = vaddq_u64(a[i], vreinterpretq_u64_u8(vextq_u8(v0, v0, 8)));
            a[i + 1] = vaddq_u64(a[i + 1], vreinterpretq_u64_u8(vextq_u8(v1, v1, 8)));
            a[i] = vmlal_u32(a[i], vget_low_u32(low), vget_low_u32(high));
            a[i + 1] = vmlal_high_u32(a[i + 1], low, high);
        }
    }
    for (int i = 0; i < 4; i++) vst1q_u64(acc + 2 * i, a[i]);
}
#endif

static void (*xxh3_stripes)(uint64_t *, const uint8_t *, const uint8_t *, size_t) = xxh3_stripes_plain;

#if defined(__x86_64__)
/* Whether the processor has AVX2 and the kernel saves its registers. With gcc __builtin_cpu_supports would do, but compiled
 * by zig it always returns no. */
static int xxh3_has_avx2(void) {
    unsigned a, b, c, d, kept;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    return (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

/* Selects the vector code for this processor, and returns its name. Called once, before any thread hashes. Every AArch64
 * processor that runs Linux has NEON. */
static const char *xxh3_choose(void) {
#if defined(__x86_64__)
    if (xxh3_has_avx2()) {
        xxh3_stripes = xxh3_stripes_avx2;
        return "avx2";
    }
#elif defined(__AARCH64EL__)
    xxh3_stripes = xxh3_stripes_neon;
    return "neon";
#endif
    return "plain";
}

static void xxh3_scramble(uint64_t *acc) {
    const uint8_t *secret = xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE;
    for (int i = 0; i < 8; i++) {
        uint64_t a = acc[i];
        a ^= a >> 47;
        a ^= xxh3_read64(secret + 8 * i);
        acc[i] = a * XXH3_P32_1;
    }
}

/* Consumes whole stripes; `at`: number of stripes consumed in the current block. */
static void xxh3_consume(uint64_t *acc, size_t *at, const uint8_t *in, size_t stripes) {
    while (stripes) {
        size_t now = XXH3_STRIPES_PER_BLOCK - *at;
        if (now > stripes) now = stripes;
        xxh3_stripes(acc, in, xxh3_secret + 8 * *at, now);
        in += now * XXH3_STRIPE;
        stripes -= now;
        *at += now;
        if (*at == XXH3_STRIPES_PER_BLOCK) {
            xxh3_scramble(acc);
            *at = 0;
        }
    }
}

static uint64_t xxh3_merge(const uint64_t *acc, const uint8_t *secret, uint64_t start) {
    uint64_t result = start;
    for (int i = 0; i < 4; i++) {
        __uint128_t product = (__uint128_t)(acc[2 * i] ^ xxh3_read64(secret + 16 * i)) *
                              (acc[2 * i + 1] ^ xxh3_read64(secret + 16 * i + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ (result >> 32);
}

/* The last 64 bytes of all buffers together. */
static void xxh3_tail(const struct iovec *parts, int count, uint8_t *tail) {
    size_t need = XXH3_STRIPE;
    for (int i = count - 1; i >= 0 && need; i--) {
        size_t now = parts[i].iov_len < need ? parts[i].iov_len : need;
        need -= now;
        memcpy(tail + need, (const uint8_t *)parts[i].iov_base + parts[i].iov_len - now, now);
    }
}

/* The digest in canonical (big-endian) order, as xxHash libraries print it. The buffers must hold XXH3_SHORTEST bytes or
 * more. */
static void xxh3_128(const struct iovec *parts, int count, uint8_t *digest) {
    uint64_t acc[8] = {XXH3_P32_3, XXH3_P64_1, XXH3_P64_2, XXH3_P64_3, XXH3_P64_4, XXH3_P32_2, XXH3_P64_5, XXH3_P32_1};
    uint64_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    uint64_t left = (total - 1) / XXH3_STRIPE;
    uint8_t carry[XXH3_STRIPE];
    size_t carried = 0, at = 0;
    for (int i = 0; i < count && left; i++) {
        const uint8_t *p = parts[i].iov_base;
        size_t n = parts[i].iov_len;
        if (carried) {
            size_t now = XXH3_STRIPE - carried < n ? XXH3_STRIPE - carried : n;
            memcpy(carry + carried, p, now);
            carried += now;
            p += now;
            n -= now;
            if (carried < XXH3_STRIPE) continue;
            xxh3_consume(acc, &at, carry, 1);
            carried = 0;
            left--;
        }
        size_t stripes = n / XXH3_STRIPE < left ? n / XXH3_STRIPE : left;
        xxh3_consume(acc, &at, p, stripes);
        left -= stripes;
        carried = n - stripes * XXH3_STRIPE < XXH3_STRIPE ? n - stripes * XXH3_STRIPE : 0;
        memcpy(carry, p + stripes * XXH3_STRIPE, carried);
    }
    uint8_t tail[XXH3_STRIPE];
    xxh3_tail(parts, count, tail);
    xxh3_stripes(acc, tail, xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE - 7, 1);
    uint64_t low = xxh3_merge(acc, xxh3_secret + 11, total * XXH3_P64_1);
    uint64_t high = xxh3_merge(acc, xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE - 11, ~(total * XXH3_P64_2));
    for (int i = 0; i < 8; i++) {
        digest[i] = (uint8_t)(high >> (56 - 8 * i));
        digest[8 + i] = (uint8_t)(low >> (56 - 8 * i));
    }
}

#endif
