// The three matrix products of a linear layer under sampled masks. Weights are masked on their way into shared memory,
// so that no masked copy of them exists. A block holds all rows of a sample: every mask is drawn once a product.
//
// Sums are taken in chunks of kDepth, which rounds less than one long sum.
#include "masks.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kSide = 16;  // threads of a block stand in a square
constexpr int kThreads = kSide * kSide;
constexpr int kTile = 64;   // outputs or inputs of a block
constexpr int kDepth = 32;  // of a chunk
constexpr int kEach = kTile / kSide;
constexpr int kHalf = kMaskedRows / 2;  // rows come in halves, of which few rows need one
constexpr int kRowsEach = kMaskedRows / kSide;
static_assert(kMaskedRows == 2 * kHalf && kHalf % kSide == 0, "halves are whole for every thread");

constexpr int32_t kNotAThreshold = -1;  // the logit is NaN, and so is the masked weight

template <typename T>
__global__ void __launch_bounds__(kThreads) thresholds_kernel(const T* logits, int32_t* off, int64_t count) {
  const int64_t at = global_thread();
  if (at >= count) return;
  const float logit = to_float(widen(logits[at]));
  off[at] = logit == logit ? words_off(logit) : kNotAThreshold;
}

// value where the mask keeps it, else 0, by a product: 0 * inf is NaN here as in torch. NaN where there is no mask.
template <typename C>
__device__ C kept(uint32_t word, int32_t off, C value) {
  if (off == kNotAThreshold) return C(NAN);
  return value * (static_cast<int32_t>(word >> 9) >= off ? C(1) : C(0));
}

// Noise words of the weights (row, column) .. (row, column + 3), column a multiple of 4. One call serves four if rows
// begin at multiples of 4 as well.
__device__ PhiloxWords quad_words(int64_t seed, const LinearShape& shape, const MaskNoise& noise, int64_t sample,
                                  int64_t row, int64_t column) {
  const uint64_t index = (static_cast<uint64_t>(sample) * static_cast<uint64_t>(shape.out) +
                          static_cast<uint64_t>(row)) * static_cast<uint64_t>(shape.in) + static_cast<uint64_t>(column);
  if (shape.in % kQuad == 0) return philox_group(seed, index / kQuad, noise.stream);
  PhiloxWords words;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) words.word[i] = noise_word(seed, index + i, noise.stream);
  return words;
}

// A piece [kHeight, kWide] of the masked weight from (row0, column0) on, into shared memory; zero beyond the edges.
template <int kHeight, int kWide, int kPitch, typename T>
__device__ void stage_masked(const T* weight, const int32_t* off, Compute<T>* staged, int64_t row0, int64_t column0,
                             int64_t seed, const LinearShape& shape, const MaskNoise& noise, int64_t sample) {
  using C = Compute<T>;
  constexpr int kQuads = kWide / kQuad;
  static_assert(kHeight * kQuads % kThreads == 0, "every thread has as many quads");
#pragma unroll
  for (int e = threadIdx.x; e < kHeight * kQuads; e += kThreads) {
    const int local_row = e / kQuads, local_column = e % kQuads * kQuad;
    const int64_t row = row0 + local_row, column = column0 + local_column;
    C* to = staged + local_row * kPitch + local_column;
    if (row >= shape.out || column >= shape.in) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) to[i] = C(0);
      continue;
    }
    const PhiloxWords words = quad_words(seed, shape, noise, sample, row, column);
    const int64_t at = row * shape.in + column;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const bool inside = column + i < shape.in;
      to[i] = inside ? kept(words.word[i], off[at + i], widen(weight[at + i])) : C(0);
    }
  }
}

// A piece [kHeight, kWide] of a matrix of `rows` rows of `width` numbers, from (row0, column0) on; zero beyond the edges.
template <int kHeight, int kWide, int kPitch, typename T>
__device__ void stage(const T* matrix, Compute<T>* staged, int64_t row0, int64_t column0, int64_t rows, int64_t width) {
  for (int e = threadIdx.x; e < kHeight * kWide; e += kThreads) {
    const int64_t row = row0 + e / kWide, column = column0 + e % kWide;
    staged[e / kWide * kPitch + e % kWide] =
        row < rows && column < width ? widen(matrix[row * width + column]) : Compute<T>(0);
  }
}

// What a thread sums up: rows row() of a sample, columns column() of the block's tile.
template <typename C>
struct Sums {
  C total[kRowsEach][kEach] = {};

  static __device__ int row(int i) { return static_cast<int>(threadIdx.x) / kSide + kSide * i; }
  static __device__ int column(int j) { return static_cast<int>(threadIdx.x) % kSide + kSide * j; }

  // Adds a chunk: left(row, k) * right(k, column). Rows beyond the first half only where there are any.
  template <typename Left, typename Right>
  __device__ void add(int64_t rows, Left left, Right right) {
    add_half<0>(left, right);
    if (rows > kHalf) add_half<kRowsEach / 2>(left, right);
  }

