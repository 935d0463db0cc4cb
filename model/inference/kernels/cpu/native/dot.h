// Dot products of a few weight rows with a few activation rows, in the four formats of weights.
//
// A tile computes NR x MR products at once. Each product has one accumulator, which takes the same
// elements in the same order whatever the tile's shape is: so an activation row gets the same bits
// alone and among others. Weight rows may end anywhere: activations are padded with zeros, so what is
// read behind the end of a weight row counts nothing (it is always finite; arena.py sees to that).
#pragma once

#include <algorithm>

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
#if !defined(__AVX512F__)
  using Register = Piece;

  static Register weight(const Weight* from, int piece) { return load<Piece>(from + PIECE * piece); }
  static Register input(const Input* from, int piece) { return weight(from, piece); }
  static Register add(Register acc, Register w, Register x) { return fused(w, x, acc); }
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

  static Part load_weight(const Weight* from) { return read<Part>(from); }
  static Part load_input(const Input* from) { return read<Part>(from); }
  static Acc add(Acc acc, Part w, Part x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
    acc = fused(as<Floats>(w << 16), as<Floats>(x << 16), acc);
    return fused(as<Floats>(w & 0xFFFF0000u), as<Floats>(x & 0xFFFF0000u), acc);
#endif
  }
#if !defined(__AVX512F__)
  using Register = Piece;

  static WordPiece weight(const Weight* from, int piece) {
    return read<WordPiece>(from + 2 * PIECE * piece);
  }
  static WordPiece input(const Input* from, int piece) { return weight(from, piece); }
  static Register add(Register acc, WordPiece w, WordPiece x) {
    acc = fused(as<Piece>(w << 16), as<Piece>(x << 16), acc);
    return fused(as<Piece>(w & 0xFFFF0000u), as<Piece>(x & 0xFFFF0000u), acc);
  }
#endif
};

// What a quantized activation of zero is: 128, so that they are unsigned, as the dot products of AVX-512
// and the plain loops want them; but the multiplication of bytes that AVX2 has takes one side signed,
// and there either format of weights is faster if that are the activations.
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

  static Part load_weight(const Weight* from) { return read<Part>(from); }
  static Part load_input(const Input* from) { return read<Part>(from); }
  static Acc add(Acc acc, Part w, Part x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#else
    std::int32_t sums[LANES] = {};
    for (int lane = 0; lane < LANES; lane++)
      for (int i = 0; i < 4; i++)
        sums[lane] += int(w[4 * lane + i]) * int(std::uint8_t(x[4 * lane + i]));
    return acc + read<Ints>(sums);
#endif
  }
#endif
};

// int4 weights with an int8 scale for every sixteen, activations as those of int8, accumulated in int32:
// exact, so that neither the order of additions nor the processor changes a bit.
//
// A row is blocks of up to four steps; the last may have fewer. A block is sixteen scales, then 32 bytes
// for each of its steps. A byte holds weights i and i + 32 of a step, the first in the lower four bits,
// each as weight + 8. A scale is that of weights 2 i, 2 i + 1, 2 i + 32 and 2 i + 33 of all steps of its
// block: of one lane of sixteen bits, in which all their products come together. That is what makes a
// product cheap: a scale is multiplied once for sixteen weights. A lane holds it, 16 * 255 * 8 < 2^15,
// and quantize.py keeps scales so small that no sum leaves 32 bits.
struct I4 {
  using Weight = std::uint8_t;
  using Input = std::uint8_t;
  using Acc = Ints;
  using Sum = std::int32_t;
  static constexpr int STEP = 64;
  static constexpr int STEP_BYTES = STEP / 2;
  static constexpr int BLOCK_STEPS = 4;
  static constexpr int SCALES = 16;

  static constexpr int steps(int width) { return (width + STEP - 1) / STEP; }
  static constexpr int row_bytes(int width) { return STEP_BYTES * steps(width) + sums(width); }
  // Of a row of activations, one for each scale of a row of weights.
  static constexpr int sums(int width) {
    return SCALES * ((steps(width) + BLOCK_STEPS - 1) / BLOCK_STEPS);
  }

  // Unpacked: the weights of a step. Products: sums that a scale is still to be multiplied with, and
  // `nothing` is what they begin with. Total: sums of what was.
#if defined(__AVX512BW__)
  using Unpacked = __m512i;
  using Scales = __m512i;
  using Products = __m512i;
  using Total = __m512i;

