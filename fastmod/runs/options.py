"""Options that ``fastmod study`` and ``fastmod sweep`` share."""

from typing import Annotated

import typer
from rich.markup import escape

Models = Annotated[list[str] | None, typer.Option(help="Model to run; repeat for several.")]
Steps = Annotated[int | None, typer.Option(help="Training steps.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Trials at the same time, sharing the threads.")]
Together = Annotated[
    int | None,
    typer.Option(
        min=1, help="Trials of a model that train side by side, in one batched step; they differ in the seed alone."
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: cuda if there is one, else cpu.")]
Track = Annotated[
    list[str] | None, typer.Option(help="Tell tensorboard, wandb, mlflow or trackio too; repeat for several.")
]
#: Brackets are styles to rich.
On = Annotated[str | None, typer.Option(help=escape('Where trials run: here, or ray (pip install "fastmod[ray]").'))]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster; without one, a cluster of this machine.")]
