/* The layers of a decoder for rows of a rollout: rows of slots decode, rows of prompts fill prefix blocks. See rollout.h.
 *
 * Attention as in arXiv:1706.03762, section 3.2.1, of each row over exactly the keys that it sees; rows that follow each
 * other in one prefix read its keys together.
 */
#include "collective.h"
#include "experts.h"
#include "rollout.h"
#include "rows.h"

enum { RUN_ROWS = 8 };

/* What a part of a layer works on. A row sees `shared` keys in its prefix, and with `own` as many in its slot and the
 * one of its own token; a row of a prompt has no slot. */
typedef struct {
    const Rollout *g;
    const int32_t *prefix, *shared, *own;
    int64_t layer, rows, width, member_floats;
    float *normed, *qkv, *mixed, *memory; /* of `memory` `member_floats` for each member */
    float *heads, *down;                  /* of latent attention: queries, later values; and latents */
    const float *x, *added, *added_bias, *norm; /* what comes in */
    const float *first, *second, *router;       /* matrices */
    const float *bias, *q_norm, *k_norm;
    float *total, *delta;
} Work;

/* Keys that the row sees in its slot, the one of its own token included. */
static int64_t own_of(const Work *w, int64_t row) { return w->own ? w->own[row] + 1 : 0; }

/* Whether the rows point into the cache; then what members need to attend. */
static int work_of(const Call *call, const Rollout *g, int64_t layer, int is_prompt, Work *w) {
    int64_t positions = g->layer_elements / (2 * g->kv * g->dim), most = 0, most_own = 0;
    int64_t prefix_blocks = g->prefix_block_size ? (positions - g->slots * g->slot_size) / g->prefix_block_size : g->users_count;
    *w = (Work){g, g->row_prefix, g->row_shared, g->row_own, layer, g->num_rows};
    if (is_prompt) *w = (Work){g, g->prompt_row_prefix, g->prompt_row_seen, NULL, layer, g->prompt_rows};
    if (g->prefix_block_size % VEC || g->slot_size % VEC || g->slots * g->slot_size > positions)
        return refuse(call, "rooms of %ld and %ld positions are not in the cache", g->slot_size, g->prefix_block_size);
    for (int64_t i = 0; i < w->rows; i++) {
        int64_t prefix = w->prefix[i], shared = w->shared[i], own = own_of(w, i), slot = w->own ? g->row_slot[i] : 0;
        int64_t count = shared + own + (own && prefix >= 0 && prefix < g->users_count ? g->prefix_shift[prefix] : 0);
        if (prefix < 0 || prefix >= prefix_blocks || shared < 0 || shared > g->prefix_block_size || own < 0 || own > g->slot_size ||
            slot < 0 || slot >= g->slots || count < 1 || count * 2 * g->dim > g->rotary_count)
            return refuse(call,
                          "row %ld has %ld keys in prefix %ld and %ld in slot %ld: not there, or without a rotary angle",
                          i, shared, prefix, own, slot);
        most = shared > most ? shared : most;
        most_own = own > most_own ? own : most_own;
    }
    w->member_floats = padded(RUN_ROWS * (g->queries / g->kv) * (padded(most) + padded(most_own) + VEC + 2 * g->dim));
    /* And keys or values in float32, where they are kept in less. */
    if (g->itemsize < (int64_t)sizeof(float)) w->member_floats += g->dim * padded(most > most_own ? most : most_own);
    w->width = (g->queries + 2 * g->kv) * g->dim;
    w->normed = g->scratch + 2 * (w->rows + (is_prompt ? g->prompt_starts : 0)) * g->hidden;
    w->qkv = w->normed + w->rows * g->hidden;
    w->mixed = w->qkv + w->rows * w->width;
    w->heads = w->mixed + w->rows * g->queries * g->dim;
    w->down = w->heads + w->rows * query_width(g);
    return 0;
}

static void norm_rows(const Work *w, Member member) {
    int64_t width = w->g->hidden, begin, end;
    share_out(member, w->rows, &begin, &end);
    for (int64_t at = begin * width; at < end * width; at += width)
        add_and_norm(w->x + at, w->added ? w->added + at : NULL, w->added_bias, w->norm, w->g->eps, width,
                     w->total + at, w->normed + at);
    pool_meet(member);
}

