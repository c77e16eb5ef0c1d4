// A whole forward of a Llama-like stack in one call: embedding, layers, final norm, head. Plain C interface (ctypes).
#include <mutex>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "attention.h"

namespace ds {

bool g_amx = false;

struct LayerArgs {  // all pointers outlive the model (Python holds the tensors)
  const void *qkv, *out, *gate_up, *down;  // packed
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  int64_t window;  // 0: none
};

struct ModelArgs {
  int64_t hidden, heads, kv_heads, head_dim, mlp, vocab, layers;  // mlp rounded up to 32
  float eps, scale;
  const void *embedding, *head;  // [V, H]; packed, or null
  const float* final_norm;
};

struct ForwardArgs {
  const int64_t* tokens;  // [B, W], or null with `input`
  const void* input;      // [B, W, H] states instead of tokens
  const int64_t *rows, *starts, *last;
  void *k, *v;            // cache
  const float *cos, *sin; // [S, hd / 2]
  float* logits;          // null: none
  void *hidden, *taps;    // normed states [B, W, H]; [B, W, n * H]; or null
  const int64_t* tap_layers;
  int64_t batch, width, slots, length, num_taps, threads;
  int64_t causal;         // 0: query j of a row sees all W new positions
  int64_t only_last;      // logits [B, V] at last[b] instead of [B, W, V]
  int64_t kv_only;        // only write keys and values of `input` in every layer (context injection), nothing else
};

struct Unit { int32_t row, kv, tile, chunk; };  // tile or chunk -1: all of them in one go

template <class T>
struct Model {
  ModelArgs args;
  std::vector<LayerArgs> layers;
  std::mutex mutex;
  Buffer<float> x, qkv, partial;
  Buffer<T> normed, mixed, act;
  std::vector<Unit> units;
  std::vector<std::atomic<int>> counters;
  std::vector<int64_t> partial_at, head_rows;

  int64_t qkv_rows() const { return (args.heads + 2 * args.kv_heads) * args.head_dim; }

  Packed<T> packed(const void* data, const float* bias, int64_t n, int64_t k) const {
    Packed<T> p;
    p.data = (const T*)data; p.bias = bias; p.n = n; p.k = packed_k<T>(k);
    return p;
  }

  int64_t position_cap(const ForwardArgs& f, int64_t position) const { return position < f.length ? position : f.length - 1; }

