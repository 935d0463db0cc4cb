// Tiles: products in AMX's registers, which hold 16 rows of 64 bytes (Intel, from Sapphire Rapids on).
//
// One instruction multiplies 16 weight rows by 16 activation rows over a step of 64 bytes: 32 elements in
// bfloat16, 64 in int8. Here weights stay row after row in memory, and activations are rearranged
// (`pack_rows`) into the layout of the instruction's second operand; strips.h does the opposite. Integers are
// exact, so int4 has the bits of dot.h, and the faster one is used. int8 outside strips uses dot.h.
// bfloat16 has another order of additions: the even elements of a step, the odd ones, then both are added to
// the sum. So all its products are tiles, even for a single row, and a row's bits do not depend on the number
// of rows.
//
// Source of the order: Intel's Software Developer's Manual, TDPBF16PS.
#pragma once

#include <algorithm>
#include <array>

#include "buffer.h"
#include "dot.h"
#include "matrix.h"
#include "pool.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace logitd {

constexpr int SIDE = 16;  // rows of a register, and its columns of four bytes
constexpr int STEP_BYTES = 64;
constexpr int PIECE_STEPS = 8;  // of 32 weight rows fit into the nearest cache with their activations
constexpr int WHOLE_STEPS = 48;  // longer rows are not split into pieces: sums would be stored too often

// True if this process may use the registers. Linux grants them on request, because they add 8 KB to the
// state of a thread.
inline bool has_tiles() {
#if defined(TILES)
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return permitted;
#else
  return false;
#endif
}

#if defined(TILES)

// Transpose sixteen vectors: lane j of vector i becomes lane i of vector j.
[[gnu::always_inline]] inline void transpose(__m512i* v) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Rearrange steps [first, last) of up to SIDE activation rows, `pitch` bytes apart, into the second operand:
// a step is SIDE rows of four bytes of each activation row. A single row has this layout already.
template <bool WHOLE>
inline void pack_rows(const std::uint8_t* rows, std::size_t pitch, int some, int first, int last,
                      std::uint8_t* to) {
  const int count = WHOLE ? SIDE : some;
  const __mmask16 columns = __mmask16((1u << count) - 1);
  for (int step = first; step < last; step++) {
    __m512i square[SIDE];
#pragma GCC unroll 16
    for (int m = 0; m < SIDE; m++)
      square[m] = m < count ? _mm512_loadu_si512(rows + m * pitch + step * STEP_BYTES) : __m512i{};
    transpose(square);
    std::uint8_t* at = to + std::size_t(step) * SIDE * 4 * count;
#pragma GCC unroll 16
    for (int k = 0; k < SIDE; k++) {
      if (WHOLE) _mm512_storeu_si512(at + k * STEP_BYTES, square[k]);
      else _mm512_mask_storeu_epi32(at + k * 4 * count, columns, square[k]);
    }
  }
}

inline void pack_rows(const std::uint8_t* rows, std::size_t pitch, int count, int first, int last,
                      std::uint8_t* to) {
  if (count == SIDE) pack_rows<true>(rows, pitch, count, first, last, to);
  else pack_rows<false>(rows, pitch, count, first, last, to);
}

// The shapes of the registers: four sums, two for weights, two for activations.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  TileConfig() = default;

  // The weight rows and the activation rows of both halves of a product.
  TileConfig(const int* weight_rows, const int* input_rows) {
    for (int w = 0; w < 2; w++) put(4 + w, weight_rows[w], STEP_BYTES);
    for (int m = 0; m < 2; m++) put(6 + m, SIDE, 4 * input_rows[m]);
    for (int w = 0; w < 2; w++)
      for (int m = 0; m < 2; m++) put(2 * w + m, weight_rows[w], 4 * input_rows[m]);
  }

  void put(int tile, int count, int bytes) {
    if (count == 0 || bytes == 0) return;
    rows[tile] = std::uint8_t(count), row_bytes[tile] = std::uint16_t(bytes);
  }
};

// Memory to prefetch during other work: a number of lines with each step.
struct Ahead {
  const std::uint8_t* at;
  int lines;
};

