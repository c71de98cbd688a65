// norm_conv on tensor cores: implicit matrix products of pixels and channels. Depthwise convolutions and fp64 are in
// norm_conv_plain.cu, which leaves depthwise 3x3 to norm_conv_depthwise.cu.
//
// The forward and the gradient of the input are the same product. A block takes a tile of result pixels and up to 32
// result channels of one expert and walks through the channels that are read, a chunk at a time. For each chunk, the
// pixels that the tile reads (with its border) and the weights are copied unchanged into shared memory (cp.async, while
// the previous chunk is multiplied). From there they are packed once: scaled, shifted, rectified, gated, and arranged
// in the layout of the tensor cores, fp32 as two tf32 numbers each. The taps of the filter then differ only in where
// they start to read.
//
// With stride 2, pixels of the gradient of the input fall into four classes, by the parities of row and column, each
// with taps of its own: one, two, two and four. Each warp has a class, and all read one tile of the gradient.
//
// If there are more channels and still enough blocks, a block has twice the warps and 64 result channels: pixels are
// then read and packed only once for them.
//
// Several independent convolutions share a launch (conv_group.cuh).
//
// Tensor cores round towards zero when they accumulate. fp32 sums are therefore short, and ordinary additions combine
// them; the products with low parts, which are 2^11 times smaller, have their own sums.
#include "conv_group.cuh"
#include "conv_product.cuh"

