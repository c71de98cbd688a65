// MFNNR forward in two launches for hidden layers up to kMaxHidden, and the one pointwise kernel its backward needs
// beside those of multiplex.cu and gated_residual.cu.
//
// A block takes kTileRows batch rows through a whole FNN: the activations never leave shared memory (except to be kept
// for the backward), the weights stream through it in chunks. Wider layers are left to cuBLAS by the caller.
#include "multiplex.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kDepth = 16;     // inputs per staged chunk
constexpr int kPerThread = 4;  // a thread accumulates kPerThread rows x kPerThread columns in registers
constexpr int kWidth = static_cast<int>(kMaxHidden);
constexpr int kPitch = kWidth + 1;  // keeps the transposing stores off one bank
static_assert(kThreads == kColumnThreads, "the route kernel also routes columns");
static_assert(kTileRows == kThreads / kWarp * kPerThread && kWidth == kWarp * kPerThread, "tile = threads x registers");
static_assert(kWidth % kDepth == 0, "hidden layers are read in whole chunks");

// Rows of [first ; second] (second may be null): [batch, first_width] and [batch, second_width].
template <typename C>
struct Input {
  const C* first;
  int64_t first_width;
  const C* second;
  int64_t second_width;
  __device__ int64_t width() const { return first_width + second_width; }
  __device__ C at(int64_t row, int64_t k) const {
    return k < first_width ? first[row * first_width + k] : second[row * second_width + k - first_width];
  }
};

// Takes rows first_row .. first_row + rows through the FNN. Returns this thread's share of the sum of squared excesses
// of the outputs from column `penalised` on.
template <typename C>
__device__ C fnn_tile(const Input<C>& input, const Fnn<C>& fnn, C* copy, int64_t first_row, int rows,
                      int64_t penalised, C threshold) {
  FASTMOD_SHARED(C, hidden, kTileRows * kWidth);      // [row][feature]; zero beyond the layer's width
  FASTMOD_SHARED(C, staged_input, kTileRows * kDepth);  // [row][k], first layer only
  FASTMOD_SHARED(C, staged_weight, kDepth * kPitch);  // [k][column]
  const int row0 = threadIdx.x / kWarp * kPerThread, lane = threadIdx.x % kWarp;
  C penalty = 0;
  for (int layer = 0; layer < fnn.linears; ++layer) {
    const bool last = layer + 1 == fnn.linears;
    const int64_t depth = layer == 0 ? input.width() : fnn.width[layer - 1], width = fnn.width[layer];
    const C* weight = fnn.weight[layer];
    const C* bias = fnn.bias[layer];
    C* kept = fnn.kept[layer];
    for (int64_t column0 = 0; column0 < width; column0 += kWidth) {  // once for a hidden layer
      C sums[kPerThread][kPerThread] = {};
      for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
        __syncthreads();  // the previous chunk has been read; `hidden` has been written
        for (int i = threadIdx.x; i < kWidth * kDepth; i += kThreads) {
          const int column = i / kDepth, k = i % kDepth;
          const bool inside = column0 + column < width && k0 + k < depth;
          staged_weight[k * kPitch + column] = inside ? weight[(column0 + column) * depth + k0 + k] : C(0);
        }
        if (layer == 0) {
          for (int i = threadIdx.x; i < kTileRows * kDepth; i += kThreads) {
            const int row = i / kDepth, k = i % kDepth;
            staged_input[i] = row < rows && k0 + k < depth ? input.at(first_row + row, k0 + k) : C(0);
          }
        }
        __syncthreads();
        const C* source = layer == 0 ? staged_input + row0 * kDepth : hidden + row0 * kWidth + k0;
        const int pitch = layer == 0 ? kDepth : kWidth;
        C parts[kPerThread][kPerThread] = {};  // summed by chunks, which rounds less than one long sum
#pragma unroll 4
        for (int k = 0; k < kDepth; ++k) {
          C left[kPerThread], right[kPerThread];
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) left[i] = source[i * pitch + k];
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) right[j] = staged_weight[k * kPitch + lane + j * kWarp];
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
            for (int j = 0; j < kPerThread; ++j) parts[i][j] += left[i] * right[j];
          }
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) sums[i][j] += parts[i][j];
        }
      }
      if (!last) __syncthreads();  // every thread has read `hidden`, which is now overwritten
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int local = lane + j * kWarp;
        const int64_t column = column0 + local;
        const C offset = column < width ? bias[column] : C(0);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          const int row = row0 + i;
          C value = sums[i][j] + offset;
          if (!last) {
            value = column < width ? (value > C(0) ? value : value * C(kLeakySlope)) : C(0);
            hidden[row * kWidth + local] = value;
          }
          if (row < rows && column < width) {
            const int64_t at = (first_row + row) * width + column;
            if (kept) kept[at] = value;
            if (last && copy) copy[at] = value;
            if (last && column >= penalised && threshold >= C(0)) {
              const C over = excess(value, threshold);
              penalty += over * over;
            }
          }
        }
      }
    }
  }
  return penalty;
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 2)
    route_kernel(const C* x, const __grid_constant__ Fnn<C> route, const __grid_constant__ Routing<C> routing,
                 C threshold, C* logits_copy, C* routed, C* penalty_partials, unsigned* ticket,
                 const __grid_constant__ Shape shape) {
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows, left = shape.batch - first_row;
  const int rows = static_cast<int>(left < kTileRows ? left : kTileRows);
  const Input<C> input{x, shape.m * shape.d, nullptr, 0};
  const C penalty = fnn_tile(input, route, logits_copy, first_row, rows, 0, threshold);
  __syncthreads();  // makes the logits of this tile, in global memory, visible to the whole block
  const int64_t end = (first_row + rows) * shape.n;
  for (int64_t column = first_row * shape.n; column < end; column += kColumns) {
    multiplex_columns<C>(x, route.kept[route.linears - 1], routed, routing, shape, column, end);
    __syncthreads();  // the next columns reuse the shared memory of these
  }
  const C total = block_sum(penalty);
  if (threadIdx.x == 0) {
    penalty_partials[blockIdx.x] = total;
    if (blockIdx.x == 0) *ticket = 0;  // for the update kernel, which runs after this one
  }
}

