/* One row's logits on this rank, as its next token is drawn from them: rollout/embedded/sampling.py defines how, head.c
 * and draw.c do it.
 */
#ifndef MINDGRPO_LOGITS_H
#define MINDGRPO_LOGITS_H

#include <float.h>

#include "gumbel.h"
#include "rollout.h"
#include "rows.h"
#include "select.h"

/* Columns of a rank's stats of a row: the largest logit of the distribution that is drawn from; a score and its token. From
 * FIRST on
 * - with top-k its k largest logits, then their tokens. MORE logits equal the smallest of these: the score is the
 *   largest one among them;
 * - with top-p and no top-k the mass in each of BINS ranges of logits;
 * - where a rank decides alone nothing: the score is its largest one.
 * At the end, of each leaf of the vocabulary, `top` and `sum` of the plain distribution (RowStats of rows.h).
 * What is gathered must be numbers: NONE stands for minus infinity. */
enum { TOP, MORE, SCORE, TOKEN, FIRST, OF_LEAF = 2 };
#define NONE (-FLT_MAX)
enum { BLOCK = 64, BINS = 256, ROUNDS = 4, BITS = 8 };

/* The next token of every row: this rank's logits [rows, vocab_rows] and stats [rows, columns], the stats of all ranks
 * [tp_size, rows, columns]; in `answer` what a round of truncation gives, [rows, BINS] or [rows, 2], and in `answers`
 * that of all ranks; what is drawn [rows, hidden + 2]. `memory`: own_floats for each member. */
typedef struct {
    const Rollout *g;
    const float *x, *delta;
    float *normed, *logits, *stats, *all_stats, *answer, *answers, *drawn, *memory;
    int64_t columns, own_floats;
    int round;
} Token;

static inline float *memory_of(const Token *t, Member member) { return t->memory + member.index * t->own_floats; }

/* Fills in logits and stats. 0 if it went well. */
int make_logits(const Call *call, Token *t);

typedef struct {
    const Rollout *g;
    const float *logits;
    const uint8_t *seen;
    int64_t number, at;
    uint64_t key;
    int is_banned;
} Row;

/* Whether a row's stats are masses by range of logits. */
static inline int has_nucleus(const Rollout *g) { return !g->top_k && g->top_p < 1.0; }

/* Whether a rank knows from its own logits which of them are kept; with a temperature of 0 Python turns all rules off. */
static inline int decides_alone(const Rollout *g) {
    return !g->top_k && g->top_p >= 1.0 && (g->min_p <= 0.0 || g->tp_size == 1);
}

static inline int64_t leaves_at(const Rollout *g) {
    return FIRST + (g->top_k ? 2 * g->candidates : has_nucleus(g) ? BINS : 0);
}

static inline int64_t num_columns(const Rollout *g) { return leaves_at(g) + OF_LEAF * g->vocab_leaves; }

/* Of min-p alone; minus infinity where it is off. */
static inline float min_p_threshold(const Rollout *g, float top) {
    return g->min_p > 0.0 ? top + logf(g->min_p) : -INFINITY;
}

static inline Row row_of(const Token *t, int64_t number) {
    const Rollout *g = t->g;
    int64_t at = g->row_own[number] - g->first_drawn[g->row_sample[number]];
    Row row = {.g = g, .number = number, .logits = t->logits + number * g->vocab_rows, .at = at};
    row.seen = g->penalty == 1.0 ? NULL : g->seen + g->row_slot[number] * g->vocab;
    row.is_banned = row.at < g->min_tokens;
    row.key = position_key(g->keys[g->row_sample[number]], row.at);
    return row;
}

/* Up to `most` logits from `start` on as they are drawn from; returns how many. */
static inline int64_t load(const Row *row, int64_t start, int64_t most, float *x) {
    const Rollout *g = row->g;
    int64_t count = g->vocab - start < most ? g->vocab - start : most;
    const float *source = row->logits + start;
    float scale = g->scale, penalty = g->penalty;
    if (row->seen) {
        const uint8_t *seen = row->seen + start;
        for (int64_t i = 0; i < count; i++) {
            float lowered = source[i] < 0.0f ? source[i] * penalty : source[i] / penalty;
            x[i] = (seen[i] ? lowered : source[i]) * scale;
        }
    } else {
        for (int64_t i = 0; i < count; i++) x[i] = source[i] * scale;
    }
    for (int64_t i = 0; row->is_banned && i < g->stops_count; i++) {
        int64_t at = g->stops[i] - g->first_token - start;
        if (at >= 0 && at < count) x[at] = -INFINITY;
    }
    return count;
}

/* Mass of the logits whose first `round` digits are those of `prefix`, by the next digit. */
static inline void histogram(const Row *row, int round, uint32_t prefix, float top, float *bins) {
    float x[BLOCK], mass[BLOCK];
    uint32_t rank[BLOCK];
    double sums[BINS] = {0.0};
    for (int64_t start = 0; start < row->g->vocab; start += BLOCK) {
        int64_t count = load(row, start, BLOCK, x);
        uint32_t any = !round;
        for (int64_t i = 0; i < count; i++) {
            /* The sum makes -0 a 0, which it equals. */
            rank[i] = rank_of(x[i] + 0.0f);
            any |= round && rank[i] >> (32 - BITS * round) == prefix;
        }
        if (!any) continue;
        for (int64_t i = 0; i < count; i++) mass[i] = fast_exp(x[i] - top);
        for (int64_t i = 0; i < count; i++)
            if (!round || rank[i] >> (32 - BITS * round) == prefix)
                sums[rank[i] >> (32 - BITS * (round + 1)) & (BINS - 1)] += mass[i];
    }
    for (int64_t i = 0; i < BINS; i++) bins[i] = sums[i];
}

#endif
