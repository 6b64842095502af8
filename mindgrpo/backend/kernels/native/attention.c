/* Causal attention over packed rows whose samples may share a prompt, forward and backward.
 *
 * A token's span (prefix, length, start) lets it see `length` tokens from `prefix` and its own run from `start` up to
 * itself. A cluster is a run without prefix and the runs after it that have it as theirs; clusters see nothing of each
 * other, so work and memory follow the samples' lengths, not the row's. Attention as in arXiv:1706.03762, section
 * 3.2.1; the backward from the stored log-sum-exp as in arXiv:2205.14135, appendix B.4.
 */
#include <stdatomic.h>

#include "gemm.h"
#include "kernel.h"

enum { BLOCK = 16, SLACK = 2 * VEC };

typedef struct {
    int64_t begin, end, prefix, prefix_length;
} Run;

typedef struct {
    int64_t first_run, end_run, begin, end;
} Cluster;

/* One call: what is attended, in which clusters, with memory of `floats` for each member. */
typedef struct Task {
    const float *qkv, *bias, *q_norm, *k_norm, *rotary;
    const int32_t *positions;
    int64_t queries, kv, dim, width, share; /* `share` queries have one head of keys */
    float eps, scale;
    Run *runs;
    Cluster *clusters;
    int64_t num_clusters, longest;
    float *out, *lse;
    const float *dout;
    float *dqkv, *dnorms; /* [clusters kv, 2, dim] */
    void (*one_head)(const struct Task *t, const Cluster *cluster, int64_t head, float *memory, float *dnorms);
    int64_t floats;
    float *memory;
    _Atomic int64_t next;
} Task;

/* Rows of a head's block of queries: `own` tokens of their run up to the last of them. */
typedef struct {
    int64_t first, m, own;
} Block;

#define ATTENTION_INPUTS                                                                                               \
    "qkv f32[N, W], bias f32[W]?, q_norm f32[D]?, k_norm f32[D]?, positions i32[R, T], spans i32[R, T, 3], "            \
    "rotary f32[S, 2D], sizes i32[3], numbers f32[2]"

/* `sizes`: heads of queries, of keys, and their dim; `numbers`: the norms' eps and the scores' scale. */
static int read_inputs(const Call *call, Task *t) {
    const int32_t *sizes = call->params[7];
    const float *numbers = call->params[8];
    *t = (Task){.qkv = call->params[0], .bias = optional(call, 1), .q_norm = optional(call, 2)};
    t->k_norm = optional(call, 3), t->positions = call->params[4], t->rotary = call->params[6];
    t->queries = sizes[0], t->kv = sizes[1], t->dim = sizes[2], t->width = dim(call, 'W');
    t->eps = numbers[0], t->scale = numbers[1];
    if (t->kv < 1 || t->queries < 1 || t->queries % t->kv || t->dim != dim(call, 'D') || !t->q_norm != !t->k_norm ||
        t->width != (t->queries + 2 * t->kv) * t->dim || dim(call, 'M') != t->queries * t->dim ||
        dim(call, 'Q') != t->queries || dim(call, 'N') != dim(call, 'R') * dim(call, 'T'))
        return refuse(call, "%d heads of queries and %d of keys of dim %d do not fit tensors with N = %lld, W = %lld, R = %lld, T = %lld",
                      sizes[0], sizes[1], sizes[2], (long long)dim(call, 'N'), (long long)t->width,
                      (long long)dim(call, 'R'), (long long)dim(call, 'T'));
    t->share = t->queries / t->kv;
    for (int64_t i = 0; i < dim(call, 'N'); i++)
        if (t->positions[i] < 0 || t->positions[i] >= dim(call, 'S'))
            return refuse(call, "position %d of token %lld is not below the %lld rotary angles", t->positions[i],
                          (long long)i, (long long)dim(call, 'S'));
    return 0;
}

static int find_clusters(const Call *call, Task *t) {
    const int32_t *spans = call->params[5];
    int64_t total = dim(call, 'N'), length = dim(call, 'T'), runs = 0, clusters = 0;
    t->runs = allocate(call, (total + 1) * (sizeof(Run) + sizeof(Cluster)));
    if (!t->runs) return KERNEL_OUT_OF_MEMORY;
    t->clusters = (Cluster *)(t->runs + total + 1);
    for (int64_t i = 0; i < total; i++) {
        const int32_t *span = spans + 3 * i;
        int64_t base = i / length * length, start = base + span[2], prefix = base + span[0];
        if (runs && t->runs[runs - 1].begin == start && start < i) {
            t->runs[runs - 1].end = i + 1;
            t->clusters[clusters - 1].end = i + 1;
            continue;
        }
        if (start != i || span[1] < 0 || (span[1] && (!clusters || prefix < t->clusters[clusters - 1].begin || prefix + span[1] > i)))
            return refuse(call, "span (%d, %d, %d) of token %lld is not of its cluster", span[0], span[1], span[2], (long long)i);
        t->runs[runs] = (Run){i, i + 1, span[1] ? prefix : i, span[1]};
        if (!span[1]) t->clusters[clusters++] = (Cluster){runs, 0, i, i + 1};
        t->clusters[clusters - 1].end_run = ++runs;
        t->clusters[clusters - 1].end = i + 1;
    }
    t->num_clusters = clusters;
    for (int64_t i = 0; i < clusters; i++) {
        int64_t tokens = t->clusters[i].end - t->clusters[i].begin;
        t->longest = tokens > t->longest ? tokens : t->longest;
    }
    return 0;
}

