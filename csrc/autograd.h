// What the autograd and autocast code of every op shares.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops.h"

namespace fastmod {

using at::Tensor;
using at::TensorList;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A kernel schema is defined twice: the plain overload for the native kernels, `.triton` for Triton.
inline void define_kernels(torch::Library& m, c10::ArrayRef<const char*> schemas) {
  for (const char* schema : schemas) {
    m.def(schema);
    std::string text(schema);
    m.def(text.insert(text.find('('), ".triton").c_str());
  }
}

// The kernels' own derivative (a double backward) is not there: say so instead of returning a constant.
inline void refuse_second_derivatives(torch::Library& m, c10::ArrayRef<const char*> schemas) {
  for (const char* schema : schemas) {
    const std::string name(schema, std::string(schema).find('('));
    m.impl(name.c_str(), torch::autograd::autogradNotImplementedFallback());
    m.impl((name + ".triton").c_str(), torch::autograd::autogradNotImplementedFallback());
  }
}

// A kernel schema's two overloads, looked up once.
template <typename Signature>
struct Kernel {
  explicit Kernel(const char* name) : native(find(name, "")), triton(find(name, "triton")) {}
  template <typename... Args>
  auto operator()(bool use_triton, Args&&... args) const {
    return (use_triton ? triton : native).call(std::forward<Args>(args)...);
  }

 private:
  static c10::TypedOperatorHandle<Signature> find(const char* name, const char* overload) {
    const std::string qualified = std::string("fastmod::") + name;
    return c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), overload).typed<Signature>();
  }
  c10::TypedOperatorHandle<Signature> native, triton;
};

// A backward that nobody differentiates goes straight to its kernel. With create_graph it passes the autograd key, where
// a fallback tells that there is no second derivative.
struct BelowAutogradOnce {
  BelowAutogradOnce() {
    if (!at::GradMode::is_enabled()) guard.emplace();
  }
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
};

inline bool any_requires_grad(std::initializer_list<TensorList> lists) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& list : lists)
    for (const auto& tensor : list)
      if (tensor.defined() && tensor.requires_grad()) return true;
  return false;
}

// Mixed devices must not reach the dispatcher, which would serve a meta tensor among CPU tensors with a shape only.
inline void check_devices(const Tensor& first, std::initializer_list<TensorList> lists) {
  for (const auto& list : lists)
    for (const auto& tensor : list)
      TORCH_CHECK(tensor.device() == first.device(), "expected all tensors on ", first.device(), ", got one on ",
                  tensor.device());
}

// save_for_backward keeps positions; an undefined tensor stands for an absent one.
inline Tensor value_or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }
inline OptionalTensor defined_or_none(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

// ---- autocast

template <c10::DeviceType device>
Tensor lower(const Tensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

template <c10::DeviceType device>
std::vector<Tensor> lower(TensorList tensors) {
  std::vector<Tensor> result;
  for (const auto& tensor : tensors) result.push_back(lower<device>(tensor));
  return result;
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> public_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

constexpr auto autocast_keys = c10::DispatchKeySet(
    {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

}  // namespace fastmod
