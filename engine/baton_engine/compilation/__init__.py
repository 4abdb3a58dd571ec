"""CUDA graphs and torch.compile for a step's forward.

These modules do not depend on a batch or a scheduler. `worker/forward_runner.py` uses them.

dispatch.py   which captured graph serves a step
graphs.py     capturing and replaying CUDA graphs
piecewise.py  the torch.compile backend, which cuts the model at attention
inductor.py   compiles pieces and keeps them on disk
passes.py     a pass over a piece's graph
cache_key.py  keys of the disk cache
"""
