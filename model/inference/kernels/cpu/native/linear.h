// Linear: rows of activations times a weight matrix, for the few rows of a decode step and the many rows of
// a prompt.
//
// A few activation rows meet one weight row after the other, read as one stream. More of them, or rows that
// do not fit into the nearest cache together with the stream, are multiplied in tiles of 4 x 4 products,
// which use each load four times. The weight rows of the next tiles are prefetched, since several rows in
// parallel arrive at half the speed of memory. Measured on two cores of a Zen 5 with weights of 768 columns
// in bfloat16, GB/s of weights and GFLOP/s: 1 row 43 and 43, 8 rows 41 and 325 (one row after the other: 22
// and 177), 32 rows 18 and 590.
//
// The many rows of a prompt meet an item of weights that stays in the cache. Measured there on a slower day,
// 256 rows, 768 columns, GFLOP/s: bfloat16 415, float32 180; oneDNN's bfloat16 400, MKL's float32 165. All
// three ways add up a product in the same order.
//
// With AMX most products are those of strips.h or tiles.h, depending on the form of the weights.
#pragma once

#include <algorithm>
#include <type_traits>

#include "compressed.h"
#include "dot.h"
#include "int8_strips.h"
#include "matrix.h"
#include "pool.h"
#include "strips.h"
#include "tiles.h"

namespace logitd {

constexpr int STREAM_ROWS = 8;
constexpr std::size_t STREAM_BYTES = 6144;  // limit of the activations
constexpr int TILE = 4;
constexpr int LARGE_TILE = 5;
constexpr std::size_t LARGE_TILE_BYTES = 2048;  // of a weight row, at least
constexpr int TALL_ROWS = 32;  // more activation rows than this meet weights in the cache

// True if the many rows of a prompt meet a matrix in LARGE_TILE x LARGE_TILE products. Larger tiles load less
// per product, but cost more at the end of a row.
inline bool takes_large_tiles([[maybe_unused]] const Matrix& matrix) {
#if defined(__AVX512F__)
  return (matrix.kind == KIND_F32 || matrix.kind == KIND_BF16) && row_bytes(matrix) >= LARGE_TILE_BYTES;
#else
  return false;
#endif
}

// Weight rows that many activation rows meet together.
inline int tall_item(const Matrix& matrix) {
  return matrix.kind == KIND_INT4 ? LANES : takes_large_tiles(matrix) ? 2 * LARGE_TILE : 4 * TILE;
}

template <class Format>
class Product {
 public:
  Product(const Matrix& matrix, const Inputs& inputs, float* out, int pitch, bool add)
      : matrix_(matrix), inputs_(inputs), out_(out), pitch_(pitch), add_(add) {}

  // Outputs of weight rows [first, last), for all activation rows.
  void rows(int first, int last) const {
    if constexpr (std::is_same_v<Format, I4>) unpacked(first, last);
    else as_they_are(first, last);
  }

 private:
  using Weight = typename Format::Weight;
  using Input = typename Format::Input;
  using Acc = typename Format::Acc;
  using Sum = typename Format::Sum;

  // Formats whose weights are multiplied as they are in memory.
  void as_they_are(int first, int last) const {
    if (inputs_.count > TALL_ROWS) return tall(first, last);
    std::size_t taken = sizeof(Input) * inputs_.count * inputs_.pitch;
    if (inputs_.count > STREAM_ROWS || taken > STREAM_BYTES) return tiles(first, last);
    with_constant<STREAM_ROWS>(inputs_.count, [&](auto rows) { streams<rows, 1>(first, last, 0); });
  }

  // Accumulators are summed LANES at a time.
  static constexpr int whole(int accumulators) {
    return (accumulators + LANES - 1) / LANES * LANES;
  }

  const Weight* weight(int n) const {
    std::size_t stride = matrix_.width;
    if constexpr (std::is_same_v<Format, I4>) stride = I4::row_bytes(matrix_.width);
    return static_cast<const Weight*>(matrix_.weights) + n * stride;
  }

  const Input* input(int m) const {
    return static_cast<const Input*>(inputs_.values) + std::size_t(m) * inputs_.pitch;
  }

