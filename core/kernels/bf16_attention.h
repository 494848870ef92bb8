// Attention over cached keys and values of bf16 by vdpbf16ps, in the AVX512-BF16 kernel and in the AMX kernel: the bits
// are those of attention_parts.h. Vectors are 512 bits wide, or 256 where that leaves fewer lanes empty.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include <immintrin.h>

#include "kernels/attention_parts.h"
#include "kernels/kv_records.h"
#include "kernels/vector_avx2.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

// Two numbers at once. Assembly, because GCC 12 copies every running sum of a loop around its own intrinsic.
template <class V_>
struct PairDots {
  using V = V_;
  static constexpr bool kWide = V::kWidth == 16;
  using Held = decltype(V::bits(V{}));
  static constexpr int kTogether = 2, kRows = 8, kVectors = 3, kRowsAlone = 16;

  static Held load(const std::uint8_t* p) { return V::bits(V::load_bits32(p)); }

  template <DType, int vectors>
  static inline __attribute__((always_inline)) void add_row(V (&sum)[vectors], const Held (&held)[vectors],
                                                            const std::uint8_t* x) {
    struct Bytes {
      std::uint8_t four[4];
    };
    const Bytes& pair = *reinterpret_cast<const Bytes*>(x);
    if constexpr (vectors == 1 && kWide) {
      asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum[0].v) : "v"(held[0]), "m"(pair));
    } else if constexpr (vectors == 1) {
      asm("vdpbf16ps %2%{1to8%}, %1, %0" : "+v"(sum[0].v) : "v"(held[0]), "m"(pair));
    } else {
      Held spread;
      asm("vpbroadcastd %1, %0" : "=v"(spread) : "m"(pair));
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum[v].v) : "v"(held[v]), "v"(spread));
      }
    }
  }

  template <DType>
  static void store_weights(float* row, std::ptrdiff_t, V& even, V& odd) {
    static constexpr std::uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    static constexpr std::uint16_t kInTurn8[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
    if constexpr (kWide) {
      const auto halves = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
      const __m512i pairs = _mm512_permutexvar_epi16(_mm512_loadu_si512(kInTurn), halves);
      _mm512_storeu_si512(row, pairs);
      even = V::floats(_mm512_slli_epi32(pairs, 16));
      odd = V::and_bits(V::floats(pairs), 0xFFFF0000u);
    } else {
      const auto halves = (__m256i)_mm256_cvtne2ps_pbh(odd.v, even.v);
      const __m256i pairs = _mm256_permutexvar_epi16(V::load_bits(kInTurn8), halves);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), pairs);
      even = V::floats(_mm256_slli_epi32(pairs, 16));
      odd = V::and_bits(V::floats(pairs), 0xFFFF0000u);
    }
  }
};

// [pair of numbers][lane]
inline void load_lane_pairs(const LoadLanes& a) {
  const int pairs = (a.depth + 1) / 2;
  auto* out = reinterpret_cast<std::uint32_t*>(a.out);
  for (int pair = 0; pair < pairs; ++pair) {
    for (int lane = a.lanes; lane < a.stride; ++lane) out[pair * a.stride + lane] = 0;
  }
  for (int lane = 0; lane < a.lanes; ++lane) {
    constexpr int kAtOnce = 128;
    const auto* row = static_cast<const std::uint16_t*>(a.query[lane]);
    for (int first = 0; first < a.depth; first += kAtOnce) {
      const int count = a.depth - first < kAtOnce ? a.depth - first : kAtOnce;
      std::uint16_t words[kAtOnce] = {};
      std::uint32_t both[kAtOnce / 2];
      for (int i = 0; i < count; ++i) words[i] = flushed_query(F32x1::read(row + first + i));
      __builtin_memcpy(both, words, sizeof(both));
      for (int i = 0; i < (count + 1) / 2; ++i) out[(first / 2 + i) * a.stride + lane] = both[i];
    }
  }
}

