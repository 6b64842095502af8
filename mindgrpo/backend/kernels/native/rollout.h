/* What the generator's kernels share: one table a generator, which Python fills by name and registers.
 *
 * A slot holds the keys and values that one sample has made; a prefix those of a prompt, which all samples of the
 * prompt read. Rows are what is computed: the slots in use, in order, then what is known or guessed to follow in them; or
 * the tokens of prompts. Python calls the kernels of generate.c, a few tokens of every slot at a time. They are no
 * graph's: MindSpore takes longer to start a kernel than a small layer takes, and seconds to compile a graph of many.
 */
#ifndef MINDGRPO_ROLLOUT_H
#define MINDGRPO_ROLLOUT_H

#include "bf16_gemm.h"
#include "gemm.h"
#include "kernel.h"
#include "thread_pool.h"
#include "vec16.h"

/* The table's fields: NUMBER(type, name), and ARRAY(type, name, least), which also makes name_count, its number of
 * elements. Every call of a kernel checks that an array has at least as many as the numbers of table `g` say. */
#define ROLLOUT_FIELDS(NUMBER, ARRAY)                                                                            \
    /* this rank's share of the model */                                                                         \
    NUMBER(int64_t, layers) NUMBER(int64_t, hidden) NUMBER(int64_t, inner) NUMBER(int64_t, queries)              \
    NUMBER(int64_t, kv) NUMBER(int64_t, dim) NUMBER(double, eps) NUMBER(double, score_scale) ARRAY(float, rotary, 2 * g->dim)                \
    /* experts: of all ranks, this one's, the group with the others, how many a token goes to; how their scores are made \
     * (experts.h); each layer's number among those with experts, -1 for the others */                               \
    NUMBER(int64_t, experts) NUMBER(int64_t, first_expert) NUMBER(int64_t, local_experts)                             \
    NUMBER(int64_t, expert_group) NUMBER(int64_t, routed)                                                             \
    NUMBER(int64_t, expert_inner) NUMBER(int64_t, is_sigmoid) NUMBER(int64_t, renormalises) NUMBER(double, scaling)   \
    NUMBER(int64_t, groups) NUMBER(int64_t, groups_taken)                                                             \
    NUMBER(int64_t, expert_layers) ARRAY(int32_t, expert_layer, g->layers) NUMBER(int64_t, shared_inner)              \
    /* latent attention: widths of the latent that is cached, which is 0 without it, and of the queries' one, 0 where these \
     * are made of hidden states; of a head without and with positions, and of one of values */                       \
    NUMBER(int64_t, latent_rank) NUMBER(int64_t, query_rank) NUMBER(int64_t, nope_dim) NUMBER(int64_t, rope_dim)          \
    NUMBER(int64_t, value) NUMBER(int64_t, is_interleaved) NUMBER(double, latent_eps)                                 \
    NUMBER(int64_t, vocab) NUMBER(int64_t, vocab_rows) NUMBER(int64_t, first_token)                                   \
    NUMBER(int64_t, tp_size) NUMBER(int64_t, tp_rank)                                                                 \
    /* leaves of sums over ranks: of row-parallel products (gemm.h), and of the vocabulary */                        \
    NUMBER(int64_t, leaves) NUMBER(int64_t, vocab_leaves)                                                            \
    /* the ranks that share it, by their number in collective.h; -1 for none */                                      \
    NUMBER(int64_t, group)                                                                                           \
    /* where its weights lie (LayerWeights for each layer, then TokenWeights), of `itemsize` bytes an element */        \
    NUMBER(int64_t, itemsize) ARRAY(int64_t, weights, WEIGHTS * g->layers + TOKEN_WEIGHTS)                             \
    /* how tokens are drawn; what top-p knows of a row; a byte for each token that a slot has seen */            \
    NUMBER(int64_t, greedy) NUMBER(int64_t, top_k) NUMBER(int64_t, candidates) NUMBER(int64_t, min_tokens)       \
    NUMBER(double, scale) NUMBER(double, penalty) NUMBER(double, top_p) NUMBER(double, min_p)                    \
    ARRAY(int32_t, stops, 0) ARRAY(double, above, 2 * g->max_rows)                                               \
    ARRAY(uint8_t, seen, g->penalty == 1.0 ? 0 : g->slots * g->vocab)                                            \
    /* matrices packed for products of `parts` bfloat16 products, where there are any: bytes, and where each begins */ \
    NUMBER(int64_t, parts) NUMBER(int64_t, head_parts) ARRAY(uint8_t, packed, 0) ARRAY(int64_t, first_matrix, g->layers + 1)                   \
    ARRAY(int64_t, packed_at, g->parts ? g->first_matrix[g->layers] + 1 : 0)                                       \
    /* keys and values: rooms in positions; what kernels need while they run */                                  \
    NUMBER(int64_t, slots) NUMBER(int64_t, slot_size) NUMBER(int64_t, prefix_block_size)                                \
    NUMBER(int64_t, layer_elements)                                                                              \
    ARRAY(uint8_t, cache, g->layers * g->layer_elements * g->itemsize)                                           \
    ARRAY(float, scratch, scratch_floats(g)) ARRAY(float, stats, stats_floats(g))                                \
    /* the job, by sample: `longest` columns in each of its [samples, longest] arrays */                         \
    NUMBER(int64_t, longest) ARRAY(int32_t, limit, 0) ARRAY(int32_t, prompt_tokens, 0)                           \
    ARRAY(int64_t, prompt_at, g->limit_count) ARRAY(int32_t, prompt_length, g->limit_count)                      \
    ARRAY(uint64_t, keys, g->limit_count) ARRAY(int32_t, tokens, g->limit_count * g->longest)                    \
    ARRAY(float, logps, g->limit_count * g->longest) ARRAY(int32_t, lengths, g->limit_count)                     \
    ARRAY(int32_t, stopped, g->limit_count)                                                                      \
    /* columns before the first one that is drawn hold tokens that are there already; where each sample's keys are */ \
    ARRAY(int32_t, first_drawn, g->limit_count) ARRAY(int32_t, sample_slot, g->limit_count)                      \
    ARRAY(int32_t, sample_prefix, g->limit_count)                                                                \
    /* the queue, whose prompts are in prefix blocks, and first inputs of prefix blocks */                                   \
    NUMBER(int64_t, queue_head) NUMBER(int64_t, queue_tail) ARRAY(int32_t, queue_sample, g->queue_tail)          \
    ARRAY(int32_t, queue_prefix, g->queue_tail) ARRAY(int32_t, users, 0)                                          \
    ARRAY(float, starts, g->users_count * g->hidden)                                                             \
    /* rows in use, of at most `max_rows`, and their next inputs; free slots */                                  \
    NUMBER(int64_t, max_rows)                                                                                     \
    NUMBER(int64_t, num_rows) NUMBER(int64_t, steps) NUMBER(int64_t, row_steps) NUMBER(int64_t, num_free)        \
    ARRAY(int32_t, free_slots, g->slots) ARRAY(float, next, g->max_rows * g->hidden)                                \
    ARRAY(int32_t, row_sample, g->max_rows) ARRAY(int32_t, row_slot, g->max_rows)                                \
    ARRAY(int32_t, row_prefix, g->max_rows) ARRAY(int32_t, row_shared, g->max_rows)                              \
    ARRAY(int32_t, row_own, g->max_rows)                                                                         \
    /* how many tokens are guessed of each row, and all of these; how many rows are ahead of each row's token, and each  \
     * one's input; guesses that were computed, and that were right */                                             \
    ARRAY(int32_t, num_guessed, g->max_rows) ARRAY(int32_t, guessed, 0) ARRAY(int32_t, num_ahead, g->max_rows)       \
    ARRAY(int32_t, row_token, g->max_rows) NUMBER(int64_t, drafted) NUMBER(int64_t, accepted)                     \
    /* by slot, the next input of a sample that has ended and may go on; none where nothing goes on */              \
    ARRAY(float, parked, g->parked_count ? g->slots * g->hidden : 0)                                             \
    /* experts of each token that was computed [tokens, layers with experts, experts a token]; none where nobody asks: by  \
     * sample and own key, and those of the last call's rows of prompts */                                            \
    ARRAY(uint16_t, routes, 0) ARRAY(uint16_t, prompt_routes, g->routes_count ? g->prompt_rows * g->expert_layers * g->routed : 0) \
    /* tokens of prompts: prefix and number of keys seen, the own included; prefix blocks of first inputs */            \
    NUMBER(int64_t, prompt_rows) NUMBER(int64_t, prompt_starts) ARRAY(int32_t, prompt_row_prefix, g->prompt_rows) \
    ARRAY(int32_t, prompt_row_seen, g->prompt_rows) ARRAY(int32_t, start_prefix, g->prompt_starts)                 \
    /* of models that see images: rotary angles of the tokens of prompts, and features that stand for those below 0, one  \
     * after another; what is added to the positions behind the prompt of each prefix block */                          \
    ARRAY(float, prompt_angles, g->prompt_angles_count ? 2 * g->dim * g->prompt_rows : 0)                             \
    ARRAY(float, prompt_features, 0) ARRAY(int32_t, prefix_shift, g->users_count)

