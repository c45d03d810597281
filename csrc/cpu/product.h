// Tiles of matrix products with AVX-512, for bfloat16 with its dot-product instruction: 24 sums in registers, which is
// more than hides the latency of two multiply-adds per cycle. One factor is packed (64 columns of it; bfloat16: rows in
// pairs, as the instruction requires), the other one is broadcast. Sums are float32.
#pragma once

#include <algorithm>

#include "cpu/common.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define TW_OWN_PRODUCTS 1
// setup.py compiles for x86-64-v4, which has no bfloat16: called only where the processor has it.
#define TW_BF16 __attribute__((target("avx512bf16")))
#endif

#ifdef TW_OWN_PRODUCTS

namespace tw {

inline bool has_bf16() {
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
}

constexpr int64_t OUTER_ROWS = 6, OUTER_COLUMNS = 64;  // 24 sums, 4 of the packed factor and one of the other
// Steps of a packed panel of 64 columns. Also the longest sum in one register: the panels' sums are added, so that the
// error of a sum over many thousand rows stays small.
constexpr int64_t STEPS = 256;

// A mask of the first n of 16.
TW_INLINE __mmask16 first_of(int64_t n) { return n >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << n) - 1); }

// 64 bytes of each of two vectors, multiplied and added in pairs; n: remaining elements.
struct Float {
  using T = float;
  using Vector = __m512;
  static constexpr int64_t STEP = 16, PAIR = 1;
  static TW_INLINE Vector get(const float* p) { return _mm512_loadu_ps(p); }
  static TW_INLINE Vector get(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
  }
  static TW_INLINE __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
  static TW_INLINE void put(float* p, __m512 v, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, v); }
};

struct Half {
  using T = bf16;
  using Vector = __m512bh;
  static constexpr int64_t STEP = 32, PAIR = 2;
  TW_BF16 static TW_INLINE Vector get(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
  TW_BF16 static TW_INLINE Vector get(const void* p, int64_t n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p);
  }
  TW_BF16 static TW_INLINE __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
  static TW_INLINE void put(float* p, __m512 v, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, v); }
  TW_BF16 static TW_INLINE void put(bf16* p, __m512 v, __mmask16 mask) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
  }
};

// The factor that is broadcast: 4 bytes (a float, or two bfloat16 that are summed together) for row m and step s, at
// base + m * row + s * step bytes.
struct Broadcast {
  const char* base;
  int64_t row, step;
};

// M rows of 64 columns: the sum over steps of a(m, s) * b[s], plus, with `add`, the previous sums[m]. to[m] receives
// scale times the result, rounded, plus its old value with `onto` (float only); without `to`, sums[m] receives it.
template <class P, int M, class To>
TW_BF16 void outer_tile(Broadcast a, const uint32_t* b, int64_t steps, float* sums, bool add, To* to, int64_t stride,
                        int64_t columns, float scale = 1, bool onto = false) {
  __m512 sum[M][4];
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) sum[m][j] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; ++s) {
    typename P::Vector v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = (typename P::Vector)_mm512_loadu_si512(b + s * OUTER_COLUMNS + 16 * j);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      int32_t bits;
      std::memcpy(&bits, a.base + m * a.row + s * a.step, 4);
      const auto all = (typename P::Vector)_mm512_set1_epi32(bits);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[m][j] = P::add(sum[m][j], all, v[j]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) {
      const int64_t left = columns - 16 * j;
      if (add) sum[m][j] = _mm512_add_ps(sum[m][j], _mm512_loadu_ps(sums + m * OUTER_COLUMNS + 16 * j));
      if (to == nullptr)
        _mm512_storeu_ps(sums + m * OUTER_COLUMNS + 16 * j, sum[m][j]);
      else if (left > 0) {
        if (scale != 1) sum[m][j] = _mm512_mul_ps(sum[m][j], _mm512_set1_ps(scale));
        if constexpr (sizeof(To) == 4)
          if (onto)
            sum[m][j] = _mm512_add_ps(sum[m][j], _mm512_maskz_loadu_ps(first_of(left), to + m * stride + 16 * j));
        P::put(to + m * stride + 16 * j, sum[m][j], first_of(left));
      }
    }
}

