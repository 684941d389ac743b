// A pass of the Code Predictor, layers and head, as one kernel that stays on the card: x [rows, HIDDEN] -> logits [rows wanted, CODES].
//
// CTAS programs, one a multiprocessor. Each has its share of every matrix's outputs. Weights come to a ring in shared memory in the
// order in which they are used; they depend on nothing, so memory never waits for the exchange of what does. The last warp that has taken its
// part of a stage to its registers has the stage filled anew.
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

constexpr int CTAS = 128, WARPS = 16, THREADS = 32 * WARPS;
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
// Rows of partial sums are so much longer than their outputs, for the memory's banks.
constexpr int APART = 4, WIDEST = 48 + APART;

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
    int layers, rows, first, position, cache_places, copies, next_rows, stages, kept;
};

#ifndef EMULATED
#define DEVICE __device__ __forceinline__

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE word shared_address(const void* p) { return (word)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
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
DEVICE u64 kept_long() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void bring(void* to, const void* from, int bytes, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}
DEVICE word count(word* counter) {
    word before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
    return before;
}
DEVICE void meet() { __syncthreads(); }
DEVICE void meet_warp() { __syncwarp(); }
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
extern __shared__ __align__(128) char shared_memory[];
#endif

DEVICE float low(word pair) { return wide(pair << 16); }
DEVICE float high(word pair) { return wide(pair & 0xffff0000u); }
DEVICE float number(bf16 x) { return wide((word)x << 16); }
DEVICE float inverse_root(float squares, float count, float eps) { return 1.0f / sqrtf(squares / count + eps); }

DEVICE bool there(const uint4& v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
DEVICE bool there(const uint2& v) { return v.x != EMPTY && v.y != EMPTY; }
DEVICE bool there(word v) { return v != EMPTY; }

template <typename T>
DEVICE T awaited(const T* p) {
    T v = fresh(p);
    for (int tries = 0; !there(v); v = fresh(p))
        if (++tries > PATIENCE) give_up();
    return v;
}

struct Shared {
    u64 full[MOST_STAGES];
    word taken[MOST_STAGES];
    float scores[POSITIONS];
    float squares[WARPS][MOST_ROWS];
};

// The weights on their way: stage `number` of a pass lies in the ring at `at`.
struct Ring {
    Shared& s;
    char* memory;
    const char* matrices;  // this program's, of the first layer
    const char* head;
    int stages, total, kept;
    int number, at;
    word parity;

    static constexpr int BY_LAYER = (QKV * HIDDEN + HIDDEN * MIXED + 2 * INNER * HIDDEN + HIDDEN * INNER) / CTAS * 2 / STAGE;
    static constexpr int BY_HEAD = CODES * HIDDEN / CTAS * 2 / STAGE;

    DEVICE void fill(int which, int place) {
        const int layer = which / BY_LAYER, stage = which % BY_LAYER;
        const char* from = which < total - BY_HEAD ? matrices + ((u64)layer * CTAS * BY_LAYER + stage) * STAGE
                                                   : head + (which - (total - BY_HEAD)) * STAGE;
        barrier_expect(&s.full[place], STAGE);
        bring(memory + place * STAGE, from, STAGE, &s.full[place], which < kept ? kept_long() : used_once());
    }

    // A product's weights to registers.
    template <int UNITS>
    DEVICE void take(uint4 (&w)[UNITS], int warp, int lane) {
#pragma unroll
        for (int u = 0; u < UNITS; u += 2) {
            barrier_wait(&s.full[at], parity);
            const char* from = memory + at * STAGE + warp * (2 * UNIT) + lane * 16;
            w[u] = *(const uint4*)from;
            w[u + 1] = *(const uint4*)(from + UNIT);
            meet_warp();
            if (lane == 0 && count(&s.taken[at]) % WARPS == WARPS - 1 && number + stages < total) fill(number + stages, at);
            number++;
            if (++at == stages) at = 0, parity ^= 1;
        }
    }
};

// A warp's inputs, rows `apart` numbers apart; once they are there, if AWAITED.
template <bool AWAITED, int PAIRS, int TILES>
DEVICE void gather(uint4 (&x)[PAIRS][TILES], const bf16* from, int apart, int rows, int warp, int lane) {
    const bf16* at = from + (lane >> 2) * apart + warp * 32 + (lane & 3) * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        bool live = t * 8 + (lane >> 2) < rows;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) x[p][t] = live ? fresh((const uint4*)(at + t * 8 * apart + p * 512)) : uint4{0, 0, 0, 0};
    }
    for (int tries = 0; AWAITED;) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < PAIRS * TILES; i++) all = all && there(x[i / TILES][i % TILES]);
        if (all) break;
        if (++tries > PATIENCE) give_up();
