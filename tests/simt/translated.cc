#include "tests/simt/translated.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

std::map<std::string, TranslatedKernel>& BySymbol() {
  static auto* kernels = new std::map<std::string, TranslatedKernel>;
  return *kernels;
}

uintptr_t LoadAddress() {
  uintptr_t address = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uintptr_t*>(out) = info->dlpi_addr;
        return 1;  // the first is the program itself
      },
      &address);
  return address;
}

// The addresses of this program's functions that are kernels with PTX. Kernels are in anonymous
// namespaces, so only the full symbol table names them.
std::map<const void*, TranslatedKernel> FindAddresses() {
  std::map<const void*, TranslatedKernel> found;
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image.data());
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* names = image.data() + sections[sections[i].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image.data() + sections[i].sh_offset);
    for (size_t s = 0; s < sections[i].sh_size / sizeof(Elf64_Sym); ++s) {
      if (ELF64_ST_TYPE(symbols[s].st_info) != STT_FUNC) continue;
      const auto kernel = BySymbol().find(CanonicalSymbol(names + symbols[s].st_name));
      if (kernel == BySymbol().end()) continue;
      found[reinterpret_cast<const void*>(LoadAddress() + symbols[s].st_value)] = kernel->second;
    }
  }
  return found;
}

struct Call {
  TranslatedKernel kernel;
  const unsigned char* parameters;
};

}  // namespace

// `12_GLOBAL__N_1`, or with more characters behind it: the number says how many.
std::string CanonicalSymbol(const std::string& symbol) {
  std::string out;
  for (size_t i = 0; i < symbol.size();) {
    size_t end = i, length = 0;
    while (end < symbol.size() && std::isdigit(static_cast<unsigned char>(symbol[end])))
      length = length * 10 + static_cast<size_t>(symbol[end++] - '0');
    if (end > i && symbol.compare(end, 10, "_GLOBAL__N") == 0) {
      out += "anonymous";
      i = std::min(end + length, symbol.size());
      continue;
    }
    out += symbol.substr(i, end > i ? end - i : 1);
    i = std::max(end, i + 1);
  }
  return out;
}

bool RegisterTranslated(const char* symbol, TranslatedKernel kernel) {
  if (BySymbol().emplace(CanonicalSymbol(symbol), kernel).second) return true;
  std::fprintf(stderr, "two kernels from PTX are named %s\n", symbol);
  std::abort();
}

bool HasTranslated() { return !BySymbol().empty(); }

void ParameterBytes::Append(const void* value, size_t size, size_t alignment) {
  const size_t begin = (bytes_.size() + alignment - 1) / alignment * alignment;
  bytes_.resize(begin + size);
  std::memcpy(bytes_.data() + begin, value, size);
}

cudaError_t RunTranslated(const void* kernel,
                          dim3 grid,
                          dim3 block,
                          size_t shared_bytes,
                          const ParameterBytes& parameters) {
  static const auto* kernels = new std::map<const void*, TranslatedKernel>(FindAddresses());
  const auto found = kernels->find(kernel);
  if (found == kernels->end()) return cudaErrorInvalidDeviceFunction;
  const Call call = {found->second, parameters.data()};
  return RunGrid(
      grid, block, shared_bytes,
      [](const void* arguments) {
        const Call& call = *static_cast<const Call*>(arguments);
        call.kernel(call.parameters);
      },
      &call);
}

}  // namespace baton::simt
