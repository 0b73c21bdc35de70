from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.backends.kubernetes.controller.actions import Action, Create, Delete, Patch
from orchestrator.backends.kubernetes.controller.decide import (
    FORCE_S,
    LATE_S,
    ORPHAN_S,
    Scope,
    Seen,
    decide,
)
from orchestrator.backends.kubernetes.controller.pod_requests import (
    MOST_NODES,
    GangRestart,
    digest_of,
)
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    POLICIES,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    Resource,
)
from orchestrator.contract.spec.kubernetes_spec import Kind
from tests.backends.kubernetes.controller.world import (
    HOME,
    SCOPE,
    Item,
    World,
    config_map,
    decided,
    job,
    node,
    pod,
    seen,
)

TEXT = GangRestart(by="job-master-0", at=1.0).text()
WISH = {names.GANG_ANNOTATION: TEXT}
ELSEWHERE = {names.GANG_ANNOTATION: GangRestart(by="job-master-0", exclude=("node3",)).text()}
DONE = {names.RESTARTED_ANNOTATION: digest_of(TEXT)}
OURS = {names.SUSPENDED_ANNOTATION: "training/controller"}
QUEUED = {names.QUEUE_LABEL: "train"}
KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "trainjob")


def words(actions: tuple[Action, ...]) -> list[str]:
    return [action.does for action in actions]


SETTLE = "complete the gang restart of PyTorchJob training/job"


@pytest.mark.parametrize(
    ("one", "asks", "pods", "does"),
    [
        (job(), {}, [pod()], []),
        (job(), WISH, [pod()], ["suspend PyTorchJob training/job"]),
        (job(notes=DONE), WISH, [pod()], []),
        (job(notes=OURS, suspend=True), WISH, [pod(leaving=True)], []),
        (job(notes=OURS, suspend=True), WISH, [], ["resume PyTorchJob training/job"]),
        (
            job(notes=OURS, suspend=True),
            WISH,
            [pod(phase="Failed")],
            ["resume PyTorchJob training/job"],
        ),
        # The request was withdrawn, or its ConfigMap was deleted.
        (job(notes=OURS, suspend=True), {}, [], ["resume PyTorchJob training/job"]),
        (job(suspend=True), WISH, [pod()], []),
        (job(suspend=True), WISH, [], [SETTLE]),
        (job(notes=OURS), WISH, [pod()], [SETTLE]),
        (job(ended="Failed"), WISH, [], []),
        (
            job(notes=OURS | {names.CANCELLED_ANNOTATION: "ada"}, suspend=True),
            WISH,
            [],
            ["release PyTorchJob training/job"],
        ),
        (job(notes={names.CONTROLLER_ANNOTATION: "elsewhere"}), WISH, [pod()], []),
        (
            job(labels=QUEUED),
            WISH,
            [pod("a"), pod("b", leaving=True), pod("c", phase="Succeeded")],
            [SETTLE, "delete Pod training/a"],
        ),
    ],
)
def test_a_gang_restart_goes_one_step_at_a_time(
    one: Item, asks: dict[str, str], pods: list[Item], does: list[str]
) -> None:
    assert words(decided(seen(one, asks=asks, pods=pods))) == does


@pytest.mark.parametrize("kind", KINDS)
def test_the_controller_restarts_a_job_of_each_kind(kind: Kind) -> None:
    what = seen(job(kind), kind=kind, asks=ELSEWHERE, pods=(pod("a"), pod("b")))
    world = World(what)
    orders = [words(chain) for _ in range(5) for chain in world.round().chains]
    assert [one.split()[0] for (one,) in orders] == ["keep", "suspend", "resume"]
    assert not world.seen.pods, "the excluded node3 does not exist any more"
    (after,) = world.seen.jobs[kind]
    assert after["metadata"]["annotations"] == {
        names.CONTROLLER_ANNOTATION: HOME,
        names.RESTARTS_ANNOTATION: "1",
        names.RESTARTED_ANNOTATION: digest_of(ELSEWHERE[names.GANG_ANNOTATION]),
        names.EXCLUDED_ANNOTATION: "node3",
    }
    assert ("node3" in str(after["spec"])) == (kind == "pytorchjob")
    assert decide(world.seen, SCOPE, {}, 0.0).busy is False
    (config_map,) = world.seen.beside[CONFIG_MAPS]
    assert config_map["metadata"]["annotations"] == ELSEWHERE, (
        "the text of the pods must stay unchanged"
    )


