// The forward of a stack of layers: its arguments, the layout of ragged rows, and the attention over the cache.
#pragma once

#include <mutex>
#include <vector>

#include "attention.h"

namespace ds {

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
  int64_t words, mask_token;     // rows of the embedding; what stands behind the first token of a block
  int64_t context_width;         // of the states that `context` [H, context_width] (packed, or null) projects
  const void* context;
  const float* context_norm;
};

struct ForwardArgs {
  const int64_t* tokens;  // [B, W] ([B] with `block`), or null with `input` or `parts`
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
  const int64_t* widths;  // [B] live entries of each row, 1 .. W; null: all W. The rest of a row is neither read nor written
  const void* const* parts;  // kv_only: instead of `input`, states [widths[b], context_width] of each row, projected and normed here
  int64_t block;          // each row is its token and W - 1 mask tokens
  int64_t first;          // without only_last: logits of entries >= first alone, [B, W - first, V]
};

// A piece of attention work on one KV head of one row: all chunks of tiles [first, last), or, chunk >= 0, chunks
// [chunk, chunk + span) of all of the row's tiles, left as partial results for whoever finishes the row and head last.
struct Unit { int32_t row, kv, first, last, chunk; };

template <class T>
struct Model {
  ModelArgs args;
  std::vector<LayerArgs> layers;
  std::mutex mutex;
  Buffer<float> x, qkv, partial;
  Buffer<T> normed, mixed, act;
  std::vector<Unit> units;
  std::vector<std::atomic<int>> counters;
  std::vector<int64_t> partial_at;
  int span = 1;  // chunks of a unit
  // Ragged rows are packed: buffers hold the live tokens only, row after row; place: their index in the padded [B, W].
  std::vector<int64_t> offset, row_of, place, head_rows, head_place;

  int64_t qkv_rows() const { return (args.heads + 2 * args.kv_heads) * args.head_dim; }

  Packed<T> packed(const void* data, const float* bias, int64_t n, int64_t k) const {
    Packed<T> p;
    p.data = (const T*)data; p.bias = bias; p.n = n; p.k = packed_k<T>(k);
    return p;
  }

  int64_t position_cap(const ForwardArgs& f, int64_t position) const { return position < f.length ? position : f.length - 1; }

  int place_tokens(const ForwardArgs& f);
  void plan(const ForwardArgs& f);
  void rope(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team, bool kv_only);
  void attend(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team);
  void attend_tiles(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, const T* next);
  void attend_span(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, const T* next);
  void merge_chunks(const ForwardArgs& f, const LayerArgs& w, const Unit& u);
  void finish_tile(int64_t row, int64_t kv, int tile, const Partial& total);
  void layer(const ForwardArgs& f, int64_t index, const Team& team);
  int run(const ForwardArgs& f);
  int64_t token_at(const ForwardArgs& f, int64_t i) const {  // of packed entry i
    if (!f.block) return f.tokens[place[i]];
    return i == offset[row_of[i]] ? f.tokens[row_of[i]] : args.mask_token;
  }
  void project(const ForwardArgs& f, const Team& team);
  void run_thread(const ForwardArgs& f, const Team& team);
  void finish(const ForwardArgs& f, const Team& team);
  void load_tile(Tile& t, const ForwardArgs& f, const LayerArgs& w, int64_t row, int64_t kv, int tile) const;
  int chunks(const ForwardArgs& f, int64_t row) const { return (int)((end_of(f, row) + kChunk - 1) / kChunk); }
  int first_chunk(const ForwardArgs& f, const LayerArgs& w, int64_t row) const {  // below it no query of the row sees a key
    const int64_t lowest = w.window ? f.starts[row] - w.window + 1 : 0;
    return lowest > 0 ? (int)(lowest / kChunk) : 0;
  }
  int64_t cache_at(const ForwardArgs& f, int64_t layer, int64_t row, int64_t kv) const {
    return ((layer * f.slots + f.rows[row]) * args.kv_heads + kv) * f.length * args.head_dim;
  }
  float* partial_of(const Unit& u, int64_t chunk, int64_t tile) const {
    const int64_t at = partial_at[u.row * args.kv_heads + u.kv] + chunk * tiles(u.row) + tile;
    return partial.data + at * Partial::floats((int)args.head_dim);
  }
  const T* first_keys(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u) const {
    const int from = first_chunk(f, w, u.row), c = u.chunk > from ? u.chunk : from;
    return (const T*)f.k + cache_at(f, layer, u.row, u.kv) + (int64_t)c * kChunk * args.head_dim;
  }
  int64_t tokens() const { return offset.back(); }
  int64_t width(int64_t row) const { return offset[row + 1] - offset[row]; }
  int tiles(int64_t row) const { return (int)((width(row) * (args.heads / args.kv_heads) + kLanes - 1) / kLanes); }
  int64_t end_of(const ForwardArgs& f, int64_t row) const {  // one past the last key any query of the row sees
    const int64_t end = f.starts[row] + width(row);
    return end < f.length ? end : f.length;
  }
};

