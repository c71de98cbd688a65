// Picks the kernels at run time, so that one build runs on every machine.
#include <atomic>
#include <cstring>

#include "cpu/kernels.h"

namespace fastmod::cpu {
namespace {

constexpr Isa kBestFirst[] = {Isa::avx512, Isa::avx2, Isa::baseline};

bool supported(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::baseline;
}

constexpr int kUndecided = -1;
std::atomic<int> active{kUndecided};

}  // namespace

Isa isa() {
  int chosen = active.load(std::memory_order_relaxed);
  if (chosen == kUndecided) active.store(chosen = static_cast<int>(best_isa()), std::memory_order_relaxed);
  return static_cast<Isa>(chosen);
}

const char* name_of(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "baseline"; }

Isa best_isa() {
  for (const Isa isa : kBestFirst)
    if (supported(isa)) return isa;
  return Isa::baseline;
}

bool set_isa(const char* name) {
  for (const Isa isa : kBestFirst)
    if (!std::strcmp(name, name_of(isa)) && supported(isa)) {
      active.store(static_cast<int>(isa), std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace fastmod::cpu
