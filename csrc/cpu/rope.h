// The rotation of one head, and the checks of its tables, for the op and for the one that first normalizes heads. The
// definition is tilewright/ops/rope/rope.py.
#pragma once

#include "cpu/common.h"

namespace tw {

// sign -1 is the inverse rotation: the backward. y may be x.
template <class X, class Y>
TW_INLINE void rotate_half_split(const X* x, Y* y, const float* c, const float* s, int64_t half, float sign) {
  TW_SIMD
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(x[i]), b = load(x[half + i]), si = sign * s[i];
    store(y + i, a * c[i] - b * si);
    store(y + half + i, b * c[i] + a * si);
  }
}

template <class X, class Y>
TW_INLINE void rotate_interleaved(const X* x, Y* y, const float* c, const float* s, int64_t half, float sign) {
  TW_SIMD
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(x[2 * i]), b = load(x[2 * i + 1]), si = sign * s[i];
    store(y + 2 * i, a * c[i] - b * si);
    store(y + 2 * i + 1, b * c[i] + a * si);
  }
}

// x, or a copy if its last dimension is not contiguous.
inline Tensor last_contiguous(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) == 1 ? x : torch::stable::contiguous(x);
}

// Checked before anything is written, and outside the parallel loop, which would replace the message.
inline void check_tables(int64_t B, int64_t S, int64_t D, const Tensor& cos, const Tensor& sin,
                         const std::optional<Tensor>& positions) {
  for (const Tensor& t : {cos, sin}) {
    check_row_major("cos and sin", t);
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 2 && t.size(0) == cos.size(0) &&
                        t.size(1) == cos.size(1) && 2 * t.size(1) <= D,
                    "tilewright: cos and sin must be float [P, R / 2]");
  }
  const int64_t P = cos.size(0);
  if (!positions.has_value()) {
    STD_TORCH_CHECK(S <= P, "S is ", S, ": position ", P, " is outside the tables, which have rows 0 to ",
                    P - 1);
    return;
  }
  check_row_major("positions", *positions);
  STD_TORCH_CHECK(positions->scalar_type() == ScalarType::Long && positions->numel() == B * S,
                  "tilewright: positions must be int64 [B, S]");
  const int64_t* pos = in<int64_t>(*positions);
  for (int64_t t = 0; t < B * S; ++t)
    STD_TORCH_CHECK(pos[t] >= 0 && pos[t] < P, "position_ids[", t / S, ", ", t % S, "] = ", pos[t],
                    " is outside the tables, which have rows 0 to ", P - 1);
}

}  // namespace tw
