// Top-k routing of tokens to experts on the CPU. The definition, and the formulas, are in tilewright/ops/moe/route.py.
//
// T = tokens, E = experts, K = experts per token. A row of logits is a few hundred elements and stays in the
// first-level cache; each step over it is a loop that vectorizes. Choices compare integers in the order of their
// floats, so that ties are exact and NaN has a defined order. Sums over tokens are computed in chunks that depend on T
// alone, and added in order.
#include <algorithm>
#include <limits>

#include "cpu/common.h"

namespace tw {
namespace {

constexpr float TINY = 1e-20f;
constexpr int32_t LOWEST = std::numeric_limits<int32_t>::min();  // below the key of -inf
constexpr int32_t HIGHEST = std::numeric_limits<int32_t>::max();
constexpr int64_t MOST = 4096;
constexpr int64_t CHUNK = 64;  // minimum tokens per partial sum

// Integers in the order of floats; -0 equals 0, and NaN is above all, as in torch.sort.
TW_INLINE int32_t key(float x) {
  int32_t bits;
  const float zero = x == 0.0f ? 0.0f : x;
  std::memcpy(&bits, &zero, 4);
  const int32_t ordered = bits < 0 ? bits ^ HIGHEST : bits;
  return x != x ? HIGHEST : ordered;
}

// The index of the largest key, the first of equal ones.
TW_INLINE int64_t best(const int32_t* keys, int64_t n) {
  int32_t top = LOWEST;
  TW_SIMD_MAX(top)
  for (int64_t i = 0; i < n; ++i) top = keys[i] > top ? keys[i] : top;
  int64_t at = 0;
  for (; at + 16 <= n; at += 16) {  // sixteen at a time until it is found
    int32_t hits = 0;
    TW_SIMD_SUM(hits)
    for (int64_t i = 0; i < 16; ++i) hits += keys[at + i] == top;
    if (hits != 0) break;
  }
  while (keys[at] != top) ++at;
  return at;
}

struct Options {
  int64_t T, E, K, groups, topk_groups;
  bool sigmoid, renormalize;
  float scale;
};

struct Row {
  float x[MOST], s[MOST], e[MOST];  // logits, scores, exponentials
  int32_t keys[MOST];
  float lse, whole;  // whole: the sum of sigmoid scores
};

template <class T>
TW_INLINE void scores(const T* logits, const Options& o, Row& r) {
  const int64_t E = o.E;
  float top = -std::numeric_limits<float>::infinity();
  TW_SIMD_MAX(top)
  for (int64_t e = 0; e < E; ++e) {
    r.x[e] = load(logits[e]);
    top = r.x[e] > top ? r.x[e] : top;
  }
  float total = 0;
  TW_SIMD_SUM(total)
  for (int64_t e = 0; e < E; ++e) {
    r.e[e] = exp_(r.x[e] - top);
    total += r.e[e];
  }
  r.lse = top + std::log(total);
  r.whole = 1;
  if (!o.sigmoid) {
    TW_SIMD
    for (int64_t e = 0; e < E; ++e) r.s[e] = r.e[e] / total;
    return;
  }
  float whole = 0;
  TW_SIMD_SUM(whole)
  for (int64_t e = 0; e < E; ++e) {
    r.s[e] = sigmoid_(r.x[e]);
    whole += r.s[e];
  }
  r.whole = whole + TINY;
}

// Sets the keys of experts outside the best groups to LOWEST. value: the scores that rank groups.
void limit(const float* value, bool two, const Options& o, Row& r) {
  const int64_t size = o.E / o.groups;
  int32_t keys[MOST];
  for (int64_t g = 0; g < o.groups; ++g) {
    const float* v = value + g * size;
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = 0; i < size; ++i) {
      const float low = v[i] < first ? v[i] : first;
      first = v[i] > first ? v[i] : first;
      second = low > second ? low : second;
    }
    keys[g] = key(two && size > 1 ? first + second : first);
  }
  bool allowed[MOST] = {};
  for (int64_t n = 0; n < o.topk_groups; ++n) {
    const int64_t g = best(keys, o.groups);
    allowed[g] = true;
    keys[g] = LOWEST;
  }
  for (int64_t g = 0; g < o.groups; ++g)
    if (!allowed[g]) std::fill_n(r.keys + g * size, size, LOWEST);
}

// Sets the keys of the experts, in the order in which they are chosen.
void rank(const float* bias, const Options& o, Row& r) {
  const int64_t E = o.E;
  if (bias != nullptr) {
    TW_SIMD
    for (int64_t e = 0; e < E; ++e) r.x[e] = r.s[e] + bias[e];
  }
  TW_SIMD
  for (int64_t e = 0; e < E; ++e) r.keys[e] = key(r.x[e]);
  if (o.topk_groups < o.groups) limit(o.sigmoid && bias == nullptr ? r.s : r.x, o.sigmoid || bias != nullptr, o, r);
}

template <class T>
void forward_rows(int64_t begin, int64_t end, const T* logits, int64_t stride, const float* bias,
                  const int64_t* recorded, const Options& o, Row& r, int64_t* index, float* weight,
                  double* probability, int64_t* count, double& square) {
  const int64_t E = o.E, K = o.K;
  float sums[MOST];
  for (int64_t first = begin; first < end; first += CHUNK) {  // in float for a few rows, then in double
    std::fill_n(sums, E, 0.0f);
    for (int64_t t = first; t < std::min(end, first + CHUNK); ++t) {
      scores(logits + t * stride, o, r);
      if (recorded == nullptr) rank(bias, o, r);
      int64_t* own = index + t * K;
      float* w = weight + t * K;
      float picked = 0;
      for (int64_t k = 0; k < K; ++k) {
        int64_t e;
        if (recorded == nullptr) {
          e = best(r.keys, E);
          r.keys[e] = LOWEST;
        } else {
          e = recorded[t * K + k];
          bool wrong = e < 0 || e >= E;
          for (int64_t j = k + 1; j < K; ++j) wrong = wrong || recorded[t * K + j] == e;
          if (wrong) {
            own[k] = 0;
            w[k] = std::numeric_limits<float>::quiet_NaN();
            continue;
          }
        }
        own[k] = e;
        w[k] = r.s[e];
        picked += w[k];
        ++count[e];
      }
      for (int64_t k = 0; k < K; ++k) w[k] = (o.renormalize ? w[k] / (picked + TINY) : w[k]) * o.scale;
      const float share = 1.0f / r.whole;
      TW_SIMD
      for (int64_t e = 0; e < E; ++e) sums[e] += r.s[e] * share;
      square += double(r.lse) * r.lse;
    }
    for (int64_t e = 0; e < E; ++e) probability[e] += sums[e];
  }
}

// Calls f(chunk, begin, end) for each run of tokens, in parallel.
template <class F>
int64_t for_chunks(int64_t T, F&& f) {
  const int64_t chunks = std::min<int64_t>(16, std::max<int64_t>(1, T / CHUNK));
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t lo, int64_t hi) {
    for (int64_t c = lo; c < hi; ++c) f(c, c * T / chunks, (c + 1) * T / chunks);
  });
  return chunks;
}

