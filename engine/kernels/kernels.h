// What the kernels share: vectors as wide as the CPU's, packed matrices, and the structures that Python fills in (native.py mirrors them).
//
// Plain C with GCC's vector extensions: the same source compiles to AVX-512, AVX2, SSE and NEON. No fast-math: the range reductions
// below rely on the order of their operations.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ACCUMULATORS 24
#elif defined(__AVX__)
#define LANES 8
#define ACCUMULATORS 12
#else
#define LANES 4
#define ACCUMULATORS 24
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); // at any float's address
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

// [depth, width] in panels of LANES columns: data[panel][depth][LANES], the last panel filled up with zeros.
typedef struct {
    const void *data;
    int32_t depth, width, format, unused;
} Matrix;

// `scale_attention` and `scale_mlp` (a factor per channel of what a layer adds) may be null.
typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *norm_attention, *norm_mlp, *qk_scale, *scale_attention, *scale_mlp;
} Layer;

typedef struct {
    const Layer *layer;
    const float *norm;
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, qk_norm;
    float eps;
} Stack;

// Row r of a matrix product reads taps x (depth / taps) floats: tap j at base + (r / per) * jump + (r % per) * stride + j * tap_stride.
// A causal convolution over [time, channel] is such a product, and so is a linear layer (one tap).
typedef struct {
    const float *base;
    int64_t stride, per, jump, taps, tap_stride;
} Input;

// Row r goes to base + (r / per) * jump + (r % per) * stride, as scale * (product + bias), or is added there. Bias and scale may be null.
typedef struct {
    float *base;
    int64_t stride, per, jump;
    const float *bias, *scale;
    int add;
} Output;

void multiply(const Matrix *matrix, int64_t rows, Input in, Output out);
void normalize(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out);
void project(const Stack *stack, const Layer *layer, int64_t rows, const float *x, const float *const *cos_sin, float *normed, float *qkv);
void attend(const float *q, const float *keys, const float *values, int64_t head_stride, int64_t positions, const Stack *stack, float *scores, float *out);
void conclude(const Stack *stack, const Layer *layer, int64_t rows, const float *mixed, float *x, float *normed, float *inner);
int64_t sample(const float *logits, int64_t width, float temperature, int64_t top_k, float top_p, int greedy, double number, float *scratch);
int run_stack(const Stack *stack, int64_t rows, float *x, const float *cos, const float *sin, const int64_t *positions, const int64_t *slots, float *keys,
              float *values, const int64_t *strides, float *trace);

INLINE Input dense_in(const float *base, int64_t width) { return (Input){base, width, INT64_MAX, 0, 1, 0}; }
INLINE Output dense_out(float *base, int64_t width) { return (Output){base, width, INT64_MAX, 0, NULL, NULL, 0}; }

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

// The first `count` < LANES floats; the rest are zero.
INLINE vec load_part(const float *p, int64_t count) {
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
    vec v = {0};
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
#endif
}

INLINE void store_part(float *p, vec v, int64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
#else
    memcpy(p, &v, (size_t)count * sizeof(float));
#endif
}

INLINE float sum(vec v) {
#if LANES == 16
    typedef float vec8 __attribute__((vector_size(32)));
    vec8 w = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
#define w v
#endif
#if LANES >= 8
    typedef float vec4 __attribute__((vector_size(16)));
    vec4 x = __builtin_shufflevector(w, w, 0, 1, 2, 3) + __builtin_shufflevector(w, w, 4, 5, 6, 7);
#else
#define x v
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
#undef w
#undef x
}

INLINE float dot(const float *a, const float *b, int64_t width) {
    vec total = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += load(a + i) * load(b + i);
    if (i < width) total += load_part(a + i, width - i) * load_part(b + i, width - i);
    return sum(total);
}

// Adding 1.5 * 2^23 rounds a float to an integer, which then stands in its low bits.
#define ROUNDER 12582912.0f

// e^x to about 1 ulp: x = n ln 2 + r, ln 2 in two parts (Cody and Waite), polynomial of Cephes' expf.
INLINE vec exponential(vec x) {
    const vec zero = {0}, low = zero - 87.3f, high = zero + 88.3f;
    x = pick(x < low, low, x);
    x = pick(x > high, high, x);
    vec shifted = x * 1.44269504f + ROUNDER;
    vec n = shifted - ROUNDER;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = ((ivec)shifted - (ivec)(zero + ROUNDER) + 127) << 23;
    return p * (vec)power;
}

// sin(x)^2: its period is pi, so the sign of the reduced sine does not matter. pi in three parts; SLEEF's sine on [-pi/2, pi/2].
INLINE vec squared_sine(vec x) {
    const vec zero = {0};
    vec n = (x * 0.318309886f + ROUNDER) - ROUNDER;
    vec r = x - n * 3.140625f;
    r = r - n * 9.67502593994140625e-4f;
    r = r - n * 1.509957990978376432e-7f;
    vec s = r * r;
    vec p = zero + 2.6083159809786593541503e-06f;
    p = p * s - 0.0001981069071916863322258f;
    p = p * s + 0.00833307858556509017944336f;
    p = p * s - 0.166666597127914428710938f;
    vec sine = p * s * r + r;
    return sine * sine;
}
