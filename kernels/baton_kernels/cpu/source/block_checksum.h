// Word sums of runs of memory in one pass. The formula is in ../../block_checksum/__init__.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "splitmix.h"

namespace baton {

constexpr int64_t CHECKSUM_PERIOD = 8192;  // words
// One page ahead, because hardware prefetching stops at the end of a page.
constexpr int64_t PREFETCHED_WORDS = 512;

inline uint64_t checksum_factor(uint64_t k) { return splitmix(k + SPLITMIX_GAMMA) | 1u; }

struct alignas(64) InnerFactors {
    uint64_t at[CHECKSUM_PERIOD];
    InnerFactors() {
        for (int64_t i = 0; i < CHECKSUM_PERIOD; ++i) at[i] = checksum_factor(static_cast<uint64_t>(i));
    }
};

// Returns the sum of folded words times factors. The words need no alignment.
inline uint64_t sum_words(const char* words, const uint64_t* factors, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t x;
        std::memcpy(&x, words + i * 8, 8);
        sum += (x ^ (x >> 32)) * factors[i];
    }
    return sum;
}

// sum_steps() is sum_words() for a multiple of STEP words. Four vectors of sums hide the latency of
// a product.
#if defined(__AVX512DQ__)
constexpr int64_t STEP = 32;

inline uint64_t sum_steps(const char* words, const uint64_t* factors, int64_t count) {
    __m512i sums[4] = {};
    for (int64_t i = 0; i < count; i += STEP) {
        for (int64_t part = 0; part < 4; ++part) {
            const char* line = words + (i + part * 8) * 8;
            _mm_prefetch(line + PREFETCHED_WORDS * 8, _MM_HINT_T0);
            const __m512i x = _mm512_loadu_si512(line);
            const __m512i folded = _mm512_xor_si512(x, _mm512_srli_epi64(x, 32));
            const __m512i product = _mm512_mullo_epi64(folded, _mm512_load_si512(factors + i + part * 8));
            sums[part] = _mm512_add_epi64(sums[part], product);
        }
    }
    const __m512i low = _mm512_add_epi64(sums[0], sums[1]), high = _mm512_add_epi64(sums[2], sums[3]);
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(low, high)));
}
#elif defined(__AVX2__)
constexpr int64_t STEP = 16;

// AVX2 has no 64-bit product. The low 64 bits of (a 2^32 + b) (c 2^32 + d) are computed as
// b d + (a d + b c) 2^32. The two summands have separate sums, so that one shift at the end
// suffices.
inline uint64_t sum_steps(const char* words, const uint64_t* factors, int64_t count) {
    __m256i low[4] = {}, cross[4] = {};
    for (int64_t i = 0; i < count; i += STEP) {
        for (int64_t part = 0; part < 4; ++part) {
            const char* half_line = words + (i + part * 4) * 8;
            if (part % 2 == 0) _mm_prefetch(half_line + PREFETCHED_WORDS * 8, _MM_HINT_T0);
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half_line));
            const __m256i factor = _mm256_load_si256(reinterpret_cast<const __m256i*>(factors + i + part * 4));
            const __m256i a = _mm256_srli_epi64(x, 32), b = _mm256_xor_si256(x, a);
            low[part] = _mm256_add_epi64(low[part], _mm256_mul_epu32(b, factor));
            const __m256i b_c = _mm256_mul_epu32(b, _mm256_srli_epi64(factor, 32));
            cross[part] = _mm256_add_epi64(cross[part], _mm256_add_epi64(_mm256_mul_epu32(a, factor), b_c));
        }
    }
    uint64_t sum = 0;
    for (int64_t part = 0; part < 4; ++part) {
        alignas(32) uint64_t lanes[4];
        const __m256i both = _mm256_add_epi64(low[part], _mm256_slli_epi64(cross[part], 32));
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), both);
        for (const uint64_t lane : lanes) sum += lane;
    }
    return sum;
}
#else
constexpr int64_t STEP = 1;

inline uint64_t sum_steps(const char* words, const uint64_t* factors, int64_t count) {
    return sum_words(words, factors, count);
}
#endif

inline uint64_t word_sum(const char* run, int64_t num_words) {
    static const InnerFactors inner;
    uint64_t sum = 0;
    for (int64_t start = 0; start < num_words; start += CHECKSUM_PERIOD) {
        const int64_t count = std::min(num_words - start, CHECKSUM_PERIOD), stepped = count / STEP * STEP;
        const char* words = run + start * 8;
        const uint64_t part = sum_steps(words, inner.at, stepped) +
            sum_words(words + stepped * 8, inner.at + stepped, count - stepped);
        sum += part * checksum_factor((uint64_t{1} << 32) + static_cast<uint64_t>(start / CHECKSUM_PERIOD));
    }
    return sum;
}

inline void sum_runs(
    uint64_t* sums, const int64_t* addresses, int64_t num_runs, int64_t num_words, int64_t num_threads
) {
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) if (num_threads > 1)
    for (int64_t run = 0; run < num_runs; ++run) {
        sums[run] = word_sum(reinterpret_cast<const char*>(addresses[run]), num_words);
    }
}

}  // namespace baton
