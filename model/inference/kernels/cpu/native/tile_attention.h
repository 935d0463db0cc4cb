// Tile attention: attention over a slot of the KV cache in bfloat16, in AMX's registers (tiles.h).
//
// Replaces attention.h in layers without a window if a head's width is a multiple of 32. There are two
// products: queries by keys, and weights by values. Weights are rounded to bfloat16 before they are summed
// up. Positions are processed in steps of 32 from 0; masked positions get weight 0. So a query has the same
// bits by itself, in a decode step that reads keys and values once in place (`TileStep`), and among the
// queries of a prompt, for which both are rearranged (`TilePrompt`).
//
// Measured on a core of an Intel Xeon with AMX, heads of 64, against attention.h: 256 queries of a prompt 20
// us instead of 115, 256 more after 1,792 positions 200 instead of 1,580. A step over 300 positions in the
// second cache: four heads that share keys and values 2.4 us instead of 5.5, one head 1.4 and 1.4; in memory
// one head is about a tenth slower.
#pragma once

#include <algorithm>

#include "attention.h"
#include "buffer.h"
#include "tiles.h"
#include "vectors.h"

namespace logitd {

// True if heads of this width over a cache of this kind attend by tiles.
inline bool attends_by_tiles(std::int64_t kind, int width) {
  return has_tiles() && kind == KIND_BF16 && width % (STEP_BYTES / int(sizeof(Bf16))) == 0;
}

constexpr int POSITIONS = 2 * SIDE;     // of a step of the product with values; also elements of a step
constexpr int TILE_QUERIES = 2 * SIDE;  // queries of a prompt that attend at once
constexpr int VALUE_STEPS = 4;          // steps of rearranged values that the nearest cache holds

// One head of one position of a prompt.
struct TileQuery {
  const Bf16* query;  // (width), scaled
  int count;          // of visible positions
  float* out;         // (width)
  float* weights;     // (count): record of its weights, or null
};

// The keys and values that are read after those of a step's head, and their number of positions.
struct NextHead {
  const Bf16 *keys, *values;
  int count;
};

#if defined(TILES)

// Makes the vectors of this thread flush subnormal numbers to zero, as tiles do.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

// 2^x for x <= 0 with a relative error of 3e-6: 2^n times a polynomial fitted to 2^r, |r| <= 1/2.
inline Floats power_of_two(Floats x) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, NEAREST);
  const Floats r = x - n;
  Floats p = all(9.58258e-3f);
  p = fused(p, r, all(5.590683e-2f));
  p = fused(p, r, all(2.4024107e-1f));
  p = fused(p, r, all(6.9312412e-1f));
  p = fused(p, r, all(1.0f));
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
}

// A query's scores of `count` positions. Steps of POSITIONS are STEP floats apart, and the second half of a
// step is HALF floats after the first. The last step may be partial.
template <int HALF, int STEP>
struct Scores {
  const float* first;
  int count;

  const float* partial_step() const { return first + std::size_t(count / POSITIONS) * STEP; }
  bool has_partial_step() const { return count % POSITIONS != 0; }
  // The lanes of a half of the partial step that hold positions.
  __mmask16 lanes(int half) const { return __mmask16(((1u << count % POSITIONS) - 1) >> half * LANES); }

  float largest() const {
    __m512 highs[2] = {_mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY)};
    for (const float* step = first; step < partial_step(); step += STEP)
      for (int half = 0; half < 2; half++)
        highs[half] = _mm512_max_ps(highs[half], _mm512_load_ps(step + half * HALF));
    for (int half = 0; half < 2 && has_partial_step(); half++)
      highs[half] = _mm512_mask_max_ps(highs[half], lanes(half), highs[half],
                                       _mm512_load_ps(partial_step() + half * HALF));
    return _mm512_reduce_max_ps(_mm512_max_ps(highs[0], highs[1]));
  }
};

