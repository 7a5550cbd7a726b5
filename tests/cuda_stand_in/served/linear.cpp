// Linear layers for the CUDA stand-in (gated delta nets, as Qwen3-Next and Qwen3.5 have them): a causal convolution and
// the delta rule, each one "kernel" that runs on its stream's thread over host memory.
//
// SGLang's are Triton kernels in floating point. These have their contract: numbers of slots and borders of sequences
// are device tensors that are read when the kernel runs, states are read and written in place, and a slot outside of
// the pool is an illegal access, which ends the process. All in float32.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

extern "C" void stand_in_put(void *stream, void (*function)(void *), void *argument);

namespace {

// A CPU tensor over the memory of a device tensor. It keeps nothing alive, as a kernel's pointer does not.
at::Tensor host(const at::Tensor &device) {
  return at::from_blob(device.data_ptr(), device.sizes(), device.strides(),
                       device.options().device(at::kCPU).requires_grad(false));
}

at::Tensor host(const std::optional<at::Tensor> &device) { return device ? host(*device) : at::Tensor(); }

// Tokens [from, to) of one sequence, and the slot of its state.
struct Sequence {
  int64_t from, to, slot;
};

// Without borders each sequence has one token. A slot below 0 is padding.
std::vector<Sequence> sequences(const at::Tensor &indices, const at::Tensor &starts, int64_t slots, int64_t tokens) {
  const auto slot_of = indices.to(at::kLong), borders = starts.defined() ? starts.to(at::kLong) : at::Tensor();
  std::vector<Sequence> found;
  for (int64_t i = 0; i < slot_of.size(0); i++) {
    Sequence one{i, i + 1, slot_of[i].item<int64_t>()};
    if (borders.defined()) one.from = borders[i].item<int64_t>(), one.to = borders[i + 1].item<int64_t>();
    if (one.slot < 0) continue;
    if (one.slot >= slots || one.from > one.to || one.to > tokens) {
      fprintf(stderr, "cuda stand-in: linear layers: illegal address: a state in slot %ld of %ld\n", (long)one.slot, (long)slots);
      abort();
    }
    found.push_back(one);
  }
  return found;
}

struct Convolution {
  at::Tensor input;    // [tokens, channels]
  at::Tensor weight;   // [channels, width]
  at::Tensor bias;     // [channels], or undefined
  at::Tensor states;   // [slots, channels, width - 1]: the inputs before
  at::Tensor indices;  // [sequences]
  at::Tensor starts;   // [sequences + 1], or undefined: one token each
  at::Tensor begun;    // [sequences], bool: has inputs before; undefined: all have
  at::Tensor out;      // [tokens, channels]
};

void run(const Convolution &launch) {
  const int64_t channels = launch.weight.size(0), width = launch.weight.size(1);
  const auto input = launch.input.accessor<float, 2>(), weight = launch.weight.accessor<float, 2>();
  auto out = launch.out.accessor<float, 2>();
  auto states = launch.states.accessor<float, 3>();
  int64_t place = -1;
  const auto slot_of = launch.indices.to(at::kLong);
  for (const auto &one : sequences(launch.indices, launch.starts, launch.states.size(0), launch.input.size(0))) {
    do place++;
    while (slot_of[place].item<int64_t>() < 0);
    const bool begun = !launch.begun.defined() || launch.begun[place].item<bool>();
    for (int64_t channel = 0; channel < channels; channel++) {
      std::vector<float> seen(width - 1, 0.0f);
      for (int64_t i = 0; begun && i < width - 1; i++) seen[i] = states[one.slot][channel][i];
      for (int64_t token = one.from; token < one.to; token++) {
        seen.push_back(input[token][channel]);
        float sum = launch.bias.defined() ? launch.bias[channel].item<float>() : 0.0f;
        for (int64_t i = 0; i < width; i++) sum += weight[channel][i] * seen[seen.size() - width + i];
        out[token][channel] = sum / (1.0f + std::exp(-sum));
      }
      for (int64_t i = 0; i < width - 1; i++) states[one.slot][channel][i] = seen[seen.size() - (width - 1) + i];
    }
  }
}

struct DeltaRule {
  at::Tensor query, key;  // [tokens, key heads, K]
  at::Tensor value;       // [tokens, heads, V]
  at::Tensor decay;       // [tokens, heads]: a logarithm
  at::Tensor beta;        // [tokens, heads]
  at::Tensor states;      // [slots, heads, V, K]
  at::Tensor indices;     // [sequences]
  at::Tensor starts;      // [sequences + 1], or undefined: one token each
  at::Tensor out;         // [tokens, heads, V]
  at::Tensor kept;        // [chunks, heads, V, K]: the state before each chunk of a sequence; or undefined
  int64_t chunk;          // tokens of a chunk
};

void normalize(std::vector<float> &row) {
  float sum = 1e-6f;
  for (float number : row) sum += number * number;
  for (float &number : row) number /= std::sqrt(sum);
}

void run(const DeltaRule &launch) {
  const int64_t heads = launch.states.size(1), V = launch.states.size(2), K = launch.states.size(3);
  const int64_t in_group = heads / launch.key.size(1);
  const float scale = 1.0f / std::sqrt((float)K);
  const auto query = launch.query.accessor<float, 3>(), key = launch.key.accessor<float, 3>();
  const auto value = launch.value.accessor<float, 3>();
  const auto decay = launch.decay.accessor<float, 2>(), beta = launch.beta.accessor<float, 2>();
  auto states = launch.states.accessor<float, 4>();
  auto out = launch.out.accessor<float, 3>();
  int64_t chunks = 0;
  for (const auto &one : sequences(launch.indices, launch.starts, launch.states.size(0), launch.value.size(0))) {
    for (int64_t head = 0; head < heads; head++) {
      auto state = states[one.slot][head];
      std::vector<float> q(K), k(K);
      for (int64_t token = one.from; token < one.to; token++) {
        if (launch.kept.defined() && (token - one.from) % launch.chunk == 0) {
          auto kept = launch.kept.accessor<float, 4>()[chunks + (token - one.from) / launch.chunk][head];
          for (int64_t v = 0; v < V; v++)
            for (int64_t i = 0; i < K; i++) kept[v][i] = state[v][i];
        }
        for (int64_t i = 0; i < K; i++) q[i] = query[token][head / in_group][i], k[i] = key[token][head / in_group][i];
        normalize(q), normalize(k);
        const float rest = std::exp(decay[token][head]);
        for (int64_t v = 0; v < V; v++) {
          float had = 0.0f, said = 0.0f;
          for (int64_t i = 0; i < K; i++) had += (state[v][i] *= rest) * k[i];
          const float change = (value[token][head][v] - had) * beta[token][head];
          for (int64_t i = 0; i < K; i++) said += (state[v][i] += change * k[i]) * q[i];
          out[token][head][v] = said * scale;
        }
      }
    }
    chunks += (one.to - one.from + launch.chunk - 1) / launch.chunk;
  }
}

// On the stream's thread. Ends what was launched.
template <typename Launch>
void run_launch(void *argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch *>(argument));
  const c10::InferenceMode guard;
  try {
    run(*launch);
  } catch (const std::exception &error) {
    fprintf(stderr, "cuda stand-in: a linear layer failed on its stream: %s\n", error.what());
    abort();
  }
}

