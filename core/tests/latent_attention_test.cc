// Attention over latents.
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
  bool masked, sunk, room;  // room: the sequences of a batch lie apart

  std::int64_t depth() const { return nope + rotary; }
  std::int64_t weight_rows() const { return heads * (nope + value_depth); }
};

// The definition, with keys and values, in double.
std::vector<double> plain_attention(const Case& c, const LatentAttentionCall& call, const std::vector<float>& query,
                                    const std::vector<float>& latents, const std::vector<float>& rotated,
                                    const std::vector<float>& weight) {
  std::vector<double> out;
  const auto at = [](const std::vector<float>& values, std::int64_t i) {
    return static_cast<double>(values[static_cast<std::size_t>(i)]);
  };
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t q = 0; q < c.queries; ++q) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const std::int64_t head_row = h * (c.nope + c.value_depth);
        const auto made = [&](std::int64_t t, std::int64_t row) {
          double sum = 0;
          for (std::int64_t r = 0; r < c.rank; ++r) {
            sum += at(latents, b * call.latent_stride + t * c.rank + r) * at(weight, (head_row + row) * c.rank + r);
          }
          return sum;
        };
        std::vector<double> weights(static_cast<std::size_t>(c.tokens));
        double total = call.sinks == nullptr ? 0.0 : std::exp(static_cast<double>(call.sinks[h]));
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          const std::int64_t row = ((b * c.heads + h) * c.queries + q) * c.depth();
          double score = 0;
          for (std::int64_t i = 0; i < c.nope; ++i) score += at(query, row + i) * made(t, i);
          for (std::int64_t i = 0; i < c.rotary; ++i) {
            score += at(query, row + c.nope + i) * at(rotated, b * call.rotated_stride + t * c.rotary + i);
          }
          score *= static_cast<double>(call.scale);
          if (call.mask != nullptr) score += static_cast<double>(call.mask[(b * c.queries + q) * c.tokens + t]);
          total += weights[static_cast<std::size_t>(t)] = std::exp(score);
        }
        for (std::int64_t v = 0; v < c.value_depth; ++v) {
          double sum = 0;
          for (std::int64_t t = 0; t < c.tokens; ++t) {
            sum += weights[static_cast<std::size_t>(t)] * made(t, c.nope + v);
          }
          out.push_back(total == 0 ? 0.0 : sum / total);
        }
      }
    }
  }
  return out;
}

std::vector<std::uint8_t> stored(const std::vector<float>& values, DType type) {
  std::vector<std::uint8_t> bytes(values.size() * static_cast<std::size_t>(size_of(type)) + 1);
  scalar().store_row(values.data(), static_cast<std::int64_t>(values.size()), type, bytes.data());
  return bytes;
}

}  // namespace

// Every kernel and thread count gives the scalar kernel's bits, and those are near the truth.
void test_latent_attention() {
  for (const Case& c :
       {Case{1, 20, 1, 100, 64, 16, 24, 32, false, false, false}, Case{2, 3, 4, 37, 33, 7, 5, 11, true, false, true},
        Case{2, 5, 1, 70, 50, 0, 17, 20, true, true, false}, Case{1, 30, 2, 9, 600, 8, 3, 70, true, false, false},
        Case{3, 1, 1, 1, 1, 1, 0, 1, false, true, true}}) {
    const std::int64_t room = c.room ? 3 : 0;
    const std::int64_t latent_stride = (c.tokens + room) * c.rank, rotated_stride = (c.tokens + room) * c.rotary;
    const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    auto query = random_values(count(c.batch * c.heads * c.queries * c.depth()), 1);
    const auto latents = random_values(count(c.batch * latent_stride), 2);
    const auto rotated = random_values(count(c.batch * rotated_stride), 3);
    auto weight = random_values(count(c.weight_rows() * c.rank), 4, 0.0f);
    for (auto& w : weight) w /= std::sqrt(static_cast<float>(c.rank));
    auto mask = random_values(count(c.batch * c.queries * c.tokens), 5);
    for (std::size_t i = 0; i < mask.size(); i += 3) mask[i] = -INFINITY;
    if (!c.sunk) std::fill_n(mask.end() - c.tokens, c.tokens, -INFINITY);  // the last query sees nothing
    const auto sinks = random_values(count(c.heads), 6);
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const auto q = stored(query, type), l = stored(latents, type), r = stored(rotated, type);
      const auto w = stored(weight, type);
      const std::size_t out_size = count(c.batch * c.queries * c.heads * c.value_depth);
      std::vector<std::uint8_t> expected(out_size * static_cast<std::size_t>(size_of(type)));
      LatentAttentionCall call{};
      call.type = type;
      call.batch = c.batch;
      call.heads = c.heads;
      call.queries = c.queries;
      call.tokens = c.tokens;
      call.rank = c.rank;
      call.rotary = c.rotary;
      call.nope = c.nope;
      call.value_depth = c.value_depth;
      call.query = q.data();
      call.latents = l.data();
      call.rotated = r.data();
      call.latent_stride = latent_stride;
      call.rotated_stride = rotated_stride;
      call.weight = w.data();
      call.mask = c.masked ? mask.data() : nullptr;
      call.sinks = c.sunk ? sinks.data() : nullptr;
      call.scale = 0.3f;
      call.out = expected.data();
      set_thread_count(1);
      attend_latents(scalar(), call);
      for (const IsaEntry& e : instruction_sets()) {
        for (const int threads : {1, 2, 3}) {
          if (!e.supported) continue;
          std::vector<std::uint8_t> out(expected.size());
          call.out = out.data();
          set_thread_count(threads);
          attend_latents(*e.kernels, call);
          check(out == expected, std::string(e.name) + " latent attention of " + std::to_string(c.tokens) + " tokens");
        }
      }
      if (type != DType::kF32) continue;
      std::vector<float> got(out_size);
      scalar().load_row(expected.data(), type, static_cast<int>(out_size), got.data());
      const auto truth = plain_attention(c, call, query, latents, rotated, weight);
      check(distance(got, std::vector<float>(truth.begin(), truth.end())) < 1e-5, "latent attention is near the truth");
    }
  }
  set_thread_count(0);
}

}  // namespace cpumoe::tests
