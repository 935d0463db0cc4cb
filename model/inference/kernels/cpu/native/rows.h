// Rows: operations on one activation row: norms, rotation, activations, and the conversion into the format
// of the next matrix.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "linear.h"
#include "vectors.h"

namespace logitd {

// A norm's parameters (width); `bias` may be null. `centered` subtracts the mean (LayerNorm).
struct Norm {
  const float* weight;
  const float* bias;
  float eps;
  std::int32_t centered;
};

inline float row_sum(const float* row, int width) {
  Floats total = {};
  int whole = width / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) total += load(row + i);
  float result = sum(total);
  for (int i = whole; i < width; i++) result += row[i];
  return result;
}

inline float row_squares(const float* row, int width, float mean) {
  Floats total = {};
  int whole = width / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) {
    Floats off = load(row + i) - mean;
    total = fused(off, off, total);
  }
  float result = sum(total);
  for (int i = whole; i < width; i++) result += (row[i] - mean) * (row[i] - mean);
  return result;
}

// to[0, width) = the norm of from[0, width), which may be the same row.
inline void normalize(const Norm& norm, const float* from, float* to, int width) {
  float mean = norm.centered ? row_sum(from, width) / float(width) : 0.0f;
  float scale = 1.0f / std::sqrt(row_squares(from, width, mean) / float(width) + norm.eps);
  int whole = width / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) {
    Floats values = (load(from + i) - mean) * scale * load(norm.weight + i);
    store(to + i, norm.bias ? values + load(norm.bias + i) : values);
  }
  for (int i = whole; i < width; i++) {
    float value = (from[i] - mean) * scale * norm.weight[i];
    to[i] = norm.bias ? value + norm.bias[i] : value;
  }
}

// row[0, width) = cap * tanh(row / cap)
inline void softcap(float* row, int width, float cap) {
  const Floats limit = all(cap), inverse = all(1.0f / cap);
  const auto capped = [&](Floats values) { return limit * tanh(values * inverse); };
  const int whole = width / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) store(row + i, capped(load(row + i)));
  if (whole < width) {
    float rest[LANES] = {};
    std::memcpy(rest, row + whole, sizeof(float) * (width - whole));
    store(rest, capped(load(rest)));
    std::memcpy(row + whole, rest, sizeof(float) * (width - whole));
  }
}

enum Activation : std::int32_t {
  GELU_TANH = 0,
  GELU = 1,
  RELU = 2,
  RELU_SQUARED = 3,
  SWIGLU = 4,
};

inline Floats activated(Activation kind, Floats x) {
  switch (kind) {
    case GELU_TANH:  // (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
      return damped(x, x * fused(x * x, all(-0.1029432396f), all(-2.302208198f)));
    case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case RELU: return max(x, Floats{});
    case RELU_SQUARED: return max(x, Floats{}) * max(x, Floats{});
    case SWIGLU: return damped(x, -1.44269504088896341f * x);
  }
  return x;
}

// to[0, width) = the activation of from[0, width), which may be the same row. For swiglu `from` holds the
// gate, then the gated values. Rows are padded to whole vectors.
template <class To>
inline void activate(Activation kind, const float* from, To* to, int width) {
  for (int i = 0; i < width; i += LANES) {
    Floats values = activated(kind, load(from + i));
    if (kind == SWIGLU) values *= load(from + width + i);
    store(to + i, values);
  }
}

#if defined(STRIPS)

// Outputs of strips that activate the products as they are computed.
template <class Cell>
struct ActivatedRows {
  Cell* to;
  int pitch;
  Activation kind;

  void put(int row, int column, __mmask16 lanes, __m512 values) const {
    Cell* at = to + std::size_t(row) * pitch + column;
    const Floats wide = activated(kind, (Floats)values);
    if constexpr (std::is_same_v<Cell, float>) return _mm512_mask_storeu_ps(at, lanes, (__m512)wide);
    else {
      Bf16 narrow[LANES];
      store(narrow, wide);
      const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow));
      _mm256_mask_storeu_epi16(at, lanes, halves);
    }
  }
};

