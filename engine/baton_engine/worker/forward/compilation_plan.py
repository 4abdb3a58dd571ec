"""Plans the compilation and the CUDA graphs of a worker from configuration, device and model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from baton_engine.compilation.cudagraph_dispatcher import CudagraphMode
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_protocol.options.config import EngineConfig, container_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompilationPlan:
    """The settings by which a worker compiles the model and captures graphs."""

    #: none, eager (traced and cut into pieces that run operator by operator) or inductor.
    mode: str
    #: Whether `mode` is configured explicitly. A failure is then an error, not a warning.
    compilation_is_explicit: bool
    cudagraph_mode: CudagraphMode
    #: Whether `cudagraph_mode` is configured explicitly. A failure is then an error, not a warning.
    graphs_are_explicit: bool
    #: Numbers of tokens for which graphs are captured, ascending.
    capture_sizes: tuple[int, ...]
    #: Numbers of tokens for which the model is compiled separately, ascending.
    compile_sizes: tuple[int, ...]
    #: Folder of compiled code. None: `baton_engine.compilation.inductor.default_cache_dir`.
    cache_dir: Path | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int


def plan_compilation(
    config: EngineConfig, model: CheckpointConfig, max_model_len: int, *, has_graphs: bool
) -> CompilationPlan:
    """Return the plan for a configuration. Log a warning for each setting that is not applied.

    Args:
        has_graphs: whether the device can capture and replay graphs.
    """
    given, scheduler = config.compilation, config.scheduler
    budget = scheduler.max_num_batched_tokens
    # Exchanges with other ranks are not captured.
    has_graphs = has_graphs and not config.parallel.enable_expert_parallel
    mode = given.mode if given.mode != "auto" else "inductor" if has_graphs else "none"
    if given.enforce_eager:
        if {given.mode, given.cudagraph_mode} - {"auto", "none"}:
            logger.warning(
                "compilation.enforce_eager is set, so compilation.mode and "
                "compilation.cudagraph_mode are ignored; the model runs without compilation and "
                "graphs"
            )
        mode = "none"
    if mode != "none" and config.model.quantization is not None and model.sparse_layers:
        logger.warning(
            "compilation.mode %s is ignored: experts with quantized weights are not traced; "
            "the model runs without compilation",
            mode,
        )
        mode = "none"
    if model.is_encoder:  # compiled graphs cannot contain `attend_to_prompt`
        if mode != "none" and given.mode != "auto":
            logger.warning("compilation.mode %s is ignored: encoders are not traced", mode)
        mode, has_graphs = "none", False
    cudagraph_mode = _cudagraph_mode(config, compiled=mode != "none", has_graphs=has_graphs)
    capture_sizes = given.capture_sizes
    if capture_sizes is None:
        capture_sizes = tuple(default_capture_sizes(scheduler.max_num_seqs, budget))
    return CompilationPlan(
        mode=mode,
        compilation_is_explicit=given.mode != "auto",
        cudagraph_mode=cudagraph_mode,
        graphs_are_explicit=given.cudagraph_mode != "auto",
        capture_sizes=() if cudagraph_mode is CudagraphMode.NONE else tuple(sorted(capture_sizes)),
        compile_sizes=() if mode == "none" else tuple(sorted(given.compile_sizes)),
        cache_dir=container_path(given.cache_dir) if given.cache_dir else None,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=budget,
        max_blocks_per_seq=-(-max_model_len // config.cache.block_size) + 1,
    )


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Return the default numbers of tokens that graphs are captured for, in ascending order.

    The sizes of decode steps lie close together, so that padding is small. No size exceeds 512,
    because in larger steps kernel launches take a small part of the time.
    """
    largest = min(max(2 * max_num_seqs, 16), 512, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), min(max_num_seqs, 512), largest}
    return sorted(size for size in sizes if size <= largest)


def _cudagraph_mode(config: EngineConfig, *, compiled: bool, has_graphs: bool) -> CudagraphMode:
    given = config.compilation
    if given.enforce_eager:
        return CudagraphMode.NONE
    if given.cudagraph_mode == "auto":
        if not has_graphs or given.capture_sizes == ():
            return CudagraphMode.NONE
        return CudagraphMode.FULL_AND_PIECEWISE if compiled else CudagraphMode.FULL_DECODE_ONLY
    mode = CudagraphMode[given.cudagraph_mode.upper()]
    if mode is not CudagraphMode.NONE and given.capture_sizes == ():
        logger.warning(
            "compilation.cudagraph_mode %s is ignored, because compilation.capture_sizes is empty; "
            "steps run without graphs",
            mode.name,
        )
        return CudagraphMode.NONE
    if mode is not CudagraphMode.NONE and not has_graphs:
        logger.warning(
            "compilation.cudagraph_mode %s is ignored, because CUDA graphs need a GPU and do not "
            "work with expert parallelism; steps run without graphs",
            mode.name,
        )
        return CudagraphMode.NONE
    if mode.has_pieces and not compiled:
        logger.warning(
            "compilation.cudagraph_mode %s needs compiled pieces, and compilation.mode is none; "
            "only decode steps run as graphs",
            mode.name,
        )
        return CudagraphMode.FULL_DECODE_ONLY
    return mode
