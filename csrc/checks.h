// Last line of defence for callers of torch.ops.fastmod: the friendly messages live in fastmod/ops/.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastmod {

inline int64_t leading_size(const at::Tensor& tensor, int64_t trailing_dims) {
  int64_t size = 1;
  for (int64_t i = 0; i < tensor.dim() - trailing_dims; ++i) size *= tensor.size(i);
  return size;
}

inline void check_like(const at::Tensor& first, const at::Tensor& other, const char* name) {
  TORCH_CHECK(other.device() == first.device(), name, ": expected device ", first.device(), ", got ", other.device());
  TORCH_CHECK_TYPE(other.scalar_type() == first.scalar_type(), name, ": expected ", first.scalar_type(), ", got ",
                   other.scalar_type());
}

// The dtype that a kernel rounds to as it reads, under autocast: x and parameters, all alike, are then of it or of fp32.
using LowType = std::optional<at::ScalarType>;

inline void check_parameter(const at::Tensor& x, const at::Tensor& param, const at::Tensor& first, const LowType& low,
                            const char* name) {
  if (!low) return check_like(x, param, name);
  check_like(first, param, name);
  TORCH_CHECK(param.device() == x.device(), name, ": expected device ", x.device(), ", got ", param.device());
  for (const at::Tensor* tensor : {&x, &param}) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat || tensor->scalar_type() == *low, name, ": expected ",
                     at::kFloat, " or ", *low, ", got ", tensor->scalar_type());
  }
}

// Tensors that need not be alike under autocast.
inline void check_mixed(const at::Tensor& first, const at::Tensor& other, const LowType& low, const char* name) {
  TORCH_CHECK_TYPE(!low || *low == at::kBFloat16 || *low == at::kHalf, "low: expected bfloat16 or float16");
  check_parameter(first, other, other, low, name);
}
// Of a result, whose dtype is `low` if that is given.
inline void check_grad(const at::Tensor& first, const at::Tensor& grad, const LowType& low) {
  if (!low) return check_like(first, grad, "grad");
  TORCH_CHECK(grad.device() == first.device(), "grad: expected device ", first.device(), ", got ", grad.device());
  TORCH_CHECK_TYPE(grad.scalar_type() == *low, "grad: expected ", *low, ", got ", grad.scalar_type());
}

inline void check_float(const at::Tensor& tensor, const char* name) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, name,
                   ": expected float32, float64, bfloat16 or float16, got ", type);
}

