#include "disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "log.h"

namespace jaxdnn {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kDefaultLimit = uint64_t{256} << 20;
constexpr char kMagic[8] = {'J', 'A', 'X', 'D', 'N', 'N', 'C', 'B'};
constexpr uint64_t kFormat = 1;
constexpr size_t kKeyDigits = 64;
constexpr char kTemporary[] = ".tmp-";
// A process that was killed while it published leaves its temporary file behind; after an hour nobody is writing it.
constexpr auto kTemporaryLifetime = std::chrono::hours(1);

struct Header {
  char magic[8];
  uint64_t format;
  Digest key;
  uint64_t length;
  Digest checksum;
};
static_assert(sizeof(Header) == 88);

Digest checksum(const std::string& payload) { return Sha256().update(payload).finish(); }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

  bool read(void* data, size_t size) {
    for (char* to = static_cast<char*>(data); size > 0;) {
      ssize_t n = ::read(descriptor_, to, size);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      to += n;
      size -= n;
    }
    return true;
  }

  bool write(const std::string& content) {
    for (size_t done = 0; done < content.size();) {
      ssize_t n = ::write(descriptor_, content.data() + done, content.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      done += n;
    }
    return true;
  }

 private:
  int descriptor_;
};

void complain(const std::string& what, const std::string& path, const std::string& reason) {
  log_line(LogLevel::info, "cache: can't " + what + " " + path + ": " + reason);
}

// `<64 hexadecimal digits>` of a file that belongs to the cache; empty for any other.
std::string key_of(const std::string& name) {
  if (name.size() < kKeyDigits) return "";
  std::string key = name.substr(0, kKeyDigits);
  std::string suffix = name.substr(kKeyDigits);
  bool digits = key.find_first_not_of("0123456789abcdef") == std::string::npos;
  return digits && (suffix == ".cubin" || suffix == ".cu") ? key : "";
}

struct Entry {
  uint64_t bytes = 0;
  fs::file_time_type used = fs::file_time_type::min();
  bool has_cubin = false;
};

// Files vanish while others evict: whatever can't be asked is skipped.
std::map<std::string, Entry> list_entries(const std::string& directory) {
  std::map<std::string, Entry> entries;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    fs::file_time_type modified = it->last_write_time(gone);
    if (gone) continue;
    std::string name = it->path().filename().string();
    if (name.compare(0, std::strlen(kTemporary), kTemporary) == 0) {
      if (fs::file_time_type::clock::now() - modified > kTemporaryLifetime) fs::remove(it->path(), gone);
      continue;
    }
    std::string key = key_of(name);
    if (key.empty() || !it->is_regular_file(gone)) continue;
    uint64_t size = it->file_size(gone);
    if (gone) continue;
    Entry& entry = entries[key];
    entry.bytes += size;
    entry.used = std::max(entry.used, modified);
    entry.has_cubin |= name.size() == kKeyDigits + std::strlen(".cubin");
  }
  return entries;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A whole number of bytes, with a unit or without: "268435456", "256MiB", "1 GB".
std::optional<uint64_t> parse_bytes(std::string_view text) {
  uint64_t number = 0;
  auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  std::string unit;
  for (char c : text.substr(rest - text.data())) {
    if (c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  static const std::map<std::string, uint64_t> units = {
      {"", 1},          {"b", 1},         {"kb", 1000},     {"mb", 1000'000},           {"gb", 1000'000'000},
      {"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", uint64_t{1} << 40}, {"tb", 1000'000'000'000}};
  auto found = units.find(unit);
  if (found == units.end() || number > std::numeric_limits<uint64_t>::max() / found->second) return std::nullopt;
  return number * found->second;
}

}  // namespace

DiskCache::DiskCache(std::string directory, uint64_t limit, bool trusted)
    : directory_(std::move(directory)), limit_(limit), trusted_(trusted) {}

DiskCache DiskCache::of_user() {
  std::string directory = environment("JAXDNN_CACHE_DIR");
  if (directory.empty()) {
    std::string base = environment("XDG_CACHE_HOME");
    std::string home = environment("HOME");
    if (base.empty() && !home.empty()) base = home + "/.cache";
    if (!base.empty()) directory = base + "/jaxdnn";
  }
  uint64_t limit = kDefaultLimit;
  if (std::string text = environment("JAXDNN_CACHE_LIMIT"); !text.empty()) {
    if (std::optional<uint64_t> value = parse_bytes(text)) {
      limit = *value;
    } else {
      log_line(LogLevel::warning,
               "JAXDNN_CACHE_LIMIT must be a number of bytes, such as 268435456, 256MiB or 1GB; got \"" + text +
                   "\", and the limit is " + std::to_string(limit >> 20) + "MiB");
    }
  }
  return {directory, limit, false};
}

std::string DiskCache::path(const Digest& key, const char* suffix) const {
  return directory_ + "/" + hexadecimal(key) + suffix;
}

// Whether anyone but this user and root could have put something there; says so.
bool DiskCache::refuses(const struct stat& status, const std::string& path) const {
  bool foreign = status.st_uid != geteuid() && status.st_uid != 0;
  bool open = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (trusted_ || (!foreign && !open)) return false;
  log_line(LogLevel::warning, "cache: " + path + " is not used: " +
                                  (foreign ? "it belongs to user " + std::to_string(status.st_uid) +
                                                 "; set JAXDNN_CACHE_DIR to a folder of yours"
                                           : "other users may write to it; `chmod go-w " + path + "` forbids that"));
  return true;
}

std::optional<std::string> DiskCache::read(const Digest& key) const {
  if (directory_.empty()) return std::nullopt;
  std::string name = path(key, ".cubin");
  struct stat status;
  // The entry is opened in the folder that was checked, whatever its path leads to by then.
  File folder(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder && (fstat(folder.get(), &status) != 0 || refuses(status, directory_))) return std::nullopt;
  // Non-blocking, or a pipe of that name would hang us.
  File file(folder ? openat(folder.get(), name.c_str() + directory_.size() + 1, O_RDONLY | O_CLOEXEC | O_NONBLOCK)
                   : -1);
  if (!file) {
    if (errno != ENOENT) complain("open", name, std::strerror(errno));
    return std::nullopt;
  }
  Header header;
  auto reject = [&](const char* reason) {
    complain("use", name, reason);
    return std::nullopt;
  };
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return reject("not a regular file");
  if (refuses(status, name)) return std::nullopt;
  if (!file.read(&header, sizeof(header))) return reject("truncated");
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return reject("not a cache entry");
  if (header.format != kFormat) return reject("of another format");
  if (header.key != key) return reject("the entry of another key");
  // Compared with the file's size before anything is allocated for it.
  if (header.length != static_cast<uint64_t>(status.st_size) - sizeof(header)) return reject("truncated");
  std::string cubin(header.length, '\0');
  if (!file.read(cubin.data(), cubin.size())) return reject("truncated");
  if (checksum(cubin) != header.checksum) return reject("damaged");
  return cubin;
}

void DiskCache::touch(const Digest& key) const { utimensat(AT_FDCWD, path(key, ".cubin").c_str(), nullptr, 0); }

bool DiskCache::write_file(const std::string& path, const std::string& content) const {
  std::string temporary = directory_ + "/" + kTemporary + "XXXXXX";
  File file(mkostemp(temporary.data(), O_CLOEXEC));
  if (!file) return complain("write into", directory_, std::strerror(errno)), false;
  if (file.write(content) && rename(temporary.c_str(), path.c_str()) == 0) return true;
  complain("write", path, std::strerror(errno));
  unlink(temporary.c_str());
  return false;
}

// Whether the folder is there, and entries in it will be read.
bool DiskCache::create() const {
  std::error_code error;
  if (fs::create_directories(directory_, error)) fs::permissions(directory_, fs::perms::owner_all, error);
  struct stat status;
  if (!error && stat(directory_.c_str(), &status) != 0) error.assign(errno, std::generic_category());
  if (error) return complain("create", directory_, error.message()), false;
  return !refuses(status, directory_);
}

void DiskCache::publish(const Digest& key, const std::string& cubin, const std::string& unit) const {
  if (directory_.empty()) {
    log_line(LogLevel::info, "cache: no folder: set JAXDNN_CACHE_DIR, XDG_CACHE_HOME or HOME");
    return;
  }
  if (!create()) return;
  Header header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.format = kFormat;
  header.key = key;
  header.length = cubin.size();
  header.checksum = checksum(cubin);
  std::string content(reinterpret_cast<const char*>(&header), sizeof(header));
  if (write_file(path(key, ".cu"), unit) && write_file(path(key, ".cubin"), content + cubin)) evict();
}

void DiskCache::evict() const {
  std::map<std::string, Entry> entries = list_entries(directory_);
  uint64_t total = 0;
  std::vector<std::pair<fs::file_time_type, std::string>> by_use;
  for (const auto& [key, entry] : entries) {
    total += entry.bytes;
    by_use.emplace_back(entry.used, key);
  }
  std::sort(by_use.begin(), by_use.end());
  for (const auto& [used, key] : by_use) {
    if (total <= limit_) break;
    // Others may evict the same entry at the same time.
    unlink((directory_ + "/" + key + ".cubin").c_str());
    unlink((directory_ + "/" + key + ".cu").c_str());
    total -= entries[key].bytes;
    log_line(LogLevel::debug, "cache: evicted " + key.substr(0, 12));
  }
}

DiskCache::Usage DiskCache::usage() const {
  Usage usage;
  if (directory_.empty()) return usage;
  for (const auto& [key, entry] : list_entries(directory_)) {
    usage.entries += entry.has_cubin;
    usage.bytes += entry.bytes;
  }
  // Found out by trying: permissions alone don't tell of a read-only or full file system.
  usage.trusted = create();
  std::string probe = directory_ + "/" + kTemporary + "XXXXXX";
  if (usage.trusted && File(mkostemp(probe.data(), O_CLOEXEC))) usage.writable = unlink(probe.c_str()) == 0;
  return usage;
}

}  // namespace jaxdnn
