// One product per expert on the CPU. The definition is tilewright/ops/moe/grouped_gemm.py.
//
// R = rows, E = experts, x [R, K], weight [E, N, K], dy and y [R, N]. A single thread computes each result element,
// summed in an order that depends on shapes alone: the same bits on any number of threads, for products that are
// computed here. ATen's sums (see below) may depend on it.
//
// With AVX-512 the products are computed here, for bfloat16 with its dot-product instruction. Two kernels, both with 24
// sums in registers, which is more than hides the latency of two multiply-adds per cycle:
//   dot:    y. x and weight both run along the summed dimension, so neither is rearranged, and a weight is read once
//           from memory: with few rows per expert that is all the time it takes.
//   outer:  dx and dweight, where that is the slow dimension of one factor, or of both. 64 columns of it are packed
//           (bfloat16: rows in pairs, as the instruction requires), the other factor is broadcast.
// Without it each expert's product is ATen's; and so are those of bfloat16 for experts with many rows, where oneDNN's
// kernels are 5 to 30 % faster (AMD EPYC 9005; in float32 ATen's take 1.2 to 2 times as long at any number of rows), and
// with AMX, which oneDNN uses, already for a few.
//
// A task is a block of columns for one expert, blocks outermost: torch gives each thread a run of tasks, and so every
// thread gets an equal share of every expert, however unequal they are.
#include "cpu/product.h"

#ifdef TW_OWN_PRODUCTS
#include <cpuid.h>
#endif

namespace tw {
namespace {

struct Group {
  int64_t begin, end;
  bool done = false;  // another kernel has computed it
  int64_t rows() const { return end - begin; }
};

// The rows of each expert. Offsets were checked above this operator; here they are only kept within memory.
std::vector<Group> groups(const Tensor& offsets, int64_t rows) {
  check_row_major("offsets", offsets);
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Int && offsets.numel() > 0,
                  "tilewright: offsets must be int32 [E]");
  std::vector<Group> found;
  int64_t last = 0;
  for (int64_t e = 0; e < offsets.numel(); ++e) {
    const int64_t end = in<int32_t>(offsets)[e];
    STD_TORCH_CHECK(end >= last && end <= rows, "tilewright: offsets must not decrease and lie within 0 and ", rows,
                    ", got ", end, " at index ", e);
    found.push_back(Group{last, end});
    last = end;
  }
  return found;
}

Tensor matrix(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2, "tilewright: ", name, " must be a CPU matrix");
  const bool rows = (t.size(1) <= 1 || t.stride(1) == 1) && (t.size(0) <= 1 || t.stride(0) >= t.size(1));
  return rows ? t : torch::stable::contiguous(t);
}

Tensor matrices(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 3 && t.scalar_type() == like.scalar_type(), "tilewright: ", name,
                  " must be a CPU tensor [E, N, K] of the rows' dtype");
  return torch::stable::contiguous(t);
}

template <class T>
void clear(T* p, int64_t n) {
  if (n > 0) std::memset(static_cast<void*>(p), 0, size_t(n) * sizeof(T));
}

// ---- ATen's products

// out = a @ b.
void mm(const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  STD_TORCH_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION) == 0,
                  "tilewright: aten::mm failed");
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the reference that the call left on the stack
}

Tensor part(const Tensor& t, Group g) {
  Tensor copy = t;
  return torch::stable::narrow(copy, 0, g.begin, g.rows());
}

// ---- products computed here

#ifdef TW_OWN_PRODUCTS

constexpr int64_t DOT_ROWS = 4, DOT_COLUMNS = 6;   // 24 sums, 6 weights and an x: 31 of 32 registers
constexpr int64_t L2_BYTES = 512 << 10;  // of a core's second-level cache, for a block of weights
constexpr int64_t PANEL_UNITS = STEPS * 256;  // all panels, in units of four bytes: 256 KiB of the second-level cache
constexpr int64_t SUMS = 32768;  // sums in memory between panels
constexpr int64_t LOW_ROWS = 32, LOW_STEPS = 64;  // with few rows, reads dominate and need long runs of memory

