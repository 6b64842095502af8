/* See rollout.h: the generators of this process, and what their table holds. */
#include "rollout.h"

#include <stddef.h>

enum { MAX_ROLLOUTS = 1024 };

static Rollout *rollouts[MAX_ROLLOUTS];

/* What Python needs to fill the table by name, in order and up to one without a name. */
typedef struct {
    const char *name, *type;
    int64_t is_array, offset;
} Field;

#define DESCRIBE_NUMBER(TYPE, NAME) {#NAME, #TYPE, 0, offsetof(Rollout, NAME)},
#define DESCRIBE_ARRAY(TYPE, NAME) {#NAME, #TYPE, 1, offsetof(Rollout, NAME)},
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

Rollout *rollout_of(const Call *call, const int32_t *meta) {
    Rollout *g = meta[0] >= 0 && meta[0] < MAX_ROLLOUTS ? rollouts[meta[0]] : NULL;
    if (!g) {
        refuse(call, "there is no generator %d", meta[0]);
        return NULL;
    }
    const struct {
        char letter;
        int64_t value;
    } dims[] = {{'H', g->hidden}, {'I', g->inner}, {'D', g->dim},
                {'W', (g->queries + 2 * g->kv) * g->dim}, {'M', g->queries * g->dim}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        if (dim(call, dims[i].letter) >= 0 && dim(call, dims[i].letter) != dims[i].value) {
            refuse(call, "%c is %lld, but generator %d has %lld", dims[i].letter, (long long)dim(call, dims[i].letter),
                   meta[0], (long long)dims[i].value);
            return NULL;
        }
    return g;
}
