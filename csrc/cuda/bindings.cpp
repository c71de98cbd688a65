// The ops on CUDA tensors: arguments made contiguous, outputs allocated, kernels of launch.h launched and checked.
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
#include "../philox.h"
#include "launch.h"

namespace fastmod::cuda::bindings {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

at::ScalarType compute_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
Tensor widened(const Tensor& tensor) { return tensor.to(compute_type(tensor)).contiguous(); }
Tensor blank_like(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }
cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

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
template <typename Pointer>
using Element = std::remove_pointer_t<Pointer>;

// tau and seed as the kernels want them: by pointer where they live on the device, so that nothing waits for the GPU.
struct RoutingArguments {
  int mode;
  double tau_value;
  Tensor tau, device_seed;
  int64_t host_seed = 0;

  RoutingArguments(const Tensor& like, const OptionalTensor& tau_, double tau_value_, const OptionalTensor& seed,
                   int64_t mode_)
      : mode(static_cast<int>(mode_)), tau_value(tau_value_) {
    check_routing(tau_, tau_value_, seed, mode_);
    if (tau_) {
      TORCH_CHECK(tau_->device() == like.device(), "tau: expected device ", like.device(), ", got ", tau_->device());
      tau = tau_->to(compute_type(like));
    }
    if (mode != kGumbel) return;
    if (seed->is_cpu()) {
      host_seed = seed->item<int64_t>();
    } else {
      TORCH_CHECK(seed->device() == like.device(), "seed: expected device ", like.device(), ", got ", seed->device());
      device_seed = *seed;
    }
  }
  template <typename C>
  Routing<C> as() const {
    return {mode, data<C>(tau), static_cast<C>(tau_value), data<int64_t>(device_seed), host_seed};
  }
};

// ---- multiplex

Shape multiplex_shape(const Tensor& blocks, const Tensor& logits) {
  return {leading_size(blocks, 2), blocks.size(-2), logits.size(-1), blocks.size(-1)};
}

Tensor multiplex_forward(const Tensor& blocks_, const Tensor& logits_, const OptionalTensor& tau, double tau_value,
                         const OptionalTensor& seed, int64_t mode) {
  check_multiplex(blocks_, logits_);
  const c10::cuda::OptionalCUDAGuard guard(blocks_.device());
  const RoutingArguments routing(blocks_, tau, tau_value, seed, mode);
  const Tensor blocks = blocks_.contiguous(), logits = logits_.contiguous();
  std::vector<int64_t> sizes = blocks.sizes().vec();
  sizes[sizes.size() - 2] = logits.size(-1);
  const Tensor out = at::empty(sizes, blocks.options());
  dispatch(blocks.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::multiplex_forward<T>(data<T>(blocks), data<T>(logits), data<T>(out),
                                              routing.as<Compute<T>>(), multiplex_shape(blocks, logits), stream()));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> multiplex_backward(const Tensor& grad_, const Tensor& blocks_,
                                                      const Tensor& logits_, const OptionalTensor& tau,
                                                      double tau_value, const OptionalTensor& seed, int64_t mode) {
  check_multiplex(blocks_, logits_);
  check_like(blocks_, grad_, "grad");
  const c10::cuda::OptionalCUDAGuard guard(blocks_.device());
  const RoutingArguments routing(blocks_, tau, tau_value, seed, mode);
  const Tensor blocks = blocks_.contiguous(), logits = logits_.contiguous(), grad = grad_.contiguous();
  const Shape shape = multiplex_shape(blocks, logits);
  const auto wide = blocks.options().dtype(compute_type(blocks));
  const Tensor grad_blocks = blank_like(blocks), grad_logits = blank_like(logits);
  const Tensor weights = at::empty(logits.sizes(), wide);
  const Tensor partials = tau ? at::empty({multiplex_tau_partials(shape)}, wide) : Tensor();
  dispatch(blocks.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    C10_CUDA_CHECK(cuda::multiplex_backward_logits<T>(data<T>(grad), data<T>(blocks), data<T>(logits),
                                                      data<T>(grad_logits), data<C>(weights), data<C>(partials),
                                                      routing.as<C>(), nullptr, C(0), shape, stream()));
    C10_CUDA_CHECK(cuda::multiplex_backward_blocks<T>(data<T>(grad), data<C>(weights), nullptr, data<T>(grad_blocks),
                                                      shape, stream()));
  });
  return {grad_blocks, grad_logits, tau ? partials.sum() : at::zeros({}, wide)};
}

// ---- gated_residual

GateShape gate_shape(const Tensor& x) {
  const int64_t n = x.size(-2), d = x.size(-1);
  return {leading_size(x, 2), n, d, n * d, n};
}

Tensor gated_residual_forward(const Tensor& x_, const Tensor& fresh_, const Tensor& gate_) {
  check_gated_residual(x_, fresh_, gate_);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const Tensor x = x_.contiguous(), fresh = fresh_.contiguous(), gate = gate_.contiguous(), out = blank_like(x);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::gated_residual_forward<T>(data<T>(x), data<T>(fresh), data<T>(gate), data<T>(out),
                                                   gate_shape(x), stream()));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_residual_backward(const Tensor& grad_, const Tensor& x_,
                                                           const Tensor& fresh_, const Tensor& gate_) {
  check_gated_residual(x_, fresh_, gate_);
  check_like(x_, grad_, "grad");
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const Tensor grad = grad_.contiguous(), x = x_.contiguous(), fresh = fresh_.contiguous(), gate = gate_.contiguous();
  const Tensor grad_x = blank_like(x), grad_fresh = blank_like(fresh), grad_gate = blank_like(gate);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::gated_residual_backward<T>(data<T>(grad), data<T>(x), data<T>(fresh), data<T>(gate),
                                                    data<T>(grad_x), data<T>(grad_fresh), data<T>(grad_gate), nullptr,
                                                    Compute<T>(0), gate_shape(x), stream()));
  });
  return {grad_x, grad_fresh, grad_gate};
}

