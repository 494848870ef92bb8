// All tests, for `core_test` to list.
#pragma once

namespace cpumoe::tests {

void test_rowwise();
void test_linear_kernels();
void test_many_rows();
void test_order_of_tiles();
void test_threads_of_linears();
void test_linear_meaning();
void test_layers();
void test_nan_stays_in_its_token();
void test_callers();
void test_decoder_callers();
void test_packed_bytes();
void test_routing();
void test_latent_attention();
void test_cached_attention();
void test_cache_records();
void test_float_linears();
void test_norms();
void test_extremes();
void test_float_mode();
void test_float_rows();
void test_refused_weights();
void test_formats();
void test_unpacking();
void test_fp32_results();
void test_measuring();
void test_state_spaces();
void test_recurrent();
void test_crowding();
void test_rank_exchange();
void test_nodes();
void test_work_queues();
}  // namespace cpumoe::tests
