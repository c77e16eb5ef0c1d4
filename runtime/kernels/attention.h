// Attention of a few new queries over the static cache, chunk of 128 keys by chunk.
//
// Queries sit in vector lanes (16 a tile: query positions x the heads of one KV group), keys run through the loop, so a
// lane's softmax never mixes with another's. Chunks start at absolute positions and are merged in order, so the bits of
// a query do not depend on how many keys the batch reads, who else is in the tile, or which thread did which chunk:
// a key a lane may not see adds an exact zero, and a chunk it sees nothing of multiplies by an exact one.
//
// Cache of one (layer, slot, KV head): keys [S][hd]; values [S/32][hd][32].
#pragma once

#include "linear.h"

namespace ds {

constexpr int kMaxHeadDim = 256;
constexpr int kGroup = 4;  // tiles that read a chunk together

// One tile over one chunk, or over all chunks so far: max[16] of score * scale * log2(e) (-inf: saw nothing),
// sum[16] of weights, out[hd][16].
struct Partial {
  float *max, *sum, *out;
  explicit Partial(float* base) : max(base), sum(base + kLanes), out(base + 2 * kLanes) {}
  static int64_t floats(int hd) { return (int64_t)(hd + 2) * kLanes; }
};

struct Tile {
  int hd;
  float scale;             // softmax scale * log2(e)
  __m512i low, high;       // int32 [16]: lane sees keys low <= key <= high
  int last_low, first_high; // keys in between are seen by every lane
  alignas(64) float query[kMaxHeadDim * kLanes];  // float32 [hd][16], or bf16 pairs [hd/2][16][2]
};

// q(lane) -> float32 row of hd values, or null for an unused lane
template <class T, class F>
inline void load_queries(Tile& t, F&& q) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* row = q(lane);
    if (sizeof(T) == 4) {
      for (int d = 0; d < t.hd; ++d) t.query[d * kLanes + lane] = row ? row[d] : 0.0f;
    } else {
      bf16* out = (bf16*)t.query;
      for (int d = 0; d < t.hd; d += 16) {
        alignas(32) bf16 v[16] = {};
        if (row) _mm256_store_si256((__m256i*)v, float_to_bf16(_mm512_loadu_ps(row + d)));
        for (int i = 0; i < 16; i += 2) std::memcpy(out + ((d + i) / 2 * kLanes + lane) * 2, v + i, 4);
      }
    }
  }
}

