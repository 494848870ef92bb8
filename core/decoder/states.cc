#include "decoder/step.h"

#include <cstring>

namespace cpumoe {

void Decoder::Round::forget_padding(const Worker& worker) {
  each_row(worker, [&](std::int64_t r) {
    const StepRow& of_row = step_.rows[static_cast<std::size_t>(first_ + r)];
    if (of_row.place >= step_.seen[static_cast<std::size_t>(of_row.sequence)]) return;
    std::memset(row(normed_, r), 0, static_cast<std::size_t>(hidden_ * size_of(type_)));
  });
}

void Decoder::Round::convolve(Worker& worker, const ConvolutionPart& c, std::size_t index) {
  const ShortConvolutionCall call{c.convolution, type_, s_.sequence_rows, projected_, step_.caches[index].conv_state,
                                  attended_};
  convolve_shortly(k_, call, worker);
  if (worker.index == 0) plan_layer(index);
  end_stage(worker, StepPart::kAttention);
}

void Decoder::Round::plan_columns_of_delta(const DeltaPart& d) {
  const std::int64_t width = d.width();
  std::int64_t column = 0, narrow = 0;
  for (const Matrix& m : d.projections) {
    s_.outs.push_back({&m, at(projected_, column, type_), width, type_});
    column += m.columns;
  }
  while (s_.expansions.size() < d.expansions.size()) s_.expansions.emplace_back();
  for (std::size_t i = 0; i < d.expansions.size(); ++i) {
    const Matrix& m = d.expansions[i].matrix;
    const MatrixOut out{&m, at(projected_, column, type_), width, type_};
    s_.expansions[i].plan(k_, &out, 1, at(narrow_, narrow * count_, type_), type_, count_, threads_, m_.group);
    column += m.columns;
    narrow += m.depth;
  }
}

void Decoder::Round::plan_delta(const DeltaPart& d, const LayerCache& cache) {
  const auto rows_of = [&](const DeltaPart::Columns& c) {
    return HeadRows{at(projected_, c.first, type_), d.width(), c.group, c.group_stride, c.head_stride};
  };
  DeltaRuleCall call{};
  call.rule = d.rule;
  call.type = type_;
  call.sequences = s_.sequence_rows;
  call.queries = rows_of(d.queries);
  call.keys = rows_of(d.keys);
  call.values = rows_of(d.values);
  call.gates = rows_of(d.gates);
  call.betas = rows_of(d.betas);
  call.decays = rows_of(d.decays);
  call.conv_state = cache.conv_state;
  call.state = cache.state;
  call.out = attended_;
  s_.delta.plan(k_, call, threads_);
}

void Decoder::Round::run_delta(Worker& worker, const DeltaPart& d, std::size_t index) {
  if (!d.expansions.empty()) {
    std::int64_t narrow = 0;
    for (std::size_t i = 0; i < d.expansions.size(); ++i) {
      const DeltaPart::Expansion& e = d.expansions[i];
      each_row(worker, [&](std::int64_t r) {
        std::memcpy(at(narrow_, narrow * count_ + r * e.matrix.depth, type_),
                    at(projected_, r * d.width() + e.from, type_),
                    static_cast<std::size_t>(e.matrix.depth * size_of(type_)));
      });
      narrow += e.matrix.depth;
      s_.expansions[i].prepare(worker);
    }
    end_stage(worker, StepPart::kRows);
    for (std::size_t i = 0; i < d.expansions.size(); ++i) s_.expansions[i].multiply(worker);
    end_stage(worker, StepPart::kProducts);
    for (std::size_t i = 0; i < d.expansions.size(); ++i) gather(worker, s_.expansions[i]);
  }
  if (worker.index == 0) plan_layer(index);
  end_stage(worker, StepPart::kRows);
  s_.delta.run(worker);
  end_stage(worker, StepPart::kAttention);
}

}  // namespace cpumoe
