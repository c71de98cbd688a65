"""Settings, seeds and config.json: whatever is typed or found there, the answer is a value or a StudyError."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fastmod.runs.config import Config, StudyError, changed, seeds_of, settings_of
from fastmod.runs.folder import Plan, RunFolder
from fastmod.studies import registry
from tests.helpers.study_hooks import limit_memory

STUDIES = registry.names()
KEYS = sorted({field.name for name in STUDIES for field in dataclasses.fields(registry.get(name).defaults)})
numbers = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["1e999", "-inf", "nan", "0x10", "1_000", "٣", "²", "9" * 5000, "1" + "0" * 400, "1e5", "+1", "-0", ""]
    ),
)
texts = st.one_of(st.text(), numbers, st.lists(numbers).map(",".join), st.sampled_from(["none", "true", "No", "TRUE"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> Iterator[None]:
    """A range of seeds that is taken at its word fails a test, not the machine."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    before = limit_memory(2**30)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What comes out, and what a StudyError says; any other exception is the test's failure."""
    try:
        return call(), ""
    except StudyError as error:
        return None, str(error)


def as_read_back(config: Config) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(config)))


@pytest.mark.parametrize("study", STUDIES)
@given(key=st.sampled_from(KEYS), value=texts | json_values)
@settings(max_examples=150)
@example(key="lr", value=10**400)
@example(key="steps", value=math.inf)
@example(key="batch", value=str(2**70))
@example(key="chunk", value="0")
def test_any_value_of_a_key(study: str, key: str, value: Any) -> None:
    defaults = registry.get(study).defaults
    config, refusal = attempt(lambda: changed(defaults, {key: value}))
    if config is None:
        assert any(word in refusal for word in (key, "chunk", "evaluate_every", "lr and clip")), "names what is wrong"
        return
    # What is accepted has the declared type, which is also that of the default where the default is not None.
    got, default = getattr(config, key), getattr(defaults, key)
    assert got is None or default is None or type(got) is type(default)
    again = changed(defaults, as_read_back(config))
    assert repr(again) == repr(config), "config.json gives back what was set; repr, since NaN differs from itself"


@given(key=st.text(), value=texts)
def test_any_key(key: str, value: str) -> None:
    assume(key not in KEYS)
    with pytest.raises(StudyError, match="unknown key"):
        changed(registry.get("algo").defaults, {key: value})


@given(chosen=st.dictionaries(st.sampled_from(["steps", "chunk", "evaluate_every"]), st.integers(-3, 40)))
def test_rhythm(chosen: dict[str, int]) -> None:
    """Accepted exactly when the engine can keep it: evaluation and end lie between chunks."""
    values = {"steps": 24, "chunk": 4, "evaluate_every": 8, **chosen}
    fits = (
        min(values.values()) > 0
        and values["steps"] % values["chunk"] == values["evaluate_every"] % values["chunk"] == 0
    )
    config, refusal = attempt(lambda: Config(**values))
    assert bool(config) == fits, refusal


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "nan"), ("lr", "0"), ("lr", "-1e-3"), ("clip", "nan"), ("steps", "2.5"), ("steps", 2.5), ("steps", ""),
     ("batch", "many"), ("batch", "0"), ("chunk", "-50"), ("noisy", "maybe"), ("noisy", "2"), ("width", "none"),
     ("steps", str(2**31)), ("steps", None), ("steps", [1]), ("lr", {})],
)  # fmt: skip
def test_bad_values(key: str, value: Any) -> None:
    with pytest.raises(StudyError, match=key):
        changed(registry.get("algo").defaults, {key: value})


@pytest.mark.parametrize("value", ["", "1,", "0.9,0.8", "0.5,0.5", "a", "none", "0.5;0.6"])
def test_bad_thresholds(value: str) -> None:
    with pytest.raises(StudyError, match="thresholds"):
        changed(registry.get("addmul").defaults, {"thresholds": value})


def test_good_values() -> None:
    found = changed(registry.get("addmul").defaults, {"thresholds": "0.1, 0.2", "width": "3", "depth": "none", "lr": 1})
    assert (found.thresholds, found.width, found.depth, found.lr) == ((0.1, 0.2), 3, None, 1.0)  # type: ignore[attr-defined]
    assert type(found.lr) is float
    found = changed(registry.get("bpmnist").defaults, {"data": "a=b", "verify": "No"})
    assert (found.data, found.verify) == ("a=b", False)  # type: ignore[attr-defined]


@given(st.lists(st.text() | st.tuples(st.sampled_from(KEYS), texts).map("=".join)))
def test_any_pairs(pairs: list[str]) -> None:
    found, refusal = attempt(lambda: settings_of(pairs))
    if refusal:
        assert any(not pair.partition("=")[0].strip() or "=" not in pair for pair in pairs)
    else:
        assert len(found) <= len(pairs) and all(isinstance(value, str) for value in found.values())


