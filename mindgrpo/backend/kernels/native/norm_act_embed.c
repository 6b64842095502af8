/* Row by row: RMS norm, with or without the residual sum before it, and the gated activation of the MLP. */
#include <omp.h>

#include "vec16.h"

static inline float inverse_rms(const float *x, int64_t width, float eps) {
    return 1.0f / sqrtf(dot(x, x, width) / width + eps);
}

/* (x [N, H], weight [H], eps [1]) -> y [N, H] */
int rms_norm(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *x = params[0], *weight = params[1], eps = *(const float *)params[2];
    float *y = params[3];
    int64_t rows = shapes[0][0], width = shapes[0][1];
#pragma omp parallel for if (rows * width > 16384)
    for (int64_t i = 0; i < rows; i++) {
        float scale = inverse_rms(x + i * width, width, eps);
        for (int64_t j = 0; j < width; j++) y[i * width + j] = x[i * width + j] * scale * weight[j];
    }
    return 0;
}

/* (x [N, H], added [N, H], weight [H], eps [1]) -> (x + added, its norm) */
int add_rms_norm(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *x = params[0], *added = params[1], *weight = params[2], eps = *(const float *)params[3];
    float *total = params[4], *y = params[5];
    int64_t rows = shapes[0][0], width = shapes[0][1];
#pragma omp parallel for if (rows * width > 16384)
    for (int64_t i = 0; i < rows; i++) {
        float *sum = total + i * width;
        for (int64_t j = 0; j < width; j++) sum[j] = x[i * width + j] + added[i * width + j];
        float scale = inverse_rms(sum, width, eps);
        for (int64_t j = 0; j < width; j++) y[i * width + j] = sum[j] * scale * weight[j];
    }
    return 0;
}

/* (x [N, H], weight [H], eps [1], dy [N, H], through [N, H] or [1]) -> (dx [N, H], dweight [H]).
 * `through` is the gradient that reaches x beside the norm's.
 * dx = s (w dy) - x s^3 mean(x w dy), s = 1 / rms(x); dw = sum_N dy x s. */
int rms_norm_grad(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *x = params[0], *weight = params[1], eps = *(const float *)params[2], *dy = params[3];
    const float *through = numel(4, ndims, shapes) > 1 ? params[4] : NULL;
    float *dx = params[5], *dweight = params[6];
    int64_t rows = shapes[0][0], width = shapes[0][1];
    int threads = rows * width > 16384 ? omp_get_max_threads() : 1;
    float *parts = calloc((size_t)threads * width, sizeof(float));
    if (!parts) return 1;
#pragma omp parallel num_threads(threads)
    {
        float *own = parts + (int64_t)omp_get_thread_num() * width;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const float *xi = x + i * width, *dyi = dy + i * width;
            float scale = inverse_rms(xi, width, eps), mean = 0.0f;
#pragma omp simd reduction(+ : mean)
            for (int64_t j = 0; j < width; j++) mean += xi[j] * weight[j] * dyi[j];
            float back = mean / width * scale * scale * scale;
            for (int64_t j = 0; j < width; j++) {
                own[j] += dyi[j] * xi[j] * scale;
                dx[i * width + j] = scale * weight[j] * dyi[j] - xi[j] * back;
            }
            if (through)
                for (int64_t j = 0; j < width; j++) dx[i * width + j] += through[i * width + j];
        }
    }
    /* In the threads' order: the same bits on every run. */
    memset(dweight, 0, width * sizeof(float));
    for (int t = 0; t < threads; t++)
        for (int64_t j = 0; j < width; j++) dweight[j] += parts[t * width + j];
    free(parts);
    return 0;
}

/* both [N, 2 I]: gate then up -> silu(gate) * up [N, I] */
int gated(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *both = params[0];
    float *y = params[1];
    int64_t rows = shapes[0][0], width = shapes[0][1] / 2;
#pragma omp parallel for if (rows * width > 8192)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * width, *up = gate + width;
        for (int64_t j = 0; j < width; j++) y[i * width + j] = gate[j] / (1.0f + fast_exp(-gate[j])) * up[j];
    }
    return 0;
}

/* (both [N, 2 I], dy [N, I]) -> dboth [N, 2 I]; silu'(g) = s + g s (1 - s), s = sigmoid(g) */
int gated_grad(KERNEL_ARGS) {
    UNUSED_ARGS;
    const float *both = params[0], *dy = params[1];
    float *dboth = params[2];
    int64_t rows = shapes[0][0], width = shapes[0][1] / 2;
#pragma omp parallel for if (rows * width > 8192)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * width, *up = gate + width, *out = dy + i * width;
        float *dgate = dboth + 2 * i * width, *dup = dgate + width;
        for (int64_t j = 0; j < width; j++) {
            float s = 1.0f / (1.0f + fast_exp(-gate[j]));
            dup[j] = out[j] * gate[j] * s;
            dgate[j] = out[j] * up[j] * (s + gate[j] * s * (1.0f - s));
        }
    }
    return 0;
}

/* (tokens int32 [N], table [V, H], first int32 [1]) -> rows [N, H], zero where the token is not of this table */
int embed(KERNEL_ARGS) {
    UNUSED_ARGS;
    const int32_t *tokens = params[0], first = *(const int32_t *)params[2];
    const float *table = params[1];
    float *rows = params[3];
    int64_t count = shapes[0][0], vocab = shapes[1][0], width = shapes[1][1];
    for (int64_t i = 0; i < count; i++) {
        int64_t at = (int64_t)tokens[i] - first;
        if (at >= 0 && at < vocab)
            memcpy(rows + i * width, table + at * width, width * sizeof(float));
        else
            memset(rows + i * width, 0, width * sizeof(float));
    }
    return 0;
}

/* (tokens int32 [N], dy [N, H], table [V, H], first int32 [1]) -> dtable [V, H] */
int embed_grad(KERNEL_ARGS) {
    UNUSED_ARGS;
    const int32_t *tokens = params[0], first = *(const int32_t *)params[3];
    const float *dy = params[1];
    float *dtable = params[4];
    int64_t count = shapes[0][0], vocab = shapes[2][0], width = shapes[2][1];
    memset(dtable, 0, vocab * width * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        int64_t at = (int64_t)tokens[i] - first;
        if (at < 0 || at >= vocab) continue;
        for (int64_t j = 0; j < width; j++) dtable[at * width + j] += dy[i * width + j];
    }
    return 0;
}
