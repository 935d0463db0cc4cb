// Compressed: bfloat16 weights in three quarters of their bytes, without loss, and products by tiles.
//
// The weights of a matrix lie within few powers of two, so that nearly all exponents of a block of 512 are
// among the fifteen up to its largest: four bits tell which, beside the eight of sign and fraction. A code
// of 0 is the exponent 0, of zeros and subnormal numbers. Weights that are smaller than the fifteen but not
// that small, one in some 8,000 of a normal distribution, are escapes, which stand apart. Every bit comes
// back, so products have the bits of tiles.h.
//
// A strip is SIDE * 2 weight rows. It begins with two bytes for each of its blocks, then four for each
// escape, then zeros up to a line; the blocks follow, two for each step of 32 columns. A block is a register
// of weights as a product's second operand: line j has columns 2 j and 2 j + 1 of each of SIDE rows. It is
// kept as 512 bytes of sign and fraction, then 256 of two codes each, the lower four bits of the first of
// two lines, the upper of the second.
//
// Here activations are the first operand and stay as they are, row after row. Weights become registers in
// the nearest cache on their way from memory: for a few activation rows step by step, for many of them
// eight steps at a time, the next eight while all activations meet these. Measured on two cores of a Xeon
// with matrices of GPT-2 124M, times as fast as the same weights in tiles.h: 1 row 1.2 to 1.35, 32 rows
// 1.35, 256 rows 1.1 (768 columns) to 1.4 (3,072 and 4,096).
//
// That exponents are few and that no bit need be lost: Zhang et al., "70% Size, 100% Accuracy" (2025), with
// codes of varying length, which vectors could not take apart.
#pragma once

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "matrix.h"
#include "pool.h"
#include "stream.h"
#include "tiles.h"

namespace logitd {

constexpr int STRIP_ROWS = 2 * SIDE;
constexpr int BLOCK_WEIGHTS = SIDE * B16::STEP;
constexpr int CODES = BLOCK_WEIGHTS;  // where a block's codes begin
constexpr int BLOCK_BYTES = BLOCK_WEIGHTS * 3 / 2;
constexpr int BINADES = 15;
constexpr int REGISTER_BYTES = SIDE * STEP_BYTES;
constexpr int STEP_REGISTERS = 2 * REGISTER_BYTES;  // bytes of a step of a strip, as it is multiplied

inline int compressed_steps(int width) { return (width + B16::STEP - 1) / B16::STEP; }
inline int strips(int rows) { return (rows + STRIP_ROWS - 1) / STRIP_ROWS; }

// What precedes the blocks of a strip.
inline std::size_t strip_head_bytes(int steps, int escapes) {
  return (2 * std::size_t(steps) * sizeof(std::uint16_t) + escapes * sizeof(std::uint32_t) + LINE - 1) /
         LINE * LINE;
}

#if defined(TILES)

// The block of SIDE rows, STEP_BYTES of each, that a strip's head describes by two bytes: the exponent
// below those that codes name, and how many escapes it has.
class BlockHead {
 public:
  BlockHead(int below, int escapes) : bits(std::uint16_t(below | escapes << 8)) {}
  explicit BlockHead(std::uint16_t bits) : bits(bits) {}

  int below() const { return bits & 255; }
  int escapes() const { return bits >> 8; }

  std::uint16_t bits;
};

constexpr int MOST_ESCAPES = 255;  // of a block

// A weight that no code tells: its place in the block, and its bits.
inline std::uint32_t escape(int place, std::uint16_t bits) { return std::uint32_t(place) << 16 | bits; }

// Blocks back into registers.
class Decompressor {
 public:
  Decompressor() {
    std::uint16_t ramp[B16::STEP];
    for (int i = 0; i < B16::STEP; i++) ramp[i] = std::uint16_t(i % 16 << 7);
    ramp_ = _mm512_loadu_si512(ramp);
  }

