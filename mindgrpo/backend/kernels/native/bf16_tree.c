/* See bf16_tree.h. B is packed in panels of 32 columns, pairs of rows beside each other, A converted in blocks of rows. */
#include "bf16_tree.h"

#include "bf16.h"
#include "gemm.h"
#include "onednn.h"
#include "vec16.h"

/* A block of A and a panel of B lie in the second cache together. */
enum { PANEL = 2 * VEC, MOST_ROWS = 12, BLOCK_ELEMENTS = 1 << 17, AVX512_BF16 = 0x80, AMX = 0xe00 };

#ifdef __AVX512BF16__
#include <immintrin.h>

int has_bf16_tree(void) { return (onednn_instruction_sets() & (AVX512_BF16 | AMX)) == AVX512_BF16; }

/* A leaf's depth in whole pairs. */
static inline int64_t depth_of(int64_t leaf) { return leaf + leaf % 2; }

int64_t tree_matrix_bytes(int64_t k, int64_t n, int64_t leaves) {
    return (n + PANEL - 1) / PANEL * PANEL * leaves * depth_of(k / leaves) * sizeof(uint16_t);
}

/* To the nearest; numbers below 1.2e-38 are 0. */
static inline void narrow(const float *x, int64_t count, uint16_t *y) {
    for (int64_t i = 0; i < count; i += VEC) {
        __mmask16 mask = count - i < VEC ? (1 << (count - i)) - 1 : 0xffff;
        _mm256_mask_storeu_epi16(y + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i)));
    }
}

/* The first `count` columns of a row of B; the rest of a panel stays 0. */
static void panel_row(int64_t count, const void *b, int is_bf16, int64_t b_column, uint16_t *to) {
    if (is_bf16)
        for (int64_t j = 0; j < count; j++) to[j] = ((const uint16_t *)b)[j * b_column];
    else if (b_column == 1)
        narrow(b, count, to);
    else
        for (int64_t j = 0; j < count; j++) to[j] = to_bf16(((const float *)b)[j * b_column]);
}

void pack_tree_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                      int64_t leaves, void *packed) {
    int64_t begin, end, leaf = k / leaves, depth = depth_of(leaf), size = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    share_out(member, (n + PANEL - 1) / PANEL, &begin, &end);
    uint16_t *to = (uint16_t *)packed + begin * PANEL * leaves * depth;
    for (int64_t panel = begin * PANEL; panel < end * PANEL; panel += PANEL) {
        int64_t width = n - panel < PANEL ? n - panel : PANEL;
        for (int64_t start = 0; start < k; start += leaf)
            for (int64_t p = 0; p < depth; p += 2, to += 2 * PANEL) {
                uint16_t rows[2][PANEL] = {0};
                for (int64_t q = 0; q < 2 && p + q < leaf; q++)
                    panel_row(width, (const char *)b + ((start + p + q) * b_row + panel * b_column) * size, is_bf16,
                              b_column, rows[q]);
                for (int64_t j = 0; j < PANEL; j++) to[2 * j] = rows[0][j], to[2 * j + 1] = rows[1][j];
            }
    }
}

typedef float Tile[MOST_ROWS * PANEL] __attribute__((aligned(64)));

/* `rows` rows of a panel, the sum of all leaves; `rows` is known while compiling, so that sums stay in registers. The first
 * `m` rows go to `c`. */
ALWAYS_INLINE void tile(int rows, int64_t m, int64_t width, int64_t depth, int64_t leaves, const uint16_t *a,
                        const uint16_t *b, float *c, int64_t ldc) {
    /* Sums of 2^level leaves that wait for their neighbours', as in a binary counter; the last to come is that of all. */
    Tile waiting[MOST_LEVELS];
    int64_t level = 0;
    for (int64_t i = 0; i < leaves; i++, a += depth) {
        __m512 sum[MOST_ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (int64_t p = 0; p < depth; p += 2, b += 2 * PANEL) {
            __m512bh left = (__m512bh)_mm512_load_si512(b), right = (__m512bh)_mm512_load_si512(b + PANEL);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, a + r * leaves * depth + p, sizeof pair);
                __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, left);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, right);
            }
        }
        for (level = 0; i >> level & 1; level++)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < 2; v++)
                    sum[r][v] = _mm512_add_ps(_mm512_load_ps(waiting[level] + r * PANEL + v * VEC), sum[r][v]);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) _mm512_store_ps(waiting[level] + r * PANEL + v * VEC, sum[r][v]);
    }
    for (int64_t r = 0; r < m; r++) memcpy(c + r * ldc, waiting[level] + r * PANEL, width * sizeof(float));
}

static void convert(int64_t m, int64_t leaf, int64_t leaves, const float *a, int64_t lda, uint16_t *block) {
    int64_t depth = depth_of(leaf);
    for (int64_t i = 0; i < m; i++, a += lda)
        for (int64_t j = 0; j < leaves; j++, block += depth) {
            narrow(a + j * leaf, leaf, block);
            if (depth > leaf) block[leaf] = 0;
        }
}

int bf16_gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
                   const void *packed, float *c, int64_t ldc) {
    int64_t leaf = k / leaves, depth = depth_of(leaf), row = leaves * depth, panels = (n + PANEL - 1) / PANEL;
    int64_t most = BLOCK_ELEMENTS / row / MOST_ROWS * MOST_ROWS, first = 0, last = m, begin = 0, end = panels;
    if (most < MOST_ROWS) most = MOST_ROWS;
    /* Few rows are cheap to convert in each member. */
    if (m < MOST_ROWS * 2 * member.size)
        share_out(member, panels, &begin, &end);
    else
        share_out(member, m, &first, &last);
    static __thread uint16_t *block;
    static __thread int64_t elements;
    if (elements < most * row) {
        free(block);
        block = aligned_alloc(64, padded(most * row) * sizeof *block);
        elements = block ? most * row : 0;
        if (!block) return 1;
        memset(block, 0, elements * sizeof *block);
    }
    for (int64_t i = first; i < last; i += most) {
        int64_t count = last - i < most ? last - i : most;
        convert(count, leaf, leaves, a + i * lda, lda, block);
        for (int64_t panel = begin; panel < end; panel++) {
            const uint16_t *right = (const uint16_t *)packed + panel * PANEL * row, *left = block;
            int64_t width = n - panel * PANEL < PANEL ? n - panel * PANEL : PANEL, rest = count;
            float *to = c + i * ldc + panel * PANEL;
            /* Rows beyond the last are what the block held before. */
            for (int64_t rows; rest > 0; rest -= rows, left += rows * row, to += rows * ldc) {
                rows = rest < MOST_ROWS ? rest : MOST_ROWS;
                if (rows > 8)
                    tile(MOST_ROWS, rows, width, depth, leaves, left, right, to, ldc);
                else if (rows > 4)
                    tile(8, rows, width, depth, leaves, left, right, to, ldc);
                else
                    tile(4, rows, width, depth, leaves, left, right, to, ldc);
            }
        }
    }
    return 0;
}

#else

int has_bf16_tree(void) { return 0; }
int64_t tree_matrix_bytes(int64_t k, int64_t n, int64_t leaves) { return -1; }
void pack_tree_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                      int64_t leaves, void *packed) {}
int bf16_gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
                   const void *packed, float *c, int64_t ldc) {
    return 1;
}

#endif
