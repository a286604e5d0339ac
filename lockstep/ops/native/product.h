/* Rows times 64 columns: the product behind `linear` and attention's scores.
 *
 * An element is one accumulator from 0 over ascending inner index (contract C1), so it does not matter how many rows
 * share the loads of a column.
 */
#ifndef LOCKSTEP_PRODUCT_H
#define LOCKSTEP_PRODUCT_H

#include "vector.h"

enum { TILE = 64, GROUPS = TILE / LANES };

/* columns[d][j] = row[j][d] for `count` rows of `dim` elements; [dim rounded up to LANES, TILE]. Interleaving rows i
 * and i + 8 four times transposes a 16 x 16 block. */
static void transpose_rows(float *columns, const float *const *row, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            V a[LANES], b[LANES];
            UNROLLED (int i = 0; i < LANES; i++)
                a[i] = j + i < count ? load_first(row[j + i] + d, dim - d, 0) : splat(0);
#define ROUND(to, from) \
    UNROLLED (int i = 0; i < 8; i++) to[2 * i] = LOW(from[i], from[i + 8]), to[2 * i + 1] = HIGH(from[i], from[i + 8]);
            ROUND(b, a) ROUND(a, b) ROUND(b, a) ROUND(a, b)
#undef ROUND
            UNROLLED (int i = 0; i < LANES; i++) store(columns + (d + i) * TILE + j, a[i]);
        }
}

typedef struct {
    const float *at;
    int64_t row, step; /* elements from one row to the next, and from one inner index to the next */
} Rows;

INLINE void multiply_rows(const int R, float *out, int64_t out_stride, Rows x, const float *columns, int64_t dim,
                          int add) {
    V sum[4][GROUPS];
    UNROLLED (int r = 0; r < R; r++)
        UNROLLED (int g = 0; g < GROUPS; g++) sum[r][g] = add ? load(out + r * out_stride + g * LANES) : splat(0);
    for (int64_t d = 0; d < dim; d++) {
        V column[GROUPS];
        UNROLLED (int g = 0; g < GROUPS; g++) column[g] = load_once(columns + d * TILE + g * LANES);
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int g = 0; g < GROUPS; g++)
                sum[r][g] = fmadd(splat(x.at[r * x.row + d * x.step]), column[g], sum[r][g]);
    }
    UNROLLED (int r = 0; r < R; r++)
        UNROLLED (int g = 0; g < GROUPS; g++) store(out + r * out_stride + g * LANES, sum[r][g]);
}

/* out[r][j] = (add ? out[r][j] : 0) + the sum over d of x[r][d] * columns[d][j]; all TILE columns are written. */
static __attribute__((noinline)) void multiply(float *out, int64_t out_stride, Rows x, const float *columns,
                                               int64_t dim, int64_t rows, int add) {
    int64_t r = 0;
#define TAKE(R) \
    for (; rows - r >= R; r += R, out += R * out_stride, x.at += R * x.row) \
        multiply_rows(R, out, out_stride, x, columns, dim, add);
    TAKE(4) TAKE(2) TAKE(1)
#undef TAKE
}

#endif
