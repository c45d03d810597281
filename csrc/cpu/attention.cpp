// Attention on the CPU, forward and backward, without a matrix of queries by keys: FlashAttention-2's method
// (arXiv:2307.08691). The definition, and that of the mask of dropout, is tilewright/ops/attention/attention.py.
//
// q [B, HQ, S, D], k [B, HK, SK, D] and v [B, HK, SK, DV] have contiguous rows and any other strides. A task is a run of
// queries of one document, with all query heads that read one key head; its keys are rearranged for the products once. A
// block of queries goes over blocks of keys, which begin at multiples of KEYS of a document: a row's bits depend on its
// own document alone. Statistics and sums are float32. In bfloat16, with AVX-512's dot product for it, probabilities and
// their gradients are rounded to bfloat16 for the products; without it all factors are float32.
//
// The gradients of keys are sums over runs of queries, added in order; how many there are depends on shapes and the
// number of documents alone: the same bits on any number of threads.
#include <algorithm>

#include "cpu/product.h"
#include "cpu/quantize.h"
#include "cpu/sequences.h"
#include "cpu/small_product.h"

namespace tw {
namespace {

// QUERIES: whole tiles of six rows, an even number. A block of logits, its keys and values fit the second-level cache.
constexpr int64_t QUERIES = 60, KEYS = 128;
constexpr int64_t PANEL = 64;              // columns of a right factor that are stored together
constexpr int64_t ROWS_OF_TASK = 480;      // of a forward, over all heads: rearranging keys is then a few percent
constexpr int64_t TASKS = 16;              // of a backward, at least: for about as many threads
constexpr uint32_t STREAM = 1u << 29;      // of the counters, see eager.py

int64_t padded(int64_t n, int64_t to = 16) { return (n + to - 1) / to * to; }

struct Shape {
  int64_t B, HQ, HK, S, SK, D, DV, group, LD, LV;  // LD, LV: row lengths of buffers
  bool causal;
  int64_t window, offset;
  float cap, scale;
  bool drop;
  uint32_t most;  // a pair is dropped if its bits are at most this
  float inverse;  // of the share that is kept
  uint64_t seed;
  uint32_t draw, first_head;
};

template <class T>
struct Rows {  // of [B, H, S, D]
  T* data;
  int64_t batch, head, row;
  Rows(const Tensor& t, T* p) : data(p), batch(t.stride(0)), head(t.stride(1)), row(t.stride(2)) {}
  T* at(int64_t b, int64_t h, int64_t s) const { return data + b * batch + h * head + s * row; }
};

// Queries `first` to `end` of a document, one of `parts` runs.
struct Task {
  int64_t b, head, begin, queries, keys, first, end, part, parts;  // head: of keys
};

// ---- products: a right factor is stored in panels of 64 columns, [sum][64] each

struct Plain {
  using E = float;  // of left factors
  using Unit = float;
  static constexpr int64_t PAIR = 1;
  static Left along(const E* a, int64_t row) { return {a, row, 1}; }
  static Left across(const E* a, int64_t row, int64_t, int64_t, Unit*) { return {a, 1, row}; }
  static void pack(const E* rows, int64_t row, int64_t n, int64_t columns, Unit* to) {
    for (int64_t c = 0; c < columns; c += PANEL) {
      const int64_t width = std::min(PANEL, padded(columns - c));
      for (int64_t s = 0; s < n; ++s) std::copy_n(rows + s * row + c, width, to + (c * n + s * PANEL));
    }
  }
  static void pack_across(const E* rows, int64_t row, int64_t n, int64_t sum, Unit* to) {
    for (int64_t c = 0; c < n; c += PANEL)
      transpose(std::min(PANEL, n - c), sum, rows + c * row, row, to + c * sum, PANEL);
  }
  static void multiply(int64_t rows, int64_t columns, int64_t sum, Left a, const Unit* b, int64_t packed, float* c,
                       int64_t c_row, bool add) {
    for (int64_t n = 0; n < columns; n += PANEL)
      product(rows, std::min(PANEL, columns - n), sum, a, b + n * packed, PANEL, c + n, c_row, add);
  }
};

#ifdef TW_OWN_PRODUCTS
struct Pairs {
  using E = bf16;
  using Unit = uint32_t;
  static constexpr int64_t PAIR = 2;
  static_assert(PANEL == OUTER_COLUMNS, "one layout of panels");
  static Broadcast along(const E* a, int64_t row) { return {reinterpret_cast<const char*>(a), row * 2, 4}; }
  // Rows in pairs, as the instruction requires. room: KEYS units for two rows.
  static Broadcast across(const E* a, int64_t row, int64_t n, int64_t columns, Unit* room) {
    for (int64_t s = 0; s < n; s += 2)
      tw::pack(a + s * row, s + 1 < n ? a + (s + 1) * row : nullptr, columns, room + s / 2 * KEYS, columns);
    return {reinterpret_cast<const char*>(room), 4, KEYS * 4};
  }
  static void pack(const E* rows, int64_t row, int64_t n, int64_t columns, Unit* to) {
    pack_panels<2>(rows, row, n, steps_of(n, 2), columns, to);
  }
  static void pack_across(const E* rows, int64_t row, int64_t n, int64_t sum, Unit* to) {
    pack_transposed(reinterpret_cast<const uint32_t*>(rows), row / 2, steps_of(sum, 2), n, to);
  }
  static void multiply(int64_t rows, int64_t columns, int64_t sum, Broadcast a, const Unit* b, int64_t packed, float* c,
                       int64_t c_row, bool add) {
    const int64_t all = steps_of(packed, 2);
    for (int64_t n = 0; n < columns; n += PANEL)
      for (int64_t m = 0; m < rows; m += OUTER_ROWS)
        outer_tiles<Half>(std::min(OUTER_ROWS, rows - m), {a.base + m * a.row, a.row, a.step}, b + n * all,
                          steps_of(sum, 2), nullptr, false, c + m * c_row + n, c_row, std::min(PANEL, columns - n), 1.0f,
                          add);
  }
};
#endif

// Units of a right factor.
template <class P>
int64_t panels(int64_t sum, int64_t columns) {
  return padded(sum, P::PAIR) / P::PAIR * padded(columns, PANEL);
}

template <class E, class T>
void load_rows(const Rows<const T>& x, int64_t b, int64_t h, int64_t s, int64_t rows, int64_t D, E* to, int64_t length) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* const from = x.at(b, h, s + i);
    E* const row = to + i * length;
    TW_SIMD
    for (int64_t d = 0; d < D; ++d) store(row + d, load(from[d]));
    std::fill(row + D, row + length, E{});
  }
}

