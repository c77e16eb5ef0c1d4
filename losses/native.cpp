// Row passes of the fused objective on a CPU: the target's law, the statistics of a draft row and the gradient of its logits.
//
// One thread handles a row from its logits to its gradient while the row lies in the second-level cache. Plain C++ that
// compilers vectorise (losses/native.py compiles it for this machine); sums run in blocks of float lanes, added up in double.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 2048;  // entries of a partial sum
constexpr int64_t kRun = 4;       // rows a thread takes at a time: neighbours share a row of p
constexpr float kFar = 60.0f;     // largest exponent: sums of a vocabulary stay finite

struct bf16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float get(const float* x, int64_t i) { return x[i]; }
inline float get(const bf16* x, int64_t i) { return as_float((uint32_t)x[i].bits << 16); }
inline void put(float* x, int64_t i, float value) { x[i] = value; }
inline void put(bf16* x, int64_t i, float value) {  // to nearest, ties to even
  const uint32_t bits = as_bits(value);
  x[i].bits = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x for x <= kFar, relative error below 2e-7; 0 below -87, where float32 leaves its normal range. NaN stays NaN.
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // the sum's low bits hold the rounded power of two
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const float power = as_float((as_bits(shifted) << 23) + 0x3f800000u);
  return x < -87.0f ? 0.0f : y * power;
}

template <class F>
void over_rows(int64_t rows, int64_t threads, F&& body) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t lo; (lo = next.fetch_add(kRun)) < rows;)
      for (int64_t i = lo; i < std::min(rows, lo + kRun); ++i) body(i);
  };
  const int wanted = (int)std::max<int64_t>(1, std::min(threads, (rows + kRun - 1) / kRun));
#ifdef _OPENMP
#pragma omp parallel num_threads(wanted)
  run();
#else
  std::vector<std::thread> others;
  for (int i = 1; i < wanted; ++i) others.emplace_back(run);
  run();
  for (auto& thread : others) thread.join();
#endif
}

// This thread's scratch row of floats.
float* scratch(int64_t n) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < n) {
    memory.reset(new float[n]);
    size = n;
  }
  return memory.get();
}

template <class T>
float largest(const T* x, int64_t lo, int64_t hi) {
  float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t i = lo; i < hi; ++i) {
    const float value = get(x, i);
    most = value > most ? value : most;
  }
  return most;
}

// e^(x - shift) into `out`; returns the sum.
template <class T>
double exponentials(const T* x, int64_t n, float shift, float* out) {
  double total = 0;
  for (int64_t lo = 0; lo < n; lo += kBlock) {
    const int64_t hi = std::min(n, lo + kBlock);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = lo; i < hi; ++i) {
      const float e = exponential(get(x, i) - shift);
      out[i] = e;
      sum += e;
    }
    total += sum;
  }
  return total;
}

struct Softmax {
  float highest, total;  // largest entry, sum of e^(x - highest)
  float inverse;         // of the sum of what was written
  int64_t best;          // first place of the largest entry
};

// The first block's largest entry serves as the shift, so that one pass finds the largest of all and the exponentials.
template <class T>
Softmax softmax(const T* x, int64_t n, float* out) {
  const float shift = largest(x, 0, std::min(n, kBlock));
  float top = -std::numeric_limits<float>::infinity();
  double total = 0;
  int64_t block = 0;
  for (int64_t lo = 0; lo < n; lo += kBlock) {
    const int64_t hi = std::min(n, lo + kBlock);
    float sum = 0, most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(+ : sum) reduction(max : most)
    for (int64_t i = lo; i < hi; ++i) {
      const float value = get(x, i), e = exponential(value - shift);
      out[i] = e;
      sum += e;
      most = value > most ? value : most;
    }
    total += sum;
    if (most > top) {
      top = most;
      block = lo;
    }
  }
  Softmax found{top, 0, 0, block};
  for (int64_t i = block, hi = std::min(n, block + kBlock); i < hi; ++i)
    if (get(x, i) == top) {
      found.best = i;
      break;
    }
  if (top - shift > kFar) {
    total = exponentials(x, n, top, out);
    found.total = (float)total;
  } else {
    found.total = (float)(total * std::exp((double)shift - top));
  }
  found.inverse = (float)(1.0 / total);
  return found;
}

}  // namespace

extern "C" {

// Mirrors losses/native.py: Law. Null pointers mean "not wanted" or "not given".
struct Law {
  int64_t rows, width, vocab, wide, threads;  // width: of a row of logits; vocab: of a row of p; wide: logits are float32
  const void* logits;                         // [rows, width]; may be p itself if both are float32 and as wide
  const int64_t* ids;                         // [vocab] the columns of p among the logits, or null for all in order
  const float* given;                         // [rows] log-normalisers, or null to find them
  float *p, *lse, *mass, *cross;              // [rows, vocab] and [rows]; cross = sum p t
  int64_t* top;                               // [rows] arg-max
};

// Mirrors losses/native.py: Rows.
struct Rows {
  int64_t rows, vocab, wide, threads, statistics;  // statistics: 0 takes them as given
  void* z;                                         // [rows, vocab] draft logits; becomes dz if `scale` is given
  const float* p;                                  // [positions, vocab]
  const int64_t *local, *order, *column;           // [rows]: row of p; the order to work in; column of the text token or -1
  float *highest, *total, *cross, *alpha, *below;  // [rows]; below = sum q 1[q <= p]
  int64_t* best;
  const float *scale, *d_alpha, *d_kl, *d_label;   // [rows] dL/d(statistic); scale: the known part of q's factor
};

}  // extern "C"

