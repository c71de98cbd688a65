// MFNNRs on the CPU. A stack of them (an SMFR) takes one call: a tile of the batch passes through all layers on one
// thread, so that a step has three parallel regions instead of three per layer. A single MFNNR is a stack of one.
// One call can also handle several nets; if there are enough of them, each thread takes whole nets.
#include <ATen/ops/zeros.h>

#include "cpu/host.h"
#include "cpu/mfnnr_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using at::TensorList;

// One MFNNR of a stack: its parameters in the form that the kernels read.
struct Layer {
  MfnnrSizes size;
  std::vector<Routing> routing;  // per net
  bool need_tau;
  std::vector<Tensor> route, update;
};

// The results of a layer; their first dimension is that of the copies, if there are any.
struct LayerResult {
  Tensor out, logits, gate, saved;
};

struct Grads {
  Tensor x;
  std::vector<Tensor> taus, params;  // layer by layer
};

Tensor readable(const Tensor& tensor, int64_t copies, const LowType& low = {}) {
  return copies ? rounded(readable_copies(tensor), tensor, low) : cpu::readable(tensor, low);
}

std::vector<Tensor> readable_list(TensorList tensors, int64_t copies, const LowType& low) {
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (const Tensor& tensor : tensors) result.push_back(readable(tensor, copies, low));
  return result;
}

// Where the values of one net begin; a single net has number 0.
template <typename T>
const T* of_net(const Tensor& tensor, int64_t net) {
  return tensor.const_data_ptr<T>() + net * tensor.stride(0);
}
template <typename T>
T* to_net(const Tensor& tensor, int64_t net) {
  return tensor.data_ptr<T>() + net * tensor.stride(0);
}

// One number per net.
std::vector<double> read_numbers(const Tensor& tensor, int64_t copies) {
  if (!copies) return {tensor.item<double>()};
  const Tensor wide = tensor.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + copies};
}

Tensor numbers(const std::vector<double>& values, int64_t copies, const Tensor& like) {
  const Tensor result = empty_wide(copies ? at::IntArrayRef(copies) : at::IntArrayRef(), like);
  with_compute_type(like, [&](auto zero) {
    std::copy(values.begin(), values.end(), result.data_ptr<decltype(zero)>());
  });
  return result;
}

std::vector<Routing> read_routings(const MfnnrSizes& size, const OptionalTensor& tau, double tau_value,
                                   const OptionalTensor& seed, int64_t mode) {
  if (!size.copies) return {read_routing(tau, tau_value, seed, mode)};
  check_routing(tau, tau_value, seed, mode, size.copies);
  const std::vector<double> taus = tau ? read_numbers(*tau, size.copies) : std::vector<double>(size.copies, tau_value);
  std::vector<Routing> result;
  for (int64_t net = 0; net < size.copies; ++net) {
    TORCH_CHECK_VALUE(taus[net] > 0, "tau: expected a number > 0, got ", taus[net]);
    result.push_back({static_cast<Mode>(mode), taus[net], mode == 1 ? *of_net<int64_t>(*seed, net) : 0});
  }
  return result;
}

Layer make_layer(const Tensor& x, TensorList route, TensorList update, const OptionalTensor& tau, double tau_value,
                 const OptionalTensor& seed, int64_t mode, bool context, const LowType& low) {
  const MfnnrSizes size = check_mfnnr(x, route, update, context, low);
  return {size, read_routings(size, tau, tau_value, seed, mode), tau.has_value(),
          readable_list(route, size.copies, low), readable_list(update, size.copies, low)};
}

// Both FNNs in the form that the kernels read, with the rows that their activations and gradients take in a tile.
template <typename T>
struct Layers {
  std::vector<Linear<T>> route, update;
  int64_t routed_row = 0, rows = 0, grad_rows = 0;

  Layers(const Layer& layer, int64_t net) {
    add(layer.route, net, route);
    routed_row = rows;
    rows += layer.size.routed();
    add(layer.update, net, update);
  }