namespace fastmod::cuda {
namespace {

__device__ inline int at_most(int value, int most) { return value < most ? value : most; }

__host__ __device__ inline bool narrow_columns(const ConvShape& shape, bool backward) {
  return backward ? shape.shared || shape.in <= 16 : shape.out <= 16;
}

// Whether blocks of 64 columns leave few of them empty. If experts share x, the sums over them are in shared memory;
// and classes of pixels would take registers that the others do not need.
bool wide_columns(const ConvShape& shape, bool backward) {
  const int columns = backward ? shape.in : shape.out, rest = columns % 64;
  return columns > 32 && (rest == 0 || rest > 32) && !(backward && (shape.shared || shape.stride == 2));
}
constexpr int kOwnShared = 4096;       // what kernels declare statically
constexpr int64_t kEnoughBlocks = 96;  // for a GPU; fewer blocks of twice the size would leave more of it idle

template <typename Own, typename T>
__host__ __device__ inline typename Own::Layout layout_of(const Problem<T>& p) {
  const bool both = Own::kBackwards ? p.grad.y != nullptr : p.input.residual != nullptr;
  return {p.tiling, p.chunk, p.shape.kernel, both, Own::kBackwards && p.shape.shared};
}

// How many pixels of a tile are inside. Forward only, where there is one class of them.
__device__ inline int pixels_inside(const Tiling& t, const Place& place, int64_t batch, int high, int wide) {
  const int64_t images = batch - place.b;
  return (images < (1 << t.log_b) ? static_cast<int>(images) : 1 << t.log_b) * at_most(high - place.y, 1 << t.log_h) *
         at_most(wide - place.x, 1 << t.log_w);
}

template <typename T>
struct ForwardTask {
  Problem<T> p;
  const T* bias;
  T* y;
  float* mean;
  float* var;
  float* partials;
  unsigned* tickets;
  BatchNorm<float> norm;
  Share share;
};

// Blocks: tiles x columns x experts. Scratch: mean and squares [E, tiles, out, 2].
template <typename T, int kM, int kN, int kSides>
__device__ void forward(const ForwardTask<T>& task, const Block& block, unsigned char* memory, float* sums) {
  using Own = Product<T, kM, kN, false, kSides>;
  constexpr int kThreads = Own::kThreads, kColumns = Own::kColumns, kRows = kThreads / kColumns;
  const Problem<T>& p = task.p;
  const int expert = block.z, column0 = block.y * kColumns;
  const Tiling& t = p.tiling;
  const Place place(t, block.x);
  const Own product{p, place, memory, layout_of<Own>(p), expert, column0, 0};
  const Window window = window_of(p.shape.kernel, p.shape.stride, false);
  fill_table(product.table(), t, place, window, p.shape.batch, p.shape.high, p.shape.wide,
             p.shape.shared ? 1 : p.shape.experts, p.shape.in);
  product.run();

  float* results = product.results();
  {
    constexpr int kFours = kColumns / 4;
    const int column = threadIdx.x % kFours * 4, channel = column0 + column, there = p.shape.out - channel;
    const int64_t filter = static_cast<int64_t>(expert) * p.shape.out + channel;
    const bool vector = by_four(task.y, p.shape.out) && there > 0;
    float offset[4] = {}, total[4] = {}, squares[4] = {};
    if (task.bias && there > 0) read_four(task.bias + filter, there, false, offset);
    T* own = task.y + expert * static_cast<int64_t>(p.out_high) * p.out_wide * p.shape.out + channel;
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
    if (!task.mean) return;
    const float count = static_cast<float>(pixels_inside(t, place, p.shape.batch, p.out_high, p.out_wide));
    sum_of_columns<kColumns, kSides>(total, sums);
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
    sum_of_columns<kColumns, kSides>(squares, sums);
    float* left = task.partials + 3 * ((static_cast<int64_t>(expert) * block.across + block.x) * p.shape.out + channel);
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
  const auto left_by = [&](int64_t other) {
    return task.partials + 3 * ((static_cast<int64_t>(expert) * block.across + other) * p.shape.out + channel);
  };
  unsigned* ticket = task.tickets + (expert * block.down + block.y) * reduce_tickets<kGroup>(block.across);
  reduce_in_order<kGroup>(ticket, block.x, block.across, [&](unsigned first, unsigned end, unsigned step, bool all) {
    Moments<float> moments;
#pragma unroll 4
    for (int64_t other = first + row * static_cast<int64_t>(step); there && other < end; other += kRows * step) {
      moments.join(Moments<float>::read(left_by(other)));
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
    task.mean[filter] = moments.mean;
    task.var[filter] = moments.squares / moments.count;
    if (task.norm.scale) finish_norm(task.norm, filter, moments.mean, moments.squares / moments.count);
  });
}

// Calls run(tiles of 16 pixels per warp, tiles of 8 columns, classes of pixels) for a convolution.
#pragma nv_exec_check_disable  // run is host or device code, like the caller
template <int kSides, bool kBackward, typename Run>
__host__ __device__ auto by_form(const ConvShape& shape, Run run) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Four = std::integral_constant<int, 4>;
  const bool few = kSides == 1 && narrow_columns(shape, kBackward);
  if constexpr (kBackward) {
    if constexpr (kSides == 1) {
      if (shape.stride == 2) return few ? run(Two{}, Two{}, Four{}) : run(Two{}, Four{}, Four{});
    }
  } else if (half_tiles(shape)) {
    if constexpr (kSides == 1) {
      if (few) return run(One{}, Two{}, One{});
    }
    return run(One{}, Four{}, One{});
  }
  if constexpr (kSides == 1) {
    if (few) return run(Two{}, Two{}, One{});
  }
  return run(Two{}, Four{}, One{});
}

// Bytes of shared memory; for by_form.
template <typename T, bool kBackward, int kSides>
struct Bytes {
  const Problem<T>& p;
  template <typename M, typename N, typename Classes>
  __host__ __device__ int operator()(M, N, Classes) const {
    return layout_of<Product<T, M::value, N::value, kBackward, kSides, Classes::value>>(p).end;
  }
};

template <typename T, int kSides>
__device__ void forward_of(const Group<ForwardTask<T>>& group, unsigned char* memory, float* sums) {
  const ForwardTask<T>& task = own_task(group);
  const Block block = block_of(task.share);
  by_form<kSides, false>(task.p.shape, [&](auto tiles_m, auto tiles_n, auto) {
    forward<T, decltype(tiles_m)::value, decltype(tiles_n)::value, kSides>(task, block, memory, sums);
  });
}
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ Group<ForwardTask<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  forward_of<T, 1>(group, memory, sums);
}
template <typename T>
__global__ void __launch_bounds__(2 * kThreads, 1)
    wide_forward_kernel(const __grid_constant__ Group<ForwardTask<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, 4 * kThreads);  // 8 warps x 64 columns
  forward_of<T, 2>(group, memory, sums);
}

template <typename T>
struct BackwardTask {
  Problem<T> p;
  T* grad_x;
  float* grad_scale;
  float* grad_shift;
  T* grad_gate;
  const T* grad_sum;
  T* grad_residual;
  float* partials;
  unsigned* tickets;
  Share share;
};

// Blocks: tiles x columns x experts; x shared: one block for all experts. Scratch: sums for scale and shift
// [2, E, tiles, in], then for the gate [E, B, tiles of an image, in].
template <typename T, int kN, int kSides, int kClasses>
__device__ void backward_x(const BackwardTask<T>& task, const Block& block, unsigned char* memory, float* sums) {
  using Own = Product<T, 2, kN, true, kSides, kClasses>;
  constexpr int kThreads = Own::kThreads, kColumns = Own::kColumns, kRows = kThreads / kColumns;
  const Problem<T>& p = task.p;
  const Tiling& t = p.tiling;
  const ConvShape& shape = p.shape;
  const Place place(t, block.x);
  const bool shared = shape.shared;
  const int first_expert = shared ? 0 : block.z, end_expert = shared ? shape.experts : first_expert + 1;
  const int column0 = block.y * kColumns, column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  const int channel = column0 + column, per_image = t.per_image();
  const bool there = channel < shape.in;
  const int64_t each = static_cast<int64_t>(block.across) * shape.in, all = shape.experts * each;
  const int64_t gates = shape.batch * per_image * shape.in;  // per expert
  const bool backward_affine = task.grad_scale != nullptr, backward_gate = task.grad_gate != nullptr;
  float* partials = task.partials;
  constexpr int kFours = kColumns / 4;
  const int four = column0 + static_cast<int>(threadIdx.x) % kFours * 4, fours = shape.in - four;
  const bool vector_x = by_four(p.input.x, shape.in) && fours > 0;
  const bool vector_grad = by_four(task.grad_x, shape.in) && fours > 0;
  float of_scale[4] = {}, of_shift[4] = {};
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const Own product{p, place, memory, layout_of<Own>(p), expert, column0, block.x};
    if (expert == first_expert) {
      const Window window = window_of(shape.kernel, shape.stride, true);
      fill_table(product.table(), t, place, window, shape.batch, p.out_high, p.out_wide, shape.experts, shape.out);
    }
    product.run();
    float* results = product.results();
    Affine<float> affine[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < fours) affine[j] = affine_of(p.input, shape.in, expert, four + j);
    }
#pragma unroll 2
    for (int nth = threadIdx.x / kFours; nth < Own::kPixels; nth += kThreads / kFours) {
      // Neighbours in memory come one after the other, also those of different classes.
      const int pair = nth >> (1 + t.log_w), parity_x = nth & 1, parity_y = pair & 1;
      const int local = kClasses == 1 ? nth : (pair >> 1 << t.log_w) + (nth >> 1 & ((1 << t.log_w) - 1));
      const int i = kClasses == 1 ? nth : (2 * parity_y + parity_x) * Own::kOfClass + local;
      const Pixel pixel(t, place, local);
      const int y = kClasses == 1 ? pixel.y : 2 * pixel.y + parity_y;
      const int x = kClasses == 1 ? pixel.x : 2 * pixel.x + parity_x;
      auto& result = *reinterpret_cast<Four<float>*>(results + i * Own::kPitch + four - column0);
      if (fours <= 0 || pixel.b >= shape.batch || y >= shape.high || x >= shape.wide) {
        result = {};
        continue;
      }
      const int64_t image = shared ? pixel.b : pixel.b * shape.experts + expert;
      const int64_t at = ((image * shape.high + y) * shape.wide + x) * shape.in + four;
      float read[4], of_x[4];
      read_four(p.input.x + at, fours, vector_x, read);
      if (task.grad_sum) {
        float added[4];
        read_four(task.grad_sum + at, fours, false, added);
#pragma unroll
        for (int j = 0; j < 4; ++j) result.v[j] += added[j];
      }
      if (task.grad_residual) {
        T held[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) narrow(result.v[j], held + j);
        write_four(held, fours, false, task.grad_residual + at);
      }
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
      if (!task.grad_x) continue;
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
      write_four(held, fours, vector_grad, task.grad_x + at);
    }
    if (backward_affine && (p.input.scale_rows > 1 || expert + 1 == end_expert)) {
      sum_of_columns<kColumns, kSides>(of_scale, sums);
      sum_of_columns<kColumns, kSides>(of_shift, sums);
      const int to = shared && p.input.scale_rows == 1 ? 0 : expert;
      float* own = partials + to * each + static_cast<int64_t>(block.x) * shape.in + four;
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
        for (int of_class = 0; of_class < kClasses; ++of_class) {
          const float* first = results + (of_class * Own::kOfClass + image * pixels) * Own::kPitch + column;
          for (int i = 0; i < pixels; ++i) total += first[i * Own::kPitch];
        }
        partials[2 * all + expert * gates + ((place.b + image) * per_image + place.part) * shape.in + channel] = total;
      }
    }
  }
  if (backward_affine) {
    finish_affine<kColumns>(partials, task.grad_scale, task.grad_shift, task.tickets, shape, p.input.scale_rows, block,
                            channel, sums);
  }
  if (!backward_gate) return;
  // The last block of an image finishes its gates.
  unsigned* ticket = task.tickets + affine_tickets(block.across, block.down, shape.experts);
  const int64_t images = quotient(block.x, per_image);
  if (!last_to_arrive(ticket + (images * block.deep + block.z) * block.down + block.y, per_image)) return;
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const float* part = partials + 2 * all + expert * gates + channel;
    for (int image = row; there && image < 1 << t.log_b && place.b + image < shape.batch; image += kRows) {
      float total = 0;
      for (int i = 0; i < per_image; ++i) total += fresh(part + ((place.b + image) * per_image + i) * shape.in);
      narrow(total, task.grad_gate + ((place.b + image) * shape.experts + expert) * shape.in + channel);
    }
  }
}

