// Attention of one new position over a slot of the KV cache, one key head with its query heads.
//
// Keys and values are (positions, width) in float32 or bfloat16; `width` a multiple of 16. Everything
// is accumulated in float32, position after position.
#pragma once

#include "buffer.h"
#include "vectors.h"

namespace logitd {

constexpr int MAX_HEAD_VECTORS = 16;  // head_dim up to 256

// How far ahead of where they are used keys and values are asked for. A head's are two streams, one
// behind the other: towards the end of the first, the beginning of the second is asked for.
constexpr int CELLS_AHEAD_BYTES = 4096;

template <int V, class Cell>
inline void ask(const Cell* stream, int p, int count, const Cell* following) {
  constexpr int width = V * LANES, bytes = width * int(sizeof(Cell));
  constexpr int ahead = CELLS_AHEAD_BYTES / bytes;
  const Cell* at = p + ahead < count ? stream + std::size_t(p + ahead) * width
                                     : following + std::size_t(p + ahead - count) * width;
  for (int i = 0; i < bytes; i += int(LINE))
    __builtin_prefetch(reinterpret_cast<const char*>(at) + i);
}

// scores[p] = query . keys[p] for p in [0, count); V vectors wide. The values are asked for at the end.
template <int V, class Cell>
inline void scores_of(const float* query, const Cell* keys, const Cell* values, int count,
                      float* scores) {
  Floats q[V];
  for (int i = 0; i < V; i++) q[i] = load(query + i * LANES);
  for (int p = 0; p < count; p += LANES) {
    Floats products[LANES] = {};
    int here = count - p < LANES ? count - p : LANES;
    for (int j = 0; j < here; j++) {
      const Cell* key = keys + std::size_t(p + j) * V * LANES;
      ask<V>(keys, p + j, count, values);
      Floats product = {};
      for (int i = 0; i < V; i++) product = fused(q[i], load(key + i * LANES), product);
      products[j] = product;
    }
    store(scores + p, sums(products));
  }
}

// scores[0, count) = their softmax; what is behind them up to a whole vector becomes 0.
inline void softmax(float* scores, int count) {
  int padded = (count + LANES - 1) / LANES * LANES;
  for (int p = count; p < padded; p++) scores[p] = -1e30f;
  Floats high = load(scores);
  for (int p = LANES; p < padded; p += LANES) high = max(high, load(scores + p));
  Floats most = all(largest(high)), total = {};
  for (int p = 0; p < padded; p += LANES) {
    Floats weights = exp(load(scores + p) - most);
    total += weights;
    store(scores + p, weights);
  }
  for (int p = count; p < padded; p++) scores[p] = 0.0f;
  Floats scale = all(1.0f / sum(total));
  for (int p = 0; p < padded; p += LANES) store(scores + p, load(scores + p) * scale);
}

// out[0, V * LANES) = the sum of values[p] * weights[p].
template <int V, class Cell>
inline void mix(const float* weights, const Cell* values, int count, const Cell* next_keys,
                float* out) {
  Floats mixed[V] = {};
  for (int p = 0; p < count; p++) {
    Floats weight = all(weights[p]);
    ask<V>(values, p, count, next_keys);
    const Cell* value = values + std::size_t(p) * V * LANES;
    for (int i = 0; i < V; i++) mixed[i] = fused(weight, load(value + i * LANES), mixed[i]);
  }
  for (int i = 0; i < V; i++) store(out + i * LANES, mixed[i]);
}

template <int V, class Cell>
inline void attend_heads(const float* queries, int heads, const Cell* keys, const Cell* values,
                         const Cell* next_keys, int count, float* scores, float* out) {
  for (int head = 0; head < heads; head++) {
    scores_of<V>(queries + head * V * LANES, keys, values, count, scores);
    softmax(scores, count);
    const Cell* following = head + 1 < heads ? keys : next_keys;
    mix<V>(scores, values, count, following, out + head * V * LANES);
  }
}

// `queries` are the heads that share this key head, (heads, width), already scaled; `scores` has room
// for `count` rounded up to 16; `next_keys` are likely to be wanted afterwards. There is a copy for each
// width, so that a sum stays in registers.
template <class Cell, int V = 1>
inline void attend(const float* queries, int heads, const Cell* keys, const Cell* values,
                   const Cell* next_keys, int count, int width, float* scores, float* out) {
  if (width == V * LANES)
    attend_heads<V>(queries, heads, keys, values, next_keys, count, scores, out);
  else if constexpr (V < MAX_HEAD_VECTORS)
    attend<Cell, V + 1>(queries, heads, keys, values, next_keys, count, width, scores, out);
}

}  // namespace logitd