// Returns 0, or 1 + the index of the argument that is out of range: rows, starts, widths, last, tokens.
template <class T>
int Model<T>::place_tokens(const ForwardArgs& f) {
  offset.assign(1, 0);
  row_of.clear();
  place.clear();
  head_rows.clear();
  head_place.clear();
  for (int64_t b = 0; b < f.batch; ++b) {
    const int64_t n = f.widths ? f.widths[b] : f.width, last = f.last ? f.last[b] : n - 1;
    if (f.rows[b] < 0 || f.rows[b] >= f.slots) return 1;
    if (f.starts[b] < 0) return 2;
    if (n < 1 || n > f.width) return 3;
    if (last < 0 || last >= n) return 4;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t token = offset.back() + j;
      row_of.push_back(b);
      place.push_back(b * f.width + j);
      if (!f.logits || (f.only_last ? j != last : j < f.first)) continue;
      head_rows.push_back(token);
      head_place.push_back(f.only_last ? b : b * (f.width - f.first) + j - f.first);
    }
    offset.push_back(offset.back() + n);
  }
  for (int64_t i = 0; f.tokens && i < tokens(); ++i)
    if (token_at(f, i) < 0 || token_at(f, i) >= args.words) return 5;
  return 0;
}

// Attention units: groups of tiles that share the reading of their keys and values where there are enough of them, else
// spans of chunks. The results do not depend on the choice.
template <class T>
void Model<T>::plan(const ForwardArgs& f) {
  units.clear();
  partial_at.clear();
  int64_t groups = 0, pieces = 0, partials = 0;
  for (int64_t b = 0; b < f.batch; ++b) {
    groups += args.kv_heads * ((tiles(b) + kGroup - 1) / kGroup);
    pieces += args.kv_heads * chunks(f, b);
  }
  const bool whole = f.threads == 1 || groups >= 8 * f.threads;
  span = pieces > 8 * f.threads ? (int)(pieces / (8 * f.threads)) : 1;
  for (int64_t b = 0; b < f.batch; ++b)
    for (int h = 0; h < args.kv_heads; ++h) {
      const int nt = tiles(b), count = chunks(f, b);
      partial_at.push_back(partials);
      if (whole) {
        for (int t = 0; t < nt; t += kGroup) units.push_back({(int)b, h, t, t + kGroup < nt ? t + kGroup : nt, -1});
        continue;
      }
      for (int c = 0; c < count; c += span) units.push_back({(int)b, h, 0, nt, c});
      partials += (int64_t)count * nt;
    }
  partial.reserve(partials * Partial::floats((int)args.head_dim) + 16);
  const size_t need = args.layers * (1 + f.batch * args.kv_heads);
  if (counters.size() < need) counters = std::vector<std::atomic<int>>(need);
  for (auto& c : counters) c.store(0, std::memory_order_relaxed);
}

