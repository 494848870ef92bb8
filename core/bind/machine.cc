// The Python seam of the machine: instruction sets, threads, NUMA nodes, memory, and their rates.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "ops/measure.h"
#include "packed/placement.h"
#include "runtime/check.h"
#include "runtime/mapped_file.h"
#include "runtime/memory.h"
#include "runtime/numa.h"
#include "runtime/threads.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

double measure_reading(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  const std::uint8_t* bytes = data.data();
  const std::int64_t count = data.dim(0);
  const nb::gil_scoped_release release;
  return read_rate(active_kernels(), bytes, count);
}

double measure_dots(std::int64_t iterations, bool floats) {
  const nb::gil_scoped_release release;
  return dot_rate(active_kernels(), iterations, floats);
}

std::vector<std::tuple<const char*, bool, std::string, bool>> list_instruction_sets() {
  std::vector<std::tuple<const char*, bool, std::string, bool>> rows;
  for (const IsaEntry& e : instruction_sets()) {
    const bool portable_floats = e.kernels == nullptr || e.kernels->arithmetic.portable_floats;
    rows.emplace_back(e.name, e.supported, e.reason, portable_floats);
  }
  return rows;
}

void advise(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  advise_huge_pages(data.data(), data.dim(0));
}

void set_node_places(const std::vector<std::pair<std::vector<int>, int>>& places) {
  std::vector<NodePlace> wanted;
  for (const auto& [cpus, memory_node] : places) wanted.push_back({cpus, memory_node});
  set_nodes(std::move(wanted));
}

std::vector<int> node_shares(const std::vector<int>& cpus, int count) {
  CPUMOE_REQUIRE(!cpus.empty(), "there are no nodes");
  std::vector<NodePlace> places;
  int next = 0;
  for (const int own : cpus) {
    places.emplace_back();
    for (int i = 0; i < own; ++i) places.back().cpus.push_back(next++);
  }
  const Nodes nodes(std::move(places));
  std::vector<int> out;
  for (int i = 0; i < count; ++i) out.push_back(nodes.of(i, count));
  return out;
}

std::tuple<std::int64_t, std::int64_t, int> place(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  auto* bytes = static_cast<std::uint8_t*>(data.data());
  const PackedMatrix matrix = open_packed(bytes, data.dim(0), "data");
  Placement placed;
  {
    const nb::gil_scoped_release released;
    placed = place_packed(matrix, bytes);
  }
  return {placed.pages, placed.elsewhere, placed.problem};
}

}  // namespace

void bind_machine(nb::module_& m) {
  using namespace nb::literals;
  m.def("read_rate", &measure_reading, "data"_a);
  m.def("dot_rate", &measure_dots, "iterations"_a, "floats"_a = false);
  m.def("instruction_sets", &list_instruction_sets);
  m.def("isa", [] { return active_kernels().name; });
  m.def("use_isa", &use_kernels, "name"_a);
  m.def("thread_count", &thread_count);
  m.def("set_thread_count", &set_thread_count, "threads"_a);
  m.def("thread_source", &thread_source);
  m.def("available_cpus", &available_cpus);
  m.def("set_cpu_quota", &set_cpu_quota, "cpus"_a);
  m.def("amx_palette_hidden", &amx_palette_hidden);
  m.def("cpu_name", &cpu_name);
  m.def("advise_huge_pages", &advise, "data"_a);
  m.def("set_nodes", &set_node_places, "places"_a);
  m.def("node_shares", &node_shares, "cpus"_a, "count"_a);
  m.def("place_packed", &place, "data"_a);
  m.def("guard_mapping", &guard_mapping, "address"_a, "bytes"_a, "path"_a);
}

}  // namespace cpumoe
