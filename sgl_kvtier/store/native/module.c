/* The Python interface of pool.h: Pool (threads and a queue), Job (one ordered batch of pages) and checksum().
 *
 * Waiting for a device and copying bytes happen without the GIL. A job holds its buffers until it is deallocated, and its
 * deallocation waits for pages in flight: memory that Python keeps alive cannot be freed during a transfer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "find.h"
#include "rings.h"

typedef struct {
    PyObject_HEAD
    Pool pool;
    pid_t owner; /* 0: not started. Other processes do not have its threads, and its locks may stay locked for ever */
} PoolObject;

typedef struct {
    PyObject_HEAD
    PoolObject *owner;
    Job job;
    size_t taken, buffer_count;
    Py_buffer *buffers;
} JobObject;

static PyTypeObject PoolType, JobType;

static int is_here(const PoolObject *self) { return self->owner == getpid(); }

static uint64_t later_ns(double seconds) {
    if (seconds > 1e9) seconds = 1e9;
    return now_ns() + (uint64_t)(seconds > 0 ? seconds * 1e9 : 0);
}

static void make_monotonic(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

static void stop(PoolObject *self) {
    Pool *pool = &self->pool;
    uint64_t one = 1;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    while (pool->reads) end_rest(pool, pool->reads, CANCELLED);
    while (pool->writes) end_rest(pool, pool->writes, CANCELLED);
    pthread_cond_broadcast(&pool->work);
    pthread_cond_broadcast(&pool->any_end);
    for (int i = 0; i < pool->ring_thread_count; i++) (void)!write(pool->ring_threads[i].wake_fd, &one, sizeof one);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->thread_count; i++) pthread_join(pool->threads[i], NULL);
    for (int i = 0; i < pool->ring_thread_count; i++) {
        pthread_join(pool->ring_threads[i].thread, NULL);
        close(pool->ring_threads[i].wake_fd);
    }
    pool->thread_count = pool->ring_thread_count = 0;
}

/* Starts `count` threads with rings and waits until each has reported whether its ring works. Fewer, or none, are no error. */
static void start_ring_threads(Pool *pool, int count) {
#ifdef KVTIER_URING
    pool->ring_threads = count > 0 ? calloc((size_t)count, sizeof(RingThread)) : NULL;
    pthread_mutex_lock(&pool->lock);
    for (int i = 0; pool->ring_threads && i < count; i++) {
        RingThread *ring_thread = &pool->ring_threads[i];
        *ring_thread = (RingThread){.pool = pool, .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
        if (ring_thread->wake_fd < 0) break;
        if (pthread_create(&ring_thread->thread, NULL, serve_ring, ring_thread)) {
            close(ring_thread->wake_fd);
            break;
        }
        pool->ring_thread_count++;
        pool->unready++;
    }
    while (pool->unready) pthread_cond_wait(&pool->ready, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
#else
    (void)pool, (void)count;
#endif
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"threads", "verify", "alignment", "read_run", "write_run", "rings", "depth", "depth_bytes", NULL};
    int threads, verify, rings;
    Py_ssize_t alignment, read_run_bytes, write_run_bytes, depth, depth_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ipnnninn", names, &threads, &verify, &alignment, &read_run_bytes,
                                     &write_run_bytes, &rings, &depth, &depth_bytes))
        return NULL;
    if (threads < 1 || alignment < 1 || depth < 1 || depth > 4096 || depth_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "a pool has at least one thread, and rings of 1 to 4096 runs");
    PoolObject *self = (PoolObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    Pool *pool = &self->pool;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->ready, NULL);
    make_monotonic(&pool->work);
    make_monotonic(&pool->any_end);
    pool->device = (Device){.verify = verify, .alignment = (size_t)alignment};
    pool->read_run = (size_t)read_run_bytes;
    pool->write_run = (size_t)write_run_bytes;
    pool->depth = (size_t)depth;
    pool->depth_bytes = (size_t)depth_bytes;
    pool->look_ns = UINT64_MAX;
    pool->threads = calloc((size_t)threads, sizeof(pthread_t));
    self->owner = getpid();
    Py_BEGIN_ALLOW_THREADS start_ring_threads(pool, rings);
    Py_END_ALLOW_THREADS
    for (int i = 0; pool->threads && i < threads; i++) {
        pthread_mutex_lock(&pool->lock);
        int failed = pthread_create(&pool->threads[i], NULL, serve, pool);
        pool->thread_count += !failed;
        pthread_mutex_unlock(&pool->lock);
        if (failed) break;
    }
    if (pool->thread_count < threads) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_OSError, "cannot start %d I/O threads", threads);
    }
    return (PyObject *)self;
}

