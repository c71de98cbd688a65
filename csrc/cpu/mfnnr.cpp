#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include "cpu/host.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using at::TensorList;

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
MfnnrArgs<T> make_args(const MfnnrSizes& s, const Layers<T>& layers, const Routing& routing, double threshold,
                       const Tensor& x) {
  MfnnrArgs<T> args{};
  args.size = {s.batch, s.in_blocks, s.out_blocks, s.block};
  args.routing = routing;
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mfnnr_forward(const Tensor& x, TensorList route, TensorList update,
                                                                 const OptionalTensor& tau, double tau_value,
                                                                 const OptionalTensor& seed, int64_t mode, bool context,
                                                                 double threshold, bool save) {
  const MfnnrSizes s = check_mfnnr(x, route, update, context);
  const Routing routing = read_routing(tau, tau_value, seed, mode);
  const auto shape = [&](std::initializer_list<int64_t> trailing) {
    auto result = x.sizes().slice(0, x.dim() - 2).vec();
    result.insert(result.end(), trailing);
    return result;
  };
  const Tensor out = empty_wide(shape({s.out_blocks, s.block}), x);
  const Tensor logits = empty_wide(shape({s.in_blocks, s.out_blocks}), x), gate = empty_wide(shape({s.out_blocks}), x);
  const Tensor saved = empty_wide({save ? s.rows * tiles(s.batch) * kTile : 0}, x);
  const Tensor xr = readable(x);
  const auto route_params = readable_list(route), update_params = readable_list(update);
  std::vector<double> penalty(tiles(s.batch));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    const Layers<T> layers(route_params, update_params, s.routed());
    MfnnrArgs<T> args = make_args(s, layers, routing, threshold, xr);
    args.out = out.data_ptr<T>();
    args.logits = logits.data_ptr<T>();
    args.gate = gate.data_ptr<T>();
    args.saved = save ? saved.data_ptr<T>() : nullptr;
    args.penalty = penalty.data();
    for_each<T>(tiles(s.batch), kTile * layers.multiply_adds() / kMultiplyAddsPerCycle, kernel.mfnnr_scratch(args), x,
                [&](int64_t tile, T* scratch) { kernel.mfnnr_forward(args, tile, scratch); });
  });
  const auto type = x.scalar_type();
  return {out.to(type), at::scalar_tensor(sum_in_order(penalty), saved.options()), logits.to(type), gate.to(type),
          saved};
}

// Weight gradients in pieces of at most kTile columns, none across the border between routed and x.
template <typename T>
std::vector<WeightGradUnit> weight_grad_units(const Layers<T>& layers, int64_t routed) {
  std::vector<WeightGradUnit> units;
  const auto add = [&](bool update, int64_t layer, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += kTile) units.push_back({update, layer, c, std::min(kTile, end - c)});
  };
  for (size_t l = 0; l < layers.route.size(); ++l) add(false, l, 0, layers.route[l].in);
  for (size_t l = 0; l < layers.update.size(); ++l) {
    const int64_t border = l == 0 ? routed : layers.update[l].in;
    add(true, l, 0, border);
    add(true, l, border, layers.update[l].in);
  }
  return units;
}

// Parts of about equal work, so that the threads end together.
template <typename T>
std::vector<size_t> equal_parts(const Layers<T>& layers, const std::vector<WeightGradUnit>& units, int64_t parts) {
  std::vector<double> until{0};
  for (const auto& unit : units) {
    const auto& layer = (unit.update ? layers.update : layers.route)[unit.layer];
    until.push_back(until.back() + double(unit.columns + 8) * layer.out);
  }
  std::vector<size_t> borders{0};
  for (int64_t part = 1; part < parts; ++part) {
    const double goal = until.back() * part / parts;
    const auto after = std::upper_bound(until.begin(), until.end(), goal) - until.begin();
    const size_t nearest = goal - until[after - 1] < until[after] - goal ? after - 1 : after;
    borders.push_back(std::max(borders.back(), nearest));
  }
  borders.push_back(units.size());
  return borders;
}

