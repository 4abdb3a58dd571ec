"""The operator: keeps every LLMService in the state that its spec describes.

One reconcile observes, plans, applies and reports (`reconcile/reconciler.py`). The terms:

- service: an LLMService. A Service is the Kubernetes object.
- role: prefill, decode, gateway or coordinator. The pods of one role are a group.
- member: a prefill or decode pod.
- revision: a hash of the template and the configuration of a group's pods.
- rank: a member of an expert-parallel decode group. The topology is the set of ranks that serve
  together. Each change of the topology makes a new generation.

The packages:

- `process`: the process with its Lease, and the process's parts.
- `reconcile`: the queue of services, and the steps of one reconcile.
- `api`: the LLMService resource, its CRD and its validation rules.
- `observe`: the objects in the cluster, and the replies of engines and coordinators.
- `builders`: builds the Kubernetes objects that a service needs.
- `plan`: the next step of a group of member pods.
- `autoscale`: the sizes of groups that have `autoscaling`.
- `status`: conditions, counts and Events of a service.
- `kube`: reads and writes by kind, and Events.

The modules:

- `handlers`: kopf's handlers, which queue services for a reconcile.
- `revision_history`: the revision history of a service.
- `cli`: the command.
- `logs`: the log lines of the operator.
- `names`: names, labels and annotations of objects.
- `reconcile_errors`: the errors that the condition `Ready` reports.
- `manifests`: writes the generated manifests.
"""