  // A block, and `escapes` moved behind those of it. Meanwhile as many bytes are asked for, AHEAD further on,
  // if that is not 0: a few at a time, since there are few places for lines on their way (measured: 1.15
  // times as fast as all at once).
  template <int AHEAD>
  [[gnu::always_inline]] void block(const std::uint8_t* from, BlockHead head, const std::uint32_t*& escapes,
                                    std::uint8_t* to) const {
    // What a code stands for, as exponent bits. A code of 0 stays 0.
    const __m512i exponents =
        _mm512_maskz_add_epi16(0xFFFEFFFE, ramp_, _mm512_set1_epi16(std::int16_t(head.below() << 7)));
    const __m512i others = _mm512_set1_epi16(std::int16_t(0x807F)), lower = _mm512_set1_epi16(15);
    constexpr int PAIRS = SIDE / 2, LINES = BLOCK_BYTES / LINE;
#pragma GCC unroll 8
    for (int pair = 0; pair < PAIRS; pair++) {
      if (AHEAD)
        for (int line = pair * LINES / PAIRS; line < (pair + 1) * LINES / PAIRS; line++)
          __builtin_prefetch(from + AHEAD + line * LINE, 0, SECOND_CACHE);
      const __m512i codes = _mm512_cvtepu8_epi16(half_line(from + CODES + 32 * pair));
      const __m512i first = _mm512_permutexvar_epi16(_mm512_and_si512(codes, lower), exponents);
      const __m512i second = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), exponents);
      std::uint8_t* line = to + 2 * STEP_BYTES * pair;
      _mm512_store_si512(line, weights(from + 64 * pair, others, first));
      _mm512_store_si512(line + STEP_BYTES, weights(from + 64 * pair + 32, others, second));
    }
    for (int left = head.escapes(); left > 0; left--, escapes++) {
      const std::uint16_t bits = std::uint16_t(*escapes);
      std::memcpy(to + sizeof bits * (*escapes >> 16), &bits, sizeof bits);
    }
  }

 private:
  static __m256i half_line(const std::uint8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }

  // Each byte becomes both bytes of a number, of which `others` keeps sign and fraction; exponents are
  // added to them.
  static __m512i weights(const std::uint8_t* from, __m512i others, __m512i exponents) {
    const __m512i bytes = _mm512_mullo_epi16(_mm512_cvtepu8_epi16(half_line(from)), _mm512_set1_epi16(257));
    return _mm512_ternarylogic_epi32(bytes, others, exponents, 0xEA);  // bytes & others | exponents
  }

  __m512i ramp_;
};

// A strip's steps, one after the other.
class StripReader {
 public:
  StripReader(const Matrix& matrix, int strip)
      : begin_(static_cast<const std::uint8_t*>(matrix.weights) + matrix.strips[strip] * LINE),
        end_(static_cast<const std::uint8_t*>(matrix.weights) + matrix.strips[strip + 1] * LINE),
        heads_(reinterpret_cast<const std::uint16_t*>(begin_)) {
    const int steps = compressed_steps(matrix.width);
    escapes_ = reinterpret_cast<const std::uint32_t*>(heads_ + 2 * steps);
    blocks_ = end_ - std::size_t(steps) * 2 * BLOCK_BYTES;
  }

  // Where the next strip begins, and where the next blocks do.
  const std::uint8_t* end() const { return end_; }
  const std::uint8_t* next() const { return blocks_; }

  void skip(int steps) {
    for (int block = 0; block < 2 * steps; block++) escapes_ += BlockHead(heads_[block]).escapes();
    heads_ += 2 * steps, blocks_ += std::size_t(steps) * 2 * BLOCK_BYTES;
  }

  // The next step as two registers.
  template <int AHEAD>
  [[gnu::always_inline]] void read(const Decompressor& decompressor, std::uint8_t* to) {
    decompressor.block<AHEAD>(blocks_, BlockHead(heads_[0]), escapes_, to);
    decompressor.block<AHEAD>(blocks_ + BLOCK_BYTES, BlockHead(heads_[1]), escapes_, to + REGISTER_BYTES);
    heads_ += 2, blocks_ += 2 * BLOCK_BYTES;
  }

 private:
  const std::uint8_t *begin_, *end_;
  const std::uint16_t* heads_;
  const std::uint32_t* escapes_;
  const std::uint8_t* blocks_;
};

// Where products go: each row's sums, bias included, a vector at a time. As floats, or added to those there.
struct FloatRows {
  float* to;
  int pitch;
  bool add;

  void put(int row, int column, __mmask16 lanes, __m512 sums) const {
    float* at = to + std::size_t(row) * pitch + column;
    if (add) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(lanes, at));
    _mm512_mask_storeu_ps(at, lanes, sums);
  }
};

