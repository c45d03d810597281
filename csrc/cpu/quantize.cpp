// NF4, NVFP4 and block-scaled FP8 on the CPU. The definitions are tilewright/ops/{nf4,nvfp4,block_fp8}.py, and
// tilewright/ops/quantize.py for the rounding; what is quantised has the same bytes there and here.
//
// Quantising is plain loops that the compiler vectorises. Looking codes up is written for the byte shuffles and
// permutations of each instruction set, since a loop over a table becomes one scalar load an element.
#include <algorithm>

#include "cpu/common.h"

#if defined(__SSSE3__)
#include <immintrin.h>
#endif

namespace tw {
namespace {

template <class To, class From>
TW_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits");
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}

// ---- rounding

// A code without its sign: see `encode` in quantize.py. random: 32 bits, where RANDOM.
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

// Exact, and without subnormal numbers, which a processor may be told to flush.
TW_INLINE float from_e4m3(uint8_t code) {
  const int32_t u = code & 0x7F;
  const bool small = u < 8;
  float f = bits<float>((u << 20) + ((small ? 121 : 120) << 23)) - (small ? 0.015625f : 0.0f);
  f = u == 0x7F ? NAN : f;
  return bits<float>(bits<int32_t>(f) | int32_t(code & 0x80) << 24);
}

// Random bits of elements first to first + n - 1: see `philox` in quantize.py.
void philox(uint64_t key, uint64_t first, int64_t n, std::vector<uint32_t>& words, uint32_t*& found) {
  const uint64_t block = first >> 2;
  const int64_t blocks = int64_t(((first + uint64_t(n) + 3) >> 2) - block);
  if (int64_t(words.size()) < 4 * blocks) words.resize(size_t(4 * blocks));
  uint32_t* const w = words.data();
  TW_SIMD
  for (int64_t b = 0; b < blocks; ++b) {
    const uint64_t at = block + uint64_t(b);
    uint32_t c0 = uint32_t(at), c1 = uint32_t(at >> 32), c2 = 0, c3 = 0;
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
    w[4 * b] = c0;
    w[4 * b + 1] = c1;
    w[4 * b + 2] = c2;
    w[4 * b + 3] = c3;
  }
  found = w + (first & 3);
}

// The largest magnitude as bits, whose order is that of the magnitudes: a NaN is above all numbers, and stays.
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

// ---- checks

void check_bytes(const char* name, const Tensor& t, int64_t elements) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte && t.numel() == elements, "tilewright: ", name, " must be ",
                  elements, " bytes");
}

void check_floats(const char* name, const Tensor& t, int64_t elements) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == elements, "tilewright: ", name, " must be ",
                  elements, " float32 numbers");
}

void check_matrices(const char* name, const Tensor& t) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.dim() == 3, "tilewright: ", name, " must be [matrices, rows, columns]");
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class F>
void with_dtype(bool half, F&& f) {
  if (half) return f(bf16{});
  return f(float{});
}

// ---- NF4

constexpr float NF4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                           -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                           0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                           0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
constexpr int64_t MOST_BLOCK = 4096;

void check_block(int64_t n, int64_t block) {
  STD_TORCH_CHECK(n >= 0 && block >= 2 && block <= MOST_BLOCK && block % 2 == 0,
                  "tilewright: block must be even, 2 to 4096, got ", block);
}

std::tuple<Tensor, Tensor> nf4_quantize(Tensor x, int64_t block) {
  check_row_major("x", x);
  const int64_t n = x.numel(), blocks = ceil_div(n, block);
  check_block(n, block);
  Tensor data = torch::stable::new_empty(x, {(n + 1) / 2}, ScalarType::Byte);
  Tensor absmax = torch::stable::new_empty(x, {blocks}, ScalarType::Float);
  float bound[15];
  for (int k = 0; k < 15; ++k) bound[k] = (NF4[k] + NF4[k + 1]) / 2;
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    uint8_t* const to = out<uint8_t>(data);
    float* const scales = out<float>(absmax);
    torch::stable::parallel_for(0, blocks, grain(block), [&](int64_t begin, int64_t end) {
      uint8_t code[MOST_BLOCK];
      for (int64_t b = begin; b < end; ++b) {
        const T* const own = from + b * block;
        const int64_t m = std::min(block, n - b * block);
        float most = bits<float>(largest(own, m));
        const float least = most < 1e-38f ? 1e-38f : most, inverse = 1.0f / least;
        const bool whole = m == block;
        scales[b] = whole ? most : least;
        TW_SIMD
        for (int64_t i = 0; i < m; ++i) {
          const float v = whole ? load(own[i]) * inverse : load(own[i]) / least;
          int32_t c = 0;
#pragma GCC unroll 15
          for (int k = 0; k < 15; ++k) c += v > bound[k];
          code[i] = uint8_t(c);
        }
        if (m % 2) code[m] = 7;
        uint8_t* const packed = to + b * (block / 2);
        TW_SIMD
        for (int64_t i = 0; i < (m + 1) / 2; ++i) packed[i] = uint8_t(code[2 * i] << 4 | code[2 * i + 1]);
      }
    });
  });
  return {data, absmax};
}

