"""Limit of open files. Every connection is one, and the first host of a job has one or more per
host or rank.
"""

import resource

from orchestrator.contract.check_results import Finding

OWN = 256
"""Files of libraries, logs and devices."""
PER_HOST = 4
"""A fabric check on the first host: two connections of its store and one or two of its group, for
each host."""
PER_RANK = 3
"""Rank 0: one connection of the store and one of each group of all ranks, for each rank."""
AT_MOST = 1 << 20
"""More than any job needs. A higher limit is not set, because some programs walk through all
possible descriptors."""


def files_needed(hosts: int, ranks: int) -> int:
    """Number for the process with the most open files, on the first host of a job."""
    return OWN + max(PER_HOST * hosts, PER_RANK * ranks)


def judge_files(needed: int) -> Finding:
    """Whether the hard limit is enough. Agents raise their soft limit to it."""
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
    """Raise the limit of this process and its children as far as allowed; returns the new limit.

    The soft limit is 1,024 on nearly all systems, for programs that use select(), and Slurm copies
    it from the node on which a job was submitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_count(soft), min(_count(hard), AT_MOST))
    if wanted > _count(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _count(limit: int) -> int:
    return (1 << 63) - 1 if limit == resource.RLIM_INFINITY else limit
