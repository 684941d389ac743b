// The codec decoder in one call. Twin: model/codec.py, whose state it reads and writes in place, slot by slot.
//
// Activations lie [time, channel]: a causal convolution is then a matrix product whose rows overlap. What runs at a few columns a frame
// is weight traffic and takes all streams at once; what runs at hundreds is arithmetic and takes a stream and a frame at a time, so that
// it stays in the second-level cache.
#include "kernels.h"

typedef struct {
    Matrix matrix; // depth: tap, channel
    const float *bias;
    int32_t c_in, c_out, taps, dilation, state, unused;
} Conv;

// A transposed convolution, kernel (1 + overlaps) * stride: `now` [c_in, stride * c_out] is what a column adds to its own `stride` outputs,
// `later` what it adds to the next ones.
typedef struct {
    Matrix now, later;
    const float *bias; // [stride * c_out]
    int32_t c_in, c_out, stride, overlaps, state, unused;
} Upsample;

// Both repeat every `period` values, a common multiple of the channels and LANES: rows are passed over as one long vector.
typedef struct {
    const float *frequency, *depth;
    int64_t period;
} Snake;

typedef struct {
    Snake first, second;
    Conv dilated, pointwise;
} Unit;

typedef struct {
    Snake snake;
    Upsample up;
    Unit units[3];
} Block;

// `depthwise` is [tap, channel]; `gamma` scales what is added.
typedef struct {
    Upsample up;
    const float *depthwise, *depthwise_bias, *norm_weight, *norm_bias, *bias_1, *bias_2, *gamma;
    Matrix pointwise_1, pointwise_2;
    int32_t taps, state;
    float eps;
    int32_t unused;
} Widen;

typedef struct {
    const float *tables; // [groups * codebook, half]
    Matrix projection;   // [2 half, codebook_dim]
    Conv entry;
    Matrix input, output; // of the transformer
    const float *input_bias, *output_bias, *frequency;
    const Stack *stack;
    const int32_t *cache; // per layer: state of keys, state of values
    const Widen *widen;
    Conv body;
    const Block *blocks;
    Snake last_snake;
    Conv last;
    int32_t groups, codebook, half, latent, window, widens, block_count, unused;
} Codec;

// State `part` of slot s is at parts[part] + s * strides[part].
typedef struct {
    float *const *parts;
    const int64_t *strides;
} State;

static int64_t history(const Conv *conv) { return (int64_t)conv->dilation * (conv->taps - 1); }

// State is [channel, column] as the twin has it, the buffers are [column, channel].
static void fetch(State state, int part, int64_t slot, int64_t columns, int64_t channels, float *to) {
    const float *from = state.parts[part] + slot * state.strides[part];
    for (int64_t t = 0; t < columns; t++)
        for (int64_t c = 0; c < channels; c++) to[t * channels + c] = from[c * columns + t];
}

static void keep(State state, int part, int64_t slot, int64_t columns, int64_t channels, const float *from) {
    float *to = state.parts[part] + slot * state.strides[part];
    for (int64_t c = 0; c < channels; c++)
        for (int64_t t = 0; t < columns; t++) to[c * columns + t] = from[t * channels + c];
}

static void snake(const Snake *s, int64_t count, const float *x, float *out) {
    int64_t i = 0, at = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec v = load(x + i);
        store(out + i, v + squared_sine(v * load(s->frequency + at)) * load(s->depth + at));
        at = at + LANES == s->period ? 0 : at + LANES;
    }
    if (i < count) {
        const vec v = load_part(x + i, count - i);
        store_part(out + i, v + squared_sine(v * load(s->frequency + at)) * load(s->depth + at), count - i);
    }
}

// `streams` buffers of [history + columns, c_in], each with its history in front -> out [streams * columns, c_out], or added there.
static void convolve(const Conv *conv, int64_t streams, int64_t columns, const float *buffer, float *out, int add) {
    const int64_t width = conv->c_in;
    Input in = {buffer, width, columns, (history(conv) + columns) * width, conv->taps, conv->dilation * width};
    Output to = dense_out(out, conv->c_out);
    to.bias = conv->bias, to.add = add;
    multiply(&conv->matrix, streams * columns, in, to);
}

