#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include "cpu/host.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

BlockSizes sizes_of(const Tensor& blocks, const Tensor& logits) {
  check_multiplex(blocks, logits);
  return {leading_size(blocks, 2), blocks.size(-2), logits.size(-1), blocks.size(-1)};
}

constexpr int64_t kElementsEach = 64;  // batch elements that one call of the kernel takes

int64_t pieces(const BlockSizes& s) { return (s.batch + kElementsEach - 1) / kElementsEach; }

// A rough count: products, exponentials, the passes over memory.
double cycles_per_piece(const BlockSizes& s) {
  return double(kElementsEach) * (100 + s.m * s.n * s.d / 12.0 + (s.m * s.d + s.n * s.d) * 0.2 + s.m * s.n);
}

Tensor multiplex_forward(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
                         const OptionalTensor& seed, int64_t mode) {
  const BlockSizes size = sizes_of(blocks, logits);
  const Routing routing = read_routing(tau, tau_value, seed, mode);
  auto shape = blocks.sizes().vec();
  shape[shape.size() - 2] = size.n;
  const Tensor out = empty_wide(shape, blocks);
  if (out.numel() == 0) return in_type(out, blocks.scalar_type());
  const Tensor b = readable(blocks), l = readable(logits);
  with_compute_type(blocks, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    MultiplexArgs<T> args{size, routing, b.const_data_ptr<T>(), l.const_data_ptr<T>(), nullptr, out.data_ptr<T>()};
    for_each<T>(pieces(size), cycles_per_piece(size), kernel.multiplex_scratch(size), blocks,
                [&](int64_t piece, T* scratch) {
                  const int64_t begin = piece * kElementsEach;
                  kernel.multiplex_forward(args, begin, std::min(size.batch, begin + kElementsEach), scratch);
                });
  });
  return in_type(out, blocks.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> multiplex_backward(const Tensor& grad, const Tensor& blocks, const Tensor& logits,
                                                      const OptionalTensor& tau, double tau_value,
                                                      const OptionalTensor& seed, int64_t mode) {
  const BlockSizes size = sizes_of(blocks, logits);
  const Routing routing = read_routing(tau, tau_value, seed, mode);
  TORCH_CHECK_VALUE(grad.dim() == blocks.dim() && grad.numel() == size.batch * size.n * size.d,
                    "grad: expected [..., N, D], got ", grad.sizes());
  check_like(blocks, grad, "grad");
  const auto wide = blocks.options().dtype(compute_type(blocks));
  if (grad.numel() == 0)
    return {at::zeros(blocks.sizes(), blocks.options()), at::zeros(logits.sizes(), logits.options()),
            at::zeros({}, wide)};
  const Tensor g = readable(grad), b = readable(blocks), l = readable(logits);
  const Tensor grad_blocks = empty_wide(blocks.sizes(), blocks), grad_logits = empty_wide(logits.sizes(), logits);
  std::vector<double> grad_tau(pieces(size));
  with_compute_type(blocks, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    MultiplexArgs<T> args{size,
                          routing,
                          b.const_data_ptr<T>(),
                          l.const_data_ptr<T>(),
                          g.const_data_ptr<T>(),
                          nullptr,
                          grad_blocks.data_ptr<T>(),
                          grad_logits.data_ptr<T>(),
                          tau.has_value()};
    for_each<T>(pieces(size), 2.5 * cycles_per_piece(size), kernel.multiplex_scratch(size), blocks,
                [&](int64_t piece, T* scratch) {
                  const int64_t begin = piece * kElementsEach;
                  grad_tau[piece] =
                      kernel.multiplex_backward(args, begin, std::min(size.batch, begin + kElementsEach), scratch);
                });
  });
  return {in_type(grad_blocks, blocks.scalar_type()), in_type(grad_logits, logits.scalar_type()),
          at::scalar_tensor(sum_in_order(grad_tau), wide)};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("multiplex_forward", multiplex_forward);
  m.impl("multiplex_backward", multiplex_backward);
}

}  // namespace fastmod::cpu
