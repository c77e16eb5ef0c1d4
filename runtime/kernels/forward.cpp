// A whole forward of a Llama-like stack in one call: embedding, layers, final norm, head. Plain C interface (ctypes).
#include <sys/syscall.h>
#include <unistd.h>

#include "model.h"

namespace ds {

bool g_amx = false;

template <class T>
void Model<T>::layer(const ForwardArgs& f, int64_t index, const Team& team) {
  const LayerArgs& w = layers[index];
  const int64_t m = tokens(), h = args.hidden, q = args.heads * args.head_dim, n = qkv_rows();
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
          store16((T*)f.taps + (place[i] * f.num_taps + t) * h + c, _mm512_loadu_ps(states + i * h + c));
}

// Final norm, normed states out, head.
template <class T>
void Model<T>::finish(const ForwardArgs& f, const Team& team) {
  const int64_t m = tokens(), h = args.hidden;
  if (f.hidden)
    for (int64_t i = team.begin(m); i < team.end(m); ++i)
      rms_norm(x.data + i * h, args.final_norm, (T*)f.hidden + place[i] * h, (int)h, args.eps);
  if (!f.logits) return;
  const int64_t rows = (int64_t)head_rows.size();
  for (int64_t i = team.begin(rows); i < team.end(rows); ++i)
    rms_norm(x.data + head_rows[i] * h, args.final_norm, normed.data + i * h, (int)h, args.eps);
  team.sync();
  const Packed<T> head = packed(args.head, nullptr, args.vocab, h);
  const bool past = rows * args.vocab >= 1 << 20;  // megabytes of logits: written past the caches, whose sets their long stride would fight over
  linear<T>(normed.data, h, rows, head, team.begin(head.panels()), team.end(head.panels()),
            [&](int64_t m0, int count, int64_t panel, const float* acc) {
    each16(head, m0, count, panel, acc, [&](int64_t row, int64_t c, __m512 value, __mmask16 mask) {
      float* to = f.logits + head_place[row] * args.vocab + c;
      if (past && mask == 0xffff && !((uintptr_t)to & 63)) _mm512_stream_ps(to, value);
      else _mm512_mask_storeu_ps(to, mask, value);
    });
  });
  if (past) _mm_sfence();
}

// Target states of all parts -> `normed`: projected, rounded as a layer's output is, then the context's own norm.
template <class T>
void Model<T>::project(const ForwardArgs& f, const Team& team) {
  const int64_t m = tokens(), h = args.hidden, wide = args.context_width;
  const T* states = (const T*)f.parts[0];
  if (f.batch > 1) {
    for (int64_t i = team.begin(m); i < team.end(m); ++i)
      std::memcpy(act.data + i * wide, (const T*)f.parts[row_of[i]] + (i - offset[row_of[i]]) * wide, wide * sizeof(T));
    states = act.data;
    team.sync();
  }
  const Packed<T> p = packed(args.context, nullptr, h, wide);
  linear<T>(states, wide, m, p, team.begin(p.panels()), team.end(p.panels()),
            [&](int64_t m0, int rows, int64_t panel, const float* acc) {
    each16(p, m0, rows, panel, acc, [&](int64_t row, int64_t c, __m512 value, __mmask16) {
      T rounded[16];
      store16(rounded, value);
      _mm512_storeu_ps(x.data + row * h + c, load16(rounded));
    });
  });
  team.sync();
  for (int64_t i = team.begin(m); i < team.end(m); ++i)
    rms_norm(x.data + i * h, args.context_norm, normed.data + i * h, (int)h, args.eps);
}

template <class T>
void Model<T>::run_thread(const ForwardArgs& f, const Team& team) {
  const int64_t m = tokens(), h = args.hidden;
  const int64_t begin = team.begin(m), end = team.end(m);
  if (f.parts) project(f, team);
  else for (int64_t i = begin; i < end; ++i) {
    const T* from = f.tokens ? (const T*)args.embedding + token_at(f, i) * h : (const T*)f.input + place[i] * h;
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
int Model<T>::run(const ForwardArgs& f) {
  std::lock_guard<std::mutex> lock(mutex);
  if (const int wrong = place_tokens(f)) return wrong;
  const int64_t m = tokens();
  x.reserve(m * args.hidden + 16);
  normed.reserve(m * args.hidden + 64);
  mixed.reserve(m * args.heads * args.head_dim + 64);
  qkv.reserve(m * qkv_rows() + 16);
  act.reserve(m * (f.parts && f.batch > 1 ? args.context_width : args.mlp) + 64);
  plan(f);
  Barrier barrier;
#pragma omp parallel num_threads((int)f.threads)
  {
#pragma omp single
    barrier.threads = omp_get_num_threads();
    const Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier};
    run_thread(f, team);
  }
  return 0;
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

// 0, or which argument is out of range (see place_tokens): nothing was done then.
int64_t ds_forward(int64_t bytes, void* model, const ForwardArgs* f) {
  return bytes == 2 ? ((Model<bf16>*)model)->run(*f) : ((Model<float>*)model)->run(*f);
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
