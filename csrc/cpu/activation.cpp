// silu(gate) * up and gelu(gate) * up on the CPU. The definition is tilewright/ops/activation.py.
//
// gate and up are [rows, I] with a row stride each, so that the halves of a packed [rows, 2I] tensor need no copy; the
// backward writes into halves of a packed gradient the same way.
#include <algorithm>

#include "cpu/common.h"

namespace tw {
namespace {

enum Kind { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

// Phi(x) = erfc(-x / sqrt 2) / 2, with erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z / 2) for z >= 0: the Chebyshev fit of
// Numerical Recipes (erfcc), relative error below 1.2e-7 everywhere, so the negative tail keeps its digits.
TW_INLINE float normal_cdf(float x) {
  const float z = std::fabs(x) * 0.70710678118654752f;
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = std::fmaf(p, t, -0.82215223f);
  p = std::fmaf(p, t, 1.48851587f);
  p = std::fmaf(p, t, -1.13520398f);
  p = std::fmaf(p, t, 0.27886807f);
  p = std::fmaf(p, t, -0.18628806f);
  p = std::fmaf(p, t, 0.09678418f);
  p = std::fmaf(p, t, 0.37409196f);
  p = std::fmaf(p, t, 1.00002368f);
  p = std::fmaf(p, t, -1.26551223f);
  const float tail = 0.5f * t * exp_(p - 0.5f * x * x);
  return x < 0 ? tail : 1.0f - tail;
}

// act(g), and its derivative.
template <int K>
TW_INLINE void activate(float g, float& a, float& da) {
  if (K == SILU) {
    float s, q;
    sigmoid_pair(g, s, q);
    a = g * s;
    da = s * (1.0f + g * q);
  } else if (K == GELU_TANH) {
    const float c = 0.7978845608028654f, k = 0.044715f;
    // (1 + tanh u) / 2 = sigmoid(2 u), which loses no digits in the negative tail.
    float s, q;
    sigmoid_pair(2.0f * c * (g + k * g * g * g), s, q);
    a = g * s;
    da = s * (1.0f + g * q * 2.0f * c * (1.0f + 3.0f * k * g * g));
  } else {
    const float cdf = normal_cdf(g);
    a = g * cdf;
    da = cdf + g * 0.3989422804014327f * exp_(-0.5f * g * g);
  }
}

template <int K, class T>
void forward_row(const T* g, const T* u, T* y, int64_t n) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float a, da;
    activate<K>(load(g[i]), a, da);
    store(y + i, a * load(u[i]));
  }
}

template <int K, class T>
void backward_row(const T* dy, const T* g, const T* u, T* dg, T* du, int64_t n) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float a, da;
    const float d = load(dy[i]);
    activate<K>(load(g[i]), a, da);
    store(dg + i, d * load(u[i]) * da);
    store(du + i, d * a);
  }
}

template <class F>
void with_kind(int64_t kind, F&& f) {
  if (kind == SILU) return f(std::integral_constant<int, SILU>{});
  if (kind == GELU_TANH) return f(std::integral_constant<int, GELU_TANH>{});
  return f(std::integral_constant<int, GELU_ERF>{});
}

void check(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2 && (t.numel() == 0 || t.size(1) == 1 || t.stride(1) == 1),
                  "tilewright: gate and up must be CPU matrices with contiguous rows");
}

Tensor act_mul_forward(Tensor gate, Tensor up, int64_t kind) {
  check(gate);
  check(up);
  const int64_t rows = gate.size(0), n = gate.size(1), sg = gate.stride(0), su = up.stride(0);
  Tensor y = torch::stable::new_empty(gate, {rows, n});
  dispatch(gate, [&](auto e) {
    using T = decltype(e);
    with_kind(kind, [&](auto k) {
      torch::stable::parallel_for(0, rows, grain(n), [&](int64_t lo, int64_t hi) {
        for (int64_t r = lo; r < hi; ++r)
          forward_row<k.value, T>(in<T>(gate) + r * sg, in<T>(up) + r * su, out<T>(y) + r * n, n);
      });
    });
  });
  return y;
}

// Writes dgate and dup, which may be the halves of one tensor.
void act_mul_backward(Tensor dy, Tensor gate, Tensor up, Tensor dgate, Tensor dup, int64_t kind) {
  for (const Tensor& t : {dy, gate, up, dgate, dup}) check(t);
  const int64_t rows = gate.size(0), n = gate.size(1);
  dispatch(gate, [&](auto e) {
    using T = decltype(e);
    with_kind(kind, [&](auto k) {
      torch::stable::parallel_for(0, rows, grain(n), [&](int64_t lo, int64_t hi) {
        for (int64_t r = lo; r < hi; ++r)
          backward_row<k.value, T>(in<T>(dy) + r * dy.stride(0), in<T>(gate) + r * gate.stride(0),
                                   in<T>(up) + r * up.stride(0), out<T>(dgate) + r * dgate.stride(0),
                                   out<T>(dup) + r * dup.stride(0), n);
      });
    });
  });
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("act_mul_cpp_forward(Tensor gate, Tensor up, int kind) -> Tensor");
  m.def("act_mul_cpp_backward(Tensor dy, Tensor gate, Tensor up, Tensor(a!) dgate, Tensor(b!) dup, int kind) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("act_mul_cpp_forward", TORCH_BOX(&tw::act_mul_forward));
  m.impl("act_mul_cpp_backward", TORCH_BOX(&tw::act_mul_backward));
}