template <typename T, int kSides>
__device__ void backward_x_of(const Group<BackwardTask<T>>& group, unsigned char* memory, float* sums) {
  const BackwardTask<T>& task = own_task(group);
  const Block block = block_of(task.share, task.p.shape.shared ? 1 : task.p.shape.experts);
  by_form<kSides, true>(task.p.shape, [&](auto, auto tiles_n, auto classes) {
    backward_x<T, decltype(tiles_n)::value, kSides, decltype(classes)::value>(task, block, memory, sums);
  });
}
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) backward_x_kernel(const __grid_constant__ Group<BackwardTask<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  backward_x_of<T, 1>(group, memory, sums);
}
template <typename T>
__global__ void __launch_bounds__(2 * kThreads, 1)
    wide_backward_x_kernel(const __grid_constant__ Group<BackwardTask<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, 4 * kThreads);  // 8 warps x 64 columns
  backward_x_of<T, 2>(group, memory, sums);
}

template <typename T>
int chunk_of(const ConvShape& shape) {
  return shape.kernel == 1 ? 2 * kStep<T> : kStep<T>;
}

int column_blocks(const ConvShape& shape, bool backward, int sides = 1) {
  const int each = narrow_columns(shape, backward) ? 16 : 32 * sides;
  return ((backward ? shape.in : shape.out) + each - 1) / each;
}

