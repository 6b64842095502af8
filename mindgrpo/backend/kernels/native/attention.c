/* Causal attention over packed rows whose samples may share a prompt, forward and backward.
 *
 * A token's span (prefix, length, start) lets it see `length` tokens from `prefix` and its own run from `start` up to
 * itself. A cluster is a run without prefix and the runs after it that have it as theirs; clusters see nothing of each
 * other, so work and memory follow the samples' lengths, not the row's. Attention as in arXiv:1706.03762, section
 * 3.2.1; the backward from the stored log-sum-exp as in arXiv:2205.14135, appendix B.4.
 */
#include <omp.h>

#include "vec16.h"

enum { BLOCK = 16, SLACK = 2 * VEC };

typedef struct {
    int64_t begin, end, prefix, prefix_length;
} Run;

typedef struct {
    int64_t first_run, end_run, begin, end;
} Cluster;

typedef struct {
    Run *runs;
    Cluster *clusters;
    int64_t num_clusters;
} Places;

typedef struct {
    const float *qkv, *bias, *q_norm, *k_norm, *rotary;
    const int32_t *positions;
    int64_t queries, kv, dim, width;
    float eps, scale;
} Problem;

static int find_places(const int32_t *spans, int64_t rows, int64_t length, Places *places) {
    int64_t total = rows * length, runs = 0, clusters = 0;
    places->runs = malloc((total + 1) * sizeof(Run));
    places->clusters = malloc((total + 1) * sizeof(Cluster));
    if (!places->runs || !places->clusters) return 1;
    for (int64_t i = 0; i < total; i++) {
        const int32_t *span = spans + 3 * i;
        int64_t base = i / length * length, start = base + span[2];
        if (runs && places->runs[runs - 1].begin == start && start < i) {
            places->runs[runs - 1].end = i + 1;
            places->clusters[clusters - 1].end = i + 1;
            continue;
        }
        if (start != i) return 2;
        places->runs[runs] = (Run){i, i + 1, base + span[0], span[1]};
        if (span[1] == 0)
            places->clusters[clusters++] = (Cluster){runs, 0, i, i + 1};
        else if (!clusters || base + span[0] < places->clusters[clusters - 1].begin || base + span[0] + span[1] > i)
            return 2;
        runs++;
        places->clusters[clusters - 1].end_run = runs;
        places->clusters[clusters - 1].end = i + 1;
    }
    places->num_clusters = clusters;
    return 0;
}

static void free_places(Places *places) {
    free(places->runs);
    free(places->clusters);
}

static Problem problem_of(void **params, int64_t **shapes) {
    const int32_t *sizes = params[7];
    const float *numbers = params[8];
    Problem p = {.qkv = params[0], .positions = params[4], .rotary = params[6]};
    p.queries = sizes[0], p.kv = sizes[1], p.dim = sizes[2];
    p.bias = sizes[3] ? params[1] : NULL;
    p.q_norm = sizes[4] ? params[2] : NULL;
    p.k_norm = sizes[4] ? params[3] : NULL;
    p.width = shapes[0][1];
    p.eps = numbers[0], p.scale = numbers[1];
    return p;
}

/* Head number `head` of the projection: queries first, then keys, then values. */
static void load_turned(const Problem *p, int64_t token, int64_t head, float *out) {
    int64_t at = head * p->dim;
    const float *norm = head < p->queries ? p->q_norm : p->k_norm;
    turned_head(p->qkv + token * p->width + at, p->bias ? p->bias + at : NULL, norm, p->eps,
                p->rotary + (int64_t)p->positions[token] * 2 * p->dim, p->dim, out);
}

static void load_value(const Problem *p, int64_t token, int64_t head, float *out) {
    int64_t at = (p->queries + p->kv + head) * p->dim;
    const float *source = p->qkv + token * p->width + at;
    for (int64_t i = 0; i < p->dim; i++) out[i] = source[i] + (p->bias ? p->bias[at + i] : 0.0f);
}

