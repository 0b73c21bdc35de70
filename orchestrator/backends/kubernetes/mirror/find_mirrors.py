"""Opens mirrors of jobs: existing ones, and new ones of jobs in the cluster."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.backends.kubernetes.api.api_errors import Forbidden, Missing
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.checks import permissions
from orchestrator.backends.kubernetes.mirror.mirror import Mirror
from orchestrator.backends.kubernetes.mirror.mirror_paths import (
    IN_CLUSTER,
    folder_of,
    is_mirror,
    known_mirrors,
)
from orchestrator.backends.kubernetes.mirror.remote import read_remote
from orchestrator.backends.kubernetes.observe.object_fields import LABEL
from orchestrator.backends.kubernetes.resources import JOB_KINDS, name_of
from orchestrator.errors import BackendError, JobError, Unreachable
from orchestrator.seams import Clock


def open_mirror(path: Path, environ: Mapping[str, str], clock: Clock) -> Mirror:
    """An existing mirror."""
    context = read_remote(path).context
    api = Api(None if context == IN_CLUSTER else context, environ, clock)
    return Mirror(path, api)


def seek_mirror(
    run_root: Path,
    job: str,
    context: str | None,
    namespace: str | None,
    environ: Mapping[str, str],
    clock: Clock,
) -> Mirror:
    """The mirror of a job in the cluster; creates it if needed. Raises JobError if there is
    none."""
    api = Api(context, environ, clock)
    space = namespace or api.namespace
    made = Mirror(folder_of(run_root, api.context, space, job), api)
    seen_before = is_mirror(made.run_dir.path)
    try:
        with _all_rights(api, space):
            if _adopted(made, space, job) or seen_before:
                return made
    except BackendError:
        if not seen_before:
            raise
        return made  # `refresh` reports why the cluster is unreachable
    raise JobError(
        f"no job {job!r} in namespace {space} of {api.context} ({api.server})",
        fix=f"`ndctl list --backend kubernetes -n {space}` lists existing ones",
    )


@contextlib.contextmanager
def _all_rights(api: Api, space: str) -> Iterator[None]:
    """Raises Forbidden with all missing rights of a person who looks at jobs. The API server
    reports the first one only, and each grant would then lead to the next refusal."""
    try:
        yield
    except Forbidden:
        kinds = [one.resource for one in JOB_KINDS.values() if api.has(one.resource)]
        permissions.require(api, permissions.looking(kinds), space, "its jobs cannot be shown")
        raise


def _adopted(made: Mirror, space: str, job: str) -> bool:
    for kind, one in JOB_KINDS.items():
        try:
            found = made.api.get(one.resource, space, job)
        except Missing:
            continue  # the cluster has no such kind
        if found is not None and made.adopt(kind, space, found):
            return True
    return False


def mirrors_at(
    run_root: Path,
    context: str | None,
    namespace: str | None,
    environ: Mapping[str, str],
    clock: Clock,
) -> list[Mirror]:
    """Mirrors of all ndctl jobs in a namespace; the existing ones if the cluster is unreachable."""
    api = Api(context, environ, clock)
    space = namespace or api.namespace
    found = []
    try:
        with _all_rights(api, space):
            for kind, one in JOB_KINDS.items():
                with contextlib.suppress(Missing):
                    for job in api.list(one.resource, space, labels=LABEL).items:
                        made = Mirror(folder_of(run_root, api.context, space, name_of(job)), api)
                        if made.adopt(kind, space, job):
                            found.append(made)
    except Unreachable:
        above = folder_of(run_root, api.context, space, "")
        known = [path for path in known_mirrors(run_root) if path.parent == above]
        if not known:
            raise
        return [Mirror(path, api) for path in known]
    return sorted(found, key=lambda one: one.run_dir.path.name)
