// Convolutions that normalise what they read, for images [H, W, C].
//
// A unit of work normalises a strip of an image into a padded scratch buffer in L2 and convolves from there, so that
// every value is read from memory and normalised once, not nine times. A row of taps is then one contiguous run of
// kernel * C values, for which the innermost loops are those of a matrix product (conv.h). 3x3 taps of stride 1 in fp32
// use Winograd (winograd.h).
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// A convolution of images [B, E, H, W, C] (x is [B, H, W, C] if all experts share it) that normalises what it reads.
template <typename T>
struct NormConvArgs {
  int64_t batch, experts, cin, cout, high, wide, out_high, out_wide, kernel, stride;
  bool shared, depthwise, relu, winograd;
  FASTMOD_INLINE int64_t taps() const { return winograd ? 16 : kernel * kernel; }  // matrices of packed weights
  const T *x, *scale, *shift, *gate;  // scale, shift: affine_stride between experts; these and gate may be null
  int64_t affine_stride;
  const T *weight, *bias;        // weight: packed, see norm_conv_forward; bias: [E, cout] or null
  const T* input_weight;         // packed for the gradient of the input
  int64_t columns, input_columns;  // of the packed weights: cout and cin, rounded up to whole vectors
  T* y;
  T *unit_mean, *unit_square;    // [B, E, cout] or null
  // backward only; whichever is not needed is null
  const T* grad;
  const T *y_read, *mean, *grad_mean, *grad_var;  // mean, grad_mean / n, 2 grad_var / n: [E, cout]
  T* grad_x;
  T *grad_scale, *grad_shift, *grad_gate;  // [B, E, cin]
  T *grad_weight, *grad_bias;  // for each part of the batch: packed like the weight; [parts, E, cout]
};

