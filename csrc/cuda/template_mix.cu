// template_mix on tensor cores: out = weights @ bank, gradients in one pass over the gradient of out.
//
// Every block computes the weights from logits first. There are so few blocks that reading logits, and writing and
// reading their partial gradients of the weights, is little traffic compared with the bank.
#include "template_mix.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 32;                  // per warp in the forward, per block in the backward
constexpr int kTemplates = 32;                // templates that a lane holds at a time
constexpr int kMaxShared = 63 * 1024;         // of the smallest GPU supported
constexpr int kLeastBlocks = 64, kMostBlocks = 1024;
constexpr double kOverhead = 0.045;           // fraction of bytes that blocks may add to those of bank and gradients

__host__ __device__ inline int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- forward: a warp has 32 columns of the bank, of which lane (g, t) reads four neighbours, 4 g .. 4 g + 3, for the
// templates of its share of the depth. Column 4 c + n of the tile is column c of product n, so that a lane gets eight
// neighbours of each row: 8 t .. 8 t + 7.

template <typename T>
__device__ inline void read_bank(const T* bank, const MixShape& shape, int64_t column, int first, bool vector,
                                 uint4 (&b)[kTemplates / kDepth<T>][4]) {
  const int t = threadIdx.x % 4;
  const int64_t left = shape.size - column;
  const int there = left < 4 ? static_cast<int>(left) : 4;
#pragma unroll
  for (int step = 0; step < kTemplates / kDepth<T>; ++step) {
    float v[kOfLane<T>][4];
#pragma unroll
    for (int j = 0; j < kOfLane<T>; ++j) {
      const int64_t k = first + step * kDepth<T> + t * kOfLane<T> + j;
      if (k < shape.templates && there > 0) {
        read_four(bank + k * shape.size + column, there, vector, v[j]);
      } else {
        v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float own[kOfLane<T>];
#pragma unroll
      for (int j = 0; j < kOfLane<T>; ++j) own[j] = v[j][n];
      b[step][n] = unit_of_data(own, static_cast<T*>(nullptr));
    }
  }
}

// Computes rows first .. first + group of the weights as units [row][step], zeros beyond the last.
template <typename T>
__device__ inline void weights_by_rows(const T* logits, const MixShape& shape, int64_t first, int group, int steps,
                                       uint4* units) {
  const int lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < group; row += kWarps) {
    const Mixture<T> mixture(first + row < shape.rows ? logits + (first + row) * shape.templates : nullptr,
                             shape.templates, shape.mixing);
    for (int k = 0; k < steps * kDepth<T>; k += kWarp) {
      const float own = mixture.weight(k + lane);
      float v[kOfLane<T>];
#pragma unroll
      for (int j = 0; j < kOfLane<T>; ++j) v[j] = __shfl_sync(kAllLanes, own, (lane * kOfLane<T> + j) % kWarp);
      const int i = k / kOfLane<T> + lane;
      if (lane < kWarp / kOfLane<T> && i < steps * 4) {
        units[unit_at(row, i / 4, steps, i % 4)] = unit_of_weights(v, static_cast<T*>(nullptr));
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const T* logits, const T* bank, T* out, const __grid_constant__ MixShape shape, int group,
                   bool vector) {
  FASTMOD_DYNAMIC_SHARED(memory);
  auto* weights = reinterpret_cast<uint4*>(memory);
  constexpr int kSteps = kTemplates / kDepth<T>;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int steps = static_cast<int>(rounded_up(shape.templates, kDepth<T>)) / kDepth<T>;
  const int64_t tiles = (shape.size + kColumns - 1) / kColumns;
  uint4 b[kSteps][4];
  for (int64_t first = 0; first < shape.rows; first += group) {
    __syncthreads();  // the previous weights have been read
    weights_by_rows(logits, shape, first, group, steps, weights);
    __syncthreads();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; tile < tiles; tile += warps) {
      const int64_t column = tile * kColumns;
      if (steps <= kSteps) read_bank(bank, shape, column + 4 * g, 0, vector, b);
      for (int m = 0; m < group && first + m < shape.rows; m += 16) {
        float total[4][4] = {}, low[4][4] = {};
        for (int chunk = 0; chunk < steps; chunk += kSteps) {
          if (steps > kSteps) read_bank(bank, shape, column + 4 * g, chunk * kDepth<T>, vector, b);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (chunk + step >= steps) break;
            multiply<T, false>(weights[unit_at(m + g, chunk + step, steps, t)],
                               weights[unit_at(m + g + 8, chunk + step, steps, t)], b[step], total, low);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // row g or g + 8, the first or the last four columns
          const int64_t row = first + m + g + i / 2 * 8, at = column + 8 * t + i % 2 * 4, left = shape.size - at;
          if (row >= shape.rows || left <= 0) continue;
          T held[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) narrow(total[n][i] + low[n][i], held + n);
          write_four(held, left < 4 ? static_cast<int>(left) : 4, vector, out + row * shape.size + at);
        }
      }
    }
  }
}

// ---- backward: a block has 32 columns at a time, of the gradient and of the bank, in shared memory

constexpr int kTiles = 8;  // the most 16 x 8 tiles of the weights' gradient that a warp holds

template <typename T>
struct Backward {
  static constexpr int kPitch = kColumns + 16 / static_cast<int>(sizeof(T));
  int rows, templates, steps;  // rounded up; steps: over the rows
  int weights, grad, bank, end;  // bytes of shared memory
  __host__ __device__ explicit Backward(const MixShape& shape)
      : rows(static_cast<int>(rounded_up(shape.rows, 16))),
        templates(static_cast<int>(rounded_up(shape.templates, 16))),
        steps(rows / kDepth<T>),
        weights(0),
        grad(templates * steps * 4 * 16),
        bank(grad + rows * kPitch * static_cast<int>(sizeof(T))),
        end(bank + templates * kPitch * static_cast<int>(sizeof(T))) {}
};

// Computes the weights as units [template][step over the rows].
template <typename T>
__device__ inline void weights_by_templates(const T* logits, const MixShape& shape, const Backward<T>& layout,
                                            uint4* units) {
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x / kWarp; i < layout.steps * 4; i += kWarps) {
    const auto row_of = [&](int j) {
      const int64_t row = i * kOfLane<T> + j;
      return Mixture<T>(row < shape.rows ? logits + row * shape.templates : nullptr, shape.templates, shape.mixing);
    };
    if constexpr (kOfLane<T> == 2) {
      const Mixture<T> mixtures[2] = {row_of(0), row_of(1)};
      for (int k = lane; k < layout.templates; k += kWarp) {
        const float v[2] = {mixtures[0].weight(k), mixtures[1].weight(k)};
        units[unit_at(k, i / 4, layout.steps, i % 4)] = unit_of_weights(v, static_cast<T*>(nullptr));
      }
    } else {
      const Mixture<T> mixtures[4] = {row_of(0), row_of(1), row_of(2), row_of(3)};
      for (int k = lane; k < layout.templates; k += kWarp) {
        const float v[4] = {mixtures[0].weight(k), mixtures[1].weight(k), mixtures[2].weight(k),
                            mixtures[3].weight(k)};
        units[unit_at(k, i / 4, layout.steps, i % 4)] = unit_of_weights(v, static_cast<T*>(nullptr));
      }
    }
  }
}

// Reads kOfLane numbers that are `apart` elements apart.
template <typename T>
__device__ inline uint4 unit_from(const T* from, int apart) {
  float v[kOfLane<T>];
#pragma unroll
  for (int j = 0; j < kOfLane<T>; ++j) v[j] = widen(from[j * apart]);
  return unit_of_data(v, static_cast<T*>(nullptr));
}

// 16 templates x 8 columns of weights^T @ grad.
template <typename T>
__device__ inline void bank_tile(const uint4* weights, const T* grad, const Backward<T>& layout, int k0, int n0,
                                 int64_t column, const MixShape& shape, T* grad_bank) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float total[1][4] = {}, low[1][4] = {};
#pragma unroll 1
  for (int step = 0; step < layout.steps; ++step) {
    const T* from = grad + (step * kDepth<T> + t * kOfLane<T>) * Backward<T>::kPitch + n0 + g;
    const uint4 b[1] = {unit_from(from, Backward<T>::kPitch)};
    multiply<T, false>(weights[unit_at(k0 + g, step, layout.steps, t)],
                       weights[unit_at(k0 + g + 8, step, layout.steps, t)], b, total, low);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t k = k0 + g + j / 2 * 8, at = column + n0 + t * 2 + j % 2;
    if (k < shape.templates && at < shape.size) narrow(total[0][j] + low[0][j], grad_bank + k * shape.size + at);
  }
}

