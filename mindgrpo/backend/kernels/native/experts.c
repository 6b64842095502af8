/* A mixture of experts: the router's scores, the choice, rows sorted by expert, and the experts' gated MLPs. See experts.h.
 *
 * Rows lie by expert, `counts` of each; those behind them are zeros. A row's numbers do not depend on the rows beside it. */
#include "experts.h"

#include "bf16_gemm.h"
#include "gemm.h"
#include "kernel.h"
#include "rows.h"

/* Rows that a member chooses experts for at a time, and the fewest that a weight's gradient is a sum over (below). */
enum { CHOSEN_ROWS = 64, LEAST_SUMMED = 64 };

/* Of shapes.py: the score of an expert that is never chosen. */
#define NEVER -1e30f

/* -- the router ------------------------------------------------------------------------------------------------ */

/* Of tensor `routing`. */
static Routing routing_of(const float *numbers) {
    return (Routing){numbers[0] != 0.0f, numbers[1] != 0.0f, numbers[2], (int)numbers[3], (int)numbers[4]};
}

void expert_probabilities(int64_t rows, int64_t hidden, int64_t experts, const float *x, const float *w, Routing routing,
                          float *p) {
    gemm_alone(rows, experts, hidden, x, hidden, 1, w, experts, p, experts, 0);
    for (int64_t i = 0; i < rows; i++, p += experts) {
        if (routing.is_sigmoid) {
            for (int64_t e = 0; e < experts; e++) p[e] = 1.0f / (1.0f + fast_exp(-p[e]));
            continue;
        }
        float top = largest(p, experts), sum = 0.0f;
        for (int64_t e = 0; e < experts; e++) p[e] = fast_exp(p[e] - top);
        for (int64_t e = 0; e < experts; e++) sum += p[e];
        for (int64_t e = 0; e < experts; e++) p[e] /= sum;
    }
}

/* The best of p that comes behind number `before` in falling order, -1 for none; of all where `before` is -1. */
static int64_t next_best(const float *p, int64_t count, int64_t before) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; e++) {
        int is_behind = before < 0 || p[e] < p[before] || (p[e] == p[before] && e > before);
        if (is_behind && (best < 0 || p[e] > p[best])) best = e;
    }
    return best;
}

/* Lowers p [E] to NEVER in groups that are not taken. */
static void leave_best_groups(float *p, int64_t experts, Routing routing) {
    int64_t size = experts / routing.groups, best = -1;
    float sums[routing.groups];
    int is_taken[routing.groups];
    for (int64_t i = 0; i < routing.groups; i++) {
        int64_t first = next_best(p + i * size, size, -1), second = next_best(p + i * size, size, first);
        sums[i] = p[i * size + first] + (second < 0 ? 0.0f : p[i * size + second]);
        is_taken[i] = 0;
    }
    for (int64_t k = 0; k < routing.groups_taken; k++)
        if ((best = next_best(sums, routing.groups, best)) >= 0) is_taken[best] = 1; /* none where all are no numbers */
    for (int64_t e = 0; e < experts; e++)
        if (!is_taken[e / size]) p[e] = NEVER;
}

void choose_row(const float *p, const float *bias, int64_t experts, int64_t slots, Routing routing, int32_t *topk_ids,
                float *margin) {
    float own[experts];
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) own[e] = p[e] + (bias ? bias[e] : 0.0f);
    if (routing.groups_taken < routing.groups) leave_best_groups(own, experts, routing);
    for (int64_t k = 0; k < slots; k++) topk_ids[k] = (int32_t)(best = next_best(own, experts, best));
    if (!margin) return;
    int64_t other = next_best(own, experts, best);
    *margin = best < 0 ? NAN : own[best] - (other < 0 ? NEVER : own[other]);
}

float score_divisor(const float *p, const int32_t *topk_ids, int64_t slots, Routing routing) {
    float sum = 0.0f;
    for (int64_t k = 0; k < slots; k++)
        if (topk_ids[k] >= 0) sum += p[topk_ids[k]];
    return routing.renormalises && sum > 0.0f ? sum : 1.0f;
}