/* A layer's matrices, counted from first_matrix; the last two are there for each of its experts, and again for the one that
 * all tokens pass. At the end of a layer's comes what makes queries of their latents. After all layers' comes the head's. */
enum { QKV, OUT, GATE_UP, DOWN };

#define DECLARE_NUMBER(TYPE, NAME) TYPE NAME;
#define DECLARE_ARRAY(TYPE, NAME, LEAST) \
    TYPE *NAME;                          \
    int64_t NAME##_count;
typedef struct {
    ROLLOUT_FIELDS(DECLARE_NUMBER, DECLARE_ARRAY)
} Rollout;

typedef struct {
    const float *norm, *qkv, *bias, *q_norm, *k_norm, *out, *out_bias, *norm_mlp, *gate_up, *down, *router,
        *router_bias, *shared_gate_up, *shared_down, *latent_norm, *query_norm, *query_up, *latent_up;
} LayerWeights;

/* Of LayerWeights, those that every layer has or may have. */
enum { OF_ALL_LAYERS = 10 };

typedef struct {
    const float *norm, *head;
    const void *table;
} TokenWeights;

enum { WEIGHTS = sizeof(LayerWeights) / sizeof(int64_t), TOKEN_WEIGHTS = sizeof(TokenWeights) / sizeof(int64_t) };

