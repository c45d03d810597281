// The causal depthwise convolution on the CPU. The definition is tilewright/ops/linear_attention/causal_conv1d.py.
//
// x is read with its own strides over batch and tokens. Channels are processed in pieces that are adjacent in memory,
// each token after token, so that the taps and the last W rows of a piece stay in the first-level cache. Sums of the
// weight and bias gradients are in float over ROWS_A_SUM tokens and in double beyond.
#include <algorithm>

#include "cpu/column_sums.h"
#include "cpu/like.h"
#include "cpu/sequences.h"

namespace tw {
namespace {

constexpr int64_t PIECE = 512;     // channels: 4 taps and 4 rows of float are 16 KiB
constexpr int64_t MAX_TAPS = 8;
constexpr int64_t TOKENS = 64;     // of a task of the forward

// First and last (exclusive) token of each token's sequence.
struct Bounds {
  std::vector<int64_t> begin, end;
};

struct Inputs {
  Tensor x;  // [B, S, C] with contiguous channels
  int64_t B, S, C, W, pieces;
  std::vector<float> w;  // [pieces, W, PIECE]: rows of taps a power of two apart would share cache sets
  std::vector<float> b;  // [C], 0 without a bias
  Bounds bounds;
};

Bounds find_bounds(const std::optional<Tensor>& cu_seqlens, int64_t B, int64_t S) {
  Bounds found{std::vector<int64_t>(size_t(S)), std::vector<int64_t>(size_t(S))};
  for (const Sequence& one : sequences(cu_seqlens, B, S)) {
    std::fill(found.begin.begin() + one.begin, found.begin.begin() + one.end, one.begin);
    std::fill(found.end.begin() + one.begin, found.end.begin() + one.end, one.end);
  }
  return found;
}

Inputs inputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& cu_seqlens) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 3, "tilewright: x must be a CPU tensor [B, S, C]");
  check_row_major("weight", weight);
  const int64_t B = x.size(0), S = x.size(1), C = x.size(2);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == C && weight.size(1) >= 1 && weight.size(1) <= MAX_TAPS,
                  "tilewright: weight must be [C, W] with W up to 8");
  Inputs n{x.stride(2) == 1 || C <= 1 ? x : torch::stable::contiguous(x), B, S, C, weight.size(1),
           (C + PIECE - 1) / PIECE, {}, {}, find_bounds(cu_seqlens, B, S)};
  const auto taps = as_float(weight, 0);
  n.w.assign(size_t(n.pieces * n.W * PIECE), 0.0f);
  for (int64_t c = 0; c < C; ++c) {
    for (int64_t j = 0; j < n.W; ++j) n.w[(c / PIECE * n.W + j) * PIECE + c % PIECE] = taps[c * n.W + j];
  }
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == C, "tilewright: bias must be [C]");
    STD_TORCH_CHECK(bias->scalar_type() == weight.scalar_type(), "tilewright: bias must have weight's dtype");
    n.b = as_float(*bias, 0);
  } else {
    n.b.assign(size_t(C), 0.0f);
  }
  return n;
}

// Calls f with the number of taps as a constant, which unrolls their loops.
template <class F>
TW_INLINE void with_taps(int64_t taps, F&& f) {
  switch (taps) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    default: return f(std::integral_constant<int, 8>{});
  }
}

// b + the sum over K taps, of which the first applies to x's row.
template <int K, class T>
TW_INLINE float tapped(const T* x, int64_t stride, const float* w, float b, int64_t i) {
  float z = b;
#pragma GCC unroll 8
  for (int j = 0; j < K; ++j) z += w[j * PIECE + i] * load(x[j * stride + i]);
  return z;
}

template <int K, bool SILU, class T>
void forward_row(const T* x, int64_t stride, const float* w, const float* b, T* y, int64_t n) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float z = tapped<K>(x, stride, w, b[i], i);
    if (SILU) {
      float s, q;
      sigmoid_pair(z, s, q);
      z *= s;
    }
    store(y + i, z);
  }
}

