// Winograd's F(2x2, 3x3): a 3x3 convolution of stride 1 with 16 products for 4 pixels instead of 36.
//
// 4x4 patches of the image, which overlap by two, and the taps are transformed to 16 values each. A tile of 2x2 pixels
// is then a matrix product for each of the 16, and a sum. All factors are 1 and 1/2, so it is as exact as direct
// convolution. Gradients are the same steps in reverse. A NaN or an infinity in a patch makes its whole tile NaN.
//
// Why: on one thread of a Zen 4, forward, 64 images, direct convolution took 14.4 (4 experts of 16 channels, 32 px),
// 6.4 (2 of 32, 16 px) and 2.9 ms (64, 8 px), Winograd 9.7, 3.8 and 1.7; oneDNN's convolution alone 12.2, 5.5 and 2.4.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct WinogradKernels {
  void (*weights)(const T* taps, int64_t count, T* out);        // [9, count] -> [16, count]
  void (*weight_grads)(const T* grads, int64_t count, T* out);  // and back, as its gradient
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/conv.h"

namespace fastmod::cpu::FASTMOD_ISA {

constexpr int64_t kWinogradTiles = 32;  // the most tiles per call

// [16] = B' d B of a patch, B' = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1]
template <typename V>
FASTMOD_INLINE void patch_transform(const V (&d)[4][4], V (&out)[4][4]) {
  V rows[4][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[0][j] = d[0][j] - d[2][j];
    rows[1][j] = d[1][j] + d[2][j];
    rows[2][j] = d[2][j] - d[1][j];
    rows[3][j] = d[1][j] - d[3][j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i][0] = rows[i][0] - rows[i][2];
    out[i][1] = rows[i][1] + rows[i][2];
    out[i][2] = rows[i][2] - rows[i][1];
    out[i][3] = rows[i][1] - rows[i][3];
  }
}

// [2][2] = A' m A, A' = [1 1 1 0; 0 1 -1 -1]
template <typename V>
FASTMOD_INLINE void tile_transform(const V (&m)[4][4], V (&out)[2][2]) {
  V rows[2][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[0][j] = m[0][j] + m[1][j] + m[2][j];
    rows[1][j] = m[1][j] - m[2][j] - m[3][j];
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    out[i][0] = rows[i][0] + rows[i][1] + rows[i][2];
    out[i][1] = rows[i][1] - rows[i][2] - rows[i][3];
  }
}

// Its gradient: A g A'
template <typename V>
FASTMOD_INLINE void tile_gradient(const V (&g)[2][2], V (&out)[4][4]) {
  V rows[4][2];
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    rows[0][j] = g[0][j];
    rows[1][j] = g[0][j] + g[1][j];
    rows[2][j] = g[0][j] - g[1][j];
    rows[3][j] = -g[1][j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i][0] = rows[i][0];
    out[i][1] = rows[i][0] + rows[i][1];
    out[i][2] = rows[i][0] - rows[i][1];
    out[i][3] = -rows[i][1];
  }
}

// taps [9, count] -> G g G' [16, count], G = [1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1]; count in whole vectors
template <typename T>
void winograd_weights(const T* taps, int64_t count, T* out) {
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    Vec<T> rows[4][3];
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
      const Vec<T> first = load(taps + j * count + c), middle = load(taps + (3 + j) * count + c);
      const Vec<T> last = load(taps + (6 + j) * count + c), outer = first + last;
      rows[0][j] = first;
      rows[1][j] = T(0.5) * (outer + middle);
      rows[2][j] = T(0.5) * (outer - middle);
      rows[3][j] = last;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec<T> outer = rows[i][0] + rows[i][2];
      store(out + (i * 4 + 0) * count + c, rows[i][0]);
      store(out + (i * 4 + 1) * count + c, T(0.5) * (outer + rows[i][1]));
      store(out + (i * 4 + 2) * count + c, T(0.5) * (outer - rows[i][1]));
      store(out + (i * 4 + 3) * count + c, rows[i][2]);
    }
  }
}

// Its gradient: [16, count] -> G' u G [9, count]
template <typename T>
void winograd_weight_grads(const T* grads, int64_t count, T* out) {
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    Vec<T> rows[3][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vec<T> first = load(grads + j * count + c), last = load(grads + (12 + j) * count + c);
      const Vec<T> plus = T(0.5) * load(grads + (4 + j) * count + c);
      const Vec<T> minus = T(0.5) * load(grads + (8 + j) * count + c);
      rows[0][j] = first + (plus + minus);
      rows[1][j] = plus - minus;
      rows[2][j] = (plus + minus) + last;
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) {
      const Vec<T> plus = T(0.5) * rows[i][1], minus = T(0.5) * rows[i][2];
      store(out + (i * 3 + 0) * count + c, rows[i][0] + (plus + minus));
      store(out + (i * 3 + 1) * count + c, plus - minus);
      store(out + (i * 3 + 2) * count + c, (plus + minus) + rows[i][3]);
    }
  }
}

// A rectangle of `rows` x `across` tiles of an image in scratch, the first patch at `source`; rows of pixels are `line`
// elements apart.
struct Tiles {
  int64_t rows, across, line;
  int64_t count() const { return rows * across; }
};

// patches -> [16, tiles, channels]
template <typename T>
void transform_patches(const Tiles& tiles, const T* source, int64_t channels, T* out) {
  const int64_t plane = tiles.count() * channels;
  for (int64_t r = 0; r < tiles.rows; ++r)
    for (int64_t t = 0; t < tiles.across; ++t, out += channels) {
      const T* patch = source + 2 * r * tiles.line + 2 * t * channels;
      by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        Vec<T> d[4][4], v[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) d[i][j] = load_lanes(patch + i * tiles.line + j * channels + c, left);
        patch_transform(d, v);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) store_lanes(out + (i * 4 + j) * plane + c, v[i][j], left);
      });
    }
}