// Of the gradient of a temperature: its own dtype, if that has 16 bits, else the compute dtype.
inline at::ScalarType tau_type(const std::optional<at::Tensor>& tau, const at::Tensor& like) {
  if (tau && (tau->scalar_type() == at::kHalf || tau->scalar_type() == at::kBFloat16)) return tau->scalar_type();
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// One number, or one for each of several nets at once: see MfnnrSizes.
inline bool is_number(const at::Tensor& tensor, int64_t copies) {
  return copies ? tensor.dim() == 1 && tensor.size(0) == copies : tensor.dim() == 0;
}

inline void check_routing(const std::optional<at::Tensor>& tau, double tau_value,
                          const std::optional<at::Tensor>& seed, int64_t mode, int64_t copies = 0) {
  TORCH_CHECK_VALUE(mode >= 0 && mode <= 2, "mode: expected 0 (softmax), 1 (gumbel) or 2 (argmax), got ", mode);
  TORCH_CHECK_VALUE(tau_value > 0, "tau: expected a number > 0, got ", tau_value);
  TORCH_CHECK_TYPE(!tau || (is_number(*tau, copies) && tau->is_floating_point()),
                   "tau: expected a floating-point 0-d tensor, or one per copy");
  TORCH_CHECK_VALUE(mode != 1 || seed, "seed: expected an int64 0-d tensor in mode gumbel, got none");
  TORCH_CHECK_TYPE(!seed || (is_number(*seed, copies) && seed->scalar_type() == at::kLong),
                   "seed: expected an int64 0-d tensor, or one per copy");
}

// Returns how many copies there are: temperature and seed, as far as there are any, have one number for each then, and
// all other tensors the copies in front. 0: no such dimension.
inline int64_t check_multiplex(const at::Tensor& blocks, const at::Tensor& logits,
                               const std::optional<at::Tensor>& tau, const std::optional<at::Tensor>& seed,
                               const LowType& low) {
  check_float(blocks, "blocks");
  check_mixed(blocks, logits, low, "logits");
  TORCH_CHECK_VALUE(blocks.dim() >= 2 && logits.dim() == blocks.dim() && blocks.size(-2) > 0 &&
                        blocks.sizes().slice(0, blocks.dim() - 1) == logits.sizes().slice(0, logits.dim() - 1),
                    "expected blocks [..., M, D] and logits [..., M, N], got ", blocks.sizes(), " and ",
                    logits.sizes());
  const auto& numbers = seed ? seed : tau;
  if (!numbers || numbers->dim() != 1) return 0;
  TORCH_CHECK_VALUE(numbers->size(0) > 0 && blocks.dim() > 2 && blocks.size(0) == numbers->size(0),
                    "expected blocks and logits of ", numbers->size(0), " copies, got ", blocks.sizes(), " and ",
                    logits.sizes());
  return numbers->size(0);
}

inline void check_gated_residual(const at::Tensor& x, const at::Tensor& fresh, const at::Tensor& gate,
                                 const LowType& low) {
  check_float(x, "x");
  check_mixed(x, fresh, low, "new");
  check_mixed(x, gate, low, "gate");
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.sizes() == fresh.sizes() && gate.sizes() == x.sizes().slice(0, x.dim() - 1),
                    "expected x and new [..., N, D] and gate [..., N], got ", x.sizes(), ", ", fresh.sizes(), " and ",
                    gate.sizes());
}

inline void check_range_penalty(at::TensorList logits, double threshold) {
  TORCH_CHECK_VALUE(!logits.empty(), "logits: expected at least one tensor, got none");
  TORCH_CHECK_VALUE(threshold >= 0, "threshold: expected a number >= 0, got ", threshold);
  for (const auto& value : logits) {
    check_float(value, "logits");
    check_like(logits[0], value, "logits");
  }
}

// Sizes of one MFNNR, read off its tensors once and checked on the way. Parameters may be those of several nets at once,
// with a dimension of copies in front; x, temperatures, seeds and all results then have it too.
struct MfnnrSizes {
  int64_t batch, in_blocks, out_blocks, block, rows;  // batch: of one copy
  bool context;
  int64_t copies;  // 0: a net alone
  int64_t nets() const { return copies ? copies : 1; }
  int64_t route_in() const { return in_blocks * block; }
  int64_t routed() const { return out_blocks * block; }
  int64_t update_in() const { return routed() + (context ? route_in() : 0); }
};

inline int64_t copies_of(at::TensorList params) {
  return !params.empty() && params[0].dim() == 3 ? params[0].size(0) : 0;
}

inline int64_t check_fnn(const at::Tensor& x, at::TensorList params, int64_t features, int64_t copies,
                         const LowType& low, const char* name) {
  TORCH_CHECK_VALUE(!params.empty() && params.size() % 2 == 0, name, ": expected [weight, bias, ...], got ",
                    params.size(), " tensors");
  const int64_t front = copies ? 1 : 0;
  for (size_t i = 0; i < params.size(); i += 2) {
    const at::Tensor &weight = params[i], &bias = params[i + 1];
    check_parameter(x, weight, params[0], low, name);
    check_parameter(x, bias, params[0], low, name);
    TORCH_CHECK_VALUE(weight.dim() == 2 + front && weight.size(-1) == features && weight.size(-2) > 0 &&
                          bias.dim() == 1 + front && bias.size(-1) == weight.size(-2) &&
                          (!copies || (weight.size(0) == copies && bias.size(0) == copies)),
                      name, "[", i, "]: expected a weight [out, ", features, "] and a bias [out]",
                      copies ? ", each with the copies in front" : "", ", got ", weight.sizes(), " and ",
                      bias.sizes());
    features = weight.size(-2);
  }
  return features;
}

