// smfr on CUDA tensors: a stack of MFNNRs in three launches if smfr.cu can handle it, else layer by layer.
#include "image_binding.h"
#include "../cpu/mfnnr_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// Parameters and tensors of one layer; only a temperature that is not fp32 is cast.
struct LayerTensors {
  MfnnrSizes sizes;
  RoutingArguments routing;
  std::vector<Tensor> params;  // route, update
};

// Contiguous; or, for a tensor with copies in front that all share one, contiguous within it and with step 0.
Tensor contiguous(const Tensor& tensor, int64_t copies) {
  if (!copies || tensor.stride(0) != 0) return tensor.contiguous();
  return tensor.select(0, 0).contiguous().expand(tensor.sizes());
}
std::vector<Tensor> contiguous(TensorList route, TensorList update, int64_t copies) {
  std::vector<Tensor> result;
  for (const TensorList list : {route, update}) {
    for (const Tensor& tensor : list) result.push_back(contiguous(tensor, copies));
  }
  return result;
}
// The distance from one copy to the next.
int64_t step_of(const Tensor& tensor, int64_t copies) { return copies && tensor.defined() ? tensor.stride(0) : 0; }

std::vector<int64_t> each_copy(int64_t copies, std::vector<int64_t> sizes) {
  if (copies) sizes.insert(sizes.begin(), copies);
  return sizes;
}

std::vector<int64_t> batch_and(const Tensor& x, std::initializer_list<int64_t> trailing) {
  auto sizes = x.sizes().slice(0, x.dim() - 2).vec();
  sizes.insert(sizes.end(), trailing);
  return sizes;
}

template <typename T, typename W>
Stack<T, W> stack_of(const Tensor& x, const std::vector<StackedLayer>& layers, bool context, double threshold,
                     std::vector<LayerTensors>& kept) {
  Stack<T, W> stack{};
  const MfnnrSizes& first = kept[0].sizes;
  const int64_t copies = first.copies;
  stack.batch = first.batch;
  stack.copies = first.nets();
  stack.x = blocks_of<T>(x);
  stack.x_step = step_of(x, copies);
  stack.depth = static_cast<int>(layers.size());
  stack.m = static_cast<int>(first.in_blocks);
  stack.d = static_cast<int>(first.block);
  stack.route = static_cast<int>(layers[0].route.size() / 2);
  stack.update = static_cast<int>(layers[0].update.size() / 2);
  stack.mode = kept[0].routing.mode;
  stack.context = context;
  stack.precise = !at::globalContext().allowTF32CuBLAS();
  stack.threshold = static_cast<float>(threshold);
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto routing = kept[l].routing.as<float>();
    StackLayer<T>& layer = stack.layer[l];
    layer.tau = const_cast<float*>(routing.tau);
    layer.seed = routing.seed;
    layer.tau_value = routing.tau_value;
    layer.tau_type = routing.tau_type;
    layer.n = static_cast<int>(kept[l].sizes.out_blocks);
    layer.rows = static_cast<int>(kept[l].sizes.rows);
    layer.tau_step = small(step_of(kept[l].routing.tau, copies), "tau: a step");
    layer.seed_step = routing.seed ? small(step_of(*layers[l].seed, copies), "seed: a step") : 0;
    const size_t per_layer = kept[l].params.size() / 2;
    for (size_t i = 0; i < per_layer; ++i) {
      const Tensor &weight = kept[l].params[2 * i], &bias = kept[l].params[2 * i + 1];
      const bool joined = context && static_cast<int>(i) == stack.route;
      const int shared = (step_of(weight, copies) ? 0 : kSharedWeight) + (step_of(bias, copies) ? 0 : kSharedBias);
      stack.linear[l * per_layer + i] = {data<W>(weight), data<W>(bias), static_cast<int>(weight.size(-2)),
                                         static_cast<int>(weight.size(-1)),
                                         joined ? static_cast<int>(kept[l].sizes.routed()) : 0, shared};
    }
  }
  return stack;
}

std::vector<LayerTensors> tensors_of(const Tensor& x, const std::vector<StackedLayer>& layers, int64_t mode,
                                     bool context, const LowType& low) {
  std::vector<LayerTensors> result;
  Tensor input = x;  // used for its sizes only
  for (const StackedLayer& layer : layers) {
    const MfnnrSizes sizes = check_mfnnr(input, layer.route, layer.update, context, low);
    result.push_back({sizes, RoutingArguments(x, layer.tau, layer.tau_value, layer.seed, mode, sizes.copies),
                      contiguous(layer.route, layer.update, sizes.copies)});
    if (result.size() < layers.size()) {
      input = x.new_empty({1}).expand(batch_and(x, {sizes.out_blocks, sizes.block}));
    }
  }
  return result;
}

