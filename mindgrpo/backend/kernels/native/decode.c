/* The layers of a decoder for rows of a rollout: rows of slots decode, rows of prompts fill entries. See rollout.h.
 *
 * Between two sums over ranks there is one kernel. Attention as in arXiv:1706.03762, section 3.2.1, of each row over
 * exactly the keys that it sees; rows that follow each other in one entry read its keys together.
 */
#include "rollout.h"

enum { MAX_ROLLOUTS = 1024, RUN_ROWS = 8 };

static Rollout *rollouts[MAX_ROLLOUTS];

/* Its number, or -1 where too many are registered already. */
int32_t rollout_register(Rollout *g) {
    for (int32_t i = 0; i < MAX_ROLLOUTS; i++)
        if (!rollouts[i]) {
            rollouts[i] = g;
            return i;
        }
    return -1;
}

void rollout_forget(int32_t number) { rollouts[number] = NULL; }

int64_t rollout_bytes(void) { return sizeof(Rollout); }

Rollout *rollout_of(const void *meta) {
    int32_t number = *(const int32_t *)meta;
    return number >= 0 && number < MAX_ROLLOUTS ? rollouts[number] : NULL;
}

float *scratch(int64_t floats) {
    static __thread float *room;
    static __thread int64_t size;
    if (floats > size) {
        free(room);
        size = (floats + 4095) / 4096 * 4096;
        room = aligned_alloc(64, size * sizeof(float));
        if (!room) size = 0;
    }
    return room;
}

/* What a kernel of layers works on. */
typedef struct {
    const Rollout *g;
    int64_t layer, rows, width;
    int is_prompt;
    float *normed, *qkv, *mixed;
    const float *x, *added, *added_bias, *norm, *first, *bias, *q_norm, *k_norm, *second;
    float *total, *delta;
} Work;

static Work work_of(const Rollout *g, const int32_t *meta, int64_t capacity) {
    Work w = {.g = g, .layer = meta[1], .is_prompt = meta[2]};
    w.rows = w.is_prompt ? g->prompt_rows : g->num_rows;
    w.width = (g->queries + 2 * g->kv) * g->dim;
    w.normed = g->scratch;
    w.qkv = w.normed + capacity * g->hidden;
    w.mixed = w.qkv + capacity * w.width;
    return w;
}

static int64_t entry_of(const Work *w, int64_t row) {
    return w->is_prompt ? w->g->prompt_row_entry[row] : w->g->row_entry[row];
}

/* Keys that the row sees in its entry. */
static int64_t shared_of(const Work *w, int64_t row) {
    return w->is_prompt ? w->g->prompt_row_seen[row] : w->g->row_shared[row];
}

/* Keys that it sees in its slot, the one of its own token included. */
static int64_t own_of(const Work *w, int64_t row) { return w->is_prompt ? 0 : w->g->row_own[row] + 1; }

/* total = x (+ added) (+ its bias), and its norm. */
static void add_and_norm(const Work *w, Member member) {
    int64_t width = w->g->hidden, begin, end;
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const float *added = w->added + i * width;
        float *sum = w->total + i * width, *y = w->normed + i * width;
        memcpy(sum, w->x + i * width, width * sizeof(float));
        for (int64_t j = 0; j < width && w->added; j++) sum[j] += added[j];
        for (int64_t j = 0; j < width && w->added_bias; j++) sum[j] += w->added_bias[j];
        float scale = 1.0f / sqrtf(dot(sum, sum, width) / width + (float)w->g->eps);
        for (int64_t j = 0; j < width; j++) y[j] = sum[j] * scale * w->norm[j];
    }
    pool_meet(member);
}

