// A chain of convolutions in inference. Batch norm is folded into weights and biases, so that an image passes through
// all of them at once and only the last result leaves the cache. Each convolution writes its result, with bias,
// residual and ReLU, where the next one reads it.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// One convolution of the chain. Value 0 is x, value i the result of layer i - 1.
template <typename T>
struct ChainLayer {
  int64_t cin, cout, kernel, stride, columns;
  bool relu, winograd;
  int64_t source, residual;  // values; residual: added before the ReLU, none if negative
  const T *weight, *bias;    // packed as for norm_conv; [E, cout] or null
  FASTMOD_INLINE int64_t taps() const { return winograd ? 16 : kernel * kernel; }
};
// Where a value [high, wide, channels] is in the scratch of an image: inside a frame of zeros, with one row and
// column before it and two after it.
struct ChainFrame {
  int64_t channels, high, wide, at;
  FASTMOD_INLINE int64_t line() const { return (wide + 3) * channels; }
  FASTMOD_INLINE int64_t size() const { return (high + 3) * line(); }
};
template <typename T>
struct ConvChainArgs {
  int64_t batch, experts, count, images;  // count: layers; images: how many pass a layer together and share its weights
  bool shared;                            // x has no dimension of experts
  const T* x;
  int64_t x_image, x_expert, x_channel, x_row, x_pixel;  // strides
  const ChainLayer<T>* layers;
  const ChainFrame* frames;  // count + 1
  int64_t frames_size;       // of the scratch of an image
  int64_t tile_channels;     // the most channels of any layer that uses Winograd
  const T* gate;             // [B, E] or null
  T* y;                      // [B, E, H, W, C], with a gate [B, H, W, C]
};

template <typename T>
struct ConvChainKernels {
  int64_t (*scratch)(const ConvChainArgs<T>&);
  void (*forward)(const ConvChainArgs<T>&, int64_t group, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/norm_conv_kernel.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T>
int64_t conv_chain_scratch(const ConvChainArgs<T>& args) {
  return args.images * args.frames_size + 2 * (16 * kWinogradTiles * args.tile_channels + 16);
}

// Writes the zeros around a value.
template <typename T>
void clear_frame(const ChainFrame& frame, T* to) {
  const int64_t line = frame.line(), inside = frame.wide * frame.channels;
  std::fill(to, to + line, T(0));
  for (int64_t y = 1; y <= frame.high; ++y) {
    std::fill(to + y * line, to + y * line + frame.channels, T(0));
    std::fill(to + y * line + frame.channels + inside, to + (y + 1) * line, T(0));
  }
  std::fill(to + (frame.high + 1) * line, to + frame.size(), T(0));
}

// Copies an image of any strides into its frame.
template <typename T>
void fill_frame(const ConvChainArgs<T>& args, const T* x, T* to) {
  const ChainFrame& frame = args.frames[0];
  const int64_t channels = frame.channels;
  clear_frame(frame, to);
  for (int64_t y = 0; y < frame.high; ++y) {
    const T* from = x + y * args.x_row;
    T* row = to + (y + 1) * frame.line() + channels;
    if (args.x_channel == 1 && args.x_pixel == channels) {
      std::copy_n(from, frame.wide * channels, row);
      continue;
    }
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t i = 0; i < frame.wide; ++i) row[i * channels + c] = from[c * args.x_channel + i * args.x_pixel];
  }
}

// One layer of one image; `out`: its first pixel.
template <typename T>
void run_chain_layer(const ConvChainArgs<T>& args, int64_t index, int64_t expert, T* frames, T* out, int64_t out_line,
                     T* tiles) {
  const ChainLayer<T>& layer = args.layers[index];
  const ChainFrame &source = args.frames[layer.source], &result = args.frames[index + 1];
  const int64_t line = source.line(), k = layer.kernel, matrix = layer.cin * layer.columns;
  const T *from = frames + source.at, *weight = layer.weight + expert * layer.taps() * matrix;
  Finish<T> finish{.relu = layer.relu};
  if (layer.bias) finish.bias = layer.bias + expert * layer.cout;
  if (layer.residual >= 0) {
    const ChainFrame& other = args.frames[layer.residual];
    finish.residual = frames + other.at + other.line() + other.channels;
    finish.line = other.line();
  }
  if (layer.winograd) {
    const int64_t tall = 2 * ConvScratch::tile_rows(result.high, result.wide);
    for (int64_t y = 0; y < result.high; y += tall)
      winograd_rows(from + y * line, line, layer.cin, weight, layer.columns, finish.from(y, 0), layer.cout,
                    std::min(tall, result.high - y), result.wide, out + y * out_line, out_line, tiles,
                    tiles + 16 * kWinogradTiles * args.tile_channels);
    return;
  }
  ConvRun<T> runs[3];
  for (int64_t ky = 0; ky < k; ++ky) runs[ky] = {ky * line, k * layer.cin, weight + ky * k * matrix};
  const T* first = k == 1 ? from + line + layer.cin : from;
  for (int64_t y = 0; y < result.high; ++y) {
    T* row = out + y * out_line;
    conv_row<T>(result.wide, layer.cout, layer.columns, runs, k, first + y * layer.stride * line,
                layer.stride * layer.cin, row, layer.cout, nullptr);
    for (int64_t at = 0; at < result.wide * layer.cout; at += layer.cout)
      by_vectors<T>(layer.cout, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        store_lanes(row + at + c, finish(load_lanes(row + at + c, left), y, at, c, left), left);
      });
  }
}

