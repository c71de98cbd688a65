// masked_linear on tensor cores: rows times the masked weight, and the gradient of the rows, which is the product with
// the transposed masked weight. Any number of rows. fp64 is in masked_linear_plain.cu.
//
// A block takes 32 or 64 columns of the result and up to two slabs of rows, and walks through its share of the depth in
// chunks of 16. Rows, weights and logits of a chunk are copied unchanged into shared memory (cp.async, while the
// previous chunk is multiplied). There they are prepared once for all samples: fp32 is split into two tf32 numbers, and
// logits become the smallest noise word that keeps the weight. A warp then draws the masks of its samples in registers.
// The order of k and of n within a product is free, and is chosen so that the four weights that a lane needs at a time
// are neighbours and share one Philox call. The product of a chunk starts at zero and is added to the sums in fp32, as
// tensor cores round towards zero.
//
// If there are few columns, blocks share the depth; the last block adds up their results in a fixed order.
#include "masked_linear_chunks.cuh"
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int64_t kEnoughBlocks = 256;  // two for each multiprocessor of a large GPU
constexpr int64_t kFewColumns = 512;

struct alignas(8) Pair {
  float first, second;
};

// Makes the masked weights of a lane from its quads in the layout of the tensor cores: four k of every tile of columns.
// A weight that the mask drops becomes 0 times the weight; `odd` says that this may be NaN.
template <bool kBackward, typename T>
__device__ inline void mask_units(T*, const uint2 (&quads)[kQuad][1], uint4 (&low)[kQuad],
                                  const PhiloxWords (&words)[kQuad], bool odd, uint2 (&masked)[kColumnTiles][1]) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  const auto number = [&](int q, int i) { return (i < 2 ? quads[q][0].x : quads[q][0].y) >> 16 * (i % 2) & 0xffffu; };
  // Numbers 2 half and 2 half + 1 of tile j.
  const auto both = [&](int j, int half, bool zeros) {
    const int k = 2 * half, q0 = kBackward ? k : j, q1 = kBackward ? k + 1 : j;
    const int i0 = kBackward ? j : k, i1 = kBackward ? j : k + 1;
    const bool kept0 = words[q0].word[i0] >= word_of(low[q0], i0), kept1 = words[q1].word[i1] >= word_of(low[q1], i1);
    uint32_t pair = half ? quads[j][0].y : quads[j][0].x;
    if constexpr (kBackward) pair = number(q0, i0) | number(q1, i1) << 16;
    if (!zeros) return pair & ((kept0 ? 0xffffu : 0u) | (kept1 ? 0xffff0000u : 0u));
    const uint32_t first = kept0 ? pair & 0xffffu : (pair & kExponent) == kExponent ? 0x7fffu : 0u;
    const uint32_t second = kept1 ? pair >> 16 : (pair >> 16 & kExponent) == kExponent ? 0x7fffu : 0u;
    return first | second << 16;
  };
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) masked[j][0] = {both(j, 0, false), both(j, 1, false)};
  if (!odd) return;
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) masked[j][0] = {both(j, 0, true), both(j, 1, true)};
}
template <bool kBackward>
__device__ inline void mask_units(float*, uint4 (&quads)[kQuad][2], uint4 (&low)[kQuad],
                                  const PhiloxWords (&words)[kQuad], bool odd, uint4 (&masked)[kColumnTiles][2]) {
  const auto all = [&](auto zero_of) {
#pragma unroll
    for (int q = 0; q < kQuad; ++q) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const bool kept = words[q].word[i] >= word_of(low[q], i);
        const int j = kBackward ? i : q, k = kBackward ? q : i;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint32_t value = word_of(quads[q][part], i);
          word_of(masked[j][part], k) = kept ? value : zero_of(value);
        }
      }
    }
  };
  if (odd) {
    all([](uint32_t value) { return __float_as_uint(__uint_as_float(value) * 0.0f); });
  } else {
    all([](uint32_t) { return 0u; });
  }
}