  template <int kFirst, typename Left, typename Right>
  __device__ void add_half(Left left, Right right) {
    C part[kRowsEach / 2][kEach] = {};
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      C b[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) b[j] = right(k, column(j));
#pragma unroll
      for (int i = 0; i < kRowsEach / 2; ++i) {
        const C a = left(row(kFirst + i), k);
#pragma unroll
        for (int j = 0; j < kEach; ++j) part[i][j] += a * b[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsEach / 2; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) total[kFirst + i][j] += part[i][j];
    }
  }

  // Into columns column0 .. of rows of `width` numbers; `offsets`, if any, has one number a column.
  template <typename T>
  __device__ void store(T* matrix, const T* offsets, int64_t column0, int64_t rows, int64_t width) const {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t at = column0 + column(j);
        if (row(i) >= rows || at >= width) continue;
        narrow(offsets ? total[i][j] + widen(offsets[at]) : total[i][j], matrix + row(i) * width + at);
      }
    }
  }
};

__device__ int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

// A block: kTile outputs of all rows of one sample.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const T* x, const T* weight, const int32_t* off, const T* biases, T* result, LinearShape shape,
                   MaskNoise noise) {
  using C = Compute<T>;
  constexpr int kPitch = kDepth + 1;  // keeps the columns of a chunk off one bank
  FASTMOD_SHARED(C, rows, kMaskedRows * kPitch);
  FASTMOD_SHARED(C, masked, kTile * kPitch);
  const int64_t sample = blockIdx.x / tiles_of(shape.out), first = blockIdx.x % tiles_of(shape.out) * kTile;
  const int64_t seed = seed_of(noise);
  const T* own = x + sample * shape.rows * shape.in;
  Sums<C> sums;
  for (int64_t k0 = 0; k0 < shape.in; k0 += kDepth) {
    __syncthreads();  // the previous chunk has been read
    stage<kMaskedRows, kDepth, kPitch>(own, rows, 0, k0, shape.rows, shape.in);
    stage_masked<kTile, kDepth, kPitch>(weight, off, masked, first, k0, seed, shape, noise, sample);
    __syncthreads();
    sums.add(
        shape.rows, [&](int row, int k) { return rows[row * kPitch + k]; },
        [&](int k, int column) { return masked[column * kPitch + k]; });
  }
  sums.store(result + sample * shape.rows * shape.out, biases ? biases + sample * shape.out : nullptr, first,
             shape.rows, shape.out);
}

// A block: kTile inputs of all rows of one sample.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const T* grad, const T* weight, const int32_t* off, T* grad_x, LinearShape shape,
                      MaskNoise noise) {
  using C = Compute<T>;
  constexpr int kPitch = kDepth + 1, kWidePitch = kTile + 1;
  FASTMOD_SHARED(C, grads, kMaskedRows * kPitch);
  FASTMOD_SHARED(C, masked, kDepth * kWidePitch);
  const int64_t sample = blockIdx.x / tiles_of(shape.in), first = blockIdx.x % tiles_of(shape.in) * kTile;
  const int64_t seed = seed_of(noise);
  const T* own = grad + sample * shape.rows * shape.out;
  Sums<C> sums;
  for (int64_t k0 = 0; k0 < shape.out; k0 += kDepth) {
    __syncthreads();
    stage<kMaskedRows, kDepth, kPitch>(own, grads, 0, k0, shape.rows, shape.out);
    stage_masked<kDepth, kTile, kWidePitch>(weight, off, masked, k0, first, seed, shape, noise, sample);
    __syncthreads();
    sums.add(
        shape.rows, [&](int row, int k) { return grads[row * kPitch + k]; },
        [&](int k, int column) { return masked[k * kWidePitch + column]; });
  }
  sums.store(grad_x + sample * shape.rows * shape.in, static_cast<const T*>(nullptr), first, shape.rows, shape.in);
}

