"""What a job tells: frozen values. `ndctl status --json` and its siblings print the same keys."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ndctl.client import html
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import (
    Choice,
    Memory,
    ModelWork,
    PlacementCost,
    Price,
    RankPlace,
    Rejected,
    StepTime,
    Traffic,
)
from orchestrator.contract.visible import visible
from orchestrator.job.stage import ENDED, State


class Culprit(Struct, frozen=True, kw_only=True):
    """What caused an incident. A field is None where it is unknown or does not apply."""

    host: str | None = None
    rank: int | None = None


class Incident(Struct, frozen=True, kw_only=True):
    """One failure and what followed from it."""

    at: float
    """Unix time."""
    attempt: int
    step: int
    """The last step known to be done."""
    kind: str
    cause: str
    culprit: Culprit
    action: str
    """What ndctl did about it."""
    advice: str
    """What a person should do about it; may be empty."""
    failure: str
    """The failure class, as `ndctl policy list` prints them."""
    drill: str | None
    detected_after_s: float
    recovered_after_s: float | None
    """Seconds to the first new step of a later attempt; None before that step."""
    lost_steps: int | None = None
    """Steps that are repeated after a resume; None if no rank ran."""


class Straggler(Struct, frozen=True, kw_only=True):
    """A rank that delays its peers at present."""

    rank: int
    host: str
    own_s: float
    """Seconds per step of its own work."""
    peers_s: float
    """The median of its peers."""
    lost_tokens_per_second: float | None


class PassedOver(Struct, frozen=True, kw_only=True):
    """A checkpoint that is not complete."""

    name: str
    why: str


class FailedSave(Struct, frozen=True, kw_only=True):
    """The last failed save."""

    step: int
    at: float
    why: str
    times: int
    """Number of failed saves in a row."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """The newest complete checkpoint; `step`, `name` and `path` are None if there is none."""

    step: int | None
    name: str | None
    path: str | None
    """The folder as the hosts of the job see it."""
    at: float | None
    age_s: float | None
    passed_over: tuple[PassedOver, ...]
    failed: FailedSave | None


class DrillStatus(Struct, frozen=True, kw_only=True):
    drill: str
    fired: bool


class Measured(Struct, frozen=True, kw_only=True):
    """What a job measured of its own steps, beside its plan."""

    steps: int
    """Steady steps, on which the other numbers rest."""
    step_s: float
    """Their median."""
    step_s_range: tuple[float, float]
    """10th and 90th percentile of single steps."""
    data_share: float
    """Share of a step in which rank 0 waited for data."""
    planned_step_s: float | None
    planned_step_s_range: tuple[float, float] | None
    calibrated: bool
    """False: the constants of the device are guesses, so `slower` is None."""
    slower: float | None
    """0.05: a step takes 5 % longer than planned."""
    memory_bytes: int | None
    """Peak memory of the fullest rank."""
    memory_rank: int | None
    planned_memory_bytes: int | None
    memory_above: float | None
    """0.05: the peak is 5 % above the planned one."""


class Status(Struct, frozen=True, kw_only=True):
    """A job at one time, as `ndctl status --json` prints it. Times are Unix seconds."""

    name: str
    state: State
    reason: str
    as_of: float | None
    """None: current. Otherwise the job or its scheduler is unreachable, and this is the last known
    state with its time."""
    fix: str
    """What to do; often empty."""
    since: float
    """When the job entered the state."""
    backend: str
    scheduler: str | None
    """What the scheduler says about the job, or how it calls it."""
    excluded: Mapping[str, str]
    """Hosts that a pending job may not use, each with the reason."""
    attempt: int
    """Which start of the ranks this is, from 1; 0 before the first."""
    restarts: int
    max_restarts: int
    """Limit of restarts without a new checkpoint."""
    step: int
    steps: int
    """0: unknown, because the ranks run your own program."""
    loss: float | None
    tokens_per_second: float | None
    eta_s: float | None
    measured: Measured | None
    """None: too few steps, or your own program, which has no plan."""
    hosts: tuple[str, ...]
    world_size: int
    mesh: Mapping[str, int]
    """Parallel degree of each axis."""
    stragglers: tuple[Straggler, ...]
    incidents: tuple[Incident, ...]
    """In order of time."""
    ignored_events: Mapping[str, int]
    checkpoint: Checkpoint | None
    drills: tuple[DrillStatus, ...]
    leader_alive: bool | None
    submitted_at: float
    updated_at: float
    run_dir: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        return visible(f"{self.name}: {self.state}, {self.reason}", keep="")

    def _repr_html_(self) -> str:
        return html.table(f"{self.name}: {self.state}", html.status_rows(self))


Range = tuple[float, float]
"""From the 10th to the 90th percentile of the predicted speed."""


class Decision(Struct, frozen=True, kw_only=True):
    """What a planned job takes until it is done. A value and its range are None where a fact that
    it needs is unknown: the range of the speed, a rate of failures, a price, the power of a GPU."""

    tokens: float
    tokens_from: str
    """The option or the key that gives the tokens."""
    steps: float
    tokens_per_day: float
    tokens_per_day_range: Range | None
    training_s: float
    """Seconds without failures."""
    training_s_range: Range | None
    effective: float | None
    """Share of the time that trains and whose result is kept."""
    effective_from: str | None
    with_failures_s: float | None
    with_failures_s_range: Range | None
    spare_hosts: int
    gpu_hours: float | None
    """Of all GPUs that the job holds, with failures where `effective` is known."""
    gpu_hours_range: Range | None
    price_per_gpu_hour: float | None
    price_from: str | None
    money: float | None
    money_range: Range | None
    device_power_w: int | None
    energy_kwh: float | None
    """At most, of the GPU boards alone."""
    energy_kwh_range: Range | None


class Plan(Struct, frozen=True, kw_only=True):
    """How a job is split over ranks, as `ndctl plan --json` prints it."""

    mesh: Mesh
    """Parallel degree of each axis."""
    world_size: int
    micro_batch_size: int | None
    """None, like `gradient_accumulation` and `memory`: the ranks run your own program."""
    gradient_accumulation: int | None
    activation_checkpointing: str
    reshard_after_forward: bool | int
    reduce_gradients: str
    """`each`: FSDP reduces the gradients of each micro batch; `last`: once a step."""
    compile: bool
    float8: bool
    loss_chunks: int | str
    """`auto` where the ranks run your own program."""
    schedule: str | None
    """Pipeline schedule; None without a pipeline."""
    methods: Mapping[str, str]
    """Axis -> how it works, in words, for axes in use."""
    profile: str | None
    """Hardware profile of the prediction of memory and time."""
    hosts: tuple[str, ...]
    placement: PlacementCost | None
    """None: the switches between the hosts are unknown."""
    ranks: tuple[RankPlace, ...]
    memory: Memory | None
    """Of the fullest rank."""
    memory_along_pp: tuple[Memory, ...]
    time: StepTime | None
    """None: there is no hardware profile of these devices."""
    work: ModelWork | None
    decision: Decision | None
    """None without `time`."""
    communication: tuple[Traffic, ...]
    alternatives: tuple[Choice, ...]
    """The best plans of other kinds of meshes, the fastest first."""
    comparison: str | None
    """Why a faster alternative was not chosen; None: no alternative is faster."""
    untrainable: str | None
    """Why the bundled trainer cannot train this model; None if it can."""
    prices: tuple[Price, ...]
    """What keys that the spec fixes cost, the highest price first."""
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]
    text: str
    """What `ndctl plan` prints."""

    def __str__(self) -> str:
        return visible(self.text, keep="\n")

    def _repr_html_(self) -> str:
        return html.preformatted(self.text)


class Event(Struct, frozen=True, kw_only=True):
    """One line of the job's journal: what happened, and what ndctl decided."""

    seq: int
    at: float
    """Unix time."""
    kind: str
    """Such as `RankExited`; docs/reference.md lists them."""
    text: str
    """One line for people."""
    data: Mapping[str, Any]
    """The event as `ndctl events --json` prints it."""
    actions: tuple[Mapping[str, Any], ...]
    """What was decided, in order; each has `kind` and, where there is one, `reason`."""

    def __str__(self) -> str:
        return visible(self.text, keep="")


class Metric(Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    step: int
    attempt: int
    time: float | None
    """Unix seconds at the end of the step."""
    values: Mapping[str, float | str | None]
    """What the trainer or `ndctl.log` wrote: `loss`, `tokens_per_second`, your own names."""

    @property
    def loss(self) -> float | None:
        """None if there is none, or it was not finite."""
        loss = self.values.get("loss")
        return loss if isinstance(loss, float | int) else None


class LogLine(Struct, frozen=True, kw_only=True):
    """A line that a rank, torchrun or an agent printed."""

    host: str
    rank: int | None
    """None for torchrun and agents."""
    program: str
    """`rank`, `torchrun` or `agent`."""
    text: str
    """As the program wrote it, control characters included. `str(line)` escapes them."""

    def __str__(self) -> str:
        who = self.program if self.rank is None else f"rank {self.rank}"
        return visible(f"[{self.host} {who}] {self.text}", keep="\t")
