// y = x w^T of few rows x and a quantized matrix w, on the CPU. The definition is tilewright/ops/quant/quantized_linear.py.
//
// T = rows of x, N = rows of w, K = columns. A few rows of w are dequantized, a piece of columns at a time, in the
// first-level cache, and multiplied by all rows of x while they are there: a weight's codes are read from memory once,
// and nothing as large as the weight is ever written. A single thread computes each element of y, summed in an order
// that depends on K alone: the same bits on any number of threads.
//
// 4-bit codes are looked up in their 16 values under one scale, rounded to x's dtype, so that rounding costs as little
// as a scale does. With AVX-512's bfloat16 instruction, products of bfloat16 are of pairs; without it both factors
// become float32, which represents them exactly.
#include <algorithm>
#include <type_traits>

#include "cpu/quantize.h"

#if defined(__SSSE3__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TW_WIDE 1
// setup.py compiles for x86-64-v4, which has no bfloat16: called only where the processor has it.
#define TW_BF16 __attribute__((target("avx512bf16")))
#endif

namespace tw {
namespace {

constexpr float NF4_VALUES[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                  -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                  0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
                                  0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                                  0.7229568362236023f, 1.0f};
constexpr float E2M1_VALUES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

enum Format { NF4, NVFP4, FP8 };
constexpr int64_t STEP = 16;     // elements that are looked up together
constexpr int64_t CHUNK = 1024;  // columns of a piece: it fits in the first-level cache with those of x
#if defined(TW_WIDE)
constexpr int LANES = 16, HIGH = 4, WIDE = 6;  // rows of x and of w in a tile: 24 sums, 6 weights and an x
#elif defined(__AVX2__)
constexpr int LANES = 8, HIGH = 2, WIDE = 4;  // with 16 registers
#else
constexpr int LANES = 4, HIGH = 2, WIDE = 4;
#endif
typedef float Vector __attribute__((vector_size(LANES * 4)));

// ---- dequantization

#if defined(TW_WIDE)
template <class B>
struct Sixteen {
  typedef __m256i Register;  // of bfloat16
};
template <>
struct Sixteen<float> {
  typedef __m512 Register;
};
#endif

// The 16 values under one scale, rounded to x's dtype (HALF: bfloat16), as type B.
template <class B, bool HALF>
struct Table {
#if defined(TW_WIDE)
  typename Sixteen<B>::Register value;

  TW_INLINE Table(const float* values, float scale) {
    __m512 v = _mm512_mul_ps(_mm512_loadu_ps(values), _mm512_set1_ps(scale));
    if constexpr (HALF) {  // as `store`
      const __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
      __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)),
                                   _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
      r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
      v = _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(int32_t(0xFFFF0000u))));
    }
    if constexpr (std::is_same_v<B, float>)
      value = v;
    else
      value = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));
  }
#else
  alignas(32) B value[16];

  TW_INLINE Table(const float* values, float scale) {
    TW_SIMD
    for (int i = 0; i < 16; ++i) {
      const float v = values[i] * scale;
      store(value + i, HALF ? round_to(v, static_cast<const bf16*>(nullptr)) : v);
    }
  }
#endif

  // STEP elements from STEP / 2 bytes. HIGH_FIRST: the even one is in the high nibble.
  template <bool HIGH_FIRST>
  TW_INLINE void look_up(const uint8_t* bytes, B* to) const {
#if defined(__AVX2__)
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    const __m128i code = HIGH_FIRST ? _mm_unpacklo_epi8(high, low) : _mm_unpacklo_epi8(low, high);
#endif
#if defined(TW_WIDE)
    if constexpr (std::is_same_v<B, float>)
      _mm512_storeu_ps(to, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), value));
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutexvar_epi16(_mm256_cvtepu8_epi16(code), value));
#elif defined(__AVX2__)
    static_assert(std::is_same_v<B, float>, "bfloat16 is multiplied where there is AVX-512");
    const __m256 first = _mm256_load_ps(value), second = _mm256_load_ps(value + 8);
    for (int half = 0; half < 2; ++half) {
      const __m256i i = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(code, 8) : code);
      const __m256 a = _mm256_permutevar8x32_ps(first, i), b = _mm256_permutevar8x32_ps(second, i);
      _mm256_storeu_ps(to + 8 * half, _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28))));
    }
#else
    for (int i = 0; i < STEP / 2; ++i) {
      to[2 * i] = value[HIGH_FIRST ? bytes[i] >> 4 : bytes[i] & 15];
      to[2 * i + 1] = value[HIGH_FIRST ? bytes[i] & 15 : bytes[i] >> 4];
    }
#endif
  }
};

