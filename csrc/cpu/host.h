// Shared by the torch-facing CPU code of all ops: choice of dtype, scratch, threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "cpu/kernels.h"

namespace fastmod::cpu {

using OptionalTensor = std::optional<at::Tensor>;

inline at::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Tests the dtype first: even a conversion that changes nothing passes through torch's dispatcher, which is slow for a
// small op.
inline at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

template <typename Low>
void round_to(const at::Tensor& from, const at::Tensor& to) {
  const float* read = from.const_data_ptr<float>();
  float* written = to.data_ptr<float>();
  for (int64_t i = 0; i < from.numel(); ++i) written[i] = static_cast<float>(static_cast<Low>(read[i]));
}

// `wide` (`tensor` in the compute dtype) rounded to `low` if that is given. One pass instead of a cast there and back.
inline at::Tensor rounded(const at::Tensor& wide, const at::Tensor& tensor, const LowType& low) {
  if (!low || tensor.scalar_type() == *low) return wide;
  const at::Tensor from = wide.contiguous(), found = at::cpu::empty(wide.sizes(), wide.options());
  *low == at::kHalf ? round_to<c10::Half>(from, found) : round_to<c10::BFloat16>(from, found);
  return found;
}

// The tensor in the form that the kernels read: contiguous, fp64 or fp32.
inline at::Tensor readable(const at::Tensor& tensor, const LowType& low = {}) {
  const at::Tensor wide = in_type(tensor, compute_type(tensor));
  return rounded(wide.is_contiguous() ? wide : wide.contiguous(), tensor, low);
}

// The same for a tensor with copies in its first dimension. Each copy is contiguous; the stride between copies is
// arbitrary, and 0 where all share one.
inline at::Tensor readable_copies(const at::Tensor& tensor) {
  const at::Tensor wide = in_type(tensor, compute_type(tensor));
  int64_t step = 1;
  for (int64_t i = wide.dim() - 1; i > 0; --i) {
    if (wide.size(i) != 1 && wide.stride(i) != step) return wide.contiguous();
    step *= wide.size(i);
  }
  return wide;
}

// The device is known here, so this bypasses the dispatcher as well.
inline at::Tensor empty_wide(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::cpu::empty(sizes, like.options().dtype(compute_type(like)));
}

// Calls `body` with a float or double zero, whose type is the compute type.
template <typename Body>
auto with_compute_type(const at::Tensor& tensor, Body&& body) {
  return tensor.scalar_type() == at::kDouble ? body(double{}) : body(float{});
}

inline Routing read_routing(const OptionalTensor& tau, double tau_value, const OptionalTensor& seed, int64_t mode) {
  check_routing(tau, tau_value, seed, mode);
  const double value = tau ? tau->item<double>() : tau_value;
  TORCH_CHECK_VALUE(value > 0, "tau: expected a number > 0, got ", value);
  return {static_cast<Mode>(mode), value, mode == 1 ? seed->item<int64_t>() : 0};
}

// Below this many cycles, as estimated by the callers, waking a thread does not pay. Measured with multiplex of 128 to
// 512 elements, one thread and two in turns on two cores: even at 7e3 to 10e3 cycles per thread; at 14e3 two threads
// are 1.04 to 1.24 x faster.
constexpr double kCyclesPerThread = 12e3;

// Calls body(index, scratch) for every index, in parallel if there is enough work. Results must not depend on which
// thread runs what. Each thread first works on its own share, so that it finds in its cache what the op before left
// there, and then steals work from the others: on a busy machine some threads are slower, and all would wait for them.
template <typename T, typename Body>
void for_each(int64_t count, double cycles_each, int64_t scratch_size, const at::Tensor& like, const Body& body) {
  const double wanted = count * cycles_each / kCyclesPerThread;
  const int64_t most = at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), count);
  const int64_t threads = std::max<int64_t>(1, wanted < most ? static_cast<int64_t>(std::ceil(wanted)) : most);
  const at::Tensor scratch = scratch_size ? empty_wide({threads * scratch_size}, like) : at::Tensor();
  T* memory = scratch_size ? scratch.data_ptr<T>() : nullptr;
  if (threads == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, memory);
    return;
  }
  struct alignas(64) Share {  // a cache line each
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Share> shares(threads);
  for (int64_t t = 0; t < threads; ++t) {
    shares[t].next = count * t / threads;
    shares[t].end = count * (t + 1) / threads;
  }
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t other = t; other < t + threads; ++other) {
        Share& share = shares[other % threads];
        for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
          body(i, memory + t * scratch_size);
      }
  });
}

inline double sum_in_order(const std::vector<double>& parts) {
  double total = 0;
  for (double part : parts) total += part;
  return total;
}

}  // namespace fastmod::cpu
