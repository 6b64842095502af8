/* See gemm.h. Blocks as in BLIS (doi:10.1145/2764454): a strip of A's rows and a panel of B's columns are packed, so that
 * both are read from begin to end, and blocks of strips and panels fit the caches. */
#include "gemm.h"

#include <stdio.h>
#include <stdlib.h>

/* A tile's sums take all registers but those for a row of its panel and for an element of A. */
enum { PANEL = LANES == VEC ? 2 * VEC : VEC, PARTS = PANEL / LANES, STRIP = (REGISTERS - 1 - PARTS) / PARTS };
_Static_assert(STRIP >= 1 && STRIP <= 14, "any_tile has a tile for each number of rows up to 14");
/* Of B as it lies a few rows read as much at a time as the registers allow. */
enum { WIDE = 2 * VEC, WIDE_ROWS = STRIP * PANEL / WIDE };

/* Products of so few rows, or of few columns or depth, are made panel by panel, and few rows read B as it lies. More read it
 * packed: in a wide matrix a panel lies on as many pages as it is deep. */
enum { FEW_ROWS = 64, BLOCK_SIZE = 64, DEPTH = 512, PART_OF_DEPTH = 128 };

/* In multiply-adds, what it costs to pack an element; and rows that are packed side by side, as many as a processor follows
 * streams. */
enum { PACKING_COST = 25, TOGETHER = 16 };

/* C[m, n] = (keep ? C : 0) + A B, summed in `leaves`. */
typedef struct {
    int64_t m, n, k, leaves;
    const float *a;
    int64_t a_row, a_column;
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    int transposed, keep;
} Product;

/* A strip of A and a panel of B; columns at `next`, whose rows are `next_row` apart, are read soon, unless that is 0. */
typedef struct {
    const float *a, *b, *next;
    int64_t a_row, a_column, ldb, next_row;
} Factors;

/* -- tiles ------------------------------------------------------------------------------------------------------- */

/* `rows` x `parts` registers of C; both are known while compiling, so that the sums stay in registers. */
ALWAYS_INLINE void tile(int rows, int parts, int64_t k, Factors f, float *c, int64_t ldc, int keep) {
    lanes sum[STRIP][WIDE / LANES];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) sum[r][v] = keep ? *(const lanes *)(c + r * ldc + v * LANES) : (lanes){0};
    for (int64_t p = 0; p < k; p++) {
        lanes right[WIDE / LANES];
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) right[v] = *(const lanes *)(f.b + p * f.ldb + v * LANES);
        if (f.next_row)
            for (int v = 0; v < parts * LANES; v += VEC) __builtin_prefetch(f.next + p * f.next_row + v, 0, 2);
        else
            __builtin_prefetch(f.a + (p + 8) * f.a_column);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            float left = f.a[r * f.a_row + p * f.a_column];
#pragma GCC unroll 8
            for (int v = 0; v < parts; v++) sum[r][v] += left * right[v];
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) *(lanes *)(c + r * ldc + v * LANES) = sum[r][v];
}

#define TILE(COUNT)                                                                                                   \
    case COUNT:                                                                                                       \
        if (is_packed) f.a_row = 1, f.a_column = COUNT, f.ldb = PANEL, f.next_row = 0;                                \
        if (COUNT * vecs * VEC <= STRIP * PANEL) tile(COUNT % (STRIP + 1), vecs * VEC / LANES, k, f, c, ldc, keep);   \
        break;

/* `rows` x `vecs` vectors of C. What is known while compiling of factors that are both packed makes the tile faster. */
ALWAYS_INLINE void any_tile(int64_t rows, int vecs, int is_packed, int64_t k, Factors f, float *c, int64_t ldc, int keep) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7)
        TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
    }
}
#undef TILE

static void leaf_tile(int64_t rows, int vecs, int64_t k, Factors f, float *c, int64_t ldc, int keep) {
    int is_packed = f.a_row == 1 && f.a_column == rows && f.ldb == PANEL && !f.next_row;
    if (is_packed && vecs * VEC == PANEL)
        any_tile(rows, PANEL / VEC, 1, k, f, c, ldc, keep);
    else if (vecs == 1)
        any_tile(rows, 1, 0, k, f, c, ldc, keep);
    else
        any_tile(rows, 2, 0, k, f, c, ldc, keep);
}

