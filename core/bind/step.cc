// The Python seam of decoder.h: descriptions are read off the values that src/cpumoe/ops/decoder.py has for them.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "decoder/decoder.h"
#include "kernels/dispatch.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

template <class T>
T value_of(nb::handle object, const char* name) {
  return nb::cast<T>(object.attr(name));
}

const float* optional_floats(nb::handle object, const char* name, std::int64_t count) {
  if (object.is_none()) return nullptr;
  const Array array(object, name);
  array.contiguous(1).expect<float>("float32");
  CPUMOE_REQUIRE(array.dim(0) == count, name, " has ", array.dim(0), " values; ", count, " are accepted");
  return array.data<float>();
}

Matrix read_matrix(nb::handle object, const char* name) {
  Matrix matrix;
  if (object.is_none()) return matrix;
  const Array weight(object.attr("weight"), name);
  matrix.ranks = value_of<int>(object, "ranks");
  CPUMOE_REQUIRE(matrix.ranks >= 1, name, " is spread over ", matrix.ranks, " ranks; 1 or more are accepted");
  if (weight.is<std::uint8_t>()) {
    matrix.packed = open_packed(weight.contiguous(1).data(), weight.dim(0), name);
    matrix.columns = matrix.packed.spec.columns * matrix.ranks;
    matrix.depth = matrix.packed.spec.depth;
    return matrix;
  }
  matrix.type = weight.contiguous(2).float_type();
  matrix.columns = weight.dim(0) * matrix.ranks;
  matrix.depth = weight.dim(1);
  matrix.floats = weight.data();
  matrix.bias = optional_floats(object.attr("bias"), name, weight.dim(0));
  return matrix;
}

Norm read_norm(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  const Array weight(object.attr("weight"), name);
  weight.contiguous(1).expect<float>("float32");
  return {weight.data<float>(), weight.dim(0), value_of<float>(object, "epsilon"),
          value_of<bool>(object, "round_first"), value_of<bool>(object, "plus_one")};
}

ActivationSpec read_activation(nb::handle object) {
  const int kind = value_of<int>(object, "kind");
  CPUMOE_REQUIRE(kind >= 0 && kind <= static_cast<int>(Activation::kRelu2), "activation=", kind,
                 "; 0 to 5 are accepted");
  return {static_cast<Activation>(kind), value_of<bool>(object, "gated"), value_of<float>(object, "alpha"),
          value_of<float>(object, "limit")};
}

LatentPart read_latent(nb::handle object, const AttentionPart& a, DType type) {
  LatentPart l;
  l.down = read_matrix(object.attr("down"), "down");
  l.down_norm = read_norm(object.attr("down_norm"), "down_norm");
  l.latent = read_matrix(object.attr("latent"), "latent");
  l.latent_norm = read_norm(object.attr("latent_norm"), "latent_norm");
  l.rank = value_of<std::int64_t>(object, "rank");
  l.nope = value_of<std::int64_t>(object, "nope");
  l.rotated = value_of<std::int64_t>(object, "rotated");
  const Array expansion(object.attr("expansion"), "expansion");
  CPUMOE_REQUIRE(expansion.contiguous(2).float_type() == type &&
                     expansion.dim(0) == a.heads * (l.nope + a.value_depth) && expansion.dim(1) == l.rank,
                 "expansion is ", expansion.dtype_text(), " ", expansion.shape_text(), "; [",
                 a.heads * (l.nope + a.value_depth), ", ", l.rank, "] of the dtype of hidden states is accepted");
  l.expansion = expansion.data();
  return l;
}

