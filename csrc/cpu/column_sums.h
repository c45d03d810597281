// Sums over rows, as for weight gradients, and weights in float. The additions are deterministic: see row_chunks.
#pragma once

#include <algorithm>

#include "cpu/common.h"

namespace tw {

// Rows per head that are summed in float, then in double. A float sum over the rows of a chunk would have more error
// than the twin from a few thousand rows on.
constexpr int64_t ROWS_A_SUM = 64;

inline void flush(std::vector<float>& part, double* total) {
  for (size_t i = 0; i < part.size(); ++i) total[i] += double(part[i]);
  std::fill(part.begin(), part.end(), 0.0f);
}

// Adds the chunks' sums [chunks, elements of result] in their order.
inline void add_chunks(const std::vector<double>& partial, const Tensor& result) {
  const size_t width = size_t(result.numel());
  dispatch(result, [&](auto e) {
    auto* p = out<decltype(e)>(result);
    for (size_t i = 0; i < width; ++i) {
      double total = 0;
      for (size_t k = i; k < partial.size(); k += width) total += partial[k];
      store(p + i, float(total));
    }
  });
}

inline std::vector<float> as_float(const Tensor& t, float offset) {
  std::vector<float> v(t.numel());
  dispatch(t, [&](auto e) {
    const auto* p = in<decltype(e)>(t);
    for (size_t i = 0; i < v.size(); ++i) v[i] = load(p[i]) + offset;
  });
  return v;
}

}  // namespace tw
