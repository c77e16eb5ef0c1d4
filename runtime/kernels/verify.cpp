// Verification of drafted chains in float32: thresholds, the residual law, and the token after the accepted drafts. The PyTorch
// code of runtime/verify.py defines what is computed; here p and q are read only where they decide.
#include "rows.h"

namespace ds {
namespace {

constexpr double kFloor = 1e-8;  // RESIDUAL_FLOOR of verify.py

struct VerifyArgs {
  const float *p, *q;                      // q null: the drafts were certain
  const int64_t *tokens, *lengths, *draft_ids, *p_rows;  // draft_ids, p_rows may be null
  const float *uniforms, *emit;            // emit null: draw nothing
  int64_t *accepted, *next;
  float *residual, *thresholds, *reach;    // null: not wanted; thresholds alone: decide nothing
  int64_t p_stride, p_slot, q_stride, q_slot;
  int64_t batch, slots, vocab, columns, block, threads;
};

// One row, by all threads of a team: each of them comes to the same decisions, and handles its own share of the entries.
class Row {
 public:
  Row(const VerifyArgs& args, int64_t row, const Team& team, float* scratch)
      : a(args), s(team, args.vocab), scratch_(scratch), row_(row), p_(a.p + (a.p_rows ? a.p_rows[row] : row) * a.p_stride),
        tokens_(a.tokens + row * a.slots) {}

  // Returns false where a live draft is not a token of the target.
  bool run() {
    if (!begin()) return false;
    if (a.thresholds && s.team.id == 0)
      for (int64_t i = length_; i < a.slots; ++i) a.thresholds[row_ * a.slots + i] = 0;
    const int64_t accepted = a.block ? decide_block() : decide_token_wise();
    if (a.accepted) finish(accepted);
    clear();
    s.team.sync();
    return true;
  }

 private:
  const float* law(int64_t slot) const { return p_ + slot * a.p_slot; }
  float scale(int64_t slot) const { return a.block ? reach_[slot] : 1.0f; }
  bool passes(int64_t slot, float h) const { return a.uniforms && a.uniforms[row_ * a.slots + slot - 1] <= h; }
  void report(int64_t slot, float h) const {
    if (a.thresholds && s.team.id == 0) a.thresholds[row_ * a.slots + slot - 1] = h;
  }

  float draft_probability(int64_t slot) const {
    const float* q = a.q + row_ * a.q_stride + slot * a.q_slot;
    const int64_t token = tokens_[slot];
    if (!a.draft_ids) return q[token];
    const int64_t* end = a.draft_ids + a.columns;
    const int64_t* found = std::lower_bound(a.draft_ids, end, token);  // usually ascending
    if (found == end || *found != token) found = std::find(a.draft_ids, end, token);
    return found == end ? 0.0f : q[found - a.draft_ids];
  }

  bool begin() {
    int64_t asked = std::min(a.lengths[row_], a.slots);
    for (length_ = 0; length_ < asked && tokens_[length_] >= 0; ++length_)
      if (tokens_[length_] >= a.vocab) return false;
    reach_.assign(a.slots + 1, 0.0f);
    ratio_.assign(a.slots + 1, 0.0f);
    reach_[0] = 1;
    for (int64_t i = 0; i < a.slots; ++i) {
      if (i < length_) {
        float ratio = law(i)[tokens_[i]];
        if (a.q) {
          const float q = draft_probability(i);
          ratio = q > 0 ? ratio / std::max(q, FLT_MIN) : 0.0f;
          if (ratio > FLT_MAX) ratio = FLT_MAX;
        }
        ratio_[i] = ratio;
      }
      const float next = reach_[i] * ratio_[i];
      reach_[i + 1] = next > 1 ? 1 : next;
    }
    if (a.reach && s.team.id == 0) std::copy(reach_.begin(), reach_.end(), a.reach + row_ * (a.slots + 1));
    return true;
  }

  int64_t decide_token_wise() {
    int64_t accepted = 0;
    for (int64_t i = 1; i <= length_; ++i) {
      const float h = ratio_[i - 1] > 1 ? 1 : ratio_[i - 1];
      report(i, h);
      if (accepted == i - 1 && passes(i, h)) accepted = i;
    }
    return accepted;
  }

  // From the last slot down, so that Z (a pass over p and q) is taken only where it decides: h_i <= P_i settles most slots.
  int64_t decide_block() {
    int64_t accepted = 0;
    for (int64_t i = length_; i >= 1; --i) {
      if (!a.thresholds && !passes(i, reach_[i])) continue;
      float h = reach_[i];
      if (i < length_ && h < 1) {
        const float z = (float)(a.q ? measure(i) : (double)(h * std::max(0.0f, 1 - law(i)[tokens_[i]])));
        h = std::min(h, z / std::max(z + (1 - h), FLT_MIN));
      }
      report(i, h);
      if (!accepted && passes(i, h)) accepted = i;
      if (accepted && !a.thresholds) break;
    }
    return accepted;
  }

