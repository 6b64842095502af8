/* See onednn.h. */
#include "onednn.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef __aarch64__
#include <sys/auxv.h>
#endif

/* dnnl_types.h */
enum { CPU = 1, IN_ORDER = 1, BFLOAT16 = 2, FLOAT32 = 3, ANY_TAG = 1, USERS_SCRATCHPAD = 1, THREADPOOL = 8 };
enum { SRC = 1, DST = 17, WEIGHTS = 33, SCRATCHPAD = 80, WEIGHTS_MD = 131, SCRATCHPAD_MD = 136 };
enum { MAX_DIMS = 12, PACKING_ROWS = 64, MAX_PACKINGS = 1024, MAX_PRODUCTS = 8192 };
typedef int64_t Dims[MAX_DIMS];
typedef struct {
    int arg;
    void *memory;
} Argument;
typedef struct {
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
} Version;

#define FUNCTIONS(F)                                                                 \
    F(const Version *, version, void)                                                \
    F(int, get_effective_cpu_isa, void)                                              \
    F(int, engine_create, void **, int, size_t)                                      \
    F(int, stream_create, void **, void *, unsigned)                                 \
    F(int, stream_wait, void *)                                                      \
    F(int, memory_desc_create_with_strides, void **, int, const Dims, int, const Dims) \
    F(int, memory_desc_create_with_tag, void **, int, const Dims, int, int)          \
    F(int, memory_desc_clone, void **, const void *)                                 \
    F(int, memory_desc_destroy, void *)                                              \
    F(size_t, memory_desc_get_size, const void *)                                    \
    F(int, memory_create, void **, const void *, void *, void *)                     \
    F(int, memory_destroy, void *)                                                   \
    F(int, primitive_attr_create, void **)                                           \
    F(int, primitive_attr_set_scratchpad_mode, void *, int)                          \
    F(int, matmul_primitive_desc_create, void **, void *, const void *, const void *, const void *, const void *, void *) \
    F(int, reorder_primitive_desc_create, void **, const void *, void *, const void *, void *, void *) \
    F(const void *, primitive_desc_query_md, const void *, int, int)                 \
    F(int, primitive_desc_destroy, void *)                                           \
    F(int, primitive_create, void **, const void *)                                  \
    F(int, primitive_execute, const void *, void *, int, const Argument *)           \
    F(int, threadpool_interop_set_max_concurrency, int)                              \
    F(int, threadpool_interop_get_max_concurrency, int *)
#define DECLARE(RESULT, NAME, ...) RESULT (*NAME)(__VA_ARGS__);
static struct {
    FUNCTIONS(DECLARE)
} dnnl;

static struct {
    pthread_mutex_t busy;
    _Atomic int is_ready;
    void *engine, *attributes;
    char error[160];
} library = {.busy = PTHREAD_MUTEX_INITIALIZER};

static void load(void) {
    library.error[0] = 0;
    /* MindSpore's own, which is in this process as soon as MindSpore is. */
    void *handle = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_NOLOAD);
    if (!handle) {
        snprintf(library.error, sizeof library.error, "MindSpore's libdnnl.so.3 is not loaded");
        return;
    }
