// Kernels for the tests alone: probes of the harness, and kernels with one bug each that it must catch.
#include "probes.h"

#include <cstring>

#include "mma.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void uniform_kernel(int64_t seed, int64_t first, int64_t count, float* single, double* twice) {
  const int64_t i = global_thread();
  if (i >= count) return;
  single[i] = uniform_at<float>(seed, first + i, kStreamMultiplex);
  twice[i] = uniform_at<double>(seed, first + i, kStreamMultiplex);
}

template <typename T>
__global__ void round_kernel(const float* in, int64_t count, T* narrowed, float* widened) {
  const int64_t i = global_thread();
  if (i >= count) return;
  narrow(in[i], narrowed + i);
  widened[i] = widen(narrowed[i]);
}

// Each block reverses its kThreads values through shared memory; the correct version of the bugs below.
__global__ void reverse_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, kThreads);
  values[threadIdx.x] = in[global_thread()];
  __syncthreads();
  out[global_thread()] = values[kThreads - 1 - threadIdx.x];
}

__global__ void missing_barrier_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, kThreads);
  values[threadIdx.x] = in[global_thread()];
  out[global_thread()] = values[kThreads - 1 - threadIdx.x];
}

__global__ void shared_out_of_bounds_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, kThreads);
  values[threadIdx.x] = in[global_thread()];
  __syncthreads();
  out[global_thread()] = values[kThreads - threadIdx.x];
}

__global__ void global_out_of_bounds_kernel(const float* in, float* out) {
  out[global_thread()] = in[global_thread() + 1];
}

__global__ void overflow_kernel(const float* in, float* out) {
  out[global_thread()] = static_cast<float>(0x7fffffff + static_cast<int>(in[global_thread()]));
}

__global__ void uninitialised_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, kThreads);
  if (threadIdx.x % 2 == 0) values[threadIdx.x] = in[global_thread()];
  __syncthreads();
  out[global_thread()] = values[threadIdx.x] * 0.0f;
}

__global__ void exited_thread_kernel(const float* in, float* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  out[global_thread()] = in[global_thread()];
}

__global__ void divergent_barrier_kernel(const float* in, float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[global_thread()] = in[global_thread()];
}

__global__ void missing_lane_kernel(const float* in, float* out) {
  float value = in[global_thread()];
  if (threadIdx.x % 32 < 31) value += __shfl_xor_sync(kAllLanes, value, 1);
  out[global_thread()] = value;
}

__global__ void block_race_kernel(const float* in, float* out) { out[0] = in[global_thread()]; }

__global__ void too_much_shared_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, 16 * 1024);
  values[threadIdx.x] = in[global_thread()];
  out[global_thread()] = values[threadIdx.x];
}

// Through shared memory ordered by __syncwarp, then through shuffles.
__global__ void warp_kernel(const float* in, float* out) {
  FASTMOD_SHARED(float, values, kThreads);
  const int lane = threadIdx.x % 32;
  values[threadIdx.x] = in[global_thread()];
  __syncwarp(kAllLanes);
  float value = values[threadIdx.x - lane + (lane + 1) % 32];
  value += __shfl_sync(kAllLanes, value, 3);
  value += __shfl_up_sync(kAllLanes, value, 2);
  out[global_thread()] = value;
}

// ---- asynchronous copies: each block reverses its values, 16 bytes a thread of the first quarter