  // Block sums of the law itself (plain), or of (P p - q)+ of a live slot. Returns their total.
  double measure(int64_t slot, bool plain = false) {
    clear();
    measured_ = plain ? -1 : slot;
    plain_ = plain;
    float* sums = sums_ = scratch_ + (turn_ ^= 1) * s.count;
    if (!plain && a.q) prepare(slot);
    const float* p = law(slot);
    const __m512 by = _mm512_set1_ps(plain ? 1.0f : scale(slot));
    const float *q = plain ? nullptr : q_;
    s.each([&](int64_t b, int64_t at, int64_t n) {
      sums[b] = block_sum(n, [&](int64_t i, __mmask16 m) {
        return excess(load(p + at + i, m), by, q ? q + at + i : nullptr, m);
      });
    });
    if (!plain && !a.q) {  // a certain draft takes all of p(x) and nothing else
      const int64_t hole = tokens_[slot], b = hole / kSum, at = b * kSum;
      if (b >= s.begin && b < s.end)
        sums[b] = block_sum(s.size(b), [&](int64_t i, __mmask16 m) {
          const int64_t lane = hole - at - i;
          if (lane >= 0 && lane < 16) m &= (__mmask16)~(1u << lane);
          return excess(load(p + at + i, m), by, nullptr, m);
        });
    }
    s.team.sync();
    return add_up(sums, s.count);
  }

  static __m512 excess(__m512 p, __m512 by, const float* q, __mmask16 m) {
    const __m512 scaled = _mm512_mul_ps(p, by);
    return q ? _mm512_max_ps(_mm512_sub_ps(scaled, load(q, m)), _mm512_setzero_ps()) : scaled;
  }

  // q of one slot over target ids: itself, or scattered (this thread's share only) into a row of zeros.
  void prepare(int64_t slot) {
    q_ = a.q + row_ * a.q_stride + slot * a.q_slot;
    if (!a.draft_ids) return;
    static thread_local Buffer<float> dense;
    float* row = dense.reserve(a.vocab);  // zeros when new, and `clear` leaves zeros
    for (int64_t c = 0; c < a.columns; ++c) {
      const int64_t id = a.draft_ids[c];
      if (id >= s.first && id < s.last) row[id] = q_[c];
    }
    q_ = dense_ = row;
  }

  void clear() {
    if (dense_)
      for (int64_t c = 0; c < a.columns; ++c) {
        const int64_t id = a.draft_ids[c];
        if (id >= s.first && id < s.last) dense_[id] = 0;
      }
    dense_ = nullptr;
    q_ = nullptr;
  }

  float weight(int64_t slot, int64_t i) const {
    if (plain_) return law(slot)[i];
    const float scaled = law(slot)[i] * scale(slot);
    if (!a.q) return i == tokens_[slot] ? 0.0f : scaled;
    return std::max(scaled - q_[i], 0.0f);
  }

  // The token after the accepted drafts, and its law.
  void finish(int64_t accepted) {
    const bool first = s.team.id == 0;
    if (first) a.accepted[row_] = accepted;
    double mass = 0;
    if (accepted < length_) mass = measured_ == accepted ? add_up(sums_, s.count) : measure(accepted);
    const bool from_p = !(mass > kFloor);  // also where no draft follows
    if (a.residual) {
      float* out = a.residual + row_ * a.vocab;
      if (from_p) std::memcpy(out + s.first, law(accepted) + s.first, std::max<int64_t>(0, s.last - s.first) * 4);
      else write_residual(accepted, (float)mass, out);
    }
    if (!a.emit) return;
    if (from_p) measure(accepted, true);
    const int64_t token = pick(sums_, s, a.emit[row_], [&](int64_t i) { return weight(accepted, i); });
    if (token >= 0) a.next[row_] = token;
  }

  void write_residual(int64_t slot, float mass, float* out) const {
    const float* p = law(slot);
    const __m512 by = _mm512_set1_ps(scale(slot)), total = _mm512_set1_ps(mass);
    for (int64_t i = s.first; i < s.last; i += 16) {
      const __mmask16 m = lanes(s.last - i);
      _mm512_mask_storeu_ps(out + i, m, _mm512_div_ps(excess(load(p + i, m), by, q_ ? q_ + i : nullptr, m), total));
    }
    if (!a.q && tokens_[slot] >= s.first && tokens_[slot] < s.last) out[tokens_[slot]] = 0;
  }

  const VerifyArgs& a;
  const Share s;
  float *scratch_, *sums_ = nullptr, *dense_ = nullptr;
  const float* q_ = nullptr;
  const int64_t row_;
  const float* p_;
  const int64_t* tokens_;
  int64_t length_ = 0, measured_ = -1;
  int turn_ = 0;  // two sets of sums: one may still be read while the next is written
  bool plain_ = false;
  std::vector<float> reach_, ratio_;
};

}  // namespace
}  // namespace ds

using namespace ds;

extern "C" {

// Returns 0, or 1 where a live draft is not below vocab.
int64_t ds_verify(const VerifyArgs* a) {
  std::atomic<int64_t> bad{0};
  over_rows(a->batch, a->vocab, a->threads, 2 * blocks(a->vocab), [&](int64_t row, const Team& team, float* scratch) {
    if (!Row(*a, row, team, scratch).run()) bad = 1;
  });
  return bad;
}

// Greedy rule: best [B, G + 1] arg-max of the target, tokens [B, G], lengths [B] -> accepted [B], next [B].
void ds_greedy(const int64_t* best, const int64_t* tokens, const int64_t* lengths, int64_t batch, int64_t slots,
               int64_t* accepted, int64_t* next) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t *top = best + b * (slots + 1), *draft = tokens + b * slots, most = std::min(lengths[b], slots);
    int64_t n = 0;
    while (n < most && top[n] == draft[n]) ++n;
    accepted[b] = n;
    next[b] = top[n];
  }
}

}  // extern "C"
