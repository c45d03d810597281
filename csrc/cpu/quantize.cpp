// NF4, NVFP4, block-scaled FP8 and MXFP8 on the CPU. The definitions are tilewright/ops/{nf4,nvfp4,block_fp8,mxfp8}.py,
// and tilewright/ops/quant/quantize.py for the rounding; quantized bytes are the same there and here.
//
// Quantizing is plain loops that the compiler vectorizes. Table lookups of codes are written for the byte shuffles and
// permutations of each instruction set, since a loop over a table becomes one scalar load per element.
#include <algorithm>

#include "cpu/aqn.h"
#include "cpu/hadamard.h"

#if defined(__SSSE3__)
#include <immintrin.h>
#endif

namespace tw {
namespace {

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

// One block's 16 values, in the layout that the lookup of its codes uses.
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
                      std::optional<Tensor> offset, int64_t n, int64_t block, ScalarType dtype, double alpha,
                      int64_t seed, int64_t step, int64_t layer) {
  check_block(n, block);
  const Noise noise = noise_of(alpha, seed, step, layer);
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
  Tensor y = huge(torch::stable::new_empty(data, {n}, dtype));
  dispatch(y, [&](auto element) {
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
          // Two roundings, as in the definition: volatile keeps the compiler from fusing them.
          volatile float product = map[codes[b]] * scale;
          scale = product + mean;
        }
        const int64_t at = b * block, m = std::min(block, n - at);
        if (noise) {
          float value[MOST_BLOCK], room[noise_room(MOST_BLOCK)];
          nf4_block(from + at / 2, scale, value, m);
          const float* const normal = normals(noise, uint64_t(at), m, room);
          const float size = NF4[8] / 2 * noise.alpha * scale;   // half the gap next to 0
          TW_SIMD
          for (int64_t i = 0; i < m; ++i) store(to + at + i, std::fmaf(normal[i], size, value[i]));
        } else {
          nf4_block(from + at / 2, scale, to + at, m);
        }
      }
    });
  });
  return y;
}

// ---- NVFP4

constexpr int64_t GROUP = 16;

// Codes of a row, packed. inverse: of each element's scale. The loop covers the whole row: one of 16 elements is not
// vectorized.
template <bool RANDOM, class T>
void nvfp4_codes(const T* x, int64_t n, const float* inverse, const uint32_t* random, uint8_t* code, uint8_t* to) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) code[i] = to_e2m1<RANDOM>(load(x[i]) * inverse[i], RANDOM ? random[i] : 0);
  code[n] = 0;
  TW_SIMD
  for (int64_t i = 0; i < (n + 1) / 2; ++i) to[i] = uint8_t(code[2 * i] | code[2 * i + 1] << 4);
}

// most[g] = the maximum of most[g] and group g's largest magnitude, as bits. work: room for 24 numbers per group.
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

// Buffers for rows of at most n elements.
struct Nvfp4Room {
  std::vector<uint32_t> words;
  std::vector<float> inverse;
  std::vector<int32_t> most, work;
  std::vector<uint8_t> code;
  explicit Nvfp4Room(int64_t n)
      : inverse(size_t(ceil_div(n, GROUP) * GROUP)), most(size_t(ceil_div(n, GROUP))),
        work(size_t(ceil_div(n, GROUP) * (GROUP + GROUP / 2))), code(size_t(n + 1)) {}
};

// The codes and the scales of a matrix, and its row lengths.
struct Nvfp4Rows {
  uint8_t *data, *scale;
  int64_t bytes, groups;
};