// Write the weights of a query, e to the score minus the largest score, rounded to bfloat16. Steps of weights
// are TO numbers apart; the partial one is filled up with zeros. Returns the factor that normalizes them, one
// over the sum of the rounded weights.
template <int TO, int HALF, int STEP>
inline float put_weights(const Scores<HALF, STEP>& scores, Bf16* weights) {
  const Floats most = all(scores.largest());
  const auto weight = [&](const float* from) {
    return (__m512)power_of_two((load(from) - most) * 1.44269504088896341f);
  };
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 total = _mm512_setzero_ps();
  const auto put = [&](__m512 first_half, __m512 second_half) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(second_half, first_half);
    _mm512_store_si512(weights, (__m512i)rounded);
    total = _mm512_dpbf16_ps(total, rounded, ones);
    weights += TO;
  };
  const float* last = scores.partial_step();
  for (const float* step = scores.first; step < last; step += STEP) put(weight(step), weight(step + HALF));
  if (scores.has_partial_step())
    put(_mm512_maskz_mov_ps(scores.lanes(0), weight(last)),
        _mm512_maskz_mov_ps(scores.lanes(1), weight(last + HALF)));
  return 1.0f / sum((Floats)total);
}

// Rearrange the values of POSITIONS positions into the second operand: for every 16 columns 16 rows of a pair
// of positions. Groups of 16 columns are `apart` bytes apart. Positions from `count` on become zeros.
// Prefetches as much as it reads, at `ahead` and at `ahead` + `other`; null and 0 prefetch nothing.
inline void pack_values(const Bf16* values, int count, int width, std::size_t apart, std::uint8_t* to,
                        const char* ahead = nullptr, std::ptrdiff_t other = 0) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                       38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
  const auto row = [&](int p, int column) {
    return p < count ? _mm512_loadu_si512(values + std::size_t(p) * width + column) : __m512i{};
  };
  for (int pair = 0; pair < SIDE; pair++, to += STEP_BYTES)
    for (int column = 0; column < width; column += POSITIONS) {
      const __m512i even = row(2 * pair, column), odd = row(2 * pair + 1, column);
      for (int line = 0; ahead && line < 2; line++, ahead += LINE) {
        __builtin_prefetch(ahead, 0, NEAREST_CACHE);
        if (other) __builtin_prefetch(ahead + other, 0, NEAREST_CACHE);
      }
      std::uint8_t* at = to + column / SIDE * apart;
      _mm512_store_si512(at, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(at + apart, _mm512_permutex2var_epi16(even, high, odd));
    }
}

// The results of tiles for SIDE queries and SIDE columns: the bits of floats.
using TileSums = std::int32_t[SIDE * SIDE];

// A thread's memory for attention, which grows on demand.
struct TileRoom {
  Buffer<std::uint8_t> queries, keys, values, weights;
  Buffer<std::int32_t> scores, mixed;

  template <class Cell>
  static Cell* of(Buffer<Cell>& room, std::size_t wanted) {
    if (room.size() < wanted) room.resize(wanted);
    return room.data();
  }
  static TileSums* sums(Buffer<std::int32_t>& room, std::size_t wanted) {
    return reinterpret_cast<TileSums*>(of(room, wanted * SIDE * SIDE));
  }
  static TileRoom& own() {
    static thread_local TileRoom room;
    return room;
  }
};

// out[0, width) = a row of `mixed` times a scale. Two squares of columns are adjacent, and such pairs are
// `apart` squares apart. Adding zero turns -0 into 0, so no bit depends on the number of added zeros.
inline void put_mixed(const TileSums* mixed, int apart, int row, int width, float scale, float* out) {
  for (int column = 0; column < width; column += POSITIONS, mixed += apart)
    for (int half = 0; half < 2; half++) {
      const float* sums = reinterpret_cast<const float*>(mixed[half]) + row * SIDE;
      store(out + column + half * SIDE, load(sums) * scale + 0.0f);
    }
}

// Up to SIDE heads of one position that share keys and values. Each key and value is read once.
//
// Memory is prefetched at an even pace: products with keys are so short that they would wait for places of
// pending lines. So while a head's values are read, the next head's keys and values are prefetched, a line of
// each per line, if the second cache has room for both heads. Measured on two cores of a Xeon, heads of 64
// over 290 positions: 6.5 us instead of 7.4 as one stream; reading alone takes 6.1. Longer heads are
// prefetched as one stream.
class TileStep {
 public:
  TileStep(HeadCells<Bf16> keys, HeadCells<Bf16> values, const NextHead& next, int count, int width)
      : keys_(keys.cells),
        values_(values.cells),
        next_(next),
        prefetches_head_(4 * sizeof(Bf16) * std::max(count, next.count) * width <= SECOND_BYTES),
        count_(count),
        width_(width),
        steps_((count + POSITIONS - 1) / POSITIONS),
        pitch_(std::size_t(steps_) * POSITIONS),
        room_(TileRoom::own()) {}