template <typename T>
struct NormConvKernels {
  int64_t (*scratch)(const NormConvArgs<T>&);
  void (*forward)(const NormConvArgs<T>&, int64_t image, int64_t expert, T* scratch);
  void (*backward)(const NormConvArgs<T>&, int64_t part, int64_t begin, int64_t end, int64_t expert, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/conv.h"
#include "cpu/winograd.h"

namespace fastmod::cpu::FASTMOD_ISA {

// ---- strips of images in scratch, with a frame of zeros

// Copies rows first - pad .. end + pad of an image [high, wide, channels] into `strip`, with `extra` more rows and
// columns; value(from, channel, lanes) transforms each vector. Outside of the image everything is zero.
template <typename T, typename Value>
FASTMOD_INLINE void fill_strip(int64_t first, int64_t end, int64_t pad, int64_t extra, int64_t high, int64_t wide,
                               int64_t channels, T* strip, const Value& value) {
  const int64_t row = (wide + 2 * pad + extra) * channels;
  for (int64_t y = first - pad; y < end + pad + extra; ++y, strip += row) {
    if (y < 0 || y >= high) {
      std::fill(strip, strip + row, T(0));
      continue;
    }
    std::fill(strip, strip + pad * channels, T(0));
    T* to = strip + pad * channels;
    int64_t at = y * wide * channels;
    for (int64_t x = 0; x < wide; ++x, to += channels, at += channels)
      by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        store_lanes(to + c, value(at + c, c, left), left);
      });
    std::fill(to, to + (pad + extra) * channels, T(0));
  }
}

// The same for an image that is copied unchanged, a row at a time: with three channels that is faster.
template <typename T>
void copy_strip(int64_t first, int64_t end, int64_t pad, int64_t extra, int64_t high, int64_t wide, int64_t channels,
                T* strip, const T* image) {
  const int64_t before = pad * channels, inside = wide * channels, after = (pad + extra) * channels;
  for (int64_t y = first - pad; y < end + pad + extra; ++y, strip += before + inside + after) {
    const bool there = y >= 0 && y < high;
    std::fill(strip, strip + before, T(0));
    if (there) std::copy(image + y * inside, image + (y + 1) * inside, strip + before);
    else std::fill(strip + before, strip + before + inside, T(0));
    std::fill(strip + before + inside, strip + before + inside + after, T(0));
  }
}

// relu(scale * x + shift), without the gate.
template <typename T, typename Lanes>
FASTMOD_INLINE Vec<T> normalised(const NormConvArgs<T>& args, const T* scale, const T* shift, Vec<T> x, int64_t c,
                                 Lanes left) {
  if (scale) x = load_lanes(scale + c, left) * x + load_lanes(shift + c, left);
  return args.relu ? maximum<T>(x, Vec<T>{}) : x;
}

template <typename T>
struct ConvUnit {
  const T *x, *scale, *shift, *gate;  // of one image and expert; all but x may be null
  ConvUnit(const NormConvArgs<T>& args, int64_t image, int64_t expert) {
    x = args.x + (args.shared ? image : image * args.experts + expert) * args.high * args.wide * args.cin;
    scale = args.scale ? args.scale + expert * args.affine_stride : nullptr;
    shift = args.scale ? args.shift + expert * args.affine_stride : nullptr;
    gate = args.gate ? args.gate + (image * args.experts + expert) * args.cin : nullptr;
  }
};

template <typename T>
void fill_input(const NormConvArgs<T>& args, const ConvUnit<T>& unit, int64_t first, int64_t end, T* strip) {
  if (!unit.scale && !unit.gate && !args.relu) {
    copy_strip(first, end, args.kernel / 2, args.winograd, args.high, args.wide, args.cin, strip, unit.x);
    return;
  }
  fill_strip(first, end, args.kernel / 2, args.winograd, args.high, args.wide, args.cin, strip,
             [&](int64_t at, int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
               const Vec<T> z = normalised(args, unit.scale, unit.shift, load_lanes(unit.x + at, left), c, left);
               return unit.gate ? z * load_lanes(unit.gate + c, left) : z;
             });
}

// The gradient of y, including what comes back through its mean and variance.
template <typename T>
void fill_grad(const NormConvArgs<T>& args, int64_t image, int64_t expert, int64_t first, int64_t end, T* strip) {
  const int64_t place = (image * args.experts + expert) * args.out_high * args.out_wide * args.cout;
  const T *grad = args.grad + place, *y = args.grad_var ? args.y_read + place : nullptr;
  const T* of_mean = args.grad_mean ? args.grad_mean + expert * args.cout : nullptr;
  const T* of_var = args.grad_var ? args.grad_var + expert * args.cout : nullptr;
  const T* mean = args.grad_var ? args.mean + expert * args.cout : nullptr;
  fill_strip(first, end, args.kernel / 2, args.winograd, args.out_high, args.out_wide, args.cout, strip,
             [&](int64_t at, int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
               Vec<T> g = load_lanes(grad + at, left);
               if (of_mean) g += load_lanes(of_mean + c, left);
               if (of_var) g += load_lanes(of_var + c, left) * (load_lanes(y + at, left) - load_lanes(mean + c, left));
               return g;
             });
}

// Elements from one row of a strip to the next. Winograd's patches reach one pixel further if a size is odd.
template <typename T>
int64_t input_line(const NormConvArgs<T>& args) {
  return (args.wide + args.kernel / 2 * 2 + args.winograd) * args.cin;
}
template <typename T>
int64_t grad_line(const NormConvArgs<T>& args) {
  return (args.out_wide + args.kernel / 2 * 2 + args.winograd) * args.cout;
}

// Rows of y per strip, in whole tiles: as many as let it and the gradient's strip fit a part of L2.
template <typename T>
int64_t strip_rows(const NormConvArgs<T>& args) {
  const int64_t row = args.stride * input_line(args) + grad_line(args);
  const int64_t fit = std::max<int64_t>((384 << 10) / int64_t(sizeof(T)) / row / 2 * 2, 2);
  return std::min(fit, args.out_high);
}

// Offsets into the scratch of a unit.
struct ConvScratch {
  int64_t inputs = 0, grads = 0, grad_z = 0, patches = 0, sums = 0, size = 0;
  template <typename T>
  explicit ConvScratch(const NormConvArgs<T>& args) {
    const auto take = [&](int64_t count) {
      const int64_t at = size;
      size += (count + 31) / 16 * 16;
      return at;
    };
    const int64_t rows = strip_rows(args), most = std::max(args.cin, args.cout);
    inputs = take((rows * args.stride + 3) * input_line(args));
    grads = take((rows + 3) * grad_line(args));
    grad_z = take(tile_rows(args.high, args.wide) * 2 * args.wide * args.cin);
    if (!args.winograd) return;
    patches = take(16 * kWinogradTiles * most);
    sums = take(16 * kWinogradTiles * most);
  }
  // Rows of tiles per call: several for narrow images, so that weights are read for enough tiles at once.
  static int64_t tile_rows(int64_t high, int64_t wide) {
    return std::clamp<int64_t>(16 / ((wide + 1) / 2), 1, (high + 1) / 2);
  }
};
template <typename T>
int64_t norm_conv_scratch(const NormConvArgs<T>& args) {
  return ConvScratch(args).size;
}

// Mean and sum of squared distances from it, per channel, over `count` pixels; in two passes, so that nothing cancels.
template <typename T>
void pixel_stats(const T* y, int64_t count, int64_t channels, T* mean, T* square) {
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    Vec<T> sum[4] = {}, far[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[j] += load_lanes(y + (i + j) * channels + c, left);
    for (; i < count; ++i) sum[0] += load_lanes(y + i * channels + c, left);
    const Vec<T> middle = ((sum[0] + sum[1]) + (sum[2] + sum[3])) / T(count);
    for (i = 0; i + 4 <= count; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Vec<T> distance = load_lanes(y + (i + j) * channels + c, left) - middle;
        far[j] += distance * distance;
      }
    for (; i < count; ++i) {
      const Vec<T> distance = load_lanes(y + i * channels + c, left) - middle;
      far[0] += distance * distance;
    }
    store_lanes(mean + c, middle, left);
    store_lanes(square + c, (far[0] + far[1]) + (far[2] + far[3]), left);
  });
}

