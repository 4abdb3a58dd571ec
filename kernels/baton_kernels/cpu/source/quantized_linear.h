// Linear layers over int8 and int4 weights: y = (x values^T) * scales + b. Int8 weights have a scale
// per output, and int4 weights a scale for each GROUP of inputs of an output.
//
// x is also rounded to int8, with a scale for each GROUP of inputs of a row. The sum of products of
// a group is exact in int32. The groups are summed in float32, in order.
//
// Values are packed in panels as in linear.h, with four inputs of an output together. VNNI
// multiplies and adds four inputs in one instruction. The instruction needs unsigned values, so
// value + OFFSET is stored.
#pragma once

#include "linear.h"

namespace baton {

constexpr int64_t GROUP = 32;  // as in llama.cpp's Q8_0 and Q4_0
constexpr int64_t INT8_STEP = 4;
constexpr int64_t QUANTIZED_TILE_ROWS = 3;  // a tile has sums in int32 and in float32

// How a format stores values in bytes.
struct Int8 {
    static constexpr int64_t VALUES_PER_BYTE = 1;
#if defined(__AVX512VNNI__)
    static constexpr int32_t OFFSET = 128;
#else
    static constexpr int32_t OFFSET = 0;
#endif
    using Scale = float;
    static constexpr bool HAS_GROUP_SCALES = false;

    static Words values(Words bytes, int64_t) { return bytes; }
};

// The low four bits of the bytes are the first half of a group, and the high four bits the second.
struct Int4 {
    static constexpr int64_t VALUES_PER_BYTE = 2;
    static constexpr int32_t OFFSET = 8;
    using Scale = c10::BFloat16;
    static constexpr bool HAS_GROUP_SCALES = true;

    static Words values(Words bytes, int64_t half) { return bytes >> (half * 4) & 0x0F0F0F0Fu; }
};

// Bytes of a group of one output.
template <typename Format>
constexpr int64_t GROUP_BYTES = GROUP / Format::VALUES_PER_BYTE;

// Adds the products of four weights and four inputs to each lane.
inline Ints multiply_add(Ints sums, Words weights, Words inputs) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(weights), reinterpret_cast<__m512i>(inputs)
    ));
#else
    // The even and the odd bytes as 16-bit numbers.
    typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
    const Shorts w = bits_as<Shorts>(weights), x = bits_as<Shorts>(inputs);
    const auto pairs = [](Shorts a, Shorts b) {
#if defined(__AVX512BW__)
        return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
        return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
    };
    return sums + pairs(w << 8 >> 8, x << 8 >> 8) + pairs(w >> 8, x >> 8);
#endif
}

// Rows of x in int8, padded with zeros to whole groups.
struct QuantizedRows {
    int8_t* values;  // [rows, groups * GROUP]
    float* scales;   // [rows, groups]
    int32_t* sums;   // [rows, groups]: of the values of a group
    int64_t groups;

    QuantizedRows from(int64_t row) const {
        return {values + row * groups * GROUP, scales + row * groups, sums + row * groups, groups};
    }
};

// Rounds one row. A group with a NaN or an infinity gets the scale NaN.
template <typename T>
void quantize_row(QuantizedRows to, const T* x, int64_t in_features) {
    for (int64_t group = 0; group < to.groups; ++group) {
        const int64_t start = group * GROUP, count = std::min(GROUP, in_features - start);
        float exact[GROUP] = {}, largest = 0;
        for (int64_t i = 0; i < count; ++i) exact[i] = static_cast<float>(x[start + i]);
        bool is_finite = true;
        for (int64_t i = 0; i < GROUP; ++i) {
            largest = std::max(largest, std::abs(exact[i]));
            is_finite &= std::abs(exact[i]) <= std::numeric_limits<float>::max();
        }
        const float inverse = is_finite && largest > 0 ? 127 / largest : 0;
        int32_t sum = 0;
        for (int64_t i = 0; i < GROUP; ++i) {
            const int32_t value = is_finite ? static_cast<int32_t>(std::nearbyint(exact[i] * inverse)) : 0;
            to.values[start + i] = static_cast<int8_t>(value);
            sum += value;
        }
        to.scales[group] = is_finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
        to.sums[group] = sum;
    }
}

