// Paged attention for the CUDA stand-in: one "kernel", which runs on its stream's thread over host memory.
//
// FlashAttention and FlashInfer are binaries for a GPU. This has their contract instead: rows of slots and lengths
// are device tensors that are read when the kernel runs, not when it is launched, and a slot outside of the pool is
// an illegal access, which ends the process. The arithmetic is float32 for every type of the KV cache.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

extern "C" void stand_in_put(void *stream, void (*function)(void *), void *argument);

namespace {

// Milliseconds that the kernel of a decoding forward takes at least, so that a forward is still running when the
// scheduler has long gone on.
const long DECODE_MS = getenv("STAND_IN_DECODE_MS") ? atol(getenv("STAND_IN_DECODE_MS")) : 0;

// A CPU tensor over the memory of a device tensor. It keeps nothing alive, as a kernel's pointer does not.
at::Tensor host(const at::Tensor &device) {
  return at::from_blob(device.data_ptr(), device.sizes(), device.strides(),
                       device.options().device(at::kCPU).requires_grad(false));
}

struct Launch {
  at::Tensor query;    // [tokens, heads, dim]
  at::Tensor keys;     // [slots, kv_heads, dim]
  at::Tensor values;   // [slots, kv_heads, value_dim]
  at::Tensor rows;     // [requests, context], int32: the slots of each request's tokens in order
  at::Tensor lengths;  // [requests]: tokens with keys and values, those of this forward included
  at::Tensor added;    // [requests]: tokens of this forward; undefined where each request decodes one
  at::Tensor out;      // [tokens, heads, value_dim]
  at::Tensor sinks;    // [heads]: a logit that every token sees beside the others; undefined: none
  double scale;
  int64_t window;  // tokens before itself that a token sees; below 0: all
};

// One request: `query` is [tokens, heads, dim], the last `tokens` of the sequence in `slots`.
at::Tensor attended(const Launch &launch, const at::Tensor &query, const at::Tensor &slots) {
  const int64_t tokens = query.size(0), heads = query.size(1), length = slots.size(0);
  const int64_t groups = launch.keys.size(1), in_group = heads / groups;
  const auto keys = launch.keys.index_select(0, slots).to(at::kFloat).permute({1, 2, 0});
  const auto values = launch.values.index_select(0, slots).to(at::kFloat).permute({1, 0, 2});
  // [kv_heads, heads of each * tokens, dim]
  const auto asked = query.to(at::kFloat).transpose(0, 1).reshape({groups, in_group * tokens, query.size(2)});
  auto scores = at::bmm(asked, keys).mul_(launch.scale).view({groups, in_group, tokens, length});
  const auto own = at::arange(length - tokens, length).unsqueeze(1), seen = at::arange(length).unsqueeze(0);
  if (tokens > 1) scores.masked_fill_(seen > own, -INFINITY);
  if (launch.window >= 0) scores.masked_fill_(seen < own - launch.window, -INFINITY);
  auto weights = at::softmax(scores, -1);
  if (launch.sinks.defined()) {
    const auto sinks = launch.sinks.to(at::kFloat).view({groups, in_group, 1});
    weights.mul_(at::sigmoid(at::logsumexp(scores, -1).sub_(sinks)).unsqueeze(-1));
  }
  weights = weights.view({groups, in_group * tokens, length});
  return at::bmm(weights, values).view({heads, tokens, -1}).transpose(0, 1);
}

void run(const Launch &launch) {
  const auto lengths = launch.lengths.to(at::kLong), rows = launch.rows.to(at::kLong);
  const auto added = launch.added.defined() ? launch.added.to(at::kLong) : at::ones_like(lengths);
  int64_t first = 0;
  for (int64_t request = 0; request < lengths.size(0); request++) {
    const int64_t length = lengths[request].item<int64_t>(), tokens = added[request].item<int64_t>();
    if (!tokens) continue;
    // What stands before the window has no rows any more.
    const int64_t first_seen = launch.window < 0 ? 0 : std::max<int64_t>(0, length - tokens - launch.window);
    const auto slots = rows[request].slice(0, first_seen, length);
    if (tokens > length || slots.size(0) < length - first_seen || slots.min().item<int64_t>() < 0 ||
        slots.max().item<int64_t>() >= launch.keys.size(0)) {
      fprintf(stderr, "cuda stand-in: attention: illegal address: %ld tokens of a sequence of %ld, slots outside of the pool\n",
              (long)tokens, (long)length);
      abort();
    }
    const auto query = launch.query.slice(0, first, first + tokens);
    launch.out.slice(0, first, first + tokens).copy_(attended(launch, query, slots));
    first += tokens;
  }
}

// On the stream's thread. Ends what was launched.
void run_launch(void *argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch *>(argument));
  const c10::InferenceMode guard;
  try {
    if (!launch->added.defined()) std::this_thread::sleep_for(std::chrono::milliseconds(DECODE_MS));
    run(*launch);
  } catch (const std::exception &error) {
    fprintf(stderr, "cuda stand-in: attention failed on its stream: %s\n", error.what());
    abort();
  }
}

void attend(const at::Tensor &query, const at::Tensor &keys, const at::Tensor &values, const at::Tensor &rows,
            const at::Tensor &lengths, const std::optional<at::Tensor> &added, const at::Tensor &out, double scale,
            const std::optional<at::Tensor> &sinks, int64_t window) {
  TORCH_CHECK(out.is_contiguous() && query.size(1) % keys.size(1) == 0, "attention: shapes");
  auto *launch = new Launch{host(query), host(keys), host(values), host(rows), host(lengths), {}, host(out), {}, scale, window};
  if (added) launch->added = host(*added);
  if (sinks) launch->sinks = host(*sinks);
  stand_in_put(c10::cuda::getCurrentCUDAStream().stream(), run_launch, launch);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cuda_stand_in, library) {
  library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor rows, Tensor lengths, Tensor? added, "
              "Tensor(a!) out, float scale, Tensor? sinks, int window) -> ()");
  library.impl("attend", c10::DispatchKey::CUDA, TORCH_FN(attend));
}
