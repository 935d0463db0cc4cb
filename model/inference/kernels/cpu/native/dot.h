// Dot products of a few weight rows with a few activation rows, in the three formats of weights.
//
// A tile computes NR x MR products at once. Each product has one accumulator, which takes the same
// elements in the same order whatever the tile's shape is: so an activation row gets the same bits
// alone and among others. Weight rows may end anywhere: activations are padded with zeros, so what is
// read behind the end of a weight row counts nothing (it is always finite; arena.py sees to that).
#pragma once

#include "buffer.h"
#include "stream.h"
#include "vectors.h"

namespace logitd {

// float32 weights and activations.
struct F32 {
  using Weight = float;
  using Input = float;
  using Acc = Floats;
  using Sum = float;
  static constexpr int STEP = 16;  // elements per instruction
  using Part = Floats;

  static Part load_weight(const Weight* from) { return load(from); }
  static Part load_input(const Input* from) { return load(from); }
  static Acc add(Acc acc, Part w, Part x) { return fused(w, x, acc); }
#if defined(HALVES)
  using Register = __m256;

  static Register weight(const Weight* from, int half) { return _mm256_loadu_ps(from + 8 * half); }
  static Register input(const Input* from, int half) { return weight(from, half); }
  static Register add(Register acc, Register w, Register x) { return _mm256_fmadd_ps(w, x, acc); }
#endif
};

// bfloat16 weights and activations, accumulated in float32: the even elements of a step, then the
// odd ones, as AVX512-BF16's instruction does.
struct B16 {
  using Weight = Bf16;
  using Input = Bf16;
  using Acc = Floats;
  using Sum = float;
  static constexpr int STEP = 32;
  using Part = Words;

  static Part load_weight(const Weight* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
  }
  static Part load_input(const Input* from) { return load_weight(from); }
  static Acc add(Acc acc, Part w, Part x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
    acc = fused(reinterpret_cast<Floats>(w << 16), reinterpret_cast<Floats>(x << 16), acc);
    return fused(reinterpret_cast<Floats>(w & 0xFFFF0000u),
                 reinterpret_cast<Floats>(x & 0xFFFF0000u), acc);
#endif
  }
#if defined(HALVES)
  using Register = __m256;

  static __m256i weight(const Weight* from, int half) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
  }
  static __m256i input(const Input* from, int half) { return weight(from, half); }
  static Register add(Register acc, __m256i w, __m256i x) {
    const __m256i odd = _mm256_set1_epi32(int(0xFFFF0000u));
    acc = _mm256_fmadd_ps((__m256)_mm256_slli_epi32(w, 16), (__m256)_mm256_slli_epi32(x, 16), acc);
    return _mm256_fmadd_ps((__m256)_mm256_and_si256(w, odd), (__m256)_mm256_and_si256(x, odd), acc);
  }
#endif
};

// What a quantized activation of zero is: 128, so that they are unsigned, as the dot products of AVX-512
// and the plain loops want them; but the multiplication of bytes that AVX2 has takes one side signed,
// and there that are the activations.
#if defined(HALVES)
constexpr int ZERO = 0;
#else
constexpr int ZERO = 128;
#endif

// int8 weights and activations (ZERO is zero), accumulated in int32: exact. Activations end in zeros,
// with which nothing is multiplied that counts.
struct I8 {
  using Weight = std::int8_t;
  using Input = std::uint8_t;
  using Acc = Ints;
  using Sum = std::int32_t;
  static constexpr int STEP = 64;
#if defined(HALVES)
  using Register = __m256i;

  static Register weight(const Weight* from, int half) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
  }
  static Register input(const Input* from, int half) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
  }
  // Weights without their signs, which the activations take: of both none is below -127, and a pair of
  // products of 127 times 127 does not saturate sixteen bits.
  static Register add(Register acc, Register w, Register x) {
    Register pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  using Part = std::int8_t __attribute__((vector_size(64)));

  static Part load_weight(const Weight* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
  }
  static Part load_input(const Input* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
  }
  static Acc add(Acc acc, Part w, Part x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#else
    for (int lane = 0; lane < LANES; lane++)
      for (int i = 0; i < 4; i++)
        acc[lane] += int(w[4 * lane + i]) * int(std::uint8_t(x[4 * lane + i]));
    return acc;
#endif
  }
#endif
};

