"""`ndctl profile`: has ranks of a running job profile their next steps."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from orchestrator.app.ask_leader import Request, ask_leader
from orchestrator.app.remote import Found
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.messages.agent_protocol import PROFILE_PATH, ProfileWish, RankProfiles
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, JobError
from orchestrator.journal.snapshot import replay
from orchestrator.seams import JobCopy

MARGIN_S = 15.0
"""How much longer than the leader this side waits."""
PERFETTO = "https://ui.perfetto.dev"
MEMORY_VIZ = "https://pytorch.org/memory_viz"


def rank_profiles(found: Found, environ: Mapping[str, str], wish: ProfileWish) -> RankProfiles:
    """Profiles of the next steps of some ranks. The job goes on.

    Raises:
        JobError: no ranks run, they cannot be profiled, or none of them has done its steps.
        BackendError: the leader could not be asked.
    """
    run, name = replay(found.run_dir), found.run_dir.path.name
    if run.job is None or run.ending is not None:
        raise JobError(
            f"job {name} is not running: {run.state}",
            fix="to record steps of its next run, set train.profile",
        )
    if found.copy is not None:
        return _complete(_in_a_pod(found.copy, name, wish), name)
    request = Request(
        path=PROFILE_PATH, purpose="profile", body=encode(wish), timeout_s=wish.wait_s + MARGIN_S
    )
    answer = ask_leader(found.run_dir, run.job.launch.launch, environ, request)
    if answer is None:
        raise BackendError(
            f"the leader of {name} did not answer; the job is {run.state}",
            fix="run the command on a machine that reaches the hosts of the job",
        )
    if answer.status == HTTPStatus.CONFLICT:
        raise JobError(f"job {name}: {answer.text}")
    if answer.status != HTTPStatus.OK:
        raise BackendError(f"the leader of {name} refused: {answer.status} {answer.text}")
    return _complete(_decoded(answer.text, name), name)


def _in_a_pod(copy: JobCopy, name: str, wish: ProfileWish) -> RankProfiles:
    done = copy.profile(wish.ranks, wish.steps, wish.wait_s)
    if done is None:
        raise BackendError(
            f"no pod of {name} could be asked",
            fix="you need the right to create pods/exec in the namespace of the job",
        )
    if done.code:
        raise JobError(done.err.removeprefix("error: ") or f"{name}: exit code {done.code}")
    return _decoded(done.out, name)


def _decoded(text: str, name: str) -> RankProfiles:
    try:
        body = read_json(text)
        body.pop("schema_version", None)
        taken: RankProfiles = decode(RankProfiles, body)
    except (ValueError, AttributeError, Invalid) as exc:
        raise BackendError(f"the answer of {name} is unreadable: {exc}") from exc
    return taken


def _complete(taken: RankProfiles, name: str) -> RankProfiles:
    """`taken`, unless it has no profile at all."""
    if not taken.ranks:
        whys = "; ".join(f"rank {rank}: {why}" for rank, why in taken.missing.items())
        raise JobError(
            f"job {name} has no profile: {whys}",
            fix="see what its ranks do with `ndctl snapshot`, then ask again",
        )
    return taken


def profiles_json(taken: RankProfiles) -> dict[str, Any]:
    body: dict[str, Any] = encode(taken)
    return body


def describe_profiles(taken: RankProfiles) -> str:
    """The files of each rank, and what shows them."""
    lines = []
    for _, one in sorted(taken.ranks.items(), key=lambda pair: int(pair[0])):
        lines.append(f"rank {one.rank}, attempt {one.attempt}, from step {one.first_step}:")
        lines += [f"  {file}" for file in one.files]
    lines += [f"missing: rank {rank}: {why}" for rank, why in sorted(taken.missing.items())]
    lines += ["", f"open a trace at {PERFETTO} or with chrome://tracing"]
    if any(len(one.files) > 1 for one in taken.ranks.values()):
        lines.append(f"open a memory snapshot at {MEMORY_VIZ}")
    return "\n".join(lines)
