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
  int log_down, log_across;  // logs of the warps of a block
};

// Where the four rows `quarter` of a column lie in shared memory: neither writing nor reading hits a bank twice.
__device__ inline int place_of(int column, int quarter) { return column * 4 + (quarter ^ (column >> 1 & 3)); }

// Up to 16 rows of 2^log_columns columns from `matrix` on, zeros beyond the `rows` and `inside` columns that are left.
template <typename T>
__device__ void stage(const T* matrix, typename Four<T>::Unit* to, int rows, int inside, int64_t width, int log_columns,
                      bool precise) {
  using Unit = typename Four<T>::Unit;
#pragma unroll 1
  for (int i = threadIdx.x; i < 4 << log_columns; i += blockDim.x) {
    const int quarter = i >> log_columns, column = i & ((1 << log_columns) - 1);
    const int left = column < inside ? rows - 4 * quarter : 0;
    const T* from = matrix + 4 * quarter * width + column;
    float v[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      v[r] = r < left ? widen(*from) : 0.0f;
      from += width;
    }
    Unit unit[Four<T>::kParts];
    Four<T>::split(v, precise, unit);
    Unit* place = to + place_of(column, quarter);
#pragma unroll
    for (int part = 0; part < Four<T>::kParts; ++part) place[(part * 4) << log_columns] = unit[part];
  }
}

__device__ inline int at_most(int64_t left, int most) { return left < most ? static_cast<int>(left) : most; }

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) weight_kernel(const __grid_constant__ Problem<T> p) {
  using Unit = typename Four<T>::Unit;
  constexpr int kParts = Four<T>::kParts;
  FASTMOD_DYNAMIC_SHARED(memory);
  const int log_outputs = p.log_down + 4, log_inputs = p.log_across + 5;  // of the block
  Unit* grads = reinterpret_cast<Unit*>(memory);
  Unit* rows = grads + ((kParts * 4) << log_outputs);
  const int64_t blocks = (p.shape.in + (1 << log_inputs) - 1) >> log_inputs, down = quotient(blockIdx.x, blocks);
  const int64_t out0 = down << log_outputs, in0 = (blockIdx.x - down * blocks) << log_inputs;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
  const int own_out = (warp >> p.log_across) * kOutputs, own_in = (warp & ((1 << p.log_across) - 1)) * kInputs;
  const PhiloxKeys keys(seed_of(p.noise));
  const bool quads = p.shape.in % kQuad == 0, at_one = p.tau == 1.0f;
  // Quad q: output g or g + 8, inputs 4 t .. 4 t + 3 of the first or second 16.
  const int64_t first_out = out0 + own_out + g, first_in = in0 + own_in + 4 * t;
  const int64_t first_at = first_out * p.shape.in + first_in;
  const auto at_of = [&](int q) { return first_at + (q % 2 ? 8 * p.shape.in : 0) + q / 2 * 16; };
  const auto left_of = [&](int q) {  // weights of the quad that are there
    return first_out + q % 2 * 8 < p.shape.out ? at_most(p.shape.in - first_in - q / 2 * 16, kQuad) : 0;
  };

  const int left_grads = held(place_of(own_out + g, t)), left_below = held(place_of(own_out + g + 8, t));
  int right_rows[kInputTiles];
#pragma unroll
  for (int j = 0; j < kInputTiles; ++j) {
    right_rows[j] = held(place_of(own_in + j / 2 * 16 + g / 2 * 4 + j % 2 * 2 + g % 2, t));
  }

  int32_t off[kQuads][kQuad];
  float slope_of[kQuads][kQuad];  // at tau = 1 exp(-|logit|), negative for negative logits; else the logit
  float of_weight[kQuads][kQuad] = {}, of_logits[kQuads][kQuad] = {};
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const T* from = p.logits + at_of(q);
    const int left = left_of(q);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) slope_of[q][i] = i < left ? widen(from[i]) : 0.0f;
    if (p.grad_weight) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) off[q][i] = words_off(slope_of[q][i]);
    }
    if (at_one) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const float decay = exponential(-fabsf(slope_of[q][i]));
        slope_of[q][i] = slope_of[q][i] < 0.0f ? -decay : decay;
      }
    }
  }
