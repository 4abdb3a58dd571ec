"""The forward of a step: by captured graph, by compiled pieces or layer by layer.

forward_runner    runs a step in the fastest of these ways that is prepared for its size
compilation_plan  which of these ways a configuration selects
static_inputs     buffers at fixed addresses for captured graphs
dummy_steps       steps without requests, for warm-up and memory profiling
"""