static void pool_dealloc(PoolObject *self) {
    if (is_here(self)) {
        Py_BEGIN_ALLOW_THREADS stop(self);
        Py_END_ALLOW_THREADS free(self->pool.threads);
        free(self->pool.ring_threads);
        pthread_mutex_destroy(&self->pool.lock);
        pthread_cond_destroy(&self->pool.ready);
        pthread_cond_destroy(&self->pool.work);
        pthread_cond_destroy(&self->pool.any_end);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *pool_close(PoolObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!is_here(self)) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS stop(self);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *pool_wait(PoolObject *self, PyObject *args) {
    unsigned long long seen;
    double seconds;
    if (!PyArg_ParseTuple(args, "Kd", &seen, &seconds)) return NULL;
    if (!is_here(self)) return PyLong_FromUnsignedLongLong(seen);
    uint64_t until = later_ns(seconds);
    Py_BEGIN_ALLOW_THREADS seen = await_any(&self->pool, seen, until);
    Py_END_ALLOW_THREADS return PyLong_FromUnsignedLongLong(seen);
}

static PyObject *pool_rings(PoolObject *self, void *Py_UNUSED(closure)) { return PyLong_FromLong(self->pool.rings); }

static PyObject *pool_busy(PoolObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyFloat_FromDouble((double)__atomic_load_n(&self->pool.busy_ns, __ATOMIC_RELAXED) * 1e-9);
}

/* Copies an array of `n` items of `size` bytes out of a buffer object. */
static void *copied(PyObject *source, size_t n, size_t size, const char *name) {
    Py_buffer view;
    if (PyObject_GetBuffer(source, &view, PyBUF_C_CONTIGUOUS)) return NULL;
    void *copy = NULL;
    if ((size_t)view.len != n * size)
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes instead of %zu", name, view.len, n * size);
    else if (!(copy = malloc(n * size + 1)))
        PyErr_NoMemory();
    else
        memcpy(copy, view.buf, n * size);
    PyBuffer_Release(&view);
    return copy;
}

static int take_buffers(JobObject *self, PyObject *buffers) {
    Job *job = &self->job;
    size_t count = (size_t)PyList_GET_SIZE(buffers);
    self->buffers = calloc(count + 1, sizeof(Py_buffer));
    job->iov = calloc(count + 1, sizeof(struct iovec));
    if (!self->buffers || !job->iov) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        int flags = PyBUF_C_CONTIGUOUS | (job->writing ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, (Py_ssize_t)i), &self->buffers[i], flags)) return -1;
        self->buffer_count++;
        job->iov[i] = (struct iovec){self->buffers[i].buf, (size_t)self->buffers[i].len};
    }
    return 0;
}

static int set_pages(JobObject *self, const int32_t *fds, const uint32_t *sizes, const uint64_t *offsets,
                     const uint32_t *lengths, const uint32_t *parts) {
    Job *job = &self->job;
    size_t first = 0;
    for (size_t i = 0; i < job->n; i++) {
        Page *page = &job->pages[i];
        *page = (Page){fds[i], sizes[i], lengths[i], offsets[i], (uint32_t)first, parts[i]};
        first += parts[i];
        if (parts[i] > MAX_IOV - 100 || first > self->buffer_count) goto wrong;
        size_t bytes = 0;
        for (size_t k = page->first; k < first; k++) bytes += job->iov[k].iov_len;
        if (page->fd >= 0 && (bytes != page->length || BLOCK + padded(page->length) != page->slot_bytes)) goto wrong;
    }
    if (first == self->buffer_count) return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "the buffers do not fit the pages");
    return -1;
}

