// Gradients of weight, logits and bias of masked_conv2d. The first launch computes, for every sample, the product of
// the result's gradient with the pixels that were read, over all pixels, on tensor cores. The second sums it over
// blocks in a fixed order, multiplies by the mask, or by the slope of the relaxed mask, and sums over samples.
//
// A warp has 32 outputs and 32 columns (pairs of a channel and a tap). Pixels are loaded into shared memory 16 at a
// time, side by side for each output or column, fp32 as two tf32 numbers; the next 16 are read from memory meanwhile.
#include "masked_conv2d.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kDepth = 16;   // pixels per chunk
constexpr int kBatch = 64;   // pixels whose positions are computed at a time
constexpr int kAcross = 32;  // outputs and columns per warp
constexpr int kColumnTiles = kAcross / 8;
constexpr int kMaxDown = 2, kMaxWide = 4;  // warps per block
constexpr int kUnits = 4;    // quarters of an output or column per thread
constexpr int64_t kEnoughBlocks = 384;

template <typename T>
struct Problem {
  Images<const T> grad, x;
  float* partials;  // [samples, splits, out, columns], then of the bias [samples, splits, out]
  MaskedConvShape shape;
  int64_t samples, splits, pixels_each;
  int down, wide, column_blocks;  // warps of a block; blocks
  bool vector, precise;           // vector: four pixels of the gradient are side by side, aligned
};

// A pixel of the result.
struct Place {
  int64_t grad, x;  // offsets; x: of tap 0, which may be outside
  uint64_t taps;    // the taps that are inside; none if there is no pixel
};

template <typename T>
struct Memory {
  using Unit = typename Four<T>::Unit;
  Unit grads[Four<T>::kParts][kMaxDown * kAcross * 4], columns[Four<T>::kParts][kMaxWide * kAcross * 4];
  Place places[2][kBatch];
  Axis axis[2];
};

template <typename T, bool kMixed>
struct Block {
  using Unit = typename Four<T>::Unit;
  static constexpr int kParts = Four<T>::kParts;

  const Problem<T>& p;
  Memory<T>& memory;
  int64_t sample, pixel0, end;  // pixels of the block
  int out0, column0;
  int offset[kUnits], tap[kUnits];  // of the thread's columns

  __device__ int columns() const { return p.shape.in * p.shape.kernel[0] * p.shape.kernel[1]; }

