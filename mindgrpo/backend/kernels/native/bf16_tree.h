/* Matrix products in bfloat16, of one part, whose sums are binary trees, by the processor's own instruction: a tile of all
 * leaves stays in registers and the first cache, where a product of oneDNN for each leaf writes all of them to memory.
 *
 * A leaf has the bits of oneDNN's product: one chain of the same instruction, so ranks with one leaf each may use that.
 */
#ifndef MINDGRPO_BF16_TREE_H
#define MINDGRPO_BF16_TREE_H

#include "thread_pool.h"

/* Whether there are such products here: oneDNN multiplies by AVX512_BF16, and not by AMX. */
int has_bf16_tree(void);

/* Bytes of a packed B [k, n]. */
int64_t tree_matrix_bytes(int64_t k, int64_t n, int64_t leaves);

/* As pack_matrix (bf16_gemm.h). */
void pack_tree_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                      int64_t leaves, void *packed);

/* The member's share of C[m, n] = A[m, k] B, `lda` and `ldc` floats from one row to the next; `leaves` as in gemm_tree
 * (gemm.h). 0 if there was memory for it. */
int bf16_gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
                   const void *packed, float *c, int64_t ldc);

#endif
