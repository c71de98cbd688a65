// Weights of a stack on their way to the lanes that multiply them. See smfr.cuh.
#pragma once

#include "smfr_plan.cuh"

namespace fastmod::cuda {

template <typename T>
struct alignas(4 * sizeof(T)) Weights4 {
  T v[4];
};
template <typename T>
constexpr int kSlotBytes = kStages * 2 * kStackThreads * static_cast<int>(sizeof(Weights4<T>));

// Four weights of W from shared memory, kOffset bytes behind an address, and a copy of as many to it: one instruction
// each.
template <int kOffset, typename W>
__device__ inline Weights4<W> read_unit(SharedAddress address) {
#if defined(__CUDA_ARCH__)
  Weights4<W> found;
  if constexpr (sizeof(W) == 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=f"(found.v[0]), "=f"(found.v[1]), "=f"(found.v[2]), "=f"(found.v[3])
                 : "r"(address), "n"(kOffset)
                 : "memory");
  } else {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2 + %3];"
                 : "=r"(words.x), "=r"(words.y)
                 : "r"(address), "n"(kOffset)
                 : "memory");
    memcpy(&found, &words, sizeof(found));
  }
  return found;
#else
  return *reinterpret_cast<const Weights4<W>*>(address + kOffset);
#endif
}
template <int kOffset, typename W>
__device__ inline void copy_unit(SharedAddress address, const W* from, int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(W) == 4) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size), "n"(kOffset)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0 + %3], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(size), "n"(kOffset)
                 : "memory");
  }
#else
  copy_async_to<4 * static_cast<int>(sizeof(W))>(address + kOffset, from, size);
#endif
}

// Copies the units of weights that this lane will need. Unit: forward [two tiles][four inputs] of column g of each tile,
// backward [two k steps][two rows of the weight][two neighbouring columns].
template <typename T, typename W, bool kBackward>
struct WeightStream {
  static constexpr int kUnit = 4 * static_cast<int>(sizeof(W)), kHalf = kStackThreads * kUnit;  // bytes
  const LinearPlan<T, W>* plans;
  unsigned char* slots;         // this thread's, [stage][half], kHalf apart
  SharedAddress address, slot;  // the same; that whose unit comes next
  int lane, first_column;  // of this thread, of its warp
  int g, t4;               // lane / 4, 4 * (lane % 4)
  int linear, end, column, columns, in;
  int part, chunks;  // of the sums; chunks of it that are left, forward after the `plain` ones
  int left[2];       // forward: inputs left from this lane's first on, of each tile; backward: rows of the weight, columns
  const W *from, *second;  // forward: of each tile
  int together;            // neighbours that can be copied at once
  int plain, size[2];      // forward: chunks that are there throughout, and what to copy of them for each tile

