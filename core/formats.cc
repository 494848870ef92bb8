#include "formats.h"

#include <cstring>
#include <numeric>

namespace cpumoe {
namespace {

// A line is four inputs of each of the 32 columns. Of int4 weights, a byte's low nibble is one of the first 64 inputs
// of the record and its high one the input 64 further on; line l holds the inputs 4 l .. 4 l + 3 of either half.
constexpr int kLines = 16, kLineBytes = 4 * kBlockColumns;

void write_int4(const RecordValues& values, std::uint8_t* dst) {
  for (int line = 0; line < kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      std::uint32_t low, high;
      std::memcpy(&low, values[column] + line * 4, 4);
      std::memcpy(&high, values[column] + 64 + line * 4, 4);
      const std::uint32_t both = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4;
      std::memcpy(dst + line * kLineBytes + column * 4, &both, 4);
    }
  }
}

void read_int4(const std::uint8_t* src, RecordValues& values) {
  for (int line = 0; line < kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t both = src[line * kLineBytes + column * 4 + i];
        const int low = both & 0xF, high = both >> 4;
        values[column][line * 4 + i] = static_cast<std::int8_t>(low < 8 ? low : low - 16);
        values[column][64 + line * 4 + i] = static_cast<std::int8_t>(high < 8 ? high : high - 16);
      }
    }
  }
}

void write_int8(const RecordValues& values, std::uint8_t* dst) {
  for (int line = 0; line < 2 * kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      std::memcpy(dst + line * kLineBytes + column * 4, values[column] + line * 4, 4);
    }
  }
}

void read_int8(const std::uint8_t* src, RecordValues& values) {
  for (int line = 0; line < 2 * kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      std::memcpy(values[column] + line * 4, src + line * kLineBytes + column * 4, 4);
    }
  }
}

}  // namespace

const RecordCodec kInt4Codec = {write_int4, read_int4};
const RecordCodec kInt8Codec = {write_int8, read_int8};

// In the order of their numbers.
const FormatInfo kWeightFormats[kFormatCount] = {
    {WeightFormat::kInt4, "int4", "int4"},
    {WeightFormat::kInt4Group32, "int4-g32", "int4"},
    {WeightFormat::kInt4Group64, "int4-g64", "int4"},
    {WeightFormat::kInt4Group128, "int4-g128", "int4"},
    {WeightFormat::kInt8, "int8", "int8"},
};

const FormatInfo* find_format(std::uint32_t number) {
  for (const FormatInfo& f : kWeightFormats) {
    if (static_cast<std::uint32_t>(f.id) == number) return &f;
  }
  return nullptr;
}

const FormatInfo* find_format(std::string_view element, std::int64_t group) {
  const std::int64_t subgroup = group == 0 ? 0 : std::gcd<std::int64_t>(group, kRecordDepth);
  for (const FormatInfo& f : kWeightFormats) {
    if (f.element == element && traits_of(f.id).subgroup == subgroup) return &f;
  }
  return nullptr;
}

}  // namespace cpumoe
