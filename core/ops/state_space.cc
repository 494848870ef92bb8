#include "ops/state_space.h"

#include <algorithm>

#include "ops/elements.h"
#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTokensAtOnce = 64;     // what lies between the passes over them stays in the caches
constexpr std::int64_t kSegmentChannels = 64;  // convolved by one thread at a time
constexpr std::int64_t kStateAtOnce = 4096;    // values of the state that go through all tokens before the next: 16 KB
constexpr std::int64_t kChannelsAtOnce = 64;   // of Mamba's state, for which steps and rates are kept

std::int64_t parts_of(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

const float* load(const Kernels& k, const Parameters& parameters, std::int64_t count, float* dst) {
  if (parameters.data == nullptr) return nullptr;
  k.load_row(parameters.data, parameters.type, static_cast<int>(count), dst);
  return dst;
}

// The sequences and tokens that are computed together: some tokens of one sequence, or all of several short ones.
struct Round {
  std::int64_t sequence, sequences, token, tokens;
  bool is_last;

  std::int64_t rows() const { return sequences * tokens; }
};

template <class Body>
void for_rounds(std::int64_t batch, std::int64_t tokens, Body&& body) {
  const std::int64_t together = std::max<std::int64_t>(1, kTokensAtOnce / tokens);
  for (std::int64_t b = 0; b < batch; b += together) {
    for (std::int64_t t = 0; t < tokens; t += kTokensAtOnce) {
      const bool is_last = b + together >= batch && t + kTokensAtOnce >= tokens;
      body(Round{b, std::min(together, batch - b), t, std::min(kTokensAtOnce, tokens - t), is_last});
    }
  }
}

// Items shared out among the threads of a team, neighbours together so that memory is read in sequence.
template <class Body>
void share(const Worker& worker, std::int64_t items, Body&& body) {
  for (std::int64_t i = worker.share(items); i < worker.next_share(items); ++i) body(i);
}

// ---- Mamba2 --------------------------------------------------------------------------------------------------------

struct Mamba2Scratch {
  Buffer x, bc, steps, decays, parameters;
};

class Mamba2 {
 public:
  Mamba2(const Kernels& kernels, const Mamba2Call& call, Mamba2Scratch& scratch)
      : k_(kernels),
        c_(call),
        rows_at_once_(std::clamp<std::int64_t>(kStateAtOnce / call.depth, 1, call.head_dim)),
        x_segments_(parts_of(call.inner(), kSegmentChannels)),
        bc_segments_(parts_of(call.depth, kSegmentChannels)) {
    const std::int64_t rows = std::max(std::min(call.tokens * call.batch, kTokensAtOnce), std::int64_t{1});
    x_ = scratch.x.get<float>(rows * call.inner());
    bc_ = scratch.bc.get<float>(rows * 2 * call.groups * call.depth);
    steps_ = scratch.steps.get<float>(rows * call.heads);
    decays_ = scratch.decays.get<float>(rows * call.heads);
    auto* parameters = scratch.parameters.get<float>(3 * call.heads + call.inner());
    dt_bias_ = load(k_, call.dt_bias, call.heads, parameters);
    skip_ = load(k_, call.D, call.heads, parameters + call.heads);
    k_.recurrent.decay_rates(call.A_log.data, call.A_log.type, call.heads, parameters + 2 * call.heads);
    rates_ = parameters + 2 * call.heads;
    norm_ = load(k_, call.norm_weight, call.inner(), parameters + 3 * call.heads);
  }

  void run(Worker& worker) {
    for_rounds(c_.batch, c_.tokens, [&](const Round& round) {
      const std::int64_t segments = x_segments_ + 2 * c_.groups * bc_segments_;
      share(worker, round.sequences * segments,
            [&](std::int64_t i) { convolve_segment(round, i / segments, i % segments); });
      share(worker, round.rows(), [&](std::int64_t i) { find_steps(round, i); });
      worker.barrier->wait();
      const std::int64_t parts = parts_of(c_.head_dim, rows_at_once_), items = c_.heads * parts;
      share(worker, round.sequences * items,
            [&](std::int64_t i) { scan(round, i / items, i % items / parts, i % parts * rows_at_once_); });
      worker.barrier->wait();
      share(worker, round.rows(), [&](std::int64_t i) { gate(round, i); });
      if (!round.is_last) worker.barrier->wait();
    });
  }

 private:
  // Index of row `i` of a round in the whole batch.
  std::int64_t token(const Round& round, std::int64_t i) const {
    return (round.sequence + i / round.tokens) * c_.tokens + round.token + i % round.tokens;
  }

  // B and C of a sequence and group lie together: [sequence][group][token][B | C].
  float* bc_of(const Round& round, std::int64_t sequence, std::int64_t group) const {
    return bc_ + (sequence * c_.groups + group) * round.tokens * 2 * c_.depth;
  }

  void convolve_segment(const Round& round, std::int64_t sequence, std::int64_t segment) const {
    std::int64_t first, last, out_stride = c_.inner();
    float* out;
    if (segment < x_segments_) {
      first = segment * kSegmentChannels;
      last = std::min(first + kSegmentChannels, c_.inner());
      out = x_ + sequence * round.tokens * c_.inner() + first;
    } else {
      const std::int64_t part = segment - x_segments_, which = part / bc_segments_;
      const std::int64_t within = part % bc_segments_ * kSegmentChannels, is_c = which / c_.groups;
      first = c_.inner() + which * c_.depth + within;
      last = std::min(first + kSegmentChannels, c_.inner() + (which + 1) * c_.depth);
      out = bc_of(round, sequence, which % c_.groups) + is_c * c_.depth + within;
      out_stride = 2 * c_.depth;
    }
    const std::int64_t b = round.sequence + sequence, row = token(round, sequence * round.tokens);
    ConvolveRows rows = c_.convolution.rows(c_.type, c_.conv_state, b, first, last);
    rows.x = at(c_.projected, row * c_.row() + c_.inner() + first, c_.type);
    rows.stride = c_.row();
    rows.tokens = static_cast<int>(round.tokens);
    rows.silu = true;
    rows.mask = c_.mask == nullptr ? nullptr : c_.mask + row;
    rows.out_type = DType::kF32;
    rows.out = out;
    rows.out_stride = out_stride;
    k_.recurrent.convolve(rows);
  }

  void find_steps(const Round& round, std::int64_t i) const {
    const void* raw = at(c_.projected, (token(round, i) + 1) * c_.row() - c_.heads, c_.type);
    k_.recurrent.time_steps({raw, c_.type, dt_bias_, rates_, c_.heads, c_.step_low, c_.step_high, steps_ + i * c_.heads,
                             decays_ + i * c_.heads});
  }

  void scan(const Round& round, std::int64_t sequence, std::int64_t head, std::int64_t row) const {
    const std::int64_t first = sequence * round.tokens;
    float* x = x_ + first * c_.inner() + head * c_.head_dim + row;
    float* state = c_.state + (((round.sequence + sequence) * c_.heads + head) * c_.head_dim + row) * c_.depth;
    const float* bc = bc_of(round, sequence, head / (c_.heads / c_.groups));
    const std::int64_t step = first * c_.heads + head;
    k_.recurrent.scan_state({state, std::min(rows_at_once_, c_.head_dim - row), c_.depth, round.tokens, x, c_.inner(),
                             bc, bc + c_.depth, 2 * c_.depth, steps_ + step, decays_ + step, c_.heads, nullptr,
                             skip_ + head, x, c_.inner()});
  }

  void gate(const Round& round, std::int64_t i) const {
    const std::int64_t row = token(round, i);
    k_.recurrent.gate({x_ + i * c_.inner(), norm_, at(c_.projected, row * c_.row(), c_.type), c_.type, c_.inner(),
                       c_.norm_group, c_.epsilon, c_.gate_last, false, at(c_.out, row * c_.inner(), c_.type)});
  }

  const Kernels& k_;
  const Mamba2Call& c_;
  std::int64_t rows_at_once_, x_segments_, bc_segments_;
  float *x_, *bc_, *steps_, *decays_;  // of the tokens of a round; x becomes y in its place
  const float *dt_bias_, *skip_, *rates_, *norm_;
};

// ---- Mamba ---------------------------------------------------------------------------------------------------------

struct SelectiveScratch {
  Buffer x, steps, bc, typed, rates, parameters;
};

class SelectiveScan {
 public:
  SelectiveScan(const Kernels& kernels, const SelectiveScanCall& call, SelectiveScratch& scratch)
      : k_(kernels), c_(call) {
    const std::int64_t rows = std::max(std::min(call.tokens * call.batch, kTokensAtOnce), std::int64_t{1});
    x_ = scratch.x.get<float>(rows * call.channels);
    steps_ = scratch.steps.get<float>(rows * call.channels);
    bc_ = scratch.bc.get<float>(rows * 2 * call.depth);
    normed_ = scratch.typed.get<std::uint8_t>(rows * 2 * call.depth * size_of(call.type));
    rates_ = scratch.rates.get<float>(call.channels * call.depth);
    auto* parameters = scratch.parameters.get<float>(2 * (call.channels + call.depth));
    step_bias_ = load(k_, call.step_bias, call.channels, parameters);
    skip_ = load(k_, call.D, call.channels, parameters + call.channels);
    bc_weights_[0] = load(k_, call.b_weight, call.depth, parameters + 2 * call.channels);
    bc_weights_[1] = load(k_, call.c_weight, call.depth, parameters + 2 * call.channels + call.depth);
  }

  void run(Worker& worker) {
    const std::int64_t parts = parts_of(c_.channels, kChannelsAtOnce);
    share(worker, parts, [&](std::int64_t i) { find_rates(i * kChannelsAtOnce); });
    for_rounds(c_.batch, c_.tokens, [&](const Round& round) {
      const std::int64_t pieces = round.rows() * parts;  // a row is long enough to be shared out
      share(worker, pieces, [&](std::int64_t i) { prepare(round, i / parts, i % parts * kChannelsAtOnce); });
      share(worker, round.rows(), [&](std::int64_t i) { find_bc(round, i); });
      worker.barrier->wait();
      share(worker, round.sequences * parts,
            [&](std::int64_t i) { scan(round, i / parts, i % parts * kChannelsAtOnce); });
      if (!round.is_last) worker.barrier->wait();
    });
  }

 private:
  std::int64_t channels_from(std::int64_t first) const { return std::min(kChannelsAtOnce, c_.channels - first); }

  std::int64_t token(const Round& round, std::int64_t i) const {
    return (round.sequence + i / round.tokens) * c_.tokens + round.token + i % round.tokens;
  }

  void find_rates(std::int64_t first) const {
    k_.recurrent.decay_rates(c_.A_log.at(first * c_.depth), c_.A_log.type, channels_from(first) * c_.depth,
                             rates_ + first * c_.depth);
  }

  void prepare(const Round& round, std::int64_t i, std::int64_t first) const {
    const std::int64_t from = token(round, i) * c_.channels + first, to = i * c_.channels + first;
    const std::int64_t count = channels_from(first);
    k_.load_row(at(c_.x, from, c_.type), c_.type, static_cast<int>(count), x_ + to);
    k_.recurrent.time_steps({at(c_.steps, from, c_.type), c_.type, step_bias_ == nullptr ? nullptr : step_bias_ + first,
                             nullptr, count, 0.0f, __builtin_inff(), steps_ + to, nullptr});
  }

  void find_bc(const Round& round, std::int64_t i) const {
    const std::uint8_t* both = at(c_.parameters, (token(round, i) + 1) * c_.parameter_row - 2 * c_.depth, c_.type);
    std::uint8_t* normed = normed_ + i * 2 * c_.depth * size_of(c_.type);
    for (int which = 0; which < 2; ++which) {
      const void* values = at(both, which * c_.depth, c_.type);
      if (bc_weights_[which] != nullptr) {
        void* dst = at(normed, which * c_.depth, c_.type);
        k_.normalize_row({values, bc_weights_[which], c_.type, c_.depth, c_.epsilon, true, false, dst});
        values = dst;
      }
      k_.load_row(values, c_.type, static_cast<int>(c_.depth), bc_ + (i * 2 + which) * c_.depth);
    }
  }

  // Channels of a sequence through the tokens of a round, and their gate.
  void scan(const Round& round, std::int64_t sequence, std::int64_t first) const {
    const std::int64_t row = sequence * round.tokens, count = channels_from(first);
    float* x = x_ + row * c_.channels + first;
    const float* bc = bc_ + row * 2 * c_.depth;
    k_.recurrent.scan_state({c_.state + ((round.sequence + sequence) * c_.channels + first) * c_.depth, count, c_.depth,
                             round.tokens, x, c_.channels, bc, bc + c_.depth, 2 * c_.depth,
                             steps_ + row * c_.channels + first, nullptr, c_.channels, rates_ + first * c_.depth,
                             skip_ + first, x, c_.channels});
    for (std::int64_t t = 0; t < round.tokens; ++t) {
      const std::int64_t at_token = token(round, row + t);
      const void* gate = at(c_.gate, (at_token + 1) * c_.gate_row - c_.channels + first, c_.type);
      k_.recurrent.gate({x + t * c_.channels, nullptr, gate, c_.type, count, count, 0.0f, false, false,
                         at(c_.out, at_token * c_.channels + first, c_.type)});
    }
  }

  const Kernels& k_;
  const SelectiveScanCall& c_;
  float *x_, *steps_, *bc_, *rates_;
  std::uint8_t* normed_;
  const float *step_bias_, *skip_, *bc_weights_[2];
};

// ---- lightning attention -------------------------------------------------------------------------------------------

struct HeadScratch {
  Buffer state, rows, line;
};

void transpose(const float* src, std::int64_t size, float* dst) {
  constexpr std::int64_t kSide = 16;  // of the squares that stay in L1
  for (std::int64_t i = 0; i < size; i += kSide) {
    for (std::int64_t j = 0; j < size; j += kSide) {
      for (std::int64_t r = i; r < std::min(i + kSide, size); ++r) {
        for (std::int64_t c = j; c < std::min(j + kSide, size); ++c) dst[c * size + r] = src[r * size + c];
      }
    }
  }
}

// One head of one sequence, all its tokens.
void attend_head(const Kernels& k, const LightningCall& c, std::int64_t sequence, std::int64_t head) {
  static thread_local HeadScratch scratch;
  const std::int64_t depth = c.depth, square = depth * depth, row = c.heads * 3 * depth;
  const std::int64_t state_at = (sequence * c.heads + head) * square;
  float* state = scratch.state.get<float>(square);
  float* line = scratch.line.get<float>(square);
  float* qkv =
      scratch.rows.get<float>(kTokensAtOnce * 3 * depth);  // of each token q, k and v, which becomes the output
  std::fill(state, state + square, 0.0f);
  if (c.state != nullptr) {
    k.load_row(at(c.state, state_at, c.state_type), c.state_type, static_cast<int>(square), line);
    transpose(line, depth, state);
  }
  const float slope = -c.slopes[head], step = 1.0f, skip = 0.0f;
  float decay;
  k.recurrent.decay_rates(&slope, DType::kF32, 1, &decay);
  decay = -decay;
  const std::int64_t rows_at_once = std::clamp<std::int64_t>(kStateAtOnce / depth, 1, depth);
  for (std::int64_t first = 0; first < c.tokens; first += kTokensAtOnce) {
    const std::int64_t tokens = std::min(kTokensAtOnce, c.tokens - first), token = sequence * c.tokens + first;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const void* from = at(c.qkv, (token + t) * row + head * 3 * depth, c.type);
      k.load_row(from, c.type, static_cast<int>(3 * depth), qkv + t * 3 * depth);
    }
    for (std::int64_t r = 0; r < depth; r += rows_at_once) {
      float* v = qkv + 2 * depth + r;
      k.recurrent.scan_state({state + r * depth, std::min(rows_at_once, depth - r), depth, tokens, v, 3 * depth,
                              qkv + depth, qkv, 3 * depth, &step, &decay, 0, nullptr, &skip, v, 3 * depth});
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      k.store_row(qkv + t * 3 * depth + 2 * depth, depth, c.type,
                  at(c.out, ((token + t) * c.heads + head) * depth, c.type));
    }
  }
  transpose(state, depth, line);
  k.store_row(line, square, c.state_type, at(c.next_state, state_at, c.state_type));
}

}  // namespace

