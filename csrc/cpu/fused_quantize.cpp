// silu(gate) * up, RMSNorm and add + RMSNorm with FP8 results on the CPU, in blocks of 1 x 128, or in MXFP8. The
// definitions are tilewright/ops/fused_quantize/fused_quantize.py. Values are rounded to the inputs' dtype before quantization, in a
// buffer that stays in cache: the bytes are those of the two ops in sequence.
#include <algorithm>

#include "cpu/quantize.h"
#include "cpu/rmsnorm.h"

namespace tw {
namespace {

template <class S>
constexpr int64_t BLOCK = std::is_same_v<S, float> ? 128 : 32;   // columns that share a scale

// Quantizes a row's blocks. row: its number, for rows of n elements. inverse: of the row.
template <class S, class T>
void quantize_row(const T* x, int64_t row, int64_t first, int64_t last, int64_t n, std::optional<int64_t> seed,
                  std::vector<uint32_t>& words, uint8_t* code, S* inverse) {
  with_random(seed.has_value(), [&](auto random) {
    for (int64_t c = first; c < last; c += BLOCK<S>) {
      const uint64_t at = uint64_t(row) * uint64_t(n) + uint64_t(c);
      inverse[c / BLOCK<S>] =
          fp8_block<decltype(random)::value, S>(x + (c - first), 0, 1, std::min(BLOCK<S>, last - c),
                                                uint64_t(seed.value_or(0)), at, 0, words, code + c, 0);
    }
  });
}

void check_blocks(int64_t rows, int64_t columns, bool mx) {
  STD_TORCH_CHECK(rows == 1 && columns == (mx ? BLOCK<uint8_t> : BLOCK<float>),
                  "tilewright: blocks must be 1 x 128, and in MXFP8 1 x 32");
}

constexpr int64_t PIECE = 8192;  // columns at a time: a multiple of BLOCK

void check_inputs(const Tensor& gate, const Tensor& up) {
  for (const Tensor* t : {&gate, &up}) {
    STD_TORCH_CHECK(t->is_cpu() && t->dim() == 2 && (t->numel() == 0 || t->size(1) == 1 || t->stride(1) == 1),
                    "tilewright: gate and up must be CPU matrices with contiguous rows");
  }
  STD_TORCH_CHECK(up.size(0) == gate.size(0) && up.size(1) == gate.size(1) && up.scalar_type() == gate.scalar_type(),
                  "tilewright: up must have gate's shape and dtype");
}

template <class T>
void silu_mul(const T* gate, const T* up, int64_t n, T* y) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float s, q;
    sigmoid_pair(load(gate[i]), s, q);
    store(y + i, load(gate[i]) * s * load(up[i]));
  }
}

constexpr int64_t SIDE = 32, WIDE = 256;  // tile that is also transposed: 16 KiB of bf16, 32 of float

