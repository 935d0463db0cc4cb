// The C interface for Python, which model/inference/kernels/cpu/decoder.py declares.
#include "decoder.h"
#include "quantize.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

using namespace logitd;

extern "C" {

// The name of the widest instructions that the code may use.
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

// 1 if AMX computes products: the code was compiled for it, and the system allows it.
std::int32_t logitd_has_tiles() { return has_tiles(); }

// 1 if int8 weights are multiplied in strips.
std::int32_t logitd_has_strips() {
#if defined(STRIPS)
  return 1;
#else
  return 0;
#endif
}

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

// The names of the timed stages in order, separated by spaces.
const char* logitd_stage_names() { return STAGE_NAMES; }

// Add the nanoseconds of each later stage to `total`, which must outlive them; null: time nothing.
void logitd_time_stages(void* decoder, std::int64_t* total) {
  static_cast<Decoder*>(decoder)->time_stages(total);
}

// Round `count` rows of a matrix in place to a format (`kind`). Each row's scale and the sum of its integers
// go to `scale` and `row_sum`. int4's scales are at most `most` times the row's. For strips of int8 the first
// row is the first of a strip, and `stored` is zeros.
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

// Compress bfloat16 weights (rows, width) into `to` (compressed.h). `strips` receives the line at which each
// strip begins, and the end of the last one. Returns the bytes; 0 if they exceed `room` or without tiles.
std::int64_t logitd_compress([[maybe_unused]] const void* weights, [[maybe_unused]] std::int32_t rows,
                             [[maybe_unused]] std::int32_t width, [[maybe_unused]] void* to,
                             [[maybe_unused]] std::int64_t room, [[maybe_unused]] std::uint32_t* strips) {
#if defined(TILES)
  return std::int64_t(compress(static_cast<const Bf16*>(weights), rows, width,
                               static_cast<std::uint8_t*>(to), std::size_t(room), strips));
#else
  return 0;
#endif
}

// Decompress a matrix to bfloat16 weights (rows, width).
void logitd_decompress([[maybe_unused]] const Matrix* matrix, [[maybe_unused]] void* to) {
#if defined(TILES)
  decompress(*matrix, static_cast<Bf16*>(to));
#endif
}

// Return the whole pages of `size` bytes to the system, on Linux only. Their contents are lost; they can be
// written again.
void logitd_forget([[maybe_unused]] void* from, [[maybe_unused]] std::int64_t size) {
#if defined(__linux__)
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<std::uintptr_t>(from);
  const std::uintptr_t first = (at + page - 1) / page * page;
  const std::uintptr_t last = (at + std::uintptr_t(size)) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
}

// For tests: the microsecond until which a thread computes alone after `count` waits, each from `since` to
// `until`.
std::int64_t logitd_contention_alone_until(const std::int64_t* since, const std::int64_t* until,
                                           std::int32_t count) {
  ContentionMonitor monitor;
  auto at = [](std::int64_t us) { return ContentionMonitor::Time(std::chrono::microseconds(us)); };
  for (int i = 0; i < count; i++) monitor.waited(at(since[i]), at(until[i]));
  auto alone = monitor.alone_until().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(alone).count();
}

// For tests: out (count, rows) = inputs (count, width) times a matrix.
void logitd_linear(const Matrix* matrix, const float* inputs, std::int32_t count, std::int32_t threads,
                   float* out) {
  Pool pool(threads);
  Converted converted(matrix->kind, count, matrix->width);
  pool.begin();
  for (int row = 0; row < count; row++)
    converted.put(row, inputs + std::size_t(row) * matrix->width, matrix->width);
  if (converted.packs(count))
    for (int row = 0; row < count; row += SIDE) converted.pack(row, std::min(SIDE, count - row));
  linear(pool, *matrix, converted.inputs(count), out, matrix->rows, false);
  pool.rest();
}

// For tests: the activation of `width` numbers, whole vectors. For swiglu the gate's numbers come first.
void logitd_activate(std::int32_t kind, const float* from, float* to, std::int32_t width) {
  activate(Activation(kind), from, to, width);
}

}  // extern "C"