static void transpose(const float *a, int64_t rows, int64_t columns, float *out, int64_t ld) {
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t i = 0; i < rows; i++) out[j * ld + i] = a[i * columns + j];
        memset(out + j * ld + rows, 0, (ld - rows) * sizeof(float));
    }
}

/* s [m, .] = q k^T over the run's prefix, then over its own tokens up to the block's last; what is computed past the
 * end is rounding up to whole vectors, overwritten or unread. */
static void scores(int64_t m, const float *q, const float *kt, int64_t ld, const Cluster *cluster, const Run *run,
                   int64_t own, int64_t dim, float *s, int64_t lds) {
    if (run->prefix_length)
        product(m, (run->prefix_length + SLACK - 1) / SLACK * SLACK, dim, q, dim, 1,
                kt + run->prefix - cluster->begin, ld, s, lds, 0);
    product(m, (own + SLACK - 1) / SLACK * SLACK, dim, q, dim, 1, kt + run->begin - cluster->begin, ld,
            s + run->prefix_length, lds, 0);
}

static void weighted_sum(int64_t m, const float *s, int64_t lds, const float *values, const Cluster *cluster,
                         const Run *run, int64_t own, int64_t dim, float *out) {
    product(m, dim, run->prefix_length, s, lds, 1, values + (run->prefix - cluster->begin) * dim, dim, out, dim, 0);
    product(m, dim, own, s + run->prefix_length, lds, 1, values + (run->begin - cluster->begin) * dim, dim, out, dim,
            1);
}

static void forward_head(const Problem *p, const Cluster *cluster, const Run *runs, int64_t head, float *out,
                         float *lse) {
    int64_t n = cluster->end - cluster->begin, dim = p->dim, ld = n + SLACK, share = p->queries / p->kv;
    int64_t lds = n + 2 * SLACK;
    float *keys = malloc((2 * n * dim + ld * dim + BLOCK * (lds + 2 * dim)) * sizeof(float));
    float *values = keys + n * dim, *kt = values + n * dim, *s = kt + ld * dim, *q = s + BLOCK * lds;
    float *mixed = q + BLOCK * dim;
    for (int64_t i = 0; i < n; i++) {
        load_turned(p, cluster->begin + i, p->queries + head, keys + i * dim);
        load_value(p, cluster->begin + i, head, values + i * dim);
    }
    transpose(keys, n, dim, kt, ld);
    for (int64_t query = head * share; query < (head + 1) * share; query++)
        for (const Run *run = runs + cluster->first_run; run < runs + cluster->end_run; run++)
            for (int64_t first = run->begin; first < run->end; first += BLOCK) {
                int64_t m = run->end - first < BLOCK ? run->end - first : BLOCK;
                int64_t own = first + m - run->begin, prefix = run->prefix_length;
                for (int64_t i = 0; i < m; i++) {
                    load_turned(p, first + i, query, q + i * dim);
                    for (int64_t j = 0; j < dim; j++) q[i * dim + j] *= p->scale;
                }
                scores(m, q, kt, ld, cluster, run, own, dim, s, lds);
                for (int64_t i = 0; i < m; i++) {
                    float *row = s + i * lds, top = row[0], sum = 0.0f;
                    int64_t seen = prefix + own - m + i + 1;
#pragma omp simd reduction(max : top)
                    for (int64_t j = 1; j < seen; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd reduction(+ : sum)
                    for (int64_t j = 0; j < seen; j++) {
                        row[j] = fast_exp(row[j] - top);
                        sum += row[j];
                    }
                    for (int64_t j = 0; j < seen; j++) row[j] /= sum;
                    memset(row + seen, 0, (prefix + own - seen) * sizeof(float));
                    lse[(first + i) * p->queries + query] = top + logf(sum);
                }
                weighted_sum(m, s, lds, values, cluster, run, own, dim, mixed);
                for (int64_t i = 0; i < m; i++)
                    memcpy(out + ((first + i) * p->queries + query) * dim, mixed + i * dim, dim * sizeof(float));
            }
    free(keys);
}

/* (qkv [N, W], bias, q_norm, k_norm, positions [R, T], spans [R, T, 3], rotary [S, 2 D], sizes int32 [5], numbers [2])
 * -> (mixed [N, queries D], log-sum-exp [N, queries]) */
int attention(KERNEL_ARGS) {
    UNUSED_ARGS;
    Problem p = problem_of(params, shapes);
    float *out = params[9], *lse = params[10];
    Places places;
    int wrong = find_places(params[5], shapes[4][0], shapes[4][1], &places);
    if (!wrong) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t item = 0; item < places.num_clusters * p.kv; item++)
            forward_head(&p, &places.clusters[item / p.kv], places.runs, item % p.kv, out, lse);
    }
    free_places(&places);
    return wrong;
}

