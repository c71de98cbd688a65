// Gradients of weight and logits of masked_linear on tensor cores. For every sample the product grad^T x over its rows
// is multiplied by the mask, or by the slope of the relaxed mask, and added up over the samples.
//
// A warp has 16 outputs and 32 inputs. Rows are copied unchanged into shared memory, 32 at a time, while the previous
// rows are worked on; fp32 is split into two tf32 numbers on a second copy within shared memory. Neither factor is
// transposed by hand: outputs and inputs may be assigned to the rows and columns of a tile in any order, so that a lane
// gets neighbours by one load, and ldmatrix transposes 16-bit numbers. A lane's part of the product is four quads of
// neighbouring inputs, each of which takes one Philox call. Logits are read once for all samples.
#include "masked_linear.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kChunk = 32;    // rows
constexpr int kStep = 16;     // rows per product, which starts at zero, as tensor cores round towards zero
constexpr int kOutputs = 16;  // per warp
constexpr int kInputs = 32;   // per warp
constexpr int kTilesAcross = kInputs / 8;
constexpr int kQuads = 4;     // per lane
constexpr int64_t kEnoughBlocks = 128;

template <typename T, bool kMixed>
struct Problem {
  const T* grad;
  Operand<kMixed, const T> x, weight, logits;
  Operand<kMixed, T> grad_weight, grad_logits;
  float tau;
  bool precise, near, vector_rows, vector_weight;
  LinearShape shape;
  MaskNoise noise;
};

using Product = float[kTilesAcross][4];

template <bool kFirst>
__device__ inline void add(const float (&found)[4], float (&to)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = kFirst ? found[e] : to[e] + found[e];
}

// Offsets in bytes of a lane's part of the first row of both factors.
struct Places {
  int grads, inputs;
};
__device__ inline int distance(const void* from, const void* to) {
  return held(static_cast<int>(static_cast<const unsigned char*>(to) - static_cast<const unsigned char*>(from)));
}
__device__ inline const unsigned char* place(const void* from, int bytes) {
  return static_cast<const unsigned char*>(from) + bytes;
}

// A chunk of both factors in shared memory, and its product. 16-bit rows are unchanged, except that each 16 inputs have
// the order 0, 1, 4, 5, .. 12, 13, 2, 3, .. 14, 15, so that a lane's columns of two tiles are a quad. There are no bank
// conflicts.
template <typename T, int kOut, int kIn>
struct Factors {
  alignas(16) uint32_t grads[kChunk][kOut / 2 + 4];
  alignas(16) uint32_t inputs[kChunk][kIn / 2 + 4];

  // Quad q of a lane, relative to the warp's first output and input.
  static __device__ int out_of(int q, int g) { return g + q % 2 * 8; }
  static __device__ int in_of(int q, int t) { return 4 * t + q / 2 * 16; }
  static __device__ float value(const Product& product, int q, int i) {
    return product[q / 2 * 2 + i / 2][q % 2 * 2 + i % 2];
  }

  // Returns a number that is not finite if one of the four is not and this matters (see the fp32 version).
  template <bool kQuick>
  __device__ float put_grads(const T* quad, int row, int column, bool) {
    *reinterpret_cast<uint2*>(&grads[row][column / 2]) = *reinterpret_cast<const uint2*>(quad);
    return 0.0f;
  }
  template <bool kQuick>
  __device__ float put_inputs(const T* quad, int row, int column, bool) {
    const uint2 both = *reinterpret_cast<const uint2*>(quad);
    const int at = column / 16 * 8 + column % 16 / 4;
    inputs[row][at] = both.x;
    inputs[row][at + 4] = both.y;
    return 0.0f;
  }

  __device__ Places places(int out, int in, int lane) const {
    const int line = lane % 8, eight = lane / 8;
    return {distance(this, &grads[line + eight / 2 * 8][out / 2 + eight % 2 * 4]),
            distance(this, &inputs[line + eight % 2 * 8][in / 2 + eight / 2 * 4])};
  }

  template <bool kPrecise, bool kFirst>
  __device__ void multiply(int row, const Places& at, Product& product) const {
    T* type = nullptr;
    uint32_t a[4];
    ldmatrix_transposed(a, place(this, at.grads) + row * sizeof(grads[0]));
#pragma unroll
    for (int j = 0; j < kTilesAcross; j += 2) {
      uint32_t b[4];
      ldmatrix_transposed(b, place(this, at.inputs) + row * sizeof(inputs[0]) + j * 16);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float found[4];
        mma_from_zero(type, found, a, b[2 * tile], b[2 * tile + 1]);
        add<kFirst>(found, product[j + tile]);
      }
    }
  }
};

