// Expert parallelism: rows that experts on other ranks compute, and sums of all ranks.
#include <numeric>

#include "decoder/step.h"

namespace cpumoe {

void Step::add_sums(Worker& worker) {
  if (worker.index == 0) m_.exchange->sum(sums_, count_ * hidden_);
  end_stage(worker, StepPart::kExchange);
  each_row(worker, [&](std::int64_t r) { k_.store_row(sums_ + r * hidden_, hidden_, type_, row(mixed_, r)); });
}

RowShare Step::share_of(int rank) const { return {counts_[static_cast<std::size_t>(rank)], rank, m_.group_ranks()}; }

void Step::plan_traffic(const RoutedExperts& e) {
  w_.shares.clear();
  for (int r = 0; r < m_.ranks(); ++r) w_.shares.push_back(share_of(r).count());
  w_.traffic.plan(k_, chosen_rows(e).part(share_of(m_.exchange->rank())), *m_.exchange, w_.shares.data());
}

void Step::receive_rows(Worker& worker, const RoutedExperts& e) {
  RowTraffic& traffic = w_.traffic;
  if (worker.index == 0) plan_traffic(e);
  if (std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0}) <= kFewRows) {
    if (worker.index != 0) return;
    traffic.pack(0, traffic.entries());
    note_time(StepPart::kRouting);
    traffic.send();
    note_time(StepPart::kExchange);
    traffic.unpack(0, traffic.received());
    traffic.find_places();
    return;
  }
  worker.barrier->wait();
  traffic.pack(worker.share(traffic.entries()), worker.next_share(traffic.entries()));
  end_stage(worker, StepPart::kRouting);
  if (worker.index == 0) traffic.send();
  end_stage(worker, StepPart::kExchange);
  traffic.unpack(worker.share(traffic.received()), worker.next_share(traffic.received()));
  worker.barrier->wait();
  if (worker.index == 0) traffic.find_places();
}

void Step::return_sums(Worker& worker) {
  if (worker.index == 0) w_.traffic.send_back();
  end_stage(worker, StepPart::kExchange);
  const std::int64_t count = share_of(m_.exchange->rank()).count(), row_bytes = hidden_ * size_of(type_);
  for (std::int64_t r = worker.share(count); r < worker.next_share(count); ++r) {
    float* values = values_of(worker);
    w_.traffic.add(r, values);
    k_.store_row(values, hidden_, type_, row(share_rows_, r));
  }
  if (share_rows_ == mixed_ || count_ == 0) return;
  end_stage(worker, StepPart::kRows);
  if (worker.index == 0) gather_shares(*m_.group, count_, row_bytes, share_rows_, mixed_);
  end_stage(worker, StepPart::kExchange);
}

void Step::serve_others(Worker& worker) {
  for (const DecoderLayer& layer : m_.layers) {
    if (!layer.experts.has_value() || layer.experts->travel == RowTravel::kStay) continue;
    choose_experts(worker, *layer.experts);
    end_stage(worker, StepPart::kRouting);
    run_experts(worker, *layer.experts);
  }
}

}  // namespace cpumoe
