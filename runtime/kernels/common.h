// Shared pieces of the CPU serving kernels: threads, barrier, buffers, vector maths.
// Everything here keeps one promise: the bits of a row's result depend on that row alone. Every reduction has a fixed
// order that no batch size, width, thread count or padding changes, and every code path uses the same explicit
// fused multiply-adds, so the compiler has nothing to contract differently.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace ds {

typedef uint16_t bf16;  // stored as its bits

constexpr int kPanel = 32;   // output columns of one packed weight panel
constexpr int kChunk = 128;  // keys of one attention chunk: partial softmax results are merged chunk by chunk, in order
constexpr int kBlock = 32;   // keys of one block of the value cache
constexpr int kLanes = 16;   // float32 lanes of a vector = queries of one attention tile

extern bool g_amx;  // tiles in use (hardware has them and the process may use them)

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <class T>
struct Buffer {  // 64-byte aligned, grows, never shrinks: no allocation in the steady state
  T* data = nullptr;
  size_t size = 0;
  T* reserve(size_t n) {
    if (n > size) {
      std::free(data);
      size = round_up(n * sizeof(T), 4096) / sizeof(T);
      data = static_cast<T*>(std::aligned_alloc(4096, round_up(size * sizeof(T), 4096)));
      std::memset(data, 0, size * sizeof(T));
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};

struct Barrier {
  std::atomic<int> count{0}, generation{0};
  int threads = 1;
  void wait() {
    if (threads == 1) return;
    const int g = generation.load(std::memory_order_acquire);
    if (count.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      count.store(0, std::memory_order_relaxed);
      generation.store(g + 1, std::memory_order_release);
      return;
    }
    // Spin first (stages are microseconds apart), then yield: on a busy machine the other thread may not be running.
    for (int spins = 0; generation.load(std::memory_order_acquire) == g; ++spins) {
      if (spins < 512) _mm_pause();
      else sched_yield();
    }
  }
};

struct Team {
  int id, threads;
  Barrier* barrier;
  void sync() const { barrier->wait(); }
  // contiguous share of n items
  int64_t begin(int64_t n) const { return n * id / threads; }
  int64_t end(int64_t n) const { return n * (id + 1) / threads; }
};

inline __m512 bf16_to_float(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i float_to_bf16(__m512 x) {  // round to nearest even; NaN stays NaN
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16));
#endif
}

inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) { return bf16_to_float(_mm256_loadu_si256((const __m256i*)p)); }
inline void store16(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store16(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, float_to_bf16(x)); }
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { uint32_t b = (uint32_t)x << 16; float f; std::memcpy(&f, &b, 4); return f; }

// 2^x, relative error about 1e-7; exactly 1 at 0 (merging attention chunks relies on it). 0 below -126 (-inf, NaN): a
// denormal result would cost a microcode assist of some hundred cycles, and every unseen key of a chunk has one.
inline __m512 exp2_ps(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.5403530393381609e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3333558146428443e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291076284772e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504108664821580e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022650695910072e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718055994531e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

inline __m512 silu_ps(__m512 x) {
  const __m512 e = exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.4426950408889634f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// Root-mean-square norm of one row of n (multiple of 16) float32 values: y = x / sqrt(mean(x^2) + eps) * w.
template <class T>
inline void rms_norm(const float* x, const float* w, T* y, int n, float eps) {
  __m512 s0 = _mm512_setzero_ps(), s1 = s0;
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
    s0 = _mm512_fmadd_ps(a, a, s0);
    s1 = _mm512_fmadd_ps(b, b, s1);
  }
  if (i < n) { const __m512 a = _mm512_loadu_ps(x + i); s0 = _mm512_fmadd_ps(a, a, s0); }
  const float mean = _mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / (float)n;
  const __m512 r = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (i = 0; i < n; i += 16)
    store16(y + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), r), _mm512_loadu_ps(w + i)));
}

}  // namespace ds