/* Turns a gradient back and takes it through the norm: `dy` [D] in, the projection's gradient out to dqkv;
 * the norm's weight's gradient is added to dnorm. */
static void store_turned(const Problem *p, int64_t token, int64_t head, float *dy, float *dqkv, float *dnorm) {
    int64_t dim = p->dim, half = dim / 2, at = head * dim;
    const float *angles = p->rotary + (int64_t)p->positions[token] * 2 * dim;
    for (int64_t i = 0; i < half; i++) {
        float low = dy[i], high = dy[i + half];
        dy[i] = low * angles[i] + high * angles[dim + i];
        dy[i + half] = high * angles[i] - low * angles[dim + i];
    }
    const float *norm = head < p->queries ? p->q_norm : p->k_norm, *source = p->qkv + token * p->width + at;
    float *out = dqkv + token * p->width + at;
    if (!norm) {
        memcpy(out, dy, dim * sizeof(float));
        return;
    }
    float square = 0.0f, mean = 0.0f;
    for (int64_t i = 0; i < dim; i++) {
        float x = source[i] + (p->bias ? p->bias[at + i] : 0.0f);
        square += x * x;
        mean += x * norm[i] * dy[i];
    }
    float scale = 1.0f / sqrtf(square / dim + p->eps), back = mean / dim * scale * scale * scale;
    for (int64_t i = 0; i < dim; i++) {
        float x = source[i] + (p->bias ? p->bias[at + i] : 0.0f);
        dnorm[i] += dy[i] * x * scale;
        out[i] = scale * norm[i] * dy[i] - x * back;
    }
}

