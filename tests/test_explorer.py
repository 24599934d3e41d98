"""The state explorer shows the numbers of the model, at the right tokens, and runs nothing that a text says.

The tests of the page itself need Chromium, its driver and selenium, and are skipped where one of them is missing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import GEOMETRY, MEMORIES, RATIO, M, W, assert_same, build, mostly_nightly, random_tokens
from torch.nn.functional import cross_entropy

import gsm
from gsm.analysis.attention import attention_map, names_of
from gsm.analysis.interventions import ablations
from gsm.analysis.needles import ask
from gsm.analysis.rollout import TAPS, state_routes
from gsm.config import command_line
from gsm.data.recall import MultiQueryRecall, Needle
from gsm.data.synthetic import Generated
from gsm.data.tokenizer import Tokenizer
from gsm.explorer import Page, explore, facts, page
from gsm.explorer.command import _text as text_of
from gsm.explorer.command import write
from gsm.explorer.facts import WHOLE, gather
from gsm.explorer.words import questions_of, targets_of, visible, words_of

T = 24
TWO = torch.tensor([0] * 9 + [1] * 15)  # documents; the first one has a token too many for its slots
PLAIN = "gsm-residual=plain"
GSMS = [case for case in MEMORIES if case.startswith("gsm") and not case.endswith("=recurrent")]
HOSTILE = (
    '</script><script>window.bad = 1</script><img src=x onerror="window.bad = 1"> \u202egnp.exe & "\' ]]> --> 🙂é\0'
)
TYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}


def packed(file: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a page holds: its JSON, and its arrays."""
    match = re.search(r'<script id="about" type="application/json">(.*?)</script>', file, re.DOTALL)
    assert match
    about, arrays = json.loads(match[1]), {}
    for name, data in re.findall(r'<script id="array-(.*?)" type="text/plain">(.*?)</script>', file):
        kind, *shape = about["arrays"][name]
        arrays[name] = np.frombuffer(base64.b64decode(data), TYPES[kind]).reshape(shape)
    return about, arrays


@pytest.fixture(scope="module")
def made() -> Page:
    """A page of two documents; a plain residual, since hyper-connections take most of the time."""
    return explore(build(PLAIN), random_tokens(1, T)[0], documents=TWO)


# What is computed.


@torch.no_grad()
@pytest.mark.parametrize("case", mostly_nightly(GSMS, "gsm-writer=multi_slot"))
def test_losses_are_those_of_the_model_with_and_without_its_parts(case: str):
    model, token_BT = build(case), random_tokens(1, T)
    text_facts = gather(model, token_BT[0])
    asked = {"the state": "state"}
    for what, without in {WHOLE: None, **ablations(model)}.items():
        name = what if without is None else f"without {next((k for k, v in asked.items() if v == what), what)}"
        if without is None:
            logit_TV = model(token_BT).logits[0]
        else:
            with without():
                logit_TV = model(token_BT).logits[0]
        assert_same(text_facts.loss_T[name][:-1], cross_entropy(logit_TV[:-1], token_BT[0, 1:], reduction="none"), name)
        assert text_facts.loss_T[name][-1].isnan(), "nothing follows the last token"
    assert set(text_facts.loss_T) == {
        WHOLE,
        "without the state",
        *(f"without {n}" for n in ablations(model) if n != "state"),
    }


@torch.no_grad()
@pytest.mark.parametrize(
    "case", mostly_nightly(GSMS, "gsm-encoder_reading=window_only", "gsm-state_reader=state_and_window")
)
def test_readings_are_the_taps(case: str):
    model, token_BT = build(case), random_tokens(1, T)
    text_facts = gather(model, token_BT[0])
    with gsm.record() as seen:
        model(token_BT)
    assert [reading.name for reading in text_facts.readings] == names_of(model)
    for reading in text_facts.readings:
        weight_THE = torch.cat([reading.near_THE, reading.far_THK, reading.sink_TH[..., None]], dim=-1)
        assert torch.equal(weight_THE, seen[f"{reading.name}/weights"][0])
        if f"{reading.name}/top_k" in seen:
            assert torch.equal(reading.chosen_TK, seen[f"{reading.name}/top_k"][0])
        else:
            assert reading.chosen_TK.shape[1] == 0
        assert len(reading.back_E) == reading.near_THE.shape[2], "every near entry has a place"
    assert [reading.layer for reading in text_facts.readings if reading.name.startswith("stage/")] == [2, 4]