// ---- which keys a query sees, and what dropout keeps

struct Interval {
  int64_t low, high;
};

// The keys that any of some queries sees, from a multiple of KEYS on.
Interval keys_of(const Shape& n, int64_t first, int64_t end, int64_t keys) {
  const int64_t high = n.causal ? std::clamp<int64_t>(end + n.offset, 0, keys) : keys;
  const int64_t low = n.window ? std::clamp<int64_t>(first + n.offset - n.window + 1, 0, high) : 0;
  return {low / KEYS * KEYS, first < end ? high : low / KEYS * KEYS};
}

// The keys of a block that the query at a position sees.
TW_INLINE Interval seen(const Shape& n, int64_t position, int64_t key, int64_t keys) {
  const int64_t high = n.causal ? std::clamp<int64_t>(position + 1 - key, 0, keys) : keys;
  return {n.window ? std::clamp<int64_t>(position - n.window + 1 - key, 0, high) : 0, high};
}

// The random bits of a query and a block's keys: words[j] those of key + j. key: a multiple of 4.
inline void draw(const Shape& n, int64_t line, int64_t head, int64_t key, Interval of, uint32_t* words) {
  const uint64_t block = uint64_t(uint32_t(line)) << 32 | uint32_t(key / 4);
  const int64_t first = of.low / 4, blocks = (of.high + 3) / 4 - first;
  philox_row(n.seed, block + uint64_t(first), uint32_t(head) + n.first_head, n.draw | STREAM, blocks, words + 4 * first);
}

// ---- rows of logits

// By exp, whose overflow is an infinity that gives 1; the series where that cancels.
TW_INLINE float tanh_(float x) {
  const float y = 1.0f - 2.0f / (exp_(2.0f * std::fabs(x)) + 1.0f), z = x * x;
  const float small = x * (1.0f + z * (-0.33333333f + z * (0.13333333f - z * 0.053968254f)));
  return z < 0.04f ? small : x < 0 ? -y : y;
}

