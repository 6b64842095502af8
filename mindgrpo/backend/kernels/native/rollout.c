/* See rollout.h: the generators of this process, and what their table holds. */
#include "rollout.h"

#include <stddef.h>

enum { MAX_ROLLOUTS = 1024 };

static Rollout *rollouts[MAX_ROLLOUTS];

/* x and what is added to it, normed rows, and then either what attention and MLP need or the rows' logits. */
static int64_t scratch_floats(const Rollout *g) {
    int64_t prompt_rows = g->prompt_rows + g->prompt_starts, rows = g->max_rows > prompt_rows ? g->max_rows : prompt_rows;
    int64_t mixed = g->queries * g->dim, inner = 2 * g->inner;
    int64_t attention = mixed + 2 * g->kv * g->dim + (mixed > g->hidden ? mixed : g->hidden);
    if (g->latent_rank) attention += query_width(g) + down_width(g);
    int64_t experts = g->experts ? expert_floats(g, rows) : 0, most = rows * (attention > inner ? attention : inner);
    int64_t layers = 3 * rows * g->hidden + (most > experts ? most : experts);
    int64_t head = g->max_rows * (3 * g->hidden + g->vocab_rows);
    return layers > head ? layers : head;
}

/* What Python needs to fill the table by name, in order and up to one without a name. */
typedef struct {
    const char *name, *type;
    int64_t is_array, offset;
} Field;

#define DESCRIBE_NUMBER(TYPE, NAME) {#NAME, #TYPE, 0, offsetof(Rollout, NAME)},
#define DESCRIBE_ARRAY(TYPE, NAME, LEAST) {#NAME, #TYPE, 1, offsetof(Rollout, NAME)},
const Field rollout_fields[] = {ROLLOUT_FIELDS(DESCRIBE_NUMBER, DESCRIBE_ARRAY){NULL, NULL, 0, sizeof(Rollout)}};

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

static int check_table(const Call *call, const Rollout *g) {
    if (g->itemsize != 2 && g->itemsize != 4)
        return refuse(call, "elements of %ld bytes", g->itemsize);
#define NO_CHECK(TYPE, NAME)
#define CHECK_ARRAY(TYPE, NAME, LEAST) \
    if (g->NAME##_count < (LEAST))     \
        return refuse(call, "%s has %ld elements, but needs %ld", #NAME, g->NAME##_count, (int64_t)(LEAST));
    ROLLOUT_FIELDS(NO_CHECK, CHECK_ARRAY)
    if (g->leaves < 1 || g->leaves > MOST_LEAVES || g->leaves & (g->leaves - 1) || g->inner % g->leaves || mixed_width(g) % g->leaves || g->vocab_leaves < 1 ||
        g->vocab_rows % g->vocab_leaves)
        return refuse(call, "%ld leaves of products and %ld of the vocabulary", g->leaves, g->vocab_leaves);
    if (g->first_expert < 0 || g->local_experts < 0 || g->first_expert + g->local_experts > g->experts ||
        g->routed < 0 || g->routed > g->experts || g->expert_layers > g->layers || g->groups < 1 || g->experts % g->groups ||
        g->groups_taken < 1 || g->groups_taken > g->groups)
        return refuse(call, "%ld experts from %ld on of %ld", g->local_experts, g->first_expert, g->experts);
    if (g->latent_rank && (g->latent_rank < 0 || g->query_rank < 0 || g->kv != 1 || g->dim != g->latent_rank + g->rope_dim ||
                           g->latent_rank % 2 || g->rope_dim % 2 || g->value > g->nope_dim + g->rope_dim))
        return refuse(call, "%ld heads of %ld for latents of %ld and %ld", g->kv, g->dim, g->latent_rank, g->rope_dim);
    if (g->slots > g->max_rows) return refuse(call, "%ld slots in %ld rows", g->slots, g->max_rows);
    if (g->num_rows < 0 || g->num_free < 0 || g->num_rows + g->num_free > g->slots)
        return refuse(call, "%ld rows and %ld free slots are not %ld", g->num_rows, g->num_free, g->slots);
    int64_t guessed = 0;
    for (int64_t i = 0; i < g->num_rows; i++) guessed += g->num_guessed[i];
    return guessed <= g->guessed_count ? 0 : refuse(call, "%ld tokens are guessed, but there are %ld", guessed, g->guessed_count);
}

Rollout *rollout_of(const Call *call, const int32_t *meta) {
    Rollout *g = meta[0] >= 0 && meta[0] < MAX_ROLLOUTS ? rollouts[meta[0]] : NULL;
    if (!g) refuse(call, "there is no generator %d", meta[0]);
    if (!g || check_table(call, g)) return NULL;
    const int64_t dims[][2] = {{'H', g->hidden},
                               {'I', g->inner},
                               {'D', g->dim},
                               {'V', g->vocab_rows},
                               {'E', g->experts},
                               {'X', g->local_experts},
                               {'J', g->expert_inner},
                               {'W', g->latent_rank ? down_width(g) : (g->queries + 2 * g->kv) * g->dim},
                               {'M', mixed_width(g)},
                               {'S', g->shared_inner},
                               {'C', g->latent_rank},
                               {'A', g->query_rank},
                               {'U', query_width(g)},
                               {'Z', g->queries * (g->nope_dim + g->value)}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        int64_t value = dim(call, dims[i][0]);
        if (value < 0 || value == dims[i][1]) continue;
        refuse(call, "%c is %ld, but generator %d has %ld", (char)dims[i][0], value, meta[0], dims[i][1]);
        return NULL;
    }
    for (int i = 0; i < call->num_params; i++)
        if (is_bf16(call, i) && (g->parts != 1 || g->itemsize != 2)) {
            refuse(call, "tensor %d is bfloat16, for products of %ld parts and elements of %ld bytes", i, g->parts,
                   g->itemsize);
            return NULL;
        }
    return g;
}

int run_products(const Call *call, void (*work)(void *task, Member member), void *task) {
    const char *why;
    pool_run(work, task);
    return product_failure(&why) ? refuse(call, "%s", why) : 0;
}

int check_ready(const Call *call, const Rollout *g) {
    int is_complete = token_weights(g)->norm != NULL;
    for (int64_t i = 0; i < g->layers; i++) {
        const LayerWeights *w = layer_weights(g, i);
        is_complete &= !w->latent_up == !g->latent_rank && !w->query_up == !g->query_rank && !w->query_norm == !g->query_rank;
        is_complete &= !w->shared_down == (!g->shared_inner || g->expert_layer[i] < 0);
        is_complete &= layer_weights(g, i)->norm && layer_weights(g, i)->down && !layer_weights(g, i)->router == (g->expert_layer[i] < 0);
    }
    if (!is_complete) return refuse(call, "the generator was not given all its weights");
    if (g->tp_size > 1 && g->group < 0) return refuse(call, "ranks share the model, but it knows no group of theirs");
    if (g->local_experts < g->experts && g->expert_group < 0)
        return refuse(call, "ranks share the experts, but it knows no group of theirs");
    return 0;
}