  void add(const std::vector<Tensor>& params, int64_t net, std::vector<Linear<T>>& layers) {
    for (size_t i = 0; i < params.size(); i += 2) {
      const int64_t out = params[i].size(-2);
      layers.push_back({of_net<T>(params[i], net), of_net<T>(params[i + 1], net), nullptr, nullptr, params[i].size(-1),
                        out, rows, grad_rows});
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

constexpr double kMultiplyAddsPerCycle = 16;

// A stack with the parameters of one net.
template <typename T>
struct Net {
  std::vector<Layers<T>> layers;
  std::vector<MfnnrArgs<T>> args;  // points into the vectors above

  // inputs: what each layer reads.
  Net(const std::vector<Layer>& stack, const std::vector<Tensor>& inputs, double threshold, int64_t net) {
    layers.reserve(stack.size());
    for (size_t l = 0; l < stack.size(); ++l) {
      const MfnnrSizes& s = stack[l].size;
      const auto& own = layers.emplace_back(stack[l], net);
      MfnnrArgs<T>& a = args.emplace_back();
      a.size = {s.batch, s.in_blocks, s.out_blocks, s.block};
      a.routing = stack[l].routing[net];
      a.context = s.context;
      a.threshold = threshold;
      a.route = own.route.data();
      a.update = own.update.data();
      a.route_layers = own.route.size();
      a.update_layers = own.update.size();
      a.routed_row = own.routed_row;
      a.rows = own.rows;
      a.grad_rows = own.grad_rows;
      a.x = of_net<T>(inputs[l], net);
    }
  }

  double cycles_per_tile() const {
    double total = 0;
    for (const auto& layer : layers) total += layer.multiply_adds();
    return kTile * total / kMultiplyAddsPerCycle;
  }
  int64_t scratch() const {
    int64_t size = kTile * kTile;  // what gradients of weights need
    for (const auto& a : args) size = std::max(size, kernels<MfnnrKernels<T>>().scratch(a));
    return size;
  }
};

template <typename T>
std::vector<Net<T>> make_nets(const std::vector<Layer>& stack, const std::vector<Tensor>& inputs, double threshold) {
  std::vector<Net<T>> nets;
  nets.reserve(stack[0].size.nets());
  for (int64_t net = 0; net < stack[0].size.nets(); ++net) nets.emplace_back(stack, inputs, threshold, net);
  return nets;
}

// Whether each thread takes whole nets, layer after layer: it need not wait between layers, and what a layer reads is
// still in its cache. Otherwise threads share the tiles of all nets.
bool takes_whole_nets(int64_t nets) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return nets % threads == 0 || nets >= 4 * threads;
}

// x: [..., M, D], readable (host.h). penalty: one per net.
std::vector<LayerResult> forward_stack(const Tensor& x, const std::vector<Layer>& stack, double threshold, bool save,
                                       std::vector<double>& penalty) {
  const int64_t batch = stack[0].size.batch, copies = stack[0].size.copies, count = tiles(batch);
  std::vector<LayerResult> results;
  std::vector<Tensor> inputs;
  for (const Layer& layer : stack) {
    const MfnnrSizes& s = layer.size;
    const auto shape = [&](std::initializer_list<int64_t> trailing) {
      auto sizes = x.sizes().slice(0, x.dim() - 2).vec();
      sizes.insert(sizes.end(), trailing);
      return sizes;
    };
    const int64_t kept[] = {copies, save ? s.rows * count * kTile : 0};
    inputs.push_back(results.empty() ? x : results.back().out);
    results.push_back({empty_wide(shape({s.out_blocks, s.block}), x), empty_wide(shape({s.in_blocks, s.out_blocks}), x),
                       empty_wide(shape({s.out_blocks}), x),
                       empty_wide(at::IntArrayRef(kept).slice(copies ? 0 : 1), x)});
  }
  penalty.assign(stack[0].size.nets(), 0.0);
  if (batch == 0) return results;
  std::vector<double> parts(penalty.size() * stack.size() * count);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<MfnnrKernels<T>>();
    auto nets = make_nets<T>(stack, inputs, threshold);
    for (size_t net = 0; net < nets.size(); ++net)
      for (size_t l = 0; l < stack.size(); ++l) {
        MfnnrArgs<T>& a = nets[net].args[l];
        a.out = to_net<T>(results[l].out, net);
        a.logits = to_net<T>(results[l].logits, net);
        a.gate = to_net<T>(results[l].gate, net);
        a.saved = save ? to_net<T>(results[l].saved, net) : nullptr;
        a.penalty = parts.data() + (net * stack.size() + l) * count;
      }
    const int64_t each = takes_whole_nets(nets.size()) ? count : 1;  // tiles that pass through all layers together
    for_each<T>(nets.size() * count / each, nets[0].cycles_per_tile() * each, nets[0].scratch(), x,
                [&](int64_t unit, T* scratch) {
                  const int64_t first = unit * each % count;
                  for (const auto& a : nets[unit * each / count].args)
                    for (int64_t tile = first; tile < first + each; ++tile) kernel.forward(a, tile, scratch);
                });
  });
  const size_t own = parts.size() / penalty.size();
  for (size_t i = 0; i < parts.size(); ++i) penalty[i / own] += parts[i];
  return results;
}

