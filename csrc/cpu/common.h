// Shared code of all CPU kernels: element types, a vectorizable exp, argument checks.
//
// Kernels are plain loops that the compiler vectorizes; setup.py compiles them once per instruction set.
// Helpers are TW_INLINE: a loop with a call in it is not vectorized.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#define TW_INLINE inline __attribute__((always_inline))
#define TW_SIMD _Pragma("omp simd")
#define TW_SIMD_SUM(x) _Pragma(TW_STR(omp simd reduction(+ : x)))
#define TW_SIMD_SUM2(x, y) _Pragma(TW_STR(omp simd reduction(+ : x, y)))
#define TW_SIMD_MAX(x) _Pragma(TW_STR(omp simd reduction(max : x)))
#define TW_STR(x) #x

namespace tw {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

struct bf16 {
  uint16_t bits;
};

TW_INLINE float load(float x) { return x; }
TW_INLINE float load(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Rounds to nearest even; NaN becomes the quiet NaN (a carry out of its mantissa could make it infinity or zero).
TW_INLINE void store(float* p, float x) { *p = x; }
TW_INLINE void store(bf16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  uint32_t rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  p->bits = uint16_t((x != x ? 0x7FC00000u : rounded) >> 16);
}

// A value rounded to T and read back.
TW_INLINE float round_to(float x, const float*) { return x; }
TW_INLINE float round_to(float x, const bf16*) {
  bf16 r;
  store(&r, x);
  return load(r);
}

// exp(x) for float: x = n ln2 + r with |r| <= ln2 / 2, a degree-6 polynomial for exp(r), then a scale by 2^n in two
// halves so that results down to the smallest subnormal are right. About 1 ulp; exp(-inf) = 0, and NaN stays NaN.
// Branch-free, so that it vectorizes.
TW_INLINE float exp_(float x) {
  float c = x > 88.8f ? 88.8f : x;  // written so that NaN propagates
  c = c < -104.0f ? -104.0f : c;
  float n = std::nearbyintf(c * 1.44269504088896341f);
  float r = std::fmaf(n, -0.693359375f, c);
  r = std::fmaf(n, 2.12194440e-4f, r);
  float p = 1.3888889e-3f;
  p = std::fmaf(p, r, 8.3333333e-3f);
  p = std::fmaf(p, r, 4.1666667e-2f);
  p = std::fmaf(p, r, 1.6666667e-1f);
  p = std::fmaf(p, r, 0.5f);
  p = std::fmaf(p, r, 1.0f);
  p = std::fmaf(p, r, 1.0f);
  int32_t k = int32_t(n), k1 = k >> 1, k2 = k - k1;
  uint32_t u1 = uint32_t(k1 + 127) << 23, u2 = uint32_t(k2 + 127) << 23;
  float s1, s2;
  std::memcpy(&s1, &u1, 4);
  std::memcpy(&s2, &u2, 4);
  float y = p * s1 * s2;
  return x > 88.72284f ? INFINITY : y;
}

TW_INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
// sigmoid(x) and sigmoid(-x), each to a few ulp: 1 - sigmoid(x) would cancel for large x.
TW_INLINE void sigmoid_pair(float x, float& s, float& q) {
  const float e = exp_(-std::fabs(x)), near = 1.0f / (1.0f + e), far = e * near;
  s = x < 0 ? far : near;
  q = x < 0 ? near : far;
}

// Long sums are computed in blocks of this many elements, each in float, and the blocks are added in double: the error
// stays at a few ulp for rows of any length.
constexpr int64_t SUM_BLOCK = 1024;

template <class T>
const T* in(const Tensor& t) {
  return reinterpret_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t) {
  return reinterpret_cast<T*>(t.mutable_data_ptr());
}
template <class T>
const T* in(const std::optional<Tensor>& t) {
  return t.has_value() ? reinterpret_cast<const T*>(t->const_data_ptr()) : nullptr;
}

// Requests huge pages for a large result before its first write. glibc maps every block above 32 MiB afresh and
// unmaps it when it is freed, so such a result comes in pages of 4 KiB that the kernel maps and clears one by one: that
// takes longer than most ops here. Advice only: where huge pages are off, nothing changes.
constexpr int64_t HUGE_BYTES = 32 << 20;

// Whether this many bytes of huge pages (2 MiB, order 9) are free. A kernel without them creates some on demand, by
// moving the pages of other processes, and the first write waits for that: 120 to 260 ms for a result of 224 MiB.
inline bool huge_pages_free(uintptr_t bytes) {
  FILE* file = fopen("/proc/buddyinfo", "r");
  if (file == nullptr) return true;
  char line[1024];
  uintptr_t found = 0;
  while (fgets(line, sizeof line, file) != nullptr) {   // "Node 0, zone   Normal   free blocks of order 0, of 1, ..."
    const char* at = strstr(line, "zone");
    if (at == nullptr) continue;
    at += 4;
    at += strspn(at, " ");
    at += strcspn(at, " ");
    for (int order = 0;; ++order) {
      char* end = nullptr;
      const uintptr_t blocks = strtoull(at, &end, 10);
      if (end == at) break;
      if (order >= 9) found += blocks << (order + 12);
      at = end;
    }
  }
  fclose(file);
  return found >= bytes;
}

inline Tensor huge(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  int64_t extent = t.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && extent > 0; ++d) extent += (t.size(d) - 1) * t.stride(d);
  const uintptr_t bytes = uintptr_t(extent) * t.element_size();
  if (bytes > uintptr_t(HUGE_BYTES) && huge_pages_free(bytes)) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t.mutable_data_ptr()), page = 4095;
    const uintptr_t first = (begin + page) & ~page, last = (begin + bytes) & ~page;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return t;
}

// Calls f with a value of the C++ type of a tensor's elements: dispatch(x, [&](auto t) { using T = decltype(t); ... }).
template <class F>
void dispatch(const Tensor& t, F&& f) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return f(float{});
    case ScalarType::BFloat16: return f(bf16{});
    default: STD_TORCH_CHECK(false, "tilewright cpp kernels take float32 and bfloat16 tensors");
  }
}

inline void check_row_major(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous(), "tilewright: ", name, " must be a contiguous CPU tensor");
}

// Rows per task such that a task processes at least ~32k elements: below that, waking a thread costs more than the
// work.
inline int64_t grain(int64_t columns) { return columns >= 32768 ? 1 : 32768 / (columns > 0 ? columns : 1); }

// Column sums over rows (weight gradients) are split into a number of chunks that depends on the row count alone, never
// on the thread count, and added in order: the same bits on any number of threads.
inline int64_t row_chunks(int64_t rows) { return rows < 16 ? (rows > 0 ? rows : 1) : 16; }

}  // namespace tw
