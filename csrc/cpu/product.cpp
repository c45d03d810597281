// out (+)= scale * a b on the CPU, accumulated in float32.
//
// a [M, S], b [S, N], both float32 or both bfloat16, rows or columns contiguous; out [M, N] float32, rows contiguous.
// With AVX-512 only (bfloat16: and its dot-product instruction): see `product_cpp_takes`. ATen has no product of 16-bit
// factors with a float32 result on a CPU, and its float32 products took 1.5 to 2.4 times as long as these (MKL on an
// AMD EPYC 9005, whose AVX-512 it does not use).
//
// A task is a block of rows by a block of columns. A single thread computes each element, summed in an order that
// depends on shapes alone: the same bits on any number of threads.
#include "cpu/product.h"

namespace tw {
namespace {

bool can_multiply(ScalarType type) {
#ifdef TW_OWN_PRODUCTS
  return type == ScalarType::Float || (type == ScalarType::BFloat16 && has_bf16());
#else
  return false;
#endif
}

// Whether these products are faster than ATen's. In float32 MKL's are on Intel's processors, whose AVX-512 it uses: the
// iteration of newton_schulz, of which a third fewer operations are computed here, took 1.3 times as long as its twin.
bool product_takes(ScalarType type) {
#if defined(TW_OWN_PRODUCTS)
  if (type == ScalarType::Float && __builtin_cpu_is("intel")) return false;
#endif
  return can_multiply(type);
}

#ifdef TW_OWN_PRODUCTS

// Per task: its sums, its packed columns and its rows fit in the second-level cache together.
constexpr int64_t ROWS = 256, COLUMNS = 192, PANEL_STEPS = 192;

int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Splits n into equal blocks of at most `most`, each a multiple of `unit`.
int64_t even(int64_t n, int64_t most, int64_t unit) { return divided(divided(n, divided(n, most)), unit) * unit; }

struct Factor {
  const char* data;
  int64_t row, column;  // strides, in elements
};

template <class P>
void multiply(Factor a, Factor b, int64_t M, int64_t S, int64_t N, float* out, int64_t stride, float scale, bool add) {
  using T = typename P::T;
  constexpr int64_t PAIR = P::PAIR, SIZE = sizeof(T);
  const T *pa = reinterpret_cast<const T*>(a.data), *pb = reinterpret_cast<const T*>(b.data);
  const int64_t height = even(M, ROWS, OUTER_ROWS), width = even(N, COLUMNS, OUTER_COLUMNS);
  const int64_t all = steps_of(S, PAIR), length = even(all, PANEL_STEPS, 1);
  const int64_t down = divided(M, height), across = divided(N, width);
  // If a is read in place, a step is the next four bytes of a row; the last bfloat16 of an odd row has no partner
  // there.
  const bool direct = a.column == 1 && S % PAIR == 0;
  torch::stable::parallel_for(0, down * across, 1, [&](int64_t lo, int64_t hi) {
    std::vector<uint32_t> panels(size_t(width * length)), rows(direct ? 0 : size_t(height * length));
    std::vector<float> sums(all > length ? size_t(height * width) : 0);
    for (int64_t task = lo; task < hi; ++task) {
      // Tasks of the same columns are neighbors if there are many columns, else those of the same rows.
      const int64_t i = N > M ? task % down : task / across, j = N > M ? task / down : task % across;
      const int64_t m0 = i * height, m1 = std::min(M, m0 + height), n0 = j * width, n = std::min(width, N - n0);
      for (int64_t s = 0; s < all; s += length) {
        const int64_t steps = std::min(length, all - s), k = s * PAIR;
        if (b.column == 1)
          pack_panels<PAIR>(pb + k * b.row + n0, b.row, S - k, steps, n, panels.data());
        else
          pack_transposed(reinterpret_cast<const uint32_t*>(pb + n0 * b.column + k), b.column / PAIR, steps, n,
                          panels.data());
        Broadcast from{a.data + (m0 * a.row + k) * SIZE, a.row * SIZE, 4};
        if (!direct) {
          for (int64_t t = 0; t < steps; ++t) {  // a step of all rows, as of b
            const int64_t left = S - k - t * PAIR;
            uint32_t* to = rows.data() + t * height;
            if (a.row == 1) {
              const T* at = pa + m0 + (k + t * PAIR) * a.column;
              pack(at, PAIR == 2 && left > 1 ? at + a.column : nullptr, m1 - m0, to, m1 - m0);
            } else {
              for (int64_t m = m0; m < m1; ++m) {
                to[m - m0] = 0;
                std::memcpy(to + (m - m0), pa + m * a.row + k + t * PAIR, size_t(std::min(PAIR, left) * SIZE));
              }
            }
          }
          from = {reinterpret_cast<const char*>(rows.data()), 4, height * 4};
        }
        const bool last = s + steps == all;
        for (int64_t c = 0; c < n; c += OUTER_COLUMNS)
          for (int64_t m = m0; m < m1; m += OUTER_ROWS) {
            const Broadcast at{from.base + (m - m0) * from.row, from.row, from.step};
            outer_tiles<P>(std::min(OUTER_ROWS, m1 - m), at, panels.data() + c * steps, steps,
                           sums.data() + (sums.empty() ? 0 : c * height + (m - m0) * OUTER_COLUMNS), s > 0,
                           last ? out + m * stride + n0 + c : nullptr, stride, std::min(OUTER_COLUMNS, n - c), scale,
                           add);
          }
      }
    }
  });
}

// t, copied unless one dimension has stride 1, with evenly many rows if bfloat16 is read in pairs along them.
Tensor along(const Tensor& t, bool pairs) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2, "tilewright: a and b must be CPU matrices");
  const bool rows = t.stride(1) == 1, columns = t.stride(0) == 1;
  const bool whole = t.size(0) % 2 == 0 && t.stride(1) % 2 == 0;
  return rows || (columns && (!pairs || whole)) ? t : torch::stable::contiguous(t);
}