  // Formats whose weights are unpacked before use, for STREAM_ROWS activation rows at a time. The first rows
  // read them from memory, the others from the cache.
  void unpacked(int first, int last) const {
    int m = 0;
    for (; m + STREAM_ROWS <= inputs_.count; m += STREAM_ROWS) {
      if (m) streams<STREAM_ROWS, 0>(first, last, m);
      else streams<STREAM_ROWS, 1>(first, last, m);
    }
    with_constant<STREAM_ROWS - 1>(inputs_.count - m,
                                   [&](auto rows) { streams<rows, 1>(first, last, m); });
  }

  // One weight row after the other, as one stream. LANES accumulators are summed together.
  template <int MR, int AHEAD>
  void streams(int first, int last, int m) const {
    // LANES rows of unpacked weights, so that the work after the products is done for as many at once.
    constexpr int GROUP = std::is_same_v<Format, I4> ? LANES : LANES / MR;
    int n = first;
    for (; n + GROUP <= last; n += GROUP) stream<GROUP, MR, AHEAD>(n, m);
    for (; n < last; n++) stream<1, MR, AHEAD>(n, m);
  }

  template <int GROUP, int MR, int AHEAD>
  void stream(int n, int m) const {
    Acc acc[whole(GROUP * MR)];
    for (int i = GROUP * MR; i < whole(GROUP * MR); i++) acc[i] = Acc{};
    for (int r = 0; r < GROUP; r++) {
      const Weight* row = weight(n + r);
      if constexpr (std::is_same_v<Format, I4>)
        dots4<MR, AHEAD>(row, input(m), inputs_.pitch,
                         inputs_.sums + std::size_t(m) * I4::sums(matrix_.width), matrix_.width,
                         acc + r, GROUP);
      else
        dots<Format, 1, MR, AHEAD>(row, 0, input(m), inputs_.pitch, matrix_.width,
                                   reinterpret_cast<const char*>(row) + PREFETCH_BYTES, 0, acc + r,
                                   GROUP);
    }
    put<GROUP, MR>(n, m, acc);
  }

  void tiles(int first, int last) const {
    int n = first;
    for (; n + TILE <= last; n += TILE) tiles<TILE>(n);
    for (; n < last; n++) tiles<1>(n);
  }

  // Each tile prefetches one of the next weight rows.
  template <int NR>
  void tiles(int n) const {
    int m = 0;
    const int tiles = (inputs_.count + TILE - 1) / TILE;
    for (; m + TILE <= inputs_.count; m += TILE) tile<NR, TILE>(n, m, tiles);
    with_constant<TILE - 1>(inputs_.count - m, [&](auto rows) { tile<NR, rows>(n, m, tiles); });
  }

  template <int NR, int MR>
  void tile(int n, int m, int tiles) const {
    switch (tiles) {
      case 1: return tile<NR, MR, TILE>(n, m, tiles);
      case 2:
      case 3: return tile<NR, MR, TILE / 2>(n, m, tiles);
      default: return tile<NR, MR, 1>(n, m, tiles);
    }
  }

  // This tile prefetches AHEAD of the weight rows after the next ones: every `tiles`-th, starting
  // with its own.
  template <int NR, int MR, int AHEAD>
  void tile(int n, int m, int tiles) const {
    Acc acc[whole(NR * MR)];
    for (int i = NR * MR; i < whole(NR * MR); i++) acc[i] = Acc{};
    const char* ahead = reinterpret_cast<const char*>(weight(n + 2 * NR + m / TILE));
    dots<Format, NR, MR, AHEAD>(weight(n), matrix_.width, input(m), inputs_.pitch, matrix_.width,
                                ahead, sizeof(Weight) * matrix_.width * tiles, acc, NR);
    put<NR, MR>(n, m, acc);
  }

  // A few activation rows at a time over all of [first, last), which stays in the cache.
  void tall(int first, int last) const {
    if constexpr (std::is_same_v<Sum, float>)
      if (takes_large_tiles(matrix_)) return tall<LARGE_TILE>(first, last);
    tall<TILE>(first, last);
  }

