"""Runs OpenVINO GenAI through `ContinuousBatchingPipeline`."""

import numpy as np
import openvino
import openvino_genai as genai


class Runner:
    def __init__(self, model: str, precision: str, num_threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": num_threads}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(self, works: list[tuple[list[int], int]]) -> list[list[int]]:
        configs = []
        for _, num_tokens in works:
            config = genai.GenerationConfig()
            config.max_new_tokens = num_tokens
            config.min_new_tokens = num_tokens
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in works]
        results = self._pipeline.generate(prompts, configs)
        return [list(result.m_generation_ids[0]) for result in results]
