// mfnnr on CUDA tensors, and stacks of MFNNRs that the three launches of smfr_binding.cpp cannot handle: layer by
// layer, one launch per linear layer, with the kernels of mfnnr.cu. Nothing is cast and no other kernels are launched,
// except that several nets are handled one after the other and their results are then combined.
#include "image_binding.h"
#include "../cpu/mfnnr_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// Sections [batch, width] of a buffer: route layers (the last is the logits), routed (if there is such a section),
// update layers.
template <typename C>
struct Sections {
  std::vector<C*> route, update;
  C* routed = nullptr;

  Sections(const Tensor& buffer, TensorList route_params, TensorList update_params, const MfnnrSizes& sizes,
           bool with_routed) {
    C* next = data<C>(buffer);
    const auto take = [&](int64_t width) {
      C* section = next;
      next += sizes.batch * width;
      return section;
    };
    for (size_t i = 1; i < route_params.size(); i += 2) route.push_back(take(route_params[i].size(0)));
    if (with_routed) routed = take(sizes.routed());
    for (size_t i = 1; i < update_params.size(); i += 2) update.push_back(take(update_params[i].size(0)));
  }
};

// One layer in the form that the kernels read.
struct WideLayer {
  MfnnrSizes sizes;
  RoutingArguments routing;
  std::vector<Tensor> route, update;
  Shape shape() const { return {sizes.batch, sizes.in_blocks, sizes.out_blocks, sizes.block}; }
};

std::vector<Tensor> dense_all(TensorList tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) {
    for (const int64_t size : tensor.sizes()) small(size, "parameters");
    result.push_back(tensor.contiguous());
  }
  return result;
}

std::vector<int64_t> leading_and(const Tensor& x, std::initializer_list<int64_t> trailing) {
  auto sizes = x.sizes().slice(0, x.dim() - 2).vec();
  sizes.insert(sizes.end(), trailing);
  return sizes;
}

std::vector<WideLayer> wide_layers(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode,
                                   bool context, const LowType& low) {
  std::vector<WideLayer> result;
  Tensor input = x;  // used for its sizes only
  for (const StackedLayer& layer : layers) {
    const MfnnrSizes sizes = check_mfnnr(input, layer.route, layer.update, context, low);
    result.push_back({sizes, RoutingArguments(x, layer.tau, layer.tau_value, layer.seed, mode),
                      dense_all(layer.route), dense_all(layer.update)});
    if (result.size() < layers.size()) {
      input = x.new_empty({1}).expand(leading_and(x, {sizes.out_blocks, sizes.block}));
    }
  }
  return result;
}

// What the first linear layer of the update FNN reads.
template <typename T>
Joined<T> update_input(const WideLayer& layer, const Compute<T>* routed, Blocks<T> x) {
  const int values = static_cast<int>(layer.sizes.routed()), features = static_cast<int>(layer.sizes.route_in());
  return layer.sizes.context ? Joined<T>{routed, x, values, values + features}
                             : Joined<T>{routed, {nullptr, false}, values, values};
}
template <typename T>
Joined<T> whole(const Compute<T>* matrix, int width) {
  return {matrix, {nullptr, false}, width, width};
}
inline int rows_of(const Tensor& weight) { return static_cast<int>(weight.size(0)); }
inline int columns_of(const Tensor& weight) { return static_cast<int>(weight.size(1)); }

// kept: the result of every linear layer; copy: a second copy of the last one, in T, or null.
template <typename T, typename W>
void fnn_forward(Joined<T> input, const std::vector<Tensor>& params, const std::vector<Compute<T>*>& kept, T* copy,
                 int64_t batch, bool allow_tf32) {
  for (size_t i = 0; i < kept.size(); ++i) {
    const bool last = i + 1 == kept.size();
    const int out = rows_of(params[2 * i]);
    C10_CUDA_CHECK((mfnnr_linear<T, W>(input, data<W>(params[2 * i]), data<W>(params[2 * i + 1]), kept[i],
                                       last ? copy : nullptr, !last, batch, out, allow_tf32, stream())));
    input = whole<T>(kept[i], out);
  }
}

// From the gradient of an FNN's output (the last of `grads`) back to that of its first linear layer's output.
template <typename T, typename W>
void fnn_backward(const std::vector<Tensor>& params, const std::vector<Compute<T>*>& kept,
                  const std::vector<Compute<T>*>& grads, int64_t batch, bool allow_tf32) {
  for (size_t i = kept.size() - 1; i > 0; --i) {
    const int out = rows_of(params[2 * i]), in = columns_of(params[2 * i]);
    const InputGrad<T> below{kept[i - 1], nullptr, grads[i - 1], nullptr, nullptr, in};
    C10_CUDA_CHECK((mfnnr_linear_backward<T, W>(grads[i], data<W>(params[2 * i]), below, batch, out, in, allow_tf32,
                                                stream())));
  }
}

