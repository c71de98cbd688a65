// The whole optimiser step, clipping included, in one call: small models have few numbers in many tensors, so that even
// one call per tensor costs more than the arithmetic. fastmod/optim.py defines the schema and is the only caller.
#include <ATen/ops/empty_like.h>

#include <limits>

#include "cpu/host.h"
#include "cpu/adam_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using at::TensorList;
using Numbers = at::ArrayRef<double>;

constexpr int64_t kElementsEach = 8192;  // fixed, so that the norm does not depend on the number of threads

// Above this size, parameters, gradients and both moments together overflow most last-level caches.
constexpr size_t kLargeBytes = 8 << 20;

struct Piece {
  size_t tensor;
  int64_t first, count;
};

std::vector<Piece> pieces_of(TensorList tensors) {
  std::vector<Piece> pieces;
  for (size_t t = 0; t < tensors.size(); ++t)
    for (int64_t first = 0; first < tensors[t].numel(); first += kElementsEach)
      pieces.push_back({t, first, std::min(kElementsEach, tensors[t].numel() - first)});
  return pieces;
}

// body(index of the piece, a float or double zero that tells its dtype)
template <typename Body>
void for_each_piece(TensorList tensors, const std::vector<Piece>& pieces, double cycles_per_element, const Body& body) {
  if (pieces.empty()) return;
  double elements = 0;
  for (const Piece& piece : pieces) elements += piece.count;
  // The average over the pieces, most of which are smaller than kElementsEach.
  const double cycles_each = elements * cycles_per_element / pieces.size();
  for_each<float>(pieces.size(), cycles_each, 0, tensors[0], [&](int64_t i, float*) {
    with_compute_type(tensors[pieces[i].tensor], [&](auto zero) { body(i, zero); });
  });
}

// Whether the kernels can treat it as a plain array of fp32 or fp64.
bool is_array(const Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
}

bool fits(const Tensor& tensor, const Tensor& param) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == param.scalar_type() &&
         tensor.sizes() == param.sizes();
}

bool is_step(const Tensor& step) {
  return step.device().is_cpu() && step.layout() == at::kStrided && step.numel() == 1 &&
         (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble);
}

// The factor of clip_grad_norm_; a NaN norm gives NaN.
double clipping_scale(double square_sum, double max_norm) {
  const double norm = std::sqrt(square_sum);
  return std::isnan(norm) ? norm : std::min(max_norm / (norm + 1e-6), 1.0);
}

double counted(const Tensor& step) {
  return with_compute_type(step, [&](auto zero) -> double { return *step.data_ptr<decltype(zero)>() += 1; });
}

// `params` holds the parameters of all groups, one group after the other. max_norm <= 0: no clipping. Returns false and
// does nothing if the kernels cannot handle one of the tensors: the caller then leaves the step to torch.
bool adam_(TensorList params, TensorList grads, TensorList means, TensorList squares, TensorList steps,
           at::IntArrayRef group_sizes, Numbers lrs, Numbers beta1s, Numbers beta2s, Numbers epsilons,
           double max_norm) {
  const size_t count = params.size(), groups = group_sizes.size();
  TORCH_CHECK_VALUE(
      grads.size() == count && means.size() == count && squares.size() == count && steps.size() == count,
      "params: expected as many as gradients, moments and steps, got ", count);
  TORCH_CHECK_VALUE(
      lrs.size() == groups && beta1s.size() == groups && beta2s.size() == groups && epsilons.size() == groups,
      "group_sizes: expected as many as numbers of the groups, got ", groups);
  int64_t grouped = 0;
  for (int64_t size : group_sizes) {
    TORCH_CHECK_VALUE(size >= 0, "group_sizes: expected 0 or more each, got ", size);
    grouped += size;
  }
  TORCH_CHECK_VALUE(grouped == static_cast<int64_t>(count), "group_sizes: expected a sum of ", count, ", got ",
                    grouped);

  std::vector<Tensor> slopes;  // the gradients, in the memory layout of the parameters
  slopes.reserve(count);
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& param = params[i];
    const auto strides = param.strides();
    if (!is_array(param) || !fits(grads[i], param) || !is_step(steps[i])) return false;
    for (const Tensor* moment : {&means[i], &squares[i]})
      if (!fits(*moment, param) || moment->strides() != strides) return false;
    bytes += param.nbytes();
    slopes.push_back(grads[i].strides() == strides ? grads[i] : at::empty_like(param).copy_(grads[i]));
  }

  const auto pieces = pieces_of(params);
  double scale = 1;
  if (max_norm > 0) {
    std::vector<double> parts(pieces.size());
    for_each_piece(params, pieces, 0.3, [&](int64_t i, auto zero) {
      using T = decltype(zero);
      const auto [t, first, length] = pieces[i];
      parts[i] = kernels<AdamKernels<T>>().square_sum(slopes[t].const_data_ptr<T>() + first, length);
    });
    scale = clipping_scale(sum_in_order(parts), max_norm);
  }

  std::vector<AdamArgs> args;
  args.reserve(count);
  for (size_t group = 0; group < groups; ++group) {
    const double beta1 = beta1s[group], beta2 = beta2s[group];
    // Most parameters have made as many steps as the one before them: their arguments are reused.
    double last = std::numeric_limits<double>::quiet_NaN();
    for (int64_t i = 0; i < group_sizes[group]; ++i) {
      const double made = counted(steps[args.size()]);
      if (made == last) {
        args.push_back(args.back());
        continue;
      }
      last = made;
      args.push_back({scale, beta1, beta2, lrs[group] / (1 - std::pow(beta1, made)),
                      1 / std::sqrt(1 - std::pow(beta2, made)), epsilons[group], bytes >= kLargeBytes});
    }
  }
  for_each_piece(params, pieces, 3, [&](int64_t i, auto zero) {
    using T = decltype(zero);
    const auto [t, first, length] = pieces[i];
    kernels<AdamKernels<T>>().update(args[t], length, slopes[t].const_data_ptr<T>() + first,
                                     params[t].data_ptr<T>() + first, means[t].data_ptr<T>() + first,
                                     squares[t].data_ptr<T>() + first);
  });
  for (const TensorList& changed : {params, means, squares, steps})
    for (const Tensor& tensor : changed) tensor.unsafeGetTensorImpl()->bump_version();  // autograd sees the change
  return true;
}

}  // namespace

// Registered for any device and layout: adam_ itself returns false for tensors it cannot handle.
TORCH_LIBRARY_IMPL(fastmod, CompositeExplicitAutograd, m) { m.impl("adam_", adam_); }

TORCH_LIBRARY_IMPL(fastmod, Autograd, m) { m.impl("adam_", torch::CppFunction::makeFallthrough()); }

}  // namespace fastmod::cpu
