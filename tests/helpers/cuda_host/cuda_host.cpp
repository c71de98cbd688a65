// The scheduler behind cuda_host.h. Compiled without instrumentation even in sanitised builds: what it does between
// two fibers is not theirs. CUDA_HOST_ASAN and CUDA_HOST_TSAN tell it which sanitizer to inform of a switch.
#include "cuda_host.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#if defined(CUDA_HOST_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_HOST_TSAN)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_host {

Position position;
dim3 grid_size, block_size;

namespace {

constexpr size_t kStack = 256 * 1024;
// Stacks that all began at the same place of a page would share a few lines of the cache: every switch would miss.
constexpr size_t kStagger = 7 * 64, kStaggered = 32;
constexpr size_t kMaxStatic = 48 * 1024, kMaxShared = 64 * 1024, kMaxLarge = 99 * 1024;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxAsync = 512, kMaxGroups = 8;

enum class State { kReady, kBarrier, kWarp, kExited };

// Copies under way, oldest first: begin .. end; group i ends before group_end[i], and what follows is not committed
// yet.
struct AsyncQueue {
  int begin = 0, end = 0, groups = 0;
  int group_end[kMaxGroups];
  AsyncCopy copies[kMaxAsync];
};

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;  // ASan
  void* tsan = nullptr;
  char* stack = nullptr;
};

struct Fiber : Context {
  State state = State::kExited;
  Position position;
  int line = 0;       // of the barrier or warp operation it waits at
  unsigned mask = 0;  // of the warp operation
  int source = 0;
  uint64_t bits = 0;
  void* mine = nullptr;                     // of a collective, with what it does
  void (*run)(void* const*) = nullptr;
  bool fenced = false;
};

Context scheduler;
Fiber* current = nullptr;
std::vector<Fiber> fibers;
std::vector<AsyncQueue> queues;  // of the fibers; 12 KB each, apart from what the scheduler looks at all the time
const std::function<void()>* body = nullptr;
std::mt19937_64 order;
std::string failure;
struct SharedArray {
  const void* site;
  void* memory;
};
SharedArray shared_arrays[64];  // no container: one that grows inside a fiber would be a race to TSan
size_t shared_count = 0, shared_bytes = 0, static_bytes = 0, dynamic_bytes = 0;
size_t shared_limit = kMaxShared;
const char dynamic_site = 0;
// TSan knows objects by their address: one tag per launch and end, two per block for alternate barriers, one per warp.
[[maybe_unused]] char *launch_tag, *block_tags;
size_t barriers_passed;

#if defined(CUDA_HOST_ASAN)
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
#endif

char* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

#if defined(CUDA_HOST_TSAN)
constexpr size_t kPool = size_t(1) << 33;  // per launch; address space, not memory
// malloc would count as a write by the fiber that happens to call it, and memory used twice as a race: what fibers
// touch comes fresh from a pool.
char* pool = nullptr;
std::vector<void*> last_fibers;
size_t pool_used = 0;
char* from_pool(size_t bytes) {
  char* result = pool + pool_used;
  pool_used += (bytes + 63) / 64 * 64;
  if (pool_used > kPool) {
    std::fprintf(stderr, "cuda_host: the grid is too large for a run under TSan\n");
    std::abort();
  }
  return result;
}
void release(void* tag) { __tsan_release(tag); }
void acquire(void* tag) { __tsan_acquire(tag); }
#else
void release(void*) {}
void acquire(void*) {}
#endif

#if defined(__x86_64__)
extern "C" void cuda_host_switch(void** save, void* load);
asm(R"(
.text
.hidden cuda_host_switch
.globl cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_host_switch, .-cuda_host_switch
)");
#endif

void switch_context(Context& from, Context& to, bool from_exits) {
#if defined(CUDA_HOST_ASAN)
  const bool to_fiber = &to != &scheduler;
  __sanitizer_start_switch_fiber(from_exits ? nullptr : &from.fake_stack, to_fiber ? to.stack : scheduler_stack,
                                 to_fiber ? kStack : scheduler_stack_size);
#else
  static_cast<void>(from_exits);
#endif
#if defined(CUDA_HOST_TSAN)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  cuda_host_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(CUDA_HOST_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void fiber_main() {
#if defined(CUDA_HOST_ASAN)
  const void* stack;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &size);
  scheduler_stack = stack;
  scheduler_stack_size = size;