// The gradient of what is activated. dw [taps, PIECE], db: the token's contributions are added where `count` is set.
template <int K, bool SILU, class T>
void activation_gradient(const T* dy, const T* x, int64_t stride, const float* w, const float* b, float* dz, float* dw,
                         float* db, int64_t n, bool count) {
  if (SILU) {
    TW_SIMD
    for (int64_t i = 0; i < n; ++i) {
      const float z = tapped<K>(x, stride, w, b[i], i);
      float s, q;
      sigmoid_pair(z, s, q);
      dz[i] = load(dy[i]) * s * (1.0f + z * q);
    }
  } else {
    TW_SIMD
    for (int64_t i = 0; i < n; ++i) dz[i] = load(dy[i]);
  }
  if (!count) return;
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const float d = dz[i];
    db[i] += d;
#pragma GCC unroll 8
    for (int j = 0; j < K; ++j) dw[j * PIECE + i] += d * load(x[j * stride + i]);
  }
}

// dx of a token, from dz of it and of the K - 1 tokens that follow. w: of the last tap, the token's own.
template <int K, class T>
void gather_row(const float* const* dz, const float* w, T* dx, int64_t n) {
  const float* rows[K];
  for (int k = 0; k < K; ++k) rows[k] = dz[k];
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float d = 0;
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) d += w[-k * PIECE + i] * rows[k][i];
    store(dx + i, d);
  }
}

template <class F>
TW_INLINE void with_silu(bool silu, F&& f) {
  if (silu) f(std::true_type{});
  else f(std::false_type{});
}

Tensor causal_conv1d(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> cu_seqlens, bool silu) {
  const Inputs n = inputs(x, weight, bias, cu_seqlens);
  Tensor y = huge(torch::stable::new_empty(x, {n.B, n.S, n.C}));
  if (n.B * n.S * n.C == 0) return y;
  dispatch(x, [&](auto t) {
    using T = decltype(t);
    const T* const from = in<T>(n.x);
    T* const to = out<T>(y);
    const int64_t batch_stride = n.x.stride(0), stride = n.x.stride(1), blocks = (n.S + TOKENS - 1) / TOKENS;
    torch::stable::parallel_for(
        0, n.B * blocks * n.pieces, grain(TOKENS * std::min(n.C, PIECE)), [&](int64_t lo, int64_t hi) {
          for (int64_t task = lo; task < hi; ++task) {
            const int64_t p = task % n.pieces, block = task / n.pieces % blocks, batch = task / n.pieces / blocks;
            const int64_t c = p * PIECE, count = std::min(PIECE, n.C - c), end = std::min(n.S, (block + 1) * TOKENS);
            for (int64_t s = block * TOKENS; s < end; ++s) {
              const int64_t taps = std::min(n.W, s - n.bounds.begin[s] + 1), first = n.W - taps;
              const T* const row = from + batch * batch_stride + (s - taps + 1) * stride + c;
              const float* const w = n.w.data() + (p * n.W + first) * PIECE;
              T* const result = to + (batch * n.S + s) * n.C + c;
              with_taps(taps, [&](auto k) {
                with_silu(silu, [&](auto act) {
                  forward_row<k.value, act.value>(row, stride, w, n.b.data() + c, result, count);
                });
              });
            }
          }
        });
  });
  return y;
}