template <typename T, typename W>
void launch_weights(std::vector<WeightGrad<T, W>>& weights, const std::vector<Tensor>& taus, const Tensor& partials,
                    int64_t batch, bool allow_tf32) {
  for (size_t w = 0, t = 0; w < weights.size() || t < taus.size();) {
    WeightGrads<T, W> some{};
    some.batch = batch;
    some.allow_tf32 = allow_tf32;
    for (; w < weights.size() && some.count < kWeightsTogether; ++w) some.linear[some.count++] = weights[w];
    if (partials.defined()) some.tau_partials = data<Compute<T>>(partials) + static_cast<int64_t>(t) * batch;
    if (t < taus.size()) some.tau_type = number_type(taus[t]);  // the same for all of a launch
    for (; t < taus.size() && some.taus < kTausTogether && number_type(taus[t]) == some.tau_type; ++t) {
      some.tau[some.taus++] = data<Compute<T>>(taus[t]);
    }
    C10_CUDA_CHECK(mfnnr_weights(some, stream()));
  }
}

// Calls run(T*, W*) like dispatch_stack, but also for fp64.
template <typename Run>
void dispatch_wide_stack(at::ScalarType type, const std::vector<StackedLayer>& layers, Run&& run) {
  dispatch(type, [&](auto* pointer) {
    dispatch_params<Element<decltype(pointer)>>(layers[0].route[0].scalar_type(),
                                                [&](auto* param) { run(pointer, param); });
  });
}

StackOutput wide_forward(const Tensor& x_, const std::vector<StackedLayer>& stacked, int64_t mode, bool context,
                         double threshold, bool save, const LowType& low) {
  const std::vector<WideLayer> layers = wide_layers(x_, stacked, mode, context, low);
  const int64_t batch = layers[0].sizes.batch, padded = (batch + kBatchTile - 1) / kBatchTile * kBatchTile;
  const auto wide = x_.options().dtype(compute_type(x_)), results = x_.options().dtype(low.value_or(x_.scalar_type()));
  StackOutput found;
  found.penalty = batch ? at::empty({}, wide) : at::zeros({}, wide);
  for (const WideLayer& layer : layers) {
    const MfnnrSizes& s = layer.sizes;
    found.outs.push_back(at::empty(leading_and(x_, {s.out_blocks, s.block}), results));
    found.logits.push_back(at::empty(leading_and(x_, {s.in_blocks, s.out_blocks}), results));
    found.gates.push_back(at::empty(leading_and(x_, {s.out_blocks}), results));
    found.saved.push_back(at::empty({save ? s.rows * padded : 0}, wide));
  }
  if (batch == 0) return found;
  const Tensor first = x_.contiguous();
  const int64_t depth = static_cast<int64_t>(layers.size());
  const Workspace space(x_, {depth * batch, 1});
  const bool allow_tf32 = at::globalContext().allowTF32CuBLAS();
  dispatch_wide_stack(results.dtype().toScalarType(), stacked, [&](auto* pointer, auto* param) {
    using T = Element<decltype(pointer)>;
    using W = Element<decltype(param)>;
    using C = Compute<T>;
    Blocks<T> x = blocks_of<T>(first);
    for (int64_t l = 0; l < depth; ++l) {
      const WideLayer& layer = layers[l];
      const MfnnrSizes& s = layer.sizes;
      const Tensor saved = save ? found.saved[l] : at::empty({s.rows * batch}, wide);
      const Tensor weights = at::empty({batch * s.in_blocks * s.out_blocks}, wide);
      const Sections<C> kept(saved, layer.route, layer.update, s, true);
      fnn_forward<T, W>({nullptr, x, 0, static_cast<int>(s.route_in())}, layer.route, kept.route,
                        data<T>(found.logits[l]), batch, allow_tf32);
      C10_CUDA_CHECK(mfnnr_route<T>(x, kept.route.back(), data<C>(weights), kept.routed, layer.routing.as<C>(),
                                    layer.shape(), stream()));
      fnn_forward<T, W>(update_input<T>(layer, kept.routed, x), layer.update, kept.update, nullptr, batch, allow_tf32);
      C10_CUDA_CHECK(mfnnr_gate<T>(kept.routed, kept.update.back(), kept.route.back(), data<T>(found.outs[l]),
                                   data<T>(found.gates[l]), static_cast<C>(threshold),
                                   data<C>(space.numbers) + l * batch, static_cast<int>(depth),
                                   l + 1 == depth ? data<C>(found.penalty) : nullptr, data<unsigned>(space.tickets),
                                   layer.shape(), stream()));
      x = blocks_of<T>(found.outs[l]);
    }
  });
  return found;
}

