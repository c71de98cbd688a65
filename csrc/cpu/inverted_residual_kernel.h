// The passes of an inverted residual block in training, for images [P, C] with M expanded channels.
//
// The only expanded tensor that reaches memory is the output of the depthwise convolution. What comes before it is
// recomputed in the backward from the narrow input: kExpanded channels of an image at a time stay in L1.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// An inverted residual block, for images [B, T, H * W, C] with M expanded channels. The scales are those of the batch
// norms: weight / sqrt(var + eps).
template <typename T>
struct InvertedResidualArgs {
  int64_t batch, tasks, channels, expanded, high, wide;
  int64_t narrow_columns, columns;  // of packed weights: C and M, rounded up to whole vectors
  FASTMOD_INLINE int64_t pixels() const { return high * wide; }
  const T* x;
  const T* middle;                            // [T, C], the mean of x
  T* covariance;                              // [parts, T, C, narrow_columns]
  const T *expand, *expand_scale, *expand_bias;  // [T, C, columns], [T, M], [T, M]
  const T* taps;                              // [T, 9, columns]
  T* inner;                                   // [B, T, H * W, M], the output of the depthwise convolution
  const T *inner_scale, *inner_mean, *inner_bias;  // [T, M]
  T* pool;                                    // [3, T, B, M]
  const T* gate;                              // [T, B, M] or null
  const T* project;                           // [T, M, narrow_columns]
  T* projected;                               // [B, T, H * W, C]
  const T *scale, *mean, *bias;               // [T, C]
  T *unit_mean, *unit_square;                 // of every image: [B, T, channels]
  T* y;
  // inference only: squeeze-excite, or null
  int64_t squeezed, squeeze_columns;
  const T *squeeze, *squeeze_scale, *squeeze_bias;  // [T, M, squeeze_columns], [T, R], [T, R]
  const T *excite, *excite_scale, *excite_bias;     // [T, R, columns], [T, M], [T, M]
  // backward only
  const T* grad;
  const T *grad_factors, *inner_factors;      // [T, 3, C], [T, 3, M]: of batch norms' gradients
  const T* project_grad_weight;               // [T, C, columns]
  T* grad_project;                            // [parts, T, C, columns]
  T* inner_sums;                              // [3, T, B, M]
  const T* pool_grad;                         // [T, B, M], a pixel's share, or null
  T *grad_expand, *grad_taps;                 // [parts, T, C, columns], [parts, T, 9, columns]
  T* expand_sums;                             // [B, T, M]
  const T* expand_grad_weight;                // [T, M, narrow_columns] times the scale
  T* grad_x;                                  // or null
  const T *input_factors, *input_shift;       // [T, C, narrow_columns], [T, C]
};

template <typename T>
struct InvertedResidualKernels {
  int64_t (*scratch)(const InvertedResidualArgs<T>&);
  void (*mean)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*covariance)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end, int64_t task,
                     T* scratch);
  void (*expand)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  void (*pool)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*project)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  void (*sum)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*grad_sums)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*project_grad)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end, int64_t task,
                       T* scratch);
  void (*expand_grad)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end, int64_t task,
                      T* scratch);
  void (*input_grad)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  // out[rows, width] = source[rows, depth] weight[depth, columns]; sums[depth, columns] += source' grad[rows, width]
  void (*multiply)(int64_t rows, int64_t depth, const T* source, const T* weight, int64_t columns, int64_t width,
                   T* out);
  void (*add_products)(int64_t rows, int64_t depth, const T* source, const T* grad, int64_t width, T* sums,
                       int64_t columns);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/norm_conv_kernel.h"
#include "cpu/norm_pool_kernel.h"

