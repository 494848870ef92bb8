#include "ops/routing.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/check.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

// Scores with a smaller sum lose bits to underflow: the smallest normal number, 2^-126, is 2^-36 of this one.
constexpr float kSmallestSum = 0x1p-90f;

// Larger first, NaN above everything (as torch.topk has it).
bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

class TokenRouter {
 public:
  TokenRouter(const Kernels& kernels, const RouteCall& call)
      : k_(kernels), c_(call), experts_(static_cast<int>(call.experts)) {
    scores_.resize(static_cast<std::size_t>(experts_ + 32));  // scoring works in whole vectors
    if (call.type != DType::kF32) converted_.resize(scores_.size());
    choice_.resize(static_cast<std::size_t>(experts_));
    group_open_.resize(static_cast<std::size_t>(std::max<std::int64_t>(call.groups, 1)));
    groups_.resize(group_open_.size());
    chosen_.resize(static_cast<std::size_t>(call.topk + 32));
  }

  void route_token(std::int64_t token) {
    if (c_.type == DType::kF32) {
      logits_ = static_cast<const float*>(c_.logits) + token * c_.experts;
    } else {
      const auto* logits = static_cast<const std::uint16_t*>(c_.logits) + token * c_.experts;
      k_.load_row(logits, c_.type, experts_, converted_.data());
      logits_ = converted_.data();
    }
    std::copy_n(logits_, experts_, scores_.data());
    if (!c_.score_chosen) k_.score(scores_.data(), experts_, c_.scoring);
    for (int e = 0; e < experts_; ++e) {
      const float bias = c_.bias == nullptr ? 0.0f : c_.bias[e];
      choice_[static_cast<std::size_t>(e)] = scores_[static_cast<std::size_t>(e)] + bias;
    }
    if (c_.groups > 1) close_groups();
    std::int32_t* ids = c_.ids + token * c_.topk;
    float* weights = c_.weights + token * c_.topk;
    choose(ids);
    if (c_.score_chosen) {
      score_chosen(ids, 1.0f, c_.scoring, weights);
    } else {
      for (std::int64_t i = 0; i < c_.topk; ++i) weights[i] = scores_[static_cast<std::size_t>(ids[i])];
    }
    if (c_.renormalize) renormalize(ids, weights);
    for (std::int64_t i = 0; i < c_.topk; ++i) weights[i] *= c_.scale;
  }

 private:
  struct Group {
    float worth;
    int best;  // expert
  };

  // weights[i] = the scoring of the i-th chosen expert's logit times `factor`, among the chosen.
  void score_chosen(const std::int32_t* ids, float factor, Scoring scoring, float* weights) {
    for (std::int64_t i = 0; i < c_.topk; ++i) {
      chosen_[static_cast<std::size_t>(i)] = logits_[ids[i]] * factor;
    }
    k_.score(chosen_.data(), static_cast<int>(c_.topk), scoring);
    std::copy_n(chosen_.data(), c_.topk, weights);
  }

  void renormalize(const std::int32_t* ids, float* weights) {
    float sum = 0.0f;
    for (std::int64_t i = 0; i < c_.topk; ++i) sum += weights[i];
    if (sum < kSmallestSum && c_.scoring != Scoring::kNone) {
      // So small a score is e^x but for a common factor, or e^(x/2) with sqrt_softplus: what is left after the division
      // is a softmax of the chosen, which does not underflow.
      return score_chosen(ids, c_.scoring == Scoring::kSqrtSoftplus ? 0.5f : 1.0f, Scoring::kSoftmax, weights);
    }
    for (std::int64_t i = 0; i < c_.topk; ++i) weights[i] /= sum;
  }

  // Whether expert a comes before b. Every scoring rises with its logit, so that the logits have an order where scores
  // are equal because they are rounded or have underflowed; equal logits leave the lower id first.
  bool before(int a, int b) const {
    const float x = choice_[static_cast<std::size_t>(a)], y = choice_[static_cast<std::size_t>(b)];
    return better(x, y) || (x == y && logits_[a] > logits_[b]);
  }

  int group_size() const { return experts_ / static_cast<int>(c_.groups); }

