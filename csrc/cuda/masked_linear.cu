// masked_linear on tensor cores: rows times the masked weight, and the gradient of the rows, which is the product with
// its transpose. Any number of rows. fp64 goes to masked_linear_plain.cu.
//
// A block takes 32 or 64 columns of the result and up to two slabs of rows, and walks through its share of the depth in
// chunks of 16. Of each chunk, rows, weights and logits come into shared memory as they are (cp.async, while the chunk
// before is multiplied). There they are prepared once for all samples: fp32 as two tf32 numbers, logits as the least
// noise word that keeps the weight. A warp then draws the masks of its samples in registers. The four weights that a
// lane needs at a time are neighbours, which one Philox call serves: which number is called k, and which n, is free.
// The product of a chunk begins at zero and is added to the sums in fp32, for tensor cores round towards zero.
//
// If there are few columns, blocks share the depth; the last of them adds up what they found, in a fixed order.
#include "masked_linear.cuh"
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kDepth = 16;                      // of a chunk
constexpr int kColumnTiles = 4;                 // of 8 columns, of a warp
constexpr int kColumns = 8 * kColumnTiles;
constexpr int kMaxWarps = 2;                    // side by side
constexpr int kMaxSlabs = 2;                    // of a block
constexpr int kThreads = kWarp * kMaxWarps * kMaxSlabs;
constexpr int64_t kEnoughBlocks = 256;          // two for each multiprocessor of a large GPU
constexpr int64_t kFewColumns = 512;

// The same number, which nvcc is to hold rather than to compute anew in every loop.
__device__ inline int held(int value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(value));
#endif
  return value;
}

template <typename T>
struct Problem {
  const T* rows;  // [samples, rows, depth]
  const T *weight, *logits, *biases;
  T* result;
  float* partials;  // [splits, samples * rows, width]
  unsigned* tickets;
  LinearShape shape;
  MaskNoise noise;
  Slabs slabs;
  int log_warps, slabs_each;  // of a block
  int64_t blocks, splits, chunks_each;
  bool vector_rows, vector_weight, precise;
};

// Shared memory of a block, as if it were of the largest size: then all places are known to the compiler.
template <typename T>
struct Memory {
  using Unit = typename Four<T>::Unit;
  static constexpr int kParts = Four<T>::kParts, kRowQuads = kMaxSlabs * kSlabRows * kDepth / kQuad;
  static constexpr int kWeightQuads = kMaxWarps * kColumns * kDepth / kQuad;
  int64_t offset[kMaxSlabs * kSlabRows];  // where in p.rows the rows of the block begin
  alignas(16) T raw_rows[kRowQuads][kQuad];
  T raw_weight[kWeightQuads][kQuad], raw_logits[kWeightQuads][kQuad];
  Unit rows[kParts][kRowQuads];        // [row][t]
  Unit weights[kParts][kWeightQuads];  // see Block::slot_of
  uint4 low[kWeightQuads];             // low_word of the logits
  float4 logits[kWeightQuads];
  int odd;                             // some weight was NaN or infinite: 0 times it is no zero
};

// Four neighbours on their way to shared memory, zeros beyond `valid`. kVector: at once, all or none.
template <bool kVector, typename T>
__device__ void copy_quad(T* to, const T* from, int valid) {
  if constexpr (kVector) {
    copy_async<kQuad * sizeof(T)>(to, from, valid > 0);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if constexpr (sizeof(T) == 4) {
        copy_async<4>(to + i, i < valid ? from + i : from, i < valid);
      } else {
        narrow(i < valid ? widen(from[i]) : 0.0f, to + i);
      }
    }
  }
}

__device__ inline int clamped(int64_t left) { return left <= 0 ? 0 : left < kQuad ? static_cast<int>(left) : kQuad; }

// A thread's part in bringing chunks into shared memory. It prepares what it has copied itself.
template <typename T, bool kBackward>
struct Block {
  using Unit = typename Four<T>::Unit;
  static constexpr int kParts = Four<T>::kParts;

