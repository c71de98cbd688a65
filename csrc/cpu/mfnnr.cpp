// MFNNRs on the CPU. A stack of them, an SMFR, is served in one go: a tile of the batch passes through all layers on one
// thread, so that a step has three parallel regions in all instead of three per layer. A single MFNNR is a stack of one.
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include "cpu/host.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using at::TensorList;

// One MFNNR of a stack: its parameters as the kernels read them.
struct Layer {
  MfnnrSizes size;
  Routing routing;
  bool need_tau;
  std::vector<Tensor> route, update;
};

struct LayerResult {
  Tensor out, logits, gate, saved;
};

struct LayerGrads {
  Tensor x;
  double tau;
  std::vector<Tensor> params;
};

std::vector<Tensor> readable_list(TensorList tensors) {
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (const Tensor& tensor : tensors) result.push_back(readable(tensor));
  return result;
}

// Both FNNs as the kernels see them, with the rows that their activations and gradients take in a tile.
template <typename T>
struct Layers {
  std::vector<Linear<T>> route, update;
  int64_t routed_row = 0, rows = 0, grad_rows = 0;

  Layers(const std::vector<Tensor>& route_params, const std::vector<Tensor>& update_params, int64_t routed) {
    add(route_params, route);
    routed_row = rows;
    rows += routed;
    add(update_params, update);
  }

  void add(const std::vector<Tensor>& params, std::vector<Linear<T>>& layers) {
    for (size_t i = 0; i < params.size(); i += 2) {
      const int64_t out = params[i].size(0);
      layers.push_back({params[i].const_data_ptr<T>(), params[i + 1].const_data_ptr<T>(), nullptr, nullptr,
                        params[i].size(1), out, rows, grad_rows});
      rows += out;
      grad_rows += out;
    }
  }

  double multiply_adds() const {
    double total = 0;
    for (const auto* layers : {&route, &update})
      for (const auto& layer : *layers) total += double(layer.in) * layer.out;
    return total;
  }
};

template <typename T>
MfnnrArgs<T> make_args(const Layer& layer, const Layers<T>& layers, double threshold, const Tensor& x) {
  const MfnnrSizes& s = layer.size;
  MfnnrArgs<T> args{};
  args.size = {s.batch, s.in_blocks, s.out_blocks, s.block};
  args.routing = layer.routing;
  args.context = s.context;
  args.threshold = threshold;
  args.route = layers.route.data();
  args.update = layers.update.data();
  args.route_layers = layers.route.size();
  args.update_layers = layers.update.size();
  args.routed_row = layers.routed_row;
  args.rows = layers.rows;
  args.grad_rows = layers.grad_rows;
  args.x = x.const_data_ptr<T>();
  return args;
}

constexpr double kMultiplyAddsPerCycle = 16;

template <typename T>
double cycles_per_tile(const std::vector<Layers<T>>& layers) {
  double total = 0;
  for (const auto& layer : layers) total += layer.multiply_adds();
  return kTile * total / kMultiplyAddsPerCycle;
}

template <typename T>
std::vector<Layers<T>> make_layers(const std::vector<Layer>& stack) {
  std::vector<Layers<T>> result;
  result.reserve(stack.size());  // the arguments point into the elements
  for (const Layer& layer : stack) result.emplace_back(layer.route, layer.update, layer.size.routed());
  return result;
}

template <typename T>
int64_t largest_scratch(const std::vector<MfnnrArgs<T>>& args) {
  int64_t size = 0;
  for (const auto& a : args) size = std::max(size, table<T>(kernels()).mfnnr_scratch(a));
  return size;
}

