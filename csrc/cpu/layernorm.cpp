// LayerNorm and add + LayerNorm on the CPU. The definition is tilewright/ops/norm/layernorm.py.
//
// Rows = all leading dimensions, D = the last one. A row's sums are in float over SUM_BLOCK columns and in double over
// the blocks; those of the weight and bias gradients in float over ROWS_A_SUM rows and in double beyond. The variance
// is that of deviations from the mean in float, which cancel only what float32 had rounded off the mean: `shift`, the
// mean of the deviations, is subtracted from them, too. A large mean so costs no digits. The forward reads a row three
// times, the backward twice, all but the first from cache.
#include <algorithm>

#include "cpu/column_sums.h"
#include "cpu/like.h"

namespace tw {
namespace {

// x, or with a residual x + residual rounded to its dtype, which is also stored; and the mean, in float.
template <class T, class R>
float sum_row(const T* x, const R* residual, R* sum, int64_t D) {
  double total = 0;
  for (int64_t first = 0; first < D; first += SUM_BLOCK) {
    const int64_t last = std::min(D, first + SUM_BLOCK);
    float part = 0;
    if (residual == nullptr) {
      TW_SIMD_SUM(part)
      for (int64_t i = first; i < last; ++i) part += load(x[i]);
    } else {
      TW_SIMD_SUM(part)
      for (int64_t i = first; i < last; ++i) {
        const float v = round_to(load(x[i]) + load(residual[i]), residual);
        store(sum + i, v);
        part += v;
      }
    }
    total += part;
  }
  return float(total / double(D));
}

template <class T, class R>
void forward_row(const T* x, const R* residual, const float* w, const float* bias, T* y, R* sum, float* mean,
                 float* rstd, int64_t D, double eps) {
  const float m = sum_row(x, residual, sum, D);
  const R* const from = residual == nullptr ? reinterpret_cast<const R*>(x) : sum;
  double deviations = 0, squares = 0;
  for (int64_t first = 0; first < D; first += SUM_BLOCK) {
    const int64_t last = std::min(D, first + SUM_BLOCK);
    float part = 0, square = 0;
    TW_SIMD_SUM2(part, square)
    for (int64_t i = first; i < last; ++i) {
      const float d = load(from[i]) - m;
      part += d;
      square += d * d;
    }
    deviations += part;
    squares += square;
  }
  const double shift = deviations / double(D), variance = squares / double(D) - shift * shift;
  const float c = float(shift), s = float(1.0 / std::sqrt((variance < 0 ? 0 : variance) + eps));
  *mean = m;
  *rstd = s;
  if (bias == nullptr) {
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) store(y + i, (load(from[i]) - m - c) * s * w[i]);
  } else {
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) store(y + i, (load(from[i]) - m - c) * s * w[i] + bias[i]);
  }
}

// dw, db: the row's contributions are added.
template <class T, class R>
void backward_row(const T* dy, const R* dtotal, const R* x, float m, float s, const float* w, R* dx, float* dw,
                  float* db, int64_t D) {
  double deviations = 0, sum = 0, product = 0;
  for (int64_t first = 0; first < D; first += SUM_BLOCK) {
    const int64_t last = std::min(D, first + SUM_BLOCK);
    float part = 0, g_part = 0, dot = 0;
    _Pragma("omp simd reduction(+ : part, g_part, dot)")
    for (int64_t i = first; i < last; ++i) {
      const float g = load(dy[i]) * w[i], d = load(x[i]) - m;
      part += d;
      g_part += g;
      dot += g * (d * s);  // normalized first: where s is 0, since the squares overflow, so may the sum
    }
    deviations += part;
    sum += g_part;
    product += dot;
  }
  // The saved mean was rounded to float32: what that cost is found again as in the forward.
  const double shift = deviations / double(D);
  const float c = float(shift), a = float(sum / double(D)), b = float((product - shift * s * sum) / double(D));
  if (dtotal == nullptr) {
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) {
      const float g = load(dy[i]), h = (load(x[i]) - m - c) * s;
      dw[i] += g * h;
      store(dx + i, s * (g * w[i] - a - h * b));
    }
  } else {
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) {
      const float g = load(dy[i]), h = (load(x[i]) - m - c) * s;
      dw[i] += g * h;
      store(dx + i, s * (g * w[i] - a - h * b) + load(dtotal[i]));
    }
  }
  if (db != nullptr) {
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) db[i] += load(dy[i]);
  }
}

int64_t columns(const Tensor& x, const Tensor& weight) {
  check_row_major("x", x);
  STD_TORCH_CHECK(x.dim() >= 1, "tilewright: x must have at least one dimension");
  check_row_major("weight", weight);
  const int64_t D = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == D, "tilewright: weight must be [D]");
  return D;
}

void check_statistic(const char* name, const Tensor& t, int64_t rows) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == rows, "tilewright: ", name,
                  " must be float32 with one element for each row of x");
}

