/* log_probs.c from the head's input: the product with the table, the log-probabilities and their gradient in one.
 *
 * Logits are made of a block of the vocabulary and a stretch of rows at a time and never all, as in arXiv:2411.09009; so
 * a block of the table is packed once for a stretch, and its gradient written once. Members take blocks in turn.
 */
#include "bf16_gemm.h"
#include "kernel.h"
#include "log_prob_rows.h"

enum { STRETCH_ROWS = 2048 };
static const Member ALONE = {0, 1};

typedef struct {
    int64_t rows, hidden, vocab, first_token, real, leaves, block, stretch;
    Summation sum;
    int is_bf16;
    float scale;
    const float *x, *total, *entropy, *dlogp, *dentropy;
    const char *table;
    const int32_t *labels;
    RowStats *stats, *of_block; /* `of_block` [blocks, stretch] */
    float *dx, *dtable, *packed_x;
    /* Of each member: logits, a packed factor, a product, and its share of the gradient. */
    float *memory;
    int64_t logits_floats, packed_floats, product_floats, own_floats;
} Task;

typedef struct {
    float *logits, *packed, *product, *gradient;
} Own;

static Own own_of(const Task *t, int member) {
    float *logits = t->memory + member * t->own_floats, *packed = logits + t->logits_floats;
    float *product = packed + t->packed_floats;
    return (Own){logits, packed, product, product + t->product_floats};
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Packed for products with the block's rows, or with their transpose. */
static void pack_block(const Task *t, int64_t start, int64_t width, int turned, float *packed) {
    const char *from = t->table + start * t->hidden * (t->is_bf16 ? sizeof(uint16_t) : sizeof(float));
    if (turned)
        pack_matrix(ALONE, t->hidden, width, from, t->is_bf16, 1, t->hidden, t->sum, packed);
    else
        pack_matrix(ALONE, width, t->hidden, from, t->is_bf16, t->hidden, 1, t->sum, packed);
}

static void make_logits(const Task *t, int64_t row, int64_t rows, int64_t start, int64_t width, Own own) {
    pack_block(t, start, width, 1, own.packed);
    bf16_gemm(ALONE, rows, width, t->hidden, t->x + row * t->hidden, t->hidden, 1, t->sum, own.packed, own.logits, width);
}

static inline int64_t real_of(const Task *t, int64_t start, int64_t width) {
    return t->real < start ? 0 : least(t->real - start, width);
}

/* Blocks that a leaf of the vocabulary is made in. */
static int64_t blocks_of_leaf(const Task *t) {
    return (t->vocab / t->leaves + STATS_COLUMNS - 1) / STATS_COLUMNS;
}

static void forward(void *task, Member member) {
    const Task *t = task;
    Own own = own_of(t, member.index);
    int64_t leaf = t->vocab / t->leaves, of_leaf = blocks_of_leaf(t);
    for (int64_t row = 0, begin, end; row < t->rows; row += t->stretch) {
        int64_t rows = least(t->rows - row, t->stretch);
        for (int64_t b = member.index; b < t->leaves * of_leaf; b += member.size) {
            int64_t from = b % of_leaf * STATS_COLUMNS, start = b / of_leaf * leaf + from;
            int64_t width = least(leaf - from, STATS_COLUMNS), real = real_of(t, start, width);
            make_logits(t, row, rows, start, width, own);
            for (int64_t i = 0; i < rows; i++)
                t->of_block[b * t->stretch + i] = stats_of_columns(
                    own.logits + i * width, real, t->scale, (int64_t)t->labels[row + i] - t->first_token - start);
        }
        pool_meet(member);
        share_out(member, rows * t->leaves, &begin, &end);
        for (int64_t i = begin; i < end; i++) {
            RowStats stats = NO_STATS, *first = t->of_block + i % t->leaves * of_leaf * t->stretch + i / t->leaves;
            for (int64_t b = 0; b < of_leaf; b++)
                if (real_of(t, i % t->leaves * leaf + b * STATS_COLUMNS, 1) > 0)
                    stats = merge_stats(stats, first[b * t->stretch]);
            t->stats[row * t->leaves + i] = stats;
        }
        pool_meet(member);
    }
}

static void add(const float *x, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] += x[i];
}

static void backward_block(const Task *t, int64_t row, int64_t rows, int64_t start, Own own) {
    int64_t width = least(t->vocab - start, t->block), real = real_of(t, start, width), hidden = t->hidden;
    make_logits(t, row, rows, start, width, own);
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = row + i;
        RowGradient of_row = {t->total[at], t->entropy[at], t->dlogp[at], t->dentropy[at]};
        grad_of_row(own.logits + i * width, width, real, t->scale, of_row,
                    (int64_t)t->labels[at] - t->first_token - start, own.logits + i * width);
    }
    pack_block(t, start, width, 0, own.packed);
    bf16_gemm(ALONE, rows, hidden, width, own.logits, width, 1, t->sum, own.packed, own.product, hidden);
    add(own.product, rows * hidden, own.gradient);
    if (!t->dtable) return;
    float *dtable = t->dtable + start * hidden, *target = row ? own.product : dtable;
    bf16_gemm(ALONE, width, hidden, rows, own.logits, 1, width, t->sum, t->packed_x, target, hidden);
    if (row) add(target, width * hidden, dtable);
}

