// Rotary position embedding on the CPU. The definition is tilewright/ops/rope/rope.py.
//
// q and k are [B, H, S, D] with any strides but a contiguous last dimension; the output may be the input. The tables are
// [P, R / 2] float; `positions` [B, S] picks their rows (none: row s). sign -1 is the inverse rotation: the backward.
#include <algorithm>

#include "cpu/rope.h"

namespace tw {
namespace {

// `like`: same shape and element type.
void check(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 4 && (t.numel() == 0 || t.size(3) == 1 || t.stride(3) == 1),
                  "tilewright: ", name, " must be a 4-D CPU tensor with a contiguous last dimension");
  bool same = t.scalar_type() == like.scalar_type();
  for (int64_t d = 0; same && d < 4; ++d) same = t.size(d) == like.size(d);
  STD_TORCH_CHECK(same, "tilewright: ", name, " must have the shape and dtype of what it goes with");
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

void rope_rotate(Tensor q, std::optional<Tensor> k, Tensor q_out, std::optional<Tensor> k_out, Tensor cos, Tensor sin,
                 std::optional<Tensor> positions, bool interleaved, bool inverse) {
  check("q", q, q);
  check("q_out", q_out, q);
  check_tables(q.size(0), q.size(2), q.size(3), cos, sin, positions);
  const float sign = inverse ? -1.0f : 1.0f;
  if (k.has_value()) {
    STD_TORCH_CHECK(k_out.has_value(), "tilewright: k needs k_out");
    check("k", *k, *k);
    check("k_out", *k_out, *k);
    STD_TORCH_CHECK(k->size(0) == q.size(0) && k->size(2) == q.size(2) && 2 * cos.size(1) <= k->size(3),
                    "tilewright: k must have q's batch, sequence and head width");
  }
  rotate(q, huge(q_out), cos, sin, positions, interleaved, sign);
  if (k.has_value()) {
    rotate(*k, huge(*k_out), cos, sin, positions, interleaved, sign);
  }
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("rope_cpp_rotate(Tensor q, Tensor? k, Tensor(a!) q_out, Tensor(b!)? k_out, Tensor cos, Tensor sin,"
        " Tensor? positions, bool interleaved, bool inverse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("rope_cpp_rotate", TORCH_BOX(&tw::rope_rotate));
}
