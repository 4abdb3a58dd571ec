// The two products of attention on one tile of tokens: scores of rows of queries, and weighted sums of values.
#pragma once

#include "vector.h"

namespace baton {

constexpr int64_t TILE = 32;  // tokens at most

// Rows of the cache [count, head_dim], and where those of the next tile lie, which are fetched meanwhile.
template <typename Cache>
struct Rows {
    const Cache* data;
    const Cache* next;
    int64_t count, head_dim;
};

// Rows of floats, padded with zeros to whole vectors.
struct FloatRows {
    const float* data;
    const char* next;  // nullptr: fetched already
    int64_t count;
};

// Rows as they lie in the cache where that serves, else a copy in `room`.
template <typename Cache>
inline FloatRows in_float(const Rows<Cache>& rows, float* room) {
    if constexpr (std::is_same_v<Cache, float>) {
        if (rows.head_dim % LANES == 0) return {rows.data, reinterpret_cast<const char*>(rows.next), rows.count};
    }
    const int64_t dim = (rows.head_dim + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < rows.count; ++row) {
        const Cache* from = rows.data + row * rows.head_dim;
        const char* next = reinterpret_cast<const char*>(rows.next + row * rows.head_dim);
        for (int64_t byte = 0; byte < rows.head_dim * static_cast<int64_t>(sizeof(Cache)); byte += 64) {
            __builtin_prefetch(next + byte);
        }
        for_each_vector(rows.head_dim, [&](int64_t i, auto read, auto) { store(room + row * dim + i, read(from + i)); });
    }
    return {room, nullptr, rows.count};
}

// scores[r, t] = query[r] . keys[t] for R rows and T tokens. Each is summed in one order, whatever R and T are.
template <int64_t R, int64_t T>
inline void score(float* scores, const float* query, const float* keys, int64_t dim) {
    Floats sums[R][T] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        Floats key[T];
        for (int64_t t = 0; t < T; ++t) key[t] = load(keys + t * dim + d);
        for (int64_t r = 0; r < R; ++r) {
            const Floats q = load(query + r * dim + d);
            for (int64_t t = 0; t < T; ++t) sums[r][t] += q * key[t];
        }
    }
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t t = 0; t < T; ++t) scores[r * TILE + t] = sum(sums[r][t]);
    }
}

template <int64_t T>
inline void score_rows(float* scores, const float* query, int64_t num_rows, const float* keys, int64_t dim) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) score<4, T>(scores + r * TILE, query + r * dim, keys, dim);
    for (; r + 2 <= num_rows; r += 2) score<2, T>(scores + r * TILE, query + r * dim, keys, dim);
    for (; r < num_rows; ++r) score<1, T>(scores + r * TILE, query + r * dim, keys, dim);
}

// scores[row, t] for all rows and the tile's tokens; rows of scores are TILE apart.
inline void score_tile(float* scores, const float* query, int64_t num_rows, FloatRows keys, int64_t dim) {
    const auto prefetch = [&](int64_t token, int64_t tokens) {
        if (keys.next == nullptr) return;
        const char* from = keys.next + token * dim * 4;
        for (int64_t byte = 0; byte < tokens * dim * 4; byte += 64) __builtin_prefetch(from + byte);
    };
    int64_t t = 0;
    for (; t + 4 <= keys.count; t += 4) {
        prefetch(t, 4);
        score_rows<4>(scores + t, query, num_rows, keys.data + t * dim, dim);
    }
    for (; t < keys.count; ++t) {
        prefetch(t, 1);
        score_rows<1>(scores + t, query, num_rows, keys.data + t * dim, dim);
    }
}

// sums[r, :] = sums[r, :] * corrections[r] + sum over t of weights[r, t] * values[t, :], for R rows and V vectors.
template <int64_t R, int64_t V>
inline void add(
    float* sums, const float* corrections, const float* weights, const float* values, const char* next, int64_t count,
    int64_t dim
) {
    Floats total[R][V];
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) total[r][v] = load(sums + r * dim + v * LANES) * corrections[r];
    }
    for (int64_t t = 0; t < count; ++t) {
        Floats value[V];
        for (int64_t v = 0; v < V; ++v) value[v] = load(values + t * dim + v * LANES);
        if (next != nullptr) {
            for (int64_t byte = 0; byte < V * LANES * 4; byte += 64) __builtin_prefetch(next + t * dim * 4 + byte);
        }
        for (int64_t r = 0; r < R; ++r) {
            const Floats weight = splat(weights[r * TILE + t]);
            for (int64_t v = 0; v < V; ++v) total[r][v] += weight * value[v];
        }
    }
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) store(sums + r * dim + v * LANES, total[r][v]);
    }
}

template <int64_t R>
inline void add_rows(
    float* sums, const float* corrections, const float* weights, const FloatRows& values, bool prefetch, int64_t dim
) {
    constexpr int64_t V = LANES == 16 ? 4 : 2;
    const char* next = prefetch ? values.next : nullptr;
    const auto at = [&](int64_t d) { return next == nullptr ? nullptr : next + d * 4; };
    int64_t d = 0;
    for (; d + V * LANES <= dim; d += V * LANES) {
        add<R, V>(sums + d, corrections, weights, values.data + d, at(d), values.count, dim);
    }
    for (; d < dim; d += LANES) add<R, 1>(sums + d, corrections, weights, values.data + d, at(d), values.count, dim);
}

// For all rows, which are `dim` apart in sums and TILE apart in weights.
inline void add_tile(
    float* sums, const float* corrections, const float* weights, int64_t num_rows, FloatRows values, int64_t dim
) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) {
        add_rows<4>(sums + r * dim, corrections + r, weights + r * TILE, values, r == 0, dim);
    }
    for (; r + 2 <= num_rows; r += 2) {
        add_rows<2>(sums + r * dim, corrections + r, weights + r * TILE, values, r == 0, dim);
    }
    for (; r < num_rows; ++r) {
        add_rows<1>(sums + r * dim, corrections + r, weights + r * TILE, values, r == 0, dim);
    }
}

}  // namespace baton
