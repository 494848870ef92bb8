// Exchanges of ranks for Python: the one through shared memory, and one whose messages Python carries.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
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

void sum(RankExchange& exchange, nb::handle values_) {
  const Array values(values_, "values");
  auto* data = values.writable().contiguous(1).expect<float>("float32").data<float>();
  {
    const nb::gil_scoped_release release;
    exchange.sum(data, values.size());
  }
  exchange.rethrow();
}

void largest(RankExchange& exchange, nb::handle values_) {
  const Array values(values_, "values");
  auto* data = values.writable().contiguous(1).expect<float>("float32").data<float>();
  {
    const nb::gil_scoped_release release;
    exchange.largest(data, values.size());
  }
  exchange.rethrow();
}

// Counts which experts tokens have chosen, and puts in the place of each the slot that has it. Copies of an expert are
// slots[begins[e]] to slots[begins[e + 1] - 1] and take turns by token; without `begins` an expert is its own slot.
void choose_slots(nb::handle ids_, nb::handle begins_, nb::handle slots_, std::int64_t first_token, nb::handle loads_,
                  nb::handle out_) {
  const Array ids(ids_, "topk_ids"), loads(loads_, "loads"), out(out_, "out");
  const bool narrow = ids.contiguous(2).is<std::int32_t>();
  if (!narrow) ids.expect<std::int64_t>("int32 or int64");
  auto* counts = loads.writable().contiguous(1).expect<std::int64_t>("int64").data<std::int64_t>();
  auto* chosen = out.writable().contiguous(2).expect<std::int32_t>("int32").data<std::int32_t>();
  CPUMOE_REQUIRE(out.dim(0) == ids.dim(0) && out.dim(1) == ids.dim(1) && first_token >= 0,
                 "out must have the shape of topk_ids");
  const std::int64_t experts = loads.dim(0), topk = ids.dim(1);
  const std::int32_t *begins = nullptr, *slots = nullptr;
  if (!begins_.is_none()) {
    const Array of_begins(begins_, "begins"), of_slots(slots_, "slots");
    begins = of_begins.contiguous(1).expect<std::int32_t>("int32").data<std::int32_t>();
    slots = of_slots.contiguous(1).expect<std::int32_t>("int32").data<std::int32_t>();
    CPUMOE_REQUIRE(of_begins.dim(0) == experts + 1 && begins[0] == 0 && begins[experts] == of_slots.dim(0),
                   "begins and slots do not fit");
    for (std::int64_t e = 0; e < experts; ++e) {
      CPUMOE_REQUIRE(begins[e] <= begins[e + 1], "begins[", e, "]=", begins[e], " is above begins[", e + 1,
                     "]=", begins[e + 1]);
    }
  }
  const auto id_at = [&](std::int64_t i) -> std::int64_t {
    return narrow ? ids.data<std::int32_t>()[i] : ids.data<std::int64_t>()[i];
  };
  for (std::int64_t i = 0; i < ids.size(); ++i) {  // all of them, before anything is counted
    CPUMOE_REQUIRE(id_at(i) >= -1 && id_at(i) < experts, "topk_ids hold ", id_at(i), "; 0 to ", experts - 1,
                   " are experts and -1 means none");
  }
  for (std::int64_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id = id_at(i);
    chosen[i] = static_cast<std::int32_t>(id);
    if (id < 0) continue;
    ++counts[id];
    if (begins == nullptr) continue;
    const std::int64_t copies = begins[id + 1] - begins[id];
    CPUMOE_REQUIRE(copies > 0, "expert ", id, " has no copy");
    chosen[i] = slots[begins[id] + (first_token + i / topk) % copies];
  }
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
  m.def("choose_slots", &choose_slots, "ids"_a, "begins"_a.none(), "slots"_a.none(), "first_token"_a, "loads"_a,
        "out"_a);
  nb::class_<RankExchange>(m, "RankExchange", nb::is_weak_referenceable())
      .def_prop_ro("rank", &RankExchange::rank)
      .def_prop_ro("ranks", &RankExchange::ranks)
      .def_prop_ro("waited_seconds", &RankExchange::waited_seconds)
      .def("gather", &gather, "mine"_a, "sizes"_a, "all"_a)
      .def("trade", &trade, "mine"_a, "sizes"_a, "all"_a, "given"_a)
      .def("sum", &sum, "values"_a)
      .def("largest", &largest, "values"_a)
      .def("check", &RankExchange::check)
      .def("fail", &RankExchange::fail, "reason"_a);
  nb::class_<SharedExchange, RankExchange>(m, "SharedExchange", nb::is_weak_referenceable())
      .def(nb::init<int, int, int, std::int64_t, double, int>(), "file"_a, "rank"_a, "ranks"_a, "slot_bytes"_a,
           "seconds"_a, "first_rank"_a = 0)
      .def_static("file_bytes", &SharedExchange::file_bytes, "ranks"_a, "slot_bytes"_a);
  nb::class_<CarriedExchange, RankExchange>(m, "CarriedExchange", nb::is_weak_referenceable(),
                                            nb::type_slots(traverse_slots<CarriedExchange>()))
      .def(nb::init<int, int, nb::callable, nb::callable, nb::callable, nb::callable>(), "rank"_a, "ranks"_a,
           "gather"_a, "trade"_a, "sum"_a, "largest"_a);
}

}  // namespace cpumoe
