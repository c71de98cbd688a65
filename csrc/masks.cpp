// Schemas, autograd and autocast of the weight-mask ops, as ops.cpp does it for the others.
//
// Every backend has kernels for sample_mask, and as masked_product for the three matrix products of masked_linear on
// batches that are not large. Large ones, and masked_conv2d always, go sample by sample: one masked copy of the weight at
// a time, multiplied or convolved by torch's own libraries, with the gradient of the logits summed up as the samples
// pass. Biases are small: here, for all.
#include <ATen/Functions.h>

#include <array>

#include "autograd.h"
#include "checks.h"
#include "ops.h"
#include "philox.h"

namespace fastmod {
namespace {

constexpr const char* kMaskKernelSchemas[] = {
    "sample_mask_forward(Tensor logits, Tensor? weight, int first, int samples, Tensor seed, int stream) -> Tensor",
    "sample_mask_backward(Tensor grad, Tensor logits, Tensor? weight, int first, int samples, Tensor seed, int stream, "
    "float tau, Tensor? base) -> Tensor",
    "masked_product_forward(Tensor x, Tensor weight, Tensor logits, Tensor? biases, Tensor seed, int samples) -> Tensor",
    "masked_product_backward(Tensor grad, Tensor x, Tensor weight, Tensor logits, Tensor seed, int samples, float tau, "
    "bool[3] needs) -> Tensor[]",
    "masked_linear_forward(Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, Tensor seed, int "
    "samples) -> Tensor",
    "masked_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, "
    "Tensor seed, int samples, float tau, bool[5] needs) -> Tensor[]",
    "masked_conv2d_forward(Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, Tensor seed, int "
    "samples, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    "masked_conv2d_backward(Tensor grad, Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, "
    "Tensor seed, int samples, int[] stride, int[] padding, int[] dilation, int groups, float tau, bool[5] needs) -> "
    "Tensor[]",
};

constexpr const char* kMaskPublicSchemas[] = {
    "sample_mask(Tensor logits, Tensor? weight, int first, int samples, Tensor seed, int stream, float tau, bool "
    "triton=False) -> Tensor",
    "masked_linear(Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, Tensor seed, int "
    "samples, float tau, bool triton=False) -> Tensor",
    "masked_conv2d(Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, Tensor seed, int "
    "samples, int[] stride, int[] padding, int[] dilation, int groups, float tau, bool triton=False) -> Tensor",
};

// The tensors a masked layer can have a gradient for, in the order of every list of gradients.
enum MaskedInput { kX, kWeight, kLogits, kBias, kBiasLogits, kMaskedInputs };
using Needs = std::array<bool, kMaskedInputs>;

void check_tau(double tau) { TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau); }

// -------------------------------------------------------------- sample_mask

const auto& sample_mask_forward_kernel() {
  static const Kernel<decltype(sample_mask_forward)> kernel("sample_mask_forward");
  return kernel;
}

const auto& sample_mask_backward_kernel() {
  static const Kernel<decltype(sample_mask_backward)> kernel("sample_mask_backward");
  return kernel;
}

struct SampleMask : torch::autograd::Function<SampleMask> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const OptionalTensor& weight, int64_t first,
                        int64_t samples, const Tensor& seed, int64_t stream, double tau, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_tau(tau);
    ctx->save_for_backward({logits, value_or_undefined(weight), seed});
    ctx->saved_data["first"] = first;
    ctx->saved_data["samples"] = samples;
    ctx->saved_data["stream"] = stream;
    ctx->saved_data["tau"] = tau;
    ctx->saved_data["triton"] = triton;
    return sample_mask_forward_kernel()(triton, logits, weight, first, samples, seed, stream);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    const auto saved = ctx->get_saved_variables();
    const Tensor &logits = saved[0], &weight = saved[1], &seed = saved[2];
    const int64_t first = ctx->saved_data["first"].toInt(), samples = ctx->saved_data["samples"].toInt();
    const int64_t stream = ctx->saved_data["stream"].toInt();
    const bool triton = ctx->saved_data["triton"].toBool();
    variable_list result(8);
    if (ctx->needs_input_grad(0))
      result[0] = sample_mask_backward_kernel()(triton, grads[0], logits, defined_or_none(weight), first, samples,
                                                seed, stream, ctx->saved_data["tau"].toDouble(), OptionalTensor());
    if (weight.defined() && ctx->needs_input_grad(1))
      result[1] =
          (grads[0] * sample_mask_forward_kernel()(triton, logits, OptionalTensor(), first, samples, seed, stream))
              .sum(0);
    return result;
  }
};

