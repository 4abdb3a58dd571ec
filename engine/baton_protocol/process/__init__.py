"""What every process of a service has in common: its limits, its health, its metrics, its pod.

cgroups           the limits of this process's cgroups
fair_thread_pool  threads in which clients take turns
fatal             error and exit code for a configuration that cannot work
health            body of a pod's GET /health response
metrics_text      a process's metrics as text
pod_labels        labels and annotations of pods
"""