// How far ahead of a stream of weights the next lines are asked for; a step of any format is a line.
constexpr int PREFETCH_BYTES = 4096;

#if defined(HALVES)

// COUNT halves from `half` on of NR x MR products, in registers all the while.
template <class Format, int NR, int MR, int COUNT, int AHEAD>
[[gnu::always_inline]] inline void halves(const typename Format::Weight* weights, std::size_t stride,
                                          const typename Format::Input* inputs, std::size_t pitch,
                                          int width, const char* ahead, std::size_t apart,
                                          typename Format::Acc* acc, int gap, int half) {
  typename Format::Register sum[NR * MR * COUNT] = {};
  for (int k = 0; k < width; k += Format::STEP, ahead += LINE) {
    for (int a = 0; a < AHEAD; a++) __builtin_prefetch(ahead + a * apart, 0, SECOND_CACHE);
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 2
      for (int h = 0; h < COUNT; h++) {
        auto weight = Format::weight(weights + r * stride + k, half + h);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          auto& to = sum[(r * MR + m) * COUNT + h];
          to = Format::add(to, weight, Format::input(inputs + m * pitch + k, half + h));
        }
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < NR; r++)
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
      for (int h = 0; h < COUNT; h++) {
        auto to = reinterpret_cast<typename Format::Register*>(acc + m * gap + r) + half + h;
        *to = sum[(r * MR + m) * COUNT + h];
      }
}

#endif

// acc[m * gap + r]: the product of weight row r with activation row m, as a vector still to be summed.
// `stride` and `pitch` are elements from one weight row to the next, and one activation row. With each
// line that is read of a weight row, AHEAD lines are asked for, at `ahead` and every `apart` bytes.
template <class Format, int NR, int MR, int AHEAD>
[[gnu::always_inline]] inline void dots(const typename Format::Weight* weights, std::size_t stride,
                                        const typename Format::Input* inputs, std::size_t pitch,
                                        int width, const char* ahead, std::size_t apart,
                                        typename Format::Acc* acc, int gap) {
#if defined(HALVES)
  // Sixteen registers hold eight sums, their weights and inputs. What is read again is in the cache.
  if constexpr (NR * MR <= 4) {
    halves<Format, NR, MR, 2, AHEAD>(weights, stride, inputs, pitch, width, ahead, apart, acc, gap, 0);
  } else if constexpr (NR * MR <= 8) {
    halves<Format, NR, MR, 1, AHEAD>(weights, stride, inputs, pitch, width, ahead, apart, acc, gap, 0);
    halves<Format, NR, MR, 1, 0>(weights, stride, inputs, pitch, width, ahead, apart, acc, gap, 1);
  } else {
    constexpr int FEW = NR / 2;
    dots<Format, FEW, MR, AHEAD>(weights, stride, inputs, pitch, width, ahead, apart, acc, gap);
    dots<Format, NR - FEW, MR, 0>(weights + FEW * stride, stride, inputs, pitch, width, ahead, apart,
                                  acc + FEW, gap);
  }
#else
  typename Format::Acc sum[NR * MR] = {};
  for (int k = 0; k < width; k += Format::STEP, ahead += LINE) {
    for (int a = 0; a < AHEAD; a++) __builtin_prefetch(ahead + a * apart, 0, SECOND_CACHE);
    typename Format::Part input[MR];
    for (int m = 0; m < MR; m++) input[m] = Format::load_input(inputs + m * pitch + k);
    for (int r = 0; r < NR; r++) {
      typename Format::Part weight = Format::load_weight(weights + r * stride + k);
      for (int m = 0; m < MR; m++)
        sum[r * MR + m] = Format::add(sum[r * MR + m], weight, input[m]);
    }
  }
  // Unrolled, so that the sums never leave the registers.
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) acc[m * gap + r] = sum[r * MR + m];
#endif
}

}  // namespace logitd
