// Linear layers y = x W^T + b over packed weights, with sums in float32.
//
// A weight is packed in panels of PANEL outputs, each panel of the shape [in_features /
// STEP_INPUTS, PANEL, STEP_INPUTS]. A tile of the product is some rows of x times one panel. The
// sums of a tile stay in registers until they are complete. So a product with few rows reads the
// weight once and sequentially, at the speed of memory. Missing outputs of the last panel and
// missing inputs of the last step are zeros.
#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <array>

#include "vector.h"

namespace baton {

// Number of vectors of a panel, and of rows of a tile. A tile has PANEL_VECTORS * TILE_ROWS vectors
// of sums, which must fit into the registers.
constexpr int64_t PANEL_VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t TILE_ROWS = 6;
constexpr int64_t PANEL = PANEL_VECTORS * LANES;
// Rows of a task. The tasks of a panel follow one another, so that the panel stays in a core's
// cache.
constexpr int64_t BLOCK_ROWS = 16 * TILE_ROWS;
// Distance from the weight that is used to the weight that is prefetched at the same time.
constexpr int64_t PREFETCH_BYTES = 4096;
constexpr int64_t CACHE_LINE = 64;
constexpr int64_t WEIGHTS_PER_THREAD = 1 << 16;  // minimum work of a thread

// Number of inputs of an output that are adjacent in a packed weight: one float, or two 16-bit
// numbers. Processors multiply pairs of 16-bit numbers.
template <typename T>
constexpr int64_t STEP_INPUTS = 4 / sizeof(T);

// Cache lines of one step of a panel.
constexpr int64_t STEP_LINES = std::max<int64_t>(1, 4 * PANEL / CACHE_LINE);

// Number of inputs of a block of a panel's weights. A block has 192 KiB, so that two blocks fit
// into the L2 cache of a core.
template <typename T>
constexpr int64_t BLOCK_INPUTS = (192 << 10) / (PANEL * sizeof(T));

// Returns the inputs of one step of one row of x, repeated in each lane.
inline Floats broadcast(const float* x, int64_t) { return splat(*x); }

inline Words broadcast(const c10::BFloat16* x, int64_t count) {
    const uint32_t low = x[0].x, high = count < 2 ? 0 : x[1].x;
    return Words{} + (high << 16 | low);
}

// Adds the products of one step.
inline Floats multiply_add(Floats sums, Floats weights, Floats inputs) { return sums + weights * inputs; }

inline Floats multiply_add(Floats sums, Words weights, Words inputs) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(inputs)
    ));
#else
    const Words high = Words{} + 0xFFFF0000u;
    sums += bits_as<Floats>(weights << 16) * bits_as<Floats>(inputs << 16);
    return sums + bits_as<Floats>(weights & high) * bits_as<Floats>(inputs & high);
#endif
}

// A row-major matrix of T.
template <typename T>
struct Matrix {
    T* data;
    int64_t stride;

    T* operator[](int64_t row) const { return data + row * stride; }
    Matrix from(int64_t row, int64_t column = 0) const { return {(*this)[row] + column, stride}; }
};

template <typename T>
inline void store_lanes(T* to, Floats values, int64_t count) {
    if (count == LANES) {
        store(to, values);
    } else {
        store(to, values, count);
    }
}

// The sums of some rows of x times one panel.
using Sums = float (*)[PANEL];

// Adds the products of `num_inputs` inputs to the sums of ROWS rows. Each step also prefetches
// LINES cache lines, the first step at `ahead`. If `from` is nullptr, the sums start at zero.
template <int64_t ROWS, int64_t LINES, typename T>
void multiply_tile(
    Sums to, Sums from, Matrix<const T> x, const T* weights, int64_t num_inputs, const char* ahead
) {
    using Step = decltype(broadcast(weights, 0));
    Floats sums[ROWS][PANEL_VECTORS] = {};
    if (from != nullptr) std::memcpy(sums, from, sizeof(sums));
    for (int64_t input = 0; input < num_inputs; input += STEP_INPUTS<T>) {
        for (int64_t line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * CACHE_LINE);
        ahead += LINES * CACHE_LINE;
        Step step[PANEL_VECTORS];
        for (int64_t v = 0; v < PANEL_VECTORS; ++v) {
            step[v] = read_as<Step>(weights + input * PANEL + v * LANES * STEP_INPUTS<T>);
        }
        for (int64_t row = 0; row < ROWS; ++row) {
            const Step inputs = broadcast(x[row] + input, num_inputs - input);
            for (int64_t v = 0; v < PANEL_VECTORS; ++v) sums[row][v] = multiply_add(sums[row][v], step[v], inputs);
        }
    }
    std::memcpy(to, sums, sizeof(sums));
}

template <typename T>
using MultiplyTile = void (*)(Sums, Sums, Matrix<const T>, const T*, int64_t, const char*);

// Returns the instances of multiply_tile for 1 to TILE_ROWS rows.
template <typename T, int64_t LINES, std::size_t... I>
constexpr std::array<MultiplyTile<T>, TILE_ROWS> tiles(std::index_sequence<I...>) {
    return {multiply_tile<I + 1, LINES, T>...};
}

// A packed weight. rows() converts rows of x to the form that multiply() takes.
template <typename T>
struct PackedMatrix {
    const T* panels;
    int64_t in_features, out_features;

    static Matrix<const T> rows(Matrix<const T> x, int64_t, int64_t) { return x; }