// ---- range_penalty

Tensor range_penalty_forward(TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  const c10::cuda::OptionalCUDAGuard guard(logits[0].device());
  const auto wide = logits[0].options().dtype(compute_type(logits[0]));
  int64_t count = 0;
  for (const Tensor& value : logits) count += range_penalty_partials(value.numel());
  const Tensor partials = at::empty({count}, wide), total = at::empty({}, wide);
  dispatch(logits[0].scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    C* next = data<C>(partials);
    for (const Tensor& value_ : logits) {
      const Tensor value = value_.contiguous();
      C10_CUDA_CHECK(cuda::range_penalty_forward<T>(data<T>(value), value.numel(), static_cast<C>(threshold), next,
                                                    stream()));
      next += range_penalty_partials(value.numel());
    }
    C10_CUDA_CHECK(range_penalty_finish<C>(data<C>(partials), count, data<C>(total), stream()));
  });
  return total;
}

std::vector<Tensor> range_penalty_backward(const Tensor& grad_, TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  const c10::cuda::OptionalCUDAGuard guard(logits[0].device());
  const Tensor grad = grad_.to(logits[0].options().dtype(compute_type(logits[0])));
  std::vector<Tensor> grads;
  dispatch(logits[0].scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    for (const Tensor& value_ : logits) {
      const Tensor value = value_.contiguous();
      grads.push_back(blank_like(value));
      C10_CUDA_CHECK(cuda::range_penalty_backward<T>(data<C>(grad), data<T>(value), value.numel(),
                                                     static_cast<C>(threshold), data<T>(grads.back()), stream()));
    }
  });
  return grads;
}

// ---- sample_mask

