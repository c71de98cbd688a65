// template_mix on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "binding.h"
#include "../cpu/template_mix_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

MixShape mix_shape(const Tensor& logits, const Tensor& bank, int64_t mixing) {
  return {leading_size(logits, 1), bank.size(0), bank.size(1), static_cast<int>(mixing)};
}
Tensor numbers(const Tensor& like, int64_t count) {
  return at::empty({count}, like.options().dtype(compute_type(like)));
}
std::vector<int64_t> out_sizes(const Tensor& logits, const Tensor& bank) {
  std::vector<int64_t> sizes = logits.sizes().vec();
  sizes.back() = bank.size(1);
  return sizes;
}

Tensor template_mix_forward(const Tensor& logits_, const Tensor& bank_, int64_t mixing) {
  check_template_mix(logits_, bank_, mixing);
  const c10::cuda::OptionalCUDAGuard guard(bank_.device());
  const Tensor logits = logits_.contiguous(), bank = bank_.contiguous();
  const Tensor out = at::empty(out_sizes(logits, bank), bank.options());
  const MixShape shape = mix_shape(logits, bank, mixing);
  dispatch(bank.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    const Tensor scratch = numbers(bank, template_mix_forward_scratch<T>(shape));
    C10_CUDA_CHECK(cuda::template_mix_forward<T>(data<T>(logits), data<T>(bank), data<T>(out),
                                                 data<Compute<T>>(scratch), shape, stream()));
  });
  return out;
}

std::vector<Tensor> template_mix_backward(const Tensor& grad_, const Tensor& logits_, const Tensor& bank_,
                                          int64_t mixing, std::array<bool, 2> needs) {
  check_template_mix(logits_, bank_, mixing);
  check_like(bank_, grad_, "grad");
  TORCH_CHECK_VALUE(grad_.sizes() == at::IntArrayRef(out_sizes(logits_, bank_)),
                    "grad: expected the shape of the output, got ", grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(bank_.device());
  const Tensor grad = grad_.contiguous(), logits = logits_.contiguous(), bank = bank_.contiguous();
  std::vector<Tensor> result(2);
  if (needs[0]) result[0] = blank_like(logits);
  if (needs[1]) result[1] = blank_like(bank);
  const MixShape shape = mix_shape(logits, bank, mixing);
  if (grad.numel() == 0) {
    zero_those_defined(result);
  } else {
    dispatch(bank.scalar_type(), [&](auto* type) {
      using T = Element<decltype(type)>;
      const Tensor scratch = numbers(bank, template_mix_backward_scratch<T>(shape));
      C10_CUDA_CHECK(cuda::template_mix_backward<T>(data<T>(grad), data<T>(logits), data<T>(bank), data<T>(result[0]),
                                                    data<T>(result[1]), data<Compute<T>>(scratch), shape, stream()));
    });
  }
  return all_defined(std::move(result), bank.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("template_mix_forward", template_mix_forward);
  m.impl("template_mix_backward", template_mix_backward);
}

}  // namespace fastmod::cuda::bindings
