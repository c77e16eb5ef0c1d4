// From logits to laws and tokens in float32, the serial chain of a drafter's head, and the counter hash. The PyTorch code of
// runtime/sampling.py and runtime/random.py defines what is computed; here it is a few passes over each row.
#include "rows.h"

namespace ds {
namespace {

constexpr float kColdest = 1e-30f;  // as in sampling.py

// 2^x, and 0 below 2^-100: no law of denormal numbers, which cost a hundred cycles each and which no uniform could ever draw.
// NaN stays NaN: a broken row must not look like a sound law.
inline __m512 power(__m512 x) {
  const __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-100.0f), _CMP_GE_OQ), exp2_ps(x));
  return _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

// ---- arg-max ----

struct Best { float value; int64_t index; };

template <class T>
inline float block_max(const T* x, int64_t n) {  // NaN never wins; -inf where there is nothing else
  const __m512 low = _mm512_set1_ps(-INFINITY);
  __m512 a = low, b = low, c = low, d = low;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {  // max_ps returns its second operand where one is NaN
    a = _mm512_max_ps(load16(x + i), a);
    b = _mm512_max_ps(load16(x + i + 16), b);
    c = _mm512_max_ps(load16(x + i + 32), c);
    d = _mm512_max_ps(load16(x + i + 48), d);
  }
  for (; i < n; i += 16) a = _mm512_mask_max_ps(a, lanes(n - i), load(x + i, lanes(n - i)), a);
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
}

// First largest entry of this thread's share.
template <class T>
Best best_of(const T* x, const Share& s) {
  Best best{-INFINITY, s.first};
  s.each([&](int64_t, int64_t at, int64_t n) {
    const float most = block_max(x + at, n);
    if (most > best.value) best = {most, at};
  });
  const int64_t end = std::min(s.vocab, best.index + kSum);
  for (int64_t i = best.index; i < end; ++i)
    if (to_float(x[i]) == best.value) { best.index = i; break; }
  return best;
}

// The same over the whole row, for every thread of the team. scratch: 3 floats per thread.
template <class T>
Best row_best(const T* x, const Share& s, float* scratch) {
  Best best = best_of(x, s);
  if (s.team.threads == 1) return best;
  std::memcpy(scratch + 3 * s.team.id, &best.value, 4);
  std::memcpy(scratch + 3 * s.team.id + 1, &best.index, 8);
  s.team.sync();
  for (int i = 0; i < s.team.threads; ++i) {
    Best other;
    std::memcpy(&other.value, scratch + 3 * i, 4);
    std::memcpy(&other.index, scratch + 3 * i + 1, 8);
    if (i == 0 || other.value > best.value) best = other;
  }
  s.team.sync();  // before the scratch is written again
  return best;
}

// ---- draws ----

struct DrawArgs {
  const float *probs, *u;
  int64_t* out;
  int64_t rows, stride, vocab, threads;
};

void draw_rows(const DrawArgs& a) {
  over_rows(a.rows, a.vocab, a.threads, blocks(a.vocab), [&](int64_t row, const Team& team, float* sums) {
    const Share s(team, a.vocab);
    const float* p = a.probs + row * a.stride;
    s.each([&](int64_t b, int64_t at, int64_t n) {
      sums[b] = block_sum(n, [&](int64_t i, __mmask16 m) { return load(p + at + i, m); });
    });
    team.sync();
    const int64_t token = pick(sums, s, a.u[row], [&](int64_t i) { return p[i]; });
    if (token >= 0) a.out[row] = token;
    team.sync();
  });
}

// ---- laws ----

struct LawArgs {
  const void* logits;
  float* probs;
  const float *temperature, *top_p;
  const int64_t *top_k, *widths;  // top_k, top_p, widths may be null
  const float* u;                 // null: no draw; else width is 1
  int64_t* tokens;
  int64_t batch, width, vocab, row_stride, slot_stride, out_row, out_slot, threads;
  int64_t best;                   // tokens = arg-max of the logits, no law
  const float* bias;              // null, or [batch, vocab] added to the (float32) logits in place; width is 1
  int64_t bias_stride, token_stride;
};

// Keys in the order of the floats, as signed integers; floats that are not negative are their own keys.
inline __m512i keys(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  return _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
}