Tiling product_tiling(const ConvShape& shape, bool backward) {
  if (!backward) {
    const bool half = half_tiles(shape);
    return tiling_of(shape, false, shape.out_high(), shape.out_wide(), half ? 6 : 7, half ? 300 : 256);
  }
  if (shape.stride == 1) return tiling_of(shape, true, shape.high, shape.wide, 7, 256);
  return tiling_of(shape, true, (shape.high + 1) / 2, (shape.wide + 1) / 2, 5, 72);
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
  const int64_t images = tiling.tiles / tiling.per_image();  // or groups of images
  return {(2 * tiling.tiles + shape.batch * tiling.per_image()) * shape.experts * shape.in,
          affine_tickets(tiling.tiles, columns, shape.experts) + images * shape.experts * columns};
}

// The argument of a launch with blocks of kSides sides.
template <typename T, int kSides>
Grouped<ForwardTask<T>> grouped(const ConvForward<T>* convs, int size, bool allow_tf32) {
  Grouped<ForwardTask<T>> group;
  for (int i = 0; i < size; ++i) {
    const auto& [input, weight, bias, y, mean, var, scratch, tickets, shape, norm, gap] = convs[i];
    const Tiling tiling = product_tiling(shape, false);
    const int64_t row = static_cast<int64_t>(shape.in) * shape.kernel * shape.kernel;
    const bool residual = !input.residual || rows_aligned(input.residual, shape.in);
    const Problem<T> p{input, {}, weight, shape, shape.out_high(), shape.out_wide(), tiling, chunk_of<T>(shape),
                       rows_aligned(input.x, shape.in) && residual,
                       rows_aligned(weight, row) && rows_aligned(weight, gap), !allow_tf32, gap};
    group.add({p, bias, y, mean, var, scratch, tickets, norm, {}}, tiling.tiles, column_blocks(shape, false, kSides),
              shape.experts, by_form<kSides, false>(shape, Bytes<T, false, kSides>{p}));
  }
  return group;
}
template <typename T, int kSides>
Grouped<BackwardTask<T>> grouped(const ConvBackwardX<T>* convs, int size, bool allow_tf32) {
  Grouped<BackwardTask<T>> group;
  for (int i = 0; i < size; ++i) {
    const ConvBackwardX<T>& conv = convs[i];
    const ConvShape& shape = conv.shape;
    const Tiling tiling = product_tiling(shape, true);
    const int64_t row = static_cast<int64_t>(shape.in) * shape.kernel * shape.kernel;
    const T *grad = conv.grad.grad, *y = conv.grad.y;
    const bool vector = rows_aligned(grad, shape.out) && (!y || rows_aligned(y, shape.out));
    const Problem<T> p{conv.input, conv.grad, conv.weight, shape, shape.out_high(), shape.out_wide(), tiling,
                       chunk_of<T>(shape), vector,
                       rows_aligned(conv.weight, row) && rows_aligned(conv.weight, conv.weight_gap), !allow_tf32,
                       conv.weight_gap};
    group.add({p, conv.grad_x, conv.grad_scale, conv.grad_shift, conv.grad_gate, conv.grad_sum, conv.grad_residual,
               conv.scratch, conv.tickets, {}},
              tiling.tiles, column_blocks(shape, true, kSides), shape.shared ? 1 : shape.experts,
              by_form<kSides, true>(shape, Bytes<T, true, kSides>{p}));
  }
  return group;
}

