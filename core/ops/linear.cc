#include "ops/linear.h"

#include <algorithm>
#include <vector>

#include "ops/elements.h"
#include "ops/products.h"
#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/numa.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kMaxRows = 4096;

// Of floats: rows of the matrix that are one work item, 64 KB or so, and queries that meet them at a time.
constexpr std::int64_t kFloatItemBytes = 64 << 10, kQueriesAtOnce = 64, kMostColumnsOfItem = 512;

// What a thread needs to multiply, kept as long as it lives.
struct ThreadScratch {
  ProductScratch product;
  Buffer row;
  float values[kMaxRowTiles * kTileRows * kBlockColumns];
  float sums[kQueriesAtOnce * kMostColumnsOfItem];
};

ThreadScratch& scratch_of_this_thread() {
  static thread_local std::unique_ptr<ThreadScratch> scratch;
  if (scratch == nullptr) scratch = std::make_unique<ThreadScratch>();
  return *scratch;
}

// The rows as some of the matrices want them.
struct Form {
  const Matrix* matrix = nullptr;  // one of them
  RowFormat format = RowFormat::kBytes;
  bool floats = false;  // fp32 numbers, side by side
  RowCut cut{};
  Buffer rows, scale, zero, record_scales;

  // Matrices whose inputs have an order or a scale of their own share rows with no other.
  bool suits(const Matrix& other, RowFormat rows_format) const {
    if (floats != !other.is_packed()) return false;
    if (floats) return true;
    const PackedSpec &mine = matrix->packed.spec, &theirs = other.packed.spec;
    const auto plain = [](const PackedSpec& s) { return s.input_orders == 0 && s.input_scales == 0; };
    return format == rows_format && plain(mine) && plain(theirs);
  }
};

// Blocks, or rows of floats, of one of the matrices.
struct Item {
  std::size_t out;
  std::int64_t first, last;
};

}  // namespace

struct RowProducts::State {
  struct Part {
    MatrixOut out;
    PackedMatrix packed;  // with rows_for the type of x
    Form* form;
    std::int64_t units, step;  // blocks or rows, and how many of them are an item
    int first_item;
  };

  const Kernels* k = nullptr;
  const void* x = nullptr;
  DType type = DType::kF32;
  std::int64_t rows = 0;
  float row_scale = 0.0f;
  std::vector<Part> parts;
  std::vector<std::unique_ptr<Form>> forms;  // kept for their buffers
  std::size_t form_count = 0;
  WorkQueue queue;

  Form* form_for(const Matrix& matrix, RowFormat format) {
    for (std::size_t i = 0; i < form_count; ++i) {
      if (forms[i]->suits(matrix, format)) return forms[i].get();
    }
    if (form_count == forms.size()) forms.push_back(std::make_unique<Form>());
    Form& form = *forms[form_count++];
    form.matrix = &matrix;
    form.format = format;
    form.floats = !matrix.is_packed();
    if (form.floats) {
      form.rows.get<float>(rows * matrix.depth + 32);  // dots read whole vectors
      return &form;
    }
    const PackedMatrix& m = matrix.packed;
    PackedSpec spec = m.spec;
    spec.rows = format;
    const RowLayout layout(spec);
    form.cut = cut_rows(static_cast<std::int32_t>(rows) * layout.planes, k->few_rows);
    form.rows.get<std::uint8_t>(form.cut.slots * layout.product_row_bytes(m.padded_depth));
    form.scale.get<float>(form.cut.slots / layout.planes);
    form.zero.get<std::int32_t>(form.cut.slots / layout.planes);
    if (traits_of(format).record_scales) form.record_scales.get<float>(form.cut.slots * m.records);
    return &form;
  }

  Item item(int index) const {
    std::size_t part = parts.size() - 1;
    while (parts[part].first_item > index) --part;
    const std::int64_t first = (index - parts[part].first_item) * parts[part].step;
    return {part, first, std::min(first + parts[part].step, parts[part].units)};
  }

  const std::uint8_t* weights_of(int index) const {
    if (index >= queue.items()) return nullptr;
    const Item i = item(index);
    const Matrix& matrix = *parts[i.out].out.matrix;
    if (matrix.is_packed()) return matrix.packed.block(0, i.first);
    return at(matrix.floats, i.first * matrix.depth, matrix.type);
  }

