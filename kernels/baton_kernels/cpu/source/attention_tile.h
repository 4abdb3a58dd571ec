// A tile of tokens: the offsets of the keys and values, and the two products of attention (scores
// of query rows, weighted sums of values).
#pragma once

#include "vector.h"

namespace baton {

constexpr int64_t STRIP = 16, STRIPS = 4;
constexpr int64_t TILE = STRIP * STRIPS;  // maximum number of tokens

// The tokens of one tile. With 128 floats per token, the keys take 32 KiB. A whole tile is STRIPS
// strips of STRIP tokens. The first token of each strip is read, then the second token of each
// strip, and so on, because hardware prefetchers follow several streams best.
struct Tile {
    int64_t begin, end, count;  // the tile has the `count` positions [begin, end)
    int64_t offsets[TILE];      // offsets of the tokens' rows in the cache, in reading order

    // Sets the tile to the tokens from a position to the next multiple of TILE, or to `limit`.
    // `offset_of(i)` is the offset of the first row of the sequence's block i. The other rows of
    // the block follow.
    template <typename OffsetOf>
    void find(int64_t from, int64_t limit, int64_t block_size, int64_t head_dim, const OffsetOf& offset_of) {
        begin = from;
        end = std::min(from - from % TILE + TILE, limit);
        count = end - begin;
        const bool whole = count == TILE;
        if (whole && block_size % STRIP == 0) {  // no strip spans two blocks
            for (int64_t strip = 0; strip < STRIPS; ++strip) {
                const int64_t position = begin + strip * STRIP;
                offsets[strip] = offset_of(position / block_size) + position % block_size * head_dim;
            }
            for (int64_t i = STRIPS; i < TILE; ++i) offsets[i] = offsets[i - STRIPS] + head_dim;
            return;
        }
        int64_t block = begin / block_size, row = begin % block_size;
        for (int64_t at = 0; at < count;) {
            int64_t run = std::min(count - at, block_size - row);
            if (whole) run = std::min(run, STRIP - at % STRIP);
            int64_t* to = offsets + (whole ? at % STRIP * STRIPS + at / STRIP : at);
            const int64_t offset = offset_of(block) + row * head_dim, step = whole ? STRIPS : 1;
            for (int64_t i = 0; i < run; ++i) to[i * step] = offset + i * head_dim;
            at += run;
            row += run;
            if (row == block_size) ++block, row = 0;
        }
    }

    int64_t position_of(int64_t i) const { return begin + (count == TILE ? i % STRIPS * STRIP + i / STRIPS : i); }
};

// The keys or values of a tile: row i begins at base + offsets[i]. Rows are whole vectors.
template <typename Stored>
struct Rows {
    const Stored* base;
    const int64_t* offsets;
    int64_t count;
};

// Reads rows into the CPU's cache, so that the computation does not stall. Rows and elements at the
// end are left out if they do not fill a step.
template <typename Stored>
inline void touch(const Rows<Stored>& rows, int64_t dim) {
    Ints seen[2] = {};
    constexpr int64_t STEP = 2 * sizeof(Ints) / sizeof(Stored);
    for (int64_t i = 0; i + STRIPS <= rows.count; i += STRIPS) {
        for (int64_t d = 0; d + STEP <= dim; d += STEP) {
            for (int64_t strip = 0; strip < STRIPS; ++strip) {
                const Stored* from = rows.base + rows.offsets[i + strip] + d;
                for (int64_t v = 0; v < 2; ++v) seen[v] ^= read_as<Ints>(from + v * STEP / 2);
            }
        }
    }
    // Keeps the compiler from removing the reads.
    [[maybe_unused]] volatile int32_t kept = (seen[0] ^ seen[1])[0];
}

// Copies rows as floats into `to`, `dim` apart and padded with zeros.
template <typename Stored>
inline void copy(float* to, const Rows<Stored>& rows, int64_t head_dim, int64_t dim) {
    for (int64_t i = 0; i < rows.count; ++i, to += dim) {
        const Stored* from = rows.base + rows.offsets[i];
        for_each_vector(head_dim, [&](int64_t d, auto read, auto) { store(to + d, read(from + d)); });
    }
}

// The rows that are used next, to be prefetched. LOCALITY as in __builtin_prefetch().
//
// While sixteen rows of the current tile are multiplied by R query rows, SHARE<R> of the next rows
// are prefetched. That is one byte for two products, about the rate of memory. For floats and four
// query rows, SHARE<R> is 8. More prefetches would stall the computation. Each group of four query
// rows prefetches the same rows, so only the first group has an effect.
//
// Functions that only prefetch are inlined, because the compiler would remove calls to them.
template <typename Stored, int LOCALITY>
class Next {
public:
    Next(const Rows<Stored>& rows, int64_t head_dim) : rows(rows), row_bytes(head_dim * sizeof(Stored)) {}

