// Sample: choose a token from a row of logits by temperature, filters and one uniform number.
//
// Steps 7 to 11 of model/inference/sampling/sampler.py, an argmax for temperature 0, and the check that the
// model's logits are finite, for one row. Weights are float64. The twin (model/inference/sampling/sample.py)
// sorts the row; this code finds the edge of a filter by selection among a few ids, which it narrows down by
// the largest logits of spans or by a few sums over all ids. Sums have another order than the twin's, so the
// two may differ if a uniform number or an edge is within a rounding of a boundary. Measured by
// benchmarks/sampling.py: a row of 50,257 logits takes 62 us of a core of a Xeon, with top_k 50 45, with
// top_p 0.9 209 to 351 (examining all ids one by one: five and two times as long).
#pragma once

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "vectors.h"

namespace logitd {

struct SampleRow {
  const float* logits;    // (V): sampled from
  const float* computed;  // (V): the model's own logits, before processing
  double top_p;
  std::uint64_t seed;
  float divisor;          // the temperature; 0 is greedy
  float floor;            // log(min_p): limit of other logits, relative to the largest
  std::int32_t top_k;     // 0: all
  std::uint32_t position, index;
  std::int32_t token_id;  // the result; -1 if `computed` is not finite
};

constexpr float LARGEST_LOGIT = 1e30f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// A random number as a pure function of key and counter; model/inference/sampling/philox.py names the source.
inline double uniform(std::uint64_t seed, std::uint32_t position, std::uint32_t index) {
  std::uint32_t c[4] = {position, index, 0, 0}, k[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    std::uint64_t first = std::uint64_t(0xD2511F53u) * c[0], second = std::uint64_t(0xCD9E8D57u) * c[2];
    c[0] = std::uint32_t(second >> 32) ^ c[1] ^ k[0], c[1] = std::uint32_t(second);
    c[2] = std::uint32_t(first >> 32) ^ c[3] ^ k[1], c[3] = std::uint32_t(first);
    k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
  }
  return (double(c[0] >> 5) * 67108864.0 + double(c[1] >> 6)) / 9007199254740992.0;
}

using Doubles = Vector<double>;
using Longs = decltype(Doubles{} < Doubles{});
constexpr int WIDE = 8;  // doubles in a vector

inline Doubles load_wide(const float* from) { return widened<Doubles>(from); }

// e^x for x <= 0, 0 below -700: x = n ln 2 + r, |r| <= ln 2 / 2, and Taylor's series to r^13, whose remainder
// is below half a unit in the last place.
inline Doubles exp(Doubles x) {
  const auto all = [](double value) { return Doubles{} + value; };
#if !defined(__AVX512F__)
  const Longs gone = x < -700.0;
  x = select(gone, Doubles{}, x);
#endif
  const Doubles round = all(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer
  const Doubles shifted = fused(x, all(1.4426950408889634), round), n = shifted - round;
  Doubles r = fused(n, all(-0.693147180369123816490), x);
  r = fused(n, all(-1.90821492927058770002e-10), r);
  Doubles p = all(1.0 / 6227020800.0);
  constexpr double factorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                   720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0};
#pragma GCC unroll 13
  for (double factorial : factorials) p = fused(p, r, all(1.0 / factorial));
#if defined(__AVX512F__)
  const __mmask8 there = _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(-700.0), _CMP_GE_OQ);
  return (Doubles)_mm512_maskz_scalef_pd(there, (__m512d)p, (__m512d)n);
#else
  // The low bits of `shifted` hold the integer n.
  const Longs power = (as<Longs>(shifted) - 0x4338000000000000 + 1023) << 52;
  return select(gone, Doubles{}, p * as<Doubles>(power));
#endif
}

