// The gated delta rule on the CPU, a chunk of tokens at a time. The definition, with the formulas of a chunk and their
// names, is tilewright/ops/linear_attention/gated_delta_rule.py; tilewright/kernels/linear_attention/
// gated_delta_rule_triton.py says how the backward follows from them.
//
// A task of the forward is a sequence and a value head, one of the backward a sequence and a key head, with the value
// heads that it serves one after another: nothing depends on the number of threads. Everything between loads and stores
// is float32. The forward saves G and the inverses; the backward computes the states once more.
#include <algorithm>

#include "cpu/sequences.h"
#include "cpu/small_product.h"

namespace tw {
namespace {

constexpr float L2_EPS = 1e-6f;

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Rows of [B, S, H, D] of which the last dimension is contiguous.
template <class T>
struct Rows {
  T* data;
  int64_t batch, token, head;
  Rows(const Tensor& t, T* p) : data(p), batch(t.stride(0)), token(t.stride(1)), head(t.stride(2)) {}
  T* at(int64_t b, int64_t s, int64_t h) const { return data + b * batch + s * token + h * head; }
};

struct Shape {
  int64_t B, S, HK, HV, DK, DV, C, group, LK, LV, LC;  // LK, LV, LC: row lengths of buffers
  std::vector<Sequence> sequences;
  int64_t N;

  int64_t batch(int64_t n) const { return sequences.size() == 1 && N == B ? n : 0; }
  Sequence sequence(int64_t n) const { return sequences.size() == 1 ? sequences[0] : sequences[n]; }
};

Tensor with_contiguous_rows(const Tensor& t) {
  return t.size(3) <= 1 || t.stride(3) == 1 ? t : torch::stable::contiguous(t);
}

void check_numbers(const char* name, const Tensor& t, const Tensor& v) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 3 && t.size(0) == v.size(0) &&
                      t.size(1) == v.size(1) && t.size(2) == v.size(2),
                  "tilewright: ", name, " must be float32 [B, S, HV]");
}

void check_states(const char* name, const Tensor& t, const Shape& n) {
  check_row_major(name, t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 4 && t.size(0) == n.N && t.size(1) == n.HV &&
                      t.size(2) == n.DK && t.size(3) == n.DV,
                  "tilewright: ", name, " must be float32 [N, HV, DK, DV]");
}

Shape describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
               const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens) {
  STD_TORCH_CHECK(q.is_cpu() && q.dim() == 4, "tilewright: q must be a CPU tensor [B, S, HK, DK]");
  bool same = k.is_cpu() && k.dim() == 4 && k.scalar_type() == q.scalar_type();
  for (int64_t d = 0; same && d < 4; ++d) same = k.size(d) == q.size(d);
  STD_TORCH_CHECK(same, "tilewright: k must have q's shape and dtype");
  STD_TORCH_CHECK(v.is_cpu() && v.dim() == 4 && v.scalar_type() == q.scalar_type() && v.size(0) == q.size(0) &&
                      v.size(1) == q.size(1) && q.size(2) > 0 && v.size(2) % q.size(2) == 0,
                  "tilewright: v must be [B, S, HV, DV] of q's dtype, with HV a multiple of HK");
  Shape n{q.size(0), q.size(1), q.size(2), v.size(2), q.size(3), v.size(3)};
  // `chunk` in kernels/linear_attention/operators.py
  n.C = q.scalar_type() == ScalarType::Float ? 16 : n.DK <= 128 ? 64 : 32;
  n.group = n.HV / n.HK;
  n.LK = padded(n.DK);
  n.LV = padded(n.DV);
  n.LC = padded(n.C);
  n.sequences = sequences(cu_seqlens, n.B, n.S);
  n.N = cu_seqlens.has_value() ? int64_t(n.sequences.size()) : n.B;
  check_numbers("beta", beta, v);
  if (initial_state.has_value()) check_states("initial_state", *initial_state, n);
  return n;
}

