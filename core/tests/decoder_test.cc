// The decoder: one model that several threads call at once, each with a KV cache of its own.
#include "decoder/decoder.h"

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tests/matrices.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

constexpr std::int64_t kHidden = 64, kHeads = 4, kKvHeads = 2, kDepth = 16, kInner = 32, kExperts = 6, kVocabulary = 50;
constexpr std::int64_t kRoom = 64;  // tokens that a cache has room for

// A decoder with grouped-query attention, RoPE and routed experts, and the tensors that it reads.
class TinyDecoder {
 public:
  TinyDecoder() : experts_(make_layer(kHidden, kInner, kExperts, 32, "int4", true, false)) {
    DecoderModel model;
    model.embedding = tensor(kVocabulary, kHidden);
    model.rope.push_back({tensor(kRoom, kDepth), tensor(kRoom, kDepth)});
    for (int i = 0; i < 2; ++i) model.layers.push_back(make_decoder_layer());
    model.norm = norm(kHidden);
    model.head = matrix(kVocabulary, kHidden);
    decoder_.emplace(std::move(model));
  }

  // Logits of a prompt and of the tokens after it, one step each, with a new cache.
  std::vector<float> generate(const std::vector<std::int64_t>& prompt, int steps) {
    const std::size_t layers = decoder_->model().layers.size();
    std::vector<std::vector<float>> caches(2 * layers, std::vector<float>(kKvHeads * kRoom * kDepth));
    std::vector<float> all;
    std::vector<std::int64_t> tokens = prompt;
    std::int64_t past = 0;
    for (int s = 0; s < steps; ++s) {
      StepInput step;
      step.tokens = tokens.data();
      step.seen = {0};
      const auto count = static_cast<std::int64_t>(tokens.size());
      for (std::int64_t t = 0; t < count; ++t) step.rows.push_back({0, past + t, past + t});
      for (std::size_t i = 0; i < layers; ++i) {
        LayerCache cache{};
        cache.tokens[0] = {caches[2 * i].data(), kKvHeads * kRoom * kDepth, kRoom * kDepth, kDepth};
        cache.tokens[1] = {caches[2 * i + 1].data(), kKvHeads * kRoom * kDepth, kRoom * kDepth, kDepth};
        cache.places = kRoom;
        step.caches.push_back(cache);
      }
      step.wanted = {count - 1};
      std::vector<float> logits(kVocabulary);
      step.logits_out = logits.data();
      decoder_->step(active_kernels(), step);
      all.insert(all.end(), logits.begin(), logits.end());
      past += count;
      tokens = {std::max_element(logits.begin(), logits.end()) - logits.begin()};
    }
    return all;
  }

 private:
  const float* floats(std::int64_t count) {
    tensors_.push_back(random_values(static_cast<std::size_t>(count), static_cast<unsigned>(211 + tensors_.size())));
    for (float& v : tensors_.back()) v *= 0.3f;
    return tensors_.back().data();
  }

  Tensor tensor(std::int64_t rows, std::int64_t columns) {
    return {floats(rows * columns), DType::kF32, {rows, columns}, 2};
  }

  Norm norm(std::int64_t width) { return {{floats(width), static_cast<std::size_t>(width)}, 1e-6f}; }

  cpumoe::Matrix matrix(std::int64_t columns, std::int64_t depth) {
    cpumoe::Matrix m;
    m.floats = floats(columns * depth);
    m.columns = columns;
    m.depth = depth;
    return m;
  }

  DecoderLayer make_decoder_layer() {
    DecoderLayer layer;
    layer.before_mixer = norm(kHidden);
    layer.before_block = norm(kHidden);
    Gqa& a = layer.mixer.emplace<Gqa>();
    a.heads = kHeads;
    a.kv_heads = kKvHeads;
    a.head_dim = a.value_dim = kDepth;
    a.query = matrix(kHeads * kDepth, kHidden);
    a.key = matrix(kKvHeads * kDepth, kHidden);
    a.value = matrix(kKvHeads * kDepth, kHidden);
    a.out = matrix(kHidden, kHeads * kDepth);
    a.rope.table = 0;
    a.scale = 0.25f;
    layer.experts.emplace();
    layer.experts->router.weight = matrix(kExperts, kHidden);
    layer.experts->router.topk = 2;
    layer.experts->gate_up = experts_.gate_up.packed;
    layer.experts->down = experts_.down.packed;
    return layer;
  }

  Layer experts_;
  std::vector<std::vector<float>> tensors_;
  std::optional<Decoder> decoder_;
};

}  // namespace

// Threads that call one decoder at the same time get the logits that each gets alone. Prompts have different lengths,
// so that each call needs other buffers and plans than the one before.
void test_decoder_callers() {
  TinyDecoder decoder;
  const std::vector<std::size_t> lengths = {1, 3, 20, 37};
  std::vector<std::vector<std::int64_t>> prompts;
  std::vector<std::vector<float>> expected;
  Random random(223);
  for (const std::size_t length : lengths) {
    prompts.emplace_back();
    for (std::size_t i = 0; i < length; ++i) prompts.back().push_back(random.integer(0, kVocabulary - 1));
    expected.push_back(decoder.generate(prompts.back(), 6));
  }
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (std::size_t c = 0; c < lengths.size(); ++c) {
    callers.emplace_back([&, c] {
      for (int i = 0; i < 20; ++i) {
        const std::size_t prompt = (c + static_cast<std::size_t>(i)) % lengths.size();
        if (decoder.generate(prompts[prompt], 6) != expected[prompt]) wrong.fetch_add(1);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  check(wrong.load() == 0, "threads that call one decoder get the logits of one caller, " +
                               std::to_string(wrong.load()) + " of 80 did not");
}

}  // namespace cpumoe::tests
