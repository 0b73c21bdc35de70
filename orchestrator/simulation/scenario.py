"""Scenarios: a seed chooses the job, the cluster and the faults with their times."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.spec.failures import FailureRule, Remedy, Scope
from orchestrator.contract.spec.policy import PolicyRule, Same

KINDS: dict[str, str] = {
    "rank": "a rank is killed, raises, or leaves",
    "hang": "a rank stops moving",
    "error": "a rank fails with the message of a failure class",
    "fabric": "every attempt fails at its start until a shared service recovers",
    "memory": "the devices have less memory than the plan takes",
    "nan": "the loss is NaN for some batches, or for all steps from one on",
    "slow": "the ranks of a host compute more slowly",
    "stuck": "a host's ranks cannot be killed for a while",
    "agent": "an agent is killed with its ranks",
    "host": "a host loses power",
    "leader": "the leader dies at a line of the journal, within it, or between two actions",
    "pause": "the leader's host is paused for a while",
    "switch": "all hosts under a leaf are cut off for a while",
    "partition": "some hosts are cut off, with or without the scheduler and the storage",
    "storage-slow": "writes take seconds",
    "storage-full": "writes fail",
    "storage-stale": "hosts read old versions of files",
    "messages": "messages are lost, duplicated, delayed and reordered",
    "clock": "the wall clock of a host jumps",
    "parting": "hardware fails or an agent dies while a job stops to replace a straggler",
    "preemption": "the scheduler wants the hosts for another job",
    "time-limit": "the allocation ends soon",
    "drain": "an administrator drains a host",
    "scheduler": "the scheduler is unreachable for a while",
    "amnesia": "the scheduler restarts and has forgotten the job or the excluded hosts",
    "eviction": "a kubelet evicts a pod without a warning because memory is low",
    "dead-spare": "the agent of an idle host never starts, or its checks fail",
    "warning": "a host reports that it will fail soon, or all report the same",
    "cancel": "a user cancels the job with ndctl or in the scheduler",
    "double": "two faults at once",
}
SINGLE = tuple(kind for kind in KINDS if kind not in ("double", "warning"))
WARNED_JOBS = 0.15
"""Share of the jobs with warnings."""


class Fault(Struct, frozen=True):
    kind: str
    at: float
    pick: float
    """Which of the possible targets, from 0 to 1."""
    size: float
    """Duration or strength, from 0 to 1."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.1f} s"


class Scenario(Struct, frozen=True, kw_only=True):
    seed: int
    scheduled: bool
    """Whether a scheduler chooses the hosts; if not, the spec lists them."""
    successor_s: float | None
    """Seconds that the job waits for the successor of a lost host; None: the scheduler replaces no
    single hosts."""
    enforces_exclusions: bool
    """Whether the scheduler never uses hosts that the job excludes; if not, pods may return."""
    hosts: int
    spares: int
    ranks_per_host: int
    steps: int
    step_s: float
    save_every: int
    max_restarts: int
    hang_timeout: float | None
    init_timeout: float
    agent_timeout: float
    stop_grace: float
    shrink: bool
    min_hosts: int
    preflight: bool
    resubmitted: bool
    """The user resubmits the job once if it fails."""
    policy: tuple[PolicyRule, ...]
    classes: tuple[FailureRule, ...]
    on_oom: Literal["stop", "replan"]
    on_nan: Literal["stop", "rollback"]
    replace_stragglers: bool
    replace_warned: bool
    auto_interval: bool
    """The ranks choose the checkpoint interval."""
    remembers: bool
    """Ranks keep checkpoints in the memory of their hosts too."""
    copies: int
    """Copies of each of them on other hosts."""
    pinned: Mapping[str, Literal["never", "always"]]
    """Host -> pin."""
    faults: tuple[Fault, ...]

    @property
    def summary(self) -> str:
        where = "from a scheduler" if self.scheduled else "on this machine"
        where = where if self.successor_s is None else "with successors"
        return (
            f"{self.hosts}+{self.spares} hosts {where}, {self.steps} steps of {self.step_s} s,"
            f" a checkpoint every {self.save_every}, max_restarts {self.max_restarts},"
            f" shrink {self.shrink}, preflight {self.preflight}{self._options};"
            f" {', '.join(map(str, self.faults)) or 'no fault'}"
        )

    @property
    def _options(self) -> str:
        own = [f"rule {rule.name}: {rule.action}" for rule in self.policy]
        keys = [f"on_oom {self.on_oom}", f"on_nan {self.on_nan}"]
        more = ["replace_stragglers"] if self.replace_stragglers else []
        more += [f"checkpoints in memory, {self.copies} copies"] if self.remembers else []
        pins = [f"{host} {use} used" for host, use in self.pinned.items()]
        return "".join(f", {summary}" for summary in (*keys, *more, *pins, *own))


