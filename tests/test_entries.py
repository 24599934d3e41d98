"""What a benchmark measures: names, changed models and trained ones, and that each is measured as what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.config.command_line import in_hydras_words
from gsm.config.compose import compose
from gsm.config.load import build_model, load_model
from gsm.errors import ConfigError
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.training.resume import FORMAT
from gsm_benchmarks import clients, entries, inference, plan, projection, timing, training
from gsm_benchmarks.clients import Ours
from gsm_benchmarks.entries import Model
from gsm_benchmarks.results import read as content

POOL = {"name": "no_pool", "overrides": ["model=baseline", "model.candidate_pool=false"]}
QUICK = {"device": "cpu", "chunk": 32, "steps": 1, "warm_up": 0, "runs": 1, "text": "random", "synthetic_lengths": []}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured."""
    monkeypatch.setattr(timing, "ceilings", lambda device: timing.Ceilings(1e12, 1e11, "float32"))


def trained(folder: Path, *overrides: str, seed: int = 7) -> Path:
    """The folder of a run of size pico that has ended."""
    model = build_model("gsm", "pico", overrides, seed=seed)
    config = compose(["model=gsm", "size=pico", *overrides])
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    (folder / "checkpoints").mkdir(parents=True)
    saved = {"hyper_parameters": {"config": config}, "state_dict": state, "global_step": 1, "format": FORMAT}
    torch.save(saved, folder / "checkpoints/last.ckpt")
    return folder


def test_a_name_is_a_variant_and_a_mapping_may_be_another_one():
    plain, wide, pool = entries.read(["gsm", {"name": "wide", "overrides": ["model.state_size=20"]}, POOL])
    assert plain == Model("gsm") and plain.given == {}
    assert wide.given == {"variant": "gsm", "overrides": ["model.state_size=20"]}
    assert pool.given == {"variant": "baseline", "overrides": ["model.candidate_pool=false"]}
    first, second = wide.build("pico"), pool.build("pico")
    assert isinstance(first, GSM) and first.state_size == 20
    assert isinstance(second, Baseline) and entries.known_cost(pool, "pico") is not entries.known_cost(plain, "pico")
    assert pool.config("pico")["model"]["candidate_pool"] is False


def test_what_a_run_has_trained_is_measured_with_its_weights_values_and_size(tmp_path: Path):
    run = trained(tmp_path / "a/gsm/seed0", "model.state_size=20")
    (model,) = entries.read([{"name": "gsm", "checkpoint": str(tmp_path / "a")}])
    built = model.build("pico", ["model.recompute=true"])
    assert isinstance(built, GSM) and built.state_size == 20 and built.encoder.recompute and built.training
    for name, value in load_model(run).state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    assert {p.device.type for p in model.bare("pico").parameters()} == {"meta"}
    assert entries.one_size([model, Model("baseline")], None, "nano") == "pico"
    (changed,) = entries.read([{"name": "b", "checkpoint": str(run), "overrides": ["model.state_size=30"]}])
    other = changed.build("pico")
    assert isinstance(other, GSM) and other.state_size == 30 and changed.given != model.given


