#pragma once

#include "launch.h"

namespace fastmod::cuda {

cudaError_t probe_uniform(int64_t seed, int64_t first, int64_t count, float* single, double* twice);
cudaError_t probe_round(const float* in, int64_t count, __half* half, float* from_half, __nv_bfloat16* brain,
                        float* from_brain);
cudaError_t probe_mma(const char* dtype, const uint32_t* a, const uint32_t* b, float* d);
cudaError_t probe_split(const float* in, int64_t count, float* high, float* low);
cudaError_t probe_ldmatrix(const void* rows, uint32_t* fragments);
cudaError_t probe_dynamic(const float* in, float* out, int64_t bytes);
cudaError_t probe(const char* name, const float* in, float* out, int64_t blocks);

}  // namespace fastmod::cuda
