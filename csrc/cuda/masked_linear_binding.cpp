// masked_linear on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

// As cuBLAS is allowed to.
bool matmul_tf32() { return at::globalContext().allowTF32CuBLAS(); }

LinearShape linear_shape(const Tensor& x, const Tensor& weight, int64_t samples) {
  return {leading_size(x, 1) / samples, weight.size(0), weight.size(1)};
}

Tensor masked_linear_forward(const Tensor& x_, const Tensor& weight_, const Tensor& logits_,
                              const OptionalTensor& biases_, const Tensor& seed, int64_t samples, int64_t first) {
  check_masked_linear(x_, weight_, logits_, biases_, seed, samples, first);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const LinearShape shape = linear_shape(x_, weight_, samples);
  const MaskNoise noise = mask_noise(x_, first, samples, seed, kStreamMask);
  const Tensor x = x_.contiguous(), weight = weight_.contiguous(), logits = logits_.contiguous();
  const Tensor biases = dense(biases_);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = shape.out;
  const Tensor out = at::empty(sizes, x.options());
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    const Workspace space(x, masked_linear_scratch<T>(shape, samples, false));
    C10_CUDA_CHECK(cuda::masked_linear_forward<T>(data<T>(x), data<T>(weight), data<T>(logits), data<T>(biases),
                                                  data<T>(out), data<Compute<T>>(space.numbers),
                                                  data<unsigned>(space.tickets), matmul_tf32(), shape, noise, stream()));
  });
  return out;
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight_,
                                            const Tensor& logits_, const Tensor& seed, int64_t samples, double tau,
                                            std::array<bool, 3> needs, int64_t first) {
  check_masked_linear_grad(grad_, x_, weight_, logits_, seed, samples, first, tau);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const LinearShape shape = linear_shape(x_, weight_, samples);
  const MaskNoise noise = mask_noise(x_, first, samples, seed, kStreamMask);
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  const Tensor weight = weight_.contiguous(), logits = logits_.contiguous();
  const auto wanted = [](bool needed, const Tensor& like) { return needed ? blank_like(like) : Tensor(); };
  const auto [need_x, need_weight, need_logits] = needs;
  const Tensor grad_x = wanted(need_x, x), grad_weight = wanted(need_weight, weight);
  const Tensor grad_logits = wanted(need_logits, logits);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    if (grad_x.defined()) {
      const Workspace space(x, masked_linear_scratch<T>(shape, samples, true));
      C10_CUDA_CHECK(masked_linear_backward_x<T>(data<T>(grad), data<T>(weight), data<T>(logits), data<T>(grad_x),
                                                 data<Compute<T>>(space.numbers), data<unsigned>(space.tickets),
                                                 matmul_tf32(), shape, noise, stream()));
    }
    if (grad_weight.defined() || grad_logits.defined())
      C10_CUDA_CHECK(masked_linear_backward_weight<T>(data<T>(grad), data<T>(x), data<T>(weight), data<T>(logits),
                                                      data<T>(grad_weight), data<T>(grad_logits),
                                                      static_cast<Compute<T>>(tau), matmul_tf32(), shape, noise,
                                                      stream()));
  });
  std::vector<Tensor> result{grad_x, grad_weight, grad_logits};
  for (Tensor& tensor : result)
    if (!tensor.defined()) tensor = at::empty({0}, x.options());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cuda::bindings
