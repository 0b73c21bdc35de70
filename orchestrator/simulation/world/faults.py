"""The faults: what each kind breaks, and when the fault ends."""

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from orchestrator.contract.files import exit_codes
from orchestrator.health.host_warnings import Warned
from orchestrator.simulation.scenario import Fault
from orchestrator.simulation.world.hosts import FAILED_CHECK, Host
from orchestrator.simulation.world.k8s_operator import KubernetesOperator
from orchestrator.simulation.world.network import SCHEDULER, STORAGE, MessageFaults
from orchestrator.simulation.world.storage import Crash
from orchestrator.simulation.world.training_faults import ERRORS, START_FAILURES, RankFailure

if TYPE_CHECKING:
    from orchestrator.simulation.world.ranks import HangKind, HostRanks
    from orchestrator.simulation.world.world import World

T = TypeVar("T")
LONGEST_S = 1200.0
"""Upper bound on the duration of a fault."""
QUEUES_S = 300.0
"""How long a fault waits for a queued job to start."""
CANCEL_WITHIN_S = 60.0
"""How long a user waits for a failure before she cancels the job."""
KNOWN_STEPS = 30
"""Steps within which a slow rank is detected."""
DELAYED = frozenset(("fabric", "memory", "nan", "slow", "leader", "parting", "drain", "cancel"))
"""Kinds that take effect later, if at all. The code that meets such a fault calls
`World.took_effect`."""
CRASHES: tuple[Crash | None, ...] = ("before the line", "within the line", "after the line", None)


def start_fault(world: "World", fault: Fault) -> None:
    """Start `fault` now; it ends by itself."""
    world.history.note("fault", f"{fault.kind} (pick {fault.pick:.3f}, size {fault.size:.3f})")
    seconds = FAULTS[fault.kind](world, fault)
    world.faults[fault.kind] += 1
    if seconds is not None:
        world.expected[fault.kind] += 1
    if fault.kind not in DELAYED:
        world.took_effect(fault.kind)


def _pick(choices: Sequence[T], fault: Fault) -> T:
    return choices[int(fault.pick * len(choices))]


def _running(world: "World") -> "list[HostRanks]":
    return [ranks for host in world.hosts.values() for ranks in host.ranks if not ranks.have_exited]


def _after(world: "World", seconds: float, do: Callable[[], None]) -> float:
    world.timeline.after(seconds, do)
    return seconds


def _rank(world: "World", fault: Fault) -> float | None:
    running = _running(world)
    ranks = _pick(running, fault) if running else None
    if ranks is None or not ranks.alive:
        return None
    number = ranks.alive[-1]
    match int(fault.size * 5):
        case 0:
            failure = RankFailure(
                code=None, signal=signal.SIGKILL, failure_class="sigkill-from-outside"
            )
        case 1:
            message = "rank 7 of the library is out of luck"
            failure = RankFailure(message, "RuntimeError", failure_class="python-exception")
        case 2:
            failure = RankFailure(code=None, signal=signal.SIGBUS, failure_class="segfault")
        case 3:
            message = f"loss is odd at {world.timeline.now:.0f}"
            failure = RankFailure(message, "RuntimeError", failure_class="python-exception")
        case _ if fault.size > 0.97:
            failure = RankFailure(code=exit_codes.REFUSED, failure_class="refused")
        case _:
            failure = RankFailure(code=exit_codes.FAILED)
    ranks.end_rank(number, failure)
    return 0.0


def _error(world: "World", fault: Fault) -> float | None:
    running = _running(world)
    if not running:
        return None
    failure = list(ERRORS.values())[int(fault.size * len(ERRORS))]
    _pick(running, fault).fail_one(failure)
    return 0.0


def _fabric(world: "World", fault: Fault) -> float | None:
    """Every attempt fails at its start until the fault ends by itself."""
    seconds = 10.0 + 240.0 * fault.size**2
    failure = list(START_FAILURES.values())[int(fault.pick * len(START_FAILURES))]
    world.training_faults.start_failure, world.training_faults.start_fails_until = (
        failure,
        world.timeline.now + seconds,
    )
    running = _running(world)
    if running:
        _after(world, 0.0, partial(world.took_effect, "fabric"))
        _pick(running, fault).fail_one(failure)
    return seconds


def _memory(world: "World", fault: Fault) -> float | None:
    """From the next step on, devices have slightly less memory than the plan takes."""
    if world.run.job is None:
        return None
    world.training_faults.device_bytes = int(
        world.run.plan.needs.peak_bytes * (0.85 + 0.14 * fault.size)
    )
    return 0.0