// Largest t such that the entries >= t weigh at least `target` (each its value, or 1 with kCount); -inf where all together
// weigh less. Bisection over the keys, in a pool that shrinks; no entry is above `most`. pool: n + 16.
template <bool kCount, class T>
float threshold(const T* source, int64_t n, float most, double target, float* pool) {
  int32_t bits;
  std::memcpy(&bits, &most, 4);
  int64_t high = (int64_t)(bits >= 0 ? bits : bits ^ 0x7fffffff) + 1;
  int64_t low = kCount ? -0x7f800001ll : -1;  // the key of -inf, or one below 0
  double above = 0;  // weight of the entries >= high
  const auto scan = [&](const auto* x) {
    const int64_t middle = low + (high - low) / 2;
    const __m512i cut = _mm512_set1_epi32((int)middle);
    double weight = above;
    for (int64_t at = 0; at < n; at += kSum)
      weight += block_sum(std::min(kSum, n - at), [&](int64_t i, __mmask16 m) {
        const __m512 value = load(x + at + i, m);
        return _mm512_maskz_mov_ps(_mm512_mask_cmpge_epi32_mask(m, keys(value), cut), kCount ? _mm512_set1_ps(1.0f) : value);
      });
    int64_t kept = 0;
    const bool enough = weight >= target;
    if (enough) low = middle;
    else { high = middle; above = weight; }
    // Keep the half in which t lies. (Bits are counted here only: in the loop above, with more masks than registers, GCC 12
    // reads 32 bits of a mask that it spilled as 16.)
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 m = lanes(n - i);
      const __m512 value = load(x + i, m);
      const __mmask16 in = _mm512_mask_cmpge_epi32_mask(m, keys(value), cut), keep = enough ? in : (__mmask16)(m & ~in);
      _mm512_storeu_ps(pool + kept, _mm512_maskz_compress_ps(keep, value));
      kept += __builtin_popcount(keep);
    }
    n = kept;
  };
  scan(source);
  while (high - low > 1) scan((const float*)pool);
  if (low < (kCount ? -0x7f800000ll : 0)) return -INFINITY;
  bits = (int32_t)(low >= 0 ? low : low ^ 0x7fffffff);
  float t;
  std::memcpy(&t, &bits, 4);
  return t;
}

// Zeros in y wherever x is below t.
template <class T>
void drop_below(const T* x, int64_t n, float t, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 m = lanes(n - i), keep = _mm512_mask_cmp_ps_mask(m, load(x + i, m), _mm512_set1_ps(t), _CMP_NLT_UQ);
    _mm512_mask_storeu_ps(y + i, m, _mm512_maskz_loadu_ps(keep, y + i));
  }
}

// Top-k by the logits x, then top-p of the rest by the weights y (largest 1). Ties at a cut stay in.
template <class T>
void truncate(const T* x, float* y, int64_t n, float most, int64_t top_k, float top_p) {
  static thread_local Buffer<float> pool;
  pool.reserve(n + 16);
  if (top_k > 0 && top_k < n) drop_below(x, n, threshold<true>(x, n, most, (double)top_k, pool.data), y);
  if (top_p < 1) {
    double total = 0;
    for (int64_t at = 0; at < n; at += kSum)
      total += block_sum(std::min(kSum, n - at), [&](int64_t i, __mmask16 m) { return load(y + at + i, m); });
    drop_below(y, n, threshold<false>(y, n, 1.0f, (double)top_p * total, pool.data), y);
  }
}