#define FIND(RESULT, NAME, ...)                                                                        \
    if (!(dnnl.NAME = (RESULT (*)(__VA_ARGS__))dlsym(handle, "dnnl_" #NAME))) {                        \
        snprintf(library.error, sizeof library.error, "libdnnl.so.3 has no function dnnl_%s", #NAME);  \
        return;                                                                                        \
    }
    FUNCTIONS(FIND)
    const Version *version = dnnl.version();
    if (version->major != 3 || version->cpu_runtime != THREADPOOL)
        snprintf(library.error, sizeof library.error, "oneDNN is %d.%d with runtime %u, not 3 with its thread pool",
                 version->major, version->minor, version->cpu_runtime);
    else if (dnnl.engine_create(&library.engine, CPU, 0) || dnnl.primitive_attr_create(&library.attributes) ||
             dnnl.primitive_attr_set_scratchpad_mode(library.attributes, USERS_SCRATCHPAD))
        snprintf(library.error, sizeof library.error, "oneDNN %d.%d has no engine for this processor", version->major,
                 version->minor);
}

const char *onednn_error(void) {
    if (library.is_ready) return NULL;
    pthread_mutex_lock(&library.busy);
    if (!library.is_ready) load();
    library.is_ready = !library.error[0];
    pthread_mutex_unlock(&library.busy);
    return library.is_ready ? NULL : library.error;
}

/* dnnl_cpu_isa_t, whose names are x86's; asm/hwcap.h */
enum { AVX512 = 0x20, HAS_BF16 = 1 << 14 };

int onednn_instruction_sets(void) { return onednn_error() ? 0 : dnnl.get_effective_cpu_isa(); }

/* A stream holds nothing but what runs in it: one a thread. */
static void *own_stream(void) {
    static __thread void *stream;
    if (!stream && dnnl.stream_create(&stream, library.engine, IN_ORDER)) stream = NULL;
    return stream;
}

static void *rows_of(int64_t rows, int64_t columns, int dtype, int64_t ld) {
    void *description = NULL;
    if (dnnl.memory_desc_create_with_strides(&description, 2, (Dims){rows, columns}, dtype, (Dims){ld, 1})) return NULL;
    return description;
}

struct Packing {
    int64_t depth, width, bytes;
    void *plain, *packed, *reorder;
};

struct Product {
    const Packing *packing;
    int64_t rows, ldc;
    void *primitive, *a, *c, *scratchpad;
};

/* What was made, and what could not be made, which has no primitive. */
static struct {
    pthread_mutex_t busy;
    Packing packings[MAX_PACKINGS];
    Product products[MAX_PRODUCTS];
    int num_packings, num_products;
} made = {.busy = PTHREAD_MUTEX_INITIALIZER};

/* oneDNN makes other kernels for other numbers of threads; a product is one thread's. */
static void *product_description(const void *a, const void *b, const void *c) {
    int concurrency = 0;
    void *description = NULL;
    dnnl.threadpool_interop_get_max_concurrency(&concurrency);
    dnnl.threadpool_interop_set_max_concurrency(1);
    if (dnnl.matmul_primitive_desc_create(&description, library.engine, a, b, NULL, c, library.attributes))
        description = NULL;
    if (concurrency) dnnl.threadpool_interop_set_max_concurrency(concurrency);
    return description;
}

/* The packing that oneDNN chooses for a product of PACKING_ROWS. */
static void make_packing(Packing *p) {
    void *a = rows_of(PACKING_ROWS, p->depth, BFLOAT16, p->depth), *c = rows_of(PACKING_ROWS, p->width, FLOAT32, p->width);
    void *any = NULL, *product = NULL, *reorder = NULL;
    p->plain = rows_of(p->depth, p->width, BFLOAT16, p->width);
    if (a && c && p->plain && !dnnl.memory_desc_create_with_tag(&any, 2, (Dims){p->depth, p->width}, BFLOAT16, ANY_TAG))
        product = product_description(a, any, c);
    if (product && !dnnl.memory_desc_clone(&p->packed, dnnl.primitive_desc_query_md(product, WEIGHTS_MD, 0)) &&
        !dnnl.reorder_primitive_desc_create(&reorder, p->plain, library.engine, p->packed, library.engine, NULL) &&
        !dnnl.primitive_create(&p->reorder, reorder))
        p->bytes = dnnl.memory_desc_get_size(p->packed);
    else
        p->reorder = NULL;
    if (reorder) dnnl.primitive_desc_destroy(reorder);
    if (product) dnnl.primitive_desc_destroy(product);
    void *descriptions[] = {a, any, c};
    for (int i = 0; i < 3; i++)
        if (descriptions[i]) dnnl.memory_desc_destroy(descriptions[i]);
}

const Packing *packing_of(int64_t depth, int64_t width) {
    if (onednn_error()) return NULL;
    Packing *found = NULL;
    pthread_mutex_lock(&made.busy);
    for (int i = 0; i < made.num_packings && !found; i++)
        if (made.packings[i].depth == depth && made.packings[i].width == width) found = &made.packings[i];
    if (!found && made.num_packings < MAX_PACKINGS) {
        found = &made.packings[made.num_packings++];
        *found = (Packing){depth, width};
        make_packing(found);
    }
    pthread_mutex_unlock(&made.busy);
    return found && found->reorder ? found : NULL;
}

int64_t packed_bytes(const Packing *packing) { return packing->bytes; }

static void make_product(Product *p) {
    int64_t depth = p->packing->depth, width = p->packing->width;
    void *description = NULL;
    p->a = rows_of(p->rows, depth, BFLOAT16, depth), p->c = rows_of(p->rows, width, FLOAT32, p->ldc);
    if (p->a && p->c) description = product_description(p->a, p->packing->packed, p->c);
    if (!description || dnnl.primitive_create(&p->primitive, description) ||
        dnnl.memory_desc_clone(&p->scratchpad, dnnl.primitive_desc_query_md(description, SCRATCHPAD_MD, 0)))
        p->primitive = NULL;
    if (description) dnnl.primitive_desc_destroy(description);
}

const Product *product_of(const Packing *packing, int64_t rows, int64_t ldc) {
    Product *found = NULL;
    pthread_mutex_lock(&made.busy);
    for (int i = 0; i < made.num_products && !found; i++) {
        Product *p = &made.products[i];
        if (p->packing == packing && p->rows == rows && p->ldc == ldc) found = p;
    }
    if (!found && made.num_products < MAX_PRODUCTS) {
        found = &made.products[made.num_products++];
        *found = (Product){packing, rows, ldc};
        make_product(found);
    }
    pthread_mutex_unlock(&made.busy);
    return found && found->primitive ? found : NULL;
}

int64_t product_scratch_bytes(const Product *product) { return dnnl.memory_desc_get_size(product->scratchpad); }

static int run(const void *primitive, int count, Argument *arguments, const void *const *descriptions, void *const *data) {
    void *stream = own_stream();
    int status = !stream;
    for (int i = 0; i < count; i++) {
        arguments[i].memory = NULL;
        status |= dnnl.memory_create(&arguments[i].memory, descriptions[i], library.engine, data[i]);
    }
    if (!status) status = dnnl.primitive_execute(primitive, stream, count, arguments) || dnnl.stream_wait(stream);
    for (int i = 0; i < count; i++)
        if (arguments[i].memory) dnnl.memory_destroy(arguments[i].memory);
    return status;
}

int run_product(const Product *product, const uint16_t *a, const void *packed, float *c, void *scratch) {
    Argument arguments[] = {{SRC}, {WEIGHTS}, {DST}, {SCRATCHPAD}};
    const void *descriptions[] = {product->a, product->packing->packed, product->c, product->scratchpad};
    return run(product->primitive, 4, arguments, descriptions, (void *[]){(void *)a, (void *)packed, c, scratch});
}

int pack(const Packing *packing, const uint16_t *b, void *packed) {
    Argument arguments[] = {{SRC}, {DST}};
    const void *descriptions[] = {packing->plain, packing->packed};
    return run(packing->reorder, 2, arguments, descriptions, (void *[]){(void *)b, packed});
}

int has_bfloat16_products(void) {
#ifdef __aarch64__
    /* Without the instructions oneDNN has no product of bfloat16 or one that takes its elements one by one. */
    const Packing *packing = getauxval(AT_HWCAP2) & HAS_BF16 ? packing_of(PACKING_ROWS, PACKING_ROWS) : NULL;
    return packing && product_of(packing, PACKING_ROWS, PACKING_ROWS);
#else
    return (onednn_instruction_sets() & AVX512) != 0;
#endif
}
