// Buffer: memory that starts on a cache line, so that no vector of a row crosses two lines (measured: if
// activations do, a product takes twice as long). Also defines the cache levels to prefetch into.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace logitd {

constexpr std::size_t LINE = 64;

// The last argument of __builtin_prefetch. The first cache has few places for pending lines and fetches from
// the second by itself; prefetching into it leaves no place for other loads. Measured on two cores of a
// Zen 4, GPT-2 124M in bfloat16, whole steps of 1, 8 and 32 sequences: the second cache is 1.08, 1.28 and
// 1.12 times as fast. (Not wrapped in a function: GCC 12 drops calls of one that only prefetches.)
constexpr int SECOND_CACHE = 2;
constexpr int NEAREST_CACHE = 3;  // use only where measured to be faster

template <class T>
struct OnLines {
  using value_type = T;

  OnLines() = default;
  template <class Other>
  OnLines(const OnLines<Other>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(LINE)));
  }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t(LINE)); }

  template <class Other>
  bool operator==(const OnLines<Other>&) const { return true; }
};

template <class T>
using Buffer = std::vector<T, OnLines<T>>;

}  // namespace logitd
