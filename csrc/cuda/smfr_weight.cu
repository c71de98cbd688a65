// Gradients of all weights and biases of a stack in one launch: a block has kTile x kTile of one weight and walks
// through the whole batch, so that no sum is shared between blocks. Further blocks add up the gradients of the
// temperatures.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kRowsStep = 32;      // rows of the batch in shared memory at a time: one half for each half of the warps
constexpr int kPitch = kTile + 8;  // lanes of a fragment, 4 rows x 8 columns, use different banks
constexpr int kBuffer = kRowsStep * kPitch;

__host__ __device__ inline int tiles_of(int size) { return (size + kTile - 1) / kTile; }

template <typename W>
__host__ __device__ inline int blocks_of(const StackLinear<W>& linear) {
  return tiles_of(linear.out) * tiles_of(linear.in);
}

// Columns of a matrix [batch][width], either fp32 or the blocks that a layer reads.
template <typename T>
struct Columns {
  const float* wide;
  Blocks<T> blocks;
  int width;
  __device__ float at(int64_t row, int column) const {
    return wide ? wide[row * width + column] : read_at(blocks, row * width + column);
  }
};

// The factors of one tile: grads [batch, out], and inputs, which for the first layer of an update FNN are [routed ; x].
template <typename T>
struct Factors {
  Columns<T> grads, inputs, more;
  int64_t batch;
  __device__ float input(int64_t row, int column) const {
    return column < inputs.width ? inputs.at(row, column) : more.at(row, column - inputs.width);
  }
};

template <typename T, typename W>
__device__ inline Factors<T> factors_of(const Stack<T, W>& s, int index) {
  const int per_layer = s.route + s.update, l = index / per_layer, own = index - l * per_layer;
  const int m = l ? s.layer[l - 1].n : s.m;
  const StackLayer<T> layer = layer_of(s, l, m);
  const int values = layer.n * s.d;
  constexpr Blocks<T> kNone{nullptr, false};
  const Columns<T> none{nullptr, kNone, 0};
  Columns<T> x{nullptr, input_of(s, l), m * s.d};
  if constexpr (sizeof(T) == 4) x.wide = static_cast<const float*>(x.blocks.first);
  const float *saved = layer.saved, *grads = layer.grads, *before = nullptr;  // before: what the current layer reads
  for (int i = 0; i < own; ++i) {
    const int64_t section = s.batch * s.linear[l * per_layer + i].out;
    before = saved;
    saved += section;
    grads += section;
    if (i + 1 == s.route) {
      before = saved;
      saved += s.batch * values;
    }
  }
  const StackLinear<W>& linear = s.linear[index];
  Factors<T> f{{grads, kNone, linear.out}, {before, kNone, linear.in}, none, s.batch};
  if (own == 0) f.inputs = x;
  if (own == s.route) {
    f.inputs.width = values;
    if (s.context) f.more = x;
  }
  return f;
}

// Loads rows row0 .. row0 + kRowsStep of columns column0 .. column0 + kTile, zeros where there are none.
template <typename T>
__device__ inline void load(const Columns<T>& from, int64_t batch, int64_t row0, int column0, int to_column, int count,
                            float* to) {
  constexpr int kFours = kTile / 4;
  const bool whole = from.wide && from.width % 4 == 0 && column0 % 4 == 0 && to_column % 4 == 0 && count % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(from.wide) % 16 == 0;
  if (whole) {
    for (int i = threadIdx.x; i < kRowsStep * kFours; i += kStackThreads) {
      const int row = i / kFours, column = i % kFours * 4;
      if (column >= count) continue;
      const bool inside = row0 + row < batch;
      copy_async<16>(to + row * kPitch + to_column + column,
                     inside ? from.wide + (row0 + row) * from.width + column0 + column : from.wide, inside);
    }
  } else {
    for (int i = threadIdx.x; i < kRowsStep * kTile; i += kStackThreads) {
      const int row = i / kTile, column = i % kTile;
      if (column >= count) continue;
      const bool inside = row0 + row < batch;
      float* place = to + row * kPitch + to_column + column;
      if (from.wide) {
        copy_async<4>(place, inside ? from.wide + (row0 + row) * from.width + column0 + column : from.wide, inside);
      } else {
        *place = inside ? from.at(row0 + row, column0 + column) : 0.0f;
      }
    }
  }
}
__device__ inline void clear(int from_column, float* to) {
  for (int i = threadIdx.x; i < kRowsStep * kTile; i += kStackThreads) {
    if (i % kTile >= from_column) to[i / kTile * kPitch + i % kTile] = 0.0f;
  }
}

