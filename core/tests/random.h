// Pseudo-random numbers for the tests: the same ones for every compiler and standard library. The distributions and the
// shuffle of the standard library are implementation-defined, so that a test would draw other inputs with each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace cpumoe::tests {

// SplitMix64 (Steele, Lea, Flood 2014). Draws are made of integers and of double arithmetic as IEEE 754 defines it;
// none of them calls libm.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint32_t bits() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t mixed = (state_ ^ state_ >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return static_cast<std::uint32_t>((mixed ^ mixed >> 31) >> 32);
  }

  // An integer of [0, count).
  std::uint32_t below(std::uint32_t count) { return static_cast<std::uint32_t>(std::uint64_t{bits()} * count >> 32); }

  // An integer of [low, high].
  int integer(int low, int high) { return low + static_cast<int>(below(static_cast<std::uint32_t>(high - low) + 1)); }

  // A number of [low, high].
  float uniform(float low, float high) {
    const double share = static_cast<double>(bits()) * 0x1p-32;
    return static_cast<float>(low + share * (static_cast<double>(high) - low));
  }

  // Nearly normal, with deviation 1: the sum of twelve uniform numbers (Irwin-Hall), within 6 of the mean.
  float normal(float mean) {
    std::int64_t sum = 0;
    for (int i = 0; i < 12; ++i) sum += bits();
    return static_cast<float>(static_cast<double>(sum) * 0x1p-32 - 6.0 + mean);
  }

  template <class Values>
  void shuffle(Values& values) {
    for (std::size_t left = values.size(); left > 1; --left) {
      std::swap(values[left - 1], values[below(static_cast<std::uint32_t>(left))]);
    }
  }

 private:
  std::uint64_t state_;
};

}  // namespace cpumoe::tests
