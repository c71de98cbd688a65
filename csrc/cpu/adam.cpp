// One call for the whole optimiser step: small models have few numbers in many tensors, so that a call per tensor, or
// a few of them, costs more than the arithmetic. fastmod/optim.py is the only caller.
#include <torch/custom_class.h>

#include "cpu/host.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using at::TensorList;

constexpr int64_t kElementsEach = 8192;  // fixed pieces, so that the norm does not depend on the number of threads

// From here on parameters, gradients and both moments together overflow most last-level caches.
constexpr size_t kLargeBytes = 8 << 20;

struct Piece {
  size_t tensor;
  int64_t first, count;
};

std::vector<Piece> pieces_of(TensorList tensors) {
  std::vector<Piece> pieces;
  for (size_t t = 0; t < tensors.size(); ++t)
    for (int64_t first = 0; first < tensors[t].numel(); first += kElementsEach)
      pieces.push_back({t, first, std::min(kElementsEach, tensors[t].numel() - first)});
  return pieces;
}

// Cycles of the whole list, spread over its pieces: most are smaller than kElementsEach.
double cycles_each(const std::vector<Piece>& pieces, double cycles_per_element) {
  double elements = 0;
  for (const Piece& piece : pieces) elements += piece.count;
  return pieces.empty() ? 1 : elements * cycles_per_element / pieces.size();
}

void check_alike(TensorList tensors, TensorList like, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == like.size(), name, ": expected ", like.size(), " tensors, got ", tensors.size());
  for (size_t i = 0; i < like.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].device().is_cpu() && tensors[i].is_contiguous(), name, "[", i,
                      "]: expected a contiguous tensor on the CPU");
    TORCH_CHECK_VALUE(tensors[i].sizes() == like[i].sizes() && tensors[i].scalar_type() == like[0].scalar_type(), name,
                      "[", i, "]: expected ", like[0].scalar_type(), " ", like[i].sizes(), ", got ",
                      tensors[i].scalar_type(), " ", tensors[i].sizes());
  }
}

void check_floating(TensorList tensors, const char* name) {
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": expected at least one tensor");
  TORCH_CHECK_TYPE(tensors[0].scalar_type() == at::kFloat || tensors[0].scalar_type() == at::kDouble, name,
                   "[0]: expected float32 or float64, got ", tensors[0].scalar_type());
}

double square_sum(TensorList tensors) {
  check_floating(tensors, "tensors");
  check_alike(tensors, tensors, "tensors");
  const auto pieces = pieces_of(tensors);
  std::vector<double> parts(pieces.size());
  with_compute_type(tensors[0], [&](auto zero) {
    using T = decltype(zero);
    for_each<T>(pieces.size(), cycles_each(pieces, 0.3), 0, tensors[0], [&](int64_t i, T*) {
      const Piece& piece = pieces[i];
      const T* data = tensors[piece.tensor].const_data_ptr<T>() + piece.first;
      parts[i] = table<T>(kernels()).square_sum(data, piece.count);
    });
  });
  return sum_in_order(parts);
}

// As clip_grad_norm_ scales: to max_norm (none if <= 0), NaN spreads.
double clipping_scale(double square_sum, double max_norm) {
  if (!(max_norm > 0)) return 1;
  const double norm = std::sqrt(square_sum);
  return std::isnan(norm) ? norm : std::min(max_norm / (norm + 1e-6), 1.0);
}

void check_state(TensorList params, TensorList means, TensorList squares, TensorList steps) {
  check_floating(params, "params");
  check_alike(params, params, "params");
  check_alike(means, params, "exp_avgs");
  check_alike(squares, params, "exp_avg_sqs");
  TORCH_CHECK_VALUE(steps.size() == params.size(), "steps: expected ", params.size(), " tensors, got ", steps.size());
  for (const Tensor& step : steps)
    TORCH_CHECK_VALUE(step.numel() == 1 && step.scalar_type() == at::kFloat && step.device().is_cpu(),
                      "steps: expected scalars of float32 on the CPU");
}

