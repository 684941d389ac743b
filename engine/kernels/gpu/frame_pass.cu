// A pass of the Code Predictor, layers and head, as one kernel that stays on the card: x [rows, HIDDEN] -> logits [rows wanted, CODES].
//
// CTAS programs, one a multiprocessor. Each has its share of every matrix's outputs. Weights come to a ring in shared memory in the
// order in which they are used; they depend on nothing, so memory never waits for the exchange of what does. But what is exchanged waits behind
// weights on their way, so there are never more of them than memory needs. Each warp takes its part to registers before its inputs are there.
//
// Between two products all programs need what all have made. It goes through the L2 cache and carries its own news: an exchange is filled with
// EMPTY, which no rounding makes, and who needs a word reads it until it is something else. There is no barrier and no fence. A word is written
// once a pass; passes take turns at SETS sets of exchanges, and each pass empties the next one's, which the pass before the last one used: both
// borders lie between kernels.
//
// x of 8 rows is a tile of mma.m16n8k16, the weights are its left operand. A warp takes 32 inputs of every 512; partial sums are added up
// in the order of warps, so a row's result is always the same and depends on no other row.

typedef unsigned short bf16;
typedef unsigned int word;
typedef unsigned long long u64;

// The last warp brings the weights.
constexpr int CTAS = 128, WARPS = 16, THREADS = 32 * WARPS + 32;
constexpr int HIDDEN = 1024, HEADS = 16, GROUPS = 8, WIDTH = 128, POSITIONS = 16, INNER = 3072, CODES = 2048;
constexpr int QKV = (HEADS + 2 * GROUPS) * WIDTH, MIXED = HEADS * WIDTH;
// A warp's part of a stage is two units of 8 outputs and 32 inputs: 16 bytes a lane each.
constexpr int UNIT = 512, STAGE = 2 * WARPS * UNIT, MOST_STAGES = 13;
// An exchange by row and layer, in numbers: what each product and the attention make.
constexpr int AT_QKV = 0, AT_MIXED = AT_QKV + QKV, AT_MIDDLE = AT_MIXED + MIXED, AT_GATED = AT_MIDDLE + HIDDEN, AT_END = AT_GATED + INNER,
              LAYER = AT_END + HIDDEN;
constexpr int MOST_ROWS = 16;
constexpr word EMPTY = 0xffffffffu;
// Reads of a word that never comes: some seconds.
constexpr int PATIENCE = 1 << 22;
// A row of all warps' partial sums of so many outputs; longer than they are, for the memory's banks.
template <int OUTPUTS>
constexpr int SUMS_LINE = WARPS * OUTPUTS + 4;
constexpr int LONGEST = SUMS_LINE<48>;

struct Arguments {
    const bf16* x;
    const char* matrices;  // by layer, program and stage
    const char* head;
    const bf16* norms;  // [layers, 2, WIDTH], of q and of k
    const float* cos;  // [POSITIONS, WIDTH / 2]
    const float* sin;
    bf16* keys;  // [layers, cache_places, GROUPS, POSITIONS, WIDTH]
    bf16* values;
    bf16* logits;
    bf16* exchange;  // [copies, MOST_ROWS, layers, LAYER], this pass's set
    bf16* next;  // the next pass's set
    float eps, scale;
    int layers, rows, first, position, cache_places, copies, next_rows, stages, on_their_way;
};

#ifndef EMULATED
#define DEVICE __device__ __forceinline__

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE word shared_address(const void* p) { return (word)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u64* barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"); }
DEVICE void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u64* barrier, word parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
        ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
DEVICE u64 used_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void bring(void* to, const void* from, int bytes, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}
// Those who multiply; and all.
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }
DEVICE void meet_all() { __syncthreads(); }
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
DEVICE bool any_of(bool one) { return __any_sync(0xffffffffu, one); }
DEVICE float across(float value, int bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }

DEVICE void multiply_add(float (&c)[4], word a0, word a1, word a2, word a3, word b0, word b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE uint4 fresh(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE uint2 fresh(const uint2* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
DEVICE word fresh(const word* p) {
    word v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void publish(word* p, word v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void give_up() { asm volatile("trap;"); }
DEVICE word rounded(float low, float high) {
    word v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
DEVICE float wide(word bits) { return __uint_as_float(bits); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float quotient(float x, float y) { return __fdividef(x, y); }
extern __shared__ __align__(128) char shared_memory[];
#endif

DEVICE float low(word pair) { return wide(pair << 16); }
DEVICE float high(word pair) { return wide(pair & 0xffff0000u); }
DEVICE float number(bf16 x) { return wide((word)x << 16); }
DEVICE float inverse_root(float squares, int count, float eps) { return rsqrtf(squares * (1.0f / count) + eps); }
DEVICE word most(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)); }

struct Shared {
    u64 full[MOST_STAGES], empty[MOST_STAGES];
    float scores[POSITIONS];
    float squares[WARPS][MOST_ROWS];
};

constexpr int BY_LAYER = (QKV * HIDDEN + HIDDEN * MIXED + 2 * INNER * HIDDEN + HIDDEN * INNER) / CTAS * 2 / STAGE;
constexpr int BY_HEAD = CODES * HIDDEN / CTAS * 2 / STAGE;

// A place in the ring, and how often it was passed.
struct Place {
    int at;
    word parity;
    DEVICE void move_on(int stages) {
        if (++at == stages) at = 0, parity ^= 1;
    }
};

// All weights of a pass, by one thread.
DEVICE void bring_weights(const Arguments& a, Shared& s, char* memory, int cta) {
    const int by_matrices = a.layers * BY_LAYER;
    const char* const matrices = a.matrices + (u64)cta * by_matrices * STAGE;
    const char* const head = a.head + (u64)cta * BY_HEAD * STAGE;
    const u64 policy = used_once();
    Place free = {0, 1}, arrived = {0, 0};
#pragma unroll 1
    for (int n = 0; n < by_matrices + BY_HEAD; n++) {
        barrier_wait(&s.empty[free.at], free.parity);
        if (n >= a.on_their_way) {
            barrier_wait(&s.full[arrived.at], arrived.parity);
            arrived.move_on(a.stages);
        }
        barrier_expect(&s.full[free.at], STAGE);
        bring(memory + free.at * STAGE, n < by_matrices ? matrices + n * STAGE : head + (n - by_matrices) * STAGE, STAGE, &s.full[free.at], policy);
        free.move_on(a.stages);
    }
}

// What those who multiply see of the ring.
struct Ring {
    Shared& s;
    const char* memory;
    int stages;
    Place taken, emptied;

    // Once all warps have taken what lay in `count` places. By one thread, always the same.
    DEVICE void empty(int count) {
#pragma unroll 1
        for (; count; count--) {
            barrier_arrive(&s.empty[emptied.at]);
            emptied.move_on(stages);
        }
    }

    // A warp's part of a product's weights.
    template <int UNITS>
    DEVICE void take(uint4 (&w)[UNITS], int warp, int lane) {
#pragma unroll
        for (int u = 0; u < UNITS; u += 2) {
            barrier_wait(&s.full[taken.at], taken.parity);
            const char* from = memory + taken.at * STAGE + warp * (2 * UNIT) + lane * 16;
            w[u] = *(const uint4*)from;
            w[u + 1] = *(const uint4*)(from + UNIT);
            taken.move_on(stages);
        }
    }
};

// A warp's inputs, rows `apart` numbers apart; once they are there, if AWAITED. Rows that are not there are the last one again.
template <bool AWAITED, int PAIRS, int TILES>
DEVICE void gather(uint4 (&x)[PAIRS][TILES], const bf16* from, int apart, int rows, int warp, int lane) {
    const uint4* at[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int r = t * 8 + (lane >> 2);
        at[t] = (const uint4*)(from + (r < rows ? r : rows - 1) * apart + warp * 32 + (lane & 3) * 8);
    }
#pragma unroll
    for (int i = 0; i < PAIRS * TILES; i++) x[i / TILES][i % TILES] = fresh(at[i % TILES] + i / TILES * 64);
    for (int tries = 0; AWAITED;) {
        word any = 0;
#pragma unroll
        for (int i = 0; i < PAIRS * TILES; i++) any = max(any, most(x[i / TILES][i % TILES]));
        if (!any_of(any == EMPTY)) break;
        if (++tries > PATIENCE) give_up();
#pragma unroll
        for (int i = 0; i < PAIRS * TILES; i++)
            if (rows <= 2 || any_of(most(x[i / TILES][i % TILES]) == EMPTY)) x[i / TILES][i % TILES] = fresh(at[i % TILES] + i / TILES * 64);
    }
}

// A warp's part of a product, EIGHTS times eight outputs: its sums, and with NORM its inputs' squares, to shared memory.
template <int EIGHTS, int PAIRS, int TILES, bool NORM>
DEVICE void multiply(const uint4 (&w)[EIGHTS * PAIRS], const uint4 (&x)[PAIRS][TILES], float* sums, float* squares, int rows, int warp, int lane) {
    constexpr int CHAINS = EIGHTS == 1 ? 2 : EIGHTS / 2, OUTPUTS = EIGHTS * 8, LINE = SUMS_LINE<OUTPUTS>;
    float c[CHAINS][TILES][4] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int j = 0; j < (EIGHTS == 1 ? 1 : EIGHTS / 2); j++) {
                const uint4 none = {0, 0, 0, 0}, b = x[p][t];
                const uint4 first = EIGHTS == 1 ? w[p] : w[p * EIGHTS + 2 * j], second = EIGHTS == 1 ? none : w[p * EIGHTS + 2 * j + (EIGHTS > 1)];
                float(&sum)[4] = c[EIGHTS == 1 ? p % 2 : j][t];
                multiply_add(sum, first.x, second.x, first.y, second.y, b.x, b.y);
                multiply_add(sum, first.z, second.z, first.w, second.w, b.z, b.w);
            }
    float* mine = sums + warp * OUTPUTS;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int r = t * 8 + (lane & 3) * 2, m = lane >> 2;
        if (EIGHTS == 1)
#pragma unroll
            for (int i = 0; i < 4; i++) c[0][t][i] += c[1][t][i];
#pragma unroll
        for (int j = 0; j < (EIGHTS == 1 ? 1 : EIGHTS / 2); j++)
#pragma unroll
            for (int i = 0; i < (EIGHTS == 1 ? 2 : 4); i++)
                if (r + i % 2 < rows) mine[(r + i % 2) * LINE + j * 16 + i / 2 * 8 + m] = c[j][t][i];
        if (NORM) {
            float square = 0.0f;
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                const uint4 v = x[p][t];
                square += low(v.x) * low(v.x) + high(v.x) * high(v.x) + low(v.y) * low(v.y) + high(v.y) * high(v.y);
                square += low(v.z) * low(v.z) + high(v.z) * high(v.z) + low(v.w) * low(v.w) + high(v.w) * high(v.w);
            }
            square += across(square, 1);
            square += across(square, 2);
            if ((lane & 3) == 0) squares[warp * MOST_ROWS + t * 8 + m] = square;
        }
    }
}

// Of all warps, in an order that is always the same.
template <int APART>
DEVICE float total(const float* parts) {
    float sums[4] = {parts[0], parts[APART], parts[2 * APART], parts[3 * APART]};
#pragma unroll
    for (int warp = 4; warp < WARPS; warp++) sums[warp % 4] += parts[warp * APART];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// What they have of output m of row r.
template <int OUTPUTS>
DEVICE float product(const float* sums, int r, int m) {
    return total<OUTPUTS>(sums + r * SUMS_LINE<OUTPUTS> + m);
}

DEVICE float norm_of(const float* squares, int r, float eps) { return inverse_root(total<MOST_ROWS>(squares + r), HIDDEN, eps); }

// Two neighbouring lanes' numbers as one word, into every copy of the exchange.
DEVICE void give(bf16* exchange, int offset, int copies, int copy, float value, bool live, int lane) {
    float other = across(value, 1);
    if (live && lane % 2 == 0) {
        word pair = rounded(value, other);
#pragma unroll 1
        for (int c = 0; c < copies; c++) publish((word*)(exchange + c * copy + offset), pair);
    }
}

// Four numbers of a query's head and of a key's from 4 * lane on, normed and rotated: side by side, as each waits for other lanes often.
DEVICE void turn(float (&v)[2][4], const uint2 (&raw)[2], const uint2 (&norm)[2], const float4 (&c)[2], const float4 (&s)[2], float eps, int lane) {
    float square[2], other[2][4];
    const float sign = lane < 16 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[i][0] = low(raw[i].x), v[i][1] = high(raw[i].x), v[i][2] = low(raw[i].y), v[i][3] = high(raw[i].y);
        square[i] = v[i][0] * v[i][0] + v[i][1] * v[i][1] + v[i][2] * v[i][2] + v[i][3] * v[i][3];
        v[i][0] *= low(norm[i].x), v[i][1] *= high(norm[i].x), v[i][2] *= low(norm[i].y), v[i][3] *= high(norm[i].y);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) other[i / 4][i % 4] = across(v[i / 4][i % 4], 16);
#pragma unroll
    for (int bits = 16; bits; bits /= 2) {
        const float first = across(square[0], bits), second = across(square[1], bits);
        square[0] += first, square[1] += second;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float root = inverse_root(square[i], WIDTH, eps);
        v[i][0] = root * (v[i][0] * c[i].x + sign * other[i][0] * s[i].x);
        v[i][1] = root * (v[i][1] * c[i].y + sign * other[i][1] * s[i].y);
        v[i][2] = root * (v[i][2] * c[i].z + sign * other[i][2] * s[i].z);
        v[i][3] = root * (v[i][3] * c[i].w + sign * other[i][3] * s[i].w);
    }
}

// One row and query head a program: a warp makes the score of the position it is numbered as, two warps mix the values.
DEVICE void attend(const Arguments& a, int layer, const bf16* qkv, bf16* exchange, int row, int copy, float* scores, int item, int warp, int lane) {
    const int places = a.first ? a.rows / 2 : a.rows, r = item / HEADS, head = item % HEADS, group = head / (HEADS / GROUPS);
    const int last = a.first ? 1 : a.position, line = a.first ? places + r : r, tid = warp * 32 + lane;
    const u64 cache = (((u64)layer * a.cache_places + r) * GROUPS + group) * POSITIONS * WIDTH;
    const bool writes = head % (HEADS / GROUPS) == 0, mixes = warp < 2, scored = warp <= last, own = scored && (a.first || warp == last);
    word v[POSITIONS], v_own = 0, v_first = 0;
    if (mixes)
#pragma unroll
        for (int p = 0; p < POSITIONS; p++) v[p] = !a.first && p < last ? fresh((const word*)(a.values + cache + p * WIDTH + 2 * tid)) : 0;
    if (mixes || scored) {
        const bf16* norms = a.norms + layer * 2 * WIDTH + 4 * lane;
        const uint2 norm[2] = {*(const uint2*)norms, *(const uint2*)(norms + WIDTH)};
        const int angle = warp * (WIDTH / 2) + lane % 16 * 4, q_angle = last * (WIDTH / 2) + lane % 16 * 4;
        const float4 c[2] = {*(const float4*)(a.cos + q_angle), *(const float4*)(a.cos + angle)};
        const float4 s[2] = {*(const float4*)(a.sin + q_angle), *(const float4*)(a.sin + angle)};
        bf16* key = a.keys + cache + warp * WIDTH + 4 * lane;
        uint2 k = {0, 0};
        if (scored && !own) k = fresh((const uint2*)key);
        // Where there is nothing to be read: the query again.
        const bf16* const q_at = qkv + line * row + head * WIDTH + 4 * lane;
        const bf16* const k_at = own ? qkv + (a.first && warp == 0 ? r : line) * row + (HEADS + group) * WIDTH + 4 * lane : q_at;
        const int value = (HEADS + GROUPS + group) * WIDTH + 2 * tid;
        const bf16* const v_at = mixes ? qkv + line * row + value : q_at;
        const bf16* const v_first_at = mixes && a.first ? qkv + r * row + value : v_at;
        uint2 raw[2];
        for (int tries = 0;;) {
            raw[0] = fresh((const uint2*)q_at), raw[1] = fresh((const uint2*)k_at);
            v_own = fresh((const word*)v_at), v_first = fresh((const word*)v_first_at);
            if (!any_of(max(max(max(raw[0].x, raw[0].y), max(raw[1].x, raw[1].y)), max(v_own, v_first)) == EMPTY)) break;
            if (++tries > PATIENCE) give_up();
        }
        float turned[2][4];
        turn(turned, raw, norm, c, s, a.eps, lane);
        if (own) k.x = rounded(turned[1][0], turned[1][1]), k.y = rounded(turned[1][2], turned[1][3]);
        const word low_q = rounded(turned[0][0] * a.scale, turned[0][1] * a.scale), high_q = rounded(turned[0][2] * a.scale, turned[0][3] * a.scale);
        float score = low(low_q) * low(k.x) + high(low_q) * high(k.x) + low(high_q) * low(k.y) + high(high_q) * high(k.y);
#pragma unroll
        for (int bits = 16; bits; bits /= 2) score += across(score, bits);
        if (scored && lane == 0) scores[warp] = score;
        if (writes && own) *(uint2*)key = k;
        if (writes && mixes) {
            *(word*)(a.values + cache + last * WIDTH + 2 * tid) = v_own;
            if (a.first) *(word*)(a.values + cache + 2 * tid) = v_first;
        }
    }
    meet();
    if (tid < WIDTH / 2) {
        float best = scores[0];
        for (int p = 1; p <= last; p++) best = fmaxf(best, scores[p]);
        float sum = 0.0f, mixed_low = 0.0f, mixed_high = 0.0f;
#pragma unroll
        for (int p = 0; p < POSITIONS; p++)
            if (p <= last) {
                const word pair = p == last ? v_own : a.first ? v_first : v[p];
                const float weight = exponential(scores[p] - best);
                sum += weight;
                mixed_low += weight * low(pair);
                mixed_high += weight * high(pair);
            }
        const word pair = rounded(quotient(mixed_low, sum), quotient(mixed_high, sum));
#pragma unroll 1
        for (int c = 0; c < a.copies; c++) {
            bf16* to = exchange + c * copy + AT_MIXED + head * WIDTH + 2 * tid;
            publish((word*)(to + line * row), pair);
            // Position 0 sees itself alone.
            if (a.first) publish((word*)(to + r * row), v_first);
        }
    }
}

// What 16 warps do with them.
template <int TILES>
DEVICE void multiply_all(const Arguments& a, Shared& s, float* part, const char* stages, int cta, int warp, int lane) {
    const int rows = a.rows, half = rows * LONGEST, tid = 32 * warp + lane;
    Ring ring = {s, stages, a.stages, {0, 0}, {0, 0}};
    const bool empties = tid == 32 * WARPS - 1;
    const int row = a.layers * LAYER, copy = MOST_ROWS * row, places = a.first ? rows / 2 : rows;
    const bf16* const read = a.exchange + cta % a.copies * copy;
    uint4 x[2][TILES], qkv[8];
    ring.take(qkv, warp, lane);
    await_previous();
    if (tid == 0) let_next_begin();
    // Of 8 outputs a program each: of the product behind attention, and the last one of a layer.
    const int r8 = tid / 8 < rows ? tid / 8 : 0, m8 = tid % 8;
    const bool live8 = tid / 8 < rows, near8 = warp * 4 < rows;
    float residual = live8 ? number(a.x[r8 * HIDDEN + cta * 8 + m8]) : 0.0f;
#pragma unroll 1
    for (int layer = 0; layer < a.layers; layer++) {
        const int at = layer * LAYER;
        if (layer == 0)
            gather<false>(x, a.x, HIDDEN, rows, warp, lane);
        else
            gather<true>(x, read + at - LAYER + AT_END, row, rows, warp, lane);
        multiply<4, 2, TILES, true>(qkv, x, part, s.squares[0], rows, warp, lane);
        meet();
        if (empties) ring.empty(4);
        if (warp < rows)
            give(a.exchange, warp * row + at + AT_QKV + cta * 32 + lane, 1, copy,
                 product<32>(part, warp, lane) * norm_of(s.squares[0], warp, a.eps), true, lane);
        {
            uint4 out[4], mixed[4][TILES];
            if (cta < places * HEADS) attend(a, layer, a.exchange + at + AT_QKV, a.exchange + at, row, copy, s.scores, cta, warp, lane);
            ring.take(out, warp, lane);
            if (layer == 0) {
                // The pass before the last one has left it full. There is time: what comes next has far to go.
                const int many = row / 8;
                for (int i = cta * 32 * WARPS + tid; i < a.copies * a.next_rows * many; i += CTAS * 32 * WARPS)
                    ((uint4*)a.next)[(i / (a.next_rows * many) * MOST_ROWS * many) + i % (a.next_rows * many)] = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
            }
            gather<true>(mixed, read + at + AT_MIXED, row, rows, warp, lane);
            multiply<1, 4, TILES, false>(out, mixed, part + half, nullptr, rows, warp, lane);
        }
        meet();
        if (empties) ring.empty(2);
        if (near8) {
            residual = low(rounded(residual + product<8>(part + half, r8, m8), 0.0f));
            give(a.exchange, r8 * row + at + AT_MIDDLE + cta * 8 + m8, a.copies, copy, residual, live8, lane);
        }
        {
            uint4 gate_up[12];
            ring.take(gate_up, warp, lane);
            gather<true>(x, read + at + AT_MIDDLE, row, rows, warp, lane);
            multiply<6, 2, TILES, true>(gate_up, x, part, s.squares[0], rows, warp, lane);
        }
        meet();
        if (empties) ring.empty(6);
        if (warp * 32 < 24 * rows) {
            const int r = tid / 24 < rows ? tid / 24 : 0, u = tid % 24, m = u / 8 * 16 + u % 8;
            const float norm = norm_of(s.squares[0], r, a.eps);
            const float gate = product<48>(part, r, m) * norm, up = product<48>(part, r, m + 8) * norm;
            give(a.exchange, r * row + at + AT_GATED + cta * 24 + u, a.copies, copy, quotient(gate, 1.0f + exponential(-gate)) * up, tid / 24 < rows, lane);
        }
        {
            uint4 down[6], gated[6][TILES];
            ring.take(down, warp, lane);
            gather<true>(gated, read + at + AT_GATED, row, rows, warp, lane);
            multiply<1, 6, TILES, false>(down, gated, part + half, nullptr, rows, warp, lane);
        }
        meet();
        if (empties) ring.empty(3);
        if (near8) {
            residual = low(rounded(residual + product<8>(part + half, r8, m8), 0.0f));
            give(a.exchange, r8 * row + at + AT_END + cta * 8 + m8, a.copies, copy, residual, live8, lane);
        }
        if (layer + 1 < a.layers) ring.take(qkv, warp, lane);
    }
    uint4 head[4];
    ring.take(head, warp, lane);
    gather<true>(x, read + (a.layers - 1) * LAYER + AT_END, row, rows, warp, lane);
    multiply<2, 2, TILES, true>(head, x, part, s.squares[0], rows, warp, lane);
    meet();
    const int r = tid / 16, unwanted = rows - places;
    if (r < rows) {
        const float value = product<16>(part, r, tid % 16) * norm_of(s.squares[0], r, a.eps);
        if (r >= unwanted) a.logits[(r - unwanted) * CODES + cta * 16 + tid % 16] = (bf16)rounded(value, 0.0f);
    }
}

template <int TILES>
DEVICE void pass(const Arguments& a, char* memory, int cta, int tid) {
    Shared& s = *(Shared*)memory;
    const int warp = uniform(tid / 32), lane = tid % 32;
    float* const part = (float*)(memory + (sizeof(Shared) + 127) / 128 * 128);
    char* const stages = (char*)(part + 2 * a.rows * LONGEST);
    if (tid == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 1);
        }
        barriers_ready();
    }
    meet_all();
    if (warp < WARPS)
        multiply_all<TILES>(a, s, part, stages, cta, warp, lane);
    else if (lane == 0)
        bring_weights(a, s, stages, cta);
}

#ifndef EMULATED
extern "C" __global__ __launch_bounds__(THREADS, 1) void frame_pass_8(const __grid_constant__ Arguments a) {
    pass<1>(a, shared_memory, blockIdx.x, threadIdx.x);
}
extern "C" __global__ __launch_bounds__(THREADS, 1) void frame_pass_16(const __grid_constant__ Arguments a) {
    pass<2>(a, shared_memory, blockIdx.x, threadIdx.x);
}
#endif
