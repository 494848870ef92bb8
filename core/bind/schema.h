// Reads the structs of decoder/schema.h off the values of src/cpumoe/ops/decoder.py, field by field.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "bind/array.h"
#include "decoder/schema.h"
#include "runtime/check.h"

namespace cpumoe {

// Names of the types of fields, as `decoder_fields()` and errors give them; null for a struct.
constexpr const char* type_name(const bool*) { return "bool"; }
constexpr const char* type_name(const int*) { return "int of 32 bits"; }
constexpr const char* type_name(const std::int64_t*) { return "int"; }
constexpr const char* type_name(const float*) { return "float"; }
constexpr const char* type_name(RankExchange* const*) { return "RankExchange"; }
constexpr const char* type_name(const Matrix*) { return "Matrix"; }
constexpr const char* type_name(const PackedMatrix*) { return "PackedMatrix"; }
constexpr const char* type_name(const Tensor*) { return "Tensor"; }
constexpr const char* type_name(const std::span<const float>*) { return "float32"; }
constexpr const char* type_name(const std::span<const std::int32_t>*) { return "int32"; }
constexpr const char* type_name(const std::span<std::int64_t>*) { return "int64"; }
constexpr const char* type_name(const void*) { return nullptr; }

// Casts a number or an exchange. `name` is the path of the field in the model, as everywhere below.
template <class T>
T cast(nanobind::handle value, const std::string& name) {
  T result{};
  CPUMOE_REQUIRE(nanobind::try_cast(value, result), name, " is ", nanobind::cast<std::string>(nanobind::repr(value)),
                 "; ", type_name(&result), " is accepted");
  return result;
}

inline nanobind::object attribute(nanobind::handle object, const char* attribute, const std::string& name) {
  CPUMOE_REQUIRE(nanobind::hasattr(object, attribute), name, " is missing");
  return object.attr(attribute);
}

constexpr int kMaxRanks = 1 << 16;

inline Matrix read_matrix(nanobind::handle object, const std::string& name) {
  Matrix matrix;
  const std::string weight_name = name + ".weight", bias_name = name + ".bias", ranks_name = name + ".ranks";
  const Array weight(attribute(object, "weight", weight_name), weight_name.c_str());
  const nanobind::object given = attribute(object, "bias", bias_name);
  matrix.ranks = cast<int>(attribute(object, "ranks", ranks_name), ranks_name);
  CPUMOE_REQUIRE(matrix.ranks >= 1 && matrix.ranks <= kMaxRanks, ranks_name, "=", matrix.ranks, "; 1 to ", kMaxRanks,
                 " are accepted");
  if (weight.is<std::uint8_t>()) {
    matrix.packed = open_packed(weight.contiguous(1).data(), weight.dim(0), weight_name.c_str());
    matrix.columns = matrix.packed.spec.columns * matrix.ranks;
    matrix.depth = matrix.packed.spec.depth;
    CPUMOE_REQUIRE(given.is_none(), bias_name, " is given for packed weights, which hold their bias");
    return matrix;
  }
  matrix.type = weight.contiguous(2).float_type();
  CPUMOE_REQUIRE(weight.size() > 0, weight_name, " has no values");
  matrix.columns = weight.dim(0) * matrix.ranks;
  matrix.depth = weight.dim(1);
  matrix.floats = weight.data();
  if (!given.is_none()) {
    const Array bias(given, bias_name.c_str());
    bias.contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(bias.dim(0) == weight.dim(0), bias_name, " has ", bias.dim(0), " values; ", weight.dim(0),
                   " are accepted");
    matrix.bias = bias.data<float>();
  }
  return matrix;
}

// Fields that a part may lack: None leaves them empty.
template <class T>
struct MayBeNone
    : std::bool_constant<std::is_same_v<T, Matrix> || std::is_same_v<T, Norm> || std::is_same_v<T, Tensor> ||
                         std::is_same_v<T, PackedMatrix> || std::is_same_v<T, RankExchange*>> {};
template <class T>
struct MayBeNone<std::optional<T>> : std::true_type {};
template <class T>
struct MayBeNone<std::span<T>> : std::true_type {};

inline Activation last_of(Activation) { return Activation::kRelu2; }
inline Scoring last_of(Scoring) { return Scoring::kSqrtSoftplus; }
inline RowTravel last_of(RowTravel) { return RowTravel::kToExperts; }

// Reads the fields of a struct of decoder/schema.h off the attributes of a Python value.
class Reader {
 public:
  Reader(nanobind::handle object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  template <class T>
  void operator()(const char* field_name, T& field) {
    const std::string name = prefix_ + field_name;
    const nanobind::object value = attribute(object_, field_name, name);
    CPUMOE_REQUIRE(MayBeNone<T>::value || !value.is_none(), name, " is None");
    if (!value.is_none()) read(value, name, field);
  }

 private:
  template <class T>
    requires(std::is_arithmetic_v<T> || std::is_pointer_v<T>)
  static void read(nanobind::handle value, const std::string& name, T& field) {
    field = cast<T>(value, name);
  }

  template <class T>
    requires std::is_enum_v<T>
  static void read(nanobind::handle value, const std::string& name, T& field) {
    const int number = cast<int>(value, name), last = static_cast<int>(last_of(field));
    CPUMOE_REQUIRE(number >= 0 && number <= last, name, "=", number, "; 0 to ", last, " are accepted");
    field = static_cast<T>(number);
  }

  static void read(nanobind::handle value, const std::string& name, Matrix& field) { field = read_matrix(value, name); }

  static void read(nanobind::handle value, const std::string& name, PackedMatrix& field) {
    const Array blob(value, name.c_str());
    blob.contiguous(1).expect<std::uint8_t>("uint8 (packed weights)");
    field = open_packed(blob.data(), blob.dim(0), name.c_str());
  }

  static void read(nanobind::handle value, const std::string& name, Tensor& field) {
    const Array array(value, name.c_str());
    field.dims = array.rank() == 1 ? 1 : 2;  // `contiguous` rejects other ranks
    field.type = array.contiguous(field.dims).float_type();
    for (int i = 0; i < field.dims; ++i) field.shape[i] = array.dim(i);
    CPUMOE_REQUIRE(array.size() > 0, name, " has no values; None is accepted where there are none");
    field.data = array.data();
  }

  // Rejects an array without values, since an empty span stands for None.
  template <class T>
  static void read(nanobind::handle value, const std::string& name, std::span<T>& field) {
    using Value = std::remove_const_t<T>;
    const Array array(value, name.c_str());
    array.contiguous(1).expect<Value>(type_name(&field));
    if (!std::is_const_v<T>) array.writable();
    CPUMOE_REQUIRE(array.dim(0) > 0, name, " has no values; None is accepted where there are none");
    field = {array.data<Value>(), static_cast<std::size_t>(array.dim(0))};
  }

  template <class T>
  static void read(nanobind::handle value, const std::string& name, std::vector<T>& field) {
    CPUMOE_REQUIRE(nanobind::isinstance<nanobind::sequence>(value), name, " is no sequence");
    for (const nanobind::handle item : value) {
      const std::string item_name = concat(name, "[", field.size(), "]");
      CPUMOE_REQUIRE(!item.is_none(), item_name, " is None");
      read(item, item_name, field.emplace_back());
    }
  }

  template <class T>
  static void read(nanobind::handle value, const std::string& name, std::optional<T>& field) {
    read(value, name, field.emplace());
  }

  template <class... Kinds>
  static void read(nanobind::handle value, const std::string& name, std::variant<Kinds...>& field) {
    const auto kind = nanobind::cast<std::string>(nanobind::handle(value.type()).attr("__name__"));
    const bool is_known = ((kind == Kinds::kName && (read(value, name, field.template emplace<Kinds>()), true)) || ...);
    std::string names;
    ((names += (names.empty() ? "" : ", ") + std::string(Kinds::kName)), ...);
    CPUMOE_REQUIRE(is_known, name, " is ", kind, "; accepted are: ", names);
  }

  template <class T>
    requires requires(Reader& v, T& t) { fields(v, t); }
  static void read(nanobind::handle value, const std::string& name, T& field) {
    Reader reader(value, name + ".");
    fields(reader, field);
  }

  nanobind::handle object_;
  std::string prefix_;  // of the names of the fields: the path of the struct in the model
};

template <class T>
T read_fields(nanobind::handle object) {
  T value;
  Reader reader(object, "");
  fields(reader, value);
  return value;
}

}  // namespace cpumoe