StackGrads wide_backward(const OptionalTensor& grad_out_, const OptionalTensor& grad_penalty_, const Tensor& x_,
                         const std::vector<StackedLayer>& stacked, int64_t mode, bool context, double threshold,
                         const std::vector<Tensor>& inputs, const std::vector<Tensor>& saved, bool need_x,
                         bool need_params, const LowType& low) {
  const std::vector<WideLayer> layers = wide_layers(x_, stacked, mode, context, low);
  const int64_t batch = layers[0].sizes.batch, depth = static_cast<int64_t>(layers.size());
  const auto wide = x_.options().dtype(compute_type(x_)), own_type = x_.options().dtype(low.value_or(x_.scalar_type()));
  const bool has_taus = stacked[0].tau.has_value();
  const auto made = [&](at::IntArrayRef sizes, const at::TensorOptions& options) {
    return batch ? at::empty(sizes, options) : at::zeros(sizes, options);
  };
  StackGrads found{need_x ? made(x_.sizes(), x_.options()) : at::empty({0}, x_.options()), {}, {}};
  for (size_t l = 0; l < layers.size(); ++l) {
    const WideLayer& layer = layers[l];
    // Zero without temperatures, without a launch of its own.
    found.taus.push_back(made({}, wide.dtype(tau_type(stacked[l].tau, x_))));
    for (const auto* params : {&layer.route, &layer.update}) {
      for (const Tensor& param : *params) {
        if (need_params) found.params.push_back(made(param.sizes(), param.options()));
      }
    }
  }
  if (batch == 0) return found;
  std::vector<Tensor> xs, activations, grads;  // xs: the input of every layer; grads: of linear layers' outputs
  for (int64_t l = 0; l < depth; ++l) {
    const MfnnrSizes& s = layers[l].sizes;
    const Tensor& input = l > 0 ? inputs[l - 1] : x_;
    TORCH_CHECK_VALUE(saved[l].scalar_type() == wide.dtype().toScalarType() && saved[l].numel() >= s.rows * batch,
                      "saved: expected what the forward returned with save = True, got ", saved[l].sizes());
    TORCH_CHECK_VALUE(input.numel() == batch * s.route_in(), "saved: expected the input of layer ", l, ", got ",
                      input.sizes());
    xs.push_back((l > 0 ? input.to(own_type.dtype()) : input).contiguous());
    activations.push_back(saved[l].contiguous());
    grads.push_back(at::empty({(s.rows - s.routed()) * batch}, wide));
  }
  const bool penalised = grad_penalty_ && grad_penalty_->defined() && threshold != kNoPenalty;
  const Tensor grad_penalty = penalised ? grad_penalty_->to(wide) : Tensor();
  const Tensor partials = has_taus ? at::empty({depth * batch}, wide) : Tensor();
  const bool allow_tf32 = at::globalContext().allowTF32CuBLAS();
  dispatch_wide_stack(own_type.dtype().toScalarType(), stacked, [&](auto* pointer, auto* param) {
    using T = Element<decltype(pointer)>;
    using W = Element<decltype(param)>;
    using C = Compute<T>;
    Tensor grad = dense(grad_out_);
    for (int64_t l = depth - 1; l >= 0; --l) {
      const WideLayer& layer = layers[l];
      const MfnnrSizes& s = layer.sizes;
      const bool want_x = l > 0 || need_x;
      const int values = static_cast<int>(s.routed()), features = static_cast<int>(s.route_in());
      const Sections<C> kept(activations[l], layer.route, layer.update, s, true);
      const Sections<C> own(grads[l], layer.route, layer.update, s, false);
      const Tensor grad_routed = at::empty({batch * values}, wide);
      const Tensor weights = at::empty({batch * s.in_blocks * s.out_blocks}, wide);
      const Tensor grad_x = want_x ? at::empty({batch * features}, wide) : Tensor();
      C10_CUDA_CHECK(mfnnr_gate_backward<T>(data<T>(grad), kept.routed, kept.update.back(), data<C>(grad_routed),
                                            own.update.back(), data<C>(grad_penalty), static_cast<C>(threshold),
                                            layer.shape(), stream()));
      fnn_backward<T, W>(layer.update, kept.update, own.update, batch, allow_tf32);
      const InputGrad<T> joined{
          nullptr, data<C>(grad_routed), data<C>(grad_routed), nullptr, context ? data<C>(grad_x) : nullptr, values};
      C10_CUDA_CHECK((mfnnr_linear_backward<T, W>(own.update[0], data<W>(layer.update[0]), joined, batch,
                                                  rows_of(layer.update[0]), columns_of(layer.update[0]), allow_tf32,
                                                  stream())));
      C10_CUDA_CHECK(mfnnr_route_backward<T>(
          data<C>(grad_routed), blocks_of<T>(xs[l]), kept.route.back(), own.route.back(), data<C>(weights),
          data<C>(grad_x), context, has_taus ? data<C>(partials) + l * batch : nullptr, layer.routing.as<C>(),
          data<C>(grad_penalty), static_cast<C>(threshold), layer.shape(), stream()));
      if (!want_x && !need_params) break;  // only the temperatures were wanted
      fnn_backward<T, W>(layer.route, kept.route, own.route, batch, allow_tf32);
      if (!want_x) break;
      grad = l > 0 ? at::empty({batch, features}, own_type) : found.x;
      const bool is_wide = blocks_of<T>(grad).wide;
      const InputGrad<T> last{nullptr, data<C>(grad_x), is_wide ? data<C>(grad) : nullptr,
                              is_wide ? nullptr : data<T>(grad), nullptr, features};
      C10_CUDA_CHECK((mfnnr_linear_backward<T, W>(own.route[0], data<W>(layer.route[0]), last, batch,
                                                  rows_of(layer.route[0]), features, allow_tf32, stream())));
    }
    std::vector<WeightGrad<T, W>> all;
    for (size_t l = 0, p = 0; l < layers.size() && need_params; ++l) {
      const WideLayer& layer = layers[l];
      const Sections<C> kept(activations[l], layer.route, layer.update, layer.sizes, true);
      const Sections<C> own(grads[l], layer.route, layer.update, layer.sizes, false);
      const Blocks<T> x = blocks_of<T>(xs[l]);
      const auto add = [&](Joined<T> input, const std::vector<C*>& outs, const std::vector<C*>& of_outs,
                           const std::vector<Tensor>& params) {
        for (size_t i = 0; i < outs.size(); ++i, p += 2) {
          const int out = rows_of(params[2 * i]);
          all.push_back({of_outs[i], input, data<W>(found.params[p]), data<W>(found.params[p + 1]), out});
          input = whole<T>(outs[i], out);
        }
      };
      add({nullptr, x, 0, static_cast<int>(layer.sizes.route_in())}, kept.route, own.route, layer.route);
      add(update_input<T>(layer, kept.routed, x), kept.update, own.update, layer.update);
    }
    launch_weights<T, W>(all, found.taus, partials, batch, allow_tf32);
  });
  return found;
}