// Adds the contribution of these columns to 16 rows x 8 templates of grad @ bank^T.
template <typename T>
__device__ inline void weight_tile(const T* grad, const T* bank, int row0, int k0, float (&sum)[4]) {
  constexpr int kPitch = Backward<T>::kPitch;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float total[1][4] = {}, low[1][4] = {};
#pragma unroll 1
  for (int at = 0; at < kColumns; at += kDepth<T>) {  // not unrolled, as there are kTiles of these in a row
    const int own = at + t * kOfLane<T>;
    const uint4 b[1] = {unit_from(bank + (k0 + g) * kPitch + own, 1)};
    multiply<T, true>(unit_from(grad + (row0 + g) * kPitch + own, 1),
                      unit_from(grad + (row0 + g + 8) * kPitch + own, 1), b, total, low);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] += total[0][j] + low[0][j];
}

// partials [blocks, rows, templates]
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const T* grad, const T* logits, const T* bank, T* grad_bank, float* partials,
                    const __grid_constant__ MixShape shape, bool vector) {
  FASTMOD_DYNAMIC_SHARED(memory);
  const Backward<T> layout(shape);
  auto* weights = reinterpret_cast<uint4*>(memory + layout.weights);
  auto* held_grad = reinterpret_cast<T*>(memory + layout.grad);
  auto* held_bank = reinterpret_cast<T*>(memory + layout.bank);
  constexpr int kPitch = Backward<T>::kPitch;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int across = layout.templates / 8, weight_tiles = layout.rows / 16 * across;
  const int64_t tiles = (shape.size + kColumns - 1) / kColumns;
  float sums[kTiles][4] = {};
  if (grad_bank) weights_by_templates(logits, shape, layout, weights);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t column = tile * kColumns, left = shape.size - column;
    const int valid = left < kColumns ? static_cast<int>(left) : kColumns;
    const auto rows_of = [&](const T* matrix, int64_t count) {
      return [=](int row) -> const T* { return row < count ? matrix + row * shape.size + column : nullptr; };
    };
    copy_rows<kThreads>(held_grad, layout.rows, kPitch, valid, vector, grad, rows_of(grad, shape.rows));
    if (partials) {
      copy_rows<kThreads>(held_bank, layout.templates, kPitch, valid, vector, bank, rows_of(bank, shape.templates));
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the columns have arrived, and the weights are complete
    if (grad_bank) {
      for (int i = warp; i < layout.templates / 16 * (kColumns / 8); i += kWarps) {
        bank_tile(weights, held_grad, layout, i / (kColumns / 8) * 16, i % (kColumns / 8) * 8, column, shape,
                  grad_bank);
      }
    }
    if (partials) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int i = warp + j * kWarps;
        if (i < weight_tiles) weight_tile(held_grad, held_bank, i / across * 16, i % across * 8, sums[j]);
      }
    }
    __syncthreads();  // these columns are no longer needed
  }
  if (!partials) return;
  float* own = partials + blockIdx.x * shape.rows * shape.templates;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int i = warp + j * kWarps;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int64_t row = i / across * 16 + lane / 4 + n / 2 * 8, k = i % across * 8 + lane % 4 * 2 + n % 2;
      if (i < weight_tiles && row < shape.rows && k < shape.templates) own[row * shape.templates + k] = sums[j][n];
    }
  }
}