// The products of one pass through the registers: of the weight rows of half w with the activation rows of
// half m over some steps. Weight rows are `stride` bytes apart, their steps `apart` bytes. Inputs are packed:
// a step is SIDE rows of four bytes of each of `input_rows`. sums[2 * w + m] (SIDE, input rows) receives the
// products, or adds them if `begun`.
struct Square {
  const std::uint8_t *weights[2], *inputs[2];
  std::size_t stride, apart;
  int input_rows[2];
  int steps;
  bool begun;
  std::int32_t (*sums)[SIDE * SIDE];
};

template <bool INTEGERS, int W, int M>
[[gnu::always_inline]] inline void multiply_tiles(const Square& square, Ahead ahead) {
  const std::uint8_t *w0 = square.weights[0], *w1 = square.weights[W - 1];
  const std::uint8_t *m0 = square.inputs[0], *m1 = square.inputs[M - 1];
  const int pitch0 = 4 * square.input_rows[0], pitch1 = 4 * square.input_rows[M - 1];
  auto* sums = square.sums;
  if (square.begun) {
    _tile_loadd(0, sums[0], pitch0);
    if constexpr (M > 1) _tile_loadd(1, sums[1], pitch1);
    if constexpr (W > 1) _tile_loadd(2, sums[2], pitch0);
    if constexpr (W > 1 && M > 1) _tile_loadd(3, sums[3], pitch1);
  } else {
    _tile_zero(0);
    if constexpr (M > 1) _tile_zero(1);
    if constexpr (W > 1) _tile_zero(2);
    if constexpr (W > 1 && M > 1) _tile_zero(3);
  }
#define PRODUCT(sum, weight, input)                         \
  if constexpr (INTEGERS) _tile_dpbsud(sum, weight, input); \
  else _tile_dpbf16ps(sum, weight, input)
  for (int step = 0; step < square.steps; step++) {
    for (int line = 0; line < ahead.lines; line++, ahead.at += LINE)
      __builtin_prefetch(ahead.at, 0, SECOND_CACHE);
    _tile_loadd(4, w0, square.stride);
    _tile_loadd(6, m0, pitch0);
    PRODUCT(0, 4, 6);
    if constexpr (M > 1) {
      _tile_loadd(7, m1, pitch1);
      PRODUCT(1, 4, 7);
    }
    if constexpr (W > 1) {
      _tile_loadd(5, w1, square.stride);
      PRODUCT(2, 5, 6);
      if constexpr (M > 1) { PRODUCT(3, 5, 7); }
    }
    w0 += square.apart, w1 += square.apart;
    m0 += SIDE * pitch0, m1 += SIDE * pitch1;
  }
#undef PRODUCT
  _tile_stored(0, sums[0], pitch0);
  if constexpr (M > 1) _tile_stored(1, sums[1], pitch1);
  if constexpr (W > 1) _tile_stored(2, sums[2], pitch0);
  if constexpr (W > 1 && M > 1) _tile_stored(3, sums[3], pitch1);
}

// Bytes of a step of SIDE weight rows: one register.
constexpr int PANEL_STEP = SIDE * STEP_BYTES;

// Multiply int4 weights by their scales, step by step, as two integers of eight bits: a scale is 16 * upper +
// lower, and each weight is multiplied by both. Two neighbors share a scale and are multiplied as one number
// of sixteen bits: as weight + 8, by a factor of at least 0, each product fits into its byte. The excess is
// subtracted.
inline void split_rows(const std::uint8_t* rows, int count, int width, std::uint8_t* upper,
                       std::uint8_t* lower) {
  const int steps = I4::steps(width);
  const auto twice = [](__m512i bytes) {  // the byte of a lane in both its bytes
    bytes = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
    return _mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 8));
  };
  for (int n = 0; n < count; n++) {
    const std::uint8_t* block = rows + std::size_t(n) * I4::row_bytes(width);
    for (int first = 0; first < steps; first += I4::BLOCK_STEPS) {
      const int here = std::min(I4::BLOCK_STEPS, steps - first);
      const __m512i scales = I4::scales(block);
      const __m512i low = _mm512_and_si512(scales, _mm512_set1_epi16(15));
      const __m512i high = _mm512_add_epi16(_mm512_srai_epi16(scales, 4), _mm512_set1_epi16(8));
      const __m512i eight_low = twice(_mm512_slli_epi16(low, 3));
      const __m512i eight_high =
          twice(_mm512_sub_epi16(_mm512_slli_epi16(high, 3), _mm512_set1_epi16(64)));
      for (int s = 0; s < here; s++) {
        const __m512i weights = I4::apart(block + I4::SCALES + s * I4::STEP_BYTES);
        const std::size_t at = std::size_t(first + s) * PANEL_STEP + n * STEP_BYTES;
        _mm512_store_si512(lower + at, _mm512_sub_epi8(_mm512_mullo_epi16(weights, low), eight_low));
        __m512i product = _mm512_sub_epi8(_mm512_mullo_epi16(weights, high), eight_high);
        _mm512_store_si512(upper + at, _mm512_sub_epi8(product, _mm512_slli_epi16(weights, 3)));
      }
      block += I4::SCALES + here * I4::STEP_BYTES;
    }
  }
}

