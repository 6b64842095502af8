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
static void find_candidates(const Row *row, float *pieces, float *memory) {
    int64_t vocab = row->g->vocab, wanted = row->g->candidates, blocks = (vocab + BLOCK - 1) / BLOCK, size = 0;
    int64_t count = wanted < vocab ? wanted : vocab, parts = BLOCK / VEC;
    float *all = memory, *found = all + blocks * BLOCK, least = -INFINITY;
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
    float *logits, *pieces, *memory;
    int64_t width, columns, own_floats; /* of `memory` for each member */
} Task;

static void give_pieces(const Task *t, int64_t number, float *memory) {
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
        find_candidates(&row, pieces, memory);
    else if (has_nucleus(g))
        histogram(&row, 0, 0, pieces[TOP], pieces + FIRST);
}

static void head(void *task, Member member) {
    const Task *t = task;
    const Rollout *g = t->g;
    int64_t hidden = g->hidden, begin, end;
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float *normed = g->scratch + i * hidden;
        add_and_norm(t->x + i * hidden, t->added + i * hidden, NULL, t->norm, g->eps, hidden, normed, normed);
    }
    pool_meet(member);
    gemm(member, g->num_rows, g->vocab, hidden, g->scratch, hidden, 1, t->table, hidden, 1, t->logits, t->width, 0);
    pool_meet(member);
    for (int64_t i = begin; i < end; i++) give_pieces(t, i, t->memory + member.index * t->own_floats);
}

KERNEL(rollout_head,
       "x f32[B, H], added f32[B, H], norm f32[H], table f32[V, H], number i32[1] "
       "-> logits f32[B, V], pieces f32[B, C]") {
    const Rollout *g = rollout_of(call, call->params[4]);
    if (!g || check_rows(call, g->num_rows)) return KERNEL_REFUSED;
    void **p = call->params;
    Task t = {g, p[0], p[1], p[2], p[3], p[5], p[6], NULL, dim(call, 'V'), dim(call, 'C'), 0};
    if (g->vocab > t.width || t.columns < FIRST + (g->top_k ? g->candidates : has_nucleus(g) ? BINS : 0))
        return refuse(call, "V = %ld or C = %ld is too small for %ld tokens", t.width, t.columns, g->vocab);
    t.own_floats = 2 * (g->vocab + BLOCK);
    t.memory = scratch(call, pool_size() * t.own_floats);
    if (!t.memory) return KERNEL_OUT_OF_MEMORY;
    /* Zero where no row is, so that what is gathered are numbers. */
    memset(t.pieces + g->num_rows * t.columns, 0, (dim(call, 'B') - g->num_rows) * t.columns * sizeof(float));
    if (g->num_rows) pool_run(head, &t);
    return 0;
}
