// y[m, n] = sum_k a[m, k] w[n, k] over weights packed once into panels of 32 columns.
//
// Panel layouts (contiguous, so one thread streams its panels front to back):
//   float32: [K][32 columns]
//   bf16:    [K/32][2 column halves][16 k-pairs][16 columns][2]: a half is one AMX tile, a row one dot-product operand
// Every output element is one chain of fused multiply-adds over k = 0, 1, ..., K-1 (bf16: pairs), whatever M is.
#pragma once

#include "common.h"

namespace ds {

template <class T> inline int64_t packed_k(int64_t k) { return sizeof(T) == 2 ? round_up(k, 32) : k; }

template <class T>
struct Packed {
  const T* data = nullptr;
  const float* bias = nullptr;  // [N] or null
  int64_t n = 0, k = 0;         // k already rounded by packed_k
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
};

inline void pack_panel(const float* src, int64_t n, int64_t k, int64_t p, float* dst) {
  for (int64_t i = 0; i < k; ++i)
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = p * kPanel + c;
      dst[i * kPanel + c] = row < n ? src[row * k + i] : 0.0f;
    }
}

inline void pack_panel(const bf16* src, int64_t n, int64_t k, int64_t p, bf16* dst) {
  const int64_t padded = packed_k<bf16>(k);
  for (int64_t i = 0; i < padded; ++i)
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = p * kPanel + c;
      const int64_t at = (i / 32) * 1024 + (c / 16) * 512 + (i % 32 / 2) * 32 + (c % 16) * 2 + (i & 1);
      dst[at] = row < n && i < k ? src[row * k + i] : 0;
    }
}

constexpr int kAhead = 4096;  // bytes of weights prefetched ahead of use

template <int MR>
inline void micro(const float* a, int64_t lda, const float* w, int64_t k, float* out) {
  __m512 acc[MR][2];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, w += kPanel) {
    _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
    _mm_prefetch((const char*)w + kAhead + 64, _MM_HINT_T0);
    const __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 16);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const __m512 x = _mm512_set1_ps(a[m * lda + i]);
      acc[m][0] = _mm512_fmadd_ps(x, w0, acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(x, w1, acc[m][1]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    _mm512_store_ps(out + m * kPanel, acc[m][0]);
    _mm512_store_ps(out + m * kPanel + 16, acc[m][1]);
  }
}

#ifdef __AVX512BF16__
template <int MR>
inline void micro(const bf16* a, int64_t lda, const bf16* w, int64_t k, float* out) {
  __m512 acc[MR][2];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < k; s += 32, w += 1024) {
    for (int p = 0; p < 16; ++p) {
      const bf16* row = w + p * 32;
      _mm_prefetch((const char*)row + kAhead, _MM_HINT_T0);
      _mm_prefetch((const char*)row + kAhead + 1024, _MM_HINT_T0);
      const __m512bh w0 = (__m512bh)_mm512_load_si512(row), w1 = (__m512bh)_mm512_load_si512(row + 512);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        int pair;
        std::memcpy(&pair, a + m * lda + s + 2 * p, 4);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, w0);
        acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, w1);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    _mm512_store_ps(out + m * kPanel, acc[m][0]);
    _mm512_store_ps(out + m * kPanel + 16, acc[m][1]);
  }
}
#else
template <int MR>
inline void micro(const bf16*, int64_t, const bf16*, int64_t, float*) { std::abort(); }  // refused before it gets here
#endif

constexpr int kMaxRows = 12;  // 24 accumulators + 2 weights + 1 input of 32 registers

