"""Variables that a command hands to the ranks from the container in which it runs, such as that of
an MPIJob's launcher. Ranks that run in other pods get them from the same Secrets and ConfigMaps.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.specs.foreign.around_program import exported_by_mpi
from orchestrator.specs.foreign.carried import Carried, braced, variables_of
from orchestrator.specs.foreign.pods.manifests import Pods, at

REFERENCE = re.compile(r"\$\((\w+)\)")
"""Kubernetes itself replaces it by a variable of the container."""
IS_VARIABLE = re.compile(r"\$\{(\w+)\}")


def with_handed(
    carried: Carried, pods: Pods, container: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """The `container` of a rank, with the variables that the command `words` hands to the rank.
    `run.env` has them no more: its values would be those of the person who submits."""
    runs_in = container if pods.launcher is None else pods.launcher
    given = {str(at(one, "name")): one for one in runs_in.get("env") or []}
    handed = {name: name for name in exported_by_mpi(words) if _is_known(given, name)}
    handed |= _moved(carried, given)
    renamed = [{**given[of], "name": name} for name, of in handed.items() if name != of]
    own = container.get("env") or []
    if pods.launcher is None:
        return {**container, "env": [*own, *renamed]}

    carried.of_pods += [name for name, one in given.items() if "valueFrom" in one]
    wanted = {name for name, of in handed.items() if name == of}
    wanted |= {name for of in handed.values() for name in _used(given[of])}
    for name in reversed(given):  # a value has references to earlier ones only
        wanted |= _used(given[name]) if name in wanted else set()
    more = [*(one for name, one in given.items() if name in wanted), *renamed]
    names = {*wanted, *handed}
    said = {*names, *handed.values()}
    if left := [name for name, one in given.items() if name not in said and one not in own]:
        carried.leave(
            f"variables of the Launcher, {', '.join(left)}: write those that ranks need to"
            " cluster.kubernetes.env"
        )
    sources = _sources(carried, pods, given)
    return {
        **container,
        "env": [*more, *(one for one in own if at(one, "name") not in names)],
        "envFrom": [*sources, *(container.get("envFrom") or [])],
    }


def _is_known(given: Mapping[str, Any], name: str) -> bool:
    """`PATH: $PATH:/opt/bin` is not: nothing replaces it by the PATH of the image."""
    value = str(at(given.get(name), "value"))
    return name in given and name not in variables_of(braced(value))


def _moved(carried: Carried, given: Mapping[str, Any]) -> dict[str, str]:
    """Removes from `run.env` what is a variable of the container `given`, as in
    `-x TOKEN=$(HF_TOKEN)`. Returns name -> name in the container."""
    moved = {
        name: found[1]
        for name, value in carried.run.get("env", {}).items()
        if (found := IS_VARIABLE.fullmatch(value)) is not None and found[1] in given
    }
    _remove(carried, moved)
    return moved


def _remove(carried: Carried, names: Mapping[str, Any]) -> None:
    env = {name: one for name, one in carried.run.pop("env", {}).items() if name not in names}
    if env:
        carried.run["env"] = env


def _used(variable: Mapping[str, Any]) -> set[str]:
    return {*REFERENCE.findall(str(variable.get("value")))}


def _sources(carried: Carried, pods: Pods, given: Mapping[str, Any]) -> list[Any]:
    """The `envFrom` of the launcher, if the command hands a variable of it to the ranks."""
    sources: list[Any] = at(pods.launcher, "envFrom") or []
    names = {*REFERENCE.findall(" ".join(map(str, pods.command or [])))} - {*given}
    env = carried.run.get("env", {})
    handed = {name: name for name in names if sources and env.get(name) == f"${{{name}}}"}
    _remove(carried, handed)
    return sources if handed else []
