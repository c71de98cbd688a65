// norm_conv on CUDA tensors, alone (norm_conv_*) or several with their batch norms at once (norm_convs_*): arguments
// brought into layout, outputs allocated, kernels launched and checked.
#include "image_binding.h"
#include "../cpu/norm_conv_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

ConvShape conv_shape(const Tensor& x, const Tensor& weight, int64_t stride, bool depthwise) {
  small(x.size(-2) * x.size(-1), "pixels of x");
  return {x.size(0),
          small(weight.size(0), "experts"),
          small(x.size(-3), "channels of x"),
          small(weight.size(1), "outputs"),
          static_cast<int>(x.size(-2)),
          static_cast<int>(x.size(-1)),
          static_cast<int>(weight.size(3)),
          static_cast<int>(stride),
          x.dim() == 4,
          depthwise};
}

// Whether tf32 is allowed, as for cuDNN's convolutions.
bool allow_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

// One convolution; keeps its tensors alive as long as the pointers to them. Tensors that are not given are undefined.
struct Conv {
  ConvShape shape;
  Tensor x, weight, scale, shift, gate, bias, residual;
  bool relu;
  int64_t weight_gap = 0;
  // what the forward writes
  Tensor y, sum, mean, var, norm_scale, norm_shift;
  // batch norm: in the dtype of the statistics
  Tensor norm_weight, norm_bias, running_mean, running_var, batches;
  double momentum = 0, eps = 0;
  // backward: what it reads, then what it writes
  Tensor grad, grad_mean, grad_var, grad_sum, of_norm_scale, of_norm_shift;
  Tensor grad_x, grad_weight, grad_scale, grad_shift, grad_gate, grad_bias, grad_residual, grad_norm_weight,
      grad_norm_bias;

  Conv(const Tensor& x_, const Tensor& weight_, const OptionalTensor& scale_, const OptionalTensor& shift_,
       const OptionalTensor& gate_, const OptionalTensor& bias_, bool relu_, int64_t stride, bool depthwise)
      : relu(relu_) {
    check_norm_conv(x_, weight_, scale_, shift_, gate_, bias_, stride, depthwise);
    shape = conv_shape(x_, weight_, stride, depthwise);
    x = inner(x_);
    weight = expert_rows(weight_);
    weight_gap = gap_of(weight);
    scale = dense(scale_);
    shift = dense(shift_);
    gate = dense(gate_);
    bias = dense(bias_);
  }

  int64_t values() const { return shape.batch * shape.out_high() * shape.out_wide(); }  // of a channel
  Tensor statistic() const {
    const auto options = x.options().dtype(compute_type(x));
    return shape.batch == 0 ? at::zeros({shape.experts, shape.out}, options)
                            : at::empty({shape.experts, shape.out}, options);
  }

  template <typename T>
  ConvInput<T> input() const {
    using C = Compute<T>;
    const int rows = scale.defined() ? static_cast<int>(scale.size(0)) : 1;
    return {data<T>(x), data<C>(scale), data<C>(shift), rows, data<T>(gate), relu, data<T>(residual), data<T>(sum)};
  }
  template <typename T>
  BatchNorm<Compute<T>> norm() const {
    using C = Compute<T>;
    const double count = static_cast<double>(values());
    return {data<C>(norm_weight), data<C>(norm_bias),  data<C>(running_mean),
            data<C>(running_var), data<C>(norm_scale), data<C>(norm_shift),
            static_cast<C>(count / (count - 1)), static_cast<C>(momentum), static_cast<C>(eps), data<int64_t>(batches),
            shape.out, norm_weight.defined() ? gap_of(norm_weight) : norm_bias.defined() ? gap_of(norm_bias) : 0};
  }
  template <typename T>
  ConvGrad<T> gradient() const {
    using C = Compute<T>;
    const bool both = grad_var.defined() || of_norm_scale.defined();
    return {data<T>(grad),
            both ? data<T>(y) : nullptr,
            both ? data<C>(mean) : nullptr,
            data<C>(grad_mean),
            data<C>(grad_var),
            C(1) / static_cast<C>(values()),
            data<C>(of_norm_scale),
            data<C>(of_norm_shift),
            data<C>(var),
            data<C>(norm_scale),
            static_cast<C>(eps),
            data<C>(grad_norm_weight),
            data<C>(grad_norm_bias)};
  }
  bool needs_x() const {
    return grad_x.defined() || grad_scale.defined() || grad_gate.defined() || grad_residual.defined();
  }
  bool needs_weight() const { return grad_weight.defined() || grad_bias.defined(); }
  bool needs_norm() const {
    return of_norm_scale.defined() && (grad_norm_weight.defined() || grad_norm_bias.defined());
  }
};