  void plan(const ForwardArgs& f);
  void rope(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team, bool kv_only);
  void attend(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team);
  void attend_tile(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, int tile);
  void finish_tile(const ForwardArgs& f, int64_t row, int64_t kv, int tile, const Partial& total);
  void layer(const ForwardArgs& f, int64_t index, const Team& team);
  void run(const ForwardArgs& f);
  void run_thread(const ForwardArgs& f, const Team& team);
  void finish(const ForwardArgs& f, const Team& team);
  void load_tile(Tile& t, const ForwardArgs& f, const LayerArgs& w, int64_t row, int64_t kv, int tile) const;
  int tiles(const ForwardArgs& f) const { return (int)((f.width * (args.heads / args.kv_heads) + kLanes - 1) / kLanes); }
  int64_t end_of(const ForwardArgs& f, int64_t row) const {  // one past the last key any query of the row sees
    const int64_t end = f.starts[row] + f.width;
    return end < f.length ? end : f.length;
  }
};

// Attention units: whole tiles when there are enough of them, else (tile set, chunk) pieces merged by the last finisher.
template <class T>
void Model<T>::plan(const ForwardArgs& f) {
  units.clear();
  partial_at.clear();
  const int nt = tiles(f);
  const bool whole = f.threads == 1 || f.batch * args.kv_heads * nt >= 12 * f.threads;
  int64_t partials = 0;
  for (int64_t b = 0; b < f.batch; ++b)
    for (int64_t h = 0; h < args.kv_heads; ++h) {
      partial_at.push_back(partials);
      if (whole) {
        for (int t = 0; t < nt; ++t) units.push_back({(int)b, (int)h, t, -1});
        continue;
      }
      const int chunks = (int)((end_of(f, b) + kChunk - 1) / kChunk);
      for (int c = 0; c < chunks; ++c) units.push_back({(int)b, (int)h, -1, c});
      partials += (int64_t)chunks * nt;
    }
  partial.reserve(partials * Partial::floats((int)args.head_dim) + 16);
  const size_t need = args.layers * (1 + f.batch * args.kv_heads);
  if (counters.size() < need) counters = std::vector<std::atomic<int>>(need);
  for (auto& c : counters) c.store(0, std::memory_order_relaxed);
}

// Head norms and rotation of queries (in place) and keys, and both cache writes.
template <class T>
void Model<T>::rope(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team, bool kv_only) {
  const int hd = (int)args.head_dim, half = hd / 2;
  const int64_t heads = args.heads + 2 * args.kv_heads, first = kv_only ? args.heads : 0, per = heads - first;
  const int64_t m = f.batch * f.width;
  alignas(64) float row[kMaxHeadDim];
  for (int64_t i = team.begin(m * per); i < team.end(m * per); ++i) {
    const int64_t token = i / per, head = first + i % per, b = token / f.width;
    const int64_t position = f.starts[b] + token % f.width;
    float* x = qkv.data + token * qkv_rows() + head * hd;
    const int64_t kv = head - args.heads;
    const int64_t base = ((layer * f.slots + f.rows[b]) * args.kv_heads + kv % args.kv_heads) * f.length * hd;
    if (kv >= args.kv_heads) {  // value
      if (position >= f.length) continue;
      T* out = (T*)f.v + base + (position / kBlock) * hd * kBlock + position % kBlock;
      alignas(64) T value[kMaxHeadDim];
      for (int d = 0; d < hd; d += 16) store16(value + d, _mm512_loadu_ps(x + d));
      for (int d = 0; d < hd; ++d) out[d * kBlock] = value[d];
      continue;
    }
    const float* norm = kv < 0 ? w.q_norm : w.k_norm;
    if (norm) rms_norm(x, norm, row, hd, args.eps);
    else std::memcpy(row, x, hd * sizeof(float));
    const float *cos = f.cos + position_cap(f, position) * half, *sin = f.sin + position_cap(f, position) * half;
    for (int d = 0; d < half; d += 16) {
      const __m512 a = _mm512_load_ps(row + d), c = _mm512_loadu_ps(row + half + d);
      const __m512 co = _mm512_loadu_ps(cos + d), si = _mm512_loadu_ps(sin + d);
      _mm512_storeu_ps(row + d, _mm512_fmsub_ps(a, co, _mm512_mul_ps(c, si)));
      _mm512_storeu_ps(row + half + d, _mm512_fmadd_ps(c, co, _mm512_mul_ps(a, si)));
    }
    if (kv < 0) {
      std::memcpy(x, row, hd * sizeof(float));
    } else if (position < f.length) {
      T* out = (T*)f.k + base + position * hd;
      for (int d = 0; d < hd; d += 16) store16(out + d, _mm512_load_ps(row + d));
    }
  }
}

template <class T>
void Model<T>::load_tile(Tile& t, const ForwardArgs& f, const LayerArgs& w, int64_t row, int64_t kv, int tile) const {
  const int group = (int)(args.heads / args.kv_heads), hd = (int)args.head_dim;
  alignas(64) int low[kLanes], high[kLanes];
  t.hd = hd;
  t.scale = args.scale * 1.4426950408889634f;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int query = tile * kLanes + lane, j = query / group;
    const int64_t position = f.starts[row] + (f.causal ? j : f.width - 1);
    const bool used = j < f.width;
    high[lane] = used ? (int)position : -1;
    // the window counts from the query's own position, also when the block is not causal
    low[lane] = w.window ? (int)(f.starts[row] + j - w.window + 1) : 0;
  }
  t.low = _mm512_load_si512(low);
  t.high = _mm512_load_si512(high);
  load_queries<T>(t, [&](int lane) -> const float* {
    const int query = tile * kLanes + lane, j = query / group;
    if (j >= f.width) return nullptr;
    return qkv.data + (row * f.width + j) * qkv_rows() + (kv * group + query % group) * hd;
  });
}

