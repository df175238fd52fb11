// The pretend devices' kernels: those of the CPU, run on the same bytes.

#include "timeline.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace fake_accelerator {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::impl::VirtualGuardImpl device_guard() {
  return c10::impl::VirtualGuardImpl(kType);
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

c10::Stream current_stream(const at::Tensor& tensor) {
  return device_guard().getStream(tensor.device());
}

Memory* memory_of(const at::Tensor& tensor) {
  return static_cast<Memory*>(tensor.storage().data_ptr().get_context());
}

// CPU tensors over the memory of device tensors, and the way back.
class Twins {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return tensor;
    }
    auto twin = at::detail::make_tensor<c10::TensorImpl>(
        storage_for(tensor),
        c10::DispatchKeySet(c10::DispatchKey::CPU),
        tensor.dtype());
    set_geometry(twin, tensor);
    return twin;
  }

  // A result that lies in the memory of an argument is a view of it.
  at::Tensor to_device(const at::Tensor& result, const std::string& kernel) {
    if (!result.defined()) {
      return result;
    }
    for (const auto& [original, storage] : twins_) {
      if (result.storage().is_alias_of(storage)) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW,
            c10::Storage(original.storage()),
            original.key_set(),
            result.dtype());
        set_geometry(view, result);
        return view;
      }
    }
    auto copy = at::empty_strided(
        result.sizes(),
        result.strides(),
        result.options().device(twins_.front().first.device()));
    Timeline::get().launch(kernel, current_stream(copy), {}, {memory_of(copy)});
    to_cpu(copy).copy_(result);
    return copy;
  }

 private:
  static void set_geometry(const at::Tensor& target, const at::Tensor& model) {
    target.unsafeGetTensorImpl()->set_sizes_and_strides(
        model.sizes(), model.strides(), model.storage_offset());
  }

  c10::Storage storage_for(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    for (const auto& [original, twin] : twins_) {
      if (original.storage().is_alias_of(storage)) {
        return twin;
      }
    }
    twins_.emplace_back(
        tensor,
        c10::Storage(
            c10::Storage::use_byte_size_t(),
            storage.nbytes(),
            c10::DataPtr(storage.mutable_data(), c10::DeviceType::CPU),
            c10::GetAllocator(c10::DeviceType::CPU),
            /*resizable=*/true));
    return twins_.back().second;
  }

  std::vector<std::pair<at::Tensor, c10::Storage>> twins_;
};

// Applies `change` to each tensor of `value`, in lists as well; whether there
// can be any.
template <typename Change>
bool change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    std::transform(tensors.begin(), tensors.end(), tensors.begin(), change);
    value = std::move(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::make_optional(change(*tensor)) : tensor);
    }
    value = std::move(changed);
  } else {
    return false;
  }
  return true;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto kernel = op.schema().name();
  const auto& parameters = op.schema().arguments();
  const auto first = stack->size() - parameters.size();
  const std::vector<c10::IValue> arguments(
      stack->begin() + first, stack->end());

  Twins twins;
  std::optional<c10::Stream> stream;
  std::vector<Memory*> read;
  std::vector<Memory*> written;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* alias = parameters[i].alias_info();
    auto& memories = alias && alias->isWrite() ? written : read;
    change_tensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        const auto current = current_stream(tensor);
        TORCH_CHECK(
            !stream || *stream == current,
            kernel,
            " got tensors of more than one pretend device.");
        stream = current;
        memories.push_back(memory_of(tensor));
      }
      return twins.to_cpu(tensor);
    });
  }
  TORCH_CHECK(stream, kernel, " has no kernel for the pretend device.");
  const auto views = std::any_of(
      parameters.begin(), parameters.end(), [](const auto& parameter) {
        return parameter.alias_info() && !parameter.alias_info()->isWrite();
      });
  if (!views) {
    Timeline::get().launch(kernel, *stream, read, written);
  }

  const std::vector<c10::IValue> cpu_arguments(
      stack->begin() + first, stack->end());

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* alias = parameters[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor()) {
      // An output that the kernel gave its size got other memory by that.
      const auto& output = arguments[i].toTensor();
      const auto& twin = cpu_arguments[i].toTensor();
      if (output.defined() && output.sizes() != twin.sizes()) {
        output.resize_(twin.sizes());
        output.copy_(twin);
      }
    }
  }

  const auto& results = op.schema().returns();
  const auto first_result = stack->size() - results.size();
  for (size_t i = 0; i < results.size(); ++i) {
    auto& result = (*stack)[first_result + i];
    const auto* alias = results[i].alias_info();
    if (alias && alias->isWrite()) {
      // The argument itself: the one written under the same name.
      for (size_t j = 0; j < parameters.size(); ++j) {
        if (parameters[j].alias_info() &&
            *parameters[j].alias_info() == *alias) {
          result = arguments[j];
        }
      }
    } else if (!change_tensors(result, [&](const at::Tensor& tensor) {
                 return twins.to_device(tensor, kernel);
               })) {
      device_guard().synchronizeStream(*stream);
    }
  }
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size,
      c10::GetAllocator(kType),
      kKeys,
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size,
      stride,
      c10::GetAllocator(kType),
      kKeys,
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize(
    const at::Tensor& tensor,
    c10::IntArrayRef size,
    std::optional<c10::MemoryFormat>) {
  const c10::DeviceGuard guard(tensor.device());
  at::native::resize_impl_cpu_(
      tensor.unsafeGetTensorImpl(), size, std::nullopt);
  return tensor;
}

// Ordered as on CUDA: between devices, on the source's stream, with both
// streams waiting for each other; to and from the host, with the host waiting.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  auto& timeline = Timeline::get();
  const auto stream = current_stream(on_device(from) ? from : to);
  const auto other = current_stream(on_device(to) ? to : from);
  std::vector<Memory*> read;
  std::vector<Memory*> written;
  if (on_device(from)) {
    read.push_back(memory_of(from));
  }
  if (on_device(to)) {
    written.push_back(memory_of(to));
  }
  if (stream != other) {
    timeline.wait(stream, timeline.record(other));
  }
  timeline.launch("copy", stream, read, written);
  if (stream != other) {
    timeline.wait(other, timeline.record(stream));
  }
  if (!on_device(from) || !on_device(to)) {
    device_guard().synchronizeStream(stream);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  Twins twins;
  twins.to_cpu(to).copy_(twins.to_cpu(from));
  return to;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY(fake_accelerator, m) {
  m.def("races", [] { return Timeline::get().races(); });
  m.def("waits", [] { return Timeline::get().waits(); });
  m.def("ignore_waits", [](bool ignore) {
    Timeline::get().ignore_waits(ignore);
  });
  m.def("reset", [] { Timeline::get().reset(); });
}

} // namespace

} // namespace fake_accelerator