// One block's 16 values, in the form in which its codes are looked up.
template <class T>
struct Values;

template <>
struct Values<bf16> {
  uint16_t value[16];
#if defined(__SSSE3__)
  __m128i low, high;
#endif
  TW_INLINE explicit Values(float scale) {
    TW_SIMD
    for (int i = 0; i < 16; ++i) {
      bf16 v;
      store(&v, NF4[i] * scale);
      value[i] = v.bits;
    }
#if defined(__SSSE3__)
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(value)),
                  second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(value + 8)), mask = _mm_set1_epi16(0xFF);
    low = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask));
    high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
#endif
  }
  TW_INLINE bf16 at(int code) const { return {value[code]}; }
#if defined(__SSSE3__)
  TW_INLINE void sixteen(__m128i code, bf16* to) const {
    const __m128i l = _mm_shuffle_epi8(low, code), h = _mm_shuffle_epi8(high, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(l, h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm_unpackhi_epi8(l, h));
  }
#endif
};

template <>
struct Values<float> {
  float value[16];
  TW_INLINE explicit Values(float scale) {
    TW_SIMD
    for (int i = 0; i < 16; ++i) value[i] = NF4[i] * scale;
  }
  TW_INLINE float at(int code) const { return value[code]; }
#if defined(__SSSE3__)
  TW_INLINE void sixteen(__m128i code, float* to) const {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), _mm512_loadu_ps(value)));
#elif defined(__AVX2__)
    const __m256 first = _mm256_loadu_ps(value), second = _mm256_loadu_ps(value + 8);
    for (int half = 0; half < 2; ++half) {
      const __m256i i = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(code, 8) : code);
      const __m256 a = _mm256_permutevar8x32_ps(first, i), b = _mm256_permutevar8x32_ps(second, i);
      _mm256_storeu_ps(to + 8 * half, _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28))));
    }
#else
    uint8_t codes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), code);
    for (int i = 0; i < 16; ++i) to[i] = value[codes[i]];
#endif
  }
#endif
};

template <class T>
TW_INLINE void nf4_block(const uint8_t* data, float scale, T* to, int64_t n) {
  const Values<T> values(scale);
  int64_t i = 0;
#if defined(__SSSE3__)
  const __m128i mask = _mm_set1_epi8(15);
  for (; i + 32 <= n; i += 32) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i / 2));
    const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), mask), odd = _mm_and_si128(both, mask);
    values.sixteen(_mm_unpacklo_epi8(even, odd), to + i);
    values.sixteen(_mm_unpackhi_epi8(even, odd), to + i + 16);
  }
#endif
  for (; i < n; ++i) to[i] = values.at(i % 2 ? data[i / 2] & 15 : data[i / 2] >> 4);
}

Tensor nf4_dequantize(Tensor data, Tensor absmax, std::optional<Tensor> nested_absmax, std::optional<Tensor> table,
                      std::optional<Tensor> offset, int64_t n, int64_t block, bool half) {
  check_block(n, block);
  const int64_t blocks = ceil_div(n, block);
  check_bytes("data", data, (n + 1) / 2);
  const bool nested = nested_absmax.has_value();
  STD_TORCH_CHECK(table.has_value() == nested && offset.has_value() == nested,
                  "tilewright: nested_absmax, table and offset must be given together");
  if (nested) {
    check_bytes("absmax", absmax, blocks);
    check_floats("nested_absmax", *nested_absmax, ceil_div(blocks, 256));
    check_floats("table", *table, 256);
    check_floats("offset", *offset, 1);
  } else {
    check_floats("absmax", absmax, blocks);
  }
  Tensor y = huge(torch::stable::new_empty(data, {n}, half ? ScalarType::BFloat16 : ScalarType::Float));
  with_dtype(half, [&](auto element) {
    using T = decltype(element);
    const uint8_t *const from = in<uint8_t>(data), *const codes = nested ? in<uint8_t>(absmax) : nullptr;
    const float* const scales = nested ? in<float>(*nested_absmax) : in<float>(absmax);
    const float* const map = in<float>(table);
    const float mean = nested ? in<float>(*offset)[0] : 0.0f;
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, blocks, grain(block), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        float scale = scales[nested ? b / 256 : b];
        if (nested) {
          // Two roundings, as in the definition: the compiler may not make a fused one of what it cannot see.
          volatile float product = map[codes[b]] * scale;
          scale = product + mean;
        }
        nf4_block(from + b * (block / 2), scale, to + b * block, std::min(block, n - b * block));
      }
    });
  });
  return y;
}

