// entropy_penalty: entropies of softmax rows, one warp per row. There are only a few numbers, so all is in fp64.
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsEach = 16;  // per block in the forward

// Sums of one row, in u = largest logit - logit: the entropy is log(1 + sum of the others) + mean of u under the
// softmax. All terms are positive, so that none cancels near one-hot.
template <typename T>
struct Row {
  const T* x;
  int64_t count, top;
  double largest, others, mean;  // others: sum of exp(-u) without the largest

  // Called by all lanes of a warp, which all get the same values.
  __device__ Row(const T* x_, int64_t count_) : x(x_), count(count_), top(count_), largest(-INFINITY) {
    const int lane = threadIdx.x % kWarp;
    for (int64_t k = lane; k < count; k += kWarp) {
      const double value = widen(x[k]);
      if (top == count || above(value, largest)) take(value, k);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const double value = __shfl_xor_sync(kAllLanes, largest, offset);
      const int64_t k = __shfl_xor_sync(kAllLanes, top, offset);
      if (k < count && (top == count || above(value, largest) || (!above(largest, value) && k < top))) take(value, k);
    }
    double sum = 0;
    others = 0;
    for (int64_t k = lane; k < count; k += kWarp) {
      const double value = widen(x[k]);
      if ((k == top && value == value) || gone(value)) continue;
      others += weight(value);
      sum += weight(value) * (largest - value);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      others += __shfl_xor_sync(kAllLanes, others, offset);
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    mean = sum / (1 + others);
  }
  static __device__ bool above(double a, double b) { return !(a <= b) && b == b; }  // a NaN counts as the largest
  __device__ void take(double value, int64_t k) {
    largest = value;
    top = k;
  }
  // A logit of -inf does not count, unless all are -inf.
  __device__ bool gone(double value) const { return value == -INFINITY && largest != -INFINITY; }
  __device__ double weight(double value) const { return exp(value - largest); }
  __device__ double entropy() const { return log1p(others) + mean; }
  __device__ double slope(double value) const {
    return gone(value) ? 0 : weight(value) / (1 + others) * (largest - value - mean);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const T* logits, int64_t rows, int64_t count, Compute<T>* total, Compute<T>* partials,
                   unsigned* tickets) {
  using C = Compute<T>;
  FASTMOD_SHARED(double, sums, kThreads);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double sum = 0;
  for (int i = warp; i < kRowsEach; i += kWarps) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsEach + i;
    if (row < rows) sum += Row<T>(logits + row * count, count).entropy();
  }
  sum = sum_of_rows<1>(lane == 0 ? sum : 0.0, sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = static_cast<C>(sum);
  reduce_in_order<kGroup>(tickets, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool last) {
    double found = 0;
    for (int64_t i = first + threadIdx.x * static_cast<int64_t>(step); i < end; i += kThreads * step) {
      found += fresh(partials + i);
    }
    found = sum_of_rows<1>(found, sums);
    if (threadIdx.x == 0) *(last ? total : partials + first) = static_cast<C>(found);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const Compute<T>* grad, const T* logits, int64_t rows, int64_t count, T* grad_logits) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= rows) return;  // all lanes of a warp
  const Row<T> found(logits + row * count, count);
  const double scale = *grad;
  for (int64_t k = threadIdx.x % kWarp; k < count; k += kWarp) {
    narrow(static_cast<Compute<T>>(scale * found.slope(widen(found.x[k]))), grad_logits + row * count + k);
  }
}

int64_t blocks_of(int64_t rows) { return (rows + kRowsEach - 1) / kRowsEach; }

}  // namespace

template <typename T>
Scratch entropy_penalty_forward_scratch(int64_t rows) {
  return {blocks_of(rows), reduce_tickets<kGroup>(blocks_of(rows))};
}

template <typename T>
cudaError_t entropy_penalty_forward(const T* logits, int64_t rows, int64_t count, Compute<T>* total,
                                    Compute<T>* scratch, unsigned* tickets, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(forward_kernel<T>, blocks_for(rows, kRowsEach), kThreads, stream, logits, rows, count, total,
                        scratch, tickets);
}

template <typename T>
cudaError_t entropy_penalty_backward(const Compute<T>* grad, const T* logits, int64_t rows, int64_t count,
                                     T* grad_logits, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_kernel<T>, blocks_for(rows, kWarps), kThreads, stream, grad, logits, rows, count,
                        grad_logits);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template Scratch entropy_penalty_forward_scratch<T>(int64_t);                                                        \
  template cudaError_t entropy_penalty_forward<T>(const T*, int64_t, int64_t, Compute<T>*, Compute<T>*, unsigned*,     \
                                                  cudaStream_t);                                                       \
  template cudaError_t entropy_penalty_backward<T>(const Compute<T>*, const T*, int64_t, int64_t, T*, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