// x [streams * columns, c_in] -> out, `streams` times [columns + overlaps, stride * c_out]: the row that overlaps is scratch.
static void upsample(const Upsample *up, State state, const int64_t *slots, int64_t streams, int64_t columns, const float *x, float *out) {
    const int64_t width = (int64_t)up->stride * up->c_out, jump = (columns + up->overlaps) * width;
    Output to = {out, width, columns, jump, NULL, NULL, 0};
    if (up->overlaps) {
        to.base = out + width;
        multiply(&up->later, streams * columns, (Input){x, up->c_in, INT64_MAX, 0, 1, 0}, to);
        for (int64_t b = 0; b < streams; b++) {
            fetch(state, up->state, slots[b], up->stride, up->c_out, out + b * jump);
            keep(state, up->state, slots[b], up->stride, up->c_out, out + b * jump + columns * width);
        }
        // Overlap first, then the sum of this column, then the bias: the twin's order.
        to.base = out, to.add = 1;
    }
    to.bias = up->bias;
    multiply(&up->now, streams * columns, (Input){x, up->c_in, INT64_MAX, 0, 1, 0}, to);
}

static void quantize(const Codec *codec, int64_t rows, const int64_t *codes, float *sums, Output to) {
    const int64_t half = codec->half;
    memset(sums, 0, (size_t)(rows * 2 * half) * sizeof(float));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < codec->groups; g++) {
            const float *from = codec->tables + (g * codec->codebook + codes[row * codec->groups + g]) * half;
            float *sum_to = sums + row * 2 * half + (g ? half : 0);
            for (int64_t i = 0; i < half; i++) sum_to[i] += from[i];
        }
    multiply(&codec->projection, rows, dense_in(sums, 2 * half), to);
}

// The transformer at frame rate, in place on x [streams * frames, latent]. Returns -1 without memory.
static int transform(const Codec *codec, State state, const int64_t *slots, const int64_t *done, int64_t streams, int64_t frames, float *latent) {
    const Stack *s = codec->stack;
    const int64_t rows = streams * frames, carried = codec->window - 1, width = s->head_dim, kv = s->kv_heads;
    const int64_t all = (s->heads + 2 * kv) * width, mixed_width = s->heads * width, span = carried + frames;
    const int64_t floats = rows * (2 * s->hidden + all + mixed_width + 2 * s->inner + 2 * width) + 2 * kv * span * width + span;
    const float **cos_sin = malloc((size_t)rows * 2 * sizeof(float *) + (size_t)floats * sizeof(float));
    if (!cos_sin) return -1;
    float *x = (float *)(cos_sin + 2 * rows), *normed = x + rows * s->hidden, *qkv = normed + rows * s->hidden, *mixed = qkv + rows * all;
    float *inner = mixed + rows * mixed_width, *turns = inner + rows * 2 * s->inner, *keys = turns + rows * 2 * width;
    float *values = keys + kv * span * width, *scores = values + kv * span * width;
    for (int64_t row = 0; row < rows; row++) {
        const float position = (float)(done[slots[row / frames]] + row % frames);
        float *cos = turns + row * 2 * width, *sin = cos + width;
        for (int64_t i = 0; i < width / 2; i++) {
            const float angle = position * codec->frequency[i];
            cos[i] = cos[i + width / 2] = cosf(angle);
            sin[i + width / 2] = sinf(angle), sin[i] = -sin[i + width / 2];
        }
        cos_sin[2 * row] = cos, cos_sin[2 * row + 1] = sin;
    }
    Output to = dense_out(x, s->hidden);
    to.bias = codec->input_bias;
    multiply(&codec->input, rows, dense_in(latent, codec->latent), to);
    for (int64_t number = 0; number < s->layers; number++) {
        project(s, s->layer + number, rows, x, cos_sin, normed, qkv);
        for (int64_t b = 0; b < streams; b++) {
            const int key_part = codec->cache[2 * number], value_part = codec->cache[2 * number + 1];
            float *own_keys = state.parts[key_part] + slots[b] * state.strides[key_part];
            float *own_values = state.parts[value_part] + slots[b] * state.strides[value_part];
            const size_t kept = (size_t)(carried * width) * sizeof(float);
            for (int64_t head = 0; head < kv; head++) {
                float *k = keys + head * span * width, *v = values + head * span * width;
                memcpy(k, own_keys + head * carried * width, kept);
                memcpy(v, own_values + head * carried * width, kept);
                for (int64_t t = 0; t < frames; t++) {
                    const float *from = qkv + (b * frames + t) * all + (s->heads + head) * width;
                    memcpy(k + (carried + t) * width, from, (size_t)width * sizeof(float));
                    memcpy(v + (carried + t) * width, from + kv * width, (size_t)width * sizeof(float));
                }
                memcpy(own_keys + head * carried * width, k + frames * width, kept);
                memcpy(own_values + head * carried * width, v + frames * width, kept);
            }
            for (int64_t t = 0; t < frames; t++) {
                // The window of frame t is [t, carried + t]; before the first frame there is nothing.
                const int64_t missing = carried - done[slots[b]], first = missing > t ? missing : t;
                attend(qkv + (b * frames + t) * all, keys + first * width, values + first * width, span * width, carried + t + 1 - first, s, scores,
                       mixed + (b * frames + t) * mixed_width);
            }
        }
        conclude(s, s->layer + number, rows, mixed, x, normed, inner);
    }
    normalize(x, s->norm, s->eps, rows, s->hidden, x);
    to = dense_out(latent, codec->latent);
    to.bias = codec->output_bias;
    multiply(&codec->output, rows, dense_in(x, s->hidden), to);
    free(cos_sin);
    return 0;
}

