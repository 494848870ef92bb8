// A borrowed view of a Python array or tensor, with checks that name the argument.
//
// DLPack's Python protocol costs two microseconds a tensor, several times more than a decode step may spend on its
// seam. Tensor types that offer the DLPack C exchange table (`__dlpack_c_exchange_api__`, PyTorch >= 2.10) are read
// through it in nanoseconds; anything else goes through nanobind's ndarray.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "kernels/formats.h"
#include "runtime/check.h"

namespace cpumoe {

class Array {
 public:
  Array(nanobind::handle object, const char* name);

  // Refuses other devices, other ranks, strides that are not those of a contiguous array, sizes that no memory has (an
  // array without elements may claim them), and elements that do not lie at multiples of their size.
  const Array& contiguous(int rank) const;
  // Rejects the same, but accepts any strides of all dimensions but the last.
  const Array& rows(int rank) const;
  std::int64_t stride(int i) const;  // elements
  // Refuses memory that must not be written.
  const Array& writable() const;

  const char* name() const { return name_; }
  int rank() const { return rank_; }
  std::int64_t dim(int i) const { return shape_[i]; }
  std::int64_t size() const;
  std::string shape_text() const;
  std::string dtype_text() const;

  template <class T>
  bool is() const {
    return dtype_ == nanobind::dtype<T>();
  }
  bool same_type(const Array& other) const { return dtype_ == other.dtype_; }
  // Rejects another dtype than that of `other`.
  const Array& like(const Array& other) const;
  DType float_type() const;  // refuses anything but fp32, bf16, fp16

  template <class T>
  const Array& expect(const char* type) const {
    CPUMOE_REQUIRE(is<T>(), name_, " is ", dtype_text(), "; ", type, " is accepted");
    return *this;
  }

  template <class T = std::uint8_t>
  T* data() const {
    return static_cast<T*>(data_);
  }

 private:
  void check_layout(int rank, int first) const;  // strides from dimension `first` on

  const char* name_;
  void* data_ = nullptr;
  nanobind::dlpack::dtype dtype_{};
  int device_ = 0, rank_ = 0;
  bool read_only_ = false;
  const std::int64_t *shape_ = nullptr, *strides_ = nullptr;
  nanobind::ndarray<> owned_;  // keeps shape and data alive when the slow path was taken
};

}  // namespace cpumoe
