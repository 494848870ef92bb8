#include "packed/packing.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

#include "kernels/dispatch.h"
#include "packed/format_list.h"
#include "runtime/check.h"
#include "runtime/float16.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

float element(const void* data, DType type, std::int64_t index) {
  // Packed weights may lie anywhere, also at odd addresses.
  const auto* at = static_cast<const std::uint8_t*>(data) + index * size_of(type);
  if (type == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, at, 2);
  return type == DType::kBF16 ? bfloat_to_float(half) : half_to_float(half);
}

void store_element(float value, DType type, void* data, std::int64_t index) {
  if (type == DType::kF32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] = type == DType::kBF16 ? float_to_bfloat(value) : float_to_half(value);
  }
}

// Source row of a block's column; -1 for padding.
std::int64_t source_row(const PackedSpec& spec, RowOrder order, std::int64_t block, int column) {
  std::int64_t row = block * kBlockColumns + column;
  if (order != RowOrder::kPlain) {
    const std::int64_t gate = block * kTileColumns + column % kTileColumns;
    const bool up = column >= kTileColumns;
    row = order == RowOrder::kGateThenUp ? gate + (up ? spec.columns / 2 : 0) : 2 * gate + (up ? 1 : 0);
  }
  return row < spec.columns ? row : -1;
}

// Two values for each byte; the pointers do not overlap, which lets the compiler use whole vectors.
void expand_nibbles(const std::uint8_t* __restrict in, std::int64_t pairs, int first, std::int8_t* __restrict out) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    out[2 * i] = static_cast<std::int8_t>((in[i] & 0xF) + first);
    out[2 * i + 1] = static_cast<std::int8_t>((in[i] >> 4) + first);
  }
}

// Sum of `count` values, a multiple of 8 up to 128: eight at a time as bytes that are 128 too large, in lanes of 16
// bits, each of which comes to at most 128 / 4 * 255 = 8160.
int sum_of(const std::int8_t* values, int count) {
  constexpr std::uint64_t kEvenBytes = 0x00FF00FF00FF00FFu;
  std::uint64_t lanes = 0;
  for (int i = 0; i < count; i += 8) {
    std::uint64_t bytes;
    std::memcpy(&bytes, values + i, 8);
    bytes ^= 0x8080808080808080u;
    lanes += (bytes & kEvenBytes) + (bytes >> 8 & kEvenBytes);
  }
  return static_cast<int>(lanes * 0x0001000100010001u >> 48) - 128 * count;
}

bool is_byte(ScaleType type) { return size_of(type) == 1; }

// A scale of a byte, as the kernels read it.
float byte_scale(ScaleType type, std::uint8_t byte) {
  if (type == ScaleType::kE8M0) return bits_as<float>(byte == 0 ? 0x00400000u : static_cast<std::uint32_t>(byte) << 23);
  return half_to_float(static_cast<std::uint16_t>(byte << 7));
}

// What brings sums of integers times such scales to the weights' own unit.
float byte_scale_factor(ScaleType type, int unit) {
  return (type == ScaleType::kE4M3 ? 256.0f : 1.0f) / static_cast<float>(unit);
}

// Every instruction set has the same codecs: packed weights are for all of them. Wide weights have none.
const RecordCodec* codec_of(WeightFormat format) { return active_kernels().of(format).codec; }

bool is_wide(const FormatTraits& traits) { return traits.bits > 8; }

class BlockPacker {
 public:
  BlockPacker(const PackedMatrix& matrix, const PackSource& source, const std::string& name, std::int64_t expert)
      : matrix_(matrix),
        layout_(matrix.layout),
        traits_(traits_of(layout_.weights)),
        codec_(codec_of(layout_.weights)),
        source_(source),
        name_(name),
        expert_(expert) {}

