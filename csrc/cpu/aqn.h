// Adaptive quantization noise on the CPU: normal values, for other kernels to add. The definition is
// tilewright/ops/quant/aqn.py; the arithmetic is that of tilewright/kernels/quant/aqn_triton.py, which explains it.
#pragma once

#include "cpu/quantize.h"

namespace tw {

struct Noise {
  float alpha;
  uint64_t seed;
  uint32_t step, layer;
  explicit operator bool() const { return alpha != 0; }
};

inline Noise noise_of(double alpha, int64_t seed, int64_t step, int64_t layer) {
  STD_TORCH_CHECK(seed >= 0 && step >= 0 && step < (int64_t(1) << 31) && layer >= 0 && layer < (int64_t(1) << 32),
                  "tilewright: seed must be >= 0, step 0 to 2^31 - 1 and layer 0 to 2^32 - 1, got ", seed, ", ", step,
                  " and ", layer);
  return {float(alpha), uint64_t(seed), uint32_t(step), uint32_t(layer)};
}

// sqrt(-2 ln u) of u = ((w >> 8) + 0.5) / 2^24.
TW_INLINE float normal_radius(uint32_t w) {
  const int32_t k = int32_t(w >> 7 | 1), e = (bits<int32_t>(float(k)) - 0x3F3504F3) >> 23;
  const float t = float(k - (1 << e)) * bits<float>((127 - e) << 23);
  float p = std::fmaf(0.15246158838272095f, t, -0.2581107020378113f);
  p = std::fmaf(p, t, 0.26485979557037354f);
  p = std::fmaf(p, t, -0.2836326062679291f);
  p = std::fmaf(p, t, 0.33218109607696533f);
  p = std::fmaf(p, t, -0.4000397026538849f);
  p = std::fmaf(p, t, 0.5000317096710205f);
  p = std::fmaf(p, t, -0.6666665077209473f);
  p = std::fmaf(p, t, 0.9999997615814209f);
  p = std::fmaf(p, t, -2.0f);
  return std::sqrt(std::fmaf(float(25 - e), 1.3862943649291992f, p * t));
}

// cos and sin of 2 pi u.
TW_INLINE void normal_turn(uint32_t w, float& cos, float& sin) {
  const int32_t k = int32_t(w >> 7 | 1), q = (k + 0x400000) >> 23;
  const float z = float(k - (q << 23)) * 0x1p-22f, y = z * z;
  float s = std::fmaf(-3.59504520019982e-05f, y, 0.00249000103212893f);
  s = std::fmaf(s, y, -0.08074543625116348f);
  s = z * std::fmaf(s, y, 0.7853981852531433f);
  float c = std::fmaf(3.5303378354001325e-06f, y, -0.0003259400837123394f);
  c = std::fmaf(c, y, 0.015854327008128166f);
  c = std::fmaf(c, y, -0.3084251284599304f);
  c = std::fmaf(c, y, 1.0f);
  const bool odd = q & 1;
  const float a = odd ? s : c, b = odd ? c : s;
  cos = (q + 1) & 2 ? -a : a;
  sin = q & 2 ? -b : b;
}

// Size of the buffer that `normals` needs for n elements.
constexpr int64_t noise_room(int64_t n) { return n + 6; }

// Normal values of elements first to first + n - 1. Returns their start in `room`.
inline const float* normals(const Noise& noise, uint64_t first, int64_t n, float* room) {
  const uint64_t block = first >> 2;
  const int64_t blocks = int64_t(((first + uint64_t(n) + 3) >> 2) - block);
  const uint64_t seed = noise.seed;
  const uint32_t layer = noise.layer, step = noise.step | 0x80000000u;
  TW_SIMD
  for (int64_t b = 0; b < blocks; ++b) {
    uint32_t c0, c1, c2 = layer, c3 = step;
    philox_block(seed, block + uint64_t(b), c0, c1, c2, c3);
    float x, y, u, v;
    normal_turn(c1, x, y);
    normal_turn(c3, u, v);
    const float r = normal_radius(c0), s = normal_radius(c2);
    room[4 * b] = r * x;
    room[4 * b + 1] = r * y;
    room[4 * b + 2] = s * u;
    room[4 * b + 3] = s * v;
  }
  return room + (first & 3);
}

}  // namespace tw
