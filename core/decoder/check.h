// What a decoder refuses before it computes anything, naming what does not fit.
#pragma once

#include "decoder/decoder.h"

namespace cpumoe {

// Parts that do not belong together.
void check_model(const DecoderModel& model);

// Rows and caches that do not belong together or to the model.
void check_step(const DecoderModel& model, const Step& step);

}  // namespace cpumoe