/* Of latent attention: all heads of queries, what latents are made with them, all heads of values. */
static inline int64_t query_width(const Rollout *g) { return g->queries * (g->nope_dim + g->rope_dim); }
static inline int64_t down_width(const Rollout *g) {
    return (g->query_rank ? g->query_rank : query_width(g)) + g->latent_rank + g->rope_dim;
}

/* What a layer's last product of attention reads. */
static inline int64_t mixed_width(const Rollout *g) { return g->queries * (g->latent_rank ? g->value : g->dim); }

static inline LayerWeights *layer_weights(const Rollout *g, int64_t layer) {
    return (LayerWeights *)(g->weights + WEIGHTS * layer);
}

static inline TokenWeights *token_weights(const Rollout *g) {
    return (TokenWeights *)(g->weights + WEIGHTS * g->layers);
}

/* The table whose number `meta` begins with. NULL, and a sentence kept, where there is none, where it does not hold
 * what its numbers say, or where the call's letters are not the table's: H hidden, I inner, D head dim, V rows of the
 * vocabulary, W and M the widths of the projection and of what attention mixes. */
Rollout *rollout_of(const Call *call, const int32_t *meta);

/* 0 if the table has all weights, and a group where ranks share the model. */
int check_ready(const Call *call, const Rollout *g);

/* -- the parts of a token, in their order; 0 is success ---------------------------------------------------------- */

/* x [rows, hidden] += `delta`, if `adds`, and what attention adds; `delta`: what the MLP adds. With `keeps_only`, for the
 * last layer of prompts, keys and values are kept, and experts where these are asked for; x and `delta` mean nothing after. */
int run_layer(const Call *call, const Rollout *g, int64_t layer, int is_prompt, int keeps_only, float *x, float *delta,
              int adds);

/* Floats that a layer with experts needs for so many rows, beside their hidden states. */
int64_t expert_floats(const Rollout *g, int64_t rows);

/* `drawn` [rows, hidden + 2], the same on all ranks: embedding, token and log-prob of the next token of every row. Writes
 * to the scratch behind x and `delta`, which is NULL where there are no layers. */
