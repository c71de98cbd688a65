// The entropy of softmax rows. They have only a few numbers each, so plain loops in fp64 do.
#include <ATen/Functions.h>

#include <limits>

#include "cpu/host.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kRowsEach = 64;  // fixed, so that the sum does not depend on the number of threads

// Sums of one row, in u = largest logit - logit: the entropy is log(1 + sum of the others) + mean of u under the
// softmax. All terms are positive, so that none cancels near one-hot.
struct Row {
  int64_t top = 0;
  double others = 0, mean = 0;  // sum of exp(-u) without the largest; mean of u

  template <typename T>
  Row(const T* x, int64_t count) {
    for (int64_t k = 1; k < count; ++k)
      if (!(x[k] <= x[top]) && x[top] == x[top]) top = k;  // the first NaN counts as the largest
    double sum = 0;
    for (int64_t k = 0; k < count; ++k) {
      if (k == top && x[k] == x[k]) continue;
      const double e = weight(x, k);
      others += e;
      sum += e == 0 && gone(x[k]) ? 0 : e * apart(x, k);
    }
    mean = sum / (1 + others);
  }
  template <typename T>
  static bool gone(T x) { return x == -std::numeric_limits<T>::infinity(); }
  template <typename T>
  double apart(const T* x, int64_t k) const { return double(x[top]) - double(x[k]); }
  template <typename T>
  double weight(const T* x, int64_t k) const { return std::exp(-apart(x, k)); }
  double entropy() const { return std::log1p(others) + mean; }
};

Tensor entropy_penalty_forward(const Tensor& logits) {
  check_logits(logits);
  const Tensor x = readable(logits);
  const int64_t rows = leading_size(x, 1), count = x.size(-1), pieces = (rows + kRowsEach - 1) / kRowsEach;
  std::vector<double> parts(pieces);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const T* data = x.const_data_ptr<T>();
    for_each<T>(pieces, kRowsEach * count * 20.0, 0, x, [&](int64_t piece, T*) {
      double sum = 0;
      for (int64_t row = piece * kRowsEach; row < std::min(rows, (piece + 1) * kRowsEach); ++row)
        sum += Row(data + row * count, count).entropy();
      parts[piece] = sum;
    });
  });
  return at::scalar_tensor(sum_in_order(parts), x.options());
}

Tensor entropy_penalty_backward(const Tensor& grad, const Tensor& logits) {
  check_logits(logits);
  TORCH_CHECK_VALUE(grad.numel() == 1, "grad: expected a scalar, got ", grad.sizes());
  const double scale = grad.item<double>();
  const Tensor x = readable(logits), out = empty_wide(logits.sizes(), logits);
  const int64_t rows = leading_size(x, 1), count = x.size(-1);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const T* data = x.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    for_each<T>((rows + kRowsEach - 1) / kRowsEach, kRowsEach * count * 40.0, 0, x, [&](int64_t piece, T*) {
      for (int64_t row = piece * kRowsEach; row < std::min(rows, (piece + 1) * kRowsEach); ++row) {
        const T* from = data + row * count;
        const Row found(from, count);
        for (int64_t k = 0; k < count; ++k) {
          const double share = found.weight(from, k) / (1 + found.others);
          const bool gone = Row::gone(from[k]) && share == 0;
          to[row * count + k] = static_cast<T>(gone ? 0 : scale * share * (found.apart(from, k) - found.mean));
        }
      }
    });
  });
  return in_type(out, logits.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("entropy_penalty_forward", entropy_penalty_forward);
  m.impl("entropy_penalty_backward", entropy_penalty_backward);
}

}  // namespace fastmod::cpu
