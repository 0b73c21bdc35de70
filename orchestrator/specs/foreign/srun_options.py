"""Options of the srun that starts a training, inside or outside of a job."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from orchestrator.specs.foreign.carried import Carried

FLAGS = re.compile(
    r"-[lukKOsEXvqQVHIZ]+|--(label|unbuffered|exact|overlap|overcommit|oversubscribe|exclusive|pty"
    r"|preserve-env|disable-status|no-kill|no-allocate|verbose|quiet|contiguous|spread-job"
    r"|use-min-nodes|multi-prog|kill-on-bad-exit|bcast|send-libs|propagate|resv-ports|immediate"
    r"|interactive|nice|x11|hold|test-only|(no-)?container-(mount-home|remap-root|entrypoint"
    r"|writable|readonly|entrypoint-log))"
)
"""Options that have no value, or only behind `=`: the next word may be the program."""
OF_A_STEP = frozenset(
    (
        *("label", "unbuffered", "wait", "kill_on_bad_exit", "overlap", "exact", "pty", "input"),
        *("jobid", "verbose", "quiet", "relative", "preserve_env", "disable_status", "multi_prog"),
        *("slurmd_debug", "no_allocate", "task_prolog", "task_epilog", "prolog", "epilog"),
        *("overcommit", "oversubscribe", "threads", "ntasks_per_socket", "ntasks_per_core"),
        *("het_group", "pack_group"),
    )
)
"""Options about the step and its output, which ndctl starts in its own way."""
BINDS = ("cpu_bind", "gpu_bind", "mem_bind")
OF_TASKS = re.compile(r"map_|mask_|\bmap:|\bmask:|rank|single|closest|per_task|slices")
"""Places for the tasks of a host, one by one."""


def of_srun(words: Sequence[str]) -> list[str]:
    """The options of srun itself, without the program behind them."""
    places = (at for at, word in enumerate(words) if PurePath(word).name == "srun")
    at = next(places, len(words) - 1) + 1
    first = at
    while at < len(words) and words[at].startswith("-"):
        alone = (
            FLAGS.fullmatch(words[at]) or "=" in words[at] or re.match(r"-[A-Za-z]\S", words[at])
        )
        has_value = at + 1 < len(words) and not words[at + 1].startswith("-")
        at += 2 if has_value and not alone else 1
    return [*words[first:at]]


def srun_args(carried: Carried, options: Mapping[str, str]) -> Iterator[str]:
    """Those that also count for the one task of ndctl on each host, as a spec has them."""
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}" + (f"={value}" if value else "")
        if name in BINDS and OF_TASKS.search(value):
            carried.leave(f"srun {flag}: it places several tasks of a host, and ndctl starts one")
        elif name == "mpi":
            carried.leave(f"srun {flag}: ranks have the variables of torchrun, and are not of MPI")
        elif len(name) > 1 and name not in OF_A_STEP and "container_" not in name:
            yield flag
