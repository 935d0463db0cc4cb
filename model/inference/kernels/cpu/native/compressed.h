// Compressed: bfloat16 weights in three quarters of their bytes, without loss, for strips.h.
//
// The weights of a matrix span few powers of two: nearly all exponents of a block of 512 are among the
// fifteen up to its largest. A code of four bits selects one of them, next to eight bits of sign and
// fraction. Code 0 is exponent 0, of zeros and subnormal numbers. Weights in between, one in some 8,000 of a
// normal distribution, are escapes, which are stored separately. Decompression restores every bit, so
// products have the bits of tiles.h.
//
// A strip starts with two bytes per block, then four per escape, then zeros up to a line. The blocks follow,
// two for each step of 32 columns. A block is a register: its line j has columns 2 j and 2 j + 1 of each of
// SIDE rows. It is stored as 512 bytes of sign and fraction, then 256 bytes of two codes each: the lower four
// bits belong to the first of two lines, the upper ones to the second.
//
// Blocks are decompressed into registers in the nearest cache on their way from memory: step by step for a
// few activation rows; for many rows eight steps at a time, while all rows meet the eight before. Measured on
// two cores of a Xeon with matrices of GPT-2 124M, speed relative to the same weights in tiles.h: 1 row 1.2
// to 1.35, 32 rows 1.35, 256 rows 1.1 (768 columns) to 1.4 (3,072 and 4,096).
//
// Source of the idea: Zhang et al., "70% Size, 100% Accuracy" (2025). Their codes vary in length, so vector
// instructions could not decode them.
#pragma once

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "matrix.h"
#include "strips.h"

namespace logitd {

constexpr int BLOCK_WEIGHTS = SIDE * B16::STEP;
constexpr int CODES = BLOCK_WEIGHTS;  // offset of a block's codes
constexpr int BLOCK_BYTES = BLOCK_WEIGHTS * 3 / 2;
constexpr int BINADES = 15;

inline int compressed_steps(int width) { return (width + B16::STEP - 1) / B16::STEP; }

// The two bytes that describe a block of SIDE rows of STEP_BYTES: the exponent below the first
// code, and the number of escapes.
struct BlockHead {
  std::uint8_t below, escapes;
};

// Bytes before the blocks of a strip.
inline std::size_t strip_head_bytes(int steps, int escapes) {
  return (2 * std::size_t(steps) * sizeof(BlockHead) + escapes * sizeof(std::uint32_t) + LINE - 1) /
         LINE * LINE;
}

#if defined(TILES)

constexpr int MOST_ESCAPES = 255;  // per block

// A weight without a code: its place in the block, and its bits.
inline std::uint32_t escape(int place, std::uint16_t bits) { return std::uint32_t(place) << 16 | bits; }

// Restores blocks.
class Decompressor {
 public:
  Decompressor() {
    std::uint16_t ramp[B16::STEP];
    for (int i = 0; i < B16::STEP; i++) ramp[i] = std::uint16_t(i % 16 << 7);
    ramp_ = _mm512_loadu_si512(ramp);
  }

  // Restore a block and advance `escapes` past its own. If AHEAD is not 0, prefetch as many bytes that far
  // ahead, a few at a time: there are few places for pending lines (measured: 1.15 times as fast as all at
  // once).
  template <int AHEAD>
  [[gnu::always_inline]] void block(const std::uint8_t* from, BlockHead head, const std::uint32_t*& escapes,
                                    std::uint8_t* to) const {
    // The exponent bits of each code. Code 0 stays 0.
    const __m512i exponents =
        _mm512_maskz_add_epi16(0xFFFEFFFE, ramp_, _mm512_set1_epi16(std::int16_t(head.below << 7)));
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
    for (int left = head.escapes; left > 0; left--, escapes++) {
      const std::uint16_t bits = std::uint16_t(*escapes);
      std::memcpy(to + sizeof bits * (*escapes >> 16), &bits, sizeof bits);
    }
  }

 private:
  static __m256i half_line(const std::uint8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }

  // Copy each byte into both bytes of a number, mask sign and fraction by `others`, and add the exponents.
  static __m512i weights(const std::uint8_t* from, __m512i others, __m512i exponents) {
    const __m512i bytes = _mm512_mullo_epi16(_mm512_cvtepu8_epi16(half_line(from)), _mm512_set1_epi16(257));
    return _mm512_ternarylogic_epi32(bytes, others, exponents, 0xEA);  // bytes & others | exponents
  }

