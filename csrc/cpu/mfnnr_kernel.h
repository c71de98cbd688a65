// A whole MFNNR on one batch-last tile, forward and backward.
//
// The backward has two parallel phases, both bit-equal for any number of threads: gradients of activations, tile by
// tile; then gradients of weights, unit by unit, each summing over the whole batch in order.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// One fully connected layer, with weight [out, in] and bias [out] as in nn.Linear.
template <typename T>
struct Linear {
  const T *weight, *bias;
  T *grad_weight, *grad_bias;  // backward only
  int64_t in, out;
  int64_t row;       // first row of its output among the tile's activations
  int64_t grad_row;  // first row of its output's gradient among the tile's gradients
};

template <typename T>
struct MfnnrArgs {
  BlockSizes size;
  Routing routing;
  bool context, need_x, need_tau;
  double threshold;         // < 0: no penalty
  const Linear<T>*route, *update;
  int64_t route_layers, update_layers;
  int64_t routed_row, rows, grad_rows;
  const T* x;               // [B, M, D]
  T *out, *logits, *gate;   // [B, N, D], [B, M, N], [B, N]
  T* saved;                 // [tiles, rows, kTile]; forward: null when nothing is kept
  double* penalty;          // [tiles]
  const T* grad_out;        // [B, N, D] or null
  double grad_penalty;
  T* grads;                 // [tiles, grad_rows, kTile]
  T* grad_x;                // [B, M, D]
  double* grad_tau;         // [tiles]
};

// A piece of one weight gradient: some columns (inputs) of one layer.
struct WeightGradUnit {
  bool update;
  int64_t layer, column, columns;
};

template <typename T>
struct MfnnrKernels {
  int64_t (*scratch)(const MfnnrArgs<T>&);
  void (*forward)(const MfnnrArgs<T>&, int64_t tile, T* scratch);
  void (*backward)(const MfnnrArgs<T>&, int64_t tile, T* scratch);
  void (*weight_grad)(const MfnnrArgs<T>&, const WeightGradUnit&, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/gated_residual_kernel.h"
#include "cpu/gemm.h"
#include "cpu/multiplex_kernel.h"
#include "cpu/range_penalty_kernel.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T>
Strided<T> weight_of(const Linear<T>& layer) {
  return {layer.weight, layer.in, 1};
}

// The inputs of a layer are in one or two places: the update FNN reads [routed ; x].
template <typename T>
void linear_forward(const Linear<T>& layer, int64_t columns, bool leaky, const T* input, int64_t features,
                    const T* input2, T* output) {
  const bool two = features < layer.in;
  gemm<T>(layer.out, columns, features, weight_of(layer), input, kTile, output, kTile,
          {.bias = layer.bias, .leaky = leaky && !two});
  if (two)
    gemm<T>(layer.out, columns, layer.in - features, {layer.weight + features, layer.in, 1}, input2, kTile, output,
            kTile, {.accumulate = true, .leaky = leaky});
}

// Hidden layers and output of an FNN; each layer writes its rows of `tile`.
template <typename T>
void fnn_forward(const Linear<T>* layers, int64_t count, int64_t columns, const T* input, int64_t features,
                 const T* input2, T* tile) {
  for (int64_t l = 0; l < count; ++l) {
    T* output = tile + layers[l].row * kTile;
    linear_forward(layers[l], columns, l + 1 < count, input, l == 0 ? features : layers[l].in, input2, output);
    input = output;
  }
}

template <typename T>
double penalty_of_rows(const T* rows, int64_t count, int64_t columns, double threshold) {
  constexpr int lanes = kLanes<T>;
  double total = 0;
  for (int64_t at = 0; at < columns; at += lanes) {
    Vec<T> sum{};
    for (int64_t r = 0; r < count; ++r) {
      const Vec<T> over = excess<T>(load(rows + r * kTile + at), T(threshold));
      sum += over * over;
    }
    for (int64_t i = 0; i < std::min<int64_t>(lanes, columns - at); ++i) total += double(sum[i]);
  }
  return total;
}

template <typename T>
void add_penalty_grad(const T* rows, int64_t count, int64_t columns, double threshold, double scale, T* grad) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t at = r * kTile; at < r * kTile + columns; at += kLanes<T>)
      store(grad + at, load(grad + at) + excess<T>(load(rows + at), T(threshold)) * T(2 * scale));
}

