"""One worker process per rank on this host.

multiproc_executor  sends steps and calls, and collects the results
worker_processes    starts the processes and watches them
worker_main         the main function of a worker process
shm_ring            a ring of messages in shared memory, from the executor to all workers
interrupts          pipes that interrupt a step while it waits for other engines
connector_outputs   joins the KV connector reports of all workers
"""
