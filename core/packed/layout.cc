#include "packed/layout.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "packed/format_list.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

constexpr char kMagic[8] = {'C', 'P', 'U', 'M', 'O', 'E', 'P', 'K'};
constexpr std::uint32_t kVersion = 2;

// Limits that keep every size below 2^62 and every int32 dot product from overflowing:
// 65536 * 255 * 128 = 2,139,095,040 < 2^31.
constexpr std::int64_t kMaxExperts = 1 << 16, kMaxColumns = 1 << 24, kMaxDepth = 1 << 16;

struct Header {
  char magic[8];
  std::uint32_t version, weights, scales, group, experts, columns, depth, flags;
  std::uint64_t total_bytes;
  std::uint32_t rows, input_orders;
  std::uint64_t check;
};
static_assert(sizeof(Header) == kPackedHeaderBytes);

constexpr std::uint32_t kFlagGated = 1, kFlagBias = 2;
constexpr int kInputScalesShift = 2;  // two bits with their number

std::uint64_t header_check(const Header& h) {  // FNV-1a of all that comes before the check
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&h);
  std::uint64_t hash = 1469598103934665603ull;
  for (std::size_t i = 0; i < offsetof(Header, check); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return hash;
}

}  // namespace

const std::uint8_t* PackedMatrix::block(std::int64_t expert, std::int64_t index) const {
  return data + kPackedHeaderBytes + expert * expert_bytes + input_bytes + index * block_bytes;
}

InputOrder PackedMatrix::input_order(std::int64_t expert, int index) const {
  if (spec.input_orders == 0) return {};
  const std::int64_t which = spec.input_orders == 1 ? 0 : index;
  return {data + kPackedHeaderBytes + expert * expert_bytes + which * spec.depth * 2, spec.depth};
}

float PackedMatrix::input_scale(std::int64_t expert, int index) const {
  if (spec.input_scales == 0) return 0.0f;
  const std::int64_t orders = (spec.input_orders * spec.depth * 2 + 63) / 64 * 64;
  const std::uint8_t* scales = data + kPackedHeaderBytes + expert * expert_bytes + orders;
  float scale;
  std::memcpy(&scale, scales + (spec.input_scales == 1 ? 0 : index) * 4, 4);
  return scale;
}

WeightFormat choose_format(const std::string& element, std::optional<std::int64_t> group_size, bool zeros,
                           const std::string& name) {
  const auto* of_element = std::find_if(std::begin(kWeightFormats), std::end(kWeightFormats),
                                        [&](const FormatInfo& f) { return element == f.element; });
  CPUMOE_REQUIRE(of_element != std::end(kWeightFormats), name, ": ", element, " weights are not known");
  const std::int64_t smallest = element == "fp4" ? 16 : 32;
  CPUMOE_REQUIRE(!group_size || (*group_size > 0 && *group_size % smallest == 0), name, ": group_size=", *group_size,
                 "; a multiple of 32 (32, 64, 96, 128, ...) or per channel is accepted");
  const FormatInfo* format = find_format(element, group_size.value_or(0), zeros);
  CPUMOE_REQUIRE(format != nullptr, name, ": ", element, " weights", zeros ? " with zero points" : "",
                 ", group_size=", group_size.value_or(0), ": there is no such format");
  return format->id;
}

