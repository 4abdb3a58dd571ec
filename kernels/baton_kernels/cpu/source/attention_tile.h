// One tile of tokens: where its keys and values lie, and the two products of attention on them, scores of rows of queries and
// weighted sums of values.
#pragma once

#include "vector.h"

namespace baton {

constexpr int64_t STRIP = 32, STRIPS = 4;
constexpr int64_t TILE = STRIP * STRIPS;  // tokens at most

// Tokens of one tile. A whole one is read in strips, a token of each in turn: several places at a time are what processors foresee
// best.
struct Tile {
    int64_t begin, end, count;  // positions
    int64_t offsets[TILE];      // of the tokens' rows in the cache, in the order in which they are read

    // From a position on, to the end of its tile or `limit`. `offset_of(position)`: where its row begins; the next rows of its block
    // follow it.
    template <typename OffsetOf>
    void find(int64_t from, int64_t limit, int64_t block_size, int64_t head_dim, const OffsetOf& offset_of) {
        begin = from;
        end = std::min(from - from % TILE + TILE, limit);
        count = end - begin;
        for (int64_t position = begin; position < end;) {
            const int64_t block_end = std::min(end, position - position % block_size + block_size);
            for (int64_t offset = offset_of(position); position < block_end; ++position, offset += head_dim) {
                const int64_t at = position - begin;
                offsets[count == TILE ? at % STRIP * STRIPS + at / STRIP : at] = offset;
            }
        }
    }

    int64_t position_of(int64_t i) const { return begin + (count == TILE ? i % STRIPS * STRIP + i / STRIPS : i); }
};

// A tile's keys or values. Rows are whole vectors.
template <typename Stored>
struct Rows {
    const Stored* at[TILE];
    int64_t count;
};

// Those that lie in the cache; touches them, but for remainders, once. Between these reads nothing holds up the next ones, as
// computing would.
template <typename Cache>
inline void find_rows(Rows<Cache>& rows, const Cache* cache, const Tile& tile, int64_t head_dim) {
    rows.count = tile.count;
    for (int64_t i = 0; i < tile.count; ++i) rows.at[i] = cache + tile.offsets[i];
    Ints seen[2] = {};
    constexpr int64_t STEP = 2 * sizeof(Ints) / sizeof(Cache);
    for (int64_t i = 0; i + STRIPS <= tile.count; i += STRIPS) {
        for (int64_t d = 0; d + STEP <= head_dim; d += STEP) {
            for (int64_t strip = 0; strip < STRIPS; ++strip) {
                for (int64_t v = 0; v < 2; ++v) seen[v] ^= read_as<Ints>(rows.at[i + strip] + d + v * STEP / 2);
            }
        }
    }
    [[maybe_unused]] volatile int32_t kept = (seen[0] ^ seen[1])[0];  // a compiler would leave out what nobody wants
}

// Copies as floats, padded with zeros, `dim` apart in `room`.
template <typename Cache>
inline void copy_rows(
    Rows<float>& rows, const Cache* cache, const Tile& tile, int64_t head_dim, int64_t dim, float* room
) {
    rows.count = tile.count;
    for (int64_t i = 0; i < tile.count; ++i) {
        const Cache* from = cache + tile.offsets[i];
        float* to = room + i * dim;
        for_each_vector(head_dim, [&](int64_t d, auto read, auto) { store(to + d, read(from + d)); });
        rows.at[i] = to;
    }
}

// scores[r, t] = query[r] . keys[t] for R rows and T tokens. Each is summed in one order, whatever R and T are.
template <int64_t R, int64_t T, typename Stored>
inline void score(float* scores, const float* query, const Stored* const* keys, int64_t dim) {
    Floats sums[R * T] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        Floats key[T];
        for (int64_t t = 0; t < T; ++t) key[t] = load(keys[t] + d);
        for (int64_t r = 0; r < R; ++r) {
            const Floats q = load(query + r * dim + d);
            for (int64_t t = 0; t < T; ++t) sums[r * T + t] += q * key[t];
        }
    }
    float totals[R * T];
    sum_each<R * T>(totals, sums);
    for (int64_t r = 0; r < R; ++r) std::copy_n(totals + r * T, T, scores + r * TILE);
}

template <int64_t R, typename Stored>
inline void score_rows(float* scores, const float* query, const Rows<Stored>& keys, int64_t dim) {
    constexpr int64_t T = 16 / R;
    int64_t t = 0;
    for (; t + T <= keys.count; t += T) score<R, T>(scores + t, query, keys.at + t, dim);
    for (; t < keys.count; ++t) score<R, 1>(scores + t, query, keys.at + t, dim);
}

// scores[row, t] for all rows and the tile's tokens; rows of scores are TILE apart.
template <typename Stored>
inline void score_tile(float* scores, const float* query, int64_t num_rows, const Rows<Stored>& keys, int64_t dim) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) score_rows<4>(scores + r * TILE, query + r * dim, keys, dim);
    for (; r + 2 <= num_rows; r += 2) score_rows<2>(scores + r * TILE, query + r * dim, keys, dim);
    for (; r < num_rows; ++r) score_rows<1>(scores + r * TILE, query + r * dim, keys, dim);
}

// sums[r, d:] = sums[r, d:] * corrections[r] + sum over t of weights[r, t] * values[t, d:], for R rows and V vectors.
template <int64_t R, int64_t V, typename Stored>
inline void add(
    float* sums, const float* corrections, const float* weights, const Rows<Stored>& values, int64_t d, int64_t dim
) {
    Floats total[R][V];
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) total[r][v] = load(sums + r * dim + d + v * LANES) * corrections[r];
    }
    for (int64_t t = 0; t < values.count; ++t) {
        Floats value[V];
        for (int64_t v = 0; v < V; ++v) value[v] = load(values.at[t] + d + v * LANES);
        for (int64_t r = 0; r < R; ++r) {
            const Floats weight = splat(weights[r * TILE + t]);
            for (int64_t v = 0; v < V; ++v) total[r][v] += weight * value[v];
        }
    }
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) store(sums + r * dim + d + v * LANES, total[r][v]);
    }
}

template <int64_t R, typename Stored>
inline void add_rows(
    float* sums, const float* corrections, const float* weights, const Rows<Stored>& values, int64_t dim
) {
    constexpr int64_t V = LANES == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + V * LANES <= dim; d += V * LANES) add<R, V>(sums, corrections, weights, values, d, dim);
    for (; d < dim; d += LANES) add<R, 1>(sums, corrections, weights, values, d, dim);
}

// For all rows, which are `dim` apart in sums and TILE apart in weights.
template <typename Stored>
inline void add_tile(
    float* sums, const float* corrections, const float* weights, int64_t num_rows, const Rows<Stored>& values, int64_t dim
) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) add_rows<4>(sums + r * dim, corrections + r, weights + r * TILE, values, dim);
    for (; r + 2 <= num_rows; r += 2) add_rows<2>(sums + r * dim, corrections + r, weights + r * TILE, values, dim);
    for (; r < num_rows; ++r) add_rows<1>(sums + r * dim, corrections + r, weights + r * TILE, values, dim);
}

}  // namespace baton
