// silu(gate) * up and gelu(gate) * up on the CPU. The definition is tilewright/ops/activation/activation.py.
//
// gate and up are read as [rows, I] with their own row strides, so that the halves of a packed [rows, 2I] tensor need no
// copy; the backward writes into halves of a packed gradient the same way.
#include <algorithm>

#include "cpu/common.h"

namespace tw {
namespace {

enum Kind { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

// The normal distribution's Phi(x) and density phi(x). With z = |x| and t = 1 / (1 + 0.345 z),
//   Phi(-z) = exp(-z^2 / 2) t Q(t),
// where exp(z^2 / 2) Phi(-z) is a smooth function (Mills' ratio over sqrt(2 pi)), and Q is the degree-8 polynomial of
// least relative error (2.3e-8 for z up to 14.5, fitted by reweighted least squares in 40 digits). Since the tail is a
// product, it keeps its digits, where 1 + erf(x / sqrt 2) would cancel: evaluated in float the relative error is below
// 3.2e-7 down to the smallest normal number. z^2 / 2 is up to 100, so that its rounding would be a relative error of
// 4e-6 in the exponential: fma recovers the rounding error of the product, which is added back to first order.
TW_INLINE void normal(float x, float& cdf, float& density) {
  float z = std::fabs(x);
  z = z > 15.0f ? 15.0f : z;  // both are 0 there, and the square of a larger z could overflow
  const float square = z * z, lost = std::fmaf(z, z, -square);
  const float e = exp_(-0.5f * square) * (1.0f - 0.5f * lost);
  const float t = 1.0f / std::fmaf(z, 0.345f, 1.0f);
  float q = -0.0281518623f;
  q = std::fmaf(q, t, 0.144233868f);
  q = std::fmaf(q, t, -0.269154072f);
  q = std::fmaf(q, t, 0.185055152f);
  q = std::fmaf(q, t, -0.0362382308f);
  q = std::fmaf(q, t, 0.111267827f);
  q = std::fmaf(q, t, 0.11736197f);
  q = std::fmaf(q, t, 0.138005242f);
  q = std::fmaf(q, t, 0.137620106f);
  const float tail = e * t * q;
  cdf = x < 0 ? tail : 1.0f - tail;
  density = 0.3989422804014327f * e;
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
    float z = g > 20.0f ? 20.0f : g;  // s or q is 0 from 12 on, and 0 times an overflowing cube would be NaN
    z = z < -20.0f ? -20.0f : z;
    float s, q;
    sigmoid_pair(2.0f * c * (z + k * z * z * z), s, q);
    a = g * s;
    da = s * (1.0f + z * q * 2.0f * c * (1.0f + 3.0f * k * z * z));
  } else {
    float cdf, density;
    normal(g, cdf, density);
    a = g * cdf;
    da = cdf + g * density;
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

// [..., I] as a matrix of rows: a view if the last dimension is contiguous and the leading ones merge, else a copy.
Tensor as_rows(const Tensor& t) {
  const int64_t I = t.size(t.dim() - 1);
  const Tensor rows = t.dim() == 2 ? t : torch::stable::reshape(t, {t.numel() / std::max<int64_t>(1, I), I});
  return I <= 1 || rows.stride(1) == 1 ? rows : torch::stable::contiguous(rows);
}

std::vector<int64_t> shape_of(const Tensor& gate, int64_t columns) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < gate.dim(); ++d) shape.push_back(gate.size(d));
  shape.push_back(columns);
  return shape;
}

// The loops trust sizes and element types.
void check(const char* name, const Tensor& t, const Tensor& gate, int64_t columns) {
  bool same = t.is_cpu() && t.dim() == gate.dim() && t.scalar_type() == gate.scalar_type();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == (d + 1 < t.dim() ? gate.size(d) : columns);
  STD_TORCH_CHECK(same, "tilewright: ", name, " must be a CPU tensor of gate's dtype, with ", columns,
                  " columns and gate's other sizes");
}

// gate and up, which may be the halves of one matrix: up is columns `first` and on of its own.
struct Inputs {
  Tensor gate, up;
  int64_t rows, columns, first;
};

Inputs inputs(const Tensor& gate, const std::optional<Tensor>& up, int64_t kind) {
  STD_TORCH_CHECK(kind == SILU || kind == GELU_TANH || kind == GELU_ERF, "tilewright: kind must be 0, 1 or 2, got ",
                  kind);
  STD_TORCH_CHECK(gate.is_cpu() && gate.dim() > 0, "tilewright: gate must be a CPU tensor with a dimension");
  const int64_t width = gate.size(gate.dim() - 1);
  STD_TORCH_CHECK(up.has_value() || width % 2 == 0, "tilewright: a packed gate must have an even last dimension");
  const Tensor g = as_rows(gate);
  if (!up.has_value()) return {g, g, g.size(0), width / 2, width / 2};
  check("up", *up, gate, width);
  return {g, as_rows(*up), g.size(0), width, 0};
}

// Calls f(row, first column, columns) for every row in pieces of at most PIECE columns, in parallel.
constexpr int64_t PIECE = 8192;

template <class F>
void for_pieces(int64_t rows, int64_t columns, F&& f) {
  const int64_t pieces = (columns + PIECE - 1) / PIECE;
  torch::stable::parallel_for(0, rows * pieces, grain(std::min(columns, PIECE)), [&](int64_t lo, int64_t hi) {
    for (int64_t p = lo; p < hi; ++p) {
      const int64_t first = p % pieces * PIECE;
      f(p / pieces, first, std::min(PIECE, columns - first));
    }
  });
}

// The address of element (row, column); data pointers are fetched once, not per row.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  T* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};
template <class T>
Rows<const T> read(const Tensor& t, int64_t first = 0) { return {in<T>(t) + first, t.stride(0)}; }

Tensor act_mul(Tensor gate, std::optional<Tensor> up, int64_t kind) {
  const Inputs n = inputs(gate, up, kind);
  Tensor y = huge(torch::stable::new_empty(gate, shape_of(gate, n.columns)));
  dispatch(gate, [&](auto e) {
    using T = decltype(e);
    const auto g = read<T>(n.gate), u = read<T>(n.up, n.first);
    const Rows<T> to{out<T>(y), n.columns};
    with_kind(kind, [&](auto k) {
      for_pieces(n.rows, n.columns, [&](int64_t r, int64_t c, int64_t count) {
        forward_row<k.value, T>(g.at(r, c), u.at(r, c), to.at(r, c), count);
      });
    });
  });
  return y;
}

// The gradient of a packed gate is packed, too.
std::tuple<Tensor, Tensor> act_mul_backward(Tensor dy, Tensor gate, std::optional<Tensor> up, int64_t kind) {
  const Inputs n = inputs(gate, up, kind);
  check("dy", dy, gate, n.columns);
  const Tensor d_rows = as_rows(dy);
  const int64_t width = gate.size(gate.dim() - 1);
  Tensor dgate = huge(torch::stable::new_empty(gate, shape_of(gate, width)));
  Tensor dup = up.has_value() ? huge(torch::stable::new_empty(gate, shape_of(gate, width))) : dgate;
  dispatch(gate, [&](auto e) {
    using T = decltype(e);
    const auto d = read<T>(d_rows), g = read<T>(n.gate), u = read<T>(n.up, n.first);
    const Rows<T> dg{out<T>(dgate), width}, du{out<T>(dup) + n.first, width};
    with_kind(kind, [&](auto k) {
      for_pieces(n.rows, n.columns, [&](int64_t r, int64_t c, int64_t count) {
        backward_row<k.value, T>(d.at(r, c), g.at(r, c), u.at(r, c), dg.at(r, c), du.at(r, c), count);
      });
    });
  });
  return {dgate, up.has_value() ? dup : Tensor()};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("act_mul_cpp(Tensor gate, Tensor? up, int kind) -> Tensor");
  m.def("act_mul_cpp_backward(Tensor dy, Tensor gate, Tensor? up, int kind) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("act_mul_cpp", TORCH_BOX(&tw::act_mul));
  m.impl("act_mul_cpp_backward", TORCH_BOX(&tw::act_mul_backward));
}