template <class T>
void Model<T>::finish_tile(const ForwardArgs& f, int64_t row, int64_t kv, int tile, const Partial& total) {
  const int group = (int)(args.heads / args.kv_heads), hd = (int)args.head_dim;
  const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(total.sum));
  for (int d = 0; d < hd; ++d) _mm512_store_ps(total.out + d * kLanes, _mm512_mul_ps(_mm512_load_ps(total.out + d * kLanes), inverse));
  const __m512i stride = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(kLanes));
  for (int lane = 0; lane < kLanes; ++lane) {
    const int query = tile * kLanes + lane, j = query / group;
    if (j >= f.width) break;
    T* out = mixed.data + (row * f.width + j) * args.heads * hd + (kv * group + query % group) * hd;
    for (int d = 0; d < hd; d += 16) store16(out + d, _mm512_i32gather_ps(stride, total.out + d * kLanes + lane, 4));
  }
}

// One unit: either every chunk of one tile, or one chunk of every tile.
template <class T>
void Model<T>::attend_tile(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, int tile) {
  const int hd = (int)args.head_dim;
  const int64_t base = ((layer * f.slots + f.rows[u.row]) * args.kv_heads + u.kv) * f.length * hd;
  const T *k = (const T*)f.k + base, *v = (const T*)f.v + base;
  const int end = (int)end_of(f, u.row), nt = tiles(f);
  const int64_t lowest = w.window ? f.starts[u.row] - w.window + 1 : 0;
  const int from = lowest > 0 ? (int)(lowest / kChunk) : 0;
  alignas(64) float scratch[2][(kMaxHeadDim + 2) * kLanes];
  Partial total(scratch[0]), part(scratch[1]);
  Tile t;
  load_tile(t, f, w, u.row, u.kv, tile);
  if (u.chunk >= 0) {
    Partial own(partial.data + (partial_at[u.row * args.kv_heads + u.kv] + (int64_t)u.chunk * nt + tile) * Partial::floats(hd));
    const int keys = end - u.chunk * kChunk < kChunk ? end - u.chunk * kChunk : kChunk;
    if (u.chunk >= from) chunk(t, k, v, u.chunk * kChunk, (int)round_up(keys, kBlock), own);
    return;
  }
  clear(hd, total);
  int last = end;  // a causal tile reads no further than its last query
  if (f.causal) {
    const int64_t j = (int64_t)(tile * kLanes + kLanes - 1) / (args.heads / args.kv_heads);
    const int64_t limit = f.starts[u.row] + (j < f.width ? j : f.width - 1) + 1;
    if (limit < last) last = (int)limit;
  }
  for (int c = from; c * kChunk < last; ++c) {
    const int keys = last - c * kChunk < kChunk ? last - c * kChunk : kChunk;
    chunk(t, k, v, c * kChunk, (int)round_up(keys, kBlock), part);
    merge(hd, total, part);
  }
  finish_tile(f, u.row, u.kv, tile, total);
}

template <class T>
void Model<T>::attend(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team) {
#ifdef __AMX_BF16__
  if (sizeof(T) == 2 && g_amx) amx_configure_attention();
#endif
  const int hd = (int)args.head_dim, nt = tiles(f);
  std::atomic<int>* counter = counters.data() + layer * (1 + f.batch * args.kv_heads);
  for (int i; (i = counter[0].fetch_add(1, std::memory_order_relaxed)) < (int)units.size();) {
    const Unit& u = units[i];
    if (u.chunk < 0) {
      attend_tile(f, w, layer, u, u.tile);
      continue;
    }
    for (int t = 0; t < nt; ++t) attend_tile(f, w, layer, u, t);
    const int64_t group = u.row * args.kv_heads + u.kv;
    const int chunks = (int)((end_of(f, u.row) + kChunk - 1) / kChunk);
    if (counter[1 + group].fetch_add(1, std::memory_order_acq_rel) != chunks - 1) continue;
    const int64_t lowest = w.window ? f.starts[u.row] - w.window + 1 : 0;
    const int from = lowest > 0 ? (int)(lowest / kChunk) : 0;
    alignas(64) float scratch[(kMaxHeadDim + 2) * kLanes];
    Partial total(scratch);
    for (int t = 0; t < nt; ++t) {
      clear(hd, total);
      for (int c = from; c < chunks; ++c)
        merge(hd, total, Partial(partial.data + (partial_at[group] + (int64_t)c * nt + t) * Partial::floats(hd)));
      finish_tile(f, u.row, u.kv, t, total);
    }
  }
}