static PyObject *pool_submit(PoolObject *self, PyObject *args) {
    int writing, notify;
    long priority;
    double deadline;
    PyObject *fds, *sizes, *offsets, *lengths, *heads, *parts, *buffers;
    if (!PyArg_ParseTuple(args, "ppldOOOOOOO!", &writing, &notify, &priority, &deadline, &fds, &sizes, &offsets, &lengths, &heads,
                          &parts, &PyList_Type, &buffers))
        return NULL;
    if (!is_here(self)) return PyErr_Format(PyExc_OSError, "the I/O threads are another process's");
    Py_ssize_t n = PyObject_Length(fds);
    if (n < 0) return NULL;
    JobObject *result = (JobObject *)JobType.tp_alloc(&JobType, 0);
    if (!result) return NULL;
    Job *job = &result->job;
    Py_INCREF(self);
    result->owner = self;
    job->writing = writing;
    job->notify = notify;
    job->priority = priority;
    job->deadline_ns = deadline > 0 ? (uint64_t)(deadline * 1e9) : 0;
    job->n = (size_t)n;
    make_monotonic(&job->progress);
    int32_t *fd = copied(fds, job->n, 4, "fds");
    uint32_t *size = fd ? copied(sizes, job->n, 4, "sizes") : NULL;
    uint64_t *offset = size ? copied(offsets, job->n, 8, "offsets") : NULL;
    uint32_t *length = offset ? copied(lengths, job->n, 4, "lengths") : NULL;
    uint32_t *part = length ? copied(parts, job->n, 4, "parts") : NULL;
    job->heads = part ? copied(heads, job->n, HEAD_BYTES, "heads") : NULL;
    job->pages = calloc(job->n + 1, sizeof(Page));
    job->state = calloc(job->n + 1, 1);
    job->ended = calloc(job->n + 1, sizeof(uint32_t));
    int good = job->heads != NULL;
    if (good && (!job->pages || !job->state || !job->ended)) {
        PyErr_NoMemory();
        good = 0;
    }
    good = good && !take_buffers(result, buffers) && !set_pages(result, fd, size, offset, length, part);
    free(fd), free(size), free(offset), free(length), free(part);
    if (!good) {
        Py_DECREF(result);
        return NULL;
    }
    job->open = job->n;
    /* The GIL is kept: the pool's lock is held for microseconds and never by a thread that waits for the GIL, while getting
     * the GIL back next to a busy thread takes 5 ms. */
    enter_queue(&self->pool, job);
    return (PyObject *)result;
}

static void job_dealloc(JobObject *self) {
    Job *job = &self->job;
    int here = self->owner && is_here(self->owner);
    if (here && !__atomic_load_n(&job->open, __ATOMIC_ACQUIRE)) {
        /* The thread that ended the last page may still hold the lock, for microseconds, so the GIL is kept. */
        pthread_mutex_lock(&self->owner->pool.lock);
        pthread_mutex_unlock(&self->owner->pool.lock);
    } else if (here) {
        Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&self->owner->pool.lock);
        end_rest(&self->owner->pool, job, CANCELLED);
        pthread_mutex_unlock(&self->owner->pool.lock);
        await_job(&self->owner->pool, job, 0);
        Py_END_ALLOW_THREADS
    }
    for (size_t i = 0; i < self->buffer_count; i++) PyBuffer_Release(&self->buffers[i]);
    free(self->buffers), free(job->iov), free(job->pages), free(job->state), free(job->ended), free(job->heads);
    if (here) pthread_cond_destroy(&job->progress);
    Py_XDECREF(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* take(outcomes): `outcomes` is a tuple indexed by the outcome codes of runs.h. */
static PyObject *job_take(JobObject *self, PyObject *outcomes) {
    Job *job = &self->job;
    Pool *pool = &self->owner->pool;
    size_t from, to;
    if (!PyTuple_Check(outcomes) || PyTuple_GET_SIZE(outcomes) <= CANCELLED)
        return PyErr_Format(PyExc_TypeError, "take() takes a tuple with an entry per outcome");
    if (!is_here(self->owner)) return PyList_New(0);
    pthread_mutex_lock(&pool->lock);
    expire(pool, job);
    from = self->taken;
    to = job->n - job->open;
    pthread_mutex_unlock(&pool->lock);
    /* Entries of `ended` before `to` do not change any more. */
    PyObject *list = PyList_New((Py_ssize_t)(to - from));
    for (size_t i = from; list && i < to; i++) {
        PyObject *index = PyLong_FromUnsignedLong(job->ended[i]);
        PyObject *pair = index ? PyTuple_Pack(2, index, PyTuple_GET_ITEM(outcomes, job->state[job->ended[i]])) : NULL;
        Py_XDECREF(index);
        if (!pair) Py_CLEAR(list);
        else PyList_SET_ITEM(list, (Py_ssize_t)(i - from), pair);
    }
    if (list) self->taken = to;
    return list;
}

/* The indexes of the pages that ended with OK, as bytes of int64, ascending. */
static PyObject *job_good(JobObject *self, PyObject *Py_UNUSED(ignored)) {
    Job *job = &self->job;
    if (!is_here(self->owner)) return PyBytes_FromStringAndSize(NULL, 0);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(job->n * sizeof(int64_t)));
    if (!bytes) return NULL;
    int64_t *index = (int64_t *)PyBytes_AS_STRING(bytes);
    Py_ssize_t count = 0;
    pthread_mutex_lock(&self->owner->pool.lock);
    for (size_t i = 0; i < job->n; i++)
        if (job->state[i] == OK) index[count++] = (int64_t)i;
    pthread_mutex_unlock(&self->owner->pool.lock);
    _PyBytes_Resize(&bytes, count * (Py_ssize_t)sizeof(int64_t));
    return bytes;
}

