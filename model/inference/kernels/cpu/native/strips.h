// Strips: products in AMX's registers, with weights stored in the instruction's layout and
// activations stored row by row.
//
// A strip is SIDE * 2 weight rows. A step of it has STEP_BYTES of each row, as two registers of SIDE rows.
// Line j of a register has the four bytes from 4 j on of each row: the register is the second operand of a
// product. The first operand is activations, row after row as they are. So weights are one stream from memory
// for any number of activation rows, and nothing is rearranged. tiles.h does the opposite.
//
// A `Strip` class reads the stored form: compressed.h decompresses weights into registers in the nearest
// cache on their way from memory; int8_strips.h stores the registers themselves. A few activation rows meet
// one step after the other. Many meet a piece of some steps while the next piece is decompressed or
// prefetched.
//
// The bits are those of tiles.h, and a row's bits do not depend on the number of rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "buffer.h"
#include "matrix.h"
#include "pool.h"
#include "tiles.h"

namespace logitd {

constexpr int STRIP_ROWS = 2 * SIDE;
constexpr int REGISTER_BYTES = SIDE * STEP_BYTES;
constexpr int STEP_REGISTERS = 2 * REGISTER_BYTES;  // bytes of a step of a strip, as it is multiplied

inline int strips(int rows) { return (rows + STRIP_ROWS - 1) / STRIP_ROWS; }

// The number of steps that all strips multiply before the next ones: the activations' columns of these steps
// fit into the second cache, since each strip reads them again.
inline int steps_at_once(int count, int steps) {
  const int most = std::max(1, int(SECOND_BYTES / STEP_BYTES) / count);
  const int parts = (steps + most - 1) / most;
  return (steps + parts - 1) / parts;
}

#if defined(TILES)

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