// Calls run(T*, W*): element types of the stack and of its parameters.
template <typename Run>
void dispatch_stack(at::ScalarType type, const std::vector<StackedLayer>& layers, Run&& run) {
  const auto with = [&](auto* pointer) {
    dispatch_params<Element<decltype(pointer)>>(layers[0].route[0].scalar_type(),
                                                [&](auto* param) { run(pointer, param); });
  };
  if (type == at::kHalf) return with(static_cast<__half*>(nullptr));
  if (type == at::kBFloat16) return with(static_cast<__nv_bfloat16*>(nullptr));
  with(static_cast<float*>(nullptr));
}

}  // namespace

// Decided by sizes alone and by the shared memory of the GPU.
bool stack_fits(const Tensor& x, const std::vector<StackedLayer>& layers) {
  if (x.scalar_type() == at::kDouble || layers.size() > kStackLayers) return false;
  Stack<float> stack{};  // the type with the largest weights
  stack.depth = static_cast<int>(layers.size());
  stack.d = static_cast<int>(x.size(-1));
  stack.m = static_cast<int>(x.size(-2));
  stack.route = static_cast<int>(layers[0].route.size() / 2);
  stack.update = static_cast<int>(layers[0].update.size() / 2);
  stack.context = layers[0].update[0].size(-1) > x.size(-1) * layers[0].route.back().size(-1) / x.size(-2);
  const int per_layer = stack.route + stack.update;
  if (stack.depth * per_layer > kStackLinears) return false;
  int64_t m = x.size(-2);
  for (int l = 0; l < stack.depth; ++l) {
    const int64_t n = layers[l].route.back().size(-1) / m;
    stack.layer[l].n = static_cast<int>(n);
    m = n;
    for (int i = 0; i < per_layer; ++i) {
      const Tensor& weight = i < stack.route ? layers[l].route[2 * i] : layers[l].update[2 * (i - stack.route)];
      if (weight.size(-2) > (1 << 20) || weight.size(-1) > (1 << 20)) return false;
      stack.linear[l * per_layer + i].out = static_cast<int>(weight.size(-2));
    }
  }
  return cuda::stack_fits(stack);
}

StackOutput stack_forward(const Tensor& x_, const std::vector<StackedLayer>& layers, int64_t mode, bool context,
                          double threshold, bool save, const LowType& low) {
  std::vector<LayerTensors> tensors = tensors_of(x_, layers, mode, context, low);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const int64_t batch = tensors[0].sizes.batch, padded = (batch + kBatchTile - 1) / kBatchTile * kBatchTile;
  const int64_t copies = tensors[0].sizes.copies, nets = tensors[0].sizes.nets();
  const auto wide = x_.options().dtype(at::kFloat), own = x_.options().dtype(low.value_or(x_.scalar_type()));
  StackOutput found;
  for (const LayerTensors& layer : tensors) {
    const MfnnrSizes& s = layer.sizes;
    found.outs.push_back(at::empty(batch_and(x_, {s.out_blocks, s.block}), own));
    found.logits.push_back(at::empty(batch_and(x_, {s.in_blocks, s.out_blocks}), own));
    found.gates.push_back(at::empty(batch_and(x_, {s.out_blocks}), own));
    found.saved.push_back(at::empty(each_copy(copies, {save ? s.rows * padded : 0}), wide));
  }
  if (batch == 0) {
    found.penalty = at::zeros(each_copy(copies, {}), wide);
    return found;
  }
  const Tensor x = contiguous(x_, copies);
  const Workspace space(x, {nets * stack_tiles(batch), nets});
  found.penalty = at::empty(each_copy(copies, {}), wide);
  dispatch_stack(own.dtype().toScalarType(), layers, [&](auto* pointer, auto* param) {
    using T = Element<decltype(pointer)>;
    auto stack = stack_of<T, Element<decltype(param)>>(x, layers, context, threshold, tensors);
    for (size_t l = 0; l < layers.size(); ++l) {
      stack.layer[l].out = data<T>(found.outs[l]);
      stack.layer[l].logits = data<T>(found.logits[l]);
      stack.layer[l].gate = data<T>(found.gates[l]);
      stack.layer[l].saved = save ? data<float>(found.saved[l]) : nullptr;
    }
    C10_CUDA_CHECK(cuda::smfr_forward(stack, data<float>(found.penalty), data<float>(space.numbers),
                                      data<unsigned>(space.tickets), stream()));
  });
  return found;
}