// ---- depthwise: channels do not mix

// taps[t]: where it reads relative to a pixel, and its weights [channels].
template <typename T>
struct Tap {
  int64_t offset;
  const T* weight;
};

template <typename T>
void depthwise_row(int64_t pixels, int64_t channels, const Tap<T>* taps, int64_t count, const T* source,
                   int64_t source_stride, T* out, int64_t out_stride, const T* bias) {
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    Vec<T> weight[9];
    for (int64_t t = 0; t < count; ++t) weight[t] = load_lanes(taps[t].weight + c, left);
    const Vec<T> begin = bias ? load_lanes(bias + c, left) : Vec<T>{};
    for (int64_t p = 0; p < pixels; ++p) {
      Vec<T> sum = begin;
      for (int64_t t = 0; t < count; ++t)
        sum += weight[t] * load_lanes(source + p * source_stride + taps[t].offset + c, left);
      store_lanes(out + p * out_stride + c, sum, left);
    }
  });
}

// sums[tap, channel] += source at the tap * grad, over high x wide pixels. DepthwiseSteps: the distances in memory
// between the source's pixels (for neighbouring pixels of the gradient), taps and rows, and the gradient's pixels and
// rows.
struct DepthwiseSteps {
  int64_t pixel, tap, row, tap_row, grad_pixel, grad_row;
};
template <typename T>
void depthwise_grad(int64_t high, int64_t wide, int64_t channels, int64_t kernel, const T* source, const T* grad,
                    const DepthwiseSteps& steps, T* sums, int64_t columns) {
  // All taps of a pixel at once: their sums hide each other's latency, and the gradient is read only once.
  const auto taps = [&](auto side) FASTMOD_INLINE_LAMBDA {
    constexpr int k = decltype(side)::value;
    by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
      Vec<T> sum[k * k] = {};
      for (int64_t y = 0; y < high; ++y) {
        const T *from = source + y * steps.row + c, *right = grad + y * steps.grad_row + c;
        for (int64_t x = 0; x < wide; ++x, from += steps.pixel, right += steps.grad_pixel) {
          const Vec<T> g = load_lanes(right, left);
#pragma GCC unroll 9
          for (int t = 0; t < k * k; ++t)
            sum[t] += g * load_lanes(from + t / k * steps.tap_row + t % k * steps.tap, left);
        }
      }
#pragma GCC unroll 9
      for (int t = 0; t < k * k; ++t) {
        T* to = sums + t * columns + c;
        store_lanes(to, load_lanes(to, left) + sum[t], left);
      }
    });
  };
  if (kernel == 3) taps(std::integral_constant<int, 3>{});
  else taps(std::integral_constant<int, 1>{});
}