static PyObject *job_wait(JobObject *self, PyObject *args) {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return NULL;
    uint64_t until = seconds < 0 ? 0 : later_ns(seconds);
    /* Releasing the GIL can cost 5 ms next to a busy thread, so it is kept if there is nothing to wait for. */
    if (!is_here(self->owner)) Py_RETURN_FALSE; /* its pages land in the other process's memory */
    if (!__atomic_load_n(&self->job.open, __ATOMIC_ACQUIRE)) Py_RETURN_TRUE;
    Py_BEGIN_ALLOW_THREADS await_job(&self->owner->pool, &self->job, until);
    Py_END_ALLOW_THREADS return PyBool_FromLong(__atomic_load_n(&self->job.open, __ATOMIC_ACQUIRE) == 0);
}

static PyObject *job_cancel(JobObject *self, PyObject *Py_UNUSED(ignored)) {
    Pool *pool = &self->owner->pool;
    if (!is_here(self->owner)) Py_RETURN_NONE;
    pthread_mutex_lock(&pool->lock);
    end_rest(pool, &self->job, CANCELLED);
    pthread_mutex_unlock(&pool->lock);
    Py_RETURN_NONE;
}

static PyObject *job_in_flight(JobObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(__atomic_load_n(&self->job.in_flight, __ATOMIC_ACQUIRE));
}

static PyObject *job_open(JobObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(__atomic_load_n(&self->job.open, __ATOMIC_ACQUIRE));
}

static PyObject *job_error(JobObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(__atomic_load_n(&self->job.error, __ATOMIC_RELAXED));
}

static PyObject *checksum(PyObject *Py_UNUSED(module), PyObject *buffers) {
    if (!PyList_Check(buffers)) return PyErr_Format(PyExc_TypeError, "checksum() takes a list of buffers");
    JobObject scratch = {.job = {.writing = 1}};
    uint8_t digest[16];
    uint64_t total = 0;
    PyObject *result = NULL;
    if (!take_buffers(&scratch, buffers)) {
        for (size_t i = 0; i < scratch.buffer_count; i++) total += scratch.job.iov[i].iov_len;
        if (total < XXH3_SHORTEST) {
            PyErr_Format(PyExc_ValueError, "checksum() needs at least %d bytes", XXH3_SHORTEST);
        } else {
            Py_BEGIN_ALLOW_THREADS xxh3_128(scratch.job.iov, (int)scratch.buffer_count, digest);
            Py_END_ALLOW_THREADS result = PyBytes_FromStringAndSize((char *)digest, 16);
        }
    }
    for (size_t i = 0; i < scratch.buffer_count; i++) PyBuffer_Release(&scratch.buffers[i]);
    free(scratch.buffers), free(scratch.job.iov);
    return result;
}

