/* Makes all copies of a load in one call from Python: pages of host memory, K and V, into a staging room. Also compares pages that were
 * read back from the device with those in host memory.
 *
 * A torch call per copy takes some microseconds of interpreter time, and waits for the GIL each time. Comparing takes a fifth of a second
 * per GiB, all of it with the GIL released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* cudaMemcpyAsync, cudaEventRecord and cudaEventSynchronize; HIP's have the same arguments. */
typedef int (*Copy)(void *to, const void *from, size_t nbytes, int kind, void *stream);
typedef int (*Record)(void *event, void *stream);
typedef int (*Synchronize)(void *event);
enum { HOST_TO_DEVICE = 1 };

typedef struct {
    char *memory; /* K of `pages` pages, then V of as many */
    Py_ssize_t pages;
} Room;

typedef struct {
    const char *half[2]; /* K and V of the same pages */
    Py_ssize_t pages, page_tokens;
    size_t half_bytes; /* of K, or of V, of one page */
} Host;

typedef struct {
    const uint64_t *at; /* addresses of host memory at which one registration with the driver ends and the next begins */
    Py_ssize_t count;
} Borders;

/* Limit of what is queued on the bus at a time: one slice for each event. All fields are uint64 in one buffer, which the caller keeps
 * from load to load. */
typedef struct {
    uint64_t record, synchronize; /* addresses of cudaEventRecord and cudaEventSynchronize */
    uint64_t slice_bytes;
    uint64_t filled; /* bytes sent of the current slice */
    uint64_t sent;   /* number of whole slices sent */
    uint64_t events[]; /* used in turn, one for each slice that may be queued */
} Window;
enum { WINDOW_FIELDS = 5 };

typedef struct {
    Copy copy;
    void *stream;
    const Borders *borders;
    Window *window; /* NULL: everything is queued at once */
    Py_ssize_t slices; /* number of slices in the window */
} Bus;

static void *event_of(const Bus *bus) { return (void *)(uintptr_t)bus->window->events[bus->window->sent % (uint64_t)bus->slices]; }

/* Before a slice begins, waits until the slice whose event it reuses has arrived. */
static int begin_slice(const Bus *bus) {
    Window *window = bus->window;
    if (!window || window->filled || window->sent < (uint64_t)bus->slices) return 0;
    return ((Synchronize)(uintptr_t)window->synchronize)(event_of(bus));
}

static int end_slice(const Bus *bus, size_t nbytes) {
    Window *window = bus->window;
    if (!window) return 0;
    window->filled += nbytes;
    if (window->filled < window->slice_bytes) return 0;
    int error = ((Record)(uintptr_t)window->record)(event_of(bus), bus->stream);
    window->sent++;
    window->filled = 0;
    return error;
}

/* Splits the copy at the ends of slices, and at borders, since the driver refuses a copy that reads from two registrations. */
static int send_piece(const Bus *bus, char *to, const char *from, size_t nbytes) {
    while (nbytes) {
        int error = begin_slice(bus);
        if (error) return error;
        size_t piece = nbytes;
        if (bus->window && bus->window->slice_bytes - bus->window->filled < piece)
            piece = (size_t)(bus->window->slice_bytes - bus->window->filled);
        for (Py_ssize_t n = 0; n < bus->borders->count; n++) {
            uint64_t here = (uint64_t)(uintptr_t)from, border = bus->borders->at[n];
            if (border > here && border - here < piece) piece = (size_t)(border - here);
        }
        error = bus->copy(to, from, piece, HOST_TO_DEVICE, bus->stream);
        if (!error) error = end_slice(bus, piece);
        if (error) return error;
        to += piece, from += piece, nbytes -= piece;
    }
    return 0;
}

/* Pages that are neighbours in host memory are one copy of K and one of V. Returns at the first error. */
static int send_runs(const Bus *bus, const Room *room, const Host *host, const int64_t *slots, Py_ssize_t pages) {
    for (Py_ssize_t at = 0, stop; at < pages; at = stop) {
        int64_t first = slots[at * host->page_tokens];
        for (stop = at + 1; stop < pages; stop++)
            if (slots[stop * host->page_tokens] != first + (stop - at) * host->page_tokens) break;
        size_t start = (size_t)(first / host->page_tokens) * host->half_bytes, nbytes = (size_t)(stop - at) * host->half_bytes;
        for (int half = 0; half < 2; half++) {
            char *to = room->memory + (size_t)(half * room->pages + at) * host->half_bytes;
            int error = send_piece(bus, to, host->half[half] + start, nbytes);
            if (error) return error;
        }
    }
    return 0;
}