namespace fastmod::cpu::FASTMOD_ISA {

constexpr int64_t kExpanded = 32;
// Pixels per sum of products: longer sums would lose digits.
constexpr int64_t kProductPixels = 128;

template <typename T>
struct InvertedResidualScratch {
  int64_t line;  // elements from one row of a padded image to the next
  int64_t narrow = 0, centred = 0, wide = 0, gated = 0, padded = 0, grads = 0, all = 0, row = 0, size = 0;
  explicit InvertedResidualScratch(const InvertedResidualArgs<T>& args) : line((args.wide + 2) * kExpanded) {
    const auto take = [&](int64_t count) {
      const int64_t at = size;
      size += (count + 31) / 16 * 16;
      return at;
    };
    narrow = take(args.pixels() * args.channels);
    centred = take(args.pixels() * args.channels);
    wide = take(args.pixels() * kExpanded);  // one group of expanded channels
    gated = take(args.pixels() * kExpanded);
    padded = take((args.high + 2) * line);  // the same with a frame of zeros
    grads = take((args.high + 2) * line);
    all = take(args.pixels() * args.expanded);  // all expanded channels
    row = take(args.columns + args.squeeze_columns);
  }
};
template <typename T>
int64_t inverted_residual_scratch(const InvertedResidualArgs<T>& args) {
  return InvertedResidualScratch<T>(args).size;
}

// Calls body(first, width) for every group of expanded channels.
template <typename T, typename Body>
FASTMOD_INLINE void by_groups(const InvertedResidualArgs<T>& args, const Body& body) {
  for (int64_t m = 0; m < args.expanded; m += kExpanded) body(m, std::min(kExpanded, args.expanded - m));
}

template <typename T>
void centre(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* to) {
  const int64_t channels = args.channels, size = args.pixels() * channels;
  const T *from = args.x + (image * args.tasks + task) * size, *middle = args.middle + task * channels;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> mean = load_lanes(middle + c, left);
    for (int64_t p = c; p < size; p += channels) store_lanes(to + p, load_lanes(from + p, left) - mean, left);
  });
}

// sums[rows, columns] += left[pixels, rows]' right[pixels, width].
template <typename T>
void add_products(int64_t pixels, int64_t rows, const T* left, const T* right, int64_t width, int64_t right_stride,
                  T* sums, int64_t columns, const ConvRepeat<T>& repeat = {}) {
  for (int64_t p = 0; p < pixels; p += kProductPixels)
    conv_grad_run(rows, width, columns, 1, std::min(kProductPixels, pixels - p), left + p * rows, rows, 0,
                  right + p * right_stride, right_stride, 0, sums, p == 0 ? repeat : ConvRepeat<T>{});
}

// out[pixels, width] = source[pixels, depth] weight[depth, columns].
template <typename T>
void multiply(int64_t pixels, int64_t depth, const T* source, const T* weight, int64_t columns, int64_t width, T* out,
              int64_t out_stride, const ConvRepeat<T>& repeat = {}) {
  const ConvRun<T> run{0, depth, weight};
  conv_row<T>(pixels, width, columns, &run, 1, source, depth, out, out_stride, nullptr, repeat);
}

// The same for dense rows, for the table of kernels.
template <typename T>
void multiply_rows(int64_t rows, int64_t depth, const T* source, const T* weight, int64_t columns, int64_t width,
                   T* out) {
  multiply<T>(rows, depth, source, weight, columns, width, out, width);
}
template <typename T>
void add_row_products(int64_t rows, int64_t depth, const T* source, const T* grad, int64_t width, T* sums,
                      int64_t columns) {
  add_products<T>(rows, depth, source, grad, width, width, sums, columns);
}

// The part of the next image, if there is one, that is prefetched while this group of channels is computed.
template <typename T>
ConvRepeat<T> prefetch_next(const T* next, const InvertedResidualArgs<T>& args, int64_t m, int64_t width) {
  ConvRepeat<T> repeat;
  repeat.next.read[0] = next ? next + m * args.pixels() : nullptr;
  repeat.next.read_size = width * args.pixels();
  return repeat;
}