// y[m][n] = <x[m], w[n]>, of vectors of K elements.
template <class P, int M, int N>
TW_BF16 void dot_tile(const typename P::T* x, int64_t x_stride, const typename P::T* w, int64_t w_stride, int64_t K,
                      typename P::T* y, int64_t y_stride) {
  __m512 sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + P::STEP <= K; k += P::STEP) {
    typename P::Vector b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = P::get(w + n * w_stride + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto a = P::get(x + m * x_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = P::add(sum[m][n], a, b[n]);
    }
  }
  if (k < K) {
    for (int m = 0; m < M; ++m) {
      const auto a = P::get(x + m * x_stride + k, K - k);
      for (int n = 0; n < N; ++n) sum[m][n] = P::add(sum[m][n], a, P::get(w + n * w_stride + k, K - k));
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(y + m * y_stride + n, _mm512_reduce_add_ps(sum[m][n]));
}

template <class P, int M>
TW_BF16 void dot_rows(const typename P::T* x, int64_t x_stride, const typename P::T* w, int64_t columns, int64_t K,
                      typename P::T* y, int64_t y_stride) {
  int64_t n = 0;
  for (; n + DOT_COLUMNS <= columns; n += DOT_COLUMNS)
    dot_tile<P, M, DOT_COLUMNS>(x, x_stride, w + n * K, K, K, y + n, y_stride);
  for (; n < columns; ++n) dot_tile<P, M, 1>(x, x_stride, w + n * K, K, K, y + n, y_stride);
}

// A thread's buffers.
struct Scratch {
  std::vector<uint32_t> panels = std::vector<uint32_t>(size_t(PANEL_UNITS));
  std::vector<float> sums = std::vector<float>(size_t(SUMS));
};

// The largest blocks into which `outer_block` splits a product.
struct Shape {
  int64_t rows, steps, columns;
};

Shape shape_of(int64_t rows, int64_t steps, int64_t columns) {
  const int64_t all = (columns + OUTER_COLUMNS - 1) / OUTER_COLUMNS * OUTER_COLUMNS;
  if (steps <= STEPS)  // one panel per column: no sums in memory
    return {rows, steps, std::min(all, PANEL_UNITS / std::max<int64_t>(steps, 1) / OUTER_COLUMNS * OUTER_COLUMNS)};
  const int64_t high = rows <= LOW_ROWS ? LOW_STEPS : STEPS, width = std::min(all, PANEL_UNITS / high);
  return {std::min(rows, SUMS / width), high, width};
}

// Writes to `to` [rows, columns] the sum over `sum` elements of a and b; packer(first step, steps, panels) packs steps
// of b. columns: at most those of the shape.
template <class P, class Packer>
void outer_block(Shape shape, int64_t rows, Broadcast a, Packer&& packer, int64_t sum, int64_t columns,
                 typename P::T* to, int64_t stride, Scratch& scratch) {
  const int64_t all = steps_of(sum, P::PAIR);
  for (int64_t first = 0; first < rows; first += shape.rows) {
    const int64_t end = std::min(rows, first + shape.rows);
    for (int64_t s = 0; s < all; s += shape.steps) {
      const int64_t steps = std::min(shape.steps, all - s);
      uint32_t* panels = scratch.panels.data();
      packer(s, steps, panels);
      for (int64_t m = first; m < end; m += OUTER_ROWS) {
        const Broadcast am{a.base + m * a.row + s * a.step, a.row, a.step};
        for (int64_t c = 0; c < columns; c += OUTER_COLUMNS) {
          float* sums = scratch.sums.data() + (steps == all ? 0 : c * shape.rows + (m - first) * OUTER_COLUMNS);
          outer_tiles<P>(std::min(OUTER_ROWS, end - m), am, panels + c * steps, steps, sums, s > 0,
                         s + steps == all ? to + m * stride + c : nullptr, stride,
                         std::min(OUTER_COLUMNS, columns - c));
        }
      }
    }
  }
}

// From this many rows on it pays to transpose the weights, which saves `dot_tile` its sums across a register.
constexpr int64_t MANY = 48;

template <class P>
void product(const Tensor& x, const Tensor& w, const std::vector<Group>& experts, const Tensor& y) {
  using T = typename P::T;
  const int64_t K = x.size(1), N = w.size(1), xs = x.stride(0);
  const int64_t fit = L2_BYTES / int64_t(std::max<int64_t>(K, 1) * sizeof(T)) / DOT_COLUMNS * DOT_COLUMNS;
  const int64_t width = std::min(std::max(fit, DOT_COLUMNS), int64_t(96));
  constexpr int64_t block = 192;  // columns of a task: three panels, and enough tasks for all threads
  const int64_t blocks = (N + block - 1) / block;
  const int64_t E = int64_t(experts.size());
  const T *px = in<T>(x), *pw = in<T>(w);
  T* py = out<T>(y);
  torch::stable::parallel_for(0, blocks * E, 1, [&](int64_t lo, int64_t hi) {
    Scratch scratch;
    for (int64_t task = lo; task < hi; ++task) {
      const Group g = experts[size_t(task % E)];
      if (g.done) continue;
      const int64_t first = task / E * block, end = std::min(N, first + block);
      if (g.rows() >= MANY && K % P::PAIR == 0 && K > 0) {
        const Broadcast a{reinterpret_cast<const char*>(px + g.begin * xs), xs * int64_t(sizeof(T)), 4};
        const Shape shape = shape_of(g.rows(), steps_of(K, P::PAIR), end - first);
        for (int64_t n = first; n < end; n += shape.columns) {
          const int64_t columns = std::min(shape.columns, end - n);
          const auto* b = reinterpret_cast<const uint32_t*>(pw + (task % E * N + n) * K);
          outer_block<P>(shape, g.rows(), a, [&](int64_t s, int64_t steps, uint32_t* panels) {
            pack_transposed(b + s, K / P::PAIR, steps, columns, panels);
          }, K, columns, py + g.begin * N + n, N, scratch);
        }
        continue;
      }
      for (int64_t n = first; n < end; n += width) {
        const int64_t columns = std::min(width, end - n);
        const T* we = pw + (task % E * N + n) * K;
        for (int64_t r = g.begin; r < g.end; r += DOT_ROWS) {
          const T* xr = px + r * xs;
          T* yr = py + r * N + n;
          switch (std::min(DOT_ROWS, g.end - r)) {
            case 4: dot_rows<P, 4>(xr, xs, we, columns, K, yr, N); break;
            case 3: dot_rows<P, 3>(xr, xs, we, columns, K, yr, N); break;
            case 2: dot_rows<P, 2>(xr, xs, we, columns, K, yr, N); break;
            default: dot_rows<P, 1>(xr, xs, we, columns, K, yr, N);
          }
        }
      }
    }
  });
}

// to [M, columns] for very few rows: every element of the weights is read once, in memory order, and used from a
// register, with the sums in the first-level cache. a(m, n) = d[m * d_stride + n].
template <int M>
void few_rows(const float* d, int64_t d_stride, const float* w, int64_t w_stride, int64_t N, int64_t columns, float* to,
              int64_t stride, float* sums) {
  constexpr int TOGETHER = 6;  // rows of weights; their multipliers stay in registers
  const int64_t wide = (columns + 15) / 16 * 16;
  std::memset(sums, 0, size_t(M * wide) * sizeof(float));
  for (int64_t n = 0; n < N; n += TOGETHER) {
    __m512 a[M][TOGETHER];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < TOGETHER; ++i) a[m][i] = _mm512_set1_ps(n + i < N ? d[m * d_stride + n + i] : 0.0f);
    const int64_t together = std::min<int64_t>(TOGETHER, N - n);
    for (int64_t c = 0; c < columns; c += 16) {
      const __mmask16 mask = first_of(columns - c);
      __m512 sum[M];
      for (int m = 0; m < M; ++m) sum[m] = _mm512_loadu_ps(sums + m * wide + c);
      if (together == TOGETHER) {
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; ++i) {
          const __m512 b = _mm512_maskz_loadu_ps(mask, w + (n + i) * w_stride + c);
          for (int m = 0; m < M; ++m) sum[m] = _mm512_fmadd_ps(a[m][i], b, sum[m]);
        }
      } else {
        for (int64_t i = 0; i < together; ++i) {
          const __m512 b = _mm512_maskz_loadu_ps(mask, w + (n + i) * w_stride + c);
          for (int m = 0; m < M; ++m)
            sum[m] = _mm512_fmadd_ps(_mm512_set1_ps(d[m * d_stride + n + i]), b, sum[m]);
        }
      }
      for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * wide + c, sum[m]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int64_t c = 0; c < columns; c += 16)
      _mm512_mask_storeu_ps(to + m * stride + c, first_of(columns - c), _mm512_loadu_ps(sums + m * wide + c));
}

// Two rows of weights are interleaved in a register, which leaves 32 columns as two vectors of sums: of each 128 bits
// of weights, the first four columns and the last four.
template <int M>
TW_BF16 void few_rows(const bf16* d, int64_t d_stride, const bf16* w, int64_t w_stride, int64_t N, int64_t columns,
                      bf16* to, int64_t stride, float* sums) {
  constexpr int PAIRS = 4;
  const int64_t wide = (columns + 31) / 32 * 32;
  std::memset(sums, 0, size_t(M * wide) * sizeof(float));
  for (int64_t n = 0; n < N; n += 2 * PAIRS) {
    __m512bh a[M][PAIRS];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < PAIRS; ++i) {
        const bf16* at = d + m * d_stride + n + 2 * i;
        const uint32_t even = n + 2 * i < N ? at[0].bits : 0, odd = n + 2 * i + 1 < N ? at[1].bits : 0;
        a[m][i] = (__m512bh)_mm512_set1_epi32(int32_t(even | odd << 16));
      }
    for (int64_t c = 0; c < columns; c += 32) {
      const __mmask32 mask = columns - c >= 32 ? 0xFFFFFFFFu : (1u << (columns - c)) - 1;
      __m512 low[M], high[M];
      for (int m = 0; m < M; ++m) {
        low[m] = _mm512_loadu_ps(sums + m * wide + c);
        high[m] = _mm512_loadu_ps(sums + m * wide + c + 16);
      }
#pragma GCC unroll 8
      for (int i = 0; i < PAIRS; ++i) {
        const int64_t row = n + 2 * i, next = row + 1;
        const __m512i b0 = _mm512_maskz_loadu_epi16(row < N ? mask : 0, w + std::min(row, N - 1) * w_stride + c);
        const __m512i b1 = _mm512_maskz_loadu_epi16(next < N ? mask : 0, w + std::min(next, N - 1) * w_stride + c);
        const auto first = (__m512bh)_mm512_unpacklo_epi16(b0, b1), last = (__m512bh)_mm512_unpackhi_epi16(b0, b1);
        for (int m = 0; m < M; ++m) {
          low[m] = _mm512_dpbf16_ps(low[m], a[m][i], first);
          high[m] = _mm512_dpbf16_ps(high[m], a[m][i], last);
        }
      }
      for (int m = 0; m < M; ++m) {
        _mm512_storeu_ps(sums + m * wide + c, low[m]);
        _mm512_storeu_ps(sums + m * wide + c + 16, high[m]);
      }
    }
  }
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int m = 0; m < M; ++m)
    for (int64_t c = 0; c < columns; c += 32) {
      const __mmask32 mask = columns - c >= 32 ? 0xFFFFFFFFu : (1u << (columns - c)) - 1;
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + m * wide + c + 16),
                                                _mm512_loadu_ps(sums + m * wide + c));
      _mm512_mask_storeu_epi16(to + m * stride + c, mask, _mm512_permutexvar_epi64(order, (__m512i)both));
    }
}

