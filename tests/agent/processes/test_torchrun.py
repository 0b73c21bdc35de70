"""The command line of torchrun, and the environment of its ranks."""

import json
import os
from pathlib import Path

from msgspec.structs import replace

from orchestrator.agent.processes.torchrun import (
    KEEPER,
    HostPlace,
    environment,
    render,
    with_defaults,
)
from orchestrator.contract.drills import Drill
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.run_spec import Keep, RunSpec
from orchestrator.run_module import command

PLACE = HostPlace(
    python="/opt/bin/python",
    run_dir=RunDir(Path("/runs/job")),
    host="host-1",
    address="10.0.0.2",
    socket=Path("/tmp/ndctl-0-ab/ranks.sock"),
    parent=77,
)
START = Start(
    attempt=2,
    node_rank=1,
    nodes=4,
    ranks_per_host=8,
    master_address="10.0.0.1",
    master_port=20_123,
    config="/runs/job/trainer-1.json",
    drills=(Drill(id=1, fault="kill", target="rank", index=9, step=5),),
    skip=(Window(first=3, last=4),),
)


def test_torchrun_starts_each_rank_below_a_rank_watcher() -> None:
    assert render(START, PLACE) == [
        *command("/opt/bin/python", "trainer.rank.torchrun"),
        *("--nnodes=4", "--nproc-per-node=8"),
        *("--rdzv-backend=ndctl", "--rdzv-endpoint=10.0.0.1:20123", "--rdzv-conf=rank=1"),
        "--local-addr=10.0.0.2",
        "--log-dir=/tmp/ndctl-0-ab",
        *("--max-restarts=0", "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"),
        *("--start-method=fork", "--run-path", str(KEEPER)),
        *("--lock", "/runs/job/logs/ranks-host-1.lock"),
        *("--log-dir", "/runs/job/logs/attempt-2/host-1", "--"),
        *command("/opt/bin/python", "trainer"),
        "/runs/job/trainer-1.json",
    ]


def test_ranks_get_their_attempt_host_and_heartbeat_socket() -> None:
    values = dict(environment(START, PLACE, {}))
    drills = json.loads(values.pop("NDCTL_DRILLS"))
    assert json.loads(values.pop("NDCTL_SKIP")) == [{"first": 3, "last": 4}]
    assert drills == [{"id": 1, "fault": "kill", "target": "rank", "index": 9, "step": 5}]
    assert json.loads(values.pop("NDCTL_PACE"))["exposure"]["failures"] == 0
    assert values == {
        "NDCTL_ATTEMPT": "2",
        "NDCTL_RESUME": "newest",
        "NDCTL_HOST": "host-1",
        "NDCTL_HEARTBEAT_SOCKET": "/tmp/ndctl-0-ab/ranks.sock",
        "NDCTL_TRACE_DIR": "/runs/job/traces/attempt-2",
        "NDCTL_RUN_DIR": "/runs/job",
    }


def test_ranks_of_a_script_get_its_variables_and_search_path() -> None:
    run = RunSpec(script="train.py", args=("--lr", "1"), workdir="/work", env={"A": "b"})
    start = replace(START, run=run, keep=Keep(keep=3))
    program = render(start, PLACE)[-5:]
    assert program == ["trainer.program", "/work", "train.py", "--lr", "1"]
    values = environment(start, PLACE, with_defaults({}))
    assert values["A"] == "b"
    assert json.loads(values["NDCTL_KEEP"]) == {"keep": 3, "keep_every": None, "verify": True}
    # A program that the script starts finds the modules in its folder.
    assert "PYTHONSAFEPATH" not in values


def test_hosts_import_what_a_script_needs() -> None:
    torchrun = PLACE.imports[0]
    auto = PLACE.with_program(RunSpec(script="train.py", env={"HF_HOME": "/models"}))
    assert auto.environ == {"HF_HOME": "/models"}
    assert (auto.imports, auto.learned) == ((torchrun,), Path("/runs/job/imports.json"))
    named = PLACE.with_program(RunSpec(script="train.py", preload=("transformers",)))
    assert (named.imports, named.learned) == ((torchrun, "transformers"), None)


def test_ndctl_variables_of_the_agent_are_not_passed_on() -> None:
    values = environment(START, PLACE, {"NDCTL_ATTEMPT": "9", "PATH": os.defpath})
    assert (values["NDCTL_ATTEMPT"], values["PATH"]) == ("2", os.defpath)


def test_a_rank_has_one_thread_unless_the_agents_environment_says_otherwise() -> None:
    assert with_defaults({})["OMP_NUM_THREADS"] == "1"
    assert with_defaults({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