void mamba2(const Kernels& kernels, const Mamba2Call& c) {
  CPUMOE_REQUIRE(c.groups >= 1 && c.heads % c.groups == 0, "groups=", c.groups, " for ", c.heads,
                 " heads; a divisor is accepted");
  check_convolution(c.convolution);
  CPUMOE_REQUIRE(c.norm_group >= 1 && c.inner() % c.norm_group == 0, "norm_group=", c.norm_group, " for ", c.inner(),
                 " values; a divisor is accepted");
  if (c.batch * c.tokens * c.inner() * c.depth == 0) return;
  static thread_local Mamba2Scratch scratch;
  Mamba2 pass(kernels, c, scratch);
  run_on_threads(threads_for(c.batch * c.tokens * c.inner() * c.depth * 4), [&](Worker& w) { pass.run(w); });
}

void selective_scan(const Kernels& kernels, const SelectiveScanCall& c) {
  if (c.batch * c.tokens * c.channels * c.depth == 0) return;
  static thread_local SelectiveScratch scratch;
  SelectiveScan pass(kernels, c, scratch);
  run_on_threads(threads_for(c.batch * c.tokens * c.channels * c.depth * 4), [&](Worker& w) { pass.run(w); });
}

void lightning_attention(const Kernels& kernels, const LightningCall& c) {
  if (c.depth == 0) return;
  const std::int64_t items = c.batch * c.heads;
  run_on_threads(threads_for(items * (c.tokens + 1) * c.depth * c.depth * 4), [&](Worker& w) {
    share(w, items, [&](std::int64_t i) { attend_head(kernels, c, i / c.heads, i % c.heads); });
  });
}

}  // namespace cpumoe