def test_a_size_that_is_not_the_checkpoint_s_is_refused(tmp_path: Path):
    models = entries.read([{"name": "a", "checkpoint": str(trained(tmp_path))}])
    with pytest.raises(ConfigError, match="size is nano, but the checkpoint of 'a' is of size pico: leave out size"):
        entries.one_size(models, "nano", "nano")
    with pytest.raises(
        ConfigError, match="sizes is nano, but the checkpoint of 'a' is of size pico: add pico to sizes"
    ):
        entries.at_sizes(models, ["nano"], "sizes")
    assert entries.at_sizes([*models, Model("gsm")], ["nano", "pico"], "sizes") == [
        ("nano", Model("gsm")), ("pico", models[0]), ("pico", Model("gsm")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, r"models\[0\] is 3: write a name, such as gsm, or \{name: mine"),
        ("gms", "unknown variant 'gms'; did you mean gsm"),
        ({"name": "mine"}, "unknown variant 'mine'"),
        ({"nam": "gsm"}, r"unknown key 'models\[0\].nam'; did you mean name"),
        ({"overrides": []}, r"models\[0\].name is None, but takes one word"),
        ({"name": "a b"}, r"models\[0\].name is 'a b', but takes one word"),
        ({"name": "a", "overrides": "model.state_size=2"}, r"overrides is 'model.state_size=2', but takes a list"),
        ({"name": "a", "overrides": ["model.state_sise=2"]}, "unknown key 'model.state_sise'"),
        (
            {"name": "a", "overrides": ["size=tiny"]},
            "overrides has 'size=tiny': all models are of one size, give size=",
        ),
        ({"name": "gsm", "overrides": ["model=baseline"]}, r"name is gsm, but this is a baseline: give it a name"),
        ({"name": "a", "checkpoint": 3}, r"models\[0\].checkpoint is 3, but takes the path"),
    ],
)
def test_an_entry_that_is_none_is_one_sentence(entry: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        entries.read([entry])


def test_two_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="models names 'gsm' 2 times: give each entry a name of its own"):
        entries.read(["gsm", "baseline", {"name": "gsm", "overrides": ["model.state_size=20"]}])


def test_a_checkpoint_is_one_run_of_the_model_that_its_name_says(tmp_path: Path):
    run = trained(tmp_path / "gsm/seed0")
    with pytest.raises(ConfigError, match="name is baseline, but this is a gsm"):
        entries.read([{"name": "baseline", "checkpoint": str(run)}])
    trained(tmp_path / "gsm/seed1")
    with pytest.raises(ConfigError, match=r"below which there are 2 runs: name one, of .*seed0, .*seed1"):
        entries.read([{"name": "a", "checkpoint": str(tmp_path)}])
    for word in ("model/writer=gated", "data.context=32", "model=baseline", "~model.state_size"):
        with pytest.raises(ConfigError, match="a checkpoint cannot be changed by"):
            load_model(run, overrides=[word])


def test_the_command_line_takes_overrides_inside_of_lists_and_keys_without_their_part():
    given = "models=[gsm,{name: mine, overrides: [model.state_size=64, model.stages=[2,4]]},{name: b, checkpoint: c/d}]"
    words = in_hydras_words(["benchmark=inference", given, "size=tiny", "device=cpu"], "benchmark", "benchmark")
    config = compose(words, script="benchmark")
    assert config["benchmark"]["models"] == [
        "gsm", {"name": "mine", "overrides": ["model.state_size=64", "model.stages=[2,4]"]},
        {"name": "b", "checkpoint": "c/d"},
    ]  # fmt: skip
    assert (config["benchmark"]["size"], config["device"]) == ("tiny", "cpu")
    quoted = ["a=['b=c']", "a=b=c", "a=[1,2]", "+a.b=[c]", 'a="[b=c]"']
    assert in_hydras_words(quoted) == quoted, "what Hydra reads already, or nobody meant, stays as it is"
    assert in_hydras_words(["arms={a: [model/writer=gated], b: []}"]) == ["arms={a: ['model/writer=gated'], b: []}"]