  // queries and out (heads, width)
  void attend(const Bf16* queries, int heads, float* out) const {
    const FlushDenormals as_tiles;
    const float* scores = score(queries, heads);
    auto* weights = reinterpret_cast<Bf16*>(TileRoom::of(room_.weights, heads * pitch_ * sizeof(Bf16)));
    float scales[SIDE];
    for (int head = 0; head < heads; head++)
      scales[head] = put_weights<POSITIONS>(Scores<SIDE, POSITIONS>{scores + head * pitch_, count_},
                                            weights + head * pitch_);
    if (heads > 1) mix(weights, scales, heads, out);
    else mix(weights, scales[0], out);
  }

 private:
  // (heads, pitch): the scores of all positions, padded to whole steps with meaningless scores.
  const float* score(const Bf16* queries, int heads) const {
    const auto* packed = reinterpret_cast<const std::uint8_t*>(queries);
    if (heads > 1) {
      const std::size_t bytes = width_ * sizeof(Bf16);
      std::uint8_t* to = TileRoom::of(room_.queries, heads * bytes);
      pack_rows(packed, bytes, heads, 0, width_ / POSITIONS, to);
      packed = to;
    }
    auto* scores = reinterpret_cast<float*>(TileRoom::of(room_.scores, heads * pitch_));
    const int keys[2] = {SIDE, SIDE}, columns[2] = {heads, heads};
    const TileConfig config(keys, columns);
    _tile_loadconfig(&config);
    int p = 0;
    for (; p + 4 * SIDE <= int(pitch_); p += 4 * SIDE) score<4>(packed, heads, p, scores);
    if (p < int(pitch_)) score<2>(packed, heads, p, scores);
    _tile_release();
    return scores;
  }