// The weight gradients of all layers, in pieces of at most kTile columns; no piece crosses from `routed` to x.
struct Piece {
  size_t net, layer;
  WeightGradUnit unit;
  double cost;
};

template <typename T>
std::vector<Piece> weight_grad_pieces(const std::vector<Net<T>>& nets) {
  std::vector<Piece> pieces;
  for (size_t net = 0; net < nets.size(); ++net)
    for (size_t i = 0; i < nets[net].layers.size(); ++i) {
      const Layers<T>& layer = nets[net].layers[i];
      const auto add = [&](bool update, int64_t l, int64_t begin, int64_t end) {
        const double out = (update ? layer.update : layer.route)[l].out;
        for (int64_t c = begin; c < end; c += kTile) {
          const int64_t columns = std::min(kTile, end - c);
          pieces.push_back({net, i, {update, l, c, columns}, out * (columns + 8)});
        }
      };
      const BlockSizes& s = nets[net].args[i].size;
      for (size_t l = 0; l < layer.route.size(); ++l) add(false, l, 0, layer.route[l].in);
      for (size_t l = 0; l < layer.update.size(); ++l) {
        const int64_t border = l == 0 ? s.n * s.d : layer.update[l].in;
        add(true, l, 0, border);
        add(true, l, border, layer.update[l].in);
      }
    }
  return pieces;
}

// Splits the pieces into parts of about equal cost, so that all threads finish together.
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

// Buffers of the backward of one net: gradients of the linear layers' outputs (for one layer at a time or for all), and
// of what each layer passes to the next.
template <typename T>
int64_t own_grads(std::vector<MfnnrArgs<T>>& args, bool one_at_a_time, T* memory) {
  int64_t used = 0, largest = 0;
  for (auto& a : args) {
    const int64_t size = a.grad_rows * tiles(a.size.batch) * kTile;
    if (memory) a.grads = memory + used;
    largest = std::max(largest, size);
    used += one_at_a_time ? 0 : size;
  }
  used = one_at_a_time ? largest : used;
  for (size_t l = 1; l < args.size(); ++l) {
    if (memory) args[l - 1].grad_out = args[l].grad_x = memory + used;
    used += args[l].size.batch * args[l].size.m * args[l].size.d;
  }
  return (used + kTile - 1) / kTile * kTile;
}

