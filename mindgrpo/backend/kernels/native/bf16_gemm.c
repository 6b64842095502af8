/* See bf16_gemm.h. B is packed in panels, A converted in blocks of rows, each of which meets all panels of its member; both
 * leaf by leaf. */
#include "bf16_gemm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "bf16_tree.h"
#include "gemm.h"
#include "onednn.h"
#include "vec16.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* A block of A and a panel of B lie in the second cache together. Rows come in fixed numbers, as a product has to be made
 * for each; depth in whole vectors of pairs. */
enum { PANEL = 256, MOST_ROWS = 256, LEAST_ROWS = 16, BLOCK_ELEMENTS = 1 << 18, DEPTH_STEP = 8, ALIGNMENT = 64 };

static const char *_Atomic failure;

void product_failed(const char *why) { atomic_store(&failure, why); }

int product_failure(const char **why) { return (*why = atomic_exchange(&failure, NULL)) != NULL; }

static inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

static inline int64_t num_panels(int64_t n) { return (n + PANEL - 1) / PANEL; }

/* Of panel number `panel`; the last one may be narrower. */
static inline int64_t width_of(int64_t n, int64_t panel) {
    return n - panel * PANEL < PANEL ? n - panel * PANEL : PANEL;
}

typedef uint32_t bits16 __attribute__((vector_size(VEC * 4)));
typedef uint16_t halves16 __attribute__((vector_size(VEC * 2)));

/* As to_bf16; where the processor has an instruction for it, numbers below 1.2e-38 are 0. */
ALWAYS_INLINE halves16 round_vec(vec16 x) {
#ifdef __AVX512BF16__
    return (halves16)_mm512_cvtneps_pbh((__m512)x);
#else
    bits16 bits = (bits16)x, is_number = (bits16)(x == x);
    bits16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), halves16);
#endif
}

/* The first `count` of 16 numbers as a sum of `parts`, each what bfloat16 holds of what the ones before it leave, `step`
 * apart. */
ALWAYS_INLINE void split_vec(vec16 x, int64_t count, int parts, uint16_t *to, int64_t step) {
    for (int part = 0; part < parts; part++) {
        halves16 rounded = round_vec(x);
        memcpy(to + part * step, &rounded, count * sizeof *to);
        x -= (vec16)(__builtin_convertvector(rounded, bits16) << 16);
    }
}

ALWAYS_INLINE void split(const float *x, int64_t count, int parts, uint16_t *to, int64_t step) {
    int64_t i = 0;
    for (; i + VEC <= count; i += VEC) split_vec(*(const vec16 *)(x + i), VEC, parts, to + i, step);
    vec16 tail = {0};
    memcpy(&tail, x + i, (count - i) * sizeof *x);
    if (i < count) split_vec(tail, count - i, parts, to + i, step);
}

/* The calling thread's memory for one purpose, which its next call takes over. */
enum { BLOCK, PLAIN, EDGE, TREE, SCRATCH, PURPOSES };
static void *own_memory(int purpose, int64_t bytes) {
    static __thread void *kept[PURPOSES];
    static __thread int64_t size[PURPOSES];
    if (bytes > size[purpose]) {
        free(kept[purpose]);
        kept[purpose] = aligned_alloc(ALIGNMENT, round_up(bytes, ALIGNMENT));
        size[purpose] = kept[purpose] ? bytes : 0;
        if (!kept[purpose]) product_failed("no memory for a block of a product");
    }
    return kept[purpose];
}

static const Packing *panel_packing(int64_t k, int64_t width) {
    const Packing *packing = packing_of(round_up(k, DEPTH_STEP), width);
    if (!packing) product_failed(onednn_error() ? onednn_error() : "oneDNN has no packing of a matrix of this size");
    return packing;
}

/* Of one part of a panel. */
static int64_t part_bytes(int64_t k, int64_t width) {
    const Packing *packing = panel_packing(k, width);
    return packing ? round_up(packed_bytes(packing), ALIGNMENT) : -1;
}

/* Of one leaf. */
static int64_t leaf_bytes(int64_t k, int64_t n, int parts) {
    int64_t last = num_panels(n) - 1, whole = part_bytes(k, width_of(n, 0)), rest = part_bytes(k, width_of(n, last));
    return whole < 0 || rest < 0 ? -1 : parts * (last * whole + rest);
}

static int is_tree(Summation sum) { return sum.parts == 1 && sum.leaves > 1 && has_bf16_tree(); }

