// aten's CUDA kernels as those of the CPU, over the same memory and on the stream's thread.
//
// One boxed function stands in for all of them. A kernel that knows its results' shapes is put on the current stream and
// returns at once, as on a GPU; it holds no tensor, so memory is given away as early as there. One whose shapes depend on
// data waits for its stream, as on a GPU, and obeys torch's sync debug mode.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

extern "C" {
void stand_in_put(void *stream, void (*function)(void *), void *argument);
void stand_in_synchronize(void *stream);
}

namespace {

using torch::jit::Stack;

const std::set<std::string> SYNCHRONIZING = {
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::nonzero.out",        "aten::equal",          "aten::masked_select",
    "aten::_unique2",            "aten::unique_dim", "aten::unique_consecutive", "aten::is_set_to",      "aten::multinomial",
    "aten::_cummax_helper",      "aten::repeat_interleave.Tensor",               "aten::_cummin_helper",
};

std::atomic<long> n_put{0}, n_waited{0};
std::vector<std::unique_ptr<torch::Library>> libraries;

void *current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
at::Device current_device() { return {at::kCUDA, c10::cuda::current_device()}; }

void wait_for_stream() {
    auto *stream = current_stream();
    if (!PyGILState_Check()) return stand_in_synchronize(stream);
    PyThreadState *state = PyEval_SaveThread();  // what runs there may need the interpreter
    stand_in_synchronize(stream);
    PyEval_RestoreThread(state);
}

void no_synchronizing(const std::string &name) {
    auto mode = c10::cuda::warning_state().get_sync_debug_mode();
    TORCH_CHECK(mode != c10::cuda::SyncDebugMode::L_ERROR, "called a synchronizing CUDA operation: ", name);
    if (mode == c10::cuda::SyncDebugMode::L_WARN) TORCH_WARN("called a synchronizing CUDA operation: ", name);
}

// The same memory as a tensor of the CPU, which does not keep it.
at::Tensor on_cpu(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor without_data(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor like_on_gpu(const at::Tensor &tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(current_device()));
}

// An argument with every tensor in it changed, and devices of the GPU replaced.
template <class Change> c10::IValue changed(const c10::IValue &value, Change change, at::DeviceType device) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor &tensor : value.toTensorList()) tensors.push_back(change(tensor));
        return tensors;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const auto &entry : value.toList()) {
            c10::IValue one = entry;
            tensors.push_back(one.isNone() ? std::nullopt : std::optional<at::Tensor>(change(one.toTensor())));
        }
        return tensors;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(device);
    return value;
}