// inputs: what each layer read. grad_out may be undefined. grad_penalty: one per net.
Grads backward_stack(const Tensor& grad_out, const std::vector<double>& grad_penalty, const std::vector<Tensor>& inputs,
                     const std::vector<Layer>& stack, const std::vector<Tensor>& saved, double threshold, bool need_x,
                     bool need_params) {
  const int64_t batch = stack[0].size.batch, copies = stack[0].size.copies, count = tiles(batch);
  const int64_t none[] = {copies, 0};
  Grads result{empty_wide(need_x ? inputs[0].sizes() : at::IntArrayRef(none).slice(copies ? 0 : 1), inputs[0]), {}, {}};
  for (const Layer& layer : stack)
    for (const auto* params : {&layer.route, &layer.update})
      for (const Tensor& param : *params) {
        if (!need_params) continue;  // with an empty batch the kernels write nothing
        result.params.push_back(batch == 0 ? at::zeros(param.sizes(), param.options())
                                           : empty_wide(param.sizes(), param));
      }
  const size_t nets_count = grad_penalty.size();
  std::vector<double> grad_tau(nets_count * stack.size() * count);
  with_compute_type(inputs[0], [&](auto zero) {
    if (batch == 0) return;
    using T = decltype(zero);
    const auto& kernel = kernels<MfnnrKernels<T>>();
    auto nets = make_nets<T>(stack, inputs, threshold);
    for (size_t net = 0; net < nets_count; ++net) {
      auto param = result.params.begin();
      for (size_t l = 0; l < stack.size(); ++l) {
        MfnnrArgs<T>& a = nets[net].args[l];
        a.saved = const_cast<T*>(of_net<T>(saved[l], net));  // the backward only reads it
        a.need_x = l > 0 || need_x;
        a.need_tau = stack[l].need_tau;
        a.grad_penalty = grad_penalty[net];
        a.grad_tau = grad_tau.data() + (net * stack.size() + l) * count;
        for (auto* linears : {&nets[net].layers[l].route, &nets[net].layers[l].update})
          for (auto& linear : *linears) {
            if (!need_params) continue;
            linear.grad_weight = to_net<T>(*param++, net);
            linear.grad_bias = to_net<T>(*param++, net);
          }
      }
      nets[net].args.back().grad_out = grad_out.defined() ? of_net<T>(grad_out, net) : nullptr;
      nets[net].args.front().grad_x = need_x ? to_net<T>(result.x, net) : nullptr;
    }
    const double cycles = nets[0].cycles_per_tile();
    const int64_t scratch_size = nets[0].scratch();
    if (takes_whole_nets(nets_count)) {
      const auto pieces = need_params ? weight_grad_pieces<T>({nets[0]}) : std::vector<Piece>();
      const int64_t memory = own_grads<T>(nets[0].args, true, nullptr);
      for_each<T>(nets_count, 2 * cycles * count, scratch_size + memory, inputs[0], [&](int64_t net, T* scratch) {
        auto& args = nets[net].args;
        own_grads(args, true, scratch + scratch_size);
        for (size_t l = args.size(); l-- > 0;) {
          for (int64_t tile = 0; tile < count; ++tile) kernel.backward(args[l], tile, scratch);
          for (const Piece& piece : pieces)
            if (piece.layer == l) kernel.weight_grad(args[l], piece.unit, scratch);
        }
      });
      return;
    }
    const int64_t memory = own_grads<T>(nets[0].args, false, nullptr);
    const Tensor own = empty_wide({static_cast<int64_t>(nets_count) * memory}, inputs[0]);
    for (size_t net = 0; net < nets_count; ++net) own_grads(nets[net].args, false, own.data_ptr<T>() + net * memory);
    for_each<T>(nets_count * count, cycles, scratch_size, inputs[0], [&](int64_t unit, T* scratch) {
      const auto& args = nets[unit / count].args;
      for (size_t l = args.size(); l-- > 0;) kernel.backward(args[l], unit % count, scratch);
    });
    if (!need_params) return;
    const auto pieces = weight_grad_pieces(nets);
    const int64_t parts = std::min<int64_t>(at::get_num_threads(), pieces.size());
    const auto borders = equal_parts(pieces, parts);
    const double cycles_each = cycles * count * nets_count / parts;
    for_each<T>(parts, cycles_each, scratch_size, inputs[0], [&](int64_t part, T* scratch) {
      for (size_t i = borders[part]; i < borders[part + 1]; ++i)
        kernel.weight_grad(nets[pieces[i].net].args[pieces[i].layer], pieces[i].unit, scratch);
    });
  });
  for (size_t l = 0; l < stack.size(); ++l) {
    std::vector<double> totals(nets_count, 0.0);
    for (size_t net = 0; net < nets_count; ++net)
      for (int64_t t = 0; t < count; ++t) totals[net] += grad_tau[(net * stack.size() + l) * count + t];
    result.taus.push_back(numbers(totals, copies, inputs[0]));
  }
  return result;
}

