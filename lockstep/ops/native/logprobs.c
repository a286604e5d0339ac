/* Row statistics of logits, and the sampler's draw. Semantics: ops/logprobs/reference.py. */
#include "vector.h"

/* A vector of a row's logits divided by the temperature; -inf outside the support and past the row's end. */
INLINE V tempered(const float *x, int64_t column, int64_t n, float divisor, float threshold, const uint8_t *support) {
    V z = load_first(x + column, n - column, -INFINITY);
    if (divisor != 1.0f) z /= divisor;
    z = pick(z < threshold, splat(-INFINITY), z);
    if (support)
        for (int l = 0; l < LANES && column + l < n; l++)
            if (!(support[(column + l) / 8] >> (column + l) % 8 & 1)) z[l] = -INFINITY;
    return z;
}

/* Log-sum-exp of a row's support; `entropy` (nats) may be NULL. */
static float log_sum_exp(const float *x, int64_t n, float divisor, float threshold, const uint8_t *support,
                         float *entropy) {
    Sums highest = splat_sums(-INFINITY), sum = splat_sums(0), moment = splat_sums(0);
    for (int64_t i = 0; i < n; i += SUMS)
        UNROLLED (int at = 0; at < PARTS; at++) {
            V z = tempered(x, i + at * LANES, n, divisor, threshold, support);
            highest.part[at] = largest(highest.part[at], z);
        }
    float maximum = fold_max(highest);
    for (int64_t i = 0; i < n; i += SUMS)
        UNROLLED (int at = 0; at < PARTS; at++) {
            V z = tempered(x, i + at * LANES, n, divisor, threshold, support);
            V shifted = at_least(z - maximum, -126.0f), p = exp_(shifted); /* p is 0 there */
            sum.part[at] += p;
            moment.part[at] = fmadd(p, shifted, moment.part[at]);
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

/* Both log-probabilities of each row's target; the sampled one is 0 at temperature 0. Returns 1 if a target is outside
 * the vocabulary. */
int scores(float *sampled, float *model, const float *logits, const int64_t *target, const float *temperature,
           const float *lse, const float *sampled_lse, int64_t rows, int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++, logits += vocabulary) {
        if (target[row] < 0 || target[row] >= vocabulary) return 1;
        float logit = logits[target[row]];
        sampled[row] = temperature[row] > 0 ? logit / temperature[row] - sampled_lse[row] : 0.0f;
        model[row] = logit - lse[row];
    }
    return 0;
}

INLINE U high_product(U a, uint32_t b) {
    U r;
    EACH_LANE r[l] = (uint32_t)((uint64_t)a[l] * b >> 32);
    return r;
}

/* Philox4x32-10, a vector of counters at a time: `philox.py`, word for word. */
INLINE void philox(U c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        U high0 = high_product(c[0], 0xD2511F53u), high1 = high_product(c[2], 0xCD9E8D57u);
        U low0 = c[0] * 0xD2511F53u, low1 = c[2] * 0xCD9E8D57u;
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
    }
}

/* -log(-log1p(-v)) for v uniform in (0, 1). The logarithm of 1 - v is corrected for the rounding of 1 - v. */
INLINE V gumbel(U bits) {
    V v;
    EACH_LANE v[l] = (float)bits[l];
    v = at_most((v + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    V rest = 1.0f - v, lost = (1.0f - rest) - v;
    return -log_(-(log_(rest) + lost / rest));
}

/* Noise for the 4 * LANES columns from `column` on (a multiple of as many). */
INLINE void gumbel_columns(V noise[4], const int64_t *key, int64_t position, int64_t column) {
    const U zero = {0};
    U c[4] = {zero + (uint32_t)position, (U)LANE + (uint32_t)(column / 4)};
    c[2] = zero + (uint32_t)key[2], c[3] = zero + (uint32_t)key[3];
    philox(c, (uint32_t)key[0], (uint32_t)key[1]);
    V a = gumbel(c[0]), b = gumbel(c[1]), d = gumbel(c[2]), e = gumbel(c[3]);
    V even0 = LOW(a, d), even1 = HIGH(a, d), odd0 = LOW(b, e), odd1 = HIGH(b, e);
    noise[0] = LOW(even0, odd0), noise[1] = HIGH(even0, odd0);
    noise[2] = LOW(even1, odd1), noise[3] = HIGH(even1, odd1);
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
            if (!greedy && column % (4 * LANES) == 0) gumbel_columns(noise, key, position[row], column);
            V value = tempered(logits, column, vocabulary, divisor, least, NULL) + noise[column / LANES % 4];
            EACH_LANE index[l] = value[l] > best[l] ? (int32_t)column + l : index[l];
            best = largest(value, best);
        }
        int winner = 0;
        EACH_LANE if (best[l] > best[winner] || (best[l] == best[winner] && index[l] < index[winner])) winner = l;
        token[row] = index[winner];
    }
}
