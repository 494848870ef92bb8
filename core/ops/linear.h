// Linears: rows times packed matrices, or matrices of floats as they are. By themselves, or as a stage of a team.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/table.h"
#include "packed/layout.h"
#include "runtime/threads.h"

namespace cpumoe {

// The weight of a linear: packed, one "expert" with its bias, or floats.
struct Matrix {
  PackedMatrix packed{};         // if its data is not null
  const void* floats = nullptr;  // [columns, depth]
  DType type = DType::kF32;      // of the floats
  const float* bias = nullptr;   // [columns] or null: of the floats
  std::int64_t columns = 0, depth = 0;
  // Over so many ranks the columns are spread in equal parts, of which this rank has its own; see ranks/products.h.
  int ranks = 1;

  explicit operator bool() const { return columns != 0; }
  bool is_packed() const { return packed.data != nullptr; }
  std::int64_t own_columns() const { return columns / ranks; }
  std::int64_t bytes() const { return is_packed() ? packed.expert_bytes : own_columns() * depth * size_of(type); }
};

// A packed weight as a matrix; rejects several experts, and gate and up rows.
Matrix matrix_of(const PackedMatrix& weight);

struct LinearCall {
  Matrix matrix;
  const void* x;         // [rows, depth], contiguous
  DType type, out_type;  // of x, and of out: that of x or fp32
  std::int64_t rows;
  void* out;  // [rows, columns]
};

// On a team of its own. Matrices of floats are for few rows.
void linear_forward(const Kernels& kernels, const LinearCall& call);

// What one of the matrices gives that the same rows are multiplied with.
struct MatrixOut {
  const Matrix* matrix;
  void* out;            // [rows, columns], rows `stride` elements apart
  std::int64_t stride;  // of out, in elements
  DType type;           // of out
};

// Rows times several matrices as a stage of a team: `plan` by one thread; then, with barriers between them, `prepare`
// and `multiply` by all.
class RowProducts {
 public:
  RowProducts();
  ~RowProducts();

  // x is [rows, depth] of a type, contiguous; its values are needed only when they are prepared. `row_scale` is that of
  // formats which have one for all rows.
  void plan(const Kernels& kernels, const MatrixOut* outs, int count, const void* x, DType type, std::int64_t rows,
            int threads, float row_scale = 0.0f);
  // The rows in the forms that the matrices want. Each worker prepares the rows of its share (Worker::share), so that
  // who makes rows in the same shares needs no barrier in between.
  void prepare(const Worker& worker);
  void multiply(const Worker& worker);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cpumoe
