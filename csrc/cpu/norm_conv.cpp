// The torch-facing side of convolutions that normalise what they read; the work is in norm_conv_kernel.h.
#include "cpu/images.h"
#include "cpu/norm_conv_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

// Limits the memory for weight gradients, of which each part of the batch has its own. The number of parts follows from
// this limit and not from the number of threads, which therefore does not change the result.
constexpr int64_t kPartBytes = 4ll << 20;
constexpr int64_t kMostParts = 32;

template <typename T>
struct Problem {
  Tensor x, scale, shift, gate;  // kept alive: args point into them
  NormConvArgs<T> args{};

  Problem(const Tensor& x_, const Tensor& weight, const OptionalTensor& scale_, const OptionalTensor& shift_,
          const OptionalTensor& gate_, bool relu, int64_t stride, bool depthwise) {
    x = channels_last(x_);
    args.batch = x_.size(0);
    args.experts = weight.size(0);
    args.cin = x_.size(-3);
    args.cout = weight.size(1);
    args.high = x_.size(-2);
    args.wide = x_.size(-1);
    args.out_high = (args.high + stride - 1) / stride;
    args.out_wide = (args.wide + stride - 1) / stride;
    args.kernel = weight.size(-1);
    args.stride = stride;
    args.shared = x_.dim() == 4;
    args.depthwise = depthwise;
    args.relu = relu;
    args.winograd = !depthwise && uses_winograd<T>(args.kernel, stride, args.cin, args.cout);
    args.x = x.const_data_ptr<T>();
    const int64_t lanes = kernels<VectorKernels<T>>().lanes;
    args.columns = (args.cout + lanes - 1) / lanes * lanes;
    args.input_columns = (args.cin + lanes - 1) / lanes * lanes;
    if (scale_) {
      scale = readable(*scale_);
      shift = readable(*shift_);
      args.scale = scale.const_data_ptr<T>();
      args.shift = shift.const_data_ptr<T>();
      args.affine_stride = scale.size(0) == 1 ? 0 : args.cin;
    }
    if (gate_) {
      gate = readable(*gate_);
      args.gate = gate.const_data_ptr<T>();
    }
  }
  int64_t taps() const { return args.kernel * args.kernel; }
  int64_t matrix() const { return args.depthwise ? args.columns : args.cin * args.columns; }
  // Estimated for a forward pass over one image of one expert: vectors of products.
  double cycles() const {
    return double(args.out_high) * args.out_wide * (taps() * (args.depthwise ? 1 : args.cin) + 8) * args.columns /
           kernels<VectorKernels<T>>().lanes;
  }
};

// The taps in the order in which the gradient of the input uses them: rows in reverse; columns too, but with stride 2
// the middle one first, then those that odd pixels see. -> [E, k, k, cout, input_columns]
template <typename T>
Tensor packed_for_input(const Tensor& weight, const Problem<T>& problem) {
  const auto& args = problem.args;
  const int64_t k = args.kernel, taps = problem.taps(), columns = args.input_columns;
  const int64_t outputs = args.depthwise ? 1 : args.cout, matrix = outputs * columns;
  const int64_t apart[3] = {1, 2, 0};
  const Tensor out = empty_wide({args.experts * taps * matrix}, weight);
  const T* from = weight.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  for_each<T>(args.experts * taps, 4.0 * matrix, 0, weight, [&](int64_t index, T*) {
    const int64_t tap = index % taps, column = k == 3 && args.stride == 2 ? apart[tap % k] : k - 1 - tap % k;
    const T* w =
        from + index / taps * args.cout * (args.depthwise ? 1 : args.cin) * taps + (k - 1 - tap / k) * k + column;
    T* row = to + index * matrix;
    for (int64_t o = 0; o < outputs; ++o, row += columns) {
      for (int64_t i = 0; i < args.cin; ++i) row[i] = w[(o * args.cin + i) * taps];
      std::fill(row + args.cin, row + columns, T(0));
    }
  });
  return out;
}

template <typename T>
Tensor transformed(const Tensor& taps, const Problem<T>& problem, int64_t matrix) {
  return problem.args.winograd ? winograd_taps<T>(taps, problem.args.experts, matrix) : taps;
}

