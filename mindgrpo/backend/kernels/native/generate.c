/* The kernels of a generator that Python calls: weights, prompts, and tokens for every slot. See rollout.h. */
#include "collective.h"
#include "rollout.h"

/* The tensors are the first of LayerWeights', in its order, and are read where they lie until others are given. meta:
 * number, layer. */
KERNEL(rollout_layer_weights,
       "norm f32[H], qkv f32|bf16[H, W], bias f32[W]?, q_norm f32[D]?, k_norm f32[D]?, out f32|bf16[M, H], "
       "out_bias f32[H]?, norm_mlp f32[H], gate_up f32|bf16[H, 2I]?, down f32|bf16[I, H]?, meta i32[2]") {
    const int32_t *meta = call->params[10];
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    if (meta[1] < 0 || meta[1] >= g->layers) return refuse(call, "there is no layer %d", meta[1]);
    const float *w[WEIGHTS] = {NULL};
    for (int i = 0; i < OF_ALL_LAYERS; i++) w[i] = optional(call, i);
    if (!w[3] != !w[4]) return refuse(call, "one norm of queries and keys is missing");
    if ((!w[8] || !w[9]) != (g->expert_layer[meta[1]] >= 0))
        return refuse(call, "layer %d has either an MLP or experts", meta[1]);
    memcpy(layer_weights(g, meta[1]), w, sizeof w);
    return 0;
}

/* The same of a layer's router, what it adds for the choice, and this rank's X experts, once the layer has its other weights. */
KERNEL(rollout_expert_weights,
       "router f32[H, E], bias f32[E]?, gate_up f32|bf16[X, H, 2J], down f32|bf16[X, J, H], meta i32[2]") {
    const int32_t *meta = call->params[4];
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    if (meta[1] < 0 || meta[1] >= g->layers || g->expert_layer[meta[1]] < 0)
        return refuse(call, "layer %d has no experts", meta[1]);
    LayerWeights *w = layer_weights(g, meta[1]);
    w->router = call->params[0], w->router_bias = optional(call, 1);
    w->gate_up = call->params[2], w->down = call->params[3];
    return 0;
}

/* The same of the expert that all tokens pass, which every rank has. */
KERNEL(rollout_shared_weights, "gate_up f32|bf16[H, 2S], down f32|bf16[S, H], meta i32[2]") {
    const int32_t *meta = call->params[2];
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    if (meta[1] < 0 || meta[1] >= g->layers || g->expert_layer[meta[1]] < 0)
        return refuse(call, "layer %d has no experts", meta[1]);
    layer_weights(g, meta[1])->shared_gate_up = call->params[0], layer_weights(g, meta[1])->shared_down = call->params[1];
    return 0;
}

/* The same of a layer's latents: their norms, and what makes queries, and keys and values, of them. */
KERNEL(rollout_latent_weights,
       "latent_norm f32[C], query_norm f32[A]?, query_up f32|bf16[A, U]?, latent_up f32[C, Z], meta i32[2]") {
    const int32_t *meta = call->params[4];
    const Rollout *g = rollout_of(call, meta);
    if (!g) return KERNEL_REFUSED;
    if (meta[1] < 0 || meta[1] >= g->layers || !g->latent_rank) return refuse(call, "layer %d has no latents", meta[1]);
    LayerWeights *w = layer_weights(g, meta[1]);
    w->latent_norm = call->params[0], w->query_norm = optional(call, 1), w->query_up = optional(call, 2);
    w->latent_up = call->params[3];
    return 0;
}

KERNEL(rollout_token_weights,
       "norm f32[H], head f32|bf16[V, H], table f32|bf16[V, H], number i32[1]") {
    const Rollout *g = rollout_of(call, call->params[3]);
    if (!g) return KERNEL_REFUSED;
    if (g->vocab > g->vocab_rows) return refuse(call, "%ld tokens in %ld rows", g->vocab, g->vocab_rows);
    if (is_bf16(call, 2) != (g->itemsize == 2))
        return refuse(call, "embeddings are not of %ld bytes an element, as the table says", g->itemsize);
    *token_weights(g) = (TokenWeights){call->params[0], call->params[1], call->params[2]};
    return 0;
}

/* Tokens of prompts for keys and values in prefix blocks, then such as are first inputs of their samples. */
KERNEL(rollout_prompts, "tokens i32[N], number i32[1]") {
    const int32_t *tokens = call->params[0];
    const Rollout *g = rollout_of(call, call->params[1]);
    if (!g || check_ready(call, g)) return KERNEL_REFUSED;
    int64_t hidden = g->hidden, rows = g->prompt_rows, count = rows + g->prompt_starts;
    if (dim(call, 'N') != count) return refuse(call, "%ld tokens for %ld rows", dim(call, 'N'), count);
    for (int64_t i = 0; i < g->prompt_starts; i++)
        if (g->start_prefix[i] < 0 || g->start_prefix[i] >= g->users_count)
            return refuse(call, "no prefix %d", g->start_prefix[i]);
    float *x = g->scratch, *delta = x + count * hidden;
    int64_t features = 0;
    for (int64_t i = 0; i < count; i++) features += tokens[i] < 0;
    if (features * hidden != g->prompt_features_count)
        return refuse(call, "%ld numbers of features for %ld tokens of images", g->prompt_features_count, features);
    const float *feature = g->prompt_features;
    for (int64_t i = 0; i < count; i++) {
        embed_token(g, tokens[i], x + i * hidden);
        if (tokens[i] >= 0) continue;
        /* One rank adds it to the sum over the ranks. */
        if (g->tp_rank == 0) memcpy(x + i * hidden, feature, hidden * sizeof(float));
        feature += hidden;
    }
    int status = sum_over_ranks(call, g->group, x, count * hidden);
    for (int64_t i = 0; i < g->prompt_starts && !status; i++)
        memcpy(g->starts + g->start_prefix[i] * hidden, x + (rows + i) * hidden, hidden * sizeof(float));
    for (int64_t i = 0; i < g->layers && !status; i++)
        status = run_layer(call, g, i, 1, i == g->layers - 1, x, delta, i > 0);
    return status;
}

static int decode_token(const Call *call, Rollout *g) {
    int64_t samples = g->num_rows;
    int status = look_ahead(call, g, samples);
    float *x = g->scratch, *delta = x + g->num_rows * g->hidden, *drawn;
    memcpy(x, g->next, g->num_rows * g->hidden * sizeof(float));
    for (int64_t i = 0; i < g->layers && !status; i++) status = run_layer(call, g, i, 0, 0, x, delta, i > 0);
    if (!status) status = draw_tokens(call, g, x, g->layers ? delta : NULL, &drawn);
    if (!status) commit(g, samples, drawn);
    return status;
}

/* meta: number, tokens for every slot; left: samples that are running or waiting. */
KERNEL(rollout_decode, "meta i32[2] -> left i32[1]") {
    const int32_t *meta = call->params[0];
    Rollout *g = rollout_of(call, meta);
    if (!g || check_ready(call, g)) return KERNEL_REFUSED;
    int status;
    admit(g);
    for (int32_t i = 0; i < meta[1] && g->num_rows; i++)
        if ((status = decode_token(call, g))) return status;
    *(int32_t *)call->params[1] = (int32_t)(g->num_rows + g->queue_tail - g->queue_head);
    return 0;
}
