"""A submission creates all of its objects or none. Each request of it fails once."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import (
    Conflict,
    Forbidden,
    Missing,
    RuntimeUnseen,
)
from orchestrator.backends.kubernetes.api.client import Api, Listed
from orchestrator.backends.kubernetes.resources import Object, Resource, resource_of
from orchestrator.backends.kubernetes.submitting import FRESH_S, remove_orphans, strangers, submit
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Unanswered, Unsettled
from tests.agent.world import TurnedClock
from tests.backends.kubernetes.rendered import PLAIN, a_handover

NAMESPACE = "team-a"
KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "trainjob")
BESIDE = {"ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"}
OLD = "2026-11-22T05:00:00Z"
Item = dict[str, Any]


@dataclass
class Cluster:
    """Objects in memory, a garbage collector that works at once, and one fault."""

    fails_at: int | None = None
    """Index of the write that fails, from 0."""
    fault: BaseException = field(default_factory=lambda: Forbidden("ada may not"))
    late: bool = False
    """The write is done, but its answer is lost."""
    lasts: int = 1
    """Number of consecutive requests that fail."""
    hidden: frozenset[str] = frozenset()
    """Kinds that the user must not read."""
    there: dict[tuple[str, str], Item] = field(default_factory=dict)
    writes: int = 0
    down: int = 0
    clock: TurnedClock = field(default_factory=TurnedClock)
    made_at: str = OLD

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.there}

    def _ask(self) -> None:
        if self.down:
            self.down -= 1
            raise copy.copy(self.fault)

    def _write(self, do: Any) -> Any:
        self._ask()
        self.writes += 1
        if self.fails_at != self.writes - 1:
            return do()
        self.down = self.lasts - 1 if isinstance(self.fault, Unanswered) else 0
        if self.late:
            do()
        raise self.fault

    def create(self, item: Object, namespace: str) -> Object:
        if item["kind"] == "SelfSubjectAccessReview":
            return {"status": {"allowed": True}}
        made = self._write(lambda: self._made(item))
        return cast("Object", made)

    def _made(self, item: Object) -> Item:
        key = item["kind"], item["metadata"]["name"]
        if key in self.there:
            raise Conflict(f"{key} already exists")
        uid = f"uid-{self.writes}-{key}"
        about = {**item["metadata"], "uid": uid, "creationTimestamp": self.made_at}
        self.there[key] = copy.deepcopy({**item, "metadata": about})
        return copy.deepcopy(self.there[key])

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        self._ask()
        if resource.kind in self.hidden:
            raise Forbidden(f"ada may not get {resource.plural}")
        return copy.deepcopy(self.there.get((resource.kind, name)))

    about = get

    def merge(self, resource: Resource, namespace: str, name: str, change: Object) -> Object:
        def do() -> Item:
            item = self.there.get((resource.kind, name))
            if item is None:
                raise Missing(f"no {name}")
            uid = change["metadata"].get("uid", item["metadata"]["uid"])
            if uid != item["metadata"]["uid"]:
                raise Conflict("the UID in the precondition is another")
            item["metadata"].update(change["metadata"])
            return item

        return cast("Object", self._write(do))

    def delete(self, resource: Resource, namespace: str, name: str, *, uid: str = "") -> None:
        def do() -> None:
            item = self.there.get((resource.kind, name))
            if item is None:
                return
            if uid and item["metadata"]["uid"] != uid:
                raise Conflict("the UID in the precondition is another")
            del self.there[resource.kind, name]
            self._collect(item["metadata"]["uid"])

        self._write(do)

    def _collect(self, uid: str) -> None:
        """Delete the objects that the deleted object owned."""
        for key, item in list(self.there.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if any(one["uid"] == uid for one in owners):
                self.there.pop(key, None)
                self._collect(item["metadata"]["uid"])

    def delete_all(self, *_: object, **__: object) -> None:
        self._write(lambda: None)

    def list(self, resource: Resource, namespace: str, **_: object) -> Listed:
        found = tuple(one for (kind, _), one in self.there.items() if kind == resource.kind)
        return Listed(items=found, version="1")

    def watch(self, *_: object, **__: object) -> Iterator[Object]:
        return iter(())


def submitted(cluster: Cluster, handover: Handover) -> None:
    submit(cast("Api", cluster), NAMESPACE, handover)


def assert_whole(cluster: Cluster, kind: Kind) -> None:
    """The job exists with all of its objects."""
    names = {one.lower() for one in cluster.kinds()}
    assert kind in names
    assert cluster.kinds() >= BESIDE
    assert_owned(cluster)


def assert_owned(cluster: Cluster) -> None:
    """Each object has an existing owner, up to the object that `cancel` deletes."""
    uids = {item["metadata"]["uid"] for item in cluster.there.values()}
    for (kind, name), item in cluster.there.items():
        owners = item["metadata"].get("ownerReferences", [])
        assert all(one["uid"] in uids for one in owners), (kind, name)
        job = kind.lower() in KINDS
        assert owners or job or kind == "ConfigMap", (kind, name)


@pytest.mark.parametrize("kind", KINDS)
def test_all_objects_are_deleted_with_the_job(kind: Kind) -> None:
    cluster, handover = Cluster(), a_handover(PLAIN, kind)
    submitted(cluster, handover)
    assert_whole(cluster, kind)
    (job,) = (item for (one, _), item in cluster.there.items() if one.lower() == kind)
    cluster.delete(resource_of(job), NAMESPACE, "job")
    assert cluster.there == {}


@pytest.mark.parametrize(
    "fault", [Forbidden("ada may not"), BackendError("no"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_a_submission_refused_half_way_leaves_nothing(kind: Kind, fault: BaseException) -> None:
    """Each request fails once. After the creation of the job, a failure is only a warning."""
    whole = Cluster()
    submitted(whole, a_handover(PLAIN, kind))
    for number in range(whole.writes - 1):
        cluster = Cluster(fails_at=number, fault=fault)
        with pytest.raises(type(fault)):
            submitted(cluster, a_handover(PLAIN, kind))
        assert cluster.there == {}, number


def test_a_running_job_counts_as_submitted_despite_later_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Cluster()
    submitted(whole, a_handover(PLAIN))
    for fault in (Forbidden("ada may not"), Unanswered("it does not answer")):
        cluster = Cluster(fails_at=whole.writes - 1, fault=fault)
        with caplog.at_level(logging.WARNING):
            submitted(cluster, a_handover(PLAIN))
        assert_whole(cluster, "pytorchjob")
        assert "job runs without owning its ConfigMap yet" in caplog.text


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_an_answer_that_is_lost_once_changes_nothing(kind: Kind, late: bool) -> None:
    whole = Cluster()
    submitted(whole, a_handover(PLAIN, kind))
    for number in range(whole.writes):
        lost = Unanswered("it does not answer")
        cluster = Cluster(fails_at=number, fault=lost, late=late, hidden=frozenset({"Secret"}))
        submitted(cluster, a_handover(PLAIN, kind))
        assert_whole(cluster, kind)


def test_a_trainjob_whose_runtime_is_not_seen_at_once_is_created_again() -> None:
    """Trainer's webhook reads a cache, in which the runtime appears a little later."""
    whole = Cluster()
    submitted(whole, a_handover(PLAIN, "trainjob"))
    cluster = Cluster(fails_at=whole.writes - 2, fault=RuntimeUnseen("not found"))
    submitted(cluster, a_handover(PLAIN, "trainjob"))
    assert_whole(cluster, "trainjob")


