// Serves launch functions to test_cuda_host.py over stdin and stdout, so that the plain and the sanitised builds are
// driven alike. Each buffer is a malloc of exactly its size, as ASan needs it.
//
// Request: one text line `name dtype order #buffers size.. #ints int.. #floats float..` (size -1: null pointer), then
// the bytes of the buffers. Reply: one text line `code message`, then the bytes of the buffers as the kernel left them.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "probes.h"

using namespace fastmod::cuda;

namespace {

struct Call {
  std::string name, dtype;
  std::vector<char*> buffers;
  std::vector<int64_t> sizes, ints;
  std::vector<double> floats;

  template <typename T>
  T* at(size_t i) const {
    return reinterpret_cast<T*>(buffers.at(i));
  }
  Shape shape() const { return {ints.at(0), ints.at(1), ints.at(2), ints.at(3)}; }
};

// ints from `at`: mode, seed; floats: tau; buffers from `pointers`: tau, seed.
template <typename C>
Routing<C> routing(const Call& call, size_t at, size_t pointers) {
  return {static_cast<int>(call.ints.at(at)), call.at<C>(pointers), static_cast<C>(call.floats.at(0)),
          call.at<int64_t>(pointers + 1), call.ints.at(at + 1)};
}

// ints: count, first, samples, stream, seed; buffer `pointer`: seed.
MaskNoise mask_noise(const Call& call, size_t pointer) {
  return {call.ints.at(1), call.ints.at(2), static_cast<uint32_t>(call.ints.at(3)), call.at<int64_t>(pointer),
          call.ints.at(4)};
}

// ints: batch, experts, in, out, high, wide, kernel, stride, shared, depthwise, then scale_rows, relu, allow_tf32
ConvShape conv_shape(const Call& c) {
  const auto at = [&](size_t i) { return static_cast<int>(c.ints.at(i)); };
  return {c.ints.at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8) != 0, at(9) != 0};
}

// Scratch of exactly the size asked for, full of NaN, and tickets, which must be zero again after the launch.
template <typename C, typename Launch>
cudaError_t with_scratch(Scratch sizes, Launch launch) {
  const auto [numbers, tickets] = sizes;
  auto* scratch = static_cast<C*>(std::malloc(static_cast<size_t>(numbers) * sizeof(C)));
  auto* zeros = static_cast<unsigned*>(std::calloc(static_cast<size_t>(tickets), sizeof(unsigned)));
  for (int64_t i = 0; i < numbers; ++i) scratch[i] = static_cast<C>(NAN);
  const cudaError_t error = launch(scratch, zeros);
  for (int64_t i = 0; error == cudaSuccess && i < tickets; ++i) {
    if (zeros[i] != 0) {
      std::cerr << "ticket " << i << " was left at " << zeros[i] << std::endl;
      std::exit(3);
    }
  }
  std::free(scratch);
  std::free(zeros);
  return error;
}

// buffers from `first`: x, scale, shift, gate
template <typename T>
ConvInput<T> conv_input(const Call& c, size_t first) {
  using C = Compute<T>;
  return {c.at<T>(first),     c.at<C>(first + 1), c.at<C>(first + 2), static_cast<int>(c.ints.at(10)),
          c.at<T>(first + 3), c.ints.at(11) != 0};
}

