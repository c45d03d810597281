// Products of small float matrices, in GCC's vectors: sums in registers over one pass, for any instruction set.
#pragma once

#include <algorithm>

#include "cpu/common.h"

namespace tw {

// As many sums as hide the latency of two multiply-adds per cycle and, with the vectors of one row of the right factor
// and one of the left, fit the registers: 32 with AVX-512, else 16.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, VECTORS = 4, TILE_ROWS = 6;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, VECTORS = 2, TILE_ROWS = 6;
#else
constexpr int64_t LANES = 4, VECTORS = 2, TILE_ROWS = 6;
#endif
typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// The left factor: element (m, k) at p[m * row + k * step].
struct Left {
  const float* p;
  int64_t row, step;
};

template <int M, int V>
void product_tile(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t steps, bool add) {
  Lanes sum[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      sum[m][v] = add ? *reinterpret_cast<const Lanes*>(c + m * c_row + v * LANES) : Lanes{};
  for (int64_t k = 0; k < steps; ++k) {
    Lanes right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = *reinterpret_cast<const Lanes*>(b + k * b_row + v * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const float left = a.p[m * a.row + k * a.step];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] += left * right[v];
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes*>(c + m * c_row + v * LANES) = sum[m][v];
}

template <int V>
void product_rows(int64_t rows, Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t steps, bool add) {
  int64_t m = 0;
  const auto at = [&](int64_t i) { return Left{a.p + i * a.row, a.row, a.step}; };
  for (; m + TILE_ROWS <= rows; m += TILE_ROWS) product_tile<6, V>(at(m), b, b_row, c + m * c_row, c_row, steps, add);
  if (rows - m >= 4) {
    product_tile<4, V>(at(m), b, b_row, c + m * c_row, c_row, steps, add);
    m += 4;
  }
  if (rows - m >= 2) {
    product_tile<2, V>(at(m), b, b_row, c + m * c_row, c_row, steps, add);
    m += 2;
  }
  if (rows - m == 1) product_tile<1, V>(at(m), b, b_row, c + m * c_row, c_row, steps, add);
}

// c [rows, columns] = a b, or with `add` c + a b. Columns are computed in whole vectors: rows of b and of c have room
// for a multiple of 16.
inline void product(int64_t rows, int64_t columns, int64_t steps, Left a, const float* b, int64_t b_row, float* c,
                    int64_t c_row, bool add) {
  for (int64_t n = 0; n < columns; n += LANES * VECTORS) {
    switch (std::min(VECTORS, (columns - n + LANES - 1) / LANES)) {
      case 1: product_rows<1>(rows, a, b + n, b_row, c + n, c_row, steps, add); break;
      case 2: product_rows<2>(rows, a, b + n, b_row, c + n, c_row, steps, add); break;
#if defined(__AVX512F__)
      case 3: product_rows<3>(rows, a, b + n, b_row, c + n, c_row, steps, add); break;
      default: product_rows<4>(rows, a, b + n, b_row, c + n, c_row, steps, add); break;
#endif
    }
  }
}

// to [columns, rows] = from [rows, columns], in tiles that stay in registers or the first-level cache.
inline void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_row, float* to, int64_t to_row) {
  constexpr int64_t TILE = 16;
  for (int64_t c = 0; c < columns; c += TILE)
    for (int64_t r = 0; r < rows; r += TILE)
      for (int64_t j = c; j < std::min(columns, c + TILE); ++j)
        for (int64_t i = r; i < std::min(rows, r + TILE); ++i) to[j * to_row + i] = from[i * from_row + j];
}

}  // namespace tw
