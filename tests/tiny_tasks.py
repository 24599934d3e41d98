"""Documents for every task of ours, in the columns that the real ones have, and a few tasks of other shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARC = {"id": "a", "choices": {"text": ["a star", "the old moon", "rain"], "label": ["A", "B", "C"]}, "answerKey": "B"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_easy_test": [{**ARC, "question": "What lights the night?"}, {**ARC, "question": "What pulls the sea?"}],
    "arc_challenge_test": [{**ARC, "question": "Which one is made of rock, and why?", "answerKey": "A"}],
    "piqa_validation": [
        {"goal": "open a jar", "sol1": "turn the lid", "sol2": "eat the lid, then wait", "label": 0},
        {"goal": "dry a shirt", "sol1": "bury it", "sol2": "hang it up", "label": 1},
    ],
    "sciq_validation": [
        {"question": "What is ice?", "support": " Ice is water.", "correct_answer": "water",
         "distractor1": "salt", "distractor2": "iron", "distractor3": "dry air"},
    ],
    "blimp": [
        {"UID": uid, "sentence_good": f"{name} sees herself.", "sentence_bad": f"{name} see herself."}
        for uid, name in (("causative", "Mary"), ("causative", "The old queen"), ("passive_1", "Ann"))
    ],
    "hellaswag_validation": [
        {"activity_label": "Baking", "ctx_a": "She takes an egg.", "ctx_b": "she", "label": "2",
         "endings": ["sings [title] and goes.", "sleeps.", "breaks  it [step] open.", "is a bird."]},
        {"activity_label": "Rain", "ctx_a": "It rains. He", "ctx_b": "", "label": "0",
         "endings": ["gets wet.", "is an egg.", "flies.", "reads it."]},
    ],
    "winogrande_validation": [
        {"sentence": "Bo fed Al so _ was full.", "option1": "Bo", "option2": "Al", "answer": "2"},
        {"sentence": "The trophy was too big for the box, so the _ stayed out.", "option1": "trophy",
         "option2": "box", "answer": "1"},
    ],
    "mmlu_test": [
        {"question": " What is 1 + 1? ", "subject": "astronomy", "choices": ["1", "2", "3", "4"], "answer": 1},
        {"question": "What is 2 + 2?", "subject": "astronomy", "choices": ["1", "2", "3", "4"], "answer": 3},
        {"question": "Who rules?", "subject": "anatomy", "choices": ["he", "she", "it", "they"], "answer": 0},
    ],
    "mmlu_dev": [
        {"question": f"Is it {n}?", "subject": subject, "choices": ["yes", "no", "so", "lo"], "answer": n % 4}
        for subject in ("anatomy", "astronomy") for n in range(6)
    ],
    "openbookqa_test": [{**ARC, "question_stem": "The tides are pulled by", "answerKey": " B"}],
    "lambada_openai_test": [{"text": "He lost the ring. All night he looked for the ring"}, {"text": "We sang a song"}],
    "boolq_validation": [{"passage": "Cats purr.", "question": "do cats purr", "label": 1}],
}  # fmt: skip


def write(folder: Path) -> Path:
    """The folder, with a file for each of ``ROWS``."""
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