// fp32: two neighbouring outputs are stored as both high parts, then both low parts; inputs have high and low parts
// in separate arrays.
template <int kOut, int kIn>
struct Factors<float, kOut, kIn> {
  alignas(16) uint32_t grads[kChunk][2 * kOut + 8];
  alignas(16) uint32_t inputs[2][kChunk][kIn + 8];

  static __device__ int out_of(int q, int g) { return 2 * g + q % 2; }
  static __device__ int in_of(int q, int t) { return 8 * t + q / 2 * 4; }
  static __device__ float value(const Product& product, int q, int i) { return product[i][q % 2 * 2 + q / 2]; }

  // kQuick: splits as if all were finite. If the returned number is not finite, it must be done again without kQuick.
  template <bool kQuick>
  __device__ float put_grads(const float* quad, int row, int column, bool precise) {
    uint4 unit[2];
    const float rests = split<kQuick>(quad, precise, unit);
    uint4* to = reinterpret_cast<uint4*>(&grads[row][2 * column]);
    to[0] = {unit[0].x, unit[0].y, unit[1].x, unit[1].y};
    to[1] = {unit[0].z, unit[0].w, unit[1].z, unit[1].w};
    return rests;
  }
  template <bool kQuick>
  __device__ float put_inputs(const float* quad, int row, int column, bool precise) {
    uint4 unit[2];
    const float rests = split<kQuick>(quad, precise, unit);
    for (int part = 0; part < 2; ++part) *reinterpret_cast<uint4*>(&inputs[part][row][column]) = unit[part];
    return rests;
  }
  template <bool kQuick>
  static __device__ float split(const float* quad, bool precise, uint4 (&unit)[2]) {
    float v[kQuad];
    read_quad(quad, v);
    if constexpr (!kQuick) {
      Four<float>::split(v, precise, unit);
      return 0.0f;
    }
    return Four<float>::split_finite(v, unit);
  }

  __device__ Places places(int out, int in, int lane) const {
    const int g = lane / 4, t = lane % 4;
    return {distance(this, &grads[t][2 * out + 4 * g]), distance(this, &inputs[0][t][in + 4 * g])};
  }

  template <bool kPrecise, bool kFirst>
  __device__ void multiply(int row, const Places& at, Product& product) const {
    float* type = nullptr;
    uint32_t a[2][2][4], b[2][2][kTilesAcross][2];  // [part][half of the step]
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int line = row + 4 * k, half = k / 2, e = k % 2;
      const uint4 of_grads = *reinterpret_cast<const uint4*>(place(this, at.grads) + line * sizeof(grads[0]));
      a[0][half][2 * e] = of_grads.x, a[0][half][2 * e + 1] = of_grads.y;
      a[1][half][2 * e] = of_grads.z, a[1][half][2 * e + 1] = of_grads.w;
#pragma unroll
      for (int part = 0; part < (kPrecise ? 2 : 1); ++part) {
        const unsigned char* from = place(this, at.inputs) + part * sizeof(inputs[0]) + line * sizeof(inputs[0][0]);
        const uint4 of_inputs = *reinterpret_cast<const uint4*>(from);
        b[part][half][0][e] = of_inputs.x, b[part][half][1][e] = of_inputs.y;
        b[part][half][2][e] = of_inputs.z, b[part][half][3][e] = of_inputs.w;
      }
    }
#pragma unroll
    for (int j = 0; j < kTilesAcross; ++j) {
      float found[4];
      if constexpr (kPrecise) {
        mma_from_zero(type, found, a[1][0], b[0][0][j][0], b[0][0][j][1]);
        mma(type, found, a[1][1], b[0][1][j][0], b[0][1][j][1]);
        mma(type, found, a[0][0], b[1][0][j][0], b[1][0][j][1]);
        mma(type, found, a[0][1], b[1][1][j][0], b[1][1][j][1]);
        mma(type, found, a[0][0], b[0][0][j][0], b[0][0][j][1]);
      } else {
        mma_from_zero(type, found, a[0][0], b[0][0][j][0], b[0][0][j][1]);
      }
      mma(type, found, a[0][1], b[0][1][j][0], b[0][1][j][1]);
      add<kFirst>(found, product[j]);
    }
  }
};