// ---- copies, one after the other

Tensor of_copy(const Tensor& tensor, int64_t copy) { return tensor.select(0, copy); }
OptionalTensor of_copy(const OptionalTensor& tensor, int64_t copy) {
  return tensor && tensor->defined() ? OptionalTensor(of_copy(*tensor, copy)) : OptionalTensor();
}
std::vector<Tensor> of_copy(TensorList tensors, int64_t copy) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(of_copy(tensor, copy));
  return result;
}

// run(copy, layers) returns the results of a net.
template <typename Run>
auto by_copies(int64_t copies, const std::vector<StackedLayer>& layers, int64_t mode, Run run) {
  for (const StackedLayer& layer : layers) check_routing(layer.tau, layer.tau_value, layer.seed, mode, copies);
  std::vector<decltype(run(int64_t{}, layers))> nets;
  for (int64_t copy = 0; copy < copies; ++copy) {
    std::vector<std::vector<Tensor>> params;  // what `own` refers to
    for (const StackedLayer& layer : layers) {
      params.push_back(of_copy(layer.route, copy));
      params.push_back(of_copy(layer.update, copy));
    }
    std::vector<StackedLayer> own;
    for (size_t l = 0; l < layers.size(); ++l) {
      own.push_back({params[2 * l], params[2 * l + 1], of_copy(layers[l].tau, copy), layers[l].tau_value,
                     of_copy(layers[l].seed, copy)});
    }
    nets.push_back(run(copy, own));
  }
  return nets;
}

