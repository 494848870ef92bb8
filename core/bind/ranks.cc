// Exchanges of ranks for Python, through shared memory or carried by Python, and experts that are spread over ranks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "bind/schema.h"
#include "kernels/dispatch.h"
#include "ranks/packed_experts.h"
#include "ranks/shared_exchange.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

// Writable always: PyTorch warns of tensors that are not.
nb::object view_of(const void* data, std::int64_t bytes) {
  static char nothing[1];  // a memoryview does not take a null pointer, not even for nothing
  char* address = bytes == 0 ? nothing : const_cast<char*>(static_cast<const char*>(data));
  PyObject* view = PyMemoryView_FromMemory(address, static_cast<Py_ssize_t>(bytes), PyBUF_WRITE);
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

// Carries messages by functions of Python's, of memoryviews: for ranks that share no memory.
class CarriedExchange : public RankExchange {
 public:
  using Sizes = std::vector<std::int64_t>;
  CarriedExchange(int rank, int ranks, nb::callable gather, nb::callable trade, nb::callable sum, nb::callable largest)
      : RankExchange(rank, ranks),
        gather_(std::move(gather)),
        trade_(std::move(trade)),
        sum_(std::move(sum)),
        largest_(std::move(largest)) {}

  int visit(visitproc visit, void* arg) const {
    for (const nb::callable* function : {&gather_, &trade_, &sum_, &largest_}) Py_VISIT(function->ptr());
    return 0;
  }

 private:
  Sizes sizes_of(const std::int64_t* begins) const {
    Sizes sizes(static_cast<std::size_t>(ranks()));
    for (int r = 0; r < ranks(); ++r) sizes[static_cast<std::size_t>(r)] = begins[r + 1] - begins[r];
    return sizes;
  }

  // Python's exceptions must not outlive the lock that they were raised under.
  template <class Body>
  static void in_python(Body&& body) {
    const nb::gil_scoped_acquire lock;
    std::string text;
    try {
      body();
      return;
    } catch (nb::python_error& error) {
      text = nb::cast<std::string>(nb::str(error.value()));
    }
    throw RankFailure(text);
  }

  void do_gather(const void* mine, const std::int64_t* begins, void* all) override {
    in_python([&] {
      gather_(view_of(mine, begins[rank() + 1] - begins[rank()]), sizes_of(begins), view_of(all, begins[ranks()]));
    });
  }
  void do_trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) override {
    in_python([&] {
      trade_(view_of(mine, begins[ranks()]), sizes_of(begins), view_of(all, given[ranks()]), sizes_of(given));
    });
  }
  void do_sum(float* values, std::int64_t count) override {
    in_python([&] { sum_(view_of(values, count * 4)); });
  }
  void do_largest(float* values, std::int64_t count) override {
    in_python([&] { largest_(view_of(values, count * 4)); });
  }

  nb::callable gather_, trade_, sum_, largest_;
};

using Sizes = std::vector<std::int64_t>;

Sizes begins_of(const RankExchange& exchange, const Sizes& sizes, const Array& whole) {
  CPUMOE_REQUIRE(static_cast<int>(sizes.size()) == exchange.ranks(), sizes.size(), " sizes for ", whole.name(),
                 "; one for each of ", exchange.ranks(), " ranks is accepted");
  Sizes begins(sizes.size() + 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    CPUMOE_REQUIRE(sizes[i] >= 0, "a size of ", sizes[i], " for ", whole.name(), "; 0 or more is accepted");
    begins[i + 1] = begins[i] + sizes[i];
  }
  CPUMOE_REQUIRE(begins.back() == whole.size(), whole.name(), " has ", whole.size(), " bytes; ", begins.back(),
                 " are accepted");
  return begins;
}

const Array& bytes_in(const Array& array) { return array.contiguous(1).expect<std::uint8_t>("uint8"); }

