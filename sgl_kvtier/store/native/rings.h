/* I/O threads that read through an io_uring of their own: many runs are in flight at once, and each is verified when it
 * completes.
 *
 * One thread per ring begins runs, submits them and verifies completed pages; no page moves between threads. If a ring
 * fails, its thread abandons it and reads one run after the other.
 */
#ifndef KVTIER_RINGS_H
#define KVTIER_RINGS_H

#include <sys/eventfd.h>

#include "pool.h"
#include "uring.h"

#ifdef KVTIER_URING

#define WAKE UINT64_MAX
#define GROUP 8      /* runs submitted at once: the device starts on them while more are prepared */
#define STUBBORN 100 /* consecutive times that the kernel may lack memory for a request */

typedef struct {
    Run run;
    Scratch scratch;
    uint8_t *copy;
    size_t moved;
    int buffers, made, error, unfinished; /* `unfinished`: the rest is read without the ring */
} Flight;

typedef struct {
    RingThread *ring_thread;
    Pool *pool;
    Ring ring;
    Flight *flights;
    uint32_t *free, *landed; /* stack of unused flights; queue of completed ones to be verified */
    size_t count, free_count, landed_head, landed_count, in_ring, in_ring_bytes;
    int broken, stubborn;
} Rings;

static void land(Rings *r, uint32_t index) {
    r->landed[(r->landed_head + r->landed_count++) % r->count] = index;
}

static void leave_ring(Rings *r, uint32_t index) {
    r->in_ring--;
    r->in_ring_bytes -= run_size(&r->flights[index].run);
    land(r, index);
}

/* The ring has failed: runs that the kernel did not take are read without it. */
static void give_up(Rings *r) {
    r->broken = 1;
    while (ring_pending(&r->ring)) {
        uint64_t what = ring_take_back(&r->ring);
        if (what == WAKE) continue;
        r->flights[what].unfinished = 1;
        leave_ring(r, (uint32_t)what);
    }
}

static void watch_wake(Rings *r) {
    struct io_uring_sqe *entry = ring_entry(&r->ring);
    entry->opcode = IORING_OP_POLL_ADD;
    entry->fd = r->ring_thread->wake_fd;
    entry->poll_events = POLLIN;
    entry->user_data = WAKE;
}

static void collect(Rings *r) {
    uint64_t what, woken;
    int32_t result;
    while (ring_next(&r->ring, &what, &result)) {
        if (what == WAKE) {
            while (read(r->ring_thread->wake_fd, &woken, sizeof woken) > 0) continue;
            if (!r->broken) watch_wake(r);
            continue;
        }
        Flight *flight = &r->flights[what];
        result = completed(flight->scratch.iov, flight->buffers, result);
        if (result > 0) flight->moved = (size_t)result;
        /* Also set at the file's end, where the next attempt reads nothing. */
        flight->unfinished = result == -EINTR || result == -EAGAIN || (result > 0 && (size_t)result < run_size(&flight->run));
        flight->error = result < 0 && !flight->unfinished ? -result : 0;
        leave_ring(r, (uint32_t)what);
    }
}

/* Submits prepared entries. With `wait`, waits for a completion or a wake-up. */
static void enter(Rings *r, int wait) {
    if (!r->broken) {
        int error = ring_enter(&r->ring, (unsigned)wait);
        r->stubborn = error == EAGAIN || error == EBUSY || error == ENOMEM ? r->stubborn + 1 : 0;
        if (r->stubborn > STUBBORN || (error && error != EINTR && !r->stubborn)) {
            give_up(r);
        } else if (r->stubborn) {
            ring_reap(&r->ring); /* completed requests hold the memory that is missing */
            poll(NULL, 0, 1);
        }
    } else {
        struct pollfd wake = {.fd = r->ring_thread->wake_fd, .events = POLLIN};
        uint64_t woken;
        if (wait && poll(&wake, 1, r->in_ring ? 1 : -1) > 0) (void)!read(r->ring_thread->wake_fd, &woken, sizeof woken);
        /* Requests taken before the failure still write to the callers' memory: their pages end when they complete. */
        if (r->in_ring) ring_reap(&r->ring);
    }
    collect(r);
}

static int has_room(const Rings *r) {
    return r->free_count && r->in_ring < r->pool->depth && (!r->in_ring || r->in_ring_bytes < r->pool->depth_bytes);
}

