// Linear layers of MFNNRs that smfr.cu cannot serve: forward with bias and LeakyReLU, backward with its slope. See
// mfnnr.cuh.
#include "mfnnr.cuh"

namespace fastmod::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kProductThreads, 2)
    linear_kernel(const __grid_constant__ Joined<T> input, const T* weight, const T* bias, Compute<T>* result, T* copy,
                  bool leaky, int64_t batch, int out, bool precise) {
  using C = Compute<T>;
  using P = ProductTile<T, kOfInput>;
  const Joined<T> weights{nullptr, weight, 0, input.width};
  const int across = (out + P::kColumns - 1) / P::kColumns;
  const int64_t block = blockIdx.x, tile = quotient(block, across);
  product_tile<T, kOfInput>(
      input, batch, weights, out, input.width, tile * P::kRows, (block - tile * across) * P::kColumns, precise,
      [](const C*) {},
      [&](int64_t row, int column, C value) {
        if (row >= batch || column >= out) return;
        if (!trusted(value)) {
          value = 0;
#pragma unroll 1
          for (int k = 0; k < input.width; ++k) value += entry(input, row, k) * entry(weights, column, k);
        }
        value += widen(bias[column]);
        if (leaky && !(value > C(0))) value *= C(kLeakySlope);
        result[row * out + column] = value;
        if (copy) narrow(value, copy + row * out + column);
      });
}

template <typename T>
__global__ void __launch_bounds__(kProductThreads, 2)
    linear_backward_kernel(const Compute<T>* grads, const T* weight, const __grid_constant__ InputGrad<T> result,
                           int64_t batch, int out, int in, int columns, bool precise) {
  using C = Compute<T>;
  using P = ProductTile<T, kOfGrads>;
  const Joined<T> weights{nullptr, weight, 0, in}, above{grads, nullptr, out, out};
  const int across = (columns + P::kColumns - 1) / P::kColumns;
  const int64_t block = blockIdx.x, tile = quotient(block, across);
  product_tile<T, kOfGrads>(
      above, batch, weights, out, out, tile * P::kRows, (block - tile * across) * P::kColumns, precise,
      [](const C*) {},
      [&](int64_t row, int column, C value) {
        if (row >= batch || column >= columns) return;
        if (!trusted(value)) {
          value = 0;
#pragma unroll 1
          for (int k = 0; k < out; ++k) value += entry(above, row, k) * entry(weights, k, column);
        }
        if (column >= result.first) {
          result.rest[row * (in - result.first) + column - result.first] = value;
          return;
        }
        const int64_t at = row * result.first + column;
        if (result.hidden && !(result.hidden[at] > C(0))) value *= C(kLeakySlope);
        if (result.base) value += result.base[at];
        if (result.wide) {
          result.wide[at] = value;
        } else {
          narrow(value, result.narrow + at);
        }
      });
}

template <typename T>
constexpr bool precise(bool allow_tf32) {
  return sizeof(T) != 4 || !allow_tf32;
}
// Tiles of the batch times those of the columns.
template <typename P>
dim3 tiles_for(int64_t batch, int columns) {
  const int64_t across = (columns + P::kColumns - 1) / P::kColumns, down = (batch + P::kRows - 1) / P::kRows;
  return blocks_for(across * down, 1);
}

}  // namespace

template <typename T>
cudaError_t mfnnr_linear(Joined<T> input, const T* weight, const T* bias, Compute<T>* result, T* copy, bool leaky,
                         int64_t batch, int out, bool allow_tf32, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  const dim3 grid = tiles_for<ProductTile<T, kOfInput>>(batch, out);
  return FASTMOD_LAUNCH(linear_kernel<T>, grid, kProductThreads, stream, input, weight, bias, result, copy, leaky, batch,
                        out, precise<T>(allow_tf32));
}

template <typename T>
cudaError_t mfnnr_linear_backward(const Compute<T>* grads, const T* weight, InputGrad<T> result, int64_t batch, int out,
                                  int in, bool allow_tf32, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  const int columns = result.rest ? in : result.first;
  const dim3 grid = tiles_for<ProductTile<T, kOfGrads>>(batch, columns);
  return FASTMOD_LAUNCH(linear_backward_kernel<T>, grid, kProductThreads, stream, grads, weight, result, batch, out, in,
                        columns, precise<T>(allow_tf32));
}

#define FASTMOD_INSTANTIATE(T)                                                                                    \
  template cudaError_t mfnnr_linear<T>(Joined<T>, const T*, const T*, Compute<T>*, T*, bool, int64_t, int, bool,  \
                                       cudaStream_t);                                                             \
  template cudaError_t mfnnr_linear_backward<T>(const Compute<T>*, const T*, InputGrad<T>, int64_t, int, int, bool, \
                                                cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