void gather(RankExchange& exchange, nb::handle mine_, const Sizes& sizes, nb::handle all_) {
  const Array mine(mine_, "mine"), all(all_, "all");
  const Sizes begins = begins_of(exchange, sizes, bytes_in(all.writable()));
  const std::int64_t expected = sizes[static_cast<std::size_t>(exchange.rank())];
  CPUMOE_REQUIRE(bytes_in(mine).size() == expected, "mine has ", mine.size(), " bytes; ", expected, " are accepted");
  {
    const nb::gil_scoped_release release;
    exchange.gather_parts(mine.data(), begins.data(), all.data());
  }
  exchange.rethrow();
}

void trade(RankExchange& exchange, nb::handle mine_, const Sizes& sizes, nb::handle all_, const Sizes& given) {
  const Array mine(mine_, "mine"), all(all_, "all");
  const Sizes begins = begins_of(exchange, sizes, bytes_in(mine));
  const Sizes theirs = begins_of(exchange, given, bytes_in(all.writable()));
  {
    const nb::gil_scoped_release release;
    exchange.trade(mine.data(), begins.data(), all.data(), theirs.data());
  }
  exchange.rethrow();
}

template <void (RankExchange::*kMessage)(float*, std::int64_t) noexcept>
void fold(RankExchange& exchange, nb::handle values_) {
  const Array values(values_, "values");
  auto* data = values.writable().contiguous(1).expect<float>("float32").data<float>();
  {
    const nb::gil_scoped_release release;
    (exchange.*kMessage)(data, values.size());
  }
  exchange.rethrow();
}

// The ids of `experts` or -1; refuses others, before anything is counted or sent.
const std::int32_t* expert_ids(const Array& ids, std::int64_t experts, std::vector<std::int32_t>& narrow) {
  const std::int32_t* found = narrow_ids(ids.contiguous(2), experts, narrow);
  for (std::int64_t i = 0; i < ids.size(); ++i) {
    CPUMOE_REQUIRE(found[i] >= -1 && found[i] < experts, "topk_ids hold ", found[i], "; 0 to ", experts - 1,
                   " are experts and -1 means none");
  }
  return found;
}

template <class T>
std::span<T> values_of(const Array& array, const char* type) {
  using Value = std::remove_const_t<T>;
  return {array.contiguous(1).expect<Value>(type).template data<Value>(), static_cast<std::size_t>(array.dim(0))};
}

// Writes the slot of the copy that each token takes of each of its experts, and counts in `loads` how often each expert
// is chosen. The slots of expert e are slots[begins[e]] to slots[begins[e + 1] - 1].
void choose_slots(nb::handle ids_, nb::handle begins_, nb::handle slots_, std::int64_t first_token, nb::handle loads_,
                  nb::handle out_) {
  const Array ids(ids_, "topk_ids"), begins(begins_, "begins"), slots(slots_, "slots");
  const Array loads(loads_, "loads"), out(out_, "out");
  PackedExperts experts;
  experts.loads = values_of<std::int64_t>(loads.writable(), "int64");
  const auto starts = values_of<const std::int32_t>(begins, "int32"),
             places = values_of<const std::int32_t>(slots, "int32");
  CPUMOE_REQUIRE(starts.empty() || static_cast<int>(places.size()) == starts.back(), "slots has ", places.size(),
                 " values; ", starts.back(), " are accepted");
  experts.copies = Copies{starts, places, places};  // the ranks of the slots are not needed
  experts.copies->check(loads.dim(0));
  out.writable().contiguous(2).expect<std::int32_t>("int32");
  CPUMOE_REQUIRE(out.dim(0) == ids.dim(0) && out.dim(1) == ids.dim(1) && first_token >= 0,
                 "out must have the shape of topk_ids");
  std::vector<std::int32_t> narrow;
  const std::int32_t* found = expert_ids(ids, loads.dim(0), narrow);
  experts.count_loads(found, ids.size());
  const ChosenRows rows{&experts, nullptr, DType::kF32, 0, ids.dim(0), ids.dim(1), found, nullptr, first_token};
  rows.find_places(out.data<std::int32_t>());
}

