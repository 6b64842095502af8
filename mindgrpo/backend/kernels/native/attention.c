/* Causal attention over packed rows whose samples may share a prompt, forward and backward.
 *
 * A token's span (prefix, length, start) lets it see `length` tokens from `prefix` and its own run from `start` up to
 * itself. A cluster is a run without prefix and the runs after it that have it as theirs; clusters see nothing of each
 * other, so work and memory follow the samples' lengths, not the row's. A run that is its own prefix is a cluster by
 * itself, and its tokens see all of it. Attention as in arXiv:1706.03762, section 3.2.1; the backward from the stored
 * log-sum-exp as in arXiv:2205.14135, appendix B.4.
 *
 * With context parallelism a rank has the queries of its own tokens and the keys and values of all, in the order in which
 * they were gathered. A query's sums are those of the whole row in the same order.
 */
#include <stdatomic.h>

#include "bf16.h"
#include "gemm.h"
#include "kernel.h"
#include "rows.h"

enum { BLOCK = 16, SLACK = 2 * VEC };

/* Tokens [begin, end); among the rank's own tokens, [own_begin, own_end). */
typedef struct {
    int64_t begin, end, prefix, prefix_length, own_begin, own_end;
    int is_whole;
} Run;

typedef struct {
    int64_t first_run, end_run, begin, end, num_own;
} Cluster;

/* One call. Members take heads of clusters in turn, each with `floats` of `memory`.
 *
 * Rows of `q` are the own tokens' projections, and rows of `k` any tokens' keys and then values; so are those of their
 * gradients. Own row i is token own[i], in ascending order, and token i's keys are in row place[i]; without a split both
 * are i, and NULL. */
