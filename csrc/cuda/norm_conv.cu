// norm_conv on tensor cores: implicit matrix products of pixels by channels; depthwise and fp64 go to
// norm_conv_plain.cu.
//
// Forward and the gradient of the input are one product. A block takes a tile of result pixels and up to 32 result
// channels of one expert and walks through the channels that are read, a chunk at a time. Of each chunk the pixels
// that the tile reads, border included, and the weights come into shared memory as they are (cp.async, while the chunk
// before is multiplied). From there they are packed once: scaled, shifted, rectified, gated, and laid out as the
// tensor cores want them, fp32 as two tf32 numbers each. The taps of the filter then only differ in where they begin
// to read.
//
// Tensor cores round towards zero when they add up. Sums of fp32 are therefore short ones, added by ordinary additions;
// the products with low parts, which are 2^11 times smaller, have sums of their own.
#include "conv_product.cuh"

namespace fastmod::cuda {
namespace {

__device__ inline int at_most(int value, int most) { return value < most ? value : most; }

// Pixels of a tile that are inside. Forward only: one class.
__device__ inline int pixels_inside(const Tiling& t, const Place& place, int64_t batch, int high, int wide) {
  const int64_t images = batch - place.b;
  return (images < (1 << t.log_b) ? static_cast<int>(images) : 1 << t.log_b) * at_most(high - place.y, 1 << t.log_h) *
         at_most(wide - place.x, 1 << t.log_w);
}

// Blocks: tiles x columns x experts. Scratch: mean and squares [E, tiles, out, 2].
template <typename T, int kM, int kN>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ Problem<T> p, const T* bias, T* y, float* mean, float* var, float* partials,
                   unsigned* tickets) {
  using Own = Product<T, kM, kN, false>;
  constexpr int kColumns = Own::kColumns, kRows = kThreads / kColumns;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  const int expert = blockIdx.z, column0 = blockIdx.y * kColumns;
  const Tiling& t = p.tiling;
  const Place place(t, blockIdx.x);
  const Window window = window_of(p.shape.kernel, p.shape.stride, false, 0);
  const Own product{p, place, window, window, memory, {t, p.chunk, p.shape.kernel, false, false}, expert, column0};
  fill_table(product.table(), t, place, window, window, p.shape.batch, p.shape.high, p.shape.wide,
             p.shape.shared ? 1 : p.shape.experts, p.shape.in);
  product.run();

  float* results = product.results();
  {
    constexpr int kFours = kColumns / 4;
    const int column = threadIdx.x % kFours * 4, channel = column0 + column, there = p.shape.out - channel;
    const int64_t filter = static_cast<int64_t>(expert) * p.shape.out + channel;
    const bool vector = by_four(y, p.shape.out) && there > 0;
    float offset[4] = {}, total[4] = {}, squares[4] = {};
    if (bias && there > 0) read_four(bias + filter, there, false, offset);
    T* own = y + expert * static_cast<int64_t>(p.out_high) * p.out_wide * p.shape.out + channel;
    const int64_t image = static_cast<int64_t>(p.shape.experts) * p.out_high * p.out_wide;
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      if (there <= 0 || pixel.b >= p.shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) continue;
      auto& result = *reinterpret_cast<Four<float>*>(results + i * Own::kPitch + column);
      T held[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        narrow(result.v[j] + offset[j], held + j);
        result.v[j] = widen(held[j]);
        total[j] += result.v[j];
      }
      write_four(held, there, vector, own + (pixel.b * image + pixel.y * p.out_wide + pixel.x) * p.shape.out);
    }
    if (!mean) return;
    const float count = static_cast<float>(pixels_inside(t, place, p.shape.batch, p.out_high, p.out_wide));
    sum_of_columns<kColumns>(total, sums);
#pragma unroll
    for (int j = 0; j < 4; ++j) total[j] /= count;
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      if (pixel.b >= p.shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) continue;
      const auto result = *reinterpret_cast<const Four<float>*>(results + i * Own::kPitch + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) squares[j] += (result.v[j] - total[j]) * (result.v[j] - total[j]);
    }
    sum_of_columns<kColumns>(squares, sums);
    float* left = partials + 3 * ((static_cast<int64_t>(expert) * gridDim.x + blockIdx.x) * p.shape.out + channel);
    if (threadIdx.x < kFours) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < there) Moments<float>{count, total[j], squares[j]}.write(left + 3 * j);
      }
    }
  }
  const int column = threadIdx.x % kColumns, channel = column0 + column, row = threadIdx.x / kColumns;
  const bool there = channel < p.shape.out;
  const int64_t filter = static_cast<int64_t>(expert) * p.shape.out + channel;
  const auto left_by = [&](int64_t block) {
    return partials + 3 * ((static_cast<int64_t>(expert) * gridDim.x + block) * p.shape.out + channel);
  };
  unsigned* ticket = tickets + (expert * gridDim.y + blockIdx.y) * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool all) {
    Moments<float> moments;
#pragma unroll 4
    for (int64_t block = first + row * static_cast<int64_t>(step); there && block < end; block += kRows * step) {
      moments.join(Moments<float>::read(left_by(block)));
    }
    float* shared = results;  // [kRows][kColumns][3]
    moments.write(shared + 3 * threadIdx.x);
    __syncthreads();
    if (!there || row > 0) return;
    for (int i = column + kColumns; i < kThreads; i += kColumns) {
      const Moments<float> other{shared[3 * i], shared[3 * i + 1], shared[3 * i + 2]};
      if (other.count > 0) moments.join(other);
    }
    if (!all) return moments.write(left_by(first));
    mean[filter] = moments.mean;
    var[filter] = moments.squares / moments.count;
  });
}

