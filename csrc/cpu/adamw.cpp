// AdamW over many tensors on the CPU, in place. The definition is tilewright/ops/optim/adamw.py.
//
// Each element is read once and written once. A task is a piece of one tensor.
#include <algorithm>

#include "cpu/common.h"
#include "cpu/quantize.h"

namespace tw {
namespace {

constexpr int64_t PIECE = 16384;
constexpr int64_t DRAWN = 1024;  // elements whose random bits are drawn at a time: they stay in the first-level cache

struct Numbers {
  float decay, rate1, beta2, rise2, size, root, eps;  // rate1: 1 - beta1, or -beta1 if that is smaller
  float clip;
  uint64_t seed;
  uint32_t step;
};

constexpr uint64_t STREAM = uint64_t(1) << 60;  // in the counter's second word
constexpr uint32_t EXP_AVG = 0x9E37, EXP_AVG_SQ = 0x58F1;  // what the bits of p are multiplied by

// Where the elements of a tensor have their random bits: see `StochasticRounding` in adamw.py.
struct Place {
  int64_t matrix, first, width, pitch;
};

// 16 bits for each of n neighbors of a matrix. to: room for n + 14.
TW_INLINE const uint16_t* draw(const Numbers& f, int64_t matrix, uint64_t first, int64_t n, uint32_t* to) {
  const uint64_t block = first >> 3;
  const int64_t blocks = int64_t(((first + uint64_t(n) + 7) >> 3) - block);
  philox_row(f.seed, STREAM + block, uint32_t(matrix), f.step, blocks, to);
  return reinterpret_cast<const uint16_t*>(to) + (first & 7);  // lower halves first
}

// The bits of one of x's two neighbors in bfloat16, the one that 16 random bits choose; its lower 16 are to be cut. x is
// the result of arithmetic, whose NaN are quiet.
TW_INLINE uint32_t with_random(float x, uint32_t random) {
  const uint32_t u = bits<uint32_t>(x);
  const bool last = int32_t(u & 0x7FFFFFFFu) >= 0x7F7F0000;  // the largest, or beyond
  return u + (last ? 0u : random & 0xFFFFu);
}

TW_INLINE void store_random(bf16* p, float x, uint32_t random) { p->bits = uint16_t(with_random(x, random) >> 16); }
TW_INLINE void store_random(float* p, float x, uint32_t) { *p = x; }

// Two neighbors, the lower half of 32 bits first.
TW_INLINE uint32_t pair(const void* p, int64_t i) {
  uint32_t two;
  std::memcpy(&two, static_cast<const char*>(p) + 4 * i, 4);
  return two;
}
TW_INLINE float lower(uint32_t two) { return bits<float>(two << 16); }
TW_INLINE float upper(uint32_t two) { return bits<float>(two & 0xFFFF0000u); }

// The first moment, from the nearer end: next to a large difference, the other one would lose its digits.
TW_INLINE float first_moment(float m, float g, float rate1) { return (rate1 > 0 ? m : g) + rate1 * (g - m); }

// The new moments of an element, and what is added to its parameter, in float32.
struct Moved {
  float change, m, v;
};
TW_INLINE Moved moved(const Numbers& f, float p, float g, float m, float v) {
  g *= f.clip;
  const float a = first_moment(m, g, f.rate1), b = f.beta2 * v + f.rise2 * g * g;
  return {f.decay * p - f.size * a / (std::sqrt(b) * f.root + f.eps), a, b};
}

template <class P, class G, class S>
void update(const Numbers& f, P* p, const G* g, S* m, S* v, P* c, int64_t n) {
  if (c == nullptr) {
    TW_SIMD
    for (int64_t i = 0; i < n; ++i) {
      const float old = load(p[i]);
      const Moved to = moved(f, old, load(g[i]), load(m[i]), load(v[i]));
      store(m + i, to.m);
      store(v + i, to.v);
      store(p + i, old + to.change);
    }
    return;
  }
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const float old = load(p[i]);
    const Moved to = moved(f, old, load(g[i]), load(m[i]), load(v[i]));
    store(m + i, to.m);
    store(v + i, to.v);
    const float change = to.change + load(c[i]);
    const float next = round_to(old + change, p);
    store(p + i, next);
    store(c + i, old - next + change);
  }
}

TW_INLINE void store_pair(bf16* p, int64_t i, float even, float odd, uint32_t random, uint32_t factor) {
  const uint32_t two = with_random(even, random * factor) >> 16 |
                       (with_random(odd, (random >> 16) * factor) & 0xFFFF0000u);
  std::memcpy(reinterpret_cast<char*>(p) + 4 * i, &two, 4);
}

// Of so many elements.   random: 16 bits for each.   w: null, or the copy of parameters in float32.
template <class P, class G, class S>
void update_random(const Numbers& f, const uint16_t* random, P* p, const G* g, S* m, S* v, bf16* w, int64_t n) {
  int64_t begin = 0;
  if constexpr (sizeof(P) + sizeof(G) + sizeof(S) == 6) {
    // Pairs need not be moved between the lanes of 32 bits and those of 16.
    TW_SIMD
    for (int64_t i = 0; i < n / 2; ++i) {
      const uint32_t u = pair(random, i), p2 = pair(p, i), g2 = pair(g, i), m2 = pair(m, i), v2 = pair(v, i);
      const Moved even = moved(f, lower(p2), lower(g2), lower(m2), lower(v2));
      const Moved odd = moved(f, upper(p2), upper(g2), upper(m2), upper(v2));
      store_pair(p, i, lower(p2) + even.change, upper(p2) + odd.change, u, 1);
      store_pair(m, i, even.m, odd.m, u, EXP_AVG);
      store_pair(v, i, even.v, odd.v, u, EXP_AVG_SQ);
    }
    begin = n / 2 * 2;
  }
  TW_SIMD
  for (int64_t i = begin; i < n; ++i) {
    const float old = load(p[i]);
    const Moved to = moved(f, old, load(g[i]), load(m[i]), load(v[i]));
    const uint32_t u = random[i];
    store_random(p + i, old + to.change, u);
    store_random(m + i, to.m, u * EXP_AVG);
    store_random(v + i, to.v, u * EXP_AVG_SQ);
  }
  if (w == nullptr) return;
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) store_random(w + i, load(p[i]), random[i]);
}

