// Runs CUDA C++ on the host: g++ compiles the kernels' .cu files against this header instead of the CUDA toolkit.
//
// Every CUDA thread is a fiber. A block's fibers run one after another in an order shuffled by a seed and switch at
// __syncthreads and at warp operations. __shared__ memory is fresh and filled with NaN for every block. A launch fails
// with cudaErrorLaunchFailure, and cuda_host::message() says why, on
//   - a barrier that some threads of the block never reach, or that they reach at different lines,
//   - a warp operation that a lane of its mask does not take part in,
//   - more shared memory than a block may have: static 48 KB, with dynamic memory 64 KB, the least of all targets, or
//     99 KB where the launch says that it is large,
//   - a cp.async that is misaligned or of a size that does not exist.
// A hook is told of every launch, with the bytes of its arguments, and may let it run, leave it out or refuse it: that
// is how launches are counted, and how what a CUDA graph would refuse is found (recorder.py).
// An asynchronous copy fills its target with NaN when it is issued and with the values when its thread waits for it, so
// that neither a missing wait nor a target still in use by others goes unseen. A matrix product truncates its operands
// and rounds its sums towards zero, as tensor cores do. ASan finds what is out of bounds, in global memory and in each
// __shared__ array; TSan finds data races, since only barriers order the fibers of a block for it, and nothing those
// of different blocks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

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
  cudaErrorStreamCaptureUnsupported = 900,
};

namespace cuda_host {

struct Position {
  dim3 thread, block;
};
extern Position position;  // of the running fiber
extern dim3 grid_size, block_size;

cudaError_t launch(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel);
const char* message();

// `file` with the launch, or the name of a function of the CUDA runtime with a null kernel.
struct Request {
  const char* file;
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_bytes;
  cudaStream_t stream;
  int arguments;
  const size_t* sizes;
  const void* const* values;
};
enum Answer : int { kRun = 0, kLeaveOut = 1, kRefuse = 2 };
using Hook = int (*)(const Request*);
Answer ask(const Request& request);
// Of the bindings; none of a launch function called directly.
inline cudaStream_t current_stream() { return reinterpret_cast<cudaStream_t>(uintptr_t(64)); }
cudaError_t unsupported_in_a_graph(const char* name);
bool capturing();

void next_launch_is_large();
void set_order(uint64_t seed);

// One allocation per declaration (`site`) and block.
void* shared_memory(const void* site, size_t bytes);
void* dynamic_shared_memory();
void barrier(int line);
// Leaves `bits` for the other lanes of `mask`, waits for all of them, returns what `source` left.
uint64_t exchange(unsigned mask, uint64_t bits, int source, int line);
void warp_barrier(unsigned mask, int line);
// Waits for all 32 lanes of the warp; the last one lets `run` work on what each has left.
void collective(void* mine, void (*run)(void* const* lanes), int line);

struct AsyncCopy {
  void* target;
  const void* source;
  int bytes, valid;  // beyond `valid` zeros
};
void push_async(const AsyncCopy& copy, int line);
void commit_async();
bool pop_async(int groups_left, AsyncCopy* copy);  // false: at most so many groups are under way
inline void start_async(void* target, const void* source, int bytes, int valid, int line) {
  push_async({target, source, bytes, valid}, line);
  std::memset(target, 0xff, static_cast<size_t>(bytes));
}
inline void wait_async(int groups_left) {
  AsyncCopy copy;
  while (pop_async(groups_left, &copy)) {
    std::memset(copy.target, 0, static_cast<size_t>(copy.bytes));
    if (copy.valid > 0) std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.valid));
  }
}

// Arguments become what the kernel's parameters are, once, as in a real launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const char* file, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  const std::tuple<Parameters...> parameters(arguments...);
  return std::apply(
      [&](const Parameters&... each) {
        const size_t sizes[] = {sizeof(Parameters)...};
        const void* const values[] = {static_cast<const void*>(&each)...};
        const void* address = reinterpret_cast<const void*>(kernel);
        const int count = static_cast<int>(sizeof...(Parameters));
        switch (ask({file, address, grid, block, dynamic_bytes, stream, count, sizes, values})) {
          case kLeaveOut: return cudaSuccess;
          case kRefuse: return cudaErrorStreamCaptureUnsupported;
          default: return launch(grid, block, dynamic_bytes, [&] { kernel(each...); });
        }
      },
      parameters);
}

unsigned atomic_add(unsigned* address, unsigned value);
void fence();

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

// Nothing of ours calls these; where it did, a captured graph would fail.
inline cudaError_t cudaDeviceSynchronize() { return cuda_host::unsupported_in_a_graph("cudaDeviceSynchronize"); }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cuda_host::unsupported_in_a_graph("cudaStreamSynchronize");
}
inline cudaError_t cudaMalloc(void**, size_t) { return cuda_host::unsupported_in_a_graph("cudaMalloc"); }

// What a thread wrote before its last __threadfence is ordered before its atomics: TSan sees one that is missing there.
// A fence missing after the atomic goes unseen.
inline unsigned atomicAdd(unsigned* address, unsigned value) { return cuda_host::atomic_add(address, value); }
inline void __threadfence() { cuda_host::fence(); }

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
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define FASTMOD_LAUNCH(kernel, grid, block, stream, ...) \
  FASTMOD_LAUNCH_DYNAMIC(kernel, grid, block, 0, stream, __VA_ARGS__)
#define FASTMOD_LAUNCH_DYNAMIC(kernel, grid, block, bytes, stream, ...) \
  ::cuda_host::launch_kernel(__FILE__, kernel, grid, block, bytes, stream, __VA_ARGS__)
#define FASTMOD_LAUNCH_LARGE(...) (::cuda_host::next_launch_is_large(), FASTMOD_LAUNCH_DYNAMIC(__VA_ARGS__))
#define FASTMOD_DYNAMIC_SHARED(name) \
  unsigned char* const name = static_cast<unsigned char*>(::cuda_host::dynamic_shared_memory())
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
