// ContentionMonitor: when other processes hold the cores, so that computing alone is better than waiting
// for other threads.
//
// A worker that is late has lost its core to another process, and while that lasts every loop may wait
// for it again, a slice of the scheduler's each time. So when a large share of some time was lost to
// waiting, the caller computes alone for a while, which costs no more than the workers' share, and then
// tries again; for longer each time that it did not help. A millisecond now and then is ignored: an event
// loop takes that much to deliver the tokens of a step (measured: a server of 32 streams lost a tenth of
// its rate and more where each of these made its threads compute alone).
#pragma once

#include <algorithm>
#include <chrono>

namespace logitd {

class ContentionMonitor {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  // Record a wait for other threads.
  void waited(Time since, Time now) {
    if (now - since <= LATE) return;
    if (since - window_start_ > WINDOW) window_start_ = since, lost_ = {};
    lost_ += now - since;
    Duration window = std::max<Duration>(now - window_start_, LEAST_WINDOW);
    if (lost_ * 100 > window * LOST_PERCENT) stay_alone(since, now);
  }

  Time alone_until() const { return alone_until_; }

 private:
  static constexpr auto LATE = std::chrono::microseconds(500);  // an item takes tens
  static constexpr auto WINDOW = std::chrono::milliseconds(30);
  static constexpr auto LEAST_WINDOW = std::chrono::milliseconds(8);
  static constexpr int LOST_PERCENT = 35;
  static constexpr Duration SHORTEST = std::chrono::milliseconds(20);  // alone
  static constexpr Duration LONGEST = std::chrono::milliseconds(640);

  void stay_alone(Time since, Time now) {
    bool again = since - alone_until_ < alone_for_;
    alone_for_ = again ? std::min(2 * alone_for_, LONGEST) : SHORTEST;
    alone_until_ = now + alone_for_;
    window_start_ = alone_until_, lost_ = {};
  }

  Time alone_until_;
  Duration alone_for_{SHORTEST};
  Time window_start_;
  Duration lost_{};
};

}  // namespace logitd
