// RMSNorm and add + RMSNorm on the CPU. The definition is tilewright/ops/norm/rmsnorm.py.
//
// Rows = all leading dimensions, D = the last one; with a 2-D weight [H, D], row r uses its row r % H. A row's sums are
// in float over SUM_BLOCK columns and in double over the blocks; those of the weight and bias gradients in float over
// ROWS_A_SUM rows and in double beyond. A row is read twice, the second time from cache.
#include <algorithm>

#include "cpu/like.h"
#include "cpu/rmsnorm.h"

namespace tw {
namespace {

// Some rows: dx for each, and their contribution to dw [H, D] and db [D].
template <class T, class R>
void backward_rows(int64_t begin, int64_t end, const T* dy, const R* dtotal, const R* x, const float* rstd,
                             const float* w, R* dx, float* dw, float* db, Norm n) {
  const int64_t D = n.D;
  for (int64_t row = begin; row < end; ++row) {
    const T* g = dy + row * D;
    const R* xr = x + row * D;
    const float* wr = w + (row % n.H) * D;
    float* dwr = dw + (row % n.H) * D;
    R* dxr = dx + row * D;
    const float s = rstd[row];
    double total = 0;
    for (int64_t first = 0; first < D; first += SUM_BLOCK) {
      const int64_t last = std::min(D, first + SUM_BLOCK);
      float dot = 0;
      if (n.round_xhat) {
        TW_SIMD_SUM(dot)
        for (int64_t i = first; i < last; ++i) {
          float gi = load(g[i]), xi = load(xr[i]) * s;
          dot += gi * wr[i] * xi;
          dwr[i] += gi * round_to(xi, g);
        }
      } else {
        TW_SIMD_SUM(dot)
        for (int64_t i = first; i < last; ++i) {
          float gi = load(g[i]), xi = load(xr[i]) * s;
          dot += gi * wr[i] * xi;
          dwr[i] += gi * xi;
        }
      }
      total += dot;
    }
    // xi is normalized first: where s is 0, since the squares overflow, so may the sum.
    const float c = float(total * s / double(D));
    if (dtotal == nullptr) {
      TW_SIMD
      for (int64_t i = 0; i < D; ++i) store(dxr + i, s * (load(g[i]) * wr[i] - load(xr[i]) * c));
    } else {
      const R* ds = dtotal + row * D;
      TW_SIMD
      for (int64_t i = 0; i < D; ++i) store(dxr + i, s * (load(g[i]) * wr[i] - load(xr[i]) * c) + load(ds[i]));
    }
    if (db != nullptr) {
      TW_SIMD
      for (int64_t i = 0; i < D; ++i) db[i] += load(g[i]);
    }
  }
}

// residual: added to x first; without one, the last result is None.
std::tuple<Tensor, Tensor, Tensor> rmsnorm(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                           std::optional<Tensor> bias, double eps, double offset, bool round_xhat) {
  const Norm n = describe(x, weight, eps, round_xhat);
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n.D, "tilewright: bias must be [D]");
    STD_TORCH_CHECK(bias->scalar_type() == weight.scalar_type(), "tilewright: bias must have weight's dtype");
  }
  if (residual.has_value()) {
    check_like_x("residual", *residual, x, false);
    check_wider("residual", *residual, x);
  }
  const int64_t rows = n.D > 0 ? x.numel() / n.D : 0;
  const auto w = as_float(weight, float(offset));
  const auto b = bias.has_value() ? as_float(*bias, 0) : std::vector<float>();
  Tensor y = huge(torch::stable::empty_like(x));
  Tensor sum = residual.has_value() ? huge(torch::stable::empty_like(*residual)) : y;
  std::vector<int64_t> stat_shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) stat_shape.push_back(x.size(d));
  Tensor rstd = torch::stable::new_empty(x, stat_shape, ScalarType::Float);
  const Tensor& like = residual.has_value() ? *residual : x;
  dispatch(x, [&](auto t) {
    dispatch(like, [&](auto r) {
      using T = decltype(t);
      using R = decltype(r);
      const R* res = residual.has_value() ? in<R>(*residual) : nullptr;
      R* so = residual.has_value() ? out<R>(sum) : nullptr;
      torch::stable::parallel_for(0, rows, grain(n.D), [&](int64_t lo, int64_t hi) {
        forward_rows<T, R>(lo, hi, in<T>(x), res, w.data(), b.empty() ? nullptr : b.data(), out<T>(y), so,
                           out<float>(rstd), n);
      });
    });
  });
  return {y, rstd, residual.has_value() ? sum : Tensor()};
}

// x: the input of the norm (for add + RMSNorm, the sum). dtotal: the sum's own gradient.
std::tuple<Tensor, Tensor, Tensor> rmsnorm_backward(Tensor dy, std::optional<Tensor> dtotal, Tensor x, Tensor rstd,
                                                    Tensor weight, double eps, double offset, bool round_xhat, bool has_bias) {
  const Norm n = describe(x, weight, eps, round_xhat);
  const int64_t rows = n.D > 0 ? x.numel() / n.D : 0;
  check_like_x("dy", dy, x, false);
  check_wider("x", x, dy);
  if (dtotal.has_value()) check_like_x("dtotal", *dtotal, x, true);
  check_row_major("rstd", rstd);
  STD_TORCH_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.numel() == rows,
                  "tilewright: rstd must be float32 with one element for each row of x");
  const auto w = as_float(weight, float(offset));
  const int64_t chunks = row_chunks(rows), per = (rows + chunks - 1) / chunks, HD = n.H * n.D;
  std::vector<double> dw(chunks * HD, 0.0), db(has_bias ? chunks * n.D : 0, 0.0);
  Tensor dx = huge(torch::stable::empty_like(x));
  Tensor dweight = torch::stable::empty_like(weight);
  Tensor dbias = has_bias ? torch::stable::new_empty(weight, {n.D}) : Tensor();
  dispatch(dy, [&](auto t) {
    dispatch(x, [&](auto r) {
      using T = decltype(t);
      using R = decltype(r);
      const R* ds = dtotal.has_value() ? in<R>(*dtotal) : nullptr;
      torch::stable::parallel_for(0, chunks, rows * n.D < 32768 ? chunks : 1, [&](int64_t lo, int64_t hi) {
        std::vector<float> dw_part(HD, 0.0f), db_part(has_bias ? n.D : 0, 0.0f);
        for (int64_t k = lo; k < hi; ++k) {
          const int64_t end = std::min(rows, (k + 1) * per);
          for (int64_t first = k * per; first < end; first += ROWS_A_SUM * n.H) {
            backward_rows<T, R>(first, std::min(end, first + ROWS_A_SUM * n.H), in<T>(dy), ds, in<R>(x),
                                in<float>(rstd), w.data(), out<R>(dx), dw_part.data(),
                                has_bias ? db_part.data() : nullptr, n);
            flush(dw_part, dw.data() + k * HD);
            flush(db_part, db.data() + k * n.D);
          }
        }
      });
    });
  });
  add_chunks(dw, dweight);
  if (has_bias) add_chunks(db, dbias);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("rmsnorm_cpp(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, float offset,"
        " bool round_xhat) -> (Tensor, Tensor, Tensor)");
  m.def("rmsnorm_cpp_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor rstd, Tensor weight, float eps,"
        " float offset, bool round_xhat, bool has_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("rmsnorm_cpp", TORCH_BOX(&tw::rmsnorm));
  m.impl("rmsnorm_cpp_backward", TORCH_BOX(&tw::rmsnorm_backward));
}