struct Weight {
  Format format;
  const uint8_t* data;
  const float* scales;        // or
  const uint8_t* codes;       // of scales: double quantization and NVFP4
  const float *map, *nested;  // values of those codes, and their scales in double quantization
  float offset;
  int64_t columns, rows, span;  // rows, span: rows and columns that share a scale

  TW_INLINE float scale(int64_t at) const {
    if (codes == nullptr) return scales[at];
    if (nested == nullptr) return map[codes[at]];
    // Two roundings, as in the definition: volatile keeps the compiler from fusing them.
    volatile float product = map[codes[at]] * nested[at / 256];
    return product + offset;
  }
};

// n columns from `column` on, both multiples of STEP. Steps do not cross scales, each of which covers a multiple of
// STEP.
template <Format FORMAT, bool HALF, class B>
void decode(const Weight& w, int64_t row, int64_t column, int64_t n, B* to) {
  int64_t at = row / w.rows * ((w.columns + w.span - 1) / w.span) + column / w.span;
  int64_t edge = (column / w.span + 1) * w.span;
  for (int64_t k = column; k < column + n; ++at, edge += w.span) {
    const int64_t end = std::min(column + n, edge);
    const float scale = w.scale(at);
    if constexpr (FORMAT == FP8) {
      const uint8_t* const codes = w.data + row * w.columns + k;
      B* const values = to + (k - column);
      TW_SIMD
      for (int64_t i = 0; i < end - k; ++i) {
        const float v = from_e4m3(codes[i]) * scale;
        store(values + i, HALF && std::is_same_v<B, float> ? round_to(v, static_cast<const bf16*>(nullptr)) : v);
      }
      k = end;
    } else {
      const Table<B, HALF> table(FORMAT == NF4 ? NF4_VALUES : E2M1_VALUES, scale);
      const uint8_t* bytes = w.data + (row * w.columns + k) / 2;
      for (; k < end; k += STEP, bytes += STEP / 2) table.template look_up<FORMAT == NF4>(bytes, to + (k - column));
    }
  }
}

// ---- products

TW_INLINE float total(Vector v) {
  float lanes[LANES], sum = 0;
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  sum = lanes[0];
  return sum;
}

