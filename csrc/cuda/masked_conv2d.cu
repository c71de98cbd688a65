// masked_conv2d on tensor cores, as implicit products: filters times pixels, and the gradient of x, which is the same
// with the filters' channels exchanged. Images are read and written in place, in any layout.
//
// A block takes 64 result channels of 256 result pixels of one sample, or 32 of 256 or 128; a thread has one pixel. It
// walks through the source's channels, 16 at a time with all their taps. For these it draws the masks once, one Philox
// call for four weights, and keeps one bit per weight in shared memory. Then, in chunks of 16 pairs of a channel and a
// tap, it stages masked weights and pixels in shared memory in the layout of the tensor cores, fp32 as two tf32
// numbers. Data for the next chunk is read from memory while this one is multiplied. No masked copy of the weight is
// ever written.
#include "masked_conv2d.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kDepth = 16;       // of a chunk
constexpr int kChannels = 16;    // source channels whose masks are drawn at a time
constexpr int kMaxThreads = 256;
constexpr int kWarpPixels = 32;
constexpr int kColumnTiles = kWarpPixels / 8;
constexpr int64_t kEnoughBlocks = 128;  // one for each multiprocessor of a large GPU

template <typename T>
struct Problem {
  Images<const T> source;
  Images<T> result;
  MaskedFilters<T> filters;
  MaskedConvShape shape;
  MaskNoise noise;
  uint32_t bias_stream;
  int classes, classes_across;  // of result pixels, by their position modulo the stride
  int64_t row_blocks, tiles;    // of channels, and of pixels of a class
  int pitch;                    // bytes of masks per line
  bool vector, precise;         // vector: eight result pixels are side by side, aligned
};

// A pair of a channel and a tap.
struct alignas(16) Entry {
  uint64_t tap;  // its bit in the set of taps inside the source
  int offset;    // of the pixel that it reads
  int code;      // tap of the filter | channel << 8
};
__device__ inline int filter_tap_of(int code) { return code & 255; }
__device__ inline int channel_of(int code) { return code >> 8; }

template <typename T, int kM>
struct Memory {
  using Unit = typename Four<T>::Unit;
  static constexpr int kRows = 16 * kM;
  Unit pixels[Four<T>::kParts][kMaxThreads * 4];
  Unit weights[Four<T>::kParts][kRows * 4];
  int64_t where[kMaxThreads];  // offsets of the result pixels, or -1
  Axis axis[2];
  float bias[kRows];
  // [kChannels * taps], then bytes of masks: four bits for weights that are kept, four for NaN logits
  Entry table[1];

  static int64_t bytes(int taps, int lines, int pitch) {
    return static_cast<int64_t>(sizeof(Memory)) + kChannels * taps * static_cast<int64_t>(sizeof(Entry)) +
           static_cast<int64_t>(lines) * pitch;
  }
};

template <typename T, int kM, bool kBackward, bool kMixed>
struct Block {
  using Unit = typename Four<T>::Unit;
  using Own = Memory<T, kM>;
  static constexpr int kParts = Four<T>::kParts, kRows = Own::kRows;
  static constexpr bool kMixedSource = kMixed && !kBackward, kMixedResult = kMixed && kBackward;

  const Problem<T>& p;
  Own& memory;
  int64_t sample;
  int row0, taps;            // taps: of the filter
  int class_taps;            // taps that this class uses
  uint64_t sample_word;      // the first noise word of the sample
  uint64_t inside;           // the taps of the thread's pixel that are inside the source
  Operand<kMixedSource, const T> base;        // of the thread's pixel in the source, at channel 0
  int pixel_slot[kColumnTiles], weight_slot;  // of the lane, in shared memory

  __device__ int rows() const { return kBackward ? p.shape.in : p.shape.out; }
  __device__ int channels() const { return kBackward ? p.shape.out : p.shape.in; }
  __device__ uint8_t* masks() const {
    return reinterpret_cast<uint8_t*>(memory.table + kChannels * taps);
  }
  // The first weight of a line, whose noise is consecutive: a row and kChannels channels; backward, a channel and all
  // rows.
  __device__ int64_t line_begin(int line, int c0) const {
    const int64_t out = kBackward ? c0 + line : row0 + line, in = kBackward ? row0 : c0;
    return (out * p.shape.in + in) * taps;
  }