  void pack(std::int64_t block, std::uint8_t* dst) {
    std::memset(dst, 0, static_cast<std::size_t>(matrix_.block_bytes));
    std::int64_t rows[kBlockColumns];
    for (int c = 0; c < kBlockColumns; ++c) {
      rows[c] = source_row(matrix_.spec, source_.order, block, c);
      float_sums_[c] = 0.0;
      int_sums_[c] = 0;
    }
    std::uint8_t* record = dst + matrix_.head_bytes;
    const int weights_at = record_scale_bytes(layout_.weights, layout_.scales) + record_zero_bytes(layout_.weights);
    for (int g = 0; g < matrix_.records; ++g, record += matrix_.record_bytes) {
      if (is_wide(traits_)) {
        for (int c = 0; c < kBlockColumns; ++c) write_floats(rows[c], c, g, record);
        continue;
      }
      for (int c = 0; c < kBlockColumns; ++c) {
        read_values(rows[c], c, g, values_[c]);
        add_column(rows[c], g, c, record);
      }
      codec_->write(values_, record + weights_at);
    }
    write_head(rows, dst);
  }

 private:
  // 128 values of a row, zero beyond the end.
  void read_values(std::int64_t row, int column, int record, std::int8_t* out) const {
    if (source_.input_order != nullptr && row >= 0) return read_ordered_values(row, column, record, out);
    const std::int64_t depth = matrix_.spec.depth, first = static_cast<std::int64_t>(record) * kRecordDepth;
    const std::int64_t present = row < 0 ? 0 : std::min<std::int64_t>(kRecordDepth, depth - first);
    std::memset(out + std::max<std::int64_t>(present, 0), 0,
                static_cast<std::size_t>(kRecordDepth - std::max<std::int64_t>(present, 0)));
    if (present <= 0) return;
    if (!source_.nibbles) {
      const auto* in = static_cast<const std::int8_t*>(source_.values) + row * depth + first;
      if (present == kRecordDepth) {
        std::memcpy(out, in, kRecordDepth);  // of a known size: GCC makes a slow string copy of the other
      } else {
        std::memcpy(out, in, static_cast<std::size_t>(present));
      }
      check_range(out, static_cast<int>(present), row, first);
      return;
    }
    const auto* in = static_cast<const std::uint8_t*>(source_.values) + row * ((depth + 1) / 2) + first / 2;
    expand_nibbles(in, present / 2, smallest(), out);
    if (present % 2 != 0) out[present - 1] = static_cast<std::int8_t>((in[present / 2] & 0xF) + smallest());
  }

  // The same where the inputs are packed in another order.
  void read_ordered_values(std::int64_t row, int column, int record, std::int8_t* out) const {
    const std::int64_t depth = matrix_.spec.depth, first = static_cast<std::int64_t>(record) * kRecordDepth;
    const bool up = matrix_.spec.input_orders == 2 && column >= kTileColumns;
    const std::int32_t* order = source_.input_order + (up ? depth : 0);
    for (int i = 0; i < kRecordDepth; ++i) {
      out[i] = 0;
      if (first + i >= depth) continue;
      const std::int64_t input = order[first + i];
      if (source_.nibbles) {
        const std::uint8_t both = static_cast<const std::uint8_t*>(source_.values)[row * ((depth + 1) / 2) + input / 2];
        out[i] = static_cast<std::int8_t>((input % 2 == 0 ? both & 0xF : both >> 4) + smallest());
      } else {
        out[i] = static_cast<const std::int8_t*>(source_.values)[row * depth + input];
        check_range(out + i, 1, row, input);
      }
    }
  }

  // Weights that are floats, where kernels read them.
  void write_floats(std::int64_t row, int column, int record, std::uint8_t* dst) const {
    if (row < 0) return;
    switch (dtype_of(layout_.weights)) {
      case DType::kBF16: return write_words<std::uint16_t>(row, column, record, 0x7F80u, dst);
      case DType::kF16: return write_words<std::uint16_t>(row, column, record, 0x7C00u, dst);
      case DType::kF32: return write_words<std::uint32_t>(row, column, record, 0x7F800000u, dst);
    }
  }

