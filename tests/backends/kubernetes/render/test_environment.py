"""Environment variables from Secrets and ConfigMaps, and plain values that should be secret."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.kubernetes.render import objects
from orchestrator.contract.spec.kubernetes_spec import (
    EnvFrom,
    KubernetesSpec,
    ValueFrom,
    plain_secrets,
)
from orchestrator.errors import SpecError
from orchestrator.load import dump_spec, load_spec
from tests.backends.kubernetes.rendered import CASES

SPEC = """
name: job
model: {preset: llama-tiny}
data: {files: "*.txt", tokenizer: bytes, sequence_length: 128}
train: {steps: 10, global_batch_size: 8}
cluster:
  backend: kubernetes
  hosts: 2
  gpus_per_host: 2
  kubernetes:
    env:
      OMP_NUM_THREADS: "1"
      HF_TOKEN: {secret: hub, key: token}
      PROXY: {config_map: site, key: proxy}
    env_from: [{secret: wandb}, {config_map: site, prefix: SITE_}]
"""


def test_a_dumped_spec_keeps_the_source_of_a_value() -> None:
    spec = load_spec(SPEC, "x")
    assert spec.cluster.kubernetes.env == {
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": ValueFrom(secret="hub", key="token"),
        "PROXY": ValueFrom(config_map="site", key="proxy"),
    }
    assert spec.cluster.kubernetes.env_from == (
        EnvFrom(secret="wandb"),
        EnvFrom(config_map="site", prefix="SITE_"),
    )
    assert load_spec(dump_spec(spec), "dump") == spec


@pytest.mark.parametrize(
    ("was", "instead", "said"),
    [
        ("{secret: hub, key: token}", "{secret: hub}", "HF_TOKEN.key: must be given"),
        ("{secret: hub, key: token}", "{key: token}", "must be given exactly one source"),
        ("{secret: hub, key: token}", "{key: k, secret: a, config_map: b}", "exactly one source"),
        ("{secret: hub, key: token}", "{secretKeyRef: hub}", "HF_TOKEN.secretKeyRef: unknown key"),
        ("{secret: hub, key: token}", "7", "HF_TOKEN: must be a string or key: value pairs"),
        ("{secret: wandb}", "{}", "env_from[0]: must be given exactly one source"),
    ],
)
def test_a_mistake_in_a_source_is_reported_with_its_place(
    was: str, instead: str, said: str
) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(SPEC.replace(was, instead), "x")
    assert said in str(refused.value)


def test_a_pod_names_the_source_and_no_rendered_object_has_the_value() -> None:
    made = objects(CASES["pytorchjob-full"])
    pod = made[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one for one in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}
    assert env["NCCL_ALGO"]["valueFrom"] == {"configMapKeyRef": {"name": "nccl", "key": "algo"}}
    assert container["envFrom"] == [
        {"secretRef": {"name": "wandb"}},
        {"prefix": "PROXY_", "configMapRef": {"name": "proxies"}},
    ]
    assert "envFrom" not in json.dumps(objects(CASES["pytorchjob"]))


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("HF_TOKEN", "hf_abc", True),
        ("WANDB_API_KEY", "abc", True),
        ("aws_secret_access_key", "abc", True),
        ("DB_PASSWORD", "abc", True),
        ("CREDENTIALS_JSON", "{}", True),
        ("SECRET", "abc", True),
        ("HF_TOKEN", "", False),
        ("HF_TOKEN", ValueFrom(secret="hub", key="token"), False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/secrets/gcp/key.json", False),
        ("HF_TOKEN_PATH", "/secrets/token", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("NCCL_DEBUG", "INFO", False),
        ("MONKEY", "see", False),
    ],
)
def test_a_plain_value_under_the_name_of_a_secret_gives_a_warning(
    name: str, value: Any, is_found: bool
) -> None:
    assert plain_secrets(KubernetesSpec(env={name: value})) == (
        (f"env.{name}",) if is_found else ()
    )
    if isinstance(value, str):
        variables = [{"name": name, "value": value}]
        template = {"spec": {"containers": [{"name": "pytorch", "env": variables}]}}
        place = f"pod_template.spec.containers[0].env.{name}"
        assert plain_secrets(KubernetesSpec(pod_template=template)) == (
            (place,) if is_found else ()
        )


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=3),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.dictionaries(st.sampled_from(["spec", "containers", "env", "name"]), inside)
        ),
    )
)
def test_any_template_can_be_searched_for_plain_secrets(template: Any) -> None:
    if isinstance(template, dict):
        plain_secrets(KubernetesSpec(pod_template=template))
