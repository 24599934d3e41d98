"""A checkpoint that asks for more than parts of the project, wherever a checkpoint is used."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gsm
from adversary import inside
from adversary.damage import check_weights
from adversary.outcome import Case
from adversary.world import World
from gsm import notebook
from gsm.evaluation.generate import generate
from gsm.evaluation.held_out import HeldOut

# One call of each kind, with {folder} for the folder of the case.
CALLS: tuple[dict[str, Any], ...] = (
    {"_target_": "builtins.open", "file": "{folder}/mark", "mode": "w"},
    {"_target_": "shutil.copyfile", "src": "{folder}/strangers_module.py", "dst": "{folder}/mark"},
    {"_target_": "torch.utils.collect_env.run", "command": "touch {folder}/mark"},
    {"_target_": "posix.system", "command": "touch {folder}/mark"},
    {"_target_": "subprocess.run", "args": ["touch", "{folder}/mark"]},
    {"_target_": "gsm.files.write_json", "path": "{folder}/mark", "content": {}},
    {"_target_": "gsm.config.load.instantiate", "node": {"_target_": "os.system", "command": "touch {folder}/mark"}},
    {"_target_": "gsm.training.run.train", "config": {"folder": "{folder}/mark"}},
    {"_target_": "torch.load", "f": "{folder}/pickle", "weights_only": False},
    {"_target_": "torch.hub.load", "repo_or_dir": "{folder}", "model": "model", "source": "local"},
    {"_target_": "yaml.unsafe_load", "stream": "!!python/object/apply:os.system ['touch {folder}/mark']"},
    {"_target_": "builtins.exec", "_args_": ["open('{folder}/mark', 'w')"]},
    {"_target_": "importlib.import_module", "name": "strangers_module"},
    {"_target_": "runpy.run_path", "path_name": "{folder}/strangers_module.py"},
    {"_target_": "sympy.parsing.sympy_parser.parse_expr", "s": "open('{folder}/mark', 'w')"},
    {"_target_": "hydra.utils.instantiate", "config": {"_target_": "os.system", "command": "touch {folder}/mark"}},
    {"_target_": "hydra.utils.get_object", "path": "os.system"},
    {"_target_": "lightning.Trainer", "default_root_dir": "{folder}/mark"},
    {"_target_": "strangers_module.anything"},
    {"_target_": "gsm.training.callbacks.checkpoints.Latest", "path": "{folder}/mark"},
)
KNOWN = ("gsm.slots.writer.additive.Additive", "gsm.models.gsm.GSM", "gsm.data.recall.Needle")
ODD: tuple[Any, ...] = (
    ["os.system"],
    1,
    None,
    {"_target_": "os.getcwd"},
    ("os", "system"),
    b"os.system",
    "",
    ".",
    "os",
)
REFERENCES = (
    "${oc.env:HOME}",
    "${oc.decode:1}",
    "${oc.create:{a:1}}",
    "???",
    "${hydra:job.name}",
    "${seed}",
    "${root:}",
)
FILES = ("model.safetensors", "optim.safetensors", "config.json", "state.json", "tokenizer.json")
KINDS = ["a call"] * 3 + ["calls", "an odd name", "a reference", "a known part elsewhere", "a pickle", "a place"]
ANY = ("model", "model", "model", "data", "optimizer", "trainer", "callbacks", "")
PARTS = {  # where a use looks, most of the time
    "load_model": ("model",) * 8 + ANY,
    "generate": ("model",) * 8 + ANY,
    "evaluate": (*("model", "data") * 4, *ANY),
    "notebook.load": (*("model", "data") * 4, *ANY),
}


def case(draw: random.Random, world: World) -> Case:
    """A checkpoint with one or several payloads, and one way to use it."""
    use = draw.choice(list(USES))
    what = draw.choice(KINDS)
    made = (
        partial(_pickle, draw, world) if what == "a pickle" else lambda folder: _saved(draw, world, use, what, folder)
    )

    def run(folder: Path) -> None:
        (folder / "strangers_module.py").write_text("import pathlib, os\npathlib.Path('mark').touch()\n")
        (folder / "hubconf.py").write_text("import pathlib\npathlib.Path('mark').touch()\ndef model(): pass\n")
        (folder / "pickle").write_bytes(pickle.dumps(_Runs()))
        sys.path.insert(0, str(folder))
        path = made(folder)
        result = USES[use](path, world, folder)
        if isinstance(result, torch.nn.Module):
            check_weights(result, world)

    names = (*FILES, "checkpoints", "model", "data", "checkpoint", "differs in")
    return Case(run, f"{what}, {use}", names, outside=(world.home / "cache",))


def _saved(draw: random.Random, world: World, use: str, what: str, folder: Path) -> Path:
    """The run's checkpoint, changed in random places."""
    checkpoint = world.checkpoint()
    config = checkpoint["hyper_parameters"]["config"]
    if use == "notebook.load":
        config["data"] = copy.deepcopy(world.needle)
    for _ in range(draw.choice([2, 3, 5]) if what == "calls" else 1):
        if what == "a place":
            _place(draw, config, folder)
        else:
            part = draw.choice(PARTS.get(use, ANY))
            _put(draw, config if not part else config[part], _filled(_payload(draw, what), str(folder)))
    return world.put(checkpoint, folder)


