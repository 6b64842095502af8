/* See bf16_gemm.h. B is packed in panels, A converted in blocks of rows, each of which meets all panels of its member. */
#include "bf16_gemm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "onednn.h"
#include "vec16.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* A block of A and a panel of B lie in the second cache together. Rows come in fixed numbers, as a product has to be made
 * for each; depth in whole vectors of pairs. */
enum { PANEL = 256, MOST_ROWS = 256, LEAST_ROWS = 16, BLOCK_ELEMENTS = 1 << 18, DEPTH_STEP = 32, ALIGNMENT = 64 };

static const char *_Atomic failure;

static void failed(const char *why) { atomic_store(&failure, why); }

int bf16_gemm_failed(const char **why) { return (*why = atomic_exchange(&failure, NULL)) != NULL; }

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

/* The first `count` of 16 numbers, and what rounding leaves of them unless `rest` is NULL. */
ALWAYS_INLINE void split_vec(vec16 x, int64_t count, uint16_t *rounded, uint16_t *rest) {
    halves16 high = round_vec(x), low;
    if (rest) low = round_vec(x - (vec16)(__builtin_convertvector(high, bits16) << 16));
    memcpy(rounded, &high, count * sizeof *rounded);
    if (rest) memcpy(rest, &low, count * sizeof *rest);
}

static void split(const float *x, int64_t count, uint16_t *rounded, uint16_t *rest) {
    int64_t i = 0;
    for (; i + VEC <= count; i += VEC) split_vec(*(const vec16 *)(x + i), VEC, rounded + i, rest ? rest + i : NULL);
    vec16 tail = {0};
    memcpy(&tail, x + i, (count - i) * sizeof *x);
    if (i < count) split_vec(tail, count - i, rounded + i, rest ? rest + i : NULL);
}

/* The calling thread's memory for one purpose, which its next call takes over. */
enum { BLOCK, PLAIN, EDGE, SCRATCH, PURPOSES };
static void *own_memory(int purpose, int64_t bytes) {
    static __thread void *kept[PURPOSES];
    static __thread int64_t size[PURPOSES];
    if (bytes > size[purpose]) {
        free(kept[purpose]);
        kept[purpose] = aligned_alloc(ALIGNMENT, round_up(bytes, ALIGNMENT));
        size[purpose] = kept[purpose] ? bytes : 0;
        if (!kept[purpose]) failed("no memory for a block of a product");
    }
    return kept[purpose];
}

static const Packing *panel_packing(int64_t k, int64_t width, int terms) {
    const Packing *packing = packing_of(terms * round_up(k, DEPTH_STEP), width);
    if (!packing) failed(onednn_error() ? onednn_error() : "oneDNN has no packing of a matrix of this size");
    return packing;
}

static int64_t panel_bytes(int64_t k, int64_t width, int terms) {
    const Packing *packing = panel_packing(k, width, terms);
    return packing ? round_up(packed_bytes(packing), ALIGNMENT) : -1;
}

int64_t packed_matrix_bytes(int64_t k, int64_t n, int terms) {
    int64_t last = num_panels(n) - 1, whole = panel_bytes(k, width_of(n, 0), terms), rest = panel_bytes(k, width_of(n, last), terms);
    return whole < 0 || rest < 0 ? -1 : last * whole + rest;
}

/* A block [rows, columns], x[i * row + j * column], `row` 1 where `column` is not, into `rounded` and `rest`, `ld` from one row to the next. */
static void split_block(int64_t rows, int64_t columns, const float *x, int64_t row, int64_t column, int64_t ld,
                        uint16_t *rounded, uint16_t *rest) {
    if (column == 1) {
        for (int64_t i = 0; i < rows; i++)
            split(x + i * row, columns, rounded + i * ld, rest ? rest + i * ld : NULL);
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
                int64_t at = (i + p) * ld + j;
                if (width == VEC)
                    split_vec(tile[p], VEC, rounded + at, rest ? rest + at : NULL);
                else
                    split_vec(tile[p], width, rounded + at, rest ? rest + at : NULL);
            }
        }
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

