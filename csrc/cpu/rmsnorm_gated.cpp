// RMSNorm with a gate on the CPU. The definition is tilewright/ops/norm/rmsnorm_gated.py.
//
// Rows = all leading dimensions, D = the last one. A row's sums are in float over SUM_BLOCK columns and in double over
// the blocks; the weight gradient's in float over ROWS_A_SUM rows and in double beyond. The backward saves nothing: it
// reads a row three times, all but the first from cache.
#include <algorithm>

#include "cpu/column_sums.h"
#include "cpu/like.h"

namespace tw {
namespace {

// silu(g), and its derivative.
TW_INLINE void silu(float g, float& a, float& da) {
  float s, q;
  sigmoid_pair(g, s, q);
  a = g * s;
  da = s * (1.0f + g * q);
}

template <class T>
float reciprocal_root(const T* x, int64_t D, double eps) {
  double total = 0;
  for (int64_t first = 0; first < D; first += SUM_BLOCK) {
    const int64_t last = std::min(D, first + SUM_BLOCK);
    float ss = 0;
    TW_SIMD_SUM(ss)
    for (int64_t i = first; i < last; ++i) ss += load(x[i]) * load(x[i]);
    total += ss;
  }
  return float(1.0 / std::sqrt(total / double(D) + eps));
}

// P: what the product with the weight is rounded to.
template <class P, class T>
void forward_row(const T* x, const T* gate, const float* w, T* y, int64_t D, double eps) {
  const float s = reciprocal_root(x, D, eps);
  TW_SIMD
  for (int64_t i = 0; i < D; ++i) {
    float a, da;
    silu(load(gate[i]), a, da);
    const float h = round_to(load(x[i]) * s, y);
    store(y + i, round_to(w[i] * h, static_cast<const P*>(nullptr)) * a);
  }
}

// dw: the row's contribution is added.   dh: room for D numbers, the gradient of the normalized row.
template <class P, class T>
void backward_row(const T* dy, const T* x, const T* gate, const float* w, T* dx, T* dgate, float* dw, float* dh,
                  int64_t D, double eps) {
  const float s = reciprocal_root(x, D, eps);
  double total = 0;
  for (int64_t first = 0; first < D; first += SUM_BLOCK) {
    const int64_t last = std::min(D, first + SUM_BLOCK);
    float dot = 0;
    TW_SIMD_SUM(dot)
    for (int64_t i = first; i < last; ++i) {
      float a, da;
      silu(load(gate[i]), a, da);
      const float d = load(dy[i]), normalized = load(x[i]) * s, h = round_to(normalized, dy), dp = d * a;
      store(dgate + i, d * round_to(w[i] * h, static_cast<const P*>(nullptr)) * da);
      dw[i] += dp * h;
      dh[i] = dp * w[i];
      dot += dp * w[i] * normalized;
    }
    total += dot;
  }
  const float c = float(total * s / double(D));
  TW_SIMD
  for (int64_t i = 0; i < D; ++i) store(dx + i, s * (dh[i] - load(x[i]) * c));
}

int64_t columns(const Tensor& x, const Tensor& gate, const Tensor& weight) {
  check_row_major("x", x);
  STD_TORCH_CHECK(x.dim() >= 1, "tilewright: x must have at least one dimension");
  check_like_x("gate", gate, x, true);
  check_row_major("weight", weight);
  const int64_t D = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == D, "tilewright: weight must be [D]");
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Float || weight.scalar_type() == x.scalar_type(),
                  "tilewright: weight must be float32 or have x's dtype");
  return D;
}

Tensor rmsnorm_gated(Tensor x, Tensor gate, Tensor weight, double eps) {
  const int64_t D = columns(x, gate, weight), rows = D > 0 ? x.numel() / D : 0;
  const auto w = as_float(weight, 0);
  Tensor y = huge(torch::stable::empty_like(x));
  dispatch(x, [&](auto t) {
    dispatch(weight, [&](auto p) {
      using T = decltype(t);
      using P = decltype(p);
      const T *const from = in<T>(x), *const by = in<T>(gate);
      T* const to = out<T>(y);
      torch::stable::parallel_for(0, rows, grain(D), [&](int64_t lo, int64_t hi) {
        for (int64_t r = lo; r < hi; ++r) forward_row<P>(from + r * D, by + r * D, w.data(), to + r * D, D, eps);
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> rmsnorm_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor weight, double eps) {
  const int64_t D = columns(x, gate, weight), rows = D > 0 ? x.numel() / D : 0;
  check_like_x("dy", dy, x, true);
  const auto w = as_float(weight, 0);
  const int64_t chunks = row_chunks(rows), per = (rows + chunks - 1) / chunks;
  std::vector<double> dw(chunks * D, 0.0);
  Tensor dx = huge(torch::stable::empty_like(x)), dgate = huge(torch::stable::empty_like(x));
  Tensor dweight = torch::stable::empty_like(weight);
  dispatch(x, [&](auto t) {
    dispatch(weight, [&](auto p) {
      using T = decltype(t);
      using P = decltype(p);
      const T *const of_y = in<T>(dy), *const from = in<T>(x), *const by = in<T>(gate);
      T *const to_x = out<T>(dx), *const to_gate = out<T>(dgate);
      torch::stable::parallel_for(0, chunks, rows * D < 32768 ? chunks : 1, [&](int64_t lo, int64_t hi) {
        std::vector<float> part(D, 0.0f), dh(D);
        for (int64_t k = lo; k < hi; ++k) {
          const int64_t end = std::min(rows, (k + 1) * per);
          for (int64_t first = k * per; first < end; first += ROWS_A_SUM) {
            for (int64_t r = first; r < std::min(end, first + ROWS_A_SUM); ++r) {
              const int64_t at = r * D;
              backward_row<P>(of_y + at, from + at, by + at, w.data(), to_x + at, to_gate + at, part.data(), dh.data(),
                              D, eps);
            }
            flush(part, dw.data() + k * D);
          }
        }
      });
    });
  });
  add_chunks(dw, dweight);
  return {dx, dgate, dweight};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("rmsnorm_gated_cpp(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor");
  m.def("rmsnorm_gated_cpp_backward(Tensor dy, Tensor x, Tensor gate, Tensor weight, float eps)"
        " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("rmsnorm_gated_cpp", TORCH_BOX(&tw::rmsnorm_gated));
  m.impl("rmsnorm_gated_cpp_backward", TORCH_BOX(&tw::rmsnorm_gated_backward));
}