template <typename T>
cudaError_t run_conv(const Call& c) {
  using C = Compute<T>;
  const ConvShape shape = conv_shape(c);
  const bool allow_tf32 = c.ints.at(12) != 0;
  if (c.name == "norm_conv_forward") {
    return with_scratch<C>(norm_conv_forward_scratch<T>(shape), [&](C* scratch, unsigned* ticket) {
      const ConvForward<T> conv{conv_input<T>(c, 0), c.at<T>(4), c.at<T>(5), c.at<T>(6), c.at<C>(7), c.at<C>(8),
                                scratch, ticket, shape};
      return norm_conv_forward<T>(&conv, 1, allow_tf32, nullptr);
    });
  }
  // buffers: grad, y, mean, grad_mean, grad_var, x, scale, shift, gate
  const ConvGrad<T> grad{c.at<T>(0), c.at<T>(1), c.at<C>(2), c.at<C>(3), c.at<C>(4), static_cast<C>(c.floats.at(0))};
  if (c.name == "norm_conv_backward_x") {
    return with_scratch<C>(norm_conv_backward_x_scratch<T>(shape), [&](C* scratch, unsigned* ticket) {
      const ConvBackwardX<T> conv{grad, conv_input<T>(c, 5), c.at<T>(9), c.at<T>(10), c.at<C>(11), c.at<C>(12),
                                  c.at<T>(13), scratch, ticket, shape};
      return norm_conv_backward_x<T>(&conv, 1, allow_tf32, nullptr);
    });
  }
  return with_scratch<C>(norm_conv_backward_weight_scratch<T>(shape), [&](C* scratch, unsigned* ticket) {
    const ConvBackwardWeight<T> conv{grad, conv_input<T>(c, 5), c.at<T>(9), c.at<T>(10), scratch, ticket, shape};
    return norm_conv_backward_weight<T>(&conv, 1, allow_tf32, nullptr);
  });
}

// ints: batch, experts, channels, pixels, shared, relu; buffers from `first`: x, scale, shift, residual, its scale, its
// shift, gate
template <typename T>
SumInput<T> sum_input(const Call& c, size_t first) {
  using C = Compute<T>;
  return {c.at<T>(first),     c.at<C>(first + 1), c.at<C>(first + 2), c.at<T>(first + 3),
          c.at<C>(first + 4), c.at<C>(first + 5), c.at<T>(first + 6), c.ints.at(5) != 0};
}
template <typename T>
cudaError_t run_sum(const Call& c) {
  using C = Compute<T>;
  const auto at = [&](size_t i) { return static_cast<int>(c.ints.at(i)); };
  const SumShape shape{c.ints.at(0), at(1), at(2), at(3), at(4) != 0};
  if (c.name == "norm_sum_forward") return norm_sum_forward<T>(sum_input<T>(c, 0), c.at<T>(7), shape, nullptr);
  const SumGrads<T> grads{c.at<T>(8),  c.at<C>(9),  c.at<C>(10), c.at<T>(11),
                          c.at<C>(12), c.at<C>(13), c.at<T>(14)};
  return with_scratch<C>(norm_sum_backward_scratch<T>(shape), [&](C* scratch, unsigned* ticket) {
    return norm_sum_backward<T>(c.at<T>(0), sum_input<T>(c, 1), grads, scratch, ticket, shape, nullptr);
  });
}

// ints: batch, experts, channels, pixels, relu
template <typename T>
cudaError_t run_pool(const Call& c) {
  using C = Compute<T>;
  const auto at = [&](size_t i) { return static_cast<int>(c.ints.at(i)); };
  const SumShape shape{c.ints.at(0), at(1), at(2), at(3), false};
  const size_t first = c.name == "norm_pool_forward" ? 0 : 1;
  const PoolInput<T> input{c.at<T>(first), c.at<C>(first + 1), c.at<C>(first + 2), at(4) != 0};
  if (first == 0) return norm_pool_forward<T>(input, c.at<T>(3), shape, nullptr);
  return with_scratch<C>(norm_pool_backward_scratch<T>(shape), [&](C* scratch, unsigned* tickets) {
    return norm_pool_backward<T>(c.at<T>(0), input, {c.at<T>(4), c.at<C>(5), c.at<C>(6)}, scratch, tickets, shape,
                                 nullptr);
  });
}

