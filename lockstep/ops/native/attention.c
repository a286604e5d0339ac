/* Causal attention over packed segments or a paged cache: one body for training, prefill and decode.
 *
 * A query row takes its keys in tiles of 64 at absolute positions, ascending. Scores and outputs are one accumulator an
 * element, over ascending head dim and ascending key; the softmax is online, its sum 16 partial sums by key position.
 * So a row's bits depend on itself and on the keys it sees: which rows share a block, how many, and where keys lie do
 * not matter. Keys behind a row's mask reach no sum (not even as zeros, which would turn -0 or NaN).
 */
#include "vector.h"

enum { TILE = 64, GROUPS = TILE / LANES, BLOCK_ROWS = 32 };

typedef struct {
    float *out;
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride; /* elements from one token or cached position to the next */
    int64_t tokens, kv_rows, sequences, heads, kv_heads, dim;
    const int32_t *cu_seqlens, *context_len; /* the new tokens are the last ones of their sequence's context */
    const int32_t *prefix_start;             /* packed: row of position 0; what is not new lies there */
    const int32_t *block_table;              /* paged: [sequences, table_width]; NULL when packed */
    int64_t page_size, table_width;
} Attention;

/* Of one block of query rows. `width` is the head dim rounded up to two vectors. */
typedef struct {
    int64_t width;
    float *q, *acc, *score;                    /* [rows, width] twice, [rows, TILE] */
    float *sum, *maximum, *rescale;            /* [rows, LANES], [rows] twice */
    float *columns, *keys, *values;            /* [width, TILE]; [TILE, width] twice, for head dims that need padding */
    const float *key[TILE], *value[TILE];
} Scratch;

static Scratch *new_scratch(const Attention *a, int64_t rows) {
    int64_t width = (a->dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    int64_t header = (sizeof(Scratch) + 63) / 64 * 64, padded = (rows + LANES - 1) / LANES * LANES;
    int64_t floats = 3 * TILE * width + padded * (2 * width + TILE + LANES + 2);
    Scratch *s = aligned_alloc(64, (header + sizeof(float) * floats + 63) / 64 * 64);
    if (!s) return NULL;
    s->width = width;
    s->columns = (float *)((char *)s + header);
    s->keys = s->columns + TILE * width;
    s->values = s->keys + TILE * width;
    s->q = s->values + TILE * width;
    s->acc = s->q + padded * width;
    s->score = s->acc + padded * width;
    s->sum = s->score + padded * TILE;
    s->maximum = s->sum + padded * LANES;
    s->rescale = s->maximum + padded;
    memset(s->columns, 0, sizeof(float) * 3 * TILE * width);
    memset(s->maximum, 0, sizeof(float) * padded);
    return s;
}

/* Locate `count` keys and values from position `tile` on, run by run of neighbouring rows. 1 when one lies outside. */
static int find_tile(const Attention *a, Scratch *s, int64_t sequence, int64_t kv_head, int64_t tile, int64_t count) {
    int64_t own = a->cu_seqlens[sequence];
    int64_t prefix = a->context_len[sequence] - (a->cu_seqlens[sequence + 1] - own);
    for (int64_t j = 0, run; j < count; j += run) {
        int64_t position = tile + j, row = own + position - prefix;
        run = count - j;
        if (a->block_table) {
            int64_t page = position / a->page_size, offset = position % a->page_size;
            if (page >= a->table_width) return 1;
            row = a->block_table[sequence * a->table_width + page] * a->page_size + offset;
            if (run > a->page_size - offset) run = a->page_size - offset;
        } else if (position < prefix) {
            row = a->prefix_start[sequence] + position;
            if (run > prefix - position) run = prefix - position;
        }
        if (row < 0 || row + run > a->kv_rows) return 1;
        for (int64_t i = 0; i < run; i++) {
            s->key[j + i] = a->k + (row + i) * a->k_stride + kv_head * a->dim;
            s->value[j + i] = a->v + (row + i) * a->v_stride + kv_head * a->dim;
        }
    }
    return 0;
}

/* Copies that are whole vectors, padded with zeros. */
static void pad_tile(Scratch *s, int64_t dim, int64_t count) {
    for (int64_t j = 0; j < count; j++) {
        s->key[j] = memcpy(s->keys + j * s->width, s->key[j], sizeof(float) * dim);
        s->value[j] = memcpy(s->values + j * s->width, s->value[j], sizeof(float) * dim);
    }
}

/* Keys as columns. Interleaving row i with row i + 8, four times, transposes 16 x 16. */
static void transpose_tile(Scratch *s, int64_t count) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < s->width; d += LANES) {
            V a[LANES], b[LANES];
            UNROLLED (int i = 0; i < LANES; i++) a[i] = j + i < count ? load(s->key[j + i] + d) : splat(0);
#define ROUND(to, from) \
    UNROLLED (int i = 0; i < 8; i++) to[2 * i] = LOW(from[i], from[i + 8]), to[2 * i + 1] = HIGH(from[i], from[i + 8]);
            ROUND(b, a) ROUND(a, b) ROUND(b, a) ROUND(a, b)
            UNROLLED (int i = 0; i < LANES; i++) store(s->columns + (d + i) * TILE + j, a[i]);
        }
}