    static int64_t padded(int64_t in_features) {
        return (in_features + STEP_INPUTS<T> - 1) / STEP_INPUTS<T> * STEP_INPUTS<T>;
    }

    int64_t panel_size() const { return padded(in_features) * PANEL; }

    // Computes the outputs of one panel for `num_rows` rows. A missing bias is nullptr.
    template <typename Out>
    void multiply(Matrix<Out> y, Matrix<const T> x, int64_t num_rows, int64_t panel, const T* bias) const {
        for (int64_t row = 0; row < num_rows; row += BLOCK_ROWS) {
            multiply_block(y.from(row), x.from(row), std::min(BLOCK_ROWS, num_rows - row), panel, bias);
        }
    }

  private:
    // Computes the outputs of at most BLOCK_ROWS rows. Reading a weight takes longer than
    // multiplying it with a few rows. So each tile of a block of weights prefetches one share of the
    // next block. If there are fewer tiles than shares, the first tile prefetches the weights ahead
    // of its own position, and the other tiles prefetch shares.
    template <typename Out>
    void multiply_block(Matrix<Out> y, Matrix<const T> x, int64_t num_rows, int64_t panel, const T* bias) const {
        static constexpr std::make_index_sequence<TILE_ROWS> ROWS;
        static constexpr auto READ_ALL = tiles<T, STEP_LINES>(ROWS), READ_SHARE = tiles<T, 1>(ROWS);
        static constexpr auto READ_NONE = tiles<T, 0>(ROWS);
        const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t num_blocks = num_tiles == 1 ? 1 : (in_features - 1) / BLOCK_INPUTS<T> + 1;
        const int64_t block_inputs = padded((in_features + num_blocks - 1) / num_blocks);
        const bool reads_own = num_tiles == 1 || num_tiles < STEP_LINES;
        alignas(CACHE_LINE) float sums[BLOCK_ROWS][PANEL];
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t input = block * block_inputs, num_inputs = std::min(block_inputs, in_features - input);
            const T* const weights = panels + panel * panel_size() + input * PANEL;
            const char* const here = reinterpret_cast<const char*>(weights);
            const int64_t share_bytes = padded(num_inputs) * PANEL * sizeof(T) / STEP_LINES;
            for (int64_t row = 0; row < num_rows; row += TILE_ROWS) {
                const int64_t share = row / TILE_ROWS - reads_own;
                const auto& multiply = share < 0 ? READ_ALL : share < STEP_LINES ? READ_SHARE : READ_NONE;
                multiply[std::min(TILE_ROWS, num_rows - row) - 1](
                    sums + row, block == 0 ? nullptr : sums + row, x.from(row, input), weights, num_inputs,
                    here + (share < 0 ? PREFETCH_BYTES : (STEP_LINES + share) * share_bytes)
                );
            }
        }
        const int64_t output = panel * PANEL, count = std::min(PANEL, out_features - output);
        for (int64_t row = 0; row < num_rows; ++row) {
            for (int64_t i = 0; i < count; i += LANES) {
                const int64_t left = std::min(LANES, count - i);
                const Floats total = read_as<Floats>(sums[row] + i);
                store_lanes(y[row] + output + i, bias == nullptr ? total : total + load(bias + output + i, left), left);
            }
        }
    }
};

// Calls `body(row, num_rows, panel)` for blocks of rows and panels, on several threads if there is
// enough work.
template <typename Body>
void for_each_panel(int64_t rows, int64_t out_features, int64_t panel_size, Body body) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    const int64_t num_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t grain = std::max<int64_t>(1, WEIGHTS_PER_THREAD / std::max<int64_t>(1, panel_size));
    at::parallel_for(0, num_blocks * num_panels, grain, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t row = task % num_blocks * BLOCK_ROWS;
            body(row, std::min(BLOCK_ROWS, rows - row), task / num_blocks);
        }
    });
}

// Computes y for `num_rows` rows of x. A missing bias is nullptr.
template <typename T, typename Weight>
void linear(Matrix<T> y, Matrix<const T> x, int64_t num_rows, const Weight& weight, const T* bias) {
    const auto rows = Weight::rows(x, num_rows, weight.in_features);
    for_each_panel(num_rows, weight.out_features, weight.panel_size(), [&](int64_t row, int64_t count, int64_t panel) {
        weight.multiply(y.from(row), rows.from(row), count, panel, bias);
    });
}

// Writes panels in which STEP inputs of an output are adjacent. `value(output, input)` returns the
// weight, or zero for padding.
template <int64_t STEP, typename Packed, typename Value>
void pack_panels(Packed* panels, int64_t padded_inputs, int64_t out_features, Value value) {
    at::parallel_for(0, (out_features + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
        Packed* to = panels + begin * PANEL * padded_inputs;
        for (int64_t first = begin * PANEL; first < end * PANEL; first += PANEL) {
            for (int64_t input = 0; input < padded_inputs; input += STEP) {
                for (int64_t output = first; output < first + PANEL; ++output) {
                    for (int64_t i = 0; i < STEP; ++i) *to++ = value(output, input + i);
                }
            }
        }
    });
}

template <typename T>
void pack(T* panels, Matrix<const T> weight, int64_t in_features, int64_t out_features) {
    const int64_t padded = PackedMatrix<T>::padded(in_features);
    pack_panels<STEP_INPUTS<T>>(panels, padded, out_features, [&](int64_t output, int64_t input) {
        return output < out_features && input < in_features ? weight[output][input] : T(0);
    });
}

}  // namespace baton
