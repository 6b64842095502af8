/* Causal attention over packed rows whose samples may share a prompt, forward and backward.
 *
 * A token's span (prefix, length, start) lets it see `length` tokens from `prefix` and its own run from `start` up to
 * itself. A cluster is a run without prefix and the runs after it that have it as theirs; clusters see nothing of each
 * other, so work and memory follow the samples' lengths, not the row's. Attention as in arXiv:1706.03762, section
 * 3.2.1; the backward from the stored log-sum-exp as in arXiv:2205.14135, appendix B.4.
 */
#include <stdatomic.h>

#include "bf16.h"
#include "gemm.h"
#include "kernel.h"
#include "rows.h"

enum { BLOCK = 16, SLACK = 2 * VEC };

typedef struct {
    int64_t begin, end, prefix, prefix_length;
} Run;

typedef struct {
    int64_t first_run, end_run, begin, end;
} Cluster;

/* One call. Members take heads of clusters in turn, each with `floats` of `memory`. */
typedef struct Task {
    const float *qkv, *bias, *q_norm, *k_norm, *rotary;
    const int32_t *positions;
    int64_t queries, kv, dim, is_narrow, width;
    float eps, scale;
    Run *runs;
    Cluster *clusters;
    int64_t num_clusters, longest;
    float *out, *lse;
    const float *dout;
    float *dqkv, *dnorms; /* dnorms [clusters kv, 2, dim] */
    void (*one_head)(const struct Task *t, const Cluster *cluster, int64_t head, float *memory, float *dnorms);
    float *memory;
    int64_t floats;
    _Atomic int64_t next;
} Task;

/* One head of keys of a cluster of n tokens; `kt` is the keys' transpose [dim, ld], and scores are [BLOCK, lds]. */
typedef struct {
    const Task *t;
    const Cluster *cluster;
    int64_t head, n, dim, ld, lds;
    float *keys, *values, *kt, *rest;
} Head;

/* Up to BLOCK tokens of a run under one head of queries. They see `shared` tokens of the cluster from `shared_at` on,
 * and up to `own` from `own_at` on, the last one all of them. */
typedef struct {
    const Run *run;
    int64_t query, first, m, shared, shared_at, own, own_at;
} Block;

#define ATTENTION_INPUTS                                                                                     \
    "qkv f32[N, W], bias f32[W]?, q_norm f32[D]?, k_norm f32[D]?, positions i32[R, T], spans i32[R, T, 3], " \
    "rotary f32[S, 2D], sizes i32[4], numbers f32[2]"

/* `sizes`: heads of queries, of keys, their dim, and whether keys and values are rounded to bfloat16, as a cache of these
 * does, which their gradients do not see; `numbers`: the norms' eps and the scores' scale. */
static int read_inputs(const Call *call, Task *t) {
    const int32_t *sizes = call->params[7];
    const float *numbers = call->params[8];
    int64_t tokens = dim(call, 'N');
    *t = (Task){call->params[0], optional(call, 1), optional(call, 2), optional(call, 3),
                call->params[6], call->params[4],   sizes[0],          sizes[1],
                sizes[2],        sizes[3],          dim(call, 'W'),    numbers[0],        numbers[1]};
    if (t->kv < 1 || t->queries < 1 || t->queries % t->kv || t->dim != dim(call, 'D') || !t->q_norm != !t->k_norm ||
        t->width != (t->queries + 2 * t->kv) * t->dim || dim(call, 'M') != t->queries * t->dim ||
        dim(call, 'Q') != t->queries || tokens != dim(call, 'R') * dim(call, 'T'))
        return refuse(call, "%d heads of queries and %d of keys of dim %d do not fit [%ld, %ld] and [%ld, %ld]",
                      sizes[0], sizes[1], sizes[2], tokens, t->width, dim(call, 'R'), dim(call, 'T'));
    for (int64_t i = 0; i < tokens; i++)
        if (t->positions[i] < 0 || t->positions[i] >= dim(call, 'S'))
            return refuse(call, "position %d of token %ld is not below the %ld rotary angles", t->positions[i], i,
                          dim(call, 'S'));
    return 0;
}