  // Output activation row `row` to `out`; `from(half)` is the address of SIDE sums.
  template <class From, class Rows>
  void put(int row, const From& from, const Rows& out) const {
    for (int half = 0; half < 2; half++) {
      __m512 values;
      if constexpr (INTEGERS) {
        const __m512i sums = _mm512_sub_epi32(_mm512_load_si512(from(half)), shift_[half]);
        const __m512 scale = _mm512_mul_ps(scale_[half], _mm512_set1_ps(inputs_.scale[row]));
        values = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
      } else {
        values = _mm512_load_ps(from(half));
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

// A matrix in strips times activations. `Rows` is an output such as FloatRows. A `Strip` reads one strip from
// its beginning:
//   INTEGERS      true for int8, false for bfloat16
//   IN_PLACE      true if memory holds the registers themselves
//   PIECE         steps that many activation rows meet before the next ones
//   KEPT_BYTES    bytes of a step in memory
//   steps(width)  steps of a strip
//   end, next     addresses of the next strip and of the next step
//   skip          skip some steps
//   read<AHEAD>   read the next step into registers, and prefetch AHEAD bytes ahead unless that is 0
template <class Strip, class Rows>
class StripProduct {
 public:
  using Sums = float[4][SIDE * SIDE];  // 2 m + n: activation rows of half m, weight rows of half n

  StripProduct(const Matrix& matrix, const Inputs& inputs, const Rows& out)
      : matrix_(matrix),
        activations_(inputs),
        inputs_(static_cast<const std::uint8_t*>(inputs.values)),
        stride_(row_bytes(matrix, inputs)),
        count_(inputs.count),
        steps_(Strip::steps(matrix.width)),
        out_(out) {}

  // Outputs of strips [first, last), for up to 2 * SIDE activation rows.
  void few(int first, int last) const {
    if constexpr (Strip::INTEGERS && Strip::IN_PLACE) switch (count_) {
        case 1: return by_vectors<1>(first, last);
        case 2: return by_vectors<2>(first, last);
        case 3: return by_vectors<3>(first, last);
        case 4: return by_vectors<4>(first, last);
      }
    configure(rows_of(0));
    for (int strip = first; strip < last; strip++) {
      if (count_ > SIDE) few<2>(strip);
      else few<1>(strip);
    }
    _tile_release();
  }

  // Steps [first, last) of a strip for any number of activation rows. Each pair of registers of activation
  // rows has its Sums, which keep the sums of earlier steps. The last step of the strip completes the
  // outputs.
  //
  // The steps are taken a piece at a time, and all pairs meet a piece before the next one. Meanwhile two
  // things proceed at an even pace: reading the next piece, and prefetching these steps of the next strip.
  void many(int strip, int first, int last, Sums* sums) const {
    Strip weights(matrix_, strip);
    weights.skip(first);
    const int pairs = (count_ + 2 * SIDE - 1) / (2 * SIDE), steps = last - first;
    const auto same_step_of_next_strip = weights.end() + (weights.next() - Strip(matrix_, strip).next());
    Ahead ahead{same_step_of_next_strip, lines_with_each(steps * pairs, steps)};
    Pieces pieces(weights, steps);
    const Outputs outputs(matrix_, activations_, strip);
    PairRows configured = {};
    for (int begin = 0; begin < steps; begin += Strip::PIECE) {
      const int end = std::min(begin + Strip::PIECE, steps);
      const int next_end = std::min(end + Strip::PIECE, steps);
      const bool completes = first + end == steps_;
      for (int pair = 0; pair < pairs; pair++) {
        const PairRows rows = rows_of(pair);
        if (rows != configured) configure(configured = rows);
        const int read_until = end + (next_end - end) * (pair + 1) / pairs;  // this pair's share
        const auto with_each_step = [&] {
          for (int line = 0; line < ahead.lines; line++, ahead.at += LINE)
            __builtin_prefetch(ahead.at, 0, SECOND_CACHE);
          pieces.read_step(read_until);
        };
        const std::uint8_t* inputs =
            inputs_ + std::size_t(pair) * 2 * SIDE * stride_ + std::size_t(first + begin) * STEP_BYTES;
        const std::uint8_t* piece = pieces.from(begin);
        const bool begun = first + begin > 0;
        if (rows[1] > 0) multiply<2>(inputs, piece, end - begin, begun, sums[pair], with_each_step);
        else multiply<1>(inputs, piece, end - begin, begun, sums[pair], with_each_step);
        pieces.read_all(read_until);
        if (!completes) continue;
        for (int row = 0; row < rows[0] + rows[1]; row++)
          put(outputs, pair * 2 * SIDE + row, sums[pair], row);
      }
    }
    _tile_release();
  }

 private:
  using PairRows = std::array<int, 2>;  // activation rows of both registers of a pair
  using Outputs = StripOutputs<Strip::INTEGERS>;

  static constexpr int RING = 4;  // steps of weights in the nearest cache, for a few activation rows
  static constexpr int LAG = 1;   // steps from reading weights to multiplying them
  static constexpr int AHEAD = 8192;  // bytes

  // The steps of a strip as registers: in memory if IN_PLACE, else a piece and the next one in a buffer.
  class Pieces {
   public:
    Pieces(Strip& weights, int steps) : weights_(weights), memory_(weights.next()) {
      if constexpr (!Strip::IN_PLACE) read_all(std::min(Strip::PIECE, steps));
    }

    // The steps of the piece that starts at step `begin`.
    const std::uint8_t* from(int begin) const {
      if constexpr (Strip::IN_PLACE) return memory_ + std::size_t(begin) * STEP_REGISTERS;
      else return room_[begin / Strip::PIECE % 2];
    }

    // Read all steps up to `end`, or only the next one.
    void read_all(int end) {
      if constexpr (!Strip::IN_PLACE)
        while (read_ < end) read_step(end);
    }
    [[gnu::always_inline]] void read_step(int end) {
      if constexpr (!Strip::IN_PLACE) {
        if (read_ >= end) return;
        weights_.template read<0>(room_[read_ / Strip::PIECE % 2] + read_ % Strip::PIECE * STEP_REGISTERS);
        read_++;
      }
    }

   private:
    Strip& weights_;
    const std::uint8_t* memory_;
    int read_ = 0;
    alignas(LINE) std::uint8_t room_[2][Strip::IN_PLACE ? 1 : Strip::PIECE * STEP_REGISTERS];
  };

  PairRows rows_of(int pair) const {
    const int left = count_ - pair * 2 * SIDE;
    return {std::min(SIDE, left), std::min(SIDE, std::max(0, left - SIDE))};
  }

  static void configure(const PairRows& rows) {
    TileConfig config;
    for (int half = 0; half < 2; half++) {
      config.put(2 * half, rows[half], STEP_BYTES), config.put(2 * half + 1, rows[half], STEP_BYTES);
      config.put(4 + half, rows[half], STEP_BYTES), config.put(6 + half, SIDE, STEP_BYTES);
    }
    _tile_loadconfig(&config);
  }

  // Lines to prefetch with each of a number of products, so that these steps of the next strip arrive.
  static int lines_with_each(int products, int steps) {
    return (steps * Strip::KEPT_BYTES / int(LINE) + products - 1) / products;
  }

// Sums += activations times weights.
#define STRIP_PRODUCT(sum, input, weight)                           \
  if constexpr (Strip::INTEGERS) _tile_dpbusd(sum, input, weight); \
  else _tile_dpbf16ps(sum, input, weight)

  // `few` for up to four rows of integers, for which tiles are slower than memory: measured on two cores of a
  // Xeon, 768 columns, 1 row and 4 rows are 1.3 and 1.07 times as fast.
  template <int MR>
  void by_vectors(int first, int last) const {
    for (int strip = first; strip < last; strip++) {
      const std::uint8_t *weights = Strip(matrix_, strip).next(), *inputs = inputs_;
      __m512i sum[MR][2] = {};
      for (int step = 0; step < steps_; step++, weights += STEP_REGISTERS, inputs += STEP_BYTES)
#pragma GCC unroll 16
        for (int line = 0; line < SIDE; line++) {
          const std::uint8_t* at = weights + line * STEP_BYTES;
          __builtin_prefetch(at + AHEAD, 0, SECOND_CACHE);
          __builtin_prefetch(at + REGISTER_BYTES + AHEAD, 0, SECOND_CACHE);
          const __m512i upper = _mm512_loadu_si512(at), lower = _mm512_loadu_si512(at + REGISTER_BYTES);
#pragma GCC unroll 4
          for (int m = 0; m < MR; m++) {
            std::int32_t four;
            std::memcpy(&four, inputs + m * stride_ + line * 4, sizeof four);
            const __m512i input = _mm512_set1_epi32(four);
            sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], input, upper);
            sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], input, lower);
          }
        }
      const Outputs outputs(matrix_, activations_, strip);
      for (int m = 0; m < MR; m++) outputs.put(m, [&](int half) { return &sum[m][half]; }, out_);
    }
  }

