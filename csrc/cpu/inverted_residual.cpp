// The torch-facing side of an inverted residual block in training: passes over the images (inverted_residual_kernel.h),
// and the small steps between them: statistics, squeeze-excite, the gradients of batch norms.
#include "cpu/small_layers.h"
#include "cpu/inverted_residual.h"
#include "cpu/inverted_residual_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kMostParts = 16;  // parts of the batch with their own sums; must not depend on the number of threads

// Positions in the list of parameters: of each weight, followed by weight and bias of its batch norm.
struct Places {
  bool gated;
  int64_t expand = 0, depthwise = 3, squeeze = 6, excite = 9, project;
  explicit Places(size_t count) : gated(count == 15), project(gated ? 12 : 6) {}
};

template <typename T>
struct Problem {
  Places at;
  Tensor x;  // kept alive, like everything that args point into
  Norm<T> first, inner, last;
  InvertedResidualArgs<T> args{};
  int64_t parts;
  std::vector<Tensor> kept;

  Problem(const Tensor& x_, at::TensorList params, double eps)
      : at(params.size()), x(channels_last(x_)), first(params[1], params[2], values(x_), eps),
        inner(params[4], params[5], values(x_), eps),
        last(params[at.project + 1], params[at.project + 2], values(x_), eps) {
    const int64_t lanes = kernels<VectorKernels<T>>().lanes;
    args.batch = x_.size(0);
    args.tasks = x_.size(1);
    args.channels = x_.size(2);
    args.high = x_.size(3);
    args.wide = x_.size(4);
    args.expanded = params[0].size(1);
    args.narrow_columns = (args.channels + lanes - 1) / lanes * lanes;
    args.columns = (args.expanded + lanes - 1) / lanes * lanes;
    args.x = x.const_data_ptr<T>();
    parts = std::min(args.batch, kMostParts);
  }
  static double values(const Tensor& x) { return double(x.size(0)) * x.size(3) * x.size(4); }
  Tensor keep(const Tensor& tensor) {
    kept.push_back(tensor);
    return tensor;
  }
  T* fresh(at::IntArrayRef sizes) { return keep(empty_wide(sizes, x)).template data_ptr<T>(); }

  // What both directions need once the statistics are known.
  void set_norms(at::TensorList params) {
    for (Norm<T>* norm : {&first, &inner, &last}) norm->set_scale();
    args.expand = keep(padded<T>(readable(params[0]).reshape({args.tasks, args.expanded, args.channels}), args.expanded,
                                 args.channels, args.columns, true, nullptr))
                      .template const_data_ptr<T>();
    // Not folded into the weights: rounding there would make the same error in every pixel, and sums would not average
    // it out.
    args.expand_scale = first.scale.template const_data_ptr<T>();
    args.expand_bias = first.bias.template const_data_ptr<T>();
    args.inner_scale = inner.scale.template const_data_ptr<T>();
    args.inner_mean = inner.mean.template const_data_ptr<T>();
    args.inner_bias = inner.bias.template const_data_ptr<T>();
    args.scale = last.scale.template const_data_ptr<T>();
    args.mean = last.mean.template const_data_ptr<T>();
    args.bias = last.bias.template const_data_ptr<T>();
  }
  void set_taps(const Tensor& weight) {
    args.taps = keep(padded<T>(readable(weight).reshape({args.tasks, args.expanded, 9}), args.expanded, 9, args.columns,
                               true, nullptr))
                    .template const_data_ptr<T>();
  }
  double product_cycles() const {
    return double(args.pixels()) * (args.channels + 16) * args.columns / kernels<VectorKernels<T>>().lanes;
  }
  template <typename Body>
  void images(double cycles, const Body& body) {  // body(image, task, scratch)
    for_each<T>(args.batch * args.tasks, cycles, kernels<InvertedResidualKernels<T>>().scratch(args), x,
                [&](int64_t unit, T* scratch) { body(unit % args.batch, unit / args.batch, scratch); });
  }
  template <typename Body>
  void in_parts(double cycles, const Body& body) {  // body(part, begin, end, task, scratch)
    for_each<T>(parts * args.tasks, cycles * args.batch / parts, kernels<InvertedResidualKernels<T>>().scratch(args), x,
                [&](int64_t unit, T* scratch) {
                  const int64_t part = unit % parts;
                  body(part, part * args.batch / parts, (part + 1) * args.batch / parts, unit / parts, scratch);
                });
  }
  // Adds the sums of all parts into the first.
  void add_parts(T* sums, int64_t size) const {
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = 0; i < size; ++i) sums[i] += sums[part * size + i];
  }
};

