// frame_pass.cu on a CPU: every thread of the card a fiber, warps and copies in an order drawn at random.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define EMULATED
#define DEVICE inline

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };

// Fibers, x86-64: registers that a callee keeps lie on the stack.
extern "C" void change_fiber(void** from, void* to);
asm(".text\n.globl change_fiber\nchange_fiber:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

struct Warp {
    int arrived = 0, left = 0;
    float value[32];
    unsigned a[32][4], b[32][2];
    float (*c[32])[4];
};
struct Program {
    char* memory;
    int met = 0, generation = 0;
    std::vector<Warp> warps;
};
struct Copy {
    void* to;
    const void* from;
    int bytes;
    unsigned long long* barrier;
};
struct Fiber {
    void* stack;
    bool over = false;
    int cta, tid, waits = 0;
};

static void* scheduler;
static Fiber* now;
static std::vector<Program> programs;
static std::vector<Copy> copies_pending;
static bool stuck;

static void pause_fiber() { change_fiber(&now->stack, scheduler); }
static Warp& my_warp() { return programs[now->cta].warps[now->tid / 32]; }

template <typename Work>
static void with_warp(Work last) {
    Warp& w = my_warp();
    while (w.left) pause_fiber();
    if (++w.arrived == 32) {
        last(w);
        w.arrived = 0;
        w.left = 31;
        return;
    }
    while (!w.left) pause_fiber();
    w.left--;
}

typedef unsigned int word;
typedef unsigned long long u64;
static int lane_now() { return now->tid % 32; }
static void barrier_init(u64* b, int) { *b = 0; }
static void barrier_arrive(u64* b) { ++*b; }
static void barriers_ready() {}
static void barrier_expect(u64*, int) {}
static void barrier_wait(u64* b, word parity) {
    while ((*b & 1) == parity) pause_fiber();
}
static u64 used_once() { return 0; }
static void bring(void* to, const void* from, int bytes, u64* barrier, u64) { copies_pending.push_back({to, from, bytes, barrier}); }
static void meet_of(int threads) {
    Program& p = programs[now->cta];
    int generation = p.generation;
    if (++p.met == threads) {
        p.met = 0;
        p.generation++;
        return;
    }
    while (p.generation == generation) pause_fiber();
}
static void meet_warp() { with_warp([](Warp&) {}); }
static float across(float value, int bits) {
    float result;
    Warp& w = my_warp();
    while (w.left) pause_fiber();
    w.value[lane_now()] = value;
    with_warp([](Warp& all) {
        float before[32];
        memcpy(before, all.value, sizeof before);
        memcpy(all.b, before, sizeof before);
    });
    result = ((float*)w.b)[lane_now() ^ bits];
    meet_warp();
    return result;
}
static int uniform(int value) { return value; }
static void meet();
static void meet_all();
static bool any_of(bool one) {
    Warp& w = my_warp();
    while (w.left) pause_fiber();
    w.a[lane_now()][0] = one;
    with_warp([](Warp& all) {
        all.b[0][0] = 0;
        for (auto& a : all.a) all.b[0][0] |= a[0];
    });
    bool any = w.b[0][0];
    meet_warp();
    return any;
}
static float wide(word bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void multiply_add(float (&c)[4], word a0, word a1, word a2, word a3, word b0, word b1) {
    Warp& w = my_warp();
    while (w.left) pause_fiber();
    int lane = lane_now();
    w.a[lane][0] = a0, w.a[lane][1] = a1, w.a[lane][2] = a2, w.a[lane][3] = a3, w.b[lane][0] = b0, w.b[lane][1] = b1, w.c[lane] = &c;
    with_warp([](Warp& all) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 8; i++) {
                int g = lane / 4, t = lane % 4;
                a[g + i / 2 % 2 * 8][t * 2 + i % 2 + i / 4 * 8] = wide(i % 2 ? all.a[lane][i / 2] & 0xffff0000u : all.a[lane][i / 2] << 16);
                if (i < 4) b[t * 2 + i % 2 + i / 2 * 8][g] = wide(i % 2 ? all.b[lane][i / 2] & 0xffff0000u : all.b[lane][i / 2] << 16);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                float sum = 0;
                for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
                (*all.c[lane])[i] += sum;
            }
    });
}
template <typename T>
static T fresh(const T* p) {
    now->waits++;
    if (now->waits % 2) pause_fiber();
    return *p;
}
static void publish(word* p, word v) { *p = v; }
static void await_previous() {}
static void let_next_begin() {}
static void give_up() { stuck = true; }
static word bits_of(float x) {
    word bits;
    memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static word rounded(float low, float high) { return bits_of(low) | bits_of(high) << 16; }
static float exponential(float x) { return expf(x); }
static float quotient(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
using std::max;

#include "../../../engine/kernels/gpu/frame_pass.cu"

static void meet() { meet_of(32 * WARPS); }
static void meet_all() { meet_of(THREADS); }
static const Arguments* arguments;

static void run_fiber() {
    if (arguments->rows <= 8)
        pass<1>(*arguments, programs[now->cta].memory, now->cta, now->tid);
    else
        pass<2>(*arguments, programs[now->cta].memory, now->cta, now->tid);
    now->over = true;
    for (;;) pause_fiber();
}

// 0, or 1 where nothing moves any more.
extern "C" int emulate(const Arguments* a, int memory_bytes, int seed) {
    arguments = a;
    stuck = false;
    const size_t stack = 1 << 14;
    const int threads = CTAS * THREADS;
    char* stacks = (char*)mmap(nullptr, stack * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    programs.assign(CTAS, {});
    for (Program& p : programs) {
        if (posix_memalign((void**)&p.memory, 128, memory_bytes)) return -1;
        memset(p.memory, 0xff, memory_bytes);
        p.warps.resize(THREADS / 32);
    }
    std::vector<Fiber> fibers(threads);
    for (int i = 0; i < threads; i++) {
        void** top = (void**)(stacks + stack * (i + 1)) - 2;
        top[0] = (void*)run_fiber;
        fibers[i].stack = top - 6;
        fibers[i].cta = i / THREADS;
        fibers[i].tid = i % THREADS;
    }
    std::mt19937 random(seed);
    std::vector<int> order(threads / 32);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    int left = threads;
    int turns = 0;
    // Some 900 are enough.
    while (left && !stuck && ++turns < 5000) {
        for (int i = 0; i < 64; i++) std::swap(order[random() % order.size()], order[random() % order.size()]);
        for (int w : order) {
            if (random() % 4 == 0) continue;
            for (int i = w * 32; i < w * 32 + 32; i++)
                if (!fibers[i].over) {
                    now = &fibers[i];
                    change_fiber(&scheduler, now->stack);
                    left -= now->over;
                }
        }
        for (size_t i = 0; i < copies_pending.size();) {
            if (random() % 3) {
                Copy c = copies_pending[i];
                memcpy(c.to, c.from, c.bytes);
                ++*c.barrier;
                copies_pending[i] = copies_pending.back();
                copies_pending.pop_back();
            } else {
                i++;
            }
        }
    }
    for (Program& p : programs) free(p.memory);
    munmap(stacks, stack * threads);
    copies_pending.clear();
    return left || stuck;
}