/* Turns the row's queries in place and puts its keys and values where they are kept. */
static void keep_row(const Work *w, int64_t row) {
    const Rollout *g = w->g;
    const float *bias = w->bias;
    int64_t dim = g->dim, shared = shared_of(w, row), own = own_of(w, row), at = own ? own - 1 : shared - 1;
    Region target = own ? slot_region(g, w->layer, g->row_slot[row]) : entry_region(g, w->layer, entry_of(w, row));
    const float *angles = g->rotary + 2 * dim * (shared + own - 1);
    float *source = w->qkv + row * w->width, turned[dim];
    for (int64_t head = 0; head < g->queries + g->kv; head++, source += dim) {
        int is_query = head < g->queries;
        turned_head(source, bias ? bias + head * dim : NULL, is_query ? w->q_norm : w->k_norm, g->eps, angles, dim, turned);
        if (is_query) {
            memcpy(source, turned, dim * sizeof(float));
            continue;
        }
        float *keys = target.keys + (head - g->queries) * dim * target.room + at;
        for (int64_t i = 0; i < dim; i++) keys[i * target.room] = turned[i];
    }
    if (bias) bias += (g->queries + g->kv) * dim;
    for (int64_t head = 0; head < g->kv; head++, source += dim) {
        float *values = target.values + (head * target.room + at) * dim;
        for (int64_t i = 0; i < dim; i++) values[i] = source[i] + (bias ? bias[head * dim + i] : 0.0f);
    }
}

/* weights -> exp(scale * (weights - max)) on the first `count` of each of two parts; 0 on the rest of the first one.
 * Returns one over their sum. */
static float softmax(float *scores, int64_t shared, int64_t shared_end, float *own_scores, int64_t own, float scale) {
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < shared; i++) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = 0; i < own; i++) top = own_scores[i] > top ? own_scores[i] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < shared; i++) sum += scores[i] = fast_exp((scores[i] - top) * scale);
    for (int64_t i = shared; i < shared_end; i++) scores[i] = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < own; i++) sum += own_scores[i] = fast_exp((own_scores[i] - top) * scale);
    return 1.0f / sum;
}

/* Rows [begin, end) of one entry, one head of keys and the queries that share it. */
static void attend_run(const Work *w, int64_t begin, int64_t end, int64_t head) {
    const Rollout *g = w->g;
    int64_t dim = g->dim, share = g->queries / g->kv, count = (end - begin) * share, most = 0, most_own = 0;
    for (int64_t i = begin; i < end; i++) {
        most = shared_of(w, i) > most ? shared_of(w, i) : most;
        most_own = own_of(w, i) > most_own ? own_of(w, i) : most_own;
    }
    int64_t split = padded(most), stride = split + padded(most_own);
    float *queries = scratch(count * (stride + 2 * dim)), *mixed = queries + count * dim;
    float *scores = mixed + count * dim;
    for (int64_t i = begin; i < end; i++)
        memcpy(queries + (i - begin) * share * dim, w->qkv + i * w->width + head * share * dim,
               share * dim * sizeof(float));
    Region entry = entry_region(g, w->layer, entry_of(w, begin));
    const float *keys = entry.keys + head * dim * entry.room, *values = entry.values + head * dim * entry.room;
    product(count, split, dim, queries, dim, 1, keys, entry.room, scores, stride, 0);
    float inverse[count];
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i);
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            product(share, padded(own), dim, queries + first * dim, dim, 1, slot.keys + head * dim * slot.room,
                    slot.room, scores + first * stride + split, stride, 0);
        }
        for (int64_t q = first; q < first + share; q++)
            inverse[q] = softmax(scores + q * stride, shared_of(w, i), most, scores + q * stride + split, own,
                                1.0f / sqrtf(dim));
    }
    product(count, dim, most, scores, stride, 1, values, dim, mixed, dim, 0);
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i);
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            product(share, dim, own, scores + first * stride + split, stride, 1,
                    slot.values + head * dim * slot.room, dim, mixed + first * dim, dim, 1);
        }
        float *out = w->mixed + (i * g->queries + head * share) * dim;
        for (int64_t q = 0; q < share; q++)
            for (int64_t j = 0; j < dim; j++) out[q * dim + j] = mixed[(first + q) * dim + j] * inverse[first + q];
    }
}