template <typename T, bool kBackward, bool kMixed>
__global__ void __launch_bounds__(kThreads, 2)
    product_kernel(const __grid_constant__ Problem<T, kBackward, kMixed> p) {
  using Unit = typename Four<T>::Unit;
  constexpr int kParts = Four<T>::kParts;
  FASTMOD_DYNAMIC_SHARED(bytes);
  Memory<T>& memory = *reinterpret_cast<Memory<T>*>(bytes);
  const int64_t outer = quotient(blockIdx.x, p.blocks), group = quotient(outer, p.splits);
  const int64_t block = blockIdx.x - outer * p.blocks, split = outer - group * p.splits;
  const int64_t copy = blockIdx.y;
  const int64_t first_chunk = split * p.chunks_each;
  using Own = Block<T, kBackward, kMixed>;
  Own own(p, memory, copy, block * (kColumns << p.log_warps), group * p.slabs_each, first_chunk);
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / kWarp & ((1 << p.log_warps) - 1), local_slab = threadIdx.x / kWarp >> p.log_warps;
  const MaskKeys keys(seed_of(p.noise, copy * p.shape.copies.seed), p.noise.stream);
  const int64_t first_sample = p.slabs.first_sample(own.first_slab + local_slab);
  const int samples = static_cast<int>(first_sample + p.slabs.samples <= p.slabs.all_samples
                                           ? p.slabs.samples
                                           : p.slabs.all_samples - first_sample);  // may be negative
  const unsigned char* own_rows =
      reinterpret_cast<unsigned char*>(&memory.rows[0][(local_slab * kSlabRows + g) * 4 + t]);
  const Unit* rows = reinterpret_cast<const Unit*>(bytes + held(static_cast<int>(own_rows - bytes)));
  // Quad q of a lane belongs to tile q of the columns or, backward, to k = 4 t + q.
  constexpr int kNextSlot = (kBackward ? Own::kAcross : 8) * 4;
  const int slot = held(own.slot_of(kBackward ? warp * 8 + g : warp * kColumns + g, t));
  const Unit* weights = &memory.weights[0][slot];
  const uint4* low_words = &memory.low[slot];
  const int64_t next = (kBackward ? 1 : 8) * p.shape.in;
  uint64_t first_index = first_word(p.shape, p.noise, first_sample);
  first_index += static_cast<uint64_t>(kBackward ? 4 * t * p.shape.in + own.column0 + warp * kColumns + 4 * g
                                                 : (own.column0 + warp * kColumns + g) * p.shape.in + 4 * t);
  const int tiles = held(p.slabs.tiles), precise = held(p.precise ? 1 : 0), near = held(p.near ? 1 : 0);
  float sums[kTiles][kColumnTiles][4] = {};

  __syncthreads();
  const int64_t all = (own.depth() + kDepth - 1) / kDepth;
  const int64_t end_chunk = first_chunk + p.chunks_each < all ? first_chunk + p.chunks_each : all;
  const auto chunk_words = held(static_cast<uint64_t>(kBackward ? kDepth * p.shape.in : kDepth));
  const auto sample_words = held(static_cast<uint64_t>(p.shape.out * p.shape.in));
  const uint32_t near_step = held(static_cast<uint32_t>(next / kQuad));
  first_index += static_cast<uint64_t>(first_chunk) * chunk_words;
  if (first_chunk < end_chunk) own.load();
#pragma unroll 1
  for (int64_t chunk = first_chunk; chunk < end_chunk; ++chunk, first_index += chunk_words) {
    wait_copies<0>();
    own.prepare();
    if (chunk + 1 < end_chunk) own.load();
    __syncthreads();
    uint64_t index = first_index;
    unsigned first_tile = 0;
#pragma unroll 1
    for (int s = 0; s < samples; ++s) {
      Unit masked[kColumnTiles][kParts];
      {
        PhiloxWords words[kQuad];
        Unit own_quads[kQuad][kParts];
        uint4 low[kQuad];
        if (near) {
          auto group = static_cast<uint32_t>(index / kQuad);
#pragma unroll
          for (int q = 0; q < kQuad; ++q, group += near_step) words[q] = keys.near(group);
        } else {
#pragma unroll
          for (int q = 0; q < kQuad; ++q) words[q] = words_from(keys, index + q * next);
        }
        uint32_t nearest = 0xffffffffu;  // the smallest distance of a word above its low word
#pragma unroll
        for (int q = 0; q < kQuad; ++q) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            own_quads[q][part] = weights[part * Memory<T>::kWeightQuads + q * kNextSlot];
          }
          low[q] = low_words[q * kNextSlot];
#pragma unroll
          for (int i = 0; i < kQuad; ++i) nearest = smaller(nearest, words[q].word[i] - word_of(low[q], i));
        }
        if (nearest < kUncertainWords) {
#pragma unroll
          for (int q = 0; q < kQuad; ++q) decide(words[q], low[q], memory.logits[slot + q * kNextSlot]);
        }
        mask_units<kBackward>(static_cast<T*>(nullptr), own_quads, low, words, memory.odd != 0, masked);
      }
      const auto multiply = [&](auto precise, auto tile) {
        constexpr int i = decltype(tile)::value;
        Unit a[2][kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          a[0][part] = rows[part * Memory<T>::kRowQuads + i * kTileHeight * 4];
          a[1][part] = rows[part * Memory<T>::kRowQuads + (i * kTileHeight + 8) * 4];
        }
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          float found[4];
          Four<T>::template multiply<decltype(precise)::value>(a, masked[j], found);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][j][e] += found[e];
        }
      };
      const auto multiply_all = [&](auto precise) {
        const auto pair = [&](auto first, auto second) {
          multiply(precise, first);
          multiply(precise, second);
        };
        constexpr std::integral_constant<int, 0> t0;
        constexpr std::integral_constant<int, 1> t1;
        constexpr std::integral_constant<int, 2> t2;
        constexpr std::integral_constant<int, 3> t3;
        if (tiles == 2) {  // 17 to 32 rows, as in the papers
          if (first_tile == 0) {
            pair(t0, t1);
          } else {
            pair(t2, t3);
          }
          return;
        }
        const auto own = [&](unsigned i) { return i - first_tile < static_cast<unsigned>(tiles); };
        if (own(0)) multiply(precise, t0);
        if (own(1)) multiply(precise, t1);
        if (own(2)) multiply(precise, t2);
        if (own(3)) multiply(precise, t3);
      };
      if (precise) {
        multiply_all(std::true_type{});
      } else {
        multiply_all(std::false_type{});
      }
      index += sample_words;
      first_tile += tiles;
    }
    __syncthreads();
  }

  const int64_t width = own.width(), values = p.slabs.all_samples * p.slabs.rows * width;
  float* const partials = p.partials + copy * p.splits * values;
  const auto result = p.result + copy * values;
  const bool biased = !kBackward && given(p.biases);
  const auto biases_of = [&](int64_t row) {
    return biased ? p.biases + (copy * p.shape.copies.biases + quotient(row, p.slabs.rows) * width) : p.biases;
  };
  const auto finish = [&](int64_t row, int64_t column, float value, const Operand<kMixed, const T>& biases) {
    put_at(biased ? value + value_at(biases, column) : value, result, row * width + column);
  };
  const int64_t warp_column = own.column0 + warp * kColumns, first_column = warp_column + (kBackward ? 8 : 2) * t;
  const int left = static_cast<int>(width - first_column < kColumns ? width - first_column : kColumns);
  const bool quads = width % kQuad == 0;  // rows of the partial sums are then whole quads
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = memory.row[local_slab * kSlabRows + i * kTileHeight + half * 8 + g];
      if (row < 0) continue;
      const auto value = [&](int j, int e) { return sums[i][j][2 * half + e]; };
      if (p.splits > 1) {
        float* to = partials + split * values + row * width + first_column;
        if (quads && warp_column + kColumns <= width) {
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) {
            if constexpr (!kBackward) {
              *reinterpret_cast<Pair*>(to + 8 * j) = {value(j, 0), value(j, 1)};
            } else if (j < 2) {
              *reinterpret_cast<float4*>(to + kQuad * j) = {value(0, j), value(1, j), value(2, j), value(3, j)};
            }
          }
          continue;
        }
      }
      const auto biases = biases_of(row);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = kBackward ? kQuad * e + j : 8 * j + e;
          if (column >= left) continue;
          if (p.splits == 1) {
            finish(row, first_column + column, value(j, e), biases);
          } else {
            partials[split * values + row * width + first_column + column] = value(j, e);
          }
        }
      }
    }
  }
  if (p.splits == 1) return;
  const int64_t place = (copy * p.groups + group) * p.blocks + block;
  if (!last_to_arrive(p.tickets + place, static_cast<unsigned>(p.splits))) return;
  const int log_across = 3 + p.log_warps;  // quads per row
  for (int i = threadIdx.x; i < (p.slabs_each * kSlabRows) << log_across; i += blockDim.x) {
    const int64_t row = memory.row[i >> log_across];
    const int64_t column = own.column0 + (i & ((1 << log_across) - 1)) * kQuad;
    if (row < 0 || column >= width) continue;
    const float* part = partials + row * width + column;
    const auto biases = biases_of(row);
    if (quads) {
      float total[kQuad] = {};
#pragma unroll 4
      for (int other = 0; other < static_cast<int>(p.splits); ++other) {
        const float4 four = fresh_quad(part);
        total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
        part += values;
      }
#pragma unroll
      for (int e = 0; e < kQuad; ++e) finish(row, column + e, total[e], biases);
    } else {
#pragma unroll 1
      for (int e = 0; e < kQuad && column + e < width; ++e) {
        float total = 0.0f;
        for (int64_t other = 0; other < p.splits; ++other) total += fresh(part + e + other * values);
        finish(row, column + e, total, biases);
      }
    }
  }
}

