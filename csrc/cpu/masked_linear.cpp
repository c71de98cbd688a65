// Linear layers under sampled masks, for torch; the work is in masked_linear_kernel.h.
#include <ATen/Functions.h>

#include "cpu/masks.h"
#include "philox.h"

namespace fastmod::cpu {
namespace {

// Units of the backward's work, one partial sum of the gradient of x a group of rows: however many threads there are, so
// that their number does not change a result. Many enough that none waits long for another's last one.
constexpr int64_t kUnits = 64;
constexpr int64_t kMaxPartialBytes = 32ll << 20;  // memory of the partial sums of the gradient of x

int64_t parts(int64_t size, int64_t each) { return (size + each - 1) / each; }

template <typename T>
MaskedLinearArgs<T> linear_args(const Tensor& x, const Tensor& weight, const Tensor& logits, const Tensor& seed,
                                int64_t samples, int64_t first, double tau) {
  MaskedLinearArgs<T> args{};
  args.mask = mask_args<T>(logits, weight, first, samples, seed, kStreamMask, tau);
  args.rows = leading_size(x, 1) / samples;
  args.in = weight.size(1);
  args.out = weight.size(0);
  return args;
}

// [S, rows, in] as tiles of kTile rows, each transposed: products then need no other packing.
template <typename T>
Tensor transposed_tiles(const Tensor& x, const MaskedLinearArgs<T>& args) {
  const Tensor turned = at::empty_like(x);
  const T* from = x.const_data_ptr<T>();
  T* to = turned.data_ptr<T>();
  const int64_t each = tiles(args.rows);
  for_each<T>(args.mask.samples * each, double(kTile) * args.in, 0, x, [&](int64_t index, T*) {
    const int64_t row = index % each * kTile, width = std::min(kTile, args.rows - row);
    const int64_t place = (index / each * args.rows + row) * args.in;
    table<T>(kernels()).transpose(from + place, args.in, width, args.in, to + place, width);
  });
  return turned;
}

Tensor masked_linear_forward(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& biases,
                              const Tensor& seed, int64_t samples, int64_t first) {
  check_masked_linear(x, weight, logits, biases, seed, samples, first);
  if (stacked_layers(weight)) {
    std::vector<Tensor> found;
    for (int64_t i = 0; i < weight.size(0); ++i) {
      const auto added = biases ? OptionalTensor(biases->select(0, i)) : OptionalTensor();
      found.push_back(masked_linear_forward(x.select(0, i), weight.select(0, i), logits.select(0, i), added,
                                            seed.dim() == 1 ? seed.select(0, i) : seed, samples, first));
    }
    return at::stack(found);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  const Tensor out = empty_wide(sizes, x);
  if (out.numel() == 0) return in_type(out, x.scalar_type());
  const Tensor xr = readable(x), w = readable(weight), l = readable(logits);
  const Tensor added = biases ? readable(*biases) : Tensor();
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    MaskedLinearArgs<T> args = linear_args<T>(xr, w, l, seed, samples, first, 1.0);
    const Tensor turned = transposed_tiles<T>(xr, args);
    args.tiles = turned.const_data_ptr<T>();
    args.bias = biases ? added.const_data_ptr<T>() : nullptr;
    args.result = out.data_ptr<T>();
    const double cycles = double(kMaskedRows) * args.in * samples * (1.5 + args.rows / 28.0);
    for_each<T>(parts(args.out, kMaskedRows), cycles, kernel.masked_linear_scratch(args), x,
                [&](int64_t block, T* scratch) { kernel.masked_linear_forward(args, block, scratch); });
  });
  return in_type(out, x.scalar_type());
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& logits, const Tensor& seed, int64_t samples, double tau,
                                            std::array<bool, 3> needs, int64_t first) {
  check_masked_linear_grad(grad, x, weight, logits, seed, samples, first, tau);
  if (stacked_layers(weight)) {
    std::vector<Tensor> found[3], stacked;
    for (int64_t i = 0; i < weight.size(0); ++i) {
      const auto own = masked_linear_backward(grad.select(0, i), x.select(0, i), weight.select(0, i),
                                              logits.select(0, i), seed.dim() == 1 ? seed.select(0, i) : seed, samples,
                                              tau, needs, first);
      for (int j = 0; j < 3; ++j) found[j].push_back(own[j]);
    }
    for (const auto& each : found) stacked.push_back(at::stack(each));
    return stacked;
  }
  const auto [need_x, need_weight, need_logits] = needs;
  const int64_t batch = leading_size(x, 1), out = weight.size(0), in = weight.size(1);
  const auto type = x.scalar_type();
  std::vector<Tensor> result;  // empty where not needed, and no two the same: results of an op must not share memory
  for (int i = 0; i < 3; ++i) result.push_back(at::empty({0}, x.options()));
  const Tensor g = readable(grad), xr = readable(x), w = readable(weight), l = readable(logits);
  const bool empty = batch == 0 || out == 0 || in == 0;
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    const auto wide = [&](bool needed, const Tensor& like) {
      if (!needed) return Tensor();
      return empty ? at::zeros(like.sizes(), w.options()) : empty_wide(like.sizes(), like);
    };
    const auto pointer = [](const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<T>() : nullptr; };
    // Columns of the weight, and where these are few, groups of rows, which each have a partial gradient of x.
    const int64_t most = kernel.masked_columns;
    const int64_t across = std::max<int64_t>(parts(in, most), 1), blocks = parts(out, kMaskedRows);
    const int64_t afford = kMaxPartialBytes / std::max<int64_t>(batch * in * sizeof(T), 1);
    const int64_t groups = std::max<int64_t>(std::min({kUnits / across, blocks, afford}), 1);
    const Tensor grad_logits = wide(need_logits, logits), grad_weight = wide(need_weight, weight);
    Tensor partial = wide(need_x, x);
    if (need_x && groups > 1 && !empty) partial = empty_wide({groups, x.numel()}, x);
    MaskedLinearArgs<T> args = linear_args<T>(xr, w, l, seed, samples, first, tau);
    args.x = xr.const_data_ptr<T>();
    args.grad = g.const_data_ptr<T>();
    args.grad_logits = pointer(grad_logits);
    args.grad_weight = pointer(grad_weight);
    const double cycles = double(out) * in * samples * (3 + args.rows / 14.0) / (groups * across);
    for_each<T>(empty ? 0 : groups * across, cycles, kernel.masked_linear_scratch(args), x, [&](int64_t unit, T* scratch) {
      const int64_t group = unit / across, column = unit % across * most;
      kernel.masked_linear_backward(args,
                                    {group * blocks / groups * kMaskedRows,
                                     std::min((group + 1) * blocks / groups * kMaskedRows, out), column,
                                     std::min(most, in - column),
                                     need_x ? pointer(partial) + group * x.numel() : nullptr},
                                    scratch);
    });
    if (need_x) result[0] = in_type((groups > 1 && !empty ? partial.sum(0) : partial).view(x.sizes()), type);
    if (need_logits) result[2] = in_type(grad_logits, type);
    if (need_weight) result[1] = in_type(grad_weight, type);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cpu
