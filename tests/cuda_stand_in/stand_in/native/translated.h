/* Under every kernel that ptx.py translates: memory, the threads of a block, shuffles. Included once by its C. */
#include "kernel.h"

#include <stdlib.h>
#include <ucontext.h>

#define NAME ""
#define THREAD const struct stand_in_launch *launch, const uint32_t *block, const uint32_t *thread, uint32_t number

extern int stand_in_may_access(uint64_t address, int nbytes, int writes, const char *kernel);
extern void stand_in_bad_shared(uint64_t address, int nbytes, const char *kernel);

enum { MOST_SHARED = 227 << 10, STACK_BYTES = 64 << 10 };
static __thread char shared[MOST_SHARED] __attribute__((aligned(128)));

#define ACCESS(address, nbytes, writes)                                                                                          \
    if (!stand_in_may_access(address, nbytes, writes, NAME)) goto ended
#define IN_SHARED(address, nbytes)                                                                                               \
    if ((uint64_t)(address) + (nbytes) > STATIC_SHARED + (uint64_t)launch->shared_bytes || (address) % (nbytes)) {               \
        stand_in_bad_shared(address, nbytes, NAME);                                                                              \
        goto ended;                                                                                                              \
    }

typedef void (*thread_function)(THREAD);

static inline uint32_t bfe_u32(uint32_t value, uint32_t first, uint32_t count) {
    first &= 255, count &= 255;
    if (first > 31 || !count) return 0;
    return count >= 32 ? value >> first : (value >> first) & ((1u << count) - 1);
}

static inline uint32_t bfe_s32(uint32_t value, uint32_t first, uint32_t count) {
    first &= 255, count &= 255;
    if (!count) return 0;
    uint32_t last = first + count - 1 > 31 ? 31 : first + count - 1, sign = value >> last & 1;
    uint32_t bits = first > 31 ? 0 : value >> first, known = first > 31 ? 0 : last - first + 1;
    if (known >= 32) return bits;
    uint32_t mask = (1u << known) - 1;
    return sign ? bits | ~mask : bits & mask;
}

/* prmt: each nibble chooses a byte of the eight of two words, or its sign. */
static inline uint32_t bytes_chosen(uint32_t low, uint32_t high, uint32_t chosen) {
    uint64_t eight = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t nibble = chosen >> (4 * n) & 15, byte = eight >> (8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * n);
    }
    return result;
}

static void run_blocks(const struct stand_in_launch *launch, thread_function function) __attribute__((unused));
static void run_blocks(const struct stand_in_launch *launch, thread_function function) {
    const uint32_t *grid = launch->grid, *size = launch->block;
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                uint32_t block[3] = {x, y, z};
                for (uint32_t number = 0; number < size[0] * size[1] * size[2]; number++) {
                    uint32_t thread[3] = {number % size[0], number / size[0] % size[1], number / size[0] / size[1]};
                    function(launch, block, thread, number);
                }
            }
}

/* --- threads as fibres, where they wait for each other */

enum { BLOCK, WARP };

struct meeting {
    uint32_t members, here, turn; /* threads that have not ended; of these, those that wait; how often all have met */
};

struct fibre {
    ucontext_t context;
    char *stack;
    int ended;
};

static __thread struct fibre *fibres;
static __thread uint32_t fibre_count, running;
static __thread ucontext_t scheduler;
static __thread struct meeting whole, warps[32];
static __thread uint32_t words[2][1024]; /* said at a shuffle; doubled, since the next may begin before all have read */
static __thread const struct stand_in_launch *current;
static __thread const uint32_t *current_block;
static __thread thread_function current_function;

static inline void met(struct meeting *meeting) {
    if (meeting->members && meeting->here == meeting->members) meeting->here = 0, meeting->turn++;
}

/* Until every thread of the block, or of the warp, that has not ended is here. */
static void together(int which) {
    struct meeting *meeting = which == BLOCK ? &whole : &warps[running / 32];
    uint32_t turn = meeting->turn;
    meeting->here++;
    met(meeting);
    while (meeting->turn == turn) swapcontext(&fibres[running].context, &scheduler);
}