template <typename T, int kDown, int kAcross>
struct Memory {
  static constexpr int kOut = kOutputs * kDown, kIn = kInputs * kAcross, kThreads = kWarp * kDown * kAcross;
  static_assert(kOut == kIn, "half the threads copy one factor, half the other");
  static constexpr int kLine = kOut / kQuad;                                       // threads that copy a row
  static constexpr int kRowStep = kThreads / 2 / kLine, kOwn = kChunk / kRowStep;  // rows at a time, quads per thread
  Factors<T, kOut, kIn> factors;  // first: this saves an addition in its addresses
  alignas(16) T raw[kOwn][kThreads][kQuad];
};

// A thread's part in loading rows into shared memory: one quad of columns.
template <typename T, int kDown, int kAcross, bool kMixed>
class Loader {
  using Own = Memory<T, kDown, kAcross>;
  Own& memory_;
  Operand<kMixed, const T> from_;
  int64_t width_;
  int inside_, row_, column_;
  bool of_inputs_, vector_, precise_;

 public:
  __device__ Loader(const Problem<T, kMixed>& p, Own& memory, int64_t copy, int64_t out0, int64_t in0)
      : memory_(memory), vector_(p.vector_rows), precise_(p.precise) {
    of_inputs_ = threadIdx.x >= Own::kThreads / 2;
    row_ = threadIdx.x % (Own::kThreads / 2) / Own::kLine;
    column_ = threadIdx.x % Own::kLine * kQuad;
    width_ = of_inputs_ ? p.shape.in : p.shape.out;
    const int64_t first = (of_inputs_ ? in0 : out0) + column_;
    inside_ = clamped(width_ - first);
    const int64_t own = copy * (of_inputs_ ? p.shape.copies.x : p.shape.copies.grad);
    const Operand<kMixed, const T> grad{p.grad};
    from_ = either(of_inputs_, p.x, grad) + (own + (inside_ > 0 ? first : 0) + row_ * width_);
  }
  // Starts copying the next `rows` rows, and zeros for the rest of the chunk.
  __device__ void load(int rows) {
    if (vector_) {
      copy<true>(rows);
    } else {
      copy<false>(rows);
    }
    commit_copies();
    from_ += rows * width_;
  }
  template <bool kVector>
  __device__ void copy(int rows) {
    auto from = from_;
    const auto valid = from_ + -(row_ * width_);  // a row that always exists
#pragma unroll
    for (int i = 0; i < Own::kOwn; ++i) {
      const bool there = row_ + i * Own::kRowStep < rows;
      copy_quad<kVector>(memory_.raw[i][threadIdx.x], either(there, from, valid), there ? inside_ : 0);
      from += Own::kRowStep * width_;
    }
  }
  __device__ void put() const {
    const float rests = put_all<true>();
    if (rests - rests != 0.0f) put_all<false>();
  }
  template <bool kQuick>
  __device__ float put_all() const {
    float rests = 0.0f;
    if (of_inputs_) {
#pragma unroll
      for (int i = 0; i < Own::kOwn; ++i) {
        rests += memory_.factors.template put_inputs<kQuick>(memory_.raw[i][threadIdx.x], row_ + i * Own::kRowStep,
                                                             column_, precise_);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Own::kOwn; ++i) {
        rests += memory_.factors.template put_grads<kQuick>(memory_.raw[i][threadIdx.x], row_ + i * Own::kRowStep,
                                                            column_, precise_);
      }
    }
    return rests;
  }
};

__device__ inline int at_most(int64_t left, int most) { return left < most ? static_cast<int>(left) : most; }

