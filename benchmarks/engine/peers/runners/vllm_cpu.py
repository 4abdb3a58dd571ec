"""Runs vLLM on a CPU through `LLM.generate`."""

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


class Runner:
    def __init__(self, model: str, dtype: str) -> None:
        self._llm = LLM(
            model,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, works: list[tuple[list[int], int]]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            for _, num_tokens in works
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in works]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]
