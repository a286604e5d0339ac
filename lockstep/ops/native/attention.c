/* Causal attention over packed segments or a paged cache: one body for training, prefill and decode.
 *
 * A query row takes its keys in tiles of 64 at absolute positions, ascending. Each element of scores and outputs is one
 * accumulator, over ascending head dim or key; the softmax is online, its sum 16 partial sums by key position. It
 * begins afresh every 4,096 keys, and these splits are merged left to right.
 * So a row's bits depend only on itself and the keys it sees, not on where keys are or which rows share a block.
 * Neighbours that see the same keys (tokens of a sequence, samples of a prompt) load them once. Keys behind a row's
 * mask are in no sum, not even as zeros: they may be NaN. Tiles before all windows are skipped, and their pages are not
 * looked up. A sink joins the softmax last.
 */
#include "product.h"

enum { BLOCK_ROWS = 32, SPLIT = 4096 };

typedef struct {
    float *out;
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride; /* elements from one token or cached position to the next */
    int64_t tokens, kv_rows, sequences, heads, kv_heads, dim;
    const int32_t *cu_seqlens, *context_len; /* the new tokens are the last ones of their sequence's context */
    const int32_t *prefix_start;             /* packed: row of position 0, where the context before the new tokens is */
    const int32_t *block_table;              /* paged: [sequences, table_width]; NULL if packed */
    int64_t page_size, table_width;
    const float *sinks; /* [heads]; NULL: none */
    int64_t window;     /* 0: none */
    double scale, softcap; /* softcap 0: none */
    int64_t next, error; /* shared by the threads; error: 1 if a length, page or row is out of bounds */
} Attention;

/* For one block of query tokens; a row is a token and one of the heads of a kv head. */
typedef struct {
    int64_t width;                             /* head dim rounded up to two vectors */
    float *q, *acc, *score;                    /* [rows, width] twice, [rows, TILE] */
    float *sum, *maximum, *rescale;            /* [rows, SUMS], [rows] twice */
    float *total_acc, *total_sum, *total_max;  /* over the completed splits, like acc, sum and maximum */
    float *columns, *values;                   /* [width, TILE]; [TILE, width], for head dims that need padding */
    int32_t *hidden, *visible;                 /* [rows]: a row sees the tile's keys in [hidden, visible) */
    int64_t sequence[BLOCK_ROWS], position[BLOCK_ROWS]; /* of each token */
    const float *key[TILE], *value[TILE];
} Scratch;

static Scratch *new_scratch(const Attention *a, int64_t rows) {
    int64_t width = round_up(a->dim, 2 * LANES);
    int64_t header = round_up(sizeof(Scratch), 64), padded = round_up(rows, LANES) + LANES;
    int64_t floats = 2 * TILE * width + padded * (3 * width + TILE + 2 * SUMS + 5);
    Scratch *s = aligned_alloc(64, round_up(header + sizeof(float) * floats, 64));
    if (!s) return NULL;
    s->width = width;
    s->columns = (float *)((char *)s + header);
    s->values = s->columns + TILE * width;
    s->q = s->values + TILE * width;
    s->acc = s->q + padded * width;
    s->score = s->acc + padded * width;
    s->sum = s->score + padded * TILE;
    s->maximum = s->sum + padded * SUMS;
    s->rescale = s->maximum + padded;
    s->total_acc = s->rescale + padded;
    s->total_sum = s->total_acc + padded * width;
    s->total_max = s->total_sum + padded * SUMS;
    s->visible = (int32_t *)(s->total_max + padded);
    s->hidden = s->visible + padded;
    memset(s->columns, 0, sizeof(float) * 2 * TILE * width);
    memset(s->rescale, 0, sizeof(float) * padded);
    return s;
}

static int64_t prefix_of(const Attention *a, int64_t sequence) {
    return a->context_len[sequence] - (a->cu_seqlens[sequence + 1] - a->cu_seqlens[sequence]);
}