// One block per row adds up the partial sums in a fixed order and computes the gradient of the logits. The sum
// overwrites the first part.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(Compute<T>* partials, int64_t parts, const T* logits, T* grad_logits,
                  const __grid_constant__ MixShape shape) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kThreads);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * shape.templates, all = shape.rows * shape.templates;
  for (int64_t first = 0; first < shape.templates; first += kWarp) {
    const int64_t k = first + lane;
    C total = 0;
#pragma unroll 4
    for (int64_t part = warp; k < shape.templates && part < parts; part += kWarps) {
      total += partials[part * all + row + k];
    }
    __syncthreads();  // the previous sums have been read
    sums[threadIdx.x] = total;
    __syncthreads();
    if (warp > 0 || k >= shape.templates) continue;
    for (int other = 1; other < kWarps; ++other) total += sums[other * kWarp + lane];
    partials[row + k] = total;
  }
  if (warp > 0) return;
  const Mixture<T> mixture(logits + row, shape.templates, shape.mixing);
  C mean = 0;
  for (int64_t k = lane; k < shape.templates; k += kWarp) mean += mixture.weight(k) * partials[row + k];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) mean += __shfl_xor_sync(kAllLanes, mean, offset);
  for (int64_t k = lane; k < shape.templates; k += kWarp) {
    const C weight = mixture.weight(k);
    C found = partials[row + k];
    if (shape.mixing == kMixSoftmax) found = weight * (found - mean);
    if (shape.mixing == kMixTanh) found *= C(1) - weight * weight;
    narrow(found, grad_logits + row + k);
  }
}

// ---- how many blocks, and what fits

int64_t blocks_within(double numbers, double of_each, int64_t most) {
  const double wanted = kOverhead * numbers / of_each;
  const int64_t blocks = wanted < kLeastBlocks ? kLeastBlocks
                         : wanted > kMostBlocks ? kMostBlocks
                                                : static_cast<int64_t>(wanted);
  return blocks < most ? blocks : most;
}

