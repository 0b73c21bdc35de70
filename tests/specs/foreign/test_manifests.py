"""Manifests that create pods which train together, with the parts that public examples have."""

import json
import re
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.errors import SpecError
from orchestrator.load import load_spec
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.pods.manifests import MOST_VALUES
from orchestrator.specs.foreign.taking_over import taken_over

POD = """
          nodeSelector: {{kind: $NODE_KIND}}
          tolerations: [{{key: dedicated, value: train, effect: NoSchedule}}, {{operator: Exists}}]
          affinity: {{podAntiAffinity: {{}}}}
          priorityClassName: high
          hostNetwork: true
          restartPolicy: OnFailure
          volumes:
          - {{name: data, persistentVolumeClaim: {{claimName: lake}}}}
          - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: 32Gi}}}}
          - {{name: odd, nfs: {{server: a, path: /b}}}}
          containers:
          - name: pytorch
            image: ${{IMAGE}}
            imagePullPolicy: Always
            command: {command}
            env:
            - {{name: NCCL_DEBUG, value: INFO}}
            - {{name: MASTER_PORT, value: "29500"}}
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hub, key: token}}}}
            - name: POD_IP
              valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}
            envFrom: [{{configMapRef: {{name: common}}}}]
            resources:
              limits: {{nvidia.com/gpu: 8, vpc.amazonaws.com/efa: 4, memory: 100Gi}}
            securityContext: {{privileged: true}}
            volumeMounts:
            - {{name: data, mountPath: /data}}
            - {{name: shm, mountPath: /dev/shm}}
            - {{name: odd, mountPath: /odd}}
"""
WORDS = '["torchrun", "--nproc_per_node=8", "/app/train.py", "--data=/data"]'
SCRIPT = """
            - bash
            - -c
            - |
              set -e
              apt-get install -y libx
              cd /app
              export LEVEL=2
              exec torchrun --nproc_per_node=8 train.py \\
                --data=/data"""
HEADS = {
    "PyTorchJob": "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n{meta}\nspec:\n"
    "  pytorchReplicaSpecs:\n    Worker:\n      replicas: 4\n      template:\n        spec:{pod}",
    "JobSet": "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n{meta}\nspec:\n"
    "  replicatedJobs:\n  - name: workers\n    replicas: 2\n    template:\n      spec:\n"
    "       parallelism: 2\n       template:\n        spec:{pod}",
    "Job": "apiVersion: batch/v1\nkind: Job\n{meta}\nspec:\n  parallelism: 4\n  template:\n"
    "        spec:{pod}",
    "volcano": "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\n{meta}\nspec:\n"
    "  schedulerName: volcano\n  tasks:\n  - replicas: 4\n    template:\n        spec:{pod}",
    "LeaderWorkerSet": "apiVersion: leaderworkerset.x-k8s.io/v1\nkind: LeaderWorkerSet\n{meta}\n"
    "spec:\n  leaderWorkerTemplate:\n    size: 4\n    workerTemplate:\n        spec:{pod}",
    "runtime": "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainingRuntime\n{meta}\nspec:\n"
    "  mlPolicy: {{numNodes: 4, torch: {{numProcPerNode: 8}}}}\n  template:\n   spec:\n"
    "    replicatedJobs:\n    - name: node\n      template:\n       spec:\n        template:\n"
    "         spec:{pod}",
}
JOB_HEAD = "apiVersion: batch/v1\nkind: Job\n"
META = "metadata: {name: big.run, namespace: lab, labels: {kueue.x-k8s.io/queue-name: q, team: a}}"


def manifest(kind: str, command: str = WORDS) -> str:
    return HEADS[kind].format(meta=META, pod=POD.format(command=command))


def taken(text: str) -> Carried:
    return taken_over(text, Path("manifest.yaml"))


def spec_of(carried: Carried) -> Any:
    text = carried.text("manifest.yaml")
    return load_spec(text, "job.yaml", environ=dict.fromkeys(re.findall(r"\$\{(\w+)", text), "2"))


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_manifest_says_is_in_the_spec(kind: str) -> None:
    carried = taken(manifest(kind))
    spec, said = spec_of(carried), "\n".join(carried.notes())
    here = spec.cluster.kubernetes
    assert spec.name == "big-run"
    assert spec.run.words == ("/app/train.py", "--data=/data")
    assert (spec.cluster.hosts, spec.cluster.gpus_per_host) == (4, 8)
    assert (here.namespace, here.queue, here.labels) == ("lab", "q", {"team": "a"})
    assert (here.rdma_resource, here.rdma_count) == ("vpc.amazonaws.com/efa", 4)
    assert (here.memory, here.shm, here.gpu_resource) == ("100Gi", "32Gi", "nvidia.com/gpu")
    assert (here.host_network, here.priority_class) == (True, "high")
    assert here.node_selector == {"kind": "2"}
    operators = [(one.key, one.operator, one.value) for one in here.tolerations]
    assert operators == [("dedicated", "Equal", "train"), ("", "Exists", "")]
    assert here.env["NCCL_DEBUG"] == "INFO"
    assert here.env["HF_TOKEN"].secret == "hub"
    assert here.env_from[0].config_map == "common"
    assert "MASTER_PORT" not in here.env
    assert [(one.mount_path, one.claim, one.read_only) for one in here.volumes] == [
        ("/data", "lake", False)
    ]
    assert here.runs.claim == "lake"
    assert here.pod_template["spec"]["affinity"] == {"podAntiAffinity": {}}
    own = here.pod_template["spec"]["containers"][0]
    assert own["securityContext"] == {"privileged": True}
    assert [one["name"] for one in own["env"]] == ["POD_IP"]
    assert own["volumeMounts"] == [{"name": "odd", "mountPath": "/odd"}]
    assert [one["name"] for one in here.pod_template["spec"]["volumes"]] == ["odd"]
    assert "to set before you submit, or to replace here: " in said
    assert "build an image with ndctl on top of ${IMAGE}" in said
    assert here.gang_scheduler == ("volcano" if kind == "volcano" else "auto")