#pragma unroll
        for (int i = 0; i < PAIRS * TILES; i++)
            if (!there(x[i / TILES][i % TILES])) x[i / TILES][i % TILES] = fresh((const uint4*)(at + i % TILES * 8 * apart + i / TILES * 512));
    }
    meet_warp();
}

// A warp's part of a product, EIGHTS times eight outputs: its sums, and with NORM its inputs' squares, to shared memory.
template <int EIGHTS, int PAIRS, int TILES, bool NORM>
DEVICE void multiply(const uint4 (&w)[EIGHTS * PAIRS], const uint4 (&x)[PAIRS][TILES], float* sums, float* squares, int rows, int warp, int lane) {
    constexpr int CHAINS = EIGHTS == 1 ? 2 : EIGHTS / 2, LINE = EIGHTS * 8 + APART;
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
    float* mine = sums + warp * rows * LINE;
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

// What all warps have of output m of row r.
template <int LINE>
DEVICE float total(const float* sums, int rows, int r, int m) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += sums[(warp * rows + r) * LINE + m];
    return sum;
}

DEVICE float norm_of(const float* squares, int r, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += squares[warp * MOST_ROWS + r];
    return inverse_root(sum, HIDDEN, eps);
}

// Two neighbouring lanes' numbers as one word, into every copy of the exchange.
DEVICE void give(bf16* exchange, int offset, int copies, int copy, float value, bool live, int lane) {
    float other = across(value, 1);
    if (live && lane % 2 == 0) {
        word pair = rounded(value, other);
        for (int c = 0; c < copies; c++) publish((word*)(exchange + c * copy + offset), pair);
    }
}

// Four numbers of a head from 4 * lane on, normed and rotated.
DEVICE void turn(float (&v)[4], uint2 raw, uint2 norm, float4 c, float4 s, float eps, int lane) {
    v[0] = low(raw.x), v[1] = high(raw.x), v[2] = low(raw.y), v[3] = high(raw.y);
    float square = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
#pragma unroll
    for (int bits = 16; bits; bits /= 2) square += across(square, bits);
    float root = inverse_root(square, WIDTH, eps);
    v[0] *= root * low(norm.x), v[1] *= root * high(norm.x), v[2] *= root * low(norm.y), v[3] *= root * high(norm.y);
    float sign = lane < 16 ? -1.0f : 1.0f;
    float other[4];
#pragma unroll
    for (int i = 0; i < 4; i++) other[i] = across(v[i], 16);
    v[0] = v[0] * c.x + sign * other[0] * s.x;
    v[1] = v[1] * c.y + sign * other[1] * s.y;
    v[2] = v[2] * c.z + sign * other[2] * s.z;
    v[3] = v[3] * c.w + sign * other[3] * s.w;
}

