// Which kernels this CPU can run, and which are in use.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace cpumoe {

struct IsaEntry {
  const char* name;
  const Kernels* kernels;  // null: not in this binary (another architecture)
  bool supported;
  std::string reason;  // why not, when not supported
};

// All instruction sets by name, best last, tuned for this processor. The answer is found once.
const std::vector<IsaEntry>& instruction_sets();

// The kernels in use: those of CPUMOE_ISA if it is set (an unknown or unsupported name is an error, never replaced),
// else the best supported.
const Kernels& active_kernels();

// Chooses by name for the rest of the process (tests, benchmarks); "" goes back to the default.
void use_kernels(const std::string& name);

// True where AMX works but the CPUID leaves that oneDNN reads its tile sizes from are zero, as on some virtual
// machines. oneDNN then dies with SIGILL in bf16 products.
bool amx_palette_hidden();

// Name and model of the processor.
std::string cpu_name();

}  // namespace cpumoe
