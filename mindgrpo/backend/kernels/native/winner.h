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

/* What of a row's logits the search for its winner goes by: the largest logit of each block, and the same as a share. */
typedef struct {
    float *largest, *shares;
    int64_t count;
} Blocks;

static inline int64_t blocks_of(const Rollout *g) { return (g->vocab + BLOCK - 1) / BLOCK; }

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

/* Tokens of one block that are kept and whose bits are not above `reach`. */
static void contest_block(const Row *row, int64_t block, float threshold, float reach, Winner *winner) {
    int64_t start = block * BLOCK, first = row->g->first_token + start;
    uint32_t bits[BLOCK], most = reach < 0x1p32f ? (uint32_t)reach : UINT32_MAX, any = 0;
    for (int64_t i = 0; i < BLOCK; i++) {
        bits[i] = token_bits(row->key, (uint32_t)(first + i));
        any |= ~bits[i] <= most;
    }
    if (!any) return;
    float x[BLOCK];
    int64_t count = load(row, start, x);
    for (int64_t i = 0; i < count; i++)
        if (~bits[i] <= most && x[i] >= threshold) consider(winner, x[i], bits[i], first + i);
}

/* Of this rank's tokens with a logit of at least `threshold`. */
static Winner winner_of(const Row *row, Blocks blocks, float threshold) {
    Winner winner = NO_WINNER;
    int64_t best = 0;
    for (int64_t b = 1; b < blocks.count; b++)
        if (blocks.largest[b] > blocks.largest[best]) best = b;
    float top = blocks.count ? blocks.largest[best] : -INFINITY, x[BLOCK];
    if (!(top >= threshold && top > -INFINITY)) return winner;
    /* The largest logit first: its score leaves most blocks no chance. */
    int64_t count = load(row, best * BLOCK, x);
    for (int64_t i = 0; i < count && winner.token < 0; i++) {
        int64_t token = row->g->first_token + best * BLOCK + i;
        if (x[i] != top) continue;
        if (row->g->greedy) return (Winner){top, token};
        consider(&winner, top, token_bits(row->key, (uint32_t)token), token);
    }
    for (int64_t b = 0; b < blocks.count; b++) blocks.shares[b] = fast_exp(blocks.largest[b] - top);
    float reach = reach_of(top, winner.score), score = winner.score;
    for (int64_t i = 0; i < blocks.count; i++) {
        int64_t b = i ? i - (i <= best) : best;
        float of_block = blocks.shares[b] * reach;
        if (of_block < 0.5f || blocks.largest[b] < threshold) continue;
        contest_block(row, b, threshold, of_block, &winner);
        if (winner.score == score) continue;
        score = winner.score;
        reach = reach_of(top, score);
    }
    return winner;
}

#endif