void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.is_cpu() && logits.dim() == 2 && logits.size(1) >= 1 && logits.size(1) <= MOST &&
                      (logits.size(0) == 0 || logits.size(1) == 1 || logits.stride(1) == 1),
                  "tilewright: logits must be a CPU matrix of 1 to 4096 columns with contiguous rows");
}

void check_vector(const char* name, const Tensor& t, ScalarType type, int64_t elements) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == type && t.numel() == elements, "tilewright: ", name, " has the wrong dtype or size");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route_forward(Tensor logits, std::optional<Tensor> bias,
                                                                 std::optional<Tensor> recorded, int64_t k,
                                                                 bool sigmoid, bool renormalize, int64_t groups,
                                                                 int64_t topk_groups, double scale) {
  check_logits(logits);
  const int64_t T = logits.size(0), E = logits.size(1);
  STD_TORCH_CHECK(groups >= 1 && E % groups == 0 && topk_groups >= 1 && topk_groups <= groups && k >= 1 &&
                      k <= topk_groups * (E / groups),
                  "tilewright: k, groups or topk_groups do not fit ", E, " experts");
  if (bias.has_value()) check_vector("bias", *bias, ScalarType::Float, E);
  if (recorded.has_value()) check_vector("recorded", *recorded, ScalarType::Long, T * k);
  auto index = torch::stable::new_empty(logits, {T, k}, ScalarType::Long);
  auto weight = torch::stable::new_empty(logits, {T, k}, ScalarType::Float);
  auto counts = torch::stable::new_empty(logits, {E}, ScalarType::Long);
  auto balance = torch::stable::new_empty(logits, {}, ScalarType::Float);
  auto z = torch::stable::new_empty(logits, {}, ScalarType::Float);
  const Options o{T, E, k, groups, topk_groups, sigmoid, renormalize, float(scale)};
  std::vector<double> probability(size_t(16 * E)), square(16);
  std::vector<int64_t> count(size_t(16 * E));
  int64_t chunks = 0;
  int64_t* const to_index = out<int64_t>(index);
  float* const to_weight = out<float>(weight);
  const float* const b = in<float>(bias);
  const int64_t* const given = recorded.has_value() ? in<int64_t>(*recorded) : nullptr;
  dispatch(logits, [&](auto element) {
    using X = decltype(element);
    const X* const x = in<X>(logits);
    const int64_t stride = logits.stride(0);
    chunks = for_chunks(T, [&](int64_t c, int64_t begin, int64_t end) {
      Row r;
      forward_rows(begin, end, x, stride, b, given, o, r, to_index, to_weight, &probability[size_t(c * E)],
                   &count[size_t(c * E)], square[size_t(c)]);
    });
  });
  const double tokens = double(std::max<int64_t>(T, 1));
  double shares = 0, squares = 0;
  int64_t* const total = out<int64_t>(counts);
  for (int64_t e = 0; e < E; ++e) {
    double p = 0;
    total[e] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      p += probability[size_t(c * E + e)];
      total[e] += count[size_t(c * E + e)];
    }
    shares += double(total[e]) / tokens * (p / tokens);
  }
  for (int64_t c = 0; c < chunks; ++c) squares += square[size_t(c)];
  *out<float>(balance) = float(double(E) * shares);
  *out<float>(z) = float(squares / tokens);
  return {weight, index, counts, balance, z};
}

