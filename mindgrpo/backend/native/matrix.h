/* Products of a few rows with a weight, as decoding needs them, for threads that are already running together.
 *
 * Every element is one chain of multiply-adds over k in order, whatever the number of rows or of threads: a sample's
 * numbers do not depend on what is computed beside it.
 */
#ifndef MINDGRPO_MATRIX_H
#define MINDGRPO_MATRIX_H

#include "core.h"

enum { PANEL = 2 * LANES, PACK_FROM = 24 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* `rows` x 32 elements; `rows` is known while compiling. */
ALWAYS_INLINE void tile(int rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                        int64_t ldc) {
    lanes sum[12][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (lanes){0};
    for (int64_t p = 0; p < k; p++) {
        lanes left = *(const lanes *)(b + p * ldb), right = *(const lanes *)(b + p * ldb + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float scale = a[r * lda + p];
            sum[r][0] += scale * left;
            sum[r][1] += scale * right;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        *(lanes *)(c + r * ldc) = sum[r][0];
        *(lanes *)(c + r * ldc + LANES) = sum[r][1];
    }
}

static inline void panel_product(int64_t m, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                          int64_t ldc) {
    int64_t i = 0;
    for (; i + 12 <= m; i += 12) tile(12, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
    if (i + 8 <= m) tile(8, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc), i += 8;
    if (i + 4 <= m) tile(4, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc), i += 4;
    if (i + 2 <= m) tile(2, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc), i += 2;
    if (i < m) tile(1, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
}

/* C[m, n] = A[m, k] B[k, n], shared out over the threads of the team, which meet at the end. */
static inline void multiply(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b, float *c) {
    float *packed = thread_room(PANEL * (k + m));
#pragma omp for schedule(static)
    for (int64_t j = 0; j < n; j += PANEL) {
        int64_t width = n - j < PANEL ? n - j : PANEL;
        if (width == PANEL && m < PACK_FROM) {
            panel_product(m, k, a, lda, b + j, n, c + j, n);
            continue;
        }
        /* Side by side: a column of a wide weight lies on as many pages as it has rows. */
        for (int64_t p = 0; p < k; p++) {
            memcpy(packed + p * PANEL, b + p * n + j, width * sizeof(float));
            if (width < PANEL) memset(packed + p * PANEL + width, 0, (PANEL - width) * sizeof(float));
        }
        if (width == PANEL) {
            panel_product(m, k, a, lda, packed, PANEL, c + j, n);
            continue;
        }
        float *edge = packed + PANEL * k;
        panel_product(m, k, a, lda, packed, PANEL, edge, PANEL);
        for (int64_t i = 0; i < m; i++) memcpy(c + i * n + j, edge + i * PANEL, width * sizeof(float));
    }
}

/* 16 rows of 16 -> its columns */
ALWAYS_INLINE void transpose16(lanes *x) {
    typedef int32_t order __attribute__((vector_size(64)));
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        order low, high;
        for (int i = 0; i < LANES; i++) {
            low[i] = i & step ? i - step + LANES : i;
            high[i] = i & step ? i + LANES : i + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            lanes a = x[i], b = x[i + step];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}

/* 16 rows of B against 16 of A, whose k columns come as `x` [k, 16]; `sum` gets A's rows. */
ALWAYS_INLINE void turned_tile(int64_t k, const float *x, const float *b, lanes *sum) {
    const float *rows[4] = {b, b + 4 * k, b + 8 * k, b + 12 * k};
#pragma GCC unroll 16
    for (int q = 0; q < LANES; q++) sum[q] = (lanes){0};
    for (int64_t p = 0; p < k; p++) {
        lanes column = *(const lanes *)(x + p * LANES);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) sum[4 * q + s] += rows[q][p + s * k] * column;
    }
    transpose16(sum);
}

/* C[m, n] = A[m, k] B[n, k]^T with A given as `turned` [ceil(m / 16), k, 16]: B is read once, as it lies. */
static inline void multiply_turned(int64_t m, int64_t n, int64_t k, const float *turned, const float *b, float *c,
                            int64_t ldc) {
    float *edge = thread_room(LANES * k);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < n; j += LANES) {
        int64_t width = n - j < LANES ? n - j : LANES;
        const float *rows = b + j * k;
        if (width < LANES) {
            memset(edge, 0, LANES * k * sizeof(float));
            rows = memcpy(edge, rows, width * k * sizeof(float));
        }
        for (int64_t i = 0; i < m; i += LANES) {
            lanes sum[LANES];
            turned_tile(k, turned + i * k, rows, sum);
            int64_t height = m - i < LANES ? m - i : LANES;
            for (int64_t r = 0; r < height; r++) memcpy(c + (i + r) * ldc + j, &sum[r], width * sizeof(float));
        }
    }
}

#endif
