"""Makes a benchmark of every contender of every case: the function of a file runs over its ``CASES``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="the tiny cases (SMOKE) of each file, to see that they run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = metafunc.module.SMOKE if metafunc.config.getoption("--smoke") else metafunc.module.CASES
    parameters = [
        pytest.param(case, contender, id=f"{case.label}-{contender}") for case in cases for contender in case.contenders
    ]
    metafunc.parametrize(("case", "contender"), parameters)
