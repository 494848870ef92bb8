#include "kernels/dispatch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "runtime/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace cpumoe {

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvxVnniKernels, kAvx512VnniKernels, kAvx512Bf16Kernels, kAmxKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonDotKernels, kNeonI8mmKernels;
#endif

namespace {

constexpr const char* kOtherArchitecture = "this build is for another processor architecture";
[[maybe_unused]] constexpr const char* kLeftOut = "this build leaves it out";  // CPUMOE_WITHOUT of CMakeLists.txt

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned sub = 0) {
  Registers r;
  if (__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// What the operating system saves on a context switch; without it the registers may not be used.
std::uint64_t enabled_state() {
  if (!bit(cpuid(1).c, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

[[maybe_unused]] bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::string avx2_obstacle() {
  const Registers one = cpuid(1), seven = cpuid(7);
  if ((enabled_state() & 0x6) != 0x6) return "the operating system does not enable AVX state";
  if (!bit(seven.b, 5) || !bit(one.c, 12) || !bit(one.c, 29)) return "the CPU lacks AVX2, FMA or F16C";
  return "";
}

std::string avx512_vnni_obstacle() {
  const Registers seven = cpuid(7);
  if (std::string why = avx2_obstacle(); !why.empty()) return why;
  if ((enabled_state() & 0xE6) != 0xE6) return "the operating system does not enable AVX-512 state";
  // F, DQ, BW, VL and VNNI
  if (!bit(seven.b, 16) || !bit(seven.b, 17) || !bit(seven.b, 30) || !bit(seven.b, 31) || !bit(seven.c, 11)) {
    return "the CPU lacks AVX-512 F, DQ, BW, VL or VNNI";
  }
  return "";
}

std::string avx_vnni_obstacle() {
  if (std::string why = avx2_obstacle(); !why.empty()) return why;
#if defined(CPUMOE_EMULATE)
  return avx512_vnni_obstacle();  // the same instructions in their EVEX encoding
#else
  return bit(cpuid(7, 1).a, 4) ? "" : "the CPU lacks AVX-VNNI";
#endif
}

std::string avx512_bf16_obstacle() {
  if (std::string why = avx512_vnni_obstacle(); !why.empty()) return why;
  return bit(cpuid(7, 1).a, 5) && bit(cpuid(7).c, 1) ? "" : "the CPU lacks AVX512-BF16 or VBMI";
}

[[maybe_unused]] std::string amx_obstacle() {
  if (std::string why = avx512_bf16_obstacle(); !why.empty()) return why;
  const Registers seven = cpuid(7);
  if (!bit(seven.c, 8)) return "the CPU lacks GFNI";
#if defined(CPUMOE_EMULATE)
  return "";  // tiles are emulated
#else
  if (!bit(seven.d, 24) || !bit(seven.d, 25) || !bit(seven.d, 22)) {
    return "the CPU lacks AMX-TILE, AMX-INT8 or AMX-BF16";
  }
  if ((enabled_state() & 0x60000) != 0x60000) return "the operating system does not enable AMX state";
  if (!amx_permitted()) return "the kernel refused the use of AMX tiles";
  return "";
#endif
}

#elif defined(__aarch64__)

std::string neon_dot_obstacle() {
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0 ? "" : "the CPU lacks the dot product instructions (FEAT_DotProd)";
}

std::string neon_i8mm_obstacle() {
  constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM
  if (std::string why = neon_dot_obstacle(); !why.empty()) return why;
  return (getauxval(AT_HWCAP2) & kI8mm) != 0 ? "" : "the CPU lacks the int8 matrix instructions (FEAT_I8MM)";
}

#endif

constexpr int kInstructionSets = 8;

Tuning tuning() {
#if defined(__x86_64__)
  if (cpuid(0).b == 0x756E6547) return {.read_ahead_bytes = 4096, .software_streams = true};  // "Genu": Intel
#endif
  return {};
}

// The kernels with the tuning of this processor. Never destroyed: threads may still compute while the process ends.
IsaEntry present(const Kernels& kernels, const std::string& obstacle) {
  static Kernels tuned[kInstructionSets];
  static int count = 0;
  Kernels& own = tuned[count++];
  own = kernels;
  own.tuning = tuning();
  return {kernels.name, &own, obstacle.empty(), obstacle};
}

[[maybe_unused]] IsaEntry absent(const char* name, const char* reason = kOtherArchitecture) {
  return {name, nullptr, false, reason};
}

std::vector<IsaEntry> find_instruction_sets() {
  std::vector<IsaEntry> found;
  found.push_back(present(kScalarKernels, ""));
#if defined(__x86_64__)
  found.push_back(absent("neon_dot"));
  found.push_back(absent("neon_i8mm"));
  found.push_back(present(kAvx2Kernels, avx2_obstacle()));
  found.push_back(present(kAvxVnniKernels, avx_vnni_obstacle()));
  found.push_back(present(kAvx512VnniKernels, avx512_vnni_obstacle()));
#if defined(CPUMOE_WITHOUT_AVX512_BF16)
  found.push_back(absent("avx512_bf16", kLeftOut));
#else
  found.push_back(present(kAvx512Bf16Kernels, avx512_bf16_obstacle()));
#endif
#if defined(CPUMOE_WITHOUT_AMX)
  found.push_back(absent("amx", kLeftOut));
#else
  found.push_back(present(kAmxKernels, amx_obstacle()));
#endif
#else
  for (const char* name : {"avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx"}) found.push_back(absent(name));
#if defined(__aarch64__)
  found.push_back(present(kNeonDotKernels, neon_dot_obstacle()));
  found.push_back(present(kNeonI8mmKernels, neon_i8mm_obstacle()));
#else
  found.push_back(absent("neon_dot"));
  found.push_back(absent("neon_i8mm"));
#endif
#endif
  return found;
}

const Kernels& find_kernels(const std::string& name, const char* where) {
  std::string names;
  for (const IsaEntry& e : instruction_sets()) {
    if (e.name == name) {
      CPUMOE_REQUIRE(e.supported, where, "=", name, " cannot run here: ", e.reason);
      return *e.kernels;
    }
    names += names.empty() ? e.name : std::string(", ") + e.name;
  }
  refuse(where, "=", name, " is not known; accepted are: ", names);
}

const Kernels& default_kernels() {
  if (const char* name = std::getenv("CPUMOE_ISA"); name != nullptr) return find_kernels(name, "CPUMOE_ISA");
  const Kernels* best = nullptr;
  for (const IsaEntry& e : instruction_sets()) {
    if (e.supported) best = e.kernels;
  }
  return *best;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const std::vector<IsaEntry>& instruction_sets() {
  static const std::vector<IsaEntry> found = find_instruction_sets();
  return found;
}

const Kernels& active_kernels() {
  const Kernels* kernels = in_use.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = &default_kernels();
    in_use.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

void use_kernels(const std::string& name) { in_use.store(name.empty() ? nullptr : &find_kernels(name, "isa")); }

bool amx_palette_hidden() {
#if defined(__x86_64__)
  const Registers tiles = cpuid(0x1D, 1);
  return bit(cpuid(7).d, 24) && (enabled_state() & 0x60000) == 0x60000 && tiles.a == 0 && tiles.b == 0;
#else
  return false;
#endif
}

std::string cpu_name() {
  std::string name = "unknown";
  std::FILE* info = std::fopen("/proc/cpuinfo", "r");
  if (info == nullptr) return name;
  char line[512];
  while (std::fgets(line, sizeof(line), info) != nullptr) {
    const std::string_view text(line);
    const bool names = text.rfind("model name", 0) == 0 || text.rfind("CPU part", 0) == 0;
    const std::size_t colon = text.find(": ");
    if (names && colon != std::string_view::npos) {
      name = text.substr(colon + 2, text.find('\n') - colon - 2);
      break;
    }
  }
  std::fclose(info);
  return name;
}

}  // namespace cpumoe