// Shares the seed's rule with RoutingArguments: by pointer where it lives on the device.
MaskNoise mask_noise(const Tensor& like, int64_t first, int64_t samples, const Tensor& seed, int64_t stream) {
  MaskNoise noise{first, samples, static_cast<uint32_t>(stream), nullptr, 0};
  if (seed.is_cpu()) {
    noise.seed_value = seed.item<int64_t>();
  } else {
    TORCH_CHECK(seed.device() == like.device(), "seed: expected device ", like.device(), ", got ", seed.device());
    noise.seed = data<int64_t>(seed);
  }
  return noise;
}

// Undefined for none.
Tensor dense(const OptionalTensor& tensor) { return tensor && tensor->defined() ? tensor->contiguous() : Tensor(); }

Tensor sample_mask_forward(const Tensor& logits_, const OptionalTensor& weight_, int64_t first, int64_t samples,
                           const Tensor& seed, int64_t noise_stream) {
  check_sample_mask(logits_, weight_, seed, first, samples, noise_stream);
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor logits = logits_.contiguous(), weight = dense(weight_);
  const MaskNoise noise = mask_noise(logits, first, samples, seed, noise_stream);
  std::vector<int64_t> sizes = logits.sizes().vec();
  sizes.insert(sizes.begin(), samples);
  const Tensor out = at::empty(sizes, logits.options());
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::sample_mask_forward<T>(data<T>(logits), data<T>(weight), data<T>(out), logits.numel(), noise,
                                                stream()));
  });
  return out;
}

Tensor sample_mask_backward(const Tensor& grad_, const Tensor& logits_, const OptionalTensor& weight_, int64_t first,
                            int64_t samples, const Tensor& seed, int64_t noise_stream, double tau,
                            const OptionalTensor& base_) {
  check_sample_mask(logits_, weight_, seed, first, samples, noise_stream);
  check_like(logits_, grad_, "grad");
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  TORCH_CHECK_VALUE(grad_.dim() == logits_.dim() + 1 && grad_.size(0) == samples &&
                        grad_.sizes().slice(1) == logits_.sizes(),
                    "grad: expected [", samples, "] and the shape of logits, ", logits_.sizes(), ", got ",
                    grad_.sizes());
  if (base_) check_like(logits_, *base_, "base");
  TORCH_CHECK_VALUE(!base_ || base_->sizes() == logits_.sizes(), "base: expected the shape of logits, ",
                    logits_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor grad = grad_.contiguous(), logits = logits_.contiguous(), weight = dense(weight_), base = dense(base_);
  const MaskNoise noise = mask_noise(logits, first, samples, seed, noise_stream);
  const Tensor grad_logits = blank_like(logits);
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::sample_mask_backward<T>(data<T>(grad), data<T>(logits), data<T>(weight), data<T>(base),
                                                 data<T>(grad_logits), static_cast<Compute<T>>(tau), logits.numel(),
                                                 noise, stream()));
  });
  return grad_logits;
}

// ---- masked_linear

LinearShape linear_shape(const Tensor& x, const Tensor& weight, int64_t samples) {
  const LinearShape shape{leading_size(x, 1) / samples, weight.size(0), weight.size(1)};
  TORCH_CHECK_VALUE(shape.rows <= kMaskedRows, "x: expected at most ", kMaskedRows, " rows a sample, got ", shape.rows);
  return shape;
}

template <typename T>
Tensor thresholds(const Tensor& logits) {
  const Tensor off = at::empty(logits.sizes(), logits.options().dtype(at::kInt));
  C10_CUDA_CHECK(mask_thresholds<T>(data<T>(logits), data<int32_t>(off), logits.numel(), stream()));
  return off;
}