/* Rotates and scales the row's queries in place and puts its keys and values where they are kept. */
static void keep_row(const Work *w, int64_t row) {
    const Rollout *g = w->g;
    const float *bias = w->bias;
    int64_t dim = g->dim, shared = w->shared[row], own = own_of(w, row), at = own ? own - 1 : shared - 1;
    Region target = own ? slot_region(g, w->layer, g->row_slot[row]) : prefix_region(g, w->layer, w->prefix[row]);
    const float *angles = g->rotary + 2 * dim * (shared + own - 1);
    if (own) angles += 2 * dim * g->prefix_shift[w->prefix[row]];
    if (!own && g->prompt_angles_count) angles = g->prompt_angles + 2 * dim * row;
    float *source = w->qkv + row * w->width, rotated[dim];
    for (int64_t head = 0; head < g->queries + g->kv; head++, source += dim) {
        int is_query = head < g->queries;
        norm_and_rope(source, bias ? bias + head * dim : NULL, is_query ? w->q_norm : w->k_norm, g->eps, angles, dim,
                      rotated);
        if (is_query) {
            for (int64_t i = 0; i < dim; i++) source[i] = rotated[i] * (float)g->score_scale;
            continue;
        }
        int64_t keys = (head - g->queries) * dim * target.room + at;
        for (int64_t i = 0; i < dim; i++) keep(g, target.keys, keys + i * target.room, rotated[i]);
    }
    if (bias) bias += (g->queries + g->kv) * dim;
    for (int64_t head = 0; head < g->kv; head++, source += dim) {
        int64_t values = (head * target.room + at) * dim;
        for (int64_t i = 0; i < dim; i++)
            keep(g, target.values, values + i, source[i] + (bias ? bias[head * dim + i] : 0.0f));
    }
}

/* Rows [begin, end) of one prefix, one head of keys and the queries that share it. Rows of slots see the same `shared` of
 * the prefix. */
static void attend_run(const Work *w, int64_t begin, int64_t end, int64_t head, float *memory) {
    const Rollout *g = w->g;
    int64_t dim = g->dim, share = g->queries / g->kv, count = (end - begin) * share, most = 0, most_own = 0;
    for (int64_t i = begin; i < end; i++) {
        most = w->shared[i] > most ? w->shared[i] : most;
        most_own = own_of(w, i) > most_own ? own_of(w, i) : most_own;
    }
    int64_t split = padded(most), stride = split + padded(most_own) + VEC;
    float *queries = memory, *mixed = queries + count * dim, *scores = mixed + count * dim, inverse[count], top;
    for (int64_t i = begin; i < end; i++)
        memcpy(queries + (i - begin) * share * dim, w->qkv + i * w->width + head * share * dim,
               share * dim * sizeof(float));
    Region prefix = prefix_region(g, w->layer, w->prefix[begin]);
    float *room = scores + count * stride;
    int64_t ld = prefix.room;
    const float *keys = cached_floats(g, prefix.keys, head * dim * prefix.room, dim, split, &ld, room);
    gemm_alone(count, split, dim, queries, dim, 1, keys, ld, scores, stride, 0);
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i), shared = w->shared[i];
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            ld = slot.room;
            keys = cached_floats(g, slot.keys, head * dim * slot.room, dim, padded(own), &ld, room);
            gemm_alone(share, padded(own), dim, queries + first * dim, dim, 1, keys, ld,
                       scores + first * stride + shared, stride, 0);
        }
        for (int64_t q = first; q < first + share; q++)
            inverse[q] = 1.0f / exp_row(scores + q * stride, shared + own, most, &top);
    }
    ld = dim;
    const float *values = cached_floats(g, prefix.values, head * dim * prefix.room, most, dim, &ld, room);
    gemm_alone(count, dim, most, scores, stride, 1, values, dim, mixed, dim, 0);
    for (int64_t i = begin; i < end; i++) {
        int64_t first = (i - begin) * share, own = own_of(w, i);
        if (own) {
            Region slot = slot_region(g, w->layer, g->row_slot[i]);
            values = cached_floats(g, slot.values, head * dim * slot.room, own, dim, &ld, room);
            gemm_alone(share, dim, own, scores + first * stride + w->shared[i], stride, 1, values, dim,
                       mixed + first * dim, dim, 1);
        }
        float *out = w->mixed + (i * g->queries + head * share) * dim;
        for (int64_t q = 0; q < share; q++)
            for (int64_t j = 0; j < dim; j++) out[q * dim + j] = mixed[(first + q) * dim + j] * inverse[first + q];
    }
}

