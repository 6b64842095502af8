/* The gradient of a row of logits over a stretch of the vocabulary. */
#ifndef MINDGRPO_LOG_PROB_ROWS_H
#define MINDGRPO_LOG_PROB_ROWS_H

#include "rows.h"

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
