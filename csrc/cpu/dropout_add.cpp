// residual + dropout(x) on the CPU, and its gradient, which is dropout without a residual. The definition is
// tilewright/ops/activation/dropout_add.py.
#include <algorithm>

#include "cpu/like.h"
#include "cpu/quantize.h"

namespace tw {
namespace {

// Elements whose random bits are drawn at a time: they stay in the first-level cache, and a piece begins with a block
// of the generator.
constexpr int64_t PIECE = 1024;

struct Mask {
  uint64_t seed;
  uint32_t c2, c3;  // the counter's upper words
  uint32_t most;    // an element is dropped if its bits are at most this
  float scale;      // of the others
  uint64_t first, width, skip;  // of a part: its block j is block first + j + j / width * skip of the whole
};

// Random bits of elements 4 * block to 4 * block + n - 1; `words` has room for whole blocks.
inline void draw(const Mask& mask, uint64_t block, int64_t n, uint32_t* words) {
  const uint64_t end = block + uint64_t(n + 3) / 4;
  while (block < end) {
    const uint64_t row = mask.skip == 0 ? 0 : block / mask.width;
    const uint64_t next = mask.skip == 0 ? end : std::min(end, (row + 1) * mask.width);
    philox_row(mask.seed, mask.first + block + row * mask.skip, mask.c2, mask.c3, int64_t(next - block), words);
    words += 4 * (next - block);
    block = next;
  }
}

template <bool DROP, bool ADD, class X, class Y>
void piece(const X* x, const Y* residual, Y* y, int64_t n, const uint32_t* words, uint32_t most, float scale) {
  TW_SIMD
  for (int64_t i = 0; i < n; ++i) {
    float v = load(x[i]);
    if (DROP) {
      const float scaled = v * scale;
      v = words[i] > most ? scaled : 0.0f;
    }
    if (ADD) v += load(residual[i]);
    store(y + i, v);
  }
}

template <bool DROP, bool ADD, class X, class Y>
void pieces(const X* x, const Y* residual, Y* y, int64_t n, const Mask& mask) {
  torch::stable::parallel_for(0, (n + PIECE - 1) / PIECE, grain(PIECE), [&](int64_t begin, int64_t end) {
    uint32_t words[PIECE];
    for (int64_t p = begin; p < end; ++p) {
      const int64_t at = p * PIECE, m = std::min(PIECE, n - at);
      if (DROP) draw(mask, uint64_t(at) / 4, m, words);
      piece<DROP, ADD>(x + at, ADD ? residual + at : nullptr, y + at, m, words, mask.most, mask.scale);
    }
  });
}

Tensor dropout_add(Tensor x, std::optional<Tensor> residual, int64_t threshold, double scale, int64_t seed,
                   int64_t offset, int64_t first, int64_t width, int64_t skip, ScalarType dtype) {
  check_row_major("x", x);
  if (residual.has_value()) {
    check_like_x("residual", *residual, x, false);
    STD_TORCH_CHECK(residual->scalar_type() == dtype, "tilewright: residual must have the result's dtype");
  }
  STD_TORCH_CHECK(threshold >= 0 && threshold <= int64_t(1) << 32, "tilewright: threshold must be 0 to 2^32, got ",
                  threshold);
  STD_TORCH_CHECK(seed >= 0 && offset >= 0 && offset < int64_t(1) << 62,
                  "tilewright: seed must be >= 0 and offset 0 to 2^62 - 1, got ", seed, " and ", offset);
  STD_TORCH_CHECK(first >= 0 && width > 0 && skip >= 0, "tilewright: first and skip must be >= 0 and width > 0, got ",
                  first, ", ", skip, " and ", width);
  const bool drop = threshold > 0;
  const Mask mask{uint64_t(seed), uint32_t(offset), uint32_t(uint64_t(offset) >> 32) | 1u << 30,
                  drop ? uint32_t(threshold - 1) : 0u, float(scale), uint64_t(first), uint64_t(width), uint64_t(skip)};
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  Tensor y = huge(torch::stable::new_empty(x, shape, dtype));
  const int64_t n = x.numel();
  dispatch(x, [&](auto t) {
    dispatch(y, [&](auto r) {
      using X = decltype(t);
      using Y = decltype(r);
      const Y* const res = in<Y>(residual);
      if (res == nullptr) {
        if (drop) pieces<true, false>(in<X>(x), res, out<Y>(y), n, mask);
        else pieces<false, false>(in<X>(x), res, out<Y>(y), n, mask);
      } else {
        if (drop) pieces<true, true>(in<X>(x), res, out<Y>(y), n, mask);
        else pieces<false, true>(in<X>(x), res, out<Y>(y), n, mask);
      }
    });
  });
  return y;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("dropout_add_cpp(Tensor x, Tensor? residual, SymInt threshold, float scale, SymInt seed, SymInt offset, "
        "SymInt first, SymInt width, SymInt skip, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("dropout_add_cpp", TORCH_BOX(&tw::dropout_add)); }