/* Whether row `i` is attended to beside the row before it. */
static int joins_run(const Work *w, int64_t i) {
    return w->prefix[i] == w->prefix[i - 1] && (!w->own || w->shared[i] == w->shared[i - 1]);
}

static void attend_rows(const Work *w, Member member) {
    int64_t begins[w->rows + 1], runs = 0;
    for (int64_t i = 0; i < w->rows; i++)
        if (i == 0 || !joins_run(w, i) || i - begins[runs - 1] == RUN_ROWS) begins[runs++] = i;
    begins[runs] = w->rows;
    /* In turn, as neighbours are alike in length. */
    for (int64_t i = member.index; i < runs * w->g->kv; i += member.size) {
        int64_t run = i / w->g->kv;
        attend_run(w, begins[run], begins[run + 1], i % w->g->kv, w->memory + member.index * w->member_floats);
    }
    pool_meet(member);
}

/* A head as it is turned: halves of what does not turn, then of what does, whose pairs may be neighbours. */
static void lay_out(const Rollout *g, const float *latent, const float *rope, float *head) {
    int64_t rank = g->latent_rank / 2, pairs = g->rope_dim / 2;
    for (int64_t half = 0; half < 2; half++, head += rank + pairs) {
        memcpy(head, latent + half * rank, rank * sizeof(float));
        for (int64_t i = 0; i < pairs; i++)
            head[rank + i] = rope[g->is_interleaved ? 2 * i + half : half * pairs + i];
    }
}

/* Latent attention over latents (arXiv:2405.04434, section 2.1.2): queries are multiplied by what would make keys of
 * latents, and one head of keys is for all. The rows of `qkv`, as models/latent_attention.py makes them. */
static void make_latents(const Work *w, Member member) {
    const Rollout *g = w->g;
    const LayerWeights *weights = layer_weights(g, w->layer);
    int64_t wide = g->nope_dim + g->rope_dim, queries = query_width(g), down = down_width(g), rank = g->latent_rank, begin, end;
    int64_t behind = g->query_rank ? g->query_rank : queries, ld = queries, both = g->nope_dim + g->value;
    const float *made = w->heads;
    multiply(g, member, g->first_matrix[w->layer] + QKV, 1, w->rows, down, g->hidden, w->normed, g->hidden, w->first, 0,
             w->down, down);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    float normed[rank > g->query_rank ? rank : g->query_rank];
    for (int64_t i = begin; i < end; i++) {
        float *row = w->down + i * down;
        if (g->query_rank) {
            add_and_norm(row, NULL, NULL, weights->query_norm, (float)g->latent_eps, g->query_rank, NULL, normed);
            memcpy(row, normed, g->query_rank * sizeof(float));
        }
        add_and_norm(row + behind, NULL, NULL, weights->latent_norm, (float)g->latent_eps, rank, NULL, normed);
        memcpy(row + behind, normed, rank * sizeof(float));
    }
    if (g->query_rank) {
        pool_meet(member);
        multiply(g, member, g->first_matrix[w->layer + 1] - 1, 1, w->rows, queries, g->query_rank, w->down, down,
                 weights->query_up, 0, w->heads, queries);
        pool_meet(member);
    } else {
        made = w->down, ld = down;
    }
    float *seeking = w->mixed;
    for (int64_t head = 0; head < g->queries; head++)
        gemm((Member){0, 1}, end - begin, rank, g->nope_dim, made + begin * ld + head * wide, ld, 1,
             weights->latent_up + head * both, g->queries * both, 1, seeking + begin * g->queries * rank + head * rank,
             g->queries * rank, 0);
    for (int64_t i = begin; i < end; i++) {
        float *out = w->qkv + i * w->width;
        const float *row = w->down + i * down + behind;
        for (int64_t head = 0; head < g->queries; head++, out += g->dim)
            lay_out(g, seeking + (i * g->queries + head) * rank, made + i * ld + head * wide + g->nope_dim, out);
        lay_out(g, row, row + rank, out);
        memcpy(out + g->dim, out, g->dim * sizeof(float));
    }
}

