// Packed weights: a self-describing run of bytes that every kernel reads as it is.
//
//   header (64 bytes) | expert 0 | expert 1 | ...      the header has numbers for the weight format and the scales
//   expert = orders of inputs, if any | scales of activations, if any | block 0 | block 1 | ...   32 columns each
//   block  = head | record 0 | record 1 | ...  a record is 128 inputs
//   head   = column sums [32] | scales or factors of columns [32] if any | biases [32] if any      (4 bytes each)
//   record = sub-group scales ([sub-group][32]) | sub-group zero points, a byte each, if any | weights
//
// 4-bit weights of a record: 32 lines of 64 bytes, column tiles 0 and 1 in turn. Line l of a tile holds, for
// its 16 columns, inputs 4 l .. 4 l + 3 in the low nibbles and 64 + 4 l .. 64 + 4 l + 3 in the high ones: two's
// complement, codes of e2m1, or with zero points 0..15, like these. int8 weights: the same for inputs 0..63 in the
// first 32 lines, 64..127 in the next; so are the codes of e4m3. 6-bit weights: their lower four bits like 4-bit
// weights, and behind the two lines of both tiles one with the upper two bits: byte b has those of byte b of both, tile
// 0 lower, and of either the first half lower. 16- and 32-bit weights: wide_index. Missing inputs and columns are zero
// weights (or are met by zeros in the rows).
//
// A scale is shared by 16, 32, 64 or 128 inputs of a record: gcd(group size, 128), repeated where the group is
// larger or straddles records. Their order in the record is the order in which it is read (scale_slot): for nibbles in
// groups of 32, inputs 0-31, 64-95, 32-63, 96-127. fp32 and bf16 scales are stored divided by FormatTraits::unit;
// others as they came, with the rest in the factor of the column (bytes) or left to the reader (fp16). Blocks of
// 128x128 have one scale for a record and a tile: two fp32 numbers on a line of 64 bytes.
//
// Column sums are what the zero point of a row is multiplied with: fp32 sum of scale * integer (as the kernels multiply
// them), or the int32 sum of the integers when there is one scale per channel; 0 where rows have no zero point.
//
// Where scales belong to inputs that do not lie side by side (activation order), the inputs are packed in another
// order: 16-bit numbers, [depth] for all columns or for gate and for up columns, say which input comes where.
//
// A gated first product keeps 16 gate columns and their 16 up columns in one block, so that the activation is
// applied as soon as the block is done.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "kernels/formats.h"

namespace cpumoe {

// How the rows of a source matrix map to columns.
enum class RowOrder : std::uint32_t {
  kPlain = 0,             // column = row
  kGateThenUp = 1,        // rows 0 .. N/2-1 are gate, N/2 .. N-1 up
  kGateUpInterleaved = 2  // rows alternate gate, up (only while packing; stored as kGateThenUp)
};

// What packed weights are: all that their header says.
struct PackedSpec {
  WeightFormat weights = WeightFormat::kInt4;
  ScaleType scales = ScaleType::kF32;
  std::int64_t group = 0;  // inputs that share a scale; 0: all, a scale per column
  std::int64_t experts = 0, columns = 0, depth = 0;
  bool gated = false, has_bias = false;
  RowFormat rows = RowFormat::kBytes;  // how the activations are held that these weights are multiplied with
  int input_orders = 0;                // 0: inputs in their own order; 1: in another; 2: gate and up in one each
  int input_scales = 0;                // stored scales of the activations of an expert; 2: of gate and up

  // Scales of a row.
  std::int64_t groups() const { return !traits_of(weights).has_scales() ? 0 : group == 0 ? 1 : depth / group; }
  std::int64_t group_of(std::int64_t input) const { return group == 0 ? 0 : input / group; }
  bool operator==(const PackedSpec&) const = default;
};

// Which input comes where in packed weights, which may lie at any address.
class InputOrder {
 public:
  InputOrder() = default;
  InputOrder(const std::uint8_t* numbers, std::int64_t depth) : numbers_(numbers), depth_(depth) {}

  // Whether the inputs are in another order than their own.
  explicit operator bool() const { return numbers_ != nullptr; }
  std::int64_t operator[](std::int64_t place) const {
    std::uint16_t input;
    std::memcpy(&input, numbers_ + place * 2, 2);
    return input < depth_ ? input : depth_ - 1;  // damaged bytes give wrong numbers, but none of foreign memory
  }

 private:
  const std::uint8_t* numbers_ = nullptr;
  std::int64_t depth_ = 0;
};

// A validated view of packed bytes.
struct PackedMatrix {
  PackedSpec spec;
  BlockLayout layout{};
  int blocks = 0, records = 0;
  std::int64_t padded_depth = 0, head_bytes = 0, record_bytes = 0, block_bytes = 0, expert_bytes = 0, total_bytes = 0;
  std::int64_t input_bytes = 0;        // of an expert's orders of inputs and scales of activations
  const std::uint8_t* data = nullptr;  // the header's first byte

  const std::uint8_t* block(std::int64_t expert, std::int64_t index) const;
  // The given one of an expert's orders.
  InputOrder input_order(std::int64_t expert, int index) const;
  // The given one of an expert's stored scales of activations; 0 without any.
  float input_scale(std::int64_t expert, int index) const;
};

// How rows of activations of a type are held for a matrix: floats as bf16 numbers if they are such, else as pairs of
// them, which keep 16 bits; as fp32 for weights that bf16 does not hold.
inline RowFormat rows_for(const PackedSpec& spec, DType type) {
  if (spec.rows != RowFormat::kFloat) return spec.rows;
  if (spec.weights == WeightFormat::kF16 || spec.weights == WeightFormat::kF32) return RowFormat::kF32;
  return type == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kBF16Pair;
}

// What a product of `rows` rows with `experts` experts costs, in bytes that could be read meanwhile: each expert is
// read once, and a row takes about a quarter of that time.
inline std::int64_t product_work(const PackedMatrix& m, std::int64_t experts, std::int64_t rows) {
  return m.expert_bytes * experts + m.expert_bytes / 4 * rows;
}

constexpr std::int64_t kPackedHeaderBytes = 64;

// The format for weights of `element` ("int4", "fp8", ...: packed/format_list.h) whose groups of `group_size` inputs
// share a scale (none: all inputs of a column do) and, with `zeros`, a zero point; refuses what there is no format for.
WeightFormat choose_format(const std::string& element, std::optional<std::int64_t> group_size, bool zeros,
                           const std::string& name);

// Layout of a matrix; refuses sizes and group sizes that cannot be packed. `name` is for messages.
PackedMatrix layout_of(const PackedSpec& spec, const std::string& name);

// Reads and checks the header; refuses anything that was not made by `write_header` of this version.
PackedMatrix open_packed(const std::uint8_t* data, std::int64_t bytes, const std::string& name);

void write_header(const PackedMatrix& layout, std::uint8_t* data);

}  // namespace cpumoe
