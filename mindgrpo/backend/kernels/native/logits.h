/* One row's logits on this rank, as its next token is drawn from them. See head.c and draw.c.
 *
 * Order, as Hugging Face's: repetition penalty, temperature, top-k, top-p, min-p; a set is bounded by a threshold, so
 * that equal logits stay or go together.
 */
#ifndef MINDGRPO_LOGITS_H
#define MINDGRPO_LOGITS_H

#include "rollout.h"

#include "select.h"

/* Columns of a rank's pieces of a row: of the plain distribution, then of the one that is drawn from. From FIRST on
 * its largest logits (top-k), or the mass in each of BINS ranges of logits (top-p without top-k). */
enum { RAW_TOP, RAW_SUM, TOP, SUM, MORE, FIRST };
enum { BLOCK = 64, BINS = 256, ROUNDS = 4, BITS = 8 };

typedef struct {
    const Rollout *g;
    const float *logits;
    const uint8_t *seen;
    int64_t number, at;
    int is_banned;
} Row;

/* Whether a row's pieces are masses by range of logits. */
static inline int has_nucleus(const Rollout *g) { return !g->top_k && g->top_p < 1.0; }

static inline Row row_of(const Rollout *g, int64_t number, const float *logits, int64_t width) {
    Row row = {.g = g, .number = number, .logits = logits + number * width, .at = g->row_own[number]};
    row.seen = g->penalty == 1.0 ? NULL : g->seen + g->row_slot[number] * g->vocab;
    row.is_banned = row.at < g->min_tokens;
    return row;
}

/* Up to BLOCK logits from `start` on as they are drawn from; returns how many. */
static inline int64_t load(const Row *row, int64_t start, float *x) {
    const Rollout *g = row->g;
    int64_t count = g->vocab - start < BLOCK ? g->vocab - start : BLOCK;
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

static inline float mass_above(const float *x, int64_t count, float threshold, float top) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i] < threshold ? 0.0f : fast_exp(x[i] - top);
    return sum;
}

/* Mass of the logits whose first `round` digits are those of `prefix`, by the next digit. */
static inline void histogram(const Row *row, int round, uint32_t prefix, float top, float *bins) {
    float x[BLOCK];
    double sums[BINS] = {0.0};
    for (int64_t start = 0; start < row->g->vocab; start += BLOCK) {
        int64_t count = load(row, start, x);
        for (int64_t i = 0; i < count; i++) {
            /* The sum makes -0 a 0, which it equals. */
            uint32_t rank = rank_of(x[i] + 0.0f);
            if (round > 0 && rank >> (32 - BITS * round) != prefix) continue;
            sums[rank >> (32 - BITS * (round + 1)) & (BINS - 1)] += fast_exp(x[i] - top);
        }
    }
    for (int64_t i = 0; i < BINS; i++) bins[i] = sums[i];
}

#endif