Tensor sample_mask_below(const Tensor& logits, const OptionalTensor& weight, int64_t first, int64_t samples,
                         const Tensor& seed, int64_t stream, double tau, bool triton) {
  check_tau(tau);
  return sample_mask_forward_kernel()(triton, logits, weight, first, samples, seed, stream);
}

Tensor sample_mask_autograd(const Tensor& logits, const OptionalTensor& weight, int64_t first, int64_t samples,
                            const Tensor& seed, int64_t stream, double tau, bool triton) {
  if (weight) check_devices(logits, {*weight});
  return SampleMask::apply(logits, weight, first, samples, seed, stream, tau, triton);
}

// --------------------------------------------- what both masked layers share

OptionalTensor element(const Tensor& biases, int64_t sample) {
  return biases.defined() ? OptionalTensor(biases[sample]) : OptionalTensor();
}

struct MaskedInputs {
  const Tensor &weight, &logits, &seed;
  int64_t samples;
  bool triton;

  Tensor part(const Tensor& batch, int64_t sample) const {
    const int64_t rows = batch.size(0) / samples;
    return batch.narrow(0, sample * rows, rows);
  }
  Tensor masked_weight(int64_t sample) const {
    return sample_mask_forward_kernel()(triton, logits, weight, sample, 1, seed, kStreamMask)[0];
  }
};

// The dtype that sums over samples are taken in: fp32 for bf16 and fp16.
Tensor widened(const Tensor& tensor) { return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat); }

// Sums up the gradients of weight and logits while the samples pass.
struct WeightGradients {
  const MaskedInputs& in;
  double tau;
  Needs needs;
  const Tensor wide_weight = widened(in.weight), wide_logits = widened(in.logits);
  Tensor weight, logits;

  void add(const Tensor& grad_masked, int64_t sample) {
    const Tensor grad = widened(grad_masked);
    if (needs[kLogits])
      logits = sample_mask_backward_kernel()(in.triton, grad.unsqueeze(0), wide_logits, wide_weight, sample, 1,
                                             in.seed, kStreamMask, tau, defined_or_none(logits));
    if (needs[kWeight]) {
      const Tensor part = sample_mask_forward_kernel()(in.triton, wide_logits, grad, sample, 1, in.seed, kStreamMask)[0];
      weight = weight.defined() ? weight + part : part;
    }
  }
  void place(std::vector<Tensor>& result) const {
    if (needs[kLogits]) result[kLogits] = logits.to(in.logits.scalar_type());
    if (needs[kWeight]) result[kWeight] = weight.to(in.weight.scalar_type());
  }
};

// The bias of every sample [S, out]; undefined without a bias.
Tensor bias_samples(bool triton, const OptionalTensor& bias, const OptionalTensor& bias_logits, const Tensor& seed,
                    int64_t samples) {
  if (!bias) return Tensor();
  if (!bias_logits) return bias->unsqueeze(0).expand({samples, bias->size(0)});
  return sample_mask_forward_kernel()(triton, *bias_logits, bias, 0, samples, seed, kStreamMaskBias);
}

bool wants_bias(const OptionalTensor& bias, const Needs& needs) {
  return bias && (needs[kBias] || needs[kBiasLogits]);
}

// Fills result[kBias] and result[kBiasLogits] as needed, from the gradient [S, out] of bias_samples.
void bias_gradients(bool triton, const Tensor& grad, const Tensor& bias, const OptionalTensor& bias_logits,
                    const Tensor& seed, double tau, const Needs& needs, std::vector<Tensor>& result) {
  const int64_t samples = grad.size(0);
  if (needs[kBias]) {
    const auto kept = [&] {
      return sample_mask_forward_kernel()(triton, *bias_logits, OptionalTensor(), 0, samples, seed, kStreamMaskBias);
    };
    result[kBias] = (bias_logits ? grad * kept() : grad).sum(0);
  }
  if (needs[kBiasLogits] && bias_logits)
    result[kBiasLogits] = sample_mask_backward_kernel()(triton, grad, *bias_logits, bias, 0, samples, seed,
                                                        kStreamMaskBias, tau, OptionalTensor());
}