// Of 32 columns the numbers of two tokens in turn: columns 0 to 15, and 16 to 31.
struct TokenPairs {
  __m512i low, high;
};

inline TokenPairs pair_tokens(__m512i first, __m512i second) {
  alignas(64) static constexpr std::uint16_t kInTurn[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  return {_mm512_permutex2var_epi16(first, _mm512_load_si512(kInTurn), second),
          _mm512_permutex2var_epi16(first, _mm512_load_si512(kInTurn + 32), second)};
}

constexpr __mmask32 kAllColumns = ~__mmask32{0};

// Those of 32 columns that there are.
inline __mmask32 columns_from(const CachedPart& part, int column) {
  const int left = part.value_depth - column;
  return left >= 32 ? kAllColumns : (__mmask32{1} << left) - 1;
}

// Values: [pair of tokens][column], unless few lanes use them as they lie in memory. Keys are always used so, if they
// consist of whole pairs.
inline void load_part_pairs(const CachedPart& part) {
  auto* panel = reinterpret_cast<std::uint32_t*>(part.value_panel);
  for (int place = even_begin(part); place < part.end && !part.few_lanes; place += 2) {
    const bool has_even = place >= part.begin, has_odd = place + 1 < part.end;
    const auto* even = reinterpret_cast<const std::uint16_t*>(value_of(part, place));
    const auto* odd = reinterpret_cast<const std::uint16_t*>(value_of(part, place + 1));
    std::uint32_t* row = panel + place / 2 * static_cast<std::ptrdiff_t>(part.value_depth);
    const auto store_columns = [&](int column, __mmask32 of_even, __mmask32 of_odd, __mmask32 present) {
      const TokenPairs pairs =
          pair_tokens(_mm512_maskz_loadu_epi16(of_even, even + column), _mm512_maskz_loadu_epi16(of_odd, odd + column));
      _mm512_mask_storeu_epi32(row + column, static_cast<__mmask16>(present), pairs.low);
      _mm512_mask_storeu_epi32(row + column + 16, static_cast<__mmask16>(present >> 16), pairs.high);
    };
    int column = 0;
    if (has_even && has_odd) {
      for (; column + 32 <= part.value_depth; column += 32) {
        store_columns(column, kAllColumns, kAllColumns, kAllColumns);
      }
    }
    for (; column < part.value_depth; column += 32) {
      const __mmask32 present = columns_from(part, column);
      store_columns(column, has_even ? present : 0, has_odd ? present : 0, present);
    }
  }
  if (part.depth % 2 != 0) {
    for (int place = part.begin; place < part.end; ++place) {
      auto* row = reinterpret_cast<std::uint16_t*>(part.key_panel) + place * (part.depth + 1);
      __builtin_memcpy(row, key_of(part, place), static_cast<std::size_t>(part.depth) * 2);
      row[part.depth] = 0;
    }
  }
}

inline __m512 twice(__m256 x) { return _mm512_broadcast_f32x8(x); }
inline F32x8 low_half(F32x16 x) { return {_mm512_castps512_ps256(x.v)}; }
inline F32x8 high_half(F32x16 x) { return {_mm512_extractf32x8_ps(x.v, 1)}; }

// `weigh` of 8 lanes, a pair of places in one vector: half as many instructions wait for each other's results.
template <bool capped>
void weigh_eight(const CachedPart& part, const PartLanes& a) {
  using V = F32x16;
  const F32x8 begin = F32x8::set(static_cast<float>(part.begin)), end = F32x8::set(static_cast<float>(part.end));
  const V first = {twice(a.first == nullptr ? begin.v : max_of(begin, F32x8::load(a.first)).v)};
  const V last = {twice(a.last == nullptr ? end.v : min_of(end, F32x8::load(a.last)).v)};
  const V odd_place = {_mm512_insertf32x8(_mm512_setzero_ps(), _mm256_set1_ps(1.0f), 1)};
  V highest = V::set(kLowest);
  for (int place = even_begin(part), last_place = part.end; place < last_place; place += 2) {
    float* at = a.scores + place * F32x8::kWidth;
    V score = score_of<V, capped>(V::load(at), a);
    score = masked(score, V::set(static_cast<float>(place)) + odd_place, first, last);
    V::store(at, score);
    highest = max_of(score, highest);
  }
  const F32x8 highest_of_both = max_of(high_half(highest), low_half(highest));
  highest = {twice(highest_of_both.v)};
  F32x8 even_total = F32x8::set(0.0f), odd_total = even_total;
  for (int place = even_begin(part), last_place = part.end; place < last_place; place += 2) {
    const V weights = weight_of(V::load(a.scores + place * F32x8::kWidth) - highest, kLeastWeighed<DType::kBF16>);
    F32x8 even = low_half(weights), odd = high_half(weights);
    PairDots<F32x8>::store_weights<DType::kBF16>(a.scores + place / 2 * F32x8::kWidth, 0, even, odd);
    even_total = even_total + even;
    odd_total = odd_total + odd;
  }
  F32x8::store(a.highest, highest_of_both);
  F32x8::store(a.total, even_total + odd_total);
}

// Rows of 8 lanes, each with columns 0 to 3 and 8 to 11, to out[column * stride + lane], as far as there are columns.
inline void store_turned(const __m256 (&rows)[8], int columns, float* out, std::ptrdiff_t stride) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {  // of lanes i and i + 1
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // of lanes i to i + 3: column 0, 1, 2, 3 and beside it the other four
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    if (i < columns) _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    if (i + 8 < columns) _mm256_storeu_ps(out + (i + 8) * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

// Sums of values as they lie in memory: 32 columns are the lanes of vectors here, and weights of some of 8 lanes are
// spread, from `first_lane` on.
template <int lanes>
void sum_columns_of_few(const CachedPart& part, const PartLanes& a, int first_lane, int column) {
  const __mmask32 present = columns_from(part, column);
  const auto* weights = reinterpret_cast<const std::uint8_t*>(a.scores + first_lane);
  const std::ptrdiff_t value_stride = part.value_stride;
  const std::uint8_t* const* next_values = part.next_values[0] == nullptr ? part.values : part.next_values;
  __m512 sum[lanes][2];
#pragma GCC unroll 8
  for (int lane = 0; lane < lanes; ++lane) sum[lane][0] = sum[lane][1] = _mm512_setzero_ps();
  const auto add = [&](int place, __mmask32 of_even, __mmask32 of_odd) __attribute__((always_inline)) {
    const std::ptrdiff_t offset = place % kRunTokens * value_stride + static_cast<std::ptrdiff_t>(column) * 2;
    const std::uint8_t* even = part.values[place / kRunTokens] + offset;
    const __m512i first = _mm512_maskz_loadu_epi16(of_even, even);
    const __m512i second = _mm512_maskz_loadu_epi16(of_odd, even + value_stride);
    // Of every 8 columns the first four, and the others: cheaper than those that lie side by side.
    const __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
    const std::uint8_t* next = next_values[place / kRunTokens] + offset;
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + value_stride, 0, 2);
    const std::uint8_t* pairs = weights + static_cast<std::ptrdiff_t>(place / 2) * a.stride * 4;
#pragma GCC unroll 8
    for (int lane = 0; lane < lanes; ++lane) {
      const __m512i spread = _mm512_set1_epi32(F32x1::read(reinterpret_cast<const int*>(pairs + lane * 4)));
      asm("vdpbf16ps %2, %1, %0" : "+v"(sum[lane][0]) : "v"(low), "v"(spread));
      asm("vdpbf16ps %2, %1, %0" : "+v"(sum[lane][1]) : "v"(high), "v"(spread));
    }
  };
  int place = part.begin;
  if (place % 2 != 0) add(place++ - 1, 0, present);
  if (present == kAllColumns) {
    for (const int end = part.end - 1; place < end; place += 2) add(place, kAllColumns, kAllColumns);
  } else {
    for (const int end = part.end - 1; place < end; place += 2) add(place, present, present);
  }
  if (place < part.end) add(place, present, 0);
  const auto store = [&]<int vector, int half>() __attribute__((always_inline)) {
    __m256 rows[8];
#pragma GCC unroll 8
    for (int lane = 0; lane < 8; ++lane) {
      rows[lane] = lane < lanes ? _mm512_extractf32x8_ps(sum[lane % lanes][vector], half) : __m256{};
    }
    const int first = column + half * 16 + vector * 4;
    store_turned(rows, part.value_depth - first, a.sums + first * a.stride + first_lane, a.stride);
  };
  store.template operator()<0, 0>();
  store.template operator()<1, 0>();
  store.template operator()<0, 1>();
  store.template operator()<1, 1>();
}

inline void sum_values_of_few(const CachedPart& part, const PartLanes& a) {
  for (int lane = 0; lane < a.stride; lane += 8) {
    const int lanes = a.lanes - lane;
    for (int column = 0; column < part.value_depth; column += 32) {
      if (lanes > 4) {
        sum_columns_of_few<8>(part, a, lane, column);
      } else if (lanes > 2) {
        sum_columns_of_few<4>(part, a, lane, column);
      } else {
        sum_columns_of_few<2>(part, a, lane, column);
      }
    }
  }
}

template <class V>
void attend_part_pairs(const CachedPart& part, const PartLanes& a) {
  if (part.depth % 2 == 0) {
    multiply_keys<PairDots<V>, DType::kBF16>(
        part, a, [&part](int place) { return key_of(part, place); }, part.key_stride);
  } else {
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(part.depth + 1) * 2;
    multiply_keys<PairDots<V>, DType::kBF16>(
        part, a, [&part, stride](int place) { return part.key_panel + place * stride; }, stride);
  }
  if (a.stride == F32x8::kWidth) {
    a.softcap == 0.0f ? weigh_eight<false>(part, a) : weigh_eight<true>(part, a);
  } else {
    weigh<PairDots<V>, DType::kBF16>(part, a);
  }
  if (part.few_lanes) {
    sum_values_of_few(part, a);
  } else {
    sum_values<PairDots<V>, DType::kBF16>(part, a);
  }
}

// Floats that the instruction for it rounds to bf16. It takes subnormal numbers for 0, which cached ones never are.
struct CachedFloats : F32x16 {
  template <DType type>
  static void store_as(Element<type>* p, F32x16 x) {
    if constexpr (type == DType::kBF16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
    } else {
      F32x16::store_as<type>(p, x);
    }
  }
};

// What an instruction set with these products has instead of what any vectors do.
constexpr void add_bf16_attention(Kernels& k) {
  k.cache_records.read = expand_cache_records<CachedFloats>;
  k.attention.lane_unit[static_cast<int>(DType::kBF16)] = F32x8::kWidth;
  k.attention.load_lanes = [](const LoadLanes& a) {
    a.type == DType::kBF16 ? load_lane_pairs(a) : load_lanes<F32x16>(a);
  };
  k.attention.load_part = [](const CachedPart& part) {
    part.type == DType::kBF16 ? load_part_pairs(part) : load_part<F32x16>(part);
  };
  k.attention.attend_part = [](const CachedPart& part, const PartLanes& a) {
    if (part.type != DType::kBF16) return attend_part<F32x16>(part, a);
    a.stride % F32x16::kWidth == 0 ? attend_part_pairs<F32x16>(part, a) : attend_part_pairs<F32x8>(part, a);
  };
  k.attention.fold_part = [](const FoldPart& a) {
    a.stride % F32x16::kWidth == 0 ? fold_part<F32x16>(a) : fold_part<F32x8>(a);
  };
  k.attention.finish_lanes = [](const FinishLanes& a) {
    a.stride % F32x16::kWidth == 0 ? finish_lanes<F32x16>(a) : finish_lanes<F32x8>(a);
  };
}

}  // namespace
}  // namespace cpumoe