// Blocks: tiles x columns x experts; x shared: one block for all experts. Scratch: sums for scale and shift
// [2, E, tiles, in], then for the gate [E, B, tiles of an image, in].
template <typename T, int kM, int kN>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const __grid_constant__ Problem<T> p, T* grad_x, float* grad_scale, float* grad_shift,
                      T* grad_gate, float* partials, unsigned* tickets) {
  using Own = Product<T, kM, kN, true>;
  constexpr int kColumns = Own::kColumns, kRows = kThreads / kColumns;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  const Tiling& t = p.tiling;
  const ConvShape& shape = p.shape;
  const Place place(t, blockIdx.x);
  const Window wy = window_of(shape.kernel, shape.stride, true, place.parity_y);
  const Window wx = window_of(shape.kernel, shape.stride, true, place.parity_x);
  const bool shared = shape.shared;
  const int first_expert = shared ? 0 : blockIdx.z, end_expert = shared ? shape.experts : first_expert + 1;
  const int column0 = blockIdx.y * kColumns, column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  const int channel = column0 + column, spread = t.classes == 4 ? 2 : 1, per_image = t.across * t.down * t.classes;
  const bool there = channel < shape.in;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  const int64_t gates = shape.batch * per_image * shape.in;  // of an expert
  const bool backward_affine = grad_scale != nullptr, backward_gate = grad_gate != nullptr;
  constexpr int kFours = kColumns / 4;
  const int four = column0 + static_cast<int>(threadIdx.x) % kFours * 4, fours = shape.in - four;
  const bool vector_x = by_four(p.input.x, shape.in) && fours > 0, vector_grad = by_four(grad_x, shape.in) && fours > 0;
  float of_scale[4] = {}, of_shift[4] = {};
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const Own product{p, place, wy, wx, memory, {t, p.chunk, shape.kernel, p.grad.grad_var != nullptr, shared}, expert,
                      column0};
    if (expert == first_expert) {
      fill_table(product.table(), t, place, wy, wx, shape.batch, p.out_high, p.out_wide, shape.experts, shape.out);
    }
    product.run();
    float* results = product.results();
    Affine<float> affine[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < fours) affine[j] = affine_of(p.input, shape.in, expert, four + j);
    }
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      const int y = pixel.y * spread + place.parity_y, x = pixel.x * spread + place.parity_x;
      auto& result = *reinterpret_cast<Four<float>*>(results + i * Own::kPitch + four - column0);
      if (fours <= 0 || pixel.b >= shape.batch || y >= shape.high || x >= shape.wide) {
        result = {};
        continue;
      }
      const int64_t image = shared ? pixel.b : pixel.b * shape.experts + expert;
      const int64_t at = ((image * shape.high + y) * shape.wide + x) * shape.in + four;
      float read[4], of_x[4];
      read_four(p.input.x + at, fours, vector_x, read);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float before = affine[j].scale * read[j] + affine[j].shift, of_z = result.v[j];
        const bool gated = p.input.gate && j < fours;
        const float gate = gated ? gate_of(p.input, shape, pixel.b, expert, four + j) : 1.0f;
        const float of_value = p.input.relu && before <= 0.0f ? 0.0f : of_z * gate;
        result.v[j] = of_z * (p.input.relu ? rectified(before) : before);
        of_scale[j] += of_value * read[j];
        of_shift[j] += of_value;
        of_x[j] = of_value * affine[j].scale;
      }
      if (!grad_x) continue;
      if (shared) {
        auto& sum = *reinterpret_cast<Four<float>*>(product.found() + i * Own::kPitch + four - column0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (expert > 0) of_x[j] += sum.v[j];
          sum.v[j] = of_x[j];
        }
      }
      if (expert + 1 < end_expert) continue;
      T held[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow(of_x[j], held + j);
      write_four(held, fours, vector_grad, grad_x + at);
    }
    if (backward_affine && (p.input.scale_rows > 1 || expert + 1 == end_expert)) {
      sum_of_columns<kColumns>(of_scale, sums);
      sum_of_columns<kColumns>(of_shift, sums);
      const int to = shared && p.input.scale_rows == 1 ? 0 : expert;
      float* own = partials + to * each + static_cast<int64_t>(blockIdx.x) * shape.in + four;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (threadIdx.x < kFours && j < fours) {
          own[j] = of_scale[j];
          own[all + j] = of_shift[j];
        }
        of_scale[j] = of_shift[j] = 0;
      }
    }
    if (backward_gate) {
      __syncthreads();
      const int pixels = 1 << (t.log_h + t.log_w);
      for (int image = row; there && image < 1 << t.log_b && place.b + image < shape.batch; image += kRows) {
        float total = 0;
        for (int i = 0; i < pixels; ++i) total += results[(image * pixels + i) * Own::kPitch + column];
        partials[2 * all + expert * gates + ((place.b + image) * per_image + place.part) * shape.in + channel] = total;
      }
    }
  }
  if (backward_affine) {
    finish_affine<kColumns>(partials, grad_scale, grad_shift, tickets, shape, p.input.scale_rows, channel, sums);
  }
  if (!backward_gate) return;
  // The last of an image's blocks finishes its gates.
  unsigned* ticket = tickets + affine_tickets(gridDim.x, gridDim.y, shape.experts);
  const int64_t group = quotient(blockIdx.x, per_image);
  if (!last_to_arrive(ticket + (group * gridDim.z + blockIdx.z) * gridDim.y + blockIdx.y, per_image)) return;
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const float* part = partials + 2 * all + expert * gates + channel;
    for (int image = row; there && image < 1 << t.log_b && place.b + image < shape.batch; image += kRows) {
      float total = 0;
      for (int i = 0; i < per_image; ++i) total += fresh(part + ((place.b + image) * per_image + i) * shape.in);
      narrow(total, grad_gate + ((place.b + image) * shape.experts + expert) * shape.in + channel);
    }
  }
}

