/* AdamW over one flat run, and the sum of squares: one pass each over memory, called between graphs. */
#include <omp.h>

#include "vec16.h"

/* arXiv:1711.05101, algorithm 2, on [n]: gradients are scaled first and zero afterwards.
 * numbers: lr, beta1, beta2, eps, 1 - lr * weight decay, 1 - beta1^t, 1 - beta2^t, scale. */
void adamw(float *weight, float *gradient, float *first, float *second, int64_t n, const double *numbers) {
    const float beta1 = numbers[1], beta2 = numbers[2], eps = numbers[3], keep = numbers[4], scale = numbers[7];
    const float rest1 = 1.0 - numbers[1], rest2 = 1.0 - numbers[2];
    const float rate = numbers[0] / numbers[5], root = 1.0 / sqrt(numbers[6]);
#pragma omp parallel for simd schedule(static) if (n > 65536)
    for (int64_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float m = beta1 * first[i] + rest1 * g, v = beta2 * second[i] + rest2 * g * g;
        first[i] = m;
        second[i] = v;
        gradient[i] = 0.0f;
        weight[i] = weight[i] * keep - rate * m / (sqrtf(v) * root + eps);
    }
}

/* sum x^2 in float64, over blocks of fixed size in their order: the same bits whatever the number of threads. */
double square_sum(const float *x, int64_t n) {
    enum { STEP = 1 << 15 };
    int64_t blocks = (n + STEP - 1) / STEP;
    double *parts = malloc((blocks + 1) * sizeof(double)), sum = 0.0;
#pragma omp parallel for schedule(static) if (blocks > 4)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = (b + 1) * STEP < n ? (b + 1) * STEP : n;
        double own = 0.0;
#pragma omp simd reduction(+ : own)
        for (int64_t i = b * STEP; i < end; i++) own += (double)x[i] * x[i];
        parts[b] = own;
    }
    for (int64_t b = 0; b < blocks; b++) sum += parts[b];
    free(parts);
    return sum;
}