// Writes relu of the expanded, normalised input, `width` channels from m on, into the padded image.
template <typename T>
void expand_group(const InvertedResidualArgs<T>& args, int64_t task, const T* narrow, int64_t m, int64_t width, T* wide,
                  T* padded, int64_t line, const ConvRepeat<T>& repeat = {}) {
  multiply(args.pixels(), args.channels, narrow, args.expand + task * args.channels * args.columns + m, args.columns,
           width, wide, kExpanded, repeat);
  const T *scale = args.expand_scale + task * args.expanded + m, *bias = args.expand_bias + task * args.expanded + m;
  by_vectors<T>(width, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> factor = load_lanes(scale + c, left), added = load_lanes(bias + c, left);
    for (int64_t y = 0; y < args.high; ++y) {
      const T* from = wide + y * args.wide * kExpanded + c;
      T* to = padded + (y + 1) * line + kExpanded + c;
      for (int64_t x = 0; x < args.wide; ++x)
        store_lanes(to + x * kExpanded, maximum<T>(factor * load_lanes(from + x * kExpanded, left) + added, Vec<T>{}),
                    left);
    }
  });
}

// ---- forward

template <typename T>
void inverted_residual_mean(const InvertedResidualArgs<T>& args, int64_t image, int64_t task) {
  const int64_t index = image * args.tasks + task, at = index * args.channels;
  pixel_stats(args.x + at * args.pixels(), args.pixels(), args.channels, args.unit_mean + at, args.unit_square + at);
}

// Images begin .. end - 1: sums of products of the centred channels.
template <typename T>
void inverted_residual_covariance(const InvertedResidualArgs<T>& args, int64_t part, int64_t begin, int64_t end,
                                  int64_t task, T* scratch) {
  const int64_t size = args.channels * args.narrow_columns;
  T* sums = args.covariance + (part * args.tasks + task) * size;
  std::fill(sums, sums + size, T(0));
  for (int64_t image = begin; image < end; ++image) {
    centre(args, image, task, scratch);
    add_products(args.pixels(), args.channels, scratch, scratch, args.channels, args.channels, sums,
                 args.narrow_columns);
  }
}

// Expansion, batch norm, ReLU and depthwise convolution of an image, and the statistics of the result.
template <typename T>
void inverted_residual_expand(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t index = image * args.tasks + task, row = args.wide * args.expanded;
  T *y = args.inner + index * args.high * row, *padded = scratch + at.padded;
  const T* weight = args.taps + task * 9 * args.columns;
  std::fill(padded, padded + (args.high + 2) * at.line, T(0));
  centre(args, image, task, scratch + at.narrow);
  by_groups(args, [&](int64_t m, int64_t width) {
    ConvRepeat<T> repeat;
    repeat.next.write = y + m * args.pixels();
    repeat.next.write_size = width * args.pixels();
    expand_group(args, task, scratch + at.narrow, m, width, scratch + at.wide, padded, at.line, repeat);
    Tap<T> taps[9];
    for (int64_t t = 0; t < 9; ++t) taps[t] = {t / 3 * at.line + t % 3 * kExpanded, weight + t * args.columns + m};
    for (int64_t oy = 0; oy < args.high; ++oy)
      depthwise_row<T>(args.wide, width, taps, 9, padded + oy * at.line, kExpanded, y + oy * row + m, args.expanded,
                       nullptr);
  });
  pixel_stats(y, args.pixels(), args.expanded, args.unit_mean + index * args.expanded,
              args.unit_square + index * args.expanded);
}

// The batch norm behind the depthwise convolution, for the forward and the backward.
template <typename T>
struct InnerNorm {
  Vec<T> scale, mean, bias;
  template <typename Lanes>
  FASTMOD_INLINE InnerNorm(const InvertedResidualArgs<T>& args, int64_t task, int64_t m, Lanes left)
      : scale(load_lanes(args.inner_scale + task * args.expanded + m, left)),
        mean(load_lanes(args.inner_mean + task * args.expanded + m, left)),
        bias(load_lanes(args.inner_bias + task * args.expanded + m, left)) {}
  FASTMOD_INLINE Vec<T> relu(Vec<T> centred) const { return maximum<T>(scale * centred + bias, Vec<T>{}); }
};