void pack_matrix(Member member, int64_t k, int64_t n, const void *b, int is_bf16, int64_t b_row, int64_t b_column,
                 int terms, void *packed) {
    int64_t depth = round_up(k, DEPTH_STEP), begin, end, whole = panel_bytes(k, width_of(n, 0), terms);
    uint16_t *plain = own_memory(PLAIN, 3 * depth * PANEL * sizeof *plain);
    if (!plain || whole < 0) return;
    share_out(member, num_panels(n), &begin, &end);
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t width = width_of(n, panel), size = depth * width;
        const Packing *packing = panel_packing(k, width, terms);
        if (!packing) return;
        uint16_t *rest = terms == 3 ? plain + size : NULL;
        int64_t start = panel * PANEL * b_column;
        if (is_bf16)
            copy_block(k, width, (const uint16_t *)b + start, b_row, b_column, width, plain);
        else
            split_block(k, width, (const float *)b + start, b_row, b_column, width, plain, rest);
        if (is_bf16 && rest) memset(rest, 0, k * width * sizeof *rest);
        for (int part = 0; part < (terms == 3 ? 2 : 1); part++)
            memset(plain + part * size + k * width, 0, (depth - k) * width * sizeof *plain);
        if (terms == 3) memcpy(plain + 2 * size, plain, size * sizeof *plain);
        if (pack(packing, plain, (char *)packed + panel * whole)) failed("oneDNN failed to pack a matrix");
    }
}

/* [rows, terms * depth]: xh, or xh, xh, xl, zero beyond column k of each and beyond row m. */
static void convert_rows(int64_t m, int64_t rows, int64_t k, int64_t depth, const float *a, int64_t a_row,
                         int64_t a_column, int terms, uint16_t *block) {
    int64_t ld = terms * depth;
    split_block(m, k, a, a_row, a_column, ld, block, terms == 3 ? block + 2 * depth : NULL);
    for (int64_t i = 0; i < m; i++) {
        uint16_t *row = block + i * ld;
        memset(row + k, 0, (depth - k) * sizeof *row);
        if (terms == 3) {
            memset(row + 2 * depth + k, 0, (depth - k) * sizeof *row);
            memcpy(row + depth, row, depth * sizeof *row);
        }
    }
    memset(block + m * ld, 0, (rows - m) * ld * sizeof *block);
}

typedef struct {
    int64_t n, k, ldc, whole;
    int terms;
    const char *packed;
} Work;

/* The block's rows, of which `m` count, with panels [begin, end). */
static int multiply(const Work *w, int64_t m, int64_t rows, const uint16_t *block, int64_t begin, int64_t end, float *c) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t width = width_of(w->n, panel);
        const Packing *packing = panel_packing(w->k, width, w->terms);
        const Product *product = packing ? product_of(packing, rows, m == rows ? w->ldc : width) : NULL;
        float *part = c + panel * PANEL, *target = part;
        if (m != rows) target = own_memory(EDGE, rows * PANEL * sizeof(float));
        void *scratch = product ? own_memory(SCRATCH, ALIGNMENT + product_scratch_bytes(product)) : NULL;
        if (!target || !scratch || run_product(product, block, w->packed + panel * w->whole, target, scratch)) return 1;
        for (int64_t i = 0; m != rows && i < m; i++)
            memcpy(part + i * w->ldc, target + i * width, width * sizeof(float));
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
               int terms, const void *packed, float *c, int64_t ldc) {
    int64_t depth = round_up(k, DEPTH_STEP), fitting = BLOCK_ELEMENTS / (terms * depth);
    int64_t most = block_rows(fitting < MOST_ROWS ? fitting : MOST_ROWS, MOST_ROWS);
    int64_t steps = (m + LEAST_ROWS - 1) / LEAST_ROWS, first = 0, last = steps, begin = 0, end = num_panels(n);
    /* Members that share panels convert all rows each, and those that share rows read all panels: few rows are cheap to
     * convert, if panels can be shared evenly. */
    int64_t rows_of_one = (steps + member.size - 1) / member.size * LEAST_ROWS;
    if (m <= MOST_ROWS && most_columns(member.size, n) * m <= rows_of_one * n)
        share_out(member, end, &begin, &end);
    else
        share_out(member, steps, &first, &last);
    Work work = {n, k, ldc, panel_bytes(k, width_of(n, 0), terms), terms, packed};
    uint16_t *block = own_memory(BLOCK, most * terms * depth * sizeof *block);
    if (!block || work.whole < 0 || begin == end) return;
    int64_t stop = last * LEAST_ROWS < m ? last * LEAST_ROWS : m;
    for (int64_t i = first * LEAST_ROWS; i < stop; i += most) {
        int64_t count = stop - i < most ? stop - i : most, rows = block_rows(count, most);
        convert_rows(count, rows, k, depth, a + i * a_row, a_row, a_column, terms, block);
        if (multiply(&work, count, rows, block, begin, end, c + i * ldc)) failed("oneDNN failed to multiply");
    }
}