/* Values of each head, in `heads`, of the latents that attention has mixed. */
static void make_values(const Work *w, Member member) {
    const Rollout *g = w->g;
    int64_t rank = g->latent_rank, both = g->nope_dim + g->value, begin, end;
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin * g->queries; i < end * g->queries; i++)
        for (int64_t half = 0; half < 2; half++)
            memcpy(w->qkv + i * rank + half * (rank / 2), w->mixed + i * g->dim + half * (g->dim / 2),
                   rank / 2 * sizeof(float));
    for (int64_t head = 0; head < g->queries; head++)
        gemm((Member){0, 1}, end - begin, g->value, rank, w->qkv + (begin * g->queries + head) * rank, g->queries * rank, 1,
             layer_weights(g, w->layer)->latent_up + head * both + g->nope_dim, g->queries * both, 0,
             w->heads + (begin * g->queries + head) * g->value, g->queries * g->value, 0);
    pool_meet(member);
}

static void attend(void *task, Member member) {
    const Work *w = task;
    const Rollout *g = w->g;
    int64_t begin, end, mixed = mixed_width(g);
    norm_rows(w, member);
    if (g->latent_rank)
        make_latents(w, member);
    else
        multiply(g, member, g->first_matrix[w->layer] + QKV, 1, w->rows, w->width, g->hidden, w->normed, g->hidden, w->first,
                 0, w->qkv, w->width);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) keep_row(w, i);
    if (!w->second) return;
    pool_meet(member);
    attend_rows(w, member);
    if (g->latent_rank) make_values(w, member);
    multiply(g, member, g->first_matrix[w->layer] + OUT, g->leaves, w->rows, g->hidden, mixed,
             g->latent_rank ? w->heads : w->mixed, mixed, w->second, 0, w->delta, g->hidden);
}

static void mlp(void *task, Member member) {
    const Work *w = task;
    int64_t begin, end, hidden = w->g->hidden, inner = w->g->inner;
    norm_rows(w, member);
    multiply(w->g, member, w->g->first_matrix[w->layer] + GATE_UP, 1, w->rows, 2 * inner, hidden, w->normed, hidden, w->first, 0,
             w->qkv, 2 * inner);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) gate_row(w->qkv + 2 * i * inner, inner, w->qkv + 2 * i * inner);
    pool_meet(member);
    multiply(w->g, member, w->g->first_matrix[w->layer] + DOWN, w->g->leaves, w->rows, hidden, inner, w->qkv, 2 * inner, w->second, 0,
             w->delta, hidden);
}

/* What a layer's experts work on: p and scores of each row's slots, slots by expert, and what experts take and make. */
typedef struct {
    float *p, *scores, *taken, *both, *y;
    int32_t *routes, *order, *home, *counts;
} ExpertWork;

int64_t expert_floats(const Rollout *g, int64_t rows) {
    int64_t routed = rows * (g->experts + g->routed * (4 + 2 * g->hidden + 2 * g->expert_inner)) + g->experts;
    int64_t shared = rows * (2 * g->shared_inner + g->hidden);
    return routed > shared ? routed : shared;
}

static ExpertWork expert_work(const Work *w) {
    const Rollout *g = w->g;
    int64_t slots = w->rows * g->routed;
    ExpertWork s = {.p = w->qkv};
    s.scores = s.p + w->rows * g->experts;
    s.routes = (int32_t *)(s.scores + slots);
    s.order = s.routes + slots, s.home = s.order + slots, s.counts = s.home + slots;
    s.taken = (float *)(s.counts + g->experts);
    s.both = s.taken + slots * g->hidden;
    s.y = s.both + 2 * slots * g->expert_inner;
    return s;
}