// Computes `count` outputs, one panel, for ROWS rows.
template <typename Format, int64_t ROWS, bool PREFETCH, typename T>
void multiply_quantized_tile(
    Matrix<T> y, QuantizedRows x, const uint8_t* panel, const typename Format::Scale* scales, const T* bias,
    int64_t count
) {
    Floats sums[ROWS][PANEL_VECTORS] = {};
    for (int64_t group = 0; group < x.groups; ++group) {
        Ints products[ROWS][PANEL_VECTORS];
        for (int64_t row = 0; row < ROWS; ++row) {
            for (Ints& one : products[row]) one = Ints{} - Format::OFFSET * x.from(row).sums[group];
        }
        for (int64_t byte = 0; byte < GROUP_BYTES<Format>; byte += INT8_STEP) {
            Words bytes[PANEL_VECTORS];
            for (int64_t v = 0; v < PANEL_VECTORS; ++v) {
                const uint8_t* const address =
                    panel + (group * GROUP_BYTES<Format> + byte) * PANEL + v * LANES * INT8_STEP;
                if constexpr (PREFETCH) __builtin_prefetch(address + PREFETCH_BYTES);
                bytes[v] = read_as<Words>(address);
            }
            for (int64_t part = 0; part < Format::VALUES_PER_BYTE; ++part) {
                Words weights[PANEL_VECTORS];
                for (int64_t v = 0; v < PANEL_VECTORS; ++v) weights[v] = Format::values(bytes[v], part);
                const int64_t input = group * GROUP + part * GROUP_BYTES<Format> + byte;
                for (int64_t row = 0; row < ROWS; ++row) {
                    const Words inputs = Words{} + read_as<uint32_t>(x.from(row).values + input);
                    for (int64_t v = 0; v < PANEL_VECTORS; ++v) {
                        products[row][v] = multiply_add(products[row][v], weights[v], inputs);
                    }
                }
            }
        }
        for (int64_t v = 0; v < PANEL_VECTORS; ++v) {
            for (int64_t row = 0; row < ROWS; ++row) {
                Floats total = __builtin_convertvector(products[row][v], Floats) * x.from(row).scales[group];
                if constexpr (Format::HAS_GROUP_SCALES) total *= load(scales + group * PANEL + v * LANES);
                sums[row][v] += total;
            }
        }
    }
    for (int64_t row = 0; row < ROWS; ++row) {
        for (int64_t v = 0; v < PANEL_VECTORS && v * LANES < count; ++v) {
            const int64_t left = std::min(LANES, count - v * LANES);
            Floats total = sums[row][v];
            if constexpr (!Format::HAS_GROUP_SCALES) total *= load(scales + v * LANES, left);
            if (bias != nullptr) total += load(bias + v * LANES, left);
            store_lanes(y[row] + v * LANES, total, left);
        }
    }
}

template <typename Format, typename T, std::size_t... I>
void multiply_quantized_panel(
    Matrix<T> y, QuantizedRows x, int64_t rows, const uint8_t* panel, const typename Format::Scale* scales,
    const T* bias, int64_t count, std::index_sequence<I...>
) {
    using Multiply =
        void (*)(Matrix<T>, QuantizedRows, const uint8_t*, const typename Format::Scale*, const T*, int64_t);
    constexpr Multiply first[] = {multiply_quantized_tile<Format, I + 1, true, T>...};
    constexpr Multiply others[] = {multiply_quantized_tile<Format, I + 1, false, T>...};
    for (int64_t row = 0; row < rows; row += QUANTIZED_TILE_ROWS) {
        const Multiply* const multiply = row == 0 ? first : others;
        multiply[std::min(QUANTIZED_TILE_ROWS, rows - row) - 1](y.from(row), x.from(row), panel, scales, bias, count);
    }
}

// Computes y for `rows` rows of x. A missing bias is nullptr. Scales of groups have the shape
// [panels, groups, PANEL].
template <typename Format, typename T>
void quantized_linear(
    Matrix<T> y, Matrix<const T> x, int64_t rows, const uint8_t* panels, const typename Format::Scale* scales,
    const T* bias, int64_t in_features, int64_t out_features
) {
    const int64_t groups = (in_features + GROUP - 1) / GROUP;
    std::vector<int8_t> values(rows * groups * GROUP);
    std::vector<float> x_scales(rows * groups);
    std::vector<int32_t> sums(rows * groups);
    const QuantizedRows quantized{values.data(), x_scales.data(), sums.data(), groups};
    for_each_row(rows, in_features, [&](int64_t row) { quantize_row(quantized.from(row), x[row], in_features); });
    const int64_t panel_size = groups * GROUP_BYTES<Format> * PANEL;
    const int64_t panel_scales = Format::HAS_GROUP_SCALES ? groups * PANEL : PANEL;
    for_each_panel(rows, out_features, panel_size, [&](int64_t row, int64_t num_rows, int64_t panel) {
        const int64_t output = panel * PANEL;
        multiply_quantized_panel<Format>(
            y.from(row, output), quantized.from(row), num_rows, panels + panel * panel_size,
            scales + panel * panel_scales, bias == nullptr ? nullptr : bias + output,
            std::min(PANEL, out_features - output), std::make_index_sequence<QUANTIZED_TILE_ROWS>()
        );
    });
}

template <typename Format>
void pack_quantized(uint8_t* panels, Matrix<const int8_t> values, int64_t in_features, int64_t out_features) {
    constexpr int64_t BITS = 8 / Format::VALUES_PER_BYTE;
    const int64_t padded = (in_features + GROUP - 1) / GROUP * GROUP_BYTES<Format>;
    pack_panels<INT8_STEP>(panels, padded, out_features, [&](int64_t output, int64_t byte) {
        uint32_t packed = 0;
        for (int64_t part = 0; part < Format::VALUES_PER_BYTE; ++part) {
            const int64_t input =
                (byte / GROUP_BYTES<Format> * Format::VALUES_PER_BYTE + part) * GROUP_BYTES<Format> +
                byte % GROUP_BYTES<Format>;
            const int32_t value = output < out_features && input < in_features ? values[output][input] : 0;
            packed |= (static_cast<uint32_t>(value + Format::OFFSET) & ((1u << BITS) - 1)) << (part * BITS);
        }
        return static_cast<uint8_t>(packed);
    });
}

}  // namespace baton
