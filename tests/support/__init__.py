"""Helpers of the tests.

A folder has the helpers of one package's unit tests, or of the chaos, image, install or service
tests. These modules serve several of them:

- `waiting`: wait for a condition with a deadline, or until a process is suspended.
- `pods`: engines, gateways and coordinators as processes.
- `http_server`: an HTTP server from a few routes.
- `completions`: token ids of single completions.
- `load`: streams and short requests to a gateway, and checks of their responses.
- `parity`: the reference model, and the comparison of tokens with it.
- `structure`: checks of source files, such as constructors that take callables.
"""
