// Quantize: rows of weights to int8 with a scale for each row, or to int4 as I4 of dot.h reads it. The same
// integers and scales, bit for bit, as quantize.py's plain forms give.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "dot.h"

namespace logitd {

constexpr float SMALLEST_SCALE = 1e-30f;  // where there is nothing to scale

// What a row became: its scale, and what its integers sum to, int4's times their scales.
struct RoundedRow {
  float scale;
  std::int32_t sum;
};

// The largest magnitude of numbers; lanes of their own, because a compiler may not divide a maximum.
inline float largest_magnitude(const float* numbers, int count) {
  constexpr int LANES = 32;
  float lanes[LANES] = {}, largest = 0;
  int i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; lane++) {
      float magnitude = std::fabs(numbers[i + lane]);
      lanes[lane] = magnitude > lanes[lane] ? magnitude : lanes[lane];
    }
  for (; i < count; i++) largest = std::max(largest, std::fabs(numbers[i]));
  for (float lane : lanes) largest = std::max(largest, lane);
  return largest;
}

// A row of `width` weights to `stored`, as many int8. The weights become what those stand for.
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

// A block of int4: up to BLOCK weights, of which those at 2s and 2s + 1 of each HALF share the scale s.
class Int4Block {
 public:
  static constexpr int HALF = I4::STEP / 2, BLOCK = 4 * I4::STEP;

  // `count` weights; zeros follow up to whole steps.
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

  // Into `stored`, with scales that are integers times `scale`; `count` weights of `row` become what that
  // stands for. What the integers times their scales sum to.
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
        // The farthest is -8 by definition, wherever its scale was rounded to.
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
  float farthest[HALF];  // of what shares a scale, the number of the largest magnitude
};

// A row of `width` weights to `stored`, I4::row_bytes(width) bytes, with scales of up to `most` times the
// row's own. The weights become what that stands for.
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
