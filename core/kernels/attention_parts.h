// Attention over cached keys and values, part by part, written once over how numbers are multiplied.
//
// Lanes of vectors are queries, each a head of a row: what a lane computes depends on its own query and the tokens it
// sees, whichever lanes stand beside it, and nothing is ever summed across lanes. Keys and values are spread from
// memory one number at a time, so that keys are used as they lie there.
//
// For a lane and a part of kPartTokens tokens, with places t in the part:
//
//   score[t] = softcap * tanh(scale * dot / softcap), or scale * dot. The dot runs over ascending inputs, one fma each.
//   highest  = the highest score of tokens seen, but no less than the lowest finite number
//   weight[t] = e^(score[t] - highest); 0 where that is below e^-87, and for tokens that are not seen
//   total    = the sum of weights at even places plus that of those at odd ones, both over ascending places
//   sums     = over ascending tokens of weight[t] * value[t], one fma each
//
// Numbers of bf16 are multiplied as vdpbf16ps does it: of every two inputs, and of every two tokens, the second comes
// first. Weights are rounded to bf16, and it is the rounded ones that `total` sums. The instruction takes subnormal
// numbers for zero: queries below 2^-50 become 0, weights below e^-34.5 do (keys and values have nothing below 2^-60),
// so that the last bits of no product are subnormal. Products of bf16 numbers are exact in fp32, so that it does not
// matter whether they are fused with their addition.
//
// Parts are folded in ascending order:
//
//   highest' = max(highest, part's), a = e^(highest - highest'), b = e^(part's highest - highest')
//   total' = fma(total, a, part's total * b), sums' = fma(sums, a, part's sums * b)
//
// A part of which a lane sees nothing changes nothing: its weights are 0, and a is 1. The sign of a zero is the one
// thing that zeros added may change, so results never are -0.
//
// `Dots` is how numbers are multiplied:
//
//   V                            the vector type of everything else
//   kTogether                    numbers (of bf16) that are multiplied at once, 1 or 2; they take 32 bits
//   kRows, kVectors, kRowsAlone  rows and vectors of lanes whose sums fit the registers; rows with one vector alone
//   Held, load                   a vector of lanes of queries or weights
//   add_row<vectors>             sums += held * what is at `x`, for each vector of lanes
//   store_weights                two vectors of weights, of an even place and the next, rounded as `type` has it
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/attention_table.h"
#include "kernels/functions.h"
#include "kernels/table.h"

namespace cpumoe {
namespace {

constexpr float kLowest = -3.402823466e38f;
constexpr std::uint16_t kLeastQuery = 0x2680;  // 2^-50 in bf16

// Products of single numbers in fp32.
template <class V_>
struct SingleDots {
  using V = V_;
  using Held = V;
  static constexpr int kTogether = 1;
  static constexpr bool kManyRegisters = V::kWidth == 16 || V::kWidth == 4;
  static constexpr int kRows = kManyRegisters ? 8 : 4, kVectors = 3, kRowsAlone = kManyRegisters ? 16 : 8;

  static Held load(const std::uint8_t* p) { return V::load_bits32(p); }

  template <DType type, int vectors>
  static inline __attribute__((always_inline)) void add_row(V (&sum)[vectors], const Held (&held)[vectors],
                                                            const std::uint8_t* x) {
    float number;
    __builtin_memcpy(&number, x, 4);
    const V spread = V::set(number);
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) {
      if constexpr (type == DType::kBF16 && V::kWidth == 1) {
        sum[v] = sum[v] + held[v] * spread;  // the same, without a call of fmaf where there is no instruction
      } else {
        sum[v] = V::fma(held[v], spread, sum[v]);
      }
    }
  }

  template <DType type>
  static void store_weights(float* rows, std::ptrdiff_t stride, V& even, V& odd) {
    if constexpr (type == DType::kBF16) {
      even = rounded(even);
      odd = rounded(odd);
      V::store(rows, odd);
      V::store(rows + stride, even);
    } else {
      V::store(rows, even);
      V::store(rows + stride, odd);
    }
  }

