// The two products of attention in bfloat16, for processors that multiply pairs of bfloat16 numbers.
//
// The keys of a tile, and its values, are packed as the weight of a linear layer (linear.h). Softmax
// weights are rounded to bfloat16, and sums are in float32. Packing costs as much as about ten rows
// of queries, so tasks with few rows use float32.
#pragma once

#include "attention_tile.h"
#include "linear.h"

namespace baton {

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

using BFloat16 = c10::BFloat16;

// Whether a task with `num_rows` rows uses the products of this file.
template <typename T>
bool uses_bf16_products(int64_t num_rows, int64_t head_dim) {
    return MULTIPLIES_BF16 && std::is_same_v<T, BFloat16> && num_rows > 8 && head_dim % (2 * LANES) == 0;
}

// Transposes LANES vectors of LANES words. Each step exchanges bit S of the lane's index with bit S
// of the vector's index.
template <int32_t S = LANES / 2>
[[gnu::always_inline]] inline void transpose(Words* v) {
    for (int32_t i = 0; i < LANES; ++i) {
        if (i & S) continue;
        const Words a = v[i], b = v[i + S];
        v[i] = __builtin_shuffle(a, b, lanes([](int32_t l) { return l & S ? l - S + LANES : l; }));
        v[i + S] = __builtin_shuffle(a, b, lanes([](int32_t l) { return l & S ? l + LANES : l + S; }));
    }
    if constexpr (S > 1) transpose<S / 2>(v);
}

// Rounds as store() does, except that AVX512_BF16 rounds subnormal numbers to zero.
inline void round_to(BFloat16* to, Floats values) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
    std::memcpy(static_cast<void*>(to), &rounded, sizeof(rounded));
#else
    store(to, values);
#endif
}

// Packs keys for scores: [head_dim / 2, TILE, 2], with zeros for missing rows.
inline void pack_keys(BFloat16* to, const Rows<BFloat16>& keys, int64_t head_dim) {
    for (int64_t first = 0; first < TILE; first += LANES) {
        for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
            Words words[LANES] = {};
            for (int64_t i = 0; i < LANES && first + i < keys.count; ++i) {
                words[i] = read_as<Words>(keys.base + keys.offsets[first + i] + d);
            }
            transpose(words);
            for (int64_t pair = 0; pair < LANES; ++pair) {
                std::memcpy(to + ((d / 2 + pair) * TILE + first) * 2, &words[pair], sizeof(Words));
            }
        }
    }
}

// Packs values for weighted sums: [head_dim / PANEL, padded_count / 2, PANEL, 2], with zeros for
// missing rows.
inline void pack_values(BFloat16* to, const Rows<BFloat16>& values, int64_t head_dim, int64_t padded_count) {
    for (int64_t token = 0; token < padded_count; token += 2) {
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const auto halfwords = [&](int64_t row) {
                if (row >= values.count) return Words{};
                return __builtin_convertvector(read_as<Halfwords>(values.base + values.offsets[row] + d), Words);
            };
            const Words pairs = halfwords(token) | halfwords(token + 1) << 16;
            BFloat16* const panel = to + d / PANEL * padded_count * PANEL;
            std::memcpy(panel + (token / 2 * PANEL + d % PANEL) * 2, &pairs, sizeof(pairs));
        }
    }
}

// scores[row, t] = scale * query[row] . keys[t]. Rows of scores are TILE apart.
inline void score_tile_bf16(
    float* scores, const BFloat16* query, int64_t num_rows, const BFloat16* packed_keys, int64_t head_dim, float scale
) {
    static_assert(!MULTIPLIES_BF16 || PANEL == TILE);
    const PackedMatrix<BFloat16> keys{packed_keys, head_dim, TILE};
    keys.multiply<float>({scores, TILE}, {query, head_dim}, num_rows, 0, nullptr);
    for (int64_t i = 0; i < num_rows * TILE; i += LANES) store(scores + i, load(scores + i) * scale);
}

// sums[row] = sums[row] * corrections[row] + sum over t of weights[row, t] * values[t]. `rounded`
// and `products` are scratch memory for num_rows rows of TILE and head_dim elements.
inline void add_tile_bf16(
    float* sums, const float* corrections, const float* weights, int64_t num_rows, const BFloat16* packed_values,
    int64_t head_dim, int64_t padded_count, BFloat16* rounded, float* products
) {
    for (int64_t i = 0; i < num_rows * TILE; i += LANES) round_to(rounded + i, load(weights + i));
    const PackedMatrix<BFloat16> values{packed_values, padded_count, head_dim};
    for (int64_t panel = 0; panel * PANEL < head_dim; ++panel) {
        values.multiply<float>({products, head_dim}, {rounded, TILE}, num_rows, panel, nullptr);
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t d = 0; d < head_dim; d += LANES) {
            float* const sum = sums + row * head_dim + d;
            store(sum, load(sum) * corrections[row] + load(products + row * head_dim + d));
        }
    }
}

}  // namespace baton