static void add_tiles(int64_t rows, int64_t width, const float *x, const float *y, float *to, int64_t ld) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width, to += ld)
        for (int64_t j = 0; j < width; j += VEC) *(vec16 *)(to + j) = *(const vec16 *)(x + j) + *(const vec16 *)(y + j);
}

/* The same of all leaves, each `leaf` deep. */
static void tree_tile(int64_t rows, int vecs, int64_t leaf, int64_t leaves, Factors f, float *c, int64_t ldc) {
    /* Sums of 2^level leaves that wait for their neighbours', as in a binary counter. */
    float sums[MOST_LEVELS][STRIP * PANEL], sum[STRIP * PANEL];
    int64_t width = vecs * VEC;
    for (int64_t i = 0; i < leaves; i++, f.a += leaf * f.a_column, f.b += leaf * f.ldb, f.next += leaf * f.next_row) {
        leaf_tile(rows, vecs, leaf, f, i & 1 ? sum : sums[0], width, 0);
        for (int64_t level = 0; i >> level & 1; level++) {
            int is_last = i + 1 == leaves && i >> (level + 1) == 0;
            float *to = is_last ? c : i >> (level + 1) & 1 ? sum : sums[level + 1];
            add_tiles(rows, width, sums[level], sum, to, is_last ? ldc : width);
        }
    }
}

/* `rows` x `width` numbers of C, whose product is `depth` deep. */
ALWAYS_INLINE void part_of(const Product *t, int64_t rows, int64_t width, int64_t depth, Factors f, float *c, int keep) {
    float edge[STRIP * PANEL], *to = width % VEC ? edge : c;
    int64_t ld = to == edge ? PANEL : t->ldc, vecs = (to == edge ? PANEL : width) / VEC;
    for (int64_t r = 0; r < rows && to == edge && keep; r++) memcpy(edge + r * PANEL, c + r * t->ldc, width * sizeof(float));
    if (t->leaves > 1)
        tree_tile(rows, vecs, depth / t->leaves, t->leaves, f, to, ld);
    else
        leaf_tile(rows, vecs, depth, f, to, ld, keep);
    for (int64_t r = 0; r < rows && to == edge; r++) memcpy(c + r * t->ldc, edge + r * PANEL, width * sizeof(float));
}

/* -- packing ----------------------------------------------------------------------------------------------------- */

/* The height of the next strip of m rows: all are about as high, as a low one waits for its sums. */
static int64_t strip_height(int64_t m) {
    int64_t strips = (m + STRIP - 1) / STRIP;
    return (m + strips - 1) / strips;
}

/* `rows` rows of k numbers become columns of `to`, whose rows are `step` apart. Whole vectors are written, of which the next
 * row takes back what is too much: there is room for another VEC behind the last one. */
ALWAYS_INLINE void turn(int64_t rows, int64_t k, const float *from, int64_t row, float *to, int64_t step) {
    int64_t whole = k / LANES * LANES;
    for (int64_t first = (rows - 1) / LANES * LANES; first >= 0; first -= LANES)
        for (int64_t p = 0; p < whole; p += LANES) {
            lanes x[LANES];
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) {
                const float *source = from + (first + i < rows ? first + i : rows - 1) * row + p;
                x[i] = *(const lanes *)source;
                /* The next strip or panel: these are more streams than the processor follows. */
                __builtin_prefetch(source + rows * row, 0, 2);
            }
            transpose_lanes(x);
#pragma GCC unroll 16
            for (int64_t q = 0; q < LANES; q++) *(lanes *)(to + (p + q) * step + first) = x[q];
        }
    for (int64_t p = whole; p < k; p++)
        for (int64_t i = 0; i < rows; i++) to[p * step + i] = from[i * row + p];
}

/* `rows` of A as strips [k, height], with room for another VEC. */
static void pack_strips(int64_t rows, int64_t k, const float *a, int64_t a_row, int64_t a_column, float *to) {
    int64_t height;
    if (a_column == 1) {
        for (int64_t r = 0; r < rows; r += height) {
            height = strip_height(rows - r);
            turn(height, k, a + r * a_row, a_row, to + r * k, height);
        }
        return;
    }
    for (int64_t start = 0; start < k; start += TOGETHER)
        for (int64_t r = 0; r < rows; r += height) {
            int64_t end = k - start < TOGETHER ? k : start + TOGETHER;
            height = strip_height(rows - r);
            for (int64_t p = start; p < end; p++) {
                const float *from = a + r * a_row + p * a_column;
                float *strip = to + r * k + p * height;
                /* The next one takes back what is too much. */
                if (a_row == 1 && r + STRIP + LANES <= rows && p + 1 < k)
                    for (int64_t i = 0; i < height; i += LANES) *(lanes *)(strip + i) = *(const lanes *)(from + i);
                else
                    for (int64_t i = 0; i < height; i++) strip[i] = from[i * a_row];
            }
        }
}

