// The operators torch.ops.baton_cpu.*. Fake (shape-only) implementations for torch.compile are in
// ../__init__.py. The end of this file exports the functions that are called without torch.

#include <torch/library.h>

#include "block_checksum.h"
#include "decoder_layers.h"
#include "tensor_memory.h"
#include "tensor_ops.h"

TORCH_LIBRARY(baton_cpu, library) {
    library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
    library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
    library.def(
        "rotate_qk(Tensor qkv, int num_heads, int num_kv_heads, Tensor cos, Tensor sin, Tensor? q_weight, "
        "Tensor? k_weight, float eps) -> (Tensor, Tensor)"
    );
    library.def("silu_and_mul(Tensor gate_up) -> Tensor");
    library.def(
        "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()"
    );
    library.def(
        "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
        "Tensor cu_seqlens_q, Tensor seq_lens, float scale, int? window, float? soft_cap) -> ()"
    );
    library.def("pack_weight(Tensor weight) -> Tensor");
    library.def("linear(Tensor x, Tensor panels, int out_features, Tensor? bias) -> Tensor");
    library.def("pack_quantized(Tensor values, int bits) -> Tensor");
    library.def(
        "quantized_linear(Tensor x, Tensor panels, Tensor scales, int out_features, Tensor? bias) -> Tensor"
    );
    library.def("route(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)");
    library.def(
        "run_experts(Tensor x, Tensor[] gate_up, Tensor[] gate_up_scales, Tensor[] down, Tensor[] down_scales, "
        "int intermediate_size, Tensor weights, Tensor ids) -> Tensor"
    );
    library.class_<baton::DecoderLayers>("DecoderLayers")
        .def(torch::init<
             int64_t, double, double, at::Tensor, double, std::optional<at::Tensor>, std::optional<at::Tensor>>())
        .def("add", &baton::DecoderLayers::add)
        .def("run", &baton::DecoderLayers::run);
    library.def(
        "draw_tokens(Tensor logits, float[] temperature, int[] top_k, float[] top_p, float[] min_p, int[] keys) -> Tensor"
    );
}

TORCH_LIBRARY_IMPL(baton_cpu, CPU, library) {
    library.impl("rms_norm", baton::rms_norm_op);
    library.impl("add_rms_norm", baton::add_rms_norm_op);
    library.impl("rotate_qk", baton::rotate_qk_op);
    library.impl("silu_and_mul", baton::silu_and_mul_op);
    library.impl("write_kv", baton::write_kv_op);
    library.impl("paged_attention", baton::paged_attention_op);
    library.impl("pack_weight", baton::pack_weight_op);
    library.impl("linear", baton::linear_op);
    library.impl("pack_quantized", baton::pack_quantized_op);
    library.impl("quantized_linear", baton::quantized_linear_op);
    library.impl("route", baton::route_op);
    library.impl("run_experts", baton::run_experts_op);
    library.impl("draw_tokens", baton::draw_tokens_op);
}

// The caller, ../../block_checksum/__init__.py, checks the arguments. They are not tensors, because
// torch's dispatcher takes longer than the sum of one block.
extern "C" void baton_sum_runs(
    uint64_t* sums, const int64_t* addresses, int64_t num_runs, int64_t nbytes, int64_t num_threads
) {
    baton::sum_runs(sums, addresses, num_runs, nbytes / 8, num_threads);
}

// Sets the maximum number of bytes of freed results that are kept for later results. Initially 0.
extern "C" void baton_keep_freed_results(int64_t max_nbytes) {
    baton::FreedResults::instance().set_max_kept(max_nbytes);
}

// Returns the kept memory of freed results to the system.
extern "C" void baton_return_freed_results() { baton::FreedResults::instance().unmap_all(); }