// x: [..., M, D], readable. Adds to `penalty`.
std::vector<LayerResult> forward_stack(const Tensor& x, const std::vector<Layer>& stack, double threshold, bool save,
                                       double& penalty) {
  const int64_t batch = stack[0].size.batch;
  std::vector<LayerResult> results;
  for (const Layer& layer : stack) {
    const MfnnrSizes& s = layer.size;
    const auto shape = [&](std::initializer_list<int64_t> trailing) {
      auto sizes = x.sizes().slice(0, x.dim() - 2).vec();
      sizes.insert(sizes.end(), trailing);
      return sizes;
    };
    results.push_back({empty_wide(shape({s.out_blocks, s.block}), x), empty_wide(shape({s.in_blocks, s.out_blocks}), x),
                       empty_wide(shape({s.out_blocks}), x),
                       empty_wide({save ? s.rows * tiles(batch) * kTile : 0}, x)});
  }
  std::vector<double> parts(stack.size() * tiles(batch));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    const auto layers = make_layers<T>(stack);
    std::vector<MfnnrArgs<T>> args;
    for (size_t l = 0; l < stack.size(); ++l) {
      args.push_back(make_args(stack[l], layers[l], threshold, l == 0 ? x : results[l - 1].out));
      args[l].out = results[l].out.template data_ptr<T>();
      args[l].logits = results[l].logits.template data_ptr<T>();
      args[l].gate = results[l].gate.template data_ptr<T>();
      args[l].saved = save ? results[l].saved.template data_ptr<T>() : nullptr;
      args[l].penalty = parts.data() + l * tiles(batch);
    }
    for_each<T>(tiles(batch), cycles_per_tile(layers), largest_scratch(args), x, [&](int64_t tile, T* scratch) {
      for (const auto& a : args) kernel.mfnnr_forward(a, tile, scratch);
    });
  });
  penalty += sum_in_order(parts);
  return results;
}

// Weight gradients of all layers in pieces of at most kTile columns, none across the border between routed and x.
struct Piece {
  size_t layer;
  WeightGradUnit unit;
  double cost;
};

template <typename T>
std::vector<Piece> weight_grad_pieces(const std::vector<Layer>& stack, const std::vector<Layers<T>>& layers) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto add = [&](bool update, int64_t l, int64_t begin, int64_t end) {
      const double out = (update ? layers[i].update : layers[i].route)[l].out;
      for (int64_t c = begin; c < end; c += kTile) {
        const int64_t columns = std::min(kTile, end - c);
        pieces.push_back({i, {update, l, c, columns}, out * (columns + 8)});
      }
    };
    for (size_t l = 0; l < layers[i].route.size(); ++l) add(false, l, 0, layers[i].route[l].in);
    for (size_t l = 0; l < layers[i].update.size(); ++l) {
      const int64_t border = l == 0 ? stack[i].size.routed() : layers[i].update[l].in;
      add(true, l, 0, border);
      add(true, l, border, layers[i].update[l].in);
    }
  }
  return pieces;
}

// Borders of parts of about equal cost, so that the threads end together.
std::vector<size_t> equal_parts(const std::vector<Piece>& pieces, int64_t parts) {
  std::vector<double> until{0};
  for (const Piece& piece : pieces) until.push_back(until.back() + piece.cost);
  std::vector<size_t> borders{0};
  for (int64_t part = 1; part < parts; ++part) {
    const double goal = until.back() * part / parts;
    const auto after = std::upper_bound(until.begin(), until.end(), goal) - until.begin();
    const size_t nearest = goal - until[after - 1] < until[after] - goal ? after - 1 : after;
    borders.push_back(std::max(borders.back(), nearest));
  }
  borders.push_back(pieces.size());
  return borders;
}

