// The operations on tensors: they check shapes and dtypes, allocate the results, and pass pointers
// to the functions of the other headers.

#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "quantized_linear.h"
#include "sampling.h"
#include "tensor_memory.h"

// Calls a lambda with scalar_t as `type`, which is one of DTYPES in ../__init__.py.
#define DISPATCH(type, name, ...)                    \
    AT_DISPATCH_SWITCH(                              \
        type, name,                                  \
        AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)    \
        AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) \
        AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__)     \
    )

// DISPATCH for the dtypes of packed weights.
#define DISPATCH_PACKED(type, name, ...)                                                         \
    AT_DISPATCH_SWITCH(                                                                          \
        type, name,                                                                              \
        AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)   \
    )

namespace baton {
namespace {

void check_like(const Tensor& tensor, const Tensor& x, const char* name) {
    TORCH_CHECK(
        tensor.scalar_type() == x.scalar_type() && tensor.is_contiguous(), name, " must be contiguous and of dtype ",
        x.scalar_type(), ", not ", tensor.scalar_type()
    );
}

Tensor rms_norm_op(const Tensor& x_, const Tensor& weight, double eps) {
    const Tensor x = x_.contiguous();
    const int64_t dim = weight.numel();
    check_like(weight, x, "weight");
    TORCH_CHECK(dim > 0 && x.dim() > 0 && x.size(-1) == dim, "the last dimension of x and the weight differ");
    Tensor out = empty_result(x.sizes(), x.options());
    DISPATCH(x.scalar_type(), "rms_norm", [&] {
        rms_norm<scalar_t>(
            out.mutable_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(),
            x.numel() / dim, dim, static_cast<float>(eps)
        );
    });
    return out;
}

std::tuple<Tensor, Tensor> add_rms_norm_op(
    const Tensor& x_, const Tensor& residual_, const Tensor& weight, double eps
) {
    const Tensor x = x_.contiguous(), residual = residual_.contiguous();
    const int64_t dim = weight.numel();
    check_like(weight, x, "weight");
    check_like(residual, x, "residual");
    TORCH_CHECK(dim > 0 && x.dim() > 0 && x.size(-1) == dim, "the last dimension of x and the weight differ");
    TORCH_CHECK(x.sizes() == residual.sizes(), "x and residual differ in shape");
    Tensor out = empty_result(x.sizes(), x.options()), total = empty_result(x.sizes(), x.options());
    DISPATCH(x.scalar_type(), "add_rms_norm", [&] {
        add_rms_norm<scalar_t>(
            out.mutable_data_ptr<scalar_t>(), total.mutable_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
            residual.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(), x.numel() / dim, dim,
            static_cast<float>(eps)
        );
    });
    return {out, total};
}

std::tuple<Tensor, Tensor> rotate_qk_op(
    const Tensor& qkv_, int64_t num_heads, int64_t num_kv_heads, const Tensor& cos_, const Tensor& sin_,
    const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps
) {
    TORCH_CHECK(qkv_.dim() == 2 && num_heads > 0 && num_kv_heads > 0, "qkv must have the shape [num_tokens, heads]");
    const Tensor qkv = qkv_.stride(1) == 1 ? qkv_ : qkv_.contiguous();
    const Tensor cos = cos_.contiguous(), sin = sin_.contiguous();
    const int64_t num_tokens = qkv.size(0), all_heads = num_heads + 2 * num_kv_heads;
    const int64_t head_dim = qkv.size(1) / all_heads;
    TORCH_CHECK(head_dim * all_heads == qkv.size(1) && head_dim % 2 == 0, "qkv does not divide into heads");
    for (const Tensor& angles : {cos, sin}) {
        TORCH_CHECK(
            angles.scalar_type() == at::kFloat && angles.numel() == num_tokens * head_dim / 2,
            "cos and sin must be float32 of shape [num_tokens, head_dim / 2]"
        );
    }
    const bool normed = q_weight.has_value() && k_weight.has_value();
    if (normed) {
        for (const Tensor& weight : {*q_weight, *k_weight}) {
            check_like(weight, qkv, "a norm's weight");
            TORCH_CHECK(weight.numel() == head_dim, "the norms' weights must have the shape [head_dim]");
        }
    }
    Tensor q = empty_result({num_tokens, num_heads, head_dim}, qkv.options());
    Tensor k = empty_result({num_tokens, num_kv_heads, head_dim}, qkv.options());
    DISPATCH(qkv.scalar_type(), "rotate_qk", [&] {
        rotate_qk<scalar_t>(
            q.mutable_data_ptr<scalar_t>(), k.mutable_data_ptr<scalar_t>(), qkv.const_data_ptr<scalar_t>(),
            normed ? q_weight->const_data_ptr<scalar_t>() : nullptr,
            normed ? k_weight->const_data_ptr<scalar_t>() : nullptr, cos.const_data_ptr<float>(),
            sin.const_data_ptr<float>(), num_tokens, qkv.stride(0), num_heads, num_kv_heads, head_dim,
            static_cast<float>(eps)
        );
    });
    return {q, k};
}

Tensor silu_and_mul_op(const Tensor& gate_up_) {
    const Tensor gate_up = gate_up_.contiguous();
    TORCH_CHECK(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0, "gate and up must be equally long");
    auto shape = gate_up.sizes().vec();
    const int64_t dim = shape.back() /= 2;
    Tensor out = empty_result(shape, gate_up.options());
    DISPATCH(gate_up.scalar_type(), "silu_and_mul", [&] {
        silu_and_mul<scalar_t>(
            out.mutable_data_ptr<scalar_t>(), gate_up.const_data_ptr<scalar_t>(), dim == 0 ? 0 : out.numel() / dim,
            2 * dim, dim
        );
    });
    return out;
}

template <typename T>
Heads<const T> rows_of(const Tensor& tensor) {
    return {tensor.const_data_ptr<T>(), tensor.stride(0), tensor.stride(1), 0};
}

template <typename T>
Heads<T> slots_of(const Tensor& cache) {
    return {cache.mutable_data_ptr<T>(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

void write_kv_op(
    const Tensor& key_, const Tensor& value_, Tensor& key_cache, Tensor& value_cache, const Tensor& slot_mapping_
) {
    const Tensor key = key_.stride(-1) == 1 ? key_ : key_.contiguous();
    const Tensor value = value_.stride(-1) == 1 ? value_ : value_.contiguous();
    const Tensor slot_mapping = slot_mapping_.contiguous();
    TORCH_CHECK(
        key.dim() == 3 && key_cache.dim() == 4 && key.sizes() == value.sizes() &&
            key_cache.sizes() == value_cache.sizes() && key.size(1) == key_cache.size(1) &&
            key.size(2) == key_cache.size(3) && slot_mapping.numel() == key.size(0),
        "keys and values [num_tokens, num_kv_heads, head_dim], caches [num_blocks, num_kv_heads, block_size, head_dim] "
        "and slot_mapping [num_tokens] do not fit together"
    );
    TORCH_CHECK(
        key_cache.stride(3) == 1 && value_cache.stride(3) == 1 && slot_mapping.scalar_type() == at::kLong &&
            key.scalar_type() == value.scalar_type() && key_cache.scalar_type() == value_cache.scalar_type(),
        "the caches' last stride must be 1, slot_mapping int64, and keys and values of equal dtypes"
    );
    const int64_t num_tokens = key.size(0), num_kv_heads = key.size(1), head_dim = key.size(2);
    const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(2);
    const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
    DISPATCH(key.scalar_type(), "write_kv", [&] {
        using From = scalar_t;
        const auto keys = rows_of<From>(key), values = rows_of<From>(value);
        DISPATCH(key_cache.scalar_type(), "write_kv", [&] {
            const auto to_keys = slots_of<scalar_t>(key_cache), to_values = slots_of<scalar_t>(value_cache);
            for_each_row(num_tokens, 2 * num_kv_heads * head_dim, [&](int64_t token) {
                if (slots[token] < 0) return;
                TORCH_CHECK_INDEX(
                    slots[token] < num_blocks * block_size, "slot ", slots[token], " lies past the cache's end"
                );
                const int64_t block = slots[token] / block_size, slot = slots[token] % block_size;
                write_heads(to_keys, keys, token, block, slot, num_kv_heads, head_dim);
                write_heads(to_values, values, token, block, slot, num_kv_heads, head_dim);
            });
        });
    });
}

void paged_attention_op(
    Tensor& out, const Tensor& query_, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables_,
    const Tensor& cu_seqlens_q_, const Tensor& seq_lens_, double scale, std::optional<int64_t> window,
    std::optional<double> soft_cap
) {
    const Tensor query = query_.stride(-1) == 1 ? query_ : query_.contiguous();
    const Tensor cu_seqlens_q = cu_seqlens_q_.contiguous(), seq_lens = seq_lens_.contiguous();
    const Tensor block_tables = block_tables_.stride(-1) == 1 ? block_tables_ : block_tables_.contiguous();
    TORCH_CHECK(
        query.dim() == 3 && key_cache.dim() == 4 && query.size(2) == key_cache.size(3) &&
            key_cache.sizes() == value_cache.sizes() && key_cache.size(1) > 0 &&
            query.size(1) % key_cache.size(1) == 0 && block_tables.dim() == 2 &&
            cu_seqlens_q.numel() == seq_lens.numel() + 1 && block_tables.size(0) >= seq_lens.numel(),
        "query [num_tokens, num_heads, head_dim], caches [num_blocks, num_kv_heads, block_size, head_dim], block_tables "
        "[num_seqs, blocks], cu_seqlens_q [num_seqs + 1] and seq_lens [num_seqs] do not fit together"
    );
    const int64_t head_dim = query.size(2);
    TORCH_CHECK_VALUE(
        key_cache.stride(3) == 1 && key_cache.stride(2) == head_dim,
        "on a CPU the cache needs strides ", head_dim, " and 1 within a block; it has ", key_cache.strides()
    );
    TORCH_CHECK_VALUE(
        key_cache.strides() == value_cache.strides(), "key and value cache need equal strides, not ",
        key_cache.strides(), " and ", value_cache.strides()
    );
    TORCH_CHECK(
        key_cache.scalar_type() == query.scalar_type() && value_cache.scalar_type() == query.scalar_type() &&
            block_tables.scalar_type() == at::kInt && cu_seqlens_q.scalar_type() == at::kInt &&
            seq_lens.scalar_type() == at::kInt,
        "block_tables, cu_seqlens_q and seq_lens must be int32, and query and caches of one dtype"
    );
    TORCH_CHECK(
        out.sizes() == query.sizes() && out.scalar_type() == query.scalar_type() && out.stride(2) == 1,
        "out must be of query's shape and dtype, its last stride 1"
    );
    TORCH_CHECK_VALUE(!window || *window >= 1, "window must be at least 1, not ", window.value_or(0));

    Problem problem;
    problem.num_tokens = query.size(0);
    problem.num_seqs = seq_lens.numel();
    problem.num_heads = query.size(1);
    problem.num_kv_heads = key_cache.size(1);
    problem.num_blocks = key_cache.size(0);
    problem.block_size = key_cache.size(2);
    problem.head_dim = head_dim;
    problem.query_stride_token = query.stride(0);
    problem.query_stride_head = query.stride(1);
    problem.out_stride_token = out.stride(0);
    problem.out_stride_head = out.stride(1);
    problem.cache_stride_block = key_cache.stride(0);
    problem.cache_stride_head = key_cache.stride(1);
    problem.table_stride = block_tables.stride(0);
    problem.table_length = block_tables.size(1);
    problem.block_tables = block_tables.const_data_ptr<int32_t>();
    problem.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int32_t>();
    problem.seq_lens = seq_lens.const_data_ptr<int32_t>();
    problem.scale = static_cast<float>(scale);
    problem.window = window.value_or(0);
    problem.soft_cap = static_cast<float>(soft_cap.value_or(0.0));
    DISPATCH(query.scalar_type(), "paged_attention", [&] {
        paged_attention<scalar_t>(
            problem, out.mutable_data_ptr<scalar_t>(), query.const_data_ptr<scalar_t>(),
            key_cache.const_data_ptr<scalar_t>(), value_cache.const_data_ptr<scalar_t>()
        );
    });
}

// Checks the bias of a linear layer and allocates its outputs.
Tensor empty_outputs(const Tensor& x, int64_t out_features, const std::optional<Tensor>& bias) {
    if (bias.has_value()) {
        check_like(*bias, x, "bias");
        TORCH_CHECK(bias->numel() == out_features, "bias must have the shape [out_features]");
    }
    auto shape = x.sizes().vec();
    shape.back() = out_features;
    return empty_result(shape, x.options());
}

Tensor pack_weight_op(const Tensor& weight_) {
    TORCH_CHECK(weight_.dim() == 2, "a weight must have the shape [out_features, in_features]");
    const Tensor weight = weight_.stride(1) == 1 ? weight_ : weight_.contiguous();
    const int64_t out_features = weight.size(0), in_features = weight.size(1);
    const int64_t step = 4 / weight.element_size();
    Tensor panels = empty_weight(
        {(out_features + PANEL - 1) / PANEL, (in_features + step - 1) / step, PANEL, step}, weight.options()
    );
    DISPATCH_PACKED(weight.scalar_type(), "pack_weight", [&] {
        const Matrix<const scalar_t> rows{weight.const_data_ptr<scalar_t>(), weight.stride(0)};
        pack<scalar_t>(panels.mutable_data_ptr<scalar_t>(), rows, in_features, out_features);
    });
    return panels;
}

// Number of packed steps of a quantized weight.
template <typename Format>
int64_t quantized_steps(int64_t in_features) {
    return (in_features + GROUP - 1) / GROUP * GROUP_BYTES<Format> / INT8_STEP;
}

template <typename Format>
Tensor pack_quantized_as(const Tensor& values) {
    const int64_t out_features = values.size(0), in_features = values.size(1);
    const auto dtype = Format::OFFSET > 0 ? at::kByte : at::kChar;
    Tensor panels = empty_weight(
        {(out_features + PANEL - 1) / PANEL, quantized_steps<Format>(in_features), PANEL, INT8_STEP},
        values.options().dtype(dtype)
    );
    pack_quantized<Format>(
        static_cast<uint8_t*>(panels.mutable_data_ptr()), {values.const_data_ptr<int8_t>(), in_features}, in_features,
        out_features
    );
    return panels;
}

Tensor pack_quantized_op(const Tensor& values_, int64_t bits) {
    const Tensor values = values_.contiguous();
    TORCH_CHECK(
        values.dim() == 2 && values.scalar_type() == at::kChar,
        "values must be int8 of shape [out_features, in_features]"
    );
    TORCH_CHECK(bits == 8 || bits == 4, "values have 8 or 4 bits, not ", bits);
    return bits == 8 ? pack_quantized_as<Int8>(values) : pack_quantized_as<Int4>(values);
}

template <typename Format>
QuantizedMatrix<Format> quantized_matrix(
    const Tensor& panels, const Tensor& scales, int64_t in_features, int64_t out_features
) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    TORCH_CHECK(
        panels.dim() == 4 && panels.size(0) == num_panels && panels.size(1) == quantized_steps<Format>(in_features) &&
            panels.size(2) == PANEL && panels.size(3) == INT8_STEP && panels.is_contiguous(),
        "packed values of shape ", panels.sizes(), " do not have ", out_features, " outputs of ", in_features,
        " inputs"
    );
    const int64_t groups = (in_features + GROUP - 1) / GROUP;
    TORCH_CHECK(
        scales.numel() == (Format::HAS_GROUP_SCALES ? num_panels * groups * PANEL : out_features) &&
            scales.scalar_type() == c10::CppTypeToScalarType<typename Format::Scale>::value && scales.is_contiguous(),
        "scales of shape ", scales.sizes(), " and dtype ", scales.scalar_type(), " do not fit the values"
    );
    return {
        static_cast<const uint8_t*>(panels.const_data_ptr()), scales.const_data_ptr<typename Format::Scale>(),
        in_features, out_features
    };
}

template <typename T>
PackedMatrix<T> packed_matrix(const Tensor& panels, int64_t in_features, int64_t out_features) {
    TORCH_CHECK(
        panels.scalar_type() == c10::CppTypeToScalarType<T>::value && panels.is_contiguous(),
        "the packed weight must be contiguous and of dtype ", c10::CppTypeToScalarType<T>::value, ", not ",
        panels.scalar_type()
    );
    TORCH_CHECK(
        panels.dim() == 4 && panels.size(0) == (out_features + PANEL - 1) / PANEL &&
            panels.size(1) * STEP_INPUTS<T> == PackedMatrix<T>::padded(in_features) && panels.size(2) == PANEL &&
            panels.size(3) == STEP_INPUTS<T>,
        "a packed weight of shape ", panels.sizes(), " does not have ", out_features, " outputs of ", in_features,
        " inputs"
    );
    return {panels.const_data_ptr<T>(), in_features, out_features};
}

template <typename T, typename Weight>
Tensor linear_as(const Tensor& x, const Weight& weight, const std::optional<Tensor>& bias) {
    Tensor y = empty_outputs(x, weight.out_features, bias);
    linear<T>(
        {y.mutable_data_ptr<T>(), weight.out_features}, {x.const_data_ptr<T>(), weight.in_features},
        weight.out_features == 0 ? 0 : y.numel() / weight.out_features, weight,
        bias.has_value() ? bias->const_data_ptr<T>() : nullptr
    );
    return y;
}

Tensor linear_op(const Tensor& x_, const Tensor& panels, int64_t out_features, const std::optional<Tensor>& bias) {
    const Tensor x = x_.contiguous();
    TORCH_CHECK(x.dim() > 0, "x must have the shape [..., in_features]");
    Tensor y;
    DISPATCH_PACKED(x.scalar_type(), "linear", [&] {
        y = linear_as<scalar_t>(x, packed_matrix<scalar_t>(panels, x.size(-1), out_features), bias);
    });
    return y;
}

// The shape of the scales determines the format: [out_features] is int8, [panels, groups, PANEL] is
// int4.
Tensor quantized_linear_op(
    const Tensor& x_, const Tensor& panels, const Tensor& scales, int64_t out_features,
    const std::optional<Tensor>& bias
) {
    const Tensor x = x_.contiguous();
    TORCH_CHECK(x.dim() > 0, "x must have the shape [..., in_features]");
    Tensor y;
    DISPATCH(x.scalar_type(), "quantized_linear", [&] {
        y = scales.dim() == 1
            ? linear_as<scalar_t>(x, quantized_matrix<Int8>(panels, scales, x.size(-1), out_features), bias)
            : linear_as<scalar_t>(x, quantized_matrix<Int4>(panels, scales, x.size(-1), out_features), bias);
    });
    return y;
}

std::tuple<Tensor, Tensor> route_op(const Tensor& logits_, int64_t top_k, bool renormalize) {
    const Tensor logits = logits_.contiguous();
    TORCH_CHECK(
        logits.dim() == 2 && top_k >= 1 && top_k <= logits.size(1), "logits must have the shape [num_tokens, ",
        "num_experts], with at least ", top_k, " experts"
    );
    const int64_t num_tokens = logits.size(0);
    Tensor weights = at::empty({num_tokens, top_k}, logits.options());
    Tensor ids = at::empty({num_tokens, top_k}, logits.options().dtype(at::kLong));
    DISPATCH(logits.scalar_type(), "route", [&] {
        route<scalar_t>(
            weights.mutable_data_ptr<scalar_t>(), ids.mutable_data_ptr<int64_t>(), logits.const_data_ptr<scalar_t>(),
            num_tokens, logits.size(1), top_k, renormalize
        );
    });
    return {weights, ids};
}

// Runs the experts with weights in one format; `weight(experts, index, in_features, out_features)`
// is the weight of an expert.
template <typename T, typename Weight>
Tensor run_experts_as(
    const Tensor& x, int64_t num_experts, int64_t intermediate_size, const Tensor& weights, const Tensor& ids,
    Weight weight
) {
    const int64_t hidden_size = x.size(1);
    std::vector<decltype(weight(true, 0, 0, 0))> gate_up, down;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        gate_up.push_back(weight(true, expert, hidden_size, 2 * intermediate_size));
        down.push_back(weight(false, expert, intermediate_size, hidden_size));
    }
    Tensor out = empty_result(x.sizes(), x.options());
    run_experts<T>(
        out.mutable_data_ptr<T>(), {x.const_data_ptr<T>(), hidden_size}, x.size(0), weights.const_data_ptr<T>(),
        ids.const_data_ptr<int64_t>(), ids.size(1), gate_up, down
    );
    return out;
}

// Runs the experts of a layer. The lists of scales are empty if the weights are not quantized.
Tensor run_experts_op(
    const Tensor& x_, at::TensorList gate_up, at::TensorList gate_up_scales, at::TensorList down,
    at::TensorList down_scales, int64_t intermediate_size, const Tensor& weights_, const Tensor& ids_
) {
    const Tensor x = x_.contiguous(), weights = weights_.contiguous(), ids = ids_.contiguous();
    const int64_t num_experts = static_cast<int64_t>(gate_up.size());
    check_like(weights, x, "the routing weights");
    TORCH_CHECK(
        x.dim() == 2 && ids.dim() == 2 && ids.size(0) == x.size(0) && weights.sizes() == ids.sizes() &&
            ids.scalar_type() == at::kLong,
        "x [num_tokens, hidden_size], weights and int64 ids [num_tokens, top_k] do not fit together"
    );
    const bool is_packed = gate_up_scales.empty();
    TORCH_CHECK(
        down.size() == gate_up.size() && gate_up_scales.size() == (is_packed ? 0 : gate_up.size()) &&
            down_scales.size() == gate_up_scales.size(),
        "every expert needs a gate-up and a down weight"
    );
    if (num_experts == 0 || x.size(0) == 0) return at::zeros_like(x);
    Tensor out;
    const auto quantized = [&](auto format) {
        using Format = decltype(format);
        return [&](bool is_gate_up, int64_t expert, int64_t in_features, int64_t out_features) {
            const Tensor& panels = is_gate_up ? gate_up[expert] : down[expert];
            const Tensor& scales = is_gate_up ? gate_up_scales[expert] : down_scales[expert];
            return quantized_matrix<Format>(panels, scales, in_features, out_features);
        };
    };
    if (is_packed) {
        DISPATCH_PACKED(x.scalar_type(), "run_experts", [&] {
            out = run_experts_as<scalar_t>(
                x, num_experts, intermediate_size, weights, ids,
                [&](bool is_gate_up, int64_t expert, int64_t in_features, int64_t out_features) {
                    const Tensor& panels = is_gate_up ? gate_up[expert] : down[expert];
                    return packed_matrix<scalar_t>(panels, in_features, out_features);
                }
            );
        });
    } else {
        DISPATCH(x.scalar_type(), "run_experts", [&] {
            out = gate_up_scales[0].dim() == 1
                ? run_experts_as<scalar_t>(x, num_experts, intermediate_size, weights, ids, quantized(Int8{}))
                : run_experts_as<scalar_t>(x, num_experts, intermediate_size, weights, ids, quantized(Int4{}));
        });
    }
    return out;
}

Tensor draw_tokens_op(
    const Tensor& logits_, at::ArrayRef<double> temperature, at::IntArrayRef top_k, at::ArrayRef<double> top_p,
    at::ArrayRef<double> min_p, at::IntArrayRef keys
) {
    TORCH_CHECK(
        logits_.dim() == 2 && logits_.size(1) > 0 && logits_.scalar_type() == at::kFloat,
        "logits must be float32 of shape [rows, vocab_size]"
    );
    const Tensor logits = logits_.contiguous();
    const int64_t rows = logits.size(0), vocab_size = logits.size(1);
    for (const size_t size : {temperature.size(), top_k.size(), top_p.size(), min_p.size(), keys.size()}) {
        TORCH_CHECK(static_cast<int64_t>(size) == rows, "every parameter needs a value per row: ", rows, ", not ", size);
    }
    Tensor tokens = at::empty({rows}, logits.options().dtype(at::kLong));
    int64_t* const drawn = tokens.mutable_data_ptr<int64_t>();
    const float* const from = logits.const_data_ptr<float>();
    for_each_row(rows, vocab_size, [&](int64_t row) {
        const RowParams params{temperature[row], top_p[row], min_p[row], top_k[row], static_cast<uint64_t>(keys[row])};
        drawn[row] = draw_token(from + row * vocab_size, vocab_size, params);
    });
    return tokens;
}

}  // namespace
}  // namespace baton
