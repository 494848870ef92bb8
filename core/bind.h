// What the files of the Python seam share.
#pragma once

#include <nanobind/nanobind.h>

#include "threads.h"

namespace cpumoe {

// Around everything that computes: other Python threads may run, and this one computes as the team does.
struct Computation {
  nanobind::gil_scoped_release release;
  IeeeArithmetic arithmetic;
};

void bind_cache_records(nanobind::module_& m);  // bind_cache_records.cc
void bind_decoder(nanobind::module_& m);        // bind_decoder.cc
void bind_delta_rule(nanobind::module_& m);     // bind_delta_rule.cc
void bind_exchange(nanobind::module_& m);       // bind_exchange.cc
void bind_read_runs(nanobind::module_& m);      // bind_read_runs.cc
void bind_state_space(nanobind::module_& m);    // bind_state_space.cc

}  // namespace cpumoe
