// Runs a fuzz target over files and over mutations of them, the same ones every time: truncations,
// flipped bits, overwritten numbers, repeated pieces. Arguments: files, or directories of files. A
// fault shows as a crash, under a sanitizer as its report; with BATON_FUZZ_VERBOSE set, the last
// line before it names the file and the mutation.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr int kMutationsPerFile = 400;
// Numbers that lengths and counts break at.
constexpr uint64_t kNumbers[] = {0,
                                 1,
                                 7,
                                 0x7f,
                                 0xff,
                                 0x7fff,
                                 0xffff,
                                 0x7fffffff,
                                 0xffffffff,
                                 uint64_t{1} << 32,
                                 uint64_t{1} << 62,
                                 uint64_t{1} << 63,
                                 ~uint64_t{0}};

// A copy of exactly this size, so that a sanitizer sees the first byte read too far.
void RunOnce(const std::string& bytes) {
  std::vector<uint8_t> copy(bytes.begin(), bytes.end());
  copy.shrink_to_fit();
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
}

std::string Mutate(std::string bytes, std::mt19937* random) {
  const auto below = [random](size_t limit) { return limit == 0 ? 0 : (*random)() % limit; };
  const int count = 1 + static_cast<int>(below(3));
  for (int i = 0; i < count && !bytes.empty(); ++i) {
    // Headers are in front: half of the places lie in the first kilobyte.
    const size_t at = below(below(2) == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 1024));
    switch (below(4)) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 2: {
        const uint64_t number = kNumbers[below(std::size(kNumbers))];
        memcpy(bytes.data() + at, &number, std::min(sizeof(number), bytes.size() - at));
        break;
      }
      default:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(32)));
    }
  }
  return bytes;
}

void RunFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  RunOnce(bytes);
  std::mt19937 random(1);
  const bool verbose = std::getenv("BATON_FUZZ_VERBOSE") != nullptr;
  for (int i = 0; i < kMutationsPerFile; ++i) {
    if (verbose) fprintf(stderr, "%s mutation %d\n", path.c_str(), i);
    RunOnce(Mutate(bytes, &random));
  }
}

}  // namespace

int main(int argc, char** argv) {
  int num_files = 0;
  for (int i = 1; i < argc; ++i) {
    if (!std::filesystem::is_directory(argv[i])) {
      RunFile(argv[i]);
      ++num_files;
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      RunFile(entry.path());
      ++num_files;
    }
  }
  printf("%d files, %d mutations of each\n", num_files, kMutationsPerFile);
  return num_files > 0 ? 0 : 1;
}