std::vector<Tensor> blank_gradients(const Tensor& like) {
  return std::vector<Tensor>(kMaskedInputs, at::empty({0}, like.options()));
}

// Of an empty batch.
std::vector<Tensor> zero_gradients(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const Needs& needs) {
  std::vector<Tensor> result = blank_gradients(x);
  if (needs[kX]) result[kX] = at::zeros_like(x);
  for (auto input : {kWeight, kLogits})
    if (needs[input]) result[input] = at::zeros_like(weight);
  for (auto input : {kBias, kBiasLogits})
    if (needs[input] && bias) result[input] = at::zeros_like(*bias);
  return result;
}

// The edges of an autograd node count the tensors that are there.
Needs needs_of(AutogradContext* ctx, bool has_bias, bool has_bias_logits) {
  Needs needs{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2), false, false};
  if (has_bias) needs[kBias] = ctx->needs_input_grad(3);
  if (has_bias_logits) needs[kBiasLogits] = ctx->needs_input_grad(3 + has_bias);
  return needs;
}

void check_masked_devices(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                          const OptionalTensor& bias_logits) {
  check_devices(x, {weight, logits});
  if (bias) check_devices(x, {*bias});
  if (bias_logits) check_devices(x, {*bias_logits});
}

// ------------------------------------------------------------ masked_linear

// With more rows a sample the masks cost little beside the products, at which torch's libraries are better. The limit of
// the CPU is measured; that of GPUs is what one block of the kernels holds, so that every mask is drawn once a product.
constexpr int64_t kRowsOnCpu = 256, kRowsOnGpu = 64;

template <bool triton>
bool many_rows(const Tensor& x, int64_t samples) {
  return leading_size(x, 1) / samples > (x.is_cpu() && !triton ? kRowsOnCpu : kRowsOnGpu);
}

template <bool triton>
Tensor masked_linear_forward_by_samples(const Tensor& x, const Tensor& weight, const Tensor& logits,
                                        const OptionalTensor& bias, const OptionalTensor& bias_logits,
                                        const Tensor& seed, int64_t samples) {
  const MaskedInputs in{weight, logits, seed, samples, triton};
  const Tensor biases = bias_samples(triton, bias, bias_logits, seed, samples);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  const Tensor out = at::empty(sizes, x.options());
  const int64_t each = leading_size(x, 1) / samples;
  const Tensor rows = x.reshape({samples, each, weight.size(1)}), results = out.view({samples, each, weight.size(0)});
  for (int64_t s = 0; s < samples; ++s) {
    Tensor result = results[s];
    if (bias) at::addmm_out(result, biases[s], rows[s], in.masked_weight(s).t());
    else at::mm_out(result, rows[s], in.masked_weight(s).t());
  }
  return out;
}

template <bool triton>
std::vector<Tensor> masked_linear_backward_by_samples(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                      const Tensor& logits, const OptionalTensor& bias,
                                                      const OptionalTensor& bias_logits, const Tensor& seed,
                                                      int64_t samples, double tau, Needs needs) {
  if (x.size(0) == 0) return zero_gradients(x, weight, bias, needs);
  const MaskedInputs in{weight, logits, seed, samples, triton};
  WeightGradients sums{in, tau, needs};
  std::vector<Tensor> result = blank_gradients(x), grad_bias;
  const int64_t each = leading_size(x, 1) / samples;
  const Tensor grads = grad.reshape({samples, each, weight.size(0)}), rows = x.reshape({samples, each, weight.size(1)});
  const Tensor grad_x = needs[kX] ? at::empty(rows.sizes(), x.options()) : Tensor();
  for (int64_t s = 0; s < samples; ++s) {
    const Tensor g = grads[s];
    if (needs[kX]) {
      Tensor part = grad_x[s];
      at::mm_out(part, g, in.masked_weight(s));
    }
    if (needs[kLogits] || needs[kWeight]) sums.add(at::mm(g.t(), rows[s]), s);
    if (wants_bias(bias, needs)) grad_bias.push_back(g.sum(0));
  }
  if (needs[kX]) result[kX] = grad_x.view(x.sizes());
  sums.place(result);
  if (wants_bias(bias, needs)) bias_gradients(triton, at::stack(grad_bias), *bias, bias_logits, seed, tau, needs, result);
  return result;
}