  template <int M>
  void few(int strip) const {
    alignas(LINE) Sums sums;
    Strip kept(matrix_, strip);
    const std::uint8_t *upper = inputs_, *lower = inputs_ + SIDE * stride_;
    zero_sums<M>();
    const auto multiply = [&](const std::uint8_t* weights) {
      _tile_loadd(4, upper, stride_);
      _tile_loadd(6, weights, STEP_BYTES);
      STRIP_PRODUCT(0, 4, 6);
      _tile_loadd(7, weights + REGISTER_BYTES, STEP_BYTES);
      STRIP_PRODUCT(1, 4, 7);
      upper += STEP_BYTES;
      if constexpr (M > 1) {
        _tile_loadd(5, lower, stride_);
        STRIP_PRODUCT(2, 5, 6);
        STRIP_PRODUCT(3, 5, 7);
        lower += STEP_BYTES;
      }
    };
    if constexpr (Strip::IN_PLACE) {
      const std::uint8_t* weights = kept.next();
      for (int step = 0; step < steps_; step++, weights += STEP_REGISTERS) {
        for (int line = 0; line < STEP_REGISTERS; line += LINE)
          __builtin_prefetch(weights + AHEAD + line, 0, SECOND_CACHE);
        multiply(weights);
      }
    } else {
      alignas(LINE) std::uint8_t ring[RING][STEP_REGISTERS];
      for (int step = 0; step < steps_; step++) {
        kept.template read<AHEAD>(ring[step % RING]);
        if (step >= LAG) multiply(ring[(step - LAG) % RING]);
      }
      for (int step = std::max(0, steps_ - LAG); step < steps_; step++) multiply(ring[step % RING]);
    }
    store_upper(sums);
    if constexpr (M > 1) store_lower(sums);
    const Outputs outputs(matrix_, activations_, strip);
    for (int row = 0; row < count_; row++) put(outputs, row, sums, row);
  }