// Adds up the partials of both kernels in the block that comes last, in a fixed order: the result does not depend on
// which block that is, and no third launch is needed.
template <typename C>
__device__ void finish_penalty(C penalty, C* partials, unsigned* ticket, C* result) {
  FASTMOD_SHARED(unsigned, place, 1);
  const C own = block_sum(penalty);
  if (threadIdx.x == 0) {
    partials[gridDim.x + blockIdx.x] = own;
    __threadfence();  // the partial is visible before the ticket is taken
    place[0] = atomicAdd(ticket, 1u);
  }
  __syncthreads();
  if (place[0] + 1 != gridDim.x) return;
  __threadfence();
  const volatile C* all = partials;  // volatile: written by other blocks while this one ran
  C total = 0;
  for (int64_t i = threadIdx.x; i < 2 * static_cast<int64_t>(gridDim.x); i += kThreads) total += all[i];
  total = block_sum(total);
  if (threadIdx.x == 0) *result = total;
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 2)
    update_kernel(const C* x, const C* routed, const __grid_constant__ Fnn<C> update, C threshold, C* out, C* gate,
                  C* penalty_partials, unsigned* ticket, C* penalty_sum, const __grid_constant__ Shape shape) {
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows, left = shape.batch - first_row;
  const int rows = static_cast<int>(left < kTileRows ? left : kTileRows);
  const int64_t values = shape.n * shape.d;  // per batch row
  const Input<C> input{routed, values, x, x ? shape.m * shape.d : 0};
  const C penalty = fnn_tile<C>(input, update, nullptr, first_row, rows, values, threshold);
  __syncthreads();  // as above, for new values and gates
  const C* fresh = update.kept[update.linears - 1];  // [batch, n*d + n]
  for (int64_t e = threadIdx.x; e < rows * values; e += kThreads) {
    const int64_t row = quotient(e, values), value = e - row * values, n = quotient(value, shape.d);
    const C* outputs = fresh + (first_row + row) * (values + shape.n);
    const C logit = outputs[values + n];
    const int64_t at = first_row * values + e;
    out[at] = sigmoid(logit) * outputs[value] + sigmoid(-logit) * routed[at];
  }
  for (int64_t e = threadIdx.x; e < rows * shape.n; e += kThreads) {
    const int64_t row = quotient(e, shape.n);
    gate[first_row * shape.n + e] = fresh[(first_row + row) * (values + shape.n) + values + e - row * shape.n];
  }
  finish_penalty(penalty, penalty_partials, ticket, penalty_sum);
}

template <typename C>
__global__ void __launch_bounds__(256) leaky_backward_kernel(C* grad, const C* hidden, int64_t count) {
  const int64_t i = global_thread();
  if (i < count && !(hidden[i] > C(0))) grad[i] *= C(kLeakySlope);
}

template <typename C>
bool fits(const Fnn<C>& fnn) {
  if (fnn.linears < 1 || fnn.linears > kMaxLinear) return false;
  for (int layer = 0; layer + 1 < fnn.linears; ++layer) {
    if (fnn.width[layer] > kMaxHidden) return false;
  }
  return fnn.kept[fnn.linears - 1] != nullptr;
}

}  // namespace

template <typename C>
cudaError_t mfnnr_route(const C* x, Fnn<C> route, Routing<C> routing, C threshold, C* logits_copy, C* routed,
                        C* penalty_partials, unsigned* ticket, Shape shape, cudaStream_t stream) {
  if (!fits(route)) return cudaErrorInvalidValue;
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(route_kernel<C>, blocks_for(shape.batch, kTileRows), kThreads, stream, x, route, routing,
                        threshold, logits_copy, routed, penalty_partials, ticket, shape);
}

template <typename C>
cudaError_t mfnnr_update(const C* x, const C* routed, Fnn<C> update, C threshold, C* out, C* gate,
                         C* penalty_partials, unsigned* ticket, C* penalty, Shape shape, cudaStream_t stream) {
  if (!fits(update)) return cudaErrorInvalidValue;
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(update_kernel<C>, blocks_for(shape.batch, kTileRows), kThreads, stream, x, routed, update,
                        threshold, out, gate, penalty_partials, ticket, penalty, shape);
}

template <typename C>
cudaError_t leaky_backward(C* grad, const C* hidden, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(leaky_backward_kernel<C>, blocks_for(count, 256), 256, stream, grad, hidden, count);
}

#define FASTMOD_INSTANTIATE(C)                                                                                       \
  template cudaError_t mfnnr_route<C>(const C*, Fnn<C>, Routing<C>, C, C*, C*, C*, unsigned*, Shape, cudaStream_t);  \
  template cudaError_t mfnnr_update<C>(const C*, const C*, Fnn<C>, C, C*, C*, C*, unsigned*, C*, Shape,              \
                                       cudaStream_t);                                                                \
  template cudaError_t leaky_backward<C>(C*, const C*, int64_t, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)

}  // namespace fastmod::cuda