// Per image: the mean of the activation, the fraction of pixels where it is not 0, and the mean of the centred values
// there.
template <typename T>
void inverted_residual_pool(const InvertedResidualArgs<T>& args, int64_t image, int64_t task) {
  const int64_t size = args.pixels() * args.expanded, total = args.batch * args.tasks * args.expanded;
  const T* from = args.inner + (image * args.tasks + task) * size;
  T* to = args.pool + (task * args.batch + image) * args.expanded;
  by_vectors<T>(args.expanded, [&](int64_t m, auto left) FASTMOD_INLINE_LAMBDA {
    const InnerNorm<T> norm(args, task, m, left);
    struct Sums {
      Vec<T> value{}, active{}, centred{};
    };
    Sums total_sums;
    by_pixels<2, Sums>(
        m, size, args.expanded,
        [&](int64_t p, Sums& sums) FASTMOD_INLINE_LAMBDA {
          const Vec<T> centred = load_lanes(from + p, left) - norm.mean, value = norm.relu(centred);
          sums.value += value;
          sums.active += value <= Vec<T>{} ? Vec<T>{} : splat(T(1));
          sums.centred += value <= Vec<T>{} ? Vec<T>{} : centred;
        },
        [&](const Sums& sums) FASTMOD_INLINE_LAMBDA {
          total_sums.value += sums.value;
          total_sums.active += sums.active;
          total_sums.centred += sums.centred;
        });
    const T share = T(1) / T(args.pixels());
    store_lanes(to + m, total_sums.value * share, left);
    store_lanes(to + total + m, total_sums.active * share, left);
    store_lanes(to + 2 * total + m, total_sums.centred * share, left);
  });
}

// Projects the gated activation of an image, and computes the statistics of the result.
template <typename T>
void inverted_residual_project(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t index = image * args.tasks + task, size = args.pixels() * args.expanded;
  const T* from = args.inner + index * size;
  const T* gate = args.gate ? args.gate + (task * args.batch + image) * args.expanded : nullptr;
  T *z = scratch + at.all, *y = args.projected + index * args.pixels() * args.channels;
  by_vectors<T>(args.expanded, [&](int64_t m, auto left) FASTMOD_INLINE_LAMBDA {
    const InnerNorm<T> norm(args, task, m, left);
    const Vec<T> factor = gate ? load_lanes(gate + m, left) : splat(T(1));
    for (int64_t p = m; p < size; p += args.expanded)
      store_lanes(z + p, norm.relu(load_lanes(from + p, left) - norm.mean) * factor, left);
  });
  if (image + 1 < args.batch) prefetch<0>(from + args.tasks * size, size);  // all of it: it is not read in order
  multiply(args.pixels(), args.expanded, z, args.project + task * args.expanded * args.narrow_columns,
           args.narrow_columns, args.channels, y, args.channels);
  const int64_t unit = index * args.channels;
  pixel_stats(y, args.pixels(), args.channels, args.unit_mean + unit, args.unit_square + unit);
}

// y = x + scale * (projected - mean) + bias
template <typename T>
void inverted_residual_sum(const InvertedResidualArgs<T>& args, int64_t image, int64_t task) {
  const int64_t channels = args.channels, size = args.pixels() * channels, at = (image * args.tasks + task) * size;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> scale = load_lanes(args.scale + task * channels + c, left);
    const Vec<T> mean = load_lanes(args.mean + task * channels + c, left);
    const Vec<T> bias = load_lanes(args.bias + task * channels + c, left);
    for (int64_t p = at + c; p < at + size; p += channels)
      store_lanes(args.y + p,
                  load_lanes(args.x + p, left) + (scale * (load_lanes(args.projected + p, left) - mean) + bias), left);
  });
}

