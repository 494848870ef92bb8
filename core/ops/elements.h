// Addresses of elements in arrays of any float type.
#pragma once

#include <cstdint>

#include "kernels/formats.h"

namespace cpumoe {

inline std::uint8_t* at(void* data, std::int64_t element, DType type) {
  return static_cast<std::uint8_t*>(data) + element * size_of(type);
}
inline const std::uint8_t* at(const void* data, std::int64_t element, DType type) {
  return static_cast<const std::uint8_t*>(data) + element * size_of(type);
}

}  // namespace cpumoe
