// What all tests of the core use: counting checks, and numbers to check with.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/table.h"
#include "tests/random.h"

namespace cpumoe::tests {

inline std::atomic<int> passed{0}, failed{0};  // ranks that are threads check too

inline void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
}

inline bool same_bits(const void* a, const void* b, std::size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;  // of nothing there need be no address
}

inline bool same_numbers(const std::vector<float>& a, const std::vector<float>& b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!(same_bits(&a[i], &b[i], 4) || (a[i] != a[i] && b[i] != b[i]))) return false;
  }
  return true;
}

// Relative to the second one.
inline double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    error += d * d;
    norm += static_cast<double>(b[i]) * b[i];
  }
  return norm == 0 ? error : std::sqrt(error / norm);
}

inline std::vector<const Kernels*> other_kernels() {
  std::vector<const Kernels*> found;
  for (const IsaEntry& e : instruction_sets()) {
    if (e.supported && std::string(e.name) != "scalar") found.push_back(e.kernels);
  }
  return found;
}

inline const Kernels& scalar() { return *instruction_sets()[0].kernels; }

inline std::vector<float> random_values(std::size_t count, unsigned seed, float offset = 0.1f) {
  Random random(seed);
  std::vector<float> values(count);
  for (auto& v : values) v = random.normal(offset);
  return values;
}

template <class Call>
bool refused(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

}  // namespace cpumoe::tests
