// Linear: rows of activations times a weight matrix, for the few rows of a decode step.
//
// Up to STREAM_ROWS activation rows a weight row is read once, as one stream, and multiplied with all
// of them (measured: several weight rows side by side defeat the hardware's prefetching, and read at
// half the bandwidth). With more rows the products are what takes time: tiles of 4 x 4.
#pragma once

#include <algorithm>

#include "dot.h"
#include "pool.h"

namespace logitd {

enum Kind : std::int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_INT8 = 2 };

// A weight matrix (rows, width), row-major. `scale` (one per row) and `row_sum` (of each row's
// integers) are int8's; `bias` may be null.
struct Matrix {
  const void* weights;
  const float* bias;
  const float* scale;
  const std::int32_t* row_sum;
  std::int32_t kind;
  std::int32_t rows;
  std::int32_t width;
  std::int32_t reserved;
};

// Activations (count, pitch) in the format of the matrix that they meet, zeros from `width` on.
// `scale` (one per row) is int8's.
struct Inputs {
  const void* values;
  const float* scale;
  int count;
  int pitch;
};

constexpr int STREAM_ROWS = 8;
constexpr int TILE = 4;

template <class Format>
class Product {
 public:
  Product(const Matrix& matrix, const Inputs& inputs, float* out, int pitch, bool add)
      : matrix_(matrix), inputs_(inputs), out_(out), pitch_(pitch), add_(add) {}

  // Outputs of weight rows [first, last), for all activation rows.
  void rows(int first, int last) const {
    if (inputs_.count > STREAM_ROWS) {
      int tiled = first + (last - first) / TILE * TILE;
      for (int n = first; n < tiled; n += TILE) tiles(n);
      first = tiled;
    }
    for (int n = first; n < last; n++)
      for (int m = 0; m < inputs_.count; m += STREAM_ROWS)
        stream(n, m, std::min(STREAM_ROWS, inputs_.count - m));
  }

 private:
  using Weight = typename Format::Weight;
  using Input = typename Format::Input;
  using Acc = typename Format::Acc;

  const Weight* weight(int n) const {
    return static_cast<const Weight*>(matrix_.weights) + std::size_t(n) * matrix_.width;
  }

  const Input* input(int m) const {
    return static_cast<const Input*>(inputs_.values) + std::size_t(m) * inputs_.pitch;
  }

  void tiles(int n) const {
    int m = 0;
    for (; m + TILE <= inputs_.count; m += TILE) tile<TILE>(n, m);
    switch (inputs_.count - m) {
      case 3: return tile<3>(n, m);
      case 2: return tile<2>(n, m);
      case 1: return tile<1>(n, m);
    }
  }

  template <int MR>
  void tile(int n, int m) const {
    Acc acc[LANES] = {};
    dots<Format, TILE, MR>(weight(n), matrix_.width, input(m), inputs_.pitch, matrix_.width, acc);
    Acc summed = sums(acc);
    for (int r = 0; r < TILE; r++)
      for (int i = 0; i < MR; i++) put(n + r, m + i, summed[r * MR + i]);
  }

  void stream(int n, int m, int count) const {
    switch (count) {
      case 1: return stream_rows<1>(n, m);
      case 2: return stream_rows<2>(n, m);
      case 3: return stream_rows<3>(n, m);
      case 4: return stream_rows<4>(n, m);
      case 5: return stream_rows<5>(n, m);
      case 6: return stream_rows<6>(n, m);
      case 7: return stream_rows<7>(n, m);
      case 8: return stream_rows<8>(n, m);
    }
  }

  template <int MR>
  void stream_rows(int n, int m) const {
    Acc acc[LANES] = {};
    dots<Format, 1, MR>(weight(n), matrix_.width, input(m), inputs_.pitch, matrix_.width, acc);
    Acc summed = sums(acc);
    for (int i = 0; i < MR; i++) put(n, m + i, summed[i]);
  }

  // float accumulators are the product; int8's are of shifted activations, in integers.
  float value(int, int, float summed) const { return summed; }

  float value(int n, int m, std::int32_t summed) const {
    return float(summed - 128 * matrix_.row_sum[n]) * (matrix_.scale[n] * inputs_.scale[m]);
  }

  template <class Summed>
  void put(int n, int m, Summed summed) const {
    float result = value(n, m, summed);
    if (matrix_.bias) result += matrix_.bias[n];
    float* to = out_ + std::size_t(m) * pitch_ + n;
    *to = add_ ? *to + result : result;
  }

  const Matrix& matrix_;
  const Inputs& inputs_;
  float* out_;
  int pitch_;
  bool add_;
};

// out (count, rows) = inputs times matrix, or added to what is there; `pitch` floats from one row of
// `out` to the next.
inline void linear(Pool& pool, const Matrix& matrix, const Inputs& inputs, float* out, int pitch,
                   bool add) {
  // Pieces of some 32 KB of weights, so that the threads end together; whole tiles.
  int row_bytes = matrix.width * (matrix.kind == KIND_F32 ? 4 : matrix.kind == KIND_BF16 ? 2 : 1);
  int per_piece = std::max(TILE, 32768 / row_bytes / TILE * TILE);
  int pieces = (matrix.rows + per_piece - 1) / per_piece;
  pool.loop(pieces, [&](int piece) {
    int first = piece * per_piece, last = std::min(first + per_piece, int(matrix.rows));
    switch (matrix.kind) {
      case KIND_F32: return Product<F32>(matrix, inputs, out, pitch, add).rows(first, last);
      case KIND_BF16: return Product<B16>(matrix, inputs, out, pitch, add).rows(first, last);
      case KIND_INT8: return Product<I8>(matrix, inputs, out, pitch, add).rows(first, last);
    }
  });
}

}  // namespace logitd
