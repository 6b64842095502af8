/* Log-probabilities and entropy of a rank's share of the vocabulary, and their gradient. */
#include "kernel.h"
#include "log_prob_rows.h"

/* `sizes` are the first token and the number of columns that are tokens; the rest is padding. */
static int check_sizes(const Call *call) {
    const int32_t *sizes = call->params[2];
    if (sizes[1] >= 0 && sizes[1] <= dim(call, 'V')) return 0;
    return refuse(call, "%d of %ld columns cannot be tokens", sizes[1], dim(call, 'V'));
}

static void stats_of_rows(const Call *call, int64_t begin, int64_t end) {
    const float *logits = call->params[0], scale = *(const float *)call->params[3];
    const int32_t *labels = call->params[1], *sizes = call->params[2];
    RowStats *stats = call->params[4];
    int64_t leaves = dim(call, 'L'), width = dim(call, 'V') / leaves;
    for (int64_t i = begin * leaves; i < end * leaves; i++) {
        int64_t start = i % leaves * width, real = sizes[1] - start < width ? sizes[1] - start : width;
        stats[i] = stats_of_row(logits + i * width, real, scale, (int64_t)labels[i / leaves] - sizes[0] - start);
    }
}

/* stats: RowStats of each of L equal stretches of columns */
KERNEL(log_prob_stats, "logits f32[N, V], labels i32[N], sizes i32[2], scale f32[1] -> stats f32[N, 4L]") {
    int status = check_sizes(call);
    if (!status && dim(call, 'V') % dim(call, 'L'))
        return refuse(call, "%ld columns are not %ld equal stretches", dim(call, 'V'), dim(call, 'L'));
    return status ? status : over_rows(call, stats_of_rows);
}

/* From the stats of all ranks' stretches, in the vocabulary's order. */
KERNEL(log_probs_of_stats, "stats f32[N, 4L] -> logp f32[N], entropy f32[N], total f32[N]") {
    const RowStats *stats = call->params[0];
    float **p = (float **)call->params;
    int64_t leaves = dim(call, 'L');
    for (int64_t i = 0; i < dim(call, 'N'); i++) {
        RowStats whole = merge_leaves(stats + i * leaves, leaves);
        float total = log_sum(whole);
        p[1][i] = whole.label - total, p[2][i] = total - whole.moment / whole.sum, p[3][i] = total;
    }
    return 0;
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
