/* AdamW over one flat run, and the sum of squares: one pass each over memory, called between graphs. */
#include "kernel.h"
#include "vec16.h"

static void update(const Call *call, int64_t begin, int64_t end) {
    float *weight = call->params[0], *gradient = call->params[1], *first = call->params[2], *second = call->params[3];
    const double *numbers = call->params[4];
    const float beta1 = numbers[1], beta2 = numbers[2], eps = numbers[3], keep = numbers[4], scale = numbers[7];
    const float rest1 = 1.0 - numbers[1], rest2 = 1.0 - numbers[2];
    const float rate = numbers[0] / numbers[5], root = 1.0 / sqrt(numbers[6]);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float g = gradient[i] * scale;
        float m = beta1 * first[i] + rest1 * g, v = beta2 * second[i] + rest2 * g * g;
        first[i] = m;
        second[i] = v;
        gradient[i] = 0.0f;
        weight[i] = weight[i] * keep - rate * m / (sqrtf(v) * root + eps);
    }
}

/* arXiv:1711.05101, algorithm 2, in place: gradients are scaled first and zero afterwards.
 * numbers: lr, beta1, beta2, eps, 1 - lr * weight decay, 1 - beta1^t, 1 - beta2^t, scale. */
KERNEL(adamw, "weight f32[N], gradient f32[N], first f32[N], second f32[N], numbers f64[8]") {
    return over_rows(call, update);
}

enum { STEP = 1 << 15 };

static void sum_blocks(const Call *call, int64_t begin, int64_t end) {
    const float *x = call->params[0];
    double *sums = call->params[1];
    for (int64_t b = begin; b < end; b++) {
        int64_t last = (b + 1) * STEP < dim(call, 'X') ? (b + 1) * STEP : dim(call, 'X');
        double own = 0.0;
#pragma omp simd reduction(+ : own)
        for (int64_t i = b * STEP; i < last; i++) own += (double)x[i] * x[i];
        sums[b] = own;
    }
}

/* sum x^2 over blocks of STEP elements: the same bits whatever the number of threads */
KERNEL(square_sums, "x f32[X] -> sums f64[N]") {
    if (dim(call, 'N') != dim(call, 'X') / STEP + 1) return refuse(call, "%ld sums", dim(call, 'N'));
    return over_rows(call, sum_blocks);
}
