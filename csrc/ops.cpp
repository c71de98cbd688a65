// Schemas, autograd and autocast of every op; kernels are registered per backend (cpu/, cuda/, Triton in Python).
//
// Each op has a public schema (differentiable) over two kernel schemas, `<op>_forward` and `<op>_backward`. A kernel
// schema exists twice: the plain overload is served by the native kernels, the overload `.triton` by Triton. The choice
// is an argument of the public op, so that the backward runs where the forward ran, also in a compiled graph.
#include "autograd.h"
#include "checks.h"
#include "ops.h"

namespace fastmod {
namespace {

constexpr const char* kKernelSchemas[] = {
    "multiplex_forward(Tensor blocks, Tensor logits, Tensor? tau, float tau_value, Tensor? seed, int mode) -> Tensor",
    "multiplex_backward(Tensor grad, Tensor blocks, Tensor logits, Tensor? tau, float tau_value, Tensor? seed, int "
    "mode) -> (Tensor, Tensor, Tensor)",
    "gated_residual_forward(Tensor x, Tensor new, Tensor gate) -> Tensor",
    "gated_residual_backward(Tensor grad, Tensor x, Tensor new, Tensor gate) -> (Tensor, Tensor, Tensor)",
    "range_penalty_forward(Tensor[] logits, float threshold) -> Tensor",
    "range_penalty_backward(Tensor grad, Tensor[] logits, float threshold) -> Tensor[]",
    "mfnnr_forward(Tensor x, Tensor[] route, Tensor[] update, Tensor? tau, float tau_value, Tensor? seed, int mode, "
    "bool context, float threshold, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "mfnnr_backward(Tensor? grad_out, Tensor? grad_penalty, Tensor x, Tensor[] route, Tensor[] update, Tensor? tau, "
    "float tau_value, Tensor? seed, int mode, bool context, float threshold, Tensor saved, bool need_x, bool "
    "need_params) -> Tensor[]",
    "smfr_forward(Tensor x, Tensor[] params, int fnn_tensors, Tensor[] taus, Tensor[] seeds, int mode, bool context, "
    "float threshold, bool save) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
    "smfr_backward(Tensor? grad_out, Tensor? grad_penalty, Tensor x, Tensor[] params, int fnn_tensors, Tensor[] taus, "
    "Tensor[] seeds, int mode, bool context, float threshold, Tensor[] saved, bool need_x, bool need_params) -> "
    "Tensor[]",
};

constexpr const char* kPublicSchemas[] = {
    "multiplex(Tensor blocks, Tensor logits, Tensor? tau, float tau_value, Tensor? seed, int mode, bool triton=False) "
    "-> Tensor",
    "gated_residual(Tensor x, Tensor new, Tensor gate, bool triton=False) -> Tensor",
    "range_penalty(Tensor[] logits, float threshold, bool triton=False) -> Tensor",
    "mfnnr(Tensor x, Tensor[] route, Tensor[] update, Tensor? tau, float tau_value, Tensor? seed, int mode, bool "
    "context, float threshold, bool triton=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "smfr(Tensor x, Tensor[] params, int fnn_tensors, Tensor[] taus, Tensor[] seeds, int mode, bool context, float "
    "threshold, bool triton=False) -> (Tensor, Tensor, Tensor[], Tensor[])",
};

// Served by the CPU alone: fastmod/optim.py leaves other devices to torch's own fused Adam.
constexpr const char* kCpuSchemas[] = {
    "square_sum(Tensor[] tensors) -> float",
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
    "float grads_square_sum, float max_norm, float lr, float beta1, float beta2, float epsilon) -> ()",
};

// ---------------------------------------------------------------- multiplex

const auto& multiplex_forward_kernel() {
  static const Kernel<decltype(multiplex_forward)> kernel("multiplex_forward");
  return kernel;
}

struct Multiplex : torch::autograd::Function<Multiplex> {
  static Tensor forward(AutogradContext* ctx, const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau,
                        double tau_value, const OptionalTensor& seed, int64_t mode, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({blocks, logits, value_or_undefined(tau), value_or_undefined(seed)});
    ctx->saved_data["tau_value"] = tau_value;
    ctx->saved_data["mode"] = mode;
    ctx->saved_data["triton"] = triton;
    return multiplex_forward_kernel()(triton, blocks, logits, tau, tau_value, seed, mode);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(multiplex_backward)> kernel("multiplex_backward");
    const auto saved = ctx->get_saved_variables();
    auto [blocks, logits, tau] =
        kernel(ctx->saved_data["triton"].toBool(), grads[0], saved[0], saved[1], defined_or_none(saved[2]),
               ctx->saved_data["tau_value"].toDouble(), defined_or_none(saved[3]), ctx->saved_data["mode"].toInt());
    if (saved[2].defined()) tau = tau.to(saved[2].scalar_type());
    return {blocks, logits, saved[2].defined() ? tau : Tensor(), {}, {}, {}, {}};
  }
};

Tensor multiplex_below(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
                       const OptionalTensor& seed, int64_t mode, bool triton) {
  return multiplex_forward_kernel()(triton, blocks, logits, tau, tau_value, seed, mode);
}

Tensor multiplex_autograd(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
                          const OptionalTensor& seed, int64_t mode, bool triton) {
  check_devices(blocks, {logits});
  return Multiplex::apply(blocks, logits, tau, tau_value, seed, mode, triton);
}

// ----------------------------------------------------------- gated_residual

const auto& gated_residual_forward_kernel() {
  static const Kernel<decltype(gated_residual_forward)> kernel("gated_residual_forward");
  return kernel;
}

struct GatedResidual : torch::autograd::Function<GatedResidual> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& fresh, const Tensor& gate, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, fresh, gate});
    ctx->saved_data["triton"] = triton;
    return gated_residual_forward_kernel()(triton, x, fresh, gate);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(gated_residual_backward)> kernel("gated_residual_backward");
    const auto saved = ctx->get_saved_variables();
    auto [x, fresh, gate] = kernel(ctx->saved_data["triton"].toBool(), grads[0], saved[0], saved[1], saved[2]);
    return {x, fresh, gate, {}};
  }
};

