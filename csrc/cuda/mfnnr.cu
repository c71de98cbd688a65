// Linear layers of MFNNRs that smfr.cu cannot handle: forward with bias and LeakyReLU, backward with its slope. See
// mfnnr.cuh.
#include "mfnnr.cuh"

namespace fastmod::cuda {
namespace {

template <typename T, typename W>
__global__ void __launch_bounds__(kProductThreads, 2)
    linear_kernel(const __grid_constant__ Joined<T> input, const W* weight, const W* bias, Compute<T>* result, T* copy,
                  bool leaky, int64_t batch, int out, bool precise) {
  using C = Compute<T>;
  using P = ProductTile<T, W, kOfInput>;
  const Joined<W> weights{nullptr, {weight, false}, 0, input.width};
  const int across = (out + P::kColumns - 1) / P::kColumns;
  const int64_t block = blockIdx.x, tile = quotient(block, across);
  product_tile<P>(
      input, batch, weights, out, input.width, tile * P::kRows, (block - tile * across) * P::kColumns, precise,
      [](const C*) {},
      [&](int64_t row, int column, C value) {
        if (row >= batch || column >= out) return;
        if (!trusted(value)) {
          value = 0;
#pragma unroll 1
          for (int k = 0; k < input.width; ++k) {
            value += entry(input, row, k) * read_as<T>(weight[static_cast<int64_t>(column) * input.width + k]);
          }
        }
        value += read_as<T>(bias[column]);
        if (leaky && !(value > C(0))) value *= C(kLeakySlope);
        result[row * out + column] = value;
        if (copy) narrow(value, copy + row * out + column);
      });
}

template <typename T, typename W>
__global__ void __launch_bounds__(kProductThreads, 2)
    linear_backward_kernel(const Compute<T>* grads, const W* weight, const __grid_constant__ InputGrad<T> result,
                           int64_t batch, int out, int in, int columns, bool precise) {
  using C = Compute<T>;
  using P = ProductTile<T, W, kOfGrads>;
  const Joined<W> weights{nullptr, {weight, false}, 0, in};
  const Joined<T> above{grads, {nullptr, false}, out, out};
  const int across = (columns + P::kColumns - 1) / P::kColumns;
  const int64_t block = blockIdx.x, tile = quotient(block, across);
  product_tile<P>(
      above, batch, weights, out, out, tile * P::kRows, (block - tile * across) * P::kColumns, precise,
      [](const C*) {},
      [&](int64_t row, int column, C value) {
        if (row >= batch || column >= columns) return;
        if (!trusted(value)) {
          value = 0;
#pragma unroll 1
          for (int k = 0; k < out; ++k) {
            value += entry(above, row, k) * read_as<T>(weight[static_cast<int64_t>(k) * in + column]);
          }
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
// Tiles of the batch times tiles of the columns.
template <typename P>
dim3 tiles_for(int64_t batch, int columns) {
  const int64_t across = (columns + P::kColumns - 1) / P::kColumns, down = (batch + P::kRows - 1) / P::kRows;
  return blocks_for(across * down, 1);
}

}  // namespace

template <typename T, typename W>
cudaError_t mfnnr_linear(Joined<T> input, const W* weight, const W* bias, Compute<T>* result, T* copy, bool leaky,
                         int64_t batch, int out, bool allow_tf32, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  const dim3 grid = tiles_for<ProductTile<T, W, kOfInput>>(batch, out);
  const auto kernel = linear_kernel<T, W>;
  return FASTMOD_LAUNCH(kernel, grid, kProductThreads, stream, input, weight, bias, result, copy, leaky, batch, out,
                        precise<T>(allow_tf32));
}

template <typename T, typename W>
cudaError_t mfnnr_linear_backward(const Compute<T>* grads, const W* weight, InputGrad<T> result, int64_t batch, int out,
                                  int in, bool allow_tf32, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  const int columns = result.rest ? in : result.first;
  const dim3 grid = tiles_for<ProductTile<T, W, kOfGrads>>(batch, columns);
  const auto kernel = linear_backward_kernel<T, W>;
  return FASTMOD_LAUNCH(kernel, grid, kProductThreads, stream, grads, weight, result, batch, out, in, columns,
                        precise<T>(allow_tf32));
}

#define FASTMOD_INSTANTIATE(T, W)                                                                                 \
  template cudaError_t mfnnr_linear<T>(Joined<T>, const W*, const W*, Compute<T>*, T*, bool, int64_t, int, bool,  \
                                       cudaStream_t);                                                             \
  template cudaError_t mfnnr_linear_backward<T>(const Compute<T>*, const W*, InputGrad<T>, int64_t, int, int, bool, \
                                                cudaStream_t);
FASTMOD_INSTANTIATE(double, double)
FASTMOD_INSTANTIATE_STACKS

}  // namespace fastmod::cuda
