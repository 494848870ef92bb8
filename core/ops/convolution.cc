#include "ops/convolution.h"

#include <algorithm>

#include "ops/elements.h"
#include "runtime/check.h"

namespace cpumoe {

ConvolveRows ChannelConvolution::rows(DType type, void* states, std::int64_t sequence, std::int64_t first,
                                      std::int64_t last) const {
  ConvolveRows rows{};
  rows.type = type;
  rows.channels = static_cast<int>(std::min<std::int64_t>(kTapChannels, last - first));
  rows.taps = taps;
  rows.weight_type = weight.type;
  rows.weight = weight.at(first * taps);
  rows.bias_type = bias.type;
  rows.bias = bias.at(first);
  rows.state = at(states, (sequence * channels + first) * taps, type);
  return rows;
}

ConvolutionCall short_convolution(const ChannelConvolution& convolution, DType type,
                                  std::span<const SequenceRows> sequences, const void* projected, void* state,
                                  void* out) {
  const std::int64_t channels = convolution.channels;
  ConvolutionCall call{};
  call.convolution = convolution;
  call.type = type;
  call.sequences = sequences;
  call.gate = projected;
  call.out_gate = at(projected, channels, type);
  call.x = at(projected, 2 * channels, type);
  call.stride = 3 * channels;
  call.state = state;
  call.out = out;
  return call;
}

void check_convolution(const ChannelConvolution& c) {
  CPUMOE_REQUIRE(c.channels >= 1, "a convolution has ", c.channels, " channels");
  CPUMOE_REQUIRE(c.taps >= 1 && c.taps <= kMostTaps, "conv_weight has ", c.taps, " taps; 1 to ", kMostTaps,
                 " are accepted");
}

void convolve(const Kernels& kernels, const ConvolutionCall& c, const Worker& worker) {
  const ChannelConvolution& conv = c.convolution;
  const std::int64_t pieces = (conv.channels + kTapChannels - 1) / kTapChannels;
  const std::int64_t items = static_cast<std::int64_t>(c.sequences.size()) * pieces;
  for (std::int64_t item = worker.share(items); item < worker.next_share(items); ++item) {
    const SequenceRows& sequence = c.sequences[static_cast<std::size_t>(item / pieces)];
    const std::int64_t first = item % pieces * kTapChannels;
    const auto rows_of = [&](const void* data) {
      return data == nullptr ? nullptr : at(data, sequence.first_row * c.stride + first, c.type);
    };
    ConvolveRows rows = conv.rows(c.type, c.state, sequence.sequence, first, conv.channels);
    rows.x = rows_of(c.x);
    rows.gate = rows_of(c.gate);
    rows.out_gate = rows_of(c.out_gate);
    rows.stride = c.stride;
    rows.tokens = static_cast<int>(sequence.rows);
    rows.silu = c.silu;
    rows.mask = c.mask == nullptr ? nullptr : c.mask + sequence.first_row;
    rows.out_type = c.type;
    rows.out = at(c.out, sequence.first_row * conv.channels + first, c.type);
    rows.out_stride = conv.channels;
    kernels.recurrent.convolve(rows);
  }
}

void convolve(const Kernels& kernels, const ConvolutionCall& c) {
  std::int64_t values = 0;
  for (const SequenceRows& sequence : c.sequences) {
    if (sequence.rows > 0) values += c.convolution.channels * (4 * sequence.rows + 3 * c.convolution.taps);
  }
  if (values == 0) return;
  check_convolution(c.convolution);
  run_on_threads(threads_for(values * size_of(c.type)), [&](Worker& worker) { convolve(kernels, c, worker); });
}

}  // namespace cpumoe