  // A group is worth its best expert or, with a bias, the sum of its two best.
  Group group_of(int group) const {
    const int first = group * group_size();
    int best = first, second = -1;
    for (int e = first + 1; e < first + group_size(); ++e) {
      if (second >= 0 && choice_[static_cast<std::size_t>(e)] < choice_[static_cast<std::size_t>(second)]) continue;
      if (before(e, best)) {
        second = best;
        best = e;
      } else if (second < 0 || before(e, second)) {
        second = e;
      }
    }
    const float worth = choice_[static_cast<std::size_t>(best)];
    return {c_.bias != nullptr && second >= 0 ? worth + choice_[static_cast<std::size_t>(second)] : worth, best};
  }

  void close_groups() {
    const auto groups = groups_.size();
    for (std::size_t g = 0; g < groups; ++g) groups_[g] = group_of(static_cast<int>(g));
    std::fill(group_open_.begin(), group_open_.end(), char{0});
    for (std::int64_t i = 0; i < c_.topk_groups; ++i) {
      std::size_t best = groups;
      for (std::size_t g = 0; g < groups; ++g) {
        if (group_open_[g] == 0 && (best == groups || group_before(groups_[g], groups_[best]))) best = g;
      }
      group_open_[best] = 1;
    }
  }

  bool group_before(const Group& a, const Group& b) const {
    return better(a.worth, b.worth) || (a.worth == b.worth && before(a.best, b.best));
  }

  bool open(int expert) const {
    return c_.groups <= 1 || group_open_[static_cast<std::size_t>(expert / group_size())] != 0;
  }

  // Insertion into a sorted list: topk is small against the number of experts, and most experts fail the first test.
  void choose(std::int32_t* ids) const {
    std::int64_t count = 0;
    for (int e = 0; e < experts_; ++e) {
      if (!open(e)) continue;
      if (count == c_.topk) {
        const auto last = static_cast<std::size_t>(ids[count - 1]);
        if (choice_[static_cast<std::size_t>(e)] < choice_[last] || !before(e, ids[count - 1])) continue;
      }
      std::int64_t at = count < c_.topk ? count++ : count - 1;
      for (; at > 0 && before(e, ids[at - 1]); --at) ids[at] = ids[at - 1];
      ids[at] = e;
    }
  }

  const Kernels& k_;
  const RouteCall& c_;
  int experts_;
  const float* logits_ = nullptr;  // of the token being routed
  std::vector<float> converted_, scores_, choice_, chosen_;
  std::vector<Group> groups_;
  std::vector<char> group_open_;
};

}  // namespace

void check_routing(const RouteCall& call) {
  CPUMOE_REQUIRE(call.experts >= 1 && call.experts <= 65536, "router_logits have ", call.experts,
                 " experts; 1 to 65536 are accepted");
  CPUMOE_REQUIRE(call.topk >= 1 && call.topk <= call.experts, "topk=", call.topk, "; 1 to ", call.experts,
                 " are accepted");
  CPUMOE_REQUIRE(call.groups >= 0 && (call.groups <= 1 || call.experts % call.groups == 0),
                 "num_expert_group=", call.groups, " does not divide ", call.experts, " experts");
  if (call.groups > 1) {
    CPUMOE_REQUIRE(call.topk_groups >= 1 && call.topk_groups <= call.groups, "topk_group=", call.topk_groups, "; 1 to ",
                   call.groups, " are accepted");
    const std::int64_t held = call.topk_groups * (call.experts / call.groups);  // at most all experts
    CPUMOE_REQUIRE(call.topk <= held, "topk=", call.topk, ", but ", call.topk_groups, " groups hold only ", held,
                   " experts");
  } else {
    CPUMOE_REQUIRE(call.topk_groups >= 0 && call.topk_groups <= call.groups, "topk_group=", call.topk_groups,
                   " with num_expert_group=", call.groups, "; no more than there are groups is accepted");
  }
}

void route_tokens(const Kernels& kernels, const RouteCall& call, std::int64_t first, std::int64_t last) {
  if (first >= last) return;
  TokenRouter router(kernels, call);
  for (std::int64_t t = first; t < last; ++t) router.route_token(t);
}

void route(const Kernels& kernels, const RouteCall& call) {
  check_routing(call);
  // A token costs a microsecond or two: waking threads pays only for many.
  const int threads = call.tokens >= 64 ? thread_count() : 1;
  run_on_threads(threads, [&](Worker& worker) {
    route_tokens(kernels, call, worker.share(call.tokens), worker.next_share(call.tokens));
  });
}

}  // namespace cpumoe