Tensor masked_linear_forward(const Tensor& x_, const Tensor& weight_, const Tensor& logits_,
                              const OptionalTensor& biases_, const Tensor& seed, int64_t samples, int64_t first) {
  check_masked_linear(x_, weight_, logits_, biases_, seed, samples, first);
  TORCH_CHECK_VALUE(first == 0, "first: expected 0 on a GPU, got ", first);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const LinearShape shape = linear_shape(x_, weight_, samples);
  const MaskNoise noise = mask_noise(x_, 0, samples, seed, kStreamMask);
  const Tensor x = x_.contiguous(), weight = weight_.contiguous(), logits = logits_.contiguous();
  const Tensor biases = dense(biases_);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = shape.out;
  const Tensor out = at::empty(sizes, x.options());
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::masked_linear_forward<T>(data<T>(x), data<T>(weight), data<int32_t>(thresholds<T>(logits)),
                                            data<T>(biases), data<T>(out), shape, noise, stream()));
  });
  return out;
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight_,
                                            const Tensor& logits_, const Tensor& seed, int64_t samples, double tau,
                                            std::array<bool, 3> needs, int64_t first) {
  check_masked_linear_grad(grad_, x_, weight_, logits_, seed, samples, first, tau);
  TORCH_CHECK_VALUE(first == 0, "first: expected 0 on a GPU, got ", first);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const LinearShape shape = linear_shape(x_, weight_, samples);
  const MaskNoise noise = mask_noise(x_, 0, samples, seed, kStreamMask);
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  const Tensor weight = weight_.contiguous(), logits = logits_.contiguous();
  const auto wanted = [](bool needed, const Tensor& like) { return needed ? blank_like(like) : Tensor(); };
  const auto [need_x, need_weight, need_logits] = needs;
  const Tensor grad_x = wanted(need_x, x), grad_weight = wanted(need_weight, weight);
  const Tensor grad_logits = wanted(need_logits, logits);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    const Tensor off = grad_x.defined() || grad_weight.defined() ? thresholds<T>(logits) : Tensor();
    if (grad_x.defined())
      C10_CUDA_CHECK(masked_linear_backward_x<T>(data<T>(grad), data<T>(weight), data<int32_t>(off), data<T>(grad_x),
                                                 shape, noise, stream()));
    if (grad_weight.defined() || grad_logits.defined())
      C10_CUDA_CHECK(masked_linear_backward_weight<T>(data<T>(grad), data<T>(x), data<T>(weight), data<T>(logits),
                                                      data<int32_t>(off), data<T>(grad_weight), data<T>(grad_logits),
                                                      static_cast<Compute<T>>(tau), shape, noise, stream()));
  });
  std::vector<Tensor> result{grad_x, grad_weight, grad_logits};
  for (Tensor& tensor : result)
    if (!tensor.defined()) tensor = at::empty({0}, x.options());
  return result;
}

// ---- mfnnr: everything below is in the compute dtype

constexpr double kNoPenalty = -1;
constexpr int64_t kBatchTile = 64;  // `saved` is padded to it, as on the CPU

std::vector<Tensor> widened(TensorList tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(widened(tensor));
  return result;
}

// The sections of `saved`, each [batch, width]: route layers (the last are the logits), routed, update layers.
struct Sections {
  std::vector<Tensor> route, update;
  Tensor routed;

  Sections(const Tensor& saved, const std::vector<Tensor>& route_params, const std::vector<Tensor>& update_params,
           const MfnnrSizes& sizes) {
    int64_t offset = 0;
    const auto take = [&](int64_t width) {
      const Tensor section = saved.narrow(0, offset, sizes.batch * width).view({sizes.batch, width});
      offset += sizes.batch * width;
      return section;
    };
    for (size_t i = 1; i < route_params.size(); i += 2) route.push_back(take(route_params[i].size(0)));
    routed = take(sizes.routed());
    for (size_t i = 1; i < update_params.size(); i += 2) update.push_back(take(update_params[i].size(0)));
  }
};

bool fits_fused(const std::vector<Tensor>& params) {
  if (params.size() / 2 > kMaxLinear) return false;
  for (size_t i = 1; i + 2 < params.size(); i += 2) {
    if (params[i].size(0) > kMaxHidden) return false;
  }
  return true;
}

