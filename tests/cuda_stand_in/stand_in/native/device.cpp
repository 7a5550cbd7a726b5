// Devices, settings and errors.
#include "core.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <dlfcn.h>

namespace stand_in {
namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last = cudaSuccess;
std::atomic<int> g_broken{cudaSuccess};

double number(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

}  // namespace

Settings &settings() {
    static Settings all = {
        static_cast<int>(number("CUDA_STAND_IN_DEVICES", 1)),
        static_cast<size_t>(number("CUDA_STAND_IN_MIB", 8192)) << 20,
        static_cast<unsigned>(number("CUDA_STAND_IN_SEED", 0)),
        static_cast<long>(number("CUDA_STAND_IN_JITTER_US", 0)),
        number("CUDA_STAND_IN_BUS_GBPS", 0),
    };
    return all;
}

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }

void say(const char *format, ...) {
    char line[600];
    va_list rest;
    va_start(rest, format);
    vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    fprintf(stderr, "cuda stand-in: %s\n", line);
}

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) t_last = error;
    return error;
}

void break_device(cudaError_t error, const char *message) {
    int none = cudaSuccess;
    if (g_broken.compare_exchange_strong(none, error)) say("%s", message);
}

cudaError_t broken() { return static_cast<cudaError_t>(g_broken.load()); }

}  // namespace stand_in

using namespace stand_in;

// Of the functions that the stand-in lacks (build.py writes one for each): named once, and an error. Those of the driver
// (cu...) leave no last error of the runtime.
API int stand_in_missing(const char *name, int first_time) {
    if (first_time) say("%s is missing: add it to tests/cuda_stand_in/stand_in/native", name);
    return strncmp(name, "cuda", 4) == 0 ? result(cudaErrorNotSupported) : cudaErrorNotSupported;
}

API void stand_in_set_jitter(long microseconds) { settings().jitter_us = microseconds; }
API void stand_in_set_bus(double gbps) { settings().bus_gbps = gbps; }

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = settings().devices;
    return result(*count ? cudaSuccess : cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *device) {
    *device = current_device();
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= settings().devices) return result(cudaErrorInvalidDevice);
    set_current_device(device);
    return result(broken());
}

API cudaError_t cudaInitDevice(int, unsigned, unsigned) { return result(broken()); }
API cudaError_t cudaDeviceReset() { return result(broken()); }

API cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION / 1000 * 1000;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

// The last error of the calling thread. A broken device stays broken, whoever asks.
API cudaError_t cudaGetLastError() {
    cudaError_t last = broken() ? broken() : t_last;
    t_last = cudaSuccess;
    return last;
}

API cudaError_t cudaPeekAtLastError() { return broken() ? broken() : t_last; }

API const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorSymbolNotFound: return "cudaErrorSymbolNotFound";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
    }
}

API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device (stand-in)";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorSymbolNotFound: return "named symbol not found";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorNotSupported: return "operation not supported (the stand-in lacks it)";
    default: return "unknown error (stand-in)";
    }
}

// As an H100 says of itself, but for the memory.
#undef cudaGetDeviceProperties
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= settings().devices) return result(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "NVIDIA H100 80GB HBM3 (stand-in)");
    properties->totalGlobalMem = settings().device_bytes;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerMultiprocessor = properties->regsPerBlock = 65536;
    properties->l2CacheSize = 50 << 20;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = 1;
    properties->asyncEngineCount = 3;
    properties->concurrentKernels = 1;
    properties->pciBusID = 1 + device;
    return result(broken());
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= settings().devices) return result(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
    }
    return result(broken());
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    snprintf(text, nbytes, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *status) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, (std::string(name) + "_v2").c_str()) : nullptr;
    if (driver && !*function) *function = dlsym(driver, name);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