// Scratch of one tile: for the routing, for x, for one tile of rows if nothing is saved, and twice for blocks.
template <typename T>
struct MfnnrScratch {
  T *routing, *x, *grad_x, *blocks, *rows;
  static int64_t size(const MfnnrArgs<T>& a) {
    return RoutingScratch<T, kTile>::size(a.size) +
           (2 * a.size.m * a.size.d + a.size.n * a.size.d + (a.saved ? 0 : a.rows)) * kTile;
  }
  MfnnrScratch(const MfnnrArgs<T>& a, T* memory) {
    routing = memory;
    x = routing + RoutingScratch<T, kTile>::size(a.size);
    grad_x = x + a.size.m * a.size.d * kTile;
    blocks = grad_x + a.size.m * a.size.d * kTile;
    rows = blocks + a.size.n * a.size.d * kTile;
  }
};

template <typename T>
int64_t mfnnr_scratch(const MfnnrArgs<T>& args) {
  return MfnnrScratch<T>::size(args);
}

template <typename T>
void mfnnr_forward(const MfnnrArgs<T>& args, int64_t index, T* memory) {
  const BlockSizes& s = args.size;
  const int64_t first = index * kTile, count = std::min(kTile, s.batch - first);
  const int64_t columns = vectors_for(count, kLanes<T>) * kLanes<T>;
  const MfnnrScratch<T> scratch(args, memory);
  T* tile = args.saved ? args.saved + index * args.rows * kTile : scratch.rows;

  into_tile<kTile>(args.x + first * s.m * s.d, count, s.m * s.d, scratch.x);
  fnn_forward<T>(args.route, args.route_layers, columns, scratch.x, s.m * s.d, nullptr, tile);
  const T* logits = tile + args.route[args.route_layers - 1].row * kTile;
  const Weights<T> weights =
      route_weights<kTile>(s, args.routing, first, count, logits, RoutingScratch<T, kTile>(s, scratch.routing));
  T* routed = tile + args.routed_row * kTile;
  multiplex_tile<kTile>(s, count, scratch.x, weights, routed);
  fnn_forward<T>(args.update, args.update_layers, columns, routed, s.n * s.d, scratch.x, tile);
  const T* fresh = tile + args.update[args.update_layers - 1].row * kTile;
  const T* gate = fresh + s.n * s.d * kTile;

  for (int64_t n = 0; n < s.n; ++n)
    for (int64_t at = 0; at < columns; at += kLanes<T>) {
      const Vec<T> g = load(gate + n * kTile + at), open = sigmoid<T>(g), shut = sigmoid<T>(-g);
      for (int64_t e = n * s.d * kTile + at; e < (n + 1) * s.d * kTile; e += kTile)
        store(scratch.blocks + e, open * load(fresh + e) + shut * load(routed + e));
    }
  from_tile<kTile>(scratch.blocks, count, s.n * s.d, args.out + first * s.n * s.d);
  from_tile<kTile>(logits, count, s.m * s.n, args.logits + first * s.m * s.n);
  from_tile<kTile>(gate, count, s.n, args.gate + first * s.n);
  args.penalty[index] = args.threshold < 0 ? 0.0
                                           : penalty_of_rows(logits, s.m * s.n, count, args.threshold) +
                                                 penalty_of_rows(gate, s.n, count, args.threshold);
}