// A compressed matrix times activations. `Rows` is FloatRows, or the like.
template <class Rows>
class CompressedProduct {
 public:
  static constexpr int PIECE = 8;  // steps that all activation rows meet before the next ones
  static constexpr int RING = 4;   // steps of weights in the nearest cache, where activation rows are few
  static constexpr int LAG = 1;    // steps that weights are read before they are multiplied
  static constexpr int AHEAD = 8192;  // bytes

  using Sums = float[4][SIDE * SIDE];  // 2 m + n: of the activation rows of half m, the weight rows of half n

  CompressedProduct(const Matrix& matrix, const Inputs& inputs, const Rows& out)
      : matrix_(matrix),
        inputs_(static_cast<const std::uint8_t*>(inputs.values)),
        stride_(row_bytes(matrix, inputs)),
        count_(inputs.count),
        steps_(compressed_steps(matrix.width)),
        out_(out) {}

  // Outputs of strips [first, last), for up to 2 * SIDE activation rows.
  void few(int first, int last) const {
    become(rows_of(0));
    for (int strip = first; strip < last; strip++) {
      if (count_ > SIDE) few<2>(strip);
      else few<1>(strip);
    }
    _tile_release();
  }

  // Steps [first, last) of a strip for any number of activation rows, two registers of which have a place
  // among `sums`. Outputs with the last step.
  void many(int strip, int first, int last, Sums* sums) const {
    alignas(LINE) std::uint8_t room[2][PIECE * STEP_REGISTERS];
    StripReader reader(matrix_, strip);
    reader.skip(first);
    const int pairs = (count_ + 2 * SIDE - 1) / (2 * SIDE), steps = last - first;
    Ahead ahead{reader.end() + (reader.next() - blocks_of(strip)), lines_with_each(steps * pairs, steps)};
    int read = 0;  // steps
    const auto read_to = [&](int end) {
      for (; read < end; read++)
        reader.read<0>(decompressor_, room[read / PIECE % 2] + read % PIECE * STEP_REGISTERS);
    };
    read_to(std::min(PIECE, steps));
    const StripRows rows(matrix_, strip);
    Halves shape = {};
    for (int begin = 0, piece = 0; begin < steps; begin += PIECE, piece++) {
      const int end = std::min(begin + PIECE, steps), next = std::min(end + PIECE, steps);
      for (int pair = 0; pair < pairs; pair++) {
        if (const Halves here = rows_of(pair); here != shape) become(shape = here);
        const int wanted = end + (next - end) * (pair + 1) / pairs;
        const std::uint8_t* inputs =
            inputs_ + std::size_t(pair) * 2 * SIDE * stride_ + std::size_t(first + begin) * STEP_BYTES;
        const auto meanwhile = [&] {
          for (int line = 0; line < ahead.lines; line++, ahead.at += LINE)
            __builtin_prefetch(ahead.at, 0, SECOND_CACHE);
          if (read < wanted) read_to(read + 1);
        };
        multiply(inputs, room[piece % 2], end - begin, first + begin > 0, shape[1] > 0, sums[pair],
                 meanwhile);
        read_to(wanted);
        for (int row = 0; first + end == steps_ && row < shape[0] + shape[1]; row++)
          rows.put(pair * 2 * SIDE + row, sums[pair], row, out_);
      }
    }
    _tile_release();
  }

 private:
  using Halves = std::array<int, 2>;  // activation rows of both halves of a pair of registers

  Halves rows_of(int pair) const {
    const int left = count_ - pair * 2 * SIDE;
    return {std::min(SIDE, left), std::min(SIDE, std::max(0, left - SIDE))};
  }

  static void become(const Halves& rows) {
    TileConfig config;
    for (int half = 0; half < 2; half++) {
      config.put(2 * half, rows[half], STEP_BYTES), config.put(2 * half + 1, rows[half], STEP_BYTES);
      config.put(4 + half, rows[half], STEP_BYTES), config.put(6 + half, SIDE, STEP_BYTES);
    }
    _tile_loadconfig(&config);
  }

  const std::uint8_t* blocks_of(int strip) const { return StripReader(matrix_, strip).next(); }

  // Lines of the next strip to ask for with each of so many products, so that as many steps have come.
  static int lines_with_each(int products, int steps) {
    return (steps * 2 * BLOCK_BYTES / int(LINE) + products - 1) / products;
  }