template <bool kWait, bool kBarrier, bool kEarly>
__device__ void reverse_async(const float* in, float* out) {
  FASTMOD_SHARED(uint4, words, kThreads / 4);  // aligned to 16 bytes
  float* values = reinterpret_cast<float*>(words);
  if (kEarly) {  // what others still have to read is copied over
    values[threadIdx.x] = -in[global_thread()];
    __syncthreads();
  }
  const float before = kEarly ? values[kThreads - 1 - threadIdx.x] : 0.0f;
  if (threadIdx.x < kThreads / 4) {
    const float* source = in + static_cast<int64_t>(blockIdx.x) * kThreads + 4 * threadIdx.x;
    copy_async<16>(values + 4 * threadIdx.x, source, true);
  }
  commit_copies();
  if (kWait) wait_copies<0>();
  if (kBarrier) __syncthreads();
  out[global_thread()] = kEarly ? before : values[kThreads - 1 - threadIdx.x];
}
__global__ void async_kernel(const float* in, float* out) { reverse_async<true, true, false>(in, out); }
__global__ void async_without_wait_kernel(const float* in, float* out) { reverse_async<false, true, false>(in, out); }
__global__ void async_without_barrier_kernel(const float* in, float* out) {
  reverse_async<true, false, false>(in, out);
}
__global__ void async_too_early_kernel(const float* in, float* out) { reverse_async<true, true, true>(in, out); }

// The second of two groups is under way when it is read; 4 and 8 bytes, and zeros beyond what is inside.
__global__ void async_groups_kernel(const float* in, float* out) {
  FASTMOD_SHARED(uint2, words, kThreads / 2);
  float* values = reinterpret_cast<float*>(words);
  const float* source = in + static_cast<int64_t>(blockIdx.x) * kThreads;
  if (threadIdx.x < 16) copy_async<8>(values + 2 * threadIdx.x, source + 2 * threadIdx.x, threadIdx.x < 12);
  commit_copies();
  if (threadIdx.x >= 32) copy_async<4>(values + threadIdx.x, source + threadIdx.x, true);
  commit_copies();
  wait_copies<1>();
  __syncthreads();
  out[global_thread()] = values[threadIdx.x];
}
__global__ void async_misaligned_kernel(const float* in, float* out) {
  FASTMOD_SHARED(uint2, words, kThreads);
  float* values = reinterpret_cast<float*>(words);
  if (threadIdx.x == 0) copy_async<8>(values, in + 1, true);
  commit_copies();
  wait_copies<0>();
  out[global_thread()] = values[0];
}

__global__ void dynamic_kernel(const float* in, float* out) {
  FASTMOD_DYNAMIC_SHARED(bytes);
  float* values = reinterpret_cast<float*>(bytes);
  values[threadIdx.x] = in[global_thread()];
  __syncthreads();
  out[global_thread()] = values[kThreads - 1 - threadIdx.x];
}

// ---- sums of all blocks by the one that comes last; the ticket lies in out[0]

template <bool kFence>
__device__ void last_block(float* out) {
  FASTMOD_SHARED(unsigned, place, 1);
  auto* ticket = reinterpret_cast<unsigned*>(out);
  if (threadIdx.x == 0) {
    out[1 + blockIdx.x] = static_cast<float>(blockIdx.x + 1);
    if (kFence) __threadfence();
    place[0] = atomicAdd(ticket, 1u);
  }
  __syncthreads();
  if (place[0] + 1 != gridDim.x || threadIdx.x != 0) return;
  __threadfence();
  float total = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) total += out[1 + i];
  out[1 + gridDim.x] = total;
}
__global__ void last_block_kernel(const float*, float* out) { last_block<true>(out); }
__global__ void missing_fence_kernel(const float*, float* out) { last_block<false>(out); }

// ---- products: two warps, each its own half of what is given

template <typename T>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, float* d) {
  const int64_t i = global_thread();
  const uint32_t fragment[4] = {a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]};
  float sums[4] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  mma(static_cast<T*>(nullptr), sums, fragment, b[2 * i], b[2 * i + 1]);
  for (int j = 0; j < 4; ++j) d[4 * i + j] = sums[j];
}
__global__ void split_kernel(const float* in, int64_t count, float* high, float* low) {
  const int64_t i = global_thread();
  if (i >= count) return;
  uint32_t parts[2];
  split_tf32(in[i], true, &parts[0], &parts[1]);
  high[i] = __uint_as_float(parts[0]);
  low[i] = __uint_as_float(parts[1]);
}
// 32 rows of 8 numbers of 16 bits
__global__ void ldmatrix_kernel(const uint4* rows, uint32_t* fragments) {
  FASTMOD_SHARED(uint4, staged, kWarp);
  staged[threadIdx.x] = rows[threadIdx.x];
  __syncthreads();
  uint32_t result[4];
  ldmatrix_transposed(result, staged + threadIdx.x);
  for (int i = 0; i < 4; ++i) fragments[4 * threadIdx.x + i] = result[i];
}
__global__ void mma_missing_lane_kernel(const float* in, float* out) {
  const uint32_t a[4] = {};
  float sums[4] = {in[global_thread()]};
  if (threadIdx.x % 32 < 31) mma(static_cast<float*>(nullptr), sums, a, 0u, 0u);
  out[global_thread()] = sums[0];
}

}  // namespace