/* The first position that a query at `position` sees. */
static int64_t first_key(const Attention *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Locate the keys and values `from` to `count` of the tile at position `tile`, in runs of neighbouring rows; the first
 * of them stands in for those before. Returns 1 if one is out of bounds. */
static int find_tile(const Attention *a, Scratch *s, int64_t sequence, int64_t kv_head, int64_t tile, int64_t from,
                     int64_t count) {
    int64_t own = a->cu_seqlens[sequence], prefix = prefix_of(a, sequence);
    for (int64_t j = from, run; j < count; j += run) {
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
    for (int64_t j = 0; j < from; j++) s->key[j] = s->key[from], s->value[j] = s->value[from];
    return 0;
}

/* Whether token `t` sees a key of a tile. */
static int sees(const Attention *a, const Scratch *s, int64_t t, int64_t tile) {
    return s->position[t] >= tile && first_key(a, s->position[t]) < tile + TILE;
}

/* Whether token `t` has the keys of a tile in the same place as token t - 1: both are of one sequence, or both see a
 * whole tile of a prefix that their sequences share. */
static int same_tile(const Attention *a, const Scratch *s, int64_t t, int64_t tile) {
    int64_t i = s->sequence[t - 1], j = s->sequence[t], end = tile + TILE;
    if (i == j) return 1;
    if (s->position[t - 1] < end - 1 || s->position[t] < end - 1) return 0;
    if (!a->block_table)
        return a->prefix_start[i] == a->prefix_start[j] && end <= prefix_of(a, i) && end <= prefix_of(a, j);
    int64_t first = tile / a->page_size, last = (end - 1) / a->page_size;
    const int32_t *table = a->block_table + first;
    return last < a->table_width &&
           !memcmp(table + i * a->table_width, table + j * a->table_width, sizeof(int32_t) * (last - first + 1));
}

/* Copy values into whole vectors, padded with zeros. */
static void pad_values(Scratch *s, int64_t dim, int64_t count) {
    for (int64_t j = 0; j < count; j++)
        s->value[j] = memcpy(s->values + j * s->width, s->value[j], sizeof(float) * dim);
}

/* Online softmax of `rows` rows from `first` on; `windowed` is 0 if no row's window begins in the tile. */
INLINE void softmax_rows(const int windowed, const Scratch *s, int64_t first, int64_t rows) {
    for (int64_t r = first; r < first + rows; r++) {
        float *score = s->score + r * TILE, before = s->maximum[r];
        Sums highest = splat_sums(-INFINITY);
        UNROLLED (int g = 0; g < GROUPS; g++) {
            I key = LANE + g * LANES;
            I seen = windowed ? (key >= s->hidden[r]) & (key < s->visible[r]) : key < s->visible[r];
            V masked = pick(seen, load(score + g * LANES), splat(-INFINITY));
            store(score + g * LANES, masked);
            highest.part[g % PARTS] = largest(highest.part[g % PARTS], masked);
        }
        float maximum = fold_max(highest);
        s->maximum[r] = maximum > before ? maximum : before;
        s->rescale[r] = before - s->maximum[r];
    }
    for (int64_t r = first; r < first + rows; r += LANES) store(s->rescale + r, exp_(load(s->rescale + r)));
    for (int64_t r = first; r < first + rows; r++) {
        float *score = s->score + r * TILE;
        Sums sum = load_sums(s->sum + r * SUMS);
        UNROLLED (int p = 0; p < PARTS; p++) sum.part[p] *= s->rescale[r];
        UNROLLED (int g = 0; g < GROUPS; g++) {
            V p = exp_(load(score + g * LANES) - s->maximum[r]);
            store(score + g * LANES, p);
            sum.part[g % PARTS] += p;
        }
        store_sums(s->sum + r * SUMS, sum);
    }
}

/* Add the values, weighted, to the accumulators of R rows. */
INLINE void add_values(const int R, const int windowed, const Scratch *s, int64_t first) {
    const float *p = s->score + first * TILE;
    const int32_t *hidden = s->hidden + first, *visible = s->visible + first; /* the latter ascends */
    int begin = hidden[0], common = visible[0];
    if (!windowed) begin = 0;
    for (int r = 1; windowed && r < R; r++) begin = hidden[r] > begin ? hidden[r] : begin;
    int after = common > begin ? common : begin;
    for (int64_t d = 0; d < s->width; d += 2 * LANES) {
        float *out = s->acc + first * s->width + d;
        V acc[4][2];
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < 2; h++) acc[r][h] = load(out + r * s->width + h * LANES) * s->rescale[first + r];
        UNROLLED (int r = 0; windowed && r < R; r++)
            for (int j = hidden[r]; j < begin && j < visible[r]; j++)
                UNROLLED (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r * TILE + j]), load(s->value[j] + d + h * LANES), acc[r][h]);
        for (int j = begin; j < common; j++) {
            V value[2] = {load_once(s->value[j] + d), load_once(s->value[j] + d + LANES)};
            UNROLLED (int r = 0; r < R; r++)
                UNROLLED (int h = 0; h < 2; h++) acc[r][h] = fmadd(splat(p[r * TILE + j]), value[h], acc[r][h]);
        }
        UNROLLED (int r = 0; r < R; r++)
            for (int j = after; j < visible[r]; j++)
                UNROLLED (int h = 0; h < 2; h++)
                    acc[r][h] = fmadd(splat(p[r * TILE + j]), load(s->value[j] + d + h * LANES), acc[r][h]);
        UNROLLED (int r = 0; r < R; r++)
            UNROLLED (int h = 0; h < 2; h++) store(out + r * s->width + h * LANES, acc[r][h]);
    }
}

