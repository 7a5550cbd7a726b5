// What the parts of the stand-in share: errors, streams, events, memory and kernels of CUDA's runtime over host memory.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

#include <cuda_runtime_api.h>

// Exported; everything else stays inside of the library.
#define API extern "C" __attribute__((visibility("default")))

namespace stand_in {

using Clock = std::chrono::steady_clock;

// --- device.cpp: settings and errors

struct Settings {
    int devices;
    size_t device_bytes;  // of each device
    unsigned seed;
    long jitter_us;    // the longest delay in front of an operation of a stream
    double bus_gbps;   // of each direction between host and device; 0: as fast as memcpy
};
Settings &settings();

int current_device();
void set_current_device(int device);

// Keeps the error for cudaGetLastError, as every function of the runtime does. cudaErrorNotReady is no error.
cudaError_t result(cudaError_t error);
// An error that the device does not recover from: every later call returns it.
void break_device(cudaError_t error, const char *message);
cudaError_t broken();
[[gnu::format(printf, 1, 2)]] void say(const char *format, ...);

// --- streams.cpp

// One recording of an event. Whoever waits for it keeps it, so an event may be recorded again or destroyed.
class Mark {
public:
    void come();
    void wait();
    bool query();
    Clock::time_point at() const { return at_; }  // once it has come

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool come_ = false;
    Clock::time_point at_;
};

// A thread that runs what was put, in order, each after a delay.
class Stream {
public:
    Stream(int device, unsigned flags, int priority);

    void put(std::function<void()> operation);
    void synchronize();
    bool idle();

    const int device, priority;
    const bool blocking;  // ordered with the legacy default stream

    // For put() of the legacy default stream: an event behind everything put so far, and a wait for one.
    std::shared_ptr<Mark> mark();
    void wait_for(std::shared_ptr<Mark> mark);

private:
    void enqueue(std::function<void()> operation);
    void run();
    void delay();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool busy_ = false, started_ = false;
    std::minstd_rand random_;
    unsigned share_;  // of the longest delay, in eighths: some streams hurry, others lag
};

// 0 and 1: the legacy default stream of the current device; 2: the calling thread's own.
Stream *stream_of(cudaStream_t stream);
void synchronize_device(int device);

// --- memory.cpp

enum class Kind { pageable, device, pinned, registered };

struct Range {
    uintptr_t first;
    size_t nbytes;
    Kind kind;
    int device;
};

// The allocation or registration that holds this address.
bool find_range(const void *address, Range &found);
// Whether a kernel may access this piece. Otherwise the device is broken, as by an illegal address.
bool may_access(const void *memory, size_t nbytes, const char *kernel);

}  // namespace stand_in

// For translated kernels and aten's jobs.
API int stand_in_may_access(uint64_t address, int nbytes, int writes, const char *kernel);
API void stand_in_put(void *stream, void (*function)(void *), void *argument);
API void stand_in_synchronize(void *stream);