def test_the_controller_adopts_a_job_before_it_can_ask() -> None:
    fresh = job()
    del fresh["metadata"]["annotations"][names.CONTROLLER_ANNOTATION]
    (look_after,) = decided(seen(fresh, asks=WISH))
    assert isinstance(look_after, Patch)
    assert look_after.change == {"metadata": {"annotations": {names.CONTROLLER_ANNOTATION: HOME}}}
    made = {**fresh, "metadata": {**fresh["metadata"], "ownerReferences": [{}]}}
    assert decided(seen(made)) == (), "a JobSet of Kubeflow Trainer belongs to its TrainJob"


UID = "9f0d2c9e-8f5b-4f0e-9d55-0b6f1f3e6c11"


def of_uid(made: Item, uid: str = UID) -> Item:
    return {**made, "metadata": {**made["metadata"], "uid": uid}}


def test_nodes_that_pods_ask_to_avoid_get_no_new_pods() -> None:
    asks = {names.AVOID_ANNOTATION: "node3,node1"}
    (told,) = decided(seen(job(), asks=asks))
    assert isinstance(told, Patch)
    assert told.does == "keep new pods of PyTorchJob training/job off node1, node3"
    assert told.change["metadata"] == {"annotations": {names.EXCLUDED_ANNOTATION: "node1,node3"}}
    assert {*told.change} == {"metadata", "spec"}
    assert "NotIn" in str(told.change["spec"])
    done = job(notes={names.EXCLUDED_ANNOTATION: "node1,node3,node9"})
    assert decided(seen(done, asks=asks)) == ()


@pytest.mark.parametrize(
    ("asked", "pods", "does"),
    [
        (
            f"job-worker-0/{UID}",
            [of_uid(pod("job-worker-0"))],
            ["delete Pod training/job-worker-0"],
        ),
        (f"job-worker-0/{UID}", [of_uid(pod("job-worker-0", leaving=True))], []),
        (f"job-worker-0/{UID}", [pod("job-worker-0")], []),  # another pod of the same name
        (f"job-worker-0/{UID}", [of_uid(pod("job-worker-0", of="b"))], []),
        (f"b-worker-0/{UID}", [of_uid(pod("b-worker-0", of="b"))], []),
    ],
    ids=["its own", "on its way", "a later one", "of another job", "by another's name"],
)
def test_only_pods_of_the_job_are_deleted_for_it(
    asked: str, pods: list[Item], does: list[str]
) -> None:
    asks = {names.END_ANNOTATION: asked}
    assert words(decided(seen(job(), job(name="b"), asks=asks, pods=pods))) == does


def test_a_job_cannot_exclude_all_nodes_of_a_cluster_one_by_one() -> None:
    before = [f"n{number:03}" for number in range(MOST_NODES - 1)]
    full = job(notes={names.EXCLUDED_ANNOTATION: ",".join(before)})
    asks = {names.AVOID_ANNOTATION: "node1,node2"}
    decision = decide(seen(full, asks=asks), SCOPE, {}, 0.0)
    ((told,),) = decision.chains
    assert told.does.endswith("off node1")
    (said,) = decision.refused
    assert said.endswith(f"ndctl.dev/avoid: node2; a job may avoid {MOST_NODES} at most")


def test_requests_of_a_former_job_of_the_name_are_ignored() -> None:
    for uid in ("uid-of-another", ""):
        asked = config_map(asks=WISH)
        asked["metadata"]["ownerReferences"] = [{"name": "job", "uid": uid}] if uid else []
        assert decided(seen(job(), config_maps=(asked,), pods=[pod()])) == ()