/* Scores of R rows: rows only share loads, none knows of R. */
INLINE void score_rows(const int R, const Scratch *s, int64_t dim, int64_t first) {
    const float *q = s->q + first * s->width;
    V score[4][GROUPS];
    UNROLLED (int r = 0; r < R; r++) UNROLLED (int g = 0; g < GROUPS; g++) score[r][g] = splat(0);
    for (int64_t d = 0; d < dim; d++)
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int g = 0; g < GROUPS; g++)
                score[r][g] = fmadd(splat(q[r * s->width + d]), load(s->columns + d * TILE + g * LANES), score[r][g]);
    UNROLLED (int r = 0; r < R; r++)
        UNROLLED (int g = 0; g < GROUPS; g++) store(s->score + (first + r) * TILE + g * LANES, score[r][g]);
}

/* Online softmax of the first `rows` rows; row r sees visible[r] keys. A tile of which a row sees nothing leaves it as
 * it was: the maximum stays, the sum is multiplied by exp(0) = 1 and grows by zeros. */
static void softmax_rows(const Scratch *s, int64_t rows, const int *visible) {
    for (int64_t r = 0; r < rows; r++) {
        float *score = s->score + r * TILE, before = s->maximum[r];
        V highest = splat(-INFINITY);
        UNROLLED (int g = 0; g < GROUPS; g++) {
            V masked = pick(LANE + g * LANES < visible[r], load(score + g * LANES), splat(-INFINITY));
            store(score + g * LANES, masked);
            highest = largest(highest, masked);
        }
        float maximum = fold_max(highest);
        s->maximum[r] = maximum > before ? maximum : before;
        s->rescale[r] = before - s->maximum[r];
    }
    for (int64_t r = 0; r < rows; r += LANES) store(s->rescale + r, exp_(load(s->rescale + r)));
    for (int64_t r = 0; r < rows; r++) {
        float *score = s->score + r * TILE;
        V sum = load(s->sum + r * LANES) * s->rescale[r];
        UNROLLED (int g = 0; g < GROUPS; g++) {
            V p = exp_(load(score + g * LANES) - s->maximum[r]);
            store(score + g * LANES, p);
            sum += p;
        }
        store(s->sum + r * LANES, sum);
    }
}

