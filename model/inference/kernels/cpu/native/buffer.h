// Buffer: memory that begins on a cache line, so that no vector of a row lies across two (measured:
// a product whose activations do takes twice as long).
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace logitd {

constexpr std::size_t LINE = 64;

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