  // The same for floats whose bits are a Word; those of the exponent are all set where it is no number.
  template <class Word>
  void write_words(std::int64_t row, int column, int record, Word exponent, std::uint8_t* dst) const {
    const std::int64_t depth = matrix_.spec.depth, first = static_cast<std::int64_t>(record) * kRecordDepth;
    const auto present = static_cast<int>(std::min<std::int64_t>(kRecordDepth, depth - first));
    Word words[kRecordDepth] = {};
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(Word));
    std::memcpy(words, static_cast<const std::uint8_t*>(source_.values) + (row * depth + first) * kSize,
                static_cast<std::size_t>(present * kSize));
    bool finite = true;
    for (int i = 0; i < present; ++i) finite &= (words[i] & exponent) != exponent;
    for (int i = 0; !finite && i < present; ++i) {
      CPUMOE_REQUIRE((words[i] & exponent) != exponent, name_, ": value at [", expert_, ", ", row, ", ", first + i,
                     "] is not finite; only finite weights are accepted");
    }
    if (layout_.weights == WeightFormat::kBF16) {
      // bf16 numbers below 2^-50 are left at 0, see kernels/prepare_floats.h.
      for (Word& word : words) word = (word & 0x7FFFu) < (127u - 50u) << 7 ? Word{0} : word;
    }
    for (int i = 0; i < present; ++i) {
      std::memcpy(dst + wide_index(layout_.weights, i, column) * kSize, &words[i], sizeof(Word));
    }
  }

  bool has_nibble_integers() const {
    return traits_.decoding == Decoding::kNibbles || traits_.decoding == Decoding::kNibblesOfZero;
  }

  // The smallest of the values of fewer than 8 bits: integers, or codes.
  int smallest() const { return has_nibble_integers() ? -8 : 0; }

  void check_range(const std::int8_t* values, int count, std::int64_t row, std::int64_t first) const {
    if (traits_.decoding == Decoding::kE4M3) return check_numbers(values, count, row, first);
    if (traits_.bits == 8) return;
    const int codes = 1 << traits_.bits;
    const auto offset = static_cast<std::uint8_t>(-smallest());
    std::uint8_t outside = 0;  // bytes throughout, so that the compiler can use whole vectors
    for (int i = 0; i < count; ++i) outside |= static_cast<std::uint8_t>(values[i] + offset);
    if (outside < codes) return;
    for (int i = 0; i < count; ++i) {
      CPUMOE_REQUIRE(values[i] >= smallest() && values[i] < smallest() + codes, name_, ": value ", int{values[i]},
                     " at [", expert_, ", ", row, ", ", first + i, "] is not ",
                     has_nibble_integers() ? "an int4 value" : concat("a code of ", code_name()), "; ", smallest(),
                     " to ", smallest() + codes - 1, " are accepted");
    }
  }

  const char* code_name() const {
    return traits_.decoding == Decoding::kFp4 ? "e2m1" : traits_.decoding == Decoding::kE3M2 ? "e3m2" : "e2m3";
  }

  // Codes of e4m3 that are NaN would be read as numbers.
  void check_numbers(const std::int8_t* codes, int count, std::int64_t row, std::int64_t first) const {
    std::uint8_t nan = 0;
    for (int i = 0; i < count; ++i) nan |= static_cast<std::uint8_t>((codes[i] & 0x7F) == 0x7F);
    if (nan == 0) return;
    for (int i = 0; i < count; ++i) {
      CPUMOE_REQUIRE((codes[i] & 0x7F) != 0x7F, name_, ": value at [", expert_, ", ", row, ", ", first + i,
                     "] is NaN (code ", codes[i] & 0xFF, "); only numbers are accepted");
    }
  }

  std::int64_t scale_index(std::int64_t row, std::int64_t group) const { return row * matrix_.spec.groups() + group; }

  // A scale as it is stored in fp32 or bf16.
  float scale(std::int64_t row, std::int64_t group) const {
    const float s = element(source_.scales, source_.scale_type, scale_index(row, group));
    CPUMOE_REQUIRE(std::isfinite(s), name_, ": scale at [", expert_, ", ", row, ", ", group,
                   "] is not finite; only finite scales are accepted");
    return s * (1.0f / static_cast<float>(traits_.unit));  // a power of two: exact, but for what becomes subnormal
  }

  // Puts a scale of a byte where it belongs and gives its value.
  float put_byte_scale(std::int64_t row, std::int64_t group, std::uint8_t* dst) const {
    *dst = static_cast<const std::uint8_t*>(source_.scales)[scale_index(row, group)];
    const bool accepted = layout_.scales == ScaleType::kE8M0 ? *dst != 0xFF : *dst < 0x7F;
    CPUMOE_REQUIRE(accepted, name_, ": scale at [", expert_, ", ", row, ", ", group, "] has the code ", int{*dst},
                   layout_.scales == ScaleType::kE8M0 ? ", which is NaN; 0 to 254 are accepted"
                                                      : ", which is negative or NaN; 0 to 126 are accepted");
    return byte_scale(layout_.scales, *dst);
  }

  float put_scale(std::int64_t row, std::int64_t group, int slot, std::uint8_t* record) const {
    if (is_byte(layout_.scales)) return put_byte_scale(row, group, record + slot);
    const float s = scale(row, group);  // divided by the unit, as it is read
    if (layout_.scales == ScaleType::kF16) {
      const std::uint16_t h = float_to_half(s * static_cast<float>(traits_.unit));
      std::memcpy(record + slot * 2, &h, 2);
      return half_to_float(h) * (1.0f / static_cast<float>(traits_.unit));
    }
    if (layout_.scales == ScaleType::kF32) {
      std::memcpy(record + slot * 4, &s, 4);
      return s;
    }
    const std::uint16_t h = float_to_bfloat(s);
    std::memcpy(record + slot * 2, &h, 2);
    return bfloat_to_float(h);
  }

  // Puts the zero point where it belongs, from 0 on like nibbles, and gives it.
  int put_zero(std::int64_t row, std::int64_t group, std::uint8_t* dst) const {
    const int zero = source_.zeros[scale_index(row, group)], half = 1 << (traits_.bits - 1);
    CPUMOE_REQUIRE(zero >= -half && zero < half, name_, ": zero point ", zero, " at [", expert_, ", ", row, ", ", group,
                   "]; ", -half, " to ", half - 1, " are accepted");
    *dst = static_cast<std::uint8_t>(zero + half);
    return zero;
  }

  // Sum of the integers that `count` stored values are multiplied as, but for their zero point.
  int sum_of_integers(const std::int8_t* values, int count) const {
    if (traits_.decoding == Decoding::kFp4) {
      int sum = 0;
      for (int i = 0; i < count; ++i) sum += kFp4Doubled[values[i]];
      return sum;
    }
    return sum_of(values, count) * traits_.unit;
  }

  // Scales and zero points of one column in one record, and what it adds to the column's sum.
  void add_column(std::int64_t row, int record, int column, std::uint8_t* dst) {
    if (row < 0) return;
    const int step = traits_.subgroup == 0 ? kRecordDepth : traits_.subgroup;
    std::uint8_t* zeros = dst + record_scale_bytes(layout_.weights, layout_.scales);
    for (int i = 0; i < kRecordDepth; i += step) {
      const std::int64_t input = static_cast<std::int64_t>(record) * kRecordDepth + i;
      if (input >= matrix_.spec.depth) break;
      if (traits_.subgroup == 0) {
        if (traits_.has_integers()) int_sums_[column] += sum_of_integers(values_[column] + i, step);
        continue;
      }
      const std::int64_t group = matrix_.spec.group_of(input);
      if (has_tile_scales(layout_.weights)) {
        put_tile_scale(row, group, column, dst);
        continue;
      }
      const int slot = scale_slot(layout_.weights, i) * kBlockColumns + column;
      const int zero = traits_.has_zeros() ? put_zero(row, group, zeros + slot) : 0;
      const float stored = put_scale(row, group, slot, dst);
      if (!traits_.has_integers()) continue;
      // Inputs beyond the end have no zero point: the rows are zero there.
      const auto present = static_cast<int>(std::min<std::int64_t>(step, matrix_.spec.depth - input));
      const int sum = sum_of_integers(values_[column] + i, step) - zero * present * traits_.unit;
      float_sums_[column] += static_cast<double>(stored) * sum;
    }
  }

  // The scale that all columns of a tile share.
  void put_tile_scale(std::int64_t row, std::int64_t group, int column, std::uint8_t* record) const {
    const float s = scale(row, group);
    std::uint8_t* at = record + column / kTileColumns * 4;
    if (column % kTileColumns == 0) std::memcpy(at, &s, 4);
    const float first = element(at, DType::kF32, 0);
    CPUMOE_REQUIRE(first == s, name_, ": scale ", s, " at [", expert_, ", ", row, ", ", group, "], where the row ",
                   column % kTileColumns, " before has ", first, "; rows of a block have one scale");
  }

  // The scale of a column, or its factor.
  float column_scale(std::int64_t row) const {
    if (row < 0) return 0.0f;
    if (!traits_.has_scales()) return 1.0f;
    if (!traits_.has_factor) return scale(row, 0);
    const float factor = source_.factors == nullptr ? 1.0f : source_.factors[row];
    const float stored = factor * byte_scale_factor(layout_.scales, traits_.unit);
    CPUMOE_REQUIRE(factor > 0.0f && std::isfinite(stored), name_, ": factor of row ", row, " of expert ", expert_,
                   " is not a positive number that fp32 can hold");
    return stored;
  }

  void write_head(const std::int64_t* rows, std::uint8_t* dst) const {
    for (int c = 0; c < kBlockColumns; ++c) {
      std::uint8_t* at = dst + c * 4;
      const auto float_sum = static_cast<float>(float_sums_[c]);
      std::memcpy(at, traits_.subgroup == 0 ? static_cast<const void*>(&int_sums_[c]) : &float_sum, 4);
      if (traits_.subgroup == 0 || traits_.has_factor) {
        const float s = column_scale(rows[c]);
        std::memcpy(at + kBlockVectorBytes, &s, 4);
      }
      if (layout_.has_bias && rows[c] >= 0) {
        std::memcpy(dst + matrix_.head_bytes - kBlockVectorBytes + c * 4, source_.bias + rows[c], 4);
      }
    }
  }

  const PackedMatrix& matrix_;
  const BlockLayout layout_;
  const FormatTraits traits_;
  const RecordCodec* codec_;
  const PackSource& source_;
  const std::string& name_;
  std::int64_t expert_;
  alignas(64) RecordValues values_;
  double float_sums_[kBlockColumns];
  std::int32_t int_sums_[kBlockColumns];
};