    // Prefetches the vectors at element d of the next rows that are the share of the current rows
    // [t, t + T).
    template <int64_t R, int64_t T>
    [[gnu::always_inline]] void prefetch_vectors(int64_t t, int64_t d) const {
        const int64_t* offsets = rows.offsets + t * SHARE<R> / 16;
        for (int64_t i = 0; i < T * SHARE<R> / 16; ++i) __builtin_prefetch(rows.base + d + offsets[i], 0, LOCALITY);
    }

    // Prefetches one row after the other, BYTES at a time.
    class Cursor {
    public:
        Cursor(const Next& next, int64_t first_row) : next(next), row(first_row) {}

        template <int64_t BYTES>
        [[gnu::always_inline]] void prefetch() {
            if (from >= end) [[unlikely]] {
                if (row >= next.rows.count) return;
                from = next.begin_of(row++);
                end = from + next.row_bytes;
            }
            for (int64_t i = 0; i < BYTES; i += LINE) __builtin_prefetch(from + i, 0, LOCALITY);
            from += BYTES;
        }

    private:
        const Next& next;
        int64_t row;
        const char *from = nullptr, *end = nullptr;
    };

    // Returns a cursor that begins after the share of the first num_rows rows of the current tile.
    template <int64_t R>
    Cursor after(int64_t num_rows) const { return Cursor(*this, num_rows * SHARE<R> / 16); }

    // Prefetches four rows outside of the share of four query rows: the first four (which = 0) or
    // the second four (which = 1). So memory is busy between reading and computing. For two-byte
    // types, the share has all rows, and nothing is left to prefetch.
    [[gnu::always_inline]] void prefetch_four(int64_t which) const {
        const int64_t first = TILE * SHARE<4> / 16 + which * 4;
        for (int64_t row = first; row < std::min(first + 4, rows.count); ++row) {
            for (int64_t i = 0; i < row_bytes; i += LINE) __builtin_prefetch(begin_of(row) + i, 0, LOCALITY);
        }
    }

private:
    template <int64_t R>
    static constexpr int64_t SHARE = 8 * R / sizeof(Stored);
    static constexpr int64_t LINE = 64;

    [[gnu::always_inline]] const char* begin_of(int64_t row) const {
        return reinterpret_cast<const char*>(rows.base + rows.offsets[row]);
    }