inline MfnnrSizes check_mfnnr(const at::Tensor& x, at::TensorList route, at::TensorList update, bool context,
                              const LowType& low) {
  check_float(x, "x");
  TORCH_CHECK_TYPE(!low || *low == at::kBFloat16 || *low == at::kHalf, "low: expected bfloat16 or float16");
  const int64_t copies = copies_of(route);
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.size(-2) > 0 && x.size(-1) > 0, "x: expected [..., M, D], got ", x.sizes());
  TORCH_CHECK_VALUE(!copies || (x.dim() >= 3 && x.size(0) == copies), "x: expected [", copies, ", ..., M, D], got ",
                    x.sizes());
  MfnnrSizes s{leading_size(x, 2), x.size(-2), 0, x.size(-1), 0, context, copies};
  s.batch /= s.nets();
  const int64_t logits = check_fnn(x, route, s.route_in(), copies, low, "route");
  s.out_blocks = logits / s.in_blocks;
  TORCH_CHECK_VALUE(s.out_blocks > 0 && logits == s.in_blocks * s.out_blocks, "route: expected a multiple of ",
                    s.in_blocks, " outputs, got ", logits);
  const int64_t outputs = check_fnn(x, update, s.update_in(), copies, low, "update");
  TORCH_CHECK_VALUE(outputs == s.routed() + s.out_blocks, "update: expected ", s.routed() + s.out_blocks,
                    " outputs, got ", outputs);
  s.rows = s.routed();
  for (const at::TensorList params : {route, update})
    for (size_t i = 1; i < params.size(); i += 2) s.rows += params[i].size(-1);
  return s;
}

// A stack of MFNNRs: per layer `fnn_tensors` tensors of the route FNN, then as many of the update FNN.
inline void check_smfr(at::TensorList params, int64_t fnn_tensors, at::TensorList taus, at::TensorList seeds) {
  TORCH_CHECK_VALUE(fnn_tensors > 0 && !params.empty() && params.size() % (2 * fnn_tensors) == 0,
                    "params: expected a multiple of 2 * ", fnn_tensors, " tensors, got ", params.size());
  const size_t layers = params.size() / (2 * fnn_tensors);
  TORCH_CHECK_VALUE(taus.empty() || taus.size() == layers, "taus: expected none or ", layers, ", got ", taus.size());
  TORCH_CHECK_VALUE(seeds.empty() || seeds.size() == layers, "seeds: expected none or ", layers, ", got ",
                    seeds.size());
}

inline void check_mask_noise(const at::Tensor& seed, int64_t first, int64_t samples, int64_t stream) {
  TORCH_CHECK_TYPE(seed.dim() == 0 && seed.scalar_type() == at::kLong, "seed: expected an int64 0-d tensor");
  TORCH_CHECK_VALUE(first >= 0 && samples >= 1, "samples: expected at least 1, from sample 0 on, got ", samples,
                    " from ", first, " on");
  TORCH_CHECK_VALUE(stream >= 0, "stream: expected at least 0, got ", stream);
}

inline void check_sample_mask(const at::Tensor& logits, const std::optional<at::Tensor>& weight,
                              const at::Tensor& seed, int64_t first, int64_t samples, int64_t stream) {
  check_float(logits, "logits");
  check_mask_noise(seed, first, samples, stream);
  if (!weight) return;
  check_like(logits, *weight, "weight");
  TORCH_CHECK_VALUE(weight->sizes() == logits.sizes(), "weight: expected the shape of logits, ", logits.sizes(),
                    ", got ", weight->sizes());
}

// Whether there are several layers side by side, as torch.vmap has them: every tensor, but a seed that all share, then
// has one more dimension, in front.
inline bool stacked_layers(const at::Tensor& weight) { return weight.dim() == 3; }

