// Streams the weights of a stack to the lanes that multiply them. See smfr.cuh.
#pragma once

#include "smfr_plan.cuh"

namespace fastmod::cuda {

template <typename T>
struct alignas(4 * sizeof(T)) Weights4 {
  T v[4];
};
template <typename T>
constexpr int kSlotBytes = kStages * kUnitChunks * 2 * kStackThreads * static_cast<int>(sizeof(Weights4<T>));

// Reads four weights from shared memory, kOffset bytes behind an address, and copies four there: one instruction each.
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
// kFrom: offset from `from` in numbers.
template <int kOffset, int kFrom, typename W>
__device__ inline void copy_unit(SharedAddress address, const W* from, int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int kBytes = kFrom * static_cast<int>(sizeof(W));
  if constexpr (sizeof(W) == 4) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(address), "l"(from), "r"(size),
                 "n"(kOffset), "n"(kBytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0 + %3], [%1 + %4], 8, %2;" ::"r"(address), "l"(from), "r"(size),
                 "n"(kOffset), "n"(kBytes)
                 : "memory");
  }
#else
  copy_async_to<4 * static_cast<int>(sizeof(W))>(address + kOffset, from + kFrom, size);
#endif
}

// Copies the weights that this lane will need, in units of two chunks, or of one at the end of a part of the sums, as
// wait, commit and the switch of slots cost as much as copying a chunk. Weights of a chunk: forward [two tiles][four
// inputs] of column g of each tile, backward [two k steps][two rows of the weight][two neighbouring columns].
template <typename T, typename W, bool kBackward>
struct WeightStream {
  static constexpr int kFour = 4 * static_cast<int>(sizeof(W)), kHalf = kStackThreads * kFour;  // bytes
  static constexpr int kChunk = 2 * kHalf, kUnit = kUnitChunks * kChunk;
  static_assert(kStages == 2 && kUnitChunks == 2, "two slots take turns");
  using Plan = LinearPlan<T, W>;
  const Plan *plan, *const end;         // of the current layer, and of the layer where the stream ends
  unsigned char* const slots;           // this thread's, [stage][chunk][half], kHalf apart
  const SharedAddress address;          // the same
  SharedAddress slot;                   // the slot whose unit is next
  const int lane, first_column, g, t4;  // of this thread, of its warp; lane / 4, 4 * (lane % 4)
  const int64_t own_bytes;              // offset of this lane's inputs, backward of its columns
  const int own_column, place;          // of a result: column within 16; place of the warp's first among activations
  int both_slots;                       // their sum
  int column, columns;
  int more;                // parts of these sums that follow
  int plain;               // full units of this part before the last one
  int left;                // in the part after those: inputs from this lane's first on; backward rows of the weight
  int size[2];             // forward: what to copy for each tile; backward: columns from this lane's first on
  int together;            // neighbours that can be copied at once; 0 at the end
  int64_t stride;          // backward: from one row of the weight to the next
  const W *from, *second;  // forward: one per tile