// Mean and variance of the expansion, computed from those of its input: w . mean, w' covariance w.
template <typename T>
void expanded_stats(Problem<T>& problem, const Tensor& weight, const T* moments) {
  const auto& args = problem.args;
  const int64_t channels = args.channels;
  const T* w = weight.const_data_ptr<T>();
  T *mean = problem.first.mean.template data_ptr<T>(), *var = problem.first.var.template data_ptr<T>();
  std::vector<double> row(channels);
  for (int64_t t = 0; t < args.tasks; ++t, moments += (channels + 1) * channels)
    for (int64_t m = 0; m < args.expanded; ++m, w += channels) {
      double middle = 0, square = 0;
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t i = 0; i < channels; ++i) {
        middle += double(w[i]) * moments[i];
        for (int64_t j = 0; j < channels; ++j) row[j] += double(w[i]) * moments[(i + 1) * channels + j];
      }
      for (int64_t j = 0; j < channels; ++j) square += row[j] * w[j];
      mean[t * args.expanded + m] = static_cast<T>(middle);
      var[t * args.expanded + m] = static_cast<T>(std::max(square, 0.0));
    }
}

// -> y; [3, T, channels of all norms]: means, variances, and variances with Bessel's correction; tensors for the
// backward: inner, projected, moments [T, 1 + C, C], and with squeeze-excite pool, squeezed, excited, gate.
std::tuple<Tensor, Tensor, std::vector<Tensor>> inverted_residual_forward(const Tensor& x, at::TensorList params,
                                                                           double eps) {
  check_inverted_residual(x, params);
  return with_compute_type(x, [&](auto zero) -> std::tuple<Tensor, Tensor, std::vector<Tensor>> {
    using T = decltype(zero);
    Problem<T> problem(x, params, eps);
    auto& args = problem.args;
    const auto& kernel = kernels<InvertedResidualKernels<T>>();
    const int64_t batch = args.batch, tasks = args.tasks, channels = args.channels, expanded = args.expanded;
    const Places at = problem.at;
    const Tensor y = empty_images(x.sizes(), x);
    const Tensor inner = empty_images({batch, tasks, expanded, args.high, args.wide}, x);
    const Tensor projected = empty_images(x.sizes(), x), moments = empty_wide({tasks, 1 + channels, channels}, x);
    std::vector<Tensor> saved{inner, projected, moments};
    std::vector<Norm<T>*> norms{&problem.first, &problem.inner};
    std::optional<Dense<T>> squeeze, excite;
    if (at.gated) {
      squeeze.emplace(params, at.squeeze, batch, eps);
      excite.emplace(params, at.excite, batch, eps);
      norms.insert(norms.end(), {&squeeze->norm, &excite->norm});
      saved.push_back(empty_wide({3, tasks, batch, expanded}, x));
    }
    norms.push_back(&problem.last);
    if (batch > 0) {
      const double count = args.pixels();
      args.y = y.data_ptr<T>();
      args.inner = inner.data_ptr<T>();
      args.projected = projected.data_ptr<T>();
      args.unit_mean = problem.fresh({batch, tasks, std::max(channels, expanded)});
      args.unit_square = problem.fresh({batch, tasks, std::max(channels, expanded)});
      args.covariance = problem.fresh({problem.parts, tasks, channels, args.narrow_columns});
      T* known = moments.data_ptr<T>();
      const Tensor middle = problem.keep(empty_wide({2, tasks, channels}, x));
      args.middle = middle.const_data_ptr<T>();
      problem.images(2.0 * count * channels, [&](int64_t image, int64_t task, T*) { kernel.mean(args, image, task); });
      combine_stats<T>(args.unit_mean, args.unit_square, batch, tasks * channels, count, middle.data_ptr<T>(),
                       middle.data_ptr<T>() + tasks * channels);
      problem.in_parts(problem.product_cycles() / 4, [&](auto... unit) { kernel.covariance(args, unit...); });
      problem.add_parts(args.covariance, tasks * channels * args.narrow_columns);
      for (int64_t t = 0; t < tasks; ++t, known += (1 + channels) * channels) {
        std::copy(args.middle + t * channels, args.middle + (t + 1) * channels, known);
        for (int64_t i = 0; i < channels; ++i)
          for (int64_t j = 0; j < channels; ++j)
            known[(1 + i) * channels + j] = static_cast<T>(
                args.covariance[(t * channels + i) * args.narrow_columns + j] / (count * batch));
      }
      expanded_stats<T>(problem, readable(params[0]), moments.const_data_ptr<T>());
      problem.set_taps(params[at.depthwise]);
      problem.inner.var.zero_();
      problem.last.var.zero_();
      problem.set_norms(params);  // the scale of the first; the others follow
      problem.images(2 * problem.product_cycles(), [&](auto... unit) { kernel.expand(args, unit...); });
      combine_stats<T>(args.unit_mean, args.unit_square, batch, tasks * expanded, count,
                       problem.inner.mean.template data_ptr<T>(), problem.inner.var.template data_ptr<T>());
      problem.inner.set_scale();
      if (at.gated) {
        args.pool = saved[3].template data_ptr<T>();
        problem.images(count * expanded / 2, [&](int64_t image, int64_t task, T*) { kernel.pool(args, image, task); });
        auto [squeezed, active] = squeeze->forward(args.pool);
        active.relu_();
        auto [excited, gate] = excite->forward(active.template const_data_ptr<T>());
        gate.sigmoid_();
        args.gate = gate.template const_data_ptr<T>();
        saved.insert(saved.end(), {squeezed, excited, gate, active});
      }
      args.project = problem.keep(padded<T>(readable(params[at.project]).reshape({tasks, channels, expanded}), channels,
                                            expanded, args.narrow_columns, true, nullptr))
                         .template const_data_ptr<T>();
      problem.images(problem.product_cycles(), [&](auto... unit) { kernel.project(args, unit...); });
      combine_stats<T>(args.unit_mean, args.unit_square, batch, tasks * channels, count,
                       problem.last.mean.template data_ptr<T>(), problem.last.var.template data_ptr<T>());
      problem.last.set_scale();
      problem.images(count * channels, [&](int64_t image, int64_t task, T*) { kernel.sum(args, image, task); });
    } else {
      for (Norm<T>* norm : norms) norm->mean.zero_(), norm->var.zero_();
      moments.zero_();
      if (at.gated) {
        const int64_t squeezed = params[at.squeeze].size(1);
        for (const int64_t width : {squeezed, expanded, expanded, squeezed})
          saved.push_back(empty_wide({tasks, batch, width}, x));
      }
    }
    int64_t total = 0;
    for (const Norm<T>* norm : norms) total += norm->channels;
    const Tensor stats = empty_wide({3, tasks, total}, x);
    T* to = stats.data_ptr<T>();
    for (int64_t t = 0; t < tasks; ++t)
      for (const Norm<T>* norm : norms)
        for (int64_t c = 0; c < norm->channels; ++c, ++to) {
          const int64_t i = t * norm->channels + c;
          to[0] = norm->mean.template const_data_ptr<T>()[i];
          to[tasks * total] = norm->var.template const_data_ptr<T>()[i];
          to[2 * tasks * total] =
              static_cast<T>(to[tasks * total] * (norm->count > 1 ? norm->count / (norm->count - 1) : 1));
        }
    return {in_type(y, x.scalar_type()), stats, saved};
  });
}