@pytest.mark.parametrize(
    "asks",
    [
        {names.GANG_ANNOTATION: "now"},
        {names.GANG_ANNOTATION: '{"spec": {"template": {}}}'},
        {names.AVOID_ANNOTATION: "node 1"},
        {names.END_ANNOTATION: "job-worker-0"},
        {names.END_ANNOTATION: f"other-worker-0/{UID}"},
    ],
)
def test_an_invalid_request_is_reported_and_not_carried_out(asks: dict[str, str]) -> None:
    what = seen(job(), asks=asks, pods=[of_uid(pod("job-worker-0"))])
    decision = decide(what, SCOPE, {}, 0.0)
    assert (decision.chains, decision.busy) == ((), False)
    (said,) = decision.refused
    assert said.startswith("pods of job training/job have an invalid request: ndctl.dev/")


BESIDE = {**dict.fromkeys((ACCOUNTS, ROLES, ROLE_BINDINGS, POLICIES), "job-pods"), RUNTIMES: "job"}


def beside(resource: Resource, *, name: str = "", owned: bool = False) -> Item:
    made = config_map(owned=owned)
    return {**made, "metadata": {**made["metadata"], "name": name or BESIDE[resource]}}


@pytest.mark.parametrize(
    ("what", "limit_s", "does"),
    [
        (
            seen(pods=(pod(leaving=True),), nodes=(node(ready="Unknown"),)),
            FORCE_S,
            "delete Pod training/pod by force",
        ),
        (
            seen(pods=(pod(leaving=True, on="gone", phase="Failed"),)),
            FORCE_S,
            "delete Pod training/pod by force",
        ),
        (
            seen(pods=(pod(leaving=True, on="gone", notes={names.FORCE_ANNOTATION: "7"}),)),
            7.0,
            "delete Pod training/pod by force",
        ),
        (seen(job(ended="Succeeded"), pods=(pod(),)), LATE_S, "delete Pod training/pod"),
        (seen(config_maps=(config_map(),)), ORPHAN_S, "delete ConfigMap training/job-launch"),
        *(
            (seen(beside={one: (beside(one),)}), ORPHAN_S, f"delete {one.kind} training/{name}")
            for one, name in BESIDE.items()
        ),
    ],
)
def test_an_action_waits_until_its_cause_has_lasted(what: Seen, limit_s: float, does: str) -> None:
    first = decide(what, SCOPE, {}, 100.0)
    assert (first.chains, first.due_s, first.busy) == ((), limit_s, True)
    early = decide(what, SCOPE, first.since, 99.0 + limit_s)
    assert (early.chains, early.due_s) == ((), 1.0)
    (chain,) = decide(what, SCOPE, early.since, 100.0 + limit_s).chains
    assert chain[0].does == does
    between = decide(seen(job()), SCOPE, first.since, 110.0)
    assert not between.since, "a cause that returns must last again"


def test_a_pod_with_its_jobs_finalizer_is_marked_as_failed() -> None:
    held = pod(leaving=True)
    held["metadata"]["finalizers"] = ["batch.kubernetes.io/job-tracking"]
    for lost, status in ((held, "Failed"), (pod(leaving=True), None)):
        what = seen(pods=(lost,), nodes=(node(ready="Unknown"),))
        since = decide(what, SCOPE, {}, 100.0).since
        ((action,),) = decide(what, SCOPE, since, 100.0 + FORCE_S).chains
        assert isinstance(action, Delete)
        assert (action.status or {}).get("status", {}).get("phase") == status


