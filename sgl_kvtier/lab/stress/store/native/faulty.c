/* The store's I/O threads built a second time, with system calls that fail by plan: the module _native_faults.
 *
 * Transfers of threads fail where preadv and pwritev would, those of rings as the kernel's completions. What a read that failed or
 * was cut short did not deliver is overwritten, so that memory never has the right bytes by luck. One plan a process.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OTHER, READ, WRITE, COMPLETION, ANY, CALLS }; /* OTHER: system calls that Python makes. As in faults.py */
enum { NONE, FAIL, SHORT, DELAY, KILL_BEFORE, KILL_AFTER };

/* Calls [first, last] of one kind, counted from 0 since the plan was made. `amount`: an errno, bytes, microseconds. Bytes below 0:
 * a part in whole units of so many bytes. */
typedef struct {
    int call, what;
    uint64_t first, last, of; /* `of`: the number of its plan */
    int64_t amount;
} Fault;

static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static Fault *plan;
static size_t planned;
static uint64_t period, plans, calls[CALLS], faults[CALLS]; /* `period`: numbers begin anew after so many calls; 0: never */

static Fault take_fault(int call) {
    Fault found = {.what = NONE};
    pthread_mutex_lock(&fault_lock);
    uint64_t own = calls[call]++, any = calls[ANY]++;
    for (size_t i = 0; i < planned && !found.what; i++) {
        uint64_t number = plan[i].call == ANY ? any : own;
        if (plan[i].call != ANY && plan[i].call != call) continue;
        if (period) number %= period;
        if (number >= plan[i].first && number <= plan[i].last) found = plan[i];
    }
    if (found.what) faults[call]++, faults[ANY]++;
    found.of = plans;
    pthread_mutex_unlock(&fault_lock);
    return found;
}

/* How many of `total` bytes are moved. */
static size_t part_of(const Fault *fault, size_t total, uint64_t offset) {
    if (fault->amount >= 0) return (uint64_t)fault->amount < total ? (size_t)fault->amount : total;
    size_t unit = (size_t)-fault->amount, units = total / unit;
    if (fault->what == KILL_AFTER) return units ? (offset / 4096 * 2654435761u + total / 512) % units * unit : 0;
    if (units < 2) return unit < total ? unit : total; /* something is moved: nothing would be the file's end */
    return units / 2 * unit;
}

/* For its time, or until there is another plan. */
static void hold(const Fault *fault) {
    int64_t left = fault->amount;
    if (left < 1000) usleep((useconds_t)left);
    for (; left >= 1000 && __atomic_load_n(&plans, __ATOMIC_ACQUIRE) == fault->of; left -= 1000) poll(NULL, 0, 1);
}

static void spoil(const struct iovec *iov, int count, size_t from) {
    for (int i = 0; i < count; i++) {
        if (from < iov[i].iov_len) memset((uint8_t *)iov[i].iov_base + from, 0xA5, iov[i].iov_len - from);
        from -= from < iov[i].iov_len ? from : iov[i].iov_len;
    }
}

static size_t bytes_of(const struct iovec *iov, int count) {
    size_t total = 0;
    for (int i = 0; i < count; i++) total += iov[i].iov_len;
    return total;
}

static ssize_t move_bytes(int writing, int fd, const struct iovec *iov, int count, off_t at) {
    struct iovec cut[1024];
    Fault fault = take_fault(writing ? WRITE : READ);
    int n = count;
    if (fault.what == FAIL) {
        if (!writing) spoil(iov, count, 0);
        errno = (int)fault.amount;
        return -1;
    }
    if (fault.what == DELAY) hold(&fault);
    if (fault.what == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (fault.what == SHORT || fault.what == KILL_AFTER) {
        size_t left = part_of(&fault, bytes_of(iov, count), (uint64_t)at);
        for (n = 0; n < count && left; left -= cut[n++].iov_len)
            cut[n] = (struct iovec){iov[n].iov_base, iov[n].iov_len < left ? iov[n].iov_len : left};
        iov = cut;
    }
    ssize_t moved = writing ? pwritev(fd, iov, n, at) : preadv(fd, iov, n, at);
    if (fault.what == KILL_AFTER) kill(getpid(), SIGKILL);
    return moved;
}

/* What a ring says of a read that has ended. */
static int32_t completed(const struct iovec *iov, int count, int32_t result) {
    Fault fault = take_fault(COMPLETION);
    if (fault.what == DELAY) hold(&fault); /* the ring's thread looks at no other completion meanwhile */
    if (fault.what == KILL_BEFORE || fault.what == KILL_AFTER) kill(getpid(), SIGKILL);
    if (fault.what == FAIL) result = -(int32_t)fault.amount;
    if (fault.what == SHORT && result > 0) result = (int32_t)part_of(&fault, (size_t)result, 0);
    if (fault.what == FAIL || fault.what == SHORT) spoil(iov, count, result > 0 ? (size_t)result : 0);
    return result;
}

#define KVTIER_FAULTS
#define PyInit__native native_module
#include "../../../../store/native/module.c"

static PyObject *arm(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list;
    unsigned long long every;
    if (!PyArg_ParseTuple(args, "O!K", &PyList_Type, &list, &every)) return NULL;
    size_t n = (size_t)PyList_GET_SIZE(list);
    Fault *fresh = calloc(n + 1, sizeof *fresh);
    if (!fresh) return PyErr_NoMemory();
    for (size_t i = 0; i < n; i++) {
        Fault *fault = &fresh[i];
        unsigned long long first, last;
        long long amount;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, (Py_ssize_t)i), "iKKiL", &fault->call, &first, &last, &fault->what, &amount)) {
            free(fresh);
            return NULL;
        }
        fault->first = first, fault->last = last, fault->amount = amount;
    }
    pthread_mutex_lock(&fault_lock);
    free(plan);
    plan = fresh, planned = n, period = every;
    memset(calls, 0, sizeof calls), memset(faults, 0, sizeof faults);
    __atomic_add_fetch(&plans, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&fault_lock);
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *Py_UNUSED(module), PyObject *call) {
    long number = PyLong_AsLong(call);
    if (number < 0 || number >= ANY) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no kind of call: %ld", number);
    Fault fault = take_fault((int)number);
    return Py_BuildValue("iL", fault.what, (long long)fault.amount);
}

static PyObject *counts(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    pthread_mutex_lock(&fault_lock);
    unsigned long long made[CALLS], failed[CALLS];
    for (int i = 0; i < CALLS; i++) made[i] = calls[i], failed[i] = faults[i];
    pthread_mutex_unlock(&fault_lock);
    PyObject *both[2] = {PyTuple_New(CALLS), PyTuple_New(CALLS)};
    for (int k = 0; k < 2 && both[0] && both[1]; k++)
        for (int i = 0; i < CALLS; i++) PyTuple_SET_ITEM(both[k], i, PyLong_FromUnsignedLongLong(k ? failed[i] : made[i]));
    return Py_BuildValue("NN", both[0], both[1]);
}

static PyMethodDef fault_functions[] = {
    {"arm", arm, METH_VARARGS, "arm(faults, period): a plan of (call, first, last, what, amount); counts begin anew"},
    {"take", take, METH_O, "take(call) -> (what, amount): counts a call that Python makes"},
    {"counts", counts, METH_NOARGS, "(calls, faults) by kind of call since the plan was made"},
    {NULL, NULL, 0, NULL}};

PyMODINIT_FUNC PyInit__native_faults(void) {
    PyObject *m = native_module();
    if (m && PyModule_AddFunctions(m, fault_functions)) Py_CLEAR(m);
    return m;
}