StackGrads stack_backward(const OptionalTensor& grad_out_, const OptionalTensor& grad_penalty_, const Tensor& x_,
                          const std::vector<StackedLayer>& layers, int64_t mode, bool context, double threshold,
                          const std::vector<Tensor>& inputs, const std::vector<Tensor>& saved, bool need_x,
                          bool need_params, const LowType& low) {
  std::vector<LayerTensors> tensors = tensors_of(x_, layers, mode, context, low);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const int64_t batch = tensors[0].sizes.batch, copies = tensors[0].sizes.copies, nets = tensors[0].sizes.nets();
  const auto wide = x_.options().dtype(at::kFloat);
  const auto type = low.value_or(x_.scalar_type());
  const bool zeros = batch == 0, need_taus = layers[0].tau.has_value();
  const auto made = [&](at::IntArrayRef sizes, const at::TensorOptions& options) {
    return zeros ? at::zeros(sizes, options) : at::empty(sizes, options);
  };
  StackGrads found{need_x ? made(x_.sizes(), x_.options()) : at::empty(each_copy(copies, {0}), x_.options()), {}, {}};
  for (const LayerTensors& layer : tensors) {
    if (need_taus) found.taus.push_back(made(each_copy(copies, {}), layer.routing.tau.options()));
    for (const Tensor& param : layer.params) {
      if (need_params) found.params.push_back(made(param.sizes(), param.options()));
    }
  }
  if (zeros) return found;
  const Tensor x = contiguous(x_, copies), grad_out = dense(grad_out_);
  const bool penalised = grad_penalty_ && grad_penalty_->defined() && threshold != kNoPenalty;
  const Tensor grad_penalty = penalised ? grad_penalty_->to(at::kFloat).contiguous() : Tensor();
  std::vector<Tensor> grads, below, activations;
  for (size_t l = 0; l < layers.size(); ++l) {
    const MfnnrSizes& s = tensors[l].sizes;
    const int64_t padded = (batch + kBatchTile - 1) / kBatchTile * kBatchTile;
    TORCH_CHECK_VALUE(saved[l].scalar_type() == at::kFloat && saved[l].numel() == nets * s.rows * padded,
                      "saved: expected what the forward returned with save = True, got ", saved[l].sizes());
    activations.push_back(saved[l].contiguous());
    grads.push_back(need_params ? at::empty({nets * (s.rows - s.routed()) * batch}, wide) : Tensor());
    if (l == 0) continue;
    TORCH_CHECK_VALUE(inputs[l - 1].numel() == nets * batch * s.route_in(), "saved: expected the input of layer ", l,
                      ", got ", inputs[l - 1].sizes());
    below.push_back(inputs[l - 1].to(type).contiguous());
  }
  const int64_t tiles = stack_tiles(batch);
  const int64_t count = nets * static_cast<int64_t>(layers.size()) * tiles;
  const Tensor partials = need_taus ? at::empty({count}, wide) : Tensor();
  dispatch_stack(type, layers, [&](auto* pointer, auto* param) {
    using T = Element<decltype(pointer)>;
    using W = Element<decltype(param)>;
    auto stack = stack_of<T, W>(x, layers, context, threshold, tensors);
    for (size_t l = 0; l < layers.size(); ++l) {
      stack.layer[l].out = l < below.size() ? data<T>(below[l]) : nullptr;
      stack.layer[l].saved = data<float>(activations[l]);
      stack.layer[l].grads = data<float>(grads[l]);
    }
    C10_CUDA_CHECK(cuda::smfr_backward(stack, static_cast<const T*>(data<T>(grad_out)), data<float>(grad_penalty),
                                       need_x ? found.x.data_ptr() : nullptr, data<float>(partials), stream()));
    for (int i = 0; i < stack.depth * (stack.route + stack.update); ++i) {
      stack.linear[i].weight = need_params ? data<W>(found.params[2 * i]) : nullptr;
      stack.linear[i].bias = need_params ? data<W>(found.params[2 * i + 1]) : nullptr;
      stack.linear[i].shared = 0;
    }
    for (size_t l = 0; l < found.taus.size(); ++l) stack.layer[l].tau = data<float>(found.taus[l]);
    C10_CUDA_CHECK(cuda::smfr_backward_weight(stack, data<float>(partials), stream()));
  });
  return found;
}

