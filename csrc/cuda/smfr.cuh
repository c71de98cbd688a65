// What the two launches that take rows through a whole stack of MFNNRs share: activations in shared memory, weights that
// stream past them, and their products on tensor cores.
//
// A block has kTileRows rows, which is one tile of a product, so that every weight is used once per block, by one warp,
// and each lane copies just those that it will multiply itself: they wait in its own slots, no barrier is needed, and
// the copies run ahead of the products over the borders of layers. Warps share the columns of a layer, 16 at a time.
#pragma once

#include "reduce.cuh"
#include "smfr_product.cuh"
#include "smfr_routing.cuh"

namespace fastmod::cuda {

// Bytes of shared memory, from the start of each part. The second half of `hidden` is for FNNs with several hidden layers.
struct StackMemory {
  int plans, layers, input, hidden, hidden_bytes, outputs, values, row_values, routed_values, slots, bytes;  // forward
  int grads, routed, grad_x, x, weights, grad_weights;             // backward, in place of input and outputs
};

// This thread's place in row-wise work: features lane, lane + 16, ... of its row.
struct RowThread {
  int row, lane;
  int64_t at;   // the row in the batch
  bool inside;  // of the batch
  template <typename T, typename W>
  __device__ explicit RowThread(const Stack<T, W>& s)
      : row(kept(static_cast<int>(threadIdx.x) / kThreadsOfRow)),
        lane(kept(static_cast<int>(threadIdx.x) % kThreadsOfRow)) {
    at = kept(static_cast<int64_t>(blockIdx.x) * kTileRows + row);
    inside = at < s.batch;
  }
};

template <typename T, typename W>
StackMemory stack_memory(const Stack<T, W>& stack, bool backward);
template <typename T, typename W>
bool stack_is_small(const Stack<T, W>& stack);  // enough, but for shared memory

// FASTMOD_INSTANTIATE(T, W) for all that there are.
#define FASTMOD_INSTANTIATE_STACKS             \
  FASTMOD_INSTANTIATE(float, float)            \
  FASTMOD_INSTANTIATE(__half, __half)          \
  FASTMOD_INSTANTIATE(__nv_bfloat16, __nv_bfloat16) \
  FASTMOD_INSTANTIATE(__half, float)           \
  FASTMOD_INSTANTIATE(__nv_bfloat16, float)

}  // namespace fastmod::cuda