// A matrix times activations, by tiles.
class TileProduct {
 public:
  TileProduct(const Matrix& matrix, const Inputs& inputs, float* out, int pitch, bool add)
      : matrix_(matrix),
        inputs_(inputs),
        out_(out),
        pitch_(pitch),
        add_(add),
        input_bytes_(row_bytes(matrix, inputs)) {}

  // Weight rows of a pass: two registers. A register of int4 becomes two.
  static int weight_rows(const Matrix& matrix) { return matrix.kind == KIND_INT4 ? SIDE : 2 * SIDE; }

  // Outputs of weight rows [first, last), for all activation rows.
  void rows(int first, int last) const {
    Shape shape;
    for (int n = first; n < last; n += weight_rows(matrix_)) rows(n, last, shape);
    _tile_release();
  }

 private:
  using Sums = std::int32_t[4][SIDE * SIDE];

  // The configuration of the registers: weight rows and activation rows of both halves.
  struct Shape {
    int here[2] = {0, 0}, there[2] = {0, 0};

    void become(const int* weights, const std::array<int, 2>& inputs) {
      if (std::equal(here, here + 2, weights) && std::equal(there, there + 2, inputs.begin())) return;
      std::copy(weights, weights + 2, here), std::copy(inputs.begin(), inputs.end(), there);
      TileConfig config(here, there);
      _tile_loadconfig(&config);
    }
  };

  // The weight rows of a pass. With many activation rows, a piece of the weights stays in the nearest cache
  // while all of them meet it, and the next weights are prefetched.
  void rows(int first, int last, Shape& shape) const {
    int here[2] = {std::min(SIDE, last - first), std::min(SIDE, std::max(0, last - first - SIDE))};
    const int steps = int(input_bytes_) / STEP_BYTES, pairs = (inputs_.count + 2 * SIDE - 1) / (2 * SIDE);
    const int pieces = pairs == 1 || steps > WHOLE_STEPS ? 1 : (steps + PIECE_STEPS - 1) / PIECE_STEPS;
    Square square;
    if (matrix_.kind == KIND_INT4) {
      std::uint8_t *upper = panel_room(2 * steps), *lower = upper + steps * PANEL_STEP;
      split_rows(weight(first), here[0], matrix_.width, upper, lower);
      here[1] = here[0];
      square.weights[0] = upper, square.weights[1] = lower;
      square.stride = STEP_BYTES, square.apart = PANEL_STEP;
    } else {
      square.weights[0] = weight(first), square.weights[1] = weight(first + SIDE);
      square.stride = row_bytes(matrix_), square.apart = STEP_BYTES;
    }
    Ahead ahead{weight(first + weight_rows(matrix_)), 0};
    const std::size_t coming = weight_rows(matrix_) * row_bytes(matrix_) / LINE;
    if (pairs > 1) ahead.lines = int(coming / (std::size_t(steps) * pairs)) + 1;
    Sums* sums = sums_room(pairs);
    for (int piece = 0; piece < pieces; piece++) {
      const int begin = steps * piece / pieces, end = steps * (piece + 1) / pieces;
      square.begun = piece > 0;
      square.steps = end - begin;
      for (int pair = 0; pair < pairs; pair++) {
        square.sums = sums[pair];
        shape.become(here, input_rows(pair));
        multiply(square, begin, here[1], pair, ahead);
        ahead.at += std::size_t(square.steps) * ahead.lines * LINE;
        if (piece + 1 == pieces) put(first, here, pair, sums[pair]);
      }
      for (const std::uint8_t*& weights : square.weights) weights += square.steps * square.apart;
    }
  }

