// The extension module: everything that Python sees of the core. Arrays are those of NumPy's kind; nothing here knows
// PyTorch.
#include "bind/module.h"

NB_MODULE(_core, m) {
  using namespace cpumoe;
  bind_exchange(m);  // first: others take exchanges as arguments
  bind_experts(m);
  bind_packing(m);
  bind_operators(m);
  bind_cache_records(m);
  bind_decoder(m);
  bind_recurrent(m);
  bind_machine(m);
  bind_read_runs(m);
}
