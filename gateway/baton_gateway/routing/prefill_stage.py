"""The prefill stage of an attempt that runs on a prefill engine and a decode engine."""

from __future__ import annotations

import asyncio
import logging

from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.pool_member import PoolMember
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError, RequestStream
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest, ErrorCode

logger = logging.getLogger(__name__)


class PrefillStage:
    """Runs the prefill stage, and waits for the decode engine's first output at the same time.

    Before the decode engine receives PREFILL_RESULT, its only possible output is a failure.

    Args:
        member: the prefill engine.
        request: the prefill engine's request, which this object sends.
        decode_stream: the decode engine's outputs.
    """

    def __init__(
        self,
        member: PoolMember,
        request: EngineCoreRequest,
        decode_stream: RequestStream,
        metrics: GatewayMetrics,
    ) -> None:
        self._member = member
        self._client = member.ready_client
        self._request_id = request.request_id
        self._metrics = metrics
        self._output = asyncio.create_task(_first_output(self._client, request))
        self.decode_output = asyncio.create_task(anext(decode_stream))

    async def wait(self) -> bool:
        """Wait until one of the engines has sent an output or has failed.

        There is no timeout, because the request may wait in the queue of a busy engine. The pool
        ends the requests of an engine that is lost or makes no progress.

        Returns:
            True if the prefill stage has ended. False if only the decode engine has sent an output
            or has failed.
        """
        await asyncio.wait([self._output, self.decode_output], return_when=asyncio.FIRST_COMPLETED)
        return self._output.done()

    def result(self) -> tuple[EngineCoreOutput | None, str]:
        """Return the prefill engine's output and an empty string, or None and an error message.

        The output has the first token. After a failure of the prefill stage, the decode engine
        computes the prompt, so the request does not fail.
        """
        outcome = "failed"
        try:
            output = self._output.result()
        except (EngineDeadError, StopAsyncIteration) as failure:
            error = str(failure)
        else:
            if output.new_token_ids and not output.error:
                self._metrics.prefill_stages.labels("done").inc()
                return output, ""
            error = output.error
            if output.error_code in (ErrorCode.DRAINING, ErrorCode.OVERLOADED):
                outcome = "refused"
        error = error or "the prefill engine ended without a token"
        logger.warning(
            "request %s: the decode engine computes the prompt, because the prefill stage on "
            "engine %s %s: %s",
            self._request_id,
            self._member.endpoint.name,
            outcome,
            error,
        )
        self._metrics.prefill_stages.labels(outcome).inc()
        self._metrics.prefill_fallbacks.labels(outcome).inc()
        self._client.abort([self._request_id])  # frees the blocks
        return None, error

    def close(self) -> None:
        """Stop waiting for both engines, and abort the request on the prefill engine."""
        for output in (self._output, self.decode_output):
            if not output.cancel() and not output.cancelled():
                output.exception()  # retrieved, so that asyncio does not log it as lost
        self._client.abort([self._request_id])


async def _first_output(client: EngineClient, request: EngineCoreRequest) -> EngineCoreOutput:
    """Send the request to the engine in an ADD message, and return the first output.

    Raises:
        EngineDeadError: the engine is dead.
    """
    return await anext(client.add(request))
