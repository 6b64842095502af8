/* Logits of the next token of every row, and what the other ranks must know of this rank's. See logits.h.
 *
 * The vocabulary itself never leaves a rank: the caller gathers the stats, a few numbers a row.
 */
#include "winner.h"

/* The `candidates` largest logits of this rank, the smallest last, and their tokens; of what equals the smallest, the
 * number that is not among them and the best of these. `room` takes 3 floats a logit. */
static void find_candidates(const Row *row, float *stats, float *room) {
    const Rollout *g = row->g;
    int64_t vocab = g->vocab, wanted = g->candidates, stretches = (vocab + BLOCK - 1) / BLOCK * (BLOCK / VEC);
    int64_t size = 0, listed = 0;
    int64_t count = wanted < vocab ? wanted : vocab;
    float *all = room, *values = all + stretches * VEC, *tokens = values + stretches * VEC, least = -INFINITY;
    for (int64_t start = 0; start < vocab; start += BLOCK)
        for (int64_t i = load(row, start, BLOCK, all + start); i < BLOCK; i++) all[start + i] = -INFINITY;
    if (stretches >= count) {
        /* As many stretches have their largest above the count-th of these: so have the logits. */
        for (int64_t i = 0; i < stretches; i++) values[i] = largest(all + i * VEC, VEC);
        least = select_largest(values, stretches, count);
    }
    for (int64_t start = 0; start < stretches * VEC; start += VEC) {
        if (!(largest(all + start, VEC) >= least)) continue;
        for (int64_t i = start; i < start + VEC; i++) {
            values[size] = all[i];
            tokens[size] = g->first_token + i;
            size += all[i] >= least && all[i] > -INFINITY;
        }
    }
    count = size < count ? size : count;
    memcpy(all, values, size * sizeof(float));
    float smallest = count ? select_largest(all, size, count) : NONE;
    Winner ties = NO_WINNER;
    for (int is_tie = 0; is_tie < 2; is_tie++)
        for (int64_t i = 0; i < size; i++) {
            if (is_tie ? values[i] != smallest : values[i] <= smallest) continue;
            if (listed < count) {
                stats[FIRST + listed] = values[i];
                stats[FIRST + wanted + listed++] = tokens[i];
                continue;
            }
            stats[MORE]++;
            consider(&ties, smallest, token_bits(row->key, (uint32_t)tokens[i]), tokens[i]);
        }
    if (ties.token >= 0) give_winner(ties, stats + SCORE);
    for (; listed < wanted; listed++) stats[FIRST + listed] = NONE;
}

typedef struct {
    const Rollout *g;
    const float *x, *added, *norm, *table;
    float *logits, *stats, *memory;
    int64_t width, columns, own_floats; /* of `memory` for each member */
} Task;

static void write_stats(const Task *t, int64_t number, float *room) {
    const Rollout *g = t->g;
    float *stats = t->stats + number * t->columns;
    Row row = row_of(g, number, t->logits, t->width), raw = row;
    raw.seen = NULL;
    raw.is_banned = 0;
    double mass = 0.0;
    int is_raw = !row.seen && !row.is_banned, decides = decides_alone(g);
    stats[RAW_TOP] = stats[TOP] = find_largest(&raw, room);
    if (!is_raw) stats[TOP] = find_largest(&row, room);
    if (!is_raw || !decides) mass = mass_of(&raw, stats[RAW_TOP]);
    /* There may be more columns than these rules fill; what is gathered must be numbers. */
    memset(stats + MORE, 0, (t->columns - MORE) * sizeof(float));
    if (g->top_k)
        find_candidates(&row, stats, room);
    else if (has_nucleus(g))
        histogram(&row, 0, 0, stats[TOP], stats + FIRST);
    else if (decides)
        give_winner(winner_of(&row, room, stats[TOP], min_p_threshold(g, stats[TOP]), is_raw ? &mass : NULL),
                    stats + SCORE);
    stats[RAW_SUM] = mass;
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
    /* Packed are all rows of the table, otherwise only tokens are computed. */
    multiply(g, member, MATRICES * g->layers, g->num_rows, g->parts ? t->width : g->vocab, hidden, g->scratch, hidden,
             t->table, 1, t->logits, t->width);
    pool_meet(member);
    for (int64_t i = begin; i < end; i++) write_stats(t, i, t->memory + member.index * t->own_floats);
}

/* Whether any row's next token is drawn. */
static int draws(const Rollout *g) {
    for (int64_t i = 0; i < g->num_rows; i++)
        if (g->row_own[i] >= g->first_drawn[g->row_sample[i]]) return 1;
    return 0;
}

KERNEL(rollout_head,
       "x f32[B, H], added f32[B, H], norm f32[H], table f32|bf16[V, H], number i32[1] "
       "-> logits f32[B, V], stats f32[B, C]") {
    const Rollout *g = rollout_of(call, call->params[4]);
    if (!g || check_rows(call, g->num_rows)) return KERNEL_REFUSED;
    void **p = call->params;
    Task t = {g, p[0], p[1], p[2], p[3], p[5], p[6], NULL, dim(call, 'V'), dim(call, 'C'), 0};
    if (g->vocab > t.width || t.columns < FIRST + (g->top_k ? 2 * g->candidates : has_nucleus(g) ? BINS : 0))
        return refuse(call, "V = %ld or C = %ld is too small for %ld tokens", t.width, t.columns, g->vocab);
    t.own_floats = 3 * num_blocks(g) * BLOCK;
    t.memory = scratch(call, pool_size() * t.own_floats);
    if (!t.memory) return KERNEL_OUT_OF_MEMORY;
    /* Zero where no row is, so that what is gathered are numbers. */
    int64_t rows = draws(g) ? g->num_rows : 0;
    memset(t.stats + rows * t.columns, 0, (dim(call, 'B') - rows) * t.columns * sizeof(float));
    if (!rows) memset(t.logits, 0, g->num_rows * t.width * sizeof(float));
    return rows ? run_products(call, head, &t) : 0;
}