  template <int M>
  void few(int strip) const {
    alignas(LINE) std::uint8_t ring[RING][STEP_REGISTERS];
    alignas(LINE) Sums sums;
    StripReader reader(matrix_, strip);
    const std::uint8_t *upper = inputs_, *lower = inputs_ + SIDE * stride_;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (M > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const auto multiply = [&](int step) {
      const std::uint8_t* weights = ring[step % RING];
      _tile_loadd(4, upper, stride_);
      _tile_loadd(6, weights, STEP_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + REGISTER_BYTES, STEP_BYTES);
      _tile_dpbf16ps(1, 4, 7);
      upper += STEP_BYTES;
      if constexpr (M > 1) {
        _tile_loadd(5, lower, stride_);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        lower += STEP_BYTES;
      }
    };
    for (int step = 0; step < steps_; step++) {
      reader.read<AHEAD>(decompressor_, ring[step % RING]);
      if (step >= LAG) multiply(step - LAG);
    }
    for (int step = std::max(0, steps_ - LAG); step < steps_; step++) multiply(step);
    _tile_stored(0, sums[0], STEP_BYTES);
    _tile_stored(1, sums[1], STEP_BYTES);
    if constexpr (M > 1) {
      _tile_stored(2, sums[2], STEP_BYTES);
      _tile_stored(3, sums[3], STEP_BYTES);
    }
    const StripRows rows(matrix_, strip);
    for (int row = 0; row < count_; row++) rows.put(row, sums, row, out_);
  }

  // A piece of `steps` steps times a pair of registers of activation rows, of which the second may be empty.
  template <class Meanwhile>
  [[gnu::always_inline]] void multiply(const std::uint8_t* inputs, const std::uint8_t* weights, int steps,
                                       bool begun, bool both, Sums& sums, const Meanwhile& meanwhile) const {
    if (both) multiply<2>(inputs, weights, steps, begun, sums, meanwhile);
    else multiply<1>(inputs, weights, steps, begun, sums, meanwhile);
  }

  template <int M, class Meanwhile>
  [[gnu::always_inline]] void multiply(const std::uint8_t* upper, const std::uint8_t* weights, int steps,
                                       bool begun, Sums& sums, const Meanwhile& meanwhile) const {
    const std::uint8_t* lower = upper + SIDE * stride_;
    if (begun) {
      _tile_loadd(0, sums[0], STEP_BYTES);
      _tile_loadd(1, sums[1], STEP_BYTES);
      if constexpr (M > 1) {
        _tile_loadd(2, sums[2], STEP_BYTES);
        _tile_loadd(3, sums[3], STEP_BYTES);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (M > 1) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    // Storing more than two registers at once waits for all that is under way. So the last steps are those
    // of the upper half first, which is stored while those of the lower are computed. Measured: 1.25 times
    // as fast where a row is 24 steps.
    const int apart = M > 1 ? std::min(2, steps) : 0, together = steps - apart;
    for (int step = 0; step < together; step++) {
      meanwhile();
      _tile_loadd(6, weights, STEP_BYTES);
      _tile_loadd(4, upper, stride_);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + REGISTER_BYTES, STEP_BYTES);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (M > 1) {
        _tile_loadd(5, lower, stride_);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        lower += STEP_BYTES;
      }
      upper += STEP_BYTES, weights += STEP_REGISTERS;
    }
    for (int step = 0; step < apart; step++) {
      _tile_loadd(6, weights + step * STEP_REGISTERS, STEP_BYTES);
      _tile_loadd(4, upper + step * STEP_BYTES, stride_);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + step * STEP_REGISTERS + REGISTER_BYTES, STEP_BYTES);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], STEP_BYTES);
    _tile_stored(1, sums[1], STEP_BYTES);
    if constexpr (M == 1) return;
    for (int step = 0; step < apart; step++) {
      _tile_loadd(6, weights + step * STEP_REGISTERS, STEP_BYTES);
      _tile_loadd(5, lower + step * STEP_BYTES, stride_);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, weights + step * STEP_REGISTERS + REGISTER_BYTES, STEP_BYTES);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums[2], STEP_BYTES);
    _tile_stored(3, sums[3], STEP_BYTES);
  }

  // The outputs of a strip.
  class StripRows {
   public:
    StripRows(const Matrix& matrix, int strip) : first_(strip * STRIP_ROWS) {
      const __mmask32 lanes = _bzhi_u32(~0u, unsigned(std::min(STRIP_ROWS, matrix.rows - first_)));
      for (int half = 0; half < 2; half++) {
        lanes_[half] = __mmask16(lanes >> half * SIDE);
        bias_[half] = _mm512_setzero_ps();
        if (matrix.bias)
          bias_[half] = _mm512_maskz_loadu_ps(lanes_[half], matrix.bias + first_ + half * SIDE);
      }
    }

    // Those of an activation row, which is row `place` of `sums`.
    void put(int row, const Sums& sums, int place, const Rows& out) const {
      for (int half = 0; half < 2; half++) {
        const float* from = sums[place / SIDE * 2 + half] + place % SIDE * SIDE;
        const __m512 result = _mm512_add_ps(_mm512_load_ps(from), bias_[half]);
        out.put(row, first_ + half * SIDE, lanes_[half], result);
      }
    }

   private:
    int first_;
    __mmask16 lanes_[2];
    __m512 bias_[2];
  };

  const Matrix& matrix_;
  const std::uint8_t* inputs_;
  std::size_t stride_;  // bytes from one activation row to the next
  int count_, steps_;
  Rows out_;
  Decompressor decompressor_;
};