template <typename T, int kDown, int kAcross, bool kMixed>
__global__ void __launch_bounds__(kWarp* kDown* kAcross, 1)
    weight_kernel(const __grid_constant__ Problem<T, kMixed> p) {
  using Own = Memory<T, kDown, kAcross>;
  using Parts = Factors<T, Own::kOut, Own::kIn>;
  FASTMOD_DYNAMIC_SHARED(bytes);
  Own& memory = *reinterpret_cast<Own*>(bytes);
  const int64_t across = (p.shape.in + Own::kIn - 1) / Own::kIn, down = quotient(blockIdx.x, across);
  const int64_t out0 = down * Own::kOut, in0 = (blockIdx.x - down * across) * Own::kIn;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
  const int own_out = warp / kAcross * kOutputs, own_in = warp % kAcross * kInputs;
  const LinearCopies& copies = p.shape.copies;
  const int64_t copy = blockIdx.y, result = copy * p.shape.out * p.shape.in;
  const auto logits = p.logits + copy * copies.logits, weights = p.weight + copy * copies.weight;
  const MaskKeys keys(seed_of(p.noise, copy * copies.seed), p.noise.stream);
  const bool at_one = p.tau == 1.0f;
  const int64_t first_out = out0 + own_out + Parts::out_of(0, g), first_in = in0 + own_in + Parts::in_of(0, t);
  const int64_t first_at = first_out * p.shape.in + first_in;
  const auto at_of = [&](int q) {
    return first_at + (Parts::out_of(q, 0) ? Parts::out_of(q, 0) * p.shape.in : 0) + Parts::in_of(q, 0);
  };
  const bool whole = p.vector_weight && out0 + Own::kOut <= p.shape.out && in0 + Own::kIn <= p.shape.in;
  const auto left_of = [&](int q) {  // how many weights of the quad exist
    return first_out + Parts::out_of(q, 0) < p.shape.out ? clamped(p.shape.in - first_in - Parts::in_of(q, 0)) : 0;
  };
  const auto read = [&](const Operand<kMixed, const T>& matrix, float(&v)[kQuads][kQuad]) {
    if (whole) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) read_quad(matrix + at_of(q), v[q]);
    } else {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int left = left_of(q);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) v[q][i] = i < left ? value_at(matrix, at_of(q) + i) : 0.0f;
      }
    }
  };
  const auto write = [&](const float(&v)[kQuads][kQuad], const Operand<kMixed, T>& matrix) {
    if (whole) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) write_quad(v[q], matrix + at_of(q));
    } else {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int left = left_of(q);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          if (i < left) put_at(v[q][i], matrix, at_of(q) + i);
        }
      }
    }
  };

  uint32_t low[kQuads][kQuad], flip[kQuads][kQuad];
  float slope_of[kQuads][kQuad];  // exp(-|logit|) if tau = 1, else the logit
  float of_weight[kQuads][kQuad] = {}, of_logits[kQuads][kQuad] = {};
  read(logits, slope_of);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float logit = slope_of[q][i];
      low[q][i] = low_word(roughly_off(logit));
      flip[q][i] = held(logit < 0.0f ? 0x7fffffu : 0u);
      slope_of[q][i] = at_one ? quick_decay(logit) : logit;
    }
  }

  const Places places = memory.factors.places(own_out, own_in, lane);
  Loader<T, kDown, kAcross, kMixed> loader(p, memory, copy, out0, in0);
  uint64_t index = first_word(p.shape, p.noise, 0) + static_cast<uint64_t>(first_at);
  int64_t rows_left = p.shape.rows;  // rows of the sample whose copy has not been started
  const auto load = [&] {
    const int rows = at_most(rows_left, kChunk);
    loader.load(rows);
    rows_left -= rows;
  };
  const int64_t samples = p.shape.rows > 0 ? p.noise.samples : 0;  // without rows all gradients are zero
  if (samples > 0) load();
