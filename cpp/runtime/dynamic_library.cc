#include "dynamic_library.h"

#include <dlfcn.h>

namespace jaxdnn {

DynamicLibrary::DynamicLibrary(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) error_ = dlerror();
}

std::string DynamicLibrary::path(const char* symbol) const {
  Dl_info info;
  void* address = this->symbol(symbol);
  if (address == nullptr || dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  return info.dli_fname;
}

void* DynamicLibrary::symbol(const char* name) const { return handle_ == nullptr ? nullptr : dlsym(handle_, name); }

}  // namespace jaxdnn
