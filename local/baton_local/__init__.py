"""The `baton` command: Baton on one machine.

- `cli`: the command line.
- `up`: `baton up`, a local cluster around one LLMService.
- `serve`: `baton serve`, one engine and its gateway without Kubernetes.
- `plan`: `baton plan`, the steps of a rollout.
- `preview`: the simulated cluster behind `baton plan`.
- `service_status`: the state of a service, read from the API server and the service's pods.
- `kv_bytes`: the KV bytes that each engine moved.
- `status_tables`: the tables of `baton status` and `baton up`.
- `tool_agent`: the tool loop of `baton up --agent`.
- `chat_client`: requests to an OpenAI endpoint, with their timing.
- `gateway_readiness`: whether gateways are connected to all engines.
- `cluster_api`: a client of a local cluster's API server.
- `demo_model`: the model of `baton up`. `demo_checkpoint` has the files of the demo model.
- `manifest_file`: the YAML files that users write.
- `detach`: `baton up` in the background.
- `state_dir`: the state folder and its lock.
"""