@pytest.mark.parametrize("kind", ["PyTorchJob", "JobSet"])
def test_a_command_that_is_a_script_is_read(kind: str) -> None:
    carried = taken(manifest(kind, SCRIPT))
    spec = spec_of(carried)
    assert spec.run.words == ("train.py", "--data=/data")
    assert spec.run.workdir == "/app"
    assert spec.run.env == {"LEVEL": "2"}
    assert any("apt-get install" in one for one in carried.left)


def test_master_and_worker_are_hosts_that_are_alike() -> None:
    text = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: a}
spec:
  nprocPerNode: auto
  elasticPolicy: {maxRestarts: 9}
  runPolicy: {ttlSecondsAfterFinished: 60}
  pytorchReplicaSpecs:
    Master: {replicas: 1, template: {spec: {containers: [{image: a, args: [/t.py]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{image: b, args: [/t.py]}]}}}
"""
    carried = taken(text)
    spec = spec_of(carried)
    assert (spec.cluster.hosts, spec.cluster.gpus_per_host) == (3, 1)
    assert spec.cluster.kubernetes.gpu_resource is None
    assert spec.cluster.kubernetes.ttl_after_finished == 60
    assert spec.resilience.max_restarts == 9
    assert any("where the Master's pods differ" in one for one in carried.left)


TRAINJOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: a}
spec:
  runtimeRef: {name: big.run}
  trainer: {image: mine, numNodes: 2, numProcPerNode: 8, command: [torchrun, /mine.py]}
"""


def test_a_trainjob_with_its_runtime_is_whole() -> None:
    carried = taken(f"{TRAINJOB}---\n{manifest('runtime')}")
    spec = spec_of(carried)
    assert (spec.run.script, spec.cluster.hosts) == ("/mine.py", 2)
    assert spec.cluster.kubernetes.image == "mine"
    assert spec.cluster.kubernetes.kind == "trainjob"
    assert spec.cluster.kubernetes.rdma_count == 4
    assert not any("runtime" in one for one in carried.left)


def test_a_trainjob_alone_says_what_is_missing() -> None:
    carried = taken(TRAINJOB)
    spec = spec_of(carried)
    assert any("what the runtime big.run adds" in one for one in carried.left)
    # The runtime may ask for the GPUs.
    assert spec.cluster.kubernetes.gpu_resource == "nvidia.com/gpu"
    assert spec.cluster.gpus_per_host == 8


def test_the_launcher_of_mpi_and_the_cluster_of_ray_are_left_out() -> None:
    mpi = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: a}
spec:
  slotsPerWorker: 2
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{command: [mpirun, -n, "4", python, t.py]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{image: b, command: [/usr/sbin/sshd]}]}}}
"""
    carried = taken(mpi)
    spec = spec_of(carried)
    assert (spec.run.words, spec.cluster.hosts, spec.cluster.gpus_per_host) == (("t.py",), 2, 2)
    ray = """
apiVersion: ray.io/v1
kind: RayJob
metadata: {generateName: a-}
spec:
  entrypoint: cd /app && python t.py --x 'a b'
  rayClusterSpec:
    workerGroupSpecs:
    - replicas: 3
      template: {spec: {containers: [{image: c, resources: {limits: {nvidia.com/gpu: "4"}}}]}}
