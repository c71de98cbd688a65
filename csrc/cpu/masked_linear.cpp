// Linear layers under sampled masks: rows of the weight are masked a block at a time, in cache, and multiplied at once.
// No masked copy of the whole weight ever exists. Noise is drawn once per pass, for the mask and its slope together.
#include <ATen/Functions.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "cpu/masks.h"
#include "masked_bias.h"
#include "philox.h"

namespace fastmod::cpu {
namespace {

// x [S * rows, in] -> [S * rows, out]
struct Sizes {
  int64_t samples, rows, in, out;
};

constexpr int64_t kBlockWeights = 1 << 15;  // weights in a block: all that is made of them stays in the second-level cache
constexpr int64_t kMaxBlockRows = 64;
constexpr int64_t kMaxGroups = 16;                   // partial sums of the gradient of x
constexpr int64_t kMaxPartialBytes = 32ll << 20;     // and their memory

int64_t block_rows(const Sizes& s) {
  const int64_t most = std::clamp<int64_t>(s.out, 1, kMaxBlockRows);
  return std::clamp<int64_t>(kBlockWeights / std::max<int64_t>(s.in, 1), 1, most);
}

// A matrix in memory that somebody else owns, for torch's products.
template <typename T>
Tensor view(T* data, int64_t rows, int64_t columns, int64_t row_stride) {
  return at::from_blob(data, {rows, columns}, {row_stride, 1}, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
}

// Mask samples of a run of rows, in memory of one thread.
template <typename T>
struct Block {
  const KernelTable<T>& kernel;
  const MaskArgs<T>& args;
  int64_t begin, count;
  int32_t* off;
  T *decay, *masked, *outer;
  bool has_nan;

  static int64_t scratch(int64_t weights, bool backward) { return (backward ? 4 : 2) * (weights + 16); }
  Block(const KernelTable<T>& kernel_, const MaskArgs<T>& args_, int64_t begin_, int64_t count_, bool backward,
        T* scratch_)
      : kernel(kernel_), args(args_), begin(begin_), count(count_) {
    const int64_t step = count + 16;
    off = reinterpret_cast<int32_t*>(scratch_);
    masked = scratch_ + step;
    decay = backward ? scratch_ + 2 * step : nullptr;
    outer = backward ? scratch_ + 3 * step : nullptr;
    has_nan = kernel.prepare_masks(args.logits + begin, count, off, decay);
  }
  // The masked weights; `sum`, if given, gets outer * derivative of the masks added.
  void draw(int64_t sample, T* sum = nullptr) {
    kernel.mask_run(args, sample, begin, count, off, decay, has_nan, args.weight + begin, masked, outer, sum);
  }
  // values of the block, masked: into `masked`
  void mask(int64_t sample, const T* values) {
    kernel.mask_run(args, sample, begin, count, off, decay, has_nan, values, masked, nullptr, nullptr);
  }
};

Tensor masked_linear_forward(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                             const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples) {
  check_masked_linear(x, weight, logits, bias, bias_logits, samples);
  check_mask_noise(seed, 0, samples, kStreamMask);
  const Sizes s{samples, leading_size(x, 1) / samples, weight.size(1), weight.size(0)};
  auto sizes = x.sizes().vec();
  sizes.back() = s.out;
  const Tensor out = empty_wide(sizes, x);
  if (out.numel() == 0) return in_type(out, x.scalar_type());
  const Tensor xr = readable(x), w = readable(weight), l = readable(logits);
  Tensor biases = bias_samples(false, bias, bias_logits, seed, samples);  // [S, out]
  if (bias) biases = readable(biases);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = table<T>(kernels());
    const MaskArgs<T> args = mask_args<T>(l, w, 0, samples, seed, kStreamMask, 1.0);
    // [S, in, rows]: torch's product is half as fast again when neither factor is transposed.
    const Tensor turned = xr.view({samples, s.rows, s.in}).transpose(1, 2).contiguous();
    T *inputs = turned.data_ptr<T>(), *outputs = out.data_ptr<T>();
    const T* added = biases.defined() ? biases.const_data_ptr<T>() : nullptr;
    const int64_t step = block_rows(s), blocks = (s.out + step - 1) / step;
    const double cycles = double(step) * s.in * samples * (1.5 + s.rows / 16.0);
    const int64_t scratch_size = Block<T>::scratch(step * s.in, false) + step * s.rows;
    for_each<T>(blocks, cycles, scratch_size, x, [&](int64_t index, T* scratch) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const int64_t first = index * step, rows = std::min(step, s.out - first);
      Block<T> block(kernel, args, first * s.in, rows * s.in, false, scratch);
      T* product = scratch + Block<T>::scratch(step * s.in, false);
      Tensor result = view(product, rows, s.rows, s.rows);
      for (int64_t sample = 0; sample < samples; ++sample) {
        block.draw(sample);
        at::cpu::mm_out(result, view(block.masked, rows, s.in, s.in),
                        view(inputs + sample * s.in * s.rows, s.in, s.rows, s.rows));
        T* target = outputs + sample * s.rows * s.out + first;
        const T* bias_here = added ? added + sample * s.out + first : nullptr;
        for (int64_t r = 0; r < s.rows; ++r)
          for (int64_t i = 0; i < rows; ++i)
            target[r * s.out + i] = product[i * s.rows + r] + (bias_here ? bias_here[i] : T(0));
      }
    });
  });
  return in_type(out, x.scalar_type());
}

