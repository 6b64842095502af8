/* See rollout.h: the generators of this process, and what their table holds. */
#include "rollout.h"

#include <stddef.h>

enum { MAX_ROLLOUTS = 1024 };

static Rollout *rollouts[MAX_ROLLOUTS];

/* Of the layers' kernels, which need the most: normed rows, their projection, and what attention mixes. */
static int64_t scratch_floats(const Rollout *g) {
    int64_t rows = g->num_rows > g->prompt_rows ? g->num_rows : g->prompt_rows, mixed = g->queries * g->dim;
    int64_t attention = mixed + 2 * g->kv * g->dim + (mixed > g->hidden ? mixed : g->hidden);
    return rows * (g->hidden + (attention > 2 * g->inner ? attention : 2 * g->inner));
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
    if (g->cache_itemsize != 2 && g->cache_itemsize != 4)
        return refuse(call, "a cache of elements of %ld bytes", g->cache_itemsize);
#define NO_CHECK(TYPE, NAME)
#define CHECK_ARRAY(TYPE, NAME, LEAST) \
    if (g->NAME##_count < (LEAST))     \
        return refuse(call, "%s has %ld elements, but needs %ld", #NAME, g->NAME##_count, (int64_t)(LEAST));
    ROLLOUT_FIELDS(NO_CHECK, CHECK_ARRAY)
    if (g->num_rows >= 0 && g->num_free >= 0 && g->num_rows + g->num_free <= g->slots) return 0;
    return refuse(call, "%ld rows and %ld free slots are not %ld", g->num_rows, g->num_free, g->slots);
}

Rollout *rollout_of(const Call *call, const int32_t *meta) {
    Rollout *g = meta[0] >= 0 && meta[0] < MAX_ROLLOUTS ? rollouts[meta[0]] : NULL;
    if (!g) refuse(call, "there is no generator %d", meta[0]);
    if (!g || check_table(call, g)) return NULL;
    const int64_t dims[][2] = {{'H', g->hidden},
                               {'I', g->inner},
                               {'D', g->dim},
                               {'W', (g->queries + 2 * g->kv) * g->dim},
                               {'M', g->queries * g->dim}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        int64_t value = dim(call, dims[i][0]);
        if (value < 0 || value == dims[i][1]) continue;
        refuse(call, "%c is %ld, but generator %d has %ld", (char)dims[i][0], value, meta[0], dims[i][1]);
        return NULL;
    }
    for (int i = 0; i < call->num_params; i++)
        if (is_bf16(call, i) && g->parts != 1) {
            refuse(call, "tensor %d is bfloat16, for products of %ld parts", i, g->parts);
            return NULL;
        }
    return g;
}

int run_products(const Call *call, void (*work)(void *task, Member member), void *task) {
    const char *why;
    pool_run(work, task);
    return bf16_gemm_failed(&why) ? refuse(call, "%s", why) : 0;
}

int check_rows(const Call *call, int64_t rows) {
    if (rows >= 0 && rows <= dim(call, 'B')) return 0;
    return refuse(call, "there are %ld rows, but tensors for %ld", rows, dim(call, 'B'));
}
