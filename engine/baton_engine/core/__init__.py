"""The engine core: one step is schedule, execute, sample, update. No sockets, no processes.

engine_core         `EngineCore.step()`, and the same step with several batches in flight
utility_methods     statistics, drain, pause, sleep and profiling, which clients call by name
pause               pausing the scheduler, sleeping and waking up
request_validation  checks of a request before it is queued
scheduler_setup     the scheduler of a configuration and a loaded model
max_model_len       the longest request that the KV memory can hold
step_records        durations, metrics, log lines and crash dumps of steps
crash_dump          the input of a failed step, as a JSON file
"""