// How a product is distributed over blocks. This does not depend on the copies, so that each gets the same result as it
// would alone.
struct Plan {
  Slabs slabs;
  int log_warps, slabs_each;
  int64_t blocks, groups, splits, chunks_each;
  Plan(const LinearShape& shape, int64_t samples, int64_t depth, int64_t width) : slabs(shape.rows, samples) {
    log_warps = width > kFewColumns ? 1 : 0;
    slabs_each = slabs.count < kMaxSlabs ? 1 : kMaxSlabs;
    blocks = (width + (kColumns << log_warps) - 1) / (kColumns << log_warps);
    groups = (slabs.count + slabs_each - 1) / slabs_each;
    const int64_t chunks = (depth + kDepth - 1) / kDepth;
    const int64_t wanted = (kEnoughBlocks + blocks * groups - 1) / (blocks * groups);
    splits = wanted < chunks ? wanted : chunks < 1 ? 1 : chunks;
    chunks_each = (chunks + splits - 1) / splits;
    splits = chunks_each > 0 ? (chunks + chunks_each - 1) / chunks_each : 1;
  }
  Scratch scratch(const LinearShape& shape, int64_t width) const {
    if (splits == 1) return {0, 0};
    const int64_t copies = shape.copies.count;
    return {copies * splits * slabs.all_samples * shape.rows * width, copies * groups * blocks};
  }
};

