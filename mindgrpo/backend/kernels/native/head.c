/* Logits of the next token of every row, and what the other ranks must know of this rank's. See logits.h.
 *
 * The vocabulary itself never leaves a rank: the caller gathers the pieces, a few numbers a row.
 */
#include "logits.h"

static void top_and_sum(const Row *row, float *top, float *sum) {
    float x[BLOCK];
    double total = 0.0;
    *top = -INFINITY;
    for (int64_t start = 0; start < row->g->vocab; start += BLOCK) {
        float best = largest(x, load(row, start, x));
        *top = best > *top ? best : *top;
    }
    for (int64_t start = 0; start < row->g->vocab; start += BLOCK)
        total += mass_above(x, load(row, start, x), -INFINITY, *top);
    *sum = total;
}

/* The `candidates` largest logits of this rank in any order, and before them how many more equal the smallest. */
static void find_candidates(const Row *row, float *pieces) {
    int64_t vocab = row->g->vocab, wanted = row->g->candidates, blocks = (vocab + BLOCK - 1) / BLOCK, size = 0;
    int64_t count = wanted < vocab ? wanted : vocab, parts = BLOCK / VEC;
    float *all = scratch(2 * blocks * BLOCK), *found = all + blocks * BLOCK, least = -INFINITY;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        int64_t loaded = load(row, start, all + start);
        for (int64_t i = loaded; i < BLOCK; i++) all[start + i] = -INFINITY;
    }
    if (blocks * parts >= count) {
        /* As many stretches of VEC have their largest above the count-th of these: so have the logits. */
        for (int64_t i = 0; i < blocks * parts; i++) found[i] = largest(all + i * VEC, VEC);
        least = select_largest(found, blocks * parts, count);
    }
    for (int64_t i = 0; i < vocab; i++) {
        found[size] = all[i];
        size += all[i] >= least;
    }
    if (size < count) count = size; /* only with logits that are no numbers */
    float smallest = count ? select_largest(found, size, count) : -INFINITY;
    pieces[MORE] = 0.0f;
    for (int64_t i = count; i < size; i++) pieces[MORE] += found[i] == smallest;
    memcpy(pieces + FIRST, found, count * sizeof(float));
    for (int64_t i = count; i < wanted; i++) pieces[FIRST + i] = -INFINITY;
}

typedef struct {
    const Rollout *g;
    const float *x, *added, *norm, *table;
    float *logits, *pieces;
    int64_t width, columns;
} Task;

static void give_pieces(const Task *t, int64_t number) {
    const Rollout *g = t->g;
    float *pieces = t->pieces + number * t->columns;
    Row row = row_of(g, number, t->logits, t->width), raw = row;
    raw.seen = NULL;
    raw.is_banned = 0;
    top_and_sum(&raw, pieces + RAW_TOP, pieces + RAW_SUM);
    pieces[TOP] = pieces[RAW_TOP];
    pieces[SUM] = pieces[RAW_SUM];
    if (row.seen || row.is_banned) top_and_sum(&row, pieces + TOP, pieces + SUM);
    /* There may be more columns than these rules fill; what is gathered must be numbers. */
    memset(pieces + MORE, 0, (t->columns - MORE) * sizeof(float));
    if (g->top_k)
        find_candidates(&row, pieces);
    else if (has_nucleus(g))
        histogram(&row, 0, 0, pieces[TOP], pieces + FIRST);
}

static void head(const void *task, Member member) {
    const Task *t = task;
    const Rollout *g = t->g;
    int64_t hidden = g->hidden, begin, end;
    float *sum = scratch(hidden), *turned = g->scratch;
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < hidden; j++) sum[j] = t->x[i * hidden + j] + t->added[i * hidden + j];
        float scale = 1.0f / sqrtf(dot(sum, sum, hidden) / hidden + (float)g->eps);
        float *to = turned + i / VEC * VEC * hidden + i % VEC;
        for (int64_t j = 0; j < hidden; j++) to[j * VEC] = sum[j] * scale * t->norm[j];
    }
    pool_meet(member);
    multiply_turned(member, g->num_rows, g->vocab, hidden, turned, t->table, t->logits, t->width);
    pool_meet(member);
    for (int64_t i = begin; i < end; i++) give_pieces(t, i);
}

/* (x [B, H], added [B, H], norm [H], table [V, H], number int32 [1]) -> (logits [B, V], pieces [B, C]) */
int rollout_head(KERNEL_ARGS) {
    UNUSED_ARGS;
    const Rollout *g = rollout_of(params[4]);
    if (!g) return 1;
    Task t = {g, params[0], params[1], params[2], params[3], params[5], params[6], shapes[5][1], shapes[6][1]};
    /* Zero where no row is, so that what is gathered are numbers. */
    memset(t.pieces + g->num_rows * t.columns, 0, (shapes[6][0] - g->num_rows) * t.columns * sizeof(float));
    if (g->num_rows) pool_run(head, &t);
    return 0;
}
