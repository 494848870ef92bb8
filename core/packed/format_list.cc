#include "packed/format_list.h"

#include <cstring>
#include <numeric>

namespace cpumoe {
namespace {

// A line is four inputs of each of the 32 columns. Of int4 weights, a byte's low nibble is one of the first 64 inputs
// of the record and its high one the input 64 further on; line l holds the inputs 4 l .. 4 l + 3 of either half.
constexpr int kLines = 16, kLineBytes = 4 * kBlockColumns;

// `flipped` are the bits that are stored inverted: the fourth makes two's complement a nibble from 0 to 15.
template <std::uint8_t flipped>
void write_nibbles(const RecordValues& values, std::uint8_t* dst) {
  constexpr std::uint32_t kFlipped = 0x11111111u * flipped;
  for (int line = 0; line < kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      std::uint32_t low, high;
      std::memcpy(&low, values[column] + line * 4, 4);
      std::memcpy(&high, values[column] + 64 + line * 4, 4);
      const std::uint32_t both = ((low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4) ^ kFlipped;
      std::memcpy(dst + line * kLineBytes + column * 4, &both, 4);
    }
  }
}

// What a stored nibble of 0 stands for is `first`; those from `wrap` on are 16 less.
template <int first, int wrap>
void read_nibbles(const std::uint8_t* src, RecordValues& values) {
  constexpr auto value = [](int nibble) {
    return static_cast<std::int8_t>(nibble + first - (nibble >= wrap ? 16 : 0));
  };
  for (int line = 0; line < kLines; ++line) {
    for (int column = 0; column < kBlockColumns; ++column) {
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t both = src[line * kLineBytes + column * 4 + i];
        values[column][line * 4 + i] = value(both & 0xF);
        values[column][64 + line * 4 + i] = value(both >> 4);
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

// Of every line the lower four bits of each weight like nibbles, then 64 bytes with the upper two: byte b has those of
// byte b of both tiles, the first lower, and of either half, the first lower.
constexpr int kSixBitsLineBytes = kLineBytes + kLineBytes / 2;

void write_six_bits(const RecordValues& values, std::uint8_t* dst) {
  std::uint8_t nibbles[kLines * kLineBytes];
  write_nibbles<0>(values, nibbles);
  for (int line = 0; line < kLines; ++line, dst += kSixBitsLineBytes) {
    std::memcpy(dst, nibbles + line * kLineBytes, kLineBytes);
    for (int b = 0; b < kLineBytes / 2; ++b) {
      std::uint8_t bits = 0;
      for (int tile = 0; tile < 2; ++tile) {
        const std::int8_t* column = values[tile * kTileColumns + b / 4] + line * 4 + b % 4;
        bits |= static_cast<std::uint8_t>(((column[0] >> 4 & 3) | (column[64] >> 4 & 3) << 2) << (4 * tile));
      }
      dst[kLineBytes + b] = bits;
    }
  }
}

void read_six_bits(const std::uint8_t* src, RecordValues& values) {
  std::uint8_t nibbles[kLines * kLineBytes];
  for (int line = 0; line < kLines; ++line) {
    std::memcpy(nibbles + line * kLineBytes, src + line * kSixBitsLineBytes, kLineBytes);
  }
  read_nibbles<0, 16>(nibbles, values);
  for (int line = 0; line < kLines; ++line) {
    const std::uint8_t* upper = src + line * kSixBitsLineBytes + kLineBytes;
    for (int b = 0; b < kLineBytes / 2; ++b) {
      for (int tile = 0; tile < 2; ++tile) {
        std::int8_t* column = values[tile * kTileColumns + b / 4] + line * 4 + b % 4;
        const int bits = upper[b] >> (4 * tile);
        column[0] = static_cast<std::int8_t>(column[0] | (bits & 3) << 4);
        column[64] = static_cast<std::int8_t>(column[64] | (bits >> 2 & 3) << 4);
      }
    }
  }
}

}  // namespace

const RecordCodec kInt4Codec = {write_nibbles<0>, read_nibbles<0, 8>};
const RecordCodec kOffsetNibblesCodec = {write_nibbles<8>, read_nibbles<-8, 16>};
const RecordCodec kFp4Codec = {write_nibbles<0>, read_nibbles<0, 16>};
const RecordCodec kInt8Codec = {write_int8, read_int8};
const RecordCodec kSixBitsCodec = {write_six_bits, read_six_bits};

constexpr FormatInfo kWeightFormats[kFormatCount] = {
    {WeightFormat::kInt4, "int4", "int4"},
    {WeightFormat::kInt4Group32, "int4-g32", "int4"},
    {WeightFormat::kInt4Group64, "int4-g64", "int4"},
    {WeightFormat::kInt4Group128, "int4-g128", "int4"},
    {WeightFormat::kInt8, "int8", "int8"},
    {WeightFormat::kInt8Group32, "int8-g32", "int8"},
    {WeightFormat::kInt8Group64, "int8-g64", "int8"},
    {WeightFormat::kInt8Group128, "int8-g128", "int8"},
    {WeightFormat::kInt4ZeroGroup32, "int4-zero-g32", "int4"},
    {WeightFormat::kInt4ZeroGroup64, "int4-zero-g64", "int4"},
    {WeightFormat::kInt4ZeroGroup128, "int4-zero-g128", "int4"},
    {WeightFormat::kFp4Group16, "fp4-g16", "fp4"},
    {WeightFormat::kFp4Group32, "fp4-g32", "fp4"},
    {WeightFormat::kE4M3, "fp8", "fp8"},
    {WeightFormat::kE4M3Tile128, "fp8-tile-g128", "fp8"},
    {WeightFormat::kE4M3Group32, "fp8-g32", "fp8"},
    {WeightFormat::kE3M2Group32, "fp6-e3m2-g32", "fp6-e3m2"},
    {WeightFormat::kE2M3Group32, "fp6-e2m3-g32", "fp6-e2m3"},
    {WeightFormat::kInt8ZeroGroup32, "int8-zero-g32", "int8"},
    {WeightFormat::kInt8ZeroGroup64, "int8-zero-g64", "int8"},
    {WeightFormat::kInt8ZeroGroup128, "int8-zero-g128", "int8"},
    {WeightFormat::kBF16, "bf16", "bf16"},
    {WeightFormat::kF16, "fp16", "fp16"},
    {WeightFormat::kF32, "fp32", "fp32"},
};

constexpr bool in_order_of_numbers() {
  for (int i = 0; i < kFormatCount; ++i) {
    if (static_cast<int>(kWeightFormats[i].id) != i + 1) return false;
  }
  return true;
}
static_assert(in_order_of_numbers(), "find_format takes a number for a position in the list");

bool FormatInfo::takes(ScaleType scales) const {
  const FormatTraits traits = traits_of(id);
  if (!traits.has_scales()) return scales == ScaleType::kNone;
  if (id == WeightFormat::kFp4Group16) return scales == ScaleType::kE4M3;
  const bool is_small_float =
      traits.decoding == Decoding::kFp4 || (traits.bits >= 6 && traits.decoding >= Decoding::kE4M3);
  if (is_small_float && traits.subgroup == 32) return scales == ScaleType::kE8M0;
  if (has_tile_scales(id)) return scales == ScaleType::kF32;
  return scales == ScaleType::kF32 || scales == ScaleType::kBF16 || scales == ScaleType::kF16;
}

const char* name_of(ScaleType scales) {
  constexpr const char* kNames[kScaleTypeCount] = {"float32", "bfloat16", "e8m0", "e4m3", "float16", "none"};
  const auto number = static_cast<std::uint32_t>(scales);
  return number >= 1 && number <= kScaleTypeCount ? kNames[number - 1] : "unknown";
}

const char* name_of(RowFormat rows) {
  constexpr const char* kNames[kStoredRowFormatCount] = {"int8",       "int16",    "int8-static", "fp8",   "fp8-static",
                                                         "fp8-tensor", "fp8-g128", "nvfp4",       "mxfp4", "mxfp6-e3m2",
                                                         "mxfp6-e2m3", "mxfp8",    "float"};
  const auto number = static_cast<int>(rows);
  return number < kStoredRowFormatCount ? kNames[number] : "unknown";
}

const FormatInfo* find_format(std::uint32_t number) {
  return number >= 1 && number <= kFormatCount ? &kWeightFormats[number - 1] : nullptr;
}

const FormatInfo* find_format(std::string_view element, std::int64_t group, bool zeros) {
  std::int64_t subgroup = group == 0 ? 0 : std::gcd<std::int64_t>(group, kRecordDepth);
  if (zeros && group == 0) subgroup = kRecordDepth;
  for (const FormatInfo& f : kWeightFormats) {
    const FormatTraits traits = traits_of(f.id);
    if (f.element == element && traits.subgroup == subgroup && traits.has_zeros() == zeros) return &f;
  }
  return nullptr;
}

}  // namespace cpumoe
