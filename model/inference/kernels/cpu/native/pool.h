// Pool: the compute threads, and a loop that they share.
//
// A loop's pieces are claimed one by one, and a loop is over when all its pieces are done, not when
// all threads have come by: a thread that the operating system has taken off its core delays at most
// the piece that it holds, and one that wakes late finds what is left. Which thread computes a piece
// never changes its result. Threads wait by spinning for as long as a step's own pauses last, then
// asleep.
//
// A worker that is late has lost its core to another process: then the caller may compute alone for a
// while (patience.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "patience.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace logitd {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads) : next_(std::max(threads, 1)) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    stopping_.store(true);
    woken_.fetch_add(1);
    woken_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Let the workers look for pieces, from here until `rest`.
  void begin() {
    if (workers_.empty()) return;
    alone_ = crowded();
    if (alone_) return;
    active_.store(true, std::memory_order_release);
    if (asleep_.load() > 0) {
      woken_.fetch_add(1);
      woken_.notify_all();
    }
  }

  // Whether workers were late of late, so that the caller computes alone.
  bool crowded() const { return Clock::now() < patience_.alone_until(); }

  void rest() { active_.store(false, std::memory_order_release); }

  // Call piece(i) for each i in [0, count), on any thread, and return when all have returned.
  template <class Piece>
  void loop(int count, const Piece& piece) {
    if (count == 1 || alone_ || workers_.empty()) {
      for (int i = 0; i < count; i++) piece(i);
      return;
    }
    // Closed while the loop's description is written: a worker that read half of it cannot claim.
    std::uint64_t serial = (cursor_.load(std::memory_order_relaxed) >> BITS) + 1;
    cursor_.store((serial << BITS) | MASK, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    run_.store([](const void* context, int i) { (*static_cast<const Piece*>(context))(i); },
               std::memory_order_relaxed);
    context_.store(&piece, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    cursor_.store(serial << BITS, std::memory_order_release);
    while (claim()) {
    }
    wait(count);
  }

  // Like `loop`, and a thread's pieces lie one behind the other for as long as it has some of its own;
  // then it helps with those of others. So what a thread reads is one stream. (Where threads took from
  // two lanes in turns, the streams broke off when they were not equally fast: a fifth slower.)
  template <class Piece>
  void lanes(int count, const Piece& piece) {
    const int lanes = threads(), per_lane = (count + lanes - 1) / lanes;
    for (int lane = 0; lane < lanes; lane++)
      next_[lane].piece.store(lane * per_lane, std::memory_order_relaxed);
    loop(lanes, [&](int own) {
      for (int lane = own; lane < own + lanes; lane++) {
        const int end = std::min(count, (lane % lanes + 1) * per_lane);
        std::atomic<int>& next = next_[lane % lanes].piece;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) piece(i);
      }
    });
  }

  int threads() const { return int(workers_.size()) + 1; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int BITS = 24;  // of the cursor: the next piece; above them the loop's number
  static constexpr std::uint64_t MASK = (std::uint64_t(1) << BITS) - 1;
  static constexpr auto SPIN = std::chrono::microseconds(200);

  // Until all pieces are done.
  void wait(int count) {
    Clock::time_point since;
    for (int turn = 0; done_.load(std::memory_order_acquire) < count; turn++) {
      if (turn == 1000) since = Clock::now();
      // Whoever holds the last piece may be off its core; give it ours rather than spin for long.
      if (turn < 20000) relax(); else std::this_thread::yield();
    }
    if (since == Clock::time_point()) return;  // a short wait
    patience_.waited(since, Clock::now());
  }

  // Claim one piece of the present loop and run it. False when there is none. The claim fails when
  // the loop has changed meanwhile, so what was read of it is never used for another.
  bool claim() {
    std::uint64_t cursor = cursor_.load(std::memory_order_acquire);
    for (;;) {
      int piece = int(cursor & MASK);
      auto run = run_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      if (piece >= count_.load(std::memory_order_relaxed)) return false;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (cursor_.compare_exchange_weak(cursor, cursor + 1, std::memory_order_acq_rel)) {
        run(context, piece);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void work() {
    auto idle_since = Clock::now();
    for (int turn = 0; !stopping_.load(std::memory_order_relaxed); turn++) {
      if (active_.load(std::memory_order_acquire) && claim()) {
        idle_since = Clock::now();
        continue;
      }
      relax();
      if (turn % 64 || active_.load(std::memory_order_relaxed)) continue;
      if (Clock::now() - idle_since > SPIN) {
        sleep();
        idle_since = Clock::now();
      }
    }
  }

  void sleep() {
    int seen = woken_.load();
    asleep_.fetch_add(1);
    if (!active_.load() && !stopping_.load()) woken_.wait(seen);
    asleep_.fetch_sub(1);
  }

  struct alignas(64) Lane {
    std::atomic<int> piece;
  };

  std::vector<Lane> next_;  // the next piece of each lane
  std::vector<std::thread> workers_;
  bool alone_ = false;  // from `begin` to `rest`
  Patience patience_;
  alignas(64) std::atomic<std::uint64_t> cursor_{MASK};
  std::atomic<void (*)(const void*, int)> run_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> count_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<bool> active_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> asleep_{0};
  std::atomic<int> woken_{0};
};

}  // namespace logitd
