"""`baton serve`: one engine and its gateway as child processes, without Kubernetes.

- `server`: the child processes, from start to shutdown.
- `flags`: the flags of the command.
- `child_process`: a child process, whose output is printed.
"""