Factor factor(const Tensor& t) { return {static_cast<const char*>(t.const_data_ptr()), t.stride(0), t.stride(1)}; }

#endif  // TW_OWN_PRODUCTS

void product_(Tensor a, Tensor b, Tensor result, double scale, bool add) {
  STD_TORCH_CHECK(can_multiply(a.scalar_type()), "tilewright: this processor has no product of a's dtype here");
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.scalar_type() == b.scalar_type(),
                  "tilewright: a and b must be matrices of one dtype that fit");
  STD_TORCH_CHECK(result.is_cpu() && result.dim() == 2 && result.scalar_type() == ScalarType::Float &&
                      result.size(0) == a.size(0) && result.size(1) == b.size(1) &&
                      (result.size(1) <= 1 || result.stride(1) == 1),
                  "tilewright: out must be a float32 CPU matrix with contiguous rows");
#ifdef TW_OWN_PRODUCTS
  const int64_t M = a.size(0), S = a.size(1), N = b.size(1);
  if (M == 0 || N == 0) return;
  if (!add) huge(result);
  float* to = out<float>(result);
  if (S == 0) {
    for (int64_t m = 0; m < (add ? 0 : M); ++m) std::fill_n(to + m * result.stride(0), N, 0.0f);
    return;
  }
  const bool half = a.scalar_type() == ScalarType::BFloat16;
  a = along(a, false);
  b = along(b, half);
  if (half)
    multiply<Half>(factor(a), factor(b), M, S, N, to, result.stride(0), float(scale), add);
  else
    multiply<Float>(factor(a), factor(b), M, S, N, to, result.stride(0), float(scale), add);
#endif
}

void huge_pages_(Tensor t) { huge(std::move(t)); }

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("product_cpp_(Tensor a, Tensor b, Tensor(a!) out, float scale, bool add) -> ()");
  m.def("product_cpp_takes(ScalarType dtype) -> bool");
  m.def("huge_pages_cpp_(Tensor(a!) t) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("product_cpp_", TORCH_BOX(&tw::product_));
  m.impl("huge_pages_cpp_", TORCH_BOX(&tw::huge_pages_));
}
STABLE_TORCH_LIBRARY_IMPL(tilewright, CompositeExplicitAutograd, m) {
  m.impl("product_cpp_takes", TORCH_BOX(&tw::product_takes));
}
