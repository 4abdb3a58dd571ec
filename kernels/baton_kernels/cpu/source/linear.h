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

#include "vector.h"

namespace baton {

// Vectors of a panel, and rows of a tile. A tile has PANEL_VECTORS * TILE_ROWS vectors of sums,
// which must fit into the registers.
constexpr int64_t PANEL_VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t TILE_ROWS = 6;
constexpr int64_t PANEL = PANEL_VECTORS * LANES;
// Rows of a task. The tasks of a panel follow one another, so that the panel stays in a core's
// cache.
constexpr int64_t BLOCK_ROWS = 16 * TILE_ROWS;
// Distance between a weight that is used and the weight that is prefetched at the same time.
constexpr int64_t PREFETCH_BYTES = 4096;
constexpr int64_t WEIGHTS_PER_THREAD = 1 << 16;  // minimum work of a thread

// Inputs of an output that are adjacent in a packed weight. Processors multiply pairs of 16-bit
// numbers.
template <typename T>
constexpr int64_t STEP_INPUTS = 4 / sizeof(T);

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

// Computes the `count` outputs of one panel for ROWS rows.
template <int64_t ROWS, bool PREFETCH, typename Out, typename T>
void multiply_tile(
    Matrix<Out> y, Matrix<const T> x, const T* panel, const T* bias, int64_t in_features, int64_t count
) {
    using Step = decltype(broadcast(panel, 0));
    Floats sums[ROWS][PANEL_VECTORS] = {};
    for (int64_t input = 0; input < in_features; input += STEP_INPUTS<T>) {
        const T* const from = panel + input * PANEL;
        Step weights[PANEL_VECTORS];
        for (int64_t v = 0; v < PANEL_VECTORS; ++v) {
            const T* const address = from + v * LANES * STEP_INPUTS<T>;
            if constexpr (PREFETCH) __builtin_prefetch(reinterpret_cast<const char*>(address) + PREFETCH_BYTES);
            weights[v] = read_as<Step>(address);
        }
        for (int64_t row = 0; row < ROWS; ++row) {
            const Step inputs = broadcast(x[row] + input, in_features - input);
            for (int64_t v = 0; v < PANEL_VECTORS; ++v) sums[row][v] = multiply_add(sums[row][v], weights[v], inputs);
        }
    }
    for (int64_t row = 0; row < ROWS; ++row) {
        for (int64_t v = 0; v < PANEL_VECTORS && v * LANES < count; ++v) {
            const int64_t left = std::min(LANES, count - v * LANES);
            const Floats total = bias == nullptr ? sums[row][v] : sums[row][v] + load(bias + v * LANES, left);
            store_lanes(y[row] + v * LANES, total, left);
        }
    }
}

// A packed weight. `Rows` is the form in which its product takes the rows of x.
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
        multiply(y, x, num_rows, panel, bias, std::make_index_sequence<TILE_ROWS>());
    }

  private:
    // The first tile brings the weights into the cache.
    template <typename Out, std::size_t... I>
    void multiply(
        Matrix<Out> y, Matrix<const T> x, int64_t num_rows, int64_t panel, const T* bias, std::index_sequence<I...>
    ) const {
        using Multiply = void (*)(Matrix<Out>, Matrix<const T>, const T*, const T*, int64_t, int64_t);
        constexpr Multiply first[] = {multiply_tile<I + 1, true, Out, T>...};
        constexpr Multiply others[] = {multiply_tile<I + 1, false, Out, T>...};
        const int64_t output = panel * PANEL, count = std::min(PANEL, out_features - output);
        if (bias != nullptr) bias += output;
        for (int64_t row = 0; row < num_rows; row += TILE_ROWS) {
            const Multiply* const tiles = row == 0 ? first : others;
            tiles[std::min(TILE_ROWS, num_rows - row) - 1](y.from(row, output), x.from(row), panels + panel * panel_size(), bias, in_features, count);
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
