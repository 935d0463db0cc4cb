// Quantize: rows of weights to int8 with a scale for each row, or to int4 in the layout of I4 in dot.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "dot.h"
#include "rows.h"

namespace logitd {

constexpr float SMALLEST_SCALE = 1e-30f;  // of a row of zeros

// A row's scale and the sum of its integers, in int4 times their scales.
struct RoundedRow {
  float scale;
  std::int32_t sum;
};

// Round a row of `width` weights in place; its integers go to `stored`.
inline RoundedRow round_int8(float* row, int width, std::int8_t* stored) {
  float scale = std::max(largest_magnitude(row, width), SMALLEST_SCALE) / 127;
  std::int32_t sum = 0;
  for (int i = 0; i < width; i++) {
    float value = std::rint(row[i] / scale) + 0.f;  // -0 is 0, as it is in an integer
    stored[i] = std::int8_t(value);
    sum += std::int32_t(value);
    row[i] = value * scale;
  }
  return {scale, sum};
}

// A block of int4: up to BLOCK weights. Those at 2 s and 2 s + 1 of each HALF share scale s.
class Int4Block {
 public:
  static constexpr int HALF = I4::STEP / 2, BLOCK = 4 * I4::STEP;

  // `count` weights, filled up with zeros to whole steps.
  Int4Block(const float* row, int count) : steps((count + I4::STEP - 1) / I4::STEP) {
    std::copy_n(row, count, weights);
    std::fill(weights + count, weights + steps * I4::STEP, 0.f);
    float least[HALF], most[HALF];
    std::copy_n(weights, HALF, least);
    std::copy_n(weights, HALF, most);
    for (int half = 1; half < 2 * steps; half++)
      for (int i = 0; i < HALF; i++) {
        float weight = weights[half * HALF + i];
        least[i] = weight < least[i] ? weight : least[i];
        most[i] = weight > most[i] ? weight : most[i];
      }
    for (int i = 0; i < HALF; i += 2) {
      float low = std::min(least[i], least[i + 1]), high = std::max(most[i], most[i + 1]);
      farthest[i] = farthest[i + 1] = -low > high ? low : high;
    }
  }

  // Write the block to `stored` with scales that are integers times `scale`, and its rounded weights to
  // `row`. Returns the sum of the integers times their scales.
  std::int32_t put(float scale, std::uint8_t* stored, float* row, int count) {
    float multiples[HALF], real[HALF];
    for (int i = 0; i < HALF; i++) {
      multiples[i] = std::rint(farthest[i] / -8.f / scale) + 0.f;
      real[i] = multiples[i] == 0 ? std::numeric_limits<float>::infinity() : multiples[i] * scale;
    }
    for (int i = 0; i < HALF; i += 2) *stored++ = std::uint8_t(std::int8_t(multiples[i]));
    float sums[HALF] = {};
    for (int half = 0; half < 2 * steps; half++)
      for (int i = 0; i < HALF; i++) {
        float& weight = weights[half * HALF + i];
        float value = std::rint(weight / real[i]) + 0.f;
        value = value < -8.f ? -8.f : value > 7.f ? 7.f : value;
        // The weight farthest from zero is -8 by definition, even if its scale was rounded.
        weight = weight == farthest[i] ? -8.f : value;
        sums[i] += weight;
      }
    for (int step = 0; step < steps; step++) {
      const float* pairs = weights + step * I4::STEP;
      for (int i = 0; i < HALF; i++)
        stored[i] = std::uint8_t(int(pairs[i]) + 8) | std::uint8_t((int(pairs[HALF + i]) + 8) << 4);
      stored += HALF;
    }
    std::int32_t sum = 0;
    for (int i = 0; i < HALF; i++) sum += std::int32_t(sums[i]) * std::int32_t(multiples[i]);
    for (int i = 0; i < steps * I4::STEP; i++) weights[i] = weights[i] * multiples[i % HALF] * scale;
    std::copy_n(weights, count, row);
    return sum;
  }

 private:
  int steps;
  float weights[BLOCK];
  float farthest[HALF];  // the number of the largest magnitude among those that share a scale
};

// Round a row of `width` weights in place, with scales of up to `most` times the row's own. Its integers go
// to `stored`, I4::row_bytes(width) bytes.
inline RoundedRow round_int4(float* row, int width, int most, std::uint8_t* stored) {
  float scale = std::max(largest_magnitude(row, width) / 8, SMALLEST_SCALE) / float(most);
  std::int32_t sum = 0;
  for (int start = 0; start < width; start += Int4Block::BLOCK) {
    int count = std::min(width - start, Int4Block::BLOCK);
    sum += Int4Block(row + start, count).put(scale, stored, row + start, count);
    stored += I4::row_bytes(count);
  }
  return {scale, sum};
}

}  // namespace logitd