INLINE void add_rows(const int windowed, const Scratch *s, int64_t first, int64_t rows) {
    int64_t r = first, end = first + rows;
    for (; end - r >= 4; r += 4) add_values(4, windowed, s, r);
    for (; end - r >= 2; r += 2) add_values(2, windowed, s, r);
    for (; end - r >= 1; r += 1) add_values(1, windowed, s, r);
}

static __attribute__((noinline)) void tile_values(const Scratch *s, int64_t first, int64_t rows) {
    add_rows(0, s, first, rows);
}

static __attribute__((noinline)) void windowed_values(const Scratch *s, int64_t first, int64_t rows) {
    add_rows(1, s, first, rows);
}

/* Replace scores x by softcap * tanh(x / softcap). */
static void cap_scores(const Attention *a, float *score, int64_t count) {
    float cap = (float)a->softcap;
    for (int64_t i = 0; i < count; i += LANES) store(score + i, cap * tanh_(load(score + i) / cap));
}

/* Process a tile for tokens `t` to `end` of the block, each of which sees one of its keys, all in the same place. */
static int attend_tile(const Attention *a, Scratch *s, int64_t kv_head, int64_t t, int64_t end, int64_t tile) {
    int64_t group = a->heads / a->kv_heads, first = t * group, rows = (end - t) * group;
    int64_t keys = smaller(s->position[end - 1] + 1 - tile, TILE); /* the last token sees the most */
    int64_t from = TILE, hidden = 0;
    for (int64_t r = first; r < first + rows; r++) {
        int64_t start = first_key(a, s->position[r / group]) - tile;
        s->hidden[r] = start > 0 ? (int32_t)start : 0;
        from = smaller(from, s->hidden[r]);
        hidden |= s->hidden[r];
    }
    if (find_tile(a, s, s->sequence[end - 1], kv_head, tile, from, keys)) return 1;
    if (a->dim != s->width) pad_values(s, a->dim, keys);
    transpose_rows(s->columns, s->key, keys, a->dim);
    for (int64_t r = first; r < first + rows; r++)
        s->visible[r] = (int32_t)smaller(s->position[r / group] + 1 - tile, keys);
    multiply(s->score + first * TILE, TILE, (Rows){s->q + first * s->width, s->width, 1}, s->columns, a->dim, rows, 0);
    if (a->softcap > 0) cap_scores(a, s->score + first * TILE, rows * TILE);
    if (hidden) {
        softmax_rows(1, s, first, rows);
        windowed_values(s, first, rows);
    } else {
        softmax_rows(0, s, first, rows);
        tile_values(s, first, rows);
    }
    return 0;
}

/* Reset the state before a split's first key. */
static void clear_split(const Scratch *s, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) s->maximum[r] = -INFINITY;
    memset(s->sum, 0, sizeof(float) * rows * SUMS);
    memset(s->acc, 0, sizeof(float) * rows * s->width);
}

/* total = total * scale + add * add_scale, for whole vectors. */
static void add_scaled(float *total, float scale, const float *add, float add_scale, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(total + i, load(total + i) * scale + load(add + i) * add_scale);
}

/* Merge the split that begins at `start` into the totals of the rows that see a key in it. */
static void merge_split(const Attention *a, const Scratch *s, int64_t start, int64_t rows) {
    int64_t group = a->heads / a->kv_heads;
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = s->position[r / group], seen = first_key(a, position);
        if (position < start || seen >= start + SPLIT) continue;
        float *acc = s->total_acc + r * s->width, *sum = s->total_sum + r * SUMS, before = s->total_max[r];
        const float *next_acc = s->acc + r * s->width, *next_sum = s->sum + r * SUMS;
        if (seen >= start) { /* its first split */
            memcpy(acc, next_acc, sizeof(float) * s->width);
            memcpy(sum, next_sum, sizeof(float) * SUMS);
            s->total_max[r] = s->maximum[r];
        } else {
            float maximum = s->maximum[r] > before ? s->maximum[r] : before;
            float scale = exp_(splat(before - maximum))[0], next_scale = exp_(splat(s->maximum[r] - maximum))[0];
            add_scaled(acc, scale, next_acc, next_scale, s->width);
            add_scaled(sum, scale, next_sum, next_scale, SUMS);
            s->total_max[r] = maximum;
        }
    }
}

