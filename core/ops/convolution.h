// Causal depthwise convolutions over the last few tokens (taps): LFM2's mixer, Mamba's, and the first stage of Mamba2
// and delta nets. Any number of threads, and any cut of the tokens into calls, gives the same bits.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/table.h"
#include "runtime/threads.h"

namespace cpumoe {

// Parameters of a layer in a type of their own; data is null if the layer has none.
struct Parameters {
  const void* data = nullptr;
  DType type = DType::kF32;

  const void* at(std::int64_t index) const {  // null if there are none
    return data == nullptr ? nullptr : static_cast<const std::uint8_t*>(data) + index * size_of(type);
  }
};

// Tokens of one sequence, in consecutive rows.
struct SequenceRows {
  std::int64_t sequence, first_row, rows;
};

// The weights of a convolution. Its state is [channels, taps], the last inputs.
struct ChannelConvolution {
  std::int64_t channels = 0;
  int taps = 0;
  Parameters weight, bias;  // [channels, taps], [channels] or null

  // A kernel's call for up to kTapChannels channels from `first` to `last` of a sequence; `states` are [sequences,
  // channels, taps]. The caller adds the rows.
  ConvolveRows rows(DType type, void* states, std::int64_t sequence, std::int64_t first, std::int64_t last) const;
};

struct ConvolutionCall {
  ChannelConvolution convolution;
  DType type;
  std::span<const SequenceRows> sequences;
  const void *x, *gate, *out_gate;  // as in ConvolveRows, [rows, channels]; the gates may be null
  std::int64_t stride;              // elements from row to row of these
  bool silu;
  const float* mask;  // [rows], factors of the results; or null
  void* state;        // [sequences, channels, taps], moved on
  void* out;          // [rows, channels]
};

// LFM2's out = C * convolution(B * x) of `projected` [rows, 3, channels]: B, C, x.
ConvolutionCall short_convolution(const ChannelConvolution& convolution, DType type,
                                  std::span<const SequenceRows> sequences, const void* projected, void* state,
                                  void* out);

// Refuses numbers of channels and taps that the kernels do not have.
void check_convolution(const ChannelConvolution& convolution);

// Computes the share of one worker; the result is complete after the next barrier of its team.
void convolve(const Kernels& kernels, const ConvolutionCall& call, const Worker& worker);

// Checks, and computes on a team of its own.
void convolve(const Kernels& kernels, const ConvolutionCall& call);

}  // namespace cpumoe