def test_slots_hold_tokens_of_the_document_that_selects_them():
    text_facts = gather(build(PLAIN), random_tokens(1, T)[0], TWO)
    assert text_facts.start_F.tolist()[:11] == [0, 2, 4, 6, 9, 11, 13, 15, 17, 19, 21], "token 8 has no slot"
    selected = 0
    for reading in text_facts.readings:
        for row, chosen_K in enumerate(reading.chosen_TK):
            for slot in chosen_K[chosen_K >= 0].tolist():
                tokens = list(range(int(text_facts.start_F[slot]), int(text_facts.start_F[slot]) + RATIO))
                assert {int(TWO[token]) for token in tokens} == {int(TWO[row])} and tokens[-1] <= row
                selected += 1
    assert selected > 100


@torch.no_grad()
def test_a_document_is_attributed_in_company_as_it_is_alone():
    model, token_BT = build(PLAIN), random_tokens(1, T)
    with gsm.record(*TAPS) as together:
        model(token_BT, documents=TWO[None])
    with gsm.record(*TAPS) as alone:
        model(token_BT[:, 9:])
    for name in names_of(model):
        assert_same(attention_map(model, together, name)[9:, 9:], attention_map(model, alone, name), name)
        assert not attention_map(model, together, name)[9:, :9].any(), "nothing is read of the other document"
    assert_same(state_routes(model, together).share_STT[:, 9:, 9:], state_routes(model, alone).share_STT, "shares")


@torch.no_grad()
def test_what_is_read_later_and_retrieved_is_summed_from_the_weights():
    model, token_BT = build(PLAIN), random_tokens(1, T)
    text_facts = gather(model, token_BT[0])
    by_name = {reading.name: reading for reading in text_facts.readings}
    read_T, retrieved_T = torch.zeros(2, T, dtype=torch.float64)
    for row in range(T):
        for layer in range(5, 9):
            near_HE = by_name[f"decoder/{layer}"].near_THE[row]
            for entry in range(M):
                at = row - (M - 1 - entry)
                if 0 <= at < row:
                    read_T[at] += near_HE[:, entry].mean() / 4
        for stage in (1, 2):
            reading = by_name[f"stage/{stage}"]
            for place, slot in enumerate(reading.chosen_TK[row].tolist()):
                if slot >= 0:
                    retrieved_T[slot * RATIO : (slot + 1) * RATIO] += reading.far_THK[row, :, place].mean() / RATIO
    assert_same(text_facts.read_T, read_T, "read")
    assert_same(text_facts.retrieved_T, retrieved_T, "retrieved")


def test_sources_are_the_strongest_of_the_rollout():
    model, token_BT = build(PLAIN), random_tokens(1, T)
    text_facts = gather(model, token_BT[0])
    with torch.no_grad(), gsm.record(*TAPS) as seen:
        model(token_BT)
    total_TT = state_routes(model, seen).total_TT
    for row in range(T):
        there = text_facts.source_TP[row] >= 0
        assert_same(
            text_facts.share_STP[:, row, there].sum(dim=0), total_TT[row, text_facts.source_TP[row, there]], "shares"
        )
        assert_same(
            text_facts.share_STP[:, row, there].sum(), torch.tensor(1.0, dtype=torch.float64), "of a short text all"
        )
    assert_same(text_facts.way_ST.sum(dim=0), torch.ones(T, dtype=torch.float64), "ways")


@pytest.mark.parametrize(
    ("case", "tokens", "key"),
    [
        ("baseline", T, "model"),
        ("gsm-encoder_layer=recurrent", T, "encoder_layer"),
        ("gsm", RATIO, "tokens"),
        ("gsm", facts.LONGEST + 1, "tokens"),
    ],
)
def test_what_cannot_be_shown_is_refused(case: str, tokens: int, key: str):
    with pytest.raises(ValueError, match=f"^{key} "):
        explore(build(case), random_tokens(1, tokens)[0])
    with pytest.raises(ValueError, match=r"^tokens .*\[2, 5\]"):
        explore(build(case), random_tokens(2, 5))


