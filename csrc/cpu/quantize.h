// Shared code of the CPU kernels that quantize: rounding to few bits, random bits, checks. The definitions are in
// tilewright/ops/quant/quantize.py.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>

#include "cpu/common.h"

namespace tw {

template <class To, class From>
TW_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits");
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}

// ---- rounding

// A code without its sign: see `encode` in quantize.py. random: 32 bits, with RANDOM.
template <int MANTISSA, int LOWEST, bool RANDOM>
TW_INLINE int32_t encode(float v, float largest, uint32_t random) {
  v = std::fabs(v);
  v = v > largest ? largest : v;
  int32_t e = (bits<int32_t>(v) >> 23) - 127;
  e = e < LOWEST ? LOWEST : e;
  const float units = v * bits<float>((MANTISSA - e + 127) << 23);
  const int32_t n = RANDOM ? (int32_t(units * 16777216.0f) + int32_t(random >> 8)) >> 24 : int32_t(std::nearbyintf(units));
  return ((e - LOWEST) << MANTISSA) + n;
}

template <bool RANDOM>
TW_INLINE uint8_t to_e4m3(float v, uint32_t random) {
  return uint8_t(encode<3, -6, RANDOM>(v, 448.0f, random) | (bits<int32_t>(v) >> 24 & 0x80));
}

template <bool RANDOM>
TW_INLINE uint8_t to_e2m1(float v, uint32_t random) {
  return uint8_t(encode<1, 0, RANDOM>(v, 6.0f, random) | (bits<int32_t>(v) >> 28 & 8));
}

// Exact, and without subnormals, which a processor may flush.
TW_INLINE float from_e4m3(uint8_t code) {
  const int32_t u = code & 0x7F;
  const bool small = u < 8;
  float f = bits<float>((u << 20) + ((small ? 121 : 120) << 23)) - (small ? 0.015625f : 0.0f);
  f = u == 0x7F ? NAN : f;
  return bits<float>(bits<int32_t>(f) | int32_t(code & 0x80) << 24);
}

// A block of Philox4x32-10 with the counter (block, c2, c3): see `philox` in quantize.py.
TW_INLINE void philox_block(uint64_t key, uint64_t block, uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3) {
  c0 = uint32_t(block);
  c1 = uint32_t(block >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t(c0) * 0xD2511F53u, q = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(q >> 32) ^ c1 ^ k0;
    c1 = uint32_t(q);
    c2 = uint32_t(p >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// The words of so many blocks, in order.
inline void philox_row(uint64_t key, uint64_t block, uint32_t word2, uint32_t word3, int64_t blocks, uint32_t* words) {
  int64_t b = 0;
#ifdef __AVX2__
  // A word in each lane of 64 bits, where the product of two is one instruction, and what it leaves above a word is not
  // read. Compilers see neither: their loops take three times as long. Two vectors hide each other's latency.
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  for (; b + 8 <= blocks; b += 8) {
    __m256i c0[2], c1[2], c2[2], c3[2];
    for (int j = 0; j < 2; ++j) {
      const int64_t first = int64_t(block + uint64_t(b + 4 * j));
      c0[j] = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_set_epi64x(3, 2, 1, 0));
      c1[j] = _mm256_srli_epi64(c0[j], 32);
      c2[j] = _mm256_set1_epi64x(word2);
      c3[j] = _mm256_set1_epi64x(word3);
    }
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
      for (int j = 0; j < 2; ++j) {
        const __m256i p = _mm256_mul_epu32(c0[j], m0), q = _mm256_mul_epu32(c2[j], m1);
        c0[j] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), c1[j]), key0);
        c1[j] = q;
        c2[j] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), c3[j]), key1);
        c3[j] = p;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < 2; ++j) {
      const __m256i x = _mm256_blend_epi32(c0[j], _mm256_slli_epi64(c1[j], 32), 0xAA);
      const __m256i y = _mm256_blend_epi32(c2[j], _mm256_slli_epi64(c3[j], 32), 0xAA);
      const __m256i even = _mm256_unpacklo_epi64(x, y), odd = _mm256_unpackhi_epi64(x, y);
      __m256i* const to = reinterpret_cast<__m256i*>(words + 4 * (b + 4 * j));
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
#endif
  TW_SIMD
  for (int64_t i = b; i < blocks; ++i) {
    uint32_t c0, c1, c2 = word2, c3 = word3;
    philox_block(key, block + uint64_t(i), c0, c1, c2, c3);
    words[4 * i] = c0;
    words[4 * i + 1] = c1;
    words[4 * i + 2] = c2;
    words[4 * i + 3] = c3;
  }
}

