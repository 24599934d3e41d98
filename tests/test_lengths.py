"""Perplexity by length: the same targets after more and more context, in chunks, and resumed to the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from short_runs import folder_of
from test_train_cli import QUICK, arguments

from gsm.config.check import ConfigError
from gsm.config.command_line import whole_numbers
from gsm.config.compose import compose
from gsm.data.packing import DOCUMENTS
from gsm.evaluation import commands, lengths
from gsm.evaluation.lengths import Lengths, score
from gsm.evaluation.losses import token_losses
from gsm.evaluation.records import Measured, by, difference, mean, over_units
from gsm.experiments.compare import compare
from gsm.intervals import over_windows
from gsm.training.run import train

LONG, SCORED = 37, 9


def windows(count: int = 3, documents: str = "isolated") -> list[dict[str, torch.Tensor]]:
    """Return windows of two documents each. The first token of the second one is a target unless they are isolated."""
    tokens, targets = small.random_tokens(count, LONG), small.random_tokens(count, LONG, seed=2)
    targets[:, 30] = -100 if documents == "isolated" else targets[:, 30]
    number_T = ((torch.arange(LONG) > 30) & (documents != "stream")).long()
    return [{"tokens": tokens[n], "targets": targets[n], "documents": number_T} for n in range(count)]


def test_windows_of_fewer_targets_count_less_where_arms_are_compared():
    keys = {"documents": "isolated", "length": 8, "scope": "scored", "quantity": "loss"}
    first, second = (
        [{**keys, "window": n, "value": loss, "weight": count} for n, (loss, count) in enumerate(pairs)]
        for pairs in ([(4, 2), (6, 6)], [(5, 2), (6, 6)])
    )
    assert difference([first], [second], ["window"]).difference == pytest.approx((5 + 6) / 8 - (4 + 6) / 8)


@pytest.mark.parametrize("case", small.mostly_nightly(["gsm", "baseline", "transformer", "hybrid"], "gsm", "hybrid"))
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_score_is_that_of_one_forward_over_the_end_of_the_window(case: str, documents: str):
    model, window = small.build(case), windows(1, documents)[0]
    for length, chunk in ((SCORED, 4), (20, 7), (LONG, 50)):
        end = {name: value[-length:][None] for name, value in window.items()}
        want = token_losses(model, end)[0, -SCORED:].sum().item()
        (record,) = score(model, window, length, SCORED, whole=False, chunk=chunk)
        assert record["value"] == pytest.approx(want, rel=1e-10)
        assert record["weight"] == SCORED - (documents == "isolated")


def test_whole_scores_the_window_and_its_end():
    model, window = small.build("gsm"), windows(1)[0]
    (part,) = score(model, window, LONG, SCORED, whole=False, chunk=5)
    scored, whole = score(model, window, LONG, SCORED, whole=True, chunk=5)
    batch = {name: value[None] for name, value in window.items()}
    assert scored == {**part, "value": pytest.approx(part["value"], rel=1e-10)}
    want = token_losses(model, batch).sum().item()
    assert whole == {**part, "scope": "whole", "value": pytest.approx(want, rel=1e-10), "weight": LONG - 1}


def test_context_changes_the_loss_only_if_documents_are_not_isolated():
    """All scored targets stand in a document that begins in the shortest length."""
    model, (window,), (stream,) = small.build("gsm"), windows(1, "isolated_all_targets"), windows(1, "stream")
    near = [score(model, window, n, 6, whole=False, chunk=64)[0]["value"] for n in (6, 12, LONG)]
    far = [score(model, stream, n, 6, whole=False, chunk=64)[0]["value"] for n in (6, 12, LONG)]
    assert near == pytest.approx([near[0]] * 3, rel=1e-12)
    assert abs(far[0] - far[1]) > 1e-6 and abs(far[1] - far[2]) > 1e-6


def measured(lengths: list[int], cut: dict[str, Any], file: Path | None = None, **options: Any) -> Measured:
    found = Measured.begun(file, {"windows": len(next(iter(cut.values())))})
    Lengths(lengths=lengths).measure(small.build("gsm"), cut, found, **options)
    return found


def test_the_mean_is_over_targets_and_its_interval_over_windows():
    found = measured([SCORED, LONG], {"isolated": windows()})
    records = found.where(length=LONG, scope="scored")
    middle, low, high = over_units([records])
    assert middle == pytest.approx(sum(record["value"] for record in records) / (3 * (SCORED - 1)))
    each = [record["value"] / record["weight"] for record in records]
    assert min(each) * (1 - 1e-12) <= low < middle < high <= max(each) * (1 + 1e-12)
    assert Lengths(lengths=[SCORED, LONG], documents=["isolated"]).metrics(found)[f"isolated/{LONG}"] == pytest.approx(
        math.exp(middle)
    )


def test_a_window_without_a_scored_target_is_refused():
    """Its mean divided by 0, or its interval was not a number."""
    cut = windows(2)
    cut[1]["targets"][-2:] = -100
    with pytest.raises(ConfigError, match="^scored .*2$"):
        Lengths(lengths=[SCORED], scored=2).measure(small.build("gsm"), {"isolated": cut}, Measured({}))


def test_an_interval_is_that_of_resampled_means():
    draw = torch.Generator().manual_seed(0)
    sums, weights = torch.rand(16, generator=draw) * 100, torch.randint(50, 60, (16,), generator=draw)
    drawn = torch.randint(16, (20_000, 16), generator=draw)
    means = (sums[drawn].sum(1) / weights[drawn].sum(1)).double()
    want = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert over_windows(sums.tolist(), weights.tolist()) == pytest.approx(want, rel=0.03)
    with pytest.raises(ValueError, match="1 sums.*2 weights"):
        over_windows([1.0], [1.0, 2.0])


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_numbers(tmp_path: Path, monkeypatch: Any):
    cut = {documents: windows(2, documents) for documents in ("isolated", "stream")}
    whole = measured([SCORED, 20], cut)

    def first(parts: Iterable[Any], count: int, note: str) -> Iterator[Any]:
        for done, part in enumerate(parts):
            if done == 3:
                raise KeyboardInterrupt
            yield part

    file, computed = tmp_path / "lengths.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        measured([SCORED, 20], cut, file, progress=first)
    monkeypatch.setattr(lengths, "score", lambda *a, **k: computed.append(a) or score(*a, **k))
    assert measured([SCORED, 20], cut, file).records == whole.records
    assert len(computed) == 8 - 3
    measured([SCORED, 20], {"isolated": windows(3)}, file)
    assert len(computed) == 8 - 3 + 6, "another number of windows is another evaluation"


def test_windows_of_another_tokenizer_are_not_set_side_by_side(tmp_path: Path):
    runs = [Measured({"questions": {"text": {"tokenizer": name}}}, {"checkpoint": name}) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"^questions .*text\.tokenizer"):
        Lengths(lengths=[4]).conclude(runs, tmp_path / "lengths")


def test_lengths_are_read_as_a_list_or_a_range():
    assert whole_numbers("512,256") == [256, 512]
    assert whole_numbers("256:1024") == [256, 512, 768, 1024]
    assert whole_numbers("[256:1024:384]") == [256, 640, 1024]
    assert whole_numbers("4096:65536") == list(Lengths().lengths)
    assert commands.choose(["checkpoint=x", "lengths=paper"]) == (Lengths, ["checkpoint=x"])
    for wrong in ("4k", "256:1000", "1:2:3:4", "512:256", "0,1"):
        with pytest.raises(SystemExit, match=f"lengths .*'{wrong}'"):
            commands.call(["checkpoint=x", f"lengths={wrong}"])


def test_a_folder_of_runs_becomes_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overrides = [*arguments(tmp_path), *QUICK, "model/residual=plain"]
    for model, seed in (("gsm", 0), ("gsm", 1), ("baseline", 0)):
        train(compose([*overrides, f"model={model}", f"seed={seed}"]))
    folder = tmp_path / "logs/default"
    commands.call([f"checkpoint={folder}", "lengths=[16,64]", "windows=2", "scored=8"])
    printed = capsys.readouterr().out
    assert (
        "perplexity, isolated_all_targets" in printed
        and "perplexity, stream" in printed
        and "nats minus baseline" in printed
    )
    assert (folder / "lengths.png").read_bytes().startswith(b"\x89PNG")
    compare(str(folder))
    assert "stream, nats minus baseline" in (page := (folder / "comparison.html").read_text()), "the page has it, too"
    assert "2 windows, the last 8 targets of each" in page and "data:image/png;base64" in page
    measure = Lengths(lengths=[16, 64], windows=2, scored=8)
    single = [measure.read(folder_of(folder, f"gsm-seed{seed}"), {"seed": seed}) for seed in (0, 1)]
    losses = [mean(one.where(documents="stream", length=64, scope="scored")) or 0.0 for one in single]
    table = (folder / "lengths.md").read_text()
    assert f" {math.exp(sum(losses) / 2):.4f} [" in table
    metrics = measure.metrics(single[0])
    assert metrics["stream/64"] == pytest.approx(math.exp(losses[0]))
    assert {"stream/16", "isolated_all_targets/64", "stream/full", "held_out"} <= set(metrics)
    for records in by(single[0].where(scope="scored"), "documents", "length").values():
        assert sum(record["weight"] for record in records) == 2 * 8, "every target counts, the paper's 16 x 4,096"
    held_out = [one.where(scope="held out") for one in single]
    targets = sum(record["weight"] for record in held_out[0])
    assert 0.8 < targets / (2 * 64) <= 1, "as many as the windows have"
    assert f" {math.exp(sum(mean(records) or 0.0 for records in held_out) / 2):.4f} " in table
    with pytest.raises(SystemExit, match="windows"):
        commands.call([f"checkpoint={folder}", "lengths=64", "windows=99"])