// Blocks from weights.
class Compressor {
 public:
  // Weights (rows, width) as strips, whose places are written to `strips`, of one more than there are, in
  // lines. Bytes written, of `room`; 0 where they do not fit, or a block has more escapes than it may.
  static std::size_t compress(const Bf16* weights, int rows, int width, std::uint8_t* to, std::size_t room,
                              std::uint32_t* places) {
    const int steps = compressed_steps(width);
    Buffer<std::uint8_t> blocks(std::size_t(steps) * 2 * BLOCK_BYTES);
    std::vector<std::uint16_t> heads(2 * steps);
    std::vector<std::uint32_t> escapes;
    std::size_t done = 0;
    for (int strip = 0; strip < strips(rows); strip++) {
      places[strip] = std::uint32_t(done / LINE);
      escapes.clear();
      for (int block = 0; block < 2 * steps; block++) {
        const int row = strip * STRIP_ROWS + block % 2 * SIDE, column = block / 2 * B16::STEP;
        const std::size_t before = escapes.size();
        const int below = put(Block(weights, rows, width, row, column),
                              blocks.data() + std::size_t(block) * BLOCK_BYTES, escapes);
        const int added = int(escapes.size() - before);
        if (added > MOST_ESCAPES) return 0;
        heads[block] = BlockHead(below, added).bits;
      }
      const std::size_t head = strip_head_bytes(steps, int(escapes.size()));
      if (done + head + blocks.size() > room) return 0;
      std::memset(to + done, 0, head);
      std::memcpy(to + done, heads.data(), heads.size() * sizeof heads[0]);
      if (!escapes.empty())
        std::memcpy(to + done + heads.size() * sizeof heads[0], escapes.data(),
                    escapes.size() * sizeof escapes[0]);
      std::memcpy(to + done + head, blocks.data(), blocks.size());
      done += head + blocks.size();
    }
    places[strips(rows)] = std::uint32_t(done / LINE);
    return done;
  }

 private:
  // SIDE rows of B16::STEP weights as a register has them, with zeros where the matrix ends.
  struct Block {
    __m512i lines[SIDE];

    Block(const Bf16* weights, int rows, int width, int row, int column) {
      const __mmask32 columns = _bzhi_u32(~0u, unsigned(std::min(B16::STEP, width - column)));
      for (int i = 0; i < SIDE; i++) {
        const Bf16* from = weights + std::size_t(row + i) * width + column;
        lines[i] = row + i < rows ? _mm512_maskz_loadu_epi16(columns, from) : __m512i{};
      }
      transpose(lines);
    }
  };

