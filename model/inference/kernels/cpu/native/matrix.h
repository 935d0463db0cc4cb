// Matrix: weights and the activations that meet them, as the products of linear.h and tiles.h take them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dot.h"

namespace logitd {

enum Kind : std::int32_t {
  KIND_F32 = 0,
  KIND_BF16 = 1,
  KIND_INT8 = 2,
  KIND_INT4 = 3,
  KIND_COMPRESSED = 4,   // bfloat16, as compressed.h keeps it
  KIND_INT8_STRIPS = 5,  // int8, as int8_strips.h keeps it
};

// A weight matrix (rows, width), row-major but for those in strips. `scale` (one per row) and `row_sum` (of each row's
// integers, int4's times their scales) are those of quantized ones; `bias` may be null. `strips` is where
// each strip of a compressed one begins, in lines, and where the last one ends.
struct Matrix {
  const void* weights;
  const float* bias;
  const float* scale;
  const std::int32_t* row_sum;
  const std::uint32_t* strips;
  std::int32_t kind;
  std::int32_t rows;
  std::int32_t width;
  std::int32_t reserved;
};

// Whether a matrix is in strips (strips.h), which only processors with tiles multiply.
inline bool in_strips(int kind) { return kind == KIND_COMPRESSED || kind == KIND_INT8_STRIPS; }

// Activations (count, pitch) in the format of the matrix that they meet, zeros from `width` on.
// `scale` (one per row) is that of quantized ones; `sums` (count, I4::sums(width)) are those of AVX2 for
// int4; `packed` is room for as many bytes as `values` has, for tiles, which want them in another order, and
// `are_packed` if they are there.
struct Inputs {
  const void* values;
  const float* scale;
  const std::int16_t* sums;
  std::uint8_t* packed;
  int count;
  int pitch;
  bool are_packed;
};

// Of a row of weights that are not in strips.
inline std::size_t row_bytes(const Matrix& matrix) {
  switch (matrix.kind) {
    case KIND_F32: return 4 * std::size_t(matrix.width);
    case KIND_BF16: return 2 * std::size_t(matrix.width);
    case KIND_INT8: return std::size_t(matrix.width);
    default: return std::size_t(I4::row_bytes(matrix.width));
  }
}

// Of a row of activations.
inline std::size_t row_bytes(const Matrix& matrix, const Inputs& inputs) {
  const bool bf16 = matrix.kind == KIND_BF16 || matrix.kind == KIND_COMPRESSED;
  const int item = matrix.kind == KIND_F32 ? 4 : bf16 ? 2 : 1;
  return std::size_t(item) * inputs.pitch;
}

}  // namespace logitd