// Computes the gradients of the hidden layers from the output's, which is already in `grads`. The caller continues with
// the input.
template <typename T>
void fnn_backward(const Linear<T>* layers, int64_t count, int64_t columns, const T* tile, T* grads) {
  for (int64_t l = count - 1; l > 0; --l)
    gemm<T>(layers[l].in, columns, layers[l].out, {layers[l].weight, 1, layers[l].in},
            grads + layers[l].grad_row * kTile, kTile, grads + layers[l - 1].grad_row * kTile, kTile,
            {.activation = tile + layers[l - 1].row * kTile});
}

// Adds the gradient of a layer's inputs [first, first + features) to `grad`.
template <typename T>
void input_backward(const Linear<T>& layer, int64_t columns, int64_t first, int64_t features, const T* grads,
                    bool accumulate, T* grad) {
  gemm<T>(features, columns, layer.out, {layer.weight + first, 1, layer.in}, grads + layer.grad_row * kTile, kTile,
          grad, kTile, {.accumulate = accumulate});
}

template <typename T>
void mfnnr_backward(const MfnnrArgs<T>& args, int64_t index, T* memory) {
  const BlockSizes& s = args.size;
  const int64_t first = index * kTile, count = std::min(kTile, s.batch - first), inputs = s.m * s.d;
  const int64_t columns = vectors_for(count, kLanes<T>) * kLanes<T>;
  const MfnnrScratch<T> scratch(args, memory);
  const RoutingScratch<T, kTile> routing(s, scratch.routing);
  const T* tile = args.saved + index * args.rows * kTile;
  T* grads = args.grads + index * args.grad_rows * kTile;
  const Linear<T>&route_last = args.route[args.route_layers - 1], &update_last = args.update[args.update_layers - 1];
  const T *logits = tile + route_last.row * kTile, *routed = tile + args.routed_row * kTile;
  const T *fresh = tile + update_last.row * kTile, *gate = fresh + s.n * s.d * kTile;
  const bool penalise = args.threshold >= 0 && args.grad_penalty != 0;

  // Gate: `blocks` holds the gradient of out, which that of routed then overwrites.
  T* blocks = scratch.blocks;
  if (args.grad_out) into_tile<kTile>(args.grad_out + first * s.n * s.d, count, s.n * s.d, blocks);
  else std::fill(blocks, blocks + s.n * s.d * kTile, T(0));
  T* grad_fresh = grads + update_last.grad_row * kTile;
  T* grad_gate = grad_fresh + s.n * s.d * kTile;
  for (int64_t n = 0; n < s.n; ++n)
    for (int64_t at = 0; at < columns; at += kLanes<T>) {
      const Vec<T> g = load(gate + n * kTile + at), open = sigmoid<T>(g), shut = sigmoid<T>(-g);
      Vec<T> along_gate{};
      for (int64_t e = n * s.d * kTile + at; e < (n + 1) * s.d * kTile; e += kTile) {
        const Vec<T> grad = load(blocks + e);
        along_gate += grad * (load(fresh + e) - load(routed + e));
        store(grad_fresh + e, open * grad);
        store(blocks + e, shut * grad);
      }
      store(grad_gate + n * kTile + at, along_gate * open * shut);
    }
  if (penalise) add_penalty_grad(gate, s.n, columns, args.threshold, args.grad_penalty, grad_gate);

  // Update FNN, back to its inputs [routed ; x].
  fnn_backward(args.update, args.update_layers, columns, tile, grads);
  input_backward<T>(args.update[0], columns, 0, s.n * s.d, grads, true, blocks);
  T* grad_x = args.need_x ? scratch.grad_x : nullptr;
  const bool through_context = args.need_x && args.context;
  if (through_context) input_backward<T>(args.update[0], columns, s.n * s.d, inputs, grads, false, grad_x);

  // Multiplexer and route FNN.
  into_tile<kTile>(args.x + first * inputs, count, inputs, scratch.x);
  const Weights<T> weights = route_weights<kTile>(s, args.routing, first, count, logits, routing);
  T* grad_logits = grads + route_last.grad_row * kTile;
  args.grad_tau[index] = multiplex_tile_backward<kTile>(s, args.routing, count, scratch.x, blocks, weights,
                                                 grad_logits, grad_x, through_context, args.need_tau);
  if (penalise) add_penalty_grad(logits, s.m * s.n, columns, args.threshold, args.grad_penalty, grad_logits);
  fnn_backward(args.route, args.route_layers, columns, tile, grads);
  if (args.need_x) {
    input_backward<T>(args.route[0], columns, 0, inputs, grads, true, grad_x);
    from_tile<kTile>(grad_x, count, inputs, args.grad_x + first * inputs);
  }
}

