"""The outputs of pooling models that score texts."""

from __future__ import annotations

import torch

from baton_engine.models.classifier import Classifier, token_score


def test_the_score_of_two_tokens_is_their_softmax() -> None:
    logits = torch.randn(5, 11)
    score = token_score(logits, (7, 2))
    assert score.shape == (5, 1)
    torch.testing.assert_close(score.sigmoid(), logits[:, [7, 2]].softmax(1)[:, 1:])


def test_a_classifier_has_one_logit_per_label_and_loads_its_bias() -> None:
    layer = Classifier(8, 3, bias=True)
    weight, bias, x = torch.randn(3, 8), torch.randn(3), torch.randn(2, 8)
    for name, target in layer.weight_targets("score").items():
        target.parameter.copy_({"score.weight": weight, "score.bias": bias}[name])
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    assert list(Classifier(8, 3).weight_targets("score")) == ["score.weight"]