/* A sum of exponentials with a sink's added; `share` is set to the factor on the sum's own terms, since everything is
 * relative to the larger of the sink and the largest score. */
static float beside_sink(float sum, float highest, float sink, float *share) {
    float maximum = sink > highest ? sink : highest;
    *share = exp_(splat(highest - maximum))[0];
    return sum * *share + exp_(splat(sink - maximum))[0];
}

/* Attend from `count` query tokens from row `token` on, whose sequences and positions are set, for one kv head. */
static int attend_block(const Attention *a, Scratch *s, int64_t kv_head, int64_t token, int64_t count) {
    int64_t group = a->heads / a->kv_heads, rows = count * group, width = s->width, last = 0, begin = INT64_MAX;
    int64_t start = token * a->heads * a->dim + kv_head * group * a->dim; /* of the block in the output */
    float scale = (float)a->scale;
    for (int64_t r = 0; r < rows; r++) {
        const float *q = a->q + (token + r / group) * a->q_stride + (kv_head * group + r % group) * a->dim;
        for (int64_t d = 0; d < a->dim; d++) s->q[r * width + d] = q[d] * scale;
    }
    clear_split(s, rows);
    for (int64_t t = 0; t < count; t++) {
        last = s->position[t] > last ? s->position[t] : last;
        begin = smaller(begin, first_key(a, s->position[t]) / TILE * TILE);
    }
    for (int64_t tile = begin; tile <= last; tile += TILE) {
        if (tile > begin && tile % SPLIT == 0) {
            merge_split(a, s, tile - SPLIT, rows);
            clear_split(s, rows);
        }
        for (int64_t t = 0, end; t < count; t = end) {
            end = t + 1;
            if (!sees(a, s, t, tile)) continue;
            while (end < count && sees(a, s, end, tile) && same_tile(a, s, end, tile)) end++;
            if (attend_tile(a, s, kv_head, t, end, tile)) return 1;
        }
    }
    if (last >= SPLIT) merge_split(a, s, last / SPLIT * SPLIT, rows);
    const float *acc = last >= SPLIT ? s->total_acc : s->acc, *sums = last >= SPLIT ? s->total_sum : s->sum;
    const float *highest = last >= SPLIT ? s->total_max : s->maximum;
    for (int64_t r = 0; r < rows; r++) {
        float *out = a->out + start + (r / group * a->heads + r % group) * a->dim;
        float sum = fold_sum(load_sums(sums + r * SUMS)), share = 1;
        if (a->sinks) sum = beside_sink(sum, highest[r], a->sinks[kv_head * group + r % group], &share);
        for (int64_t d = 0; d < a->dim; d++) out[d] = acc[r * width + d] * share / sum;
    }
    return 0;
}

/* Returns 1 if lengths contradict each other. */
static int check_lengths(const Attention *a) {
    if (a->cu_seqlens[0] != 0 || a->cu_seqlens[a->sequences] > a->tokens) return 1;
    for (int64_t i = 0; i < a->sequences; i++)
        if (a->cu_seqlens[i] > a->cu_seqlens[i + 1] || prefix_of(a, i) < 0) return 1;
    return 0;
}

/* Blocks of query tokens, across sequences; rows after the last sequence are zeros. */
void attention(Attention *a) {
    int64_t group = a->heads / a->kv_heads, size = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1;
    int64_t mine = claim(&a->next), end = a->cu_seqlens[a->sequences], row = a->heads * a->dim, sequence = 0;
    Scratch *s = new_scratch(a, size * group);
    if (!s || check_lengths(a)) fail(&a->error);
    else if (mine == 0) memset(a->out + end * row, 0, sizeof(float) * (a->tokens - end) * row);
    while (!failed(&a->error) && mine / a->kv_heads * size < end) {
        int64_t token = mine / a->kv_heads * size, count = smaller(end - token, size);
        for (int64_t t = 0, i = token; t < count; t++, i++) {
            while (i >= a->cu_seqlens[sequence + 1]) sequence++;
            s->sequence[t] = sequence;
            s->position[t] = prefix_of(a, sequence) + i - a->cu_seqlens[sequence];
        }
        sequence = s->sequence[0]; /* the next block may start here again, for another kv head */
        if (attend_block(a, s, mine % a->kv_heads, token, count)) fail(&a->error);
        mine = claim(&a->next);
    }
    free(s);
}