// Scratch memory of one launch, divided among its convolutions: size(conv), then entry(conv, numbers, tickets).
template <typename T, typename Size, typename Entry>
auto with_scratch(const std::vector<const Conv*>& convs, Size size, Entry entry, Workspace* kept) {
  std::vector<Scratch> sizes;
  Scratch total{0, 0};
  for (const Conv* conv : convs) {
    sizes.push_back(size(*conv));
    total = {total.numbers + sizes.back().numbers, total.tickets + sizes.back().tickets};
  }
  *kept = Workspace(convs[0]->x, total);
  auto* numbers = data<Compute<T>>(kept->numbers);
  auto* tickets = data<unsigned>(kept->tickets);
  std::vector<decltype(entry(*convs[0], numbers, tickets))> entries;
  for (size_t i = 0; i < convs.size(); ++i) {
    entries.push_back(entry(*convs[i], numbers, tickets));
    numbers += sizes[i].numbers;
    tickets += sizes[i].tickets;
  }
  return entries;
}

template <typename Wanted>
std::vector<const Conv*> chosen(const std::vector<Conv>& convs, Wanted wanted) {
  std::vector<const Conv*> found;
  for (const Conv& conv : convs) {
    if (wanted(conv)) found.push_back(&conv);
  }
  return found;
}

// All must have one dtype.
void run_forward(const std::vector<Conv>& convs) {
  dispatch(convs[0].x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const auto full = chosen(convs, [](const Conv& conv) { return conv.shape.batch > 0; });
    if (!full.empty()) {
      Workspace space;
      const auto entries = with_scratch<T>(
          full,
          [](const Conv& c) { return c.mean.defined() ? norm_conv_forward_scratch<T>(c.shape) : Scratch{0, 0}; },
          [](const Conv& c, C* numbers, unsigned* tickets) {
            return ConvForward<T>{c.input<T>(),    data<T>(c.weight), data<T>(c.bias), data<T>(c.y), data<C>(c.mean),
                                  data<C>(c.var), numbers,           tickets,         c.shape,      c.norm<T>(),
                                  c.weight_gap};
          },
          &space);
      C10_CUDA_CHECK(cuda::norm_conv_forward<T>(entries.data(), static_cast<int>(entries.size()), allow_tf32(),
                                                stream()));
    }
    for (const Conv& c : convs) {  // an empty batch does not update statistics
      if (c.shape.batch > 0 || !c.norm_scale.defined()) continue;
      const Tensor weight = dense(c.norm_weight), bias = dense(c.norm_bias);
      C10_CUDA_CHECK(cuda::batch_affine_forward<C>(data<C>(c.mean), data<C>(c.var), data<C>(weight),
                                                   data<C>(bias), nullptr, nullptr, data<C>(c.norm_scale),
                                                   data<C>(c.norm_shift), c.mean.numel(), C(1), C(0),
                                                   static_cast<C>(c.eps), stream()));
      if (c.batches.defined()) c.batches.add_(1);
    }
  });
}

