// AVX2: vpmaddubsw multiplies unsigned activations with signed weights and adds pairs in 16 bits.
#include "kernels/ymm_multiply.h"

namespace cpumoe {
namespace {

struct Avx2Dot {
  static constexpr bool kTimes16 = false;

  // Small integers are summed in 16 bits, which cannot overflow: 8 lines * 2 * 255 * 8 = 32640 < 32767, and 4 lines * 2
  // * 255 * 15 = 30600.
  static constexpr bool is_small(int largest) { return largest <= 15; }
  static constexpr int lines(int largest) { return largest <= 8 || !is_small(largest) ? 8 : 4; }

  struct Sum {
    __m256i sum;  // small: 16-bit pairs; else 32 bits

    void clear() { sum = _mm256_setzero_si256(); }

    template <int largest>
    void add(__m256i u, __m256i w) {
      if constexpr (is_small(largest)) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, w));
      } else {
        // 255 * 128 * 2 would saturate, so the lowest bit of the activations goes its own way:
        // 2 * (127 * 128 * 2 = 32512) + 1 * 128 * 2.
        const __m256i odd = _mm256_and_si256(u, _mm256_set1_epi8(1));
        const __m256i half = _mm256_and_si256(_mm256_srli_epi16(u, 1), _mm256_set1_epi8(0x7F));
        const __m256i twos = _mm256_madd_epi16(_mm256_maddubs_epi16(half, w), _mm256_set1_epi16(2));
        const __m256i units = _mm256_madd_epi16(_mm256_maddubs_epi16(odd, w), _mm256_set1_epi16(1));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(twos, units));
      }
    }

    template <int largest>
    __m256i value() const {
      return is_small(largest) ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum;
    }
  };
};

}  // namespace

extern const Kernels kAvx2Kernels;
constexpr Kernels kAvx2Kernels = kernels_of<F32x8, Ymm<Avx2Dot>>("avx2");

}  // namespace cpumoe
