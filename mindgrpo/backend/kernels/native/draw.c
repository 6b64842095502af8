/* Draws the next token of every row from logits that are split over ranks. See winner.h.
 *
 * All ranks decide alike on what was gathered: the threshold below which no logit is kept, and whose token has the
 * largest score.
 */
#include "winner.h"

/* Inputs of a kernel: logits, gathered stats, gathered answer of the round before, and more. */
typedef struct {
    const Rollout *g;
    const Call *call;
    void **params;
    int64_t *const *shapes;
    int round;
    float *out, *memory;
    int64_t own_floats; /* of `memory` for each member */
} Task;

static float *memory_of(const Task *t, Member member) { return t->memory + member.index * t->own_floats; }

/* What was gathered for a row: `stats` and `bins` [tp_size], each so many floats after the other. */
typedef struct {
    const float *stats, *bins;
    int64_t next_stats, next_bins;
    float top;
    double mass;
} Gathered;

static const float *stats_of(const Gathered *all, int64_t rank) { return all->stats + rank * all->next_stats; }

static float share_of(const Gathered *all, int64_t rank) { return fast_exp(stats_of(all, rank)[TOP] - all->top); }

/* Of all ranks, in a range of digit `round`. */
static double mass_in(const Rollout *g, const Gathered *all, int round, int64_t bin) {
    double mass = 0.0;
    for (int64_t r = 0; r < g->tp_size; r++)
        mass += round ? all->bins[r * all->next_bins + bin] : stats_of(all, r)[FIRST + bin] * share_of(all, r);
    return mass;
}

/* `bins` of the row and what is from one rank's to the next; NULL where none were gathered. */
static Gathered gathered_of(const Task *t, int64_t row, const float *bins, int64_t next_bins) {
    const int64_t *shape = t->shapes[1];
    Gathered all = {(const float *)t->params[1] + row * shape[2], bins, shape[1] * shape[2], next_bins, NONE, 0.0};
    for (int64_t r = 0; r < t->g->tp_size; r++) all.top = fmaxf(all.top, stats_of(&all, r)[TOP]);
    for (int64_t r = 0; r < t->g->tp_size && has_nucleus(t->g); r++) {
        double mass = 0.0;
        for (int64_t bin = 0; bin < BINS; bin++) mass += stats_of(&all, r)[FIRST + bin];
        all.mass += mass * share_of(&all, r);
    }
    return all;
}

/* What the search for top-p's threshold knows of a row: the mass above it, and its leading digits. */
static double *above_of(const Rollout *g, int64_t row) { return g->above + 2 * row; }

static uint32_t prefix_of(const Rollout *g, int64_t row) { return above_of(g, row)[1]; }

/* Finds digit `round` of the threshold: of the ranges with a mass, the lowest with less than top_p of it all above. */
static void settle_digit(const Rollout *g, int64_t row, const Gathered *all, int round) {
    double *above = above_of(g, row), total;
    int64_t chosen = 0;
    if (round == 0) memset(above, 0, 2 * sizeof(double));
    total = above[0];
    for (int64_t bin = BINS - 1; bin >= 0 && total < g->top_p * all->mass; bin--) {
        double mass = mass_in(g, all, round, bin);
        if (mass > 0.0) {
            chosen = bin;
            above[0] = total;
        }
        total += mass;
    }
    above[1] = (double)(((uint64_t)prefix_of(g, row) << BITS) | chosen);
}

static Row task_row(const Task *t, int64_t i) { return row_of(t->g, i, t->params[0], t->shapes[0][1]); }

/* With the bins that were gathered in the round before. */
static Gathered with_bins(const Task *t, int64_t i) {
    return gathered_of(t, i, (const float *)t->params[2] + i * BINS, t->shapes[1][1] * BINS);
}

static void top_p_round(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        Gathered all = with_bins(t, i);
        settle_digit(t->g, i, &all, t->round - 1);
        histogram(&row, t->round, prefix_of(t->g, i), all.top, t->out + i * BINS);
    }
}

/* Zeroes the answer [B, .] and runs `work` on the rows in use, if there is `any` to do. */
static int run_rows(const Call *call, const Rollout *g, int round, void (*work)(void *, Member), int any) {
    int last = call->num_params - 1;
    int64_t least = FIRST + (g->top_k ? 2 * g->candidates : has_nucleus(g) ? BINS : 0);
    if (g->num_rows > dim(call, 'B') || g->vocab > dim(call, 'V') || dim(call, 'R') != g->tp_size ||
        dim(call, 'C') < least)
        return refuse(call, "B = %ld, V = %ld, R = %ld or C = %ld do not fit %ld rows of %ld tokens on %ld ranks",
                      dim(call, 'B'), dim(call, 'V'), dim(call, 'R'), dim(call, 'C'), g->num_rows, g->vocab, g->tp_size);
    Task t = {g, call, call->params, call->shapes, round, call->params[last], NULL, 0};
    int64_t blocks = num_blocks(g), candidates = g->tp_size * g->candidates;
    t.own_floats = padded(candidates > blocks ? candidates : blocks);
    t.memory = scratch(call, pool_size() * t.own_floats);
    if (!t.memory) return KERNEL_OUT_OF_MEMORY;
    memset(t.out, 0, dim(call, 'B') * call->shapes[last][1] * sizeof(float));
    if (g->num_rows && any) pool_run(work, &t);
    return 0;
}