@pytest.mark.parametrize(
    "what",
    [
        seen(pods=(pod(leaving=True),)),
        seen(pods=(pod(on="gone"),)),
        seen(pods=(pod(leaving=True, on="gone", managed_by="helm"),)),
        seen(pods=(pod(leaving=True, on=""),)),
        seen(job(ended="Failed"), pods=(pod(phase="Failed"),)),
        seen(job(ended="Failed"), pods=(pod(managed_by="helm"),)),
        seen(job(), config_maps=(config_map(),)),
        seen(config_maps=(config_map(owned=True),)),
        seen(job(), beside={one: (beside(one),) for one in BESIDE}),
        seen(beside={one: (beside(one, owned=True),) for one in BESIDE}),
        seen(beside={one: (beside(one, name="by-hand"),) for one in BESIDE}),
        seen(
            job(notes={names.CONTROLLER_ANNOTATION: "elsewhere"}),
            pods=(pod(leaving=True, on="gone"),),
        ),
    ],
)
def test_healthy_and_foreign_objects_are_not_changed(what: Seen) -> None:
    first = decide(what, SCOPE, {}, 0.0)
    assert (decide(what, SCOPE, first.since, 1e6).chains, first.busy) == ((), False)


def test_a_node_is_tainted_while_a_job_excludes_it() -> None:
    scope = replace(SCOPE, taint=True)
    asked = job(notes={names.EXCLUDED_ANNOTATION: "node1,node9"})
    theirs = {"key": "theirs", "effect": "NoExecute"}
    tainted = {**node(), "spec": {"taints": [theirs]}}
    assert decided(seen(asked, nodes=(tainted,))) == (), (
        "the taint is only for sites that enable it"
    )
    world = World(seen(asked, nodes=(tainted,)), scope)
    world.round()
    (after,) = world.seen.nodes
    own = {"key": "ndctl.dev/excluded", "effect": "NoSchedule"}
    assert after["spec"]["taints"] == [theirs, own]
    assert after["metadata"]["annotations"] == {"ndctl.dev/excluded": "training/job"}
    assert world.round().chains == ()
    other = Scope(home="b", namespace="b", taint=True)
    assert decided(replace(world.seen, jobs={}), other) == (), (
        "a controller of another namespace must not remove the taint"
    )
    ended = job(notes={names.EXCLUDED_ANNOTATION: "node1"}, ended="Failed")
    world.seen = replace(world.seen, jobs={"pytorchjob": (ended,)})
    world.round()
    (after,) = world.seen.nodes
    assert (after["spec"]["taints"], after["metadata"]["annotations"]) == ([theirs], {})


EXCLUDED = {names.EXCLUDED_ANNOTATION: "node1,node9"}


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_placeholder_keeps_pods_that_cannot_be_changed_off_a_node(kind: Kind) -> None:
    world = World(seen(job(kind, notes=EXCLUDED), kind=kind, pods=(pod("a", on="node2"),)))
    (made,) = (one for chain in world.round().chains for one in chain)
    assert isinstance(made, Create)
    assert made.reason == "job training/job excluded node1, and its pods cannot be changed"
    assert made.item["metadata"]["labels"][names.KEEPS_OFF_LABEL] == "job"
    assert names.JOB_LABEL not in made.item["metadata"]["labels"], (
        "a placeholder is no pod of the job"
    )
    (owner,) = made.item["metadata"]["ownerReferences"]
    assert (owner["kind"].lower(), owner["name"], owner["uid"]) == (kind, "job", "uid-job")
    spec = made.item["spec"]
    assert (spec["nodeName"], spec["priorityClassName"]) == ("node1", "high")
    assert spec["containers"][0]["command"][:2] == ["/venv/bin/python", "-c"]
    assert world.round().chains == (), "one placeholder per node is enough"
    gone = [f"delete Pod training/{made.what.name} by force"]
    ended = [{**one, "status": {"phase": "Failed"}} for one in world.seen.pods]
    assert words(decided(replace(world.seen, pods=ended))) == gone
    for over in (job(kind), job(kind, notes=EXCLUDED, ended="Failed")):
        assert words(decided(replace(world.seen, jobs={kind: (over,)}))) == gone


def test_placeholders_exist_before_pods_are_deleted() -> None:
    asks = {names.GANG_ANNOTATION: GangRestart(by="ada", exclude=("node1",)).text()}
    what = seen(job("jobset", notes=EXCLUDED), kind="jobset", asks=asks, pods=(pod(),))
    first, second = words(decided(what))
    assert first.startswith("create Pod training/job-not-on-")
    assert second == "suspend JobSet training/job"


