// RMSNorm of each head of q and k and rotary embedding, from a merged projection, on the CPU. The definition is
// tilewright/ops/rope/qk_norm_rope.py.
//
// qkv is [B, S, (HQ + 2 HK) D] with a contiguous last dimension; q, k, v and their gradients are [B, H, S, D] with any
// other strides. q and k may be those in qkv. Sums as in rmsnorm.cpp: a head's in float over SUM_BLOCK elements, the
// weights' gradients in float over about ROWS_A_SUM heads, both in double beyond. Between the norm and the rotation a
// head is stored in float.
#include <algorithm>

#include "cpu/rmsnorm.h"
#include "cpu/rope.h"

namespace tw {
namespace {

template <class X, class Y>
TW_INLINE void rotate(const X* x, Y* y, const float* c, const float* s, int64_t half, float sign, bool interleaved) {
  if (interleaved)
    rotate_interleaved(x, y, c, s, half, sign);
  else
    rotate_half_split(x, y, c, s, half, sign);
}

struct Heads {
  int64_t D, half;
  double eps;
  bool interleaved;
};

// One head: y, and 1 / rms of x with weights w. room: D elements.
template <class T>
float write_head(const T* x, T* y, const float* w, const float* c, const float* s, float* room, Heads n) {
  if (w == nullptr) {
    rotate(x, y, c, s, n.half, 1.0f, n.interleaved);
    if (x != y) std::copy(x + 2 * n.half, x + n.D, y + 2 * n.half);
    return 0;
  }
  double total = 0;
  for (int64_t first = 0; first < n.D; first += SUM_BLOCK) {
    const int64_t last = std::min(n.D, first + SUM_BLOCK);
    float ss = 0;
    TW_SIMD_SUM(ss)
    for (int64_t i = first; i < last; ++i) ss += load(x[i]) * load(x[i]);
    total += ss;
  }
  const float r = float(1.0 / std::sqrt(total / double(n.D) + n.eps));
  TW_SIMD
  for (int64_t i = 0; i < n.D; ++i) room[i] = load(x[i]) * r * w[i];
  rotate(room, y, c, s, n.half, 1.0f, n.interleaved);
  TW_SIMD
  for (int64_t i = 2 * n.half; i < n.D; ++i) store(y + i, room[i]);
  return r;
}

// dx of one head with 1 / rms r, and its contribution to dw.
template <class T>
void head_gradient(const T* dy, const T* x, T* dx, const float* w, float* dw, const float* c, const float* s, float r,
                   float* room, Heads n) {
  if (w == nullptr) {
    rotate(dy, dx, c, s, n.half, -1.0f, n.interleaved);
    std::copy(dy + 2 * n.half, dy + n.D, dx + 2 * n.half);
    return;
  }
  rotate(dy, room, c, s, n.half, -1.0f, n.interleaved);
  TW_SIMD
  for (int64_t i = 2 * n.half; i < n.D; ++i) room[i] = load(dy[i]);
  double total = 0;
  for (int64_t first = 0; first < n.D; first += SUM_BLOCK) {
    const int64_t last = std::min(n.D, first + SUM_BLOCK);
    float dot = 0;
    TW_SIMD_SUM(dot)
    for (int64_t i = first; i < last; ++i) {
      const float xi = load(x[i]) * r;  // first: where r is 0, since the squares overflow, so may the sum
      dot += room[i] * w[i] * xi;
      dw[i] += room[i] * xi;
    }
    total += dot;
  }
  const float along = float(total * r / double(n.D));
  TW_SIMD
  for (int64_t i = 0; i < n.D; ++i) store(dx + i, r * (room[i] * w[i] - load(x[i]) * along));
}

// The loops trust sizes and element types, so everything is checked first. `like`: the element type.
void check_heads(const char* name, const Tensor& t, int64_t B, int64_t H, int64_t S, int64_t D, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 4 && t.size(0) == B && t.size(1) == H && t.size(2) == S && t.size(3) == D &&
                      t.scalar_type() == like.scalar_type(),
                  "tilewright: ", name, " must be [B, heads, S, D], all gradients of one dtype");
}

std::vector<float> weights(const std::optional<Tensor>& w, int64_t D, double offset) {
  if (!w.has_value()) return {};
  check_row_major("weights", *w);
  STD_TORCH_CHECK(w->dim() == 1 && w->size(0) == D, "tilewright: weights must be [D]");
  return as_float(*w, float(offset));
}

struct HeadNorm {
  std::optional<Tensor> q_weight, k_weight;
  double eps, offset;
  bool given() const { return q_weight.has_value(); }
};

struct Rotation {
  Tensor cos, sin;
  std::optional<Tensor> positions;
  bool interleaved;
};

// q and k may be those in qkv.   rstd: [B, S, HQ + HK] float, or none.
void write(const Tensor& qkv, const HeadNorm& norm, const Rotation& rotation, const Tensor& q, const Tensor& k,
           const std::optional<Tensor>& rstd) {
  const int64_t B = q.size(0), HQ = q.size(1), S = q.size(2), D = q.size(3), HK = k.size(1);
  check_tables(B, S, D, rotation.cos, rotation.sin, rotation.positions);
  STD_TORCH_CHECK(norm.given() == norm.k_weight.has_value(), "tilewright: give both weights or none");
  const auto qw = weights(norm.q_weight, D, norm.offset), kw = weights(norm.k_weight, D, norm.offset);
  const Heads n{D, rotation.cos.size(1), norm.eps, rotation.interleaved};
  const int64_t* pos = in<int64_t>(rotation.positions);
  const float *cs = in<float>(rotation.cos), *sn = in<float>(rotation.sin);
  float* stat = rstd.has_value() ? out<float>(*rstd) : nullptr;
  const int64_t xs[2] = {qkv.stride(0), qkv.stride(1)};
  dispatch(qkv, [&](auto e) {
    using T = decltype(e);
    const T* from = in<T>(qkv);
    torch::stable::parallel_for(0, B * S, grain((HQ + HK) * D), [&](int64_t lo, int64_t hi) {
      std::vector<float> room(D);
      for (int64_t t = lo; t < hi; ++t) {
        const int64_t b = t / S, i = t % S, p = pos != nullptr ? pos[t] : i;
        const float *c = cs + p * n.half, *s = sn + p * n.half;
        const T* x = from + b * xs[0] + i * xs[1];
        auto heads = [&](const Tensor& result, int64_t H, const std::vector<float>& w, float* to_stat) {
          T* y = out<T>(result) + b * result.stride(0) + i * result.stride(2);
          const float* own_w = w.empty() ? nullptr : w.data();
          for (int64_t h = 0; h < H; ++h) {
            const float r = write_head(x, y + h * result.stride(1), own_w, c, s, room.data(), n);
            if (to_stat != nullptr) to_stat[h] = r;
            x += D;
          }
        };
        float* own = stat != nullptr ? stat + t * (HQ + HK) : nullptr;
        heads(q, HQ, qw, own);
        heads(k, HK, kw, own != nullptr ? own + HQ : nullptr);
      }
    });
  });
}

// D of heads in qkv.
int64_t width_of(const Tensor& qkv, int64_t HQ, int64_t HK) {
  STD_TORCH_CHECK(qkv.is_cpu() && qkv.dim() == 3 && HQ > 0 && HK > 0 && qkv.size(2) % (HQ + 2 * HK) == 0 &&
                      (qkv.numel() == 0 || qkv.stride(2) == 1),
                  "tilewright: qkv must be a CPU tensor [B, S, (heads + 2 kv_heads) D] with a contiguous last dimension");
  return qkv.size(2) / (HQ + 2 * HK);
}

std::tuple<Tensor, Tensor, Tensor> qk_norm_rope(Tensor qkv, int64_t HQ, int64_t HK, std::optional<Tensor> q_weight,
                                                std::optional<Tensor> k_weight, double eps, double offset, Tensor cos,
                                                Tensor sin, std::optional<Tensor> positions, bool interleaved) {
  const int64_t D = width_of(qkv, HQ, HK), B = qkv.size(0), S = qkv.size(1);
  auto heads = [&](int64_t H) {
    return huge(torch::stable::transpose(torch::stable::new_empty(qkv, {B, S, H, D}), 1, 2));
  };
  const Tensor q = heads(HQ), k = heads(HK);
  std::optional<Tensor> rstd;
  if (q_weight.has_value()) rstd = torch::stable::new_empty(qkv, {B, S, HQ + HK}, ScalarType::Float);
  write(qkv, {q_weight, k_weight, eps, offset}, {cos, sin, positions, interleaved}, q, k, rstd);
  return {q, k, rstd.value_or(Tensor())};
}

// Over q and k in qkv.
void qk_norm_rope_(Tensor qkv, int64_t HQ, int64_t HK, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                   double eps, double offset, Tensor cos, Tensor sin, std::optional<Tensor> positions,
                   bool interleaved) {
  const int64_t D = width_of(qkv, HQ, HK);
  Tensor heads = torch::stable::view(qkv, {qkv.size(0), qkv.size(1), HQ + 2 * HK, D});
  auto part = [&](int64_t first, int64_t H) {
    return torch::stable::transpose(torch::stable::narrow(heads, 2, first, H), 1, 2);
  };
  write(qkv, {q_weight, k_weight, eps, offset}, {cos, sin, positions, interleaved}, part(0, HQ), part(HQ, HK), {});
}

std::tuple<Tensor, Tensor, Tensor> qk_norm_rope_backward(std::optional<Tensor> dq, std::optional<Tensor> dk,
                                                         std::optional<Tensor> dv, std::optional<Tensor> qkv,
                                                         std::optional<Tensor> rstd, int64_t HQ, int64_t HK,
                                                         std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                                                         double eps, double offset, Tensor cos, Tensor sin,
                                                         std::optional<Tensor> positions, bool interleaved) {
  std::optional<Tensor>* given[3] = {&dq, &dk, &dv};
  const int64_t H[3] = {HQ, HK, HK};
  const char* names[3] = {"dq", "dk", "dv"};
  const Tensor* like = nullptr;
  for (auto* d : given)
    if (like == nullptr && d->has_value()) like = &**d;
  STD_TORCH_CHECK(like != nullptr && like->dim() == 4 && HQ > 0 && HK > 0,
                  "tilewright: one of dq, dk and dv must be given, [B, heads, S, D]");
  const int64_t B = like->size(0), S = like->size(2), D = like->size(3), W = (HQ + 2 * HK) * D;
  for (int j = 0; j < 3; ++j) {
    if (!given[j]->has_value()) continue;
    check_heads(names[j], **given[j], B, H[j], S, D, *like);
    *given[j] = last_contiguous(**given[j]);
  }
  check_tables(B, S, D, cos, sin, positions);
  const bool norm = q_weight.has_value();
  STD_TORCH_CHECK(k_weight.has_value() == norm && rstd.has_value() == norm && qkv.has_value() == norm,
                  "tilewright: both weights, qkv and rstd are needed, or none");
  int64_t xs[2] = {0, 0};
  if (norm) {
    STD_TORCH_CHECK(width_of(*qkv, HQ, HK) == D && qkv->size(0) == B && qkv->size(1) == S &&
                        qkv->scalar_type() == like->scalar_type(),
                    "tilewright: qkv must have the gradients' sizes and dtype");
    check_row_major("rstd", *rstd);
    STD_TORCH_CHECK(rstd->scalar_type() == ScalarType::Float && rstd->numel() == B * S * (HQ + HK),
                    "tilewright: rstd must be float32 with one element for each head of q and k");
    xs[0] = qkv->stride(0);
    xs[1] = qkv->stride(1);
  }
  const auto qw = weights(q_weight, D, offset), kw = weights(k_weight, D, offset);
  const Heads n{D, cos.size(1), eps, interleaved};
  const int64_t* pos = in<int64_t>(positions);
  const float *cs = in<float>(cos), *sn = in<float>(sin), *stat = in<float>(rstd);
  const Tensor dqkv = huge(torch::stable::new_empty(*like, {B, S, W}));
  Tensor dw[2];
  if (norm) dw[0] = torch::stable::empty_like(*q_weight), dw[1] = torch::stable::empty_like(*k_weight);
  dispatch(dqkv, [&](auto e) {
    using T = decltype(e);
    const T* xall = in<T>(qkv);
    T* to = out<T>(dqkv);
    auto token = [&](int64_t t, float* room, std::vector<float>* part) {
      const int64_t b = t / S, i = t % S, p = pos != nullptr ? pos[t] : i;
      const float *c = cs + p * n.half, *s = sn + p * n.half;
      T* dx = to + t * W;
      int64_t at = 0;  // of a head in its token
      for (int j = 0; j < 3; ++j) {
        if (!given[j]->has_value()) {
          std::fill(dx + at * D, dx + (at + H[j]) * D, T{});
          at += H[j];
          continue;
        }
        const Tensor& d = **given[j];
        const T* dy = in<T>(d) + b * d.stride(0) + i * d.stride(2);
        for (int64_t h = 0; h < H[j]; ++h, ++at) {
          const T* own = dy + h * d.stride(1);
          if (j == 2)
            std::copy(own, own + D, dx + at * D);
          else if (norm)
            head_gradient(own, xall + b * xs[0] + i * xs[1] + at * D, dx + at * D, (j == 0 ? qw : kw).data(),
                          part[j].data(), c, s, stat[t * (HQ + HK) + at], room, n);
          else
            head_gradient<T>(own, nullptr, dx + at * D, nullptr, nullptr, c, s, 0, room, n);
        }
      }
    };
    if (!norm) {
      torch::stable::parallel_for(0, B * S, grain(W), [&](int64_t lo, int64_t hi) {
        for (int64_t t = lo; t < hi; ++t) token(t, nullptr, nullptr);
      });
      return;
    }
    const int64_t chunks = row_chunks(B * S), per = (B * S + chunks - 1) / chunks;
    const int64_t a_sum = std::max<int64_t>(1, ROWS_A_SUM / std::max(HQ, HK));
    std::vector<double> total[2] = {std::vector<double>(chunks * D, 0.0), std::vector<double>(chunks * D, 0.0)};
    torch::stable::parallel_for(0, chunks, B * S * W < 32768 ? chunks : 1, [&](int64_t lo, int64_t hi) {
      std::vector<float> room(D), part[2] = {std::vector<float>(D, 0.0f), std::vector<float>(D, 0.0f)};
      for (int64_t k = lo; k < hi; ++k) {
        const int64_t end = std::min(B * S, (k + 1) * per);
        for (int64_t first = k * per; first < end; first += a_sum) {
          for (int64_t t = first; t < std::min(end, first + a_sum); ++t) token(t, room.data(), part);
          for (int j = 0; j < 2; ++j) flush(part[j], total[j].data() + k * D);
        }
      }
    });
    for (int j = 0; j < 2; ++j) add_chunks(total[j], dw[j]);
  });
  return {dqkv, dw[0], dw[1]};
}

}  // namespace
}  // namespace tw

#define TW_OPTIONS                                                                                               \
  "int q, int kv, Tensor? q_weight, Tensor? k_weight, float eps, float offset, Tensor cos, Tensor sin, Tensor? " \
  "positions, bool interleaved"

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("qk_norm_rope_cpp(Tensor qkv, " TW_OPTIONS ") -> (Tensor, Tensor, Tensor)");
  m.def("qk_norm_rope_cpp_(Tensor(a!) qkv, " TW_OPTIONS ") -> ()");
  m.def("qk_norm_rope_cpp_backward(Tensor? dq, Tensor? dk, Tensor? dv, Tensor? qkv, Tensor? rstd, " TW_OPTIONS
        ") -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("qk_norm_rope_cpp", TORCH_BOX(&tw::qk_norm_rope));
  m.impl("qk_norm_rope_cpp_", TORCH_BOX(&tw::qk_norm_rope_));
  m.impl("qk_norm_rope_cpp_backward", TORCH_BOX(&tw::qk_norm_rope_backward));
}