inline void check_masked_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& logits,
                                 const std::optional<at::Tensor>& biases, const at::Tensor& seed, int64_t samples,
                                 int64_t first, const LowType& low) {
  const bool stacked = stacked_layers(weight);
  TORCH_CHECK_VALUE(x.dim() >= (stacked ? 3 : 2) && (stacked || weight.dim() == 2) && x.size(-1) == weight.size(-1) &&
                        (!stacked || x.size(0) == weight.size(0)),
                    "expected x [B, ..., in] and weight [out, in], got ", x.sizes(), " and ", weight.sizes());
  check_float(x, "x");
  check_mixed(x, weight, low, "weight");
  check_mixed(x, logits, low, "logits");
  TORCH_CHECK_VALUE(logits.sizes() == weight.sizes(), "logits: expected the shape of weight, ", weight.sizes(),
                    ", got ", logits.sizes());
  const int64_t batch = x.size(stacked ? 1 : 0), out = weight.size(-2);
  TORCH_CHECK_VALUE(samples >= 1 && batch % samples == 0, "x: expected a batch that is a multiple of ", samples,
                    " samples, got ", batch);
  const bool seeds = stacked && seed.dim() == 1;
  TORCH_CHECK_VALUE(!seeds || seed.size(0) == weight.size(0), "seed: expected one a layer, ", weight.size(0), ", got ",
                    seed.size(0));
  check_mask_noise(seeds && seed.size(0) > 0 ? seed.select(0, 0) : seed, first, samples, 0);
  if (!biases) return;
  check_mixed(x, *biases, low, "biases");
  TORCH_CHECK_VALUE(biases->dim() == (stacked ? 3 : 2) && (!stacked || biases->size(0) == weight.size(0)) &&
                        biases->size(-2) == samples && biases->size(-1) == out,
                    "biases: expected [", samples, ", ", out, "], got ", biases->sizes());
}

inline void check_masked_linear_grad(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                      const at::Tensor& logits, const at::Tensor& seed, int64_t samples, int64_t first,
                                      double tau, const LowType& low) {
  check_masked_linear(x, weight, logits, std::nullopt, seed, samples, first, low);
  check_grad(x, grad, low);
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  const int64_t batch = leading_size(x, 1), out = weight.size(-2);
  TORCH_CHECK_VALUE(grad.dim() == x.dim() && grad.numel() == batch * out && grad.size(-1) == out &&
                        grad.size(0) == x.size(0),
                    "grad: expected [B, ..., ", out, "], got ", grad.sizes());
}

// ---- images of several experts

inline void check_affine(const at::Tensor& x, const std::optional<at::Tensor>& tensor, int64_t experts,
                         const char* name) {
  if (!tensor) return;
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(tensor->device() == x.device(), name, ": expected device ", x.device(), ", got ", tensor->device());
  TORCH_CHECK_TYPE(tensor->scalar_type() == wide, name, ": expected ", wide, ", got ", tensor->scalar_type());
  TORCH_CHECK_VALUE(tensor->dim() == 2 && (tensor->size(0) == experts || (x.dim() == 4 && tensor->size(0) == 1)) &&
                        tensor->size(1) == x.size(-3),
                    name, ": expected [", experts, ", ", x.size(-3), "], got ", tensor->sizes());
}