  // Each as weight + 8.
  static Unpacked apart(const Weight* from) {
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    __m512i apart = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return _mm512_and_si512(apart, _mm512_set1_epi8(15));
  }
  static Unpacked unpack(const Weight* from) {
    return _mm512_sub_epi8(apart(from), _mm512_set1_epi8(8));
  }
  static Scales scales(const Weight* from) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_broadcast_i64x4(_mm256_cvtepi8_epi16(bytes));
  }
  static Products nothing(const std::int16_t*) { return Products{}; }
  static Products add(Products acc, const Unpacked& w, const Input* x) {
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(_mm512_loadu_si512(x), w));
  }
  static Total scaled(Total acc, Products products, Scales scales) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(products, scales));
  }
  static Acc lanes(Total total) { return (Acc)total; }
#elif defined(HALVES)
  struct Unpacked {
    __m256i first, second;
  };
  using Scales = __m256i;
  using Products = __m256i;
  using Total = __m256i;

  static Unpacked unpack(const Weight* from) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low)};
  }
  static Scales scales(const Weight* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  // The sum is this by now, and what is added later is added to it. GCC would change the order of additions
  // of integers until there are too few registers for them (measured: a sixth slower).
  static void stays(Products& sum) { asm("" : "+x"(sum)); }
  // Weights stay weight + 8, which is unsigned; what that adds is known of each row of activations, and
  // sums begin with so much less. They may leave sixteen bits between and come back.
  static Products nothing(const std::int16_t* sums) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums));
  }
  static Products add(Products acc, const Unpacked& w, const Input* x) {
    auto from = reinterpret_cast<const __m256i*>(x);
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w.first, _mm256_loadu_si256(from)));
    stays(acc);
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w.second, _mm256_loadu_si256(from + 1)));
    stays(acc);
    return acc;
  }
  // -8 times the activations that meet each scale of a block.
  static void put_sums(const Input* x, int steps, std::int16_t* sums) {
    Products sum = {};
    const Unpacked ones = {_mm256_set1_epi8(1), _mm256_set1_epi8(1)};
    for (int step = 0; step < steps; step++) sum = add(sum, ones, x + step * STEP);
    sum = _mm256_sub_epi16(Products{}, _mm256_slli_epi16(sum, 3));
    write(sums, sum);
  }
  static Total scaled(Total acc, Products products, Scales scales) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(products, scales));
  }
  static Acc lanes(Total total) {
    using Half = decltype(Acc::low);
    return {(Half)total, Half{}};
  }
#else
  using Halves = std::uint16_t __attribute__((vector_size(32)));
  struct Unpacked {
    Halves even[2], odd[2];  // weights of the first half of a step and of the second, modulo 2^16
  };
  using Scales = Ints;
  using Products = Halves;
  using Total = Ints;

  static Halves halves(const std::uint8_t* from) {
    return read<Halves>(from);  // the first of two bytes is the lower
  }
  static Unpacked unpack(const Weight* from) {
    Halves both = halves(from);
    return {{(both & 15) - 8, ((both >> 4) & 15) - 8}, {((both >> 8) & 15) - 8, (both >> 12) - 8}};
  }
  static Scales scales(const Weight* from) {
    return widened<Ints>(reinterpret_cast<const std::int8_t*>(from));
  }
  static Products nothing(const std::int16_t*) { return Products{}; }
  static Products add(Products acc, const Unpacked& w, const Input* x) {
    for (int half = 0; half < 2; half++) {
      Halves pairs = halves(x + 32 * half);
      acc += (pairs & 255) * w.even[half] + (pairs >> 8) * w.odd[half];
    }
    return acc;
  }
  static Total scaled(Total acc, Products products, Scales scales) {
    std::int16_t lanes[LANES];
    write(lanes, products);
    return acc + widened<Ints>(lanes) * scales;
  }
  static Acc lanes(Total total) { return total; }
#endif
};

// How far ahead of a stream of weights the next lines are asked for; a step of any format is a line.
constexpr int PREFETCH_BYTES = 4096;

// total[m] += the products of a block of int4 weights, unpacked once, with each of MR activation rows.
template <int MR, int STEPS>
[[gnu::always_inline]] inline void add_block(const std::uint8_t* block, const std::uint8_t* inputs,
                                             std::size_t pitch, const std::int16_t* sums,
                                             std::size_t sums_pitch, I4::Total* total) {
  I4::Unpacked weights[STEPS];
#pragma GCC unroll 4
  for (int s = 0; s < STEPS; s++)
    weights[s] = I4::unpack(block + I4::SCALES + s * I4::STEP_BYTES);
  const I4::Scales scales = I4::scales(block);
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
    I4::Products products = I4::nothing(sums + m * sums_pitch);
#pragma GCC unroll 4
    for (int s = 0; s < STEPS; s++)
      products = I4::add(products, weights[s], inputs + m * pitch + s * I4::STEP);
    total[m] = I4::scaled(total[m], products, scales);
  }
}

