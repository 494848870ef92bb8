// Rows to and from records in int8, as caches hold them.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

// Keys or values of all sequences in one layer. Those of sequence s, head h and the token at place p are at
// s * sequence_stride + h * head_stride + (p - first_place) * token_stride elements, or bytes of records; in pages (see
// CachedAttentionCall) a page takes the place of the sequence.
struct CachedHeads {
  void* data;
  std::int64_t sequence_stride, head_stride, token_stride;

  std::int64_t offset(std::int64_t sequence, std::int64_t head, std::int64_t token) const {
    return sequence * sequence_stride + head * head_stride + token * token_stride;
  }
};

// Of a layer with attention keys and values, of another one its states by sequence.
struct LayerCache {
  CachedHeads keys, values;
  std::int64_t first_place, places;  // the places that there is room for
  // Or 0 and null; else tokens lie in pages of so many, with a list of them by sequence, and first_place is 0.
  std::int64_t page_tokens;
  const std::int32_t* const* pages;
  bool records;      // in int8: kv_record_table.h
  void* conv_state;  // see DeltaRuleCall and ShortConvolutionCall
  float* state;

  std::int64_t offset(const CachedHeads& heads, std::int64_t sequence, std::int64_t head, std::int64_t place) const {
    if (page_tokens == 0) return heads.offset(sequence, head, place - first_place);
    return heads.offset(pages[sequence][place / page_tokens], head, place % page_tokens);
  }
};

// Rows of `depth` numbers beside rows of cache_record_bytes(depth).
void write_cache_records(const Kernels& kernels, const void* values, DType type, std::int64_t rows, std::int64_t depth,
                         std::uint8_t* records);
void read_cache_records(const Kernels& kernels, const std::uint8_t* records, std::int64_t rows, std::int64_t depth,
                        DType type, void* values);

}  // namespace cpumoe
