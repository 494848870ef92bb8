// Which kernels this CPU can run, and which are in use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace cpumoe {

struct IsaEntry {
  const char* name;
  const Kernels* kernels;  // null: not in this binary (another architecture)
  bool supported;
  std::string reason;  // why not, when not supported
};

// All instruction sets by name, best last. The answer is found once.
const std::vector<IsaEntry>& instruction_sets();

// The kernels in use: those of CPUMOE_ISA if it is set (an unknown or unsupported name is an error, never replaced),
// else the best supported.
const Kernels& active_kernels();

// Chooses by name for the rest of the process (tests, benchmarks); "" goes back to the default.
void use_kernels(const std::string& name);

// True where AMX works but the CPUID leaves that oneDNN reads its tile sizes from are zero, as on some virtual
// machines. oneDNN then dies with SIGILL in bf16 products.
bool amx_palette_hidden();

// Whether a single row should prefetch inside its stream of weights, or only across the breaks of it. Intel cores gain
// much from it; on AMD Zen 4 the hardware's prefetcher alone is faster (30 instead of 22 GB/s a core).
bool software_streams();

// How far to read ahead of the weights being multiplied, in bytes. Nearer leaves DRAM idle, farther falls out of the
// caches: 4 KB was best on Sapphire Rapids, 8 KB on Zen 4.
int read_ahead_bytes();

// Name and model of the processor.
std::string cpu_name();

}  // namespace cpumoe