#endif
  acquire(launch_tag);
  (*body)();
  release(launch_tag + 1);
  current->state = State::kExited;
  switch_context(*current, scheduler, true);
  std::abort();  // never resumed
}

AsyncQueue& queue_of(const Fiber& fiber) { return queues[static_cast<size_t>(&fiber - fibers.data())]; }

void prepare(Fiber& fiber) {
#if defined(CUDA_HOST_TSAN)
  fiber.stack = from_pool(kStack);  // a stack used again in the next block would be a race
#else
  if (!fiber.stack) fiber.stack = map_memory(kStack);
#endif
#if defined(__x86_64__)
  const size_t stagger = static_cast<size_t>(&fiber - fibers.data()) % kStaggered * kStagger;
  void** top = reinterpret_cast<void**>(fiber.stack + kStack - stagger);
  *--top = nullptr;  // aligns the stack as after a call
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &fiber_main, 0);
#endif
  fiber.fake_stack = nullptr;
#if defined(CUDA_HOST_TSAN)
  fiber.tsan = __tsan_create_fiber(0);
#endif
  fiber.state = State::kReady;
  fiber.run = nullptr;
  fiber.fenced = false;
  AsyncQueue& queue = queue_of(fiber);
  queue.begin = queue.end = queue.groups = 0;
}

void wait(State state, int line) {
  Fiber& self = *current;
  self.state = state;
  self.line = line;
  switch_context(self, scheduler, false);
}

void fail(const std::string& what, const Fiber& fiber) {
  if (!failure.empty()) return;
  failure = what + " (block " + std::to_string(fiber.position.block.x) + ", thread " +
            std::to_string(fiber.position.thread.x) + ", line " + std::to_string(fiber.line) + ")";
}

// Completes the warp operation at which every lane of some mask has arrived.
void finish_warp(size_t first, size_t end) {
  for (size_t i = first; i < end; ++i) {
    if (fibers[i].state != State::kWarp) continue;
    const unsigned mask = fibers[i].mask;
    const int line = fibers[i].line;
    if (!(mask >> (i - first) & 1)) return fail("a lane takes part in a warp operation outside its mask", fibers[i]);
    bool complete = true;
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      const Fiber* other = first + lane < end ? &fibers[first + lane] : nullptr;
      complete = complete && other && other->state == State::kWarp && other->mask == mask && other->line == line &&
                 other->run == fibers[i].run;
    }
    if (!complete) continue;
    if (fibers[i].run) {
      void* lanes[32];
      for (size_t lane = 0; lane < 32; ++lane) lanes[lane] = fibers[first + lane].mine;
      fibers[i].run(lanes);
    }
    uint64_t left[32] = {};
    for (size_t lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) left[lane] = fibers[first + lane].bits;
    }
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Fiber& fiber = fibers[first + lane];
      if (!(mask >> fiber.source & 1)) return fail("a shuffle reads a lane that is not in its mask", fiber);
      fiber.bits = left[fiber.source];
      fiber.state = State::kReady;
    }
  }
}

// No fiber can run: every one waits or has exited. Lets them through the barrier, or says what is wrong.
void pass_barrier(size_t count) {
  const Fiber* waiting = nullptr;
  size_t exited = 0;
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.state == State::kWarp) return fail("a lane is missing from a warp operation", fiber);
    if (fiber.state == State::kExited) ++exited;
    if (fiber.state != State::kBarrier) continue;
    if (waiting && waiting->line != fiber.line) {
      return fail("divergent barrier: others wait at line " + std::to_string(waiting->line), fiber);
    }
    waiting = &fiber;
  }
  if (exited) return fail("barrier never reached by " + std::to_string(exited) + " exited threads", *waiting);
  for (size_t i = 0; i < count; ++i) fibers[i].state = State::kReady;
  ++barriers_passed;
}