// ---- NVFP4

constexpr int64_t GROUP = 16;

// Codes of a row, packed. inverse: of each element's scale. The loop is as long as the row: one of 16 elements is not
// vectorised.
template <bool RANDOM, class T>
void nvfp4_codes(const T* x, int64_t n, const float* inverse, const uint32_t* random, uint8_t* code, uint8_t* to) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) code[i] = to_e2m1<RANDOM>(load(x[i]) * inverse[i], RANDOM ? random[i] : 0);
  code[n] = 0;
  TW_SIMD
  for (int64_t i = 0; i < (n + 1) / 2; ++i) to[i] = uint8_t(code[2 * i] | code[2 * i + 1] << 4);
}

// most[g] = the larger of it and group g's largest magnitude, as bits. work: room for 24 numbers a group.
template <class T>
void nvfp4_largest(const T* x, int64_t n, int32_t* work, int32_t* most) {
  const int64_t groups = ceil_div(n, GROUP);
  int32_t *from = work, *to = work + groups * GROUP;
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) from[i] = bits<int32_t>(load(x[i])) & 0x7FFFFFFF;
  for (int64_t i = n; i < groups * GROUP; ++i) from[i] = 0;
  for (int64_t m = groups * GROUP / 2; m >= groups && m > 0; m /= 2) {
    TW_SIMD
    for (int64_t i = 0; i < m; ++i) to[i] = std::max(from[2 * i], from[2 * i + 1]);
    std::swap(from, to);
    if (m == groups) break;
  }
  TW_SIMD
  for (int64_t g = 0; g < groups; ++g) most[g] = std::max(most[g], from[g]);
}

std::tuple<Tensor, Tensor> nvfp4_quantize(Tensor x, Tensor global_scale, bool square, std::optional<int64_t> seed) {
  check_matrices("x", x);
  check_floats("global_scale", global_scale, 1);
  const int64_t B = x.size(0), R = x.size(1), C = x.size(2), groups = ceil_div(C, GROUP), bytes = (C + 1) / 2;
  const int64_t tall = square ? GROUP : 1, bands = ceil_div(R, tall);
  Tensor data = torch::stable::new_empty(x, {B, R, bytes}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(x, {B, R, groups}, ScalarType::Byte);
  const float total = in<float>(global_scale)[0], over = 1.0f / total;
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    uint8_t *const to = out<uint8_t>(data), *const scales = out<uint8_t>(scale);
    const auto run = [&](auto random_bits) {
      constexpr bool RANDOM = decltype(random_bits)::value;
      torch::stable::parallel_for(0, B * bands, grain(tall * C), [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> words;
        std::vector<float> inverse(static_cast<size_t>(groups * GROUP));
        std::vector<int32_t> most(static_cast<size_t>(groups)), work(static_cast<size_t>(groups * (GROUP + GROUP / 2)));
        std::vector<uint8_t> code(static_cast<size_t>(C + 1));
        for (int64_t band = begin; band < end; ++band) {
          const int64_t first = band / bands * R + band % bands * tall;
          const int64_t rows = std::min(tall, R - band % bands * tall);
          std::fill(most.begin(), most.end(), 0);
          for (int64_t r = first; r < first + rows; ++r) nvfp4_largest(from + r * C, C, work.data(), most.data());
          for (int64_t g = 0; g < groups; ++g) {
            float wanted = bits<float>(most[size_t(g)]) / 6.0f / total;
            wanted = wanted < 0.001953125f ? 0.001953125f : wanted;
            const uint8_t block = most[size_t(g)] > 0 ? to_e4m3<false>(wanted, 0) : uint8_t(0);
            std::fill_n(inverse.data() + g * GROUP, GROUP, block ? over / from_e4m3(block) : 0.0f);
            for (int64_t r = first; r < first + rows; ++r) scales[r * groups + g] = block;
          }
          for (int64_t r = first; r < first + rows; ++r) {
            uint32_t* random = nullptr;
            if (RANDOM) philox(uint64_t(*seed), uint64_t(r) * uint64_t(C), C, words, random);
            nvfp4_codes<RANDOM>(from + r * C, C, inverse.data(), random, code.data(), to + r * bytes);
          }
        }
      });
    };
    if (seed.has_value()) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
  return {data, scale};
}

// The values of e2m1's codes have 2 bits of mantissa at most: the upper halves of float32 hold them.
constexpr uint16_t E2M1[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                               0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

#if defined(__AVX512F__) && defined(__AVX512BW__)
TW_INLINE void put(float* to, __m512 v) { _mm512_storeu_ps(to, v); }
TW_INLINE void put(bf16* to, __m512 v) {  // as `store`
  const __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)),
                               _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
#endif

template <class T>
TW_INLINE void nvfp4_row(const uint8_t* data, const uint8_t* scale, const float* map, T* to, int64_t C) {
  int64_t i = 0;
#if defined(__SSSE3__)
  const __m128i mask = _mm_set1_epi8(15);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 values = _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(E2M1))), 16));
