// Device and pinned memory are host memory with a kind; copies have CUDA's rules.
#include "core.h"

#include <atomic>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include <sys/mman.h>

namespace stand_in {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t POISONED_UP_TO = 64 << 20;  // a larger allocation stays untouched, so that a pool takes no memory
constexpr int POISON = 0xA5;

// Never destroyed: streams' threads run until the process has ended.
std::mutex g_mutex;
auto &g_ranges = *new std::map<uintptr_t, Range>;
auto &g_used = *new std::map<int, size_t>;  // bytes by device
std::atomic<unsigned> g_generation{0};  // of the ranges

std::atomic<long> n_pinned{0}, n_pageable{0};

size_t whole_pages(size_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

void *mapped(size_t nbytes) {
    void *memory = mmap(nullptr, whole_pages(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    if (nbytes <= POISONED_UP_TO) memset(memory, POISON, nbytes);
    return memory;
}

void add(void *memory, size_t nbytes, Kind kind, int device) {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto first = reinterpret_cast<uintptr_t>(memory);
    g_ranges[first] = {first, nbytes, kind, device};
    g_generation++;
    if (kind == Kind::device) g_used[device] += nbytes;
}

// Takes away the range that begins here, if it is of this kind.
bool removed(void *memory, Kind kind, Range &range) {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto known = g_ranges.find(reinterpret_cast<uintptr_t>(memory));
    if (known == g_ranges.end() || known->second.kind != kind) return false;
    range = known->second;
    if (kind == Kind::device) g_used[range.device] -= range.nbytes;
    g_ranges.erase(known);
    g_generation++;
    return true;
}

const char *name_of(Kind kind) {
    switch (kind) {
    case Kind::device: return "device memory";
    case Kind::pinned: return "pinned memory";
    case Kind::registered: return "registered memory";
    default: return "pageable memory";
    }
}

// The kind of a piece of memory; false, and a line, where it begins inside of a range and ends outside of it.
bool kind_of(const void *memory, size_t nbytes, Kind &kind) {
    Range range;
    kind = Kind::pageable;
    if (!find_range(memory, range)) return true;
    kind = range.kind;
    if (reinterpret_cast<uintptr_t>(memory) + nbytes <= range.first + range.nbytes) return true;
    say("a copy of %zu bytes leaves its %s", nbytes, name_of(range.kind));
    return false;
}

struct Piece {
    void *to;
    const void *from;
    size_t nbytes;
};

// Each direction of the bus carries one piece at a time.
std::mutex g_bus[2];

void move(const Piece &piece, int direction) {
    if (broken()) return;
    if (direction < 0) {
        memmove(piece.to, piece.from, piece.nbytes);
        return;
    }
    double gbps = settings().bus_gbps;
    if (gbps <= 0) {
        memcpy(piece.to, piece.from, piece.nbytes);
        return;
    }
    std::lock_guard<std::mutex> lock(g_bus[direction]);
    // Half of it before and half of it after the time it takes: who does not wait sees a part of it.
    size_t half = piece.nbytes / 2;
    auto *to = static_cast<char *>(piece.to);
    auto *from = static_cast<const char *>(piece.from);
    memcpy(to, from, half);
    std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<long>(piece.nbytes / gbps)));
    memcpy(to + half, from + half, piece.nbytes - half);
}

cudaError_t copy(const Piece &piece, cudaMemcpyKind kind, cudaStream_t stream) {
    if (broken()) return broken();
    if (!piece.nbytes) return cudaSuccess;
    Kind to, from;
    if (!kind_of(piece.to, piece.nbytes, to) || !kind_of(piece.from, piece.nbytes, from)) return cudaErrorInvalidValue;
    bool onto = to == Kind::device, off = from == Kind::device;
    bool wrong = (kind == cudaMemcpyHostToDevice && (!onto || off)) || (kind == cudaMemcpyDeviceToHost && (onto || !off)) ||
                 (kind == cudaMemcpyDeviceToDevice && (!onto || !off)) || (kind == cudaMemcpyHostToHost && (onto || off));
    if (wrong) {
        say("a copy from %s to %s is not of kind %d", name_of(from), name_of(to), static_cast<int>(kind));
        return cudaErrorInvalidValue;
    }
    int direction = onto == off ? -1 : onto ? 0 : 1;
    auto *on = stream_of(stream);
    bool pageable = to == Kind::pageable || from == Kind::pageable;
    (pageable ? n_pageable : n_pinned)++;
    if (pageable && onto) {  // the driver takes the bytes aside, and returns before the stream comes to them
        auto *first = static_cast<const char *>(piece.from);
        auto staged = std::make_shared<std::vector<char>>(first, first + piece.nbytes);
        on->put([=] { move({piece.to, staged->data(), piece.nbytes}, direction); });
        return broken();
    }
    on->put([=] { move(piece, direction); });
    if (pageable) on->synchronize();
    return broken();
}

}  // namespace

bool find_range(const void *address, Range &found) {
    auto at = reinterpret_cast<uintptr_t>(address);
    std::lock_guard<std::mutex> lock(g_mutex);
    auto next = g_ranges.upper_bound(at);
    if (next == g_ranges.begin()) return false;
    const Range &range = std::prev(next)->second;
    if (at >= range.first + range.nbytes) return false;
    found = range;
    return true;
}

bool may_access(const void *memory, size_t nbytes, const char *kernel) {
    Range range;
    auto first = reinterpret_cast<uintptr_t>(memory);
    if (find_range(memory, range) && first + nbytes <= range.first + range.nbytes) return true;
    char message[300];
    snprintf(message, sizeof message, "%s: an illegal address: %zu bytes at %p", kernel, nbytes, memory);
    break_device(cudaErrorIllegalAddress, message);
    return false;
}

}  // namespace stand_in

