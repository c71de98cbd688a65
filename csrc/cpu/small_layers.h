// The small steps between the passes over images, for the torch-facing CPU code: batch norms with known statistics, and
// fully connected layers with batch norm over the batch. One thread is enough for them.
#pragma once

#include "cpu/images.h"
#include "cpu/inverted_residual_kernel.h"

namespace fastmod::cpu {

// weight [T, rows, columns] -> [T, rows, width], or transposed [T, columns, width]; row r is multiplied by scale[t, r].
template <typename T>
at::Tensor padded(const at::Tensor& weight, int64_t rows, int64_t columns, int64_t width, bool transposed,
                  const T* scale) {
  const int64_t tasks = weight.size(0), lines = transposed ? columns : rows;
  const at::Tensor out = empty_wide({tasks, lines, width}, weight).zero_();
  const T* from = weight.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  for (int64_t t = 0; t < tasks; ++t, from += rows * columns, to += lines * width)
    for (int64_t r = 0; r < rows; ++r) {
      const T factor = scale ? scale[t * rows + r] : T(1);
      for (int64_t c = 0; c < columns; ++c)
        to[transposed ? c * width + r : r * width + c] = factor * from[r * columns + c];
    }
  return out;
}

// One batch norm of [T, channels].
template <typename T>
struct Norm {
  int64_t tasks, channels;
  double count, eps;     // values behind each statistic
  at::Tensor weight, bias;   // [T, channels]
  at::Tensor mean, var, scale;

  Norm(const at::Tensor& weight_, const at::Tensor& bias_, double count_, double eps_)
      : tasks(weight_.size(0)), channels(weight_.size(1)), count(count_), eps(eps_), weight(readable(weight_)),
        bias(readable(bias_)), mean(empty_wide(weight.sizes(), weight)), var(empty_wide(weight.sizes(), weight)),
        scale(empty_wide(weight.sizes(), weight)) {}

  void set_scale() {
    const T *w = weight.const_data_ptr<T>(), *v = var.const_data_ptr<T>();
    T* to = scale.data_ptr<T>();
    for (int64_t i = 0; i < tasks * channels; ++i) to[i] = static_cast<T>(w[i] / std::sqrt(v[i] + eps));
  }
  // The backward of task t, from the sums over all values of the gradient and of gradient times centred value. A
  // value's gradient becomes factors[0] * (gradient - factors[1] - factors[2] * centred value). The difference comes
  // first: where a batch hardly varies the scale is large, and the difference is tiny.
  void backward(int64_t t, const double* sums, const double* products, T* factors, T* grad_weight, T* grad_bias) const {
    const T *v = var.const_data_ptr<T>() + t * channels, *s = scale.const_data_ptr<T>() + t * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const double inverse = 1 / std::sqrt(v[c] + eps);
      factors[c] = s[c];
      factors[channels + c] = static_cast<T>(sums[c] / count);
      factors[2 * channels + c] = static_cast<T>(inverse * inverse * products[c] / count);
      grad_weight[t * channels + c] = static_cast<T>(inverse * products[c]);
      grad_bias[t * channels + c] = static_cast<T>(sums[c]);
    }
  }
};

// A fully connected layer of squeeze-excite and its batch norm over the batch: [T, B, in] -> [T, B, out].
template <typename T>
struct Dense {
  int64_t tasks, batch, in, out, in_columns, out_columns;
  at::Tensor weight;  // [T, out, in]
  Norm<T> norm;