  const std::uint8_t* weight(int n) const {
    return static_cast<const std::uint8_t*>(matrix_.weights) + n * row_bytes(matrix_);
  }

  // The first step of the activation rows from m on, packed, or as it is for a single row.
  const std::uint8_t* input(int m) const {
    const auto* all = inputs_.count == 1 ? static_cast<const std::uint8_t*>(inputs_.values)
                                         : inputs_.packed;
    return all + m * input_bytes_;
  }

  // This thread's memory for steps of SIDE weight rows.
  static std::uint8_t* panel_room(int steps) {
    static thread_local Buffer<std::uint8_t> room;
    const std::size_t wanted = std::size_t(steps) * PANEL_STEP;
    if (room.size() < wanted) room.resize(wanted);
    return room.data();
  }

  // This thread's memory for the sums of pairs.
  static Sums* sums_room(int pairs) {
    static thread_local Buffer<std::int32_t> room;
    const std::size_t wanted = sizeof(Sums) / sizeof(std::int32_t) * pairs;
    if (room.size() < wanted) room.resize(wanted);
    return reinterpret_cast<Sums*>(room.data());
  }

  // Activation rows of both halves of a pair.
  std::array<int, 2> input_rows(int pair) const {
    const int left = inputs_.count - pair * 2 * SIDE;
    return {std::min(SIDE, left), std::min(SIDE, std::max(0, left - SIDE))};
  }

  // Multiply the weights by the activation rows of a pair, from step `begin` on.
  void multiply(Square& square, int begin, int second, int pair, Ahead ahead) const {
    const std::array<int, 2> there = input_rows(pair);
    for (int half = 0; half < 2; half++) {
      square.input_rows[half] = there[half];
      square.inputs[half] = input(SIDE * (2 * pair + half)) + std::size_t(begin) * SIDE * 4 * there[half];
    }
    if (matrix_.kind == KIND_BF16) multiply<false>(square, second, there[1], ahead);
    else multiply<true>(square, second, there[1], ahead);
  }

  template <bool INTEGERS>
  static void multiply(const Square& square, int second_weights, int second_inputs, Ahead ahead) {
    if (second_weights && second_inputs) multiply_tiles<INTEGERS, 2, 2>(square, ahead);
    else if (second_weights) multiply_tiles<INTEGERS, 2, 1>(square, ahead);
    else if (second_inputs) multiply_tiles<INTEGERS, 1, 2>(square, ahead);
    else multiply_tiles<INTEGERS, 1, 1>(square, ahead);
  }

  void put(int first, const int* here, int pair, Sums& sums) const {
    const std::array<int, 2> there = input_rows(pair);
    for (int half = 0; half < 2; half++) {
      const int m = SIDE * (2 * pair + half), count = there[half];
      if (count == 0) continue;
      if (matrix_.kind == KIND_INT4) {
        std::int32_t *upper = sums[half], *lower = sums[2 + half];
        for (int i = 0; i < here[0] * count; i++) lower[i] += upper[i] * 16;
        put(first, here[0], m, count, lower);
      } else {
        put(first, here[0], m, count, sums[half]);
        if (here[1]) put(first + SIDE, here[1], m, count, sums[2 + half]);
      }
    }
  }

  // Output sums (rows, count) of weight rows from n on and activation rows from m on.
  void put(int n, int rows, int m, int count, const std::int32_t* sums) const {
    if (rows == SIDE && count == SIDE) put<true>(n, rows, m, count, sums);
    else put<false>(n, rows, m, count, sums);
  }