/* Bins of this round; round 1 takes `stats` for bins. meta: number, round. */
KERNEL(rollout_top_p, "logits f32[B, V], stats f32[R, B, C], bins f32[R, B, A], meta i32[2] -> next f32[B, 256]") {
    const int32_t *meta = call->params[3];
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    if (meta[1] < 1 || meta[1] >= ROUNDS || (meta[1] > 1 && dim(call, 'A') != BINS))
        return refuse(call, "round %d of %ld bins", meta[1], dim(call, 'A'));
    /* A graph with rounds of top-p also serves parameters without top-p. */
    return run_rows(call, g, meta[1], top_p_round, has_nucleus(g));
}

/* A rank's smallest candidate. */
static float smallest_of(const Rollout *g, const float *stats) { return stats[FIRST + g->candidates - 1]; }

/* The smallest logit that top-k and top-p keep; each rank's stats hold all that can be among the k largest. */
static float best_threshold(const Rollout *g, const Gathered *all, float *values) {
    int64_t size = 0, count = 0;
    for (int64_t r = 0; r < g->tp_size; r++)
        for (int64_t i = 0; i < g->candidates; i++) {
            values[size] = stats_of(all, r)[FIRST + i];
            size += values[size] > NONE;
        }
    if (!size) return -INFINITY;
    float least = select_largest(values, size, g->top_k < size ? g->top_k : size);
    if (g->top_p >= 1.0) return least;
    double mass = 0.0, above = 0.0, more = 0.0;
    for (int64_t i = 0; i < size; i++)
        if (values[i] >= least) values[count++] = values[i];
    for (int64_t r = 0; r < g->tp_size; r++)
        if (smallest_of(g, stats_of(all, r)) == least) more += stats_of(all, r)[MORE];
    for (int64_t i = 0; i < count; i++) mass += fast_exp(values[i] - all->top);
    mass += more * fast_exp(least - all->top);
    qsort(values, count, sizeof(float), descending);
    for (int64_t i = 0; i < count;) {
        int64_t first = i;
        if (above >= g->top_p * mass) return values[i - 1];
        for (; i < count && values[i] == values[first]; i++) above += fast_exp(values[i] - all->top);
    }
    return least;
}

/* The same for top-p alone; the digits that are not settled yet are found here, where one rank has all logits. */
static float nucleus_threshold(const Row *row, Gathered *all) {
    const Rollout *g = row->g;
    float bins[BINS];
    if (g->tp_size == 1) {
        all->bins = bins;
        for (int round = 0; round < ROUNDS - 1; round++) {
            settle_digit(g, row->number, all, round);
            histogram(row, round + 1, prefix_of(g, row->number), all->top, bins);
        }
    }
    settle_digit(g, row->number, all, ROUNDS - 1);
    return of_rank(prefix_of(g, row->number));
}

static float threshold_of(const Row *row, Gathered *all, float *room) {
    const Rollout *g = row->g;
    float least = -INFINITY;
    if (g->top_k)
        least = best_threshold(g, all, room);
    else if (g->top_p < 1.0)
        least = nucleus_threshold(row, all);
    return fmaxf(least, min_p_threshold(g, all->top));
}

/* Of this rank's tokens; `room` takes a float a block. */
static Winner own_winner(const Row *row, float threshold, float *room) {
    return winner_of(row, room, find_largest(row, room), threshold, NULL);
}

/* Of all ranks' candidates. */
static Winner best_candidate(const Row *row, const Gathered *all, float threshold) {
    const Rollout *g = row->g;
    Winner winner = NO_WINNER;
    for (int64_t r = 0; r < g->tp_size; r++) {
        const float *stats = stats_of(all, r), *values = stats + FIRST, *tokens = values + g->candidates;
        for (int64_t i = 0; i < g->candidates; i++)
            if (values[i] >= threshold && values[i] > NONE)
                consider(&winner, values[i], token_bits(row->key, (uint32_t)tokens[i]), tokens[i]);
        if (stats[MORE] > 0.0f && smallest_of(g, stats) >= threshold) contest(&winner, stats[SCORE], stats[TOKEN]);
    }
    return winner;
}