AttentionPart read_attention(nb::handle object, DType type) {
  AttentionPart a;
  a.query = read_matrix(object.attr("query"), "query");
  a.key = read_matrix(object.attr("key"), "key");
  a.value = read_matrix(object.attr("value"), "value");
  a.out = read_matrix(object.attr("out"), "out");
  a.gate = read_matrix(object.attr("gate"), "gate");
  a.gated_queries = value_of<bool>(object, "gated_queries");
  a.value_factor = value_of<float>(object, "value_factor");
  a.heads = value_of<std::int64_t>(object, "heads");
  a.kv_heads = value_of<std::int64_t>(object, "kv_heads");
  a.depth = value_of<std::int64_t>(object, "depth");
  a.value_depth = value_of<std::int64_t>(object, "value_depth");
  a.scale = value_of<float>(object, "scale");
  a.query_norm = read_norm(object.attr("query_norm"), "query_norm");
  a.key_norm = read_norm(object.attr("key_norm"), "key_norm");
  a.norms_whole_rows = value_of<bool>(object, "norms_whole_rows");
  a.norms_after_rotary = value_of<bool>(object, "norms_after_rotary");
  a.rotary = value_of<int>(object, "rotary");
  a.interleaved = value_of<bool>(object, "interleaved");
  a.separated = value_of<bool>(object, "separated");
  a.window = value_of<std::int64_t>(object, "window");
  a.sinks = optional_floats(object.attr("sinks"), "sinks", a.heads);
  if (const nb::object factors = object.attr("query_factors"); !factors.is_none()) {
    const Array array(factors, "query_factors");
    array.contiguous(1).expect<float>("float32");
    a.query_factors = array.data<float>();
    a.query_factor_count = array.dim(0);
  }
  a.softcap = value_of<float>(object, "softcap");
  a.ranks = value_of<int>(object, "ranks");
  CPUMOE_REQUIRE(a.ranks >= 1, "attention is spread over ", a.ranks, " ranks; 1 or more are accepted");
  if (const nb::object latent = object.attr("latent"); !latent.is_none()) a.latent = read_latent(latent, a, type);
  return a;
}

Parameters read_parameters(nb::handle object, const char* name, std::int64_t count) {
  const Array array(object, name);
  CPUMOE_REQUIRE(array.contiguous(1).dim(0) == count, name, " is ", array.shape_text(), "; [", count, "] is accepted");
  return {array.data(), array.float_type()};
}

// The weight [channels, taps] and bias of a convolution whose channels are known.
ChannelConvolution read_convolution(nb::handle object, std::int64_t channels) {
  const Array array(object.attr("conv_weight"), "conv_weight");
  CPUMOE_REQUIRE(array.contiguous(2).dim(0) == channels, "conv_weight is ", array.shape_text(), "; [", channels,
                 ", taps] is accepted");
  ChannelConvolution c;
  c.channels = channels;
  c.taps = static_cast<int>(std::min<std::int64_t>(array.dim(1), std::numeric_limits<int>::max()));
  c.weight = {array.data(), array.float_type()};
  if (const nb::object bias = object.attr("conv_bias"); !bias.is_none()) {
    c.bias = read_parameters(bias, "conv_bias", channels);
    CPUMOE_REQUIRE(c.bias.type == c.weight.type, "conv_bias has another dtype than conv_weight");
  }
  return c;
}

DeltaRule read_rule(nb::handle object) {
  DeltaRule r;
  r.key_heads = value_of<std::int64_t>(object, "key_heads");
  r.heads = value_of<std::int64_t>(object, "heads");
  r.key_depth = value_of<std::int64_t>(object, "key_depth");
  r.value_depth = value_of<std::int64_t>(object, "value_depth");
  for (const std::int64_t size : {r.key_heads, r.heads, r.key_depth, r.value_depth}) {
    CPUMOE_REQUIRE(size >= 1 && size <= 4096, "states are of ", r.heads, " heads, ", r.key_heads, " of keys, and ",
                   r.key_depth, " x ", r.value_depth, "; 1 to 4096 are accepted");
  }
  const Array decay_bias(object.attr("decay_bias"), "decay_bias");
  r.decay_of_channels = decay_bias.contiguous(1).dim(0) != r.heads;
  r.decay_bias =
      read_parameters(object.attr("decay_bias"), "decay_bias", r.decay_of_channels ? r.heads * r.key_depth : r.heads);
  r.log_rates = read_parameters(object.attr("log_rates"), "log_rates", r.heads);
  r.decay_bound = value_of<float>(object, "decay_bound");
  r.convolution = read_convolution(object, r.channels());
  r.norm_weight = read_parameters(object.attr("norm_weight"), "norm_weight", r.value_depth);
  r.norm_epsilon = value_of<float>(object, "norm_epsilon");
  r.sigmoid_gate = value_of<bool>(object, "sigmoid_gate");
  return r;
}

ConvolutionPart read_short_convolution(nb::handle object) {
  ConvolutionPart c;
  c.projection = read_matrix(object.attr("projection"), "projection");
  c.out = read_matrix(object.attr("out"), "out");
  c.convolution = read_convolution(object, c.out.depth);
  return c;
}