static void take_heads(void *task, Member member) {
    Task *t = task;
    for (int64_t i; (i = atomic_fetch_add(&t->next, 1)) < t->num_clusters * t->kv;)
        t->one_head(t, &t->clusters[i / t->kv], i % t->kv, t->memory + member.index * t->floats, t->dnorms + i * 2 * t->dim);
}

/* Every head of every cluster, each with `fixed` floats and `by_token` more for a token of its cluster. */
static int run_heads(const Call *call, Task *t, int64_t by_token, int64_t fixed) {
    int64_t dnorms = t->dqkv ? t->num_clusters * t->kv * 2 * t->dim : 0, members = pool_size();
    t->floats = padded(fixed + by_token * t->longest);
    t->memory = allocate(call, (members * t->floats + dnorms) * sizeof(float));
    if (!t->memory) return KERNEL_OUT_OF_MEMORY;
    t->dnorms = t->memory + members * t->floats;
    memset(t->dnorms, 0, dnorms * sizeof(float));
    pool_run(take_heads, t);
    return 0;
}

/* Head number `head` of the projection: queries first, then keys, then values. */
static void load_rotated(const Task *t, int64_t token, int64_t head, float *out) {
    int64_t at = head * t->dim;
    norm_and_rope(t->qkv + token * t->width + at, t->bias ? t->bias + at : NULL, head < t->queries ? t->q_norm : t->k_norm,
                  t->eps, t->rotary + (int64_t)t->positions[token] * 2 * t->dim, t->dim, out);
}

static void load_keys_and_values(const Task *t, const Cluster *cluster, int64_t head, float *keys, float *values) {
    int64_t at = (t->queries + t->kv + head) * t->dim;
    for (int64_t token = cluster->begin; token < cluster->end; token++, keys += t->dim, values += t->dim) {
        const float *source = t->qkv + token * t->width + at;
        load_rotated(t, token, t->queries + head, keys);
        for (int64_t i = 0; i < t->dim; i++) values[i] = source[i] + (t->bias ? t->bias[at + i] : 0.0f);
    }
}

static void load_queries(const Task *t, const Block *block, int64_t query, float *q) {
    for (int64_t i = 0; i < block->m; i++) {
        load_rotated(t, block->first + i, query, q + i * t->dim);
        for (int64_t j = 0; j < t->dim; j++) q[i * t->dim + j] *= t->scale;
    }
}

static Block block_of(const Run *run, int64_t first) {
    int64_t m = run->end - first < BLOCK ? run->end - first : BLOCK;
    return (Block){first, m, first + m - run->begin};
}

static void transpose(const float *a, int64_t rows, int64_t columns, float *out, int64_t ld) {
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t i = 0; i < rows; i++) out[j * ld + i] = a[i * columns + j];
        memset(out + j * ld + rows, 0, (ld - rows) * sizeof(float));
    }
}

/* s [m, .] = q k^T over the run's prefix, then over its own tokens up to the block's last; what is computed past the
 * end is rounding up to whole panels of the product, overwritten or unread. */
static void scores(const Block *block, const float *q, const float *kt, int64_t ld, const Cluster *cluster,
                   const Run *run, int64_t dim, float *s, int64_t lds) {
    if (run->prefix_length)
        gemm_alone(block->m, (run->prefix_length + SLACK - 1) / SLACK * SLACK, dim, q, dim, 1,
                   kt + run->prefix - cluster->begin, ld, s, lds, 0);
    gemm_alone(block->m, (block->own + SLACK - 1) / SLACK * SLACK, dim, q, dim, 1, kt + run->begin - cluster->begin, ld,
               s + run->prefix_length, lds, 0);
}

static void weighted_sum(const Block *block, const float *s, int64_t lds, const float *values, const Cluster *cluster,
                         const Run *run, int64_t dim, float *out) {
    gemm_alone(block->m, dim, run->prefix_length, s, lds, 1, values + (run->prefix - cluster->begin) * dim, dim, out, dim, 0);
    gemm_alone(block->m, dim, block->own, s + run->prefix_length, lds, 1, values + (run->begin - cluster->begin) * dim,
               dim, out, dim, 1);
}

