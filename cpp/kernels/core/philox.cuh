// Random bits as a function of a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011).
#pragma once

namespace jaxdnn {

struct PhiloxKey {
  unsigned first, second;
};

/// Replaces the four words of a counter by random ones.
__device__ __forceinline__ void philox(PhiloxKey key, unsigned (&words)[4]) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long left = 0xd2511f53ull * words[0], right = 0xcd9e8d57ull * words[2];
    words[0] = static_cast<unsigned>(right >> 32) ^ words[1] ^ key.first;
    words[2] = static_cast<unsigned>(left >> 32) ^ words[3] ^ key.second;
    words[1] = static_cast<unsigned>(right);
    words[3] = static_cast<unsigned>(left);
    key.first += 0x9e3779b9u;
    key.second += 0xbb67ae85u;
  }
}

}  // namespace jaxdnn