template <bool CAP>
TW_INLINE float logit(float s, float scale, float cap, float& slope) {
  if (!CAP) return s * scale;
  const float y = tanh_(s * (scale / cap));
  slope = 1.0f - y * y;
  return cap * y;
}

// One row of the online softmax: p, not divided by its sum. top: the largest logit so far; total: the sum of
// exponentials.   Returns what the sums so far are multiplied by.
template <bool CAP, class E>
float softmax_row(const Shape& n, float* s, Interval of, int64_t wide, const uint32_t* words, float& top, float& total,
                  E* p) {
  const float scale = n.scale, cap = n.cap, before = top;
  float most = before;
  TW_SIMD_MAX(most)
  for (int64_t j = of.low; j < of.high; ++j) {
    float slope;
    s[j] = logit<CAP>(s[j], scale, cap, slope);
    most = s[j] > most ? s[j] : most;
  }
  const float base = most == -INFINITY ? 0.0f : most;
  float sum = 0;
  TW_SIMD_SUM(sum)
  for (int64_t j = of.low; j < of.high; ++j) {
    s[j] = exp_(s[j] - base);
    sum += s[j];
  }
  std::fill(p, p + of.low, E{});
  std::fill(p + of.high, p + wide, E{});
  if (words != nullptr) {
    const uint32_t dropped = n.most;
    TW_SIMD
    for (int64_t j = of.low; j < of.high; ++j) store(p + j, words[j] > dropped ? s[j] : 0.0f);
  } else {
    TW_SIMD
    for (int64_t j = of.low; j < of.high; ++j) store(p + j, s[j]);
  }
  const float shrink = exp_(before - base);
  top = most;
  total = total * shrink + sum;
  return shrink;
}

// One row of the backward: the probabilities after dropout, and the gradients of the products of queries and keys.
template <bool CAP, bool DROP, class E>
void gradient_row(const Shape& n, const float* s, const float* dp, Interval of, int64_t wide, const uint32_t* words,
                  float lse, float delta, E* p, E* ds) {
  const float scale = n.scale, cap = n.cap, base = lse == -INFINITY ? 0.0f : lse, inverse = n.inverse;
  const uint32_t dropped = n.most;
  for (E* row : {p, ds}) {
    std::fill(row, row + of.low, E{});
    std::fill(row + of.high, row + wide, E{});
  }
  TW_SIMD
  for (int64_t j = of.low; j < of.high; ++j) {
    float slope = 1.0f;
    const float full = exp_(logit<CAP>(s[j], scale, cap, slope) - base);
    float kept = full, d = dp[j];
    if (DROP) {
      const float scaled = full * inverse, d_scaled = d * inverse;
      kept = words[j] > dropped ? scaled : 0.0f;
      d = words[j] > dropped ? d_scaled : 0.0f;
    }
    store(p + j, kept);
    const float g = full * (d - delta) * scale;
    store(ds + j, CAP ? g * slope : g);
  }
}

// ---- the passes

// A thread's buffers. keys: of the longest task.   Names as in the formulas, T for transposed; `of_`: right factors.
template <class P>
struct Work {
  using E = typename P::E;
  using Unit = typename P::Unit;
  std::vector<E> rows, q, p, dout, ds;
  std::vector<Unit> kT, v, vT, k, of_q, of_dout, room;
  std::vector<float> s, acc, dp, dk, dv;
  std::vector<uint32_t> words;
  int64_t kT_block, v_block, k_block;

  Work(const Shape& n, int64_t keys, bool backward) {
    const int64_t blocks = (keys + KEYS - 1) / KEYS, widest = std::max(n.LD, n.LV);
    kT_block = panels<P>(n.D, KEYS);
    v_block = backward ? panels<P>(n.DV, KEYS) : panels<P>(KEYS, n.DV);
    k_block = panels<P>(KEYS, n.D);
    rows.resize(size_t(KEYS * widest));
    q.resize(size_t(QUERIES * n.LD));
    p.resize(size_t(QUERIES * KEYS));
    s.resize(size_t(QUERIES * KEYS));
    acc.resize(size_t(QUERIES * (backward ? n.LD : n.LV)));
    words.resize(size_t(n.drop ? KEYS + 3 : 0));
    kT.resize(size_t(blocks * kT_block));
    (backward ? vT : v).resize(size_t(blocks * v_block));
    if (!backward) return;
    k.resize(size_t(blocks * k_block));
    dout.resize(size_t(QUERIES * n.LV));
    ds.resize(size_t(QUERIES * KEYS));
    dp.resize(size_t(QUERIES * KEYS));
    of_q.resize(size_t(panels<P>(QUERIES, n.D)));
    of_dout.resize(size_t(panels<P>(QUERIES, n.DV)));
    room.resize(size_t(QUERIES / 2 * KEYS));
    dk.resize(size_t(blocks * KEYS * n.LD));
    dv.resize(size_t(blocks * KEYS * n.LV));
  }
};