"""
    carried = taken(ray)
    spec = spec_of(carried)
    assert (spec.run.words, spec.cluster.hosts, spec.cluster.gpus_per_host) == (
        ("t.py", "--x", "a b"),
        3,
        4,
    )
    assert any("without Ray" in one for one in carried.left)


def test_a_program_that_is_not_found_is_asked_for() -> None:
    carried = taken(manifest("Job", '["python3", "-c", "print(1)"]'))
    assert any("set run" in one or "check run" in one for one in carried.before)


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Pod\n",
        "apiVersion: batch/v1\nkind: Job\nspec:\n",
        '{"apiVersion": "v1", "kind": "Pod"}',
    ],
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="no job that trains is in this manifest"):
        taken(text)


# Aliases of aliases: ten lines that stand for a billion values.
BOMB = "  a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"  {new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_a_job_that_is_too_large_is_refused_as_such() -> None:
    text = f"{JOB_HEAD}spec:\n{BOMB}"
    assert len(text) < MOST_VALUES
    with pytest.raises(SpecError, match=r"too large: together they have more than 20,000 values"):
        taken(text)


def test_objects_without_pods_may_be_many_and_large() -> None:
    head = "apiVersion: v1\nkind: ConfigMap\n"
    many = "".join(f"---\n{head}metadata: {{name: c{at}}}\n" for at in range(MOST_VALUES // 5))
    carried = taken(f"{head}metadata: {{name: bomb}}\ndata:\n{BOMB}{many}---\n{manifest('Job')}")
    assert carried.cluster["hosts"] == 4
    [said] = [one for one in carried.before if "create what else is in" in one]
    assert said.endswith(f"ConfigMap c18, and {MOST_VALUES // 5 - 19} more")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{JOB_HEAD}metadata: {{name: a\nspec: {{}}\n", "m:4:5: not YAML: "),
        (f"{JOB_HEAD}---\n{JOB_HEAD}  spec\n: [", "m:7:1: not YAML: "),
        (
            f"{JOB_HEAD}spec: {{x: {'[' * 3000}{']' * 3000}}}\n",
            "m:3: lists and mappings are nested",
        ),
        (f"{JOB_HEAD}spec: {{a: 2024-13-45}}\n", "m: not YAML: month must be in"),
        (f"{JOB_HEAD}spec: {{a: !Ref b}}\n", "m:3:11: not YAML: could not determine a constructor"),
        ('{"apiVersion": "v1", "kind": "Pod"}\n{"kind": }', "m:2:10: not JSON: Expecting value"),
        ('{"kind": "List",\n "items": [}', "m:2:12: not JSON: Expecting value"),
        ('{"apiVersion": "v1", "kind": "Pod"', "m:1:35: not JSON: Expecting"),
    ],
)
def test_a_manifest_that_is_not_yaml_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        taken_over(text, PurePath("m"))
    assert str(refused.value).startswith(said)
    assert "kubectl" not in str(refused.value)


def test_validate_says_where_a_manifest_is_not_yaml(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"{JOB_HEAD}metadata: {{name: a\nspec: {{}}\n")
    done = CliRunner().invoke(cli, ["validate", str(file)])
    assert "m.yaml:4:5: not YAML: " in str(done.exception)


@pytest.mark.parametrize("start", ["apiVersion: v1\nkind: Job\nx: ", '{"apiVersion": 1, "kind": '])
def test_brackets_without_end_do_not_crash_the_reader(start: str) -> None:
    with pytest.raises(SpecError):
        taken(start + "[" * 200_000)


@pytest.mark.parametrize("kind", ["PyTorchJob", "List", "PodList"])
def test_json_of_kubectl_is_read_as_its_yaml(kind: str) -> None:
    one = yaml.safe_load(manifest("PyTorchJob"))
    one["metadata"]["annotations"] = {
        "note": "\U0001f680",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
    }
    whole = one if kind == "PyTorchJob" else {"apiVersion": "v1", "items": [one], "kind": kind}
    carried = taken(json.dumps(whole, indent=4))
    assert carried.cluster["hosts"] == 4
    assert carried.run["script"] == "/app/train.py"
    assert carried.cluster["kubernetes"]["annotations"] == {"note": "\U0001f680"}


def test_a_template_that_makes_a_whole_manifest_is_one_of_helm() -> None:
    with pytest.raises(SpecError, match="this is a template of Helm"):
        taken('{{- tpl ($.Files.Get "job.yaml") . }}')


def test_objects_of_json_may_follow_each_other() -> None:
    one = json.dumps(yaml.safe_load(manifest("PyTorchJob")), indent=4)
    carried = taken(f'{one}\n{{"apiVersion": "v1", "kind": "Secret", "metadata": {{"name": "s"}}}}')
    assert carried.cluster["hosts"] == 4
    assert any("if the job needs it: Secret s" in said for said in carried.before)


@pytest.mark.parametrize("text", [manifest("Job"), "#!/bin/bash\n#SBATCH -N 4\nsrun a.py\n"])
def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "m"
    file.write_text(text, encoding="utf-8-sig")
    done = CliRunner().invoke(cli, ["init", "--from", str(file), "-"])
    assert (done.exit_code, "hosts: 4" in done.output) == (0, True)
    assert "line 1:" not in done.output


@pytest.mark.parametrize(
    ("trainer", "guessed"),
    [("{numNodes: 2}", True), ("{numProcPerNode: 4}", False), ("{resourcesPerNode: {}}", False)],
)
def test_gpus_that_only_a_missing_runtime_knows_are_asked_for(trainer: str, guessed: bool) -> None:
    carried = taken(
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {name: a}\n"
        f"spec:\n  runtimeRef: {{name: torch}}\n  trainer: {trainer}\n"
    )
    assert any("set cluster.gpus_per_host, 1 here" in one for one in carried.before) == guessed


def test_labels_of_the_controller_of_jobs_stay_behind() -> None:
    job = yaml.safe_load(manifest("Job"))
    job["spec"]["template"]["metadata"] = {"labels": {"controller-uid": "1", "job-name": "a"}}
    job["spec"]["template"]["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "a"
    assert taken(json.dumps(job)).cluster["kubernetes"]["labels"] == {"team": "a"}
    del job["spec"]["template"]["metadata"]["labels"]["controller-uid"]
    kept = taken(json.dumps(job)).cluster["kubernetes"]["labels"]
    assert kept == {"team": "a", "job-name": "a"}, "a person may have given it"


def test_a_list_without_objects_has_no_kinds_to_name() -> None:
    with pytest.raises(SpecError, match="this manifest is a list without objects"):
        taken('{"apiVersion": "v1", "items": [], "kind": "List"}')


def test_a_job_of_ndctl_has_a_spec_already() -> None:
    text = manifest("PyTorchJob").replace("team: a", "ndctl.dev/job: big")
    with pytest.raises(SpecError, match="belongs to big, a job of ndctl") as refused:
        taken(text)
    command = r"kubectl -n lab get configmap big-launch -o jsonpath='{.data.spec\.yaml}'"
    assert command in refused.value.fix


def test_init_writes_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_text(manifest("PyTorchJob"))
    done = CliRunner().invoke(cli, ["init", "--from", "m.yaml", "mine.yaml"])
    assert done.exit_code == 0, done.output
    assert "wrote mine.yaml; check it with `ndctl validate mine.yaml`" in done.output
    environ = {"IMAGE": "img", "NODE_KIND": "gpu"}
    done = CliRunner().invoke(
        cli, ["render", "mine.yaml", "--set", "cluster.gpu=h100-sxm-80gb"], env=environ
    )
    assert done.exit_code == 0, (done.output, done.exception)
    for words in ("image: img", "claimName: lake", "vpc.amazonaws.com/efa: '4'", "replicas: 3"):
        assert words in done.output
    refused = CliRunner().invoke(cli, ["init", "--from", "m.yaml", "--hosts", "2", "b.yaml"])
    assert "--from cannot be combined" in refused.output


def test_limits_that_differ_from_requests_stay_limits() -> None:
    carried = taken(
        """
apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  template:
    spec:
      containers:
      - image: a
        args: [/t.py]
        resources:
          requests: {cpu: 2, memory: 4Gi, ephemeral-storage: 9Gi}
          limits: {cpu: 4, memory: 8Gi}
"""
    )
    here = spec_of(carried).cluster.kubernetes
    assert (here.cpu, here.memory) == ("2", "4Gi")
    assert here.pod_template["spec"]["containers"][0]["resources"] == {
        "limits": {"cpu": 4, "memory": "8Gi"},
        "requests": {"ephemeral-storage": "9Gi"},
    }


BESIDE = """
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
---
apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  parallelism: 2
  template:
    spec:
      initContainers:
      - {name: fetch, image: f, volumeMounts: [{name: libs, mountPath: /libs}]}
      containers:
      - name: daemon
        image: d
        env: [{name: BUCKET, value: "${BUCKET}"}]
        volumeMounts: [{name: sockets, mountPath: /run/d}]
      - name: main
        image: m
        command: [bash, -c, "wget http://h/t.py -O /t.py; torchrun --nproc-per-node 8 /t.py"]
        resources: {limits: {nvidia.com/gpu: 8}}
        volumeMounts: [{name: libs, mountPath: /libs, subPath: x}]
      volumes:
      - {name: libs, emptyDir: {}}
      - {name: sockets, hostPath: {path: /run/d}}
"""


def test_containers_beside_the_training_come_along() -> None:
    carried = taken(BESIDE)
    spec = spec_of(carried)
    template = spec.cluster.kubernetes.pod_template["spec"]
    assert spec.cluster.kubernetes.image == "m"
    assert [one["name"] for one in template["containers"]] == ["pytorch", "daemon"]
    assert [one["name"] for one in template["initContainers"]] == ["fetch"]
    assert [one["name"] for one in template["volumes"]] == ["libs", "sockets"]
    assert template["containers"][0]["volumeMounts"][0]["subPath"] == "x"
    said = "\n".join(carried.notes())
    assert "check ${BUCKET} in pod_template, where ndctl replaces no variables" in said
    assert "create what else is in manifest.yaml, if the job needs it: ConfigMap settings" in said
    assert "in its command: wget" in said


def test_the_pods_of_mpi_in_volcano_run_what_its_master_starts() -> None:
    carried = taken(
        """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: a}
spec:
  schedulerName: volcano
  tasks:
  - name: master
    replicas: 1
    template:
      spec:
        containers:
        - {image: a, command: [sh, -c, "H=`cat /hosts`; mpiexec --host ${H} -np 8 python t.py"]}
  - {name: worker, replicas: 4, template: {spec: {containers: [{image: b, command: [sshd]}]}}}
"""
    )
    spec = spec_of(carried)
    assert (spec.run.words, spec.cluster.hosts, spec.cluster.gpus_per_host) == (("t.py",), 4, 2)
    assert spec.cluster.kubernetes.image == "b"


def test_the_pods_of_a_runtime_are_those_that_train() -> None:
    carried = taken(
        """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: with-data}
spec:
  mlPolicy: {numNodes: 1, torch: {}}
  template:
    spec:
      replicatedJobs:
      - name: fetch
        template: {spec: {template: {spec: {containers: [{name: fetch, image: fetcher}]}}}}
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec: {template: {spec: {containers: [{name: node, image: torch}]}}}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: a}
spec:
  runtimeRef: {name: with-data}
  trainer: {numNodes: 2, command: [torchrun, /t.py], resourcesPerNode: {limits: {cpu: 1}}}
"""
    )
    here = spec_of(carried).cluster.kubernetes
    assert (here.image, here.gpu_resource) == ("torch", None)
    assert "replicatedJob fetch" in "\n".join(carried.left)


def test_options_of_mpirun_are_no_program() -> None:
    carried = taken(
        """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: a}
