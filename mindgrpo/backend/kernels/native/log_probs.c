/* Log-probabilities and entropy of a rank's share of the vocabulary, and their gradient. */
#include "kernel.h"
#include "log_prob_rows.h"

/* `sizes` are the first token and the number of columns that are tokens; the rest is padding. */
static int check_sizes(const Call *call) {
    const int32_t *sizes = call->params[2];
    if (sizes[1] >= 0 && sizes[1] <= dim(call, 'V')) return 0;
    return refuse(call, "%d of %ld columns cannot be tokens", sizes[1], dim(call, 'V'));
}

static void pieces_of_rows(const Call *call, int64_t begin, int64_t end) {
    const float *logits = call->params[0], scale = *(const float *)call->params[3];
    const int32_t *labels = call->params[1], *sizes = call->params[2];
    RowStats *stats = call->params[4];
    for (int64_t i = begin; i < end; i++)
        stats[i] = stats_of_row(logits + i * dim(call, 'V'), sizes[1], scale, (int64_t)labels[i] - sizes[0]);
}

/* stats: as RowStats */
KERNEL(log_prob_stats, "logits f32[N, V], labels i32[N], sizes i32[2], scale f32[1] -> stats f32[N, 4]") {
    int status = check_sizes(call);
    return status ? status : over_rows(call, pieces_of_rows);
}

static void grad_of_rows(const Call *call, int64_t begin, int64_t end) {
    const float *logits = call->params[0], scale = *(const float *)call->params[3], *totals = call->params[4];
    const float *entropy = call->params[5], *dlogp = call->params[6], *dentropy = call->params[7];
    const int32_t *labels = call->params[1], *sizes = call->params[2];
    float *dlogits = call->params[8];
    int64_t width = dim(call, 'V');
    for (int64_t i = begin; i < end; i++)
        grad_of_row(logits + i * width, width, sizes[1], scale,
                    (RowGradient){totals[i], entropy[i], dlogp[i], dentropy[i]}, (int64_t)labels[i] - sizes[0],
                    dlogits + i * width);
}

/* `total` is the log-sum-exp */
KERNEL(log_prob_grad,
       "logits f32[N, V], labels i32[N], sizes i32[2], scale f32[1], total f32[N], entropy f32[N], "
       "dlogp f32[N], dentropy f32[N] -> dlogits f32[N, V]") {
    int status = check_sizes(call);
    return status ? status : over_rows(call, grad_of_rows);
}
