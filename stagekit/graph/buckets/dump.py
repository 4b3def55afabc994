"""Write the graphs of a bucket split as text files, for people. Only into the folder that was named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx


def dump(
    folder: Path,
    *,
    report: str,
    original: fx.GraphModule,
    split: fx.GraphModule | None,
    buckets: Sequence[fx.GraphModule],
    arguments: Sequence[Sequence[Any]],
) -> None:
    """Write report.txt, original.txt, split.txt, final.txt and bucket_<i>.txt into `folder`, made if need be.

    `split` is None where one bucket holds everything. Arguments are shown as float32[4, 8].
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report + "\n")
    (folder / "original.txt").write_text(_text(original))
    if split is not None:
        (folder / "split.txt").write_text(_text(split))
        (folder / "final.txt").write_text(f"{split}\n")
    for index, (bucket, taken) in enumerate(zip(buckets, arguments, strict=True)):
        shown = ", ".join(shown_value(value) for value in taken)
        (folder / f"bucket_{index}.txt").write_text(f"arguments: {shown}\n{_text(bucket)}")


def shown_value(value: Any) -> str:
    """Return "float32[4, 8]" for a tensor, repr for anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return repr(value)


def _text(gm: fx.GraphModule) -> str:
    return f"{gm.graph}\n"
