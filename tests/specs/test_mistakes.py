"""What users of other tools write, and which key ndctl names.

The names are those of the other tools' documentation: torchrun's and sbatch's options, keys of
DeepSpeed's and Accelerate's configuration files, arguments of Megatron-LM, fields of torchtitan,
`TrainingArguments` of Hugging Face, and Kubernetes' spelling.
"""

import pytest
import yaml

from orchestrator.errors import SpecError
from orchestrator.load import load_spec

GOOD = """\
name: demo
model: {preset: llama-tiny}
data: {files: "*.txt", sequence_length: 64}
train:
  steps: 10
  global_batch_size: 8
"""
MISTAKES = [
    # torchrun
    ("cluster: {nnodes: 4}", "did you mean cluster.hosts?"),
    ("nproc_per_node: 8", "did you mean cluster.gpus_per_host?"),
    ("cluster: {nproc-per-node: 8}", "did you mean cluster.gpus_per"),
    ("max_restarts: 3", "did you mean resilience.max_restarts?"),
    ("rdzv_endpoint: host:29500", "remove it: ndctl brings the ranks together"),
    ("cluster: {master_addr: n1}", "remove it: ndctl finds the address"),
    # DeepSpeed
    ("train_batch_size: 64", "did you mean train.global_batch_size?"),
    ("gradient_accumulation_steps: 4", "remove it: it follows from train.global_batch_size"),
    ("gradient_clipping: 1.0", "did you mean train.grad_clip?"),
    # Accelerate
    ("num_machines: 2", "did you mean cluster.hosts?"),
    ("num_processes: 16", "did you mean cluster.hosts and cluster.gpus_per_host?"),
    ("mixed_precision: bf16", "did you mean train.dtype?"),
    ("fsdp_config: {}", "did you mean parallel.fsdp?"),
    # values in another form
    ("data: {files: [/data/a.txt]}", 'write data.files: "/data/a.txt"'),
    ("data: {sequence_length: 4k}", "did you mean 4096?"),
    ("train: {steps: 10k}", "did you mean 10000?"),
    (
        "cluster: {slurm: {mem: 4 GB}}",
        "without spaces it is 4GB; `ndctl explain cluster.slurm.mem`",
    ),
    ("parallel: {tq: 2}", "did you mean parallel.tp?"),
    # Slurm
    ("cluster: {nodes: 4}", "did you mean cluster.hosts?"),
    ("cluster: {gpus-per-node: 8}", "did you mean cluster.gpus_per_host?"),
    ("partition: gpu", "did you mean cluster.slurm.partition?"),
    ("cluster: {slurm: {job-name: x}}", "did you mean name?"),
    ("cluster: {slurm: {walltime: 60}}", "did you mean cluster.slurm.time"),
    ("cluster: {slurm: {dependency: x}}", "leave it out, and submit with"),
    # Megatron-LM
    ("parallel: {tensor-model-parallel-size: 8}", "did you mean parallel.tp?"),
    ("pipeline_model_parallel_size: 2", "did you mean parallel.pp?"),
    ("data: {seq_length: 4096}", "did you mean data.sequence_length?"),
    ("train: {train-iters: 500}", "did you mean train.steps?"),
    ("train: {clip-grad: 1.0}", "did you mean train.grad_clip?"),
    ("save_interval: 500", "did you mean checkpoint.every_steps?"),
    # torchtitan
    ("parallel: {dp: 4}", "did you mean parallel.dp_shard (FSDP), or parallel.dp_rep"),
    ("parallel: {data_parallel_shard_degree: 4}", "did you mean parallel.dp_shard?"),
    # Hugging Face's Trainer
    ("train: {learning_rate: 1e-4}", "did you mean train.optimizer.lr?"),
    ("train: {lr: 1e-4}", "did you mean train.optimizer.lr?"),
    ("train: {per_device_train_batch_size: 4}", "did you mean train.micro_batch_size?"),
    ("train: {num_train_epochs: 3}", "did you mean train.steps?"),
    ("checkpoint: {save_total_limit: 3}", "did you mean checkpoint.keep"),
    # Kubernetes
    ("cluster: {kubernetes: {volumeMounts: []}}", "did you mean cluster.kubernetes.volumes: ["),
    ("cluster: {kubernetes: {shm_size: 64Gi}}", "did you mean cluster.kubernetes.shm?"),
    # Options of sbatch and srun, as scripts for language models on GitHub have them
    ("cluster: {slurm: {nice: 5}}", 'write cluster.slurm.sbatch_args: ["--nice=…"]'),
    ("cluster: {slurm: {wckey: a}}", 'write cluster.slurm.sbatch_args: ["--wckey=…"]'),
    ("cluster: {slurm: {time-min: 60}}", 'write cluster.slurm.sbatch_args: ["--time-min=…"]'),
    ("cluster: {slurm: {quotatype: spot}}", 'write cluster.slurm.sbatch_args: ["--quotatype=…"]'),
    ("cluster: {slurm: {cpu-bind: none}}", 'write cluster.slurm.srun_args: ["--cpu-bind=…"]'),
    ("cluster: {slurm: {mpi: pmix}}", 'write cluster.slurm.srun_args: ["--mpi=…"]'),
    ("cluster: {slurm: {signal: USR1@90}}", "did you mean cluster.slurm.notice_s?"),
    ("cluster: {slurm: {open-mode: append}}", "remove it: logs of each"),
    ("cluster: {slurm: {gpus-per-task: 1}}", "did you mean cluster.gpus_per_host?"),
    ("cluster: {slurm: {cpus-per-gpu: 8}}", "did you mean cluster.slurm.cpus_per_task"),
    ("cluster: {slurm: {export: ALL}}", "did you mean cluster.slurm.env?"),
    ("cluster: {slurm: {container-image: a.sqsh}}", "did you mean cluster.slurm.container.image?"),
    # Lightning
    ("train: {precision: bf16-mixed}", "did you mean train.dtype?"),
    ("train: {accumulate_grad_batches: 4}", "remove it: it fol"),
    # Values
    ("cluster: {slurm: {time: 24h}}", 'did you mean "1-00:00:00"?'),
    ("cluster: {slurm: {time: 90min}}", 'did you mean "01:30:00"?'),
    (
        "cluster: {kubernetes: {env: [{name: A, value: b}]}}",
        'write cluster.kubernetes.env: {A: "b"}',
    ),
    ("model: {flavor: 8B}", "did you mean model.preset, such as llama3-8b?"),
    ("model: {name: llama3}", "did you mean model.preset, or model.path"),
    ("parallel: {data: zero3}", "did you mean fsdp?"),
    ("cluster: {gpu: H100}", "did you mean h100-sxm-80gb?"),
    ("cluster: {gpu: A100-40GB}", "did you mean a100-sxm-40gb?"),
    ("cluster: {gpu: t4}", "set cluster.gpu to one of h100-sxm-80gb, "),
    ("cluster: {gpu: v100-sxm2-32gb}", "set cluster.gpu to one of h100-sxm-80gb, "),
    ("cluster: {gpus: 8}", "did you mean cluster.gpus_per_host?"),
    ("parallel: {fsdp: full_shard}", "did you mean parallel.data: fsdp?"),
    ("parallel: {fsdp: 8}", "did you mean parallel.dp_shard: 8?"),
    ("parallel: {fsdp: true}", "write parallel.data: fsdp"),
    ("train: {dtype: bf16-mixed}", "did you mean bfloat16?"),
    ("parallel: {dp_shard: -1}", "set parallel.dp_shard to auto"),
    ("cluster: {slurm: {gres: 'nvme:1,gpu:h100:8'}}", "set cluster.gpus_per_host to 8"),
    ("train: {dtype: bf16}", "did you mean bfloat16?"),
    ("train: {dtype: fp16}", "set it to bfloat16"),
    ("model: {preset: llama-7b}", "did you mean llama3-8b?"),
    ("model: {preset: gpt2-xl}", "did you mean gpt2-large? Other models: model.p"),
    ("model: {preset: mixtral-8x7b}", "presets: llama-tiny, "),
    ("checkpoint: {every: 10}", "did you mean checkpoint.every_steps: 10?"),
    ("train: {optimizer: {name: AdamW}}", "did you mean adamw?"),
    ("cluster: {backend: k8s}", "did you mean kubernetes?"),
    # Units, quotes and nesting
    ("resilience: {hang_timeout: 5m}", "write 300, a number of seconds"),
    ("resilience: {init_timeout: 1.5 h}", "write 5400, a number of"),
    ("resilience: {hang_timeout: '300'}", "write 300 without quotes"),
    ("checkpoint: {every: 10m}", "give a number of steps, checkpoint.every_"),
    ("checkpoint: {interval: 100}", "did you mean checkpoint.every_steps?"),
    ("checkpoint: {path: /x}", "remove it: checkpoints are in checkpoints/ of"),
    ("name: \u201ca\u201d", 'write "a": YAML knows no typographic quotes'),
    ("name: \u2018a\u2019", "write 'a': YAML knows no typographic quotes"),
    ("cluster: local", 'write cluster: {backend: "local"}'),
    ("cluster: [{hosts: 2}, {gpu: A100}]", "remove the - in front of hosts, gpu"),
    ("train: {optimizer: adamw}", 'write train.optimizer: {name: "adamw"}'),
    ("train: {schedule: cosine}", 'write train.schedule: {kind: "cosine"}'),
    ("train: 10", "write key: value pairs; `ndctl explain train` lists the keys"),
    ("model: llama-tiny", "write model: {preset: llama-tiny}"),
    ("model: Qwen/Qwen3-8B", "write model: {path: Qwen/Qwen3-8B}"),
    ("data: '*.txt'", 'write data: {files: "*.txt"}'),
    ("parallel: {tensor_parallel: 2}", "did you mean parallel.tp?"),
]
ABOVE = [
    ("zero_optimization: {stage: 3}", "zero_optimization", "did you mean parallel.data?"),
    (
        "cluster: {kubernetes: {nodeSelector: {a: b}}}",
        "cluster.kubernetes.nodeSelector",
        "did you mean cluster.kubernetes.node_selector?",
    ),
    (
        "cluster: {kubernetes: {resources: {limits: {gpu: 8}}}}",
        "cluster.kubernetes.resources",
        "did you mean cluster.gpus_per_host (GPUs)",
    ),
    ("notify: {slack: 'env:HOOK'}", "notify", "write a list: notify: [{slack: …}]"),
]
"""Mistakes in a key above the innermost one, which is given."""


