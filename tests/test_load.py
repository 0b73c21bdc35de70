"""Loading of a spec from YAML and `--set`: the spec, or every problem with its place."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from orchestrator.contract.codec import UNKNOWN_KEY, Invalid
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.job_spec import (
    KUBERNETES_NAME,
    NAME,
    CheckpointSpec,
    ClusterSpec,
    JobSpec,
    ResilienceSpec,
    kubernetes_name,
)
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.train_spec import OptimizerSpec, ScheduleSpec, TrainSpec
from orchestrator.errors import SpecError
from orchestrator.load import dump_spec, load_spec, of_the_trainer, read_spec
from orchestrator.model_config import hub_cache, read_model_config

EXAMPLES = Path(__file__).parent.parent / "examples"
SPECS = sorted(path for path in EXAMPLES.glob("*.yaml") if path.stem != "trainer")
"""Only the trainer reads trainer.yaml."""
GOOD = """\
name: demo
model: {preset: llama-tiny}
data:
  files: "{stdlib}/*.py"
  sequence_length: 64
train:
  steps: 10
  global_batch_size: 8
"""


def refusal_of(text: str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(text, "job.yaml", overrides)
    assert "fix: " in str(caught.value)
    return str(caught.value)


BAD: list[tuple[str, str, str]] = [
    # override, limit, fix
    ("nam=x", "unknown key", "did you mean name?"),
    ("name=My Job", "first a letter or digit", "something like llama-run-1"),
    ("name=.hidden", "first a letter or digit", "something like"),
    ("name=-x", "first a letter or digit", "something like"),
    ("name=a..b", "without ..", "something like"),
    ("name=a/b", "letters, digits, -, . and _", "something like"),
    ("name=job.", "last not - or .", "something like"),
    ("name=" + "a" * 64, "1 to 63 letters", "something like"),
    ("name=2024", "a string", 'put it in quotes: "2024"'),
    ("model={}", "exactly one of preset, config, path, got 'none'", "preset: llama-tiny"),
    ("model.preset=llama-tny", "one of 7 names", "did you mean llama-tiny?"),
    ("model.preset=gpt", "one of 7 names", "presets: llama-tiny"),
    ("model=llama", "key: value pairs, got 'llama'", "use the keys preset, config, path"),
    ("data.files=", "a string", "give data.files a value"),
    ('data.files=""', "not empty", "something like corpus"),
    ("data.files=[a, b]", "got ['a', 'b']", "set data.files to"),
    ("data.tokenizer=''", "bytes or a folder, not empty", "something like bytes"),
    ("data.format=json", "'jsonl' or 'parquet'", "did you mean jsonl?"),
    ("data.column=", "got null", "give data.column a value"),
    ("data.validation={}", "exactly one of files, fraction, got 'none'", "keep"),
    (
        "data.validation={files: a, fraction: 0.1}",
        "exactly one of files, fraction, got 'files, fraction'",
        "for example fraction: 0.01",
    ),
    ("data.validation.fraction=0.6", "at most 0.5", "0.5 or less"),
    ("data.validation.fraction=0", "above 0", "a number above 0"),
    ("train.eval_every=5", "given only together with data", "add data.val"),
    ("train.profile.at_step=0", "at least 1", "1 or more"),
    ("train.z_loss=0", "above 0", "a number above 0"),
    ("train.optimizer.name=adamv", "'adamw'", "did you mean adam"),
    ("train.wandb=''", "a project's name, not empty", "something like llama"),
    ("train.float8=1", "true or false or 'auto', got 1", "set train.float8"),
    ("model.lora.rank=0", "at least 1", "1 or more"),
    ("model.lora.alpha=-1", "above 0", "a number above 0"),
    ("model.lora.quantize=nf8", "'none' or 'nf4'", "did you mean nf4?"),
    ("model.lora.target_modules=q_proj", "a list", "as [...]"),
    ("model.lora=yes", "key: value pairs", "use the keys rank, alpha"),
    ("data.sequence_length=4", "at least 8, got 4", "to 8 or more"),
    ("data.sequence_length=2000000", "at most 1048576", "or less"),
    ("train.step=5", "unknown key", "did you mean train.steps?"),
    ("train.steps=0", "at least 1, got 0", "set train.steps to 1 or more"),
    (
        "train.steps=1.5",
        "a whole number (at least 1 and at most 1000000000000), got 1.5",
        "set train.steps",
    ),
    ("train.steps='60'", "a whole number", "write 60 without quotes"),
    ("train.steps=60.0", "a whole number", "set train.steps to 60"),
    ("train.steps=true", "got true", "set train.steps to a whole number"),
    ("train.steps=null", "got null", "give train.steps a value"),
    ("train.micro_batch_size=3", "a divisor of", "to 2, or to auto"),
    ("train.micro_batch_size=-1", "(at least 1) or 'auto'", "set train"),
    ("train.micro_batch_size=aut", "'auto'", "did you mean auto?"),
    ("train.seed=-1", "at least 0, got -1", "0 or more"),
    ("train.dtype=bf16", "'float32' or 'bfloat16'", "did you mean bfloat16?"),
    ("train.optimizer.lr=0", "above 0, got 0", "a number above 0"),
    ("train.optimizer.lr=.nan", "a finite number", "set train.optimizer.lr"),
    ("train.optimizer.lr=fast", "a finite number", "set train.optimizer.lr"),
    ("train.optimizer.beta2=1", "at most 0.9999", "0.9999 or less"),
    ("train.schedule.kind=cosin", "'cosine'", "did you mean cosine?"),
    ("train.schedule.warmup_steps=11", "at most steps (10)", "to 1"),
    (
        "train.activation_checkpointing=some",
        "'none' or 'gathers' or 'elementwise'",
        "set train.activation_checkpointing",
    ),
    ("train.compile=yes", "true or false or 'auto', got 'yes'", "set train.compile to true"),
    ("train.grad_clip=-1", "above 0", "a number above 0"),
    ("parallel.tp=0", "a whole number (at least 1) or 'auto', got 0", "set parallel"),
    ("parallel.dp=2", "unknown key", "did you mean parallel.dp_shard"),
    ("parallel.data=fsdp2", "'fsdp' or 'ddp' or 'zero1'", "did you mean fsdp?"),
    ("parallel.context=rings", "'ring'", "did you mean ring?"),
    (
        "parallel.fsdp.reshard_after_forward=1",
        "true or false or a whole number (at least 2) or 'auto', got 1",
        "set parallel.fsdp.reshard_after_forward to true or false",
    ),
    (
        "parallel.fsdp.reshard_after_forward=no",
        "a whole number (at least 2) or 'auto', got 'no'",
        "set parallel.fsdp.reshard_after_forward",
    ),
    ("parallel.fsdp.wrap=a b", "a class name", "like LlamaDecoderLayer"),
    ("parallel.fsdp.forward_prefetch=-1", "at least 0", "0 or"),
    ("parallel.pipeline=gpipe", "key: value pairs", "use the keys schedule"),
    ("parallel.pipeline.schedule=1f1", "'gpipe' or '1f1b'", "did you mean 1f1b?"),
    ("parallel.pp=most", "a whole number (at least 1) or 'auto'", "set parallel.pp"),
    ("cluster.backend=slrm", "'slurm'", "did you mean slurm?"),
    ("cluster.host=2", "unknown key", "did you mean cluster.hosts?"),
    ("cluster.gpus_per_host=0", "at least 1", "1 or more"),
    ("cluster.spare_hosts=-1", "at least 0", "0 or more"),
    ("checkpoint.keep=0", "at least 1", "1 or more"),
    ("checkpoint.async=later", "true or false", "set checkpoint.async"),
    ("resilience.hang_timeout=0", "above 0) or 'auto'", "set resil"),
    ("resilience=null", "key: value pairs, got null", "ndctl explain resilience"),
    ("run_root=3", "a string", 'put it in quotes: "3"'),
]
ELSEWHERE: list[tuple[str, str, str, str]] = [
    # override, place, limit, fix
    ("model.path=x", "model", "got 'preset, path'", "--set model.path=null"),
    ("train.profile={}", "train.profile.at_step", "given", "add train.profile.at_step"),
    (
        "train.profile={at_step: 1, ranks: [0, -1]}",
        "train.profile.ranks[1]",
        "at least 0, got -1",
        "to 0 or more",
    ),
    ("train.profile={at_step: 1, ranks: 0}", "train.profile.ranks", "a list", "[...]"),
    (
        "parallel={data: ddp, dp_shard: 4}",
        "parallel.dp_shard",
        "1 with data: ddp, which shards no weights, got 4",
        "set dp_replicate to 4 and dp_shard to 1",
    ),
    (
        "parallel={data: zero1, fsdp: {cpu_offload: true}}",
        "parallel.fsdp",
        "left out with data: zero1, got 'cpu_offload'",
        "remove fsdp, or set data to fsdp",
    ),
    (
        "parallel.pipeline={schedule: 1f1b, stages_per_rank: 2}",
        "parallel.pipeline.stages_per_rank",
        "1 with schedule 1f1b, got 2",
        "set stages_per_rank to auto",
    ),
]
"""Values that are refused at another place than the key of the override."""
REFUSED = [*((row[0], row[0].partition("=")[0], *row[1:]) for row in BAD), *ELSEWHERE]


def job_of(text: str, source: str, overrides: Sequence[str]) -> JobSpec:
    return of_the_trainer(load_spec(text, source, overrides), "this test")


@pytest.mark.parametrize(
    ("override", "path", "limit", "fix"), REFUSED, ids=[row[0][:40] for row in REFUSED]
)
def test_a_bad_value_is_refused_with_path_limit_and_fix(
    override: str, path: str, limit: str, fix: str
) -> None:
    """The same message for a value in the file and one from `--set`."""
    from_set = refusal_of(GOOD, override)
    assert f"{path}: {'' if limit == UNKNOWN_KEY else 'must be '}" in from_set
    data = yaml.safe_load(GOOD)
    key, _, text = override.partition("=")
    *above, last = key.split(".")
    section = data
    for part in above:
        section = section.setdefault(part, {})
    section[last] = "VALUE"
    from_file = refusal_of(json.dumps(data).replace('"VALUE"', text))
    for expected in (from_set, from_file):
        message, _, advice = expected.partition("\n    fix: ")
        assert limit in message
        assert fix in advice
    assert f"job.yaml:1: {path}: {'' if limit == UNKNOWN_KEY else 'must be '}" in from_file


FILES: list[tuple[str, str, str, str]] = [
    ("", "job.yaml:1: ", "got 'an empty file'", "`ndctl init` writes a first spec"),
    ("# nothing\n", "job.yaml:1: ", "an empty file", "`ndctl init` writes a first spec"),
    ("[1]", "job.yaml:1: ", "must be a mapping", "`ndctl init` writes a first spec"),
    ("just words", "job.yaml:1: ", "got 'just words'", "`ndctl init` writes a first spec"),
    ("name: a\n\tsteps: 1\n", "job.yaml:2:1: not YAML", "tab", "indent with spaces"),
    ("name:\n\t- 1\n", "job.yaml:2:1: not YAML", "at '\\t- 1'", "indent with spaces"),
    ("a: b: c\n", "job.yaml:1:5: not YAML", "mapping values", "quote a value that contains ': '"),
    ("a: [1, 2\nb: 3\n", "job.yaml:2:", "at 'b: 3'", "commas and closing quotes"),
    ("data: {files: {stdlib}/*.py}\n", "job.yaml:1:", "not YAML", "quote a value with { }"),
    ("a: 1\n---\nb: 2\n", "job.yaml:2:1: not YAML", "single document", "remove everything"),
    ("a: *b\n", "job.yaml:1:4: not YAML", "undefined alias", "begins with * or &"),
    ("a: \x01\n", "job.yaml:1: not YAML", "control", "remove that character"),
    ("a: 'open\n", "job.yaml:2:1: not YAML", "at the end of the file", "closing quotes"),
]


def test_steps_cannot_run_ahead_of_an_update_on_the_host() -> None:
    offload = "parallel.fsdp.cpu_offload=true"
    message = refusal_of(GOOD, "train.run_ahead=2", offload)
    assert "train.run_ahead: must be 0 with parallel.fsdp.cpu_offload" in message
    assert "got 2" in message
    for accepted in ("auto", "0"):
        assert load_spec(GOOD, "job.yaml", (f"train.run_ahead={accepted}", offload))


@pytest.mark.parametrize(("text", "place", "expected", "fix"), FILES)
def test_a_file_that_is_no_spec_is_refused_at_its_line(
    text: str, place: str, expected: str, fix: str
) -> None:
    message, _, advice = refusal_of(text).partition("fix: ")
    assert message.startswith(place)
    assert expected in message
    assert fix in advice


@pytest.mark.parametrize("name", ["Job_1", "7b.v2", "my_run", "a", "A-b.c_", "x" * 63])
def test_names_common_among_slurm_users_are_accepted(name: str) -> None:
    overrides = (f'name="{name}"', "cluster.backend=slurm")
    assert load_spec(GOOD, "job.yaml", overrides).name == name


@pytest.mark.parametrize(
    ("name", "instead"),
    [("Job_1", "job-1"), ("7b.v2", "job-7b-v2"), ("my_run", "my-run"), ("Ab." + "9" * 60, "ab-9")],
)
def test_kubernetes_accepts_only_host_names_and_the_error_says_so(name: str, instead: str) -> None:
    expected = refusal_of(GOOD, f'name="{name}"', "cluster.backend=kubernetes")
    assert "name: must be on Kubernetes 1 to 63 of a-z, 0-9 and -, first a letter" in expected
    assert f"(RFC 1035 label), got '{name}'" in expected
    assert f"fix: for example {instead}" in expected


@given(st.text(alphabet="aZ9-._ü", min_size=1, max_size=70))
def test_the_advised_name_is_valid_for_kubernetes(name: str) -> None:
    if NAME.admits(name):
        assert KUBERNETES_NAME.admits(kubernetes_name(name))


def test_all_problems_are_reported_at_once_each_at_its_line() -> None:
    text = (
        GOOD.replace("steps: 10", "steps: 0").replace("name: demo", "name: De mo")
        + "parallell: {}\n"
    )
    lines = refusal_of(text, "cluster.hosts=none", "train.dtyp=float32").splitlines()
    places = [re.split(": must be|: unknown", line)[0] for line in lines[1:] if "fix:" not in line]
    assert lines[0] == "job.yaml has 5 problems"
    assert sorted(places) == [
        "--set cluster.hosts",
        "--set train.dtyp",
        "job.yaml:1: name",
        "job.yaml:7: train.steps",
        "job.yaml:9: parallell",
    ]


def test_problems_are_also_available_as_values() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(GOOD, "job.yaml", ["train.steps=0"])
    cause = caught.value.__cause__
    assert isinstance(cause, Invalid)
    assert [problem.path for problem in cause.problems] == ["train.steps"]


def test_a_missing_key_is_reported_at_its_section() -> None:
    expected = refusal_of(GOOD.replace("  steps: 10\n", ""))
    assert "job.yaml:6: train.steps: must be given" in expected
    assert "fix: add train.steps: a whole number (at least 1 and at most" in expected
    assert "job.yaml:1: data: must be given" in refusal_of("name: a\nmodel: {preset: llama-tiny}\n")


def test_a_duplicate_key_is_reported_with_both_lines() -> None:
    expected = refusal_of(GOOD + "name: other\n")
    assert "job.yaml:9: name: given a second time" in expected
    assert "keep this one or the one at job.yaml:1" in expected
    assert "job.yaml:8: train.steps" in refusal_of(GOOD.replace("  global", "  steps: 5\n  global"))


def test_an_alias_is_reported_at_its_own_line() -> None:
    text = "\n".join(
        [
            "name: &n demo",
            "name: *n",
            "model: {preset: llama-tiny}",
            "data:",
            "  files:",
            "  - &s 64",
            "  # a comment",
            "  - *s",
            "  sequence_length: {",
            "    a: 3, *s : *n}",
            "train:",
            "  steps: *s",
        ]
    )
    expected = refusal_of(text)
    assert "job.yaml:8: data.files[1]: must be written out, without an alias" in expected
    assert "job.yaml:10: data.sequence_length.64: must be written out" in expected
    assert "job.yaml:12: train.steps: must be written out, without an alias" in expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("{preset: llama-tiny}", "&m {preset: llama-tiny}") + "data2: *m\n", "alias"),
        (GOOD + "parallel: &p {tp: *p}\n", "without an alias"),
        (GOOD.replace("name: demo", "name: !!python/name:os.x demo"), "without a tag"),
        (GOOD.replace("steps: 10", "steps: !!int ten"), "what its tag says (!!int)"),
        (GOOD + "? [a, b]\n: 3\n", "plain keys with values"),
        (GOOD.replace("steps: 10", "steps: " + "9" * 5000), "at most 4,300 digits"),
        (GOOD.replace("steps: 10", "steps: 1000000000001"), "at most 1000000000000"),
        (GOOD.replace("-tiny", "-tiny, pad_vocab_to_multiple_of: 1048577"), "at most 1048576"),
    ],
)
def test_yaml_beyond_plain_values_is_refused(text: str, expected: str) -> None:
    assert expected in refusal_of(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("3.0e-4", 3e-4), ("1E+0", 1.0), (".5", 0.5), ("1", 1.0), ("0x10", 16.0)],
)
def test_numbers_are_read_in_every_notation(text: str, value: float) -> None:
    assert job_of(GOOD, "x", [f"train.optimizer.lr={text}"]).train.optimizer.lr == value


def test_values_that_yaml_1_1_would_convert_keep_their_form() -> None:
    spec = job_of(GOOD, "x", ["model={config: {a: yes, b: 1:30, c: 2024-01-01, d: 010, 7: ~}}"])
    assert spec.model.config == {"a": "yes", "b": "1:30", "c": "2024-01-01", "d": 10, "7": None}


def test_an_override_wins_over_the_file_and_a_later_one_over_an_earlier() -> None:
    spec = job_of(GOOD, "x", ["train.steps=20", "train.steps=30", "run_root=/a=b"])
    assert (spec.train.steps, spec.run_root) == (30, "/a=b")


def test_an_override_creates_missing_sections() -> None:
    spec = job_of(GOOD + "parallel:\n", "x", ["parallel.tp=2", "train.optimizer.lr=1e-3"])
    assert (spec.parallel.tp, spec.train.optimizer.lr) == (2, 1e-3)


def test_an_override_replaces_the_model() -> None:
    spec = job_of(GOOD, "x", ["model.preset=null", "model.config={model_type: llama}"])
    assert spec.model == ModelSpec(config={"model_type": "llama"})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "--set train.steps: must be written as KEY=VALUE"),
        ("=3", "must be written as KEY=VALUE"),
        ("train..steps=3", "must be written as KEY=VALUE"),
        ("name.first=a", "--set name.first: must be a key of a mapping, but name is a single"),
        ("trian.steps=3", "--set trian.steps: trian: unknown key"),
        ("train.optimizer={l: 1}", "--set train.optimizer: train.optimizer.l: unknown key"),
        ("train.steps=[1", "--set train.steps: must be a YAML value (while parsing a flow"),
        ("parallel={tp: 1, tp: 2}", "parallel.tp: given a second time"),
    ],
)
def test_a_bad_override_is_reported_at_the_override(override: str, expected: str) -> None:
    assert expected in refusal_of(GOOD, override)


def test_an_unreadable_file_is_reported_with_similar_files(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(GOOD)
    with pytest.raises(SpecError, match=r"no such file\n  fix: did you mean .*other\.yaml"):
        read_spec(tmp_path / "othr.yaml")
    with pytest.raises(SpecError, match=r"no such file\n  fix: files there: .*other\.yaml"):
        read_spec(tmp_path / "job.yaml")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_spec(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(SpecError, match="UTF-8 text, but byte 9 is not"):
        read_spec(tmp_path / "latin.yaml")
    with pytest.raises(SpecError, match="`ndctl init` writes a first spec"):
        read_spec(tmp_path / "none" / "job.yaml")
    assert read_spec(tmp_path / "other.yaml").name == "demo"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_every_example_loads_and_its_dump_loads_as_an_equal_spec(path: Path) -> None:
    spec = read_spec(path)
    assert load_spec(dump_spec(spec), "dump") == spec


def test_the_quickstart_uses_tp_inside_a_host_and_fsdp_across_hosts() -> None:
    spec = of_the_trainer(read_spec(EXAMPLES / "quickstart.yaml"), "this test")
    assert spec.parallel == ParallelSpec(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert spec.train == TrainSpec(
        steps=60,
        global_batch_size=16,
        optimizer=OptimizerSpec(lr=3.0e-4, weight_decay=0.1),
        schedule=ScheduleSpec(kind="cosine", warmup_steps=10),
    )
    assert spec.cluster == ClusterSpec(hosts=2, gpus_per_host=2)
    assert spec.checkpoint == CheckpointSpec(every_steps=20, keep=2, async_=True)


def test_a_dump_writes_every_default_and_no_absent_model_key() -> None:
    dumped = yaml.safe_load(dump_spec(load_spec(GOOD, "x", ["train.grad_clip=null"])))
    assert dumped["model"] == {"preset": "llama-tiny"}
    assert dumped["train"]["grad_clip"] is None
    assert set(dumped) == {f.name for f in fields(JobSpec)}
    assert set(dumped["cluster"]) == {f.name for f in fields(ClusterSpec)} - {
        "kubernetes",
        "gpu",
    }


@pytest.mark.parametrize("more", ["cluster.backend=kubernetes", "cluster.kubernetes.shm=1Gi"])
def test_a_dump_contains_kubernetes_if_the_job_sets_it(more: str) -> None:
    assert "kubernetes" in yaml.safe_load(dump_spec(load_spec(GOOD, "x", [more])))["cluster"]


texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1)
config_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(1, 10**6)
models = (
    st.builds(ModelSpec, preset=st.sampled_from(list(PRESETS)))
    | st.builds(ModelSpec, path=texts)
    | st.builds(ModelSpec, config=st.dictionaries(texts, config_values, max_size=4))
)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_subnormal=True)
trains = st.builds(
    lambda steps, warmup, batch, **rest: TrainSpec(
        steps=steps,
        global_batch_size=batch,
        schedule=ScheduleSpec(warmup_steps=min(steps, warmup)),
        **rest,
    ),
    steps=counts,
    warmup=st.integers(0, 100),
    batch=counts,
    seed=st.integers(0, 2**63 - 1),
    optimizer=st.builds(OptimizerSpec, lr=positive, eps=positive),
    compile=st.booleans(),
    grad_clip=st.none() | positive,
)
specs = st.builds(
    JobSpec,
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True),
    model=models,
    data=st.builds(DataSpec, files=texts, sequence_length=st.integers(8, 1 << 20)),
    train=trains,
    parallel=st.builds(ParallelSpec, tp=counts | st.just("auto")),
    cluster=st.builds(ClusterSpec, hosts=counts),
    checkpoint=st.builds(CheckpointSpec, async_=st.booleans()),
    resilience=st.builds(ResilienceSpec, hang_timeout=positive | st.just("auto")),
    run_root=texts,
)


@settings(deadline=None)
@given(specs)
def test_a_dumped_spec_loads_as_an_equal_spec(spec: JobSpec) -> None:
    assert load_spec(dump_spec(spec), "dump") == spec


@pytest.mark.parametrize(
    "text",
    [
        "name: " + "[" * 30_000,
        "name: " + "[" * 30_000 + "]" * 30_000,
        "name: " + "{a: " * 30_000,
        "- " * 30_000,
        "\n".join(" " * depth + f"k{depth}:" for depth in range(500)),
    ],
    ids=["[", "[]", "{", "-", "indented"],
)
def test_very_deep_nesting_is_a_spec_error(text: str) -> None:
    """libyaml crashes the process on such input."""
    with pytest.raises(SpecError, match=r"x:\d+: lists and mappings are nested more than 64 deep"):
        load_spec(text, "x")


@settings(deadline=None)
@given(st.text())
def test_any_text_is_either_a_spec_or_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        load_spec(text, "x")


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_override_is_either_accepted_or_a_spec_error(path: str, value: str) -> None:
    with suppress(SpecError):
        load_spec(GOOD, "x", [f"{path}={value}", f"train.{path}={value}"])


def test_the_model_config_is_read_from_where_the_spec_says(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 64}
    hub = tmp_path / "hub"
    cached = hub / "models--org--name" / "snapshots" / "abc"
    for folder in (tmp_path / "model", cached):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(shape))
    refs = hub / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    assert read_model_config(ModelSpec(config=shape), hub) == shape
    assert read_model_config(ModelSpec(preset="llama-tiny"), hub) == PRESETS["llama-tiny"]
    assert read_model_config(ModelSpec(path=str(tmp_path / "model")), hub) == shape
    assert read_model_config(ModelSpec(path=str(tmp_path / "model/config.json")), hub) == shape
    assert read_model_config(ModelSpec(path="org/name"), hub) == shape
    (refs / "main").unlink()
    assert read_model_config(ModelSpec(path="org/name"), hub) == shape


def test_a_missing_model_config_is_reported_with_the_command_that_fetches_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match=r"hf download org/name config\.json"):
        read_model_config(ModelSpec(path="org/name"), tmp_path)
    with pytest.raises(SpecError, match="a folder with a config"):
        read_model_config(ModelSpec(path=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        read_model_config(ModelSpec(path=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match="a JSON object, got list"):
        read_model_config(ModelSpec(path=str(tmp_path)), tmp_path)


def test_a_vocabulary_is_padded_to_a_multiple(tmp_path: Path) -> None:
    padded = ModelSpec(preset="gpt2-large", pad_vocab_to_multiple_of=128)
    assert read_model_config(padded, tmp_path) == {**PRESETS["gpt2-large"], "vocab_size": 50304}
    exact = ModelSpec(preset="llama3-8b", pad_vocab_to_multiple_of=128)
    assert read_model_config(exact, tmp_path) == PRESETS["llama3-8b"]
    for size in ({}, {"vocab_size": "many"}, {"vocab_size": True}, {"vocab_size": -1}):
        config = {"model_type": "llama", **size}
        with pytest.raises(SpecError, match="needs a vocab_size in the model's config"):
            read_model_config(ModelSpec(config=config, pad_vocab_to_multiple_of=2), tmp_path)


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_hub_cache_path_equals_that_of_huggingface_hub(
    environ: dict[str, str], cache: str
) -> None:
    assert hub_cache(environ) == Path(cache)


def test_a_pattern_that_re2_cannot_match_is_refused_with_its_line_and_a_fix() -> None:
    classes = """resilience:
  failure_classes:
    - name: ours
      scope: user
      action: stop
      patterns:
        - '(a+)+$'
        - '(?=x)y'
        - '(x)\\1'
      unless: ['(']
