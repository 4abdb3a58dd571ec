"""The command `baton checkpoint create`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton_engine.random_checkpoint.checkpoint_folder import (
    ARCHITECTURES,
    DTYPES,
    ENCODERS,
    POOLINGS,
    ROPE_SCALINGS,
    create_checkpoint,
)
from baton_engine.random_checkpoint.shape import SIZES

#: Field of CheckpointShape by flag.
SIZE_FLAGS = {
    "--hidden-size": "hidden_size",
    "--intermediate-size": "intermediate_size",
    "--layers": "num_layers",
    "--heads": "num_heads",
    "--kv-heads": "num_kv_heads",
    "--head-dim": "head_dim",
    "--experts": "num_experts",
    "--experts-per-token": "num_experts_per_tok",
    "--moe-intermediate-size": "moe_intermediate_size",
    "--vocab-size": "vocab_size",
    "--max-position-embeddings": "max_position_embeddings",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `baton checkpoint create`."""
    parser.add_argument("--arch", required=True, choices=[*ARCHITECTURES, *ENCODERS])
    parser.add_argument(
        "--out", required=True, type=Path, help="folder to write; must not exist or be empty"
    )
    parser.add_argument(
        "--size",
        default="tiny",
        choices=list(SIZES),
        help="preset of the sizes below; default tiny",
    )
    for flag, field in SIZE_FLAGS.items():
        defaults = ", ".join(f"{name} {getattr(shape, field)}" for name, shape in SIZES.items())
        parser.add_argument(flag, dest=field, type=int, metavar="N", help=f"default {defaults}")
    parser.add_argument(
        "--rope-scaling", choices=ROPE_SCALINGS, help="stretch the rotary embedding"
    )
    parser.add_argument(
        "--rope-factor", type=float, default=4.0, metavar="X", help="by how much; default 4"
    )
    parser.add_argument(
        "--sliding-window", type=int, metavar="N", help="tokens that a token sees; not for llama"
    )
    parser.add_argument(
        "--tie-word-embeddings", action="store_true", help="the output projection is the embedding"
    )
    parser.add_argument(
        "--pooling", choices=list(POOLINGS), help="an embedding model with this pooling"
    )
    parser.add_argument(
        "--classifier", action="store_true", help="a reranker, which scores pairs of texts"
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--max-shard-size",
        type=int,
        metavar="BYTES",
        help="split the weights into files of this size",
    )


def run(args: argparse.Namespace) -> int:
    """Create the checkpoint that the parsed arguments describe. Return the exit code."""
    sizes = {
        field: getattr(args, field)
        for field in SIZE_FLAGS.values()
        if getattr(args, field) is not None
    }
    try:
        path = create_checkpoint(
            args.out,
            args.arch,
            size=args.size,
            rope_scaling=args.rope_scaling,
            rope_factor=args.rope_factor,
            sliding_window=args.sliding_window,
            tie_word_embeddings=args.tie_word_embeddings,
            dtype=args.dtype,
            seed=args.seed,
            pooling=args.pooling,
            classifier=args.classifier,
            max_shard_size=args.max_shard_size,
            **sizes,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.arch} checkpoint written to {path}")
    return 0
