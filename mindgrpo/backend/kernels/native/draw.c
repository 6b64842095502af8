/* Draws the next token of every row from logits that are split over ranks. See logits.h.
 *
 * All ranks decide alike on what was gathered: the threshold, and whose the token is. That rank takes the inverse of
 * the cumulative distribution in vocabulary order at the row's uniform number.
 */
#include "logits.h"

/* What was gathered for a row: `pieces` and `bins` [ways], each so many floats after the other. */
typedef struct {
    const float *pieces, *bins;
    int64_t next_pieces, next_bins, columns;
    float top;
    double mass;
} Gathered;

static Gathered gathered_of(const Rollout *g, int64_t row, const void *pieces, const int64_t *shape) {
    Gathered all = {.columns = shape[2], .next_pieces = shape[1] * shape[2], .top = -INFINITY};
    all.pieces = (const float *)pieces + row * shape[2];
    for (int64_t r = 0; r < g->ways; r++) {
        float top = all.pieces[r * all.next_pieces + TOP];
        all.top = top > all.top ? top : all.top;
    }
    for (int64_t r = 0; r < g->ways; r++) {
        const float *one = all.pieces + r * all.next_pieces;
        all.mass += (double)one[SUM] * fast_exp(one[TOP] - all.top);
    }
    return all;
}

static float share_of(const Gathered *all, int64_t rank) {
    return fast_exp(all->pieces[rank * all->next_pieces + TOP] - all->top);
}

/* What the search for top-p's threshold knows of a row: the mass above it on each rank, and its leading digits. */
static double *above_of(const Rollout *g, int64_t row) { return g->above + row * (g->ways + 1); }

static uint32_t prefix_of(const Rollout *g, int64_t row) { return above_of(g, row)[g->ways]; }

/* Finds digit `round` of the threshold: of the ranges with a mass, the lowest with less than top_p of it all above. */
static void settle_digit(const Rollout *g, int64_t row, const Gathered *all, int round) {
    double *above = above_of(g, row), total = 0.0;
    int64_t chosen = 0;
    if (round == 0) memset(above, 0, (g->ways + 1) * sizeof(double));
    const float *bins = round ? all->bins : all->pieces + FIRST;
    int64_t next = round ? all->next_bins : all->next_pieces;
    for (int64_t r = 0; r < g->ways; r++) total += above[r];
    for (int64_t bin = BINS - 1; bin >= 0 && total < g->top_p * all->mass; bin--) {
        double mass = 0.0;
        for (int64_t r = 0; r < g->ways; r++) mass += bins[r * next + bin] * (round ? 1.0f : share_of(all, r));
        if (mass > 0.0) chosen = bin;
        total += mass;
    }
    for (int64_t r = 0; r < g->ways; r++)
        for (int64_t bin = BINS - 1; bin > chosen; bin--)
            above[r] += bins[r * next + bin] * (round ? 1.0f : share_of(all, r));
    above[g->ways] = (double)(((uint64_t)prefix_of(g, row) << BITS) | chosen);
}

/* Inputs of a kernel: logits, gathered pieces, gathered answer of the narrowing before, and more. */
typedef struct {
    const Rollout *g;
    void **params;
    int64_t *const *shapes;
    int round;
    float *out, *memory;
    int64_t own_floats; /* of `memory` for each member */
} Task;

static float *memory_of(const Task *t, Member member) { return t->memory + member.index * t->own_floats; }

static Row task_row(const Task *t, int64_t i) { return row_of(t->g, i, t->params[0], t->shapes[0][1]); }

static Gathered task_gathered(const Task *t, int64_t i) {
    Gathered all = gathered_of(t->g, i, t->params[1], t->shapes[1]);
    all.bins = (const float *)t->params[2] + i * BINS;
    all.next_bins = t->shapes[1][1] * BINS;
    return all;
}

static void narrow(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        Gathered all = task_gathered(t, i);
        settle_digit(t->g, i, &all, t->round - 1);
        histogram(&row, t->round, prefix_of(t->g, i), all.top, t->out + i * BINS);
    }
}

