// A whole frame of the Code Predictor in one call, and drawing tokens. Twins: CodePredictor.forward, and warp and draw in stages/sampler.py.
#include "kernels.h"

typedef struct {
    const Stack *stack;
    const Matrix *projection; // null where Talker and Predictor have one width
    const float *projection_bias;
    const Matrix *heads;            // [groups - 1]
    const float *const *embeddings; // [groups - 1], each [vocab, talker width]
    int32_t groups, vocab, talker_hidden, unused;
} Predictor;

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// The k-th largest of `width` values, which are left in some other order.
static float select_largest(float *values, int64_t width, int64_t k) {
    int64_t low = 0, high = width - 1;
    while (low < high) { // Hoare's quickselect, descending
        const float pivot = values[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                const float t = values[i];
                values[i++] = values[j], values[j--] = t;
            }
        }
        if (k - 1 <= j) {
            high = j;
        } else if (k - 1 >= i) {
            low = i;
        } else {
            break;
        }
    }
    return values[k - 1];
}

// A token from logits [width]; temperature, top-k with ties, top-p, then the first token whose cumulative probability exceeds `number`.
// scratch: 3 * width floats. Not a number among the logits: token 0, and the guard above will see it.
int64_t sample(const float *logits, int64_t width, float temperature, int64_t top_k, float top_p, int greedy, double number, float *scratch) {
    int64_t best = 0;
    for (int64_t i = 0; i < width; i++) {
        if (logits[i] != logits[i]) return 0;
        if (logits[i] > logits[best]) best = i;
    }
    if (greedy) return best;
    float *scores = scratch, *weight = scratch + width, *sorted = weight + width;
    for (int64_t i = 0; i < width; i++) scores[i] = logits[i] / temperature;
    const float top = scores[best];
    float floor = -INFINITY;
    if (top_k < width) {
        memcpy(sorted, scores, (size_t)width * sizeof(float));
        floor = select_largest(sorted, width, top_k);
    }
    if (top_p < 1.0f) {
        // Drop the ascending tail whose cumulative probability is at most 1 - p; of equal scores the later tokens stay.
        int64_t kept = 0;
        float mass = 0.0f;
        for (int64_t i = 0; i < width; i++)
            if (scores[i] >= floor) sorted[kept++] = scores[i];
        qsort(sorted, (size_t)kept, sizeof(float), ascending);
        for (int64_t i = 0; i < kept; i++) mass += expf(sorted[i] - top);
        double below = 0.0;
        int64_t dropped = 0;
        for (; dropped < kept - 1; dropped++) {
            below += expf(sorted[dropped] - top) / mass;
            if (!((float)below <= 1.0f - top_p)) break;
        }
        // `ties` of the dropped equal the lowest kept score: they go first come, first dropped.
        const float edge = sorted[dropped];
        int64_t ties = 0;
        while (ties < dropped && sorted[dropped - 1 - ties] == edge) ties++;
        for (int64_t i = 0; i < width; i++) {
            if (scores[i] < edge || (scores[i] == edge && ties-- > 0)) scores[i] = -INFINITY;
        }
    } else {
        for (int64_t i = 0; i < width; i++)
            if (scores[i] < floor) scores[i] = -INFINITY;
    }
    double total = 0.0;
    float mass = 0.0f;
    for (int64_t i = 0; i < width; i++) {
        weight[i] = scores[i] == -INFINITY ? 0.0f : expf(scores[i] - top);
        mass += weight[i];
    }
    for (int64_t i = 0; i < width; i++) total += (double)(weight[i] / mass);
    double cumulative = 0.0;
    for (int64_t i = 0; i < width; i++) {
        cumulative += (double)(weight[i] / mass);
        if (cumulative > number * total) return i;
    }
    return width - 1;
}

// sample() for a batch: logits [rows, width], numbers [rows] doubles `number_stride` apart. Returns 0, or -1 without memory.
int sample_rows(const float *logits, int64_t rows, int64_t width, const float *temperature, const int64_t *top_k, const float *top_p, const uint8_t *greedy,
                const double *numbers, int64_t number_stride, int64_t *tokens, int64_t token_stride) {
    float *scratch = malloc((size_t)(3 * width) * sizeof(float));
    if (!scratch) return -1;
    for (int64_t row = 0; row < rows; row++)
        tokens[row * token_stride] =
            sample(logits + row * width, width, temperature[row], top_k[row], top_p[row], greedy[row], numbers[row * number_stride], scratch);
    free(scratch);
    return 0;
}

