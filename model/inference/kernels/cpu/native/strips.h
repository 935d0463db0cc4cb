// Strips: products in AMX's registers, with weights stored in the instruction's layout and
// activations stored row by row.
//
// The registers of a step (strip_outputs.h) are the second operand of a product. The first operand is
// activations, row after row as they are. So weights are one stream from memory for any number of activation
// rows, and nothing is rearranged. tiles.h does the opposite.
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
#include "strip_outputs.h"
#include "tiles.h"

namespace logitd {

// The number of steps that all strips multiply before the next ones: the activations' columns of these steps
// fit into the second cache, since each strip reads them again.
inline int steps_at_once(int count, int steps) {
  const int most = std::max(1, int(SECOND_BYTES / STEP_BYTES) / count);
  const int parts = (steps + most - 1) / most;
  return (steps + parts - 1) / parts;
}

#if defined(TILES)

// A matrix in strips times activations. `Rows` is an output of strip_outputs.h. A `Strip` reads one strip from
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
  // The steps are processed a piece at a time, and all pairs meet a piece before the next one. Meanwhile two
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
    const auto from = [&](int half) {
      return _mm512_load_si512(sums[place / SIDE * 2 + half] + place % SIDE * SIDE);
    };
    outputs.put(row, from, out_);
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