template <bool triton>
Tensor masked_linear_forward_any(const Tensor& x, const Tensor& weight, const Tensor& logits,
                                 const OptionalTensor& bias, const OptionalTensor& bias_logits, const Tensor& seed,
                                 int64_t samples) {
  static const Kernel<decltype(masked_product_forward)> product("masked_product_forward");
  check_masked_linear(x, weight, logits, bias, bias_logits, samples);
  check_mask_noise(seed, 0, samples, kStreamMask);
  if (many_rows<triton>(x, samples))
    return masked_linear_forward_by_samples<triton>(x, weight, logits, bias, bias_logits, seed, samples);
  const Tensor biases = bias_samples(triton, bias, bias_logits, seed, samples);
  return product(triton, x, weight, logits, defined_or_none(biases), seed, samples);
}

template <bool triton>
std::vector<Tensor> masked_linear_backward_any(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                               const Tensor& logits, const OptionalTensor& bias,
                                               const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                                               double tau, Needs needs) {
  static const Kernel<decltype(masked_product_backward)> product("masked_product_backward");
  check_masked_linear(x, weight, logits, bias, bias_logits, samples);
  check_masked_product_grad(grad, x, weight, logits, seed, samples, tau);
  if (many_rows<triton>(x, samples))
    return masked_linear_backward_by_samples<triton>(grad, x, weight, logits, bias, bias_logits, seed, samples, tau,
                                                     needs);
  std::vector<Tensor> result = blank_gradients(x);
  if (needs[kX] || needs[kWeight] || needs[kLogits]) {
    auto found = product(triton, grad, x, weight, logits, seed, samples, tau,
                         std::array<bool, 3>{needs[kX], needs[kWeight], needs[kLogits]});
    std::move(found.begin(), found.end(), result.begin());
  }
  if (wants_bias(bias, needs)) {
    const Tensor sums = widened(grad.reshape({samples, leading_size(x, 1) / samples, weight.size(0)})).sum(1);
    bias_gradients(triton, sums.to(x.scalar_type()), *bias, bias_logits, seed, tau, needs, result);
  }
  return result;
}

const auto& masked_linear_forward_kernel() {
  static const Kernel<decltype(masked_linear_forward)> kernel("masked_linear_forward");
  return kernel;
}

// Copies of `grads` into the places of an autograd node's arguments: only those that were wanted.
void place_gradients(std::vector<Tensor>& found, const Needs& needs, variable_list& result) {
  for (int i = 0; i < kMaskedInputs; ++i)
    if (needs[i]) result[i] = std::move(found[i]);
}

struct MaskedLinear : torch::autograd::Function<MaskedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& logits,
                        const OptionalTensor& bias, const OptionalTensor& bias_logits, const Tensor& seed,
                        int64_t samples, double tau, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_tau(tau);
    ctx->save_for_backward({x, weight, logits, value_or_undefined(bias), value_or_undefined(bias_logits), seed});
    ctx->saved_data["samples"] = samples;
    ctx->saved_data["tau"] = tau;
    ctx->saved_data["triton"] = triton;
    return masked_linear_forward_kernel()(triton, x, weight, logits, bias, bias_logits, seed, samples);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(masked_linear_backward)> kernel("masked_linear_backward");
    const auto saved = ctx->get_saved_variables();
    const Needs needs = needs_of(ctx, saved[3].defined(), saved[4].defined());
    auto found = kernel(ctx->saved_data["triton"].toBool(), grads[0], saved[0], saved[1], saved[2],
                        defined_or_none(saved[3]), defined_or_none(saved[4]), saved[5],
                        ctx->saved_data["samples"].toInt(), ctx->saved_data["tau"].toDouble(), needs);
    variable_list result(9);
    place_gradients(found, needs, result);
    return result;
  }
};

Tensor masked_linear_below(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                           const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples, double tau,
                           bool triton) {
  check_tau(tau);
  return masked_linear_forward_kernel()(triton, x, weight, logits, bias, bias_logits, seed, samples);
}