// y += gate * value, or = for the first expert
template <typename T>
void add_gated(const ChainFrame& frame, const T* value, T gate, bool first, T* y) {
  const int64_t row = frame.wide * frame.channels;
  for (int64_t i = 0; i < frame.high; ++i, y += row)
    by_vectors<T>(row, [&](int64_t at, auto left) FASTMOD_INLINE_LAMBDA {
      const Vec<T> own = gate * load_lanes(value + i * frame.line() + at, left);
      store_lanes(y + at, first ? own : load_lanes(y + at, left) + own, left);
    });
}

// Takes up to args.images images, from group * args.images on, through all layers of every expert.
template <typename T>
void conv_chain(const ConvChainArgs<T>& args, int64_t group, T* scratch) {
  const int64_t begin = group * args.images, end = std::min(args.batch, begin + args.images);
  const ChainFrame& last = args.frames[args.count];
  const int64_t row = last.wide * last.channels, size = last.high * row;
  T* tiles = scratch + args.images * args.frames_size;
  for (int64_t e = 0; e < args.experts; ++e) {
    for (int64_t b = begin; b < end && (e == 0 || !args.shared); ++b)
      fill_frame(args, args.x + b * args.x_image + e * args.x_expert,
                 scratch + (b - begin) * args.frames_size + args.frames[0].at);
    for (int64_t i = 0; i < args.count; ++i)
      for (int64_t b = begin; b < end; ++b) {
        T* frames = scratch + (b - begin) * args.frames_size;
        const ChainFrame& frame = args.frames[i + 1];
        T* inside = frames + frame.at + frame.line() + frame.channels;
        if (i + 1 == args.count && !args.gate) {
          run_chain_layer(args, i, e, frames, args.y + (b * args.experts + e) * size, row, tiles);
          continue;
        }
        clear_frame(frame, frames + frame.at);
        run_chain_layer(args, i, e, frames, inside, frame.line(), tiles);
        if (i + 1 == args.count)
          add_gated(frame, inside, args.gate[b * args.experts + e], e == 0, args.y + b * size);
      }
  }
}

FASTMOD_KERNELS(ConvChainKernels, .scratch = conv_chain_scratch<T>, .forward = conv_chain<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