// Long: keys and values, the softmax of a block, its results.
template <class P, class T>
void forward_task(const Shape& n, const Task& t, const Rows<const T>& q, const Rows<const T>& k, const Rows<const T>& v,
                  const float* sinks, const Rows<T>& out, float* lse, Work<P>& work) {
  using E = typename P::E;
  const Interval all = keys_of(n, t.first, t.end, t.keys);
  for (int64_t key = all.low; key < all.high; key += KEYS) {
    const int64_t m = std::min(KEYS, all.high - key), block = (key - all.low) / KEYS;
    load_rows(k, t.b, t.head, t.begin + key, m, n.D, work.rows.data(), n.LD);
    P::pack_across(work.rows.data(), n.LD, m, n.D, work.kT.data() + block * work.kT_block);
    load_rows(v, t.b, t.head, t.begin + key, m, n.DV, work.rows.data(), n.LV);
    P::pack(work.rows.data(), n.LV, m, n.DV, work.v.data() + block * work.v_block);
  }
  float top[QUERIES], total[QUERIES];
  for (int64_t h = t.head * n.group; h < (t.head + 1) * n.group; ++h)
    for (int64_t first = t.first; first < t.end; first += QUERIES) {
      const int64_t rows = std::min(QUERIES, t.end - first);
      load_rows(q, t.b, h, t.begin + first, rows, n.D, work.q.data(), n.LD);
      std::fill(work.acc.begin(), work.acc.end(), 0.0f);
      const float sink = sinks == nullptr ? -INFINITY : sinks[h];
      std::fill_n(top, rows, sink);
      std::fill_n(total, rows, sink == -INFINITY ? 0.0f : 1.0f);
      const Interval own = keys_of(n, first, first + rows, t.keys);
      for (int64_t key = own.low; key < own.high; key += KEYS) {
        // `packed` of them are in the panels.
        const int64_t m = std::min(KEYS, own.high - key), packed = std::min(KEYS, all.high - key);
        const int64_t block = (key - all.low) / KEYS;
        P::multiply(rows, m, n.D, P::along(work.q.data(), n.LD), work.kT.data() + block * work.kT_block, n.D,
                    work.s.data(), KEYS, false);
        for (int64_t i = 0; i < rows; ++i) {
          const Interval of = seen(n, first + i + n.offset, key, m);
          if (n.drop) draw(n, t.begin + first + i, t.b * n.HQ + h, key, of, work.words.data());
          float* const s = work.s.data() + i * KEYS;
          E* const p = work.p.data() + i * KEYS;
          const uint32_t* const words = n.drop ? work.words.data() : nullptr;
          const int64_t wide = padded(m, P::PAIR);
          const float shrink = n.cap != 0 ? softmax_row<true>(n, s, of, wide, words, top[i], total[i], p)
                                          : softmax_row<false>(n, s, of, wide, words, top[i], total[i], p);
          if (shrink == 1) continue;
          float* const acc = work.acc.data() + i * n.LV;
          TW_SIMD
          for (int64_t d = 0; d < n.LV; ++d) acc[d] *= shrink;
        }
        P::multiply(rows, n.DV, m, P::along(work.p.data(), KEYS), work.v.data() + block * work.v_block, packed,
                    work.acc.data(), n.LV, true);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float by = total[i] == 0 ? 0.0f : n.inverse / total[i];
        const float* const acc = work.acc.data() + i * n.LV;
        T* const to = out.at(t.b, h, t.begin + first + i);
        TW_SIMD
        for (int64_t d = 0; d < n.DV; ++d) store(to + d, acc[d] * by);
        lse[(t.b * n.HQ + h) * n.S + t.begin + first + i] =
            total[i] == 0 ? -INFINITY : top[i] + std::log(total[i]);
      }
    }
}

