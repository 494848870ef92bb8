#include "route.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "memory.h"
#include "threads.h"

namespace cpumoe {
namespace {

// Larger first, NaN above everything (as torch.topk has it), ties to the lower index.
bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

class TokenRouter {
 public:
  TokenRouter(const Kernels& kernels, const RouteCall& call)
      : k_(kernels), c_(call), experts_(static_cast<int>(call.experts)) {
    scores_.resize(static_cast<std::size_t>(experts_ + 32));
    choice_.resize(static_cast<std::size_t>(experts_));
    group_open_.resize(static_cast<std::size_t>(std::max<std::int64_t>(call.groups, 1)));
    group_worth_.resize(group_open_.size());
    chosen_.resize(static_cast<std::size_t>(call.topk + 32));
    room_.resize(chosen_.size());  // scoring works in whole vectors
  }

  void route_token(std::int64_t token) {
    const std::int64_t element = c_.type == DType::kF32 ? 4 : 2;
    const auto* logits = static_cast<const std::uint8_t*>(c_.logits) + token * c_.experts * element;
    k_.score(logits, c_.type, experts_, c_.score_chosen ? Scoring::kNone : c_.scoring, scores_.data());
    for (int e = 0; e < experts_; ++e) {
      const float bias = c_.bias == nullptr ? 0.0f : c_.bias[e];
      choice_[static_cast<std::size_t>(e)] = scores_[static_cast<std::size_t>(e)] + bias;
    }
    if (c_.groups > 1) close_groups();
    std::int32_t* ids = c_.ids + token * c_.topk;
    float* weights = c_.weights + token * c_.topk;
    choose(ids);
    for (std::int64_t i = 0; i < c_.topk; ++i)
      chosen_[static_cast<std::size_t>(i)] = scores_[static_cast<std::size_t>(ids[i])];
    if (c_.score_chosen) {
      k_.score(chosen_.data(), DType::kF32, static_cast<int>(c_.topk), c_.scoring, room_.data());
      std::copy_n(room_.data(), c_.topk, weights);
    } else {
      std::copy_n(chosen_.data(), c_.topk, weights);
    }
    if (c_.renormalize) {
      float sum = 0.0f;
      for (std::int64_t i = 0; i < c_.topk; ++i) sum += weights[i];
      for (std::int64_t i = 0; i < c_.topk; ++i) weights[i] /= sum;
    }
    for (std::int64_t i = 0; i < c_.topk; ++i) weights[i] *= c_.scale;
  }

 private:
  int group_size() const { return experts_ / static_cast<int>(c_.groups); }

  // A group is worth its best expert or, with a bias, the sum of its two best.
  float group_score(int group) const {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int e = group * group_size(); e < (group + 1) * group_size(); ++e) {
      const float value = choice_[static_cast<std::size_t>(e)];
      if (better(value, first)) {
        second = first;
        first = value;
      } else if (better(value, second)) {
        second = value;
      }
    }
    return c_.bias != nullptr && group_size() > 1 ? first + second : first;
  }

  void close_groups() {
    const int groups = static_cast<int>(c_.groups);
    std::vector<float>& worth = group_worth_;
    for (int g = 0; g < groups; ++g) worth[static_cast<std::size_t>(g)] = group_score(g);
    std::fill(group_open_.begin(), group_open_.end(), char{0});
    for (std::int64_t i = 0; i < c_.topk_groups; ++i) {
      int best = -1;
      for (int g = 0; g < groups; ++g) {
        if (group_open_[static_cast<std::size_t>(g)] != 0) continue;
        if (best < 0 || better(worth[static_cast<std::size_t>(g)], worth[static_cast<std::size_t>(best)])) best = g;
      }
      group_open_[static_cast<std::size_t>(best)] = 1;
    }
  }

  bool open(int expert) const {
    return c_.groups <= 1 || group_open_[static_cast<std::size_t>(expert / group_size())] != 0;
  }

