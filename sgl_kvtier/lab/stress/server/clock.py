"""A server's own time of day, which can be moved while its processes run.

A library of a few functions is preloaded into the server. Only the time of day is moved, as when an
operator or NTP sets a machine's clock. Clocks that count from the start of the machine, sleeps and
file times are left alone.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from sgl_kvtier.errors import BenchError

_VARIABLE = "KVTIER_BENCH_CLOCK"

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("KVTIER_BENCH_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) shift = found;
    close(fd);
}

static int64_t by(void) { return shift ? *shift : 0; }

int clock_gettime(clockid_t clock, struct timespec *at) {
    long status = syscall(SYS_clock_gettime, clock, at);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += by();
    return (int)status;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

/* A wait until a time of day that was computed from the moved one. Times of other clocks are far
   smaller. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real = *until;
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (real.tv_sec > 1000000000) real.tv_sec -= by();
    return next(cond, mutex, &real);
}
"""


class OwnClock:
    """The time of day of one server: `env` are its variables. Raises BenchError where nothing can
    be compiled.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "clock"
        self._path.write_bytes(bytes(mmap.PAGESIZE))
        library = folder / "clock.so"
        _compile(library)
        self.env = {"LD_PRELOAD": str(library.resolve()), _VARIABLE: str(self._path.resolve())}

    def move(self, seconds: int) -> None:
        """From now on the server's time of day is `seconds` ahead of the machine's."""
        with self._path.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


def _compile(library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError(
            "a clock of the server's own needs a C compiler: install gcc, or name other scenes"
        )
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-o",
        str(library),
        "-x",
        "c",
        "-",
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(
            f"a clock of the server's own could not be compiled: {done.stderr.strip()[-300:]}"
        )
