/* A row of logits over a stretch of the vocabulary: what its log-probabilities need of it, and their gradient. */
#ifndef MINDGRPO_LOG_PROB_ROWS_H
#define MINDGRPO_LOG_PROB_ROWS_H

#include "vec16.h"

/* With l = logits * scale: the largest l, sum exp(l - top), sum exp(l - top) l, and l of the label or 0. */
typedef struct {
    float top, sum, moment, label;
} RowStats;

static const RowStats NO_STATS = {-1e30f, 0.0f, 0.0f, 0.0f};

/* `real` columns count; the label is number `at` of them, if it is one. */
static inline RowStats stats_of_row(const float *row, int64_t real, float scale, int64_t at) {
    float top = real > 0 ? fmaxf(largest(row, real), -1e30f) * scale : -1e30f, total = 0.0f, moment = 0.0f;
#pragma omp simd reduction(+ : total, moment)
    for (int64_t j = 0; j < real; j++) {
        float mass = fast_exp(row[j] * scale - top);
        total += mass;
        moment += mass * row[j];
    }
    return (RowStats){top, total, moment * scale, at >= 0 && at < real ? row[at] * scale : 0.0f};
}

/* Of two stretches together. */
static inline RowStats merge_stats(RowStats a, RowStats b) {
    float top = fmaxf(a.top, b.top), of_a = fast_exp(a.top - top), of_b = fast_exp(b.top - top);
    return (RowStats){top, a.sum * of_a + b.sum * of_b, a.moment * of_a + b.moment * of_b, a.label + b.label};
}

/* What the whole row has: its log-sum-exp and entropy, and the gradients of its log-probability and entropy. */
typedef struct {
    float total, entropy, dlogp, dentropy;
} RowGradient;

/* dlogp/dl = onehot - p, dH/dl = -p (log p + H), times the scale; `width` columns of `out`, which may be `row`. */
static inline void grad_of_row(const float *row, int64_t width, int64_t real, float scale, RowGradient g, int64_t at,
                               float *out) {
    float to_label = g.dlogp * scale, to_entropy = g.dentropy * scale;
    if (to_label == 0.0f && to_entropy == 0.0f) {
        memset(out, 0, width * sizeof(float));
        return;
    }
    if (to_entropy == 0.0f)
        for (int64_t j = 0; j < real; j++) out[j] = -to_label * fast_exp(row[j] * scale - g.total);
    else
        for (int64_t j = 0; j < real; j++) {
            float log_p = row[j] * scale - g.total;
            out[j] = -fast_exp(log_p) * (to_label + to_entropy * (log_p + g.entropy));
        }
    memset(out + real, 0, (width - real) * sizeof(float));
    if (at >= 0 && at < real) out[at] += to_label;
}

#endif