template <class T>
void Model<T>::layer(const ForwardArgs& f, int64_t index, const Team& team) {
  const LayerArgs& w = layers[index];
  const int64_t m = f.batch * f.width, h = args.hidden, q = args.heads * args.head_dim, n = qkv_rows();
  float* states = x.data;
  auto norm = [&](const float* weight) {
    for (int64_t i = team.begin(m); i < team.end(m); ++i) rms_norm(states + i * h, weight, normed.data + i * h, (int)h, args.eps);
  };
  auto panels = [&](const T* a, int64_t lda, const Packed<T>& p, auto&& sink) {
    linear<T>(a, lda, m, p, team.begin(p.panels()), team.end(p.panels()),
              [&](int64_t m0, int rows, int64_t panel, const float* acc) { each16(p, m0, rows, panel, acc, sink); });
  };
  auto add = [&](int64_t row, int64_t c, __m512 value, __mmask16) {
    _mm512_storeu_ps(states + row * h + c, _mm512_add_ps(_mm512_loadu_ps(states + row * h + c), value));
  };
  norm(w.input_norm);
  team.sync();
  panels(normed.data, h, packed(w.qkv, w.qkv_bias, n, h),
         [&](int64_t row, int64_t c, __m512 value, __mmask16) { _mm512_storeu_ps(qkv.data + row * n + c, value); });
  team.sync();
  rope(f, w, index, team, false);
  team.sync();
  attend(f, w, index, team);
  team.sync();
  panels(mixed.data, q, packed(w.out, w.out_bias, h, q), add);
  team.sync();
  norm(w.post_norm);
  team.sync();
  const Packed<T> gate_up = packed(w.gate_up, w.gate_up_bias, 2 * args.mlp, h);  // 16 gates, then their 16 ups, ...
  linear<T>(normed.data, h, m, gate_up, team.begin(gate_up.panels()), team.end(gate_up.panels()),
            [&](int64_t m0, int rows, int64_t p, const float* acc) {
    for (int r = 0; r < rows; ++r) {
      __m512 g = _mm512_load_ps(acc + r * kPanel), u = _mm512_load_ps(acc + r * kPanel + 16);
      if (gate_up.bias) {
        g = _mm512_add_ps(g, _mm512_loadu_ps(gate_up.bias + p * kPanel));
        u = _mm512_add_ps(u, _mm512_loadu_ps(gate_up.bias + p * kPanel + 16));
      }
      store16(act.data + (m0 + r) * args.mlp + p * 16, _mm512_mul_ps(silu_ps(g), u));
    }
  });
  team.sync();
  panels(act.data, args.mlp, packed(w.down, w.down_bias, h, args.mlp), add);
  team.sync();
  for (int64_t t = 0; f.taps && t < f.num_taps; ++t)
    if (f.tap_layers[t] == index)
      for (int64_t i = team.begin(m); i < team.end(m); ++i)
        for (int64_t c = 0; c < h; c += 16)
          store16((T*)f.taps + (i * f.num_taps + t) * h + c, _mm512_loadu_ps(states + i * h + c));
}

// Final norm, normed states out, head.
template <class T>
void Model<T>::finish(const ForwardArgs& f, const Team& team) {
  const int64_t m = f.batch * f.width, h = args.hidden;
  if (f.hidden)
    for (int64_t i = team.begin(m); i < team.end(m); ++i)
      rms_norm(x.data + i * h, args.final_norm, (T*)f.hidden + i * h, (int)h, args.eps);
  if (!f.logits) return;
  const int64_t rows = (int64_t)head_rows.size();
  for (int64_t i = team.begin(rows); i < team.end(rows); ++i)
    rms_norm(x.data + head_rows[i] * h, args.final_norm, normed.data + i * h, (int)h, args.eps);
  team.sync();
  const Packed<T> head = packed(args.head, nullptr, args.vocab, h);
  linear<T>(normed.data, h, rows, head, team.begin(head.panels()), team.end(head.panels()),
            [&](int64_t m0, int count, int64_t panel, const float* acc) {
    each16(head, m0, count, panel, acc, [&](int64_t row, int64_t c, __m512 value, __mmask16 mask) {
      _mm512_mask_storeu_ps(f.logits + row * args.vocab + c, mask, value);
    });
  });
}