static const char *unfit(const Py_buffer *slots, const Room *room, const Host *host) {
    if (host->page_tokens < 1 || slots->itemsize != sizeof(int64_t)) return "slots are int64, of pages of at least one token";
    Py_ssize_t tokens = slots->len / (Py_ssize_t)sizeof(int64_t), pages = tokens / host->page_tokens;
    if (tokens % host->page_tokens || pages > room->pages) return "slots are of whole pages, as many as a room holds at most";
    const int64_t *slot = slots->buf;
    for (Py_ssize_t page = 0; page < pages; page++) {
        int64_t first = slot[page * host->page_tokens];
        if (first < 0 || first % host->page_tokens || first / host->page_tokens >= host->pages) return "a slot is no page's first";
    }
    return NULL;
}

static const char *no_window(const Py_buffer *window) {
    const Window *fields = window->buf;
    Py_ssize_t count = window->len / (Py_ssize_t)sizeof(uint64_t);
    if (window->len == 0) return NULL;
    if (window->itemsize != sizeof(uint64_t) || count <= WINDOW_FIELDS) return "a window is uint64, with an event for each slice";
    if (fields->filled >= fields->slice_bytes) return "a window's slice is larger than what was sent of it";
    return NULL;
}

PyDoc_STRVAR(send_doc,
"send(copy, stream, (room, room_pages), (k, v, host_pages, page_tokens, half_bytes), slots, borders, window)\n--\n\n"
"Sends these pages on a stream, without the interpreter. `copy` is the address of cudaMemcpyAsync; `stream`, `room`, `k` and `v` are\n"
"addresses too. `slots`: a buffer of int64, the host slots of whole pages. `borders`: a buffer of uint64, the addresses of host memory at\n"
"which no copy may go on. `window`: a buffer of uint64 that is written, empty for none: addresses of cudaEventRecord and\n"
"cudaEventSynchronize, bytes of a slice, 0, 0, and an event for each slice that may be queued. With a window the call blocks until the last\n"
"slice may be queued. Raises ValueError, with nothing sent, where a page is in neither; RuntimeError where the driver fails: what was sent\n"
"before is in flight.");

static PyObject *send(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long copy, stream, memory, k, v, half_bytes;
    Room room;
    Host host;
    Py_buffer slots, cuts, window;
    if (!PyArg_ParseTuple(args, "KK(Kn)(KKnnK)y*y*w*:send", &copy, &stream, &memory, &room.pages, &k, &v, &host.pages, &host.page_tokens,
                          &half_bytes, &slots, &cuts, &window))
        return NULL;
    room.memory = (char *)(uintptr_t)memory;
    host.half[0] = (const char *)(uintptr_t)k;
    host.half[1] = (const char *)(uintptr_t)v;
    host.half_bytes = (size_t)half_bytes;
    const char *wrong = unfit(&slots, &room, &host);
    if (!wrong) wrong = no_window(&window);
    Borders borders = {cuts.buf, cuts.len / (Py_ssize_t)sizeof(uint64_t)};
    Bus bus = {(Copy)(uintptr_t)copy, (void *)(uintptr_t)stream, &borders, window.len ? window.buf : NULL,
               window.len / (Py_ssize_t)sizeof(uint64_t) - WINDOW_FIELDS};
    int error = 0;
    if (!wrong) {
        Py_ssize_t pages = slots.len / (Py_ssize_t)sizeof(int64_t) / host.page_tokens;
        Py_BEGIN_ALLOW_THREADS
        error = send_runs(&bus, &room, &host, slots.buf, pages);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&slots);
    PyBuffer_Release(&cuts);
    PyBuffer_Release(&window);
    if (wrong) return PyErr_Format(PyExc_ValueError, "%s", wrong);
    if (error) return PyErr_Format(PyExc_RuntimeError, "a copy to the device failed: error %d of its driver", error);
    Py_RETURN_NONE;
}

/* One axis of a page: its length, and its stride in bytes in host memory and in what was read back. */
typedef struct {
    Py_ssize_t count, host, found;
} Axis;
enum { AXES = 3 };