/* Gives the routes of a row to the trainer, where they are wanted. */
static void keep_routes(const Work *w, int64_t row, const int32_t *routes) {
    const Rollout *g = w->g;
    int64_t a_token = g->expert_layers * g->routed;
    if (!g->routes_count) return;
    uint16_t *kept = w->own ? g->routes + (g->row_sample[row] * g->longest + w->own[row]) * a_token
                            : g->prompt_routes + row * a_token;
    for (int64_t k = 0; k < g->routed; k++) kept[g->expert_layer[w->layer] * g->routed + k] = (uint16_t)routes[k];
}

static void route_rows(const Work *w, const ExpertWork *s, Member member) {
    const Rollout *g = w->g;
    const Routing routing = {(int)g->is_sigmoid, (int)g->renormalises, (float)g->scaling, (int)g->groups, (int)g->groups_taken};
    const float *bias = layer_weights(g, w->layer)->router_bias;
    int64_t experts = g->experts, slots = g->routed, begin, end;
    share_out(member, w->rows, &begin, &end);
    expert_probabilities(end - begin, g->hidden, experts, w->normed + begin * g->hidden, w->router, routing,
                         s->p + begin * experts);
    for (int64_t i = begin; i < end; i++) {
        choose_row(s->p + i * experts, bias, experts, slots, routing, s->routes + i * slots, NULL);
        score_row(s->p + i * experts, s->routes + i * slots, slots, routing, s->scores + i * slots);
        keep_routes(w, i, s->routes + i * slots);
    }
    pool_meet(member);
}

/* The member's columns of c [slots, n] = a [slots, lda] times one of the two matrices of each slot's expert. */
static void expert_products(const Work *w, const int32_t *counts, Member member, int kind, int64_t n, int64_t k,
                            const float *a, int64_t lda, const float *weights, float *c) {
    const Rollout *g = w->g;
    for (int64_t e = 0; e < g->local_experts; e++, counts++) {
        int64_t matrix = g->first_matrix[w->layer] + kind + 2 * e;
        if (*counts) multiply(g, member, matrix, 1, *counts, n, k, a, lda, weights + e * n * k, 0, c, n);
        a += *counts * lda, c += *counts * n;
    }
    pool_meet(member);
}

/* Copies y to each slot's place, in `taken`, where ranks add to it: zeros where the expert is another one's. */
static void place_slots(const Work *w, const ExpertWork *s, Member member) {
    int64_t hidden = w->g->hidden, begin, end;
    share_out(member, w->rows * w->g->routed, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        if (s->home[i] < 0)
            memset(s->taken + i * hidden, 0, hidden * sizeof(float));
        else
            memcpy(s->taken + i * hidden, s->y + s->home[i] * hidden, hidden * sizeof(float));
        s->home[i] = (int32_t)i;
    }
}

/* Only chooses experts, for a layer whose results nobody needs. */
static void route(void *task, Member member) {
    const Work *w = task;
    const ExpertWork s = expert_work(w);
    norm_rows(w, member);
    route_rows(w, &s, member);
}