/* find(buckets, keys, pools, wanted, pool, rows): fills `rows`, an array of int64. */
static PyObject *find(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buckets, keys, pools, wanted, rows;
    unsigned short pool;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*Hw*", &buckets, &keys, &pools, &wanted, &pool, &rows)) return NULL;
    size_t count = (size_t)wanted.len / 32, table = (size_t)pools.len / 2, size = (size_t)buckets.len / 4;
    if ((size_t)rows.len != count * 8 || (size_t)keys.len != table * 32 || !size || (size & (size - 1))) {
        PyErr_SetString(PyExc_ValueError, "the table's arrays do not fit each other");
    } else {
        find_rows(buckets.buf, size - 1, keys.buf, pools.buf, table, wanted.buf, count, pool, rows.buf);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&buckets), PyBuffer_Release(&keys), PyBuffer_Release(&pools);
    PyBuffer_Release(&wanted), PyBuffer_Release(&rows);
    return result;
}

/* place(buckets, keys, pools, rows): inserts rows, an array of int64, whose keys are not in the table. The table must have
 * an empty bucket for each and one more. */
static PyObject *place(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buckets, keys, pools, rows;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*y*y*y*", &buckets, &keys, &pools, &rows)) return NULL;
    size_t count = (size_t)rows.len / 8, table = (size_t)pools.len / 2, size = (size_t)buckets.len / 4;
    const int64_t *row = rows.buf;
    int good = (size_t)keys.len == table * 32 && size && !(size & (size - 1)) && count < size;
    for (size_t i = 0; good && i < count; i++) good = row[i] >= 0 && (size_t)row[i] < table;
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "the table's arrays do not fit each other");
    } else {
        place_rows(buckets.buf, size - 1, keys.buf, pools.buf, row, count);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&buckets), PyBuffer_Release(&keys), PyBuffer_Release(&pools), PyBuffer_Release(&rows);
    return result;
}

static Py_ssize_t buffer_bytes(PyObject *part) {
    if (PyMemoryView_Check(part)) return PyMemoryView_GET_BUFFER(part)->len;
    Py_buffer view;
    if (PyObject_GetBuffer(part, &view, PyBUF_C_CONTIGUOUS)) return -1;
    PyBuffer_Release(&view);
    return view.len;
}

/* One page of columns(): appends its buffers, and sets its key, number of buffers and length in bytes. */
static int take_page(PyObject *page, uint8_t *key, uint32_t *parts, int64_t *length, PyObject *buffers) {
    if (!PyTuple_Check(page) || PyTuple_GET_SIZE(page) < 3) {
        PyErr_SetString(PyExc_TypeError, "a page is (key, buffers, pool)");
        return -1;
    }
    PyObject *name = PyTuple_GET_ITEM(page, 0);
    if (!PyBytes_Check(name) || PyBytes_GET_SIZE(name) != 32) {
        PyErr_SetString(PyExc_ValueError, "a page key is 32 bytes");
        return -1;
    }
    memcpy(key, PyBytes_AS_STRING(name), 32);
    PyObject *list = PySequence_Fast(PyTuple_GET_ITEM(page, 1), "a page's buffers are a sequence");
    if (!list) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    *parts = (uint32_t)count;
    *length = 0;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *part = PySequence_Fast_GET_ITEM(list, k);
        Py_ssize_t bytes = buffer_bytes(part);
        if (bytes < 0 || PyList_Append(buffers, part)) {
            Py_DECREF(list);
            return -1;
        }
        *length += bytes;
    }
    Py_DECREF(list);
    return 0;
}

/* The pool of all pages, or None. The pages were checked before: they are tuples of three or more. */
static PyObject *common_pool(PyObject *pages) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(pages);
    PyObject *first = n ? PyTuple_GET_ITEM(PySequence_Fast_GET_ITEM(pages, 0), 2) : Py_None;
    for (Py_ssize_t i = 1; i < n; i++) {
        int same = PyObject_RichCompareBool(first, PyTuple_GET_ITEM(PySequence_Fast_GET_ITEM(pages, i), 2), Py_EQ);
        if (same < 0) return NULL;
        if (!same) return Py_NewRef(Py_None);
    }
    return Py_NewRef(first);
}

/* columns(pages) -> (keys, parts, lengths, buffers, pool): pages are tuples that begin with (key, buffers, pool). `pool` is
 * None unless all pages have the same. */