Plan plan_of(const LinearShape& shape, int64_t samples, bool backward) {
  return Plan(shape, samples, backward ? shape.out : shape.in, backward ? shape.in : shape.out);
}

template <typename T, bool kBackward>
cudaError_t launch(Mixed<const T> rows, Mixed<const T> weight, Mixed<const T> logits, Mixed<const T> biases,
                   Mixed<T> result, float* scratch, unsigned* tickets, bool allow_tf32, const LinearShape& shape,
                   const MaskNoise& noise, cudaStream_t stream) {
  const int64_t depth = kBackward ? shape.out : shape.in, width = kBackward ? shape.in : shape.out;
  const LinearCopies& copies = shape.copies;
  if (copies.count * noise.samples * shape.rows * width == 0) return cudaSuccess;
  const Plan plan = plan_of(shape, noise.samples, kBackward);
  const int threads = (kWarp * plan.slabs_each) << plan.log_warps;
  const dim3 grid = grid_of(plan.blocks * plan.groups * plan.splits, copies);
  const auto run = [&](auto some) {
    constexpr bool kMixed = decltype(some)::value;
    const Problem<T, kBackward, kMixed> p{
        operand<kMixed && !kBackward>(rows), operand<kMixed>(weight), operand<kMixed>(logits), operand<kMixed>(biases),
        operand<kMixed && kBackward>(result), scratch, tickets, shape, noise, plan.slabs, plan.log_warps,
        plan.slabs_each, plan.blocks, plan.groups, plan.splits, plan.chunks_each, quads_aligned(rows, depth),
        quads_aligned(weight, shape.in) && quads_aligned(logits, shape.in), !allow_tf32,
        near_quads(noise, shape.out * shape.in, shape.in)};
    const auto kernel = product_kernel<T, kBackward, kMixed>;
    return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, threads, sizeof(Memory<T>), stream, p);
  };
  return with_mixed<T>(run, rows, weight, logits, biases, result);
}

}  // namespace

