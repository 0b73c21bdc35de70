"""The Kubernetes backend: apply, observe, replace one pod, requeue all pods, clear."""

import getpass
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.backends.kubernetes import submitting
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.cluster_id import cluster_name
from orchestrator.backends.kubernetes.checks.launch_checks import check
from orchestrator.backends.kubernetes.controller import controller_client
from orchestrator.backends.kubernetes.controller.pod_requests import GangRestart
from orchestrator.backends.kubernetes.leader.node_cache import NodeCache
from orchestrator.backends.kubernetes.leader.own_job import OwnJob
from orchestrator.backends.kubernetes.leader.reporting import LeaderReporter
from orchestrator.backends.kubernetes.leader.trainer_status import TrainerServer
from orchestrator.backends.kubernetes.leader_recreate import revive
from orchestrator.backends.kubernetes.mirror.mirror import Mirror
from orchestrator.backends.kubernetes.mirror.mirror_paths import folder_of, is_mirror
from orchestrator.backends.kubernetes.node_affinity import not_kept_off
from orchestrator.backends.kubernetes.observe import object_fields, observe
from orchestrator.backends.kubernetes.observe.object_fields import CANCELLED, LABEL
from orchestrator.backends.kubernetes.observe.observe import Observed
from orchestrator.backends.kubernetes.pod_deletion import NAMED, await_no_pods, end_pod
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    EVENTS,
    JOB_KINDS,
    PODS,
    JobKind,
    Object,
    name_of,
    nested,
)
from orchestrator.backends.kubernetes.status_cache import look, shown_name
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Unanswered
from orchestrator.inventory.kubernetes.gpus import gpu_table
from orchestrator.inventory.kubernetes.standing import shut_nodes
from orchestrator.inventory.kubernetes.taints import tolerations_of
from orchestrator.inventory.kubernetes.topology import allocation_switches
from orchestrator.seams import (
    Clock,
    CurrentRun,
    ExistingJob,
    GrantingScheduler,
    HostNotice,
    LaunchStatus,
    SuccessorHosts,
)

log = logging.getLogger(__name__)

NEEDS_FIX = "waiting does not help: correct the spec, and submit it again once this job has ended"
POD_NAME = "NDCTL_POD_NAME"
POD_UID = "NDCTL_POD_UID"
NAMESPACE = "NDCTL_POD_NAMESPACE"
DELETED_S = 2.0
"""How long to wait for the watch to report the deletion of the job, while ranks stop."""
CLOCKS_S = 3.0
"""Clock difference between the API server and the nodes, which report whole seconds."""