  // Meanwhile the weights of the next item and the lines of the next outputs arrive.
  template <int SIDE>
  void tall(int first, int last) const {
    const char* ahead = reinterpret_cast<const char*>(weight(last));
    const int lines = int((ahead - reinterpret_cast<const char*>(weight(first))) / LINE);
    const int share = (lines * SIDE + inputs_.count - 1) / inputs_.count;
    int m = 0;
    for (; m + SIDE <= inputs_.count; m += SIDE) {
      for (int line = 0; line < share; line++, ahead += LINE) __builtin_prefetch(ahead, 0, SECOND_CACHE);
      for (int i = m + SIDE; i < m + 2 * SIDE; i++)
        for (int n = first; n < last; n += LANES)
          __builtin_prefetch(out_ + std::size_t(i) * pitch_ + n, 1, NEAREST_CACHE);
      across<SIDE, SIDE>(first, last, m);
    }
    for (; m < inputs_.count; m++) across<SIDE, 1>(first, last, m);
  }

  template <int NR, int MR>
  void across(int first, int last, int m) const {
    int n = first;
    for (; n + NR <= last; n += NR) tile<NR, MR, 0>(n, m, 0);
    for (; n < last; n++) tile<1, MR, 0>(n, m, 0);
  }

  // acc[i * NR + r] is the product of weight row n + r with activation row m + i.
  template <int NR, int MR>
  [[gnu::always_inline]] void put(int n, int m, const Acc* acc) const {
    Sum summed[whole(NR * MR)];
    for (int i = 0; i < whole(NR * MR); i += LANES) write(summed + i, sums(acc + i));
    float bias[NR] = {};
    if (matrix_.bias) std::memcpy(bias, matrix_.bias + n, sizeof bias);
    for (int i = 0; i < MR; i++) {
      float result[NR], *to = out_ + std::size_t(m + i) * pitch_ + n;
      values<NR>(n, m + i, summed + i * NR, result);
      for (int r = 0; r < NR; r++) result[r] += bias[r];
      if (add_) {
        float old[NR];
        std::memcpy(old, to, sizeof old);
        for (int r = 0; r < NR; r++) result[r] += old[r];
      }
      std::memcpy(to, result, sizeof result);
    }
  }

  // The value of a product. Sums of integers still include the ZERO of the activations.
  template <int NR>
  void values(int, int, const float* summed, float* result) const {
    std::memcpy(result, summed, NR * sizeof(float));
  }

  template <int NR>
  void values(int n, int m, const std::int32_t* summed, float* result) const {
    for (int r = 0; r < NR; r++)
      result[r] = float(summed[r] - ZERO * matrix_.row_sum[n + r]) *
                  (matrix_.scale[n + r] * inputs_.scale[m]);
  }

  const Matrix& matrix_;
  const Inputs& inputs_;
  float* out_;
  int pitch_;
  bool add_;
};

// out (count, rows) = inputs times matrix, or += if `add`. `pitch` is the floats between rows of `out`.
inline void linear(Pool& pool, const Matrix& matrix, const Inputs& inputs, float* out, int pitch,
                   bool add) {
#if defined(STRIPS)
  const FloatRows rows = {out, pitch, add};
  if (matrix.kind == KIND_INT8_STRIPS) return int8_strip_products(pool, matrix, inputs, rows);
#endif
#if defined(TILES)
  if (matrix.kind == KIND_COMPRESSED) return strip_products<CompressedStrip>(pool, matrix, inputs, rows);
  if (takes_tiles(matrix, inputs.count)) return tile_linear(pool, matrix, inputs, out, pitch, add);
#endif
  // Items of about 32 KB of weights, so that the threads end together; for many rows items that stay in the
  // cache. Whole tiles. Lanes are a tenth to a fifth faster than taking every other item (measured).
  const int tile = matrix.kind == KIND_INT4 ? LANES : TILE;
  int per_item = std::max(tile, 32768 / int(row_bytes(matrix)) / tile * tile);
  if (inputs.count > TALL_ROWS) per_item = tall_item(matrix);
  int items = (matrix.rows + per_item - 1) / per_item;
  pool.lanes(items, [&](int item) {
    int first = item * per_item, last = std::min(first + per_item, int(matrix.rows));
    switch (matrix.kind) {
      case KIND_F32: return Product<F32>(matrix, inputs, out, pitch, add).rows(first, last);
      case KIND_BF16: return Product<B16>(matrix, inputs, out, pitch, add).rows(first, last);
      case KIND_INT8: return Product<I8>(matrix, inputs, out, pitch, add).rows(first, last);
      case KIND_INT4: return Product<I4>(matrix, inputs, out, pitch, add).rows(first, last);
      default: return;  // strips, which need tiles
    }
  });
}

}  // namespace logitd
