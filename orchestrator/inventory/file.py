"""Reads an inventory that a user wrote in YAML: hosts that are all equal, or a list of hosts."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.codec import UNKNOWN_KEY, Invalid, Problem, fields_of
from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.contract.spec.limits import AtLeast, AtMost
from orchestrator.contract.spec.types import Count, Devices, Hosts
from orchestrator.errors import SpecError
from orchestrator.inventory.generate import LEVELS, regular
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile, unknown_profile
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.software import hosts_for_software, software_names, unknown_software
from orchestrator.yaml_document import Document, decode_document, parse, read_text, spec_error

T = TypeVar("T")
EXAMPLE = "{profile: h100-sxm-80gb, hosts: 16, devices_per_host: 8, hosts_per_leaf: 8}"
NUMBERS = fields_of(Profile).keys() - {"name", "device", "sources"}
"""Keys of a profile that an inventory can override."""
WHOLE_HOST = re.compile(r"hosts\[\d+\]")
OTHER_NAMES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("gpu", "gpu_type", "gpu_name", "device", "type"), ("profile", "profile")),
    **dict.fromkeys(
        ("gpus", "num_gpus", "gpu_count", "gpus_per_host", "gpus_per_node", "devices", "slots"),
        ("devices_per_host", "devices"),
    ),
    **dict.fromkeys(
        ("host", "hostname", "node", "nodes", "names", "num_hosts", "num_nodes"), ("hosts", "name")
    ),
    **dict.fromkeys(("price", "cost_per_hour"), ("price_per_gpu_hour", "price_per_gpu_hour")),
    **dict.fromkeys(("switch", "leaf", "rack"), ("hosts_per_leaf", "switches")),
}
"""What keys are called elsewhere -> the key of the inventory, and that of one of its hosts."""


def check_profile(name: str | None) -> None:
    """Raises Invalid if `name` cannot be the name of a profile."""
    if name is None or name in PROFILE_NAMES or name.endswith((".yaml", ".yml")):
        return
    raise Invalid([unknown_profile(name)])


def check_software(name: str | None) -> None:
    """Raises Invalid if `name` is no training software that is known."""
    if name is not None and name not in software_names():
        raise Invalid([unknown_software(name)])


Price = Annotated[float, AtLeast(0)] | None
"""Of one device for an hour, in any currency."""


class AlikeHosts(Struct, frozen=True, kw_only=True):
    """The short form: all hosts are equal."""

    profile: str
    hosts: Hosts
    devices_per_host: Devices
    hosts_per_nvlink_block: Count | None = None
    hosts_per_leaf: Count | None = None
    hosts_per_spine: Count | None = None
    hosts_per_core: Count | None = None
    price_per_gpu_hour: Price = None
    software: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_profile(self.profile)
        check_software(self.software)

    @property
    def hosts_per(self) -> tuple[int | None, ...]:
        return (self.hosts_per_leaf, self.hosts_per_spine, self.hosts_per_core)


class HostEntry(Struct, frozen=True, kw_only=True):
    name: str
    """A name, or several equal hosts as Slurm writes them: `node-[001-016,020]`."""
    devices: Annotated[int, AtLeast(0), AtMost(1_024)] | None = None
    profile: str | None = None
    state: Literal["free", "busy", "drained"] = "free"
    switches: tuple[str, ...] = ()
    nvlink_block: str | None = None
    price_per_gpu_hour: Price = None

    def __post_init__(self) -> None:
        check_profile(self.profile)
        try:
            names = expand(self.name)
        except Invalid as exc:
            raise Invalid([replace(one, path="name") for one in exc.problems]) from exc
        if not names:
            limit, fix = "a name, or a list of names", "for example node-[001-016]"
            raise Invalid([Problem(path="name", value=self.name, limit=limit, fix=fix)])


class ListedHosts(Struct, frozen=True, kw_only=True):
    hosts: tuple[HostEntry, ...]
    profile: str | None = None
    """For hosts that do not say."""
    devices_per_host: Devices | None = None
    """For hosts that do not say."""
    price_per_gpu_hour: Price = None
    """For hosts that do not say."""
    software: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that replace those of `profile`."""

    def __post_init__(self) -> None:
        check_profile(self.profile)
        check_software(self.software)


def read_inventory(path: Path) -> Inventory:
    """The inventory in the file `path`.

    Raises:
        SpecError: the file cannot be read, or with all its problems, each with its place.
    """
    text = read_text(path, f"an inventory can be as short as {EXAMPLE}")
    return load_inventory(text, str(path))


def profile_in(path: Path) -> Profile | None:
    """The profile, if the file at `path` is one and not an inventory, such as `ndctl calibrate`
    writes."""
    document = parse(read_text(path, f"an inventory can be as short as {EXAMPLE}"), str(path))
    is_profile = isinstance(document.data, dict) and "flops" in document.data
    return load_profile(str(path)) if is_profile else None