void score_row(const float *p, const int32_t *topk_ids, int64_t slots, Routing routing, float *scores) {
    float sum = score_divisor(p, topk_ids, slots, routing);
    for (int64_t k = 0; k < slots; k++) scores[k] = topk_ids[k] < 0 ? 0.0f : p[topk_ids[k]] / sum * routing.scaling;
}

static int check_routes(const Call *call, int index) {
    const int32_t *topk_ids = call->params[index];
    for (int64_t i = 0; i < dim(call, 'N') * dim(call, 'K'); i++)
        if (topk_ids[i] < -1 || topk_ids[i] >= dim(call, 'E'))
            return refuse(call, "slot %ld has expert %d of %ld", i, topk_ids[i], dim(call, 'E'));
    return 0;
}

static void score_rows(const Call *call, int64_t begin, int64_t end) {
    int64_t hidden = dim(call, 'H'), experts = dim(call, 'E'), slots = dim(call, 'K');
    const float *x = call->params[0], *w = call->params[1];
    const int32_t *topk_ids = call->params[2];
    Routing routing = routing_of(call->params[3]);
    float *scores = call->params[4], *p = call->params[5];
    expert_probabilities(end - begin, hidden, experts, x + begin * hidden, w, routing, p + begin * experts);
    for (int64_t i = begin; i < end; i++)
        score_row(p + i * experts, topk_ids + i * slots, slots, routing, scores + i * slots);
}

/* scores of each token's experts, from the p of all */
KERNEL(router, "x f32[N, H], w f32[H, E], topk_ids i32[N, K], routing f32[5] -> scores f32[N, K], p f32[N, E]") {
    return check_routes(call, 2) ? KERNEL_REFUSED : over_rows(call, score_rows);
}

typedef struct {
    const Call *call;
    float *dlogits; /* [N, E] */
} RouterGrad;

static void router_back(void *task, Member member) {
    const RouterGrad *t = task;
    const Call *call = t->call;
    int64_t n = dim(call, 'N'), hidden = dim(call, 'H'), experts = dim(call, 'E'), slots = dim(call, 'K'), begin, end;
    const float *x = call->params[0], *w = call->params[1], *p = call->params[4], *dscores = call->params[5];
    const int32_t *topk_ids = call->params[2];
    Routing routing = routing_of(call->params[3]);
    float *dx = call->params[6], *dw = call->params[7];
    share_out(member, n, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const float *own = p + i * experts, *d = dscores + i * slots;
        const int32_t *at = topk_ids + i * slots;
        float *dp = t->dlogits + i * experts, sum = score_divisor(own, at, slots, routing), mean = 0.0f;
        memset(dp, 0, experts * sizeof(float));
        for (int64_t k = 0; k < slots && routing.renormalises; k++)
            if (at[k] >= 0) mean += d[k] * own[at[k]] / sum;
        for (int64_t k = 0; k < slots; k++)
            if (at[k] >= 0) dp[at[k]] += (d[k] - mean) / sum * routing.scaling;
        mean = 0.0f;
        for (int64_t e = 0; e < experts && !routing.is_sigmoid; e++) mean += dp[e] * own[e];
        for (int64_t e = 0; e < experts; e++)
            dp[e] = routing.is_sigmoid ? dp[e] * own[e] * (1.0f - own[e]) : own[e] * (dp[e] - mean);
    }
    gemm((Member){0, 1}, end - begin, hidden, experts, t->dlogits + begin * experts, experts, 1, w, experts, 1,
         dx + begin * hidden, hidden, 0);
    pool_meet(member);
    share_out(member, hidden, &begin, &end);
    gemm_alone(end - begin, experts, n, x + begin, 1, hidden, t->dlogits, experts, dw + begin * experts, experts, 0);
}

KERNEL(router_grad,
       "x f32[N, H], w f32[H, E], topk_ids i32[N, K], routing f32[5], p f32[N, E], dscores f32[N, K] "
       "-> dx f32[N, H], dw f32[H, E]") {
    RouterGrad t = {call, scratch(call, dim(call, 'N') * dim(call, 'E') + 1)};
    if (!t.dlogits) return KERNEL_OUT_OF_MEMORY;
    if (check_routes(call, 2)) return KERNEL_REFUSED;
    pool_run(router_back, &t);
    return 0;
}

typedef struct {
    const Call *call;
    float *p; /* [members, CHOSEN_ROWS, E] */
} Choice;

