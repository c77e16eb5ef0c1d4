// Rows of probabilities shared by threads: what sampling.cpp and verify.cpp have in common.
//
// Every sum over a row is taken in blocks of kSum entries, added up in order in double: the bits depend on the row alone, and
// a draw looks through the block sums before it looks into one block. Rows go to groups of threads (one thread each where
// there are enough rows); the threads of a group share a row block by block.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "common.h"

namespace ds {
namespace {

constexpr int64_t kSum = 256;      // entries of a block
constexpr int64_t kShare = 8192;   // entries that are worth a thread

inline int64_t blocks(int64_t n) { return (n + kSum - 1) / kSum; }
inline __mmask16 lanes(int64_t n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }
inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline __m512 load(const bf16* p, __mmask16 mask) { return bf16_to_float(_mm256_maskz_loadu_epi16(mask, p)); }

// Sum of f(i, mask) over i = 0, 16, .. < n; f returns zeros in the lanes outside its mask. n <= kSum.
template <class F>
inline float block_sum(int64_t n, F&& f) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  if (n == kSum) {
    for (int64_t i = 0; i < kSum; i += 64) {
      a = _mm512_add_ps(a, f(i, (__mmask16)0xffff));
      b = _mm512_add_ps(b, f(i + 16, (__mmask16)0xffff));
      c = _mm512_add_ps(c, f(i + 32, (__mmask16)0xffff));
      d = _mm512_add_ps(d, f(i + 48, (__mmask16)0xffff));
    }
  } else {
    for (int64_t i = 0; i < n; i += 16) a = _mm512_add_ps(a, f(i, lanes(n - i)));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
}

inline double add_up(const float* sums, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += sums[i];
  return total;
}

// The threads of one row: [begin, end) is this thread's share of the blocks, [first, last) of the entries.
struct Share {
  Team team;
  int64_t vocab, count, begin, end, first, last;
  Share(const Team& t, int64_t n)
      : team(t), vocab(n), count(blocks(n)), begin(t.begin(count)), end(t.end(count)), first(begin * kSum),
        last(std::min(n, end * kSum)) {}
  int64_t size(int64_t block) const { return std::min(kSum, vocab - block * kSum); }
  template <class F>
  void each(F&& f) const {  // f(block, first entry, entries)
    for (int64_t b = begin; b < end; ++b) f(b, b * kSum, size(b));
  }
};

// body(row, team, scratch) for every row; `scratch` holds `floats` floats shared by the team.
template <class F>
void over_rows(int64_t rows, int64_t vocab, int64_t threads, int64_t floats, F&& body) {
  static thread_local Buffer<float> scratch;
  const int wanted = (int)std::max<int64_t>(1, std::min(threads, rows * vocab / kShare));
  float* base = scratch.reserve(wanted * floats);
  std::unique_ptr<Barrier[]> barriers(new Barrier[wanted]);
  const auto run = [&](int id, int n) {
    const int size = (int)std::max<int64_t>(1, std::min(n / std::max<int64_t>(rows, 1), vocab / kShare));
    const int groups = n / size, group = id / size;
    if (group >= groups) return;
    const Team team{id % size, size, &barriers[group]};
    for (int64_t row = rows * group / groups; row < rows * (group + 1) / groups; ++row) body(row, team, base + group * floats);
  };
  if (wanted == 1) return run(0, 1);
#pragma omp parallel num_threads(wanted)
  {
#pragma omp single
    {
      const int n = omp_get_num_threads();
      for (int i = 0; i < wanted; ++i)
        barriers[i].threads = (int)std::max<int64_t>(1, std::min(n / std::max<int64_t>(rows, 1), vocab / kShare));
    }
    run(omp_get_thread_num(), omp_get_num_threads());
  }
}

// The first entry at which the running weight exceeds u * total; never one of weight 0. Only the thread whose share holds the
// block found looks into it and returns the entry; the others return -1.
template <class W>
int64_t pick(const float* sums, const Share& s, float u, W&& weight) {
  const double goal = (double)u * add_up(sums, s.count);
  double before = 0, start = 0;
  int64_t block = -1;
  for (int64_t b = 0; b < s.count; ++b) {
    if (sums[b] > 0) { block = b; start = before; }  // the last one so far: a block of weight 0 never holds the goal
    before += sums[b];
    if (before > goal) break;
  }
  if (block < 0) block = s.count - 1;  // no weight at all (or NaN): some valid entry
  if (block < s.begin || block >= s.end) return -1;
  int64_t found = block * kSum + s.size(block) - 1, last = -1;
  double running = start;
  for (int64_t i = block * kSum, n = i + s.size(block); i < n; ++i) {
    const float w = weight(i);
    if (!(w > 0)) continue;
    last = i;
    running += w;
    if (running > goal) return i;
  }
  return last < 0 ? found : last;  // the block's sum was rounded up
}

}  // namespace
}  // namespace ds
