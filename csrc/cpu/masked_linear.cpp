// The torch-facing side of linear layers under sampled masks; the work is in masked_linear_kernel.h.
#include <ATen/Functions.h>

#include "cpu/masks.h"
#include "cpu/masked_linear_kernel.h"
#include "cpu/vec.h"
#include "philox.h"

namespace fastmod::cpu {
namespace {

constexpr int64_t kInputUnits = 16;  // least number of units of work for the gradient of x

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

// [S, rows, in] as tiles of kTile rows, each transposed, so that products need no other packing.
template <typename T>
Tensor transposed_tiles(const Tensor& x, const MaskedLinearArgs<T>& args) {
  const Tensor turned = at::empty_like(x);
  const T* from = x.const_data_ptr<T>();
  T* to = turned.data_ptr<T>();
  const int64_t each = tiles(args.rows);
  for_each<T>(args.mask.samples * each, double(kTile) * args.in, 0, x, [&](int64_t index, T*) {
    const int64_t row = index % each * kTile, width = std::min(kTile, args.rows - row);
    const int64_t place = (index / each * args.rows + row) * args.in;
    kernels<VectorKernels<T>>().transpose(from + place, args.in, width, args.in, to + place, width);
  });
  return turned;
}

Tensor masked_linear_forward(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& biases,
                              const Tensor& seed, int64_t samples, int64_t first, LowType low) {
  check_masked_linear(x, weight, logits, biases, seed, samples, first, low);
  if (stacked_layers(weight)) {
    std::vector<Tensor> found;
    for (int64_t i = 0; i < weight.size(0); ++i) {
      const auto added = biases ? OptionalTensor(biases->select(0, i)) : OptionalTensor();
      found.push_back(masked_linear_forward(x.select(0, i), weight.select(0, i), logits.select(0, i), added,
                                            seed.dim() == 1 ? seed.select(0, i) : seed, samples, first, low));
    }
    return at::stack(found);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  const Tensor out = empty_wide(sizes, x);
  const auto type = low.value_or(x.scalar_type());
  if (out.numel() == 0) return in_type(out, type);
  const Tensor xr = readable(x, low), w = readable(weight, low), l = readable(logits, low);
  const Tensor added = biases ? readable(*biases, low) : Tensor();
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<MaskedLinearKernels<T>>();
    MaskedLinearArgs<T> args = linear_args<T>(xr, w, l, seed, samples, first, 1.0);
    const Tensor turned = transposed_tiles<T>(xr, args);
    args.tiles = turned.const_data_ptr<T>();
    args.bias = biases ? added.const_data_ptr<T>() : nullptr;
    args.result = out.data_ptr<T>();
    const double cycles = double(kMaskedRows) * args.in * samples * (1.5 + args.rows / 28.0);
    for_each<T>(parts(args.out, kMaskedRows), cycles, kernel.scratch(args), x,
                [&](int64_t block, T* scratch) { kernel.forward(args, block, scratch); });
  });
  return in_type(out, type);
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& logits, const Tensor& seed, int64_t samples, double tau,
                                            std::array<bool, 3> needs, int64_t first, LowType low) {
  check_masked_linear_grad(grad, x, weight, logits, seed, samples, first, tau, low);
  if (stacked_layers(weight)) {
    std::vector<Tensor> found[3], stacked;
    for (int64_t i = 0; i < weight.size(0); ++i) {
      const auto own = masked_linear_backward(grad.select(0, i), x.select(0, i), weight.select(0, i),
                                              logits.select(0, i), seed.dim() == 1 ? seed.select(0, i) : seed, samples,
                                              tau, needs, first, low);
      for (int j = 0; j < 3; ++j) found[j].push_back(own[j]);
    }
    for (const auto& each : found) stacked.push_back(at::stack(each));
    return stacked;
  }
  const auto [need_x, need_weight, need_logits] = needs;
  const int64_t batch = leading_size(x, 1), out = weight.size(0), in = weight.size(1);
  std::vector<Tensor> result;  // empty where not needed; separate tensors, as results of an op must not share memory
  for (int i = 0; i < 3; ++i) result.push_back(at::empty({0}, x.options()));
  const Tensor g = readable(grad), xr = readable(x, low), w = readable(weight, low), l = readable(logits, low);
  const bool empty = batch == 0 || out == 0 || in == 0;
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<MaskedLinearKernels<T>>();
    const auto wide = [&](bool needed, const Tensor& like) {
      if (!needed) return Tensor();
      return empty ? at::zeros(like.sizes(), w.options()) : empty_wide(like.sizes(), like);
    };
    const auto pointer = [](const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<T>() : nullptr; };
    const Tensor grad_logits = wide(need_logits, logits), grad_weight = wide(need_weight, weight);
    const Tensor grad_x = wide(need_x, x);
    if (!empty) {
      MaskedLinearArgs<T> args = linear_args<T>(xr, w, l, seed, samples, first, tau);
      args.x = xr.const_data_ptr<T>();
      args.grad = g.const_data_ptr<T>();
      args.grad_logits = pointer(grad_logits);
      args.grad_weight = pointer(grad_weight);
      // The gradient of x is computed separately, from masks stored as bits: otherwise each part of the weight would
      // need its own sum of it.
      const Tensor kept =
          at::cpu::empty({need_x ? samples * out * parts(in, kernels<VectorKernels<T>>().lanes) : 0}, at::kShort);
      args.kept = need_x ? reinterpret_cast<uint16_t*>(kept.data_ptr<int16_t>()) : nullptr;
      std::atomic<bool> has_nan{false};
      const int64_t most = kernel.columns, across = parts(in, most);
      const double cycles = double(kMaskedRows) * std::min(in, most) * samples * (3 + args.rows / 28.0);
      for_each<T>(parts(out, kMaskedRows) * across, cycles, kernel.scratch(args), x, [&](int64_t unit, T* scratch) {
        if (kernel.weight_grad(args, unit / across, unit % across * most, scratch))
          has_nan.store(true, std::memory_order_relaxed);
      });
      args.has_nan = has_nan;
      // Results do not depend on which samples share a unit. With enough units all do, so that the weight is read once.
      const int64_t panels = parts(in, kernel.panel), shares = std::min(samples, parts(kInputUnits, panels));
      const double each = double(out) * kernel.panel * samples / shares * (0.3 + args.rows / 28.0);
      for_each<T>(need_x ? panels * shares : 0, each, kernel.panel_scratch, x, [&](int64_t unit, T* scratch) {
        const int64_t share = unit / panels;
        kernel.input_grad(
            args,
            {unit % panels * kernel.panel, share * samples / shares, (share + 1) * samples / shares, pointer(grad_x)},
            scratch);
      });
    }
    if (need_x) result[0] = in_type(grad_x, x.scalar_type());
    if (need_logits) result[2] = in_type(grad_logits, logits.scalar_type());
    if (need_weight) result[1] = in_type(grad_weight, weight.scalar_type());
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cpu