Tensor check_saved(const Tensor& saved, const MfnnrSizes& s, const Tensor& x) {
  TORCH_CHECK_VALUE(saved.numel() == s.nets() * s.rows * tiles(s.batch) * kTile && saved.dim() == (s.copies ? 2 : 1) &&
                        saved.scalar_type() == compute_type(x),
                    "saved: expected the activations of a forward with save=True, got ", saved.sizes());
  return readable(saved, s.copies);
}

Tensor readable_grad(const OptionalTensor& grad_out, const MfnnrSizes& s, const Tensor& x, const LowType& low) {
  if (!grad_out) return {};
  if (!low) check_like(x, *grad_out, "grad_out");
  TORCH_CHECK_TYPE(!low || grad_out->scalar_type() == *low, "grad_out: expected the dtype of the output");
  TORCH_CHECK_VALUE(grad_out->numel() == s.nets() * s.batch * s.routed() && grad_out->dim() == x.dim(),
                    "grad_out: expected [..., N, D], got ", grad_out->sizes());
  return readable(*grad_out, s.copies);
}

std::vector<double> penalty_grads(const OptionalTensor& grad_penalty, const MfnnrSizes& s) {
  if (!grad_penalty) return std::vector<double>(s.nets(), 0.0);
  TORCH_CHECK_VALUE(is_number(*grad_penalty, s.copies), "grad_penalty: expected a 0-d tensor, or one number per copy");
  return read_numbers(*grad_penalty, s.copies);
}

// ------------------------------------------------------------------- mfnnr

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mfnnr_forward(const Tensor& x, TensorList route, TensorList update,
                                                                 const OptionalTensor& tau, double tau_value,
                                                                 const OptionalTensor& seed, int64_t mode, bool context,
                                                                 double threshold, bool save, LowType low) {
  const Layer layer = make_layer(x, route, update, tau, tau_value, seed, mode, context, low);
  const int64_t copies = layer.size.copies;
  std::vector<double> penalty;
  const LayerResult r = forward_stack(readable(x, copies, low), {layer}, threshold, save, penalty)[0];
  const auto type = low.value_or(x.scalar_type());
  return {in_type(r.out, type), numbers(penalty, copies, x), in_type(r.logits, type), in_type(r.gate, type), r.saved};
}

std::vector<Tensor> mfnnr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                   TensorList route, TensorList update, const OptionalTensor& tau, double tau_value,
                                   const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                                   const Tensor& saved, bool need_x, bool need_params, LowType low) {
  const Layer layer = make_layer(x, route, update, tau, tau_value, seed, mode, context, low);
  const MfnnrSizes& s = layer.size;
  const Grads grads = backward_stack(readable_grad(grad_out, s, x, low), penalty_grads(grad_penalty, s),
                                     {readable(x, s.copies, low)}, {layer}, {check_saved(saved, s, x)}, threshold,
                                     need_x, need_params);
  std::vector<Tensor> result{in_type(grads.x, x.scalar_type()), in_type(grads.taus[0], tau_type(tau, x))};
  for (const Tensor& param : grads.params) result.push_back(in_type(param, route[0].scalar_type()));
  return result;
}