// scores [keys][16] = keys x queries
inline void scores(const Tile& t, const float* k, int keys, float* s) {
  for (int j = 0; j < keys; j += 8) {
    __m512 acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = _mm512_setzero_ps();
    for (int d = 0; d < t.hd; ++d) {
      const __m512 q = _mm512_load_ps(t.query + d * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(k[(j + i) * t.hd + d]), q, acc[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm512_store_ps(s + (j + i) * kLanes, acc[i]);
  }
}

// out [hd][16] = values x probabilities
inline void mix(int hd, const float* v, int keys, const float* p, float* out) {
  for (int d = 0; d < hd; d += 16) {
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
    for (int j = 0; j < keys; ++j) {
      const __m512 w = _mm512_load_ps(p + j * kLanes);
      const float* base = v + (int64_t)(j / kBlock) * hd * kBlock + d * kBlock + j % kBlock;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(base[i * kBlock]), w, acc[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_ps(out + (d + i) * kLanes, acc[i]);
  }
}

#ifdef __AVX512BF16__
inline __m512bh pair_at(const bf16* p) { int x; std::memcpy(&x, p, 4); return (__m512bh)_mm512_set1_epi32(x); }

inline void scores_dp(const Tile& t, const bf16* k, int keys, float* s) {
  const bf16* query = (const bf16*)t.query;
  for (int j = 0; j < keys; j += 8) {
    __m512 acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = _mm512_setzero_ps();
    for (int d = 0; d < t.hd; d += 2) {
      const __m512bh q = (__m512bh)_mm512_load_si512(query + d * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], pair_at(k + (j + i) * t.hd + d), q);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm512_store_ps(s + (j + i) * kLanes, acc[i]);
  }
}

inline void mix_dp(int hd, const bf16* v, int keys, const bf16* p, float* out) {
  for (int d = 0; d < hd; d += 16) {
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
    for (int j = 0; j < keys; j += 2) {
      const __m512bh w = (__m512bh)_mm512_load_si512(p + j * kLanes);
      const bf16* base = v + (int64_t)(j / kBlock) * hd * kBlock + d * kBlock + j % kBlock;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], pair_at(base + i * kBlock), w);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_ps(out + (d + i) * kLanes, acc[i]);
  }
}
#else
inline void scores_dp(const Tile&, const bf16*, int, float*) { std::abort(); }
inline void mix_dp(int, const bf16*, int, const bf16*, float*) { std::abort(); }
#endif

#ifdef __AMX_BF16__
// Up to four key (channel) tiles at a time: independent chains hide the latency of the products.
template <int TILES>
inline void scores_block(const Tile& t, const bf16* k, float* s) {
  const bf16* query = (const bf16*)t.query;
  const int64_t step = 16 * t.hd, line = t.hd * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (TILES == 4) { _tile_zero(2); _tile_zero(3); }
  for (int d = 0; d < t.hd; d += 32) {
    _tile_loadd(6, query + d * kLanes, 64);
    _tile_loadd(4, k + d, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, k + step + d, line);
    _tile_dpbf16ps(1, 5, 6);
    if (TILES == 4) {
      _tile_loadd(4, k + 2 * step + d, line);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, k + 3 * step + d, line);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, s, 64);
  _tile_stored(1, s + 16 * kLanes, 64);
  if (TILES == 4) {
    _tile_stored(2, s + 32 * kLanes, 64);
    _tile_stored(3, s + 48 * kLanes, 64);
  }
}

inline void scores_amx(const Tile& t, const bf16* k, int keys, float* s) {
  tile_fence();
  int j = 0;
  for (; j + 64 <= keys; j += 64) scores_block<4>(t, k + (int64_t)j * t.hd, s + j * kLanes);
  if (j < keys) scores_block<2>(t, k + (int64_t)j * t.hd, s + j * kLanes);
}

template <int TILES>
inline void mix_block(int hd, const bf16* v, int keys, const bf16* p, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  if (TILES == 4) { _tile_zero(2); _tile_zero(3); }
  for (int j = 0; j < keys; j += 32, v += hd * kBlock) {
    _tile_loadd(6, p + j * kLanes, 64);
    _tile_loadd(4, v, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, v + 16 * kBlock, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (TILES == 4) {
      _tile_loadd(4, v + 32 * kBlock, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, v + 48 * kBlock, 64);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 16 * kLanes, 64);
  if (TILES == 4) {
    _tile_stored(2, out + 32 * kLanes, 64);
    _tile_stored(3, out + 48 * kLanes, 64);
  }
}

inline void mix_amx(int hd, const bf16* v, int keys, const bf16* p, float* out) {
  tile_fence();
  int d = 0;
  for (; d + 64 <= hd; d += 64) mix_block<4>(hd, v + d * kBlock, keys, p, out + d * kLanes);
  if (d < hd) mix_block<2>(hd, v + d * kBlock, keys, p, out + d * kLanes);
}
#endif

inline void chunk_scores(const Tile& t, const float* k, int keys, float* s) { scores(t, k, keys, s); }
inline void chunk_scores(const Tile& t, const bf16* k, int keys, float* s) {
#ifdef __AMX_BF16__
  if (g_amx) return scores_amx(t, k, keys, s);
#endif
  scores_dp(t, k, keys, s);
}
inline void chunk_mix(int hd, const float* v, int keys, float* s, float* out) { mix(hd, v, keys, s, out); }
inline void chunk_mix(int hd, const bf16* v, int keys, float* s, float* out) {  // s holds bf16 pairs, see store_weights
#ifdef __AMX_BF16__
  if (g_amx) return mix_amx(hd, v, keys, (const bf16*)s, out);
#endif
  mix_dp(hd, v, keys, (const bf16*)s, out);
}

// Softmax weights of keys j and j + 1, as chunk_mix reads them. bf16 in place: pair j fills half of what rows j, j + 1
// occupied, behind the reader.
inline void store_weights(const float*, float* s, int j, __m512 a, __m512 b) {
  _mm512_store_ps(s + j * kLanes, a);
  _mm512_store_ps(s + (j + 1) * kLanes, b);
}
inline void store_weights(const bf16*, float* s, int j, __m512 a, __m512 b) {
  const __m512i low = _mm512_cvtepu16_epi32(float_to_bf16(a)), high = _mm512_cvtepu16_epi32(float_to_bf16(b));
  _mm512_store_si512((bf16*)s + j * kLanes, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Keys base .. base + keys - 1 (keys a multiple of 32) of one KV head against one tile. The first tile of a chunk fetches:
// the softmax loops compute while this chunk's values and the next one's keys (`ahead`, or null) arrive.
template <class T>
inline void chunk(const Tile& t, const T* k, const T* v, int base, int keys, const Partial& r, bool fetch, const T* ahead) {
  alignas(64) float s[kChunk * kLanes];
  const T* values = v + (int64_t)(base / kBlock) * t.hd * kBlock;
  const int bytes = t.hd * (int)sizeof(T), now = fetch ? 4 * bytes : 0, later = ahead ? 2 * bytes * kChunk / keys : 0;
  const __m512 none = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(t.scale);
  chunk_scores(t, k + (int64_t)base * t.hd, keys, s);
  if (base < t.last_low || base + keys - 1 > t.first_high)
    for (int j = 0; j < keys; ++j) {
      const __m512i at = _mm512_set1_epi32(base + j);
      const __mmask16 sees = _mm512_cmple_epi32_mask(at, t.high) & _mm512_cmpge_epi32_mask(at, t.low);
      _mm512_store_ps(s + j * kLanes, _mm512_mask_mov_ps(none, sees, _mm512_load_ps(s + j * kLanes)));
    }
  __m512 top0 = none, top1 = none, top2 = none, top3 = none;
  for (int j = 0; j < keys; j += 4) {
    top0 = _mm512_max_ps(top0, _mm512_load_ps(s + j * kLanes));
    top1 = _mm512_max_ps(top1, _mm512_load_ps(s + (j + 1) * kLanes));
    top2 = _mm512_max_ps(top2, _mm512_load_ps(s + (j + 2) * kLanes));
    top3 = _mm512_max_ps(top3, _mm512_load_ps(s + (j + 3) * kLanes));
    for (int i = 0; i < now; i += 64) _mm_prefetch((const char*)values + j * bytes + i, _MM_HINT_T0);
  }
  const __m512 top = _mm512_mul_ps(_mm512_max_ps(_mm512_max_ps(top0, top1), _mm512_max_ps(top2, top3)), scale);
  const __m512 shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, none, _CMP_NEQ_UQ), top);
  __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
  for (int j = 0; j < keys; j += 2) {  // an unseen key is -inf: weight exactly 0
    const __m512 a = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(s + j * kLanes), scale, shift));
    const __m512 b = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(s + (j + 1) * kLanes), scale, shift));
    store_weights(k, s, j, a, b);
    sum0 = _mm512_add_ps(sum0, a);
    sum1 = _mm512_add_ps(sum1, b);
    for (int i = 0; i < later; i += 64) _mm_prefetch((const char*)ahead + j / 2 * later + i, _MM_HINT_T1);
  }
  _mm512_store_ps(r.max, top);
  _mm512_store_ps(r.sum, _mm512_add_ps(sum0, sum1));
  chunk_mix(t.hd, values, keys, s, r.out);
}

inline void merge(int hd, const Partial& total, const Partial& part) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const __m512 a = _mm512_load_ps(total.max), b = _mm512_load_ps(part.max), top = _mm512_max_ps(a, b);
  const __m512 shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, none, _CMP_NEQ_UQ), top);
  const __m512 fa = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, none, _CMP_NEQ_UQ), exp2_ps(_mm512_sub_ps(a, shift)));
  const __m512 fb = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b, none, _CMP_NEQ_UQ), exp2_ps(_mm512_sub_ps(b, shift)));
  _mm512_store_ps(total.max, top);
  _mm512_store_ps(total.sum, _mm512_fmadd_ps(_mm512_load_ps(total.sum), fa, _mm512_mul_ps(_mm512_load_ps(part.sum), fb)));
  for (int d = 0; d < hd; ++d)
    _mm512_store_ps(total.out + d * kLanes, _mm512_fmadd_ps(_mm512_load_ps(total.out + d * kLanes), fa,
                                                            _mm512_mul_ps(_mm512_load_ps(part.out + d * kLanes), fb)));
}

inline void clear(int hd, const Partial& r) {
  _mm512_store_ps(r.max, _mm512_set1_ps(-INFINITY));
  std::memset(r.sum, 0, sizeof(float) * kLanes);
  std::memset(r.out, 0, sizeof(float) * hd * kLanes);
}

#ifdef __AMX_BF16__
inline void amx_configure_attention() {
  TileConfig c;
  for (int i = 0; i < 8; ++i) set_tile(c, i, 16, 64);
  _tile_loadconfig(&c);
}
#endif

}  // namespace ds
