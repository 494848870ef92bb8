// The list of weight formats: what the header, the tests and Python know of them.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/formats.h"

namespace cpumoe {

struct FormatInfo {
  WeightFormat id;
  const char* name;     // such as "int4-g32"
  const char* element;  // what Python and checkpoints call the weights: "int4"

  // How the scales of records may be held.
  bool takes(ScaleType scales) const;
};

extern const FormatInfo kWeightFormats[kFormatCount];

// The dtype of weights that are floats.
inline DType dtype_of(WeightFormat format) {
  return format == WeightFormat::kBF16 ? DType::kBF16 : format == WeightFormat::kF16 ? DType::kF16 : DType::kF32;
}

// What Python calls them: "float32", "e8m0", ...; "int8", "fp8-static", ...
const char* name_of(ScaleType scales);
const char* name_of(RowFormat rows);

// The format with this number in a header; null if there is none.
const FormatInfo* find_format(std::uint32_t number);

// The format that holds weights of `element` in groups of `group` inputs (0: a scale per column), with or without zero
// points; null if there is none. Groups that 128 does not divide are held as the largest sub-groups that divide both;
// zero points per column as those of sub-groups of 128.
const FormatInfo* find_format(std::string_view element, std::int64_t group, bool zeros = false);

}  // namespace cpumoe
