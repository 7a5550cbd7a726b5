/* I/O threads and their queue of jobs, in plain C: nothing here knows Python or holds its lock.
 *
 * A job is a list of pages, each in one slot of a file and in one or more buffers. Threads take runs of pages whose slots
 * are neighbours, read or write a run in one system call, and check or make the checksums. Reads go by (priority, order);
 * writes use threads that no read wants, and at least one run of a write begins every WRITE_TURN_NS.
 */
#ifndef KVTIER_POOL_H
#define KVTIER_POOL_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "xxh3.h"

#define BLOCK 4096
#define HEAD_BYTES 152 /* the meaningful part of a slot header; the rest of its block is zero */
#define SUM_AT 136
#define MAX_RUN 64
#define MAX_IOV 1000
#define SMALL_RUN ((size_t)256 << 10) /* below this a system call costs more than it spreads */
#define WRITE_TURN_NS 20000000ull

enum { OPEN = 0, BEGUN = 1, OK = 2, MISS = 3, CORRUPT = 4, FAILED = 5, LATE = 6, CANCELLED = 7 };

typedef struct {
    int fd; /* -1: there is no such page */
    uint32_t slot_bytes, length;
    uint64_t offset;
    uint32_t first, parts; /* its buffers: iov[first, first + parts) */
} Page;

typedef struct Job {
    struct Job *next_job;
    int writing, queued, error, notify;
    long priority;
    uint64_t order, deadline_ns; /* 0: none */
    size_t n, next, open, in_flight;
    Page *pages;
    uint8_t *heads, *state;
    struct iovec *iov;
    uint32_t *ended; /* indexes in the order they ended: [0, n - open) */
    pthread_cond_t progress;
} Job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, any_end;
    Job *reads, *writes;
    pthread_t *threads;
    int thread_count, stopping, verify, writers;
    size_t alignment, read_run, write_run;
    uint64_t orders, last_write_ns, ends, busy_ns;
} Pool;

typedef struct {
    uint8_t *heads, *padding, *bounce;
    size_t bounce_bytes;
    struct iovec *iov;
} Scratch;