std::tuple<Tensor, Tensor, Tensor> norm_conv_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                                                     const OptionalTensor& shift, const OptionalTensor& channel_gate,
                                                     const OptionalTensor& bias, bool relu, int64_t stride,
                                                     bool depthwise, bool stats) {
  check_norm_conv(x, weight, scale, shift, channel_gate, bias, stride, depthwise);
  return with_compute_type(x, [&](auto zero) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = decltype(zero);
    Problem<T> problem(x, weight, scale, shift, channel_gate, relu, stride, depthwise);
    auto& args = problem.args;
    const Tensor y = empty_images({args.batch, args.experts, args.cout, args.out_high, args.out_wide}, x);
    const at::DimVector shape = stats ? at::DimVector{args.experts, args.cout} : at::DimVector{0};
    const Tensor mean = empty_wide(shape, x), var = empty_wide(shape, x);
    if (args.batch == 0) return {in_type(y, x.scalar_type()), mean.zero_(), var.zero_()};
    const Tensor w = transformed(packed_taps<T>(readable(weight), args.columns), problem, problem.matrix());
    const Tensor added = bias ? readable(*bias) : Tensor();
    const int64_t channels = args.experts * args.cout;
    const Tensor units = stats ? empty_wide({2, args.batch, channels}, x) : Tensor();
    args.weight = w.const_data_ptr<T>();
    args.bias = pointer<T>(added);
    args.y = y.data_ptr<T>();
    args.unit_mean = pointer<T>(units);
    args.unit_square = stats ? args.unit_mean + args.batch * channels : nullptr;
    const auto& kernel = kernels<NormConvKernels<T>>();
    for_each<T>(args.batch * args.experts, problem.cycles(), kernel.scratch(args), x,
                [&](int64_t unit, T* scratch) {  // all images of an expert in turn: its weights stay in cache
                  kernel.forward(args, unit % args.batch, unit / args.batch, scratch);
                });
    if (stats)
      combine_stats<T>(args.unit_mean, args.unit_square, args.batch, channels, double(args.out_high) * args.out_wide,
                       mean.data_ptr<T>(), var.data_ptr<T>());
    return {in_type(y, x.scalar_type()), mean, var};
  });
}

// [parts, E, taps, cin, columns] -> [E, cout, cin, k, k]
template <typename T>
Tensor unpacked_sum(const Tensor& parts, int64_t count, const Tensor& weight, const Problem<T>& problem) {
  const auto& args = problem.args;
  const int64_t taps = problem.taps(), matrix = problem.matrix(), inputs = args.depthwise ? 1 : args.cin;
  const int64_t size = args.experts * args.taps() * matrix;
  T* sums = parts.data_ptr<T>();
  for_each<T>(args.experts * args.taps(), double(count) * matrix / 4, 0, weight, [&](int64_t index, T*) {
    T* own = sums + index * matrix;
    for (int64_t part = 1; part < count; ++part)
      for (int64_t i = 0; i < matrix; ++i) own[i] += own[part * size + i];
  });
  Tensor plain = parts;
  if (args.winograd) {
    plain = empty_wide({args.experts * taps * matrix}, weight);
    for (int64_t e = 0; e < args.experts; ++e)
      kernels<WinogradKernels<T>>().weight_grads(sums + e * 16 * matrix, matrix,
                                                 plain.data_ptr<T>() + e * taps * matrix);
  }
  const Tensor out = empty_wide(weight.sizes(), weight);
  const T* from = plain.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  for_each<T>(args.experts * taps, 4.0 * matrix, 0, weight, [&](int64_t index, T*) {
    T* w = to + index / taps * args.cout * inputs * taps + index % taps;
    for (int64_t i = 0; i < inputs; ++i)
      for (int64_t o = 0; o < args.cout; ++o)
        w[(o * inputs + i) * taps] = from[index * matrix + i * args.columns + o];
  });
  return out;
}

