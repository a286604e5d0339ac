/* The operators on a CPU, float32: row operators, attention, log-probabilities and sampling.
 *
 * A result is a fixed expression of its own row: additions, multiplications, divisions, square roots and fused
 * multiply-adds written out (`fmadd`), each rounded as IEEE 754 says, in an order that this file fixes. Compiled with
 * -ffp-contract=off and without -ffast-math nothing is left to the compiler, so the bits are those of any vector width
 * and of any number of threads. exp and log are polynomials here: a library's vector and scalar versions differ.
 *
 * Sums over a row are 16 partial sums (lane l takes the elements l, l + 16, ...), folded by halves. Products with
 * keys and values are one accumulator an element over ascending head dim and key.
 *
 * Functions that follow indices return 0, or 1 when one lies outside its table. The rows or blocks of one call are
 * independent of each other; `part` of `parts` says which of them to do.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, TILE = 64, GROUPS = TILE / LANES, BLOCK_ROWS = 32 };

typedef float V __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 4")
#define EACH_LANE for (int l = 0; l < LANES; l++)

static const I LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, V v) { memcpy(p, &v, sizeof v); }
INLINE V splat(float x) { V r; EACH_LANE r[l] = x; return r; }
INLINE V fmadd(V a, V b, V c) { V r; EACH_LANE r[l] = __builtin_fmaf(a[l], b[l], c[l]); return r; }
INLINE V pick(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }
INLINE V largest(V a, V b) { return pick(a > b, a, b); }
INLINE V at_least(V a, float low) { return pick(a < low, splat(low), a); } /* keeps NaN */
INLINE V at_most(V a, float high) { return pick(a > high, splat(high), a); }

/* The first n of 16 elements, `fill` after them; nothing past the n-th is read. */
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

#define SHUFFLE __builtin_shufflevector
#define HALF(v) SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define QUARTER(v) SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define PAIR(v) SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define NEXT(v) SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) /* interleaved first halves */
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

INLINE float fold_sum(V v) { v += HALF(v); v += QUARTER(v); v += PAIR(v); v += NEXT(v); return v[0]; }
INLINE float fold_max(V v) {
    v = largest(v, HALF(v)); v = largest(v, QUARTER(v)); v = largest(v, PAIR(v)); v = largest(v, NEXT(v));
    return v[0];
}

/* e^x within 1 ulp; below 2^-125 exactly 0, so there are no denormals; exp(0) is exactly 1. Cody and Waite's reduction
 * by ln 2 in two parts, then the minimax polynomial of Cephes' expf. */
INLINE V exp_(V x) {
    const V shifter = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = at_most(at_least(x, -87.5f), 89.0f);
    V t = fmadd(x, splat(1.44269504f), shifter);
    V n = t - shifter;
    V r = fmadd(n, splat(-0.693359375f), x);
    r = fmadd(n, splat(2.12194440e-4f), r);
    V p = splat(1.9875691500e-4f);
    p = fmadd(p, r, splat(1.3981999507e-3f));
    p = fmadd(p, r, splat(8.3334519073e-3f));
    p = fmadd(p, r, splat(4.1665795894e-2f));
    p = fmadd(p, r, splat(1.6666665459e-1f));
    p = fmadd(p, r, splat(5.0000001201e-1f));
    p = fmadd(p, r * r, r) + 1.0f;
    V power = (V)(((U)t - (U)shifter + 126u) << 23); /* 2^(n - 1), 0 for n = -126 */
    return p * power * 2.0f;
}