constexpr int64_t FEW = 4;  // rows up to which `few_rows` is faster than packing
constexpr int64_t FEW_COLUMNS = 1024;  // per task, for both threads and caches

template <class P>
void few_x(const Group& g, const typename P::T* d, int64_t d_stride, const typename P::T* w, int64_t w_stride,
           int64_t N, int64_t columns, typename P::T* to, int64_t stride, Scratch& scratch) {
  for (int64_t k = 0; k < columns; k += FEW_COLUMNS) {
    const int64_t here = std::min(FEW_COLUMNS, columns - k);
    float* sums = scratch.sums.data();
    switch (g.rows()) {
      case 4: few_rows<4>(d, d_stride, w + k, w_stride, N, here, to + k, stride, sums); break;
      case 3: few_rows<3>(d, d_stride, w + k, w_stride, N, here, to + k, stride, sums); break;
      case 2: few_rows<2>(d, d_stride, w + k, w_stride, N, here, to + k, stride, sums); break;
      default: few_rows<1>(d, d_stride, w + k, w_stride, N, here, to + k, stride, sums);
    }
  }
}

template <class P>
void outer_x(const Tensor& dy, const Tensor& w, const std::vector<Group>& experts, const Tensor& dx) {
  using T = typename P::T;
  const int64_t N = dy.size(1), K = w.size(2), width = FEW_COLUMNS, blocks = (K + width - 1) / width;
  const int64_t E = int64_t(experts.size()), stride = dy.stride(0);
  const bool whole = N % P::PAIR == 0;
  const T *pd = in<T>(dy), *pw = in<T>(w);
  T* px = out<T>(dx);
  torch::stable::parallel_for(0, blocks * E, 1, [&](int64_t lo, int64_t hi) {
    Scratch scratch;
    std::vector<T> even;
    for (int64_t task = lo; task < hi; ++task) {
      const Group g = experts[size_t(task % E)];
      if (g.done || g.rows() == 0) continue;
      const int64_t first = task / E * width, end = std::min(K, first + width);
      const T* d = pd + g.begin * stride;
      if (g.rows() <= FEW) {
        few_x<P>(g, d, stride, pw + task % E * N * K + first, K, N, end - first, px + g.begin * K + first, K, scratch);
        continue;
      }
      int64_t apart = stride;
      if (!whole) {  // the last element of a row is multiplied together with a 0, not with its neighbor in memory
        apart = N + 1;
        even.assign(size_t(g.rows() * apart), T{});
        for (int64_t r = 0; r < g.rows(); ++r)
          std::memcpy(static_cast<void*>(&even[size_t(r * apart)]), d + r * stride, size_t(N) * sizeof(T));
        d = even.data();
      }
      const Broadcast a{reinterpret_cast<const char*>(d), apart * int64_t(sizeof(T)), 4};
      const Shape shape = shape_of(g.rows(), steps_of(N, P::PAIR), end - first);
      for (int64_t k = first; k < end; k += shape.columns) {
        const int64_t columns = std::min(shape.columns, end - k);
        const T* b = pw + task % E * N * K + k;
        outer_block<P>(shape, g.rows(), a, [&](int64_t s, int64_t steps, uint32_t* panels) {
          pack_panels<P::PAIR>(b + s * P::PAIR * K, K, N - s * P::PAIR, steps, columns, panels);
        }, N, columns, px + g.begin * K + k, K, scratch);
      }
    }
  });
}

