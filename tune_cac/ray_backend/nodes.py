"""Nodes of a Ray cluster: whether each of them sees the study's place."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from analysis.io.layout import Layout
from trainables.errors import UserError

#: Most seconds until every node has looked; a node that is busy starting workers may take long.
_LOOK_S = 60.0


def check_seen_by_all(layout: Layout) -> None:
    """Raise UserError where a node of the cluster does not see the study's folder, or its place in object storage."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if storage := layout.read_info().storage:
        for address, reason in seen_from(nodes, storage):
            raise UserError(
                f"--results must be storage that every node can write, got {storage}, which {address} cannot "
                f"({reason}): give credentials where `ray start` is run, or a role to the nodes"
            )
    elif len(nodes) > 1:
        probe = (layout.root / f".seen-{secrets.token_hex(4)}").resolve()
        probe.touch()
        try:
            blind = [address for address, _ in seen_from(nodes, str(probe))]
        finally:
            probe.unlink(missing_ok=True)
        if blind:
            raise UserError(
                "--results must be a folder that every node of the cluster sees, or a URI such as s3://bucket/studies, "
                f"got {layout.root.parent}, which {', '.join(blind)} does not see"
            )


def seen_from(nodes: list[Mapping[str, Any]], place: str) -> list[tuple[str, str]]:
    """Return the addresses of nodes that do not see a file or a URI, each with the reason."""
    look = ray.remote(num_cpus=0)(_why_unseen)
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(place)
        for node in nodes
    ]
    said: list[str] = ray.get(asked, timeout=_LOOK_S)
    return [(node["NodeManagerAddress"], why) for node, why in zip(nodes, said, strict=True) if why]


def _why_unseen(place: str) -> str:
    from trainables.storage import files_of, is_uri

    if not is_uri(place):
        return "" if Path(place).exists() else "no such file"
    probe = f".seen-{secrets.token_hex(4)}"
    try:
        files = files_of(place)
        files.write(probe, (b"",))
        files.remove(probe)
    except (OSError, UserError) as error:
        return str(error).splitlines()[0][:300]
    return ""
