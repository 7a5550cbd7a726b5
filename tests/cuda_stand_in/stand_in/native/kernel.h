/* What a kernel that was translated from PTX (ptx.py) is made of, and how the runtime runs it. C and C++. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct stand_in_launch {
    void **params; /* where each parameter's bytes are */
    uint32_t grid[3], block[3], shared_bytes;
};

/* An entry of a translated module. The module exports an array of them, ended by one without a name. */
struct stand_in_kernel {
    const char *name;
    void (*run)(const struct stand_in_launch *launch);
    uint32_t param_count;
    const uint32_t *param_bytes;
    const char *unknown; /* why it is not translated; otherwise null */
};

#define STAND_IN_KERNELS "stand_in_kernels"

#ifdef __cplusplus
}
#endif
