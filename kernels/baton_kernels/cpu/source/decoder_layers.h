// Consecutive decoder layers in one call. See ../../decoder_layers/__init__.py.

#pragma once

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include "tensor_ops.h"

namespace baton {
namespace {

// Calls an operation as the dispatcher would, so that torch's profiler shows it.
#define CALL(name, ...) profiled("baton_cpu::" #name, name##_op, __VA_ARGS__)

template <typename Op, typename... Args>
auto profiled(const char* name, Op op, Args&&... args) {
    RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>());
    return op(std::forward<Args>(args)...);
}

class DecoderLayers : public torch::CustomClassHolder {
  public:
    // Without an embedding, the input is hidden states. Without a final norm, the output is the
    // sum of the last layer's output and the residual.
    DecoderLayers(
        int64_t num_heads, double scale, double eps, Tensor inv_freq, double angle_scale,
        std::optional<Tensor> embedding, std::optional<Tensor> final_norm
    )
        : num_heads_(num_heads), scale_(scale), eps_(eps), angle_scale_(angle_scale), inv_freq_(std::move(inv_freq)),
          embedding_(std::move(embedding)), final_norm_(std::move(final_norm)) {}

    // Appends a layer. `weights` has the order of the enumeration `Weight` below. `experts` and
    // `expert_scales` are empty in a dense layer. In a sparse layer, they have two entries for each
    // expert: gate-up and down. `expert_scales` is also empty if the weights are not quantized. A
    // window of 0 means no limit.
    void add(
        std::vector<std::optional<Tensor>> weights, std::vector<Tensor> experts, std::vector<Tensor> expert_scales,
        int64_t intermediate_size, int64_t window, int64_t top_k, bool renormalize
    ) {
        TORCH_CHECK(weights.size() == NUM_WEIGHTS, "a layer has ", static_cast<int64_t>(NUM_WEIGHTS), " weights");
        Layer layer{std::move(weights), {}, {}, {}, {}, intermediate_size, window, top_k, renormalize};
        for (size_t i = 0; i < experts.size(); ++i) {
            (i % 2 == 0 ? layer.gate_up : layer.down).push_back(experts[i]);
            if (!expert_scales.empty()) {
                (i % 2 == 0 ? layer.gate_up_scales : layer.down_scales).push_back(expert_scales.at(i));
            }
        }
        layers_.push_back(std::move(layer));
    }

    Tensor run(
        const Tensor& input, const Tensor& positions, const Tensor& kv_cache, const Tensor& slot_mapping,
        const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& seq_lens
    ) const {
        TORCH_CHECK(
            kv_cache.dim() == 6 && kv_cache.size(2) == static_cast<int64_t>(layers_.size()) && kv_cache.size(3) == 2,
            "the cache must have the shape [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]"
        );
        const auto [cos, sin] = rotary_angles(positions);
        Tensor x = embedding_.has_value() ? at::embedding(*embedding_, input) : input, residual;
        const int64_t hidden_size = x.size(-1), num_kv_heads = kv_cache.size(1), head_dim = kv_cache.size(5);
        const int64_t kv_width = num_kv_heads * head_dim, q_width = num_heads_ * head_dim;
        for (size_t index = 0; index < layers_.size(); ++index) {
            const Layer& layer = layers_[index];
            if (residual.defined()) {
                std::tie(x, residual) = CALL(add_rms_norm, x, residual, *layer.weights[INPUT_NORM], eps_);
            } else {
                residual = x;
                x = CALL(rms_norm, x, *layer.weights[INPUT_NORM], eps_);
            }
            const Tensor qkv = layer.project(x, QKV, q_width + 2 * kv_width);
            const auto [q, k] = CALL(
                rotate_qk, qkv, num_heads_, num_kv_heads, cos, sin, layer.weights[Q_NORM], layer.weights[K_NORM], eps_
            );
            const Tensor v = qkv.narrow(1, q_width + kv_width, kv_width).unflatten(1, {num_kv_heads, head_dim});
            const Tensor layer_cache = kv_cache.select(2, static_cast<int64_t>(index));
            Tensor keys = layer_cache.select(2, 0), values = layer_cache.select(2, 1);
            CALL(write_kv, k, v, keys, values, slot_mapping);
            Tensor attended = empty_result(q.sizes(), q.options());
            const std::optional<int64_t> window = layer.window > 0 ? std::optional(layer.window) : std::nullopt;
            CALL(
                paged_attention, attended, q, keys, values, block_tables, cu_seqlens_q, seq_lens, scale_, window,
                std::nullopt
            );
            x = layer.project(attended.flatten(1), O, hidden_size);
            std::tie(x, residual) = CALL(add_rms_norm, x, residual, *layer.weights[MLP_NORM], eps_);
            x = layer.gate_up.empty() ? layer.run_mlp(x) : layer.run_sparse_mlp(x);
        }
        return final_norm_.has_value() ? std::get<0>(CALL(add_rms_norm, x, residual, *final_norm_, eps_))
                                       : residual.add(x);
    }

  private:
    // The computation of rotary_angles in ../../rope/__init__.py.
    std::tuple<Tensor, Tensor> rotary_angles(const Tensor& positions) const {
        const Tensor angles = positions.to(at::kFloat).unsqueeze(1).mul(inv_freq_);
        const Tensor cos = angles.cos(), sin = angles.sin();
        if (angle_scale_ == 1.0) return {cos, sin};
        return {cos.mul(angle_scale_), sin.mul(angle_scale_)};
    }

    // Indices into the weights of a layer. A projection has three entries: the packed weight, the
    // scales (quantized weights only) and the bias. Biases and the norms of heads may be missing. A
    // sparse layer has a router instead of gate-up and down.
    enum Weight : int64_t {
        INPUT_NORM = 0, QKV = 1, Q_NORM = 4, K_NORM = 5, O = 6, MLP_NORM = 9, GATE_UP = 10, DOWN = 13, ROUTER = 16,
        NUM_WEIGHTS = 17
    };

    struct Layer {
        std::vector<std::optional<Tensor>> weights;
        std::vector<Tensor> gate_up, gate_up_scales, down, down_scales;  // of the experts
        int64_t intermediate_size, window, top_k;
        bool renormalize;

        Tensor project(const Tensor& x, Weight which, int64_t out_features) const {
            const std::optional<Tensor>&scales = weights[which + 1], &bias = weights[which + 2];
            return scales.has_value() ? CALL(quantized_linear, x, *weights[which], *scales, out_features, bias)
                                      : CALL(linear, x, *weights[which], out_features, bias);
        }

        Tensor run_mlp(const Tensor& x) const {
            const Tensor gate_up_product = project(x, GATE_UP, 2 * intermediate_size);
            return project(CALL(silu_and_mul, gate_up_product), DOWN, x.size(-1));
        }

        Tensor run_sparse_mlp(const Tensor& x) const {
            const Tensor& router = *weights[ROUTER];  // packed, or a plain weight
            const int64_t num_experts = static_cast<int64_t>(gate_up.size());
            const Tensor logits =
                router.dim() == 2 ? at::linear(x, router) : CALL(linear, x, router, num_experts, std::nullopt);
            const auto [routing, ids] = CALL(route, logits, top_k, renormalize);
            return CALL(
                run_experts, x, gate_up, gate_up_scales, down, down_scales, intermediate_size, routing, ids
            );
        }
    };

    int64_t num_heads_;
    double scale_, eps_, angle_scale_;
    Tensor inv_freq_;
    std::optional<Tensor> embedding_, final_norm_;
    std::vector<Layer> layers_;
};

}  // namespace
}  // namespace baton
