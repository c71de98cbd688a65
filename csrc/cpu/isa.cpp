// Picks the kernels at run time, so that one build runs everywhere.
#include <atomic>
#include <cstring>

#include "cpu/kernels.h"

namespace fastmod::cpu {
namespace {

const Kernels* supported(const char* isa) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
               ? &kernels_avx512
               : nullptr;
  if (!std::strcmp(isa, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2 : nullptr;
#endif
  return std::strcmp(isa, "baseline") ? nullptr : &kernels_baseline;
}

const Kernels* best() {
  for (const char* isa : {"avx512", "avx2"})
    if (const Kernels* found = supported(isa)) return found;
  return &kernels_baseline;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* chosen = active.load(std::memory_order_relaxed);
  if (!chosen) active.store(chosen = best(), std::memory_order_relaxed);
  return *chosen;
}

const char* best_isa() { return best()->isa; }

bool set_isa(const char* isa) {
  const Kernels* chosen = supported(isa);
  if (chosen) active.store(chosen, std::memory_order_relaxed);
  return chosen != nullptr;
}

}  // namespace fastmod::cpu