  // The scores of BLOCKS times SIDE keys from position p on. Keys are the first operand.
  template <int BLOCKS>
  void score(const std::uint8_t* queries, int heads, int p, float* scores) const {
    const std::size_t stride = width_ * sizeof(Bf16);
    const auto* at = reinterpret_cast<const std::uint8_t*>(keys_ + std::size_t(p) * width_);
    const char* ahead = cells_ahead(keys_, p, count_, values_, width_);
    const auto prefetch = [&] {  // as much as a register of keys
      if (prefetches_head_) return;
      for (int line = 0; line < SIDE; line++, ahead += LINE) __builtin_prefetch(ahead, 0, NEAREST_CACHE);
    };
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS > 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int k = 0; k < width_; k += POSITIONS, at += STEP_BYTES, queries += SIDE * 4 * heads) {
      _tile_loadd(6, queries, 4 * heads);
      _tile_loadd(4, at, stride);
      _tile_dpbf16ps(0, 4, 6);
      prefetch();
      _tile_loadd(5, at + SIDE * stride, stride);
      _tile_dpbf16ps(1, 5, 6);
      prefetch();
      if constexpr (BLOCKS > 2) {
        _tile_loadd(4, at + 2 * SIDE * stride, stride);
        _tile_dpbf16ps(2, 4, 6);
        prefetch();
        _tile_loadd(5, at + 3 * SIDE * stride, stride);
        _tile_dpbf16ps(3, 5, 6);
        prefetch();
      }
    }
    alignas(64) float sums[BLOCKS * SIDE * SIDE];  // (BLOCKS * SIDE, heads)
    float* to = heads == 1 ? scores + p : sums;
    const int apart = SIDE * heads, bytes = 4 * heads;
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + apart, bytes);
    if constexpr (BLOCKS > 2) {
      _tile_stored(2, to + 2 * apart, bytes);
      _tile_stored(3, to + 3 * apart, bytes);
    }
    if (heads == 1) return;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(heads));
    for (int block = 0; block < BLOCKS; block++)
      for (int head = 0; head < heads; head++)
        _mm512_store_ps(scores + head * pitch_ + p + block * SIDE,
                        _mm512_i32gather_ps(places, to + block * apart + head, 4));
  }

  // Several heads' weights (heads, pitch) times values, by tiles.
  void mix(const Bf16* weights, const float* scales, int heads, float* out) const {
    const int rows[2] = {heads, 0}, columns[2] = {SIDE, SIDE};
    const TileConfig config(rows, columns);
    _tile_loadconfig(&config);
    constexpr std::size_t APART = VALUE_STEPS * PANEL_STEP;
    std::uint8_t* packed = TileRoom::of(room_.values, width_ / SIDE * APART);
    TileSums* mixed = TileRoom::sums(room_.mixed, width_ / SIDE);
    Square square;
    square.stride = pitch_ * sizeof(Bf16), square.apart = STEP_BYTES;
    square.input_rows[0] = square.input_rows[1] = SIDE;
    for (int first = 0; first < steps_; first += VALUE_STEPS) {
      square.steps = std::min(VALUE_STEPS, steps_ - first);
      for (int step = 0; step < square.steps; step++) {
        const int p = (first + step) * POSITIONS;
        const Prefetch ahead = ahead_of_values(p);
        pack_values(values_ + std::size_t(p) * width_, count_ - p, width_, APART,
                    packed + step * PANEL_STEP, ahead.at, ahead.other);
      }
      square.begun = first > 0;
      square.weights[0] = reinterpret_cast<const std::uint8_t*>(weights + first * POSITIONS);
      for (int block = 0; block < width_ / SIDE; block += 2) {
        square.inputs[0] = packed + block * APART, square.inputs[1] = square.inputs[0] + APART;
        square.sums = mixed + block;
        multiply_tiles<false, 1, 2>(square, {nullptr, 0});
      }
    }
    _tile_release();
    for (int head = 0; head < heads; head++)
      put_mixed(mixed, 2, head, width_, scales[head], out + head * width_);
  }

  // One head's weights times values, by vectors: the bits of tiles, and faster for one head.
  void mix(const Bf16* weights, float scale, float* out) const {
    if (prefetches_head_) mix<true>(weights, scale, out);
    else mix<false>(weights, scale, out);
  }

  template <bool BOTH>
  void mix(const Bf16* weights, float scale, float* out) const {
    for (int column = 0; column < width_;) {
      const int left = (width_ - column) / POSITIONS;
      const int taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      switch (taken) {
        case 4: mix_columns<4, BOTH>(weights, column, scale, out); break;
        case 2: mix_columns<2, BOTH>(weights, column, scale, out); break;
        default: mix_columns<1, BOTH>(weights, column, scale, out);
      }
      column += taken * POSITIONS;
    }
  }

  // PAIRS times POSITIONS columns; one vector has the even columns, another the odd ones. Adds like tiles:
  // the even positions of a step, the odd ones, then both to the sum of the earlier steps. BOTH: prefetch
  // keys and values of the next head.
  template <int PAIRS, bool BOTH>
  void mix_columns(const Bf16* weights, int column, float scale, float* out) const {
    Floats mixed[2 * PAIRS] = {};
    for (int first = 0; first < count_; first += POSITIONS, weights += POSITIONS) {
      alignas(64) float own[POSITIONS];
      store(own, load(weights)), store(own + LANES, load(weights + LANES));
      Floats sums[2][2 * PAIRS] = {};
      const Bf16* at = values_ + std::size_t(first) * width_ + column;
      Prefetch ahead = ahead_of_values(first);
      ahead.at += column * sizeof(Bf16);
      const auto add = [&](int p, Floats* to) {
        const Floats weight = all(own[p]);
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) {
          __builtin_prefetch(ahead.at + i * LINE, 0, NEAREST_CACHE);
          if (BOTH) __builtin_prefetch(ahead.at + ahead.other + i * LINE, 0, NEAREST_CACHE);
          const Words both = read<Words>(at + i * POSITIONS);
          to[2 * i] = fused(weight, as<Floats>(both << 16), to[2 * i]);
          to[2 * i + 1] = fused(weight, as<Floats>(both & 0xFFFF0000u), to[2 * i + 1]);
        }
        at += width_, ahead.at += width_ * sizeof(Bf16);
      };
      const int here = std::min(POSITIONS, count_ - first);
      for (int p = 0; p + 1 < here; p += 2) add(p, sums[0]), add(p + 1, sums[1]);
      if (here % 2) add(here - 1, sums[0]);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * PAIRS; i++) mixed[i] += sums[0][i] + sums[1][i];
    }
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(LANES / 2));
    out += column;
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; i++, out += POSITIONS) {
      const __m512 even = (__m512)(mixed[2 * i] * scale + 0.0f);
      const __m512 odd = (__m512)(mixed[2 * i + 1] * scale + 0.0f);
      store(out, (Floats)_mm512_permutex2var_ps(even, low, odd));
      store(out + LANES, (Floats)_mm512_permutex2var_ps(even, high, odd));
    }
  }

  // The memory to prefetch while values are read, as much as these: at `at`, and at `at` + `other` unless 0.
  struct Prefetch {
    const char* at;
    std::ptrdiff_t other;
  };

  // For the step of values that starts at position p. Beyond the next head's last position, cached memory.
  Prefetch ahead_of_values(int p) const {
    if (!prefetches_head_) return {cells_ahead(values_, p, count_, next_.keys, width_), 0};
    const bool there = p < next_.count;
    const auto* keys = reinterpret_cast<const char*>(there ? next_.keys : keys_);
    const auto* values = reinterpret_cast<const char*>(there ? next_.values : values_);
    return {keys + std::size_t(p) * width_ * sizeof(Bf16), values - keys};
  }

  const Bf16 *keys_, *values_;
  NextHead next_;
  bool prefetches_head_;  // prefetch the next head's keys and values together, not as one stream
  int count_, width_, steps_;
  std::size_t pitch_;  // positions of whole steps
  TileRoom& room_;
};