// In MXFP8, and the transposes.
std::tuple<Tensor, Tensor, Tensor, Tensor> silu_mul_mxfp8_both(const Tensor& gate, const Tensor& up, int64_t B, int64_t R,
                                                               std::optional<int64_t> seed) {
  const int64_t C = gate.size(1), across = ceil_div(C, SIDE), bands = ceil_div(R, SIDE), tiles = ceil_div(C, WIDE);
  Tensor data = torch::stable::new_empty(gate, {B, R, C}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(gate, {B, R, across}, ScalarType::Byte);
  Tensor turned = torch::stable::new_empty(gate, {B, C, R}, ScalarType::Byte);
  Tensor turned_scale = torch::stable::new_empty(gate, {B, C, bands}, ScalarType::Byte);
  dispatch(gate, [&](auto element) {
    using T = decltype(element);
    const T *const g = in<T>(gate), *const u = in<T>(up);
    const int64_t g_stride = gate.stride(0), u_stride = up.stride(0);
    uint8_t *const to = out<uint8_t>(data), *const scales = out<uint8_t>(scale);
    uint8_t *const to_t = out<uint8_t>(turned), *const scales_t = out<uint8_t>(turned_scale);
    torch::stable::parallel_for(0, B * bands * tiles, grain(SIDE * WIDE), [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> words;
      std::vector<T> product(SIDE * WIDE);
      std::vector<float> tile(SIDE * WIDE);
      for (int64_t p = begin; p < end; ++p) {
        const int64_t band = p / tiles, b = band / bands, low = band % bands * SIDE, high = std::min(R, low + SIDE);
        const int64_t first = p % tiles * WIDE, last = std::min(C, first + WIDE);
        for (int64_t r = low; r < high; ++r) {
          const int64_t row = b * R + r;
          T* const y = product.data() + (r - low) * WIDE;
          silu_mul(g + row * g_stride + first, u + row * u_stride + first, last - first, y);
          quantize_row(y, row, first, last, C, seed, words, to + row * C, scales + row * across);
        }
        turn(product.data(), WIDE, high - low, last - first, tile.data(), SIDE);
        for (int64_t c = first; c < last; ++c) {
          const int64_t row = b * C + c;
          quantize_row(tile.data() + (c - first) * SIDE, row, low, high, R, seed, words, to_t + row * R,
                       scales_t + row * bands);
        }
      }
    });
  });
  return {data, scale, turned, turned_scale};
}

// Quantizes silu(gate) * up as matrices of R rows.
std::tuple<Tensor, Tensor, Tensor, Tensor> silu_mul_quantize(Tensor gate, Tensor up, int64_t R, int64_t block_rows,
                                                             int64_t block_columns, bool mx,
                                                             std::optional<int64_t> seed, bool transpose) {
  check_inputs(gate, up);
  check_blocks(block_rows, block_columns, mx);
  const int64_t rows = gate.size(0), n = gate.size(1), B = R > 0 ? rows / R : 0, pieces = ceil_div(n, PIECE);
  STD_TORCH_CHECK(R >= 0 && B * R == rows, "tilewright: gate must be matrices of ", R, " rows, got ", rows, " in all");
  STD_TORCH_CHECK(mx || !transpose, "tilewright: a transpose is in MXFP8");
  if (transpose) return silu_mul_mxfp8_both(gate, up, B, R, seed);
  Tensor data = torch::stable::new_empty(gate, {B, R, n}, ScalarType::Byte), inverse = data;
  with_scales(mx, [&](auto scale) {
    using S = decltype(scale);
    const int64_t across = ceil_div(n, BLOCK<S>);
    inverse = torch::stable::new_empty(gate, {B, R, across}, scales_type<S>());
    dispatch(gate, [&](auto element) {
      using T = decltype(element);
      const T *const g = in<T>(gate), *const u = in<T>(up);
      const int64_t g_stride = gate.stride(0), u_stride = up.stride(0);
      uint8_t* const to = out<uint8_t>(data);
      S* const scales = out<S>(inverse);
      torch::stable::parallel_for(0, rows * pieces, grain(std::min(n, PIECE)), [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> words;
        std::vector<T> product(static_cast<size_t>(std::min(n, PIECE)));
        for (int64_t p = begin; p < end; ++p) {
          const int64_t row = p / pieces, first = p % pieces * PIECE, last = std::min(n, first + PIECE);
          silu_mul(g + row * g_stride + first, u + row * u_stride + first, last - first, product.data());
          quantize_row(product.data(), row, first, last, n, seed, words, to + row * n, scales + row * across);
        }
      });
    });
  });
  return {data, inverse, Tensor(), Tensor()};
}

// keep: also returns the quantized values. The last result is the sum with the residual, if there is one.
std::tuple<Tensor, Tensor, Tensor, Tensor> rmsnorm_quantize(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                            std::optional<Tensor> bias, double eps, double offset,
                                                            bool round_xhat, bool keep, int64_t block_rows,
                                                            int64_t block_columns, bool mx,
                                                            std::optional<int64_t> seed, bool transpose) {
  check_blocks(block_rows, block_columns, mx);
  STD_TORCH_CHECK(!transpose, "tilewright: normalized rows are not transposed");
  const Norm norm = describe(x, weight, eps, round_xhat);
  const int64_t D = norm.D, rows = D > 0 ? x.numel() / D : 0;
  if (bias.has_value()) {
    check_row_major("bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == D, "tilewright: bias must be [D]");
  }
  const bool add = residual.has_value();
  if (add) {
    check_row_major("residual", *residual);
    STD_TORCH_CHECK(residual->numel() == x.numel() && (residual->scalar_type() == x.scalar_type() ||
                                                       residual->scalar_type() == ScalarType::Float),
                    "tilewright: residual must be as large as x, in its dtype or float32");
  }
  const auto w = as_float(weight, float(offset));
  const auto b = bias.has_value() ? as_float(*bias, 0) : std::vector<float>();
  const Tensor& like = add ? *residual : x;
  const int64_t dims = x.dim(), R = dims > 1 ? x.size(dims - 2) : 1;
  int64_t B = 1;
  for (int64_t d = 0; d + 2 < dims; ++d) B *= x.size(d);
  Tensor data = torch::stable::new_empty(x, {B, R, D}, ScalarType::Byte), inverse = data;
  Tensor y = keep ? torch::stable::empty_like(x) : Tensor();
  Tensor sum = add ? torch::stable::empty_like(*residual) : Tensor();
  with_scales(mx, [&](auto scale) {
    using S = decltype(scale);
    const int64_t across = ceil_div(D, BLOCK<S>);
    inverse = torch::stable::new_empty(x, {B, R, across}, scales_type<S>());
    dispatch(x, [&](auto element) {
      dispatch(like, [&](auto wide) {
        using T = decltype(element);
        using R = decltype(wide);
        const T* const from = in<T>(x);
        const R* const more = in<R>(residual);
        R* const summed = add ? out<R>(sum) : nullptr;
        T* const kept = keep ? out<T>(y) : nullptr;
        uint8_t* const to = out<uint8_t>(data);
        S* const scales = out<S>(inverse);
        torch::stable::parallel_for(0, rows, grain(D), [&](int64_t begin, int64_t end) {
          std::vector<uint32_t> words;
          std::vector<T> room(static_cast<size_t>(keep ? 0 : D));
          for (int64_t row = begin; row < end; ++row) {
            T* const normed = keep ? kept + row * D : room.data();
            float rstd;
            forward_rows<T, R>(0, 1, from + row * D, add ? more + row * D : nullptr, w.data() + row % norm.H * D,
                               b.empty() ? nullptr : b.data(), normed, add ? summed + row * D : nullptr, &rstd,
                               {D, 1, norm.eps, norm.round_xhat});
            quantize_row(normed, row, 0, D, D, seed, words, to + row * D, scales + row * across);
          }
        });
      });
    });
  });
  return {data, inverse, y, sum};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("silu_mul_cpp_quantize(Tensor gate, Tensor up, int R, int rows, int columns, bool mx, SymInt? seed, "
        "bool transpose) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("rmsnorm_cpp_quantize(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, float offset, "
        "bool round_xhat, bool keep, int rows, int columns, bool mx, SymInt? seed, bool transpose) -> "
        "(Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("silu_mul_cpp_quantize", TORCH_BOX(&tw::silu_mul_quantize));
  m.impl("rmsnorm_cpp_quantize", TORCH_BOX(&tw::rmsnorm_quantize));
}