// dq of a task's rows; the gradients of its document's keys and values, from these rows, are in work.dk and work.dv.
// Long: keys and values, the gradients of a block, its results.
template <class P, class T>
void backward_task(const Shape& n, const Task& t, const Rows<const T>& dout, const Rows<const T>& q,
                   const Rows<const T>& k, const Rows<const T>& v, const float* lse, const float* delta,
                   const Rows<T>& dq, Work<P>& work) {
  using E = typename P::E;
  std::fill_n(work.dk.data(), t.keys * n.LD, 0.0f);
  std::fill_n(work.dv.data(), t.keys * n.LV, 0.0f);
  const Interval all = keys_of(n, t.first, t.end, t.keys);
  for (int64_t key = all.low; key < all.high; key += KEYS) {
    const int64_t m = std::min(KEYS, all.high - key), block = (key - all.low) / KEYS;
    load_rows(k, t.b, t.head, t.begin + key, m, n.D, work.rows.data(), n.LD);
    P::pack_across(work.rows.data(), n.LD, m, n.D, work.kT.data() + block * work.kT_block);
    P::pack(work.rows.data(), n.LD, m, n.D, work.k.data() + block * work.k_block);
    load_rows(v, t.b, t.head, t.begin + key, m, n.DV, work.rows.data(), n.LV);
    P::pack_across(work.rows.data(), n.LV, m, n.DV, work.vT.data() + block * work.v_block);
  }
  for (int64_t h = t.head * n.group; h < (t.head + 1) * n.group; ++h)
    for (int64_t first = t.first; first < t.end; first += QUERIES) {
      const int64_t rows = std::min(QUERIES, t.end - first), at = (t.b * n.HQ + h) * n.S + t.begin + first;
      load_rows(q, t.b, h, t.begin + first, rows, n.D, work.q.data(), n.LD);
      load_rows(dout, t.b, h, t.begin + first, rows, n.DV, work.dout.data(), n.LV);
      P::pack(work.q.data(), n.LD, rows, n.D, work.of_q.data());
      P::pack(work.dout.data(), n.LV, rows, n.DV, work.of_dout.data());
      std::fill(work.acc.begin(), work.acc.end(), 0.0f);
      const Interval own = keys_of(n, first, first + rows, t.keys);
      for (int64_t key = own.low; key < own.high; key += KEYS) {
        const int64_t m = std::min(KEYS, own.high - key), packed = std::min(KEYS, all.high - key);
        const int64_t block = (key - all.low) / KEYS;
        P::multiply(rows, m, n.D, P::along(work.q.data(), n.LD), work.kT.data() + block * work.kT_block, n.D,
                    work.s.data(), KEYS, false);
        P::multiply(rows, m, n.DV, P::along(work.dout.data(), n.LV), work.vT.data() + block * work.v_block, n.DV,
                    work.dp.data(), KEYS, false);
        for (int64_t i = 0; i < rows; ++i) {
          const Interval of = seen(n, first + i + n.offset, key, m);
          if (n.drop) draw(n, t.begin + first + i, t.b * n.HQ + h, key, of, work.words.data());
          const auto row = [&](auto gradient) {
            gradient(n, work.s.data() + i * KEYS, work.dp.data() + i * KEYS, of, padded(m, P::PAIR), work.words.data(),
                     lse[at + i], delta[at + i], work.p.data() + i * KEYS, work.ds.data() + i * KEYS);
          };
          if (n.cap != 0) n.drop ? row(gradient_row<true, true, E>) : row(gradient_row<true, false, E>);
          else n.drop ? row(gradient_row<false, true, E>) : row(gradient_row<false, false, E>);
        }
        P::multiply(m, n.DV, rows, P::across(work.p.data(), KEYS, rows, m, work.room.data()), work.of_dout.data(), rows,
                    work.dv.data() + key * n.LV, n.LV, true);
        P::multiply(m, n.D, rows, P::across(work.ds.data(), KEYS, rows, m, work.room.data()), work.of_q.data(), rows,
                    work.dk.data() + key * n.LD, n.LD, true);
        P::multiply(rows, n.D, m, P::along(work.ds.data(), KEYS), work.k.data() + block * work.k_block, packed,
                    work.acc.data(), n.LD, true);
      }
      for (int64_t i = 0; i < rows; ++i) {
        T* const to = dq.at(t.b, h, t.begin + first + i);
        TW_SIMD
        for (int64_t d = 0; d < n.D; ++d) store(to + d, work.acc[size_t(i * n.LD + d)]);
      }
    }
}

