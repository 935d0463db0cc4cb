// Vectors: sixteen floats at a time, in one or several registers.
//
// The same code, and the same order of additions, serve every machine. A compiler keeps a vector that is
// larger than a register in memory, and takes it apart lane by lane for operations without an instruction
// (measured on AVX2: e^x takes 30 cycles per float). So with smaller registers a vector is a `Pair` of
// halves, or of pairs. Intrinsics are used only for instructions without an operator (here and in dot.h).
// Covers loads and stores, bfloat16, sums, and the functions of the forward.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif

// Machines with sixteen registers of eight floats.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define HALVES
#endif

namespace logitd {

constexpr int LANES = 16;

// A vector of two halves. A scalar converts to a vector of equal lanes.
template <class Half>
struct Pair {
  using Element = std::remove_cvref_t<decltype(Half{}[0])>;
  using Mask = decltype(Half{} < Half{});  // result of a comparison: all bits of a lane, or none

  Half low, high;

  Pair() = default;
  Pair(Half low, Half high) : low(low), high(high) {}
  // Minus zero changes nothing; plus zero would turn -0 into 0.
  Pair(Element value) : low(value - Half{}), high(value - Half{}) {}

  Element operator[](int lane) const {
    constexpr int count = sizeof(Half) / sizeof(Element);
    return lane < count ? low[lane] : high[lane - count];
  }

  friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
  friend Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
  friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
  friend Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
  friend Pair operator&(Pair a, Pair b) { return {a.low & b.low, a.high & b.high}; }
  friend Pair operator|(Pair a, Pair b) { return {a.low | b.low, a.high | b.high}; }
  friend Pair operator<<(Pair a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Pair operator>>(Pair a, int bits) { return {a.low >> bits, a.high >> bits}; }
  Pair operator-() const { return {-low, -high}; }
  Pair operator~() const { return {~low, ~high}; }
  Pair& operator+=(Pair other) { return *this = *this + other; }
  Pair& operator*=(Pair other) { return *this = *this * other; }
  Pair& operator&=(Pair other) { return *this = *this & other; }

  friend Pair<Mask> operator<(Pair a, Pair b) { return {a.low < b.low, a.high < b.high}; }
  friend Pair<Mask> operator>(Pair a, Pair b) { return {a.low > b.low, a.high > b.high}; }
  friend Pair<Mask> operator<=(Pair a, Pair b) { return {a.low <= b.low, a.high <= b.high}; }
  friend Pair<Mask> operator>=(Pair a, Pair b) { return {a.low >= b.low, a.high >= b.high}; }
  friend Pair<Mask> operator==(Pair a, Pair b) { return {a.low == b.low, a.high == b.high}; }
  friend Pair<Mask> operator!=(Pair a, Pair b) { return {a.low != b.low, a.high != b.high}; }
};

template <class T, int BYTES>
struct Register {
  typedef T type __attribute__((vector_size(BYTES)));
};

// A vector of 64 bytes.
#if defined(__AVX512F__)
template <class T>
using Vector = typename Register<T, 64>::type;
#elif defined(__AVX2__)
template <class T>
using Vector = Pair<typename Register<T, 32>::type>;
#else
template <class T>
using Vector = Pair<Pair<typename Register<T, 16>::type>>;
#endif

using Floats = Vector<float>;
using Ints = Vector<std::int32_t>;
using Words = Vector<std::uint32_t>;

struct Bf16 {
  std::uint16_t bits;
};

template <class V>
constexpr bool IS_PAIR = requires(V vector) { vector.low; };

// The registers of a vector: PIECES registers of PIECE lanes. Arrays of registers stay in registers, arrays
// of vectors may not, so the hottest loops use pieces.
template <class V>
struct PieceOf {
  using type = V;
};
template <class Half>
struct PieceOf<Pair<Half>> : PieceOf<Half> {};

using Piece = PieceOf<Floats>::type;
using IntPiece = PieceOf<Ints>::type;
using WordPiece = PieceOf<Words>::type;
constexpr int PIECE = sizeof(Piece) / sizeof(float);
constexpr int PIECES = LANES / PIECE;

// a in lanes where the mask has bits, else b.
template <class Mask, class V>
inline V select(Mask mask, V a, V b) {
  if constexpr (IS_PAIR<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else return mask ? a : b;
}

// Reinterpret the bits in lanes of the same size.
template <class To, class From>
inline To as(From from) {
  if constexpr (IS_PAIR<To>)
    return {as<decltype(To::low)>(from.low), as<decltype(To::high)>(from.high)};
  else return reinterpret_cast<To>(from);
}

// Convert the values to lanes of the same size. Floats are truncated to integers.
template <class To, class From>
inline To converted(From from) {
  if constexpr (IS_PAIR<To>)
    return {converted<decltype(To::low)>(from.low), converted<decltype(To::high)>(from.high)};
  else return __builtin_convertvector(from, To);
}

// Read a vector register by register: a larger copy goes through memory.
template <class V>
inline V read(const void* from) {
  if constexpr (IS_PAIR<V>) {
    using Half = decltype(V::low);
    return {read<Half>(from), read<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
  }
}

template <class V>
inline void write(void* to, V vector) {
  if constexpr (IS_PAIR<V>) {
    write(to, vector.low);
    write(static_cast<char*>(to) + sizeof vector.low, vector.high);
  } else {
    std::memcpy(to, &vector, sizeof vector);
  }
}

// Read as many values as a vector has lanes, into wider lanes.
template <class To, class T>
inline To widened(const T* from) {
  if constexpr (IS_PAIR<To>) {
    using Half = decltype(To::low);
    return {widened<Half>(from), widened<Half>(from + sizeof(Half) / sizeof(Half{}[0]))};
  } else {
    using Narrow = typename Register<T, sizeof(To) / sizeof(To{}[0]) * sizeof(T)>::type;
#if defined(HALVES)  // GCC uses two instructions instead of one for these
    if constexpr (std::is_same_v<T, std::uint16_t>)
      return (To)_mm256_cvtepu16_epi32(read<__m128i>(from));
    else if constexpr (std::is_same_v<T, float>)
      return (To)_mm256_cvtps_pd(read<__m128>(from));
    else if constexpr (std::is_same_v<T, std::int8_t>)
      return (To)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<long long>(from)));
    else
#elif defined(__AVX512F__)
    if constexpr (std::is_same_v<T, std::int8_t>)
      return (To)_mm512_cvtepi8_epi32(read<__m128i>(from));
    else
#endif
      return __builtin_convertvector(read<Narrow>(from), To);
  }
}

// Store the lanes as bytes: -128 to 127, or 0 to 255, which HALVES does not support because it packs with
// signs.
inline void store_bytes(std::uint8_t* to, Ints values) {
#if defined(HALVES)
  __m256i halves = _mm256_packs_epi32((__m256i)values.low, (__m256i)values.high);
  halves = _mm256_permute4x64_epi64(halves, 0xD8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  write(to, bytes);
#elif defined(__AVX512F__)
  __m128i bytes = _mm512_cvtepi32_epi8((__m512i)values);
  write(to, bytes);
#else
  for (int lane = 0; lane < LANES; lane++) to[lane] = std::uint8_t(values[lane]);
#endif
}

// Store the lower sixteen bits of each lane; the upper ones are zero.
inline void store_halves(std::uint16_t* to, Words values) {
#if defined(HALVES)
  __m256i halves = _mm256_packus_epi32((__m256i)values.low, (__m256i)values.high);
  halves = _mm256_permute4x64_epi64(halves, 0xD8);
  write(to, halves);
#elif defined(__AVX512F__)
  __m256i halves = _mm512_cvtepi32_epi16((__m512i)values);
  write(to, halves);
#else
  for (int lane = 0; lane < LANES; lane++) to[lane] = std::uint16_t(values[lane]);
#endif
}

template <class V = Floats>
inline V load(const float* from) { return read<V>(from); }

template <class V = Floats>
inline V load(const Bf16* from) {
#if defined(__AVX512F__)  // GCC uses two instructions instead of one
  __m256i halves = read<__m256i>(from);
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  using Bits = std::conditional_t<IS_PAIR<V>, Words, WordPiece>;
  return as<V>(widened<Bits>(reinterpret_cast<const std::uint16_t*>(from)) << 16);
#endif
}

// Signed bytes as floats.
template <class V = Floats>
inline V load(const std::int8_t* from) {
  using Whole = std::conditional_t<IS_PAIR<V>, Ints, IntPiece>;
  return converted<V>(widened<Whole>(from));
}

template <class V>
inline void store(float* to, V values) { write(to, values); }

// Round to the nearest bfloat16, ties to even; NaN stays NaN. The processor's own conversion flushes
// subnormal numbers to zero.
inline void store(Bf16* to, Floats values) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
  write(to, halves);
#else
  Words bits = as<Words>(values);
  Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  Words is_nan = as<Words>(values != values);
  store_halves(reinterpret_cast<std::uint16_t*>(to), (rounded & ~is_nan) | (is_nan & 0x7FC0u));
#endif
}

inline float widen(float value) { return value; }

inline float widen(Bf16 value) {
  std::uint32_t bits = std::uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Minus zero changes nothing; plus zero would turn -0 into 0.
template <class V = Floats>
inline V all(float value) { return value - V{}; }

// a * b + c with one rounding if the machine can. Explicit, with -ffp-contract=off: a compiler would fuse
// some operations and not others, and bits would differ.
template <class V>
inline V fused(V a, V b, V c) {
  if constexpr (IS_PAIR<V>) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
  } else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(V{}[0])>, double>) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(HALVES)
    return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
  } else {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(HALVES)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < int(sizeof c / sizeof c[0]); i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
  }
}