/* Natural logarithm of positive normal numbers within 1 ulp; NaN for NaN and infinity. fdlibm's logf. */
INLINE V log_(V x) {
    U u = (U)x - 0x3f3504f3u; /* sqrt(1/2), so that the mantissa lies around 1 */
    V exponent = __builtin_convertvector((I)u >> 23, V);
    V f = (V)((u & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    V s = f / (f + 2.0f), z = s * s, w = z * z;
    V odd = z * fmadd(w, splat(0.28498786688f), splat(0.66666662693f));
    V even = w * fmadd(w, splat(0.24279078841f), splat(0.40000972152f));
    V half = 0.5f * f * f;
    V tail = fmadd(exponent, splat(9.0580006145e-6f), s * (half + (odd + even)));
    return fmadd(exponent, splat(6.9313812256e-1f), f - (half - tail)) + (x - x);
}

/* Identity of the build: the checksum of this file, and whether this machine has the instructions it was built for. */
uint32_t kernels_checksum(void) { return SOURCE_CHECKSUM; }

int kernels_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#define HAS(feature) if (!__builtin_cpu_supports(feature)) return 0;
#ifdef __AVX2__
    HAS("avx2") HAS("bmi") HAS("bmi2")
#endif
#ifdef __AVX512F__
    HAS("avx512f")
#endif
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    HAS("avx512bw") HAS("avx512dq") HAS("avx512vl")
#endif
#ifdef __AVX512VBMI__
    HAS("avx512vbmi")
#endif
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return 1;
#else
    return 0; /* fma would be a slow function call */
#endif
}

/* ---- row operators ---- */

INLINE float rms_scale(const float *x, int64_t n, float eps) {
    V sum = splat(0);
    for (int64_t i = 0; i < n; i += LANES) {
        V v = load_first(x + i, n - i, 0);
        sum = fmadd(v, v, sum);
    }
    return 1.0f / sqrtf(fold_sum(sum) / (float)n + eps);
}

void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t dim, float eps) {
    for (int64_t row = 0; row < rows; row++, x += dim, out += dim) {
        float scale = rms_scale(x, dim, eps);
        for (int64_t i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* Norm weights may be NULL: rotation alone. */
void qk_norm_rope(float *out, const float *qkv, const float *q_weight, const float *k_weight, const float *cos_sin,
                  int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads, int64_t dim, float eps) {
    int64_t half = dim / 2;
    for (int64_t t = 0; t < tokens; t++, cos_sin += dim) {
        const float *x = qkv + t * stride;
        for (int64_t h = 0; h < heads + kv_heads; h++, x += dim, out += dim) {
            const float *weight = h < heads ? q_weight : k_weight;
            float scale = weight ? rms_scale(x, dim, eps) : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                if (weight) a = a * scale * weight[i], b = b * scale * weight[i + half];
                out[i] = a * cos_sin[i] - b * cos_sin[i + half];
                out[i + half] = b * cos_sin[i] + a * cos_sin[i + half];
            }
        }
    }
}

void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t dim) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * dim, out += dim)
        for (int64_t i = 0; i < dim; i += LANES) {
            V gate = load_first(gate_up + i, dim - i, 0), up = load_first(gate_up + dim + i, dim - i, 0);
            store_first(out + i, gate / (exp_(-gate) + 1.0f) * up, dim - i);
        }
}

/* Rows of `bytes` bytes, `k_stride` and `v_stride` apart, to slots of two caches. */
int write_kv(const char *k, const char *v, char *k_cache, char *v_cache, const int64_t *slots, int64_t tokens,
             int64_t cache_rows, int64_t k_stride, int64_t v_stride, int64_t bytes) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0 || slots[t] >= cache_rows) return 1;
        memcpy(k_cache + slots[t] * bytes, k + t * k_stride, bytes);
        memcpy(v_cache + slots[t] * bytes, v + t * v_stride, bytes);
    }
    return 0;
}

/* ---- attention ---- */

typedef struct {
    float *out;
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride; /* from one token or cached position to the next */
    int64_t tokens, kv_rows, sequences, heads, kv_heads, dim;
    const int32_t *cu_seqlens, *context_len;   /* new tokens are the last ones of their sequence's context */
    const int32_t *prefix_start, *block_table; /* packed: the row of position 0; paged otherwise */
    int64_t page_size, table_width;
} Attention;

/* Scratch of one block of query rows. `width` is the head dim rounded up to two vectors. */
typedef struct {
    int64_t width;
    float *q, *acc, *maximum, *sum;                /* a row: [dim], [width], 1, [LANES] */
    float *keys, *values, *transposed;             /* [TILE, width] twice, [width, TILE] */
    const float *key[TILE], *value[TILE];          /* one a position of the tile */
} Scratch;