// ---- operators

Tensor with_contiguous_rows(const Tensor& t) {
  return t.size(3) <= 1 || t.stride(3) == 1 ? t : torch::stable::contiguous(t);
}

Tensor rows_like(const Tensor& t, int64_t width) {
  return huge(torch::stable::transpose(torch::stable::new_empty(t, {t.size(0), t.size(2), t.size(1), width}), 1, 2));
}

void check(const char* name, const Tensor& t, const Tensor& like, int64_t heads, int64_t rows, int64_t width) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 4 && t.scalar_type() == like.scalar_type() && t.size(0) == like.size(0) &&
                      t.size(1) == heads && t.size(2) == rows && t.size(3) == width,
                  "tilewright: ", name, " must be a CPU tensor [", like.size(0), ", ", heads, ", ", rows, ", ", width,
                  "] of q's dtype");
}

Shape describe(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens,
               const std::optional<Tensor>& sinks, bool causal, int64_t window, double softcap, double scale,
               int64_t threshold, double inverse, int64_t seed, int64_t number, int64_t first_head, int64_t offset) {
  STD_TORCH_CHECK(q.is_cpu() && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(1) > 0 &&
                      q.size(1) % k.size(1) == 0 && (!cu_seqlens.has_value() || k.size(2) == q.size(2)),
                  "tilewright: q must be a CPU tensor [B, HQ, S, D], with HQ a multiple of k's heads, and as many rows "
                  "as k with cu_seqlens");
  check("k", k, q, k.size(1), k.size(2), q.size(3));
  check("v", v, q, k.size(1), k.size(2), v.size(3));
  STD_TORCH_CHECK(threshold >= 0 && threshold <= int64_t(1) << 32 && seed >= 0 && number >= 0 && number < STREAM &&
                      first_head >= 0,
                  "tilewright: threshold must be 0 to 2^32, seed and first_head >= 0 and draw 0 to 2^29 - 1");
  if (sinks.has_value()) {
    check_row_major("sinks", *sinks);
    STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->numel() == q.size(1),
                    "tilewright: sinks must be float32 [HQ]");
  }
  return {q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3), q.size(1) / k.size(1),
          padded(q.size(3)), padded(v.size(3)), causal, window, offset, float(softcap), float(scale), threshold > 0,
          threshold > 0 ? uint32_t(threshold - 1) : 0u, float(inverse), uint64_t(seed), uint32_t(number),
          uint32_t(first_head)};
}

// parts_of: a document's blocks of queries and the number of documents -> the number of its runs.
template <class F>
std::vector<Task> tasks_of(const Shape& n, const std::optional<Tensor>& cu_seqlens, F&& parts_of) {
  std::vector<Task> found;
  const std::vector<Sequence> documents = sequences(cu_seqlens, n.B, n.S);
  for (int64_t b = 0; b < n.B; ++b)
    for (int64_t head = 0; head < n.HK; ++head)
      for (const Sequence& d : documents) {
        const int64_t queries = d.end - d.begin, blocks = (queries + QUERIES - 1) / QUERIES;
        const int64_t parts = std::max<int64_t>(1, parts_of(blocks, int64_t(documents.size())));
        for (int64_t part = 0; part < parts; ++part)
          found.push_back({b, head, d.begin, queries, cu_seqlens.has_value() ? queries : n.SK,
                           blocks * part / parts * QUERIES,
                           std::min(queries, blocks * (part + 1) / parts * QUERIES), part, parts});
      }
  return found;
}

// f(task, buffers) for all tasks. With a causal mask later tasks have more keys: threads get both ends of the list.
template <class P, class F>
void for_tasks(const Shape& n, const std::vector<Task>& tasks, bool backward, F&& f) {
  int64_t longest = 0;
  for (const Task& t : tasks) longest = std::max(longest, t.keys);
  const int64_t count = int64_t(tasks.size());
  torch::stable::parallel_for(0, count, 1, [&](int64_t lo, int64_t hi) {
    Work<P> work(n, longest, backward);
    for (int64_t i = lo; i < hi; ++i) f(tasks[size_t(i % 2 == 0 ? i / 2 : count - 1 - i / 2)], work);
  });
}