spec:
  slotsPerWorker: 8
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - command: [bash, -c, "mpirun -mca pml ob1 -np $(wc -l < f) --hostfile f -npernode 8
              --bind-to none -x NCCL_DEBUG=INFO -x PATH /opt/solver -n 3"]
    Worker: {replicas: 2, template: {spec: {containers: [{image: b}]}}}
"""
    )
    assert carried.run == {
        "program": "/opt/solver",
        "args": ["-n", "3"],
        "env": {"NCCL_DEBUG": "INFO"},
    }


def test_a_script_in_a_variable_keeps_its_own_variables() -> None:
    carried = taken(
        """
apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  template:
    spec:
      containers:
      - image: a
        args: [/t.py]
        env:
        - {name: WORK, value: 'n=${1##*exit}; echo $n ${n} $SIZE'}
"""
    )
    assert spec_of(carried).cluster.kubernetes.env["WORK"] == "n=${1##*exit}; echo $n ${n} 2"
    assert carried.notes()[0].endswith("to replace here: SIZE")


def test_a_script_in_the_command_of_a_pod_stays_a_script() -> None:
    text = """apiVersion: v1
kind: Pod
metadata: {name: loop}
spec:
  containers:
  - name: a
    image: lab/a
    command: [/bin/sh, -c, "while true; do code=$(next); ./step $code; done"]
    resources: {limits: {nvidia.com/gpu: 2}}
"""
    carried = taken_over(text, PurePath("pod.yaml"))
    program = carried.run["program"], carried.run["args"][0]
    assert program == ("/bin/sh", "-c")
    assert carried.run["args"][1].startswith("while true; do code=$(next)")
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (1, 2)
    # The shell of each rank knows its variables.
    assert not any("to set before you submit" in one for one in carried.notes())


def test_claims_and_devices_that_are_no_gpus_are_kept_and_said() -> None:
    text = """apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  template:
    spec:
      resourceClaims: [{name: devices, resourceClaimTemplateName: four}]
      containers:
      - name: a
        image: lab/a
        command: [python, fit.py]
        resources: {claims: [{name: devices}], limits: {google.com/tpu: 4}}
"""
    carried = taken_over(text, PurePath("job.yaml"))
    container = carried.cluster["kubernetes"]["pod_template"]["spec"]["containers"][0]
    assert container["resources"]["claims"] == [{"name": "devices"}]
    said = "\n".join(carried.before)
    assert "set cluster.gpus_per_host: the pods get devices by resource claims" in said
    assert "google.com/tpu is no GPU" in said


def test_a_job_of_hyperpod_is_taken_over() -> None:
    text = """apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: a}
spec:
  nprocPerNode: "8"
  runPolicy: {logMonitoringConfiguration: [{name: x}]}
  replicaSpecs:
  - name: pods
    replicas: 3
    spares: 1
    template:
      spec:
        containers:
        - name: a
          image: lab/a
          command: [hyperpodrun, --tee=3, fit.py, --lr=1]
"""
    carried = taken_over(text, PurePath("job.yaml"))
    assert carried.run == {"script": "fit.py", "args": ["--lr=1"]}
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (3, 8)
    assert "logMonitoringConfiguration: ndctl watches steps and hangs itself" in carried.left
    assert "spares of replicaSpecs: set cluster.spare_hosts" in carried.left


def test_the_gang_scheduler_of_a_runtime_is_taken() -> None:
    text = """apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: gang}
spec:
  mlPolicy: {numNodes: 2, torch: {}}
  podGroupPolicy: {volcano: {}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template: {spec: {template: {spec: {containers: [{name: node, image: lab/a}]}}}}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: a}
spec:
  runtimeRef: {name: gang}
  trainer: {command: [torchrun, fit.py]}
"""
    carried = taken_over(text, PurePath("job.yaml"))
    assert carried.cluster["kubernetes"]["gang_scheduler"] == "volcano"


def test_values_of_other_types_are_named_all_at_once() -> None:
    text = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: a, labels: [x]}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: [2]
      template:
        metadata: null
        spec:
          volumes: {data: {}}
          nodeSelector: $SELECTOR
          containers:
          - name: 7
            image: lab/a
            command: torchrun fit.py
            env: [A=1]
            resources: {limits: {1: {}}}
"""
    with pytest.raises(SpecError) as refused:
        taken_over(text, PurePath("job.yaml"))
    spec = "PyTorchJob: spec.pytorchReplicaSpecs.Worker"
    pod = f"{spec}.template.spec"
    assert refused.value.message.removeprefix("job.yaml: Kubernetes would refuse it: ").split(
        "; "
    ) == [
        "PyTorchJob: metadata.labels must be a mapping of texts, not such a list",
        f"{spec}.replicas must be one value, not such a list",
        f"{pod}.volumes must be a list of mappings, not a mapping",
        f"{pod}.nodeSelector must be a mapping of texts, not '$SELECTOR'",
        f"{pod}.containers[0].name must be a text, not '7'",
        f"{pod}.containers[0].command must be a list of texts, not 'torchrun fit.py'",
        f"{pod}.containers[0].env must be a list of mappings, not such a list",
        f"{pod}.containers[0].resources.limits must be a mapping of texts, not a mapping",
    ]


def test_null_is_a_value_that_is_absent() -> None:
    text = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: a, labels: null, annotations: {1: 2}}
spec:
  pytorchReplicaSpecs:
    Master:
    Worker:
      template:
        spec:
          volumes:
          containers:
          - name: a
            image: lab/a
            command: [torchrun, fit.py]
            env:
            args:
            resources: {limits: {nvidia.com/gpu: 8, 2: 3}}
