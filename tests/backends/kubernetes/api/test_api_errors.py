"""Each error of an API server names the command that helps."""

import json

import pytest

from orchestrator.backends.kubernetes.api.api_errors import (
    ApiRequest,
    Conflict,
    Expired,
    Forbidden,
    Missing,
    RuntimeUnseen,
    refusal,
)
from orchestrator.errors import BackendError, Unanswered

PODS = ApiRequest(verb="list", path="/api/v1/namespaces/team-a/pods")
JOBS = ApiRequest(verb="patch", path="/apis/kubeflow.org/v1/namespaces/team-a/pytorchjobs/run-1")


def said(message: str, **details: str) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "details": details}).encode()


def test_a_missing_right_is_named_with_the_commands_that_give_it() -> None:
    message = (
        'pods is forbidden: User "dev" cannot list resource "pods" in API group "" in the'
        ' namespace "team-a"'
    )
    error = refusal(PODS, 403, said(message))
    assert error.message == "dev may not list pods in namespace team-a"
    assert (
        "kubectl create role ndctl-list-pods --verb=get,list,watch --resource=pods -n team-a"
    ) in error.fix
    assert (
        "kubectl create rolebinding ndctl-list-pods --role=ndctl-list-pods --user=dev -n team-a"
    ) in error.fix


def test_a_missing_right_of_a_service_account_to_a_subresource_is_named() -> None:
    message = (
        'pytorchjobs.kubeflow.org "run-1" is forbidden: User "system:serviceaccount:team-a:ndctl"'
        ' cannot patch resource "pytorchjobs/status" in API group "kubeflow.org" in the namespace'
        ' "team-a"'
    )
    error = refusal(JOBS, 403, said(message))
    assert "--resource=pytorchjobs.kubeflow.org/status" in error.fix
    assert "--serviceaccount=team-a:ndctl" in error.fix


def test_the_webhook_that_does_not_see_the_runtime_of_a_trainjob_is_told_from_others() -> None:
    """As Trainer 2.3.0 answers."""
    denied = (
        'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request:'
        " spec.runtimeRef: Invalid value: "
    )
    unseen = (
        f'{denied}{{"name":"e2e"}}: TrainingRuntime.trainer.kubeflow.org "e2e" not found:'
        " specified trainingRuntime must be created before the TrainJob is created"
    )
    assert isinstance(refusal(JOBS, 403, said(unseen)), RuntimeUnseen)
    assert not isinstance(refusal(JOBS, 403, said(f"{denied}another")), RuntimeUnseen)


@pytest.mark.parametrize(
    "message",
    [
        'forbidden: User "system:anonymous" cannot get path "/version"',
        'pods is forbidden: User "system:anonymous" cannot list resource "pods" in API group ""',
    ],
)
def test_a_request_without_credentials_is_told_as_a_login_and_not_as_a_right(message: str) -> None:
    error = refusal(PODS, 403, said(message))
    assert not isinstance(error, Forbidden)
    assert error.message.startswith("you are not logged in to the cluster")
    assert "log in" in error.fix
    assert "rolebinding" not in error.fix


def test_a_missing_right_to_nodes_needs_a_cluster_role() -> None:
    message = (
        'nodes is forbidden: User "dev" cannot list resource "nodes" in API group "" at the'
        " cluster scope"
    )
    error = refusal(ApiRequest(verb="list", path="/api/v1/nodes"), 403, said(message))
    assert "kubectl create clusterrole ndctl-list-nodes" in error.fix
    assert "--clusterrole=ndctl-list-nodes --user=dev" in error.fix


def test_rights_that_a_person_cannot_give_to_pods_are_named() -> None:
    message = (
        'roles.rbac.authorization.k8s.io "job-pods" is forbidden: user "dev" (groups=["devs"]) is'
        " attempting to grant RBAC permissions not currently held:\n"
        '{APIGroups:[""], Resources:["pods"], ResourceNames:["job-master-0"], Verbs:["delete"]}'
    )
    error = refusal(ApiRequest(verb="create", path="/x"), 403, said(message))
    assert isinstance(error, Forbidden)
    assert error.user == "dev"
    assert error.message.startswith("dev may not grant the job's pods rights that dev does not")
    assert 'Resources:["pods"]' in error.message
    assert "ndctl-user" in error.fix


def test_a_refusal_without_an_object_name_names_none() -> None:
    """The caller then asks the server for the user. A command must never name a user YOU."""
    message = 'secrets "x" is forbidden: '
    path = "/api/v1/namespaces/team-a/secrets/x"
    error = refusal(ApiRequest(verb="patch", path=path), 403, said(message))
    assert isinstance(error, Forbidden)
    assert error.user == ""


@pytest.mark.parametrize(
    ("asked", "status", "body", "kind", "words"),
    [
        (JOBS, 404, b"404 page not found", Missing, "Kubeflow's training operator v1"),
        (JOBS, 404, said("x not found", name="run-1"), Missing, "x not found"),
        (
            PODS,
            404,
            said('namespaces "team-a" not found', name="team-a"),
            Missing,
            "kubectl create namespace team-a",
        ),
        (PODS, 403, said("exceeded quota: gpus, used 8, limited 8"), BackendError, "resourcequota"),
        (PODS, 409, said("already exists"), Conflict, "already exists"),
        (PODS, 410, said("too old resource version"), Expired, "too old"),
        (PODS, 429, said("try later"), Unanswered, "try later"),
        (PODS, 503, b"", Unanswered, "503"),
        (PODS, 401, said("Unauthorized"), BackendError, "log in"),
        (PODS, 422, said("spec.x: Invalid value"), BackendError, "spec.x: Invalid value"),
    ],
)
def test_other_answers_become_the_right_error_class(
    asked: ApiRequest, status: int, body: bytes, kind: type[BackendError], words: str
) -> None:
    error = refusal(asked, status, body)
    assert type(error) is kind or (kind is BackendError and isinstance(error, BackendError))
    assert isinstance(error, Unanswered) == (kind is Unanswered)
    assert words in str(error)