namespace {

template <class T>
void law_row(const Law& a, int64_t i) {
  const T* t = (const T*)a.logits + i * a.width;
  float* p = a.p + i * a.vocab;
  float lse, inverse = 1;
  float* e = p;
  if (a.given) {
    lse = a.given[i];
  } else {
    // p over all logits: its own row can hold the exponentials, unless the sum p t still needs the logits there
    if (a.ids || (a.cross && (const void*)t == (const void*)p)) e = scratch(a.width);
    const Softmax found = softmax(t, a.width, e);
    inverse = found.inverse;
    lse = found.highest + std::log(found.total);
    if (a.top) a.top[i] = found.best;
  }
  a.lse[i] = lse;
  double cross = 0, mass = 0;
  for (int64_t lo = 0; lo < a.vocab; lo += kBlock) {
    const int64_t hi = std::min(a.vocab, lo + kBlock);
    float some = 0, part = 0;
    if (!a.ids && !a.given) {
#pragma omp simd reduction(+ : some, part)
      for (int64_t j = lo; j < hi; ++j) {
        const float value = e[j] * inverse;
        some += value * get(t, j);
        part += value;
        p[j] = value;
      }
    } else {
#pragma omp simd reduction(+ : some, part)
      for (int64_t j = lo; j < hi; ++j) {
        const float logit = get(t, a.ids ? a.ids[j] : j);
        const float value = exponential(std::min(logit - lse, 0.0f));
        some += value * logit;
        part += value;
        p[j] = value;
      }
    }
    cross += some;
    mass += part;
  }
  a.mass[i] = a.ids || a.given ? (float)mass : 1.0f;
  if (a.cross) a.cross[i] = (float)cross;
}

template <class T>
void draft_row(const Rows& a, int64_t i) {
  T* z = (T*)a.z + i * a.vocab;
  const float* p = a.p + a.local[i] * a.vocab;
  const int64_t n = a.vocab;
  float* e = scratch(n);
  float inverse;
  if (a.statistics) {
    const Softmax found = softmax(z, n, e);
    a.highest[i] = found.highest;
    a.total[i] = found.total;
    a.best[i] = found.best;
    inverse = found.inverse;
    double alpha = 0, below = 0, cross = 0;
    for (int64_t lo = 0; lo < n; lo += kBlock) {
      const int64_t hi = std::min(n, lo + kBlock);
      float overlap = 0, under = 0, product = 0;
#pragma omp simd reduction(+ : overlap, under, product)
      for (int64_t j = lo; j < hi; ++j) {
        const float q = e[j] * inverse;
        overlap += q < p[j] ? q : p[j];
        under += q <= p[j] ? q : 0.0f;
        product += p[j] * get(z, j);
      }
      cross += product;
      alpha += overlap;
      below += under;
    }
    a.alpha[i] = (float)alpha;
    a.below[i] = (float)below;
    if (a.cross) a.cross[i] = (float)cross;
  } else {
    inverse = (float)(1.0 / exponentials(z, n, a.highest[i], e));
  }
  if (!a.scale) return;
  const float by_alpha = a.d_alpha ? a.d_alpha[i] : 0.0f, by_kl = a.d_kl ? a.d_kl[i] : 0.0f;
  const float factor = a.scale[i] - by_alpha * a.below[i];
  const int64_t column = a.column[i];
  const float label = a.d_label && column >= 0 ? a.d_label[i] : 0.0f;
  const float own = column >= 0 ? e[column] * inverse : 0.0f;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const float q = e[j] * inverse;
    const float share = q <= p[j] ? factor + by_alpha : factor;
    put(z, j, q * share - by_kl * p[j]);
  }
  if (label != 0.0f) put(z, column, own * (own <= p[column] ? factor + by_alpha : factor) - by_kl * p[column] + label);
}

}  // namespace

extern "C" {

void ds_law(const Law* a) {
  over_rows(a->rows, a->threads, [&](int64_t i) { a->wide ? law_row<float>(*a, i) : law_row<bf16>(*a, i); });
}

void ds_rows(const Rows* a) {
  over_rows(a->rows, a->threads, [&](int64_t i) {
    const int64_t row = a->order ? a->order[i] : i;
    a->wide ? draft_row<float>(*a, row) : draft_row<bf16>(*a, row);
  });
}

}  // extern "C"
