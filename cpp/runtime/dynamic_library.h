// A shared library opened at run time.
#pragma once

#include <string>

namespace jaxdnn {

// Stays open until the process ends: the driver and NVRTC hold threads and state that outlive any scope of ours.
class DynamicLibrary {
 public:
  // `name` is a path, or a name for the loader's own search. On failure `error()` says why.
  explicit DynamicLibrary(const std::string& name);

  bool loaded() const { return handle_ != nullptr; }
  const std::string& error() const { return error_; }
  // The file that defines `symbol`; empty when there is no such symbol.
  std::string path(const char* symbol) const;

  // Null when there is no such symbol.
  void* symbol(const char* name) const;

  template <typename Function>
  bool bind(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
  std::string error_;
};

}  // namespace jaxdnn
