"""EngineCore: token ids in, token ids out. One step is schedule -> execute -> update. Knows nothing of sockets or processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.scheduler import RequestRefusedError, Scheduler
from baton_engine.core.stats import EngineStats
from baton_engine.core.validation import validate_request
from baton_engine.executor.base import Executor
from baton_engine.protocol.config import EngineConfig
from baton_engine.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    PrefillResult,
    Ready,
)

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(
        self, config: EngineConfig, executor: Executor, *, take_aborts: Callable[[], Iterable[str]] = lambda: ()
    ) -> None:
        """Initializes the executor: loads the model and allocates the KV cache. May take minutes.

        Args:
            take_aborts: ids of requests aborted since the last call; asked once more after the model has run, so that a step's
                tokens do not go to a client that has just gone.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """
        self.config = config
        self.executor = executor
        self._take_aborts = take_aborts
        self.info = executor.initialize()
        block_size = config.cache.block_size
        kv = KVCacheManager(
            self.info.num_blocks,
            block_size,
            self.info.compatibility_hash,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        limits = [self.info.max_position_embeddings, self.info.num_blocks * block_size]
        if config.model.max_model_len is not None:
            limits.append(config.model.max_model_len)
        self.scheduler = Scheduler(
            config.scheduler,
            kv,
            max_model_len=min(limits),
            eos_token_ids=self.info.eos_token_ids,
            fail_on_load_error=config.kv_transfer.load_failure_policy == "fail",
        )
        logger.info("KV cache: %d blocks of %d tokens; max_model_len %d", self.info.num_blocks, block_size, min(limits))

    @property
    def ready(self) -> Ready:
        return Ready(self.scheduler.max_model_len, self.info.num_blocks, self.config.cache.block_size)

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queues a request. Returns the output that refuses it, or None if it was accepted."""
        try:
            validate_request(request, vocab_size=self.info.vocab_size, kv_role=self.config.kv_transfer.role)
            self.scheduler.add_request(request)
            return None
        except ValueError as error:
            refusal = _refusal(request, ErrorCode.INVALID, str(error))
        except RequestRefusedError as error:
            refusal = _refusal(request, error.code, str(error))
        self.scheduler.forget_refused(request.request_id)
        return refusal

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort_requests(request_ids)

    def add_prefill_result(self, result: PrefillResult) -> None:
        if result.token_ids and not all(0 <= token_id < self.info.vocab_size for token_id in result.token_ids):
            result = PrefillResult(
                result.request_id, [], f"the prefill side sampled {result.token_ids}: no such tokens"
            )
        self.scheduler.add_prefill_result(result)

    def step(self) -> list[EngineCoreOutput]:
        """Schedules, runs and takes in one step. Returns what clients are to be told."""
        step = self.scheduler.schedule()
        self.executor.execute_model(step)
        output = self.executor.sample_tokens(None).result()
        self.scheduler.abort_requests(self._take_aborts())
        return self.scheduler.update_from_output(step, output)

    # Utility methods: also called over the wire

    def get_stats(self) -> EngineStats:
        """Gauges and counters."""
        stats = self.scheduler.stats()
        stats.kv_transfer = self.executor.connector_stats()
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forgets cached blocks; running requests keep theirs."""
        self.scheduler.kv.reset_prefix_cache()
        return True

    def drain(self) -> EngineStats:
        """Refuses new requests from now on; those accepted go on. Idempotent."""
        if not self.scheduler.draining:
            self.scheduler.draining = True
            logger.info("draining: %d requests unfinished", self.scheduler.stats().num_unfinished)
        return self.get_stats()

    def shutdown(self) -> None:
        self.executor.shutdown()


def _refusal(request: EngineCoreRequest, code: ErrorCode, message: str) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        token_offset=len(request.generated_token_ids),
        finish_reason=FinishReason.ERROR,
        error=message,
        error_code=code,
    )
