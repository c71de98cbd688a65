// Shared by the torch-facing CPU code of the mask ops.
#pragma once

#include "cpu/host.h"
#include "cpu/sample_mask_kernel.h"

namespace fastmod::cpu {

using at::Tensor;

// The tensors must be readable (host.h); the weight may be undefined.
template <typename T>
MaskArgs<T> mask_args(const Tensor& logits, const Tensor& weight, int64_t first, int64_t samples, const Tensor& seed,
                      int64_t stream, double tau) {
  MaskArgs<T> args{};
  args.count = logits.numel();
  args.first = first;
  args.samples = samples;
  args.seed = seed.item<int64_t>();
  args.stream = static_cast<uint32_t>(stream);
  args.tau = tau;
  args.logits = logits.const_data_ptr<T>();
  args.weight = weight.defined() ? weight.const_data_ptr<T>() : nullptr;
  return args;
}

}  // namespace fastmod::cpu
