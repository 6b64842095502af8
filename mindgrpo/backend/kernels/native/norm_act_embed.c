/* Row by row: RMS norm, with or without the residual sum before it, the gated activation of the MLP, and embeddings. */
#include "kernel.h"
#include "rows.h"

static void norm_rows(const Call *call, int64_t begin, int64_t end) {
    float **p = (float **)call->params, *y = p[3];
    int64_t width = dim(call, 'H');
    for (int64_t at = begin * width; at < end * width; at += width)
        add_and_norm(p[0] + at, NULL, NULL, p[1], *p[2], width, NULL, y + at);
}

KERNEL(rms_norm, "x f32[N, H], weight f32[H], eps f32[1] -> y f32[N, H]") { return over_rows(call, norm_rows); }

static void add_norm_rows(const Call *call, int64_t begin, int64_t end) {
    float **p = (float **)call->params;
    int64_t width = dim(call, 'H');
    for (int64_t at = begin * width; at < end * width; at += width)
        add_and_norm(p[0] + at, p[1] + at, NULL, p[2], *p[3], width, p[4] + at, p[5] + at);
}

/* total = x + added, y = its norm */
KERNEL(add_rms_norm, "x f32[N, H], added f32[N, H], weight f32[H], eps f32[1] -> total f32[N, H], y f32[N, H]") {
    return over_rows(call, add_norm_rows);
}

typedef struct {
    const Call *call;
    float *dweights; /* [members, H] */
} NormGrad;

static void norm_grad_rows(void *task, Member member) {
    const NormGrad *work = task;
    const Call *call = work->call;
    const float *x = call->params[0], *weight = call->params[1], eps = *(const float *)call->params[2];
    const float *dy = call->params[3], *through = optional(call, 4);
    int64_t width = dim(call, 'H'), begin, end;
    float *dx = call->params[5], *dweight = work->dweights + member.index * width;
    share_out(member, dim(call, 'N'), &begin, &end);
    memset(dweight, 0, width * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        const float *xi = x + i * width, *dyi = dy + i * width;
        float scale = inverse_rms(xi, width, eps), mean = 0.0f;
#pragma omp simd reduction(+ : mean)
        for (int64_t j = 0; j < width; j++) mean += xi[j] * weight[j] * dyi[j];
        float back = mean / width * scale * scale * scale;
        for (int64_t j = 0; j < width; j++) {
            dweight[j] += dyi[j] * xi[j] * scale;
            dx[i * width + j] = scale * weight[j] * dyi[j] - xi[j] * back;
        }
        for (int64_t j = 0; j < width && through; j++) dx[i * width + j] += through[i * width + j];
    }
}

/* `through` is the gradient that reaches x beside the norm's.
 * dx = s (w dy) - x s^3 mean(x w dy), s = 1 / rms(x); dw = sum_N dy x s. */
KERNEL(rms_norm_grad,
       "x f32[N, H], weight f32[H], eps f32[1], dy f32[N, H], through f32[N, H]? "
       "-> dx f32[N, H], dweight f32[H]") {
    int64_t width = dim(call, 'H'), members = pool_size();
    NormGrad work = {call, scratch(call, members * width)};
    float *dweight = call->params[6];
    if (!work.dweights) return KERNEL_OUT_OF_MEMORY;
    pool_run(norm_grad_rows, &work);
    /* In the members' order: the same bits on every run. */
    memcpy(dweight, work.dweights, width * sizeof(float));
    for (int64_t t = 1; t < members; t++)
        for (int64_t j = 0; j < width; j++) dweight[j] += work.dweights[t * width + j];
    return 0;
}

static void gated_rows(const Call *call, int64_t begin, int64_t end) {
    const float *both = call->params[0];
    float *y = call->params[1];
    int64_t width = dim(call, 'I');
    for (int64_t i = begin; i < end; i++) gate_row(both + 2 * i * width, width, y + i * width);
}

/* gate and up, one behind the other in a row -> silu(gate) * up */
KERNEL(gated, "both f32[N, 2I] -> y f32[N, I]") { return over_rows(call, gated_rows); }

static void gated_grad_rows(const Call *call, int64_t begin, int64_t end) {
    const float *both = call->params[0], *dy = call->params[1];
    float *dboth = call->params[2];
    int64_t width = dim(call, 'I');
    for (int64_t i = begin; i < end; i++) gate_row_grad(both + 2 * i * width, dy + i * width, width, dboth + 2 * i * width);
}

KERNEL(gated_grad, "both f32[N, 2I], dy f32[N, I] -> dboth f32[N, 2I]") { return over_rows(call, gated_grad_rows); }

/* Rows of the table's tokens, which begin with `first`; zero for any other. */
KERNEL(embed, "tokens i32[N], table f32|bf16[V, H], first i32[1] -> rows f32[N, H]") {
    const int32_t *tokens = call->params[0], first = *(const int32_t *)call->params[2];
    float *rows = call->params[3];
    int64_t width = dim(call, 'H');
    for (int64_t i = 0; i < dim(call, 'N'); i++) {
        int64_t at = (int64_t)tokens[i] - first;
        if (at >= 0 && at < dim(call, 'V'))
            table_row(call, 1, at, width, rows + i * width);
        else
            memset(rows + i * width, 0, width * sizeof(float));
    }
    return 0;
}

KERNEL(embed_grad, "tokens i32[N], dy f32[N, H], table f32|bf16[V, H], first i32[1] -> dtable f32[V, H]") {
    const int32_t *tokens = call->params[0], first = *(const int32_t *)call->params[3];
    const float *dy = call->params[1];
    float *dtable = call->params[4];
    int64_t vocab = dim(call, 'V'), width = dim(call, 'H');
    memset(dtable, 0, vocab * width * sizeof(float));
    for (int64_t i = 0; i < dim(call, 'N'); i++) {
        int64_t at = (int64_t)tokens[i] - first;
        for (int64_t j = 0; j < width && at >= 0 && at < vocab; j++) dtable[at * width + j] += dy[i * width + j];
    }
    return 0;
}