 private:
  static V rounded(V x) {
    std::uint16_t words[V::kWidth];
    V::template store_as<DType::kBF16>(words, x);
    return V::template load_as<DType::kBF16>(words);
  }
};

// Where number `i` of a row, or token `i`, stands among those that are multiplied one by one.
template <DType type>
constexpr int order_of(int i) {
  return type == DType::kBF16 ? i ^ 1 : i;
}

// Numbers of a row that are multiplied: of bf16 whole pairs.
template <DType type>
constexpr int padded_depth(int depth) {
  return type == DType::kBF16 ? (depth + 1) / 2 * 2 : depth;
}

inline std::uint16_t flushed_query(std::uint16_t x) { return (x & 0x7FFF) < kLeastQuery ? std::uint16_t{0} : x; }

template <class V, DType type>
void load_lanes_typed(const LoadLanes& a) {
  using Element = typename V::template Element<type>;
  const int padded = padded_depth<type>(a.depth);
  auto* out = reinterpret_cast<float*>(a.out);
  for (int i = 0; i < padded; ++i) {
    for (int lane = a.lanes; lane < a.stride; ++lane) out[i * a.stride + lane] = 0.0f;
  }
  for (int lane = 0; lane < a.lanes; ++lane) {
    const auto* row = static_cast<const Element*>(a.query[lane]);
    for (int i = 0; i < padded; ++i) {
      Element x = i < a.depth ? F32x1::read(row + i) : Element{};
      if constexpr (type == DType::kBF16) x = flushed_query(x);
      out[order_of<type>(i) * a.stride + lane] = F32x1::load_as<type>(&x).v;
    }
  }
}

template <class V>
void load_lanes(const LoadLanes& a) {
  with_type(a.type, [&]<DType type>() { load_lanes_typed<V, type>(a); });
}

inline const std::uint8_t* key_of(const CachedPart& part, int place) {
  return part.keys[place / kRunTokens] + place % kRunTokens * part.key_stride;
}
inline const std::uint8_t* value_of(const CachedPart& part, int place) {
  return part.values[place / kRunTokens] + place % kRunTokens * part.value_stride;
}

// Places in whole pairs: what the pairs at the ends have besides is zero.
inline int even_begin(const CachedPart& part) { return part.begin / 2 * 2; }
inline int even_end(const CachedPart& part) { return (part.end + 1) / 2 * 2; }

template <class V, DType type>
void load_part_typed(const CachedPart& part) {
  auto* values = reinterpret_cast<float*>(part.value_panel);
  for (int place = even_begin(part); place < even_end(part); ++place) {
    float* row = values + order_of<type>(place) * part.value_depth;
    if (place < part.begin || place >= part.end) {
      for (int i = 0; i < part.value_depth; ++i) row[i] = 0.0f;
    } else {
      load_typed<V, type>(value_of(part, place), part.value_depth, row);
    }
  }
  if constexpr (type != DType::kF32) {
    const int padded = padded_depth<type>(part.depth);
    for (int place = part.begin; place < part.end; ++place) {
      float* row = reinterpret_cast<float*>(part.key_panel) + place * padded;
      load_typed<V, type>(key_of(part, place), part.depth, row);
      for (int i = part.depth; i < padded; ++i) row[i] = 0.0f;
      if constexpr (type == DType::kBF16) {
        for (int i = 0; i < padded; i += 2) {
          const float first = row[i];
          row[i] = row[i + 1];
          row[i + 1] = first;
        }
      }
    }
  }
}

template <class V>
void load_part(const CachedPart& part) {
  with_type(part.type, [&]<DType type>() { load_part_typed<V, type>(part); });
}

// What is fetched on the way through a tile, one line a step: as many as are read of the part meanwhile.
struct FetchNothing {
  void operator()(int) {}
};

struct FetchKeys {
  const std::uint8_t* first;
  std::ptrdiff_t stride;
  const std::uint8_t* at = nullptr;
  void operator()(int step) {
    if (step % kRunTokens == 0) at = first + step / kRunTokens * 64;  // all tokens' first lines, then their second ones
    __builtin_prefetch(at, 0, 2);
    at += stride;
  }
};

struct FetchValues {
  const std::uint8_t* const* runs;
  std::ptrdiff_t offset, stride;
  const std::uint8_t* at = nullptr;
  void operator()(int step) {
    constexpr int kSteps = kRunTokens / 2;
    if (step % kSteps == 0) at = runs[step / kSteps % kPartRuns] + offset;
    __builtin_prefetch(at, 0, 2);
    at += 2 * stride;
  }
};

// out[row][lane] = sum over steps of a[row][step] * lanes[step][lane], for some rows and vectors of lanes. Rows of `a`
// lie a_stride bytes apart and their steps side by side; with `columns` the steps lie apart, and rows side by side.
template <class Dots, DType type, bool columns, int rows, int vectors, class Fetch>
__attribute__((noinline)) void multiply_tile(const std::uint8_t* a, std::ptrdiff_t a_stride, const std::uint8_t* lanes,
                                             int stride, int steps, float* out, Fetch fetch) {
  using V = typename Dots::V;
  // Three rows each from one pointer: a single one would need a register for the distance of every row.
  constexpr int kOfEach = 3, kPointers = (rows + kOfEach - 1) / kOfEach;
  const std::uint8_t* at[kPointers];
#pragma GCC unroll 6
  for (int i = 0; i < kPointers; ++i) at[i] = a + i * kOfEach * a_stride;
  // Unrolled by name: sums that loops count through would not be held in registers.
  V sum[rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) sum[r][v] = V::set(0.0f);
  }
  for (int step = 0; step < steps; ++step) {
    fetch(step);
    typename Dots::Held held[vectors];
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) held[v] = Dots::load(lanes + v * V::kWidth * 4);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const std::uint8_t* x = columns ? a + r * 4 : at[r / kOfEach] + r % kOfEach * a_stride;
      Dots::template add_row<type, vectors>(sum[r], held, x);
    }
    if constexpr (columns) {
      a += a_stride;
    } else {
#pragma GCC unroll 6
      for (int i = 0; i < kPointers; ++i) {
        at[i] += 4;
        asm("" : "+r"(at[i]));  // a pointer of its own
      }
    }
    lanes += stride * 4;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) V::store(out + r * stride + v * V::kWidth, sum[r][v]);
  }
}

