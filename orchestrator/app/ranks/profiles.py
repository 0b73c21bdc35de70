"""`ndctl profile`: has ranks of a running job profile their next steps."""

from collections.abc import Mapping
from typing import Any

from orchestrator.app.ask_leader import Request
from orchestrator.app.ranks.ask import Question, ask
from orchestrator.app.remote import Found
from orchestrator.contract.codec import encode
from orchestrator.contract.messages.agent_protocol import PROFILE_PATH, ProfileWish, RankProfiles
from orchestrator.errors import JobError
from orchestrator.seams import Clock

MARGIN_S = 15.0
"""How much longer than the leader this side waits."""
PERFETTO = "https://ui.perfetto.dev"
MEMORY_VIZ = "https://pytorch.org/memory_viz"


def rank_profiles(
    found: Found, environ: Mapping[str, str], clock: Clock, wish: ProfileWish
) -> RankProfiles:
    """Profiles of the next steps of some ranks. The job goes on.

    Raises:
        JobError: no ranks run, they cannot be profiled, or none of them has done its steps.
        BackendError: the leader could not be asked.
    """
    question = Question(
        request=Request(
            path=PROFILE_PATH,
            purpose="profile",
            body=encode(wish),
            timeout_s=wish.wait_s + MARGIN_S,
        ),
        in_a_pod=lambda copy: copy.profile(wish.ranks, wish.steps, wish.wait_s),
        if_over="to record steps of its next run, set train.profile",
    )
    taken = ask(found, environ, clock, question, RankProfiles)
    if not taken.ranks:
        whys = "; ".join(f"rank {rank}: {why}" for rank, why in taken.missing.items())
        raise JobError(
            f"job {found.run_dir.path.name} has no profile: {whys}",
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
