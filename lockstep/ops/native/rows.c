/* Row operators, writes of keys and values to the cache, and what the loader asks of the library. */
#include "activation.h"

/* The checksum of the sources, and whether this machine has the instructions for which they were compiled. */
uint32_t kernels_checksum(void) { return SOURCE_CHECKSUM; }

int kernels_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#define HAS(feature) if (!__builtin_cpu_supports(feature)) return 0;
#ifdef __AVX2__
    HAS("avx2") HAS("fma") HAS("bmi") HAS("bmi2")
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

INLINE float rms_scale(const float *x, int64_t n, float eps) {
    Sums sum = splat_sums(0);
    for (int64_t i = 0; i < n; i += SUMS)
        UNROLLED (int p = 0; p < PARTS; p++) {
            V v = load_first(x + i + p * LANES, n - i - p * LANES, 0);
            sum.part[p] = fmadd(v, v, sum.part[p]);
        }
    return 1.0f / sqrtf(fold_sum(sum) / (float)n + eps);
}

/* [rows, dim] */
void rms_norm(RowJob *j) {
    int64_t dim = j->size[0];
    const float *restrict weight = j->at[2];
    EACH_ROW(j) {
        const float *restrict x = (const float *)j->at[1] + row * dim;
        float *restrict out = (float *)j->at[0] + row * dim, scale = rms_scale(x, dim, j->eps);
        for (int64_t i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* [tokens, heads, dim] from [tokens, stride]. If the norm weights are NULL, heads are only rotated. */
void qk_norm_rope(RowJob *j) {
    int64_t stride = j->size[0], heads = j->size[1], kv_heads = j->size[2], dim = j->size[3], half = dim / 2;
    const float *q_weight = j->at[2], *k_weight = j->at[3];
    EACH_ROW(j) {
        const float *x = (const float *)j->at[1] + row * stride, *cos_sin = (const float *)j->at[4] + row * dim;
        float *out = (float *)j->at[0] + row * (heads + kv_heads) * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++, x += dim, out += dim) {
            const float *weight = h < heads ? q_weight : k_weight;
            float scale = weight ? rms_scale(x, dim, j->eps) : 1.0f;
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t n = half - i;
                V a = load_first(x + i, n, 0) * scale, b = load_first(x + half + i, n, 0) * scale;
                if (weight) a *= load_first(weight + i, n, 0), b *= load_first(weight + half + i, n, 0);
                V c = load_first(cos_sin + i, n, 0), s = load_first(cos_sin + half + i, n, 0);
                store_first(out + i, a * c - b * s, n);
                store_first(out + half + i, b * c + a * s, n);
            }
        }
    }
}

/* One library call per element, never its vector version. (torch's cos and sin wake all threads for a few hundred.) */
void rope_table(float *out, const int64_t *positions, const float *inv_freq, int64_t tokens, int64_t half) {
    for (int64_t t = 0; t < tokens; t++, out += 2 * half)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[t] * inv_freq[i];
            out[i] = cosf(angle), out[half + i] = sinf(angle);
        }
}

/* [rows, dim] from [rows, 2 * dim] */
void silu_mul(RowJob *j) {
    int64_t dim = j->size[0], activation = j->size[1];
    EACH_ROW(j) {
        const float *gate_up = (const float *)j->at[1] + row * 2 * dim;
        float *out = (float *)j->at[0] + row * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            V gate = load_first(gate_up + i, dim - i, 0), up = load_first(gate_up + dim + i, dim - i, 0);
            Gated of = gated(activation, gate, up);
            store_first(out + i, of.gate / (exp_(-of.x) + 1.0f) * of.up, dim - i);
        }
    }
}

/* Copy rows of `bytes` bytes, `k_stride` and `v_stride` bytes apart, to slots of two caches. */
int write_kv(const char *k, const char *v, char *k_cache, char *v_cache, const int64_t *slots, int64_t tokens,
             int64_t cache_rows, int64_t k_stride, int64_t v_stride, int64_t bytes) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0 || slots[t] >= cache_rows) return 1;
        memcpy(k_cache + slots[t] * bytes, k + t * k_stride, bytes);
        memcpy(v_cache + slots[t] * bytes, v + t * v_stride, bytes);
    }
    return 0;
}