static void choose(void *task, Member member) {
    const Choice *t = task;
    const Call *call = t->call;
    int64_t hidden = dim(call, 'H'), experts = dim(call, 'E'), slots = dim(call, 'K'), begin, end;
    const float *x = call->params[0], *w = call->params[1], *bias = optional(call, 2);
    const Routing routing = routing_of(call->params[3]);
    float *own = t->p + member.index * CHOSEN_ROWS * experts, *margins = call->params[5];
    int32_t *topk_ids = call->params[4];
    share_out(member, dim(call, 'N'), &begin, &end);
    for (int64_t start = begin; start < end; start += CHOSEN_ROWS) {
        int64_t rows = end - start < CHOSEN_ROWS ? end - start : CHOSEN_ROWS;
        expert_probabilities(rows, hidden, experts, x + start * hidden, w, routing, own);
        for (int64_t i = 0; i < rows; i++)
            choose_row(own + i * experts, bias, experts, slots, routing, topk_ids + (start + i) * slots, margins + start + i);
    }
}

/* The experts of each token and its margin, as choose_row has them. */
KERNEL(choose_experts,
       "x f32[N, H], w f32[H, E], bias f32[E]?, routing f32[5] -> topk_ids i32[N, K], margins f32[N]") {
    const Routing routing = routing_of(call->params[3]);
    int64_t experts = dim(call, 'E'), slots = dim(call, 'K');
    if (routing.groups < 1 || experts % routing.groups || routing.groups_taken < 1 || routing.groups_taken > routing.groups)
        return refuse(call, "%d of %d groups of %ld experts", routing.groups_taken, routing.groups, experts);
    if (slots > experts / routing.groups * routing.groups_taken)
        return refuse(call, "%ld of %ld experts", slots, experts / routing.groups * routing.groups_taken);
    Choice t = {call, scratch(call, pool_size() * CHOSEN_ROWS * dim(call, 'E'))};
    if (!t.p) return KERNEL_OUT_OF_MEMORY;
    pool_run(choose, &t);
    return 0;
}

/* -- slots and rows -------------------------------------------------------------------------------------------- */

void sort_rows(int64_t slots, int64_t experts, int64_t first, int64_t count, const int32_t *topk_ids, int32_t *order,
               int32_t *counts, int32_t *home) {
    int32_t next[experts], sum = 0;
    memset(counts, 0, experts * sizeof *counts);
    for (int64_t i = 0; i < slots; i++)
        if (topk_ids[i] >= 0) counts[topk_ids[i]]++;
    for (int64_t e = 0; e < experts; e++) {
        int is_own = e >= first && e < first + count;
        next[e] = is_own ? sum : -1;
        sum += is_own ? counts[e] : 0;
    }
    for (int64_t i = 0; i < slots; i++) {
        home[i] = topk_ids[i] < 0 || next[topk_ids[i]] < 0 ? -1 : next[topk_ids[i]]++;
        if (home[i] >= 0) order[home[i]] = (int32_t)i;
    }
    for (int64_t i = sum; i < slots; i++) order[i] = -1;
}

KERNEL(sort_slots, "topk_ids i32[N, K] -> order i32[NK], counts i32[E], home i32[N, K]") {
    int64_t slots = dim(call, 'N') * dim(call, 'K'), experts = dim(call, 'E');
    if (check_routes(call, 0)) return KERNEL_REFUSED;
    sort_rows(slots, experts, 0, experts, call->params[0], call->params[1], call->params[2], call->params[3]);
    return 0;
}

/* Whether tensors `order` [S] and `home` [N, K] name slots and rows that there are, and each other. */
static int check_slots(const Call *call, int order_index, int home_index) {
    const int32_t *order = call->params[order_index], *home = call->params[home_index];
    int64_t slots = dim(call, 'N') * dim(call, 'K'), rows = dim(call, 'S');
    for (int64_t i = 0; i < rows; i++)
        if (order[i] < -1 || order[i] >= slots || (order[i] >= 0 && home[order[i]] != i))
            return refuse(call, "row %ld is of slot %d of %ld, which is not its", i, order[i], slots);
    for (int64_t i = 0; i < slots; i++)
        if (home[i] < -1 || home[i] >= rows || (home[i] >= 0 && order[home[i]] != i))
            return refuse(call, "slot %ld has row %d of %ld, which is not its", i, home[i], rows);
    return 0;
}

