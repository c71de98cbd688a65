// masked_linear in fp64, which the tensor cores of few GPUs support: weights are masked on their way into shared
// memory. A block has up to 64 rows of a sample. Sums are taken in chunks of kDepth, which rounds less than one long
// sum.
#include "masked_linear.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kSide = 16;  // the threads of a block form a square
constexpr int kThreads = kSide * kSide;
constexpr int kTile = 64;   // outputs or inputs per block
constexpr int kDepth = 32;  // of a chunk
constexpr int kEach = kTile / kSide;
constexpr int kRows = 64;   // per block
constexpr int kHalf = kRows / 2;  // the second half of the rows is skipped if there are few
constexpr int kRowsEach = kRows / kSide;

// value where the mask keeps it, else 0 * value, as 0 * inf is NaN in torch too. NaN where the logit is NaN.
__device__ double kept(uint32_t word, double logit, double value) {
  if (logit != logit) return NAN;
  return value * (static_cast<int32_t>(word >> 9) >= words_off(to_float(logit)) ? 1.0 : 0.0);
}

__device__ PhiloxWords quad_words(int64_t seed, const LinearShape& shape, const MaskNoise& noise, int64_t sample,
                                  int64_t row, int64_t column) {
  const uint64_t index = first_word(shape, noise, sample) + static_cast<uint64_t>(row * shape.in + column);
  const MaskKeys keys(seed, noise.stream);
  return shape.in % kQuad == 0 ? keys.any(index / kQuad) : words_from(keys, index);
}

// Loads a piece [kHeight, kWide] of the masked weight at (row0, column0) into shared memory; zero beyond the edges.
template <int kHeight, int kWide, int kPitch>
__device__ void stage_masked(const double* weight, const double* logits, double* staged, int64_t row0, int64_t column0,
                             int64_t seed, const LinearShape& shape, const MaskNoise& noise, int64_t sample) {
  constexpr int kQuads = kWide / kQuad;
  static_assert(kHeight * kQuads % kThreads == 0, "every thread has as many quads");
#pragma unroll
  for (int e = threadIdx.x; e < kHeight * kQuads; e += kThreads) {
    const int local_row = e / kQuads, local_column = e % kQuads * kQuad;
    const int64_t row = row0 + local_row, column = column0 + local_column;
    double* to = staged + local_row * kPitch + local_column;
    if (row >= shape.out || column >= shape.in) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) to[i] = 0.0;
      continue;
    }
    const PhiloxWords words = quad_words(seed, shape, noise, sample, row, column);
    const int64_t at = row * shape.in + column;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const bool inside = column + i < shape.in;
      to[i] = inside ? kept(words.word[i], logits[at + i], weight[at + i]) : 0.0;
    }
  }
}

// Loads a piece [kHeight, kWide] of a matrix [rows, width] at (row0, column0); zero beyond the edges.
template <int kHeight, int kWide, int kPitch>
__device__ void stage(const double* matrix, double* staged, int64_t row0, int64_t column0, int64_t rows,
                      int64_t width) {
  for (int e = threadIdx.x; e < kHeight * kWide; e += kThreads) {
    const int64_t row = row0 + e / kWide, column = column0 + e % kWide;
    staged[e / kWide * kPitch + e % kWide] = row < rows && column < width ? matrix[row * width + column] : 0.0;
  }
}

// The sums of a thread: rows row() of a sample, columns column() of the block's tile.
struct Sums {
  double total[kRowsEach][kEach] = {};

  static __device__ int row(int i) { return static_cast<int>(threadIdx.x) / kSide + kSide * i; }
  static __device__ int column(int j) { return static_cast<int>(threadIdx.x) % kSide + kSide * j; }

  // Adds a chunk: left(row, k) * right(k, column). Skips the second half of the rows if it is empty.
  template <typename Left, typename Right>
  __device__ void add(int64_t rows, Left left, Right right) {
    add_half<0>(left, right);
    if (rows > kHalf) add_half<kRowsEach / 2>(left, right);
  }

  template <int kFirst, typename Left, typename Right>
  __device__ void add_half(Left left, Right right) {
    double part[kRowsEach / 2][kEach] = {};
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      double b[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) b[j] = right(k, column(j));
#pragma unroll
      for (int i = 0; i < kRowsEach / 2; ++i) {
        const double a = left(row(kFirst + i), k);
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

  // Stores into columns column0 .. of rows of `width` numbers; `offsets`, if any, has one number per column.
  __device__ void store(double* matrix, const double* offsets, int64_t column0, int64_t rows, int64_t width) const {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t at = column0 + column(j);
        if (row(i) >= rows || at >= width) continue;
        matrix[row(i) * width + at] = offsets ? total[i][j] + offsets[at] : total[i][j];
      }
    }
  }
};

