"""Other distributions with a package of ndctl's name, as pip leaves them."""

from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.contract.check_results import Finding
from orchestrator.health.package_owners import HOME, other_owners


def install(site: Path, name: str, version: str, package: str) -> None:
    """The files of pip, for one distribution with one package."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / package).mkdir(exist_ok=True)
    (site / package / "__init__.py").write_bytes(b"")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    digest = urlsafe_b64encode(sha256(b"").digest()).rstrip(b"=").decode()
    lines = (f"{package}/__init__.py,sha256={digest},0", f"{info.name}/METADATA,,")
    (info / "RECORD").write_text("\n".join(lines))


def found(home: Path) -> tuple[Finding, ...]:
    other_owners.cache_clear()
    try:
        return other_owners(home)
    finally:
        other_owners.cache_clear()


def test_this_installation_has_its_names_alone() -> None:
    assert found(HOME) == ()


@pytest.mark.parametrize("order", ["ndctl last", "trainer last"])
def test_a_distribution_in_the_same_folder_is_named_with_the_commands_that_repair_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    install(tmp_path, "trainer", "0.0.36", "trainer")
    install(tmp_path, "ndctl", "7.1", "trainer")
    if order == "trainer last":
        (tmp_path / "trainer" / "__init__.py").write_text("from trainer.trainer import Trainer\n")
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = found(tmp_path)
    said = "trainer 0.0.36 has a package `trainer`, as ndctl has, "
    if order == "trainer last":
        assert (one.what, one.verdict) == ("trainer", "stops")
        lost = (
            f"and has overwritten ndctl's trainer/__init__.py in {tmp_path}: jobs fail to import it"
        )
        assert one.found == said + lost
    else:
        assert (one.what, one.verdict) == ("trainer", "warns")
        assert one.found.startswith(f"{said}in the same folder {tmp_path}: the next upgrade")
    assert "pip uninstall trainer && " in one.fix
    assert "--force-reinstall --no-deps ndctl==7.1" in one.fix


def test_one_elsewhere_does_no_harm_and_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "orchestrator", "2.0", "orchestrator")
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = found(HOME)
    assert (one.what, one.verdict) == ("orchestrator", "note")
    assert one.found.endswith("ndctl uses its own, and your scripts get the one of orchestrator")