/* What this rank's experts make of the rows: in y, or of several ranks in `taken`. */
static void experts(void *task, Member member) {
    const Work *w = task;
    const Rollout *g = w->g;
    const ExpertWork s = expert_work(w);
    const int32_t *counts = s.counts + g->first_expert;
    int64_t begin, end, used = 0, hidden = g->hidden, inner = g->expert_inner;
    norm_rows(w, member);
    route_rows(w, &s, member);
    if (member.index == 0)
        sort_rows(w->rows * g->routed, g->experts, g->first_expert, g->local_experts, s.routes, s.order, s.counts, s.home);
    pool_meet(member);
    for (int64_t e = 0; e < g->local_experts; e++) used += counts[e];
    share_out(member, used, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        memcpy(s.taken + i * hidden, w->normed + s.order[i] / g->routed * hidden, hidden * sizeof(float));
    pool_meet(member);
    expert_products(w, counts, member, GATE_UP, 2 * inner, hidden, s.taken, hidden, w->first, s.both);
    for (int64_t i = begin; i < end; i++) gate_row(s.both + 2 * i * inner, inner, s.both + 2 * i * inner);
    pool_meet(member);
    expert_products(w, counts, member, DOWN, hidden, inner, s.both, 2 * inner, w->second, s.y);
    if (g->local_experts < g->experts) place_slots(w, &s, member);
}

/* Adds each row's slots in their order, as the trainer does. */
static void add_slots(void *task, Member member) {
    const Work *w = task;
    const ExpertWork s = expert_work(w);
    const float *made = w->g->local_experts < w->g->experts ? s.taken : s.y;
    int64_t hidden = w->g->hidden, slots = w->g->routed, begin, end;
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        sum_row_slots(made, s.home + i * slots, s.scores + i * slots, slots, hidden, w->delta + i * hidden);
}

/* Adds what the expert makes of the rows that all tokens pass. */
static void add_shared(void *task, Member member) {
    const Work *w = task;
    const Rollout *g = w->g;
    const LayerWeights *weights = layer_weights(g, w->layer);
    int64_t begin, end, hidden = g->hidden, inner = g->shared_inner, matrix = g->first_matrix[w->layer] + GATE_UP + 2 * g->local_experts;
    float *both = w->qkv, *made = both + 2 * w->rows * inner;
    multiply(g, member, matrix, 1, w->rows, 2 * inner, hidden, w->normed, hidden, weights->shared_gate_up, 0, both, 2 * inner);
    pool_meet(member);
    share_out(member, w->rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) gate_row(both + 2 * i * inner, inner, both + 2 * i * inner);
    pool_meet(member);
    multiply(g, member, matrix + 1, 1, w->rows, hidden, inner, both, 2 * inner, weights->shared_down, 0, made, hidden);
    pool_meet(member);
    for (int64_t i = begin * hidden; i < end * hidden; i++) w->delta[i] += made[i];
}

/* A slot is one rank's, so its sum over ranks is exact. */
static int run_experts(const Call *call, Work *w) {
    int status = run_products(call, experts, w);
    if (!status && w->g->local_experts < w->g->experts)
        status = sum_over_ranks(call, w->g->expert_group, expert_work(w).taken, w->rows * w->g->routed * w->g->hidden);
    if (!status) pool_run(add_slots, w);
    return status || !w->g->shared_inner ? status : run_products(call, add_shared, w);
}

/* The sum over ranks of what `part` of the layer adds. */
static int run_part(const Call *call, void (*part)(void *task, Member member), Work *w) {
    int status = run_products(call, part, w);
    return status ? status : sum_over_ranks(call, w->g->group, w->delta, w->rows * w->g->hidden);
}

int run_layer(const Call *call, const Rollout *g, int64_t layer, int is_prompt, int keeps_only, float *x, float *delta,
              int adds) {
    const LayerWeights *weights = layer_weights(g, layer);
    Work w;
    int status = work_of(call, g, layer, is_prompt, &w);
    if (status || !w.rows) return status;
    w.memory = scratch(call, pool_size() * w.member_floats);
    if (!w.memory) return KERNEL_OUT_OF_MEMORY;
    w.x = w.total = x, w.added = adds ? delta : NULL, w.delta = delta;
    /* The trainer asks for the experts of every token, also of those that only keys and values are needed of. */
    int routes_only = keeps_only && weights->router && g->routes_count;
    w.norm = weights->norm, w.first = weights->qkv, w.second = keeps_only && !routes_only ? NULL : weights->out;
    w.bias = weights->bias, w.q_norm = weights->q_norm, w.k_norm = weights->k_norm;
    if (!w.second) return run_products(call, attend, &w);
    if ((status = run_part(call, attend, &w))) return status;
    w.added = delta, w.added_bias = weights->out_bias, w.norm = weights->norm_mlp;
    w.first = weights->gate_up, w.second = weights->down, w.router = weights->router;
    if (routes_only) return run_products(call, route, &w);
    return w.router ? run_experts(call, &w) : run_part(call, mlp, &w);
}
