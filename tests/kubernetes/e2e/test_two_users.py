"""Two users have a job of the same name in different namespaces."""

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.kubernetes.e2e.person import SLEEPS, Person, account
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
OWN = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]


def has_pods(person: Person) -> bool:
    return list(person.pods().values()) == ["Running"] * 2


def test_two_users_each_have_a_job_of_the_name_and_see_no_other(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    spaces = [kube.namespace("team-a"), kube.namespace("team-b")]
    for name in spaces:
        account(kube, name)
    kube.kubectl("create", "clusterrole", "test-nodes", "--verb=get,list", "--resource=nodes")
    bound = ("clusterrolebinding", "test-nodes", "--clusterrole=test-nodes", "--user=dev")
    kube.kubectl("create", *bound)
    try:
        # ndctl takes the namespace from the kubeconfig's context.
        dev = Person(tmp_path / "dev", kube, "", kube.as_user(OWN, "team-a"))
        admin = Person(tmp_path / "admin", kube, "team-b")
        dev.submit_successfully(pod_template=SLEEPS)
        admin.submit_successfully(pod_template=SLEEPS)
        for person, space in ((dev, "team-a"), (admin, "team-b")):
            kube.wait_for("pods", partial(has_pods, admin.at(space)))
            listed = person("list")
            assert listed.out.count("\ne2e") == 1, listed.out
            assert f"PyTorchJob {space}/e2e: 2 of 2 pods run" in person("status", "e2e").out

        refused = dev("status", "e2e", "--backend=kubernetes", "-n", "team-b")
        assert refused.code == exit_codes.BACKEND
        assert "dev may not get pytorchjobs.kubeflow.org in namespace team-b" in refused.err
        assert admin("status", "e2e", "--backend=kubernetes", "-n", "team-a").code == 0
        both = admin("status", "e2e")
        assert both.code == exit_codes.BAD_JOB_STATE
        assert "2 jobs are named e2e" in both.err
        options = sorted(re.findall(r"`(--run-root [^`]+)`", both.err))
        for space, chosen in zip(spaces, options, strict=True):
            assert f"PyTorchJob {space}/e2e" in admin("status", "e2e", *shlex.split(chosen)).out

        assert dev("cancel", "e2e").code == 0
        assert admin.at("team-a").pods() == {}
        assert has_pods(admin)
    finally:
        kube.kubectl("delete", "clusterrole,clusterrolebinding", "test-nodes")