  __device__ void find_columns() {
    const int taps = p.shape.kernel[0] * p.shape.kernel[1];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int column = column0 + (static_cast<int>(threadIdx.x) + u * static_cast<int>(blockDim.x)) / 4;
      const int channel = column / taps, own = column - channel * taps, down = own / p.shape.kernel[1];
      const int across = own - down * p.shape.kernel[1];
      const bool there = column < columns();
      offset[u] = there ? channel * p.x.channel + down * p.shape.dilation[0] * p.x.row +
                              across * p.shape.dilation[1] * p.x.column
                        : 0;
      tap[u] = there ? own : kNoTap;
    }
  }

  __device__ void find_places(int64_t batch) const {
    if (threadIdx.x >= kBatch / 2) return;  // the first warp, two pixels per thread: a block may have only one warp
#pragma unroll
    for (int i = threadIdx.x; i < kBatch; i += kBatch / 2) {
      const int64_t at = pixel0 + batch * kBatch + i;
      const Axis &y = memory.axis[0], &x = memory.axis[1];
      Place place{-1, 0, 0};
      if (at < end) {
        const ResultPixel pixel(at, p.shape.images, y.results, x.results);
        const int64_t image = sample * p.shape.images + pixel.image;
        place.grad = image * p.grad.image + static_cast<int64_t>(pixel.i) * p.grad.row +
                     static_cast<int64_t>(pixel.j) * p.grad.column;
        place.x = image * p.x.image + static_cast<int64_t>(pixel.i * y.advance + y.origin) * p.x.row +
                  static_cast<int64_t>(pixel.j * x.advance + x.origin) * p.x.column;
        place.taps = taps_inside(y, x, pixel.i, pixel.j);
      }
      memory.places[batch % 2][i] = place;
    }
  }

  __device__ void load(int64_t chunk, float (&grads)[kUnits][4], float (&columns)[kUnits][4]) const {
    const Place* places = memory.places[chunk / (kBatch / kDepth) % 2] + chunk % (kBatch / kDepth) * kDepth +
                          threadIdx.x % 4 * 4;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * blockDim.x;
      if (unit >= p.down * kAcross * 4) break;
      const int out = out0 + unit / 4;
      const T* from = p.grad.data.narrow + static_cast<int64_t>(out) * p.grad.channel;
      const bool there = out < p.shape.out;
      if (p.vector) {
        alignas(4 * sizeof(T)) T four[4];
        if (there && places[0].grad >= 0) {
          using Word = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
          *reinterpret_cast<Word*>(four) = *reinterpret_cast<const Word*>(from + places[0].grad);
#pragma unroll
          for (int i = 0; i < 4; ++i) grads[u][i] = widen(four[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) grads[u][i] = 0.0f;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) grads[u][i] = there && places[i].grad >= 0 ? widen(from[places[i].grad]) : 0.0f;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * blockDim.x;
      if (unit >= p.wide * kAcross * 4) break;
      const auto from = operand<kMixed>(p.x.data) + offset[u];
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[u][i] = places[i].taps >> tap[u] & 1 ? value_at(from, places[i].x) : 0.0f;
    }
  }

  // Stores to shared memory; of_bias: sums of the thread's outputs.
  __device__ void stage(const float (&grads)[kUnits][4], const float (&columns)[kUnits][4],
                        float (&of_bias)[kUnits]) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * blockDim.x;
      if (unit >= p.down * kAcross * 4) break;
      put(memory.grads, unit_place(unit / 4, unit % 4), grads[u]);
      of_bias[u] += (grads[u][0] + grads[u][1]) + (grads[u][2] + grads[u][3]);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * blockDim.x;
      if (unit >= p.wide * kAcross * 4) break;
      put(memory.columns, unit_place(unit / 4, unit % 4), columns[u]);
    }
  }
  template <int kCount>
  __device__ void put(Unit (&to)[kParts][kCount], int place, const float (&v)[4]) const {
    Unit unit[kParts];
    Four<T>::split(v, p.precise, unit);
#pragma unroll
    for (int part = 0; part < kParts; ++part) to[part][place] = unit[part];
  }

  template <bool kPrecise>
  __device__ void multiply(int own_out, int own_column, float (&sums)[2][kColumnTiles][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    Unit a[2][2][kParts];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        a[m][0][part] = memory.grads[part][unit_place(own_out + m * 16 + g, t)];
        a[m][1][part] = memory.grads[part][unit_place(own_out + m * 16 + g + 8, t)];
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      Unit b[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        b[part] = memory.columns[part][unit_place(own_column + dealt_column(g, n), t)];
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_into<T, kPrecise>(a[m], b, sums[m][n]);
    }
  }
};

// Blocks: (outputs x columns) x splits of the pixels x samples.
template <typename T, bool kMixed>
__global__ void __launch_bounds__(kWarp * kMaxDown * kMaxWide, 1) weight_kernel(const __grid_constant__ Problem<T> p) {
  FASTMOD_DYNAMIC_SHARED(bytes);
  auto& memory = *reinterpret_cast<Memory<T>*>(bytes);
  const int64_t out_blocks = (p.shape.out + p.down * kAcross - 1) / (p.down * kAcross);
  const int64_t outer = quotient(blockIdx.x, p.column_blocks), group = quotient(outer, out_blocks);
  const int64_t sample = quotient(group, p.splits), split = group - sample * p.splits;
  const int out0 = static_cast<int>(outer - group * out_blocks) * p.down * kAcross;
  const int column0 = static_cast<int>(blockIdx.x - outer * p.column_blocks) * p.wide * kAcross;
  if (threadIdx.x < 2) memory.axis[threadIdx.x].read_by_forward(p.shape, threadIdx.x);
  const int64_t pixels = p.shape.images * p.shape.out_high * p.shape.out_wide, pixel0 = split * p.pixels_each;
  const int64_t end = pixel0 + p.pixels_each < pixels ? pixel0 + p.pixels_each : pixels;
  Block<T, kMixed> own{p, memory, sample, pixel0, end, out0, column0, {}, {}};
  own.find_columns();
  __syncthreads();
  own.find_places(0);
  __syncthreads();

  const int warp = threadIdx.x / kWarp, own_out = warp / p.wide * kAcross, own_column = warp % p.wide * kAcross;
  float sums[2][kColumnTiles][4] = {}, of_bias[kUnits] = {};
  float grads[kUnits][4], columns[kUnits][4];
  const int64_t chunks = (end - pixel0 + kDepth - 1) / kDepth;
  own.load(0, grads, columns);
#pragma unroll 1
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    own.stage(grads, columns, of_bias);
    if (chunk % (kBatch / kDepth) == 0) own.find_places(chunk / (kBatch / kDepth) + 1);
    __syncthreads();
    if (chunk + 1 < chunks) own.load(chunk + 1, grads, columns);
    if (p.precise) {
      own.template multiply<true>(own_out, own_column, sums);
    } else {
      own.template multiply<false>(own_out, own_column, sums);
    }
    __syncthreads();
  }

  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, all = own.columns();
  const int first = column0 + own_column + 8 * t;  // the lane's eight columns
  const bool vector = all % 4 == 0;
  const int64_t row0 = (sample * p.splits + split) * p.shape.out;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int out = out0 + own_out + m * 16 + half * 8 + g;
      if (out >= p.shape.out) continue;
      float* to = p.partials + (row0 + out) * all + first;
      const auto value = [&](int i) { return sums[m][i / 2][2 * half + i % 2]; };
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        if (vector) {
          if (first + i < all)
            *reinterpret_cast<float4*>(to + i) = {value(i), value(i + 1), value(i + 2), value(i + 3)};
        } else {
#pragma unroll
          for (int j = i; j < i + 4; ++j) {
            if (first + j < all) to[j] = value(j);
          }
        }
      }
    }
  }
  if (column0 > 0) return;
  float* biases = p.partials + p.samples * p.splits * p.shape.out * all + row0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = threadIdx.x + u * blockDim.x;
    if (unit >= p.down * kAcross * 4) break;  // all lanes of a warp or none
    float total = of_bias[u] + __shfl_xor_sync(kAllLanes, of_bias[u], 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (t == 0 && out0 + unit / 4 < p.shape.out) biases[out0 + unit / 4] = total;
  }
}

