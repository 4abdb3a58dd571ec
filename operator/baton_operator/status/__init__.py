"""The status of a service: conditions, counts and Events.

- `report`: the whole status.
- `report_group`: the condition of each group of pods.
- `report_model`, `report_scaling`, `report_update`: ModelAvailable, Scaling and Updating.
- `report_topology`: the topology of an expert-parallel group, a part of Scaling, and its Events.
- `report_route`: why no Gateway accepts the HTTPRoute, a part of GatewayReady.
- `report_events`: the Events about changes of the status.
- `diagnose`: why pods are not ready.
- `missing_references`: the Secrets and ConfigMaps that a pod may wait for.
- `suspended_engines`: which engines are asleep or paused.
- `reasons`: the reasons of conditions, by progress and failure.
- `status_probes`: requests for state that no watched object contains.
- `status_writer`: writes the status.
"""