def _nan(world: "World", fault: Fault) -> float | None:
    """A few of the next batches spoil the loss; or the model diverges with any data."""
    running = _running(world)
    step = running[0].training.step if running else 0
    soon = step + 1 + int(fault.pick * 7 % 1 * 4)
    if fault.pick > 0.85:
        world.training_faults.diverges_at = soon
    else:
        world.training_faults.bad_batches = frozenset(range(soon, soon + 1 + int(fault.size * 4)))
    world.training_faults.bad_steps_allowed = 1 + int(fault.size * 13) % 3
    return 0.0


def _slow(world: "World", fault: Fault) -> float | None:
    _slow_down(world, fault)
    return 0.0


def _slow_down(world: "World", fault: Fault) -> None:
    """Slow a host down as soon as ranks run, mostly for long enough to be detected; in a fifth of
    the cases not. Only one host is slow at a time, because two slow hosts hide each other."""
    now, running = world.timeline.now, [ranks.agent.host for ranks in _running(world)]
    if not running:
        if not world.ended and now < fault.at + QUEUES_S:
            _after(world, 5.0, partial(_slow_down, world, fault))
        return
    host = next((host for host in running if host.slow_s), _pick(running, fault))
    host.slow_s, host.ever_slow = world.scenario.step_s * (0.2 + fault.size), True
    steps = 8 if fault.pick * 7 % 1 < 0.2 else KNOWN_STEPS
    seconds = min(LONGEST_S / 2, steps * (world.scenario.step_s + host.slow_s))
    host.slow_until = max(host.slow_until, now + seconds)
    _after(world, seconds, partial(_end_slow, world, host))


def _end_slow(world: "World", host: Host) -> None:
    if world.timeline.now >= host.slow_until:
        host.slow_s = 0.0


def _hang(world: "World", fault: Fault) -> float | None:
    """A third of these faults are pauses about as long as the hang timeout: the ranks continue by
    themselves, perhaps while the leader collects evidence."""
    running = _running(world)
    if not running:
        return None
    ranks = _pick(running, fault)
    classes: tuple[HangKind, ...] = ("stopped", "busy", "loading")
    ranks.hang(classes[int(fault.size * 7 % 1 * len(classes))])
    if fault.size > 0.33:
        return 0.0
    if fault.size < 0.16:  # until the hang is detected
        world.at_next_hang.append(ranks.resume_hung)
        return 0.0
    monitor = world.leader.monitor if world.leader is not None else None
    watch = monitor.watch if monitor is not None else None
    limit = watch.limit("train") if watch is not None else 10.0
    return _after(world, max(0.0, limit - 2.0 + 12.0 * fault.size), ranks.resume_hung)


def _stuck(world: "World", fault: Fault) -> float | None:
    running = [ranks.agent.host for ranks in _running(world)]
    host = _pick(running or list(world.hosts.values()), fault)
    host.unkillable = True
    for ranks in host.ranks:
        ranks.hang()
    seconds = _after(world, 20.0 + 200.0 * fault.size, partial(_unstuck, host))
    return seconds if running else None


def _unstuck(host: Host) -> None:
    host.unkillable = False


def _agent(world: "World", fault: Fault) -> float | None:
    agents = [host.agent for host in world.hosts.values() if host.agent is not None]
    agent = _pick(agents, fault) if agents else None
    if agent is None:
        return None
    agent.die()
    return 0.0


def _host(world: "World", fault: Fault) -> float | None:
    used = [host for host in world.hosts.values() if host.up and host.agent]
    if not used:
        return None
    host = _pick(used, fault)
    host.power_off()
    world.update_reachability()
    return _after(world, 60.0 + 600.0 * fault.size, partial(_repaired, world, host))


def _repaired(world: "World", host: Host) -> None:
    host.up = True
    world.history.note(host.name, "is repaired")
    world.update_reachability()


def _leader(world: "World", fault: Fault) -> float | None:
    """The leader dies at one of the next few lines of the journal. Later lines are often never
    written."""
    number, where = int(fault.size * 8), CRASHES[int(fault.pick * 4)]
    if where is None:
        number //= 4
    leader = world.leader
    if leader is None:
        world.crash_next = (number, where)
    else:
        leader.crash_after(number, where)
    return 0.0


def _pause(world: "World", fault: Fault) -> float | None:
    leader, seconds = world.leader, 2.0 + 60.0 * fault.size
    if leader is None:
        return None
    leader.pause(seconds)
    return seconds


def _cut_off(world: "World", names: Sequence[str], seconds: float) -> float:
    join = _move_to_side(world.network.sides, names, world.next_number())
    world.history.note("network", f"{', '.join(names)} cut off for {seconds:.0f} s")
    world.update_reachability()

    def rejoin() -> None:
        join()
        world.history.note("network", f"{', '.join(names)} back")
        world.update_reachability()

    return _after(world, seconds, rejoin)