template <typename T>
int chunk_of(const ConvShape& shape) {
  return shape.kernel == 1 ? 2 * kStep<T> : kStep<T>;
}

Tiling product_tiling(const ConvShape& shape, bool backward) {
  const bool half = half_tiles(shape, backward);
  const int spread = backward ? shape.stride : 1;
  const int high = backward ? (shape.high + spread - 1) / spread : shape.out_high();
  const int wide = backward ? (shape.wide + spread - 1) / spread : shape.out_wide();
  return tiling_of(shape, backward, high, wide, half ? 6 : 7, half ? 300 : 256);
}
bool narrow_columns(const ConvShape& shape, bool backward) {
  return backward ? shape.shared || shape.in <= 16 : shape.out <= 16;
}

int column_blocks(const ConvShape& shape, bool backward) {
  const int each = narrow_columns(shape, backward) ? 16 : 32;
  return ((backward ? shape.in : shape.out) + each - 1) / each;
}

}  // namespace

template <typename T>
Scratch norm_conv_forward_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::forward_scratch<T>(shape);
  const int64_t tiles = product_tiling(shape, false).tiles;
  return {3 * tiles * shape.experts * shape.out,
          shape.experts * column_blocks(shape, false) * reduce_tickets<kGroup>(tiles)};
}
template <typename T>
Scratch norm_conv_backward_x_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::backward_x_scratch<T>(shape);
  const Tiling tiling = product_tiling(shape, true);
  const int columns = column_blocks(shape, true);
  const int64_t images = tiling.tiles / tiling.per_image();  // or groups of them
  return {(2 * tiling.tiles + shape.batch * tiling.per_image()) * shape.experts * shape.in,
          affine_tickets(tiling.tiles, columns, shape.experts) + images * shape.experts * columns};
}

