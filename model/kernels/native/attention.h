// Attention of one new position over a slot of the KV cache, one key head with its query heads.
//
// Keys and values are (positions, width) in float32 or bfloat16; `width` a multiple of 16. Everything
// is accumulated in float32, position after position.
#pragma once

#include "vectors.h"

namespace logitd {

constexpr int MAX_HEAD_VECTORS = 16;  // head_dim up to 256

// scores[p] = query . keys[p] for p in [0, count).
template <class Cell>
inline void scores_of(const float* query, const Cell* keys, int count, int width, float* scores) {
  int vectors = width / LANES;
  Floats q[MAX_HEAD_VECTORS];
  for (int i = 0; i < vectors; i++) q[i] = load(query + i * LANES);
  for (int p = 0; p < count; p += LANES) {
    Floats products[LANES] = {};
    int here = count - p < LANES ? count - p : LANES;
    for (int j = 0; j < here; j++) {
      const Cell* key = keys + std::size_t(p + j) * width;
      Floats product = {};
      for (int i = 0; i < vectors; i++) product = fused(q[i], load(key + i * LANES), product);
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

// out[0, width) = the sum of values[p] * weights[p].
template <class Cell>
inline void mix(const float* weights, const Cell* values, int count, int width, float* out) {
  int vectors = width / LANES;
  Floats mixed[MAX_HEAD_VECTORS] = {};
  for (int p = 0; p < count; p++) {
    Floats weight = all(weights[p]);
    const Cell* value = values + std::size_t(p) * width;
    for (int i = 0; i < vectors; i++) mixed[i] = fused(weight, load(value + i * LANES), mixed[i]);
  }
  for (int i = 0; i < vectors; i++) store(out + i * LANES, mixed[i]);
}

// `queries` are the heads that share this key head, (heads, width), already scaled; `scores` has room
// for `count` rounded up to 16.
template <class Cell>
inline void attend(const float* queries, int heads, const Cell* keys, const Cell* values, int count,
                   int width, float* scores, float* out) {
  for (int head = 0; head < heads; head++) {
    scores_of(queries + head * width, keys, count, width, scores);
    softmax(scores, count);
    mix(scores, values, count, width, out + head * width);
  }
}

}  // namespace logitd