"""
    text = (EXAMPLES / "quickstart.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("resilience:")]
    broken = "\n".join((*lines, classes))
    with pytest.raises(SpecError) as caught:
        load_spec(broken, "own.yaml")
    expected = str(caught.value)
    for pattern, fix in (("(?=x)y", "look-ahead"), ("(x)\\1", "back-reference"), ("['(']", "RE2")):
        number = next(n for n, line in enumerate(broken.splitlines(), 1) if pattern in line)
        assert f"own.yaml:{number}: resilience.failure_classes[0]." in expected
        assert fix in expected
    assert "(a+)+" not in expected
    fine = broken.replace("'(?=x)y'", "x").replace("'(x)\\1'", "y").replace("['(']", "[z]")
    (rule,) = load_spec(fine, "own.yaml").resilience.failure_classes
    assert (rule.patterns, rule.unless) == (("(a+)+$", "x", "y"), ("z",))


def test_problems_are_in_the_order_of_the_lines() -> None:
    text = (
        "cluster: {hosts: two}\n"
        "name: bad job\n"
        "resilience: {max_restarts: -3}\n"
        "model: {preset: lama-tiny}\n"
        'train: {steps: "60"}\n'
        "data: {files: x, sequence_length: 256k}\n"
    )
    with pytest.raises(SpecError) as failed:
        load_spec(text, "job.yaml", ["train.stpes=1"])
    places = [place for place, _ in failed.value.placed]
    lines = [int(place.rpartition(":")[2]) for place in places if not place.startswith("--set")]
    assert lines == sorted(lines)
    assert len(set(lines)) >= 5
