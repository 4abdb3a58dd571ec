"""Checkpoints with random weights in Hugging Face's format, for demos and tests.

Baton and transformers can load them. Entry points: `create_checkpoint`, and `add_arguments` and
`run` for `baton checkpoint create`. torch and tokenizers are imported when a checkpoint is created,
so that a command line need not load them.

shape            sizes, and named presets of them
create           `create_checkpoint`; config.json and generation_config.json
weights          random weights that make decisive models, and their files
tokenizer        a byte-level BPE trained on a made-up corpus
create_command   arguments of the command line
"""

from baton_engine.checkpoint.create import ARCHITECTURES, create_checkpoint
from baton_engine.checkpoint.create_command import add_arguments, run
from baton_engine.checkpoint.shape import SIZES, CheckpointShape

__all__ = ["ARCHITECTURES", "SIZES", "CheckpointShape", "add_arguments", "create_checkpoint", "run"]