// Quantizes rows that share their blocks' scales, n elements each.   stride: row stride.   element, pitch: the index of
// the first element, and its row stride, for random bits.   to: of these elements.
template <bool RANDOM, class T>
void nvfp4_band(const T* x, int64_t stride, int64_t rows, int64_t n, float total, uint64_t key, uint64_t element,
                uint64_t pitch, Nvfp4Rows to, Nvfp4Room& room) {
  const int64_t groups = ceil_div(n, GROUP);
  std::fill_n(room.most.begin(), groups, 0);
  for (int64_t r = 0; r < rows; ++r) nvfp4_largest(x + r * stride, n, room.work.data(), room.most.data());
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t most = room.most[size_t(g)];
    float wanted = bits<float>(most) / 6.0f / total;
    wanted = wanted < 0.001953125f ? 0.001953125f : wanted;
    const uint8_t block = most > 0 ? to_e4m3<false>(wanted, 0) : uint8_t(0);
    std::fill_n(room.inverse.data() + g * GROUP, GROUP, block ? 1.0f / total / from_e4m3(block) : 0.0f);
    for (int64_t r = 0; r < rows; ++r) to.scale[r * to.groups + g] = block;
  }
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t* random = nullptr;
    if (RANDOM) philox(key, element + uint64_t(r) * pitch, n, room.words, random);
    nvfp4_codes<RANDOM>(x + r * stride, n, room.inverse.data(), random, room.code.data(), to.data + r * to.bytes);
  }
}

constexpr int64_t TURN_ROWS = 128, TURN_COLUMNS = 64;  // NVFP4 tile: 32 KiB

// x [matrices, rows, C] and, if requested, the transposes; hadamard: 0 or the size of the preceding transform.
std::tuple<Tensor, Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, Tensor global_scale, bool square,
                                                          std::optional<int64_t> seed, int64_t hadamard,
                                                          std::optional<int64_t> signs, bool transpose) {
  check_matrices("x", x);
  check_floats("global_scale", global_scale, 1);
  const int64_t B = x.size(0), R = x.size(1), C = x.size(2), groups = ceil_div(C, GROUP), bytes = (C + 1) / 2;
  const int64_t across = ceil_div(R, GROUP), turned = (R + 1) / 2, tall = square ? GROUP : 1;
  if (hadamard != 0) check_size(hadamard, C);
  STD_TORCH_CHECK(hadamard == 0 || !transpose, "tilewright: transforms of x and of its transpose differ");
  Tensor data = torch::stable::new_empty(x, {B, R, bytes}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(x, {B, R, groups}, ScalarType::Byte);
  Tensor data_t = transpose ? torch::stable::new_empty(x, {B, C, turned}, ScalarType::Byte) : Tensor();
  Tensor scale_t = transpose ? torch::stable::new_empty(x, {B, C, across}, ScalarType::Byte) : Tensor();
  const float total = in<float>(global_scale)[0];
  const uint64_t key = uint64_t(seed.value_or(0));
  const uint32_t mask = sign_mask(signs);
  const int64_t height = transpose ? TURN_ROWS : tall, bands = ceil_div(R, height);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    const Nvfp4Rows to{out<uint8_t>(data), out<uint8_t>(scale), bytes, groups};
    const Nvfp4Rows to_t{transpose ? out<uint8_t>(data_t) : nullptr, transpose ? out<uint8_t>(scale_t) : nullptr, turned,
                         across};
    with_random(seed.has_value(), [&](auto random_bits) {
      constexpr bool RANDOM = decltype(random_bits)::value;
      torch::stable::parallel_for(0, B * bands, grain(height * C), [&](int64_t begin, int64_t end) {
        Nvfp4Room room(std::max(C, TURN_ROWS));
        std::vector<float> rows_of_floats(size_t(hadamard ? tall * C : transpose ? TURN_ROWS * TURN_COLUMNS : 0));
        float* const floats = rows_of_floats.data();
        for (int64_t band = begin; band < end; ++band) {
          const int64_t b = band / bands, low = band % bands * height, high = std::min(R, low + height);
          for (int64_t r = low; r < high; r += tall) {
            const int64_t rows = std::min(tall, high - r), row = b * R + r;
            const T* const own = from + row * C;
            const Nvfp4Rows here{to.data + row * bytes, to.scale + row * groups, bytes, groups};
            const uint64_t first = uint64_t(row) * uint64_t(C);
            if (hadamard) {
              hadamard_row<false>(own, rows * C, hadamard, mask, floats);
              nvfp4_band<RANDOM>(floats, C, rows, C, total, key, first, uint64_t(C), here, room);
            } else {
              nvfp4_band<RANDOM>(own, C, rows, C, total, key, first, uint64_t(C), here, room);
            }
          }
          for (int64_t c = 0; transpose && c < C; c += TURN_COLUMNS) {
            const int64_t columns = std::min(TURN_COLUMNS, C - c), n = high - low;
            turn(from + (b * R + low) * C + c, C, n, columns, floats, TURN_ROWS);
            for (int64_t j = 0; j < columns; j += tall) {
              const int64_t row = b * C + c + j;
              nvfp4_band<RANDOM>(floats + j * TURN_ROWS, TURN_ROWS, std::min(tall, columns - j), n, total, key,
                                 uint64_t(row) * uint64_t(R) + uint64_t(low), uint64_t(R),
                                 {to_t.data + row * turned + low / 2, to_t.scale + row * across + low / GROUP, turned,
                                  across}, room);
            }
          }
        }
      });
    });
  });
  return {data, scale, data_t, scale_t};
}

