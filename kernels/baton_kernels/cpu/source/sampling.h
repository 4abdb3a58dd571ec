// Draws of tokens, with the filters and noise of ../../sampling/__init__.py and noise.py.
//
// A row is read once for the maxima of its blocks. Filters then read only blocks that may contain
// tokens to keep. Only tokens near the threshold of top_p are sorted. A token's noise has 52 random
// bits. The score of a token is computed only if the block's best token would win with the same
// bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "splitmix.h"
#include "vector.h"

namespace baton {

constexpr int64_t VOCABULARY_BLOCK = 64;
constexpr double NOTHING = -std::numeric_limits<double>::infinity();
// Fixed-point scale of probabilities, which are relative to the most likely token's.
constexpr double FIXED_POINT = 0x1p32;
// At this distance below the best token, exp(scaled - best) * FIXED_POINT rounds to 0.
constexpr double WEIGHTLESS = 23.0;
constexpr int64_t BUCKETS = 512;  // buckets of the distance to the best token

struct RowParams {
    double temperature, top_p, min_p;  // top_p 1, min_p 0: no filter
    int64_t top_k;                     // 0: no filter
    uint64_t key;
};

struct Candidate {
    double scaled;  // logit / temperature
    int64_t token;
    uint64_t weight;
};

// Returns whether top_k and top_p keep `a` before `b`: the higher logit first, then the lower id.
inline bool is_better(const Candidate& a, const Candidate& b) {
    return a.scaled != b.scaled ? a.scaled > b.scaled : a.token < b.token;
}

inline uint64_t noise_mantissa(uint64_t key, int64_t token) {
    return splitmix(key + (static_cast<uint64_t>(token) + 1) * SPLITMIX_GAMMA) >> 12;
}

inline double gumbel(uint64_t mantissa) { return -std::log(-std::log((static_cast<double>(mantissa) + 0.5) * 0x1p-52)); }

// Returns the smallest mantissa for which gumbel() is at least `noise`. Rounding can make the
// result slightly too low, but never too high.
inline uint64_t least_mantissa(double noise) {
    const double fraction_above = -std::expm1(-std::exp(-noise));
    const double count = std::ceil(fraction_above * (1 + 1e-9) * 0x1p52) + 2;
    return static_cast<uint64_t>(std::max(0.0, 0x1p52 - count));
}

struct Winner {
    double score = NOTHING;
    int64_t token = 0;

    // Makes one of `count` tokens the winner if its score is higher than `score`. `count` is at
    // most VOCABULARY_BLOCK. `best` is an upper bound of the tokens' logit / temperature.
    template <typename TokenAt, typename ScaledAt>
    void consider(uint64_t key, double best, int64_t count, const TokenAt& token_at, const ScaledAt& scaled_at) {
        const uint64_t needed = least_mantissa(score - best);
        uint64_t mantissas[VOCABULARY_BLOCK], most = 0;
        for (int64_t i = 0; i < count; ++i) mantissas[i] = noise_mantissa(key, token_at(i));
        for (int64_t i = 0; i < count; ++i) most = std::max(most, mantissas[i]);
        if (most < needed) return;
        for (int64_t i = 0; i < count; ++i) {
            if (mantissas[i] < needed) continue;
            if (const double reached = scaled_at(i) + gumbel(mantissas[i]); reached > score) {
                score = reached;
                token = token_at(i);
            }
        }
    }
};

// The logits of a row. NaN counts as -inf.
class Vocabulary {
public:
    Vocabulary(const float* logits, int64_t size, double temperature)
        : logits_(logits), size_(size), temperature_(temperature), maxima_((size + VOCABULARY_BLOCK - 1) / VOCABULARY_BLOCK) {
        float best = -std::numeric_limits<float>::infinity();
        for (int64_t block = 0; block < num_blocks(); ++block) {
            Floats most = splat(-std::numeric_limits<float>::infinity());
            float rest = -std::numeric_limits<float>::infinity();
            const int64_t end = end_of(block);
            int64_t token = block * VOCABULARY_BLOCK;
            for (; token + LANES <= end; token += LANES) most = maximum(load(logits + token), most);
            for (; token < end; ++token) rest = logits[token] > rest ? logits[token] : rest;
            maxima_[block] = std::max(rest, maximum(most));
            if (maxima_[block] > best) {
                best = maxima_[block];
                best_block_ = block;
            }
        }
    }

    int64_t num_blocks() const { return static_cast<int64_t>(maxima_.size()); }
    int64_t best_block() const { return best_block_; }
    int64_t end_of(int64_t block) const { return std::min(size_, (block + 1) * VOCABULARY_BLOCK); }
    double scaled(float logit) const { return static_cast<double>(logit) / temperature_; }
    double at(int64_t token) const { return scaled(logits_[token]); }
    double best_of(int64_t block) const { return scaled(maxima_[block]); }
    double best() const { return best_of(best_block_); }