// acc[m * gap]: as `dots`, of one row of int4 weights. With each block that is read the lines are asked for
// that are PREFETCH_BYTES further on, if AHEAD.
template <int MR, int AHEAD>
[[gnu::always_inline]] inline void dots4(const std::uint8_t* row, const std::uint8_t* inputs,
                                         std::size_t pitch, const std::int16_t* sums, int width,
                                         Ints* acc, int gap) {
  const std::size_t sums_pitch = I4::sums(width);
  constexpr int BLOCK = I4::STEP * I4::BLOCK_STEPS;
  constexpr int BLOCK_BYTES = I4::SCALES + I4::STEP_BYTES * I4::BLOCK_STEPS;
  I4::Total total[MR] = {};
  int left = I4::steps(width);
  for (; left >= I4::BLOCK_STEPS; left -= I4::BLOCK_STEPS) {
    if (AHEAD)
      for (int byte = 0; byte < BLOCK_BYTES; byte += LINE)
        __builtin_prefetch(row + PREFETCH_BYTES + byte, 0, SECOND_CACHE);
    add_block<MR, I4::BLOCK_STEPS>(row, inputs, pitch, sums, sums_pitch, total);
    row += BLOCK_BYTES, inputs += BLOCK, sums += I4::SCALES;
  }
  switch (left) {
    case 1: add_block<MR, 1>(row, inputs, pitch, sums, sums_pitch, total); break;
    case 2: add_block<MR, 2>(row, inputs, pitch, sums, sums_pitch, total); break;
    case 3: add_block<MR, 3>(row, inputs, pitch, sums, sums_pitch, total); break;
  }
  for (int m = 0; m < MR; m++) acc[m * gap] = I4::lanes(total[m]);
}

// COUNT pieces from `piece` on of NR x MR products, in registers all the while.
template <class Format, int NR, int MR, int COUNT, int AHEAD>
[[gnu::always_inline]] inline void dots_of_pieces(
    const typename Format::Weight* weights, std::size_t stride, const typename Format::Input* inputs,
    std::size_t pitch, int width, const char* ahead, std::size_t apart, typename Format::Acc* acc, int gap,
    int piece) {
  typename Format::Register sum[NR * MR * COUNT] = {};
  for (int k = 0; k < width; k += Format::STEP, ahead += LINE) {
    for (int a = 0; a < AHEAD; a++) __builtin_prefetch(ahead + a * apart, 0, SECOND_CACHE);
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        auto weight = Format::weight(weights + r * stride + k, piece + c);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          auto& to = sum[(r * MR + m) * COUNT + c];
          to = Format::add(to, weight, Format::input(inputs + m * pitch + k, piece + c));
        }
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < NR; r++)
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        auto to = reinterpret_cast<char*>(acc + m * gap + r) + (piece + c) * int(sizeof sum[0]);
        write(to, sum[(r * MR + m) * COUNT + c]);
      }
}

// acc[m * gap + r]: the product of weight row r with activation row m, as a vector still to be summed.
// `stride` and `pitch` are elements from one weight row to the next, and one activation row. With each
// line that is read of a weight row, AHEAD lines are asked for, at `ahead` and every `apart` bytes.
template <class Format, int NR, int MR, int AHEAD>
[[gnu::always_inline]] inline void dots(const typename Format::Weight* weights, std::size_t stride,
                                        const typename Format::Input* inputs, std::size_t pitch,
                                        int width, const char* ahead, std::size_t apart,
                                        typename Format::Acc* acc, int gap) {
  if constexpr (requires { typename Format::Register; }) {
    // Sixteen registers hold eight sums, their weights and inputs. What is read again is in the cache.
    if constexpr (NR * MR <= 8) {
      constexpr int COUNT = std::max(1, std::min(PIECES, 8 / (NR * MR)));
      dots_of_pieces<Format, NR, MR, COUNT, AHEAD>(weights, stride, inputs, pitch, width, ahead, apart,
                                                   acc, gap, 0);
      for (int piece = COUNT; piece < PIECES; piece += COUNT)
        dots_of_pieces<Format, NR, MR, COUNT, 0>(weights, stride, inputs, pitch, width, ahead, apart, acc,
                                                 gap, piece);
    } else {
      constexpr int FEW = NR / 2;
      dots<Format, FEW, MR, AHEAD>(weights, stride, inputs, pitch, width, ahead, apart, acc, gap);
      dots<Format, NR - FEW, MR, 0>(weights + FEW * stride, stride, inputs, pitch, width, ahead, apart,
                                    acc + FEW, gap);
    }
  } else {
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
}

}  // namespace logitd