inline void check_norm_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                            const std::optional<at::Tensor>& shift, const std::optional<at::Tensor>& channel_gate,
                            const std::optional<at::Tensor>& bias, int64_t stride, bool depthwise) {
  check_float(x, "x");
  check_like(x, weight, "weight");
  TORCH_CHECK_VALUE(stride == 1 || stride == 2, "stride: expected 1 or 2, got ", stride);
  TORCH_CHECK_VALUE((x.dim() == 4 || x.dim() == 5) && weight.dim() == 5 && weight.size(3) == weight.size(4) &&
                        (weight.size(3) == 1 || weight.size(3) == 3) && weight.numel() > 0 && x.size(-1) > 0 &&
                        x.size(-2) > 0 && (x.dim() == 4 || x.size(1) == weight.size(0)) &&
                        (depthwise ? weight.size(2) == 1 && weight.size(1) == x.size(-3) : weight.size(2) == x.size(-3)),
                    "expected x [B, E, Cin, H, W] or [B, Cin, H, W] and weight ",
                    depthwise ? "[E, C, 1, k, k]" : "[E, Cout, Cin, k, k]", ", got ", x.sizes(), " and ", weight.sizes());
  TORCH_CHECK_VALUE(scale.has_value() == shift.has_value(), "scale, shift: expected both or none");
  check_affine(x, scale, weight.size(0), "scale");
  check_affine(x, shift, weight.size(0), "shift");
  TORCH_CHECK_VALUE(!scale || scale->sizes() == shift->sizes(), "shift: expected the shape of scale");
  if (channel_gate) {
    check_like(x, *channel_gate, "channel_gate");
    TORCH_CHECK_VALUE(channel_gate->dim() == 3 && channel_gate->size(0) == x.size(0) &&
                          channel_gate->size(1) == weight.size(0) && channel_gate->size(2) == x.size(-3),
                      "channel_gate: expected [B, E, Cin], got ", channel_gate->sizes());
  }
  if (!bias) return;
  check_like(x, *bias, "bias");
  TORCH_CHECK_VALUE(bias->dim() == 2 && bias->sizes() == weight.sizes().slice(0, 2), "bias: expected [E, Cout], got ",
                    bias->sizes());
}

inline void check_norm_conv_grad(const at::Tensor& grad, const std::optional<at::Tensor>& grad_mean,
                                 const std::optional<at::Tensor>& grad_var, const std::optional<at::Tensor>& y,
                                 const std::optional<at::Tensor>& mean, const at::Tensor& x, const at::Tensor& weight,
                                 int64_t stride) {
  const auto rounded = [&](int64_t size) { return (size + stride - 1) / stride; };
  check_like(x, grad, "grad");
  TORCH_CHECK_VALUE(grad.dim() == 5 && grad.size(0) == x.size(0) &&
                        grad.sizes().slice(1, 2) == weight.sizes().slice(0, 2) &&
                        grad.size(3) == rounded(x.size(-2)) && grad.size(4) == rounded(x.size(-1)),
                    "grad: expected the shape of y, got ", grad.sizes());
  TORCH_CHECK_VALUE(!grad_var || (y && mean), "y, mean: expected both beside grad_var");
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const auto* tensor : {&grad_mean, &grad_var, &mean}) {
    if (!*tensor) continue;
    TORCH_CHECK(tensor->value().device() == x.device(), "statistics: expected device ", x.device());
    TORCH_CHECK_TYPE(tensor->value().scalar_type() == wide, "statistics: expected ", wide);
    TORCH_CHECK_VALUE(tensor->value().sizes() == weight.sizes().slice(0, 2), "statistics: expected [E, Cout], got ",
                      tensor->value().sizes());
  }
  if (!y) return;
  check_like(x, *y, "y");
  TORCH_CHECK_VALUE(y->sizes() == grad.sizes(), "y: expected ", grad.sizes(), ", got ", y->sizes());
}

inline void check_norm_sum(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift,
                           const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& residual_scale,
                           const std::optional<at::Tensor>& residual_shift, const std::optional<at::Tensor>& gate) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5, "x: expected [B, E, C, H, W], got ", x.sizes());
  check_affine(x, scale, x.size(1), "scale");
  check_affine(x, shift, x.size(1), "shift");
  TORCH_CHECK_VALUE(residual_scale.has_value() == residual_shift.has_value() && (residual || !residual_scale),
                    "residual_scale, residual_shift: expected both or none, and a residual beside them");
  check_affine(x, residual_scale, x.size(1), "residual_scale");
  check_affine(x, residual_shift, x.size(1), "residual_shift");
  if (residual) {
    check_like(x, *residual, "residual");
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes() || (residual->dim() == 4 && residual->size(0) == x.size(0) &&
                                                         residual->sizes().slice(1) == x.sizes().slice(2)),
                      "residual: expected ", x.sizes(), " or that without E, got ", residual->sizes());
  }
  if (!gate) return;
  check_like(x, *gate, "gate");
  TORCH_CHECK_VALUE(gate->sizes() == x.sizes().slice(0, 2), "gate: expected [B, E], got ", gate->sizes());
}

