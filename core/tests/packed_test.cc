// The packed form: headers, formats, packing and unpacking.
#include <functional>
#include <tuple>

#include "tests/matrices.h"
#include "tests/tests.h"

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
            refused([&] { choose_format("fp8", 32, true, "m"); }) &&
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

// Codes and numbers that stand for nothing, and rows that do not go with weights, are refused.
void test_refused_weights() {
  const auto packs = [](PackedSpec spec, const std::function<void(Matrix&, PackSource&)>& change) {
    Matrix m = make_matrix(spec, 5);
    const FormatTraits traits = traits_of(spec.weights);
    PackSource s;
    s.values = traits.has_scales() ? static_cast<const void*>(m.values.data()) : m.float_bytes.data();
    s.scales = m.byte_scales.empty() ? static_cast<const void*>(m.scales.data()) : m.byte_scales.data();
    s.zeros = m.zeros.data();
    s.factors = m.factors.data();
    s.input_scales = m.input_scales.data();
    change(m, s);
    pack_experts(m.packed, m.blob.data(), 0, &s, 1, "m");
  };
  const auto spec = [](WeightFormat format, std::int64_t group, RowFormat rows) {
    PackedSpec s;
    s.weights = format;
    s.group = group;
    s.rows = rows;
    s.experts = 1;
    s.columns = 32;
    s.depth = 128;
    return s;
  };
  const auto nothing = [](Matrix&, PackSource&) {};
  const PackedSpec fp8 = spec(WeightFormat::kE4M3, 0, RowFormat::kFp8Static);
  const PackedSpec blocks = spec(WeightFormat::kE4M3Tile128, 128, RowFormat::kFp8Group128);
  const PackedSpec six = spec(WeightFormat::kE3M2Group32, 32, RowFormat::kFloat);
  const PackedSpec bf16 = spec(WeightFormat::kBF16, 0, RowFormat::kFloat);
  for (const PackedSpec& good : {fp8, blocks, six, bf16})
    check(!refused([&] { packs(good, nothing); }), "good weights");
  check(refused([&] { packs(fp8, [](Matrix& m, PackSource&) { m.values[77] = 0x7F; }); }) &&
            refused([&] { packs(blocks, [](Matrix& m, PackSource&) { m.values[77] = -1; }); }),
        "NaN codes");
  check(refused([&] { packs(fp8, [](Matrix& m, PackSource&) { m.input_scales[0] = 0.0f; }); }) &&
            refused([&] { packs(fp8, [](Matrix& m, PackSource&) { m.input_scales[0] = NAN; }); }),
        "input scales");
  check(refused([&] { packs(blocks, [](Matrix& m, PackSource&) { m.scales[3] *= 2; }); }), "two scales in a block");
  check(refused([&] { packs(six, [](Matrix& m, PackSource&) { m.values[3] = 64; }); }), "a code of seven bits");
  check(refused([&] { packs(bf16, [](Matrix& m, PackSource&) { m.float_bytes[3] = 0x7F, m.float_bytes[2] = 0x80; }); }),
        "infinity");
  for (const auto& [format, group, rows] :
       {std::tuple{WeightFormat::kE4M3, 0, RowFormat::kBytes},
        std::tuple{WeightFormat::kE4M3, 0, RowFormat::kFp8Group128},
        std::tuple{WeightFormat::kInt8, 0, RowFormat::kFp8}, std::tuple{WeightFormat::kF32, 0, RowFormat::kFp8},
        std::tuple{WeightFormat::kBF16, 0, RowFormat::kBF16},
        std::tuple{WeightFormat::kE4M3Tile128, 256, RowFormat::kFp8},
        std::tuple{WeightFormat::kInt4ZeroGroup32, 32, RowFormat::kFp8}}) {
    PackedSpec bad = spec(format, group, rows);
    bad.depth = 256;
    check(refused([&] { layout_of(bad, "m"); }), "rows that do not go with weights");
  }
  PackedSpec scaleless = fp8;
  check(refused([&] { layout_of(scaleless, "m"); }), "a static scheme without its scale");
}

// One list of formats: every instruction set has a row for each, in its place, and all rows pack alike.
void test_formats() {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatInfo& f = kWeightFormats[i];
    check(find_format(static_cast<std::uint32_t>(f.id)) == &f && static_cast<int>(f.id) == i + 1, f.name);
    for (const IsaEntry& e : instruction_sets()) {
      if (e.kernels == nullptr) continue;
      const FormatKernels& row = e.kernels->of(f.id);
      bool whole = row.weights == f.id && row.codec == scalar().of(f.id).codec;
      for (int number = 0; number < kRowFormatCount; ++number) {
        const auto rows = static_cast<RowFormat>(number);
        const RowTraits traits = traits_of(rows);
        whole = whole && e.kernels->of(rows).format == rows;
        if (!traits_of(f.id).takes(traits.kind)) continue;
        const Epilogues& epilogues = row.with(rows);
        whole = whole && row.products[static_cast<int>(traits.kind)] != nullptr && epilogues.start != nullptr &&
                epilogues.finish != nullptr && epilogues.activate != nullptr && epilogues.combine != nullptr;
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
  specs.push_back(make_layer(256, 128, 2, 128, "fp8", true, true, RowFormat::kFp8Group128).gate_up.spec);
  specs.push_back(make_layer(192, 96, 2, 16, "fp4", true, true, RowFormat::kNvfp4).gate_up.spec);
  specs.push_back(make_layer(160, 96, 2, 0, "bf16", true, true, RowFormat::kFloat).gate_up.spec);
  specs.push_back(make_layer(192, 96, 2, 0, "int4", true, true, RowFormat::kWords, true).gate_up.spec);
  specs.push_back(make_layer(192, 96, 3, 32, "int4", true, false, RowFormat::kWords, false, 2).gate_up.spec);
  for (const PackedSpec& spec : specs) {
    const Matrix m = make_matrix(spec, 97);
    std::vector<std::int8_t> values(m.values.size(), 99);
    std::vector<std::uint8_t> float_bytes(m.float_bytes.size(), 99);
    std::vector<float> input_scales(m.input_scales.size());
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
      if (!float_bytes.empty()) {
        target.values = float_bytes.data() + row * spec.depth * size_of(dtype_of(spec.weights));
      }
      target.input_scales = input_scales.data() + e * m.spec.input_scales;
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
              factors == m.factors && bias == m.bias && orders == m.orders && float_bytes == m.float_bytes &&
              input_scales == m.input_scales,
          "unpacked " + describe(spec, "", 0));
    check(refused([&] { unpack_experts(m.packed, spec.experts, targets.data(), 1, "matrix"); }), "too many experts");
  }
}

}  // namespace cpumoe::tests
