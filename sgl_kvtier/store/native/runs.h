/* Runs: pages in neighbouring slots of one file, laid out in memory, read or written in one call, and verified or sealed
 * with a checksum.
 *
 * Nothing here uses threads, queues or Python. Scratch memory serves one run at a time.
 */
#ifndef KVTIER_RUNS_H
#define KVTIER_RUNS_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "xxh3.h"

#define BLOCK 4096
#define HEAD_BYTES 152 /* the fields of a slot header; the rest of its block is zero */
#define SUM_AT 136
#define MAX_RUN 64
#define MAX_IOV 1000

enum { OPEN = 0, BEGUN = 1, OK = 2, MISS = 3, CORRUPT = 4, FAILED = 5, LATE = 6, CANCELLED = 7 };

typedef struct {
    int fd; /* -1: no such page */
    uint32_t slot_bytes, length;
    uint64_t offset;
    uint32_t first, parts; /* its buffers are iov[first, first + parts) */
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
    uint32_t *ended; /* indexes in the order in which pages ended: [0, n - open) */
    pthread_cond_t progress;
} Job;

/* Pages low, low + step, ... of a job, in ascending order in the file. */
typedef struct {
    Job *job;
    size_t start, low, count; /* `start`: where the run begins in the job's order */
    int step;
} Run;

typedef struct {
    int verify;
    size_t alignment;
} Device;

typedef struct {
    uint8_t *heads, *padding, *bounce;
    size_t bounce_bytes;
    struct iovec *iov;
} Scratch;

static const uint8_t zeros[BLOCK];

#ifndef KVTIER_FAULTS /* lab/stress/store/native/faulty.c defines others, which fail on purpose */
#define move_bytes(writing, fd, iov, count, at) ((writing) ? pwritev(fd, iov, count, at) : preadv(fd, iov, count, at))
#define completed(iov, count, result) (result)
#endif

