/* Receives replies of the child process, copies pages from the ring to their destinations and verifies them there, without
 * the GIL.
 *
 * A channel has a thread that receives replies as they come. For a call registered with `expect` it copies every page whose
 * code is OK to its buffers, and verifies header and checksum over these buffers. `receive` waits for replies whose pages
 * have been copied: next to a busy Python thread, one wait of 5 ms for the GIL then serves all of them. After `forget` has
 * returned, nothing of that call is written.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../store/native/xxh3.h"

enum { HEAD = 256, SUM_AT = 240, REPLY = 16, MOST_REPLY = 8192, MOST_PARTS = 1000, OK = 0, CORRUPT = 3 };

typedef struct {
    uint64_t offset, length;
    uint32_t first, parts;
} Page;

typedef struct Call {
    struct Call *next;
    uint64_t id;
    size_t n, buffer_count;
    Page *pages;
    uint8_t *heads;
    Py_buffer *buffers;
} Call;

typedef struct Reply {
    struct Reply *next;
    size_t length;
    uint8_t bytes[];
} Reply;

typedef struct {
    PyObject_HEAD
    int fd, wake_fd, ready_fd, stop_fd; /* `fd` is a duplicate: the socket stays open until the thread has ended */
    Py_buffer ring;
    pthread_mutex_t lock; /* guards the fields below; held while one page is copied, never by a thread that waits for the GIL */
    Call *calls, *landed;
    Reply *replies, **last;
    int gone;
    pthread_t thread;
    pid_t process; /* the process that has the thread; 0 if there is none */
    uint8_t scratch[MOST_REPLY];
} Channel;

/* The caller holds the GIL. */
static void release(Call *call) {
    for (size_t i = 0; i < call->buffer_count; i++) PyBuffer_Release(&call->buffers[i]);
    free(call->buffers), free(call->pages), free(call->heads), free(call);
}

static Call **find(Channel *self, uint64_t id) {
    Call **at = &self->calls;
    while (*at && (*at)->id != id) at = &(*at)->next;
    return at;
}

static void digest_of(const uint8_t *head, const Py_buffer *parts, size_t count, uint8_t *digest) {
    struct iovec iov[MOST_PARTS + 1];
    iov[0] = (struct iovec){(void *)head, HEAD};
    for (size_t i = 0; i < count; i++) iov[i + 1] = (struct iovec){parts[i].buf, (size_t)parts[i].len};
    xxh3_128(iov, (int)count + 1, digest);
}

/* The header is copied before it is compared, because a transport may write to the ring at any time. */
static int land(const Channel *self, const Call *call, size_t i) {
    const Page *page = &call->pages[i];
    const uint8_t *from = (const uint8_t *)self->ring.buf + page->offset, *expected = call->heads + HEAD * i;
    uint8_t head[HEAD], digest[16];
    memcpy(head, from, HEAD);
    if (memcmp(head, expected, SUM_AT)) return CORRUPT;
    from += HEAD;
    for (size_t k = page->first; k < page->first + page->parts; k++) {
        memcpy(call->buffers[k].buf, from, (size_t)call->buffers[k].len);
        from += call->buffers[k].len;
    }
    digest_of(expected, call->buffers + page->first, page->parts, digest);
    return memcmp(digest, head + SUM_AT, 16) ? CORRUPT : OK;
}

/* Copies and verifies a reply's pages. Stops if the call is forgotten meanwhile. */
static void land_all(Channel *self, Reply *reply) {
    uint64_t id;
    memcpy(&id, reply->bytes, 8);
    size_t codes = reply->length - REPLY;
    int more = 1;
    for (size_t i = 0; more; i++) {
        pthread_mutex_lock(&self->lock);
        Call **at = find(self, id), *call = *at;
        more = call && i < call->n && i < codes;
        if (more) {
            uint8_t *code = reply->bytes + REPLY + i;
            if (*code == OK) *code = (uint8_t)land(self, call, i);
        } else if (call) {
            *at = call->next;
            call->next = self->landed;
            self->landed = call;
        }
        pthread_mutex_unlock(&self->lock);
    }
}

static void add_one(int fd) {
    const uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
}

static void drain(int fd) {
    uint64_t count;
    (void)!read(fd, &count, sizeof count);
}

/* Processes one message and its pages. Returns 1, 0 if there is none, or -1 if the child is gone. */
static int receive_one(Channel *self) {
    ssize_t n;
    do n = recv(self->fd, self->scratch, MOST_REPLY, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    Reply *reply = n < REPLY ? NULL : malloc(sizeof(Reply) + (size_t)n);
    if (!reply) return -1;
    reply->next = NULL;
    reply->length = (size_t)n;
    memcpy(reply->bytes, self->scratch, (size_t)n);
    land_all(self, reply);
    pthread_mutex_lock(&self->lock);
    *self->last = reply;
    self->last = &reply->next;
    pthread_mutex_unlock(&self->lock);
    add_one(self->ready_fd);
    return 1;
}

/* The thread: runs until the child is gone or `stop_fd` is set. Never takes the GIL. */
static void *land_replies(void *channel) {
    Channel *self = channel;
    struct pollfd fds[2] = {{.fd = self->fd, .events = POLLIN}, {.fd = self->stop_fd, .events = POLLIN}};
    int state = 0;
    while (state >= 0) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR) break;
        if (fds[1].revents & POLLIN) return NULL;
        while ((state = receive_one(self)) > 0) {}
    }
    pthread_mutex_lock(&self->lock);
    self->gone = 1;
    pthread_mutex_unlock(&self->lock);
    add_one(self->ready_fd);
    return NULL;
}