// How many rows of weights fit into shared memory; 0 if not even sixteen do.
template <typename T>
int64_t group_of(const MixShape& shape) {
  const int64_t row = rounded_up(shape.templates, kDepth<T>) / kOfLane<T> * 16, fit = kMaxShared / row / 16 * 16;
  const int64_t all = rounded_up(shape.rows, 16);
  return fit < all ? fit : all;
}

template <typename T>
bool forward_fits(const MixShape& shape) {
  return sizeof(T) <= 4 && group_of<T>(shape) > 0;
}
template <typename T>
bool backward_fits(const MixShape& shape) {
  if (sizeof(T) > 4 || shape.rows > 4096 || shape.templates > 4096) return false;
  const Backward<T> layout(shape);
  return layout.end <= kMaxShared && layout.rows / 16 * (layout.templates / 8) <= kTiles * kWarps;
}

template <typename T>
int64_t backward_parts(const MixShape& shape) {
  if (!backward_fits<T>(shape)) return plain_mix_parts<T>(shape);
  const double numbers = static_cast<double>(shape.rows + 2 * shape.templates) * static_cast<double>(shape.size);
  constexpr double kPartial = static_cast<double>(sizeof(Compute<T>)) / sizeof(T);
  const double each = (1 + 2 * kPartial) * static_cast<double>(shape.rows * shape.templates);  // logits, parts twice
  return blocks_within(numbers, each, (shape.size + kColumns - 1) / kColumns);
}

}  // namespace

template <typename T>
int64_t template_mix_forward_scratch(MixShape shape) {
  return forward_fits<T>(shape) ? 0 : shape.rows * shape.templates;
}

template <typename T>
int64_t template_mix_backward_scratch(MixShape shape) {
  return (backward_parts<T>(shape) + (backward_fits<T>(shape) ? 0 : 1)) * shape.rows * shape.templates;
}

template <typename T>
cudaError_t template_mix_forward(const T* logits, const T* bank, T* out, Compute<T>* scratch, MixShape shape,
                                 cudaStream_t stream) {
  if (shape.rows * shape.size == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (forward_fits<T>(shape)) {
      const auto group = static_cast<int>(group_of<T>(shape));
      const size_t bytes = group * (rounded_up(shape.templates, kDepth<T>) / kOfLane<T>) * 16;
      const double numbers = static_cast<double>(shape.rows + shape.templates) * static_cast<double>(shape.size);
      const int64_t most = (shape.size + kColumns * kWarps - 1) / (kColumns * kWarps);
      const int64_t blocks = blocks_within(numbers, static_cast<double>(shape.rows * shape.templates), most);
      const bool vector = by_four(bank, shape.size) && by_four(out, shape.size);
      const auto kernel = forward_kernel<T>;
      return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(blocks, 1), kThreads, bytes, stream, logits, bank, out, shape,
                                    group, vector);
    }
  }
  return plain_mix_forward<T>(logits, bank, out, scratch, shape, stream);
}

template <typename T>
cudaError_t template_mix_backward(const T* grad, const T* logits, const T* bank, T* grad_logits, T* grad_bank,
                                  Compute<T>* scratch, MixShape shape, cudaStream_t stream) {
  if (shape.rows * shape.size == 0 || (!grad_logits && !grad_bank)) return cudaSuccess;
  const int64_t parts = backward_parts<T>(shape);
  Compute<T>* partials = grad_logits ? scratch : nullptr;
  cudaError_t error = cudaSuccess;
  if (!backward_fits<T>(shape)) {
    Compute<T>* weights = scratch + parts * shape.rows * shape.templates;
    error = plain_mix_backward<T>(grad, logits, bank, weights, partials, grad_bank, shape, stream);
  } else if constexpr (sizeof(T) <= 4) {
    const bool vector = rows_aligned(grad, shape.size) && rows_aligned(bank, shape.size);
    const auto kernel = backward_kernel<T>;
    error = FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(parts, 1), kThreads, Backward<T>(shape).end, stream, grad, logits,
                                   bank, grad_bank, partials, shape, vector);
  }
  if (error != cudaSuccess || !grad_logits) return error;
  return FASTMOD_LAUNCH(finish_kernel<T>, blocks_for(shape.rows, 1), kThreads, stream, partials, parts, logits,
                        grad_logits, shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template int64_t template_mix_forward_scratch<T>(MixShape);                                                         \
  template int64_t template_mix_backward_scratch<T>(MixShape);                                                        \
  template cudaError_t template_mix_forward<T>(const T*, const T*, T*, Compute<T>*, MixShape, cudaStream_t);          \
  template cudaError_t template_mix_backward<T>(const T*, const T*, const T*, T*, T*, Compute<T>*, MixShape,          \
                                                cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