template <typename T>
__device__ inline void load_step(const Factors<T>& f, int64_t row0, int out0, int in0, float* grads, float* inputs) {
  const auto at_most = [](int count, int most) { return count < most ? count : most; };
  load(f.grads, f.batch, row0, out0, 0, at_most(f.grads.width - out0, kTile), grads);
  const int first = in0 < f.inputs.width ? at_most(f.inputs.width - in0, kTile) : 0;
  if (first) load(f.inputs, f.batch, row0, in0, 0, first, inputs);
  const int from = in0 + first - f.inputs.width, rest = at_most(f.more.width - from, kTile - first);
  if (f.more.width && rest > 0) load(f.more, f.batch, row0, from, first, rest, inputs);
  commit_copies();
}

struct Split {
  uint32_t high, low;
  __device__ void set(float value) {
    high = tf32_bits(value);
    low = __float_as_uint(value - __uint_as_float(high));
  }
};

// A warp's 32 x 32 of the tile, over 16 rows of the batch.
__device__ inline void multiply(const float* grads, const float* inputs, bool precise, bool few,
                                float (&total)[2][4][4], float (&low)[2][4][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k0 = 0; k0 < 16; k0 += 8) {
    Split a[2][4], b[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = (k0 + t + j / 2 * 4) * kPitch;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) a[tile][j].set(grads[row + tile * 16 + j % 2 * 8 + g]);
#pragma unroll
      for (int half = 0; half < 2; ++half) b[j][half].set(inputs[(k0 + t + half * 4) * kPitch + j * 8 + g]);
    }
    float* type = nullptr;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t high[4] = {a[i][0].high, a[i][1].high, a[i][2].high, a[i][3].high};
      const uint32_t rest[4] = {a[i][0].low, a[i][1].low, a[i][2].low, a[i][3].low};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float part[4] = {};  // zero in the last rows, where no truncation must be compensated for
        mma(type, part, high, b[j][0].high, b[j][1].high);
        if (precise) {
          mma(type, low[i][j], rest, b[j][0].high, b[j][1].high);
          mma(type, low[i][j], high, b[j][0].low, b[j][1].low);
          if (few) {
            const uint32_t last[4] = {last_bit(rest[0]), last_bit(rest[1]), last_bit(rest[2]), last_bit(rest[3])};
            mma(type, low[i][j], rest, b[j][0].low, b[j][1].low);
            mma(type, low[i][j], high, last_bit(b[j][0].low), last_bit(b[j][1].low));
            mma(type, low[i][j], last, b[j][0].high, b[j][1].high);
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[i][j][e] += part[e];
          low[i][j][e] += kCutOff * part[e];
        }
      }
    }
  }
}