template <class P>
void outer_weight(const Tensor& dy, const Tensor& x, const std::vector<Group>& experts, const Tensor& dw) {
  using T = typename P::T;
  constexpr int64_t HEIGHT = 96;  // rows of dweight per task: a matrix has enough tasks for all threads
  const int64_t N = dy.size(1), K = x.size(1), blocks = (N + HEIGHT - 1) / HEIGHT;
  const int64_t E = int64_t(experts.size()), d_stride = dy.stride(0), x_stride = x.stride(0);
  const T *pd = in<T>(dy), *px = in<T>(x);
  T* pw = out<T>(dw);
  torch::stable::parallel_for(0, blocks * E, 1, [&](int64_t lo, int64_t hi) {
    Scratch scratch;
    std::vector<uint32_t> pairs;
    for (int64_t task = lo; task < hi; ++task) {
      const int64_t e = task % E, n = task / E * HEIGHT, rows = std::min(HEIGHT, N - n);
      const Group g = experts[size_t(e)];
      T* to = pw + (e * N + n) * K;
      if (g.done) continue;
      if (g.rows() == 0) {
        clear(to, rows * K);
        continue;
      }
      const T* d = pd + g.begin * d_stride + n;
      Broadcast a{reinterpret_cast<const char*>(d), 4, d_stride * 4};
      if (P::PAIR == 2) {
        pairs.resize(size_t((g.rows() + 1) / 2 * rows));
        for (int64_t r = 0; r < g.rows(); r += 2)
          pack(d + r * d_stride, r + 1 < g.rows() ? d + (r + 1) * d_stride : nullptr, rows,
               &pairs[size_t(r / 2 * rows)], rows);
        a = {reinterpret_cast<const char*>(pairs.data()), 4, rows * 4};
      }
      const Shape shape = shape_of(rows, steps_of(g.rows(), P::PAIR), K);
      for (int64_t k = 0; k < K; k += shape.columns) {
        const int64_t columns = std::min(shape.columns, K - k);
        const T* b = px + g.begin * x_stride + k;
        outer_block<P>(shape, rows, a, [&](int64_t s, int64_t steps, uint32_t* panels) {
          pack_panels<P::PAIR>(b + s * P::PAIR * x_stride, x_stride, g.rows() - s * P::PAIR, steps, columns, panels);
        }, g.rows(), columns, to + k, K, scratch);
      }
    }
  });
}

