// Expert parallelism: rows that experts on other ranks compute, and sums of all ranks.
#include <algorithm>
#include <numeric>
#include <string>

#include "decoder/step.h"

namespace cpumoe {

void Step::add_sums(Worker& worker) {
  if (worker.index == 0) m_.exchange->sum(sums_, count_ * hidden_);
  end_stage(worker, StepPart::kExchange);
  each_row(worker, [&](std::int64_t r) { k_.store_row(sums_ + r * hidden_, hidden_, type_, row(mixed_, r)); });
}

std::int64_t Step::share_begin(int rank) const {
  const int group = m_.group_ranks();
  return counts_[static_cast<std::size_t>(rank)] * (rank % group) / group;
}

std::int64_t Step::share_end(int rank) const {
  const int group = m_.group_ranks();
  return counts_[static_cast<std::size_t>(rank)] * (rank % group + 1) / group;
}

void Step::plan_traffic(const RoutedExperts& e) {
  const int rank = m_.exchange->rank();
  const std::int64_t topk = e.router.topk, first = share_begin(rank), count = share_end(rank) - first;
  w_.shares.resize(counts_.size());
  for (int r = 0; r < m_.ranks(); ++r) w_.shares[static_cast<std::size_t>(r)] = share_end(r) - share_begin(r);
  auto* copies = w_.traffic_copies.get<std::int32_t>(count * topk);
  for (std::int64_t i = 0; i < count * topk; ++i) {
    copies[i] = e.copy(ids_[first * topk + i], w_.rows_done + first_ + first + i / topk);
  }
  RowSending sending{};
  sending.travel = e.travel;
  sending.x = row(normed_, first);
  sending.type = type_;
  sending.width = hidden_;
  sending.count = count;
  sending.topk = topk;
  sending.copies = copies;
  sending.weights = weights_ + first * topk;
  sending.first = e.prepared_rows ? &e.gate_up : nullptr;
  sending.owners = e.copies.has_value() ? e.copies->ranks.data() : nullptr;
  sending.other_counts = w_.shares.data();
  w_.traffic.plan(k_, sending, *m_.exchange);
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
    find_places(e);
    return;
  }
  worker.barrier->wait();
  traffic.pack(worker.share(traffic.entries()), worker.next_share(traffic.entries()));
  end_stage(worker, StepPart::kRouting);
  if (worker.index == 0) traffic.send();
  end_stage(worker, StepPart::kExchange);
  traffic.unpack(worker.share(traffic.received()), worker.next_share(traffic.received()));
  worker.barrier->wait();
  if (worker.index == 0) find_places(e);
}

void Step::find_places(const RoutedExperts& e) {
  std::int32_t* copies = w_.traffic.copies();
  for (std::int64_t i = 0; i < w_.traffic.received() * e.router.topk; ++i) {
    if (copies[i] == -1) continue;
    if (copies[i] < 0 || copies[i] >= e.copy_count()) {
      m_.exchange->give_up("a row has come that asks for copy " + std::to_string(copies[i]) + " of an expert, of " +
                           std::to_string(e.copy_count()));
      copies[i] = -1;
    } else {
      copies[i] = e.place(copies[i]);
    }
  }
}

void Step::return_sums(Worker& worker) {
  if (worker.index == 0) w_.traffic.send_back();
  end_stage(worker, StepPart::kExchange);
  const int rank = m_.exchange->rank(), group = m_.group_ranks();
  const std::int64_t first = share_begin(rank), count = share_end(rank) - first;
  std::uint8_t* rows = mixed_;
  if (group > 1) rows = w_.share_rows.get<std::uint8_t>(count_ * hidden_ * size_of(type_));
  for (std::int64_t r = worker.share(count); r < worker.next_share(count); ++r) {
    float* values = values_of(worker);
    w_.traffic.add(r, values);
    k_.store_row(values, hidden_, type_, row(rows, r));
  }
  if (group == 1 || count_ == 0) return;
  end_stage(worker, StepPart::kRows);
  if (worker.index == 0) {
    w_.share_begins.assign(1, 0);
    for (int r = rank - rank % group; r < rank - rank % group + group; ++r) {
      w_.share_begins.push_back(share_end(r) * hidden_ * size_of(type_));
    }
    m_.group->gather_parts(rows, w_.share_begins.data(), mixed_);
  }
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
