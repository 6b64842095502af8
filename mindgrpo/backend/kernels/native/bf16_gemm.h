/* Matrix products through oneDNN's bfloat16 instructions, for threads that are already running together.
 *
 * With one term, both factors are rounded to bfloat16 and multiplied with float32 sums. With three, x = xh + xl, where xh
 * is x in bfloat16 and xl what is left, also in bfloat16; x w = xh wh + xh wl + xl wh, as one product of threefold depth
 * [xh, xh, xl] [wh; wl; wh]. What is left out, xl wl and the rest of the rest, is 2^-16 of x w (arXiv:1904.06376).
 *
 * A row's sums are the same whatever the number of rows, as every product goes through blocks of a few fixed sizes; so a
 * sample's numbers do not depend on what is computed beside it.
 */
#ifndef MINDGRPO_BF16_GEMM_H
#define MINDGRPO_BF16_GEMM_H

#include "thread_pool.h"

/* Bytes of a packed B [k, n]; -1 where oneDNN fails. */
int64_t packed_matrix_bytes(int64_t k, int64_t n, int terms);

/* The member's share of packing: element (p, j) of B [k, n], float or bfloat16, is b[p * b_row + j * b_column], one of the
 * two 1. `packed` is 64-byte aligned. Others may use it once all members have met. */
void pack_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                 int terms, void *packed);

/* The member's share of C[m, n] = A[m, k] B; A's element (i, p) is a[i * a_row + p * a_column], one of the two 1; ldc the
 * floats from one row of C to the next. */
void bf16_gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
               int terms, const void *packed, float *c, int64_t ldc);

/* Whether any of these failed since the last call of this; a sentence's part in `why`. */
int bf16_gemm_failed(const char **why);

#endif
