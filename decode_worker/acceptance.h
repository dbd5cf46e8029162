#pragma once

// How often drafts have been accepted lately.

namespace baton::decode {

// Counts that fade, so that an answer that changes its character is noticed, and so that one that
// has been given up is tried again after a while. Plain data.
class Acceptance {
 public:
  // Drafts up to the first wrong one count: what follows it was never looked at.
  void Add(int proposed, int accepted) {
    trials_ += static_cast<float>(accepted < proposed ? accepted + 1 : accepted);
    hits_ += static_cast<float>(accepted);
  }
  void Fade(float keep) {
    trials_ *= keep;
    hits_ *= keep;
  }
  // `prior` weighs as much as `weight` trials.
  float Estimate(float prior, float weight) const {
    return (hits_ + prior * weight) / (trials_ + weight);
  }

 private:
  float trials_ = 0;
  float hits_ = 0;
};

}  // namespace baton::decode
