#include "compiler.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>
#include <utility>

#include "cuda_api.h"
#include "dynamic_library.h"
#include "error.h"

namespace jaxdnn {
namespace {

namespace fs = std::filesystem;

constexpr char kRemedy[] =
    "Install NVRTC with `pip install nvidia-cuda-nvrtc`, or set CUDA_HOME to a CUDA toolkit of version 12 or newer.";

// `prefix` followed by a version, as in libnvrtc.so.13; the empty string when `name` is anything else.
std::string version_suffix(const std::string& name, std::string_view prefix) {
  if (name.compare(0, prefix.size(), prefix) != 0) return "";
  std::string suffix = name.substr(prefix.size());
  bool numeric = std::all_of(suffix.begin(), suffix.end(), [](unsigned char c) { return std::isdigit(c) || c == '.'; });
  return numeric ? suffix : "";
}

// One NVRTC in one folder, judged by file names alone.
struct Location {
  std::string library;
  std::string builtins;
  std::optional<CompilerVersion> version;
};

std::optional<CompilerVersion> parse_version(const std::string& text) {
  size_t dot = text.find('.');
  if (dot == std::string::npos || dot == 0 || dot + 1 == text.size() || text.size() > 16) return std::nullopt;
  return CompilerVersion{std::atoi(text.c_str()), std::atoi(text.c_str() + dot + 1)};
}

// The builtins library whose version starts with `major` ("13"). Its name tells NVRTC's version; where several fit, as
// in a folder shared by many toolkits, the name tells nothing and `version` stays empty.
void find_builtins(const fs::path& directory, const std::string& major, Location& location) {
  std::error_code ignored;
  int candidates = 0;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    std::string suffix = version_suffix(entry.path().filename().string(), "libnvrtc-builtins.so.");
    std::optional<CompilerVersion> version = parse_version(suffix);
    // A fuller name of the same file, such as libnvrtc-builtins.so.12.4.127, is skipped.
    if (!version || std::count(suffix.begin(), suffix.end(), '.') != 1) continue;
    if (!major.empty() && std::to_string(version->major) != major) continue;
    ++candidates;
    location.builtins = entry.path().string();
    location.version = version;
  }
  if (candidates > 1) location.builtins.clear();
  if (candidates != 1) location.version.reset();
}

std::optional<Location> find_in(const fs::path& directory) {
  std::error_code ignored;
  std::string library, major;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    std::string suffix = version_suffix(entry.path().filename().string(), "libnvrtc.so.");
    // Of several the newest; libnvrtc.so.12 is what programs link to, libnvrtc.so.12.4.127 the same file.
    if (suffix.empty() || suffix.find('.') != std::string::npos) continue;
    if (library.empty() || std::stoi(suffix) > std::stoi(major)) {
      library = entry.path().string();
      major = suffix;
    }
  }
  if (library.empty()) {
    if (!fs::exists(directory / "libnvrtc.so", ignored)) return std::nullopt;
    library = (directory / "libnvrtc.so").string();
  }
  Location location{library, "", std::nullopt};
  find_builtins(directory, major, location);
  return location;
}

}  // namespace

const std::vector<std::string>& compile_options() {
  // -default-device lets the functors that Python emits go without __device__; -v makes the log hold what each kernel
  // uses of registers and spills.
  static const auto& options = *new std::vector<std::string>{"-std=c++17", "-default-device", "--ptxas-options=-v"};
  return options;
}

struct Compiler::Nvrtc {
#define JAXDNN_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  JAXDNN_NVRTC_FUNCTIONS(JAXDNN_MEMBER)
#undef JAXDNN_MEMBER

  CompilerDescription description;

