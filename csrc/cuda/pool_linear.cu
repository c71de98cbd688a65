// The end of a gater or of a net: relu(scale * x + shift), the mean over regions, a linear layer and maybe a softmax.
//
// A block has one image: its lanes are channels, its warps share regions and pixels. Gradients of the parameters are
// sums over images, which the last block to finish adds up in a fixed order.
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRun = 32;  // pixels per partial sum: short sums lose fewer digits

// Region i of `count` along `size` pixels, as in torch.nn.functional.adaptive_avg_pool2d: regions may overlap.
struct Region {
  int begin, end;
  __device__ Region(int i, int count, int size)
      : begin(static_cast<int>(static_cast<int64_t>(i) * size / count)),
        end(static_cast<int>((static_cast<int64_t>(i + 1) * size + count - 1) / count)) {}
};

template <typename T>
struct Image {
  using C = Compute<T>;
  const HeadInput<T>& input;
  const HeadShape& shape;
  const T* x;

  __device__ Image(const HeadInput<T>& input_, const HeadShape& shape_, int64_t b)
      : input(input_), shape(shape_), x(input_.x + b * shape_.high * shape_.wide * shape_.channels) {}
  __device__ C before(int64_t at, int channel) const {
    const C value = widen(x[at]);
    return input.scale ? input.scale[channel] * value + input.shift[channel] : value;
  }
  __device__ int features() const { return shape.channels * shape.pooled * shape.pooled; }

  // Means over the regions, [channel][region]; visible to all threads on return.
  __device__ void pool(C* to) const {
    const int lane = threadIdx.x % kWarp, regions = shape.pooled * shape.pooled;
    const int groups = (shape.channels + kWarp - 1) / kWarp;
    for (int i = threadIdx.x / kWarp; i < groups * regions; i += kWarps) {
      const int region = i % regions, channel = i / regions * kWarp + lane;
      if (channel >= shape.channels) continue;
      const Region rows(region / shape.pooled, shape.pooled, shape.high);
      const Region columns(region % shape.pooled, shape.pooled, shape.wide);
      C total = 0, part = 0;
      int run = 0;
      for (int y = rows.begin; y < rows.end; ++y) {
        for (int column = columns.begin; column < columns.end; ++column) {
          const C value = before((static_cast<int64_t>(y) * shape.wide + column) * shape.channels + channel, channel);
          part += input.relu ? rectified(value) : value;
          if (++run % kRun == 0) {
            total += part;
            part = 0;
          }
        }
      }
      to[channel * regions + region] = (total + part) / C((rows.end - rows.begin) * (columns.end - columns.begin));
    }
    __syncthreads();
  }
};

template <typename C>
__device__ inline C warp_sum(C value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// The linear layer on the means, and its softmax if there is one; visible to all threads on return. The layer's outputs
// are in `results`; `most` and `sum` turn them into shares.
template <typename T>
struct Shares {
  using C = Compute<T>;
  C most = 0, sum = 1;
  bool softmax;
  __device__ Shares(const HeadInput<T>& input, const HeadShape& shape, int features, const C* pooled, C* results)
      : softmax(shape.softmax) {
    const int lane = threadIdx.x % kWarp;
    for (int o = threadIdx.x / kWarp; o < shape.outputs; o += kWarps) {
      C total = 0;
      for (int f = lane; f < features; f += kWarp) {
        total += pooled[f] * widen(input.weight[static_cast<int64_t>(o) * features + f]);
      }
      total = warp_sum(total);
      if (lane == 0) results[o] = total + (input.bias ? widen(input.bias[o]) : C(0));
    }
    __syncthreads();
    if (!softmax) return;
    most = results[0];
    sum = 0;
    for (int o = 1; o < shape.outputs; ++o) most = results[o] > most || results[o] != results[o] ? results[o] : most;
    for (int o = 0; o < shape.outputs; ++o) sum += exponential(results[o] - most);
  }
  __device__ C of(C result) const { return softmax ? exponential(result - most) / sum : result; }
};

// Shared memory: features, then outputs.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ HeadInput<T> input, T* out, const __grid_constant__ HeadShape shape) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  const Image<T> image(input, shape, blockIdx.x);
  C* pooled = reinterpret_cast<C*>(memory);
  const int features = image.features();
  C* results = pooled + features;
  image.pool(pooled);
  const Shares<T> shares(input, shape, features, pooled, results);
  for (int o = threadIdx.x; o < shape.outputs; o += kThreads) {
    narrow(shares.of(results[o]), out + static_cast<int64_t>(blockIdx.x) * shape.outputs + o);
  }
}