int draw_tokens(const Call *call, const Rollout *g, const float *x, const float *delta, float **drawn);

/* Elements of `stats` that draw_tokens needs. */
int64_t stats_floats(const Rollout *g);

/* Rows for as many samples of the queue as there are free slots. */
void admit(Rollout *g);

/* Adds rows for tokens that follow in slots: those that are known, else those that are guessed. Each draws what its slot's
 * row would draw there, if its input is right. */
int look_ahead(const Call *call, Rollout *g, int64_t samples);

/* What the first rows, those of `samples`, have drawn becomes their tokens and next inputs, and what rows ahead of them
 * have, as far as these began with the right token; whose sample has ended makes room for the next. */
void commit(Rollout *g, int64_t samples, const float *drawn);

/* The row of the embeddings; zero for a token that is not this rank's. */
static inline void embed_token(const Rollout *g, int64_t token, float *row) {
    int64_t at = token - g->first_token, size = g->hidden;
    const TokenWeights *w = token_weights(g);
    if (at < 0 || at >= g->vocab)
        memset(row, 0, size * sizeof(float));
    else if (g->itemsize == sizeof(float))
        memcpy(row, (const float *)w->table + at * size, size * sizeof(float));
    else
        widen((const uint16_t *)w->table + at * size, size, row);
}

/* The member's share of y [m, n] = x [m, k] w, summed in `leaves`: w [k, n], or [n, k] where `turned`, is matrix number
 * `matrix`. */
static inline void multiply(const Rollout *g, Member member, int64_t matrix, int64_t leaves, int64_t m, int64_t n,
                            int64_t k, const float *x, int64_t ldx, const float *w, int turned, float *y, int64_t ldy) {
    Summation sum = {matrix == g->first_matrix[g->layers] ? g->head_parts : g->parts, leaves};
    if (g->parts)
        bf16_gemm(member, m, n, k, x, ldx, 1, sum, g->packed + g->packed_at[matrix], y, ldy);
    else if (sum.leaves == 1)
        gemm(member, m, n, k, x, ldx, 1, w, turned ? k : n, turned, y, ldy, 0);
    else if (gemm_tree(member, m, n, k, sum.leaves, x, ldx, w, n, y, ldy))
        product_failed("no memory for a panel of a product");
}

/* Runs `work` in all members. 0 if all its products went well. */
int run_products(const Call *call, void (*work)(void *task, Member member), void *task);

/* Head by head: keys [dim, room], so that scores are sums of rows, and values [room, dim]; float, or bfloat16 where an
 * element of the cache has two bytes. */
typedef struct {
    void *keys, *values;
    int64_t room;
} Region;

static inline Region region_at(const Rollout *g, int64_t layer, int64_t position, int64_t room) {
    uint8_t *base = g->cache + (layer * g->layer_elements + position * g->kv * g->dim) * g->itemsize;
    return (Region){base, base + g->layer_elements / 2 * g->itemsize, room};
}

static inline Region slot_region(const Rollout *g, int64_t layer, int64_t slot) {
    return region_at(g, layer, slot * g->slot_size, g->slot_size);
}

static inline Region prefix_region(const Rollout *g, int64_t layer, int64_t prefix) {
    return region_at(g, layer, g->slots * g->slot_size + prefix * g->prefix_block_size, g->prefix_block_size);
}

/* Element `at` of keys or values becomes `x`. */
static inline void keep(const Rollout *g, void *cached, int64_t at, float x) {
    if (g->itemsize == sizeof(float))
        ((float *)cached)[at] = x;
    else
        ((uint16_t *)cached)[at] = to_bf16(x);
}

/* A matrix of the cache [rows, columns] from element `at` on, `ld` from one row to the next, as floats: where it is, or
 * in `room`, and then `ld` is `columns`. */
static inline const float *cached_floats(const Rollout *g, const void *cached, int64_t at, int64_t rows,
                                         int64_t columns, int64_t *ld, float *room) {
    if (g->itemsize == sizeof(float)) return (const float *)cached + at;
    for (int64_t i = 0; i < rows; i++)
        widen((const uint16_t *)cached + at + i * *ld, columns, room + i * columns);
    *ld = columns;
    return room;
}

#endif
