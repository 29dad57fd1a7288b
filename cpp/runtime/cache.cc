#include "cache.h"

#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#include "compiler.h"
#include "disk_cache.h"
#include "log.h"

namespace jaxdnn {
namespace {

// One unit's place in memory. Its mutex is held while the unit is compiled: whoever asks meanwhile waits.
struct Slot {
  std::mutex mutex;
  std::shared_ptr<const Cubin> cubin;
};

class Memory {
 public:
  std::shared_ptr<Slot> slot(const Digest& identity) {
    Shard& shard = shards_[identity[0] % shards_.size()];
    std::lock_guard lock(shard.mutex);
    std::shared_ptr<Slot>& slot = shard.slots[identity];
    if (!slot) slot = std::make_shared<Slot>();
    return slot;
  }

  void clear() {
    for (Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      shard.slots.clear();
    }
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::map<Digest, std::shared_ptr<Slot>> slots;
  };
  std::array<Shard, 16> shards_;
};

Memory& memory() {
  static auto& memory = *new Memory;
  return memory;
}

// What is compiled, without by which compiler.
Digest identity_of(const std::string& unit, const std::string& arch, const std::vector<const KernelHeader*>& headers) {
  Sha256 hash;
  hash.field(arch).field(unit);
  for (const KernelHeader* header : headers) {
    hash.field(header->name).field({reinterpret_cast<const char*>(header->digest.data()), header->digest.size()});
  }
  for (const std::string& option : compile_options()) hash.field(option);
  return hash.finish();
}

Digest key_of(const Digest& identity, const std::string& compiler_version) {
  return Sha256()
      .field({reinterpret_cast<const char*>(identity.data()), identity.size()})
      .field(compiler_version)
      .finish();
}

#ifdef JAXDNN_CUBIN_LIBRARY
// The folder `cubins` beside this module: a disk cache that the build has filled (cpp/build_library.py), with the
// version of NVRTC that it used in the file `compiler`.
std::optional<std::string> read_library(const Digest& identity, Digest& key) {
  struct Library {
    DiskCache cubins{"", 0, true};
    std::string compiler;
  };
  static const Library& library = [] {
    auto* found = new Library;
    Dl_info module;
    if (dladdr(reinterpret_cast<const void*>(&memory), &module) == 0) return std::ref(*found);
    std::string path = module.dli_fname;
    found->cubins = DiskCache(path.substr(0, path.find_last_of('/') + 1) + "cubins", 0, true);
    std::ifstream(found->cubins.directory() + "/compiler") >> found->compiler;
    return std::ref(*found);
  }();
  key = key_of(identity, library.compiler);
  return library.cubins.read(key);
}
#endif

}  // namespace

CompiledUnit compile_unit(const std::string& unit, const std::string& arch) {
  auto start = std::chrono::steady_clock::now();
  std::vector<const KernelHeader*> headers = included_headers(unit);
  Digest identity = identity_of(unit, arch, headers);
  std::shared_ptr<Slot> slot = memory().slot(identity);
  std::lock_guard lock(slot->mutex);

  CompiledUnit compiled;
  auto finish = [&](const char* origin, LogLevel level) {
    compiled.cubin = slot->cubin;
    compiled.origin = origin;
    compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (log_enabled(level)) {
      char line[160];
      std::snprintf(line, sizeof(line), "compile: %s for %s from %s in %.1f ms",
                    compiled.cubin->key.substr(0, 12).c_str(), arch.c_str(), origin, compiled.seconds * 1e3);
      log_line(level, line);
    }
    return compiled;
  };

  if (slot->cubin) {
    ++counters.memory_hits;
    return finish("memory", LogLevel::debug);
  }
  auto hold = [&](const Digest& key, std::string code) {
    slot->cubin = std::make_shared<Cubin>(Cubin{hexadecimal(key), arch, std::move(code)});
  };
#ifdef JAXDNN_CUBIN_LIBRARY
  Digest library_key;
  if (std::optional<std::string> code = read_library(identity, library_key)) {
    hold(library_key, std::move(*code));
    return finish("library", LogLevel::info);
  }
#endif
  std::shared_ptr<Compiler> compiler = jaxdnn::compiler();
  DiskCache disk = DiskCache::of_user();
  Digest key = key_of(identity, compiler->version().text());
  if (std::optional<std::string> code = disk.read(key)) {
    disk.touch(key);
    hold(key, std::move(*code));
    ++counters.disk_hits;
    return finish("disk", LogLevel::info);
  }
  Compilation compilation =
      compiler->compile("unit_" + hexadecimal(identity).substr(0, 12) + ".cu", unit, arch, headers);
  // The version that was foretold may have been that of an NVRTC that wouldn't load.
  key = key_of(identity, compilation.version.text());
  ++counters.compiles;
  compiled.log = std::move(compilation.log);
  hold(key, std::move(compilation.cubin));
  disk.publish(key, slot->cubin->code, unit);
  return finish("compiler", LogLevel::info);
}

void clear_memory_cache() { memory().clear(); }

}  // namespace jaxdnn
