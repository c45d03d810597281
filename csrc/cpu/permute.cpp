// Sorting slots by expert, and moving rows there and back, on the CPU. The definitions are in
// tilewright/ops/moe/permute.py.
//
// T = tokens, K = experts per token, R = T * K slots and rows, E = experts, H = columns. The counting sort splits slots
// into chunks that depend on R alone. Rows move by token: a row of x is read once and written K times, or K rows are
// read and summed in float, in the order of k.
#include <algorithm>

#include "cpu/common.h"

namespace tw {
namespace {

void check_position(const Tensor& position) {
  check_row_major("position", position);
  STD_TORCH_CHECK(position.dim() == 2 && position.scalar_type() == ScalarType::Int && position.size(1) > 0,
                  "tilewright: position must be an int32 matrix with columns");
}

void check_matrix(const char* name, const Tensor& t, int64_t rows, int64_t columns, ScalarType type) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2 && (t.numel() == 0 || t.size(1) == 1 || t.stride(1) == 1),
                  "tilewright: ", name, " must be a CPU matrix with contiguous rows");
  STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == columns && t.scalar_type() == type, "tilewright: ", name,
                  " must be [", rows, ", ", columns, "], of the dtype of the others");
}

void check_weight(const Tensor& weight, const Tensor& position) {
  check_row_major("weight", weight);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Float && weight.numel() == position.numel(),
                  "tilewright: weight must be float32, one for each position");
}

// A negative position is a slot without a row; none may be outside of rows.
void check_rows(const int32_t* position, int64_t R) {
  int32_t top = -1;
  TW_SIMD_MAX(top)
  for (int64_t i = 0; i < R; ++i) top = position[i] > top ? position[i] : top;
  STD_TORCH_CHECK(top < R, "tilewright: position must be below ", R, ", got ", top);
}

template <class I>
void sort_slots(const I* index, int64_t R, int64_t E, int32_t* offsets, int32_t* slots, int32_t* position) {
  const int64_t chunks = std::min<int64_t>(16, std::max<int64_t>(1, R / 16384)), buckets = E + 1;
  std::vector<int64_t> next(size_t(chunks * buckets));  // per chunk and expert: its count, then its next row
  const auto bucket = [&](int64_t slot) {
    const int64_t e = int64_t(index[slot]);
    return e < 0 || e > E ? E : e;
  };
  const auto each = [&](auto&& f) {
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t lo, int64_t hi) {
      for (int64_t c = lo; c < hi; ++c) {
        int64_t* own = &next[size_t(c * buckets)];
        for (int64_t slot = c * R / chunks; slot < (c + 1) * R / chunks; ++slot) f(slot, own);
      }
    });
  };
  each([&](int64_t slot, int64_t* own) { ++own[bucket(slot)]; });
  int64_t row = 0;
  for (int64_t e = 0; e < buckets; ++e) {
    for (int64_t c = 0; c < chunks; ++c) {
      int64_t& n = next[size_t(c * buckets + e)];
      const int64_t count = n;
      n = row;
      row += count;
    }
    if (e < E) offsets[e] = int32_t(row);
  }
  each([&](int64_t slot, int64_t* own) {
    const int64_t e = bucket(slot), to = own[e]++;
    slots[to] = int32_t(slot);
    position[slot] = e < E ? int32_t(to) : -1;
  });
}

