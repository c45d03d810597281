// Rotary position embedding on the CPU. The definition is tilewright/ops/rope/rope.py.
//
// q and k are [B, H, S, D] with any strides; the kernel reads rows with a contiguous last dimension, and its output may
// be its input. The tables are [P, R / 2] float; `positions` [B, S] picks their rows (none: row s). sign -1 is the inverse rotation: the backward.
#include <algorithm>

#include "cpu/rope.h"

namespace tw {
namespace {

void check(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin,
           const std::optional<Tensor>& positions) {
  STD_TORCH_CHECK(q.is_cpu() && q.dim() == 4, "tilewright: q must be a 4-D CPU tensor");
  STD_TORCH_CHECK(!k.has_value() || (k->is_cpu() && k->dim() == 4 && k->scalar_type() == q.scalar_type() &&
                                     k->size(0) == q.size(0) && k->size(2) == q.size(2) && k->size(3) == q.size(3)),
                  "tilewright: k must have q's dtype, batch, sequence and head width");
  check_tables(q.size(0), q.size(2), q.size(3), cos, sin, positions);
}

void rotate(const Tensor& x, const Tensor& y, const Tensor& cos, const Tensor& sin,
            const std::optional<Tensor>& positions, bool interleaved, float sign) {
  const int64_t B = x.size(0), H = x.size(1), S = x.size(2), D = x.size(3), half = cos.size(1);
  const int64_t* pos = in<int64_t>(positions);
  const float *c = in<float>(cos), *s = in<float>(sin);
  const int64_t xs[3] = {x.stride(0), x.stride(1), x.stride(2)}, ys[3] = {y.stride(0), y.stride(1), y.stride(2)};
  dispatch(x, [&](auto e) {
    using T = decltype(e);
    const T* from = in<T>(x);
    T* to = out<T>(y);
    torch::stable::parallel_for(0, B * S, grain(H * D), [&](int64_t lo, int64_t hi) {
      for (int64_t t = lo; t < hi; ++t) {
        const int64_t b = t / S, i = t % S, p = pos != nullptr ? pos[t] : i;
        for (int64_t h = 0; h < H; ++h) {
          const T* xr = from + b * xs[0] + h * xs[1] + i * xs[2];
          T* yr = to + b * ys[0] + h * ys[1] + i * ys[2];
          if (interleaved)
            rotate_interleaved(xr, yr, c + p * half, s + p * half, half, sign);
          else
            rotate_half_split(xr, yr, c + p * half, s + p * half, half, sign);
          if (xr != yr) std::copy(xr + 2 * half, xr + D, yr + 2 * half);
        }
      }
    });
  });
}

std::tuple<Tensor, Tensor> rope(Tensor q, std::optional<Tensor> k, Tensor cos, Tensor sin,
                                std::optional<Tensor> positions, bool interleaved, bool inverse) {
  check(q, k, cos, sin, positions);
  auto rotated = [&](const Tensor& x) {
    const Tensor from = last_contiguous(x);
    Tensor y = huge(torch::stable::empty_like(from));
    rotate(from, y, cos, sin, positions, interleaved, inverse ? -1.0f : 1.0f);
    return y;
  };
  return {rotated(q), k.has_value() ? rotated(*k) : Tensor()};
}

// Over q and k.
void rope_(Tensor q, std::optional<Tensor> k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
           bool interleaved) {
  check(q, k, cos, sin, positions);
  for (const Tensor& x : {q, k.value_or(q)})
    STD_TORCH_CHECK(x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1,
                    "tilewright: what is overwritten must have a contiguous last dimension");
  rotate(q, q, cos, sin, positions, interleaved, 1.0f);
  if (k.has_value()) rotate(*k, *k, cos, sin, positions, interleaved, 1.0f);
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("rope_cpp(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse)"
        " -> (Tensor, Tensor)");
  m.def("rope_cpp_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("rope_cpp", TORCH_BOX(&tw::rope));
  m.impl("rope_cpp_", TORCH_BOX(&tw::rope_));
}
