// Gradients of weights and biases of many linear layers in one launch: a block has a tile of one weight and walks
// through the whole batch, so that no sum is shared between blocks. Further blocks add up the gradients of
// temperatures. See mfnnr.cuh.
#include "mfnnr.cuh"

namespace fastmod::cuda {
namespace {

template <typename T>
using Tile = ProductTile<T, T, kOfWeight>;

template <typename T, typename W>
__host__ __device__ inline int tiles_across(const WeightGrad<T, W>& linear) {
  return (linear.input.width + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
}
template <typename T, typename W>
__host__ __device__ inline int tiles_of(const WeightGrad<T, W>& linear) {
  return (linear.out + Tile<T>::kRows - 1) / Tile<T>::kRows * tiles_across(linear);
}

template <typename T, typename W>
__global__ void __launch_bounds__(kProductThreads, 1)
    weights_kernel(const __grid_constant__ WeightGrads<T, W> all, int first_tau) {
  using C = Compute<T>;
  using P = Tile<T>;
  int block = static_cast<int>(blockIdx.x);
  if (block >= first_tau) {
    block -= first_tau;
    C total = 0;
    for (int64_t i = threadIdx.x; i < all.batch && all.tau_partials; i += kProductThreads) {
      total += all.tau_partials[block * all.batch + i];
    }
    total = block_sum(total);
    if (threadIdx.x == 0) put_number(total, all.tau[block], all.tau_type);
    return;
  }
  int index = 0;
  for (; block >= tiles_of(all.linear[index]); ++index) block -= tiles_of(all.linear[index]);
  const WeightGrad<T, W> linear = all.linear[index];
  const Joined<T> grads{linear.grads, {nullptr, false}, linear.out, linear.out};
  const int across = tiles_across(linear), row0 = block / across * P::kRows, column0 = block % across * P::kColumns;

  constexpr int kParts = kProductThreads / P::kRows, kEach = P::kDepth / kParts;
  const int own = threadIdx.x % P::kRows, part = static_cast<int>(threadIdx.x) / P::kRows;
  C bias = 0;
  product_tile<P>(
      grads, all.batch, linear.input, all.batch, all.batch, row0, column0, sizeof(T) != 4 || !all.allow_tf32,
      [&](const C* rows) {
        if (column0 != 0) return;
        C sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += rows[(part * kEach + i) * P::kLeftPitch + own];
        bias += sum;
      },
      [&](int64_t row, int column, C value) {
        if (row >= linear.out || column >= linear.input.width) return;
        if (!trusted(value)) {
          value = 0;
#pragma unroll 1
          for (int64_t b = 0; b < all.batch; ++b) {
            value += entry(grads, b, static_cast<int>(row)) * entry(linear.input, b, column);
          }
        }
        narrow(value, linear.weight + row * linear.input.width + column);
      });
  if (column0 != 0) return;
  FASTMOD_SHARED(C, biases, kProductThreads);
  const C total = sum_of_rows<P::kRows>(bias, biases);
  if (part == 0 && row0 + own < linear.out) narrow(total, linear.bias + row0 + own);
}

}  // namespace

template <typename T, typename W>
cudaError_t mfnnr_weights(const WeightGrads<T, W>& grads, cudaStream_t stream) {
  if (grads.count > kWeightsTogether || grads.taus > kTausTogether) return cudaErrorInvalidValue;
  int64_t tiles = 0;
  for (int i = 0; i < grads.count; ++i) tiles += tiles_of(grads.linear[i]);
  if (grads.batch == 0 || tiles + grads.taus == 0) return cudaSuccess;
  const auto kernel = weights_kernel<T, W>;
  return FASTMOD_LAUNCH(kernel, blocks_for(tiles + grads.taus, 1), kProductThreads, stream, grads,
                        static_cast<int>(tiles));
}

#define FASTMOD_INSTANTIATE(T, W) template cudaError_t mfnnr_weights(const WeightGrads<T, W>&, cudaStream_t);
FASTMOD_INSTANTIATE(double, double)
FASTMOD_INSTANTIATE_STACKS

}  // namespace fastmod::cuda
