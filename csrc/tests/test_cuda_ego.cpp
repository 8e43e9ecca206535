// The CUDA kernels of csrc/augment/ego.cu, run on the CPU, against the
// functions for the CPU.
#include "augment/ego.cu"

#include "cuda_data.h"

namespace {

Table<double> whole_numbers(int64_t n, int64_t shift, int64_t most, std::mt19937& random) {
  Table<double> table(n, shift);
  for (int64_t i = 0; i < n; ++i) table[i] = static_cast<double>(random() % (most + 1));
  return table;
}

// `shared`: of entries in another order, and two of them decided by one byte.
void test(const Graph& g, bool shared, int64_t shift, std::mt19937& random) {
  const auto x = whole_numbers(2 * g.num_rows, shift, 1 << 30, random);
  const auto loops = whole_numbers(g.num_rows, shift, 3, random);
  std::vector<int32_t> unit(g.t_entry);
  for (int32_t& u : unit) u /= 2;
  const int64_t units = shared ? (g.entries() + 1) / 2 : g.entries();
  Table<uint8_t> kept(units, shift);
  for (int64_t i = 0; i < units; ++i) kept[i] = random() % 2;

  gas::Sparse m = shared ? g.backward() : g.forward();
  if (shared) m.entry = unit.data();
  Table<double> wanted(2 * g.num_rows, 0);
  gas::ego_hop(m, kept.data(), loops.data(), x.data(), wanted.data(), 1);
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Table<double> out(2 * g.num_rows, shift);
    gas::cuda::ego_hop(m, kept.data(), loops.data(), x.data(), out.data(), stream);
    return out;
  });
  CHECK(found == wanted);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const std::vector<int64_t> degrees{0, 2, 200, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  for (const bool shared : {false, true}) {
    for (const int64_t shift : {0, 1}) {  // Rows that are aligned to vectors, or not.
      test(make_graph(37, 37, degrees, random), shared, shift, random);
      test(make_graph(3, 3, {9000, 0, 40}, random), shared, shift, random);  // A row of each block.
      test(make_graph(700, 700, {0}, random), shared, shift, random);        // No entries at all.
      test(make_graph(1, 1, {1}, random), shared, shift, random);
    }
  }
  const int64_t before = on_host::launches;
  test(make_graph(0, 0, degrees, random), false, 0, random);
  CHECK(on_host::launches == before);
}