/* Zeroes the answer [B, .] and runs `work` on the rows in use, if there is `any` to do. */
static int run_rows(const Call *call, const Rollout *g, const int32_t *meta, void (*work)(void *, Member), int any) {
    int last = call->num_params - 1;
    int64_t blocks = (g->vocab + BLOCK - 1) / BLOCK, least = FIRST + (g->top_k         ? g->candidates
                                                                      : has_nucleus(g) ? BINS
                                                                                       : 0);
    if (g->num_rows > dim(call, 'B') || g->vocab > dim(call, 'V') || dim(call, 'R') != g->ways ||
        dim(call, 'C') < least)
        return refuse(call, "B = %ld, V = %ld, R = %ld or C = %ld do not fit %ld rows of %ld tokens on %ld ranks",
                      dim(call, 'B'), dim(call, 'V'), dim(call, 'R'), dim(call, 'C'), g->num_rows, g->vocab, g->ways);
    Task t = {g, call->params, call->shapes, meta[1], call->params[last], NULL, 0};
    t.own_floats = padded(2 * blocks + g->ways * g->candidates + 1);
    t.memory = scratch(call, pool_size() * t.own_floats);
    if (!t.memory) return KERNEL_OUT_OF_MEMORY;
    memset(t.out, 0, dim(call, 'B') * call->shapes[last][1] * sizeof(float));
    if (g->num_rows && any) pool_run(work, &t);
    return 0;
}

/* Bins of this round; round 1 takes `pieces` for bins. meta: number, round. */
KERNEL(rollout_narrow, "logits f32[B, V], pieces f32[R, B, C], bins f32[R, B, A], meta i32[2] -> next f32[B, 256]") {
    const Rollout *g = rollout_of(call, call->params[3]);
    if (!g) return KERNEL_REFUSED;
    const int32_t *meta = call->params[3];
    if (meta[1] < 1 || meta[1] >= ROUNDS || (meta[1] > 1 && dim(call, 'A') != BINS))
        return refuse(call, "round %d of %ld bins", meta[1], dim(call, 'A'));
    /* A graph that narrows also serves rules that have nothing to narrow. */
    return run_rows(call, g, meta, narrow, has_nucleus(g));
}

/* The smallest logit that top-k and top-p keep; each rank's pieces hold all that can be among the k largest. */
static float best_threshold(const Rollout *g, const Gathered *all, float *values) {
    int64_t size = 0, count = 0;
    for (int64_t r = 0; r < g->ways; r++)
        for (int64_t i = 0; i < g->candidates; i++) {
            values[size] = all->pieces[r * all->next_pieces + FIRST + i];
            size += values[size] > -INFINITY;
        }
    if (!size) return -INFINITY;
    float least = select_largest(values, size, g->top_k < size ? g->top_k : size);
    if (g->top_p >= 1.0) return least;
    double mass = 0.0, above = 0.0, more = 0.0;
    for (int64_t i = 0; i < size; i++)
        if (values[i] >= least) values[count++] = values[i];
    for (int64_t r = 0; r < g->ways; r++) {
        const float *pieces = all->pieces + r * all->next_pieces;
        float smallest = INFINITY;
        for (int64_t i = 0; i < g->candidates; i++)
            smallest = pieces[FIRST + i] < smallest ? pieces[FIRST + i] : smallest;
        if (smallest == least) more += pieces[MORE];
    }
    for (int64_t i = 0; i < count; i++) mass += fast_exp(values[i] - all->top);
    mass += more * fast_exp(least - all->top);
    qsort(values, count, sizeof(float), descending);
    for (int64_t i = 0; i < count;) {
        int64_t first = i;
        if (above >= g->top_p * mass) return values[i - 1];
        for (; i < count && values[i] == values[first]; i++) above += fast_exp(values[i] - all->top);
    }
    return least;
}