static int find_clusters(const Call *call, Task *t) {
    const int32_t *spans = call->params[5];
    int64_t total = dim(call, 'N'), length = dim(call, 'T');
    t->runs = allocate(call, (total + 1) * (sizeof(Run) + sizeof(Cluster)));
    if (!t->runs) return KERNEL_OUT_OF_MEMORY;
    t->clusters = (Cluster *)(t->runs + total + 1);
    Run *run = t->runs - 1;
    Cluster *cluster = t->clusters - 1;
    for (int64_t i = 0; i < total; i++) {
        const int32_t *span = spans + 3 * i;
        int64_t base = i / length * length, start = base + span[2], prefix = base + span[0];
        if (!i || run->begin != start || start == i) {
            if (start != i || span[1] < 0 || (span[1] && (!i || prefix < cluster->begin || prefix + span[1] > i)))
                return refuse(call, "span (%d, %d, %d) of token %ld is not of its cluster", span[0], span[1], span[2],
                              i);
            *++run = (Run){i, i, span[1] ? prefix : i, span[1]};
            if (!span[1]) *++cluster = (Cluster){run - t->runs, 0, i, i};
        }
        run->end = cluster->end = i + 1;
        cluster->end_run = run + 1 - t->runs;
        t->longest = i + 1 - cluster->begin > t->longest ? i + 1 - cluster->begin : t->longest;
    }
    t->num_clusters = cluster + 1 - t->clusters;
    return 0;
}

static void take_heads(void *task, Member member) {
    Task *t = task;
    for (int64_t i; (i = atomic_fetch_add(&t->next, 1)) < t->num_clusters * t->kv;)
        t->one_head(t, &t->clusters[i / t->kv], i % t->kv, t->memory + member.index * t->floats,
                    t->dnorms + i * 2 * t->dim);
}

/* Every head of every cluster, each with `fixed` floats and `by_token` more for a token of its cluster. */
static int run_heads(const Call *call, Task *t, int64_t by_token, int64_t fixed) {
    int status = find_clusters(call, t);
    if (status) return status;
    int64_t dnorms = t->num_clusters * t->kv * 2 * t->dim, members = pool_size();
    t->floats = padded(fixed + by_token * t->longest);
    t->memory = scratch(call, members * t->floats + dnorms);
    if (!t->memory) return KERNEL_OUT_OF_MEMORY;
    t->dnorms = t->memory + members * t->floats;
    memset(t->dnorms, 0, dnorms * sizeof(float));
    pool_run(take_heads, t);
    return 0;
}

/* Head number `head` of the projection: queries first, then keys, then values. */
static void load_rotated(const Task *t, int64_t token, int64_t head, float *out) {
    int64_t at = head * t->dim;
    norm_and_rope(t->qkv + token * t->width + at, t->bias ? t->bias + at : NULL,
                  head < t->queries ? t->q_norm : t->k_norm, t->eps,
                  t->rotary + (int64_t)t->positions[token] * 2 * t->dim, t->dim, out);
}

static void transpose(const float *a, int64_t rows, int64_t columns, float *out, int64_t ld) {
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t i = 0; i < rows; i++) out[j * ld + i] = a[i * columns + j];
        memset(out + j * ld + rows, 0, (ld - rows) * sizeof(float));
    }
}

static Head head_of(const Task *t, const Cluster *cluster, int64_t head, float *memory) {
    int64_t n = cluster->end - cluster->begin, dim = t->dim, at = (t->queries + t->kv + head) * dim;
    Head h = {t, cluster, head, n, dim, n + SLACK, n + 2 * SLACK, memory, memory + n * dim, memory + 2 * n * dim, NULL};
    h.rest = h.kt + h.ld * dim;
    for (int64_t i = 0; i < n; i++) {
        const float *source = t->qkv + (cluster->begin + i) * t->width + at;
        load_rotated(t, cluster->begin + i, t->queries + head, h.keys + i * dim);
        for (int64_t j = 0; j < dim; j++) h.values[i * dim + j] = source[j] + (t->bias ? t->bias[at + j] : 0.0f);
    }
    for (int64_t i = 0; i < 2 * n * dim && t->is_narrow; i++) h.keys[i] = from_bf16(to_bf16(h.keys[i]));
    transpose(h.keys, n, dim, h.kt, h.ld);
    return h;
}

