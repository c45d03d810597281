// Checks of tensors that go with x, row by row.
#pragma once

#include "cpu/common.h"

namespace tw {

// The loops trust sizes and element types, so every operator checks all of its tensors against x first.
inline void check_like_x(const char* name, const Tensor& t, const Tensor& x, bool same_type) {
  check_row_major(name, t);
  bool same = t.dim() == x.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = t.size(d) == x.size(d);
  STD_TORCH_CHECK(same, "tilewright: ", name, " must have x's shape");
  STD_TORCH_CHECK(!same_type || t.scalar_type() == x.scalar_type(), "tilewright: ", name, " must have x's dtype");
}

// `wide` may be float where `narrow` is bfloat16: a residual stream is often float.
inline void check_wider(const char* name, const Tensor& wide, const Tensor& narrow) {
  STD_TORCH_CHECK(wide.scalar_type() == narrow.scalar_type() || wide.scalar_type() == ScalarType::Float,
                  "tilewright: ", name, " must be float32 or of one dtype with what it goes with");
}

}  // namespace tw
