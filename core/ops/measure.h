// What the machine can do, measured with all threads.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

// Bytes per second of one pass over `data`; what does not fill a page at its end is left out.
double read_rate(const Kernels& kernels, const std::uint8_t* data, std::int64_t bytes);

// Operations per second of register-only dot products: of int8, or of what rows of floats are multiplied as.
double dot_rate(const Kernels& kernels, std::int64_t iterations, bool floats);

}  // namespace cpumoe
