// Statistics of rows of logits, and their gradient, on the CPU. The definition, and the formulas, are in
// tilewright/ops/loss/softmax_stats.py.
//
// T = rows, V = columns. Rows are contiguous, with any row stride >= V. A row is processed once, in blocks of SUM_BLOCK
// that stay in the first-level cache: z of the block and its maximum, then its sums relative to the largest z so far.
// Block sums are in float, and are added, and rescaled when the maximum grows, in double.
#include <algorithm>
#include <limits>
#include <numeric>

#include "cpu/common.h"

namespace tw {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// Replaces values further below the peak, including -inf: the exponential is 0 all the same, and 0 * -inf is NaN.
constexpr float FLOOR = -1024.0f;

struct Tanh {
  float value, slope;  // slope: 1 - value^2, without its cancellation where |value| is near 1
};

// tanh to 2 ulp. Below 0.625 an odd polynomial (least maximum relative error, 4e-9, fitted to tanh(x) / x):
// 1 - 2q / (1 + q), q = exp(-2 |x|), would lose the low bits of a small x.
TW_INLINE Tanh tanh_accurate(float x) {
  float u = x * x;
  float p = -5.704986862838268e-3f;
  p = std::fmaf(p, u, 2.063908614218235e-2f);
  p = std::fmaf(p, u, -5.373971536755562e-2f);
  p = std::fmaf(p, u, 1.3331441581249237e-1f);
  p = std::fmaf(p, u, -3.333328068256378e-1f);
  float near = std::fmaf(x * u, p, x);
  float q = exp_(-2.0f * std::fabs(x)), h = q / (1.0f + q);
  float far = std::copysign(1.0f - 2.0f * h, x);
  return {std::fabs(x) < 0.625f ? near : far, 4.0f * h * (1.0f - h)};
}

// How z follows from a logit x: x, cap * tanh(x * inverse), or x * inverse. Peaks are those of z, but of x if SCALED.
enum Scaling : int { PLAIN, CAPPED, SCALED };

struct Cap {
  float cap, inverse;
};

// cap * t, rounded: a compiler would contract a product with the difference from the peak, which was rounded, and be off
// by half an ulp of the peak.
TW_INLINE float capped(float t, Cap c) { return std::fmaf(c.cap, t, 0.0f); }

template <Scaling S>
TW_INLINE float scaled(float x, Cap c) {
  return S == CAPPED ? capped(tanh_accurate(x * c.inverse).value, c) : x;
}

// z - peak, where v is z, or x if SCALED: a product that is rounded before the difference is off by an ulp of the peak,
// which is more than the exponential's range where the peak is above 2^30. So is a capped z, which may exceed the peak.
template <Scaling S>
TW_INLINE float below_peak(float v, float peak, Cap c) {
  const float below = v - peak;
  if constexpr (S == CAPPED) return below > 0 ? 0.0f : below;  // keeps NaN
  return S == SCALED ? below * c.inverse : below;
}

struct Rows {
  int64_t T, V, stride;
};

struct Outputs {
  float *peak, *log_sum, *target, *weighted, *mean;  // the last two are null unless requested
  int64_t* argmax;  // null unless requested
};

TW_INLINE float finite(float x) { return std::isfinite(x) ? x : 0.0f; }

// weight_sum: of w, or V.
template <class T, Scaling S>
void forward_rows(int64_t begin, int64_t end, const T* logits, const int64_t* target, const float* w,
                  double weight_sum, Cap cap, Rows n, Outputs o) {
  float z[SUM_BLOCK];
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * n.stride;
    float largest_logit = -INF, peak = -INF;
    int64_t best = 0;
    double sum = 0, sum_z = 0, weighted = 0;
    const float origin = finite(scaled<S>(load(x[0]), cap));  // of the weighted sum, until there is a peak
    for (int64_t first = 0; first < n.V; first += SUM_BLOCK) {
      const int64_t size = std::min(SUM_BLOCK, n.V - first);
      const T* xb = x + first;
      float top = -INF;
      TW_SIMD_MAX(top)
      for (int64_t i = 0; i < size; ++i) {
        float v = load(xb[i]);
        z[i] = scaled<S>(v, cap);
        top = v > top ? v : top;
      }
      const bool larger = top > largest_logit;
      if (larger && o.argmax != nullptr) {
        int64_t i = 0;
        while (load(xb[i]) != top) ++i;
        best = first + i;
      }
      if (larger || first == 0) {  // a capped -inf is a peak, too
        largest_logit = top;
        // The cap is monotone up to rounding, and the peak need not be the exact maximum of z.
        const float higher = std::max(peak, scaled<S>(top, cap));
        const double lower = (double(peak) - finite(higher)) * (S == SCALED ? cap.inverse : 1.0f);
        const double shrink = std::exp(lower);
        sum_z = shrink == 0 ? 0 : (sum_z + sum * lower) * shrink;
        sum *= shrink;
        peak = higher;
      }
      const float shift = finite(peak);  // inf - inf is NaN
      if (o.mean == nullptr) {
        float s = 0;
        TW_SIMD_SUM(s)
        for (int64_t i = 0; i < size; ++i) s += exp_(below_peak<S>(z[i], shift, cap));
        sum += s;
      } else {
        float s = 0, sz = 0;
        TW_SIMD_SUM2(s, sz)
        for (int64_t i = 0; i < size; ++i) {
          float below = below_peak<S>(z[i], shift, cap), e = exp_(below);
          s += e;
          sz += e * (below < FLOOR ? FLOOR : below);
        }
        sum += s;
        sum_z += sz;
      }
      if (o.weighted != nullptr) {
        float s = 0;
        if (w == nullptr) {
          TW_SIMD_SUM(s)
          for (int64_t i = 0; i < size; ++i) s += z[i] - origin;
        } else {
          const float* wb = w + first;
          TW_SIMD_SUM(s)
          for (int64_t i = 0; i < size; ++i) s += wb[i] * (z[i] - origin);
        }
        weighted += s;
      }
    }
    const int64_t y = target[row];
    peak = finite(peak);
    o.peak[row] = peak;
    o.log_sum[row] = float(std::log(sum));
    o.target[row] = y >= 0 && y < n.V ? below_peak<S>(scaled<S>(load(x[y]), cap), peak, cap) : 0.0f;
    if (o.weighted != nullptr) o.weighted[row] = float(weighted + weight_sum * (double(origin) - peak));
    if (o.mean != nullptr) o.mean[row] = float(sum_z / sum);
    if (o.argmax != nullptr) o.argmax[row] = best;
  }
}