// The same for rows [begin, end), in tiles that do not cross a run of tokens. `row_at(row)` is where one
// begins, `fetch_for(row)` what is fetched on the way.
template <class Dots, DType type, bool columns, int vectors, class RowAt, class FetchFor>
void multiply_rows_of(int begin, int end, const RowAt& row_at, std::ptrdiff_t a_stride, const std::uint8_t* lanes,
                      int stride, int steps, float* out, const FetchFor& fetch_for) {
  constexpr int kMostRows = vectors == 1 ? Dots::kRowsAlone : Dots::kRows;
  int row = begin;
  const auto try_tile = [&]<int rows>() {
    if constexpr (rows > kMostRows) {
      return false;
    } else {
      if (row % rows != 0 || row + rows > end) return false;
      if constexpr (rows == kRunTokens) {
        multiply_tile<Dots, type, columns, rows, vectors>(row_at(row), a_stride, lanes, stride, steps,
                                                          out + row * stride, fetch_for(row));
      } else {
        multiply_tile<Dots, type, columns, rows, vectors>(row_at(row), a_stride, lanes, stride, steps,
                                                          out + row * stride, FetchNothing{});
      }
      row += rows;
      return true;
    }
  };
  while (row < end) {
    try_tile.template operator()<16>() || try_tile.template operator()<8>() || try_tile.template operator()<4>() ||
        try_tile.template operator()<2>() || try_tile.template operator()<1>();
  }
}

template <class Dots, DType type, bool columns, class RowAt, class FetchFor>
void multiply_lanes(int begin, int end, const RowAt& row_at, std::ptrdiff_t a_stride, const std::uint8_t* lanes,
                    int stride, int steps, float* out, const FetchFor& fetch_for) {
  constexpr int kWidth = Dots::V::kWidth;
  const auto multiply = [&]<int vectors>(int lane) {
    multiply_rows_of<Dots, type, columns, vectors>(begin, end, row_at, a_stride, lanes + lane * 4, stride, steps,
                                                   out + lane, fetch_for);
  };
  int lane = 0;
  for (; lane + Dots::kVectors * kWidth <= stride; lane += Dots::kVectors * kWidth) {
    multiply.template operator()<Dots::kVectors>(lane);
  }
  if (lane + 2 * kWidth <= stride) {
    multiply.template operator()<2>(lane);
    lane += 2 * kWidth;
  }
  if (lane < stride) multiply.template operator()<1>(lane);
}

// e^x for x that is not above 0, and 0 below `least`.
template <class V>
inline V weight_of(V x, float least) {
  const Power<V> e = power_of_e(max_of(V::set(least), x));
  return V::select_less(x, V::set(least), V::set(0.0f), e.mantissa * V::power_of_two(e.exponent));
}

// A score, or that of a token that is not seen.
template <class V>
inline V masked(V score, V place, V first, V last) {
  const V unseen = V::set(-__builtin_inff());
  return V::select_less(place, last, V::select_less(place, first, unseen, score), unseen);
}

// The score that a dot makes.
template <class V, bool capped>
inline V score_of(V dot, const PartLanes& a) {
  const V score = dot * V::set(a.scale);
  return capped ? tanh_of(score * V::set(1.0f / a.softcap)) * V::set(a.softcap) : score;
}