/* (score, token) of each rank, `next` floats apart. */
static Winner best_of_ranks(const Rollout *g, const float *scores, int64_t next) {
    Winner winner = NO_WINNER;
    for (int64_t r = 0; r < g->tp_size; r++, scores += next)
        if (scores[1] >= 0.0f) contest(&winner, scores[0], scores[1]);
    return winner;
}

static void give_scores(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end;
    float *room = memory_of(t, member);
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        Gathered all = with_bins(t, i);
        give_winner(own_winner(&row, threshold_of(&row, &all, NULL), room), t->out + 2 * i);
    }
}

/* The best score of what is kept on this rank and its token, for rules whose stats do not tell it. `bins` are those of
 * the last round, if there was one. */
KERNEL(rollout_score, "logits f32[B, V], stats f32[R, B, C], bins f32[R, B, A], number i32[1] -> scores f32[B, 2]") {
    const Rollout *g = rollout_of(call, call->params[3]);
    if (!g) return KERNEL_REFUSED;
    if (g->tp_size > 1 && has_nucleus(g) && dim(call, 'A') != BINS) return refuse(call, "%ld bins", dim(call, 'A'));
    /* A graph that scores also serves rules whose stats tell it. */
    return run_rows(call, g, 0, give_scores, !g->top_k && !decides_alone(g));
}

/* Log of the sum of the plain distribution's masses. */
static float plain_log_sum(const Rollout *g, const Gathered *all) {
    float top = NONE;
    double sum = 0.0;
    for (int64_t r = 0; r < g->tp_size; r++) top = fmaxf(top, stats_of(all, r)[RAW_TOP]);
    for (int64_t r = 0; r < g->tp_size; r++)
        sum += (double)stats_of(all, r)[RAW_SUM] * fast_exp(stats_of(all, r)[RAW_TOP] - top);
    return top + logf(sum);
}

/* (embedding, token, log-prob), zero on all ranks but the token's. */
static void give_drawn(const Task *t, const Row *row, const Gathered *all, Winner winner, float *out) {
    const Rollout *g = row->g;
    int64_t at = winner.token - g->first_token;
    memset(out, 0, (g->hidden + 2) * sizeof(float));
    if (winner.token < 0) {
        /* Logits that are no numbers must show. */
        out[g->hidden + 1] = NAN;
    } else if (at >= 0 && at < g->vocab) {
        table_row(t->call, 3, at, g->hidden, out);
        out[g->hidden] = winner.token;
        out[g->hidden + 1] = row->logits[at] * (float)g->scale - plain_log_sum(g, all);
    }
}

/* The same of a token that is there already, with a log-prob of 0. */
static void give_known(const Task *t, const Row *row, float *out) {
    const Rollout *g = row->g;
    int32_t token = g->tokens[g->row_sample[row->number] * g->longest + g->row_own[row->number]];
    int64_t at = token - g->first_token;
    memset(out, 0, (g->hidden + 2) * sizeof(float));
    if (at < 0 || at >= g->vocab) return;
    table_row(t->call, 3, at, g->hidden, out);
    out[g->hidden] = token;
}

static void draw(void *task, Member member) {
    const Task *t = task;
    const Rollout *g = t->g;
    int64_t begin, end, capacity = t->shapes[1][1];
    float *room = memory_of(t, member);
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        if (row.at < 0) {
            give_known(t, &row, t->out + i * (g->hidden + 2));
            continue;
        }
        Gathered all = gathered_of(t, i, NULL, 0);
        Winner winner;
        if (decides_alone(g))
            winner = best_of_ranks(g, all.stats + SCORE, all.next_stats);
        else if (g->top_k)
            winner = best_candidate(&row, &all, threshold_of(&row, &all, room));
        else if (g->tp_size == 1)
            winner = own_winner(&row, threshold_of(&row, &all, NULL), room);
        else
            winner = best_of_ranks(g, (const float *)t->params[2] + 2 * i, 2 * capacity);
        give_drawn(t, &row, &all, winner, t->out + i * (g->hidden + 2));
    }
}

/* `answer`: the scores of all ranks, or the stats where there was no round. */
KERNEL(rollout_draw,
       "logits f32[B, V], stats f32[R, B, C], answer f32[R, B, A], table f32|bf16[V, H], number i32[1] "
       "-> drawn f32[B, E]") {
    const Rollout *g = rollout_of(call, call->params[4]);
    if (!g) return KERNEL_REFUSED;
    if (dim(call, 'E') != g->hidden + 2) return refuse(call, "E is %ld for H + 2", dim(call, 'E'));
    if (g->tp_size > 1 && !g->top_k && !decides_alone(g) && dim(call, 'A') != 2)
        return refuse(call, "%ld scores a row", dim(call, 'A'));
    return run_rows(call, g, 0, draw, 1);
}
