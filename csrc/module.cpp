// The pybind11 module. Loading it registers the kernels; it reports how it was built and which CPU kernels are in use.
#include <pybind11/pybind11.h>

#include "cpu/kernels.h"
#include "fastmod_stamp.h"  // written by setup.py

PYBIND11_MODULE(_C, m) {
  m.def("stamp", [] { return pybind11::module_::import("json").attr("loads")(FASTMOD_STAMP); },
        "What this module was built with.");
  m.def(
      "cpu_isa", [] { return fastmod::cpu::name_of(fastmod::cpu::isa()); },
      "Instruction set of the CPU kernels in use.");
  m.def(
      "best_cpu_isa", [] { return fastmod::cpu::name_of(fastmod::cpu::best_isa()); },
      "Best instruction set that this machine runs.");
  m.def(
      "set_cpu_isa",
      [](const char* isa) {
        if (!fastmod::cpu::set_isa(isa))
          throw pybind11::value_error(
              std::string("isa: expected baseline, or avx2 or avx512 where the machine has it; got ") + isa);
      },
      pybind11::arg("isa"), "Force an instruction set, to test its kernels.");
  m.def("has_cuda", [] {
#ifdef FASTMOD_WITH_CUDA
    return true;
#else
    return false;
#endif
  });
}