// ---- backward

// Sums for the last batch norm: of the gradient, and of the gradient times the centred projection.
template <typename T>
void inverted_residual_grad_sums(const InvertedResidualArgs<T>& args, int64_t image, int64_t task) {
  const int64_t channels = args.channels, size = args.pixels() * channels, index = image * args.tasks + task;
  const T *grad = args.grad + index * size, *y = args.projected + index * size;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> mean = load_lanes(args.mean + task * channels + c, left);
    struct Sums {
      Vec<T> grad{}, product{};
    };
    Sums total;
    by_pixels<4, Sums>(
        c, size, channels,
        [&](int64_t p, Sums& sums) FASTMOD_INLINE_LAMBDA {
          const Vec<T> g = load_lanes(grad + p, left);
          sums.grad += g;
          sums.product += g * (load_lanes(y + p, left) - mean);
        },
        [&](const Sums& sums) FASTMOD_INLINE_LAMBDA {
          total.grad += sums.grad;
          total.product += sums.product;
        });
    store_lanes(args.unit_mean + index * channels + c, total.grad, left);
    store_lanes(args.unit_square + index * channels + c, total.product, left);
  });
}

// A gradient's way back through a batch norm, by factors [3, channels] that inverted_residual.cpp computes.
template <typename T>
struct NormGrad {
  Vec<T> scale, mean, slope;
  template <typename Lanes>
  FASTMOD_INLINE NormGrad(const T* factors, int64_t channels, Lanes left)
      : scale(load_lanes(factors, left)), mean(load_lanes(factors + channels, left)),
        slope(load_lanes(factors + 2 * channels, left)) {}
  FASTMOD_INLINE Vec<T> operator()(Vec<T> grad, Vec<T> centred) const {
    return scale * ((grad - mean) - slope * centred);
  }
};

// The gradient of the projection before its batch norm: [P, C].
template <typename T>
void fill_projected_grad(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* to) {
  const int64_t channels = args.channels, size = args.pixels() * channels, at = (image * args.tasks + task) * size;
  const T* factors = args.grad_factors + task * 3 * channels;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const NormGrad<T> norm(factors + c, channels, left);
    const Vec<T> mean = load_lanes(args.mean + task * channels + c, left);
    for (int64_t p = c; p < size; p += channels)
      store_lanes(to + p, norm(load_lanes(args.grad + at + p, left), load_lanes(args.projected + at + p, left) - mean),
                  left);
  });
}

// Images begin .. end - 1: gradients of the projection's weight and of the gate, and sums for the second batch norm.
template <typename T>
void inverted_residual_project_grad(const InvertedResidualArgs<T>& args, int64_t part, int64_t begin, int64_t end,
                                    int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t pixels = args.pixels(), expanded = args.expanded, matrix = args.channels * args.columns;
  T *narrow = scratch + at.narrow, *wide = scratch + at.wide, *gated = scratch + at.gated;
  T* sums = args.grad_project + (part * args.tasks + task) * matrix;
  std::fill(sums, sums + matrix, T(0));
  const int64_t total = args.batch * args.tasks * expanded;
  for (int64_t image = begin; image < end; ++image) {
    fill_projected_grad(args, image, task, narrow);
    const T* inner = args.inner + (image * args.tasks + task) * pixels * expanded;
    const T* next = image + 1 < end ? inner + args.tasks * pixels * expanded : nullptr;
    const int64_t unit = (task * args.batch + image) * expanded;
    const T* gate = args.gate ? args.gate + unit : nullptr;
    by_groups(args, [&](int64_t m, int64_t width) {
      multiply(pixels, args.channels, narrow, args.project_grad_weight + task * matrix + m, args.columns, width, wide,
               kExpanded, prefetch_next(next, args, m, width));
      by_vectors<T>(width, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        const InnerNorm<T> norm(args, task, m + c, left);
        const Vec<T> factor = gate ? load_lanes(gate + m + c, left) : splat(T(1));
        struct Sums {
          Vec<T> gate{}, grad{}, product{};
        };
        Sums all;
        by_pixels<2, Sums>(
            0, pixels, 1,
            [&](int64_t p, Sums& some) FASTMOD_INLINE_LAMBDA {
              const Vec<T> centred = load_lanes(inner + p * expanded + m + c, left) - norm.mean;
              const Vec<T> value = norm.relu(centred), g = load_lanes(wide + p * kExpanded + c, left);
              store_lanes(gated + p * kExpanded + c, value * factor, left);
              some.gate += g * value;
              const Vec<T> through = value <= Vec<T>{} ? Vec<T>{} : g;
              some.grad += through;
              some.product += through * centred;
            },
            [&](const Sums& some) FASTMOD_INLINE_LAMBDA {
              all.gate += some.gate;
              all.grad += some.grad;
              all.product += some.product;
            });
        store_lanes(args.inner_sums + unit + m + c, all.gate, left);
        store_lanes(args.inner_sums + total + unit + m + c, all.grad * factor, left);
        store_lanes(args.inner_sums + 2 * total + unit + m + c, all.product * factor, left);
      });
      add_products(pixels, args.channels, narrow, gated, width, kExpanded, sums + m, args.columns);
    });
  }
}

