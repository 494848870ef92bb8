#include "decoder/decoder.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>

#include "decoder/check.h"
#include "decoder/step.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

// Rows up to which threads meet so often that all wait for one that shares its core. In prompts there is more to do
// between barriers, and it is shared out as threads come: even a slow one is a help.
constexpr std::int64_t kCrowdedRows = 64;

// Bytes that a step of so many rows reads, at most; for the number of threads.
std::int64_t work_of(const DecoderModel& model, std::int64_t rows) {
  std::int64_t bytes = model.head.bytes();
  for (const DecoderLayer& layer : model.layers) {
    const AttentionPart& a = layer.attention;
    if (a.latent.has_value()) {
      bytes += a.latent->down.bytes() + a.latent->latent.bytes() +
               a.heads * (a.latent->nope + a.value_depth) * a.latent->rank * size_of(model.type);
    }
    bytes += a.query.bytes() + a.key.bytes() + a.value.bytes() + a.out.bytes() + a.gate.bytes();
    if (layer.delta.has_value()) {
      for (const Matrix& m : layer.delta->projections) bytes += m.bytes();
      for (const DeltaPart::Expansion& e : layer.delta->expansions) bytes += e.matrix.bytes();
      bytes += layer.delta->out.bytes() + layer.delta->rule.state_size() * static_cast<std::int64_t>(sizeof(float));
    }
    if (layer.convolution.has_value()) bytes += layer.convolution->projection.bytes() + layer.convolution->out.bytes();
    if (layer.experts.has_value()) {
      const std::int64_t experts = std::min(rows * layer.experts->router.topk, layer.experts->gate_up.spec.experts);
      bytes += (layer.experts->gate_up.expert_bytes + layer.experts->down.expert_bytes) * experts;
    }
    if (layer.dense.has_value()) {
      bytes += layer.dense->gate.bytes() + layer.dense->up.bytes() + layer.dense->down.bytes();
    }
  }
  return bytes;
}

}  // namespace

Decoder::Decoder(DecoderModel model) : state_(std::make_unique<State>()) {
  check_model(model);
  state_->most_rows = 4096;
  for (const DecoderLayer& layer : model.layers) {
    if (!layer.experts.has_value()) continue;
    const RoutedExperts& e = *layer.experts;
    // Slices may be of different sizes, and a rank without experts does not know any.
    const bool unequal = e.spread && (e.copy_begins == nullptr || e.router.weight.columns < model.exchange->ranks());
    state_->most_rows = std::min(state_->most_rows, unequal ? kSpreadTokens : tokens_at_once(e.down, e.router.topk));
  }
  // The experts of a round have the rows of all groups.
  state_->most_rows = std::max<std::int64_t>(1, state_->most_rows * model.group_ranks() / model.ranks());
  state_->model = std::move(model);
}

Decoder::~Decoder() = default;

const DecoderModel& Decoder::model() const { return state_->model; }

std::vector<std::int64_t> Decoder::rows_of_ranks(const Step& step) const {
  const DecoderModel& model = state_->model;
  const auto rows = static_cast<std::int64_t>(step.rows.size());
  std::vector<std::int64_t> found(static_cast<std::size_t>(model.ranks()), rows);
  if (!model.has_own_rows()) {
    check_step(model, step);
    return found;
  }
  // A rank that refuses its rows says so: the others would wait for it.
  std::exception_ptr problem;
  try {
    check_step(model, step);
  } catch (...) {
    problem = std::current_exception();
  }
  const std::int64_t mine = problem == nullptr ? rows : -1;
  model.exchange->gather(&mine, sizeof(mine), found.data());
  if (problem != nullptr) std::rethrow_exception(problem);
  model.exchange->rethrow();
  for (std::size_t r = 0; r < found.size(); ++r) CPUMOE_REQUIRE(found[r] >= 0, "rank ", r, " has refused its rows");
  return found;
}

std::int64_t Decoder::step(const Kernels& kernels, const Step& step) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const DecoderModel& model = state_->model;
  const std::vector<std::int64_t> rows = rows_of_ranks(step);
  const std::int64_t all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) / model.group_ranks();
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  if (step.clears_states) clear_states(step);
  const int wanted = threads_for(work_of(model, most));
  std::vector<std::int64_t> counts(rows.size());
  for (std::int64_t first = 0; first < most; first += state_->most_rows) {
    std::transform(rows.begin(), rows.end(), counts.begin(),
                   [&](std::int64_t count) { return std::clamp<std::int64_t>(count - first, 0, state_->most_rows); });
    const bool few = most <= kCrowdedRows;
    const int threads = few ? state_->crowding.threads(wanted) : wanted;
    Round round(kernels, step, *state_, first, counts, threads);
    if (few) {
      state_->crowding.run(threads, [&](Worker& worker) { round.run(worker); });
    } else {
      run_on_threads(threads, [&](Worker& worker) { round.run(worker); });
    }
    for (const RankExchange* exchange : {model.exchange, model.group}) {
      if (exchange != nullptr) exchange->rethrow();
    }
  }
  state_->rows_done += static_cast<std::int64_t>(step.rows.size());
  return all;
}

void Decoder::clear_states(const Step& step) const {
  for (const StepRow& row : step.rows) {
    if (row.place != 0) continue;
    for (std::size_t i = 0; i < step.caches.size(); ++i) {
      const LayerCache& cache = step.caches[i];
      if (cache.conv_state == nullptr) continue;
      const DecoderLayer& layer = state_->model.layers[i];
      if (layer.delta.has_value()) {
        const std::int64_t values = layer.delta->rule.state_size();
        std::fill_n(cache.state + row.sequence * values, values, 0.0f);
      }
      const std::int64_t size = layer.state_convolution()->state_size();
      std::memset(at(cache.conv_state, row.sequence * size, state_->model.type), 0,
                  static_cast<std::size_t>(size * size_of(state_->model.type)));
    }
  }
}

void Decoder::take_seconds(double (&seconds)[kStepParts]) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::copy(std::begin(state_->seconds), std::end(state_->seconds), seconds);
  std::fill(std::begin(state_->seconds), std::end(state_->seconds), 0.0);
}

}  // namespace cpumoe
