"""Executors: how a step reaches the workers. Each executor is one way to start them.

step               the contract of one step between scheduler and workers
base               the interface of an executor
uniproc            one worker in a thread of this process
multiproc          one process per worker on this host
external_launcher  torchrun started this process as one of several ranks
ray                workers as Ray actors
startup            from new workers to a loaded model, the same for all executors
commands           messages between an executor and its workers
placement          which cores each worker uses
futures            results of steps and calls, set by other threads
"""
