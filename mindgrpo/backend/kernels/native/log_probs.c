/* Log-probabilities and entropy of a rank's share of the vocabulary, and their gradient. */
#include "vec16.h"

static inline float largest(const float *x, int64_t n) {
    float top = -1e30f;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
    return top;
}

/* (logits [M, V], labels int32 [M], sizes int32 [2]: first token and number of real columns, scale [1])
 * -> pieces [M, 4]: top l, sum exp(l - top), sum exp(l - top) l, and l of the label or 0, where l = logits * scale */
int log_prob_pieces(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *logits = params[0], scale = *(const float *)params[3];
    const int32_t *labels = params[1], *sizes = params[2];
    float *pieces = params[4];
    int64_t rows = shapes[0][0], width = shapes[0][1], real = sizes[1];
#pragma omp parallel for if (rows * real > 8192)
    for (int64_t i = 0; i < rows; i++) {
        const float *row = logits + i * width;
        float top = real > 0 ? largest(row, real) * scale : -1e30f, total = 0.0f, moment = 0.0f;
#pragma omp simd reduction(+ : total, moment)
        for (int64_t j = 0; j < real; j++) {
            float mass = fast_exp(row[j] * scale - top);
            total += mass;
            moment += mass * row[j];
        }
        int64_t at = (int64_t)labels[i] - sizes[0];
        float *out = pieces + 4 * i;
        out[0] = top, out[1] = total, out[2] = moment * scale;
        out[3] = at >= 0 && at < real ? row[at] * scale : 0.0f;
    }
    return 0;
}

/* (logits [M, V], labels [M], sizes [2], scale [1], log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) -> dlogits
 * dlogp/dl = onehot - p, dH/dl = -p (log p + H), times the scale */
int log_prob_grad(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *logits = params[0], scale = *(const float *)params[3], *totals = params[4], *entropy = params[5];
    const int32_t *labels = params[1], *sizes = params[2];
    const float *dlogp = params[6], *dentropy = params[7];
    float *dlogits = params[8];
    int64_t rows = shapes[0][0], width = shapes[0][1], real = sizes[1];
#pragma omp parallel for if (rows * real > 8192)
    for (int64_t i = 0; i < rows; i++) {
        const float *row = logits + i * width;
        float *out = dlogits + i * width, to_label = dlogp[i] * scale, to_entropy = dentropy[i] * scale;
        if (to_label == 0.0f && to_entropy == 0.0f) {
            memset(out, 0, width * sizeof(float));
            continue;
        }
        if (to_entropy == 0.0f)
            for (int64_t j = 0; j < real; j++) out[j] = -to_label * fast_exp(row[j] * scale - totals[i]);
        else
            for (int64_t j = 0; j < real; j++) {
                float log_p = row[j] * scale - totals[i];
                out[j] = -fast_exp(log_p) * (to_label + to_entropy * (log_p + entropy[i]));
            }
        memset(out + real, 0, (width - real) * sizeof(float));
        int64_t at = (int64_t)labels[i] - sizes[0];
        if (at >= 0 && at < real) out[at] += to_label;
    }
    return 0;
}
