// Statistics of a softmax over the entries of each row, for reduce_rows: of hubs, each piece has a
// maximum and a sum of its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/exp.h"
#include "common/reduce_rows.h"
#include "operators/attention.h"

namespace gas {

// A table of averages by the weights of a softmax, [rows, heads, width]. May be null.
template <typename T>
struct Average {
  T* out;
  int64_t width;
};
template <typename T>
Average(T*, int64_t) -> Average<T>;

// Tables for reduce_rows: of each row and head the largest score, the sum of exp(score - largest),
// and averages.
template <typename A, typename... Ts>
struct Softmax {
  int64_t heads;
  A* maximum;
  A* total;
  std::tuple<Average<Ts>...> averages;

  struct Scratch {
    std::vector<A> maximum, total;
    std::array<std::vector<A>, sizeof...(Ts)> averages;
  };

  Softmax(int64_t heads, A* maximum, A* total, const Average<Ts>&... averages)
      : heads(heads), maximum(maximum), total(total), averages(averages...) {}

  auto whole() const {
    return std::apply(
        [&](const auto&... average) { return std::make_tuple(maximum, total, average.out...); },
        averages);
  }
  Scratch scratch(const Hubs& hubs) const {
    const int64_t n = hubs.num_pieces() * heads;
    return std::apply(
        [&](const auto&... average) {
          const auto size = [n](const auto& of) { return of.out == nullptr ? 0 : n * of.width; };
          return Scratch{std::vector<A>(n), std::vector<A>(n), {std::vector<A>(size(average))...}};
        },
        averages);
  }
  auto pointers(Scratch& found) const {
    const auto at = [](auto& of) { return of.empty() ? nullptr : of.data(); };
    return std::apply(
        [&](auto&... of) {
          return std::make_tuple(found.maximum.data(), found.total.data(), at(of)...);
        },
        found.averages);
  }
  void join(const Hubs& hubs, const Scratch& found, int threads) const {
    const std::vector<A> share = shares(hubs, found, threads);
    std::apply(
        [&](const auto&... average) {
          size_t i = 0;
          (join_average(hubs, share, average, found.averages[i++], threads), ...);
        },
        averages);
  }

 private:
  // Writes maxima and sums; returns for each piece and head its share of the sum.
  std::vector<A> shares(const Hubs& hubs, const Scratch& found, int threads) const {
    std::vector<A> share(found.maximum.size());
    parallel_hubs(hubs, threads, [&](const Hub& hub) {
      for (int64_t h = 0; h < heads; ++h) {
        A most = found.maximum[hub.first * heads + h], whole = 0;
        for (int64_t piece = hub.first; piece < hub.last; ++piece) {
          most = std::max(most, found.maximum[piece * heads + h]);
        }
        for (int64_t piece = hub.first; piece < hub.last; ++piece) {
          const int64_t at = piece * heads + h;
          share[at] = found.total[at] * exp_of(found.maximum[at] - most);
          whole += share[at];
        }
        const A scale = inverse_or_zero(whole);
        for (int64_t piece = hub.first; piece < hub.last; ++piece) {
          share[piece * heads + h] *= scale;
        }
        maximum[hub.row * heads + h] = most;
        total[hub.row * heads + h] = whole;
      }
    });
    return share;
  }

  template <typename T>
  void join_average(const Hubs& hubs, const std::vector<A>& share, const Average<T>& average,
                    const std::vector<A>& parts, int threads) const {
    if (average.out == nullptr) return;
    const int64_t width = average.width;
    parallel_hubs(hubs, threads, [&](const Hub& hub) {
      std::vector<A> sum(width);
      for (int64_t h = 0; h < heads; ++h) {
        std::fill(sum.begin(), sum.end(), A{0});
        for (int64_t piece = hub.first; piece < hub.last; ++piece) {
          const int64_t at = piece * heads + h;
          for (int64_t j = 0; j < width; ++j) sum[j] += share[at] * parts[at * width + j];
        }
        T* out = average.out + (hub.row * heads + h) * width;
        for (int64_t j = 0; j < width; ++j) store(out + j, sum[j]);
      }
    });
  }
};

}  // namespace gas
