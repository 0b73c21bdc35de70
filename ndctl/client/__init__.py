"""What notebooks and other programs call: submit jobs and look at them.

They need `orchestrator`, the package beside `ndctl`. A notebook may lie next to another one.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_OURS = Path(__file__).resolve().parents[2] / "orchestrator" / "__init__.py"


def _load_orchestrator() -> None:
    loaded = sys.modules.get("orchestrator")
    if loaded is not None:
        if Path(loaded.__file__ or "").resolve() != _OURS:
            place = loaded.__file__ or next(iter(loaded.__path__), "")
            raise ImportError(
                f"ndctl needs its package `orchestrator`, but this program has imported another one"
                f" from {place}; rename that one, or submit the job from a program of its own"
            )
        return
    spec = spec_from_file_location(
        "orchestrator", _OURS, submodule_search_locations=[str(_OURS.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["orchestrator"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["orchestrator"])


_load_orchestrator()
