"""The training of the demo model: equal seeds give equal weights, and a run can be continued."""

from __future__ import annotations

import pytest
import torch
from demo_model.questions import load_facts
from demo_model.sampling import Conversation, add_answer
from train_demo_model import IGNORED, Batch, Data, Training


@pytest.fixture(scope="module")
def data() -> Data:
    return Data(load_facts(), seed=0)


def test_equal_seeds_give_equal_weights_also_after_an_interruption(data, tmp_path) -> None:
    first, second, other = (Training(data, 10, seed) for seed in (0, 0, 1))
    losses = [training.run(1) for training in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]
    second.save(tmp_path / "state")
    continued = Training(data, 10, 0)
    continued.load(tmp_path / "state")
    assert first.run(1) == continued.run(1)
    weights = continued.model.state_dict()
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_a_batch_predicts_the_tokens_of_the_assistant() -> None:
    rows = [([5, 6, 7], [False, True, True]), ([8, 9], [False, True])]
    batch = Batch.of(rows, length=4)
    assert batch.token_ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    is_used = batch.targets != IGNORED
    assert batch.positions[is_used].tolist() == [0, 1, 4]
    assert batch.targets[is_used].tolist() == [6, 7, 9]


def test_a_reply_with_one_wrong_token_is_a_failure(data) -> None:
    training = Training(data, 10, 0)
    conversations = []
    for number in range(3):
        conversation = Conversation()
        add_answer(conversation, f"Question {number}", "An answer.")
        conversations.append((str(number), conversation))
    assert training.failures(conversations) == {"0": 1, "1": 1, "2": 1}
    # A model that always predicts the right token.
    targets = [Batch.of([data.row(each)], 256).targets for _, each in conversations]
    every = torch.cat([target[target != IGNORED] for target in targets])
    one_hot = torch.nn.functional.one_hot(every, training.model.shape.vocab_size)
    training.model.forward = lambda _, positions: torch.nn.functional.pad(  # type: ignore
        one_hot, (0, 0, 0, len(positions) - len(every))
    )
    assert not training.failures(conversations)
    one_hot[0] = one_hot[0].roll(1)
    assert training.failures(conversations).total() == 1
