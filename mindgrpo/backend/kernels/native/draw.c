/* Draws the next token of every row from logits that are split over ranks. See winner.h.
 *
 * All ranks decide alike on what was gathered: the threshold below which no logit is kept, and whose token has the
 * largest score.
 */
#include "collective.h"
#include "winner.h"

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

static Gathered gathered_of(const Token *t, int64_t row) {
    const Rollout *g = t->g;
    Gathered all = {t->all_stats + row * t->columns, t->answers + row * BINS, g->num_rows * t->columns,
                    g->num_rows * BINS, NONE, 0.0};
    for (int64_t r = 0; r < g->tp_size; r++) all.top = fmaxf(all.top, stats_of(&all, r)[TOP]);
    for (int64_t r = 0; r < g->tp_size && has_nucleus(g); r++) {
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

/* Bins of round `round` from those of the round before; round 1 takes `stats` for bins. */
static void top_p_round(void *task, Member member) {
    const Token *t = task;
    int64_t begin, end;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(t, i);
        Gathered all = gathered_of(t, i);
        settle_digit(t->g, i, &all, t->round - 1);
        histogram(&row, t->round, prefix_of(t->g, i), all.top, t->answer + i * BINS);
    }
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
    return winner_of(row, room, find_largest(row, room), threshold);
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

/* The best score of what is kept on this rank and its token, for rules whose stats do not tell it. */
static void give_scores(void *task, Member member) {
    const Token *t = task;
    int64_t begin, end;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(t, i);
        Gathered all = gathered_of(t, i);
        give_winner(own_winner(&row, threshold_of(&row, &all, NULL), memory_of(t, member)), t->answer + 2 * i);
    }
}

/* Log of the sum of the plain distribution's masses. */
static float plain_log_sum(const Rollout *g, const Gathered *all) {
    RowStats leaves[g->tp_size * g->vocab_leaves];
    for (int64_t i = 0; i < g->tp_size * g->vocab_leaves; i++) {
        const float *leaf = stats_of(all, i / g->vocab_leaves) + leaves_at(g) + OF_LEAF * (i % g->vocab_leaves);
        leaves[i] = (RowStats){leaf[0], leaf[1], 0.0f, 0.0f};
    }
    return log_sum(merge_leaves(leaves, g->tp_size * g->vocab_leaves));
}

/* (embedding, token, log-prob), zero on all ranks but the token's. */
static void give_drawn(const Row *row, const Gathered *all, Winner winner, float *out) {
    const Rollout *g = row->g;
    int64_t at = winner.token - g->first_token;
    memset(out, 0, (g->hidden + 2) * sizeof(float));
    if (winner.token < 0) {
        /* Logits that are no numbers must show. */
        out[g->hidden + 1] = NAN;
    } else if (at >= 0 && at < g->vocab) {
        embed_token(g, winner.token, out);
        out[g->hidden] = winner.token;
        out[g->hidden + 1] = row->logits[at] * (float)g->scale - plain_log_sum(g, all);
    }
}

/* The same of a token that is there already, with a log-prob of 0. */
static void give_known(const Row *row, float *out) {
    const Rollout *g = row->g;
    int32_t token = g->tokens[g->row_sample[row->number] * g->longest + g->row_own[row->number]];
    int64_t at = token - g->first_token;
    embed_token(g, token, out);
    out[g->hidden] = at >= 0 && at < g->vocab ? token : 0;
    out[g->hidden + 1] = 0.0f;
}

static void draw(void *task, Member member) {
    const Token *t = task;
    const Rollout *g = t->g;
    int64_t begin, end;
    float *room = memory_of(t, member);
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(t, i);
        float *out = t->drawn + i * (g->hidden + 2);
        if (row.at < 0) {
            give_known(&row, out);
            continue;
        }
        Gathered all = gathered_of(t, i);
        Winner winner;
        if (decides_alone(g))
            winner = best_of_ranks(g, all.stats + SCORE, all.next_stats);
        else if (g->top_k)
            winner = best_candidate(&row, &all, threshold_of(&row, &all, room));
        else if (g->tp_size == 1)
            winner = own_winner(&row, threshold_of(&row, &all, NULL), room);
        else
            winner = best_of_ranks(g, t->answers + 2 * i, 2 * g->num_rows);
        give_drawn(&row, &all, winner, out);
    }
}

/* Whether any row's next token is drawn. */
static int draws(const Rollout *g) {
    for (int64_t i = 0; i < g->num_rows; i++)
        if (g->row_own[i] >= g->first_drawn[g->row_sample[i]]) return 1;
    return 0;
}

static int gather(const Call *call, const Token *t, const float *mine, int64_t a_row, float *all) {
    return gather_over_ranks(call, t->g->group, t->g->tp_size, mine, t->g->num_rows * a_row, all);
}

/* What ranks that share the vocabulary must agree on beside the stats. */
static int truncate(const Call *call, Token *t) {
    const Rollout *g = t->g;
    int status = 0;
    for (t->round = 1; t->round < ROUNDS && has_nucleus(g) && !status; t->round++) {
        pool_run(top_p_round, t);
        status = gather(call, t, t->answer, BINS, t->answers);
    }
    if (status || g->top_k || decides_alone(g)) return status;
    pool_run(give_scores, t);
    return gather(call, t, t->answer, 2, t->answers);
}

int64_t stats_floats(const Rollout *g) {
    return g->max_rows * ((1 + g->tp_size) * (num_columns(g) + BINS) + g->hidden + 2);
}

int draw_tokens(const Call *call, const Rollout *g, const float *x, const float *delta, float **drawn) {
    int64_t rows = g->num_rows, blocks = num_blocks(g), candidates = g->tp_size * g->candidates;
    Token t = {.g = g, .x = x, .delta = delta, .columns = num_columns(g)};
    int status;
    t.normed = g->scratch + 2 * rows * g->hidden;
    t.logits = t.normed + rows * g->hidden;
    t.drawn = *drawn = g->stats;
    t.answer = t.drawn + rows * (g->hidden + 2);
    t.answers = t.answer + rows * BINS;
    t.stats = t.answers + g->tp_size * rows * BINS;
    t.all_stats = g->tp_size > 1 ? t.stats + rows * t.columns : t.stats;
    int is_drawn = draws(g);
    if (is_drawn && (status = make_logits(call, &t))) return status;
    t.own_floats = padded(candidates > blocks ? candidates : blocks);
    t.memory = scratch(call, pool_size() * t.own_floats);
    if (!t.memory) return KERNEL_OUT_OF_MEMORY;
    if (is_drawn && g->tp_size > 1) {
        if ((status = gather(call, &t, t.stats, t.columns, t.all_stats))) return status;
        if ((status = truncate(call, &t))) return status;
    }
    pool_run(draw, &t);
    return sum_over_ranks(call, g->group, t.drawn, rows * (g->hidden + 2));
}