#pragma unroll 1
  for (int64_t sample = 0; sample < p.noise.samples; ++sample) {
    float product[kInputTiles][4] = {};
    const T* grad = p.grad + sample * p.shape.rows * p.shape.out + out0;
    const T* x = p.x + sample * p.shape.rows * p.shape.in + in0;
#pragma unroll 1
    for (int64_t row = 0; row < p.shape.rows; row += kDepth) {
      __syncthreads();  // the chunk before has been read
      const int left = at_most(p.shape.rows - row, kDepth);
      stage(grad, grads, left, at_most(p.shape.out - out0, 1 << log_outputs), p.shape.out, log_outputs, p.precise);
      stage(x, rows, left, at_most(p.shape.in - in0, 1 << log_inputs), p.shape.in, log_inputs, p.precise);
      grad += kDepth * p.shape.out;
      x += kDepth * p.shape.in;
      __syncthreads();
      const auto multiply = [&](auto precise) {
        Unit a[2][kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          a[0][part] = grads[((part * 4) << log_outputs) + left_grads];
          a[1][part] = grads[((part * 4) << log_outputs) + left_below];
        }
#pragma unroll
        for (int j = 0; j < kInputTiles; ++j) {
          Unit b[kParts];
#pragma unroll
          for (int part = 0; part < kParts; ++part) b[part] = rows[((part * 4) << log_inputs) + right_rows[j]];
          float found[4];
          Four<T>::template multiply<decltype(precise)::value>(a, b, found);
#pragma unroll
          for (int e = 0; e < 4; ++e) product[j][e] += found[e];
        }
      };
      if (p.precise) {
        multiply(std::true_type{});
      } else {
        multiply(std::false_type{});
      }
    }
    const uint64_t first = first_word(p.shape, p.noise, sample);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const uint64_t index = first + static_cast<uint64_t>(at_of(q));
      const PhiloxWords words = quad_words(keys, index, p.noise.stream, quads);
      const auto value = [&](int i) { return product[q / 2 * 2 + i / 2][q % 2 * 2 + i % 2]; };
      if (p.grad_weight) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          of_weight[q][i] += value(i) * (static_cast<int32_t>(words.word[i] >> 9) >= off[q][i] ? 1.0f : 0.0f);
        }
      }
      if (p.grad_logits && at_one) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const float u = uniform_from_word<float>(words.word[i]), held = slope_of[q][i];
          of_logits[q][i] += value(i) * slope_at_one(u, held < 0.0f, fabsf(held));
        }
      } else if (p.grad_logits) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          of_logits[q][i] += value(i) * slope_at(uniform_from_word<float>(words.word[i]), slope_of[q][i], p.tau);
        }
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t at = at_of(q);
    const int left = left_of(q);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i >= left) break;
      if (p.grad_weight) {
        const bool drawn = p.noise.samples == 0 || slope_of[q][i] == slope_of[q][i];  // where the logit is no NaN
        narrow(drawn ? of_weight[q][i] : NAN, p.grad_weight + at + i);
      }
      if (p.grad_logits) narrow(of_logits[q][i] * widen(p.weight[at + i]), p.grad_logits + at + i);
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
    Problem<T> p{grad, x, weight, logits, grad_weight, grad_logits, tau, !allow_tf32, shape, noise, 2, 1};
    const auto blocks = [&] {
      const int64_t outputs = kOutputs << p.log_down, inputs = kInputs << p.log_across;
      return ((shape.out + outputs - 1) / outputs) * ((shape.in + inputs - 1) / inputs);
    };
    if (blocks() < kEnoughBlocks) p.log_down = 1, p.log_across = 0;
    const int columns = (kOutputs << p.log_down) + (kInputs << p.log_across);
    const size_t bytes = Four<T>::kParts * sizeof(typename Four<T>::Unit) * static_cast<size_t>(columns) * 4;
    const int threads = kWarp << (p.log_down + p.log_across);
    const auto kernel = weight_kernel<T>;
    return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(blocks(), 1), threads, bytes, stream, p);
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
