// Gradients of weight and logits of masked_linear on tensor cores. For every sample the product of its rows, grad^T x,
// is multiplied by the mask, or by the slope of the relaxed mask, and added to what the samples before gave.
//
// A warp has 16 outputs and 32 inputs. Rows come into shared memory 16 at a time, those of one output or input side by
// side, fp32 as two tf32 numbers. Inputs are dealt to columns so that what a lane gets of two tiles are four
// neighbours, which one Philox call serves. Logits are read once for all samples, and each mask is drawn once.
#include "masked_linear.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kDepth = 16;      // rows of a chunk
constexpr int kOutputs = 16;    // of a warp
constexpr int kInputTiles = 4;  // of 8 inputs, of a warp
constexpr int kInputs = 8 * kInputTiles;
constexpr int kQuads = 4;       // of a lane
constexpr int kMaxThreads = 256;
constexpr int64_t kEnoughBlocks = 200;

template <typename T>
struct Problem {
  const T *grad, *x, *weight, *logits;
  T *grad_weight, *grad_logits;
  float tau;
  bool precise;
  LinearShape shape;
  MaskNoise noise;
  int down, across;  // warps of a block
};

// Where the four rows `quarter` of a column lie in shared memory: neither writing nor reading hits a bank twice.
__device__ inline int place_of(int column, int quarter) { return column * 4 + (quarter ^ (column >> 1 & 3)); }

// 16 rows of `columns` columns from (row, column0) on, zeros beyond the edges.
template <typename T>
__device__ void stage(const T* matrix, typename Four<T>::Unit* to, int64_t row, int64_t rows, int64_t column0,
                      int64_t width, int columns, bool precise) {
  using Unit = typename Four<T>::Unit;
#pragma unroll 2
  for (int i = threadIdx.x; i < columns * 4; i += blockDim.x) {
    const int quarter = i / columns, column = i - quarter * columns;
    const int64_t first = row + 4 * quarter, left = column0 + column < width ? rows - first : 0;
    const T* from = matrix + first * width + column0 + column;
    float v[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) v[r] = r < left ? widen(from[r * width]) : 0.0f;
    Unit unit[Four<T>::kParts];
    Four<T>::split(v, precise, unit);
#pragma unroll
    for (int part = 0; part < Four<T>::kParts; ++part) to[part * columns * 4 + place_of(column, quarter)] = unit[part];
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) weight_kernel(const __grid_constant__ Problem<T> p) {
  using Unit = typename Four<T>::Unit;
  constexpr int kParts = Four<T>::kParts;
  FASTMOD_DYNAMIC_SHARED(memory);
  const int outputs = p.down * kOutputs, inputs = p.across * kInputs;  // of the block
  Unit* grads = reinterpret_cast<Unit*>(memory);
  Unit* rows = grads + kParts * outputs * 4;
  const int64_t blocks = (p.shape.in + inputs - 1) / inputs, down = quotient(blockIdx.x, blocks);
  const int64_t out0 = down * outputs, in0 = (blockIdx.x - down * blocks) * inputs;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
  const int own_out = warp / p.across * kOutputs, own_in = warp % p.across * kInputs;
  const PhiloxKeys keys(seed_of(p.noise));
  const bool quads = p.shape.in % kQuad == 0, at_one = p.tau == 1.0f;
  // Quad q: output g or g + 8, inputs 4 t .. 4 t + 3 of the first or second 16.
  const auto out_of = [&](int q) { return out0 + own_out + g + q % 2 * 8; };
  const auto in_of = [&](int q) { return in0 + own_in + q / 2 * 16 + 4 * t; };
  const auto inside = [&](int q, int i) { return out_of(q) < p.shape.out && in_of(q) + i < p.shape.in; };

  int32_t off[kQuads][kQuad];
  float slope_of[kQuads][kQuad];  // at tau = 1 exp(-|logit|), negative for negative logits; else the logit
  float of_weight[kQuads][kQuad] = {}, of_logits[kQuads][kQuad] = {};
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float logit = inside(q, i) ? widen(p.logits[out_of(q) * p.shape.in + in_of(q) + i]) : 0.0f;
      if (p.grad_weight) off[q][i] = words_off(logit);
      const float decay = exponential(-fabsf(logit));
      slope_of[q][i] = !at_one ? logit : logit < 0.0f ? -decay : decay;
    }
  }
