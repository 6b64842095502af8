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

/* Blocks begin at multiples of 2 * VEC tokens, so that pairs are whole, wherever a rank's share begins. */
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

/* The largest logit of each block; gives the largest of all. */
static float find_largest(const Row *row, float *of_block) {
    float x[BLOCK], top = NONE;
    for (int64_t b = 0; b < num_blocks(row->g); b++) {
        load_block(row, b, x);
        of_block[b] = largest(x, BLOCK);
        top = of_block[b] > top ? of_block[b] : top;
    }
    return top;
}

/* exp(logit - top) of a block's logits, which go to x. */
static inline void find_masses(const Row *row, int64_t block, float top, float *x, float *masses) {
    load_block(row, block, x);
    for (int64_t i = 0; i < BLOCK; i++) masses[i] = fast_exp(x[i] - top);
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
static Winner first_largest(const Row *row, const float *of_block, float top) {
    float x[BLOCK];
    int64_t block = 0, i = 0;
    while (of_block[block] != top) block++;
    load_block(row, block, x);
    while (x[i] != top) i++;
    return (Winner){top, first_of_block(row->g, block) + i};
}

/* The least logit that is kept and that scores as much with the largest noise, 22.88. */
static inline float least_of(float threshold, float score) {
    return fmaxf(threshold, score - 22.9f - 4e-7f * fabsf(score));
}

/* Tokens of one block that are kept, by their logits and find_masses; `reach` is that of the row's largest logit. */
static void contest_block(const Row *row, int64_t block, const float *x, const float *masses, float threshold,
                          float reach, Winner *winner) {
    int64_t first = first_of_block(row->g, block), any = 0;
    /* The upper half of 2^32 (1 - u), and whether a token of each lane may win. */
    int32_t upper[BLOCK], may_win[VEC] = {0};
    uint32_t strides = (uint32_t)(first / 2) * STRIDE;
    for (uint32_t i = 0; i < BLOCK; i += 2 * VEC)
        for (uint32_t j = 0; j < VEC; j++) {
            uint32_t pair = ~triple32(row->key, strides + (i / 2 + j) * STRIDE);
            upper[i + j] = pair & 0xFFFF;
            upper[i + VEC + j] = pair >> 16;
        }
    reach *= 0x1p-16f;
    for (int64_t i = 0; i < BLOCK; i += VEC)
        for (int64_t j = 0; j < VEC; j++) may_win[j] |= !((float)upper[i + j] > masses[i + j] * reach);
    for (int64_t j = 0; j < VEC; j++) any |= may_win[j];
    for (int64_t j = 0; j < VEC && any; j++)
        for (int64_t i = j; i < BLOCK && may_win[j]; i += VEC)
            if (!((float)upper[i] > masses[i] * reach) && x[i] >= threshold)
                consider(winner, x[i], token_bits(row->key, (uint32_t)(first + i)), first + i);
}

/* Of this rank's tokens with a logit of at least `threshold`; `of_block` and `top` are find_largest's. */
static Winner winner_of(const Row *row, const float *of_block, float top, float threshold) {
    float x[BLOCK], masses[BLOCK];
    Winner winner = top > NONE && top >= threshold ? first_largest(row, of_block, top) : NO_WINNER;
    if (winner.token < 0 || row->g->greedy) return winner;
    winner.score += gumbel_of(token_bits(row->key, (uint32_t)winner.token));
    float reach = reach_of(top, winner.score), least = least_of(threshold, winner.score);
    for (int64_t b = 0; b < num_blocks(row->g); b++) {
        if (of_block[b] < least) continue;
        find_masses(row, b, top, x, masses);
        contest_block(row, b, x, masses, threshold, reach, &winner);
        reach = reach_of(top, winner.score);
        least = least_of(threshold, winner.score);
    }
    return winner;
}

#endif
