#include "cpu/masks.h"
#include "cpu/sample_mask_kernel.h"

namespace fastmod::cpu {
namespace {

constexpr int64_t kWeightsEach = 4096;  // weights per call of the kernel

template <typename T, typename Kernel>
void over_weights(int64_t weights, int64_t samples, double cycles_each, const Tensor& like, Kernel kernel) {
  const int64_t pieces = (weights + kWeightsEach - 1) / kWeightsEach;
  for_each<T>(pieces, kWeightsEach * (2 + samples * cycles_each), 0, like, [&](int64_t piece, T*) {
    kernel(piece * kWeightsEach, std::min(weights, (piece + 1) * kWeightsEach));
  });
}

Tensor sample_mask_forward(const Tensor& logits, const OptionalTensor& weight, int64_t first, int64_t samples,
                           const Tensor& seed, int64_t stream) {
  check_sample_mask(logits, weight, seed, first, samples, stream);
  auto sizes = logits.sizes().vec();
  sizes.insert(sizes.begin(), samples);
  const Tensor out = empty_wide(sizes, logits);
  const Tensor l = readable(logits), w = weight ? readable(*weight) : Tensor();
  with_compute_type(logits, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<SampleMaskKernels<T>>();
    MaskArgs<T> args = mask_args<T>(l, w, first, samples, seed, stream, 1.0);
    args.out = out.data_ptr<T>();
    over_weights<T>(l.numel(), samples, 1.5, logits,
                    [&](int64_t begin, int64_t end) { kernel.forward(args, begin, end); });
  });
  return in_type(out, logits.scalar_type());
}

Tensor sample_mask_backward(const Tensor& grad, const Tensor& logits, const OptionalTensor& weight, int64_t first,
                            int64_t samples, const Tensor& seed, int64_t stream, double tau,
                            const OptionalTensor& base) {
  check_sample_mask(logits, weight, seed, first, samples, stream);
  check_like(logits, grad, "grad");
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  TORCH_CHECK_VALUE(grad.dim() == logits.dim() + 1 && grad.size(0) == samples && grad[0].sizes() == logits.sizes(),
                    "grad: expected [", samples, "] and the shape of logits, ", logits.sizes(), ", got ", grad.sizes());
  if (base) check_like(logits, *base, "base");
  TORCH_CHECK_VALUE(!base || base->sizes() == logits.sizes(), "base: expected the shape of logits");
  const Tensor out = empty_wide(logits.sizes(), logits);
  const Tensor g = readable(grad), l = readable(logits), w = weight ? readable(*weight) : Tensor();
  const Tensor b = base ? readable(*base) : Tensor();
  with_compute_type(logits, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<SampleMaskKernels<T>>();
    MaskArgs<T> args = mask_args<T>(l, w, first, samples, seed, stream, tau);
    args.grad = g.const_data_ptr<T>();
    args.base = base ? b.const_data_ptr<T>() : nullptr;
    args.grad_logits = out.data_ptr<T>();
    over_weights<T>(l.numel(), samples, 3, logits,
                    [&](int64_t begin, int64_t end) { kernel.backward(args, begin, end); });
  });
  return in_type(out, logits.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("sample_mask_forward", sample_mask_forward);
  m.impl("sample_mask_backward", sample_mask_backward);
}

}  // namespace fastmod::cpu
