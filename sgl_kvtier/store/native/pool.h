/* I/O threads and their queue of jobs, in plain C: nothing here uses Python or holds the GIL.
 *
 * A job is a list of pages, each in one slot of a file and in one or more buffers. Threads take runs of pages in
 * neighbouring slots. Reads are ordered by (priority, order). Writes use threads that no read needs, and at least one run of
 * a write begins every WRITE_TURN_NS. If threads with rings work (rings.h), they do all reads and the threads here only
 * write.
 */
#ifndef KVTIER_POOL_H
#define KVTIER_POOL_H

#include <time.h>

#include "runs.h"

#define SMALL_RUN ((size_t)256 << 10) /* smaller runs cost more in system calls than the parallelism gains */
#define WRITE_TURN_NS 20000000ull

typedef struct {
    struct Pool *pool;
    pthread_t thread;
    int started, wake_fd, sleeping; /* `sleeping`: waits for wake_fd and has room for runs */
} RingThread;

typedef struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t work, any_end, ready;
    Job *reads, *writes;
    pthread_t *threads;
    RingThread *ring_threads;
    Device device;
    int thread_count, stopping, writers;
    int ring_thread_count, rings, unready; /* `rings`: threads whose ring works; `unready`: those not known yet */
    size_t read_run, write_run, flying, depth, depth_bytes; /* `flying`: runs being read; depth*: limits of each ring */
    uint64_t orders, last_write_ns, ends;
    uint64_t busy_ns, marked_ns; /* time with a run being read; the time up to which it is counted */
    uint64_t look_ns; /* when await_any() times out; UINT64_MAX while no thread waits in it */
} Pool;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns) {
    struct timespec t = {(time_t)(until_ns / 1000000000ull), (long)(until_ns % 1000000000ull)};
    pthread_cond_timedwait(cond, lock, &t);
}

/* Locked. Wakes one idle thread that can read. A thread that takes a run wakes the next one if there is more, so the
 * submitter pays for one wake-up only. */
static void wake_reader(Pool *pool) {
    if (!pool->rings) {
        pthread_cond_signal(&pool->work);
        return;
    }
    for (int i = 0; i < pool->ring_thread_count; i++) {
        RingThread *ring_thread = &pool->ring_threads[i];
        if (!ring_thread->sleeping) continue;
        uint64_t one = 1;
        ring_thread->sleeping = 0;
        if (write(ring_thread->wake_fd, &one, sizeof one) > 0) return;
    }
}

/* Locked. Stores a counter that is read without the lock. Only the lock's holder writes it, so an atomic store suffices. */
#define SET(counter, value) __atomic_store_n(&(counter), (value), __ATOMIC_RELEASE)

/* Locked. */
static void end_page(Job *job, size_t index, int outcome) {
    job->ended[job->n - job->open] = (uint32_t)index;
    job->state[index] = (uint8_t)outcome;
    SET(job->open, job->open - 1);
}