#endif

// True if products with a matrix can be activated as they are computed. A gate's cannot, because the gated
// values come from other weights.
inline bool activates(const Matrix& matrix, Activation kind) {
  return in_strips(matrix.kind) && kind != SWIGLU;
}

// Rotary positions, half split: channel i is paired with channel i + width / 2.
inline void rotate(float* head, const float* cos, const float* sin, int width) {
  int half = width / 2;
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// The largest magnitude of a row. NaN may be skipped.
inline float largest_magnitude(const float* row, int width) {
  Floats mosts = {};
  int whole = width / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) {
    Floats values = load(row + i);
    mosts = max(mosts, max(values, -values));
  }
  float most = largest(mosts);
  for (int i = whole; i < width; i++) most = std::max(most, std::fabs(row[i]));
  return most;
}

// to[0, width) = a row in 127 steps to either side of zero; `width` is a multiple of 16. Returns the size of
// a step. If a number of the row is not finite, neither is the size, so that the fault stays visible.
inline float put_steps(const float* from, int width, std::int8_t* to) {
  Floats mosts = {}, lost = {};
  for (int i = 0; i < width; i += LANES) {
    Floats values = load(from + i);
    mosts = max(mosts, max(values, -values));
    lost = fused(values, Floats{}, lost);  // 0 or NaN
  }
  float most = largest(mosts), inverse = most > 0.0f ? 127.0f / most : 0.0f;
  for (int i = 0; i < width; i += LANES) {
    Floats steps = (load(from + i) * inverse + ROUND) - ROUND;
    store_bytes(reinterpret_cast<std::uint8_t*>(to) + i, converted<Ints>(steps));
  }
  return most / 127.0f + sum(lost);
}

// From this number of rows on, a thread converts SIDE of them at a time; there is enough work for all threads.
constexpr int MANY_ROWS = 4 * SIDE;

// Rows of activations in the format of the matrices that they meet: (count, pitch), zeros after `width`. The
// formats for int8 and int4 are the same.
class Converted {
 public:
  Converted(int kind, int rows, int width)
      : kind_(cells_of(kind)), as_they_are_(in_strips(kind)) {
    int step = kind_ == KIND_F32 ? F32::STEP : kind_ == KIND_BF16 ? B16::STEP : I8::STEP;
    static_assert(I8::STEP == I4::STEP);
    int steps = (width + step - 1) / step;
    // Rows that are read together are an odd number of lines apart, so that the nearest cache has places for
    // all of them.
    if (as_they_are_) steps |= 1;
    pitch_ = steps * step;
    int item = kind_ == KIND_F32 ? 4 : kind_ == KIND_BF16 ? 2 : 1;
    values_.resize(std::size_t(rows) * pitch_ * item, 0);
    // Also for KIND_COMPRESSED: a matrix that could not be compressed needs packed rows.
    if (has_tiles() && kind_ != KIND_F32 && kind != KIND_INT8_STRIPS) packed_.resize(values_.size());
    if (kind == KIND_INT4) sums_.resize(std::size_t(rows) * I4::sums(width), 0);
    scales_.resize(rows, 0.0f);
  }

  void put(int row, const float* from, int width) {
    switch (kind_) {
      case KIND_F32: return put_floats(row, from, width);
      case KIND_BF16: return put_bf16(row, from, width);
      case KIND_INT8:
      case KIND_INT4: return put_int8(row, from, width);
    }
  }

  // Convert the activation of `row`, which may change. One pass, unless a scale has to be found first.
  void put_activated(int place, Activation kind, float* row, int width) {
    switch (kind_) {
      case KIND_F32: return put_activated<float>(place, kind, row, width);
      case KIND_BF16: return put_activated<Bf16>(place, kind, row, width);
      case KIND_INT8:
      case KIND_INT4: activate(kind, row, row, width); return put_int8(place, row, width);
    }
  }

