// The block Hadamard transform on the CPU. The definition is tilewright/ops/quant/hadamard.py.
#include "cpu/hadamard.h"

namespace tw {
namespace {

Tensor hadamard(Tensor x, int64_t size, std::optional<int64_t> seed, bool inverse) {
  check_row_major("x", x);
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 1, blocks = x.numel() / (size > 0 ? size : 1);
  check_size(size, columns);
  Tensor y = huge(torch::stable::empty_like(x));
  const uint32_t mask = sign_mask(seed);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    const T* const from = in<T>(x);
    T* const to = out<T>(y);
    torch::stable::parallel_for(0, blocks, grain(size), [&](int64_t begin, int64_t end) {
      const int64_t at = begin * size, n = (end - begin) * size;
      if (inverse) {
        hadamard_row<true>(from + at, n, size, mask, to + at);
      } else {
        hadamard_row<false>(from + at, n, size, mask, to + at);
      }
    });
  });
  return y;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("hadamard_cpp(Tensor x, int size, SymInt? seed, bool inverse) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("hadamard_cpp", TORCH_BOX(&tw::hadamard)); }