template <typename Launch>
void put(Launch launch) {
  stand_in_put(c10::cuda::getCurrentCUDAStream().stream(), run_launch<Launch>, new Launch(std::move(launch)));
}

void convolve(const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor> &bias, const at::Tensor &states,
              const at::Tensor &indices, const std::optional<at::Tensor> &starts, const std::optional<at::Tensor> &begun,
              const at::Tensor &out) {
  put(Convolution{host(input), host(weight), host(bias), host(states), host(indices), host(starts), host(begun), host(out)});
}

void delta_rule(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, const at::Tensor &decay,
                const at::Tensor &beta, const at::Tensor &states, const at::Tensor &indices,
                const std::optional<at::Tensor> &starts, const at::Tensor &out, const std::optional<at::Tensor> &kept,
                int64_t chunk) {
  TORCH_CHECK(states.size(1) % key.size(1) == 0, "delta rule: shapes");
  put(DeltaRule{host(query), host(key), host(value), host(decay), host(beta), host(states), host(indices), host(starts),
                host(out), host(kept), chunk});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cuda_stand_in, library) {
  library.def("convolve(Tensor input, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor indices, Tensor? starts, "
              "Tensor? begun, Tensor(b!) out) -> ()");
  library.impl("convolve", c10::DispatchKey::CUDA, TORCH_FN(convolve));
  library.def("delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) states, "
              "Tensor indices, Tensor? starts, Tensor(b!) out, Tensor(c!)? kept, int chunk) -> ()");
  library.impl("delta_rule", c10::DispatchKey::CUDA, TORCH_FN(delta_rule));
}