  // How many words of the line's first Philox call come before the line.
  __device__ unsigned words_before(int line, int c0) const {
    const unsigned out = kBackward ? c0 + line : row0 + line, in = kBackward ? row0 : c0;
    return (static_cast<unsigned>(sample_word) + (out * static_cast<unsigned>(p.shape.in) + in) * taps) % kQuad;
  }

  __device__ void fill_table() const {
    const Axis &y = memory.axis[0], &x = memory.axis[1];
    for (int i = threadIdx.x; i < kChannels * class_taps; i += blockDim.x) {
      const int channel = i / class_taps, tap = i - channel * class_taps;
      const int down = tap / x.taps, across = tap - down * x.taps;
      const int offset = channel * p.source.channel + y.shift[down] * p.source.row + x.shift[across] * p.source.column;
      const int filter_tap = y.weight[down] * p.shape.kernel[1] + x.weight[across];
      memory.table[i] = {uint64_t(1) << tap, offset, filter_tap | channel << 8};
    }
  }

  __device__ void draw(int c0) const {
    const PhiloxKeys keys(seed_of(p.noise));  // recomputed each time: registers are scarce while chunks are multiplied
    const int here = channels() - c0 < kChannels ? channels() - c0 : kChannels;
    const int there = rows() - row0 < kRows ? rows() - row0 : kRows;
    const int lines = kBackward ? here : there, length = (kBackward ? there : here) * taps;
    uint8_t* bytes = masks();
#pragma unroll 1
    for (int i = threadIdx.x; i < lines * p.pitch; i += blockDim.x) {
      const int line = i / p.pitch, quad = i - line * p.pitch;
      const int64_t begin = line_begin(line, c0);
      const uint64_t word = sample_word + static_cast<uint64_t>(begin);
      const int at = quad * kQuad - static_cast<int>(words_before(line, c0));  // of the first of the four, in the line
      if (at >= length) continue;
      const PhiloxWords words = philox_group(keys, word / kQuad + quad, p.noise.stream);
      const auto from = operand<kMixed>(p.filters.logits) + (begin + at);
      float logit[kQuad];
      uint32_t low[kQuad], nearest = 0xffffffffu;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        logit[j] = static_cast<unsigned>(at + j) < static_cast<unsigned>(length) ? value_at(from, j) : 0.0f;
        low[j] = low_word(roughly_off(logit[j]));
        const uint32_t above = words.word[j] - low[j];
        nearest = above < nearest ? above : nearest;
      }
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        if (words.word[j] >= low[j]) bits |= 1u << j;
        if (logit[j] != logit[j]) bits |= 16u << j;
      }
      if (nearest < kUncertainWords) {
        bits &= ~15u;
#pragma unroll 1
        for (int j = 0; j < kQuad; ++j) {
          const uint32_t own =
              j < 2 ? (j == 0 ? words.word[0] : words.word[1]) : j == 2 ? words.word[2] : words.word[3];
          const float own_logit = j < 2 ? (j == 0 ? logit[0] : logit[1]) : j == 2 ? logit[2] : logit[3];
          if (static_cast<int32_t>(own >> 9) >= words_off(own_logit)) bits |= 1u << j;
        }
      }
      bytes[i] = static_cast<uint8_t>(bits);
    }
  }

  // Reads chunk `chunk` of the channels from c0 on, of which `left` pairs exist: the pixel of the thread and four
  // weights of a row.
  __device__ void load(int c0, int chunk, int left, float (&pixel)[kDepth], float (&weight)[4]) const {
    if (left >= kDepth) {
      load_pixel<true>(c0, chunk, left, pixel);
    } else {
      load_pixel<false>(c0, chunk, left, pixel);
    }
    load_weight(c0, chunk, left, weight);
  }
  // Without branches: where there is nothing to read, it reads the first number.
  template <bool kWhole>
  __device__ void load_pixel(int c0, int chunk, int left, float (&pixel)[kDepth]) const {
    const Entry* entries = memory.table + chunk * kDepth;
    const auto from = base + static_cast<int64_t>(c0) * p.source.channel;
#pragma unroll
    for (int e = 0; e < kDepth; ++e) {
      const Entry entry = entries[kWhole || e < left ? e : 0];
      const bool there = (inside & entry.tap) != 0 && (kWhole || e < left);
      const float value = value_at(either(there, from + entry.offset, operand<kMixedSource>(p.source.data)), 0);
      pixel[e] = there ? value : 0.0f;
    }
  }
  __device__ void load_weight(int c0, int chunk, int left, float (&weight)[4]) const {
    const Entry* entries = memory.table + chunk * kDepth;
    const int row = threadIdx.x / 4, first = threadIdx.x % 4 * 4;
    const bool there = row < kRows && row0 + row < rows();
    const int64_t begin = kBackward ? (static_cast<int64_t>(c0) * p.shape.in + row0 + row) * taps
                                    : line_begin(row, c0) + chunk * kDepth + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = 0.0f;
      if (!there || first + i >= left) continue;
      int offset = i;
      if constexpr (kBackward) {
        const int code = entries[first + i].code;
        offset = channel_of(code) * p.shape.in * taps + filter_tap_of(code);
      }
      weight[i] = value_at(operand<kMixed>(p.filters.weight), begin + offset);
    }
  }

  // Stores it to shared memory, where others may read it after a barrier.
  __device__ void stage(int c0, int chunk, int left, const float (&pixel)[kDepth], float (&weight)[4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float v[] = {pixel[4 * q], pixel[4 * q + 1], pixel[4 * q + 2], pixel[4 * q + 3]};
      put(memory.pixels, unit_place(threadIdx.x, q), v);
    }
    const int row = threadIdx.x / 4, first = threadIdx.x % 4 * 4;
    if (row >= kRows) return;
    if (row0 + row < rows()) {
      const uint8_t* bytes = masks();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= left) continue;
        const int entry = chunk * kDepth + first + i, code = kBackward ? memory.table[entry].code : 0;
        const int line = kBackward ? channel_of(code) : row;
        const unsigned at = (kBackward ? row * taps + filter_tap_of(code) : entry) + words_before(line, c0);
        const unsigned bits = bytes[line * p.pitch + at / kQuad] >> at % kQuad;
        if (!(bits & 1)) weight[i] *= 0.0f;  // an infinite weight becomes a NaN, as in torch
        if (bits & 16) weight[i] = NAN;
      }
    }
    put(memory.weights, unit_place(row, threadIdx.x % 4), weight);
  }
  template <int kCount>
  __device__ void put(Unit (&to)[kParts][kCount], int place, const float (&v)[4]) const {
    Unit unit[kParts];
    Four<T>::split(v, p.precise, unit);
#pragma unroll
    for (int part = 0; part < kParts; ++part) to[part][place] = unit[part];
  }

  template <bool kPrecise>
  __device__ void multiply(float (&sums)[kM][kColumnTiles][4]) const {
    Unit b[kColumnTiles][kParts];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        b[n][part] = memory.pixels[part][pixel_slot[n]];
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      Unit a[2][kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        a[0][part] = memory.weights[part][weight_slot + m * 16 * 4];
        a[1][part] = memory.weights[part][weight_slot + (m * 16 + 8) * 4];
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) multiply_into<T, kPrecise>(a, b[n], sums[m][n]);
    }
  }

  __device__ void find_slots() {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, pixel0 = threadIdx.x / kWarp * kWarpPixels;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) pixel_slot[n] = held(unit_place(pixel0 + dealt_column(g, n), t));
    weight_slot = held(unit_place(g, t));  // 8 rows further the same quarter has the same place
  }

  // Fills in the masked bias of every row.
  __device__ void fill_bias() const {
    for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
      const int out = row0 + row;
      float value = 0.0f;
      if (!kBackward && given(p.filters.bias) && out < p.shape.out) {
        value = value_at(operand<kMixed>(p.filters.bias), out);
        if (given(p.filters.bias_logits)) {
          const float logit = value_at(operand<kMixed>(p.filters.bias_logits), out);
          const uint64_t index = static_cast<uint64_t>((p.noise.first + sample) * p.shape.out + out);
          const uint32_t word = noise_word(seed_of(p.noise), index, p.bias_stream);
          if (static_cast<int32_t>(word >> 9) < words_off(logit)) value *= 0.0f;
          if (logit != logit) value = NAN;
        }
      }
      memory.bias[row] = value;
    }
  }

  __device__ void store(const float (&sums)[kM][kColumnTiles][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int64_t* where = memory.where + threadIdx.x / kWarp * kWarpPixels + 8 * t;  // the lane's eight pixels
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + g;
        if (row0 + row >= rows()) continue;
        const int64_t channel = static_cast<int64_t>(row0 + row) * p.result.channel;
        const float bias = memory.bias[row];
        const auto put_eight = [&](auto* to) {
          using Result = std::remove_pointer_t<decltype(to)>;
          alignas(16) Result held[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) narrow(sums[m][i / 2][2 * half + i % 2] + bias, held + i);
          if (p.vector) {
            if (where[0] < 0) return;
#pragma unroll
            for (int i = 0; i < 8; i += 16 / sizeof(Result)) {
              *reinterpret_cast<uint4*>(to + where[0] + i) = *reinterpret_cast<const uint4*>(held + i);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              if (where[i] >= 0) to[where[i]] = held[i];
            }
          }
        };
        if (kMixedResult && p.result.data.wide) {
          put_eight(p.result.data.wide + channel);
        } else {
          put_eight(p.result.data.narrow + channel);
        }
      }
    }
  }
};

