// Strip outputs: matrices in strips, and the outputs of their products.
//
// A strip is SIDE * 2 weight rows. A step of it has STEP_BYTES of each row, as two registers of SIDE rows.
// Line j of a register has the four bytes from 4 j on of each row. strips.h multiplies strips by tiles,
// int8_strips.h by vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "tiles.h"

// Processors that multiply strips.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define STRIPS
#endif

namespace logitd {

constexpr int STRIP_ROWS = 2 * SIDE;
constexpr int REGISTER_BYTES = SIDE * STEP_BYTES;
constexpr int STEP_REGISTERS = 2 * REGISTER_BYTES;  // bytes of a step of a strip, as it is multiplied

inline int strips(int rows) { return (rows + STRIP_ROWS - 1) / STRIP_ROWS; }

#if defined(STRIPS)

// An output of products: stores the values of a row, with the bias, a vector at a time, or adds them.
struct FloatRows {
  float* to;
  int pitch;
  bool add;

  void put(int row, int column, __mmask16 lanes, __m512 values) const {
    float* at = to + std::size_t(row) * pitch + column;
    if (add) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(lanes, at));
    _mm512_mask_storeu_ps(at, lanes, values);
  }
};

// The values of a strip's sums, SIDE at a time. Sums of bfloat16 are the products. Sums of integers include
// the ZERO of activations and need scales.
template <bool INTEGERS>
class StripOutputs {
 public:
  StripOutputs(const Matrix& matrix, const Inputs& inputs, int strip)
      : first_(strip * STRIP_ROWS), inputs_(inputs) {
    const __mmask32 lanes = _bzhi_u32(~0u, unsigned(std::min(STRIP_ROWS, matrix.rows - first_)));
    for (int half = 0; half < 2; half++) {
      const int n = first_ + half * SIDE;
      lanes_[half] = __mmask16(lanes >> half * SIDE);
      bias_[half] = _mm512_setzero_ps();
      if (matrix.bias) bias_[half] = _mm512_maskz_loadu_ps(lanes_[half], matrix.bias + n);
      if constexpr (INTEGERS) {
        scale_[half] = _mm512_maskz_loadu_ps(lanes_[half], matrix.scale + n);
        const __m512i sums = _mm512_maskz_loadu_epi32(lanes_[half], matrix.row_sum + n);
        shift_[half] = _mm512_mullo_epi32(sums, _mm512_set1_epi32(ZERO));
      }
    }
  }

  // Output activation row `row` to `out`; `from(half)` returns SIDE sums.
  template <class From, class Rows>
  void put(int row, const From& from, const Rows& out) const {
    for (int half = 0; half < 2; half++) {
      __m512 values;
      if constexpr (INTEGERS) {
        const __m512i sums = _mm512_sub_epi32(from(half), shift_[half]);
        const __m512 scale = _mm512_mul_ps(scale_[half], _mm512_set1_ps(inputs_.scale[row]));
        values = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
      } else {
        values = (__m512)from(half);
      }
      out.put(row, first_ + half * SIDE, lanes_[half], _mm512_add_ps(values, bias_[half]));
    }
  }

 private:
  int first_;
  const Inputs& inputs_;
  __mmask16 lanes_[2];
  __m512 bias_[2], scale_[2];
  __m512i shift_[2];
};

#endif

}  // namespace logitd