DeltaPart read_delta(nb::handle object) {
  DeltaPart d;
  d.rule = read_rule(object);
  for (const nb::handle matrix : object.attr("projections"))
    d.projections.push_back(read_matrix(matrix, "projections"));
  for (const nb::handle expansion : object.attr("expansions")) {
    d.expansions.push_back(
        {read_matrix(expansion.attr("matrix"), "expansions"), value_of<std::int64_t>(expansion, "first")});
  }
  const nb::object places = object.attr("columns");
  const auto columns_of = [&](const char* name) {
    const nb::object columns = places.attr(name);
    return DeltaPart::Columns{value_of<std::int64_t>(columns, "first"), value_of<std::int64_t>(columns, "group"),
                              value_of<std::int64_t>(columns, "group_stride"),
                              value_of<std::int64_t>(columns, "head_stride")};
  };
  d.queries = columns_of("queries");
  d.keys = columns_of("keys");
  d.values = columns_of("values");
  d.gates = columns_of("gates");
  d.betas = columns_of("betas");
  d.decays = columns_of("decays");
  d.out = read_matrix(object.attr("out"), "out");
  return d;
}

Router read_router(nb::handle object, DType type) {
  Router r;
  r.weight = read_matrix(object.attr("weight"), "router");
  r.topk = value_of<std::int64_t>(object, "topk");
  const int scoring = value_of<int>(object, "scoring");
  CPUMOE_REQUIRE(scoring >= 0 && scoring <= static_cast<int>(Scoring::kSqrtSoftplus), "scoring=", scoring,
                 "; 0 to 3 are accepted");
  r.scoring = static_cast<Scoring>(scoring);
  r.score_chosen = value_of<bool>(object, "score_chosen");
  r.renormalize = value_of<bool>(object, "renormalize");
  r.correction = optional_floats(object.attr("correction"), "correction", r.weight.columns);
  r.groups = value_of<std::int64_t>(object, "groups");
  r.topk_groups = value_of<std::int64_t>(object, "topk_groups");
  r.scale = value_of<float>(object, "scale");
  r.logits = value_of<bool>(object, "in_fp32") ? DType::kF32 : type;
  return r;
}

PackedMatrix read_packed(nb::handle object, const char* name) {
  const Array blob(object, name);
  blob.contiguous(1).expect<std::uint8_t>("uint8 (packed weights)");
  return open_packed(blob.data(), blob.dim(0), name);
}

RoutedExperts read_experts(nb::handle object, DType type) {
  RoutedExperts e;
  e.router = read_router(object.attr("router"), type);
  if (!object.attr("gate_up").is_none()) {
    e.gate_up = read_packed(object.attr("gate_up"), "gate_up");
    e.down = read_packed(object.attr("down"), "down");
  }
  e.spread = value_of<bool>(object, "spread");
  const std::int64_t experts = e.router.weight.columns;
  if (const nb::object copies = object.attr("copies"); !copies.is_none()) {
    const Array begins(copies.attr("begins"), "begins"), places(copies.attr("places"), "places");
    const Array ranks(copies.attr("ranks"), "ranks");
    e.copy_begins = begins.contiguous(1).expect<std::int32_t>("int32").data<std::int32_t>();
    e.copy_places = places.contiguous(1).expect<std::int32_t>("int32").data<std::int32_t>();
    CPUMOE_REQUIRE(e.spread && begins.dim(0) == experts + 1, "begins of copies are ", begins.shape_text(), "; [",
                   experts + 1, "] of experts that are spread is accepted");
    for (std::int64_t i = 0; i < experts; ++i) {
      CPUMOE_REQUIRE(e.copy_begins[0] == 0 && e.copy_begins[i] < e.copy_begins[i + 1], "expert ", i, " has no copy");
    }
    e.copy_ranks = ranks.contiguous(1).expect<std::int32_t>("int32").data<std::int32_t>();
    for (const Array* array : {&places, &ranks}) {
      CPUMOE_REQUIRE(array->dim(0) == e.copy_begins[experts], array->name(), " of copies are ", array->shape_text(),
                     "; [", e.copy_begins[experts], "] is accepted");
    }
  }
  if (const nb::object loads = object.attr("loads"); !loads.is_none()) {
    const Array array(loads, "loads");
    CPUMOE_REQUIRE(array.writable().contiguous(1).dim(0) == experts, "loads are ", array.shape_text(), "; [", experts,
                   "] is accepted");
    e.loads = array.expect<std::int64_t>("int64").data<std::int64_t>();
  }
  const int travel = value_of<int>(object, "travel");
  CPUMOE_REQUIRE(travel >= 0 && travel <= static_cast<int>(RowTravel::kToExperts), "travel=", travel,
                 "; 0 to 2 are accepted");
  e.travel = static_cast<RowTravel>(travel);
  e.prepared_rows = value_of<bool>(object, "prepared_rows");
  e.activation = read_activation(object.attr("activation"));
  e.weight_on_input = value_of<bool>(object, "weight_on_input");
  return e;
}