namespace {

std::vector<StackedLayer> layers_of(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus,
                                    TensorList seeds, bool context, const LowType& low) {
  check_smfr(params, fnn_tensors, taus, seeds);
  std::vector<StackedLayer> layers;
  Tensor input = x;  // used for its sizes only
  const size_t count = static_cast<size_t>(fnn_tensors);
  for (size_t at = 0, l = 0; at < params.size(); at += 2 * count, ++l) {
    layers.push_back({params.slice(at, count), params.slice(at + count, count),
                      taus.empty() ? OptionalTensor() : taus[l], 1.0, seeds.empty() ? OptionalTensor() : seeds[l]});
    const MfnnrSizes sizes = check_mfnnr(input, layers[l].route, layers[l].update, context, low);
    TORCH_CHECK_VALUE(sizes.copies == copies_of(layers[0].route), "params: expected as many copies of each");
    input = x.new_empty({1}).expand(batch_and(x, {sizes.out_blocks, sizes.block}));
  }
  return layers;
}

// How many layers are handled together: as many as fit a launch, or all if they do not fit and run layer by layer.
size_t layers_together(const Tensor& x, const std::vector<StackedLayer>& layers) {
  const size_t most = std::min<size_t>(kStackLayers, kStackLinears / std::max<size_t>(1, layers[0].route.size()));
  int64_t m = x.size(-2);
  for (size_t l = 0; l < layers.size() && most > 0; l += most) {
    const std::vector<StackedLayer> some(layers.begin() + l, layers.begin() + std::min(layers.size(), l + most));
    if (!stack_fits(x.new_empty({1}).expand({m, x.size(-1)}), some)) return layers.size();
    for (const StackedLayer& layer : some) m = layer.route.back().size(-1) / m;
  }
  return most > 0 ? most : layers.size();
}

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> smfr_forward(
    const Tensor& x_, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds, int64_t mode,
    bool context, double threshold, bool save, LowType low) {
  const auto layers = layers_of(x_, params, fnn_tensors, taus, seeds, context, low);
  const size_t together = layers_together(x_, layers);
  Tensor x = x_, penalty;
  std::vector<Tensor> logits, gates, saved;
  for (size_t l = 0; l < layers.size(); l += together) {
    const std::vector<StackedLayer> some(layers.begin() + l,
                                         layers.begin() + std::min(layers.size(), l + together));
    const StackOutput found = stack_or_layer_forward(x, some, mode, context, threshold, save, low);
    penalty = penalty.defined() ? at::add(penalty, found.penalty) : found.penalty;
    logits.insert(logits.end(), found.logits.begin(), found.logits.end());
    gates.insert(gates.end(), found.gates.begin(), found.gates.end());
    for (size_t i = 0; i < some.size() && save; ++i) {
      saved.push_back(found.saved[i]);
      if (l + i + 1 < layers.size()) saved.push_back(found.outs[i]);
    }
    x = found.outs.back();
  }
  return {x, penalty, logits, gates, saved};
}

std::vector<Tensor> smfr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                  TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                                  int64_t mode, bool context, double threshold, TensorList saved, bool need_x,
                                  bool need_params, LowType low) {
  const auto layers = layers_of(x, params, fnn_tensors, taus, seeds, context, low);
  TORCH_CHECK_VALUE(saved.size() == 2 * layers.size() - 1, "saved: expected ", 2 * layers.size() - 1,
                    " tensors of a forward with save = True, got ", saved.size());
  const size_t together = layers_together(x, layers);
  OptionalTensor grad = grad_out;
  std::vector<Tensor> grad_taus, grad_params;
  for (size_t end = layers.size(); end > 0;) {
    const size_t first = (end - 1) / together * together;
    const std::vector<StackedLayer> some(layers.begin() + first, layers.begin() + end);
    std::vector<Tensor> inputs, kept;
    for (size_t l = first; l < end; ++l) {
      if (l > first) inputs.push_back(saved[2 * l - 1]);
      kept.push_back(saved[2 * l]);
    }
    const StackGrads found =
        stack_or_layer_backward(grad, grad_penalty, first ? saved[2 * first - 1] : x, some, mode, context, threshold,
                                inputs, kept, first > 0 || need_x, need_params, low);
    grad = found.x;
    grad_taus.insert(grad_taus.begin(), found.taus.begin(), found.taus.end());
    grad_params.insert(grad_params.begin(), found.params.begin(), found.params.end());
    end = first;
  }
  std::vector<Tensor> grads{*grad};
  if (!taus.empty()) grads.insert(grads.end(), grad_taus.begin(), grad_taus.end());
  grads.insert(grads.end(), grad_params.begin(), grad_params.end());
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("smfr_forward", smfr_forward);
  m.impl("smfr_backward", smfr_backward);
}

}  // namespace fastmod::cuda::bindings