/* Add R rows' share of the values. `visible` ascends. */
INLINE void add_values(const int R, const Scratch *s, int64_t first, const int *visible) {
    const float *p = s->score + first * TILE;
    int common = visible[0];
    for (int64_t d = 0; d < s->width; d += 2 * LANES) {
        float *out = s->acc + first * s->width + d;
        V acc[4][2];
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < 2; h++) acc[r][h] = load(out + r * s->width + h * LANES) * s->rescale[first + r];
        for (int j = 0; j < common; j++)
            UNROLLED (int r = 0; r < R; r++)
                UNROLLED (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r * TILE + j]), load(s->value[j] + d + h * LANES), acc[r][h]);
        UNROLLED (int r = 0; r < R; r++)
            for (int j = common; j < visible[r]; j++)
                UNROLLED (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r * TILE + j]), load(s->value[j] + d + h * LANES), acc[r][h]);
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < 2; h++) store(out + r * s->width + h * LANES, acc[r][h]);
    }
}

/* Query rows by fours, twos and ones. */
#define BY_ROWS(rows, function, ...)                                            \
    for (int64_t r = 0; r < rows;)                                              \
        if (rows - r >= 4) function(4, __VA_ARGS__), r += 4;                    \
        else if (rows - r >= 2) function(2, __VA_ARGS__), r += 2;               \
        else function(1, __VA_ARGS__), r += 1;

static __attribute__((noinline)) void tile_scores(const Scratch *s, int64_t dim, int64_t rows) {
    BY_ROWS(rows, score_rows, s, dim, r)
}

static __attribute__((noinline)) void tile_values(const Scratch *s, int64_t rows, const int *visible) {
    BY_ROWS(rows, add_values, s, r, visible + r)
}

/* `count` query tokens from row `token` on, the first at absolute position `position`, with the heads of one kv head. */
static int attend_block(const Attention *a, Scratch *s, int *visible, int64_t sequence, int64_t kv_head, int64_t token,
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
        int64_t keys = position + count - tile < TILE ? position + count - tile : TILE;
        if (find_tile(a, s, sequence, kv_head, tile, keys)) return 1;
        if (a->dim != width) pad_tile(s, a->dim, keys);
        transpose_tile(s, keys);
        for (int64_t r = 0; r < rows; r++) {
            int64_t seen = position + r / group + 1 - tile;
            visible[r] = seen < 0 ? 0 : seen < keys ? (int)seen : (int)keys;
        }
        tile_scores(s, a->dim, rows);
        softmax_rows(s, rows, visible);
        tile_values(s, rows, visible);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a->out + ((token + r / group) * a->heads + kv_head * group + r % group) * a->dim;
        float sum = fold_sum(load(s->sum + r * LANES));
        for (int64_t d = 0; d < a->dim; d++) out[d] = s->acc[r * width + d] / sum;
    }
    return 0;
}

/* Every `parts`-th block of query tokens, from block `part` on; any split gives the same bits. Rows after the last
 * sequence are zeros. Returns 1 when a length, page or row lies outside its table. */
int attention(const Attention *a, int64_t part, int64_t parts) {
    int64_t group = a->heads / a->kv_heads, size = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1, block = 0;
    Scratch *s = new_scratch(a, size * group);
    int *visible = malloc(sizeof(int) * size * group), error = !s || !visible;
    for (int64_t i = 0; i < a->sequences && !error; i++) {
        int64_t begin = a->cu_seqlens[i], end = a->cu_seqlens[i + 1];
        if (begin < 0 || end < begin || end > a->tokens || a->context_len[i] < end - begin) error = 1;
        for (int64_t token = begin; token < end && !error; token += size)
            for (int64_t h = 0; h < a->kv_heads && !error; h++, block++)
                if (block % parts == part)
                    error = attend_block(a, s, visible, i, h, token, a->context_len[i] - (end - token),
                                         end - token < size ? end - token : size);
    }
    if (part == 0 && !error) {
        int64_t end = a->cu_seqlens[a->sequences], row = a->heads * a->dim;
        memset(a->out + end * row, 0, sizeof(float) * (a->tokens - end) * row);
    }
    free(visible);
    free(s);
    return error;
}
