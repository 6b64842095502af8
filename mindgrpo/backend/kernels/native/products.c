/* Matrix products of the trainer, and the packing of those that the generator keeps: in float32 (gemm.h), or with factors
 * in bfloat16 parts (bf16_gemm.h), whose second factor is packed at every call.
 */
#include "bf16_gemm.h"
#include "gemm.h"
#include "kernel.h"

/* `parts` is 0 for products in float32. */
typedef struct {
    int64_t m, n, k, a_row, a_column, b_row, b_column;
    Summation sum;
    int b_is_bf16;
    const float *a;
    const void *b;
    float *c;
    void *packed;
} Task;

static void pack(void *task, Member member) {
    const Task *t = task;
    pack_matrix(member, t->k, t->n, t->b, t->b_is_bf16, t->b_row, t->b_column, t->sum, t->packed);
}

static void multiply(void *task, Member member) {
    const Task *t = task;
    int turned = t->b_column != 1;
    if (t->sum.parts) {
        pack(task, member);
        pool_meet(member);
        bf16_gemm(member, t->m, t->n, t->k, t->a, t->a_row, t->a_column, t->sum, t->packed, t->c, t->n);
    } else if (t->sum.leaves > 1) {
        if (gemm_tree(member, t->m, t->n, t->k, t->sum.leaves, t->a, t->a_row, t->b, t->b_row, t->c, t->n))
            product_failed("no memory for a panel of a product");
    } else
        gemm(member, t->m, t->n, t->k, t->a, t->a_row, t->a_column, t->b, turned ? t->b_column : t->b_row, turned, t->c,
             t->n, 0);
}

static int check_summation(const Call *call, const Task *t) {
    int parts = t->sum.parts, leaves = t->sum.leaves;
    if (parts < 0 || parts > MOST_PARTS) return refuse(call, "%d parts: there are 0 to %d", parts, MOST_PARTS);
    if (leaves < 1 || leaves > MOST_LEAVES || leaves & (leaves - 1) || t->k % leaves)
        return refuse(call, "%ld terms are not summed in %d leaves", t->k, leaves);
    if (!parts && t->b_is_bf16) return refuse(call, "products in float32 take no bfloat16");
    return 0;
}

static int run(const Call *call, Task *t) {
    const char *why;
    if (check_summation(call, t)) return KERNEL_REFUSED;
    if (t->sum.parts) {
        int64_t bytes = packed_matrix_bytes(t->k, t->n, t->sum);
        if (bytes < 0) return product_failure(&why) ? refuse(call, "%s", why) : KERNEL_REFUSED;
        t->packed = scratch(call, bytes / sizeof(float) + 1);
        if (!t->packed) return KERNEL_OUT_OF_MEMORY;
    }
    if (t->m) pool_run(multiply, t);
    return product_failure(&why) ? refuse(call, "%s", why) : 0;
}

static int run_pack(const Call *call, Task *t) {
    const char *why;
    if (check_summation(call, t)) return KERNEL_REFUSED;
    int64_t bytes = t->sum.parts ? packed_matrix_bytes(t->k, t->n, t->sum) : 0;
    if (bytes > dim(call, 'P')) return refuse(call, "%ld bytes are no room for %ld", dim(call, 'P'), bytes);
    if (bytes > 0) pool_run(pack, t);
    return product_failure(&why) ? refuse(call, "%s", why) : 0;
}

/* Tensor `index` of the call: parts and leaves. */
static Summation summation(const Call *call, int index) {
    const int32_t *numbers = call->params[index];
    return (Summation){numbers[0], numbers[1]};
}

/* For products with w. */
KERNEL(product_pack, "w f32|bf16[K, M], sum i32[2] -> packed u8[P]") {
    int64_t n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {0, n, k, 0, 0, n, 1, summation(call, 1), is_bf16(call, 0), NULL, p[0], NULL, p[2]};
    return run_pack(call, &t);
}

/* For products with w^T. */
KERNEL(product_pack_turned, "w f32|bf16[M, K], sum i32[2] -> packed u8[P]") {
    int64_t n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {0, n, k, 0, 0, 1, k, summation(call, 1), is_bf16(call, 0), NULL, p[0], NULL, p[2]};
    return run_pack(call, &t);
}

/* y = x w */
KERNEL(product, "x f32[N, K], w f32|bf16[K, M], sum i32[2] -> y f32[N, M]") {
    int64_t m = dim(call, 'N'), n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {m, n, k, k, 1, n, 1, summation(call, 2), is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run(call, &t);
}

/* y = x w^T, in one leaf */
KERNEL(product_turned, "x f32[N, K], w f32|bf16[M, K], sum i32[2] -> y f32[N, M]") {
    int64_t m = dim(call, 'N'), n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {m, n, k, k, 1, 1, k, {summation(call, 2).parts, 1}, is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run(call, &t);
}

/* y = x^T d, in one leaf: a weight's gradient. */
KERNEL(product_gradient, "x f32[N, K], d f32[N, M], sum i32[2] -> y f32[K, M]") {
    int64_t m = dim(call, 'K'), n = dim(call, 'M'), k = dim(call, 'N');
    void **p = call->params;
    Task t = {m, n, k, 1, m, n, 1, {summation(call, 2).parts, 1}, is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run(call, &t);
}
