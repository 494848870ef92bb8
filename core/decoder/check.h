// Checks of a decoder model and of a step's input; each error names the argument that does not fit.
#pragma once

#include <cstdint>

#include "decoder/decoder.h"

namespace cpumoe {

// Reject parts that do not belong together.
void check_model(const DecoderModel& model);

// Reject rows and caches that do not belong together or to the model.
void check_step(const DecoderModel& model, const StepInput& input);

// ---- for mixers -----------------------------------------------------------------------------------------------------

void check_norm(const Norm& norm, std::int64_t width, const char* name);
void check_matrix(const Matrix& m, const DecoderModel& model, std::int64_t columns, std::int64_t depth,
                  const char* name);
// A vector that may be left out.
void check_count(std::size_t found, std::int64_t count, const char* name);
void check_tensor(const Tensor& tensor, std::int64_t size, const char* name);
void check_tensor(const Tensor& tensor, std::int64_t rows, std::int64_t columns, const char* name);
void check_convolution(const Tensor& weight, const Tensor& bias, std::int64_t channels);

}  // namespace cpumoe