// Dots become scores, in their place; gives the highest. Found in two chains: one would be as long as all else takes.
template <class V, bool capped, bool some_unseen>
inline V score_lanes(const CachedPart& part, const PartLanes& a, int lane) {
  const float *first = a.first + (some_unseen ? lane : 0), *last = a.last + (some_unseen ? lane : 0);
  const std::ptrdiff_t stride = a.stride;
  float* at = a.scores + part.begin * stride + lane;
  const auto score_at = [&](float* p, int place) __attribute__((always_inline)) {
    V score = score_of<V, capped>(V::load(p), a);
    if constexpr (some_unseen) {
      score = masked(score, V::set(static_cast<float>(place)), V::load(first), V::load(last));
    }
    V::store(p, score);
    return score;
  };
  V highest = V::set(kLowest), other = highest;
  int place = part.begin;
  for (const int end = part.end - 1; place < end; place += 2, at += 2 * stride) {
    highest = max_of(score_at(at, place), highest);
    other = max_of(score_at(at + stride, place + 1), other);
  }
  if (place < part.end) highest = max_of(score_at(at, place), highest);
  return max_of(other, highest);
}

template <DType type>
constexpr float kLeastWeighed = type == DType::kBF16 ? -34.5f : -87.0f;

// Dots become scores, and these weights, in their place.
template <class Dots, DType type>
void weigh(const CachedPart& part, const PartLanes& a) {
  using V = typename Dots::V;
  for (int lane = 0; lane < a.stride; lane += V::kWidth) {
    V highest;
    if (a.softcap != 0.0f) {
      highest =
          a.first == nullptr ? score_lanes<V, true, false>(part, a, lane) : score_lanes<V, true, true>(part, a, lane);
    } else {
      highest =
          a.first == nullptr ? score_lanes<V, false, false>(part, a, lane) : score_lanes<V, false, true>(part, a, lane);
    }
    V even_total = V::set(0.0f), odd_total = V::set(0.0f);
    float* const scores = a.scores + lane;
    const std::ptrdiff_t stride = a.stride;
    const auto weigh_pair = [&](int place, bool has_even, bool has_odd) __attribute__((always_inline)) {
      V even = V::set(0.0f), odd = V::set(0.0f);
      if (has_even) even = weight_of(V::load(scores + place * stride) - highest, kLeastWeighed<type>);
      if (has_odd) odd = weight_of(V::load(scores + (place + 1) * stride) - highest, kLeastWeighed<type>);
      Dots::template store_weights<type>(scores + place / Dots::kTogether * stride, stride, even, odd);
      even_total = even_total + even;
      odd_total = odd_total + odd;
    };
    int place = part.begin;
    if (place % 2 != 0) {
      weigh_pair(place - 1, false, true);
      ++place;
    }
    for (const int end = part.end - 1; place < end; place += 2) weigh_pair(place, true, true);
    if (place < part.end) weigh_pair(place, true, false);
    V::store(a.highest + lane, highest);
    V::store(a.total + lane, even_total + odd_total);
  }
}

// Dots with a part's keys. `key_at(place)`: keys as they are multiplied, key_stride bytes apart within a run.
template <class Dots, DType type, class KeyAt>
void multiply_keys(const CachedPart& part, const PartLanes& a, const KeyAt& key_at, std::ptrdiff_t key_stride) {
  const int steps = padded_depth<type>(part.depth) / Dots::kTogether;
  if (part.next_keys[0] != nullptr) {
    multiply_lanes<Dots, type, false>(
        part.begin, part.end, key_at, key_stride, a.queries, a.stride, steps, a.scores,
        [&part](int row) { return FetchKeys{part.next_keys[row / kRunTokens], part.key_stride}; });
  } else {
    multiply_lanes<Dots, type, false>(part.begin, part.end, key_at, key_stride, a.queries, a.stride, steps, a.scores,
                                      [](int) { return FetchNothing{}; });
  }
}