void run_backward(std::vector<Conv>& convs) {
  dispatch(convs[0].x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    for (const Conv& c : convs) {
      if (c.shape.batch > 0) continue;
      for (const Tensor* sum : {&c.grad_weight, &c.grad_scale, &c.grad_shift, &c.grad_bias}) {
        if (sum->defined()) sum->zero_();
      }
    }
    const auto of_x = chosen(convs, [](const Conv& conv) { return conv.shape.batch > 0 && conv.needs_x(); });
    if (!of_x.empty()) {
      Workspace space;
      const auto entries = with_scratch<T>(
          of_x, [](const Conv& c) { return norm_conv_backward_x_scratch<T>(c.shape); },
          [](const Conv& c, C* numbers, unsigned* tickets) {
            return ConvBackwardX<T>{c.gradient<T>(),       c.input<T>(),          data<T>(c.weight), data<T>(c.grad_x),
                                    data<C>(c.grad_scale), data<C>(c.grad_shift), data<T>(c.grad_gate), numbers,
                                    tickets,               c.shape,               data<T>(c.grad_sum),
                                    data<T>(c.grad_residual), c.weight_gap};
          },
          &space);
      C10_CUDA_CHECK(cuda::norm_conv_backward_x<T>(entries.data(), static_cast<int>(entries.size()), allow_tf32(),
                                                   stream()));
    }
    const auto of_weight = chosen(convs, [](const Conv& conv) { return conv.shape.batch > 0 && conv.needs_weight(); });
    if (!of_weight.empty()) {
      Workspace space;
      const auto entries = with_scratch<T>(
          of_weight, [](const Conv& c) { return norm_conv_backward_weight_scratch<T>(c.shape); },
          [](const Conv& c, C* numbers, unsigned* tickets) {
            ConvInput<T> input = c.input<T>();
            if (input.residual) input = {input.sum, nullptr, nullptr, 1, nullptr, false};
            return ConvBackwardWeight<T>{c.gradient<T>(), input,   data<T>(c.grad_weight), data<T>(c.grad_bias),
                                         numbers,         tickets, c.shape};
          },
          &space);
      C10_CUDA_CHECK(cuda::norm_conv_backward_weight<T>(entries.data(), static_cast<int>(entries.size()),
                                                        allow_tf32(), stream()));
    }
    for (const Conv& c : convs) {  // else written along with the weight's gradient
      if (!c.needs_norm() || (c.shape.batch > 0 && c.needs_weight())) continue;
      const Tensor weight = dense(c.norm_weight), others = at::empty({4, c.mean.numel()}, c.mean.options());
      const auto either = [&](const Tensor& wanted, int64_t i) {
        return wanted.defined() ? data<C>(wanted) : data<C>(others) + i * c.mean.numel();
      };
      C10_CUDA_CHECK(cuda::batch_affine_backward<C>(
          data<C>(c.of_norm_scale), data<C>(c.of_norm_shift), data<C>(c.mean), data<C>(c.var), data<C>(weight),
          either({}, 0), either({}, 1), either(c.grad_norm_weight, 2), either(c.grad_norm_bias, 3), c.mean.numel(),
          static_cast<C>(c.eps), stream()));
    }
  });
}

Tensor blank_images(const ConvShape& shape, const Tensor& x) {
  return empty_images({shape.batch, shape.experts, shape.out, shape.out_high(), shape.out_wide()}, x.options());
}

std::tuple<Tensor, Tensor, Tensor> norm_conv_forward(const Tensor& x, const Tensor& weight,
                                                     const OptionalTensor& scale, const OptionalTensor& shift,
                                                     const OptionalTensor& channel_gate, const OptionalTensor& bias,
                                                     bool relu, int64_t stride, bool depthwise, bool stats) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  Conv conv(x, weight, scale, shift, channel_gate, bias, relu, stride, depthwise);
  conv.y = blank_images(conv.shape, x);
  if (stats) conv.mean = conv.statistic();
  if (stats) conv.var = conv.statistic();
  run_forward({conv});
  const Tensor none = at::empty({0}, x.options().dtype(compute_type(x)));
  return {conv.y, stats ? conv.mean : none, stats ? conv.var : none};
}

