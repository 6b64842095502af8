/* What every kernel shares: how MindSpore hands arguments over, an exponential that vectorises, and a small product.
 *
 * A kernel is `int name(KERNEL_ARGS)`: inputs first, outputs last, all contiguous, float32 or int32; 0 is success.
 * Constants (sizes, flags) arrive as int32 or float32 inputs. No kernel keeps a pointer after it returns.
 */
#ifndef MINDGRPO_CORE_H
#define MINDGRPO_CORE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define KERNEL_ARGS \
    int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra
#define UNUSED_ARGS (void)nparam, (void)ndims, (void)dtypes, (void)stream, (void)extra

static inline int64_t numel(int index, int *ndims, int64_t **shapes) {
    int64_t count = 1;
    for (int i = 0; i < ndims[index]; i++) count *= shapes[index][i];
    return count;
}

/* exp(x), relative error below 2e-7; 0 below -87, NaN stays NaN. Without a branch, so that loops over it vectorise. */
static inline float fast_exp(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    clamped = clamped < -87.0f ? -87.0f : clamped;
    float shifted = clamped * 1.44269504088896341f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { float f; int32_t i; } bits;
    bits.f = shifted;
    /* The low bits of `shifted` are n in two's complement. */
    bits.i = (bits.i + 127) << 23;
    float y = p * bits.f;
    return x < -87.0f ? 0.0f : y;
}

static inline float dot(const float *a, const float *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

typedef float lanes __attribute__((vector_size(64), aligned(4)));
#define LANES 16

/* C[m, n] = (keep ? C : 0) + A[m, k] B[k, n]. A's element (i, p) is a[i * a_row + p * a_col]; B and C have unit columns.
 * A row's result does not depend on m. */
static inline void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_col,
                           const float *b, int64_t ldb, float *c, int64_t ldc, int keep) {
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        int64_t i = 0;
        for (; i + 4 <= m; i += 4) {
            lanes sum[4][2];
            for (int r = 0; r < 4; r++)
                for (int q = 0; q < 2; q++)
                    sum[r][q] = keep ? *(const lanes *)(c + (i + r) * ldc + j + q * LANES) : (lanes){0};
            for (int64_t p = 0; p < k; p++) {
                lanes left = *(const lanes *)(b + p * ldb + j), right = *(const lanes *)(b + p * ldb + j + LANES);
                for (int r = 0; r < 4; r++) {
                    float scale = a[(i + r) * a_row + p * a_col];
                    sum[r][0] += scale * left;
                    sum[r][1] += scale * right;
                }
            }
            for (int r = 0; r < 4; r++)
                for (int q = 0; q < 2; q++) *(lanes *)(c + (i + r) * ldc + j + q * LANES) = sum[r][q];
        }
        for (; i < m; i++) {
            lanes first = keep ? *(const lanes *)(c + i * ldc + j) : (lanes){0};
            lanes second = keep ? *(const lanes *)(c + i * ldc + j + LANES) : (lanes){0};
            for (int64_t p = 0; p < k; p++) {
                float scale = a[i * a_row + p * a_col];
                first += scale * *(const lanes *)(b + p * ldb + j);
                second += scale * *(const lanes *)(b + p * ldb + j + LANES);
            }
            *(lanes *)(c + i * ldc + j) = first;
            *(lanes *)(c + i * ldc + j + LANES) = second;
        }
    }
    for (int64_t i = 0; i < m && j < n; i++) {
        if (!keep) memset(c + i * ldc + j, 0, (n - j) * sizeof(float));
        for (int64_t p = 0; p < k; p++) {
            float scale = a[i * a_row + p * a_col];
            for (int64_t q = j; q < n; q++) c[i * ldc + q] += scale * b[p * ldb + q];
        }
    }
}

#endif
