/* The layers of a decoder for rows of a rollout: rows of slots decode, rows of prompts fill entries. See rollout.h.
 *
 * Between two sums over ranks there is one kernel. Attention as in arXiv:1706.03762, section 3.2.1, of each row over
 * exactly the keys that it sees; rows that follow each other in one entry read its keys together.
 */
#include "rollout.h"

enum { RUN_ROWS = 8 };

/* What a kernel of layers works on. */
typedef struct {
    const Rollout *g;
    int64_t layer, rows, width, own_floats;
    int is_prompt;
    float *normed, *qkv, *mixed, *own_memory; /* of each member `own_floats` */
    const float *x, *added, *added_bias, *norm, *first, *bias, *q_norm, *k_norm, *second;
    float *total, *delta;
} Work;

static int64_t entry_of(const Work *w, int64_t row) {
    return w->is_prompt ? w->g->prompt_row_entry[row] : w->g->row_entry[row];
}

/* Keys that the row sees in its entry. */
static int64_t shared_of(const Work *w, int64_t row) {
    return w->is_prompt ? w->g->prompt_row_seen[row] : w->g->row_shared[row];
}

/* Keys that it sees in its slot, the one of its own token included. */
static int64_t own_of(const Work *w, int64_t row) { return w->is_prompt ? 0 : w->g->row_own[row] + 1; }

/* Whether the call has room for the table's rows, and they point into the cache; then what members need to attend. */
static int check_rows(const Call *call, Work *w) {
    const Rollout *g = w->g;
    int64_t position = 2 * g->kv * g->dim, positions = g->layer_floats / position, most = 0, most_own = 0;
    int64_t entries = g->entry_room ? (positions - g->slots * g->slot_room) / g->entry_room : g->users_count;
    int64_t starts = w->is_prompt ? g->prompt_starts : 0, rows = w->is_prompt ? g->prompt_row_entry_count : g->row_own_count;
    if (w->rows + starts > dim(call, 'B') || w->rows > rows || starts > g->start_entry_count)
        return refuse(call, "%lld rows and %lld first inputs are more than tensors or table hold", (long long)w->rows, (long long)starts);
    if (w->layer < 0 || (w->layer + 1) * g->layer_floats > g->cache_count || g->entry_room % VEC ||
        g->slot_room % VEC || g->slots * g->slot_room > positions)
        return refuse(call, "the cache has no layer %lld of %lld floats, or rooms of part of a vector",
                      (long long)w->layer, (long long)g->layer_floats);
    for (int64_t i = 0; i < w->rows; i++) {
        int64_t entry = entry_of(w, i), shared = shared_of(w, i), own = own_of(w, i), slot = own ? g->row_slot[i] : 0;
        if (entry < 0 || entry >= entries || shared < 0 || shared > g->entry_room || own > g->slot_room || slot < 0 ||
            slot >= g->slots || shared + own < 1 || (shared + own) * 2 * g->dim > g->rotary_count)
            return refuse(call, "row %lld has %lld keys in entry %lld and %lld in slot %lld: not there, or without a rotary angle",
                          (long long)i, (long long)shared, (long long)entry, (long long)own, (long long)slot);
        most = shared > most ? shared : most;
        most_own = own > most_own ? own : most_own;
    }
    for (int64_t i = 0; i < starts; i++)
        if (g->start_entry[i] < 0 || (g->start_entry[i] + 1) * g->hidden > g->starts_count)
            return refuse(call, "entry %d of a first input is not there", g->start_entry[i]);
    w->own_floats = padded(RUN_ROWS * (g->queries / g->kv) * (padded(most) + padded(most_own) + 2 * g->dim));
    return 0;
}

/* Shares out the table's scratch: rows of `width`, and where they are mixed of `mixed`. */
static int take_scratch(const Call *call, Work *w, int64_t width, int64_t mixed) {
    const Rollout *g = w->g;
    w->width = width;
    w->normed = g->scratch;
    w->qkv = w->normed + w->rows * g->hidden;
    w->mixed = w->qkv + w->rows * width;
    int64_t wanted = w->rows * (g->hidden + width + mixed);
    if (wanted <= g->scratch_count) return 0;
    return refuse(call, "%lld floats of scratch are less than %lld rows need: %lld", (long long)g->scratch_count,
                  (long long)w->rows, (long long)wanted);
}