template <typename C>
Fnn<C> fnn_of(const std::vector<Tensor>& params, const std::vector<Tensor>& kept, bool save) {
  Fnn<C> fnn{};
  fnn.linears = static_cast<int>(kept.size());
  for (int i = 0; i < fnn.linears; ++i) {
    fnn.weight[i] = data<C>(params[2 * i]);
    fnn.bias[i] = data<C>(params[2 * i + 1]);
    fnn.width[i] = params[2 * i + 1].size(0);
    fnn.kept[i] = save || i + 1 == fnn.linears ? data<C>(kept[i]) : nullptr;
  }
  return fnn;
}

// Layers too wide for the fused kernels: cuBLAS, straight into the sections.
void wide_fnn(const Tensor& input, const std::vector<Tensor>& params, std::vector<Tensor>& kept) {
  Tensor below = input;
  for (size_t i = 0; i < kept.size(); ++i) {
    at::addmm_out(kept[i], params[2 * i + 1], below, params[2 * i].t());
    if (i + 1 < kept.size()) at::leaky_relu_(kept[i], kLeakySlope);
    below = kept[i];
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mfnnr_forward(const Tensor& x_, TensorList route_,
                                                                 TensorList update_, const OptionalTensor& tau,
                                                                 double tau_value, const OptionalTensor& seed,
                                                                 int64_t mode, bool context, double threshold,
                                                                 bool save) {
  const MfnnrSizes s = check_mfnnr(x_, route_, update_, context);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const RoutingArguments routing(x_, tau, tau_value, seed, mode);
  const auto wide = x_.options().dtype(compute_type(x_));
  const auto type = x_.scalar_type();
  const Shape shape{s.batch, s.in_blocks, s.out_blocks, s.block};
  auto out_sizes = x_.sizes().slice(0, x_.dim() - 2).vec(), logit_sizes = out_sizes, gate_sizes = out_sizes;
  out_sizes.insert(out_sizes.end(), {s.out_blocks, s.block});
  logit_sizes.insert(logit_sizes.end(), {s.in_blocks, s.out_blocks});
  gate_sizes.push_back(s.out_blocks);

  // Without `save` the same sections serve as scratch, and the hidden ones among them stay untouched.
  const int64_t padded = (s.batch + kBatchTile - 1) / kBatchTile * kBatchTile;
  const Tensor saved = at::empty({s.rows * padded}, wide);
  const Tensor out = at::empty(out_sizes, wide), logits = at::empty(logit_sizes, wide);
  const Tensor gate = at::empty(gate_sizes, wide);
  const auto result = [&](const Tensor& penalty) {
    return std::make_tuple(out.to(type), penalty, logits.to(type), gate.to(type),
                           save ? saved : at::empty({0}, wide));
  };
  if (s.batch == 0) return result(at::zeros({}, wide));

  const Tensor x = widened(x_).view({s.batch, s.route_in()});
  const std::vector<Tensor> route = widened(route_), update = widened(update_);
  Sections kept(saved, route, update, s);
  Tensor penalty = at::empty({}, wide);
  if (fits_fused(route) && fits_fused(update)) {
    const Tensor partials = at::empty({2 * mfnnr_tiles(s.batch)}, wide);
    const Tensor ticket = at::empty({1}, wide.dtype(at::kInt));
    dispatch_wide(wide.dtype().toScalarType(), [&](auto* pointer) {
      using C = Element<decltype(pointer)>;
      C10_CUDA_CHECK(mfnnr_route<C>(data<C>(x), fnn_of<C>(route, kept.route, save), routing.as<C>(),
                                    static_cast<C>(threshold), data<C>(logits), data<C>(kept.routed),
                                    data<C>(partials), data<unsigned>(ticket), shape, stream()));
      C10_CUDA_CHECK(mfnnr_update<C>(context ? data<C>(x) : nullptr, data<C>(kept.routed),
                                     fnn_of<C>(update, kept.update, save), static_cast<C>(threshold), data<C>(out),
                                     data<C>(gate), data<C>(partials), data<unsigned>(ticket), data<C>(penalty), shape,
                                     stream()));
    });
    return result(penalty);
  }

  wide_fnn(x, route, kept.route);
  logits.view_as(kept.route.back()).copy_(kept.route.back());
  dispatch_wide(wide.dtype().toScalarType(), [&](auto* pointer) {
    using C = Element<decltype(pointer)>;
    C10_CUDA_CHECK(cuda::multiplex_forward<C>(data<C>(x), data<C>(logits), data<C>(kept.routed), routing.as<C>(),
                                              shape, stream()));
    wide_fnn(context ? at::cat({kept.routed, x}, 1) : kept.routed, update, kept.update);
    const Tensor& u = kept.update.back();  // [batch, n*d + n]
    gate.view({s.batch, s.out_blocks}).copy_(u.narrow(1, s.routed(), s.out_blocks));
    C10_CUDA_CHECK(cuda::gated_residual_forward<C>(data<C>(kept.routed), data<C>(u), data<C>(gate), data<C>(out),
                                                   {s.batch, s.out_blocks, s.block, u.size(1), s.out_blocks},
                                                   stream()));
  });
  return result(threshold == kNoPenalty ? penalty.zero_() : range_penalty_forward({logits, gate}, threshold));
}

// Backward through an FNN from the gradient of its output. Returns the gradient before the first layer's bias, that is
// of W0 @ input; appends the gradients of the parameters to `grads`, if wanted, in their order.
Tensor fnn_backward(Tensor grad, const Tensor& input, const std::vector<Tensor>& params,
                    const std::vector<Tensor>& kept, bool need_params, std::vector<Tensor>& grads) {
  std::vector<Tensor> own(need_params ? params.size() : 0);
  for (size_t i = kept.size(); i-- > 0;) {
    const Tensor& below = i ? kept[i - 1] : input;
    if (need_params) {
      own[2 * i] = at::mm(grad.t(), below);
      own[2 * i + 1] = grad.sum(0);
    }
    if (i == 0) break;
    grad = at::mm(grad, params[2 * i]);
    dispatch_wide(grad.scalar_type(), [&](auto* pointer) {
      using C = Element<decltype(pointer)>;
      C10_CUDA_CHECK(leaky_backward<C>(data<C>(grad), data<C>(below), grad.numel(), stream()));
    });
  }
  grads.insert(grads.end(), own.begin(), own.end());
  return grad;
}

std::vector<Tensor> mfnnr_backward(const OptionalTensor& grad_out_, const OptionalTensor& grad_penalty_,
                                   const Tensor& x_, TensorList route_, TensorList update_, const OptionalTensor& tau,
                                   double tau_value, const OptionalTensor& seed, int64_t mode, bool context,
                                   double threshold, const Tensor& saved, bool need_x, bool need_params) {
  const MfnnrSizes s = check_mfnnr(x_, route_, update_, context);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const RoutingArguments routing(x_, tau, tau_value, seed, mode);
  const auto wide = x_.options().dtype(compute_type(x_));
  TORCH_CHECK_VALUE(saved.scalar_type() == wide.dtype().toScalarType() && saved.numel() >= s.rows * s.batch,
                    "saved: expected what mfnnr_forward returned with save = True, got ", saved.sizes());
  if (s.batch == 0) {
    std::vector<Tensor> grads{need_x ? at::zeros(x_.sizes(), x_.options()) : at::empty({0}, x_.options()),
                              at::zeros({}, wide)};
    for (TensorList list : {route_, update_}) {
      for (const Tensor& p : list) {
        if (need_params) grads.push_back(at::zeros(p.sizes(), p.options()));
      }
    }
    return grads;
  }
  const Shape shape{s.batch, s.in_blocks, s.out_blocks, s.block};
  const Tensor x = widened(x_).view({s.batch, s.route_in()});
  const std::vector<Tensor> route = widened(route_), update = widened(update_);
  const Sections kept(saved, route, update, s);
  const Tensor grad_out = grad_out_ && grad_out_->defined() ? widened(*grad_out_) : Tensor();
  const bool penalised = grad_penalty_ && grad_penalty_->defined() && threshold != kNoPenalty;
  const Tensor grad_penalty = penalised ? grad_penalty_->to(wide) : Tensor();

  const Tensor& u = kept.update.back();  // [batch, n*d + n]: new values, gates
  const int64_t values = s.routed(), stride = u.size(1);
  const Tensor grad_u = at::empty(u.sizes(), wide);
  Tensor grad_routed = at::empty({s.batch, values}, wide);
  const Tensor grad_logits = at::empty(kept.route.back().sizes(), wide);
  const Tensor weights = need_x ? at::empty(grad_logits.sizes(), wide) : Tensor();
  const Tensor partials = tau ? at::empty({multiplex_tau_partials(shape)}, wide) : Tensor();
  Tensor grad_x;
  std::vector<Tensor> grad_route, grad_update;
  dispatch_wide(wide.dtype().toScalarType(), [&](auto* pointer) {
    using C = Element<decltype(pointer)>;
    C10_CUDA_CHECK(cuda::gated_residual_backward<C>(data<C>(grad_out), data<C>(kept.routed), data<C>(u),
                                                    data<C>(u) + values, data<C>(grad_routed), data<C>(grad_u),
                                                    data<C>(grad_u) + values, data<C>(grad_penalty),
                                                    static_cast<C>(threshold),
                                                    {s.batch, s.out_blocks, s.block, stride, stride}, stream()));
    const Tensor input = context && need_params ? at::cat({kept.routed, x}, 1) : kept.routed;
    Tensor below = fnn_backward(grad_u, input, update, kept.update, need_params, grad_update);
    grad_routed = at::addmm(grad_routed, below, update[0].narrow(1, 0, values));
    if (need_x && context) grad_x = at::mm(below, update[0].narrow(1, values, s.route_in()));

    C10_CUDA_CHECK(cuda::multiplex_backward_logits<C>(
        data<C>(grad_routed), data<C>(x), data<C>(kept.route.back()), data<C>(grad_logits), data<C>(weights),
        data<C>(partials), routing.as<C>(), data<C>(grad_penalty), static_cast<C>(threshold), shape, stream()));
    if (need_x) {
      const Tensor total = at::empty({s.batch, s.route_in()}, wide);
      C10_CUDA_CHECK(cuda::multiplex_backward_blocks<C>(data<C>(grad_routed), data<C>(weights), data<C>(grad_x),
                                                        data<C>(total), shape, stream()));
      grad_x = total;
    }
    if (!need_x && !need_params) return;  // only tau was wanted
    below = fnn_backward(grad_logits, x, route, kept.route, need_params, grad_route);
    if (need_x) grad_x = at::addmm(grad_x, below, route[0]);
  });

  const auto type = x_.scalar_type();
  std::vector<Tensor> grads{need_x ? grad_x.view(x_.sizes()).to(type) : at::empty({0}, x_.options()),
                            tau ? partials.sum() : at::zeros({}, wide)};
  for (const auto* list : {&grad_route, &grad_update}) {
    for (const Tensor& grad : *list) grads.push_back(grad.to(type));
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("multiplex_forward", multiplex_forward);
  m.impl("multiplex_backward", multiplex_backward);
  m.impl("gated_residual_forward", gated_residual_forward);
  m.impl("gated_residual_backward", gated_residual_backward);
  m.impl("range_penalty_forward", range_penalty_forward);
  m.impl("range_penalty_backward", range_penalty_backward);
  m.impl("mfnnr_forward", mfnnr_forward);
  m.impl("mfnnr_backward", mfnnr_backward);
  m.impl("sample_mask_forward", sample_mask_forward);
  m.impl("sample_mask_backward", sample_mask_backward);
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cuda::bindings
