// Rows to and from records in int8, as caches hold them.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace cpumoe {

// Rows of `depth` numbers beside rows of cache_record_bytes(depth).
void write_cache_records(const Kernels& kernels, const void* values, DType type, std::int64_t rows, std::int64_t depth,
                         std::uint8_t* records);
void read_cache_records(const Kernels& kernels, const std::uint8_t* records, std::int64_t rows, std::int64_t depth,
                        DType type, void* values);

}  // namespace cpumoe