static void attend_rows(const Work *w, Member member) {
    int64_t begins[w->rows + 1], runs = 0;
    for (int64_t i = 0; i < w->rows; i++)
        if (i == 0 || entry_of(w, i) != entry_of(w, i - 1) || i - begins[runs - 1] == RUN_ROWS) begins[runs++] = i;
    begins[runs] = w->rows;
    /* In turn, as neighbours are alike in length. */
    for (int64_t i = member.index; i < runs * w->g->kv; i += member.size) {
        int64_t run = i / w->g->kv;
        attend_run(w, begins[run], begins[run + 1], i % w->g->kv);
    }
    pool_meet(member);
}

static void attend(const void *task, Member member) {
    const Work *w = task;
    const Rollout *g = w->g;
    int64_t begin, end, mixed = g->queries * g->dim;
    add_and_norm(w, member);
    multiply(member, w->rows, w->width, g->hidden, w->normed, g->hidden, w->first, w->qkv);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) keep_row(w, i);
    if (!w->second) return;
    pool_meet(member);
    attend_rows(w, member);
    multiply(member, w->rows, g->hidden, mixed, w->mixed, mixed, w->second, w->delta);
}

static void mlp(const void *task, Member member) {
    const Work *w = task;
    int64_t begin, end, hidden = w->g->hidden, inner = w->g->inner;
    float *both = w->qkv;
    add_and_norm(w, member);
    multiply(member, w->rows, 2 * inner, hidden, w->normed, hidden, w->first, both);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float *gate = both + 2 * i * inner, *up = gate + inner;
        for (int64_t j = 0; j < inner; j++) gate[j] = gate[j] / (1.0f + fast_exp(-gate[j])) * up[j];
    }
    pool_meet(member);
    multiply(member, w->rows, hidden, inner, both, 2 * inner, w->second, w->delta);
}

static const float *optional(int index, void **params, int *ndims, int64_t **shapes) {
    return numel(index, ndims, shapes) > 1 ? params[index] : NULL;
}

/* Rows of prompts may bring first inputs along: they follow those that layers work on. */
static void keep_starts(const Rollout *g, const float *x) {
    for (int64_t i = 0; i < g->prompt_starts; i++)
        memcpy(g->starts + g->start_entry[i] * g->hidden, x + (g->prompt_rows + i) * g->hidden,
               g->hidden * sizeof(float));
}

/* (x [B, H], added [B, H] or [1], norm [H], qkv [H, W], bias [W] or [1], q_norm, k_norm [D] or [1], out [Q D, H],
 *  (number, layer, is prompt) int32 [3]) -> (x + added, what attention adds before the sum over ranks).
 * With `out` [1] it ends when keys and values are kept, and the outputs mean nothing. */
int rollout_attend(KERNEL_ARGS) {
    UNUSED_ARGS;
    const int32_t *meta = params[8];
    const Rollout *g = rollout_of(meta);
    if (!g) return 1;
    Work w = work_of(g, meta, shapes[0][0]);
    w.x = params[0];
    w.added = optional(1, params, ndims, shapes);
    w.norm = params[2];
    w.first = params[3];
    w.bias = optional(4, params, ndims, shapes);
    w.q_norm = optional(5, params, ndims, shapes);
    w.k_norm = optional(6, params, ndims, shapes);
    w.second = optional(7, params, ndims, shapes);
    w.total = w.second ? params[9] : w.mixed;
    w.delta = params[10];
    if (w.is_prompt && w.layer == 0) keep_starts(g, params[0]);
    if (w.rows) pool_run(attend, &w);
    return 0;
}

/* (x [B, H], added [B, H], bias of what is added [H] or [1], norm [H], gate and up [H, 2 I], down [I, H],
 *  (number, layer, is prompt) int32 [3]) -> (x + added + bias, what the MLP adds before the sum over ranks) */
int rollout_mlp(KERNEL_ARGS) {
    UNUSED_ARGS;
    const int32_t *meta = params[6];
    const Rollout *g = rollout_of(meta);
    if (!g) return 1;
    Work w = work_of(g, meta, shapes[0][0]);
    w.x = params[0];
    w.added = params[1];
    w.added_bias = optional(2, params, ndims, shapes);
    w.norm = params[3];
    w.first = params[4];
    w.second = params[5];
    w.total = params[7];
    w.delta = params[8];
    if (w.rows) pool_run(mlp, &w);
    return 0;
}