  // A block's bytes, and its escapes behind those that are there. The exponent below its codes'.
  static int put(const Block& block, std::uint8_t* to, std::vector<std::uint32_t>& escapes) {
    const auto exponents = [](__m512i line) {
      return _mm512_and_si512(_mm512_srli_epi16(line, 7), _mm512_set1_epi16(255));
    };
    __m512i largest = _mm512_set1_epi16(BINADES);
    for (const __m512i& line : block.lines) largest = _mm512_max_epu16(largest, exponents(line));
    std::uint16_t lanes[B16::STEP];
    _mm512_storeu_si512(lanes, largest);
    const int below = *std::max_element(lanes, lanes + B16::STEP) - BINADES;
    __m256i codes[SIDE];
    for (int i = 0; i < SIDE; i++) {
      const __m512i exponent = exponents(block.lines[i]);
      const __m512i code = _mm512_sub_epi16(exponent, _mm512_set1_epi16(std::int16_t(below)));
      const __mmask32 zero = _mm512_testn_epi16_mask(exponent, exponent);
      const __mmask32 small = ~zero & _mm512_cmple_epi16_mask(code, __m512i{});
      const __m512i bytes = _mm512_or_si512(  // sign and fraction
          _mm512_and_si512(_mm512_srli_epi16(block.lines[i], 8), _mm512_set1_epi16(128)),
          _mm512_and_si512(block.lines[i], _mm512_set1_epi16(127)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to) + i, _mm512_cvtepi16_epi8(bytes));
      codes[i] = _mm512_maskz_cvtepi16_epi8(~(zero | small), code);
      if (small == 0) continue;
      std::uint16_t line[B16::STEP];
      _mm512_storeu_si512(line, block.lines[i]);
      for (int lane = 0; lane < B16::STEP; lane++)
        if (small >> lane & 1) escapes.push_back(escape(i * B16::STEP + lane, line[lane]));
    }
    for (int pair = 0; pair < SIDE / 2; pair++)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + CODES) + pair,
                         _mm256_or_si256(codes[2 * pair], _mm256_slli_epi16(codes[2 * pair + 1], 4)));
    return below;
  }
};

// Weights (rows, width) from a compressed matrix.
inline void decompress(const Matrix& matrix, Bf16* to) {
  const Decompressor decompressor;
  alignas(LINE) std::uint8_t registers[2][REGISTER_BYTES];
  for (int strip = 0; strip < strips(matrix.rows); strip++) {
    StripReader reader(matrix, strip);
    for (int column = 0; column < matrix.width; column += B16::STEP) {
      reader.read<0>(decompressor, registers[0]);
      const __mmask32 columns = _bzhi_u32(~0u, unsigned(std::min(B16::STEP, matrix.width - column)));
      for (int half = 0; half < 2; half++) {
        __m512i lines[SIDE];
        for (int i = 0; i < SIDE; i++) lines[i] = _mm512_load_si512(registers[half] + i * STEP_BYTES);
        transpose(lines);
        const int row = strip * STRIP_ROWS + half * SIDE, rows = std::min(SIDE, matrix.rows - row);
        for (int i = 0; i < rows; i++)
          _mm512_mask_storeu_epi16(to + std::size_t(row + i) * matrix.width + column, columns, lines[i]);
      }
    }
  }
}

#endif

// Steps of a strip that so many activation rows meet before the next ones: as many as leave the rows'
// columns in the second cache, where they are read again for each strip.
inline int steps_at_once(int count, int steps) {
  const int most = std::max(1, int(SECOND_BYTES / STEP_BYTES) / count);
  const int parts = (steps + most - 1) / most;
  return (steps + parts - 1) / parts;
}

#if defined(TILES)

// Inputs times a compressed matrix, to where `out` puts them.
template <class Rows>
void compressed_products(Pool& pool, const Matrix& matrix, const Inputs& inputs, const Rows& out) {
  const int count = strips(matrix.rows), steps = compressed_steps(matrix.width);
  const CompressedProduct<Rows> product(matrix, inputs, out);
  if (inputs.count <= 2 * SIDE) {
    constexpr int PER_ITEM = 4;  // configuring the registers takes as long as a few steps do
    return pool.lanes((count + PER_ITEM - 1) / PER_ITEM, [&](int item) {
      product.few(item * PER_ITEM, std::min(count, (item + 1) * PER_ITEM));
    });
  }
  // Sums of a strip: while they are computed, or until its last steps are.
  using Sums = typename CompressedProduct<Rows>::Sums;
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

// As `linear` of linear.h.
inline void compressed_linear([[maybe_unused]] Pool& pool, [[maybe_unused]] const Matrix& matrix,
                              [[maybe_unused]] const Inputs& inputs, [[maybe_unused]] float* out,
                              [[maybe_unused]] int pitch, [[maybe_unused]] bool add) {
#if defined(TILES)
  compressed_products(pool, matrix, inputs, FloatRows{out, pitch, add});
#endif
}

}  // namespace logitd
