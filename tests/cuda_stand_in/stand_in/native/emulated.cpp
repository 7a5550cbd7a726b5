// Kernels that come without PTX, emulated by name.
#include "kernels.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace stand_in {
namespace {

constexpr double FASTEST_CLOCK_HZ = 1.98e9;  // of an H100: a sleep is never shorter than on one

// torch.cuda._sleep
void spin(void **params, cudaStream_t stream) {
    auto cycles = *static_cast<int64_t *>(params[0]);
    auto time = std::chrono::nanoseconds(static_cast<int64_t>(cycles / FASTEST_CLOCK_HZ * 1e9));
    stream_of(stream)->put([time] { std::this_thread::sleep_for(time); });
}

// --- sgl_kernel's transfers of KV between pools (sgl-kernel/csrc/kvcacheio/transfer.cu of SGLang): the two kernels differ in
// what they are compiled for, which their names say: where a row lies in its source and in its target.

enum class Layout { layer_first, layer_table, page_first, page_head };

struct Side {
    Layout layout;
    char *base[2];  // K and V
    uintptr_t *layers[2];
    int64_t *rows, step;  // `step`: bytes of a layer, or of a page's token
};

struct Transfer {
    Side from, to;
    int64_t first_layer, layers, count, row_bytes, page, heads;
    int halves;  // 1 for latents
};

// The bytes of one head of a row, or of the whole row where heads lie together.
char *place(const Side &side, const Transfer &transfer, int half, int64_t layer, int64_t row, int64_t head) {
    int64_t head_bytes = transfer.row_bytes / transfer.heads;
    switch (side.layout) {
    case Layout::layer_first: return side.base[half] + layer * side.step + row * transfer.row_bytes + head * head_bytes;
    case Layout::layer_table:
        return reinterpret_cast<char *>(side.layers[half][layer]) + row * transfer.row_bytes + head * head_bytes;
    case Layout::page_first: return side.base[half] + row * side.step + layer * transfer.row_bytes + head * head_bytes;
    case Layout::page_head: break;
    }
    // [page, head, token, layer, number]; `step` is a token's bytes, of all layers and heads
    int64_t token_bytes = side.step / transfer.heads, in_page = row % transfer.page;
    return side.base[half] + row / transfer.page * transfer.page * side.step + head * transfer.page * token_bytes +
           in_page * token_bytes + layer * head_bytes;
}

void run(const Transfer &transfer) {
    for (int64_t n = 0; n < transfer.count; n++) {
        int64_t from = transfer.from.rows[n], to = transfer.to.rows[n];
        if (from < 0 || to < 0) continue;
        for (int64_t layer = transfer.first_layer; layer < transfer.first_layer + transfer.layers; layer++)
            for (int half = 0; half < transfer.halves; half++)
                for (int64_t head = 0; head < transfer.heads; head++) {
                    char *source = place(transfer.from, transfer, half, layer, from, head);
                    char *target = place(transfer.to, transfer, half, layer, to, head);
                    size_t nbytes = transfer.row_bytes / transfer.heads;
                    if (!may_access(source, nbytes, "transfer_kv") || !may_access(target, nbytes, "transfer_kv")) return;
                    memcpy(target, source, nbytes);
                }
    }
}

Layout layout_of(const std::string &function) {
    if (function.find("lf_tbl") != std::string::npos) return Layout::layer_table;
    if (function.find("offset_ph") != std::string::npos) return Layout::page_head;
    return function.find("offset_pf") != std::string::npos ? Layout::page_first : Layout::layer_first;
}

template <class T> T param(void **params, int n) { return *static_cast<T *>(params[n]); }

void transfer_kv(const std::string &name, void **params, cudaStream_t stream) {
    // Its template arguments: get_global_offset_...<const char> (IKc) of the source, then <char> (Ic) of the target, which is
    // written as a repetition (S0_) where it is the same function.
    size_t source_ends = name.find("IKcE"), second = name.find("get_global_offset_", source_ends);
    Layout from = layout_of(name.substr(0, source_ends));
    Layout to = second == std::string::npos ? from : layout_of(name.substr(second));
    bool by_head = name.find("page_head") != std::string::npos;
    Transfer made = {
        {from, {param<char *>(params, 0), param<char *>(params, 2)}, {param<uintptr_t *>(params, 13), param<uintptr_t *>(params, 15)},
         param<int64_t *>(params, 4), param<int64_t>(params, 11)},
        {to, {param<char *>(params, 1), param<char *>(params, 3)}, {param<uintptr_t *>(params, 14), param<uintptr_t *>(params, 16)},
         param<int64_t *>(params, 5), param<int64_t>(params, 12)},
        param<int64_t>(params, 6), param<int64_t>(params, 7), param<int64_t>(params, 8), param<int64_t>(params, 10),
        by_head ? param<int64_t>(params, 17) : 1, by_head ? param<int64_t>(params, 18) : 1,
        name.find("ELb1EE") == std::string::npos ? 2 : 1,
    };
    stream_of(stream)->put([made] {
        if (!broken()) run(made);
    });
}

}  // namespace

bool emulate(const std::string &name, dim3, dim3, void **params, cudaStream_t stream) {
    if (name.find("spin_kernel") != std::string::npos) {
        spin(params, stream);
        return true;
    }
    if (name.find("transfer_kernel_impl") != std::string::npos || name.find("transfer_page_head_kernel_impl") != std::string::npos) {
        transfer_kv(name, params, stream);
        return true;
    }
    return false;
}

}  // namespace stand_in
