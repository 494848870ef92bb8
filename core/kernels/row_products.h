// Products of rows of floats as they come with a few queries in fp32: dots along the rows, and sums of rows.
//
// Each result has an order of its own (dots: 16 interleaved lanes; sums of rows: ascending rows), so that any tiling of
// queries, rows and columns gives the same bits. Tiles are as large as the registers of a vector type allow: what is
// loaded is used for several products.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/formats.h"
#include "kernels/functions.h"

namespace cpumoe {
namespace {

// Fetches, in the order of memory, as much as is read meanwhile, `done` bytes of rows from `start` on having been read.
// Rows that end after a page or less, several at once, are no stream that the hardware would find. To L2: L1 has too
// few misses in flight for it (Zen 4: 33 of 36 GB/s, instead of 24).
template <int bytes>
inline void fetch_ahead(const void* start, std::int64_t done) {
  constexpr int kAhead = 16384, kToL2 = 2;
  const auto* at = static_cast<const char*>(start) + kAhead + done;
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, kToL2);
}

template <class V, DType type, int queries, int rows, bool fetch = false>
void dot_tile(const DotRows& a, int first_query, std::int64_t first_row) {
  using Element = typename V::template Element<type>;
  constexpr int kLanes = LaneSum<V>::kLanes, kParts = kLanes / V::kWidth;
  const float* query = a.queries + first_query * a.query_stride;
  const Element* row = static_cast<const Element*>(a.rows) + first_row * a.depth;
  LaneSum<V> sum[queries][rows];
  const auto add = [&sum](const float* x, std::ptrdiff_t x_stride, const Element* w, std::ptrdiff_t w_stride) {
    for (int p = 0; p < kParts; ++p) {
      V held[queries];
      for (int q = 0; q < queries; ++q) held[q] = V::load(x + q * x_stride + p * V::kWidth);
      for (int r = 0; r < rows; ++r) {
        const V value = V::template load_as<type>(w + r * w_stride + p * V::kWidth);
        for (int q = 0; q < queries; ++q) sum[q][r].part[p] = V::fma(held[q], value, sum[q][r].part[p]);
      }
    }
  };
  const std::int64_t whole = a.depth / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    if constexpr (fetch) {
      constexpr int kStep = rows * kLanes * static_cast<int>(sizeof(Element));
      fetch_ahead<kStep>(row, i / kLanes * kStep);
    }
    add(query + i, a.query_stride, row + i, a.depth);
  }
  if (whole < a.depth) {
    float query_rest[queries * kLanes] = {};
    Element row_rest[rows * kLanes] = {};
    for (std::int64_t i = whole; i < a.depth; ++i) {
      for (int q = 0; q < queries; ++q) query_rest[q * kLanes + i - whole] = query[q * a.query_stride + i];
      for (int r = 0; r < rows; ++r) row_rest[r * kLanes + i - whole] = row[r * a.depth + i];
    }
    add(query_rest, kLanes, row_rest, kLanes);
  }
  for (int q = 0; q < queries; ++q) {
    float* out = a.out + (first_query + q) * a.out_stride + first_row;
    for (int r = 0; r < rows; ++r) out[r] = sum[q][r].total();
  }
}

template <class V, DType type, int queries, int rows, bool fetch = false>
void dot_queries(const DotRows& a, int query, std::int64_t first, std::int64_t last) {
  for (; first + rows <= last; first += rows) dot_tile<V, type, queries, rows, fetch>(a, query, first);
  for (; first < last; ++first) dot_tile<V, type, queries, 1>(a, query, first);
}

template <class V, DType type>
void dot_rows_typed(const DotRows& a) {
  constexpr bool kWide = V::kWidth >= 16;
  const bool short_rows = a.depth * size_of(type) <= 4096;
  constexpr std::int64_t kRowsAtOnce = 16;  // read once from farther away and then met by all queries
  for (std::int64_t first = a.first; first < a.last; first += kRowsAtOnce) {
    const std::int64_t last = first + kRowsAtOnce < a.last ? first + kRowsAtOnce : a.last;
    int query = 0;
    if constexpr (kWide) {
      for (; query + 4 <= a.query_count; query += 4) dot_queries<V, type, 4, 4>(a, query, first, last);
    }
    for (; query + 2 <= a.query_count; query += 2) dot_queries<V, type, 2, kWide ? 4 : 2>(a, query, first, last);
    if (query < a.query_count && short_rows) {
      dot_queries<V, type, 1, 4, true>(a, query, first, last);
    } else if (query < a.query_count) {
      dot_queries<V, type, 1, kWide ? 8 : 4>(a, query, first, last);
    }
  }
}

