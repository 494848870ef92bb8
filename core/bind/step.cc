// The Python seam of the decoder: its schema is read off the values of src/cpumoe/ops/decoder.py, field by field.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "bind/schema.h"
#include "decoder/decoder.h"
#include "decoder/mixer.h"
#include "kernels/dispatch.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

// Describes the fields of a struct to Python: {field: (type, may be None)}. A type is a name, the largest number of an
// enum, the description of a struct, [type] for a vector, or {kind: description} for a variant.
class Description {
 public:
  nb::dict found;

  template <class T>
  void operator()(const char* name, T& field) {
    found[name] = nb::make_tuple(described(field), MayBeNone<T>::value);
  }

 private:
  template <class T>
  static nb::object described(T& field) {
    if constexpr (std::is_enum_v<T>) {
      return nb::int_(static_cast<int>(last_of(field)));
    } else if constexpr (type_name(static_cast<T*>(nullptr)) != nullptr) {
      return nb::str(type_name(&field));
    } else {
      Description description;
      fields(description, field);
      return std::move(description.found);
    }
  }

  template <class T>
  static nb::object described(std::optional<T>&) {
    T value;
    return described(value);
  }

  template <class T>
  static nb::object described(std::vector<T>&) {
    T item;
    nb::list types;
    types.append(described(item));
    return types;
  }

  template <class... Kinds>
  static nb::object described(std::variant<Kinds...>&) {
    nb::dict kinds;
    const auto add = [&](auto kind) { kinds[decltype(kind)::kName] = described(kind); };
    (add(Kinds()), ...);
    return kinds;
  }
};

nb::dict decoder_fields() {
  DecoderModel model;
  Description description;
  fields(description, model);
  return std::move(description.found);
}

// The cache of a layer: a tensor for each part of its layout and, where tokens are kept, the place of the first one.
// Tokens lie in rooms [batch, heads, places, width], or in pages [pages, heads, page_tokens, width].
LayerCache read_cache(nb::handle entry, const CacheLayout& layout, DType type, std::int64_t batch,
                      std::int64_t page_tokens) {
  CPUMOE_REQUIRE(nb::isinstance<nb::tuple>(entry), "caches holds ", nb::cast<std::string>(nb::repr(entry)),
                 "; a tuple for each layer is accepted");
  const auto given = nb::borrow<nb::tuple>(entry);
  const bool has_first_place = page_tokens == 0 && layout.count(CachePart::kToken) > 0;
  CPUMOE_REQUIRE(given.size() == layout.parts.size() + has_first_place, "a layer in caches has ", given.size(),
                 " entries; ", layout.parts.size(), has_first_place ? " and the place of the first token are" : " are",
                 " accepted");
  LayerCache cache{};
  if (has_first_place) {
    static const std::string kName = "the first place in caches";
    cache.first_place = cast<std::int64_t>(given[layout.parts.size()], kName);
    CPUMOE_REQUIRE(cache.first_place >= 0 && cache.first_place < (std::int64_t{1} << 40),
                   "the first place in caches is ", cache.first_place, "; 0 to 2^40 - 1 are accepted");
  }
  std::optional<Array> first;  // part per token, which the others must be like
  int tokens = 0, states = 0;
  for (std::size_t i = 0; i < layout.parts.size(); ++i) {
    const CachePart& part = layout.parts[i];
    const Array array(given[i], part.name);
    array.writable().contiguous(part.per == CachePart::kToken ? 4 : static_cast<int>(part.shape.size()) + 1);
    const bool fits_in = part.per == CachePart::kSequence ? states < 2 : tokens < 2;
    CPUMOE_REQUIRE(fits_in, part.name, " is the third tensor of its kind in a layer; two fit into a LayerCache");
    if (part.per == CachePart::kSequence) {
      bool fits = array.float_type() == part.type && array.dim(0) == batch;
      for (std::size_t d = 0; d < part.shape.size(); ++d)
        fits = fits && array.dim(static_cast<int>(d) + 1) == part.shape[d];
      std::string expected = concat("[", batch);
      for (const std::int64_t size : part.shape) expected += concat(", ", size);
      CPUMOE_REQUIRE(fits, part.name, " is ", array.dtype_text(), " ", array.shape_text(), "; ", expected, "] of ",
                     part.type == type ? "the dtype of hidden states" : "float32", " is accepted");
      cache.states[states++] = array.data();
      continue;
    }
    cache.is_int8 = array.is<std::int8_t>();
    CPUMOE_REQUIRE(cache.is_int8 ? part.may_be_int8 : array.float_type() == part.type, part.name, " is ",
                   array.dtype_text(), ", unlike the hidden states; their dtype, or int8 for records, is accepted");
    if (!first) first.emplace(array);
    const std::int64_t heads = part.shape[0];
    const std::int64_t width = cache.is_int8 ? cache_record_bytes(part.shape[1]) : part.shape[1];
    const std::int64_t rooms = page_tokens == 0 ? batch : first->dim(0);
    const std::int64_t places = page_tokens == 0 ? first->dim(2) : page_tokens;
    CPUMOE_REQUIRE(array.same_type(*first), part.name, " is ", array.dtype_text(), ", unlike the keys");
    CPUMOE_REQUIRE(array.dim(0) == rooms && array.dim(1) == heads && array.dim(2) == places && array.dim(3) == width,
                   part.name, " is ", array.shape_text(), "; [", rooms, ", ", heads, ", ", places, ", ", width,
                   "] is accepted");
    cache.tokens[tokens++] = {array.data(), heads * places * width, places * width, width};
    cache.places = page_tokens == 0 ? places : rooms;
  }
  return cache;
}

