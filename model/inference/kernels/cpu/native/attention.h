// Attention of new positions over a slot of the KV cache, one key head with its query heads.
//
// Keys and values are (positions, width) in float32, bfloat16, or int8 with a scale for each
// position. Queries are float32 for int8, otherwise in the same format. `width` is a multiple of
// 16. Sums are float32, in the order of the positions, separately for each query. `attend` serves
// one position; `attend_together` serves a few consecutive ones, which share loads. A query has the
// same bits in both. With AMX most heads in bfloat16 attend by tile_attention.h instead.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "dot.h"
#include "vectors.h"

namespace logitd {

constexpr int MAX_HEAD_VECTORS = 16;  // head_dim up to 256

// Distance from the keys or values in use to those being prefetched. A head reads two streams; towards the
// end of the first, the beginning of the second is prefetched. Measured with 32 sequences of 300 positions
// in bfloat16: a step is 1.09 times as fast with 12 to 32 KB as with 4 KB.
constexpr int CELLS_AHEAD_BYTES = 16384;

// The address to prefetch at position p of a stream of `count` positions, after which `following`
// is read.
template <class Cell>
inline const char* cells_ahead(const Cell* stream, int p, int count, const Cell* following, int width) {
  const int place = p + std::min(CELLS_AHEAD_BYTES / (width * int(sizeof(Cell))), count);
  const Cell* at = place < count ? stream + std::size_t(place) * width
                                 : following + std::size_t(place - count) * width;
  return reinterpret_cast<const char*>(at);
}

template <int V, class Cell>
inline void prefetch_cells(const Cell* stream, int p, int count, const Cell* following) {
  constexpr int width = V * LANES, bytes = width * int(sizeof(Cell));
  const char* at = cells_ahead(stream, p, count, following, width);
  for (int i = 0; i < bytes; i += int(LINE)) __builtin_prefetch(at + i, 0, SECOND_CACHE);
}

// One head's keys or values in a slot: (positions, width), and for int8 the scale of each position.
template <class Cell>
struct HeadCells {
  const Cell* cells;
  const float* scales;

  // The cells from a position on.
  HeadCells from(int p, int width) const {
    return {cells + std::size_t(p) * width, scales == nullptr ? nullptr : scales + p};
  }

  // The factor for a position's stored numbers, given its weight.
  float weighed(int p, float weight) const {
    if constexpr (std::is_same_v<Cell, std::int8_t>) return weight * scales[p];
    else return weight;
  }
};

template <class Cell>
using QueryCell = std::conditional_t<std::is_same_v<Cell, std::int8_t>, float, Cell>;

// A query or a key of V vectors, split into COUNT parts that are multiplied at once. Each part is
// PIECES registers.
template <class Cell, int V>
struct Parts : F32 {
  static constexpr int COUNT = V;
  using Cells = Piece;

  template <class From>
  static Part part(const From* from, int i) { return load(from + i * LANES); }
  template <class From>
  static Cells cells(const From* from, int i) { return load<Piece>(from + i * PIECE); }
};

// If V is odd, the last part is half a part: the numbers after it belong to the next position.
template <int V>
struct Parts<Bf16, V> : B16 {
  static constexpr int COUNT = (V + 1) / 2;
  using Cells = WordPiece;