// The sum of the lanes: lane i with i + 8, then with i + 4, i + 2, i + 1.
template <class V>
inline float sum(V v) {
  if constexpr (IS_PAIR<V>) {
    return sum(v.low + v.high);
  } else if constexpr (sizeof v == 64) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
  } else if constexpr (sizeof v == 32) {
    return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
  } else {
    return (v[0] + v[2]) + (v[1] + v[3]);
  }
}

namespace detail {

#if defined(__AVX512F__)
// A level of the tree of `sum` for two vectors: each half of a group of lanes is added to the other half, and
// the result has a's sums in the lanes of a, b's in those of b (BS). A blend and one shuffle, `others`, bring
// them together: most units blend, few shuffle.
template <unsigned BS, class V>
[[gnu::always_inline]] inline V level(V a, V b, __m512 others) {
  return (V)_mm512_mask_blend_ps(BS, (__m512)a, (__m512)b) + (V)others;
}

template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  const __m512i blocks = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i lanes = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  V eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const V a = v[i], b = v[i + 8];
    eight[i] = level<0xFF00>(a, b, _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4E));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const V a = eight[i], b = eight[i + 4];
    four[i] = level<0xF0F0>(a, b, _mm512_permutex2var_ps((__m512)a, blocks, (__m512)b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const V a = four[i], b = four[i + 2];
    two[i] = level<0xCCCC>(a, b, (__m512)_mm512_shuffle_pd((__m512d)a, (__m512d)b, 0x55));
  }
  return level<0xAAAA>(two[0], two[1], _mm512_permutex2var_ps((__m512)two[0], lanes, (__m512)two[1]));
}
#elif defined(__AVX2__)
// Uses shuffles of one instruction each. The lanes have the order of the tree only after the last step.
template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  auto f = [](V x) { return (__m256)x; };  // shuffle integers as floats too
  V four[4], two[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256 a = f(v[2 * i]), b = f(v[2 * i + 1]);
    four[i] = (V)_mm256_permute2f128_ps(a, b, 0x20) + (V)_mm256_permute2f128_ps(a, b, 0x31);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    __m256 a = f(four[2 * i]), b = f(four[2 * i + 1]);
    two[i] = (V)_mm256_shuffle_ps(a, b, 0x44) + (V)_mm256_shuffle_ps(a, b, 0xEE);
  }
  __m256 a = f(two[0]), b = f(two[1]);
  V one = (V)_mm256_shuffle_ps(a, b, 0x88) + (V)_mm256_shuffle_ps(a, b, 0xDD);
  // The order is now 0 2 4 6 1 3 5 7.
  return (V)_mm256_permutevar8x32_ps(f(one), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#else
template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  V two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    V a = v[2 * i], b = v[2 * i + 1];
    two[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  }
  return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6) +
         __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7);
}
#endif

}  // namespace detail

// Add up the pieces of a vector: the beginning of the tree of `sum`.
template <class P>
[[gnu::always_inline]] inline P folded(const P* piece) {
  if constexpr (PIECES == 1) return piece[0];
  else if constexpr (PIECES == 2) return piece[0] + piece[1];
  else return (piece[0] + piece[2]) + (piece[1] + piece[3]);
}

// Lane i of the result is the sum of v[i], by the tree of `sum`: the same bits in a third of the
// instructions. Works for pieces and for vectors; v has one element per lane.
template <class V>
[[gnu::always_inline]] inline V sums(const V* v) {
  if constexpr (!IS_PAIR<V>) {
    return detail::sums(v);
  } else {
    using P = typename PieceOf<V>::type;
    P joined[PIECES];
#pragma GCC unroll 4
    for (int piece = 0; piece < PIECES; piece++) {
      P one[PIECE];
#pragma GCC unroll 16
      for (int i = 0; i < PIECE; i++) {
        const char* from = reinterpret_cast<const char*>(v + piece * PIECE + i);
        P parts[PIECES];
#pragma GCC unroll 4
        for (int part = 0; part < PIECES; part++) parts[part] = read<P>(from + part * sizeof(P));
        one[i] = folded(parts);
      }
      joined[piece] = detail::sums(one);
    }
    return read<V>(joined);
  }
}