  // Insertion into a sorted list: topk is small against the number of experts, and most experts fail the first test.
  void choose(std::int32_t* ids) const {
    std::int64_t count = 0;
    for (int e = 0; e < experts_; ++e) {
      if (!open(e)) continue;
      const float value = choice_[static_cast<std::size_t>(e)];
      if (count == c_.topk && !better(value, choice_[static_cast<std::size_t>(ids[count - 1])])) continue;
      std::int64_t at = count < c_.topk ? count++ : count - 1;
      for (; at > 0 && better(value, choice_[static_cast<std::size_t>(ids[at - 1])]); --at) ids[at] = ids[at - 1];
      ids[at] = e;
    }
  }

  const Kernels& k_;
  const RouteCall& c_;
  int experts_;
  std::vector<float> scores_, choice_, chosen_, room_, group_worth_;
  std::vector<char> group_open_;
};

}  // namespace

void router_logits(const Kernels& k, const LogitsCall& c) {
  if (c.tokens * c.experts == 0) return;
  constexpr std::int64_t kExpertsAtOnce = 16;  // of one work item
  static thread_local Buffer query_buffer, logits_buffer;
  auto* query = query_buffer.get<float>(c.tokens * c.depth + 32);
  auto* logits = logits_buffer.get<float>(c.tokens * c.experts);
  const std::int64_t element = c.type == DType::kF32 ? 4 : 2;
  for (std::int64_t t = 0; t < c.tokens; ++t) {  // ascending: a row's last vector may reach into the next
    k.score(static_cast<const std::uint8_t*>(c.x) + t * c.depth * element, c.type, static_cast<int>(c.depth),
            Scoring::kNone, query + t * c.depth);
  }
  const std::int64_t items = (c.experts + kExpertsAtOnce - 1) / kExpertsAtOnce;
  std::atomic<std::int64_t> next{0};
  run_on_threads(static_cast<int>(std::min<std::int64_t>(thread_count(), items)), [&](Worker&) {
    for (std::int64_t i = next.fetch_add(1); i < items; i = next.fetch_add(1)) {
      const std::int64_t first = i * kExpertsAtOnce;
      k.dot_rows({query, static_cast<int>(c.tokens), c.depth, c.weight, c.type, c.depth, first,
                  std::min(first + kExpertsAtOnce, c.experts), logits, c.experts});
    }
  });
  if (c.bias != nullptr) {
    for (std::int64_t i = 0; i < c.tokens * c.experts; ++i) logits[i] += c.bias[i % c.experts];
  }
  k.store_row(logits, c.tokens * c.experts, c.logits_type, c.logits);
}

void route(const Kernels& kernels, const RouteCall& call) {
  require(call.experts >= 1 && call.experts <= 65536, "router_logits have ", call.experts,
          " experts; 1 to 65536 are accepted");
  require(call.topk >= 1 && call.topk <= call.experts, "topk=", call.topk, "; 1 to ", call.experts, " are accepted");
  require(call.groups >= 0 && (call.groups <= 1 || call.experts % call.groups == 0), "num_expert_group=", call.groups,
          " does not divide ", call.experts, " experts");
  require(call.groups <= 1 || (call.topk_groups >= 1 && call.topk_groups <= call.groups),
          "topk_group=", call.topk_groups, "; 1 to ", call.groups, " are accepted");
  require(call.groups <= 1 || call.topk <= call.topk_groups * (call.experts / call.groups), "topk=", call.topk,
          ", but ", call.topk_groups, " groups hold only ",
          call.topk_groups * (call.experts / std::max<std::int64_t>(call.groups, 1)), " experts");
  // A token costs a microsecond or two: waking threads pays only for many.
  const int threads = call.tokens >= 64 ? thread_count() : 1;
  std::vector<TokenRouter> routers(static_cast<std::size_t>(threads), TokenRouter(kernels, call));
  run_on_threads(threads, [&](Worker& worker) {
    TokenRouter& router = routers[static_cast<std::size_t>(worker.index)];
    const std::int64_t first = call.tokens * worker.index / worker.count;
    const std::int64_t last = call.tokens * (worker.index + 1) / worker.count;
    for (std::int64_t t = first; t < last; ++t) router.route_token(t);
  });
}

}  // namespace cpumoe
