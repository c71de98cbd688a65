// norm_pool on CUDA tensors: arguments brought into layout, outputs allocated, kernels launched and checked.
#include "image_binding.h"
#include "../cpu/norm_pool_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// Tensors in the layout that the kernels read, kept alive as long as the pointers.
struct Pool {
  Tensor x, scale, shift;
  bool relu;
  SumShape shape;

  Pool(const Tensor& x_, const Tensor& scale_, const Tensor& shift_, bool relu_)
      : x(inner(x_)),
        scale(scale_.contiguous()),
        shift(shift_.contiguous()),
        relu(relu_),
        shape{x_.size(0), small(x_.size(1), "experts"), small(x_.size(2), "channels"),
              small(x_.size(3) * x_.size(4), "pixels"), false} {}

  template <typename T>
  PoolInput<T> as() const {
    return {data<T>(x), data<Compute<T>>(scale), data<Compute<T>>(shift), relu};
  }
};

Tensor norm_pool_forward(const Tensor& x, const Tensor& scale, const Tensor& shift, bool relu) {
  check_norm_pool(x, scale, shift);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Tensor out = at::empty(x.sizes().slice(0, 3), x.options());
  const Pool pool(x, scale, shift, relu);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::norm_pool_forward<T>(pool.as<T>(), data<T>(out), pool.shape, stream()));
  });
  return out;
}

std::vector<Tensor> norm_pool_backward(const Tensor& grad_, const Tensor& x, const Tensor& scale, const Tensor& shift,
                                       bool relu, std::array<bool, 3> needs) {
  check_norm_pool(x, scale, shift);
  check_like(x, grad_, "grad");
  TORCH_CHECK_VALUE(grad_.sizes() == x.sizes().slice(0, 3), "grad: expected ", x.sizes().slice(0, 3), ", got ",
                    grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  std::vector<Tensor> result(3);
  if (needs[0]) result[0] = empty_images(x.sizes(), x.options());
  if (needs[1]) result[1] = blank_like(scale);
  if (needs[2]) result[2] = blank_like(shift);
  const Tensor grad = grad_.contiguous();
  const Pool pool(x, scale, shift, relu);
  if (x.numel() == 0) {
    zero_those_defined(result);
  } else {
    dispatch(x.scalar_type(), [&](auto* type) {
      using T = Element<decltype(type)>;
      using C = Compute<T>;
      const Workspace space(x, norm_pool_backward_scratch<T>(pool.shape));
      const PoolGrads<T> grads{data<T>(result[0]), data<C>(result[1]), data<C>(result[2])};
      C10_CUDA_CHECK(cuda::norm_pool_backward<T>(data<T>(grad), pool.as<T>(), grads, data<C>(space.numbers),
                                                 data<unsigned>(space.tickets), pool.shape, stream()));
    });
  }
  return all_defined(std::move(result), x.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("norm_pool_forward", norm_pool_forward);
  m.impl("norm_pool_backward", norm_pool_backward);
}

}  // namespace fastmod::cuda::bindings