// The experts of a layer on all ranks: `experts_` is a PackedExperts of src/cpumoe/ops/decoder.py.
void spread_experts(nb::handle x_, nb::handle ids_, nb::handle weights_, nb::handle experts_, std::int64_t first_token,
                    RankExchange* exchange, RankExchange* group, nb::handle out_) {
  const Array x(x_, "hidden_states"), ids(ids_, "topk_ids"), weights(weights_, "topk_weights"), out(out_, "out");
  const auto experts = read_fields<PackedExperts>(experts_);
  check_rows(x, ids, weights, out.expect<float>("float32"));
  experts.check(x.dim(1), x.float_type(), exchange);
  check_group(exchange, group);
  CPUMOE_REQUIRE(first_token >= 0, "first_token=", first_token, "; 0 or more is accepted");
  std::vector<std::int32_t> narrow;
  const std::int32_t* found = expert_ids(ids, experts.count(), narrow);
  experts.count_loads(found, ids.size());  // before the GIL is released: threads may share a layer
  const Computation computation;
  spread_forward(
      active_kernels(),
      {&experts, x.data(), x.float_type(), x.dim(1), x.dim(0), ids.dim(1), found, weights.data<float>(), first_token},
      exchange, group, out.data<float>());
}

}  // namespace

void bind_exchange(nb::module_& m) {
  using namespace nb::literals;
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const RankFailure& failure) {
      const nb::object error = nb::module_::import_("cpumoe.errors").attr("RankError");
      const std::string text = failure.what();  // in parts what another process has written
      PyObject* message = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
      if (message == nullptr) return;
      PyErr_SetObject(error.ptr(), nb::steal(message).ptr());
    }
  });
  m.def("choose_slots", &choose_slots, "ids"_a, "begins"_a, "slots"_a, "first_token"_a, "loads"_a, "out"_a);
  nb::class_<RankExchange>(m, "RankExchange", nb::is_weak_referenceable())
      .def_prop_ro("rank", &RankExchange::rank)
      .def_prop_ro("ranks", &RankExchange::ranks)
      .def_prop_ro("waited_seconds", &RankExchange::waited_seconds)
      .def("gather", &gather, "mine"_a, "sizes"_a, "all"_a)
      .def("trade", &trade, "mine"_a, "sizes"_a, "all"_a, "given"_a)
      .def("sum", &fold<&RankExchange::sum>, "values"_a)
      .def("largest", &fold<&RankExchange::largest>, "values"_a)
      .def("check", &RankExchange::check)
      .def("fail", &RankExchange::fail, "reason"_a);
  nb::class_<SharedExchange, RankExchange>(m, "SharedExchange", nb::is_weak_referenceable())
      .def(nb::init<int, int, int, std::int64_t, double, int>(), "file"_a, "rank"_a, "ranks"_a, "slot_bytes"_a,
           "seconds"_a, "first_rank"_a = 0)
      .def_static("file_bytes", &SharedExchange::file_bytes, "ranks"_a, "slot_bytes"_a);
  nb::class_<CarriedExchange, RankExchange>(m, "CarriedExchange", nb::is_weak_referenceable(),
                                            nb::type_slots(traverse_slots<CarriedExchange>()))
      .def(nb::init<int, int, nb::callable, nb::callable, nb::callable, nb::callable>(), "rank"_a, "ranks"_a,
           "gather"_a, "trade"_a, "sum"_a, "largest"_a,
           nb::sig("def __init__(self, rank: int, ranks: int, gather: object, trade: object, sum: object, largest: "
                   "object) -> None"));
  m.def("spread_experts", &spread_experts, "x"_a, "ids"_a, "weights"_a, "experts"_a, "first_token"_a,
        "exchange"_a.none(), "group"_a.none(), "out"_a);
}

}  // namespace cpumoe
