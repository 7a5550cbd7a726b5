/* All copies of a load in one call from Python: pages of host memory, K and V, into a room of staging.
 *
 * A call of torch per copy costs some microseconds of the interpreter, and each of them waits for Python's lock once more.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* cudaMemcpyAsync, and hipMemcpyAsync with the same arguments. */
typedef int (*Copy)(void *to, const void *from, size_t nbytes, int kind, void *stream);
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

/* Neighbours in host memory are one copy of K and one of V. The first error ends it. */
static int send_runs(Copy copy, void *stream, const Room *room, const Host *host, const int64_t *slots, Py_ssize_t pages) {
    for (Py_ssize_t at = 0, stop; at < pages; at = stop) {
        int64_t first = slots[at * host->page_tokens];
        for (stop = at + 1; stop < pages; stop++)
            if (slots[stop * host->page_tokens] != first + (stop - at) * host->page_tokens) break;
        size_t start = (size_t)(first / host->page_tokens) * host->half_bytes, nbytes = (size_t)(stop - at) * host->half_bytes;
        for (int half = 0; half < 2; half++) {
            char *to = room->memory + (size_t)(half * room->pages + at) * host->half_bytes;
            int error = copy(to, host->half[half] + start, nbytes, HOST_TO_DEVICE, stream);
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

PyDoc_STRVAR(send_doc, "send(copy, stream, (room, room_pages), (k, v, host_pages, page_tokens, half_bytes), slots)\n--\n\n"
"Begins the copies of these pages on a stream, without the interpreter. `copy` is the address of cudaMemcpyAsync; `stream`, `room`, `k`\n"
"and `v` are addresses too. `slots`: a buffer of int64, the host slots of whole pages. Raises ValueError, with nothing sent, where a page\n"
"is in neither; RuntimeError where the driver fails: what was sent before is under way.");

static PyObject *send(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long copy, stream, memory, k, v, half_bytes;
    Room room;
    Host host;
    Py_buffer slots;
    if (!PyArg_ParseTuple(args, "KK(Kn)(KKnnK)y*:send", &copy, &stream, &memory, &room.pages, &k, &v, &host.pages, &host.page_tokens,
                          &half_bytes, &slots))
        return NULL;
    room.memory = (char *)(uintptr_t)memory;
    host.half[0] = (const char *)(uintptr_t)k;
    host.half[1] = (const char *)(uintptr_t)v;
    host.half_bytes = (size_t)half_bytes;
    const char *wrong = unfit(&slots, &room, &host);
    int error = 0;
    if (!wrong) {
        Py_ssize_t pages = slots.len / (Py_ssize_t)sizeof(int64_t) / host.page_tokens;
        Py_BEGIN_ALLOW_THREADS
        error = send_runs((Copy)(uintptr_t)copy, (void *)(uintptr_t)stream, &room, &host, slots.buf, pages);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&slots);
    if (wrong) return PyErr_Format(PyExc_ValueError, "%s", wrong);
    if (error) return PyErr_Format(PyExc_RuntimeError, "a copy to the device failed: error %d of its driver", error);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"send", send, METH_VARARGS, send_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Copies of pages onto a card.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