  template <bool WHOLE>
  void put(int n, int some, int m, int several, const std::int32_t* sums) const {
    const int rows = WHOLE ? SIDE : some, count = WHOLE ? SIDE : several;
    const __mmask16 lanes = __mmask16((1u << rows) - 1), columns = __mmask16((1u << count) - 1);
    __m512i square[SIDE];
    if (count == 1) {
      square[0] = _mm512_maskz_loadu_epi32(lanes, sums);
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < SIDE; r++)
        square[r] = r < rows ? _mm512_maskz_loadu_epi32(columns, sums + r * count) : __m512i{};
      transpose(square);  // now (activation row, weight row)
    }
    const auto floats = [&](const float* from) { return (Floats)_mm512_maskz_loadu_ps(lanes, from); };
    const Floats bias = matrix_.bias ? floats(matrix_.bias + n) : Floats{};
    Floats scale = {};
    Ints shift = {};
    const bool integers = matrix_.kind != KIND_BF16;
    if (integers) {
      scale = floats(matrix_.scale + n);
      shift = ZERO * (Ints)_mm512_maskz_loadu_epi32(lanes, matrix_.row_sum + n);
    }
    float* to = out_ + std::size_t(m) * pitch_ + n;
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++, to += pitch_) {
      if (i >= count) break;
      Floats result = (Floats)square[i];
      if (integers)
        result = converted<Floats>((Ints)square[i] - shift) * (scale * inputs_.scale[m + i]);
      result = result + bias;
      if (add_) result = result + floats(to);
      _mm512_mask_storeu_ps(to, lanes, (__m512)result);
    }
  }

  const Matrix& matrix_;
  const Inputs& inputs_;
  float* out_;
  int pitch_;
  bool add_;
  std::size_t input_bytes_;
};

#endif

constexpr int INT4_TILE_ROWS = 16;  // from this number of activation rows on, tiles multiply int4
constexpr int PACKED_STEPS = 8;  // in an item of packing
// Bytes of activations that meet all weights before the next activations do: half of the second cache of
// processors with tiles. Measured on two cores of a Xeon, bfloat16, 256 rows of 4,096 in two parts: 1.08
// times as fast.
constexpr std::size_t SECOND_BYTES = 1 << 20;

inline bool takes_tiles(const Matrix& matrix, int count) {
  if (!has_tiles()) return false;
  switch (matrix.kind) {
    case KIND_BF16: return true;
    case KIND_INT4: return count >= INT4_TILE_ROWS;
    default: return false;
  }
}

// The number of activation rows that meet all weights before the next rows do: about as many as fit into
// SECOND_BYTES, since every few weight rows read them again.
inline int rows_at_once(int count, std::size_t row_bytes) {
  const int most = std::max(2, int(SECOND_BYTES / row_bytes) / (2 * SIDE)) * 2 * SIDE;
  const int parts = (count + most - 1) / most;
  return (count + parts * 2 * SIDE - 1) / (parts * 2 * SIDE) * 2 * SIDE;
}

// Activation rows [first, first + count); `first` is a multiple of SIDE.
inline Inputs part(const Matrix& matrix, Inputs inputs, int first, int count) {
  const std::size_t bytes = first * row_bytes(matrix, inputs);
  inputs.values = static_cast<const std::uint8_t*>(inputs.values) + bytes;
  inputs.packed += bytes, inputs.scale += first;
  inputs.count = count;
  return inputs;
}

#if defined(TILES)

// `linear` of linear.h by tiles.
inline void tile_linear(Pool& pool, const Matrix& matrix, const Inputs& inputs, float* out, int pitch,
                        bool add) {
  if (inputs.count > 1 && !inputs.are_packed) {
    const std::size_t bytes = row_bytes(matrix, inputs);
    const int steps = int(bytes) / STEP_BYTES, pieces = (steps + PACKED_STEPS - 1) / PACKED_STEPS;
    const int blocks = (inputs.count + SIDE - 1) / SIDE;
    pool.loop(blocks * pieces, [&](int item) {
      const int m = item / pieces * SIDE, first = item % pieces * PACKED_STEPS;
      pack_rows(static_cast<const std::uint8_t*>(inputs.values) + m * bytes, bytes,
                std::min(SIDE, inputs.count - m), first, std::min(first + PACKED_STEPS, steps),
                inputs.packed + m * bytes);
    });
  }
  // Configuring and releasing the registers takes as long as a few steps.
  const int groups = inputs.count <= 2 * SIDE ? 4 : 1;
  const int per_item = groups * TileProduct::weight_rows(matrix);
  const int items = (matrix.rows + per_item - 1) / per_item;
  const int at_once = rows_at_once(inputs.count, row_bytes(matrix, inputs));
  pool.lanes((inputs.count + at_once - 1) / at_once * items, [&](int item) {
    const int m = item / items * at_once, n = item % items * per_item;
    const Inputs some = part(matrix, inputs, m, std::min(at_once, inputs.count - m));
    TileProduct(matrix, some, out + std::size_t(m) * pitch, pitch, add)
        .rows(n, std::min(n + per_item, int(matrix.rows)));
  });
}

#endif

}  // namespace logitd
