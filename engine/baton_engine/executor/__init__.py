"""Executors start the workers of an engine and pass steps to the workers.

step               the data of one step: what workers receive and what they return
base               the interface of an executor
uniproc            one worker in a thread of the engine's process
multiproc          one worker process per rank on this host
external_launcher  torchrun starts one engine per rank
ray                one Ray actor per rank
startup            loads the model on new workers and allocates the KV cache, for all executors
commands           messages between an executor and its worker processes
cpu_binding        the CPU cores of each worker
remote_executor    the common part of multiproc and ray: the failure of a worker
step_waiter        waits for the results of a step, with a timeout
futures            completes futures, and waits for the answers of workers
"""