  void prepare_packed_row(Form& form, std::int32_t r, ThreadScratch& t) const {
    const PackedMatrix& m = form.matrix->packed;
    PackedSpec spec = m.spec;
    spec.rows = form.format;
    const RowLayout layout(spec);
    const InputOrder order = m.input_order(0, 0);
    const std::int64_t row_bytes = layout.product_row_bytes(m.padded_depth);
    const RowChunk chunk = form.cut.chunk_of(r * layout.planes);
    std::uint8_t* place = form.rows.get<std::uint8_t>(form.cut.slots * row_bytes) + chunk.first_row * row_bytes +
                          layout.offset(chunk, r * layout.planes);
    PrepareRow row{at(x, r * m.spec.depth, type),
                   type,
                   m.spec.depth,
                   m.padded_depth,
                   place,
                   layout.record_stride(chunk),
                   layout.half_stride(chunk),
                   row_scale == 0.0f ? m.input_scale(0, 0) : row_scale,
                   record_scales_of(form, r)};
    if (order) {  // by itself first
      row.dst = t.row.get<std::uint8_t>(layout.row_bytes(m.padded_depth));
      row.record_stride = 2 * layout.half_bytes();
      row.half_stride = layout.half_bytes();
    }
    const RowScale q = k->of(form.format).prepare(row);
    if (order) copy_in_order(layout, row.dst, order, m.spec.depth, chunk, place);
    form.scale.get<float>(form.cut.slots / layout.planes)[r] = q.scale;
    form.zero.get<std::int32_t>(form.cut.slots / layout.planes)[r] = q.zero;
  }

  float* record_scales_of(Form& form, std::int32_t row) const {
    if (!traits_of(form.format).record_scales) return nullptr;
    const std::int64_t records = form.matrix->packed.records;
    return form.record_scales.get<float>(form.cut.slots * records) + row * records;
  }

  void multiply_blocks_of(const Part& part, int first, int last, const std::uint8_t* next, ThreadScratch& t) const {
    const PackedMatrix& m = part.packed;
    Form& form = *part.form;
    const RowLayout layout(m.spec);
    const int planes = layout.planes;
    const std::int64_t row_bytes = layout.product_row_bytes(m.padded_depth);
    const auto* prepared = form.rows.get<std::uint8_t>(form.cut.slots * row_bytes);
    const auto* scale = form.scale.get<float>(form.cut.slots / planes);
    const auto* zero = form.zero.get<std::int32_t>(form.cut.slots / planes);
    const Epilogues& epilogues = k->of(m.layout.weights).with(m.spec.rows);
    const int in_turn = blocks_in_turn(form.cut, last - first);
    for (int block = first; block < last; block += in_turn) {
      const int block_end = std::min(block + in_turn, last);
      for (int index = 0; index < form.cut.chunks; ++index) {
        const RowChunk chunk = form.cut.chunk(index);
        const std::int32_t first_row = chunk.first_row / planes;
        const ChunkInput in{chunk,
                            prepared + chunk.first_row * row_bytes,
                            scale + first_row,
                            scale + first_row,
                            zero + first_row,
                            record_scales_of(form, first_row)};
        multiply_blocks(*k, m, 0, block, block_end, in, index == 0, block_end < last ? nullptr : next, NextRows{},
                        &t.product, [&](int b, const BlockRows& finished) {
                          const std::int64_t column = static_cast<std::int64_t>(b) * kBlockColumns;
                          const auto columns =
                              static_cast<int>(std::min<std::int64_t>(kBlockColumns, m.spec.columns - column));
                          epilogues.finish(finished, t.values, kBlockColumns, columns);
                          for (int r = 0; r < finished.rows; ++r) {
                            store(part.out, first_row + r, column, t.values + r * kBlockColumns, columns);
                          }
                        });
      }
    }
  }

  void multiply_floats_of(const Part& part, std::int64_t first, std::int64_t last, ThreadScratch& t) const {
    const Matrix& m = *part.out.matrix;
    const auto* queries = part.form->rows.get<float>(rows * m.depth + 32);
    const std::int64_t columns = last - first;
    const std::uint8_t* weights = at(m.floats, first * m.depth, m.type);
    for (std::int64_t q = 0; q < rows; q += kQueriesAtOnce) {
      const std::int64_t count = std::min(kQueriesAtOnce, rows - q);
      k->dot_rows({queries + q * m.depth, static_cast<int>(count), m.depth, weights, m.type, m.depth, 0, columns,
                   t.sums, columns});
      for (std::int64_t r = 0; r < count; ++r) {
        float* sums = t.sums + r * columns;
        for (std::int64_t c = 0; m.bias != nullptr && c < columns; ++c) sums[c] += m.bias[first + c];
        store(part.out, q + r, first, sums, columns);
      }
    }
  }

  void store(const MatrixOut& out, std::int64_t row, std::int64_t column, const float* values,
             std::int64_t count) const {
    k->store_row(values, count, out.type, at(out.out, row * out.stride + column, out.type));
  }
};

RowProducts::RowProducts() : state_(std::make_unique<State>()) {}
RowProducts::~RowProducts() = default;

