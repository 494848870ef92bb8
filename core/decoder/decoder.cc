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

// Upper bound of the bytes that a step of `rows` rows reads; for the number of threads.
std::int64_t work_of(const DecoderModel& model, std::int64_t rows) {
  std::int64_t bytes = model.head.bytes();
  for (const DecoderLayer& layer : model.layers) {
    bytes += std::visit([&](const auto& kind) { return sizes_of(kind, model.type(), 0).weight_bytes; }, layer.mixer);
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

struct Decoder::State {
  // Held for a whole step: workspace and plans are those of one step. Only `model` may be read without it.
  std::mutex mutex;
  DecoderModel model;
  std::int64_t max_rows = 4096;  // of a chunk
  std::vector<CacheLayout> cache_layouts;
  Crowding crowding;
  StepWorkspace workspace;
};

Decoder::Decoder(DecoderModel model) : state_(std::make_unique<State>()) {
  check_model(model);
  for (const DecoderLayer& layer : model.layers) {
    if (!layer.experts.has_value()) continue;
    const RoutedExperts& e = *layer.experts;
    state_->max_rows =
        std::min(state_->max_rows, e.is_unequal(model.ranks()) ? kSpreadTokens : tokens_at_once(e.down, e.router.topk));
  }
  // The experts of a round have the rows of all groups.
  state_->max_rows = std::max<std::int64_t>(1, state_->max_rows * model.group_ranks() / model.ranks());
  for (const DecoderLayer& layer : model.layers) {
    state_->cache_layouts.push_back(cache_layout(layer.mixer, model.type()));
  }
  state_->model = std::move(model);
}

Decoder::~Decoder() = default;

const DecoderModel& Decoder::model() const { return state_->model; }

const std::vector<CacheLayout>& Decoder::cache_layouts() const { return state_->cache_layouts; }

std::vector<std::int64_t> Decoder::rows_of_ranks(const StepInput& input) const {
  const DecoderModel& model = state_->model;
  const auto rows = static_cast<std::int64_t>(input.rows.size());
  std::vector<std::int64_t> found(static_cast<std::size_t>(model.ranks()), rows);
  if (!model.has_own_rows()) {
    check_step(model, input);
    return found;
  }
  // A rank that refuses its rows says so: the others would wait for it.
  std::exception_ptr problem;
  try {
    check_step(model, input);
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

std::int64_t Decoder::step(const Kernels& kernels, const StepInput& input) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const DecoderModel& model = state_->model;
  const std::vector<std::int64_t> rows = rows_of_ranks(input);
  const std::int64_t all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) / model.group_ranks();
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  if (input.clears_states) clear_states(input);
  const int wanted = threads_for(work_of(model, most));
  std::vector<std::int64_t> counts(rows.size());
  for (std::int64_t first = 0; first < most; first += state_->max_rows) {
    std::transform(rows.begin(), rows.end(), counts.begin(),
                   [&](std::int64_t count) { return std::clamp<std::int64_t>(count - first, 0, state_->max_rows); });
    const bool few = most <= kCrowdedRows;
    const int threads = few ? state_->crowding.threads(wanted) : wanted;
    Step step(kernels, input, model, state_->workspace, first, counts, threads);
    if (few) {
      state_->crowding.run(threads, [&](Worker& worker) { step.run(worker); });
    } else {
      run_on_threads(threads, [&](Worker& worker) { step.run(worker); });
    }
    if (model.exchange != nullptr && model.group != nullptr) model.exchange->fail_with(*model.group);
    for (const RankExchange* exchange : {model.exchange, model.group}) {
      if (exchange != nullptr) exchange->rethrow();
    }
  }
  state_->workspace.rows_done += static_cast<std::int64_t>(input.rows.size());
  return all;
}

void Decoder::clear_states(const StepInput& input) const {
  for (std::size_t i = 0; i < input.caches.size(); ++i) {
    int state = 0;
    for (const CachePart& part : state_->cache_layouts[i].parts) {
      if (part.per != CachePart::kSequence) continue;
      auto* const data = static_cast<std::uint8_t*>(input.caches[i].states[state++]);
      for (const StepRow& row : input.rows) {
        if (row.place == 0) std::memset(data + row.sequence * part.bytes(), 0, static_cast<std::size_t>(part.bytes()));
      }
    }
  }
}

void Decoder::take_seconds(double (&seconds)[kStepParts]) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::copy(std::begin(state_->workspace.seconds), std::end(state_->workspace.seconds), seconds);
  std::fill(std::begin(state_->workspace.seconds), std::end(state_->workspace.seconds), 0.0);
}

}  // namespace cpumoe