/* Adds s^T rows to the gradients of what the rows saw. */
static void add_to_seen(const Block *block, const float *s, int64_t lds, const float *rows, const Cluster *cluster,
                        const Run *run, int64_t dim, float *gradients) {
    gemm_alone(run->prefix_length, dim, block->m, s, 1, lds, rows, dim, gradients + (run->prefix - cluster->begin) * dim, dim, 1);
    gemm_alone(block->own, dim, block->m, s + run->prefix_length, 1, lds, rows, dim,
               gradients + (run->begin - cluster->begin) * dim, dim, 1);
}

static void forward_head(const Task *t, const Cluster *cluster, int64_t head, float *memory, float *dnorms) {
    int64_t n = cluster->end - cluster->begin, dim = t->dim, ld = n + SLACK, lds = n + 2 * SLACK;
    float *keys = memory, *values = keys + n * dim, *kt = values + n * dim, *s = kt + ld * dim, *q = s + BLOCK * lds;
    float *mixed = q + BLOCK * dim;
    (void)dnorms;
    load_keys_and_values(t, cluster, head, keys, values);
    transpose(keys, n, dim, kt, ld);
    for (int64_t query = head * t->share; query < (head + 1) * t->share; query++)
        for (const Run *run = t->runs + cluster->first_run; run < t->runs + cluster->end_run; run++)
            for (int64_t first = run->begin; first < run->end; first += BLOCK) {
                Block block = block_of(run, first);
                int64_t end = run->prefix_length + block.own;
                load_queries(t, &block, query, q);
                scores(&block, q, kt, ld, cluster, run, dim, s, lds);
                for (int64_t i = 0; i < block.m; i++) {
                    int64_t seen = end - block.m + i + 1, at = (first + i) * t->queries + query;
                    float *row = s + i * lds, top = largest(row, seen), sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                    for (int64_t j = 0; j < seen; j++) sum += row[j] = fast_exp(row[j] - top);
                    for (int64_t j = 0; j < seen; j++) row[j] /= sum;
                    memset(row + seen, 0, (end - seen) * sizeof(float));
                    t->lse[at] = top + logf(sum);
                }
                weighted_sum(&block, s, lds, values, cluster, run, dim, mixed);
                for (int64_t i = 0; i < block.m; i++)
                    memcpy(t->out + ((first + i) * t->queries + query) * dim, mixed + i * dim, dim * sizeof(float));
            }
}

KERNEL(attention, ATTENTION_INPUTS " -> mixed f32[N, M], log_sum_exp f32[N, Q]") {
    Task t;
    int status = read_inputs(call, &t);
    if (status) return status;
    t.out = call->params[9], t.lse = call->params[10], t.one_head = forward_head;
    status = find_clusters(call, &t);
    if (!status) status = run_heads(call, &t, 3 * t.dim + BLOCK, SLACK * t.dim + BLOCK * 2 * (SLACK + t.dim));
    free(t.memory);
    free(t.runs);
    return status;
}

/* Turns a gradient back and takes it through the norm: `dy` [D] in, the projection's gradient out to dqkv;
 * the norm's weight's gradient is added to dnorm. */
static void store_rotated(const Task *t, int64_t token, int64_t head, float *dy, float *dnorm) {
    int64_t dim = t->dim, half = dim / 2, at = head * dim;
    const float *angles = t->rotary + (int64_t)t->positions[token] * 2 * dim;
    for (int64_t i = 0; i < half; i++) {
        float low = dy[i], high = dy[i + half];
        dy[i] = low * angles[i] + high * angles[dim + i];
        dy[i + half] = high * angles[i] - low * angles[dim + i];
    }
    const float *norm = head < t->queries ? t->q_norm : t->k_norm, *source = t->qkv + token * t->width + at;
    float *out = t->dqkv + token * t->width + at;
    if (!norm) {
        memcpy(out, dy, dim * sizeof(float));
        return;
    }
    float square = 0.0f, mean = 0.0f;
    for (int64_t i = 0; i < dim; i++) {
        float x = source[i] + (t->bias ? t->bias[at + i] : 0.0f);
        square += x * x;
        mean += x * norm[i] * dy[i];
    }
    float scale = 1.0f / sqrtf(square / dim + t->eps), back = mean / dim * scale * scale * scale;
    for (int64_t i = 0; i < dim; i++) {
        float x = source[i] + (t->bias ? t->bias[at + i] : 0.0f);
        dnorm[i] += dy[i] * x * scale;
        out[i] = scale * norm[i] * dy[i] - x * back;
    }
}