template <typename T, typename W>
__device__ inline void sum_taus(const Stack<T, W>& s, int layer, const float* partials) {
  const int64_t tiles = (s.batch + kTileRows - 1) / kTileRows, copy = copy_of(s);
  float total = 0;
  partials += (copy * s.depth + layer) * tiles;
  for (int64_t i = threadIdx.x; i < tiles; i += kStackThreads) total += partials[i];
  total = block_sum(total);
  if (threadIdx.x == 0) {
    const NumberType type = s.layer[layer].tau_type;
    put_number(total, number_after(s.layer[layer].tau, type, copy), type);
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(kStackThreads, 1)
    stack_weight_kernel(const __grid_constant__ Stack<T, W> s, int first_tau, const float* tau_partials) {
  int block = static_cast<int>(blockIdx.x);
  if (block >= first_tau) {
    sum_taus(s, block - first_tau, tau_partials);
    return;
  }
  FASTMOD_SHARED(float, memory, 4 * kBuffer);  // two buffers of each factor
  int index = 0;
  for (; block >= blocks_of(s.linear[index]); ++index) block -= blocks_of(s.linear[index]);
  const StackLinear<W> linear = s.linear[index];
  const Factors<T> f = factors_of(s, index);
  const int across = tiles_of(linear.in), out0 = block / across * kTile, in0 = block % across * kTile;
  const auto buffer = [&](int64_t step, int which) { return memory + (step % 2 * 2 + which) * kBuffer; };
  for (int i = 0; i < 2; ++i) {  // columns that no load writes
    clear(linear.out - out0, buffer(i, 0));
    clear(linear.in - in0, buffer(i, 1));
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp, half = warp / 4;
  const int out_at = warp % 4 / 2 * 32, in_at = warp % 2 * 32;
  const bool has_work = out0 + out_at < linear.out && in0 + in_at < linear.in;
  const bool precise = sizeof(T) != 4 || s.precise;
  float total[2][4][4] = {}, low[2][4][4] = {};
  const int bias_column = threadIdx.x % kTile, bias_part = static_cast<int>(threadIdx.x) / kTile;
  float bias = 0;
  const int64_t steps = (s.batch + kRowsStep - 1) / kRowsStep;
  load_step(f, 0, out0, in0, buffer(0, 0), buffer(0, 1));
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // these rows have arrived; the previous ones are no longer needed
    if (step + 1 < steps) load_step(f, (step + 1) * kRowsStep, out0, in0, buffer(step + 1, 0), buffer(step + 1, 1));
    const float* grads = buffer(step, 0);
    if (in0 == 0) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kRowsStep / 4; ++i) sum += grads[(bias_part * (kRowsStep / 4) + i) * kPitch + bias_column];
      bias += sum;
    }
    if (has_work) {
      multiply(grads + half * 16 * kPitch + out_at, buffer(step, 1) + half * 16 * kPitch + in_at, precise,
               kFewTerms > 0 && s.batch <= kFewTerms, total, low);
    }
  }

  __syncthreads();  // the buffers are free and take the sums of the second half of the warps, and the bias
  float* sums = memory + 1024;
  memory[threadIdx.x] = bias;
  const int own = (warp % 4 * kWarp + lane) * 33;
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    total[e / 16][e / 4 % 4][e % 4] += low[e / 16][e / 4 % 4][e % 4];
    if (half == 1) sums[own + e] = total[e / 16][e / 4 % 4][e % 4];
  }
  __syncthreads();
  if (in0 == 0 && static_cast<int>(threadIdx.x) < kTile && out0 + bias_column < linear.out) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += memory[i * kTile + bias_column];
    narrow(sum, bias_of(s, index) + out0 + bias_column);
  }
  if (half == 1 || !has_work) return;
  W* const weight = weight_of(s, index);
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const int o = out0 + out_at + e / 16 * 16 + e % 4 / 2 * 8 + lane / 4;
    const int i = in0 + in_at + e / 4 % 4 * 8 + lane % 4 * 2 + e % 2;
    if (o >= linear.out || i >= linear.in) continue;
    float value = total[e / 16][e / 4 % 4][e % 4] + sums[own + e];
    if (!finite(value)) {  // splitting a factor that is not finite gives NaN: recompute in plain order
      value = 0;
#pragma unroll 1
      for (int64_t row = 0; row < s.batch; ++row) value += f.grads.at(row, o) * f.input(row, i);
    }
    narrow(value, weight + static_cast<int64_t>(o) * linear.in + i);
  }
}

}  // namespace

template <typename T, typename W>
cudaError_t smfr_backward_weight(const Stack<T, W>& stack, const float* tau_partials, cudaStream_t stream) {
  if (!stack_is_small(stack)) return cudaErrorInvalidValue;
  int blocks = 0;
  for (int i = 0; stack.linear[0].weight && i < stack.depth * (stack.route + stack.update); ++i) {
    blocks += blocks_of(stack.linear[i]);
  }
  const int all = blocks + (tau_partials ? stack.depth : 0);
  if (stack.batch == 0 || all == 0) return cudaSuccess;
  return for_copies(stack, [&](const Stack<T, W>& some, unsigned copies) {
    const auto kernel = stack_weight_kernel<T, W>;
    return FASTMOD_LAUNCH(kernel, dim3(static_cast<unsigned>(all), copies), kStackThreads, stream, some, blocks,
                          tau_partials);
  });
}

#define FASTMOD_INSTANTIATE(T, W) \
  template cudaError_t smfr_backward_weight(const Stack<T, W>&, const float*, cudaStream_t);
FASTMOD_INSTANTIATE_STACKS

}  // namespace fastmod::cuda
