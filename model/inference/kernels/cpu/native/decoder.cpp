// The border: what Python calls, in plain C. model/inference/kernels/cpu/decoder.py declares it.
#include "decoder.h"
#include "quantize.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

using namespace logitd;

extern "C" {

// The widest instructions that this was compiled for and may use, for people.
const char* logitd_instructions() {
  if (has_tiles()) return "AMX";
#if defined(__AVX512BF16__)
  return "AVX-512 BF16";
#elif defined(__AVX512VNNI__)
  return "AVX-512 VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(HALVES)
  return "AVX2";
#else
  return "portable";
#endif
}

// Whether products are computed by AMX: it was compiled for, and the system allows it.
std::int32_t logitd_has_tiles() { return has_tiles(); }

void* logitd_decoder_new(const ModelWeights* weights, const Cache* cache, std::int32_t rows,
                         std::int32_t threads) {
  return new Decoder(*weights, *cache, rows, threads);
}

void logitd_decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }

std::int32_t logitd_contended(void* decoder) { return static_cast<Decoder*>(decoder)->contended(); }

void logitd_decode(void* decoder, const std::int32_t* tokens, const std::int32_t* slots,
                   const std::int32_t* positions, std::int32_t count, float* logits) {
  static_cast<Decoder*>(decoder)->decode(tokens, slots, positions, count, logits);
}

void logitd_prefill(void* decoder, const std::int32_t* tokens, const std::int32_t* slots,
                    const std::int32_t* positions, std::int32_t count, const Record* record,
                    float* hidden) {
  static_cast<Decoder*>(decoder)->prefill(tokens, slots, positions, count, *record, hidden);
}

void logitd_mixed(void* decoder, const std::int32_t* tokens, const std::int32_t* slots,
                  const std::int32_t* positions, std::int32_t count, const std::int32_t* wanted_rows,
                  std::int32_t wanted, float* hidden, float* logits) {
  static_cast<Decoder*>(decoder)->mixed(tokens, slots, positions, count, wanted_rows, wanted, hidden, logits);
}

void logitd_head(void* decoder, const float* hidden, std::int32_t count, float* logits) {
  static_cast<Decoder*>(decoder)->head(hidden, count, logits);
}

void logitd_sample(void* decoder, SampleRow* rows, std::int32_t count) {
  static_cast<Decoder*>(decoder)->sample(rows, count);
}

// The names of the stages that are timed, in their order, with spaces between them.
const char* logitd_stage_names() { return STAGE_NAMES; }

// Nanoseconds of each stage of what is computed from now on are added to `total`, which outlives that;
// null: no stage is timed.
void logitd_time_stages(void* decoder, std::int64_t* total) {
  static_cast<Decoder*>(decoder)->time_stages(total);
}

// `count` rows of a matrix to int8 or int4 (`kind`), each with its scale and what its integers sum to; the
// weights become what that stands for. int4's scales are up to `most` times the row's. In strips of int8 the
// first row is one's first, and `stored` is zeros.
void logitd_quantize(std::int32_t kind, float* weights, std::int32_t count, std::int32_t width,
                     std::int32_t most, void* stored, float* scale, std::int32_t* row_sum) {
  auto* bytes = static_cast<std::uint8_t*>(stored);
  std::vector<std::int8_t> integers(width);
  for (int row = 0; row < count; row++, weights += width) {
    RoundedRow rounded;
    if (kind == KIND_INT8) {
      rounded = round_int8(weights, width, reinterpret_cast<std::int8_t*>(bytes));
      bytes += width;
    } else if (kind == KIND_INT8_STRIPS) {
      rounded = round_int8(weights, width, integers.data());
      put_strip_row(integers.data(), width, row % STRIP_ROWS,
                    bytes + row / STRIP_ROWS * int8_strip_bytes(width));
    } else {
      rounded = round_int4(weights, width, most, bytes);
      bytes += I4::row_bytes(width);
    }
    scale[row] = rounded.scale;
    row_sum[row] = rounded.sum;
  }
}

// Weights (rows, width) of bfloat16 without loss into `to`, as compressed.h says, and where each strip begins
// and the last one ends, in lines. Bytes written; 0: they are more than `room`, or there are no tiles.
std::int64_t logitd_compress([[maybe_unused]] const void* weights, [[maybe_unused]] std::int32_t rows,
                             [[maybe_unused]] std::int32_t width, [[maybe_unused]] void* to,
                             [[maybe_unused]] std::int64_t room, [[maybe_unused]] std::uint32_t* strips) {
#if defined(TILES)
  return std::int64_t(Compressor::compress(static_cast<const Bf16*>(weights), rows, width,
                                           static_cast<std::uint8_t*>(to), std::size_t(room), strips));
#else
  return 0;
#endif
}

// Weights (rows, width) of bfloat16 from a compressed matrix.
void logitd_decompress([[maybe_unused]] const Matrix* matrix, [[maybe_unused]] void* to) {
#if defined(TILES)
  decompress(*matrix, static_cast<Bf16*>(to));
#endif
}

// Give the memory of `size` bytes back to the system, as far as it is whole pages, where this is known to be
// possible. What is read there afterwards means nothing; it may be written anew.
void logitd_forget([[maybe_unused]] void* from, [[maybe_unused]] std::int64_t size) {
#if defined(__linux__)
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<std::uintptr_t>(from);
  const std::uintptr_t first = (at + page - 1) / page * page;
  const std::uintptr_t last = (at + std::uintptr_t(size)) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
}

// For tests: until when, in microseconds, a thread computes alone after it has waited `count` times,
// each from `since` to `until`.
std::int64_t logitd_contention_alone_until(const std::int64_t* since, const std::int64_t* until,
                                           std::int32_t count) {
  ContentionMonitor monitor;
  auto at = [](std::int64_t us) { return ContentionMonitor::Time(std::chrono::microseconds(us)); };
  for (int i = 0; i < count; i++) monitor.waited(at(since[i]), at(until[i]));
  auto alone = monitor.alone_until().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(alone).count();
}

// One matrix by itself, for tests: out (count, rows) of float rows (count, width).
void logitd_linear(const Matrix* matrix, const float* inputs, std::int32_t count,
                   std::int32_t threads, std::int32_t repeat, float* out) {
  Pool pool(threads);
  Converted converted(matrix->kind, count, matrix->width);
  pool.begin();
  for (int row = 0; row < count; row++)
    converted.put(row, inputs + std::size_t(row) * matrix->width, matrix->width);
  if (converted.packs(count))
    for (int row = 0; row < count; row += SIDE) converted.pack(row, std::min(SIDE, count - row));
  for (int i = 0; i < repeat; i++)
    linear(pool, *matrix, converted.inputs(count), out, matrix->rows, false);
  pool.rest();
}

// An activation by itself, for tests: `width` numbers, whole vectors of them; of swiglu's `from` has as many
// of the gate first.
void logitd_activate(std::int32_t kind, const float* from, float* to, std::int32_t width) {
  activate(Activation(kind), from, to, width);
}

}  // extern "C"
