"""Train the checkpoint of the demo model on a CPU, from the data in hack/demo_model/.

python hack/train_demo_model.py --out DIR [--state FILE]

The same command on the same machine writes the same files. With --state, the training is saved
every few minutes, and a later run with the same options continues it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from demo_model.questions import Fact, load_facts
from demo_model.qwen3 import Qwen3, Shape
from demo_model.sampling import (
    Conversation,
    draw_conversation,
    held_out_answers,
    held_out_tasks,
)
from demo_model.texts import (
    END_OF_TEXT,
    TURN_END,
    Renderer,
    encode,
    train_tokenizer,
    write_tokenizer,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

VOCAB_SIZE = 2000
MAX_LENGTH = 2048
#: Tokens of one step, padding included.
BATCH_TOKENS = 4608
#: Lengths to which rows are padded. All batches have few shapes, which is faster on CPUs.
LENGTHS = (48, 64, 72, 96, 128, 144, 192, 256, 288, 384)
#: The number of positions of a batch is a multiple of this.
POSITIONS = 512
#: Target of padding.
IGNORED = -100
#: Share of the rows that repeat random tokens. They teach the model to copy.
REPEAT_SHARE = 0.06
#: The learning rate rises to its peak, then follows a cosine that would end after SLOW_STEPS, and
#: falls in a straight line during the second half of the training.
PEAK_RATE, LAST_RATE, WARMUP_STEPS, SLOW_STEPS = 4e-3, 2e-5, 100, 4000
LOG_STEPS, CHECK_STEPS = 50, 500
NUM_CHECKED_TASKS = 300
CHECKED_ROWS = 64

Row = tuple[list[int], list[bool]]


@dataclass
class Batch:
    """Rows of token ids, and the positions whose next token the assistant writes.

    Args:
        token_ids: [rows, length].
        positions: indices into the flattened token ids, padded to a multiple of POSITIONS.
        targets: the token after each position; IGNORED for padding.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], length: int) -> Batch:
        """Return a batch of rows, padded with token 0 on the right."""
        token_ids = torch.zeros(len(rows), length, dtype=torch.long)
        predicts = torch.zeros(len(rows), length, dtype=torch.bool)
        for index, (ids, written) in enumerate(rows):
            token_ids[index, : len(ids)] = torch.tensor(ids)
            predicts[index, : len(ids) - 1] = torch.tensor(written[1:])
        [positions] = predicts.flatten().nonzero(as_tuple=True)
        targets = token_ids.flatten()[positions + 1]
        padding = (0, -len(positions) % POSITIONS)
        return cls(
            token_ids,
            functional.pad(positions, padding),
            functional.pad(targets, padding, value=IGNORED),
        )


class Data:
    """Makes the batches of the training. Equal seeds give equal batches."""

    def __init__(self, facts: list[Fact], seed: int) -> None:
        self.facts = facts
        self._seed = seed
        self._renderer = Renderer()
        random = Random(f"{seed} tokenizer")
        texts = [self._renderer.render(draw_conversation(facts, random)) for _ in range(6000)]
        self.tokenizer: Tokenizer = train_tokenizer(texts, VOCAB_SIZE)
        held_out = [question for fact in facts for question in fact.held_out]
        #: A hash that changes with the facts, the tools, the template and the split.
        self.digest = hashlib.sha256("\n".join([*texts, *held_out]).encode()).hexdigest()

    def row(self, conversation: Conversation) -> Row:
        """Return the token ids of a conversation, and which ones the assistant writes."""
        return encode(self.tokenizer, self._renderer.render(conversation))

    def batches(self) -> Iterator[Batch]:
        """Yield batches without an end. The rows of a batch have similar lengths."""
        random = Random(f"{self._seed} batches")
        waiting: dict[int, list[Row]] = {length: [] for length in LENGTHS}
        while True:
            row = self._draw(random)
            length = next(length for length in LENGTHS if len(row[0]) <= length)
            rows = waiting[length]
            rows.append(row)
            if len(rows) * length == BATCH_TOKENS:
                yield Batch.of(rows, length)
                rows.clear()

    def _draw(self, random: Random) -> Row:
        if random.random() < REPEAT_SHARE:
            ids = [random.randrange(3, VOCAB_SIZE) for _ in range(random.randrange(8, 40))]
            return ids * 2, [False] * (len(ids) + 1) + [True] * (len(ids) - 1)
        while True:
            row = self.row(draw_conversation(self.facts, random))
            if len(row[0]) <= LENGTHS[-1]:
                return row