// ConvNeXt, on x [streams, jump], `columns` columns each: x += gamma * pw2(GELU(pw1(LayerNorm(depthwise(x))))), into out without gaps.
static int convnext(const Widen *w, State state, const int64_t *slots, int64_t streams, int64_t columns, int64_t jump, const float *x, float *out) {
    const int64_t width = w->up.c_out, before = w->taps - 1, rows = streams * columns, wide = w->pointwise_1.width;
    float *buffer = malloc((size_t)((before + columns) * width + rows * (width + wide)) * sizeof(float));
    if (!buffer) return -1;
    float *y = buffer + (before + columns) * width, *inner = y + rows * width;
    for (int64_t b = 0; b < streams; b++) {
        fetch(state, w->state, slots[b], before, width, buffer);
        memcpy(buffer + before * width, x + b * jump, (size_t)(columns * width) * sizeof(float));
        memcpy(out + b * columns * width, x + b * jump, (size_t)(columns * width) * sizeof(float));
        keep(state, w->state, slots[b], before, width, buffer + columns * width);
        for (int64_t t = 0; t < columns; t++) {
            float *to = y + (b * columns + t) * width, mean = 0.0f, square = 0.0f;
            memcpy(to, w->depthwise_bias, (size_t)width * sizeof(float));
            for (int64_t tap = 0; tap < w->taps; tap++)
                for (int64_t c = 0; c < width; c++) to[c] += buffer[(t + tap) * width + c] * w->depthwise[tap * width + c];
            for (int64_t c = 0; c < width; c++) mean += to[c];
            mean /= (float)width;
            for (int64_t c = 0; c < width; c++) square += (to[c] - mean) * (to[c] - mean);
            const float factor = 1.0f / sqrtf(square / (float)width + w->eps);
            for (int64_t c = 0; c < width; c++) to[c] = (to[c] - mean) * factor * w->norm_weight[c] + w->norm_bias[c];
        }
    }
    Output to = dense_out(inner, wide);
    to.bias = w->bias_1;
    multiply(&w->pointwise_1, rows, dense_in(y, width), to);
    for (int64_t i = 0; i < rows * wide; i++) inner[i] = 0.5f * inner[i] * (1.0f + erff(inner[i] * 0.707106781f));
    to = dense_out(out, width);
    to.bias = w->bias_2, to.scale = w->gamma, to.add = 1;
    multiply(&w->pointwise_2, rows, dense_in(inner, wide), to);
    free(buffer);
    return 0;
}

// One stream from `body` to samples: x [columns, decoder_dim], overwritten; spare: two buffers of `room` floats.
static void widen(const Codec *codec, State state, int64_t slot, int64_t columns, float *x, float *spare, int64_t room, float *samples) {
    float *buffer = spare, *y = spare + room;
    for (int64_t number = 0; number < codec->block_count; number++) {
        const Block *block = codec->blocks + number;
        const int64_t width = block->up.c_out;
        snake(&block->snake, columns * block->up.c_in, x, x);
        upsample(&block->up, state, &slot, 1, columns, x, y);
        columns *= block->up.stride;
        float *swap = x; // x: the residual stream; swap is free
        x = y, y = swap;
        for (int i = 0; i < 3; i++) {
            const Unit *unit = block->units + i;
            const int64_t before = history(&unit->dilated);
            fetch(state, unit->dilated.state, slot, before, width, buffer);
            snake(&unit->first, columns * width, x, buffer + before * width);
            convolve(&unit->dilated, 1, columns, buffer, y, 0);
            keep(state, unit->dilated.state, slot, before, width, buffer + columns * width);
            snake(&unit->second, columns * width, y, y);
            convolve(&unit->pointwise, 1, columns, y, x, 1);
        }
    }
    const int64_t before = history(&codec->last), width = codec->last.c_in;
    fetch(state, codec->last.state, slot, before, width, buffer);
    snake(&codec->last_snake, columns * width, x, buffer + before * width);
    convolve(&codec->last, 1, columns, buffer, samples, 0);
    keep(state, codec->last.state, slot, before, width, buffer + columns * width);
    for (int64_t i = 0; i < columns; i++) samples[i] = samples[i] < -1.0f ? -1.0f : samples[i] > 1.0f ? 1.0f : samples[i];
}