void check_experts(const PackedMatrix& m, std::int64_t first, std::int64_t count, const std::string& name) {
  CPUMOE_REQUIRE(first >= 0 && count >= 0 && first <= m.spec.experts && count <= m.spec.experts - first, name, ": ",
                 count, " experts from number ", first, " on, where ", m.spec.experts, " are packed");
}

// Calls work(expert, block) for every block of `count` experts, on all threads; the first exception is thrown again.
template <class Work>
void for_each_block(const PackedMatrix& m, std::int64_t count, const Work& work) {
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex;
  std::string error;
  const std::int64_t total = count * m.blocks;
  run_on_threads(thread_count(), [&](Worker&) {
    for (std::int64_t i = next.fetch_add(1); i < total; i = next.fetch_add(1)) {
      try {
        work(i / m.blocks, i % m.blocks);
      } catch (const std::exception& problem) {
        next.store(total);
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (error.empty()) error = problem.what();
      }
    }
  });
  CPUMOE_REQUIRE(error.empty(), error);
}

// The orders of inputs, each of which must name every input once.
void write_orders(const PackedMatrix& m, const PackSource& source, std::int64_t expert, const std::string& name,
                  std::uint8_t* dst) {
  std::memset(dst, 0, static_cast<std::size_t>(m.input_bytes));
  for (int index = 0; index < m.spec.input_orders; ++index) {
    std::vector<bool> named(static_cast<std::size_t>(m.spec.depth), false);
    for (std::int64_t i = 0; i < m.spec.depth; ++i) {
      const std::int32_t input = source.input_order[index * m.spec.depth + i];
      CPUMOE_REQUIRE(input >= 0 && input < m.spec.depth && !named[static_cast<std::size_t>(input)], name,
                     ": the order of inputs of expert ", expert, " has input ", input, " at ", i,
                     "; every input from 0 to ", m.spec.depth - 1, " once is accepted");
      named[static_cast<std::size_t>(input)] = true;
      const auto stored = static_cast<std::uint16_t>(input);
      std::memcpy(dst + (index * m.spec.depth + i) * 2, &stored, 2);
    }
  }
}