  __m512i ramp_;
};

// A `Strip` of strips.h.
class CompressedStrip {
 public:
  static constexpr bool INTEGERS = false, IN_PLACE = false;
  static constexpr int PIECE = 8, KEPT_BYTES = 2 * BLOCK_BYTES;

  static int steps(int width) { return compressed_steps(width); }

  CompressedStrip(const Matrix& matrix, int strip)
      : end_(static_cast<const std::uint8_t*>(matrix.weights) + matrix.strips[strip + 1] * LINE) {
    const auto* begin = static_cast<const std::uint8_t*>(matrix.weights) + matrix.strips[strip] * LINE;
    const int steps = compressed_steps(matrix.width);
    heads_ = reinterpret_cast<const BlockHead*>(begin);
    escapes_ = reinterpret_cast<const std::uint32_t*>(heads_ + 2 * steps);
    blocks_ = end_ - std::size_t(steps) * KEPT_BYTES;
  }

  const std::uint8_t* end() const { return end_; }
  const std::uint8_t* next() const { return blocks_; }

  void skip(int steps) {
    for (int block = 0; block < 2 * steps; block++) escapes_ += heads_[block].escapes;
    heads_ += 2 * steps, blocks_ += std::size_t(steps) * KEPT_BYTES;
  }

  template <int AHEAD>
  [[gnu::always_inline]] void read(std::uint8_t* to) {
    decompressor_.block<AHEAD>(blocks_, heads_[0], escapes_, to);
    decompressor_.block<AHEAD>(blocks_ + BLOCK_BYTES, heads_[1], escapes_, to + REGISTER_BYTES);
    heads_ += 2, blocks_ += KEPT_BYTES;
  }

 private:
  const std::uint8_t* end_;
  const BlockHead* heads_;
  const std::uint32_t* escapes_;
  const std::uint8_t* blocks_;
  Decompressor decompressor_;
};

// SIDE rows of B16::STEP weights in the layout of a register, with zeros beyond the matrix.
struct WeightBlock {
  __m512i lines[SIDE];

  WeightBlock(const Bf16* weights, int rows, int width, int row, int column) {
    const __mmask32 columns = _bzhi_u32(~0u, unsigned(std::min(B16::STEP, width - column)));
    for (int i = 0; i < SIDE; i++) {
      const Bf16* from = weights + std::size_t(row + i) * width + column;
      lines[i] = row + i < rows ? _mm512_maskz_loadu_epi16(columns, from) : __m512i{};
    }
    transpose(lines);
  }
};

// Write a block and append its escapes. Returns the exponent below its first code.
inline int put_block(const WeightBlock& block, std::uint8_t* to, std::vector<std::uint32_t>& escapes) {
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

// Write weights (rows, width) as strips, and to `places` the line of each strip and of the end. Returns the
// bytes; 0 if they exceed `room` or a block has too many escapes.
inline std::size_t compress(const Bf16* weights, int rows, int width, std::uint8_t* to, std::size_t room,
                            std::uint32_t* places) {
  const int steps = compressed_steps(width);
  Buffer<std::uint8_t> blocks(std::size_t(steps) * 2 * BLOCK_BYTES);
  std::vector<BlockHead> heads(2 * steps);
  std::vector<std::uint32_t> escapes;
  std::size_t done = 0;
  for (int strip = 0; strip < strips(rows); strip++) {
    places[strip] = std::uint32_t(done / LINE);
    escapes.clear();
    for (int block = 0; block < 2 * steps; block++) {
      const int row = strip * STRIP_ROWS + block % 2 * SIDE, column = block / 2 * B16::STEP;
      const std::size_t before = escapes.size();
      const int below = put_block(WeightBlock(weights, rows, width, row, column),
                                  blocks.data() + std::size_t(block) * BLOCK_BYTES, escapes);
      const int added = int(escapes.size() - before);
      if (added > MOST_ESCAPES) return 0;
      heads[block] = {std::uint8_t(below), std::uint8_t(added)};
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

// Restore the weights (rows, width) of a compressed matrix.
inline void decompress(const Matrix& matrix, Bf16* to) {
  alignas(LINE) std::uint8_t registers[2][REGISTER_BYTES];
  for (int strip = 0; strip < strips(matrix.rows); strip++) {
    CompressedStrip kept(matrix, strip);
    for (int column = 0; column < matrix.width; column += B16::STEP) {
      kept.read<0>(registers[0]);
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

}  // namespace logitd
