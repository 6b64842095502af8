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

typedef struct {
    const float *x;
    int64_t size, blocks;
    double *sums;
} Squares;

static void sum_blocks(void *task, Member member) {
    const Squares *work = task;
    int64_t begin, end;
    share_out(member, work->blocks, &begin, &end);
    for (int64_t b = begin; b < end; b++) {
        int64_t last = (b + 1) * STEP < work->size ? (b + 1) * STEP : work->size;
        double own = 0.0;
#pragma omp simd reduction(+ : own)
        for (int64_t i = b * STEP; i < last; i++) own += (double)work->x[i] * work->x[i];
        work->sums[b] = own;
    }
}

/* sum x^2 in float64, over blocks of fixed size in their order: the same bits whatever the number of threads. */
KERNEL(square_sum, "x f32[N] -> sum f64[1]") {
    Squares work = {call->params[0], dim(call, 'N'), dim(call, 'N') / STEP + 1, NULL};
    work.sums = (double *)scratch(call, 2 * work.blocks);
    if (!work.sums) return KERNEL_OUT_OF_MEMORY;
    if (work.blocks > 4)
        pool_run(sum_blocks, &work);
    else
        sum_blocks(&work, (Member){0, 1});
    double *sum = call->params[1];
    *sum = 0.0;
    for (int64_t b = 0; b < work.blocks; b++) *sum += work.sums[b];
    return 0;
}