// out[query][column] = sums, or with `more` out + sums, over rows of weights[query][row] * rows[row][column]; `vectors`
// whole vectors of columns.
template <class V, DType type, int queries, int vectors>
void sum_tile(const float* weights, std::ptrdiff_t weight_stride, const typename V::template Element<type>* row,
              std::ptrdiff_t depth, std::int64_t count, bool more, float* out, std::ptrdiff_t out_stride) {
  V sum[queries][vectors];
  for (int q = 0; q < queries; ++q) {
    for (int v = 0; v < vectors; ++v) {
      sum[q][v] = more ? V::load(out + q * out_stride + v * V::kWidth) : V::set(0.0f);
    }
  }
  for (std::int64_t r = 0; r < count; ++r, row += depth) {
    V value[vectors];
    for (int v = 0; v < vectors; ++v) value[v] = V::template load_as<type>(row + v * V::kWidth);
    for (int q = 0; q < queries; ++q) {
      const V weight = V::set(weights[q * weight_stride + r]);
      for (int v = 0; v < vectors; ++v) sum[q][v] = V::fma(weight, value[v], sum[q][v]);
    }
  }
  for (int q = 0; q < queries; ++q) {
    for (int v = 0; v < vectors; ++v) V::store(out + q * out_stride + v * V::kWidth, sum[q][v]);
  }
}

// Few queries: a few whole rows at a time, so that memory is read in one stream. Columns from `first` on, as far as
// whole tiles go; returns where they end.
template <class V, DType type, int queries, int vectors>
int sum_columns(const SumRows& a, int query, int first) {
  using Element = typename V::template Element<type>;
  constexpr int kColumns = vectors * V::kWidth, kRowsAtOnce = 8;
  constexpr int kBytes = kRowsAtOnce * kColumns * static_cast<int>(sizeof(Element));
  const int last = first + (static_cast<int>(a.depth) - first) / kColumns * kColumns;
  if (first == last) return last;
  const bool whole = first == 0 && last == a.depth;
  for (std::int64_t r = 0; r < a.count; r += kRowsAtOnce) {
    const std::int64_t count = a.count - r < kRowsAtOnce ? a.count - r : kRowsAtOnce;
    const Element* rows = static_cast<const Element*>(a.rows) + r * a.depth;
    for (int column = first; column < last; column += kColumns) {
      if (whole) fetch_ahead<kBytes>(rows, column / kColumns * kBytes);
      sum_tile<V, type, queries, vectors>(a.weights + query * a.weight_stride + r, a.weight_stride, rows + column,
                                          a.depth, count, r > 0, a.out + query * a.out_stride + column, a.out_stride);
    }
  }
  return last;
}

template <class V, DType type, int queries, int vectors>
void sum_all_columns(const SumRows& a, int query, int first) {
  first = sum_columns<V, type, queries, vectors>(a, query, first);
  if constexpr (vectors > 1) first = sum_columns<V, type, queries, 1>(a, query, first);
  sum_columns<F32x1, type, queries, 1>(a, query, first);
}

// Many queries: some rows at a time are converted to fp32 first, side by side, as far as the columns are whole tiles.
template <class V, DType type, int vectors>
int sum_for_many(const SumRows& a) {
  using Element = typename V::template Element<type>;
  constexpr int kColumns = vectors * V::kWidth, kRowsAtOnce = 64, kQueries = V::kWidth >= 16 || V::kWidth == 4 ? 12 : 6;
  alignas(64) float rows[kRowsAtOnce * kColumns];
  int first = 0;
  for (; first + kColumns <= a.depth; first += kColumns) {
    for (std::int64_t r = 0; r < a.count; r += kRowsAtOnce) {
      const auto count = static_cast<int>(a.count - r < kRowsAtOnce ? a.count - r : kRowsAtOnce);
      const Element* row = static_cast<const Element*>(a.rows) + r * a.depth + first;
      for (int i = 0; i < count; ++i, row += a.depth) {
        for (int v = 0; v < vectors; ++v) {
          V::store(rows + i * kColumns + v * V::kWidth, V::template load_as<type>(row + v * V::kWidth));
        }
      }
      const auto sum = [&]<int queries>(int query) {
        sum_tile<V, DType::kF32, queries, vectors>(a.weights + query * a.weight_stride + r, a.weight_stride, rows,
                                                   kColumns, count, r > 0, a.out + query * a.out_stride + first,
                                                   a.out_stride);
      };
      int query = 0;
      for (; query + kQueries <= a.query_count; query += kQueries) sum.template operator()<kQueries>(query);
      for (; query + 4 <= a.query_count; query += 4) sum.template operator()<4>(query);
      for (; query < a.query_count; ++query) sum.template operator()<1>(query);
    }
  }
  return first;
}

template <class V, DType type>
void sum_rows_typed(const SumRows& a) {
  for (int query = 0; a.count == 0 && query < a.query_count; ++query) {
    for (int column = 0; column < a.depth; ++column) a.out[query * a.out_stride + column] = 0.0f;
  }
  constexpr int kMany = 8;
  constexpr bool kWide = V::kWidth >= 16;
  int first = 0, query = 0;
  if constexpr (V::kWidth > 1) {
    if (a.query_count >= kMany) first = sum_for_many<V, type, 2>(a);
  }
  for (; query + 4 <= a.query_count; query += 4) sum_all_columns<V, type, 4, kWide ? 4 : 2>(a, query, first);
  for (; query < a.query_count; ++query) sum_all_columns<V, type, 1, 4>(a, query, first);
}

template <class V>
void dot_rows(const DotRows& a) {
  with_type(a.type, [&]<DType type>() { dot_rows_typed<V, type>(a); });
}

template <class V>
void sum_rows(const SumRows& a) {
  with_type(a.type, [&]<DType type>() { sum_rows_typed<V, type>(a); });
}

}  // namespace
}  // namespace cpumoe
