"""`baton up`: a local cluster around one LLMService.

- `supervisor`: the process of `baton up`, from the start of the cluster to its end.
- `detach`: `baton up` in the background.
- `demo_model`: the model of `baton up`. `baton_local/demo_checkpoint` has the demo model's files.
- `gateway_readiness`: whether gateways are connected to all engines.
- `chat_client`: requests to an OpenAI endpoint, with their timing.
- `tool_agent`: the tool loop of `baton up --agent`.
"""