// tiles of the gradient -> [16, tiles, channels]
template <typename T>
void transform_tile_grads(const Tiles& tiles, const T* source, int64_t channels, T* out) {
  const int64_t plane = tiles.count() * channels;
  for (int64_t r = 0; r < tiles.rows; ++r)
    for (int64_t t = 0; t < tiles.across; ++t, out += channels) {
      const T* tile = source + 2 * r * tiles.line + 2 * t * channels;
      by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        Vec<T> g[2][2], m[4][4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) g[i][j] = load_lanes(tile + i * tiles.line + j * channels + c, left);
        tile_gradient(g, m);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) store_lanes(out + (i * 4 + j) * plane + c, m[i][j], left);
      });
    }
}

// What happens to the pixels of a result before they are stored: relu(y + bias + residual), each part optional.
template <typename T>
struct Finish {
  const T* bias = nullptr;      // [channels]
  const T* residual = nullptr;  // pixels like those of the result
  int64_t line = 0;             // from one row of the residual to the next
  bool relu = false;

  // Further down and to the right in the same image.
  Finish from(int64_t rows, int64_t values) const {
    return {bias, residual ? residual + rows * line + values : nullptr, line, relu};
  }
  // Value `at` of a row, whose first channel is `c`.
  template <typename Lanes>
  FASTMOD_INLINE Vec<T> operator()(Vec<T> y, int64_t row, int64_t at, int64_t c, Lanes left) const {
    if (bias) y += load_lanes(bias + c, left);
    if (residual) y += load_lanes(residual + row * line + at + c, left);
    return relu ? maximum<T>(y, Vec<T>{}) : y;
  }
};

// [16, tiles, channels] -> `high` x `wide` pixels
template <typename T>
void transform_tiles(const Tiles& tiles, const T* sums, int64_t channels, const Finish<T>& finish, T* out,
                     int64_t out_line, int64_t high, int64_t wide) {
  const int64_t plane = tiles.count() * channels;
  for (int64_t r = 0; r < tiles.rows; ++r)
    for (int64_t t = 0; t < tiles.across; ++t, sums += channels) {
      T* to = out + 2 * r * out_line + 2 * t * channels;
      const int64_t down = std::min<int64_t>(2, high - 2 * r), along = std::min<int64_t>(2, wide - 2 * t);
      by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
        Vec<T> m[4][4], y[2][2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) m[i][j] = load_lanes(sums + (i * 4 + j) * plane + c, left);
        tile_transform(m, y);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j)
            if (i < down && j < along)
              store_lanes(to + i * out_line + j * channels + c,
                          finish(y[i][j], 2 * r + i, (2 * t + j) * channels, c, left), left);
      });
    }
}

// Computes `high` x `wide` pixels of `out_channels` whose patches begin at `source`. weights: [16, channels, columns].
template <typename T>
void winograd_rows(const T* source, int64_t line, int64_t channels, const T* weights, int64_t columns,
                   const Finish<T>& finish, int64_t out_channels, int64_t high, int64_t wide, T* out, int64_t out_line,
                   T* patches, T* sums, const PrefetchRanges<T>& ranges = {}) {
  const int64_t rows = (high + 1) / 2, all = (wide + 1) / 2, most = std::max<int64_t>(kWinogradTiles / rows, 1);
  for (int64_t first = 0; first < all; first += most) {
    const Tiles tiles{rows, std::min(most, all - first), line};
    transform_patches(tiles, source + 2 * first * channels, channels, patches);
    const ConvRun<T> run{0, channels, weights};
    ConvRepeat<T> all_sixteen{16, tiles.count() * channels, channels * columns, tiles.count() * out_channels};
    if (first == 0) all_sixteen.next = ranges;
    conv_row<T>(tiles.count(), out_channels, columns, &run, 1, patches, channels, sums, out_channels, nullptr,
                all_sixteen);
    transform_tiles(tiles, sums, out_channels, finish.from(0, 2 * first * out_channels), out + 2 * first * out_channels,
                    out_line, high, wide - 2 * first);
  }
}

// Adds to sums [16, channels, columns] the weight gradient of `high` x `wide` pixels; the gradient is zero beyond them.
template <typename T>
void winograd_weight_sums(const T* source, int64_t line, int64_t channels, const T* grad, int64_t grad_line,
                          int64_t out_channels, int64_t high, int64_t wide, T* sums, int64_t columns, T* patches,
                          T* tile_grads, const PrefetchRanges<T>& ranges = {}) {
  const int64_t rows = (high + 1) / 2, all = (wide + 1) / 2, most = std::max<int64_t>(kWinogradTiles / rows, 1);
  for (int64_t first = 0; first < all; first += most) {
    const int64_t across = std::min(most, all - first);
    transform_patches<T>({rows, across, line}, source + 2 * first * channels, channels, patches);
    transform_tile_grads<T>({rows, across, grad_line}, grad + 2 * first * out_channels, out_channels, tile_grads);
    const int64_t count = rows * across;
    conv_grad_run<T>(channels, out_channels, columns, 1, count, patches, channels, 0, tile_grads, out_channels, 0, sums,
                     {16, count * channels, channels * columns, count * out_channels,
                      first == 0 ? ranges : PrefetchRanges<T>{}});
  }
}

FASTMOD_KERNELS(WinogradKernels, .weights = winograd_weights<T>, .weight_grads = winograd_weight_grads<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