class Training:
    """The model, its optimizer and the number of steps so far."""

    def __init__(self, data: Data, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.data, self.steps = data, steps
        self.model = Qwen3(Shape(VOCAB_SIZE))
        decayed = [weight for weight in self.model.parameters() if weight.dim() == 2]
        kept = [weight for weight in self.model.parameters() if weight.dim() == 1]
        groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
        self.step = 0
        self._batches = data.batches()

    def load(self, state: Path) -> None:
        """Continue from a state that `save` wrote."""
        saved = torch.load(state)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self._batches = islice(self._batches, self.step, None)

    def save(self, state: Path) -> None:
        """Write the state in one step, so that a killed run leaves a complete file."""
        partial = state.with_suffix(".partial")
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(saved, partial)
        partial.replace(state)

    def run(self, num_steps: int) -> float:
        """Run steps and return their mean loss."""
        losses = []
        for batch in islice(self._batches, num_steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate()
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model(batch.token_ids, batch.positions)
            loss = functional.cross_entropy(logits.float(), batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def _rate(self) -> float:
        """Return the learning rate of the next step."""
        if self.step < WARMUP_STEPS:
            return PEAK_RATE * (self.step + 1) / WARMUP_STEPS
        half = self.steps // 2
        done = (min(self.step, half) - WARMUP_STEPS) / (SLOW_STEPS - WARMUP_STEPS)
        rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        if self.step <= half:
            return rate
        return LAST_RATE + (rate - LAST_RATE) * (self.steps - self.step) / (self.steps - half)

    @torch.inference_mode()
    def failures(self, conversations: Sequence[tuple[str, Conversation]]) -> Counter[str]:
        """Return how many conversations of each name have a wrong token in a greedy reply.

        All replies are predicted from the right texts before them. A reply is right if every one of
        its tokens is the most likely one, so greedy decoding writes the same text.
        """
        failed: Counter[str] = Counter()
        rows = [(name, self.data.row(conversation)) for name, conversation in conversations]
        rows.sort(key=lambda row: len(row[1][0]))
        for first in range(0, len(rows), CHECKED_ROWS):
            part = rows[first : first + CHECKED_ROWS]
            length = len(part[-1][1][0])
            batch = Batch.of([row for _, row in part], length)
            predicted = self.model(batch.token_ids, batch.positions).argmax(dim=-1)
            is_wrong = (predicted != batch.targets) & (batch.targets != IGNORED)
            for index in set((batch.positions[is_wrong] // length).tolist()):
                failed[part[index][0]] += 1
        return failed

    def write(self, out: Path) -> None:
        """Write the checkpoint in bfloat16."""
        out.mkdir(parents=True, exist_ok=True)
        end, empty = (self.data.tokenizer.token_to_id(text) for text in (TURN_END, END_OF_TEXT))
        config = self.model.shape.config() | {
            "max_position_embeddings": MAX_LENGTH,
            "eos_token_id": end,
            "pad_token_id": empty,
            "torch_dtype": "bfloat16",
        }
        generation = {"eos_token_id": [end, empty], "pad_token_id": empty, "temperature": 0.0}
        for name, content in (("config.json", config), ("generation_config.json", generation)):
            (out / name).write_text(json.dumps(content, indent=2) + "\n")
        write_tokenizer(self.data.tokenizer, out, MAX_LENGTH)
        weights = {
            name: weight.to(torch.bfloat16).contiguous()
            for name, weight in self.model.state_dict().items()
        }
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod(0o644)


def main() -> None:
    """Train, report the results on the held-out set, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, help="file from which an interrupted run continues")
    parser.add_argument("--steps", type=int, default=3000, help="default 3000")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    torch.use_deterministic_algorithms(True)
    facts = load_facts()
    data = Data(facts, args.seed)
    print(f"data {data.digest}", flush=True)
    training = Training(data, args.steps, args.seed)
    if args.state is not None and args.state.exists():
        training.load(args.state)
    answers, tasks = held_out_answers(facts), held_out_tasks(NUM_CHECKED_TASKS)
    started = time.monotonic()
    while training.step < args.steps:
        loss = training.run(min(LOG_STEPS, args.steps - training.step))
        print(
            f"step {training.step} of {args.steps}: loss {loss:.4f}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        if training.step % CHECK_STEPS == 0 or training.step == args.steps:
            for kind, conversations in (("answers", answers), ("tool tasks", tasks)):
                failed = training.failures(conversations)
                print(
                    f"held-out {kind}: {len(conversations) - failed.total()} of "
                    f"{len(conversations)} right; most failures: {failed.most_common(12)}",
                    flush=True,
                )
            if args.state is not None:
                training.save(args.state)
    training.write(args.out)
    print(f"checkpoint written to {args.out}")


if __name__ == "__main__":
    sys.exit(main())
