// Kernels: those of Triton and nvcc run as their PTX, translated to C by ptx.py; a few that come compiled only are
// emulated by name (emulated.cpp).
#include "core.h"
#include "kernel.h"
#include "kernels.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

namespace stand_in {
namespace {

// The container in which nvcc puts the code of a translation unit for each architecture (fatbinary_section.h of CUDA).
struct FatbinWrapper {
    int magic, version;
    const char *data;
    void *rest;
};
struct FatbinHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t nbytes;  // of the entries
};
struct FatbinEntry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t nbytes;
    uint32_t compressed_bytes;
};
constexpr uint16_t PTX = 1;

std::mutex g_mutex;
auto &g_registered = *new std::unordered_map<const void *, std::pair<Module *, std::string>>;  // by the host's function
auto &g_unknown = *new std::set<std::string>;
std::atomic<long> g_launched{0};

std::vector<std::string> ptx_of(const FatbinWrapper *wrapper) {
    std::vector<std::string> found;
    const char *at = wrapper->data;
    auto *header = reinterpret_cast<const FatbinHeader *>(at);
    const char *end = at + header->header_bytes + header->nbytes;
    at += header->header_bytes;
    while (at < end) {
        auto *entry = reinterpret_cast<const FatbinEntry *>(at);
        const char *text = at + entry->header_bytes;
        if (entry->kind == PTX && !entry->compressed_bytes) found.emplace_back(text, strnlen(text, entry->nbytes));
        at = text + entry->nbytes;
    }
    return found;
}

std::string translated(const std::string &ptx) {
    char name[] = "/tmp/cuda_stand_in_XXXXXX";
    int file = mkstemp(name);
    std::string source = name, compiled = source + ".so";
    bool written = file >= 0 && write(file, ptx.data(), ptx.size()) == static_cast<ssize_t>(ptx.size());
    if (file >= 0) close(file);
    const char *home = getenv("CUDA_STAND_IN_HOME");
    std::string command = std::string("env -u LD_PRELOAD '") + (home ? home : ".") + "/ptxas' '" + source + "' -o '" + compiled + "'";
    bool done = written && system(command.c_str()) == 0;
    unlink(source.c_str());
    return done ? compiled : "";
}

}  // namespace

// Adds the kernels of a shared object that ptx.py made. False where it is none.
bool Module::load(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        say("a translated kernel does not load: %s", dlerror());
        return false;
    }
    auto *kernel = static_cast<const stand_in_kernel *>(dlsym(handle, STAND_IN_KERNELS));
    if (!kernel) return false;
    for (; kernel->name; kernel++) kernels_[kernel->name] = kernel;
    return true;
}

bool Module::load_image(const void *image) {
    auto *bytes = static_cast<const char *>(image);
    if (memcmp(bytes, "\177ELF", 4) != 0) {
        ptx_.emplace_back(bytes);
        return true;
    }
    // The end of a shared object without a strip: its section headers.
    uint64_t headers;
    uint16_t size, count;
    memcpy(&headers, bytes + 40, 8);
    memcpy(&size, bytes + 58, 2);
    memcpy(&count, bytes + 60, 2);
    size_t nbytes = headers + static_cast<size_t>(size) * count;
    int file = memfd_create("cuda_stand_in_kernel", 0);
    if (file < 0 || write(file, bytes, nbytes) != static_cast<ssize_t>(nbytes)) return false;
    // Stays open: a second file of the same number would be taken for this one by the loader.
    return load(("/proc/self/fd/" + std::to_string(file)).c_str());
}

void Module::add_ptx(std::string text) { ptx_.push_back(std::move(text)); }

const stand_in_kernel *Module::find(const std::string &name) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &text : ptx_) {
        if (kernels_.count(name)) break;
        if (text.find(name) == std::string::npos) continue;
        std::string compiled = translated(text);
        if (!compiled.empty()) load(compiled.c_str());
        unlink(compiled.c_str());
        text.clear();
    }
    auto known = kernels_.find(name);
    return known == kernels_.end() ? nullptr : known->second;
}

cudaError_t launch(const stand_in_kernel *kernel, dim3 grid, dim3 block, size_t shared_bytes, void **params, cudaStream_t stream) {
    if (broken()) return broken();
    if (kernel->unknown) {
        say("%s: PTX that is not translated: %s", kernel->name, kernel->unknown);
        return cudaErrorNoKernelImageForDevice;
    }
    g_launched++;
    struct Job {
        const stand_in_kernel *kernel;
        stand_in_launch launch;
        std::vector<std::vector<uint64_t>> values;
    };
    auto job = std::make_shared<Job>();
    job->kernel = kernel;
    job->launch = {nullptr, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, static_cast<uint32_t>(shared_bytes)};
    for (uint32_t n = 0; n < kernel->param_count; n++) {
        std::vector<uint64_t> value((kernel->param_bytes[n] + 7) / 8);
        memcpy(value.data(), params[n], kernel->param_bytes[n]);
        job->values.push_back(std::move(value));
    }
    stream_of(stream)->put([job] {
        std::vector<void *> at;
        for (auto &value : job->values) at.push_back(value.data());
        job->launch.params = at.data();
        if (!broken()) job->kernel->run(&job->launch);
    });
    return cudaSuccess;
}

namespace {

// By the address of its stub on the host, as code that nvcc compiled launches a kernel.
cudaError_t launch_registered(const void *function, dim3 grid, dim3 block, size_t shared_bytes, void **params, cudaStream_t stream) {
    if (broken()) return broken();
    std::pair<Module *, std::string> known;
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        auto found = g_registered.find(function);
        if (found == g_registered.end()) {
            say("a kernel is launched that was never registered");
            return cudaErrorInvalidDeviceFunction;
        }
        known = found->second;
    }
    if (auto *kernel = known.first->find(known.second)) return launch(kernel, grid, block, shared_bytes, params, stream);
    if (emulate(known.second, grid, block, params, stream)) {
        g_launched++;
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_unknown.insert(known.second).second) say("a kernel has no PTX and is not emulated: %s", known.second.c_str());
    return cudaErrorNoKernelImageForDevice;
}

struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> t_configurations;

}  // namespace
}  // namespace stand_in

using namespace stand_in;

// For tests: kernels launched so far, aten's aside.
API long stand_in_launched_kernels() { return g_launched; }

API void **__cudaRegisterFatBinary(void *wrapper) {
    auto *module = new Module;
    for (auto &text : ptx_of(static_cast<const FatbinWrapper *>(wrapper))) module->add_ptx(std::move(text));
    return reinterpret_cast<void **>(module);
}

API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

API void __cudaRegisterFunction(void **module, const char *function, char *, const char *name, int, void *, void *, void *, void *, int *) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_registered[function] = {reinterpret_cast<Module *>(module), name};
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    t_configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    auto &last = t_configurations.back();
    *grid = last.grid;
    *block = last.block;
    *shared_bytes = last.shared_bytes;
    *static_cast<cudaStream_t *>(stream) = last.stream;
    t_configurations.pop_back();
    return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **params, size_t shared_bytes, cudaStream_t stream) {
    return result(launch_registered(function, grid, block, shared_bytes, params, stream));
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **params, size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, params, shared_bytes, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **params, size_t shared_bytes,
                                            cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, params, shared_bytes, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **params) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, params, config->dynamicSmemBytes, config->stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return result(broken());
}

API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return result(broken()); }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
    *blocks = 2;
    return result(broken());
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}
