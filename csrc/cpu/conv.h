// Products of image rows and weights: the innermost loops of convolutions.
#pragma once

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

// What a block of pixels reads: `length` values at `offset` from its first pixel, each multiplied by a row of
// weights [length, columns].
template <typename T>
struct ConvRun {
  int64_t offset, length;
  const T* weight;
};

// Memory that the next strip reads and writes. It is prefetched a few cache lines at a time while products are
// computed; otherwise filling and writing a whole strip at once would wait for memory.
template <typename T>
struct PrefetchRanges {
  const T *read[2] = {}, *write = nullptr;
  int64_t read_size = 0, write_size = 0;  // values of each
};

// The same products for several sources, weights and results, `repeats` of them at these distances.
template <typename T>
struct ConvRepeat {
  int64_t repeats = 1, source = 0, weight = 0, out = 0;
  PrefetchRanges<T> next = {};
  int64_t part = 0, parts = 1;  // of `next`: each block of pixels prefetches one part, as all at once would stall
};

// Prefetches part `index` of `count`.
template <typename T>
FASTMOD_INLINE void prefetch_part(const PrefetchRanges<T>& ranges, int64_t index, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const auto ask = [&](const T* data, int64_t size, auto write) FASTMOD_INLINE_LAMBDA {
    const int64_t lines = (size + kLine * count - 1) / (kLine * count);
    data += index * lines * kLine;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(data + i * kLine, decltype(write)::value);
  };
  if (ranges.read[0]) ask(ranges.read[0], ranges.read_size, std::integral_constant<int, 0>{});
  if (ranges.read[1]) ask(ranges.read[1], ranges.read_size, std::integral_constant<int, 0>{});
  if (ranges.write) ask(ranges.write, ranges.write_size, std::integral_constant<int, 1>{});
}

// Vectors of channels that registers hold, and pixels: as many as possible per weight, as weights are further away.
constexpr int kConvVectors = 2;
template <int kVectors>
constexpr int conv_pixels() {
  if (FASTMOD_VECTOR_BYTES == 64) return kVectors == 1 ? 16 : 12;
  return kVectors == 1 ? 8 : 6;
}

// Sums are split into pieces of this many terms, and where registers are free into several sums side by side: one long
// sum would lose digits.
constexpr int64_t kConvTerms = 96;

// kPixels pixels, kVectors vectors of channels starting at `out`; the last vector holds `last` channels.
template <typename T, int kPixels, int kVectors>
void conv_block(const ConvRun<T>* runs, int64_t count, const T* source, int64_t source_stride, int64_t columns, T* out,
                int64_t out_stride, const T* bias, int64_t last, const ConvRepeat<T>& repeat) {
  constexpr int lanes = kLanes<T>;
  constexpr int kNear = 8;  // pixels that one pointer reaches by offsets that registers hold
  constexpr int kBeside = kPixels * kVectors <= 3 ? 4 : kPixels * kVectors <= 6 ? 2 : 1;
  // Adds the products of `terms` values of a run to what is in `to`, or, if `first`, overwrites it.
  const auto piece = [&](const T* near, const T* weight, int64_t terms, T* to, auto first) FASTMOD_INLINE_LAMBDA {
    Vec<T> sum[kBeside][kPixels][kVectors] = {};
    const T* far = near + kNear * source_stride;
    const auto step = [&](auto& sums) FASTMOD_INLINE_LAMBDA {
      Vec<T> right[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) right[v] = load(weight + v * lanes);
#pragma GCC unroll 16
      for (int p = 0; p < kPixels; ++p) {
        const Vec<T> left = splat((p < kNear ? near : far)[p % kNear * source_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[p][v] += left * right[v];
      }
      ++near;
      ++far;
      weight += columns;
    };
    const T* end = weight + terms * columns;
    if constexpr (kBeside > 1)
      for (; weight + (kBeside - 1) * columns < end;)
#pragma GCC unroll 4
        for (int i = 0; i < kBeside; ++i) step(sum[i]);
    while (weight < end) step(sum[0]);
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Vec<T> total = sum[0][p][v];
        if constexpr (kBeside == 2) total += sum[1][p][v];
        if constexpr (kBeside == 4) total = (total + sum[1][p][v]) + (sum[2][p][v] + sum[3][p][v]);
        T* place = to + p * out_stride + v * lanes;
        const bool partial = v == kVectors - 1 && last < lanes;
        if constexpr (!decltype(first)::value) total += partial ? load_first(place, last) : load(place);
        if (partial) store_first(place, total, last);
        else store(place, total);
      }
  };
  for (int64_t again = 0; again < repeat.repeats; ++again) {
    prefetch_part(repeat.next, repeat.part * repeat.repeats + again, repeat.parts * repeat.repeats);
    T* to = out + again * repeat.out;
    bool first = true;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t at = 0; at < runs[r].length; at += kConvTerms) {
        const T* from = source + again * repeat.source + runs[r].offset + at;
        const T* weight = runs[r].weight + again * repeat.weight + at * columns;
        const int64_t terms = std::min(kConvTerms, runs[r].length - at);
        if (first) piece(from, weight, terms, to, std::true_type{});
        else piece(from, weight, terms, to, std::false_type{});
        first = false;
      }
    if (first) piece(source, runs[0].weight, 0, to, std::true_type{});  // no tap reaches these pixels: zeros
    if (bias)  // last: if added first, a large bias would cost every term digits
      for (int p = 0; p < kPixels; ++p)
        for (int v = 0; v < kVectors; ++v) {
          T* place = to + p * out_stride + v * lanes;
          const int64_t width = v == kVectors - 1 ? last : lanes;
          store_first(place, load_first(place, width) + load_first(bias + v * lanes, width), width);
        }
  }
}