  const Problem<T>& p;
  Memory<T>& memory;
  int64_t column0, first_slab;
  int first_slot, slot_step;    // of the quads of weights that are this thread's
  int64_t out, in, out_step;    // the first of them in the chunk at depth 0, and from one to the next

  // Where a quad of weights lies in shared memory. Forward, it is 4 k of one column: `major` is the column; backward, 4
  // columns of one k: `major` is k % 4 and the quad of columns. Four lanes have the same, and k = 4 t on.
  static __device__ int slot_of(int major, int t) { return major * 4 + t; }
  static constexpr int kAcross = kMaxWarps * kColumns / kQuad;  // quads of columns

  __device__ Block(const Problem<T>& p_, Memory<T>& memory_, int64_t column0_, int64_t first_slab_)
      : p(p_), memory(memory_), column0(column0_), first_slab(first_slab_) {
    const int t = threadIdx.x % 4, own = threadIdx.x / 4;
    if constexpr (kBackward) {  // threads go over columns first, then over k
      const int across = 3 + p.log_warps, k = own >> across, quad = own & ((1 << across) - 1);
      first_slot = slot_of(k * kAcross + quad, t);
      out = 4 * t + k;
      in = column0 + quad * kQuad;
      out_step = p.slabs_each;
      slot_step = slot_of(p.slabs_each * kAcross, 0);
    } else {
      first_slot = slot_of(own, t);
      out = column0 + own;
      in = 4 * t;
      out_step = blockDim.x / 4;
      slot_step = blockDim.x;
    }
  }
  __device__ int64_t depth() const { return kBackward ? p.shape.out : p.shape.in; }
  __device__ int64_t width() const { return kBackward ? p.shape.in : p.shape.out; }
  __device__ int own_quads() const { return 4 / p.slabs_each; }  // of weights

  __device__ void begin() const {
    for (int i = threadIdx.x; i < p.slabs_each * kSlabRows; i += blockDim.x) {
      const int64_t row = p.slabs.row(first_slab + i / kSlabRows, i % kSlabRows);
      memory.offset[i] = row < 0 ? 0 : row * depth();  // any row: what comes of it is not stored
    }
    if (threadIdx.x == 0) memory.odd = 0;
  }

  __device__ void load(int64_t k0) const {
    if (p.vector_rows) {
      load_rows<true>(k0);
    } else {
      load_rows<false>(k0);
    }
    if (p.vector_weight) {
      load_weights<true>(k0);
    } else {
      load_weights<false>(k0);
    }
    commit_copies();
  }
  template <bool kVector>
  __device__ void load_rows(int64_t k0) const {
    const int64_t k = k0 + threadIdx.x % 4 * kQuad;
    const int inside = clamped(depth() - k);
    const T* from = p.rows + (inside > 0 ? k : 0);
    T(*to)[kQuad] = &memory.raw_rows[threadIdx.x];
    const int64_t* offset = &memory.offset[threadIdx.x / 4];
#pragma unroll 1
    for (int left = 2 >> p.log_warps; left > 0; --left) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy_quad<kVector>(*to, from + *offset, inside);
        to += blockDim.x;
        offset += blockDim.x / 4;
      }
    }
  }
  template <bool kVector>
  __device__ void load_weights(int64_t k0) const {
    const int64_t first_out = kBackward ? out + k0 : out, first_in = kBackward ? in : in + k0;
    const int inside = clamped(p.shape.in - first_in);
    int64_t at = first_out * p.shape.in + first_in, left = p.shape.out - first_out;
    int slot = first_slot;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= own_quads()) break;
      const int valid = left > 0 ? inside : 0;
      const int64_t from = valid > 0 ? at : 0;
      copy_quad<kVector>(memory.raw_weight[slot], p.weight + from, valid);
      copy_quad<kVector>(memory.raw_logits[slot], p.logits + from, valid);
      at += out_step * p.shape.in;
      left -= out_step;
      slot += slot_step;
    }
  }

  static __device__ void read(const T* from, float (&v)[4]) {
    if constexpr (sizeof(T) == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) v[i] = widen(from[i]);
    }
  }

  __device__ void prepare() const {
    unsigned quad = threadIdx.x;
#pragma unroll 1
    for (int left = 2 >> p.log_warps; left > 0; --left) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          float v[4];
          read(memory.raw_rows[quad], v);
          Unit unit[kParts];
          Four<T>::split(v, p.precise, unit);
#pragma unroll
          for (int part = 0; part < kParts; ++part) memory.rows[part][quad] = unit[part];
        } else {
          memory.rows[0][quad] = *reinterpret_cast<const Unit*>(memory.raw_rows[quad]);
        }
        quad += blockDim.x;
      }
    }
    int slot = first_slot;