static PyObject *channel_receive(Channel *self, PyObject *args) {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    struct pollfd fds[2] = {{.fd = self->ready_fd, .events = POLLIN}, {.fd = self->wake_fd, .events = POLLIN}};
    poll(fds, 2, seconds <= 0 ? 0 : seconds > 60 ? 60000 : (int)(seconds * 1000) + 1);
    if (fds[0].revents & POLLIN) drain(self->ready_fd);
    if (fds[1].revents & POLLIN) drain(self->wake_fd);
    Py_END_ALLOW_THREADS;
    pthread_mutex_lock(&self->lock);
    Call *landed = self->landed;
    Reply *replies = self->replies;
    int gone = self->gone;
    self->landed = NULL;
    self->replies = NULL;
    self->last = &self->replies;
    pthread_mutex_unlock(&self->lock);
    if (gone) add_one(self->ready_fd); /* the next call does not wait either */
    for (Call *next; landed; landed = next) {
        next = landed->next;
        release(landed);
    }
    PyObject *list = gone && !replies ? Py_NewRef(Py_None) : PyList_New(0);
    for (Reply *next; replies; replies = next) {
        next = replies->next;
        if (list) {
            PyObject *bytes = PyBytes_FromStringAndSize((char *)replies->bytes, (Py_ssize_t)replies->length);
            if (!bytes || PyList_Append(list, bytes)) Py_CLEAR(list);
            Py_XDECREF(bytes);
        }
        free(replies);
    }
    return list;
}

/* The buffers of pages at `offsets` in the ring, as a call. The caller holds the GIL. */
static Call *taken(const Py_buffer *ring, const Py_buffer *offsets, const Py_buffer *heads, PyObject *pages, int flags) {
    Py_ssize_t n = PyList_GET_SIZE(pages), total = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *parts = PyList_GET_ITEM(pages, i);
        if (!PyList_Check(parts) || PyList_GET_SIZE(parts) > MOST_PARTS) goto wrong;
        total += PyList_GET_SIZE(parts);
    }
    if (offsets->len != 8 * n || heads->len != HEAD * n) goto wrong;
    Call *call = calloc(1, sizeof(Call));
    if (!call) return (Call *)PyErr_NoMemory();
    call->pages = calloc((size_t)n + 1, sizeof(Page));
    call->heads = malloc((size_t)heads->len + 1);
    call->buffers = calloc((size_t)total + 1, sizeof(Py_buffer));
    if (!call->pages || !call->heads || !call->buffers) {
        release(call);
        return (Call *)PyErr_NoMemory();
    }
    call->n = (size_t)n;
    memcpy(call->heads, heads->buf, (size_t)heads->len);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *parts = PyList_GET_ITEM(pages, i);
        Page *page = &call->pages[i];
        memcpy(&page->offset, (const char *)offsets->buf + 8 * i, 8);
        page->first = (uint32_t)call->buffer_count;
        page->parts = (uint32_t)PyList_GET_SIZE(parts);
        for (Py_ssize_t k = 0; k < PyList_GET_SIZE(parts); k++) {
            Py_buffer *buffer = &call->buffers[call->buffer_count];
            if (PyObject_GetBuffer(PyList_GET_ITEM(parts, k), buffer, flags)) {
                release(call);
                return NULL;
            }
            call->buffer_count++;
            page->length += (uint64_t)buffer->len;
        }
        if (page->offset > (uint64_t)ring->len || HEAD + page->length > (uint64_t)ring->len - page->offset) {
            release(call);
            goto wrong;
        }
    }
    return call;
wrong:
    PyErr_SetString(PyExc_ValueError, "the pages do not fit the ring");
    return NULL;
}

