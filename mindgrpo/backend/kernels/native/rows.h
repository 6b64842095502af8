/* What trainer and generator compute of one row, whatever stands beside it: compiled once, in rows.c, so that both get the
 * same bits.
 */
#ifndef MINDGRPO_ROWS_H
#define MINDGRPO_ROWS_H

#include "vec16.h"

/* sum [n] = x (+ (added (+ bias))), unless `sum` is NULL, and y [n] the RMS norm of that. */
void add_and_norm(const float *x, const float *added, const float *bias, const float *weight, float eps, int64_t n,
                  float *sum, float *y);

/* One head of one token as attention takes it: out [D] = source + bias, RMS-normed where `norm` is given, rotated by
 * `angles` (cos [D], then sin [D]; the two halves of a head have the same; arXiv:2104.09864). */
void norm_and_rope(const float *source, const float *bias, const float *norm, float eps, const float *angles, int64_t dim,
                   float *out);

/* y [n] = silu(gate) * up of `both`, gate [n] then up [n]; y may be `both`. */
void gate_row(const float *both, int64_t n, float *y);

/* Its gradient, dboth [2 n] of dy [n]: silu'(g) = s + g s (1 - s), s = sigmoid(g). */
void gate_row_grad(const float *both, const float *dy, int64_t n, float *dboth);

/* row [count] -> exp(row - top), top its largest, then zeros up to the larger of `end` and padded(count), which the row has
 * room for. Returns their sum, in which a key's place from the sequence's first on alone decides when it is added. */
float exp_row(float *row, int64_t count, int64_t end, float *top);

/* Of logits over a stretch of the vocabulary, with l = logits * scale: the largest l, sum exp(l - top), sum exp(l - top) l,
 * and l of the label or 0. */
typedef struct {
    float top, sum, moment, label;
} RowStats;

static const RowStats NO_STATS = {-1e30f, 0.0f, 0.0f, 0.0f};

/* Columns whose stats are made at a time. */
enum { STATS_COLUMNS = 2048 };

/* Of up to STATS_COLUMNS columns, of which `real` count; the label is number `at` of them, if it is one. */
RowStats stats_of_columns(const float *row, int64_t real, float scale, int64_t at);

/* Of any number of columns, STATS_COLUMNS at a time. */
RowStats stats_of_row(const float *row, int64_t real, float scale, int64_t at);

/* Of two stretches together. */
RowStats merge_stats(RowStats a, RowStats b);

/* Of `count` stretches that follow each other, in a binary tree. */
RowStats merge_leaves(const RowStats *stats, int64_t count);

/* The log of sum exp(l). */
float log_sum(RowStats stats);

#endif
