// The biases of a masked layer: small, so that every backend leaves them to these two, in masks.cpp.
#pragma once

#include <array>
#include <vector>

#include "ops.h"

namespace fastmod {

// The tensors a masked layer can have a gradient for, in the order of every list of gradients.
enum MaskedInput { kX, kWeight, kLogits, kBias, kBiasLogits, kMaskedInputs };
using Needs = std::array<bool, kMaskedInputs>;

// The bias of every sample [S, out]; undefined without a bias.
at::Tensor bias_samples(bool triton, const OptionalTensor& bias, const OptionalTensor& bias_logits,
                        const at::Tensor& seed, int64_t samples);

bool wants_bias(const OptionalTensor& bias, const Needs& needs);

// Fills result[kBias] and result[kBiasLogits] as needed, from the gradient [S, out] of bias_samples.
void bias_gradients(bool triton, const at::Tensor& grad, const at::Tensor& bias, const OptionalTensor& bias_logits,
                    const at::Tensor& seed, double tau, const Needs& needs, std::vector<at::Tensor>& result);

}  // namespace fastmod