static Scratch *scratch(const Attention *a, int64_t rows) {
    int64_t width = (a->dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    int64_t header = (sizeof(Scratch) + 63) / 64 * 64;
    Scratch *s = aligned_alloc(64, header + sizeof(float) * (rows * (2 * width + 2 * LANES) + 3 * TILE * width + 64));
    if (!s) return NULL;
    s->width = width;
    s->transposed = (float *)((char *)s + header);
    s->keys = s->transposed + TILE * width;
    s->values = s->keys + TILE * width;
    s->acc = s->values + TILE * width;
    s->q = s->acc + rows * width;
    s->sum = s->q + rows * width;
    s->maximum = s->sum + rows * LANES;
    memset(s->transposed, 0, sizeof(float) * 3 * TILE * width);
    return s;
}

/* Find the keys and values of `count` positions from `position` on; positions after them are never read. */
static int find_tile(const Attention *a, Scratch *s, int64_t sequence, int64_t kv_head, int64_t position, int count) {
    int64_t own = a->cu_seqlens[sequence];
    int64_t prefix = a->context_len[sequence] - (a->cu_seqlens[sequence + 1] - own);
    int64_t page = 0, offset = 0;
    if (a->block_table) page = position / a->page_size, offset = position % a->page_size;
    for (int j = 0; j < count; j++) {
        int64_t row;
        if (a->block_table) {
            if (page >= a->table_width) return 1;
            row = a->block_table[sequence * a->table_width + page] * a->page_size + offset;
            if (++offset == a->page_size) offset = 0, page++;
        } else {
            row = position + j < prefix ? a->prefix_start[sequence] + position + j : own + position + j - prefix;
        }
        if (row < 0 || row >= a->kv_rows) return 1;
        s->key[j] = a->k + row * a->k_stride + kv_head * a->dim;
        s->value[j] = a->v + row * a->v_stride + kv_head * a->dim;
    }
    return 0;
}

/* Rows of whole vectors, for head dims that are not: copies padded with zeros. */
static void pad_tile(Scratch *s, int64_t dim, int count) {
    for (int j = 0; j < count; j++) {
        s->key[j] = memcpy(s->keys + j * s->width, s->key[j], sizeof(float) * dim);
        s->value[j] = memcpy(s->values + j * s->width, s->value[j], sizeof(float) * dim);
    }
}

/* Keys as columns. Four rounds of interleaving row i with row i + 8 transpose 16 x 16. */
static void transpose_tile(Scratch *s, int64_t dim, int count) {
    for (int j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            V a[LANES], b[LANES];
            EACH_LANE a[l] = j + l < count ? load(s->key[j + l] + d) : splat(0);
#define ROUND(to, from) for (int i = 0; i < 8; i++) to[2 * i] = LOW(from[i], from[i + 8]), \
                                                    to[2 * i + 1] = HIGH(from[i], from[i + 8]);
            ROUND(b, a) ROUND(a, b) ROUND(b, a) ROUND(a, b)
            EACH_LANE store(s->transposed + (d + l) * TILE + j, a[l]);
        }
}

/* One tile for R query rows: scores, online softmax, then values, each row seeing its first `visible` keys. A tile of
 * which a row sees nothing leaves the row as it is. R only shares loads: a row's expression does not know of it. */
INLINE void attend_tile(const int R, const Scratch *s, int64_t dim, int64_t first, const int *visible) {
    const float *q = s->q + first * s->width;
    V score[4][GROUPS], acc[4][2];
    float p[4][TILE], rescale[4];
    int common = visible[0] < 0 ? 0 : visible[0]; /* rows ascend by position */

    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int g = 0; g < GROUPS; g++) score[r][g] = splat(0);
    for (int64_t d = 0; d < dim; d++)
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int g = 0; g < GROUPS; g++)
                score[r][g] = fmadd(splat(q[r * s->width + d]), load(s->transposed + d * TILE + g * LANES), score[r][g]);

    UNROLLED for (int r = 0; r < R; r++) {
        float *maximum = s->maximum + first + r, *sum = s->sum + (first + r) * LANES;
        V highest = splat(-INFINITY);
        UNROLLED for (int g = 0; g < GROUPS; g++) {
            score[r][g] = pick(LANE + g * LANES < visible[r], score[r][g], splat(-INFINITY));
            highest = largest(highest, score[r][g]);
        }
        float before = *maximum;
        *maximum = before > fold_max(highest) ? before : fold_max(highest);
        V scale = exp_(splat(before - *maximum)), total = load(sum) * scale;
        UNROLLED for (int g = 0; g < GROUPS; g++) {
            V e = exp_(score[r][g] - *maximum);
            store(p[r] + g * LANES, e);
            total += e;
        }
        store(sum, total);
        rescale[r] = scale[0];
    }

    for (int64_t e = 0; e < s->width; e += 2 * LANES) {
        float *out = s->acc + first * s->width + e;
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int h = 0; h < 2; h++) acc[r][h] = load(out + r * s->width + h * LANES) * rescale[r];
        for (int j = 0; j < common; j++)
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r][j]), load(s->value[j] + e + h * LANES), acc[r][h]);
        UNROLLED for (int r = 0; r < R; r++)
            for (int j = common; j < visible[r]; j++)
                UNROLLED for (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r][j]), load(s->value[j] + e + h * LANES), acc[r][h]);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int h = 0; h < 2; h++) store(out + r * s->width + h * LANES, acc[r][h]);
    }
}