  Dense(at::TensorList params, int64_t at, int64_t batch_, double eps)
      : tasks(params[at].size(0)), batch(batch_), in(params[at].numel() / (tasks * params[at].size(1))),
        out(params[at].size(1)), weight(readable(params[at])),
        norm(params[at + 1], params[at + 2], double(batch_), eps) {
    const int64_t lanes = kernels<VectorKernels<T>>().lanes;
    in_columns = (in + lanes - 1) / lanes * lanes;
    out_columns = (out + lanes - 1) / lanes * lanes;
  }
  // -> (before the batch norm, after it)
  std::pair<at::Tensor, at::Tensor> forward(const T* input) {
    const at::Tensor raw = empty_wide({tasks, batch, out}, weight), result = empty_wide({tasks, batch, out}, weight);
    const at::Tensor w = padded<T>(weight, out, in, out_columns, true, nullptr);
    T* values = raw.data_ptr<T>();
    for (int64_t t = 0; t < tasks; ++t)
      kernels<InvertedResidualKernels<T>>().multiply(batch, in, input + t * batch * in,
                                                     w.const_data_ptr<T>() + t * in * out_columns, out_columns, out,
                                                     values + t * batch * out);
    T *mean = norm.mean.template data_ptr<T>(), *var = norm.var.template data_ptr<T>();
    std::vector<double> sum(out), square(out);
    for (int64_t t = 0; t < tasks; ++t) {
      const T* rows = values + t * batch * out;
      std::fill(sum.begin(), sum.end(), 0.0);
      std::fill(square.begin(), square.end(), 0.0);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t c = 0; c < out; ++c) sum[c] += rows[b * out + c];
      for (int64_t c = 0; c < out; ++c) sum[c] /= batch;
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t c = 0; c < out; ++c) square[c] += (rows[b * out + c] - sum[c]) * (rows[b * out + c] - sum[c]);
      for (int64_t c = 0; c < out; ++c) {
        mean[t * out + c] = static_cast<T>(sum[c]);
        var[t * out + c] = static_cast<T>(square[c] / batch);
      }
    }
    norm.set_scale();
    const T *scale = norm.scale.template const_data_ptr<T>(), *bias = norm.bias.template const_data_ptr<T>();
    T* to = result.data_ptr<T>();
    for (int64_t t = 0; t < tasks; ++t)
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t c = 0; c < out; ++c) {
          const int64_t i = (t * batch + b) * out + c;
          to[i] = scale[t * out + c] * (values[i] - mean[t * out + c]) + bias[t * out + c];
        }
    return {raw, result};
  }
  // grad [T, B, out], with respect to the batch norm's output, is overwritten -> gradients of input, weight, norm.
  std::array<at::Tensor, 4> backward(T* grad, const T* raw, const T* input) {
    const at::Tensor grad_input = empty_wide({tasks, batch, in}, weight);
    const at::Tensor grad_weight = empty_wide({tasks, out, in}, weight), packed = empty_wide({out, in_columns}, weight);
    const at::Tensor grad_scale = empty_wide({tasks, out}, weight), grad_bias = empty_wide({tasks, out}, weight);
    const at::Tensor w = padded<T>(weight, out, in, in_columns, false, nullptr);
    const T* mean = norm.mean.template const_data_ptr<T>();
    std::vector<double> sum(out), product(out);
    std::vector<T> factors(3 * out);
    for (int64_t t = 0; t < tasks; ++t, mean += out) {
      T* g = grad + t * batch * out;
      const T* values = raw + t * batch * out;
      std::fill(sum.begin(), sum.end(), 0.0);
      std::fill(product.begin(), product.end(), 0.0);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t c = 0; c < out; ++c) {
          sum[c] += g[b * out + c];
          product[c] += double(g[b * out + c]) * (values[b * out + c] - mean[c]);
        }
      norm.backward(t, sum.data(), product.data(), factors.data(), grad_scale.data_ptr<T>(), grad_bias.data_ptr<T>());
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t c = 0; c < out; ++c)
          g[b * out + c] = factors[c] * ((g[b * out + c] - factors[out + c]) -
                                         factors[2 * out + c] * (values[b * out + c] - mean[c]));
      const auto& kernel = kernels<InvertedResidualKernels<T>>();
      kernel.multiply(batch, out, g, w.const_data_ptr<T>() + t * out * in_columns, in_columns, in,
                      grad_input.data_ptr<T>() + t * batch * in);
      T* sums = packed.zero_().data_ptr<T>();
      kernel.add_products(batch, out, g, input + t * batch * in, in, sums, in_columns);
      T* to = grad_weight.data_ptr<T>() + t * out * in;
      for (int64_t o = 0; o < out; ++o) std::copy(sums + o * in_columns, sums + o * in_columns + in, to + o * in);
    }
    return {grad_input, grad_weight, grad_scale, grad_bias};
  }
};

// Sums over the batch of task t, in [B, T, channels], or in [T, B, channels] if tasks come first.
template <typename T>
std::vector<double> batch_sums(const T* units, int64_t batch, int64_t stride, int64_t channels) {
  std::vector<double> sums(channels, 0.0);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t c = 0; c < channels; ++c) sums[c] += units[b * stride + c];
  return sums;
}

}  // namespace fastmod::cpu
