/* Matrix products through oneDNN's bfloat16 instructions, for threads that are already running together.
 *
 * A factor is the sum of `parts` bfloat16 numbers: x = x0 + x1 + x2, where x0 is x rounded and x1 what that leaves,
 * rounded. Of one part x w is x0 w0, with float32 sums; of two x0 w0 + x1 w0 + x0 w1, which leaves 2^-16 of it out; of three
 * x0 w0 + x1 w0 + x2 w0 + x0 w1 + x1 w1 + x0 w2, which leaves 2^-24 out, as float32 does (arXiv:1904.06376).
 *
 * A row's sums are the same whatever the number of rows, as every product goes through blocks of a few fixed sizes; so a
 * sample's numbers do not depend on what is computed beside it.
 */
#ifndef MINDGRPO_BF16_GEMM_H
#define MINDGRPO_BF16_GEMM_H

#include "thread_pool.h"

enum { MOST_PARTS = 3 };

/* How a product is summed. `leaves` as in gemm_tree (gemm.h): 1, or a power of two that divides k. */
typedef struct {
    int parts, leaves;
} Summation;

/* Bytes of a packed B [k, n]; -1 where oneDNN fails. */
int64_t packed_matrix_bytes(int64_t k, int64_t n, Summation sum);

/* The member's share of packing: element (p, j) of B [k, n], float or bfloat16, is b[p * b_row + j * b_column], one of the
 * two 1. `packed` is 64-byte aligned. Others may use it once all members have met. */
void pack_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                 Summation sum, void *packed);

/* The member's share of C[m, n] = A[m, k] B; A's element (i, p) is a[i * a_row + p * a_column], one of the two 1, and
 * a_column where there are several leaves; ldc the floats from one row of C to the next. */
void bf16_gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
               Summation sum, const void *packed, float *c, int64_t ldc);

/* Keeps why a product of some member failed, a sentence's part. */
void product_failed(const char *why);

/* Whether any failed since the last call of this. */
int product_failure(const char **why);

#endif
