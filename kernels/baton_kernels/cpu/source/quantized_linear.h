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

#include <memory>

#include "elementwise.h"
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
    int8_t* values;  // [num_rows, groups * GROUP]
    float* scales;   // [num_rows, groups]
    int32_t* sums;   // [num_rows, groups]: of the values of a group
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

// Computes the outputs of one panel for ROWS rows. The panel has `count` outputs without padding.
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

// Owns rows of x that were rounded to int8 for a product.
class RoundedRows {
  public:
    template <typename T>
    RoundedRows(Matrix<const T> x, int64_t num_rows, int64_t in_features)
        : groups_((in_features + GROUP - 1) / GROUP),
          values_(new int8_t[num_rows * groups_ * GROUP]),
          scales_(new float[num_rows * groups_]),
          sums_(new int32_t[num_rows * groups_]) {
        for_each_row(num_rows, in_features, [&](int64_t row) { quantize_row(from(row), x[row], in_features); });
    }

    QuantizedRows from(int64_t row) const {
        return QuantizedRows{values_.get(), scales_.get(), sums_.get(), groups_}.from(row);
    }

  private:
    int64_t groups_;
    std::unique_ptr<int8_t[]> values_;
    std::unique_ptr<float[]> scales_;
    std::unique_ptr<int32_t[]> sums_;
};

// A quantized weight, with the same members as PackedMatrix. Scales of groups have the shape
// [panels, groups, PANEL].
template <typename Format>
struct QuantizedMatrix {
    const uint8_t* panels;
    const typename Format::Scale* scales;
    int64_t in_features, out_features;

    template <typename T>
    static RoundedRows rows(Matrix<const T> x, int64_t num_rows, int64_t in_features) {
        return {x, num_rows, in_features};
    }

    int64_t groups() const { return (in_features + GROUP - 1) / GROUP; }
    int64_t panel_size() const { return groups() * GROUP_BYTES<Format> * PANEL; }

    template <typename T>
    void multiply(Matrix<T> y, QuantizedRows x, int64_t num_rows, int64_t panel, const T* bias) const {
        multiply(y, x, num_rows, panel, bias, std::make_index_sequence<QUANTIZED_TILE_ROWS>());
    }

  private:
    template <typename T, std::size_t... I>
    void multiply(
        Matrix<T> y, QuantizedRows x, int64_t num_rows, int64_t panel, const T* bias, std::index_sequence<I...>
    ) const {
        using Multiply =
            void (*)(Matrix<T>, QuantizedRows, const uint8_t*, const typename Format::Scale*, const T*, int64_t);
        constexpr Multiply first[] = {multiply_quantized_tile<Format, I + 1, true, T>...};
        constexpr Multiply others[] = {multiply_quantized_tile<Format, I + 1, false, T>...};
        const int64_t output = panel * PANEL, count = std::min(PANEL, out_features - output);
        const typename Format::Scale* const own_scales =
            scales + (Format::HAS_GROUP_SCALES ? panel * groups() * PANEL : output);
        if (bias != nullptr) bias += output;
        for (int64_t row = 0; row < num_rows; row += QUANTIZED_TILE_ROWS) {
            const Multiply* const tiles = row == 0 ? first : others;
            tiles[std::min(QUANTIZED_TILE_ROWS, num_rows - row) - 1](y.from(row, output), x.from(row), panels + panel * panel_size(), own_scales, bias, count);
        }
    }
};

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