// f(the way of products, an element).
template <class F>
void dispatch_products(const Tensor& q, F&& f) {
#ifdef TW_OWN_PRODUCTS
  if (q.scalar_type() == ScalarType::BFloat16 && has_bf16()) return f(Pairs{}, bf16{});
#endif
  dispatch(q, [&](auto element) { f(Plain{}, element); });
}

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens,
                                     std::optional<Tensor> sinks, bool causal, int64_t window, double softcap,
                                     double scale, int64_t threshold, double inverse, int64_t seed, int64_t number,
                                     int64_t first_head, int64_t offset) {
  const Shape n = describe(q, k, v, cu_seqlens, sinks, causal, window, softcap, scale, threshold, inverse, seed, number,
                           first_head, offset);
  Tensor result = rows_like(q, n.DV), lse = torch::stable::new_empty(q, {n.B, n.HQ, n.S}, ScalarType::Float);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  const int64_t blocks_of_task = std::max<int64_t>(1, ROWS_OF_TASK / QUERIES / n.group);
  const auto tasks = tasks_of(n, cu_seqlens, [&](int64_t blocks, int64_t) {
    return (blocks + blocks_of_task - 1) / blocks_of_task;
  });
  dispatch_products(q, [&](auto way, auto element) {
    using P = decltype(way);
    using T = decltype(element);
    const Rows<const T> q_rows(q, in<T>(q)), k_rows(k, in<T>(k)), v_rows(v, in<T>(v));
    const Rows<T> to(result, out<T>(result));
    const float* const of_sinks = in<float>(sinks);
    float* const of_rows = out<float>(lse);
    for_tasks<P>(n, tasks, false, [&](const Task& t, Work<P>& work) {
      forward_task<P, T>(n, t, q_rows, k_rows, v_rows, of_sinks, to, of_rows, work);
    });
  });
  return {result, lse};
}

// <dout, out> of every row, in float.
template <class T>
std::vector<float> deltas(const Shape& n, const Rows<const T>& dout, const Rows<const T>& result) {
  std::vector<float> found(size_t(n.B * n.HQ * n.S));
  torch::stable::parallel_for(0, n.B * n.HQ * n.S, grain(n.DV), [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t s = i % n.S, h = i / n.S % n.HQ, b = i / n.S / n.HQ;
      const T *const x = dout.at(b, h, s), *const y = result.at(b, h, s);
      float sum = 0;
      TW_SIMD_SUM(sum)
      for (int64_t d = 0; d < n.DV; ++d) sum += load(x[d]) * load(y[d]);
      found[size_t(i)] = sum;
    }
  });
  return found;
}

void sink_gradients(const Shape& n, const float* sinks, const float* lse, const float* delta, float* to) {
  for (int64_t h = 0; h < n.HQ; ++h) {
    double sum = 0;
    for (int64_t b = 0; b < n.B; ++b)
      for (int64_t s = 0; s < n.S; ++s) {
        const int64_t i = (b * n.HQ + h) * n.S + s;
        if (lse[i] != -INFINITY) sum -= std::exp(sinks[h] - lse[i]) * delta[i];
      }
    to[h] = float(sum);
  }
}