// residual: added to x first; without one, the last result is None.
std::tuple<Tensor, Tensor, Tensor, Tensor> layernorm(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                     std::optional<Tensor> bias, double eps) {
  const int64_t D = columns(x, weight), rows = D > 0 ? x.numel() / D : 0;
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == D, "tilewright: bias must be [D]");
    STD_TORCH_CHECK(bias->scalar_type() == weight.scalar_type(), "tilewright: bias must have weight's dtype");
  }
  if (residual.has_value()) {
    check_like_x("residual", *residual, x, false);
    check_wider("residual", *residual, x);
  }
  const auto w = as_float(weight, 0);
  const auto b = bias.has_value() ? as_float(*bias, 0) : std::vector<float>();
  Tensor y = huge(torch::stable::empty_like(x));
  Tensor sum = residual.has_value() ? huge(torch::stable::empty_like(*residual)) : y;
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  Tensor mean = torch::stable::new_empty(x, shape, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(x, shape, ScalarType::Float);
  const Tensor& like = residual.has_value() ? *residual : x;
  dispatch(x, [&](auto t) {
    dispatch(like, [&](auto r) {
      using T = decltype(t);
      using R = decltype(r);
      const T* const from = in<T>(x);
      const R* const add = in<R>(residual);
      R* const to_sum = add == nullptr ? nullptr : out<R>(sum);
      T* const to = out<T>(y);
      float *const to_mean = out<float>(mean), *const to_rstd = out<float>(rstd);
      const float* const shifts = b.empty() ? nullptr : b.data();
      torch::stable::parallel_for(0, rows, grain(D), [&](int64_t lo, int64_t hi) {
        for (int64_t i = lo; i < hi; ++i) {
          const int64_t at = i * D;
          forward_row<T, R>(from + at, add == nullptr ? nullptr : add + at, w.data(), shifts, to + at,
                            add == nullptr ? nullptr : to_sum + at, to_mean + i, to_rstd + i, D, eps);
        }
      });
    });
  });
  return {y, mean, rstd, residual.has_value() ? sum : Tensor()};
}

// x: the input of the norm (for add + LayerNorm, the sum). dtotal: the sum's own gradient.
std::tuple<Tensor, Tensor, Tensor> layernorm_backward(Tensor dy, std::optional<Tensor> dtotal, Tensor x, Tensor mean,
                                                      Tensor rstd, Tensor weight, bool has_bias) {
  const int64_t D = columns(x, weight), rows = D > 0 ? x.numel() / D : 0;
  check_like_x("dy", dy, x, false);
  check_wider("x", x, dy);
  if (dtotal.has_value()) check_like_x("dtotal", *dtotal, x, true);
  check_statistic("mean", mean, rows);
  check_statistic("rstd", rstd, rows);
  const auto w = as_float(weight, 0);
  const int64_t chunks = row_chunks(rows), per = (rows + chunks - 1) / chunks;
  std::vector<double> dw(chunks * D, 0.0), db(has_bias ? chunks * D : 0, 0.0);
  Tensor dx = huge(torch::stable::empty_like(x));
  Tensor dweight = torch::stable::empty_like(weight);
  Tensor dbias = has_bias ? torch::stable::empty_like(weight) : Tensor();
  dispatch(dy, [&](auto t) {
    dispatch(x, [&](auto r) {
      using T = decltype(t);
      using R = decltype(r);
      const T* const of_y = in<T>(dy);
      const R *const of_sum = in<R>(dtotal), *const from = in<R>(x);
      const float *const means = in<float>(mean), *const rstds = in<float>(rstd);
      R* const to = out<R>(dx);
      torch::stable::parallel_for(0, chunks, rows * D < 32768 ? chunks : 1, [&](int64_t lo, int64_t hi) {
        std::vector<float> dw_part(D, 0.0f), db_part(has_bias ? D : 0, 0.0f);
        for (int64_t k = lo; k < hi; ++k) {
          const int64_t end = std::min(rows, (k + 1) * per);
          for (int64_t first = k * per; first < end; first += ROWS_A_SUM) {
            for (int64_t i = first; i < std::min(end, first + ROWS_A_SUM); ++i) {
              const int64_t at = i * D;
              backward_row<T, R>(of_y + at, of_sum == nullptr ? nullptr : of_sum + at, from + at, means[i], rstds[i],
                                 w.data(), to + at, dw_part.data(), has_bias ? db_part.data() : nullptr, D);
            }
            flush(dw_part, dw.data() + k * D);
            flush(db_part, db.data() + k * D);
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
  m.def("layernorm_cpp(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps)"
        " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("layernorm_cpp_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor mean, Tensor rstd, Tensor weight,"
        " bool has_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("layernorm_cpp", TORCH_BOX(&tw::layernorm));
  m.impl("layernorm_cpp_backward", TORCH_BOX(&tw::layernorm_backward));
}