def scenario(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Scenario:
    """Deterministic for a seed and its kinds of faults."""
    random, warns = Random(seed), Random(seed + 15_485_863)
    scheduled = random.random() < 0.7
    hosts = random.choice((1, 2, 2, 3, 4))
    choices = _choices(Random(seed + 7_919_000_003), hosts)
    short = Scenario(
        seed=seed,
        scheduled=scheduled,
        successor_s=choices.successor_s if scheduled else None,
        enforces_exclusions=choices.enforces_exclusions,
        hosts=hosts,
        spares=random.choice((0, 0, 1, 2)),
        ranks_per_host=random.choice((1, 2)),
        steps=random.randint(6, 24),
        step_s=random.choice((1.0, 3.0, 8.0)),
        save_every=random.choice((2, 4, 6)),
        max_restarts=random.choice((0, 1, 2, 3, 5)),
        hang_timeout=random.choice((None, None, 20.0)),
        init_timeout=random.choice((120.0, 600.0)),
        agent_timeout=random.choice((10.0, 10.0, 30.0)),
        stop_grace=random.choice((10.0, 30.0)),
        shrink=random.random() < 0.4,
        min_hosts=random.randint(1, hosts),
        preflight=scheduled and random.random() < 0.7,
        resubmitted=random.random() < 0.2,
        faults=_with_warnings(warns, _faults(random, kinds), kinds),
        policy=choices.policy,
        classes=choices.classes,
        on_oom=choices.on_oom,
        on_nan=choices.on_nan,
        replace_stragglers=choices.replace_stragglers,
        replace_warned=warns.random() < 0.8,
        auto_interval=choices.auto_interval,
        remembers=choices.remembers,
        copies=Random(seed + 104_729).choice((0, 1, 1, 2)),
        pinned=choices.pinned,
    )
    chosen = replace(short, steps=choices.steps, step_s=choices.step_s) if choices.steps else short
    kinds_drawn = {fault.kind for fault in chosen.faults}
    if kinds_drawn & {"slow", "parting"}:
        chosen = _make_straggler_detectable(chosen)
    if "parting" in kinds_drawn:
        chosen = replace(chosen, replace_stragglers=True, spares=max(1, chosen.spares))
    if "warning" in kinds_drawn and warns.random() < 0.7:
        chosen = replace(chosen, spares=max(1, chosen.spares))
    if "eviction" in kinds_drawn:
        chosen = replace(chosen, scheduled=True, successor_s=chosen.successor_s or 60.0)
    return chosen


def _make_straggler_detectable(chosen: Scenario) -> Scenario:
    """Make the job long enough to detect a slow host, with other hosts to compare it with."""
    last = max(fault.at for fault in chosen.faults if fault.kind in ("slow", "parting"))
    step_s = min(3.0, max(2.0, chosen.step_s))
    steps = max(chosen.steps, 30 + int(last / step_s))
    return replace(chosen, hosts=max(3, chosen.hosts), steps=steps, step_s=step_s)


OWN_CLASS = FailureRule(
    name="licence-server", scope="fabric", action="restart", patterns=("licence .* is refused",)
)
ACTIONS: tuple[Remedy | Literal["class"], ...] = (
    "restart",
    "replace",
    "replace",
    "requeue",
    "stop",
    "rollback",
    "replan",
    "class",
)
COVERED: tuple[tuple[str, ...], ...] = (
    (),
    ("hang",),
    ("host-lost", "connection-lost"),
    ("segfault", "sigkill-from-outside", "xid-*"),
    ("nan-loss", "cuda-out-of-memory"),
    ("unknown", "python-exception", "licence-server"),
)
SCOPES: tuple[tuple[Scope, ...], ...] = (
    (),
    (),
    ("rank", "user"),
    ("fabric", "storage"),
    ("host",),
)
SAME: tuple[Same, ...] = ("class", "host", "strike", "error", "start", "checkpoint", "any")


class _Choices(Struct, frozen=True, kw_only=True):
    """Choices that a user may make about failures."""

    policy: tuple[PolicyRule, ...]
    classes: tuple[FailureRule, ...]
    on_oom: Literal["stop", "replan"]
    on_nan: Literal["stop", "rollback"]
    replace_stragglers: bool
    auto_interval: bool
    remembers: bool
    pinned: Mapping[str, Literal["never", "always"]]
    steps: int
    """Steps of a job that is longer than most; 0: the job is not."""
    step_s: float
    successor_s: float | None
    enforces_exclusions: bool


def _choices(random: Random, hosts: int) -> _Choices:
    rules = random.choice((0, 0, 0, 1, 2))
    uses: tuple[Literal["never", "always"], ...] = ("never", "always", "always")
    pins = random.choice((0, 0, 0, 1, 2))
    names = [f"node-{number}" for number in random.sample(range(hosts + 2), min(pins, hosts))]
    length = random.random()
    steps, step_s = 0, 1.0
    if length < 0.15:  # long enough to detect a slow rank
        steps = random.randint(30, 50)
    elif length < 0.2:  # long enough to request replaced hosts again
        steps, step_s = random.randint(20, 30), 40.0
    return _Choices(
        steps=steps,
        step_s=step_s,
        policy=tuple(_rule(random, number) for number in range(rules)),
        classes=(OWN_CLASS,) if random.random() < 0.5 else (),
        on_oom="replan" if random.random() < 0.6 else "stop",
        on_nan="rollback" if random.random() < 0.7 else "stop",
        replace_stragglers=random.random() < 0.7,
        auto_interval=random.random() < 0.3,
        pinned={name: random.choice(uses) for name in names},
        successor_s=random.choice((None, None, 60.0, 150.0)),
        enforces_exclusions=random.random() < 0.5,
        remembers=random.random() < 0.8,
    )


def _rule(random: Random, number: int) -> PolicyRule:
    same = random.choice(SAME)
    # "checkpoint" counts failures of one class without a new checkpoint between them. This is rare,
    # so such a rule gets no further conditions.
    rare = same == "checkpoint"
    return PolicyRule(
        name=f"own-{number}",
        action=random.choice(ACTIONS),
        classes=() if rare else random.choice(COVERED),
        scopes=() if rare else random.choice(SCOPES),
        same=same,
        times=2 if rare else random.choice((1, 1, 2, 3)),
        window=random.choice((None, None, 600.0)),
        backoff=random.choice((0.0, 0.0, 5.0, 20.0)),
        backoff_max=60.0,
    )


def _faults(random: Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """One to six faults, or pairs of faults, in the first minutes of the job."""
    faults: list[Fault] = []
    kinds = [kind for kind in kinds if kind != "warning"]
    if not kinds:
        return ()
    single = [kind for kind in kinds if kind != "double"] or list(SINGLE)
    horizon = random.choice((40.0, 90.0, 200.0))
    for _ in range(random.choice((1, 2, 3, 4, 6))):
        kind, at = random.choice(list(kinds)), 5.0 + random.random() * horizon
        names = [random.choice(single), random.choice(single)] if kind == "double" else [kind]
        faults += [Fault(one, at, random.random(), random.random()) for one in names]
    faults = [fault for fault in faults if fault.kind != "cancel" or _keeps_cancel(fault)]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _with_warnings(
    random: Random, faults: tuple[Fault, ...], kinds: Sequence[str]
) -> tuple[Fault, ...]:
    """`faults` and, in some jobs, warnings of hosts. They are drawn apart, because most jobs would
    meet only one of both."""
    if "warning" not in kinds or (faults and random.random() > WARNED_JOBS):
        return faults
    warnings = [
        Fault("warning", 5.0 + 90.0 * random.random(), random.random(), random.random())
        for _ in range(random.choice((1, 1, 2, 3)))
    ]
    return tuple(sorted((*faults, *warnings), key=lambda fault: fault.at))


def _keeps_cancel(cancel: Fault) -> bool:
    """Keep few cancellations, because a cancelled job tests little. Keep more of those that happen
    during a failure."""
    return cancel.pick < (0.1 if cancel.size < 0.5 else 0.4)