#pragma unroll 1
    for (int n = own_quads(); n > 0; --n) {
      float w[4], l[4];
      uint32_t low[4];
      read(memory.raw_weight[slot], w);
      read(memory.raw_logits[slot], l);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const float share = roughly_off(l[i]);
        low[i] = low_word(share);
        w[i] += share * 0.0f;  // a logit that is NaN makes the weight NaN
      }
      Unit unit[kParts];
      if (!Four<T>::split(w, p.precise, unit)) memory.odd = 1;
#pragma unroll
      for (int part = 0; part < kParts; ++part) memory.weights[part][slot] = unit[part];
      memory.low[slot] = {low[0], low[1], low[2], low[3]};
      memory.logits[slot] = {l[0], l[1], l[2], l[3]};
      slot += slot_step;
    }
  }
};

__device__ inline uint32_t& word_of(uint4& unit, int i) {
  return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}

__device__ inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Rarely words are near the threshold: here those of four weights become, by the exact threshold, the largest or 0.
__device__ inline void decide(PhiloxWords& words, uint4& low, const float4& logits) {
  const float logit[] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    words.word[i] = static_cast<int32_t>(words.word[i] >> 9) >= words_off(logit[i]) ? 0xffffffffu : 0u;
    word_of(low, i) |= 1u;
  }
}