/* total = x (+ added) (+ its bias), and its norm. */
static void add_and_norm(const Work *w, Member member) {
    int64_t width = w->g->hidden, begin, end;
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float *sum = w->total + i * width, *y = w->normed + i * width;
        memcpy(sum, w->x + i * width, width * sizeof(float));
        for (int64_t j = 0; j < width && w->added; j++) sum[j] += w->added[i * width + j];
        for (int64_t j = 0; j < width && w->added_bias; j++) sum[j] += w->added_bias[j];
        float scale = inverse_rms(sum, width, w->g->eps);
        for (int64_t j = 0; j < width; j++) y[j] = sum[j] * scale * w->norm[j];
    }
    pool_meet(member);
}

/* Rotates the row's queries in place and puts its keys and values where they are kept. */
static void keep_row(const Work *w, int64_t row) {
    const Rollout *g = w->g;
    const float *bias = w->bias;
    int64_t dim = g->dim, shared = shared_of(w, row), own = own_of(w, row), at = own ? own - 1 : shared - 1;
    Region target = own ? slot_region(g, w->layer, g->row_slot[row]) : entry_region(g, w->layer, entry_of(w, row));
    const float *angles = g->rotary + 2 * dim * (shared + own - 1);
    float *source = w->qkv + row * w->width, rotated[dim];
    for (int64_t head = 0; head < g->queries + g->kv; head++, source += dim) {
        int is_query = head < g->queries;
        norm_and_rope(source, bias ? bias + head * dim : NULL, is_query ? w->q_norm : w->k_norm, g->eps, angles, dim, rotated);
        if (is_query) {
            memcpy(source, rotated, dim * sizeof(float));
            continue;
        }
        float *keys = target.keys + (head - g->queries) * dim * target.room + at;
        for (int64_t i = 0; i < dim; i++) keys[i * target.room] = rotated[i];
    }
    if (bias) bias += (g->queries + g->kv) * dim;
    for (int64_t head = 0; head < g->kv; head++, source += dim) {
        float *values = target.values + (head * target.room + at) * dim;
        for (int64_t i = 0; i < dim; i++) values[i] = source[i] + (bias ? bias[head * dim + i] : 0.0f);
    }
}

/* scores -> exp(scale * (scores - their largest)) on the first `count` of each of two parts; 0 on the rest of the first
 * one. Returns one over their sum. */
static float softmax(float *scores, int64_t shared, int64_t shared_end, float *own_scores, int64_t own, float scale) {
    float top = fmaxf(largest(scores, shared), largest(own_scores, own)), sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < shared; i++) sum += scores[i] = fast_exp((scores[i] - top) * scale);
    for (int64_t i = shared; i < shared_end; i++) scores[i] = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < own; i++) sum += own_scores[i] = fast_exp((own_scores[i] - top) * scale);
    return 1.0f / sum;
}

/* Rows [begin, end) of one entry, one head of keys and the queries that share it. */
static void attend_run(const Work *w, int64_t begin, int64_t end, int64_t head, float *memory) {
    const Rollout *g = w->g;
    int64_t dim = g->dim, share = g->queries / g->kv, count = (end - begin) * share, most = 0, most_own = 0;
    for (int64_t i = begin; i < end; i++) {
        most = shared_of(w, i) > most ? shared_of(w, i) : most;
        most_own = own_of(w, i) > most_own ? own_of(w, i) : most_own;
    }
    int64_t split = padded(most), stride = split + padded(most_own);
    float *queries = memory, *mixed = queries + count * dim, *scores = mixed + count * dim, inverse[count];
    for (int64_t i = begin; i < end; i++)
        memcpy(queries + (i - begin) * share * dim, w->qkv + i * w->width + head * share * dim, share * dim * sizeof(float));
    Region entry = entry_region(g, w->layer, entry_of(w, begin));
    const float *keys = entry.keys + head * dim * entry.room, *values = entry.values + head * dim * entry.room;
    gemm_alone(count, split, dim, queries, dim, 1, keys, entry.room, scores, stride, 0);
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i);
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            gemm_alone(share, padded(own), dim, queries + first * dim, dim, 1, slot.keys + head * dim * slot.room,
                       slot.room, scores + first * stride + split, stride, 0);
        }
        for (int64_t q = first; q < first + share; q++)
            inverse[q] = softmax(scores + q * stride, shared_of(w, i), most, scores + q * stride + split, own, 1.0f / sqrtf(dim));
    }
    gemm_alone(count, dim, most, scores, stride, 1, values, dim, mixed, dim, 0);
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i);
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            gemm_alone(share, dim, own, scores + first * stride + split, stride, 1,
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
        attend_run(w, begins[run], begins[run + 1], i % w->g->kv, w->own_memory + member.index * w->own_floats);
    }
    pool_meet(member);
}

