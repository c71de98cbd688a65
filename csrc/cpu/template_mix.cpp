// The torch-facing side of weights as mixtures of templates; the work is in template_mix_kernel.h.
#include <ATen/Functions.h>

#include "cpu/host.h"
#include "cpu/template_mix_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

// Pieces of the bank; the gradient of the weights is the sum over them. A fixed number, so that the sum does not depend
// on the number of threads, and a small one, as each partial sum is as large as the weights.
constexpr int64_t kParts = 64;
constexpr int64_t kTileElements = 65536;  // in a tile of the bank and of the gradient: half of a second-level cache

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// In fp64: these are few numbers compared with the bank, and nothing is lost.
template <typename T>
std::vector<double> mixing_weights(const Tensor& logits, int64_t templates, int64_t mixing) {
  const Tensor wide = readable(logits);
  const T* from = wide.const_data_ptr<T>();
  std::vector<double> weights(from, from + wide.numel());
  if (mixing == 1)
    for (double& weight : weights) weight = std::tanh(weight);
  for (size_t row = 0; mixing == 0 && row < weights.size(); row += templates) {
    double *w = &weights[row], sum = 0;
    const double largest = *std::max_element(w, w + templates);
    for (int64_t k = 0; k < templates; ++k) sum += w[k] = std::exp(w[k] - largest);
    for (int64_t k = 0; k < templates; ++k) w[k] /= sum;  // a NaN reaches the sum, and so all weights
  }
  return weights;
}

// Turns the gradient of the weights into that of the logits, in place.
void through_mixing(const std::vector<double>& weights, std::vector<double>& grad, int64_t templates, int64_t mixing) {
  if (mixing == 1)
    for (size_t i = 0; i < grad.size(); ++i) grad[i] *= 1 - weights[i] * weights[i];
  for (size_t row = 0; mixing == 0 && row < grad.size(); row += templates) {
    double mean = 0;
    for (int64_t k = 0; k < templates; ++k) mean += weights[row + k] * grad[row + k];
    for (int64_t k = 0; k < templates; ++k) grad[row + k] = weights[row + k] * (grad[row + k] - mean);
  }
}

template <typename T>
struct Problem {
  Tensor bank, weights;
  std::vector<double> exact;  // the weights
  TemplateMixArgs<T> args{};

  Problem(const Tensor& logits, const Tensor& bank_, int64_t mixing) : bank(readable(bank_)) {
    args.templates = bank.size(0);
    args.rows = leading_size(logits, 1);
    args.size = bank.size(1);
    const int64_t wanted = rounded_up(kTileElements / (args.rows + 2 * args.templates), 64);
    args.tile = std::clamp<int64_t>(wanted, 64, 1024);
    exact = mixing_weights<T>(logits, args.templates, mixing);
    weights = empty_wide({logits.numel()}, bank);
    std::copy(exact.begin(), exact.end(), weights.data_ptr<T>());
    args.weights = weights.const_data_ptr<T>();
    args.bank = bank.const_data_ptr<T>();
  }
  // A product and a sum per lane and cycle, plus some cycles per line of memory.
  double cycles(int64_t columns) const { return columns * (args.rows * args.templates / 16.0 + args.rows / 4.0 + 1); }
};

Tensor template_mix_forward(const Tensor& logits, const Tensor& bank, int64_t mixing) {
  check_template_mix(logits, bank, mixing);
  at::DimVector sizes(logits.sizes());
  sizes.back() = bank.size(1);
  const Tensor out = empty_wide(sizes, bank);
  if (out.numel())
    with_compute_type(bank, [&](auto zero) {
      using T = decltype(zero);
      Problem<T> problem(logits, bank, mixing);
      auto& args = problem.args;
      args.out = out.data_ptr<T>();
      const auto& kernel = kernels<TemplateMixKernels<T>>();
      for_each<T>((args.size + args.tile - 1) / args.tile, problem.cycles(args.tile), 0, bank, [&](int64_t i, T*) {
        kernel.forward(args, i * args.tile, std::min(args.tile, args.size - i * args.tile));
      });
    });
  return in_type(out, bank.scalar_type());
}

std::vector<Tensor> template_mix_backward(const Tensor& grad, const Tensor& logits, const Tensor& bank, int64_t mixing,
                                          std::array<bool, 2> needs) {
  check_template_mix(logits, bank, mixing);
  check_like(bank, grad, "grad");
  TORCH_CHECK_VALUE(grad.dim() == logits.dim() && grad.size(-1) == bank.size(1) &&
                        grad.sizes().slice(0, grad.dim() - 1) == logits.sizes().slice(0, logits.dim() - 1),
                    "grad: expected the shape of the output, got ", grad.sizes());
  const auto type = bank.scalar_type();
  std::vector<Tensor> result(2);
  for (int i = 0; i < 2; ++i)  // empty where not needed; separate tensors, as results of an op must not share memory
    if (!needs[i]) result[i] = at::cpu::empty({0}, bank.options());
  if (grad.numel() == 0) {
    if (needs[0]) result[0] = at::zeros(logits.sizes(), logits.options());
    if (needs[1]) result[1] = at::zeros(bank.sizes(), bank.options());
    return result;
  }
  with_compute_type(bank, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(logits, bank, mixing);
    auto& args = problem.args;
    const Tensor g = readable(grad);
    const Tensor grad_bank = needs[1] ? empty_wide(bank.sizes(), bank) : Tensor();
    args.grad = g.const_data_ptr<T>();
    args.grad_bank = needs[1] ? grad_bank.data_ptr<T>() : nullptr;
    const int64_t share = rounded_up((args.size + kParts - 1) / kParts, args.tile);
    const int64_t parts = (args.size + share - 1) / share, count = logits.numel();
    const Tensor sums = needs[0] ? empty_wide({parts, count}, bank) : Tensor();
    T* sum = needs[0] ? sums.data_ptr<T>() : nullptr;
    const auto& kernel = kernels<TemplateMixKernels<T>>();
    const int64_t scratch_size = needs[0] ? kernel.scratch(args) : 0;
    for_each<T>(parts, 2 * problem.cycles(share), scratch_size, bank, [&](int64_t i, T* scratch) {
      kernel.backward(args, i * share, std::min(args.size, (i + 1) * share), sum ? sum + i * count : nullptr, scratch);
    });
    if (needs[1]) result[1] = in_type(grad_bank, type);
    if (!needs[0]) return;
    std::vector<double> total(count, 0.0);
    for (int64_t i = 0; i < parts; ++i)
      for (int64_t j = 0; j < count; ++j) total[j] += sum[i * count + j];
    through_mixing(problem.exact, total, args.templates, mixing);
    const Tensor grad_logits = empty_wide(logits.sizes(), bank);
    std::copy(total.begin(), total.end(), grad_logits.data_ptr<T>());
    result[0] = in_type(grad_logits, type);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("template_mix_forward", template_mix_forward);
  m.impl("template_mix_backward", template_mix_backward);
}

}  // namespace fastmod::cpu