// Rows = the tokens of all batches. A chunk of rows of a piece of channels is a task; how many chunks there are depends
// on the number of rows alone.
std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight,
                                                          std::optional<Tensor> bias, std::optional<Tensor> cu_seqlens,
                                                          bool silu) {
  const Inputs n = inputs(x, weight, bias, cu_seqlens);
  check_like_x("dy", dy, x, true);
  const int64_t rows = n.B * n.S, chunks = row_chunks(rows), per = (rows + chunks - 1) / chunks, W = n.W;
  // [chunks, C, W], as weight, and [chunks, C]
  std::vector<double> dw(size_t(chunks * n.C * W), 0.0), db(size_t(chunks * n.C), 0.0);
  Tensor dx = huge(torch::stable::new_empty(x, {n.B, n.S, n.C}));
  Tensor dweight = torch::stable::empty_like(weight);
  Tensor dbias = bias.has_value() ? torch::stable::empty_like(*bias) : Tensor();
  dispatch(x, [&](auto t) {
    using T = decltype(t);
    const T *const of_y = in<T>(dy), *const from = in<T>(n.x);
    T* const to = out<T>(dx);
    const int64_t batch_stride = n.x.stride(0), stride = n.x.stride(1);
    torch::stable::parallel_for(
        0, chunks * n.pieces, grain(per * std::min(n.C, PIECE)), [&](int64_t lo, int64_t hi) {
          std::vector<float> dw_part(W * PIECE), db_part(PIECE), ring(W * PIECE);
          for (int64_t task = lo; task < hi; ++task) {
            const int64_t p = task % n.pieces, chunk = task / n.pieces, c = p * PIECE;
            const int64_t count = std::min(PIECE, n.C - c), last = std::min(rows, (chunk + 1) * per);
            const float* const w = n.w.data() + p * W * PIECE;
            std::fill(dw_part.begin(), dw_part.end(), 0.0f);
            std::fill(db_part.begin(), db_part.end(), 0.0f);
            const auto add = [&] {
              for (int64_t i = 0; i < count; ++i) {
                for (int64_t j = 0; j < W; ++j) dw[(chunk * n.C + c + i) * W + j] += double(dw_part[j * PIECE + i]);
                db[chunk * n.C + c + i] += double(db_part[i]);
              }
              std::fill(dw_part.begin(), dw_part.end(), 0.0f);
              std::fill(db_part.begin(), db_part.end(), 0.0f);
            };
            int64_t summed = 0;
            for (int64_t row = chunk * per; row < last;) {
              const int64_t batch = row / n.S, s_end = std::min(n.S, last - batch * n.S);
              int64_t next = row - batch * n.S;  // the first token whose dz is not in the ring
              for (int64_t s = next; s < s_end; ++s) {
                const int64_t reach = std::min(n.bounds.end[s], s + W);
                for (; next < reach; ++next) {
                  const int64_t taps = std::min(W, next - n.bounds.begin[next] + 1), tap = (W - taps) * PIECE;
                  with_taps(taps, [&](auto k) {
                    with_silu(silu, [&](auto act) {
                      activation_gradient<k.value, act.value>(
                          of_y + (batch * n.S + next) * n.C + c,
                          from + batch * batch_stride + (next - taps + 1) * stride + c, stride, w + tap,
                          n.b.data() + c, ring.data() + next % W * PIECE, dw_part.data() + tap, db_part.data(), count,
                          next < s_end);
                    });
                  });
                  if (next < s_end && ++summed % ROWS_A_SUM == 0) add();
                }
                const float* dz[MAX_TAPS];
                for (int64_t k = s; k < reach; ++k) dz[k - s] = ring.data() + k % W * PIECE;
                with_taps(reach - s, [&](auto k) {
                  gather_row<k.value>(dz, w + (W - 1) * PIECE, to + (batch * n.S + s) * n.C + c, count);
                });
              }
              row = batch * n.S + s_end;
            }
            add();
          }
        });
  });
  add_chunks(dw, dweight);
  if (bias.has_value()) add_chunks(db, dbias);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("causal_conv1d_cpp(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu) -> Tensor");
  m.def("causal_conv1d_cpp_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu)"
        " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("causal_conv1d_cpp", TORCH_BOX(&tw::causal_conv1d));
  m.impl("causal_conv1d_cpp_backward", TORCH_BOX(&tw::causal_conv1d_backward));
}