// Scratch: gradients of the linear layer's results [B, outputs], means [B, features], then sums for scale and shift
// [2, B, channels].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const T* grad, const __grid_constant__ HeadInput<T> input,
                    const __grid_constant__ HeadGrads<T> grads, Compute<T>* scratch, unsigned* ticket,
                    const __grid_constant__ HeadShape shape) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(C, sums, kThreads);
  const int64_t b = blockIdx.x;
  const Image<T> image(input, shape, b);
  const int features = image.features(), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int regions = shape.pooled * shape.pooled;
  C* pooled = reinterpret_cast<C*>(memory);
  C* results = pooled + features;  // gradients of the results
  C* all_results = scratch;
  C* all_pooled = all_results + shape.batch * shape.outputs;
  C* of_scale = all_pooled + shape.batch * features;
  C* of_shift = of_scale + shape.batch * shape.channels;
  grad += b * shape.outputs;
  if (grads.weight || shape.softmax) image.pool(pooled);
  for (int f = threadIdx.x; grads.weight && f < features; f += kThreads) all_pooled[b * features + f] = pooled[f];
  if (shape.softmax) {  // recomputed, as what the forward wrote was rounded
    const Shares<T> shares(input, shape, features, pooled, results);
    C weighted = 0;
    for (int o = 0; o < shape.outputs; ++o) weighted += widen(grad[o]) * shares.of(results[o]);
    __syncthreads();  // all have read them
    for (int o = threadIdx.x; o < shape.outputs; o += kThreads) {
      results[o] = shares.of(results[o]) * (widen(grad[o]) - weighted);
    }
  } else {
    for (int o = threadIdx.x; o < shape.outputs; o += kThreads) results[o] = widen(grad[o]);
  }
  __syncthreads();
  for (int o = threadIdx.x; o < shape.outputs; o += kThreads) all_results[b * shape.outputs + o] = results[o];
  for (int f = threadIdx.x; f < features; f += kThreads) {  // per pixel of the region
    const Region rows(f % regions / shape.pooled, shape.pooled, shape.high);
    const Region columns(f % shape.pooled, shape.pooled, shape.wide);
    C sum = 0;
    for (int o = 0; o < shape.outputs; ++o) {
      sum += results[o] * widen(input.weight[static_cast<int64_t>(o) * features + f]);
    }
    pooled[f] = sum / C((rows.end - rows.begin) * (columns.end - columns.begin));
  }
  __syncthreads();
  for (int first = 0; first < shape.channels; first += kWarp) {
    const int channel = first + lane;
    const bool there = channel < shape.channels;
    C total_scale = 0, total_shift = 0;
    for (int pixel = warp; there && pixel < shape.high * shape.wide; pixel += kWarps) {
      const int y = pixel / shape.wide, column = pixel - y * shape.wide;
      C of_value = 0;
      for (int i = 0; i < shape.pooled; ++i) {
        const Region rows(i, shape.pooled, shape.high);
        for (int j = 0; j < shape.pooled; ++j) {
          const Region columns(j, shape.pooled, shape.wide);
          const bool inside = y >= rows.begin && y < rows.end && column >= columns.begin && column < columns.end;
          if (inside) of_value += pooled[channel * regions + i * shape.pooled + j];
        }
      }
      const int64_t at = static_cast<int64_t>(pixel) * shape.channels + channel;
      if (input.relu && image.before(at, channel) <= C(0)) of_value = 0;
      total_scale += of_value * widen(image.x[at]);
      total_shift += of_value;
      if (!grads.x) continue;
      const C of_x = input.scale ? of_value * input.scale[channel] : of_value;
      narrow(of_x, grads.x + (b * shape.high * shape.wide * shape.channels + at));
    }
    if (!grads.scale) continue;
    total_scale = sum_of_rows<kWarp>(total_scale, sums);
    total_shift = sum_of_rows<kWarp>(total_shift, sums);
    if (there && warp == 0) of_scale[b * shape.channels + channel] = total_scale;
    if (there && warp == 0) of_shift[b * shape.channels + channel] = total_shift;
  }
  if (!grads.weight && !grads.bias && !grads.scale) return;
  if (!last_to_arrive(ticket, gridDim.x)) return;
  for (int i = threadIdx.x; grads.weight && i < shape.outputs * features; i += kThreads) {
    const int o = i / features, f = i - o * features;
    C sum = 0;
#pragma unroll 4
    for (int64_t k = 0; k < shape.batch; ++k) {
      sum += fresh(all_results + k * shape.outputs + o) * fresh(all_pooled + k * features + f);
    }
    narrow(sum, grads.weight + i);
  }
  for (int o = threadIdx.x; grads.bias && o < shape.outputs; o += kThreads) {
    C sum = 0;
    for (int64_t k = 0; k < shape.batch; ++k) sum += fresh(all_results + k * shape.outputs + o);
    narrow(sum, grads.bias + o);
  }
  for (int channel = threadIdx.x; grads.scale && channel < shape.channels; channel += kThreads) {
    C total_scale = 0, total_shift = 0;
    for (int64_t k = 0; k < shape.batch; ++k) {
      total_scale += fresh(of_scale + k * shape.channels + channel);
      total_shift += fresh(of_shift + k * shape.channels + channel);
    }
    grads.scale[channel] = total_scale;
    grads.shift[channel] = total_shift;
  }
}

