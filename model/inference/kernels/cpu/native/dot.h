// Dot products of a few weight rows with a few activation rows, in the four formats of weights.
//
// A tile computes NR x MR products at once. Each product has one accumulator, which adds the same
// elements in the same order in every shape of a tile, so an activation row has the same bits alone
// and among others. Weight rows may have any length: activations are padded with zeros, so the
// numbers after the end of a weight row, which arena.py keeps finite, add nothing.
#pragma once

#include <algorithm>
#include <type_traits>

#include "buffer.h"
#include "vectors.h"

namespace logitd {

// Call `call` with a constant that equals `count`, from 1 to MOST; for other counts do nothing.
template <int MOST, int CONSTANT = 1, class Call>
[[gnu::always_inline]] inline void with_constant(int count, const Call& call) {
  if (count == CONSTANT) call(std::integral_constant<int, CONSTANT>{});
  else if constexpr (CONSTANT < MOST) with_constant<MOST, CONSTANT + 1>(count, call);
}

// A format has the types Weight, Input (an activation), Acc (a vector of sums) and Sum, a STEP of elements
// per instruction, and `add`, which adds the products of a step to an accumulator. `add` accepts a Part, which
// is a whole step. If registers are smaller than vectors, it accepts Cells, a register's share of a step, with
// a Register as the accumulator.

// float32 weights and activations.
struct F32 {
  using Weight = float;
  using Input = float;
  using Acc = Floats;
  using Sum = float;
  static constexpr int STEP = 16;
  using Part = Floats;
#if !defined(__AVX512F__)
  using Register = Piece;
  using Cells = Piece;
#endif

  template <class V>
  static V add(V acc, V w, V x) { return fused(w, x, acc); }
};

// bfloat16 weights and activations, accumulated in float32: the even elements of a step, then the odd ones,
// in the order of AVX512-BF16's instruction.
struct B16 {
  using Weight = Bf16;
  using Input = Bf16;
  using Acc = Floats;
  using Sum = float;
  static constexpr int STEP = 32;
  using Part = Words;
#if !defined(__AVX512F__)
  using Register = Piece;
  using Cells = WordPiece;
#endif

  template <class V, class W>
  static V add(V acc, W w, W x) {
#if defined(__AVX512BF16__)
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
    acc = fused(as<V>(w << 16), as<V>(x << 16), acc);
    return fused(as<V>(w & 0xFFFF0000u), as<V>(x & 0xFFFF0000u), acc);
#endif
  }
};

// The quantized activation for zero. With 128 activations are unsigned, as the dot products of AVX-512 and
// the plain loops need them. AVX2's product of bytes takes one signed side, and both formats of weights are
// faster if that is the activations.
#if defined(HALVES)
constexpr int ZERO = 0;
#else
constexpr int ZERO = 128;
#endif

// int8 weights and activations (ZERO is zero), accumulated in int32: exact. The padding of a row of
// activations is 0, not ZERO, so the weights that it meets add nothing. With VNNI int8_strips.h multiplies.
struct I8 {
  using Weight = std::int8_t;
  using Input = std::uint8_t;
  using Acc = Ints;
  using Sum = std::int32_t;
  static constexpr int STEP = 64;
#if defined(HALVES)
  using Register = __m256i;
  using Cells = __m256i;

  // The signs of the weights are moved to the activations. Neither is below -127, so a pair of products of
  // 127 times 127 does not saturate sixteen bits.
  static Register add(Register acc, Cells w, Cells x) {
    Register pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  using Part = std::int8_t __attribute__((vector_size(64)));

  static Acc add(Acc acc, Part w, Part x) {
    std::int32_t sums[LANES] = {};
    for (int lane = 0; lane < LANES; lane++)
      for (int i = 0; i < 4; i++)
        sums[lane] += int(w[4 * lane + i]) * int(std::uint8_t(x[4 * lane + i]));
    return acc + read<Ints>(sums);
  }
#endif
};

// int4 weights with an int8 scale for every sixteen, and the activations of int8, accumulated in int32:
// exact, so neither the order of additions nor the processor changes a bit.
//
// A row is blocks of four steps; the last may have fewer. A block is sixteen scales, then 32 bytes per step.
// A byte holds weights i and i + 32 of a step, the first in the lower four bits, each as weight + 8. Weights
// 2 i, 2 i + 1, 2 i + 32 and 2 i + 33 of all steps of a block share a scale: one lane of sixteen bits sums up
// their products, so the scale is multiplied only once for sixteen weights. The lane is wide enough,
// 16 * 255 * 8 < 2^15, and quantize.py keeps scales so small that every sum fits into 32 bits.
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
  // Elements of `Inputs::sums` in a row: one for each scale of a row of weights.
  static constexpr int sums(int width) {
    return SCALES * ((steps(width) + BLOCK_STEPS - 1) / BLOCK_STEPS);
  }