template <class T>
inline void micro_rows(int rows, const T* a, int64_t lda, const T* w, int64_t k, float* out) {
  switch (rows) {
    case 1: return micro<1>(a, lda, w, k, out);
    case 2: return micro<2>(a, lda, w, k, out);
    case 3: return micro<3>(a, lda, w, k, out);
    case 4: return micro<4>(a, lda, w, k, out);
    case 5: return micro<5>(a, lda, w, k, out);
    case 6: return micro<6>(a, lda, w, k, out);
    case 7: return micro<7>(a, lda, w, k, out);
    case 8: return micro<8>(a, lda, w, k, out);
    case 9: return micro<9>(a, lda, w, k, out);
    case 10: return micro<10>(a, lda, w, k, out);
    case 11: return micro<11>(a, lda, w, k, out);
    default: return micro<12>(a, lda, w, k, out);
  }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile loads do not tell the compiler that they read memory: keep earlier stores before them.
inline void tile_fence() { asm volatile("" ::: "memory"); }

inline void set_tile(TileConfig& c, int tile, int rows, int bytes) { c.rows[tile] = rows; c.colsb[tile] = bytes; }

// One panel for up to 32 rows of a: tiles 0-3 results (2 row halves x 2 column halves), 4-5 inputs, 6-7 weights.
inline void amx_panel(const bf16* a, int64_t lda, int rows, const bf16* w, int64_t k, float* out) {
  const bool two = rows > 16;
  tile_fence();
  _tile_zero(0);
  _tile_zero(1);
  if (two) { _tile_zero(2); _tile_zero(3); }
  for (int64_t s = 0; s < k; s += 32, w += 1024) {
#pragma GCC unroll 32
    for (int line = 0; line < 32; ++line) _mm_prefetch((const char*)w + kAhead + line * 64, _MM_HINT_T0);
    _tile_loadd(4, a + s, lda * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, a + 16 * lda + s, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kPanel * 4);
  _tile_stored(1, out + 16, kPanel * 4);
  if (two) {
    _tile_stored(2, out + 16 * kPanel, kPanel * 4);
    _tile_stored(3, out + 16 * kPanel + 16, kPanel * 4);
  }
}

inline void amx_configure(int rows) {
  TileConfig c;
  const int first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : 1;
  set_tile(c, 0, first, 64); set_tile(c, 1, first, 64); set_tile(c, 2, second, 64); set_tile(c, 3, second, 64);
  set_tile(c, 4, first, 64); set_tile(c, 5, second, 64); set_tile(c, 6, 16, 64); set_tile(c, 7, 16, 64);
  _tile_loadconfig(&c);
}
#endif

// Panels [first, last) of the product; `done(m, rows, panel, acc)` gets acc[rows][32] float32 without bias.
template <class T, class F>
inline void linear(const T* a, int64_t lda, int64_t m, const Packed<T>& w, int64_t first, int64_t last, F&& done) {
  alignas(64) float acc[32 * kPanel];
#ifdef __AMX_BF16__
  if (sizeof(T) == 2 && g_amx) {
    int configured = 0;
    for (int64_t p = first; p < last; ++p)
      for (int64_t m0 = 0; m0 < m; m0 += 32) {
        const int rows = m - m0 < 32 ? m - m0 : 32;
        if (rows != configured) amx_configure(configured = rows);
        amx_panel((const bf16*)a + m0 * lda, lda, rows, (const bf16*)w.data + p * w.k * kPanel, w.k, acc);
        done(m0, rows, p, acc);
      }
    return;
  }
#endif
  const int64_t blocks = (m + kMaxRows - 1) / kMaxRows;
  for (int64_t p = first; p < last; ++p)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t m0 = m * b / blocks, rows = m * (b + 1) / blocks - m0;
      micro_rows<T>((int)rows, a + m0 * lda, lda, w.data + p * w.k * kPanel, w.k, acc);
      done(m0, (int)rows, p, acc);
    }
}

// Hands 16 columns at a time, bias added, to `sink(row, column, values, count)`; count < 16 only at the ragged end.
template <class T, class F>
inline void each16(const Packed<T>& w, int64_t m0, int rows, int64_t p, const float* acc, F&& sink) {
  for (int h = 0; h < 2; ++h) {
    const int64_t c = p * kPanel + h * 16;
    if (c >= w.n) return;
    const int count = w.n - c < 16 ? (int)(w.n - c) : 16;
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    const __m512 bias = w.bias ? _mm512_maskz_loadu_ps(mask, w.bias + c) : _mm512_setzero_ps();
    for (int r = 0; r < rows; ++r) {
      __m512 v = _mm512_load_ps(acc + r * kPanel + h * 16);
      if (w.bias) v = _mm512_add_ps(v, bias);
      sink(m0 + r, c, v, mask);
    }
  }
}

}  // namespace ds