Tensor gated_residual_below(const Tensor& x, const Tensor& fresh, const Tensor& gate, bool triton) {
  return gated_residual_forward_kernel()(triton, x, fresh, gate);
}

Tensor gated_residual_autograd(const Tensor& x, const Tensor& fresh, const Tensor& gate, bool triton) {
  check_devices(x, {fresh, gate});
  return GatedResidual::apply(x, fresh, gate, triton);
}

// ------------------------------------------------------------ range_penalty

const auto& range_penalty_forward_kernel() {
  static const Kernel<decltype(range_penalty_forward)> kernel("range_penalty_forward");
  return kernel;
}

struct RangePenalty : torch::autograd::Function<RangePenalty> {
  static Tensor forward(AutogradContext* ctx, TensorList logits, double threshold, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(logits.vec());
    ctx->saved_data["threshold"] = threshold;
    ctx->saved_data["triton"] = triton;
    return range_penalty_forward_kernel()(triton, logits, threshold);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(range_penalty_backward)> kernel("range_penalty_backward");
    auto result = kernel(ctx->saved_data["triton"].toBool(), grads[0], ctx->get_saved_variables(),
                         ctx->saved_data["threshold"].toDouble());
    result.resize(result.size() + 2);  // threshold, triton
    return result;
  }
};

Tensor range_penalty_below(TensorList logits, double threshold, bool triton) {
  return range_penalty_forward_kernel()(triton, logits, threshold);
}

Tensor range_penalty_autograd(TensorList logits, double threshold, bool triton) {
  if (!logits.empty()) check_devices(logits[0], {logits});
  return RangePenalty::apply(logits, threshold, triton);
}

// -------------------------------------------------------------------- mfnnr

const auto& mfnnr_forward_kernel() {
  static const Kernel<decltype(mfnnr_forward)> kernel("mfnnr_forward");
  return kernel;
}

const auto& mfnnr_backward_kernel() {
  static const Kernel<decltype(mfnnr_backward)> kernel("mfnnr_backward");
  return kernel;
}

using MfnnrResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Mfnnr : torch::autograd::Function<Mfnnr> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, TensorList route, TensorList update,
                               const OptionalTensor& tau, double tau_value, const OptionalTensor& seed, int64_t mode,
                               bool context, double threshold, bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, penalty, logits, gate, activations] =
        mfnnr_forward_kernel()(triton, x, route, update, tau, tau_value, seed, mode, context, threshold, true);
    variable_list saved{x, value_or_undefined(tau), value_or_undefined(seed), activations};
    saved.insert(saved.end(), route.begin(), route.end());
    saved.insert(saved.end(), update.begin(), update.end());
    ctx->save_for_backward(std::move(saved));
    ctx->mark_non_differentiable({logits, gate});
    ctx->set_materialize_grads(false);
    ctx->saved_data["route"] = static_cast<int64_t>(route.size());
    ctx->saved_data["tau_value"] = tau_value;
    ctx->saved_data["mode"] = mode;
    ctx->saved_data["context"] = context;
    ctx->saved_data["threshold"] = threshold;
    ctx->saved_data["triton"] = triton;
    return {out, penalty, logits, gate};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    constexpr size_t kFixed = 4;  // x, tau, seed, activations
    const auto saved = ctx->get_saved_variables();
    const size_t params = saved.size() - kFixed, route = ctx->saved_data["route"].toInt();
    bool need_params = false;
    for (size_t i = 0; i < params; ++i) need_params |= ctx->needs_input_grad(1 + i);

    const Tensor& tau = saved[1];
    variable_list result(1 + params + 8);  // x, params, tau, then seven arguments that have no gradient
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const TensorList all(saved);
    auto found = mfnnr_backward_kernel()(
        ctx->saved_data["triton"].toBool(), defined_or_none(grads[0]), defined_or_none(grads[1]), saved[0],
        all.slice(kFixed, route), all.slice(kFixed + route), defined_or_none(tau),
        ctx->saved_data["tau_value"].toDouble(), defined_or_none(saved[2]), ctx->saved_data["mode"].toInt(),
        ctx->saved_data["context"].toBool(), ctx->saved_data["threshold"].toDouble(), saved[3],
        ctx->needs_input_grad(0), need_params);
    if (ctx->needs_input_grad(0)) result[0] = found[0];
    for (size_t i = 0; need_params && i < params; ++i) result[1 + i] = found[2 + i];
    if (tau.defined()) result[1 + params] = found[1].to(tau.scalar_type());
    return result;
  }
};

MfnnrResult mfnnr_below(const Tensor& x, TensorList route, TensorList update, const OptionalTensor& tau,
                        double tau_value, const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                        bool triton) {
  auto [out, penalty, logits, gate, saved] =
      mfnnr_forward_kernel()(triton, x, route, update, tau, tau_value, seed, mode, context, threshold, false);
  return {out, penalty, logits, gate};
}

MfnnrResult mfnnr_autograd(const Tensor& x, TensorList route, TensorList update, const OptionalTensor& tau,
                           double tau_value, const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                           bool triton) {
  check_devices(x, {route, update});
  // Without a gradient to come the activations need not be kept.
  if (!any_requires_grad({x, route, update, tau ? TensorList(*tau) : TensorList()})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return mfnnr_below(x, route, update, tau, tau_value, seed, mode, context, threshold, triton);
  }
  auto r = Mfnnr::apply(x, route, update, tau, tau_value, seed, mode, context, threshold, triton);
  return {r[0], r[1], r[2], r[3]};
}

// --------------------------------------------------------------------- smfr

const auto& smfr_forward_kernel() {
  static const Kernel<decltype(smfr_forward)> kernel("smfr_forward");
  return kernel;
}

OptionalTensor element(TensorList list, size_t index) {
  return list.empty() ? OptionalTensor() : OptionalTensor(list[index]);
}

// Layer by layer, for the backends that have no kernel for the whole stack.
template <bool triton>
std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> smfr_forward_by_layers(
    const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds, int64_t mode,
    bool context, double threshold, bool save) {
  check_smfr(params, fnn_tensors, taus, seeds);
  Tensor input = x, total;
  std::vector<Tensor> all_logits, gates, saved;
  for (size_t at = 0, l = 0; at < params.size(); at += 2 * fnn_tensors, ++l) {
    auto [out, penalty, logits, gate, activations] = mfnnr_forward_kernel()(
        triton, input, params.slice(at, fnn_tensors), params.slice(at + fnn_tensors, fnn_tensors), element(taus, l),
        1.0, element(seeds, l), mode, context, threshold, save);
    total = total.defined() ? total + penalty : penalty;
    all_logits.push_back(logits);
    gates.push_back(gate);
    if (save) {
      if (l > 0) saved.push_back(input);
      saved.push_back(activations);
    }
    input = out;
  }
  return {input, total, all_logits, gates, saved};
}