// ---- units

// One image of one expert. weight: packed [E, k, k, cin, columns], depthwise [E, k, k, columns], Winograd
// [E, 16, cin, columns].
template <typename T>
void norm_conv_forward(const NormConvArgs<T>& args, int64_t image, int64_t expert, T* scratch) {
  const int64_t k = args.kernel, line = input_line(args);
  const int64_t matrix = args.depthwise ? args.columns : args.cin * args.columns;
  const T* weight = args.weight + expert * args.taps() * matrix;
  const T* bias = args.bias ? args.bias + expert * args.cout : nullptr;
  const ConvUnit<T> unit(args, image, expert);
  const int64_t row = args.out_wide * args.cout, index = image * args.experts + expert;
  T* y = args.y + index * args.out_high * row;
  const ConvScratch at(args);
  T* strip = scratch + at.inputs;
  ConvRun<T> runs[3];
  Tap<T> taps[9];
  for (int64_t ky = 0; ky < k; ++ky) {
    runs[ky] = {ky * line, k * args.cin, weight + ky * k * matrix};
    for (int64_t kx = 0; kx < k; ++kx) taps[ky * k + kx] = {ky * line + kx * args.cin, weight + (ky * k + kx) * matrix};
  }
  const int64_t step = strip_rows(args), tall = 2 * ConvScratch::tile_rows(args.out_high, args.out_wide);
  // What to prefetch while rows oy .. oy + high - 1 are computed: the next rows of y, and rows of the image that this
  // thread most likely takes next.
  const auto ranges_after = [&](int64_t oy, int64_t high) {
    PrefetchRanges<T> found;
    if (oy + high < args.out_high) found.write = y + (oy + high) * row, found.write_size = high * row;
    if (image + 1 == args.batch || step < args.out_high) return found;
    const int64_t in_row = args.stride * args.wide * args.cin;
    found.read[0] = unit.x + (args.shared ? 1 : args.experts) * args.high * args.wide * args.cin + oy * in_row;
    found.read_size = high * in_row;
    return found;
  };
  for (int64_t first = 0; first < args.out_high; first += step) {
    const int64_t end = std::min(args.out_high, first + step);
    fill_input(args, unit, first * args.stride, (end - 1) * args.stride + 1, strip);
    if (args.winograd) {
      for (int64_t oy = first; oy < end; oy += tall) {
        const int64_t high = std::min(tall, end - oy);
        winograd_rows(strip + (oy - first) * line, line, args.cin, weight, args.columns, {.bias = bias}, args.cout,
                      high, args.out_wide, y + oy * row, row, scratch + at.patches, scratch + at.sums,
                      ranges_after(oy, tall));
      }
      continue;
    }
    for (int64_t oy = first; oy < end; ++oy) {
      const T* source = strip + (oy - first) * args.stride * line;
      if (args.depthwise)
        depthwise_row(args.out_wide, args.cout, taps, k * k, source, args.stride * args.cin, y + oy * row, args.cout,
                      bias);
      else
        conv_row(args.out_wide, args.cout, args.columns, runs, k, source, args.stride * args.cin, y + oy * row,
                 args.cout, bias, {1, 0, 0, 0, ranges_after(oy, 1)});
    }
  }
  if (args.unit_mean)
    pixel_stats(y, args.out_high * args.out_wide, args.cout, args.unit_mean + index * args.cout,
                args.unit_square + index * args.cout);
}

