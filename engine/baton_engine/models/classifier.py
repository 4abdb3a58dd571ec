"""The output of pooling models that score texts: a layer of its own, or the logits of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from baton_engine.models.checkpoint.sharding import WeightTargets, whole_targets
from baton_engine.models.projections import parameter
from baton_kernels.linear import linear


class Classifier(nn.Module):
    """The output layer of a classifier: one logit per label."""

    def __init__(self, hidden_size: int, num_labels: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(num_labels, hidden_size)
        self.bias = parameter(num_labels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return whole_targets(prefix, {"weight": self.weight, "bias": self.bias})


def token_score(logits: Tensor, label_token_ids: tuple[int, ...]) -> Tensor:
    """Return the logit of the second token minus the logit of the first token, [rows, 1].

    The sigmoid of the result is the second token's probability in a softmax over both tokens.

    Args:
        logits: logits of the vocabulary, [rows, vocab_size].
        label_token_ids: `PoolingConfig.label_token_ids`, two tokens.
    """
    first, second = label_token_ids
    return logits[:, second : second + 1] - logits[:, first : first + 1]