def _payload(draw: random.Random, what: str) -> Any:
    if what == "a known part elsewhere":
        return {"_target_": draw.choice(KNOWN), "_partial_": draw.random() < 0.5}
    if what == "a reference":
        return draw.choice(REFERENCES)
    payload = copy.deepcopy(draw.choice(CALLS))
    if what == "an odd name":
        name = payload["_target_"]
        longer = [f" {name}", f"{name}.__call__", name.replace(".", ".\u200b"), f".{name}", f"gsm.models.gsm.{name}"]
        payload["_target_"] = draw.choice([*ODD, *longer, "gsm.files.os.system", name.upper()])
    for _ in range(draw.choice([0, 0, 1, 2, 4])):
        payload = draw.choice(
            [
                {"_target_": "functools.partial", "_args_": [payload]},
                {"_target_": draw.choice(KNOWN), "options": payload},
                {"deeper": {"still": payload}},
                [payload, [payload]],
                {"_partial_": True, **payload} if isinstance(payload, dict) else [payload],
                {"_recursive_": True, "value": payload},
            ]
        )
    return payload


def _filled(payload: Any, folder: str) -> Any:
    if isinstance(payload, dict):
        return {key: _filled(value, folder) for key, value in payload.items()}
    if isinstance(payload, list):
        return [_filled(value, folder) for value in payload]
    return payload.replace("{folder}", folder) if isinstance(payload, str) else payload


def _put(draw: random.Random, node: Any, payload: Any) -> None:
    """Somewhere below a node, as a value, a further value, a key or an item; or as the keys of a mapping."""
    places = list(_containers(node))
    place = draw.choice(places)
    if isinstance(place, list):
        place.insert(draw.randrange(len(place) + 1), payload)
    elif isinstance(payload, dict) and draw.random() < 0.2:
        place.update(payload)
    elif isinstance(payload, str) and draw.random() < 0.3:
        place[payload] = 1
    else:
        place[draw.choice([*place, "stranger", "_args_", "_recursive_", "self", "__class__"])] = payload


def _containers(node: Any) -> Any:
    if isinstance(node, dict | list):
        yield node
        for value in list(node.values() if isinstance(node, dict) else node):
            yield from _containers(value)


def _place(draw: random.Random, config: dict[str, Any], folder: Path) -> None:
    """A plain path of a stranger's choosing, which nothing may be written to: it lies beside the case's folder."""
    away = str(folder.parent / "strangers-place" / str(draw.randrange(10**9)))
    for key in draw.sample(["cache_dir", "folder", "logs", "path", "callbacks"], draw.choice([1, 2])):
        if key == "cache_dir":
            config["data"]["cache_dir"] = away
        elif key == "path":
            config["data"]["path"] = draw.choice([away, "/proc/self", "/dev", "\0"])
        elif key == "callbacks":
            config["callbacks"]["latest"]["folder"] = away
        else:
            config[key] = away


class _Runs:
    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('mark').touch()",)


def _pickle(draw: random.Random, world: World, folder: Path) -> Path:
    """Write a file of torch.save with a pickle that calls a function, in the place of a checkpoint's file."""
    step = world.put(world.checkpoint(), folder)
    torch.save({"state_dict": {}, "hyper_parameters": {"config": {"model": _Runs()}}}, step / draw.choice(FILES))
    return step


def _train(world: World, folder: Path, *words: str) -> None:
    inside.build(world.config("strange", *words, *(() if words else (f"folder={folder / 'run'}",))))


USES: dict[str, Callable[[Path, World, Path], Any]] = {
    "load_model": lambda path, world, folder: gsm.load_model(path),
    "evaluate": lambda path, world, folder: HeldOut(str(path), sequences=2, device="cpu").evaluate() and None,
    "evaluate other data": lambda path, world, folder: (
        HeldOut(str(path), data="folder", path=str(world.home / "text"), sequences=2, device="cpu").evaluate() and None
    ),
    "generate": lambda path, world, folder: generate(str(path), "a", max_new_tokens=3, device="cpu"),
    "notebook.load": lambda path, world, folder: notebook.load(path.parent.parent)[0],
    "start_from": lambda path, world, folder: _train(world, folder, f"start_from={path}", f"folder={folder / 'new'}"),
    "resume": lambda path, world, folder: _train(world, folder),
    "branch": lambda path, world, folder: _train(
        world, folder, f"start_from={path}", "start_fresh=false", f"folder={folder / 'new'}"
    ),
}
