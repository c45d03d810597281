// The block Hadamard transform of a row, for the op and for the quantization that follows it. The definition is
// tilewright/ops/quant/hadamard.py.
//
// Sums are in the definition's order, and products are by +-1 or one rounded product at the end: the same bits.
#pragma once

#include "cpu/quantize.h"

namespace tw {

// Bit i is set if the sign of position i in a block is negative; 0 without a seed. The lowest bits of the words, of
// which stochastic rounding uses the upper 24.
inline uint32_t sign_mask(std::optional<int64_t> seed) {
  uint32_t mask = 0;
  if (seed.has_value()) {
    std::vector<uint32_t> words;
    uint32_t* found;
    philox(uint64_t(*seed), 0, 32, words, found);
    for (int i = 0; i < 32; ++i) mask |= (found[i] & 1) << i;
  }
  return mask;
}

inline void check_size(int64_t size, int64_t columns) {
  STD_TORCH_CHECK(size == 16 || size == 32, "tilewright: size must be 16 or 32, got ", size);
  STD_TORCH_CHECK(columns % size == 0, "tilewright: columns must divide by ", size, ", got ", columns);
}

// Eight lanes: one AVX register; the compiler splits it where registers are shorter.
typedef float f8 __attribute__((vector_size(32)));

TW_INLINE void butterflies(f8& v) {
  const f8 one = {1, -1, 1, -1, 1, -1, 1, -1}, two = {1, 1, -1, -1, 1, 1, -1, -1}, four = {1, 1, 1, 1, -1, -1, -1, -1};
  v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + v * one;
  v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + v * two;
  v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + v * four;
}

// One block. signs: +-1, applied before the transform, or after it in the inverse; may be null.
template <int SIZE, bool INVERSE, class T, class U>
TW_INLINE void hadamard_block(const T* x, const float* signs, U* y) {
  constexpr int N = SIZE / 8;
  alignas(32) float flat[SIZE];
  TW_SIMD
  for (int i = 0; i < SIZE; ++i) flat[i] = INVERSE ? load(x[i]) : load(x[i]) * signs[i];
  f8 v[N];
  std::memcpy(v, flat, sizeof(v));
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) butterflies(v[i]);
#pragma GCC unroll 2
  for (int h = 1; h < N; h *= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      if ((i & h) == 0) {
        const f8 a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
  }
  std::memcpy(flat, v, sizeof(v));
  const float scale = SIZE == 16 ? 0.25f : 0.17677669529663687f;
  TW_SIMD
  for (int i = 0; i < SIZE; ++i) store(y + i, INVERSE ? flat[i] * scale * signs[i] : flat[i] * scale);
}

// n elements, a multiple of size.
template <bool INVERSE, class T, class U>
void hadamard_row(const T* x, int64_t n, int64_t size, uint32_t mask, U* y) {
  alignas(32) float signs[32];
  for (int i = 0; i < 32; ++i) signs[i] = mask >> i & 1 ? -1.0f : 1.0f;
  if (size == 16) {
    for (int64_t i = 0; i < n; i += 16) hadamard_block<16, INVERSE>(x + i, signs, y + i);
  } else {
    for (int64_t i = 0; i < n; i += 32) hadamard_block<32, INVERSE>(x + i, signs, y + i);
  }
}

}  // namespace tw