  __device__ WeightStream(const LinearPlan<T, W>* plans_, void* memory, int first, int end_)
      : plans(plans_), slots(static_cast<unsigned char*>(memory) + threadIdx.x * sizeof(Weights4<W>)),
        address(shared_address(slots)), slot(address), lane(kept(static_cast<int>(threadIdx.x) % kWarp)),
        first_column(kept(static_cast<int>(threadIdx.x) / kWarp * kPairColumns)), g(kept(lane / 4)),
        t4(kept(4 * (lane % 4))), linear(first), end(end_),
        from(plans[0].part[0].weight), second(from) {
    enter();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) next();
  }

  // The first linear layer from here on in which this warp has columns.
  __device__ void enter() {
    column = first_column;
    for (; linear != end; linear += kBackward ? -1 : 1) {
      if (column < plans[linear].part[0].columns) return begin(0);
    }
    left[0] = left[1] = 0;  // units of nothing, for ever
    chunks = -1;
    plain = 0;
    together = 1;  // any address will do
  }
  __device__ void begin(int part_) {
    const PartPlan<W> own = read_plan(plans[linear].part + part_);
    part = part_;
    in = own.in;
    columns = own.columns;
    chunks = own.careful;
    together = own.together;
    if constexpr (kBackward) {
      left[0] = own.depth - t4;
      left[1] = columns - column - 2 * g;
      from = own.weight + static_cast<int64_t>(t4) * in + column + 2 * g;
    } else {
      plain = own.plain;
      left[0] = column + g < columns ? own.depth - t4 : 0;
      left[1] = column + 8 + g < columns ? own.depth - t4 : 0;
      from = own.weight + static_cast<int64_t>(column + g) * in + t4;
      second = from + static_cast<int64_t>(8) * in;
      size[0] = left[0] > 0 ? kUnit : 0;
      size[1] = left[1] > 0 ? kUnit : 0;
      left[0] -= plain * kDepthStep;
      left[1] -= plain * kDepthStep;
    }
  }
  __device__ void end_of_part() {
    if (part == 0 && plans[linear].part[1].depth > 0) return begin(1);
    column += kStackWarps * kPairColumns;
    if (column < columns) return begin(0);
    linear += kBackward ? -1 : 1;
    enter();
  }

  // To number `at` of the unit, kHalf bytes further on from number 4 on. Nothing is read unless `inside`.
  template <int kCount>
  __device__ void copy(int at, const W* source, bool inside) const {
    const int offset = at / 4 * kHalf + at % 4 * static_cast<int>(sizeof(W));
    if constexpr (kCount * sizeof(W) >= 4) {
      constexpr int kBytes = kCount * static_cast<int>(sizeof(W));
      copy_async_to<kBytes>(slot + offset, source, inside ? kBytes : 0);
    } else {
      W* to = reinterpret_cast<W*>(slots + (slot - address) + offset);
      narrow(0.0f, to);
      if (inside) *to = *source;
    }
  }

  __device__ void next_plain() {
    copy_unit<0>(slot, from, size[0]);
    copy_unit<kHalf>(slot, second, size[1]);
    from += kDepthStep;
    second += kDepthStep;
    --plain;
  }
  // At the end of a part, and where neighbours cannot be copied at once.
  __device__ void next_careful() {
    if (chunks == 0) end_of_part();
    if (plain > 0) return next_plain();
    if (together == 4) {
      copy<4>(0, from, left[0] > 0);
      copy<4>(4, second, left[1] > 0);
    } else if (together == 2) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        copy<2>(i, from + i, i < left[0]);
        copy<2>(4 + i, second + i, i < left[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy<1>(i, from + i, i < left[0]);
        copy<1>(4 + i, second + i, i < left[1]);
      }
    }
    from += kDepthStep;
    second += kDepthStep;
    left[0] -= kDepthStep;
    left[1] -= kDepthStep;
    if (chunks > 0) --chunks;
  }
  __device__ void next_backward() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const W* source = from + static_cast<int64_t>(i) * in;
      if (together == 2) {
        copy<2>(2 * i, source, i < left[0] && left[1] > 0);
      } else {
        copy<1>(2 * i, source, i < left[0] && left[1] > 0);
        copy<1>(2 * i + 1, source + 1, i < left[0] && left[1] > 1);
      }
    }
    from += static_cast<int64_t>(kDepthStep) * in;
    left[0] -= kDepthStep;
    if (--chunks == 0) end_of_part();
  }

  // Starts the copy of the next unit, into the slot whose unit was read last.
  __device__ void next() {
    if constexpr (kBackward) {
      next_backward();
    } else if (plain > 0) {
      next_plain();
    } else {
      next_careful();
    }
    commit_copies();
    slot = slot == address + (kStages - 1) * 2 * kHalf ? address : slot + 2 * kHalf;
  }

  // The oldest unit, whose place the next one takes.
  __device__ void take(float (&w)[2][4]) {
    wait_copies<kStages - 1>();
    const Weights4<W> four[2] = {read_unit<0, W>(slot), read_unit<kHalf, W>(slot)};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i / 4][i % 4] = read_as<T>(four[i / 4].v[i % 4]);
    next();
  }
};

}  // namespace fastmod::cuda
