"""Baton, by `LLM.generate`."""

from baton_engine import LLM, SamplingParams


class Runner:
    def __init__(self, model: str, **options: object) -> None:
        self._llm = LLM(model, max_model_len=1024, enable_prefix_caching=False, **options)

    def generate(self, works: list[tuple[list[int], int]]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            for _, num_tokens in works
        ]
        results = self._llm.generate([prompt for prompt, _ in works], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]