// Head norms and rotation of queries (in place) and keys, and both cache writes. Few tokens are shared out head by head:
// neighbouring tokens share cache lines of the value cache, which two threads should not write at once.
template <class T>
void Model<T>::rope(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team, bool kv_only) {
  const int hd = (int)args.head_dim, half = hd / 2;
  const int64_t heads = args.heads + 2 * args.kv_heads, first = kv_only ? args.heads : 0, per = heads - first;
  const int64_t m = tokens();
  const bool by_head = m < 2 * kBlock;
  alignas(64) float row[kMaxHeadDim];
  for (int64_t i = team.begin(m * per); i < team.end(m * per); ++i) {
    const int64_t token = by_head ? i % m : i / per, head = first + (by_head ? i / m : i % per), b = row_of[token];
    const int64_t position = f.starts[b] + token - offset[b];
    float* x = qkv.data + token * qkv_rows() + head * hd;
    const int64_t kv = head - args.heads;
    const int64_t base = cache_at(f, layer, b, kv < 0 ? 0 : kv % args.kv_heads);
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
  const int group = (int)(args.heads / args.kv_heads), hd = (int)args.head_dim, n = (int)width(row);
  alignas(64) int low[kLanes], high[kLanes];
  t.hd = hd;
  t.scale = args.scale * 1.4426950408889634f;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int query = tile * kLanes + lane, used = query / group < n, j = used ? query / group : n - 1;
    high[lane] = (int)(f.starts[row] + (f.causal ? j : n - 1));  // unused lanes: a zero query that sees what a used one sees
    // the window counts from the query's own position, also when the block is not causal
    low[lane] = w.window ? (int)(f.starts[row] + j - w.window + 1) : 0;
  }
  t.low = _mm512_load_si512(low);
  t.high = _mm512_load_si512(high);
  t.last_low = _mm512_reduce_max_epi32(t.low);
  t.first_high = _mm512_reduce_min_epi32(t.high);
  load_queries<T>(t, [&](int lane) -> const float* {
    const int query = tile * kLanes + lane, j = query / group;
    if (j >= n) return nullptr;
    return qkv.data + (offset[row] + j) * qkv_rows() + (kv * group + query % group) * hd;
  });
}

template <class T>
void Model<T>::finish_tile(int64_t row, int64_t kv, int tile, const Partial& total) {
  const int group = (int)(args.heads / args.kv_heads), hd = (int)args.head_dim;
  const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(total.sum));
  for (int d = 0; d < hd; ++d) _mm512_store_ps(total.out + d * kLanes, _mm512_mul_ps(_mm512_load_ps(total.out + d * kLanes), inverse));
  const __m512i stride = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(kLanes));
  for (int lane = 0; lane < kLanes; ++lane) {
    const int query = tile * kLanes + lane, j = query / group;
    if (j >= width(row)) break;
    T* out = mixed.data + (offset[row] + j) * args.heads * hd + (kv * group + query % group) * hd;
    for (int d = 0; d < hd; d += 16) store16(out + d, _mm512_i32gather_ps(stride, total.out + d * kLanes + lane, 4));
  }
}