template <bool triton>
std::vector<Tensor> smfr_backward_by_layers(const OptionalTensor& grad_out, const OptionalTensor& grad_penalty,
                                            const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus,
                                            TensorList seeds, int64_t mode, bool context, double threshold,
                                            TensorList saved, bool need_x, bool need_params) {
  check_smfr(params, fnn_tensors, taus, seeds);
  const size_t layers = params.size() / (2 * fnn_tensors);
  TORCH_CHECK_VALUE(saved.size() + 1 == 2 * layers, "saved: expected ", 2 * layers - 1, " tensors, got ",
                    saved.size());
  const size_t first = 1 + taus.size();  // of the parameters' gradients
  std::vector<Tensor> result(first + (need_params ? params.size() : 0));
  OptionalTensor grad = grad_out;
  for (size_t l = layers; l-- > 0;) {
    const size_t at = l * 2 * fnn_tensors;
    auto found = mfnnr_backward_kernel()(triton, grad, grad_penalty, l == 0 ? x : saved[2 * l - 1],
                                         params.slice(at, fnn_tensors), params.slice(at + fnn_tensors, fnn_tensors),
                                         element(taus, l), 1.0, element(seeds, l), mode, context, threshold,
                                         saved[2 * l], l > 0 || need_x, need_params);
    grad = found[0];
    if (!taus.empty()) result[1 + l] = found[1];
    for (size_t i = 2; i < found.size(); ++i) result[first + at + i - 2] = found[i];
  }
  result[0] = *grad;
  return result;
}

struct Smfr : torch::autograd::Function<Smfr> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, TensorList params, TensorList taus,
                               TensorList seeds, int64_t fnn_tensors, int64_t mode, bool context, double threshold,
                               bool triton) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, penalty, logits, gates, activations] =
        smfr_forward_kernel()(triton, x, params, fnn_tensors, taus, seeds, mode, context, threshold, true);
    variable_list saved{x};
    for (TensorList list : {params, taus, seeds, TensorList(activations)})
      saved.insert(saved.end(), list.begin(), list.end());
    ctx->save_for_backward(std::move(saved));
    variable_list results{out, penalty}, shown(logits);
    shown.insert(shown.end(), gates.begin(), gates.end());
    ctx->mark_non_differentiable(shown);
    ctx->set_materialize_grads(false);
    ctx->saved_data["params"] = static_cast<int64_t>(params.size());
    ctx->saved_data["taus"] = static_cast<int64_t>(taus.size());
    ctx->saved_data["seeds"] = static_cast<int64_t>(seeds.size());
    ctx->saved_data["fnn_tensors"] = fnn_tensors;
    ctx->saved_data["mode"] = mode;
    ctx->saved_data["context"] = context;
    ctx->saved_data["threshold"] = threshold;
    ctx->saved_data["triton"] = triton;
    results.insert(results.end(), shown.begin(), shown.end());
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const BelowAutogradOnce guard;
    static const Kernel<decltype(smfr_backward)> kernel("smfr_backward");
    const auto saved = ctx->get_saved_variables();
    const size_t params = ctx->saved_data["params"].toInt(), taus = ctx->saved_data["taus"].toInt(),
                 seeds = ctx->saved_data["seeds"].toInt();
    bool need_params = false;
    for (size_t i = 0; i < params; ++i) need_params |= ctx->needs_input_grad(1 + i);
    variable_list result(1 + params + taus + seeds + 5);  // the last five arguments have no gradient
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const TensorList all(saved);
    auto found = kernel(ctx->saved_data["triton"].toBool(), defined_or_none(grads[0]), defined_or_none(grads[1]),
                        saved[0], all.slice(1, params), ctx->saved_data["fnn_tensors"].toInt(),
                        all.slice(1 + params, taus), all.slice(1 + params + taus, seeds),
                        ctx->saved_data["mode"].toInt(), ctx->saved_data["context"].toBool(),
                        ctx->saved_data["threshold"].toDouble(), all.slice(1 + params + taus + seeds),
                        ctx->needs_input_grad(0), need_params);
    if (ctx->needs_input_grad(0)) result[0] = found[0];
    for (size_t i = 0; need_params && i < params; ++i) result[1 + i] = std::move(found[1 + taus + i]);
    for (size_t i = 0; i < taus; ++i) result[1 + params + i] = found[1 + i].to(saved[1 + params + i].scalar_type());
    return result;
  }
};

using SmfrResult = std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>>;

SmfrResult smfr_below(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                      int64_t mode, bool context, double threshold, bool triton) {
  auto [out, penalty, logits, gates, saved] =
      smfr_forward_kernel()(triton, x, params, fnn_tensors, taus, seeds, mode, context, threshold, false);
  return {out, penalty, logits, gates};
}

SmfrResult smfr_autograd(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                         int64_t mode, bool context, double threshold, bool triton) {
  check_devices(x, {params, taus});
  if (!any_requires_grad({x, params, taus})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return smfr_below(x, params, fnn_tensors, taus, seeds, mode, context, threshold, triton);
  }
  auto r = Smfr::apply(x, params, taus, seeds, fnn_tensors, mode, context, threshold, triton);
  const size_t layers = (r.size() - 2) / 2;
  return {r[0], r[1], {r.begin() + 2, r.begin() + 2 + layers}, {r.begin() + 2 + layers, r.end()}};
}