template <typename T>
int64_t bytes_of(const HeadShape& shape) {
  const int64_t features = static_cast<int64_t>(shape.channels) * shape.pooled * shape.pooled;
  return (features + shape.outputs) * static_cast<int64_t>(sizeof(Compute<T>));
}

}  // namespace

template <typename T>
bool pool_linear_fits(HeadShape shape) {
  return bytes_of<T>(shape) <= 32 * 1024;
}

template <typename T>
cudaError_t pool_linear_forward(HeadInput<T> input, T* out, HeadShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if (!pool_linear_fits<T>(shape)) return cudaErrorInvalidValue;
  return FASTMOD_LAUNCH_DYNAMIC(forward_kernel<T>, blocks_for(shape.batch, 1), kThreads,
                                static_cast<size_t>(bytes_of<T>(shape)), stream, input, out, shape);
}

template <typename T>
Scratch pool_linear_backward_scratch(HeadShape shape) {
  const int64_t features = static_cast<int64_t>(shape.channels) * shape.pooled * shape.pooled;
  return {shape.batch * (shape.outputs + features + 2 * shape.channels), 1};
}

template <typename T>
cudaError_t pool_linear_backward(const T* grad, HeadInput<T> input, HeadGrads<T> grads, Compute<T>* scratch,
                                 unsigned* ticket, HeadShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if (!pool_linear_fits<T>(shape)) return cudaErrorInvalidValue;
  return FASTMOD_LAUNCH_DYNAMIC(backward_kernel<T>, blocks_for(shape.batch, 1), kThreads,
                                static_cast<size_t>(bytes_of<T>(shape)), stream, grad, input, grads, scratch, ticket,
                                shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                                  \
  template bool pool_linear_fits<T>(HeadShape);                                                                 \
  template cudaError_t pool_linear_forward<T>(HeadInput<T>, T*, HeadShape, cudaStream_t);                       \
  template Scratch pool_linear_backward_scratch<T>(HeadShape);                                                  \
  template cudaError_t pool_linear_backward<T>(const T*, HeadInput<T>, HeadGrads<T>, Compute<T>*, unsigned*,    \
                                               HeadShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
