// Arguments of a known shape that may be None, and the parameters of layers.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "bind/array.h"
#include "ops/convolution.h"

namespace cpumoe {

enum class Presence { kRequired, kOptional };

class ShapedArray {
 public:
  // Rejects other shapes, and None unless it is optional.
  ShapedArray(nanobind::handle object, const char* name, std::initializer_list<std::int64_t> shape,
              Presence presence = Presence::kRequired) {
    CPUMOE_REQUIRE(presence == Presence::kOptional || !object.is_none(), name, " is missing");
    if (object.is_none()) return;
    array_.emplace(object, name);
    array_->contiguous(static_cast<int>(shape.size()));
    int i = 0;
    bool fits = true;
    std::string accepted;
    for (const std::int64_t size : shape) {
      fits = fits && array_->dim(i++) == size;
      accepted += concat(accepted.empty() ? "[" : ", ", size);
    }
    CPUMOE_REQUIRE(fits, name, " is ", array_->shape_text(), "; ", accepted, "] is accepted");
  }

  // Null for None.
  Parameters parameters() const { return array_ ? Parameters{array_->data(), array_->float_type()} : Parameters{}; }
  float* fp32() const { return array_ ? array_->expect<float>("float32").data<float>() : nullptr; }
  void* like(const Array& other) const { return array_ ? array_->like(other).data() : nullptr; }

  const ShapedArray& writable() const {
    array_->writable();
    return *this;
  }

 private:
  std::optional<Array> array_;
};

}  // namespace cpumoe
