"""What the build does beside packing: compile the wires' kernels, where there is a C compiler.

A wheel with the library inside is one for this kind of machine; without a compiler it is for any,
and torch does the kernels' work. An editable install leaves the library beside its source.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles src/matcha/wires/kernels.c for wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before files are collected."""
        file = Path(self.root, "src", "matcha", "wires", "library.py")
        spec = importlib.util.spec_from_file_location("library", file)
        assert spec is not None
        assert spec.loader is not None
        library = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(library)
        problem = library.compile_kernels()
        if problem:
            self.app.display_warning(
                f"coded wires will be slower, without compiled code: {problem}"
            )
        elif version != "editable":
            build_data["artifacts"].append(str(library.path().relative_to(self.root)))
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"