def spec_with(snippet: str, key: str) -> tuple[str, int]:
    """A valid spec with the keys of `snippet` added, and the line of `key`."""
    data = yaml.safe_load(GOOD)

    def merge(into: dict[str, object], extra: dict[str, object]) -> None:
        for key, value in extra.items():
            inside = into.get(key)
            if isinstance(value, dict) and isinstance(inside, dict):
                merge(inside, value)
            else:
                into[key] = value

    merge(data, yaml.safe_load(snippet))
    text = yaml.safe_dump(data, sort_keys=False)
    name = key.rpartition(".")[2]
    lines = [*enumerate(text.splitlines(), 1)]
    return text, max(number for number, line in lines if line.strip().startswith(f"{name}:"))


def innermost(snippet: str) -> str:
    """The path of the only key of the innermost mapping."""
    path, value = [], yaml.safe_load(snippet)
    while isinstance(value, dict) and len(value) == 1:
        ((key, value),) = value.items()
        path.append(key)
    return ".".join(path)


@pytest.mark.parametrize(
    ("snippet", "key", "fix"),
    [*((snippet, innermost(snippet), fix) for snippet, fix in MISTAKES), *ABOVE],
)
def test_a_usual_mistake_has_its_place_one_sentence_and_the_right_spelling(
    snippet: str, key: str, fix: str
) -> None:
    text, line = spec_with(snippet, key)
    with pytest.raises(SpecError) as refused:
        load_spec(text, "job.yaml")
    ((place, problem),) = refused.value.placed
    assert problem.path == key or key.startswith(problem.path), "one mistake is one problem"
    assert problem.fix.startswith(fix), problem.fix
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{place}: {problem.path}: ")
    assert second.strip() == f"fix: {problem.fix}"
    assert place == f"job.yaml:{line}", text
    assert len(first) < 200, "no list of all keys before the answer"