/* `width` columns of B [k, .], or of B [., k]^T, as a panel [k, PANEL], zero beyond them. */
static void pack_panel(int64_t k, int64_t width, const float *b, int64_t ldb, int transposed, float *to) {
    if (transposed) turn(width, k, b, ldb, to, PANEL);
    for (int64_t p = 0; p < k; p++, to += PANEL) {
        if (!transposed && width == PANEL)
            for (int64_t q = 0; q < PANEL; q += VEC) *(vec16 *)(to + q) = *(const vec16 *)(b + p * ldb + q);
        else if (width < PANEL) {
            if (!transposed) memcpy(to, b + p * ldb, width * sizeof(float));
            memset(to + width, 0, (PANEL - width) * sizeof(float));
        }
    }
}

/* -- products ---------------------------------------------------------------------------------------------------- */

static int64_t cache_bytes(int level, int64_t otherwise) {
    char path[64], text[32] = "";
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", level);
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    int64_t kib = fgets(text, sizeof text, file) ? atoll(text) : 0;
    fclose(file);
    return kib <= 0 ? otherwise : strchr(text, 'M') ? kib << 20 : kib << 10;
}

/* `depth` of blocks, `rows` of A's, and `columns` of B's. A strip and a panel take an eighth of the second cache, and A's
 * block a third; B's comes from the last one. */
typedef struct {
    int64_t depth, rows, columns;
} Blocks;

static Blocks blocks_of(const Product *t) {
    static int64_t second, last;
    if (!last) {
        second = cache_bytes(2, 1 << 19);
        last = cache_bytes(3, 1 << 23);
        last = last > 1 << 25 ? 1 << 25 : last;
    }
    const int64_t size = sizeof(float), most = second / 8 / size / (STRIP + PANEL) / VEC * VEC;
    int64_t count = t->leaves > 1 ? 1 : (t->k + most - 1) / most, depth = t->leaves > 1 ? t->k : padded((t->k + count - 1) / count);
    int64_t strips = second / 3 / size / depth / STRIP, panels = last / 8 / size / depth / PANEL, needed = (t->n + PANEL - 1) / PANEL;
    panels = panels < 1 ? 1 : panels > needed ? needed : panels;
    return (Blocks){depth, strips > 1 ? strips * STRIP : STRIP, panels * PANEL};
}

/* The calling thread's memory for strips or for panels, which its next product takes over; NULL without memory. */
static float *own_memory(int of_panels, int64_t floats) {
    static __thread float *memory[2];
    static __thread int64_t room[2];
    if (room[of_panels] < floats) {
        free(memory[of_panels]);
        memory[of_panels] = aligned_alloc(64, padded(floats) * sizeof(float));
        room[of_panels] = memory[of_panels] ? floats : 0;
    }
    return memory[of_panels];
}

/* 0 if there was memory for it. The first block of rows packs the panels, each right before it reads it, when what is to be
 * packed has come to the caches with the one before. */
static int by_blocks(const Product *t) {
    Blocks size = blocks_of(t);
    float *strips = own_memory(0, size.rows * size.depth + VEC), *panels = own_memory(1, size.columns * size.depth + VEC);
    if (!strips || !panels) return 1;
    for (int64_t p = 0; p == 0 || p < t->k; p += size.depth)
        for (int64_t j = 0; j < t->n; j += size.columns) {
            int64_t depth = t->k - p < size.depth ? t->k - p : size.depth, end = t->n - j < size.columns ? t->n : j + size.columns;
            for (int64_t row = 0, height; row < t->m; row += size.rows) {
                int64_t rows = t->m - row < size.rows ? t->m - row : size.rows;
                pack_strips(rows, depth, t->a + row * t->a_row + p * t->a_column, t->a_row, t->a_column, strips);
                for (int64_t i = j; i < end; i += PANEL) {
                    int64_t width = end - i < PANEL ? end - i : PANEL, next_row = 0;
                    const float *b = t->transposed ? t->b + i * t->ldb + p : t->b + p * t->ldb + i;
                    float *panel = panels + (i - j) * depth;
                    if (row == 0) {
                        pack_panel(depth, width, b, t->ldb, t->transposed, panel);
                        next_row = t->transposed || end - i < 2 * PANEL ? 0 : t->ldb;
                    }
                    for (int64_t r = 0; r < rows; r += height, next_row = 0) {
                        height = strip_height(rows - r);
                        Factors f = {strips + r * depth, panel, b + PANEL, 1, height, PANEL, next_row};
                        part_of(t, height, width, depth, f, t->c + (row + r) * t->ldc + i, t->keep || p > 0);
                    }
                }
            }
        }
    return 0;
}