// One row. scratch: blocks(vocab) floats of sums, then 3 per thread.
template <class T>
void law_row(const LawArgs& a, int64_t row, int64_t at, const Team& team, float* scratch) {
  const Share s(team, a.vocab);
  const T* x = (const T*)a.logits + row * a.row_stride + at * a.slot_stride;
  if (sizeof(T) == 4 && a.bias) {
    float* sum = (float*)a.logits + row * a.row_stride;
    const float* bias = a.bias + row * a.bias_stride;
    for (int64_t i = s.first; i < s.last; i += 16) {
      const __mmask16 m = lanes(s.last - i);
      _mm512_mask_storeu_ps(sum + i, m, _mm512_add_ps(load(sum + i, m), load(bias + i, m)));
    }
  }
  const int64_t place = row * a.token_stride + at;  // in tokens and u
  float *y = a.probs + row * a.out_row + at * a.out_slot, *sums = scratch;
  const Best best = row_best(x, s, scratch + s.count);
  const float heat = a.best ? 0.0f : a.temperature[row];
  if (a.best || !(heat > 0)) {
    if (!a.best) {
      std::memset(y + s.first, 0, std::max<int64_t>(0, s.last - s.first) * 4);
      if (best.index >= s.first && best.index < s.last) y[best.index] = 1.0f;
    }
    if (a.tokens && team.id == 0) a.tokens[place] = best.index;
    return;
  }
  const __m512 top = _mm512_set1_ps(best.value), scale = _mm512_set1_ps(1.4426950408889634f / std::max(heat, kColdest));
  const bool cut = (a.top_k && a.top_k[row] > 0) || (a.top_p && a.top_p[row] < 1);
  s.each([&](int64_t b, int64_t from, int64_t n) {
    sums[b] = block_sum(n, [&](int64_t i, __mmask16 m) {
      const __m512 e = power(_mm512_mul_ps(_mm512_sub_ps(load(x + from + i, m), top), scale));
      _mm512_mask_storeu_ps(y + from + i, m, e);
      return _mm512_maskz_mov_ps(m, e);
    });
  });
  team.sync();
  const auto sum_up = [&] {
    s.each([&](int64_t b, int64_t from, int64_t n) {
      sums[b] = block_sum(n, [&](int64_t i, __mmask16 m) { return load(y + from + i, m); });
    });
    team.sync();
  };
  if (cut) {
    if (team.id == 0) truncate(x, y, a.vocab, best.value, a.top_k ? a.top_k[row] : 0, a.top_p ? a.top_p[row] : 1.0f);
    team.sync();
    sum_up();
  }
  const __m512 norm = _mm512_set1_ps((float)(1.0 / add_up(sums, s.count)));
  team.sync();  // all have read the sums
  s.each([&](int64_t b, int64_t from, int64_t n) {
    const float sum = block_sum(n, [&](int64_t i, __mmask16 m) {
      const __m512 p = _mm512_mul_ps(load(y + from + i, m), norm);
      _mm512_mask_storeu_ps(y + from + i, m, p);
      return p;
    });
    if (a.u) sums[b] = sum;
  });
  if (!a.u) return;
  team.sync();
  const int64_t token = pick(sums, s, a.u[place], [&](int64_t i) { return y[i]; });
  if (token >= 0) a.tokens[place] = token;
  team.sync();
}

template <class T>
void law_rows(const LawArgs& a) {
  std::vector<int64_t> live;
  live.reserve(a.batch * a.width);
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t j = 0; j < a.width; ++j)
      if (!a.widths || j < a.widths[b]) live.push_back(b * a.width + j);
      else if (a.best) a.tokens[b * a.token_stride + j] = 0;  // nobody reads it, but it may index something
  const int64_t rows = (int64_t)live.size();
  over_rows(rows, a.vocab, a.threads, blocks(a.vocab) + 3 * a.threads, [&](int64_t i, const Team& team, float* scratch) {
    law_row<T>(a, live[i] / a.width, live[i] % a.width, team, scratch);
  });
}

// ---- survival logits ----

// In one fixed order, in float32.
template <class T>
float dot(const T* x, const float* w, int64_t n) {
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask16 m = lanes(n - i), o = n - i > 16 ? lanes(n - i - 16) : (__mmask16)0;
    a = _mm512_fmadd_ps(load(x + i, m), load(w + i, m), a);
    b = _mm512_fmadd_ps(load(x + i + 16, o), load(w + i + 16, o), b);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(a, b));
}

// One setting of runtime/calibration.py: slope and offset [G], and, where knots are used, those of slot k at from[k] .. from[k+1].
struct SurvivalMap {
  const double *slope, *offset, *x, *y;
  const int64_t* from;  // null: none
};

inline double between(double value, const double* x, const double* y, int64_t n) {  // constant outside the outermost knots
  if (n == 1) return y[0];
  const int64_t right = std::min(std::max<int64_t>(std::lower_bound(x, x + n, value) - x, 1), n - 1);
  const double weight = (value - x[right - 1]) / std::max(x[right] - x[right - 1], 1e-12);
  return y[right - 1] + std::min(std::max(weight, 0.0), 1.0) * (y[right] - y[right - 1]);
}

// As Calibration.apply, in double: sigmoid of every logit, running product, knots, running minimum. NaN goes on.
void calibrate(const float* z, int64_t slots, const SurvivalMap* map, float* out) {
  double product = 1, least = 1;
  for (int64_t k = 0; k < slots; ++k) {
    double score = map ? z[k] * map->slope[k] + map->offset[k] : z[k];
    if (score < -700) score = -700;
    product *= 1.0 / (1.0 + std::exp(-score));
    const int64_t at = map && map->from ? map->from[k] : 0, n = map && map->from ? map->from[k + 1] - at : 0;
    const double value = n ? between(product, map->x + at, map->y + at, n) : product;
    if (!(value >= least)) least = value;
    out[k] = (float)least;
  }
}