// codes [streams, frames, groups] -> samples [streams, frames * samples per frame]; done [slots]: frames decoded before, advanced here.
// Returns 0, or -1 without memory.
int decode(const Codec *codec, int64_t streams, int64_t frames, const int64_t *codes, const int64_t *slots, float *const *parts, const int64_t *strides,
           int64_t *done, float *samples) {
    const State state = {parts, strides};
    const int64_t rows = streams * frames, before = history(&codec->entry), body_before = history(&codec->body);
    const int64_t dim = codec->projection.width, latent = codec->latent;
    int64_t rate = 1; // columns a frame
    for (int i = 0; i < codec->widens; i++) rate *= codec->widen[i].up.stride;
    // One frame's largest activation in the blocks, with history and overlap.
    int64_t room = rate * codec->body.c_out, columns = rate, most_history = history(&codec->last);
    for (int64_t i = 0; i < codec->block_count; i++) {
        const Block *block = codec->blocks + i;
        columns *= block->up.stride;
        for (int unit = 0; unit < 3; unit++) {
            const int64_t own = history(&block->units[unit].dilated);
            most_history = own > most_history ? own : most_history;
        }
        const int64_t need = (columns + most_history + block->up.stride) * block->up.c_out;
        room = need > room ? need : room;
    }
    const int64_t entry_room = streams * (before + frames) * dim, wide_room = streams * (frames * rate + body_before) * latent;
    const int64_t body_room = rows * rate * codec->body.c_out;
    float *sums = malloc((size_t)(rows * 2 * codec->half + entry_room + 2 * wide_room + body_room + 3 * room) * sizeof(float));
    if (!sums) return -1;
    float *entry = sums + rows * 2 * codec->half, *x = entry + entry_room, *y = x + wide_room, *body = y + wide_room, *spare = body + body_room;
    int failed = 0;

    Output to = {entry + before * dim, dim, frames, (before + frames) * dim, NULL, NULL, 0};
    quantize(codec, rows, codes, sums, to);
    for (int64_t b = 0; b < streams; b++) {
        float *own = entry + b * (before + frames) * dim;
        fetch(state, codec->entry.state, slots[b], before, dim, own);
        keep(state, codec->entry.state, slots[b], before, dim, own + frames * dim);
    }
    convolve(&codec->entry, streams, frames, entry, x, 0);
    failed = transform(codec, state, slots, done, streams, frames, x);
    columns = frames;
    for (int i = 0; i < codec->widens && !failed; i++) {
        const Widen *w = codec->widen + i;
        upsample(&w->up, state, slots, streams, columns, x, y);
        const int64_t jump = (columns + w->up.overlaps) * w->up.stride * latent;
        columns *= w->up.stride;
        failed = convnext(w, state, slots, streams, columns, jump, y, x);
    }
    if (!failed) {
        for (int64_t b = 0; b < streams; b++) {
            float *own = y + b * (body_before + columns) * latent;
            fetch(state, codec->body.state, slots[b], body_before, latent, own);
            memcpy(own + body_before * latent, x + b * columns * latent, (size_t)(columns * latent) * sizeof(float));
            keep(state, codec->body.state, slots[b], body_before, latent, own + columns * latent);
        }
        convolve(&codec->body, streams, columns, y, body, 0);
        int64_t per_frame = rate;
        for (int i = 0; i < codec->block_count; i++) per_frame *= codec->blocks[i].up.stride;
        for (int64_t row = 0; row < rows; row++) {
            memcpy(spare, body + row * rate * codec->body.c_out, (size_t)(rate * codec->body.c_out) * sizeof(float));
            widen(codec, state, slots[row / frames], rate, spare, spare + room, room, samples + row * per_frame);
        }
        for (int64_t b = 0; b < streams; b++) done[slots[b]] += frames;
    }
    free(sums);
    return failed;
}
