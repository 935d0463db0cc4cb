// Tiles: products in AMX's registers, which hold 16 rows of 64 bytes (Intel, from Sapphire Rapids on).
//
// One instruction multiplies 16 weight rows with 16 activation rows over a step of 64 bytes: 32 elements in
// bfloat16, 64 in int8. Weights stay as they are in memory, row after row; activations are laid out anew
// (`pack_rows`), as the instruction wants its second operand. Integers are exact, so int8 and int4 have the
// bits of dot.h, and either is taken where it is faster. bfloat16 is added in another order: the even
// elements of a step by themselves, the odd ones, then both to the sum. So all of its products are tiles,
// those of a single row too, and a row's bits do not depend on how many others there are.
//
// Source of the order: Intel's Software Developer's Manual, TDPBF16PS.
#pragma once

#include <algorithm>

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

// Whether this process may use the registers. Linux hands them out on request, since they make the state of
// a thread larger by 8 KB.
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

// Sixteen vectors as a square: what was lane j of i becomes lane i of j.
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

// Steps [first, last) of up to SIDE activation rows, `pitch` bytes from one to the next, as the second
// operand: a step is SIDE rows of four bytes of each activation row. A single row already is that.
inline void pack_rows(const std::uint8_t* rows, std::size_t pitch, int count, int first, int last,
                      std::uint8_t* to) {
  const __mmask16 some = __mmask16((1u << count) - 1);
  for (int step = first; step < last; step++) {
    __m512i square[SIDE];
    for (int m = 0; m < SIDE; m++)
      square[m] = m < count ? _mm512_loadu_si512(rows + m * pitch + step * STEP_BYTES) : __m512i{};
    transpose(square);
    std::uint8_t* at = to + std::size_t(step) * SIDE * 4 * count;
    for (int k = 0; k < SIDE; k++) _mm512_mask_storeu_epi32(at + k * 4 * count, some, square[k]);
  }
}

// How many rows the registers have: four sums, two for weights, two for activations.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  // Weight rows of both halves of a product, and activation rows of both.
  TileConfig(const int* weight_rows, const int* input_rows) {
    for (int w = 0; w < 2; w++) put(4 + w, weight_rows[w], STEP_BYTES);
    for (int m = 0; m < 2; m++) put(6 + m, SIDE, 4 * input_rows[m]);
    for (int w = 0; w < 2; w++)
      for (int m = 0; m < 2; m++) put(2 * w + m, weight_rows[w], 4 * input_rows[m]);
  }

 private:
  void put(int tile, int count, int bytes) {
    if (count == 0 || bytes == 0) return;
    rows[tile] = std::uint8_t(count), row_bytes[tile] = std::uint16_t(bytes);
  }
};

// sums[2 * w + m] (SIDE, SIDE): the products of the weight rows of half w with the activation rows of half
// m, W halves with M. A row of sums has as many columns as half m has activation rows.
template <bool INTEGERS, int W, int M>
[[gnu::always_inline]] inline void multiply_tiles(const std::uint8_t* const* weights, std::size_t stride,
                                                  const std::uint8_t* const* inputs,
                                                  const int* input_rows, int steps,
                                                  std::int32_t (*sums)[SIDE * SIDE]) {
  const std::uint8_t *w0 = weights[0], *w1 = weights[W - 1], *m0 = inputs[0], *m1 = inputs[M - 1];
  const int pitch0 = 4 * input_rows[0], pitch1 = 4 * input_rows[M - 1];
  _tile_zero(0);
  if constexpr (M > 1) _tile_zero(1);
  if constexpr (W > 1) _tile_zero(2);
  if constexpr (W > 1 && M > 1) _tile_zero(3);
#define PRODUCT(sum, weight, input)                            \
  if constexpr (INTEGERS) _tile_dpbsud(sum, weight, input); \
  else _tile_dpbf16ps(sum, weight, input)
  for (int step = 0; step < steps; step++) {
    _tile_loadd(4, w0, stride);
    _tile_loadd(6, m0, pitch0);
    PRODUCT(0, 4, 6);
    if constexpr (M > 1) {
      _tile_loadd(7, m1, pitch1);
      PRODUCT(1, 4, 7);
    }
    if constexpr (W > 1) {
      _tile_loadd(5, w1, stride);
      PRODUCT(2, 5, 6);
      if constexpr (M > 1) { PRODUCT(3, 5, 7); }
    }
    w0 += STEP_BYTES, w1 += STEP_BYTES;
    m0 += SIDE * pitch0, m1 += SIDE * pitch1;
  }
#undef PRODUCT
  _tile_stored(0, sums[0], pitch0);
  if constexpr (M > 1) _tile_stored(1, sums[1], pitch1);
  if constexpr (W > 1) _tile_stored(2, sums[2], pitch0);
  if constexpr (W > 1 && M > 1) _tile_stored(3, sums[3], pitch1);
}