static void backward_head(const Problem *p, const Cluster *cluster, const Run *runs, int64_t head, const float *out,
                          const float *lse, const float *dout, float *dqkv, float *dnorms) {
    int64_t n = cluster->end - cluster->begin, dim = p->dim, ld = n + SLACK, share = p->queries / p->kv;
    int64_t lds = n + 2 * SLACK;
    float *keys = malloc((4 * n * dim + 2 * ld * dim + BLOCK * (2 * lds + 3 * dim)) * sizeof(float));
    float *values = keys + n * dim, *dkeys = values + n * dim, *dvalues = dkeys + n * dim;
    float *kt = dvalues + n * dim, *vt = kt + ld * dim, *s = vt + ld * dim, *ds = s + BLOCK * lds;
    float *q = ds + BLOCK * lds, *dy = q + BLOCK * dim, *dq = dy + BLOCK * dim;
    for (int64_t i = 0; i < n; i++) {
        load_turned(p, cluster->begin + i, p->queries + head, keys + i * dim);
        load_value(p, cluster->begin + i, head, values + i * dim);
    }
    transpose(keys, n, dim, kt, ld);
    transpose(values, n, dim, vt, ld);
    memset(dkeys, 0, 2 * n * dim * sizeof(float));
    for (int64_t query = head * share; query < (head + 1) * share; query++)
        for (const Run *run = runs + cluster->first_run; run < runs + cluster->end_run; run++)
            for (int64_t first = run->begin; first < run->end; first += BLOCK) {
                int64_t m = run->end - first < BLOCK ? run->end - first : BLOCK;
                int64_t own = first + m - run->begin, prefix = run->prefix_length;
                int64_t shared_at = (run->prefix - cluster->begin) * dim, own_at = (run->begin - cluster->begin) * dim;
                for (int64_t i = 0; i < m; i++) {
                    load_turned(p, first + i, query, q + i * dim);
                    for (int64_t j = 0; j < dim; j++) q[i * dim + j] *= p->scale;
                    memcpy(dy + i * dim, dout + ((first + i) * p->queries + query) * dim, dim * sizeof(float));
                }
                scores(m, q, kt, ld, cluster, run, own, dim, s, lds);
                scores(m, dy, vt, ld, cluster, run, own, dim, ds, lds);
                for (int64_t i = 0; i < m; i++) {
                    int64_t at = (first + i) * p->queries + query, seen = prefix + own - m + i + 1;
                    float *row = s + i * lds, *drow = ds + i * lds, total = lse[at];
                    float delta = dot(dy + i * dim, out + at * dim, dim);
                    for (int64_t j = 0; j < seen; j++) {
                        row[j] = fast_exp(row[j] - total);
                        drow[j] = row[j] * (drow[j] - delta);
                    }
                    memset(row + seen, 0, (prefix + own - seen) * sizeof(float));
                    memset(drow + seen, 0, (prefix + own - seen) * sizeof(float));
                }
                weighted_sum(m, ds, lds, keys, cluster, run, own, dim, dq);
                product(prefix, dim, m, ds, 1, lds, q, dim, dkeys + shared_at, dim, 1);
                product(own, dim, m, ds + prefix, 1, lds, q, dim, dkeys + own_at, dim, 1);
                product(prefix, dim, m, s, 1, lds, dy, dim, dvalues + shared_at, dim, 1);
                product(own, dim, m, s + prefix, 1, lds, dy, dim, dvalues + own_at, dim, 1);
                for (int64_t i = 0; i < m; i++) {
                    for (int64_t j = 0; j < dim; j++) dq[i * dim + j] *= p->scale;
                    store_turned(p, first + i, query, dq + i * dim, dqkv, dnorms);
                }
            }
    for (int64_t i = 0; i < n; i++) {
        int64_t token = cluster->begin + i;
        store_turned(p, token, p->queries + head, dkeys + i * dim, dqkv, dnorms + dim);
        memcpy(dqkv + token * p->width + (p->queries + p->kv + head) * dim, dvalues + i * dim, dim * sizeof(float));
    }
    free(keys);
}

static void column_sums(const float *a, int64_t rows, int64_t columns, float *out) {
#pragma omp parallel for if (rows * columns > 65536)
    for (int64_t begin = 0; begin < columns; begin += 64) {
        int64_t count = columns - begin < 64 ? columns - begin : 64;
        memset(out + begin, 0, count * sizeof(float));
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < count; j++) out[begin + j] += a[i * columns + begin + j];
    }
}

/* (attention's nine inputs, out, log-sum-exp, dout) -> (dqkv, dbias, dq_norm, dk_norm); the last three are zero where
 * the heads have none. */
int attention_grad(KERNEL_ARGS) {
    UNUSED_ARGS;
    Problem p = problem_of(params, shapes);
    const float *out = params[9], *lse = params[10], *dout = params[11];
    float *dqkv = params[12];
    Places places;
    int wrong = find_places(params[5], shapes[4][0], shapes[4][1], &places);
    int64_t items = wrong ? 0 : places.num_clusters * p.kv;
    float *dnorms = calloc(items * 2 * p.dim + 1, sizeof(float));
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = 0; item < items; item++)
        backward_head(&p, &places.clusters[item / p.kv], places.runs, item % p.kv, out, lse, dout, dqkv,
                      dnorms + item * 2 * p.dim);
    for (int k = 13; k < 16; k++) memset(params[k], 0, numel(k, ndims, shapes) * sizeof(float));
    if (p.bias) column_sums(dqkv, shapes[0][0], p.width, params[13]);
    for (int which = 0; which < 2 && p.q_norm; which++)
        for (int64_t item = 0; item < items; item++)
            for (int64_t j = 0; j < p.dim; j++)
                ((float *)params[14 + which])[j] += dnorms[(item * 2 + which) * p.dim + j];
    free(dnorms);
    free_places(&places);
    return wrong;
}
