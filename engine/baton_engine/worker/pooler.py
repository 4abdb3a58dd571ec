"""Pools the hidden states of each prompt into one vector. A prompt may run in several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from baton_engine.models.checkpoint.pooling_config import PoolingConfig, PoolingType
from baton_engine.worker.devices import to_device
from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_protocol.pooling_params import PoolingParams, Task


class Pooler:
    """Pools the requests of one worker.

    While a prompt runs in several steps, its request has a partial result. With MEAN pooling, this
    is the sum of the hidden states. With CLS pooling, it is the hidden state of the first token.
    LAST pooling needs no partial result.
    """

    def __init__(self, config: PoolingConfig) -> None:
        self._config = config
        #: Partial results, float32 [hidden_size], by request id.
        self._partial: dict[str, Tensor] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the partial results of requests that have ended."""
        for request_id in request_ids:
            self._partial.pop(request_id, None)

    def pool(
        self,
        hidden: Tensor,
        scheduled: ScheduledRows,
        batch: InputBatch,
        classify: Callable[[Tensor], Tensor],
    ) -> dict[str, bytes]:
        """Pool the tokens of a step. All tensor ranks call this method.

        Args:
            hidden: hidden states of the step's tokens, [num_tokens, hidden_size].
            scheduled: the requests of the step.
            batch: the batch, which has the length and the parameters of each request.
            classify: the output layer of a classifier (`Model.classify`).

        Returns:
            The vector of each request whose prompt ends in this step, as float32, little endian.
        """
        ends_now = batch.reaches_last_token(scheduled)
        ended = np.flatnonzero(ends_now)
        if self._config.type is PoolingType.LAST:
            last = scheduled.first_tokens[ended + 1] - 1
            pooled = hidden[to_device(last, hidden.device)].float()
        else:
            pooled = self._pool_parts(hidden, scheduled)
            for index in np.flatnonzero(~ends_now).tolist():
                self._partial[scheduled.request_ids[index]] = pooled[index].clone()
            pooled = pooled[to_device(ended, hidden.device)]
            if self._config.type is PoolingType.MEAN:
                lengths = to_device(scheduled.ends[ended].astype(np.float32), hidden.device)
                pooled /= lengths[:, None]
        ids = [scheduled.request_ids[index] for index in ended.tolist()]
        self.forget(ids)
        if self._config.task is Task.CLASSIFY:
            vectors = _as_bytes(torch.sigmoid(classify(pooled.to(hidden.dtype))))
        else:
            params = [batch.pooling_params(row) for row in scheduled.rows[ended].tolist()]
            vectors = self._embeddings(pooled, params)
        return dict(zip(ids, vectors, strict=True))

    def _pool_parts(self, hidden: Tensor, scheduled: ScheduledRows) -> Tensor:
        """Return the requests' partial results after this step: float32 [requests, hidden_size]."""
        if self._config.type is PoolingType.CLS:
            pooled = hidden[to_device(scheduled.first_tokens[:-1], hidden.device)].float()
        else:
            counts = scheduled.ends - scheduled.starts
            request_of = to_device(np.arange(len(scheduled)).repeat(counts), hidden.device)
            pooled = hidden.new_zeros((len(scheduled), hidden.shape[1]), dtype=torch.float32)
            pooled.index_add_(0, request_of, hidden.float())
        for index in np.flatnonzero(scheduled.starts).tolist():
            before = self._partial[scheduled.request_ids[index]]
            if self._config.type is PoolingType.CLS:
                pooled[index] = before
            else:
                pooled[index] += before
        return pooled

    def _embeddings(self, pooled: Tensor, params: list[PoolingParams]) -> list[bytes]:
        """Shorten and normalize the vectors as configured. Return the bytes of each vector.

        The `PoolingParams` of a request override the configuration of the model.
        """
        short = {index: each.dimensions for index, each in enumerate(params) if each.dimensions}
        for index, dimensions in short.items():
            pooled[index, dimensions:] = 0  # so that the norm is that of the shorter vector
        wanted = [
            self._config.normalize if each.normalize is None else each.normalize for each in params
        ]
        if any(wanted):
            normalized = normalize(pooled, dim=1)
            pooled = (
                normalized
                if all(wanted)
                else torch.where(
                    to_device(np.array(wanted), pooled.device)[:, None], normalized, pooled
                )
            )
        vectors = _as_bytes(pooled)
        for index, dimensions in short.items():
            vectors[index] = vectors[index][: 4 * dimensions]
        return vectors


def _as_bytes(vectors: Tensor) -> list[bytes]:
    """Return the bytes of each row as float32, little endian."""
    return [row.tobytes() for row in vectors.cpu().numpy().astype("<f4", copy=False)]
