/* The one matrix product in float32, for threads that are already running together.
 *
 * Every element is one chain of multiply-adds over k in order, whatever the number of rows, columns or threads, so a
 * sample's numbers do not depend on what is computed beside it. oneDNN's float32 products do not promise that: those of
 * 3.10.1 give a row other bits where it is alone (AVX-512), in 15 of 80 numbers of rows where B is transposed, and in
 * 36 to 76 of 80 with AVX2 (docs/performance.md).
 */
#ifndef MINDGRPO_GEMM_H
#define MINDGRPO_GEMM_H

#include "thread_pool.h"
#include "vec16.h"

/* The member's rows or columns of C[m, n] = (keep ? C : 0) + A[m, k] B[k, n], or A B^T where B is [n, k] and `transposed`.
 * A's element (i, p) is a[i * a_row + p * a_column]; ldb and ldc are the floats from one row to the next. */
void gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
          const float *b, int64_t ldb, int transposed, float *c, int64_t ldc, int keep);

/* Leaves of a sum at most, and levels of their tree. */
enum { MOST_LEAVES = 256, MOST_LEVELS = 9 };

/* The same of B [k, n] as it lies and A [m, k], `lda` floats from one row to the next, where k is summed in `leaves` equal
 * chains, a power of two that divides it, and these in a binary tree: (0 + 1) + (2 + 3) for four. So ranks that hold
 * neighbouring leaves and are summed in a binary tree give the bits of one rank that holds all (arXiv:2511.17826). 0 if
 * there was memory for it. */
int gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
               const float *b, int64_t ldb, float *c, int64_t ldc);

/* gemm by the caller alone, B as it lies. */
static inline void gemm_alone(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                              const float *b, int64_t ldb, float *c, int64_t ldc, int keep) {
    gemm((Member){0, 1}, m, n, k, a, a_row, a_column, b, ldb, 0, c, ldc, keep);
}

#endif
