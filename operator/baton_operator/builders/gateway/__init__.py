"""Build the gateway's objects, with one file per object.

- `gateway_deployment`, `gateway_service`: the Deployment and the Service.
- `ingress`, `http_route`: access to that Service from outside the cluster.
- `gateway_account`, `gateway_role`, `gateway_role_binding`: the right to watch pods and Services.
- `url_schemes`: the URL schemes that gateway pods serve, and the Service's ports for them.
"""