def _cut_off_from_hosts(world: "World", names: Sequence[str], seconds: float) -> float:
    """Cut hosts off from other hosts only. They still reach the storage and the scheduler."""
    join = _move_to_side(world.network.host_sides, names, world.next_number())
    world.history.note("network", f"{', '.join(names)} not heard by others for {seconds:.0f} s")

    def rejoin() -> None:
        join()
        world.history.note("network", f"{', '.join(names)} heard again")

    return _after(world, seconds, rejoin)


def _move_to_side(sides: dict[str, int], names: Sequence[str], side: int) -> Callable[[], None]:
    """Move hosts to a side of the partition. Returns a function that moves them back, except those
    that another fault has moved since."""
    sides.update(dict.fromkeys(names, side))

    def join() -> None:
        for name in names:
            if sides.get(name) == side:
                del sides[name]

    return join


def _switch(world: "World", fault: Fault) -> float | None:
    leaf = world.switches_of(_pick(list(world.hosts), fault))
    below = [name for name in world.hosts if world.switches_of(name) == leaf]
    return _cut_off(world, below, 1.0 + 240.0 * fault.size**2)


def _partition(world: "World", fault: Fault) -> float | None:
    """Cut off the first hosts or a single one, with the scheduler, the storage, both or neither on
    their side; or cut them off from other hosts only."""
    names = [host.name for host in world.hosts.values() if host.agent] or list(world.hosts)
    cut = names[: 1 + int(fault.pick * len(names))] if fault.size < 0.5 else [_pick(names, fault)]
    seconds = 1.0 + 300.0 * (fault.size * 7 % 1) ** 2
    with_them = ([], [STORAGE], [SCHEDULER], [STORAGE, SCHEDULER], None)[int(fault.pick * 97) % 5]
    if with_them is None:
        return _cut_off_from_hosts(world, cut, seconds)
    return _cut_off(world, [*cut, *with_them], seconds)


def _storage_slow(world: "World", fault: Fault) -> float | None:
    seconds = 30.0 + 200.0 * fault.pick
    world.storage.slow_s = 0.5 + 20.0 * fault.size**2
    world.storage.slow_until = world.timeline.now + seconds
    return seconds


def _full(world: "World", fault: Fault) -> float | None:
    seconds = 5.0 + 300.0 * fault.size**2
    world.storage.full_until = world.timeline.now + seconds
    return seconds


def _stale(world: "World", fault: Fault) -> float | None:
    seconds = 30.0 + 200.0 * fault.pick
    world.storage.stale_s = 60.0 * fault.size
    world.storage.stale_until = world.timeline.now + seconds
    return seconds


def _messages(world: "World", fault: Fault) -> float | None:
    seconds = 10.0 + 150.0 * fault.size
    worst = 1 + int(40 * (fault.pick * 11 % 1))
    chances = [worst if int(fault.pick * 16) >> bit & 1 else 0 for bit in range(4)]
    world.network.message_faults = MessageFaults(world.timeline.now + seconds, *chances)
    return seconds


def _clock(world: "World", fault: Fault) -> float | None:
    host = _pick(list(world.hosts.values()), fault)
    host.clock.offset += 7200.0 * (fault.size - 0.5)
    return 0.0


def _preemption(world: "World", fault: Fault) -> float | None:
    return 60.0 if world.scheduler.preempt(2.0 + 40.0 * fault.size) else None


def _time_limit(world: "World", fault: Fault) -> float | None:
    return 60.0 if world.scheduler.reach_time_limit() else None


def _drain(world: "World", fault: Fault) -> float | None:
    """Drain a host for a while. In a quarter of the cases its hardware is also broken, so the job
    must not use it again."""
    used = [host for host in world.hosts.values() if host.agent]
    host = _pick(used or list(world.hosts.values()), fault)
    host.draining, host.drained_at = "a fan", world.timeline.now
    if host.ranks and fault.size * 9 % 1 < 0.25:
        world.at_next_failure = partial(_ask_notices, world)
        host.ranks[0].fail_one(ERRORS["uncorrectable-ecc"])
    return _after(world, 20.0 + 580.0 * fault.size**2, partial(_resumed, host))


def _ask_notices(world: "World") -> None:
    """Let the leader ask the scheduler for notices while the ranks of the host stop."""
    if world.leader is not None and world.scenario.scheduled:
        world.leader.ask_notices()