Tensor masked_linear_autograd(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                              const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples, double tau,
                              bool triton) {
  check_masked_devices(x, weight, logits, bias, bias_logits);
  return MaskedLinear::apply(x, weight, logits, bias, bias_logits, seed, samples, tau, triton);
}

// ------------------------------------------------------------ masked_conv2d

template <bool triton>
Tensor masked_conv2d_forward_by_samples(const Tensor& x, const Tensor& weight, const Tensor& logits,
                                        const OptionalTensor& bias, const OptionalTensor& bias_logits,
                                        const Tensor& seed, int64_t samples, at::IntArrayRef stride,
                                        at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  check_masked_conv2d(x, weight, logits, bias, bias_logits, samples, groups);
  if (x.size(0) == 0) return at::conv2d(x, weight, bias, stride, padding, dilation, groups);
  const MaskedInputs in{weight, logits, seed, samples, triton};
  const Tensor biases = bias_samples(triton, bias, bias_logits, seed, samples);
  std::vector<Tensor> parts;
  for (int64_t s = 0; s < samples; ++s)
    parts.push_back(at::conv2d(in.part(x, s), in.masked_weight(s), element(biases, s), stride, padding,
                               dilation, groups));
  return at::cat(parts);
}

template <bool triton>
std::vector<Tensor> masked_conv2d_backward_by_samples(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                      const Tensor& logits, const OptionalTensor& bias,
                                                      const OptionalTensor& bias_logits, const Tensor& seed,
                                                      int64_t samples, at::IntArrayRef stride,
                                                      at::IntArrayRef padding, at::IntArrayRef dilation,
                                                      int64_t groups, double tau, Needs needs) {
  check_masked_conv2d(x, weight, logits, bias, bias_logits, samples, groups);
  if (x.size(0) == 0) return zero_gradients(x, weight, bias, needs);
  const MaskedInputs in{weight, logits, seed, samples, triton};
  const bool with_bias = wants_bias(bias, needs);
  const std::array<bool, 3> wanted{needs[kX], needs[kLogits] || needs[kWeight], false};
  WeightGradients sums{in, tau, needs};
  std::vector<Tensor> result = blank_gradients(x), grad_x, grad_bias;
  for (int64_t s = 0; s < samples; ++s) {
    const Tensor g = in.part(grad, s);
    const int64_t none[] = {0, 0};
    auto [gx, gw, unused] = at::convolution_backward(g, in.part(x, s), in.masked_weight(s), std::nullopt,
                                                     stride, padding, dilation, false, none, groups, wanted);
    if (needs[kX]) grad_x.push_back(gx);
    if (wanted[1]) sums.add(gw, s);
    if (with_bias) grad_bias.push_back(g.sum(at::IntArrayRef{0, 2, 3}));
  }
  if (needs[kX]) result[kX] = at::cat(grad_x);
  sums.place(result);
  if (with_bias) bias_gradients(triton, at::stack(grad_bias), *bias, bias_logits, seed, tau, needs, result);
  return result;
}

const auto& masked_conv2d_forward_kernel() {
  static const Kernel<decltype(masked_conv2d_forward)> kernel("masked_conv2d_forward");
  return kernel;
}

struct MaskedConv2d : torch::autograd::Function<MaskedConv2d> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& logits,
                        const OptionalTensor& bias, const OptionalTensor& bias_logits, const Tensor& seed,
                        int64_t samples, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                        int64_t groups, double tau, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_tau(tau);
    ctx->save_for_backward({x, weight, logits, value_or_undefined(bias), value_or_undefined(bias_logits), seed});
    ctx->saved_data["samples"] = samples;
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["padding"] = padding;
    ctx->saved_data["dilation"] = dilation;
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["tau"] = tau;
    ctx->saved_data["triton"] = triton;
    return masked_conv2d_forward_kernel()(triton, x, weight, logits, bias, bias_logits, seed, samples, stride, padding,
                                          dilation, groups);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(masked_conv2d_backward)> kernel("masked_conv2d_backward");
    const auto saved = ctx->get_saved_variables();
    const Needs needs = needs_of(ctx, saved[3].defined(), saved[4].defined());
    auto found = kernel(ctx->saved_data["triton"].toBool(), grads[0], saved[0], saved[1], saved[2],
                        defined_or_none(saved[3]), defined_or_none(saved[4]), saved[5],
                        ctx->saved_data["samples"].toInt(), ctx->saved_data["stride"].toIntVector(),
                        ctx->saved_data["padding"].toIntVector(), ctx->saved_data["dilation"].toIntVector(),
                        ctx->saved_data["groups"].toInt(), ctx->saved_data["tau"].toDouble(), needs);
    variable_list result(13);
    place_gradients(found, needs, result);
    return result;
  }
};