// Combines a result of all nets, with the copies in front.
template <typename Net>
Tensor together(const std::vector<Net>& nets, Tensor Net::* member) {
  std::vector<Tensor> each;
  for (const Net& net : nets) each.push_back(net.*member);
  return at::stack(each);
}
template <typename Net>
std::vector<Tensor> together(const std::vector<Net>& nets, std::vector<Tensor> Net::* member) {
  std::vector<Tensor> results;
  for (size_t i = 0; i < (nets[0].*member).size(); ++i) {
    std::vector<Tensor> each;
    for (const Net& net : nets) each.push_back((net.*member)[i]);
    results.push_back(at::stack(each));
  }
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mfnnr_forward(const Tensor& x, TensorList route, TensorList update,
                                                                 const OptionalTensor& tau, double tau_value,
                                                                 const OptionalTensor& seed, int64_t mode, bool context,
                                                                 double threshold, bool save, LowType low) {
  check_mfnnr(x, route, update, context, low);
  const StackOutput found =
      stack_or_layer_forward(x, {{route, update, tau, tau_value, seed}}, mode, context, threshold, save, low);
  return {found.outs[0], found.penalty, found.logits[0], found.gates[0], found.saved[0]};
}

std::vector<Tensor> mfnnr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   TensorList route, TensorList update, const OptionalTensor& tau, double tau_value,
                                   const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                                   const Tensor& saved, bool need_x, bool need_params, LowType low) {
  const MfnnrSizes sizes = check_mfnnr(x, route, update, context, low);
  const StackGrads found =
      stack_or_layer_backward(grad_out, grad_penalty, x, {{route, update, tau, tau_value, seed}}, mode, context,
                              threshold, {}, {saved}, need_x, need_params, low);
  const auto numbers = x.sizes().slice(0, sizes.copies ? 1 : 0);
  std::vector<Tensor> grads{found.x, found.taus.empty() ? at::zeros(numbers, x.options().dtype(compute_type(x)))
                                                          : found.taus[0]};
  grads.insert(grads.end(), found.params.begin(), found.params.end());
  return grads;
}

}  // namespace

StackOutput stack_or_layer_forward(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, bool save, const LowType& low) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  if (stack_fits(x, layers)) return stack_forward(x, layers, mode, context, threshold, save, low);
  const int64_t copies = copies_of(layers[0].route);
  if (!copies) return wide_forward(x, layers, mode, context, threshold, save, low);
  const auto nets = by_copies(copies, layers, mode, [&](int64_t c, const std::vector<StackedLayer>& own) {
    return wide_forward(of_copy(x, c), own, mode, context, threshold, save, low);
  });
  return {together(nets, &StackOutput::penalty), together(nets, &StackOutput::outs),
          together(nets, &StackOutput::logits), together(nets, &StackOutput::gates),
          together(nets, &StackOutput::saved)};
}

StackGrads stack_or_layer_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                                   double threshold, const std::vector<Tensor>& inputs,
                                   const std::vector<Tensor>& saved, bool need_x, bool need_params,
                                   const LowType& low) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  if (stack_fits(x, layers)) {
    return stack_backward(grad_out, grad_penalty, x, layers, mode, context, threshold, inputs, saved, need_x,
                          need_params, low);
  }
  const int64_t copies = copies_of(layers[0].route);
  if (!copies) {
    return wide_backward(grad_out, grad_penalty, x, layers, mode, context, threshold, inputs, saved, need_x,
                         need_params, low);
  }
  for (const auto* list : {&inputs, &saved}) {
    for (const Tensor& kept : *list) {
      TORCH_CHECK_VALUE(kept.dim() > 1 && kept.size(0) == copies, "saved: expected ", copies, " copies in front, got ",
                        kept.sizes());
    }
  }
  const auto nets = by_copies(copies, layers, mode, [&](int64_t c, const std::vector<StackedLayer>& own) {
    return wide_backward(of_copy(grad_out, c), of_copy(grad_penalty, c), of_copy(x, c), own, mode, context, threshold,
                         of_copy(inputs, c), of_copy(saved, c), need_x, need_params, low);
  });
  return {together(nets, &StackGrads::x), together(nets, &StackGrads::taus), together(nets, &StackGrads::params)};
}

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("mfnnr_forward", mfnnr_forward);
  m.impl("mfnnr_backward", mfnnr_backward);
}

}  // namespace fastmod::cuda::bindings
