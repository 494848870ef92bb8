// The KV cache of a layer as steps read and write it, and rows to and from int8 KV records.
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

// The cache of one layer. Parts per token (keys and values, or latents) have room for places first_place to
// first_place + places - 1; parts per sequence are recurrent states.
struct LayerCache {
  CachedHeads tokens[2];
  std::int64_t first_place, places;
  // Or 0 and null; else a paged KV cache: pages of so many tokens, with a page table for each sequence, and first_place
  // is 0.
  std::int64_t page_tokens;
  const std::int32_t* const* pages;
  bool is_int8;  // int8 KV records: kv_record_table.h
  void* states[2];

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
