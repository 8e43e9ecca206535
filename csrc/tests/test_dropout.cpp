#include "operators/dropout.h"

#include <cmath>
#include <vector>

#include "check.h"
#include "common/random.h"

namespace {

std::vector<float> drop(int64_t n, double p, uint64_t seed, int threads) {
  const std::vector<float> x(n, 1.0f);
  std::vector<float> out(n, -1.0f);
  const auto threshold = static_cast<uint64_t>(p * 4294967296.0);
  gas::dropout(x.data(), n, threshold, static_cast<float>(1 / (1 - p)), seed, out.data(), threads);
  return out;
}

}  // namespace

int main() {
  const int64_t n = 300001;
  for (const double p : {0.1, 0.5, 0.9}) {
    const std::vector<float> out = drop(n, p, 42, 1);
    CHECK(out == drop(n, p, 42, 3));  // Threads don't matter ...
    CHECK(out != drop(n, p, 43, 1));  // ... the seed does.
    const auto threshold = static_cast<uint64_t>(p * 4294967296.0);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool keep = gas::is_kept(42, i, threshold);
      CHECK(out[i] == (keep ? static_cast<float>(1 / (1 - p)) : 0.0f));
      kept += keep;
    }
    CHECK(std::abs(kept - n * (1 - p)) < 5 * std::sqrt(n * p * (1 - p)));
  }
  for (const float value : drop(99, 1.0, 1, 1)) CHECK(value != value || value == 0.0f);
  for (const float value : drop(99, 0.0, 1, 1)) CHECK(value == 1.0f);
  CHECK(drop(0, 0.5, 1, 1).empty());
  CHECK(drop(1, 0.5, 1, 1)[0] == drop(2, 0.5, 1, 1)[0]);
}