#else
  alignas(16) uint8_t planes[2][16];
  for (int k = 0; k < 16; ++k) {
    planes[0][k] = uint8_t(E2M1[k]);
    planes[1][k] = uint8_t(E2M1[k] >> 8);
  }
  const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(planes[0])),
                high = _mm_load_si128(reinterpret_cast<const __m128i*>(planes[1]));
#endif
  for (; i + 2 * GROUP <= C; i += 2 * GROUP) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i / 2));
    const __m128i even = _mm_and_si128(both, mask), odd = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    const __m128i code[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    for (int g = 0; g < 2; ++g) {
      const float s = map[scale[i / GROUP + g]];
#if defined(__AVX512F__) && defined(__AVX512BW__)
      put(to + i + g * GROUP,
          _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code[g]), values), _mm512_set1_ps(s)));
#else
      const __m128i l = _mm_shuffle_epi8(low, code[g]), h = _mm_shuffle_epi8(high, code[g]);
      bf16 value[GROUP];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(value), _mm_unpacklo_epi8(l, h));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(value + 8), _mm_unpackhi_epi8(l, h));
      TW_SIMD
      for (int k = 0; k < GROUP; ++k) store(to + i + g * GROUP + k, load(value[k]) * s);
#endif
    }
  }
#endif
  for (; i < C; ++i) {
    const int code = i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15;
    store(to + i, load(bf16{E2M1[code]}) * map[scale[i / GROUP]]);
  }
}

Tensor nvfp4_dequantize(Tensor data, Tensor scale, Tensor global_scale, int64_t C, bool half) {
  STD_TORCH_CHECK(data.dim() == 2 && C >= 0, "tilewright: data must be a matrix");
  const int64_t R = data.size(0), bytes = (C + 1) / 2, groups = ceil_div(C, GROUP);
  check_bytes("data", data, R * bytes);
  check_bytes("scale", scale, R * groups);
  check_floats("global_scale", global_scale, 1);
  Tensor y = huge(torch::stable::new_empty(data, {R, C}, half ? ScalarType::BFloat16 : ScalarType::Float));
  float map[256];  // what a block's code stands for
  const float total = in<float>(global_scale)[0];
  for (int k = 0; k < 256; ++k) map[k] = from_e4m3(uint8_t(k)) * total;
  with_dtype(half, [&](auto element) {
    using T = decltype(element);
    const uint8_t *const from = in<uint8_t>(data), *const scales = in<uint8_t>(scale);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, R, grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) nvfp4_row(from + r * bytes, scales + r * groups, map, to + r * C, C);
    });
  });
  return y;
}

// ---- block-scaled FP8

void check_tile(int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(rows >= 1 && columns >= 1, "tilewright: a block must have rows and columns");
}

