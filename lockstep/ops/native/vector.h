/* Vectors of float32, as wide as the machine's, for the operators on a CPU.
 *
 * A result is a fixed expression of its own row: additions, multiplications, divisions, square roots and explicit fused
 * multiply-adds (`fmadd`), each rounded as IEEE 754 says, in an order that the source fixes. Compiled with
 * -ffp-contract=off and without -ffast-math, the compiler has no choice left, so the bits are the same for any vector
 * width and any number of threads. exp and log are polynomials, since a library's vector and scalar versions differ.
 *
 * Sums over a row are 16 partial sums (the l-th takes the elements l, l + 16, ...), folded by halves: one vector or more.
 * A vector wider than the machine's would be kept in memory by GCC.
 *
 * Loops over lanes become one instruction each: GCC recognizes the loop, clang what remains of it when it is unrolled.
 */
#ifndef LOCKSTEP_VECTOR_H
#define LOCKSTEP_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

enum { SUMS = 16, PARTS = SUMS / LANES };

typedef float V __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

typedef struct { V part[PARTS]; } Sums; /* the partial sums of a row, or its partial maxima */

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define EACH_LANE UNROLLED (int l = 0; l < LANES; l++)
#define UNROLLED _Pragma("clang loop unroll(full)") for
#else
#define EACH_LANE _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++)
#define UNROLLED _Pragma("GCC unroll 16") for
#endif

INLINE V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
/* A load for several uses. GCC would repeat it at each use, and a product is bound by its loads. */
INLINE V load_once(const float *p) {
    V v = load(p);
#if LANES == 16 && defined(__AVX512F__)
    __asm__("" : "+v"(v));
#elif LANES == 8 && defined(__AVX__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

INLINE void store(float *p, V v) { memcpy(p, &v, sizeof v); }
INLINE V splat(float x) { V r; EACH_LANE r[l] = x; return r; }
INLINE V add(V a, V b) { return a + b; }
INLINE V fmadd(V a, V b, V c) { V r; EACH_LANE r[l] = __builtin_fmaf(a[l], b[l], c[l]); return r; }
INLINE V pick(I mask, V yes, V no) { V r; EACH_LANE r[l] = mask[l] ? yes[l] : no[l]; return r; }
INLINE V largest(V a, V b) { V r; EACH_LANE r[l] = a[l] > b[l] ? a[l] : b[l]; return r; } /* b if either is NaN */
INLINE V at_least(V a, float low) { return largest(splat(low), a); }
INLINE V at_most(V a, float high) { V r; EACH_LANE r[l] = high < a[l] ? high : a[l]; return r; }

/* The first n elements, `fill` after them; nothing past the n-th is read. */
INLINE V load_first(const float *p, int64_t n, float fill) {
    if (n >= LANES) return load(p);
    V r = splat(fill);
    for (int l = 0; l < n; l++) r[l] = p[l];
    return r;
}

INLINE void store_first(float *p, V v, int64_t n) {
    if (n >= LANES) store(p, v);
    else for (int l = 0; l < n; l++) p[l] = v[l];
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* The next piece of a job that threads share; pieces are independent, so it does not matter which thread takes one. */
static inline int64_t claim(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }
static inline void fail(int64_t *error) { __atomic_store_n(error, 1, __ATOMIC_RELAXED); }
static inline int failed(const int64_t *error) { return __atomic_load_n(error, __ATOMIC_RELAXED) != 0; }

/* Work done row by row, by threads that take SHARE rows at a time. */
typedef struct {
    double eps;
    int64_t rows, next, error; /* next and error are shared by the threads */
    int64_t size[5];           /* dims and strides of the tensors, specific to each function */
    void *at[8];               /* the tensors, results first */
} RowJob;

enum { SHARE = 16 };
#define EACH_ROW(job) \
    for (int64_t row, end; (row = claim(&(job)->next) * SHARE) < (job)->rows;) \
        for (end = smaller(row + SHARE, (job)->rows); row < end; row++)

INLINE Sums splat_sums(float x) { Sums r; UNROLLED (int i = 0; i < PARTS; i++) r.part[i] = splat(x); return r; }
INLINE Sums load_sums(const float *p) { Sums r; memcpy(&r, p, sizeof r); return r; }
INLINE void store_sums(float *p, Sums sums) { memcpy(p, &sums, sizeof sums); }

/* LOW interleaves the first halves of two vectors, HIGH the second ones. FOLD takes lanes l and l + 8, l + 4, l + 2 and
 * l + 1 of partial sums together. */
#ifdef __clang__
#define SHUFFLE __builtin_shufflevector
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__}) /* GCC before 12 lacks the other */
#endif
#define FOLD_4(f, v) v = f(v, SWAP_2(v)), v = f(v, SWAP_1(v))
#if LANES == 16
#define LANE (I){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define SWAP_8(v) SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAP_4(v) SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_2(v) SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_1(v) SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define FOLD(f, v, p) v = f(p[0], SWAP_8(p[0])), v = f(v, SWAP_4(v)), FOLD_4(f, v)
#elif LANES == 8
#define LANE (I){0, 1, 2, 3, 4, 5, 6, 7}
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define SWAP_4(v) SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAP_2(v) SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_1(v) SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#define FOLD(f, v, p) v = f(p[0], p[1]), v = f(v, SWAP_4(v)), FOLD_4(f, v)
#else
#define LANE (I){0, 1, 2, 3}
#define LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define SWAP_2(v) SHUFFLE(v, v, 2, 3, 0, 1)
#define SWAP_1(v) SHUFFLE(v, v, 1, 0, 3, 2)
#define FOLD(f, v, p) v = f(f(p[0], p[2]), f(p[1], p[3])), FOLD_4(f, v)
#endif

