/* The token with the largest score among some of a row's tokens: logit plus noise, of equal scores the lowest token.
 *
 * Most tokens need no noise: -log u >= 1 - u, so a score of logit + noise takes 1 - u <= exp(logit - score). Nothing
 * that is left out could have won, so neither block sizes nor rounding here show in the token.
 */
#ifndef MINDGRPO_WINNER_H
#define MINDGRPO_WINNER_H

#include "logits.h"

/* `token` is -1 where there is none. */
typedef struct {
    float score;
    int64_t token;
} Winner;

#define NO_WINNER ((Winner){-INFINITY, -1})

/* A block has VEC groups: token t is in group t % VEC, with the other token of its pair. Blocks begin at whole pairs
 * of VEC tokens, wherever a rank's share of the vocabulary begins. */
static inline int64_t num_skipped(const Rollout *g) { return g->first_token % (2 * VEC); }

static inline int64_t num_blocks(const Rollout *g) { return (num_skipped(g) + g->vocab + BLOCK - 1) / BLOCK; }

static inline int64_t first_of_block(const Rollout *g, int64_t block) {
    return g->first_token - num_skipped(g) + block * BLOCK;
}

/* A block's logits in vocabulary order; minus infinity for tokens that are not this rank's. */
static inline void load_block(const Row *row, int64_t block, float *x) {
    int64_t skipped = num_skipped(row->g), begin = block ? 0 : skipped;
    for (int64_t i = 0; i < begin; i++) x[i] = -INFINITY;
    int64_t end = begin + load(row, block * BLOCK - skipped + begin, BLOCK - begin, x + begin);
    for (int64_t i = end; i < BLOCK; i++) x[i] = -INFINITY;
}

/* What the search for a row's winner goes by, one float a group: its largest logit; the exponential of that less the
 * row's largest; and a bound of 2^32 (1 - u) of its tokens from below over that. */
typedef struct {
    float *largest, *shares, *ratios;
    int64_t count;
} Groups;

/* `room` takes 3 floats a group. */
static inline Groups groups_in(const Rollout *g, float *room) {
    int64_t count = num_blocks(g) * VEC;
    return (Groups){room, room + count, room + 2 * count, count};
}

/* The largest logit of each group; gives the largest of all. */
static float find_largest(const Row *row, Groups groups) {
    float x[BLOCK];
    for (int64_t b = 0; b < num_blocks(row->g); b++) {
        float *most = groups.largest + b * VEC;
        load_block(row, b, x);
        for (int j = 0; j < VEC; j++) most[j] = -INFINITY;
        for (int i = 0; i < BLOCK; i += VEC)
            for (int j = 0; j < VEC; j++) most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
    }
    return fmaxf(NONE, largest(groups.largest, groups.count));
}

/* As two floats that are gathered: NONE and -1 where there is none. */
static inline void give_winner(Winner winner, float *out) {
    out[0] = winner.token < 0 ? NONE : winner.score;
    out[1] = winner.token;
}

static inline void contest(Winner *winner, float score, int64_t token) {
    if (score > winner->score || (score == winner->score && token < winner->token)) *winner = (Winner){score, token};
}

/* The most that 2^32 (1 - u) may be for a token with this logit to score as much. The added 2e-5 and 4e-7 of the
 * numbers' size are more than the rounding of logits' differences, of fast_exp, of noise and of scores. */
static inline float reach_of(float logit, float score) {
    return 0x1p32f * fast_exp(logit - score + 2e-5f + 4e-7f * (fabsf(logit) + fabsf(score)));
}

/* Not inlined: the sum must be one of two floats, not a multiply-add with the temperature. */
static __attribute__((noinline)) void consider(Winner *winner, float logit, uint32_t bits, int64_t token) {
    if ((float)~bits > reach_of(logit, winner->score)) return;
    contest(winner, logit + gumbel_of(bits), token);
}

/* The first token with the row's largest logit. */
static Winner first_largest(const Row *row, Groups groups, float top) {
    float x[BLOCK];
    int64_t group = 0, i = 0;
    while (groups.largest[group] != top) group++;
    load_block(row, group / VEC, x);
    while (x[i] != top) i++;
    return (Winner){top, first_of_block(row->g, group / VEC) + i};
}

/* Numbers that no 2^32 (1 - u) of the tokens in each group is below, over the groups' shares. */
static inline void find_ratios(const Row *row, int64_t block, const float *shares, float *ratios) {
    uint32_t low[VEC] = {0}, high[VEC] = {0}, strides = (uint32_t)first_of_block(row->g, block) / 2 * STRIDE;
    for (uint32_t i = 0; i < BLOCK / 2; i += VEC)
        for (uint32_t j = 0; j < VEC; j++) {
            uint32_t pair = triple32(row->key, strides + (i + j) * STRIDE);
            low[j] = pair << 16 > low[j] ? pair << 16 : low[j];
            high[j] = pair > high[j] ? pair : high[j];
        }
    for (int j = 0; j < VEC; j++) ratios[j] = (float)~((low[j] > high[j] ? low[j] : high[j]) | 0xFFFF) / shares[j];
}

/* Tokens of one group that are kept; `reach` is that of the group's largest logit. */
static void contest_group(const Row *row, int64_t group, float threshold, float reach, Winner *winner) {
    const Rollout *g = row->g;
    int64_t first = first_of_block(g, group / VEC) + group % VEC;
    for (int64_t token = first; token < first + BLOCK; token += VEC) {
        uint32_t bits = token_bits(row->key, (uint32_t)token);
        float x;
        if ((float)~bits > reach || token < g->first_token) continue;
        if (load(row, token - g->first_token, 1, &x) == 1 && x >= threshold) consider(winner, x, bits, token);
    }
}

/* Of this rank's tokens with a logit of at least `threshold`; groups.largest is there, and `top` the largest of it. */
static Winner winner_of(const Row *row, Groups groups, float top, float threshold) {
    float least = INFINITY;
    if (!(top >= threshold && top > NONE)) return NO_WINNER;
    Winner winner = first_largest(row, groups, top);
    if (row->g->greedy) return winner;
    winner.score += gumbel_of(token_bits(row->key, (uint32_t)winner.token));
    float reach = reach_of(top, winner.score);
    for (int64_t i = 0; i < groups.count; i++)
        groups.shares[i] = groups.largest[i] < threshold ? 0.0f : fast_exp(groups.largest[i] - top);
    for (int64_t i = 0; i < groups.count; i += VEC) {
        int may_win = 0;
        for (int j = 0; j < VEC; j++) may_win |= !(groups.shares[i + j] * reach < 0.5f);
        for (int j = 0; j < VEC; j++) groups.ratios[i + j] = INFINITY;
        if (may_win) find_ratios(row, i / VEC, groups.shares + i, groups.ratios + i);
    }
    /* The likeliest first: its score leaves few others a chance. */
    int64_t best = 0;
    for (int64_t i = 0; i < groups.count; i++) least = groups.ratios[i] < least ? groups.ratios[i] : least;
    while (best < groups.count - 1 && groups.ratios[best] != least) best++;
    for (int64_t i = -1; i < groups.count; i++) {
        int64_t group = i < 0 ? best : i;
        if (groups.ratios[group] > reach || groups.largest[group] < threshold || i == best) continue;
        contest_group(row, group, threshold, groups.shares[group] * reach, &winner);
        reach = reach_of(top, winner.score);
    }
    return winner;
}

#endif
