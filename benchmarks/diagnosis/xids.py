"""Makes `diagnosis/logs/xids.yaml` from NVIDIA's catalog, as gpud generates it.

python -m benchmarks.diagnosis.xids catalog_generated.go > orchestrator/diagnosis/logs/xids.yaml
"""

import re
import sys
from pathlib import Path

ENTRY = re.compile(
    r'\{Code: (\d+), Mnemonic: "([^"]*)", Description: "([^"]*)", ImmediateResolution: "([^"]*)"'
)
HEAD = """\
# NVIDIA's catalog of Xids: what each is called, and what NVIDIA says is to be done at once.
# Made by `python -m benchmarks.diagnosis.xids`, of
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html as it is in
# https://github.com/leptonai/gpud (components/accelerator/nvidia/xid/catalog_generated.go,
# 2025-10-29). Not to be edited: xids.py says what ndctl does about them.

codes:
"""


def main() -> None:
    lines = [HEAD]
    for code, mnemonic, says, action in ENTRY.findall(Path(sys.argv[1]).read_text()):
        name = mnemonic.split("\\n")[0].removesuffix(" /")
        words = says.replace("\\n", " ").replace("--", "-")
        lines.append(
            f'  - {{code: {code}, mnemonic: {name}, action: "{action}", says: "{words}"}}\n'
        )
    sys.stdout.write("".join(lines))


if __name__ == "__main__":
    main()
