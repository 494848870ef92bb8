#include "decoder/step.h"

#include <algorithm>
#include <cstring>

namespace cpumoe {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Step::Step(const Kernels& kernels, const StepInput& input, const DecoderModel& model, StepWorkspace& workspace,
           std::int64_t first, const std::vector<std::int64_t>& counts, int threads)
    : k_(kernels),
      input_(input),
      m_(model),
      w_(workspace),
      type_(model.type()),
      counts_(counts),
      first_(first),
      count_(counts[static_cast<std::size_t>(model.exchange == nullptr ? 0 : model.exchange->rank())]),
      hidden_(model.hidden()),
      threads_(threads) {
  std::int64_t scratch = 0, floats = hidden_, inner = 0, experts = 0, topk = 0;
  bool spread = false;
  for (const DecoderLayer& layer : m_.layers) {
    const MixerSizes sizes = std::visit([&](const auto& kind) { return sizes_of(kind, type_, count_); }, layer.mixer);
    scratch = std::max(scratch, sizes.scratch_bytes);
    floats = std::max(floats, sizes.thread_floats);
    if (layer.dense.has_value()) inner = std::max(inner, layer.dense->down.depth);
    if (!layer.experts.has_value()) continue;
    spread = spread || layer.experts->spread;
    experts = std::max(experts, layer.experts->router.weight.columns);
    topk = std::max(topk, layer.experts->router.topk);
  }
  const auto rows_of = [&](Buffer& buffer, std::int64_t width) {
    return buffer.get<std::uint8_t>(count_ * width * size_of(type_));
  };
  residual_ = rows_of(w_.residual, hidden_);
  normed_ = rows_of(w_.normed, hidden_);
  mixed_ = rows_of(w_.mixed, hidden_);
  share_rows_ = m_.group_ranks() > 1 ? rows_of(w_.share_rows, hidden_) : mixed_;
  scratch_ = w_.scratch.get<std::uint8_t>(scratch);
  dense_in_ = rows_of(w_.dense_in, 2 * inner);
  dense_hidden_ = rows_of(w_.dense_hidden, inner);
  dense_out_ = rows_of(w_.dense_out, hidden_);
  values_stride_ = (std::max(floats, 2 * inner) + 63) / 16 * 16;
  values_ = w_.values.get<float>(threads * values_stride_);
  share_ = w_.share.get<float>(count_);
  logits_ = w_.logits.get<float>(count_ * experts);
  ids_ = w_.ids.get<std::int32_t>(count_ * topk);
  weights_ = w_.weights.get<float>(count_ * topk);
  if (spread) {
    own_ids_ = w_.own_ids.get<std::int32_t>(count_ * topk);
    sums_ = w_.sums.get<float>(count_ * hidden_);
  }
  find_sequences();
  if (m_.layers.empty() || count_ == 0) return;
  std::visit([&](const auto& kind) { plan_projections(*this, kind); }, m_.layers.front().mixer);
}

void Step::run(Worker& worker) {
  if (worker.index == 0) time_ = Clock::now();
  if (count_ == 0) return serve_others(worker);
  embed(worker);
  for (std::size_t i = 0; i < m_.layers.size(); ++i) {
    const DecoderLayer& layer = m_.layers[i];
    normalize(worker, layer.before_mixer);
    std::visit([&](const auto& kind) { run_mixer(*this, worker, kind, i); }, layer.mixer);
    add(worker, mixed_, layer.after_mixer, layer.residual_factor);
    normalize(worker, layer.before_block);
    run_block(worker, layer);
    finish_block(worker, layer);
  }
  finish(worker);
}

void Step::find_sequences() {
  w_.sequence_rows.clear();
  for (std::int64_t r = 0; r < count_; ++r) {
    const std::int64_t sequence = input_.rows[static_cast<std::size_t>(first_ + r)].sequence;
    if (w_.sequence_rows.empty() || w_.sequence_rows.back().sequence != sequence) {
      w_.sequence_rows.push_back({sequence, r, 0});
    }
    ++w_.sequence_rows.back().rows;
  }
}

void Step::end_stage(Worker& worker, StepPart part) {
  worker.barrier->wait();
  if (worker.index == 0) note_time(part);
}

void Step::note_time(StepPart part) {
  const Clock::time_point now = Clock::now();
  w_.seconds[static_cast<int>(part)] += std::chrono::duration<double>(now - time_).count();
  time_ = now;
}

void Step::plan_inputs() {
  const std::vector<MatrixOut>& outs = w_.mixers.outs;
  w_.mixers.projections.plan(k_, outs.data(), static_cast<int>(outs.size()), normed_, type_, count_, threads_,
                             m_.group);
}

void Step::plan_output(const Matrix& out, const std::uint8_t* rows) {
  const MatrixOut to{&out, mixed_, hidden_, type_};
  w_.mixers.output.plan(k_, &to, 1, rows, type_, count_, threads_, m_.group);
}

void Step::compute(Worker& worker, RankProducts& products, StepPart part) {
  products.prepare(worker);
  end_stage(worker, StepPart::kRows);
  multiply(worker, products, part);
}

void Step::multiply(Worker& worker, RankProducts& products, StepPart part) {
  const bool is_split = products.is_split();  // after the barrier the first thread may plan them again
  products.multiply(worker);
  end_stage(worker, part);
  if (!is_split) return;
  products.gather(worker);
  end_stage(worker, StepPart::kExchange);
}

void Step::embed(const Worker& worker) {
  each_row(worker, [&](std::int64_t r) {
    const std::uint8_t* from = input_.tokens == nullptr
                                   ? at(input_.hidden, (first_ + r) * hidden_, type_)
                                   : at(m_.embedding.data, input_.tokens[first_ + r] * hidden_, type_);
    std::memcpy(row(residual_, r), from, static_cast<std::size_t>(hidden_ * size_of(type_)));
    if (input_.tokens == nullptr || m_.embedding_factor == 1.0f) return;
    scale_row(worker, m_.embedding_factor, row(residual_, r));
  });
}

void Step::scale_row(const Worker& worker, float factor, std::uint8_t* row) const {
  float* values = values_of(worker);
  k_.load_row(row, type_, static_cast<int>(hidden_), values);
  for (std::int64_t i = 0; i < hidden_; ++i) values[i] *= factor;
  k_.store_row(values, hidden_, type_, row);
}

void Step::clear_padding(const Worker& worker) {
  each_row(worker, [&](std::int64_t r) {
    const StepRow& of_row = row_at(r);
    if (of_row.place >= input_.seen[static_cast<std::size_t>(of_row.sequence)]) return;
    std::memset(row(normed_, r), 0, static_cast<std::size_t>(hidden_ * size_of(type_)));
  });
}

void Step::normalize_into(const void* from, const Norm& norm, void* to) const {
  const auto width = static_cast<std::int64_t>(norm.weight.size());
  k_.normalize_row({from, norm.weight.data(), type_, width, norm.epsilon, norm.round_first, norm.plus_one, to});
}

void Step::normalize(const Worker& worker, const Norm& norm) {
  each_row(worker, [&](std::int64_t r) { normalize_hidden(row(residual_, r), norm, row(normed_, r)); });
}

void Step::normalize_hidden(const void* from, const Norm& norm, void* to) const {
  if (norm) return normalize_into(from, norm, to);
  std::memcpy(to, from, static_cast<std::size_t>(hidden_ * size_of(type_)));
}

void Step::add(const Worker& worker, std::uint8_t* rows, const Norm& norm, float factor) {
  each_row(worker, [&](std::int64_t r) {
    if (norm) normalize_into(row(rows, r), norm, row(rows, r));
    k_.add_row({row(residual_, r), row(rows, r), type_, hidden_, factor, row(residual_, r)});
  });
}

void Step::finish_block(const Worker& worker, const DecoderLayer& layer) {
  if (layer.dense.has_value()) {
    each_row(worker, [&](std::int64_t r) {
      if (layer.dense->share) scale_row(worker, share_[r], row(dense_out_, r));
      if (layer.experts.has_value()) {
        k_.add_row({row(mixed_, r), row(dense_out_, r), type_, hidden_, 1.0f, row(mixed_, r)});
      }
    });
  }
  add(worker, layer.experts.has_value() ? mixed_ : dense_out_, layer.after_block, layer.residual_factor);
}

void Step::plan_layer(std::size_t index) {
  const DecoderLayer& layer = m_.layers[index];
  if (index + 1 < m_.layers.size()) {
    std::visit([&](const auto& kind) { plan_projections(*this, kind); }, m_.layers[index + 1].mixer);
  } else {
    plan_head();
  }
  std::visit([&](const auto& kind) { plan_mixer(*this, kind, cache(index)); }, layer.mixer);
  if (layer.experts.has_value()) {
    const Matrix& router = layer.experts->router.weight;
    const MatrixOut logits{&router, logits_, router.columns, DType::kF32};
    w_.router.plan(k_, &logits, 1, normed_, type_, count_, threads_, m_.group);
  }
  if (layer.dense.has_value()) plan_dense(*layer.dense);
}

std::int64_t Step::first_wanted() const {
  return std::lower_bound(input_.wanted.begin(), input_.wanted.end(), first_) - input_.wanted.begin();
}

std::int64_t Step::last_wanted() const {
  return std::lower_bound(input_.wanted.begin(), input_.wanted.end(), first_ + count_) - input_.wanted.begin();
}

void Step::plan_head() {
  const std::int64_t wanted = last_wanted() - first_wanted();
  result_ = input_.hidden_out != nullptr ? at(input_.hidden_out, first_wanted() * hidden_, type_)
                                         : w_.output_rows.get<std::uint8_t>(wanted * hidden_ * size_of(type_));
  if (input_.logits_out == nullptr) return;
  const std::int64_t columns = m_.head.columns;
  const MatrixOut out{&m_.head, at(input_.logits_out, first_wanted() * columns, type_), columns, type_};
  w_.head.plan(k_, &out, 1, result_, type_, wanted, threads_, m_.group);
}

void Step::finish(Worker& worker) {
  end_stage(worker, StepPart::kRows);  // rows that are wanted may be those of another worker
  const std::int64_t first = first_wanted(), wanted = last_wanted() - first;
  for (std::int64_t i = worker.share(wanted); i < worker.next_share(wanted); ++i) {
    const std::int64_t wanted_row = input_.wanted[static_cast<std::size_t>(first + i)] - first_;
    normalize_hidden(row(residual_, wanted_row), m_.norm, row(result_, i));
  }
  if (input_.logits_out != nullptr && wanted > 0) {
    compute(worker, w_.head, StepPart::kHead);
  }
}

}  // namespace cpumoe
