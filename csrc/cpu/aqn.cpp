// Adaptive quantization noise alone. The definition is tilewright/ops/quant/aqn.py.
#include <algorithm>

#include "cpu/aqn.h"

namespace tw {
namespace {

constexpr int64_t PIECE = 1024;

// alpha is not used.
Tensor aqn_noise(Tensor like, int64_t first, int64_t n, double alpha, int64_t seed, int64_t step, int64_t layer,
                 ScalarType dtype) {
  STD_TORCH_CHECK(first >= 0 && n >= 0, "tilewright: first and n must be >= 0, got ", first, " and ", n);
  const Noise noise = noise_of(1, seed, step, layer);
  Tensor y = huge(torch::stable::new_empty(like, {n}, dtype));
  dispatch(y, [&](auto element) {
    using T = decltype(element);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, (n + PIECE - 1) / PIECE, grain(PIECE), [&](int64_t begin, int64_t end) {
      float room[noise_room(PIECE)];
      for (int64_t p = begin; p < end; ++p) {
        const int64_t at = p * PIECE, m = std::min(PIECE, n - at);
        const float* const v = normals(noise, uint64_t(first) + uint64_t(at), m, room);
        TW_SIMD
        for (int64_t i = 0; i < m; ++i) store(to + at + i, v[i]);
      }
    });
  });
  return y;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("aqn_cpp_noise(Tensor like, int first, int n, float alpha, SymInt seed, SymInt step, SymInt layer, "
        "ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("aqn_cpp_noise", TORCH_BOX(&tw::aqn_noise)); }