DenseBlock read_dense(nb::handle object) {
  DenseBlock d;
  d.gate = read_matrix(object.attr("gate"), "gate");
  d.up = read_matrix(object.attr("up"), "up");
  d.down = read_matrix(object.attr("down"), "down");
  d.activation = read_activation(object.attr("activation"));
  d.share = read_matrix(object.attr("share"), "share");
  return d;
}

DecoderLayer read_layer(nb::handle object, DType type) {
  DecoderLayer layer;
  layer.before_attention = read_norm(object.attr("before_attention"), "before_attention");
  layer.after_attention = read_norm(object.attr("after_attention"), "after_attention");
  layer.before_block = read_norm(object.attr("before_block"), "before_block");
  layer.after_block = read_norm(object.attr("after_block"), "after_block");
  if (const nb::object delta = object.attr("delta"); !delta.is_none()) {
    layer.delta = read_delta(delta);
  } else if (const nb::object convolution = object.attr("convolution"); !convolution.is_none()) {
    layer.convolution = read_short_convolution(convolution);
  } else {
    layer.attention = read_attention(object.attr("attention"), type);
  }
  if (const nb::object experts = object.attr("experts"); !experts.is_none())
    layer.experts = read_experts(experts, type);
  if (const nb::object dense = object.attr("dense"); !dense.is_none()) layer.dense = read_dense(dense);
  layer.residual_factor = value_of<float>(object, "residual_factor");
  return layer;
}

RotaryTable read_rotary(nb::handle object) {
  const Array cos(object.attr("cos"), "cos"), sin(object.attr("sin"), "sin");
  cos.contiguous(2).expect<float>("float32");
  sin.contiguous(2).expect<float>("float32");
  CPUMOE_REQUIRE(cos.dim(0) == sin.dim(0) && cos.dim(1) == sin.dim(1), "cos is ", cos.shape_text(), ", but sin is ",
                 sin.shape_text());
  return {cos.data<float>(), sin.data<float>(), cos.dim(0), cos.dim(1)};
}

DecoderModel read_model(nb::handle object) {
  DecoderModel model;
  const Array embedding(object.attr("embedding"), "embedding");
  model.type = embedding.contiguous(2).float_type();
  model.vocabulary = embedding.dim(0);
  model.hidden = embedding.dim(1);
  model.embedding = embedding.data();
  model.embedding_factor = value_of<float>(object, "embedding_factor");
  for (const nb::handle table : object.attr("rotary")) model.rotary.push_back(read_rotary(table));
  for (const nb::handle layer : object.attr("layers")) model.layers.push_back(read_layer(layer, model.type));
  model.norm = read_norm(object.attr("norm"), "norm");
  model.head = read_matrix(object.attr("head"), "head");
  const auto exchange_of = [&](const char* name) {
    const nb::object exchange = object.attr(name);
    return exchange.is_none() ? nullptr : nb::cast<RankExchange*>(exchange);
  };
  model.exchange = exchange_of("exchange");
  model.group = exchange_of("group");
  return model;
}

// The width of what a cache holds of a token and a head: so many numbers of the type, or the bytes of their record.
std::int64_t cached_width(const Array& array, std::int64_t depth, DType type) {
  if (array.writable().contiguous(4).is<std::int8_t>()) return cache_record_bytes(depth);
  CPUMOE_REQUIRE(array.float_type() == type, array.name(), " is ", array.dtype_text(),
                 ", unlike the hidden states; their dtype, or int8 for records, is accepted");
  return depth;
}