/* `count` query tokens from row `token` at absolute position `position`, with the heads that share one kv head. */
static int attend_block(const Attention *a, Scratch *s, int64_t sequence, int64_t kv_head, int64_t token,
                        int64_t position, int64_t count) {
    int64_t group = a->heads / a->kv_heads, rows = count * group, width = s->width;
    float scale = (float)(1.0 / sqrt((double)a->dim));
    for (int64_t r = 0; r < rows; r++) {
        const float *q = a->q + (token + r / group) * a->q_stride + (kv_head * group + r % group) * a->dim;
        for (int64_t d = 0; d < a->dim; d++) s->q[r * width + d] = q[d] * scale;
        s->maximum[r] = -INFINITY;
    }
    memset(s->sum, 0, sizeof(float) * rows * LANES);
    memset(s->acc, 0, sizeof(float) * rows * width);
    for (int64_t tile = 0; tile < position + count; tile += TILE) {
        int keys = position + count - tile < TILE ? (int)(position + count - tile) : TILE;
        if (find_tile(a, s, sequence, kv_head, tile, keys)) return 1;
        if (a->dim != width) pad_tile(s, a->dim, keys);
        transpose_tile(s, a->dim, keys);
        for (int64_t r = 0; r < rows;) {
            int visible[4];
            for (int i = 0; i < 4; i++) {
                int64_t seen = position + (r + i) / group + 1 - tile;
                visible[i] = seen > keys ? keys : (int)seen;
            }
            if (rows - r >= 4) attend_tile(4, s, a->dim, r, visible), r += 4;
            else if (rows - r >= 2) attend_tile(2, s, a->dim, r, visible), r += 2;
            else attend_tile(1, s, a->dim, r, visible), r += 1;
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a->out + ((token + r / group) * a->heads + kv_head * group + r % group) * a->dim;
        float sum = fold_sum(load(s->sum + r * LANES));
        for (int64_t d = 0; d < a->dim; d++) out[d] = s->acc[r * width + d] / sum;
    }
    return 0;
}

/* Blocks of query tokens; rows after the last sequence are not written. */
int attention(const Attention *a, int64_t part, int64_t parts) {
    int64_t group = a->heads / a->kv_heads, size = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1, item = 0;
    Scratch *s = scratch(a, size * group);
    int error = !s;
    for (int64_t i = 0; i < a->sequences && !error; i++) {
        int64_t begin = a->cu_seqlens[i], end = a->cu_seqlens[i + 1];
        if (begin < 0 || end < begin || end > a->tokens || a->context_len[i] < end - begin) error = 1;
        for (int64_t token = begin; token < end && !error; token += size)
            for (int64_t h = 0; h < a->kv_heads && !error; h++, item++)
                if (item % parts == part)
                    error = attend_block(a, s, i, h, token, a->context_len[i] - (end - token),
                                         end - token < size ? end - token : size);
    }
    free(s);
    return error;
}

/* ---- log-probabilities and sampling ---- */

/* 16 of a row's logits divided by the temperature; -inf for what is not in the support, and past the row's end. */
INLINE V tempered(const float *x, int64_t column, int64_t n, float divisor, float threshold, const uint8_t *support) {
    V z = load_first(x + column, n - column, -INFINITY) / divisor;
    z = pick(z < threshold, splat(-INFINITY), z);
    if (support)
        for (int l = 0; l < LANES && column + l < n; l++)
            if (!(support[(column + l) / 8] >> (column + l) % 8 & 1)) z[l] = -INFINITY;
    return z;
}

/* Log-sum-exp of a row's support; `entropy` (nats) may be NULL. */
static float log_sum_exp(const float *x, int64_t n, float divisor, float threshold, const uint8_t *support,
                         float *entropy) {
    V highest = splat(-INFINITY), sum = splat(0), moment = splat(0);
    for (int64_t i = 0; i < n; i += LANES) highest = largest(highest, tempered(x, i, n, divisor, threshold, support));
    float maximum = fold_max(highest);
    for (int64_t i = 0; i < n; i += LANES) {
        V shifted = at_least(tempered(x, i, n, divisor, threshold, support) - maximum, -126.0f); /* p is 0 there */
        V p = exp_(shifted);
        sum += p;
        moment = fmadd(p, shifted, moment);
    }
    float total = fold_sum(sum), log_total = log_(splat(total))[0];
    if (entropy) *entropy = log_total - fold_sum(moment) / total;
    return maximum + log_total;
}

/* Per row; threshold, support and entropy may be NULL. */
void statistics(float *lse, float *sampled_lse, float *entropy, const float *logits, const float *temperature,
                const float *threshold, const uint8_t *support, int64_t rows, int64_t vocabulary,
                int64_t support_bytes) {
    for (int64_t row = 0; row < rows; row++, logits += vocabulary) {
        float divisor = temperature[row] > 0 ? temperature[row] : 1.0f, least = threshold ? threshold[row] : -INFINITY;
        const uint8_t *mask = support ? support + row * support_bytes : NULL;
        lse[row] = log_sum_exp(logits, vocabulary, 1.0f, -INFINITY, NULL, entropy ? entropy + row : NULL);
        sampled_lse[row] = divisor == 1.0f && least == -INFINITY && !mask
                               ? lse[row]
                               : log_sum_exp(logits, vocabulary, divisor, least, mask, NULL);
    }
}

INLINE void multiply(U a, uint32_t b, U *high, U *low) {
    U h, w;
    EACH_LANE {
        uint64_t product = (uint64_t)a[l] * b;
        h[l] = (uint32_t)(product >> 32), w[l] = (uint32_t)product;
    }
    *high = h, *low = w;
}

/* Philox4x32-10, 16 counters at a time: `philox.py`, word for word. */
INLINE void philox(U c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        U high0, low0, high1, low1;
        multiply(c[0], 0xD2511F53u, &high0, &low0);
        multiply(c[2], 0xCD9E8D57u, &high1, &low1);
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
    }
}