inline double sum(Doubles v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The ids that the filters keep: those above `least`, and those equal to it up to id `last`.
struct Filter {
  float least = NOTHING;
  int last = std::numeric_limits<int>::max();

  bool keeps(float value, int id) const {
    return value > NOTHING && (value > least || (value == least && id <= last));
  }

  bool keeps_all() const { return least == NOTHING; }
};

class Sampler {
 public:
  // The token of a row, or -1. A sampler keeps its memory, so each thread needs its own.
  int token(const SampleRow& row, int width) {
    if (!finite(row.computed, width)) return -1;
    if (row.divisor == 0) return best(row.logits, width);
    divide(row, width);
    if (!(most_ > NOTHING)) return 0;  // every id is forbidden: no step defines a token
    Filter filter;
    if (row.top_k && row.top_k < width) filter.least = kth(row.top_k);
    if (row.top_p < 1) filter = nucleus(filter, row.top_p);
    float floor = most_ + row.floor;
    if (floor > filter.least) filter = {floor, std::numeric_limits<int>::max()};
    return invert(filter, uniform(row.seed, row.position, row.index));
  }

 private:
  static constexpr int SPAN = 64;  // logits whose weights are summed at once
  static constexpr float FIRST_RANGE = 4;  // below the largest logit: first guess for the edge of a nucleus
  static constexpr int PASSES = 8;         // before ids are examined one by one

  static bool finite(const float* row, int width) {
    // As integers, magnitudes keep their order, and NaN exceeds all of them.
    const Ints magnitude = Ints{} + 0x7FFFFFFF;
    Ints most = {};
    int whole = width / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) most = max(most, as<Ints>(load(row + i)) & magnitude);
    const Floats largest_magnitudes = as<Floats>(most);
    bool all_fine = true;
    for (int i = 0; i < LANES; i++) all_fine &= largest_magnitudes[i] <= LARGEST_LOGIT;
    for (int i = whole; i < width; i++) all_fine &= std::fabs(row[i]) <= LARGEST_LOGIT;
    return all_fine;
  }

  // The lowest id among equals.
  static int best(const float* row, int width) {
    Floats high = all(NOTHING);
    int whole = width / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) high = max(high, load(row + i));
    float most = largest(high);
    for (int i = whole; i < width; i++) most = row[i] > most ? row[i] : most;
    return int(std::find(row, row + width, most) - row) % width;
  }

  // Divide the logits by the temperature, filled up with -inf to whole spans, and find the largest of all and
  // of each span.
  void divide(const SampleRow& row, int width) {
    values_.resize((width + SPAN - 1) / SPAN * SPAN);
    tops_.resize(values_.size() / SPAN);
    Floats most = all(NOTHING);
    for (int s = 0; s < int(tops_.size()); s++) {
      const int first = s * SPAN, last = std::min(first + SPAN, width);
      Floats high = all(NOTHING);
      int i = first;
      for (; i + LANES <= last; i += LANES) {
        const Floats values = load(row.logits + i) / row.divisor;
        high = max(high, values);
        store(values_.data() + i, values);
      }
      float top = largest(high);
      for (; i < last; i++) {
        values_[i] = row.logits[i] / row.divisor;
        top = std::max(top, values_[i]);
      }
      std::fill(values_.begin() + last, values_.begin() + first + SPAN, NOTHING);
      tops_[s] = top;
      most = max(most, high);
    }
    most_ = std::max(largest(most), tops_.back());  // `most` lacks the last ids, less than a vector
  }

  // The k-th largest logit. It is at least the k-th largest of the spans' tops, because k spans have a logit
  // of that size. So smaller logits are skipped.
  float kth(int k) {
    sorted_.clear();
    if (k > int(tops_.size()) / 2) {
      sorted_.assign(values_.begin(), values_.end());
    } else {
      sorted_.assign(tops_.begin(), tops_.end());
      const float least = kth_of_sorted(k);
      sorted_.clear();
      for (std::size_t s = 0; s < tops_.size(); s++)
        for (int i = 0; tops_[s] >= least && i < SPAN; i++)
          if (values_[s * SPAN + i] >= least) sorted_.push_back(values_[s * SPAN + i]);
    }
    return kth_of_sorted(k);
  }

  float kth_of_sorted(int k) {
    std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<float>());
    return sorted_[k - 1];
  }

  Doubles weights(int i) const { return exp(load_wide(values_.data() + i) - double(most_)); }

  // Keep the likeliest of the ids so far, equals by id, until their mass reaches the share p. By selection:
  // the range of the edge is split until it is one group of equals.
  Filter nucleus(const Filter& filter, double p) {
    ids_.clear();
    weights_.resize(values_.size());
    double mass_before = 0.0, wanted = 0.0;
    if (filter.keeps_all()) {
      for (int i = 0; i < int(values_.size()); i += WIDE) write(weights_.data() + i, weights(i));
      wanted = p * mass_above(NOTHING);
      mass_before = narrow(wanted);
    } else {
      wanted = p * weigh_kept(filter);
    }
    float edge = NOTHING;
    auto first = ids_.begin(), last = ids_.end();
    while (first != last) {
      float pivot = middle(values_[*first], values_[first[(last - first) / 2]], values_[last[-1]]);
      auto equals = std::partition(first, last, [&](int id) { return values_[id] > pivot; });
      auto less = std::partition(equals, last, [&](int id) { return values_[id] == pivot; });
      double greater = 0.0;
      for (auto id = first; id != equals; id++) greater += weights_[*id];
      if (mass_before + greater >= wanted) {
        last = equals;
        continue;
      }
      mass_before += greater;
      std::sort(equals, less);
      for (auto id = equals; id != less; id++)
        if ((mass_before += weights_[*id]) >= wanted) return {pivot, *id};
      edge = pivot;
      first = less;
    }
    if (edge == NOTHING) return filter;
    return {edge, std::numeric_limits<int>::max()};  // by rounding, the edge is after the last id
  }

  // Collect the ids that a filter keeps, and their weights. Returns the sum of the weights.
  double weigh_kept(const Filter& filter) {
    double total = 0.0;
    for (std::size_t s = 0; s < tops_.size(); s++)
      for (int i = int(s) * SPAN; tops_[s] >= filter.least && i < int(s + 1) * SPAN; i += WIDE) {
        write(weights_.data() + i, weights(i));
        for (int j = i; j < i + WIDE; j++)
          if (filter.keeps(values_[j], j)) ids_.push_back(j), total += weights_[j];
      }
    return total;
  }

  // Collect the ids among which the likeliest reach a mass. Returns the mass of all likelier ids. A few sums
  // over all ids halve the range of the edge each.
  double narrow(double wanted) {
    float low = NOTHING, high = most_, below = FIRST_RANGE;
    double before = 0.0;
    for (int pass = 0; pass < PASSES; pass++) {
      const float pivot = low > NOTHING ? (low + high) / 2 : most_ - below;
      if (!(pivot < high && pivot > low)) break;  // no number is between them, or none is so low
      const double above = mass_above(pivot);
      if (above >= wanted) low = pivot;
      else high = pivot, before = above, below *= 2;
    }
    for (std::size_t s = 0; s < tops_.size(); s++)
      for (int i = int(s) * SPAN; tops_[s] > low && i < int(s + 1) * SPAN; i += LANES) {
        const Floats here = load(values_.data() + i);
        if (!(largest(select(here <= high, here, all(NOTHING))) > low)) continue;
        for (int j = i; j < i + LANES; j++)
          if (values_[j] > low && values_[j] <= high) ids_.push_back(j);
      }
    return before;
  }

  // The sum of the weights of logits above this one.
  double mass_above(float least) const {
    constexpr int SUMS = 4;
    Doubles sums[SUMS] = {};
    for (std::size_t s = 0; s < tops_.size(); s++) {
      if (!(tops_[s] > least)) continue;
#pragma GCC unroll 2
      for (int i = 0; i < SPAN; i += SUMS * WIDE)
#pragma GCC unroll 4
        for (int j = 0; j < SUMS; j++) {
          const std::size_t at = s * SPAN + i + j * WIDE;
          const Longs above = load_wide(values_.data() + at) > double(least);
          sums[j] += select(above, read<Doubles>(weights_.data() + at), Doubles{});
        }
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  static float middle(float a, float b, float c) {
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
  }

  // The first id at which the cumulated weight exceeds the share u.
  int invert(const Filter& filter, double u) {
    int spans = int(values_.size()) / SPAN;
    sums_.resize(spans);
    double total = 0.0;
    if (filter.keeps_all())
      for (int s = 0; s < spans; s++) sums_[s] = total += span(s * SPAN);
    else
      for (int s = 0; s < spans; s++)
        sums_[s] = tops_[s] < filter.least ? total : total += span(filter, s * SPAN);
    double target = u * total;
    int s = int(std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin());
    if (s == spans) s = int(std::lower_bound(sums_.begin(), sums_.end(), total) - sums_.begin());
    double mass = s ? sums_[s - 1] : 0.0;
    int id = 0;
    for (int i = s * SPAN; i < (s + 1) * SPAN; i += WIDE) {
      Doubles here = weights(i);
      for (int j = 0; j < WIDE; j++) {
        if (!filter.keeps(values_[i + j], i + j) || here[j] == 0.0) continue;
        id = i + j;  // the last of the span, if rounding puts the target beyond it
        if ((mass += here[j]) > target) return id;
      }
    }
    return id;
  }

  // The weight of a span. Forbidden ids weigh 0.
  double span(int first) const {
    Doubles total = {};
    for (int i = first; i < first + SPAN; i += WIDE) total += weights(i);
    return sum(total);
  }

  double span(const Filter& filter, int first) const {
    static constexpr std::int32_t counted[WIDE] = {0, 1, 2, 3, 4, 5, 6, 7};
    const Longs places = widened<Longs>(counted);
    Doubles total = {};
    for (int i = first; i < first + SPAN; i += WIDE) {
      Doubles values = load_wide(values_.data() + i);
      Longs ids = places + std::int64_t(i);
      Longs keep = (values > double(filter.least)) |
                   ((values == double(filter.least)) & (ids <= std::int64_t(filter.last)));
      total += select(keep, exp(values - double(most_)), Doubles{});
    }
    return sum(total);
  }

  float most_ = 0.0f;
  Buffer<float> values_, tops_, sorted_;
  Buffer<double> weights_, sums_;
  std::vector<int> ids_;
};

}  // namespace logitd
