// Shared by all CPU kernels: plain functions on raw pointers, without torch, compiled once per instruction set. An op's
// kernels are in its *_kernel.h: first the struct of arguments and the table of kernels; then, `#ifdef FASTMOD_ISA`,
// the kernels, which isa_*.cpp compile; else the op's check, for the torch-facing code. isa.cpp picks the instruction
// set at run time.
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

Isa isa();                       // the one in use
Isa best_isa();                  // the best one that this machine runs
const char* name_of(Isa isa);
bool set_isa(const char* name);  // for tests; false when unknown or not supported here

// The table of kernels for each instruction set; defined in vec.h for the tables that FASTMOD_KERNELS fills.
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

// How the torch-facing code of an op calls its kernels: kernels<FooKernels<T>>().forward(...)
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

// The last line of a *_kernel.h: fills its table for one instruction set and both types. It must not run code when the
// library is loaded, as the machine may not have that instruction set.
#define FASTMOD_KERNELS(Table, ...)                      \
  template <typename T>                                  \
  constexpr Table<T> filled<Table<T>>{__VA_ARGS__};      \
  template const Table<float>& compiled<Table<float>>(); \
  template const Table<double>& compiled<Table<double>>()

// Required for functions that a *_kernel.h defines outside of namespace FASTMOD_ISA. Of an ordinary function each
// isa_*.cpp would make a copy in its own instruction set, and the linker would keep one of them for all.
#define FASTMOD_INLINE inline __attribute__((always_inline))
#define FASTMOD_INLINE_LAMBDA __attribute__((always_inline))

}  // namespace fastmod::cpu
