// Shared by the bindings of all ops: dtypes, pointers, arguments that several ops have in common.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../constants.h"
#include "launch.h"

namespace fastmod::cuda::bindings {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

inline at::ScalarType compute_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
inline Tensor blank_like(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }
inline cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

// Null for an undefined tensor.
template <typename T>
T* data(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

// Calls run(T*) with a null pointer of the element type.
template <typename Run>
void dispatch(at::ScalarType type, Run&& run) {
  switch (type) {
    case at::kFloat: return run(static_cast<float*>(nullptr));
    case at::kDouble: return run(static_cast<double*>(nullptr));
    case at::kHalf: return run(static_cast<__half*>(nullptr));
    case at::kBFloat16: return run(static_cast<__nv_bfloat16*>(nullptr));
    default: TORCH_CHECK_TYPE(false, "expected float32, float64, bfloat16 or float16, got ", type);
  }
}
template <typename Run>
void dispatch_wide(at::ScalarType type, Run&& run) {
  type == at::kDouble ? run(static_cast<double*>(nullptr)) : run(static_cast<float*>(nullptr));
}
// Calls run(W*) with the element type of the parameters: T or, under autocast, fp32.
template <typename T, typename Run>
void dispatch_params(at::ScalarType type, Run&& run) {
  if constexpr (sizeof(T) == 2) {
    if (type == at::kFloat) return run(static_cast<float*>(nullptr));
  }
  run(static_cast<T*>(nullptr));
}
template <typename T>
Blocks<T> blocks_of(const Tensor& tensor) {
  return {tensor.data_ptr(), sizeof(T) == 2 && tensor.scalar_type() == at::kFloat};
}
template <typename T>
Mixed<T> mixed(const Tensor& tensor) {
  if (sizeof(T) == 2 && tensor.scalar_type() == at::kFloat) return {nullptr, data<float>(tensor)};
  return {data<std::remove_const_t<T>>(tensor)};
}
template <typename Pointer>
using Element = std::remove_pointer_t<Pointer>;

// Kernels read the seed from device memory, so that nothing waits for the GPU and a CUDA graph reads it at every
// replay.
inline const int64_t* seed_on_device(const Tensor& like, const Tensor& seed) {
  TORCH_CHECK(seed.device() == like.device(), "seed: expected device ", like.device(), ", got ", seed.device());
  return data<int64_t>(seed);
}

inline NumberType number_type(const Tensor& tensor) {
  if (!tensor.defined()) return kWideNumber;
  return tensor.scalar_type() == at::kHalf       ? kHalfNumber
         : tensor.scalar_type() == at::kBFloat16 ? kBFloat16Number
                                                 : kWideNumber;
}

// tau and seed in the form that the kernels take: by pointer if they are tensors.
struct RoutingArguments {
  int mode;
  double tau_value;
  Tensor tau;
  const int64_t* seed = nullptr;
  int64_t tau_step = 0, seed_step = 0;  // from copy to copy

  RoutingArguments(const Tensor& like, const OptionalTensor& tau_, double tau_value_, const OptionalTensor& seed_,
                   int64_t mode_, int64_t copies = 0)
      : mode(static_cast<int>(mode_)), tau_value(tau_value_) {
    check_routing(tau_, tau_value_, seed_, mode_, copies);
    if (tau_) {
      TORCH_CHECK(tau_->device() == like.device(), "tau: expected device ", like.device(), ", got ", tau_->device());
      tau = tau_->to(tau_type(tau_, like));
      if (tau.dim()) tau_step = tau.stride(0);
    }
    if (mode != kGumbel) return;
    seed = seed_on_device(like, *seed_);
    if (seed_->dim()) seed_step = seed_->stride(0);
  }
  template <typename C>
  Routing<C> as() const {
    return {mode, data<C>(tau), static_cast<C>(tau_value), seed, 0, tau_step, seed_step, number_type(tau)};
  }
};

inline MaskNoise mask_noise(const Tensor& like, int64_t first, int64_t samples, const Tensor& seed, int64_t stream) {
  return {first, samples, static_cast<uint32_t>(stream), seed_on_device(like, seed), 0};
}

// Contiguous; undefined if there is none.
inline Tensor dense(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? tensor->contiguous() : Tensor();
}

// Gradients that are not needed stay undefined until the op returns them as empty tensors.
inline std::vector<Tensor> all_defined(std::vector<Tensor> grads, const at::TensorOptions& options) {
  for (Tensor& grad : grads)
    if (!grad.defined()) grad = at::empty({0}, options);
  return grads;
}
inline void zero_those_defined(const std::vector<Tensor>& grads) {
  for (const Tensor& grad : grads)
    if (grad.defined()) grad.zero_();
}

// ---- stacks of MFNNRs: smfr_binding.cpp handles those that fit into three launches, mfnnr_binding.cpp all others
//
// Parameters, x, temperatures and seeds may have a dimension of copies in front (MfnnrSizes); then results have it too.

struct StackedLayer {
  TensorList route, update;
  OptionalTensor tau;
  double tau_value;
  OptionalTensor seed;
};
// low: T, if x or the parameters are fp32 and are treated as rounded to T.
//
// One of each per layer. saved: as in mfnnr_forward.
struct StackOutput {
  Tensor penalty;
  std::vector<Tensor> outs, logits, gates, saved;
};
// taus: empty unless temperatures are tensors.
struct StackGrads {
  Tensor x;
  std::vector<Tensor> taus, params;
};

// Decided by sizes alone, which must have been checked, and by the shared memory of the GPU.
bool stack_fits(const Tensor& x, const std::vector<StackedLayer>& layers);
StackOutput stack_forward(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                          double threshold, bool save, const LowType& low);
// inputs: of all layers but the first; saved: of all layers.
StackGrads stack_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                          const std::vector<StackedLayer>& layers, int64_t mode, bool context, double threshold,
                          const std::vector<Tensor>& inputs, const std::vector<Tensor>& saved, bool need_x,
                          bool need_params, const LowType& low);
// The same, but layer by layer if the stack does not fit.
StackOutput stack_or_layer_forward(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, bool save, const LowType& low);
StackGrads stack_or_layer_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, const std::vector<Tensor>& inputs,
                                   const std::vector<Tensor>& saved, bool need_x, bool need_params,
                                   const LowType& low);

}  // namespace fastmod::cuda::bindings