def load_inventory(text: str, source: str) -> Inventory:
    """The inventory in `text`. `source` names the text in messages."""
    document = parse(text, source)
    if not isinstance(document.data, dict):
        problem = Problem(
            path="",
            value="an empty file" if document.data is None else document.data,
            limit="a mapping of the keys of an inventory",
            fix=f"start from {EXAMPLE}",
        )
        raise spec_error(source, [(f"{source}:1", problem)])
    if isinstance(document.data.get("hosts"), list):
        return _listed(document)
    return _alike(document)


def _decoded(cls: type[T], document: Document) -> T:
    """`document` as a `cls`. If it has problems, those of its overrides are reported with them."""
    try:
        return decode_document(cls, document, partial(_placed, document.data))
    except SpecError:
        name, overrides = document.data.get("profile"), document.data.get("overrides")
        if name in PROFILE_NAMES and isinstance(overrides, dict):
            _profile(document, "profile", name, overrides)
        raise spec_error(document.source, document.problems) from None


def _placed(data: Mapping[str, Any], problems: Sequence[Problem]) -> list[Problem]:
    """`problems` of the inventory `data`, with the key that was meant where another tool's name, or
    another place, shows it."""
    return [_placed_key(data, problem) for problem in problems]


def _placed_key(data: Mapping[str, Any], problem: Problem) -> Problem:
    above, _, key = problem.path.rpartition(".")
    if WHOLE_HOST.fullmatch(problem.path) and isinstance(problem.value, str):
        return replace(problem, fix=f"write it as {{name: {problem.value}}}")
    if problem.words != UNKNOWN_KEY:
        return problem
    if key in OTHER_NAMES:
        meant = OTHER_NAMES[key][1 if above else 0]
        return replace(problem, fix=f"did you mean {above + '.' if above else ''}{meant}?")
    if key not in NUMBERS:
        return problem
    if above:
        fix = f"write a profile of your own to a file, and name the file in {above}.profile"
        return replace(problem, words="belongs to the profile of the host", fix=fix)
    value = data[key]
    # YAML reads 400e9 as a float, and a number of bytes is whole.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    shown = "{…}" if isinstance(value, Mapping) else value
    fix = f"write overrides: {{{key}: {shown}}}"
    return replace(problem, words="belongs to the profile", fix=fix)


def _alike(document: Document) -> Inventory:
    short = _decoded(AlikeHosts, document)
    for problem in _tree_problems(short):
        document.report(problem)
    profile = _profile(document, "profile", short.profile, short.overrides)
    if short.hosts_per_nvlink_block and profile is not None:
        _check_link(document, "hosts_per_nvlink_block", short.hosts_per_nvlink_block, profile)
    if document.problems:
        raise spec_error(document.source, document.problems)
    sizes = [size for size in short.hosts_per if size is not None]
    block = short.hosts_per_nvlink_block
    price = short.price_per_gpu_hour
    found = regular(profile, short.hosts, short.devices_per_host, sizes, block, price)
    return hosts_for_software(found, short.software) if short.software else found


def _tree_problems(short: AlikeHosts) -> Iterator[Problem]:
    """A switch must hold a whole number of the switches below it, and no level may be left out."""
    for below, above, low, high in zip(
        LEVELS, LEVELS[1:], short.hosts_per, short.hosts_per[1:], strict=False
    ):
        if high is None:
            continue
        path = f"hosts_per_{above}"
        if low is None:
            fix = f"add hosts_per_{below}, or rename this key to hosts_per_{below}"
            yield Problem(path=path, value=high, limit=f"given with hosts_per_{below}", fix=fix)
        elif high % low:
            limit = f"a multiple of hosts_per_{below} ({low})"
            fix = f"set {path} to {max(1, high // low) * low}"
            yield Problem(path=path, value=high, limit=limit, fix=fix)
    block, leaf = short.hosts_per_nvlink_block, short.hosts_per_leaf
    if block and leaf and leaf % block:
        limit = f"a multiple of hosts_per_nvlink_block ({block}), because a block has one leaf"
        fix = f"set hosts_per_leaf to {max(1, leaf // block) * block}"
        yield Problem(path="hosts_per_leaf", value=leaf, limit=limit, fix=fix)


def _check_link(document: Document, path: str, value: int | str, profile: Profile) -> None:
    """Hosts whose devices are connected by PCIe cannot be in an NVLink block."""
    kind = (profile.intra_block or profile.intra_host).kind
    if not kind.startswith("nvlink"):
        limit = f"for hosts with NVLink, but {profile.name} has {kind} inside a host"
        fix = "remove it, or set overrides.intra_block: {kind: nvlink5, …}"
        document.report(Problem(path=path, value=value, limit=limit, fix=fix))


