"""Creates checkpoints with random weights in Hugging Face's format, for demos and tests.

Both Baton and transformers can load these checkpoints. `create_checkpoint` is the entry point, and
`add_arguments` and `run` make the command `baton checkpoint create`. torch and tokenizers are
imported only when a checkpoint is created, so that the command line starts fast.

shape              sizes of a model, and named presets
checkpoint_folder  `create_checkpoint`, which writes the configuration and calls the other modules
weights            random weights, and the safetensors files
tokenizer_files    a byte-level BPE tokenizer, trained on built-in sentences
create_command     the flags of the command, and the function that runs it
"""

from baton_engine.random_checkpoint.checkpoint_folder import ARCHITECTURES, create_checkpoint
from baton_engine.random_checkpoint.create_command import add_arguments, run
from baton_engine.random_checkpoint.shape import SIZES, CheckpointShape

__all__ = ["ARCHITECTURES", "SIZES", "CheckpointShape", "add_arguments", "create_checkpoint", "run"]