/* `send` and `wake` keep the GIL: neither blocks, and getting it back next to a busy thread takes 5 ms. */
static PyObject *channel_send(Channel *self, PyObject *message) {
    if (!PyBytes_Check(message)) return PyErr_Format(PyExc_TypeError, "send() takes bytes");
    ssize_t n;
    do n = send(self->fd, PyBytes_AS_STRING(message), (size_t)PyBytes_GET_SIZE(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return PyBool_FromLong(n >= 0);
}

static PyObject *wake(PyObject *Py_UNUSED(module), PyObject *fd) {
    long number = PyLong_AsLong(fd);
    if (number == -1 && PyErr_Occurred()) return NULL;
    add_one((int)number);
    Py_RETURN_NONE;
}

static PyObject *channel_expect(Channel *self, PyObject *args) {
    unsigned long long id;
    Py_buffer offsets, heads;
    PyObject *pages;
    if (!PyArg_ParseTuple(args, "Ky*y*O!", &id, &offsets, &heads, &PyList_Type, &pages)) return NULL;
    Call *call = taken(&self->ring, &offsets, &heads, pages, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
    PyBuffer_Release(&offsets), PyBuffer_Release(&heads);
    if (!call) return NULL;
    call->id = id;
    pthread_mutex_lock(&self->lock);
    call->next = self->calls;
    self->calls = call;
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *channel_forget(Channel *self, PyObject *args) {
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "K", &id)) return NULL;
    pthread_mutex_lock(&self->lock);
    Call **at = find(self, id), *call = *at;
    if (call) *at = call->next;
    pthread_mutex_unlock(&self->lock);
    if (!call) Py_RETURN_FALSE;
    release(call);
    Py_RETURN_TRUE;
}

/* pack(ring, offsets, heads, pages): writes headers with their checksums, and pages, into the ring. */
static PyObject *pack(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer ring, offsets, heads;
    PyObject *pages;
    if (!PyArg_ParseTuple(args, "w*y*y*O!", &ring, &offsets, &heads, &PyList_Type, &pages)) return NULL;
    Call *call = taken(&ring, &offsets, &heads, pages, PyBUF_C_CONTIGUOUS);
    if (call) {
        Py_BEGIN_ALLOW_THREADS;
        for (size_t i = 0; i < call->n; i++) {
            const Page *page = &call->pages[i];
            uint8_t *to = (uint8_t *)ring.buf + page->offset;
            memcpy(to, call->heads + HEAD * i, HEAD);
            digest_of(call->heads + HEAD * i, call->buffers + page->first, page->parts, to + SUM_AT);
            to += HEAD;
            for (size_t k = page->first; k < page->first + page->parts; k++) {
                memcpy(to, call->buffers[k].buf, (size_t)call->buffers[k].len);
                to += call->buffers[k].len;
            }
        }
        Py_END_ALLOW_THREADS;
        release(call);
    }
    PyBuffer_Release(&ring), PyBuffer_Release(&offsets), PyBuffer_Release(&heads);
    if (!call) return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    int fd, wake_fd;
    PyObject *ring;
    if (!PyArg_ParseTuple(args, "iiO", &fd, &wake_fd, &ring)) return NULL;
    Channel *self = (Channel *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->wake_fd = wake_fd;
    self->last = &self->replies;
    pthread_mutex_init(&self->lock, NULL);
    self->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    self->ready_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    self->stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->fd < 0 || self->ready_fd < 0 || self->stop_fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (!PyObject_GetBuffer(ring, &self->ring, PyBUF_C_CONTIGUOUS)) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
        errno = pthread_create(&self->thread, NULL, land_replies, self);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!errno) {
            self->process = getpid();
            return (PyObject *)self;
        }
        PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_DECREF(self);
    return NULL;
}

static void channel_dealloc(Channel *self) {
    if (self->process == getpid()) { /* a forked process has the memory but not the thread */
        add_one(self->stop_fd);
        pthread_join(self->thread, NULL);
    }
    for (Call *call = self->calls, *next; call; call = next) {
        next = call->next;
        release(call);
    }
    for (Call *call = self->landed, *next; call; call = next) {
        next = call->next;
        release(call);
    }
    for (Reply *reply = self->replies, *next; reply; reply = next) {
        next = reply->next;
        free(reply);
    }
    if (self->ring.obj) PyBuffer_Release(&self->ring);
    const int fds[3] = {self->fd, self->ready_fd, self->stop_fd};
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0) close(fds[i]);
    pthread_mutex_destroy(&self->lock);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef channel_methods[] = {
    {"receive", (PyCFunction)channel_receive, METH_VARARGS, "receive(seconds): replies, their pages landed; None: the child is gone"},
    {"send", (PyCFunction)channel_send, METH_O, "send(message): whether the child took it"},
    {"expect", (PyCFunction)channel_expect, METH_VARARGS, "expect(id, offsets, heads, pages): where a reply's pages land"},
    {"forget", (PyCFunction)channel_forget, METH_VARARGS, "forget(id): whether it had not landed; then it does not any more"},
    {NULL, NULL, 0, NULL}};

static PyTypeObject ChannelType = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sgl_kvtier.remote._native.Channel",
                                   .tp_basicsize = sizeof(Channel),
                                   .tp_flags = Py_TPFLAGS_DEFAULT,
                                   .tp_new = channel_new,
                                   .tp_dealloc = (destructor)channel_dealloc,
                                   .tp_methods = channel_methods};

static PyMethodDef functions[] = {{"pack", pack, METH_VARARGS, "pack(ring, offsets, heads, pages): pages into the ring"},
                                  {"wake", wake, METH_O, "wake(fd): adds one to an eventfd"},
                                  {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Pages out of the ring without Python's lock", -1,
                                    functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    xxh3_choose();
    if (PyType_Ready(&ChannelType)) return NULL;
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    Py_INCREF(&ChannelType);
    if (PyModule_AddObject(m, "Channel", (PyObject *)&ChannelType)) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
