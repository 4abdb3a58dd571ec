// Mixture of experts: the choice of the experts, and their gated MLPs.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "elementwise.h"
#include "linear.h"

namespace baton {

// Chooses the top_k experts of one token. Among experts with equal logits, lower ids are chosen
// first. A NaN or an infinite logit makes all weights NaN.
template <typename T>
void route_token(
    T* weights, int64_t* ids, const T* logits, int64_t num_experts, int64_t top_k, bool renormalize
) {
    std::vector<float> probs(num_experts);
    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        largest = std::max(largest, static_cast<float>(logits[expert]));
    }
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        total += probs[expert] = std::exp(static_cast<float>(logits[expert]) - largest);
    }
    if (!(total < std::numeric_limits<float>::infinity())) std::fill(probs.begin(), probs.end(), 0.0f);
    std::vector<float> chosen(top_k);
    float chosen_total = 0;
    for (int64_t choice = 0; choice < top_k; ++choice) {
        int64_t best = 0;
        for (int64_t expert = 1; expert < num_experts; ++expert) {
            if (probs[expert] > probs[best]) best = expert;
        }
        chosen_total += chosen[choice] = probs[best] / total;
        probs[best] = -1;  // below every probability
        ids[choice] = best;
    }
    for (int64_t choice = 0; choice < top_k; ++choice) {
        weights[choice] = static_cast<T>(renormalize ? chosen[choice] / chosen_total : chosen[choice]);
    }
}

template <typename T>
void route(
    T* weights, int64_t* ids, const T* logits, int64_t num_tokens, int64_t num_experts, int64_t top_k, bool renormalize
) {
    for_each_row(num_tokens, num_experts * top_k, [=](int64_t token) {
        route_token(
            weights + token * top_k, ids + token * top_k, logits + token * num_experts, num_experts, top_k, renormalize
        );
    });
}

// The pairs of a token and one of its experts, sorted by expert.
struct SortedPairs {
    struct Expert {
        int64_t number, first, count;  // the expert's pairs are [first, first + count)
    };

    std::vector<Expert> experts;    // the experts that have pairs
    std::vector<int64_t> tokens;    // token of each pair
    std::vector<int64_t> position;  // index of each choice's pair; -1 if the expert is absent

    SortedPairs(const int64_t* ids, int64_t num_tokens, int64_t top_k, int64_t num_experts)
        : position(num_tokens * top_k, -1) {
        const auto is_present = [=](int64_t id) { return id >= 0 && id < num_experts; };
        std::vector<int64_t> next(num_experts + 1);
        for (int64_t choice = 0; choice < num_tokens * top_k; ++choice) {
            if (is_present(ids[choice])) ++next[ids[choice] + 1];
        }
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            if (next[expert + 1] > 0) experts.push_back({expert, next[expert], next[expert + 1]});
            next[expert + 1] += next[expert];
        }
        tokens.resize(next[num_experts]);
        for (int64_t choice = 0; choice < num_tokens * top_k; ++choice) {
            if (!is_present(ids[choice])) continue;
            position[choice] = next[ids[choice]]++;
            tokens[position[choice]] = choice / top_k;
        }
    }

    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

// Computes y = x W^T with the weight of each pair's expert.
template <typename T, typename Weight>
void multiply_experts(Matrix<T> y, Matrix<const T> x, const SortedPairs& pairs, const std::vector<Weight>& weights) {
    const Weight& any = weights.front();
    const auto rows = Weight::rows(x, pairs.size(), any.in_features);
    const int64_t num_panels = (any.out_features + PANEL - 1) / PANEL;
    const int64_t grain = std::max<int64_t>(1, WEIGHTS_PER_THREAD / std::max<int64_t>(1, any.panel_size()));
    const int64_t num_tasks = static_cast<int64_t>(pairs.experts.size()) * num_panels;
    at::parallel_for(0, num_tasks, grain, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            const SortedPairs::Expert& expert = pairs.experts[task / num_panels];
            weights[expert.number].multiply(
                y.from(expert.first), rows.from(expert.first), expert.count, task % num_panels,
                static_cast<const T*>(nullptr)
            );
        }
    });
}

// Computes the weighted sum of the experts' outputs for each token. Absent experts have ids outside
// of [0, gate_up.size()) and add nothing.
template <typename T, typename Weight>
void run_experts(
    T* out, Matrix<const T> x, int64_t num_tokens, const T* weights, const int64_t* ids, int64_t top_k,
    const std::vector<Weight>& gate_up, const std::vector<Weight>& down
) {
    const int64_t hidden_size = down.front().out_features, intermediate_size = down.front().in_features;
    const SortedPairs pairs(ids, num_tokens, top_k, static_cast<int64_t>(gate_up.size()));
    // Arrays instead of vectors, because vectors would be initialized.
    const std::unique_ptr<T[]> inputs(new T[pairs.size() * hidden_size]);
    const std::unique_ptr<T[]> products(new T[pairs.size() * 2 * intermediate_size]);
    const std::unique_ptr<T[]> activations(new T[pairs.size() * intermediate_size]);
    for_each_row(pairs.size(), hidden_size, [&](int64_t pair) {
        std::copy_n(x[pairs.tokens[pair]], hidden_size, inputs.get() + pair * hidden_size);
    });
    multiply_experts<T>({products.get(), 2 * intermediate_size}, {inputs.get(), hidden_size}, pairs, gate_up);
    silu_and_mul<T>(activations.get(), products.get(), pairs.size(), 2 * intermediate_size, intermediate_size);
    T* const outputs = inputs.get();  // the inputs are not needed any more
    multiply_experts<T>({outputs, hidden_size}, {activations.get(), intermediate_size}, pairs, down);
    for_each_row(num_tokens, top_k * hidden_size, [&](int64_t token) {
        for_each_vector(hidden_size, [&](int64_t i, auto read, auto write) {
            Floats sum = {};
            for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
                const int64_t pair = pairs.position[choice];
                if (pair >= 0) sum += static_cast<float>(weights[choice]) * read(outputs + pair * hidden_size + i);
            }
            write(out + token * hidden_size + i, sum);
        });
    });
}

}  // namespace baton
