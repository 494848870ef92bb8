// Packing of weights as they are stored in checkpoints, and unpacking.
#pragma once

#include <cstdint>
#include <string>

#include "packed/layout.h"

namespace cpumoe {

// One expert's source: values and scales, row-major.
struct PackSource {
  const void* values = nullptr;  // int8 or floats [columns, depth], or nibbles [columns, (depth + 1) / 2]
  bool nibbles = false;          // low nibble = even input; value = nibble - 8, or the code of e2m1
  const void* scales = nullptr;  // [columns, groups]; bytes where the format has E8M0 or e4m3 scales; null for floats
  DType scale_type = DType::kF32;
  const std::int8_t* zeros = nullptr;         // [columns, groups], where the format has zero points
  const float* factors = nullptr;             // [columns] or null, for all 1; where the format has factors
  const float* bias = nullptr;                // [columns] or null
  const std::int32_t* input_order = nullptr;  // [input_orders, depth] or null
  const float* input_scales = nullptr;        // [input_scales] or null
  RowOrder order = RowOrder::kPlain;
};

// Packs the given experts of `layout` into `data` (which has a header), on all threads. Refuses values out of
// range and scales that are not finite. sources[i] is expert first_expert + i.
void pack_experts(const PackedMatrix& layout, std::uint8_t* data, std::int64_t first_expert, const PackSource* sources,
                  std::int64_t count, const std::string& name);

// Where one expert goes when it is unpacked; rows of a gated matrix are gate rows, then up rows.
struct UnpackTarget {
  void* values;  // [columns, depth]: int8, or the floats that they are
  void* scales;  // [columns, groups], as in PackSource
  DType scale_type;
  std::int8_t* zeros;         // [columns, groups], or null without zero points
  float* factors;             // [columns], or null without factors
  float* bias;                // [columns], or null without biases
  std::int32_t* input_order;  // [input_orders, depth], or null; the values come back in the order of the inputs
  float* input_scales;        // [input_scales], or null
};

// What was packed (to the bit, but for scales whose sixteenth is subnormal): experts [first_expert, first_expert +
// count) of `m`, on all threads.
void unpack_experts(const PackedMatrix& m, std::int64_t first_expert, const UnpackTarget* targets, std::int64_t count,
                    const std::string& name);

}  // namespace cpumoe
