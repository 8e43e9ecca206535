#include "graph/split_row.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define GAS_COMPRESSES
#endif

namespace gas {

template <typename Index, typename Name, typename Value>
int32_t* split_row(const Entries<Index, Name, Value>& entries, int64_t first, int64_t count,
                   int64_t at, int32_t* halo) {
  const auto [col, local, e_id, value, out_col, out_eid, out_value] = entries;
  const int64_t end = first + count;
  int64_t own = at, other = at;
  for (int64_t e = first; e < end; ++e) other += local[col[e]] >= 0;
  for (int64_t e = first; e < end; ++e) {
    const int32_t node = col[e], id = local[node];
    const bool is_own = id >= 0;
    const int64_t to = is_own ? own : other;
    own += is_own;
    other += !is_own;
    out_col[to] = is_own ? id : ~node;
    out_eid[to] = e_id ? e_id[e] : e;
    if (value) out_value[to] = value[e];
    *halo = node;
    halo += !is_own;
  }
  return halo;
}

#ifdef GAS_COMPRESSES
#define GAS_WIDE static __attribute__((target("avx512f,avx512vl,avx512dq,popcnt")))

namespace {

constexpr int64_t kLanes = 8;

// Eight numbers of four or eight bytes.
GAS_WIDE inline __m256i read(__mmask8 lanes, const uint32_t* from) {
  return _mm256_maskz_loadu_epi32(lanes, from);
}
GAS_WIDE inline __m512i read(__mmask8 lanes, const uint64_t* from) {
  return _mm512_maskz_loadu_epi64(lanes, from);
}

// Eight numbers, of eight bytes each then.
GAS_WIDE inline __m512i read_names(__mmask8 lanes, const int32_t* from) {
  return _mm512_maskz_cvtepi32_epi64(lanes, _mm256_maskz_loadu_epi32(lanes, from));
}
GAS_WIDE inline __m512i read_names(__mmask8 lanes, const int64_t* from) {
  return _mm512_maskz_loadu_epi64(lanes, from);
}

// Writes the chosen ones side by side. Compressed first: on some processors that takes very long
// where it is memory that they are compressed to.
GAS_WIDE inline void pack(uint32_t* to, __mmask8 chosen, __m256i x) {
  const auto lanes = static_cast<__mmask8>((1u << __builtin_popcount(chosen)) - 1);
  _mm256_mask_storeu_epi32(to, lanes, _mm256_maskz_compress_epi32(chosen, x));
}
GAS_WIDE inline void pack(uint64_t* to, __mmask8 chosen, __m512i x) {
  const auto lanes = static_cast<__mmask8>((1u << __builtin_popcount(chosen)) - 1);
  _mm512_mask_storeu_epi64(to, lanes, _mm512_maskz_compress_epi64(chosen, x));
}
GAS_WIDE inline void pack(int32_t* to, __mmask8 chosen, __m256i x) {
  pack(reinterpret_cast<uint32_t*>(to), chosen, x);
}
GAS_WIDE inline void pack(int64_t* to, __mmask8 chosen, __m512i x) {
  pack(reinterpret_cast<uint64_t*>(to), chosen, x);
}
GAS_WIDE inline void pack(int64_t* to, __mmask8 chosen, __m256i x) {
  pack(to, chosen, _mm512_maskz_cvtepi32_epi64(0xff, x));
}

template <typename Index, typename Name, typename Value>
GAS_WIDE int32_t* split_wide(const Entries<Index, Name, Value>& entries, int64_t first,
                             int64_t count, int64_t at, int32_t* halo) {
  const auto [col, local, e_id, value, out_col, out_eid, out_value] = entries;
  const int64_t end = first + count;
  const __m256i outside = _mm256_set1_epi32(-1);
  int64_t own = at, other = at;
  for (int64_t e = first; e < end; e += kLanes) {
    const auto lanes = static_cast<__mmask8>(end - e < kLanes ? (1u << (end - e)) - 1 : 0xff);
    const __m256i node = _mm256_maskz_loadu_epi32(lanes, col + e);
    const __m256i id = _mm256_mmask_i32gather_epi32(outside, lanes, node, local, 4);
    other += __builtin_popcount(lanes & ~_mm256_movepi32_mask(id));
  }
  for (int64_t e = first; e < end; e += kLanes) {
    const auto lanes = static_cast<__mmask8>(end - e < kLanes ? (1u << (end - e)) - 1 : 0xff);
    const __m256i node = _mm256_maskz_loadu_epi32(lanes, col + e);
    const __m256i id = _mm256_mmask_i32gather_epi32(outside, lanes, node, local, 4);
    const auto others = static_cast<__mmask8>(lanes & _mm256_movepi32_mask(id));
    const auto owns = static_cast<__mmask8>(lanes & ~others);
    const __m512i name =
        e_id ? read_names(lanes, e_id + e)
             : _mm512_add_epi64(_mm512_set1_epi64(e), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    pack(out_col + own, owns, id);
    pack(out_col + other, others, _mm256_xor_si256(node, outside));
    pack(out_eid + own, owns, name);
    pack(out_eid + other, others, name);
    if (value) {
      const auto bits = read(lanes, value + e);
      pack(out_value + own, owns, bits);
      pack(out_value + other, others, bits);
    }
    pack(halo, others, node);
    own += __builtin_popcount(owns);
    other += __builtin_popcount(others);
    halo += __builtin_popcount(others);
  }
  return halo;
}

}  // namespace
#endif

template <typename Index, typename Name, typename Value>
SplitRow<Index, Name, Value> split_row_by_vectors() {
#ifdef GAS_COMPRESSES
  static const bool wide = __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("popcnt");
  if (wide) return split_wide<Index, Name, Value>;
#endif
  return nullptr;
}

#define GAS_SPLIT(Index, Name, Value)                                                        \
  template int32_t* split_row(const Entries<Index, Name, Value>&, int64_t, int64_t, int64_t, \
                              int32_t*);                                                     \
  template SplitRow<Index, Name, Value> split_row_by_vectors<Index, Name, Value>();
#define GAS_SPLIT_VALUES(Index, Name) \
  GAS_SPLIT(Index, Name, uint32_t)    \
  GAS_SPLIT(Index, Name, uint64_t)

GAS_SPLIT_VALUES(int32_t, int32_t)
GAS_SPLIT_VALUES(int32_t, int64_t)
GAS_SPLIT_VALUES(int64_t, int32_t)
GAS_SPLIT_VALUES(int64_t, int64_t)

}  // namespace gas