static void backward(void *task, Member member) {
    const Task *t = task;
    Own own = own_of(t, member.index);
    for (int64_t row = 0, begin, end; row < t->rows; row += t->stretch) {
        int64_t rows = least(t->rows - row, t->stretch), hidden = t->hidden;
        const float *x = t->x + row * hidden;
        if (t->dtable) pack_matrix(member, rows, hidden, x, 0, hidden, 1, t->sum, t->packed_x);
        memset(own.gradient, 0, rows * hidden * sizeof(float));
        pool_meet(member);
        for (int64_t start = member.index * t->block; start < t->vocab; start += member.size * t->block)
            backward_block(t, row, rows, start, own);
        pool_meet(member);
        share_out(member, rows * hidden, &begin, &end);
        float *dx = t->dx + row * hidden + begin;
        memset(dx, 0, (end - begin) * sizeof(float));
        for (int m = 0; m < member.size; m++) add(own_of(t, m).gradient + begin, end - begin, dx);
        pool_meet(member);
    }
}

/* Floats for a packed B [k, n], in whole vectors; below 0 where oneDNN fails. */
static int64_t packed_floats(int64_t k, int64_t n, Summation sum) {
    int64_t bytes = packed_matrix_bytes(k, n, sum);
    return bytes < 0 ? -1 : padded(bytes / sizeof(float) + 1);
}

/* What both kernels begin with. `gradient` floats a row are kept by each member. */
static int read_inputs(const Call *call, Task *t, const int32_t *parts, int64_t leaves, int64_t gradient) {
    const int32_t *sizes = call->params[3];
    *t = (Task){dim(call, 'N'), dim(call, 'H'), dim(call, 'V'), sizes[0], sizes[1], leaves};
    t->block = least(t->vocab, STATS_COLUMNS), t->stretch = least(t->rows, STRETCH_ROWS);
    t->sum = (Summation){*parts, 1}, t->is_bf16 = is_bf16(call, 1), t->scale = *(const float *)call->params[4];
    t->x = call->params[0], t->table = call->params[1], t->labels = call->params[2];
    if (t->real < 0 || t->real > t->vocab) return refuse(call, "%ld of %ld columns cannot be tokens", t->real, t->vocab);
    if (*parts < 1 || *parts > MOST_PARTS) return refuse(call, "%d parts: there are 1 to %d", *parts, MOST_PARTS);
    if (t->vocab % leaves) return refuse(call, "%ld columns are not %ld equal stretches", t->vocab, leaves);
    if (!t->rows) return 0;
    int64_t straight = packed_floats(t->block, t->hidden, t->sum), turned = packed_floats(t->hidden, t->block, t->sum);
    int64_t packed_x = packed_floats(t->stretch, t->hidden, t->sum);
    const char *why;
    if (straight < 0 || turned < 0 || packed_x < 0)
        return product_failure(&why) ? refuse(call, "%s", why) : KERNEL_REFUSED;
    t->logits_floats = padded(t->stretch * t->block), t->packed_floats = straight > turned ? straight : turned;
    t->product_floats = padded((t->stretch > t->block ? t->stretch : t->block) * t->hidden);
    t->own_floats = t->logits_floats + t->packed_floats + t->product_floats + padded(t->stretch * gradient);
    int64_t of_block = padded(leaves * blocks_of_leaf(t) * t->stretch * (int64_t)(sizeof(RowStats) / sizeof(float)));
    t->memory = scratch(call, pool_size() * t->own_floats + packed_x + of_block);
    if (!t->memory) return KERNEL_OUT_OF_MEMORY;
    t->packed_x = t->memory + pool_size() * t->own_floats;
    t->of_block = (RowStats *)(t->packed_x + packed_x);
    return 0;
}

static int run(const Call *call, void (*work)(void *task, Member member), Task *t) {
    const char *why;
    pool_run(work, t);
    return product_failure(&why) ? refuse(call, "%s", why) : 0;
}

/* stats: as log_prob_stats, of the logits x table^T */
KERNEL(linear_log_prob_stats,
       "x f32[N, H], table f32|bf16[V, H], labels i32[N], sizes i32[2], scale f32[1], parts i32[1] "
       "-> stats f32[N, 4L]") {
    Task t;
    int status = read_inputs(call, &t, call->params[5], dim(call, 'L'), 0);
    if (status) return status;
    t.stats = call->params[6];
    return run(call, forward, &t);
}

/* `total` is the log-sum-exp; a table that is not trained needs no gradient */
KERNEL(linear_log_prob_grad,
       "x f32[N, H], table f32|bf16[V, H], labels i32[N], sizes i32[2], scale f32[1], parts i32[1], total f32[N], "
       "entropy f32[N], dlogp f32[N], dentropy f32[N] -> dx f32[N, H], dtable f32[V, H]?") {
    Task t;
    void **p = call->params;
    int status = read_inputs(call, &t, p[5], 1, dim(call, 'H'));
    if (status) return status;
    t.total = p[6], t.entropy = p[7], t.dlogp = p[8], t.dentropy = p[9], t.dx = p[10], t.dtable = optional(call, 11);
    if (!t.rows && t.dtable) memset(t.dtable, 0, t.vocab * t.hidden * sizeof(float));
    return run(call, backward, &t);
}