#pragma unroll 1
  for (int64_t sample = 0; sample < samples; ++sample) {
    Product product;
    const auto add_chunk = [&](auto first, int64_t row) {
      constexpr bool kFirst = decltype(first)::value;
      wait_copies<0>();
      __syncthreads();  // the previous chunk has been read
      loader.put();
      if (rows_left == 0 && sample + 1 < samples) rows_left = p.shape.rows;
      if (rows_left > 0) load();
      __syncthreads();
      const auto multiply = [&](auto precise) {
        constexpr bool kPrecise = decltype(precise)::value;
        memory.factors.template multiply<kPrecise, kFirst>(0, places, product);
        if (row + kStep >= p.shape.rows) return;
        memory.factors.template multiply<kPrecise, false>(kStep, places, product);
      };
      if (p.precise) {
        multiply(std::true_type{});
      } else {
        multiply(std::false_type{});
      }
    };
    add_chunk(std::true_type{}, 0);
#pragma unroll 1
    for (int64_t row = kChunk; row < p.shape.rows; row += kChunk) add_chunk(std::false_type{}, row);
    PhiloxWords words[kQuads];
    if (p.near) {
      const auto group = static_cast<uint32_t>(index / kQuad);
#pragma unroll
      for (int q = 0; q < kQuads; ++q)
        words[q] = keys.near(group + static_cast<uint32_t>((at_of(q) - first_at) / kQuad));
    } else {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) words[q] = words_from(keys, index + static_cast<uint64_t>(at_of(q) - first_at));
    }
    index += static_cast<uint64_t>(p.shape.out * p.shape.in);
    if (given(p.grad_weight)) {
      uint32_t nearest = 0xffffffffu;  // the smallest distance of a word above its low word
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) nearest = smaller(nearest, words[q].word[i] - low[q][i]);
      }
      if (nearest < kUncertainWords) {
        float logit[kQuads][kQuad];
        read(logits, logit);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            const bool kept = static_cast<int32_t>(words[q].word[i] >> 9) >= words_off(logit[q][i]);
            of_weight[q][i] += Parts::value(product, q, i) * (kept ? 1.0f : 0.0f);
          }
        }
      } else {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            of_weight[q][i] += Parts::value(product, q, i) * (words[q].word[i] >= low[q][i] ? 1.0f : 0.0f);
          }
        }
      }
    }
    if (given(p.grad_logits) && at_one) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const float slope = quick_slope(words[q].word[i] >> 9, flip[q][i], slope_of[q][i]);
          of_logits[q][i] += Parts::value(product, q, i) * slope;
        }
      }
    } else if (given(p.grad_logits)) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const float slope = slope_at(uniform_from_word<float>(words[q].word[i]), slope_of[q][i], p.tau);
          of_logits[q][i] += Parts::value(product, q, i) * slope;
        }
      }
    }
  }
  if (given(p.grad_weight)) {
    if (p.noise.samples > 0) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {  // NaN where the logit is NaN
          if (slope_of[q][i] != slope_of[q][i]) of_weight[q][i] = NAN;
        }
      }
    }
    write(of_weight, p.grad_weight + result);
  }
  if (given(p.grad_logits)) {
    float weight[kQuads][kQuad];
    read(weights, weight);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) of_logits[q][i] *= at_one ? slope_of[q][i] * weight[q][i] : weight[q][i];
    }
    write(of_logits, p.grad_logits + result);
  }
}

template <typename T, int kDown, int kAcross>
int64_t blocks_of(const LinearShape& shape) {
  using Own = Memory<T, kDown, kAcross>;
  return ((shape.out + Own::kOut - 1) / Own::kOut) * ((shape.in + Own::kIn - 1) / Own::kIn);
}

template <typename T, int kDown, int kAcross, bool kMixed>
cudaError_t launch(const Problem<T, kMixed>& p, cudaStream_t stream) {
  using Own = Memory<T, kDown, kAcross>;
  const auto kernel = weight_kernel<T, kDown, kAcross, kMixed>;
  const dim3 grid = grid_of(blocks_of<T, kDown, kAcross>(p.shape), p.shape.copies);
  return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, Own::kThreads, sizeof(Own), stream, p);
}

}  // namespace

template <typename T>
cudaError_t masked_linear_backward_weight(const T* grad, Mixed<const T> x, Mixed<const T> weight,
                                          Mixed<const T> logits, Mixed<T> grad_weight, Mixed<T> grad_logits,
                                          Compute<T> tau, bool allow_tf32, LinearShape shape, MaskNoise noise,
                                          cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {
    return plain::backward_weight(grad, x.narrow, weight.narrow, logits.narrow, grad_weight.narrow, grad_logits.narrow,
                                  tau, shape, noise, stream);
  } else {
    if (shape.copies.count * shape.out * shape.in == 0) return cudaSuccess;
    const bool vector_weight = quads_aligned(weight, shape.in) && quads_aligned(logits, shape.in) &&
                               quads_aligned(grad_weight, shape.in) && quads_aligned(grad_logits, shape.in);
    const auto run = [&](auto some) {
      constexpr bool kMixed = decltype(some)::value;
      const Problem<T, kMixed> p{grad, operand<kMixed>(x), operand<kMixed>(weight), operand<kMixed>(logits),
                                 operand<kMixed>(grad_weight), operand<kMixed>(grad_logits), tau, !allow_tf32,
                                 near_quads(noise, shape.out * shape.in, shape.in),
                                 quads_aligned(grad, shape.out) && quads_aligned(x, shape.in), vector_weight, shape,
                                 noise};
      return blocks_of<T, 4, 2>(shape) < kEnoughBlocks ? launch<T, 2, 1>(p, stream) : launch<T, 4, 2>(p, stream);
    };
    return with_mixed<T>(run, x, weight, logits, grad_weight, grad_logits);
  }
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template cudaError_t masked_linear_backward_weight<T>(const T*, Mixed<const T>, Mixed<const T>, Mixed<const T>,    \
                                                        Mixed<T>, Mixed<T>, Compute<T>, bool, LinearShape,           \
                                                        MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
