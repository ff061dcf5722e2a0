"""`swarm plan`: how many turns fit into a GPU's memory, and what to start the engine with."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.text import Text

from orchestrator.cli.common import fail
from orchestrator.cli.figures import count, plain
from orchestrator.cli.plan_options import IDEAL_Q8, PRESETS, Given, PlanError, Question, understand
from orchestrator.cli.plan_text import advice_lines, chart, gib, head, table
from orchestrator.cli.styles import PAUSED
from orchestrator.planner.advice import Advice
from orchestrator.planner.chart import ChartError, draw
from orchestrator.planner.plan import Plan, columns


def as_json(question: Question, plans: tuple[Plan, ...], advice: Advice | None) -> dict[str, Any]:
    """The same figures for programs; sizes in bytes."""
    return {
        "name": question.name,
        "memory": {**asdict(question.memory), "kv_budget": question.memory.kv_budget},
        "load": asdict(question.load),
        "cache_types": [
            {
                "cache_type": plan.cache_type,
                "kv": asdict(plan.kv),
                "turn_bytes": plan.turn,
                "running_bytes": plan.running,
                "headroom_bytes": plan.headroom,
                "average_paused": plan.average_paused,
                "long_turn_bytes": plan.long_turn,
                "long_left_bytes": plan.long_left,
                "longest_paused_tokens": plan.longest_paused,
                "columns": [{**asdict(column), "total": column.total} for column in columns(plan)],
            }
            for plan in plans
        ],
        "advice": None
        if advice is None
        else {**asdict(advice), "plan": None, "cache_type": advice.plan.cache_type},
    }


def _per_token(plans: tuple[Plan, ...]) -> str:
    parts = []
    for plan in plans:
        kv = plan.kv
        text = f"{count(kv.token_bytes)} B"
        if kv.window_token_bytes:
            text += f" + {count(kv.window_token_bytes)} B within {count(kv.window_tokens)}"
        if kv.fixed_bytes:
            text += f" + {gib(kv.fixed_bytes)} a turn"
        parts.append(f"{text} ({plan.cache_type})")
    return ", ".join(parts)


def _remarks(question: Question, advice: Advice | None) -> list[str]:
    remarks = []
    shape = question.shape
    if advice is None:
        remarks.append("not even two short turns fit: a smaller model, or more of the memory")
    elif advice.remark is not None:
        remarks.append(advice.remark)
    if shape is not None and shape.training_context is not None:
        longest = max(question.load.context, question.load.long_context)
        if longest > shape.training_context:
            remarks.append(
                f"the model was trained for {count(shape.training_context)} tokens: no slot gets more"
            )
    if shape is not None and (shape.windowed or shape.recurrent):
        what = "sliding-window" if shape.windowed else "recurrent"
        remarks.append(
            f"{what} layers: saved files are larger than this, and a resume may evaluate more again"
        )
    if IDEAL_Q8 in question.cache_types:
        remarks.append("q8 is 1 byte an element; the engine's q8_0 has a scale beside each 32 of them")
    return remarks


def _print(console: Console, question: Question, plans: tuple[Plan, ...], *, text: bool) -> None:
    advice = question.advice()
    console.print(head(question.memory, question.name, _per_token(plans)))
    console.print(table(plans))
    if text:
        console.print(chart(plans, console.width))
        console.print()
    for remark in _remarks(question, advice):
        console.print(Text(f"Note: {remark}", PAUSED))
    if advice is not None:
        console.print(
            Text(
                f"Advice: {advice.decode_slots} decode slots in {advice.engine_slots} engine slots, "
                f"{advice.layout} KV of {count(advice.context)} tokens "
                f"(a turn up to {count(advice.slot_context)}), {advice.plan.cache_type}, "
                f"swap folder of {gib(advice.swap_bytes)}"
            )
        )
        for line in ["", *advice_lines(advice, question.model)]:
            console.print(Text(line), soft_wrap=True)


def _refuse(message: object) -> NoReturn:
    fail(f"plan: {message}")


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def plan(
        model: Annotated[
            str | None, typer.Argument(help="A GGUF file; without it, the options below.")
        ] = None,
        layers: Annotated[str | None, typer.Option(help="Layers of the model.")] = None,
        kv_heads: Annotated[str | None, typer.Option(help="KV heads of a layer.")] = None,
        head_dim: Annotated[str | None, typer.Option(help="Elements of a head.")] = None,
        kv_bytes_per_token: Annotated[
            str | None, typer.Option(help="Instead of these: bytes of KV for each token.")
        ] = None,
        vram: Annotated[str | None, typer.Option(help="The card's memory, such as 16GiB.")] = None,
        usable: Annotated[
            str | None, typer.Option(help="What of it the engine may use: a size or 97%.  [default: 97%]")
        ] = None,
        weights: Annotated[
            str | None, typer.Option(help="Size of the weights.  [default: the GGUF file's]")
        ] = None,
        buffers: Annotated[
            str | None, typer.Option(help="The engine's own buffers.  [default: 0.8GiB]")
        ] = None,
        slots: Annotated[str | None, typer.Option(help="Turns that run at once.  [default: 8]")] = None,
        context: Annotated[
            str | None, typer.Option(help="Average context of a turn in tokens.  [default: 6k]")
        ] = None,
        long: Annotated[
            str | None, typer.Option(help="Context of a long paused turn.  [default: 16k]")
        ] = None,
        cache_type: Annotated[
            list[str] | None,
            typer.Option(help="Type of the KV cache; may be repeated.  [default: f16 and q8_0]"),
        ] = None,
        preset: Annotated[str | None, typer.Option(help=f"A whole machine: {', '.join(PRESETS)}.")] = None,
        chart_path: Annotated[
            Path | None, typer.Option("--chart", metavar="FILE", help="Draw it to a .png or .svg file.")
        ] = None,
        text: Annotated[bool, typer.Option("--text", help="Draw it in the terminal.")] = False,
        json_wanted: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    ) -> None:
        """How many turns fit into a GPU's memory, running and paused, and what to set."""
        values = {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "kv_bytes_per_token": kv_bytes_per_token,
            "vram": vram,
            "usable": usable,
            "weights": weights,
            "buffers": buffers,
            "slots": slots,
            "context": context,
            "long": long,
        }
        try:
            question = understand(Given(model, preset, tuple(cache_type or ()), values))
            plans = question.plans()
            if chart_path is not None:
                draw(plans, chart_path, question.name)
        except (PlanError, ChartError) as error:
            _refuse(error)
        except (OSError, ValueError) as error:
            _refuse(
                f"--chart: {plain(chart_path)} cannot be written: {plain(getattr(error, 'strerror', error))}"
            )
        if json_wanted:
            data = as_json(question, plans, question.advice())
            sys.stdout.write(orjson.dumps(data).decode() + "\n")
            return
        _print(Console(highlight=False), question, plans, text=text)