/* The index on the first axis, the layer, of the first bytes of a page that differ; -1 if none do. */
static Py_ssize_t first_difference(const char *host, const char *found, const Axis *axes, size_t run) {
    for (Py_ssize_t layer = 0; layer < axes[0].count; layer++)
        for (Py_ssize_t one = 0; one < axes[1].count; one++)
            for (Py_ssize_t two = 0; two < axes[2].count; two++) {
                Py_ssize_t at = layer * axes[0].host + one * axes[1].host + two * axes[2].host;
                Py_ssize_t in = layer * axes[0].found + one * axes[1].found + two * axes[2].found;
                if (memcmp(host + at, found + in, run)) return layer;
            }
    return -1;
}

/* Bytes that a page spans in host memory or in what was read back; -1 for an invalid shape. */
static Py_ssize_t reach(const Axis *axes, Py_ssize_t run, int in_host) {
    Py_ssize_t total = run, along;
    if (run < 1) return -1;
    for (int n = 0; n < AXES; n++) {
        Py_ssize_t step = in_host ? axes[n].host : axes[n].found;
        if (axes[n].count < 1 || step < 0 || __builtin_mul_overflow(axes[n].count - 1, step, &along)
            || __builtin_add_overflow(total, along, &total))
            return -1;
    }
    return total;
}

static const char *outside(const Py_buffer *found, const Py_buffer *host, const Py_buffer *starts, Py_ssize_t page_step, const Axis *axes,
                           Py_ssize_t run) {
    if (starts->itemsize != sizeof(int64_t)) return "starts are int64";
    Py_ssize_t pages = starts->len / (Py_ssize_t)sizeof(int64_t), behind;
    Py_ssize_t in_host = reach(axes, run, 1), in_found = reach(axes, run, 0);
    if (in_host < 0 || in_found < 0 || page_step < 0) return "a shape of at least one byte";
    if (pages && (__builtin_mul_overflow(pages - 1, page_step, &behind) || behind > found->len - in_found))
        return "fewer bytes were read back than these pages have";
    const int64_t *start = starts->buf;
    for (Py_ssize_t page = 0; page < pages; page++)
        if (start[page] < 0 || start[page] > host->len - in_host) return "a page lies outside of host memory";
    return NULL;
}

PyDoc_STRVAR(differing_doc, "differing(found, host, starts, page_step, axes, run)\n--\n\n"
"Compares pages that were read back with host memory, without the interpreter. `found`: what was read back, a page every `page_step` bytes.\n"
"`host`: host memory; `starts`: a buffer of int64, where each page begins in it. `axes`: three of (count, bytes from one to the next in host\n"
"memory, the same in `found`), the first one of layers; `run`: bytes that lie together in both. Returns a list with the first layer that\n"
"differs of each page, -1 where none does. Raises ValueError where a page is not in both.");

static PyObject *differing(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer found, host, starts;
    Py_ssize_t page_step, run;
    Axis axes[AXES];
    if (!PyArg_ParseTuple(args, "y*y*y*n((nnn)(nnn)(nnn))n:differing", &found, &host, &starts, &page_step, &axes[0].count, &axes[0].host,
                          &axes[0].found, &axes[1].count, &axes[1].host, &axes[1].found, &axes[2].count, &axes[2].host, &axes[2].found, &run))
        return NULL;
    PyObject *layers = NULL;
    const char *wrong = outside(&found, &host, &starts, page_step, axes, run);
    Py_ssize_t pages = starts.len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t *first = wrong ? NULL : PyMem_Malloc((size_t)(pages ? pages : 1) * sizeof *first);
    if (wrong) PyErr_Format(PyExc_ValueError, "%s", wrong);
    else if (!first) PyErr_NoMemory();
    else {
        const int64_t *start = starts.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t page = 0; page < pages; page++)
            first[page] = first_difference((const char *)host.buf + start[page], (const char *)found.buf + page * page_step, axes, (size_t)run);
        Py_END_ALLOW_THREADS
        layers = PyList_New(pages);
        for (Py_ssize_t page = 0; layers && page < pages; page++) {
            PyObject *layer = PyLong_FromSsize_t(first[page]);
            if (!layer) Py_CLEAR(layers);
            else PyList_SET_ITEM(layers, page, layer);
        }
    }
    PyMem_Free(first);
    PyBuffer_Release(&found);
    PyBuffer_Release(&host);
    PyBuffer_Release(&starts);
    return layers;
}

static PyMethodDef methods[] = {
    {"send", send, METH_VARARGS, send_doc}, {"differing", differing, METH_VARARGS, differing_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Copies of pages onto a card, and their comparison.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
