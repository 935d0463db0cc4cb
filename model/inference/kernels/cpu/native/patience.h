// Patience: when waiting for other threads has cost so much that computing alone is better.
//
// A worker that is late has lost its core to another process, and while that stays so every loop may
// wait for it again, a slice of the scheduler's each time. So when much of some time was lost to waiting
// the caller computes alone for a while, which costs the workers' share and no more, and then tries
// again; for longer each time that it did not help. Now and then a millisecond is nothing to act on: an
// event loop takes that much to hand over the tokens of a step (measured: a server of 32 streams lost a
// tenth of its rate and more where each of these had its threads compute alone).
#pragma once

#include <algorithm>
#include <chrono>

namespace logitd {

class Patience {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  // Take note of a wait.
  void waited(Time since, Time now) {
    if (now - since <= LATE) return;
    if (since - watched_since_ > WATCHED) watched_since_ = since, lost_ = {};
    lost_ += now - since;
    Duration watched = std::max<Duration>(now - watched_since_, LEAST_WATCHED);
    if (lost_ * 100 > watched * LOST_PERCENT) stay_alone(since, now);
  }

  Time alone_until() const { return alone_until_; }

 private:
  static constexpr auto LATE = std::chrono::microseconds(500);  // a piece takes tens
  static constexpr auto WATCHED = std::chrono::milliseconds(30);
  static constexpr auto LEAST_WATCHED = std::chrono::milliseconds(8);
  static constexpr int LOST_PERCENT = 35;
  static constexpr Duration SHORTEST = std::chrono::milliseconds(20);  // alone
  static constexpr Duration LONGEST = std::chrono::milliseconds(640);

  void stay_alone(Time since, Time now) {
    bool again = since - alone_until_ < alone_for_;
    alone_for_ = again ? std::min(2 * alone_for_, LONGEST) : SHORTEST;
    alone_until_ = now + alone_for_;
    watched_since_ = alone_until_, lost_ = {};
  }

  Time alone_until_;
  Duration alone_for_{SHORTEST};
  Time watched_since_;
  Duration lost_{};
};

}  // namespace logitd
