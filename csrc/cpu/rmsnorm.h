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

// One function for all callers: inlined, or cloned for some arguments, it may be vectorized differently, and its sums
// would differ in the last bit.
template <class T, class R>
__attribute__((noinline, noclone)) void forward_rows(int64_t begin, int64_t end, const T* x, const R* residual, const float* w,
                            const float* bias, T* y, R* sum_out, float* rstd, Norm n) {
  const int64_t D = n.D;
  for (int64_t row = begin; row < end; ++row) {
    const T* xr = x + row * D;
    const float* wr = w + (row % n.H) * D;
    T* yr = y + row * D;
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
    const float s = float(1.0 / std::sqrt(total / double(D) + n.eps));
    rstd[row] = s;
    const R* src = residual == nullptr ? reinterpret_cast<const R*>(xr) : sum_out + row * D;
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
