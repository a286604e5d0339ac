/* Rows times 64 columns: the product behind `linear` and attention's scores.
 *
 * An element is one accumulator from 0 over ascending inner index (contract C1), so it does not matter how many rows
 * share the loads of a column.
 */
#ifndef LOCKSTEP_PRODUCT_H
#define LOCKSTEP_PRODUCT_H

#include "vector.h"

enum { TILE = 64, GROUPS = TILE / LANES };
enum { HELD = LANES == 8 ? 2 : 4 }; /* vectors of columns whose sums for 4 rows fit AVX2's 16 registers, or 32 */

/* columns[d][j] = row[j][d] for `count` rows of `dim` elements; [dim rounded up to LANES, TILE]. Interleaving rows i
 * and i + LANES / 2, as often as LANES is halved to 1, transposes a block of as many rows as columns. */
static void transpose_rows(float *columns, const float *const *row, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            V a[LANES], b[LANES];
            UNROLLED (int i = 0; i < LANES; i++)
                a[i] = j + i < count ? load_first(row[j + i] + d, dim - d, 0) : splat(0);
#define ROUND(to, from) \
    UNROLLED (int i = 0; i < LANES / 2; i++) \
        to[2 * i] = LOW(from[i], from[i + LANES / 2]), to[2 * i + 1] = HIGH(from[i], from[i + LANES / 2]);
            ROUND(b, a) ROUND(a, b)
#if LANES > 4
            ROUND(b, a)
#endif
#if LANES > 8
            ROUND(a, b)
#endif
#undef ROUND
            UNROLLED (int i = 0; i < LANES; i++) store(columns + (d + i) * TILE + j, LANES == 8 ? b[i] : a[i]);
        }
}

typedef struct {
    const float *at;
    int64_t row, step; /* elements from one row to the next, and from one inner index to the next */
} Rows;

INLINE void multiply_rows(const int R, float *out, int64_t out_stride, Rows x, const float *columns, int64_t dim,
                          int added) {
    for (const float *end = columns + TILE; columns < end; columns += HELD * LANES, out += HELD * LANES) {
        V sum[4][HELD];
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < HELD; h++) sum[r][h] = added ? load(out + r * out_stride + h * LANES) : splat(0);
        for (int64_t d = 0; d < dim; d++) {
            V column[HELD];
            UNROLLED (int h = 0; h < HELD; h++) column[h] = load_once(columns + d * TILE + h * LANES);
            UNROLLED (int r = 0; r < R; r++)
                UNROLLED (int h = 0; h < HELD; h++)
                    sum[r][h] = fmadd(splat(x.at[r * x.row + d * x.step]), column[h], sum[r][h]);
        }
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < HELD; h++) store(out + r * out_stride + h * LANES, sum[r][h]);
    }
}

/* out[r][j] = (added ? out[r][j] : 0) + the sum over d of x[r][d] * columns[d][j]; all TILE columns are written. */
static __attribute__((noinline)) void multiply(float *out, int64_t out_stride, Rows x, const float *columns,
                                               int64_t dim, int64_t rows, int added) {
    int64_t r = 0;
#define TAKE(R) \
    for (; rows - r >= R; r += R, out += R * out_stride, x.at += R * x.row) \
        multiply_rows(R, out, out_stride, x, columns, dim, added);
    TAKE(4) TAKE(2) TAKE(1)
#undef TAKE
}

#endif