void RowProducts::plan(const Kernels& kernels, const MatrixOut* outs, int count, const void* x, DType type,
                       std::int64_t rows, int threads, float row_scale) {
  State& s = *state_;
  s.k = &kernels;
  s.x = x;
  s.type = type;
  s.rows = rows;
  s.row_scale = row_scale;
  s.form_count = 0;
  s.parts.clear();
  s.queue.clear();
  std::int64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += outs[i].matrix->bytes();
  // Enough items for the threads to end together, and each in one piece long enough to be read as a stream.
  const std::int64_t item_bytes = std::max<std::int64_t>(bytes / (16 * threads), 1);
  for (int i = 0; i < count; ++i) {
    const Matrix& m = *outs[i].matrix;
    State::Part part{outs[i], m.packed, nullptr, 0, 0, s.queue.items()};
    if (m.is_packed()) {
      part.packed.spec.rows = rows_for(m.packed.spec, type);
      part.units = m.packed.blocks;
      part.step = std::clamp<std::int64_t>(item_bytes / m.packed.block_bytes, 1, 64);
    } else {
      const std::int64_t row_bytes = std::max<std::int64_t>(m.depth * size_of(m.type), 1);
      part.units = m.columns;
      part.step =
          std::clamp<std::int64_t>(std::min(item_bytes, kFloatItemBytes) / row_bytes / 16 * 16, 16, kMostColumnsOfItem);
    }
    part.form = s.form_for(m, part.packed.spec.rows);
    s.queue.add(static_cast<int>((part.units + part.step - 1) / part.step));
    s.parts.push_back(part);
  }
}

void RowProducts::prepare(const Worker& worker) {
  State& s = *state_;
  ThreadScratch& t = scratch_of_this_thread();
  for (std::size_t i = 0; i < s.form_count; ++i) {
    Form& form = *s.forms[i];
    for (std::int64_t r = worker.share(s.rows); r < worker.next_share(s.rows); ++r) {
      if (!form.floats) {
        s.prepare_packed_row(form, static_cast<std::int32_t>(r), t);
        continue;
      }
      const std::int64_t depth = form.matrix->depth;
      s.k->load_row(at(s.x, r * depth, s.type), s.type, static_cast<int>(depth),
                    form.rows.get<float>(s.rows * depth + 32) + r * depth);
    }
  }
}

void RowProducts::multiply(const Worker& worker) {
  State& s = *state_;
  ThreadScratch& t = scratch_of_this_thread();
  s.k->thread_begin();
  const int node = s.queue.node_of(worker.index, worker.count);
  int index = s.queue.take(node);
  while (index < s.queue.items()) {
    const int next = s.queue.take(node);
    const Item item = s.item(index);
    const State::Part& part = s.parts[item.out];
    if (part.out.matrix->is_packed()) {
      s.multiply_blocks_of(part, static_cast<int>(item.first), static_cast<int>(item.last), s.weights_of(next), t);
    } else {
      s.multiply_floats_of(part, item.first, item.last, t);
    }
    index = next;
  }
  s.k->thread_end();
}

Matrix matrix_of(const PackedMatrix& weight) {
  CPUMOE_REQUIRE(weight.spec.experts == 1, "weight holds ", weight.spec.experts, " experts; a linear takes one matrix");
  CPUMOE_REQUIRE(!weight.spec.gated, "weight was packed with gate and up rows; pack it as a plain matrix");
  Matrix matrix;
  matrix.packed = weight;
  matrix.columns = weight.spec.columns;
  matrix.depth = weight.spec.depth;
  return matrix;
}

void linear_forward(const Kernels& kernels, const LinearCall& call) {
  static thread_local RowProducts products_of_this_thread;
  RowProducts& products = products_of_this_thread;  // whichever thread uses it
  const Matrix& m = call.matrix;
  float row_scale = 0.0f;
  if (m.is_packed() && traits_of(rows_for(m.packed.spec, call.type)).of_tensor) {
    row_scale = fp8_scale(largest_magnitude(kernels, call.x, call.type, call.rows, m.depth));
  }
  for (std::int64_t first = 0; first < call.rows && m.columns > 0; first += kMaxRows) {
    const std::int64_t rows = std::min(kMaxRows, call.rows - first);
    const int threads = threads_for(m.is_packed() ? product_work(m.packed, 1, rows) : m.bytes());
    const MatrixOut out{&m, at(call.out, first * m.columns, call.out_type), m.columns, call.out_type};
    products.plan(kernels, &out, 1, at(call.x, first * m.depth, call.type), call.type, rows, threads, row_scale);
    run_on_threads(threads, [&products](Worker& worker) {
      products.prepare(worker);
      worker.barrier->wait();
      products.multiply(worker);
    });
  }
}

}  // namespace cpumoe
