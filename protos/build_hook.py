"""Generates the protobuf and gRPC modules into `protos/_gen` whenever the project is installed or packed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def generate(protos: Path) -> None:
    """Compile every .proto below `protos` into `protos/_gen`, with imports that work inside this package."""
    import grpc_tools
    from grpc_tools import protoc

    out = protos / "_gen"
    out.mkdir(exist_ok=True)
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = [str(path) for path in sorted(protos.glob("headrace/v1/*.proto"))]
    arguments = [
        f"-I{protos}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    if protoc.main(["protoc", *arguments, *sources]) != 0:
        raise RuntimeError("protoc failed; its messages are above")
    package = out / "headrace" / "v1"
    for folder in (out, out / "headrace", package):
        (folder / "__init__.py").touch()
    for module in [*package.glob("*.py"), *package.glob("*.pyi")]:
        text = module.read_text()
        module.write_text(re.sub(r"^from headrace\.v1 import", "from protos._gen.headrace.v1 import", text, flags=re.M))


class GenerateProtos(BuildHookInterface[Any]):
    """Hatchling's hook: runs before a wheel, an sdist or an editable install is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root) / "protos")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