@pytest.mark.parametrize("late", [False, True])
def test_a_submission_to_an_unreachable_server_is_retried_and_then_undone(late: bool) -> None:
    """The server answers again after four failed tries, when the submission is undone."""
    whole = Cluster()
    submitted(whole, a_handover(PLAIN))
    for number in range(whole.writes - 1):
        cluster = Cluster(fails_at=number, fault=Unanswered("away"), late=late, lasts=4)
        last = number == whole.writes - 2
        if late and last:
            submitted(cluster, a_handover(PLAIN))  # the retry finds that the job exists
            assert_whole(cluster, "pytorchjob")
            continue
        with pytest.raises(Unanswered, match="away"):
            submitted(cluster, a_handover(PLAIN))
        assert cluster.there == {}, number


def test_leftovers_are_reported_and_removed_by_the_next_submission() -> None:
    whole = Cluster()
    submitted(whole, a_handover(PLAIN))
    for number in range(1, whole.writes - 1):
        cluster = Cluster(fails_at=number, fault=Unanswered("away"), lasts=1000)
        with pytest.raises(Unsettled, match="was submitted only partly") as raised:
            submitted(cluster, a_handover(PLAIN))
        assert "found: ConfigMap job-launch" in raised.value.message
        assert "`ndctl submit` again; or `ndctl cancel job -n team-a`" in raised.value.fix
        assert "PyTorchJob" not in cluster.kinds()
        assert_owned(cluster)
        cluster.down = 0
        again = dataclasses.replace(cluster, fails_at=None)
        submitted(again, a_handover(PLAIN))
        assert_whole(again, "pytorchjob")
        remove_orphans(cast("Api", cluster), NAMESPACE, PLAIN, "job")
        assert_whole(cluster, "pytorchjob")  # the job exists, so no object is an orphan


def test_cancel_removes_leftovers_of_a_submission() -> None:
    cluster = Cluster(fails_at=4, fault=Unanswered("away"), lasts=1000)
    with pytest.raises(Unsettled):
        submitted(cluster, a_handover(PLAIN))
    cluster.down = 0
    remove_orphans(cast("Api", cluster), NAMESPACE, PLAIN, "job")
    assert cluster.there == {}