// All chunks of a few tiles: each chunk's keys and values are read once for all of them.
template <class T>
void Model<T>::attend_tiles(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, const T* next) {
  const int hd = (int)args.head_dim, count = u.last - u.first, group = (int)(args.heads / args.kv_heads);
  const int64_t base = cache_at(f, layer, u.row, u.kv);
  const T *k = (const T*)f.k + base, *v = (const T*)f.v + base;
  alignas(64) float scratch[kGroup + 1][(kMaxHeadDim + 2) * kLanes];
  Partial part(scratch[kGroup]);
  Tile t[kGroup];
  int end[kGroup], most = 0;  // keys that some query of the tile sees
  for (int i = 0; i < count; ++i) {
    load_tile(t[i], f, w, u.row, u.kv, u.first + i);
    clear(hd, Partial(scratch[i]));
    end[i] = (int)end_of(f, u.row);
    const int64_t j = (int64_t)((u.first + i + 1) * kLanes - 1) / group;  // a causal tile reads no further than its last query
    if (f.causal && f.starts[u.row] + j + 1 < end[i]) end[i] = (int)(f.starts[u.row] + j + 1);
    if (end[i] > most) most = end[i];
  }
  for (int c = first_chunk(f, w, u.row); c * kChunk < most; ++c) {
    const T* ahead = (c + 1) * kChunk < most ? k + (int64_t)(c + 1) * kChunk * hd : next;
    bool fetch = true;
    for (int i = 0; i < count; ++i) {
      const int keys = end[i] - c * kChunk < kChunk ? end[i] - c * kChunk : kChunk;
      if (keys <= 0) continue;
      chunk(t[i], k, v, c * kChunk, (int)round_up(keys, kBlock), part, fetch, fetch ? ahead : nullptr);
      merge(hd, Partial(scratch[i]), part);
      fetch = false;
    }
  }
  for (int i = 0; i < count; ++i) finish_tile(u.row, u.kv, u.first + i, Partial(scratch[i]));
}

// A few chunks of all tiles of the row.
template <class T>
void Model<T>::attend_span(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Unit& u, const T* next) {
  const int hd = (int)args.head_dim, end = (int)end_of(f, u.row), from = first_chunk(f, w, u.row);
  const int64_t base = cache_at(f, layer, u.row, u.kv);
  const T *k = (const T*)f.k + base, *v = (const T*)f.v + base;
  const int last = u.chunk + span < chunks(f, u.row) ? u.chunk + span : chunks(f, u.row);
  Tile t;
  for (int tile = u.first; tile < u.last; ++tile) {
    load_tile(t, f, w, u.row, u.kv, tile);
    for (int c = u.chunk > from ? u.chunk : from; c < last; ++c) {
      const int keys = end - c * kChunk < kChunk ? end - c * kChunk : kChunk;
      const T* ahead = c + 1 < last ? k + (int64_t)(c + 1) * kChunk * hd : next;
      const bool fetch = tile == u.first;
      chunk(t, k, v, c * kChunk, (int)round_up(keys, kBlock), Partial(partial_of(u, c, tile)), fetch, fetch ? ahead : nullptr);
    }
  }
}

template <class T>
void Model<T>::merge_chunks(const ForwardArgs& f, const LayerArgs& w, const Unit& u) {
  const int hd = (int)args.head_dim;
  alignas(64) float scratch[(kMaxHeadDim + 2) * kLanes];
  Partial total(scratch);
  for (int t = u.first; t < u.last; ++t) {
    clear(hd, total);
    for (int c = first_chunk(f, w, u.row); c < chunks(f, u.row); ++c) merge(hd, total, Partial(partial_of(u, c, t)));
    finish_tile(u.row, u.kv, t, total);
  }
}

template <class T>
void Model<T>::attend(const ForwardArgs& f, const LayerArgs& w, int64_t layer, const Team& team) {
#ifdef __AMX_BF16__
  if (sizeof(T) == 2 && g_amx) amx_configure_attention();
#endif
  std::atomic<int>* counter = counters.data() + layer * (1 + f.batch * args.kv_heads);
  auto claim = [&] { return counter[0].fetch_add(1, std::memory_order_relaxed); };
  const int count = (int)units.size();
  for (int i = claim(), after; i < count; i = after) {
    after = claim();  // known early: the last chunk of this unit fetches the first of the next
    const Unit& u = units[i];
    const T* next = after < count ? first_keys(f, w, layer, units[after]) : nullptr;
    if (u.chunk < 0) {
      attend_tiles(f, w, layer, u, next);
      continue;
    }
    attend_span(f, w, layer, u, next);
    const int pieces = (chunks(f, u.row) + span - 1) / span;
    if (counter[1 + u.row * args.kv_heads + u.kv].fetch_add(1, std::memory_order_acq_rel) == pieces - 1) merge_chunks(f, w, u);
  }
}

}  // namespace ds