__host__ __device__ int64_t pieces(int64_t size, int64_t each) { return (size + each - 1) / each; }

// What a block computes: kTile columns of up to kRows rows of one sample.
struct Piece {
  int64_t sample, row, column, rows;  // rows: how many are left
  __device__ Piece(const LinearShape& shape, int64_t width) {
    const int64_t across = pieces(width, kTile), down = pieces(shape.rows, kRows), outer = blockIdx.x / across;
    sample = outer / down;
    row = outer % down * kRows;
    column = blockIdx.x % across * kTile;
    rows = shape.rows - row < kRows ? shape.rows - row : kRows;
  }
};

__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const double* x, const double* weight, const double* logits, const double* biases, double* result,
                   LinearShape shape, MaskNoise noise) {
  constexpr int kPitch = kDepth + 1;  // keeps the columns of a chunk off one bank
  FASTMOD_SHARED(double, rows, kRows * kPitch);
  FASTMOD_SHARED(double, masked, kTile * kPitch);
  const Piece piece(shape, shape.out);
  const int64_t seed = seed_of(noise), first_row = piece.sample * shape.rows + piece.row;
  Sums sums;
  for (int64_t k0 = 0; k0 < shape.in; k0 += kDepth) {
    __syncthreads();  // the previous chunk has been read
    stage<kRows, kDepth, kPitch>(x + first_row * shape.in, rows, 0, k0, piece.rows, shape.in);
    stage_masked<kTile, kDepth, kPitch>(weight, logits, masked, piece.column, k0, seed, shape, noise, piece.sample);
    __syncthreads();
    sums.add(
        piece.rows, [&](int row, int k) { return rows[row * kPitch + k]; },
        [&](int k, int column) { return masked[column * kPitch + k]; });
  }
  sums.store(result + first_row * shape.out, biases ? biases + piece.sample * shape.out : nullptr, piece.column,
             piece.rows, shape.out);
}

__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const double* grad, const double* weight, const double* logits, double* grad_x,
                      LinearShape shape, MaskNoise noise) {
  constexpr int kPitch = kDepth + 1, kWidePitch = kTile + 1;
  FASTMOD_SHARED(double, grads, kRows * kPitch);
  FASTMOD_SHARED(double, masked, kDepth * kWidePitch);
  const Piece piece(shape, shape.in);
  const int64_t seed = seed_of(noise), first_row = piece.sample * shape.rows + piece.row;
  Sums sums;
  for (int64_t k0 = 0; k0 < shape.out; k0 += kDepth) {
    __syncthreads();
    stage<kRows, kDepth, kPitch>(grad + first_row * shape.out, grads, 0, k0, piece.rows, shape.out);
    stage_masked<kDepth, kTile, kWidePitch>(weight, logits, masked, k0, piece.column, seed, shape, noise, piece.sample);
    __syncthreads();
    sums.add(
        piece.rows, [&](int row, int k) { return grads[row * kPitch + k]; },
        [&](int k, int column) { return masked[k * kWidePitch + column]; });
  }
  sums.store(grad_x + first_row * shape.in, nullptr, piece.column, piece.rows, shape.in);
}

