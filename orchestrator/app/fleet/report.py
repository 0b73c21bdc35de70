"""`ndctl report`: reads a job once and writes its story."""

from collections.abc import Mapping
from datetime import tzinfo
from pathlib import Path

from msgspec.structs import replace

from orchestrator.app.commands import commands_for
from orchestrator.app.remote import Found
from orchestrator.app.snapshots import with_scheduler
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.dashboard.format import one_line
from orchestrator.dashboard.reading.job_reader import JobReader
from orchestrator.dashboard.report.costs import Price
from orchestrator.dashboard.report.story import Report, Told, report_of
from orchestrator.dashboard.time_spent.read import counted_until
from orchestrator.errors import JobError, SpecError
from orchestrator.job.incident import Incident
from orchestrator.job_paths import user_price
from orchestrator.journal.journal import Tail
from orchestrator.seams import Clock


def make_report(
    found: Found,
    only: int | None,
    price: float | None,
    environ: Mapping[str, str],
    clock: Clock,
    zone: tzinfo | None = None,
) -> Report:
    """
    Args:
        only: number of the one incident to tell; None: all.
        price: of a GPU for an hour; None: that of the inventory, or of the user's configuration.

    Raises:
        JobError: the job has no such incident, or its submission did not finish.
    """
    name = found.run_dir.path.name
    reader = None
    if found.run_dir.journal.exists():
        reader = JobReader(found.run_dir, commands_for(found, environ))
    read = None if reader is None else reader.look(clock.now())
    if read is None:
        raise JobError(f"the submission of job {name} did not finish", fix="submit it again")
    (snapshot,) = with_scheduler([(found, read.snapshot)], environ, clock)
    spent = read.counted.until(counted_until(snapshot))
    told = Told(
        snapshot=snapshot,
        view=replace(snapshot.view, time=spent, saved_steps=read.saved_steps),
        time=spent,
        price=_price(price, snapshot.seen.run.plan.price_per_gpu_hour, environ),
        zone=zone,
        only=only,
    )
    if only is not None and not told.incidents:
        raise _no_such(name, only, told.view.incidents)
    return report_of(told, Tail(found.run_dir.journal).each())


def _no_such(name: str, only: int, known: tuple[Incident, ...]) -> JobError:
    if not known:
        return JobError(f"{name} had no incident", fix="leave out --incident")
    there = "; ".join(f"{one.id} ({one.kind}: {one_line(one.cause)[:60]})" for one in known)
    return JobError(f"{name} has no incident {only}", fix=f"its incidents: {there}")


def _price(said: float | None, planned: float | None, environ: Mapping[str, str]) -> Price | None:
    if said is not None:
        return Price(per_gpu_hour=said, origin="--price")
    if planned is not None:
        return Price(per_gpu_hour=planned, origin="the inventory")
    usual = user_price(environ)
    return None if usual is None else Price(per_gpu_hour=usual, origin="your configuration")


def write_report(path: Path, text: str) -> int:
    """Returns the size in bytes. Raises SpecError if the file cannot be written."""
    data = text.encode(errors="backslashreplace")
    try:
        write_whole(path, data)
    except OSError as exc:
        raise SpecError(
            f"{path} cannot be written: {exc.strerror}", fix="name a file in a folder of yours"
        ) from exc
    return len(data)
