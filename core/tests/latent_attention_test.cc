// Multi-head latent attention.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/latent_attention.h"
#include "runtime/threads.h"
#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

struct Case {
  std::int64_t batch, heads, queries, tokens, rank, rotary, nope, value_depth;
  bool sunk, room;  // room: tokens and sequences lie apart
  std::int64_t padding = 0;

  std::int64_t depth() const { return nope + rotary; }
};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Numbers of a case, rounded to a type.
struct Numbers {
  Case c;
  DType type;
  std::int64_t latent_width, rotated_width;  // from token to token
  std::vector<float> query, latents, rotated, weight, sinks;
  std::vector<AttentionRow> rows;

  Numbers(const Case& shape, DType dtype)
      : c(shape),
        type(dtype),
        latent_width(c.rank + (c.room ? 3 : 0)),
        rotated_width(c.rotary + (c.room ? 1 : 0)),
        query(rounded(random_values(size(c.batch * c.heads * c.queries * c.depth()), 1))),
        latents(rounded(random_values(size(c.batch * c.tokens * latent_width), 2))),
        rotated(rounded(random_values(size(c.batch * c.tokens * rotated_width), 3))),
        weight(random_values(size(c.heads * (c.nope + c.value_depth) * c.rank), 4, 0.0f)),
        sinks(random_values(size(c.heads), 6)) {
    for (auto& w : weight) w /= std::sqrt(static_cast<float>(c.rank));
    weight = rounded(weight);
    for (std::int64_t r = 0; r < c.batch * c.queries; ++r) {
      const std::int64_t last = c.tokens - c.queries + 1 + r % c.queries;
      rows.push_back({static_cast<std::int32_t>(r / c.queries), std::min(c.padding, last), last});
    }
    if (!c.sunk && c.queries > 1) rows.back().first = rows.back().last;  // sees nothing
  }

  std::vector<std::uint8_t> stored(const std::vector<float>& values) const {
    std::vector<std::uint8_t> bytes(values.size() * size(size_of(type)) + 1);
    scalar().store_row(values.data(), static_cast<std::int64_t>(values.size()), type, bytes.data());
    return bytes;
  }
  std::vector<float> rounded(std::vector<float> values) const {
    scalar().load_row(stored(values).data(), type, static_cast<int>(values.size()), values.data());
    return values;
  }

  std::vector<std::uint8_t> run(const Kernels& k) const {
    const auto q = stored(query), l = stored(latents), r = stored(rotated), w = stored(weight);
    std::vector<std::uint8_t> out(size(c.batch * c.queries * c.heads * c.value_depth * size_of(type)));
    std::vector<CachedSequence> sequences;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::uint8_t* cached = l.data() + b * c.tokens * latent_width * size_of(type);
      sequences.push_back({cached, cached, r.data() + b * c.tokens * rotated_width * size_of(type)});
    }
    LatentAttentionCall call{};
    call.cached.type = type;
    call.cached.rows = c.batch * c.queries;
    call.cached.heads = c.heads;
    call.cached.sequences = sequences.data();
    call.cached.row = rows.data();
    call.cached.key_token_stride = call.cached.value_token_stride = latent_width;
    call.cached.key_end = c.rotary;
    call.cached.key_end_stride = rotated_width;
    call.cached.flushes = true;
    call.cached.scale = 0.3f;
    call.cached.sinks = c.sunk ? sinks.data() : nullptr;
    call.expansion = w.data();
    call.rank = c.rank;
    call.rope_dim = c.rotary;
    call.nope_dim = c.nope;
    call.value_dim = c.value_depth;
    call.out = out.data();
    const std::int64_t of_head = c.queries * c.depth();
    attend_latents(k, call, {q.data(), c.queries, c.heads * of_head, of_head, c.depth()});
    return out;
  }

  // The definition, with keys and values, in double.
  std::vector<float> truth() const {
    std::vector<float> out;
    const auto at = [](const std::vector<float>& values, std::int64_t i) {
      return static_cast<double>(values[size(i)]);
    };
    for (std::size_t index = 0; index < rows.size(); ++index) {
      const std::int64_t b = rows[index].sequence, q = static_cast<std::int64_t>(index) % c.queries;
      const std::int64_t first = rows[index].first, last = rows[index].last;
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto made = [&](std::int64_t t, std::int64_t row) {
          double sum = 0;
          for (std::int64_t r = 0; r < c.rank; ++r) {
            sum += at(latents, (b * c.tokens + t) * latent_width + r) *
                   at(weight, (h * (c.nope + c.value_depth) + row) * c.rank + r);
          }
          return sum;
        };
        std::vector<double> weights(size(c.tokens));
        double total = c.sunk ? std::exp(at(sinks, h)) : 0.0;
        for (std::int64_t t = first; t < last; ++t) {
          const std::int64_t row = ((b * c.heads + h) * c.queries + q) * c.depth();
          double score = 0;
          for (std::int64_t i = 0; i < c.nope; ++i) score += at(query, row + i) * made(t, i);
          for (std::int64_t i = 0; i < c.rotary; ++i) {
            score += at(query, row + c.nope + i) * at(rotated, (b * c.tokens + t) * rotated_width + i);
          }
          total += weights[size(t)] = std::exp(score * static_cast<double>(0.3f));
        }
        for (std::int64_t v = 0; v < c.value_depth; ++v) {
          double sum = 0;
          for (std::int64_t t = first; t < last; ++t) sum += weights[size(t)] * made(t, c.nope + v);
          out.push_back(static_cast<float>(total == 0 ? 0.0 : sum / total));
        }
      }
    }
    return out;
  }
};

}  // namespace

// Every kernel and thread count gives the scalar kernel's bits, and those are near the truth.
void test_latent_attention() {
  for (const Case& c :
       {Case{1, 20, 1, 100, 64, 16, 24, 32, false, false}, Case{2, 3, 4, 37, 33, 7, 5, 11, false, true, 9},
        Case{2, 5, 1, 170, 50, 0, 17, 20, true, false, 20}, Case{1, 3, 300, 302, 60, 8, 3, 70, false, false},
        Case{3, 1, 1, 1, 1, 1, 0, 1, true, true}, Case{1, 3, 2, 140, 512, 64, 128, 128, false, false}}) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Numbers numbers(c, type);
      set_thread_count(1);
      const auto expected = numbers.run(scalar());
      for (const IsaEntry& e : instruction_sets()) {
        for (const int threads : {1, 2, 3}) {
          if (!e.supported) continue;
          set_thread_count(threads);
          check(numbers.run(*e.kernels) == expected,
                std::string(e.name) + " latent attention of " + std::to_string(c.tokens) + " tokens");
        }
      }
      const auto truth = numbers.truth();
      std::vector<float> got(truth.size());
      scalar().load_row(expected.data(), type, static_cast<int>(got.size()), got.data());
      const double error = distance(got, truth);
      check(error < (type == DType::kF32   ? 1e-5
                     : type == DType::kF16 ? 2e-3
                                           : 1e-2),
            "latent attention is " + std::to_string(error) + " from the truth");
    }
  }
  set_thread_count(0);
}

}  // namespace cpumoe::tests
