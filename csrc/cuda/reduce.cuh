// Sums over many blocks in one launch and in a fixed order, and what else the kernels of batch norm share.
#pragma once

#include "common.cuh"

namespace fastmod::cuda {

template <typename C>
__device__ inline C rectified(C value) {
  return value <= C(0) ? C(0) : value;  // a NaN stays a NaN
}

__device__ inline float inverse_root(float value) { return 1.0f / sqrtf(value); }
__device__ inline double inverse_root(double value) { return 1.0 / sqrt(value); }

// Computes scale and shift of channel i from its statistics, and updates the running statistics.
template <typename C>
__device__ inline void finish_norm(const BatchNorm<C>& norm, int64_t i, C mean, C var) {
  if (norm.running_mean) {
    norm.running_mean[i] += norm.momentum * (mean - norm.running_mean[i]);
    norm.running_var[i] += norm.momentum * (var * norm.bessel - norm.running_var[i]);
  }
  if (norm.batches && i == 0) ++*norm.batches;
  const int64_t from = norm.gap == 0 ? i : i + quotient(i, norm.channels) * norm.gap;
  const C factor = inverse_root(var + norm.eps) * (norm.weight ? norm.weight[from] : C(1));
  norm.scale[i] = factor;
  norm.shift[i] = (norm.bias ? norm.bias[from] : C(0)) - mean * factor;
}

// Reads what other blocks wrote while this one ran.
template <typename C>
__device__ inline C fresh(const C* address) {
  return *static_cast<const volatile C*>(address);
}

// Whether this block is the last of `arrivals` to get here; it can then read everything that the others wrote before.
// The last one resets the ticket. All threads must call it.
__device__ inline bool last_to_arrive(unsigned* ticket, unsigned arrivals) {
  FASTMOD_SHARED(unsigned, place, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    place[0] = atomicAdd(ticket, 1u);
    if (place[0] + 1 == arrivals) *ticket = 0;
  }
  __syncthreads();
  const bool last = place[0] + 1 == arrivals;
  if (last) __threadfence();
  return last;
}

// Sum over all threads with the same column, in a fixed order; all of them get it.
template <int kColumns, typename C>
__device__ inline C sum_of_rows(C value, C* sums) {
  __syncthreads();  // the previous sums have been read
  sums[threadIdx.x] = value;
  __syncthreads();
  C total = 0;
  for (int row = 0; row < static_cast<int>(blockDim.x) / kColumns; ++row) {
    total += sums[row * kColumns + threadIdx.x % kColumns];
  }
  return total;
}

// Adds up the partial results of `blocks` blocks in a fixed order and in two stages, so that no block reads many: the
// last block of every kGroup neighbours adds up theirs, then the last of all adds up those sums. reduce(first, end,
// step, all) adds up the results of blocks first, first + step, ... before end; unless `all`, the sum must overwrite
// the partial result of block `first`.
template <int kGroup, typename Reduce>
__device__ inline void reduce_in_order(unsigned* tickets, unsigned own, unsigned blocks, Reduce reduce) {
  const unsigned groups = (blocks + kGroup - 1) / kGroup, first = own / kGroup * kGroup;
  const unsigned end = first + kGroup < blocks ? first + kGroup : blocks;
  if (groups > 1) {
    if (!last_to_arrive(tickets + 1 + own / kGroup, end - first)) return;
    reduce(first, end, 1u, false);
  }
  if (last_to_arrive(tickets, groups > 1 ? groups : blocks)) reduce(0u, blocks, groups > 1 ? kGroup : 1u, true);
}
template <int kGroup>
__host__ __device__ inline int64_t reduce_tickets(int64_t blocks) {
  return 1 + (blocks + kGroup - 1) / kGroup;
}
constexpr int kGroup = 32;

}  // namespace fastmod::cuda
