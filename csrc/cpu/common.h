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
#include <time.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
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
// takes longer than most ops here. Where huge pages are off, nothing changes.
constexpr int64_t HUGE_BYTES = 32 << 20;
constexpr uintptr_t HUGE_PAGE = 2 << 20;
// The longest that the first write of a huge page may take: clearing it takes 0.1 ms, or a few times that where many
// threads do. It took 4.5 ms on virtual machines whose host takes free pages back (the balloon's free page reporting,
// which reports huge ones only, some seconds after they are freed), and it may where the kernel moves other pages to
// make one. Small pages take 0.6 ms for the same memory.
constexpr int64_t HUGE_NS = 1500000;
constexpr int MOST_SKIPPED = 15;  // large results without a try, after several that found slow pages

#if defined(__linux__) && defined(MADV_HUGEPAGE)

inline int64_t thread_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Advises huge pages and maps them by a write to each. From the first slow one on, small pages are advised, and the next
// results do not try: 1, 3, 7, then MOST_SKIPPED of them.
inline void map_huge(char* begin, char* end) {
  static std::atomic<int> left{0}, skipped{0};
  if (left > 0) {
    --left;
    return;
  }
  if (madvise(begin, size_t(end - begin), MADV_HUGEPAGE) != 0) return;
  std::atomic<bool> slow{false};
  torch::stable::parallel_for(0, (end - begin) / int64_t(HUGE_PAGE), 1, [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi && !slow; ++i) {
      const int64_t start = thread_ns();
      __atomic_fetch_or(begin + i * int64_t(HUGE_PAGE), 0, __ATOMIC_RELAXED);  // changes nothing
      if (thread_ns() - start > HUGE_NS) slow = true;
    }
  });
  if (slow) madvise(begin, size_t(end - begin), MADV_NOHUGEPAGE);
  left = skipped = slow ? std::min(2 * skipped + 1, MOST_SKIPPED) : 0;
}

#endif

inline Tensor huge(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  int64_t extent = t.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && extent > 0; ++d) extent += (t.size(d) - 1) * t.stride(d);
  const uintptr_t bytes = uintptr_t(extent) * t.element_size();
  if (bytes > uintptr_t(HUGE_BYTES)) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
    // Whole huge pages: what lies around them stays small.
    char* first = reinterpret_cast<char*>((begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    char* last = reinterpret_cast<char*>((begin + bytes) / HUGE_PAGE * HUGE_PAGE);
    map_huge(first, last);
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