template <class T>
void Model<T>::run_thread(const ForwardArgs& f, const Team& team) {
  const int64_t m = f.batch * f.width, h = args.hidden;
  const int64_t begin = team.begin(m), end = team.end(m);
  for (int64_t i = begin; i < end; ++i) {
    const T* from = f.tokens ? (const T*)args.embedding + f.tokens[i] * h : (const T*)f.input + i * h;
    if (f.kv_only) { std::memcpy(normed.data + i * h, from, h * sizeof(T)); continue; }
    for (int64_t c = 0; c < h; c += 16) _mm512_storeu_ps(x.data + i * h + c, load16(from + c));
  }
  if (f.kv_only) {
    team.sync();
    const int64_t n = qkv_rows(), first = args.heads * args.head_dim / kPanel;
    for (int64_t l = 0; l < args.layers; ++l) {
      const Packed<T> p = packed(layers[l].qkv, layers[l].qkv_bias, n, h);
      linear<T>(normed.data, h, m, p, first + team.begin(p.panels() - first), first + team.end(p.panels() - first),
                [&](int64_t m0, int rows, int64_t panel, const float* acc) {
        each16(p, m0, rows, panel, acc, [&](int64_t row, int64_t c, __m512 value, __mmask16) {
          _mm512_storeu_ps(qkv.data + row * n + c, value);
        });
      });
      team.sync();
      rope(f, layers[l], l, team, true);
      team.sync();
    }
  } else {
    for (int64_t l = 0; l < args.layers; ++l) layer(f, l, team);
    finish(f, team);
  }
#ifdef __AMX_BF16__
  if (sizeof(T) == 2 && g_amx) _tile_release();
#endif
}

template <class T>
void Model<T>::run(const ForwardArgs& f) {
  std::lock_guard<std::mutex> lock(mutex);
  const int64_t m = f.batch * f.width;
  x.reserve(m * args.hidden + 16);
  normed.reserve(m * args.hidden + 64);
  mixed.reserve(m * args.heads * args.head_dim + 64);
  qkv.reserve(m * qkv_rows() + 16);
  act.reserve(m * args.mlp + 64);
  head_rows.clear();
  if (f.logits)
    for (int64_t b = 0; b < f.batch; ++b)
      for (int64_t j = 0; j < f.width; ++j)
        if (!f.only_last || j == (f.last ? f.last[b] : f.width - 1)) head_rows.push_back(b * f.width + j);
  plan(f);
  Barrier barrier;
#pragma omp parallel num_threads((int)f.threads)
  {
#pragma omp single
    barrier.threads = omp_get_num_threads();
    const Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier};
    run_thread(f, team);
  }
}

template <class T>
void pack(const void* src, int64_t n, int64_t k, void* dst, int64_t threads) {
  const int64_t panels = (n + kPanel - 1) / kPanel, size = packed_k<T>(k) * kPanel;
#pragma omp parallel for num_threads((int)threads)
  for (int64_t p = 0; p < panels; ++p) pack_panel((const T*)src, n, k, p, (T*)dst + p * size);
}

template <class T>
void linear_rows(const T* a, int64_t m, const Packed<T>& w, void* out, bool as_float, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t id = omp_get_thread_num(), n = omp_get_num_threads(), panels = w.panels();
    linear<T>(a, w.k, m, w, panels * id / n, panels * (id + 1) / n,
              [&](int64_t m0, int rows, int64_t p, const float* acc) {
      each16(w, m0, rows, p, acc, [&](int64_t row, int64_t c, __m512 value, __mmask16 mask) {
        if (sizeof(T) == 4 || as_float) _mm512_mask_storeu_ps((float*)out + row * w.n + c, mask, value);
        else _mm256_mask_storeu_epi16((T*)out + row * w.n + c, mask, float_to_bf16(value));
      });
    });
#ifdef __AMX_BF16__
    if (sizeof(T) == 2 && g_amx) _tile_release();
#endif
  }
}

}  // namespace ds

