/* The few functions of MindSpore's oneDNN that products in bfloat16 need: its wheel has the library and no headers.
 *
 * The names, numbers and types are those of oneDNN 3's C API (dnnl_types.h); another major version is refused, and so is
 * a library that would start threads of its own.
 */
#ifndef MINDGRPO_ONEDNN_H
#define MINDGRPO_ONEDNN_H

#include <stddef.h>
#include <stdint.h>

/* NULL where oneDNN is there and can be used, else what is wrong with it. */
const char *onednn_error(void);

/* The instruction sets that oneDNN uses, as bits: dnnl_get_effective_cpu_isa, which ONEDNN_MAX_CPU_ISA limits. */
int onednn_instruction_sets(void);

/* Whether it multiplies bfloat16 by instructions of this processor: x86 with AVX-512, or Arm with BF16. */
int has_bfloat16_products(void);

/* How bfloat16 B [depth, width] is packed for products of any rows. Kept for ever; NULL where oneDNN fails. */
typedef struct Packing Packing;
const Packing *packing_of(int64_t depth, int64_t width);
int64_t packed_bytes(const Packing *packing);

/* B, row by row without gaps, into `packed`, 64-byte aligned. 0 if all went well. */
int pack(const Packing *packing, const uint16_t *b, void *packed);

/* Float32 C [rows, width], `ldc` floats from one row to the next, = bfloat16 A [rows, depth] B. Kept for ever, and may be
 * run by several threads at once; NULL where oneDNN fails. */
typedef struct Product Product;
const Product *product_of(const Packing *packing, int64_t rows, int64_t ldc);
int64_t product_scratch_bytes(const Product *product);

/* 0 if all went well. `scratch` is the caller's, 64-byte aligned. */
int run_product(const Product *product, const uint16_t *a, const void *packed, float *c, void *scratch);

#endif
