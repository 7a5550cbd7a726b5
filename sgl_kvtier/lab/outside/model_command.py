"""`kvtier model`: writes a lab model and says where it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    print_table,
    write_json,
)
from sgl_kvtier.lab.outside import smollm2
from sgl_kvtier.lab.outside.lab_model import models_dir, write_named
from sgl_kvtier.lab.outside.model_shapes import DRAWN, SHAPES

SCHEMA = "kvtier.model/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "name",
        nargs="?",
        choices=(*SHAPES, *DRAWN, smollm2.NAME),
        help="which model to write; without it they are listed",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help=f"where (default {models_dir()}; of drawn models /dev/shm where it has room)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON (- for standard output)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes or lists. Raises KVTierError."""
    if args.json is not None:
        check_target(args.json)
    if args.name is None:
        return _list(args.json)
    path = write_named(args.name, folder=args.folder)
    if args.json is None:
        print(path)
    else:
        facts = (
            {"name": smollm2.NAME, "source": smollm2.WHEEL}
            if args.name == smollm2.NAME
            else json.loads((path / "kvtier_model.json").read_text())
        )
        write_json(
            envelope(SCHEMA, ["kvtier", "model", args.name], {"path": str(path), "model": facts}),
            args.json,
        )
    return 0


def _list(target: str | None) -> int:
    rows = [
        {
            "name": shape.name,
            "family": shape.family,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": f"{shape.heads}/{shape.kv_heads}",
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "context": shape.context,
        }
        for shape in (*SHAPES.values(), *DRAWN.values())
    ]
    rows.append(smollm2.FACTS)
    if target is not None:
        write_json(envelope(SCHEMA, ["kvtier", "model"], {"models": rows}), target)
        return 0
    columns = (
        Column("name", "Model"),
        Column("family", "Family"),
        Column("layers", "Layers"),
        Column("hidden", "Hidden"),
        Column("heads", "Heads/KV"),
        Column("kv_bytes_per_token", "KV per token, float32", format=format_bytes),
        Column("context", "Context", "tokens"),
    )
    print_table(
        Table(
            "Models: random weights, a byte-level tokenizer (lab-gpu: bfloat16, drawn by torch); "
            "smollm2: SmolLM2-135M-Instruct with its own",
            columns,
            rows,
        )
    )
    return 0
