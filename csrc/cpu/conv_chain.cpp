// The torch-facing side of a chain of convolutions in inference; the work is in conv_chain_kernel.h.
#include "cpu/images.h"
#include "cpu/conv_chain_kernel.h"
#include "cpu/norm_conv_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;
using OptionalList = c10::List<OptionalTensor>;

constexpr int64_t kFrameBytes = 512 << 10;   // for the images that pass a layer together: half of a second-level cache
constexpr int64_t kWeightBytes = 256 << 10;  // if all layers have more weights, several images pass a layer together
constexpr int64_t kMostImages = 4;

// stride, relu, source and residual of every layer
struct Forms {
  static constexpr int64_t kEach = 4;
  at::IntArrayRef numbers;
  int64_t stride(size_t i) const { return numbers[kEach * i]; }
  bool relu(size_t i) const { return numbers[kEach * i + 1] != 0; }
  int64_t source(size_t i) const { return numbers[kEach * i + 2]; }
  int64_t residual(size_t i) const { return numbers[kEach * i + 3]; }
};

// The shapes of all values, x first; refuses what does not fit.
std::vector<ChainFrame> checked_frames(const Tensor& x, at::TensorList weights, const OptionalList& scales,
                                       const OptionalList& biases, const Forms& forms, const OptionalTensor& gate) {
  check_float(x, "x");
  const size_t count = weights.size();
  TORCH_CHECK_VALUE(x.dim() == 4 || x.dim() == 5, "x: expected [B, E, C, H, W] or [B, C, H, W], got ", x.sizes());
  TORCH_CHECK_VALUE(count > 0 && scales.size() == count && biases.size() == count &&
                        forms.numbers.size() == Forms::kEach * count,
                    "weights, scales, biases, forms: expected one or more layers, of each as many and four numbers");
  const int64_t experts = weights[0].size(0);
  std::vector<ChainFrame> frames{{x.size(-3), x.size(-2), x.size(-1), 0}};
  for (size_t i = 0; i < count; ++i) {
    const int64_t source = forms.source(i), residual = forms.residual(i), stride = forms.stride(i);
    TORCH_CHECK_VALUE(0 <= source && source <= int64_t(i) && residual <= int64_t(i),
                      "forms: layer ", i, " can read what comes before it, got ", source, " and ", residual);
    const ChainFrame& from = frames[source];
    check_norm_conv(x.dim() == 5 ? x.new_empty({0, experts, from.channels, from.high, from.wide})
                                 : x.new_empty({0, from.channels, from.high, from.wide}),
                    weights[i], std::nullopt, std::nullopt, std::nullopt, biases.get(i), stride, false);
    TORCH_CHECK_VALUE(weights[i].size(0) == experts, "weights: expected ", experts, " experts, got ",
                      weights[i].sizes());
    const OptionalTensor scale = scales.get(i);
    TORCH_CHECK_VALUE(!scale || (scale->sizes() == weights[i].sizes().slice(0, 2) &&
                                 scale->scalar_type() == compute_type(x)),
                      "scales: expected [E, Cout] in the dtype of the sums, layer ", i);
    frames.push_back({weights[i].size(1), (from.high + stride - 1) / stride, (from.wide + stride - 1) / stride, 0});
    const ChainFrame &own = frames.back(), &other = frames[std::max<int64_t>(residual, 0)];
    const bool alike = own.channels == other.channels && own.high == other.high && own.wide == other.wide;
    TORCH_CHECK_VALUE(residual < 0 || alike, "forms: layer ", i, " and its residual have different shapes");
  }
  if (gate) {
    check_like(x, *gate, "gate");
    TORCH_CHECK_VALUE(gate->dim() == 2 && gate->size(0) == x.size(0) && gate->size(1) == experts,
                      "gate: expected [B, E], got ", gate->sizes());
  }
  return frames;
}

// Gives every value a place in the scratch of an image, reusing the place of a value that is no longer read.
int64_t place_frames(std::vector<ChainFrame>& frames, const Forms& forms, bool keep_x) {
  const int64_t count = int64_t(frames.size()), forever = count;
  std::vector<int64_t> until(count, 0), slot(count);
  std::vector<int64_t> free_at, size_of;  // per slot; free_at: the first layer at which it is free again
  for (int64_t i = 0; i + 1 < count; ++i) {
    until[forms.source(i)] = i + 1;
    if (forms.residual(i) >= 0) until[forms.residual(i)] = i + 1;
  }
  if (keep_x) until[0] = forever;
  until[count - 1] = forever;
  for (int64_t v = 0; v < count; ++v) {  // value v is made by layer v - 1
    size_t s = 0;
    while (s < free_at.size() && free_at[s] > v - 1) ++s;
    if (s == free_at.size()) free_at.push_back(0), size_of.push_back(0);
    free_at[s] = std::max<int64_t>(until[v], v);
    size_of[s] = std::max(size_of[s], (frames[v].size() + 31) / 16 * 16);
    slot[v] = int64_t(s);
  }
  for (int64_t v = 0; v < count; ++v)
    for (int64_t s = 0; s < slot[v]; ++s) frames[v].at += size_of[s];
  int64_t total = 0;
  for (const int64_t size : size_of) total += size;
  return total;
}