    Rows<Stored> rows;
    int64_t row_bytes;
};

// Replaces Next if nothing is to be prefetched.
template <typename Stored>
struct NoNext {
    NoNext(const Rows<Stored>&, int64_t) {}
    template <int64_t R, int64_t T>
    void prefetch_vectors(int64_t, int64_t) const {}
    struct Cursor {
        template <int64_t BYTES>
        void prefetch() {}
    };
    template <int64_t R>
    Cursor after(int64_t) const { return {}; }
    void prefetch_four(int64_t) const {}
};

// scores[r, t] = query[r] . keys[t] for R rows and T tokens from `at` on. The order of summation
// does not depend on R and T.
template <int64_t R, int64_t T, typename Stored, typename ToPrefetch>
[[gnu::always_inline]] inline void score(
    float* scores, const float* query, const Rows<Stored>& keys, int64_t at, const ToPrefetch& next, int64_t dim
) {
    Floats sums[R * T] = {};
    int64_t d = 0;
    do {
        Floats key[T];
        for (int64_t t = 0; t < T; ++t) key[t] = load(keys.base + d + keys.offsets[at + t]);
        next.template prefetch_vectors<R, T>(at, d);
        for (int64_t r = 0; r < R; ++r) {
            const Floats q = load(query + r * dim + d);
            for (int64_t t = 0; t < T; ++t) sums[r * T + t] += q * key[t];
        }
    } while ((d += LANES) < dim);
    float totals[R * T];
    sum_each<R * T>(totals, sums);
    for (int64_t r = 0; r < R; ++r) std::copy_n(totals + r * T, T, scores + r * TILE + at);
}

template <int64_t R, typename Stored, typename ToPrefetch>
inline void score_rows(float* scores, const float* query, const Rows<Stored>& keys, const ToPrefetch& next, int64_t dim) {
    constexpr int64_t T = 16 / R;
    int64_t t = 0;
    for (; t + T <= keys.count; t += T) score<R, T>(scores, query, keys, t, next, dim);
    for (; t < keys.count; ++t) score<R, 1>(scores, query, keys, t, next, dim);
}

// scores[row, t] for all rows and the tile's tokens. Rows of scores are TILE apart.
template <typename Stored, typename ToPrefetch>
inline void score_tile(
    float* scores, const float* query, int64_t num_rows, const Rows<Stored>& keys, const ToPrefetch& next, int64_t dim
) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) score_rows<4>(scores + r * TILE, query + r * dim, keys, next, dim);
    for (; r + 2 <= num_rows; r += 2) score_rows<2>(scores + r * TILE, query + r * dim, keys, next, dim);
    for (; r < num_rows; ++r) score_rows<1>(scores + r * TILE, query + r * dim, keys, next, dim);
}

// sums[r, d:] = sums[r, d:] * corrections[r] + sum over t of weights[r, t] * values[t, d:], for R
// rows and V vectors.
template <int64_t R, int64_t V, typename Stored, typename ToPrefetch>
inline void add(
    float* sums, const float* corrections, const float* weights, const Rows<Stored>& values, const ToPrefetch& next,
    int64_t d, int64_t dim
) {
    Floats total[R][V];
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) total[r][v] = load(sums + r * dim + d + v * LANES) * corrections[r];
    }
    auto cursor = next.template after<R>(values.count * d / dim);
    for (int64_t t = 0; t < values.count; ++t) {
        Floats value[V];
        for (int64_t v = 0; v < V; ++v) value[v] = load(values.base + d + v * LANES + values.offsets[t]);
        cursor.template prefetch<R * V * LANES / 2>();
        for (int64_t r = 0; r < R; ++r) {
            const Floats weight = splat(weights[r * TILE + t]);
            for (int64_t v = 0; v < V; ++v) total[r][v] += weight * value[v];
        }
    }
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t v = 0; v < V; ++v) store(sums + r * dim + d + v * LANES, total[r][v]);
    }
}

template <int64_t R, typename Stored, typename ToPrefetch>
inline void add_rows(
    float* sums, const float* corrections, const float* weights, const Rows<Stored>& values, const ToPrefetch& next,
    int64_t dim
) {
    constexpr int64_t V = LANES == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + V * LANES <= dim; d += V * LANES) add<R, V>(sums, corrections, weights, values, next, d, dim);
    for (; d < dim; d += LANES) add<R, 1>(sums, corrections, weights, values, next, d, dim);
}

// Calls add() for all rows, which are `dim` apart in sums and TILE apart in weights.
template <typename Stored, typename ToPrefetch>
inline void add_tile(
    float* sums, const float* corrections, const float* weights, int64_t num_rows, const Rows<Stored>& values,
    const ToPrefetch& next, int64_t dim
) {
    const auto add_at = [&]<int64_t R>(int64_t r) {
        add_rows<R>(sums + r * dim, corrections + r, weights + r * TILE, values, next, dim);
    };
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) add_at.template operator()<4>(r);
    for (; r + 2 <= num_rows; r += 2) add_at.template operator()<2>(r);
    for (; r < num_rows; ++r) add_at.template operator()<1>(r);
}

}  // namespace baton