  __device__ WeightStream(const Plan* plans, void* memory, int first, int end_)
      : plan(plans + first), end(plans + end_),
        slots(static_cast<unsigned char*>(memory) + threadIdx.x * sizeof(Weights4<W>)), address(shared_address(slots)),
        slot(address), lane(kept(static_cast<int>(threadIdx.x) % kWarp)),
        first_column(kept(static_cast<int>(threadIdx.x) / kWarp * kPairColumns)), g(kept(lane / 4)),
        t4(kept(4 * (lane % 4))),
        own_bytes(kept(static_cast<int64_t>(kBackward ? first_column + 2 * g : t4) * static_cast<int>(sizeof(W)))),
        own_column(kept(t4 / (kBackward ? 1 : 2))),
        place(kept(first_column * (kChunkFloats / kDepthStep) + g * kDepthStep + own_column)),
        column(first_column), columns(0), more(0), plain(0), left(0), size{0, 0}, together(0), stride(0),
        from(plans[0].part[0].weight), second(from) {
#if defined(__CUDA_ARCH__)
    both_slots = kept(static_cast<int>(2 * address + kUnit));
#endif
    seek();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) next();
  }

  // Moves to the next layer (or this one) in which this warp has columns; at the end nothing is copied.
  __device__ void seek() {
    for (; plan != end; plan += kBackward ? -1 : 1) {
      if (first_column < plan->part[0].columns) return begin(plan->part);
    }
    together = 0;
  }
  __device__ void begin(const PartPlan<W>* at) {
    const PartPlan<W> own = read_plan(at);
    columns = own.columns;
    plain = own.plain;
    more = own.more;
    together = own.together;
    const int row = kBackward ? t4 : column + g;
    const auto* first = reinterpret_cast<const unsigned char*>(own.weight) + static_cast<int64_t>(row) * own.stride +
                        own_bytes;
    from = reinterpret_cast<const W*>(first);
    if constexpr (kBackward) {
      stride = own.stride / static_cast<int>(sizeof(W));
      from += column - first_column;
      left = own.depth - t4;
      size[0] = columns - column - 2 * g;
    } else {
      second = reinterpret_cast<const W*>(first + own.stride * static_cast<int64_t>(8));
      left = own.depth - plain * (kUnitChunks * kDepthStep) - t4;
      size[0] = row < columns ? kFour : 0;
      size[1] = row + 8 < columns ? kFour : 0;
    }
  }
  // Moves to what follows this part.
  __device__ void advance() {
    if (more) return begin(plan->part + 1);
    column += kStackWarps * kPairColumns;
    if (column < columns) return begin(plan->part);
    column = first_column;
    plan += kBackward ? -1 : 1;
    seek();
  }

  // Copies to number `at` of a unit, kHalf bytes further for every four. Nothing is read unless `inside`.
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

  __device__ void copy_fours(int first, int first_below, int next, int next_below) {
    copy_unit<0, 0>(slot, from, first);
    copy_unit<kHalf, 0>(slot, second, first_below);
    copy_unit<kChunk, kDepthStep>(slot, from, next);
    copy_unit<kChunk + kHalf, kDepthStep>(slot, second, next_below);
  }
  template <int kCount>
  __device__ void copy_carefully() {
#pragma unroll
    for (int i = 0; i < 8; i += kCount) {
      const int input = i / 4 * kDepthStep + i % 4;
      if (i == 4 && left + t4 <= kDepthStep) break;  // a unit of one chunk
      const bool inside = input < left;
      copy<kCount>(i / 4 * 8 + i % 4, from + input, inside && size[0]);
      copy<kCount>(i / 4 * 8 + 4 + i % 4, second + input, inside && size[1]);
    }
  }
  __device__ void next_forward() {
    constexpr int kInputs = kUnitChunks * kDepthStep;
    if (plain > 0) {
      copy_fours(size[0], size[1], size[0], size[1]);
      --plain;
    } else if (together == 4) {  // the last of a part
      const bool there = left > 0, also = left > kDepthStep;
      copy_fours(there ? size[0] : 0, there ? size[1] : 0, also ? size[0] : 0, also ? size[1] : 0);
      return advance();
    } else if (together == 0) {
      return;
    } else {
      together == 2 ? copy_carefully<2>() : copy_carefully<1>();
      left -= kInputs;
      if (left + t4 <= 0) return advance();
    }
    from += kInputs;
    second += kInputs;
  }
  __device__ void next_backward() {
    if (together == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = i / 4 * kDepthStep + i % 4;
      if (i == 4 && left + t4 <= kDepthStep) break;  // a unit of one chunk
      const W* source = from + row * stride;
      if (together == 2) {
        copy<2>(2 * i, source, row < left && size[0] > 0);
      } else {
        copy<1>(2 * i, source, row < left && size[0] > 0);
        copy<1>(2 * i + 1, source + 1, row < left && size[0] > 1);
      }
    }
    from += kUnitChunks * kDepthStep * stride;
    left -= kUnitChunks * kDepthStep;
    if (left + t4 <= 0) advance();
  }

  // Starts the copy of the next unit, into the slot whose unit was read last.
  __device__ void next() {
    kBackward ? next_backward() : next_forward();
    commit_copies();
#if defined(__CUDA_ARCH__)
    slot = both_slots - slot;
#else
    slot = slot == address ? address + kUnit : address;
#endif
  }

  // Reads the oldest unit, of kCount chunks, whose place the next one takes.
  template <int kCount>
  __device__ void take(float (&w)[kCount][2][4]) {
    wait_copies<kStages - 1>();
    Weights4<W> four[kCount][2];
    four[0][0] = read_unit<0, W>(slot);
    four[0][1] = read_unit<kHalf, W>(slot);
    if constexpr (kCount == 2) {
      four[1][0] = read_unit<kChunk, W>(slot);
      four[1][1] = read_unit<kChunk + kHalf, W>(slot);
    }
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i) w[i / 8][i / 4 % 2][i % 4] = read_as<T>(four[i / 8][i / 4 % 2].v[i % 4]);
    next();
  }
};

}  // namespace fastmod::cuda
