"""Runs Baton through `LLM.generate` and `LLM.embed`."""

from baton_engine import LLM, SamplingParams


class Runner:
    def __init__(self, model: str, max_model_len: int = 1024, **options: object) -> None:
        self._llm = LLM(model, max_model_len=max_model_len, enable_prefix_caching=False, **options)

    def generate(self, works: list[tuple[list[int], int]]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            for _, num_tokens in works
        ]
        results = self._llm.generate([prompt for prompt, _ in works], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        results = self._llm.embed(prompts, use_tqdm=False)
        return [result.outputs.embedding for result in results]
