// What the CPU kernels share: plain functions on raw pointers, torch-free, compiled once per instruction set. An op has
// its own in a *_kernel.h: the struct of their arguments and a table of them; then, `#ifdef FASTMOD_ISA`, what isa_*.cpp
// compile; else its check, for the torch-facing code. isa.cpp picks the instruction set at run time.
//
// An MFNNR works on tiles of kTile batch elements in "batch-last" layout: a row is one feature, its kTile columns are
// the batch elements. Every vector then holds one feature of many elements, so odd block sizes waste no lanes, a
// softmax over blocks needs no shuffles, and nn.Linear weights are read as they are, without packing.
#pragma once

#include <cstdint>

#include "constants.h"

namespace fastmod::cpu {

constexpr int64_t kTile = kBatchTile;

inline int64_t tiles(int64_t batch) { return (batch + kTile - 1) / kTile; }

struct Routing {
  Mode mode;
  double tau;
  int64_t seed;
};

struct BlockSizes {
  int64_t batch, m, n, d;
};

// ---- instruction sets

enum class Isa { baseline, avx2, avx512 };

Isa isa();                       // the one in force
Isa best_isa();                  // the best that this machine runs
const char* name_of(Isa isa);
bool set_isa(const char* name);  // for tests; false when unknown or not supported here

// A table of kernels as each of them has it; defined in vec.h, for the tables that FASTMOD_KERNELS fills.
namespace baseline {
template <typename Table>
const Table& compiled();
}
#if defined(__x86_64__)
namespace avx2 {
template <typename Table>
const Table& compiled();
}
namespace avx512 {
template <typename Table>
const Table& compiled();
}
#endif

// What the torch-facing code of an op foo calls them by: kernels<FooKernels<T>>().forward(...)
template <typename Table>
const Table& kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::avx512: return avx512::compiled<Table>();
    case Isa::avx2: return avx2::compiled<Table>();
    case Isa::baseline: break;
  }
#endif
  return baseline::compiled<Table>();
}

// The last line of a *_kernel.h: fills its table, for one instruction set and both types. Nothing of it runs when the
// library is loaded, which might be on a machine without that instruction set.
#define FASTMOD_KERNELS(Table, ...)                      \
  template <typename T>                                  \
  constexpr Table<T> filled<Table<T>>{__VA_ARGS__};      \
  template const Table<float>& compiled<Table<float>>(); \
  template const Table<double>& compiled<Table<double>>()

// What a *_kernel.h defines outside of namespace FASTMOD_ISA needs it: of an ordinary function isa_*.cpp would each make a
// copy, in their instruction set, of which the linker keeps one for all.
#define FASTMOD_INLINE inline __attribute__((always_inline))
#define FASTMOD_INLINE_LAMBDA __attribute__((always_inline))

}  // namespace fastmod::cpu
