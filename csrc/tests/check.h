// The little that the C++ tests need: CHECK stops the program and says where.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

#define CHECK_THROWS(expression, type)            \
  do {                                            \
    bool thrown = false;                          \
    try {                                         \
      expression;                                 \
    } catch (const type&) {                       \
      thrown = true;                              \
    }                                             \
    CHECK(thrown&& #expression " throws " #type); \
  } while (0)
