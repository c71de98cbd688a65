// masked_linear on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "image_binding.h"
#include "../cpu/masked_linear_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// Whether tf32 is allowed, as for cuBLAS.
bool matmul_tf32() { return at::globalContext().allowTF32CuBLAS(); }

// A tensor whose copies are contiguous; copies that share memory (an expanded tensor) keep sharing it.
struct Stacked {
  Tensor dense;
  int64_t step = 0;  // from one copy to the next
  Stacked(const OptionalTensor& tensor, int64_t copies, bool stacked) {
    if (!tensor || !tensor->defined()) return;
    const bool one = stacked && copies > 1 && tensor->stride(0) == 0;
    dense = (one ? tensor->select(0, 0) : *tensor).contiguous();
    if (stacked && !one && copies > 0) step = dense.numel() / copies;
  }
};

// The inputs, and the shape of one copy.
struct Inputs {
  bool stacked;
  int64_t copies;
  Stacked x, weight, logits, biases, grad, seed;
  LinearShape shape;
  Inputs(const Tensor& x_, const Tensor& weight_, const Tensor& logits_, const OptionalTensor& biases_,
         const OptionalTensor& grad_, const Tensor& seed_, int64_t samples)
      : stacked(stacked_layers(weight_)),
        copies(stacked ? weight_.size(0) : 1),
        x(x_, copies, stacked),
        weight(weight_, copies, stacked),
        logits(logits_, copies, stacked),
        biases(biases_, copies, stacked),
        grad(grad_, copies, stacked),
        seed(seed_, copies, stacked && seed_.dim() == 1) {
    const int64_t rows = copies == 0 ? 0 : leading_size(x_, 1) / (samples * copies);
    shape = {rows, weight_.size(-2), weight_.size(-1),
             {copies, x.step, grad.step, weight.step, logits.step, biases.step, seed.step}};
  }
};

Tensor masked_linear_forward(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& biases,
                              const Tensor& seed, int64_t samples, int64_t first, LowType low) {
  check_masked_linear(x, weight, logits, biases, seed, samples, first, low);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Inputs in(x, weight, logits, biases, std::nullopt, seed, samples);
  const MaskNoise noise = mask_noise(x, first, samples, in.seed.dense, kStreamMask);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = in.shape.out;
  const auto type = low.value_or(x.scalar_type());
  const Tensor out = at::empty(sizes, x.options().dtype(type));
  dispatch(type, [&](auto* type) {
    using T = Element<decltype(type)>;
    const Workspace space(x, masked_linear_scratch<T>(in.shape, samples, false));
    C10_CUDA_CHECK(cuda::masked_linear_forward<T>(mixed<const T>(in.x.dense), mixed<const T>(in.weight.dense),
                                                  mixed<const T>(in.logits.dense), mixed<const T>(in.biases.dense),
                                                  data<T>(out),
                                                  data<Compute<T>>(space.numbers), data<unsigned>(space.tickets),
                                                  matmul_tf32(), in.shape, noise, stream()));
  });
  return out;
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& logits, const Tensor& seed, int64_t samples, double tau,
                                            std::array<bool, 3> needs, int64_t first, LowType low) {
  check_masked_linear_grad(grad, x, weight, logits, seed, samples, first, tau, low);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Inputs in(x, weight, logits, std::nullopt, grad, seed, samples);
  const MaskNoise noise = mask_noise(x, first, samples, in.seed.dense, kStreamMask);
  const auto wanted = [](bool needed, const Tensor& like) { return needed ? blank_like(like) : Tensor(); };
  const auto [need_x, need_weight, need_logits] = needs;
  const Tensor grad_x = wanted(need_x, x), grad_weight = wanted(need_weight, weight);
  const Tensor grad_logits = wanted(need_logits, logits);
  dispatch(low.value_or(x.scalar_type()), [&](auto* type) {
    using T = Element<decltype(type)>;
    if (grad_x.defined()) {
      const Workspace space(x, masked_linear_scratch<T>(in.shape, samples, true));
      C10_CUDA_CHECK(masked_linear_backward_x<T>(data<T>(in.grad.dense), mixed<const T>(in.weight.dense),
                                                 mixed<const T>(in.logits.dense), mixed<T>(grad_x),
                                                 data<Compute<T>>(space.numbers), data<unsigned>(space.tickets),
                                                 matmul_tf32(), in.shape, noise, stream()));
    }
    if (grad_weight.defined() || grad_logits.defined())
      C10_CUDA_CHECK(masked_linear_backward_weight<T>(data<T>(in.grad.dense), mixed<const T>(in.x.dense),
                                                      mixed<const T>(in.weight.dense), mixed<const T>(in.logits.dense),
                                                      mixed<T>(grad_weight), mixed<T>(grad_logits),
                                                      static_cast<Compute<T>>(tau), matmul_tf32(), in.shape, noise,
                                                      stream()));
  });
  std::vector<Tensor> result{grad_x, grad_weight, grad_logits};
  for (Tensor& tensor : result)
    if (!tensor.defined()) tensor = in.stacked ? at::empty({in.copies, 0}, x.options()) : at::empty({0}, x.options());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cuda::bindings
