"""How many files a process may have open. A connection is one, and of those the first host of a
job has as many as there are hosts, or ranks.
"""

import resource

from orchestrator.contract.check_results import Finding

OWN = 256
"""Libraries, logs, devices."""
PER_HOST = 4
"""Of a check of all hosts on the first of them: two of its store, and of a group one or two."""
PER_RANK = 3
"""Of rank 0: one of the store, and one of each group of all ranks."""
AT_MOST = 1 << 20
"""Enough for all that can be asked here; some programs walk through all that they might have."""


def files_needed(hosts: int, ranks: int) -> int:
    """Of the process that has the most, on the first host of a job."""
    return OWN + max(PER_HOST * hosts, PER_RANK * ranks)


def judge_files(needed: int) -> Finding:
    """Whether as many can be had here: by the hard limit, which agents make theirs."""
    allowed = _count(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    found = f"hard limit {allowed}, the first host of the job needs {needed}"
    if allowed >= needed:
        return Finding(what="open files", verdict="ok", found=found)
    fix = (
        f"raise it to {needed} on the hosts that run the job: LimitNOFILE of slurmd's service or of"
    )
    fix += " the container runtime's, else /etc/security/limits.conf"
    return Finding(what="open files", verdict="warns", found=found, fix=fix)


def allow_files() -> int:
    """As many as this process, and so all that it starts, may have; says how many that is.

    The soft limit is 1,024 nearly everywhere, for programs that use select(), and is passed on by
    Slurm from the node on which a job was submitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_count(soft), min(_count(hard), AT_MOST))
    if wanted > _count(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _count(limit: int) -> int:
    return (1 << 63) - 1 if limit == resource.RLIM_INFINITY else limit
