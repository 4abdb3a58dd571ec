"""The sizes of a checkpoint's model, and presets of these sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton_engine.random_checkpoint.tokenizer_files import MIN_VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class CheckpointShape:
    """Sizes of a model. The default sizes give a few megabytes of weights."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    vocab_size: int = 1024
    max_position_embeddings: int = 4096

    def validate(self) -> None:
        """Check the bounds of all fields.

        Raises:
            ValueError: a field is out of bounds. The message names the field and the bound.
        """
        for name in (field.name for field in fields(self)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size must be at least {MIN_VOCAB_SIZE} (bytes and special tokens), "
                f"got {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"num_experts={self.num_experts}"
            )


#: Presets by name: a few megabytes for tests, about 150 million parameters for benchmarks.
SIZES = {
    "tiny": CheckpointShape(),
    "150m": CheckpointShape(
        hidden_size=768,
        intermediate_size=3072,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        moe_intermediate_size=512,
        vocab_size=32000,
    ),
}
