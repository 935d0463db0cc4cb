// ContentionMonitor: detects that other processes hold the cores, so that computing alone is better than
// waiting for other threads.
//
// A late worker has lost its core to another process. While that lasts, every loop may wait for it again, a
// scheduler slice each time. If waiting takes a large share of some time, the caller computes alone for a
// while, which costs at most the workers' share, and then tries again. The pause doubles while it does not
// help. An occasional millisecond is ignored, because an event loop needs that to deliver the tokens of a
// step: a server of 32 streams lost a tenth of its rate or more when it reacted to each of them (measured).
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
  static constexpr auto LATE = std::chrono::microseconds(500);  // an item takes tens of microseconds
  static constexpr auto WINDOW = std::chrono::milliseconds(30);
  static constexpr auto LEAST_WINDOW = std::chrono::milliseconds(8);
  static constexpr int LOST_PERCENT = 35;
  static constexpr Duration SHORTEST = std::chrono::milliseconds(20);  // pause without the workers
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
