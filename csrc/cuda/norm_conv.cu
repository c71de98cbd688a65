#include "norm_conv.cuh"

namespace fastmod::cuda {

int64_t norm_conv_tickets(ConvShape shape) {
  return static_cast<int64_t>(shape.experts) * (shape.out + 1) * ((shape.in + 15) / 16);
}
template <typename T>
int64_t norm_conv_forward_scratch(ConvShape shape) {
  return plain::forward_scratch<T>(shape);
}
template <typename T>
int64_t norm_conv_backward_x_scratch(ConvShape shape) {
  return plain::backward_x_scratch<T>(shape);
}
template <typename T>
int64_t norm_conv_backward_weight_scratch(ConvShape shape) {
  return plain::backward_weight_scratch<T>(shape);
}

template <typename T>
cudaError_t norm_conv_forward(ConvInput<T> input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                              Compute<T>* var, Compute<T>* scratch, unsigned* tickets, bool allow_tf32,
                              ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return plain::forward<T>(input, weight, bias, y, mean, var, scratch, tickets, shape, stream);
}
template <typename T>
cudaError_t norm_conv_backward_x(ConvGrad<T> grad, ConvInput<T> input, const T* weight, T* grad_x,
                                 Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                                 unsigned* tickets, bool allow_tf32, ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return plain::backward_x<T>(grad, input, weight, grad_x, grad_scale, grad_shift, grad_gate, scratch, tickets, shape, stream);
}
template <typename T>
cudaError_t norm_conv_backward_weight(ConvGrad<T> grad, ConvInput<T> input, T* grad_weight, T* grad_bias,
                                      Compute<T>* scratch, unsigned* tickets, bool allow_tf32, ConvShape shape,
                                      cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return plain::backward_weight<T>(grad, input, grad_weight, grad_bias, scratch, tickets, shape, stream);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template int64_t norm_conv_forward_scratch<T>(ConvShape);                                                            \
  template int64_t norm_conv_backward_x_scratch<T>(ConvShape);                                                         \
  template int64_t norm_conv_backward_weight_scratch<T>(ConvShape);                                                    \
  template cudaError_t norm_conv_forward<T>(ConvInput<T>, const T*, const T*, T*, Compute<T>*, Compute<T>*,            \
                                            Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);                    \
  template cudaError_t norm_conv_backward_x<T>(ConvGrad<T>, ConvInput<T>, const T*, T*, Compute<T>*, Compute<T>*, T*,  \
                                               Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);                 \
  template cudaError_t norm_conv_backward_weight<T>(ConvGrad<T>, ConvInput<T>, T*, T*, Compute<T>*, unsigned*, bool,   \
                                                    ConvShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
