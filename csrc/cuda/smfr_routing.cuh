// Routing of one column, (row, n), over m, in shared memory or in registers.
#pragma once

#include "multiplex.cuh"

namespace fastmod::cuda {

template <typename C = float>
struct RoutingColumn {
  struct Extremes {
    C top, sum;
    int chosen;
  };
  int mode;
  C tau;
  int64_t seed;

  __device__ explicit RoutingColumn(const Routing<C>& routing) : mode(routing.mode) {
    tau = temperature_of(routing);
    seed = routing.seed ? *routing.seed : routing.seed_value;
  }
  template <typename T>
  __device__ RoutingColumn(int mode_, const StackLayer<T>& layer) : mode(mode_) {
    tau = layer.tau ? number_at(layer.tau, layer.tau_type) : layer.tau_value;
    if (!(tau > 0.0f)) tau = NAN;  // as in multiplex.cuh
    seed = layer.seed ? *layer.seed : 0;
  }
  // Logits -> scores, in place; stride: between one m and the next, in memory and in the noise, which begins at
  // `index`.
  __device__ Extremes scores(C* column, int count, int stride, int64_t index) const {
    Extremes found{-C(INFINITY), C(0), 0};
#pragma unroll 1
    for (int m = 0; m < count; ++m, column += stride, index += stride) {
      C value = *column;
      if (mode == kGumbel) value += gumbel_at<C>(seed, index);
      value /= tau;
      *column = value;
      if (value > found.top || value != value) {  // a NaN stays the maximum, as in torch
        found.top = value;
        found.chosen = m;
      }
    }
    return found;
  }
  __device__ void add_up(const C* column, int count, int stride, Extremes& found) const {
    for (int m = 0; m < count; ++m) found.sum += exponential(column[m * stride] - found.top);
  }
  // The softmax of few logits, which stay in registers, in place.
  static constexpr int kFew = 8;
  __device__ void weigh_few(C* column, int count, int stride) const {
    C value[kFew], top = -C(INFINITY), sum = 0;
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      value[m] = -C(INFINITY);
      if (m < count) value[m] = column[m * stride] / tau;
      top = value[m] > top ? value[m] : top;  // a NaN makes the sum NaN
    }
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      value[m] = exp_below(value[m] - top);
      sum += value[m];
    }
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      if (m < count) column[m * stride] = value[m] / sum;
    }
  }
  // Logits -> weights of the forward, in place.
  __device__ void weigh(C* column, int count, int stride, int64_t index) const {
    if (mode == kSoftmax && count <= kFew) return weigh_few(column, count, stride);
    Extremes found = scores(column, count, stride, index);
    const C *end = column + count * stride, *chosen = column + found.chosen * stride;
    if (mode == kSoftmax) {
#pragma unroll 1
      for (C* at = column; at != end; at += stride) {
        *at = exponential(*at - found.top);
        found.sum += *at;
      }
    }
#pragma unroll 1
    for (C* at = column; at != end; at += stride) {
      *at = mode == kSoftmax ? *at / found.sum : hard(at == chosen, found);
    }
  }
  // One-hot, or NaN where the softmax would be NaN: top - top is NaN for a NaN or an infinity.
  __device__ C hard(bool chosen, const Extremes& found) const {
    return (chosen ? C(1) : C(0)) + (found.top - found.top);
  }
  __device__ C soft(C score, const Extremes& found) const { return exponential(score - found.top) / found.sum; }
  __device__ C forward_weight(C score, int m, const Extremes& found) const {
    return mode == kSoftmax ? soft(score, found) : hard(m == found.chosen, found);
  }
};

}  // namespace fastmod::cuda
