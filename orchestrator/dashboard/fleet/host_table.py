"""The table of hosts: what is recorded against each, and which jobs use it."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, Literal

from msgspec import Struct

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.columns import NOTE, Column, Line, Look, Table
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.fleet.summary import HostIncident
from orchestrator.host_strikes import LOCAL, Record, describe, hosts_json, hosts_text

Use = Literal["excluded", "never", "always", "allowed"]


class SeenIncident(Struct, frozen=True, kw_only=True):
    job: str
    user: str
    incident: HostIncident


class HostUse(Struct, frozen=True, kw_only=True):
    """One host of a cluster, as the jobs of one run root see it."""

    cluster: str
    host: str
    record: Record | None = None
    """Its strikes and its pin, if there are any."""
    jobs: tuple[JobRow, ...] = ()
    """Jobs that have it now."""
    incidents: tuple[SeenIncident, ...] = ()
    """Of all jobs that are known here, oldest first."""

    @property
    def use(self) -> Use:
        if self.record is None or self.cluster == LOCAL:
            return "allowed"
        if self.record.pin is not None:
            return self.record.pin.use
        return "excluded" if self.record.excluded_until is not None else "allowed"


def host_uses(records: Mapping[str, Sequence[Record]], rows: Iterable[JobRow]) -> list[HostUse]:
    """Every host that has a record, that a job uses, or that an incident names.

    A journal does not name the cluster of its hosts. It is the recorded cluster that has a host of
    that name, else the only recorded cluster if the backend is that of its jobs, else the backend.
    """
    rows = list(rows)
    clusters = [name for name in records if name != LOCAL]
    owners = {one.host: name for name in clusters for one in records[name]}
    only = clusters[0] if len(clusters) == 1 else ""
    backend_of_only = _backend_of(owners, rows)
    found = {
        (cluster, one.host): HostUse(cluster=cluster, host=one.host, record=one)
        for cluster, held in records.items()
        for one in held
    }
    jobs: dict[tuple[str, str], list[JobRow]] = {}
    incidents: dict[tuple[str, str], list[SeenIncident]] = {}

    def place_of(host: str, backend: str) -> tuple[str, str]:
        if backend == LOCAL:
            return LOCAL, host
        rest = only if only and backend == backend_of_only else backend
        return owners.get(host, rest), host

    for row in rows:
        if row.job is None:
            continue
        for host in row.job.placement:
            jobs.setdefault(place_of(host, row.backend), []).append(row)
        for one in row.job.incidents:
            seen = SeenIncident(job=row.name, user=row.user, incident=one)
            incidents.setdefault(place_of(one.host, row.backend), []).append(seen)
    for key in sorted({*found, *jobs, *incidents}):
        known = found.get(key, HostUse(cluster=key[0], host=key[1]))
        happened = sorted(incidents.get(key, ()), key=lambda one: one.incident.at)
        found[key] = HostUse(
            cluster=known.cluster,
            host=known.host,
            record=known.record,
            jobs=tuple(jobs.get(key, ())),
            incidents=tuple(happened),
        )
    return in_order(found.values())


def _backend_of(owners: Mapping[str, str], rows: Iterable[JobRow]) -> str:
    """The backend of the jobs on the recorded hosts, else of all jobs; empty if they have several.
    Jobs of this machine do not count."""
    known: set[str] = set()
    there: set[str] = set()
    for row in rows:
        if row.job is None or row.backend == LOCAL:
            continue
        known.add(row.backend)
        hosts = {*row.job.placement, *(one.host for one in row.job.incidents)}
        if not hosts.isdisjoint(owners):
            there.add(row.backend)
    found = there or known
    return next(iter(found)) if len(found) == 1 else ""


def in_order(hosts: Iterable[HostUse]) -> list[HostUse]:
    """Hosts that are not used first, then the most incidents first."""
    rank = ("never", "excluded", "always", "allowed")

    def key(one: HostUse) -> tuple[int, float, int, str, str]:
        return rank.index(one.use), -_weight(one), -len(one.incidents), one.cluster, one.host

    return sorted(hosts, key=key)


def _weight(host: HostUse) -> float:
    return 0.0 if host.record is None else host.record.score


def _strikes(host: HostUse, now: float) -> str:
    if host.record is None or not host.record.strikes:
        return format.UNKNOWN
    return f"{len(host.record.strikes)} ({host.record.score:.2f})"


def _used_by(host: HostUse, now: float) -> str:
    names = [f"{row.name} ({row.user})" for row in host.jobs]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more or format.UNKNOWN


def _last(host: HostUse, now: float) -> str:
    if not host.incidents:
        return format.UNKNOWN
    last = host.incidents[-1]
    drill = " (drill)" if last.incident.drill else ""
    ago = format.short_duration(now - last.incident.at)
    return f"{last.incident.kind}{drill} in {last.job} {ago} ago"


def _note(host: HostUse, now: float) -> str:
    if host.record is None or host.cluster == LOCAL:
        return ""
    return "" if host.use == "allowed" else describe(host.record, None)


def _look(title: str, host: HostUse, now: float) -> Look:
    if title == "USE":
        return {"never": {"fg": "red"}, "excluded": {"fg": "yellow"}}.get(host.use, {})
    return {}


TABLE: Table[HostUse] = Table(
    columns=(
        Column("HOST", lambda host, now: host.host),
        Column("CLUSTER", lambda host, now: host.cluster),
        Column("USE", lambda host, now: host.use),
        Column("STRIKES", _strikes, right=True),
        Column("INCIDENTS", lambda host, now: str(len(host.incidents)), right=True),
        Column("USED BY", _used_by),
        Column("LAST INCIDENT", _last),
        Column(NOTE, _note, repeats=False),
    ),
    dropped_first=("CLUSTER", "LAST INCIDENT", "STRIKES", "USED BY", "INCIDENTS"),
    look=_look,
)


def host_lines(hosts: Sequence[HostUse], now: float, width: int | None) -> list[Line]:
    return TABLE.lines(hosts, now, width)


def host_json(host: HostUse) -> dict[str, Any]:
    record = host.record or Record(host=host.host, strikes=(), excluded_until=None)
    (body,) = hosts_json({host.cluster: (record,)})
    return {
        **body,
        "use": host.use,
        "jobs": [{"name": row.name, "user": row.user, "state": row.state} for row in host.jobs],
        "incidents": [
            {
                "at": one.incident.at,
                "job": one.job,
                "user": one.user,
                "attempt": one.incident.attempt,
                "kind": one.incident.kind,
                "drill": one.incident.drill,
            }
            for one in host.incidents
        ],
    }


def host_text(host: HostUse, zone: tzinfo | None) -> str:
    """All about one host: strikes with their evidence, the jobs that use it, and its incidents."""
    known = hosts_text({host.cluster: () if host.record is None else (host.record,)}, zone)
    lines = [known or f"{host.cluster}/{host.host}  no strikes"]
    lines += [
        f"  used by {row.name} of {row.user}: {row.state}, {row.run_dir}" for row in host.jobs
    ]
    if host.incidents:
        lines.append(f"  {format.count(len(host.incidents), 'incident')} in the jobs known here:")
    for one in host.incidents:
        drill = " (drill)" if one.incident.drill else ""
        lines.append(
            f"    {format.date_time(one.incident.at, zone)}  {one.incident.kind}{drill}"
            f" in {one.job} of {one.user}, attempt {one.incident.attempt}"
        )
    return "\n".join(lines)