@pytest.mark.parametrize("name", ["documents", "targets"])
def test_what_is_not_of_the_length_of_the_text_is_named(name: str):
    with pytest.raises(ValueError, match=rf"^{name} .*\[3\]"):
        explore(build("gsm"), random_tokens(1, T)[0], **{name: torch.zeros(3).long()})


def test_a_line_at_the_top_may_have_any_value():
    """NaN came into the page as such, and no browser could read it."""
    contents, _ = packed(explore(build("gsm"), random_tokens(1, T)[0], about={"loss": math.nan}).html)
    assert contents["about"]["loss"] == "nan"


# What tokens are called.


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    words = words_of(Tokenizer.plain_bytes(), list("a🙂".encode()) + [256, 0xFF])
    assert [word.text for word in words] == ["a", "", "", "", "🙂", "end of text", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(word.kind for word in words) == "tppptet"


def test_characters_that_hide_or_reorder_others_are_written_out():
    assert (
        visible("a\u202eb\u2066\x1b\r\u2028\u200b\u00ad\x7f") == "a‹U+202E›b‹U+2066›␛␍‹U+2028›‹U+200B›‹U+00AD›‹U+007F›"
    )
    assert visible("é 🙂\n\tשלום 👩\u200d💻") == "é 🙂\n\tשלום 👩\u200d💻"


@pytest.mark.parametrize(
    "task",
    [
        Needle(keys=8, values=7, fillers=6, pairs=3, gap=4),
        Needle(keys=8, values=7, fillers=6, pairs=3, gap=4, wait=3),
        MultiQueryRecall(keys=8, values=7, fillers=6, pairs=3),
    ],
)
def test_questions_are_found_in_the_tokens_alone(task: Needle | MultiQueryRecall):
    for number in range(20):
        drawn = Generated(task, 0, lambda _: 48)[number]
        questions = questions_of(task, drawn["tokens"])
        assert torch.equal(targets_of(questions, drawn["tokens"]), drawn["targets"])
    if isinstance(task, Needle):
        held_out = ask(task, 48, 1)
        questions = questions_of(task, held_out.token_BT[0])
        assert [(question.key, question.needle, question.row) for question in questions] == [
            tuple(map(int, place)) for place in zip(held_out.key_N, held_out.needle_N, held_out.row_N, strict=True)
        ]


# What is in the file.


def test_the_file_holds_the_facts(made: Page):
    about, arrays = packed(made.html)
    assert about["tokens"] == T and about["heads"] == GEOMETRY.heads and about["ratio"] == RATIO
    for reading in made.facts.readings:
        near_THE = (arrays[f"{reading.name}/near"] / 255.0) ** 2
        assert np.abs(near_THE - reading.near_THE.numpy()).max() < 1 / 255
        assert np.array_equal(arrays[f"{reading.name}/chosen"].astype(int) - 1, reading.chosen_TK.numpy())
        assert arrays[f"{reading.name}/sink"].shape == (T, GEOMETRY.heads, 1)
    for number, (name, loss_T) in enumerate(made.facts.loss_T.items()):
        assert about["losses"][number] == name
        assert np.array_equal(arrays[f"loss/{number}"], loss_T.float().numpy(), equal_nan=True)
    assert np.array_equal(arrays["document"], TWO.numpy()) and np.array_equal(arrays["start"], made.facts.start_F)


def test_a_page_with_too_many_weights_has_the_mean_over_heads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "LARGEST", 1000)
    small = explore(build(PLAIN), random_tokens(1, T)[0])
    about, arrays = packed(small.html)
    assert about["heads"] == 1
    mean_TE = small.facts.readings[0].near_THE.mean(dim=1).numpy()
    assert np.abs((arrays["encoder/1/near"][:, 0] / 255.0) ** 2 - mean_TE).max() < 1 / 255


