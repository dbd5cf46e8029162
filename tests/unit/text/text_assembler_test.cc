#include "engine/text/text_assembler.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/base/utf8.h"
#include "tests/unit/text/vector_files.h"

namespace baton::text {
namespace {

const Tokenizer& Tiny() {
  static const Tokenizer* const kTokenizer =
      Tokenizer::LoadHuggingFace(SourcePath("tests/data/tokenizer/tiny_qwen2.json"))->release();
  return *kTokenizer;
}

TextAssembler Assembler(std::vector<std::string> stops = {}, TextAssembler::Options options = {}) {
  return TextAssembler(Tiny(), *StopMatcher::Create(std::move(stops), options.include_stop),
                       options);
}

// One token for each byte.
std::vector<TokenId> ByteTokens(absl::string_view bytes) {
  std::vector<TokenId> ids;
  for (size_t i = 0; i < bytes.size(); ++i) ids.push_back(*Tiny().FindToken(bytes.substr(i, 1)));
  return ids;
}

struct Streamed {
  std::vector<std::string> deltas;
  std::string text;
  size_t num_taken = 0;
};

Streamed Stream(TextAssembler assembler,
                const std::vector<TokenId>& ids,
                std::optional<TokenId> end_token = std::nullopt) {
  Streamed result;
  for (const TokenId id : ids) {
    result.deltas.push_back(assembler.Push(id));
    ++result.num_taken;
    if (assembler.stopped()) break;
  }
  result.deltas.push_back(assembler.Finish(end_token));
  for (const std::string& delta : result.deltas) {
    EXPECT_TRUE(base::IsValidUtf8(delta)) << delta;
    result.text += delta;
  }
  return result;
}

// Case 1.1: characters without a token of their own come whole, and joined deltas are the decoded
// text.
TEST(TextAssemblerTest, CharactersOfSeveralTokensArriveWhole) {
  const std::string text =
      "a\xF0\x9F\xAB\xA0z\xF0\x9F\xA5\xB9\xE9\xBE\x9C";  // U+1FAE0, U+1F979, U+9F9C
  const auto ids = ByteTokens(text);
  const Streamed streamed = Stream(Assembler(), ids);
  EXPECT_EQ(streamed.text, text);
  EXPECT_EQ(streamed.text, Tiny().Decode(ids, true));
  EXPECT_EQ(streamed.deltas[1], "");
  EXPECT_EQ(streamed.deltas[4], "\xF0\x9F\xAB\xA0");
}

// Case 1.2: an answer that ends inside a character, after 1, 2 and 3 of its bytes, gets one U+FFFD
// for it: by length (Finish), by an end token, and by a stop string.
TEST(TextAssemblerTest, AnUnfinishedCharacterBecomesOneReplacementCharacter) {
  const std::string emoji = "\xF0\x9F\xAB\xA0";
  for (size_t bytes = 1; bytes <= 3; ++bytes) {
    const auto ids = ByteTokens("a" + emoji.substr(0, bytes));
    EXPECT_EQ(Stream(Assembler(), ids).text, "a\xEF\xBF\xBD") << bytes;
    EXPECT_EQ(Stream(Assembler(), ids, *Tiny().FindToken("<|im_end|>")).text, "a\xEF\xBF\xBD")
        << bytes;
    auto stopped = ids;
    stopped.push_back(*Tiny().FindToken("!"));
    EXPECT_EQ(Stream(Assembler({"!"}), stopped).text, "a\xEF\xBF\xBD") << bytes;
    EXPECT_EQ(Tiny().Decode(ids, true), "a\xEF\xBF\xBD") << bytes;
  }
}

// Case 2.1: for every token boundary of an answer, a stop string that begins inside one token and
// ends inside a later one.
TEST(TextAssemblerTest, NothingOfAStopStringIsSentWhereverItLies) {
  const std::string answer = "hello world, the hello world and the rest \xE4\xB8\x96 of hello!";
  const auto ids = Tiny().Encode(answer, SpecialPolicy::kLiteral);
  ASSERT_GT(ids.size(), 16u);
  size_t boundary = 0;
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    boundary += Tiny().TokenBytes(ids[i]).size();
    const size_t before = boundary - (Tiny().TokenBytes(ids[i]).size() + 1) / 2;
    const std::string stop = answer.substr(before, boundary - before + 1);
    if (!base::IsValidUtf8(stop)) continue;  // stop strings are text
    const size_t first = answer.find(stop);
    const Streamed streamed = Stream(Assembler({stop}), ids);
    EXPECT_EQ(streamed.text, answer.substr(0, first)) << stop;
    // Generation halts at the token that completes the match.
    EXPECT_GE(Tiny().Decode(absl::MakeSpan(ids).subspan(0, streamed.num_taken), true).size(),
              first + stop.size());
    EXPECT_LT(Tiny().Decode(absl::MakeSpan(ids).subspan(0, streamed.num_taken - 1), true).size(),
              first + stop.size());
    TextAssembler::Options keep;
    keep.include_stop = true;
    EXPECT_EQ(Stream(Assembler({stop}, keep), ids).text, answer.substr(0, first) + stop) << stop;
  }
}

// Case 2.2 a.
TEST(TextAssemblerTest, FinishSendsNothingFromBehindTheMatch) {
  TextAssembler assembler = Assembler({"2."});
  std::string text;
  for (const TokenId id : ByteTokens("1. one 2. two 3. three")) text += assembler.Push(id);
  EXPECT_TRUE(assembler.stopped());
  EXPECT_EQ(text + assembler.Finish(), "1. one ");
  EXPECT_EQ(assembler.Finish(*Tiny().FindToken("<|im_end|>")), "");
}

// Case 2.2 b.
TEST(TextAssemblerTest, HeldTextIsReleasedWhenTheAnswerEndsOtherwise) {
  TextAssembler assembler = Assembler({"STOP"});
  std::string text;
  for (const TokenId id : ByteTokens("go STO")) text += assembler.Push(id);
  EXPECT_EQ(text, "go ");
  EXPECT_EQ(assembler.Finish(*Tiny().FindToken("<|im_end|>")), "STO");
}

TEST(TextAssemblerTest, SpecialTokensAddNoTextUnlessShown) {
  const TokenId end = *Tiny().FindToken("<|im_end|>");
  std::vector<TokenId> ids = ByteTokens("ab");
  ids.insert(ids.begin() + 1, end);
  EXPECT_EQ(Stream(Assembler(), ids, end).text, "ab");
  EXPECT_EQ(Stream(Assembler({"ab"}), ids).text, "");  // nor do they separate text
  TextAssembler::Options show;
  show.show_special = true;
  EXPECT_EQ(Stream(Assembler({}, show), ids, end).text, "a<|im_end|>b");
  TextAssembler::Options keep;
  keep.include_stop = true;
  EXPECT_EQ(Stream(Assembler({}, keep), ids, end).text, "ab<|im_end|>");
}

// The unary answer is the same code run in one go: for random tokens, stops and cuts, deltas joined
// never differ from it.
TEST(TextAssemblerTest, StreamAndUnaryAgreeOnRandomTokens) {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    std::vector<TokenId> ids;
    for (int i = 0; i < 12; ++i) ids.push_back(random() % Tiny().vocab_size());
    const std::string text = Tiny().Decode(ids, true);
    EXPECT_EQ(Stream(Assembler({"\x01never\x02"}), ids).text, text);
    const Streamed streamed = Stream(Assembler({"th", "a"}), ids);
    EXPECT_EQ(streamed.text.find("th"), std::string::npos);
    EXPECT_EQ(streamed.text.find('a'), std::string::npos);
  }
}

}  // namespace
}  // namespace baton::text