// Rows of the weight fall into groups, each with a partial sum of the gradient of x: their number depends on the sizes
// alone, so that the result does not depend on the threads.
int64_t row_groups(const Sizes& s, int64_t element_size) {
  const int64_t blocks = std::max<int64_t>((s.out + block_rows(s) - 1) / block_rows(s), 1);
  const int64_t bytes = std::max<int64_t>(s.samples * s.rows * s.in * element_size, 1);
  return std::clamp<int64_t>(std::min(kMaxPartialBytes / bytes, kMaxGroups), 1, blocks);
}

template <typename T>
void weight_gradients(const Sizes& s, const MaskArgs<T>& args, const T* grad, const T* x, const Needs& needs,
                      T* partial_x, int64_t groups, T* grad_logits, T* grad_weight, const Tensor& like) {
  const auto& kernel = table<T>(kernels());
  const int64_t step = block_rows(s), blocks = (s.out + step - 1) / step;
  const int64_t part_x = s.rows * s.in, all_x = s.samples * part_x;
  const bool outer = needs[kLogits] || needs[kWeight];
  const double cycles = double(s.out) / groups * s.in * s.samples * (3 + s.rows / 8.0);
  for_each<T>(groups, cycles, Block<T>::scratch(step * s.in, true), like, [&](int64_t group, T* scratch) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    bool fresh = true;  // nothing in this group's partial sum yet
    for (int64_t index = group * blocks / groups; index < (group + 1) * blocks / groups; ++index) {
      const int64_t first = index * step, rows = std::min(step, s.out - first), begin = first * s.in;
      Block<T> block(kernel, args, begin, rows * s.in, true, scratch);
      T* sum = needs[kLogits] ? grad_logits + begin : nullptr;
      if (sum) std::fill(sum, sum + block.count, T(0));
      for (int64_t sample = 0; sample < s.samples; ++sample) {
        const Tensor g = view(const_cast<T*>(grad) + sample * s.rows * s.out + first, s.rows, rows, s.out);
        // Before the masks are drawn: their slopes are multiplied with it on the spot.
        if (outer) {
          Tensor product = view(block.outer, rows, s.in, s.in);
          at::cpu::mm_out(product, g.t(), view(const_cast<T*>(x) + sample * part_x, s.rows, s.in, s.in));
        }
        block.draw(sample, sum);
        if (needs[kX]) {
          Tensor partial = view(partial_x + group * all_x + sample * part_x, s.rows, s.in, s.in);
          const Tensor masked = view(block.masked, rows, s.in, s.in);
          if (fresh) at::cpu::mm_out(partial, g, masked);
          else at::cpu::addmm_(partial, g, masked);
        }
        if (needs[kWeight]) {
          block.mask(sample, block.outer);
          T* total = grad_weight + begin;
          for (int64_t i = 0; i < block.count; ++i) total[i] = (sample ? total[i] : T(0)) + block.masked[i];
        }
      }
      for (int64_t i = 0; sum && i < block.count; ++i) sum[i] *= args.weight[begin + i];
      fresh = false;
    }
  });
}

std::vector<Tensor> masked_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                           const Tensor& logits, const OptionalTensor& bias,
                                           const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                                           double tau, Needs needs) {
  check_masked_linear(x, weight, logits, bias, bias_logits, samples);
  check_mask_noise(seed, 0, samples, kStreamMask);
  check_like(x, grad, "grad");
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  const Sizes s{samples, leading_size(x, 1) / samples, weight.size(1), weight.size(0)};
  TORCH_CHECK_VALUE(grad.dim() == x.dim() && grad.numel() == samples * s.rows * s.out && grad.size(-1) == s.out,
                    "grad: expected [B, ..., ", s.out, "], got ", grad.sizes());
  const auto type = x.scalar_type();
  std::vector<Tensor> result(kMaskedInputs, at::empty({0}, x.options()));
  const Tensor g = readable(grad), xr = readable(x), w = readable(weight), l = readable(logits);
  if (wants_bias(bias, needs))
    bias_gradients(false, in_type(g.view({samples, s.rows, s.out}).sum(1), type), *bias, bias_logits, seed, tau, needs,
                   result);
  const bool empty = s.rows == 0 || s.out == 0 || s.in == 0;
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t groups = row_groups(s, sizeof(T));
    const auto wide = [&](bool needed, const Tensor& like) {
      if (!needed) return Tensor();
      return empty ? at::zeros(like.sizes(), w.options()) : empty_wide(like.sizes(), like);
    };
    const Tensor grad_logits = wide(needs[kLogits], logits), grad_weight = wide(needs[kWeight], weight);
    Tensor partial = wide(needs[kX], x);
    if (needs[kX] && groups > 1) partial = empty_wide({groups, x.numel()}, x);
    const auto pointer = [](const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<T>() : nullptr; };
    if (!empty)
      weight_gradients<T>(s, mask_args<T>(l, w, 0, samples, seed, kStreamMask, tau), g.const_data_ptr<T>(),
                          xr.const_data_ptr<T>(), needs, pointer(partial), groups, pointer(grad_logits),
                          pointer(grad_weight), x);
    if (needs[kX]) result[kX] = in_type((groups > 1 ? partial.sum(0) : partial).view(x.sizes()), type);
    if (needs[kLogits]) result[kLogits] = in_type(grad_logits, type);
    if (needs[kWeight]) result[kWeight] = in_type(grad_weight, type);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("masked_linear_forward", masked_linear_forward);
  m.impl("masked_linear_backward", masked_linear_backward);
}

}  // namespace fastmod::cpu