// With stochastic rounding of what is stored in bfloat16.   at: of the first element in its tensor.
template <class P, class G, class S>
void update_random(const Numbers& f, const Place& place, int64_t at, P* p, const G* g, S* m, S* v, bf16* w, int64_t n) {
  alignas(64) uint32_t room[DRAWN / 2 + 8];
  while (n > 0) {
    // Neighbors in the matrix, of one row of it.
    const int64_t row = at / place.width, column = at % place.width;
    const int64_t count = std::min(std::min(DRAWN, n), place.width - column);
    const uint64_t first = uint64_t(place.first + row * place.pitch + column);
    update_random(f, draw(f, place.matrix, first, count, room), p, g, m, v, w, count);
    at += count, n -= count, p += count, g += count, m += count, v += count;
    w += w == nullptr ? 0 : count;
  }
}

using Tensors = std::vector<Tensor>;

double value_of(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.numel() == 1, "tilewright: ", name, " must be a tensor of one number");
  switch (t.scalar_type()) {
    case ScalarType::Float: return *in<float>(t);
    case ScalarType::Double: return *in<double>(t);
    case ScalarType::Int: return *in<int32_t>(t);
    case ScalarType::Long: return double(*in<int64_t>(t));
    default: STD_TORCH_CHECK(false, "tilewright: ", name, " must be float32, float64, int32 or int64");
  }
}

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors compensations,
            Tensors copies, std::optional<Tensor> places, int64_t seed, double lr, double beta1,
            double beta2, double eps, double weight_decay, std::optional<Tensor> counter, std::optional<double> number,
            std::optional<Tensor> clip) {
  STD_TORCH_CHECK(counter.has_value() || number.value_or(0) >= 1, "tilewright: step must be a tensor or at least 1");
  const double step = counter.has_value() ? value_of("step", *counter) : *number;
  STD_TORCH_CHECK(grads.size() == params.size() && exp_avgs.size() == params.size() &&
                      exp_avg_sqs.size() == params.size() &&
                      (compensations.empty() || compensations.size() == params.size()) &&
                      (copies.empty() || copies.size() == params.size()),
                  "tilewright: adamw_ takes as many tensors in each list");
  const Numbers f{float(-lr * weight_decay),
                  float(beta1 >= 0.5 ? 1 - beta1 : -beta1),
                  float(beta2),
                  float(1 - beta2),
                  float(lr / (1 - std::pow(beta1, step))),
                  float(1 / std::sqrt(1 - std::pow(beta2, step))),
                  float(eps),
                  clip.has_value() ? float(value_of("clip", *clip)) : 1.0f,
                  uint64_t(seed),
                  uint32_t(int64_t(step))};
  const Place* place = nullptr;
  if (places.has_value()) {
    check_row_major("places", *places);
    STD_TORCH_CHECK(places->scalar_type() == ScalarType::Long && places->numel() == 4 * int64_t(params.size()) &&
                        compensations.empty(),
                    "tilewright: places must be int64 [tensors, 4], without compensations");
    place = reinterpret_cast<const Place*>(in<int64_t>(*places));
    for (size_t i = 0; i < params.size(); ++i) {
      STD_TORCH_CHECK(place[i].width > 0, "tilewright: the width of a place must be positive, got ", place[i].width);
    }
  }
  std::vector<int64_t> starts{0};  // pieces before each tensor
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor* all[] = {&params[i], &grads[i], &exp_avgs[i], &exp_avg_sqs[i],
                           compensations.empty() ? &params[i] : &compensations[i],
                           copies.empty() ? &params[i] : &copies[i]};
    for (const Tensor* t : all) {
      check_row_major("adamw_'s tensors", *t);
      STD_TORCH_CHECK(t->numel() == params[i].numel(), "tilewright: adamw_'s tensors must have their parameter's size");
    }
    STD_TORCH_CHECK(all[0]->scalar_type() == params[0].scalar_type() &&
                        all[1]->scalar_type() == grads[0].scalar_type() &&
                        all[2]->scalar_type() == exp_avgs[0].scalar_type() &&
                        all[3]->scalar_type() == exp_avgs[0].scalar_type() &&
                        all[4]->scalar_type() == params[0].scalar_type() &&
                        (copies.empty() || (params[0].scalar_type() == ScalarType::Float &&
                                            copies[i].scalar_type() == ScalarType::BFloat16)),
                    "tilewright: adamw_'s lists must have a dtype each, compensations that of params; copies are those "
                    "in bfloat16 of params in float32");
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
        std::vector<bf16*> w;
        for (size_t i = 0; i < params.size(); ++i) {
          p.push_back(out<P>(params[i]));
          g.push_back(in<G>(grads[i]));
          m.push_back(out<S>(exp_avgs[i]));
          v.push_back(out<S>(exp_avg_sqs[i]));
          c.push_back(compensations.empty() ? nullptr : out<P>(compensations[i]));
          w.push_back(copies.empty() ? nullptr : out<bf16>(copies[i]));
        }
        torch::stable::parallel_for(0, starts.back(), grain(PIECE), [&](int64_t begin, int64_t end) {
          size_t i = size_t(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
          for (int64_t piece = begin; piece < end; ++piece) {
            while (starts[i + 1] <= piece) ++i;
            const int64_t at = (piece - starts[i]) * PIECE, n = std::min(PIECE, params[i].numel() - at);
            bf16* const copy = w[i] == nullptr ? nullptr : w[i] + at;
            if (place != nullptr) {
              update_random(f, place[i], at, p[i] + at, g[i] + at, m[i] + at, v[i] + at, copy, n);
              continue;
            }
            update(f, p[i] + at, g[i] + at, m[i] + at, v[i] + at, c[i] == nullptr ? nullptr : c[i] + at, n);
            if (copy == nullptr) continue;
            TW_SIMD
            for (int64_t j = 0; j < n; ++j) store(copy + j, load(p[i][at + j]));
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
      "Tensor(d!)[] compensations, Tensor(e!)[] copies, Tensor? places, int seed, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, Tensor? step, float? step_number, Tensor? clip) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("adamw_cpp_", TORCH_BOX(&tw::adamw_)); }