# Laws

NAMES = ("a", "b")
NOTES = st.fixed_dictionaries(
    {},
    optional={
        names.RESTARTED_ANNOTATION: st.just(digest_of(TEXT)),
        names.SUSPENDED_ANNOTATION: st.just("training/controller"),
        names.CANCELLED_ANNOTATION: st.just("ada"),
        names.CONTROLLER_ANNOTATION: st.sampled_from([HOME, "elsewhere"]),
        names.EXCLUDED_ANNOTATION: st.just("node1"),
    },
)


ASKS = st.fixed_dictionaries(
    {},
    optional={
        names.GANG_ANNOTATION: st.sampled_from(["now", TEXT, ELSEWHERE[names.GANG_ANNOTATION]]),
        names.AVOID_ANNOTATION: st.sampled_from(["", "node1", "node1,node2", "a b"]),
        names.END_ANNOTATION: st.sampled_from([f"a-worker-0/{UID}", f"b-worker-0/{UID}", "x"]),
    },
)


@st.composite
def a_job(draw: Any, name: str, kind: Kind) -> Item:
    labels = {}
    if draw(st.booleans()):
        labels = QUEUED
    ended = draw(st.sampled_from(["", "", "Failed"]))
    made = job(kind, name=name, suspend=draw(st.booleans()), ended=ended, labels=labels)
    made["metadata"]["annotations"] = draw(NOTES)
    if draw(st.sampled_from([True, False, False])):
        made["metadata"]["labels"][names.MANAGED_LABEL] = "Helm"
    return made


@st.composite
def worlds(draw: Any) -> World:
    kind = draw(st.sampled_from(KINDS))
    jobs = tuple(draw(a_job(name, kind)) for name in draw(st.sets(st.sampled_from(NAMES))))
    pods = tuple(
        pod(
            draw(st.sampled_from([f"pod{number}", "a-worker-0", "b-worker-0"])),
            of=draw(st.sampled_from(NAMES)),
            on=draw(st.sampled_from(["node1", "node2", "gone", ""])),
            leaving=draw(st.booleans()),
            phase=draw(st.sampled_from(["Pending", "Running", "Failed"])),
            managed_by=draw(st.sampled_from(["ndctl", "Helm"])),
        )
        for number in range(draw(st.integers(0, 4)))
    )
    pods = tuple(of_uid(one, UID[:-1] + str(at)) for at, one in enumerate(pods, 1))
    maps = tuple(config_map(name, asks=draw(ASKS)) for name in NAMES)
    nodes = (node("node1"), node("node2", ready="Unknown"))
    what = Seen(jobs={kind: jobs}, pods=pods, nodes=nodes, beside={CONFIG_MAPS: maps})
    return World(what, replace(SCOPE, taint=draw(st.booleans())))


def ours(item: Mapping[str, Any]) -> bool:
    return bool(item["metadata"]["labels"].get(names.MANAGED_LABEL) == "ndctl")


@settings(max_examples=50)
@given(worlds())
def test_the_controller_changes_only_objects_of_ndctl_and_converges(world: World) -> None:
    items = [
        *(one for jobs in world.seen.jobs.values() for one in jobs),
        *world.seen.pods,
        *world.seen.beside[CONFIG_MAPS],
    ]
    foreign = {one["metadata"]["uid"] for one in items if not ours(one)}
    queued = {one["metadata"]["uid"] for one in items if "train" in str(one["metadata"]["labels"])}
    for _ in range(6):
        again = decide(world.seen, world.scope, world.since, world.now)
        decision = world.round()
        assert decision == again
        for action in (one for chain in decision.chains for one in chain):
            assert action.what.uid not in foreign
            assert action.reason
            if action.what.uid in queued and not isinstance(action, Create):
                assert isinstance(action, Patch)
                assert "suspend" not in str(action.change.get("spec"))
        world.now += ORPHAN_S
    assert decide(world.seen, world.scope, world.since, world.now).chains == ()
