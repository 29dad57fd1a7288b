// The CUDA headers of cpp/kernels, built into the module.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sha256.h"

namespace jaxdnn {

struct EmbeddedHeader {
  const char* name;  // as a unit includes it: the path relative to cpp/kernels
  const char* text;
};

// Defined by the generated kernel_headers_data.cc; ends with a null name.
extern const EmbeddedHeader embedded_headers[];

struct KernelHeader {
  std::string name;
  const char* text;
  Digest digest;
  std::vector<std::string> includes;
};

const std::vector<KernelHeader>& kernel_headers();

// The headers that `source` includes, directly or through others, in order of name.
std::vector<const KernelHeader*> included_headers(std::string_view source);

}  // namespace jaxdnn