// The largest magnitude of the transform.
Tensor nvfp4_largest_transformed(Tensor x, int64_t hadamard, std::optional<int64_t> signs) {
  check_matrices("x", x);
  const int64_t R = x.size(0) * x.size(1), C = x.size(2);
  check_size(hadamard, C);
  Tensor found = torch::stable::new_empty(x, {}, ScalarType::Float);
  const uint32_t mask = sign_mask(signs);
  std::vector<int32_t> most(size_t(R), 0);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    torch::stable::parallel_for(0, R, grain(C), [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(C));
      for (int64_t r = begin; r < end; ++r) {
        hadamard_row<false>(from + r * C, C, hadamard, mask, row.data());
        most[size_t(r)] = largest(row.data(), C);
      }
    });
  });
  out<float>(found)[0] = bits<float>(most.empty() ? 0 : *std::max_element(most.begin(), most.end()));
  return found;
}

// The values of e2m1's codes have at most 2 bits of mantissa: the upper halves of float32 represent them.
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

constexpr int64_t PIECE = 1024;   // elements of a row to which noise is added at a time

Tensor nvfp4_dequantize(Tensor data, Tensor scale, Tensor global_scale, int64_t C, ScalarType dtype, double alpha,
                        int64_t seed, int64_t step, int64_t layer) {
  const Noise noise = noise_of(alpha, seed, step, layer);
  STD_TORCH_CHECK(data.dim() == 2 && C >= 0, "tilewright: data must be a matrix");
  const int64_t R = data.size(0), bytes = (C + 1) / 2, groups = ceil_div(C, GROUP);
  check_bytes("data", data, R * bytes);
  check_bytes("scale", scale, R * groups);
  check_floats("global_scale", global_scale, 1);
  Tensor y = huge(torch::stable::new_empty(data, {R, C}, dtype));
  float map[256];  // values of a block's codes
  const float total = in<float>(global_scale)[0];
  for (int k = 0; k < 256; ++k) map[k] = from_e4m3(uint8_t(k)) * total;
  dispatch(y, [&](auto element) {
    using T = decltype(element);
    const uint8_t *const from = in<uint8_t>(data), *const scales = in<uint8_t>(scale);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, R, grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (!noise) {
          nvfp4_row(from + r * bytes, scales + r * groups, map, to + r * C, C);
          continue;
        }
        float value[PIECE], size[PIECE], room[noise_room(PIECE)];
        for (int64_t at = 0; at < C; at += PIECE) {
          const int64_t m = std::min(PIECE, C - at);
          const uint8_t* const own = scales + r * groups + at / GROUP;
          nvfp4_row(from + r * bytes + at / 2, own, map, value, m);
          for (int64_t g = 0; g < ceil_div(m, GROUP); ++g)
            std::fill_n(size + g * GROUP, GROUP, 0.5f * noise.alpha * map[own[g]]);
          const float* const normal = normals(noise, uint64_t(r * C + at), m, room);
          TW_SIMD
          for (int64_t i = 0; i < m; ++i) store(to + r * C + at + i, std::fmaf(normal[i], size[i], value[i]));
        }
      }
    });
  });
  return y;
}

// ---- block-scaled FP8, and MXFP8, whose scales are bytes