def _warning(world: "World", fault: Fault) -> float | None:
    """A host reports what will make it fail. Or all slow down at once, as in a warm room."""
    used = [host for host in world.hosts.values() if host.agent]
    if not used:
        return None
    if fault.size < 0.3:
        found, hosts = Warned("throttling", "GPU 0000:01:00 slows down: it is too hot"), used
    else:
        found, hosts = Warned("gpu-memory", "GPU 0000:01:00: memory errors"), [_pick(used, fault)]
        hosts[0].own_warnings.add(found.kind)
    for host in hosts:
        if host.agent is not None:
            host.agent.agent.warn(found)
    return 0.0


def _resumed(host: Host) -> None:
    host.draining = ""


def _scheduler(world: "World", fault: Fault) -> float | None:
    seconds = 5.0 + 400.0 * fault.size**2
    world.scheduler.down_until = world.timeline.now + seconds
    return seconds if world.scenario.scheduled else None


def _amnesia(world: "World", fault: Fault) -> float | None:
    seconds = 20.0 * fault.size
    world.scheduler.down_until = world.timeline.now + seconds
    forget = partial(world.scheduler.forget, everything=fault.pick < 0.5)
    had_job = world.scheduler.has_job
    _after(world, seconds, forget)
    return seconds if had_job else None


def _eviction(world: "World", fault: Fault) -> float | None:
    operator = world.scheduler
    evicted = isinstance(operator, KubernetesOperator) and operator.evict(fault.pick)
    return 0.0 if evicted else None


def _dead_spare(world: "World", fault: Fault) -> float | None:
    """An idle host: its agent never starts, or its preflight checks fail."""
    idle = [host for host in world.hosts.values() if not host.agent and not host.ranks]
    if not idle:
        return None
    host = _pick(idle, fault)
    if fault.size < 0.5:
        host.agent_never_starts = True
    else:
        host.findings = (FAILED_CHECK,)
    return _after(world, 900.0, partial(_recovered, host))


def _recovered(host: Host) -> None:
    host.agent_never_starts, host.findings = False, ()


def _cancel(world: "World", fault: Fault) -> float | None:
    """Cancel at once; or soon after the next failure, because users often cancel then."""
    cancels = partial(_cancelled, world, fault)
    if fault.size < 0.5:
        return _after(world, 0.0, cancels)
    world.at_next_failure = partial(_after, world, 4.0 * fault.pick, cancels)
    return _after(world, CANCEL_WITHIN_S, cancels)


def _cancelled(world: "World", fault: Fault) -> None:
    world.at_next_failure = None
    if world.ended:
        return
    if int(fault.size * 8) % 2 and world.scenario.scheduled:
        world.scheduler.cancel()
    elif world.leader is not None:
        world.leader.cancel("ann")
    else:
        return
    world.took_effect("cancel")


def _parting(world: "World", fault: Fault) -> float | None:
    """A failure during the next stop that has no failure as its cause: before the agents hear of
    the stop, or while the ranks exit. A slow host makes such a stop likely."""
    world.at_next_stop = partial(_fail_during_stop, world, fault)
    return _slow(world, fault)


def _fail_during_stop(world: "World", fault: Fault) -> None:
    running = _running(world)
    if not running:
        return
    world.took_effect("parting")
    ranks = _pick(running, fault)
    if fault.size < 0.3:
        _after(world, 0.0, ranks.agent.die)
    else:
        classes = ("gpu-lost", "uncorrectable-ecc", "xid-48-double-bit-ecc")
        broken = partial(ranks.fail_one, ERRORS[classes[int(fault.size * 7) % len(classes)]])
        _after(world, 0.0 if fault.size < 0.6 else 0.2, broken)


FAULTS: Mapping[str, "Callable[[World, Fault], float | None]"] = {
    "rank": _rank,
    "hang": _hang,
    "error": _error,
    "fabric": _fabric,
    "memory": _memory,
    "nan": _nan,
    "slow": _slow,
    "stuck": _stuck,
    "agent": _agent,
    "host": _host,
    "leader": _leader,
    "pause": _pause,
    "switch": _switch,
    "partition": _partition,
    "storage-slow": _storage_slow,
    "storage-full": _full,
    "storage-stale": _stale,
    "messages": _messages,
    "clock": _clock,
    "parting": _parting,
    "preemption": _preemption,
    "time-limit": _time_limit,
    "drain": _drain,
    "warning": _warning,
    "scheduler": _scheduler,
    "amnesia": _amnesia,
    "eviction": _eviction,
    "dead-spare": _dead_spare,
    "cancel": _cancel,
}
"""Kind -> function that starts the fault. It returns the duration in seconds; None: the fault found
nothing that it could break."""
