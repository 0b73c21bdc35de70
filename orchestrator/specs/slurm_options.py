"""Options of sbatch and srun that a user writes as keys of `cluster.slurm`, without dashes.

`other_names.py` has those that are keys of a spec. Here are the others: what ndctl hands on, what
it does itself, and what has another unit.
"""

from collections.abc import Mapping

SECTION = "cluster.slurm"
SBATCH = frozenset(
    [
        "acctg_freq",
        "bb",
        "bbf",
        "begin",
        "bell",
        "burst_buffer",
        "core_spec",
        "cores_per_socket",
        "cpu_freq",
        "deadline",
        "delay_boot",
        "extra",
        "extra_node_info",
        "get_user_env",
        "gid",
        "gpu_freq",
        "gres_flags",
        "hold",
        "kill_on_invalid_dep",
        "mcs_label",
        "mincpus",
        "nice",
        "no_bell",
        "oom_kill_step",
        "oversubscribe",
        "overcommit",
        "power",
        "prefer",
        "priority",
        "profile",
        "propagate",
        "quotatype",
        "reboot",
        "sockets_per_node",
        "spread_job",
        "stepmgr",
        "thread_spec",
        "threads_per_core",
        "time_min",
        "tmp",
        "tres_bind",
        "tres_per_task",
        "uid",
        "use_min_nodes",
        "wait_all_nodes",
        "wckey",
    ]
)
"""Options that ndctl hands on to sbatch. `quotatype` is an option of some sites."""
SRUN = frozenset(["cpu_bind", "distribution", "gpu_bind", "hint", "mem_bind", "mpi", "network"])
"""Options that count where agents start."""
SENTENCES: Mapping[str, str] = {
    "signal": f"did you mean {SECTION}.notice_s? ndctl asks for the signal itself",
    "requeue": "remove it: ndctl requeues the job itself",
    "no_requeue": "remove it: ndctl requeues the job itself, unless its rules stop it",
    "no_kill": "remove it: ndctl goes on without a lost node itself",
    "open_mode": "remove it: logs of each attempt have files of their own",
    "export": f"did you mean {SECTION}.env?",
    "clusters": "remove it, and submit on a login node of that cluster",
    "ntasks_per_core": "remove it: ndctl starts one task for each host",
    "ntasks_per_gpu": "did you mean cluster.gpus_per_host? Each GPU has one rank",
    "gpus_per_task": "did you mean cluster.gpus_per_host? Each GPU has one rank",
    "mem_per_cpu": f"did you mean {SECTION}.mem, for a whole host?",
    "mem_per_gpu": f"did you mean {SECTION}.mem, for a whole host?",
    "cpus_per_gpu": f"did you mean {SECTION}.cpus_per_task, for a whole host?",
    "container_image": f"did you mean {SECTION}.container.image?",
    "container_mounts": f"did you mean {SECTION}.container.mounts?",
    "container_name": f"did you mean {SECTION}.container.image?",
    "container_workdir": f"did you mean {SECTION}.container.workdir?",
    "test_only": "leave it out: `ndctl submit SPEC --dry-run` submits nothing",
}


def fix_of_option(path: str, name: str) -> str | None:
    """The fix for the unknown key `path`, whose last word is `name` with underscores.

    None: no option of Slurm is known by this name.
    """
    if path.rpartition(".")[0] != SECTION:
        return None
    dashes = f'["--{name.replace("_", "-")}=…"]'
    if name in SBATCH:
        return f"write {SECTION}.sbatch_args: {dashes}"
    if name in SRUN:
        return f"write {SECTION}.srun_args: {dashes}"
    return SENTENCES.get(name)
