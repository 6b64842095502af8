/* Logits of the next token of every row, and what the other ranks must know of this rank's. See logits.h.
 *
 * The vocabulary itself never leaves a rank: draw.c gathers the stats, a few numbers a row.
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

static void write_stats(const Token *t, int64_t number, float *room) {
    const Rollout *g = t->g;
    float *stats = t->stats + number * t->columns, *leaves = stats + leaves_at(g);
    int64_t leaf = g->vocab_rows / g->vocab_leaves;
    Row row = row_of(t, number);
    for (int64_t i = 0; i < g->vocab_leaves; i++, leaves += OF_LEAF) {
        int64_t real = g->vocab - i * leaf < leaf ? g->vocab - i * leaf : leaf;
        RowStats of_leaf = stats_of_row(row.logits + i * leaf, real, g->scale, -1);
        leaves[0] = of_leaf.top, leaves[1] = of_leaf.sum;
    }
    stats[TOP] = find_largest(&row, room);
    /* What is gathered must be numbers. */
    memset(stats + MORE, 0, (leaves_at(g) - MORE) * sizeof(float));
    if (g->top_k)
        find_candidates(&row, stats, room);
    else if (has_nucleus(g))
        histogram(&row, 0, 0, stats[TOP], stats + FIRST);
    else if (decides_alone(g))
        give_winner(winner_of(&row, room, stats[TOP], min_p_threshold(g, stats[TOP])), stats + SCORE);
}

static void head(void *task, Member member) {
    const Token *t = task;
    const Rollout *g = t->g;
    const TokenWeights *weights = token_weights(g);
    int64_t hidden = g->hidden, begin, end;
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t at = begin * hidden; at < end * hidden; at += hidden)
        add_and_norm(t->x + at, t->delta ? t->delta + at : NULL, NULL, weights->norm, g->eps, hidden, t->normed + at,
                     t->normed + at);
    pool_meet(member);
    /* Packed are all rows of the table, otherwise only tokens are computed. */
    multiply(g, member, g->first_matrix[g->layers], 1, g->num_rows, g->parts ? g->vocab_rows : g->vocab, hidden, t->normed, hidden,
             weights->head, 1, t->logits, g->vocab_rows);
    pool_meet(member);
    for (int64_t i = begin; i < end; i++) write_stats(t, i, memory_of(t, member));
}

int make_logits(const Call *call, Token *t) {
    t->own_floats = 3 * num_blocks(t->g) * BLOCK;
    t->memory = scratch(call, pool_size() * t->own_floats);
    return t->memory ? run_products(call, head, t) : KERNEL_OUT_OF_MEMORY;
}