void check_tile(int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(rows >= 1 && columns >= 1, "tilewright: a block must have rows and columns");
}

// x [matrices, R, C] and, if requested, the transposes.   S: type of the scales.
template <class S>
std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_codes(const Tensor& x, int64_t rows, int64_t columns,
                                                         std::optional<int64_t> seed, bool transpose) {
  check_matrices("x", x);
  check_tile(rows, columns);
  const int64_t B = x.size(0), R = x.size(1), C = x.size(2);
  const int64_t own_bands = ceil_div(R, rows), own_across = ceil_div(C, columns);
  const int64_t turned_bands = ceil_div(C, rows), turned_across = ceil_div(R, columns);
  Tensor data = torch::stable::new_empty(x, {B, R, C}, ScalarType::Byte);
  Tensor inverse = torch::stable::new_empty(x, {B, own_bands, own_across}, scales_type<S>());
  Tensor data_t, inverse_t;
  if (transpose) {
    data_t = torch::stable::new_empty(x, {B, C, R}, ScalarType::Byte);
    inverse_t = torch::stable::new_empty(x, {B, turned_bands, turned_across}, scales_type<S>());
  }
  const uint64_t key = uint64_t(seed.value_or(0));
  // Rows of a band with whole blocks both ways, or all rows.
  const int64_t long_side = std::max(rows, columns), short_side = std::min(rows, columns);
  const int64_t height = !transpose ? rows : long_side % short_side == 0 ? long_side : std::max(R, int64_t(1));
  const int64_t bands = ceil_div(R, height), wide = rows * std::max(int64_t(1), 64 / rows);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    uint8_t *const to = out<uint8_t>(data), *const to_t = transpose ? out<uint8_t>(data_t) : nullptr;
    S *const scales = out<S>(inverse), *const scales_t = transpose ? out<S>(inverse_t) : nullptr;
    with_random(seed.has_value(), [&](auto random_bits) {
      constexpr bool RANDOM = decltype(random_bits)::value;
      torch::stable::parallel_for(0, B * bands, grain(height * C), [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> words;
        std::vector<float> tile(size_t(transpose ? wide * columns : 0));
        for (int64_t band = begin; band < end; ++band) {
          const int64_t b = band / bands, low = band % bands * height, high = std::min(R, low + height);
          for (int64_t r = low; r < high; r += rows) {
            for (int64_t c = 0; c < C; c += columns) {
              const int64_t at = (b * R + r) * C + c;
              scales[(b * own_bands + r / rows) * own_across + c / columns] =
                  fp8_block<RANDOM, S>(from + at, C, std::min(rows, high - r), std::min(columns, C - c), key, uint64_t(at),
                                    uint64_t(C), words, to + at, C);
            }
          }
          for (int64_t r = low; transpose && r < high; r += columns) {
            const int64_t n = std::min(columns, high - r);
            for (int64_t c = 0; c < C; c += wide) {
              const int64_t last = std::min(C, c + wide);
              turn(from + (b * R + r) * C + c, C, n, last - c, tile.data(), columns);
              for (int64_t j = c; j < last; j += rows) {
                const int64_t at = (b * C + j) * R + r;
                scales_t[(b * turned_bands + j / rows) * turned_across + r / columns] =
                    fp8_block<RANDOM, S>(tile.data() + (j - c) * columns, columns, std::min(rows, last - j), n, key,
                                      uint64_t(at), uint64_t(R), words, to_t + at, R);
              }
            }
          }
        }
      });
    });
  });
  return {data, inverse, data_t, inverse_t};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_quantize(Tensor x, int64_t rows, int64_t columns, bool mx,
                                                        std::optional<int64_t> seed, bool transpose) {
  return with_scales(mx, [&](auto scale) { return fp8_codes<decltype(scale)>(x, rows, columns, seed, transpose); });
}