def _listed(document: Document) -> Inventory:
    listed = _decoded(ListedHosts, document)
    default = _profile(document, "profile", listed.profile, listed.overrides)
    if listed.overrides and listed.profile is None:
        limit = "given with profile, whose numbers it changes"
        document.report(Problem(path="overrides", limit=limit, fix="add profile"))
    profiles: dict[str | None, Profile | None] = {None: default}
    hosts: list[Host] = []
    for number, entry in enumerate(listed.hosts):
        path = f"hosts[{number}]"
        if entry.profile not in profiles:
            profiles[entry.profile] = _profile(document, f"{path}.profile", entry.profile, {})
        if entry.profile is None and listed.profile is None:
            fix = f"add {path}.profile, or a profile for all hosts"
            document.report(Problem(path=f"{path}.profile", limit="given", fix=fix))
        hosts += _hosts(document, path, entry, listed, profiles[entry.profile])
    _check_names(document, listed, hosts)
    _check_blocks(document, listed, profiles)
    if document.problems:
        raise spec_error(document.source, document.problems)
    found = Inventory(hosts=tuple(hosts))
    return hosts_for_software(found, listed.software) if listed.software else found


def _hosts(
    document: Document, path: str, entry: HostEntry, listed: ListedHosts, profile: Profile | None
) -> Iterator[Host]:
    """The hosts of `entry`."""
    count = entry.devices if entry.devices is not None else listed.devices_per_host
    price = entry.price_per_gpu_hour
    if count is None:
        fix = f"add {path}.devices, or devices_per_host for all hosts"
        document.report(Problem(path=f"{path}.devices", limit="given", fix=fix))
        return
    for name in expand(entry.name):
        yield Host(
            name=name,
            devices=count,
            device_bytes=profile.memory_bytes if profile else None,
            profile=profile,
            state=entry.state,
            switches=entry.switches,
            nvlink_block=entry.nvlink_block,
            price_per_gpu_hour=listed.price_per_gpu_hour if price is None else price,
        )


def _check_names(document: Document, listed: ListedHosts, hosts: list[Host]) -> None:
    times = Counter(host.name for host in hosts)
    for number, entry in enumerate(listed.hosts):
        path = f"hosts[{number}].name"
        twice = [name for name in expand(entry.name) if times[name] > 1]
        if twice:
            fix = "give each host its own name"
            problem = Problem(path=path, value=twice[0], limit="the name of one host", fix=fix)
            document.report(problem)


def _check_blocks(
    document: Document, listed: ListedHosts, profiles: Mapping[str | None, Profile | None]
) -> None:
    """Hosts of a block share a switch and the kind of device. The number of devices may differ,
    because a host can lose one."""
    first: dict[str, tuple[int, HostEntry]] = {}
    for number, entry in enumerate(listed.hosts):
        block = entry.nvlink_block
        if not block:
            continue
        path, profile = f"hosts[{number}].nvlink_block", profiles[entry.profile]
        if profile is not None:
            _check_link(document, path, block, profile)
        at, known = first.setdefault(block, (number, entry))
        same = f"hosts[{at}], which is in the same block"
        if entry.switches != known.switches:
            limit = f"below the switches of {same}: [{', '.join(known.switches)}]"
            fix = "correct the switches, or name two blocks"
            document.report(Problem(path=path, value=block, limit=limit, fix=fix))
        if profile != profiles[known.profile]:
            limit = f"on hosts with the devices of {same}: {known.profile or listed.profile}"
            fix = "correct the profile, or name two blocks"
            document.report(Problem(path=path, value=block, limit=limit, fix=fix))


def _profile(
    document: Document, path: str, name: str | None, overrides: Mapping[str, Any]
) -> Profile | None:
    """The profile with this name, or in a file at this path relative to the inventory's folder."""
    if name is None:
        return None
    if name.endswith((".yaml", ".yml")):
        name = str(Path(document.source).parent / name)
    try:
        return load_profile(name, overrides, document.source)
    except SpecError as exc:
        for problem in _of_overrides(document, exc) or (_unread(path, name, exc),):
            document.report(problem)
        return None


def _of_overrides(document: Document, exc: SpecError) -> list[Problem]:
    """Problems of the profile that come from the inventory's overrides."""
    problems = exc.__cause__.problems if isinstance(exc.__cause__, Invalid) else ()
    moved = [replace(problem, path=f"overrides.{problem.path}") for problem in problems]
    return [problem for problem in moved if problem.path in document.places]


def _unread(path: str, name: str, exc: SpecError) -> Problem:
    limit = "a profile that can be read"
    return Problem(path=path, value=name, limit=limit, fix=f"correct the file: {exc}")
