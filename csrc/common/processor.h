// Code that is compiled several times, for processors with vectors of different widths.
#pragma once

namespace gas {

enum class Vectors { kAvx2, kAvx512 };

// Calls body(), compiled for any processor and for those with such vectors, chosen when it is
// called. What is not GAS_INLINED or GAS_INLINE, from the body on, may stay compiled for any.
template <Vectors Most = Vectors::kAvx2, typename Body>
void on_processor(const Body& body);

// Implementation -------------------------------------------------------------------------------

template <typename Body>
static __attribute__((noinline)) void on_any(const Body& body) {
  body();
}

#if defined(__x86_64__) && defined(__GNUC__)

template <typename Body>
static __attribute__((target("avx2,bmi,bmi2,f16c,fma,lzcnt,movbe"), noinline)) void on_avx2(
    const Body& body) {
  body();
}
template <typename Body>
static
    __attribute__((target("avx2,bmi,bmi2,f16c,fma,lzcnt,movbe,avx512f,avx512bw,avx512cd,avx512dq,"
                          "avx512vl"),
                   noinline)) void
    on_avx512(const Body& body) {
  body();
}

template <Vectors Most, typename Body>
void on_processor(const Body& body) {
  // The others that are listed above came with these, or before them.
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi2");
  if constexpr (Most == Vectors::kAvx512) {
    static const bool avx512 =
        avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) return on_avx512(body);
  }
  avx2 ? on_avx2(body) : on_any(body);
}

#else

template <Vectors, typename Body>
void on_processor(const Body& body) {
  on_any(body);
}

#endif

}  // namespace gas