// One row and query head a program: a warp makes the score of the position it is numbered as, two warps mix the values.
DEVICE void attend(const Arguments& a, int layer, const bf16* qkv, bf16* exchange, int row, int copy, float* scores, int item, int warp, int lane) {
    const int places = a.first ? a.rows / 2 : a.rows, r = item / HEADS, head = item % HEADS, group = head / (HEADS / GROUPS);
    const int last = a.first ? 1 : a.position, line = a.first ? places + r : r, tid = warp * 32 + lane;
    const u64 cache = (((u64)layer * a.cache_places + r) * GROUPS + group) * POSITIONS * WIDTH;
    const bool writes = head % (HEADS / GROUPS) == 0;
    word v[POSITIONS];
    if (tid < WIDTH / 2)
#pragma unroll
        for (int p = 0; p < POSITIONS; p++) v[p] = !a.first && p < last ? fresh((const word*)(a.values + cache + p * WIDTH + 2 * tid)) : 0;
    if (warp <= last) {
        const bf16* norms = a.norms + layer * 2 * WIDTH + 4 * lane;
        const uint2 q_norm = *(const uint2*)norms, k_norm = *(const uint2*)(norms + WIDTH);
        const bool own = a.first || warp == last;
        const int angle = warp * (WIDTH / 2) + lane % 16 * 4, q_angle = last * (WIDTH / 2) + lane % 16 * 4;
        const float4 qc = *(const float4*)(a.cos + q_angle), qs = *(const float4*)(a.sin + q_angle);
        const float4 kc = *(const float4*)(a.cos + angle), ks = *(const float4*)(a.sin + angle);
        bf16* key = a.keys + cache + warp * WIDTH + 4 * lane;
        uint2 k = {0, 0};
        if (!own) k = fresh((const uint2*)key);
        float q[4];
        turn(q, awaited((const uint2*)(qkv + line * row + head * WIDTH + 4 * lane)), q_norm, qc, qs, a.eps, lane);
        if (own) {
            float turned[4];
            const int from = a.first && warp == 0 ? r : line;
            turn(turned, awaited((const uint2*)(qkv + from * row + (HEADS + group) * WIDTH + 4 * lane)), k_norm, kc, ks, a.eps, lane);
            k.x = rounded(turned[0], turned[1]), k.y = rounded(turned[2], turned[3]);
            if (writes) *(uint2*)key = k;
        }
        const word low_q = rounded(q[0] * a.scale, q[1] * a.scale), high_q = rounded(q[2] * a.scale, q[3] * a.scale);
        float score = low(low_q) * low(k.x) + high(low_q) * high(k.x) + low(high_q) * low(k.y) + high(high_q) * high(k.y);
#pragma unroll
        for (int bits = 16; bits; bits /= 2) score += across(score, bits);
        if (lane == 0) scores[warp] = score;
    }
    word v_own = 0, v_first = 0;
    if (tid < WIDTH / 2) {
        const int at = (HEADS + GROUPS + group) * WIDTH + 2 * tid;
        v_own = awaited((const word*)(qkv + line * row + at));
        if (writes) *(word*)(a.values + cache + last * WIDTH + 2 * tid) = v_own;
        if (a.first) {
            v_first = awaited((const word*)(qkv + r * row + at));
            if (writes) *(word*)(a.values + cache + 2 * tid) = v_first;
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
        const word pair = rounded(mixed_low / sum, mixed_high / sum);
        for (int c = 0; c < a.copies; c++) {
            bf16* to = exchange + c * copy + AT_MIXED + head * WIDTH + 2 * tid;
            publish((word*)(to + line * row), pair);
            // Position 0 sees itself alone.
            if (a.first) publish((word*)(to + r * row), v_first);
        }
    }
}

template <int TILES>
DEVICE void pass(const Arguments& a, char* memory, int cta, int tid) {
    Shared& s = *(Shared*)memory;
    const int warp = tid / 32, lane = tid % 32, rows = a.rows;
    float* const part = (float*)(memory + (sizeof(Shared) + 127) / 128 * 128);
    const int half = WARPS * rows * WIDEST;
    const int total_stages = a.layers * Ring::BY_LAYER + Ring::BY_HEAD;
    Ring ring = {s, (char*)(part + 2 * half), a.matrices + (u64)cta * Ring::BY_LAYER * STAGE, a.head + (u64)cta * Ring::BY_HEAD * STAGE,
                 a.stages, total_stages, a.kept, 0, 0, 0};
    if (tid == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(&s.full[i], 1);
            s.taken[i] = 0;
        }
        barriers_ready();
        for (int i = 0; i < a.stages; i++) ring.fill(i, i);
    }
    meet();
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
        if (warp < rows)
            give(a.exchange, warp * row + at + AT_QKV + cta * 32 + lane, 1, copy,
                 total<32 + APART>(part, rows, warp, lane) * norm_of(s.squares[0], warp, a.eps), true, lane);
        if (layer == 0) {
            // The pass before the last one has left it full.
            const int many = row / 8;
            for (int i = cta * 32 * WARPS + tid; i < a.copies * a.next_rows * many; i += CTAS * 32 * WARPS)
                ((uint4*)a.next)[(i / (a.next_rows * many) * MOST_ROWS * many) + i % (a.next_rows * many)] = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
        }
        {
            uint4 out[4], mixed[4][TILES];
            ring.take(out, warp, lane);
            if (cta < places * HEADS) attend(a, layer, a.exchange + at + AT_QKV, a.exchange + at, row, copy, s.scores, cta, warp, lane);
            gather<true>(mixed, read + at + AT_MIXED, row, rows, warp, lane);
            multiply<1, 4, TILES, false>(out, mixed, part + half, nullptr, rows, warp, lane);
        }
        meet();
        if (near8) {
            residual = low(rounded(residual + total<8 + APART>(part + half, rows, r8, m8), 0.0f));
            give(a.exchange, r8 * row + at + AT_MIDDLE + cta * 8 + m8, a.copies, copy, residual, live8, lane);
        }
        {
            uint4 gate_up[12];
            ring.take(gate_up, warp, lane);
            gather<true>(x, read + at + AT_MIDDLE, row, rows, warp, lane);
            multiply<6, 2, TILES, true>(gate_up, x, part, s.squares[0], rows, warp, lane);
        }
        meet();
        if (warp * 32 < 24 * rows) {
            const int r = tid / 24 < rows ? tid / 24 : 0, u = tid % 24, m = u / 8 * 16 + u % 8;
            const float norm = norm_of(s.squares[0], r, a.eps);
            const float gate = total<48 + APART>(part, rows, r, m) * norm, up = total<48 + APART>(part, rows, r, m + 8) * norm;
            give(a.exchange, r * row + at + AT_GATED + cta * 24 + u, a.copies, copy, gate / (1.0f + exponential(-gate)) * up, tid / 24 < rows, lane);
        }
        {
            uint4 down[6], gated[6][TILES];
            ring.take(down, warp, lane);
            gather<true>(gated, read + at + AT_GATED, row, rows, warp, lane);
            multiply<1, 6, TILES, false>(down, gated, part + half, nullptr, rows, warp, lane);
        }
        meet();
        if (near8) {
            residual = low(rounded(residual + total<8 + APART>(part + half, rows, r8, m8), 0.0f));
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
        const float value = total<16 + APART>(part, rows, r, tid % 16) * norm_of(s.squares[0], r, a.eps);
        if (r >= unwanted) a.logits[(r - unwanted) * CODES + cta * 16 + tid % 16] = (bf16)rounded(value, 0.0f);
    }
}

#ifndef EMULATED
extern "C" __global__ __launch_bounds__(THREADS, 1) void frame_pass_8(const __grid_constant__ Arguments a) {
    pass<1>(a, shared_memory, blockIdx.x, threadIdx.x);
}
extern "C" __global__ __launch_bounds__(THREADS, 1) void frame_pass_16(const __grid_constant__ Arguments a) {
    pass<2>(a, shared_memory, blockIdx.x, threadIdx.x);
}
#endif