// ----------------------------------------------------------------- autocast
// Rule: blocks, logits, gates and weights are cast to the autocast dtype, as for a matmul; a penalty is a loss and
// stays in fp32.

template <c10::DeviceType device>
Tensor multiplex_autocast(const Tensor& blocks, const Tensor& logits, const OptionalTensor& tau, double tau_value,
                          const OptionalTensor& seed, int64_t mode, bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(multiplex_autocast<device>)>("fastmod::multiplex");
  return op.call(lower<device>(blocks), lower<device>(logits), tau, tau_value, seed, mode, triton);
}

template <c10::DeviceType device>
Tensor gated_residual_autocast(const Tensor& x, const Tensor& fresh, const Tensor& gate, bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(gated_residual_autocast<device>)>("fastmod::gated_residual");
  return op.call(lower<device>(x), lower<device>(fresh), lower<device>(gate), triton);
}

template <c10::DeviceType device>
Tensor range_penalty_autocast(TensorList logits, double threshold, bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(range_penalty_autocast<device>)>("fastmod::range_penalty");
  std::vector<Tensor> wide;
  for (const auto& value : logits) wide.push_back(at::autocast::cached_cast(at::kFloat, value, device));
  return op.call(wide, threshold, triton);
}

template <c10::DeviceType device>
MfnnrResult mfnnr_autocast(const Tensor& x, TensorList route, TensorList update, const OptionalTensor& tau,
                           double tau_value, const OptionalTensor& seed, int64_t mode, bool context, double threshold,
                           bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(mfnnr_autocast<device>)>("fastmod::mfnnr");
  return op.call(lower<device>(x), lower<device>(route), lower<device>(update), tau, tau_value, seed, mode, context,
                 threshold, triton);
}

template <c10::DeviceType device>
SmfrResult smfr_autocast(const Tensor& x, TensorList params, int64_t fnn_tensors, TensorList taus, TensorList seeds,
                         int64_t mode, bool context, double threshold, bool triton) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_keys);
  static const auto op = public_op<decltype(smfr_autocast<device>)>("fastmod::smfr");
  return op.call(lower<device>(x), lower<device>(params), fnn_tensors, taus, seeds, mode, context, threshold, triton);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("multiplex", multiplex_autocast<device>);
  m.impl("gated_residual", gated_residual_autocast<device>);
  m.impl("range_penalty", range_penalty_autocast<device>);
  m.impl("mfnnr", mfnnr_autocast<device>);
  m.impl("smfr", smfr_autocast<device>);
}

void register_below(torch::Library& m) {
  m.impl("multiplex", multiplex_below);
  m.impl("gated_residual", gated_residual_below);
  m.impl("range_penalty", range_penalty_below);
  m.impl("mfnnr", mfnnr_below);
  m.impl("smfr", smfr_below);
}

}  // namespace

TORCH_LIBRARY(fastmod, m) {
  for (const char* schema : kPublicSchemas) m.def(schema);
  for (const char* schema : kCpuSchemas) m.def(schema);
  define_kernels(m, kKernelSchemas);
}

TORCH_LIBRARY_IMPL(fastmod, Autograd, m) {
  m.impl("multiplex", multiplex_autograd);
  m.impl("gated_residual", gated_residual_autograd);
  m.impl("range_penalty", range_penalty_autograd);
  m.impl("mfnnr", mfnnr_autograd);
  m.impl("smfr", smfr_autograd);
  refuse_second_derivatives(m, kKernelSchemas);
}

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  register_below(m);
  m.impl("smfr_forward.triton", smfr_forward_by_layers<true>);
  m.impl("smfr_backward.triton", smfr_backward_by_layers<true>);
}
TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  register_below(m);
  m.impl("smfr_forward", smfr_forward_by_layers<false>);
  m.impl("smfr_backward", smfr_backward_by_layers<false>);
  m.impl("smfr_forward.triton", smfr_forward_by_layers<true>);
  m.impl("smfr_backward.triton", smfr_backward_by_layers<true>);
}
TORCH_LIBRARY_IMPL(fastmod, AutocastCPU, m) { register_autocast<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(fastmod, AutocastCUDA, m) { register_autocast<c10::DeviceType::CUDA>(m); }

}  // namespace fastmod