// grads_square_sum: of all gradients that are clipped together, these among them.
void update(TensorList params, TensorList grads, TensorList means, TensorList squares, TensorList steps,
            double grads_square_sum, double max_norm, double lr, double beta1, double beta2, double epsilon) {
  const double grad_scale = clipping_scale(grads_square_sum, max_norm);
  size_t bytes = 0;
  for (const Tensor& param : params) bytes += param.nbytes();
  std::vector<AdamArgs> args;
  double last = 0;  // most parameters have made as many steps as their neighbours
  for (const Tensor& step : steps) {
    const double count = *step.data_ptr<float>() += 1;
    if (count == last) {
      args.push_back(args.back());
      continue;
    }
    last = count;
    args.push_back({grad_scale, beta1, beta2, lr / (1 - std::pow(beta1, count)),
                    1 / std::sqrt(1 - std::pow(beta2, count)), epsilon, bytes >= kLargeBytes});
  }
  const auto pieces = pieces_of(params);
  with_compute_type(params[0], [&](auto zero) {
    using T = decltype(zero);
    for_each<T>(pieces.size(), cycles_each(pieces, 3), 0, params[0], [&](int64_t i, T*) {
      const auto [t, first, count] = pieces[i];
      table<T>(kernels()).adam_update(args[t], count, grads[t].const_data_ptr<T>() + first,
                                      params[t].data_ptr<T>() + first, means[t].data_ptr<T>() + first,
                                      squares[t].data_ptr<T>() + first);
    });
  });
  for (const Tensor& param : params) param.unsafeGetTensorImpl()->bump_version();  // autograd sees the change
}

void adam_(TensorList params, TensorList grads, TensorList means, TensorList squares, TensorList steps,
           double grads_square_sum, double max_norm, double lr, double beta1, double beta2, double epsilon) {
  check_state(params, means, squares, steps);
  check_alike(grads, params, "grads");
  update(params, grads, means, squares, steps, grads_square_sum, max_norm, lr, beta1, beta2, epsilon);
}

// What a step needs again and again, kept here: four lists of tensors handed over by Python at every step would cost as
// much as the arithmetic of a small model.
class AdamLists final : public torch::CustomClassHolder {
 public:
  AdamLists(std::vector<Tensor> params, std::vector<Tensor> means, std::vector<Tensor> squares,
            std::vector<Tensor> steps)
      : params_(std::move(params)), means_(std::move(means)), squares_(std::move(squares)), steps_(std::move(steps)) {
    check_state(params_, means_, squares_, steps_);
    for (const Tensor& param : params_) places_.push_back(param.data_ptr());
  }

  // Reads the gradients off the parameters, clips them to max_norm (none if <= 0) and steps. False, with nothing done, if
  // a parameter has moved, or if a gradient is missing or is none that the kernels can read: the caller then takes the
  // long way.
  bool step(double max_norm, double lr, double beta1, double beta2, double epsilon) {
    std::vector<Tensor> grads;
    grads.reserve(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      const Tensor &param = params_[i], &grad = param.grad();
      if (param.data_ptr() != places_[i] || !grad.defined() || grad.layout() != at::kStrided || !grad.is_contiguous() ||
          !grad.device().is_cpu() || grad.scalar_type() != param.scalar_type() || grad.sizes() != param.sizes())
        return false;
      grads.push_back(grad);
    }
    const double sum = max_norm > 0 ? square_sum(grads) : 0;
    update(params_, grads, means_, squares_, steps_, sum, max_norm, lr, beta1, beta2, epsilon);
    return true;
  }

 private:
  std::vector<Tensor> params_, means_, squares_, steps_;
  std::vector<void*> places_;  // model.to(...) moves the parameters, not these lists
};

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("square_sum", square_sum);
  m.impl("adam_", adam_);
}

TORCH_LIBRARY_FRAGMENT(fastmod, m) {
  m.class_<AdamLists>("AdamLists")
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>>())
      .def("step", &AdamLists::step);
}

}  // namespace fastmod::cpu