template <typename T, int kM, bool kBackward, bool kMixed>
__global__ void __launch_bounds__(kMaxThreads, 1) product_kernel(const __grid_constant__ Problem<T> p) {
  using Own = Block<T, kM, kBackward, kMixed>;
  FASTMOD_DYNAMIC_SHARED(bytes);
  auto& memory = *reinterpret_cast<Memory<T, kM>*>(bytes);
  const int64_t outer = quotient(blockIdx.x, p.row_blocks), group = quotient(outer, p.tiles);
  const int64_t sample = quotient(group, p.classes), tile = outer - group * p.tiles;
  const int own_class = static_cast<int>(group - sample * p.classes);
  if (threadIdx.x < 2) {
    const int d = threadIdx.x, down = own_class / p.classes_across;
    if constexpr (kBackward) {
      memory.axis[d].read_by_backward(p.shape, d, d ? own_class - down * p.classes_across : down);
    } else {
      memory.axis[d].read_by_forward(p.shape, d);
    }
  }
  __syncthreads();
  const Axis &y = memory.axis[0], &x = memory.axis[1];
  const int64_t pixel0 = tile * blockDim.x;
  if (pixel0 >= p.shape.images * y.results * x.results) return;  // this class has fewer pixels than others
  const int row0 = static_cast<int>(blockIdx.x - outer * p.row_blocks) * Own::kRows;
  const int taps = p.shape.kernel[0] * p.shape.kernel[1];
  Own own{p, memory, sample, row0, taps, y.taps * x.taps, 0, 0, {}, {}, 0};
  own.find_slots();
  own.sample_word = static_cast<uint64_t>((p.noise.first + sample) * p.shape.out * p.shape.in * taps);
  {
    const ResultPixel pixel(pixel0 + threadIdx.x, p.shape.images, y.results, x.results);
    const bool there = pixel.image >= 0;
    const int64_t image = sample * p.shape.images + pixel.image;
    own.inside = there ? taps_inside(y, x, pixel.i, pixel.j) : 0;
    own.base = operand<Own::kMixedSource>(p.source.data);
    if (there) {
      own.base += image * p.source.image + static_cast<int64_t>(pixel.i * y.advance + y.origin) * p.source.row +
                  static_cast<int64_t>(pixel.j * x.advance + x.origin) * p.source.column;
    }
    memory.where[threadIdx.x] =
        there ? image * p.result.image + static_cast<int64_t>(y.first + pixel.i * y.spread) * p.result.row +
                    static_cast<int64_t>(x.first + pixel.j * x.spread) * p.result.column
              : -1;
  }
  own.fill_table();
  own.fill_bias();
  __syncthreads();

  float sums[kM][kColumnTiles][4] = {};
  float pixel[kDepth], weight[4];
  const auto pairs_from = [&](int c0) {
    return (own.channels() - c0 < kChannels ? own.channels() - c0 : kChannels) * own.class_taps;
  };
  int c0 = 0, chunk = 0, left = pairs_from(0);
  if (left > 0) own.load(c0, chunk, left, pixel, weight);
#pragma unroll 1
  while (left > 0) {
    if (chunk == 0) {
      own.draw(c0);
      __syncthreads();
    }
    own.stage(c0, chunk, left, pixel, weight);
    __syncthreads();
    ++chunk;
    left -= kDepth;
    if (left <= 0) {
      c0 += kChannels;
      chunk = 0;
      left = c0 < own.channels() ? pairs_from(c0) : 0;
    }
    if (left > 0) own.load(c0, chunk, left, pixel, weight);
    if (p.precise) {
      own.template multiply<true>(sums);
    } else {
      own.template multiply<false>(sums);
    }
    __syncthreads();
  }
  own.store(sums);
}