template <class P, class To>
void outer_tiles(int64_t rows, Broadcast a, const uint32_t* b, int64_t steps, float* sums, bool add, To* to,
                 int64_t stride, int64_t columns, float scale = 1, bool onto = false) {
  switch (rows) {
    case 6: return outer_tile<P, 6>(a, b, steps, sums, add, to, stride, columns, scale, onto);
    case 5: return outer_tile<P, 5>(a, b, steps, sums, add, to, stride, columns, scale, onto);
    case 4: return outer_tile<P, 4>(a, b, steps, sums, add, to, stride, columns, scale, onto);
    case 3: return outer_tile<P, 3>(a, b, steps, sums, add, to, stride, columns, scale, onto);
    case 2: return outer_tile<P, 2>(a, b, steps, sums, add, to, stride, columns, scale, onto);
    default: return outer_tile<P, 1>(a, b, steps, sums, add, to, stride, columns, scale, onto);
  }
}

// One step of a packed factor: a row of a matrix, or for bfloat16 two rows (one, and zeros, if there is no second).
// Elements past the columns are 0.
template <class T>
TW_INLINE void pack(const T* row, const T* second, int64_t columns, uint32_t* to, int64_t width) {
  if constexpr (sizeof(T) == 4) {
    for (int64_t c = 0; c < columns; ++c) std::memcpy(to + c, row + c, 4);
  } else if (second != nullptr) {
    TW_SIMD
    for (int64_t c = 0; c < columns; ++c) to[c] = uint32_t(row[c].bits) | uint32_t(second[c].bits) << 16;
  } else {
    for (int64_t c = 0; c < columns; ++c) to[c] = row[c].bits;
  }
  for (int64_t c = columns; c < width; ++c) to[c] = 0;
}

// `steps` steps of n rows, into panels of 64 columns. One step at a time, in memory order.
template <int PAIR, class T>
void pack_panels(const T* from, int64_t stride, int64_t n, int64_t steps, int64_t columns, uint32_t* panels) {
  for (int64_t s = 0; s < steps; ++s) {
    const T* row = from + s * PAIR * stride;
    const T* second = PAIR == 2 && s * 2 + 1 < n ? row + stride : nullptr;
    uint32_t* to = panels + s * OUTER_COLUMNS;
    int64_t c = 0;
    for (; c + OUTER_COLUMNS <= columns; c += OUTER_COLUMNS)
      pack(row + c, second == nullptr ? second : second + c, OUTER_COLUMNS, to + c * steps, OUTER_COLUMNS);
    if (c < columns) pack(row + c, second == nullptr ? second : second + c, columns - c, to + c * steps, OUTER_COLUMNS);
  }
}

// Transposes 16 rows of 16 units (those from `rows` and `units` on are 0), `stride` apart, to 16 columns of 64 units'
// width.
TW_INLINE void transpose(const uint32_t* from, int64_t stride, int64_t rows, int64_t units, uint32_t* to) {
  __m512i a[16], b[16];
  const __mmask16 mask = first_of(units);
  for (int i = 0; i < 16; ++i)
    a[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, from + i * stride) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // a[i + j]: fourth j of each 128 bits, rows i to i + 3
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {
    const __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), q = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i r = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD), t = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
    b[j] = _mm512_shuffle_i32x4(p, q, 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(p, q, 0xDD);
    b[4 + j] = _mm512_shuffle_i32x4(r, t, 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(r, t, 0xDD);
  }
  for (int i = 0; i < 16 && i < units; ++i) _mm512_storeu_si512(to + i * OUTER_COLUMNS, b[i]);
}

// Packs `steps` units of each of `columns` rows, `stride` units apart, as panels whose columns are those rows.
inline void pack_transposed(const uint32_t* from, int64_t stride, int64_t steps, int64_t columns, uint32_t* panels) {
  const int64_t padded = (columns + OUTER_COLUMNS - 1) / OUTER_COLUMNS * OUTER_COLUMNS;
  for (int64_t c = 0; c < padded; c += 16)
    for (int64_t s = 0; s < steps; s += 16)
      transpose(from + c * stride + s, stride, columns - c, steps - s,
                panels + c / OUTER_COLUMNS * OUTER_COLUMNS * steps + s * OUTER_COLUMNS + c % OUTER_COLUMNS);
}

inline int64_t steps_of(int64_t sum, int64_t pair) { return (sum + pair - 1) / pair; }

}  // namespace tw

#endif  // TW_OWN_PRODUCTS
