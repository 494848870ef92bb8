#include "decoder_round.h"

#include <algorithm>

#include "route.h"

namespace cpumoe {
namespace {

// Rows for which one thread chooses the experts; more are shared out.
constexpr std::int64_t kFewRows = 16;

}  // namespace

void Decoder::Round::run_block(Worker& worker, const DecoderLayer& layer) {
  if (layer.experts.has_value()) s_.router.prepare(worker);
  if (layer.dense.has_value()) s_.dense_first.prepare(worker);
  end_stage(worker, StepPart::kRows);
  if (layer.experts.has_value()) {
    s_.router.multiply(worker);
    if (!layer.dense.has_value()) end_stage(worker, StepPart::kRouting);
  }
  if (layer.dense.has_value()) {
    s_.dense_first.multiply(worker);
    end_stage(worker, StepPart::kProducts);
    gather(worker, s_.dense_first);
    activate(worker, *layer.dense);
    s_.dense_second.prepare(worker);
  }
  if (layer.experts.has_value()) choose_experts(worker, *layer.experts);
  if (layer.dense.has_value()) {
    end_stage(worker, StepPart::kRows);
    s_.dense_second.multiply(worker);
  }
  end_stage(worker, layer.dense.has_value() ? StepPart::kProducts : StepPart::kRouting);
  if (layer.dense.has_value()) gather(worker, s_.dense_second);
  if (!layer.experts.has_value()) return;
  if (layer.experts->gate_up.data != nullptr) s_.experts.run(worker);
  end_stage(worker, StepPart::kExperts);
  if (layer.experts->spread) add_sums(worker);
}

void Decoder::Round::activate(const Worker& worker, const DenseBlock& d) {
  const std::int64_t inner = d.down.depth, padded = (inner + 15) / 16 * 16;
  each_row(worker, [&](std::int64_t r) {
    float *gate = values_of(worker), *up = gate + padded;
    const std::uint8_t* from = at(dense_in_, r * 2 * inner, type_);
    k_.load_row(at(from, inner, type_), type_, static_cast<int>(inner), d.activation.gated ? up : gate);
    if (d.activation.gated) k_.load_row(from, type_, static_cast<int>(inner), gate);
    k_.activate_row({gate, up, inner, &d.activation, gate});
    k_.store_row(gate, inner, type_, at(dense_hidden_, r * inner, type_));
    if (d.share) {
      float shares[16] = {share_[r]};  // scoring works in whole vectors
      k_.score(shares, 1, Scoring::kSigmoid);
      share_[r] = shares[0];
    }
  });
}

void Decoder::Round::choose_experts(Worker& worker, const RoutedExperts& e) {
  const RouteCall call = e.router.call(count_, logits_, ids_, weights_);
  if (count_ > kFewRows) {
    round_logits(e.router, worker.share(count_), worker.next_share(count_));
    route_tokens(k_, call, worker.share(count_), worker.next_share(count_));
    worker.barrier->wait();
  }
  if (worker.index != 0) return;
  if (count_ <= kFewRows) {
    round_logits(e.router, 0, count_);
    route_tokens(k_, call, 0, count_);
  }
  for (std::int64_t i = 0; e.loads != nullptr && i < count_ * e.router.topk; ++i) ++e.loads[ids_[i]];
  if (e.spread && e.gate_up.data == nullptr) {
    std::fill_n(sums_, count_ * hidden_, 0.0f);
    return;
  }
  MoeCall moe{};
  moe.gate_up = e.gate_up;
  moe.down = e.down;
  moe.x = normed_;
  moe.type = moe.out_type = type_;
  moe.tokens = count_;
  moe.topk = e.router.topk;
  moe.ids = ids_;
  moe.weights = weights_;
  moe.weight_on_input = e.weight_on_input;
  moe.activation = e.activation;
  moe.out = mixed_;
  if (e.spread) {
    if (e.copy_begins != nullptr) {
      const std::int64_t topk = e.router.topk;
      for (std::int64_t i = 0; i < count_ * topk; ++i) own_ids_[i] = e.place(ids_[i], s_.rows_done + first_ + i / topk);
      moe.ids = own_ids_;
    } else {
      moe.slices = m_.exchange;
    }
    moe.out_type = DType::kF32;
    moe.out = sums_;
  }
  s_.experts.plan(k_, moe, threads_);
}

void Decoder::Round::round_logits(const Router& router, std::int64_t first, std::int64_t last) {
  if (router.logits == DType::kF32) return;
  const std::int64_t experts = router.weight.columns;
  std::uint16_t rounded[64];
  for (std::int64_t i = first * experts; i < last * experts; i += 64) {
    const std::int64_t some = std::min<std::int64_t>(64, last * experts - i);
    k_.store_row(logits_ + i, some, router.logits, rounded);
    k_.load_row(rounded, router.logits, static_cast<int>(some), logits_ + i);
  }
}

}  // namespace cpumoe