// The stored scales of activations.
void write_input_scales(const PackedMatrix& m, const PackSource& source, std::int64_t expert, const std::string& name,
                        std::uint8_t* end) {
  for (int i = 0; i < m.spec.input_scales; ++i) {
    const float scale = source.input_scales[i];
    CPUMOE_REQUIRE(scale > 0.0f && std::isfinite(scale) && std::isfinite(1.0f / scale), name, ": input scale ", scale,
                   " of expert ", expert, "; a positive number with an inverse in fp32 is accepted");
    std::memcpy(end - 64 + i * 4, &scale, 4);
  }
}

// The reverse of BlockPacker::write_words.
template <class Word>
void unpack_words(const PackedMatrix& m, const std::uint8_t* record, std::int64_t first, std::int64_t index,
                  const UnpackTarget& target) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Word));
  const RowOrder order = m.spec.gated ? RowOrder::kGateThenUp : RowOrder::kPlain;
  const auto present = static_cast<int>(std::min<std::int64_t>(kRecordDepth, m.spec.depth - first));
  for (int c = 0; c < kBlockColumns; ++c) {
    const std::int64_t row = source_row(m.spec, order, index, c);
    if (row < 0) continue;
    Word words[kRecordDepth];
    for (int i = 0; i < present; ++i) {
      std::memcpy(&words[i], record + wide_index(m.layout.weights, i, c) * kSize, sizeof(Word));
    }
    std::memcpy(static_cast<std::uint8_t*>(target.values) + (row * m.spec.depth + first) * kSize, words,
                static_cast<std::size_t>(present * kSize));
  }
}

