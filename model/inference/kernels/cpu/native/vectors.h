// Vectors: sixteen floats at a time, in the compiler's own vector type.
//
// One spelling for every machine: with AVX-512 a Floats is one register, elsewhere the compiler makes
// it of smaller ones, and the order of additions stays the same. Intrinsics stand only where the
// compiler has no operator for an instruction (dot.h). Covers loading, conversion to and from
// bfloat16, sums, and the functions that the forward needs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

// Where registers have eight floats. A Floats is two of them then, and GCC passes it through memory
// and puts its shuffles together lane by lane: what most of the time is spent in takes the halves.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define HALVES
#endif

namespace logitd {

constexpr int LANES = 16;

using Floats = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));
using Halves = std::uint16_t __attribute__((vector_size(32)));

struct Bf16 {
  std::uint16_t bits;
};

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const Bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)  // which GCC does in two halves
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#else
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// To the nearest bfloat16, ties to even; a NaN stays one. The processor's own conversion makes zeros of
// what is below the smallest normal number.
inline void store(Bf16* to, Floats values) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &halves, sizeof halves);
#else
  Words bits = reinterpret_cast<Words>(values);
  Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  Words is_nan = reinterpret_cast<Words>(values != values);
  rounded = (rounded & ~is_nan) | (is_nan & 0x7FC0u);
  Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline float widen(float value) { return value; }

inline float widen(Bf16 value) {
  std::uint32_t bits = std::uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Less zero, which is nothing; plus zero would make a sum of it, as -0 + 0 is 0.
inline Floats all(float value) { return value - Floats{}; }

// a * b + c in one rounding where the machine can. Spelled out, and the compiler is told not to fuse by
// itself (-ffp-contract=off): it would do so in some places and not in others, and bits would differ.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)  // by halves: sixteen calls of fmaf take the compiler minutes to put together
  Floats sum;
  for (int half = 0; half < 2; half++) {
    __m256 x, y, z;
    std::memcpy(&x, reinterpret_cast<const char*>(&a) + 32 * half, sizeof x);
    std::memcpy(&y, reinterpret_cast<const char*>(&b) + 32 * half, sizeof y);
    std::memcpy(&z, reinterpret_cast<const char*>(&c) + 32 * half, sizeof z);
    z = _mm256_fmadd_ps(x, y, z);
    std::memcpy(reinterpret_cast<char*>(&sum) + 32 * half, &z, sizeof z);
  }
  return sum;
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

#if defined(HALVES)

namespace detail {

inline __m256 plus(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
inline __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

// Of eight vectors of eight lanes each: lane i of v[i] with i + 4, then i + 2 and i + 1.
template <class V>
[[gnu::always_inline]] inline V sums8(const V* v) {
  auto f = [](V x) { return (__m256)x; };  // shuffles are those of floats, whatever they move
  V four[4], two[2];
  for (int i = 0; i < 4; i++) {
    __m256 a = f(v[2 * i]), b = f(v[2 * i + 1]);
    four[i] = plus((V)_mm256_permute2f128_ps(a, b, 0x20), (V)_mm256_permute2f128_ps(a, b, 0x31));
  }
  for (int i = 0; i < 2; i++) {
    __m256 a = f(four[2 * i]), b = f(four[2 * i + 1]);
    two[i] = plus((V)_mm256_shuffle_ps(a, b, 0x44), (V)_mm256_shuffle_ps(a, b, 0xEE));
  }
  __m256 a = f(two[0]), b = f(two[1]);
  V one = plus((V)_mm256_shuffle_ps(a, b, 0x88), (V)_mm256_shuffle_ps(a, b, 0xDD));
  // 0 2 4 6 1 3 5 7 by now
  return (V)_mm256_permutevar8x32_ps((__m256)one, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace detail

// The sum of the lanes: lane i with i + 8, then with i + 4, i + 2, i + 1.
inline float sum(Floats v) {
  __m256 half[2];
  std::memcpy(half, &v, sizeof v);
  __m256 eight = _mm256_add_ps(half[0], half[1]);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Lane i is the sum of v[i], each by the tree of `sum`: the same bits, a third of the instructions.
template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  using H = std::conditional_t<std::is_same_v<V, Floats>, __m256, __m256i>;
  H result[2];
  for (int group = 0; group < 2; group++) {
    H eight[8];
    for (int i = 0; i < 8; i++) {
      H half[2];
      std::memcpy(half, v + 8 * group + i, sizeof half);
      eight[i] = detail::plus(half[0], half[1]);
    }
    result[group] = detail::sums8(eight);
  }
  V joined;
  std::memcpy(&joined, result, sizeof joined);
  return joined;
}

#else

// The sum of the lanes: lane i with i + 8, then with i + 4, i + 2, i + 1.
inline float sum(Floats v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

namespace detail {

// Each of these adds the upper half of every group of lanes to its lower half, and puts the groups of
// two vectors side by side: the tree of `sum`, for two vectors at once.
template <class V>
inline V halve8(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

template <class V>
inline V halve4(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

template <class V>
inline V halve2(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}

template <class V>
inline V halve1(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

}  // namespace detail

// Lane i is the sum of v[i], each by the tree of `sum`: the same bits, a third of the instructions.
template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  using namespace detail;
  V eight[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) eight[i] = halve8(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) four[i] = halve4(eight[2 * i], eight[2 * i + 1]);
  return halve1(halve2(four[0], four[1]), halve2(four[2], four[3]));
}

#endif

inline float largest(Floats v) {
  float found = v[0];
  for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
  return found;
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

// e^x to within 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial for e^r
// (the coefficients of Cephes' expf). Beyond float32's range it stays at the largest or least power.
inline Floats exp(Floats x) {
  x = min(max(x, all(-87.0f)), all(88.0f));
  const Floats round = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = (x * 1.44269504088896341f + round) - round;
  Floats r = fused(n, all(-0.693359375f), x);
  r = fused(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p, r * r, r) + 1.0f;
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * reinterpret_cast<Floats>(power);
}

// The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline Floats erf(Floats x) {
  Floats a = x < 0.0f ? -x : x;
  Floats t = 1.0f / (1.0f + 0.3275911f * a);
  Floats p = all(1.061405429f);
  p = fused(p, t, all(-1.453152027f));
  p = fused(p, t, all(1.421413741f));
  p = fused(p, t, all(-0.284496736f));
  p = fused(p, t, all(0.254829592f));
  Floats y = 1.0f - p * t * exp(-a * a);
  return x < 0.0f ? -y : y;
}

}  // namespace logitd