// Weights of int4 times their scales, as two integers of eight bits: (SIDE, steps * STEP) of each, upper ones,
// of which one counts 128, and lower ones.
struct SplitRows {
  std::uint8_t *upper, *lower;
  std::size_t stride;
};

inline void split_rows(const std::uint8_t* rows, int count, int width, const SplitRows& to) {
  const int steps = I4::steps(width);
  const __m512i low_bits = _mm512_set1_epi16(127);
  for (int n = 0; n < count; n++) {
    const std::uint8_t* block = rows + std::size_t(n) * I4::row_bytes(width);
    std::uint8_t *upper = to.upper + n * to.stride, *lower = to.lower + n * to.stride;
    for (int first = 0; first < steps; first += I4::BLOCK_STEPS) {
      const int here = std::min(I4::BLOCK_STEPS, steps - first);
      // Of weights 2 i and 2 i + 1 of either half of a step is scale i.
      __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
      __m512i each = _mm512_cvtepu16_epi32(scales);
      each = _mm512_or_si512(each, _mm512_slli_epi32(each, 16));
      for (int s = 0; s < here; s++) {
        __m512i weights = I4::unpack(block + I4::SCALES + s * I4::STEP_BYTES);
        for (int half = 0; half < 2; half++) {
          __m256i bytes = half ? _mm512_extracti64x4_epi64(weights, 1) : _mm512_castsi512_si256(weights);
          __m512i scaled = _mm512_mullo_epi16(_mm512_cvtepi8_epi16(bytes), each);
          const int at = (first + s) * I4::STEP + 32 * half;
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper + at),
                              _mm512_cvtepi16_epi8(_mm512_srai_epi16(scaled, 7)));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + at),
                              _mm512_cvtepi16_epi8(_mm512_and_si512(scaled, low_bits)));
        }
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

  // Weight rows that are multiplied at once: two registers of them; int4's are two by themselves.
  int weight_rows() const { return matrix_.kind == KIND_INT4 ? SIDE : 2 * SIDE; }

  // Outputs of weight rows [first, last), for all activation rows.
  void rows(int first, int last) const {
    Shape shape;
    for (int n = first; n < last; n += weight_rows()) rows(n, last, shape);
    _tile_release();
  }

 private:
  // What the registers are configured for: weight rows of both halves, and activation rows.
  struct Shape {
    int here[2] = {0, 0}, there[2] = {0, 0};

    void become(const int* weights, const int* inputs) {
      if (std::equal(here, here + 2, weights) && std::equal(there, there + 2, inputs)) return;
      std::copy(weights, weights + 2, here), std::copy(inputs, inputs + 2, there);
      TileConfig config(here, there);
      _tile_loadconfig(&config);
    }
  };

  // As many weight rows as are multiplied at once.
  void rows(int first, int last, Shape& shape) const {
    int here[2] = {std::min(SIDE, last - first), std::min(SIDE, std::max(0, last - first - SIDE))};
    const std::uint8_t* weights[2];
    std::size_t stride;
    if (matrix_.kind == KIND_INT4) {
      SplitRows split = split_room();
      split_rows(weight(first), here[0], matrix_.width, split);
      weights[0] = split.upper, weights[1] = split.lower, stride = split.stride, here[1] = here[0];
    } else {
      weights[0] = weight(first), weights[1] = weight(first + SIDE), stride = row_bytes(matrix_);
    }
    alignas(64) std::int32_t sums[4][SIDE * SIDE];
    for (int m = 0; m < inputs_.count; m += 2 * SIDE) {
      const int left = inputs_.count - m;
      const int there[2] = {std::min(SIDE, left), std::min(SIDE, std::max(0, left - SIDE))};
      shape.become(here, there);
      multiply(weights, stride, here[1], m, there, sums);
      put(first, here, m, there, sums);
    }
  }

  const std::uint8_t* weight(int n) const {
    return static_cast<const std::uint8_t*>(matrix_.weights) + n * row_bytes(matrix_);
  }

  // The step of the first activation rows from m on, as `pack_rows` has put them, or a row as it is.
  const std::uint8_t* input(int m) const {
    const auto* all = inputs_.count == 1 ? static_cast<const std::uint8_t*>(inputs_.values)
                                         : inputs_.packed;
    return all + m * input_bytes_;
  }

  // This thread's room for int4 weights that are split.
  SplitRows split_room() const {
    static thread_local Buffer<std::uint8_t> room;
    const std::size_t stride = std::size_t(I4::steps(matrix_.width)) * I4::STEP;
    if (room.size() < 2 * SIDE * stride) room.resize(2 * SIDE * stride);
    return {room.data(), room.data() + SIDE * stride, stride};
  }

  void multiply(const std::uint8_t* const* weights, std::size_t stride, int second, int m,
                const int* there, std::int32_t (*sums)[SIDE * SIDE]) const {
    if (matrix_.kind == KIND_BF16) multiply<false>(weights, stride, second, m, there, sums);
    else multiply<true>(weights, stride, second, m, there, sums);
  }

  template <bool INTEGERS>
  void multiply(const std::uint8_t* const* weights, std::size_t stride, int second, int m,
                const int* there, std::int32_t (*sums)[SIDE * SIDE]) const {
    const std::uint8_t* inputs[2] = {input(m), input(m + SIDE)};
    const int steps = int(input_bytes_) / STEP_BYTES;
    if (second && there[1]) multiply_tiles<INTEGERS, 2, 2>(weights, stride, inputs, there, steps, sums);
    else if (second) multiply_tiles<INTEGERS, 2, 1>(weights, stride, inputs, there, steps, sums);
    else if (there[1]) multiply_tiles<INTEGERS, 1, 2>(weights, stride, inputs, there, steps, sums);
    else multiply_tiles<INTEGERS, 1, 1>(weights, stride, inputs, there, steps, sums);
  }

  void put(int first, const int* here, int m, const int* there, std::int32_t (*sums)[SIDE * SIDE]) const {
    for (int half = 0; half < 2; half++) {
      if (there[half] == 0) continue;
      if (matrix_.kind == KIND_INT4) {
        std::int32_t *upper = sums[half], *lower = sums[2 + half];
        for (int i = 0; i < here[0] * there[half]; i++) lower[i] += upper[i] * 128;
        put(first, here[0], m + half * SIDE, there[half], lower);
      } else {
        put(first, here[0], m + half * SIDE, there[half], sums[half]);
        if (here[1]) put(first + SIDE, here[1], m + half * SIDE, there[half], sums[2 + half]);
      }
    }
  }

  // sums (rows, count): of weight rows from n on with activation rows from m on.
  void put(int n, int rows, int m, int count, const std::int32_t* sums) const {
    const __mmask16 some = __mmask16((1u << rows) - 1), columns = __mmask16((1u << count) - 1);
    __m512i square[SIDE];
    if (count == 1) {
      square[0] = _mm512_maskz_loadu_epi32(some, sums);
    } else {
      for (int r = 0; r < SIDE; r++)
        square[r] = r < rows ? _mm512_maskz_loadu_epi32(columns, sums + r * count) : __m512i{};
      transpose(square);  // now (activation row, weight row)
    }
    const auto floats = [&](const float* from) { return (Floats)_mm512_maskz_loadu_ps(some, from); };
    const Floats bias = matrix_.bias ? floats(matrix_.bias + n) : Floats{};
    Floats scale = {};
    Ints shift = {};
    const bool integers = matrix_.kind != KIND_BF16;
    if (integers) {
      scale = floats(matrix_.scale + n);
      shift = ZERO * (Ints)_mm512_maskz_loadu_epi32(some, matrix_.row_sum + n);
    }
    for (int i = 0; i < count; i++) {
      float* to = out_ + std::size_t(m + i) * pitch_ + n;
      Floats result = (Floats)square[i];
      if (integers)
        result = converted<Floats>((Ints)square[i] - shift) * (scale * inputs_.scale[m + i]);
      result = result + bias;
      if (add_) result = result + floats(to);
      _mm512_mask_storeu_ps(to, some, (__m512)result);
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

// From how many activation rows on quantized weights are multiplied by tiles.
constexpr int INT8_TILE_ROWS = 13;
constexpr int INT4_TILE_ROWS = 16;
constexpr int PACKED_STEPS = 8;  // of an item of packing

inline bool takes_tiles(const Matrix& matrix, int count) {
  if (!has_tiles()) return false;
  switch (matrix.kind) {
    case KIND_BF16: return true;
    case KIND_INT8: return count >= INT8_TILE_ROWS;
    case KIND_INT4: return count >= INT4_TILE_ROWS;
    default: return false;
  }
}

// As `linear` of linear.h.
inline void tile_linear(Pool& pool, const Matrix& matrix, const Inputs& inputs, float* out, int pitch,
                        bool add) {
#if defined(TILES)
  if (inputs.count > 1) {
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
  const TileProduct product(matrix, inputs, out, pitch, add);
  // Configuring the registers and letting them go takes as long as a few steps do.
  const int groups = inputs.count <= 2 * SIDE ? 4 : 1, per_item = groups * product.weight_rows();
  pool.lanes((matrix.rows + per_item - 1) / per_item, [&](int item) {
    product.rows(item * per_item, std::min((item + 1) * per_item, int(matrix.rows)));
  });
#endif
}

}  // namespace logitd
