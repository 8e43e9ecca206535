// The CUDA kernels of csrc/augment/subset.cu, run on the CPU, against the
// functions for the CPU.
#include "augment/subset.cu"

#include <algorithm>
#include <utility>

#include "augment/subset.h"
#include "cuda_data.h"

namespace {

Table<uint8_t> wanted_of(int64_t n, int64_t k, uint64_t seed, const Table<uint8_t>* among) {
  Table<uint8_t> drawn(n, 0);
  const int64_t count = among == nullptr ? n : std::count(&(*among)[0], &(*among)[0] + n, 1);
  gas::draw_subset(n, k, seed, among == nullptr ? nullptr : among->data(), count, drawn.data(), 1);
  return drawn;
}

void test(int64_t n, int64_t k, uint64_t seed, const Table<uint8_t>* among = nullptr) {
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Table<uint8_t> drawn(n, 0);
    gas::cuda::draw_subset(n, &k, seed, among == nullptr ? nullptr : among->data(), drawn.data(),
                           stream);
    return drawn;
  });
  CHECK(found == wanted_of(n, k, seed, among));
}

void test_sizes() {
  for (const int64_t n : {0, 1, 2, 257, 30011}) {
    for (const uint64_t seed : {uint64_t{0}, ~uint64_t{0} >> 1}) {
      for (const int64_t k : {int64_t{0}, int64_t{1}, n / 3, n - 1, n}) {
        if (k >= 0 && k <= n) test(n, k, seed);
      }
    }
  }
}

// Members that were chosen by the same keys, too: all of theirs begin alike.
void test_among() {
  const int64_t n = 20011;
  for (const int64_t members : {0, 1, 9000}) {
    const Table<uint8_t> among = wanted_of(n, members, 9, nullptr);
    for (const int64_t k : {int64_t{0}, int64_t{1}, members / 2, members}) {
      if (k > members) continue;
      for (const uint64_t seed : {9, 10}) test(n, k, seed, &among);
    }
  }
}

// Of many keys, the two that differ last: rounds go on until they do.
void test_neighbours() {
  const int64_t n = 1 << 19;
  std::vector<std::pair<uint64_t, int64_t>> keys(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = {gas::random_bits(5, i), i};
  std::sort(keys.begin(), keys.end());
  int64_t nearest = 0;
  const auto gap = [&](int64_t i) { return keys[i].first ^ keys[i + 1].first; };
  for (int64_t i = 0; i + 1 < n; ++i) nearest = gap(i) < gap(nearest) ? i : nearest;
  CHECK(gap(nearest) >> (64 - 3 * gas::cuda::kDigitBits) == 0);  // Three digits are the same.
  test(n, nearest + 1, 5);
  Table<uint8_t> among(n, 0);
  std::fill(&among[0], &among[0] + n, 0);
  among[keys[nearest].second] = among[keys[nearest + 1].second] = 1;
  test(n, 1, 5, &among);
}

// Keys of one table hardly share more digits than that: later rounds get theirs from here.
void test_rounds(std::mt19937& random) {
  namespace cuda = gas::cuda;
  for (int round = 0; round < cuda::kRounds; ++round) {
    const uint64_t rest = cuda::rest(round), next_rest = cuda::rest(round + 1);
    const int64_t element = random() % 1000;
    const uint64_t key = gas::random_bits(7, element);
    const int digit = cuda::digit_of(key, round);
    CHECK(cuda::with_digit(key & ~rest, digit, round) == (key & ~next_rest));
    if (round >= 3) {  // One of a thousand keys shares all digits so far: itself.
      cuda::Search search{key & ~rest, 1, 0, {}};
      cuda::launch("", cuda::count_digits, 2, 0, int64_t{1000}, uint64_t{7},
                   static_cast<const uint8_t*>(nullptr), round, &search);
      for (int i = 0; i < cuda::kDigits; ++i) CHECK(search.count[i] == (i == digit));
    }
    // Counts of three neighbouring digits, at the end of one thread's and the start of another's.
    const int second = cuda::kDigits / 2;
    for (int64_t left = 1; left <= 9; ++left) {
      cuda::Search search{key & ~rest, left, 0, {}};
      search.count[second - 1] = 2;
      search.count[second] = 3;
      search.count[second + 4] = 4;
      cuda::launch("", cuda::find_digit, 1, 0, round, &search);
      const int found = left <= 2 ? second - 1 : left <= 5 ? second : second + 4;
      const int64_t before = left <= 2 ? 0 : left <= 5 ? 2 : 5;
      const bool all = left == 2 || left == 5 || left == 9;
      CHECK(search.low == cuda::with_digit(key & ~rest, found, round));
      CHECK(search.left == (all ? 0 : left - before));
      CHECK(search.last == (all ? search.low | next_rest : 0));
      for (const auto count : search.count) CHECK(count == 0);
    }
  }
  const cuda::Search search{0, 0, gas::random_bits(7, 3), {}};  // The key of an element itself.
  const int64_t k = 1, n = 1000;
  Table<uint8_t> drawn(n, 0);
  cuda::launch("", cuda::mark_drawn, 2, 0, n, &k, uint64_t{7}, static_cast<const uint8_t*>(nullptr),
               &search, drawn.data());
  for (int64_t i = 0; i < n; ++i) CHECK(drawn[i] == (gas::random_bits(7, i) <= search.last));
  CHECK(drawn[3] == 1 && cuda::rest(0) == ~uint64_t{0} && cuda::rest(cuda::kRounds) == 0);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  test_sizes();
  test_among();
  test_neighbours();
  test_rounds(random);
  const int64_t before = on_host::launches;
  test(0, 0, 1);
  CHECK(on_host::launches == before);
}
