// Pool: the compute threads and the loops that they share.
//
// Threads claim the items of a loop one by one. A loop ends when all its items are done, not when every
// thread has taken part: a thread that loses its core delays only its current item, and one that wakes late
// takes what is left. The thread that computes an item never changes its result. Waiting threads spin for the
// length of a pause within a step, then sleep.
//
// There is one caller and any number of workers. `run_`, `context_` and `count_` describe a loop. `cursor_`
// hands it out: one word with the loop's serial number in the upper bits and the next item in the lower ones.
//
//   state of cursor_            written by                          meaning
//   (serial, MASK)              the caller, before it writes the    closed: MASK exceeds every count, so a
//                               description of loop `serial`        worker finds no item
//   (serial, 0)                 the caller, with release, after     open: a reader of this state sees the
//                               writing the description             whole description
//   (serial, i) -> (serial,     the thread that claims item i, by   the thread owns item i; the last claim
//   i + 1), i < count           compare-and-exchange                leaves (serial, count): exhausted
//
// A worker may read the description of one loop and be delayed until the next one is written. Then its
// exchange fails, because the serial number has changed, and it discards what it read: no mixture of two
// descriptions ever runs. (This is a seqlock whose readers commit by the exchange.) The caller leaves `loop`
// when `done_` reaches the count. Every item adds to `done_` with release after it ran, and the caller reads
// it with acquire. So the caller sees all results, and no worker is inside an item when the next loop is
// written.
//
// A late worker has lost its core to another process; the caller may then compute alone (contention.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "contention.h"

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

  // Let the workers look for items, from here until `rest`.
  void begin() {
    if (workers_.empty()) return;
    alone_ = contended();
    if (alone_) return;
    active_.store(true, std::memory_order_release);
    if (asleep_.load() > 0) {
      woken_.fetch_add(1);
      woken_.notify_all();
    }
  }

  // True if workers were late recently, so that the caller computes alone.
  bool contended() const { return Clock::now() < monitor_.alone_until(); }

  void rest() { active_.store(false, std::memory_order_release); }

  // Call item(i) for each i in [0, count), on any thread, and return when all have returned.
  template <class WorkItem>
  void loop(int count, const WorkItem& item) {
    if (count == 1 || alone_ || workers_.empty()) {
      for (int i = 0; i < count; i++) item(i);
      return;
    }
    // 1) Close. The fence orders the description below after the closed cursor: a worker that read any of
    //    it finds the new serial number at its exchange, and claims nothing.
    std::uint64_t serial = (cursor_.load(std::memory_order_relaxed) >> BITS) + 1;
    cursor_.store((serial << BITS) | MASK, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    // 2) Describe. All items of the last loop are done, so nothing adds to `done_` any more.
    run_.store([](const void* context, int i) { (*static_cast<const WorkItem*>(context))(i); },
               std::memory_order_relaxed);
    context_.store(&item, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    // 3) Open. Release: a thread that loads this cursor with acquire sees the description.
    cursor_.store(serial << BITS, std::memory_order_release);
    // 4) Take part, then wait for the items of other threads.
    while (claim()) {
    }
    wait(count);
  }

  // Like `loop`, but a thread first takes the consecutive items of its own lane, then items of other lanes. So
  // a thread reads one stream. (Measured: when threads took items in turns, a faster thread interrupted the
  // streams, and a loop was a fifth slower.)
  template <class WorkItem>
  void lanes(int count, const WorkItem& item) {
    const int lanes = threads(), per_lane = (count + lanes - 1) / lanes;
    for (int lane = 0; lane < lanes; lane++)
      next_[lane].item.store(lane * per_lane, std::memory_order_relaxed);
    loop(lanes, [&](int own) {
      for (int lane = own; lane < own + lanes; lane++) {
        const int end = std::min(count, (lane % lanes + 1) * per_lane);
        std::atomic<int>& next = next_[lane % lanes].item;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) item(i);
      }
    });
  }

  int threads() const { return int(workers_.size()) + 1; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int BITS = 24;  // of the cursor: the next item; above them the serial number
  static constexpr std::uint64_t MASK = (std::uint64_t(1) << BITS) - 1;
  static constexpr auto SPIN = std::chrono::microseconds(200);

  // Wait until all items are done.
  void wait(int count) {
    Clock::time_point since;
    for (int turn = 0; done_.load(std::memory_order_acquire) < count; turn++) {
      if (turn == 1000) since = Clock::now();
      // The thread with the last item may be off its core; yield ours to it rather than spin for long.
      if (turn < 20000) relax(); else std::this_thread::yield();
    }
    if (since == Clock::time_point()) return;  // a short wait
    monitor_.waited(since, Clock::now());
  }

  // Claim one item of the current loop and run it. False if there is none.
  bool claim() {
    // Acquire pairs with the caller's release in `loop`: an open cursor comes with its description.
    std::uint64_t cursor = cursor_.load(std::memory_order_acquire);
    for (;;) {
      int item = int(cursor & MASK);
      auto run = run_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      if (item >= count_.load(std::memory_order_relaxed)) return false;  // closed or exhausted
      // The three loads may belong to a later loop than the cursor. The fence pairs with the one in `loop`:
      // if one of them does, the exchange sees the later cursor and fails.
      std::atomic_thread_fence(std::memory_order_acquire);
      if (cursor_.compare_exchange_weak(cursor, cursor + 1, std::memory_order_acq_rel)) {
        run(context, item);
        // Release: the caller, which reads `done_` with acquire, sees the item's results.
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
      // Another thread was faster, or the loop has changed: `cursor` now holds the new value.
    }
  }

  // A worker: claim items while the caller is in a step, then spin for a while, then sleep.
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

  // Sleep until `begin` or the destructor changes `woken_`. If it has changed since `seen` was read, the wait
  // ends immediately. `begin` may read `asleep_` just before this worker counts itself, while its store of `active_` is
  // not visible here yet. Then this worker sleeps through one step, the others do its share, and the next
  // `begin` wakes it. A fence in every step would cost more than that rare case.
  void sleep() {
    int seen = woken_.load();
    asleep_.fetch_add(1);
    if (!active_.load() && !stopping_.load()) woken_.wait(seen);
    asleep_.fetch_sub(1);
  }

  struct alignas(64) Lane {
    std::atomic<int> item;
  };

  std::vector<Lane> next_;  // the next item of each lane
  std::vector<std::thread> workers_;
  bool alone_ = false;  // from `begin` to `rest`
  ContentionMonitor monitor_;
  alignas(64) std::atomic<std::uint64_t> cursor_{MASK};  // closed
  std::atomic<void (*)(const void*, int)> run_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> count_{0};
  alignas(64) std::atomic<int> done_{0};  // finished items of the current loop
  alignas(64) std::atomic<bool> active_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> asleep_{0};
  std::atomic<int> woken_{0};
};

}  // namespace logitd