int64_t packed_matrix_bytes(int64_t k, int64_t n, Summation sum) {
    if (is_tree(sum)) return tree_matrix_bytes(k, n, sum.leaves);
    int64_t bytes = leaf_bytes(k / sum.leaves, n, sum.parts);
    return bytes < 0 ? -1 : sum.leaves * bytes;
}

/* A block [rows, columns], x[i * row + j * column], `row` 1 where `column` is not, as parts that are `step` apart, `ld`
 * from one row to the next. */
ALWAYS_INLINE void split_block(int64_t rows, int64_t columns, const float *x, int64_t row, int64_t column, int64_t ld,
                               int parts, uint16_t *to, int64_t step) {
    if (column == 1) {
        for (int64_t i = 0; i < rows; i++) split(x + i * row, columns, parts, to + i * ld, step);
        return;
    }
    for (int64_t i = 0; i < rows; i += VEC)
        for (int64_t j = 0; j < columns; j += VEC) {
            int64_t height = rows - i < VEC ? rows - i : VEC, width = columns - j < VEC ? columns - j : VEC;
            vec16 tile[VEC];
            for (int64_t q = 0; q < width; q++) {
                const float *from = x + i + (j + q) * column;
                if (height == VEC)
                    tile[q] = *(const vec16 *)from;
                else
                    memcpy(&tile[q], from, height * sizeof(float));
            }
            transpose16(tile);
            for (int64_t p = 0; p < height; p++) {
                uint16_t *at = to + (i + p) * ld + j;
                if (width == VEC)
                    split_vec(tile[p], VEC, parts, at, step);
                else
                    split_vec(tile[p], width, parts, at, step);
            }
        }
}

static void split_in(int64_t rows, int64_t columns, const float *x, int64_t row, int64_t column, int64_t ld, int parts,
                     uint16_t *to, int64_t step) {
    if (parts == 1)
        split_block(rows, columns, x, row, column, ld, 1, to, step);
    else if (parts == 2)
        split_block(rows, columns, x, row, column, ld, 2, to, step);
    else
        split_block(rows, columns, x, row, column, ld, MOST_PARTS, to, step);
}

/* The same block of numbers that are bfloat16 already. */
static void copy_block(int64_t rows, int64_t columns, const uint16_t *x, int64_t row, int64_t column, int64_t ld,
                       uint16_t *to) {
    if (column == 1) {
        for (int64_t i = 0; i < rows; i++) memcpy(to + i * ld, x + i * row, columns * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < rows; i += VEC)
        for (int64_t j = 0; j < columns; j += VEC) {
            int64_t height = rows - i < VEC ? rows - i : VEC, width = columns - j < VEC ? columns - j : VEC;
            vec16 tile[VEC];
            for (int64_t q = 0; q < width; q++) widen(x + i + (j + q) * column, height, (float *)&tile[q]);
            transpose16(tile);
            for (int64_t p = 0; p < height; p++)
                for (int64_t q = 0; q < width; q++) {
                    uint32_t bits;
                    memcpy(&bits, (const float *)&tile[p] + q, 4);
                    to[(i + p) * ld + j + q] = bits >> 16;
                }
        }
}

static void pack_leaf(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                      int parts, char *packed) {
    int64_t depth = round_up(k, DEPTH_STEP), begin, end, bytes = part_bytes(k, width_of(n, 0));
    uint16_t *plain = own_memory(PLAIN, parts * depth * PANEL * sizeof *plain);
    if (!plain || bytes < 0) return;
    share_out(member, num_panels(n), &begin, &end);
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t width = width_of(n, panel), size = depth * width, start = panel * PANEL * b_column;
        const Packing *packing = panel_packing(k, width);
        if (!packing) return;
        char *to = packed + panel * parts * bytes;
        if (is_bf16) {
            copy_block(k, width, (const uint16_t *)b + start, b_row, b_column, width, plain);
            memset(plain + size, 0, (parts - 1) * size * sizeof *plain);
        } else
            split_in(k, width, (const float *)b + start, b_row, b_column, width, parts, plain, size);
        for (int part = 0; part < parts; part++) {
            memset(plain + part * size + k * width, 0, (depth - k) * width * sizeof *plain);
            if (pack(packing, plain + part * size, to + part * part_bytes(k, width))) product_failed("oneDNN failed to pack a matrix");
        }
    }
}