// Images begin .. end - 1: backward from the gradient of the projection through the depthwise convolution to the
// expansion.
template <typename T>
void inverted_residual_expand_grad(const InvertedResidualArgs<T>& args, int64_t part, int64_t begin, int64_t end,
                                   int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t pixels = args.pixels(), expanded = args.expanded, matrix = args.channels * args.columns;
  T *narrow = scratch + at.narrow, *wide = scratch + at.wide, *centred = scratch + at.centred, *all = scratch + at.all;
  T *padded = scratch + at.padded, *grads = scratch + at.grads;
  T* of_expand = args.grad_expand + (part * args.tasks + task) * matrix;
  T* of_taps = args.grad_taps + (part * args.tasks + task) * 9 * args.columns;
  std::fill(of_expand, of_expand + matrix, T(0));
  std::fill(of_taps, of_taps + 9 * args.columns, T(0));
  std::fill(padded, padded + (args.high + 2) * at.line, T(0));
  std::fill(grads, grads + (args.high + 2) * at.line, T(0));
  const int64_t band = std::max<int64_t>(1, kProductPixels / args.wide);
  const T *factors = args.inner_factors + task * 3 * expanded, *weight = args.taps + task * 9 * args.columns;
  for (int64_t image = begin; image < end; ++image) {
    const int64_t index = image * args.tasks + task, unit = (task * args.batch + image) * expanded;
    fill_projected_grad(args, image, task, narrow);
    centre(args, image, task, centred);
    const T* inner = args.inner + index * pixels * expanded;
    const T* next = image + 1 < end ? inner + args.tasks * pixels * expanded : nullptr;
    const T* gate = args.gate ? args.gate + unit : nullptr;
    by_groups(args, [&](int64_t m, int64_t width) {
      multiply(pixels, args.channels, narrow, args.project_grad_weight + task * matrix + m, args.columns, width, wide,
               kExpanded, prefetch_next(next, args, m, width));
      by_vectors<T>(width, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        const InnerNorm<T> norm(args, task, m + c, left);
        const Vec<T> factor = gate ? load_lanes(gate + m + c, left) : splat(T(1));
        const Vec<T> pooled = args.pool_grad ? load_lanes(args.pool_grad + unit + m + c, left) : Vec<T>{};
        const NormGrad<T> norm_grad(factors + m + c, expanded, left);
        for (int64_t y = 0; y < args.high; ++y)
          for (int64_t x = 0; x < args.wide; ++x) {
            const int64_t p = y * args.wide + x;
            const Vec<T> distance = load_lanes(inner + p * expanded + m + c, left) - norm.mean;
            const Vec<T> g = load_lanes(wide + p * kExpanded + c, left) * factor + pooled;
            const Vec<T> through = norm.relu(distance) <= Vec<T>{} ? Vec<T>{} : g;
            store_lanes(grads + (y + 1) * at.line + (x + 1) * kExpanded + c, norm_grad(through, distance), left);
          }
      });
      expand_group(args, task, centred, m, width, wide, padded, at.line);
      const T *inside = grads + at.line + kExpanded, *active = padded + at.line + kExpanded;
      for (int64_t y = 0; y < args.high; y += band)
        depthwise_grad<T>(std::min(band, args.high - y), args.wide, width, 3, padded + y * at.line,
                          inside + y * at.line, {kExpanded, kExpanded, at.line, at.line, kExpanded, at.line},
                          of_taps + m, args.columns);
      Tap<T> taps[9];  // in reverse order, as a pixel of the input sees them
      for (int64_t t = 0; t < 9; ++t)
        taps[t] = {t / 3 * at.line + t % 3 * kExpanded, weight + (8 - t) * args.columns + m};
      for (int64_t y = 0; y < args.high; ++y)
        depthwise_row<T>(args.wide, width, taps, 9, grads + y * at.line, kExpanded, wide + y * args.wide * kExpanded,
                         kExpanded, nullptr);
      by_vectors<T>(width, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        Vec<T> total{};
        for (int64_t y = 0; y < args.high; ++y) {
          Vec<T> sum{};
          for (int64_t x = 0; x < args.wide; ++x) {
            const int64_t p = y * args.wide + x;
            const Vec<T> g = load_lanes(wide + p * kExpanded + c, left);
            const Vec<T> value = load_lanes(active + y * at.line + x * kExpanded + c, left);
            const Vec<T> through = value <= Vec<T>{} ? Vec<T>{} : g;
            sum += through;
            store_lanes(all + p * expanded + m + c, through, left);
          }
          total += sum;
        }
        store_lanes(args.expand_sums + index * expanded + m + c, total, left);
      });
      add_products(pixels, args.channels, centred, all + m, width, expanded, of_expand + m, args.columns);
    });
    if (args.grad_x)
      multiply(pixels, expanded, all, args.expand_grad_weight + task * expanded * args.narrow_columns,
               args.narrow_columns, args.channels, args.grad_x + index * pixels * args.channels, args.channels);
  }
}