std::vector<Tensor> mfnnr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   TensorList route, TensorList update, const OptionalTensor& tau, double tau_value,
                                   const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                                   const Tensor& saved, bool need_x, bool need_params) {
  const MfnnrSizes s = check_mfnnr(x, route, update, context);
  const Routing routing = read_routing(tau, tau_value, seed, mode);
  TORCH_CHECK_VALUE(saved.numel() == s.rows * tiles(s.batch) * kTile && saved.scalar_type() == compute_type(x),
                    "saved: expected the activations of a forward with save=True, got ", saved.sizes());
  TORCH_CHECK_VALUE(!grad_out || grad_out->numel() == s.batch * s.routed(), "grad_out: expected [..., N, D], got ",
                    grad_out->sizes());
  const Tensor grad_x = empty_wide(need_x ? x.sizes() : at::IntArrayRef{0}, x);
  const Tensor xr = readable(x), grad = grad_out ? readable(*grad_out) : Tensor();
  const auto route_params = readable_list(route), update_params = readable_list(update);
  std::vector<Tensor> params;
  std::vector<double> grad_tau(tiles(s.batch));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    Layers<T> layers(route_params, update_params, s.routed());
    MfnnrArgs<T> args = make_args(s, layers, routing, threshold, xr);
    args.saved = const_cast<T*>(saved.const_data_ptr<T>());  // the backward only reads it
    args.need_x = need_x;
    args.need_tau = tau.has_value();
    args.grad_out = grad.defined() ? grad.const_data_ptr<T>() : nullptr;
    args.grad_penalty = grad_penalty ? grad_penalty->item<double>() : 0.0;
    const Tensor grads = empty_wide({layers.grad_rows * tiles(s.batch) * kTile}, x);
    args.grads = grads.data_ptr<T>();
    args.grad_x = grad_x.data_ptr<T>();
    args.grad_tau = grad_tau.data();
    const double cycles = kTile * layers.multiply_adds() / kMultiplyAddsPerCycle;
    for_each<T>(tiles(s.batch), cycles, kernel.mfnnr_scratch(args), x,
                [&](int64_t tile, T* scratch) { kernel.mfnnr_backward(args, tile, scratch); });
    if (!need_params) return;

    const auto allocate = [&](const std::vector<Tensor>& sources, std::vector<Linear<T>>& target) {
      for (size_t i = 0; i < sources.size(); i += 2) {
        // An empty batch leaves the kernels nothing to write.
        for (size_t j : {i, i + 1})
          params.push_back(s.batch == 0 ? at::zeros_like(sources[j]) : empty_wide(sources[j].sizes(), x));
        target[i / 2].grad_weight = params[params.size() - 2].data_ptr<T>();
        target[i / 2].grad_bias = params.back().data_ptr<T>();
      }
    };
    allocate(route_params, layers.route);
    allocate(update_params, layers.update);
    if (s.batch == 0) return;
    const auto units = weight_grad_units(layers, s.routed());
    const int64_t parts = std::min<int64_t>(at::get_num_threads(), units.size());
    const auto borders = equal_parts(layers, units, parts);
    for_each<T>(parts, cycles * tiles(s.batch) / parts, kTile * kTile, x, [&](int64_t part, T* scratch) {
      for (size_t u = borders[part]; u < borders[part + 1]; ++u) kernel.mfnnr_weight_grad(args, units[u], scratch);
    });
  });
  const auto type = x.scalar_type();
  std::vector<Tensor> result{grad_x.to(type), at::scalar_tensor(sum_in_order(grad_tau), saved.options())};
  for (const Tensor& param : params) result.push_back(param.to(type));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("mfnnr_forward", mfnnr_forward);
  m.impl("mfnnr_backward", mfnnr_backward);
}

}  // namespace fastmod::cpu