/* The same for top-p alone; the digits that are not settled yet are found here, where one rank has all logits. */
static float nucleus_threshold(const Row *row, Gathered *all) {
    const Rollout *g = row->g;
    float bins[BINS];
    if (g->ways == 1) {
        all->bins = bins;
        for (int round = 0; round < ROUNDS - 1; round++) {
            settle_digit(g, row->number, all, round);
            histogram(row, round + 1, prefix_of(g, row->number), all->top, bins);
        }
    }
    settle_digit(g, row->number, all, ROUNDS - 1);
    return of_rank(prefix_of(g, row->number));
}

static float threshold_of(const Row *row, Gathered *all, int is_settled, float *memory) {
    const Rollout *g = row->g;
    float least = -INFINITY;
    if (g->top_k)
        least = best_threshold(g, all, memory);
    else if (g->top_p < 1.0)
        least = is_settled ? of_rank(prefix_of(g, row->number)) : nucleus_threshold(row, all);
    if (g->min_p > 0.0) least = fmaxf(least, all->top + logf(g->min_p));
    return least;
}

static double kept_mass(const Row *row, float threshold, float top) {
    float x[BLOCK];
    double total = 0.0;
    for (int64_t start = 0; start < row->g->vocab; start += BLOCK) {
        int64_t count = load(row, start, x);
        if (largest(x, count) >= threshold) total += mass_above(x, count, threshold, top);
    }
    return total;
}

static void give_shares(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        Gathered all = task_gathered(t, i);
        t->out[i] = kept_mass(&row, threshold_of(&row, &all, 0, memory_of(t, member)), all.top);
    }
}

/* The mass of what is kept on this rank, for rules whose pieces do not tell it. meta: number, 0. */
KERNEL(rollout_shares, "logits f32[B, V], pieces f32[R, B, C], bins f32[R, B, A], meta i32[2] -> shares f32[B, 1]") {
    const Rollout *g = rollout_of(call, call->params[3]);
    if (!g) return KERNEL_REFUSED;
    if (g->ways > 1 && has_nucleus(g) && dim(call, 'A') != BINS) return refuse(call, "%ld bins", dim(call, 'A'));
    return run_rows(call, g, call->params[3], give_shares, 1);
}

/* The mass of what is kept on each rank. */
static double kept_on(const Row *row, const Gathered *all, float threshold, int64_t rank) {
    const Rollout *g = row->g;
    const float *pieces = all->pieces + rank * all->next_pieces;
    if (!g->top_k && g->top_p >= 1.0) return (double)pieces[SUM] * share_of(all, rank);
    if (!g->top_k)
        return above_of(g, row->number)[rank] +
               all->bins[rank * all->next_bins + (prefix_of(g, row->number) & (BINS - 1))];
    double sum = 0.0;
    float smallest = INFINITY;
    for (int64_t i = 0; i < g->candidates; i++) {
        float x = pieces[FIRST + i];
        smallest = x < smallest ? x : smallest;
        if (x >= threshold) sum += fast_exp(x - all->top);
    }
    return smallest >= threshold ? sum + pieces[MORE] * fast_exp(smallest - all->top) : sum;
}

/* The first kept token whose cumulative mass, after `begin` on the ranks before, exceeds the row's share of `total`;
 * rounding may leave none, then it is the last one with any. -1 without any. Alone, a rank knows the total best. */
static int64_t token_at(const Row *row, float threshold, float top, double uniform, double begin, double total,
                        double *masses) {
    int64_t vocab = row->g->vocab, blocks = (vocab + BLOCK - 1) / BLOCK, chosen = -1, last = -1;
    double own = 0.0, sum = 0.0, before = 0.0;
    float x[BLOCK];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t count = load(row, b * BLOCK, x);
        masses[b] = largest(x, count) >= threshold ? mass_above(x, count, threshold, top) : 0.0;
        own += masses[b];
    }
    double aim = uniform * (row->g->ways == 1 ? own : total) - begin;
    for (int64_t b = 0; b < blocks && sum <= aim; b++) {
        if (masses[b] <= 0.0) continue;
        chosen = b;
        before = sum;
        sum += masses[b];
    }
    if (chosen < 0) return -1;
    int64_t count = load(row, chosen * BLOCK, x);
    for (int64_t i = 0; i < count && before <= aim; i++) {
        float one = x[i] < threshold ? 0.0f : fast_exp(x[i] - top);
        if (one > 0.0f) last = i;
        before += one;
    }
    return last < 0 ? -1 : chosen * BLOCK + last;
}

