"""Plans of the Deployment controller, checked over whole rollouts."""

import copy
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from baton_kube.client import Object
from pocketkube.controllers.deployment import plan_deployment, rolling_limits, template_hash
from support.pocketkube.deployments import deployment

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class SimulatedCluster:
    """A cluster that creates pods at once and makes one pod ready per step."""

    def __init__(self) -> None:
        self.sets: dict[str, Object] = {}
        self.unready_images: set[str] = set()

    def step(self, owner: Object) -> bool:
        """Plan and apply once. Return whether anything changed."""
        plan = plan_deployment(owner, list(self.sets.values()), NOW)
        before = copy.deepcopy(self.sets)
        if plan.create is not None:
            name = plan.create["metadata"]["name"]
            self.sets[name] = {**plan.create, "status": {"replicas": 0, "availableReplicas": 0}}
        for name, size in plan.scale.items():
            self.sets[name]["spec"]["replicas"] = size
        for name in plan.delete:
            del self.sets[name]
        for rs in self.sets.values():
            rs["status"]["replicas"] = rs["spec"]["replicas"]
            rs["status"]["availableReplicas"] = min(
                rs["status"]["availableReplicas"], rs["spec"]["replicas"]
            )
        for rs in self.sets.values():
            image = rs["spec"]["template"]["spec"]["containers"][0]["image"]
            if (
                rs["status"]["availableReplicas"] < rs["spec"]["replicas"]
                and image not in self.unready_images
            ):
                rs["status"]["availableReplicas"] += 1
                break
        return before != self.sets

    def settle(self, owner: Object) -> None:
        for _ in range(200):
            if not self.step(owner):
                return
        raise AssertionError("the rollout does not end")

    def total(self) -> int:
        return sum(rs["status"]["replicas"] for rs in self.sets.values())

    def available(self) -> int:
        return sum(rs["status"]["availableReplicas"] for rs in self.sets.values())


@given(
    replicas=st.integers(1, 8),
    surge=st.integers(0, 3) | st.sampled_from(["25%", "100%"]),
    unavailable=st.integers(0, 3) | st.sampled_from(["0%", "25%", "50%"]),
)
def test_a_rolling_update_stays_within_its_limits_and_ends(
    replicas: int, surge: int | str, unavailable: int | str
) -> None:
    strategy = {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }
    world = SimulatedCluster()
    world.settle(deployment(replicas, strategy=strategy))
    owner = deployment(replicas, "2", strategy=strategy)
    most, least = rolling_limits(owner)
    for _ in range(200):
        moved = world.step(owner)
        assert world.total() <= replicas + most
        assert world.available() >= replicas - least
        if not moved:
            break
    sizes = {
        rs["spec"]["template"]["spec"]["containers"][0]["image"]: rs["spec"]["replicas"]
        for rs in world.sets.values()
    }
    assert sizes == {"1": 0, "2": replicas}


def test_old_pods_keep_serving_when_the_new_template_never_becomes_ready() -> None:
    world = SimulatedCluster()
    world.settle(deployment(4))
    world.unready_images = {"2"}
    world.settle(deployment(4, "2"))
    assert world.available() >= 3
    world.settle(deployment(4, "1"))  # the user rolls back
    assert world.available() == world.total() == 4


def test_recreate_waits_until_the_old_pods_are_gone() -> None:
    world = SimulatedCluster()
    owner = deployment(2, strategy={"type": "Recreate"})
    world.settle(owner)
    owner = deployment(2, "2", strategy={"type": "Recreate"})
    (old,) = world.sets.values()
    plan = plan_deployment(owner, [old], NOW)
    assert plan.create is None
    assert plan.scale == {old["metadata"]["name"]: 0}
    world.settle(owner)
    assert world.available() == 2


def test_the_template_hash_ignores_its_own_label_and_key_order() -> None:
    template = deployment()["spec"]["template"]
    labelled = copy.deepcopy(template)
    labelled["metadata"]["labels"]["pod-template-hash"] = "x"
    assert template_hash(template) == template_hash(labelled)
    assert template_hash(template) != template_hash(deployment(version="2")["spec"]["template"])


def test_the_status_follows_the_rollout() -> None:
    world = SimulatedCluster()
    owner = deployment(2)
    first = plan_deployment(owner, [], NOW).status
    [condition] = first["conditions"]
    assert (condition["type"], condition["status"]) == ("Available", "False")
    late = plan_deployment({**owner, "status": first}, [], NOW + timedelta(seconds=700)).status
    assert late["conditions"] == [condition], "the transition time stays"
    world.settle(owner)
    done = plan_deployment({**owner, "status": first}, list(world.sets.values()), NOW).status
    assert done["conditions"][0]["reason"] == "MinimumReplicasAvailable"
    assert done["updatedReplicas"] == done["availableReplicas"] == 2