LayerCache read_cache(nb::handle entry, const AttentionPart& a, DType type, std::int64_t batch) {
  const nb::tuple parts = nb::cast<nb::tuple>(entry);
  CPUMOE_REQUIRE(parts.size() == 3, "a cache is (keys, values, first place)");
  const Array keys(parts[0], "keys"), values(parts[1], "values");
  LayerCache cache{};
  cache.first_place = nb::cast<std::int64_t>(parts[2]);
  CPUMOE_REQUIRE(cache.first_place >= 0, "the first place of a cache is ", cache.first_place);
  const auto heads_of = [&](const Array& array, std::int64_t depth) {
    const std::int64_t width = cached_width(array, depth, type);
    CPUMOE_REQUIRE(array.same_type(keys), array.name(), " is ", array.dtype_text(), ", unlike the keys");
    CPUMOE_REQUIRE(
        array.dim(0) == batch && array.dim(1) == a.kv_heads && array.dim(2) == keys.dim(2) && array.dim(3) == width,
        array.name(), " is ", array.shape_text(), "; [", batch, ", ", a.kv_heads, ", ", keys.dim(2), ", ", width,
        "] is accepted");
    return CachedHeads{array.data(), a.kv_heads * array.dim(2) * width, array.dim(2) * width, width};
  };
  // Latents and rotated parts of keys lie side by side; they are the keys, and the latents the values.
  cache.keys = heads_of(keys, a.latent.has_value() ? a.latent->depth() : a.depth);
  cache.values = a.latent.has_value() ? cache.keys : heads_of(values, a.value_depth);
  cache.records = keys.is<std::int8_t>();
  cache.places = keys.dim(2);
  return cache;
}

// The states of all sequences in a layer that has some: (conv_state, state), or of a short convolution (conv_state,).
LayerCache read_states(nb::handle entry, const DecoderLayer& layer, DType type, std::int64_t batch) {
  const nb::tuple parts = nb::cast<nb::tuple>(entry);
  const bool is_delta = layer.delta.has_value();
  CPUMOE_REQUIRE(parts.size() == (is_delta ? 2 : 1), "the cache of a layer with states has ", is_delta ? 2 : 1,
                 " of them");
  const ChannelConvolution& conv = *layer.state_convolution();
  const Array conv_state(parts[0], "conv_state");
  CPUMOE_REQUIRE(conv_state.writable().contiguous(3).float_type() == type && conv_state.dim(0) == batch &&
                     conv_state.dim(1) == conv.channels && conv_state.dim(2) == conv.taps,
                 "conv_state is ", conv_state.dtype_text(), " ", conv_state.shape_text(), "; [", batch, ", ",
                 conv.channels, ", ", conv.taps, "] of the dtype of hidden states is accepted");
  LayerCache cache{};
  cache.conv_state = conv_state.data();
  if (!is_delta) return cache;
  const DeltaRule& rule = layer.delta->rule;
  const Array state(parts[1], "state");
  state.writable().contiguous(4).expect<float>("float32");
  CPUMOE_REQUIRE(state.dim(0) == batch && state.dim(1) == rule.heads && state.dim(2) == rule.key_depth &&
                     state.dim(3) == rule.value_depth,
                 "state is ", state.shape_text(), "; [", batch, ", ", rule.heads, ", ", rule.key_depth, ", ",
                 rule.value_depth, "] is accepted");
  cache.state = state.data<float>();
  return cache;
}