Tensor conv_chain(const Tensor& x_, at::TensorList weights, const OptionalList& scales, const OptionalList& biases,
                  at::IntArrayRef numbers, const OptionalTensor& gate_) {
  const Forms forms{numbers};
  std::vector<ChainFrame> frames = checked_frames(x_, weights, scales, biases, forms, gate_);
  const int64_t batch = x_.size(0), experts = weights[0].size(0);
  const ChainFrame last = frames.back();
  const at::DimVector mixed{batch, last.channels, last.high, last.wide};
  const at::DimVector apart{batch, experts, last.channels, last.high, last.wide};
  const Tensor y = empty_images(gate_ ? mixed : apart, x_);
  if (batch == 0) return in_type(y, x_.scalar_type());
  with_compute_type(x_, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<ConvChainKernels<T>>();
    const int64_t lanes = kernels<VectorKernels<T>>().lanes;
    std::vector<Tensor> kept;  // keeps alive what args point into
    const auto keep = [&](const Tensor& tensor) { return kept.emplace_back(tensor).template const_data_ptr<T>(); };
    ConvChainArgs<T> args{};
    args.batch = batch;
    args.experts = experts;
    args.count = int64_t(weights.size());
    args.shared = x_.dim() == 4;
    args.x = keep(in_type(x_, compute_type(x_)));
    const Tensor& x = kept.back();
    args.x_image = x.stride(0);
    args.x_expert = args.shared ? 0 : x.stride(1);
    args.x_channel = x.stride(-3);
    args.x_row = x.stride(-2);
    args.x_pixel = x.stride(-1);
    args.gate = gate_ ? keep(readable(*gate_)) : nullptr;
    args.y = y.data_ptr<T>();
    args.frames_size = place_frames(frames, forms, args.shared && experts > 1);
    args.frames = frames.data();
    std::vector<ChainLayer<T>> layers;
    double cycles = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const Tensor& weight = weights[i];
      ChainLayer<T> layer{};
      layer.cin = weight.size(2);
      layer.cout = weight.size(1);
      layer.kernel = weight.size(3);
      layer.stride = forms.stride(i);
      layer.columns = (layer.cout + lanes - 1) / lanes * lanes;
      layer.relu = forms.relu(i);
      layer.source = forms.source(i);
      layer.residual = forms.residual(i);
      layer.winograd = uses_winograd<T>(layer.kernel, layer.stride, layer.cin, layer.cout);
      if (layer.winograd) args.tile_channels = std::max({args.tile_channels, layer.cin, layer.cout});
      const OptionalTensor scale = scales.get(i), bias = biases.get(i);
      const int64_t matrix = layer.cin * layer.columns;
      Tensor taps = packed_taps<T>(readable(weight), layer.columns, scale ? keep(readable(*scale)) : nullptr);
      if (layer.winograd) taps = winograd_taps<T>(taps, experts, matrix);
      layer.weight = keep(taps);
      layer.bias = bias ? keep(readable(*bias)) : nullptr;
      layers.push_back(layer);
      bytes += layer.taps() * matrix * int64_t(sizeof(T));
      cycles += double(frames[i + 1].high) * frames[i + 1].wide * (layer.kernel * layer.kernel * layer.cin + 8) *
                layer.columns / lanes * experts;
    }
    args.layers = layers.data();
    const int64_t fit = kFrameBytes / (args.frames_size * int64_t(sizeof(T)));
    args.images = bytes > kWeightBytes ? std::clamp<int64_t>(fit, 1, kMostImages) : 1;
    for_each<T>((batch + args.images - 1) / args.images, cycles * args.images, kernel.scratch(args), x_,
                [&](int64_t group, T* scratch) { kernel.forward(args, group, scratch); });
  });
  return in_type(y, x_.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) { m.impl("conv_chain", conv_chain); }

}  // namespace fastmod::cpu
