// Shared by the two launches that take rows through a whole stack of MFNNRs: activations stay in shared memory, weights
// are streamed past them, and tensor cores multiply both.
//
// A block has kTileRows rows, one tile of a product, so that every weight is used once per block and by one warp. Each
// lane copies exactly the weights that it will multiply itself into its own slots. So no barrier is needed, and copies
// run ahead of the products, even into the next layer. Warps share the columns of a layer, 16 at a time.
#pragma once

#include "reduce.cuh"
#include "smfr_product.cuh"
#include "smfr_routing.cuh"

namespace fastmod::cuda {

// Offsets in bytes of the parts of shared memory. The second half of `hidden` is for FNNs with several hidden layers.
struct StackMemory {
  int plans, layers, input, hidden, hidden_bytes, outputs, values, row_values, routed_values, slots, bytes;  // forward
  int grads, routed, grad_x, x, weights, grad_weights;             // backward, instead of input and outputs
};

// This thread's part in row-wise work: features lane, lane + 16, ... of its row.
struct RowThread {
  int row, lane;
  int64_t at;   // the row in the batch
  bool inside;  // whether it is in the batch
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
bool stack_is_small(const Stack<T, W>& stack);  // small enough, apart from shared memory

// FASTMOD_INSTANTIATE(T, W) for all type combinations.
#define FASTMOD_INSTANTIATE_STACKS             \
  FASTMOD_INSTANTIATE(float, float)            \
  FASTMOD_INSTANTIATE(__half, __half)          \
  FASTMOD_INSTANTIATE(__nv_bfloat16, __nv_bfloat16) \
  FASTMOD_INSTANTIATE(__half, float)           \
  FASTMOD_INSTANTIATE(__nv_bfloat16, float)

}  // namespace fastmod::cuda