template <class S>
Tensor fp8_values(const Tensor& data, const Tensor& inverse, int64_t rows, int64_t columns, ScalarType dtype,
                  const Noise& noise) {
  check_matrices("data", data);
  check_tile(rows, columns);
  const int64_t B = data.size(0), R = data.size(1), C = data.size(2);
  const int64_t bands = ceil_div(R, rows), across = ceil_div(C, columns);
  check_bytes("data", data, B * R * C);
  check_scales<S>("inverse", inverse, B * bands * across);
  Tensor y = huge(torch::stable::new_empty(data, data.sizes(), dtype));
  dispatch(y, [&](auto element) {
    using T = decltype(element);
    const uint8_t* const from = in<uint8_t>(data);
    const S* const scales = in<S>(inverse);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, B * R, grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const S* const own = scales + (r / R * bands + r % R / rows) * across;
        for (int64_t b = 0; b < across; ++b) {
          const int64_t at = b * columns, n = std::min(columns, C - at);
          const uint8_t* const codes = from + r * C + at;
          T* const values = to + r * C + at;
          const float scale = fp8_inverse(own[b]);
          if (!noise) {
            TW_SIMD
            for (int64_t i = 0; i < n; ++i) store(values + i, from_e4m3(codes[i]) * scale);
            continue;
          }
          const float size = 0.125f * noise.alpha * scale;
          float room[noise_room(PIECE)];
          for (int64_t first = 0; first < n; first += PIECE) {
            const int64_t m = std::min(PIECE, n - first);
            const float* const normal = normals(noise, uint64_t(r * C + at + first), m, room);
            TW_SIMD
            for (int64_t i = 0; i < m; ++i)
              store(values + first + i, std::fmaf(normal[i], size, from_e4m3(codes[first + i]) * scale));
          }
        }
      }
    });
  });
  return y;
}

Tensor fp8_dequantize(Tensor data, Tensor inverse, int64_t rows, int64_t columns, ScalarType dtype, double alpha,
                      int64_t seed, int64_t step, int64_t layer) {
  const Noise noise = noise_of(alpha, seed, step, layer);
  return with_scales(inverse.scalar_type() == ScalarType::Byte, [&](auto scale) {
    return fp8_values<decltype(scale)>(data, inverse, rows, columns, dtype, noise);
  });
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("nf4_cpp_quantize(Tensor x, int block) -> (Tensor, Tensor)");
  m.def("nf4_cpp_dequantize(Tensor data, Tensor absmax, Tensor? nested_absmax, Tensor? table, Tensor? offset, int n, "
        "int block, ScalarType dtype, float alpha, SymInt seed, SymInt step, SymInt layer) -> Tensor");
  m.def("nvfp4_cpp_quantize(Tensor x, Tensor global_scale, bool square, SymInt? seed, int hadamard, SymInt? hadamard_seed, "
        "bool transpose) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("nvfp4_cpp_largest(Tensor x, int hadamard, SymInt? hadamard_seed) -> Tensor");
  m.def("nvfp4_cpp_dequantize(Tensor data, Tensor scale, Tensor global_scale, int columns, ScalarType dtype, "
        "float alpha, SymInt seed, SymInt step, SymInt layer) -> Tensor");
  m.def("fp8_cpp_quantize(Tensor x, int rows, int columns, bool mx, SymInt? seed, bool transpose) -> "
        "(Tensor, Tensor, Tensor, Tensor)");
  m.def("fp8_cpp_dequantize(Tensor data, Tensor scale, int rows, int columns, ScalarType dtype, float alpha, "
        "SymInt seed, SymInt step, SymInt layer) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("nf4_cpp_quantize", TORCH_BOX(&tw::nf4_quantize));
  m.impl("nf4_cpp_dequantize", TORCH_BOX(&tw::nf4_dequantize));
  m.impl("nvfp4_cpp_quantize", TORCH_BOX(&tw::nvfp4_quantize));
  m.impl("nvfp4_cpp_largest", TORCH_BOX(&tw::nvfp4_largest_transformed));
  m.impl("nvfp4_cpp_dequantize", TORCH_BOX(&tw::nvfp4_dequantize));
  m.impl("fp8_cpp_quantize", TORCH_BOX(&tw::fp8_quantize));
  m.impl("fp8_cpp_dequantize", TORCH_BOX(&tw::fp8_dequantize));
}