using namespace stand_in;

// For tests: copies begun so far from or to pageable memory, and others.
API long stand_in_pageable_copies() { return n_pageable; }
API long stand_in_pinned_copies() { return n_pinned; }

// Whether a kernel may access these bytes. Otherwise the device is broken, as by an illegal address.
API int stand_in_may_access(uint64_t address, int nbytes, int writes, const char *kernel) {
    // The range of the last access: most are in the same.
    static thread_local Range range;
    static thread_local unsigned generation = 0;
    unsigned now = g_generation;
    bool known = now == generation && address >= range.first && address + nbytes <= range.first + range.nbytes;
    if (known && address % nbytes == 0) return 1;
    auto *at = reinterpret_cast<void *>(address);
    char message[300];
    if (address % nbytes) {
        snprintf(message, sizeof message, "%s: an access of %d bytes at %p is misaligned", kernel, nbytes, at);
        break_device(cudaErrorMisalignedAddress, message);
        return 0;
    }
    if (!find_range(at, range) || address + nbytes > range.first + range.nbytes) {
        snprintf(message, sizeof message, "%s: an illegal address: %s %d bytes at %p", kernel, writes ? "it writes" : "it reads",
                 nbytes, at);
        generation = 0;
        break_device(cudaErrorIllegalAddress, message);
        return 0;
    }
    generation = now;
    return 1;
}

API void stand_in_bad_shared(uint64_t address, int nbytes, const char *kernel) {
    char message[300];
    snprintf(message, sizeof message, "%s: %d bytes at %#lx of shared memory are outside of it or misaligned", kernel, nbytes,
             static_cast<unsigned long>(address));
    break_device(cudaErrorIllegalAddress, message);
}

API cudaError_t cudaMalloc(void **memory, size_t nbytes) {
    *memory = nullptr;
    if (broken()) return result(broken());
    if (!nbytes) return cudaSuccess;
    int device = current_device();
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        if (g_used[device] + nbytes > settings().device_bytes) return result(cudaErrorMemoryAllocation);
    }
    *memory = mapped(nbytes);
    if (!*memory) return result(cudaErrorMemoryAllocation);
    add(*memory, nbytes, Kind::device, device);
    return cudaSuccess;
}

// Waits for the device. Its addresses are taken away: who uses them later crashes.
API cudaError_t cudaFree(void *memory) {
    Range range;
    if (!memory) return result(broken());
    synchronize_device(current_device());
    if (!removed(memory, Kind::device, range)) return result(cudaErrorInvalidValue);
    munmap(memory, whole_pages(range.nbytes));
    return result(broken());
}

