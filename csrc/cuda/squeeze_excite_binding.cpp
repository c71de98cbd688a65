// squeeze_excite on CUDA tensors: arguments brought into layout, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

constexpr size_t kLayers = 6;  // weight, norm's weight and norm's bias of both layers

// x [B, E, C, H, W], scale and shift [E, C]; layers: weight1 [E, R, C], norm's weight and bias [E, R], weight2 [E, C,
// R], norm's weight and bias [E, C], all in the dtype of the sums. Keeps them alive as long as the pointers to them.
struct Excite {
  SumShape shape;
  int squeezed;
  Tensor x, scale, shift;
  std::array<Tensor, kLayers> layers;

  Excite(const Tensor& x_, const Tensor& scale_, const Tensor& shift_, TensorList layers_) {
    check_float(x_, "x");
    TORCH_CHECK_VALUE(
        x_.dim() == 5 && x_.size(3) * x_.size(4) > 0 && layers_.size() == kLayers && layers_[0].dim() == 3,
        "expected x [B, E, C, H, W] and six tensors of layers, got ", x_.sizes());
    const int64_t experts = x_.size(1), channels = x_.size(2);
    const at::ScalarType wide = compute_type(x_);
    squeezed = small(layers_[0].size(1), "squeezed channels");
    const std::array<std::vector<int64_t>, kLayers> sizes{{{experts, squeezed, channels},
                                                           {experts, squeezed},
                                                           {experts, squeezed},
                                                           {experts, channels, squeezed},
                                                           {experts, channels},
                                                           {experts, channels}}};
    const auto check = [&](const Tensor& tensor, at::IntArrayRef expected, const char* name) {
      TORCH_CHECK_VALUE(tensor.sizes() == expected, name, ": expected ", expected, ", got ", tensor.sizes());
      TORCH_CHECK_TYPE(tensor.scalar_type() == wide, name, ": expected ", wide, ", got ", tensor.scalar_type());
      TORCH_CHECK(tensor.device() == x_.device(), name, ": expected device ", x_.device());
    };
    check(scale_, sizes[4], "scale");
    check(shift_, sizes[4], "shift");
    for (size_t i = 0; i < kLayers; ++i) {
      check(layers_[i], sizes[i], "layers");
      layers[i] = expert_rows(layers_[i]);
    }
    for (const size_t i : {1, 4}) {  // both parameters of a norm must have the same gap
      if (gap_of(layers[i]) == gap_of(layers[i + 1])) continue;
      layers[i] = layers[i].contiguous();
      layers[i + 1] = layers[i + 1].contiguous();
    }
    shape = {x_.size(0), small(experts, "experts"), small(channels, "channels"),
             small(x_.size(3) * x_.size(4), "pixels of x"), false};
    x = inner(x_);
    scale = scale_.contiguous();
    shift = shift_.contiguous();
  }
  template <typename T>
  PoolInput<T> input() const {
    return {data<T>(x), data<Compute<T>>(scale), data<Compute<T>>(shift), true};
  }
  template <typename C>
  ExciteLayers<C> as() const {
    return {data<C>(layers[0]), data<C>(layers[3]), gap_of(layers[0]), gap_of(layers[3]), squeezed};
  }
};

// means and vars of both layers, then scales and shifts; see ExciteKept for the rest
struct Kept {
  Tensor pooled, first, second, mean1, var1, scale1, shift1, mean2, var2, scale2, shift2;
  explicit Kept(TensorList from)
      : pooled(from[0]), first(from[1]), second(from[2]), mean1(from[3]), var1(from[4]), scale1(from[5]),
        shift1(from[6]), mean2(from[7]), var2(from[8]), scale2(from[9]), shift2(from[10]) {}
  template <typename C>
  ExciteKept<C> as() const {
    return {data<C>(pooled), data<C>(first), data<C>(second), data<C>(mean1),
            data<C>(var1),   data<C>(mean2), data<C>(var2)};
  }
};