// `pixels` pixels in `blocks` blocks of kPixels or slightly fewer each.
template <typename T, int kVectors, int kPixels>
FASTMOD_INLINE void conv_blocks(int64_t pixels, int64_t blocks, const ConvRun<T>* runs, int64_t count, const T* source,
                                int64_t source_stride, int64_t columns, T* out, int64_t out_stride, const T* bias,
                                int64_t last, ConvRepeat<T> repeat) {
  for (; pixels > blocks * (kPixels - 1); --blocks) {
    conv_block<T, kPixels, kVectors>(runs, count, source, source_stride, columns, out, out_stride, bias, last,
                                     repeat);
    pixels -= kPixels;
    source += kPixels * source_stride;
    out += kPixels * out_stride;
    ++repeat.part;
  }
  if constexpr (kPixels > 1) {
    if (pixels > 0)
      conv_blocks<T, kVectors, kPixels - 1>(pixels, blocks, runs, count, source, source_stride, columns, out,
                                            out_stride, bias, last, repeat);
  }
}

// A row of pixels, all channels. Weights have `columns` columns (whole vectors), of which `channels` are stored.
template <typename T>
void conv_row(int64_t pixels, int64_t channels, int64_t columns, const ConvRun<T>* runs, int64_t count, const T* source,
              int64_t source_stride, T* out, int64_t out_stride, const T* bias, ConvRepeat<T> repeat = {}) {
  constexpr int lanes = kLanes<T>;
  ConvRun<T> here[3];
  for (int64_t first = 0; first < channels; first += kConvVectors * lanes) {
    for (int64_t r = 0; r < count; ++r) here[r] = {runs[r].offset, runs[r].length, runs[r].weight + first};
    const int64_t left = channels - first;
    const T* added = bias ? bias + first : nullptr;
    if (left > lanes) {
      constexpr int kPixels = conv_pixels<2>();
      repeat.parts = (pixels + kPixels - 1) / kPixels;
      conv_blocks<T, 2, kPixels>(pixels, (pixels + kPixels - 1) / kPixels, here, count, source, source_stride, columns,
                                 out + first, out_stride, added, std::min<int64_t>(left - lanes, lanes), repeat);
    } else {
      constexpr int kPixels = conv_pixels<1>();
      repeat.parts = (pixels + kPixels - 1) / kPixels;
      conv_blocks<T, 1, kPixels>(pixels, (pixels + kPixels - 1) / kPixels, here, count, source, source_stride, columns,
                                 out + first, out_stride, added, std::min<int64_t>(left, lanes), repeat);
    }
    repeat.next = {};
  }
}