/* Log of the sum of the plain distribution's masses. */
static float plain_log_sum(const Rollout *g, const Gathered *all) {
    float top = -INFINITY;
    double sum = 0.0;
    for (int64_t r = 0; r < g->ways; r++) top = fmaxf(top, all->pieces[r * all->next_pieces + RAW_TOP]);
    for (int64_t r = 0; r < g->ways; r++) {
        const float *pieces = all->pieces + r * all->next_pieces;
        sum += (double)pieces[RAW_SUM] * fast_exp(pieces[RAW_TOP] - top);
    }
    return top + logf(sum);
}

/* (embedding, token, log-prob), zero on all ranks but the token's. `shares` [ways], `next` floats apart, or NULL. */
static void draw_row(const Row *row, Gathered *all, const float *shares, int64_t next, const float *table, float *out,
                     float *memory) {
    const Rollout *g = row->g;
    float threshold = g->greedy ? all->top : threshold_of(row, all, shares != NULL, memory);
    double uniform = g->greedy ? 0.0 : g->uniforms[g->row_sample[row->number] * g->longest + row->at];
    double kept[g->ways], total = 0.0, begin = 0.0, sum = 0.0;
    int64_t owner = 0;
    for (int64_t r = 0; r < g->ways && g->ways > 1; r++) {
        float top = all->pieces[r * all->next_pieces + TOP];
        kept[r] = g->greedy ? top >= all->top : shares ? shares[r * next] : kept_on(row, all, threshold, r);
        total += kept[r];
    }
    for (int64_t r = 0; r < g->ways && g->ways > 1 && sum <= uniform * total; r++) {
        if (kept[r] <= 0.0) continue;
        owner = r;
        begin = sum;
        sum += kept[r];
    }
    memset(out, 0, (g->hidden + 2) * sizeof(float));
    if (owner != g->index) return;
    int64_t token = token_at(row, threshold, all->top, uniform, begin, total, (double *)memory);
    int64_t known = token < 0 ? 0 : token;
    memcpy(out, table + known * g->hidden, g->hidden * sizeof(float));
    out[g->hidden] = g->first_token + known;
    /* Logits that are no numbers must show. */
    out[g->hidden + 1] = token < 0 ? NAN : row->logits[token] * (float)g->scale - plain_log_sum(g, all);
}

static void draw(void *task, Member member) {
    const Task *t = task;
    int64_t begin, end, capacity = t->shapes[1][1], has_shares = t->shapes[2][2] == 1;
    share_out(member, t->g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        Row row = task_row(t, i);
        Gathered all = task_gathered(t, i);
        const float *shares = has_shares ? (const float *)t->params[2] + i : NULL;
        draw_row(&row, &all, shares, capacity, t->params[3], t->out + i * (t->g->hidden + 2), memory_of(t, member));
    }
}

/* `answer`: the last bins or shares, or the pieces where nothing was narrowed. meta: number, 0. */
KERNEL(rollout_draw,
       "logits f32[B, V], pieces f32[R, B, C], answer f32[R, B, A], table f32[V, H], meta i32[2] "
       "-> drawn f32[B, E]") {
    const Rollout *g = rollout_of(call, call->params[4]);
    if (!g) return KERNEL_REFUSED;
    if (dim(call, 'E') != g->hidden + 2) return refuse(call, "E is %ld for H + 2", dim(call, 'E'));
    if (g->ways > 1 && has_nucleus(g) && dim(call, 'A') != BINS && dim(call, 'A') != 1)
        return refuse(call, "%ld bins", dim(call, 'A'));
    return run_rows(call, g, call->params[4], draw, 1);
}