// The masked weights of a lane, from its quads, as the tensor cores want them: four k of every tile of columns. Where
// the mask does not keep a weight, 0 times the weight: `odd` says that this may be NaN.
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

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2) product_kernel(const __grid_constant__ Problem<T> p) {
  using Unit = typename Four<T>::Unit;
  constexpr int kParts = Four<T>::kParts;
  FASTMOD_DYNAMIC_SHARED(bytes);
  Memory<T>& memory = *reinterpret_cast<Memory<T>*>(bytes);
  const int64_t outer = quotient(blockIdx.x, p.blocks), group = quotient(outer, p.splits);
  const int64_t block = blockIdx.x - outer * p.blocks, split = outer - group * p.splits;
  const Block<T, kBackward> own(p, memory, block * (kColumns << p.log_warps), group * p.slabs_each);
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / kWarp & ((1 << p.log_warps) - 1), local_slab = threadIdx.x / kWarp >> p.log_warps;
  const PhiloxKeys keys(seed_of(p.noise));
  const int64_t first_sample = p.slabs.first_sample(own.first_slab + local_slab);
  const int samples = static_cast<int>(first_sample + p.slabs.samples <= p.slabs.all_samples
                                           ? p.slabs.samples
                                           : p.slabs.all_samples - first_sample);  // may be negative
  const bool quads = p.shape.in % kQuad == 0;
  const Unit* rows = &memory.rows[0][held((local_slab * kSlabRows + g) * 4 + t)];
  // Quad q of a lane: of tile q of the columns, or of k = 4 t + q.
  constexpr int kNextSlot = (kBackward ? Block<T, kBackward>::kAcross : 8) * 4;
  const int slot = held(own.slot_of(kBackward ? warp * 8 + g : warp * kColumns + g, t));
  const Unit* weights = &memory.weights[0][slot];
  const uint4* low_words = &memory.low[slot];
  const int64_t next = (kBackward ? 1 : 8) * p.shape.in;
  uint64_t first_index = first_word(p.shape, p.noise, first_sample);
  first_index += static_cast<uint64_t>(kBackward ? 4 * t * p.shape.in + own.column0 + warp * kColumns + 4 * g
                                                 : (own.column0 + warp * kColumns + g) * p.shape.in + 4 * t);
  float sums[kTiles][kColumnTiles][4] = {};

  own.begin();
  __syncthreads();
  const int64_t first_chunk = split * p.chunks_each, all = (own.depth() + kDepth - 1) / kDepth;
  const int64_t end_chunk = first_chunk + p.chunks_each < all ? first_chunk + p.chunks_each : all;
  if (first_chunk < end_chunk) own.load(first_chunk * kDepth);
#pragma unroll 1
  for (int64_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
    wait_copies<0>();
    own.prepare();
    if (chunk + 1 < end_chunk) own.load((chunk + 1) * kDepth);
    __syncthreads();
    uint64_t index = first_index + static_cast<uint64_t>(chunk * kDepth * (kBackward ? p.shape.in : 1));
    int first_tile = 0;
#pragma unroll 1
    for (int s = 0; s < samples; ++s) {
      Unit masked[kColumnTiles][kParts];
      {
        PhiloxWords words[kQuad];
        Unit own_quads[kQuad][kParts];
        uint4 low[kQuad];
#pragma unroll
        for (int q = 0; q < kQuad; ++q) words[q] = quad_words(keys, index + q * next, p.noise.stream, quads);
        uint32_t nearest = 0xffffffffu;  // above the low words
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
        if (nearest < kUnsure) {
#pragma unroll
          for (int q = 0; q < kQuad; ++q) decide(words[q], low[q], memory.logits[slot + q * kNextSlot]);
        }
        mask_units<kBackward>(static_cast<T*>(nullptr), own_quads, low, words, memory.odd != 0, masked);
      }
      const auto multiply = [&](auto precise, int i) {
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
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (static_cast<unsigned>(i - first_tile) >= static_cast<unsigned>(p.slabs.tiles)) continue;
        if (p.precise) {
          multiply(std::true_type{}, i);
        } else {
          multiply(std::false_type{}, i);
        }
      }
      index += static_cast<uint64_t>(p.shape.out * p.shape.in);
      first_tile += p.slabs.tiles;
    }
    __syncthreads();
  }

  const int64_t width = own.width(), values = p.slabs.all_samples * p.slabs.rows * width;
  const auto biases_of = [&](int64_t row) -> const T* {
    return kBackward || !p.biases ? nullptr : p.biases + quotient(row, p.slabs.rows) * width;
  };
  const auto finish = [&](int64_t row, int64_t column, float value, const T* biases) {
    narrow(biases ? value + widen(biases[column]) : value, p.result + row * width + column);
  };
  const int64_t first_column = own.column0 + warp * kColumns + (kBackward ? 8 : 2) * t;  // of the lane
  const int left = static_cast<int>(width - first_column < kColumns ? width - first_column : kColumns);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = p.slabs.row(own.first_slab + local_slab, i * kTileHeight + half * 8 + g);
      if (row < 0) continue;
      const T* biases = biases_of(row);
      float* to = p.partials + split * values + row * width + first_column;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = kBackward ? kQuad * e + j : 8 * j + e;
          if (column >= left) continue;
          const float value = sums[i][j][2 * half + e];
          if (p.splits == 1) {
            finish(row, first_column + column, value, biases);
          } else {
            to[column] = value;
          }
        }
      }
    }
  }
  if (p.splits == 1) return;
  if (!last_to_arrive(p.tickets + group * p.blocks + block, static_cast<unsigned>(p.splits))) return;
  const int log_across = 5 + p.log_warps;
  for (int i = threadIdx.x; i < (p.slabs_each * kSlabRows) << log_across; i += blockDim.x) {
    const int64_t row = p.slabs.row(own.first_slab + (i >> log_across) / kSlabRows, (i >> log_across) % kSlabRows);
    const int64_t column = own.column0 + (i & ((1 << log_across) - 1));
    if (row < 0 || column >= width) continue;
    const float* part = p.partials + row * width + column;
    float total = 0.0f;
#pragma unroll 8
    for (int64_t other = 0; other < p.splits; ++other) total += fresh(part + other * values);
    finish(row, column, total, biases_of(row));
  }
}