static void take(void *task, Member member) {
    const Call *call = task;
    const float *x = call->params[0];
    const int32_t *order = call->params[1];
    float *y = call->params[3];
    int64_t width = dim(call, 'H'), slots = dim(call, 'K'), begin, end;
    share_out(member, dim(call, 'S'), &begin, &end);
    for (int64_t i = begin; i < end; i++)
        if (order[i] < 0)
            memset(y + i * width, 0, width * sizeof(float));
        else
            memcpy(y + i * width, x + order[i] / slots * width, width * sizeof(float));
}

KERNEL(take_rows, "x f32[N, H], order i32[S], home i32[N, K] -> y f32[S, H]") {
    if (check_slots(call, 1, 2)) return KERNEL_REFUSED;
    pool_run(take, call);
    return 0;
}

void sum_row_slots(const float *y, const int32_t *home, const float *scores, int64_t slots, int64_t width, float *out) {
    memset(out, 0, width * sizeof(float));
    for (int64_t k = 0; k < slots; k++) {
        if (home[k] < 0) continue;
        const float *row = y + home[k] * width;
        float score = scores ? scores[k] : 1.0f;
        for (int64_t j = 0; j < width; j++) out[j] += score * row[j];
    }
}

static void sum_slots(void *task, Member member) {
    const Call *call = task;
    const float *y = call->params[0], *scores = optional(call, 1);
    const int32_t *home = call->params[3];
    float *out = call->params[4];
    int64_t width = dim(call, 'H'), slots = dim(call, 'K'), begin, end;
    share_out(member, dim(call, 'N'), &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const float *own = scores ? scores + i * slots : NULL;
        sum_row_slots(y, home + i * slots, own, slots, width, out + i * width);
    }
}

/* Each token's rows, times their scores, in the order of its slots; without scores their sum. */
KERNEL(weighted_sum, "y f32[S, H], scores f32[N, K]?, order i32[S], home i32[N, K] -> out f32[N, H]") {
    if (check_slots(call, 2, 3)) return KERNEL_REFUSED;
    pool_run(sum_slots, call);
    return 0;
}

static void sum_back(void *task, Member member) {
    const Call *call = task;
    const float *y = call->params[0], *scores = call->params[1], *dout = call->params[4];
    const int32_t *order = call->params[2], *home = call->params[3];
    float *dy = call->params[5], *dscores = call->params[6];
    int64_t width = dim(call, 'H'), slots = dim(call, 'K'), begin, end;
    share_out(member, dim(call, 'S'), &begin, &end);
    for (int64_t i = begin; i < end; i++)
        if (order[i] < 0) memset(dy + i * width, 0, width * sizeof(float));
    share_out(member, dim(call, 'N') * slots, &begin, &end);
    for (int64_t at = begin; at < end; at++) {
        const float *d = dout + at / slots * width, *own = y + home[at] * width;
        float *to = dy + home[at] * width, sum = 0.0f;
        if (home[at] >= 0) {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < width; j++) sum += own[j] * d[j];
            for (int64_t j = 0; j < width; j++) to[j] = scores[at] * d[j];
        }
        dscores[at] = sum;
    }
}

KERNEL(weighted_sum_grad,
       "y f32[S, H], scores f32[N, K], order i32[S], home i32[N, K], dout f32[N, H] "
       "-> dy f32[S, H], dscores f32[N, K]") {
    if (check_slots(call, 2, 3)) return KERNEL_REFUSED;
    pool_run(sum_back, call);
    return 0;
}

/* -- the experts ----------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, used, hidden, inner, experts, most; /* `most` rows an expert has, `used` all together */
    const int32_t *counts;
    Summation sum;
    int is_bf16[2];
    const float *x, *dy, *both;
    const void *gate_up, *down;
    float *made, *y, *dx, *dgate_up, *ddown;
    /* [S, I], [S, I], [S, 2I]; then what a product's factors are copied to. */
    float *act, *dact, *dboth, *padded_a, *padded_b;
    char *packed;
    int64_t packed_bytes;
} Experts;