template <typename T>
Scratch masked_linear_scratch(LinearShape shape, int64_t samples, bool backward) {
  if (sizeof(T) == 8 || samples * shape.rows * (backward ? shape.in : shape.out) == 0) return {0, 0};
  return plan_of(shape, samples, backward).scratch(shape, backward ? shape.in : shape.out);
}

template <typename T>
cudaError_t masked_linear_forward(Mixed<const T> x, Mixed<const T> weight, Mixed<const T> logits,
                                  Mixed<const T> biases, T* result, Compute<T>* scratch, unsigned* tickets,
                                  bool allow_tf32, LinearShape shape, MaskNoise noise, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::forward(x.narrow, weight.narrow, logits.narrow, biases.narrow, result, shape, noise, stream);
  } else {
    return launch<T, false>(x, weight, logits, biases, {result}, scratch, tickets, allow_tf32, shape, noise, stream);
  }
}

template <typename T>
cudaError_t masked_linear_backward_x(const T* grad, Mixed<const T> weight, Mixed<const T> logits, Mixed<T> grad_x,
                                     Compute<T>* scratch, unsigned* tickets, bool allow_tf32, LinearShape shape,
                                     MaskNoise noise, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::backward_x(grad, weight.narrow, logits.narrow, grad_x.narrow, shape, noise, stream);
  } else {
    return launch<T, true>({grad}, weight, logits, {nullptr}, grad_x, scratch, tickets, allow_tf32, shape, noise,
                           stream);
  }
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template Scratch masked_linear_scratch<T>(LinearShape, int64_t, bool);                                              \
  template cudaError_t masked_linear_forward<T>(Mixed<const T>, Mixed<const T>, Mixed<const T>, Mixed<const T>, T*,   \
                                                Compute<T>*, unsigned*, bool, LinearShape, MaskNoise, cudaStream_t);  \
  template cudaError_t masked_linear_backward_x<T>(const T*, Mixed<const T>, Mixed<const T>, Mixed<T>, Compute<T>*,   \
                                                   unsigned*, bool, LinearShape, MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