// Random bits of elements first to first + n - 1.
inline void philox(uint64_t key, uint64_t first, int64_t n, std::vector<uint32_t>& words, uint32_t*& found) {
  const uint64_t block = first >> 2;
  const int64_t blocks = int64_t(((first + uint64_t(n) + 3) >> 2) - block);
  if (int64_t(words.size()) < 4 * blocks) words.resize(size_t(4 * blocks));
  philox_row(key, block, 0, 0, blocks, words.data());
  found = words.data() + (first & 3);
}

// The largest magnitude as bits, whose order is that of the magnitudes: a NaN is above all numbers, and propagates.
template <class T>
TW_INLINE int32_t largest(const T* x, int64_t n) {
  int32_t most = 0;
  TW_SIMD_MAX(most)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t m = bits<int32_t>(load(x[i])) & 0x7FFFFFFF;
    most = m > most ? m : most;
  }
  return most;
}

// The multiplier of a block with the largest magnitude `found` (bits).   inverse: the stored scale; for MXFP8 an
// exponent byte.
TW_INLINE float fp8_scale(int32_t found, float& inverse) {
  float most = bits<float>(found);
  most = most < 0x1p-100f ? 0x1p-100f : most;
  inverse = found == 0 ? 1.0f : most / 448.0f;
  return found == 0 ? 1.0f : 1.0f / most * 448.0f;
}

TW_INLINE float fp8_scale(int32_t found, uint8_t& inverse) {
  int32_t e = int32_t((uint32_t(found) + 0x1FFFFFu) >> 23) - 8;
  e = found >= 0x7F800000 ? 255 : e < 0 ? 0 : e;
  inverse = uint8_t(e);
  return bits<float>(uint32_t(254 - e) << 23);
}

// The values of stored scales.
TW_INLINE float fp8_inverse(float inverse) { return inverse; }
TW_INLINE float fp8_inverse(uint8_t e) {
  return bits<float>(e == 0 ? 0x00400000u : e == 255 ? 0x7FC00000u : uint32_t(e) << 23);
}

// Quantizes one block to FP8: its codes, and its inverse scale, or for MXFP8 (S is uint8_t) its byte.   stride,
// code_stride: row strides.   element, pitch: the index of the first element, and its row stride, for random bits.
template <bool RANDOM, class S, class T>
TW_INLINE S fp8_block(const T* x, int64_t stride, int64_t rows, int64_t n, uint64_t key, uint64_t element,
                      uint64_t pitch, std::vector<uint32_t>& words, uint8_t* code, int64_t code_stride) {
  int32_t found = 0;
  for (int64_t r = 0; r < rows; ++r) found = std::max(found, largest(x + r * stride, n));
  S inverse;
  const float scale = fp8_scale(found, inverse);
  for (int64_t r = 0; r < rows; ++r) {
    const T* const own = x + r * stride;
    uint8_t* const to = code + r * code_stride;
    uint32_t* random = nullptr;
    if (RANDOM) philox(key, element + uint64_t(r) * pitch, n, words, random);
    TW_SIMD
    for (int64_t i = 0; i < n; ++i) to[i] = to_e4m3<RANDOM>(load(own[i]) * scale, RANDOM ? random[i] : 0);
  }
  return inverse;
}

// Transposes x: row j of the tile is column j of x. It stays in the second-level cache.
template <class T>
void turn(const T* x, int64_t stride, int64_t rows, int64_t columns, float* tile, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) tile[c * width + r] = load(x[r * stride + c]);
  }
}

// ---- checks

inline void check_bytes(const char* name, const Tensor& t, int64_t elements) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte && t.numel() == elements, "tilewright: ", name, " must be ",
                  elements, " bytes");
}

inline void check_floats(const char* name, const Tensor& t, int64_t elements) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == elements, "tilewright: ", name, " must be ",
                  elements, " float32 numbers");
}

template <class S>
void check_scales(const char* name, const Tensor& t, int64_t elements) {
  if (std::is_same_v<S, float>) check_floats(name, t, elements);
  else check_bytes(name, t, elements);
}

template <class S>
constexpr ScalarType scales_type() { return std::is_same_v<S, float> ? ScalarType::Float : ScalarType::Byte; }

inline void check_matrices(const char* name, const Tensor& t) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.dim() == 3, "tilewright: ", name, " must be [matrices, rows, columns]");
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class F>
void with_random(bool random, F&& f) {
  if (random) return f(std::true_type{});
  return f(std::false_type{});
}

// f of a value of the scales' type.
template <class F>
auto with_scales(bool mx, F&& f) {
  return mx ? f(uint8_t{}) : f(float{});
}

}  // namespace tw
