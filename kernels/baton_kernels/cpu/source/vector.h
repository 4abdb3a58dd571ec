// Vectors of floats as wide as the processor's registers, and conversions from bfloat16 and
// float16. Uses GCC's vector extensions, so that the same code compiles for AVX-512 and AVX2.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace baton {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halfwords __attribute__((vector_size(2 * LANES)));

template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <typename To, typename From>
inline To read_as(const From* from) {
    To to;
    std::memcpy(&to, from, sizeof(to));
    return to;
}

// Returns a vector with `value` in each lane. GCC removes the subtraction of 0. It would keep an
// addition of 0, because -0 + 0 is 0.
inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) { return read_as<Floats>(from); }

inline Floats load(const c10::BFloat16* from) {
    return bits_as<Floats>(__builtin_convertvector(read_as<Halfwords>(from), Words) << 16);
}

// Converts float16 to float32. For a normal number, a multiplication corrects the bias of the
// exponent. For a subnormal number, the bits become a float's mantissa, and a subtraction removes
// the leading 1 of the float.
inline Floats load(const c10::Half* from) {
    const Words word = __builtin_convertvector(read_as<Halfwords>(from), Words) << 16;
    const Words magnitude = word + word;  // without the sign
    const Floats normal = bits_as<Floats>((magnitude >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const Floats subnormal = bits_as<Floats>((magnitude >> 17) | (126u << 23)) - 0.5f;
    const Floats value = magnitude < (1u << 27) ? subnormal : normal;
    return bits_as<Floats>(bits_as<Words>(value) | (word & 0x80000000u));
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline void store(c10::BFloat16* to, Floats value) {
    const Words word = bits_as<Words>(value);
    const Words rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
    const Words quiet_nan = Words{} + 0x7FC0u;
    const Words chosen = value == value ? rounded : quiet_nan;
    const Halfwords halfwords = __builtin_convertvector(chosen, Halfwords);
    std::memcpy(static_cast<void*>(to), &halfwords, sizeof(halfwords));
}

inline void store(c10::Half* to, Floats value) {
    for (int64_t lane = 0; lane < LANES; ++lane) to[lane] = static_cast<c10::Half>(value[lane]);
}

// Loads the first `count` elements; the other lanes are zero.
template <typename T>
inline Floats load(const T* from, int64_t count) {
    T padded[LANES] = {};
    std::copy_n(from, count, padded);
    return load(padded);
}

template <typename T>
inline void store(T* to, Floats value, int64_t count) {
    T padded[LANES];
    store(padded, value);
    std::copy_n(padded, count, to);
}

// Calls `body(offset, read, write)` for each vector of a row of `length` elements. read(pointer)
// and write(pointer, value) do not access memory past the end of the row.
template <typename Body>
inline void for_each_vector(int64_t length, Body body) {
    int64_t offset = 0;
    for (; offset + LANES <= length; offset += LANES) {
        body(
            offset, [](const auto* from) { return load(from); }, [](auto* to, Floats value) { store(to, value); });
    }
    if (const int64_t rest = length - offset; rest > 0) {
        body(
            offset, [rest](const auto* from) { return load(from, rest); },
            [rest](auto* to, Floats value) { store(to, value, rest); });
    }
}

// Rounds as if the value were stored as T and read again, as between separate operations on tensors
// of T.
template <typename T>
inline Floats rounded_to(Floats value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        T stored[LANES];
        store(stored, value);
        return load(stored);
    }
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Returns the indices for a shuffle: lane i of the result is input lane `lane(i)`. In a shuffle of
// two vectors, the lanes of the second vector have the indices from LANES on.
template <typename Lane, std::size_t... I>
inline Ints lanes(Lane lane, std::index_sequence<I...>) {
    return Ints{static_cast<int32_t>(lane(static_cast<int32_t>(I)))...};
}

template <typename Lane>
inline Ints lanes(Lane lane) {
    return lanes(lane, std::make_index_sequence<LANES>());
}

// Reduces each of N vectors to one value, by combining the upper half with the lower half until one
// lane is left. The result has N groups of lanes of the same length. Group i has the value of
// vectors[i].
template <int64_t N, int32_t H = LANES / 2, typename Combine>
inline Floats fold(const Floats* vectors, Combine combine) {
    if constexpr (H == 0) {
        return vectors[0];
    } else if constexpr (N == 1) {
        const Floats folded = combine(vectors[0], __builtin_shuffle(vectors[0], lanes([](int32_t l) { return l ^ H; })));
        return fold<1, H / 2>(&folded, combine);
    } else {
        // In each group of 2 * H lanes, the lower H lanes become the fold of vectors[i]. The upper
        // H lanes become the fold of vectors[i + N / 2].
        Floats folded[N / 2];
        for (int64_t i = 0; i < N / 2; ++i) {
            const Floats a = vectors[i], b = vectors[i + N / 2];
            folded[i] = combine(
                __builtin_shuffle(a, b, lanes([](int32_t l) { return l / H % 2 == 0 ? l : l + LANES; })),
                __builtin_shuffle(a, b, lanes([](int32_t l) { return l / H % 2 == 0 ? l + H : l - H + LANES; }))
            );
        }
        return fold<N / 2, H / 2>(folded, combine);
    }
}

constexpr auto SUM = [](Floats a, Floats b) { return a + b; };
constexpr auto MAXIMUM = [](Floats a, Floats b) { return maximum(a, b); };

inline float sum(Floats v) { return fold<1>(&v, SUM)[0]; }

inline float maximum(Floats v) { return fold<1>(&v, MAXIMUM)[0]; }

// Spreads N values over N groups of lanes of the same length; gather() is the inverse.
template <int64_t N>
inline Floats spread(const float* values) {
    float padded[LANES] = {};
    std::copy_n(values, N, padded);
    return __builtin_shuffle(load(padded), lanes([](int32_t l) { return l / (LANES / N); }));
}

template <int64_t N>
inline void gather(float* values, Floats groups) {
    store(values, __builtin_shuffle(groups, lanes([](int32_t l) { return l % N * (LANES / N); })), N);
}

// Writes the sum of each of N vectors. The lanes are added in the same order as by sum().
template <int64_t N>
inline void sum_each(float* to, const Floats* vectors) {
    if constexpr (N % LANES == 0) {
        for (int64_t i = 0; i < N; i += LANES) store(to + i, fold<LANES>(vectors + i, SUM));
    } else {
        gather<N>(to, fold<N>(vectors, SUM));
    }
}

// e^x for x < 88.3; 0 for x < -87.3; NaN stays NaN.
inline Floats exp_below_88(Floats x) {
    const Floats low = splat(-87.33f);
    const Floats clamped = low > x ? low : x;
    // 1.5 * 2^23 + 127: adding it rounds to an integer, and puts that integer plus a float's bias
    // into the lowest bits.
    const Floats shifter = splat(12583039.0f), shifted = clamped * 1.44269504f + shifter;
    const Floats exponent = shifted - shifter, power = bits_as<Floats>(bits_as<Ints>(shifted) << 23);
    const Floats r = (clamped - exponent * 0.693359375f) - exponent * -2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < low ? Floats{} : p * power;
}

// e^x; 0 for x < -87.3, infinity for x > 88.3; NaN stays NaN.
inline Floats exp(Floats x) {
    const Floats high = splat(88.37f);
    const Floats result = exp_below_88(high < x ? high : x);
    return x > high ? splat(INFINITY) : result;
}

}  // namespace baton