// Adds to the gradient of the input: the gradient of the residual sum, and what comes back through the statistics of
// the expansion.
template <typename T>
void inverted_residual_input_grad(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t channels = args.channels, size = args.pixels() * channels, place = (image * args.tasks + task) * size;
  T* product = scratch + at.narrow;
  centre(args, image, task, scratch + at.centred);
  multiply(args.pixels(), channels, scratch + at.centred, args.input_factors + task * channels * args.narrow_columns,
           args.narrow_columns, channels, product, channels);
  const T* shift = args.input_shift + task * channels;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> added = load_lanes(shift + c, left);
    for (int64_t p = c; p < size; p += channels) {
      T* to = args.grad_x + place + p;
      store_lanes(to, load_lanes(to, left) + load_lanes(args.grad + place + p, left) +
                          (load_lanes(product + p, left) + added), left);
    }
  });
}

FASTMOD_KERNELS(InvertedResidualKernels, .scratch = inverted_residual_scratch<T>, .mean = inverted_residual_mean<T>,
                .covariance = inverted_residual_covariance<T>, .expand = inverted_residual_expand<T>,
                .pool = inverted_residual_pool<T>, .project = inverted_residual_project<T>,
                .sum = inverted_residual_sum<T>, .grad_sums = inverted_residual_grad_sums<T>,
                .project_grad = inverted_residual_project_grad<T>, .expand_grad = inverted_residual_expand_grad<T>,
                .input_grad = inverted_residual_input_grad<T>, .multiply = multiply_rows<T>,
                .add_products = add_row_products<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
