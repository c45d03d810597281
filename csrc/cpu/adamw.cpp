// AdamW over many tensors on the CPU, in place. The definition is tilewright/ops/optim/adamw.py.
//
// Each element is read once and written once. A task is a piece of one tensor.
#include <algorithm>

#include "cpu/common.h"

namespace tw {
namespace {

constexpr int64_t PIECE = 16384;

struct Numbers {
  float decay, rate1, beta2, rise2, size, root, eps;  // rate1: 1 - beta1, or -beta1 if that is smaller
};

// The first moment, from the nearer end: next to a large difference, the other one would lose its digits.
TW_INLINE float first_moment(float m, float g, float rate1) { return (rate1 > 0 ? m : g) + rate1 * (g - m); }

template <class P, class G, class S>
void update(const Numbers& f, P* p, const G* g, S* m, S* v, P* c, int64_t n) {
  if (c == nullptr) {
    TW_SIMD
    for (int64_t i = 0; i < n; ++i) {
      const float grad = load(g[i]), old = load(p[i]);
      const float a = first_moment(load(m[i]), grad, f.rate1), b = f.beta2 * load(v[i]) + f.rise2 * grad * grad;
      store(m + i, a);
      store(v + i, b);
      store(p + i, old + (f.decay * old - f.size * a / (std::sqrt(b) * f.root + f.eps)));
    }
    return;
  }
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const float grad = load(g[i]), old = load(p[i]);
    const float a = first_moment(load(m[i]), grad, f.rate1), b = f.beta2 * load(v[i]) + f.rise2 * grad * grad;
    store(m + i, a);
    store(v + i, b);
    const float change = f.decay * old - f.size * a / (std::sqrt(b) * f.root + f.eps) + load(c[i]);
    const float next = round_to(old + change, p);
    store(p + i, next);
    store(c + i, old - next + change);
  }
}

using Tensors = std::vector<Tensor>;

double value_of(const Tensor& step) {
  STD_TORCH_CHECK(step.numel() == 1, "tilewright: step must be a tensor of one number");
  switch (step.scalar_type()) {
    case ScalarType::Float: return *in<float>(step);
    case ScalarType::Double: return *in<double>(step);
    case ScalarType::Int: return *in<int32_t>(step);
    case ScalarType::Long: return double(*in<int64_t>(step));
    default: STD_TORCH_CHECK(false, "tilewright: step must be float32, float64, int32 or int64");
  }
}

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors compensations,
            double lr, double beta1, double beta2, double eps, double weight_decay,
            std::optional<Tensor> counter, std::optional<double> number) {
  STD_TORCH_CHECK(counter.has_value() || number.value_or(0) >= 1, "tilewright: step must be a tensor or at least 1");
  const double step = counter.has_value() ? value_of(*counter) : *number;
  STD_TORCH_CHECK(grads.size() == params.size() && exp_avgs.size() == params.size() &&
                      exp_avg_sqs.size() == params.size() &&
                      (compensations.empty() || compensations.size() == params.size()),
                  "tilewright: adamw_ takes as many tensors in each list");
  const Numbers f{float(-lr * weight_decay),
                  float(beta1 >= 0.5 ? 1 - beta1 : -beta1),
                  float(beta2),
                  float(1 - beta2),
                  float(lr / (1 - std::pow(beta1, step))),
                  float(1 / std::sqrt(1 - std::pow(beta2, step))),
                  float(eps)};
  std::vector<int64_t> starts{0};  // pieces before each tensor
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor* all[] = {&params[i], &grads[i], &exp_avgs[i], &exp_avg_sqs[i],
                           compensations.empty() ? &params[i] : &compensations[i]};
    for (const Tensor* t : all) {
      check_row_major("adamw_'s tensors", *t);
      STD_TORCH_CHECK(t->numel() == params[i].numel(), "tilewright: adamw_'s tensors must have their parameter's size");
    }
    STD_TORCH_CHECK(all[0]->scalar_type() == params[0].scalar_type() &&
                        all[1]->scalar_type() == grads[0].scalar_type() &&
                        all[2]->scalar_type() == exp_avgs[0].scalar_type() &&
                        all[3]->scalar_type() == exp_avgs[0].scalar_type() &&
                        all[4]->scalar_type() == params[0].scalar_type(),
                    "tilewright: adamw_'s lists must have a dtype each, compensations that of params");
    starts.push_back(starts.back() + (params[i].numel() + PIECE - 1) / PIECE);
  }
  if (starts.back() == 0) return;
  dispatch(params[0], [&](auto one) {
    dispatch(grads[0], [&](auto two) {
      dispatch(exp_avgs[0], [&](auto three) {
        using P = decltype(one);
        using G = decltype(two);
        using S = decltype(three);
        // Found once: a tensor's address costs a call.
        std::vector<P*> p, c;
        std::vector<const G*> g;
        std::vector<S*> m, v;
        for (size_t i = 0; i < params.size(); ++i) {
          p.push_back(out<P>(params[i]));
          g.push_back(in<G>(grads[i]));
          m.push_back(out<S>(exp_avgs[i]));
          v.push_back(out<S>(exp_avg_sqs[i]));
          c.push_back(compensations.empty() ? nullptr : out<P>(compensations[i]));
        }
        torch::stable::parallel_for(0, starts.back(), grain(PIECE), [&](int64_t begin, int64_t end) {
          size_t i = size_t(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
          for (int64_t piece = begin; piece < end; ++piece) {
            while (starts[i + 1] <= piece) ++i;
            const int64_t at = (piece - starts[i]) * PIECE, n = std::min(PIECE, params[i].numel() - at);
            update(f, p[i] + at, g[i] + at, m[i] + at, v[i] + at, c[i] == nullptr ? nullptr : c[i] + at, n);
          }
        });
      });
    });
  });
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def(
      "adamw_cpp_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] compensations, float lr, float beta1, float beta2, float eps, float weight_decay, "
      "Tensor? step, float? step_number) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("adamw_cpp_", TORCH_BOX(&tw::adamw_)); }