static const uint8_t zeros[BLOCK];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static size_t padded(size_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

/* Locked. */
static void end_page(Job *job, size_t index, int outcome) {
    job->ended[job->n - job->open] = (uint32_t)index;
    job->state[index] = (uint8_t)outcome;
    job->open--;
}

/* Locked. */
static void tell(Pool *pool, Job *job) {
    /* Who waits, waits for all pages: waking it for each of them would take a processor from the lanes. */
    if (!job->open) pthread_cond_broadcast(&job->progress);
    if (!job->notify) return;
    pool->ends++;
    pthread_cond_broadcast(&pool->any_end);
}

/* Locked. */
static void leave_queue(Pool *pool, Job *job) {
    if (!job->queued) return;
    Job **link = job->writing ? &pool->writes : &pool->reads;
    while (*link != job) link = &(*link)->next_job;
    *link = job->next_job;
    job->queued = 0;
}

/* Locked. Pages not begun end now. */
static void end_rest(Pool *pool, Job *job, int outcome) {
    if (job->next >= job->n) return;
    while (job->next < job->n) end_page(job, job->next++, outcome);
    leave_queue(pool, job);
    tell(pool, job);
}

/* Locked. */
static void expire(Pool *pool, Job *job) {
    if (job->deadline_ns && job->next < job->n && now_ns() >= job->deadline_ns) end_rest(pool, job, LATE);
}

static void enter_queue(Pool *pool, Job *job) {
    pthread_mutex_lock(&pool->lock);
    job->order = pool->orders++;
    if (pool->stopping) {
        end_rest(pool, job, CANCELLED);
    } else if (job->n) {
        Job **link = job->writing ? &pool->writes : &pool->reads;
        while (*link && (*link)->priority <= job->priority) link = &(*link)->next_job;
        job->next_job = *link;
        *link = job;
        job->queued = 1;
        if (job->n == 1)
            pthread_cond_signal(&pool->work);
        else
            pthread_cond_broadcast(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Locked. How many bytes the next run may have: smaller towards a job's end, so that all lanes end together. */
static size_t run_bytes(const Pool *pool, const Job *job, size_t start) {
    size_t most = job->writing ? pool->write_run : pool->read_run;
    size_t share = (job->n - start) * job->pages[start].slot_bytes / (size_t)pool->thread_count;
    if (share < SMALL_RUN) share = SMALL_RUN;
    return share < most ? share : most;
}

/* Locked. How many pages from `start` on lie side by side: up (step 1) or, when reading, down (step -1) the file. */
static size_t run_length(const Pool *pool, const Job *job, size_t start, int *step) {
    const Page *pages = job->pages;
    size_t bytes = pages[start].slot_bytes, parts = pages[start].parts + 2, count = 1;
    size_t most = run_bytes(pool, job, start);
    *step = 1;
    if (pages[start].fd < 0) return 1;
    while (start + count < job->n && count < MAX_RUN) {
        const Page *a = &pages[start + count - 1], *b = a + 1;
        if (b->fd != a->fd || b->slot_bytes != a->slot_bytes) break;
        int up = b->offset == a->offset + a->slot_bytes, down = a->offset == b->offset + b->slot_bytes;
        if (!(up || (down && !job->writing)) || (count > 1 && (*step == 1) != up)) break;
        bytes += b->slot_bytes;
        parts += b->parts + 2;
        if (bytes > most || parts > MAX_IOV) break;
        *step = up ? 1 : -1;
        count++;
    }
    return count;
}

static int transfer(int writing, int fd, struct iovec *iov, int count, uint64_t offset, size_t *moved_out) {
    size_t done = 0;
    int stubborn = 0;
    while (count) {
        int now = count < MAX_IOV ? count : MAX_IOV;
        ssize_t moved = writing ? pwritev(fd, iov, now, (off_t)(offset + done)) : preadv(fd, iov, now, (off_t)(offset + done));
        if (moved < 0) {
            if ((errno == EINTR || errno == EAGAIN) && ++stubborn < 100) continue;
            return errno;
        }
        if (moved == 0) {
            if (writing) return EIO;
            break;
        }
        stubborn = 0;
        done += (size_t)moved;
        while (count && (size_t)moved >= iov->iov_len) {
            moved -= (ssize_t)iov->iov_len;
            iov++;
            count--;
        }
        if (count && moved) {
            iov->iov_base = (uint8_t *)iov->iov_base + moved;
            iov->iov_len -= (size_t)moved;
        }
    }
    *moved_out = done;
    return 0;
}

/* Lays out one slot after the other: header, payload buffers, padding. Returns how many buffers that took. */
static int lay_out(const Job *job, Scratch *scratch, size_t low, int step, size_t count) {
    int n = 0;
    for (size_t i = 0; i < count; i++) {
        const Page *page = &job->pages[low + (size_t)((int64_t)i * step)];
        scratch->iov[n++] = (struct iovec){scratch->heads + i * BLOCK, BLOCK};
        memcpy(scratch->iov + n, job->iov + page->first, page->parts * sizeof(struct iovec));
        n += (int)page->parts;
        if (padded(page->length) > page->length)
            scratch->iov[n++] = (struct iovec){scratch->padding, padded(page->length) - page->length};
    }
    return n;
}

static int fits_device(const Pool *pool, const struct iovec *iov, int count) {
    uintptr_t bits = 0;
    for (int i = 0; i < count; i++) bits |= (uintptr_t)iov[i].iov_base | iov[i].iov_len;
    return bits % pool->alignment == 0;
}

static uint8_t *bounce(Scratch *scratch, size_t bytes) {
    if (scratch->bounce_bytes < bytes) {
        free(scratch->bounce);
        scratch->bounce = NULL;
        scratch->bounce_bytes = 0;
        if (posix_memalign((void **)&scratch->bounce, BLOCK, bytes)) return NULL;
        scratch->bounce_bytes = bytes;
    }
    return scratch->bounce;
}

static void page_digest(const Job *job, const Page *page, uint8_t *head, Scratch *scratch, uint8_t *digest) {
    scratch->iov[0] = (struct iovec){head, BLOCK};
    memcpy(scratch->iov + 1, job->iov + page->first, page->parts * sizeof(struct iovec));
    xxh3_128(scratch->iov, (int)page->parts + 1, digest);
}

static int check_page(const Pool *pool, const Job *job, size_t index, uint8_t *head, Scratch *scratch) {
    const uint8_t *wanted = job->heads + index * HEAD_BYTES;
    if (memcmp(head, wanted, SUM_AT)) return CORRUPT;
    if (!pool->verify) return OK;
    uint8_t found[16], digest[16];
    memcpy(found, head + SUM_AT, 16);
    memset(head + SUM_AT, 0, 16);
    page_digest(job, &job->pages[index], head, scratch, digest);
    return memcmp(found, digest, 16) || memcmp(head + HEAD_BYTES, zeros, BLOCK - HEAD_BYTES) ? CORRUPT : OK;
}

static void read_run(const Pool *pool, Job *job, Scratch *scratch, size_t low, int step, size_t count, uint8_t *outcomes) {
    const Page *first = &job->pages[low];
    size_t bytes = count * first->slot_bytes, moved = 0;
    int n = lay_out(job, scratch, low, step, count);
    uint8_t *copy = NULL;
    if (!fits_device(pool, scratch->iov, n)) {
        copy = bounce(scratch, bytes);
        scratch->iov[0] = (struct iovec){copy, bytes};
        n = 1;
    }
    int error = n == 1 && !copy ? ENOMEM : transfer(0, first->fd, scratch->iov, n, first->offset, &moved);
    if (error) job->error = error;
    for (size_t i = 0; i < count; i++) {
        size_t index = low + (size_t)((int64_t)i * step);
        const Page *page = &job->pages[index];
        uint8_t *head = scratch->heads + i * BLOCK;
        if (error) {
            outcomes[i] = FAILED;
        } else if (moved < i * page->slot_bytes + BLOCK + page->length) {
            outcomes[i] = CORRUPT;
        } else {
            if (copy) {
                const uint8_t *from = copy + i * page->slot_bytes;
                memcpy(head, from, BLOCK);
                from += BLOCK;
                for (uint32_t k = 0; k < page->parts; k++) {
                    struct iovec *part = &job->iov[page->first + k];
                    memcpy(part->iov_base, from, part->iov_len);
                    from += part->iov_len;
                }
            }
            outcomes[i] = (uint8_t)check_page(pool, job, index, head, scratch);
        }
    }
}

static void write_run(const Pool *pool, Job *job, Scratch *scratch, size_t low, size_t count, uint8_t *outcomes) {
    const Page *first = &job->pages[low];
    size_t bytes = count * first->slot_bytes, moved = 0;
    for (size_t i = 0; i < count; i++) {
        uint8_t *head = scratch->heads + i * BLOCK, digest[16];
        memcpy(head, job->heads + (low + i) * HEAD_BYTES, HEAD_BYTES);
        memset(head + HEAD_BYTES, 0, BLOCK - HEAD_BYTES);
        page_digest(job, &job->pages[low + i], head, scratch, digest);
        memcpy(head + SUM_AT, digest, 16);
    }
    memset(scratch->padding, 0, BLOCK);
    int n = lay_out(job, scratch, low, 1, count), error = 0;
    if (!fits_device(pool, scratch->iov, n)) {
        uint8_t *to = bounce(scratch, bytes);
        for (int i = 0; to && i < n; i++) {
            memcpy(to, scratch->iov[i].iov_base, scratch->iov[i].iov_len);
            to += scratch->iov[i].iov_len;
        }
        error = to ? 0 : ENOMEM;
        scratch->iov[0] = (struct iovec){scratch->bounce, bytes};
        n = 1;
    }
    if (!error) error = transfer(1, first->fd, scratch->iov, n, first->offset, &moved);
    if (error) job->error = error;
    memset(outcomes, error ? FAILED : OK, count);
}

/* Locked. The job that the next free thread should work on. */
static Job *choose(Pool *pool) {
    while (pool->reads) {
        Job *job = pool->reads;
        expire(pool, job);
        if (job->queued) break;
    }
    int writers_allowed = pool->writers < (pool->reads ? (pool->thread_count + 1) / 2 : pool->thread_count);
    int turn = pool->writes && writers_allowed && (!pool->reads || now_ns() - pool->last_write_ns > WRITE_TURN_NS);
    return turn ? pool->writes : pool->reads;
}

static int make_scratch(Scratch *scratch) {
    memset(scratch, 0, sizeof *scratch);
    scratch->iov = malloc((MAX_IOV + 2 * MAX_RUN) * sizeof(struct iovec));
    return scratch->iov == NULL || posix_memalign((void **)&scratch->heads, BLOCK, MAX_RUN * BLOCK) ||
           posix_memalign((void **)&scratch->padding, BLOCK, BLOCK);
}

static void *serve(void *argument) {
    Pool *pool = argument;
    Scratch scratch;
    uint8_t outcomes[MAX_RUN];
    int unable = make_scratch(&scratch);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        Job *job = choose(pool);
        if (!job) {
            if (pool->stopping) break;
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        int step, writing = job->writing;
        size_t start = job->next, count = run_length(pool, job, start, &step);
        job->next += count;
        job->in_flight += count;
        memset(job->state + start, BEGUN, count);
        if (job->next == job->n) leave_queue(pool, job);
        pool->writers += writing;
        uint64_t began = now_ns();
        if (writing) pool->last_write_ns = began;
        pthread_mutex_unlock(&pool->lock);

        size_t low = step > 0 ? start : start + count - 1; /* the page lowest in the file */
        if (unable)
            memset(outcomes, FAILED, count);
        else if (job->pages[start].fd < 0)
            outcomes[0] = MISS;
        else if (writing)
            write_run(pool, job, &scratch, low, count, outcomes);
        else
            read_run(pool, job, &scratch, low, step, count, outcomes);

        pthread_mutex_lock(&pool->lock);
        if (!writing) pool->busy_ns += now_ns() - began;
        pool->writers -= writing;
        job->in_flight -= count;
        for (size_t i = 0; i < count; i++) end_page(job, start + i, outcomes[step > 0 ? i : count - 1 - i]);
        if (writing && pool->writes) pthread_cond_signal(&pool->work);
        tell(pool, job); /* the job may be gone once the lock is */
    }
    pthread_mutex_unlock(&pool->lock);
    free(scratch.heads);
    free(scratch.padding);
    free(scratch.bounce);
    free(scratch.iov);
    return NULL;
}

/* Blocks until the job has ended or `until_ns` has come; expires it by its own deadline. */
static void await_job(Pool *pool, Job *job, uint64_t until_ns) {
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        expire(pool, job);
        uint64_t wake = until_ns, now = now_ns();
        if (!job->open || (until_ns && now >= until_ns)) break;
        if (job->deadline_ns && job->next < job->n && (!wake || job->deadline_ns < wake)) wake = job->deadline_ns;
        if (wake) {
            struct timespec t = {(time_t)(wake / 1000000000ull), (long)(wake % 1000000000ull)};
            pthread_cond_timedwait(&job->progress, &pool->lock, &t);
        } else {
            pthread_cond_wait(&job->progress, &pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Blocks until some job with `notify` ended a page after the `seen`th time, or until `until_ns`. Returns the number of times so far. */
static uint64_t await_any(Pool *pool, uint64_t seen, uint64_t until_ns) {
    pthread_mutex_lock(&pool->lock);
    while (pool->ends == seen && !pool->stopping && now_ns() < until_ns) {
        struct timespec t = {(time_t)(until_ns / 1000000000ull), (long)(until_ns % 1000000000ull)};
        pthread_cond_timedwait(&pool->any_end, &pool->lock, &t);
    }
    seen = pool->ends;
    pthread_mutex_unlock(&pool->lock);
    return seen;
}

#endif
