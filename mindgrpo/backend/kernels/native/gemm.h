/* Products of a few rows with a weight, as decoding needs them, for threads that are already running together.
 *
 * Every element is one chain of multiply-adds over k in order, whatever the number of rows or of threads: a sample's
 * numbers do not depend on what is computed beside it.
 */
#ifndef MINDGRPO_GEMM_H
#define MINDGRPO_GEMM_H

#include "vec16.h"
#include "thread_pool.h"

/* Scratch of one thread, kept for its next call; NULL without memory. */
float *scratch(int64_t floats);

enum { PANEL = 2 * VEC, PACK_FROM = 24, DEEP = 512 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* `rows` x 32 elements, added to C where `keep`; `rows` is known while compiling. */
ALWAYS_INLINE void tile(int rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                        int64_t ldc, int keep) {
    vec16 sum[12][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = keep ? *(const vec16 *)(c + r * ldc) : (vec16){0};
        sum[r][1] = keep ? *(const vec16 *)(c + r * ldc + VEC) : (vec16){0};
    }
    for (int64_t p = 0; p < k; p++) {
        vec16 left = *(const vec16 *)(b + p * ldb), right = *(const vec16 *)(b + p * ldb + VEC);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float scale = a[r * lda + p];
            sum[r][0] += scale * left;
            sum[r][1] += scale * right;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        *(vec16 *)(c + r * ldc) = sum[r][0];
        *(vec16 *)(c + r * ldc + VEC) = sum[r][1];
    }
}

static inline void panel_product(int64_t m, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                                 float *c, int64_t ldc, int keep) {
    int64_t i = 0;
    for (; i + 12 <= m; i += 12) tile(12, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, keep);
    if (i + 8 <= m) tile(8, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, keep), i += 8;
    if (i + 4 <= m) tile(4, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, keep), i += 4;
    if (i + 2 <= m) tile(2, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, keep), i += 2;
    if (i < m) tile(1, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, keep);
}

/* Columns [j, j + 32) of B side by side: in a wide weight a column lies on as many pages as it has rows. */
static inline void pack_panel(int64_t k, int64_t width, const float *b, int64_t ldb, float *packed) {
    for (int64_t p = 0; p < k; p++, b += ldb, packed += PANEL) {
        if (width == PANEL) {
            *(vec16 *)packed = *(const vec16 *)b;
            *(vec16 *)(packed + VEC) = *(const vec16 *)(b + VEC);
        } else {
            for (int64_t q = 0; q < PANEL; q++) packed[q] = q < width ? b[q] : 0.0f;
        }
    }
}

/* The member's columns of C[m, n] = A[m, k] B[k, n]. */
static inline void multiply(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                            const float *b, float *c) {
    int64_t begin, end, deep = m > 64 ? DEEP : k;
    float *packed = scratch(PANEL * (deep + m)), *edge = packed + PANEL * deep;
    share_out(member, (n + PANEL - 1) / PANEL, &begin, &end);
    for (int64_t p = 0; p < k; p += deep)
        for (int64_t j = begin * PANEL; j < end * PANEL && j < n; j += PANEL) {
            int64_t width = n - j < PANEL ? n - j : PANEL, depth = k - p < deep ? k - p : deep;
            const float *panel = b + p * n + j;
            if (width == PANEL && m < PACK_FROM) {
                panel_product(m, depth, a + p, lda, panel, n, c + j, n, p > 0);
                continue;
            }
            pack_panel(depth, width, panel, n, packed);
            if (width == PANEL) {
                panel_product(m, depth, a + p, lda, packed, PANEL, c + j, n, p > 0);
                continue;
            }
            for (int64_t i = 0; i < m && p > 0; i++) memcpy(edge + i * PANEL, c + i * n + j, width * sizeof(float));
            panel_product(m, depth, a + p, lda, packed, PANEL, edge, PANEL, p > 0);
            for (int64_t i = 0; i < m; i++) memcpy(c + i * n + j, edge + i * PANEL, width * sizeof(float));
        }
}

/* 16 rows of 16 -> its columns */
ALWAYS_INLINE void transpose16(vec16 *x) {
    typedef int32_t order __attribute__((vector_size(64)));
#pragma GCC unroll 4
    for (int step = 1; step < VEC; step *= 2) {
        order low, high;
        for (int i = 0; i < VEC; i++) {
            low[i] = i & step ? i - step + VEC : i;
            high[i] = i & step ? i + VEC : i + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < VEC; i++) {
            if (i & step) continue;
            vec16 a = x[i], b = x[i + step];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}

/* 16 rows of B against 16 of A, whose k columns come as `x` [k, 16]; `sum` gets A's rows. */
ALWAYS_INLINE void turned_tile(int64_t k, const float *x, const float *b, vec16 *sum) {
    const float *rows[4] = {b, b + 4 * k, b + 8 * k, b + 12 * k};
#pragma GCC unroll 16
    for (int q = 0; q < VEC; q++) sum[q] = (vec16){0};
    for (int64_t p = 0; p < k; p++) {
        vec16 column = *(const vec16 *)(x + p * VEC);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) sum[4 * q + s] += rows[q][p + s * k] * column;
    }
    transpose16(sum);
}

/* The member's columns of C[m, n] = A[m, k] B[n, k]^T, A given as `turned` [ceil(m / 16), k, 16]: B is read once, as
 * it lies. */
static inline void multiply_turned(Member member, int64_t m, int64_t n, int64_t k, const float *turned, const float *b,
                                   float *c, int64_t ldc) {
    int64_t begin, end;
    float *edge = scratch(VEC * k);
    share_out(member, (n + VEC - 1) / VEC, &begin, &end);
    for (int64_t j = begin * VEC; j < end * VEC && j < n; j += VEC) {
        int64_t width = n - j < VEC ? n - j : VEC;
        const float *rows = b + j * k;
        if (width < VEC) {
            memset(edge, 0, VEC * k * sizeof(float));
            rows = memcpy(edge, rows, width * k * sizeof(float));
        }
        for (int64_t i = 0; i < m; i += VEC) {
            vec16 sum[VEC];
            turned_tile(k, turned + i * k, rows, sum);
            int64_t height = m - i < VEC ? m - i : VEC;
            for (int64_t r = 0; r < height; r++) memcpy(c + (i + r) * ldc + j, &sum[r], width * sizeof(float));
        }
    }
}

#endif
