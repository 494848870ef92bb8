// The Python seam of ops/kv_cache.h.
#include "ops/kv_cache.h"
#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

constexpr std::int64_t kMostDepth = 1 << 16;

std::int64_t checked_depth(std::int64_t depth) {
  CPUMOE_REQUIRE(depth >= 1 && depth <= kMostDepth, "records of ", depth, " values; 1 to ", kMostDepth,
                 " are accepted");
  return depth;
}

// Refuses values [rows, depth] and records [rows, bytes] that do not belong together.
void check_pair(const Array& values, const Array& records) {
  records.contiguous(2).expect<std::int8_t>("int8");
  const std::int64_t bytes = cache_record_bytes(checked_depth(values.contiguous(2).dim(1)));
  CPUMOE_REQUIRE(records.dim(0) == values.dim(0) && records.dim(1) == bytes, "records are ", records.shape_text(),
                 " for values ", values.shape_text(), "; [", values.dim(0), ", ", bytes, "] is accepted");
}

void write(nb::handle values_, nb::handle records_) {
  const Array values(values_, "values"), records(records_, "records");
  check_pair(values, records);
  records.writable();
  const DType type = values.float_type();
  const Computation computation;
  write_cache_records(active_kernels(), values.data(), type, values.dim(0), values.dim(1), records.data());
}

void read(nb::handle records_, nb::handle values_) {
  const Array records(records_, "records"), values(values_, "values");
  check_pair(values, records);
  values.writable();
  const DType type = values.float_type();
  const Computation computation;
  read_cache_records(active_kernels(), records.data(), values.dim(0), values.dim(1), type, values.data());
}

}  // namespace

void bind_cache_records(nb::module_& m) {
  using namespace nb::literals;
  m.def("cache_record_bytes", [](std::int64_t depth) { return cache_record_bytes(checked_depth(depth)); }, "depth"_a);
  m.def("write_cache_records", &write, "values"_a, "records"_a);
  m.def("read_cache_records", &read, "records"_a, "values"_a);
}

}  // namespace cpumoe