#pragma unroll 1
  for (int64_t sample = 0; sample < p.noise.samples; ++sample) {
    float product[kInputTiles][4] = {};
#pragma unroll 1
    for (int64_t row = 0; row < p.shape.rows; row += kDepth) {
      __syncthreads();  // the chunk before has been read
      stage(p.grad + sample * p.shape.rows * p.shape.out, grads, row, p.shape.rows, out0, p.shape.out, outputs,
            p.precise);
      stage(p.x + sample * p.shape.rows * p.shape.in, rows, row, p.shape.rows, in0, p.shape.in, inputs, p.precise);
      __syncthreads();
      Unit a[2][kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        a[0][part] = grads[part * outputs * 4 + place_of(own_out + g, t)];
        a[1][part] = grads[part * outputs * 4 + place_of(own_out + g + 8, t)];
      }
#pragma unroll
      for (int j = 0; j < kInputTiles; ++j) {
        const int input = j / 2 * 16 + g / 2 * 4 + j % 2 * 2 + g % 2;
        Unit b[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) b[part] = rows[part * inputs * 4 + place_of(own_in + input, t)];
        float found[4];
        if (p.precise) {
          Four<T>::template multiply<true>(a, b, found);
        } else {
          Four<T>::template multiply<false>(a, b, found);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) product[j][e] += found[e];
      }
    }
    const uint64_t first = first_word(p.shape, p.noise, sample);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const uint64_t index = first + static_cast<uint64_t>(out_of(q) * p.shape.in + in_of(q));
      const PhiloxWords words = quad_words(keys, index, p.noise.stream, quads);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const float value = product[q / 2 * 2 + i / 2][q % 2 * 2 + i % 2];
        if (p.grad_weight) {
          of_weight[q][i] += value * (static_cast<int32_t>(words.word[i] >> 9) >= off[q][i] ? 1.0f : 0.0f);
        }
        if (p.grad_logits) {
          const float u = uniform_from_word<float>(words.word[i]), held = slope_of[q][i];
          of_logits[q][i] += value * (at_one ? slope_at_one(u, held < 0.0f, fabsf(held)) : slope_at(u, held, p.tau));
        }
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (!inside(q, i)) continue;
      const int64_t at = out_of(q) * p.shape.in + in_of(q) + i;
      if (p.grad_weight) {
        const bool drawn = p.noise.samples == 0 || slope_of[q][i] == slope_of[q][i];  // where the logit is no NaN
        narrow(drawn ? of_weight[q][i] : NAN, p.grad_weight + at);
      }
      if (p.grad_logits) narrow(of_logits[q][i] * widen(p.weight[at]), p.grad_logits + at);
    }
  }
}

}  // namespace

template <typename T>
cudaError_t masked_linear_backward_weight(const T* grad, const T* x, const T* weight, const T* logits, T* grad_weight,
                                          T* grad_logits, Compute<T> tau, bool allow_tf32, LinearShape shape,
                                          MaskNoise noise, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::backward_weight(grad, x, weight, logits, grad_weight, grad_logits, tau, shape, noise, stream);
  } else {
    if (shape.out * shape.in == 0) return cudaSuccess;
    Problem<T> p{grad, x, weight, logits, grad_weight, grad_logits, tau, !allow_tf32, shape, noise, 4, 2};
    const auto blocks = [&] {
      const int64_t outputs = p.down * kOutputs, inputs = p.across * kInputs;
      return ((shape.out + outputs - 1) / outputs) * ((shape.in + inputs - 1) / inputs);
    };
    if (blocks() < kEnoughBlocks) p.down = 2, p.across = 1;
    const int columns = p.down * kOutputs + p.across * kInputs;
    const size_t bytes = Four<T>::kParts * sizeof(typename Four<T>::Unit) * static_cast<size_t>(columns) * 4;
    const auto kernel = weight_kernel<T>;
    return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(blocks(), 1), p.down * p.across * kWarp, bytes, stream, p);
  }
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template cudaError_t masked_linear_backward_weight<T>(const T*, const T*, const T*, const T*, T*, T*, Compute<T>,  \
                                                        bool, LinearShape, MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
