"""Write a Llama or Qwen3-MoE checkpoint as a GGUF file.

    python write_gguf.py CHECKPOINT FILE F32|BF16

llama.cpp's own converter supports only the tokenizers of released models. The benchmark's prompts
are token IDs, so the file contains placeholders as tokens.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

#: Tensor of a layer in the checkpoint -> name in GGUF.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a q or k weight for llama.cpp.

    llama.cpp's RoPE pairs adjacent dimensions. The checkpoint pairs i and i + head_dim / 2.

    Args:
        weight: shape [num_heads * head_dim, hidden_size].
        num_heads: number of heads of q or k.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    folder, target, file_type = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(
        config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    )
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    special = ["<unk>", "<s>", "</s>"]
    names = special + [f"t{number}" for number in range(len(special), config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(names) - len(special)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)

    def add(name: str, weight: np.ndarray) -> None:
        if file_type == "F32" or weight.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, weight.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    files = sorted(folder.glob("*.safetensors"))
    tensors = {
        name: file
        for file in files
        for name in safe_open(file, "numpy").keys()  # noqa: SIM118
    }

    def read(name: str) -> np.ndarray:
        return safe_open(tensors[name], "numpy").get_tensor(name)

    add("token_embd.weight", read("model.embed_tokens.weight"))
    add("output_norm.weight", read("model.norm.weight"))
    if "lm_head.weight" in tensors:
        add("output.weight", read("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER.items():
            name = f"model.layers.{layer}.{theirs}.weight"
            if name not in tensors:
                continue
            weight = read(name)
            if architecture == "llama" and ours in ("attn_q", "attn_k"):
                weight = interleave(weight, num_heads if ours == "attn_q" else num_kv_heads)
            add(f"blk.{layer}.{ours}.weight", weight)
        for theirs, ours in EXPERT.items():
            name = f"model.layers.{layer}.mlp.experts.%d.{theirs}.weight"
            if name % 0 in tensors:
                experts = [read(name % expert) for expert in range(config["num_experts"])]
                add(f"blk.{layer}.{ours}.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