PackedMatrix layout_of(const PackedSpec& s, const std::string& name) {
  CPUMOE_REQUIRE(s.experts >= 1 && s.experts <= kMaxExperts, name, ": experts=", s.experts, "; 1 to ", kMaxExperts,
                 " are accepted");
  CPUMOE_REQUIRE(s.columns >= 1 && s.columns <= kMaxColumns, name, ": out_features=", s.columns, "; 1 to ", kMaxColumns,
                 " are accepted");
  CPUMOE_REQUIRE(s.depth >= 1 && s.depth <= kMaxDepth, name, ": in_features=", s.depth, "; 1 to ", kMaxDepth,
                 " are accepted");
  const FormatInfo* format = find_format(static_cast<std::uint32_t>(s.weights));
  CPUMOE_REQUIRE(format != nullptr, name, ": weight format ", static_cast<std::uint32_t>(s.weights), " is not known");
  CPUMOE_REQUIRE(format->takes(s.scales), name, ": ", name_of(s.scales), " scales do not go with weights held as ",
                 format->name);
  CPUMOE_REQUIRE(s.input_orders >= 0 && s.input_orders <= (s.gated ? 2 : 1), name, ": ", s.input_orders,
                 " orders of inputs");
  const RowTraits rows = traits_of(s.rows);
  const FormatTraits traits = traits_of(s.weights);
  const RowKind kind = rows_for(s, DType::kBF16) == RowFormat::kF32 ? RowKind::kF32 : rows.kind;
  CPUMOE_REQUIRE(static_cast<int>(s.rows) < kStoredRowFormatCount && traits.takes(kind) &&
                     (!rows.record_scales || has_tile_scales(s.weights)),
                 name, ": ", name_of(s.rows), " activations do not go with weights held as ", format->name);
  CPUMOE_REQUIRE(rows.stored_scale ? s.input_scales == 1 || (s.input_scales == 2 && s.gated) : s.input_scales == 0,
                 name, ": input_scales=", s.input_scales, " with ", name_of(s.rows), " activations; ",
                 rows.stored_scale ? s.gated ? "1 or 2 is accepted" : "1 is accepted" : "0 is accepted");
  CPUMOE_REQUIRE(!has_tile_scales(s.weights) || s.group == kRecordDepth, name, ": group_size=", s.group,
                 " with weights held as ", format->name);
  CPUMOE_REQUIRE(find_format(format->element, s.group, traits_of(s.weights).has_zeros()) == format, name,
                 ": group_size=", s.group, " with weights held as ", format->name);
  CPUMOE_REQUIRE(s.group == 0 || s.depth % s.group == 0, name, ": group_size=", s.group,
                 " does not divide in_features=", s.depth);
  CPUMOE_REQUIRE(!s.gated || s.columns % kBlockColumns == 0, name, ": ", s.columns,
                 " rows of gate and up; a multiple of 32 is accepted");
  PackedMatrix m;
  m.spec = s;
  m.layout = {s.weights, s.scales, s.has_bias};
  m.blocks = static_cast<int>((s.columns + kBlockColumns - 1) / kBlockColumns);
  m.records = static_cast<int>((s.depth + kRecordDepth - 1) / kRecordDepth);
  m.padded_depth = static_cast<std::int64_t>(m.records) * kRecordDepth;
  m.head_bytes = block_head_bytes(m.layout);
  m.record_bytes = record_bytes(s.weights, s.scales);
  m.block_bytes = m.head_bytes + m.records * m.record_bytes;
  // Blocks begin at cache lines.
  m.input_bytes = (s.input_orders * s.depth * 2 + 63) / 64 * 64 + (s.input_scales != 0 ? 64 : 0);
  m.expert_bytes = m.input_bytes + m.blocks * m.block_bytes;
  m.total_bytes = kPackedHeaderBytes + s.experts * m.expert_bytes;
  return m;
}

void write_header(const PackedMatrix& m, std::uint8_t* data) {
  Header h{};
  std::memcpy(h.magic, kMagic, sizeof(kMagic));
  h.version = kVersion;
  h.weights = static_cast<std::uint32_t>(m.spec.weights);
  h.scales = static_cast<std::uint32_t>(m.spec.scales);
  h.group = static_cast<std::uint32_t>(m.spec.group);
  h.experts = static_cast<std::uint32_t>(m.spec.experts);
  h.columns = static_cast<std::uint32_t>(m.spec.columns);
  h.depth = static_cast<std::uint32_t>(m.spec.depth);
  h.flags = (m.spec.gated ? kFlagGated : 0) | (m.spec.has_bias ? kFlagBias : 0) |
            static_cast<std::uint32_t>(m.spec.input_scales) << kInputScalesShift;
  h.total_bytes = static_cast<std::uint64_t>(m.total_bytes);
  h.rows = static_cast<std::uint32_t>(m.spec.rows);
  h.input_orders = static_cast<std::uint32_t>(m.spec.input_orders);
  h.check = header_check(h);
  std::memcpy(data, &h, sizeof(h));
}

PackedMatrix open_packed(const std::uint8_t* data, std::int64_t bytes, const std::string& name) {
  Header h;
  CPUMOE_REQUIRE(bytes >= kPackedHeaderBytes, name, ": ", bytes, " bytes are too few for packed weights");
  std::memcpy(&h, data, sizeof(h));
  CPUMOE_REQUIRE(std::memcmp(h.magic, kMagic, sizeof(kMagic)) == 0, name,
                 ": these bytes are not weights packed by cpumoe (no signature at their start)");
  CPUMOE_REQUIRE(h.version == kVersion, name, ": packed format version ", h.version, "; this build reads version ",
                 kVersion, ": pack the weights again");
  CPUMOE_REQUIRE(h.check == header_check(h), name, ": the header of the packed weights is damaged");
  PackedSpec s;
  s.weights = static_cast<WeightFormat>(h.weights);
  s.scales = static_cast<ScaleType>(h.scales);
  s.group = h.group;
  s.experts = h.experts;
  s.columns = h.columns;
  s.depth = h.depth;
  s.gated = (h.flags & kFlagGated) != 0;
  s.has_bias = (h.flags & kFlagBias) != 0;
  CPUMOE_REQUIRE(h.rows < kStoredRowFormatCount, name, ": activations of type ", h.rows, " are not known");
  s.rows = static_cast<RowFormat>(h.rows);
  CPUMOE_REQUIRE(h.input_orders <= 2, name, ": ", h.input_orders, " orders of inputs");
  s.input_orders = static_cast<int>(h.input_orders);
  s.input_scales = static_cast<int>(h.flags >> kInputScalesShift);
  PackedMatrix m = layout_of(s, name);
  CPUMOE_REQUIRE(static_cast<std::uint64_t>(m.total_bytes) == h.total_bytes, name,
                 ": the header of the packed weights is damaged");
  CPUMOE_REQUIRE(bytes == m.total_bytes, name, ": ", bytes, " bytes, but the header announces ", m.total_bytes);
  m.data = data;
  return m;
}

}  // namespace cpumoe