/* The head's next block; from one without a run the first. 0 after the last. */
static int next_block(const Head *h, Block *b) {
    const Run *runs = h->t->runs + h->cluster->first_run, *end = h->t->runs + h->cluster->end_run;
    int64_t share = h->t->queries / h->t->kv;
    b->first += BLOCK;
    if (!b->run || b->first >= b->run->end) {
        b->query = !b->run ? h->head * share : b->run + 1 == end ? b->query + 1 : b->query;
        b->run = !b->run || b->run + 1 == end ? runs : b->run + 1;
        b->first = b->run->begin;
    }
    b->m = b->run->end - b->first < BLOCK ? b->run->end - b->first : BLOCK;
    b->shared = b->run->prefix_length, b->shared_at = b->run->prefix - h->cluster->begin;
    b->own = b->first + b->m - b->run->begin, b->own_at = b->run->begin - h->cluster->begin;
    return b->query < (h->head + 1) * share;
}

static void load_queries(const Head *h, const Block *b, float *q) {
    for (int64_t i = 0; i < b->m; i++, q += h->dim) {
        load_rotated(h->t, b->first + i, b->query, q);
        for (int64_t j = 0; j < h->dim; j++) q[j] *= h->t->scale;
    }
}

/* s = q k^T over all that the block sees; what is computed past the end is rounding up to whole panels of the product,
 * overwritten or unread. */
static void scores(const Head *h, const Block *b, const float *q, const float *kt, float *s) {
    int64_t shared = (b->shared + SLACK - 1) / SLACK * SLACK, own = (b->own + SLACK - 1) / SLACK * SLACK;
    gemm_alone(b->m, shared, h->dim, q, h->dim, 1, kt + b->shared_at, h->ld, s, h->lds, 0);
    gemm_alone(b->m, own, h->dim, q, h->dim, 1, kt + b->own_at, h->ld, s + b->shared, h->lds, 0);
}

/* out [m, dim] = s rows, of what the block sees */
static void weighted_sum(const Head *h, const Block *b, const float *s, const float *rows, float *out) {
    int64_t dim = h->dim;
    gemm_alone(b->m, dim, b->shared, s, h->lds, 1, rows + b->shared_at * dim, dim, out, dim, 0);
    gemm_alone(b->m, dim, b->own, s + b->shared, h->lds, 1, rows + b->own_at * dim, dim, out, dim, 1);
}

/* out [n, dim] += s^T rows, on what the block sees */
static void add_to_seen(const Head *h, const Block *b, const float *s, const float *rows, float *out) {
    int64_t dim = h->dim;
    gemm_alone(b->shared, dim, b->m, s, 1, h->lds, rows, dim, out + b->shared_at * dim, dim, 1);
    gemm_alone(b->own, dim, b->m, s + b->shared, 1, h->lds, rows, dim, out + b->own_at * dim, dim, 1);
}

static void forward_head(const Task *t, const Cluster *cluster, int64_t head, float *memory, float *dnorms) {
    Head h = head_of(t, cluster, head, memory);
    float *s = h.rest, *q = s + BLOCK * h.lds, *mixed = q + BLOCK * h.dim, inverse[BLOCK], top;
    (void)dnorms;
    for (Block b = {0}; next_block(&h, &b);) {
        load_queries(&h, &b, q);
        scores(&h, &b, q, h.kt, s);
        for (int64_t i = 0; i < b.m; i++) {
            int64_t end = b.shared + b.own, seen = end - b.m + i + 1;
            float sum = exp_row(s + i * h.lds, seen, end, &top);
            inverse[i] = 1.0f / sum;
            t->lse[(b.first + i) * t->queries + b.query] = top + logf(sum);
        }
        weighted_sum(&h, &b, s, h.values, mixed);
        for (int64_t i = 0; i < b.m; i++) {
            float *out = t->out + ((b.first + i) * t->queries + b.query) * h.dim;
            for (int64_t j = 0; j < h.dim; j++) out[j] = mixed[i * h.dim + j] * inverse[i];
        }
    }
}