/* c [S, n] = a [S, k] B by expert: B [E, k, n], or the transpose of [E, n, k] where `turned`. Members meet behind it. */
static void expert_products(const Experts *t, Member member, int64_t n, int64_t k, const float *a, const void *b,
                            int is_bf16, int turned, float *c) {
    int64_t bytes = n * k * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
    const char *own = b;
    for (int64_t e = 0, buffer = 0; e < t->experts; own += bytes, a += t->counts[e] * k, c += t->counts[e] * n, e++) {
        if (!t->counts[e]) continue;
        if (!t->sum.parts) {
            gemm(member, t->counts[e], n, k, a, k, 1, (const float *)own, turned ? k : n, turned, c, n, 0);
            continue;
        }
        /* Of two buffers, so that one is packed while others still multiply with the other. */
        char *packed = t->packed + buffer * t->packed_bytes;
        buffer = !buffer;
        pack_matrix(member, k, n, own, is_bf16, turned ? 1 : n, turned ? k : 1, t->sum, packed);
        pool_meet(member);
        bf16_gemm(member, t->counts[e], n, k, a, k, 1, t->sum, packed, c, n);
    }
    pool_meet(member);
}

/* How many rows a gradient in parts is a sum over, zeros among them: of a few numbers, as oneDNN makes a product for each. */
static int64_t summed_rows(int64_t rows) {
    int64_t size = LEAST_SUMMED;
    while (size < rows) size = size & (size - 1) ? size / 3 * 4 : size / 2 * 3;
    return size;
}