"""
    carried = taken_over(text, PurePath("job.yaml"))
    assert carried.run == {"script": "fit.py", "args": []}
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (1, 8)


def test_a_message_names_twenty_values_of_wrong_types_at_most() -> None:
    text = "apiVersion: batch/v1\nkind: Job\nspec:\n  x:\n" + "  - {replicas: [1]}\n" * 500
    with pytest.raises(SpecError) as refused:
        taken_over(text, PurePath("job.yaml"))
    assert refused.value.message.count("replicas") == 20
    assert refused.value.message.endswith("; and 480 more")


JOB = """apiVersion: batch/v1
kind: Job
metadata: {{name: fit}}
spec:
  parallelism: {hosts}
  template:
    spec:
      containers:
      - {{name: fit, image: lab/fit, {words}, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}
"""


@pytest.mark.parametrize("args", [["--gpus", "-1"], ["train", "--lr=1"]])
def test_arguments_of_what_the_image_starts_are_kept(args: list[str]) -> None:
    carried = taken(JOB.format(hosts=1, words=f"args: {args}"))
    assert carried.run == {"script": "train.py", "args": args}
    assert "name in run what the image starts; run.args has its arguments" in carried.before
    program = taken(JOB.format(hosts=1, words="args: [/opt/fit, '2']"))
    assert program.run == {"program": "/opt/fit", "args": ["2"]}


def test_two_hyphens_before_a_script_are_no_script() -> None:
    words = "command: [bash, -c, --], args: ['cd /data; python fit.py --lr 1']"
    carried = taken(JOB.format(hosts=1, words=words))
    assert carried.run == {"script": "fit.py", "args": ["--lr", "1"], "workdir": "/data"}


def test_a_number_of_hosts_that_is_none_is_asked_for() -> None:
    carried = taken(JOB.format(hosts="__NODES__", words="command: [python, fit.py]"))
    assert "set cluster.hosts: the manifest says __NODES__" in carried.before


def test_variables_of_the_container_have_their_values() -> None:
    words = (
        "env: [{name: STEPS, value: '5'}, {name: SITE, value: $SITE}],"
        " command: [python, fit.py, --steps=$(STEPS), --site=$(SITE)]"
    )
    carried = taken(JOB.format(hosts=1, words=words))
    assert carried.run["args"] == ["--steps=5", "--site=${SITE}"]


def test_variables_that_only_pods_know_are_not_to_be_set() -> None:
    words = (
        "env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}],"
        " command: [python, fit.py, --ip=$(POD_IP), '--lr=${RATE}']"
    )
    notes = taken(JOB.format(hosts=1, words=words)).notes()
    assert notes[0] == "to set before you submit, or to replace here: RATE"
    assert notes[1].startswith("before you submit: replace ${POD_IP}, which only the pods know")


def test_a_variable_that_refers_to_others_has_its_value() -> None:
    words = (
        "env: [{name: ROOT, value: /fsx}, {name: OUT, value: $(ROOT)/out},"
        " {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}},"
        " {name: OF_NODE, value: $(OUT)/$(NODE)}],"
        " command: [python, fit.py, --out=$(OUT), --log=$(OF_NODE)]"
    )
    carried = taken(JOB.format(hosts=1, words=words))
    assert carried.run["args"] == ["--out=/fsx/out", "--log=${OF_NODE}"]
    assert carried.notes()[0].startswith("before you submit: replace ${OF_NODE}, which only the")


def test_values_that_name_each_other_do_not_grow_without_end() -> None:
    env = ", ".join(f"{{name: A{i + 1}, value: $(A{i})$(A{i})}}" for i in range(60))
    words = f"env: [{{name: A0, value: x}}, {env}], command: [python, fit.py, $(A3), $(A60)]"
    assert taken(JOB.format(hosts=1, words=words)).run["args"] == ["x" * 8, "${A60}"]


def test_files_that_the_command_writes_are_said() -> None:
    """As Kubeflow's SDK starts a function: the program is only in the command."""
    text = """apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: fit}
spec:
  runtimeRef: {name: torch}
  suspend: true
  trainer:
    command:
    - bash
    - -c
    - |
      read -r -d '' SCRIPT << EOM
      print("a")
      EOM
      printf "%s" "$SCRIPT" > "train.py"
      echo started >&2
      torchrun train.py 2> /logs/err | tee -a /logs/out > /dev/null
"""
    carried = taken(text)
    said = "\n".join(carried.left)
    assert carried.run["script"] == "train.py"
    assert 'printf "%s" "${SCRIPT}" > "train.py": it writes train.py' in said
    assert "put train.py into the image or on a volume" in "\n".join(carried.before)
    assert re.findall("it writes (.*)", said) == ["train.py", "/logs/err", "/logs/out"]
    assert "suspend: `ndctl submit` starts the job" in carried.left


def test_what_only_the_head_of_ray_has_is_said() -> None:
    pod = "{{spec: {{containers: [{{name: a, image: b{}}}]}}}}"
    mount = "{mountPath: /both, name: x}"
    own = f", env: [{{name: A, value: b}}], volumeMounts: [{mount}, {{mountPath: /code, name: y}}]"
    text = (
        "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: fit}\nspec:\n"
        "  entrypoint: python /code/fit.py\n  rayClusterSpec:\n"
        f"    headGroupSpec: {{template: {pod.format(own)}}}\n"
        f"    workerGroupSpecs:\n    - template: {pod.format(f', volumeMounts: [{mount}]')}\n"
        "    - groupName: more\n"
    )
    left = taken(text).left
    to = "write those that ranks need to cluster.kubernetes"
    assert f"variables of the head, A: {to}.env" in left
    assert f"volumes of the head, /code: {to}.volumes" in left
    assert "workerGroup more: all hosts are alike" in left


def test_fields_of_a_pod_are_kept_or_said() -> None:
    job = yaml.safe_load(JOB.format(hosts=1, words="command: [torchrun, t.py]"))
    pod = job["spec"]["template"]["spec"]
    pod |= {"activeDeadlineSeconds": 3600, "setHostnameAsFQDN": True, "subdomain": "fit"}
    pod |= {"enableServiceLinks": False, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["a"]}}
    carried = taken(yaml.safe_dump(job))
    template = carried.cluster["kubernetes"]["pod_template"]["spec"]
    kept = {"enableServiceLinks", "dnsPolicy", "dnsConfig"}
    assert template == {key: pod[key] for key in kept}
    own = "ndctl brings the ranks together by names of its own"
    assert f"setHostnameAsFQDN: {own}" in carried.left
    assert f"subdomain fit: {own}" in carried.left
    assert "activeDeadlineSeconds 3600: a job of ndctl has no deadline" in carried.left
    pod |= {"enableServiceLinks": True, "dnsPolicy": "ClusterFirst"}
    del pod["dnsConfig"]
    assert "pod_template" not in taken(yaml.safe_dump(job)).cluster["kubernetes"]


