"""What judges the product must not be made of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PLAIN = {"whimbrel.lab.bench.oracle", "whimbrel.lab.chaos.oracle", "whimbrel.lab.chaos.rows"}


def imports(module: str) -> set[str]:
    """The modules of the product that a module imports, at its top or anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            whole = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if _is_module(name) else str(node.module) for name in whole}
    return {name for name in found if name.split(".")[0] == "whimbrel"}


def _is_module(name: str) -> bool:
    return (SOURCE / f"{name.replace('.', '/')}.py").exists()


@pytest.mark.parametrize("module", sorted(PLAIN))
def test_an_oracle_imports_no_code_of_the_product(module: str) -> None:
    assert imports(module) <= PLAIN


def test_an_import_of_the_product_would_be_found() -> None:
    assert "whimbrel.core.operator" in imports("whimbrel.lab.chaos.load")
