// The kernels of one instruction set. An isa_*.cpp file defines FASTMOD_ISA and FASTMOD_VECTOR_BYTES, includes the
// standard headers, switches the target on, then includes this: standard inline functions stay baseline code.

namespace fastmod::cpu {
namespace FASTMOD_ISA {

#include "vec.h"
#include "gemm.h"
#include "multiplex_kernel.h"
#include "gated_residual_kernel.h"
#include "range_penalty_kernel.h"
#include "adam_kernel.h"
#include "sample_mask_kernel.h"
#include "masked_linear_kernel.h"
#include "mfnnr_kernel.h"
#include "conv.h"
#include "winograd.h"
#include "norm_conv_kernel.h"
#include "conv_chain_kernel.h"
#include "norm_sum_kernel.h"
#include "norm_pool_kernel.h"
#include "inverted_residual_kernel.h"
#include "inverted_residual_inference_kernel.h"
#include "template_mix_kernel.h"
#include "cluster_penalty_kernel.h"

template <typename T>
constexpr KernelTable<T> make_table() {
  return {
      .multiplex_scratch = multiplex_scratch<T>,
      .multiplex_forward = multiplex_forward<T>,
      .multiplex_backward = multiplex_backward<T>,
      .gated_residual_forward = gated_residual_forward<T>,
      .gated_residual_backward = gated_residual_backward<T>,
      .range_penalty_forward = range_penalty_forward<T>,
      .range_penalty_backward = range_penalty_backward<T>,
      .square_sum = square_sum<T>,
      .adam_update = adam_update<T>,
      .sample_mask_forward = sample_mask_forward<T>,
      .sample_mask_backward = sample_mask_backward<T>,
      .transpose = transpose<T>,
      .masked_columns = kMaskedColumns,
      .masked_linear_scratch = masked_linear_scratch<T>,
      .masked_linear_forward = masked_linear_forward<T>,
      .masked_linear_weight_grad = masked_linear_weight_grad<T>,
      .mfnnr_scratch = mfnnr_scratch<T>,
      .mfnnr_forward = mfnnr_forward<T>,
      .mfnnr_backward = mfnnr_backward<T>,
      .mfnnr_weight_grad = mfnnr_weight_grad<T>,
      .lanes = kLanes<T>,
      .winograd_weights = winograd_weights<T>,
      .winograd_weight_grads = winograd_weight_grads<T>,
      .norm_conv_scratch = norm_conv_scratch<T>,
      .norm_conv_forward = norm_conv_forward<T>,
      .norm_conv_backward = norm_conv_backward<T>,
      .norm_sum_forward = norm_sum_forward<T>,
      .norm_sum_backward = norm_sum_backward<T>,
      .norm_pool_forward = norm_pool_forward<T>,
      .norm_pool_backward = norm_pool_backward<T>,
      .inverted_residual_scratch = inverted_residual_scratch<T>,
      .inverted_residual_mean = inverted_residual_mean<T>,
      .inverted_residual_covariance = inverted_residual_covariance<T>,
      .inverted_residual_expand = inverted_residual_expand<T>,
      .inverted_residual_pool = inverted_residual_pool<T>,
      .inverted_residual_project = inverted_residual_project<T>,
      .inverted_residual_sum = inverted_residual_sum<T>,
      .inverted_residual_inference = inverted_residual_inference<T>,
      .inverted_residual_grad_sums = inverted_residual_grad_sums<T>,
      .inverted_residual_project_grad = inverted_residual_project_grad<T>,
      .inverted_residual_expand_grad = inverted_residual_expand_grad<T>,
      .inverted_residual_input_grad = inverted_residual_input_grad<T>,
      .multiply = multiply_rows<T>,
      .add_products = add_row_products<T>,
      .template_mix_forward = template_mix_forward<T>,
      .template_mix_scratch = template_mix_scratch<T>,
      .template_mix_backward = template_mix_backward<T>,
      .cluster_penalty_forward = cluster_penalty_forward<T>,
      .cluster_penalty_backward = cluster_penalty_backward<T>,
      .conv_chain_scratch = conv_chain_scratch<T>,
      .conv_chain = conv_chain<T>,
      .masked_panel = kMaskedPanel<T>,
      .masked_panel_scratch = kMaskedPanel<T> * kMaskedDepth,
      .masked_linear_input_grad = masked_linear_input_grad<T>,
  };
}

}  // namespace FASTMOD_ISA
}  // namespace fastmod::cpu