void pack_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                 Summation sum, void *packed) {
    if (is_tree(sum)) {
        pack_tree_matrix(member, k, n, b, is_bf16, b_row, b_column, sum.leaves, packed);
        return;
    }
    int64_t depth = k / sum.leaves, bytes = leaf_bytes(depth, n, sum.parts);
    int64_t step = depth * b_row * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
    for (int i = 0; i < sum.leaves && bytes >= 0; i++)
        pack_leaf(member, depth, n, (const char *)b + i * step, is_bf16, b_row, b_column, sum.parts,
                  (char *)packed + i * bytes);
}

/* [parts, rows, depth], zero beyond column k of each row and beyond row m of each part. */
static void convert_rows(int64_t m, int64_t rows, int64_t k, int64_t depth, const float *a, int64_t a_row,
                         int64_t a_column, int parts, uint16_t *block) {
    int64_t step = rows * depth;
    split_in(m, k, a, a_row, a_column, depth, parts, block, step);
    for (int part = 0; part < parts; part++, block += step) {
        for (int64_t i = 0; i < m && k < depth; i++) memset(block + i * depth + k, 0, (depth - k) * sizeof *block);
        memset(block + m * depth, 0, (rows - m) * depth * sizeof *block);
    }
}

/* `k`: of a leaf; `bytes`: of a part of a whole panel, and of a leaf. */
typedef struct {
    int64_t n, k, ldc, bytes, leaf_bytes;
    Summation sum;
    const char *packed;
} Work;

/* One product, C's rows `ldc` apart. */
static int run_one(const Packing *packing, int64_t rows, const uint16_t *block, const char *packed, float *c, int64_t ldc) {
    const Product *product = packing ? product_of(packing, rows, ldc) : NULL;
    void *scratch = product ? own_memory(SCRATCH, ALIGNMENT + product_scratch_bytes(product)) : NULL;
    return !c || !scratch || run_product(product, block, packed, c, scratch);
}

/* A row of C is, or is increased by, the sum of a row of each of `count` products, `step` apart. */
ALWAYS_INLINE void add_row(int64_t width, int count, const float *products, int64_t step, int is_first, float *c) {
    int64_t j = 0;
    for (; j + VEC <= width; j += VEC) {
        vec16 sum = *(const vec16 *)(products + j);
        for (int p = 1; p < count; p++) sum += *(const vec16 *)(products + p * step + j);
        if (!is_first) sum += *(const vec16 *)(c + j);
        *(vec16 *)(c + j) = sum;
    }
    for (; j < width; j++) {
        float sum = products[j];
        for (int p = 1; p < count; p++) sum += products[p * step + j];
        c[j] = is_first ? sum : sum + c[j];
    }
}

static void add_products(int64_t m, int64_t rows, int64_t width, int count, const float *products, int is_first, float *c,
                         int64_t ldc) {
    for (int64_t i = 0; i < m; i++, products += width, c += ldc) {
        if (count == 3)
            add_row(width, 3, products, rows * width, is_first, c);
        else if (count == 2)
            add_row(width, 2, products, rows * width, is_first, c);
        else
            add_row(width, 1, products, rows * width, is_first, c);
    }
}

/* c [m, width] = one leaf's product with one panel. The block has `rows` rows, of which `m` count. */
static int multiply_leaf(const Work *w, int64_t m, int64_t rows, int64_t width, const uint16_t *block, const char *packed,
                         float *c, int64_t ldc) {
    const Packing *packing = panel_packing(w->k, width);
    int parts = w->sum.parts;
    if (m == rows && parts == 1) return run_one(packing, rows, block, packed, c, ldc);
    /* The parts of A that are multiplied with a part of B are one product: with the first all, with the last one. */
    float *products = own_memory(EDGE, parts * rows * PANEL * sizeof(float));
    for (int part = 0, count = parts; count; part++, count--) {
        if (run_one(packing, count * rows, block, packed + part * part_bytes(w->k, width), products, width)) return 1;
        add_products(m, rows, width, count, products, part == 0, c, ldc);
    }
    return 0;
}

/* The two [m, width], without gaps, into c. */
static void add_into(int64_t m, int64_t width, const float *a, const float *b, float *c, int64_t ldc) {
    for (int64_t i = 0; i < m; i++, a += width, b += width, c += ldc)
        for (int64_t j = 0; j < width; j++) c[j] = a[j] + b[j];
}