/* `rows` rows of x, then zeros: the member's share. */
static void pad_rows(Member member, int64_t rows, int64_t size, int64_t width, const float *x, float *to) {
    int64_t begin, end;
    share_out(member, size, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        if (i < rows)
            memcpy(to + i * width, x + i * width, width * sizeof(float));
        else
            memset(to + i * width, 0, width * sizeof(float));
}

/* c [E, m, n] = a [S, m]^T d [S, n] by expert: zeros where one has no rows. Members meet behind it. */
static void expert_gradients(const Experts *t, Member member, int64_t m, int64_t n, const float *a, const float *d, float *c) {
    for (int64_t e = 0; e < t->experts; a += t->counts[e] * m, d += t->counts[e] * n, c += m * n, e++) {
        int64_t rows = t->counts[e], size = summed_rows(rows), begin, end;
        if (!rows) {
            share_out(member, m * n, &begin, &end);
            memset(c + begin, 0, (end - begin) * sizeof(float));
        } else if (!t->sum.parts) {
            gemm(member, m, n, rows, a, 1, m, d, n, 0, c, n, 0);
        } else {
            pad_rows(member, rows, size, m, a, t->padded_a);
            pad_rows(member, rows, size, n, d, t->padded_b);
            pool_meet(member);
            pack_matrix(member, size, n, t->padded_b, 0, n, 1, t->sum, t->packed);
            pool_meet(member);
            bf16_gemm(member, m, n, size, t->padded_a, 1, m, t->sum, t->packed, c, n);
            pool_meet(member);
        }
    }
    pool_meet(member);
}

static void forward(void *task, Member member) {
    const Experts *t = task;
    int64_t hidden = t->hidden, inner = t->inner, begin, end;
    expert_products(t, member, 2 * inner, hidden, t->x, t->gate_up, t->is_bf16[0], 0, t->made);
    share_out(member, t->used, &begin, &end);
    for (int64_t i = begin; i < end; i++) gate_row(t->made + 2 * i * inner, inner, t->act + i * inner);
    pool_meet(member);
    expert_products(t, member, hidden, inner, t->act, t->down, t->is_bf16[1], 0, t->y);
}

static void backward(void *task, Member member) {
    const Experts *t = task;
    int64_t hidden = t->hidden, inner = t->inner, begin, end;
    expert_products(t, member, inner, hidden, t->dy, t->down, t->is_bf16[1], 1, t->dact);
    share_out(member, t->used, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        gate_row(t->both + 2 * i * inner, inner, t->act + i * inner);
        gate_row_grad(t->both + 2 * i * inner, t->dact + i * inner, inner, t->dboth + 2 * i * inner);
    }
    pool_meet(member);
    expert_gradients(t, member, inner, hidden, t->act, t->dy, t->ddown);
    expert_gradients(t, member, hidden, 2 * inner, t->x, t->dboth, t->dgate_up);
    expert_products(t, member, hidden, 2 * inner, t->dboth, t->gate_up, t->is_bf16[0], 1, t->dx);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Reads how many rows each expert has, and how products with its matrices are summed; 0 where they can be. */
static int read_rows(const Call *call, Experts *t, const int32_t *counts, int parts) {
    int64_t rows = dim(call, 'S'), used = 0, most = 0;
    t->rows = rows, t->experts = dim(call, 'E'), t->counts = counts, t->sum = (Summation){parts, 1};
    if (parts < 0 || parts > MOST_PARTS) return refuse(call, "%d parts: there are 0 to %d", parts, MOST_PARTS);
    if (!parts && (t->is_bf16[0] || t->is_bf16[1])) return refuse(call, "products in float32 take no bfloat16");
    for (int64_t e = 0; e < t->experts; used += counts[e], most = larger(most, counts[e]), e++)
        if (counts[e] < 0 || counts[e] > rows - used)
            return refuse(call, "expert %ld has %d rows behind %ld of %ld", e, counts[e], used, rows);
    t->used = used, t->most = most;
    return 0;
}

/* Counts the bytes of the largest of `count` second factors, whose depth and columns these are; 0 where it can. */
static int measure_packed(const Call *call, Experts *t, const int64_t factors[][2], int count) {
    int64_t bytes = 0;
    const char *why;
    for (int i = 0; i < count && t->sum.parts; i++) {
        int64_t own = packed_matrix_bytes(factors[i][0], factors[i][1], t->sum);
        if (own < 0) return product_failure(&why) ? refuse(call, "%s", why) : KERNEL_REFUSED;
        bytes = larger(bytes, own);
    }
    t->packed_bytes = padded(bytes / sizeof(float) + 1) * sizeof(float);
    return 0;
}

/* Reads what both kernels are given, and takes the memory that they need; 0 where it can. */
static int prepare(const Call *call, Experts *t, int parts, int has_gradients) {
    int64_t hidden = dim(call, 'H'), inner = dim(call, 'I');
    *t = (Experts){.hidden = hidden, .inner = inner, .x = call->params[0], .gate_up = call->params[2], .down = call->params[3]};
    t->is_bf16[0] = is_bf16(call, 2), t->is_bf16[1] = is_bf16(call, 3);
    int status = read_rows(call, t, call->params[1], parts);
    if (status) return status;
    int64_t used = t->used, size = parts ? summed_rows(t->most) : 0;
    const int64_t factors[][2] = {{hidden, 2 * inner}, {inner, hidden}, {hidden, inner}, {2 * inner, hidden},
                                  {size, hidden}, {size, 2 * inner}};
    status = measure_packed(call, t, factors + (has_gradients ? 2 : 0), has_gradients ? 4 : 2);
    if (status) return status;
    int64_t of_packed = 2 * t->packed_bytes / sizeof(float), act = padded(used * inner), wide = larger(hidden, 2 * inner);
    int64_t gradients = has_gradients ? act + padded(2 * used * inner) + 2 * padded(size * wide) : 0;
    float *memory = scratch(call, of_packed + act + gradients + VEC);
    if (!memory) return KERNEL_OUT_OF_MEMORY;
    t->packed = (char *)memory, t->act = memory + of_packed, t->dact = t->act + act, t->dboth = t->dact + act;
    t->padded_a = t->dboth + padded(2 * used * inner), t->padded_b = t->padded_a + padded(size * wide);
    return 0;
}

/* `made` has rows of `width` numbers, those behind all experts' zeros; NULL where it has none. */
static int run(const Call *call, void (*work)(void *task, Member member), Experts *t, float *made, int64_t width) {
    const char *why;
    pool_run(work, t);
    if (made) memset(made + t->used * width, 0, (t->rows - t->used) * width * sizeof(float));
    return product_failure(&why) ? refuse(call, "%s", why) : 0;
}

/* y = (silu(x gate) * (x up)) down of each row's expert; `both`, gate then up, is kept for the gradient. */
KERNEL(expert_mlp,
       "x f32[S, H], counts i32[E], gate_up f32|bf16[E, H, 2I], down f32|bf16[E, I, H], parts i32[1] "
       "-> y f32[S, H], both f32[S, 2I]") {
    Experts t;
    int status = prepare(call, &t, *(const int32_t *)call->params[4], 0);
    if (status) return status;
    t.y = call->params[5], t.made = call->params[6];
    memset(t.made + 2 * t.used * t.inner, 0, 2 * (t.rows - t.used) * t.inner * sizeof(float));
    return run(call, forward, &t, t.y, t.hidden);
}

KERNEL(expert_mlp_grad,
       "x f32[S, H], counts i32[E], gate_up f32|bf16[E, H, 2I], down f32|bf16[E, I, H], parts i32[1], both f32[S, 2I], "
       "dy f32[S, H] -> dx f32[S, H], dgate_up f32[E, H, 2I], ddown f32[E, I, H]") {
    Experts t;
    int status = prepare(call, &t, *(const int32_t *)call->params[4], 1);
    if (status) return status;
    t.both = call->params[5], t.dy = call->params[6], t.dx = call->params[7];
    t.dgate_up = call->params[8], t.ddown = call->params[9];
    return run(call, backward, &t, t.dx, t.hidden);
}

/* -- one product by expert: matrices [hidden, inner], `gate_up` of the task ------------------------------------------- */

static void multiply(void *task, Member member) {
    const Experts *t = task;
    expert_products(t, member, t->inner, t->hidden, t->x, t->gate_up, t->is_bf16[0], 0, t->y);
}

static void multiply_back(void *task, Member member) {
    const Experts *t = task;
    expert_products(t, member, t->hidden, t->inner, t->dy, t->gate_up, t->is_bf16[0], 1, t->dx);
}

static void multiply_gradient(void *task, Member member) {
    const Experts *t = task;
    expert_gradients(t, member, t->hidden, t->inner, t->x, t->dy, t->dgate_up);
}

/* The matrices of a product are tensor 1, where they are not its result (`is_gradient`). */
static int prepare_product(const Call *call, Experts *t, int is_gradient) {
    int64_t depth = dim(call, 'K'), columns = dim(call, 'M');
    *t = (Experts){.hidden = depth, .inner = columns};
    if (!is_gradient) t->gate_up = call->params[1], t->is_bf16[0] = is_bf16(call, 1);
    int status = read_rows(call, t, call->params[2], *(const int32_t *)call->params[3]);
    if (status) return status;
    int64_t size = is_gradient && t->sum.parts ? summed_rows(t->most) : 0;
    const int64_t factors[][2] = {{depth, columns}, {columns, depth}, {size, columns}};
    status = measure_packed(call, t, factors + (is_gradient ? 2 : 0), is_gradient ? 1 : 2);
    if (status) return status;
    int64_t of_packed = 2 * t->packed_bytes / sizeof(float);
    float *memory = scratch(call, of_packed + padded(size * depth) + padded(size * columns) + VEC);
    if (!memory) return KERNEL_OUT_OF_MEMORY;
    t->packed = (char *)memory, t->padded_a = memory + of_packed, t->padded_b = t->padded_a + padded(size * depth);
    return 0;
}

/* y = x w of each row's expert */
KERNEL(expert_product, "x f32[S, K], w f32|bf16[E, K, M], counts i32[E], parts i32[1] -> y f32[S, M]") {
    Experts t;
    int status = prepare_product(call, &t, 0);
    if (status) return status;
    t.x = call->params[0], t.y = call->params[4];
    return run(call, multiply, &t, t.y, t.inner);
}

KERNEL(expert_product_back, "dy f32[S, M], w f32|bf16[E, K, M], counts i32[E], parts i32[1] -> dx f32[S, K]") {
    Experts t;
    int status = prepare_product(call, &t, 0);
    if (status) return status;
    t.dy = call->params[0], t.dx = call->params[4];
    return run(call, multiply_back, &t, t.dx, t.hidden);
}

KERNEL(expert_product_gradient, "x f32[S, K], dy f32[S, M], counts i32[E], parts i32[1] -> dw f32[E, K, M]") {
    Experts t;
    int status = prepare_product(call, &t, 1);
    if (status) return status;
    t.x = call->params[0], t.dy = call->params[1], t.dgate_up = call->params[4];
    return run(call, multiply_gradient, &t, NULL, 0);
}