// inputs: what each layer read. grad_out may be undefined.
std::vector<LayerGrads> backward_stack(const Tensor& grad_out, double grad_penalty, const std::vector<Tensor>& inputs,
                                       const std::vector<Layer>& stack, const std::vector<Tensor>& saved,
                                       double threshold, bool need_x, bool need_params) {
  const int64_t batch = stack[0].size.batch;
  std::vector<LayerGrads> results(stack.size());
  for (size_t l = 0; l < stack.size(); ++l) {
    const bool needed = l > 0 || need_x;
    results[l].x = empty_wide(needed ? inputs[l].sizes() : at::IntArrayRef{0}, inputs[l]);
    if (!need_params) continue;
    for (const auto* params : {&stack[l].route, &stack[l].update})
      for (const Tensor& param : *params)  // an empty batch leaves the kernels nothing to write
        results[l].params.push_back(batch == 0 ? at::zeros_like(param) : empty_wide(param.sizes(), param));
  }
  std::vector<double> grad_tau(stack.size() * tiles(batch));
  with_compute_type(inputs[0], [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    auto layers = make_layers<T>(stack);
    std::vector<MfnnrArgs<T>> args;
    std::vector<Tensor> grads;
    for (size_t l = 0; l < stack.size(); ++l) {
      args.push_back(make_args(stack[l], layers[l], threshold, inputs[l]));
      grads.push_back(empty_wide({layers[l].grad_rows * tiles(batch) * kTile}, inputs[l]));
      MfnnrArgs<T>& a = args.back();
      a.saved = const_cast<T*>(saved[l].template const_data_ptr<T>());  // the backward only reads it
      a.need_x = l > 0 || need_x;
      a.need_tau = stack[l].need_tau;
      a.grad_penalty = grad_penalty;
      a.grads = grads[l].template data_ptr<T>();
      a.grad_x = results[l].x.template data_ptr<T>();
      a.grad_tau = grad_tau.data() + l * tiles(batch);
      const Tensor& from = l + 1 < stack.size() ? results[l + 1].x : grad_out;
      a.grad_out = from.defined() ? from.template const_data_ptr<T>() : nullptr;
      for (size_t i = 0; i < results[l].params.size(); i += 2) {
        const size_t route = layers[l].route.size();
        auto& linear = i / 2 < route ? layers[l].route[i / 2] : layers[l].update[i / 2 - route];
        linear.grad_weight = results[l].params[i].template data_ptr<T>();
        linear.grad_bias = results[l].params[i + 1].template data_ptr<T>();
      }
    }
    const double cycles = cycles_per_tile(layers);
    for_each<T>(tiles(batch), cycles, largest_scratch(args), inputs[0], [&](int64_t tile, T* scratch) {
      for (size_t l = args.size(); l-- > 0;) kernel.mfnnr_backward(args[l], tile, scratch);
    });
    if (!need_params || batch == 0) return;
    const auto pieces = weight_grad_pieces(stack, layers);
    const int64_t parts = std::min<int64_t>(at::get_num_threads(), pieces.size());
    const auto borders = equal_parts(pieces, parts);
    for_each<T>(parts, cycles * tiles(batch) / parts, kTile * kTile, inputs[0], [&](int64_t part, T* scratch) {
      for (size_t i = borders[part]; i < borders[part + 1]; ++i)
        kernel.mfnnr_weight_grad(args[pieces[i].layer], pieces[i].unit, scratch);
    });
  });
  for (size_t l = 0; l < stack.size(); ++l) {
    double total = 0;
    for (int64_t t = 0; t < tiles(batch); ++t) total += grad_tau[l * tiles(batch) + t];
    results[l].tau = total;
  }
  return results;
}

void check_saved(const Tensor& saved, const MfnnrSizes& s, const Tensor& x) {
  TORCH_CHECK_VALUE(saved.numel() == s.rows * tiles(s.batch) * kTile && saved.scalar_type() == compute_type(x),
                    "saved: expected the activations of a forward with save=True, got ", saved.sizes());
}

Tensor readable_grad(const OptionalTensor& grad_out, const MfnnrSizes& s, const Tensor& x) {
  if (!grad_out) return {};
  check_like(x, *grad_out, "grad_out");
  TORCH_CHECK_VALUE(grad_out->numel() == s.batch * s.routed(), "grad_out: expected [..., N, D], got ",
                    grad_out->sizes());
  return readable(*grad_out);
}

double scalar_or_zero(const OptionalTensor& tensor) { return tensor ? tensor->item<double>() : 0.0; }

// ------------------------------------------------------------------- mfnnr

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mfnnr_forward(const Tensor& x, TensorList route, TensorList update,
                                                                 const OptionalTensor& tau, double tau_value,
                                                                 const OptionalTensor& seed, int64_t mode, bool context,
                                                                 double threshold, bool save) {
  const Layer layer{check_mfnnr(x, route, update, context), read_routing(tau, tau_value, seed, mode), tau.has_value(),
                    readable_list(route), readable_list(update)};
  double penalty = 0;
  const LayerResult r = forward_stack(readable(x), {layer}, threshold, save, penalty)[0];
  const auto type = x.scalar_type();
  return {in_type(r.out, type), at::scalar_tensor(penalty, r.saved.options()), in_type(r.logits, type),
          in_type(r.gate, type), r.saved};
}