// Whether one of the entries of a model's modules is another one than when the decoder was built. An entry is (dict,
// key, value, address, version): the value that the dict had (None: no such key, or None), and of a tensor its
// data_ptr() and _version, or None where these are not compared. One call for all of them, because it comes before
// every step: some 100 ns for a tensor and 20 for another value.
bool has_changed(const nb::tuple& entries) {
  static PyObject* const kAddress = PyUnicode_InternFromString("data_ptr");
  static PyObject* const kVersion = PyUnicode_InternFromString("_version");
  const auto is_number = [](PyObject* found, PyObject* expected) {
    if (found == nullptr) throw nb::python_error();
    const nb::object number = nb::steal(found);
    const int equal = PyObject_RichCompareBool(number.ptr(), expected, Py_EQ);
    if (equal < 0) throw nb::python_error();
    return equal != 0;
  };
  for (const nb::handle entry : entries) {
    const auto part = [&](Py_ssize_t i) { return PyTuple_GetItem(entry.ptr(), i); };
    PyObject* now = PyDict_GetItemWithError(part(0), part(1));
    if (now == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    if ((now == nullptr ? Py_None : now) != part(2)) return true;
    if (part(3) == Py_None) continue;
    PyObject* const arguments[] = {now};
    if (!is_number(PyObject_VectorcallMethod(kAddress, arguments, 1, nullptr), part(3))) return true;
    if (part(4) != Py_None && !is_number(PyObject_GetAttr(now, kVersion), part(4))) return true;
  }
  return false;
}

// A decoder and the tensors that it works with.
class DecoderObject {
 public:
  explicit DecoderObject(nb::object model) : model_(std::move(model)), decoder_(read_fields<DecoderModel>(model_)) {}

  int visit(visitproc visit, void* arg) const {
    Py_VISIT(model_.ptr());
    return 0;
  }

  std::int64_t vocabulary() const { return decoder_.model().head.columns; }

  void step(nb::handle input_, nb::handle caches, std::int64_t past, nb::handle positions_, nb::handle padding_,
            std::int64_t kept, nb::handle hidden_out_, nb::handle logits_out_) {
    const DecoderModel& model = decoder_.model();
    const Array input(input_, "tokens");
    const bool is_tokens = input.is<std::int64_t>();
    if (is_tokens) {
      input.contiguous(2);
    } else {
      CPUMOE_REQUIRE(input.contiguous(3).float_type() == model.type() && input.dim(2) == model.hidden(),
                     "hidden states are ", input.dtype_text(), " ", input.shape_text(), "; rows of ", model.hidden(),
                     " of the decoder's dtype are accepted");
    }
    const std::int64_t batch = input.dim(0), count = input.dim(1);
    CPUMOE_REQUIRE(past >= 0 && past < (std::int64_t{1} << 40), "past=", past, "; 0 to 2^40 are accepted");
    CPUMOE_REQUIRE(kept >= 0 && kept <= count, "keep=", kept, " of ", count, " tokens");
    StepInput step;
    if (is_tokens) {
      step.tokens = input.data<std::int64_t>();
    } else {
      step.hidden = input.data();
    }
    const std::optional<Array> positions = given(positions_, "positions"), padding = given(padding_, "padding");
    if (positions) {
      positions->contiguous(2).expect<std::int64_t>("int64");
      CPUMOE_REQUIRE((positions->dim(0) == batch || positions->dim(0) == 1) && positions->dim(1) == count,
                     "positions are ", positions->shape_text(), " for tokens ", batch, " x ", count);
    }
    step.seen.assign(static_cast<std::size_t>(batch), 0);
    if (padding) {
      padding->contiguous(1).expect<std::int64_t>("int64");
      CPUMOE_REQUIRE(padding->dim(0) == batch, "padding has ", padding->dim(0), " values for ", batch, " sequences");
      std::copy_n(padding->data<std::int64_t>(), batch, step.seen.begin());
    }
    step.rows.reserve(static_cast<std::size_t>(batch * count));
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t t = 0; t < count; ++t) {
        std::int64_t position = past + t;
        if (positions) {
          const std::int64_t line = positions->dim(0) == 1 ? 0 : b;
          position = positions->data<std::int64_t>()[line * count + t];
        }
        step.rows.push_back({static_cast<std::int32_t>(b), past + t, position});
        if (t >= count - kept) step.wanted.push_back(b * count + t);
      }
    }
    read_caches(caches, batch, 0, step);
    step.hidden_out = result(hidden_out_, "hidden_out", batch, kept, model.hidden());
    step.logits_out = result(logits_out_, "logits_out", batch, kept, model.head.columns);
    const Computation computation;
    decoder_.step(active_kernels(), step);
  }

  // Rows of any sequences, whose keys and values lie in pages: token t of sequence s in page pages[s, t / page_tokens].
  void step_rows(nb::handle tokens_, nb::handle sequences_, nb::handle places_, nb::handle pages_,
                 std::int64_t page_tokens, nb::handle caches, nb::handle wanted_, nb::handle logits_out_) {
    const DecoderModel& model = decoder_.model();
    const Array tokens(tokens_, "tokens"), sequences(sequences_, "sequences"), places(places_, "places");
    const Array pages(pages_, "pages"), wanted(wanted_, "wanted"), out(logits_out_, "logits_out");
    const std::int64_t rows = tokens.contiguous(1).dim(0);
    for (const Array* array : {&tokens, &sequences, &places, &wanted}) {
      array->contiguous(1).expect<std::int64_t>("int64");
      CPUMOE_REQUIRE(array == &wanted || array->dim(0) == rows, array->name(), " has ", array->dim(0), " values for ",
                     rows, " tokens");
    }
    pages.contiguous(2).expect<std::int32_t>("int32");
    CPUMOE_REQUIRE(page_tokens >= 16 && (page_tokens & (page_tokens - 1)) == 0, "page_tokens=", page_tokens,
                   "; a power of two from 16 on is accepted");
    StepInput step;
    step.tokens = tokens.data<std::int64_t>();
    step.seen.assign(static_cast<std::size_t>(pages.dim(0)), 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t sequence = sequences.data<std::int64_t>()[r], place = places.data<std::int64_t>()[r];
      CPUMOE_REQUIRE(sequence >= 0 && sequence < pages.dim(0), "sequences holds ", sequence, "; 0 to ",
                     pages.dim(0) - 1, " are accepted");
      step.rows.push_back({static_cast<std::int32_t>(sequence), place, place});
    }
    step.wanted.assign(wanted.data<std::int64_t>(), wanted.data<std::int64_t>() + wanted.dim(0));
    std::vector<const std::int32_t*> lists;
    for (std::int64_t i = 0; i < pages.dim(0); ++i) lists.push_back(pages.data<std::int32_t>() + i * pages.dim(1));
    read_caches(caches, pages.dim(0), page_tokens, step);
    std::int64_t least = std::numeric_limits<std::int64_t>::max();  // of pages that all layers have
    for (LayerCache& cache : step.caches) {
      if (cache.states[0] != nullptr) continue;
      least = std::min(least, cache.places);
      cache.places = pages.dim(1) * page_tokens;
      cache.page_tokens = page_tokens;
      cache.pages = lists.data();
    }
    for (const StepRow& row : step.rows) {
      CPUMOE_REQUIRE(row.place >= 0 && row.place < pages.dim(1) * page_tokens, "places holds ", row.place, "; 0 to ",
                     pages.dim(1) * page_tokens - 1, " are accepted");
      for (std::int64_t i = 0; i <= row.place / page_tokens; ++i) {
        const std::int64_t page = lists[static_cast<std::size_t>(row.sequence)][i];
        CPUMOE_REQUIRE(page >= 0 && page < least, "pages[", row.sequence, ", ", i, "]=", page, "; the caches have ",
                       least, " pages");
      }
    }
    CPUMOE_REQUIRE(out.writable().contiguous(2).float_type() == model.type() && out.dim(0) == wanted.dim(0) &&
                       out.dim(1) == model.head.columns,
                   "logits_out is ", out.dtype_text(), " ", out.shape_text(), "; [", wanted.dim(0), ", ",
                   model.head.columns, "] of the dtype of hidden states is accepted");
    step.logits_out = out.data();
    step.clears_states = true;
    const Computation computation;
    decoder_.step(active_kernels(), step);
  }

  // Name, whether there is one for each token, shape, dtype, may be int8.
  using PartOfCache = std::tuple<const char*, bool, std::vector<std::int64_t>, int, bool>;

  // The parts of the cache of each layer.
  std::vector<std::vector<PartOfCache>> cache_layouts() const {
    std::vector<std::vector<PartOfCache>> layers;
    for (const CacheLayout& layout : decoder_.cache_layouts()) {
      std::vector<PartOfCache>& parts = layers.emplace_back();
      for (const CachePart& part : layout.parts) {
        parts.emplace_back(part.name, part.per == CachePart::kToken, part.shape, static_cast<int>(part.type),
                           part.may_be_int8);
      }
    }
    return layers;
  }

  // A step in which this rank has no rows.
  std::int64_t help() {
    const Computation computation;
    return decoder_.step(active_kernels(), {});
  }

  std::vector<double> take_seconds() {
    double seconds[kStepParts];
    decoder_.take_seconds(seconds);
    return {std::begin(seconds), std::end(seconds)};
  }

 private:
  void read_caches(nb::handle caches, std::int64_t batch, std::int64_t page_tokens, StepInput& step) const {
    const DecoderModel& model = decoder_.model();
    CPUMOE_REQUIRE(nb::isinstance<nb::sequence>(caches), "caches is no sequence");
    for (const nb::handle entry : caches) {
      CPUMOE_REQUIRE(step.caches.size() < model.layers.size(), "there are caches for more than ", model.layers.size(),
                     " layers");
      const CacheLayout& layout = decoder_.cache_layouts()[step.caches.size()];
      step.caches.push_back(read_cache(entry, layout, model.type(), batch, page_tokens));
    }
  }

  static std::optional<Array> given(nb::handle object, const char* name) {
    return object.is_none() ? std::nullopt : std::optional<Array>(std::in_place, object, name);
  }

  void* result(nb::handle object, const char* name, std::int64_t batch, std::int64_t kept, std::int64_t width) const {
    if (object.is_none()) return nullptr;
    const Array out(object, name);
    CPUMOE_REQUIRE(out.writable().contiguous(3).float_type() == decoder_.model().type(), name, " is ", out.dtype_text(),
                   ", unlike the hidden states");
    CPUMOE_REQUIRE(out.dim(0) == batch && out.dim(1) == kept && out.dim(2) == width, name, " is ", out.shape_text(),
                   "; [", batch, ", ", kept, ", ", width, "] is accepted");
    return out.data();
  }

  nb::object model_;  // holds the tensors
  Decoder decoder_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<DecoderObject>(m, "Decoder", nb::type_slots(traverse_slots<DecoderObject>()))
      .def(nb::init<nb::object>(), "model"_a)
      .def_prop_ro("vocabulary", &DecoderObject::vocabulary)
      .def("cache_layouts", &DecoderObject::cache_layouts)
      .def("help", &DecoderObject::help)
      .def("step", &DecoderObject::step, "tokens"_a, "caches"_a, "past"_a, "positions"_a.none(), "padding"_a.none(),
           "kept"_a, "hidden_out"_a.none(), "logits_out"_a.none())
      .def("step_rows", &DecoderObject::step_rows, "tokens"_a, "sequences"_a, "places"_a, "pages"_a, "page_tokens"_a,
           "caches"_a, "wanted"_a, "logits_out"_a)
      .def("take_seconds", &DecoderObject::take_seconds);
  m.def("decoder_fields", &decoder_fields, nb::sig("def decoder_fields() -> dict[str, tuple[object, bool]]"));
  m.def("has_changed", &has_changed, "entries"_a, nb::sig("def has_changed(entries: tuple[object, ...]) -> bool"));
}

}  // namespace cpumoe