void run_block(size_t count) {
  shared_count = shared_bytes = static_bytes = 0;
  barriers_passed = 0;
#if defined(CUDA_HOST_TSAN)
  block_tags = from_pool(2 + 32);
#endif
  for (size_t i = 0; i < count; ++i) {
    const unsigned index = static_cast<unsigned>(i);
    fibers[i].position.thread = {index % block_size.x, index / block_size.x % block_size.y,
                                 index / (block_size.x * block_size.y)};
    fibers[i].position.block = position.block;
    prepare(fibers[i]);
  }
  std::vector<size_t> ready;
  while (failure.empty()) {
    bool alive = false;
    ready.clear();
    for (size_t i = 0; i < count; ++i) {
      alive = alive || fibers[i].state != State::kExited;
      if (fibers[i].state == State::kReady) ready.push_back(i);
    }
    if (!alive) break;
    if (ready.empty()) {
      pass_barrier(count);
      continue;
    }
    for (size_t i = ready.size(); i > 1; --i) std::swap(ready[i - 1], ready[order() % i]);
    for (size_t i : ready) {
      current = &fibers[i];
      position = current->position;
      switch_context(scheduler, *current, false);
    }
    for (size_t first = 0; first < count; first += 32) finish_warp(first, first + 32 < count ? first + 32 : count);
  }
#if defined(CUDA_HOST_TSAN)
  // Destroyed one block later: TSan gives a number that is free to the next fiber, which could then pass for this one.
  for (void* fiber : last_fibers) __tsan_destroy_fiber(fiber);
  last_fibers.clear();
  for (size_t i = 0; i < count; ++i) last_fibers.push_back(fibers[i].tsan);
#else
  for (size_t i = 0; i < shared_count; ++i) std::free(shared_arrays[i].memory);
#endif
}

}  // namespace

void set_order(uint64_t seed) { order.seed(seed); }
const char* message() { return failure.c_str(); }

void barrier(int line) {
#if defined(CUDA_HOST_TSAN)
  // Alternate tags: a fast thread at the next barrier must not seem ordered before a slow one that leaves this one.
  char* tag = block_tags + barriers_passed % 2;
#else
  char* tag = nullptr;
#endif
  release(tag);
  wait(State::kBarrier, line);
  acquire(tag);
}

uint64_t exchange(unsigned mask, uint64_t bits, int source, int line) {
  current->mask = mask;
  current->bits = bits;
  current->source = source;
  current->run = nullptr;
  wait(State::kWarp, line);
  return current->bits;
}

void collective(void* mine, void (*run)(void* const*), int line) {
  current->mask = kAllLanes;
  current->source = lane();
  current->mine = mine;
  current->run = run;
  wait(State::kWarp, line);
}

void push_async(const AsyncCopy& copy, int line) {
  AsyncQueue& queue = queue_of(*current);
  const auto misaligned = [&](const void* at) { return reinterpret_cast<uintptr_t>(at) % copy.bytes != 0; };
  current->line = line;
  if (copy.bytes != 4 && copy.bytes != 8 && copy.bytes != 16) {
    fail("cp.async of " + std::to_string(copy.bytes) + " bytes", *current);
  } else if (misaligned(copy.target) || misaligned(copy.source)) {
    fail(misaligned(copy.target) ? "cp.async to a misaligned address" : "cp.async from a misaligned address", *current);
  }
  if (queue.end == kMaxAsync) {  // those that have come make room
    std::copy(queue.copies + queue.begin, queue.copies + queue.end, queue.copies);
    for (int i = 0; i < queue.groups; ++i) queue.group_end[i] -= queue.begin;
    queue.end -= queue.begin;
    queue.begin = 0;
  }
  if (queue.end == kMaxAsync) std::abort();
  queue.copies[queue.end++] = copy;
}

void commit_async() {
  AsyncQueue& queue = queue_of(*current);
  if (queue.groups == kMaxGroups) std::abort();
  queue.group_end[queue.groups++] = queue.end;
}

bool pop_async(int groups_left, AsyncCopy* copy) {
  AsyncQueue& queue = queue_of(*current);
  while (queue.groups > groups_left) {
    if (queue.begin < queue.group_end[0]) {
      *copy = queue.copies[queue.begin++];
      return true;
    }
    --queue.groups;
    for (int i = 0; i < queue.groups; ++i) queue.group_end[i] = queue.group_end[i + 1];
  }
  return false;
}

// Fibers switch at warp operations and barriers alone: nothing comes in between.
unsigned atomic_add(unsigned* address, unsigned value) {
  if (current->fenced) release(address);
  acquire(address);
  const unsigned old = *address;
  *address = old + value;
  return old;
}
void fence() { current->fenced = true; }