struct Gradients {
  // mean and the last three may be null
  const float *peak, *log_sum, *mean, *g_log_sum, *g_picked, *g_weighted, *g_mean, *scale;
  int64_t scales;  // 1, or one per row
};

// g = p (in_p + g_mean (z - peak - mean)) + g_weighted w + [c = y] g_picked, times dz / dlogit.
struct RowGradient {
  float peak, log_sum, in_p, mean, g_mean, g_weighted;
};

template <Scaling S, bool WEIGHTS, bool MEAN>
TW_INLINE float gradient(float x, float w, float extra, Cap cap, RowGradient r) {
  Tanh t = S == CAPPED ? tanh_accurate(x * cap.inverse) : Tanh{};
  float below = below_peak<S>(S == CAPPED ? capped(t.value, cap) : x, r.peak, cap);
  float in_p = MEAN ? std::fmaf(r.g_mean, (below < FLOOR ? FLOOR : below) - r.mean, r.in_p) : r.in_p;
  float g = std::fmaf(exp_(below - r.log_sum), in_p, (WEIGHTS ? r.g_weighted * w : r.g_weighted) + extra);
  return S == CAPPED ? g * t.slope : g;
}

// dlogits may be logits: every element is read before it is written.
template <class T, Scaling S, bool WEIGHTS, bool MEAN>
void backward_rows(int64_t begin, int64_t end, const T* logits, const int64_t* target, const float* w, Cap cap, Rows n,
                   Gradients g, T* dlogits, int64_t stride) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * n.stride;
    T* d = dlogits + row * stride;
    float g_mean = MEAN ? g.g_mean[row] : 0, g_weighted = g.g_weighted == nullptr ? 0 : g.g_weighted[row];
    const int64_t y = target[row];
    const bool inside = y >= 0 && y < n.V;
    float g_log_sum = g.g_log_sum[row], g_picked = inside ? g.g_picked[row] : 0;
    if (g_log_sum == 0 && g_picked == 0 && g_weighted == 0 && g_mean == 0) {  // an ignored row
      std::memset(d, 0, size_t(n.V) * sizeof(T));
      continue;
    }
    const float scale = g.scale == nullptr ? 1 : g.scale[g.scales == 1 ? 0 : row];
    g_log_sum *= scale, g_picked *= scale, g_weighted *= scale, g_mean *= scale;
    const RowGradient r{g.peak[row], g.log_sum[row], g_log_sum + g_mean, MEAN ? g.mean[row] : 0, g_mean, g_weighted};
    T at_target{};
    if (inside)
      store(&at_target, gradient<S, WEIGHTS, MEAN>(load(x[y]), WEIGHTS ? w[y] : 0, g_picked, cap, r));
    TW_SIMD
    for (int64_t i = 0; i < n.V; ++i)
      store(d + i, gradient<S, WEIGHTS, MEAN>(load(x[i]), WEIGHTS ? w[i] : 0, 0, cap, r));
    if (inside) d[y] = at_target;
  }
}

