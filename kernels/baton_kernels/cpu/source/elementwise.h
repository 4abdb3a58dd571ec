// RMS norm, rotary embedding, activation and KV write, row by row in float32.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>

#include "vector.h"

namespace baton {

constexpr int64_t ELEMENTS_PER_THREAD = 1 << 16;  // minimum work of a thread

// Calls `body(row)` for each row, on several threads if there is enough work.
template <typename Body>
inline void for_each_row(int64_t rows, int64_t elements_per_row, Body body) {
    const int64_t grain = std::max<int64_t>(1, ELEMENTS_PER_THREAD / std::max<int64_t>(1, elements_per_row));
    if (rows <= grain) {  // faster than parallel_for, which reads the number of threads first
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(row);
    });
}

template <typename T>
inline float inverse_rms(const T* x, int64_t dim, float eps) {
    Floats squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        for (int64_t part = 0; part < 4; ++part) {
            const Floats v = load(x + i + part * LANES);
            squares[part] += v * v;
        }
    }
    for_each_vector(dim - i, [&](int64_t offset, auto read, auto) {
        const Floats v = read(x + i + offset);
        squares[0] += v * v;
    });
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(dim);
    return 1.0f / std::sqrt(mean + eps);
}

template <typename T>
inline void normalize(T* out, const T* x, const T* weight, int64_t dim, float eps) {
    const float factor = inverse_rms(x, dim, eps);
    for_each_vector(dim, [&](int64_t i, auto read, auto write) {
        write(out + i, rounded_to<T>(read(x + i) * factor) * read(weight + i));
    });
}

template <typename T>
void rms_norm(T* out, const T* x, const T* weight, int64_t rows, int64_t dim, float eps) {
    for_each_row(rows, dim, [=](int64_t row) { normalize(out + row * dim, x + row * dim, weight, dim, eps); });
}

template <typename T>
void add_rms_norm(
    T* out, T* total, const T* x, const T* residual, const T* weight, int64_t rows, int64_t dim, float eps
) {
    for_each_row(rows, 2 * dim, [=](int64_t row) {
        const int64_t start = row * dim;
        for_each_vector(dim, [&](int64_t i, auto read, auto write) {
            write(total + start + i, read(x + start + i) + read(residual + start + i));
        });
        normalize(out + start, total + start, weight, dim, eps);
    });
}

// Normalizes one head if there is a weight, then rotates it.
template <typename T>
inline void rotate(
    T* out, const T* head, const T* weight, const float* cos, const float* sin, int64_t head_dim, float eps
) {
    const int64_t half = head_dim / 2;
    const float factor = weight == nullptr ? 1.0f : inverse_rms(head, head_dim, eps);
    for_each_vector(half, [&](int64_t i, auto read, auto write) {
        Floats first = read(head + i), second = read(head + half + i);
        if (weight != nullptr) {
            first = rounded_to<T>(rounded_to<T>(first * factor) * read(weight + i));
            second = rounded_to<T>(rounded_to<T>(second * factor) * read(weight + half + i));
        }
        const Floats c = read(cos + i), s = read(sin + i);
        write(out + i, first * c - second * s);
        write(out + half + i, second * c + first * s);
    });
}

template <typename T>
void rotate_qk(
    T* q, T* k, const T* qkv, const T* q_weight, const T* k_weight, const float* cos, const float* sin,
    int64_t num_tokens, int64_t row_stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float eps
) {
    for_each_row(num_tokens, 2 * (num_heads + num_kv_heads) * head_dim, [=](int64_t token) {
        const T* row = qkv + token * row_stride;
        const float *c = cos + token * (head_dim / 2), *s = sin + token * (head_dim / 2);
        for (int64_t head = 0; head < num_heads; ++head) {
            const int64_t at = (token * num_heads + head) * head_dim;
            rotate(q + at, row + head * head_dim, q_weight, c, s, head_dim, eps);
        }
        for (int64_t head = 0; head < num_kv_heads; ++head) {
            const int64_t at = (token * num_kv_heads + head) * head_dim;
            rotate(k + at, row + (num_heads + head) * head_dim, k_weight, c, s, head_dim, eps);
        }
    });
}

template <typename T>
void silu_and_mul(T* out, const T* gate_up, int64_t rows, int64_t row_stride, int64_t dim) {
    for_each_row(rows, 4 * dim, [=](int64_t row) {
        const T *gate = gate_up + row * row_stride, *up = gate + dim;
        for_each_vector(dim, [&](int64_t i, auto read, auto write) {
            const Floats g = read(gate + i);
            write(out + row * dim + i, rounded_to<T>(g / (1.0f + exp(-g))) * read(up + i));
        });
    });
}

// Address and strides of a tensor of heads: [token or block, head, ...], rows of head_dim elements.
template <typename T>
struct Heads {
    T* data;
    int64_t stride_0, stride_1, stride_2;
};

template <typename From, typename To>
void write_heads(
    Heads<To> cache, Heads<const From> rows, int64_t token, int64_t block, int64_t slot, int64_t num_kv_heads,
    int64_t head_dim
) {
    for (int64_t head = 0; head < num_kv_heads; ++head) {
        To* to = cache.data + block * cache.stride_0 + head * cache.stride_1 + slot * cache.stride_2;
        const From* from = rows.data + token * rows.stride_0 + head * rows.stride_1;
        if constexpr (std::is_same_v<From, To>) {
            std::memcpy(static_cast<void*>(to), from, head_dim * sizeof(To));
        } else {
            for_each_vector(head_dim, [&](int64_t i, auto read, auto write) { write(to + i, read(from + i)); });
        }
    }
}

}  // namespace baton
