// Clocks: how long the stages of a step take, where that is asked for; else they cost a look at a pointer
// per stage.
//
// Read by the thread that calls, when a stage is over for all threads: so a stage's time holds the
// waiting for the last of them.
#pragma once

#include <chrono>
#include <cstdint>

namespace logitd {

// What a step goes through, in this order, but for the blocks, which are gone through again and again.
//   NORMS      what a row's stream becomes before a product: residual sums are in the products
//   ATTENTION  positions, norms of heads, the new keys and values, the look back, the heads' outputs
// (Activations of compressed weights' products are a part of MLP_UP, but for those of a gate.)
enum Stage { EMBEDDING, NORMS, QKV, ATTENTION, ATTENTION_OUT, MLP_UP, ACTIVATION, MLP_DOWN, HEAD, SAMPLING };

constexpr const char* STAGE_NAMES =
    "embedding norms qkv attention attention_out mlp_up activation mlp_down head sampling";

class Clocks {
 public:
  // Nanoseconds are added to total[Stage] from now on; nothing is where that is null.
  void add_to(std::int64_t* total) { total_ = total; }

  void begin() {
    if (total_) last_ = now();
  }

  // What was computed since the last call was this stage.
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