// How a product is dealt to blocks.
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
    return {splits * slabs.all_samples * shape.rows * width, groups * blocks};
  }
};

Plan plan_of(const LinearShape& shape, int64_t samples, bool backward) {
  return Plan(shape, samples, backward ? shape.out : shape.in, backward ? shape.in : shape.out);
}

template <typename T>
bool aligned(const T* pointer, int64_t row) {
  return reinterpret_cast<uintptr_t>(pointer) % (kQuad * sizeof(T)) == 0 && row % kQuad == 0;
}

template <typename T, bool kBackward>
cudaError_t launch(const T* rows, const T* weight, const T* logits, const T* biases, T* result, float* scratch,
                   unsigned* tickets, bool allow_tf32, const LinearShape& shape, const MaskNoise& noise,
                   cudaStream_t stream) {
  const int64_t depth = kBackward ? shape.out : shape.in, width = kBackward ? shape.in : shape.out;
  if (noise.samples * shape.rows * width == 0) return cudaSuccess;
  const Plan plan = plan_of(shape, noise.samples, kBackward);
  const Problem<T> p{rows, weight, logits, biases, result, scratch, tickets, shape, noise, plan.slabs, plan.log_warps,
                     plan.slabs_each, plan.blocks, plan.splits, plan.chunks_each, aligned(rows, depth),
                     aligned(weight, shape.in) && aligned(logits, shape.in), !allow_tf32};
  const int threads = (kWarp * plan.slabs_each) << plan.log_warps;
  const auto kernel = product_kernel<T, kBackward>;
  return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(plan.blocks * plan.groups * plan.splits, 1), threads,
                                sizeof(Memory<T>), stream, p);
}

}  // namespace

template <typename T>
Scratch masked_linear_scratch(LinearShape shape, int64_t samples, bool backward) {
  if (sizeof(T) == 8 || samples * shape.rows * (backward ? shape.in : shape.out) == 0) return {0, 0};
  return plan_of(shape, samples, backward).scratch(shape, backward ? shape.in : shape.out);
}

template <typename T>
cudaError_t masked_linear_forward(const T* x, const T* weight, const T* logits, const T* biases, T* result,
                                  Compute<T>* scratch, unsigned* tickets, bool allow_tf32, LinearShape shape,
                                  MaskNoise noise, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::forward(x, weight, logits, biases, result, shape, noise, stream);
  } else {
    return launch<T, false>(x, weight, logits, biases, result, scratch, tickets, allow_tf32, shape, noise, stream);
  }
}

template <typename T>
cudaError_t masked_linear_backward_x(const T* grad, const T* weight, const T* logits, T* grad_x, Compute<T>* scratch,
                                     unsigned* tickets, bool allow_tf32, LinearShape shape, MaskNoise noise,
                                     cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::backward_x(grad, weight, logits, grad_x, shape, noise, stream);
  } else {
    const T* biases = nullptr;
    return launch<T, true>(grad, weight, logits, biases, grad_x, scratch, tickets, allow_tf32, shape, noise, stream);
  }
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template Scratch masked_linear_scratch<T>(LinearShape, int64_t, bool);                                              \
  template cudaError_t masked_linear_forward<T>(const T*, const T*, const T*, const T*, T*, Compute<T>*, unsigned*,   \
                                                bool, LinearShape, MaskNoise, cudaStream_t);                          \
  template cudaError_t masked_linear_backward_x<T>(const T*, const T*, const T*, T*, Compute<T>*, unsigned*, bool,    \
                                                   LinearShape, MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
