// What the backends share of the masked layers, in masks.cpp.
#pragma once

#include <array>
#include <vector>

#include "ops.h"

namespace fastmod {

// The tensors a masked layer can have a gradient for, in the order of every list of gradients.
enum MaskedInput { kX, kWeight, kLogits, kBias, kBiasLogits, kMaskedInputs };
using Needs = std::array<bool, kMaskedInputs>;

// Biases are small, so that every backend leaves them to these. The bias of every sample [S, out]; undefined without a
// bias.
at::Tensor bias_samples(bool triton, const OptionalTensor& bias, const OptionalTensor& bias_logits,
                        const at::Tensor& seed, int64_t samples);

bool wants_bias(const OptionalTensor& bias, const Needs& needs);

// Fills result[kBias] and result[kBiasLogits] as needed, from the gradient [S, out] of bias_samples.
void bias_gradients(bool triton, const at::Tensor& grad, const at::Tensor& bias, const OptionalTensor& bias_logits,
                    const at::Tensor& seed, double tau, const Needs& needs, std::vector<at::Tensor>& result);

// The layer sample by sample: one masked copy of the weight at a time, multiplied by torch's own libraries.
template <bool triton>
at::Tensor masked_linear_forward_by_samples(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& logits,
                                            const OptionalTensor& bias, const OptionalTensor& bias_logits,
                                            const at::Tensor& seed, int64_t samples);
template <bool triton>
std::vector<at::Tensor> masked_linear_backward_by_samples(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& weight, const at::Tensor& logits,
                                                          const OptionalTensor& bias, const OptionalTensor& bias_logits,
                                                          const at::Tensor& seed, int64_t samples, double tau,
                                                          Needs needs);

}  // namespace fastmod