std::vector<Tensor> norm_conv_backward(const Tensor& grad, const OptionalTensor& grad_mean,
                                       const OptionalTensor& grad_var, const OptionalTensor& y,
                                       const OptionalTensor& mean, const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& scale, const OptionalTensor& shift,
                                       const OptionalTensor& channel_gate, bool relu, int64_t stride, bool depthwise,
                                       std::array<bool, 6> needs) {
  check_norm_conv(x, weight, scale, shift, channel_gate, std::nullopt, stride, depthwise);
  check_norm_conv_grad(grad, grad_mean, grad_var, y, mean, x, weight, stride);
  const auto [need_x, need_weight, need_scale, need_shift, need_gate, need_bias] = needs;
  const auto type = x.scalar_type();
  std::vector<Tensor> result;  // empty where not needed; separate tensors, as results of an op must not share memory
  for (int i = 0; i < 6; ++i) result.push_back(at::empty({0}, x.options()));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(x, weight, scale, shift, channel_gate, relu, stride, depthwise);
    auto& args = problem.args;
    const auto& kernel = kernels<NormConvKernels<T>>();
    const auto wide = [&](bool needed, at::IntArrayRef sizes) { return needed ? empty_wide(sizes, x) : Tensor(); };
    const Tensor g = channels_last(grad), w = readable(weight), yr = grad_var ? channels_last(*y) : Tensor();
    const Tensor for_input = need_x || need_scale || need_shift || need_gate
                                 ? transformed(packed_for_input(w, problem), problem, args.cout * args.input_columns)
                                 : Tensor();
    const int64_t bytes = args.experts * args.taps() * problem.matrix() * int64_t(sizeof(T));
    const int64_t parts =
        std::max<int64_t>(std::min(args.batch, std::clamp<int64_t>(kPartBytes / bytes, 8, kMostParts)), 1);
    const Tensor grad_x = need_x ? empty_images(x.sizes(), x) : Tensor();
    const Tensor grad_weight = wide(need_weight, {parts * bytes / int64_t(sizeof(T))});
    const Tensor grad_bias = wide(need_bias, {parts, args.experts, args.cout});
    const at::DimVector sums{args.batch, args.experts, args.cin};
    const Tensor grad_scale = wide(need_scale || need_shift, sums), grad_shift = wide(need_scale || need_shift, sums);
    const Tensor grad_gate = wide(need_gate, sums);
    // What the gradients of mean and variance contribute to each value of y.
    const double count = double(args.batch) * args.out_high * args.out_wide;
    const Tensor of_mean = grad_mean ? at::div(readable(*grad_mean), at::Scalar(count)) : Tensor();
    const Tensor of_var = grad_var ? at::mul(readable(*grad_var), at::Scalar(2 / count)) : Tensor();
    const Tensor middle = grad_var ? readable(*mean) : Tensor();
    args.grad = g.const_data_ptr<T>();
    args.y_read = pointer<T>(yr);
    args.mean = pointer<T>(middle);
    args.grad_mean = pointer<T>(of_mean);
    args.grad_var = pointer<T>(of_var);
    args.input_weight = pointer<T>(for_input);
    args.grad_x = pointer<T>(grad_x);
    args.grad_scale = pointer<T>(grad_scale);
    args.grad_shift = pointer<T>(grad_shift);
    args.grad_gate = pointer<T>(grad_gate);
    args.grad_weight = pointer<T>(grad_weight);
    args.grad_bias = pointer<T>(grad_bias);
    const int64_t across = args.shared ? 1 : args.experts;
    const double cycles = 2 * problem.cycles() * args.batch * args.experts / (parts * across);
    for_each<T>(args.batch == 0 ? 0 : parts * across, cycles, kernel.scratch(args), x, [&](int64_t unit, T* scratch) {
      const int64_t part = unit % parts;
      kernel.backward(args, part, part * args.batch / parts, (part + 1) * args.batch / parts, unit / parts, scratch);
    });
    if (need_x) result[0] = in_type(grad_x, type);
    if (args.batch == 0) {
      if (need_weight) result[1] = at::zeros(weight.sizes(), weight.options());
      if (need_scale) result[2] = at::zeros(scale->sizes(), scale->options());
      if (need_shift) result[3] = at::zeros(shift->sizes(), shift->options());
      if (need_bias) result[5] = at::zeros({args.experts, args.cout}, x.options());
    } else {
      if (need_weight) result[1] = in_type(unpacked_sum(grad_weight, parts, w, problem), type);
      if (need_scale) result[2] = parameter_grad<T>(grad_scale, problem.scale);
      if (need_shift) result[3] = parameter_grad<T>(grad_shift, problem.shift);
      if (need_bias) {
        const Tensor total = empty_wide({args.experts, args.cout}, x);
        sum_rows(grad_bias.const_data_ptr<T>(), parts, total.numel(), total.data_ptr<T>());
        result[5] = in_type(total, type);
      }
    }
    if (need_gate) result[4] = in_type(grad_gate, type);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("norm_conv_forward", norm_conv_forward);
  m.impl("norm_conv_backward", norm_conv_backward);
}

}  // namespace fastmod::cpu