using namespace ds;

extern "C" {

// 1: float32 kernels; 2: bf16 dot products; 4: bf16 tiles. `amx` 0 turns tiles off (for tests).
int ds_init(int amx) {
  int features = 0;
  __builtin_cpu_init();
#ifdef __AVX512F__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) features |= 1;
#endif
#ifdef __AVX512BF16__
  if (__builtin_cpu_supports("avx512bf16")) features |= 2;
#endif
  g_amx = false;
#if defined(__AMX_BF16__) && defined(SYS_arch_prctl)
  // the kernel hands out tile state on request only (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  if (amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0) { features |= 4; g_amx = true; }
#endif
  return features;
}

int64_t ds_packed_size(int64_t bytes, int64_t n, int64_t k) {  // in elements
  return (n + kPanel - 1) / kPanel * kPanel * (bytes == 2 ? packed_k<bf16>(k) : k);
}

void ds_pack(int64_t bytes, const void* src, int64_t n, int64_t k, void* dst, int64_t threads) {
  bytes == 2 ? pack<bf16>(src, n, k, dst, threads) : pack<float>(src, n, k, dst, threads);
}

// x [m, k padded] -> out [m, n]
void ds_linear(int64_t bytes, const void* x, int64_t m, const void* w, const float* bias, int64_t n, int64_t k, void* out,
               int64_t as_float, int64_t threads) {
  if (bytes == 2) {
    Packed<bf16> p; p.data = (const bf16*)w; p.bias = bias; p.n = n; p.k = packed_k<bf16>(k);
    linear_rows<bf16>((const bf16*)x, m, p, out, as_float, threads);
  } else {
    Packed<float> p; p.data = (const float*)w; p.bias = bias; p.n = n; p.k = k;
    linear_rows<float>((const float*)x, m, p, out, true, threads);
  }
}

void* ds_model_new(int64_t bytes, const ModelArgs* args, const LayerArgs* layers) {
  auto make = [&](auto* m) { m->args = *args; m->layers.assign(layers, layers + args->layers); return (void*)m; };
  return bytes == 2 ? make(new Model<bf16>()) : make(new Model<float>());
}

void ds_model_free(int64_t bytes, void* model) {
  if (bytes == 2) delete (Model<bf16>*)model;
  else delete (Model<float>*)model;
}

void ds_forward(int64_t bytes, void* model, const ForwardArgs* f) {
  bytes == 2 ? ((Model<bf16>*)model)->run(*f) : ((Model<float>*)model)->run(*f);
}

// Reads a buffer once with all threads: the bandwidth floor of a benchmark.
float ds_read(const float* data, int64_t count, int64_t threads) {
  float total = 0;
#pragma omp parallel for num_threads((int)threads) reduction(+ : total)
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t begin = count * part / threads / 64 * 64, end = count * (part + 1) / threads / 64 * 64;
    __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
    for (int64_t i = begin; i < end; i += 64) {
      _mm_prefetch((const char*)(data + i) + 4096, _MM_HINT_T0);
      _mm_prefetch((const char*)(data + i) + 4160, _MM_HINT_T0);
      _mm_prefetch((const char*)(data + i) + 4224, _MM_HINT_T0);
      _mm_prefetch((const char*)(data + i) + 4288, _MM_HINT_T0);
      a = _mm512_add_ps(a, _mm512_load_ps(data + i));
      b = _mm512_add_ps(b, _mm512_load_ps(data + i + 16));
      c = _mm512_add_ps(c, _mm512_load_ps(data + i + 32));
      d = _mm512_add_ps(d, _mm512_load_ps(data + i + 48));
    }
    total += _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
  }
  return total;
}

}  // extern "C"