class KubernetesBackend:
    fixed_hosts = None
    """A lost pod gets a successor, so no agent takes over from another one."""
    unattended = None
    """Pods release their nodes when they end."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ = environ
        self.clock = clock
        self.apis: dict[str | None, Api] = {}
        self.nodes = NodeCache()
        self.own_job: OwnJob | None = None
        """Set in the leader's pod."""

    @property
    def granted(self) -> GrantingScheduler:
        return self

    @property
    def successors(self) -> SuccessorHosts:
        return self

    def api(self, spec: KubernetesSpec) -> Api:
        """A pod has no kubeconfig, so the spec's context is ignored there."""
        context = None if POD_NAME in self.environ else spec.context
        if context not in self.apis:
            self.apis[context] = Api(context, self.environ, self.clock)
        return self.apis[context]

    def namespace(self, spec: KubernetesSpec) -> str:
        return self.environ.get(NAMESPACE) or spec.namespace or self.api(spec).namespace

    def _place_of(self, launch: LaunchPlan) -> tuple[Api, JobKind, str]:
        """The API, the kind of the job object, and its namespace."""
        spec = launch.kubernetes_spec
        return self.api(spec), JOB_KINDS[spec.kind], self.namespace(spec)

    # Before and at submission

    def describe(self, handover: Handover) -> str:
        from orchestrator.backends.kubernetes.render import objects, text

        spec = handover.launch.kubernetes_spec
        # The text is complete without a request to the cluster, so it can be rendered offline.
        if spec.namespace is not None or spec.service_account is not None:
            return text(objects(handover))
        return text(objects(handover, self.namespace(spec)))

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        spec = handover.launch.kubernetes_spec
        table = gpu_table(self.environ)
        return check(self.api(spec), self.namespace(spec), handover, table)

    def submit(self, handover: Handover) -> None:
        spec = handover.launch.kubernetes_spec
        submitting.submit(self.api(spec), self.namespace(spec), handover)

    def own(self, launch: LaunchPlan, runs: str = "") -> None:
        """Make the job the owner of its ConfigMap, so that Kubernetes deletes both together.

        `runs`: hash of the objects that the job runs, to be noted on the ConfigMap.
        """
        api, kind, namespace = self._place_of(launch)
        job = api.get(kind.resource, namespace, launch.job)
        if job is not None:
            submitting.adopt(api, namespace, kind, job)
            if runs:
                noted = {names.RUNS_ANNOTATION: runs}
                controller_client.note(api, namespace, launch.job, lambda _: noted)

    def former(self, launch: LaunchPlan, run_root: Path) -> ExistingJob | None:
        seen, spec = self._seen([launch])[0], launch.kubernetes_spec
        path = folder_of(run_root, self.api(spec).context, self.namespace(spec), launch.job)
        remote = Mirror(path, self.api(spec)).remote if is_mirror(path) else None
        number = remote.launch if remote is not None else None
        # Pods without a job object are still being deleted, so the former launch is not gone yet.
        if seen.meaning != "missing" or seen.pods:
            # A copy of another launch's journal does not show the progress of this launch.
            copy = RunDir(path) if number is not None and number == seen.launch else None
            words, launched = seen.words, seen.launch or 0
            return ExistingJob(launch=launched, over=seen.is_over, words=words, copy=copy)
        if number is None or (remote is not None and not remote.settled):
            return None  # never submitted, or only partly
        words = f"{seen.name} was deleted after launch {number}; its run directory may still exist"
        return ExistingJob(launch=number, over=True, words=words, copy=RunDir(path))

    def copy(self, handover: Handover, run_root: Path) -> Mirror:
        launch, spec = handover.launch, handover.launch.kubernetes_spec
        api, namespace = self.api(spec), self.namespace(spec)
        made = Mirror(folder_of(run_root, api.context, namespace, launch.job), api)
        made.expect(handover, namespace)
        return made

    # What exists in Kubernetes

    def standing(self, launch: LaunchPlan) -> str | None:
        seen = self._seen([launch])[0]
        return None if seen.is_over or _other(seen, launch) else seen.words

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        found: dict[int, LaunchStatus] = {}
        for numbers in self._by_place(launches):
            mine = [launches[number] for number in numbers]
            try:
                seen = self._seen(mine)
            except BackendError as exc:
                for number in numbers:
                    name = self.name_of(launches[number])
                    found[number] = LaunchStatus(name, held=True, unknown=exc.message, fix=exc.fix)
                continue
            for number, launch, one in zip(numbers, mine, seen, strict=True):
                found[number] = sighting_of(one, launch)
        return [found[number] for number in range(len(launches))]

    def _by_place(self, launches: Sequence[LaunchPlan]) -> Iterator[list[int]]:
        places: dict[tuple[Any, ...], list[int]] = {}
        for number, launch in enumerate(launches):
            spec = launch.kubernetes_spec
            places.setdefault((spec.context, spec.namespace, spec.kind), []).append(number)
        yield from places.values()

    def _seen(self, launches: Sequence[LaunchPlan]) -> list[Observed]:
        """All `launches` have the same context, namespace and kind."""
        spec = launches[0].kubernetes_spec
        return look(self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind], launches)

    def name_of(self, launch: LaunchPlan) -> str | None:
        spec = launch.kubernetes_spec
        return shown_name(JOB_KINDS[spec.kind], spec.namespace or "", launch.job)

    def cluster(self) -> str:
        return cluster_name(self.api(KubernetesSpec()).access)

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Unknown node names are harmless: excluding one affects no pod."""
        return tuple(hosts)

    # For the leader, inside a pod

    def allocation(self, launch: LaunchPlan) -> Allocation:
        spec = launch.kubernetes_spec
        api, kind, namespace = self._place_of(launch)
        job = api.get(kind.resource, namespace, launch.job)
        pods = [pod for pod in self._pods(launch) if object_fields.is_running(pod)]
        hosts = tuple(dict.fromkeys(node for pod in pods if (node := object_fields.node_of(pod))))
        return Allocation(
            id=shown_name(kind, namespace, launch.job),
            restarts=controller_client.restarts_of(api, namespace, launch.job, job),
            hosts=hosts,
            switches=self._switches(spec, hosts),
            successor_s=spec.pod_patience,
            names_resolve=False,
        )

    def _switches(self, spec: KubernetesSpec, hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Optional: placement works without switches."""
        try:
            nodes = self.nodes.of(self.api(spec), hosts)
        except BackendError as exc:
            log.warning("cannot read the switches of the nodes: %s", exc)
            return {}
        return allocation_switches(nodes.values(), spec)

    def _pods(self, launch: LaunchPlan) -> tuple[Object, ...]:
        spec = launch.kubernetes_spec
        labels = f"{LABEL}={launch.job}"
        return self.api(spec).list(PODS, self.namespace(spec), labels=labels).items

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        """Notices about nodes. There are none about pods: a preempted or evicted pod gets SIGTERM
        itself, and its successor may run on the same node."""
        if not hosts:
            return ()
        spec = launch.kubernetes_spec
        nodes = self.nodes.of(self.api(spec), hosts)
        found = {
            one.node: HostNotice(one.node, one.state, one.reason)
            for one in shut_nodes(nodes.values(), tolerations_of(spec))
        }
        # An autoscaler deletes the node object together with its machine.
        for host in set(hosts) - set(nodes):
            found[host] = HostNotice(host, "REMOVED", "the node was deleted from the cluster")
        return tuple(found[host] for host in hosts if host in found)

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        """Always running if the API server answers: pods end one by one, but none ends the run."""
        self.notices(launch, hosts)
        return CurrentRun(phase="running", words="Kubernetes answers", hosts=tuple(hosts))

    def reporter(
        self, launch: LaunchPlan, run_dir: RunDir, guard: Callable[[], None]
    ) -> LeaderReporter:
        self.own_job = OwnJob(*self._place_of(launch), launch)
        pod = self.environ.get(POD_NAME, "")
        is_trainjob = launch.kubernetes_spec.kind == "trainjob"
        trainer = TrainerServer.from_mapping(self.environ) if is_trainjob else None
        made = LeaderReporter(self.own_job, run_dir, guard, pod, trainer)
        made.begin()
        return made

    def is_leaving(self, launch: LaunchPlan) -> bool:
        """Whether our own pod is being deleted. Another pod may have its name by now."""
        spec, name = launch.kubernetes_spec, self.environ.get(POD_NAME)
        if not name:
            return False
        pod, uid = self.api(spec).get(PODS, self.namespace(spec), name), self.environ.get(POD_UID)
        return (
            pod is None
            or object_fields.is_leaving(pod)
            or uid not in (None, pod["metadata"]["uid"])
        )

    def others_run(self, launch: LaunchPlan) -> int:
        """How many other pods of the job run and are not being deleted."""
        others = [pod for pod in self._pods(launch) if name_of(pod) != self.environ.get(POD_NAME)]
        return sum(
            object_fields.is_running(pod) and not object_fields.is_leaving(pod) for pod in others
        )

    def why_ending(self, launch: LaunchPlan) -> Cause:
        """Why the leader's pod is being ended.

        When a job is deleted, its account may be deleted before its pods. Requests are then
        refused, or still find the job, so give the watch of the job time to report the deletion.
        """
        gone = self.own_job.gone if self.own_job is not None else threading.Event()
        if gone.is_set():
            return "cancelled"
        try:
            found = self._why_ending(launch)
        except BackendError:
            if self.own_job is not None and gone.wait(DELETED_S):
                return "cancelled"
            raise
        doubtful = found in ("requeued", "unknown") and self.own_job is not None
        return "cancelled" if doubtful and gone.wait(DELETED_S) else found

    def _why_ending(self, launch: LaunchPlan) -> Cause:
        api, kind, namespace = self._place_of(launch)
        job = api.get(kind.resource, namespace, launch.job)
        pod = api.get(PODS, namespace, self.environ.get(POD_NAME, ""))
        return observe.cause(kind, job, pod, launch.launch)

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        """Why Kubernetes ended the pods on silent hosts. A kubelet that is low on a resource kills
        without SIGTERM. If the pod was recreated since then, only the event shows it."""
        spec = launch.kubernetes_spec
        selector = "involvedObject.kind=Pod,reason=Evicted"
        events = self.api(spec).list(EVENTS, self.namespace(spec), fields=selector).items
        now, pods = self.clock.now(), self._pods(launch)
        found = {
            host: observe.taken(
                spec.kind, launch.job, host, pods, events, now - silent_s - CLOCKS_S
            )
            for host, silent_s in hosts.items()
        }
        return {host: why for host, why in found.items() if why}

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        """Delete the pod; the operator then creates another. It may have done so already."""
        spec = launch.kubernetes_spec
        # A node that is shut (cordoned) gets no new pods anyway.
        if elsewhere and not shut:
            self._keep_off(launch, [host])
        for pod in self._pods(launch):
            # The leader must not delete its own pod here: this process would end before it has
            # replaced the others.
            if object_fields.node_of(pod) != host or name_of(pod) == self.environ.get(POD_NAME):
                continue
            if not object_fields.alive([pod]):
                continue  # the operator replaces a pod that has ended
            age_s = self.clock.now() - object_fields.begun_at(pod)
            # The pod is younger than the silence, so it is the successor already, and its agent
            # needs time to start.
            if not elsewhere and age_s < silent_s + CLOCKS_S:
                words = "pod %s on %s started %.0f s ago: waiting for its agent"
                log.info(words, name_of(pod), host, age_s)
                continue
            end_pod(self.api(spec), spec.kind, host, pod, spec.force_delete_after)

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        spec = launch.kubernetes_spec
        api, namespace = self.api(spec), self.namespace(spec)
        exclude = partial(self._keep_off, launch)
        revive(api, namespace, launch, exclude, silent_s=silent_s)

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        """Replace pods on other nodes while the job object stays.

        Without a controller, agents exit with a code for which the operator creates the pod again.
        """
        spec = launch.kubernetes_spec
        api, namespace = self.api(spec), self.namespace(spec)
        # A controller restarts all pods together. Without one, the leader does what its rights
        # allow.
        if whole and controller_client.ask(
            api,
            namespace,
            launch,
            GangRestart(by=self._who(), at=self.clock.now(), exclude=tuple(exclude)),
        ):
            return
        self._keep_off(launch, exclude, counted=whole)
        if whole and spec.kind in NAMED:
            # This also replaces pods without an agent. The account may delete pods by name only.
            # Our own pod is last, because its deletion ends this process.
            mine = self.environ.get(POD_NAME)
            for pod in sorted(self._pods(launch), key=lambda one: name_of(one) == mine):
                api.delete(PODS, namespace, name_of(pod))

    def _keep_off(self, launch: LaunchPlan, hosts: Sequence[str], *, counted: bool = False) -> None:
        """Request that new pods avoid `hosts`. `counted`: count a requeue of all pods."""
        spec = launch.kubernetes_spec
        api, kind, namespace = self._place_of(launch)
        job = api.get(kind.resource, namespace, launch.job)
        # The object belongs to a later launch, whose nodes are not ours to exclude.
        if job is None or object_fields.launch_of(job) != launch.launch:
            raise BackendError(
                f"{launch.job} no longer exists in the cluster: it cannot be requeued"
            )
        try:
            if counted:
                controller_client.note(api, namespace, launch.job, controller_client.count_requeue)
            if hosts:
                controller_client.note(api, namespace, launch.job, controller_client.avoid(hosts))
        except Unanswered:
            raise
        except BackendError as exc:
            # Then only the leader's own list of excluded hosts has effect.
            log.warning("cannot exclude %s: %s", ", ".join(hosts) or "no nodes", exc.message)
            return
        if hosts and not controller_client.kept_off(api, namespace, spec.kind, job, hosts):
            log.warning("%s", not_kept_off(hosts))

    # The end

    def clear(self, launch: LaunchPlan) -> None:
        """Suspend the job: its objects stay for inspection, its pods are deleted."""
        spec = launch.kubernetes_spec
        api, kind, namespace = self._place_of(launch)
        # The Role of the pods does not allow it, so say at once what to type instead.
        if POD_NAME in self.environ:
            raise BackendError(
                f"a pod of {launch.job} may not end the job: that requires changing the job object",
                fix=f"`ndctl cancel {launch.job} -n {namespace}`, on a machine with a kubeconfig",
            )
        job = api.get(kind.resource, namespace, launch.job)
        if job is not None and not observe.has_ended(job):
            change = nested(kind.suspend, True)
            change["metadata"] = {"annotations": {CANCELLED: self._who()}}
            api.merge(kind.resource, namespace, launch.job, change)
        if job is not None or self._pods(launch):
            await_no_pods(api, namespace, launch.job)
        if job is None:  # an interrupted submission may have left helper objects
            submitting.remove_orphans(api, namespace, spec, launch.job)

    def _who(self) -> str:
        return self.environ.get(POD_NAME) or getpass.getuser()


def sighting_of(seen: Observed, launch: LaunchPlan) -> LaunchStatus:
    if _other(seen, launch):
        return LaunchStatus(seen.words, held=False)
    over = seen.ending
    return LaunchStatus(
        seen.words,
        held=over is None,
        over=over,
        leaving=over is not None and seen.pods > 0,
        running=seen.leader_runs,
        at=seen.deleted_at,
        needs=NEEDS_FIX if seen.needs_fix else "",
    )


def _other(seen: Observed, launch: LaunchPlan) -> bool:
    """The object with this name belongs to another submission."""
    return seen.launch is not None and seen.launch != launch.launch