  static Part part(const Bf16* from, int i) {
    Part part = {};
    std::memcpy(&part, from + i * STEP, 2 * i + 1 < V ? sizeof part : sizeof part / 2);
    return part;
  }
  static Cells cells(const Bf16* from, int i) {
    constexpr int count = 2 * PIECE;
    const int left = V * LANES - i * count;
    Cells cells = {};
    if (left > 0) std::memcpy(&cells, from + i * count, left < count ? sizeof cells / 2 : sizeof cells);
    return cells;
  }
};

// scores[p] = query . keys[p] for p in [0, count), V vectors wide. AHEAD: prefetch the values at the end.
template <int V, bool AHEAD, class Cell>
inline void scores_of(const QueryCell<Cell>* query, HeadCells<Cell> keys, const Cell* values, int count,
                      float* scores) {
  using Parts = Parts<Cell, V>;
  typename Parts::Cells q[Parts::COUNT * PIECES];
#pragma GCC unroll 64
  for (int i = 0; i < Parts::COUNT * PIECES; i++) q[i] = Parts::cells(query, i);
  for (int p = 0; p < count; p += PIECE) {
    Piece products[PIECE] = {};
    int here = count - p < PIECE ? count - p : PIECE;
    for (int j = 0; j < here; j++) {
      const Cell* key = keys.cells + std::size_t(p + j) * V * LANES;
      if (AHEAD) prefetch_cells<V>(keys.cells, p + j, count, values);
      Piece product[PIECES] = {};
#pragma GCC unroll 64
      for (int i = 0; i < Parts::COUNT * PIECES; i++)
        product[i % PIECES] = Parts::add(product[i % PIECES], Parts::cells(key, i), q[i]);
      products[j] = folded(product);
    }
    Piece found = sums(products);
    if constexpr (std::is_same_v<Cell, std::int8_t>) found = found * load<Piece>(keys.scales + p);
    store(scores + p, found);
  }
}

// Replace scores[hidden, count) by their softmax, and the scores before them and in the rest of the last
// vector by 0. Whole vectors of hidden positions are skipped, so they change no bits.
inline void softmax(float* scores, int hidden, int count) {
  const int skipped = hidden / LANES * LANES;
  std::fill(scores, scores + skipped, 0.0f);
  scores += skipped, hidden -= skipped, count -= skipped;
  int padded = (count + LANES - 1) / LANES * LANES;
  std::fill(scores, scores + hidden, -1e30f);
  for (int p = count; p < padded; p++) scores[p] = -1e30f;
  Floats high = load(scores);
  for (int p = LANES; p < padded; p += LANES) high = max(high, load(scores + p));
  Floats most = all(largest(high)), total = {};
  for (int p = 0; p < padded; p += LANES) {
    Floats weights = exp(load(scores + p) - most);
    total += weights;
    store(scores + p, weights);
  }
  std::fill(scores, scores + hidden, 0.0f);
  for (int p = count; p < padded; p++) scores[p] = 0.0f;
  Floats scale = all(1.0f / sum(total));
  for (int p = 0; p < padded; p += LANES) store(scores + p, load(scores + p) * scale);
}

// out[0, V * LANES) = the sum of values[p] * weights[p] for p in [hidden, count). AHEAD: prefetch the next
// keys at the end.
template <int V, bool AHEAD, class Cell>
inline void mix(const float* weights, HeadCells<Cell> values, int hidden, int count, const Cell* next_keys,
                float* out) {
  Piece mixed[V * PIECES] = {};
  for (int p = hidden; p < count; p++) {
    Piece weight = all<Piece>(values.weighed(p, weights[p]));
    if (AHEAD) prefetch_cells<V>(values.cells, p, count, next_keys);
    const Cell* value = values.cells + std::size_t(p) * V * LANES;
#pragma GCC unroll 64
    for (int i = 0; i < V * PIECES; i++)
      mixed[i] = fused(weight, load<Piece>(value + i * PIECE), mixed[i]);
  }
#pragma GCC unroll 64
  for (int i = 0; i < V * PIECES; i++) store(out + i * PIECE, mixed[i]);
}

// `queries` are the scaled heads of one position that share this key head, (heads, width). The
// first `hidden` of `count` positions are not visible. `scores` has room for `count` rounded up to
// 16. AHEAD: the cells are in memory, not in a cache, and `next_keys` are read next. Each width has
// separate code, so that sums stay in registers.
template <bool AHEAD, class Cell>
inline void attend(const QueryCell<Cell>* queries, int heads, HeadCells<Cell> keys,
                   HeadCells<Cell> values, const Cell* next_keys, int hidden, int count, int width,
                   float* scores, float* out) {
  with_constant<MAX_HEAD_VECTORS>(width / LANES, [&](auto constant) {
    constexpr int V = constant;
    for (int head = 0; head < heads; head++) {
      scores_of<V, AHEAD>(queries + head * V * LANES, keys, values.cells, count, scores);
      softmax(scores, hidden, count);
      const Cell* following = head + 1 < heads ? keys.cells : next_keys;
      mix<V, AHEAD>(scores, values, hidden, count, following, out + head * V * LANES);
    }
  });
}

// One head of one position.
template <class Cell>
struct Query {
  const QueryCell<Cell>* query;  // (width), scaled
  int hidden;     // positions before the first visible one
  int count;      // positions up to the last visible one
  float* scores;  // room for `count` of the last query rounded up to 16; holds the weights afterwards
  float* out;     // (width)
};

// The scores of Q queries for the positions that the last of them sees, and up to 15 more.
template <int V, int Q, class Cell>
inline void scores_together(const Query<Cell>* queries, HeadCells<Cell> keys) {
  constexpr int SIDE = LANES / Q;  // keys at a time
  using Parts = Parts<Cell, V>;
  for (int p = 0; p < queries[Q - 1].count; p += SIDE) {
    Floats products[LANES] = {};
    const Cell* at = keys.cells + std::size_t(p) * V * LANES;
#pragma GCC unroll 16
    for (int i = 0; i < Parts::COUNT; i++) {
#pragma GCC unroll 16
      for (int k = 0; k < SIDE; k++) {
        typename Parts::Part key = Parts::part(at + k * V * LANES, i);
#pragma GCC unroll 16
        for (int q = 0; q < Q; q++)
          products[q * SIDE + k] =
              Parts::add(products[q * SIDE + k], key, Parts::part(queries[q].query, i));
      }
    }
    float scores[LANES];
    store(scores, sums(products));
    for (int q = 0; q < Q; q++)
      for (int k = 0; k < SIDE; k++)
        queries[q].scores[p + k] = keys.weighed(p + k, scores[q * SIDE + k]);
  }
}

// The weighted values of Q queries, in the order of the positions that they see.
template <int V, int Q, class Cell>
inline void mix_together(const Query<Cell>* queries, HeadCells<Cell> values) {
  Floats mixed[Q][V] = {};
  const int begin = std::min(queries[Q - 1].hidden, queries[0].count), end = queries[0].count;
  const auto add = [&](int q, int first, int last) {  // positions that not all of the queries see
    for (int p = first; p < last; p++)
      for (int i = 0; i < V; i++)
        mixed[q][i] = fused(all(values.weighed(p, queries[q].scores[p])),
                            load(values.cells + (std::size_t(p) * V + i) * LANES), mixed[q][i]);
  };
  for (int q = 0; q < Q; q++) add(q, queries[q].hidden, begin);
  for (int p = begin; p < end; p++) {
    const Cell* value = values.cells + std::size_t(p) * V * LANES;
    Floats weights[Q];
    for (int q = 0; q < Q; q++) weights[q] = all(values.weighed(p, queries[q].scores[p]));
#pragma GCC unroll 16
    for (int i = 0; i < V; i++) {
      Floats part = load(value + i * LANES);
#pragma GCC unroll 16
      for (int q = 0; q < Q; q++) mixed[q][i] = fused(weights[q], part, mixed[q][i]);
    }
  }
  for (int q = 0; q < Q; q++) {
    add(q, std::max(end, queries[q].hidden), queries[q].count);
    for (int i = 0; i < V; i++) store(queries[q].out + i * LANES, mixed[q][i]);
  }
}

template <int V, int Q, class Cell>
inline void attend_queries(const Query<Cell>* queries, int count, HeadCells<Cell> keys,
                           HeadCells<Cell> values) {
  int first = 0;
  for (; first + Q <= count; first += Q) {
    scores_together<V, Q>(queries + first, keys);
    for (int q = first; q < first + Q; q++) softmax(queries[q].scores, queries[q].hidden, queries[q].count);
    mix_together<V, Q>(queries + first, values);
  }
  if constexpr (Q > 1) attend_queries<V, 1>(queries + first, count - first, keys, values);
}

// `count` queries of one key head, in the order of the positions that they see. The cache must extend 15
// positions beyond the last one, because scores may be computed up to there.
template <class Cell>
inline void attend_together(const Query<Cell>* queries, int count, HeadCells<Cell> keys,
                            HeadCells<Cell> values, int width) {
#if defined(__AVX512F__)
  with_constant<MAX_HEAD_VECTORS>(width / LANES, [&](auto constant) {
    constexpr int V = constant;
    constexpr int Q = V <= 4 ? 4 : V <= 8 ? 2 : 1;  // as many as keep their sums in registers
    attend_queries<V, Q>(queries, count, keys, values);
  });
#else  // there are too few registers for more than one
  for (const Query<Cell>* q = queries; q < queries + count; q++)
    attend<false>(q->query, 1, keys, values, keys.cells, q->hidden, q->count, width, q->scores, q->out);
#endif
}

}  // namespace logitd
