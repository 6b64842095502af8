/* What trainer and generator compute of one row's experts, compiled once, in experts.c, so that both get the same bits.
 *
 * A token has K slots, slot number token * K + k; a row is what an expert gets of a slot. `order` names each row's slot and
 * `home` each slot's row, -1 where there is none.
 */
#ifndef MINDGRPO_EXPERTS_H
#define MINDGRPO_EXPERTS_H

#include <stdint.h>

/* Whether scores are sigmoids, whether those of a token are divided by their sum, and their factor; groups of experts, and
 * how many of them a token's may be of. */
typedef struct {
    int is_sigmoid, renormalises;
    float scaling;
    int groups, groups_taken;
} Routing;

/* p [rows, E]: softmax or sigmoid of x [rows, H] w [H, E], each row by itself. */
void expert_probabilities(int64_t rows, int64_t hidden, int64_t experts, const float *x, const float *w, Routing routing,
                          float *p);

/* topk_ids [K]: the experts of the largest p [E], falling; the first of equal ones first. `bias` [E], if there is one, is
 * added for the choice, and only the groups whose two best make the largest sums have a part in it (arXiv:2412.19437,
 * section 2.1.2). `margin`, if it is wanted: the last one's minus the best one's that is not chosen; 1e30 without one. */
void choose_row(const float *p, const float *bias, int64_t experts, int64_t slots, Routing routing, int32_t *topk_ids,
                float *margin);

/* The sum of p at a token's experts; 1 where scores are not divided by it, or the token has none. */
float score_divisor(const float *p, const int32_t *topk_ids, int64_t slots, Routing routing);

/* scores [K] of a token's experts; 0 for -1. */
void score_row(const float *p, const int32_t *topk_ids, int64_t slots, Routing routing, float *scores);

/* Rows by expert, those of one as their slots lie, for `count` of all experts from `first` on. Slots of others have none.
 * `counts` [all experts] are those of slots. */
void sort_rows(int64_t slots, int64_t experts, int64_t first, int64_t count, const int32_t *topk_ids, int32_t *order,
               int32_t *counts, int32_t *home);

/* out [width] = the sum of scores[k] y[home[k]] in the order of k, without -1; scores of 1 where NULL. */
void sum_row_slots(const float *y, const int32_t *home, const float *scores, int64_t slots, int64_t width, float *out);

#endif