// A block: a tile [kDepth, kTile] of the weight. A thread has kOwnRows quads of neighbouring weights in it.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(const T* grad, const T* x, const T* weight, const T* logits, const int32_t* off,
                           T* grad_weight, T* grad_logits, Compute<T> tau, LinearShape shape, MaskNoise noise) {
  using C = Compute<T>;
  constexpr int kOwnRows = kDepth / kSide, kPitch = kDepth + 1;
  static_assert(kTile == kSide * kQuad, "a quad a thread");
  FASTMOD_SHARED(C, grads, kHalf * kPitch);  // [row][output]
  FASTMOD_SHARED(C, inputs, kHalf * kTile);  // [row][input]
  const int64_t across = tiles_of(shape.in);
  const int64_t row0 = blockIdx.x / across * kDepth, column0 = blockIdx.x % across * kTile;
  const int local_row = static_cast<int>(threadIdx.x) / kSide, local_column = threadIdx.x % kSide * kQuad;
  const int64_t column = column0 + local_column;
  const int64_t seed = seed_of(noise);
  C of_logits[kOwnRows][kQuad] = {}, of_weight[kOwnRows][kQuad] = {};
  for (int64_t sample = 0; sample < noise.samples; ++sample) {
    C product[kOwnRows][kQuad] = {};
    for (int64_t r0 = 0; r0 < shape.rows; r0 += kHalf) {
      __syncthreads();
      stage<kHalf, kDepth, kPitch>(grad + sample * shape.rows * shape.out, grads, r0, row0, shape.rows, shape.out);
      stage<kHalf, kTile, kTile>(x + sample * shape.rows * shape.in, inputs, r0, column0, shape.rows, shape.in);
      __syncthreads();
      C part[kOwnRows][kQuad] = {};
#pragma unroll 4
      for (int r = 0; r < kHalf; ++r) {
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const C g = grads[r * kPitch + local_row + kSide * i];
#pragma unroll
          for (int j = 0; j < kQuad; ++j) part[i][j] += g * inputs[r * kTile + local_column + j];
        }
      }
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) product[i][j] += part[i][j];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int64_t row = row0 + local_row + kSide * i;
      if (row >= shape.out || column >= shape.in) continue;
      const PhiloxWords words = quad_words(seed, shape, noise, sample, row, column);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        if (column + j >= shape.in) continue;
        const int64_t at = row * shape.in + column + j;
        if (grad_weight) of_weight[i][j] += kept(words.word[j], off[at], product[i][j]);
        if (grad_logits) {
          const C logit = widen(logits[at]), decay = exponential(-magnitude(logit));
          of_logits[i][j] += product[i][j] * mask_slope(uniform_from_word<C>(words.word[j]), logit, decay, tau);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int64_t row = row0 + local_row + kSide * i;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (row >= shape.out || column + j >= shape.in) continue;
      const int64_t at = row * shape.in + column + j;
      if (grad_weight) narrow(of_weight[i][j], grad_weight + at);
      if (grad_logits) narrow(of_logits[i][j] * widen(weight[at]), grad_logits + at);
    }
  }
}

int64_t pieces(int64_t size, int64_t each) { return (size + each - 1) / each; }

}  // namespace

template <typename T>
cudaError_t mask_thresholds(const T* logits, int32_t* off, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH((thresholds_kernel<T>), blocks_for(count, kThreads), kThreads, stream, logits, off, count);
}

template <typename T>
cudaError_t masked_linear_forward(const T* x, const T* weight, const int32_t* off, const T* biases, T* result,
                                  LinearShape shape, MaskNoise noise, cudaStream_t stream) {
  if (shape.rows > kMaskedRows) return cudaErrorInvalidValue;
  if (noise.samples * shape.rows * shape.out == 0) return cudaSuccess;
  return FASTMOD_LAUNCH((forward_kernel<T>), blocks_for(noise.samples * pieces(shape.out, kTile), 1), kThreads, stream,
                        x, weight, off, biases, result, shape, noise);
}

template <typename T>
cudaError_t masked_linear_backward_x(const T* grad, const T* weight, const int32_t* off, T* grad_x, LinearShape shape,
                                     MaskNoise noise, cudaStream_t stream) {
  if (shape.rows > kMaskedRows) return cudaErrorInvalidValue;
  if (noise.samples * shape.rows * shape.in == 0) return cudaSuccess;
  return FASTMOD_LAUNCH((backward_x_kernel<T>), blocks_for(noise.samples * pieces(shape.in, kTile), 1), kThreads,
                        stream, grad, weight, off, grad_x, shape, noise);
}

template <typename T>
cudaError_t masked_linear_backward_weight(const T* grad, const T* x, const T* weight, const T* logits,
                                          const int32_t* off, T* grad_weight, T* grad_logits, Compute<T> tau,
                                          LinearShape shape, MaskNoise noise, cudaStream_t stream) {
  if (shape.out * shape.in == 0) return cudaSuccess;
  return FASTMOD_LAUNCH((backward_weight_kernel<T>), blocks_for(pieces(shape.out, kDepth) * pieces(shape.in, kTile), 1),
                        kThreads, stream, grad, x, weight, logits, off, grad_weight, grad_logits, tau, shape, noise);
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template cudaError_t mask_thresholds<T>(const T*, int32_t*, int64_t, cudaStream_t);                                 \
  template cudaError_t masked_linear_forward<T>(const T*, const T*, const int32_t*, const T*, T*, LinearShape,        \
                                                MaskNoise, cudaStream_t);                                             \
  template cudaError_t masked_linear_backward_x<T>(const T*, const T*, const int32_t*, T*, LinearShape, MaskNoise,    \
                                                   cudaStream_t);                                                     \
  template cudaError_t masked_linear_backward_weight<T>(const T*, const T*, const T*, const T*, const int32_t*, T*,   \
                                                        T*, Compute<T>, LinearShape, MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