// Long: the gradients of three tensors and of sinks, and the sums over runs.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor result, Tensor lse, std::optional<Tensor> cu_seqlens,
    std::optional<Tensor> sinks, bool causal, int64_t window, double softcap, double scale, int64_t threshold,
    double inverse, int64_t seed, int64_t number, int64_t first_head, int64_t offset) {
  const Shape n = describe(q, k, v, cu_seqlens, sinks, causal, window, softcap, scale, threshold, inverse, seed, number,
                           first_head, offset);
  check("dout", dout, q, n.HQ, n.S, n.DV);
  check("out", result, q, n.HQ, n.S, n.DV);
  lse = torch::stable::contiguous(lse);
  STD_TORCH_CHECK(lse.is_cpu() && lse.scalar_type() == ScalarType::Float && lse.numel() == n.B * n.HQ * n.S,
                  "tilewright: lse must be float32 [B, HQ, S]");
  Tensor dq = rows_like(q, n.D), dk = rows_like(k, n.D), dv = rows_like(v, n.DV);
  Tensor dsinks = sinks.has_value() ? torch::stable::empty_like(*sinks) : Tensor();
  dout = with_contiguous_rows(dout);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  result = with_contiguous_rows(result);
  const auto tasks = tasks_of(n, cu_seqlens, [&](int64_t blocks, int64_t documents) {
    const int64_t others = std::max<int64_t>(1, n.B * n.HK * documents);
    return std::min(blocks, (TASKS + others - 1) / others);
  });
  int64_t parts = 1;
  for (const Task& t : tasks) parts = std::max(parts, t.parts);
  // The sums of documents with several runs: [parts, B, HK, SK, LD + LV].
  const int64_t wide = n.LD + n.LV;
  Tensor sums = torch::stable::new_empty(q, {parts > 1 ? parts : 0, n.B, n.HK, n.SK, wide}, ScalarType::Float);
  float* const all = out<float>(sums);
  const auto sum_at = [&](const Task& t, int64_t part, int64_t key) {
    return all + (((part * n.B + t.b) * n.HK + t.head) * n.SK + t.begin + key) * wide;
  };
  dispatch_products(q, [&](auto way, auto element) {
    using P = decltype(way);
    using T = decltype(element);
    const Rows<const T> dout_rows(dout, in<T>(dout)), q_rows(q, in<T>(q)), k_rows(k, in<T>(k)), v_rows(v, in<T>(v));
    const Rows<T> to_q(dq, out<T>(dq)), to_k(dk, out<T>(dk)), to_v(dv, out<T>(dv));
    const std::vector<float> delta = deltas<T>(n, dout_rows, Rows<const T>(result, in<T>(result)));
    const float* const of_rows = in<float>(lse);
    if (sinks.has_value()) sink_gradients(n, in<float>(*sinks), of_rows, delta.data(), out<float>(dsinks));
    for_tasks<P>(n, tasks, true, [&](const Task& t, Work<P>& work) {
      backward_task<P, T>(n, t, dout_rows, q_rows, k_rows, v_rows, of_rows, delta.data(), to_q, work);
      for (int64_t j = 0; j < t.keys; ++j) {
        const float *const of_k = work.dk.data() + j * n.LD, *const of_v = work.dv.data() + j * n.LV;
        if (t.parts > 1) {
          float* const to = sum_at(t, t.part, j);
          std::copy_n(of_k, n.LD, to);
          std::copy_n(of_v, n.LV, to + n.LD);
          continue;
        }
        T *const dk_row = to_k.at(t.b, t.head, t.begin + j), *const dv_row = to_v.at(t.b, t.head, t.begin + j);
        TW_SIMD
        for (int64_t d = 0; d < n.D; ++d) store(dk_row + d, of_k[d]);
        TW_SIMD
        for (int64_t d = 0; d < n.DV; ++d) store(dv_row + d, of_v[d]);
      }
    });
    for (const Task& t : tasks) {
      if (t.parts == 1 || t.part > 0) continue;
      torch::stable::parallel_for(0, t.keys, grain(wide * t.parts), [&](int64_t lo, int64_t hi) {
        for (int64_t j = lo; j < hi; ++j) {
          float* const to = sum_at(t, 0, j);
          for (int64_t part = 1; part < t.parts; ++part) {
            const float* const other = sum_at(t, part, j);
            TW_SIMD
            for (int64_t d = 0; d < wide; ++d) to[d] += other[d];
          }
          T *const dk_row = to_k.at(t.b, t.head, t.begin + j), *const dv_row = to_v.at(t.b, t.head, t.begin + j);
          for (int64_t d = 0; d < n.D; ++d) store(dk_row + d, to[d]);
          for (int64_t d = 0; d < n.DV; ++d) store(dv_row + d, to[n.LD + d]);
        }
      });
    }
  });
  return {dq, dk, dv, dsinks};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("attention_cpp(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? sinks, bool causal, SymInt window, "
        "float softcap, float scale, SymInt threshold, float inverse, SymInt seed, SymInt draw, SymInt first_head, "
        "SymInt offset) -> (Tensor, Tensor)");
  m.def("attention_cpp_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? cu_seqlens, Tensor? sinks, bool causal, SymInt window, float softcap, float scale, SymInt threshold, "
        "float inverse, SymInt seed, SymInt draw, SymInt first_head, SymInt offset) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("attention_cpp", TORCH_BOX(&tw::attention));
  m.impl("attention_cpp_backward", TORCH_BOX(&tw::attention_backward));
}
