// Refusing bad input: the message names the argument, the value seen and what is accepted.
//
// Strings are put together without iostreams: a second copy of the C++ library in the process (PyTorch's, say) has its
// own locale objects, and streams of one copy with facets of the other crash.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace cpumoe {

template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_same_v<Part, bool>) {
    text += part ? "true" : "false";
  } else if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    text += digits;
  } else {
    text += std::string_view(part);
  }
}

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// std::invalid_argument becomes ValueError in Python.
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const Parts&... message) {
  throw std::invalid_argument(concat(message...));
}

}  // namespace cpumoe

// A macro, so that the message costs nothing until it is needed: its parts are not even evaluated before.
#define CPUMOE_REQUIRE(ok, ...)      \
  do {                               \
    if (!(ok)) [[unlikely]]          \
      ::cpumoe::refuse(__VA_ARGS__); \
  } while (false)