Tensor masked_conv2d_below(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                           const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                           at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                           double tau, bool triton) {
  check_tau(tau);
  return masked_conv2d_forward_kernel()(triton, x, weight, logits, bias, bias_logits, seed, samples, stride, padding,
                                        dilation, groups);
}

Tensor masked_conv2d_autograd(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                              const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                              int64_t groups, double tau, bool triton) {
  check_masked_devices(x, weight, logits, bias, bias_logits);
  return MaskedConv2d::apply(x, weight, logits, bias, bias_logits, seed, samples, stride, padding, dilation, groups,
                             tau, triton);
}

// ----------------------------------------------------------------- autocast
// Rule: a masked layer casts its input, weights and logits to the autocast dtype, as a matmul does. A sampled mask
// follows the dtype of its logits: nothing is cast.

template <c10::DeviceType device>
OptionalTensor lower(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(fastmod::lower<device>(*tensor)) : tensor;
}

template <c10::DeviceType device>
Tensor masked_linear_autocast(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                              const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples, double tau,
                              bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(masked_linear_autocast<device>)>("fastmod::masked_linear");
  return op.call(fastmod::lower<device>(x), fastmod::lower<device>(weight), fastmod::lower<device>(logits),
                 lower<device>(bias), lower<device>(bias_logits), seed, samples, tau, triton);
}

template <c10::DeviceType device>
Tensor masked_conv2d_autocast(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                              const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                              int64_t groups, double tau, bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(masked_conv2d_autocast<device>)>("fastmod::masked_conv2d");
  return op.call(fastmod::lower<device>(x), fastmod::lower<device>(weight), fastmod::lower<device>(logits),
                 lower<device>(bias), lower<device>(bias_logits), seed, samples, stride, padding, dilation, groups,
                 tau, triton);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("masked_linear", masked_linear_autocast<device>);
  m.impl("masked_conv2d", masked_conv2d_autocast<device>);
}

// On every device: the public ops without autograd, and the masked layers, which call the kernels of the backend.
void register_below(torch::Library& m) {
  m.impl("sample_mask", sample_mask_below);
  m.impl("masked_linear", masked_linear_below);
  m.impl("masked_conv2d", masked_conv2d_below);
  m.impl("masked_linear_forward", masked_linear_forward_any<false>);
  m.impl("masked_linear_backward", masked_linear_backward_any<false>);
  m.impl("masked_linear_forward.triton", masked_linear_forward_any<true>);
  m.impl("masked_linear_backward.triton", masked_linear_backward_any<true>);
  m.impl("masked_conv2d_forward.triton", masked_conv2d_forward_by_samples<true>);
  m.impl("masked_conv2d_backward.triton", masked_conv2d_backward_by_samples<true>);
  m.impl("masked_conv2d_forward", masked_conv2d_forward_by_samples<false>);
  m.impl("masked_conv2d_backward", masked_conv2d_backward_by_samples<false>);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastmod, m) {
  for (const char* schema : kMaskPublicSchemas) m.def(schema);
  define_kernels(m, kMaskKernelSchemas);
}

TORCH_LIBRARY_IMPL(fastmod, Autograd, m) {
  m.impl("sample_mask", sample_mask_autograd);
  m.impl("masked_linear", masked_linear_autograd);
  m.impl("masked_conv2d", masked_conv2d_autograd);
  refuse_second_derivatives(m, kMaskKernelSchemas);
}

TORCH_LIBRARY_IMPL(fastmod, CPU, m) { register_below(m); }
TORCH_LIBRARY_IMPL(fastmod, CUDA, m) { register_below(m); }
TORCH_LIBRARY_IMPL(fastmod, AutocastCPU, m) { register_autocast<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(fastmod, AutocastCUDA, m) { register_autocast<c10::DeviceType::CUDA>(m); }

}  // namespace fastmod
