/* Matrix products. */
#include "product.h"

enum { CHUNK = 512, DEPTH = 128 }; /* rows and inner indices per packed block of columns, sized for the caches */

typedef struct {
    float *out; /* [rows, columns] = a times b */
    const float *a, *b; /* [rows, dim]; [dim, columns], or its transpose */
    int64_t a_row, a_step, b_stride, transposed, rows, columns, dim;
    int64_t next, error; /* shared by the threads */
} Product;

/* Pack columns `column` to `column + count` of b over `depth` inner indices. */
static void pack(float *tile, const Product *p, int64_t column, int64_t count, int64_t inner, int64_t depth) {
    const float *row[TILE];
    if (p->transposed) {
        for (int64_t j = 0; j < count; j++) row[j] = p->b + (column + j) * p->b_stride + inner;
        transpose_rows(tile, row, count, depth);
    } else {
        for (int64_t d = 0; d < depth; d++)
            memcpy(tile + d * TILE, p->b + (inner + d) * p->b_stride + column, sizeof(float) * count);
    }
}

void product(Product *p) {
    int64_t piece = 0, mine = claim(&p->next);
    float *tile = aligned_alloc(64, sizeof(float) * (DEPTH + CHUNK) * TILE), *edge = tile + DEPTH * TILE;
    if (!tile) fail(&p->error), mine = -1;
    else if (p->columns % TILE) memset(tile, 0, sizeof(float) * DEPTH * TILE);
    for (int64_t n = 0; n < p->columns; n += TILE)
        for (int64_t first = 0; first < p->rows; first += CHUNK) {
            if (piece++ != mine) continue;
            int64_t count = smaller(p->columns - n, TILE), size = smaller(p->rows - first, CHUNK);
            float *target = p->out + first * p->columns + n;
            for (int64_t d = 0; d == 0 || d < p->dim; d += DEPTH) { /* a product of depth 0 is zeros */
                int64_t depth = smaller(p->dim - d, DEPTH);
                Rows x = {p->a + first * p->a_row + d * p->a_step, p->a_row, p->a_step};
                pack(tile, p, n, count, d, depth);
                multiply(count == TILE ? target : edge, count == TILE ? p->columns : TILE, x, tile, depth, size, d > 0);
            }
            for (int64_t r = 0; count < TILE && r < size; r++)
                memcpy(target + r * p->columns, edge + r * TILE, sizeof(float) * count);
            mine = claim(&p->next);
        }
    free(tile);
}