// Rows of one head in float, `row_length` apart; with `inverse` divided by their norms, whose inverses it receives.
template <class T>
void load_rows(const Rows<const T>& x, int64_t b, int64_t s, int64_t h, int64_t rows, int64_t D, float* to,
               int64_t row_length, float* inverse = nullptr, float scale = 1) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* const from = x.at(b, s + i, h);
    float* const row = to + i * row_length;
    float factor = scale;
    if (inverse != nullptr) {
      float squares = 0;
      TW_SIMD_SUM(squares)
      for (int64_t d = 0; d < D; ++d) squares += load(from[d]) * load(from[d]);
      inverse[i] = 1.0f / std::sqrt(squares + L2_EPS);
      factor *= inverse[i];
    }
    TW_SIMD
    for (int64_t d = 0; d < D; ++d) row[d] = load(from[d]) * factor;
  }
}

TW_INLINE void scale_row(float* row, int64_t n, float by) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) row[i] *= by;
}

TW_INLINE float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  TW_SIMD_SUM(sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// exp(G_i - G_j) for j <= i, else 0.
void between_rows(const float* G, int64_t rows, float* to, int64_t row_length) {
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = to + i * row_length;
    TW_SIMD
    for (int64_t j = 0; j <= i; ++j) row[j] = exp_(G[i] - G[j]);
    for (int64_t j = i + 1; j < rows; ++j) row[j] = 0;
  }
}

// What the passes over chunks have in common: buffers of a task.
struct Work {
  std::vector<float> q, k, kT, v, read, V, kk, qk, between, T, H, G, r, iq, ik;
  explicit Work(const Shape& n)
      : q(n.C * n.LK), k(n.C * n.LK), kT(n.DK * n.LC), v(n.C * n.LV), read(n.C * n.LV), V(n.C * n.LV), kk(n.C * n.LC),
        qk(n.C * n.LC), between(n.C * n.LC), T(n.C * n.LC), H(n.DK * n.LV), G(n.C), r(n.C), iq(n.C), ik(n.C) {}
};

void load_state(const Shape& n, const std::optional<Tensor>& states, int64_t sequence, int64_t h, float* H) {
  const float* const from = states.has_value() ? in<float>(*states) + (sequence * n.HV + h) * n.DK * n.DV : nullptr;
  for (int64_t d = 0; d < n.DK; ++d) {
    float* const row = H + d * n.LV;
    if (from == nullptr) std::fill(row, row + n.LV, 0.0f);
    else std::copy(from + d * n.DV, from + (d + 1) * n.DV, row);
  }
}

void store_state(const Shape& n, const float* H, int64_t sequence, int64_t h, float* states) {
  float* const to = states + (sequence * n.HV + h) * n.DK * n.DV;
  for (int64_t d = 0; d < n.DK; ++d) std::copy(H + d * n.LV, H + d * n.LV + n.DV, to + d * n.DV);
}

// V = T beta (v - exp(G) k H), from k, v, T and G in `work`; H becomes the state at the end of the chunk.
void advance(const Shape& n, Work& work, const float* beta, int64_t rows, float* V) {
  float* const right = work.read.data();
  product(rows, n.DV, n.DK, {work.k.data(), n.LK, 1}, work.H.data(), n.LV, right, n.LV, false);
  for (int64_t i = 0; i < rows; ++i) {
    const float e = exp_(work.G[i]), by = beta[i * n.HV];
    float* const row = right + i * n.LV;
    const float* const v = work.v.data() + i * n.LV;
    TW_SIMD
    for (int64_t d = 0; d < n.DV; ++d) row[d] = by * (v[d] - e * row[d]);
  }
  product(rows, n.DV, rows, {work.T.data(), n.LC, 1}, right, n.LV, V, n.LV, false);
}

