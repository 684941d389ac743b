// Packed matrices: packing, and products with a few or many rows.
//
// Every element of a product is one chain of fused multiply-adds in order of depth, whatever tile computes it: a row's result is the
// same bits alone and in any batch. Each panel is read from memory once and serves all rows.
#include "kernels.h"

static const int WIDEST[9] = {0, 8, 8, 0, 4, 0, 0, 0, 3}; // panels of a tile, by its rows

int lanes(void) { return LANES; }

// Whether 16-bit floats are converted in hardware; else they are kept as float32.
int has_float16(void) {
#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}

// source: [depth, width] contiguous, elements of `size` bytes; packed: room for depth * ceil(width / LANES) * LANES of them.
void pack(const char *source, int64_t depth, int64_t width, int64_t size, char *packed) {
    for (int64_t first = 0; first < width; first += LANES)
        for (int64_t k = 0; k < depth; k++, packed += LANES * size) {
            int64_t count = width - first < LANES ? width - first : LANES;
            memset(packed, 0, (size_t)(LANES * size));
            memcpy(packed, source + (k * width + first) * size, (size_t)(count * size));
        }
}

INLINE vec weights(const void *data, int64_t place, const int format) {
    if (format == FLOAT32) return load((const float *)data + place * LANES);
    const uint16_t *p = (const uint16_t *)data + place * LANES;
    if (format == BFLOAT16) {
        typedef uint32_t wide __attribute__((vector_size(LANES * 4)));
        return (vec)(__builtin_convertvector(*(const halves *)p, wide) << 16);
    }
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    typedef _Float16 narrow __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    return __builtin_convertvector(*(const narrow *)p, vec);
#else
    return (vec){0}; // never packed here: has_float16() is 0
#endif
}

// Writes a tile's sums: bias, scale, addition.
static void finish(int rows, int panels, const vec *total, const Matrix *matrix, int64_t panel, float *const *to, const Output *out) {
    for (int v = 0; v < panels; v++) {
        const int64_t column = (panel + v) * LANES, left = matrix->width - column;
        vec bias = {0}, scale = bias + 1.0f;
        if (out->bias) bias = left >= LANES ? load(out->bias + column) : load_part(out->bias + column, left);
        if (out->scale) scale = left >= LANES ? load(out->scale + column) : load_part(out->scale + column, left);
        for (int i = 0; i < rows; i++) {
            vec y = (total[i * panels + v] + bias) * scale;
            if (left >= LANES) {
                store(to[i] + column, out->add ? load(to[i] + column) + y : y);
            } else {
                store_part(to[i] + column, out->add ? load_part(to[i] + column, left) + y : y, left);
            }
        }
    }
}

// `rows` and `panels` are constants where this is called, so that all of `total` lives in registers.
INLINE void tile(const int rows, const int panels, const int format, const Matrix *matrix, int64_t panel, int64_t row, const Input *in,
                 const Output *out) {
    const float *from[8];
    float *to[8];
    int64_t group = row / in->per, place = row % in->per;
    for (int i = 0; i < rows; i++) {
        from[i] = in->base + group * in->jump + place * in->stride;
        if (++place == in->per) place = 0, group++;
    }
    group = row / out->per, place = row % out->per;
    for (int i = 0; i < rows; i++) {
        to[i] = out->base + group * out->jump + place * out->stride;
        if (++place == out->per) place = 0, group++;
    }
    vec total[8][8];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++) total[i][v] = (vec){0};
    const int64_t depth = matrix->depth, span = depth / in->taps;
    int64_t at = panel * depth;
    for (int64_t tap = 0; tap < in->taps; tap++) {
        for (int64_t k = 0; k < span; k++, at++) {
            vec w[8];
#pragma GCC unroll 8
            for (int v = 0; v < panels; v++) w[v] = weights(matrix->data, at + v * depth, format);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
                for (int v = 0; v < panels; v++) total[i][v] += from[i][k] * w[v];
        }
        for (int i = 0; i < rows; i++) from[i] += in->tap_stride;
    }
    vec done[64]; // a copy: what is addressed in a loop that is not unrolled would not stay in registers above
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++) done[i * panels + v] = total[i][v];
    finish(rows, panels, done, matrix, panel, to, out);
}

#define TILE(ROWS, PANELS)                                                                                                                          \
    case ROWS * 16 + PANELS:                                                                                                                        \
        tile(ROWS, PANELS, format, matrix, panel, row, in, out);                                                                                    \
        break;

INLINE void any_tile(int rows, int panels, const int format, const Matrix *matrix, int64_t panel, int64_t row, const Input *in, const Output *out) {
    switch (rows * 16 + panels) {
        TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(1, 4) TILE(1, 8)
        TILE(2, 1) TILE(2, 2) TILE(2, 3) TILE(2, 4) TILE(2, 8)
        TILE(4, 1) TILE(4, 2) TILE(4, 3) TILE(4, 4)
        TILE(8, 1) TILE(8, 2) TILE(8, 3)
    }
}

static void tile_float32(int rows, int panels, const Matrix *matrix, int64_t panel, int64_t row, const Input *in, const Output *out) {
    any_tile(rows, panels, FLOAT32, matrix, panel, row, in, out);
}

static void tile_bfloat16(int rows, int panels, const Matrix *matrix, int64_t panel, int64_t row, const Input *in, const Output *out) {
    any_tile(rows, panels, BFLOAT16, matrix, panel, row, in, out);
}

static void tile_float16(int rows, int panels, const Matrix *matrix, int64_t panel, int64_t row, const Input *in, const Output *out) {
    any_tile(rows, panels, FLOAT16, matrix, panel, row, in, out);
}

// x [rows, depth] -> out [rows, width].
void linear(const Matrix *matrix, int64_t rows, const float *x, float *out) {
    multiply(matrix, rows, dense_in(x, matrix->depth), dense_out(out, matrix->width));
}

// Tiles have 1, 2, 4 or 8 rows.
static int tile_rows(int64_t rows, int most) {
    while (most > rows) most /= 2;
    return most;
}

// out = in x matrix, `rows` rows.
void multiply(const Matrix *matrix, int64_t rows, Input in, Output out) {
    const int64_t panels = (matrix->width + LANES - 1) / LANES;
    const int most_rows = ACCUMULATORS == 24 ? 8 : 4;
    const int high = tile_rows(rows, most_rows);
    int wide = WIDEST[high];
    while (wide > 1 && high * wide > ACCUMULATORS) wide = wide > 4 ? 4 : wide - 1;
    for (int64_t panel = 0; panel < panels;) {
        // Even shares: 10 panels by at most 3 are 3, 3, 2, 2.
        const int64_t left = panels - panel, parts = (left + wide - 1) / wide;
        int64_t width = (left + parts - 1) / parts;
        if (width > 4 && width < 8) width = 4;
        for (int64_t row = 0; row < rows;) {
            const int height = tile_rows(rows - row, high);
            if (matrix->format == FLOAT32) {
                tile_float32(height, (int)width, matrix, panel, row, &in, &out);
            } else if (matrix->format == BFLOAT16) {
                tile_bfloat16(height, (int)width, matrix, panel, row, &in, &out);
            } else {
                tile_float16(height, (int)width, matrix, panel, row, &in, &out);
            }
            row += height;
        }
        panel += width;
    }
}
