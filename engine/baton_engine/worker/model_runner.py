"""ModelRunner: runs one step of the scheduler on one device, from request ids to sampled tokens.

It owns the model, the KV cache and the input batch. It decides nothing: what runs, and in which blocks, comes with the step.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from baton_engine.core.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.models.config import CheckpointConfig, load_checkpoint_config
from baton_engine.models.errors import ConfigurationError
from baton_engine.models.layers import CausalLM, ForwardBatch
from baton_engine.models.loader import identity_files
from baton_engine.models.registry import load_model
from baton_engine.protocol.config import EngineConfig, compatibility_hash, container_path
from baton_engine.worker.input_batch import InputBatch
from baton_engine.worker.sampler import sample
from baton_kv_transfer.connector import KVCacheLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUT_NAME = "NHL2BD"
WARM_UP_TOKENS = 32


class ModelRunner:
    """Use: load_model(), allocate_kv_cache(n), warm_up(), then execute_model(step) and sample_tokens(grammar) per step.

    What follows from the checkpoint (model_config, dtype, compatibility_hash) is read when first asked for and raises what
    load_model raises.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.path: Path = container_path(config.model.path)
        self.device = _resolve_device(config.device)
        self._input_batch: InputBatch
        self._model: CausalLM | None = None
        self._to_sample: tuple[list[str], torch.Tensor] | None = None
        """Request ids and logits, [len(ids), vocab_size], between execute_model and sample_tokens."""
        self._kv_cache: torch.Tensor | None = None
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)

    @cached_property
    def model_config(self) -> CheckpointConfig:
        return load_checkpoint_config(self.path)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of weights and KV cache."""
        return _resolve_dtype(self.config.model.dtype, self.model_config.dtype, self.device)

    @cached_property
    def compatibility_hash(self) -> str:
        """Equal on engines that may exchange KV blocks: same checkpoint (see identity_files), dtype, block size, layout."""
        files = identity_files(self.path)
        return compatibility_hash(files, _name(self.dtype), self.config.cache.block_size, LAYOUT_NAME)

    @cached_property
    def max_model_len(self) -> int:
        """Tokens of one request, prompt and generated.

        Raises:
            ConfigurationError: if the configured one is more than the model was made for.
        """
        limit = self.model_config.max_position_embeddings
        configured = self.config.model.max_model_len
        if configured is not None and not 0 < configured <= limit:
            raise ConfigurationError(
                "InvalidConfig", f"max_model_len must be in [1, {limit}] for this model, got {configured}"
            )
        return configured or limit

    def load_model(self) -> None:
        """Reads config and weights.

        Raises:
            ModelNotFound: if the folder does not exist.
            ModelInvalid: naming the file and tensor at fault.
        """
        self._model = load_model(self.path, self.model_config, self.dtype, self.device)
        self._input_batch = InputBatch(
            self.config.scheduler.max_num_seqs, self.max_model_len, self.config.cache.block_size
        )

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return KVCacheLayout(
            num_blocks=num_blocks,
            num_kv_heads=self.model_config.num_kv_heads,
            num_layers=self.model_config.num_layers,
            block_size=self.config.cache.block_size,
            head_dim=self.model_config.head_dim,
            dtype=_name(self.dtype),
            name=LAYOUT_NAME,
        )

    def allocate_kv_cache(self, num_blocks: int) -> torch.Tensor:
        """The KV memory, zeroed: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], one allocation."""
        layout = self.kv_cache_layout(num_blocks)
        shape = (num_blocks, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        self._kv_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._kv_cache

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs one prefill and one decode batch that write no KV, so that the first request pays for no compilation."""
        model, kv_cache = self._ready()
        num_tokens = min(WARM_UP_TOKENS, kv_cache.shape[0] * self.config.cache.block_size, self.max_model_len)
        for query_lens in ([num_tokens], [1] * num_tokens):
            seq_lens = [num_tokens] * len(query_lens)
            batch = self._dummy_batch(query_lens, seq_lens, kv_cache)
            model.compute_logits(model(batch)[:1])

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Applies the step's changes, runs its tokens and writes their KV. What it samples from is kept for `sample_tokens`."""
        model, kv_cache = self._ready()
        batch = self._input_batch
        batch.apply(step)
        self._to_sample = None
        scheduled = step.num_scheduled_tokens
        if not scheduled:
            return
        hidden = model(batch.make_forward_batch(scheduled, kv_cache, self.device))
        sampling_ids: list[str] = []
        last_rows: list[int] = []
        end = 0
        for request_id, num_tokens in scheduled.items():
            end += num_tokens
            if batch.samples(request_id, num_tokens):
                sampling_ids.append(request_id)
                last_rows.append(end - 1)
        if sampling_ids:
            logits = model.compute_logits(hidden[torch.tensor(last_rows, device=self.device)])
            self._to_sample = (sampling_ids, logits)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples for every request whose last known token ran.

        Sampled tokens are appended to the worker's own state: the scheduler does not send them back.
        """
        output = ModelRunnerOutput()
        if self._to_sample is None:
            return output
        (sampling_ids, logits), self._to_sample = self._to_sample, None
        batch = self._input_batch
        inputs = [batch.sampling_input(request_id) for request_id in sampling_ids]
        sampled = sample(logits, inputs, self.model_config.eos_token_ids)
        for request_id, token_id, logprobs in zip(sampling_ids, sampled.token_ids, sampled.logprobs, strict=True):
            batch.append_token(request_id, token_id)
            output.sampled_token_ids[request_id] = token_id
            if logprobs is not None:
                output.logprobs[request_id] = logprobs
        return output

    def _ready(self) -> tuple[CausalLM, torch.Tensor]:
        if self._model is None or self._kv_cache is None:
            raise RuntimeError("call load_model() and allocate_kv_cache() first")
        return self._model, self._kv_cache

    def _dummy_batch(self, query_lens: list[int], seq_lens: list[int], kv_cache: torch.Tensor) -> ForwardBatch:
        num_tokens = sum(query_lens)
        num_blocks = -(-max(seq_lens) // self.config.cache.block_size)

        def make(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            input_ids=make([0] * num_tokens, torch.int64),
            positions=make([0] * num_tokens, torch.int64),
            slot_mapping=make([-1] * num_tokens, torch.int64),
            block_tables=make([0] * num_blocks, torch.int32).expand(len(seq_lens), -1).contiguous(),
            cu_seqlens_q=make([0, *query_lens], torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=make(seq_lens, torch.int32),
            kv_cache=kv_cache,
        )


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigurationError("InvalidConfig", f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "InvalidConfig", "device is cuda, but torch sees no CUDA device; set device to cpu or auto"
        )
    return torch.device(name)


def _resolve_dtype(configured: str, checkpoint: str, device: torch.device) -> torch.dtype:
    if configured != "auto":
        if configured not in DTYPES:
            raise ConfigurationError(
                "InvalidConfig", f"dtype must be auto or one of {', '.join(DTYPES)}, got {configured!r}"
            )
        return DTYPES[configured]
    wanted = DTYPES.get(checkpoint, torch.float32)
    if device.type == "cpu" and not (wanted is torch.bfloat16 and _cpu_has_native_bf16()):
        return torch.float32  # emulated half precision is slower than float32
    return wanted


def _cpu_has_native_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