/* Locked. */
static void tell(Pool *pool, Job *job) {
    /* Waiters need all pages: waking them for each would take a processor from the I/O threads. */
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

/* Locked. Ends all pages that have not begun. */
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
    /* The settling thread may be about to sleep past this deadline: wake it. */
    if (job->notify && job->deadline_ns && job->deadline_ns < pool->look_ns) {
        pool->ends++;
        pthread_cond_broadcast(&pool->any_end);
    }
    job->order = pool->orders++;
    if (pool->stopping) {
        end_rest(pool, job, CANCELLED);
    } else if (job->n) {
        Job **link = job->writing ? &pool->writes : &pool->reads;
        while (*link && (*link)->priority <= job->priority) link = &(*link)->next_job;
        job->next_job = *link;
        *link = job;
        job->queued = 1;
        if (job->writing)
            pthread_cond_signal(&pool->work);
        else
            wake_reader(pool);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Locked. Most bytes of the next run: less towards a job's end, so that all I/O threads finish together. */
static size_t run_bytes(const Pool *pool, const Job *job, size_t start) {
    size_t most = job->writing ? pool->write_run : pool->read_run;
    size_t share = (job->n - start) * job->pages[start].slot_bytes / (size_t)pool->thread_count;
    if (share < SMALL_RUN) share = SMALL_RUN;
    return share < most ? share : most;
}

/* Locked. How many pages from `start` on are neighbours: upwards (step 1) or, for reads, downwards (step -1) in the file. */
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

/* Locked. Takes the next run of a queued job. */
static Run begin_run(Pool *pool, Job *job) {
    Run run = {.job = job, .start = job->next};
    run.count = run_length(pool, job, run.start, &run.step);
    run.low = run.step > 0 ? run.start : run.start + run.count - 1;
    job->next += run.count;
    SET(job->in_flight, job->in_flight + run.count);
    memset(job->state + run.start, BEGUN, run.count);
    if (job->next == job->n) leave_queue(pool, job);
    if (!job->writing && !pool->flying++) pool->marked_ns = now_ns();
    return run;
}

/* Locked. Once the lock is released the job may be freed. */
static void end_run(Pool *pool, const Run *run, const uint8_t *outcomes) {
    Job *job = run->job;
    if (!job->writing) {
        uint64_t now = now_ns();
        SET(pool->busy_ns, pool->busy_ns + now - pool->marked_ns);
        pool->marked_ns = now;
        pool->flying--;
    }
    SET(job->in_flight, job->in_flight - run->count);
    for (size_t i = 0; i < run->count; i++)
        end_page(job, run->start + i, outcomes[run->step > 0 ? i : run->count - 1 - i]);
    tell(pool, job);
}

/* Locked. The next read job, or NULL. */
static Job *next_read(Pool *pool) {
    while (pool->reads) {
        Job *job = pool->reads;
        expire(pool, job);
        if (job->queued) return job;
    }
    return NULL;
}

/* Locked. The job for the next free thread, or NULL; then *again_ns is when to choose again (0: when woken). */
static Job *choose(Pool *pool, uint64_t *again_ns) {
    Job *read = next_read(pool);
    /* Rings take more runs than there are threads, and may empty the queue while the device is busy. */
    int reading = read || pool->flying >= (size_t)pool->thread_count;
    *again_ns = 0;
    if (pool->writes && pool->writers < (reading ? (pool->thread_count + 1) / 2 : pool->thread_count)) {
        uint64_t turn_ns = pool->last_write_ns + WRITE_TURN_NS;
        if (!reading || now_ns() > turn_ns) return pool->writes;
        *again_ns = turn_ns;
    }
    return pool->rings ? NULL : read;
}

/* A thread that writes, and also reads if there are no rings. */
static void *serve(void *argument) {
    Pool *pool = argument;
    Scratch scratch;
    uint8_t outcomes[MAX_RUN];
    uint64_t again_ns;
    int unable = make_scratch(&scratch);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        Job *job = choose(pool, &again_ns);
        if (!job) {
            if (pool->stopping) break;
            if (again_ns)
                wait_until(&pool->work, &pool->lock, again_ns);
            else
                pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        Run run = begin_run(pool, job);
        int writing = job->writing;
        pool->writers += writing;
        if (writing) pool->last_write_ns = now_ns();
        if (pool->writes || (pool->reads && !pool->rings)) pthread_cond_signal(&pool->work);
        pthread_mutex_unlock(&pool->lock);

        if (unable)
            memset(outcomes, FAILED, run.count);
        else if (job->pages[run.start].fd < 0)
            outcomes[0] = MISS;
        else if (writing)
            write_run(&pool->device, &run, &scratch, outcomes);
        else
            read_run(&pool->device, &run, &scratch, outcomes);

        pthread_mutex_lock(&pool->lock);
        pool->writers -= writing;
        if (writing && pool->writes) pthread_cond_signal(&pool->work);
        end_run(pool, &run, outcomes);
    }
    pthread_mutex_unlock(&pool->lock);
    free_scratch(&scratch);
    return NULL;
}

/* Blocks until the job has ended, or until `until_ns` (0: no limit). Applies the job's own deadline. */
static void await_job(Pool *pool, Job *job, uint64_t until_ns) {
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        expire(pool, job);
        uint64_t wake = until_ns, now = now_ns();
        if (!job->open || (until_ns && now >= until_ns)) break;
        if (job->deadline_ns && job->next < job->n && (!wake || job->deadline_ns < wake)) wake = job->deadline_ns;
        if (wake)
            wait_until(&job->progress, &pool->lock, wake);
        else
            pthread_cond_wait(&job->progress, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Blocks until `ends` differs from `seen`: a job with `notify` ended pages or was submitted with a deadline before
 * `until_ns`; or until `until_ns`. Returns `ends`. Only one thread may call it. */
static uint64_t await_any(Pool *pool, uint64_t seen, uint64_t until_ns) {
    pthread_mutex_lock(&pool->lock);
    pool->look_ns = until_ns;
    while (pool->ends == seen && !pool->stopping && now_ns() < until_ns) wait_until(&pool->any_end, &pool->lock, until_ns);
    pool->look_ns = UINT64_MAX;
    seen = pool->ends;
    pthread_mutex_unlock(&pool->lock);
    return seen;
}

#endif
