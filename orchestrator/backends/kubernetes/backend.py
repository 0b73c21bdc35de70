"""The Kubernetes backend: apply, observe, replace a pod, give all of them back, clear."""

import getpass
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.backends.kubernetes import fields, observe, submitting
from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.checks import check
from orchestrator.backends.kubernetes.controller import asking
from orchestrator.backends.kubernetes.controller.wish import (
    GangRestart,
    annotations_of,
    excluding,
    requeues_of,
)
from orchestrator.backends.kubernetes.exclusion import unchangeable, without
from orchestrator.backends.kubernetes.fields import CANCELLED, LABEL
from orchestrator.backends.kubernetes.going import await_no_pods, end_pod
from orchestrator.backends.kubernetes.leaders_nodes import LeadersNodes
from orchestrator.backends.kubernetes.looking import look, shown_name
from orchestrator.backends.kubernetes.mirror import Mirror
from orchestrator.backends.kubernetes.naming import cluster_name
from orchestrator.backends.kubernetes.observe import Observed
from orchestrator.backends.kubernetes.places import folder_of, is_mirror
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    EVENTS,
    JOB_KINDS,
    PODS,
    Object,
    name_of,
    nested,
)
from orchestrator.backends.kubernetes.reviving import revive
from orchestrator.cluster.kubernetes.standing import shut_nodes
from orchestrator.cluster.kubernetes.taints import tolerations_of
from orchestrator.cluster.kubernetes.topology import allocation_switches
from orchestrator.contract.handover import Handover
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import Clock, Former, HostNotice, Sighting

log = logging.getLogger(__name__)

POD_NAME = "NDCTL_POD_NAME"
NAMESPACE = "NDCTL_POD_NAMESPACE"
CLOCKS_S = 3.0
"""By which times of the API server and the nodes, in whole seconds, may be off."""


