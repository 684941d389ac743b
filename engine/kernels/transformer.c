// A stack of pre-norm layers over rows that each stand in a slot of their own, or in lockstep: Talker and Code Predictor.
// Twins: Layer, Attention and MLP in model/layers.py, KVCache.attend in model/talker.py.
#include "kernels.h"

void normalize(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out) {
    for (int64_t row = 0; row < rows; row++, x += width, out += width) {
        const float factor = 1.0f / sqrtf(dot(x, x, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
    }
}

// Half-split rotation in place: x * cos + roll(x, half) * sin; the first half's sign lies in sin.
static void rotate(float *x, const float *cos, const float *sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// x [rows, hidden] -> qkv [rows, heads + 2 kv_heads, head_dim], q and k normed, scaled and rotated. cos_sin: two pointers a row.
void project(const Stack *stack, const Layer *layer, int64_t rows, const float *x, const float *const *cos_sin, float *normed, float *qkv) {
    const int64_t width = stack->head_dim, turned = stack->heads + stack->kv_heads, all = (turned + stack->kv_heads) * width;
    normalize(x, layer->norm_attention, stack->eps, rows, stack->hidden, normed);
    multiply(&layer->qkv, rows, dense_in(normed, stack->hidden), dense_out(qkv, all));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < turned; head++) {
            float *own = qkv + row * all + head * width;
            const float *scale = layer->qk_scale + head * width;
            const float factor = stack->qk_norm ? 1.0f / sqrtf(dot(own, own, width) / (float)width + stack->eps) : 1.0f;
            for (int64_t i = 0; i < width; i++) own[i] = own[i] * factor * scale[i];
            rotate(own, cos_sin[2 * row], cos_sin[2 * row + 1], width);
        }
}

// Queries [heads, head_dim] of one row over keys and values [positions, head_dim] of each kv head. scores: room for `positions`.
void attend(const float *q, const float *keys, const float *values, int64_t head_stride, int64_t positions, const Stack *stack, float *scores, float *out) {
    const int64_t width = stack->head_dim, group = stack->heads / stack->kv_heads;
    for (int64_t head = 0; head < stack->heads; head++) {
        const float *own = keys + head / group * head_stride, *query = q + head * width;
        float best = -INFINITY;
        for (int64_t p = 0; p < positions; p++) {
            scores[p] = dot(query, own + p * width, width);
            best = scores[p] > best ? scores[p] : best;
        }
        vec total = {0};
        int64_t p = 0;
        for (; p + LANES <= positions; p += LANES) {
            vec e = exponential(load(scores + p) - best);
            store(scores + p, e);
            total += e;
        }
        float sum_all = sum(total);
        if (p < positions) {
            vec e = exponential(load_part(scores + p, positions - p) - best);
            store_part(scores + p, e, positions - p);
            for (int64_t i = p; i < positions; i++) sum_all += scores[i];
        }
        const float share = 1.0f / sum_all;
        own = values + head / group * head_stride;
        int64_t i = 0;
        for (; i + 4 * LANES <= width; i += 4 * LANES) {
            vec a = {0}, b = a, c = a, d = a;
            for (int64_t at = 0; at < positions; at++) {
                const float *v = own + at * width + i;
                a += scores[at] * load(v), b += scores[at] * load(v + LANES), c += scores[at] * load(v + 2 * LANES), d += scores[at] * load(v + 3 * LANES);
            }
            float *to = out + head * width + i;
            store(to, a * share), store(to + LANES, b * share), store(to + 2 * LANES, c * share), store(to + 3 * LANES, d * share);
        }
        for (; i < width; i += LANES) {
            const int64_t count = width - i < LANES ? width - i : LANES;
            vec a = {0};
            for (int64_t at = 0; at < positions; at++) a += scores[at] * load_part(own + at * width + i, count);
            store_part(out + head * width + i, a * share, count);
        }
    }
}

// x += mixed x out; x += mlp(norm(x)). inner: [rows, 2 inner].
void conclude(const Stack *stack, const Layer *layer, int64_t rows, const float *mixed, float *x, float *normed, float *inner) {
    const int64_t width = stack->inner;
    Output to = dense_out(x, stack->hidden);
    to.add = 1, to.scale = layer->scale_attention;
    multiply(&layer->out, rows, dense_in(mixed, (int64_t)stack->heads * stack->head_dim), to);
    normalize(x, layer->norm_mlp, stack->eps, rows, stack->hidden, normed);
    multiply(&layer->gate_up, rows, dense_in(normed, stack->hidden), dense_out(inner, 2 * width));
    for (int64_t row = 0; row < rows; row++) {
        float *gate = inner + row * 2 * width, *up = gate + width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            vec g = load(gate + i);
            store(gate + i, g / (1.0f + exponential(-g)) * load(up + i));
        }
        if (i < width) {
            vec g = load_part(gate + i, width - i);
            store_part(gate + i, g / (1.0f + exponential(-g)) * load_part(up + i, width - i), width - i);
        }
    }
    to.scale = layer->scale_mlp;
    multiply(&layer->down, rows, dense_in(inner, 2 * width), to);
}

// x [rows, hidden]: inputs, replaced by the normed hidden states. Row r is position positions[r] of slot slots[r]; of the rows of one
// slot the earlier positions' keys must be in the cache or among the rows. cos, sin: [positions, head_dim]. keys, values: strides of
// layer, slot and kv head. trace, where wanted: [layers + 1, rows, hidden], the input of each layer and what is returned.
// Returns 0, or -1 without memory.
int run_stack(const Stack *stack, int64_t rows, float *x, const float *cos, const float *sin, const int64_t *positions, const int64_t *slots, float *keys,
              float *values, const int64_t *strides, float *trace) {
    const int64_t width = stack->head_dim, heads = stack->heads, kv_heads = stack->kv_heads, all = (heads + 2 * kv_heads) * width;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++) longest = positions[row] + 1 > longest ? positions[row] + 1 : longest;
    const int64_t mixed_width = heads * width;
    const size_t floats = (size_t)(rows * (stack->hidden + all + mixed_width + 2 * stack->inner) + longest);
    float *normed = malloc(floats * sizeof(float) + (size_t)rows * 2 * sizeof(float *));
    if (!normed) return -1;
    const float **cos_sin = (const float **)normed; // pointers first: they want the alignment
    normed = (float *)(cos_sin + 2 * rows);
    float *qkv = normed + rows * stack->hidden, *mixed = qkv + rows * all, *inner = mixed + rows * mixed_width, *scores = inner + rows * 2 * stack->inner;
    for (int64_t row = 0; row < rows; row++) cos_sin[2 * row] = cos + positions[row] * width, cos_sin[2 * row + 1] = sin + positions[row] * width;
    for (int64_t number = 0; number < stack->layers; number++) {
        const Layer *layer = stack->layer + number;
        if (trace) memcpy(trace + number * rows * stack->hidden, x, (size_t)(rows * stack->hidden) * sizeof(float));
        project(stack, layer, rows, x, cos_sin, normed, qkv);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const float *key = qkv + row * all + (heads + head) * width;
                const int64_t place = number * strides[0] + slots[row] * strides[1] + head * strides[2] + positions[row] * width;
                memcpy(keys + place, key, (size_t)width * sizeof(float));
                memcpy(values + place, key + kv_heads * width, (size_t)width * sizeof(float));
            }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t place = number * strides[0] + slots[row] * strides[1];
            attend(qkv + row * all, keys + place, values + place, strides[2], positions[row] + 1, stack, scores, mixed + row * mixed_width);
        }
        conclude(stack, layer, rows, mixed, x, normed, inner);
    }
    normalize(x, stack->norm, stack->eps, rows, stack->hidden, x);
    if (trace) memcpy(trace + stack->layers * rows * stack->hidden, x, (size_t)(rows * stack->hidden) * sizeof(float));
    free(cos_sin);
    return 0;
}