// The reverse of BlockPacker.
void unpack_block(const PackedMatrix& m, const std::uint8_t* block, std::int64_t index, const UnpackTarget& target) {
  const BlockLayout& layout = m.layout;
  const FormatTraits traits = traits_of(layout.weights);
  const RowOrder order = m.spec.gated ? RowOrder::kGateThenUp : RowOrder::kPlain;
  const auto unit = static_cast<float>(traits.unit);
  const std::int64_t depth = m.spec.depth, groups = m.spec.groups();
  const RecordCodec* codec = codec_of(layout.weights);
  auto* integers = static_cast<std::int8_t*>(target.values);
  const int scale_bytes = record_scale_bytes(layout.weights, layout.scales);
  const int weights_at = scale_bytes + record_zero_bytes(layout.weights);
  alignas(64) RecordValues values;
  for (int g = 0; g < m.records; ++g) {
    const std::uint8_t* record = block + m.head_bytes + g * m.record_bytes;
    const std::int64_t first = static_cast<std::int64_t>(g) * kRecordDepth;
    if (is_wide(traits)) {
      (traits.bits == 16 ? unpack_words<std::uint16_t> : unpack_words<std::uint32_t>)(m, record, first, index, target);
      continue;
    }
    codec->read(record + weights_at, values);
    for (int c = 0; c < kBlockColumns; ++c) {
      const std::int64_t row = source_row(m.spec, order, index, c);
      if (row < 0) continue;
      const auto count = static_cast<int>(std::min<std::int64_t>(kRecordDepth, depth - first));
      if (target.input_order == nullptr) {
        std::memcpy(integers + row * depth + first, values[c], static_cast<std::size_t>(count));
      } else {
        const bool up = m.spec.input_orders == 2 && c >= kTileColumns;
        const std::int32_t* input = target.input_order + (up ? depth : 0) + first;
        for (int i = 0; i < count; ++i) integers[row * depth + input[i]] = values[c][i];
      }
      if (traits.subgroup == 0) continue;
      for (int i = 0; i < kRecordDepth && first + i < depth; i += traits.subgroup) {
        const std::int64_t slot =
            has_tile_scales(layout.weights) ? c / kTileColumns : scale_slot(layout.weights, i) * kBlockColumns + c;
        const std::int64_t at = row * groups + m.spec.group_of(first + i);
        if (traits.has_zeros()) {
          target.zeros[at] = static_cast<std::int8_t>(record[scale_bytes + slot] - (1 << (traits.bits - 1)));
        }
        if (is_byte(layout.scales)) {
          static_cast<std::uint8_t*>(target.scales)[at] = record[slot];
        } else {
          const DType stored = layout.scales == ScaleType::kF32    ? DType::kF32
                               : layout.scales == ScaleType::kBF16 ? DType::kBF16
                                                                   : DType::kF16;
          const float scale = element(record, stored, slot) * (stored == DType::kF16 ? 1.0f : unit);
          store_element(scale, target.scale_type, target.scales, at);
        }
      }
    }
  }
  for (int c = 0; c < kBlockColumns; ++c) {
    const std::int64_t row = source_row(m.spec, order, index, c);
    if (row < 0) continue;
    const float of_column = element(block, DType::kF32, kBlockColumns + c);
    if (traits.subgroup == 0 && traits.has_scales()) {
      store_element(of_column * unit, target.scale_type, target.scales, row);
    }
    if (traits.has_factor) target.factors[row] = of_column / byte_scale_factor(layout.scales, traits.unit);
    if (layout.has_bias) target.bias[row] = element(block, DType::kF32, m.head_bytes / 4 - kBlockColumns + c);
  }
}

}  // namespace

