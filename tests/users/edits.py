"""Makes a script of plain PyTorch train in a job: the changes that docs/start/script.md and docs/guides/data.md say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).parent / "scripts"
Change = tuple[str, str]
"""A text that is there once, and what takes its place."""

_OPTIONS: Final = "    options = parser.parse_args()\n"
_PREPARED: Final = "    model, optimizer = job.prepare(model, optimizer)\n"
_ALWAYS: Final[list[Change]] = [
    ("\nimport torch\n", "\nimport torch\n\nimport shardyard as sy\n"),
    ("    torch.save(model.state", "    if job.chief:\n        torch.save(model.state"),
]
_GPT: Final[list[Change]] = [
    (
        "EPOCHS * len(loader) // options.accumulate",
        "job.steps_total(loader, epochs=EPOCHS, accumulate=options.accumulate)",
    ),
    ("T_max=steps)\n", "T_max=steps)\n    model, optimizer, scheduler = job.prepare(model, optimizer, scheduler)\n"),
    ("for number, (text,) in enumerate(loader):", "for (text,) in job.batches(loader, accumulate=options.accumulate):"),
    ("if (number + 1) % options.accumulate == 0:", "if job.step_due:"),
    ("                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),  # job.clip.norm
]
_DATASET: Final = " in job.batches(dataset, batch_size=options.batch_size, shuffle=False):"
_LOADER: Final = [(" in loader:", " in job.batches(loader):")]
_SAMPLER: Final = "batch_sampler=job.sampler(dataset, batch_size=options.batch_size, shuffle=False)"
CHANGES: Final[dict[str, dict[str, list[Change]]]] = {
    "cnn": {
        "dataset": [(" in loader:", _DATASET)],
        "loader": _LOADER,
        "sampler": [("batch_size=options.batch_size, shuffle=options.shuffle", _SAMPLER)],
    },
    "two_tower": {
        "dataset": [(" in loader:", _DATASET)],
        "loader": _LOADER,
        "sampler": [("batch_size=options.batch_size", _SAMPLER)],
    },
    "gpt": {"loader": _GPT},
}
"""By script and way to read data."""


def edited(name: str, way: str) -> str:
    """The text of scripts/NAME.py, changed. What `main` does with its options is inside of `with sy.connect() as job:`;
    the optimizer is prepared right after it is made."""
    text = (SCRIPTS / f"{name}.py").read_text()
    for before, instead in (*_ALWAYS, *CHANGES[name][way]):
        assert text.count(before) == 1, (before, text)
        text = text.replace(before, instead)
    if "job.prepare" not in text:
        end = text.index("\n", text.index("    optimizer = ")) + 1
        text = text[:end] + _PREPARED + text[end:]
    head, _, rest = text.partition(_OPTIONS)
    body, main, tail = rest.partition("\n\nif __name__")
    inside = "".join(f"    {line}" if line.strip() else line for line in body.splitlines(keepends=True))
    return f"{head}{_OPTIONS}    with sy.connect() as job:\n{inside}{main}{tail}"