/* c [m, width] = the sum of all leaves, more than one, in a binary tree. */
static int multiply_tree(const Work *w, int64_t m, int64_t rows, int64_t width, const uint16_t *block, const char *packed,
                         float *c) {
    /* Sums of 2^level leaves that wait for their neighbours', as in a binary counter. */
    int64_t size = rows * PANEL, step = w->sum.parts * rows * round_up(w->k, DEPTH_STEP), level;
    float *memory = own_memory(TREE, (MOST_LEVELS + 1) * size * sizeof(float)), *current = memory, *sums[MOST_LEVELS];
    if (!memory) return 1;
    for (level = 0; level < MOST_LEVELS; level++) sums[level] = memory + (level + 1) * size;
    for (int64_t i = 0; i < w->sum.leaves; i++) {
        if (multiply_leaf(w, m, rows, width, block + i * step, packed + i * w->leaf_bytes, current, width)) return 1;
        for (level = 0; i >> level & 1; level++)
            if (i >> (level + 1) || i + 1 < w->sum.leaves)
                add_into(m, width, sums[level], current, current, width);
            else
                add_into(m, width, sums[level], current, c, w->ldc);
        float *waiting = sums[level];
        sums[level] = current, current = waiting;
    }
    return 0;
}

/* The block's rows, of which `m` count, with panels [begin, end). */
static int multiply(const Work *w, int64_t m, int64_t rows, const uint16_t *block, int64_t begin, int64_t end, float *c) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t width = width_of(w->n, panel);
        const char *packed = w->packed + panel * w->sum.parts * w->bytes;
        float *target = c + panel * PANEL;
        if (w->sum.leaves > 1 ? multiply_tree(w, m, rows, width, block, packed, target)
                                : multiply_leaf(w, m, rows, width, block, packed, target, w->ldc))
            return 1;
    }
    return 0;
}

/* How many rows the products have that `m` rows go through, `most` at most. */
static int64_t block_rows(int64_t m, int64_t most) {
    int64_t rows = LEAST_ROWS;
    while (rows < most && rows < m) rows *= 2;
    return rows;
}

/* The largest share of B's columns that a member has if panels are shared out. */
static int64_t most_columns(int size, int64_t n) {
    int64_t most = 0;
    for (int i = 0; i < size; i++) {
        int64_t begin, end;
        share_out((Member){i, size}, num_panels(n), &begin, &end);
        int64_t columns = end > begin ? (end - begin - 1) * PANEL + width_of(n, end - 1) : 0;
        most = columns > most ? columns : most;
    }
    return most;
}

void bf16_gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
               Summation sum, const void *packed, float *c, int64_t ldc) {
    if (is_tree(sum)) {
        if (a_column != 1)
            product_failed("a product of a turned matrix is not summed in leaves");
        else if (bf16_gemm_tree(member, m, n, k, sum.leaves, a, a_row, packed, c, ldc))
            product_failed("no memory for a block of a product");
        return;
    }
    int64_t leaf = k / sum.leaves, depth = round_up(leaf, DEPTH_STEP), elements = sum.parts * sum.leaves * depth;
    int64_t fitting = BLOCK_ELEMENTS / elements;
    int64_t most = block_rows(fitting < MOST_ROWS ? fitting : MOST_ROWS, MOST_ROWS);
    int64_t steps = (m + LEAST_ROWS - 1) / LEAST_ROWS, first = 0, last = steps, begin = 0, end = num_panels(n);
    /* Members that share panels convert all rows each, and those that share rows read all panels: few rows are cheap to
     * convert, if panels can be shared evenly. */
    int64_t rows_of_one = (steps + member.size - 1) / member.size * LEAST_ROWS;
    if (m <= MOST_ROWS && most_columns(member.size, n) * m <= rows_of_one * n)
        share_out(member, end, &begin, &end);
    else
        share_out(member, steps, &first, &last);
    Work work = {n, leaf, ldc, part_bytes(leaf, width_of(n, 0)), leaf_bytes(leaf, n, sum.parts), sum, packed};
    uint16_t *block = own_memory(BLOCK, most * elements * sizeof *block);
    if (!block || work.bytes < 0 || work.leaf_bytes < 0 || begin == end) return;
    int64_t stop = last * LEAST_ROWS < m ? last * LEAST_ROWS : m;
    for (int64_t i = first * LEAST_ROWS; i < stop; i += most) {
        int64_t count = stop - i < most ? stop - i : most, rows = block_rows(count, most);
        for (int j = 0; j < sum.leaves; j++)
            convert_rows(count, rows, leaf, depth, a + i * a_row + j * leaf * a_column, a_row, a_column, sum.parts,
                         block + j * sum.parts * rows * depth);
        if (multiply(&work, count, rows, block, begin, end, c + i * ldc)) product_failed("oneDNN failed to multiply");
    }
}
