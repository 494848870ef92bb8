// What the files of the Python seam share.
#pragma once

#include <nanobind/nanobind.h>

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

void bind_cache_records(nanobind::module_& m);  // kv_cache.cc
void bind_decoder(nanobind::module_& m);        // step.cc
void bind_delta_rule(nanobind::module_& m);     // recurrent.cc
void bind_exchange(nanobind::module_& m);       // ranks.cc
void bind_experts(nanobind::module_& m);        // experts.cc
void bind_machine(nanobind::module_& m);        // machine.cc
void bind_operators(nanobind::module_& m);      // operators.cc
void bind_packing(nanobind::module_& m);        // packing.cc
void bind_read_runs(nanobind::module_& m);      // read_runs.cc
void bind_state_space(nanobind::module_& m);    // state_space.cc

}  // namespace cpumoe