void warp_barrier(unsigned mask, int line) {
#if defined(CUDA_HOST_TSAN)
  const Position& at = current->position;
  const size_t index = at.thread.x + block_size.x * (at.thread.y + size_t(block_size.y) * at.thread.z);
  char* tag = block_tags + 2 + index / 32;
#else
  char* tag = nullptr;
#endif
  release(tag);
  exchange(mask, 0, lane(), line);
  acquire(tag);
}

void* shared_memory(const void* site, size_t bytes) {
  for (size_t i = 0; i < shared_count; ++i) {
    if (shared_arrays[i].site == site) return shared_arrays[i].memory;
  }
  if (shared_count == sizeof(shared_arrays) / sizeof(*shared_arrays)) std::abort();
#if defined(CUDA_HOST_TSAN)
  void* memory = from_pool(bytes);
#else
  void* memory = std::malloc(bytes);  // exact: ASan guards its ends
#endif
  // All ones is a NaN in every floating-point format. Not memset, which TSan would count as a write of this fiber.
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile unsigned char*>(memory)[i] = 0xff;
  shared_arrays[shared_count++] = {site, memory};
  shared_bytes += bytes;
  if (site != &dynamic_site) static_bytes += bytes;
  if (static_bytes > kMaxStatic) {
    fail("more than 48 KB of shared memory: " + std::to_string(static_bytes) + " bytes", *current);
  } else if (shared_bytes > shared_limit) {
    const std::string most = std::to_string(shared_limit / 1024);
    fail("more than " + most + " KB of shared memory: " + std::to_string(shared_bytes) + " bytes", *current);
  }
  return memory;
}
void next_launch_is_large() { shared_limit = kMaxLarge; }
void* dynamic_shared_memory() { return shared_memory(&dynamic_site, dynamic_bytes); }

namespace {
Hook hook = nullptr;
bool graph = false;
}
bool capturing() { return graph; }
Answer ask(const Request& request) {
  const Answer answer = hook ? static_cast<Answer>(hook(&request)) : kRun;
  if (answer == kRefuse) failure = "a CUDA graph would refuse this";
  return answer;
}
cudaError_t unsupported_in_a_graph(const char* name) {
  return ask({name, nullptr, {}, {}, 0, nullptr, 0, nullptr, nullptr}) == kRun ? cudaSuccess
                                                                              : cudaErrorStreamCaptureUnsupported;
}
extern "C" __attribute__((visibility("default"))) void cuda_host_set_hook(Hook told, int captured) {
  hook = told;
  graph = captured != 0;
}

cudaError_t launch(dim3 grid, dim3 block, size_t dynamic, const std::function<void()>& kernel) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535 ||
      threads == 0 || threads > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  failure.clear();
  grid_size = grid;
  block_size = block;
  body = &kernel;
  dynamic_bytes = dynamic;
  if (fibers.size() < threads) {
    fibers.resize(threads);
    queues.resize(threads);
  }
#if defined(CUDA_HOST_TSAN)
  if (pool) munmap(pool, kPool);
  pool = map_memory(kPool);
  pool_used = 0;
  launch_tag = from_pool(2);
  scheduler.tsan = __tsan_get_current_fiber();
#endif
  release(launch_tag);
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t b = 0; b < blocks && failure.empty(); ++b) {
    position.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                      static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(static_cast<size_t>(threads));
  }
  acquire(launch_tag + 1);
  shared_limit = kMaxShared;
  return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

// ---- reduced precision, rounding to nearest even

namespace {
uint32_t float_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
float float_value(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
}  // namespace

uint16_t bfloat16_bits(float value) {
  const uint32_t bits = float_bits(value);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float bfloat16_value(uint16_t bits) { return float_value(uint32_t(bits) << 16); }

uint16_t half_bits(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (value != value) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above: infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the FPU round to multiples of 2^-24
    const float shifted = float_value(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)));
  }
  const uint32_t rebiased = magnitude - 0x38000000u;
  return static_cast<uint16_t>(sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
}

float half_value(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) return float_value(sign | 0x7f800000u | magnitude << 13);
  if (magnitude < 0x400) {
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    return float_value(sign | float_bits(value));
  }
  return float_value(sign | ((magnitude << 13) + 0x38000000u));
}

}  // namespace cuda_host
