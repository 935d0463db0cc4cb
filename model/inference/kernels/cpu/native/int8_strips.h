// Int8 strips: int8 weights in strips (strip_outputs.h), stored as they are multiplied.
//
// A strip is two registers for each step of 64 columns: line j of a register has columns 4 j to 4 j + 3 of
// each of SIDE rows, zeros beyond the end of the matrix. Sums are of integers, so they have the bits of every
// other form of int8. With VNNI a line meets four columns of an activation row, repeated, and every lane is
// the sum of another weight row: nothing has to be added up at the end of a row. Measured on one core of a
// Zen 4, 256 rows of the matrices of GPT-2 124M: 95 % of the products that the processor computes between
// registers in that time; weights row after row reached 63 %.
#pragma once

#include <cstring>

#include "dot.h"
#include "matrix.h"
#include "pool.h"
#include "strip_outputs.h"
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
  constexpr int COLUMNS = 4;  // of a row in a line
  std::uint8_t* to = strip + row / SIDE * REGISTER_BYTES + row % SIDE * COLUMNS;
  const auto at = [&](int column) {
    return to + column / I8::STEP * STEP_REGISTERS + column % I8::STEP / COLUMNS * STEP_BYTES;
  };
  int column = 0;
  for (; column + COLUMNS <= width; column += COLUMNS) std::memcpy(at(column), weights + column, COLUMNS);
  if (column < width) std::memcpy(at(column), weights + column, width - column);
}

#if defined(STRIPS)

// Products of strips with activations by vectors.
template <class Rows>
class VectorProduct {
 public:
  VectorProduct(const Matrix& matrix, const Inputs& inputs, const Rows& out)
      : matrix_(matrix), inputs_(inputs), stride_(row_bytes(matrix, inputs)), out_(out) {}

  // Outputs of a strip for all activation rows, TOGETHER at a time. The first ones read the strip from memory.
  // All of them share the prefetching of the next strip.
  void strip(int index) const {
    const Int8Strip strip(matrix_, index);
    const int groups = (inputs_.count + TOGETHER - 1) / TOGETHER;
    Ahead ahead{groups == 1 ? strip.next() + AHEAD : strip.end(), (2 * SIDE + groups - 1) / groups};
    const StripOutputs<true> outputs(matrix_, inputs_, index);
    int row = 0;
    for (; row + TOGETHER <= inputs_.count; row += TOGETHER) rows<TOGETHER>(strip.next(), row, outputs, ahead);
    with_constant<TOGETHER - 1>(inputs_.count - row,
                                [&](auto count) { rows<count>(strip.next(), row, outputs, ahead); });
  }

 private:
  static constexpr int TOGETHER = 8;  // rows; two sums of each stay in registers
  static constexpr int AHEAD = 4096;  // bytes, for a few rows

  struct Ahead {
    const std::uint8_t* at;
    int lines;  // with each step
  };

  template <int MR>
  void rows(const std::uint8_t* weights, int row, const StripOutputs<true>& outputs, Ahead& ahead) const {
    const std::uint8_t* inputs = static_cast<const std::uint8_t*>(inputs_.values) + row * stride_;
    const std::uint8_t* at = ahead.at;
    const int lines = ahead.lines;
    __m512i sum[MR][2] = {};
    for (int step = Int8Strip::steps(matrix_.width); step > 0; step--) {
#pragma GCC unroll 16
      for (int line = 0; line < SIDE; line++) {
        if (2 * line < lines) {
          __builtin_prefetch(at, 0, SECOND_CACHE);
          __builtin_prefetch(at + LINE, 0, SECOND_CACHE);
          at += 2 * LINE;
        }
        const __m512i upper = _mm512_loadu_si512(weights + line * STEP_BYTES);
        const __m512i lower = _mm512_loadu_si512(weights + REGISTER_BYTES + line * STEP_BYTES);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          std::int32_t four;
          std::memcpy(&four, inputs + m * stride_ + line * 4, sizeof four);
          const __m512i input = _mm512_set1_epi32(four);
          sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], input, upper);
          sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], input, lower);
        }
      }
      weights += STEP_REGISTERS, inputs += STEP_BYTES;
    }
    ahead.at = at;
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) outputs.put(row + m, [&](int half) { return sum[m][half]; }, out_);
  }

  const Matrix& matrix_;
  const Inputs& inputs_;
  std::size_t stride_;  // bytes from one activation row to the next
  Rows out_;
};

// Inputs times a matrix in strips of int8, to an output of strip_outputs.h.
template <class Rows>
void int8_strip_products(Pool& pool, const Matrix& matrix, const Inputs& inputs, const Rows& out) {
#if defined(TILES)
  // Tiles are slower than memory for fewer rows: measured on two cores of a Xeon, 768 columns, vectors are 1.3
  // and 1.07 times as fast for 1 row and for 4.
  if (has_tiles() && inputs.count > 4) return strip_products<Int8Strip>(pool, matrix, inputs, out);
#endif
  const VectorProduct<Rows> product(matrix, inputs, out);
  pool.lanes(strips(matrix.rows), [&](int strip) { product.strip(strip); });
}

#endif

}  // namespace logitd
