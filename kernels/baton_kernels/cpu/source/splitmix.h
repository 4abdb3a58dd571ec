// SplitMix64's mixer (Steele, Lea and Flood 2014), for the weights of checksums and for noise.
#pragma once

#include <cstdint>

namespace baton {

constexpr uint64_t SPLITMIX_GAMMA = 0x9E3779B97F4A7C15u;

inline uint64_t splitmix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

}  // namespace baton