TW_INLINE Vector vector_at(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// sums[m][n] += <x[m], w[n]> over `columns`, a multiple of STEP. w: WIDE rows, CHUNK apart.
template <int M>
void tile(const float* x, int64_t stride, const float* w, int64_t columns, float* sums) {
  Vector sum[M][WIDE] = {};
  for (int64_t k = 0; k < columns; k += LANES) {
    Vector b[WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) b[n] = vector_at(w + n * CHUNK + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vector a = vector_at(x + m * stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < WIDE; ++n) sum[m][n] += a * b[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) sums[m * WIDE + n] += total(sum[m][n]);
}

#if defined(TW_WIDE)
template <int M>
TW_BF16 void tile(const bf16* x, int64_t stride, const bf16* w, int64_t columns, float* sums) {
  __m512 sum[M][WIDE];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) sum[m][n] = _mm512_setzero_ps();
  for (int64_t k = 0; k < columns; k += 32) {
    const __mmask32 mask = columns - k >= 32 ? 0xFFFFFFFFu : 0xFFFFu;
    __m512bh b[WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) b[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + n * CHUNK + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto a = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + m * stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < WIDE; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) sums[m * WIDE + n] += _mm512_reduce_add_ps(sum[m][n]);
}

bool has_bf16() {
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
}
#endif

template <class B>
TW_INLINE void tiles(int64_t rows, const B* x, int64_t stride, const B* w, int64_t columns, float* sums) {
  int64_t m = 0;
  for (; m + HIGH <= rows; m += HIGH) tile<HIGH>(x + m * stride, stride, w, columns, sums + m * WIDE);
  if constexpr (HIGH > 2) {
    if (rows - m == 3) return tile<3>(x + m * stride, stride, w, columns, sums + m * WIDE);
    if (rows - m == 2) return tile<2>(x + m * stride, stride, w, columns, sums + m * WIDE);
  }
  if (rows - m == 1) tile<1>(x + m * stride, stride, w, columns, sums + m * WIDE);
}

// x: [T, K] of type B.   HALF: the dtype of x, and so of y and bias, is bfloat16.
template <Format FORMAT, bool HALF, class B>
void product(const B* x, int64_t T, const Weight& w, int64_t N, const Tensor* bias, const Tensor& y) {
  using Y = std::conditional_t<HALF, bf16, float>;
  const int64_t K = w.columns, groups = ceil_div(N, WIDE);
  const Y* const add = bias == nullptr ? nullptr : in<Y>(*bias);
  Y* const to = out<Y>(y);
  torch::stable::parallel_for(0, groups, grain(WIDE * K), [&](int64_t begin, int64_t end) {
    std::vector<B> numbers(size_t(WIDE * CHUNK), B{});
    std::vector<float> sums(size_t(T * WIDE));
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = g * WIDE, rows = std::min<int64_t>(WIDE, N - first);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t k = 0; k < K; k += CHUNK) {
        const int64_t n = std::min(CHUNK, K - k);
        for (int64_t r = 0; r < rows; ++r) decode<FORMAT, HALF>(w, first + r, k, n, numbers.data() + r * CHUNK);
        tiles(T, x + k, K, numbers.data(), n, sums.data());
      }
      for (int64_t t = 0; t < T; ++t)
        for (int64_t r = 0; r < rows; ++r)
          store(to + t * N + first + r, sums[size_t(t * WIDE + r)] + (add ? load(add[first + r]) : 0.0f));
    }
  });
}

template <Format FORMAT>
void by_dtype(const Tensor& x, const Weight& w, int64_t N, const Tensor* bias, const Tensor& y) {
  const int64_t T = x.size(0);
  if (x.scalar_type() == ScalarType::Float) return product<FORMAT, false>(in<float>(x), T, w, N, bias, y);
#if defined(TW_WIDE)
  if (has_bf16()) return product<FORMAT, true>(in<bf16>(x), T, w, N, bias, y);
#endif
  std::vector<float> wide(size_t(x.numel()));
  const bf16* const from = in<bf16>(x);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = load(from[i]);
  product<FORMAT, true>(wide.data(), T, w, N, bias, y);
}

// format: 0 NF4, 1 NVFP4, 2 FP8.   rows, span: rows and columns of w that share a scale.   extra: see Weight.
Tensor few_rows(Tensor x, std::optional<Tensor> bias, Tensor data, Tensor scale, std::optional<Tensor> nested,
                std::optional<Tensor> map, std::optional<Tensor> extra, int64_t format, int64_t N, int64_t rows,
                int64_t span) {
  check_row_major("x", x);
  STD_TORCH_CHECK(x.dim() == 2 && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "tilewright: x must be a matrix of float32 or bfloat16");
  const int64_t K = x.size(1);
  STD_TORCH_CHECK(format >= NF4 && format <= FP8 && N >= 1 && rows >= 1 && span >= STEP && span % STEP == 0 &&
                      K >= STEP && K % STEP == 0 && (format != NF4 || K % span == 0) && (format == FP8 || rows == 1),
                  "tilewright: no fused product for a quantized matrix of these sizes");
  const int64_t scales = ceil_div(N, rows) * ceil_div(K, span);
  const bool coded = nested.has_value() || format == NVFP4;
  check_bytes("data", data, format == FP8 ? N * K : N * K / 2);
  if (coded) {
    check_bytes("scale", scale, scales);
    STD_TORCH_CHECK(extra.has_value(), "tilewright: scales in codes need a number for all");
    check_floats("extra", *extra, 1);
  } else {
    check_floats("scale", scale, scales);
  }
  if (nested.has_value()) {
    STD_TORCH_CHECK(map.has_value() && format == NF4, "tilewright: only NF4 has nested scales, and those have a map");
    check_floats("nested", *nested, ceil_div(scales, 256));
    check_floats("map", *map, 256);
  }
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->numel() == N && bias->scalar_type() == x.scalar_type(),
                    "tilewright: bias must have ", N, " elements of x's dtype");
  }
  float stands_for[256];
  if (format == NVFP4)
    for (int k = 0; k < 256; ++k) stands_for[k] = from_e4m3(uint8_t(k)) * in<float>(extra)[0];
  const Weight w{Format(format), in<uint8_t>(data), coded ? nullptr : in<float>(scale),
                 coded ? in<uint8_t>(scale) : nullptr, format == NVFP4 ? stands_for : in<float>(map),
                 in<float>(nested), nested.has_value() ? in<float>(extra)[0] : 0.0f, K, rows, span};
  Tensor y = torch::stable::new_empty(x, {x.size(0), N});
  const Tensor* const add = bias.has_value() ? &*bias : nullptr;
  switch (w.format) {
    case NF4: by_dtype<NF4>(x, w, N, add, y); break;
    case NVFP4: by_dtype<NVFP4>(x, w, N, add, y); break;
    default: by_dtype<FP8>(x, w, N, add, y);
  }
  return y;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("quantized_linear_cpp_few_rows(Tensor x, Tensor? bias, Tensor data, Tensor scale, Tensor? nested, Tensor? map, "
        "Tensor? extra, int format, int N, int rows, int span) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("quantized_linear_cpp_few_rows", TORCH_BOX(&tw::few_rows));
}