INLINE float fold_sum(Sums sums) { V v; FOLD(add, v, sums.part); return v[0]; }
INLINE float fold_max(Sums sums) { V v; FOLD(largest, v, sums.part); return v[0]; }

/* e^x within 1 ulp; exactly 1 for 0, and exactly 0 below 2^-125, so there are no denormals. Cody and Waite's reduction
 * by ln 2 in two parts, then the polynomial of Cephes' expf. */
INLINE V exp_(V x) {
    const V shifter = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = at_most(at_least(x, -87.5f), 89.0f);
    V shifted = fmadd(x, splat(1.44269504f), shifter), n = shifted - shifter;
    V r = fmadd(n, splat(2.12194440e-4f), fmadd(n, splat(-0.693359375f), x));
    V p = fmadd(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fmadd(p, r, splat(8.3334519073e-3f));
    p = fmadd(p, r, splat(4.1665795894e-2f));
    p = fmadd(p, r, splat(1.6666665459e-1f));
    p = fmadd(p, r, splat(5.0000001201e-1f));
    p = fmadd(p, r * r, r) + 1.0f;
    V power = (V)(((U)shifted - (U)shifter + 126u) << 23); /* 2^(n - 1); 0 for n = -126 */
    return p * power * 2.0f;
}

/* The hyperbolic tangent of Cephes (tanhf). */
INLINE V tanh_(V x) {
    V z = x * x, size = largest(x, -x), far = 1.0f - 2.0f / (exp_(2.0f * size) + 1.0f);
    V p = fmadd(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
    p = fmadd(p, z, splat(-5.37397155531e-2f));
    p = fmadd(p, z, splat(1.33314422036e-1f));
    p = fmadd(p, z, splat(-3.33332819422e-1f));
    return pick(size < 0.625f, fmadd(p * z, x, x), pick(x < 0.0f, -far, far));
}

/* Natural logarithm of positive normal numbers within 1 ulp; NaN for NaN and infinity. The polynomial is fdlibm's. */
INLINE V log_(V x) {
    U bits = (U)x - 0x3f3504f3u; /* sqrt(1/2), so that the mantissa is around 1 */
    V exponent = __builtin_convertvector((I)bits >> 23, V);
    V f = (V)((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    V s = f / (f + 2.0f), z = s * s, w = z * z;
    V odd = z * fmadd(w, splat(0.28498786688f), splat(0.66666662693f));
    V even = w * fmadd(w, splat(0.24279078841f), splat(0.40000972152f));
    V half = 0.5f * f * f;
    V tail = fmadd(exponent, splat(9.0580006145e-6f), s * (half + (odd + even)));
    return fmadd(exponent, splat(6.9313812256e-1f), f - (half - tail)) + (x - x);
}

#endif