// Sums of the panel of values, which has rows of value_depth times 32 bits, with these weights.
template <class Dots, DType type>
void sum_values(const CachedPart& part, const PartLanes& a) {
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(part.value_depth) * 4;
  const int first = even_begin(part) / Dots::kTogether, steps = even_end(part) / Dots::kTogether - first;
  const auto value_at = [&part, stride, first](int column) { return part.value_panel + first * stride + column * 4; };
  const auto* weights = reinterpret_cast<const std::uint8_t*>(a.scores + first * a.stride);
  if (part.next_values[0] != nullptr) {
    multiply_lanes<Dots, type, true>(
        0, part.value_depth, value_at, stride, weights, a.stride, steps, a.sums, [&part](int column) {
          // A line of every other token; with the next columns, that of the tokens between.
          const std::ptrdiff_t offset = column / kRunTokens % 2 * part.value_stride + column / (2 * kRunTokens) * 64;
          return FetchValues{part.next_values, offset, part.value_stride};
        });
  } else {
    multiply_lanes<Dots, type, true>(0, part.value_depth, value_at, stride, weights, a.stride, steps, a.sums,
                                     [](int) { return FetchNothing{}; });
  }
}

template <class V, DType type>
void attend_part_typed(const CachedPart& part, const PartLanes& a) {
  if constexpr (type == DType::kF32) {
    multiply_keys<SingleDots<V>, type>(part, a, [&part](int place) { return key_of(part, place); }, part.key_stride);
  } else {
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(padded_depth<type>(part.depth)) * 4;
    multiply_keys<SingleDots<V>, type>(
        part, a, [&part, stride](int place) { return part.key_panel + place * stride; }, stride);
  }
  weigh<SingleDots<V>, type>(part, a);
  sum_values<SingleDots<V>, type>(part, a);
}

template <class V>
void attend_part(const CachedPart& part, const PartLanes& a) {
  with_type(part.type, [&]<DType type>() { attend_part_typed<V, type>(part, a); });
}

constexpr float kLeastFolded = -87.0f;

template <class V>
void fold_part(const FoldPart& a) {
  const std::ptrdiff_t stride = a.stride;
  for (int lane = 0; lane < a.stride; lane += V::kWidth) {
    const V before = V::load(a.highest + lane), more = V::load(a.part_highest + lane);
    const V highest = max_of(before, more);
    const V kept = weight_of(before - highest, kLeastFolded), added = weight_of(more - highest, kLeastFolded);
    V::store(a.highest + lane, highest);
    V::store(a.total + lane, V::fma(V::load(a.total + lane), kept, V::load(a.part_total + lane) * added));
    float* sums = a.sums + a.first * stride + lane;
    const float* part_sums = a.part_sums + a.first * stride + lane;
    for (int left = a.last - a.first; left > 0; --left, sums += stride, part_sums += stride) {
      V::store(sums, V::fma(V::load(sums), kept, V::load(part_sums) * added));
    }
  }
}

// sums / total, where a sink is folded into both; 0 for lanes that have seen nothing.
template <class V, DType type>
void finish_lanes_typed(const FinishLanes& a) {
  using Element = typename V::template Element<type>;
  constexpr int kColumns = 16;
  for (int lane = 0; lane < a.stride; lane += V::kWidth) {
    V total = V::load(a.total + lane), kept = V::set(1.0f);
    if (a.sinks != nullptr) {
      const V before = V::load(a.highest + lane), sink = V::load(a.sinks + lane);
      const V highest = max_of(before, sink);
      kept = weight_of(before - highest, kLeastFolded);
      total = V::fma(total, kept, weight_of(sink - highest, kLeastFolded));
    }
    total = V::select_less(V::set(0.0f), total, total, V::fma(total, V::set(0.0f), V::set(1.0f)));  // a NaN stays
    const int lanes = a.lanes - lane < V::kWidth ? a.lanes - lane : V::kWidth;
    for (int first = a.first; first < a.last; first += kColumns) {
      const int columns = a.last - first < kColumns ? a.last - first : kColumns;
      float results[kColumns * V::kWidth], row[kColumns];
      for (int c = 0; c < columns; ++c) {
        const V sums = V::load(a.sums + (first + c) * a.stride + lane) * kept;
        V::store(results + c * V::kWidth, V::divide(sums, total) + V::set(0.0f));
      }
      for (int i = 0; i < lanes; ++i) {
        for (int c = 0; c < columns; ++c) row[c] = results[c * V::kWidth + i];
        store_typed<V, type>(row, columns, static_cast<Element*>(a.out[lane + i]) + first);
      }
    }
  }
}

template <class V>
void finish_lanes(const FinishLanes& a) {
  with_type(a.type, [&]<DType type>() { finish_lanes_typed<V, type>(a); });
}

template <class V>
constexpr void add_attention(Kernels& k) {
  k.attention = {
      {V::kWidth, V::kWidth, V::kWidth}, load_lanes<V>, load_part<V>, attend_part<V>, fold_part<V>, finish_lanes<V>};
}

}  // namespace
}  // namespace cpumoe