LayerCache read_pages(nb::handle entry, const AttentionPart& a, DType type, std::int64_t page_tokens) {
  const nb::tuple parts = nb::cast<nb::tuple>(entry);
  CPUMOE_REQUIRE(parts.size() == 2, "a cache in pages is (keys, values)");
  const Array keys(parts[0], "keys"), values(parts[1], "values");
  const auto heads_of = [&](const Array& array, std::int64_t depth) {
    const std::int64_t width = cached_width(array, depth, type);
    CPUMOE_REQUIRE(array.same_type(keys), array.name(), " is ", array.dtype_text(), ", unlike the keys");
    CPUMOE_REQUIRE(array.dim(0) == keys.dim(0) && array.dim(1) == a.kv_heads && array.dim(2) == page_tokens &&
                       array.dim(3) == width,
                   array.name(), " is ", array.shape_text(), "; [", keys.dim(0), ", ", a.kv_heads, ", ", page_tokens,
                   ", ", width, "] is accepted");
    return CachedHeads{array.data(), a.kv_heads * page_tokens * width, page_tokens * width, width};
  };
  LayerCache cache{};
  cache.keys = heads_of(keys, a.latent.has_value() ? a.latent->depth() : a.depth);
  cache.values = a.latent.has_value() ? cache.keys : heads_of(values, a.value_depth);
  cache.records = keys.is<std::int8_t>();
  cache.places = keys.dim(0);
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
  explicit DecoderObject(nb::object model) : model_(std::move(model)), decoder_(read_model(model_)) {}

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
      CPUMOE_REQUIRE(input.contiguous(3).float_type() == model.type && input.dim(2) == model.hidden,
                     "hidden states are ", input.dtype_text(), " ", input.shape_text(), "; rows of ", model.hidden,
                     " of the decoder's dtype are accepted");
    }
    const std::int64_t batch = input.dim(0), count = input.dim(1);
    CPUMOE_REQUIRE(past >= 0 && past < (std::int64_t{1} << 40), "past=", past, "; 0 to 2^40 are accepted");
    CPUMOE_REQUIRE(kept >= 0 && kept <= count, "keep=", kept, " of ", count, " tokens");
    Step step;
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
    for (const nb::handle entry : caches) {
      CPUMOE_REQUIRE(step.caches.size() < model.layers.size(), "there are caches for more than ", model.layers.size(),
                     " layers");
      const DecoderLayer& layer = model.layers[step.caches.size()];
      step.caches.push_back(layer.state_convolution() != nullptr
                                ? read_states(entry, layer, model.type, batch)
                                : read_cache(entry, layer.attention, model.type, batch));
    }
    step.hidden_out = result(hidden_out_, "hidden_out", batch, kept, model.hidden);
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
    Step step;
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
    std::int64_t least = std::numeric_limits<std::int64_t>::max();  // of pages that all layers have
    for (const nb::handle entry : caches) {
      CPUMOE_REQUIRE(step.caches.size() < model.layers.size(), "there are caches for more than ", model.layers.size(),
                     " layers");
      const DecoderLayer& layer = model.layers[step.caches.size()];
      if (layer.state_convolution() != nullptr) {
        step.caches.push_back(read_states(entry, layer, model.type, pages.dim(0)));
        continue;
      }
      step.caches.push_back(read_pages(entry, layer.attention, model.type, page_tokens));
      LayerCache& cache = step.caches.back();
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
    CPUMOE_REQUIRE(out.writable().contiguous(2).float_type() == model.type && out.dim(0) == wanted.dim(0) &&
                       out.dim(1) == model.head.columns,
                   "logits_out is ", out.dtype_text(), " ", out.shape_text(), "; [", wanted.dim(0), ", ",
                   model.head.columns, "] of the dtype of hidden states is accepted");
    step.logits_out = out.data();
    step.clears_states = true;
    const Computation computation;
    decoder_.step(active_kernels(), step);
  }

  // A step in which this rank has no rows.
  std::int64_t help() {
    const Computation computation;
    return decoder_.step(active_kernels(), {});
  }

  nb::list take_seconds() {
    double seconds[kStepParts];
    decoder_.take_seconds(seconds);
    nb::list list;
    for (const double part : seconds) list.append(part);
    return list;
  }

 private:
  static std::optional<Array> given(nb::handle object, const char* name) {
    return object.is_none() ? std::nullopt : std::optional<Array>(std::in_place, object, name);
  }

  void* result(nb::handle object, const char* name, std::int64_t batch, std::int64_t kept, std::int64_t width) const {
    if (object.is_none()) return nullptr;
    const Array out(object, name);
    CPUMOE_REQUIRE(out.writable().contiguous(3).float_type() == decoder_.model().type, name, " is ", out.dtype_text(),
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
      .def("help", &DecoderObject::help)
      .def("step", &DecoderObject::step, "tokens"_a, "caches"_a, "past"_a, "positions"_a.none(), "padding"_a.none(),
           "kept"_a, "hidden_out"_a.none(), "logits_out"_a.none())
      .def("step_rows", &DecoderObject::step_rows, "tokens"_a, "sequences"_a, "places"_a, "pages"_a, "page_tokens"_a,
           "caches"_a, "wanted"_a, "logits_out"_a)
      .def("take_seconds", &DecoderObject::take_seconds);
  m.def("has_changed", &has_changed, "entries"_a);
}

}  // namespace cpumoe
