/* See rows.h. */
#include "rows.h"

void add_and_norm(const float *x, const float *added, const float *bias, const float *weight, float eps, int64_t n,
                  float *sum, float *y) {
    if (sum && bias)
        for (int64_t j = 0; j < n; j++) sum[j] = x[j] + (added[j] + bias[j]);
    else if (sum)
        for (int64_t j = 0; j < n; j++) sum[j] = x[j] + (added ? added[j] : 0.0f);
    if (sum) x = sum;
    float scale = inverse_rms(x, n, eps);
    for (int64_t j = 0; j < n; j++) y[j] = x[j] * scale * weight[j];
}

void norm_and_rope(const float *source, const float *bias, const float *norm, float eps, const float *angles, int64_t dim,
                   float *out) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < dim; i++) out[i] = source[i] + (bias ? bias[i] : 0.0f);
    if (norm) {
        float scale = inverse_rms(out, dim, eps);
        for (int64_t i = 0; i < dim; i++) out[i] *= scale * norm[i];
    }
    for (int64_t i = 0; i < half; i++) {
        float low = out[i], high = out[i + half];
        out[i] = low * angles[i] - high * angles[dim + i];
        out[i + half] = high * angles[i] + low * angles[dim + i];
    }
}

void gate_row(const float *both, int64_t n, float *y) {
    for (int64_t j = 0; j < n; j++) y[j] = silu(both[j]) * both[n + j];
}

void gate_row_grad(const float *both, const float *dy, int64_t n, float *dboth) {
    for (int64_t j = 0; j < n; j++) {
        float s = 1.0f / (1.0f + fast_exp(-both[j]));
        dboth[n + j] = dy[j] * both[j] * s;
        dboth[j] = dy[j] * both[n + j] * (s + both[j] * s * (1.0f - s));
    }
}

float exp_row(float *row, int64_t count, int64_t end, float *top) {
    int64_t whole = padded(count);
    float most = largest(row, count), sum = 0.0f;
    vec16 lanes = {0};
    for (int64_t j = count; j < whole; j++) row[j] = most;
    for (int64_t j = 0; j < whole; j++) row[j] = fast_exp(row[j] - most);
    memset(row + count, 0, ((end > whole ? end : whole) - count) * sizeof(float));
    for (int64_t j = 0; j < whole; j += VEC) lanes += *(const vec16 *)(row + j);
    for (int64_t i = 0; i < VEC; i++) sum += lanes[i];
    *top = most;
    return sum;
}

RowStats stats_of_columns(const float *row, int64_t real, float scale, int64_t at) {
    float top = real > 0 ? fmaxf(largest(row, real), -1e30f) * scale : -1e30f, total = 0.0f, moment = 0.0f;
#pragma omp simd reduction(+ : total, moment)
    for (int64_t j = 0; j < real; j++) {
        float mass = fast_exp(row[j] * scale - top);
        total += mass;
        moment += mass * row[j];
    }
    return (RowStats){top, total, moment * scale, at >= 0 && at < real ? row[at] * scale : 0.0f};
}

RowStats merge_stats(RowStats a, RowStats b) {
    float top = fmaxf(a.top, b.top), of_a = fast_exp(a.top - top), of_b = fast_exp(b.top - top);
    return (RowStats){top, a.sum * of_a + b.sum * of_b, a.moment * of_a + b.moment * of_b, a.label + b.label};
}

RowStats stats_of_row(const float *row, int64_t real, float scale, int64_t at) {
    RowStats stats = NO_STATS;
    for (int64_t start = 0; start < real; start += STATS_COLUMNS) {
        int64_t columns = real - start < STATS_COLUMNS ? real - start : STATS_COLUMNS;
        stats = merge_stats(stats, stats_of_columns(row + start, columns, scale, at - start));
    }
    return stats;
}

RowStats merge_leaves(const RowStats *stats, int64_t count) {
    if (count == 1) return stats[0];
    int64_t half = 1;
    while (2 * half < count) half *= 2;
    return merge_stats(merge_leaves(stats, half), merge_leaves(stats + half, count - half));
}

float log_sum(RowStats stats) { return stats.top + logf(stats.sum); }
