#include "bind/array.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>

namespace nb = nanobind;

namespace cpumoe {
namespace {

// The ABI of DLPack's exchange table, major version 1 (https://dmlc.github.io/dlpack/latest/).
struct ExchangeTable {
  std::uint32_t major, minor;
  ExchangeTable* older;
  void *allocate, *to_managed, *from_managed;
  int (*borrow)(void* object, nb::dlpack::dltensor* out);  // may be null
  void* current_stream;
};

// The table of a type, or null. Types are few and live long: the last one seen is remembered (the GIL is held).
const ExchangeTable* exchange_table(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;
  static const ExchangeTable* last_table = nullptr;
  if (type == last_type) return last_table;
  const ExchangeTable* table = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api") != 0) {
      table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      while (table != nullptr && table->major > 1) table = table->older;
      if (table != nullptr && table->borrow == nullptr) table = nullptr;
    }
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // so that its address is not reused by another type
  Py_XDECREF(reinterpret_cast<PyObject*>(last_type));
  last_type = type;
  last_table = table;
  return table;
}

}  // namespace

Array::Array(nb::handle object, const char* name) : name_(name) {
  nb::dlpack::dltensor t{};
  if (const ExchangeTable* table = exchange_table(Py_TYPE(object.ptr())); table != nullptr) {
    if (table->borrow(object.ptr(), &t) != 0) throw nb::python_error();
    data_ = static_cast<std::uint8_t*>(t.data) + t.byte_offset;
    dtype_ = t.dtype;
    device_ = t.device.device_type;
    rank_ = t.ndim;
    shape_ = t.shape;
    strides_ = t.strides;
    CPUMOE_REQUIRE(data_ != nullptr || size() == 0, name_, " has no memory of its own; use its .clone()");
    return;
  }
  if (!nb::try_cast<nb::ndarray<>>(object, owned_)) {
    read_only_ = true;
    nb::ndarray<nb::ro> read_only;
    CPUMOE_REQUIRE(nb::try_cast<nb::ndarray<nb::ro>>(object, read_only), name_, " is a ",
                   nb::cast<std::string>(object.type().attr("__name__")), "; a tensor or an array is accepted");
    owned_ = nb::ndarray<>(read_only);
  }
  data_ = owned_.data();
  dtype_ = owned_.dtype();
  device_ = owned_.device_type();
  rank_ = static_cast<int>(owned_.ndim());
  shape_ = owned_.shape_ptr();
  strides_ = owned_.stride_ptr();
}

const Array& Array::contiguous(int rank) const {
  check_layout(rank, 0);
  return *this;
}

const Array& Array::rows(int rank) const {
  check_layout(rank, rank - 1);
  for (int i = 0; i < rank; ++i) {
    CPUMOE_REQUIRE(stride(i) >= 0, name_, " has a negative stride; use its .clone()");
  }
  return *this;
}

std::int64_t Array::stride(int i) const {
  if (strides_ != nullptr && shape_[i] > 1 && size() > 0) return strides_[i];
  std::int64_t dense = 1;
  for (int j = i + 1; j < rank_; ++j) dense *= shape_[j];
  return dense;
}

const Array& Array::like(const Array& other) const {
  CPUMOE_REQUIRE(same_type(other), name_, " is ", dtype_text(), "; that of ", other.name_, ", ", other.dtype_text(),
                 ", is accepted");
  return *this;
}

void Array::check_layout(int rank, int first) const {
  CPUMOE_REQUIRE(device_ == nb::device::cpu::value, name_, " is not in CPU memory; only CPU tensors are accepted");
  CPUMOE_REQUIRE(rank_ == rank, name_, " has ", rank_, " dimensions; ", rank, " are accepted");
  // Products of sizes, times the 2^18 bytes that the longest row takes, stay below 2^63.
  constexpr std::int64_t kMostElements = std::int64_t{1} << 44;
  std::int64_t room = kMostElements;
  for (int i = 0; i < rank; ++i) room /= std::max<std::int64_t>(shape_[i], 1);
  CPUMOE_REQUIRE(room > 0, name_, " is ", shape_text(), "; sizes with a product of up to 2^44 are accepted");
  if (size() == 0) return;
  const std::uintptr_t bytes = dtype_.bits / 8u;
  CPUMOE_REQUIRE(bytes == 0 || reinterpret_cast<std::uintptr_t>(data_) % bytes == 0, name_,
                 " does not begin at a multiple of ", bytes, " bytes in memory; use its .clone()");
  if (strides_ == nullptr) return;
  std::int64_t expected = 1;
  for (int i = rank; i-- > first;) {
    CPUMOE_REQUIRE(shape_[i] == 1 || strides_[i] == expected, name_, " is not contiguous");
    expected *= shape_[i];
  }
}

const Array& Array::writable() const {
  CPUMOE_REQUIRE(!read_only_, name_, " is read-only; an array that can be written is accepted");
  return *this;
}

std::int64_t Array::size() const {
  std::int64_t total = 1;
  for (int i = 0; i < rank_; ++i) total *= shape_[i];
  return total;
}

std::string Array::shape_text() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape_[i]);
  return text + "]";
}

std::string Array::dtype_text() const {
  static constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const char* kind = dtype_.code < std::size(kKinds) ? kKinds[dtype_.code] : "type";
  return concat(kind, int{dtype_.bits});
}

DType Array::float_type() const {
  if (is<float>()) return DType::kF32;
  if (dtype_.bits == 16 && dtype_.lanes == 1) {
    if (dtype_.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat)) return DType::kBF16;
    if (dtype_.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) return DType::kF16;
  }
  throw std::invalid_argument(concat(name_, " is ", dtype_text(), "; float32, bfloat16 or float16 is accepted"));
}

}  // namespace cpumoe