// running: mean and var of both batch norms, which are updated. -> gate [B, E, C], then what the backward reads
Results<12> squeeze_excite_forward(const Tensor& x, const Tensor& scale, const Tensor& shift, TensorList layers,
                                   TensorList running, at::ArrayRef<double> momentum, at::ArrayRef<double> eps) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Excite own(x, scale, shift, layers);
  TORCH_CHECK_VALUE(running.size() == 4 && momentum.size() == 2 && eps.size() == 2,
                    "running, momentum, eps: expected 4, 2 and 2");
  const auto wide = x.options().dtype(compute_type(x));
  const int64_t batch = own.shape.batch, experts = own.shape.experts, channels = own.shape.channels;
  const Tensor gate = at::empty({batch, experts, channels}, x.options());
  std::vector<Tensor> found{at::empty({experts, batch, channels}, wide),
                            at::empty({experts, batch, own.squeezed}, wide),
                            at::empty({experts, batch, channels}, wide)};
  for (const int64_t columns : {static_cast<int64_t>(own.squeezed), channels}) {
    for (int i = 0; i < 4; ++i) {
      found.push_back(batch > 0 ? at::empty({experts, columns}, wide) : at::zeros({experts, columns}, wide));
    }
  }
  const Kept kept(found);
  std::vector<Tensor> moved;
  for (size_t i = 0; i < 4; ++i) {
    TORCH_CHECK_VALUE(running[i].sizes() == own.layers[i < 2 ? 1 : 4].sizes() && running[i].device() == x.device(),
                      "running: expected the shape of the norm's weight, got ", running[i].sizes());
    moved.push_back(running[i].to(wide.dtype()).contiguous());
  }
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const auto norm = [&](size_t i, const Tensor& to_scale, const Tensor& to_shift, int columns) {
      const Tensor &weight = own.layers[3 * i + 1], &bias = own.layers[3 * i + 2];
      const C bessel = static_cast<C>(static_cast<double>(batch) / (batch - 1.0));
      return BatchNorm<C>{data<C>(weight),        data<C>(bias),
                          data<C>(moved[2 * i]),  data<C>(moved[2 * i + 1]),
                          data<C>(to_scale),      data<C>(to_shift),
                          bessel,                 static_cast<C>(momentum[i]),
                          static_cast<C>(eps[i]), nullptr,
                          columns,                gap_of(weight)};
    };
    const Workspace space(x, {0, experts});
    C10_CUDA_CHECK(cuda::squeeze_excite_forward<T>(
        own.input<T>(), own.as<C>(), norm(0, kept.scale1, kept.shift1, own.squeezed),
        norm(1, kept.scale2, kept.shift2, own.shape.channels), kept.as<C>(), data<T>(gate),
        data<unsigned>(space.tickets), own.shape, stream()));
  });
  for (size_t i = 0; batch > 0 && i < 4; ++i) {
    if (!moved[i].is_same(running[i])) running[i].copy_(moved[i]);
  }
  found.insert(found.begin(), gate);
  return spread_out(found, std::make_index_sequence<12>());
}

// kept: what the forward returned after the gate. -> gradients of x, scale, shift and the layers
std::vector<Tensor> squeeze_excite_backward(const Tensor& grad_, const Tensor& x, const Tensor& scale,
                                            const Tensor& shift, TensorList layers, TensorList kept_,
                                            at::ArrayRef<double> eps) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Excite own(x, scale, shift, layers);
  check_like(x, grad_, "grad");
  TORCH_CHECK_VALUE(grad_.dim() == 3 && grad_.sizes() == x.sizes().slice(0, 3) && kept_.size() == 11 && eps.size() == 2,
                    "grad: expected [B, E, C] beside eleven tensors of the forward, got ", grad_.sizes());
  std::vector<Tensor> dense_kept;
  for (const Tensor& each : kept_) dense_kept.push_back(each.contiguous());
  const Kept kept(dense_kept);
  const Tensor grad = grad_.contiguous();
  const Tensor grad_x = empty_images(x.sizes(), x.options());
  std::vector<Tensor> result{grad_x, blank_like(own.scale), blank_like(own.shift)};
  for (const Tensor& each : own.layers) result.push_back(at::empty(each.sizes(), each.options()));
  if (own.shape.batch == 0) {
    for (size_t i = 1; i < result.size(); ++i) result[i].zero_();
    return result;
  }
  const Tensor grad_pooled = at::empty(grad.sizes(), own.scale.options());
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const auto norm = [&](const Tensor& from_scale, const Tensor& from_shift, double epsilon) {
      BatchNorm<C> found;
      found.scale = data<C>(from_scale);
      found.shift = data<C>(from_shift);
      found.eps = static_cast<C>(epsilon);
      return found;
    };
    const Tensor scratch =
        at::empty({squeeze_excite_backward_scratch<T>(own.shape, own.squeezed)}, own.scale.options());
    const ExciteGrads<C> grads{data<C>(result[3]), data<C>(result[4]), data<C>(result[5]),
                               data<C>(result[6]), data<C>(result[7]), data<C>(result[8])};
    C10_CUDA_CHECK(cuda::squeeze_excite_backward<T>(
        data<T>(grad), own.as<C>(), norm(kept.scale1, kept.shift1, eps[0]), norm(kept.scale2, kept.shift2, eps[1]),
        kept.as<C>(), grads, data<C>(grad_pooled), data<C>(scratch), own.shape, stream()));
    const Workspace space(x, norm_pool_backward_scratch<T>(own.shape));
    const PoolGrads<T> of_pool{data<T>(grad_x), data<C>(result[1]), data<C>(result[2])};
    C10_CUDA_CHECK(cuda::norm_pool_backward_wide<T>(data<C>(grad_pooled), own.input<T>(), of_pool,
                                                    data<C>(space.numbers), data<unsigned>(space.tickets), own.shape,
                                                    stream()));
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("squeeze_excite_forward", squeeze_excite_forward);
  m.impl("squeeze_excite_backward", squeeze_excite_backward);
}

}  // namespace fastmod::cuda::bindings