// Turns the gradient of a row of z into those of x, scale, shift and gate.
template <typename T>
void finish_grad_row(const NormConvArgs<T>& args, const ConvUnit<T>& unit, const T* grad_z, int64_t iy, bool add,
                     T* grad_x, T* grad_scale, T* grad_shift, T* grad_gate) {
  const int64_t channels = args.cin;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> scale = unit.scale ? load_lanes(unit.scale + c, left) : splat(T(1));
    const Vec<T> shift = unit.scale ? load_lanes(unit.shift + c, left) : Vec<T>{};
    const Vec<T> gate = unit.gate ? load_lanes(unit.gate + c, left) : splat(T(1));
    Vec<T> of_scale{}, of_shift{}, of_gate{};
    const T* x = unit.x + iy * args.wide * channels + c;
    T* to = grad_x ? grad_x + iy * args.wide * channels + c : nullptr;
    for (int64_t i = 0; i < args.wide; ++i) {
      const Vec<T> in = load_lanes(x + i * channels, left);
      Vec<T> z = scale * in + shift;
      Vec<T> g = load_lanes(grad_z + i * channels + c, left);
      if (args.relu) z = maximum<T>(z, Vec<T>{});
      of_gate += g * z;
      g *= gate;
      if (args.relu) g = z <= Vec<T>{} ? Vec<T>{} : g;
      of_shift += g;
      of_scale += g * in;
      if (to) {
        g *= scale;
        store_lanes(to + i * channels, add ? g + load_lanes(to + i * channels, left) : g, left);
      }
    }
    const auto add_to = [&](T* sums, Vec<T> value) FASTMOD_INLINE_LAMBDA {
      if (sums) store_lanes(sums + c, load_lanes(sums + c, left) + value, left);
    };
    add_to(grad_scale, of_scale);
    add_to(grad_shift, of_shift);
    add_to(grad_gate, of_gate);
  });
}

// A row of the gradient of z, [wide, cin], from the strip of y's gradient, whose first row is `first` - pad. grad_taps:
// packed [E, rows, columns of taps, cout, columns], in the order in which the strip needs them.
template <typename T>
void grad_input_row(const NormConvArgs<T>& args, const T* weight, const T* strip, int64_t first, int64_t iy,
                    T* grad_z) {
  const int64_t k = args.kernel, pad = k / 2, line = grad_line(args);
  const int64_t matrix = args.depthwise ? args.input_columns : args.cout * args.input_columns;
  const int64_t s = args.stride;
  // Taps that contribute to row (or column) i: with stride 1 all k, from i - pad on. With stride 2 every other one: the
  // middle tap for even rows, the last and the first for odd rows. With k = 1 only even rows get anything.
  const int64_t base = iy / s;
  const bool odd = s == 2 && iy % 2 == 1;
  int64_t kys[3], rows[3], count = 0;  // index of the packed taps, row of y
  if (s == 1)
    for (int64_t r = 0; r < k; ++r) kys[count] = r, rows[count++] = base - pad + r;
  else if (!odd)
    kys[count] = k == 3 ? 1 : 0, rows[count++] = base;
  else if (k == 3)
    for (int64_t r = 0; r < 2; ++r) kys[count] = r == 0 ? 0 : 2, rows[count++] = base + r;
  for (int64_t phase = 0; phase < s; ++phase) {
    const int64_t pixels = (args.wide - phase + s - 1) / s;
    if (pixels <= 0) continue;
    // Packed columns: stride 1 in order; stride 2 the middle tap, then the last and the first.
    const int64_t width = s == 1 ? k : phase == 0 ? 1 : k == 3 ? 2 : 0;
    const int64_t column = s == 2 && phase == 1 ? 1 : 0;
    ConvRun<T> runs[3];
    Tap<T> taps[9];
    int64_t taps_count = 0;
    const int64_t seen = width == 0 ? 0 : count;
    for (int64_t r = 0; r < seen; ++r) {
      const int64_t offset = (rows[r] - (first - pad)) * line + (s == 2 ? pad : 0) * args.cout;
      const T* from = weight + (kys[r] * k + column) * matrix;
      runs[r] = {offset, width * args.cout, from};
      for (int64_t t = 0; t < width; ++t) taps[taps_count++] = {offset + t * args.cout, from + t * matrix};
    }
    T* out = grad_z + phase * args.cin;
    if (args.depthwise)
      depthwise_row<T>(pixels, args.cin, taps, taps_count, strip, args.cout, out, s * args.cin, nullptr);
    else
      conv_row<T>(pixels, args.cin, args.input_columns, runs, seen, strip, args.cout, out, s * args.cin, nullptr);
  }
}