template <typename T>
cudaError_t norm_conv_forward(ConvInput<T> input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                              Compute<T>* var, Compute<T>* scratch, unsigned* tickets, bool allow_tf32,
                              ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (on_tensor_cores<T>(shape)) {
      const Tiling tiling = product_tiling(shape, false);
      const int taps = shape.kernel * shape.kernel;
      const Problem<T> p{input, {}, weight, shape, shape.out_high(), shape.out_wide(), tiling, chunk_of<T>(shape),
                         aligned(input.x, shape.in), aligned(weight, static_cast<int64_t>(shape.in) * taps),
                         !allow_tf32};
      const auto run = [&](auto tiles_m, auto tiles_n) {
        constexpr int kM = decltype(tiles_m)::value, kN = decltype(tiles_n)::value;
        const typename Product<T, kM, kN, false>::Layout layout(tiling, p.chunk, shape.kernel, false, false);
        if (layout.end > kMaxShared) return cudaErrorInvalidValue;
        const unsigned columns = static_cast<unsigned>(column_blocks(shape, false));
        const dim3 grid(blocks_for(tiling.tiles, 1).x, columns, static_cast<unsigned>(shape.experts));
        const auto kernel = forward_kernel<T, kM, kN>;
        return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, kThreads, static_cast<size_t>(layout.end), stream, p, bias, y, mean,
                                      var, scratch, tickets);
      };
      using One = std::integral_constant<int, 1>;
      using Two = std::integral_constant<int, 2>;
      using Four = std::integral_constant<int, 4>;
      const bool few = narrow_columns(shape, false);
      if (half_tiles(shape, false)) return few ? run(One{}, Two{}) : run(One{}, Four{});
      return few ? run(Two{}, Two{}) : run(Two{}, Four{});
    }
  }
  return plain::forward<T>(input, weight, bias, y, mean, var, scratch, tickets, shape, stream);
}

template <typename T>
cudaError_t norm_conv_backward_x(ConvGrad<T> grad, ConvInput<T> input, const T* weight, T* grad_x,
                                 Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                                 unsigned* tickets, bool allow_tf32, ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (on_tensor_cores<T>(shape)) {
      const Tiling tiling = product_tiling(shape, true);
      const int taps = shape.kernel * shape.kernel;
      const bool vector = aligned(grad.grad, shape.out) && (!grad.grad_var || aligned(grad.y, shape.out));
      const Problem<T> p{input, grad, weight, shape, shape.out_high(), shape.out_wide(), tiling, chunk_of<T>(shape),
                         vector, aligned(weight, static_cast<int64_t>(shape.in) * taps), !allow_tf32};
      const auto run = [&](auto tiles_n) {
        constexpr int kN = decltype(tiles_n)::value;
        const typename Product<T, 2, kN, true>::Layout layout(tiling, p.chunk, shape.kernel, grad.grad_var != nullptr,
                                                                 shape.shared);
        if (layout.end > kMaxShared) return cudaErrorInvalidValue;
        const unsigned columns = static_cast<unsigned>(column_blocks(shape, true));
        const unsigned experts = shape.shared ? 1 : static_cast<unsigned>(shape.experts);
        const dim3 grid(blocks_for(tiling.tiles, 1).x, columns, experts);
        const auto kernel = backward_x_kernel<T, 2, kN>;
        return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, kThreads, static_cast<size_t>(layout.end), stream, p, grad_x,
                                      grad_scale, grad_shift, grad_gate, scratch, tickets);
      };
      if (narrow_columns(shape, true)) return run(std::integral_constant<int, 2>{});
      return run(std::integral_constant<int, 4>{});
    }
  }
  return plain::backward_x<T>(grad, input, weight, grad_x, grad_scale, grad_shift, grad_gate, scratch, tickets, shape,
                              stream);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template Scratch norm_conv_forward_scratch<T>(ConvShape);                                                            \
  template Scratch norm_conv_backward_x_scratch<T>(ConvShape);                                                         \
  template cudaError_t norm_conv_forward<T>(ConvInput<T>, const T*, const T*, T*, Compute<T>*, Compute<T>*,            \
                                            Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);                    \
  template cudaError_t norm_conv_backward_x<T>(ConvGrad<T>, ConvInput<T>, const T*, T*, Compute<T>*, Compute<T>*, T*,  \
                                               Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
