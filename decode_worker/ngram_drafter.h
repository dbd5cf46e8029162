#pragma once

// Drafts by looking up how prompt and answer went on where their end occurred before.

#include <array>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "decode_worker/acceptance.h"
#include "decode_worker/drafter.h"
#include "decode_worker/ngram_index.h"

namespace baton::decode {

// Needs no model: pays in answers that repeat their input or themselves, and offers nothing
// elsewhere. How much a match is worth is learned by its length, from all sequences and, above
// that, from each. Engine thread only.
class NgramDrafter : public Drafter {
 public:
  DraftOffer Offer(const Drafting& drafting) override;
  void Draft(absl::Span<Drafting* const> draftings) override;
  void OnVerified(const Drafting& drafting, int accepted) override;
  void Forget(uint64_t order) override { states_.erase(order); }

  int num_sequences() const { return static_cast<int>(states_.size()); }

 private:
  // By length of the match: 2-3, 4-7, 8-15, 16 and more.
  static constexpr int kClasses = 4;
  using ByClass = std::array<Acceptance, kClasses>;

  struct State {
    explicit State(int capacity) : index(capacity) {}
    NgramIndex index;
    NgramIndex::Match match;
    ByClass acceptance;
  };

  static int ClassOf(int match_length);

  absl::flat_hash_map<uint64_t, std::unique_ptr<State>> states_;
  ByClass acceptance_;
};

}  // namespace baton::decode
