// Launch functions of mixtures of templates: see launch.h.
#pragma once

#include "launch_types.h"

namespace fastmod::cuda {

// ---- template_mix.cu, template_mix_plain.cu: float, double, __half, __nv_bfloat16

constexpr int kMixSoftmax = 0, kMixTanh = 1;  // else the logits are the weights

// logits [rows, templates], bank [templates, size]
struct MixShape {
  int64_t rows, templates, size;
  int mixing;
};

// How many numbers of uninitialised scratch memory.
template <typename T>
int64_t template_mix_forward_scratch(MixShape shape);
template <typename T>
int64_t template_mix_backward_scratch(MixShape shape);

// out [rows, size]. One launch; two for fp64 and for sizes that do not fit.
template <typename T>
cudaError_t template_mix_forward(const T* logits, const T* bank, T* out, Compute<T>* scratch, MixShape shape,
                                 cudaStream_t stream);
// grad [rows, size]; grad_logits and grad_bank: each may be null. Two launches; four for fp64 and for sizes that do not
// fit.
template <typename T>
cudaError_t template_mix_backward(const T* grad, const T* logits, const T* bank, T* grad_logits, T* grad_bank,
                                  Compute<T>* scratch, MixShape shape, cudaStream_t stream);

// ---- cluster_penalty.cu: float, double, __half, __nv_bfloat16

// bank [templates, size] -> table [templates, templates] of squared distances, which is not written if size is 0.
// Scratch as for norm_conv.
template <typename T>
Scratch cluster_penalty_forward_scratch(int64_t templates, int64_t size);
template <typename T>
cudaError_t cluster_penalty_forward(const T* bank, double* table, Compute<T>* scratch, unsigned* tickets,
                                    int64_t templates, int64_t size, cudaStream_t stream);
// grad: shaped like the table
template <typename T>
cudaError_t cluster_penalty_backward(const double* grad, const T* bank, T* grad_bank, int64_t templates, int64_t size,
                                     cudaStream_t stream);

// ---- entropy_penalty.cu: float, double, __half, __nv_bfloat16

// logits [rows, count] -> total, which is not written without rows. Scratch as for norm_conv.
template <typename T>
Scratch entropy_penalty_forward_scratch(int64_t rows);
template <typename T>
cudaError_t entropy_penalty_forward(const T* logits, int64_t rows, int64_t count, Compute<T>* total,
                                    Compute<T>* scratch, unsigned* tickets, cudaStream_t stream);
template <typename T>
cudaError_t entropy_penalty_backward(const Compute<T>* grad, const T* logits, int64_t rows, int64_t count,
                                     T* grad_logits, cudaStream_t stream);

}  // namespace fastmod::cuda
