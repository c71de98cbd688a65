#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "cpu/host.h"
#include "cpu/multiplex_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kElementsEach = 64;  // batch elements per call of the kernel

// Copies that share a call, one after the other in memory, each with its own temperature and seed. Elements, and with
// them noise and pieces, are counted within each copy as if it were alone.
struct Copies {
  BlockSizes size;  // of one copy
  int64_t dim;      // 0: one copy, and tensors have no such dimension
  std::vector<Routing> routings;
  int64_t pieces;  // of one copy

  Copies(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
         const OptionalTensor& seed, int64_t mode, const LowType& low)
      : size{0, blocks.size(-2), logits.size(-1), blocks.size(-1)},
        dim(check_multiplex(blocks, logits, tau, seed, low)) {
    size.batch = leading_size(blocks, 2) / count();
    pieces = (size.batch + kElementsEach - 1) / kElementsEach;
    if (!dim) {
      routings = {read_routing(tau, tau_value, seed, mode)};
      return;
    }
    check_routing(tau, tau_value, seed, mode, dim);
    for (int64_t i = 0; i < dim; ++i) {
      const auto own = [&](const OptionalTensor& numbers) {
        return numbers ? OptionalTensor(numbers->select(0, i)) : OptionalTensor();
      };
      routings.push_back(read_routing(own(tau), tau_value, own(seed), mode));
    }
  }
  int64_t count() const { return std::max<int64_t>(dim, 1); }
  at::IntArrayRef taus() const { return dim ? at::IntArrayRef(dim) : at::IntArrayRef(); }

  // A rough estimate: products, exponentials, passes over memory.
  double cycles_per_piece() const {
    const BlockSizes& s = size;
    return double(kElementsEach) * (100 + s.m * s.n * s.d / 12.0 + (s.m * s.d + s.n * s.d) * 0.2 + s.m * s.n);
  }
  // Calls run(args of a copy, first and last element, scratch, number of the piece) for all pieces of all copies.
  template <typename T, typename Run>
  void for_pieces(const MultiplexArgs<T>& all, double cycles, int64_t scratch_size, const Tensor& like,
                  const Run& run) const {
    for_each<T>(count() * pieces, cycles, scratch_size, like, [&](int64_t piece, T* scratch) {
      const int64_t copy = dim ? piece / pieces : 0, begin = (piece - copy * pieces) * kElementsEach;
      const int64_t end = std::min(size.batch, begin + kElementsEach);
      copy ? run(of_copy(all, copy), begin, end, scratch, piece) : run(all, begin, end, scratch, piece);
    });
  }
  template <typename T>
  MultiplexArgs<T> of_copy(MultiplexArgs<T> args, int64_t copy) const {
    const int64_t rows = copy * size.batch;
    const auto move = [&](auto*& pointer, int64_t each) {
      if (pointer) pointer += rows * each;
    };
    move(args.blocks, size.m * size.d);
    move(args.logits, size.m * size.n);
    move(args.grad, size.n * size.d);
    move(args.out, size.n * size.d);
    move(args.grad_blocks, size.m * size.d);
    move(args.grad_logits, size.m * size.n);
    args.routing = routings[copy];
    return args;
  }
};

Tensor multiplex_forward(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
                         const OptionalTensor& seed, int64_t mode, LowType low) {
  const Copies copies(blocks, logits, tau, tau_value, seed, mode, low);
  auto shape = blocks.sizes().vec();
  shape[shape.size() - 2] = copies.size.n;
  const Tensor out = empty_wide(shape, blocks);
  const auto type = low.value_or(blocks.scalar_type());
  if (out.numel() == 0) return in_type(out, type);
  const Tensor b = readable(blocks, low), l = readable(logits, low);
  with_compute_type(blocks, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<MultiplexKernels<T>>();
    const MultiplexArgs<T> all{copies.size, copies.routings[0], b.const_data_ptr<T>(), l.const_data_ptr<T>(), nullptr,
                               out.data_ptr<T>()};
    copies.for_pieces(all, copies.cycles_per_piece(), kernel.scratch(copies.size), blocks,
                      [&](const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* scratch, int64_t) {
                        kernel.forward(args, begin, end, scratch);
                      });
  });
  return in_type(out, type);
}

std::tuple<Tensor, Tensor, Tensor> multiplex_backward(const Tensor& grad, const Tensor& blocks, const Tensor& logits,
                                                      const OptionalTensor& tau, double tau_value,
                                                      const OptionalTensor& seed, int64_t mode, LowType low) {
  const Copies copies(blocks, logits, tau, tau_value, seed, mode, low);
  const BlockSizes& size = copies.size;
  TORCH_CHECK_VALUE(grad.dim() == blocks.dim() && grad.numel() == copies.count() * size.batch * size.n * size.d,
                    "grad: expected [..., N, D], got ", grad.sizes());
  check_grad(blocks, grad, low);
  const auto wide = blocks.options().dtype(compute_type(blocks));
  if (grad.numel() == 0)
    return {at::zeros(blocks.sizes(), blocks.options()), at::zeros(logits.sizes(), logits.options()),
            at::zeros(copies.taus(), wide.dtype(tau_type(tau, blocks)))};
  const Tensor g = readable(grad), b = readable(blocks, low), l = readable(logits, low);
  const Tensor grad_blocks = empty_wide(blocks.sizes(), blocks), grad_logits = empty_wide(logits.sizes(), logits);
  const Tensor grad_tau = at::empty(copies.taus(), wide);
  std::vector<double> parts(copies.count() * copies.pieces);
  with_compute_type(blocks, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<MultiplexKernels<T>>();
    const MultiplexArgs<T> all{size,
                               copies.routings[0],
                               b.const_data_ptr<T>(),
                               l.const_data_ptr<T>(),
                               g.const_data_ptr<T>(),
                               nullptr,
                               grad_blocks.data_ptr<T>(),
                               grad_logits.data_ptr<T>(),
                               tau.has_value()};
    copies.for_pieces(all, 2.5 * copies.cycles_per_piece(), kernel.scratch(size), blocks,
                      [&](const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* scratch, int64_t piece) {
                        parts[piece] = kernel.backward(args, begin, end, scratch);
                      });
    for (int64_t copy = 0; copy < copies.count(); ++copy) {
      const auto first = parts.begin() + copy * copies.pieces;
      grad_tau.data_ptr<T>()[copy] = static_cast<T>(std::accumulate(first, first + copies.pieces, 0.0));
    }
  });
  return {in_type(grad_blocks, blocks.scalar_type()), in_type(grad_logits, logits.scalar_type()),
          in_type(grad_tau, tau_type(tau, blocks))};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("multiplex_forward", multiplex_forward);
  m.impl("multiplex_backward", multiplex_backward);
}

}  // namespace fastmod::cpu