/* Each panel with all rows of A as they lie. Of few rows it is a matter of reading B, which then goes from begin to end in
 * stretches of its depth; so it does where A is too large for the first cache. Not for trees of columns that are not whole vectors. */
static void by_panels(const Product *t) {
    _Alignas(64) float copied[DEPTH * PANEL + VEC];
    int copies = t->transposed || t->m > FEW_ROWS;
    int64_t step = t->leaves > 1 ? t->k : copies && !t->transposed ? DEPTH : PART_OF_DEPTH;
    int64_t stretch = t->m > FEW_ROWS || !copies ? step : t->k, most = copies || t->m > WIDE_ROWS ? PANEL : WIDE;
    for (int64_t start = 0; start == 0 || start < t->k; start += stretch)
        for (int64_t j = 0, width; j < t->n; j += width) {
            width = t->n - j >= most ? most : t->n - j < PANEL ? t->n - j : PANEL;
            for (int64_t p = start; p == 0 || p < (t->k - start < stretch ? t->k : start + stretch); p += step) {
                int64_t depth = t->k - p < step ? t->k - p : step;
                const float *panel = t->transposed ? t->b + j * t->ldb + p : t->b + p * t->ldb + j;
                /* Behind the last panel are the rows of B that follow, or what lies behind it: the next expert's. */
                const float *next = panel + (j + width < t->n ? width : depth * t->ldb - j);
                Factors f = {NULL, panel, next, t->a_row, t->a_column, t->ldb, t->transposed ? 0 : t->ldb};
                if (copies || width % VEC) {
                    pack_panel(depth, width, panel, t->ldb, t->transposed, copied);
                    f.b = copied, f.ldb = PANEL;
                }
                for (int64_t i = 0, rows; i < t->m; i += rows, f.next_row = 0) {
                    rows = strip_height(t->m - i);
                    f.a = t->a + i * t->a_row + p * t->a_column;
                    part_of(t, rows, width, depth, f, t->c + i * t->ldc + j, t->keep || p > 0);
                }
            }
        }
}

/* The member's rows or columns, of which each packs both factors for itself: what another core has packed comes from its
 * cache, which is slower. So the factor that all pack should be the smaller one, and no member should wait for others. */
static Product share_of(Member member, Product t) {
    int64_t panels = (t.n + PANEL - 1) / PANEL, begin, end;
    int64_t rows = (t.m + member.size - 1) / member.size, columns = (panels + member.size - 1) / member.size * PANEL;
    if (rows * panels * PANEL + PACKING_COST * (rows + t.n) < t.m * columns + PACKING_COST * (t.m + columns)) {
        share_out(member, t.m, &begin, &end);
        t.a += begin * t.a_row, t.c += begin * t.ldc, t.m = end - begin;
    } else {
        share_out(member, panels, &begin, &end);
        begin *= PANEL, end = end * PANEL < t.n ? end * PANEL : t.n;
        t.b += begin * (t.transposed ? t.ldb : 1), t.c += begin, t.n = end - begin;
    }
    return t;
}

void gemm(Member member, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
          const float *b, int64_t ldb, int transposed, float *c, int64_t ldc, int keep) {
    Product t = share_of(member, (Product){m, n, k, 1, a, a_row, a_column, b, ldb, c, ldc, transposed, keep});
    if (t.m <= FEW_ROWS || t.n < BLOCK_SIZE || k < BLOCK_SIZE || by_blocks(&t)) by_panels(&t);
}

int gemm_tree(Member member, int64_t m, int64_t n, int64_t k, int64_t leaves, const float *a, int64_t lda,
              const float *b, int64_t ldb, float *c, int64_t ldc) {
    Product t = share_of(member, (Product){m, n, k, leaves, a, lda, 1, b, ldb, c, ldc, 0, 0});
    if (t.m > FEW_ROWS || t.n % VEC) return by_blocks(&t);
    by_panels(&t);
    return 0;
}