  // False, with `reason` set, when the library can't serve.
  bool load(const std::string& name, std::string builtins, std::string& reason) {
    // NVRTC finds its own builtins only if they have been loaded by full path before; otherwise every compilation
    // fails with error 7.
    if (!builtins.empty()) DynamicLibrary preload(builtins);
    DynamicLibrary library(name);
    if (!library.loaded()) return reason = library.error(), false;
    description.path = library.path("nvrtcVersion");
    const char* missing = nullptr;
#define JAXDNN_BIND(function, ...) \
  if (!library.bind(function, #function)) missing = #function;
    JAXDNN_NVRTC_FUNCTIONS(JAXDNN_BIND)
#undef JAXDNN_BIND
    if (missing != nullptr) return reason = description.path + " is too old: it has no " + missing, false;
    CompilerVersion& version = description.version;
    int count = 0;
    if (nvrtcVersion(&version.major, &version.minor) == NVRTC_SUCCESS &&
        nvrtcGetNumSupportedArchs(&count) == NVRTC_SUCCESS) {
      description.architectures.resize(count);
      if (nvrtcGetSupportedArchs(description.architectures.data()) != NVRTC_SUCCESS) count = 0;
    }
    if (count <= 0) return reason = description.path + " doesn't say what it supports", false;
    if (builtins.empty()) {
      builtins = (fs::path(description.path).parent_path() / ("libnvrtc-builtins.so." + version.text())).string();
      std::error_code ignored;
      if (fs::exists(builtins, ignored)) {
        DynamicLibrary late(builtins);
      } else {
        builtins.clear();
      }
    }
    description.builtins = builtins;
    return true;
  }
};

Compiler::Compiler(std::vector<std::string> directories) : directories_(std::move(directories)) {}

Compiler::~Compiler() = default;

CompilerVersion Compiler::version() {
  {
    std::lock_guard lock(mutex_);
    if (!version_ && !nvrtc_) {
      for (const std::string& directory : directories_) {
        if (std::optional<Location> location = find_in(directory)) {
          version_ = location->version;
          break;
        }
      }
    }
    if (version_) return *version_;
  }
  return nvrtc().description.version;
}

const Compiler::Nvrtc& Compiler::nvrtc() {
  std::lock_guard lock(mutex_);
  if (nvrtc_) return *nvrtc_;
  std::string reasons;
  auto attempt = [&](const std::string& library, const std::string& builtins) {
    auto candidate = std::make_unique<Nvrtc>();
    std::string reason;
    if (!candidate->load(library, builtins, reason)) {
      reasons += "\n  " + reason;
      return false;
    }
    version_ = candidate->description.version;
    nvrtc_ = std::move(candidate);
    return true;
  };
  for (const std::string& directory : directories_) {
    std::optional<Location> location = find_in(directory);
    if (location && attempt(location->library, location->builtins)) return *nvrtc_;
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (attempt(name, "")) return *nvrtc_;
  }
  throw Unavailable("NVRTC, CUDA's run-time compiler, can't be loaded. " + std::string(kRemedy) + " Tried:" + reasons);
}

CompilerDescription Compiler::describe() { return nvrtc().description; }

Compilation Compiler::compile(const std::string& name, const std::string& unit, const std::string& arch,
                              const std::vector<const KernelHeader*>& headers) {
  const Nvrtc& api = nvrtc();
  const CompilerDescription& self = api.description;

  int capability = arch.compare(0, 3, "sm_") == 0 ? std::atoi(arch.c_str() + 3) : 0;
  if (std::count(self.architectures.begin(), self.architectures.end(), capability) == 0) {
    throw Unavailable("NVRTC " + self.version.text() + " (" + self.path + ") can't compile for " + arch +
                      ": it supports sm_" + std::to_string(self.architectures.front()) + " to sm_" +
                      std::to_string(self.architectures.back()) +
                      ". Install an NVRTC of the CUDA version that supports this GPU: `pip install -U "
                      "nvidia-cuda-nvrtc`.");
  }

  std::vector<const char*> texts, names;
  for (const KernelHeader* header : headers) {
    texts.push_back(header->text);
    names.push_back(header->name.c_str());
  }
  nvrtcProgram program = nullptr;
  auto check = [&](nvrtcResult result, const char* what) {
    if (result == NVRTC_SUCCESS) return;
    throw Unavailable("NVRTC " + self.version.text() + " (" + self.path + ") failed in " + what + " with " +
                      api.nvrtcGetErrorString(result) + " for " + name + " (" + arch + "). " + kRemedy);
  };
  check(api.nvrtcCreateProgram(&program, unit.c_str(), name.c_str(), static_cast<int>(headers.size()), texts.data(),
                               names.data()),
        "nvrtcCreateProgram");
  struct Destroyer {
    const Nvrtc& api;
    nvrtcProgram program;
    ~Destroyer() { api.nvrtcDestroyProgram(&program); }
  } destroyer{api, program};

  std::string architecture = "--gpu-architecture=" + arch;
  std::vector<const char*> options{architecture.c_str()};
  for (const std::string& option : compile_options()) options.push_back(option.c_str());
  // CUDA 12.4 and later: without the declarations of textures and of the runtime library, which kernels don't use, a
  // unit takes 3 ms less, and becomes the same code.
  if (std::pair(self.version.major, self.version.minor) >= std::pair(12, 4)) options.push_back("--minimal");
  nvrtcResult result = api.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());

  Compilation compilation;
  compilation.version = self.version;
  size_t size = 0;
  if (api.nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS && size > 1) {
    compilation.log.resize(size);
    if (api.nvrtcGetProgramLog(program, compilation.log.data()) != NVRTC_SUCCESS) compilation.log.clear();
    compilation.log.resize(std::min(compilation.log.size(), compilation.log.find('\0')));
  }
  if (result == NVRTC_ERROR_COMPILATION) {
    throw CompileError("NVRTC " + self.version.text() + " rejected " + name + " for " + arch + ":\n" + compilation.log);
  }
  check(result, "nvrtcCompileProgram");
  check(api.nvrtcGetCUBINSize(program, &size), "nvrtcGetCUBINSize");
  compilation.cubin.resize(size);
  check(api.nvrtcGetCUBIN(program, compilation.cubin.data()), "nvrtcGetCUBIN");
  return compilation;
}

namespace {

std::mutex current_mutex;

std::shared_ptr<Compiler>& current() {
  static auto& compiler = *new std::shared_ptr<Compiler>(std::make_shared<Compiler>(std::vector<std::string>{}));
  return compiler;
}

}  // namespace

std::shared_ptr<Compiler> compiler() {
  std::lock_guard lock(current_mutex);
  return current();
}

void set_library_paths(std::vector<std::string> directories) {
  std::lock_guard lock(current_mutex);
  current() = std::make_shared<Compiler>(std::move(directories));
}

}  // namespace jaxdnn
