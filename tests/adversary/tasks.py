"""Class 13: task files of a stranger, and the documents beside them."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

from adversary.damage import mutate
from adversary.outcome import Case, Wrong
from adversary.world import World
from gsm.evaluation import task_files

SOUND = {
    "documents": "rows",
    "prompt": "Q: {{ q }}",
    "choices": "[a, b]",
    "gold": "right | int",
    "metrics": ["acc", "acc_norm"],
}
ROWS = [{"q": "one?", "a": "x", "b": "yyy", "right": 1}, {"q": "[two]", "a": "größer", "b": "z", "right": 0}]
SECRET = "which nobody may read"
# What a template may be: the first ask for code or attributes, the next for time, the last for memory.
TEMPLATES = (
    "{{ q.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch {folder}/mark') }}",
    "{{ lipsum.__globals__['os'].popen('touch {folder}/mark').read() }}",
    "{{ ''.__class__ }}",
    "{{ q | attr('__class__') }}",
    "{{ '{0.__class__}'.format(q) }}",
    "{% include '../secret.jsonl' %}",
    "{% import 'os' as os %}",
    "{{ open('../secret.jsonl') }}",
    "{{ ('a' ~ 'a' * 40 ~ '!') | regex_replace('(a+)+$', '') }}",
    "{{ ('ab' * 30 ~ 'c') | regex_replace('(a|b|ab)*d', '') }}",
    "{{ ('x' * 5000) | regex_replace('.*.*.*.*y', '') }}",
    "{{ q | regex_replace('(', '') }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 10 ** 10 ** 9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ 100000000 * 'ab' }}",
    "{{ range(10000000000) | list }}",
    "{{ 1 / 0 }}",
    "{{ nothing }}",
    "{{ q[5:][9] }}",
    "{{ '(' * 200 }}",
    "{% raw %}",
    "{{",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ loop }}",
    "{{ caller() }}",
)
ODD = """null|3|-1|[]|{}|''|[1]|true|1.5|{a: 1}|'\\0'|größer|[[[]]]|2001-99-99|<<|? x|[|!!python/name:os.system|!own x
*x|!!python/object/apply:os.getcwd []|!!binary 'x'|!!int x|&x [*x]|!!set {a}|!!timestamp x|1_0|0o9|.nan"""
VALUES = (*ODD.replace("\n", "|").split("|"), "9" * 5000)
PLACES = ("../secret", "../../secret", "/etc/passwd", "..", ".", "", "a/../../secret", "rows\\0", "rows/", "~/x")
PLACES += ("x" * 300, "rows\\\\", "ro\u202ews")
LINES = ("[1]", "3", "null", "{}", '"x"', "nan", "{", '{"q": 3}', '{"self": 1}', '{"q": null}', "[" * 100_000)
LINES += ("9" * 5000,)


def case(draw: random.Random, world: World) -> Case:
    """A task with one to three things that are not as they should be."""
    kinds = draw.sample(list(KINDS), draw.choice([1, 1, 1, 2, 3]))
    state = draw.getstate()

    def run(folder: Path) -> None:
        draw.setstate(state)
        (folder / "data").mkdir()
        (folder / "secret.jsonl").write_text(json.dumps({**ROWS[0], "q": SECRET}))
        (folder / "data/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        (folder / "task.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in SOUND.items()))
        for kind in kinds:
            KINDS[kind](draw, folder)
        found = task_files.samples(task_files.read_task(folder / "task.yaml"), folder / "data")
        if SECRET in repr(found):
            raise Wrong("a document outside of the folder was read")

    return Case(run, ", ".join(kinds), ("task", "rows", "document"), 40)


def _field(draw: random.Random, folder: Path, fields: tuple[str, ...], value: str) -> None:
    """Adds a line to the task, or puts it in another's place."""
    field, path = draw.choice(fields), folder / "task.yaml"
    kept = [line for line in path.read_bytes().splitlines() if not line.startswith(f"{field}:".encode())]
    path.write_bytes(b"\n".join([*kept, f"{field}: {value}\n".encode()]))


def _template(draw: random.Random, folder: Path) -> None:
    text = draw.choice(TEMPLATES).replace("{folder}", str(folder))
    field = draw.choice(["prompt", "description", "choices", "gold"])
    inner = text.removeprefix("{{").removesuffix("}}").strip()
    _field(draw, folder, (field,), json.dumps(text if field in ("prompt", "description") else inner))


def _value(draw: random.Random, folder: Path) -> None:
    fields = (*SOUND, "subtask", "shots", "title", "note", "continuation", "description", "file", "<<")
    _field(draw, folder, fields, draw.choice(VALUES))


def _place(draw: random.Random, folder: Path) -> None:
    name = draw.choice([*PLACES, str(folder / "secret")])
    _field(draw, folder, ("documents",), f'"{name}"')
    if draw.random() < 0.3:
        _field(draw, folder, ("shot_documents",), f'"{draw.choice(PLACES)}"')
        _field(draw, folder, ("shots",), draw.choice(["1", "2", "100000000000", "-1"]))


def _bytes(draw: random.Random, folder: Path) -> None:
    path = draw.choice([folder / "task.yaml", *sorted((folder / "data").iterdir())])
    path.write_bytes(mutate(draw, path.read_bytes() or b"\0")[1])


def _line(draw: random.Random, folder: Path) -> None:
    with (folder / "data/rows.jsonl").open("a") as file:
        file.write(f"{draw.choice(LINES)}\n")


def _bomb(draw: random.Random, folder: Path) -> None:
    """Few bytes that become many: of aliases, or of a packed line."""
    if draw.random() < 0.5:
        layers = [f"x{n}: &x{n} [{','.join([f'*x{n - 1}' if n else 'lol'] * 9)}]" for n in range(12)]
        (folder / "task.yaml").write_text("\n".join([*layers, "documents: *x11", "metrics: [acc]"]))
        return
    (folder / "data/rows.jsonl").unlink(missing_ok=True)
    packed = lzma.compress(b'{"q": "' + b"a" * (64 << 20) + b'"}\n')
    chosen = {"xz": packed, "half": packed[:100], "gzip": gzip.compress(b"{}"), "noise": draw.randbytes(200)}
    (folder / "data/rows.jsonl.xz").write_bytes(chosen[draw.choice(list(chosen))])


def _subtasks(draw: random.Random, folder: Path) -> None:
    rows = [{**row, "kind": draw.choice(["../../x", 1.0, 1, None, [1], {"a": 1}, "a/b", "\0", "ok"])} for row in ROWS]
    (folder / "data/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _field(draw, folder, ("subtask",), "kind")


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "a template": _template,
    "a value": _value,
    "a place": _place,
    "bytes": _bytes,
    "a line": _line,
    "a bomb": _bomb,
    "subtasks": _subtasks,
}
