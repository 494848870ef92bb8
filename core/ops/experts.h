// The fused layer: out_t = sum over chosen experts of w * (down . act(gate_up . x_t + b1) + b2), in one call.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/table.h"
#include "packed/layout.h"
#include "runtime/exchange.h"
#include "runtime/threads.h"

namespace cpumoe {

struct MoeCall {
  PackedMatrix gate_up, down;
  const void* x;  // [tokens, hidden], contiguous
  DType type,
      out_type;  // of x, and of out: that of x, or fp32 for sums that others are added to before they are rounded
  std::int64_t tokens, topk;
  const std::int32_t* ids;  // [tokens, topk]; -1 contributes nothing
  const float* weights;     // [tokens, topk]
  bool weight_on_input;     // scale the token by its weight before the first product, not after the second
  ActivationSpec activation;
  void* out;  // [tokens, hidden]
  // Instead of x: tokens as prepare_token has left them, perhaps on another rank.
  const std::uint8_t* prepared = nullptr;
  // Where every rank has a slice of each expert: formats whose scales are found in whole rows ask all of them for the
  // extremes of intermediate rows.
  RankExchange* slices = nullptr;
};

// Bytes of a token of this type that has been prepared for the first product: its row, scale and zero point, and the
// scales of its records if it has some. 0 where tokens are prepared for each expert anew.
std::int64_t prepared_token_bytes(const PackedMatrix& gate_up, DType type);
void prepare_token(const Kernels& kernels, const PackedMatrix& gate_up, const void* x, DType type, std::uint8_t* out);

// Refuses matrices that do not belong together and ids out of range.
void moe_forward(const Kernels& kernels, const MoeCall& call);

// The same as a stage of a team, for at most tokens_at_once tokens and experts that have been checked (check_experts):
// `plan` by one thread once the ids are known, and after a barrier `run` by all. The result is there after another one.
class MoeStage {
 public:
  MoeStage();
  ~MoeStage();
  void plan(const Kernels& kernels, const MoeCall& call, int threads);
  void run(Worker& worker);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The same for experts whose sizes may differ from rank to rank: all must compute the same tokens at a time.
constexpr std::int64_t kSpreadTokens = 1024;

// How many tokens are computed at a time, so that intermediate values take bounded memory.
std::int64_t tokens_at_once(const PackedMatrix& down, std::int64_t topk);

// Refuses matrices that do not belong together.
void check_experts(const PackedSpec& gate_up, const PackedSpec& down, const ActivationSpec& activation);

}  // namespace cpumoe
