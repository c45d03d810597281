// The rows of RMSNorm, for the op and for the quantization that follows it. The definition is
// tilewright/ops/norm/rmsnorm.py.
#pragma once

#include <algorithm>

#include "cpu/column_sums.h"

namespace tw {

struct Norm {
  int64_t D, H;
  double eps;
  bool round_xhat;  // llama: the normalized row is rounded to x's dtype before the weight is applied
};

// Rows whose squares are summed before any is scaled, at most, and elements of x in them: short rows do not wait for
// each other's square root and division, and are still in the first-level cache when they are read again.
constexpr int64_t ROWS_AT_ONCE = 16, ELEMENTS_AT_ONCE = 4096;

// One function for all callers: inlined, or cloned for some arguments, it may be vectorized differently, and its sums
// would differ in the last bit.
template <class T, class R>
__attribute__((noinline, noclone)) void forward_rows(int64_t begin, int64_t end, const T* x, const R* residual, const float* w,
                            const float* bias, T* y, R* sum_out, float* rstd, Norm n) {
  const int64_t D = n.D, rows = std::clamp<int64_t>(ELEMENTS_AT_ONCE / std::max<int64_t>(D, 1), 1, ROWS_AT_ONCE);
  for (int64_t from = begin; from < end; from += rows) {
    const int64_t to = std::min(end, from + rows);
    double squares[ROWS_AT_ONCE];
    for (int64_t row = from; row < to; ++row) {
      const T* xr = x + row * D;
      double total = 0;
      for (int64_t first = 0; first < D; first += SUM_BLOCK) {
        const int64_t last = std::min(D, first + SUM_BLOCK);
        float ss = 0;
        if (residual == nullptr) {
          TW_SIMD_SUM(ss)
          for (int64_t i = first; i < last; ++i) ss += load(xr[i]) * load(xr[i]);
        } else {
          const R* rr = residual + row * D;
          R* sr = sum_out + row * D;
          TW_SIMD_SUM(ss)
          for (int64_t i = first; i < last; ++i) {
            float v = round_to(load(xr[i]) + load(rr[i]), rr);
            store(sr + i, v);
            ss += v * v;
          }
        }
        total += ss;
      }
      squares[row - from] = total;
    }
    float scales[ROWS_AT_ONCE];
    TW_SIMD
    for (int64_t i = 0; i < to - from; ++i) scales[i] = float(1.0 / std::sqrt(squares[i] / double(D) + n.eps));
    for (int64_t row = from; row < to; ++row) {
      const float s = rstd[row] = scales[row - from];
      const float* wr = n.H == 1 ? w : w + row % n.H * D;
      T* yr = y + row * D;
      const R* src = residual == nullptr ? reinterpret_cast<const R*>(x + row * D) : sum_out + row * D;
      if (n.round_xhat) {
        TW_SIMD
        for (int64_t i = 0; i < D; ++i) store(yr + i, round_to(load(src[i]) * s, yr) * wr[i]);
      } else {
        TW_SIMD
        for (int64_t i = 0; i < D; ++i) store(yr + i, load(src[i]) * s * wr[i]);
      }
      if (bias != nullptr) {  // rare, and then one more pass over a cached row
        for (int64_t i = 0; i < D; ++i) {
          float h = load(src[i]) * s;
          store(yr + i, (n.round_xhat ? round_to(h, yr) : h) * wr[i] + bias[i]);
        }
      }
    }
  }
}

inline Norm describe(const Tensor& x, const Tensor& weight, double eps, bool round_xhat) {
  check_row_major("x", x);
  STD_TORCH_CHECK(x.dim() >= 1, "tilewright: x must have at least one dimension");
  check_row_major("weight", weight);
  const int64_t last = x.dim() - 1, D = x.size(last);
  const bool per_head = weight.dim() == 2;
  STD_TORCH_CHECK(per_head ? last >= 1 && weight.size(0) == x.size(last - 1) && weight.size(1) == D
                           : weight.dim() == 1 && weight.size(0) == D,
                  "tilewright: weight must be [D], or [H, D] for x of shape [..., H, D]");
  return {D, per_head ? weight.size(0) : 1, eps, round_xhat};
}

}  // namespace tw