inline void check_norm_pool(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5 && x.size(3) > 0 && x.size(4) > 0, "x: expected [B, E, C, H, W] with pixels, got ",
                    x.sizes());
  check_affine(x, scale, x.size(1), "scale");
  check_affine(x, shift, x.size(1), "shift");
}

// params: expand [T, M, C], depthwise [T, M, 3, 3], perhaps squeeze [T, R, M] and excite [T, M, R], project [T, C, M], each
// followed by weight and bias of its batch norm.
inline void check_inverted_residual(const at::Tensor& x, at::TensorList params, bool training = true) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5 && x.size(1) > 0 && x.size(2) > 0 && x.size(3) > 0 && x.size(4) > 0,
                    "x: expected [B, T, C, H, W], only B may be 0, got ", x.sizes());
  TORCH_CHECK_VALUE(params.size() == 9 || params.size() == 15, "params: expected 9 tensors, or 15 with squeeze-excite, got ",
                    params.size());
  const bool wide = x.scalar_type() == at::kDouble;
  for (const at::Tensor& param : params) {
    check_float(param, "params");
    TORCH_CHECK(param.device() == x.device(), "params: expected device ", x.device(), ", got ", param.device());
    TORCH_CHECK_TYPE((param.scalar_type() == at::kDouble) == wide, "params: expected the precision of x, got ",
                     param.scalar_type());
    TORCH_CHECK_VALUE(param.dim() >= 2 && param.numel() > 0, "params: expected tensors [T, ...], got ", param.sizes());
  }
  const int64_t tasks = x.size(1), channels = x.size(2), expanded = params[0].size(1);
  TORCH_CHECK_VALUE(!training || x.size(0) != 1, "x: expected more than 1 value per channel, got ", x.sizes());
  const auto check = [&](size_t at, at::IntArrayRef sizes) {
    int64_t count = 1;  // sizes of 1 stand where convolutions have them
    for (const int64_t size : sizes) count *= size;
    TORCH_CHECK_VALUE(params[at].dim() >= 3 && params[at].sizes().slice(0, 2) == sizes.slice(0, 2) &&
                          params[at].numel() == count,
                      "params[", at, "]: expected ", sizes, ", got ", params[at].sizes());
    for (size_t i = at + 1; i < at + 3; ++i)
      TORCH_CHECK_VALUE(params[i].sizes() == sizes.slice(0, 2), "params[", i, "]: expected ", sizes.slice(0, 2), ", got ",
                        params[i].sizes());
  };
  check(0, {tasks, expanded, channels});
  check(3, {tasks, expanded, 3, 3});
  if (params.size() == 15) {
    const int64_t squeezed = params[6].size(1);
    check(6, {tasks, squeezed, expanded});
    check(9, {tasks, expanded, squeezed});
  }
  check(params.size() - 3, {tasks, channels, expanded});
}

// stats: mean and variance [T, channels] of every batch norm.
inline void check_inverted_residual_stats(const at::Tensor& x, at::TensorList params, at::TensorList stats) {
  TORCH_CHECK_VALUE(3 * stats.size() == 2 * params.size(), "stats: expected ", 2 * params.size() / 3, " tensors, got ",
                    stats.size());
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (size_t i = 0; i < stats.size(); ++i) {
    const at::IntArrayRef sizes = params[i / 2 * 3 + 1].sizes();
    TORCH_CHECK_TYPE(stats[i].scalar_type() == type, "stats: expected ", type, ", got ", stats[i].scalar_type());
    TORCH_CHECK(stats[i].device() == x.device(), "stats: expected device ", x.device(), ", got ", stats[i].device());
    TORCH_CHECK_VALUE(stats[i].sizes() == sizes, "stats[", i, "]: expected ", sizes, ", got ", stats[i].sizes());
  }
}

