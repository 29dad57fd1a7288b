#include "kernel_headers.h"

#include <map>

namespace jaxdnn {
namespace {

// The names in lines like `#include "core/math.cuh"`.
std::vector<std::string> quoted_includes(std::string_view source) {
  std::vector<std::string> names;
  while (!source.empty()) {
    size_t end = source.find('\n');
    std::string_view line = source.substr(0, end);
    source.remove_prefix(end == std::string_view::npos ? source.size() : end + 1);
    auto skip = [&](std::string_view word) {
      size_t start = line.find_first_not_of(" \t");
      if (start == std::string_view::npos || line.substr(start, word.size()) != word) return false;
      line.remove_prefix(start + word.size());
      return true;
    };
    if (!skip("#") || !skip("include") || !skip("\"")) continue;
    size_t quote = line.find('"');
    if (quote != std::string_view::npos) names.emplace_back(line.substr(0, quote));
  }
  return names;
}

}  // namespace

const std::vector<KernelHeader>& kernel_headers() {
  static const std::vector<KernelHeader>& headers = [] {
    auto* list = new std::vector<KernelHeader>;
    for (const EmbeddedHeader* header = embedded_headers; header->name != nullptr; ++header) {
      list->push_back(
          {header->name, header->text, Sha256().update(header->text).finish(), quoted_includes(header->text)});
    }
    return std::ref(*list);
  }();
  return headers;
}

std::vector<const KernelHeader*> included_headers(std::string_view source) {
  std::map<std::string, const KernelHeader*> found;
  std::vector<std::string> pending = quoted_includes(source);
  while (!pending.empty()) {
    std::string name = std::move(pending.back());
    pending.pop_back();
    for (const KernelHeader& header : kernel_headers()) {
      if (header.name != name || !found.emplace(name, &header).second) continue;
      pending.insert(pending.end(), header.includes.begin(), header.includes.end());
    }
  }
  std::vector<const KernelHeader*> headers;
  for (const auto& [name, header] : found) headers.push_back(header);
  return headers;
}

}  // namespace jaxdnn
