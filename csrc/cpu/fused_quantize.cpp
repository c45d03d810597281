// silu(gate) * up and RMSNorm with their results in FP8 on the CPU, in blocks of 1 x 128. The definitions are
// tilewright/ops/fused_quantize.py. What is quantised is rounded to the inputs' dtype first, in a buffer that stays in
// cache: the bytes are those of the two ops one after the other.
#include <algorithm>

#include "cpu/quantize.h"
#include "cpu/rmsnorm.h"

namespace tw {
namespace {

constexpr int64_t BLOCK = 128;

// A row's blocks. row: its number, of rows of n elements. inverse: of the row.
template <class T>
void quantize_row(const T* x, int64_t row, int64_t first, int64_t last, int64_t n, std::optional<int64_t> seed,
                  std::vector<uint32_t>& words, uint8_t* code, float* inverse) {
  for (int64_t c = first; c < last; c += BLOCK) {
    const int64_t columns = std::min(BLOCK, last - c);
    const uint64_t at = uint64_t(row) * uint64_t(n) + uint64_t(c);
    inverse[c / BLOCK] = seed.has_value() ? fp8_block<true>(x + (c - first), 0, 1, columns, uint64_t(*seed), at, 0,
                                                            words, code + c, 0)
                                          : fp8_block<false>(x + (c - first), 0, 1, columns, 0, at, 0, words, code + c,
                                                             0);
  }
}

constexpr int64_t PIECE = 8192;  // columns at a time: a multiple of BLOCK

std::tuple<Tensor, Tensor> silu_mul_quantize(Tensor gate, Tensor up, std::optional<int64_t> seed) {
  for (const Tensor* t : {&gate, &up}) {
    STD_TORCH_CHECK(t->is_cpu() && t->dim() == 2 && (t->numel() == 0 || t->size(1) == 1 || t->stride(1) == 1),
                    "tilewright: gate and up must be CPU matrices with contiguous rows");
  }
  const int64_t rows = gate.size(0), n = gate.size(1), across = ceil_div(n, BLOCK), pieces = ceil_div(n, PIECE);
  STD_TORCH_CHECK(up.size(0) == rows && up.size(1) == n && up.scalar_type() == gate.scalar_type(),
                  "tilewright: up must have gate's shape and dtype");
  Tensor data = torch::stable::new_empty(gate, {rows, n}, ScalarType::Byte);
  Tensor inverse = torch::stable::new_empty(gate, {rows, across}, ScalarType::Float);
  dispatch(gate, [&](auto element) {
    using T = decltype(element);
    const T *const g = in<T>(gate), *const u = in<T>(up);
    const int64_t g_stride = gate.stride(0), u_stride = up.stride(0);
    uint8_t* const to = out<uint8_t>(data);
    float* const scales = out<float>(inverse);
    torch::stable::parallel_for(0, rows * pieces, grain(std::min(n, PIECE)), [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> words;
      std::vector<T> product(static_cast<size_t>(std::min(n, PIECE)));
      T* const y = product.data();
      for (int64_t p = begin; p < end; ++p) {
        const int64_t row = p / pieces, first = p % pieces * PIECE, last = std::min(n, first + PIECE);
        const T *const a = g + row * g_stride + first, *const b = u + row * u_stride + first;
        TW_SIMD
        for (int64_t i = 0; i < last - first; ++i) {
          float s, q;
          sigmoid_pair(load(a[i]), s, q);
          store(y + i, load(a[i]) * s * load(b[i]));
        }
        quantize_row(y, row, first, last, n, seed, words, to + row * n, scales + row * across);
      }
    });
  });
  return {data, inverse};
}

// keep: also returns what was quantised; otherwise nothing in its place.
std::tuple<Tensor, Tensor, Tensor> rmsnorm_quantize(Tensor x, Tensor weight, std::optional<Tensor> bias, double eps,
                                                    double offset, bool round_xhat, std::optional<int64_t> seed,
                                                    bool keep) {
  const Norm norm = describe(x, weight, eps, round_xhat);
  const int64_t D = norm.D, rows = D > 0 ? x.numel() / D : 0, across = ceil_div(D, BLOCK);
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == D, "tilewright: bias must be [D]");
  }
  const auto w = as_float(weight, float(offset));
  const auto b = bias.has_value() ? as_float(*bias, 0) : std::vector<float>();
  Tensor data = torch::stable::new_empty(x, {rows, D}, ScalarType::Byte);
  Tensor inverse = torch::stable::new_empty(x, {rows, across}, ScalarType::Float);
  Tensor y = torch::stable::new_empty(x, {keep ? rows : 0, D});
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    T* const kept = keep ? out<T>(y) : nullptr;
    uint8_t* const to = out<uint8_t>(data);
    float* const scales = out<float>(inverse);
    torch::stable::parallel_for(0, rows, grain(D), [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> words;
      std::vector<T> room(static_cast<size_t>(keep ? 0 : D));
      for (int64_t row = begin; row < end; ++row) {
        T* const normed = keep ? kept + row * D : room.data();
        float rstd;
        forward_rows<T, T>(0, 1, from + row * D, nullptr, w.data() + row % norm.H * D, b.empty() ? nullptr : b.data(),
                           normed, nullptr, &rstd, {D, 1, norm.eps, norm.round_xhat});
        quantize_row(normed, row, 0, D, D, seed, words, to + row * D, scales + row * across);
      }
    });
  });
  return {data, inverse, y};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("silu_mul_cpp_quantize(Tensor gate, Tensor up, int? seed) -> (Tensor, Tensor)");
  m.def("rmsnorm_cpp_quantize(Tensor x, Tensor weight, Tensor? bias, float eps, float offset, bool round_xhat, "
        "int? seed, bool keep) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("silu_mul_cpp_quantize", TORCH_BOX(&tw::silu_mul_quantize));
  m.impl("rmsnorm_cpp_quantize", TORCH_BOX(&tw::rmsnorm_quantize));
}