static PyObject *columns(PyObject *Py_UNUSED(module), PyObject *pages) {
    PyObject *list = PySequence_Fast(pages, "pages are a sequence");
    if (!list) return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, 32 * n), *parts = PyBytes_FromStringAndSize(NULL, 4 * n);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 8 * n), *buffers = PyList_New(0), *result = NULL;
    int good = keys && parts && lengths && buffers;
    for (Py_ssize_t i = 0; good && i < n; i++)
        good = !take_page(PySequence_Fast_GET_ITEM(list, i), (uint8_t *)PyBytes_AS_STRING(keys) + 32 * i,
                          (uint32_t *)PyBytes_AS_STRING(parts) + i, (int64_t *)PyBytes_AS_STRING(lengths) + i, buffers);
    PyObject *pool = good ? common_pool(list) : NULL;
    if (pool) result = PyTuple_Pack(5, keys, parts, lengths, buffers, pool);
    Py_XDECREF(pool), Py_XDECREF(keys), Py_XDECREF(parts), Py_XDECREF(lengths), Py_XDECREF(buffers);
    Py_DECREF(list);
    return result;
}

static PyMethodDef pool_methods[] = {
    {"submit", (PyCFunction)pool_submit, METH_VARARGS,
     "submit(writing, notify, priority, deadline, fds, sizes, offsets, lengths, heads, parts, buffers) -> Job"},
    {"wait", (PyCFunction)pool_wait, METH_VARARGS, "wait(seen, seconds) -> how often there was news of jobs with `notify`"},
    {"busy", (PyCFunction)pool_busy, METH_NOARGS, "seconds in which at least one thread read and checked"},
    {"close", (PyCFunction)pool_close, METH_NOARGS, "cancels what has not begun and joins the threads"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef pool_fields[] = {{"rings", (getter)pool_rings, NULL, "I/O threads that read through an io_uring of their own", NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef job_methods[] = {
    {"take", (PyCFunction)job_take, METH_O, "take(outcomes): (index, outcomes[code]) of pages that ended since the last call"},
    {"good", (PyCFunction)job_good, METH_NOARGS, "indexes of the pages that ended well, as int64"},
    {"wait", (PyCFunction)job_wait, METH_VARARGS, "wait(seconds): until all ended; negative: no limit"},
    {"cancel", (PyCFunction)job_cancel, METH_NOARGS, "pages not begun end now"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef job_fields[] = {{"in_flight", (getter)job_in_flight, NULL, "pages begun and not ended", NULL},
                                   {"open", (getter)job_open, NULL, "pages not ended", NULL},
                                   {"error", (getter)job_error, NULL, "errno of the last page that failed, or 0", NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject PoolType = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sgl_kvtier.store._native.Pool",
                                .tp_basicsize = sizeof(PoolObject),
                                .tp_flags = Py_TPFLAGS_DEFAULT,
                                .tp_new = pool_new,
                                .tp_dealloc = (destructor)pool_dealloc,
                                .tp_methods = pool_methods,
                                .tp_getset = pool_fields};

static PyTypeObject JobType = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sgl_kvtier.store._native.Job",
                               .tp_basicsize = sizeof(JobObject),
                               .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               .tp_dealloc = (destructor)job_dealloc,
                               .tp_methods = job_methods,
                               .tp_getset = job_fields};

static PyObject *probe(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) { return PyLong_FromLong(ring_probe()); }

static PyMethodDef functions[] = {{"find", find, METH_VARARGS, "the row of each wanted key in a hash table"},
                                  {"place", place, METH_VARARGS, "enters rows into a hash table"},
                                  {"columns", columns, METH_O, "keys, buffer counts, lengths and buffers of pages"},
                                  {"probe_io_uring", probe, METH_NOARGS, "0 if this process may use io_uring, else an errno"},
                                  {"checksum", checksum, METH_O, "XXH3-128 of a list of buffers, 241 bytes or more"},
                                  {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "I/O threads that do not hold Python's lock", -1,
                                    functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    const char *code = xxh3_choose();
    if (PyType_Ready(&PoolType) || PyType_Ready(&JobType)) return NULL;
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    Py_INCREF(&PoolType);
    if (PyModule_AddObject(m, "Pool", (PyObject *)&PoolType) || PyModule_AddIntConstant(m, "HEAD_BYTES", HEAD_BYTES) ||
        PyModule_AddStringConstant(m, "CHECKSUM_CODE", code)) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
