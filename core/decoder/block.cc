#include "decoder/step.h"

#include <algorithm>

#include "ops/routing.h"

namespace cpumoe {

void Step::plan_dense(const DenseBlock& d) {
  const std::int64_t inner = d.down.depth;
  MatrixOut outs[3];
  int count = 0;
  outs[count++] = {&d.up, d.has_both() ? dense_in_ : at(dense_in_, inner, type_), 2 * inner, type_};
  if (d.gate) outs[count++] = {&d.gate, dense_in_, 2 * inner, type_};
  if (d.share) outs[count++] = {&d.share, share_, 1, DType::kF32};
  w_.dense_first.plan(k_, outs, count, normed_, type_, count_, threads_, m_.group);
  const MatrixOut down{&d.down, dense_out_, hidden_, type_};
  w_.dense_second.plan(k_, &down, 1, dense_hidden_, type_, count_, threads_, m_.group);
}

void Step::run_block(Worker& worker, const DecoderLayer& layer) {
  if (layer.experts.has_value()) w_.router.prepare(worker);
  if (layer.dense.has_value()) w_.dense_first.prepare(worker);
  end_stage(worker, StepPart::kRows);
  if (layer.experts.has_value()) {
    w_.router.multiply(worker);
    if (!layer.dense.has_value()) end_stage(worker, StepPart::kRouting);
  }
  if (layer.dense.has_value()) {
    multiply(worker, w_.dense_first);
    activate(worker, *layer.dense);
    w_.dense_second.prepare(worker);
  }
  if (layer.experts.has_value()) choose_experts(worker, *layer.experts);
  if (layer.dense.has_value()) {
    end_stage(worker, StepPart::kRows);
    w_.dense_second.multiply(worker);
  }
  end_stage(worker, layer.dense.has_value() ? StepPart::kProducts : StepPart::kRouting);
  if (layer.dense.has_value() && w_.dense_second.is_split()) {
    w_.dense_second.gather(worker);
    end_stage(worker, StepPart::kExchange);
  }
  if (layer.experts.has_value()) run_experts(worker, *layer.experts);
}

void Step::run_experts(Worker& worker, const RoutedExperts& e) {
  if (computes_experts_) w_.experts.run(worker);
  end_stage(worker, StepPart::kExperts);
  if (e.travel != RowTravel::kStay) {
    return_sums(worker);
  } else if (e.spread) {
    add_sums(worker);
  }
}

void Step::activate(const Worker& worker, const DenseBlock& d) {
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

void Step::choose_experts(Worker& worker, const RoutedExperts& e) {
  const RouteCall call = e.router.call(count_, logits_, ids_, weights_);
  if (count_ > kFewRows) {
    round_logits(e.router, worker.share(count_), worker.next_share(count_));
    route_tokens(k_, call, worker.share(count_), worker.next_share(count_));
    worker.barrier->wait();
  } else if (worker.index == 0) {
    round_logits(e.router, 0, count_);
    route_tokens(k_, call, 0, count_);
  }
  if (worker.index == 0) e.count_loads(ids_, count_ * e.router.topk);
  if (e.travel != RowTravel::kStay) receive_rows(worker, e);
  if (worker.index == 0) plan_experts(e);
}

ChosenRows Step::chosen_rows(const RoutedExperts& e) const {
  return {&e, normed_, type_, hidden_, count_, e.router.topk, ids_, weights_, w_.rows_done + first_};
}

void Step::plan_experts(const RoutedExperts& e) {
  const bool travels = e.travel != RowTravel::kStay;
  MoeCall moe = travels ? w_.traffic.call() : chosen_rows(e).call(own_ids_, m_.exchange);
  if (!travels) moe.out = e.spread ? sums_ : static_cast<void*>(mixed_);
  if (!e.spread) moe.out_type = type_;
  computes_experts_ = e.are_here() && moe.tokens > 0;
  if (computes_experts_) {
    w_.experts.plan(k_, moe, threads_);
  } else {
    std::fill_n(static_cast<float*>(moe.out), moe.tokens * hidden_, 0.0f);
  }
}

void Step::round_logits(const Router& router, std::int64_t first, std::int64_t last) {
  if (router.in_fp32 || type_ == DType::kF32) return;
  const std::int64_t experts = router.weight.columns;
  std::uint16_t rounded[64];
  for (std::int64_t i = first * experts; i < last * experts; i += 64) {
    const std::int64_t some = std::min<std::int64_t>(64, last * experts - i);
    k_.store_row(logits_ + i, some, type_, rounded);
    k_.load_row(rounded, type_, static_cast<int>(some), logits_ + i);
  }
}

}  // namespace cpumoe
