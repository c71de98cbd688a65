"""``fastmod study``, ``inspect``, ``live`` and ``show``."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastmod.bench import checkout
from fastmod.data import DataError
from fastmod.runs import options, parallel, tracking
from fastmod.runs.config import StudyError, chosen, seeds_of, settings_of
from fastmod.runs.folder import HERE, RAY, Plan, RunFolder
from fastmod.studies import registry

console = Console()
_errors = Console(stderr=True)


def say(text: str, where: Console = console) -> None:
    """As it is: names of folders may look like markup."""
    where.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def clear_errors(after: str = "") -> Iterator[None]:
    """What the user can mend becomes one line and exit code 2."""
    try:
        yield
    except (StudyError, DataError) as error:
        say(f"error: {error}", _errors)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        say(f"error: {error.strerror or error}{where}{after}", _errors)
        raise typer.Exit(2) from None


def study(
    name: Annotated[str | None, typer.Argument(help="Which study; without one, the list of all.")] = None,
    model: options.Models = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0-4 or 0,3,7.")] = None,
    steps: options.Steps = None,
    epochs: Annotated[int | None, typer.Option(help="Training epochs, where a study counts them (resmix-...).")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat for several.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run that shows how it goes.")] = False,
    noisy: Annotated[bool, typer.Option("--noisy", help="The study's variant with permuted input (algo).")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must not exist or be empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    jobs: options.Jobs = None,
    together: options.Together = None,
    device: options.Device = None,
    track: options.Track = None,
    on: options.On = None,
    address: options.Address = None,
) -> None:
    """Run a paper's experiment; the table shows our figures beside the printed ones. Without a name: a list."""
    if name is None and resume is None:
        console.print(_list())
        return
    from fastmod.runs import engine

    with clear_errors(), parallel.joined() as processes:
        if processes.rank:
            theirs: Any = processes.same(None)  # the plan of the first process
            engine.train_along(theirs)
            return
        if resume is not None:
            others = (model, seeds, steps, epochs, setting, out, jobs, together, device, track)
            if any(option is not None for option in others) or quick or noisy:
                raise StudyError("--resume goes on with a run as it was begun; it takes no other option but --on")
            folder = RunFolder(resume)
            plan = placed(folder.plan(), on, address)
            if name not in (None, plan.study):
                raise StudyError(f"{resume} is a run of {plan.study!r}, not of {name!r}")
            device_of(plan.device)
        else:
            assert name is not None
            text = settings_of(setting or [])
            text |= {"noisy": "true"} if noisy else {}
            text |= {} if epochs is None else {"epochs": str(epochs)}
            plan = make_plan(name, model, seeds, steps, text, quick, jobs or 1, device, track or (), together or 1)
            plan = placed(plan, on, address)
            default = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
            folder = RunFolder.create(out or default, plan)
        if processes.size > 1 and (max(plan.jobs, plan.together) > 1 or plan.on != HERE):
            raise StudyError("torchrun: one trial is trained at a time, so without --jobs, --together and --on")
        processes.same(plan)
        run(folder, plan)


def run(folder: RunFolder, plan: Plan) -> None:
    """Run or resume, with display, table and report."""
    from fastmod.runs import engine, report, signals
    from fastmod.runs.display import Display, table

    again = f"fastmod study --resume {shlex.quote(str(folder.path))}"
    _say_what_is_missing()
    with clear_errors(f"; go on with: {again}"), signals.terminations_raise():
        try:
            with Display(console, len(plan.trials())) as display:
                records = engine.run(folder, plan, display)
            rows = report.finish(folder, plan, records)
        except (engine.Interrupted, KeyboardInterrupt) as stop:
            saved = ", everything is saved" if isinstance(stop, engine.Interrupted) else ""
            say(f"stopped{saved}; go on with:\n  {again}")
            raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None  # as shells count
        console.print(table(registry.get(plan.study).paper, rows, ascii_only=console.options.ascii_only))
        say(f"report: {folder.report_file}")


def _say_what_is_missing() -> None:
    """Packages that a run can do without."""
    wanted = {"figures": "matplotlib", "TensorBoard events": "tensorboard"}
    missing = " and ".join(f"no {what}" for what, package in wanted.items() if find_spec(package) is None)
    if missing:
        say(f'{missing}: pip install "fastmod[study]" adds them')