def test_two_simultaneous_submissions_of_a_name_are_not_mixed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another submission has just created its ConfigMap and is about to create the job."""
    other = Cluster()
    submitted(other, a_handover(PLAIN))
    job = other.there["PyTorchJob", "job"]
    cluster = Cluster()
    cluster.clock.time = 1795323600.0 + 5.0
    cluster.there["ConfigMap", "job-launch"] = other.there["ConfigMap", "job-launch"]

    class Comes(TurnedClock):
        def sleep(self, seconds: float) -> None:
            assert seconds == pytest.approx(FRESH_S - 5.0)
            cluster.there["PyTorchJob", "job"] = job

    cluster.clock = Comes(cluster.clock.time)
    with pytest.raises(BackendError, match="by another command at the same time"):
        submitted(cluster, a_handover(PLAIN))
    assert "without a job: waiting 25 s" in caplog.text
    assert cluster.there["PyTorchJob", "job"] is job


def test_a_job_whose_config_map_was_replaced_by_another_is_removed() -> None:
    """Its pods would mount the ConfigMap of another submission."""

    class Replaced(Cluster):
        def create(self, item: Object, namespace: str) -> Object:
            made = super().create(item, namespace)
            if item["kind"] == "PyTorchJob":
                self.there["ConfigMap", "job-launch"]["metadata"]["uid"] = "uid-of-another"
            return made

    cluster = Replaced()
    with pytest.raises(BackendError, match="ConfigMap job-launch of namespace team-a was created"):
        submitted(cluster, a_handover(PLAIN))
    assert "PyTorchJob" not in cluster.kinds()


def test_foreign_objects_with_a_name_of_the_job_are_kept() -> None:
    theirs = {"name": "job-token", "labels": {"app": "shop"}, "uid": "1"}
    cluster = Cluster(there={("Secret", "job-token"): {"kind": "Secret", "metadata": theirs}})
    (found,) = strangers(cast("Api", cluster), NAMESPACE, PLAIN, "job")
    assert str(found) == "Secret job-token"
    with pytest.raises(
        BackendError, match="Secret job-token of namespace team-a was created meanwhile"
    ):
        submitted(cluster, a_handover(PLAIN))
    assert cluster.kinds() == {"Secret"}
    remove_orphans(cast("Api", cluster), NAMESPACE, PLAIN, "job")
    assert cluster.kinds() == {"Secret"}


@pytest.mark.parametrize("vanishes", [True, False])
def test_what_a_user_cannot_read_of_a_former_job_is_given_time_to_vanish(vanishes: bool) -> None:
    """Kubernetes deletes it some seconds after its owner."""
    other = Cluster()
    submitted(other, a_handover(PLAIN))
    key = ("NetworkPolicy", "job-pods")
    other.there[key]["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former"
    cluster = Cluster(hidden=frozenset({"NetworkPolicy"}), there={key: other.there[key]})

    class Collects(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if vanishes:
                cluster.there.pop(key, None)

    cluster.clock = Collects(cluster.clock.time)
    if vanishes:
        submitted(cluster, a_handover(PLAIN))
        assert_whole(cluster, "pytorchjob")
        return
    with pytest.raises(
        BackendError, match="NetworkPolicy job-pods of namespace team-a was created"
    ):
        submitted(cluster, a_handover(PLAIN))
    assert cluster.kinds() == {"NetworkPolicy"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_launch_waits_until_all_objects_of_the_former_are_gone(kind: Kind) -> None:
    cluster, handover = Cluster(), a_handover(PLAIN, kind)
    submitted(cluster, handover)
    before = {key: item["metadata"]["uid"] for key, item in cluster.there.items()}
    job = handover.job
    later = replace(handover, job=replace(job, launch=replace(job.launch, launch=2)))
    submitted(cluster, later)
    assert_whole(cluster, kind)
    for key, item in cluster.there.items():
        assert item["metadata"]["uid"] != before[key], key


def test_a_submission_repeated_after_a_lost_answer_is_the_same_job() -> None:
    cluster = Cluster()
    submitted(cluster, a_handover(PLAIN))
    before = copy.deepcopy(cluster.there)
    submitted(cluster, a_handover(PLAIN))
    assert cluster.there == before


def test_a_job_with_the_launch_but_another_text_is_foreign() -> None:
    cluster = Cluster()
    submitted(cluster, a_handover(PLAIN))
    before = copy.deepcopy(cluster.there)
    with pytest.raises(BackendError, match="by another command at the same time"):
        submitted(cluster, replace(a_handover(PLAIN), spec="name: job\ntrain: {lr: 2}\n"))
    assert cluster.there == before
