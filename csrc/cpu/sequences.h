// Packed documents: the sequences of a batch.
#pragma once

#include "cpu/common.h"

namespace tw {

struct Sequence {
  int64_t begin, end;  // the range of its tokens in a batch's element
};

// The sequences that cu_seqlens bounds, or without it the one sequence that each element of a batch is.
inline std::vector<Sequence> sequences(const std::optional<Tensor>& cu_seqlens, int64_t B, int64_t S) {
  if (!cu_seqlens.has_value()) return {{0, S}};
  check_row_major("cu_seqlens", *cu_seqlens);
  const int64_t n = cu_seqlens->numel() - 1;
  STD_TORCH_CHECK(cu_seqlens->scalar_type() == ScalarType::Long && cu_seqlens->dim() == 1 && n >= 1 && B == 1,
                  "tilewright: cu_seqlens must be a vector of at least two int64, for a batch of 1");
  const int64_t* const at = in<int64_t>(*cu_seqlens);
  STD_TORCH_CHECK(at[0] == 0 && at[n] == S, "tilewright: cu_seqlens must begin with 0 and end with ", S);
  std::vector<Sequence> found;
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(at[i] <= at[i + 1], "tilewright: cu_seqlens must not decrease");
    found.push_back({at[i], at[i + 1]});
  }
  return found;
}

}  // namespace tw