def live(
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must not exist or be empty.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Watch an SMFR learn the ALGO rule, beside the same model in plain PyTorch; about two minutes on two cores."""
    from fastmod.runs.display import Display, table
    from fastmod.studies.blocks import live as show

    _say_what_is_missing()
    with clear_errors():
        plan = show.plan(seed)
        folder = RunFolder.create(out or Path("runs") / f"live-{datetime.datetime.now():%Y%m%d-%H%M%S}", plan)
        with Display(console, len(plan.trials())) as display:
            rows, summary = show.run(folder, plan, display)
    console.print(table(registry.get(plan.study).paper, rows, ascii_only=console.options.ascii_only))
    say(summary)
    say(f"report: {folder.report_file}")
    say(f"look inside: fastmod inspect {shlex.quote(str(folder.path))}")


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    trial: Annotated[str | None, typer.Option(help="Such as SMFR-s0; default: the first SMFR.")] = None,
) -> None:
    """Draw the routing and gate weights of a trained SMFR as heat maps, one row per task."""
    from fastmod.runs import inspection

    with clear_errors():
        path, lines = inspection.inspect(RunFolder(run), trial)
    for line in lines:
        say(line)
    say(f"heat maps: {path}" if path else 'no heat maps: pip install "fastmod[study]" adds them')


def show(
    task: Annotated[str, typer.Argument(help="Such as pentomino or mnist_parity.")],
    n: Annotated[int, typer.Option(help="How many images.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the images.")] = 0,
    setting: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as placement=jitter.")] = None,
    out: Annotated[Path | None, typer.Option(help="The sheet; default: TASK.png here.")] = None,
) -> None:
    """Draw some images of a task with their labels on one sheet."""
    from fastmod.runs import draw
    from fastmod.tasks import show as sheets

    with clear_errors():
        path = out or Path(f"{task}.png")
        if path.suffix.lower() != ".png":
            raise StudyError(f"--out {path}: expected a name that ends in .png")
        draw.save(sheets.sheet(task, n, seed, settings_of(setting or [])), path)
    say(f"{n} images of {task}, seed {seed}: {path}")


def make_plan(
    name: str,
    wanted_models: list[str] | None,
    seeds: str | None,
    steps: int | None,
    settings: dict[str, str],
    quick: bool,
    jobs: int,
    device: str | None,
    track: Sequence[str] = (),
    together: int = 1,
) -> Plan:
    study = registry.get(name)
    tracking.check(track)
    for model in wanted_models or []:
        if model not in study.models:
            raise StudyError(f"--model {model}: {name} has {', '.join(study.models)}")
    wanted = dict(study.quick) if quick else {}
    # Steps of the command line win over --quick; the rhythm of evaluation follows if they are fewer.
    if steps is not None:
        every = wanted.get("evaluate_every", study.defaults.evaluate_every)
        wanted |= {"steps": steps, "evaluate_every": min(every, steps)}
    config = chosen(study.defaults, wanted | settings)  # at once: only together need they fit each other
    study.prepare(config)
    models = list(dict.fromkeys(wanted_models or study.default_models))
    for model in models:
        study.config_of(config, model)  # refused now if a preset does not fit what was chosen
    return Plan(
        study=name,
        models=models,
        seeds=seeds_of(seeds or ("0" if quick else study.default_seeds)),
        settings=asdict(config),
        device=device_of(device),
        threads=max(1, torch.get_num_threads() // jobs),
        jobs=jobs,
        together=together,
        versions=versions(),
        track=list(dict.fromkeys(track)),
    )


def placed(plan: Plan, on: str | None, address: str | None) -> Plan:
    """The plan, to be run where ``--on`` and ``--address`` say; where they say nothing, as it is."""
    if on not in (None, HERE, RAY):
        raise StudyError(f"--on {on}: expected {HERE} or {RAY}")
    on = on or (RAY if address else plan.on)
    if on == RAY and find_spec("ray") is None:
        raise StudyError('--on ray: the package ray is missing; pip install "fastmod[ray]"')
    if on == RAY and plan.together > 1:
        raise StudyError("--together: a task of Ray is one trial; expected --jobs, or neither, with --on ray")
    if on == HERE and address:
        raise StudyError(f"--address {address}: expected --on {RAY} with it")
    return replace(plan, on=on, address=None if on == HERE else address or plan.address)


def versions() -> dict[str, str]:
    """Of the code that a run is made with."""
    found = {"fastmod": metadata.version("fastmod"), "torch": torch.__version__}
    with contextlib.suppress(checkout.BenchError):  # not a checkout
        sha, dirty = checkout.commit(checkout.root())
        found["commit"] = sha + (" with changes" if dirty else "")
    return found


def device_of(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros((), device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise StudyError(f"--device {name}: {next(iter(str(error).splitlines()), 'not available')}") from None
    return name


def _list() -> Table:
    table = Table("study", "what it asks", "paper", "models", "steps")
    study_column, *_, models_column, _ = table.columns
    study_column.no_wrap, models_column.overflow = True, "fold"  # a name that is cut off cannot be typed
    for name in registry.names():
        try:
            study = registry.get(name)
        except StudyError as error:  # of another package; the others can be run all the same
            table.add_row(name, str(error), "", "", "")
            continue
        table.add_row(name, study.title, study.paper, ", ".join(study.models), study.defaults.length)
    return table