/* -log(-log1p(-v)) of v uniform in (0, 1). What 1 - v rounds away is added to its logarithm. */
INLINE V gumbel(U bits) {
    V v;
    EACH_LANE v[l] = (float)bits[l];
    v = at_most((v + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    V rest = 1.0f - v, lost = (1.0f - rest) - v;
    return -log_(-(log_(rest) + lost / rest));
}

/* Noise for the 64 columns from `column` on (a multiple of 64). */
INLINE void gumbel_columns(V noise[4], const int64_t *key, int64_t position, int64_t column) {
    U c[4];
    EACH_LANE c[0][l] = (uint32_t)position, c[1][l] = (uint32_t)(column / 4 + l), c[2][l] = (uint32_t)key[2],
              c[3][l] = (uint32_t)key[3];
    philox(c, (uint32_t)key[0], (uint32_t)key[1]);
    V a = gumbel(c[0]), b = gumbel(c[1]), d = gumbel(c[2]), e = gumbel(c[3]);
    V even0 = LOW(a, d), even1 = HIGH(a, d), odd0 = LOW(b, e), odd1 = HIGH(b, e);
    noise[0] = LOW(even0, odd0), noise[1] = HIGH(even0, odd0), noise[2] = LOW(even1, odd1), noise[3] = HIGH(even1, odd1);
}

/* Gumbel-max over each row's support, the lowest index on ties; temperature 0 takes the largest logit. */
void draw(int64_t *token, const float *logits, const float *temperature, const float *threshold, const int64_t *key,
          const int64_t *position, int64_t rows, int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++, logits += vocabulary, key += 4) {
        int greedy = !(temperature[row] > 0);
        float divisor = greedy ? 1.0f : temperature[row], least = greedy || !threshold ? -INFINITY : threshold[row];
        V best = splat(-INFINITY), noise[4] = {splat(0), splat(0), splat(0), splat(0)};
        I index = {0};
        for (int64_t column = 0; column < vocabulary; column += LANES) {
            if (!greedy && column % 64 == 0) gumbel_columns(noise, key, position[row], column);
            V value = tempered(logits, column, vocabulary, divisor, least, NULL) + noise[column / LANES % 4];
            index = (I)pick(value > best, (V)(LANE + (int32_t)column), (V)index);
            best = largest(value, best);
        }
        int winner = 0;
        EACH_LANE if (best[l] > best[winner] || (best[l] == best[winner] && index[l] < index[winner])) winner = l;
        token[row] = index[winner];
    }
}