// Codebook-0 tokens from the Talker's logits [rows, vocab]: repetition penalty over `seen` [rows, codebook], end of speech as token
// `codebook` where it may be drawn, and no other control id. Returns 0, or -1 without memory.
int sample_first(const float *logits, int64_t rows, int64_t vocab, int64_t codebook, int64_t eos, const uint8_t *seen, const float *penalty,
                 const uint8_t *may_end, const float *temperature, const int64_t *top_k, const float *top_p, const uint8_t *greedy, const double *numbers,
                 int64_t number_stride, int64_t *tokens) {
    const int64_t width = codebook + 1;
    float *own = malloc((size_t)(4 * width) * sizeof(float));
    if (!own) return -1;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = logits + row * vocab;
        for (int64_t i = 0; i < codebook; i++) {
            const float penalized = from[i] < 0.0f ? from[i] * penalty[row] : from[i] / penalty[row];
            own[i] = seen[row * codebook + i] ? penalized : from[i];
        }
        own[codebook] = may_end[row] ? from[eos] : -INFINITY;
        tokens[row] = sample(own, width, temperature[row], top_k[row], top_p[row], greedy[row], numbers[row * number_stride], own + width);
    }
    free(own);
    return 0;
}

// hidden, first: [rows, talker width]. numbers [rows, groups]. keys, values: a scratch cache of at least `rows` slots and `groups`
// positions. tokens [rows, groups - 1]; total [rows, talker width]: first plus all drawn embeddings. Returns 0, or -1 without memory.
int predict_frame(const Predictor *p, int64_t rows, const float *hidden, const float *first, const float *cos, const float *sin, float *keys, float *values,
                  const int64_t *strides, const float *temperature, const int64_t *top_k, const float *top_p, const uint8_t *greedy, const double *numbers,
                  int64_t *tokens, float *total) {
    const int64_t wide = p->talker_hidden, width = p->stack->hidden;
    int64_t *places = malloc((size_t)(4 * rows) * sizeof(int64_t) + (size_t)(2 * rows * (wide + width) + rows * p->vocab) * sizeof(float));
    if (!places) return -1;
    int64_t *slots = places + 2 * rows;
    float *input = (float *)(places + 4 * rows), *x = input + 2 * rows * wide, *logits = x + 2 * rows * width;
    int failed = 0;
    for (int64_t row = 0; row < rows; row++) {
        memcpy(input + row * wide, hidden + row * wide, (size_t)wide * sizeof(float));
        memcpy(input + (rows + row) * wide, first + row * wide, (size_t)wide * sizeof(float));
        slots[row] = slots[rows + row] = row;
        places[row] = 0, places[rows + row] = 1;
    }
    memcpy(total, first, (size_t)(rows * wide) * sizeof(float));
    // The first step takes two positions, all rows' first, then all rows' second.
    for (int64_t group = 1, count = 2 * rows; group < p->groups && !failed; group++, count = rows) {
        if (p->projection) {
            Output to = dense_out(x, width);
            to.bias = p->projection_bias;
            multiply(p->projection, count, dense_in(input, wide), to);
        } else {
            memcpy(x, input, (size_t)(count * width) * sizeof(float));
        }
        failed = run_stack(p->stack, count, x, cos, sin, places, slots, keys, values, strides, NULL);
        if (failed) break;
        multiply(p->heads + group - 1, rows, dense_in(x + (count - rows) * width, width), dense_out(logits, p->vocab));
        int64_t *drawn = tokens + group - 1;
        failed = sample_rows(logits, rows, p->vocab, temperature, top_k, top_p, greedy, numbers + group, p->groups, drawn, p->groups - 1);
        for (int64_t row = 0; row < rows && !failed; row++) {
            const float *embedding = p->embeddings[group - 1] + drawn[row * (p->groups - 1)] * wide;
            memcpy(input + row * wide, embedding, (size_t)wide * sizeof(float));
            for (int64_t i = 0; i < wide; i++) total[row * wide + i] += embedding[i];
            places[row] = group + 1;
        }
    }
    free(places);
    return failed;
}