// Leaves gradients that are not needed undefined.
void allocate_grads(Conv& conv, const Tensor& x, at::ArrayRef<bool> needs) {
  if (needs[0]) conv.grad_x = empty_images(x.sizes(), x.options());
  if (needs[1]) conv.grad_weight = at::empty(conv.weight.sizes(), x.options());
  if ((needs[2] || needs[3]) && conv.scale.defined()) {
    conv.grad_scale = blank_like(conv.scale);
    conv.grad_shift = blank_like(conv.shift);
  }
  if (needs[4] && conv.gate.defined()) conv.grad_gate = at::empty(conv.gate.sizes(), x.options());
  if (needs[5]) conv.grad_bias = at::empty({conv.shape.experts, conv.shape.out}, x.options());
}

std::vector<Tensor> norm_conv_backward(const Tensor& grad, const OptionalTensor& grad_mean,
                                       const OptionalTensor& grad_var, const OptionalTensor& y,
                                       const OptionalTensor& mean, const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& scale, const OptionalTensor& shift,
                                       const OptionalTensor& channel_gate, bool relu, int64_t stride, bool depthwise,
                                       std::array<bool, 6> needs) {
  check_norm_conv_grad(grad, grad_mean, grad_var, y, mean, x, weight, stride);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  std::vector<Conv> convs{{x, weight, scale, shift, channel_gate, std::nullopt, relu, stride, depthwise}};
  Conv& conv = convs[0];
  allocate_grads(conv, x, needs);
  conv.grad = inner(grad);
  conv.grad_mean = dense(grad_mean);
  conv.grad_var = dense(grad_var);
  if (conv.grad_var.defined()) conv.y = inner(y);
  if (conv.grad_var.defined()) conv.mean = dense(mean);
  run_backward(convs);
  if (!needs[2]) conv.grad_scale = Tensor();
  if (!needs[3]) conv.grad_shift = Tensor();
  return all_defined(
      {conv.grad_x, conv.grad_weight, conv.grad_scale, conv.grad_shift, conv.grad_gate, conv.grad_bias}, x.options());
}

// ---- several at once: see fastmod/ops/_norm_convs.py for what the lists hold

using OptionalTensors = c10::List<std::optional<Tensor>>;
constexpr int64_t kTensors = 9, kForm = 5, kNumbers = 2, kKept = 6, kGrads = 4;

OptionalTensor at_slot(const OptionalTensors& tensors, int64_t i) {
  const OptionalTensor found = tensors.get(static_cast<size_t>(i));
  return found && found->defined() ? found : std::nullopt;
}

std::vector<Conv> convs_of(const OptionalTensors& tensors, at::IntArrayRef forms, at::ArrayRef<double> numbers) {
  const auto count = static_cast<int64_t>(tensors.size()) / kTensors;
  TORCH_CHECK_VALUE(count > 0 && static_cast<int64_t>(tensors.size()) == count * kTensors &&
                        static_cast<int64_t>(forms.size()) == count * kForm &&
                        static_cast<int64_t>(numbers.size()) == count * kNumbers,
                    "tensors, forms, numbers: expected ", kTensors, ", ", kForm, " and ", kNumbers, " a convolution");
  std::vector<Conv> convs;
  for (int64_t i = 0; i < count; ++i) {
    const auto tensor = [&](int64_t at) { return at_slot(tensors, i * kTensors + at); };
    const auto form = [&](int64_t at) { return forms[static_cast<size_t>(i * kForm + at)]; };
    TORCH_CHECK_VALUE(tensor(0) && tensor(1), "x, weight: expected tensors");
    convs.emplace_back(*tensor(0), *tensor(1), tensor(2), tensor(3), tensor(4), tensor(5), form(0) != 0, form(1),
                       form(2) != 0);
    Conv& conv = convs.back();
    check_like(convs[0].x, conv.x, "x");
    conv.momentum = numbers[static_cast<size_t>(i * kNumbers)];
    conv.eps = numbers[static_cast<size_t>(i * kNumbers + 1)];
    const auto wide = [&](int64_t at) {
      const OptionalTensor found = tensor(at);
      if (!found) return Tensor();
      check_float(*found, "norm");
      TORCH_CHECK_VALUE(found->sizes() == conv.weight.sizes().slice(0, 2), "norm: expected [E, Cout], got ",
                        found->sizes());
      TORCH_CHECK(found->device() == conv.x.device(), "norm: expected device ", conv.x.device());
      return expert_rows(found->to(compute_type(conv.x)));
    };
    conv.norm_weight = wide(7);
    conv.norm_bias = wide(8);
    if (conv.norm_weight.defined() && conv.norm_bias.defined() &&
        gap_of(conv.norm_weight) != gap_of(conv.norm_bias)) {
      conv.norm_weight = conv.norm_weight.contiguous();
      conv.norm_bias = conv.norm_bias.contiguous();
    }
    const OptionalTensor residual = tensor(6);
    if (!residual) continue;
    check_like(conv.x, *residual, "residual");
    TORCH_CHECK_VALUE(residual->sizes() == tensor(0)->sizes() && conv.shape.kernel == 1 && conv.shape.stride == 1 &&
                          !conv.shape.shared && !conv.shape.depthwise && !conv.relu && !conv.gate.defined() &&
                          conv.scale.defined(),
                      "residual: expected the shape of x, beside scale and shift of a 1x1 convolution, got ",
                      residual->sizes());
    conv.residual = inner(*residual);
  }
  return convs;
}

