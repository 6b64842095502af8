/* See kernel.h. */
#include "kernel.h"

#include <ctype.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

/* Fewer elements than this take less time than waking another thread does. */
enum { ALONE_BELOW = 16384 };

static struct {
    pthread_mutex_t busy;
    int kind;
    char sentence[SENTENCE];
} last = {.busy = PTHREAD_MUTEX_INITIALIZER};

int fail(const Call *call, int kind, const char *format, ...) {
    va_list values;
    va_start(values, format);
    pthread_mutex_lock(&last.busy);
    char *sentence = call->sentence ? call->sentence : last.sentence;
    if (!sentence[0]) {
        int size = snprintf(sentence, SENTENCE, "kernel %s: ", call->name);
        vsnprintf(sentence + size, SENTENCE - size, format, values);
        if (!call->sentence) last.kind = kind;
    }
    pthread_mutex_unlock(&last.busy);
    va_end(values);
    return kind;
}

/* The kind of the first error in a graph since the last call of this, and its sentence in `sentence` [512]; 0 without one. */
int kernel_take_error(char *sentence) {
    pthread_mutex_lock(&last.busy);
    int kind = last.kind;
    memcpy(sentence, last.sentence, SENTENCE);
    last.kind = 0;
    last.sentence[0] = 0;
    pthread_mutex_unlock(&last.busy);
    return kind;
}

/* -- what a call must be --------------------------------------------------------------------------------------- */

static const char *dtype_of(const char *sign) {
    static const char *const names[][2] = {{"f32", "float32"}, {"f64", "float64"}, {"i32", "int32"}, {"i64", "int64"}, {"u8", "uint8"}, {"bf16", "bfloat16"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strncmp(sign, names[i][0], strlen(names[i][0]))) return names[i][1];
    return "unknown";
}

/* Whether `size` can be the value of the dim at *text, such as 2I; a letter without a value takes its own from it. */
static int fits(Call *call, const char **text, int64_t size) {
    int64_t known = 1, *unknown = NULL;
    if (isdigit(**text)) known = strtol(*text, (char **)text, 10);
    for (; isupper(**text); (*text)++) {
        int64_t *value = &call->dims[**text - 'A'];
        if (*value >= 0)
            known *= *value;
        else
            unknown = value;
    }
    if (!unknown) return known == size;
    if (known <= 0 || size % known) return 0;
    *unknown = size / known;
    return 1;
}

/* Whether tensor `index` has the dims that are written at `text`, behind the bracket. */
static int fits_shape(Call *call, const char *text, int index) {
    const int64_t *shape = call->shapes[index];
    int ndim = call->ndims[index], i = 0;
    for (; *text != ']' && *text != '.'; i++) {
        if (i >= ndim || !fits(call, &text, shape[i])) return 0;
        text += strspn(text, ", ");
    }
    if (*text == ']') return i == ndim;
    int64_t count = 1, *known = &call->dims[ANY_SHAPE];
    for (; i < ndim; i++) count *= shape[i];
    if (*known < 0) *known = count;
    return *known == count;
}

static int wrong_tensor(const Call *call, int index, const char *wanted, int length) {
    char shape[96] = "", known[160] = "";
    if (!call->params[index] || !call->dtypes[index]) return refuse(call, "there is no %.*s", length, wanted);
    for (int i = 0, at = 0; i < call->ndims[index] && at < 70; i++)
        at += sprintf(shape + at, "%s%ld", i ? ", " : "", call->shapes[index][i]);
    for (int i = 0, at = 0; i < ANY_SHAPE && at < 130; i++)
        if (call->dims[i] >= 0) at += sprintf(known + at, "%s%c = %ld", at ? ", " : " with ", 'A' + i, call->dims[i]);
    return refuse(call, "tensor %d is %s [%s], but must be %.*s%s", index, call->dtypes[index], shape, length, wanted,
                  known);
}

/* Whether the dtype is one of those that are written at `types`, as f32 or f32|bf16, up to the bracket. */
static int fits_dtype(const char *dtype, const char *types) {
    for (;; types++) {
        if (!strcmp(dtype, dtype_of(types))) return 1;
        types += strcspn(types, "|[");
        if (*types != '|') return 0;
    }
}

int is_bf16(const Call *call, int index) { return !strcmp(call->dtypes[index], "bfloat16"); }

int check_call(Call *call, const char *tensors) {
    int wanted = 0;
    for (const char *at = tensors; *at; at++) wanted += *at == '[';
    if (call->num_params != wanted)
        return refuse(call, "was given %d tensors, but takes %d: %s", call->num_params, wanted, tensors);
    for (int i = 0; i <= ANY_SHAPE; i++) call->dims[i] = -1;
    for (int index = 0; index < wanted; index++) {
        const char *type = strchr(tensors, ' ') + 1, *end = strchr(type, ']') + 1;
        int is_right = call->params[index] && call->dtypes[index] && fits_dtype(call->dtypes[index], type);
        if (is_right && *end == '?' && call->ndims[index] == 1 && call->shapes[index][0] == 1)
            call->absent |= 1u << index;
        else if (!is_right || !fits_shape(call, strchr(type, '[') + 1, index))
            return wrong_tensor(call, index, tensors, (int)(end - tensors));
        tensors = end + strspn(end, "?, ->");
    }
    return 0;
}

/* -- what bodies use ------------------------------------------------------------------------------------------- */

void *allocate(const Call *call, int64_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!memory) fail(call, KERNEL_OUT_OF_MEMORY, "no memory for %ld bytes", bytes);
    return memory;
}

float *scratch(const Call *call, int64_t floats) {
    static __thread float *kept;
    static __thread int64_t size;
    if (floats > size) {
        free(kept);
        kept = allocate(call, floats * sizeof(float));
        size = kept ? floats : 0;
    }
    return kept;
}

typedef struct {
    const Call *call;
    void (*rows)(const Call *call, int64_t begin, int64_t end);
} Rows;

static void work_rows(void *task, Member member) {
    const Rows *work = task;
    int64_t begin, end;
    share_out(member, dim(work->call, 'N'), &begin, &end);
    work->rows(work->call, begin, end);
}

int over_rows(const Call *call, void (*rows)(const Call *call, int64_t begin, int64_t end)) {
    Rows work = {call, rows};
    int64_t count = 1;
    for (int i = 0; i < call->ndims[0]; i++) count *= call->shapes[0][i];
    if (count < ALONE_BELOW)
        work_rows(&work, (Member){0, 1});
    else
        pool_run(work_rows, &work);
    return 0;
}