def test_pairs() -> None:
    assert settings_of([" width = 8", "data=a=b", "width=9", "data="]) == {"width": "9", "data": ""}


# ---- seeds


@given(st.text() | st.text(alphabet="0123456789-, ") | texts)
@example("9" * 5000)
@example("0-" + "9" * 5000)
@example("0-999999999")
@example("\u0660-\u0662")  # digits, but not 0 to 9
def test_any_seeds(text: str) -> None:
    seeds, refusal = attempt(lambda: seeds_of(text))
    if refusal:
        assert "--seeds" in refusal
    else:
        assert seeds and len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)


@given(st.lists(st.tuples(st.integers(0, 10**9 - 1), st.integers(0, 50)), min_size=1, max_size=5))
def test_ranges_of_seeds(ranges: list[tuple[int, int]]) -> None:
    ranges = [(first, min(first + more, 10**9 - 1)) for first, more in ranges]
    expected = [seed for first, last in ranges for seed in range(first, last + 1)]
    text = ",".join(f"{first}-{last}" if last > first else f" {first} " for first, last in ranges)
    if len(set(expected)) == len(expected):
        assert seeds_of(text) == expected
    else:
        with pytest.raises(StudyError, match="distinct"):
            seeds_of(text)


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "-1", "3-1", "0,3-1", "1-", "a", "0-2-4", "1.0", "0,0", "0-2,1", "1e3"]
)
def test_bad_seeds(text: str) -> None:
    with pytest.raises(StudyError, match="--seeds"):
        seeds_of(text)


@pytest.mark.parametrize("text", ["0-999999999", "0-99999999999999999999", "5" * 4301, "0-10000", str(2**64)])
def test_seeds_that_would_fill_the_memory(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(StudyError, match="--seeds"):
        seeds_of(text)
    assert time.process_time() - begin < 1


# ---- config.json

PLAN = Plan("algo", ["SMFR"], [0, 1], dataclasses.asdict(registry.get("algo").defaults), versions={"torch": "2"})


def read_plan(folder: Path, content: str | bytes) -> Plan:
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode(errors="replace"))
    return RunFolder(folder).plan()


@given(content=st.text() | st.binary() | json_values.map(json.dumps))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(content="[" * 100_000)
@example(content="")
@example(content="{}")
def test_any_plan(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(StudyError, match=r"config\.json"):
        read_plan(tmp_path, content)


@given(key=st.sampled_from([field.name for field in dataclasses.fields(Plan)]), value=json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@example(key="seeds", value="01")
@example(key="jobs", value=0)
@example(key="models", value={"SMFR": 1})
@example(key="settings", value=[])
def test_plan_with_another_value(tmp_path: Path, key: str, value: Any) -> None:
    """Either refused, or of the types that the engine counts on."""
    plan, _ = attempt(lambda: read_plan(tmp_path, json.dumps(dataclasses.asdict(PLAN) | {key: value})))
    if plan is None:
        return
    for model, seed in plan.trials():
        assert isinstance(plan.owner(model, seed), str) and isinstance(model, str) and isinstance(seed, int)
    assert plan.jobs >= 1 and plan.threads >= 1 and isinstance(plan.device, str)
    _, refusal = attempt(lambda: changed(registry.get(plan.study).defaults, plan.settings))
    assert not refusal or key in ("settings", "study"), refusal


@pytest.mark.parametrize("study", STUDIES)
def test_plan_is_read_back_as_it_was(tmp_path: Path, study: str) -> None:
    config = registry.get(study).defaults
    plan = Plan(study, ["SMFR"], [0], dataclasses.asdict(config))
    read = read_plan(tmp_path, json.dumps(dataclasses.asdict(plan)))
    assert changed(config, read.settings) == config
    # Otherwise no run could be resumed: tuples, which JSON does not have, must not change the owner.
    assert read.owner("SMFR", 0) == plan.owner("SMFR", 0)


def test_owner_tells_trials_and_settings_apart() -> None:
    other = [
        dataclasses.replace(PLAN, study="addmul"),
        *(dataclasses.replace(PLAN, settings={**PLAN.settings, **new}) for new in ({"lr": 3e-4}, {"noisy": True})),
        dataclasses.replace(PLAN, settings={**PLAN.settings, "lr": math.nextafter(PLAN.settings["lr"], 1)}),
    ]
    owners = [PLAN.owner("SMFR", 0), PLAN.owner("SMFR", 1), PLAN.owner("FNN", 0), *(p.owner("SMFR", 0) for p in other)]
    assert len(set(owners)) == len(owners)
    # How often it is saved and by how many jobs it is run says nothing about what is in it.
    same = dataclasses.replace(PLAN, settings={**PLAN.settings, "checkpoint_seconds": 1.0}, jobs=3)
    assert same.owner("SMFR", 0) == owners[0]