std::vector<Tensor> mfnnr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   TensorList route, TensorList update, const OptionalTensor& tau, double tau_value,
                                   const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                                   const Tensor& saved, bool need_x, bool need_params) {
  const Layer layer{check_mfnnr(x, route, update, context), read_routing(tau, tau_value, seed, mode), tau.has_value(),
                    readable_list(route), readable_list(update)};
  check_saved(saved, layer.size, x);
  const LayerGrads grads = backward_stack(readable_grad(grad_out, layer.size, x), scalar_or_zero(grad_penalty),
                                          {readable(x)}, {layer}, {saved}, threshold, need_x, need_params)[0];
  const auto type = x.scalar_type();
  std::vector<Tensor> result{in_type(grads.x, type), at::scalar_tensor(grads.tau, saved.options())};
  for (const Tensor& param : grads.params) result.push_back(in_type(param, type));
  return result;
}

// -------------------------------------------------------------------- smfr

std::vector<Layer> make_stack(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus,
                              TensorList seeds, int64_t mode, bool context) {
  check_smfr(params, fnn_tensors, taus, seeds);
  std::vector<Layer> stack;
  // Only sizes are read off it; every layer has the batch, the block size and the dtype of x.
  Tensor input = x;
  for (size_t at = 0, l = 0; at < params.size(); at += 2 * fnn_tensors, ++l) {
    const TensorList route = params.slice(at, fnn_tensors), update = params.slice(at + fnn_tensors, fnn_tensors);
    const OptionalTensor tau = taus.empty() ? OptionalTensor() : taus[l];
    const OptionalTensor seed = seeds.empty() ? OptionalTensor() : seeds[l];
    const MfnnrSizes size = check_mfnnr(input, route, update, context);
    stack.push_back({size, read_routing(tau, 1.0, seed, mode), tau.has_value(), readable_list(route),
                     readable_list(update)});
    auto sizes = x.sizes().vec();
    sizes[sizes.size() - 2] = size.out_blocks;
    input = x.new_empty({1}).expand(sizes);
  }
  return stack;
}

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> smfr_forward(
    const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds, int64_t mode,
    bool context, double threshold, bool save) {
  const auto stack = make_stack(x, params, fnn_tensors, taus, seeds, mode, context);
  double penalty = 0;
  const auto results = forward_stack(readable(x), stack, threshold, save, penalty);
  const auto type = x.scalar_type();
  std::vector<Tensor> logits, gates, saved;
  for (const LayerResult& r : results) {
    logits.push_back(in_type(r.logits, type));
    gates.push_back(in_type(r.gate, type));
    if (!save) continue;
    saved.push_back(r.saved);
    if (saved.size() + 1 < 2 * results.size()) saved.push_back(r.out);
  }
  return {in_type(results.back().out, type), at::scalar_tensor(penalty, x.options().dtype(compute_type(x))), logits,
          gates, saved};
}

std::vector<Tensor> smfr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                  TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                                  int64_t mode, bool context, double threshold, TensorList saved, bool need_x,
                                  bool need_params) {
  const auto stack = make_stack(x, params, fnn_tensors, taus, seeds, mode, context);
  TORCH_CHECK_VALUE(saved.size() + 1 == 2 * stack.size(), "saved: expected ", 2 * stack.size() - 1, " tensors, got ",
                    saved.size());
  std::vector<Tensor> inputs{readable(x)}, activations;
  for (size_t l = 0; l < stack.size(); ++l) {
    check_saved(saved[2 * l], stack[l].size, x);
    activations.push_back(saved[2 * l]);
    if (l == 0) continue;
    const Tensor& input = saved[2 * l - 1];
    TORCH_CHECK_VALUE(input.numel() == stack[l].size.batch * stack[l].size.route_in() &&
                          input.scalar_type() == compute_type(x) && input.is_contiguous(),
                      "saved: expected the input of layer ", l, ", got ", input.sizes());
    inputs.push_back(input);
  }
  const auto grads =
      backward_stack(readable_grad(grad_out, stack.back().size, x), scalar_or_zero(grad_penalty), inputs, stack,
                     activations, threshold, need_x, need_params);
  const auto type = x.scalar_type();
  std::vector<Tensor> result{in_type(grads[0].x, type)};
  if (!taus.empty())
    for (const LayerGrads& g : grads) result.push_back(at::scalar_tensor(g.tau, saved[0].options()));
  for (const LayerGrads& g : grads)
    for (const Tensor& param : g.params) result.push_back(in_type(param, type));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("mfnnr_forward", mfnnr_forward);
  m.impl("mfnnr_backward", mfnnr_backward);
  m.impl("smfr_forward", smfr_forward);
  m.impl("smfr_backward", smfr_backward);
}

}  // namespace fastmod::cpu