std::tuple<Tensor, Tensor> block_fp8_quantize(Tensor x, int64_t rows, int64_t columns, std::optional<int64_t> seed) {
  check_matrices("x", x);
  check_tile(rows, columns);
  const int64_t B = x.size(0), R = x.size(1), C = x.size(2), bands = ceil_div(R, rows), across = ceil_div(C, columns);
  Tensor data = torch::stable::new_empty(x, {B, R, C}, ScalarType::Byte);
  Tensor inverse = torch::stable::new_empty(x, {B, bands, across}, ScalarType::Float);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    uint8_t* const to = out<uint8_t>(data);
    float* const scales = out<float>(inverse);
    const auto run = [&](auto random_bits) {
      constexpr bool RANDOM = decltype(random_bits)::value;
      torch::stable::parallel_for(0, B * bands, grain(rows * C), [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> words;
        for (int64_t band = begin; band < end; ++band) {
          const int64_t first = band / bands * R + band % bands * rows;
          const int64_t last = first + std::min(rows, R - band % bands * rows);
          for (int64_t b = 0; b < across; ++b) {
            const int64_t at = b * columns, n = std::min(columns, C - at);
            int32_t found = 0;
            for (int64_t r = first; r < last; ++r) found = std::max(found, largest(from + r * C + at, n));
            float most = bits<float>(found);
            most = most < 0x1p-100f ? 0x1p-100f : most;
            scales[band * across + b] = found == 0 ? 1.0f : most / 448.0f;
            const float scale = found == 0 ? 1.0f : 1.0f / most * 448.0f;
            for (int64_t r = first; r < last; ++r) {
              const T* const own = from + r * C + at;
              uint8_t* const codes = to + r * C + at;
              uint32_t* random = nullptr;
              if (RANDOM) philox(uint64_t(*seed), uint64_t(r) * uint64_t(C) + uint64_t(at), n, words, random);
              TW_SIMD
              for (int64_t i = 0; i < n; ++i) codes[i] = to_e4m3<RANDOM>(load(own[i]) * scale, RANDOM ? random[i] : 0);
            }
          }
        }
      });
    };
    if (seed.has_value()) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
  return {data, inverse};
}

Tensor block_fp8_dequantize(Tensor data, Tensor inverse, int64_t rows, int64_t columns, bool half) {
  check_matrices("data", data);
  check_tile(rows, columns);
  const int64_t B = data.size(0), R = data.size(1), C = data.size(2), bands = ceil_div(R, rows);
  const int64_t across = ceil_div(C, columns);
  check_bytes("data", data, B * R * C);
  check_floats("inverse", inverse, B * bands * across);
  Tensor y = huge(torch::stable::new_empty(data, {B, R, C}, half ? ScalarType::BFloat16 : ScalarType::Float));
  with_dtype(half, [&](auto element) {
    using T = decltype(element);
    const uint8_t* const from = in<uint8_t>(data);
    const float* const scales = in<float>(inverse);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, B * R, grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float* const own = scales + (r / R * bands + r % R / rows) * across;
        for (int64_t b = 0; b < across; ++b) {
          const int64_t at = b * columns, n = std::min(columns, C - at);
          const uint8_t* const codes = from + r * C + at;
          T* const values = to + r * C + at;
          const float scale = own[b];
          TW_SIMD
          for (int64_t i = 0; i < n; ++i) store(values + i, from_e4m3(codes[i]) * scale);
        }
      }
    });
  });
  return y;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("nf4_cpp_quantize(Tensor x, int block) -> (Tensor, Tensor)");
  m.def("nf4_cpp_dequantize(Tensor data, Tensor absmax, Tensor? nested_absmax, Tensor? table, Tensor? offset, int n, "
        "int block, bool half) -> Tensor");
  m.def("nvfp4_cpp_quantize(Tensor x, Tensor global_scale, bool square, int? seed) -> (Tensor, Tensor)");
  m.def("nvfp4_cpp_dequantize(Tensor data, Tensor scale, Tensor global_scale, int columns, bool half) -> Tensor");
  m.def("block_fp8_cpp_quantize(Tensor x, int rows, int columns, int? seed) -> (Tensor, Tensor)");
  m.def("block_fp8_cpp_dequantize(Tensor data, Tensor inverse, int rows, int columns, bool half) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("nf4_cpp_quantize", TORCH_BOX(&tw::nf4_quantize));
  m.impl("nf4_cpp_dequantize", TORCH_BOX(&tw::nf4_dequantize));
  m.impl("nvfp4_cpp_quantize", TORCH_BOX(&tw::nvfp4_quantize));
  m.impl("nvfp4_cpp_dequantize", TORCH_BOX(&tw::nvfp4_dequantize));
  m.impl("block_fp8_cpp_quantize", TORCH_BOX(&tw::block_fp8_quantize));
  m.impl("block_fp8_cpp_dequantize", TORCH_BOX(&tw::block_fp8_dequantize));
}
