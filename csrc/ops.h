// Signatures of the kernels. Their schemas are defined in fastmod/ops/, one file per op, with everything else that an op
// is; here every backend implements them in its own namespace.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace fastmod {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor multiplex_forward(const at::Tensor& blocks, const at::Tensor& logits, const OptionalTensor& tau,
                             double tau_value, const OptionalTensor& seed, int64_t mode,
                             std::optional<at::ScalarType> low);
std::tuple<at::Tensor, at::Tensor, at::Tensor> multiplex_backward(const at::Tensor& grad, const at::Tensor& blocks,
                                                                  const at::Tensor& logits, const OptionalTensor& tau,
                                                                  double tau_value, const OptionalTensor& seed,
                                                                  int64_t mode, std::optional<at::ScalarType> low);

at::Tensor gated_residual_forward(const at::Tensor& x, const at::Tensor& fresh, const at::Tensor& gate,
                                  std::optional<at::ScalarType> low);
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_residual_backward(const at::Tensor& grad, const at::Tensor& x,
                                                                       const at::Tensor& fresh,
                                                                       const at::Tensor& gate,
                                                                       std::optional<at::ScalarType> low);

at::Tensor range_penalty_forward(at::TensorList logits, double threshold);
std::vector<at::Tensor> range_penalty_backward(const at::Tensor& grad, at::TensorList logits, double threshold);

// out, penalty, routing logits, gate logits, activations for the backward (empty unless `save`)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> mfnnr_forward(
    const at::Tensor& x, at::TensorList route, at::TensorList update, const OptionalTensor& tau, double tau_value,
    const OptionalTensor& seed, int64_t mode, bool context, double threshold, bool save,
    std::optional<at::ScalarType> low);
// gradients of x and tau, then, if need_params, of every tensor of route and update
std::vector<at::Tensor> mfnnr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty,
                                       const at::Tensor& x, at::TensorList route, at::TensorList update,
                                       const OptionalTensor& tau, double tau_value, const OptionalTensor& seed,
                                       int64_t mode, bool context, double threshold, const at::Tensor& saved,
                                       bool need_x, bool need_params, std::optional<at::ScalarType> low);

// A stack of MFNNRs, params as in check_smfr. saved: activations of layer 0, its output, activations of layer 1, ...
std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>
smfr_forward(const at::Tensor& x, at::TensorList params, int64_t fnn_tensors, at::TensorList taus,
             at::TensorList seeds, int64_t mode, bool context, double threshold, bool save,
             std::optional<at::ScalarType> low);
// gradients of x, of every tau, then, if need_params, of every parameter
std::vector<at::Tensor> smfr_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty,
                                      const at::Tensor& x, at::TensorList params, int64_t fnn_tensors,
                                      at::TensorList taus, at::TensorList seeds, int64_t mode, bool context,
                                      double threshold, at::TensorList saved, bool need_x, bool need_params,
                                      std::optional<at::ScalarType> low);

// Masks [samples, *logits] of 0 and 1, times weight if there is one: samples first .. first + samples - 1 of the noise.
at::Tensor sample_mask_forward(const at::Tensor& logits, const OptionalTensor& weight, int64_t first, int64_t samples,
                               const at::Tensor& seed, int64_t stream);
// Gradient of the logits, summed over the samples, plus base
at::Tensor sample_mask_backward(const at::Tensor& grad, const at::Tensor& logits, const OptionalTensor& weight,
                                int64_t first, int64_t samples, const at::Tensor& seed, int64_t stream, double tau,
                                const OptionalTensor& base);

// x [B, ..., in], part s of the batch through sample s of the masked weight [out, in], plus row s of biases [S, out]
at::Tensor masked_linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& logits,
                                  const OptionalTensor& biases, const at::Tensor& seed, int64_t samples, int64_t first,
                                  LowType low);
// gradients of x, weight and logits; empty where not needed
std::vector<at::Tensor> masked_linear_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                                const at::Tensor& logits, const at::Tensor& seed, int64_t samples,
                                                double tau, std::array<bool, 3> needs, int64_t first, LowType low);

}  // namespace fastmod
