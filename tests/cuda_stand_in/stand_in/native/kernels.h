// Modules of translated kernels, and kernels that are emulated by name.
#pragma once

#include "core.h"
#include "kernel.h"

#include <map>
#include <string>
#include <vector>

namespace stand_in {

// Code that was loaded together. PTX is translated when one of its kernels is first launched.
class __attribute__((visibility("default"))) Module {
public:
    bool load_image(const void *image);  // of the driver's cuModuleLoadData: PTX, or what ptx.py made of it
    void add_ptx(std::string text);
    const stand_in_kernel *find(const std::string &name);  // or nullptr

private:
    bool load(const char *path);

    std::mutex mutex_;
    std::vector<std::string> ptx_;
    std::map<std::string, const stand_in_kernel *> kernels_;
};

// On the stream's thread. Reads the parameters before it returns.
__attribute__((visibility("default"))) cudaError_t launch(const stand_in_kernel *kernel, dim3 grid, dim3 block, size_t shared_bytes, void **params, cudaStream_t stream);

// False where no kernel of this (mangled) name is emulated.
bool emulate(const std::string &name, dim3 grid, dim3 block, void **params, cudaStream_t stream);

}  // namespace stand_in