// exp(G_last) H + sum_j exp(G_last - G_j) k_j V_j^T; work.read is used.
void end_chunk(const Shape& n, Work& work, int64_t rows, const float* V) {
  const float last = exp_(work.G[rows - 1]);
  for (int64_t i = 0; i < rows; ++i) {
    const float by = exp_(work.G[rows - 1] - work.G[i]);
    const float* const from = V + i * n.LV;
    float* const to = work.read.data() + i * n.LV;
    TW_SIMD
    for (int64_t d = 0; d < n.DV; ++d) to[d] = from[d] * by;
  }
  scale_row(work.H.data(), n.DK * n.LV, last);
  product(n.DK, n.DV, rows, {work.k.data(), 1, n.LK}, work.read.data(), n.LV, work.H.data(), n.LV, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                                                            std::optional<Tensor> initial_state,
                                                            std::optional<Tensor> cu_seqlens, double scale,
                                                            bool normalize) {
  const Shape n = describe(q, k, v, beta, initial_state, cu_seqlens);
  check_numbers("g", g, v);
  Tensor o = huge(torch::stable::new_empty(v, {n.B, n.S, n.HV, n.DV}));
  Tensor state = torch::stable::new_empty(v, {n.N, n.HV, n.DK, n.DV}, ScalarType::Float);
  Tensor decay = torch::stable::new_empty(v, {n.B, n.S, n.HV}, ScalarType::Float);
  Tensor solved = huge(torch::stable::new_empty(v, {n.B, n.S, n.HV, n.C}));
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  dispatch(q, [&](auto element) {
    using E = decltype(element);
    const Rows<const E> q_rows(q, in<E>(q)), k_rows(k, in<E>(k)), v_rows(v, in<E>(v));
    E *const to = out<E>(o), *const inverses = out<E>(solved);
    float *const decays = out<float>(decay), *const states = out<float>(state);
    const float *const gates = in<float>(g), *const betas = in<float>(beta);
    torch::stable::parallel_for(0, n.N * n.HV, 1, [&](int64_t lo, int64_t hi) {
      Work work(n);
      std::vector<float> result(n.C * n.LV);
      for (int64_t task = lo; task < hi; ++task) {
        const int64_t sequence = task / n.HV, h = task % n.HV, b = n.batch(sequence), of_k = h / n.group;
        const Sequence tokens = n.sequence(sequence);
        load_state(n, initial_state, sequence, h, work.H.data());
        for (int64_t s = tokens.begin; s < tokens.end; s += n.C) {
          const int64_t rows = std::min(n.C, tokens.end - s), at = (b * n.S + s) * n.HV + h;
          load_rows(q_rows, b, s, of_k, rows, n.DK, work.q.data(), n.LK, normalize ? work.iq.data() : nullptr,
                    float(scale));
          load_rows(k_rows, b, s, of_k, rows, n.DK, work.k.data(), n.LK, normalize ? work.ik.data() : nullptr);
          load_rows(v_rows, b, s, h, rows, n.DV, work.v.data(), n.LV);
          float sum = 0;
          for (int64_t i = 0; i < rows; ++i) decays[at + i * n.HV] = work.G[i] = sum += gates[at + i * n.HV];
          transpose(rows, n.DK, work.k.data(), n.LK, work.kT.data(), n.LC);
          product(rows, rows, n.DK, {work.k.data(), n.LK, 1}, work.kT.data(), n.LC, work.kk.data(), n.LC, false);
          product(rows, rows, n.DK, {work.q.data(), n.LK, 1}, work.kT.data(), n.LC, work.qk.data(), n.LC, false);
          between_rows(work.G.data(), rows, work.between.data(), n.LC);
          // (I + A)^-1, row by row: T_i = e_i - sum_j A_ij T_j.
          for (int64_t i = 0; i < rows; ++i) {
            float* const row = work.T.data() + i * n.LC;
            const float *const near = work.between.data() + i * n.LC, *const products = work.kk.data() + i * n.LC;
            std::fill(row, row + n.LC, 0.0f);
            const float by = betas[at + i * n.HV];
            for (int64_t j = 0; j < i; ++j) {
              const float a = by * near[j] * products[j];
              const float* const other = work.T.data() + j * n.LC;
              TW_SIMD
              for (int64_t c = 0; c <= j; ++c) row[c] -= a * other[c];
            }
            row[i] = 1;
            E* const stored = inverses + (at + i * n.HV) * n.C;
            for (int64_t c = 0; c < n.C; ++c) store(stored + c, row[c]);
            TW_SIMD
            for (int64_t c = 0; c < rows; ++c) work.qk[i * n.LC + c] *= near[c];
          }
          advance(n, work, betas + at, rows, work.V.data());
          product(rows, n.DV, n.DK, {work.q.data(), n.LK, 1}, work.H.data(), n.LV, result.data(), n.LV, false);
          for (int64_t i = 0; i < rows; ++i) scale_row(result.data() + i * n.LV, n.DV, exp_(work.G[i]));
          product(rows, n.DV, rows, {work.qk.data(), n.LC, 1}, work.V.data(), n.LV, result.data(), n.LV, true);
          for (int64_t i = 0; i < rows; ++i) {
            E* const stored = to + (at + i * n.HV) * n.DV;
            TW_SIMD
            for (int64_t d = 0; d < n.DV; ++d) store(stored + d, result[i * n.LV + d]);
          }
          end_chunk(n, work, rows, work.V.data());
        }
        store_state(n, work.H.data(), sequence, h, states);
      }
    });
  });
  return {o, state, decay, solved};
}

// Buffers of the backward beside those of the forward. Names as in the formulas; `both`: rows of do, then those of X.
struct Gradients {
  std::vector<float> both, bothT, of_both, pairs, VT, dV, dH, dHt, of_k, P, dqk, dkk, dG, dbeta;
  explicit Gradients(const Shape& n)
      : both(2 * n.C * n.LV), of_both(2 * n.C * n.LK), pairs(2 * n.C * n.LC), VT(n.DV * n.LC), dV(n.C * n.LV),
        dH(n.DK * n.LV), dHt(n.DV * n.LK), of_k(n.C * n.LK), P(n.C * n.LC), dqk(n.C * n.LC), dkk(n.C * n.LC), dG(n.C),
        dbeta(n.C) {}
};

// One chunk, from the gradient of the state at its end, which becomes that of the state at its start. In `work`: q, k, v,
// T, G.   Ht: the state at its start, transposed.   V: as in the forward.   dq, dk: of the chunk's rows, added to.
// Afterwards to.dV has the gradient of v.
void chunk_gradients(const Shape& n, Work& work, Gradients& to, const float* beta, int64_t rows, const float* Ht,
                     const float* V, float* dq, float* dk) {
  const float G_last = work.G[rows - 1], last = exp_(G_last);
  float *const dout = to.both.data(), *const X = dout + rows * n.LV;
  transpose(rows, n.DK, work.k.data(), n.LK, work.kT.data(), n.LC);
  product(rows, rows, n.DK, {work.k.data(), n.LK, 1}, work.kT.data(), n.LC, work.kk.data(), n.LC, false);
  product(rows, rows, n.DK, {work.q.data(), n.LK, 1}, work.kT.data(), n.LC, work.qk.data(), n.LC, false);
  between_rows(work.G.data(), rows, work.between.data(), n.LC);
  for (int64_t i = 0; i < rows; ++i) {
    TW_SIMD
    for (int64_t j = 0; j < rows; ++j) to.P[i * n.LC + j] = work.qk[i * n.LC + j] * work.between[i * n.LC + j];
  }
  transpose(n.DK, n.DV, to.dH.data(), n.LV, to.dHt.data(), n.LK);

  product(rows, n.DV, n.DK, {work.k.data(), n.LK, 1}, to.dH.data(), n.LV, to.dV.data(), n.LV, false);
  for (int64_t i = 0; i < rows; ++i) {
    work.r[i] = exp_(G_last - work.G[i]);
    scale_row(to.dV.data() + i * n.LV, n.DV, work.r[i]);
  }
  product(rows, n.DV, rows, {to.P.data(), 1, n.LC}, dout, n.LV, to.dV.data(), n.LV, true);
  product(rows, n.DV, rows, {work.T.data(), 1, n.LC}, to.dV.data(), n.LV, X, n.LV, false);

  product(2 * rows, n.DK, n.DV, {dout, n.LV, 1}, Ht, n.LK, to.of_both.data(), n.LK, false);
  product(rows, n.DK, n.DV, {V, n.LV, 1}, to.dHt.data(), n.LK, to.of_k.data(), n.LK, false);
  transpose(rows, n.DV, V, n.LV, to.VT.data(), n.LC);
  product(2 * rows, rows, n.DV, {dout, n.LV, 1}, to.VT.data(), n.LC, to.pairs.data(), n.LC, false);

  // The gradients of G and beta, and of the products q k and k k.
  std::fill(to.dG.begin(), to.dG.end(), 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const float *const near = work.between.data() + i * n.LC, *const dp = to.pairs.data() + i * n.LC;
    const float *const xv = to.pairs.data() + (rows + i) * n.LC, *const qk = work.qk.data() + i * n.LC;
    const float* const kk = work.kk.data() + i * n.LC;
    float *const dqk = to.dqk.data() + i * n.LC, *const dkk = to.dkk.data() + i * n.LC, *const dG = to.dG.data();
    const float by = beta[i * n.HV];
    float of_beta = 0, of_row = 0;
    TW_SIMD_SUM2(of_beta, of_row)
    for (int64_t j = 0; j < rows; ++j) {
      const float p = j <= i ? dp[j] * near[j] : 0.0f, a = j < i ? -xv[j] * near[j] : 0.0f;
      const float both = p * qk[j] + by * a * kk[j];
      dqk[j] = p;
      dkk[j] = by * a;
      of_beta += a * kk[j];
      of_row += both;
      dG[j] -= both;
    }
    to.dG[i] += of_row;
    to.dbeta[i] = of_beta;
  }
  float of_last = 0;
  for (int64_t d = 0; d < n.DV; ++d) of_last += dot(Ht + d * n.LK, to.dHt.data() + d * n.LK, n.DK);
  of_last *= last;
  for (int64_t i = 0; i < rows; ++i) {
    const float e = exp_(work.G[i]), by = beta[i * n.HV], r = work.r[i];
    const float *const q = work.q.data() + i * n.LK, *const k = work.k.data() + i * n.LK;
    const float* const of_q = to.of_both.data() + i * n.LK;
    const float *const of_a = to.of_both.data() + (rows + i) * n.LK, *const of_k = to.of_k.data() + i * n.LK;
    const float to_end = r * dot(k, of_k, n.DK), read = -e * dot(k, of_a, n.DK);
    to.dbeta[i] += read + dot(X + i * n.LV, work.v.data() + i * n.LV, n.DV);
    to.dG[i] += e * dot(q, of_q, n.DK) - to_end + by * read;
    of_last += to_end;
    float *const dq_row = dq + i * n.LK, *const dk_row = dk + i * n.LK;
    TW_SIMD
    for (int64_t d = 0; d < n.DK; ++d) {
      dq_row[d] += e * of_q[d];
      dk_row[d] += r * of_k[d] - e * by * of_a[d];
    }
  }
  to.dG[rows - 1] += of_last;
  product(rows, n.DK, rows, {to.dqk.data(), n.LC, 1}, work.k.data(), n.LK, dq, n.LK, true);
  product(rows, n.DK, rows, {to.dqk.data(), 1, n.LC}, work.q.data(), n.LK, dk, n.LK, true);
  product(rows, n.DK, rows, {to.dkk.data(), n.LC, 1}, work.k.data(), n.LK, dk, n.LK, true);
  product(rows, n.DK, rows, {to.dkk.data(), 1, n.LC}, work.k.data(), n.LK, dk, n.LK, true);

  // The gradients of v, in place of dV, and of the state at the start.
  scale_row(to.dH.data(), n.DK * n.LV, last);
  for (int64_t i = 0; i < rows; ++i) {
    const float e = exp_(work.G[i]), by = beta[i * n.HV];
    float *const x = X + i * n.LV, *const dv = to.dV.data() + i * n.LV;
    scale_row(dout + i * n.LV, n.DV, e);
    TW_SIMD
    for (int64_t d = 0; d < n.DV; ++d) {
      dv[d] = by * x[d];
      x[d] *= -e * by;
    }
  }
  product(n.DK, n.DV, rows, {work.q.data(), 1, n.LK}, dout, n.LV, to.dH.data(), n.LV, true);
  product(n.DK, n.DV, rows, {work.k.data(), 1, n.LK}, X, n.LV, to.dH.data(), n.LV, true);
}

// Stores the gradients of rows of x [tokens, D], from the gradients d of scale x, or with `normalize` of scale times x
// divided by its norm.
template <class T>
void store_gradients(const Rows<const T>& x, int64_t b, const Sequence& tokens, int64_t h, int64_t heads, int64_t S,
                     int64_t D, const float* d, int64_t row_length, float scale, bool normalize, T* to) {
  std::vector<float> row(normalize ? D : 0);
  for (int64_t s = tokens.begin; s < tokens.end; ++s) {
    const float* const from = d + (s - tokens.begin) * row_length;
    T* const stored = to + ((b * S + s) * heads + h) * D;
    if (!normalize) {
      TW_SIMD
      for (int64_t i = 0; i < D; ++i) store(stored + i, from[i] * scale);
      continue;
    }
    float inverse;
    load_rows(x, b, s, h, 1, D, row.data(), D, &inverse);
    const float along = dot(row.data(), from, D), by = scale * inverse;
    TW_SIMD
    for (int64_t i = 0; i < D; ++i) store(stored + i, (from[i] - row[i] * along) * by);
  }
}

// What backward tensors have in common with the forward's is checked by `describe`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    Tensor dout, std::optional<Tensor> dstate, Tensor q, Tensor k, Tensor v, Tensor beta,
    std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens, Tensor decay, Tensor solved, double scale,
    bool normalize) {
  const Shape n = describe(q, k, v, beta, initial_state, cu_seqlens);
  check_row_major("do", dout);
  STD_TORCH_CHECK(dout.scalar_type() == v.scalar_type() && dout.dim() == 4 && dout.size(0) == n.B &&
                      dout.size(1) == n.S && dout.size(2) == n.HV && dout.size(3) == n.DV,
                  "tilewright: do must have v's shape and dtype");
  check_numbers("decay", decay, v);
  if (dstate.has_value()) check_states("dstate", *dstate, n);
  check_row_major("solved", solved);
  STD_TORCH_CHECK(solved.scalar_type() == v.scalar_type() && solved.numel() == n.B * n.S * n.HV * n.C,
                  "tilewright: solved must be [B, S, HV, ", n.C, "] in v's dtype");
  Tensor dq = huge(torch::stable::new_empty(q, {n.B, n.S, n.HK, n.DK}));
  Tensor dk = huge(torch::stable::new_empty(q, {n.B, n.S, n.HK, n.DK}));
  Tensor dv = huge(torch::stable::new_empty(v, {n.B, n.S, n.HV, n.DV}));
  Tensor dg = torch::stable::empty_like(decay), dbeta = torch::stable::empty_like(decay);
  Tensor dinitial = initial_state.has_value() ? torch::stable::empty_like(*initial_state) : Tensor();
  float* const to_initial = initial_state.has_value() ? out<float>(dinitial) : nullptr;
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  dispatch(q, [&](auto element) {
    using E = decltype(element);
    const Rows<const E> q_rows(q, in<E>(q)), k_rows(k, in<E>(k)), v_rows(v, in<E>(v)), do_rows(dout, in<E>(dout));
    const E* const inverses = in<E>(solved);
    const float *const decays = in<float>(decay), *const betas = in<float>(beta);
    E *const to_q = out<E>(dq), *const to_k = out<E>(dk), *const to_v = out<E>(dv);
    float *const to_g = out<float>(dg), *const to_beta = out<float>(dbeta);
    torch::stable::parallel_for(0, n.N * n.HK, 1, [&](int64_t lo, int64_t hi) {
      Work work(n);
      Gradients found(n);
      std::vector<float> states, V, of_q, of_k;
      for (int64_t task = lo; task < hi; ++task) {
        const int64_t sequence = task / n.HK, head = task % n.HK, b = n.batch(sequence);
        const Sequence tokens = n.sequence(sequence);
        const int64_t length = tokens.end - tokens.begin, chunks = (length + n.C - 1) / n.C;
        states.resize(chunks * n.DV * n.LK);
        V.resize(length * n.LV);
        of_q.assign(length * n.LK, 0.0f);
        of_k.assign(length * n.LK, 0.0f);
        const auto load_chunk = [&](int64_t s, int64_t rows, int64_t h) {
          const int64_t at = (b * n.S + s) * n.HV + h;
          load_rows(k_rows, b, s, head, rows, n.DK, work.k.data(), n.LK, normalize ? work.ik.data() : nullptr);
          load_rows(v_rows, b, s, h, rows, n.DV, work.v.data(), n.LV);
          for (int64_t i = 0; i < rows; ++i) {
            work.G[i] = decays[at + i * n.HV];
            const E* const row = inverses + (at + i * n.HV) * n.C;
            for (int64_t c = 0; c < n.C; ++c) work.T[i * n.LC + c] = load(row[c]);
          }
        };
        for (int64_t h = head * n.group; h < (head + 1) * n.group; ++h) {
          load_state(n, initial_state, sequence, h, work.H.data());
          for (int64_t c = 0; c < chunks; ++c) {
            const int64_t s = tokens.begin + c * n.C, rows = std::min(n.C, tokens.end - s);
            load_chunk(s, rows, h);
            transpose(n.DK, n.DV, work.H.data(), n.LV, states.data() + c * n.DV * n.LK, n.LK);
            float* const values = V.data() + c * n.C * n.LV;
            advance(n, work, betas + (b * n.S + s) * n.HV + h, rows, values);
            if (c + 1 < chunks) end_chunk(n, work, rows, values);
          }
          load_state(n, dstate, sequence, h, found.dH.data());
          for (int64_t c = chunks - 1; c >= 0; --c) {
            const int64_t s = tokens.begin + c * n.C, rows = std::min(n.C, tokens.end - s);
            const int64_t at = (b * n.S + s) * n.HV + h, first = c * n.C * n.LK;
            load_chunk(s, rows, h);
            load_rows(q_rows, b, s, head, rows, n.DK, work.q.data(), n.LK, normalize ? work.iq.data() : nullptr,
                      float(scale));
            load_rows(do_rows, b, s, h, rows, n.DV, found.both.data(), n.LV);
            chunk_gradients(n, work, found, betas + at, rows, states.data() + c * n.DV * n.LK,
                            V.data() + c * n.C * n.LV, of_q.data() + first, of_k.data() + first);
            float sum = 0;
            for (int64_t i = rows - 1; i >= 0; --i) {
              to_g[at + i * n.HV] = sum += found.dG[i];
              to_beta[at + i * n.HV] = found.dbeta[i];
              E* const stored = to_v + (at + i * n.HV) * n.DV;
              TW_SIMD
              for (int64_t d = 0; d < n.DV; ++d) store(stored + d, found.dV[i * n.LV + d]);
            }
          }
          if (to_initial != nullptr) store_state(n, found.dH.data(), sequence, h, to_initial);
        }
        store_gradients(q_rows, b, tokens, head, n.HK, n.S, n.DK, of_q.data(), n.LK, float(scale), normalize, to_q);
        store_gradients(k_rows, b, tokens, head, n.HK, n.S, n.DK, of_k.data(), n.LK, 1.0f, normalize, to_k);
      }
    });
  });
  return {dq, dk, dv, dg, dbeta, dinitial};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("gated_delta_rule_cpp(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state,"
        " Tensor? cu_seqlens, float scale, bool normalize) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("gated_delta_rule_cpp_backward(Tensor do, Tensor? dstate, Tensor q, Tensor k, Tensor v, Tensor beta,"
        " Tensor? initial_state, Tensor? cu_seqlens, Tensor decay, Tensor solved, float scale, bool normalize)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("gated_delta_rule_cpp", TORCH_BOX(&tw::gated_delta_rule));
  m.impl("gated_delta_rule_cpp_backward", TORCH_BOX(&tw::gated_delta_rule_backward));
}
