// mfnnr on CUDA tensors. What fits is a stack of one (smfr_binding.cpp); else, and in fp64, all is in the compute dtype:
// the kernels of mfnnr.cu, or cuBLAS for layers too wide for them.
#include "binding.h"

namespace fastmod::cuda::bindings {
namespace {

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
  const std::vector<StackedLayer> stack{{route_, update_, tau, tau_value, seed}};
  if (stack_fits(x_, stack)) {
    const StackOutput found = stack_forward(x_, stack, mode, context, threshold, save);
    return {found.outs[0], found.penalty, found.logits[0], found.gates[0], found.saved[0]};
  }
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
  const auto wide = x_.options().dtype(compute_type(x_));
  const std::vector<StackedLayer> stack{{route_, update_, tau, tau_value, seed}};
  if (stack_fits(x_, stack)) {
    const StackGrads found = stack_backward(grad_out_, grad_penalty_, x_, stack, mode, context, threshold, {}, {saved},
                                            need_x, need_params);
    std::vector<Tensor> grads{found.x, tau ? found.taus[0] : at::zeros({}, wide)};
    grads.insert(grads.end(), found.params.begin(), found.params.end());
    return grads;
  }
  const RoutingArguments routing(x_, tau, tau_value, seed, mode);
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

StackOutput stack_or_layer_forward(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, bool save) {
  if (layers.size() > 1) return stack_forward(x, layers, mode, context, threshold, save);
  const StackedLayer& one = layers[0];
  const auto [out, penalty, logits, gate, saved] = mfnnr_forward(x, one.route, one.update, one.tau, one.tau_value,
                                                                 one.seed, mode, context, threshold, save);
  return {penalty, {out}, {logits}, {gate}, {saved}};
}

StackGrads stack_or_layer_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, const std::vector<Tensor>& inputs,
                                   const std::vector<Tensor>& saved, bool need_x, bool need_params) {
  if (layers.size() > 1) {
    return stack_backward(grad_out, grad_penalty, x, layers, mode, context, threshold, inputs, saved, need_x,
                          need_params);
  }
  const StackedLayer& one = layers[0];
  const auto grads = mfnnr_backward(grad_out, grad_penalty, x, one.route, one.update, one.tau, one.tau_value, one.seed,
                                    mode, context, threshold, saved[0], need_x, need_params);
  StackGrads found{grads[0], {}, {grads.begin() + 2, grads.end()}};
  if (one.tau) found.taus.push_back(grads[1]);
  return found;
}

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("mfnnr_forward", mfnnr_forward);
  m.impl("mfnnr_backward", mfnnr_backward);
}

}  // namespace fastmod::cuda::bindings
