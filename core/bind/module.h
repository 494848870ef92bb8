// What the files of the Python seam share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bind/array.h"
#include "packed/layout.h"
#include "runtime/threads.h"

namespace cpumoe {

// Around everything that computes: other Python threads may run, and this one computes as the team does.
struct Computation {
  nanobind::gil_scoped_release release;
  IeeeArithmetic arithmetic;
};

// tp_traverse of a bound class that holds Python objects, so that reference cycles through it are collected. T has
// visit(visitor, argument). None of them has tp_clear: the other objects of a cycle have one, and a decoder whose
// tensors are gone could still be called.
template <class T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nanobind::inst_ready(self) ? nanobind::inst_ptr<T>(self)->visit(visit, arg) : 0;
}

template <class T>
PyType_Slot* traverse_slots() {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse<T>)}, {0, nullptr}};
  return slots;
}

// A checked view of packed weights.
PackedMatrix packed_matrix(const Array& blob);

// Refuses rows, their routing and a result that do not fit each other.
void check_rows(const Array& x, const Array& ids, const Array& weights, const Array& out);

// int32 ids of experts; int64 ones are converted into `narrow`.
const std::int32_t* narrow_ids(const Array& ids, std::int64_t experts, std::vector<std::int32_t>& narrow);

void bind_cache_records(nanobind::module_& m);  // kv_cache.cc
void bind_decoder(nanobind::module_& m);        // step.cc
void bind_exchange(nanobind::module_& m);       // ranks.cc
void bind_experts(nanobind::module_& m);        // experts.cc
void bind_machine(nanobind::module_& m);        // machine.cc
void bind_operators(nanobind::module_& m);      // operators.cc
void bind_packing(nanobind::module_& m);        // packing.cc
void bind_read_runs(nanobind::module_& m);      // read_runs.cc
void bind_recurrent(nanobind::module_& m);      // recurrent.cc

}  // namespace cpumoe