API cudaError_t cudaHostAlloc(void **memory, size_t nbytes, unsigned) {
    *memory = mapped(nbytes ? nbytes : 1);
    if (!*memory) return result(cudaErrorMemoryAllocation);
    add(*memory, nbytes, Kind::pinned, current_device());
    return result(broken());
}

API cudaError_t cudaMallocHost(void **memory, size_t nbytes) { return cudaHostAlloc(memory, nbytes, cudaHostAllocDefault); }

API cudaError_t cudaFreeHost(void *memory) {
    Range range;
    if (!memory) return result(broken());
    synchronize_device(current_device());
    if (!removed(memory, Kind::pinned, range)) return result(cudaErrorInvalidValue);
    munmap(memory, whole_pages(range.nbytes ? range.nbytes : 1));
    return result(broken());
}

API cudaError_t cudaHostRegister(void *memory, size_t nbytes, unsigned) {
    if (broken()) return result(broken());
    if (!memory || !nbytes) return result(cudaErrorInvalidValue);
    Range range;
    auto last = static_cast<char *>(memory) + nbytes - 1;
    if (find_range(memory, range) || find_range(last, range)) return result(cudaErrorHostMemoryAlreadyRegistered);
    add(memory, nbytes, Kind::registered, current_device());
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *memory) {
    Range range;
    synchronize_device(current_device());
    if (!removed(memory, Kind::registered, range)) return result(cudaErrorHostMemoryNotRegistered);
    return result(broken());
}

// Of pinned or registered memory the device has the same address.
API cudaError_t cudaHostGetDevicePointer(void **on_device, void *memory, unsigned) {
    Range range;
    if (!find_range(memory, range)) return result(cudaErrorInvalidValue);
    *on_device = memory;
    return result(broken());
}

API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    std::lock_guard<std::mutex> lock(g_mutex);
    *total = settings().device_bytes;
    *free = *total - g_used[current_device()];
    return result(broken());
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    Range range;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -1;
    attributes->hostPointer = const_cast<void *>(memory);
    if (!find_range(memory, range)) return result(broken());
    attributes->type = range.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = range.device;
    attributes->devicePointer = const_cast<void *>(memory);
    if (range.kind == Kind::device) attributes->hostPointer = nullptr;
    return result(broken());
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return result(copy({to, from, nbytes}, kind, stream));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, cudaMemcpyKind kind) {
    cudaError_t error = copy({to, from, nbytes}, kind, cudaStreamLegacy);
    if (!error) stream_of(cudaStreamLegacy)->synchronize();
    return result(error ? error : broken());
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t nbytes, cudaStream_t stream) {
    return result(copy({to, from, nbytes}, cudaMemcpyDeviceToDevice, stream));
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                  cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        auto *target = static_cast<char *>(to) + row * to_pitch;
        auto *source = static_cast<const char *>(from) + row * from_pitch;
        if (cudaError_t error = copy({target, source, width}, kind, stream)) return result(error);
    }
    return result(broken());
}

// CUDA gives no order to the copies of a batch: here they come in the opposite one.
API cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *nbytes, size_t count,
                                     cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t stream) {
    for (size_t n = count; n-- > 0;)
        if (cudaError_t error = copy({to[n], from[n], nbytes[n]}, cudaMemcpyDefault, stream)) return result(error);
    return result(broken());
}

API cudaError_t cudaMemsetAsync(void *memory, int value, size_t nbytes, cudaStream_t stream) {
    Kind kind;
    if (broken()) return result(broken());
    if (!kind_of(memory, nbytes, kind) || kind == Kind::pageable) return result(cudaErrorInvalidValue);
    stream_of(stream)->put([=] {
        if (!broken()) memset(memory, value, nbytes);
    });
    return result(broken());
}

API cudaError_t cudaMemset(void *memory, int value, size_t nbytes) {
    cudaError_t error = cudaMemsetAsync(memory, value, nbytes, cudaStreamLegacy);
    if (!error) stream_of(cudaStreamLegacy)->synchronize();
    return error;
}