  // Unpacked: the weights of a step. Products: sums before the multiplication by a scale, which start as
  // `nothing`. Total: sums after it.
#if defined(__AVX512BW__)
  using Unpacked = __m512i;
  using Scales = __m512i;
  using Products = __m512i;
  using Total = __m512i;

  // The weights of a step, each as weight + 8.
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
  // Pins the value of a sum. Otherwise GCC reorders additions of integers until it runs out of registers
  // (measured: a sixth slower).
  static void stays(Products& sum) { asm("" : "+x"(sum)); }
  // Weights stay weight + 8, which is unsigned. Sums start with minus the excess, which depends on the
  // activations alone. They may wrap around sixteen bits and come back.
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
  // -8 times the sum of the activations that meet each scale of a block.
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

// Distance at which a stream of weights is prefetched. A step of any format is a line.
constexpr int PREFETCH_BYTES = 4096;

// total[m] += the products of a block of int4 weights with activation row m. The block is unpacked once.
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

// Like `dots` for one row of int4 weights, into acc[m * gap]. AHEAD: prefetch PREFETCH_BYTES ahead with each
// block.
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
  with_constant<I4::BLOCK_STEPS - 1>(left, [&](auto steps) __attribute__((always_inline)) {
    add_block<MR, steps>(row, inputs, pitch, sums, sums_pitch, total);
  });
  for (int m = 0; m < MR; m++) acc[m * gap] = I4::lanes(total[m]);
}

// COUNT registers, from `piece` on, of the accumulators of NR x MR products. They stay in registers.
template <class Format, int NR, int MR, int COUNT, int AHEAD>
[[gnu::always_inline]] inline void dots_of_pieces(
    const typename Format::Weight* weights, std::size_t stride, const typename Format::Input* inputs,
    std::size_t pitch, int width, const char* ahead, std::size_t apart, typename Format::Acc* acc, int gap,
    int piece) {
  using Cells = typename Format::Cells;
  const auto cells = [](const auto* from, int index) __attribute__((always_inline)) {
    return read<Cells>(reinterpret_cast<const char*>(from) + index * int(sizeof(Cells)));
  };
  typename Format::Register sum[NR * MR * COUNT] = {};
  for (int k = 0; k < width; k += Format::STEP, ahead += LINE) {
    for (int a = 0; a < AHEAD; a++) __builtin_prefetch(ahead + a * apart, 0, SECOND_CACHE);
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        const Cells weight = cells(weights + r * stride + k, piece + c);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          auto& to = sum[(r * MR + m) * COUNT + c];
          to = Format::add(to, weight, cells(inputs + m * pitch + k, piece + c));
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

// acc[m * gap + r] = the product of weight row r with activation row m, as a vector of partial sums.
// `stride` and `pitch` are the elements between weight rows and between activation rows. With each line of a
// weight row, AHEAD lines are prefetched, from `ahead` on at intervals of `apart` bytes.
template <class Format, int NR, int MR, int AHEAD>
[[gnu::always_inline]] inline void dots(const typename Format::Weight* weights, std::size_t stride,
                                        const typename Format::Input* inputs, std::size_t pitch,
                                        int width, const char* ahead, std::size_t apart,
                                        typename Format::Acc* acc, int gap) {
  if constexpr (requires { typename Format::Register; }) {
    // Sixteen registers hold eight sums with their weights and inputs. Later passes read from the cache.
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
      using Part = typename Format::Part;
      Part input[MR];
      for (int m = 0; m < MR; m++) input[m] = read<Part>(inputs + m * pitch + k);
      for (int r = 0; r < NR; r++) {
        const Part weight = read<Part>(weights + r * stride + k);
        for (int m = 0; m < MR; m++)
          sum[r * MR + m] = Format::add(sum[r * MR + m], weight, input[m]);
      }
    }
    // Unrolled, so that the sums stay in registers.
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
      for (int r = 0; r < NR; r++) acc[m * gap + r] = sum[r * MR + m];
  }
}

}  // namespace logitd