// Where a layer's inputs from `column` on are: rows of the saved tile, or x in memory.
template <typename T>
struct InputSource {
  const T* rows;    // in tile 0, or null
  const T* memory;  // x at its first column
};

template <typename T>
InputSource<T> input_source(const MfnnrArgs<T>& args, const WeightGradUnit& unit) {
  const int64_t routed = args.size.n * args.size.d;
  if (unit.layer > 0) {
    const Linear<T>& before = (unit.update ? args.update : args.route)[unit.layer - 1];
    return {args.saved + (before.row + unit.column) * kTile, nullptr};
  }
  if (!unit.update) return {nullptr, args.x + unit.column};
  if (unit.column < routed) return {args.saved + (args.routed_row + unit.column) * kTile, nullptr};
  return {nullptr, args.x + unit.column - routed};
}

template <typename T>
T sum_row(const T* row, int64_t count) {
  Vec<T> sum{};
  for (int64_t at = 0; at < count; at += kLanes<T>)
    sum += load_first(row + at, std::min<int64_t>(kLanes<T>, count - at));
  return sum_lanes<T>(sum);
}

// Computes grad_weight[:, columns of the unit], and grad_bias along with the first columns.
template <typename T>
void mfnnr_weight_grad(const MfnnrArgs<T>& args, const WeightGradUnit& unit, T* panel) {
  const Linear<T>& layer = (unit.update ? args.update : args.route)[unit.layer];
  const InputSource<T> source = input_source(args, unit);
  const int64_t inputs = args.size.m * args.size.d;
  if (unit.column == 0) std::fill(layer.grad_bias, layer.grad_bias + layer.out, T(0));
  for (int64_t tile = 0; tile < tiles(args.size.batch); ++tile) {
    const int64_t first = tile * kTile, count = std::min(kTile, args.size.batch - first);
    const T* grads = args.grads + (tile * args.grad_rows + layer.grad_row) * kTile;
    if (source.rows) {
      transpose(source.rows + tile * args.rows * kTile, kTile, unit.columns, count, panel, kTile);
    } else {
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(panel + r * kTile, source.memory + (first + r) * inputs, unit.columns * sizeof(T));
    }
    gemm<T>(layer.out, unit.columns, count, {grads, kTile, 1}, panel, kTile, layer.grad_weight + unit.column,
            layer.in, {.accumulate = tile > 0});
    if (unit.column == 0)
      for (int64_t o = 0; o < layer.out; ++o) layer.grad_bias[o] += sum_row(grads + o * kTile, count);
  }
}

