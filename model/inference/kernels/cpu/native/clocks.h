// Clocks: the time of each stage of a step, on request. Otherwise a stage costs one test of a
// pointer.
//
// The calling thread reads the clock when all threads have finished a stage, so a stage's time
// includes the wait for the last thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace logitd {

// The stages of a step in order. Each block repeats NORMS to MLP_DOWN.
//   NORMS      preparing a row's stream for a product; products include the residual sums
//   ATTENTION  positions, norms of heads, new keys and values, attention, the heads' outputs
// (With weights in strips MLP_UP includes the activation, except that of a gate.)
enum Stage { EMBEDDING, NORMS, QKV, ATTENTION, ATTENTION_OUT, MLP_UP, ACTIVATION, MLP_DOWN, HEAD, SAMPLING };

constexpr const char* STAGE_NAMES =
    "embedding norms qkv attention attention_out mlp_up activation mlp_down head sampling";

class Clocks {
 public:
  // Add nanoseconds to total[Stage] from now on; null: measure nothing.
  void add_to(std::int64_t* total) { total_ = total; }

  void begin() {
    if (total_) last_ = now();
  }

  // Attribute the time since the last call to this stage.
  void end(Stage stage) {
    if (!total_) return;
    std::int64_t time = now();
    total_[stage] += time - last_;
    last_ = time;
  }

 private:
  static std::int64_t now() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  std::int64_t* total_ = nullptr;
  std::int64_t last_ = 0;
};

}  // namespace logitd
