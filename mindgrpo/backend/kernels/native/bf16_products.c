/* Matrix products with factors in bfloat16 parts (bf16_gemm.h): the trainer's, whose second factor is packed
 * at every call, and the packing of those that the generator keeps. */
#include "bf16_gemm.h"
#include "kernel.h"

typedef struct {
    int64_t m, n, k, a_row, a_column, b_row, b_column;
    int parts, b_is_bf16;
    const float *a;
    const void *b;
    float *c;
    void *packed;
} Task;

static void work(void *task, Member member) {
    const Task *t = task;
    pack_matrix(member, t->k, t->n, t->b, t->b_is_bf16, t->b_row, t->b_column, t->parts, t->packed);
    pool_meet(member);
    bf16_gemm(member, t->m, t->n, t->k, t->a, t->a_row, t->a_column, t->parts, t->packed, t->c, t->n);
}

static int run_task(const Call *call, Task *t) {
    const char *why;
    if (t->parts < 1 || t->parts > MOST_PARTS) return refuse(call, "%d parts: there are 1 to %d", t->parts, MOST_PARTS);
    int64_t bytes = packed_matrix_bytes(t->k, t->n, t->parts);
    if (bytes < 0) return bf16_gemm_failed(&why) ? refuse(call, "%s", why) : KERNEL_REFUSED;
    t->packed = scratch(call, bytes / sizeof(float) + 1);
    if (!t->packed) return KERNEL_OUT_OF_MEMORY;
    if (t->m) pool_run(work, t);
    return bf16_gemm_failed(&why) ? refuse(call, "%s", why) : 0;
}

static void pack_all(void *task, Member member) {
    const Task *t = task;
    pack_matrix(member, t->k, t->n, t->b, t->b_is_bf16, t->b_row, t->b_column, t->parts, t->packed);
}

static int pack_task(const Call *call, Task *t) {
    const char *why;
    int64_t bytes = packed_matrix_bytes(t->k, t->n, t->parts);
    if (bytes > dim(call, 'P')) return refuse(call, "%ld bytes are no room for %ld", dim(call, 'P'), bytes);
    if (bytes >= 0) pool_run(pack_all, t);
    return bf16_gemm_failed(&why) ? refuse(call, "%s", why) : 0;
}

/* For products with w. */
KERNEL(bf16_pack, "w f32|bf16[K, M], parts i32[1] -> packed u8[P]") {
    int64_t n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {0, n, k, 0, 0, n, 1, *(const int32_t *)p[1], is_bf16(call, 0), NULL, p[0], NULL, p[2]};
    return pack_task(call, &t);
}

/* For products with w^T. */
KERNEL(bf16_pack_turned, "w f32|bf16[M, K], parts i32[1] -> packed u8[P]") {
    int64_t n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {0, n, k, 0, 0, 1, k, *(const int32_t *)p[1], is_bf16(call, 0), NULL, p[0], NULL, p[2]};
    return pack_task(call, &t);
}

/* y = x w */
KERNEL(bf16_product, "x f32[N, K], w f32|bf16[K, M], parts i32[1] -> y f32[N, M]") {
    int64_t m = dim(call, 'N'), n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {m, n, k, k, 1, n, 1, *(const int32_t *)p[2], is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run_task(call, &t);
}

/* y = x w^T */
KERNEL(bf16_product_turned, "x f32[N, K], w f32|bf16[M, K], parts i32[1] -> y f32[N, M]") {
    int64_t m = dim(call, 'N'), n = dim(call, 'M'), k = dim(call, 'K');
    void **p = call->params;
    Task t = {m, n, k, k, 1, 1, k, *(const int32_t *)p[2], is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run_task(call, &t);
}

/* y = x^T d: a weight's gradient. */
KERNEL(bf16_product_gradient, "x f32[N, K], d f32[N, M], parts i32[1] -> y f32[K, M]") {
    int64_t m = dim(call, 'K'), n = dim(call, 'M'), k = dim(call, 'N');
    void **p = call->params;
    Task t = {m, n, k, 1, m, n, 1, *(const int32_t *)p[2], is_bf16(call, 1), p[0], p[1], p[3], NULL};
    return run_task(call, &t);
}
