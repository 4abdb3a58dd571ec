"""CUDA graphs and torch.compile for the forward pass of a step.

These modules do not depend on a batch or a scheduler. `worker/forward/forward_runner.py` uses them.

cudagraph_dispatcher.py  chooses the captured graph for a step
graphs.py                captures and replays CUDA graphs
piecewise.py             the torch.compile backend, which cuts the model at attention into pieces
inductor.py              compiles pieces and keeps them on disk
passes.py                a graph pass that removes no-ops from a piece
cache_key.py             keys of the disk cache
"""