def test_policies_without_a_key_are_said() -> None:
    jobset = yaml.safe_load(manifest("JobSet"))
    jobset["spec"] |= {"failurePolicy": {"maxRestarts": 2, "rules": [{"action": "FailJobSet"}]}}
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job |= {"podFailurePolicy": {"rules": []}, "backoffLimit": 0, "activeDeadlineSeconds": 60}
    job["template"]["spec"]["terminationGracePeriodSeconds"] = 600
    jobset["spec"]["suspend"] = True
    carried = taken(yaml.safe_dump(jobset))
    rules = "rules of ndctl decide about failures (`ndctl policy list`)"
    assert f"failurePolicy.rules: {rules}" in carried.left
    assert f"podFailurePolicy: {rules}" in carried.left
    assert "activeDeadlineSeconds 60: a job of ndctl has no deadline" in carried.left
    grace = "terminationGracePeriodSeconds 600: set resilience.stop_grace, the time to stop"
    assert carried.left.count(grace) == 1
    assert "suspend" not in str(carried.left), "Kueue suspends and resumes the jobs of a queue"


def test_no_restart_stays_no_restart() -> None:
    job = yaml.safe_load(manifest("Job"))
    job["spec"]["backoffLimit"] = 0
    assert taken(yaml.safe_dump(job)).resilience == {"max_restarts": 0}
    jobset = yaml.safe_load(manifest("JobSet"))
    jobset["spec"]["failurePolicy"] = {"maxRestarts": 0}
    assert taken(yaml.safe_dump(jobset)).resilience == {"max_restarts": 0}
    training = yaml.safe_load(manifest("PyTorchJob"))
    training["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    carried = taken(yaml.safe_dump(training))
    assert carried.resilience == {}
    said = "restartPolicy Never: set resilience.max_restarts: 0, if you mean the job"
    assert said in carried.left


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_domain_for_each_child_job_is_kept_if_there_is_one(replicas: int) -> None:
    jobset = yaml.safe_load(manifest("JobSet"))
    own = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "pool"}
    jobset["metadata"]["annotations"] = own
    jobset["spec"]["replicatedJobs"][0]["replicas"] = replicas
    carried = taken(yaml.safe_dump(jobset))
    kept = carried.cluster["kubernetes"].get("annotations")
    said = [one for one in carried.left if "exclusive-topology: pool" in one]
    if replicas == 1:
        assert (kept, said) == (own, [])
        return
    assert kept is None
    assert "topology: {slice: pool, slice_size: 2} keeps each 2 together" in said[0]


def test_policies_of_volcano_and_the_operator_are_taken_or_said() -> None:
    volcano = yaml.safe_load(manifest("volcano"))
    volcano["spec"] |= {"maxRetry": 3, "policies": [{"event": "PodEvicted"}]}
    carried = taken(yaml.safe_dump(volcano))
    assert carried.resilience == {"max_restarts": 3}
    assert any(one.startswith("policies: rules of ndctl decide") for one in carried.left)
    job = yaml.safe_load(manifest("PyTorchJob"))
    job["spec"]["runPolicy"] = {"schedulingPolicy": {"priorityClass": "low"}}
    said = "schedulingPolicy.priorityClass low: set cluster.kubernetes.priority_class"
    assert said in taken(yaml.safe_dump(job)).left


def test_a_volume_keeps_what_has_no_key() -> None:
    job = yaml.safe_load(manifest("PyTorchJob"))
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    items = {"name": "code", "configMap": {"name": "c", "items": [{"key": "a", "path": "b"}]}}
    plain = {"name": "plain", "configMap": {"name": "d", "defaultMode": 420}}
    pod["volumes"] += [items, plain]
    pod["volumes"][1] = {"name": "shm", "hostPath": {"path": "/dev/shm"}}
    mounts = [{"name": "code", "mountPath": "/code"}, {"name": "plain", "mountPath": "/plain"}]
    pod["containers"][0]["volumeMounts"] += mounts
    carried = taken(yaml.safe_dump(job))
    kubernetes = carried.cluster["kubernetes"]
    assert items in kubernetes["pod_template"]["spec"]["volumes"]
    assert mounts[0] in kubernetes["pod_template"]["spec"]["containers"][0]["volumeMounts"]
    assert [one.get("config_map") for one in kubernetes["volumes"]] == [None, "d"]
    assert any(one.startswith("the volume shm at /dev/shm: ndctl mounts") for one in carried.left)