static void backward_head(const Task *t, const Cluster *cluster, int64_t head, float *memory, float *dnorms) {
    int64_t n = cluster->end - cluster->begin, dim = t->dim, ld = n + SLACK, lds = n + 2 * SLACK;
    float *keys = memory, *values = keys + n * dim, *dkeys = values + n * dim, *dvalues = dkeys + n * dim;
    float *kt = dvalues + n * dim, *vt = kt + ld * dim, *s = vt + ld * dim, *ds = s + BLOCK * lds;
    float *q = ds + BLOCK * lds, *dy = q + BLOCK * dim, *dq = dy + BLOCK * dim;
    load_keys_and_values(t, cluster, head, keys, values);
    transpose(keys, n, dim, kt, ld);
    transpose(values, n, dim, vt, ld);
    memset(dkeys, 0, 2 * n * dim * sizeof(float));
    for (int64_t query = head * t->share; query < (head + 1) * t->share; query++)
        for (const Run *run = t->runs + cluster->first_run; run < t->runs + cluster->end_run; run++)
            for (int64_t first = run->begin; first < run->end; first += BLOCK) {
                Block block = block_of(run, first);
                int64_t end = run->prefix_length + block.own;
                load_queries(t, &block, query, q);
                for (int64_t i = 0; i < block.m; i++)
                    memcpy(dy + i * dim, t->dout + ((first + i) * t->queries + query) * dim, dim * sizeof(float));
                scores(&block, q, kt, ld, cluster, run, dim, s, lds);
                scores(&block, dy, vt, ld, cluster, run, dim, ds, lds);
                for (int64_t i = 0; i < block.m; i++) {
                    int64_t at = (first + i) * t->queries + query, seen = end - block.m + i + 1;
                    float *row = s + i * lds, *drow = ds + i * lds, total = t->lse[at];
                    float delta = dot(dy + i * dim, t->out + at * dim, dim);
                    for (int64_t j = 0; j < seen; j++) {
                        row[j] = fast_exp(row[j] - total);
                        drow[j] = row[j] * (drow[j] - delta);
                    }
                    memset(row + seen, 0, (end - seen) * sizeof(float));
                    memset(drow + seen, 0, (end - seen) * sizeof(float));
                }
                weighted_sum(&block, ds, lds, keys, cluster, run, dim, dq);
                add_to_seen(&block, ds, lds, q, cluster, run, dim, dkeys);
                add_to_seen(&block, s, lds, dy, cluster, run, dim, dvalues);
                for (int64_t i = 0; i < block.m; i++) {
                    for (int64_t j = 0; j < dim; j++) dq[i * dim + j] *= t->scale;
                    store_rotated(t, first + i, query, dq + i * dim, dnorms);
                }
            }
    for (int64_t i = 0; i < n; i++) {
        int64_t token = cluster->begin + i, at = token * t->width + (t->queries + t->kv + head) * dim;
        store_rotated(t, token, t->queries + head, dkeys + i * dim, dnorms + dim);
        memcpy(t->dqkv + at, dvalues + i * dim, dim * sizeof(float));
    }
}

/* out [columns] = the sum of `a`'s rows */
static void sum_rows(const float *a, int64_t rows, int64_t columns, int64_t next, float *out) {
    memset(out, 0, columns * sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[j] += a[i * next + j];
}

static void sum_bias(void *task, Member member) {
    const Call *call = task;
    int64_t begin, end, width = dim(call, 'W');
    share_out(member, width, &begin, &end);
    sum_rows((const float *)call->params[12] + begin, dim(call, 'N'), end - begin, width, (float *)call->params[13] + begin);
}

/* The last three are zero where the heads have none. */
KERNEL(attention_grad, ATTENTION_INPUTS ", mixed f32[N, M], log_sum_exp f32[N, Q], dmixed f32[N, M] "
                       "-> dqkv f32[N, W], dbias f32[W]?, dq_norm f32[D]?, dk_norm f32[D]?") {
    Task t;
    int status = read_inputs(call, &t);
    if (status) return status;
    t.out = call->params[9], t.lse = call->params[10], t.dout = call->params[11], t.dqkv = call->params[12];
    t.one_head = backward_head;
    for (int i = 13; i < 16; i++) {
        if (!optional(call, i) != !optional(call, i - 12)) return refuse(call, "tensors %d and %d are not of one shape", i - 12, i);
        *(float *)call->params[i] = 0.0f;
    }
    status = find_clusters(call, &t);
    if (!status) status = run_heads(call, &t, 6 * t.dim + 2 * BLOCK, 2 * SLACK * t.dim + BLOCK * (4 * SLACK + 3 * t.dim));
    if (!status && t.bias) pool_run(sum_bias, call);
    for (int i = 0; i < 2 && !status && t.q_norm; i++)
        sum_rows(t.dnorms + i * t.dim, t.num_clusters * t.kv, t.dim, 2 * t.dim, call->params[14 + i]);
    free(t.memory);
    free(t.runs);
    return status;
}
