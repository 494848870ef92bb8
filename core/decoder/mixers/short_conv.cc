// Short convolutions, as LFM2 has them.
#include "decoder/check.h"
#include "decoder/mixer.h"
#include "decoder/step.h"

namespace cpumoe {
namespace {

// The mixer's memory.
struct Arrays {
  Arrays(Scratch scratch, const ShortConv& c, DType type, std::int64_t rows) {
    projected = scratch.take(rows * c.projection.columns, type);
    convolved = scratch.take(rows * c.out.depth, type);
    bytes = scratch.bytes();
  }
  Arrays(const Step& step, const ShortConv& c) : Arrays(step.scratch(), c, step.type(), step.count()) {}

  std::uint8_t *projected, *convolved;
  std::int64_t bytes;
};

}  // namespace

void check_mixer(const ShortConv& c, const DecoderModel& model) {
  check_convolution(c.conv_weight, c.conv_bias, c.conv_weight.shape[0]);
  check_convolution(c.convolution());
  check_matrix(c.projection, model, 3 * c.convolution().channels, model.hidden(), "projection");
  check_matrix(c.out, model, model.hidden(), c.convolution().channels, "out");
}

MixerSizes sizes_of(const ShortConv& c, DType type, std::int64_t rows) {
  return {Arrays(Scratch(), c, type, rows).bytes, 0, c.projection.bytes() + c.out.bytes()};
}

CacheLayout cache_layout(const ShortConv& c, DType type) {
  const ChannelConvolution convolution = c.convolution();
  return {{{"conv_state", CachePart::kSequence, {convolution.channels, convolution.taps}, type, false}}};
}

void plan_projections(Step& step, const ShortConv& c) {
  step.stages().outs.assign(1, {&c.projection, Arrays(step, c).projected, c.projection.columns, step.type()});
  step.plan_inputs();
}

void plan_mixer(Step& step, const ShortConv& c, const LayerCache&) {
  step.plan_output(c.out, Arrays(step, c).convolved);
}

void run_mixer(Step& step, Worker& worker, const ShortConv& c, std::size_t layer) {
  const Arrays arrays(step, c);
  step.clear_padding(worker);
  step.project(worker);
  const ConvolutionCall call = short_convolution(c.convolution(), step.type(), step.sequences(), arrays.projected,
                                                 step.cache(layer).states[0], arrays.convolved);
  convolve(step.kernels(), call, worker);
  if (worker.index == 0) step.plan_layer(layer);
  step.end_stage(worker, StepPart::kAttention);
  step.finish_mixer(worker);
}

}  // namespace cpumoe