// Two sides read the pixels once for 64 columns, if that leaves enough blocks.
template <typename Conv>
bool on_two_sides(const Conv* convs, int size, bool backward) {
  bool wide = true;
  for (int i = 0; i < size; ++i) wide = wide && wide_columns(convs[i].shape, backward);
  return wide;
}
template <typename Task>
bool fills(const Grouped<Task>& group) {
  return group.blocks >= kEnoughBlocks && group.bytes <= shared_limit() - kOwnShared;
}

template <typename T, typename Conv, typename Kernel>
cudaError_t launch_together(const Conv* convs, int size, bool backward, bool allow_tf32, Kernel wide_kernel,
                            Kernel kernel, cudaStream_t stream) {
  if (on_two_sides(convs, size, backward)) {
    const auto group = grouped<T, 2>(convs, size, allow_tf32);
    if (fills(group)) {
      return FASTMOD_LAUNCH_LARGE(wide_kernel, blocks_for(group.blocks, 1), 2 * kThreads,
                                  static_cast<size_t>(group.bytes), stream, group.group);
    }
  }
  const auto group = grouped<T, 1>(convs, size, allow_tf32);
  if (!group.fits()) return cudaErrorInvalidValue;
  return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(group.blocks, 1), kThreads, static_cast<size_t>(group.bytes),
                                stream, group.group);
}

template <typename T>
cudaError_t norm_conv_forward(const ConvForward<T>* convs, int count, bool allow_tf32, cudaStream_t stream) {
  return in_groups<T>(
      convs, count,
      [&](const ConvForward<T>* own, int size) -> cudaError_t {
        if constexpr (sizeof(T) <= 4) {
          return launch_together<T>(own, size, false, allow_tf32, wide_forward_kernel<T>, forward_kernel<T>, stream);
        }
        return cudaErrorInvalidValue;
      },
      [&](const ConvForward<T>& conv) { return plain::forward<T>(conv, stream); });
}

template <typename T>
cudaError_t norm_conv_backward_x(const ConvBackwardX<T>* convs, int count, bool allow_tf32, cudaStream_t stream) {
  return in_groups<T>(
      convs, count,
      [&](const ConvBackwardX<T>* own, int size) -> cudaError_t {
        if constexpr (sizeof(T) <= 4) {
          return launch_together<T>(own, size, true, allow_tf32, wide_backward_x_kernel<T>, backward_x_kernel<T>, stream);
        }
        return cudaErrorInvalidValue;
      },
      [&](const ConvBackwardX<T>& conv) { return plain::backward_x<T>(conv, stream); });
}

#define FASTMOD_INSTANTIATE(T)                                                                         \
  template Scratch norm_conv_forward_scratch<T>(ConvShape);                                            \
  template Scratch norm_conv_backward_x_scratch<T>(ConvShape);                                         \
  template cudaError_t norm_conv_forward<T>(const ConvForward<T>*, int, bool, cudaStream_t);           \
  template cudaError_t norm_conv_backward_x<T>(const ConvBackwardX<T>*, int, bool, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
