// Streams are threads, events are marks in their queues.
#include "core.h"

#include <atomic>
#include <map>
#include <thread>
#include <vector>

namespace stand_in {
namespace {

// Never destroyed: streams' threads run until the process has ended.
std::mutex g_mutex;
auto &g_legacy = *new std::map<int, Stream *>;  // by device
auto &g_streams = *new std::vector<Stream *>;   // of all devices, those that a caller destroyed too
std::atomic<unsigned> g_created{0};
thread_local std::map<int, Stream *> t_own;

Stream *created(int device, unsigned flags, int priority) {
    auto *stream = new Stream(device, flags, priority);
    std::lock_guard<std::mutex> lock(g_mutex);
    g_streams.push_back(stream);
    return stream;
}

std::vector<Stream *> streams_on(int device) {
    std::lock_guard<std::mutex> lock(g_mutex);
    std::vector<Stream *> found;
    for (auto *stream : g_streams)
        if (stream->device == device) found.push_back(stream);
    return found;
}

Stream *legacy(int device) {
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        auto known = g_legacy.find(device);
        if (known != g_legacy.end()) return known->second;
    }
    auto *stream = created(device, cudaStreamNonBlocking, 0);  // its order with the others is made in put()
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_legacy.emplace(device, stream).first->second;
}

bool is_legacy(const Stream *stream) {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto known = g_legacy.find(stream->device);
    return known != g_legacy.end() && known->second == stream;
}

struct Event {
    unsigned flags;
    int device;
    std::mutex mutex;
    std::shared_ptr<Mark> mark;  // of the last recording

    std::shared_ptr<Mark> last() {
        std::lock_guard<std::mutex> lock(mutex);
        return mark;
    }
};

}  // namespace

void Mark::come() {
    std::lock_guard<std::mutex> lock(mutex_);
    at_ = Clock::now();
    come_ = true;
    changed_.notify_all();
}

void Mark::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return come_; });
}

bool Mark::query() {
    std::lock_guard<std::mutex> lock(mutex_);
    return come_;
}

Stream::Stream(int device, unsigned flags, int priority)
    : device(device), priority(priority), blocking(!(flags & cudaStreamNonBlocking)),
      random_(settings().seed * 7919u + g_created++ + 1) {
    static const unsigned shares[] = {0, 1, 8};
    random_.discard(8);
    share_ = shares[random_() % 3];
}

void Stream::enqueue(std::function<void()> operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(operation));
    if (!started_) {
        started_ = true;
        std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
}

// The legacy default stream waits for all blocking streams, and they wait for it.
void Stream::put(std::function<void()> operation) {
    if (is_legacy(this)) {
        std::vector<Stream *> others;
        for (auto *other : streams_on(device))
            if (other->blocking) others.push_back(other);
        for (auto *other : others) wait_for(other->mark());
        enqueue(std::move(operation));
        if (others.empty()) return;
        auto behind = mark();
        for (auto *other : others) other->wait_for(behind);
    } else {
        enqueue(std::move(operation));
    }
}

std::shared_ptr<Mark> Stream::mark() {
    auto mark = std::make_shared<Mark>();
    enqueue([mark] { mark->come(); });
    return mark;
}

void Stream::wait_for(std::shared_ptr<Mark> mark) {
    enqueue([mark] { mark->wait(); });
}

void Stream::run() {
    set_current_device(device);
    for (;;) {
        std::function<void()> operation;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            busy_ = false;
            changed_.notify_all();
            changed_.wait(lock, [this] { return !queue_.empty(); });
            operation = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
        }
        delay();
        operation();
    }
}

void Stream::delay() {
    long longest = settings().jitter_us * share_ / 8;
    if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % longest));
}

void Stream::synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
}

Stream *stream_of(cudaStream_t stream) {
    auto number = reinterpret_cast<uintptr_t>(stream);
    if (number > 2) return reinterpret_cast<Stream *>(stream);
    int device = current_device();
    if (number < 2) return legacy(device);
    auto &own = t_own[device];
    if (!own) own = created(device, cudaStreamDefault, 0);
    return own;
}

void synchronize_device(int device) {
    for (auto *stream : streams_on(device)) stream->synchronize();
}

}  // namespace stand_in

using namespace stand_in;

API void stand_in_put(void *stream, void (*function)(void *), void *argument) {
    stream_of(static_cast<cudaStream_t>(stream))->put([=] { function(argument); });
}

API void stand_in_synchronize(void *stream) { stream_of(static_cast<cudaStream_t>(stream))->synchronize(); }

// For tests: a stream stops here until the gate is opened. Whoever waits for the stream waits too.
API void *stand_in_gate(void *stream) {
    auto gate = new std::shared_ptr<Mark>(std::make_shared<Mark>());
    stream_of(static_cast<cudaStream_t>(stream))->put([mark = *gate] { mark->wait(); });
    return gate;
}

API void stand_in_open(void *gate) { (*static_cast<std::shared_ptr<Mark> *>(gate))->come(); }

API cudaError_t cudaDeviceSynchronize() {
    synchronize_device(current_device());
    return result(broken());
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    auto *made = created(current_device(), flags, priority);
    if (made->blocking) made->wait_for(legacy(made->device)->mark());
    *stream = reinterpret_cast<cudaStream_t>(made);
    return result(broken());
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0); }

// What was put still runs, as in CUDA; the handle stays valid, which CUDA does not promise.
API cudaError_t cudaStreamDestroy(cudaStream_t) { return result(broken()); }

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return result(broken());
}

API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = stream_of(stream)->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
    return result(broken());
}

API cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    *device = stream_of(stream)->device;
    return result(broken());
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (broken()) return result(broken());
    return stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    stream_of(stream)->synchronize();
    return result(broken());
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    auto mark = reinterpret_cast<Event *>(event)->last();
    if (mark) stream_of(stream)->put([mark] { mark->wait(); });
    return result(broken());
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    stream_of(stream)->put([=] { function(argument); });
    return result(broken());
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned) {
    stream_of(stream)->put([=] { function(stream, broken(), argument); });
    return result(broken());
}

// Nothing is ever captured: there are no graphs.
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#undef cudaStreamGetCaptureInfo
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *,
                                         const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    auto *made = new Event;
    made->flags = flags;
    made->device = current_device();
    *event = reinterpret_cast<cudaEvent_t>(made);
    return result(broken());
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Event *>(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    auto *recorded = reinterpret_cast<Event *>(event);
    auto *on = stream_of(stream);
    if (recorded->device != on->device) {
        say("an event of device %d cannot be recorded on a stream of device %d", recorded->device, on->device);
        return result(cudaErrorInvalidResourceHandle);
    }
    auto mark = std::make_shared<Mark>();
    {
        std::lock_guard<std::mutex> lock(recorded->mutex);
        recorded->mark = mark;
    }
    on->put([mark] { mark->come(); });
    return result(broken());
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

// An event that was never recorded has come.
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (broken()) return result(broken());
    auto mark = reinterpret_cast<Event *>(event)->last();
    return !mark || mark->query() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    auto mark = reinterpret_cast<Event *>(event)->last();
    if (mark) mark->wait();
    return result(broken());
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto *first = reinterpret_cast<Event *>(start), *second = reinterpret_cast<Event *>(end);
    auto from = first->last(), to = second->last();
    if ((first->flags | second->flags) & cudaEventDisableTiming || !from || !to) return result(cudaErrorInvalidResourceHandle);
    if (!from->query() || !to->query()) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(to->at() - from->at()).count();
    return result(broken());
}