/* Adds a begun run to the ring, or to the completed ones if there is nothing to read. */
static void launch(Rings *r, uint32_t index) {
    Flight *flight = &r->flights[index];
    const Page *first = &flight->run.job->pages[flight->run.low];
    flight->error = flight->unfinished = flight->buffers = 0;
    flight->moved = 0;
    if (!flight->made && !(flight->made = !make_scratch(&flight->scratch))) free_scratch(&flight->scratch);
    if (first->fd >= 0 && flight->made)
        flight->buffers = prepare_read(&r->pool->device, &flight->run, &flight->scratch, &flight->copy);
    if (first->fd < 0 || !flight->buffers || r->broken) {
        flight->error = first->fd >= 0 && !flight->buffers ? ENOMEM : 0;
        flight->unfinished = flight->buffers != 0;
        land(r, index);
        return;
    }
    struct io_uring_sqe *entry = ring_entry(&r->ring);
    entry->opcode = IORING_OP_READV;
    entry->fd = first->fd;
    entry->addr = (uint64_t)(uintptr_t)flight->scratch.iov;
    entry->len = (uint32_t)flight->buffers;
    entry->off = first->offset;
    entry->user_data = index;
    r->in_ring++;
    r->in_ring_bytes += run_size(&flight->run);
}

/* Locked. Takes runs while there is room; releases the lock meanwhile. */
static void begin_more(Rings *r) {
    Pool *pool = r->pool;
    Job *job;
    while (has_room(r) && (job = next_read(pool))) {
        uint32_t index = r->free[--r->free_count];
        r->flights[index].run = begin_run(pool, job);
        if (pool->reads) wake_reader(pool);
        pthread_mutex_unlock(&pool->lock);
        launch(r, index);
        if (ring_pending(&r->ring) >= GROUP) enter(r, 0);
        pthread_mutex_lock(&pool->lock);
    }
}

/* Verifies the run that completed first and ends its pages. Acquires the lock and keeps it. */
static void finish_one(Rings *r) {
    uint32_t index = r->landed[r->landed_head];
    Flight *flight = &r->flights[index];
    const Page *first = &flight->run.job->pages[flight->run.low];
    uint8_t outcomes[MAX_RUN];
    r->landed_head = (r->landed_head + 1) % r->count;
    r->landed_count--;
    if (flight->unfinished)
        flight->error = transfer(0, first->fd, flight->scratch.iov, flight->buffers, first->offset, &flight->moved);
    if (first->fd < 0)
        outcomes[0] = MISS;
    else
        judge_read(&r->pool->device, &flight->run, &flight->scratch, flight->copy, flight->error, flight->moved, outcomes);
    pthread_mutex_lock(&r->pool->lock);
    r->free[r->free_count++] = index;
    if (r->pool->writes) pthread_cond_signal(&r->pool->work);
    end_run(r->pool, &flight->run, outcomes);
}

static int open_rings(Rings *r, RingThread *ring_thread) {
    *r = (Rings){.ring_thread = ring_thread, .pool = ring_thread->pool, .count = 2 * ring_thread->pool->depth};
    r->flights = calloc(r->count, sizeof *r->flights);
    r->free = calloc(r->count, sizeof *r->free);
    r->landed = calloc(r->count, sizeof *r->landed);
    r->ring.fd = -1;
    if (!r->flights || !r->free || !r->landed) return ENOMEM;
    for (uint32_t i = 0; i < r->count; i++) r->free[r->free_count++] = (uint32_t)r->count - 1 - i;
    return ring_open(&r->ring, (unsigned)ring_thread->pool->depth + 1);
}

/* The thread of one ring, which it opens itself, because only the thread that opens a ring may use it. */
static void *serve_ring(void *argument) {
    RingThread *ring_thread = argument;
    Pool *pool = ring_thread->pool;
    Rings r;
    int unable = open_rings(&r, ring_thread);
    pthread_mutex_lock(&pool->lock);
    pool->rings += !unable;
    pool->unready--;
    pthread_cond_broadcast(&pool->ready);
    if (!unable) watch_wake(&r);
    while (!unable) {
        begin_more(&r);
        if (pool->stopping && r.free_count == r.count) break;
        /* Completed runs are verified after more were submitted, so that the device works meanwhile. */
        int waiting = !r.landed_count;
        ring_thread->sleeping = waiting && has_room(&r);
        pthread_mutex_unlock(&pool->lock);
        enter(&r, waiting);
        if (waiting)
            pthread_mutex_lock(&pool->lock);
        else
            finish_one(&r);
        ring_thread->sleeping = 0;
    }
    pthread_mutex_unlock(&pool->lock);
    ring_close(&r.ring);
    for (size_t i = 0; r.flights && i < r.count; i++)
        if (r.flights[i].made) free_scratch(&r.flights[i].scratch);
    free(r.flights), free(r.free), free(r.landed);
    return NULL;
}

#endif
#endif
