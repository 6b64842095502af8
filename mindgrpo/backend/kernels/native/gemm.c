/* See gemm.h. B goes by in panels of 32 columns, each against all rows of A in blocks of up to MOST_ROWS. */
#include "gemm.h"

#include <stdlib.h>

/* A panel is copied where enough rows read it: in a wide matrix its columns lie on as many pages as there are rows.
 * While it is turned, what is copied stays in the first cache. */
enum { PANEL = 2 * VEC, DEPTH = 512, TURNED_DEPTH = 128, FEW_ROWS_DEPTH = 64, COPY_FROM = 24, TREE_ROWS = 1536 };
/* Sums take three quarters of the registers; the rest is for B and an element of A. */
enum { MOST_ROWS = REGISTERS * 3 / 4 / (PANEL / LANES) };
_Static_assert(MOST_ROWS >= 1 && MOST_ROWS <= 12, "some_rows has a tile for each number of rows up to 12");

/* `rows` x `vecs` vectors of C; both are known while compiling, so that the sums stay in registers. Meanwhile as many
 * columns at `next` come to the caches: a copy of them, or a product with them, would wait for each row. */
ALWAYS_INLINE void tile(int rows, int vecs, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                        int64_t ldb, const float *next, int64_t next_row, float *c, int64_t ldc, int keep) {
    lanes sum[MOST_ROWS][PANEL / LANES];
    int parts = vecs * (VEC / LANES);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) sum[r][v] = keep ? *(const lanes *)(c + r * ldc + v * LANES) : (lanes){0};
    for (int64_t p = 0; p < k; p++) {
        lanes right[PANEL / LANES];
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) right[v] = *(const lanes *)(b + p * ldb + v * LANES);
        for (int v = 0; v < vecs; v++) __builtin_prefetch(next + p * next_row + v * VEC, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < parts; v++) sum[r][v] += a[r * a_row + p * a_column] * right[v];
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) *(lanes *)(c + r * ldc + v * LANES) = sum[r][v];
}

/* Up to MOST_ROWS rows, as evenly as m allows: a few wait for the latency of their sums. Returns how many. */
ALWAYS_INLINE int64_t some_rows(int64_t m, int vecs, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                                const float *b, int64_t ldb, const float *next, int64_t next_row, float *c, int64_t ldc,
                                int keep) {
    int64_t blocks = (m + MOST_ROWS - 1) / MOST_ROWS, rows = (m + blocks - 1) / blocks;
#define ROWS(COUNT)                                                                                                \
    case COUNT:                                                                                                    \
        if (COUNT <= MOST_ROWS)                                                                                    \
            tile(COUNT % (MOST_ROWS + 1), vecs, k, a, a_row, a_column, b, ldb, next, next_row, c, ldc, keep);      \
        break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) }
#undef ROWS
    return rows;
}

/* All rows of A with a panel of `width` columns. */
ALWAYS_INLINE void panel_product(int64_t m, int64_t width, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                                 const float *b, int64_t ldb, const float *next, int64_t next_row, float *c, int64_t ldc,
                                 int keep) {
    float edge[MOST_ROWS * PANEL];
    for (int64_t i = 0, rows; i < m; i += rows, a += rows * a_row, c += rows * ldc) {
        if (i > 0) next = b, next_row = ldb;
        if (width == PANEL) {
            rows = some_rows(m - i, 2, k, a, a_row, a_column, b, ldb, next, next_row, c, ldc, keep);
        } else if (width == VEC) {
            rows = some_rows(m - i, 1, k, a, a_row, a_column, b, ldb, next, next_row, c, ldc, keep);
        } else {
            int64_t most = m - i < MOST_ROWS ? m - i : MOST_ROWS;
            for (int64_t r = 0; r < most && keep; r++) memcpy(edge + r * PANEL, c + r * ldc, width * sizeof(float));
            rows = some_rows(m - i, 2, k, a, a_row, a_column, b, ldb, next, next_row, edge, PANEL, keep);
            for (int64_t r = 0; r < rows; r++) memcpy(c + r * ldc, edge + r * PANEL, width * sizeof(float));
        }
    }
}

/* `width` columns of B [k, .] side by side, zero up to 32. */
static void copy_panel(int64_t k, int64_t width, const float *b, int64_t ldb, float *panel) {
    for (int64_t p = 0; p < k; p++, b += ldb, panel += PANEL) {
        if (width == PANEL) {
            *(vec16 *)panel = *(const vec16 *)b;
            *(vec16 *)(panel + VEC) = *(const vec16 *)(b + VEC);
        } else {
            for (int64_t q = 0; q < PANEL; q++) panel[q] = q < width ? b[q] : 0.0f;
        }
    }
}

