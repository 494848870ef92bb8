// Every kernel against the scalar one over odd shapes, bit for bit but for AMX's tiles of bf16 numbers; the scalar one
// against plain double arithmetic; and the threads. Needs nothing but the core, so that it also runs under sanitizers
// and emulators.
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/harness.h"
#include "tests/tests.h"

int main(int argc, char** argv) {
  using namespace cpumoe;
  using namespace cpumoe::tests;
  const std::string only = argc > 1 ? argv[1] : "";
  if (only == "isa") {  // the instruction set that would be used here
    std::printf("%s\n", active_kernels().name);
    return 0;
  }
  for (const IsaEntry& e : instruction_sets()) {
    std::printf("%-12s %s\n", e.name, e.supported ? "tested" : e.reason.c_str());
  }
  const std::vector<std::pair<std::string, std::function<void()>>> tests = {{"rowwise", test_rowwise},
                                                                            {"kernels", test_linear_kernels},
                                                                            {"rows", test_many_rows},
                                                                            {"meaning", test_linear_meaning},
                                                                            {"layers", test_layers},
                                                                            {"nan", test_nan_stays_in_its_token},
                                                                            {"callers", test_callers},
                                                                            {"packed", test_packed_bytes},
                                                                            {"routing", test_routing},
                                                                            {"norms", test_norms},
                                                                            {"linears", test_float_linears},
                                                                            {"extremes", test_extremes},
                                                                            {"mode", test_float_mode},
                                                                            {"formats", test_formats},
                                                                            {"unpacking", test_unpacking},
                                                                            {"fp32", test_fp32_results},
                                                                            {"measuring", test_measuring},
                                                                            {"floats", test_float_rows},
                                                                            {"refused", test_refused_weights},
                                                                            {"order", test_order_of_tiles},
                                                                            {"threads", test_threads_of_linears},
                                                                            {"states", test_state_spaces},
                                                                            {"recurrent", test_recurrent},
                                                                            {"crowding", test_crowding},
                                                                            {"latents", test_latent_attention},
                                                                            {"cached", test_cached_attention},
                                                                            {"records", test_cache_records},
                                                                            {"ranks", test_rank_exchange},
                                                                            {"nodes", test_nodes},
                                                                            {"queues", test_work_queues},
                                                                            {"decoder", test_decoder_callers}};
  for (const auto& [name, test] : tests) {
    if (only.empty() || only == name) test();
  }
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed == 0 ? 0 : 1;
}