// Calls f with Float or Half, if the products are computed here.
template <class F>
bool own(const Tensor& t, F&& f) {
  if (t.scalar_type() == ScalarType::Float) {
    f(Float{});
    return true;
  }
  if (t.scalar_type() == ScalarType::BFloat16 && has_bf16()) {
    f(Half{});
    return true;
  }
  return false;
}

#endif  // TW_OWN_PRODUCTS

// Rows of a bfloat16 expert from which on ATen is faster. With AMX it took 0.75 (forward) and 0.53 (backward) of the
// time at 32 rows, and 1.5 times as long (forward) at 4; between them nothing was measured.
constexpr int64_t ATEN_FORWARD = 32, ATEN_BACKWARD = 192, ATEN_WITH_AMX = 16;

bool has_amx() {
#ifdef TW_OWN_PRODUCTS
  static const bool found = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;  // AMX-BF16
  }();
  return found;
#else
  return false;
#endif
}

// Whether an expert's product is left to ATen while others are computed here.
bool for_aten(const Tensor& t, const Group& g, int64_t from) {
  return t.scalar_type() == ScalarType::BFloat16 && g.rows() >= from;
}

// Calls f(expert) for those that ATen computes: all, or, with products computed here too, those with this many rows.
template <class F>
void each_for_aten(const Tensor& t, std::vector<Group>& experts, int64_t from, F&& f) {
#ifdef TW_OWN_PRODUCTS
  const bool all = t.scalar_type() == ScalarType::BFloat16 && !has_bf16();
#else
  const bool all = true;
#endif
  if (has_amx()) from = std::min(from, ATEN_WITH_AMX);
  for (size_t e = 0; e < experts.size(); ++e)
    if (all || for_aten(t, experts[e], from)) {
      f(int64_t(e));
      experts[e].done = true;
    }
}