static uint32_t said_by(uint32_t word, uint32_t lane) __attribute__((unused));
static uint32_t said_by(uint32_t word, uint32_t lane) {
    uint32_t *said = words[warps[running / 32].turn & 1], first = running / 32 * 32;
    said[running] = word;
    together(WARP);
    return said[first + lane];
}

/* shfl.sync: `clamp` holds the width of a segment and its last lane. From outside of the segment comes the own word. */
static uint32_t shuffled(uint32_t word, uint32_t from, uint32_t clamp, int up, uint32_t *valid) __attribute__((unused));
static uint32_t shuffled(uint32_t word, uint32_t from, uint32_t clamp, int up, uint32_t *valid) {
    uint32_t lane = running % 32, segment = clamp >> 8 & 31, bound = clamp & 31;
    int32_t last = (int32_t)((lane & segment) | (bound & ~segment)), chosen = (int32_t)from;
    *valid = up ? chosen >= last : chosen <= last;
    return said_by(word, *valid ? (uint32_t)chosen & 31 : lane);
}

/* redux.sync: a = add, m = min, M = max, and &, | or ^, of the words of these lanes. */
static uint32_t reduced(uint32_t word, uint32_t lanes, char how, int with_sign) __attribute__((unused));
static uint32_t reduced(uint32_t word, uint32_t lanes, char how, int with_sign) {
    uint32_t *said = words[warps[running / 32].turn & 1], first = running / 32 * 32, result = word;
    int started = 0;
    said[running] = word;
    together(WARP);
    for (uint32_t lane = 0; lane < 32; lane++) {
        if (!(lanes >> lane & 1)) continue;
        uint32_t other = said[first + lane];
        int less = with_sign ? (int32_t)other < (int32_t)result : other < result;
        if (!started++) result = other;
        else if (how == 'a') result += other;
        else if (how == '&') result &= other;
        else if (how == '|') result |= other;
        else if (how == '^') result ^= other;
        else if (other != result && less == (how == 'm')) result = other;
    }
    return result;
}

static void begin_fibre(void) {
    const uint32_t *size = current->block, number = running;
    uint32_t thread[3] = {number % size[0], number / size[0] % size[1], number / size[0] / size[1]};
    current_function(current, current_block, thread, number);
    fibres[number].ended = 1;
    whole.members--, warps[number / 32].members--;
    met(&whole), met(&warps[number / 32]);
}

static void run_block_of_fibres(uint32_t count) {
    whole = (struct meeting){count, 0, 0};
    for (uint32_t warp = 0; warp * 32 < count; warp++)
        warps[warp] = (struct meeting){count - warp * 32 < 32 ? count - warp * 32 : 32, 0, 0};
    for (uint32_t n = 0; n < count; n++) {
        struct fibre *fibre = &fibres[n];
        getcontext(&fibre->context);
        fibre->context.uc_stack.ss_sp = fibre->stack;
        fibre->context.uc_stack.ss_size = STACK_BYTES;
        fibre->context.uc_link = &scheduler;
        fibre->ended = 0;
        makecontext(&fibre->context, begin_fibre, 0);
    }
    while (whole.members)
        for (running = 0; running < count; running++)
            if (!fibres[running].ended) swapcontext(&scheduler, &fibres[running].context);
}

static void run_blocks_of_fibres(const struct stand_in_launch *launch, thread_function function) __attribute__((unused));
static void run_blocks_of_fibres(const struct stand_in_launch *launch, thread_function function) {
    const uint32_t *grid = launch->grid, *size = launch->block, count = size[0] * size[1] * size[2];
    if (fibre_count < count) {
        fibres = realloc(fibres, count * sizeof *fibres);
        for (; fibre_count < count; fibre_count++) fibres[fibre_count].stack = malloc(STACK_BYTES);
    }
    current = launch, current_function = function;
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                uint32_t block[3] = {x, y, z};
                current_block = block;
                run_block_of_fibres(count);
            }
}