// ---- the sums

constexpr int kFinishRows = 4;  // threads with the same weights: each takes a part of the samples

// Weights with their logits, or biases.
template <typename T>
struct Masked {
  const float* partials;  // [samples, splits, count]
  Mixed<const T> value, logits;
  Mixed<T> of_value, of_logits;
  int64_t count;
  uint32_t stream;
};

template <typename T>
__global__ void __launch_bounds__(kWarp* kFinishRows)
    finish_kernel(const Masked<T> weight, const Masked<T> bias, int64_t weight_blocks, int64_t splits, float tau,
                  const __grid_constant__ MaskNoise noise) {
  FASTMOD_SHARED(float, sums, kFinishRows * kWarp * 2 * kQuad);
  const bool of_bias = blockIdx.x >= weight_blocks;
  const Masked<T> own = of_bias ? bias : weight;
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  const int64_t first = ((blockIdx.x - (of_bias ? weight_blocks : 0)) * kWarp + lane) * kQuad;
  const int64_t more = own.count - first;
  const int left = more <= 0 ? 0 : more < kQuad ? static_cast<int>(more) : kQuad;
  const MaskKeys keys(seed_of(noise), own.stream);
  const bool quads = own.count % kQuad == 0;
  float logit[kQuad], decay[kQuad];
  int32_t off[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    logit[i] = given(own.logits) && i < left ? value_at(own.logits, first + i) : 0.0f;
    off[i] = given(own.logits) ? words_off(logit[i]) : 0;
    decay[i] = exponential(-fabsf(logit[i]));
  }
  float of_value[kQuad] = {}, of_logits[kQuad] = {};
#pragma unroll 1
  for (int64_t sample = row; sample < noise.samples; sample += kFinishRows) {
    float total[kQuad] = {};
    const float* part = own.partials + sample * splits * own.count + first;
#pragma unroll 4
    for (int64_t split = 0; split < splits; ++split) {
      if (quads && left > 0) {
        const float4 four = *reinterpret_cast<const float4*>(part);
        total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
      } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          if (i < left) total[i] += part[i];
        }
      }
      part += own.count;
    }
    const uint64_t index = static_cast<uint64_t>((noise.first + sample) * own.count + first);
    const PhiloxWords words = quads ? keys.any(index / kQuad) : words_from(keys, index);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float u = uniform_from_word<float>(words.word[i]);
      of_value[i] += total[i] * (static_cast<int32_t>(words.word[i] >> 9) >= off[i] ? 1.0f : 0.0f);
      if (given(own.of_logits)) of_logits[i] += total[i] * mask_slope(u, logit[i], decay[i], tau);
    }
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    sums[(row * 2 * kQuad + i) * kWarp + lane] = of_value[i];
    sums[(row * 2 * kQuad + kQuad + i) * kWarp + lane] = of_logits[i];
  }
  __syncthreads();
  if (row > 0) return;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (i >= left) break;
    float value = 0.0f, slope = 0.0f;