FASTMOD_KERNELS(MfnnrKernels, .scratch = mfnnr_scratch<T>, .forward = mfnnr_forward<T>, .backward = mfnnr_backward<T>,
                .weight_grad = mfnnr_weight_grad<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

// Sizes of one MFNNR, read from its tensors once and checked. Parameters may belong to several nets at once; then they,
// x, temperatures, seeds and all results have a dimension of copies in front.
struct MfnnrSizes {
  int64_t batch, in_blocks, out_blocks, block, rows;  // batch: that of one copy
  bool context;
  int64_t copies;  // 0: a single net
  int64_t nets() const { return copies ? copies : 1; }
  int64_t route_in() const { return in_blocks * block; }
  int64_t routed() const { return out_blocks * block; }
  int64_t update_in() const { return routed() + (context ? route_in() : 0); }
};

inline int64_t copies_of(at::TensorList params) {
  return !params.empty() && params[0].dim() == 3 ? params[0].size(0) : 0;
}

inline int64_t check_fnn(const at::Tensor& x, at::TensorList params, int64_t features, int64_t copies,
                         const LowType& low, const char* name) {
  TORCH_CHECK_VALUE(!params.empty() && params.size() % 2 == 0, name, ": expected [weight, bias, ...], got ",
                    params.size(), " tensors");
  const int64_t front = copies ? 1 : 0;
  for (size_t i = 0; i < params.size(); i += 2) {
    const at::Tensor &weight = params[i], &bias = params[i + 1];
    check_parameter(x, weight, params[0], low, name);
    check_parameter(x, bias, params[0], low, name);
    TORCH_CHECK_VALUE(weight.dim() == 2 + front && weight.size(-1) == features && weight.size(-2) > 0 &&
                          bias.dim() == 1 + front && bias.size(-1) == weight.size(-2) &&
                          (!copies || (weight.size(0) == copies && bias.size(0) == copies)),
                      name, "[", i, "]: expected a weight [out, ", features, "] and a bias [out]",
                      copies ? ", each with the copies in front" : "", ", got ", weight.sizes(), " and ",
                      bias.sizes());
    features = weight.size(-2);
  }
  return features;
}

inline MfnnrSizes check_mfnnr(const at::Tensor& x, at::TensorList route, at::TensorList update, bool context,
                              const LowType& low) {
  check_float(x, "x");
  TORCH_CHECK_TYPE(!low || *low == at::kBFloat16 || *low == at::kHalf, "low: expected bfloat16 or float16");
  const int64_t copies = copies_of(route);
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.size(-2) > 0 && x.size(-1) > 0, "x: expected [..., M, D], got ", x.sizes());
  TORCH_CHECK_VALUE(!copies || (x.dim() >= 3 && x.size(0) == copies), "x: expected [", copies, ", ..., M, D], got ",
                    x.sizes());
  MfnnrSizes s{leading_size(x, 2), x.size(-2), 0, x.size(-1), 0, context, copies};
  s.batch /= s.nets();
  const int64_t logits = check_fnn(x, route, s.route_in(), copies, low, "route");
  s.out_blocks = logits / s.in_blocks;
  TORCH_CHECK_VALUE(s.out_blocks > 0 && logits == s.in_blocks * s.out_blocks, "route: expected a multiple of ",
                    s.in_blocks, " outputs, got ", logits);
  const int64_t outputs = check_fnn(x, update, s.update_in(), copies, low, "update");
  TORCH_CHECK_VALUE(outputs == s.routed() + s.out_blocks, "update: expected ", s.routed() + s.out_blocks,
                    " outputs, got ", outputs);
  s.rows = s.routed();
  for (const at::TensorList params : {route, update})
    for (size_t i = 1; i < params.size(); i += 2) s.rows += params[i].size(-1);
  return s;
}

// A stack of MFNNRs; each layer has `fnn_tensors` tensors of the route FNN, then as many of the update FNN.
inline void check_smfr(at::TensorList params, int64_t fnn_tensors, at::TensorList taus, at::TensorList seeds) {
  TORCH_CHECK_VALUE(fnn_tensors > 0 && !params.empty() && params.size() % (2 * fnn_tensors) == 0,
                    "params: expected a multiple of 2 * ", fnn_tensors, " tensors, got ", params.size());
  const size_t layers = params.size() / (2 * fnn_tensors);
  TORCH_CHECK_VALUE(taus.empty() || taus.size() == layers, "taus: expected none or ", layers, ", got ", taus.size());
  TORCH_CHECK_VALUE(seeds.empty() || seeds.size() == layers, "seeds: expected none or ", layers, ", got ",
                    seeds.size());
}

}  // namespace fastmod

#endif
