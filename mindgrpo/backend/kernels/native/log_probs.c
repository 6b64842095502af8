/* Log-probabilities and entropy of a rank's share of the vocabulary, and their gradient. */
#include "kernel.h"
#include "vec16.h"

/* `sizes` are the first token and the number of columns that are tokens; the rest is padding. */
static int check_sizes(const Call *call) {
    const int32_t *sizes = call->params[2];
    if (sizes[1] >= 0 && sizes[1] <= dim(call, 'V')) return 0;
    return refuse(call, "%d of %ld columns cannot be tokens", sizes[1], dim(call, 'V'));
}

static void pieces_of_rows(const Call *call, int64_t begin, int64_t end) {
    const float *logits = call->params[0], scale = *(const float *)call->params[3];
    const int32_t *labels = call->params[1], *sizes = call->params[2];
    float *stats = call->params[4];
    int64_t width = dim(call, 'V'), real = sizes[1];
    for (int64_t i = begin; i < end; i++) {
        const float *row = logits + i * width;
        float top = real > 0 ? fmaxf(largest(row, real), -1e30f) * scale : -1e30f, total = 0.0f, moment = 0.0f;
#pragma omp simd reduction(+ : total, moment)
        for (int64_t j = 0; j < real; j++) {
            float mass = fast_exp(row[j] * scale - top);
            total += mass;
            moment += mass * row[j];
        }
        int64_t at = (int64_t)labels[i] - sizes[0];
        float *out = stats + 4 * i;
        out[0] = top, out[1] = total, out[2] = moment * scale;
        out[3] = at >= 0 && at < real ? row[at] * scale : 0.0f;
    }
}

/* stats: top l, sum exp(l - top), sum exp(l - top) l, and l of the label or 0, where l = logits * scale */
KERNEL(log_prob_stats, "logits f32[N, V], labels i32[N], sizes i32[2], scale f32[1] -> stats f32[N, 4]") {
    int status = check_sizes(call);
    return status ? status : over_rows(call, pieces_of_rows);
}

static void grad_of_rows(const Call *call, int64_t begin, int64_t end) {
    const float *logits = call->params[0], scale = *(const float *)call->params[3], *totals = call->params[4];
    const float *entropy = call->params[5], *dlogp = call->params[6], *dentropy = call->params[7];
    const int32_t *labels = call->params[1], *sizes = call->params[2];
    float *dlogits = call->params[8];
    int64_t width = dim(call, 'V'), real = sizes[1];
    for (int64_t i = begin; i < end; i++) {
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
}

/* dlogp/dl = onehot - p, dH/dl = -p (log p + H), times the scale; `total` is the log-sum-exp */
KERNEL(log_prob_grad,
       "logits f32[N, V], labels i32[N], sizes i32[2], scale f32[1], total f32[N], entropy f32[N], "
       "dlogp f32[N], dentropy f32[N] -> dlogits f32[N, V]") {
    int status = check_sizes(call);
    return status ? status : over_rows(call, grad_of_rows);
}