    // Returns a value that at least `rank` tokens reach, as high as the block maxima allow.
    double rank_bound(int64_t rank) const {
        if (rank > num_blocks()) return NOTHING;
        std::vector<float> sorted = maxima_;
        std::nth_element(sorted.begin(), sorted.begin() + (rank - 1), sorted.end(), std::greater<float>());
        return scaled(sorted[rank - 1]);
    }

    // Returns the unmasked tokens that reach `least`, ordered by id.
    std::vector<Candidate> candidates(double least) const {
        std::vector<Candidate> found;
        for (int64_t block = 0; block < num_blocks(); ++block) {
            if (!may_reach(block, least)) continue;
            for (int64_t token = block * VOCABULARY_BLOCK; token < end_of(block); ++token) {
                if (const double value = at(token); value >= least && value > NOTHING) found.push_back({value, token, 0});
            }
        }
        return found;
    }

    bool may_reach(int64_t block, double least) const { return best_of(block) >= least && best_of(block) > NOTHING; }

private:
    const float* logits_;
    int64_t size_;
    double temperature_;
    std::vector<float> maxima_;
    int64_t best_block_ = 0;
};

// Keeps the smallest set of best tokens, at least one, whose probabilities reach top_p of the
// total.
inline void keep_top_p(std::vector<Candidate>& candidates, double best, double top_p) {
    // If `best` and the token are both infinite, the distance is 0.
    const auto distance = [best](const Candidate& c) { return c.scaled < best ? best - c.scaled : 0.0; };
    const auto bucket_of = [&](const Candidate& c) {
        return std::min(static_cast<int64_t>(distance(c) * (BUCKETS / WEIGHTLESS)), BUCKETS - 1);
    };
    uint64_t sums[BUCKETS] = {}, total = 0;
    for (Candidate& candidate : candidates) {
        candidate.weight = static_cast<uint64_t>(std::nearbyint(std::exp(-distance(candidate)) * FIXED_POINT));
        sums[bucket_of(candidate)] += candidate.weight;
        total += candidate.weight;
    }
    const double limit = top_p * static_cast<double>(total);
    int64_t crossing = 0;
    uint64_t ahead = 0;
    while (crossing < BUCKETS - 1 && static_cast<double>(ahead + sums[crossing]) < limit) ahead += sums[crossing++];
    // Tokens in buckets before the crossing bucket are kept, tokens in later buckets are removed.
    // Tokens in the crossing bucket are added in order.
    const auto begin = candidates.begin();
    auto last = std::partition(begin, candidates.end(), [&](const Candidate& c) { return bucket_of(c) < crossing; });
    const auto end = std::partition(last, candidates.end(), [&](const Candidate& c) { return bucket_of(c) == crossing; });
    std::sort(last, end, is_better);
    while (last != end && (last == begin || static_cast<double>(ahead) < limit)) ahead += (last++)->weight;
    candidates.erase(last, candidates.end());
}

// Draws one token of a row. Returns token 0 if all tokens are masked.
inline int64_t draw_token(const float* logits, int64_t vocab_size, const RowParams& params) {
    const Vocabulary vocabulary(logits, vocab_size, params.temperature);
    const double best = vocabulary.best();
    double least = params.min_p > 0 ? best + std::log(params.min_p) : NOTHING;
    const bool has_top_k = params.top_k > 0, has_top_p = params.top_p < 1;
    Winner winner;
    if (!has_top_k && !has_top_p) {
        const auto consider = [&](int64_t block) {
            if (!vocabulary.may_reach(block, least)) return;
            const int64_t first = block * VOCABULARY_BLOCK;
            winner.consider(
                params.key, vocabulary.best_of(block), vocabulary.end_of(block) - first,
                [=](int64_t i) { return first + i; },
                [&](int64_t i) {
                    const double scaled = vocabulary.at(first + i);
                    return scaled < least ? NOTHING : scaled;
                }
            );
        };
        consider(vocabulary.best_block());  // first, because a high score excludes most other blocks
        for (int64_t block = 0; block < vocabulary.num_blocks(); ++block) consider(block);
        return winner.token;
    }

    if (has_top_p) least = std::max(least, best - WEIGHTLESS);
    if (has_top_k) least = std::max(least, vocabulary.rank_bound(params.top_k));
    std::vector<Candidate> candidates = vocabulary.candidates(least);
    if (has_top_k && params.top_k < static_cast<int64_t>(candidates.size())) {
        std::nth_element(candidates.begin(), candidates.begin() + params.top_k, candidates.end(), is_better);
        candidates.resize(params.top_k);
    }
    if (has_top_p) keep_top_p(candidates, best, params.top_p);
    const int64_t count = static_cast<int64_t>(candidates.size());
    for (int64_t first = 0; first < count; first += VOCABULARY_BLOCK) {
        const Candidate* group = candidates.data() + first;
        const int64_t size = std::min(VOCABULARY_BLOCK, count - first);
        const double most = std::min_element(group, group + size, is_better)->scaled;
        winner.consider(
            params.key, most, size, [=](int64_t i) { return group[i].token; }, [=](int64_t i) { return group[i].scaled; }
        );
    }
    return winner.token;
}

}  // namespace baton