// True if all of `count` cells are finite.
inline bool all_finite(const Bf16* cells, int count) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 lost = 0;
  for (int i = 0; i < count; i += POSITIONS) {
    const __m512i found = _mm512_and_si512(_mm512_loadu_si512(cells + i), exponent);
    lost |= _mm512_cmpeq_epi16_mask(found, exponent);
  }
  return lost == 0;
}

// The keys and values of one head, rearranged once for all queries of an item of a prompt.
class TilePrompt {
 public:
  // Positions [0, count). Uses the thread's TileRoom until the next TilePrompt is made.
  TilePrompt(HeadCells<Bf16> keys, HeadCells<Bf16> values, int count, int width)
      : width_(width), steps_((count + POSITIONS - 1) / POSITIONS), room_(TileRoom::own()) {
    const std::size_t pitch = width * sizeof(Bf16), bytes = steps_ * POSITIONS * pitch;
    keys_ = TileRoom::of(room_.keys, bytes), values_ = TileRoom::of(room_.values, bytes);
    const auto* rows = reinterpret_cast<const std::uint8_t*>(keys.cells);
    for (int p = 0; p < steps_ * POSITIONS; p += SIDE)  // a slot has whole steps
      pack_rows(rows + p * pitch, pitch, SIDE, 0, width / POSITIONS, keys_ + p * pitch);
    for (int step = 0; step < steps_; step++)
      pack_values(values.cells + std::size_t(step) * POSITIONS * width, count - step * POSITIONS, width,
                  std::size_t(steps_) * PANEL_STEP, values_ + step * PANEL_STEP);
  }

  // `count` queries, in the order of the positions that they see.
  void attend(const TileQuery* queries, int count) const {
    const FlushDenormals as_tiles;
    const int full[2] = {SIDE, SIDE};
    const TileConfig config(full, full);
    _tile_loadconfig(&config);
    for (; count > SIDE; count -= TILE_QUERIES, queries += TILE_QUERIES)
      attend<2>(queries, std::min(count, TILE_QUERIES));
    if (count > 0) attend<1>(queries, count);
    _tile_release();
  }

 private:
  static constexpr int PANEL_CELLS = PANEL_STEP / int(sizeof(Bf16));

  // Up to HALVES registers of queries.
  template <int HALVES>
  void attend(const TileQuery* queries, int count) const {
    const int steps = (queries[count - 1].count + POSITIONS - 1) / POSITIONS;
    const TileSums* scores = score<HALVES>(queries, count, steps);
    std::uint8_t* weights = TileRoom::of(room_.weights, std::size_t(HALVES) * steps * PANEL_STEP);
    float scales[HALVES * SIDE];
    for (int q = 0; q < count; q++) {
      const int half = q / SIDE, row = q % SIDE;
      const float* first = reinterpret_cast<const float*>(scores[2 * half]) + row * SIDE;
      const Scores<SIDE * SIDE, 4 * SIDE * SIDE> own = {first, queries[q].count};
      auto* to = reinterpret_cast<Bf16*>(weights + std::size_t(half) * steps * PANEL_STEP) + row * POSITIONS;
      scales[q] = put_weights<PANEL_CELLS>(own, to);
      for (int step = (queries[q].count + POSITIONS - 1) / POSITIONS; step < steps; step++)
        std::memset(to + step * PANEL_CELLS, 0, STEP_BYTES);
      if (queries[q].weights == nullptr) continue;
      for (int p = 0; p < queries[q].count; p++)
        queries[q].weights[p] = widen(to[p / POSITIONS * PANEL_CELLS + p % POSITIONS]) * scales[q];
    }
    const TileSums* mixed = mix<HALVES>(weights, steps);
    for (int q = 0; q < count; q++)
      put_mixed(mixed + q / SIDE * 2, 4, q % SIDE, width_, scales[q], queries[q].out);
  }