inline void check_inverted_residual_saved(const at::Tensor& x, at::TensorList params, const at::Tensor& stats,
                                          at::TensorList saved) {
  const bool gated = params.size() == 15;
  const int64_t batch = x.size(0), tasks = x.size(1), channels = x.size(2), expanded = params[0].size(1);
  const int64_t squeezed = gated ? params[6].size(1) : 0;
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto check = [&](const at::Tensor& tensor, at::IntArrayRef sizes, const char* name) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, ": expected ", type, ", got ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, ": expected ", sizes, ", got ", tensor.sizes());
  };
  const int64_t norms = 2 * expanded + channels + (gated ? squeezed + expanded : 0);
  check(stats, {3, tasks, norms}, "stats");
  TORCH_CHECK_VALUE(stats.is_contiguous(), "stats: expected a contiguous tensor");
  TORCH_CHECK_VALUE(saved.size() == (gated ? 8 : 3), "saved: expected ", gated ? 8 : 3, " tensors, got ", saved.size());
  check(saved[0], {batch, tasks, expanded, x.size(3), x.size(4)}, "saved[0]");
  check(saved[1], x.sizes(), "saved[1]");
  check(saved[2], {tasks, 1 + channels, channels}, "saved[2]");
  if (gated) {
    check(saved[3], {3, tasks, batch, expanded}, "saved[3]");
    check(saved[4], {tasks, batch, squeezed}, "saved[4]");
    check(saved[5], {tasks, batch, expanded}, "saved[5]");
    check(saved[6], {tasks, batch, expanded}, "saved[6]");
    check(saved[7], {tasks, batch, squeezed}, "saved[7]");
  }
  for (size_t i = 2; i < saved.size(); ++i)
    TORCH_CHECK_VALUE(saved[i].is_contiguous(), "saved[", i, "]: expected a contiguous tensor");
}

inline void check_batch_affine(const at::Tensor& mean, const at::Tensor& var, const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                               const std::optional<at::Tensor>& running_var) {
  TORCH_CHECK_TYPE(mean.scalar_type() == at::kFloat || mean.scalar_type() == at::kDouble,
                   "mean: expected float32 or float64, got ", mean.scalar_type());
  check_like(mean, var, "var");
  TORCH_CHECK_VALUE(var.sizes() == mean.sizes(), "var: expected ", mean.sizes(), ", got ", var.sizes());
  TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(),
                    "running_mean, running_var: expected both or none");
  for (const auto* tensor : {&weight, &bias, &running_mean, &running_var}) {
    if (!*tensor) continue;
    check_float(**tensor, "weight, bias or running statistics");
    TORCH_CHECK(tensor->value().device() == mean.device(), "expected all tensors on ", mean.device());
    TORCH_CHECK_VALUE(tensor->value().sizes() == mean.sizes(), "expected ", mean.sizes(), ", got ",
                      tensor->value().sizes());
  }
}

// ---- mixtures of templates

inline void check_bank(const at::Tensor& bank) {
  check_float(bank, "bank");
  TORCH_CHECK_VALUE(bank.dim() == 2 && bank.size(0) > 0, "bank: expected [K, P] with K >= 1, got ", bank.sizes());
}

inline void check_logits(const at::Tensor& logits) {
  check_float(logits, "logits");
  TORCH_CHECK_VALUE(logits.dim() >= 1 && logits.size(-1) > 0, "logits: expected [..., K] with K >= 1, got ",
                    logits.sizes());
}

inline void check_template_mix(const at::Tensor& logits, const at::Tensor& bank, int64_t mixing) {
  check_bank(bank);
  check_logits(logits);
  check_like(bank, logits, "logits");
  TORCH_CHECK_VALUE(logits.size(-1) == bank.size(0), "logits: expected [..., ", bank.size(0), "], got ",
                    logits.sizes());
  TORCH_CHECK_VALUE(mixing >= 0 && mixing <= 2, "mixing: expected 0 (softmax), 1 (tanh) or 2 (none), got ", mixing);
}

}  // namespace fastmod