// Returns b if either is NaN. Explicit, because compilers use two instructions for a selection in 16 lanes.
template <class V>
inline V max(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Floats>) return (V)_mm512_max_ps((__m512)a, (__m512)b);
  if constexpr (std::is_same_v<V, Ints>) return (V)_mm512_max_epi32((__m512i)a, (__m512i)b);
#endif
  return select(a > b, a, b);
}

template <class V>
inline V min(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Floats>) return (V)_mm512_min_ps((__m512)a, (__m512)b);
#endif
  return select(a < b, a, b);
}

template <class V>
inline float largest(V v) {
  if constexpr (IS_PAIR<V>) {
    return largest(max(v.low, v.high));
  } else {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float found = v[0];
    for (int i = 1; i < int(sizeof v / sizeof v[0]); i++) found = v[i] > found ? v[i] : found;
    return found;
#endif
  }
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// v * 2^n for integers n, if 2^n and the result are normal numbers.
inline Floats scaled(Floats v, Floats n) {
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  return v * as<Floats>((converted<Ints>(n) + 127) << 23);
#endif
}

// e^x to within 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial for e^r
// (coefficients of Cephes' expf). x is clamped to -87 and 88, near the limits of float32.
inline Floats exp(Floats x) {
  x = min(max(x, all(-87.0f)), all(88.0f));
  Floats n = (x * 1.44269504088896341f + ROUND) - ROUND;
  Floats r = fused(n, all(-0.693359375f), x);
  r = fused(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  return scaled(fused(p, r * r, r) + 1.0f, n);
}

// x / (1 + 2^t) to within 4 units in the last place: t = n + r, |r| <= 1/2, and a polynomial for
// 2^r with an error of at most 2e-9 (fitted for the smallest relative error, 1 at 0). Activations
// use it: a prompt computes more of these than of anything except products.
inline Floats damped(Floats x, Floats t) {
  t = min(max(t, all(-125.0f)), all(125.0f));
  const Floats n = (t + ROUND) - ROUND, r = t - n;
  Floats p = all(1.5353362e-4f);
  p = fused(p, r, all(1.3398875e-3f));
  p = fused(p, r, all(9.618437e-3f));
  p = fused(p, r, all(5.5503324e-2f));
  p = fused(p, r, all(2.4022648e-1f));
  p = fused(p, r, all(6.9314718e-1f));
  const Floats below = 1.0f + scaled(fused(p, r, all(1.0f)), n);
#if defined(__AVX512F__)
  // A division takes as long as ten of these operations.
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)below);  // to within 2^-14
  const Floats off = fused(-near, below, all(1.0f));
  return x * fused(near, fused(off, off, off), near);
#else
  return x / below;
#endif
}

// The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline Floats erf(Floats x) {
  Floats a = select(x < 0.0f, -x, x);
  Floats t = 1.0f / (1.0f + 0.3275911f * a);
  Floats p = all(1.061405429f);
  p = fused(p, t, all(-1.453152027f));
  p = fused(p, t, all(1.421413741f));
  p = fused(p, t, all(-0.284496736f));
  p = fused(p, t, all(0.254829592f));
  Floats y = 1.0f - p * t * exp(-a * a);
  return select(x < 0.0f, -y, y);
}

// tanh x to within 4 units in the last place: near 0 a polynomial (fitted for the smallest relative
// error, 4e-9), otherwise 1 - 2 / (1 + e^(2 |x|)). NaN stays NaN.
inline Floats tanh(Floats x) {
  const Floats s = x * x;
  Floats p = all(-6.2726075e-3f);
  p = fused(p, s, all(2.1070253e-2f));
  p = fused(p, s, all(-5.3851865e-2f));
  p = fused(p, s, all(1.3332580e-1f));
  p = fused(p, s, all(-3.3333316e-1f));
  const Floats near = fused(p, s * x, x);
  const Floats most = 1.0f - damped(all(2.0f), max(x, -x) * 2.88539008177792681f);
  return select(s >= 0.3f, select(x < 0.0f, -most, most), near);
}

}  // namespace logitd
