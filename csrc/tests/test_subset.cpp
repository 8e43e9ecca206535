#include "augment/subset.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "check.h"
#include "common/random.h"

namespace {

std::vector<uint8_t> draw(int64_t n, int64_t k, uint64_t seed, int threads,
                          const std::vector<uint8_t>* among = nullptr) {
  std::vector<uint8_t> drawn(n, 2);
  const int64_t count = among == nullptr ? n : n - std::count(among->begin(), among->end(), 0);
  gas::draw_subset(n, k, seed, among == nullptr ? nullptr : among->data(), count, drawn.data(),
                   threads);
  return drawn;
}

// By sorting.
std::vector<uint8_t> expected(int64_t n, int64_t k, uint64_t seed,
                              const std::vector<uint8_t>* among = nullptr) {
  std::vector<std::pair<uint64_t, int64_t>> keys;
  for (int64_t i = 0; i < n; ++i) {
    if (among == nullptr || (*among)[i]) keys.emplace_back(gas::random_bits(seed, i), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<uint8_t> drawn(n, 0);
  for (int64_t i = 0; i < k; ++i) drawn[keys[i].second] = 1;
  return drawn;
}

}  // namespace

int main() {
  for (const int64_t n : {0, 1, 2, 7, 100, 70001}) {
    for (const int64_t k : {int64_t{0}, int64_t{1}, n / 3, n - 1, n}) {
      if (k < 0 || k > n) continue;
      for (const uint64_t seed : {0, 1, 12345}) {
        const std::vector<uint8_t> wanted = expected(n, k, seed);
        for (const int threads : {1, 3}) CHECK(draw(n, k, seed, threads) == wanted);
      }
    }
  }
  // Among few, and among elements that were chosen by the same keys: the window misses, and grows.
  const int64_t n = 50000;
  for (const int64_t members : {1, 40, 20000}) {
    std::vector<uint8_t> among = draw(n, members, 9, 2);
    for (uint8_t& member : among) member *= 254;  // Any number but 0 says yes.
    for (const int64_t k : {int64_t{0}, int64_t{1}, members / 2, members}) {
      if (k > members) continue;
      for (const uint64_t seed : {9, 10}) {
        CHECK(draw(n, k, seed, 3, &among) == expected(n, k, seed, &among));
      }
    }
  }
}