bool is_mask(const at::Tensor &tensor) {
    return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

bool indexes_by_mask(const Stack &arguments) {
    for (const auto &value : arguments) {
        if (!value.isOptionalTensorList()) continue;
        for (const auto &entry : value.toList()) {
            c10::IValue one = entry;
            if (!one.isNone() && is_mask(one.toTensor())) return true;
        }
    }
    return false;
}

// For each result the argument that it is, as of an operation in place, or -1.
std::vector<int> results_that_are_arguments(const c10::FunctionSchema &schema) {
    std::vector<int> found;
    for (const auto &result : schema.returns()) {
        int which = -1;
        auto *alias = result.alias_info();
        for (size_t n = 0; alias && alias->isWrite() && n < schema.arguments().size(); n++) {
            auto *other = schema.arguments()[n].alias_info();
            if (other && other->isWrite() && !other->beforeSets().empty() && other->beforeSets() == alias->beforeSets())
                which = static_cast<int>(n);
        }
        found.push_back(which);
    }
    return found;
}

// Results' shapes, by the operation on tensors without data. False where it has none of these.
bool shapes(const c10::OperatorHandle &operation, const Stack &arguments, Stack &results) {
    try {
        c10::InferenceMode inference;
        for (const auto &value : arguments) results.push_back(changed(value, without_data, at::kMeta));
        operation.callBoxed(results);
    } catch (const std::exception &) {
        return false;
    }
    for (const auto &value : results)
        if (!value.isTensor() && !value.isTensorList() && !value.isNone()) return false;
    return true;
}

struct Job {
    c10::OperatorHandle operation;
    Stack arguments;
    std::vector<std::vector<at::Tensor>> into;  // by result; empty for one that is an argument

    void run() {
        c10::InferenceMode inference;
        operation.callBoxed(arguments);
        for (size_t n = 0; n < into.size(); n++) {
            if (into[n].empty()) continue;
            if (arguments[n].isTensor()) {
                store(into[n][0], arguments[n].toTensor());
            } else {
                auto tensors = arguments[n].toTensorList();
                for (size_t k = 0; k < into[n].size(); k++) store(into[n][k], tensors.get(k));
            }
        }
    }

    static void store(at::Tensor &target, const at::Tensor &value) {
        if (target.defined() && value.defined()) target.copy_(value);
    }
};

void run_job(void *argument) {
    std::unique_ptr<Job> job(static_cast<Job *>(argument));
    try {
        job->run();
    } catch (const std::exception &error) {
        // A GPU would assert: what was launched returned long ago.
        fprintf(stderr, "cuda stand-in: %s failed on its stream: %.400s\n", toString(job->operation.operator_name()).c_str(),
                error.what());
        abort();
    }
}

Stack put_on_stream(const c10::OperatorHandle &operation, const Stack &arguments, const Stack &shaped,
                    const std::vector<int> &same) {
    n_put++;
    Stack results;
    std::vector<std::vector<at::Tensor>> into;
    for (size_t n = 0; n < shaped.size(); n++) {
        into.emplace_back();
        if (same[n] >= 0) {
            auto tensor = arguments[same[n]].toTensor();
            auto sizes = shaped[n].toTensor().sizes();
            if (tensor.sizes() != sizes) tensor.resize_(sizes);
            results.push_back(tensor);
        } else if (shaped[n].isTensor()) {
            auto made = like_on_gpu(shaped[n].toTensor());
            into[n] = {on_cpu(made)};
            results.push_back(made);
        } else if (shaped[n].isTensorList()) {
            std::vector<at::Tensor> made;
            for (const at::Tensor &tensor : shaped[n].toTensorList()) {
                made.push_back(like_on_gpu(tensor));
                into[n].push_back(on_cpu(made.back()));
            }
            results.push_back(made);
        } else {
            results.push_back(shaped[n]);
        }
    }
    auto *job = new Job{operation, {}, std::move(into)};
    for (const auto &value : arguments) job->arguments.push_back(changed(value, on_cpu, at::kCPU));
    stand_in_put(current_stream(), run_job, job);
    return results;
}

Stack run_at_once(const c10::OperatorHandle &operation, const Stack &arguments, const std::vector<int> &same,
                  const std::string &name) {
    no_synchronizing(name);
    n_waited++;
    wait_for_stream();
    Stack values;
    for (const auto &value : arguments) values.push_back(changed(value, on_cpu, at::kCPU));
    {
        c10::InferenceMode inference;
        operation.callBoxed(values);
    }
    auto uploaded = [](const at::Tensor &tensor) {
        auto made = like_on_gpu(tensor);
        if (made.defined()) on_cpu(made).copy_(tensor);
        return made;
    };
    Stack results;
    for (size_t n = 0; n < values.size(); n++) {
        if (same[n] >= 0) {
            auto tensor = arguments[same[n]].toTensor();
            auto found = values[n].toTensor();
            if (tensor.sizes() != found.sizes()) tensor.resize_(found.sizes());
            if (tensor.data_ptr() != found.data_ptr()) on_cpu(tensor).copy_(found);
            results.push_back(tensor);
        } else {
            results.push_back(changed(values[n], uploaded, at::kCUDA));
        }
    }
    return results;
}

void stand_in_kernel(const c10::OperatorHandle &operation, c10::DispatchKeySet, Stack *stack) {
    const auto &schema = operation.schema();
    size_t count = schema.arguments().size();
    Stack arguments(stack->end() - count, stack->end());
    std::string name = toString(schema.operator_name());
    auto same = results_that_are_arguments(schema);
    Stack shaped;
    bool known = !SYNCHRONIZING.count(name) && !indexes_by_mask(arguments) && shapes(operation, arguments, shaped);
    auto results = known ? put_on_stream(operation, arguments, shaped, same) : run_at_once(operation, arguments, same, name);
    torch::jit::drop(*stack, count);
    for (auto &value : results) stack->push_back(std::move(value));
}

struct DeviceCopy {
    at::Tensor to, from;
};

void run_device_copy(void *argument) {
    std::unique_ptr<DeviceCopy> copy(static_cast<DeviceCopy *>(argument));
    c10::InferenceMode inference;
    copy->to.copy_(copy->from);
}

// Between host and device torch's own copy, where one memcpy does it; in two steps otherwise, as torch does.
at::Tensor &copy_into(at::Tensor &to, const at::Tensor &source, bool non_blocking) {
    at::Tensor from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
    if (to.is_cuda() && from.is_cuda()) {
        stand_in_put(current_stream(), run_device_copy, new DeviceCopy{on_cpu(to), on_cpu(from)});
        return to;
    }
    if (to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous()) return at::native::copy_(to, from, non_blocking);
    if (to.is_cuda()) {
        auto dense = from.to(to.dtype()).contiguous();
        if (to.is_contiguous()) return at::native::copy_(to, dense, false);
        auto uploaded = at::empty(to.sizes(), to.options());
        at::native::copy_(uploaded, dense, false);
        return copy_into(to, uploaded, non_blocking);
    }
    auto dense = from;
    if (!from.is_contiguous()) {
        dense = at::empty(from.sizes(), from.options());
        copy_into(dense, from, true);
    }
    auto host = at::empty(from.sizes(), from.options().device(at::kCPU));
    at::native::copy_(host, dense, false);
    to.copy_(host);
    return to;
}

}  // namespace

// By kernels.py. Replaces aten's CUDA kernels of these names, without "aten::". False, and a line, where that fails.
extern "C" __attribute__((visibility("default"))) int stand_in_install(const char *const *names, int count) {
    try {
        auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
        for (int n = 0; n < count; n++)
            library->impl(names[n], torch::CppFunction::makeFromBoxedFunction<&stand_in_kernel>());
        library->impl("copy_", TORCH_FN(copy_into));
        libraries.push_back(std::move(library));
        return 1;
    } catch (const std::exception &error) {
        fprintf(stderr, "cuda stand-in: aten's kernels cannot be replaced: %s\n", error.what());
        return 0;
    }
}

// For tests: kernels put on streams so far, and kernels that waited for theirs.
extern "C" __attribute__((visibility("default"))) long stand_in_put_kernels() { return n_put; }
extern "C" __attribute__((visibility("default"))) long stand_in_waiting_kernels() { return n_waited; }