Results<kMaxConvs * kKept> norm_convs_forward(const OptionalTensors& tensors, at::TensorList running,
                                              at::IntArrayRef forms, at::ArrayRef<double> numbers) {
  std::vector<Conv> convs = convs_of(tensors, forms, numbers);
  TORCH_CHECK_VALUE(convs.size() <= kMaxConvs, "tensors: expected at most ", kMaxConvs, " convolutions");
  const c10::cuda::OptionalCUDAGuard guard(convs[0].x.device());
  size_t next = 0;
  std::vector<std::pair<Tensor, Tensor>> moved;  // copied running statistics, and the tensors they belong to
  for (size_t i = 0; i < convs.size(); ++i) {
    Conv& conv = convs[i];
    conv.y = blank_images(conv.shape, conv.x);
    if (conv.residual.defined()) conv.sum = empty_images(at_slot(tensors, i * kTensors)->sizes(), conv.x.options());
    if (forms[i * kForm + 3] == 0) continue;
    for (Tensor* each : {&conv.mean, &conv.var, &conv.norm_scale, &conv.norm_shift}) *each = conv.statistic();
    if (forms[i * kForm + 4] == 0) continue;
    const bool counts = forms[i * kForm + 4] == 2;
    TORCH_CHECK_VALUE(next + (counts ? 3 : 2) <= running.size(),
                      "running: expected two tensors, or three, for every batch norm that has them");
    for (Tensor* each : {&conv.running_mean, &conv.running_var}) {
      const Tensor& given = running[next++];
      TORCH_CHECK_VALUE(given.sizes() == conv.mean.sizes() && given.device() == conv.x.device(),
                        "running: expected [E, Cout] on the device of x, got ", given.sizes());
      *each = given.to(conv.mean.scalar_type()).contiguous();
      if (!each->is_same(given)) moved.emplace_back(given, *each);
    }
    if (!counts) continue;
    conv.batches = running[next++];
    TORCH_CHECK_VALUE(conv.batches.scalar_type() == at::kLong && conv.batches.numel() == 1 &&
                          conv.batches.device() == conv.x.device(),
                      "batches: expected one number, int64, on the device of x, got ", conv.batches.sizes());
  }
  run_forward(convs);
  for (const auto& [given, found] : moved) given.copy_(found);
  std::vector<Tensor> result;
  for (const Conv& conv : convs) {
    for (const Tensor& each : {conv.y, conv.sum, conv.mean, conv.var, conv.norm_scale, conv.norm_shift}) {
      result.push_back(each.defined() ? each : at::empty({0}, conv.x.options()));
    }
  }
  return spread_out(result, std::make_index_sequence<kMaxConvs * kKept>());
}