// ---- counter hash of runtime/random.py ----

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace
}  // namespace ds

using namespace ds;

extern "C" {

void ds_linear(int64_t bytes, const void* x, int64_t m, const void* w, const float* bias, int64_t n, int64_t k, void* out,
               int64_t as_float, int64_t threads);  // forward.cpp

// The serial chain of a vanilla correction head: slot k's logits are W2 u_k + base_k with u_k = W1 of the token before.
// law: settings, and where laws [B, G, Vd], tokens [B, G] (target ids) and u [B, G] are, for one slot at a time.
struct ChainArgs {
  LawArgs law;
  const void *w1, *w2;        // [V, rank]; packed [Vd, rank]
  const int64_t *anchors, *draft_ids;  // [B]; target id of each column, or null
  const float* base;          // [B, G, Vd]
  int64_t base_slot, slots, rank, words, bytes;
  // Survival logits [B, G] (null: none): h_k . weight + table[token before], of states [B, G, size]; a table of one entry is a bias.
  float* survival;
  const void* hidden;
  const float *weight, *table;
  int64_t hidden_row, hidden_slot, size, entries;
  // Calibrated survival of slots 0 .. k, [B, G], by the map of each row (null: slope 1, offset 0, no knots).
  float* prefix;
  const SurvivalMap* const* maps;
};

// 0, or 1 for an anchor that is not below `words`, the rows of W1.
int64_t ds_chain(const ChainArgs* c) {
  static thread_local Buffer<float> logits;
  static thread_local Buffer<char> inputs;
  LawArgs law = c->law;
  const int64_t row = c->rank * c->bytes, batch = law.batch, padded = round_up(row, 64);  // bf16: whole steps of 32
  for (int64_t b = 0; b < batch; ++b)
    if (c->anchors[b] < 0 || c->anchors[b] >= c->words) return 1;
  law.logits = logits.reserve(batch * law.vocab);
  char* x = inputs.reserve(batch * padded);
  std::memset(x, 0, batch * padded);
  const int64_t pitch = c->bytes == 2 ? padded : row;
  for (int64_t k = 0; k < c->slots; ++k) {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t before = k ? law.tokens[b * law.token_stride - 1] : c->anchors[b];
      std::memcpy(x + b * pitch, (const char*)c->w1 + before * row, row);
      if (!c->survival) continue;
      const int64_t at = b * c->hidden_row + k * c->hidden_slot;
      const float z = c->bytes == 2 ? dot((const bf16*)c->hidden + at, c->weight, c->size)
                                    : dot((const float*)c->hidden + at, c->weight, c->size);
      c->survival[b * c->slots + k] = z + c->table[c->entries > 1 ? before : 0];
    }
    ds_linear(c->bytes, x, batch, c->w2, nullptr, law.vocab, c->rank, (void*)law.logits, 1, law.threads);
    law.bias = c->base + k * c->base_slot;
    law_rows<float>(law);
    for (int64_t b = 0; c->draft_ids && b < batch; ++b) {
      int64_t& token = law.tokens[b * law.token_stride];
      token = c->draft_ids[token];
    }
    ++law.tokens;
    if (law.u) ++law.u;
    if (law.probs) law.probs += law.out_slot;
  }
  for (int64_t b = 0; c->prefix && b < batch; ++b)
    calibrate(c->survival + b * c->slots, c->slots, c->maps ? c->maps[b] : nullptr, c->prefix + b * c->slots);
  return 0;
}

void ds_law(int64_t bytes, const LawArgs* a) { bytes == 2 ? law_rows<bf16>(*a) : law_rows<float>(*a); }

void ds_draw(const DrawArgs* a) { draw_rows(*a); }

void ds_uniforms(const int64_t* seeds, const int64_t* positions, int64_t batch, int64_t count, int64_t stream, float* out) {
  const uint64_t golden = 0x9E3779B97F4A7C15ull;
  for (int64_t b = 0; b < batch; ++b) {
    uint64_t state = mix(mix((uint64_t)seeds[b] + golden) + (uint64_t)(stream + 1) * 0x632BE5ABull);
    state = mix(state ^ ((uint64_t)positions[b] * golden));
    for (int64_t j = 0; j < count; ++j)
      out[b * count + j] = ((float)(mix(state + (uint64_t)(j + 1) * golden) >> 41) + 0.5f) * 0x1p-23f;
  }
}

}  // extern "C"