KERNEL(attention, ATTENTION_INPUTS " -> mixed f32[N, M], log_sum_exp f32[N, Q]") {
    Task t;
    int status = read_inputs(call, &t);
    if (status) return status;
    t.out = call->params[9], t.lse = call->params[10], t.one_head = forward_head;
    status = run_heads(call, &t, 3 * t.dim + BLOCK, SLACK * t.dim + BLOCK * 2 * (SLACK + t.dim));
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
    float *out = t->dqkv + token * t->width + at, square = 0.0f, mean = 0.0f;
    if (!norm) {
        memcpy(out, dy, dim * sizeof(float));
        return;
    }
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
    Head h = head_of(t, cluster, head, memory);
    int64_t n = h.n, dim = h.dim;
    float *vt = h.rest, *dkeys = vt + h.ld * dim, *dvalues = dkeys + n * dim, *s = dvalues + n * dim;
    float *ds = s + BLOCK * h.lds, *q = ds + BLOCK * h.lds, *dy = q + BLOCK * dim, *dq = dy + BLOCK * dim;
    transpose(h.values, n, dim, vt, h.ld);
    memset(dkeys, 0, 2 * n * dim * sizeof(float));
    for (Block b = {0}; next_block(&h, &b);) {
        load_queries(&h, &b, q);
        for (int64_t i = 0; i < b.m; i++)
            memcpy(dy + i * dim, t->dout + ((b.first + i) * t->queries + b.query) * dim, dim * sizeof(float));
        scores(&h, &b, q, h.kt, s);
        scores(&h, &b, dy, vt, ds);
        for (int64_t i = 0; i < b.m; i++) {
            int64_t at = (b.first + i) * t->queries + b.query, end = b.shared + b.own, seen = end - b.m + i + 1;
            float *row = s + i * h.lds, *drow = ds + i * h.lds, total = t->lse[at];
            float delta = dot(dy + i * dim, t->out + at * dim, dim);
            for (int64_t j = 0; j < seen; j++) {
                row[j] = fast_exp(row[j] - total);
                drow[j] = row[j] * (drow[j] - delta);
            }
            memset(row + seen, 0, (end - seen) * sizeof(float));
            memset(drow + seen, 0, (end - seen) * sizeof(float));
        }
        weighted_sum(&h, &b, ds, h.keys, dq);
        add_to_seen(&h, &b, ds, q, dkeys);
        add_to_seen(&h, &b, s, dy, dvalues);
        for (int64_t i = 0; i < b.m; i++) {
            for (int64_t j = 0; j < dim; j++) dq[i * dim + j] *= t->scale;
            store_rotated(t, b.first + i, b.query, dq + i * dim, dnorms);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t token = cluster->begin + i, at = token * t->width + (t->queries + t->kv + head) * dim;
        store_rotated(t, token, t->queries + head, dkeys + i * dim, dnorms + dim);
        memcpy(t->dqkv + at, dvalues + i * dim, dim * sizeof(float));
    }
}

/* out [columns] = the sum of `a`'s rows, which begin `next` floats apart */
static void sum_rows(const float *a, int64_t rows, int64_t columns, int64_t next, float *out) {
    memset(out, 0, columns * sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[j] += a[i * next + j];
}

static void sum_bias(void *task, Member member) {
    const Call *call = task;
    float **p = (float **)call->params;
    int64_t begin, end, width = dim(call, 'W');
    share_out(member, width, &begin, &end);
    sum_rows(p[12] + begin, dim(call, 'N'), end - begin, width, p[13] + begin);
}

/* The last three are zero where the heads have none. */
KERNEL(attention_grad, ATTENTION_INPUTS
       ", mixed f32[N, M], log_sum_exp f32[N, Q], dmixed f32[N, M] "
       "-> dqkv f32[N, W], dbias f32[W]?, dq_norm f32[D]?, dk_norm f32[D]?") {
    Task t;
    int status = read_inputs(call, &t);
    if (status) return status;
    for (int i = 13; i < 16; i++) {
        if (!optional(call, i) != !optional(call, i - 12)) return refuse(call, "tensors %d and %d differ", i - 12, i);
        *(float *)call->params[i] = 0.0f;
    }
    t.out = call->params[9], t.lse = call->params[10], t.dout = call->params[11], t.dqkv = call->params[12];
    t.one_head = backward_head;
    status = run_heads(call, &t, 6 * t.dim + 2 * BLOCK, 2 * SLACK * t.dim + BLOCK * (4 * SLACK + 3 * t.dim));
    if (!status && t.bias) pool_run(sum_bias, call);
    for (int i = 0; i < 2 && !status && t.q_norm; i++)
        sum_rows(t.dnorms + i * t.dim, t.num_clusters * t.kv, t.dim, 2 * t.dim, call->params[14 + i]);
    free(t.runs);
    return status;
}