  // (steps, HALVES of queries, two halves of a step's positions) squares, four for each step.
  template <int HALVES>
  const TileSums* score(const TileQuery* queries, int count, int steps) const {
    const int key_steps = width_ / POSITIONS;
    std::uint8_t* panels = TileRoom::of(room_.queries, std::size_t(HALVES) * key_steps * PANEL_STEP);
    for (int q = 0; q < count; q++)
      for (int k = 0; k < key_steps; k++)
        std::memcpy(panels + (q / SIDE * key_steps + k) * PANEL_STEP + q % SIDE * STEP_BYTES,
                    queries[q].query + k * POSITIONS, STEP_BYTES);
    Square square = squares<HALVES>(panels, key_steps);
    TileSums* scores = TileRoom::sums(room_.scores, 4 * std::size_t(steps));
    const std::size_t block = SIDE * width_ * sizeof(Bf16);
    for (int step = 0; step < steps; step++) {
      square.inputs[0] = keys_ + 2 * step * block, square.inputs[1] = square.inputs[0] + block;
      square.sums = scores + 4 * std::size_t(step);
      multiply_tiles<false, HALVES, 2>(square, {nullptr, 0});
    }
    return scores;
  }

  // (width / POSITIONS, HALVES of queries, two halves of as many columns) squares, four for each.
  template <int HALVES>
  const TileSums* mix(const std::uint8_t* weights, int steps) const {
    Square square = squares<HALVES>(weights, steps);
    TileSums* mixed = TileRoom::sums(room_.mixed, 4 * std::size_t(width_ / POSITIONS));
    const std::size_t columns = std::size_t(steps_) * PANEL_STEP;
    for (int i = 0; i < width_ / POSITIONS; i++) {
      square.inputs[0] = values_ + 2 * i * columns, square.inputs[1] = square.inputs[0] + columns;
      square.sums = mixed + 4 * i;
      multiply_tiles<false, HALVES, 2>(square, {nullptr, 0});
    }
    return mixed;
  }

  // A Square with panels (HALVES, steps) as weights.
  template <int HALVES>
  static Square squares(const std::uint8_t* panels, int steps) {
    Square square;
    square.weights[0] = panels, square.weights[1] = panels + std::size_t(HALVES - 1) * steps * PANEL_STEP;
    square.stride = STEP_BYTES, square.apart = PANEL_STEP;
    square.input_rows[0] = square.input_rows[1] = SIDE;
    square.steps = steps, square.begun = false;
    return square;
  }

  int width_, steps_;
  TileRoom& room_;
  std::uint8_t *keys_, *values_;
};

// `count` queries of one key head, in the order of the positions that they see.
inline void attend_by_tiles(const TileQuery* queries, int count, HeadCells<Bf16> keys, HeadCells<Bf16> values,
                            int width) {
  const int least = queries[0].count, most = queries[count - 1].count;
  if (all_finite(values.cells + std::size_t(least) * width, (most - least) * width))
    return TilePrompt(keys, values, most, width).attend(queries, count);
  // A weight of 0 times a number that is not finite is not 0: compute each position by itself.
  for (int first = 0, last; first < count; first = last) {
    for (last = first + 1; last < count && queries[last].count == queries[first].count;) last++;
    TilePrompt(keys, values, queries[first].count, width).attend(queries + first, last - first);
  }
}

// Like `attend` of attention.h, for the heads of one position.
inline void attend_by_tiles(const Bf16* queries, int heads, HeadCells<Bf16> keys, HeadCells<Bf16> values,
                            const NextHead& next, int count, int width, float* out) {
  const TileStep step(keys, values, next, count, width);
  for (; heads > 0; heads -= SIDE, queries += SIDE * width, out += SIDE * width)
    step.attend(queries, std::min(heads, SIDE), out);
}

#endif

}  // namespace logitd