// -------------------------------------------------------------------- smfr

std::vector<Layer> make_stack(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus,
                              TensorList seeds, int64_t mode, bool context, const LowType& low) {
  check_smfr(params, fnn_tensors, taus, seeds);
  std::vector<Layer> stack;
  // Used for its sizes only; every layer has the batch, the block size and the dtype of x.
  Tensor input = x;
  for (size_t at = 0, l = 0; at < params.size(); at += 2 * fnn_tensors, ++l) {
    const TensorList route = params.slice(at, fnn_tensors), update = params.slice(at + fnn_tensors, fnn_tensors);
    const OptionalTensor tau = taus.empty() ? OptionalTensor() : taus[l];
    const OptionalTensor seed = seeds.empty() ? OptionalTensor() : seeds[l];
    stack.push_back(make_layer(input, route, update, tau, 1.0, seed, mode, context, low));
    TORCH_CHECK_VALUE(stack.back().size.copies == stack[0].size.copies, "params: expected as many copies of each");
    auto sizes = x.sizes().vec();
    sizes[sizes.size() - 2] = stack.back().size.out_blocks;
    input = x.new_empty({1}).expand(sizes);
  }
  return stack;
}

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> smfr_forward(
    const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds, int64_t mode,
    bool context, double threshold, bool save, LowType low) {
  const auto stack = make_stack(x, params, fnn_tensors, taus, seeds, mode, context, low);
  const int64_t copies = stack[0].size.copies;
  std::vector<double> penalty;
  const auto results = forward_stack(readable(x, copies, low), stack, threshold, save, penalty);
  const auto type = low.value_or(x.scalar_type());
  std::vector<Tensor> logits, gates, saved;
  for (const LayerResult& r : results) {
    logits.push_back(in_type(r.logits, type));
    gates.push_back(in_type(r.gate, type));
    if (!save) continue;
    saved.push_back(r.saved);
    if (saved.size() + 1 < 2 * results.size()) saved.push_back(r.out);
  }
  return {in_type(results.back().out, type), numbers(penalty, copies, x), logits, gates, saved};
}

std::vector<Tensor> smfr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty, const Tensor& x,
                                  TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                                  int64_t mode, bool context, double threshold, TensorList saved, bool need_x,
                                  bool need_params, LowType low) {
  const auto stack = make_stack(x, params, fnn_tensors, taus, seeds, mode, context, low);
  TORCH_CHECK_VALUE(saved.size() + 1 == 2 * stack.size(), "saved: expected ", 2 * stack.size() - 1, " tensors, got ",
                    saved.size());
  const MfnnrSizes& last = stack.back().size;
  std::vector<Tensor> inputs{readable(x, last.copies, low)}, activations;
  for (size_t l = 0; l < stack.size(); ++l) {
    const MfnnrSizes& s = stack[l].size;
    activations.push_back(check_saved(saved[2 * l], s, x));
    if (l == 0) continue;
    const Tensor& input = saved[2 * l - 1];
    TORCH_CHECK_VALUE(input.numel() == s.nets() * s.batch * s.route_in() && input.dim() == x.dim() &&
                          input.scalar_type() == compute_type(x),
                      "saved: expected the input of layer ", l, ", got ", input.sizes());
    inputs.push_back(readable(input, s.copies));
  }
  const Grads grads = backward_stack(readable_grad(grad_out, last, x, low), penalty_grads(grad_penalty, last), inputs,
                                     stack, activations, threshold, need_x, need_params);
  std::vector<Tensor> result{in_type(grads.x, x.scalar_type())};
  for (size_t l = 0; l < taus.size(); ++l) result.push_back(in_type(grads.taus[l], tau_type(taus[l], x)));
  for (const Tensor& param : grads.params) result.push_back(in_type(param, params[0].scalar_type()));
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