#pragma unroll
    for (int other = 0; other < kFinishRows; ++other) {
      value += sums[(other * 2 * kQuad + i) * kWarp + lane];
      slope += sums[(other * 2 * kQuad + kQuad + i) * kWarp + lane];
    }
    if (given(own.of_value)) put_at(logit[i] == logit[i] ? value : NAN, own.of_value, first + i);
    if (given(own.of_logits)) put_at(slope * value_at(own.value, first + i), own.of_logits, first + i);
  }
}

// How the product is distributed over blocks.
struct Plan {
  int down, wide, column_blocks;
  int64_t out_blocks, splits, pixels_each;
  Plan(const MaskedConvShape& shape, int64_t samples) {
    const int columns = shape.in * shape.taps(), warps = (columns + kAcross - 1) / kAcross;
    down = shape.out <= kAcross ? 1 : kMaxDown;
    column_blocks = (warps + kMaxWide - 1) / kMaxWide;
    wide = (warps + column_blocks - 1) / column_blocks;
    out_blocks = (shape.out + down * kAcross - 1) / (down * kAcross);
    const int64_t pixels = shape.images * shape.out_high * shape.out_wide, tiles = out_blocks * column_blocks * samples;
    const int64_t wanted = (kEnoughBlocks + tiles - 1) / tiles, most = (pixels + 4 * kBatch - 1) / (4 * kBatch);
    splits = wanted < most ? wanted : most;
    pixels_each = ((pixels + splits - 1) / splits + kBatch - 1) / kBatch * kBatch;
    splits = (pixels + pixels_each - 1) / pixels_each;
  }
};

}  // namespace

int64_t masked_conv2d_partials(MaskedConvShape shape, int64_t samples) {
  const int64_t columns = static_cast<int64_t>(shape.in) * shape.taps();
  return Plan(shape, samples).splits * samples * shape.out * (columns + 1);
}

template <typename T>
cudaError_t masked_conv2d_backward_weight(Images<const T> grad, Images<const T> x, float* partials, bool allow_tf32,
                                          MaskedConvShape shape, int64_t samples, cudaStream_t stream) {
  const Plan plan(shape, samples);
  const bool vector = grad.column == 1 && grad.row == shape.out_wide && shape.out_high * shape.out_wide % 4 == 0 &&
                      grad.channel % 4 == 0 && grad.image % 4 == 0 &&
                      aligned_to(grad.data, 4 * sizeof(T));
  const Problem<T> p{grad, x, partials, shape, samples, plan.splits, plan.pixels_each, plan.down, plan.wide,
                     plan.column_blocks, vector, !allow_tf32};
  const auto run = [&](auto some) {
    const auto kernel = weight_kernel<T, decltype(some)::value>;
    return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(plan.column_blocks * plan.out_blocks * plan.splits * samples, 1),
                                  kWarp * plan.down * plan.wide, sizeof(Memory<T>), stream, p);
  };
  return with_mixed<T>(run, x.data);
}

template <typename T>
cudaError_t masked_conv2d_finish(const float* partials, MaskedFilters<T> filters, MaskedFilterGrads<T> grads,
                                 float tau, MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream,
                                 cudaStream_t stream) {
  const int64_t splits = Plan(shape, noise.samples).splits;
  const int64_t weights = static_cast<int64_t>(shape.out) * shape.in * shape.taps();
  const Masked<T> weight{partials, filters.weight, filters.logits, grads.weight, grads.logits, weights, noise.stream};
  const Masked<T> bias{partials + splits * noise.samples * weights, filters.bias, filters.bias_logits, grads.bias,
                       grads.bias_logits, shape.out, bias_stream};
  const auto blocks = [](const Masked<T>& masked) {
    const bool wanted = given(masked.of_value) || given(masked.of_logits);
    return wanted ? (masked.count + kWarp * kQuad - 1) / (kWarp * kQuad) : 0;
  };
  const int64_t weight_blocks = blocks(weight);
  if (weight_blocks + blocks(bias) == 0) return cudaSuccess;
  const auto kernel = finish_kernel<T>;
  return FASTMOD_LAUNCH(kernel, blocks_for(weight_blocks + blocks(bias), 1), kWarp * kFinishRows, stream, weight, bias,
                        weight_blocks, splits, tau, noise);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template cudaError_t masked_conv2d_backward_weight<T>(Images<const T>, Images<const T>, float*, bool,                \
                                                        MaskedConvShape, int64_t, cudaStream_t);                       \
  template cudaError_t masked_conv2d_finish<T>(const float*, MaskedFilters<T>, MaskedFilterGrads<T>, float,            \
                                               MaskedConvShape, MaskNoise, uint32_t, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