// ---- operators

void clear_rows(const Tensor& t, int64_t first) {
  const int64_t columns = t.size(1);
  dispatch(t, [&](auto e) {
    using T = decltype(e);
    clear(out<T>(t) + first * columns, (t.size(0) - first) * columns);
  });
}

void check_experts(const Tensor& w, const std::vector<Group>& experts) {
  STD_TORCH_CHECK(w.size(0) == int64_t(experts.size()), "tilewright: weight must have as many experts as offsets");
}

Tensor grouped_gemm_forward(Tensor x, Tensor weight, Tensor offsets) {
  x = matrix("x", x);
  weight = matrices("weight", weight, x);
  STD_TORCH_CHECK(weight.size(2) == x.size(1), "tilewright: weight must have x's columns");
  auto experts = groups(offsets, x.size(0));
  check_experts(weight, experts);
  Tensor y = huge(torch::stable::new_empty(x, {x.size(0), weight.size(1)}));
  clear_rows(y, experts.back().end);
  if (y.numel() == 0) return y;
  each_for_aten(x, experts, ATEN_FORWARD, [&](int64_t e) {
    const Group g = experts[size_t(e)];
    if (g.rows() > 0)
      mm(part(x, g), torch::stable::transpose(torch::stable::select(weight, 0, e), 0, 1), part(y, g));
  });
#ifdef TW_OWN_PRODUCTS
  own(x, [&](auto p) { product<decltype(p)>(x, weight, experts, y); });
#endif
  return y;
}

