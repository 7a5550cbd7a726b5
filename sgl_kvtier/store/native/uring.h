/* io_uring by system calls only, without a library: one ring, which one thread submits to and waits on. If the headers or
 * the kernel lack io_uring, ring_open() returns an error. */
#ifndef KVTIER_URING_H
#define KVTIER_URING_H

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __has_include
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#if defined(IORING_FEAT_SINGLE_MMAP) && defined(__NR_io_uring_setup) && defined(__NR_io_uring_enter)
#define KVTIER_URING 1
#endif
#endif
#endif

#ifdef KVTIER_URING

/* Newer than the oldest supported headers; a kernel that does not know them returns EINVAL. */
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

typedef struct {
    int fd;
    uint32_t *sq_head, *sq_tail, *sq_array, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, tail; /* `tail`: after the last entry prepared */
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *rings;
    size_t rings_bytes, sqes_bytes;
} Ring;

static void ring_close(Ring *ring) {
    if (ring->rings) munmap(ring->rings, ring->rings_bytes);
    if (ring->sqes) munmap(ring->sqes, ring->sqes_bytes);
    if (ring->fd >= 0) close(ring->fd);
    memset(ring, 0, sizeof *ring);
    ring->fd = -1;
}

static void *ring_map(int fd, size_t bytes, off_t what) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (at == MAP_FAILED) return NULL;
    madvise(at, bytes, MADV_DONTFORK);
    return at;
}

/* Returns 0 or an errno. Only the calling thread may use the ring. */
static int ring_open(Ring *ring, unsigned entries) {
    struct io_uring_params params = {.flags = IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    memset(ring, 0, sizeof *ring);
    ring->fd = (int)syscall(__NR_io_uring_setup, entries, &params);
    if (ring->fd < 0 && errno == EINVAL) {
        params = (struct io_uring_params){.flags = IORING_SETUP_CLAMP};
        ring->fd = (int)syscall(__NR_io_uring_setup, entries, &params);
    }
    if (ring->fd < 0) return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || params.sq_entries < entries) {
        ring_close(ring);
        return ENOSYS;
    }
    size_t sq = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_bytes = sq > cq ? sq : cq;
    ring->sqes_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    ring->rings = ring_map(ring->fd, ring->rings_bytes, IORING_OFF_SQ_RING);
    ring->sqes = ring_map(ring->fd, ring->sqes_bytes, IORING_OFF_SQES);
    if (!ring->rings || !ring->sqes) {
        ring_close(ring);
        return ENOMEM;
    }
    uint8_t *at = ring->rings;
    ring->sq_head = (uint32_t *)(at + params.sq_off.head);
    ring->sq_tail = (uint32_t *)(at + params.sq_off.tail);
    ring->sq_array = (uint32_t *)(at + params.sq_off.array);
    ring->sq_mask = *(uint32_t *)(at + params.sq_off.ring_mask);
    ring->cq_head = (uint32_t *)(at + params.cq_off.head);
    ring->cq_tail = (uint32_t *)(at + params.cq_off.tail);
    ring->cq_mask = *(uint32_t *)(at + params.cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(at + params.cq_off.cqes);
    for (uint32_t i = 0; i < params.sq_entries; i++) ring->sq_array[i] = i;
    ring->tail = *ring->sq_tail;
    return 0;
}

/* Entries prepared that the kernel has not taken. */
static uint32_t ring_pending(const Ring *ring) { return ring->tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE); }

/* An empty entry. The caller must keep no more in flight than the ring was opened for. */
static struct io_uring_sqe *ring_entry(Ring *ring) {
    struct io_uring_sqe *entry = &ring->sqes[ring->tail++ & ring->sq_mask];
    memset(entry, 0, sizeof *entry);
    return entry;
}

/* Submits entries and waits for `wait` completions. Returns 0 or an errno. */
static int ring_enter(Ring *ring, unsigned wait) {
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
    long taken = syscall(__NR_io_uring_enter, ring->fd, ring_pending(ring), wait, IORING_ENTER_GETEVENTS, NULL, 0);
    return taken < 0 ? errno : 0;
}

/* Makes the kernel post completions of requests that have ended, which it does only within this call. Does not submit or
 * wait. */
static void ring_reap(Ring *ring) { (void)syscall(__NR_io_uring_enter, ring->fd, 0, 0, IORING_ENTER_GETEVENTS, NULL, 0); }

/* Takes back the last entry that the kernel has not taken; returns its user_data. Only while ring_pending() is not 0. */
static uint64_t ring_take_back(Ring *ring) {
    uint64_t what = ring->sqes[--ring->tail & ring->sq_mask].user_data;
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
    return what;
}

/* The next completion: 1, or 0 if there is none. */
static int ring_next(Ring *ring, uint64_t *what, int32_t *result) {
    uint32_t head = *ring->cq_head;
    if (head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) return 0;
    const struct io_uring_cqe *found = &ring->cqes[head & ring->cq_mask];
    *what = found->user_data;
    *result = found->res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return 1;
}

/* Whether this process may use io_uring: 0 or an errno. Submits an empty request and waits for it. */
static int ring_probe(void) {
    Ring ring;
    uint64_t what = 0;
    int32_t result = -EIO;
    int error = ring_open(&ring, 4);
    if (error) return error;
    struct io_uring_sqe *entry = ring_entry(&ring);
    entry->opcode = IORING_OP_NOP;
    entry->user_data = 7;
    error = ring_enter(&ring, 1);
    if (!error && (!ring_next(&ring, &what, &result) || what != 7)) error = EIO;
    if (!error && result < 0) error = -result;
    ring_close(&ring);
    return error;
}

#else

static int ring_probe(void) { return ENOSYS; }

#endif
#endif