def test_a_key_that_is_missing_because_it_is_written_wrongly_is_one_problem() -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(GOOD.replace("  steps", "  max_steps"), "job.yaml")
    assert (
        str(refused.value)
        == "job.yaml:5: train.max_steps: unknown key\n    fix: did you mean train.steps?"
    )


def test_without_a_model_the_three_ways_to_give_one_are_named() -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(GOOD.replace("model: {preset: llama-tiny}\n", ""), "job.yaml")
    assert "preset" in str(refused.value)
    assert "lora" not in str(refused.value)


def test_every_name_leads_to_a_key_that_exists() -> None:
    from orchestrator.specs.keys import all_keys
    from orchestrator.specs.other_names import KEYS, SENTENCES

    paths = {key.path for key in all_keys()}
    assert not {right for right in KEYS.values() if right not in paths}
    assert not {*KEYS} & {*SENTENCES}


def test_arguments_in_one_text_are_shown_as_the_list_that_a_shell_makes_of_them() -> None:
    text = "name: a\nrun: {script: train.py, args: --lr 3e-4 'two words'}\n"
    with pytest.raises(SpecError) as refused:
        load_spec(text, "job.yaml")
    ((_, problem),) = refused.value.placed
    assert problem.fix == 'write run.args: ["--lr", "3e-4", "two words"]'


def test_a_number_in_quotes_is_written_without_them() -> None:
    with pytest.raises(SpecError, match="write 3e-4 without quotes"):
        load_spec(f"{GOOD}  optimizer: {{lr: '3e-4'}}\n", "job.yaml")


def test_a_gpu_that_exists_is_not_proposed_again() -> None:
    more = "cluster: {backend: kubernetes, gpu: h100-sxm-80gb, kubernetes: {gpu_resource: null}}\n"
    with pytest.raises(SpecError, match=r"cluster\.gpu: must be left out") as refused:
        load_spec(f"{GOOD}{more}", "job.yaml")
    assert "did you mean h100" not in str(refused.value)


def test_a_value_with_spaces_that_belong_to_it_is_not_joined() -> None:
    more = "cluster: {backend: slurm, slurm: {container: {image: a, mounts: ['$(pwd; x):/d']}}}\n"
    with pytest.raises(SpecError) as refused:
        load_spec(f"{GOOD}{more}", "job.yaml")
    assert "fix: `ndctl explain cluster.slurm.container.mounts` says what" in str(refused.value)