  template <int M>
  [[gnu::always_inline]] static void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (M > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  [[gnu::always_inline]] static void store_upper(Sums& sums) {
    _tile_stored(0, sums[0], STEP_BYTES);
    _tile_stored(1, sums[1], STEP_BYTES);
  }

  [[gnu::always_inline]] static void store_lower(Sums& sums) {
    _tile_stored(2, sums[2], STEP_BYTES);
    _tile_stored(3, sums[3], STEP_BYTES);
  }

  // `steps` steps of weights times M registers of activation rows, added to `sums` if `begun`.
  template <int M, class WithEachStep>
  [[gnu::always_inline]] void multiply(const std::uint8_t* upper, const std::uint8_t* weights, int steps,
                                       bool begun, Sums& sums, const WithEachStep& with_each_step) const {
    const std::uint8_t* lower = upper + SIDE * stride_;
    if (begun) {
      _tile_loadd(0, sums[0], STEP_BYTES);
      _tile_loadd(1, sums[1], STEP_BYTES);
      if constexpr (M > 1) {
        _tile_loadd(2, sums[2], STEP_BYTES);
        _tile_loadd(3, sums[3], STEP_BYTES);
      }
    } else {
      zero_sums<M>();
    }
    // Storing more than two registers at once waits for all pending products. So the last steps of the upper
    // half come first, and it is stored while those of the lower half are computed. Measured: 1.25 times as
    // fast with rows of 24 steps.
    const int apart = M > 1 ? std::min(2, steps) : 0, together = steps - apart;
    for (int step = 0; step < together; step++) {
      with_each_step();
      _tile_loadd(6, weights, STEP_BYTES);
      _tile_loadd(4, upper, stride_);
      STRIP_PRODUCT(0, 4, 6);
      _tile_loadd(7, weights + REGISTER_BYTES, STEP_BYTES);
      STRIP_PRODUCT(1, 4, 7);
      if constexpr (M > 1) {
        _tile_loadd(5, lower, stride_);
        STRIP_PRODUCT(2, 5, 6);
        STRIP_PRODUCT(3, 5, 7);
        lower += STEP_BYTES;
      }
      upper += STEP_BYTES, weights += STEP_REGISTERS;
    }
    for (int step = 0; step < apart; step++) {
      _tile_loadd(6, weights + step * STEP_REGISTERS, STEP_BYTES);
      _tile_loadd(4, upper + step * STEP_BYTES, stride_);
      STRIP_PRODUCT(0, 4, 6);
      _tile_loadd(7, weights + step * STEP_REGISTERS + REGISTER_BYTES, STEP_BYTES);
      STRIP_PRODUCT(1, 4, 7);
    }
    store_upper(sums);
    if constexpr (M == 1) return;
    for (int step = 0; step < apart; step++) {
      _tile_loadd(6, weights + step * STEP_REGISTERS, STEP_BYTES);
      _tile_loadd(5, lower + step * STEP_BYTES, stride_);
      STRIP_PRODUCT(2, 5, 6);
      _tile_loadd(7, weights + step * STEP_REGISTERS + REGISTER_BYTES, STEP_BYTES);
      STRIP_PRODUCT(3, 5, 7);
    }
    store_lower(sums);
  }

#undef STRIP_PRODUCT

  // Output activation row `row`, which is row `place` of `sums`.
  void put(const Outputs& outputs, int row, const Sums& sums, int place) const {
    outputs.put(row, [&](int half) { return sums[place / SIDE * 2 + half] + place % SIDE * SIDE; }, out_);
  }

  const Matrix& matrix_;
  const Inputs& activations_;
  const std::uint8_t* inputs_;
  std::size_t stride_;  // bytes from one activation row to the next
  int count_, steps_;
  Rows out_;
};

// Inputs times a matrix in strips, to the output `out`.
template <class Strip, class Rows>
void strip_products(Pool& pool, const Matrix& matrix, const Inputs& inputs, const Rows& out) {
  const int count = strips(matrix.rows), steps = Strip::steps(matrix.width);
  const StripProduct<Strip, Rows> product(matrix, inputs, out);
  if (inputs.count <= 2 * SIDE) {
    constexpr int PER_ITEM = 4;  // configuring the registers takes as long as a few steps
    return pool.lanes((count + PER_ITEM - 1) / PER_ITEM, [&](int item) {
      product.few(item * PER_ITEM, std::min(count, (item + 1) * PER_ITEM));
    });
  }
  // The sums of a strip last until its last step: in one item, or over all items of some steps.
  using Sums = typename StripProduct<Strip, Rows>::Sums;
  constexpr std::size_t FLOATS = sizeof(Sums) / sizeof(float);
  const std::size_t pairs = (inputs.count + 2 * SIDE - 1) / (2 * SIDE);
  const int at_once = steps_at_once(inputs.count, steps);
  static thread_local Buffer<float> kept;
  if (at_once < steps && kept.size() < count * pairs * FLOATS) kept.resize(count * pairs * FLOATS);
  float* all = kept.data();
  for (int first = 0; first < steps; first += at_once) {
    const int last = std::min(first + at_once, steps);
    pool.lanes(count, [&](int strip) {
      static thread_local Buffer<float> room;
      if (room.size() < pairs * FLOATS) room.resize(pairs * FLOATS);
      float* sums = at_once < steps ? all + strip * pairs * FLOATS : room.data();
      product.many(strip, first, last, reinterpret_cast<Sums*>(sums));
    });
  }
}

#endif

}  // namespace logitd