// -> gradients of x (empty if not needed) and the parameters.
std::vector<Tensor> inverted_residual_backward(const Tensor& grad, const Tensor& x, at::TensorList params, double eps,
                                               const Tensor& stats, at::TensorList saved, bool need_x) {
  check_inverted_residual(x, params);
  check_like(x, grad, "grad");
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes(), "grad: expected ", x.sizes(), ", got ", grad.sizes());
  check_inverted_residual_saved(x, params, stats, saved);
  std::vector<Tensor> result{need_x ? empty_images(x.sizes(), x) : at::empty({0}, x.options())};
  for (const Tensor& param : params) result.push_back(empty_wide(param.sizes(), param));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    if (x.size(0) == 0) {
      for (Tensor& found : result) found.zero_();
      return;
    }
    Problem<T> problem(x, params, eps);
    auto& args = problem.args;
    const auto& kernel = kernels<InvertedResidualKernels<T>>();
    const int64_t batch = args.batch, tasks = args.tasks, channels = args.channels, expanded = args.expanded;
    const Places at = problem.at;
    const double count = double(batch) * args.pixels();
    std::optional<Dense<T>> squeeze, excite;
    if (at.gated) {
      squeeze.emplace(params, at.squeeze, batch, eps);
      excite.emplace(params, at.excite, batch, eps);
    }
    std::vector<Norm<T>*> norms{&problem.first, &problem.inner};
    if (at.gated) norms.insert(norms.end(), {&squeeze->norm, &excite->norm});
    norms.push_back(&problem.last);
    int64_t total = 0, begin = 0;
    for (const Norm<T>* norm : norms) total += norm->channels;
    for (Norm<T>* norm : norms) {
      for (int64_t t = 0; t < tasks; ++t) {
        const T* from = stats.const_data_ptr<T>() + t * total + begin;
        std::copy(from, from + norm->channels, norm->mean.template data_ptr<T>() + t * norm->channels);
        std::copy(from + tasks * total, from + tasks * total + norm->channels,
                  norm->var.template data_ptr<T>() + t * norm->channels);
      }
      norm->set_scale();
      begin += norm->channels;
    }
    problem.set_norms(params);
    problem.set_taps(params[at.depthwise]);
    const Tensor g = channels_last(grad), inner = channels_last(saved[0]), projected = channels_last(saved[1]);
    const T* moments = saved[2].const_data_ptr<T>();
    args.grad = g.const_data_ptr<T>();
    args.inner = inner.data_ptr<T>();
    args.projected = projected.data_ptr<T>();
    T* middle = problem.fresh({tasks, channels});
    for (int64_t t = 0; t < tasks; ++t)
      std::copy(moments + t * (1 + channels) * channels, moments + (t * (1 + channels) + 1) * channels,
                middle + t * channels);
    args.middle = middle;
    if (at.gated) args.gate = saved[6].const_data_ptr<T>();
    const auto out = [&](int64_t place) { return result[1 + place].template data_ptr<T>(); };

    // The last batch norm.
    args.unit_mean = problem.fresh({batch, tasks, channels});
    args.unit_square = problem.fresh({batch, tasks, channels});
    problem.images(2.0 * args.pixels() * channels,
                   [&](int64_t image, int64_t task, T*) { kernel.grad_sums(args, image, task); });
    T* factors = problem.fresh({tasks, 3, channels});
    for (int64_t t = 0; t < tasks; ++t) {
      const auto sums = batch_sums(args.unit_mean + t * channels, batch, tasks * channels, channels);
      const auto products = batch_sums(args.unit_square + t * channels, batch, tasks * channels, channels);
      problem.last.backward(t, sums.data(), products.data(), factors + t * 3 * channels, out(at.project + 1),
                            out(at.project + 2));
    }
    args.grad_factors = factors;

    // The projection, squeeze-excite, the second batch norm.
    const Tensor project = readable(params[at.project]).reshape({tasks, channels, expanded});
    args.project_grad_weight = problem.keep(padded<T>(project, channels, expanded, args.columns, false, nullptr))
                                   .template const_data_ptr<T>();
    const int64_t matrix = channels * args.columns;
    args.grad_project = problem.fresh({problem.parts, tasks, matrix});
    const Tensor inner_sums = problem.keep(empty_wide({3, tasks, batch, expanded}, x));
    args.inner_sums = inner_sums.template data_ptr<T>();
    problem.in_parts(3 * problem.product_cycles(), [&](auto... unit) { kernel.project_grad(args, unit...); });
    problem.add_parts(args.grad_project, tasks * matrix);
    for (int64_t line = 0; line < tasks * channels; ++line)
      std::copy(args.grad_project + line * args.columns, args.grad_project + line * args.columns + expanded,
                out(at.project) + line * expanded);
    const int64_t pool_size = tasks * batch * expanded;
    Tensor pool_grad;
    if (at.gated) {
      T* of_gate = args.inner_sums;  // becomes the gradient of the sigmoid's input
      for (int64_t i = 0; i < pool_size; ++i) of_gate[i] *= args.gate[i] * (1 - args.gate[i]);
      const Tensor& active = saved[7];
      auto [of_active, excite_weight, excite_scale, excite_bias] =
          excite->backward(of_gate, saved[5].const_data_ptr<T>(), active.const_data_ptr<T>());
      T* through = of_active.template data_ptr<T>();
      const T* values = active.const_data_ptr<T>();
      for (int64_t i = 0; i < of_active.numel(); ++i)
        if (values[i] <= 0) through[i] = 0;
      auto [of_pool, squeeze_weight, squeeze_scale, squeeze_bias] =
          squeeze->backward(through, saved[4].const_data_ptr<T>(), saved[3].const_data_ptr<T>());
      const Tensor found[6] = {squeeze_weight, squeeze_scale, squeeze_bias, excite_weight, excite_scale, excite_bias};
      for (int i = 0; i < 6; ++i) result[1 + at.squeeze + i] = found[i].reshape(params[at.squeeze + i].sizes());
      pool_grad = of_pool;
    }
    T* inner_factors = problem.fresh({tasks, 3, expanded});
    for (int64_t t = 0; t < tasks; ++t) {
      const T* units = args.inner_sums + pool_size + t * batch * expanded;
      auto sums = batch_sums(units, batch, expanded, expanded);
      auto products = batch_sums(units + pool_size, batch, expanded, expanded);
      if (at.gated) {
        const T *of_pool = pool_grad.const_data_ptr<T>() + t * batch * expanded;
        const T *share = saved[3].const_data_ptr<T>() + pool_size + t * batch * expanded, *centred = share + pool_size;
        for (int64_t b = 0; b < batch; ++b)
          for (int64_t c = 0; c < expanded; ++c) {
            sums[c] += double(of_pool[b * expanded + c]) * share[b * expanded + c];
            products[c] += double(of_pool[b * expanded + c]) * centred[b * expanded + c];
          }
      }
      problem.inner.backward(t, sums.data(), products.data(), inner_factors + t * 3 * expanded, out(at.depthwise + 1),
                             out(at.depthwise + 2));
    }
    args.inner_factors = inner_factors;
    if (at.gated) args.pool_grad = pool_grad.mul_(1.0 / args.pixels()).template const_data_ptr<T>();

    // Depthwise convolution and expansion.
    const Tensor expand = readable(params[0]).reshape({tasks, expanded, channels});
    const T* expand_scale = problem.first.scale.template const_data_ptr<T>();
    args.expand_grad_weight =
        problem.keep(padded<T>(expand, expanded, channels, args.narrow_columns, false, expand_scale))
            .template const_data_ptr<T>();
    args.grad_expand = problem.fresh({problem.parts, tasks, matrix});
    args.grad_taps = problem.fresh({problem.parts, tasks, 9, args.columns});
    args.expand_sums = problem.fresh({batch, tasks, expanded});
    args.grad_x = need_x ? result[0].template data_ptr<T>() : nullptr;
    problem.in_parts(6 * problem.product_cycles(), [&](auto... unit) { kernel.expand_grad(args, unit...); });
    problem.add_parts(args.grad_expand, tasks * matrix);
    problem.add_parts(args.grad_taps, tasks * 9 * args.columns);
    T* input_factors = problem.fresh({tasks, channels, args.narrow_columns});
    T* input_shift = problem.fresh({tasks, channels});
    std::fill(input_factors, input_factors + tasks * channels * args.narrow_columns, T(0));
    std::vector<T> of_norm(3 * expanded);
    std::vector<double> row(channels), shift(channels), square(channels * channels);
    for (int64_t t = 0; t < tasks; ++t) {
      const T *w = expand.const_data_ptr<T>() + t * expanded * channels, *products_of = args.grad_expand + t * matrix;
      const T* covariance = moments + (t * (1 + channels) + 1) * channels;
      const auto sums = batch_sums(args.expand_sums + t * expanded, batch, tasks * expanded, expanded);
      std::vector<double> products(expanded, 0.0);  // with the centred expansion (w times the centred input)
      for (int64_t m = 0; m < expanded; ++m)
        for (int64_t i = 0; i < channels; ++i)
          products[m] += double(products_of[i * args.columns + m]) * w[m * channels + i];
      problem.first.backward(t, sums.data(), products.data(), of_norm.data(), out(1), out(2));
      std::fill(shift.begin(), shift.end(), 0.0);
      std::fill(square.begin(), square.end(), 0.0);
      T* grad_w = out(0) + t * expanded * channels;
      for (int64_t m = 0; m < expanded; ++m) {
        const T* own = w + m * channels;
        const double scale = of_norm[m], constant = -scale * of_norm[expanded + m];
        const double slope = -scale * of_norm[2 * expanded + m];
        std::fill(row.begin(), row.end(), 0.0);
        for (int64_t i = 0; i < channels; ++i)
          for (int64_t j = 0; j < channels; ++j) row[j] += double(own[i]) * covariance[i * channels + j];
        for (int64_t i = 0; i < channels; ++i) {
          grad_w[m * channels + i] = static_cast<T>(scale * products_of[i * args.columns + m] + slope * count * row[i]);
          shift[i] += constant * own[i];
          const double factor = slope * own[i];
          for (int64_t j = 0; j < channels; ++j) square[i * channels + j] += factor * own[j];
        }
      }
      for (int64_t i = 0; i < channels; ++i) {
        input_shift[t * channels + i] = static_cast<T>(shift[i]);
        for (int64_t j = 0; j < channels; ++j)
          input_factors[(t * channels + i) * args.narrow_columns + j] = static_cast<T>(square[i * channels + j]);
      }
      for (int64_t m = 0; m < expanded; ++m)
        for (int64_t tap = 0; tap < 9; ++tap)
          out(at.depthwise)[(t * expanded + m) * 9 + tap] = args.grad_taps[(t * 9 + tap) * args.columns + m];
    }
    args.input_factors = input_factors;
    args.input_shift = input_shift;
    if (need_x) problem.images(problem.product_cycles() / 4, [&](auto... unit) { kernel.input_grad(args, unit...); });
  });
  for (size_t i = 0; i < params.size(); ++i) result[1 + i] = in_type(result[1 + i], params[i].scalar_type());
  result[0] = in_type(result[0], x.scalar_type());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("inverted_residual_forward", inverted_residual_forward);
  m.impl("inverted_residual_backward", inverted_residual_backward);
}

}  // namespace fastmod::cpu