Tensor route_backward(Tensor g_weight, Tensor g_balance, Tensor g_z, Tensor logits, Tensor index, Tensor counts,
                      int64_t K, bool sigmoid, bool renormalize, int64_t groups, int64_t topk_groups,
                      double scale) {
  check_logits(logits);
  const int64_t T = logits.size(0), E = logits.size(1);
  check_vector("index", index, ScalarType::Long, T * K);
  check_vector("g_weight", g_weight, ScalarType::Float, T * K);
  check_vector("g_balance", g_balance, ScalarType::Float, 1);
  check_vector("g_z", g_z, ScalarType::Float, 1);
  check_vector("counts", counts, ScalarType::Long, E);
  Tensor d = torch::stable::new_empty(logits, {T, E});
  const Options o{T, E, K, groups, topk_groups, sigmoid, renormalize, float(scale)};
  const int64_t* const chosen = in<int64_t>(index);
  for (int64_t i = 0; i < T * K; ++i)
    STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < E, "tilewright: index must be below ", E, ", got ", chosen[i]);
  const float* const g = in<float>(g_weight);
  std::vector<float> balance(static_cast<size_t>(E));
  for (int64_t e = 0; e < E; ++e)
    balance[size_t(e)] = float(double(*in<float>(g_balance)) * double(E) / double(T) *
                               (double(in<int64_t>(counts)[e]) / double(T)));
  const float* const a = balance.data();
  const float z = T > 0 ? float(2.0 * double(*in<float>(g_z)) / double(T)) : 0.0f;
  dispatch(logits, [&](auto element) {
    using X = decltype(element);
    const X* const from = in<X>(logits);
    const int64_t stride = logits.stride(0);
    X* const to = out<X>(d);
    torch::stable::parallel_for(0, T, grain(8 * E), [&](int64_t begin, int64_t end) {
      Row r;
      float ds[MOST];  // gradient of the scores, of which q is the softmax
      for (int64_t t = begin; t < end; ++t) {
        scores(from + t * stride, o, r);
        const int64_t* own = chosen + t * K;
        const float* gw = g + t * K;
        float dot = 0, picked = TINY;
        for (int64_t k = 0; k < K; ++k) {
          dot += gw[k] * r.s[own[k]];
          picked += r.s[own[k]];
        }
        float mean = 0;
        if (sigmoid) {
          TW_SIMD_SUM(mean)
          for (int64_t e = 0; e < E; ++e) mean += r.s[e] * a[e];
          mean /= r.whole;
        }
        const float inverse = 1.0f / r.whole;
        TW_SIMD
        for (int64_t e = 0; e < E; ++e) ds[e] = (a[e] - mean) * inverse;
        for (int64_t k = 0; k < K; ++k)
          ds[own[k]] += o.scale * (renormalize ? (gw[k] - dot / picked) / picked : gw[k]);
        X* y = to + t * E;
        const float through = z * r.lse;
        if (sigmoid) {
          const float lse = r.lse;
          TW_SIMD
          for (int64_t e = 0; e < E; ++e)  // 1 - s would cancel
            store(y + e, ds[e] * r.s[e] * sigmoid_(-r.x[e]) + through * exp_(r.x[e] - lse));
        } else {
          float along = 0;
          TW_SIMD_SUM(along)
          for (int64_t e = 0; e < E; ++e) along += r.s[e] * ds[e];
          TW_SIMD
          for (int64_t e = 0; e < E; ++e) store(y + e, r.s[e] * (ds[e] - along + through));
        }
      }
    });
  });
  return d;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def(
      "route_cpp_forward(Tensor logits, Tensor? bias, Tensor? recorded, int k, bool sigmoid, bool renormalize, int groups, "
      "int topk_groups, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "route_cpp_backward(Tensor g_weight, Tensor g_balance, Tensor g_z, Tensor logits, Tensor index, Tensor counts, "
      "int k, bool sigmoid, bool renormalize, int groups, int topk_groups, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("route_cpp_forward", TORCH_BOX(&tw::route_forward));
  m.impl("route_cpp_backward", TORCH_BOX(&tw::route_backward));
}