// ints: rows, templates, size, mixing
template <typename T>
cudaError_t run_mixture(const Call& c) {
  using C = Compute<T>;
  if (c.name == "entropy_penalty_forward") {
    return with_scratch<C>(entropy_penalty_forward_scratch<T>(c.ints.at(0)), [&](C* scratch, unsigned* tickets) {
      return entropy_penalty_forward<T>(c.at<T>(0), c.ints.at(0), c.ints.at(1), c.at<C>(1), scratch, tickets, nullptr);
    });
  }
  if (c.name == "entropy_penalty_backward") {
    return entropy_penalty_backward<T>(c.at<C>(0), c.at<T>(1), c.ints.at(0), c.ints.at(1), c.at<T>(2), nullptr);
  }
  if (c.name == "cluster_penalty_forward") {
    const auto sizes = cluster_penalty_forward_scratch<T>(c.ints.at(1), c.ints.at(2));
    return with_scratch<C>(sizes, [&](C* scratch, unsigned* tickets) {
      return cluster_penalty_forward<T>(c.at<T>(0), c.at<double>(1), scratch, tickets, c.ints.at(1), c.ints.at(2),
                                        nullptr);
    });
  }
  if (c.name == "cluster_penalty_backward") {
    return cluster_penalty_backward<T>(c.at<double>(0), c.at<T>(1), c.at<T>(2), c.ints.at(1), c.ints.at(2), nullptr);
  }
  const MixShape shape{c.ints.at(0), c.ints.at(1), c.ints.at(2), static_cast<int>(c.ints.at(3))};
  if (c.name == "template_mix_forward") {
    return with_scratch<C>({template_mix_forward_scratch<T>(shape), 0}, [&](C* scratch, unsigned*) {
      return template_mix_forward<T>(c.at<T>(0), c.at<T>(1), c.at<T>(2), scratch, shape, nullptr);
    });
  }
  return with_scratch<C>({template_mix_backward_scratch<T>(shape), 0}, [&](C* scratch, unsigned*) {
    return template_mix_backward<T>(c.at<T>(0), c.at<T>(1), c.at<T>(2), c.at<T>(3), c.at<T>(4), scratch, shape,
                                    nullptr);
  });
}

