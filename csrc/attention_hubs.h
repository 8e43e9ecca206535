// What attention found in the pieces of a hub, joined: each has a maximum and a sum of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "exp.h"
#include "parallel_rows.h"
#include "simd.h"

namespace gas {

// The largest score and the sum of exp(score - maximum) of each hub, given those of its pieces; and
// for each piece and head its share of that sum.
template <typename A>
std::vector<A> join_scores(const Hubs& hubs, int64_t heads, const std::vector<A>& maximum,
                           const std::vector<A>& total, A* out_maximum, A* out_total,
                           int threads) {
  std::vector<A> share(maximum.size());
  parallel_hubs(hubs, threads, [&](const Hub& hub) {
    for (int64_t h = 0; h < heads; ++h) {
      A most = maximum[hub.first * heads + h], whole = 0;
      for (int64_t piece = hub.first; piece < hub.last; ++piece) {
        most = std::max(most, maximum[piece * heads + h]);
      }
      for (int64_t piece = hub.first; piece < hub.last; ++piece) {
        const int64_t at = piece * heads + h;
        share[at] = total[at] * exp_of(maximum[at] - most);
        whole += share[at];
      }
      const A scale = whole > A{0} ? A{1} / whole : A{0};
      for (int64_t piece = hub.first; piece < hub.last; ++piece) share[piece * heads + h] *= scale;
      out_maximum[hub.row * heads + h] = most;
      out_total[hub.row * heads + h] = whole;
    }
  });
  return share;
}

// out[r, h] = the sum of share[p, h] * parts[p, h] over the pieces p of each hub r, rows of `width`.
template <typename A, typename T>
void join_shares(const Hubs& hubs, int64_t heads, int64_t width, const std::vector<A>& share,
                 const std::vector<A>& parts, T* out, int threads) {
  parallel_hubs(hubs, threads, [&](const Hub& hub) {
    std::vector<A> sum(width);
    for (int64_t h = 0; h < heads; ++h) {
      std::fill(sum.begin(), sum.end(), A{0});
      for (int64_t piece = hub.first; piece < hub.last; ++piece) {
        const int64_t at = piece * heads + h;
        for (int64_t j = 0; j < width; ++j) sum[j] += share[at] * parts[at * width + j];
      }
      for (int64_t j = 0; j < width; ++j) store(out + (hub.row * heads + h) * width + j, sum[j]);
    }
  });
}

}  // namespace gas
