"""How a step's forward runs faster than layer by layer: CUDA graphs (`dispatch`, `graphs`) and compiled pieces (`piecewise`, ...).

Nothing here knows a model, a batch or a scheduler; `worker/forward_runner.py` brings them together.
"""