Rows describe(const Tensor& logits, const Tensor& target) {
  STD_TORCH_CHECK(logits.is_cpu() && logits.dim() == 2 &&
                      (logits.numel() == 0 || logits.stride(1) == 1 || logits.size(1) == 1),
                  "tilewright: logits must be a 2-D CPU tensor with contiguous rows");
  check_row_major("target", target);
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long && target.numel() == logits.size(0),
                  "tilewright: target must be int64, one for each row of logits");
  return {logits.size(0), logits.size(1), logits.stride(0)};
}

const float* vector(const char* name, const std::optional<Tensor>& t, int64_t size) {
  if (!t.has_value()) return nullptr;
  check_row_major(name, *t);
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->numel() == size, "tilewright: ", name,
                  " must be float32 of the size that the logits give");
  return in<float>(t);
}

Cap cap_of(double softcap, double inverse_temperature) {
  return {float(softcap), float(softcap == 0 ? inverse_temperature : inverse_temperature / softcap)};
}

Scaling scaling_of(double softcap, double inverse_temperature) {
  return softcap != 0 ? CAPPED : inverse_temperature != 1 ? SCALED : PLAIN;
}

template <class T>
auto choose_forward(Scaling scaling) {
  if (scaling == CAPPED) return &forward_rows<T, CAPPED>;
  return scaling == SCALED ? &forward_rows<T, SCALED> : &forward_rows<T, PLAIN>;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> softmax_stats_forward(
    Tensor logits, Tensor target, std::optional<Tensor> class_weight, double softcap, double temperature, bool smooth,
    bool entropy, bool argmax) {
  const Rows n = describe(logits, target);
  const double inverse_temperature = 1 / temperature;
  softcap /= temperature;
  STD_TORCH_CHECK(!smooth || inverse_temperature == 1, "tilewright: smooth needs a temperature of 1");
  auto make = [&](bool wanted, ScalarType type) {
    return wanted ? torch::stable::new_empty(logits, {n.T}, type) : Tensor();
  };
  Tensor peak = make(true, ScalarType::Float), log_sum = make(true, ScalarType::Float);
  Tensor picked = make(true, ScalarType::Float);
  Tensor weighted = make(smooth, ScalarType::Float), mean = make(entropy, ScalarType::Float);
  Tensor best = make(argmax, ScalarType::Long);
  const float* w = vector("class_weight", class_weight, n.V);
  const double weight_sum = smooth && w != nullptr ? std::accumulate(w, w + n.V, 0.0) : double(n.V);
  const Outputs o{out<float>(peak), out<float>(log_sum), out<float>(picked), smooth ? out<float>(weighted) : nullptr,
                  entropy ? out<float>(mean) : nullptr, argmax ? out<int64_t>(best) : nullptr};
  dispatch(logits, [&](auto t) {
    using T = decltype(t);
    const auto rows = choose_forward<T>(scaling_of(softcap, inverse_temperature));
    torch::stable::parallel_for(0, n.T, grain(n.V), [&](int64_t lo, int64_t hi) {
      rows(lo, hi, in<T>(logits), in<int64_t>(target), w, weight_sum, cap_of(softcap, inverse_temperature), n, o);
    });
  });
  return {peak, log_sum, picked, weighted, mean, best};
}

template <class T, Scaling S>
auto choose_backward(bool weights, bool mean) {
  if (weights) return mean ? &backward_rows<T, S, true, true> : &backward_rows<T, S, true, false>;
  return mean ? &backward_rows<T, S, false, true> : &backward_rows<T, S, false, false>;
}

template <class T>
auto choose(Scaling scaling, bool weights, bool mean) {
  if (scaling == CAPPED) return choose_backward<T, CAPPED>(weights, mean);
  return scaling == SCALED ? choose_backward<T, SCALED>(weights, mean) : choose_backward<T, PLAIN>(weights, mean);
}

void backward_into(const Tensor& dlogits, const Tensor& logits, const Tensor& target,
                   const std::optional<Tensor>& class_weight, double softcap, double temperature, const Tensor& peak,
                   const Tensor& log_sum, const std::optional<Tensor>& mean, const Tensor& g_log_sum,
                   const Tensor& g_picked, const std::optional<Tensor>& g_weighted,
                   const std::optional<Tensor>& g_mean, const std::optional<Tensor>& scale) {
  const Rows n = describe(logits, target);
  const double inverse_temperature = 1 / temperature;
  softcap /= temperature;
  const int64_t scales = scale.has_value() ? scale->numel() : 1;
  STD_TORCH_CHECK(scales == 1 || scales == n.T, "tilewright: scale must be one number, or one for each row");
  const float* w = g_weighted.has_value() ? vector("class_weight", class_weight, n.V) : nullptr;
  const Gradients g{vector("peak", peak, n.T),           vector("log_sum", log_sum, n.T),
                    vector("mean", mean, n.T),           vector("g_log_sum", g_log_sum, n.T),
                    vector("g_picked", g_picked, n.T),   vector("g_weighted", g_weighted, n.T),
                    vector("g_mean", g_mean, n.T),       vector("scale", scale, scales),
                    scales};
  STD_TORCH_CHECK(g.g_mean == nullptr || g.mean != nullptr, "tilewright: g_mean needs mean");
  dispatch(logits, [&](auto t) {
    using T = decltype(t);
    const auto rows = choose<T>(scaling_of(softcap, inverse_temperature), w != nullptr, g.g_mean != nullptr);
    torch::stable::parallel_for(0, n.T, grain(n.V), [&](int64_t lo, int64_t hi) {
      rows(lo, hi, in<T>(logits), in<int64_t>(target), w, cap_of(softcap, inverse_temperature), n, g, out<T>(dlogits),
           dlogits.stride(0));
    });
  });
}

Tensor softmax_stats_backward(Tensor logits, Tensor target, std::optional<Tensor> class_weight, double softcap,
                              double temperature, Tensor peak, Tensor log_sum, std::optional<Tensor> mean,
                              Tensor g_log_sum, Tensor g_picked, std::optional<Tensor> g_weighted,
                              std::optional<Tensor> g_mean, std::optional<Tensor> scale) {
  Tensor dlogits = huge(torch::stable::new_empty(logits, {logits.size(0), logits.size(1)}));
  backward_into(dlogits, logits, target, class_weight, softcap, temperature, peak, log_sum, mean, g_log_sum, g_picked,
                g_weighted, g_mean, scale);
  return dlogits;
}

void softmax_stats_backward_(Tensor logits, Tensor target, std::optional<Tensor> class_weight, double softcap,
                             double temperature, Tensor peak, Tensor log_sum, std::optional<Tensor> mean,
                             Tensor g_log_sum, Tensor g_picked, std::optional<Tensor> g_weighted,
                             std::optional<Tensor> g_mean, std::optional<Tensor> scale) {
  backward_into(logits, logits, target, class_weight, softcap, temperature, peak, log_sum, mean, g_log_sum, g_picked,
                g_weighted, g_mean, scale);
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("softmax_stats_cpp_forward(Tensor logits, Tensor target, Tensor? class_weight, float softcap,"
        " float temperature, bool weighted, bool mean, bool argmax)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("softmax_stats_cpp_backward(Tensor logits, Tensor target, Tensor? class_weight, float softcap,"
        " float temperature, Tensor peak, Tensor log_sum, Tensor? mean, Tensor g_log_sum, Tensor g_picked,"
        " Tensor? g_weighted, Tensor? g_mean, Tensor? scale) -> Tensor");
  m.def("softmax_stats_cpp_backward_(Tensor(a!) logits, Tensor target, Tensor? class_weight, float softcap,"
        " float temperature, Tensor peak, Tensor log_sum, Tensor? mean, Tensor g_log_sum, Tensor g_picked,"
        " Tensor? g_weighted, Tensor? g_mean, Tensor? scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("softmax_stats_cpp_forward", TORCH_BOX(&tw::softmax_stats_forward));
  m.impl("softmax_stats_cpp_backward", TORCH_BOX(&tw::softmax_stats_backward));
  m.impl("softmax_stats_cpp_backward_", TORCH_BOX(&tw::softmax_stats_backward_));
}