/* The same of B [., k]^T: `width` of its rows, turned. */
static void turn_panel(int64_t k, int64_t width, const float *b, int64_t ldb, float *panel) {
    for (int64_t first = 0; first < PANEL; first += VEC) {
        int64_t p = 0, rows = width - first < 0 ? 0 : width - first < VEC ? width - first : VEC;
        const float *from = b + first * ldb;
        for (; p + VEC <= k && rows; p += VEC) {
            vec16 x[VEC];
            for (int64_t q = 0; q < VEC; q++) {
                x[q] = q < rows ? *(const vec16 *)(from + q * ldb + p) : (vec16){0};
                /* The next panel: these are more streams than the processor follows. */
                __builtin_prefetch(from + (q + PANEL) * ldb + p);
            }
            transpose16(x);
            for (int64_t q = 0; q < VEC; q++) *(vec16 *)(panel + (p + q) * PANEL + first) = x[q];
        }
        for (; p < k; p++)
            for (int64_t q = 0; q < VEC; q++) panel[p * PANEL + first + q] = q < rows ? from[q * ldb + p] : 0.0f;
    }
}

void gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
          const float *b, int64_t ldb, int transposed, float *c, int64_t ldc, int keep) {
    _Alignas(64) float copied[DEPTH * PANEL];
    /* All of A goes by a panel at a time, or stretches of it go by all panels: where A is too large for the caches, and
     * where few rows make it a matter of reading B, which is then read from begin to end. */
    int64_t begin, end, step = transposed ? TURNED_DEPTH : m < COPY_FROM ? FEW_ROWS_DEPTH : DEPTH;
    int64_t stretch = m > 64 || k < step || step == FEW_ROWS_DEPTH ? step : k;
    share_out(member, (n + PANEL - 1) / PANEL, &begin, &end);
    for (int64_t start = 0; start == 0 || start < k; start += stretch)
        for (int64_t j = begin * PANEL; j < end * PANEL && j < n; j += PANEL)
            for (int64_t p = start; p == 0 || p < (k - start < stretch ? k : start + stretch); p += step) {
                int64_t width = n - j < PANEL ? n - j : PANEL, depth = k - p < step ? k - p : step, ld = ldb;
                const float *panel = transposed ? b + j * ldb + p : b + p * ldb + j, *next = panel;
                /* Behind the last panel are the rows of B that follow, or what lies behind it: the next expert's. */
                if (!transposed) next += j + PANEL < end * PANEL && j + PANEL < n ? PANEL : depth * ldb - (j - begin * PANEL);
                if (transposed || m >= COPY_FROM || width % VEC) {
                    (transposed ? turn_panel : copy_panel)(depth, width, panel, ldb, copied);
                    panel = copied, ld = PANEL;
                    if (transposed) next = copied;
                }
                panel_product(m, width, depth, a + p * a_column, a_row, a_column, panel, ld, next, transposed ? PANEL : ldb,
                              c + j, ldc, keep || p > 0);
            }
}

/* Up to MOST_ROWS rows of C from a whole panel; returns how many. `leaf` is the depth of each of the leaves. */
static int64_t tree_rows(int64_t m, int64_t width, int64_t leaf, int64_t leaves, const float *a, int64_t lda, const float *b,
                         int64_t ldb, float *c, int64_t ldc) {
    /* Sums of 2^level leaves that wait for their neighbours', as in a binary counter. */
    float sums[MOST_LEVELS][MOST_ROWS * PANEL], sum[MOST_ROWS * PANEL];
    int64_t rows = 0, level = 0;
    for (int64_t i = 0; i < leaves; i++) {
        const float *panel = b + i * leaf * ldb;
        rows = some_rows(m, 2, leaf, a + i * leaf, lda, 1, panel, ldb, panel, ldb, sum, PANEL, 0);
        for (level = 0; i >> level & 1; level++)
            for (int64_t j = 0; j < rows * PANEL; j += VEC) *(vec16 *)(sum + j) = *(vec16 *)(sums[level] + j) + *(vec16 *)(sum + j);
        memcpy(sums[level], sum, rows * PANEL * sizeof(float));
    }
    for (int64_t r = 0; r < rows; r++) memcpy(c + r * ldc, sum + r * PANEL, width * sizeof(float));
    return rows;
}

int gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
               const float *b, int64_t ldb, float *c, int64_t ldc) {
    static __thread float *copied;
    static __thread int64_t copied_floats;
    int64_t begin, end, leaf = k / leaves;
    if (copied_floats < k * PANEL) {
        free(copied);
        copied = aligned_alloc(64, k * PANEL * sizeof(float));
        copied_floats = copied ? k * PANEL : 0;
        if (!copied) return 1;
    }
    share_out(member, (n + PANEL - 1) / PANEL, &begin, &end);
    for (int64_t i = 0; i < m; i += TREE_ROWS) {
        int64_t rows = m - i < TREE_ROWS ? m - i : TREE_ROWS;
        for (int64_t j = begin * PANEL; j < end * PANEL && j < n; j += PANEL) {
            int64_t width = n - j < PANEL ? n - j : PANEL, ld = ldb;
            const float *panel = b + j;
            if (rows >= COPY_FROM || width < PANEL) {
                copy_panel(k, width, panel, ldb, copied);
                panel = copied, ld = PANEL;
            }
            for (int64_t r = i; r < i + rows;)
                r += tree_rows(i + rows - r, width, leaf, leaves, a + r * lda, lda, panel, ld, c + r * ldc + j, ldc);
        }
    }
    return 0;
}