// Images begin .. end - 1 of one expert, or of all experts in turn if they share x; sums go to part `part`.
template <typename T>
void norm_conv_backward(const NormConvArgs<T>& args, int64_t part, int64_t begin, int64_t end, int64_t expert,
                        T* scratch) {
  const ConvScratch at(args);
  T *inputs = scratch + at.inputs, *grads = scratch + at.grads, *grad_z = scratch + at.grad_z;
  const int64_t k = args.kernel, pad = k / 2, s = args.stride, taps = args.taps();
  const int64_t in_line = input_line(args), out_line = grad_line(args);
  const int64_t matrix = args.depthwise ? args.columns : args.cin * args.columns;
  const int64_t input_matrix = args.depthwise ? args.input_columns : args.cout * args.input_columns;
  const bool need_input = args.grad_x || args.grad_scale || args.grad_gate;
  const int64_t step = strip_rows(args);
  const int64_t first_expert = args.shared ? 0 : expert, end_expert = args.shared ? args.experts : expert + 1;
  for (int64_t e = first_expert; e < end_expert; ++e) {
    if (args.grad_weight) {
      T* sums = args.grad_weight + (part * args.experts + e) * taps * matrix;
      std::fill(sums, sums + taps * matrix, T(0));
    }
    if (args.grad_bias) {
      T* sums = args.grad_bias + (part * args.experts + e) * args.cout;
      std::fill(sums, sums + args.cout, T(0));
    }
  }
  for (int64_t image = begin; image < end; ++image)
    for (int64_t e = first_expert; e < end_expert; ++e) {
      const ConvUnit<T> unit(args, image, e);
      const int64_t index = image * args.experts + e;
      const auto sums_of = [&](T* sums) {
        if (!sums) return sums;
        T* own = sums + index * args.cin;
        std::fill(own, own + args.cin, T(0));
        return own;
      };
      T *grad_scale = sums_of(args.grad_scale), *grad_shift = sums_of(args.grad_shift);
      T* grad_gate = sums_of(args.grad_gate);
      T* grad_x = args.grad_x;
      if (grad_x) grad_x += (args.shared ? image : index) * args.high * args.wide * args.cin;
      for (int64_t first = 0; first < args.out_high; first += step) {
        const int64_t last = std::min(args.out_high, first + step);
        fill_grad(args, image, e, first, last, grads);
        const T* inner = grads + pad * (out_line + args.cout);
        if (args.grad_bias) {
          T* sums = args.grad_bias + (part * args.experts + e) * args.cout;
          by_vectors<T>(args.cout, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
            Vec<T> sum{};
            for (int64_t y = 0; y < last - first; ++y)
              for (int64_t x = 0; x < args.out_wide; ++x)
                sum += load_lanes(inner + y * out_line + x * args.cout + c, left);
            store_lanes(sums + c, load_lanes(sums + c, left) + sum, left);
          });
        }
        if (args.grad_weight) {
          fill_input(args, unit, first * s, (last - 1) * s + 1, inputs);
          T* sums = args.grad_weight + (part * args.experts + e) * taps * matrix;
          // A band of rows at a time, so that what the blocks of sums read repeatedly stays in L1.
          const int64_t tiles =
              2 * std::clamp<int64_t>(kWinogradTiles / ((args.out_wide + 1) / 2), 1, (args.out_high + 1) / 2);
          const int64_t band = args.winograd ? tiles : std::max<int64_t>(1, 128 / args.out_wide);
          for (int64_t y = first; y < last; y += band) {
            const int64_t high = std::min(band, last - y);
            const T *source = inputs + (y - first) * s * in_line, *grad = inner + (y - first) * out_line;
            // Prefetch what the next image needs while this one's products are computed.
            const bool more = image + 1 < end && step == args.out_high;
            PrefetchRanges<T> ranges;
            if (more) {
              ranges.read[0] = unit.x + (args.shared ? 1 : args.experts) * args.high * args.wide * args.cin +
                             y * s * args.wide * args.cin;
              ranges.read_size = high * s * args.wide * args.cin;
            }
            if (args.winograd)
              winograd_weight_sums(source, in_line, args.cin, grad, out_line, args.cout, high, args.out_wide, sums,
                                   args.columns, scratch + at.patches, scratch + at.sums, ranges);
            else if (args.depthwise)
              depthwise_grad<T>(high, args.out_wide, args.cout, k, source, grad,
                                {s * args.cin, args.cin, s * in_line, in_line, args.cout, out_line}, sums,
                                args.columns);
            else
              for (int64_t ky = 0; ky < k; ++ky)
                conv_grad_run(k * args.cin, args.cout, args.columns, high, args.out_wide, source + ky * in_line,
                              s * args.cin, s * in_line, grad, args.cout, out_line, sums + ky * k * matrix,
                              {1, 0, 0, 0, ky == 0 ? ranges : PrefetchRanges<T>{}});
          }
        }
        if (need_input) {
          const T* weight = args.input_weight + e * taps * input_matrix;
          const int64_t stop = last == args.out_high ? args.high : last * s;
          const int64_t tall = args.winograd ? 2 * ConvScratch::tile_rows(args.high, args.wide) : 1;
          for (int64_t iy = first * s; iy < stop; iy += tall) {
            const int64_t high = std::min(tall, stop - iy), row = args.wide * args.cin;
            PrefetchRanges<T> ranges;
            if (grad_x) ranges.write = grad_x + iy * row, ranges.write_size = high * row;
            if (image + 1 < end && step == args.out_high) {
              const int64_t out_row = args.out_wide * args.cout;
              const int64_t next = (index + args.experts) * args.out_high * out_row + iy * out_row;
              ranges.read[0] = args.grad + next;
              ranges.read[1] = args.y_read ? args.y_read + next : nullptr;
              ranges.read_size = high * out_row;
            }
            if (args.winograd)
              winograd_rows<T>(grads + (iy - first) * out_line, out_line, args.cout, weight, args.input_columns, {},
                               args.cin, high, args.wide, grad_z, row, scratch + at.patches, scratch + at.sums, ranges);
            else
              grad_input_row(args, weight, grads, first, iy, grad_z);
            for (int64_t i = 0; i < high; ++i)
              finish_grad_row(args, unit, grad_z + i * row, iy + i, args.shared && e > 0, grad_x, grad_scale,
                              grad_shift, grad_gate);
          }
        }
      }
    }
}

FASTMOD_KERNELS(NormConvKernels, .scratch = norm_conv_scratch<T>, .forward = norm_conv_forward<T>,
                .backward = norm_conv_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_norm_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                            const std::optional<at::Tensor>& shift, const std::optional<at::Tensor>& channel_gate,
                            const std::optional<at::Tensor>& bias, int64_t stride, bool depthwise) {
  check_float(x, "x");
  check_like(x, weight, "weight");
  TORCH_CHECK_VALUE(stride == 1 || stride == 2, "stride: expected 1 or 2, got ", stride);
  TORCH_CHECK_VALUE(
      (x.dim() == 4 || x.dim() == 5) && weight.dim() == 5 && weight.size(3) == weight.size(4) &&
          (weight.size(3) == 1 || weight.size(3) == 3) && weight.numel() > 0 && x.size(-1) > 0 && x.size(-2) > 0 &&
          (x.dim() == 4 || x.size(1) == weight.size(0)) &&
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

}  // namespace fastmod

#endif
