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
};

// int8 weights, uint8 activations (128 is zero), accumulated in int32: exact.
struct I8 {
  using Weight = std::int8_t;
  using Input = std::uint8_t;
  using Acc = Ints;
  using Sum = std::int32_t;
  static constexpr int STEP = 64;
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
};

// How far ahead of a stream of weights the next lines are asked for; a step of any format is a line.
constexpr int PREFETCH_BYTES = 4096;

// acc[m * gap + r]: the product of weight row r with activation row m, as a vector still to be summed.
// `stride` and `pitch` are elements from one weight row to the next, and one activation row. With each
// line that is read of a weight row, AHEAD lines are asked for, at `ahead` and every `apart` bytes.
template <class Format, int NR, int MR, int AHEAD>
[[gnu::always_inline]] inline void dots(const typename Format::Weight* weights, std::size_t stride,
                                        const typename Format::Input* inputs, std::size_t pitch,
                                        int width, const char* ahead, std::size_t apart,
                                        typename Format::Acc* acc, int gap) {
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
}

}  // namespace logitd
