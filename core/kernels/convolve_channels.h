// Causal convolution of channels, each with weights of its own (depthwise), with the last inputs as its state.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/functions.h"

namespace cpumoe {
namespace {

// [channels, width] as it is stored -> [width][kConvolvedChannels], in which channels lie side by side as in rows of
// tokens.
template <class V>
void load_by_place(const void* src, DType type, int channels, int width, float (*dst)[kConvolvedChannels]) {
  float stored[kConvolvedChannels * kConvolutionWidth];
  load_row<V>(src, type, channels * width, stored);
  for (int c = 0; c < channels; ++c) {
    for (int k = 0; k < width; ++k) dst[k][c] = stored[c * width + k];
  }
}

template <class V>
void store_by_place(const float (*src)[kConvolvedChannels], int channels, int width, DType type, void* dst) {
  float stored[kConvolvedChannels * kConvolutionWidth];
  for (int c = 0; c < channels; ++c) {
    for (int k = 0; k < width; ++k) stored[c * width + k] = src[k][c];
  }
  store_row<V>(stored, channels * width, type, dst);
}

template <class V>
void convolve_channels(const ConvolveChannels& a) {
  constexpr int kTokens = 32;  // with the inputs before them they stay in L1
  float weight[kConvolutionWidth][kConvolvedChannels] = {}, bias[kConvolvedChannels] = {};
  float inputs[kConvolutionWidth + kTokens][kConvolvedChannels] = {};  // those of the state, then those of tokens
  float line[kConvolvedChannels] = {};
  load_by_place<V>(a.weight, a.weight_type, a.channels, a.width, weight);
  load_by_place<V>(a.state, a.type, a.channels, a.width, inputs);
  if (a.bias != nullptr) load_row<V>(a.bias, a.bias_type, a.channels, bias);
  const auto* x = static_cast<const std::uint8_t*>(a.x);
  auto* out = static_cast<std::uint8_t*>(a.out);
  for (std::int64_t first = 0; first < a.tokens; first += kTokens) {
    const int count = a.tokens - first < kTokens ? static_cast<int>(a.tokens - first) : kTokens;
    for (int t = 0; t < count; ++t) {
      load_row<V>(x + (first + t) * a.x_stride * size_of(a.type), a.type, a.channels, inputs[a.width + t]);
      const V mask = V::set(a.mask == nullptr ? 1.0f : a.mask[first + t]);
      for (int c = 0; c < a.channels; c += V::kWidth) {
        V sum = V::load(bias + c);
        for (int k = 0; k < a.width; ++k) sum = V::fma(V::load(weight[k] + c), V::load(inputs[t + 1 + k] + c), sum);
        V::store(line + c, sum * sigmoid_of(sum) * mask);
      }
      store_row<V>(line, a.channels, a.out_type, out + (first + t) * a.out_stride * size_of(a.out_type));
    }
    for (int k = 0; k < a.width; ++k) {
      for (int c = 0; c < a.channels; ++c) inputs[k][c] = inputs[count + k][c];
    }
  }
  store_by_place<V>(inputs, a.channels, a.width, a.type, a.state);
}

}  // namespace
}  // namespace cpumoe
