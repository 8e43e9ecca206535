#include "augment/subset.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "common/random.h"

namespace gas {
namespace {

constexpr int64_t kGrain = 16 * 1024;

using Keyed = std::pair<uint64_t, int64_t>;

// Result of a thread: the number of keys below the window, and the keys inside it.
struct Found {
  int64_t below = 0;
  std::vector<Keyed> inside;
};

uint64_t key_at(double share) {  // This share of all keys is below it.
  if (share <= 0) return 0;
  return share >= 1 ? UINT64_MAX : static_cast<uint64_t>(std::ldexp(share, 64));
}

// Blocks keep the loop over keys free of branches; few blocks hold a key of the window. What is
// below it wraps around, so that one comparison tells what is inside.
constexpr int64_t kBlock = 256;

template <bool kAmong>
void draw_range(uint64_t seed, const uint8_t* among, uint64_t low, uint64_t high, int64_t begin,
                int64_t end, uint8_t* drawn, Found& found) {
  uint64_t keys[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t size = std::min(kBlock, end - start);
    for (int64_t i = 0; i < size; ++i) keys[i] = random_bits(seed, start + i);
    int64_t below = 0, inside = 0;
    for (int64_t i = 0; i < size; ++i) {
      const uint8_t member = kAmong ? among[start + i] != 0 : 1;
      const uint8_t first = member & static_cast<uint8_t>(keys[i] < low);
      drawn[start + i] = first;
      below += first;
      inside += keys[i] - low <= high - low;
    }
    found.below += below;
    if (inside == 0) continue;
    for (int64_t i = 0; i < size; ++i) {
      const bool member = !kAmong || among[start + i] != 0;
      if (member && keys[i] - low <= high - low) found.inside.emplace_back(keys[i], start + i);
    }
  }
}

}  // namespace

// Keys are uniform, so the k-th smallest lies in a narrow window around k / count: one pass decides
// all others and collects those inside. Were it outside, which next to never happens, a wider
// window is tried; the widest holds every key.
void draw_subset(int64_t n, int64_t k, uint64_t seed, const uint8_t* among, int64_t count,
                 uint8_t* drawn, int threads) {
  const double total = static_cast<double>(std::max<int64_t>(1, count));
  const double rank = static_cast<double>(k);
  const double deviation = std::sqrt(rank * std::max(0.0, 1 - rank / total)) + 1;
  for (double width = 6;; width *= 16) {
    const uint64_t low = key_at((rank - width * deviation) / total);
    const uint64_t high = key_at((rank + width * deviation) / total);
    std::vector<Found> found(std::max(1, threads));
    parallel_chunks(n, kGrain, threads, [&](int chunk, int64_t begin, int64_t end) {
      if (among == nullptr) {
        draw_range<false>(seed, among, low, high, begin, end, drawn, found[chunk]);
      } else {
        draw_range<true>(seed, among, low, high, begin, end, drawn, found[chunk]);
      }
    });
    int64_t left = k;
    std::vector<Keyed> inside;
    for (const Found& part : found) {
      left -= part.below;
      inside.insert(inside.end(), part.inside.begin(), part.inside.end());
    }
    const auto size = static_cast<int64_t>(inside.size());
    const bool all = low == 0 && high == UINT64_MAX;
    if (!all && (left < 0 || left > size)) continue;
    left = std::min(left, size);
    std::nth_element(inside.begin(), inside.begin() + left, inside.end());
    for (int64_t i = 0; i < left; ++i) drawn[inside[i].second] = 1;
    return;
  }
}

}  // namespace gas