template <typename T, bool kBackward>
cudaError_t launch(const Images<const T>& source, const MaskedFilters<T>& filters, const Images<T>& result,
                   bool allow_tf32, const MaskedConvShape& shape, const MaskNoise& noise, uint32_t bias_stream,
                   cudaStream_t stream) {
  const int rows = kBackward ? shape.in : shape.out, taps = shape.taps();
  const int stride_y = kBackward ? shape.stride[0] : 1, stride_x = kBackward ? shape.stride[1] : 1;
  const int high = kBackward ? (shape.high + stride_y - 1) / stride_y : shape.out_high;
  const int wide = kBackward ? (shape.wide + stride_x - 1) / stride_x : shape.out_wide;
  const int64_t pixels = shape.images * high * wide;
  if (noise.samples * pixels * rows == 0) return cudaSuccess;
  const int across = stride_x < shape.wide ? stride_x : shape.wide;
  const int classes = (stride_y < shape.high ? stride_y : shape.high) * across;
  // Whether eight pixels of a class are side by side, never across the end of an image.
  const bool vector = stride_y * stride_x == 1 && result.column == 1 && result.row == wide && high * wide % 8 == 0 &&
                      result.channel % 8 == 0 && result.image % 8 == 0 &&
                      aligned_to(result.data, 16);
  const auto blocks = [&](int height, int threads) {
    return (rows + height - 1) / height * ((pixels + threads - 1) / threads) * classes * noise.samples;
  };
  const auto run = [&](auto tiles_m, int threads) {
    constexpr int kM = decltype(tiles_m)::value, kRows = 16 * kM;
    const int lines = kBackward ? kChannels : kRows;
    const int pitch = ((kBackward ? kRows : kChannels) * taps + 2 * kQuad - 2) / kQuad;
    const Problem<T> p{source, result, filters, shape, noise, bias_stream, classes, across, (rows + kRows - 1) / kRows,
                       (pixels + threads - 1) / threads, pitch, vector, !allow_tf32};
    const auto launch_one = [&](auto some) {
      const auto kernel = product_kernel<T, kM, kBackward, decltype(some)::value>;
      return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(blocks(kRows, threads), 1), threads,
                                    static_cast<size_t>(Memory<T, kM>::bytes(taps, lines, pitch)), stream, p);
    };
    return with_mixed<T>(launch_one, source.data, result.data, filters.weight, filters.logits, filters.bias,
                         filters.bias_logits);
  };
  const bool fits = taps <= 25;  // all masks and pairs fit shared memory
  if (rows > 32 && fits && blocks(64, kMaxThreads) >= kEnoughBlocks)
    return run(std::integral_constant<int, 4>{}, kMaxThreads);
  using Two = std::integral_constant<int, 2>;
  return run(Two{}, blocks(32, kMaxThreads) >= kEnoughBlocks ? kMaxThreads : kMaxThreads / 2);
}

}  // namespace

template <typename T>
cudaError_t masked_conv2d_forward(Images<const T> x, MaskedFilters<T> filters, Images<T> result, bool allow_tf32,
                                  MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream, cudaStream_t stream) {
  return launch<T, false>(x, filters, result, allow_tf32, shape, noise, bias_stream, stream);
}

template <typename T>
cudaError_t masked_conv2d_backward_x(Images<const T> grad, MaskedFilters<T> filters, Images<T> grad_x,
                                     bool allow_tf32, MaskedConvShape shape, MaskNoise noise, cudaStream_t stream) {
  return launch<T, true>(grad, filters, grad_x, allow_tf32, shape, noise, 0, stream);
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template cudaError_t masked_conv2d_forward<T>(Images<const T>, MaskedFilters<T>, Images<T>, bool, MaskedConvShape, \
                                                MaskNoise, uint32_t, cudaStream_t);                                  \
  template cudaError_t masked_conv2d_backward_x<T>(Images<const T>, MaskedFilters<T>, Images<T>, bool,               \
                                                   MaskedConvShape, MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