typedef struct Task {
    const float *q, *k, *bias, *q_norm, *k_norm, *rotary;
    const int32_t *positions, *spans;
    int64_t queries, kv, dim, is_narrow, q_width, k_width, total, length, num_own;
    int32_t *own, *place;
    float eps, scale;
    Run *runs;
    Cluster *clusters;
    int64_t num_clusters, longest;
    float *out, *lse;
    const float *dout;
    float *dq, *dk, *dbias, *dnorms; /* dnorms [clusters kv, 2, dim] */
    int64_t dq_width, dk_width;
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

/* Up to BLOCK own tokens of a run, from the own row `first` on, under one head of queries. They see `shared` tokens of the
 * cluster from `shared_at` on, and up to `own` from `own_at` on, the last one all of them. */
typedef struct {
    const Run *run;
    int64_t query, first, m, shared, shared_at, own, own_at;
} Block;

static int64_t token_of(const Task *t, int64_t row) { return t->own ? t->own[row] : row; }

static int64_t place_of(const Task *t, int64_t token) { return t->place ? t->place[token] : token; }

#define NORMS "bias f32[W]?, q_norm f32[D]?, k_norm f32[D]?, positions i32[R, T], spans i32[R, T, 3], "
#define ATTENTION_INPUTS "qkv f32[N, W], " NORMS "rotary f32[S, 2D], sizes i32[4], numbers f32[2]"
/* Own tokens, and the keys and values of all, as `columns` has them: which of its row's each rank's tokens are. */
#define CONTEXT_INPUTS \
    "q f32[C, M], kv f32[N, K], " NORMS "columns i32[G, R, L], rotary f32[S, 2D], sizes i32[5], numbers f32[2]"

/* `sizes`: heads of queries, of keys, their dim, and whether keys and values are rounded to bfloat16, as a cache of these
 * does, which their gradients do not see; `numbers`: the norms' eps and the scores' scale. */
static int read_sizes(const Call *call, Task *t, const int32_t *sizes, const float *numbers) {
    t->queries = sizes[0], t->kv = sizes[1], t->dim = sizes[2], t->is_narrow = sizes[3];
    t->eps = numbers[0], t->scale = numbers[1];
    t->total = dim(call, 'N'), t->length = dim(call, 'T');
    if (t->kv < 1 || t->queries < 1 || t->queries % t->kv || t->dim != dim(call, 'D') || !t->q_norm != !t->k_norm ||
        (dim(call, 'W') >= 0 && dim(call, 'W') != (t->queries + 2 * t->kv) * t->dim) || dim(call, 'M') != t->queries * t->dim ||
        dim(call, 'Q') != t->queries || t->total != dim(call, 'R') * t->length)
        return refuse(call, "%d heads of queries and %d of keys of dim %d do not fit [%ld, %ld] and [%ld, %ld]",
                      sizes[0], sizes[1], sizes[2], t->total, dim(call, 'W'), dim(call, 'R'), t->length);
    for (int64_t i = 0; i < t->total; i++)
        if (t->positions[i] < 0 || t->positions[i] >= dim(call, 'S'))
            return refuse(call, "position %d of token %ld is not below the %ld rotary angles", t->positions[i], i,
                          dim(call, 'S'));
    return 0;
}

static int read_inputs(const Call *call, Task *t) {
    *t = (Task){.q = call->params[0], .bias = optional(call, 1), .q_norm = optional(call, 2), .k_norm = optional(call, 3),
                .positions = call->params[4], .spans = call->params[5], .rotary = call->params[6]};
    int status = read_sizes(call, t, call->params[7], call->params[8]);
    t->k = t->q + t->queries * t->dim, t->q_width = t->k_width = dim(call, 'W'), t->num_own = t->total;
    return status;
}

/* The fifth of `sizes` is the rank's index. */
static int read_context(const Call *call, Task *t) {
    *t = (Task){.q = call->params[0], .k = call->params[1], .bias = optional(call, 2), .q_norm = optional(call, 3),
                .k_norm = optional(call, 4), .positions = call->params[5], .spans = call->params[6],
                .rotary = call->params[8]};
    const int32_t *columns = call->params[7], *sizes = call->params[9];
    int64_t ranks = dim(call, 'G'), count = dim(call, 'C'), each = dim(call, 'L');
    int status = read_sizes(call, t, sizes, call->params[10]);
    if (status) return status;
    if (dim(call, 'K') != 2 * t->kv * t->dim || t->length != ranks * each || count * ranks != t->total || sizes[4] < 0 ||
        sizes[4] >= ranks)
        return refuse(call, "part %d of %ld has %ld of %ld tokens, with %ld columns for keys and values", sizes[4], ranks,
                      count, t->total, dim(call, 'K'));
    t->q_width = dim(call, 'M'), t->k_width = dim(call, 'K'), t->num_own = count;
    t->own = allocate(call, (count + t->total) * sizeof(int32_t));
    if (!t->own) return KERNEL_OUT_OF_MEMORY;
    t->place = t->own + count;
    for (int64_t i = 0; i < t->total; i++) t->place[i] = -1;
    for (int64_t i = 0; i < t->total; i++) {
        int64_t row = i / each % dim(call, 'R'), token = row * t->length + columns[i];
        int is_wrong = columns[i] < 0 || columns[i] >= t->length || t->place[token] >= 0;
        int64_t own = i - sizes[4] * count;
        if (!is_wrong && own >= 0 && own < count) {
            t->own[own] = token;
            is_wrong = own && t->own[own - 1] >= token;
        }
        if (is_wrong) return refuse(call, "column %d of part %ld is not the next of row %ld", columns[i], i / count, row);
        t->place[token] = i;
    }
    return 0;
}

static void release(Task *t) {
    free(t->runs);
    free(t->own);
}

static int find_clusters(const Call *call, Task *t) {
    int64_t total = t->total, own = 0;
    t->runs = allocate(call, (total + 1) * (sizeof(Run) + sizeof(Cluster)));
    if (!t->runs) return KERNEL_OUT_OF_MEMORY;
    t->clusters = (Cluster *)(t->runs + total + 1);
    Run *run = t->runs - 1;
    Cluster *cluster = t->clusters - 1;
    for (int64_t i = 0; i < total; i++) {
        const int32_t *span = t->spans + 3 * i;
        int64_t base = i / t->length * t->length, start = base + span[2], prefix = base + span[0];
        if (!i || run->begin != start || start == i) {
            int is_whole = span[1] && prefix == start, has_prefix = span[1] && !is_whole;
            if (start != i || span[1] < 0 || (has_prefix && (!i || prefix < cluster->begin || prefix + span[1] > i)) ||
                (is_whole && i - base + span[1] > t->length))
                return refuse(call, "span (%d, %d, %d) of token %ld is not of its cluster", span[0], span[1], span[2],
                              i);
            *++run = (Run){i, i, has_prefix ? prefix : i, has_prefix ? span[1] : 0, own, own, is_whole};
            if (!has_prefix) *++cluster = (Cluster){run - t->runs, 0, i, i, 0};
        }
        if (own < t->num_own && token_of(t, own) == i) run->own_end = ++own, cluster->num_own++;
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
        if (t->clusters[i / t->kv].num_own)
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

/* A head's numbers in a token's row: `head` of a projection's, queries first, then keys. */
typedef struct {
    int64_t token, head;
    const float *source;
    float *gradient;
} Place;

static Place place_of_query(const Task *t, int64_t row, int64_t head) {
    int64_t at = head * t->dim;
    return (Place){token_of(t, row), head, t->q + row * t->q_width + at, t->dq ? t->dq + row * t->dq_width + at : NULL};
}

static Place place_of_key(const Task *t, int64_t token, int64_t head) {
    int64_t row = place_of(t, token), at = head * t->dim;
    float *gradient = t->dk ? t->dk + row * t->dk_width + at : NULL;
    return (Place){token, t->queries + head, t->k + row * t->k_width + at, gradient};
}

static const float *bias_of(const Task *t, int64_t head) { return t->bias ? t->bias + head * t->dim : NULL; }

static void load_rotated(const Task *t, Place place, float *out) {
    norm_and_rope(place.source, bias_of(t, place.head), place.head < t->queries ? t->q_norm : t->k_norm, t->eps,
                  t->rotary + (int64_t)t->positions[place.token] * 2 * t->dim, t->dim, out);
}

static void transpose(const float *a, int64_t rows, int64_t columns, float *out, int64_t ld) {
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t i = 0; i < rows; i++) out[j * ld + i] = a[i * columns + j];
        memset(out + j * ld + rows, 0, (ld - rows) * sizeof(float));
    }
}

static Head head_of(const Task *t, const Cluster *cluster, int64_t head, float *memory) {
    int64_t n = cluster->end - cluster->begin, dim = t->dim;
    const float *bias = bias_of(t, t->queries + t->kv + head);
    Head h = {t, cluster, head, n, dim, n + SLACK, n + 2 * SLACK, memory, memory + n * dim, memory + 2 * n * dim, NULL};
    h.rest = h.kt + h.ld * dim;
    for (int64_t i = 0; i < n; i++) {
        Place key = place_of_key(t, cluster->begin + i, head);
        const float *value = key.source + t->kv * dim;
        load_rotated(t, key, h.keys + i * dim);
        for (int64_t j = 0; j < dim; j++) h.values[i * dim + j] = value[j] + (bias ? bias[j] : 0.0f);
    }
    for (int64_t i = 0; i < 2 * n * dim && t->is_narrow; i++) h.keys[i] = from_bf16(to_bf16(h.keys[i]));
    transpose(h.keys, n, dim, h.kt, h.ld);
    return h;
}

/* The head's next block; from one without a run the first. 0 after the last. */
static int next_block(const Head *h, Block *b) {
    const Run *runs = h->t->runs + h->cluster->first_run, *end = h->t->runs + h->cluster->end_run;
    int64_t share = h->t->queries / h->t->kv;
    if (!b->run)
        b->run = runs, b->query = h->head * share, b->first = runs->own_begin;
    else
        b->first += BLOCK;
    while (b->first >= b->run->own_end) {
        if (++b->run == end) b->run = runs, b->query++;
        if (b->query == (h->head + 1) * share) return 0;
        b->first = b->run->own_begin;
    }
    b->m = b->run->own_end - b->first < BLOCK ? b->run->own_end - b->first : BLOCK;
    b->shared = b->run->prefix_length, b->shared_at = b->run->prefix - h->cluster->begin;
    b->own = b->run->is_whole ? b->run->end - b->run->begin : token_of(h->t, b->first + b->m - 1) + 1 - b->run->begin;
    b->own_at = b->run->begin - h->cluster->begin;
    return 1;
}

/* How many of a block's keys its token number `i` sees. */
static int64_t seen_by(const Head *h, const Block *b, int64_t i) {
    return b->shared + (b->run->is_whole ? b->own : token_of(h->t, b->first + i) + 1 - b->run->begin);
}

static void load_queries(const Head *h, const Block *b, float *q) {
    for (int64_t i = 0; i < b->m; i++, q += h->dim) {
        load_rotated(h->t, place_of_query(h->t, b->first + i, b->query), q);
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
            float sum = exp_row(s + i * h.lds, seen_by(&h, &b, i), b.shared + b.own, &top);
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

/* `outputs`: the first of two, mixed and log-sum-exp. */
static int forward(const Call *call, Task *t, int outputs) {
    t->out = call->params[outputs], t->lse = call->params[outputs + 1], t->one_head = forward_head;
    return run_heads(call, t, 3 * t->dim + BLOCK, SLACK * t->dim + BLOCK * 2 * (SLACK + t->dim));
}

KERNEL(attention, ATTENTION_INPUTS " -> mixed f32[N, M], log_sum_exp f32[N, Q]") {
    Task t;
    int status = read_inputs(call, &t);
    if (!status) status = forward(call, &t, 9);
    release(&t);
    return status;
}

KERNEL(context_attention, CONTEXT_INPUTS " -> mixed f32[C, M], log_sum_exp f32[C, Q]") {
    Task t;
    int status = read_context(call, &t);
    if (!status) status = forward(call, &t, 11);
    release(&t);
    return status;
}

/* Turns a gradient back and takes it through the norm: `dy` [D] in, the projection's gradient out to its place;
 * the norm's weight's gradient is added to dnorm. */
static void store_rotated(const Task *t, Place place, float *dy, float *dnorm) {
    int64_t dim = t->dim, half = dim / 2;
    const float *angles = t->rotary + (int64_t)t->positions[place.token] * 2 * dim;
    for (int64_t i = 0; i < half; i++) {
        float low = dy[i], high = dy[i + half];
        dy[i] = low * angles[i] + high * angles[dim + i];
        dy[i + half] = high * angles[i] - low * angles[dim + i];
    }
    const float *norm = place.head < t->queries ? t->q_norm : t->k_norm, *bias = bias_of(t, place.head);
    float *out = place.gradient, square = 0.0f, mean = 0.0f;
    if (!norm) {
        memcpy(out, dy, dim * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < dim; i++) {
        float x = place.source[i] + (bias ? bias[i] : 0.0f);
        square += x * x;
        mean += x * norm[i] * dy[i];
    }
    float scale = 1.0f / sqrtf(square / dim + t->eps), back = mean / dim * scale * scale * scale;
    for (int64_t i = 0; i < dim; i++) {
        float x = place.source[i] + (bias ? bias[i] : 0.0f);
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
            int64_t at = (b.first + i) * t->queries + b.query, end = b.shared + b.own, seen = seen_by(&h, &b, i);
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
            store_rotated(t, place_of_query(t, b.first + i, b.query), dq + i * dim, dnorms);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        Place key = place_of_key(t, cluster->begin + i, head);
        store_rotated(t, key, dkeys + i * dim, dnorms + dim);
        memcpy(key.gradient + t->kv * dim, dvalues + i * dim, dim * sizeof(float));
    }
}

/* out [columns] = the sum of `a`'s rows, which begin `next` floats apart */
static void sum_rows(const float *a, int64_t rows, int64_t columns, int64_t next, float *out) {
    memset(out, 0, columns * sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[j] += a[i * next + j];
}

static void sum_bias(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end, of_queries = t->queries * t->dim;
    share_out(member, of_queries, &begin, &end);
    sum_rows(t->dq + begin, t->num_own, end - begin, t->dq_width, t->dbias + begin);
    share_out(member, 2 * t->kv * t->dim, &begin, &end);
    sum_rows(t->dk + begin, t->total, end - begin, t->dk_width, t->dbias + of_queries + begin);
}

/* `inputs`: the first of mixed, log-sum-exp and mixed's gradient; `norms`: of the outputs dbias, dq_norm and dk_norm,
 * which are zero where the heads have none, as `optionals` of the inputs are. */
static int backward(const Call *call, Task *t, int inputs, int norms, int optionals) {
    for (int i = 0; i < 3; i++) {
        if (!optional(call, norms + i) != !optional(call, optionals + i))
            return refuse(call, "tensors %d and %d differ", optionals + i, norms + i);
        *(float *)call->params[norms + i] = 0.0f;
    }
    t->out = call->params[inputs], t->lse = call->params[inputs + 1], t->dout = call->params[inputs + 2];
    t->dbias = call->params[norms], t->one_head = backward_head;
    int status = run_heads(call, t, 6 * t->dim + 2 * BLOCK, 2 * SLACK * t->dim + BLOCK * (4 * SLACK + 3 * t->dim));
    if (!status && t->bias) pool_run(sum_bias, t);
    for (int i = 0; i < 2 && !status && t->q_norm; i++)
        sum_rows(t->dnorms + i * t->dim, t->num_clusters * t->kv, t->dim, 2 * t->dim, call->params[norms + 1 + i]);
    return status;
}

#define NORM_GRADIENTS "dbias f32[W]?, dq_norm f32[D]?, dk_norm f32[D]?"

KERNEL(attention_grad, ATTENTION_INPUTS
       ", mixed f32[N, M], log_sum_exp f32[N, Q], dmixed f32[N, M] -> dqkv f32[N, W], " NORM_GRADIENTS) {
    Task t;
    int status = read_inputs(call, &t);
    t.dq = call->params[12], t.dk = t.dq + t.queries * t.dim, t.dq_width = t.dk_width = dim(call, 'W');
    if (!status) status = backward(call, &t, 9, 13, 1);
    release(&t);
    return status;
}

/* Of keys and values what the own tokens make of their gradients, a part of a sum over the ranks. */
KERNEL(context_attention_grad, CONTEXT_INPUTS
       ", mixed f32[C, M], log_sum_exp f32[C, Q], dmixed f32[C, M] "
       "-> dq f32[C, M], dkv f32[N, K], " NORM_GRADIENTS) {
    Task t;
    int status = read_context(call, &t);
    t.dq = call->params[14], t.dk = call->params[15], t.dq_width = dim(call, 'M'), t.dk_width = dim(call, 'K');
    memset(t.dk, 0, t.total * t.dk_width * sizeof(float));
    if (!status) status = backward(call, &t, 11, 16, 2);
    release(&t);
    return status;
}