// A block takes a tile [kDepth, kTile] of the weight; a thread has kOwnRows quads of neighbouring weights in it.
__global__ void __launch_bounds__(kThreads)
    backward_weight_kernel(const double* grad, const double* x, const double* weight, const double* logits,
                           double* grad_weight, double* grad_logits, double tau, LinearShape shape, MaskNoise noise) {
  constexpr int kOwnRows = kDepth / kSide, kPitch = kDepth + 1;
  static_assert(kTile == kSide * kQuad, "a quad a thread");
  FASTMOD_SHARED(double, grads, kHalf * kPitch);  // [row][output]
  FASTMOD_SHARED(double, inputs, kHalf * kTile);  // [row][input]
  const int64_t across = pieces(shape.in, kTile);
  const int64_t row0 = blockIdx.x / across * kDepth, column0 = blockIdx.x % across * kTile;
  const int local_row = static_cast<int>(threadIdx.x) / kSide, local_column = threadIdx.x % kSide * kQuad;
  const int64_t column = column0 + local_column;
  const int64_t seed = seed_of(noise);
  double of_logits[kOwnRows][kQuad] = {}, of_weight[kOwnRows][kQuad] = {};
  for (int64_t sample = 0; sample < noise.samples; ++sample) {
    double product[kOwnRows][kQuad] = {};
    for (int64_t r0 = 0; r0 < shape.rows; r0 += kHalf) {
      __syncthreads();
      stage<kHalf, kDepth, kPitch>(grad + sample * shape.rows * shape.out, grads, r0, row0, shape.rows, shape.out);
      stage<kHalf, kTile, kTile>(x + sample * shape.rows * shape.in, inputs, r0, column0, shape.rows, shape.in);
      __syncthreads();
      double part[kOwnRows][kQuad] = {};
#pragma unroll 4
      for (int r = 0; r < kHalf; ++r) {
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const double g = grads[r * kPitch + local_row + kSide * i];
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
        if (grad_weight) of_weight[i][j] += kept(words.word[j], logits[at], product[i][j]);
        if (grad_logits) {
          const double logit = logits[at], decay = exponential(-magnitude(logit));
          of_logits[i][j] += product[i][j] * mask_slope(uniform_from_word<double>(words.word[j]), logit, decay, tau);
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
      if (grad_weight) grad_weight[at] = of_weight[i][j];
      if (grad_logits) grad_logits[at] = of_logits[i][j] * weight[at];
    }
  }
}

}  // namespace

namespace plain {

namespace {

// Calls launch(copy, noise) for every copy.
template <typename Launch>
cudaError_t for_copies(const LinearShape& shape, MaskNoise noise, Launch launch) {
  cudaError_t found = cudaSuccess;
  for (int64_t copy = 0; copy < shape.copies.count && found == cudaSuccess; ++copy) {
    found = launch(copy, noise);
    if (noise.seed) noise.seed += shape.copies.seed;
  }
  return found;
}

}  // namespace

cudaError_t forward(const double* x, const double* weight, const double* logits, const double* biases, double* result,
                    LinearShape shape, MaskNoise noise, cudaStream_t stream) {
  const int64_t rows = noise.samples * pieces(shape.rows, kRows);
  if (rows * shape.out == 0) return cudaSuccess;
  const LinearCopies& copies = shape.copies;
  return for_copies(shape, noise, [&](int64_t copy, const MaskNoise& own) {
    return FASTMOD_LAUNCH(forward_kernel, blocks_for(rows * pieces(shape.out, kTile), 1), kThreads, stream,
                          x + copy * copies.x, weight + copy * copies.weight, logits + copy * copies.logits,
                          biases ? biases + copy * copies.biases : nullptr,
                          result + copy * noise.samples * shape.rows * shape.out, shape, own);
  });
}

cudaError_t backward_x(const double* grad, const double* weight, const double* logits, double* grad_x,
                       LinearShape shape, MaskNoise noise, cudaStream_t stream) {
  const int64_t rows = noise.samples * pieces(shape.rows, kRows);
  if (rows * shape.in == 0) return cudaSuccess;
  const LinearCopies& copies = shape.copies;
  return for_copies(shape, noise, [&](int64_t copy, const MaskNoise& own) {
    return FASTMOD_LAUNCH(backward_x_kernel, blocks_for(rows * pieces(shape.in, kTile), 1), kThreads, stream,
                          grad + copy * copies.grad, weight + copy * copies.weight, logits + copy * copies.logits,
                          grad_x + copy * noise.samples * shape.rows * shape.in, shape, own);
  });
}

cudaError_t backward_weight(const double* grad, const double* x, const double* weight, const double* logits,
                            double* grad_weight, double* grad_logits, double tau, LinearShape shape, MaskNoise noise,
                            cudaStream_t stream) {
  const int64_t count = shape.out * shape.in;
  if (count == 0) return cudaSuccess;
  const LinearCopies& copies = shape.copies;
  return for_copies(shape, noise, [&](int64_t copy, const MaskNoise& own) {
    return FASTMOD_LAUNCH(backward_weight_kernel, blocks_for(pieces(shape.out, kDepth) * pieces(shape.in, kTile), 1),
                          kThreads, stream, grad + copy * copies.grad, x + copy * copies.x,
                          weight + copy * copies.weight, logits + copy * copies.logits,
                          grad_weight ? grad_weight + copy * count : nullptr,
                          grad_logits ? grad_logits + copy * count : nullptr, tau, shape, own);
  });
}

}  // namespace plain

}  // namespace fastmod::cuda
