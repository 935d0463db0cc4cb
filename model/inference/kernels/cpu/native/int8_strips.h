// Int8 strips: int8 weights in the layout of the registers that tiles multiply, for strips.h.
//
// A strip is two registers for each step of 64 columns: line j of a register has columns 4 j to 4 j + 3 of
// each of SIDE rows, zeros beyond the end of the matrix. Sums are of integers, so they have the bits of every
// other form of int8.
#pragma once

#include <cstring>

#include "dot.h"
#include "matrix.h"
#include "strips.h"

namespace logitd {

constexpr int int8_steps(int width) { return (width + I8::STEP - 1) / I8::STEP; }
constexpr std::size_t int8_strip_bytes(int width) { return std::size_t(int8_steps(width)) * STEP_REGISTERS; }

// `Strip` of strips.h.
class Int8Strip {
 public:
  static constexpr bool INTEGERS = true, IN_PLACE = true;
  static constexpr int PIECE = 16, KEPT_BYTES = STEP_REGISTERS;

  static int steps(int width) { return int8_steps(width); }

  Int8Strip(const Matrix& matrix, int strip)
      : next_(static_cast<const std::uint8_t*>(matrix.weights) + strip * int8_strip_bytes(matrix.width)),
        end_(next_ + int8_strip_bytes(matrix.width)) {}

  const std::uint8_t* end() const { return end_; }
  const std::uint8_t* next() const { return next_; }
  void skip(int steps) { next_ += std::size_t(steps) * STEP_REGISTERS; }

 private:
  const std::uint8_t *next_, *end_;
};

// Write `width` weights to row `row` of a strip of zeros.
inline void put_strip_row(const std::int8_t* weights, int width, int row, std::uint8_t* strip) {
  constexpr int TOGETHER = 4;  // columns of a row in a line
  std::uint8_t* to = strip + row / SIDE * REGISTER_BYTES + row % SIDE * TOGETHER;
  const auto at = [&](int column) {
    return to + column / I8::STEP * STEP_REGISTERS + column % I8::STEP / TOGETHER * STEP_BYTES;
  };
  int column = 0;
  for (; column + TOGETHER <= width; column += TOGETHER) std::memcpy(at(column), weights + column, TOGETHER);
  if (column < width) std::memcpy(at(column), weights + column, width - column);
}

}  // namespace logitd