cudaError_t probe_mma(const char* dtype, const uint32_t* a, const uint32_t* b, float* d) {
  if (std::strcmp(dtype, "float16") == 0) return FASTMOD_LAUNCH(mma_kernel<__half>, 1, kThreads, nullptr, a, b, d);
  if (std::strcmp(dtype, "bfloat16") == 0) {
    return FASTMOD_LAUNCH(mma_kernel<__nv_bfloat16>, 1, kThreads, nullptr, a, b, d);
  }
  return FASTMOD_LAUNCH(mma_kernel<float>, 1, kThreads, nullptr, a, b, d);
}
cudaError_t probe_split(const float* in, int64_t count, float* high, float* low) {
  return FASTMOD_LAUNCH(split_kernel, blocks_for(count, kThreads), kThreads, nullptr, in, count, high, low);
}
cudaError_t probe_ldmatrix(const void* rows, uint32_t* fragments) {
  return FASTMOD_LAUNCH(ldmatrix_kernel, 1, kWarp, nullptr, static_cast<const uint4*>(rows), fragments);
}
cudaError_t probe_dynamic(const float* in, float* out, int64_t bytes) {
  return FASTMOD_LAUNCH_DYNAMIC(dynamic_kernel, 1, kThreads, static_cast<size_t>(bytes), nullptr, in, out);
}

cudaError_t probe_uniform(int64_t seed, int64_t first, int64_t count, float* single, double* twice) {
  return FASTMOD_LAUNCH(uniform_kernel, blocks_for(count, kThreads), kThreads, nullptr, seed, first, count, single,
                        twice);
}

cudaError_t probe_round(const float* in, int64_t count, __half* half, float* from_half, __nv_bfloat16* brain,
                        float* from_brain) {
  const cudaError_t error = FASTMOD_LAUNCH(round_kernel<__half>, blocks_for(count, kThreads), kThreads, nullptr, in,
                                           count, half, from_half);
  if (error != cudaSuccess) return error;
  return FASTMOD_LAUNCH(round_kernel<__nv_bfloat16>, blocks_for(count, kThreads), kThreads, nullptr, in, count, brain,
                        from_brain);
}

cudaError_t probe(const char* name, const float* in, float* out, int64_t blocks) {
#define PROBE(kernel) \
  if (std::strcmp(name, #kernel) == 0) return FASTMOD_LAUNCH(kernel##_kernel, dim3(blocks), kThreads, nullptr, in, out);
  PROBE(reverse)
  PROBE(missing_barrier)
  PROBE(shared_out_of_bounds)
  PROBE(global_out_of_bounds)
  PROBE(overflow)
  PROBE(uninitialised)
  PROBE(exited_thread)
  PROBE(divergent_barrier)
  PROBE(missing_lane)
  PROBE(block_race)
  PROBE(too_much_shared)
  PROBE(warp)
  PROBE(async)
  PROBE(async_without_wait)
  PROBE(async_without_barrier)
  PROBE(async_too_early)
  PROBE(async_groups)
  PROBE(async_misaligned)
  PROBE(last_block)
  PROBE(missing_fence)
  PROBE(mma_missing_lane)
#undef PROBE
  return cudaErrorInvalidValue;
}

}  // namespace fastmod::cuda