class KubernetesBackend:
    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ = environ
        self.clock = clock
        self.apis: dict[str | None, Api] = {}
        self.nodes = LeadersNodes(clock)

    def api(self, spec: KubernetesSpec) -> Api:
        """In a pod a kubeconfig's contexts mean nothing."""
        context = None if POD_NAME in self.environ else spec.context
        if context not in self.apis:
            self.apis[context] = Api(context, self.environ, self.clock)
        return self.apis[context]

    def namespace(self, spec: KubernetesSpec) -> str:
        return self.environ.get(NAMESPACE) or spec.namespace or self.api(spec).namespace

    # Before and at submission

    def describe(self, handover: Handover) -> str:
        from orchestrator.backends.kubernetes.render import objects, text

        spec = spec_of(handover.launch)
        if spec.namespace is not None or spec.service_account is not None:
            return text(objects(handover))
        return text(objects(handover, self.namespace(spec)))

    def check(self, handover: Handover) -> str:
        spec = spec_of(handover.launch)
        return check(self.api(spec), self.namespace(spec), handover)

    def submit(self, handover: Handover) -> None:
        spec = spec_of(handover.launch)
        submitting.submit(self.api(spec), self.clock, self.namespace(spec), handover)

    def own(self, launch: LaunchPlan, runs: str = "") -> None:
        """What `kubectl apply` made beside the job goes with it; not a Secret, for no pod needs a
        right to those of its namespace. `runs`: the hash of what does, to be noted."""
        spec = spec_of(launch)
        api, namespace, kind = self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind]
        job = api.get(kind.resource, namespace, launch.job)
        if job is not None:
            if runs and annotations_of(job).get(names.RUNS_ANNOTATION) != runs:
                noted = {"metadata": {"annotations": {names.RUNS_ANNOTATION: runs}}}
                api.merge(kind.resource, namespace, launch.job, noted)
            submitting.own(api, namespace, kind, job, submitting.rendered_beside(spec, launch.job))

    def former(self, launch: LaunchPlan, run_root: Path) -> Former | None:
        seen, spec = self._seen([launch])[0], spec_of(launch)
        path = folder_of(run_root, self.api(spec).context, self.namespace(spec), launch.job)
        number = Mirror(path, self.api(spec)).remote.launch if is_mirror(path) else None
        if seen.meaning != "missing" or seen.pods:
            # A copy of another launch's journal says nothing of how far this one came.
            copy = RunDir(path) if number is not None and number == seen.launch else None
            words, launched = seen.words, seen.launch or 0
            return Former(launch=launched, over=seen.is_over, words=words, copy=copy)
        if number is None:
            return None
        words = f"{seen.name} was deleted after launch {number}; its run directory may be there"
        return Former(launch=number, over=True, words=words, copy=RunDir(path))

    def copy(self, handover: Handover, run_root: Path) -> Mirror:
        launch, spec = handover.launch, spec_of(handover.launch)
        api, namespace = self.api(spec), self.namespace(spec)
        made = Mirror(folder_of(run_root, api.context, namespace, launch.job), api)
        made.expect(handover, namespace)
        return made

    # What Kubernetes has of it

    def standing(self, launch: LaunchPlan) -> str | None:
        seen = self._seen([launch])[0]
        return None if seen.is_over or _other(seen, launch) else seen.words

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
        found: dict[int, Sighting] = {}
        for numbers in self._by_place(launches):
            mine = [launches[number] for number in numbers]
            try:
                seen = self._seen(mine)
            except BackendError as exc:
                words = f"Kubernetes does not say: {exc.message}"
                found |= {number: Sighting(words, held=True) for number in numbers}
                continue
            for number, launch, one in zip(numbers, mine, seen, strict=True):
                gone = one.is_over or _other(one, launch)
                found[number] = Sighting(one.words, held=not gone)
        return [found[number] for number in range(len(launches))]

    def _by_place(self, launches: Sequence[LaunchPlan]) -> Iterator[list[int]]:
        places: dict[tuple[Any, ...], list[int]] = {}
        for number, launch in enumerate(launches):
            spec = spec_of(launch)
            places.setdefault((spec.context, spec.namespace, spec.kind), []).append(number)
        yield from places.values()

    def _seen(self, launches: Sequence[LaunchPlan]) -> list[Observed]:
        """Of launches of one place and kind."""
        spec = spec_of(launches[0])
        return look(self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind], launches)

    def name_of(self, launch: LaunchPlan) -> str | None:
        spec = spec_of(launch)
        return shown_name(JOB_KINDS[spec.kind], spec.namespace or "", launch.job)

    def cluster(self) -> str:
        return cluster_name(self.api(KubernetesSpec()).access)

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """A name that no node has keeps no pod from anywhere."""
        return tuple(hosts)

    # For the leader, inside a pod

    def rival(self, launch: LaunchPlan) -> str | None:
        return None

    def allocation(self, launch: LaunchPlan) -> Allocation | None:
        spec = spec_of(launch)
        api, namespace, kind = self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind]
        job = api.get(kind.resource, namespace, launch.job)
        pods = [pod for pod in self._pods(launch) if fields.is_running(pod)]
        hosts = tuple(dict.fromkeys(node for pod in pods if (node := fields.node_of(pod))))
        return Allocation(
            id=shown_name(kind, namespace, launch.job),
            restarts=requeues_of(job or {}),
            hosts=hosts,
            switches=self._switches(spec, hosts),
            successor_s=spec.pod_patience,
            names_resolve=False,
        )

    def _switches(self, spec: KubernetesSpec, hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Helpful, not needed."""
        try:
            nodes = self.nodes.of(self.api(spec), hosts)
        except BackendError as exc:
            log.warning("the nodes' switches are not known: %s", exc)
            return {}
        return allocation_switches(nodes.values(), spec)

    def _pods(self, launch: LaunchPlan) -> tuple[Object, ...]:
        spec = spec_of(launch)
        labels = f"{LABEL}={launch.job}"
        return self.api(spec).list(PODS, self.namespace(spec), labels=labels).items

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        """Of nodes alone: a pod that is preempted or evicted hears it itself, by SIGTERM, and
        another one may come to the same node."""
        if not hosts:
            return ()
        spec = spec_of(launch)
        nodes = self.nodes.of(self.api(spec), hosts)
        found = {
            one.node: HostNotice(one.node, one.state, one.reason)
            for one in shut_nodes(nodes.values(), tolerations_of(spec))
        }
        for host in set(hosts) - set(nodes):
            found[host] = HostNotice(host, "REMOVED", "the cluster has no such node any more")
        return tuple(found[host] for host in hosts if host in found)

    def why_ending(self, launch: LaunchPlan) -> Cause:
        spec = spec_of(launch)
        api, namespace, kind = self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind]
        job = api.get(kind.resource, namespace, launch.job)
        pod = api.get(PODS, namespace, self.environ.get(POD_NAME, ""))
        return observe.cause(kind, job, pod, launch.launch)

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        """A kubelet that runs out of something kills without SIGTERM. Of a pod that was made anew
        since then the event alone is left."""
        spec = spec_of(launch)
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
        """The operator makes a pod anew once the old one is gone; perhaps it is already."""
        spec = spec_of(launch)
        if elsewhere and not shut:
            self._exclude(launch, [host])
        for pod in self._pods(launch):
            if fields.node_of(pod) != host or name_of(pod) == self.environ.get(POD_NAME):
                continue
            if not fields.alive([pod]):
                continue  # its end is the operator's to see
            age_s = self.clock.now() - fields.begun_at(pod)
            if not elsewhere and age_s < silent_s + CLOCKS_S:
                words = "pod %s on %s began %.0f s ago: it may yet be heard"
                log.info(words, name_of(pod), host, age_s)
                continue
            end_pod(self.api(spec), self.clock, host, pod, spec.force_delete_after)

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        spec = spec_of(launch)
        api, namespace = self.api(spec), self.namespace(spec)
        exclude = partial(self._exclude, launch)
        revive(api, self.clock, namespace, launch, exclude, silent_s=silent_s)

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        """Pods go without the job, and come back on other nodes. Ours goes with them."""
        spec = spec_of(launch)
        api, namespace = self.api(spec), self.namespace(spec)
        if whole and asking.ask(
            api,
            self.clock,
            namespace,
            launch,
            GangRestart(by=self._who(), at=self.clock.now(), exclude=tuple(exclude)),
        ):
            return
        self._exclude(launch, exclude, counted=whole)
        if whole:
            # One by one, by their names, and ours at last: the account may delete no others.
            mine = self.environ.get(POD_NAME)
            for pod in sorted(self._pods(launch), key=lambda one: name_of(one) == mine):
                api.delete(PODS, namespace, name_of(pod))
        elif (own := self.environ.get(POD_NAME)) is not None:
            api.delete(PODS, namespace, own)

    def _exclude(self, launch: LaunchPlan, hosts: Sequence[str], *, counted: bool = False) -> None:
        """Keep new pods off `hosts`. `counted`: the job says how often it was given back."""
        spec = spec_of(launch)
        api, namespace, kind = self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind]
        job = api.get(kind.resource, namespace, launch.job)
        if job is None or fields.launch_of(job) != launch.launch:
            raise BackendError(
                f"{launch.job} is no job of the cluster any more: it cannot be queued again"
            )
        notes = excluding(job, hosts)
        if counted:
            notes[names.REQUEUES_ANNOTATION] = str(requeues_of(job) + 1)
        noted = {"metadata": {"annotations": notes}} if notes else {}
        kept_off = without(spec.kind, job, hosts)
        change = {**noted, **kept_off}
        if not change:
            return
        try:
            api.merge(kind.resource, namespace, launch.job, change)
        except Unanswered:
            raise
        except BackendError as exc:
            # Then the leader alone keeps to the list of those it does not use.
            log.warning("%s are not excluded: %s", ", ".join(hosts) or "no nodes", exc.message)
            return
        if hosts and not kept_off and not asking.kept_off(api, self.clock, namespace, job, hosts):
            log.warning("%s", unchangeable(spec.kind, hosts))

    # The end

    def clear(self, launch: LaunchPlan) -> None:
        """The objects stay, suspended, for whoever wants to know; no pod does."""
        spec = spec_of(launch)
        api, namespace, kind = self.api(spec), self.namespace(spec), JOB_KINDS[spec.kind]
        job = api.get(kind.resource, namespace, launch.job)
        if job is not None and not observe.has_ended(job):
            change = nested(kind.suspend, True)
            change["metadata"] = {"annotations": {CANCELLED: self._who()}}
            api.merge(kind.resource, namespace, launch.job, change)
        elif job is None and not self._pods(launch):
            return
        await_no_pods(api, self.clock, namespace, launch.job)

    def _who(self) -> str:
        return self.environ.get(POD_NAME) or getpass.getuser()


def spec_of(launch: LaunchPlan) -> KubernetesSpec:
    return launch.kubernetes or KubernetesSpec()


def _other(seen: Observed, launch: LaunchPlan) -> bool:
    """The object of that name is of another submission."""
    return seen.launch is not None and seen.launch != launch.launch
