// The torch-facing side of an inverted residual block with given statistics; the work is in
// inverted_residual_inference_kernel.h.
#include "cpu/small_layers.h"
#include "cpu/inverted_residual.h"
#include "cpu/inverted_residual_inference_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

// Keeps tensors alive during the call and hands out pointers into them.
template <typename T>
class Kept {
 public:
  const T* operator()(const Tensor& tensor) {
    tensors_.push_back(tensor);
    return tensors_.back().template const_data_ptr<T>();
  }

 private:
  std::vector<Tensor> tensors_;
};

// A batch norm with known statistics: scale * value + bias.
template <typename T>
void folded(at::TensorList params, at::TensorList stats, int64_t at, double eps, Kept<T>& keep, const T*& scale,
            const T*& bias) {
  Norm<T> norm(params[at + 1], params[at + 2], 1, eps);
  norm.var.copy_(stats[2 * (at / 3) + 1]);
  norm.set_scale();
  const Tensor mean = readable(stats[2 * (at / 3)]), moved = empty_wide(norm.bias.sizes(), norm.bias);
  const T *m = mean.const_data_ptr<T>(), *s = norm.scale.template const_data_ptr<T>();
  const T* b = norm.bias.template const_data_ptr<T>();
  T* to = moved.data_ptr<T>();
  for (int64_t i = 0; i < moved.numel(); ++i) to[i] = static_cast<T>(b[i] - double(m[i]) * s[i]);
  scale = keep(norm.scale);
  bias = keep(moved);
}

Tensor inverted_residual_inference(const Tensor& x_, at::TensorList params, at::TensorList stats, double eps) {
  check_inverted_residual(x_, params, false);
  check_inverted_residual_stats(x_, params, stats);
  return with_compute_type(x_, [&](auto zero) -> Tensor {
    using T = decltype(zero);
    const auto& kernel = kernels<InvertedResidualInferenceKernels<T>>();
    const int64_t lanes = kernels<VectorKernels<T>>().lanes;
    const Tensor x = channels_last(x_), y = empty_images(x_.sizes(), x_);
    const bool gated = params.size() == 15;
    const size_t last = params.size() - 3;
    const auto columns = [&](int64_t count) { return (count + lanes - 1) / lanes * lanes; };
    Kept<T> keep;
    InvertedResidualArgs<T> args{};
    args.batch = x_.size(0);
    args.tasks = x_.size(1);
    args.channels = x_.size(2);
    args.high = x_.size(3);
    args.wide = x_.size(4);
    args.expanded = params[0].size(1);
    args.squeezed = gated ? params[6].size(1) : 0;
    args.narrow_columns = columns(args.channels);
    args.columns = columns(args.expanded);
    args.squeeze_columns = columns(args.squeezed);
    args.x = x.const_data_ptr<T>();
    args.y = y.data_ptr<T>();
    // [T, rows, depth] -> [T, depth, rows up to whole vectors]
    const auto packed = [&](size_t at, int64_t rows, int64_t depth) {
      return keep(padded<T>(readable(params[at]).reshape({args.tasks, rows, depth}), rows, depth, columns(rows), true,
                            nullptr));
    };
    args.expand = packed(0, args.expanded, args.channels);
    args.taps = packed(3, args.expanded, 9);
    args.project = packed(last, args.channels, args.expanded);
    folded(params, stats, 0, eps, keep, args.expand_scale, args.expand_bias);
    folded(params, stats, 3, eps, keep, args.inner_scale, args.inner_bias);
    folded(params, stats, last, eps, keep, args.scale, args.bias);
    if (gated) {
      args.squeeze = packed(6, args.squeezed, args.expanded);
      args.excite = packed(9, args.expanded, args.squeezed);
      folded(params, stats, 6, eps, keep, args.squeeze_scale, args.squeeze_bias);
      folded(params, stats, 9, eps, keep, args.excite_scale, args.excite_bias);
    }
    const double cycles = 3.0 * args.pixels() * (args.channels + 16) * args.columns / lanes;
    for_each<T>(args.batch * args.tasks, cycles, kernels<InvertedResidualKernels<T>>().scratch(args), x,
                [&](int64_t unit, T* scratch) { kernel.forward(args, unit / args.tasks, unit % args.tasks, scratch); });
    return in_type(y, x_.scalar_type());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("inverted_residual_inference", inverted_residual_inference);
}

}  // namespace fastmod::cpu
