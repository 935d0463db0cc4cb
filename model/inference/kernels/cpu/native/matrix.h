// Matrix: weights, and the activations that meet them, for the products of linear.h and tiles.h.
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
  KIND_COMPRESSED = 4,   // bfloat16 in the form of compressed.h
  KIND_INT8_STRIPS = 5,  // int8 in the form of int8_strips.h
};

// A weight matrix (rows, width), row-major or in strips. Quantized ones have a `scale` per row and a
// `row_sum` of each row's integers, in int4 times their scales. `bias` may be null. `strips` holds the line
// at which each strip of a compressed matrix begins, and the end of the last one.
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

// True for matrices in strips (strip_outputs.h).
inline bool in_strips(int kind) { return kind == KIND_COMPRESSED || kind == KIND_INT8_STRIPS; }

// Activations (count, pitch) in the format of the matrix that they meet, zeros from `width` on. Quantized
// ones have a `scale` per row, and for int4 on AVX2 `sums` (count, I4::sums(width)). `packed` has the size of
// `values` and holds them in the order of tiles if `are_packed`.
struct Inputs {
  const void* values;
  const float* scale;
  const std::int16_t* sums;
  std::uint8_t* packed;
  int count;
  int pitch;
  bool are_packed;
};

// Bytes of a row of weights that are not in strips.
inline std::size_t row_bytes(const Matrix& matrix) {
  switch (matrix.kind) {
    case KIND_F32: return 4 * std::size_t(matrix.width);
    case KIND_BF16: return 2 * std::size_t(matrix.width);
    case KIND_INT8: return std::size_t(matrix.width);
    default: return std::size_t(I4::row_bytes(matrix.width));
  }
}

// Bytes of a row of activations.
inline std::size_t row_bytes(const Matrix& matrix, const Inputs& inputs) {
  const bool bf16 = matrix.kind == KIND_BF16 || matrix.kind == KIND_COMPRESSED;
  const int item = matrix.kind == KIND_F32 ? 4 : bf16 ? 2 : 1;
  return std::size_t(item) * inputs.pitch;
}

}  // namespace logitd