std::vector<Tensor> norm_convs_backward(const OptionalTensors& grads, const OptionalTensors& tensors,
                                        at::TensorList kept, at::IntArrayRef forms, at::ArrayRef<double> numbers,
                                        at::IntArrayRef needs) {
  std::vector<Conv> convs = convs_of(tensors, forms, numbers);
  const auto count = static_cast<int64_t>(convs.size());
  TORCH_CHECK_VALUE(static_cast<int64_t>(grads.size()) == count * kGrads &&
                        static_cast<int64_t>(kept.size()) == count * kKept &&
                        static_cast<int64_t>(needs.size()) == count * kTensors,
                    "grads, kept, needs: expected ", kGrads, ", ", kKept, " and ", kTensors, " a convolution");
  const c10::cuda::OptionalCUDAGuard guard(convs[0].x.device());
  for (int64_t i = 0; i < count; ++i) {
    Conv& conv = convs[static_cast<size_t>(i)];
    const auto grad = [&](int64_t at) { return at_slot(grads, i * kGrads + at); };
    const auto saved = [&](int64_t at) { return kept[static_cast<size_t>(i * kKept + at)]; };
    const Tensor x = *at_slot(tensors, i * kTensors), weight = *at_slot(tensors, i * kTensors + 1);
    std::array<bool, kTensors> need{};
    for (int64_t j = 0; j < kTensors; ++j) need[static_cast<size_t>(j)] = needs[static_cast<size_t>(i * kTensors + j)];
    TORCH_CHECK_VALUE(grad(0), "grads: expected that of y");
    TORCH_CHECK_VALUE(grad(2).has_value() == grad(3).has_value(), "grads: expected those of scale and shift, or none");
    const bool normed = grad(2).has_value();
    check_norm_conv_grad(*grad(0), grad(3), grad(2), normed ? OptionalTensor(saved(0)) : std::nullopt,
                         normed ? OptionalTensor(saved(2)) : std::nullopt, x, weight, conv.shape.stride);
    allocate_grads(conv, x, at::ArrayRef<bool>(need.data(), 6));
    conv.grad = inner(grad(0));
    if (conv.residual.defined()) {
      TORCH_CHECK_VALUE(saved(1).sizes() == x.sizes() && (!grad(1) || grad(1)->sizes() == x.sizes()),
                        "sum: expected the shape of x, got ", saved(1).sizes());
      conv.sum = inner(saved(1));
      conv.grad_sum = inner(grad(1));
      if (need[6]) conv.grad_residual = empty_images(x.sizes(), x.options());
    }
    if (!normed) continue;
    conv.of_norm_scale = dense(grad(2));
    conv.of_norm_shift = dense(grad(3));
    conv.y = inner(saved(0));
    conv.mean = saved(2).contiguous();
    conv.var = saved(3).contiguous();
    conv.norm_scale = saved(4).contiguous();
    if (need[7]) conv.grad_norm_weight = blank_like(conv.mean);
    if (need[8]) conv.grad_norm_bias = blank_like(conv.mean);
  }
  run_backward(convs);
  std::vector<Tensor> result;
  for (const Conv& conv : convs) {
    const size_t first = result.size();
    for (const Tensor& each : {conv.grad_x, conv.grad_weight, conv.grad_scale, conv.grad_shift, conv.grad_gate,
                               conv.grad_bias, conv.grad_residual, conv.grad_norm_weight, conv.grad_norm_bias}) {
      const bool wanted = each.defined() && needs[result.size()] != 0;
      result.push_back(wanted ? each : at::empty({0}, conv.x.options()));
    }
    // For parameters in another dtype than the sums.
    for (const size_t at : {first + 7, first + 8}) {
      const OptionalTensor own = at_slot(tensors, static_cast<int64_t>(at));
      if (own && needs[at]) result[at] = result[at].to(own->scalar_type());
    }
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("norm_conv_forward", norm_conv_forward);
  m.impl("norm_conv_backward", norm_conv_backward);
  m.impl("norm_convs_forward", norm_convs_forward);
  m.impl("norm_convs_backward", norm_convs_backward);
}

}  // namespace fastmod::cuda::bindings