static void attend(void *task, Member member) {
    const Work *w = task;
    const Rollout *g = w->g;
    int64_t begin, end, mixed = g->queries * g->dim;
    add_and_norm(w, member);
    gemm(member, w->rows, w->width, g->hidden, w->normed, g->hidden, 1, w->first, w->width, 0, w->qkv, w->width, 0);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) keep_row(w, i);
    if (!w->second) return;
    pool_meet(member);
    attend_rows(w, member);
    gemm(member, w->rows, g->hidden, mixed, w->mixed, mixed, 1, w->second, g->hidden, 0, w->delta, g->hidden, 0);
}

static void mlp(void *task, Member member) {
    const Work *w = task;
    int64_t begin, end, hidden = w->g->hidden, inner = w->g->inner;
    add_and_norm(w, member);
    gemm(member, w->rows, 2 * inner, hidden, w->normed, hidden, 1, w->first, 2 * inner, 0, w->qkv, 2 * inner, 0);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float *gate = w->qkv + 2 * i * inner, *up = gate + inner;
        for (int64_t j = 0; j < inner; j++) gate[j] = silu(gate[j]) * up[j];
    }
    pool_meet(member);
    gemm(member, w->rows, hidden, inner, w->qkv, 2 * inner, 1, w->second, hidden, 0, w->delta, hidden, 0);
}

/* Rows of prompts may bring first inputs along: they follow those that layers work on. */
static void keep_starts(const Rollout *g, const float *x) {
    for (int64_t i = 0; i < g->prompt_starts; i++)
        memcpy(g->starts + g->start_entry[i] * g->hidden, x + (g->prompt_rows + i) * g->hidden, g->hidden * sizeof(float));
}

static int work_of(const Call *call, const int32_t *meta, Work *w) {
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    *w = (Work){.g = g, .layer = meta[1], .is_prompt = meta[2]};
    w->rows = w->is_prompt ? g->prompt_rows : g->num_rows;
    return check_rows(call, w);
}

/* meta: number, layer, is prompt. total = x + added; delta: what attention adds before the sum over ranks.
 * Without `out` it ends when keys and values are kept, and the outputs mean nothing. */
KERNEL(rollout_attend, "x f32[B, H], added f32[B, H]?, norm f32[H], qkv f32[H, W], bias f32[W]?, q_norm f32[D]?, "
                       "k_norm f32[D]?, out f32[M, H]?, meta i32[3] -> total f32[B, H]?, delta f32[B, H]?") {
    Work w;
    int status = work_of(call, call->params[8], &w);
    if (status) return status;
    w.x = call->params[0], w.added = optional(call, 1), w.norm = call->params[2], w.first = call->params[3];
    w.bias = optional(call, 4), w.q_norm = optional(call, 5), w.k_norm = optional(call, 6), w.second = optional(call, 7);
    if (!w.q_norm != !w.k_norm) return refuse(call, "queries and keys must be normed alike");
    if (w.second && !(optional(call, 9) && optional(call, 10))) return refuse(call, "there is no output for what it adds");
    int64_t mixed = w.g->queries * w.g->dim;
    status = take_scratch(call, &w, dim(call, 'W'), w.second || mixed > w.g->hidden ? mixed : w.g->hidden);
    if (status) return status;
    w.own_memory = scratch(call, pool_size() * w.own_floats);
    if (!w.own_memory) return KERNEL_OUT_OF_MEMORY;
    w.total = w.second ? call->params[9] : w.mixed;
    w.delta = call->params[10];
    if (w.is_prompt && w.layer == 0) keep_starts(w.g, w.x);
    if (w.rows) pool_run(attend, &w);
    return 0;
}

/* meta: number, any, is prompt. total = x + added + bias; delta: what the MLP adds before the sum over ranks. */
KERNEL(rollout_mlp, "x f32[B, H], added f32[B, H], bias f32[H]?, norm f32[H], gate_up f32[H, 2I], down f32[I, H], "
                    "meta i32[3] -> total f32[B, H], delta f32[B, H]") {
    Work w;
    int status = work_of(call, call->params[6], &w);
    if (!status) status = take_scratch(call, &w, 2 * dim(call, 'I'), 0);
    if (status) return status;
    w.x = call->params[0], w.added = call->params[1], w.added_bias = optional(call, 2), w.norm = call->params[3];
    w.first = call->params[4], w.second = call->params[5], w.total = call->params[7], w.delta = call->params[8];
    if (w.rows) pool_run(mlp, &w);
    return 0;
}