// sums[kRows, columns] += source[pixel, row] * grad[pixel, column] over `high` rows of `wide` pixels.
template <typename T, int kRows, int kVectors>
void conv_grad_block(int64_t high, int64_t wide, const T* source, int64_t source_stride, int64_t source_row,
                     const T* grad, int64_t grad_stride, int64_t grad_row, T* sums, int64_t columns, int64_t last,
                     const ConvRepeat<T>& repeat) {
  constexpr int lanes = kLanes<T>;
  for (int64_t again = 0; again < repeat.repeats; ++again) {
  prefetch_part(repeat.next, again, repeat.repeats);
  T* own = sums + again * repeat.weight;
  Vec<T> sum[kRows][kVectors] = {};  // over these pixels alone: short sums lose fewer digits
  for (int64_t y = 0; y < high; ++y) {
    const T* left = source + again * repeat.source + y * source_row;
    const T* right = grad + again * repeat.out + y * grad_row;
    for (int64_t x = 0; x < wide; ++x) {
      Vec<T> factor[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        factor[v] = v == kVectors - 1 && last < lanes ? load_first(right + v * lanes, last) : load(right + v * lanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> value = splat(left[r]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] += value * factor[v];
      }
      left += source_stride;
      right += grad_stride;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      T* place = own + r * columns + v * lanes;
      store(place, load(place) + sum[r][v]);
    }
  }
}

template <typename T, int kVectors, int kRows>
FASTMOD_INLINE void conv_grad_blocks(int64_t rows, int64_t blocks, int64_t high, int64_t wide, const T* source,
                                     int64_t source_stride, int64_t source_row, const T* grad, int64_t grad_stride,
                                     int64_t grad_row, T* sums, int64_t columns, int64_t last,
                                     ConvRepeat<T> repeat) {
  for (; rows > blocks * (kRows - 1); --blocks) {
    conv_grad_block<T, kRows, kVectors>(high, wide, source, source_stride, source_row, grad, grad_stride, grad_row,
                                        sums, columns, last, repeat);
    rows -= kRows;
    source += kRows;
    sums += kRows * columns;
    repeat.next = {};
  }
  if constexpr (kRows > 1) {
    if (rows > 0)
      conv_grad_blocks<T, kVectors, kRows - 1>(rows, blocks, high, wide, source, source_stride, source_row, grad,
                                               grad_stride, grad_row, sums, columns, last, repeat);
  }
}

// The same for a run of `length` values per pixel and all channels.
template <typename T>
void conv_grad_run(int64_t length, int64_t channels, int64_t columns, int64_t high, int64_t wide, const T* source,
                   int64_t source_stride, int64_t source_row, const T* grad, int64_t grad_stride, int64_t grad_row,
                   T* sums, ConvRepeat<T> repeat = {}) {
  constexpr int lanes = kLanes<T>;
  for (int64_t first = 0; first < channels; first += kConvVectors * lanes) {
    const int64_t left = channels - first;
    if (left > lanes) {
      constexpr int kRows = conv_pixels<2>();
      conv_grad_blocks<T, 2, kRows>(length, (length + kRows - 1) / kRows, high, wide, source, source_stride, source_row,
                                    grad + first, grad_stride, grad_row, sums + first, columns,
                                    std::min<int64_t>(left - lanes, lanes), repeat);
    } else {
      constexpr int kRows = conv_pixels<1>();
      conv_grad_blocks<T, 1, kRows>(length, (length + kRows - 1) / kRows, high, wide, source, source_stride, source_row,
                                    grad + first, grad_stride, grad_row, sums + first, columns,
                                    std::min<int64_t>(left, lanes), repeat);
    }
    repeat.next = {};
  }
}

}  // namespace fastmod::cpu::FASTMOD_ISA