def test_the_file_refers_to_nothing_outside_and_allows_nothing(made: Page):
    file = made.html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', file)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy[1]
    scripts = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", file, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(scripts) == 5 and set(re.findall(r"sha256-([^']+)'", policy[1])) == set(hashes)
    links = re.findall(r"""(?:src|href|action|url)\s*[=(]\s*["']?([^"'\s)>]*)""", re.sub(r"base64.*", "", file))
    assert [link for link in links if link != "data:,"] == []
    assert set(re.findall(r"https?://[^\s\"'`]+", file)) == {"http://www.w3.org/2000/svg"}, "a namespace is no address"
    assert "innerHTML" not in file and "eval(" not in file and "fetch(" not in file


@pytest.fixture(scope="module")
def hostile() -> Page:
    """A page whose text, and all that is said of its checkpoint, would like to be HTML."""
    tokenizer, model = Tokenizer.plain_bytes(), build(PLAIN)
    ids = torch.tensor(tokenizer.encode(HOSTILE))
    text_facts = replace(gather(model, ids % model.vocabulary), token_T=ids)  # a model of so few ids knows no bytes
    return Page(page.render(text_facts, tokenizer, [], {"checkpoint": HOSTILE, "<b>name</b>": "</dl>"}), text_facts)


def test_what_a_text_says_is_no_html(hostile: Page):
    file = hostile.html
    about, _ = packed(file)
    assert "".join(about["words"]) == visible(HOSTILE) and about["about"]["checkpoint"] == HOSTILE
    assert "window.bad" not in re.sub(r'<script id="about".*?</script>', "", file, flags=re.DOTALL)
    assert re.search(r'<script id="about" type="application/json">[^<>&]*</script>', file)
    assert file.count("<script") == 1 + len(about["arrays"]) + 4, "the JSON, arrays and own scripts, no other"
    assert "<img" not in file and "\u202e" not in file


def test_a_notebook_shows_it_in_a_frame_of_its_own(made: Page):
    shown = made._repr_html_()
    assert shown.startswith("<iframe") and 'sandbox="allow-scripts"' in shown and shown.count("<") == 2
    assert gsm.explore is explore


# The command.


def test_the_command_writes_a_page_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, text = tmp_path / "new" / "page.html", "one <two> three " * 9
    command_line.call(write, "explore.py", ["checkpoint=nano", f"text={text}", "tokens=10", f"output={file}"])
    printed = capsys.readouterr().out
    assert re.match(rf"{file}: 10 of \d+ tokens, \d\.\d MB, made in \d+ s\nopen it in a browser; .* file:///", printed)
    about, _ = packed(file.read_text())
    assert len(about["words"]) == 10 and text.startswith("".join(about["words"]))
    assert about["about"]["steps"] == "480" and about["about"]["size"] == "nano"


def test_a_text_with_a_mark_of_the_byte_order_or_bytes_that_are_no_utf8_can_be_written(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("\ufeffZwölf".encode())
    assert text_of("", str(tmp_path / "a.txt")) == "Zwölf"
    assert text_of("a\udcffb", None) == "a\N{REPLACEMENT CHARACTER}b"


def test_the_command_writes_a_page_of_a_needle(tmp_path: Path):
    command_line.call(write, "explore.py", ["checkpoint=needle_gsm", "sequence=3", f"output={tmp_path / 'n.html'}"])
    about, arrays = packed((tmp_path / "n.html").read_text())
    for key, needle, row in about["questions"]:
        assert about["words"][key] == about["words"][needle] and about["words"][key].startswith("K")
        assert about["words"][needle + 1].startswith("V") and np.isfinite(arrays["loss/0"][row])
    assert np.isfinite(arrays["loss/0"]).sum() == len(about["questions"]) > 1, "nothing else is asked"


@pytest.mark.parametrize(
    ("checkpoint", "arguments", "words"),
    [
        ("nano", [], "explore.py needs text= or text_file="),
        ("nano", ["text=a", "text_file=b"], "text_file .*b"),
        ("nano", ["text=a"], ".*nano: tokens .*got 1"),
        ("nano", ["text=abc", "tokens=5000"], "tokens .*got 5000"),
        ("needle_gsm", ["text=abc"], "text .*needle_gsm"),
        ("needle_delta_net", [], ".*needle_delta_net: model .*got delta_net"),
    ],
)
def test_the_command_explains_what_it_cannot_use(checkpoint: str, arguments: list[str], words: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=f"^error: {words}"):
        command_line.call(
            write, "explore.py", [f"checkpoint={checkpoint}", f"output={tmp_path / 'x.html'}", *arguments]
        )
    assert not any(tmp_path.iterdir())


# The page, in a browser.

OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,900"
).split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Chromium and chromedriver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for option in [*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield opened
    opened.quit()


class Driven:
    """A page in the browser."""

    def __init__(self, browser: Any, made: Page, place: Path) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        self.browser, self.facts = browser, made.facts
        browser.get(made.save(place).as_uri())
        WebDriverWait(browser, 60).until(lambda _: self.ask("document.documentElement.dataset.ready"))

    def ask(self, script: str) -> Any:
        """What an expression of the page's own is."""
        return self.browser.execute_script(f"return {script}")

    def press(self, *keys: str) -> None:
        """Keys, where the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()
        self.settle()

    def point(self, token: int) -> None:
        """Moves the pointer over a token."""
        from selenium.webdriver import ActionChains

        element = self.browser.find_element("id", f"token-{token}")
        ActionChains(self.browser).move_to_element(element).perform()
        self.settle()

    def choose(self, control: str, label: str) -> None:
        """Chooses an option of a control."""
        from selenium.webdriver.support.select import Select

        Select(self.browser.find_element("id", control)).select_by_visible_text(label)
        self.settle()

    def settle(self) -> None:
        """Waits until what has changed is drawn."""
        drawn = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.browser.execute_async_script(drawn)

    @property
    def focus(self) -> int:
        """The token in focus, for screen readers."""
        return int(self.ask("document.getElementById('text').getAttribute('aria-activedescendant').slice(6)"))

    @property
    def lit(self) -> set[int]:
        """The tokens that are coloured."""
        return set(self.ask("[...document.querySelectorAll('.token.lit')].map((one) => Number(one.dataset.token))"))

    @property
    def errors(self) -> list[str]:
        """What the page has complained of since this was last asked."""
        return [line["message"] for line in self.browser.get_log("browser")]


@pytest.fixture
def driven(browser: Any, made: Page, tmp_path: Path) -> Driven:
    return Driven(browser, made, tmp_path / "page.html")


def selected(text_facts: facts.Facts, name: str, row: int) -> set[int]:
    """The tokens of the slots that an attention reads at a row."""
    reading = next(reading for reading in text_facts.readings if reading.name == name)
    starts = [int(text_facts.start_F[slot]) for slot in reading.chosen_TK[row].tolist() if slot >= 0]
    return {start + offset for start in starts for offset in range(RATIO)}


def test_pointing_at_a_token_colours_the_slots_that_stages_select_for_it(driven: Driven):
    for token in (20, 6, 15):
        driven.point(token)
        assert driven.focus == token
        assert driven.lit == selected(driven.facts, "stage/1", token) | selected(driven.facts, "stage/2", token)
        loss = float(driven.facts.loss_T["without the state"][token])
        line = (
            "[...document.querySelectorAll('#panel tr')].find((one) => one.textContent.startsWith('without the state'))"
        )
        assert driven.ask(f"{line}.lastChild.textContent").startswith(f"{loss:.2f} "), "of the next token"
    assert driven.errors == []


def test_the_page_is_used_by_keyboard_alone(driven: Driven):
    from selenium.webdriver import Keys

    driven.ask("document.getElementById('tint').focus()")
    driven.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert driven.ask("document.activeElement.id") == "text"
    assert driven.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    driven.press(Keys.HOME)
    assert driven.focus == 0
    driven.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert driven.focus == 1
    driven.press(Keys.END)
    assert driven.focus == T - 1
    driven.point(3)
    assert driven.focus == T - 1, "what the keys have chosen is held"
    driven.press(Keys.ESCAPE)
    driven.point(4)
    assert driven.focus == 4
    assert "Token 4" in driven.ask("document.getElementById('status').textContent")
    driven.press("t", "h", "l")
    chosen = driven.ask("['tint', 'head', 'lens'].map((name) => document.getElementById(name).selectedIndex)")
    assert chosen == [1, 1, 1]
    assert driven.errors == []


def test_a_layer_and_a_head_are_chosen(driven: Driven):
    row = 20
    driven.point(row)
    driven.choose("lens", "layer 3, slots and window")
    window = {at for at in range(row - W + 1, row + 1) if int(TWO[at]) == int(TWO[row])}
    assert driven.lit == selected(driven.facts, "encoder/3", row) | window
    driven.choose("lens", "layer 7")
    assert driven.lit == set(range(row - M + 1, row + 1))
    near_HE = next(reading for reading in driven.facts.readings if reading.name == "decoder/7").near_THE[row]
    for head in (None, 0, GEOMETRY.heads - 1):
        driven.choose("head", "mean over heads" if head is None else f"head {head + 1}")
        strongest = float((near_HE.mean(dim=0) if head is None else near_HE[head]).max())
        legend = driven.ask("document.getElementById('legend').textContent")
        share = float(re.search(r"strongest colour: a weight of ([\d.]+)", legend)[1]) / 100  # type: ignore[index]
        assert share == pytest.approx(strongest, abs=0.01)
    assert driven.errors == []


def test_every_lens_and_tint_draws(driven: Driven):
    for control in ("lens", "tint"):
        for label in driven.ask(f"[...document.getElementById('{control}').options].map((one) => one.textContent)"):
            driven.choose(control, label)
    driven.browser.find_element("css selector", "#help summary").click()
    driven.settle()
    # Found and clicked in one step: what has moved under the pointer may have the panel drawn again in between.
    driven.ask("document.querySelector('#panel .link').click()")
    driven.settle()
    assert driven.errors == []


def test_hostile_text_is_shown_and_not_run(browser: Any, hostile: Page, tmp_path: Path):
    driven = Driven(browser, hostile, tmp_path / "page.html")
    assert driven.ask("typeof window.bad") == "undefined"
    shown = driven.ask("elements.map((one) => one.textContent).join('')").replace("◌", "")
    assert shown == visible(HOSTILE)
    assert driven.ask("document.querySelectorAll('img, b b, #facts b').length") == 0
    for token in range(0, len(driven.facts.token_T), 7):
        driven.point(token)
    assert driven.ask("typeof window.bad") == "undefined" and driven.errors == []
    driven.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'}))")
    assert driven.ask("typeof window.bad") == "undefined", "the policy lets no other script run"
    assert any("Content Security Policy" in line for line in driven.errors)


def test_a_needle_is_marked_where_it_is_asked_for(browser: Any, tmp_path: Path):
    task = Needle(keys=8, values=7, fillers=6, pairs=2, gap=4)
    drawn = Generated(task, 0, lambda _: 32)[0]
    driven = Driven(browser, explore(build(PLAIN), drawn["tokens"], task), tmp_path / "page.html")
    question = questions_of(task, drawn["tokens"])[0]
    assert driven.focus == question.key, "it begins at the first question"
    needle_tokens = driven.ask(
        "[...document.querySelectorAll('.token.sought')].map((one) => Number(one.dataset.token))"
    )
    assert needle_tokens == [question.needle, question.needle + 1]
    assert driven.errors == []


def test_a_frame_of_a_notebook_shows_the_page(browser: Any, made: Page, tmp_path: Path):
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8><body>{made._repr_html_()}")
    browser.get((tmp_path / "notebook.html").as_uri())
    browser.switch_to.frame(0)
    assert browser.execute_script("return elements.length") == T
    assert browser.get_log("browser") == []
    browser.switch_to.default_content()


@pytest.mark.nightly
def test_a_page_of_2048_tokens_opens_within_the_time(browser: Any, tmp_path: Path):
    """The promise is a second on an idle machine. This one may be busy, so the limit is a second and a half."""
    made = explore(build(PLAIN).float(), torch.randint(GEOMETRY.vocabulary, (2048,)))
    times = []
    for number in range(3):
        driven = Driven(browser, made, tmp_path / f"{number}.html")
        times.append(driven.ask("Number(document.documentElement.dataset.ready)"))
    assert min(times) < 1500, f"ms until it could be used: {times}"
    assert driven.errors == []
