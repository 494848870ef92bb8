// The packed form: headers, formats, packing and unpacking.
#include "matrices.h"
#include "tests.h"

namespace cpumoe::tests {

// Damaged, truncated and foreign bytes are refused.
void test_packed_bytes() {
  const Matrix m = make_matrix(make_layer(128, 64, 2, 32, "int4", true, false).gate_up.spec, 59);
  for (std::size_t i = 0; i < 64; ++i) {
    auto blob = m.blob;
    blob[i] ^= 0x5A;
    check(refused([&] { open_packed(blob.data(), static_cast<std::int64_t>(blob.size()), "blob"); }), "damaged header");
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{63}, std::size_t{64}, m.blob.size() - 1}) {
    check(refused([&] { open_packed(m.blob.data(), static_cast<std::int64_t>(size), "blob"); }), "truncated");
  }
  const ScaleType f32 = ScaleType::kF32;
  check(refused([&] { choose_format("int4", 48, false, "m"); }) &&
            refused([&] { choose_format("int8", 32, true, "m"); }) &&
            refused([&] { choose_format("fp4", 64, false, "m"); }),
        "formats that there are not");
  check(refused([&] { layout_of({WeightFormat::kInt4Group64, f32, 64, 1, 32, 96, false, false}, "m"); }), "64 in 96");
  check(refused([&] { layout_of({WeightFormat::kInt4, f32, 0, 1, 32, 1 << 20, false, false}, "m"); }), "deep");
  check(refused([&] { layout_of({WeightFormat::kInt4, f32, 32, 1, 32, 96, false, false}, "m"); }) &&
            refused([&] { layout_of({WeightFormat::kInt4Group32, f32, 64, 1, 32, 64, false, false}, "m"); }),
        "a format that does not go with its group");
  check(refused([&] { layout_of({static_cast<WeightFormat>(77), f32, 0, 1, 32, 64, false, false}, "m"); }) &&
            refused(
                [&] { layout_of({WeightFormat::kInt8, static_cast<ScaleType>(9), 0, 1, 32, 64, false, false}, "m"); }),
        "numbers that stand for nothing");
}

// One list of formats: every instruction set has a row for each, in its place, and all rows pack alike.
void test_formats() {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatInfo& f = kWeightFormats[i];
    check(find_format(static_cast<std::uint32_t>(f.id)) == &f && static_cast<int>(f.id) == i + 1, f.name);
    for (const IsaEntry& e : instruction_sets()) {
      if (e.kernels == nullptr) continue;
      const FormatKernels& row = e.kernels->of(f.id);
      bool whole = row.weights == f.id && row.codec == scalar().of(f.id).codec && row.multiply != nullptr;
      for (const RowFormat rows : {RowFormat::kBytes, RowFormat::kWords}) {
        const Epilogues& epilogues = row.with(rows);
        whole = whole && epilogues.start != nullptr && epilogues.finish != nullptr && epilogues.activate != nullptr &&
                epilogues.combine != nullptr && e.kernels->of(rows).format == rows;
      }
      check(whole, std::string(e.name) + " " + f.name);
    }
  }
  check(find_format(0u) == nullptr && find_format("int4", 96) == find_format("int4", 32), "look-up of formats");
}

// What was packed comes back to the bit, for every format, odd sizes, gated rows and biases.
void test_unpacking() {
  std::vector<PackedSpec> specs = linear_specs();
  for (const char* element : {"int4", "int8"}) {
    for (const bool bias : {false, true}) specs.push_back(make_layer(160, 96, 3, 0, element, true, bias).gate_up.spec);
  }
  specs.push_back(make_layer(192, 96, 2, 96, "int4", true, true).gate_up.spec);
  specs.push_back(make_layer(192, 96, 2, 0, "int4", true, true, RowFormat::kWords, true).gate_up.spec);
  specs.push_back(make_layer(192, 96, 3, 32, "int4", true, false, RowFormat::kWords, false, 2).gate_up.spec);
  for (const PackedSpec& spec : specs) {
    const Matrix m = make_matrix(spec, 97);
    std::vector<std::int8_t> values(m.values.size(), 99);
    std::vector<std::int8_t> zeros(m.zeros.size());
    std::vector<std::int32_t> orders(m.orders.size());
    std::vector<std::uint8_t> byte_scales(m.byte_scales.size());
    std::vector<float> scales(m.scales.size()), factors(m.factors.size()), bias(m.bias.size());
    std::vector<UnpackTarget> targets;
    const bool bytes = !byte_scales.empty();
    for (std::int64_t e = 0; e < spec.experts; ++e) {
      const std::int64_t row = e * spec.columns, group = row * spec.groups();
      UnpackTarget target{};
      target.values = values.data() + row * spec.depth;
      target.scales = bytes ? static_cast<void*>(byte_scales.data() + group) : scales.data() + group;
      target.scale_type = DType::kF32;
      target.zeros = zeros.data() + group;
      target.factors = factors.data() + row;
      target.bias = bias.data() + row;
      target.input_order = spec.input_orders == 0 ? nullptr : orders.data() + e * spec.input_orders * spec.depth;
      targets.push_back(target);
    }
    unpack_experts(m.packed, 0, targets.data(), spec.experts, "matrix");
    check(values == m.values && (bytes || scales == m.scales) && byte_scales == m.byte_scales && zeros == m.zeros &&
              factors == m.factors && bias == m.bias && orders == m.orders,
          "unpacked " + describe(spec, "", 0));
    check(refused([&] { unpack_experts(m.packed, spec.experts, targets.data(), 1, "matrix"); }), "too many experts");
  }
}

}  // namespace cpumoe::tests