void pack_experts(const PackedMatrix& m, std::uint8_t* data, std::int64_t first_expert, const PackSource* sources,
                  std::int64_t count, const std::string& name) {
  check_experts(m, first_expert, count, name);
  for (std::int64_t e = 0; e < count; ++e) {
    std::uint8_t* expert = data + kPackedHeaderBytes + (first_expert + e) * m.expert_bytes;
    write_orders(m, sources[e], first_expert + e, name, expert);
    write_input_scales(m, sources[e], first_expert + e, name, expert + m.input_bytes);
  }
  for_each_block(m, count, [&](std::int64_t e, std::int64_t b) {
    std::uint8_t* expert = data + kPackedHeaderBytes + (first_expert + e) * m.expert_bytes + m.input_bytes;
    BlockPacker(m, sources[e], name, first_expert + e).pack(b, expert + b * m.block_bytes);
  });
}

void unpack_experts(const PackedMatrix& m, std::int64_t first_expert, const UnpackTarget* targets, std::int64_t count,
                    const std::string& name) {
  check_experts(m, first_expert, count, name);
  for (std::int64_t e = 0; e < count; ++e) {
    for (std::int64_t i = 0; i < m.spec.input_orders * m.spec.depth; ++i) {
      targets[e].input_order[i] = static_cast<std::int32_t>(m.input_order(first_expert + e, 0)[i]);
    }
    for (int i = 0; i < m.spec.input_scales; ++i) targets[e].input_scales[i] = m.input_scale(first_expert + e, i);
  }
  for_each_block(m, count,
                 [&](std::int64_t e, std::int64_t b) { unpack_block(m, m.block(first_expert + e, b), b, targets[e]); });
}

}  // namespace cpumoe