std::tuple<Tensor, Tensor, Tensor> sort(Tensor expert_index, int64_t num_experts) {
  check_row_major("expert_index", expert_index);
  STD_TORCH_CHECK(expert_index.dim() == 2 && num_experts >= 1 && expert_index.numel() < (int64_t(1) << 31),
                  "tilewright: expert_index must be a matrix of fewer than 2^31 elements, num_experts 1 or more");
  const int64_t R = expert_index.numel();
  Tensor offsets = torch::stable::new_empty(expert_index, {num_experts}, ScalarType::Int);
  Tensor slots = torch::stable::new_empty(expert_index, {R}, ScalarType::Int);
  Tensor position =
      torch::stable::new_empty(expert_index, {expert_index.size(0), expert_index.size(1)}, ScalarType::Int);
  const auto run = [&](auto element) {
    sort_slots(in<decltype(element)>(expert_index), R, num_experts, out<int32_t>(offsets), out<int32_t>(slots),
               out<int32_t>(position));
  };
  if (expert_index.scalar_type() == ScalarType::Long) {
    run(int64_t{});
  } else {
    STD_TORCH_CHECK(expert_index.scalar_type() == ScalarType::Int, "tilewright: expert_index must be int32 or int64");
    run(int32_t{});
  }
  return {offsets, slots, position};
}

// The number of rows that slots use; the rows after it are unused.
int64_t used(const int32_t* position, int64_t R) {
  int64_t n = 0;
  TW_SIMD_SUM(n)
  for (int64_t i = 0; i < R; ++i) n += position[i] >= 0;
  return n;
}

// Clears those of token t's K rows that no slot uses.
template <class X>
TW_INLINE void clear(X* rows, int64_t t, int64_t K, int64_t H, int64_t first) {
  const int64_t begin = std::max(first, t * K), end = (t + 1) * K;
  if (begin < end) std::memset(rows + begin * H, 0, size_t((end - begin) * H) * sizeof(X));
}

Tensor spread(Tensor x, Tensor position, std::optional<Tensor> offsets) {
  check_position(position);
  const int64_t T = position.size(0), K = position.size(1), R = T * K;
  STD_TORCH_CHECK(x.dim() == 2, "tilewright: x must be a matrix");
  const int64_t H = x.size(1);
  check_matrix("x", x, T, H, x.scalar_type());
  const int32_t* const p = in<int32_t>(position);
  check_rows(p, R);
  int64_t first = R;
  if (offsets.has_value()) {
    check_row_major("offsets", *offsets);
    STD_TORCH_CHECK(offsets->scalar_type() == ScalarType::Int && offsets->numel() > 0,
                    "tilewright: offsets must be int32 and not empty");
    first = std::max<int32_t>(0, in<int32_t>(*offsets)[offsets->numel() - 1]);
  } else {
    first = used(p, R);
  }
  Tensor rows = huge(torch::stable::new_empty(x, {R, H}));
  dispatch(x, [&](auto element) {
    using X = decltype(element);
    const X* const from = in<X>(x);
    const int64_t stride = x.stride(0);
    X* const to = out<X>(rows);
    torch::stable::parallel_for(0, T, grain(K * H), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t k = 0; k < K; ++k)
          if (p[t * K + k] >= 0) std::memcpy(to + p[t * K + k] * H, from + t * stride, size_t(H) * sizeof(X));
        clear(to, t, K, H, first);
      }
    });
  });
  return rows;
}

constexpr int64_t PIECE = 1024;  // columns of a sum that stays in the first-level cache
constexpr int64_t PART = 256;  // elements of a product that are summed in float, before double

Tensor collect(Tensor rows, std::optional<Tensor> weight, Tensor position) {
  check_position(position);
  const int64_t T = position.size(0), K = position.size(1), R = T * K;
  STD_TORCH_CHECK(rows.dim() == 2, "tilewright: rows must be a matrix");
  const int64_t H = rows.size(1);
  check_matrix("rows", rows, R, H, rows.scalar_type());
  if (weight.has_value()) check_weight(*weight, position);
  const int32_t* const p = in<int32_t>(position);
  check_rows(p, R);
  const float* const w = in<float>(weight);
  Tensor y = huge(torch::stable::new_empty(rows, {T, H}));
  dispatch(rows, [&](auto element) {
    using X = decltype(element);
    const X* const from = in<X>(rows);
    const int64_t stride = rows.stride(0);
    X* const to = out<X>(y);
    torch::stable::parallel_for(0, T, grain(K * H), [&](int64_t begin, int64_t end) {
      float sum[PIECE];
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t first = 0; first < H; first += PIECE) {
          const int64_t n = std::min(PIECE, H - first);
          std::fill_n(sum, n, 0.0f);
          for (int64_t k = 0; k < K; ++k) {
            const int64_t row = p[t * K + k];
            if (row < 0) continue;
            const X* r = from + row * stride + first;
            const float factor = w == nullptr ? 1.0f : w[t * K + k];
            TW_SIMD
            for (int64_t i = 0; i < n; ++i) sum[i] += factor * load(r[i]);
          }
          X* own = to + t * H + first;
          TW_SIMD
          for (int64_t i = 0; i < n; ++i) store(own + i, sum[i]);
        }
      }
    });
  });
  return y;
}

