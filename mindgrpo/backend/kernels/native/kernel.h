/* How MindSpore calls a kernel, what a kernel must be given, and how it reports an error.
 *
 * KERNEL(name, "x f32[N, H], bias f32[H]? -> y f32[N, H]") { ... } defines an operation for graphs. The string names
 * the tensors, inputs first, outputs last, all contiguous, and every call is compared with it before the body runs:
 * their number, dtypes (f32, f64, i32, i64, u8, bf16, or f32|bf16 for either) and dims. A dim is a number, a letter, or a product such as 2I; a letter
 * has one value in a call (`dim`). `?` marks an optional tensor: shape [1] says that there is none (`optional`). `...`
 * stands for any further dims, as many elements wherever it is written. Constants (sizes, flags) arrive as tensors too.
 *
 * A kernel that fails writes a sentence and returns its kind, which ends the graph. The sentence goes where the caller
 * asks for it: MindSpore's stream, which is NULL on a CPU, is a buffer [SENTENCE] of `call_kernel`'s; a graph's kernels
 * keep theirs for Python (kernel_take_error). No kernel keeps a pointer to its tensors after it returns.
 */
#ifndef MINDGRPO_KERNEL_H
#define MINDGRPO_KERNEL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "thread_pool.h"

enum { KERNEL_REFUSED = 1, KERNEL_OUT_OF_MEMORY = 2, ANY_SHAPE = 26, SENTENCE = 512 };

typedef struct {
    const char *name;
    int num_params;
    void **params;
    const int *ndims;
    int64_t *const *shapes;
    const char *const *dtypes;
    char *sentence;              /* of a direct call; NULL in a graph */
    int64_t dims[ANY_SHAPE + 1]; /* by letter, then the elements of [...]; -1 where it has none */
    uint32_t absent;             /* bit i: tensor i is optional and not there */
} Call;

/* 0 if the call is as `tensors` says. */
int check_call(Call *call, const char *tensors);

/* Keeps the sentence "kernel NAME: ..." for the caller, in graphs unless an earlier one is unread; returns `kind`. */
__attribute__((format(printf, 3, 4))) int fail(const Call *call, int kind, const char *format, ...);
#define refuse(call, ...) fail(call, KERNEL_REFUSED, __VA_ARGS__)

/* As malloc; without memory NULL, and the kernel has to return KERNEL_OUT_OF_MEMORY. */
void *allocate(const Call *call, int64_t bytes);

/* The same for the calling thread's memory, which the next kernel takes over. */
float *scratch(const Call *call, int64_t floats);

/* Whether tensor `index`, which may be f32|bf16, is the latter. */
int is_bf16(const Call *call, int index);

static inline int64_t dim(const Call *call, char letter) { return call->dims[letter - 'A']; }

static inline void *optional(const Call *call, int index) {
    return call->absent >> index & 1 ? NULL : call->params[index];
}

/* Row `at` of tensor `index` f32|bf16[..., width], as floats. */
static inline void table_row(const Call *call, int index, int64_t at, int64_t width, float *row) {
    if (is_bf16(call, index))
        widen((const uint16_t *)call->params[index] + at * width, width, row);
    else
        memcpy(row, (const float *)call->params[index] + at * width, width * sizeof(float));
}

/* Calls `rows` on stretches of the call's N rows, in all threads if its first tensor is large. */
int over_rows(const Call *call, void (*rows)(const Call *call, int64_t begin, int64_t end));

#define KERNEL(NAME, TENSORS)                                                                                \
    static int NAME##_checked(Call *call);                                                                   \
    int NAME(int num_params, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, \
             void *extra) {                                                                                  \
        Call call = {#NAME, num_params, params, ndims, shapes, dtypes, stream, {0}, 0};                      \
        (void)extra;                                                                                         \
        int status = check_call(&call, TENSORS);                                                             \
        return status ? status : NAME##_checked(&call);                                                      \
    }                                                                                                        \
    static int NAME##_checked(Call *call)

#endif
