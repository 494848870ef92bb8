#include "decoder/step.h"

#include <algorithm>
#include <cstring>

namespace cpumoe {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Decoder::Round::Round(const Kernels& kernels, const Step& step, State& state, std::int64_t first,
                      const std::vector<std::int64_t>& counts, int threads)
    : k_(kernels),
      step_(step),
      s_(state),
      m_(state.model),
      type_(state.model.type),
      counts_(counts),
      first_(first),
      count_(counts[static_cast<std::size_t>(m_.exchange == nullptr ? 0 : m_.exchange->rank())]),
      hidden_(state.model.hidden),
      threads_(threads) {
  std::int64_t projected = 0, attended = 0, inner = 0, experts = 0, topk = 0, latent = 0, latent_sums = 0, down = 0;
  std::int64_t narrow = 0, all_attended = 0;
  const std::int64_t count = count_;
  bool spread = false;
  for (const DecoderLayer& layer : m_.layers) {
    const AttentionPart& a = layer.attention;
    projected = std::max(projected, width_of(a));
    attended = std::max(attended, a.heads * a.value_depth);
    if (a.latent.has_value()) {
      latent = std::max(latent, a.heads * a.latent->depth());
      latent_sums = std::max(latent_sums, a.heads * a.latent->rank);
      down = std::max(down, a.latent->down.columns);
      latent_item_ = std::max(latent_item_, kLatentItemRows * (a.depth + a.latent->rank + a.value_depth + 48));
    }
    if (layer.delta.has_value()) {
      projected = std::max(projected, layer.delta->width());
      attended = std::max(attended, layer.delta->rule.heads * layer.delta->rule.value_depth);
      narrow = std::max(narrow, narrow_width(*layer.delta));
    }
    if (layer.convolution.has_value()) {
      projected = std::max(projected, layer.convolution->projection.columns);
      attended = std::max(attended, layer.convolution->out.depth);
    }
    if (layer.dense.has_value()) inner = std::max(inner, layer.dense->down.depth);
    if (a.ranks > 1) all_attended = std::max(all_attended, a.out.depth);
    if (!layer.experts.has_value()) continue;
    spread = spread || layer.experts->spread;
    experts = std::max(experts, layer.experts->router.weight.columns);
    topk = std::max(topk, layer.experts->router.topk);
  }
  const auto rows_of = [&](Buffer& buffer, std::int64_t width) {
    return buffer.get<std::uint8_t>(count * width * size_of(type_));
  };
  residual_ = rows_of(s_.residual, hidden_);
  normed_ = rows_of(s_.normed, hidden_);
  mixed_ = rows_of(s_.mixed, hidden_);
  projected_ = rows_of(s_.projected, projected);
  attended_ = rows_of(s_.attended, attended);
  gates_ = rows_of(s_.gates, attended);
  down_ = rows_of(s_.down, down);
  narrow_ = rows_of(s_.narrow, narrow);
  const std::int64_t latent_rows = std::min(count, kLatentRows);
  latent_queries_ = s_.latent_queries.get<std::uint8_t>(latent_rows * latent * size_of(type_));
  latent_sums_ = s_.latent_sums.get<std::uint8_t>(latent_rows * latent_sums * size_of(type_));
  dense_in_ = rows_of(s_.dense_in, 2 * inner);
  dense_hidden_ = rows_of(s_.dense_hidden, inner);
  dense_out_ = rows_of(s_.dense_out, hidden_);
  values_stride_ = (std::max({hidden_, 2 * inner, projected, 2 * attended, latent_item_}) + 63) / 16 * 16;
  values_ = s_.values.get<float>(threads * values_stride_);
  share_ = s_.share.get<float>(count);
  logits_ = s_.logits.get<float>(count * experts);
  ids_ = s_.ids.get<std::int32_t>(count * topk);
  weights_ = s_.weights.get<float>(count * topk);
  all_attended_ = rows_of(s_.all_attended, all_attended);
  gathered_ = rows_of(s_.gathered, all_attended);
  if (spread) {
    own_ids_ = s_.own_ids.get<std::int32_t>(count * topk);
    sums_ = s_.sums.get<float>(count * hidden_);
  }
  find_sequences();
  if (!m_.layers.empty() && count_ > 0) plan_projections(0);
}

void Decoder::Round::run(Worker& worker) {
  start(worker);
  if (count_ == 0) return serve_others(worker);
  embed(worker);
  const DecoderLayer* before = nullptr;
  for (std::size_t i = 0; i < m_.layers.size(); ++i) {
    const DecoderLayer& layer = m_.layers[i];
    end_block(worker, before);
    normalize(worker, layer.before_attention);
    if (layer.state_convolution() != nullptr) forget_padding(worker);
    s_.projections.prepare(worker);
    end_stage(worker, StepPart::kRows);
    s_.projections.multiply(worker);
    end_stage(worker, StepPart::kProducts);
    gather(worker, s_.projections);
    if (layer.delta.has_value()) {
      run_delta(worker, *layer.delta, i);
    } else if (layer.convolution.has_value()) {
      convolve(worker, *layer.convolution, i);
    } else if (layer.attention.latent.has_value()) {
      attend_latents(worker, layer.attention, step_.caches[i], i);
    } else {
      make_heads(worker, layer.attention, step_.caches[i]);
      if (worker.index == 0) plan_layer(i);
      end_stage(worker, StepPart::kRows);
      s_.attention.run(worker);
      end_stage(worker, StepPart::kAttention);
    }
    gate(worker, layer.attention);
    gather_heads(worker, layer.attention);
    s_.output.prepare(worker);
    end_stage(worker, StepPart::kRows);
    s_.output.multiply(worker);
    end_stage(worker, StepPart::kProducts);
    gather(worker, s_.output);
    add_to_residual(worker, mixed_, layer.after_attention, layer.residual_factor);
    normalize(worker, layer.before_block);
    run_block(worker, layer);
    before = &layer;
  }
  end_block(worker, before);
  finish(worker);
}

void Decoder::Round::find_sequences() {
  s_.sequence_rows.clear();
  for (std::int64_t r = 0; r < count_; ++r) {
    const std::int64_t sequence = step_.rows[static_cast<std::size_t>(first_ + r)].sequence;
    if (s_.sequence_rows.empty() || s_.sequence_rows.back().sequence != sequence) {
      s_.sequence_rows.push_back({sequence, r, 0});
    }
    ++s_.sequence_rows.back().rows;
  }
}

void Decoder::Round::start(const Worker& worker) {
  if (worker.index == 0) time_ = Clock::now();
}

void Decoder::Round::end_stage(Worker& worker, StepPart part) {
  worker.barrier->wait();
  if (worker.index == 0) note_time(part);
}

void Decoder::Round::note_time(StepPart part) {
  const Clock::time_point now = Clock::now();
  s_.seconds[static_cast<int>(part)] += std::chrono::duration<double>(now - time_).count();
  time_ = now;
}

void Decoder::Round::gather(Worker& worker, RankProducts& products) {
  if (!products.is_split()) return;
  products.gather(worker);
  end_stage(worker, StepPart::kExchange);
}

void Decoder::Round::gather_heads(Worker& worker, const AttentionPart& a) {
  if (a.ranks == 1) return;
  worker.barrier->wait();  // gates are applied in shares of rows
  const std::int64_t width = a.heads * a.value_depth * size_of(type_);
  if (worker.index == 0) m_.group->gather(attended_, count_ * width, gathered_);
  end_stage(worker, StepPart::kExchange);
  each_row(worker, [&](std::int64_t r) {
    for (int rank = 0; rank < a.ranks; ++rank) {
      std::memcpy(all_attended_ + (r * a.ranks + rank) * width, gathered_ + (rank * count_ + r) * width,
                  static_cast<std::size_t>(width));
    }
  });
}

void Decoder::Round::add_sums(Worker& worker) {
  if (worker.index == 0) m_.exchange->sum(sums_, count_ * hidden_);
  end_stage(worker, StepPart::kExchange);
  each_row(worker, [&](std::int64_t r) { k_.store_row(sums_ + r * hidden_, hidden_, type_, row(mixed_, r)); });
}

void Decoder::Round::embed(const Worker& worker) {
  each_row(worker, [&](std::int64_t r) {
    const std::uint8_t* from = step_.tokens == nullptr ? at(step_.hidden, (first_ + r) * hidden_, type_)
                                                       : at(m_.embedding, step_.tokens[first_ + r] * hidden_, type_);
    std::memcpy(row(residual_, r), from, static_cast<std::size_t>(hidden_ * size_of(type_)));
    if (step_.tokens == nullptr || m_.embedding_factor == 1.0f) return;
    float* values = values_of(worker);
    k_.load_row(from, type_, static_cast<int>(hidden_), values);
    for (std::int64_t i = 0; i < hidden_; ++i) values[i] *= m_.embedding_factor;
    k_.store_row(values, hidden_, type_, row(residual_, r));
  });
}

void Decoder::Round::normalize_into(const void* from, const Norm& norm, void* to) const {
  k_.normalize_row({from, norm.weight, type_, norm.width, norm.epsilon, norm.round_first, norm.plus_one, to});
}

void Decoder::Round::normalize(const Worker& worker, const Norm& norm) {
  each_row(worker, [&](std::int64_t r) {
    if (norm) {
      normalize_into(row(residual_, r), norm, row(normed_, r));
    } else {
      std::memcpy(row(normed_, r), row(residual_, r), static_cast<std::size_t>(hidden_ * size_of(type_)));
    }
  });
}

void Decoder::Round::add_to_residual(const Worker& worker, std::uint8_t* rows, const Norm& norm, float factor) {
  each_row(worker, [&](std::int64_t r) {
    if (norm) normalize_into(row(rows, r), norm, row(rows, r));
    k_.add_row({row(residual_, r), row(rows, r), type_, hidden_, factor, row(residual_, r)});
  });
}

void Decoder::Round::end_block(const Worker& worker, const DecoderLayer* layer) {
  if (layer == nullptr) return;
  std::uint8_t* given = layer->experts.has_value() ? mixed_ : dense_out_;
  if (layer->dense.has_value()) {
    each_row(worker, [&](std::int64_t r) {
      if (layer->dense->share) {
        float* values = values_of(worker);
        k_.load_row(row(dense_out_, r), type_, static_cast<int>(hidden_), values);
        for (std::int64_t i = 0; i < hidden_; ++i) values[i] *= share_[r];
        k_.store_row(values, hidden_, type_, row(dense_out_, r));
      }
      if (layer->experts.has_value()) {
        k_.add_row({row(mixed_, r), row(dense_out_, r), type_, hidden_, 1.0f, row(mixed_, r)});
      }
    });
  }
  add_to_residual(worker, given, layer->after_block, layer->residual_factor);
}

void Decoder::Round::plan_projections(std::size_t index) {
  const DecoderLayer& layer = m_.layers[index];
  std::vector<MatrixOut>& outs = s_.outs;
  outs.clear();
  if (layer.delta.has_value()) {
    plan_columns_of_delta(*layer.delta);
  } else if (layer.convolution.has_value()) {
    const Matrix& projection = layer.convolution->projection;
    outs.push_back({&projection, projected_, projection.columns, type_});
  } else {
    const AttentionPart& a = layer.attention;
    const std::int64_t width = width_of(a), keys = a.query_width(), values = keys + a.kv_heads * a.depth;
    const MatrixOut queries{&a.query, projected_, width, type_};
    if (a.latent.has_value()) {
      outs.push_back({&a.latent->latent, at(projected_, keys, type_), width, type_});
    } else if (a.key) {
      outs.push_back({&a.key, at(projected_, keys, type_), width, type_});
      outs.push_back({&a.value, at(projected_, values, type_), width, type_});
    }
    if (a.latent.has_value() && a.latent->down) {
      outs.push_back({&a.latent->down, down_, a.latent->down.columns, type_});
      s_.queries.plan(k_, &queries, 1, down_, type_, count_, threads_, m_.group);
    } else {
      outs.push_back(queries);
    }
    if (a.gate) outs.push_back({&a.gate, gates_, a.gate.columns, type_});
  }
  s_.projections.plan(k_, outs.data(), static_cast<int>(outs.size()), normed_, type_, count_, threads_, m_.group);
}

void Decoder::Round::plan_layer(std::size_t index) {
  const DecoderLayer& layer = m_.layers[index];
  const AttentionPart& a = layer.attention;
  if (index + 1 < m_.layers.size()) {
    plan_projections(index + 1);
  } else {
    plan_head();
  }
  if (layer.delta.has_value()) {
    plan_delta(*layer.delta, step_.caches[index]);
  } else if (!layer.convolution.has_value() && !a.latent.has_value()) {
    plan_attention(a, step_.caches[index], 0, count_);
  }
  const Matrix* mixer_out = layer.delta.has_value()         ? &layer.delta->out
                            : layer.convolution.has_value() ? &layer.convolution->out
                                                            : &a.out;
  const MatrixOut out{mixer_out, mixed_, hidden_, type_};
  s_.output.plan(k_, &out, 1, attended_by(layer), type_, count_, threads_, m_.group);
  if (layer.experts.has_value()) {
    const Matrix& router = layer.experts->router.weight;
    const MatrixOut logits{&router, logits_, router.columns, DType::kF32};
    s_.router.plan(k_, &logits, 1, normed_, type_, count_, threads_, m_.group);
  }
  if (layer.dense.has_value()) {
    const DenseBlock& d = *layer.dense;
    const std::int64_t inner = d.down.depth;
    MatrixOut outs[3];
    int outs_count = 0;
    outs[outs_count++] = {&d.up, d.has_both() ? dense_in_ : at(dense_in_, inner, type_), 2 * inner, type_};
    if (d.gate) outs[outs_count++] = {&d.gate, dense_in_, 2 * inner, type_};
    if (d.share) outs[outs_count++] = {&d.share, share_, 1, DType::kF32};
    s_.dense_first.plan(k_, outs, outs_count, normed_, type_, count_, threads_, m_.group);
    const MatrixOut down{&d.down, dense_out_, hidden_, type_};
    s_.dense_second.plan(k_, &down, 1, dense_hidden_, type_, count_, threads_, m_.group);
  }
}

std::int64_t Decoder::Round::first_wanted() const {
  return std::lower_bound(step_.wanted.begin(), step_.wanted.end(), first_) - step_.wanted.begin();
}

std::int64_t Decoder::Round::last_wanted() const {
  return std::lower_bound(step_.wanted.begin(), step_.wanted.end(), first_ + count_) - step_.wanted.begin();
}

void Decoder::Round::plan_head() {
  const std::int64_t wanted = last_wanted() - first_wanted();
  result_ = step_.hidden_out != nullptr ? at(step_.hidden_out, first_wanted() * hidden_, type_)
                                        : s_.wanted_rows.get<std::uint8_t>(wanted * hidden_ * size_of(type_));
  if (step_.logits_out == nullptr) return;
  const std::int64_t columns = m_.head.columns;
  const MatrixOut out{&m_.head, at(step_.logits_out, first_wanted() * columns, type_), columns, type_};
  s_.head.plan(k_, &out, 1, result_, type_, wanted, threads_, m_.group);
}

void Decoder::Round::finish(Worker& worker) {
  end_stage(worker, StepPart::kRows);  // rows that are wanted may be those of another worker
  const std::int64_t first = first_wanted(), wanted = last_wanted() - first;
  for (std::int64_t i = worker.share(wanted); i < worker.next_share(wanted); ++i) {
    std::uint8_t* from = row(residual_, step_.wanted[static_cast<std::size_t>(first + i)] - first_);
    if (m_.norm) {
      normalize_into(from, m_.norm, row(result_, i));
    } else {
      std::memcpy(row(result_, i), from, static_cast<std::size_t>(hidden_ * size_of(type_)));
    }
  }
  if (step_.logits_out != nullptr && wanted > 0) {
    s_.head.prepare(worker);
    end_stage(worker, StepPart::kRows);
    s_.head.multiply(worker);
    end_stage(worker, StepPart::kHead);
    gather(worker, s_.head);
  }
}

}  // namespace cpumoe