// Gradients of rows and of weight; the latter is None if rows are not given.
std::tuple<Tensor, Tensor> backward(Tensor dy, std::optional<Tensor> rows, Tensor weight, Tensor position) {
  check_position(position);
  const int64_t T = position.size(0), K = position.size(1), R = T * K;
  STD_TORCH_CHECK(dy.dim() == 2, "tilewright: dy must be a matrix");
  const int64_t H = dy.size(1);
  check_matrix("dy", dy, T, H, dy.scalar_type());
  if (rows.has_value()) check_matrix("rows", *rows, R, H, dy.scalar_type());
  check_weight(weight, position);
  const int32_t* const p = in<int32_t>(position);
  check_rows(p, R);
  const int64_t after = used(p, R);
  Tensor drows = huge(torch::stable::new_empty(dy, {R, H}));
  const bool dots = rows.has_value();
  Tensor dweight = dots ? torch::stable::new_empty(weight, {T, K}) : Tensor();
  const float* const w = in<float>(weight);
  float* const dw = dots ? out<float>(dweight) : nullptr;
  dispatch(dy, [&](auto element) {
    using X = decltype(element);
    const X* const up = in<X>(dy);
    const int64_t stride = dy.stride(0), rows_stride = dots ? rows->stride(0) : 0;
    const X* const from = in<X>(rows);
    X* const to = out<X>(drows);
    torch::stable::parallel_for(0, T, grain(K * H), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const X* d = up + t * stride;
        for (int64_t k = 0; k < K; ++k) {
          const int64_t row = p[t * K + k];
          if (row >= 0) {
            X* own = to + row * H;
            const float factor = w[t * K + k];
            TW_SIMD
            for (int64_t i = 0; i < H; ++i) store(own + i, factor * load(d[i]));
          }
          if (!dots) continue;
          double dot = 0;
          for (int64_t first = 0; row >= 0 && first < H; first += PART) {
            const X* r = from + row * rows_stride + first;
            const int64_t n = std::min(PART, H - first);
            float part = 0;
            TW_SIMD_SUM(part)
            for (int64_t i = 0; i < n; ++i) part += load(d[first + i]) * load(r[i]);
            dot += part;
          }
          dw[t * K + k] = float(dot);
        }
        clear(to, t, K, H, after);
      }
    });
  });
  return {drows, dweight};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("permute_cpp_sort(Tensor expert_index, int num_experts) -> (Tensor, Tensor, Tensor)");
  m.def("permute_cpp_spread(Tensor x, Tensor position, Tensor? offsets) -> Tensor");
  m.def("permute_cpp_collect(Tensor rows, Tensor? weight, Tensor position) -> Tensor");
  m.def("permute_cpp_backward(Tensor dy, Tensor? rows, Tensor weight, Tensor position) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("permute_cpp_sort", TORCH_BOX(&tw::sort));
  m.impl("permute_cpp_spread", TORCH_BOX(&tw::spread));
  m.impl("permute_cpp_collect", TORCH_BOX(&tw::collect));
  m.impl("permute_cpp_backward", TORCH_BOX(&tw::backward));
}