def test_a_job_of_mpi_in_its_first_form() -> None:
    text = JOB.format(hosts=1, words="command: [mpirun, -x, A=1, -x, PATH, python, fit.py, -x, B]")
    text = text.replace("batch/v1\nkind: Job", "kubeflow.org/v1alpha1\nkind: MPIJob")
    carried = taken(text.replace("parallelism: 1", "replicas: 2"))
    assert (carried.run["script"], carried.cluster["hosts"]) == ("fit.py", 2)
    assert (carried.cluster["gpus_per_host"], carried.run["env"]) == (1, {"A": "1"})
    assert "mpirun -x PATH: ranks have the variables of their own pods" in carried.left
    total = taken(text.replace("parallelism: 1", "gpus: 16"))
    assert "set cluster.hosts: the manifest says 16 GPUs" in total.before


def test_a_coordinator_and_variables_of_the_launcher_are_said() -> None:
    text = """apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: fit}
spec:
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - name: a
            image: lab/fit
            command: [mpirun, -x, PATH, python, fit.py]
            env: [{name: B, value: x}, {name: PATH, value: "$PATH:/b"}]
    Worker: {replicas: 2, template: {spec: {containers: [{name: a, image: lab/fit}]}}}
"""
    said = "variables of the Launcher, B, PATH: write those that ranks need to"
    assert f"{said} cluster.kubernetes.env" in taken(text).left
    jobs = "replicatedJobs: [{name: a, template: {spec: {template: {spec: {containers: []}}}}}]"
    text = (
        "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {name: a}\n"
        f"spec:\n  coordinator: {{replicatedJob: a}}\n  {jobs}\n"
    )
    assert "coordinator: MASTER_ADDR of each rank is the first host" in taken(text).left


def test_a_script_of_several_lines_is_written_as_lines() -> None:
    words = 'command: [bash, -c, "date\\nls\\n"]'
    assert "  - |\n    date\n    ls\n" in taken(JOB.format(hosts=1, words=words)).text("job.yaml")


LAUNCHER = """apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {{name: fit}}
spec:
  slotsPerWorker: 2
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - image: lab/fit
            command: {command}
            env:
            - {{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: hub, key: token}}}}}}
            - {{name: LR, value: "3"}}
            - {{name: TAGS, value: "a=$(LR),b=$(POD)"}}
            - {{name: LAST, value: "z"}}
            envFrom: [{{secretRef: {{name: common}}}}]
    Worker:
      replicas: 2
      template:
        spec: {{containers: [{{name: a, image: lab/fit, env: [{{name: OWN, value: o}}]}}]}}
"""
SECRET = {"secret": "hub", "key": "token"}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("-x HF_TOKEN=$(HF_TOKEN)", {"HF_TOKEN": SECRET}),
        ("-x HF_TOKEN", {"HF_TOKEN": SECRET}),
        ("-x TOKEN=$(HF_TOKEN)", {"TOKEN": SECRET}),
        ("-x LR", {"LR": "3"}),
        ("-x TAGS", {"LR": "3", "TAGS": "a=$(LR),b=$(POD)"}),
        ("-x OWN", {}),
        ("--bind-to none", {}),
    ],
)
@pytest.mark.parametrize("shell", [False, True])
def test_a_launcher_hands_its_variables_to_the_ranks(words: str, env: Any, shell: bool) -> None:
    line = f"mpirun -np 4 {words} python /w/t.py"
    command = ["bash", "-c", line] if shell else line.split()
    carried = taken(LAUNCHER.format(command=json.dumps(command)))
    assert carried.run == {"script": "/w/t.py", "args": []}
    here = carried.cluster["kubernetes"]
    assert (here["env"], here.get("env_from")) == ({**env, "OWN": "o"}, None)
    left = [one for one in ("HF_TOKEN", "LR", "TAGS", "LAST") if one not in env]
    left = [one for one in left if "TOKEN" not in env or one != "HF_TOKEN"]
    assert not any("TOKEN" in one for one in carried.notes() if "to set before" in one)
    assert f"variables of the Launcher, {', '.join(left)}: write those that ranks need to" in (
        "\n".join(carried.left)
    )
    assert not any(one.startswith("mpirun -x") for one in carried.left)


def test_a_launcher_hands_a_variable_of_its_env_from_to_the_ranks() -> None:
    command = ["mpirun", "-x", "API_KEY=$(API_KEY)", "-x", "LR=$(LR)", "python", "t.py"]
    carried = taken(LAUNCHER.format(command=json.dumps(command)))
    assert carried.run["env"] == {"LR": "3"}
    assert carried.cluster["kubernetes"]["env_from"] == [{"secret": "common"}]


def test_a_secret_of_a_launcher_in_an_argument_is_not_asked_for_as_text() -> None:
    command = ["mpirun", "python", "t.py", "--token=$(HF_TOKEN)"]
    said = taken(LAUNCHER.format(command=json.dumps(command))).notes()
    assert any("replace ${HF_TOKEN}, which only the pods know" in one for one in said)


def test_a_secret_that_a_command_exports_again_stays_a_secret() -> None:
    source = "{secretKeyRef: {name: hub, key: token}}"
    words = (
        'command: [sh, -c, "export HF_TOKEN=$HF_TOKEN; torchrun t.py"],'
        f" env: [{{name: HF_TOKEN, valueFrom: {source}}}]"
    )
    carried = taken(JOB.format(hosts=1, words=words))
    assert "env" not in carried.run
    assert carried.cluster["kubernetes"]["env"] == {"HF_TOKEN": SECRET}
