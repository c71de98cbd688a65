// Kernels for the tests alone: probes of the harness, and kernels with one bug each that it must catch.
#include "probes.h"

#include "common.cuh"

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

}  // namespace

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
  PROBE(uninitialised)
  PROBE(exited_thread)
  PROBE(divergent_barrier)
  PROBE(missing_lane)
  PROBE(block_race)
  PROBE(too_much_shared)
  PROBE(warp)
#undef PROBE
  return cudaErrorInvalidValue;
}

}  // namespace fastmod::cuda