// ints: channels innermost, then as for mask_noise, images, in, out, high, wide, kernel, stride, padding and dilation (two
// each), allow_tf32
template <typename T>
cudaError_t run_masked_conv(const Call& c) {
  const auto at = [&](size_t i) { return static_cast<int>(c.ints.at(i)); };
  MaskedConvShape shape{c.ints.at(5), at(6), at(7), at(8), at(9), 0, 0, {at(10), at(11)}, {at(12), at(13)},
                        {at(14), at(15)}, {at(16), at(17)}};
  const auto out = [&](int size, int d) {
    return (size + 2 * shape.padding[d] - shape.dilation[d] * (shape.kernel[d] - 1) - 1) / shape.stride[d] + 1;
  };
  shape.out_high = out(shape.high, 0);
  shape.out_wide = out(shape.wide, 1);
  const bool last = at(0) != 0, allow_tf32 = at(18) != 0;
  const auto images = [&](auto* data, int channels, int high, int wide) {
    using Each = std::remove_pointer_t<decltype(data)>;
    const int64_t size = static_cast<int64_t>(channels) * high * wide;
    return last ? Images<Each>{{data}, size, 1, wide * channels, channels} : Images<Each>{{data}, size, high * wide, wide, 1};
  };
  const auto outer = [&](auto* data) { return images(data, shape.out, shape.out_high, shape.out_wide); };
  const auto inner = [&](auto* data) { return images(data, shape.in, shape.high, shape.wide); };
  const MaskedFilters<T> filters{{c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, {c.at<T>(4)}};
  const MaskNoise noise = mask_noise(c, 5);
  if (c.name == "masked_conv2d_forward") {
    return masked_conv2d_forward<T>(inner(c.at<const T>(0)), filters, outer(c.at<T>(6)), allow_tf32, shape, noise,
                                    fastmod::kStreamMaskBias, nullptr);
  }
  if (c.name == "masked_conv2d_backward_x") {
    return masked_conv2d_backward_x<T>(outer(c.at<const T>(0)), filters, inner(c.at<T>(6)), allow_tf32, shape, noise,
                                       nullptr);
  }
  return with_scratch<float>({masked_conv2d_partials(shape, noise.samples), 0}, [&](float* partials, unsigned*) {
    const cudaError_t error = masked_conv2d_backward_weight<T>(outer(c.at<const T>(0)), inner(c.at<const T>(6)), partials,
                                                               allow_tf32, shape, noise.samples, nullptr);
    if (error != cudaSuccess) return error;
    return masked_conv2d_finish<T>(partials, filters, {{c.at<T>(7)}, {c.at<T>(8)}, {c.at<T>(9)}, {c.at<T>(10)}},
                                   static_cast<float>(c.floats.at(0)), shape, noise, fastmod::kStreamMaskBias, nullptr);
  });
}

// ints: batch, copies, m, d, depth, route, update, mode, context, precise, n of each layer, out and in of each linear
// layer; floats: threshold. Every copy has tensors of its own. Buffers: x; out, logits, gate, saved, grads and tau of
// each layer; weight and bias of each linear layer; then those of the function.
template <typename T>
cudaError_t run_stack(const Call& c) {
  size_t number = 0, buffer = 0;
  const auto next = [&] { return static_cast<int>(c.ints.at(number++)); };
  const auto section = [&] { return c.at<float>(buffer++); };
  const auto tensor = [&] { return c.at<T>(buffer++); };
  Stack<T> s{};
  s.x = {tensor(), false};
  s.batch = next();
  s.copies = next();
  for (int* size : {&s.m, &s.d, &s.depth, &s.route, &s.update, &s.mode}) *size = next();
  s.context = next() != 0;
  s.precise = next() != 0;
  s.threshold = static_cast<float>(c.floats.at(0));
  for (int l = 0; l < s.depth; ++l) {
    StackLayer<T>& layer = s.layer[l];
    for (T** pointer : {&layer.out, &layer.logits, &layer.gate}) *pointer = tensor();
    for (float** pointer : {&layer.saved, &layer.grads, &layer.tau}) *pointer = section();
    layer.n = next();
    layer.rows = layer.n * s.d;
    layer.tau_step = 1;
  }
  s.x_step = s.batch * s.m * s.d;
  for (int i = 0; i < s.depth * (s.route + s.update); ++i) {
    StackLinear<T>& linear = s.linear[i];
    for (T** pointer : {&linear.weight, &linear.bias}) *pointer = tensor();
    for (int* size : {&linear.out, &linear.in}) *size = next();
    const bool joined = s.context && i % (s.route + s.update) == s.route;
    StackLayer<T>& layer = s.layer[i / (s.route + s.update)];
    linear.routed = joined ? layer.n * s.d : 0;
    layer.rows += linear.out;
  }
  if (c.name == "smfr_forward") {
    return with_scratch<float>({s.copies * stack_tiles(s.batch), s.copies}, [&](float* scratch, unsigned* ticket) {
      return smfr_forward<T>(s, section(), scratch, ticket, nullptr);
    });
  }
  if (c.name == "smfr_backward") {
    T* grad_out = tensor();
    float* grad_penalty = section();
    T* grad_x = tensor();
    return smfr_backward<T>(s, grad_out, grad_penalty, grad_x, section(), nullptr);
  }
  return smfr_backward_weight<T>(s, section(), nullptr);
}

// MFNNRs layer by layer: see mfnnr.py.
template <typename T>
cudaError_t run_mfnnr(const Call& c) {
  using C = Compute<T>;
  const auto number = [&](size_t i) { return static_cast<int>(c.ints.at(i)); };
  const auto joined = [&](size_t buffer, size_t sizes) {
    return Joined<T>{c.at<C>(buffer), {c.at<T>(buffer + 1), false}, number(sizes), number(sizes + 1)};
  };
  const auto threshold = [&](size_t i) { return static_cast<C>(c.floats.at(i)); };
  if (c.name == "mfnnr_linear") {
    return mfnnr_linear<T>(joined(0, 1), c.at<T>(2), c.at<T>(3), c.at<C>(4), c.at<T>(5), number(4) != 0, c.ints.at(0),
                           number(3), number(5) != 0, nullptr);
  }
  if (c.name == "mfnnr_linear_backward") {
    C *base = c.at<C>(3), *wide = c.at<C>(4);
    const InputGrad<T> result{c.at<C>(2), number(4) ? wide : base, wide, c.at<T>(5), c.at<C>(6), number(3)};
    return mfnnr_linear_backward<T>(c.at<C>(0), c.at<T>(1), result, c.ints.at(0), number(1), number(2), number(5) != 0,
                                    nullptr);
  }
  if (c.name == "mfnnr_route") {
    return mfnnr_route<T>({c.at<T>(0), false}, c.at<C>(1), c.at<C>(2), c.at<C>(3), routing<C>(c, 4, 4), c.shape(),
                          nullptr);
  }
  if (c.name == "mfnnr_gate") {
    return with_scratch<C>({0, 1}, [&](C*, unsigned* ticket) {
      return mfnnr_gate<T>(c.at<C>(0), c.at<C>(1), c.at<C>(2), c.at<T>(3), c.at<T>(4), threshold(0), c.at<C>(5),
                           number(4), c.at<C>(6), ticket, c.shape(), nullptr);
    });
  }
  if (c.name == "mfnnr_gate_backward") {
    return mfnnr_gate_backward<T>(c.at<T>(0), c.at<C>(1), c.at<C>(2), c.at<C>(3), c.at<C>(4), c.at<C>(5), threshold(0),
                                  c.shape(), nullptr);
  }
  if (c.name == "mfnnr_route_backward") {
    return mfnnr_route_backward<T>(c.at<C>(0), {c.at<T>(1), false}, c.at<C>(2), c.at<C>(3), c.at<C>(4), c.at<C>(5),
                                   number(6) != 0, c.at<C>(6), routing<C>(c, 4, 7), c.at<C>(9), threshold(1), c.shape(),
                                   nullptr);
  }
  WeightGrads<T> all{};  // one temperature
  all.batch = c.ints.at(0);
  all.count = number(1);
  all.taus = 1;
  all.allow_tf32 = number(2) != 0;
  all.tau_partials = c.at<C>(0);
  all.tau[0] = c.at<C>(1);
  for (int i = 0; i < all.count; ++i) {
    const size_t buffer = 2 + 5 * static_cast<size_t>(i), size = 3 + 3 * static_cast<size_t>(i);
    all.linear[i] = {c.at<C>(buffer), joined(buffer + 1, size + 1), c.at<T>(buffer + 3), c.at<T>(buffer + 4),
                     number(size)};
  }
  return mfnnr_weights<T>(all, nullptr);
}

template <typename T>
cudaError_t run_any(const Call& c) {
  using C = Compute<T>;
  if constexpr (sizeof(T) <= 4) {
    if (c.name.rfind("smfr_", 0) == 0) return run_stack<T>(c);
    if (c.name.rfind("masked_conv2d_", 0) == 0) return run_masked_conv<T>(c);
  }
  if (c.name.rfind("mfnnr_", 0) == 0) return run_mfnnr<T>(c);
  if (c.name.rfind("norm_conv_", 0) == 0) return run_conv<T>(c);
  if (c.name.rfind("norm_sum_", 0) == 0) return run_sum<T>(c);
  if (c.name.rfind("norm_pool_", 0) == 0) return run_pool<T>(c);
  for (const char* op : {"template_mix_", "cluster_penalty_", "entropy_penalty_"}) {
    if (c.name.rfind(op, 0) == 0) return run_mixture<T>(c);
  }
  if (c.name == "multiplex_forward") {
    return multiplex_forward<T>({c.at<T>(0)}, {c.at<T>(1)}, c.at<T>(2), routing<C>(c, 4, 3), c.shape(), nullptr);
  }
  // buffers: grad, blocks, logits, grad_blocks, grad_logits, grad_tau, tau, seed
  if (c.name == "multiplex_backward") {
    const bool learned = c.at<C>(6) != nullptr;
    return with_scratch<C>(multiplex_backward_scratch<T>(c.shape(), learned), [&](C* scratch, unsigned* tickets) {
      return multiplex_backward<T>(c.at<T>(0), {c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, {c.at<T>(4)}, c.at<C>(5),
                                   routing<C>(c, 4, 6), scratch, tickets, c.shape(), nullptr);
    });
  }
  const auto gate_shape = [&] {
    return GateShape{c.ints.at(0), c.ints.at(1), c.ints.at(2), c.ints.at(3), c.ints.at(4)};
  };
  if (c.name == "gated_residual_forward") {
    return gated_residual_forward<T>({c.at<T>(0)}, {c.at<T>(1)}, {c.at<T>(2)}, c.at<T>(3), gate_shape(), nullptr);
  }
  if (c.name == "gated_residual_backward") {
    return gated_residual_backward<T>(c.at<T>(0), {c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, {c.at<T>(4)},
                                      {c.at<T>(5)}, {c.at<T>(6)}, gate_shape(), nullptr);
  }
  if (c.name == "range_penalty_forward") {
    return range_penalty_forward<T>(c.at<T>(0), c.ints.at(0), static_cast<C>(c.floats.at(0)), c.at<C>(1), nullptr);
  }
  if (c.name == "range_penalty_finish") {
    return range_penalty_finish<C>(c.at<C>(0), c.ints.at(0), c.at<C>(1), nullptr);
  }
  if (c.name == "range_penalty_backward") {
    return range_penalty_backward<T>(c.at<C>(0), c.at<T>(1), c.ints.at(0), static_cast<C>(c.floats.at(0)), c.at<T>(2),
                                     nullptr);
  }
  if (c.name == "sample_mask_forward") {
    return sample_mask_forward<T>(c.at<T>(0), c.at<T>(1), c.at<T>(2), c.ints.at(0), mask_noise(c, 3), nullptr);
  }
  if (c.name == "sample_mask_backward") {
    return sample_mask_backward<T>(c.at<T>(0), c.at<T>(1), c.at<T>(2), c.at<T>(3), c.at<T>(4),
                                   static_cast<C>(c.floats.at(0)), c.ints.at(0), mask_noise(c, 5), nullptr);
  }
  // ints: as for mask_noise, then rows, out, in, allow_tf32
  const auto linear_shape = [&] { return LinearShape{c.ints.at(5), c.ints.at(6), c.ints.at(7)}; };
  if (c.name == "masked_linear_forward") {
    return with_scratch<C>(masked_linear_scratch<T>(linear_shape(), c.ints.at(2), false), [&](C* scratch, unsigned* t) {
      return masked_linear_forward<T>({c.at<T>(0)}, {c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, c.at<T>(4), scratch, t,
                                      c.ints.at(8) != 0, linear_shape(), mask_noise(c, 5), nullptr);
    });
  }
  if (c.name == "masked_linear_backward_x") {
    return with_scratch<C>(masked_linear_scratch<T>(linear_shape(), c.ints.at(2), true), [&](C* scratch, unsigned* t) {
      return masked_linear_backward_x<T>(c.at<T>(0), {c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, scratch, t,
                                         c.ints.at(8) != 0, linear_shape(), mask_noise(c, 4), nullptr);
    });
  }
  if (c.name == "masked_linear_backward_weight") {
    return masked_linear_backward_weight<T>(c.at<T>(0), {c.at<T>(1)}, {c.at<T>(2)}, {c.at<T>(3)}, {c.at<T>(4)}, {c.at<T>(5)},
                                            static_cast<C>(c.floats.at(0)), c.ints.at(8) != 0, linear_shape(),
                                            mask_noise(c, 6), nullptr);
  }
  std::cerr << "unknown function " << c.name << std::endl;
  std::exit(2);
}

template <typename C>
cudaError_t run_wide(const Call& c) {
  const auto number = [&](size_t i) { return static_cast<C>(c.floats.at(i)); };
  if (c.name == "batch_affine_forward") {
    return batch_affine_forward<C>(c.at<C>(0), c.at<C>(1), c.at<C>(2), c.at<C>(3), c.at<C>(4), c.at<C>(5), c.at<C>(6),
                                   c.at<C>(7), c.ints.at(0), number(0), number(1), number(2), nullptr);
  }
  if (c.name == "batch_affine_backward") {
    return batch_affine_backward<C>(c.at<C>(0), c.at<C>(1), c.at<C>(2), c.at<C>(3), c.at<C>(4), c.at<C>(5), c.at<C>(6),
                                    c.at<C>(7), c.at<C>(8), c.ints.at(0), number(0), nullptr);
  }
  return run_any<C>(c);
}

cudaError_t run(const Call& c) {
  if (c.name == "probe_uniform") {
    return probe_uniform(c.ints.at(0), c.ints.at(1), c.ints.at(2), c.at<float>(0), c.at<double>(1));
  }
  if (c.name == "probe_round") {
    return probe_round(c.at<float>(0), c.ints.at(0), c.at<__half>(1), c.at<float>(2), c.at<__nv_bfloat16>(3),
                       c.at<float>(4));
  }
  if (c.name == "probe_mma") {
    return probe_mma(c.dtype.c_str(), c.at<uint32_t>(0), c.at<uint32_t>(1), c.at<float>(2));
  }
  if (c.name == "probe_split") return probe_split(c.at<float>(0), c.ints.at(0), c.at<float>(1), c.at<float>(2));
  if (c.name == "probe_ldmatrix") return probe_ldmatrix(c.at<char>(0), c.at<uint32_t>(1));
  if (c.name == "probe_dynamic") return probe_dynamic(c.at<float>(0), c.at<float>(1), c.ints.at(0));
  if (c.name.rfind("probe_", 0) == 0) return probe(c.name.c_str() + 6, c.at<float>(0), c.at<float>(1), c.ints.at(0));
  if (c.dtype == "float32") return run_wide<float>(c);
  if (c.dtype == "float64") return run_wide<double>(c);
  if (c.dtype == "float16") return run_any<__half>(c);
  return run_any<__nv_bfloat16>(c);
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Call call;
    uint64_t order = 0;
    size_t count = 0;
    words >> call.name >> call.dtype >> order >> count;
    call.sizes.resize(count);
    for (int64_t& size : call.sizes) words >> size;
    words >> count;
    call.ints.resize(count);
    for (int64_t& value : call.ints) words >> value;
    words >> count;
    call.floats.resize(count);
    for (double& value : call.floats) words >> value;
    for (int64_t size : call.sizes) {
      call.buffers.push_back(size < 0 ? nullptr : static_cast<char*>(std::malloc(static_cast<size_t>(size))));
      if (size > 0) std::cin.read(call.buffers.back(), size);
    }
    if (words.fail() || !std::cin) return 2;
    cuda_host::set_order(order);
    const cudaError_t error = run(call);
    std::cout << error << ' ' << (error == cudaErrorLaunchFailure ? cuda_host::message() : "") << '\n';
    for (size_t i = 0; i < call.buffers.size(); ++i) {
      if (call.sizes[i] > 0) std::cout.write(call.buffers[i], call.sizes[i]);
      std::free(call.buffers[i]);
    }
    std::cout.flush();
  }
}