static size_t padded(size_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

static size_t nth(const Run *run, size_t i) { return run->low + (size_t)((int64_t)i * run->step); }

static int make_scratch(Scratch *scratch) {
    memset(scratch, 0, sizeof *scratch);
    scratch->iov = malloc((MAX_IOV + 2 * MAX_RUN) * sizeof(struct iovec));
    return scratch->iov == NULL || posix_memalign((void **)&scratch->heads, BLOCK, MAX_RUN * BLOCK) ||
           posix_memalign((void **)&scratch->padding, BLOCK, BLOCK);
}

static void free_scratch(Scratch *scratch) {
    free(scratch->heads);
    free(scratch->padding);
    free(scratch->bounce);
    free(scratch->iov);
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

/* Skips the first `moved` bytes of `count` buffers. */
static void advance(struct iovec **iov, int *count, size_t moved) {
    while (*count && moved >= (*iov)->iov_len) {
        moved -= (*iov)->iov_len;
        (*iov)++;
        (*count)--;
    }
    if (*count && moved) {
        (*iov)->iov_base = (uint8_t *)(*iov)->iov_base + moved;
        (*iov)->iov_len -= moved;
    }
}

/* Reads or writes the buffers after the first `*moved` bytes. Returns 0 or an errno; reading at a file's end is no error. */
static int transfer(int writing, int fd, struct iovec *iov, int count, uint64_t offset, size_t *moved) {
    int stubborn = 0;
    advance(&iov, &count, *moved);
    while (count) {
        int now = count < MAX_IOV ? count : MAX_IOV;
        off_t at = (off_t)(offset + *moved);
        ssize_t more = move_bytes(writing, fd, iov, now, at);
        if (more < 0) {
            if ((errno == EINTR || errno == EAGAIN) && ++stubborn < 100) continue;
            return errno;
        }
        if (more == 0) return writing ? EIO : 0;
        stubborn = 0;
        *moved += (size_t)more;
        advance(&iov, &count, (size_t)more);
    }
    return 0;
}

/* Lays out slot after slot: header, payload buffers, padding. Returns the number of buffers. */
static int lay_out(const Run *run, Scratch *scratch) {
    int n = 0;
    for (size_t i = 0; i < run->count; i++) {
        const Page *page = &run->job->pages[nth(run, i)];
        scratch->iov[n++] = (struct iovec){scratch->heads + i * BLOCK, BLOCK};
        memcpy(scratch->iov + n, run->job->iov + page->first, page->parts * sizeof(struct iovec));
        n += (int)page->parts;
        if (padded(page->length) > page->length)
            scratch->iov[n++] = (struct iovec){scratch->padding, padded(page->length) - page->length};
    }
    return n;
}

static int fits_device(const Device *device, const struct iovec *iov, int count) {
    uintptr_t bits = 0;
    for (int i = 0; i < count; i++) bits |= (uintptr_t)iov[i].iov_base | iov[i].iov_len;
    return bits % device->alignment == 0;
}

static void page_digest(const Job *job, const Page *page, uint8_t *head, Scratch *scratch, uint8_t *digest) {
    scratch->iov[0] = (struct iovec){head, BLOCK};
    memcpy(scratch->iov + 1, job->iov + page->first, page->parts * sizeof(struct iovec));
    xxh3_128(scratch->iov, (int)page->parts + 1, digest);
}

static int check_page(const Device *device, const Job *job, size_t index, uint8_t *head, Scratch *scratch) {
    const uint8_t *wanted = job->heads + index * HEAD_BYTES;
    if (memcmp(head, wanted, SUM_AT)) return CORRUPT;
    if (!device->verify) return OK;
    uint8_t found[16], digest[16];
    memcpy(found, head + SUM_AT, 16);
    memset(head + SUM_AT, 0, 16);
    page_digest(job, &job->pages[index], head, scratch, digest);
    return memcmp(found, digest, 16) || memcmp(head + HEAD_BYTES, zeros, BLOCK - HEAD_BYTES) ? CORRUPT : OK;
}

static size_t run_size(const Run *run) { return run->count * run->job->pages[run->low].slot_bytes; }

/* Lays a run out for reading. Returns the number of buffers, 0 without memory. `*copy`: a bounce buffer if the device cannot
 * write to the caller's buffers, else NULL. */
static int prepare_read(const Device *device, const Run *run, Scratch *scratch, uint8_t **copy) {
    int n = lay_out(run, scratch);
    *copy = NULL;
    if (fits_device(device, scratch->iov, n)) return n;
    *copy = bounce(scratch, run_size(run));
    scratch->iov[0] = (struct iovec){*copy, run_size(run)};
    return *copy != NULL;
}

/* Sets one outcome per page of a run that was read, lowest in the file first. */
static void judge_read(const Device *device, const Run *run, Scratch *scratch, const uint8_t *copy, int error, size_t moved,
                       uint8_t *outcomes) {
    if (error) {
        __atomic_store_n(&run->job->error, error, __ATOMIC_RELAXED); /* several threads work on one job */
        memset(outcomes, FAILED, run->count);
        return;
    }
    for (size_t i = 0; i < run->count; i++) {
        const Page *page = &run->job->pages[nth(run, i)];
        uint8_t *head = scratch->heads + i * BLOCK;
        if (moved < i * page->slot_bytes + BLOCK + page->length) {
            outcomes[i] = CORRUPT;
            continue;
        }
        if (copy) {
            const uint8_t *from = copy + i * page->slot_bytes;
            memcpy(head, from, BLOCK);
            from += BLOCK;
            for (uint32_t k = 0; k < page->parts; k++) {
                const struct iovec *part = &run->job->iov[page->first + k];
                memcpy(part->iov_base, from, part->iov_len);
                from += part->iov_len;
            }
        }
        outcomes[i] = (uint8_t)check_page(device, run->job, nth(run, i), head, scratch);
    }
}

static void read_run(const Device *device, const Run *run, Scratch *scratch, uint8_t *outcomes) {
    const Page *first = &run->job->pages[run->low];
    uint8_t *copy;
    size_t moved = 0;
    int n = prepare_read(device, run, scratch, &copy);
    int error = n ? transfer(0, first->fd, scratch->iov, n, first->offset, &moved) : ENOMEM;
    judge_read(device, run, scratch, copy, error, moved, outcomes);
}

static void write_run(const Device *device, const Run *run, Scratch *scratch, uint8_t *outcomes) {
    Job *job = run->job;
    const Page *first = &job->pages[run->low];
    size_t moved = 0;
    for (size_t i = 0; i < run->count; i++) {
        uint8_t *head = scratch->heads + i * BLOCK, digest[16];
        memcpy(head, job->heads + (run->low + i) * HEAD_BYTES, HEAD_BYTES);
        memset(head + HEAD_BYTES, 0, BLOCK - HEAD_BYTES);
        page_digest(job, &job->pages[run->low + i], head, scratch, digest);
        memcpy(head + SUM_AT, digest, 16);
    }
    memset(scratch->padding, 0, BLOCK);
    int n = lay_out(run, scratch), error = 0;
    if (!fits_device(device, scratch->iov, n)) {
        uint8_t *to = bounce(scratch, run_size(run));
        for (int i = 0; to && i < n; i++) {
            memcpy(to, scratch->iov[i].iov_base, scratch->iov[i].iov_len);
            to += scratch->iov[i].iov_len;
        }
        error = to ? 0 : ENOMEM;
        scratch->iov[0] = (struct iovec){scratch->bounce, run_size(run)};
        n = 1;
    }
    if (!error) error = transfer(1, first->fd, scratch->iov, n, first->offset, &moved);
    if (error) __atomic_store_n(&job->error, error, __ATOMIC_RELAXED);
    memset(outcomes, error ? FAILED : OK, run->count);
}

#endif
