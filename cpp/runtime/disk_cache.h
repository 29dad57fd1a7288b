// Cubins in a folder, shared by processes.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <string>

#include "sha256.h"

namespace jaxdnn {

// An entry is a file `<key>.cubin`: a header (magic, format, key, length, checksum) and the cubin. Beside it `<key>.cu`
// holds the unit, for people to read. An entry is published by renaming a complete file into place and checked when it
// is read, so that a truncated, damaged or foreign file counts as absent. What is read is run: neither the folder nor
// an entry may belong to another user than this one or root, or be writable by others. No fault of the file system is
// an error: the reason goes to the log, and the unit is compiled.
class DiskCache {
 public:
  // `directory` empty: there is none, and nothing is ever found. `trusted`: who may write there could as well replace
  // this module, and owners are not asked.
  DiskCache(std::string directory, uint64_t limit, bool trusted);

  // The user's own: JAXDNN_CACHE_DIR, else $XDG_CACHE_HOME/jaxdnn, else ~/.cache/jaxdnn; at most JAXDNN_CACHE_LIMIT
  // bytes, or kB, MB, GB, TB, KiB, MiB, GiB, TiB. The environment is read at each call.
  static DiskCache of_user();

  const std::string& directory() const { return directory_; }
  uint64_t limit() const { return limit_; }

  std::optional<std::string> read(const Digest& key) const;
  // Marks an entry as just used: the ones longest out of use are evicted first.
  void touch(const Digest& key) const;
  void publish(const Digest& key, const std::string& cubin, const std::string& unit) const;

  // Creates the folder if it can.
  struct Usage {
    int64_t entries = 0;
    uint64_t bytes = 0;
    bool trusted = false;  // what lies in it is read
    bool writable = false;
  };
  Usage usage() const;

 private:
  std::string path(const Digest& key, const char* suffix) const;
  bool create() const;
  bool refuses(const struct stat& status, const std::string& path) const;
  bool write_file(const std::string& path, const std::string& content) const;
  void evict() const;

  std::string directory_;
  uint64_t limit_;
  bool trusted_;
};

}  // namespace jaxdnn
