/* What every kernel shares: how MindSpore hands arguments over, an exponential that vectorises, and a small product.
 *
 * A kernel is `int name(KERNEL_ARGS)`: inputs first, outputs last, all contiguous, float32 or int32; 0 is success.
 * Constants (sizes, flags) arrive as int32 or float32 inputs. No kernel keeps a pointer after it returns.
 */
#ifndef MINDGRPO_VEC16_H
#define MINDGRPO_VEC16_H

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

typedef float vec16 __attribute__((vector_size(64), aligned(4)));
#define VEC 16

/* `wide` x VEC columns of C[m, .] (+)= A B; `wide` is 1 or 2 and known while compiling. */
static inline __attribute__((always_inline)) void strip(int wide, int64_t m, int64_t k, const float *a, int64_t a_row,
                                                        int64_t a_col, const float *b, int64_t ldb, float *c,
                                                        int64_t ldc, int keep) {
    for (int64_t i = 0; i < m; i += 4) {
        int rows = m - i < 4 ? (int)(m - i) : 4;
        const float *left[4];
        vec16 sum[4][2];
        for (int r = 0; r < 4; r++) {
            /* A short block works its last row more than once and stores it once. */
            int64_t at = i + (r < rows ? r : rows - 1);
            left[r] = a + at * a_row;
            for (int q = 0; q < wide; q++) sum[r][q] = keep ? *(const vec16 *)(c + at * ldc + q * VEC) : (vec16){0};
        }
        for (int64_t p = 0; p < k; p++) {
            vec16 right[2];
            for (int q = 0; q < wide; q++) right[q] = *(const vec16 *)(b + p * ldb + q * VEC);
            for (int r = 0; r < 4; r++) {
                float scale = left[r][p * a_col];
                for (int q = 0; q < wide; q++) sum[r][q] += scale * right[q];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int q = 0; q < wide; q++) *(vec16 *)(c + (i + r) * ldc + q * VEC) = sum[r][q];
    }
}

/* C[m, n] = (keep ? C : 0) + A[m, k] B[k, n]. A's element (i, p) is a[i * a_row + p * a_col]; B and C have unit columns.
 * A row's result does not depend on m. */
static inline void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_col,
                           const float *b, int64_t ldb, float *c, int64_t ldc, int keep) {
    int64_t j = 0;
    for (; j + 2 * VEC <= n; j += 2 * VEC) strip(2, m, k, a, a_row, a_col, b + j, ldb, c + j, ldc, keep);
    if (j + VEC <= n) {
        strip(1, m, k, a, a_row, a_col, b + j, ldb, c + j, ldc, keep);
        j += VEC;
    }
    for (int64_t i = 0; i < m && j < n; i++) {
        if (!keep) memset(c + i * ldc + j, 0, (n - j) * sizeof(float));
        for (int64_t p = 0; p < k; p++) {
            float scale = a[i * a_row + p * a_col];
            for (int64_t q = j; q < n; q++) c[i * ldc + q] += scale * b[p * ldb + q];
        }
    }
}

/* One head of one token as attention wants it: x = source + bias, normed where `norm` is given, turned by `angles`
 * (cos [D], then sin [D]; both halves of a head have the same). */
static inline void turned_head(const float *source, const float *bias, const float *norm, float eps,
                               const float *angles, int64_t dim, float *out) {
    int64_t half = dim / 2;
    float scale = 1.0f;
    for (int64_t i = 0; i < dim; i++) out[i] = source[i] + (bias ? bias[i] : 0.0f);
    if (norm) {
        scale = 1.0f / sqrtf(dot(out, out, dim) / dim + eps);
        for (int64_t i = 0; i < dim; i++) out[i] *= scale * norm[i];
    }
    for (int64_t i = 0; i < half; i++) {
        float low = out[i], high = out[i + half];
        out[i] = low * angles[i] - high * angles[dim + i];
        out[i + half] = high * angles[i] + low * angles[dim + i];
    }
}

#endif