  // The activations of `inputs` times a matrix that `activates`. If rows have scales, the results go to
  // `floats`, with `pitch` between rows, and the caller has to `put` them.
  void activated_products([[maybe_unused]] Pool& pool, [[maybe_unused]] const Matrix& matrix,
                          [[maybe_unused]] const Inputs& inputs, [[maybe_unused]] Activation kind,
                          [[maybe_unused]] float* floats, [[maybe_unused]] int pitch) {
#if defined(STRIPS)
    if (matrix.kind == KIND_INT8_STRIPS)
      return int8_strip_products(pool, matrix, inputs, ActivatedRows<float>{floats, pitch, kind});
#endif
#if defined(TILES)
    const ActivatedRows<Bf16> rows = {at<Bf16>(0), pitch_, kind};
    strip_products<CompressedStrip>(pool, matrix, inputs, rows);
#endif
  }

  bool has_scales() const { return kind_ == KIND_INT8 || kind_ == KIND_INT4; }

  // True if the thread that converts rows has to pack them.
  bool packs(int count) const { return !as_they_are_ && !packed_.empty() && count >= MANY_ROWS; }

  // Pack up to SIDE rows from `first` on for tiles.
  void pack([[maybe_unused]] int first, [[maybe_unused]] int count) {
#if defined(TILES)
    const std::size_t bytes = values_.size() / scales_.size();
    pack_rows(values_.data() + first * bytes, bytes, count, 0, int(bytes) / STEP_BYTES,
              packed_.data() + first * bytes);
#endif
  }

  Inputs inputs(int count) {
    return {values_.data(), scales_.data(), sums_.data(), packed_.data(), count, pitch_, packs(count)};
  }

 private:
  // The format of the activations for a kind of matrix.
  static int cells_of(int kind) {
    return kind == KIND_COMPRESSED ? KIND_BF16 : kind == KIND_INT8_STRIPS ? KIND_INT8 : kind;
  }

  template <class Cell>
  Cell* at(int row) {
    return reinterpret_cast<Cell*>(values_.data()) + std::size_t(row) * pitch_;
  }

  template <class Cell>
  void put_activated(int place, Activation kind, const float* row, int width) {
    Cell* to = at<Cell>(place);
    activate(kind, row, to, width);
    std::fill(to + width, to + (width + LANES - 1) / LANES * LANES, Cell{});
  }

  void put_floats(int row, const float* from, int width) {
    std::memcpy(at<float>(row), from, sizeof(float) * width);
  }

  void put_bf16(int row, const float* from, int width) {
    Bf16* to = at<Bf16>(row);
    int whole = width / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) store(to + i, load(from + i));
    if (whole < width) {
      float rest[LANES] = {};
      std::memcpy(rest, from + whole, sizeof(float) * (width - whole));
      store(to + whole, load(rest));
    }
  }

  // Round to the nearest of 127 steps to either side of ZERO, by the row's largest magnitude.
  void put_int8(int row, const float* from, int width) {
    std::uint8_t* to = values_.data() + std::size_t(row) * pitch_;
    const float most = largest_magnitude(from, width), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    scales_[row] = most / 127.0f;
    int whole = width / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
      Floats steps = (load(from + i) * inverse + ROUND) - ROUND;
      store_bytes(to + i, converted<Ints>(steps) + ZERO);
    }
    for (int i = whole; i < width; i++)
      to[i] = std::uint8_t(int((from[i] * inverse + ROUND) - ROUND) + ZERO);
#if defined(HALVES)
    if (kind_ != KIND_INT4) return;
    const int steps = I4::steps(width);
    std::int16_t* sums = sums_.data() + std::size_t(row) * I4::sums(width);
    for (int step = 0; step < steps; step += I4::BLOCK_STEPS, sums += I4::SCALES)
      I4::put_sums(to + step * I4::STEP, std::min(I4::BLOCK_STEPS, steps - step), sums);
#endif
  }

  int kind_;
  bool as_they_are_;  // products read the rows unpacked
  int pitch_;
  Buffer<std::uint8_t> values_, packed_;
  Buffer<std::int16_t> sums_;
  std::vector<float> scales_;
};

}  // namespace logitd