Tensor grouped_gemm_backward_x(Tensor dy, Tensor weight, Tensor offsets) {
  dy = matrix("dy", dy);
  weight = matrices("weight", weight, dy);
  STD_TORCH_CHECK(weight.size(1) == dy.size(1), "tilewright: weight must have a row for each of dy's columns");
  auto experts = groups(offsets, dy.size(0));
  check_experts(weight, experts);
  Tensor dx = huge(torch::stable::new_empty(dy, {dy.size(0), weight.size(2)}));
  if (dy.size(1) == 0) {
    clear_rows(dx, 0);
    return dx;
  }
  clear_rows(dx, experts.back().end);
  if (dx.numel() == 0) return dx;
  each_for_aten(dy, experts, ATEN_BACKWARD, [&](int64_t e) {
    const Group g = experts[size_t(e)];
    if (g.rows() > 0) mm(part(dy, g), torch::stable::select(weight, 0, e), part(dx, g));
  });
#ifdef TW_OWN_PRODUCTS
  own(dy, [&](auto p) { outer_x<decltype(p)>(dy, weight, experts, dx); });
#endif
  return dx;
}

Tensor grouped_gemm_backward_weight(Tensor dy, Tensor x, Tensor offsets) {
  dy = matrix("dy", dy);
  x = matrix("x", x);
  STD_TORCH_CHECK(dy.size(0) == x.size(0) && dy.scalar_type() == x.scalar_type(),
                  "tilewright: dy must have x's rows and dtype");
  auto experts = groups(offsets, x.size(0));
  Tensor dw = huge(torch::stable::new_empty(x, {int64_t(experts.size()), dy.size(1), x.size(1)}));
  if (dw.numel() == 0) return dw;
  each_for_aten(x, experts, ATEN_BACKWARD, [&](int64_t e) {
    const Group g = experts[size_t(e)];
    Tensor to = torch::stable::select(dw, 0, e);
    if (g.rows() > 0)
      mm(torch::stable::transpose(part(dy, g), 0, 1), part(x, g), to);
    else
      clear_rows(to, 0);
  });
#ifdef TW_OWN_PRODUCTS
  own(x, [&](auto p) { outer_weight<decltype(p)>(dy, x, experts, dw); });
#endif
  return dw;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("grouped_gemm_cpp_forward(Tensor x, Tensor weight, Tensor offsets) -> Tensor");
  m.def("grouped_gemm_cpp_backward_x(Tensor dy, Tensor weight, Tensor offsets) -> Tensor");
  m.def("grouped_gemm_cpp_backward_weight(Tensor dy, Tensor x, Tensor offsets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("grouped_gemm_cpp_forward", TORCH_BOX(&tw::grouped_gemm_forward));
  m.impl("grouped_gemm_cpp_backward_x", TORCH_BOX(&tw::grouped_gemm_backward_x));
  m.impl("grouped_gemm_cpp_backward_weight", TORCH_BOX(&tw::grouped_gemm_backward_weight));
}
