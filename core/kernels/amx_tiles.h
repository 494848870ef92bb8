// Tile instructions as macros (their register numbers are part of the instruction), and the same on memory for CPUs
// without AMX: with CPUMOE_EMULATE the kernel's logic is tested bit for bit anywhere that has AVX-512.
//
// Inline assembly, because the compilers' tile intrinsics do not say that they touch memory.
#pragma once

#include "kernels/formats.h"
#include "runtime/float16.h"

namespace cpumoe {
namespace {

#if !defined(CPUMOE_EMULATE)

// Loads take (pointer, byte stride between rows); the _ONCE form asks not to displace L1.
#define CPUMOE_TILE_LOAD(tile, pointer, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(pointer), "r"(static_cast<long>(stride)) : "memory")
#define CPUMOE_TILE_LOAD_ONCE(tile, pointer, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile : : "r"(pointer), "r"(static_cast<long>(stride)) : "memory")
#define CPUMOE_TILE_STORE(tile, pointer) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(pointer), "r"(64L) : "memory")
#define CPUMOE_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)
// c += unsigned a . signed b
#define CPUMOE_TILE_DOT(c, a, b) asm volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
// c += a . b, both of bf16 numbers
#define CPUMOE_TILE_FLOAT_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

struct alignas(64) TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

inline void configure_tiles() {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  // The memory operand keeps the stores above alive: GCC 12 drops them before its own intrinsic.
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

inline void release_tiles() { asm volatile("tilerelease" : :); }

#else

struct EmulatedTile {
  std::uint8_t bytes[16][64];
};

inline EmulatedTile& emulated_tile(int index) {
  static thread_local EmulatedTile tiles[8];
  return tiles[index];
}

inline void emulated_load(int tile, const void* pointer, std::ptrdiff_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(emulated_tile(tile).bytes[r], static_cast<const std::uint8_t*>(pointer) + r * stride, 64);
  }
}

inline void emulated_store(int tile, void* pointer) { __builtin_memcpy(pointer, &emulated_tile(tile), 1024); }

inline void emulated_dot(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      std::uint32_t sum;
      __builtin_memcpy(&sum, emulated_tile(c).bytes[m] + n * 4, 4);
      for (int k = 0; k < 64; ++k) {
        const int u = emulated_tile(a).bytes[m][k];
        const int w = static_cast<std::int8_t>(emulated_tile(b).bytes[k / 4][n * 4 + k % 4]);
        sum += static_cast<std::uint32_t>(u * w);
      }
      __builtin_memcpy(emulated_tile(c).bytes[m] + n * 4, &sum, 4);
    }
  }
}

inline float emulated_bf16(int tile, int row, int index) {
  std::uint16_t word;
  __builtin_memcpy(&word, emulated_tile(tile).bytes[row] + index * 2, 2);
  return bfloat_to_float(word);
}

// As Intel's manual has it: of all pairs the first numbers are summed by themselves, and so are the second ones. That
// it takes subnormal numbers for zero is left out, since there are none (prepare_floats.h).
inline void emulated_float_dot(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    float first[16] = {}, second[16] = {}, sums[16];
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        first[n] = __builtin_fmaf(emulated_bf16(a, m, 2 * k), emulated_bf16(b, k, 2 * n), first[n]);
        second[n] = __builtin_fmaf(emulated_bf16(a, m, 2 * k + 1), emulated_bf16(b, k, 2 * n + 1), second[n]);
      }
    }
    __builtin_memcpy(sums, emulated_tile(c).bytes[m], 64);
    for (int n = 0; n < 16; ++n) sums[n] += first[n] + second[n];
    __builtin_memcpy(emulated_tile(c).bytes[m], sums, 64);
  }
}

#define CPUMOE_TILE_LOAD(tile, pointer, stride) emulated_load(tile, pointer, stride)
#define CPUMOE_TILE_LOAD_ONCE(tile, pointer, stride) emulated_load(tile, pointer, stride)
#define CPUMOE_TILE_STORE(tile, pointer) emulated_store(tile, pointer)
#define CPUMOE_TILE_ZERO(tile) __builtin_memset(&emulated_tile(tile), 0, sizeof(EmulatedTile))
#define CPUMOE_TILE_DOT(c, a, b) emulated_dot(c, a, b)
#define CPUMOE_TILE_FLOAT_DOT(c, a, b) emulated_float_dot(c, a, b)

inline void configure_tiles() {}
inline void release_tiles() {}

#endif

}  // namespace
}  // namespace cpumoe