def test_a_changed_override_or_checkpoint_is_measured_again(tmp_path: Path, monkeypatch):
    seen = []

    def fake(cases, served):
        seen.append([case.model for case in cases])
        yield from ((case, {**vars(case), "failed": None}) for case in cases)

    monkeypatch.setattr(inference, "take_turns", fake)
    monkeypatch.setattr(inference.inference_report, "show", lambda path: path)
    first, second = (str(trained(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    for size, run in ((20, first), (20, first), (30, first), (30, second)):
        models = ["gsm", {"name": "a", "overrides": [f"model.state_size={size}"]}, {"name": "b", "checkpoint": run}]
        path = inference.run(models=models, **QUICK, lengths=[40], output=str(tmp_path / "a.json"))
    assert seen == [["gsm", "a", "b"], ["a"], ["b"]]
    rows = content(path)["rows"]
    assert "given" not in rows["gsm pico, 40, read"]
    assert rows["a pico, 40, read"]["given"] == {"variant": "gsm", "overrides": ["model.state_size=30"]}


@pytest.mark.slow
def test_changed_and_trained_models_stand_in_one_table(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(inference.inference_report, "picture", lambda rows: int("no picture"))
    run, output = trained(tmp_path / "run"), tmp_path / "a.json"
    models = [{"name": "fresh", "overrides": ["model=gsm"]}, {"name": "trained", "checkpoint": str(run)}]
    inference.run(models=models, **QUICK, lengths=[40], output=str(output))
    text = output.with_suffix(".md").read_text()
    assert "| fresh against | tokens |" in text and "| trained, read | 40 |" in text
    assert "trained: `model=gsm checkpoint " in text


@pytest.mark.slow
def test_every_benchmark_of_models_takes_a_changed_and_a_trained_one(tmp_path: Path, monkeypatch):
    run = trained(tmp_path / "run")
    models = ["gsm", POOL, {"name": "trained", "checkpoint": str(run)}]
    names = ["gsm", "no_pool", "trained"]
    fake: Callable[..., dict[str, Any]] = lambda job, *_: {"model": job.of.name, "compiled": False, "flops": 1}  # noqa: E731
    monkeypatch.setattr(training, "measure", lambda job, *rest: {**fake(job), "failed": "not now"})
    monkeypatch.setattr(clients, "library", lambda: type("transformers", (), {"__version__": "5.99"}))
    monkeypatch.setattr(clients, "DeepseekV4", lambda geometry, parameters: Ours(Baseline(geometry)))
    monkeypatch.setattr(clients, "DECODED", 1)
    common: dict[str, Any] = {"models": models, "device": "cpu"}
    trainings = content(training.run(**common, output=str(tmp_path / "t.json")))["rows"].values()
    pairs = {"sizes": ["pico"], "contexts": [24], "work": ["prefill"], "rounds": 1}
    beside = content(clients.run(**common, **pairs, output=str(tmp_path / "c.json")))["rows"].values()
    costs = content(projection.run(models=models, lengths=[64], output=str(tmp_path / "p.json")))["rows"].values()
    for rows in (trainings, beside, costs):
        assert [row["model"] for row in rows] == names
        assert [sorted(row.get("given", {})) for row in rows] == [
            [],
            ["overrides", "variant"],
            ["checkpoint", "variant"],
        ]
    assert [row["size"] for row in costs] == ["pico"] * 3


def test_a_plan_of_another_model_has_no_hours_at_the_paper_s_speed(monkeypatch):
    monkeypatch.setattr(plan, "kept", lambda *_: plan.Kept(0, 1.0, 1.0))
    numbers = {"reached": 0.5, "hidden": 0.75, "backward": 0.5, "sequences": 8, "context": 64, "micro_batch": 1}
    assumed = plan.Assumed(1e15, 0.4, 80, 5, 200e9, 50e9, **numbers, per_node=8)
    hours = {}
    for model in entries.read(["transformer", POOL]):
        setting = plan.Setting(model, "pico", 8, "ddp", False, 1, 64)
        row = plan._run(setting, {"pico": 1e6}, assumed)
        hours[row["model"]] = {name for name in row if name.startswith("hours")}
    assert hours == {"transformer": {"hours"}, "no_pool": {"hours", "hours_at_papers_mfu"}}


def test_a_file_of_results_names_variants_and_composes_nothing_else():
    """Overrides may name code, and a file of results may come from anybody."""
    assert entries.of_row({"model": "gsm", "size": "nano"}) == Model("gsm")
    for row in (
        {"model": "gsm", "size": "nano", "given": {"overrides": ["+model.x._target_=os.getcwd"]}},
        {"model": "a", "size": "nano", "given": {"variant": "gsm"}},
        {"model": "gsm", "size": "nano", "given": {"checkpoint": "0" * 64}},
        {"model": "{_target_: os.getcwd}", "size": "nano"},
        {"model": "gsm", "size": "nano,model.x=1"},
    ):
        assert entries.of_row(row) is None


@pytest.mark.parametrize("wrong", ["gsm", []])
def test_models_are_a_list_with_something_in_it(wrong):
    with pytest.raises(ConfigError, match="models is .*, but takes a list of one entry or more"):
        entries.read(wrong)
