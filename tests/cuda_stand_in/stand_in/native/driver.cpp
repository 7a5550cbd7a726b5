// libcuda.so.1: what torch, Triton and tvm-ffi ask of CUDA's driver, by the runtime beside it.
#include <cuda.h>

#include "kernels.h"

#include <cstring>

#include <dlfcn.h>

#undef cuGetProcAddress
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent

using namespace stand_in;

namespace {

// One context a device; its handle says which.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(0x1000 + device)); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context) - 0x1000); }

int runtime_device() {
    int device = 0;
    cudaGetDevice(&device);
    return device;
}

CUresult of_runtime(cudaError_t error) { return static_cast<CUresult>(error); }

struct Function {
    std::string name;
    const stand_in_kernel *kernel;
};

}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *version) { return of_runtime(cudaDriverGetVersion(version)); }
API CUresult cuDeviceGetCount(int *count) { return of_runtime(cudaGetDeviceCount(count)); }

API CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *text, int nbytes, CUdevice) {
    strncpy(text, "NVIDIA H100 80GB HBM3 (stand-in)", nbytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return of_runtime(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice) {
    size_t free;
    return of_runtime(cudaMemGetInfo(&free, nbytes));
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = context_of(runtime_device());
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) { return of_runtime(cudaSetDevice(device_of(context))); }

API CUresult cuCtxGetDevice(CUdevice *device) { return of_runtime(cudaGetDevice(device)); }
API CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (context) *context = context_of(runtime_device());
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = cudaGetErrorName(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, reinterpret_cast<void *>(address));
    if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr *>(value) = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(value) = found.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext *>(value) = context_of(found.device); return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    auto *loaded = new Module;
    if (!loaded->load_image(image)) {
        delete loaded;
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    *module = reinterpret_cast<CUmodule>(loaded);
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    auto *kernel = reinterpret_cast<Module *>(module)->find(name);
    if (!kernel) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(new Function{name, kernel});
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared_bytes, CUstream stream, void **params, void **) {
    auto *kernel = reinterpret_cast<Function *>(function)->kernel;
    return of_runtime(launch(kernel, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), shared_bytes, params, stream));
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                          config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
}

// It has nothing to log.
API CUresult cuLogsRegisterCallback(CUlogsCallback, void *, CUlogsCallbackHandle *) { return CUDA_SUCCESS; }
API CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }

API CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t, CUdriverProcAddressQueryResult *status) {
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion(name, function, 0, 0, &found);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
