// Runs CUDA C++ on the host: g++ compiles the kernels' .cu files against this header instead of the CUDA toolkit.
//
// Every CUDA thread is a fiber. A block's fibers run one after another in an order shuffled by a seed and switch at
// __syncthreads and at warp operations. __shared__ memory is fresh and filled with NaN for every block. A launch fails
// with cudaErrorLaunchFailure, and cuda_host::message() says why, on
//   - a barrier that some threads of the block never reach, or that they reach at different lines,
//   - a warp operation that a lane of its mask does not take part in,
//   - more static shared memory than a block may have.
// ASan finds what is out of bounds, in global memory and in each __shared__ array; TSan finds data races, since only
// barriers order the fibers of a block for it, and nothing those of different blocks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

namespace cuda_host {

struct Position {
  dim3 thread, block;
};
extern Position position;  // of the running fiber
extern dim3 grid_size, block_size;

cudaError_t launch(dim3 grid, dim3 block, const std::function<void()>& kernel);
const char* message();
void set_order(uint64_t seed);

// One allocation per declaration (`site`) and block.
void* shared_memory(const void* site, size_t bytes);
void barrier(int line);
// Leaves `bits` for the other lanes of `mask`, waits for all of them, returns what `source` left.
uint64_t exchange(unsigned mask, uint64_t bits, int source, int line);
void warp_barrier(unsigned mask, int line);

template <typename Value>
Value shuffle(unsigned mask, Value value, int source, int line) {
  static_assert(sizeof(Value) <= sizeof(uint64_t), "a shuffle moves at most 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = exchange(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

inline int lane() {
  const dim3& at = position.thread;
  return static_cast<int>((at.x + block_size.x * (at.y + block_size.y * at.z)) % 32);
}
inline int lane_or_own(int source) { return source >= 0 && source < 32 ? source : lane(); }

uint16_t half_bits(float value);
float half_value(uint16_t bits);
uint16_t bfloat16_bits(float value);
float bfloat16_value(uint16_t bits);

}  // namespace cuda_host

#define threadIdx (::cuda_host::position.thread)
#define blockIdx (::cuda_host::position.block)
#define blockDim (::cuda_host::block_size)
#define gridDim (::cuda_host::grid_size)
#define __syncthreads() ::cuda_host::barrier(__LINE__)
#define __syncwarp(mask) ::cuda_host::warp_barrier(mask, __LINE__)
#define __shfl_sync(mask, value, source) ::cuda_host::shuffle(mask, value, source, __LINE__)
#define __shfl_xor_sync(mask, value, bits) \
  ::cuda_host::shuffle(mask, value, ::cuda_host::lane_or_own(::cuda_host::lane() ^ (bits)), __LINE__)
#define __shfl_down_sync(mask, value, offset) \
  ::cuda_host::shuffle(mask, value, ::cuda_host::lane_or_own(::cuda_host::lane() + (offset)), __LINE__)
#define __shfl_up_sync(mask, value, offset) \
  ::cuda_host::shuffle(mask, value, ::cuda_host::lane_or_own(::cuda_host::lane() - (offset)), __LINE__)

// Ordered more strongly than on a GPU: a missing __threadfence is the one race that goes unseen.
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline void __threadfence() {}

// Rounded each by itself: through memory, since g++ fuses products into sums wherever it can see both.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fsub_rn(float a, float b) {
  volatile float difference = a - b;
  return difference;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#define FASTMOD_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), ::cuda_host::launch(grid, block, [&] { kernel(__VA_ARGS__); }))
#define FASTMOD_SHARED(type, name, size) \
  static const char name##_site = 0;     \
  type* const name = static_cast<type*>(::cuda_host::shared_memory(&name##_site, sizeof(type) * (size)))

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half value) { return cuda_host::half_value(value.bits); }
inline __half __float2half_rn(float value) { return {cuda_host::half_bits(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) { return cuda_host::bfloat16_value(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {cuda_host::bfloat16_bits(value)}; }
